//! Tests that safe code cannot misuse memory: free it while it is registered, register it for
//! another owner, or lose it in a panic.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{counted::Counted, link};
use hmem::{
    Access, Addressing, AllocationKind, Batch, CacheAttr, Decision, DeviceBuffer, DeviceId, Domain,
    DomainAttr, DomainBindFlags, Error, ErrorKind, Hmem, Iface, Memory, MrFlags, MrMode, Regions,
    Registry, Rejected, Request, Result, Type2Bind, Type2Kind,
    event_queue::EventQueue,
    iface::AllocRequest,
    loopback::Loopback,
    p2p::path::DefaultPathSelector,
    path::{PathRegistration, PathSelector, Target},
    provider::{Nic, WindowState},
    system::{Simulated, System},
};
use hmem_conformance::link::eventually;
use tracing::{Event, Metadata, Subscriber, span};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

fn hmem(device: &Arc<Simulated>) -> Hmem {
    Hmem::builder()
        .without_vendor_ifaces()
        .shared_iface(Arc::clone(device) as _)
        .provider(Loopback::builder().build().expect("a software NIC"))
        .build()
        .expect("nothing in the environment forbids it")
}

fn simulated() -> Arc<Simulated> {
    Arc::new(Simulated::builder().build().expect("a simulated device"))
}

fn attr() -> DomainAttr {
    DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() }
}

fn domain(hmem: &Hmem) -> Domain {
    hmem.domain("loopback", attr()).expect("the loopback needs no mode")
}

fn buffer(iface: &Arc<dyn Iface>, kind: AllocationKind) -> DeviceBuffer {
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind };
    DeviceBuffer::allocate(iface, &request).expect("memory")
}

fn register_together<M: Memory>(
    nics: &[&Domain],
    memory: M,
) -> Result<Regions<M>, Rejected<Regions<M>>> {
    Batch::on(nics).add(Request::new(memory, REMOTE)).register()
}

/// Calls `close` until it succeeds. Panics on any error other than Busy.
fn close_when_idle<T, B>(mut value: T, close: impl Fn(T) -> Result<B, Rejected<T>>) -> B {
    loop {
        match close(value) {
            Ok(buffer) => return buffer,
            Err(Rejected { value: back, error }) => {
                assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                value = back;
            }
        }
    }
}

/// Calls `start` and then runs two threads, `rounds` times: one runs the `close` that `start`
/// returned, and the other drops the dependent object that `start` returned.
fn race_close_with_drop<D: Send>(
    rounds: usize,
    mut start: impl FnMut() -> (D, Box<dyn FnOnce() + Send>),
) {
    for _ in 0..rounds {
        let (dependent, close) = start();
        let together = Barrier::new(2);
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| {
                together.wait();
                close();
            });
            together.wait();
            drop(dependent);
            closing.join().expect("a close that gives Busy or the buffer");
        });
    }
}

/// MR-18
#[test]
fn close_on_several_nics_racing_a_sub_region_drop_loses_no_buffer() {
    let hmem = hmem(&simulated());
    let domains = Arc::new([domain(&hmem), domain(&hmem)]);
    race_close_with_drop(10_000, || {
        let shared = register_together(&[&domains[0], &domains[1]], vec![5_u8; 64]);
        let shared = shared.expect("both take host memory");
        let region = &shared.regions()[1];
        let sub = region.sub(region.range(), REMOTE, None).expect("the whole of it");
        let close = || {
            let memories = close_when_idle(shared, |shared| shared.close());
            assert_eq!(memories, [[5; 64]]);
        };
        (sub, Box::new(close) as _)
    });
    assert_eq!((domains[0].live().regions, domains[1].live().regions), (0, 0));
}

/// MR-18
#[test]
fn close_racing_a_sub_region_drop_loses_no_buffer() {
    let hmem = hmem(&simulated());
    let domain = domain(&hmem);
    race_close_with_drop(5_000, || {
        let region = domain.register(vec![5_u8; 64], REMOTE).expect("host memory");
        let sub = region.sub(region.range(), REMOTE, None).expect("the whole of it");
        let close = || {
            assert_eq!(close_when_idle(region, |region| region.close()), [5; 64]);
        };
        (sub, Box::new(close) as _)
    });
    assert_eq!(domain.live().regions, 0);
}

/// MR-18
#[test]
fn buffer_of_a_foreign_iface_is_refused() {
    let device = simulated();
    let hmem = hmem(&device);
    let domains = [domain(&hmem), domain(&hmem)];
    // Another iface of the same kind as the domain's, which does not know the domain's memory.
    let foreign: Arc<dyn Iface> = simulated();
    for kind in [AllocationKind::Device, AllocationKind::Managed] {
        let refused = domains[0].register(buffer(&foreign, kind), REMOTE).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument, "{kind:?}: {refused}");
        let mut bytes = [1; 4];
        refused.value.read(0, &mut bytes).expect("the buffer is whole");
        assert_eq!(bytes, [0; 4]);
        let refused = register_together(&[&domains[0], &domains[1]], buffer(&foreign, kind));
        let refused = refused.unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument, "{kind:?}: {refused}");
        assert_eq!(refused.error.operation(), "register batch", "{refused}");
        assert!(refused.value.close().is_ok(), "nothing was registered");
    }
    assert_eq!((domains[0].live().regions, domains[1].live().regions), (0, 0));

    // Memory of the domain's own iface, and of a system iface outside the domain, registers.
    let own: Arc<dyn Iface> = device;
    let system: Arc<dyn Iface> = Arc::new(System::new());
    for taken in [buffer(&own, AllocationKind::Device), buffer(&system, AllocationKind::System)] {
        let region = domains[0].register(taken, REMOTE).expect("memory of the domain's ifaces");
        assert!(region.close().is_ok());
    }
}

/// A tracing subscriber that panics at the event that ends a registration, after the NIC has
/// registered the memory.
struct PanicsAtRegistered;

impl Subscriber for PanicsAtRegistered {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut registered = false;
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            registered |= field.name() == "message" && format!("{value:?}") == "registered";
        });
        assert!(!registered, "as asked for");
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// MR-18
#[test]
fn panic_after_the_nic_registered_leaks_the_memory() {
    let hmem = hmem(&simulated());
    let domain = domain(&hmem);
    let ends = Arc::new(AtomicUsize::new(0));
    let register = || domain.register(Counted::new(64, &ends), REMOTE).is_ok();
    // With a single subscriber in the process, tracing decides which events are enabled in the
    // thread that reaches them first. That may be the thread of another test. A second subscriber
    // prevents this.
    let _second = tracing::Dispatch::new(PanicsAtRegistered);
    let panicked = tracing::subscriber::with_default(PanicsAtRegistered, || {
        catch_unwind(AssertUnwindSafe(register))
    });
    assert!(panicked.is_err(), "the subscriber was not told");
    assert_eq!(domain.live().regions, 1, "the NIC has the memory");
    assert_eq!(ends.load(Ordering::SeqCst), 0, "it is freed under the NIC");
}

/// A path selector that panics.
#[derive(Debug)]
struct Panics(DefaultPathSelector);

// SAFETY: the selector registers nothing.
unsafe impl PathSelector for Panics {
    fn plain_host(&self, nic: &Nic) -> Decision {
        self.0.plain_host(nic)
    }

    unsafe fn register(&self, _: &[Target<'_>], _: &mut dyn FnMut(PathRegistration)) -> Result<()> {
        panic!("as asked for")
    }
}

/// A path selector that registers memory on the NIC, and then fails or panics.
#[derive(Debug)]
struct EndsBadly {
    selector: DefaultPathSelector,
    panics: bool,
}

// SAFETY: each region comes from the wrapped selector. The trait allows an error after regions were
// handed over. A panic breaks the contract, and the test shows what follows.
unsafe impl PathSelector for EndsBadly {
    fn plain_host(&self, nic: &Nic) -> Decision {
        self.selector.plain_host(nic)
    }

    unsafe fn register(
        &self,
        targets: &[Target<'_>],
        done: &mut dyn FnMut(PathRegistration),
    ) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.selector.register(targets, done) }?;
        assert!(!self.panics, "as asked for");
        Err(Error::new(ErrorKind::Driver, "path"))
    }
}

/// MR-18
#[test]
fn region_is_closed_if_its_path_search_fails_late() {
    for panics in [false, true] {
        let device = simulated();
        let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
        let mut registry = Registry::new();
        registry.add(Arc::clone(&iface)).expect("the first");
        let selector = Arc::new(EndsBadly { selector: DefaultPathSelector::new(), panics });
        let loopback = Loopback::builder().build().expect("a software NIC");
        let domain = Domain::open(&loopback, Arc::new(registry), selector, attr()).expect("opens");
        let register = || {
            let memory = buffer(&iface, AllocationKind::Device);
            domain.register(memory, REMOTE).map_err(|rejected| rejected.error.kind())
        };
        match catch_unwind(AssertUnwindSafe(register)) {
            Ok(registered) => assert_eq!(registered.unwrap_err(), ErrorKind::Driver),
            Err(_) => assert!(panics),
        }
        assert_eq!(domain.live().regions, 0, "panics: {panics}");
        assert_eq!(device.stats().live_allocations, u64::from(panics));
    }
}

/// A path selector that skips the last NIC and succeeds.
#[derive(Debug)]
struct SkipsLast(DefaultPathSelector);

// SAFETY: each region comes from the wrapped selector.
unsafe impl PathSelector for SkipsLast {
    fn plain_host(&self, nic: &Nic) -> Decision {
        self.0.plain_host(nic)
    }

    unsafe fn register(
        &self,
        targets: &[Target<'_>],
        done: &mut dyn FnMut(PathRegistration),
    ) -> Result<()> {
        match targets {
            [] | [_] => Ok(()),
            // SAFETY: the caller upholds the contract of this method, which is that of the
            // forwarded call.
            [first @ .., _] => unsafe { self.0.register(first, done) },
        }
    }
}

/// MR-18
#[test]
fn path_selector_without_a_region_for_each_nic_is_an_error() {
    let device = simulated();
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let mut registry = Registry::new();
    registry.add(Arc::clone(&iface)).expect("the first");
    let (registry, selector) =
        (Arc::new(registry), Arc::new(SkipsLast(DefaultPathSelector::new())));
    let loopback = Loopback::builder().build().expect("a software NIC");
    let domains = [(); 2].map(|()| {
        let selector = Arc::clone(&selector) as _;
        Domain::open(&loopback, Arc::clone(&registry), selector, attr()).expect("opens")
    });
    let memory = || buffer(&iface, AllocationKind::Device);
    let check = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
        let why = error.context_value("why");
        assert_eq!(why, Some("the path selector returned too few regions"), "{error}");
        let live = domains.each_ref().map(|domain| domain.live().regions);
        assert_eq!((live, device.stats().live_allocations), ([0, 0], 0));
    };
    check(domains[0].register(memory(), REMOTE).map_err(|refused| refused.error).unwrap_err());
    let both = [&domains[0], &domains[1]];
    check(register_together(&both, memory()).map_err(|refused| refused.error).unwrap_err());
}

/// MR-18
#[test]
fn memory_of_a_panicking_registration_is_leaked() {
    let device = simulated();
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let mut registry = Registry::new();
    registry.add(Arc::clone(&iface)).expect("the first");
    let (registry, selector) = (Arc::new(registry), Arc::new(Panics(DefaultPathSelector::new())));
    let loopback = Loopback::builder().build().expect("a software NIC");
    let domain = || {
        let selector = Arc::clone(&selector) as _;
        Domain::open(&loopback, Arc::clone(&registry), selector, attr()).expect("opens")
    };
    let leaked = || device.stats().live_allocations;
    let memory = || buffer(&iface, AllocationKind::Device);

    let waited_for = domain();
    let register = || waited_for.register(memory(), REMOTE).is_ok();
    assert!(catch_unwind(AssertUnwindSafe(register)).is_err());
    assert_eq!(leaked(), 1, "registered here");
    let other = domain();
    let register_with_both = || register_together(&[&waited_for, &other], memory()).is_ok();
    assert!(catch_unwind(AssertUnwindSafe(register_with_both)).is_err());
    assert_eq!(leaked(), 2, "registered with several NICs");

    let asynchronous = domain();
    let events = Arc::new(EventQueue::new());
    asynchronous.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
    let region = asynchronous.register(memory(), REMOTE).expect("a sound request");
    let event = events.wait(Duration::from_secs(60)).expect("the registration has its event");
    assert_eq!(event.result.unwrap_err().kind(), ErrorKind::Driver);
    let Rejected { value: region, error } = region.close().expect_err("a NIC may reach it");
    assert_eq!(error.kind(), ErrorKind::Driver, "{error}");
    drop(region);
    assert_eq!(leaked(), 3, "registered by a thread");
}

/// MR-12
#[test]
fn location_flags_must_match_the_kind_of_memory() {
    let device = simulated();
    let hmem = hmem(&device);
    let domain = domain(&hmem);
    let iface: Arc<dyn Iface> = device;
    let register = |kind, flags| {
        let registered = domain.submit(Request::new(buffer(&iface, kind), REMOTE).flags(flags));
        registered.map(drop).map_err(|rejected| rejected.error.kind())
    };
    let refused: Result<(), ErrorKind> = Err(ErrorKind::InvalidArgument);
    for (kind, device_only, host_alloc) in [
        (AllocationKind::Device, Ok(()), refused),
        (AllocationKind::StreamOrdered, Ok(()), refused),
        (AllocationKind::Virtual, Ok(()), refused),
        (AllocationKind::Managed, refused, refused),
        (AllocationKind::Host, refused, Ok(())),
    ] {
        assert_eq!(register(kind, MrFlags::empty()), Ok(()), "{kind:?}");
        assert_eq!(register(kind, MrFlags::HMEM_DEVICE_ONLY), device_only, "{kind:?}");
        assert_eq!(register(kind, MrFlags::HMEM_HOST_ALLOC), host_alloc, "{kind:?}");
    }
    assert_eq!(domain.live().regions, 0);
}

/// MR-15
#[test]
fn page_size_must_exist_on_both_system_and_nic() {
    let base = hmem::os_page_sizes()[0];
    let lacks = |size: usize| !hmem::os_page_sizes().contains(&size);
    // No hardware has a page size between two powers of two.
    let odd = 3 * base;
    assert!(lacks(odd));
    let register = |nic: &[usize], page_size| {
        let loopback = Loopback::builder().page_sizes(nic).build().expect("a software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces().provider(loopback).build();
        let domain = domain(&hmem.expect("builds"));
        let registered = domain.submit(Request::new(vec![0_u8; 64], REMOTE).page_size(page_size));
        let registered = registered.map(|region| region.page_size());
        registered.map_err(|rejected: Rejected<_>| -> Error { rejected.error })
    };
    assert_eq!(register(&[base, odd], base).expect("both have it"), base);
    assert_eq!(register(&[odd], 0).expect("the NIC's choice"), 0);
    for (nic, asked) in [
        // The size exists on the NIC only, on the system only, on neither.
        (&[base, odd][..], odd),
        (&[odd][..], base),
        (&[base][..], odd),
    ] {
        let error = register(nic, asked).expect_err("one of them lacks it");
        assert_eq!(error.kind(), ErrorKind::BadPageSize, "{nic:?}, {asked}: {error}");
    }
}

/// Runs `uses` on a thread of its own, and panics if it hangs.
fn in_time(uses: impl FnOnce() + Send + 'static) {
    let thread = thread::spawn(uses);
    eventually("the end of the calls", || thread.is_finished());
    thread.join().expect("no panic");
}

#[test]
fn owner_of_memory_may_use_the_window_whose_binding_ends() {
    const WINDOWED: Access = REMOTE.union(Access::MW_BIND);
    let ends = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&ends);
    in_time(move || {
        let domain = domain(&hmem(&simulated()));
        let window = Arc::new(domain.alloc_type_1_window().expect("a window"));
        let register = || {
            let (window, ends) = (Arc::downgrade(&window), Arc::clone(&ends));
            let memory = Counted::calling(64, move || {
                drop(window.upgrade().map(|window| window.key()));
                ends.fetch_add(1, Ordering::SeqCst);
            });
            domain.register(memory, WINDOWED).expect("registers")
        };
        // The binding is the last owner of the first region, and then of the second.
        window.bind(&register(), 0, 8, REMOTE).expect("binds");
        window.bind(&register(), 0, 8, REMOTE).expect("binds");
        assert_eq!(ends.load(Ordering::SeqCst), 1);
        window.unbind().expect("unbinds");
        assert_eq!((domain.live().regions, domain.live().windows), (0, 1));
    });
    assert_eq!(seen.load(Ordering::SeqCst), 2);
}

#[test]
fn owner_of_memory_may_use_the_type_2_window_whose_binding_ends() {
    let ends = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&ends);
    in_time(move || {
        let link = link::plain();
        let domain = &link.target.domain;
        let window = Arc::new(domain.alloc_type_2_window(Type2Kind::B).expect("a window"));
        let (its, ends) = (Arc::downgrade(&window), Arc::clone(&ends));
        let memory = Counted::calling(64, move || {
            assert_ne!(its.upgrade().map(|window| window.state()), Some(WindowState::Valid));
            ends.fetch_add(1, Ordering::SeqCst);
        });
        let region = domain.register(memory, REMOTE | Access::MW_BIND).expect("registers");
        let (access, addressing) = (REMOTE, Addressing::Virtual);
        let bind = Type2Bind { region: &region, offset: 0, len: 8, access, addressing, tag: 1 };
        window.post_bind(&link.target.endpoint, &bind, 1).expect("posts");
        link.received().result.expect("binds");
        drop(region);
        window.post_invalidate(&link.target.endpoint, 2).expect("posts");
        link.received().result.expect("invalidates");
        assert_eq!(window.state(), WindowState::Free);
    });
    assert_eq!(seen.load(Ordering::SeqCst), 1);
}

/// CACHE-08
#[test]
fn memory_of_a_cached_region_is_freed_after_its_last_sub_region() {
    let domain = {
        let cache = Some(CacheAttr::default());
        let attr = DomainAttr { cache, ..attr() };
        hmem(&simulated()).domain("loopback", attr).expect("a domain")
    };
    let cache = domain.cache().expect("a cache");
    let ends = Arc::new(AtomicUsize::new(0));
    let buffer = cache.own(Counted::new(64, &ends)).map_err(Error::from).expect("owns");
    let region = buffer.get(0, 64, REMOTE).expect("registers");
    let sub = region.sub(region.range(), REMOTE, None).expect("a sub-region");
    drop(region);
    drop(buffer);
    eventually("a refusal", || cache.statistics().deregister_failed == 1);
    assert_eq!(ends.load(Ordering::SeqCst), 0, "the sub-region uses the memory");
    // Nothing calls the cache from here on.
    drop(sub);
    eventually("the end of the memory", || ends.load(Ordering::SeqCst) == 1);
    assert_eq!(domain.live().regions, 0);
}
