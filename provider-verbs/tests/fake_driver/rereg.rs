//! Changes of a region's rights in place (`ibv_rereg_mr`), over a fake driver: the available real
//! drivers refuse the call.

use std::{
    ffi::{c_int, c_void},
    fs,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Condvar, Mutex, MutexGuard,
        atomic::{AtomicI32, Ordering},
    },
    thread,
};

use crate::fake;
use crate::fake::{calls, functions, with};
use hmem_core::{
    Access, Domain, DomainAttr, ErrorKind, Raw, Region, WriteOrdering, provider::RawKeys,
};
use hmem_provider_verbs::{
    Verbs, VerbsDomain, VerbsMr,
    sys::{AccessFlags, Functions, Mr, Pd},
};

fn domain(max_mr_size: u64) -> Domain {
    domain_with(max_mr_size, false)
}

fn domain_with(max_mr_size: u64, windows: bool) -> Domain {
    let functions = functions();
    with(|script| (script.max_mr_size, script.windows) = (max_mr_size, windows));
    let verbs = Verbs::builder().functions(functions).build().expect("start");
    let attr = DomainAttr { ordering: WriteOrdering::Relaxed, ..DomainAttr::default() };
    fake::open_as(&verbs, attr)
}

fn register(domain: &Domain, len: u64) -> Region<Raw> {
    domain.register(fake::memory(page_size(), len), Access::REMOTE_READ).expect("register")
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// VRB-01
#[test]
fn rereg_changes_rights_and_keys_of_every_part() {
    let domain = domain(2 * page_size());
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = register(&domain, 4 * page_size());
    let handle = region.provider_region().expect("handle");
    let before = VerbsMr::all_of(&region).expect("keys");
    calls();
    // SAFETY: the fake library accesses no memory.
    unsafe { verbs.rereg(handle, Access::REMOTE_READ | Access::REMOTE_WRITE) }
        .expect("change the rights");
    // The arguments are CHANGE_ACCESS, and the flags REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC and
    // LOCAL_WRITE.
    assert_eq!(calls(), ["rereg_mr 0x4 0x10000f", "rereg_mr 0x4 0x10000f"]);
    let after = VerbsMr::all_of(&region).expect("keys");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((after.rkey, after.lkey), (before.rkey + 0x10, before.lkey + 0x10));
    }
    assert!(verbs.flags(handle).expect("flags").contains(AccessFlags::REMOTE_WRITE));
    let keys: Vec<_> = region.key().expect("key").pieces().map(|piece| piece.key).collect();
    assert_eq!(
        keys,
        after.iter().map(|key| u64::from(key.rkey)).collect::<Vec<_>>(),
        "peers get the new keys"
    );
}

/// VRB-01
#[test]
fn refused_rereg_keeps_the_region_or_reports_it_lost() {
    let domain = domain(1 << 40);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = register(&domain, 0x1000);
    let handle = region.provider_region().expect("handle");
    for (class, errno, kind, word) in [
        (-1, 22, ErrorKind::InvalidArgument, "unchanged"),
        (-4, 95, ErrorKind::Unsupported, "unchanged"),
        (-4, 12, ErrorKind::OutOfResources, "no longer usable"),
        (-5, 5, ErrorKind::Driver, "no longer usable"),
    ] {
        with(|script| script.rereg = vec![(class, errno)]);
        // SAFETY: the fake library accesses no memory.
        let error = unsafe { verbs.rereg(handle, Access::REMOTE_WRITE) }.expect_err("refused");
        assert_eq!(
            (error.kind(), error.os_errno().map(|errno| errno.0)),
            (kind, Some(errno)),
            "{error}"
        );
        assert!(
            error.remedy_text().is_some_and(|remedy| remedy.contains(word)),
            "class {class}: {error}"
        );
        let flags = AccessFlags::REMOTE_READ | AccessFlags::RELAXED_ORDERING;
        assert_eq!(verbs.flags(handle).expect("flags"), flags);
    }
    region.close().map_err(|rejected| rejected.error).expect("it can still be closed");
    assert_eq!(domain.live().page_registrations, 0);
}

/// VRB-01
#[test]
fn rereg_refused_for_a_part_restores_the_parts_before_it() {
    let domain = domain(2 * page_size());
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = register(&domain, 6 * page_size());
    let handle = region.provider_region().expect("handle");
    for (answers, word) in [
        (vec![(0, 0), (0, 0), (-1, 22)], "unchanged"),
        (vec![(0, 0), (0, 0), (-1, 22), (-1, 5)], "no longer usable"),
    ] {
        calls();
        with(|script| script.rereg = answers);
        // SAFETY: the fake library accesses no memory.
        let error = unsafe { verbs.rereg(handle, Access::REMOTE_WRITE) }.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.remedy_text().is_some_and(|remedy| remedy.contains(word)), "{error}");
        // The provider asks for remote write with its added rights, then restores remote read.
        let asked = ["rereg_mr 0x4 0x10000b"; 3].into_iter().chain(["rereg_mr 0x4 0x100004"; 2]);
        assert_eq!(calls(), asked.collect::<Vec<_>>());
        assert_eq!(
            verbs.flags(handle).expect("flags"),
            AccessFlags::REMOTE_READ | AccessFlags::RELAXED_ORDERING
        );
    }
    // The region's key for peers has the keys that the driver changed meanwhile.
    let keys = VerbsMr::all_of(&region).expect("keys");
    let pieces: Vec<_> = region.key().expect("key").pieces().map(|piece| piece.key).collect();
    assert_eq!(pieces, keys.iter().map(|key| u64::from(key.rkey)).collect::<Vec<_>>());
}

/// VRB-01
#[test]
fn rereg_sets_and_removes_the_right_to_bind_windows() {
    let (read, bind) = (Access::REMOTE_READ, Access::REMOTE_READ | Access::MW_BIND);
    for windows in [false, true] {
        let domain = domain_with(1 << 40, windows);
        let verbs = VerbsDomain::of(&domain).expect("verbs");
        let region = register(&domain, 0x1000);
        let handle = region.provider_region().expect("handle");
        // SAFETY: the fake library accesses no memory.
        let changed = unsafe { verbs.rereg(handle, bind) };
        let binds = || verbs.flags(handle).expect("flags").contains(AccessFlags::MW_BIND);
        match changed {
            Ok(()) => assert!(windows && binds()),
            Err(error) => {
                assert!(!windows && !binds(), "{error}");
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            }
        }
        // SAFETY: the fake library accesses no memory.
        unsafe { verbs.rereg(handle, read) }.expect("change the rights");
        assert!(!binds());
    }
}

/// A tracing subscriber that panics at each event.
struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, _: &tracing::Event<'_>) {
        panic!("panic of the test's subscriber");
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// MR-18
#[test]
fn region_can_be_closed_after_a_panic_in_rereg() {
    let domain = domain(2 * page_size());
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    // A failed assertion must not drop the region, which would wait for the change to end.
    let region = ManuallyDrop::new(register(&domain, 4 * page_size()));
    let handle = region.provider_region().expect("handle");
    // The provider logs an error, since it cannot restore the rights of the first part after the
    // second part was refused.
    with(|script| script.rereg = vec![(0, 0), (-1, 22), (-1, 5)]);
    // With a single subscriber, tracing caches the interest of the thread that first reaches an
    // event. That thread may belong to another test.
    let _second = tracing::Dispatch::new(Panics);
    let panicked = tracing::subscriber::with_default(Panics, || {
        // SAFETY: the fake library accesses no memory.
        let rereg = || unsafe { verbs.rereg(handle, Access::REMOTE_WRITE) };
        catch_unwind(AssertUnwindSafe(rereg))
    });
    assert!(panicked.is_err(), "the subscriber got no event");
    assert_eq!(VerbsMr::all_of(&region).expect("no change is in progress").len(), 2);
    calls();
    let region = ManuallyDrop::into_inner(region);
    region.close().map_err(|rejected| rejected.error).expect("close");
    assert_eq!(calls(), ["dereg_mr"; 2]);
    assert_eq!(domain.live().regions, 0);
}

/// State of a fake `ibv_rereg_mr` that blocks its caller until the test sets `open`.
#[derive(Default)]
struct Gate {
    inside: bool,
    open: bool,
    log: Vec<&'static str>,
}

static GATE: (Mutex<Gate>, Condvar) =
    (Mutex::new(Gate { inside: false, open: false, log: Vec::new() }), Condvar::new());

fn gate() -> MutexGuard<'static, Gate> {
    GATE.0.lock().expect("no panic")
}

/// Guard that unblocks the fake `ibv_rereg_mr` when it is dropped, even after a failed assertion.
struct Release;

impl Drop for Release {
    fn drop(&mut self) {
        gate().open = true;
        GATE.1.notify_all();
    }
}

/// Returns true if the thread with this id sleeps in the kernel.
fn sleeps(thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    // The state is the first field after the thread's name in parentheses.
    stat.rsplit(')').next().is_some_and(|fields| fields.trim_start().starts_with('S'))
}

unsafe extern "C" fn held_rereg(
    _mr: *mut Mr,
    _flags: c_int,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _access: c_int,
) -> c_int {
    let mut gate = gate();
    gate.inside = true;
    gate.log.push("rereg begins");
    GATE.1.notify_all();
    let mut gate = GATE.1.wait_while(gate, |gate| !gate.open).expect("no panic");
    gate.log.push("rereg ends");
    0
}

extern "C" fn logged_dereg(mr: *mut Mr) -> c_int {
    gate().log.push("dereg");
    // SAFETY: the fake boxed the region, and each region is deregistered once.
    drop(unsafe { Box::from_raw(mr) });
    0
}

/// MR-18
#[test]
fn close_waits_for_a_change_of_rights() {
    drop(functions());
    // SAFETY: the functions have the header's signatures.
    let functions = unsafe {
        Functions::from_lookup(|name, _| match name {
            "ibv_rereg_mr" => Some(held_rereg as *const ()),
            "ibv_dereg_mr" => Some(logged_dereg as *const ()),
            _ => fake::symbol(name),
        })
    };
    let verbs = Verbs::builder().functions(functions.expect("complete")).build().expect("start");
    let domain = fake::open(&verbs);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let (region, other) = (register(&domain, 0x1000), register(&domain, 0x1000));
    let handle = region.provider_region().expect("handle");
    let closer = AtomicI32::new(0);
    thread::scope(|scope| {
        let (release, closer) = (Release, &closer);
        // SAFETY: the fake library accesses no memory.
        let change = scope.spawn(|| unsafe { verbs.rereg(handle, Access::REMOTE_WRITE) });
        drop(GATE.1.wait_while(gate(), |gate| !gate.inside).expect("no panic"));
        // During the change, the provider refuses calls on this region, and other regions can be
        // closed.
        assert_eq!(
            VerbsMr::all_of(&region).expect_err("the driver is changing the region").kind(),
            ErrorKind::Busy
        );
        assert_eq!(
            verbs.raw_key(handle).expect_err("the driver is changing the region").kind(),
            ErrorKind::Busy
        );
        assert_eq!(
            region.key().expect_err("the driver is changing the region").kind(),
            ErrorKind::Busy
        );
        other.close().map_err(|rejected| rejected.error).expect("close the other region");
        assert_eq!(gate().log, ["rereg begins", "dereg"]);
        let close = scope.spawn(move || {
            // SAFETY: the call has no precondition.
            closer.store(unsafe { libc::gettid() }, Ordering::SeqCst);
            region.close().map(drop).map_err(|rejected| rejected.error)
        });
        // Waits until the closing thread blocks. The close must not return.
        while !close.is_finished() && !sleeps(closer.load(Ordering::SeqCst)) {
            thread::yield_now();
        }
        assert!(!close.is_finished(), "the region was closed during the driver's call");
        drop(release);
        change.join().expect("no panic").expect("the rights change");
        close.join().expect("no panic").expect("close");
    });
    assert_eq!(gate().log, ["rereg begins", "dereg", "rereg ends", "dereg"]);
    assert_eq!(domain.live().regions, 0);
    assert_eq!(verbs.flags(handle).expect_err("closed").kind(), ErrorKind::InvalidArgument);
}
