//! Host memory: the memory of the operating system, without any device.
//!
//! Any host address can be registered, and copied from and to. The [`System`] iface keeps records
//! only of its own allocations. These have identities and, if a memory file backs them, exports.

mod export;
mod iface;
mod memfd;
mod memory;
mod monitor;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, OnceLock},
};

use hmem_core::{Allocation, Result};
use parking_lot::{Mutex, RwLock};

pub use self::memfd::MemFd;
use self::memory::HostAllocation;
use crate::{monitor::SystemMonitor, sys::Udmabuf};

/// The iface for host memory: all memory of the process that belongs to no device.
///
/// ```
/// use hmem_core::{Iface, IfaceExt};
/// use hmem_iface_system::System;
///
/// let system = System::new();
/// let memory = system.memfd(8192)?;
/// // SAFETY: the memory is freed below, and nothing refers to it.
/// unsafe { system.write(memory.base(), b"bytes")? };
/// assert_eq!(system.query(memory.base())?, Some(memory));
///
/// // Other memory is host memory too, but not an allocation of this iface.
/// assert_eq!(system.query(hmem_core::Address::of_ptr(&memory))?, None);
///
/// // SAFETY: nothing uses the memory any longer.
/// unsafe { system.free(&memory)? };
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct System {
    allocations: RwLock<HostAllocationTable>,
    /// The open `/dev/udmabuf`, which creates dma-bufs, or the error of opening it.
    udmabuf: Result<Udmabuf>,
    monitor: OnceLock<SystemMonitor>,
    /// The function that starts `monitor`. A thread holds the lock while it calls the function, so
    /// that only one thread starts the monitor.
    start_monitor: Mutex<StartMonitor>,
}

/// A function that starts the monitor of host memory.
type StartMonitor = Box<dyn Fn() -> Result<SystemMonitor> + Send>;

#[derive(Debug)]
struct HostAllocationTable {
    next_id: u64,
    by_start: BTreeMap<u64, Arc<HostAllocation>>,
}

impl System {
    /// Creates the iface. If `/dev/udmabuf` can be opened, allocations in memory files are exported
    /// as dma-bufs. Otherwise they are exported as the memory files themselves.
    #[must_use]
    pub fn new() -> Self {
        Self {
            allocations: RwLock::new(HostAllocationTable { next_id: 1, by_start: BTreeMap::new() }),
            udmabuf: Udmabuf::open(),
            monitor: OnceLock::new(),
            start_monitor: Mutex::new(Box::new(|| Ok(SystemMonitor::auto()))),
        }
    }

    /// Returns the live allocations of this iface, including those that it opened by an IPC handle,
    /// in address order.
    #[must_use]
    pub fn live(&self) -> Vec<Allocation> {
        self.allocations.read().by_start.values().map(|record| record.allocation).collect()
    }
}

impl Default for System {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("System")
            .field("live", &self.allocations.read().by_start.len())
            .field("udmabuf", &self.udmabuf.is_ok())
            .field("monitor", &self.monitor.get().map(|monitor| monitor.choice().name))
            .finish()
    }
}
