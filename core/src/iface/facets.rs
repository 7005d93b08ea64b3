//! The facets of an iface: one small trait for each optional ability.

#![allow(unsafe_code, reason = "traits that copy and free memory by address")]

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr,
    sync::Arc,
};

use super::{ipc_handle::IpcHandle, revocation::Revocation};
pub use crate::dma_buf::DmaBufMapping;
use crate::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DeviceId, DmaBufOffset, Error,
    ErrorKind, IfaceName, Result, Segment,
    monitor::{DetectionMethod, Monitor},
    nic::Nic,
    racing_copy,
};

/// An optional ability of an iface. Calls that need a missing ability fail.
///
/// The facets [`SegmentMap`] and [`InboundFlush`] are not in this list, because no call fails
/// without them. Without [`SegmentMap`] an allocation is one segment, and without [`InboundFlush`]
/// no flush is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Facet {
    /// The ability to allocate and free memory ([`Allocator`]).
    Allocator,
    /// The ability to copy asynchronously ([`CopyEngine`]).
    CopyEngine,
    /// The ability to export ranges as dma-bufs ([`DmaBufExporter`]).
    DmaBuf,
    /// The ability to open ranges to peer-memory clients ([`PeerMemoryExporter`]).
    PeerMemory,
    /// The ability to page-lock host memory for devices ([`HostRegistrar`]).
    HostRegistrar,
    /// The ability to share allocations with other processes ([`Ipc`]).
    Ipc,
    /// The ability to detect frees of the iface's memory ([`MonitorSource`]).
    Monitor,
}

impl Facet {
    /// Returns the name of the operation in the error for an iface without this facet.
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

    /// Returns the error for an iface without this facet. An iface can override
    /// [`Iface::unavailable`](super::Iface::unavailable) to add the reason.
    #[must_use]
    #[cold]
    pub fn unavailable(self, iface: impl Into<IfaceName>) -> Error {
        Error::new(ErrorKind::Unsupported, self.operation()).iface(iface)
    }
}

/// A request to allocate memory.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest {
    /// The length in bytes, more than 0.
    pub len: u64,
    /// The device to allocate on. Ifaces without devices ignore it.
    pub device: DeviceId,
    /// The kind of memory.
    pub kind: AllocationKind,
}

/// A dma-buf that an iface exported, with the position of the exported range in the dma-buf.
#[derive(Debug)]
pub struct DmaBufExport {
    /// The file descriptor of the dma-buf. Closing it does not affect registrations that were made
    /// from the dma-buf.
    pub fd: OwnedFd,
    /// The offset of the range in the dma-buf.
    pub offset: DmaBufOffset,
    /// The offset of the range in its allocation.
    pub alloc_offset: AllocOffset,
    /// The length of the range in bytes.
    pub len: u64,
    /// The dma-buf mapping of the export.
    pub mapping: DmaBufMapping,
    /// The means by which an exporter in this process revokes the dma-buf. `None` if only a kernel
    /// driver can revoke the dma-buf.
    pub revocation: Option<Revocation>,
}

impl AsFd for DmaBufExport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A range that is open to peer-memory clients in the kernel, ready for `ibv_reg_mr`.
#[derive(Clone, Copy, Debug)]
pub struct PeerMemoryExport {
    /// The device address that the peer-memory client resolves.
    pub address: Address,
    /// The length in bytes.
    pub len: u64,
}

/// A handle to wait for an asynchronous copy.
pub trait CopyEvent: Send + fmt::Debug {
    /// Returns true if the copy has ended. [`CopyEvent::wait`] returns the result of the copy.
    fn is_done(&self) -> bool;
    /// Waits until the copy has ended.
    ///
    /// # Errors
    /// The error that the device reported. The destination then has unspecified bytes.
    fn wait(self: Box<Self>) -> Result<()>;
}

/// Addresses and length of a copy.
#[derive(Clone, Copy, Debug)]
pub struct CopyRange {
    /// First byte of the destination.
    pub to: Address,
    /// First byte of the source.
    pub from: Address,
    /// Length in bytes.
    pub len: u64,
}

impl CopyRange {
    /// Adds the addresses and the length to the context of an error.
    #[must_use]
    pub fn described(self, error: Error) -> Error {
        error.context("to", self.to).context("from", self.from).context("length", self.len)
    }

    /// Copies host memory by [`racing_copy`].
    ///
    /// # Safety
    /// The conditions of [`racing_copy`], for the addresses as pointers to host memory.
    pub unsafe fn copy_by_cpu(self) {
        let to = ptr::with_exposed_provenance_mut(self.to.0 as usize);
        let from = ptr::with_exposed_provenance(self.from.0 as usize);
        // SAFETY: the caller upholds the conditions of this function, which are the same.
        unsafe { racing_copy(from, to, self.len as usize) };
    }
}

/// The event of a copy that has already ended. Ifaces without an asynchronous copy engine return
/// it.
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

/// Allocates and frees memory.
pub trait Allocator {
    /// Allocates memory.
    ///
    /// # Errors
    /// - OutOfResources if memory is short.
    /// - Unsupported for a kind that the iface does not have.
    /// - InvalidArgument for a device that does not exist.
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation>;

    /// Frees memory that [`allocate`](Self::allocate) returned.
    ///
    /// # Safety
    /// From this call on, nothing may use the memory: no Rust reference to it may exist, and no
    /// copy may be in progress.
    ///
    /// # Errors
    /// InvalidArgument for an allocation that is not live, for example after an earlier free.
    unsafe fn free(&self, allocation: &Allocation) -> Result<()>;

    /// Returns true if this process already uses the device (CUDA: a primary context exists).
    ///
    /// The call does not initialise the device. Callers use it to avoid a test allocation that
    /// would initialise the device and leave its state behind. The default returns true, for ifaces
    /// without such state.
    ///
    /// # Errors
    /// - InvalidArgument for a device that does not exist.
    /// - The error that the driver reported.
    fn is_device_active(&self, device: DeviceId) -> Result<bool> {
        let _ = device;
        Ok(true)
    }
}

/// Copies memory asynchronously.
pub trait CopyEngine {
    /// Starts a copy like [`Iface::copy`](super::Iface::copy) and returns its event.
    ///
    /// # Safety
    /// The conditions of [`Iface::copy`](super::Iface::copy), until [`CopyEvent::is_done`] returns
    /// true or [`CopyEvent::wait`] returns.
    ///
    /// # Errors
    /// The errors of [`Iface::copy`](super::Iface::copy).
    unsafe fn start_copy(&self, to: Address, from: Address, len: u64)
    -> Result<Box<dyn CopyEvent>>;
}

/// Exports ranges as dma-buf fds.
pub trait DmaBufExporter {
    /// Returns the supported dma-buf mappings. A device may still refuse one of them. The list is
    /// empty if no device of this machine exports dma-bufs. Each export then fails with the reason.
    fn mappings(&self) -> &'static [DmaBufMapping];

    /// Exports `range` as a dma-buf for `nic`. The range must lie in the allocation `of`, which
    /// the caller has just queried ([`Iface::query`](super::Iface::query)).
    ///
    /// The argument `of` does not prove that the allocation still exists: the memory may have been
    /// freed since the query. The driver, or the iface's own record of its allocations, decides
    /// whether the range can be exported.
    ///
    /// # Errors
    /// - OutOfBounds for a range outside the allocation.
    /// - Unsupported if the driver or the device cannot export the range with this mapping.
    /// - Unreachable if the NIC cannot reach the device.
    /// - Otherwise the error that the driver reported.
    fn export(
        &self,
        range: AddressRange,
        of: &Allocation,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport>;

    /// Returns true if an export that one NIC can import serves every NIC: the export does not
    /// depend on the NIC, and can be released after its memory was freed. If the result is true,
    /// the library may keep an export for other NICs ([`SharedExports`](crate::SharedExports)). The
    /// default is false.
    fn serves_every_nic(&self) -> bool {
        false
    }

    /// Releases an export by the call that the driver requires. The default closes the fd.
    ///
    /// # Errors
    /// The error that the driver reported. The fd is closed in any case.
    fn release(&self, export: DmaBufExport) -> Result<()> {
        drop(export);
        Ok(())
    }
}

/// Makes ranges accessible to peer-memory clients in the kernel.
pub trait PeerMemoryExporter {
    /// Makes `range` accessible to peer-memory clients in the kernel. The range must lie in the
    /// allocation `of`, under the conditions of [`DmaBufExporter::export`].
    ///
    /// # Errors
    /// - Unsupported, with the reason, if the driver cannot do this.
    /// - OutOfBounds for a range outside the allocation.
    fn export(&self, range: AddressRange, of: &Allocation, nic: &Nic) -> Result<PeerMemoryExport>;
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

    /// Unlocks the pages of a range that [`register`](Self::register) page-locked.
    ///
    /// # Errors
    /// InvalidArgument for a range that is not registered.
    fn unregister(&self, range: AddressRange) -> Result<()>;
}

/// Shares allocations with other processes.
pub trait Ipc {
    /// Returns a handle that another process can open.
    ///
    /// # Errors
    /// Unsupported for memory that other processes cannot open; InvalidArgument for an allocation
    /// that is not live.
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle>;

    /// Opens an allocation of another process. [`close`](Self::close) closes it.
    ///
    /// # Errors
    /// - Malformed for bytes that are not a handle.
    /// - Unavailable if the owner process has ended. Many drivers refuse memory of the calling
    ///   process too.
    /// - Busy if this process has opened the memory already, and the driver opens it only once.
    fn open(&self, handle: &IpcHandle) -> Result<Allocation>;

    /// Closes an allocation that [`open`](Self::open) returned.
    ///
    /// # Safety
    /// The conditions of [`Allocator::free`].
    ///
    /// # Errors
    /// InvalidArgument for an allocation that was not opened.
    unsafe fn close(&self, allocation: &Allocation) -> Result<()>;
}

/// Lists the physical segments of ranges.
pub trait SegmentMap {
    /// Returns the physical segments of `range` in address order. The range must lie in the
    /// allocation `of`, under the conditions of [`DmaBufExporter::export`].
    ///
    /// # Errors
    /// OutOfBounds if part of the range is not in the allocation.
    fn segments(&self, range: AddressRange, of: &Allocation) -> Result<Vec<Segment>>;

    /// Returns the parts of `range` that have memory of this iface now, in the order of addresses.
    /// Each part is a mapping, or the piece of a mapping that is in the range. The range may be
    /// reserved addresses in which memory comes and goes, and may be memory of another owner.
    ///
    /// # Errors
    /// - Unsupported, the default, if the driver cannot list mappings.
    /// - Otherwise the error of a failed driver call.
    fn mapped(&self, range: AddressRange) -> Result<Vec<AddressRange>> {
        Err(Error::new(ErrorKind::Unsupported, "mapped memory").context("range", range))
    }

    /// Returns the driver's reason why a segment cannot be exported, such as an attribute and its
    /// value. Errors contain this text.
    fn not_exportable(&self) -> &'static str {
        "not exportable"
    }
}

/// Makes bytes that NICs wrote visible to devices.
pub trait InboundFlush {
    /// Makes bytes that NICs wrote visible to device work that starts after this call. The
    /// completion queues of [`Domain::open_cq`](crate::Domain::open_cq) call this method.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn flush(&self, device: DeviceId) -> Result<()>;
}

/// Starts the monitor of an iface's memory.
pub trait MonitorSource {
    /// Returns the method by which the driver shows that memory was freed. Does not start the
    /// monitor, which may use other methods too.
    fn detection(&self) -> DetectionMethod;

    /// Starts a monitor, which detects frees of this iface's memory.
    ///
    /// A cache calls this when it first needs the monitor. If several threads of the process need
    /// the monitor at that moment, each of them may call this. The monitor may serve several
    /// caches, and may outlive the iface. After an error the cache registers the memory uncached.
    ///
    /// # Errors
    /// Unsupported, with the reason, if the driver cannot do this.
    fn start(&self) -> Result<Arc<dyn Monitor>>;
}
