//! The trait of memory interfaces: host memory, CUDA, ROCr, Level Zero, the simulated device, and
//! plug-ins.
//!
//! [`Iface`] has a few required methods. Each optional ability is a facet: a small trait, which the
//! iface returns if it has the ability. All traits are object-safe. A call that needs a
//! missing facet fails with the error of [`Iface::unavailable`], which has the kind
//! [`ErrorKind::Unsupported`] by default. [`Capability`] summarises the abilities of an iface.

mod facets;
mod ipc_handle;
mod revocation;

use std::{fmt, sync::Arc};

pub use facets::{
    AllocRequest, Allocator, CopyEngine, CopyEvent, CopyRange, DmaBufExport, DmaBufExporter,
    DmaBufMapping, Facet, FinishedCopy, HostRegistrar, InboundFlush, Ipc, MonitorSource,
    PeerMemoryExport, PeerMemoryExporter, SegmentMap,
};
pub use ipc_handle::IpcHandle;
pub use revocation::{DmaBufImporter, Revocation};

use crate::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, IfaceName, Result,
    Segment,
    cause::RefusalCause,
    monitor::{DetectionMethod, Monitor},
    nic::Nic,
};

/// The abilities of an iface, read from its facets by [`Capability::of`].
///
/// A single device may support less. Calls for this device then fail with the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    /// True if the iface can allocate and free memory.
    pub allocate: bool,
    /// True if the iface can export ranges as dma-buf fds.
    pub dma_buf: bool,
    /// True if the iface can export dma-bufs with the PCIe mapping.
    pub pcie_mapping: bool,
    /// True if the iface can open memory to peer-memory clients in the kernel.
    pub peer_memory: bool,
    /// True if the iface can copy asynchronously, with events.
    pub async_copy: bool,
    /// True if the iface can page-lock host memory for its devices.
    pub host_register: bool,
    /// True if the iface can share allocations with other processes.
    pub ipc: bool,
    /// True if allocations have identities that are never reused.
    pub identity: bool,
    /// True if the iface's driver reports frees by callbacks.
    pub free_callback: bool,
}

impl Capability {
    /// Returns the abilities of an iface.
    #[must_use]
    pub fn of<I: Iface + ?Sized>(iface: &I) -> Self {
        let mappings = iface.dma_buf().map_or(&[][..], DmaBufExporter::mappings);
        let detection = iface.monitor().map(MonitorSource::detection);
        Self {
            allocate: iface.allocator().is_some(),
            dma_buf: !mappings.is_empty(),
            pcie_mapping: mappings.contains(&DmaBufMapping::Pcie),
            peer_memory: iface.peer_memory().is_some(),
            async_copy: iface.copy_engine().is_some(),
            host_register: iface.host_registrar().is_some(),
            ipc: iface.ipc().is_some(),
            identity: iface.has_identities(),
            free_callback: detection == Some(DetectionMethod::Callback),
        }
    }
}

/// A device of an iface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The iface's number for the device.
    pub id: DeviceId,
    /// The driver's name for the device.
    pub name: String,
    /// The PCI bus id as `domain:bus:device.function` in lower-case hexadecimal, if the device has
    /// one.
    pub pci_bus_id: Option<String>,
    /// The size of the device's memory in bytes.
    pub memory: u64,
}

/// A memory interface.
///
/// Five methods are required. Most of the others return a facet, or `None` if the iface does not
/// have the facet. Callers use [`IfaceExt`], which turns a missing facet into the error of
/// [`unavailable`](Self::unavailable).
///
/// An [`AddressRange`] never wraps around, and a [`Domain`](crate::Domain) registers no empty
/// range. An implementation checks all other arguments and returns typed errors. It never panics.
///
/// # Safety
/// Safe code of this library trusts the results of an iface when it copies, exports and registers
/// memory. So an implementation must guarantee, for itself and for every facet that it returns:
///
/// - [`query`](Self::query) claims an address only while an allocation of this iface contains the
///   address, and names that allocation's exact range, device and kind. Unless
///   [`has_identities`](Self::has_identities) returns false, no two allocations ever have the same
///   [`AllocationId`](crate::AllocationId). The segments of a [`SegmentMap`] are parts of the
///   requested range. Without a `SegmentMap`, each allocation is one segment.
/// - [`Allocator::allocate`] and [`Ipc::open`] return memory of the whole requested length. It
///   belongs only to the caller, or to another process. No Rust reference to the memory exists, and
///   the memory stays allocated until [`Allocator::free`] or [`Ipc::close`]. `Ipc::open` refuses
///   bytes that are not a handle.
/// - [`copy`](Self::copy) and [`CopyEngine::start_copy`] access the named bytes and no others, on
///   any number of threads at once. After they have returned an error, they access no bytes any
///   more. A [`CopyEvent`] is done only when the copy has ended.
/// - An export ([`DmaBufExporter::export`], [`PeerMemoryExporter::export`]) describes the bytes of
///   the range at its offset. It refers to that memory and to no other for as long as a NIC has it
///   registered, also when the memory is freed meanwhile.
/// - [`address_span`](Self::address_span) contains every address that `query` will ever claim.
#[allow(unsafe_code, reason = "the trait of ifaces, which copies by address")]
pub unsafe trait Iface: fmt::Debug + Send + Sync {
    /// Returns the iface's number: that of libfabric, or 0x100 and up for a plug-in.
    fn kind(&self) -> IfaceKind;

    /// Returns the iface's name, which `hmem info` prints and the command line accepts.
    fn name(&self) -> &str;

    /// Returns the devices. Empty for an iface without devices, such as host memory.
    ///
    /// # Errors
    /// Unavailable if the driver has lost the devices.
    fn devices(&self) -> Result<Vec<Device>>;

    /// Returns the allocation that contains `address`, or `None` if the address is not of this
    /// iface.
    ///
    /// Registrations call this method to find the owner of an address, so the method must be cheap
    /// for addresses of other owners.
    ///
    /// # Errors
    /// The error of a failed driver call. For an address of another owner the result is `Ok(None)`.
    fn query(&self, address: Address) -> Result<Option<Allocation>>;

    /// Copies `len` bytes, and returns when the copy has ended. The source and the destination are
    /// each host memory or memory of this iface.
    ///
    /// # Safety
    /// - A source or destination in host memory must be valid for `len` bytes. Nothing else may
    ///   refer to a destination in host memory. A NIC, and copies of other threads, may access the
    ///   bytes at the same time: an iface that copies by the CPU uses
    ///   [`racing_copy`](crate::racing_copy).
    /// - A source or destination in memory of this iface must stay allocated until the copy has
    ///   ended. After a free, the same address may belong to another allocation or to host memory.
    ///
    /// # Errors
    /// - OutOfBounds for a copy past the end of an allocation.
    /// - OutOfBounds from a device iface if neither side is memory of that iface.
    /// - Otherwise the error that the device reported.
    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()>;

    /// Returns a range that contains all memory that this iface ever has, including imported and
    /// page-locked memory.
    ///
    /// A [`Registry`](crate::Registry) reads the range once, and does not query the iface for
    /// addresses outside the range. `None`, the default, excludes no address.
    fn address_span(&self) -> Option<AddressRange> {
        None
    }

    /// Returns true if no two allocations of this iface ever have the same identity. The default is
    /// true.
    fn has_identities(&self) -> bool {
        true
    }

    /// Returns the facet that allocates and frees memory.
    fn allocator(&self) -> Option<&dyn Allocator> {
        None
    }

    /// Returns the facet that copies asynchronously.
    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        None
    }

    /// Returns the facet that exports ranges as dma-bufs.
    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        None
    }

    /// Returns the facet that opens ranges to peer-memory clients.
    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        None
    }

    /// Returns the facet that page-locks host memory for the devices.
    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        None
    }

    /// Returns the facet that shares allocations with other processes.
    fn ipc(&self) -> Option<&dyn Ipc> {
        None
    }

    /// Returns the facet that lists physical segments. With `None`, the default, each allocation is
    /// one exportable segment.
    fn segments(&self) -> Option<&dyn SegmentMap> {
        None
    }

    /// Returns the facet that flushes inbound writes. With `None`, the default, devices see inbound
    /// writes without a flush.
    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        None
    }

    /// Returns the facet that starts the monitor, which detects frees of this iface's memory.
    fn monitor(&self) -> Option<&dyn MonitorSource> {
        None
    }

    /// Returns the rules that find probable causes in this driver's errors.
    fn causes(&self) -> &'static [RefusalCause] {
        &[]
    }

    /// Returns the error for a missing facet. An iface overrides this method to add the reason, for
    /// example a symbol that the driver library does not have.
    fn unavailable(&self, facet: Facet) -> Error {
        facet.unavailable(self)
    }
}

/// The operations of an iface for callers.
///
/// Most methods call an operation of a facet. They return the errors of that operation, and fail
/// with [`Iface::unavailable`] (Unsupported) if the facet is missing. [`read`](IfaceExt::read) and
/// [`write`](IfaceExt::write) copy between slices and the iface's memory.
///
/// Copies are `unsafe`, because an address does not keep its memory allocated. The types that own
/// memory have safe copies, for example [`DeviceBuffer::read`](crate::DeviceBuffer::read) and
/// [`Region::read`](crate::Region::read).
///
/// ```compile_fail,E0133
/// # use hmem_core::{Address, Iface, IfaceExt, Result};
/// fn peek(iface: &dyn Iface, address: Address) -> Result<[u8; 8]> {
///     let mut bytes = [0; 8];
///     // Refused: another thread may free the memory meanwhile.
///     iface.read(address, &mut bytes)?;
///     Ok(bytes)
/// }
/// ```
///
/// ```compile_fail,E0133
/// # use hmem_core::{Address, Iface, IfaceExt, Result};
/// fn poke(iface: &dyn Iface, address: Address) -> Result<()> {
///     iface.write(address, &[0; 8])
/// }
/// ```
#[allow(unsafe_code, reason = "calls the facets, which copy and free memory by address")]
pub trait IfaceExt: Iface {
    /// Returns the abilities of the iface.
    fn capability(&self) -> Capability {
        Capability::of(self)
    }

    /// Calls [`Allocator::allocate`].
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        let lacking = || {
            let error = self.unavailable(Facet::Allocator).device(request.device);
            error.context("kind", request.kind.name()).context("length", request.len)
        };
        self.allocator().ok_or_else(lacking)?.allocate(request)
    }

    /// Calls [`Allocator::free`].
    ///
    /// # Safety
    /// The conditions of [`Allocator::free`].
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        let lacking = || self.unavailable(Facet::Allocator).context("range", allocation.range);
        // SAFETY: the caller guarantees the facet's conditions, which are those of this function.
        unsafe { self.allocator().ok_or_else(lacking)?.free(allocation) }
    }

    /// Calls [`Allocator::is_device_active`].
    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        let lacking = || self.unavailable(Facet::Allocator).device(device);
        self.allocator().ok_or_else(lacking)?.is_device_active(device)
    }

    /// Calls [`CopyEngine::start_copy`].
    ///
    /// # Safety
    /// The conditions of [`CopyEngine::start_copy`].
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let range = CopyRange { to, from, len };
        let lacking = || range.described(self.unavailable(Facet::CopyEngine));
        // SAFETY: the caller guarantees the facet's conditions, which are those of this function.
        unsafe { self.copy_engine().ok_or_else(lacking)?.start_copy(to, from, len) }
    }

    /// Queries the allocation around `range`, and calls [`DmaBufExporter::export`]. Fails with
    /// OutOfBounds if the iface does not know the address.
    fn export_dma_buf(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let lacking = || self.unavailable(Facet::DmaBuf).context("range", range);
        let exporter = self.dma_buf().ok_or_else(lacking)?;
        exporter.export(range, &allocation_around(self, "export_dma_buf", range)?, nic, mapping)
    }

    /// Calls [`DmaBufExporter::release`]. If the iface has no [`DmaBufExporter`], closes the fd and
    /// returns an error.
    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        self.dma_buf().ok_or_else(|| self.unavailable(Facet::DmaBuf))?.release(export)
    }

    /// Queries the allocation around `range`, and calls [`PeerMemoryExporter::export`]. Fails with
    /// OutOfBounds if the iface does not know the address.
    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport> {
        let lacking = || self.unavailable(Facet::PeerMemory).context("range", range);
        let exporter = self.peer_memory().ok_or_else(lacking)?;
        exporter.export(range, &allocation_around(self, "export_peer_memory", range)?, nic)
    }

    /// Calls [`HostRegistrar::register`].
    ///
    /// # Safety
    /// The conditions of [`HostRegistrar::register`].
    unsafe fn host_register(&self, range: AddressRange) -> Result<()> {
        let lacking = || self.unavailable(Facet::HostRegistrar).context("range", range);
        // SAFETY: the caller guarantees the facet's conditions, which are those of this function.
        unsafe { self.host_registrar().ok_or_else(lacking)?.register(range) }
    }

    /// Calls [`HostRegistrar::unregister`].
    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        let lacking = || self.unavailable(Facet::HostRegistrar).context("range", range);
        self.host_registrar().ok_or_else(lacking)?.unregister(range)
    }

    /// Calls [`Ipc::export`].
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        let lacking = || self.unavailable(Facet::Ipc).context("range", allocation.range);
        self.ipc().ok_or_else(lacking)?.export(allocation)
    }

    /// Calls [`Ipc::open`].
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.ipc().ok_or_else(|| self.unavailable(Facet::Ipc))?.open(handle)
    }

    /// Calls [`Ipc::close`].
    ///
    /// # Safety
    /// The conditions of [`Ipc::close`].
    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        let lacking = || self.unavailable(Facet::Ipc).context("range", allocation.range);
        // SAFETY: the caller guarantees the facet's conditions, which are those of this function.
        unsafe { self.ipc().ok_or_else(lacking)?.close(allocation) }
    }

    /// Queries the allocation around `range`, and calls [`IfaceExt::segments_of`]. Fails with
    /// OutOfBounds if the iface does not know the address.
    fn physical_segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        self.segments_of(range, &allocation_around(self, "segments", range)?)
    }

    /// Calls [`SegmentMap::segments`]. If the iface has no [`SegmentMap`], returns the range as one
    /// exportable segment.
    fn segments_of(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>> {
        match self.segments() {
            Some(map) => map.segments(range, of),
            None => Ok(vec![Segment { range, exportable: true }]),
        }
    }

    /// Calls [`InboundFlush::flush`]. If the iface has no [`InboundFlush`], does nothing.
    fn flush_inbound(&self, device: DeviceId) -> Result<()> {
        self.inbound_flush().map_or(Ok(()), |facet| facet.flush(device))
    }

    /// Calls [`MonitorSource::start`].
    fn start_monitor(&self) -> Result<Arc<dyn Monitor>> {
        self.monitor().ok_or_else(|| self.unavailable(Facet::Monitor))?.start()
    }

    /// Fills `into` with the bytes at `from`, an address in memory of this iface. An empty `into`
    /// is accepted for every address.
    ///
    /// # Safety
    /// The memory at `from` must not be freed before the call returns. An address that is not of
    /// this iface is allowed, and causes an error.
    ///
    /// # Errors
    /// - OutOfBounds if the bytes at `from` are not all in one allocation of this iface.
    /// - AddressWraps if the bytes would pass the end of the address space.
    /// - The errors of [`Iface::query`] and [`Iface::copy`].
    unsafe fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        check_own(self, from, into.len() as u64)?;
        // SAFETY: `into` is an exclusive borrow of `into.len()` bytes. `check_own` found that this
        // iface owns the memory at `from`, and the caller promises that the memory is not freed
        // meanwhile.
        unsafe { self.copy(Address::of_ptr(into.as_mut_ptr()), from, into.len() as u64) }
    }

    /// Writes the bytes of `from` to the address `to`, in memory of this iface. An empty `from` is
    /// accepted for every address.
    ///
    /// # Safety
    /// The memory at `to` must not be freed before the call returns, and no Rust reference to it
    /// may exist. An address that is not of this iface is allowed, and causes an error.
    ///
    /// # Errors
    /// - OutOfBounds if the bytes at `to` are not all in one allocation of this iface.
    /// - AddressWraps if the bytes would pass the end of the address space.
    /// - The errors of [`Iface::query`] and [`Iface::copy`].
    unsafe fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        check_own(self, to, from.len() as u64)?;
        // SAFETY: `from` is a borrow of `from.len()` readable bytes. `check_own` found that this
        // iface owns the memory at `to`, and the caller promises that the memory is neither freed
        // nor referenced.
        unsafe { self.copy(to, Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }
}

impl<I: Iface + ?Sized> IfaceExt for I {}

impl From<&Arc<dyn Iface>> for IfaceName {
    fn from(iface: &Arc<dyn Iface>) -> Self {
        Self::from(&**iface)
    }
}

impl<I: Iface + ?Sized> From<&I> for IfaceName {
    fn from(iface: &I) -> Self {
        Self::new(iface.kind(), iface.name())
    }
}

/// Returns the allocation of the iface that contains the first address of `range`.
fn allocation_around<I: Iface + ?Sized>(
    iface: &I,
    operation: &'static str,
    range: AddressRange,
) -> Result<Allocation> {
    iface.query(range.start())?.ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, operation)
            .iface(iface)
            .context("range", range)
            .context("why", "the iface does not know the address: the memory may have been freed")
            .remedy("the range must lie in one live allocation")
    })
}

/// Checks that one allocation of the iface contains `len` bytes from `address`. Without this check,
/// the system iface would treat the address of freed device memory as host memory.
fn check_own<I: Iface + ?Sized>(iface: &I, address: Address, len: u64) -> Result<()> {
    let error = || {
        Error::new(ErrorKind::OutOfBounds, "copy")
            .iface(iface)
            .context("address", address)
            .context("length", len)
            .remedy("name bytes of one live allocation of this iface")
    };
    let allocation = iface.query(address)?.ok_or_else(error)?;
    let range = AddressRange::new(address, len)?;
    if allocation.range.contains_range(range) { Ok(()) } else { Err(error()) }
}

#[cfg(test)]
#[allow(unsafe_code, reason = "tests implement the trait")]
mod tests {
    use super::*;

    /// An iface without memory, whose copies fail.
    #[derive(Debug)]
    struct EmptyIface;

    // SAFETY: the iface claims no address, and allocates, copies and exports nothing.
    unsafe impl Iface for EmptyIface {
        fn kind(&self) -> IfaceKind {
            IfaceKind::FIRST_PLUG_IN
        }

        fn name(&self) -> &str {
            "empty"
        }

        fn devices(&self) -> Result<Vec<Device>> {
            Ok(Vec::new())
        }

        fn query(&self, _: Address) -> Result<Option<Allocation>> {
            Ok(None)
        }

        unsafe fn copy(&self, _: Address, _: Address, _: u64) -> Result<()> {
            Err(Error::new(ErrorKind::Unsupported, "copy"))
        }
    }

    #[test]
    fn copy_of_no_bytes_succeeds_at_any_address() {
        let (iface, end) = (EmptyIface, Address(u64::MAX));
        // SAFETY: the iface owns no memory, so no call accesses memory.
        unsafe {
            iface.read(end, &mut []).expect("no bytes");
            iface.write(end, &[]).expect("no bytes");
            let outside = [iface.read(end, &mut [0]), iface.write(end, &[0])];
            assert!(outside.iter().all(|result| {
                result.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfBounds)
            }));
        }
    }
}
