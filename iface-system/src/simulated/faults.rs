//! Fault injection: the nth driver call of a kind fails with a chosen errno.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hmem_core::{Errno, Error, Result};
use parking_lot::Mutex;

macro_rules! calls {
    ($($(#[doc = $doc:literal])+ $call:ident = $name:literal,)+) => {
        /// The kind of a call into the simulated driver. One operation of the iface may make
        /// several calls.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Call { $($(#[doc = $doc])+ $call,)+ }

        impl Call {
            /// All kinds of calls, in the order of the enum.
            pub const ALL: &[Self] = &[$(Self::$call,)+];

            /// Returns the name of the call, as errors show it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$call => $name,)+ }
            }
        }
    };
}

calls! {
    /// The call that lists the devices.
    Devices = "sim_devices",
    /// The call that looks up a device address. Calls are counted only while a fault is set for
    /// this kind: a counter that every thread writes would cost more than the lookup.
    Query = "sim_query",
    /// The call that lists the physical segments of a range.
    Segments = "sim_segments",
    /// The call that reserves addresses for an allocation.
    ReserveAddress = "sim_reserve_address",
    /// The call that creates memory. The iface makes one call for an allocation, or one for each
    /// segment of a virtual allocation.
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

#[derive(Clone, Copy, Debug)]
struct Fault {
    call: Call,
    /// Number of the first call that fails. [`Faults::count`] counts the calls of each kind, and 1
    /// is the first call counted.
    first: u64,
    last: u64,
    errno: Errno,
}

/// Counts the driver calls of a simulated device, and makes chosen calls fail.
///
/// ```
/// use hmem_core::{AllocationKind, DeviceId, Errno, IfaceExt, iface::AllocRequest};
/// use hmem_iface_system::{Call, Simulated};
///
/// let device = Simulated::builder().build()?;
/// device.faults().fail_next(Call::CreateMemory, Errno(12));
/// let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
/// assert_eq!(device.allocate(&request).unwrap_err().os_errno(), Some(Errno(12)));
/// assert!(device.allocate(&request).is_ok());
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Faults {
    counts: [AtomicU64; Call::ALL.len()],
    armed: [AtomicBool; Call::ALL.len()],
    faults: Mutex<Vec<Fault>>,
}

impl Faults {
    pub(crate) fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; Call::ALL.len()],
            armed: [const { AtomicBool::new(false) }; Call::ALL.len()],
            faults: Mutex::new(Vec::new()),
        }
    }

    /// Makes one call of kind `call` fail with `errno`: the `nth` from now on, where 1 is the next.
    pub fn fail_nth(&self, call: Call, nth: u64, errno: Errno) {
        let number = self.count(call) + nth.max(1);
        self.arm(Fault { call, first: number, last: number, errno });
    }

    /// Makes the next call of kind `call` fail with `errno`.
    pub fn fail_next(&self, call: Call, errno: Errno) {
        self.fail_nth(call, 1, errno);
    }

    /// Makes every call of kind `call` from now on fail with `errno`.
    pub fn fail_always(&self, call: Call, errno: Errno) {
        self.arm(Fault { call, first: self.count(call) + 1, last: u64::MAX, errno });
    }

    /// Removes all faults, so that later calls succeed again.
    pub fn clear(&self) {
        let mut faults = self.faults.lock();
        faults.clear();
        for armed in &self.armed {
            armed.store(false, Ordering::Release);
        }
    }

    /// Returns the number of calls of kind `call` so far, failed calls included. Calls of the kind
    /// [`Call::Query`] are counted only while a fault is set for that kind.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.counts[call as usize].load(Ordering::Acquire)
    }

    fn arm(&self, fault: Fault) {
        let mut faults = self.faults.lock();
        faults.push(fault);
        self.armed[fault.call as usize].store(true, Ordering::Release);
    }

    #[inline]
    pub(crate) fn is_armed(&self, call: Call) -> bool {
        self.armed[call as usize].load(Ordering::Relaxed)
    }

    /// Counts a driver call. Fails with the injected error if a fault is set for this call.
    pub(crate) fn call(&self, call: Call) -> Result<()> {
        let number = self.counts[call as usize].fetch_add(1, Ordering::AcqRel) + 1;
        if self.armed[call as usize].load(Ordering::Acquire) {
            self.fail(call, number)
        } else {
            Ok(())
        }
    }

    #[cold]
    fn fail(&self, call: Call, number: u64) -> Result<()> {
        let mut faults = self.faults.lock();
        let hit =
            |fault: &Fault| fault.call == call && (fault.first..=fault.last).contains(&number);
        let found = faults.iter().copied().find(hit);
        faults.retain(|fault| fault.call != call || fault.last > number);
        let waiting = faults.iter().any(|fault| fault.call == call);
        self.armed[call as usize].store(waiting, Ordering::Release);
        match found {
            Some(fault) => {
                Err(Error::os(fault.errno, call.name()).context("injected at call", number))
            }
            None => Ok(()),
        }
    }
}
