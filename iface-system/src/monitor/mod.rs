//! Monitors of host memory: they detect changes of memory that has cached registrations.
//!
//! [`SystemMonitor::start`] chooses a monitor and explains the choice. `docs/monitors.md` lists the
//! changes that each monitor detects.
//!
//! # Examples
//! ```
//! use hmem_iface_system::monitor::{HostMonitorKind, SystemMonitor};
//!
//! let chosen = SystemMonitor::start(HostMonitorKind::Auto)?;
//! println!("{}", chosen.choice());
//! # Ok::<(), hmem_core::Error>(())
//! ```

mod area;
mod choice;
mod import;
mod layered;
mod maps;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod memhooks;
#[cfg(not(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "no_memhooks.rs"]
mod memhooks;
mod userfaultfd;

pub use self::{
    choice::{HostMonitorKind, MonitorCandidate, MonitorChoice, SystemMonitor},
    import::{ImportCallbacks, ImportMonitor},
    layered::Layered,
    memhooks::MemHooks,
    userfaultfd::UserFaultFd,
};
