//! Regions that hold their memory, so that registering it needs no `unsafe`.

#![allow(unsafe_code, reason = "copies bytes of memory that the region holds")]

use std::{fmt, ops::Deref, sync::Arc};

use super::{
    Domain,
    memory::{Memory, Place, keep_alive, take_back},
    region::MemoryRegion,
    region_slice::RegionSlice,
    region_state::KeepAlive,
    request::{RegionRequest, Request, Source},
    terms::Terms,
};
use crate::{Access, MrFlags, Rejected, Result};

/// Registered memory, with its keys. Derefs to the [`MemoryRegion`].
///
/// The region holds a buffer, or the addresses of a [`Raw`](super::Raw). [`Region::close`] returns
/// the buffer or the addresses. [`Region::read`] and [`Region::write`] copy bytes of a buffer. The
/// bytes cannot be borrowed, because the NIC may write them at any time.
///
/// If the region is dropped while it has sub-regions, windows or grants, the last of them releases
/// the memory.
pub struct Region<M: Memory> {
    pub(super) region: MemoryRegion,
    pub(super) parts: Arc<M::Parts>,
}

impl<M: Memory> Region<M> {
    /// Returns a part of the region for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`](crate::ErrorKind::OutOfBounds) if the part reaches outside the
    ///   first range of the region.
    /// - [`ErrorKind::BadState`](crate::ErrorKind::BadState) before the registration completed, or
    ///   after it failed.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::of(&self.region, offset, len)
    }

    /// Fills `into` with the bytes of the memory from `offset` on.
    ///
    /// All bytes of a completed transfer are visible. Bytes that the NIC is writing during the call
    /// are read old or new, each independently.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`](crate::ErrorKind::OutOfBounds) if the bytes are not all in the
    ///   memory.
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for addresses and dma-bufs. Copy
    ///   through the owner of the memory instead.
    /// - The error of the device that the memory belongs to.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { M::place(&self.parts).read(offset, into) }
    }

    /// Copies `from` to the bytes of the memory from `offset` on.
    ///
    /// # Errors
    /// - The errors of [`Region::read`].
    /// - [`ErrorKind::AccessDenied`](crate::ErrorKind::AccessDenied) for read-only memory.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        // SAFETY: the place comes from the parts, which the borrow keeps alive.
        unsafe { M::place(&self.parts).write(offset, from) }
    }

    /// Deregisters the region and returns the memory.
    ///
    /// # Errors
    /// - The errors of [`MemoryRegion::close`]. The error returns the region, which still works.
    /// - [`ErrorKind::Driver`](crate::ErrorKind::Driver) if an asynchronous registration panicked.
    ///   The memory is lost, because the NIC may still access it.
    pub fn close(self) -> Result<M, Rejected<Self>> {
        if let Err(error) = self.region.inner.close() {
            return Err(Rejected::new(self, error));
        }
        drop(self.region.inner.release());
        let Self { region, parts } = self;
        match take_back::<M>(parts) {
            Ok(memory) => Ok(memory),
            Err((parts, error)) => Err(Rejected::new(Self { region, parts }, error)),
        }
    }
}

impl<M: Memory> Deref for Region<M> {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        &self.region
    }
}

impl<M: Memory> fmt::Debug for Region<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Region").field(&self.region).finish()
    }
}

impl Domain {
    /// Registers memory, which the region then holds. [`Domain`] has an example.
    ///
    /// The memory is a buffer (a [`Vec<u8>`], a [`DeviceBuffer`](super::DeviceBuffer) or another
    /// type that implements [`Memory`]), or the addresses of a [`Raw`](super::Raw).
    ///
    /// If an event queue is bound ([`Domain::bind`]), the call returns a pending region. A request
    /// that breaks a rule of the domain's mode or a limit of the NIC is still an error of this call
    /// and causes no event. A later failure is reported by an event.
    ///
    /// # Errors
    /// The error returns the memory, and nothing is registered. The most common kinds
    /// ([`ErrorKind`](crate::ErrorKind)) are:
    ///
    /// - ZeroLength, TooManyRanges and TooLong for the memory; OutOfBounds for a range outside its
    ///   allocation; AddressWraps for a dma-buf that reaches beyond the address space
    /// - BadAddress for memory without pages in ALLOCATED mode
    /// - AccessDenied for a right that lets the NIC write, if the memory or its promise allows
    ///   reading only
    /// - BadFlags, BadAccess and BadPageSize for wrong settings; NoKey and KeyRejected for the
    ///   requested key; InvalidArgument for an iface or device that does not own the memory
    /// - Unsupported for settings of [`Request::extension`](super::Request::extension) that the
    ///   provider does not know
    /// - OutOfResources, for example at the locked-memory limit
    /// - BadState in a forked child
    ///
    /// For device memory that the NIC cannot reach, the error is that of the last path, with the
    /// trace of all attempts ([`Error::trace`](crate::Error::trace)).
    pub fn register<M: Memory>(&self, memory: M, access: Access) -> Result<Region<M>, Rejected<M>> {
        self.submit_as(Request::new(memory, access), "register")
    }

    /// Registers memory like [`Domain::register`], with the settings of a [`Request`].
    ///
    /// # Errors
    /// The errors of [`Domain::register`].
    pub fn submit<M: Memory>(&self, request: Request<'_, M>) -> Result<Region<M>, Rejected<M>> {
        self.submit_as(request, "submit")
    }

    fn submit_as<M: Memory>(
        &self,
        request: Request<'_, M>,
        call: &'static str,
    ) -> Result<Region<M>, Rejected<M>> {
        let Request { memory, terms } = request;
        let parts = Arc::new(memory.into_parts());
        match self.register_place(&M::place(&parts), keep_alive::<M>(&parts), terms) {
            Ok(region) => Ok(Region { region, parts }),
            Err(error) => {
                let parts = Arc::into_inner(parts).expect("no region refers to the parts");
                Err(Rejected::new(M::from_parts(parts), error.of_call(call)))
            }
        }
    }

    fn register_place(
        &self,
        place: &Place<'_>,
        keep: KeepAlive,
        mut terms: Terms<'_>,
    ) -> Result<MemoryRegion> {
        let source = Source::of(place);
        if let Source::DmaBuf(_) = source {
            terms.flags |= MrFlags::MR_DMABUF;
        }
        let request = RegionRequest { source, promise: place.promise(), keep, terms: &terms };
        self.inner.register(&request)
    }
}
