//! Registration of borrowed memory while a closure runs.
//!
//! A region type with a borrow would be unsound. `std::mem::forget` would leave the memory
//! registered after the borrow ended. A closure that only gets a reference cannot forget the
//! region.

#![allow(unsafe_code, reason = "registers memory that outlives a closure, and copies its bytes")]

use std::sync::Arc;

use super::{DomainInner, MemoryRegion, MrAttr, buffer::RegionSlice, region_state::KeepAlive};
use crate::{
    Access, Address, AddressRange, Decision, Error, ErrorKind, MrFlags, MrMode, RemoteKey, Result,
};

/// The region of borrowed memory in the closure of [`Domain::scope`](super::Domain::scope).
#[derive(Debug)]
pub struct Scoped<'a> {
    region: &'a MemoryRegion,
    /// True if the memory is host memory, which the CPU can access.
    host: bool,
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
    /// - [`ErrorKind::Unsupported`] for the memory of
    ///   [`Domain::scope_range`](super::Domain::scope_range). Copy through the owner of the memory
    ///   instead.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let slice = self.host_slice(offset, into.len())?;
        // SAFETY: the slice lies in the region, and the scope borrows the region's memory.
        unsafe { super::buffer::copy_out(slice.address(), into) };
        Ok(())
    }

    /// Copies `from` to the bytes of the region from `offset` on.
    ///
    /// # Errors
    /// The errors of [`Scoped::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let slice = self.host_slice(offset, from.len())?;
        // SAFETY: the slice lies in the region, and the scope borrows the region's memory mutably.
        unsafe { super::buffer::copy_in(slice.address(), from) };
        Ok(())
    }

    fn host_slice(&self, offset: u64, len: usize) -> Result<RegionSlice> {
        if self.host {
            return self.slice(offset, len as u64);
        }
        Err(Error::new(ErrorKind::Unsupported, "scoped copy")
            .context("range", self.range())
            .remedy("copy through the owner of the memory, such as a DeviceBuffer"))
    }
}

/// A guard that closes the region of a scope when the closure of the scope returns or panics.
struct CloseOnExit(Option<MemoryRegion>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let Some(region) = self.0.take() else { return };
        if let Err(rejected) = region.close() {
            // The process aborts, because returning would end the borrow while a peer can still
            // write to the memory.
            tracing::error!(error = %rejected.error, "cannot close a scoped region: aborting");
            std::process::abort();
        }
    }
}

/// A guard that aborts the process if a registration panics. The memory may be registered, and
/// unwinding would end the borrow.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        tracing::error!("the registration of borrowed memory panicked: aborting");
        std::process::abort();
    }
}

/// Registers borrowed host memory while `body` runs.
pub(super) fn run<R>(
    domain: &Arc<DomainInner>,
    bytes: &mut [u8],
    access: Access,
    body: impl FnOnce(&Scoped<'_>) -> R,
) -> Result<R> {
    let range = AddressRange::new(Address::of_ptr(bytes.as_mut_ptr()), bytes.len() as u64)?;
    run_over(domain, range, true, access, body)
}

/// Registers memory of any iface while `body` runs.
pub(super) fn run_over<R>(
    domain: &Arc<DomainInner>,
    range: AddressRange,
    host: bool,
    access: Access,
    body: impl FnOnce(&Scoped<'_>) -> R,
) -> Result<R> {
    let attr = MrAttr::new(std::slice::from_ref(&range), access);
    if domain.effective().contains(MrMode::ENDPOINT) {
        return Err(Error::new(ErrorKind::BadState, "scope")
            .context("mr_mode", domain.effective())
            .remedy("register a buffer: in ENDPOINT mode a region must be bound before use"));
    }
    let keep = if host { KeepAlive::Scope } else { KeepAlive::Caller };
    let panicked = AbortOnPanic;
    let registered = domain.register_now(&attr, MrFlags::empty(), keep, None);
    std::mem::forget(panicked);
    let guard = CloseOnExit(Some(registered?));
    let region = guard.0.as_ref().expect("set one line above");
    Ok(body(&Scoped { region, host }))
}
