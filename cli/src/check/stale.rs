//! Stale registrations: memory goes, other memory comes to its address, and the registration cache
//! must not hand out the old one.
//!
//! A NIC keeps the pages that it registered, whatever becomes of the addresses. The loopback's
//! pinned mode does as well, so that a registration which outlived its memory moves bytes of memory
//! that is not there any more.

use std::sync::Arc;

use hmem::{
    Access, CacheAttr, Error, ErrorKind, Hmem, Iface, IfaceExt, IfaceKind, Path, Result,
    cache::UncachedReason,
    monitor::Monitor,
    path::P2pPolicy,
    system::{
        AddressReuse, FreeDetection, Simulated,
        monitor::{ImportCallbacks, ImportMonitor, Layered, MemHooks, UserFaultFd},
    },
};
use serde::Serialize;

use super::{
    Selection,
    link::{Link, Target},
    memory::heap,
    pattern,
    place::{OnDevice, Pages, Place},
    skip,
};
use crate::{
    json::Skipped,
    machine::{Fabric, Machine},
};

/// Bytes of a transfer: what is stale is whole pages.
const MOVED: u64 = 64;

/// What came of one monitor.
#[derive(Clone, Debug, Serialize)]
pub struct StaleRow {
    /// The iface of the memory.
    pub iface: String,
    /// What watches the memory.
    pub monitor: String,
    /// The provider.
    pub provider: String,
    /// The NIC.
    pub nic: String,
    /// The path from memory to NIC.
    pub path: &'static str,
    /// How often memory was freed and had again.
    pub rounds: u64,
    /// In how many of them it came back to the address that it had.
    pub reused: u64,
    /// Lookups that found a registration.
    pub hits: u64,
    /// Rounds in which a transfer moved bytes of memory that was gone.
    pub stale: u64,
    /// Whether no byte was stale, and one could have been.
    pub verified: bool,
    /// What went wrong.
    pub error: Option<String>,
}

/// One monitor to torture.
pub(super) struct Case<'a> {
    machine: &'a Machine,
    nic: &'a Fabric,
    memory: Memory,
}

/// Memory with what watches it.
enum Memory {
    /// Host memory.
    Host(HostMonitor),
    /// Memory of an iface of the machine, watched by the iface's own monitor.
    Device(Arc<dyn Iface>),
    /// Memory of a simulated device that calls back before memory goes, as ROCr does.
    Callback,
}

/// The monitors of host memory.
#[derive(Clone, Copy, Debug)]
enum HostMonitor {
    MemHooks,
    UserFaultFd,
    Both,
    Import,
    /// One that is never told of anything: what a torture must catch.
    #[cfg(test)]
    Deaf,
}

/// A monitor, and what the check tells of changes where that is the application's task.
type Started = (Arc<dyn Monitor>, Option<Arc<ImportMonitor>>);

impl HostMonitor {
    const ALL: [Self; 4] = [Self::MemHooks, Self::UserFaultFd, Self::Both, Self::Import];

    /// Starts it.
    fn start(self) -> Result<Started> {
        Ok(match self {
            Self::MemHooks => (MemHooks::start()?, None),
            Self::UserFaultFd => (UserFaultFd::start()?, None),
            Self::Both => (Layered::new(MemHooks::start()?, UserFaultFd::start()?), None),
            Self::Import => {
                let import = ImportMonitor::new(Arc::new(Told))?;
                (Arc::clone(&import) as _, Some(import))
            }
            #[cfg(test)]
            Self::Deaf => (ImportMonitor::new(Arc::new(Told))?, None),
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::MemHooks => "memhooks",
            Self::UserFaultFd => "userfaultfd",
            Self::Both => "memhooks+userfaultfd",
            Self::Import => "import",
            #[cfg(test)]
            Self::Deaf => "deaf",
        }
    }
}

/// The application's side of an imported monitor: the check knows what it frees, and needs not be
/// told what to watch.
#[derive(Debug)]
struct Told;

impl ImportCallbacks for Told {
    fn subscribe(&self, _: hmem::AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: hmem::AddressRange) {}
}

/// Every monitor of every selected iface.
pub(super) fn plan<'a>(
    machine: &'a Machine,
    selection: &Selection,
    skipped: &mut Vec<Skipped>,
) -> Vec<Case<'a>> {
    let wanted =
        |nic: &&Fabric| selection.provider.as_deref().is_none_or(|name| nic.answers_to(name));
    let Some(nic) = machine.nics.iter().filter(wanted).find(|nic| nic.keeps_pages()) else {
        skipped.push(skip(
            "stale registrations",
            "no NIC that keeps pages (loopback with io_uring) is here and selected",
        ));
        return Vec::new();
    };
    let mut cases = Vec::new();
    for iface in machine.hmem.registry().iter() {
        let name = iface.name();
        if selection.iface.as_deref().is_some_and(|wanted| wanted != name) {
            continue;
        }
        let of = |memory| Case { machine, nic, memory };
        if iface.kind() == IfaceKind::SYSTEM {
            cases.extend(HostMonitor::ALL.map(Memory::Host).map(of));
        } else if machine.hmem.p2p_disabled() {
            let why = "staged copies follow the memory, and direct access is switched off (FI_HMEM_DISABLE_P2P)";
            skipped.push(skip(format!("stale registrations of {name}"), why));
        } else if !(iface.capability().allocate && iface.capability().dma_buf) {
            let why = "it takes an iface that allocates and exports dma-bufs";
            skipped.push(skip(format!("stale registrations of {name}"), why));
        } else {
            cases.push(of(Memory::Device(Arc::clone(iface))));
            cases.extend(machine.is_software(iface.kind()).then(|| of(Memory::Callback)));
        }
    }
    cases.retain(|case| selection.path.is_none_or(|path| path == case.path()));
    cases
}

impl Case<'_> {
    fn path(&self) -> Path {
        match self.memory {
            Memory::Host(_) => Path::PlainHost,
            Memory::Device(_) | Memory::Callback => Path::DmaBuf,
        }
    }

    fn iface(&self) -> &str {
        match &self.memory {
            Memory::Host(_) => "system",
            Memory::Device(iface) => iface.name(),
            Memory::Callback => "simulated",
        }
    }

    /// What watches the memory, as far as that is known before it is started.
    fn monitor(&self) -> &'static str {
        match &self.memory {
            Memory::Host(monitor) => monitor.name(),
            Memory::Device(_) => "none",
            Memory::Callback => "callback",
        }
    }

    /// What it is, for a person.
    pub(super) fn title(&self) -> String {
        match &self.memory {
            Memory::Host(monitor) => {
                format!("stale registrations of system under {}", monitor.name())
            }
            Memory::Device(_) => format!("stale registrations of {}", self.iface()),
            Memory::Callback => format!("stale registrations of {} under callback", self.iface()),
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// What is not here is skipped with its reason.
    pub(super) fn run(&self, rounds: u64) -> Result<StaleRow, Skipped> {
        let mut tally = Tally { monitor: self.monitor().to_owned(), ..Tally::default() };
        let done = self.prepare().and_then(|mut prepared| {
            tally.monitor = prepared.monitor.clone();
            prepared.torture(self.nic, rounds, &mut tally)
        });
        let error = match done {
            Err(why) if tally.rounds == 0 && lacks(&why) => return Err(skip(self.title(), why)),
            Err(error) => Some(error.to_string()),
            // Not every allocator gives an address out again.
            Ok(()) if tally.stale == 0 && tally.reused == 0 => {
                return Err(skip(
                    self.title(),
                    "no address came back, so that nothing could be shown",
                ));
            }
            Ok(()) => tally.shortcoming(),
        };
        Ok(StaleRow {
            iface: self.iface().to_owned(),
            monitor: tally.monitor,
            provider: self.nic.attr.nic.provider.clone(),
            nic: self.nic.attr.nic.name.clone(),
            path: self.path().name(),
            rounds: tally.rounds,
            reused: tally.reused,
            hits: tally.hits,
            stale: tally.stale,
            verified: error.is_none(),
            error,
        })
    }

    fn prepare(&self) -> Result<Prepared<'_>> {
        let host = |hmem: hmem::Builder| hmem.without_vendor_ifaces().ifaces("");
        match &self.memory {
            Memory::Host(kind) => {
                let (monitor, told) = kind.start()?;
                let hmem = host(Hmem::builder()).imported_cache_monitor(monitor).build()?;
                let place = Box::new(Pages::map(told)?);
                Ok(Prepared {
                    monitor: kind.name().to_owned(),
                    hmem: Whose::Own(Box::new(hmem)),
                    place,
                })
            }
            Memory::Device(iface) => {
                let monitor = iface.start_monitor()?.name().to_owned();
                let place = Box::new(OnDevice::allocate(iface)?);
                Ok(Prepared { monitor, hmem: Whose::Machine(self.machine), place })
            }
            Memory::Callback => {
                let device = Simulated::builder()
                    .free_detection(FreeDetection::Callback)
                    .address_reuse(AddressReuse::JustFreed);
                let iface: Arc<dyn Iface> = Arc::new(device.build()?);
                let monitor = iface.start_monitor()?.name().to_owned();
                let hmem = Hmem::builder().without_vendor_ifaces().ifaces(iface.name());
                let hmem = hmem.shared_iface(Arc::clone(&iface)).build()?;
                let place = Box::new(OnDevice::allocate(&iface)?);
                Ok(Prepared { monitor, hmem: Whose::Own(Box::new(hmem)), place })
            }
        }
    }
}

/// Whether the machine lacks something or sets a limit, which is no failure.
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

/// What was seen.
#[derive(Debug, Default)]
struct Tally {
    monitor: String,
    rounds: u64,
    reused: u64,
    hits: u64,
    stale: u64,
}

impl Tally {
    /// Why this is no success, where everything worked.
    fn shortcoming(&self) -> Option<String> {
        if self.stale > 0 {
            return Some(format!(
                "in {} of {} rounds a transfer moved bytes of memory that was gone",
                self.stale, self.rounds
            ));
        }
        (self.hits == 0).then(|| "no lookup found a registration: nothing was shown".to_owned())
    }
}

enum Whose<'a> {
    Machine(&'a Machine),
    Own(Box<Hmem>),
}

struct Prepared<'a> {
    monitor: String,
    /// Before the place: its regions go first.
    hmem: Whose<'a>,
    place: Box<dyn Place>,
}

impl Prepared<'_> {
    fn torture(&mut self, nic: &Fabric, rounds: u64, tally: &mut Tally) -> Result<()> {
        let hmem = match &self.hmem {
            Whose::Machine(machine) => &machine.hmem,
            Whose::Own(hmem) => hmem,
        };
        // Whatever the environment says of caches: this is about the monitor.
        let cache = CacheAttr::default().max_count(1024).max_bytes(1 << 30).merge(false);
        let cache = cache.without_monitors([]);
        let domain = nic.open_with(hmem, P2pPolicy::Required, Some(cache))?;
        {
            let access = Access::READ | Access::WRITE;
            let local = domain.register(heap(MOVED)?, access).map_err(|rejected| rejected.error)?;
            let mut link = Link::open(&domain)?;
            let mut round =
                Round { domain: &domain, link: &mut link, local: &local, place: &mut *self.place };
            for number in 0..rounds {
                round.run(number, tally)?;
            }
            tally.hits = domain.cache()?.statistics().hits;
            link.close()?;
            local.close()?;
        }
        domain.close().map_err(|rejected| rejected.error)
    }
}

struct Round<'a> {
    domain: &'a hmem::Domain,
    link: &'a mut Link,
    local: &'a hmem::OwnedRegion<Vec<u8>>,
    place: &'a mut dyn Place,
}

impl Round<'_> {
    /// Gives the memory new bytes, has a peer read or write it through the cache, and takes the
    /// memory away.
    fn run(&mut self, number: u64, tally: &mut Tally) -> Result<()> {
        let (mut before, mut after) = ([0; MOVED as usize], [0; MOVED as usize]);
        pattern::fill(&mut before, number << 16);
        pattern::fill(&mut after, (number << 16) + (1 << 15));
        let range = self.place.range()?;
        self.place.write(&before)?;
        let cache = self.domain.cache()?;
        {
            // SAFETY: the place is plain addresses into which there are no references, and nothing
            // is done with it while a transfer runs. What is cached when it goes is
            // what the check is about: the NIC keeps the pages.
            #[allow(unsafe_code, reason = "the region is of memory that the place owns")]
            let region = unsafe {
                cache.get_or_register(range, Access::REMOTE_READ | Access::REMOTE_WRITE)?
            };
            // Busy: a change of the round before may not be over yet, as far as the monitor knows.
            if let Some(UncachedReason::Unwatched(why)) = region.lease().uncached_reason()
                && !why.is_busy()
            {
                return Err(why.clone());
            }
            let key = region.key()?;
            let whole = self.local.slice(0, MOVED)?;
            let target = Target { key: &key, offset: 0, len: MOVED };
            let mut found = [0; MOVED as usize];
            let expected = if number.is_multiple_of(2) {
                self.link.read(self.domain, whole, target)?;
                self.local.read(0, &mut found)?;
                &before
            } else {
                self.local.write(0, &after)?;
                self.link.write(self.domain, whole, target)?;
                self.place.read(&mut found)?;
                &after
            };
            tally.stale += u64::from(pattern::difference(expected, &found).is_some());
        }
        // SAFETY: as above.
        #[allow(unsafe_code, reason = "as above")]
        drop(unsafe { cache.get_or_register(range, Access::REMOTE_READ | Access::REMOTE_WRITE)? });
        self.place.renew(number)?;
        tally.reused += u64::from(self.place.range()? == range);
        tally.rounds += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_monitor_that_is_told_of_nothing_is_caught() {
        let machine = Machine::find().unwrap();
        let Some(nic) = machine.nics.iter().find(|nic| nic.keeps_pages()) else {
            panic!("no NIC that keeps pages: {:?}", machine.absent);
        };
        let case = Case { machine: &machine, nic, memory: Memory::Host(HostMonitor::Deaf) };
        let row = case.run(100).unwrap();
        assert!(!row.verified && row.stale > 50, "{row:?}");
        assert!(
            row.error.as_deref().is_some_and(|error| error.contains("memory that was gone")),
            "{row:?}"
        );
        // The same with one that is told.
        let row = Case { memory: Memory::Host(HostMonitor::Import), ..case }.run(100).unwrap();
        assert!(row.verified && row.stale == 0 && row.reused > 0 && row.hits > 0, "{row:?}");
    }
}
