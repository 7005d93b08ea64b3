//! Fault injection: the driver calls that a test can count, fail and hold.

use hmem_core::{
    Errno, Error, named_enum,
    testing::{self, CallKind},
};

named_enum! {
    /// The kind of a call into the simulated driver. One operation of the iface may make several
    /// calls.
    #[non_exhaustive]
    pub enum DeviceCall {
        /// The call that lists the devices.
        Devices = "sim_devices",
        /// The call that looks up a device address. The calls are counted only from the first use
        /// of [`Faults`] on, because a counter that every thread writes costs more than the lookup.
        Query = "sim_query",
        /// The call that lists the physical segments of a range.
        Segments = "sim_segments",
        /// The call that reserves addresses for an allocation.
        ReserveAddress = "sim_reserve_address",
        /// The call that creates memory. The iface makes one call for an allocation, or one for
        /// each segment of a virtual allocation.
        CreateMemory = "sim_create_memory",
        /// The call that maps managed or host memory for access by the CPU.
        MapMemory = "sim_map_memory",
        /// The call that frees an allocation.
        Free = "sim_free",
        /// The call that runs a blocking copy.
        Copy = "sim_copy",
        /// The call that queues an asynchronous copy.
        CopyAsync = "sim_copy_async",
        /// The step in which the copy engine runs a queued copy.
        EngineCopy = "sim_engine_copy",
        /// The call that exports a range as a dma-buf.
        ExportDmaBuf = "sim_export_dma_buf",
        /// The call that creates the fd of a dma-buf export.
        CreateFd = "sim_create_fd",
        /// The call that releases a dma-buf export.
        ReleaseDmaBuf = "sim_release_dma_buf",
        /// The call that makes a range accessible to peer-memory clients.
        ExportPeerMemory = "sim_export_peer_memory",
        /// The call that page-locks host memory.
        HostRegister = "sim_host_register",
        /// The call that unlocks page-locked host memory.
        HostUnregister = "sim_host_unregister",
        /// The call that creates an IPC handle of an allocation.
        IpcExport = "sim_ipc_export",
        /// The call that opens an allocation of another process.
        IpcOpen = "sim_ipc_open",
        /// The call that closes an opened allocation of another process.
        IpcClose = "sim_ipc_close",
        /// The call that makes earlier writes by NICs visible.
        FlushInbound = "sim_flush_inbound",
        /// The call that subscribes a monitor to frees of memory.
        Subscribe = "sim_subscribe",
    }
}

impl CallKind for DeviceCall {
    const COUNT: usize = Self::ALL.len();

    fn index(self) -> usize {
        self as usize
    }

    fn is_always_counted(self) -> bool {
        self != Self::Query
    }

    fn failure(self, errno: Errno, number: u64) -> Error {
        Error::os(errno, self.name()).context("injected at call", number)
    }
}

/// Counts the driver calls of a simulated device, and makes chosen calls fail or wait.
///
/// ```
/// use hmem_core::{AllocationKind, DeviceId, Errno, IfaceExt, iface::AllocRequest};
/// use hmem_iface_system::{DeviceCall, Simulated};
///
/// let device = Simulated::builder().build()?;
/// device.faults().fail_next(DeviceCall::CreateMemory, Errno(12));
/// let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
/// assert_eq!(device.allocate(&request).unwrap_err().os_errno(), Some(Errno(12)));
/// assert!(device.allocate(&request).is_ok());
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub type Faults = testing::Faults<DeviceCall>;
