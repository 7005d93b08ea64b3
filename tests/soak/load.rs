//! Objects that all workers of a process share.

use std::{
    fmt::Write as _,
    sync::{
        Arc, Mutex, RwLock,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread,
    time::{Duration, Instant},
};

use hmem::{
    Access, AddressRange, Addressing, CacheAttr, Domain, DomainAttr, ErrorKind, Hmem, Iface,
    Promise, Raw, Result,
    loopback::{Faults, Loopback, NicCall, RemapPolicy},
    provider::Provider,
    system::{AddressReuse, Simulated},
};

use rustix::param::page_size;

use crate::{
    DEVICE, Options, Plant,
    accounts::{Check, Checks},
    link::Link,
    workers::{WORKERS, map, unmap},
};

pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// The state of one worker.
struct Worker {
    /// The number of steps that the worker has completed.
    steps: AtomicU64,
    /// The action of the current step with its start; `None` between two steps.
    doing: Mutex<Option<(&'static str, Instant)>>,
}

/// The state of the run, which the workers, the sampler and the watchdog share.
pub(crate) struct Shared {
    pub(crate) checks: Checks,
    /// True in the second process once the first process has ended its load.
    pub(crate) ended: AtomicBool,
    /// True after the last sample.
    pub(crate) stop: AtomicBool,
    /// Held for reading during each step, and for writing while the sampler counts.
    pub(crate) pause: RwLock<()>,
    workers: [Worker; WORKERS.len()],
    second: bool,
}

impl Shared {
    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Returns true once each worker has done a step, and so holds what it keeps for the whole run.
    pub(crate) fn all_started(&self) -> bool {
        self.workers.iter().all(|worker| worker.steps.load(Relaxed) > 0)
    }

    /// Returns the number of steps of each worker.
    pub(crate) fn progress(&self) -> [u64; WORKERS.len()] {
        std::array::from_fn(|at| self.workers[at].steps.load(Relaxed))
    }

    /// Returns the start of each line that this process prints.
    pub(crate) fn process(&self) -> &'static str {
        if self.second { "second process: " } else { "" }
    }

    pub(crate) fn steps(&self) -> u64 {
        self.workers.iter().map(|worker| worker.steps.load(Relaxed)).sum()
    }

    pub(crate) fn steps_by_worker(&self) -> String {
        let named = WORKERS.iter().zip(&self.workers);
        let steps: Vec<_> = named
            .map(|((name, _), worker)| format!("{name} {}", worker.steps.load(Relaxed)))
            .collect();
        steps.join(", ")
    }

    /// Returns the name and the action of a worker whose step has taken longer than `limit`.
    pub(crate) fn stuck(&self, limit: Duration) -> Option<String> {
        WORKERS.iter().zip(&self.workers).find_map(|((name, _), worker)| {
            let (action, since) = (*worker.doing.lock().ok()?)?;
            (since.elapsed() > limit).then(|| format!("{name} ({action})"))
        })
    }

    /// Returns a line for each worker: its steps, and its current action.
    pub(crate) fn dump(&self) -> String {
        let mut text = String::new();
        for ((name, _), worker) in WORKERS.iter().zip(&self.workers) {
            let steps = worker.steps.load(Relaxed);
            let doing = match worker.doing.try_lock().as_deref() {
                Ok(Some((action, since))) => format!("{action}, for {:?}", since.elapsed()),
                Ok(None) => "between two steps".to_owned(),
                Err(_) => "unknown".to_owned(),
            };
            writeln!(text, "  {name}: {steps} steps, {doing}").expect("a string");
        }
        text
    }
}

/// A worker's access to the state of the run.
#[derive(Clone, Copy)]
pub(crate) struct Me<'s> {
    pub(crate) shared: &'s Shared,
    pub(crate) index: usize,
}

impl Me<'_> {
    /// Records the action that the worker begins.
    pub(crate) fn begin(&self, action: &'static str) {
        let mut doing = self.shared.workers[self.index].doing.lock().expect("no panic");
        let since = doing.map_or_else(Instant::now, |(_, since)| since);
        *doing = Some((action, since));
    }

    /// Counts a check that passed.
    pub(crate) fn passed(&self, check: Check) {
        self.shared.checks.count(check);
    }

    /// Runs one step, which the sampler does not interrupt.
    pub(crate) fn step(&self, step: impl FnOnce()) {
        let running = self.shared.pause.read().expect("a panic ends the process");
        self.begin("the start of a step");
        step();
        let worker = &self.shared.workers[self.index];
        *worker.doing.lock().expect("no panic") = None;
        worker.steps.fetch_add(1, Relaxed);
        drop(running);
    }

    /// Runs steps until the run ends, with their numbers from 1.
    pub(crate) fn steps(&self, mut step: impl FnMut(u64)) {
        for number in 1.. {
            if self.shared.stops() {
                break;
            }
            self.step(|| step(number));
        }
    }
}

/// The numbers of regions that workers opened and closed on one NIC, apart from the cache's.
#[derive(Default)]
pub(crate) struct Registered {
    pub(crate) opened: AtomicU64,
    pub(crate) closed: AtomicU64,
}

/// The number of pages that one worker replaces while another one looks them up.
pub(crate) const PAGES: usize = 16;

/// The NIC, the simulated device and the cached domain of a process.
pub(crate) struct Load {
    pub(crate) shared: Arc<Shared>,
    pub(crate) options: Options,
    hmem: Hmem,
    pub(crate) device: Arc<Simulated>,
    pub(crate) iface: Arc<dyn Iface>,
    /// The domain with a cache.
    pub(crate) cached: Domain,
    /// A domain whose regions the workers register and close.
    pub(crate) plain: Domain,
    pub(crate) registered: Registered,
    /// The number of lookups, and of those that failed.
    pub(crate) lookups: AtomicU64,
    pub(crate) failed_lookups: AtomicU64,
    /// Counts the calls of the software NIC, and injects none. Not used with an RDMA device.
    nic: Faults,
    /// The last number that was written to each page of [`Load::pages`].
    pub(crate) written: [AtomicU64; PAGES],
    /// The addresses of [`PAGES`] pages, which always stay mapped.
    pub(crate) pages: AddressRange,
}

impl Load {
    /// # Errors
    /// The reason why this machine cannot run the load: io_uring, the cache's monitors, or the
    /// limit of locked memory.
    pub(crate) fn open(options: Options) -> Result<Self> {
        let nic = Faults::new();
        nic.start_counting();
        let provider = match options.rdma {
            true => verbs()?,
            false => {
                let loopback = Loopback::builder().remap_policy(RemapPolicy::Pinned).faults(&nic);
                Arc::new(loopback.build()?)
            }
        };
        let device = Arc::new(Simulated::builder().address_reuse(AddressReuse::JustFreed).build()?);
        let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .without_environment()
            .shared_iface(Arc::clone(&iface))
            .shared_provider(provider)
            .build()?;
        let plain = open(&hmem, options, None)?;
        // More pages than both processes ever pin.
        let probe = map((4 << 20) / page_size());
        // SAFETY: the pages stay mapped until the region is closed, and only the NIC uses them.
        let memory = unsafe { Raw::new(probe, Promise::ReadWrite) };
        let pinned = plain.register(memory, REMOTE).map_err(|refused| refused.error)?;
        pinned.close().map_err(|refused| refused.error)?;
        unmap(probe);
        let cache = CacheAttr::default().max_count(24).max_bytes(1 << 20);
        let cached = open(&hmem, options, Some(cache))?;
        cached.cache()?.monitor(iface.kind())?;
        cached.cache()?.monitor(hmem::IfaceKind::SYSTEM)?;
        let worker = || Worker { steps: AtomicU64::new(0), doing: Mutex::new(None) };
        let shared = Shared {
            checks: Checks::default(),
            ended: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pause: RwLock::new(()),
            workers: std::array::from_fn(|_| worker()),
            second: options.second,
        };
        let registered = Registered::default();
        for count in [&registered.opened, &registered.closed] {
            count.store(1, Relaxed);
        }
        Ok(Self {
            shared: Arc::new(shared),
            options,
            hmem,
            device,
            iface,
            cached,
            plain,
            registered,
            lookups: AtomicU64::new(0),
            failed_lookups: AtomicU64::new(0),
            nic,
            written: std::array::from_fn(|_| AtomicU64::new(0)),
            pages: map(PAGES),
        })
    }

    /// Opens a link to one of the process's domains.
    pub(crate) fn link(&self, target: &Domain) -> Link {
        let domain = open(&self.hmem, self.options, None).expect("a domain");
        Link::open(domain, target, &self.registered)
    }

    /// Returns the error kind that the initiator sees when the target refuses an access with
    /// `refusal`. An RDMA device reports every reason alike.
    pub(crate) fn seen(&self, refusal: ErrorKind) -> ErrorKind {
        if self.options.rdma { ErrorKind::AccessDenied } else { refusal }
    }

    /// Returns the addressing of type 2 windows. The driver rdma_rxe has no zero-based windows.
    pub(crate) fn addressing(&self) -> Addressing {
        if self.options.rdma { Addressing::Virtual } else { Addressing::ZeroBased }
    }

    /// Returns true if this process plants the fault.
    pub(crate) fn plants(&self, plant: Plant) -> bool {
        self.options.plant == Some(plant) && !self.options.second
    }

    /// Looks memory up in the cache, and counts the lookup.
    pub(crate) fn get(&self, range: AddressRange) -> Result<hmem::CachedRegion<'_>> {
        // SAFETY: the memory is a worker's own, and no Rust reference points to it. The worker
        // that replaces it relies on the cache's monitor, which ends the region first.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        self.lookups.fetch_add(1, Relaxed);
        let region = self.cached.cache().expect("a cache").get(memory, REMOTE);
        self.failed_lookups.fetch_add(u64::from(region.is_err()), Relaxed);
        region
    }

    /// Deregisters the idle entries of the cache. Returns the live regions, windows, device
    /// allocations and device exports of the process.
    pub(crate) fn settle(&self) -> [u64; 4] {
        let cache = self.cached.cache().expect("a cache");
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            cache.evict_idle();
            cache.reclaim();
            let now = cache.statistics();
            if now.entries == 0 && now.pending_reclaim == 0 && self.cached.live().regions == 0 {
                break;
            }
            assert!(Instant::now() < limit, "the cache keeps regions without leases: {now:?}");
            thread::sleep(Duration::from_millis(1));
        }
        let (cached, plain) = (self.cached.live(), self.plain.live());
        let device = self.device.stats();
        [
            cached.regions + plain.regions,
            cached.windows + plain.windows,
            device.live_allocations + device.opened_allocations,
            device.live_exports,
        ]
    }

    /// Asserts that lookups were hits and that memory changed while it was cached. Without that,
    /// the checks for stale hits would prove nothing.
    pub(crate) fn assert_cached(&self) {
        let now = self.cached.cache().expect("a cache").statistics();
        assert!(now.hits > 0 && now.all_invalidations() > 0, "hardly anything was cached: {now:?}");
    }

    /// Asserts that the counters of the cache, the NIC and the workers agree. The workers pause,
    /// and the cache is empty.
    pub(crate) fn assert_counters_agree(&self) {
        let now = self.cached.cache().expect("a cache").statistics();
        let of = |counter: &AtomicU64| counter.load(SeqCst);
        assert_eq!(now.lookups, of(&self.lookups), "lookups: {now:?}");
        assert_eq!(now.hits + now.misses, now.lookups, "hits and misses: {now:?}");
        assert_eq!(now.failures, of(&self.failed_lookups), "failed lookups: {now:?}");
        assert_eq!((now.leases, now.deregister_failed), (0, 0), "{now:?}");
        // An entry that is invalidated while it is registered counts as an invalidation, also if no
        // region is cached in the end.
        let ended = now.evictions + now.merged + now.all_invalidations();
        let possible = now.registrations..=now.misses;
        assert!(possible.contains(&ended), "ends of entries: {now:?}");
        if self.options.rdma {
            return;
        }
        let opened = now.registrations + now.uncached + of(&self.registered.opened);
        let closed = now.registrations + now.uncached + of(&self.registered.closed);
        assert_eq!(self.nic.calls(NicCall::Deregister), closed, "deregistrations: {now:?}");
        let registered = self.nic.calls(NicCall::Register);
        let possible = opened..=opened + now.failures;
        assert!(possible.contains(&registered), "{registered} registrations: {now:?}");
        let windows = [NicCall::AllocWindow, NicCall::FreeWindow].map(|call| self.nic.calls(call));
        let live = self.plain.live().windows;
        assert_eq!(windows[0], windows[1] + live, "allocated and freed windows, of {live} live");
    }
}

/// Opens a domain on the NIC of the run.
fn open(hmem: &Hmem, options: Options, cache: Option<CacheAttr>) -> Result<Domain> {
    let nic = options.rdma.then(|| std::env::var(DEVICE).expect("the name of a device"));
    let provider = if options.rdma { "verbs" } else { "loopback" };
    hmem.domain(provider, DomainAttr { nic, cache, ..DomainAttr::default() })
}

/// Returns the verbs provider. Its endpoints connect automatically, and reconnect after an error.
#[cfg(feature = "verbs")]
fn verbs() -> Result<Arc<dyn Provider>> {
    Ok(Arc::new(hmem::verbs::Verbs::builder().connect_in_process(true).build()?))
}

#[cfg(not(feature = "verbs"))]
fn verbs() -> Result<Arc<dyn Provider>> {
    panic!("`--rdma` needs the cargo feature `verbs`")
}
