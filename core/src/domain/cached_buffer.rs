//! Buffers that are registered through the cache without `unsafe`.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{
    DomainInner,
    buffer::OwnedBuffer,
    cached::{CachedRegion, RegionCache},
};
use crate::{Access, AddressRange, Error, ErrorKind, Rejected, Result};

/// A buffer whose parts are registered through a [`RegionCache`], as often as wanted, without
/// `unsafe`.
///
/// The memory stays allocated until every region of it is deregistered, also if the value is
/// dropped before. The bytes are reached by copies, as those of
/// [`OwnedRegion`](super::OwnedRegion). [`CachedBuffer::close`] gives the buffer back.
///
/// Hold the lease of a region until the transfer that uses it has completed, or for as long as
/// peers use its key. Without a lease the cache may deregister the region at any time.
///
/// Threads share it by reference, or in an `Arc`.
///
/// ```no_run
/// use hmem_core::{Access, Domain, RemoteKey, Result};
///
/// /// Lends a buffer to a peer, which gets the keys and fills the buffer.
/// fn fill(domain: &Domain, lend: impl FnOnce(&[RemoteKey])) -> Result<Vec<u8>> {
///     let buffer = domain.cache()?.own(vec![0_u8; 1 << 20])?;
///     let lease = |chunk: u64| buffer.get_or_register(chunk << 16, 1 << 16, Access::REMOTE_WRITE);
///     let leases = (0..16).map(lease).collect::<Result<Vec<_>>>()?;
///     let keys = leases.iter().map(|region| region.view().key()).collect::<Result<Vec<_>>>()?;
///     lend(&keys);
///     // The peer is done with the keys.
///     drop(leases);
///     Ok(buffer.close()?)
/// }
/// ```
pub struct CachedBuffer<B: OwnedBuffer> {
    /// Before the parts: what it invalidates is the memory's.
    hold: Hold,
    parts: Arc<B::Parts>,
}

/// The place of a buffer among those that the regions of a cache keep alive.
struct Hold {
    cache: RegionCache,
    range: AddressRange,
    place: (u64, u64),
    /// Counts as an object of the domain, which closes after this.
    domain: Arc<DomainInner>,
}

/// The number of times that a close yields to other threads that deregister.
const CLOSE_TRIES: u32 = 64;

impl RegionCache {
    /// Takes a buffer whose parts are then registered through this cache without `unsafe`.
    ///
    /// Regions that the cache has of this memory are invalidated.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for an empty buffer.
    /// - [`ErrorKind::BadState`] in a forked child.
    ///
    /// The buffer comes back with the error.
    pub fn own<B: OwnedBuffer>(&self, buffer: B) -> Result<CachedBuffer<B>, Rejected<B>> {
        let domain = Arc::clone(self.domain());
        if let Err(error) = domain.process.check("own") {
            return Err(Rejected::new(buffer, error));
        }
        let parts = buffer.into_parts();
        let (range, iface) = (B::range(&parts), B::iface(&parts));
        if range.is_empty() {
            let error = Error::new(ErrorKind::ZeroLength, "own")
                .remedy("give a buffer of at least one byte");
            return Err(Rejected::new(B::from_parts(parts), error));
        }
        let parts = Arc::new(parts);
        let place = self.held().add(range, iface, Arc::clone(&parts) as _);
        // Regions from before this line do not keep the buffer alive.
        self.invalidate(range);
        Ok(CachedBuffer { hold: Hold { cache: self.share(), range, place, domain }, parts })
    }
}

impl<B: OwnedBuffer> CachedBuffer<B> {
    /// Returns a region that covers `len` bytes from `offset` with at least the rights `access`: a
    /// cached one, or a new one.
    ///
    /// With [`CacheAttr::growth`](super::CacheAttr::growth) a new region may grow to the buffer,
    /// and never beyond it.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the buffer.
    /// - The errors of [`Domain::register`](super::Domain::register).
    /// - [`ErrorKind::BadState`] in a forked child.
    #[inline]
    pub fn get_or_register(
        &self,
        offset: u64,
        len: u64,
        access: Access,
    ) -> Result<CachedRegion<'_>> {
        let whole = self.hold.range;
        let range = whole.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "get_or_register")
                .context("offset", offset)
                .context("length", len)
                .context("buffer", whole)
                .remedy("offset + length must lie in the buffer")
        })?;
        self.hold.cache.get_or_register_held(range, access, whole)
    }

    /// Returns the memory of the buffer.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.hold.range
    }

    /// Copies bytes out. Bytes that the NIC writes meanwhile come out in any mixture. Those of a
    /// completed transfer are all there.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; the error of the device otherwise.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        B::read(&self.parts, offset, into)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; the error of the device otherwise.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        B::write(&self.parts, offset, from)
    }

    /// Deregisters every region of the buffer and gives the buffer back.
    ///
    /// # Errors
    /// - [`ErrorKind::Busy`] with the buffer back, still working, as long as a lease, a sub-region
    ///   or a window of its memory is left.
    /// - [`ErrorKind::BadState`] in a forked child.
    pub fn close(self) -> Result<B, Rejected<Self>> {
        let hold = &self.hold;
        if let Err(error) = hold.domain.process.check("close") {
            return Err(Rejected::new(self, error));
        }
        // Once no region of the cache has a byte of the buffer and none is being registered, only
        // a call on `self` registers another.
        let removed = hold.end_regions() && {
            hold.cache.held().remove(hold.place);
            // Uncached regions, and those that the provider refused to deregister, share it.
            Arc::strong_count(&self.parts) == 1 || {
                let iface = B::iface(&self.parts);
                hold.cache.held().put(hold.place, hold.range, iface, Arc::clone(&self.parts) as _);
                false
            }
        };
        if !removed {
            let error = Error::new(ErrorKind::Busy, "close")
                .context("buffer", hold.range)
                .remedy("drop the leases, sub-regions and windows of its memory first");
            return Err(Rejected::new(self, error));
        }
        let Self { hold, parts } = self;
        drop(hold);
        Ok(B::from_parts(Arc::into_inner(parts).expect("nobody else shares them")))
    }
}

impl Hold {
    /// Deregisters the cached regions that have a byte of the buffer. Returns false if some are
    /// left.
    fn end_regions(&self) -> bool {
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        self.cache.invalidate_with_callback(self.range, move || end.store(true, Ordering::Release));
        self.cache.reclaim();
        // Another thread that deregistered the last of them may not have come to the callback yet.
        (0..CLOSE_TRIES).any(|_| {
            ended.load(Ordering::Acquire) || {
                std::thread::yield_now();
                false
            }
        })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.domain.process.is_current() {
            // The regions are the parent's, and its threads may have held the locks at the fork.
            // The copy of the cache's list keeps the memory.
            return;
        }
        let (held, place) = (Arc::clone(self.cache.held()), self.place);
        // A region that is being registered, with this memory merged into it, still finds the
        // buffer in the list.
        self.cache.invalidate_with_callback(self.range, move || held.remove(place));
    }
}

impl<B: OwnedBuffer> fmt::Debug for CachedBuffer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedBuffer").field("range", &self.hold.range).finish_non_exhaustive()
    }
}
