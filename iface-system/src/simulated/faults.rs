//! Fault injection: the nth call of a kind fails with a chosen errno.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hmem_core::{Errno, Error, Result};
use parking_lot::Mutex;

macro_rules! calls {
    ($($(#[doc = $doc:literal])+ $call:ident = $name:literal,)+) => {
        /// A call into the simulated driver. One operation of the iface may make several.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Call { $($(#[doc = $doc])+ $call,)+ }

        impl Call {
            /// Every kind of call.
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
    /// Lists the devices.
    Devices = "sim_devices",
    /// Looks up a device address. Counted only while a fault is set for this kind of call: a
    /// counter that every thread writes would cost more than the lookup.
    Query = "sim_query",
    /// Lists segments.
    Segments = "sim_segments",
    /// Reserves addresses for an allocation.
    ReserveAddress = "sim_reserve_address",
    /// Creates memory: once for an allocation, or once for each segment of a virtual allocation.
    CreateMemory = "sim_create_memory",
    /// Maps managed or host memory for the CPU.
    MapMemory = "sim_map_memory",
    /// Frees an allocation.
    Free = "sim_free",
    /// Copies bytes and waits for the end.
    Copy = "sim_copy",
    /// Queues a copy for the engine.
    CopyAsync = "sim_copy_async",
    /// The engine's part of an asynchronous copy.
    EngineCopy = "sim_engine_copy",
    /// Exports a range as a dma-buf.
    ExportDmaBuf = "sim_export_dma_buf",
    /// Creates the fd of an export.
    CreateFd = "sim_create_fd",
    /// Releases an export.
    ReleaseDmaBuf = "sim_release_dma_buf",
    /// Makes a range accessible to peer-memory clients.
    ExportPeerMemory = "sim_export_peer_memory",
    /// Page-locks host memory.
    HostRegister = "sim_host_register",
    /// Unlocks page-locked host memory.
    HostUnregister = "sim_host_unregister",
    /// Creates an IPC handle for another process.
    IpcExport = "sim_ipc_export",
    /// Opens another process's allocation.
    IpcOpen = "sim_ipc_open",
    /// Closes another process's allocation.
    IpcClose = "sim_ipc_close",
    /// Makes inbound writes visible.
    FlushInbound = "sim_flush_inbound",
    /// Subscribes to frees.
    Subscribe = "sim_subscribe",
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    call: Call,
    /// Number of the first call to fail. 1 is the first call of this kind.
    first: u64,
    last: u64,
    errno: Errno,
}

/// Counts the calls of a simulated device and makes chosen ones fail.
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

    /// Makes the `nth` call from now on fail. 1 is the next call.
    pub fn fail_nth(&self, call: Call, nth: u64, errno: Errno) {
        let number = self.count(call) + nth.max(1);
        self.arm(Fault { call, first: number, last: number, errno });
    }

    /// Makes the next call fail.
    pub fn fail_next(&self, call: Call, errno: Errno) {
        self.fail_nth(call, 1, errno);
    }

    /// Makes every call from now on fail.
    pub fn fail_always(&self, call: Call, errno: Errno) {
        self.arm(Fault { call, first: self.count(call) + 1, last: u64::MAX, errno });
    }

    /// Removes all faults that have not occurred yet.
    pub fn clear(&self) {
        let mut faults = self.faults.lock();
        faults.clear();
        for armed in &self.armed {
            armed.store(false, Ordering::Release);
        }
    }

    /// Returns the number of calls of a kind, failed ones included.
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

    /// Counts a call. Fails if a fault is set for it.
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
