//! Stale registrations: a cached registration must not outlive its memory.
//!
//! The rounds are those of the conformance suite ([`StaleCounts`]). Each round frees memory and
//! allocates other memory, if possible at the same address. The loopback NIC `pinned` pins the
//! pages that were mapped at registration, as hardware does. A stale hit therefore moves bytes of
//! the freed memory.

#![allow(unsafe_code, reason = "registers memory by address")]

use std::sync::Arc;

use hmem::{
    CacheAttr, DomainAttr, Error, ErrorKind, Hmem, Iface, IfaceExt, IfaceKind, Path, Result,
    monitor::Monitor,
    path::P2pPolicy,
    system::{
        AddressReuse, FreeDetection, Simulated,
        monitor::{
            HostMonitorKind, ImportCallbacks, ImportMonitor, Layered, MemHooks, UserFaultFd,
        },
    },
};
use hmem_conformance::stale::{DeviceMemory, ReusableMemory, StaleCounts};
use serde::Serialize;

use super::{Selection, place::HostPage};
use crate::{
    json::Skipped,
    machine::{Machine, ProviderNic},
};

/// The result of the check of one cache monitor.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StaleRow {
    /// The iface of the memory.
    pub iface: String,
    /// The monitor that watches the memory; `none` if the iface's monitor failed to start.
    pub monitor: String,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The path from memory to NIC.
    pub path: &'static str,
    /// Number of rounds, each of which frees and allocates memory.
    pub rounds: u64,
    /// Rounds in which the new memory had the previous address.
    pub reused: u64,
    /// Cache lookups that found an existing registration.
    pub hits: u64,
    /// Rounds in which a transfer moved bytes of freed memory.
    pub stale: u64,
    /// True if addresses were reused, lookups hit, and no transfer moved stale bytes.
    pub verified: bool,
    /// The failure; null if the monitor is verified.
    pub error: Option<String>,
}

/// One monitor to check, with the NIC and the memory of the check.
pub(super) struct Case<'a> {
    nic: &'a ProviderNic,
    memory: StaleMemory,
}

/// The memory to free and allocate again, with the monitor that watches it.
enum StaleMemory {
    /// Host memory.
    Host(HostMonitor),
    /// Memory of an iface of the machine, watched by the iface's own monitor.
    Device(Arc<dyn Iface>),
    /// Memory of a simulated device that calls its monitor before it frees memory, as ROCr does.
    Callback,
}

/// The monitors of host memory.
#[derive(Clone, Copy, Debug)]
enum HostMonitor {
    MemHooks,
    UserFaultFd,
    Both,
    Import,
    /// A monitor that is never notified. The check must find stale bytes with it.
    Deaf,
}

/// A started monitor. The second element is the same monitor if the check must notify it of
/// changes. It is `None` for a monitor that detects changes itself, and for [`HostMonitor::Deaf`].
type Started = (Arc<dyn Monitor>, Option<Arc<ImportMonitor>>);

impl HostMonitor {
    const ALL: [Self; 4] = [Self::MemHooks, Self::UserFaultFd, Self::Both, Self::Import];

    /// Starts this monitor of host memory.
    fn start(self) -> Result<Started> {
        Ok(match self {
            Self::MemHooks => (MemHooks::start()?, None),
            Self::UserFaultFd => (UserFaultFd::start()?, None),
            Self::Both => (Layered::new(MemHooks::start()?, UserFaultFd::start()?), None),
            Self::Import => {
                let import = ImportMonitor::new(Arc::new(IgnoreCallbacks))?;
                (Arc::clone(&import) as _, Some(import))
            }
            Self::Deaf => (ImportMonitor::new(Arc::new(IgnoreCallbacks))?, None),
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::MemHooks => "memhooks",
            Self::UserFaultFd => "userfaultfd",
            Self::Both => "memhooks+userfaultfd",
            Self::Import => "import",
            Self::Deaf => "deaf",
        }
    }
}

/// Callbacks of an imported monitor that do nothing. The check notifies the monitor of each change,
/// and so does not need to know the subscribed ranges.
#[derive(Debug)]
struct IgnoreCallbacks;

impl ImportCallbacks for IgnoreCallbacks {
    fn subscribe(&self, _: hmem::AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: hmem::AddressRange) {}
}

/// Returns a case for every cache monitor of every selected iface, all with the first selected NIC
/// that pins pages. Adds to `skipped` the ifaces that cannot be checked, or one entry for the whole
/// check if no selected NIC pins pages.
pub(super) fn plan<'a>(
    machine: &'a Machine,
    selection: &Selection,
    skipped: &mut Vec<Skipped>,
) -> Vec<Case<'a>> {
    let mut nics = machine.nics(selection.provider.as_deref());
    let Some(nic) = nics.find(|nic| nic.pins_pages()) else {
        skipped.push(Skipped::new(
            "stale registrations",
            "this test runs over loopback/pinned only (which needs io_uring), and that NIC is not \
             selected or not available",
        ));
        return Vec::new();
    };
    let mut cases = Vec::new();
    for iface in machine.ifaces(selection.iface.as_deref()) {
        let name = iface.name();
        let of = |memory| Case { nic, memory };
        if iface.kind() == IfaceKind::SYSTEM {
            cases.extend(HostMonitor::ALL.map(StaleMemory::Host).map(of));
        } else if machine.hmem.p2p_disabled() {
            let why =
                "FI_HMEM_DISABLE_P2P forbids direct access, and staged copies are never stale";
            skipped.push(Skipped::new(format!("stale registrations of {name}"), why));
        } else if !(iface.capability().allocate && iface.capability().dma_buf) {
            let why = "the check needs an iface that allocates memory and exports dma-bufs";
            skipped.push(Skipped::new(format!("stale registrations of {name}"), why));
        } else {
            cases.push(of(StaleMemory::Device(Arc::clone(iface))));
            cases.extend(machine.is_software(iface.kind()).then(|| of(StaleMemory::Callback)));
        }
    }
    cases.retain(|case| selection.path.is_none_or(|path| path == case.path()));
    cases
}

/// Checks host memory under a monitor that is never notified, and then under the same kind of
/// monitor with notifications. Only the first check must find stale bytes. Returns `None` if no NIC
/// of the machine pins pages. Only the tests of this check call the function.
///
/// # Panics
/// Panics if a check is skipped.
#[doc(hidden)]
pub fn check_deaf_monitor(machine: &Machine, rounds: u64) -> Option<[StaleRow; 2]> {
    let nic = machine.nics.iter().find(|nic| nic.pins_pages())?;
    Some([HostMonitor::Deaf, HostMonitor::Import].map(|monitor| {
        Case { nic, memory: StaleMemory::Host(monitor) }.run(rounds).expect("not skipped")
    }))
}

impl Case<'_> {
    fn path(&self) -> Path {
        match self.memory {
            StaleMemory::Host(_) => Path::PlainHost,
            StaleMemory::Device(_) | StaleMemory::Callback => Path::DmaBuf,
        }
    }

    fn iface(&self) -> &str {
        match &self.memory {
            StaleMemory::Host(_) => "system",
            StaleMemory::Device(iface) => iface.name(),
            StaleMemory::Callback => "simulated",
        }
    }

    /// Returns the name of the monitor that will start; `None` for a device's own monitor, which
    /// has a name only once it runs.
    fn monitor(&self) -> Option<&'static str> {
        match &self.memory {
            StaleMemory::Host(monitor) => Some(monitor.name()),
            StaleMemory::Device(_) => None,
            StaleMemory::Callback => Some("callback"),
        }
    }

    /// Returns the title of this check for the progress bar.
    pub(super) fn title(&self) -> String {
        let under = self.monitor().map(|monitor| format!(" under {monitor}")).unwrap_or_default();
        format!("stale registrations of {}{under}", self.iface())
    }

    /// Frees and allocates memory in `rounds` rounds and looks for stale transfers.
    ///
    /// # Errors
    /// The entry of a skipped check, if the machine does not support the check or no address was
    /// reused.
    pub(super) fn run(&self, rounds: u64) -> Result<StaleRow, Skipped> {
        let mut monitor = self.monitor().unwrap_or("none").to_owned();
        let mut counts = StaleCounts::default();
        let done = self.prepare().and_then(|mut prepared| {
            monitor.clone_from(&prepared.monitor);
            prepared.run(self.nic, rounds, &mut counts)
        });
        let error = match done {
            Err(why) if counts.rounds == 0 && lacks(&why) => {
                return Err(Skipped::new(self.title(), why));
            }
            Err(error) => Some(format!("{error:#}")),
            // Some allocators do not reuse addresses.
            Ok(()) if counts.stale == 0 && counts.reused == 0 => {
                return Err(Skipped::new(
                    self.title(),
                    "the allocator reused no address, so that no registration could be stale",
                ));
            }
            Ok(()) => shortcoming(&counts),
        };
        Ok(StaleRow {
            iface: self.iface().to_owned(),
            monitor,
            provider: self.nic.attr.nic.provider.clone(),
            nic: self.nic.attr.nic.name.clone(),
            path: self.path().name(),
            rounds: counts.rounds,
            reused: counts.reused,
            hits: counts.hits,
            stale: counts.stale,
            verified: error.is_none(),
            error,
        })
    }

    /// Starts the monitor and allocates the memory.
    fn prepare(&self) -> Result<Prepared> {
        let hmem = Hmem::builder().without_vendor_ifaces();
        let iface: Arc<dyn Iface> = match &self.memory {
            StaleMemory::Host(kind) => {
                let (monitor, notified_by_check) = kind.start()?;
                let hmem = hmem.ifaces("").imported_cache_monitor(monitor).build()?;
                let memory = Box::new(HostPage::map(notified_by_check)?);
                return Ok(Prepared { monitor: kind.name().to_owned(), hmem, memory });
            }
            StaleMemory::Device(iface) => Arc::clone(iface),
            StaleMemory::Callback => {
                let device = Simulated::builder()
                    .free_detection(FreeDetection::Callback)
                    .address_reuse(AddressReuse::JustFreed);
                Arc::new(device.build()?)
            }
        };
        let monitor = iface.start_monitor()?.name().to_owned();
        let memory = Box::new(DeviceMemory::allocate(&iface)?);
        // `Auto` overrides a variable that turns caches off.
        let hmem = hmem.ifaces(iface.name()).cache_monitor(HostMonitorKind::Auto);
        Ok(Prepared { monitor, hmem: hmem.shared_iface(iface).build()?, memory })
    }
}

/// Returns whether an error comes from a missing feature or a limit of the machine, which is no
/// failure of the monitor.
fn lacks(why: &Error) -> bool {
    matches!(
        why.kind(),
        ErrorKind::Unsupported
            | ErrorKind::NoSys
            | ErrorKind::Unavailable
            | ErrorKind::Unreachable
            | ErrorKind::AccessDenied
            | ErrorKind::PermissionDenied
            | ErrorKind::OutOfResources
    )
}

/// Returns the reason why a completed run failed or proves nothing; `None` for a success.
fn shortcoming(counts: &StaleCounts) -> Option<String> {
    if counts.stale > 0 {
        return Some(format!(
            "a transfer moved bytes of freed memory in {} of {} rounds",
            counts.stale, counts.rounds
        ));
    }
    (counts.hits == 0).then(|| "no lookup hit, so that no registration could be stale".to_owned())
}

/// A started monitor and its memory.
struct Prepared {
    /// The name of the monitor.
    monitor: String,
    /// The ifaces with which the check opens its domain. Declared before `memory`, and
    /// therefore dropped before the memory is freed.
    hmem: Hmem,
    memory: Box<dyn ReusableMemory>,
}

impl Prepared {
    fn run(&mut self, nic: &ProviderNic, rounds: u64, counts: &mut StaleCounts) -> Result<()> {
        // Cache settings of the environment are ignored, since only the monitor is tested.
        let cache = CacheAttr::default().max_count(1024).max_bytes(1 << 30).merge(false);
        let cache = cache.without_monitors([]);
        let (p2p, cache) = (P2pPolicy::Required, Some(cache));
        let attr = DomainAttr { p2p, cache, ..DomainAttr::default() };
        let domain = nic.open_with(&self.hmem, attr)?;
        // SAFETY: `plan` chose a NIC that pins the pages of its registrations. The memory belongs
        // to this value, which does not access it.
        unsafe { counts.run(&domain, &mut *self.memory, rounds) }?;
        domain.close().map_err(|rejected| rejected.error)
    }
}
