//! What every memory interface does: host memory, CUDA, ROCr, Level Zero, the simulated device, and
//! plug-ins from outside the workspace.
//!
//! The trait is object-safe and has no default bodies: a new operation breaks every backend
//! visibly. What a backend lacks is an error of kind
//! [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with its reason.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use crate::{
    Address, AddressRange, AllocOffset, Allocation, AllocationKind, DeviceId, DmaBufOffset,
    IfaceKind, Result, Segment, monitor::Monitor, provider::Nic,
};

/// What an iface can do at all; single devices may do less and say so when asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
    /// Calls back when memory is freed.
    pub free_callback: bool,
    /// The range that all its memory lies in, for as long as the iface lives, what it imports and
    /// page-locks included. A [`Registry`](crate::Registry) takes it once and does not ask
    /// about addresses outside; `None`, the default, has it ask about every address.
    pub window: Option<AddressRange>,
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

/// A request to allocate.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest {
    /// Bytes, more than 0.
    pub len: u64,
    /// On which device; ignored by ifaces without devices.
    pub device: DeviceId,
    /// Which kind.
    pub kind: AllocationKind,
}

/// How device memory should be mapped for the importer of a dma-buf (HM-09).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DmaBufMapping {
    /// The driver's default.
    #[default]
    Default,
    /// Through the PCIe BAR, even where a faster coherent link exists.
    Pcie,
}

/// A dma-buf that an iface exported: an owned fd, and where in it and in its allocation the range
/// lies.
#[derive(Debug)]
pub struct DmaBufExport {
    /// The dma-buf. Closing it ends the export; registrations made from it live on.
    pub fd: OwnedFd,
    /// Where the range starts in the dma-buf.
    pub offset: DmaBufOffset,
    /// Where the range starts in its allocation.
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
    /// Whether the copy has ended; the result is kept for [`CopyEvent::wait`].
    fn is_done(&self) -> bool;
    /// Waits for the end.
    ///
    /// # Errors
    /// What the device reported; the destination then holds unspecified bytes.
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

/// A memory interface.
///
/// Core has checked every argument against what it can know (non-empty ranges, no wrap); an
/// implementation checks what only it can know and answers with typed errors, never with a panic.
///
/// # Safety
/// Safe code of this library relies on the answers of an iface when it copies to, exports and
/// registers memory. So an implementation promises:
///
/// - [`query`](Self::query) claims an address only while an allocation of this iface holds it, and
///   names that allocation's exact range, device and kind. With [`Capability::identity`], no two
///   allocations have one [`AllocationId`](crate::AllocationId). [`segments`](Self::segments) are
///   parts of the range that was asked about.
/// - [`allocate`](Self::allocate) and [`ipc_open`](Self::ipc_open) return memory of the whole length
///   that was asked for, which belongs to the caller alone, or is another process's. No Rust
///   reference to it exists, and it stays until [`free`](Self::free) or
///   [`ipc_close`](Self::ipc_close). `ipc_open` refuses bytes that are no handle.
/// - [`copy`](Self::copy) and [`copy_async`](Self::copy_async) touch the named bytes and no others,
///   on any number of threads at once. They leave all of them alone once they have returned an
///   error, and a [`CopyEvent`] is done only when the copy has ended.
/// - An export ([`export_dma_buf`](Self::export_dma_buf),
///   [`export_peer_memory`](Self::export_peer_memory)) describes the bytes of the range at its
///   offset. It refers to that memory and to no other for as long as a NIC has it registered, also
///   when the memory is freed meanwhile.
/// - [`Capability::window`] holds every address that `query` will ever claim.
pub unsafe trait Iface: fmt::Debug + Send + Sync {
    /// Its number: libfabric's, or 0x100 and up for a plug-in.
    fn kind(&self) -> IfaceKind;

    /// Its name as `info` and the command line use it.
    fn name(&self) -> &str;

    /// What it can do.
    fn capability(&self) -> Capability;

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

    /// The physically contiguous parts of `range` in address order (HM-07).
    ///
    /// # Errors
    /// OutOfBounds if a part of it is not this iface's.
    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>>;

    /// Allocates memory.
    ///
    /// # Errors
    /// OutOfResources, Unsupported for a kind it lacks, InvalidArgument for a device out of range.
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation>;

    /// Frees what [`Iface::allocate`] returned.
    ///
    /// # Safety
    /// Nothing may use the memory any longer: no reference into CPU-accessible kinds, no copy under
    /// way.
    ///
    /// # Errors
    /// InvalidArgument for an allocation that is not live (a double free names the identity).
    unsafe fn free(&self, allocation: &Allocation) -> Result<()>;

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

    /// Starts the same copy and returns its event.
    ///
    /// # Safety
    /// As [`Iface::copy`], until the event says that it is done.
    ///
    /// # Errors
    /// As [`Iface::copy`]; Unsupported where the iface has no asynchronous engine.
    unsafe fn copy_async(&self, to: Address, from: Address, len: u64)
    -> Result<Box<dyn CopyEvent>>;

    /// Exports `range`, which lies in one allocation, as a dma-buf for `nic`.
    ///
    /// # Errors
    /// Unsupported where the driver, the device or the mapping cannot; Unreachable where the device
    /// cannot be reached from that NIC.
    fn export_dma_buf(
        &self,
        range: AddressRange,
        nic: &Nic,
        mapping: DmaBufMapping,
    ) -> Result<DmaBufExport>;

    /// Gives a dma-buf back in the way the driver wants it.
    ///
    /// # Errors
    /// What the driver reported; the fd is closed all the same.
    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()>;

    /// Opens `range` to peer-memory kernel clients.
    ///
    /// # Errors
    /// Unsupported with the reason.
    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport>;

    /// Page-locks host memory for this iface's devices.
    ///
    /// # Safety
    /// The range must stay mapped until [`Iface::host_unregister`].
    ///
    /// # Errors
    /// Unsupported, or what the driver reported.
    unsafe fn host_register(&self, range: AddressRange) -> Result<()>;

    /// Undoes [`Iface::host_register`].
    ///
    /// # Errors
    /// InvalidArgument for a range that is not registered.
    fn host_unregister(&self, range: AddressRange) -> Result<()>;

    /// A handle that another process can open.
    ///
    /// # Errors
    /// Unsupported, or InvalidArgument for an allocation that is not live.
    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle>;

    /// Opens another process's allocation; free it with [`Iface::ipc_close`].
    ///
    /// # Errors
    /// Malformed for bytes that are no handle; Unavailable if the owner is gone.
    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation>;

    /// Closes what [`Iface::ipc_open`] returned.
    ///
    /// # Safety
    /// As [`Iface::free`].
    ///
    /// # Errors
    /// InvalidArgument for an allocation that was not opened.
    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()>;

    /// Makes inbound RMA writes visible to work that the device starts after this call (HM-14). A
    /// domain calls it as its completions are read
    /// ([`Domain::open_cq`](crate::Domain::open_cq)).
    ///
    /// # Errors
    /// What the driver reported.
    fn flush_inbound(&self, device: DeviceId) -> Result<()>;

    /// Whether a device is at work for this process already, so that memory which is allocated
    /// there and freed again leaves nothing that was not there before. Of CUDA it is whether
    /// somebody has the device's primary context. It starts nothing; true of an iface without
    /// such state.
    ///
    /// # Errors
    /// InvalidArgument for a device that is none, where the iface has devices; what the driver
    /// reported.
    fn is_started(&self, device: DeviceId) -> Result<bool>;

    /// The monitor that notices when this iface's memory is freed.
    ///
    /// # Errors
    /// Unsupported with the reason.
    fn monitor(&self) -> Result<Arc<dyn Monitor>>;
}

/// Copies between slices and memory of an iface that is named by its address.
///
/// An address does not keep its memory allocated, so these methods are `unsafe`. The types that own
/// memory have safe copies:
/// [`DeviceBuffer::read`](crate::DeviceBuffer::read),
/// [`Registered::read`](crate::Registered::read).
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
        crate::Error::new(crate::ErrorKind::OutOfBounds, "copy")
            .iface(iface.kind())
            .context("address", address)
            .context("length", len)
            .remedy("the range must lie in one live allocation of this iface")
    };
    let allocation = iface.query(address)?.ok_or_else(error)?;
    let range = AddressRange::new(address, len)?;
    if allocation.range.contains_range(range) { Ok(()) } else { Err(error()) }
}
