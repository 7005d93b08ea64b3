//! The facets of an iface: one small trait for each thing that a back end may have or lack.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

pub use crate::dma_buf::DmaBufMapping;
use crate::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DeviceId, DmaBufOffset, Error,
    ErrorKind, IfaceKind, Result, Segment,
    monitor::{DetectionMethod, Monitor},
    nic::Nic,
};

/// A facet whose absence is an error. An iface without [`SegmentMap`] has one segment, and one
/// without [`InboundFlush`] needs no flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Facet {
    /// [`Allocator`].
    Allocator,
    /// [`CopyEngine`].
    CopyEngine,
    /// [`DmaBufExporter`].
    DmaBuf,
    /// [`PeerMemoryExporter`].
    PeerMemory,
    /// [`HostRegistrar`].
    HostRegistrar,
    /// [`Ipc`].
    Ipc,
    /// [`MonitorSource`].
    Monitor,
}

impl Facet {
    /// The operation that a missing facet is reported as.
    #[must_use]
    pub const fn operation(self) -> &'static str {
        match self {
            Self::Allocator => "allocate",
            Self::CopyEngine => "start_copy",
            Self::DmaBuf => "export_dma_buf",
            Self::PeerMemory => "export_peer_memory",
            Self::HostRegistrar => "host_register",
            Self::Ipc => "ipc_export",
            Self::Monitor => "monitor",
        }
    }

    /// Returns the error for an iface that lacks this facet. It names no reason.
    #[must_use]
    #[cold]
    pub fn unavailable(self, iface: IfaceKind) -> Error {
        Error::new(ErrorKind::Unsupported, self.operation()).iface(iface)
    }
}

/// A request to allocate.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest {
    /// Bytes, more than 0.
    pub len: u64,
    /// On which device; ignored by ifaces without devices.
    pub device: DeviceId,
    /// The kind of memory.
    pub kind: AllocationKind,
}

/// A dma-buf that an iface exported: an owned fd, and where in it and in its allocation the range
/// lies.
#[derive(Debug)]
pub struct DmaBufExport {
    /// The dma-buf. Closing it ends the export; registrations made from it live on.
    pub fd: OwnedFd,
    /// Start of the range in the dma-buf.
    pub offset: DmaBufOffset,
    /// Start of the range in its allocation.
    pub alloc_offset: AllocOffset,
    /// Bytes.
    pub len: u64,
    /// The mapping that was used.
    pub mapping: DmaBufMapping,
}

impl AsFd for DmaBufExport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A range opened to peer-memory kernel clients: what to hand to `ibv_reg_mr`.
#[derive(Clone, Copy, Debug)]
pub struct PeerMemoryExport {
    /// The device address that the kernel client recognises.
    pub address: Address,
    /// Bytes.
    pub len: u64,
}

/// A copy under way.
pub trait CopyEvent: Send + fmt::Debug {
    /// Returns true if the copy has ended; the result is kept for [`CopyEvent::wait`].
    fn is_done(&self) -> bool;
    /// Waits for the end.
    ///
    /// # Errors
    /// The error that the device reported; the destination then holds unspecified bytes.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// A copy that had ended when its event was made: what there is to return where no engine copies
/// asynchronously.
#[derive(Debug)]
pub struct FinishedCopy(pub Result<()>);

impl CopyEvent for FinishedCopy {
    fn is_done(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<()> {
        self.0
    }
}

/// An allocation in a form that another process can open: opaque bytes of the iface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    /// The iface that made it.
    pub iface: IfaceKind,
    /// The iface's own form.
    pub bytes: Vec<u8>,
}

/// Allocates and frees memory.
pub trait Allocator {
    /// Allocates memory.
    ///
    /// # Errors
    /// OutOfResources, Unsupported for a kind it lacks, InvalidArgument for a device out of range.
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation>;

    /// Frees memory that [`allocate`](Self::allocate) returned.
    ///
    /// # Safety
    /// Nothing may use the memory any longer: no reference into CPU-accessible kinds, no copy under
    /// way.
    ///
    /// # Errors
    /// InvalidArgument for an allocation that is not live (a double free names the identity).
    unsafe fn free(&self, allocation: &Allocation) -> Result<()>;

    /// Returns true if this process already uses the device, so that an allocation that is freed
    /// again leaves nothing behind. For CUDA: a primary context exists. It starts nothing.
    ///
    /// An iface without such state keeps the default, which returns true.
    ///
    /// # Errors
    /// InvalidArgument for a device that is none, where the iface has devices; what the driver
    /// reported.
    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        let _ = device;
        Ok(true)
    }
}

/// Copies without blocking the caller.
pub trait CopyEngine {
    /// Starts a copy like [`Iface::copy`](super::Iface::copy) and returns its event.
    ///
    /// # Safety
    /// As [`Iface::copy`](super::Iface::copy), until the event says that it is done.
    ///
    /// # Errors
    /// As [`Iface::copy`](super::Iface::copy).
    unsafe fn start_copy(&self, to: Address, from: Address, len: u64)
    -> Result<Box<dyn CopyEvent>>;
}

/// Exports ranges as dma-buf fds.
pub trait DmaBufExporter {
    /// The mappings that can be asked for; a single device may refuse one of them. None if no
    /// device of this machine exports dma-bufs: each export then gives the reason.
    fn mappings(&self) -> &'static [DmaBufMapping];

    /// Exports `range`, which lies in one allocation, as a dma-buf for `nic`.
    ///
    /// # Errors
    /// Unsupported where the driver, the device or the mapping cannot; Unreachable where the device
    /// cannot be reached from that NIC.
    fn export(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport>;

    /// Gives a dma-buf back in the way the driver wants it. The default closes the fd.
    ///
    /// # Errors
    /// The error that the driver reported; the fd is closed all the same.
    fn release(&self, export: DmaBufExport) -> Result<()> {
        drop(export);
        Ok(())
    }
}

/// Opens ranges to peer-memory kernel clients.
pub trait PeerMemoryExporter {
    /// Opens `range` to peer-memory kernel clients.
    ///
    /// # Errors
    /// Unsupported with the reason.
    fn export(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport>;
}

/// Page-locks host memory for the devices of an iface.
pub trait HostRegistrar {
    /// Page-locks a range of host memory.
    ///
    /// # Safety
    /// The range must stay mapped until [`unregister`](Self::unregister).
    ///
    /// # Errors
    /// The error that the driver reported.
    unsafe fn register(&self, range: AddressRange) -> Result<()>;

    /// Undoes [`register`](Self::register).
    ///
    /// # Errors
    /// InvalidArgument for a range that is not registered.
    fn unregister(&self, range: AddressRange) -> Result<()>;
}

/// Hands allocations to other processes.
pub trait Ipc {
    /// Returns a handle that another process can open.
    ///
    /// # Errors
    /// Unsupported for memory that other processes cannot open; InvalidArgument for an allocation
    /// that is not live.
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle>;

    /// Opens another process's allocation; [`close`](Self::close) frees it.
    ///
    /// # Errors
    /// Malformed for bytes that are no handle; Unavailable if the owner is gone.
    fn open(&self, handle: &IpcHandle) -> Result<Allocation>;

    /// Closes what [`open`](Self::open) returned.
    ///
    /// # Safety
    /// As [`Allocator::free`].
    ///
    /// # Errors
    /// InvalidArgument for an allocation that was not opened.
    unsafe fn close(&self, allocation: &Allocation) -> Result<()>;
}

/// Knows where the physical memory under a range changes (HM-07).
pub trait SegmentMap {
    /// Returns the physical segments of `range` in address order.
    ///
    /// # Errors
    /// OutOfBounds if a part of it is not this iface's.
    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>>;

    /// Names the driver's attribute that says that a segment is not exportable.
    fn not_exportable(&self) -> &'static str {
        "not exportable"
    }
}

/// Makes the writes of NICs visible to devices (HM-14).
pub trait InboundFlush {
    /// Makes inbound RMA writes visible to work that the device starts after this call. A domain
    /// calls it as its completions are read ([`Domain::open_cq`](crate::Domain::open_cq)).
    ///
    /// # Errors
    /// The error that the driver reported.
    fn flush(&self, device: DeviceId) -> Result<()>;
}

/// Starts the monitor of an iface's memory.
pub trait MonitorSource {
    /// Returns how the driver shows that memory was freed: it calls back, or only identities tell.
    /// Does not start the monitor, which may use other means as well.
    fn detection(&self) -> DetectionMethod;

    /// Starts the monitor that notices when this iface's memory is freed.
    ///
    /// # Errors
    /// Unsupported with the reason.
    fn start(&self) -> Result<Arc<dyn Monitor>>;
}
