//! The trait of every memory interface: host memory, CUDA, ROCr, Level Zero, the simulated device,
//! and plug-ins from outside the workspace.
//!
//! [`Iface`] has a small required core. Everything else is a facet: a trait that a back end
//! returns if it has it. All of them are object-safe. A missing facet is an error of kind
//! [`ErrorKind::Unsupported`] with its reason
//! ([`Iface::unavailable`]), and [`Capability`] says which facets there are.

mod facets;

use std::{fmt, sync::Arc};

pub use facets::{
    AllocRequest, Allocator, CopyEngine, CopyEvent, DmaBufExport, DmaBufExporter, DmaBufMapping,
    Facet, FinishedCopy, HostRegistrar, InboundFlush, Ipc, IpcHandle, MonitorSource,
    PeerMemoryExport, PeerMemoryExporter, SegmentMap,
};

use crate::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, IfaceKind, Result, Segment,
    cause::RefusalCause,
    monitor::{DetectionMethod, Monitor},
    nic::Nic,
};

/// The abilities of an iface, as its facets show them. A single device may do less, and refuses
/// with the reason.
///
/// [`Capability::of`] is the only way to get one, so that it cannot disagree with the facets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    /// Allocates and frees memory.
    pub allocate: bool,
    /// Exports ranges as dma-buf fds.
    pub dma_buf: bool,
    /// Has a PCIe mapping flag for dma-buf exports (HM-09).
    pub pcie_mapping: bool,
    /// Can be reached through a peer-memory kernel client.
    pub peer_memory: bool,
    /// Copies asynchronously, with events.
    pub async_copy: bool,
    /// Page-locks host memory for its devices.
    pub host_register: bool,
    /// Hands allocations to other processes.
    pub ipc: bool,
    /// Gives allocations identities that are never reused.
    pub identity: bool,
    /// Its driver calls back when memory is freed.
    pub free_callback: bool,
}

impl Capability {
    /// Asks an iface for its facets.
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
    /// The iface's ordinal.
    pub id: DeviceId,
    /// The name that the driver gives it.
    pub name: String,
    /// PCI bus id as `domain:bus:device.function` in lower-case hexadecimal, where it has one.
    pub pci_bus_id: Option<String>,
    /// Bytes of memory on it.
    pub memory: u64,
}

/// A memory interface.
///
/// Five methods are required. The others return a facet, or `None` where the back end lacks it.
/// Callers use [`IfaceExt`], which turns a missing facet into the error of
/// [`unavailable`](Self::unavailable).
///
/// Core has checked every argument against what it can know (non-empty ranges, no wrap); an
/// implementation checks what only it can know and answers with typed errors, never with a panic.
///
/// # Safety
/// Safe code of this library relies on the answers of an iface when it copies to, exports and
/// registers memory. So an implementation promises, for itself and for every facet that it returns:
///
/// - [`query`](Self::query) claims an address only while an allocation of this iface holds it, and
///   names that allocation's exact range, device and kind. Unless
///   [`has_identities`](Self::has_identities) returns false, no two allocations ever have one
///   [`AllocationId`](crate::AllocationId). The segments of a [`SegmentMap`] are parts of the range
///   that was asked about; an iface without one has each of its allocations in one segment.
/// - [`Allocator::allocate`] and [`Ipc::open`] return memory of the whole length that was asked
///   for, which belongs to the caller alone, or is another process's. No Rust reference to it
///   exists, and it stays until [`Allocator::free`] or [`Ipc::close`]. `Ipc::open` refuses bytes
///   that are no handle.
/// - [`copy`](Self::copy) and [`CopyEngine::start_copy`] touch the named bytes and no others, on
///   any number of threads at once. They leave all of them alone once they have returned an error,
///   and a [`CopyEvent`] is done only when the copy has ended.
/// - An export ([`DmaBufExporter::export`], [`PeerMemoryExporter::export`]) describes the bytes of
///   the range at its offset. It refers to that memory and to no other for as long as a NIC has it
///   registered, also when the memory is freed meanwhile.
/// - [`address_span`](Self::address_span) holds every address that `query` will ever claim.
pub unsafe trait Iface: fmt::Debug + Send + Sync {
    /// Its number: libfabric's, or 0x100 and up for a plug-in.
    fn kind(&self) -> IfaceKind;

    /// Its name as `info` and the command line use it.
    fn name(&self) -> &str;

    /// Its devices; empty for an iface that has none by nature.
    ///
    /// # Errors
    /// Unavailable if the driver lost them.
    fn devices(&self) -> Result<Vec<Device>>;

    /// The allocation that holds `address`, or `None` if the address is not this iface's.
    ///
    /// On the path of every registration: must be cheap for foreign addresses.
    ///
    /// # Errors
    /// A failed driver call; never "not mine".
    fn query(&self, address: Address) -> Result<Option<Allocation>>;

    /// Copies `len` bytes between any two of: host memory, memory of this iface. Blocks until done.
    ///
    /// # Safety
    /// - A host side is valid for `len` bytes and, if it is the destination, not referenced
    ///   elsewhere.
    /// - A side in memory of this iface is not freed before the copy has ended: the caller owns the
    ///   allocation or borrows it from its owner. The address of freed memory may be another
    ///   allocation's by now, or host memory's.
    ///
    /// # Errors
    /// - OutOfBounds for a copy past an allocation.
    /// - OutOfBounds from a device iface that knows neither side of the copy.
    /// - Otherwise the error that the device reported.
    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()>;

    /// The range that all its memory lies in, for as long as the iface lives, what it imports and
    /// page-locks included. A [`Registry`](crate::Registry) takes it once and does not ask about
    /// addresses outside; `None`, the default, has it ask about every address.
    fn address_span(&self) -> Option<AddressRange> {
        None
    }

    /// Returns true, the default, if no two of its allocations ever have the same identity.
    fn has_identities(&self) -> bool {
        true
    }

    /// Allocates and frees memory.
    fn allocator(&self) -> Option<&dyn Allocator> {
        None
    }

    /// Copies asynchronously.
    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        None
    }

    /// Exports ranges as dma-bufs.
    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        None
    }

    /// Opens ranges to peer-memory kernel clients.
    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        None
    }

    /// Page-locks host memory for its devices.
    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        None
    }

    /// Hands allocations to other processes.
    fn ipc(&self) -> Option<&dyn Ipc> {
        None
    }

    /// Lists physical segments. `None`, the default: each allocation is one exportable segment.
    fn segments(&self) -> Option<&dyn SegmentMap> {
        None
    }

    /// Flushes inbound writes. `None`, the default: they are visible without a flush.
    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        None
    }

    /// Starts the monitor that notices frees.
    fn monitor(&self) -> Option<&dyn MonitorSource> {
        None
    }

    /// Returns the causes that only its driver's refusals have, beside the general ones.
    fn causes(&self) -> &'static [RefusalCause] {
        &[]
    }

    /// Returns the error for a facet that this iface lacks. A back end overrides it to give the
    /// reason, for example a symbol that the driver library does not have.
    fn unavailable(&self, facet: Facet) -> Error {
        facet.unavailable(self.kind())
    }
}

/// The operations of an iface as a caller sees them: those of the facets, where a missing facet is
/// the error of [`Iface::unavailable`], and copies between slices and memory that is named by its
/// address.
///
/// An address does not keep its memory allocated, so copies are `unsafe`. The types that own memory
/// have safe copies:
/// [`DeviceBuffer::read`](crate::DeviceBuffer::read),
/// [`OwnedRegion::read`](crate::OwnedRegion::read).
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
pub trait IfaceExt: Iface {
    /// Says which facets the iface has.
    fn capability(&self) -> Capability {
        Capability::of(self)
    }

    /// Calls [`Allocator::allocate`].
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; Unsupported without that facet.
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
    /// As [`Allocator::free`].
    ///
    /// # Errors
    /// As [`Allocator::free`]; Unsupported without that facet.
    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        let lacking = || self.unavailable(Facet::Allocator).context("range", allocation.range);
        // SAFETY: passed on to the caller.
        unsafe { self.allocator().ok_or_else(lacking)?.free(allocation) }
    }

    /// Calls [`Allocator::is_device_active`].
    ///
    /// # Errors
    /// As [`Allocator::is_device_active`]; Unsupported without that facet.
    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        let lacking = || self.unavailable(Facet::Allocator).device(device);
        self.allocator().ok_or_else(lacking)?.is_device_active(device)
    }

    /// Calls [`CopyEngine::start_copy`].
    ///
    /// # Safety
    /// As [`CopyEngine::start_copy`].
    ///
    /// # Errors
    /// As [`CopyEngine::start_copy`]; Unsupported without that facet.
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        let lacking = || {
            let error = self.unavailable(Facet::CopyEngine);
            error.context("to", to).context("from", from).context("length", len)
        };
        // SAFETY: passed on to the caller.
        unsafe { self.copy_engine().ok_or_else(lacking)?.start_copy(to, from, len) }
    }

    /// Calls [`DmaBufExporter::export`].
    ///
    /// # Errors
    /// As [`DmaBufExporter::export`]; Unsupported without that facet.
    fn export_dma_buf(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport> {
        let lacking = || self.unavailable(Facet::DmaBuf).context("range", range);
        self.dma_buf().ok_or_else(lacking)?.export(range, nic, mapping)
    }

    /// Calls [`DmaBufExporter::release`]. Without that facet it closes the fd and returns an error.
    ///
    /// # Errors
    /// As [`DmaBufExporter::release`]; Unsupported without that facet.
    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        self.dma_buf().ok_or_else(|| self.unavailable(Facet::DmaBuf))?.release(export)
    }

    /// Calls [`PeerMemoryExporter::export`].
    ///
    /// # Errors
    /// As [`PeerMemoryExporter::export`]; Unsupported without that facet.
    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport> {
        let lacking = || self.unavailable(Facet::PeerMemory).context("range", range);
        self.peer_memory().ok_or_else(lacking)?.export(range, nic)
    }

    /// Calls [`HostRegistrar::register`].
    ///
    /// # Safety
    /// As [`HostRegistrar::register`].
    ///
    /// # Errors
    /// As [`HostRegistrar::register`]; Unsupported without that facet.
    unsafe fn host_register(&self, range: AddressRange) -> Result<()> {
        let lacking = || self.unavailable(Facet::HostRegistrar).context("range", range);
        // SAFETY: passed on to the caller.
        unsafe { self.host_registrar().ok_or_else(lacking)?.register(range) }
    }

    /// Calls [`HostRegistrar::unregister`].
    ///
    /// # Errors
    /// As [`HostRegistrar::unregister`]; Unsupported without that facet.
    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        let lacking = || self.unavailable(Facet::HostRegistrar).context("range", range);
        self.host_registrar().ok_or_else(lacking)?.unregister(range)
    }

    /// Calls [`Ipc::export`].
    ///
    /// # Errors
    /// As [`Ipc::export`]; Unsupported without that facet.
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        let lacking = || self.unavailable(Facet::Ipc).context("range", allocation.range);
        self.ipc().ok_or_else(lacking)?.export(allocation)
    }

    /// Calls [`Ipc::open`].
    ///
    /// # Errors
    /// As [`Ipc::open`]; Unsupported without that facet.
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.ipc().ok_or_else(|| self.unavailable(Facet::Ipc))?.open(handle)
    }

    /// Calls [`Ipc::close`].
    ///
    /// # Safety
    /// As [`Ipc::close`].
    ///
    /// # Errors
    /// As [`Ipc::close`]; Unsupported without that facet.
    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        let lacking = || self.unavailable(Facet::Ipc).context("range", allocation.range);
        // SAFETY: passed on to the caller.
        unsafe { self.ipc().ok_or_else(lacking)?.close(allocation) }
    }

    /// Calls [`SegmentMap::segments`]. Without that facet the range is one exportable segment.
    ///
    /// # Errors
    /// As [`SegmentMap::segments`].
    fn physical_segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        match self.segments() {
            Some(map) => map.segments(range),
            None => Ok(vec![Segment { range, exportable: true }]),
        }
    }

    /// Calls [`InboundFlush::flush`]. Without that facet there is nothing to flush.
    ///
    /// # Errors
    /// As [`InboundFlush::flush`].
    fn flush_inbound(&self, device: DeviceId) -> Result<()> {
        self.inbound_flush().map_or(Ok(()), |facet| facet.flush(device))
    }

    /// Calls [`MonitorSource::start`].
    ///
    /// # Errors
    /// As [`MonitorSource::start`]; Unsupported without that facet.
    fn start_monitor(&self) -> Result<Arc<dyn Monitor>> {
        self.monitor().ok_or_else(|| self.unavailable(Facet::Monitor))?.start()
    }

    /// Fills `into` from memory of this iface.
    ///
    /// # Safety
    /// The memory at `from` is not freed before this returns. An address that the iface does not
    /// know when this is called is an error.
    ///
    /// # Errors
    /// As [`Iface::copy`], and OutOfBounds if `from` is not memory of this iface.
    unsafe fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        check_own(self, from, into.len() as u64)?;
        // SAFETY: `into` is an exclusive borrow of `into.len()` bytes. `from` was just found to be
        // this iface's, and the caller promises that it is not freed meanwhile.
        unsafe { self.copy(Address::of_ptr(into.as_mut_ptr()), from, into.len() as u64) }
    }

    /// Writes `from` into memory of this iface.
    ///
    /// # Safety
    /// The memory at `to` is not freed before this returns, and no Rust reference to it exists. An
    /// address that the iface does not know when this is called is an error.
    ///
    /// # Errors
    /// As [`Iface::copy`], and OutOfBounds if `to` is not memory of this iface.
    unsafe fn write(&self, to: Address, from: &[u8]) -> Result<()> {
        check_own(self, to, from.len() as u64)?;
        // SAFETY: `from` is a borrow of `from.len()` readable bytes. `to` was just found to be this
        // iface's, and the caller promises that it is neither freed nor referenced.
        unsafe { self.copy(to, Address::of_ptr(from.as_ptr()), from.len() as u64) }
    }
}

impl<I: Iface + ?Sized> IfaceExt for I {}

/// Checks that one allocation of the iface holds the range. The system iface would take the address
/// of freed memory for other host memory.
fn check_own<I: Iface + ?Sized>(iface: &I, address: Address, len: u64) -> Result<()> {
    let error = || {
        Error::new(ErrorKind::OutOfBounds, "copy")
            .iface(iface.kind())
            .context("address", address)
            .context("length", len)
            .remedy("the range must lie in one live allocation of this iface")
    };
    let allocation = iface.query(address)?.ok_or_else(error)?;
    let range = AddressRange::new(address, len)?;
    if allocation.range.contains_range(range) { Ok(()) } else { Err(error()) }
}
