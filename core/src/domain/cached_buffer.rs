//! Buffers whose parts are registered through the cache without `unsafe`.

#![allow(unsafe_code, reason = "copies bytes of memory that the buffer holds")]

use std::{
    fmt,
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    time::Duration,
};

use super::{
    DomainInner,
    cached::{Around, CachedRegion, RegionCache},
    held::BufferId,
    memory::Memory,
    terms::Promise,
};
use crate::{Access, AddressRange, Error, ErrorKind, Rejected, Result};

/// A buffer whose parts are registered through a [`RegionCache`] without `unsafe`.
///
/// The memory stays allocated until all its regions are deregistered, even if the `CachedBuffer` is
/// dropped before. [`CachedBuffer::read`] and [`CachedBuffer::write`] copy bytes, and
/// [`CachedBuffer::close`] returns the buffer. Hold each lease as long as [`CachedRegion`] says.
///
/// ```no_run
/// use hmem_core::{Access, Domain, RemoteKey, Result};
///
/// /// Lets a peer fill a buffer. `send_keys` sends the keys and waits until the peer is done.
/// fn fill(domain: &Domain, send_keys: impl FnOnce(&[RemoteKey])) -> Result<Vec<u8>> {
///     let buffer = domain.cache()?.own(vec![0_u8; 1 << 20])?;
///     let lease = |chunk: u64| buffer.get(chunk << 16, 1 << 16, Access::REMOTE_WRITE);
///     let leases = (0..16).map(lease).collect::<Result<Vec<_>>>()?;
///     let keys = leases.iter().map(|region| region.view().key()).collect::<Result<Vec<_>>>()?;
///     send_keys(&keys);
///     drop(leases);
///     Ok(buffer.close()?)
/// }
/// ```
pub struct CachedBuffer<M: Memory> {
    /// The buffer's entry in the cache's list of buffers. Fields are dropped in the order of their
    /// declaration: `listing` first invalidates the cached regions, and then `parts` may free the
    /// memory.
    listing: Listing,
    parts: Arc<M::Parts>,
}

/// The entry of a buffer in its cache's [`HeldBuffers`](super::held::HeldBuffers). Dropping the
/// value removes the entry once the regions of the buffer's memory are deregistered.
struct Listing {
    cache: RegionCache,
    range: AddressRange,
    promise: Promise,
    id: BufferId,
    /// A reference to the domain, so that [`Domain::close`](super::Domain::close) fails while the
    /// buffer exists.
    domain: Arc<DomainInner>,
}

/// The longest time that a close waits for other threads to end their leases.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(100);

impl RegionCache {
    /// Takes ownership of a buffer, so that its parts can be registered without `unsafe`.
    ///
    /// Cached regions that overlap the buffer's memory are invalidated. [`CachedBuffer`] has an
    /// example.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for an empty buffer.
    /// - [`ErrorKind::Unsupported`] for a dma-buf and for a list of several ranges.
    /// - [`ErrorKind::BadState`] in a forked child.
    ///
    /// The error returns the buffer.
    pub fn own<M: Memory>(&self, buffer: M) -> Result<CachedBuffer<M>, Rejected<M>> {
        let domain = Arc::clone(self.domain());
        if let Err(error) = domain.process.check("own") {
            return Err(Rejected::new(buffer, error));
        }
        let parts = buffer.into_parts();
        let place = M::place(&parts);
        let (iface, promise) = (place.owned_iface(), place.promise());
        let range = place.range().filter(|range| !range.is_empty());
        let Some(range) = range else {
            let error = match place.len() {
                0 => Error::new(ErrorKind::ZeroLength, "own")
                    .remedy("pass a buffer of at least one byte"),
                _ => Error::new(ErrorKind::Unsupported, "own")
                    .context("why", "the cache finds memory by one range of addresses")
                    .remedy("register a dma-buf or a list of ranges by Domain::register"),
            };
            return Err(Rejected::new(M::from_parts(parts), error));
        };
        let parts = Arc::new(parts);
        let id = self.held().add(range, iface, Arc::clone(&parts) as _);
        // Regions that were registered before the call of `add` do not keep the buffer allocated,
        // so they are invalidated.
        self.invalidate(range);
        let listing = Listing { cache: self.share(), range, promise, id, domain };
        Ok(CachedBuffer { listing, parts })
    }
}

impl<M: Memory> CachedBuffer<M> {
    /// Returns a region of `len` bytes from `offset` with at least the rights `access`.
    ///
    /// The region is a cached one if the cache has a match, and a new one otherwise. With
    /// [`CacheAttr::growth`](super::CacheAttr::growth) a new region may grow up to the whole
    /// buffer, and never beyond it.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the buffer.
    /// - The errors of [`Domain::register`](super::Domain::register).
    /// - [`ErrorKind::BadState`] in a forked child.
    #[inline]
    pub fn get(&self, offset: u64, len: u64, access: Access) -> Result<CachedRegion<'_>> {
        let whole = self.listing.range;
        let range = whole.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "get")
                .context("offset", offset)
                .context("length", len)
                .context("buffer", whole)
                .remedy("name bytes inside the buffer")
        })?;
        let around = Around { promise: self.listing.promise, within: Some(whole) };
        self.listing.cache.get_around(range, access, around)
    }

    /// Returns the address range of the buffer.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.listing.range
    }

    /// Fills `into` with the bytes of the buffer from `offset` on.
    ///
    /// All bytes of a completed transfer are visible. Bytes that the NIC is writing during the call
    /// are read old or new, each independently.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the buffer.
    /// - [`ErrorKind::Unsupported`] for the memory of a [`Raw`](super::Raw). Copy through the owner
    ///   of the memory instead.
    /// - The error of the device that the memory belongs to.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { M::place(&self.parts).read(offset, into) }
    }

    /// Copies `from` to the bytes of the buffer from `offset` on.
    ///
    /// # Errors
    /// - The errors of [`CachedBuffer::read`].
    /// - [`ErrorKind::AccessDenied`] for read-only memory.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { M::place(&self.parts).write(offset, from) }
    }

    /// Deregisters every region of the buffer and returns the buffer.
    ///
    /// The call waits for the deregistrations that other threads have begun, and then up to 100 ms
    /// for the end of all uses of the regions. A region is in use by a lease, a sub-region or a
    /// window. It is also in use by a transfer without a descriptor until the completion is read,
    /// and for a moment by a lookup of other memory in the same page.
    ///
    /// # Errors
    /// - [`ErrorKind::Busy`] if a region is still in use after 100 ms, or if the provider refuses
    ///   to deregister a region. End the uses of the regions and retry. Until then the buffer
    ///   works, but its next lookup registers again.
    /// - [`ErrorKind::Busy`] in the drop of memory that the cache is deregistering on this thread,
    ///   because this deregistration cannot end before the call.
    /// - [`ErrorKind::BadState`] in a forked child.
    ///
    /// The error returns the buffer as a `CachedBuffer`.
    pub fn close(self) -> Result<M, Rejected<Self>> {
        let listing = &self.listing;
        if let Err(error) = listing.domain.process.check("close") {
            return Err(Rejected::new(self, error));
        }
        // After `end_regions`, the cache has no region with a byte of the buffer. Only a call on
        // `self` could register another.
        let removed = listing.end_regions() && {
            let held = listing.cache.held();
            held.remove(listing.id);
            // An uncached region, or one that the provider refused to deregister, may hold another
            // reference to the parts.
            Arc::strong_count(&self.parts) == 1 || {
                let (range, iface) = (listing.range, M::place(&self.parts).owned_iface());
                held.add_with_id(listing.id, range, iface, Arc::clone(&self.parts) as _);
                false
            }
        };
        if !removed {
            let error = Error::new(ErrorKind::Busy, "close")
                .context("buffer", listing.range)
                .remedy("drop the leases, sub-regions and windows of its memory, then close again");
            return Err(Rejected::new(self, error));
        }
        let Self { listing, parts } = self;
        drop(listing);
        Ok(M::from_parts(Arc::into_inner(parts).expect("the count was 1, and no region shares it")))
    }
}

impl Listing {
    /// Deregisters the cached regions that overlap the buffer. Returns false if one of them is
    /// still registered after [`CLOSE_TIMEOUT`].
    fn end_regions(&self) -> bool {
        let (sender, ended) = mpsc::channel::<()>();
        self.cache.invalidate_with_callback(self.range, move || drop(sender));
        self.cache.reclaim();
        // The end of the last lease wakes the cache's thread, which deregisters the region and runs
        // the callback. The callback disconnects the channel.
        ended.recv_timeout(CLOSE_TIMEOUT) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for Listing {
    fn drop(&mut self) {
        if !self.domain.process.is_current() {
            // The regions belong to the parent, and a thread of the parent may have held the locks
            // at the fork. The child's copy of the list keeps the memory allocated.
            return;
        }
        let (held, id) = (Arc::clone(self.cache.held()), self.id);
        // The buffer stays in the list until the callback runs, because a registration in progress
        // may include its memory and then takes a reference from the list.
        self.cache.invalidate_with_callback(self.range, move || held.remove(id));
    }
}

impl<M: Memory> fmt::Debug for CachedBuffer<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBuffer").field("range", &self.listing.range).finish_non_exhaustive()
    }
}
