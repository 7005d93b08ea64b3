//! Registration of borrowed memory while a closure runs.
//!
//! The closure gets the region by reference, so that it cannot call `std::mem::forget` on the
//! region. A function that returned a region with a borrow of the memory would be unsound: if the
//! caller forgot the region, the memory would stay registered after the borrow has ended.

#![allow(unsafe_code, reason = "borrowed memory by its addresses, and copies of its bytes")]

use std::sync::Arc;

use super::{
    Domain,
    device_buffer::DeviceBuffer,
    memory::{Memory, Place, Raw},
    region::MemoryRegion,
    region_slice::RegionSlice,
    region_state::KeepAlive,
    request::{RegionRequest, Source},
    terms::Terms,
};
use crate::{Access, Address, AddressRange, Decision, Error, ErrorKind, MrMode, RemoteKey, Result};

/// Memory that [`Domain::scope`] registers while a closure runs.
///
/// Implemented for mutable references to slices, arrays and vectors of bytes, for `&[u8]`, which
/// NICs only read, for `&DeviceBuffer`, and for a [`Raw`].
///
/// # Safety
/// While the value lives, its place must be valid memory. If NICs may write to the place, no Rust
/// reference to the memory may exist except the value itself. If NICs only read the place, no
/// mutable reference to the memory may exist.
pub unsafe trait Borrowed {
    /// Returns the location of the memory.
    fn place(&mut self) -> Place<'_>;
}

fn writable(bytes: &mut [u8]) -> Place<'static> {
    let range = AddressRange::checked(Address::of_ptr(bytes.as_mut_ptr()), bytes.len() as u64)
        .expect("a slice ends inside the address space");
    Place::Host { range, writable: true }
}

macro_rules! borrowed_bytes {
    ($($bytes:ty $(, $n:ident)?;)+) => {$(
        // SAFETY: the mutable reference lends its bytes to the place while it lives.
        unsafe impl $(<const $n: usize>)? Borrowed for &mut $bytes {
            fn place(&mut self) -> Place<'_> {
                writable(&mut self[..])
            }
        }
    )+};
}

borrowed_bytes! {
    [u8];
    [u8; N], N;
    Vec<u8>;
}

// SAFETY: nobody writes to the bytes while the shared reference lives, and NICs only read them.
unsafe impl Borrowed for &[u8] {
    fn place(&mut self) -> Place<'_> {
        Place::Host { range: AddressRange::of(self), writable: false }
    }
}

// SAFETY: the allocation lives as long as the reference. No references into it exist, since
// addresses of an iface are not pointers.
unsafe impl Borrowed for &DeviceBuffer {
    fn place(&mut self) -> Place<'_> {
        DeviceBuffer::place(self)
    }
}

// SAFETY: the promise of `Raw::new` covers the place.
unsafe impl Borrowed for Raw {
    fn place(&mut self) -> Place<'_> {
        <Self as Memory>::place(self)
    }
}

/// The region of borrowed memory in the closure of [`Domain::scope`].
#[derive(Debug)]
pub struct Scoped<'a> {
    region: &'a MemoryRegion,
    place: Place<'a>,
}

impl Scoped<'_> {
    /// Returns the remote key, to send to a peer.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::key`].
    pub fn key(&self) -> Result<RemoteKey> {
        self.region.key()
    }

    /// Returns the address range of the borrowed memory.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.region.range()
    }

    /// Returns the path by which the NIC reaches the memory.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::decision`].
    pub fn decision(&self) -> Result<&Arc<Decision>> {
        self.region.decision()
    }

    /// Returns a part of the region for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the part reaches outside the region.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::of(self.region, offset, len)
    }

    /// Fills `into` with the bytes of the region from `offset` on.
    ///
    /// Bytes that the NIC is writing during the call are read old or new, each independently.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the region.
    /// - [`ErrorKind::Unsupported`] for the memory of a [`Raw`]. Copy through the owner of the
    ///   memory instead.
    /// - The error of the device that the memory belongs to.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: the scope borrows the memory of the place while this value lives.
        unsafe { self.place.read(offset, into) }
    }

    /// Copies `from` to the bytes of the region from `offset` on.
    ///
    /// # Errors
    /// - The errors of [`Scoped::read`].
    /// - [`ErrorKind::AccessDenied`] for a shared slice.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the scope borrows the memory of the place while this value lives.
        unsafe { self.place.write(offset, from) }
    }
}

/// A guard that closes the region of a scope when the closure of the scope returns or panics.
struct CloseOnExit(Option<MemoryRegion>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let Some(region) = self.0.take() else { return };
        if let Err(rejected) = region.close() {
            // Returning would end the borrow while a peer can still write to the memory.
            tracing::error!(error = %rejected.error, "cannot close a scoped region: aborting");
            std::process::abort();
        }
    }
}

/// A guard that aborts the process if a registration panics. After the panic, the memory may be
/// registered, and unwinding would end the borrow that protects it.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        tracing::error!("the registration of borrowed memory panicked: aborting");
        std::process::abort();
    }
}

impl Domain {
    /// Registers borrowed memory while `body` runs.
    ///
    /// The region is closed before this returns, even if `body` panics.
    ///
    /// ```no_run
    /// use hmem_core::{Access, Domain, RemoteKey, Result};
    ///
    /// /// `serve` sends the key to a peer and waits until the peer is done.
    /// fn receive(domain: &Domain, serve: impl Fn(&RemoteKey)) -> Result<[u8; 64]> {
    ///     let mut bytes = [0; 64];
    ///     domain.scope(&mut bytes, Access::REMOTE_WRITE, |region| {
    ///         region.key().map(|key| serve(&key))
    ///     })??;
    ///     Ok(bytes)
    /// }
    /// ```
    ///
    /// # Aborts
    /// The call aborts the process if the provider cannot close the region, or panics while it
    /// registers. Otherwise the borrow would end while peers can still write to the memory.
    ///
    /// # Errors
    /// The errors of [`Domain::register`], and [`ErrorKind::BadState`] in ENDPOINT mode. After an
    /// error `body` has not run.
    pub fn scope<B: Borrowed, R>(
        &self,
        mut memory: B,
        access: Access,
        body: impl FnOnce(&Scoped<'_>) -> R,
    ) -> Result<R> {
        let place = memory.place();
        let guard = self.register_scope(&place, access).map_err(|error| error.of_call("scope"))?;
        let region = guard.0.as_ref().expect("only the drop of the guard takes the region");
        Ok(body(&Scoped { region, place }))
    }

    fn register_scope(&self, place: &Place<'_>, access: Access) -> Result<CloseOnExit> {
        if self.inner.effective.contains(MrMode::ENDPOINT) {
            return Err(Error::new(ErrorKind::BadState, "scope")
                .context("mr_mode", self.inner.effective)
                .remedy("register a buffer: in ENDPOINT mode a region must be bound before use"));
        }
        let terms = Terms::new(access);
        let request = RegionRequest {
            source: Source::of(place),
            promise: place.promise(),
            keep: place.owned_iface().map_or(KeepAlive::Caller, KeepAlive::Scope),
            terms: &terms,
        };
        let panicked = AbortOnPanic;
        let registered = self.inner.register_now(&request, None);
        std::mem::forget(panicked);
        Ok(CloseOnExit(Some(registered?)))
    }
}
