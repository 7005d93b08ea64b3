//! Tests of the hooks of the driver's frees. They run over the fake driver, or over a GPU with
//! `HMEM_CUDA=real`. The fake's functions begin with the same instructions as those of the real
//! library. A process can hook only one library, so only one of the two runs.

use std::sync::Arc;

use hmem_core::{
    Address, AddressRange, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt,
    iface::AllocRequest,
    monitor::{
        DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor,
    },
};
use hmem_fake_cuda::Profile;
use hmem_iface_cuda::{
    Builder, Cuda, CudaMonitorKind, FreeHooks,
    sys::{self, CuDevicePtr, Functions},
};
use parking_lot::Mutex;

use crate::{
    subscriber::NO_SUBSCRIPTION,
    vendor_files,
    world::{World, check},
};

/// A subscriber that records at the start and at the end of each invalidation whether the memory is
/// still allocated.
#[derive(Debug)]
struct Witness {
    functions: Functions,
    at: u64,
    seen: Mutex<Vec<(AddressRange, bool)>>,
    ended: Mutex<Vec<bool>>,
}

impl Witness {
    fn new(world: &World, at: u64) -> Arc<Self> {
        let functions = world.app.functions.clone();
        Arc::new(Self { functions, at, seen: Mutex::default(), ended: Mutex::default() })
    }

    /// Returns the invalidated ranges. Each has a flag that is true if the memory was still
    /// allocated.
    ///
    /// In a real driver one hooked function may call another one, so that one free notifies twice.
    fn invalidated(&self) -> Vec<(AddressRange, bool)> {
        let mut seen = self.seen.lock().clone();
        if vendor_files::is_required("cuda", "real") {
            seen.dedup();
        }
        seen
    }

    fn is_allocated(&self) -> bool {
        let (mut attribute, mut kind) = (sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 0u32);
        let mut place = std::ptr::from_mut(&mut kind).cast();
        // SAFETY: the arrays have one element, and the output has the width of the attribute.
        let code = unsafe {
            (self.functions.pointer_get_attributes())(1, &mut attribute, &mut place, self.at)
        };
        code.is_success() && kind != 0
    }
}

impl Invalidator for Witness {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        let change = self.invalidate_start(range, cause);
        self.invalidate_end(change);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        assert_eq!(cause, InvalidationCause::Free);
        self.seen.lock().push((range, self.is_allocated()));
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {
        self.ended.lock().push(self.is_allocated());
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

/// Opens an iface over each driver to test: the fake in every profile, or only the real driver if
/// it is selected.
fn worlds(monitor: CudaMonitorKind) -> Box<dyn Iterator<Item = World>> {
    if vendor_files::is_required("cuda", "real") {
        Box::new(std::iter::once_with(move || World::real(monitor)))
    } else {
        Box::new(Profile::all().into_iter().map(move |profile| World::with(profile, monitor)))
    }
}

/// Runs a test over each driver, with a monitor that hooks the frees.
fn each(show: impl Fn(&mut World, &dyn Monitor)) {
    for mut world in worlds(CudaMonitorKind::Hooks) {
        let monitor = world.cuda.start_monitor().expect("hooks work on these entries");
        show(&mut world, &*monitor);
        drop(monitor);
        world.end();
    }
}

/// Returns a builder for another iface over the same driver.
fn builder_of(world: &World) -> Builder {
    Cuda::builder().functions(world.app.functions.clone()).monitor(CudaMonitorKind::Identity)
}

/// Function by which the application frees its memory.
type Free = Box<dyn FnOnce(&Functions)>;

/// Allocates memory of a kind without the iface. Returns its address and the function that frees
/// it.
fn allocate_without_iface(world: &mut World, kind: AllocationKind) -> (u64, Free) {
    let mut pointer: CuDevicePtr = 0;
    let mut host = std::ptr::null_mut();
    let mut stream = sys::CuStream::NULL;
    // SAFETY: every output is writable.
    world.app.current(|f| unsafe {
        match kind {
            AllocationKind::Host => check((f.mem_host_alloc())(&mut host, 10_000, 0)),
            AllocationKind::Managed => check((f.mem_alloc_managed())(&mut pointer, 10_000, 1)),
            AllocationKind::StreamOrdered => {
                check((f.stream_create())(&mut stream, 1));
                check(f.mem_alloc_async().expect("pools")(&mut pointer, 10_000, stream));
            }
            _ => check((f.mem_alloc())(&mut pointer, 10_000)),
        }
    });
    if kind == AllocationKind::Host {
        let at = host.expose_provenance() as u64;
        // SAFETY: the call above allocated the memory, and the closure runs once.
        return (at, Box::new(move |f| check(unsafe { (f.mem_free_host())(at as *mut _) })));
    }
    let free = move |f: &Functions| {
        // SAFETY: the calls above made the memory and the stream, and the closure runs once.
        unsafe {
            if stream == sys::CuStream::NULL {
                check((f.mem_free())(pointer));
            } else {
                check(f.mem_free_async().expect("pools")(pointer, stream));
                check((f.stream_destroy())(stream));
            }
        }
    };
    (pointer, Box::new(free))
}

const KINDS: [AllocationKind; 4] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
];

/// MON-07
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn hooked_frees_notify_before_the_memory_is_freed() {
    each(|world, monitor| {
        assert_eq!(
            (monitor.name(), monitor.detection()),
            ("cuda-hooks", DetectionMethod::Identity)
        );
        assert!(
            monitor.detects(InvalidationCause::Free) && monitor.rationale().contains("as selected")
        );
        for kind in world.kinds(&KINDS) {
            let (at, free) = allocate_without_iface(world, kind);
            let found = world.cuda.query(Address(at)).expect("query").expect("known");
            assert_eq!(found.kind, kind, "{}", world.name);
            let witness = Witness::new(world, at);
            let part = found.range.slice(100, 50).expect("a part");
            let subscription =
                monitor.subscribe(part, Arc::clone(&witness) as _).expect("subscribed");
            world.app.current(|driver| free(driver));
            assert_eq!(witness.invalidated(), [(found.range, true)], "{}: {kind:?}", world.name);
            // After a stream-ordered free, a real driver may or may not know the memory: `cuda.h`
            // does not say when it forgets it.
            let open = world.is_real() && kind == AllocationKind::StreamOrdered;
            assert!(
                open || witness.ended.lock().last() == Some(&false),
                "{}: {kind:?}",
                world.name
            );
            monitor.unsubscribe(subscription);
            let (_, free) = allocate_without_iface(world, kind);
            world.app.current(|driver| free(driver));
            assert_eq!(witness.invalidated().len(), 1, "unsubscribed");
        }
    });
}

/// MON-07
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn hits_with_hooks_query_only_stream_ordered_memory() {
    each(|world, monitor| {
        let kinds = [&KINDS[..], &[AllocationKind::Virtual]].concat();
        for kind in world.kinds(&kinds) {
            let memory = world.allocate(4096, kind);
            let calls = |world: &World| world.fake.as_ref().map(|(driver, _)| driver.all_calls());
            let before = calls(world);
            assert!(monitor.valid(&NO_SUBSCRIPTION, &memory).expect("ask"));
            let asks = u64::from(kind == AllocationKind::StreamOrdered);
            assert_eq!(calls(world), before.map(|before| before + asks), "{kind:?}");
            world.free(&memory);
        }
    });
}

/// MON-07
///
/// If the driver does not know the range of freed memory, everything is invalidated. A null pointer
/// invalidates nothing.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn free_of_unknown_extent_invalidates_all_memory() {
    each(|world, monitor| {
        let memory = world.allocate(4096, AllocationKind::Device);
        let witness = Witness::new(world, memory.base().0);
        let subscription =
            monitor.subscribe(memory.range, Arc::clone(&witness) as _).expect("subscribed");
        world.app.current(|driver| {
            // SAFETY: no allocation is at the address, so that the driver refuses the call.
            assert!(!unsafe { (driver.mem_free())(0x1234) }.is_success());
            // SAFETY: the driver ignores or refuses null.
            let _either = unsafe { (driver.mem_free())(0) };
        });
        let context = world.app.create_context();
        world.app.destroy_context(context);
        let seen: Vec<_> =
            witness.seen.lock().iter().map(|(range, there)| (range.len(), *there)).collect();
        assert!(seen.iter().all(|told| *told == (u64::MAX, true)), "{seen:?}");
        assert!(seen.len() == 2 || world.is_real() && seen.len() > 2, "{seen:?}");
        assert_eq!(*witness.ended.lock(), vec![true; seen.len()]);
        monitor.unsubscribe(subscription);
        world.free(&memory);
    });
}

/// MON-07, HM-05
///
/// The release of a primary context invalidates all memory if the application makes it, and nothing
/// if the iface makes it and none of its memory is left there.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn only_a_context_release_of_the_application_invalidates_all() {
    each(|world, monitor| {
        let context = world.app.create_context();
        let mut at: CuDevicePtr = 0;
        // SAFETY: the output is writable; destroying the context frees the memory.
        check(unsafe { (world.app.functions.mem_alloc())(&mut at, 10_000) });
        let witness = Witness::new(world, at);
        let range = world.cuda.query(Address(at)).expect("query").expect("known").range;
        let subscription = monitor.subscribe(range, Arc::clone(&witness) as _).expect("subscribed");

        let request = |len| AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
        world.cuda.allocate(&request(1 << 50)).expect_err("too much");
        assert!(world.active().is_empty(), "released");
        let other = builder_of(world).open().expect("open");
        let memory = other.allocate(&request(4096)).expect("allocate");
        // SAFETY: no code uses the memory.
        unsafe { other.free(&memory) }.expect("free");
        other.close().expect("close");
        assert!(world.active().is_empty(), "released");
        let seen: Vec<_> = witness.invalidated().iter().map(|(range, _)| range.start()).collect();
        assert_eq!(seen, [memory.base()], "{}: the free alone", world.name);

        let other = builder_of(world).open().expect("open");
        let memory = other.allocate(&request(4096)).expect("allocate");
        world.app.current(|_| ());
        world.app.release_primary_context();
        assert_eq!(world.active(), [0], "the iface has it still");
        assert_eq!(
            witness.seen.lock().last().map(|(range, _)| range.len()),
            Some(u64::MAX),
            "the release notifies of all memory"
        );
        // Dropping the other iface destroys the primary context and frees its memory, which
        // invalidates everything.
        let seen = witness.seen.lock().len();
        drop(other);
        assert!(world.active().is_empty(), "released");
        witness.seen.lock().drain(..seen);
        let seen: Vec<_> = witness.invalidated().iter().map(|(range, _)| range.len()).collect();
        assert_eq!(seen, [u64::MAX], "{}: {} is freed with it", world.name, memory.range);

        monitor.unsubscribe(subscription);
        world.app.destroy_context(context);
    });
}

/// MON-03
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn hooks_are_patched_once_and_restored_by_the_last_user() {
    for world in worlds(CudaMonitorKind::Identity) {
        let functions = &world.app.functions;
        let code = || -> Vec<[u8; 16]> {
            let entry = |entry: usize| std::ptr::with_exposed_provenance::<[u8; 16]>(entry);
            // SAFETY: code of a loaded library is readable.
            functions.frees().iter().map(|(_, at)| unsafe { entry(*at).read() }).collect()
        };
        let before = code();
        assert!(
            before.len() >= 6,
            "{}: the entry is the one that an application calls",
            world.name
        );
        let (one, other) = (
            FreeHooks::start(functions).expect("the first user"),
            FreeHooks::start(functions).expect("the second user"),
        );
        assert_eq!(one.functions().len(), before.len());
        assert!(code().iter().zip(&before).all(|(now, then)| now != then));
        drop(one);
        other.check().expect("still there");
        drop(other);
        assert!(code() == before, "{}", world.name);
        world.end();
    }
}

/// MON-04
///
/// The monitor explains its method of detection. Functions that the caller passed are patched only
/// if the caller selects `Hooks`.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the fake driver cannot be hooked there")]
fn monitor_explains_its_choice() {
    let auto = if vendor_files::is_required("cuda", "real") {
        ("cuda-hooks+identity", "notify before the memory is freed")
    } else {
        ("cuda-identity", "injected")
    };
    for (kind, (name, words)) in [
        (CudaMonitorKind::Auto, auto),
        (CudaMonitorKind::Identity, ("cuda-identity", "hooks were not selected")),
        (CudaMonitorKind::Hooks, ("cuda-hooks", "graph nodes")),
    ] {
        for world in worlds(kind) {
            let monitor = world.cuda.start_monitor().expect("a monitor");
            assert_eq!(monitor.name(), name);
            assert!(monitor.rationale().contains(words), "{}", monitor.rationale());
            drop(monitor);
            world.end();
        }
    }
    let error = "kdreg2".parse::<CudaMonitorKind>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    for known in ["auto", "hooks", "identity", "kdreg2"] {
        assert!(error.to_string().contains(known), "{error}");
    }
}
