//! Registering borrowed memory for the length of a closure.
//!
//! A region that borrowed its memory in its type would be unsound: it can be forgotten, and then
//! outlives the borrow while its key works. A closure cannot forget what it never owns.

use std::sync::Arc;

use super::{DomainInner, MemoryRegion, MrAttr, buffer::RegionSlice, region_state::KeepAlive};
use crate::{
    Access, Address, AddressRange, Decision, Error, ErrorKind, MrFlags, MrMode, RemoteKey, Result,
};

/// A region that lives as long as the closure of [`Domain::scope`](super::Domain::scope).
#[derive(Debug)]
pub struct Scoped<'a> {
    region: &'a MemoryRegion,
    /// Set if the memory is host memory, which the CPU reaches by its address.
    host: bool,
}

impl Scoped<'_> {
    /// The remote key.
    ///
    /// # Errors
    /// As [`MemoryRegion::key`].
    pub fn key(&self) -> Result<RemoteKey> {
        self.region.key()
    }

    /// The address range.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.region.range()
    }

    /// Returns the path by which the NIC reaches the memory.
    ///
    /// # Errors
    /// As [`MemoryRegion::decision`].
    pub fn decision(&self) -> Result<&Arc<Decision>> {
        self.region.decision()
    }

    /// A piece for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// OutOfBounds if it reaches outside the region.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::of(self.region, offset, len)
    }

    /// Copies bytes of the region out; bytes that the NIC writes meanwhile come out in any mixture.
    ///
    /// # Errors
    /// OutOfBounds if they reach outside the region; Unsupported for memory of a device, which its
    /// owner copies.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let slice = self.host_slice(offset, into.len())?;
        super::buffer::copy_out(slice.address(), into);
        Ok(())
    }

    /// Copies bytes into the region.
    ///
    /// # Errors
    /// As [`Scoped::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let slice = self.host_slice(offset, from.len())?;
        super::buffer::copy_in(slice.address(), from);
        Ok(())
    }

    fn host_slice(&self, offset: u64, len: usize) -> Result<RegionSlice> {
        if self.host {
            return self.slice(offset, len as u64);
        }
        Err(Error::new(ErrorKind::Unsupported, "scoped copy")
            .context("range", self.range())
            .remedy("copy by the owner of the memory (DeviceBuffer::read, DeviceBuffer::write)"))
    }
}

/// Closes the region on every way out of the closure, a panic included.
struct CloseOnExit(Option<MemoryRegion>);

impl Drop for CloseOnExit {
    fn drop(&mut self) {
        let Some(region) = self.0.take() else { return };
        if let Err(rejected) = region.close() {
            // Going on would end the borrow while a peer can still write to the memory.
            tracing::error!(error = %rejected.error, "a scoped region could not be closed");
            std::process::abort();
        }
    }
}

/// Aborts the process if a registration panics. The memory may be registered then, and unwinding
/// would end the borrow.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        tracing::error!("the registration of borrowed memory panicked");
        std::process::abort();
    }
}

/// Borrowed host memory.
pub(super) fn run<R>(
    domain: &Arc<DomainInner>,
    bytes: &mut [u8],
    access: Access,
    body: impl FnOnce(&Scoped<'_>) -> R,
) -> Result<R> {
    let range = AddressRange::new(Address::of_ptr(bytes.as_mut_ptr()), bytes.len() as u64)?;
    run_over(domain, range, true, access, body)
}

/// Memory of any iface.
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
            .remedy(
                "in ENDPOINT mode a region needs an endpoint before use: register a buffer instead",
            ));
    }
    let keep = if host { KeepAlive::Scope } else { KeepAlive::Caller };
    let panicked = AbortOnPanic;
    let registered = domain.register_now(&attr, MrFlags::empty(), keep, None);
    std::mem::forget(panicked);
    let guard = CloseOnExit(Some(registered?));
    let region = guard.0.as_ref().expect("set one line above");
    Ok(body(&Scoped { region, host }))
}
