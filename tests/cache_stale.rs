//! Tests for stale hits over a NIC that keeps the pages that it registered. Without a monitor,
//! every way to replace pages gives stale hits, which shows that the test works. With a monitor,
//! the ways that it detects give none.
//!
//! In each round the test replaces a page and writes the round's number to it. A NIC then moves the
//! number: a peer reads it through a cached region, or it is sent from memory without a descriptor.
//! The NIC is the software NIC with pinned pages, and also the RDMA device that `HMEM_VERBS_DEVICE`
//! names, if it is set.

mod child;
mod machine;
mod silent;
mod subscriber;
mod trials;

use std::{
    env, ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem::{
    Access, Address, AddressRange, CacheAttr, Domain, DomainAttr, Endpoint, Hmem, Iova, MrMode,
    Promise, Raw, RemoteKey, Result,
    loopback::{Loopback, RemapPolicy},
    monitor::Monitor,
    provider::{CompletionQueue, EndpointAttr, Provider},
    system::monitor::{ImportMonitor, Layered, MemHooks, UserFaultFd},
    transfer::{LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};
use silent::Silent;
use subscriber::Recorder;
use trials::{Outcome, skip, trials};

trials! {
    /// CACHE-11
    code_that_has_the_monitor_cannot_end_the_subscriptions_of_a_cache,
    /// MR-07
    without_a_monitor_every_cause_leaves_stale_hits,
    /// CACHE-11, ARM-04
    memhooks_leave_no_stale_hit_even_for_a_second_thread,
    /// CACHE-11
    userfaultfd_leaves_no_stale_hit_for_the_thread_that_unmaps,
    /// CACHE-11, ARM-04
    memhooks_with_userfaultfd_leave_no_stale_hit,
    /// CACHE-11
    slow_memhooks_leave_no_stale_hit_in_a_million_rounds,
    /// CACHE-11
    slow_userfaultfd_leaves_no_stale_hit_in_a_million_rounds,
    /// CACHE-11
    slow_layered_monitors_leave_no_stale_hit_in_a_million_rounds,
}

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
/// The mr_mode bits that RDMA devices require.
const MODE: MrMode =
    MrMode::LOCAL.union(MrMode::VIRT_ADDR).union(MrMode::ALLOCATED).union(MrMode::PROV_KEY);
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const OWN: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const FIXED: i32 = OWN | libc::MAP_FIXED;

fn page() -> usize {
    // SAFETY: the call only returns a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

fn map(at: *mut libc::c_void, flags: i32) -> *mut libc::c_void {
    // SAFETY: new pages, or pages in place of the test's own.
    let mapped = unsafe { libc::mmap(at, page(), RW, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped
}

fn unmap(at: *mut libc::c_void) {
    // SAFETY: the test's own page.
    assert_eq!(unsafe { libc::munmap(at, page()) }, 0);
}

/// Maps a page at a free address by a raw system call, so that memhooks do not see this mapping.
fn raw_map(at: *mut libc::c_void) {
    // SAFETY: the addresses are the test's, which has just removed their mapping.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, at, page(), RW, FIXED, -1, 0) };
    assert_eq!(mapped as usize, at.addr());
}

/// Maps two private pages and returns the second.
fn own() -> *mut libc::c_void {
    let first = map(ptr::null_mut(), OWN);
    // SAFETY: grows the test's own page.
    let both = unsafe { libc::mremap(first, page(), 2 * page(), libc::MREMAP_MAYMOVE) };
    assert_ne!(both, libc::MAP_FAILED);
    both.wrapping_byte_add(page())
}

/// Maps a shared anonymous page.
fn shared() -> *mut libc::c_void {
    map(ptr::null_mut(), libc::MAP_SHARED | libc::MAP_ANONYMOUS)
}

/// Attaches a new System V segment of one page. The kernel removes the segment after the last
/// detach.
fn segment(attach: impl FnOnce(i32) -> *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: a segment of the test's own.
    unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, page(), 0o600);
        assert!(id >= 0, "{}", std::io::Error::last_os_error());
        let at = attach(id);
        assert_eq!(libc::shmctl(id, libc::IPC_RMID, ptr::null_mut()), 0);
        assert_ne!(at.addr(), usize::MAX, "{}", std::io::Error::last_os_error());
        at
    }
}

/// Attaches a segment above a mapped page. When the segment is detached, the free addresses are one
/// page, which no mapping of another thread takes.
fn attached() -> *mut libc::c_void {
    let at = own();
    // SAFETY: the segment replaces the test's own page.
    segment(|id| unsafe { libc::shmat(id, at, libc::SHM_REMAP) })
}

/// A function that replaces the page at an address.
type Replace = fn(*mut libc::c_void);
/// A way to replace a page: its name, the function that maps the page, and the function that
/// replaces it.
type Replacement = (&'static str, fn() -> *mut libc::c_void, Replace);

/// Ways to replace a page by functions of the C library. memhooks and userfaultfd detect them.
const HOOKED: [Replacement; 7] = [
    ("munmap", own, |at| {
        unmap(at);
        raw_map(at);
    }),
    ("MAP_FIXED", own, |at| {
        map(at, FIXED);
    }),
    // SAFETY: the test's own page.
    ("madvise", own, |at| assert_eq!(unsafe { libc::madvise(at, page(), libc::MADV_DONTNEED) }, 0)),
    ("MADV_REMOVE", shared, |at| {
        // SAFETY: the test's own page.
        assert_eq!(unsafe { libc::madvise(at, page(), libc::MADV_REMOVE) }, 0)
    }),
    ("mremap to a smaller size", own, |at| {
        // SAFETY: the test's own pages, of which this is the second.
        let kept = unsafe { libc::mremap(at.wrapping_byte_sub(page()), 2 * page(), page(), 0) };
        assert_ne!(kept, libc::MAP_FAILED);
        raw_map(at);
    }),
    ("mremap onto it", own, |at| {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let elsewhere = map(ptr::null_mut(), OWN);
        // SAFETY: the test's own pages.
        assert_eq!(unsafe { libc::mremap(elsewhere, page(), page(), how, at) }, at);
    }),
    ("mremap", own, |at| {
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let elsewhere = map(ptr::null_mut(), OWN);
        // SAFETY: the test's own pages.
        assert_eq!(unsafe { libc::mremap(at, page(), page(), how, elsewhere) }, elsewhere);
        raw_map(at);
        unmap(elsewhere);
    }),
];

/// Ways to replace a page that userfaultfd does not detect: it cannot watch such memory, or gets no
/// event.
const SEGMENTS: [Replacement; 2] = [
    ("shmdt", attached, |at| {
        // SAFETY: the test attached the segment, and attaches a new one at its address.
        unsafe {
            assert_eq!(libc::shmdt(at), 0);
            let again = |id: i32| {
                ptr::with_exposed_provenance_mut(libc::syscall(libc::SYS_shmat, id, at, 0) as usize)
            };
            assert_eq!(segment(again).addr(), at.addr());
        }
    }),
    ("SHM_REMAP", attached, |at| {
        // SAFETY: the segment replaces the test's own page.
        assert_eq!(segment(|id| unsafe { libc::shmat(id, at, libc::SHM_REMAP) }), at);
    }),
];

/// Ways to replace a page by raw system calls. userfaultfd detects them, and memhooks do not.
const RAW: [Replacement; 3] = [
    ("raw mremap", own, |at| {
        let elsewhere = map(ptr::null_mut(), OWN);
        let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the test's own pages.
        let moved = unsafe { libc::syscall(libc::SYS_mremap, at, page(), page(), how, elsewhere) };
        assert_eq!(moved as usize, elsewhere.addr());
        raw_map(at);
        unmap(elsewhere);
    }),
    ("raw munmap", own, |at| {
        // SAFETY: the test's own page.
        assert_eq!(unsafe { libc::syscall(libc::SYS_munmap, at, page()) }, 0);
        raw_map(at);
    }),
    ("raw madvise", own, |at| {
        // SAFETY: the test's own page.
        assert_eq!(unsafe { libc::syscall(libc::SYS_madvise, at, page(), libc::MADV_DONTNEED) }, 0);
    }),
];

/// The NIC under test: the software NIC with pinned pages, or a named RDMA device.
#[derive(Clone, Debug)]
enum Nic {
    Pinned,
    Device(String),
}

/// Returns the NICs to test: the software NIC, unless `HMEM_TEST_CONFIG` is `verbs` or this process
/// cannot pin pages, and the device that `HMEM_VERBS_DEVICE` names, if any.
///
/// # Panics
/// Panics if `HMEM_TEST_CONFIG` is `verbs` and no device is named.
fn nics() -> Vec<Nic> {
    let device =
        env::var("HMEM_VERBS_DEVICE").ok().filter(|name| !name.is_empty()).map(Nic::Device);
    let device_only = env::var("HMEM_TEST_CONFIG").is_ok_and(|configs| configs == "verbs");
    assert!(!device_only || device.is_some(), "HMEM_TEST_CONFIG=verbs needs HMEM_VERBS_DEVICE");
    let pins = !device_only && machine::without_pinned_pages().is_none();
    pins.then_some(Nic::Pinned).into_iter().chain(device).collect()
}

impl Nic {
    /// Returns the number of rounds for each way to replace a page. RDMA devices do fewer, since
    /// they are emulated.
    fn rounds(&self) -> u64 {
        match self {
            Self::Pinned => 500,
            Self::Device(_) => 30,
        }
    }

    /// Returns true if this way to replace a page is tested over this NIC. RDMA devices test six
    /// ways only, since they are emulated.
    fn shows(&self, (name, ..): &&Replacement) -> bool {
        let sorts = ["munmap", "MAP_FIXED", "madvise", "mremap", "raw munmap", "raw madvise"];
        matches!(self, Self::Pinned) || sorts.contains(name)
    }

    fn provider(&self) -> Arc<dyn Provider> {
        match self {
            Self::Pinned => {
                let loopback =
                    Loopback::builder().needs(MODE).remap_policy(RemapPolicy::Pinned).build();
                Arc::new(loopback.expect("a software NIC"))
            }
            Self::Device(_) => verbs(),
        }
    }
}

#[cfg(feature = "verbs")]
fn verbs() -> Arc<dyn Provider> {
    let verbs = hmem::verbs::Verbs::builder().connect_in_process(true).build();
    Arc::new(verbs.expect("load libibverbs"))
}

#[cfg(not(feature = "verbs"))]
fn verbs() -> Arc<dyn Provider> {
    panic!("HMEM_VERBS_DEVICE names a device, and this build is without the cargo feature `verbs`")
}

/// Two connected endpoints of a domain with a cache, and a buffer for the moved bytes.
struct Net {
    seen: hmem::Region<Vec<u8>>,
    key: RemoteKey,
    cq: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    _target: Endpoint,
    peer: PeerId,
    domain: Domain,
}

impl Net {
    fn open(nic: &Nic, monitor: &Arc<dyn Monitor>) -> Self {
        let builder =
            Hmem::builder().without_vendor_ifaces().imported_cache_monitor(Arc::clone(monitor));
        let hmem = builder.build().expect("the ifaces start");
        let name = match nic {
            Nic::Pinned => None,
            Nic::Device(name) => Some(name.clone()),
        };
        let cache = CacheAttr::default().max_count(1024).max_bytes(1 << 30).merge(false);
        let attr =
            DomainAttr { nic: name, mr_mode: MODE, cache: Some(cache), ..DomainAttr::default() };
        let domain = hmem.domain_on(&*nic.provider(), attr).expect("a domain");
        let cq = domain.open_cq(16).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let (endpoint, target) = (open(), open());
        let peer = endpoint.resolve(&target.name()).expect("the target");
        target.resolve(&endpoint.name()).expect("the initiator");
        let seen = domain.register(vec![0_u8; 8], REMOTE | Access::READ).expect("a buffer");
        let key = seen.key().expect("a key");
        Self { seen, key, cq, endpoint, _target: target, peer, domain }
    }

    fn finish(&self, posted: Result<()>) {
        posted.expect("posted");
        let mut done = Vec::with_capacity(1);
        while self.cq.read(&mut done, 1).expect("the queue") == 0 {
            std::hint::spin_loop();
        }
        assert_eq!(done.remove(0).result.expect("moved"), 8);
    }

    fn seen(&self) -> u64 {
        let mut bytes = [0; 8];
        self.seen.read(0, &mut bytes).expect("inside");
        u64::from_ne_bytes(bytes)
    }

    /// Registers the range in the cache. Returns the number in the first 8 bytes of the range,
    /// which a NIC reads through the remote key.
    fn pulled(&self, range: AddressRange) -> u64 {
        // SAFETY: the memory is the test's own. The test replaces it while it is cached, and the
        // NIC's pinned pages stay valid.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        let cache = self.domain.cache().expect("a cache");
        let region = cache.get(memory, REMOTE).expect("registered");
        let key = region.key().expect("a key");
        let remote = [RemoteSegment { address: region.base_addr(), len: 8, key: &key }];
        let local = [self.seen.slice(0, 8).expect("all of it")];
        self.finish(self.endpoint.read(&local, &remote, self.peer, 1));
        self.seen()
    }

    /// Writes the first 8 bytes of the range to the peer, without a descriptor. Returns the number
    /// that arrived.
    fn pushed(&self, range: AddressRange) -> u64 {
        let remote = [RemoteSegment { address: Iova(self.key.base().0), len: 8, key: &self.key }];
        let local = [LocalSegment { address: range.start(), len: 8, desc: None }];
        let operation = Operation::Write { remote: &remote };
        let request = WorkRequest { operation, local: &local, peer: self.peer, context: 2 };
        // SAFETY: the memory is the test's own, and nothing refers into it.
        self.finish(unsafe { self.endpoint.post(&request) });
        self.seen()
    }
}

/// Returns the number of rounds in which the NIC moved bytes of an earlier round, and the number of
/// invalidations. With `adversary`, a second thread looks the memory up all the time.
fn stale(
    nic: &Nic,
    monitor: &Arc<dyn Monitor>,
    (_, memory, replace): &Replacement,
    rounds: u64,
    adversary: bool,
) -> (u64, u64) {
    let net = Net::open(nic, monitor);
    let at = memory();
    let range =
        AddressRange::new(Address(at.expose_provenance() as u64), page() as u64).expect("no wrap");
    let (running, looked) = (AtomicBool::new(true), AtomicU64::new(0));
    let mut stale = 0;
    thread::scope(|scope| {
        if adversary {
            scope.spawn(|| {
                let cache = net.domain.cache().expect("a cache");
                // SAFETY: the memory is the test's own, and no transfer uses this region.
                let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
                while running.load(SeqCst) {
                    // Registers the memory while it changes; unmapped addresses are refused.
                    drop(cache.get(memory, REMOTE));
                    looked.fetch_add(1, SeqCst);
                }
            });
        }
        // Ends the second thread, also after a panic.
        let _stop = Stop(&running);
        for round in 1..=rounds {
            // Lets the second thread run, even on one processor.
            let before = looked.load(SeqCst);
            while adversary && round % 16 == 1 && looked.load(SeqCst) == before {
                thread::yield_now();
            }
            replace(at);
            // SAFETY: the test's own page, which only the NIC reads meanwhile.
            unsafe { at.cast::<u64>().write_volatile(round) };
            let moved = if round % 2 == 0 { net.pulled(range) } else { net.pushed(range) };
            stale += u64::from(moved != round);
        }
    });
    let cache = net.domain.cache().expect("a cache");
    let now = cache.statistics();
    assert_eq!(now.leases, 0);
    cache.evict_idle();
    cache.reclaim();
    assert_eq!(net.domain.live().regions, 1, "only the buffer is registered");
    unmap(at);
    (stale, now.all_invalidations())
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// Asserts for each NIC and each way to replace a page that no round is stale, and that more than a
/// tenth of the rounds invalidated an entry. Without invalidations nothing would be cached.
///
/// Memory whose change the monitor still processes is not cached. A busy machine may not run the
/// monitor's thread for long, so the rounds are repeated.
fn assert_none_stale(
    monitor: &Arc<dyn Monitor>,
    causes: &[Replacement],
    rounds: Option<u64>,
    adversary: bool,
) {
    for nic in nics() {
        for cause in causes.iter().filter(|cause| nic.shows(cause)) {
            let rounds = rounds.unwrap_or(nic.rounds());
            let was_cached = (0..5).any(|_| {
                let (stale, told) = stale(&nic, monitor, cause, rounds, adversary);
                let (cause, monitor) = (cause.0, monitor.name());
                assert_eq!(stale, 0, "{cause} under {monitor} over {nic:?}, of {rounds} rounds");
                told > rounds / 10
            });
            assert!(was_cached, "{} over {nic:?}: hardly anything was cached", cause.0);
        }
    }
}

/// Asserts that at least 30 of 40 rounds are stale, for each NIC and each way to replace a page.
fn assert_stale(monitor: &Arc<dyn Monitor>, causes: &[Replacement]) {
    for nic in nics() {
        for cause in causes.iter().filter(|cause| nic.shows(cause)) {
            let (stale, _) = stale(&nic, monitor, cause, 40, false);
            let (cause, ..) = cause;
            assert!(
                stale >= 30,
                "{cause} over {nic:?}: only {stale} of 40 rounds were stale, so the test is void"
            );
        }
    }
}

/// Runs `body` as the only test of a process, because patched functions and reused addresses belong
/// to the process. Does not run it if `needs` is a skip.
fn alone(name: &str, needs: Outcome, body: impl FnOnce()) -> Outcome {
    needs?;
    if child::alone(name, &[]) {
        body();
    }
    Ok(())
}

/// Returns a skip if there is no NIC to test.
fn a_nic() -> Outcome {
    if nics().is_empty() { skip(machine::without_pinned_pages()) } else { Ok(()) }
}

/// Returns a skip if there is no NIC to test, or no userfaultfd.
fn a_nic_and_userfaultfd() -> Outcome {
    a_nic().and(skip(machine::without_userfaultfd()))
}

fn memhooks(rounds: Option<u64>) {
    let hooks: Arc<dyn Monitor> = MemHooks::start().expect("memhooks work here");
    for adversary in [false, true] {
        assert_none_stale(&hooks, &HOOKED, rounds, adversary);
        assert_none_stale(&hooks, &SEGMENTS, rounds, adversary);
    }
}

/// Tests userfaultfd with lookups by the unmapping thread only. `docs/monitors.md` describes the
/// race of other threads.
fn userfaultfd(rounds: Option<u64>) {
    let events: Arc<dyn Monitor> = UserFaultFd::start().expect("userfaultfd works here");
    assert_none_stale(&events, &HOOKED, rounds, false);
    assert_none_stale(&events, &RAW, rounds, false);
}

fn both(rounds: Option<u64>) {
    let hooks = MemHooks::start().expect("memhooks work here");
    let events = UserFaultFd::start().expect("userfaultfd works here");
    let both: Arc<dyn Monitor> = Layered::new(hooks, events);
    assert_none_stale(&both, &HOOKED, rounds, true);
    assert_none_stale(&both, &SEGMENTS, rounds, true);
    assert_none_stale(&both, &RAW, rounds, false);
}

fn code_that_has_the_monitor_cannot_end_the_subscriptions_of_a_cache() -> Outcome {
    let needs = skip(machine::without_pinned_pages()).and(skip(machine::without_userfaultfd()));
    let name = "code_that_has_the_monitor_cannot_end_the_subscriptions_of_a_cache";
    alone(name, needs, || {
        let start = || -> Arc<dyn Monitor> {
            let hooks = MemHooks::start().expect("memhooks work here");
            Layered::new(hooks, UserFaultFd::start().expect("userfaultfd works here"))
        };
        let (ours, other) = (start(), start());
        let net = Net::open(&Nic::Pinned, &ours);
        let [at, elsewhere] = [(); 2].map(|()| map(ptr::null_mut(), OWN));
        let range = |at: *mut libc::c_void| {
            AddressRange::new(Address::of_ptr(at), page() as u64).expect("no wrap")
        };
        let write = |number: u64| {
            // SAFETY: the test's own page, which only the NIC reads meanwhile.
            unsafe { at.cast::<u64>().write_volatile(number) };
        };
        write(1);
        assert_eq!(net.pulled(range(at)), 1);
        assert_eq!(net.domain.cache().expect("a cache").entries().len(), 1, "cached");
        // The numbers of these subscriptions are those that the cache's monitor uses too.
        for _ in 0..16 {
            let subscription = other.subscribe(range(elsewhere), Arc::new(Recorder::default()));
            ours.unsubscribe(subscription.expect("watched"));
        }
        unmap(at);
        assert_eq!(map(at, FIXED), at);
        write(2);
        assert_eq!(net.pulled(range(at)), 2, "a registration of the unmapped page");
        unmap(at);
        unmap(elsewhere);
    })
}

fn without_a_monitor_every_cause_leaves_stale_hits() -> Outcome {
    alone("without_a_monitor_every_cause_leaves_stale_hits", a_nic(), || {
        let silent: Arc<dyn Monitor> = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
        assert_stale(&silent, &HOOKED);
        assert_stale(&silent, &SEGMENTS);
        assert_stale(&silent, &RAW);
        // memhooks miss raw system calls.
        let hooks: Arc<dyn Monitor> = MemHooks::start().expect("memhooks work here");
        assert_stale(&hooks, &RAW);
    })
}

fn memhooks_leave_no_stale_hit_even_for_a_second_thread() -> Outcome {
    alone("memhooks_leave_no_stale_hit_even_for_a_second_thread", a_nic(), || memhooks(None))
}

fn userfaultfd_leaves_no_stale_hit_for_the_thread_that_unmaps() -> Outcome {
    alone(
        "userfaultfd_leaves_no_stale_hit_for_the_thread_that_unmaps",
        a_nic_and_userfaultfd(),
        || userfaultfd(None),
    )
}

fn memhooks_with_userfaultfd_leave_no_stale_hit() -> Outcome {
    alone("memhooks_with_userfaultfd_leave_no_stale_hit", a_nic_and_userfaultfd(), || both(None))
}

const MILLION: Option<u64> = Some(1_000_000);

fn slow_memhooks_leave_no_stale_hit_in_a_million_rounds() -> Outcome {
    alone("slow_memhooks_leave_no_stale_hit_in_a_million_rounds", a_nic(), || memhooks(MILLION))
}

fn slow_userfaultfd_leaves_no_stale_hit_in_a_million_rounds() -> Outcome {
    alone(
        "slow_userfaultfd_leaves_no_stale_hit_in_a_million_rounds",
        a_nic_and_userfaultfd(),
        || userfaultfd(MILLION),
    )
}

fn slow_layered_monitors_leave_no_stale_hit_in_a_million_rounds() -> Outcome {
    alone(
        "slow_layered_monitors_leave_no_stale_hit_in_a_million_rounds",
        a_nic_and_userfaultfd(),
        || both(MILLION),
    )
}
