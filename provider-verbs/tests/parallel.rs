//! MR-16: parallel driver calls for long registrations, over a fake driver that can block its
//! calls.

mod fake;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_uint, c_void},
    panic::{self, AssertUnwindSafe},
    ptr,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread,
    time::Duration,
};

use fake::memory;
use hmem_core::{
    Access, Domain, ErrorKind, Mapping, Parallel, Prefault, Promise, Raw, Request,
    provider::ProviderDomain,
};
use hmem_provider_verbs::{
    Verbs, VerbsDomain, VerbsMr,
    sys::{Functions, Mr, Pd},
};
use rustix::mm::{MapFlags, ProtFlags};
use trials::{Outcome, Skipped, trials};

trials! {
    /// MR-16
    long_range_is_registered_by_parallel_driver_calls,
    /// MR-16
    parts_over_the_device_limit_are_parallel_by_default,
    /// MR-16
    range_within_the_limit_is_one_call_by_default,
    /// MR-16
    refused_part_rolls_back_all_others,
    /// MR-16
    panic_of_the_progress_callback_rolls_back_all_parts,
    /// MR-16
    panic_of_the_prefault_callback_registers_nothing,
    /// MR-16
    parts_shorter_than_a_page_are_refused,
    /// MR-16
    no_lock_is_held_while_the_driver_registers,
}

/// State of the fake driver, shared by all threads.
#[derive(Default)]
struct Driver {
    /// Number of registration calls that must have started before the driver lets any of them
    /// return.
    hold_for: usize,
    calls: usize,
    in_flight: usize,
    most_in_flight: usize,
    /// Start address of the ranges that the driver refuses with ENOMEM.
    refuse: Option<usize>,
    live: BTreeMap<usize, usize>,
}

static DRIVER: (Mutex<Driver>, Condvar) = (
    Mutex::new(Driver {
        hold_for: 0,
        calls: 0,
        in_flight: 0,
        most_in_flight: 0,
        refuse: None,
        live: BTreeMap::new(),
    }),
    Condvar::new(),
);

fn driver() -> MutexGuard<'static, Driver> {
    DRIVER.0.lock().expect("no panic")
}

/// Returns the number of registration calls so far, and the maximum number of registration calls
/// that were in flight at once.
fn calls() -> (usize, usize) {
    let driver = driver();
    (driver.calls, driver.most_in_flight)
}

extern "C" fn reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, _access: c_int) -> *mut Mr {
    let mut driver = driver();
    driver.calls += 1;
    driver.in_flight += 1;
    driver.most_in_flight = driver.most_in_flight.max(driver.in_flight);
    DRIVER.1.notify_all();
    // The limit ends the wait if the test fails.
    let patience = Duration::from_secs(60);
    let (mut driver, waited) = DRIVER
        .1
        .wait_timeout_while(driver, patience, |driver| driver.calls < driver.hold_for)
        .expect("no panic");
    driver.in_flight -= 1;
    if waited.timed_out() || driver.refuse == Some(addr.addr()) {
        // SAFETY: the pointer is to this thread's errno.
        unsafe { *libc::__errno_location() = libc::ENOMEM };
        return ptr::null_mut();
    }
    driver.live.insert(addr.addr(), length);
    let key = (addr.addr() >> 12) as u32;
    let context = ptr::null_mut();
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key }))
}

extern "C" fn reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    _iova: u64,
    access: c_uint,
) -> *mut Mr {
    reg_mr(pd, addr, length, access as c_int)
}

extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: `reg_mr` boxed the region, and each region is deregistered once.
    let mr = unsafe { Box::from_raw(mr) };
    if driver().live.remove(&mr.addr.addr()).is_some() { 0 } else { libc::EINVAL }
}

/// Returns a domain on the fake device with a new driver state. Holding the guard keeps other tests
/// from using the driver.
fn domain(max_mr_size: u64) -> (Domain, MutexGuard<'static, ()>) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    DRIVER.0.clear_poison();
    *driver() = Driver::default();
    fake::functions();
    fake::with(|script| script.max_mr_size = max_mr_size);
    // SAFETY: the functions have the header's signatures.
    let functions = unsafe {
        Functions::from_lookup(|name, _| match name {
            "ibv_reg_mr" => Some(reg_mr as *const ()),
            "ibv_reg_mr_iova2" => Some(reg_mr_iova2 as *const ()),
            "ibv_dereg_mr" => Some(dereg_mr as *const ()),
            _ => fake::symbol(name),
        })
    };
    let verbs = Verbs::builder().functions(functions.expect("complete")).build().expect("start");
    (fake::open(&verbs), alone)
}

const MIB: u64 = 1 << 20;

fn long_range_is_registered_by_parallel_driver_calls() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    driver().hold_for = 4;
    let told = Mutex::new(Vec::new());
    let progress = |done, total| told.lock().expect("no panic").push((done, total));
    // The range starts inside a page and ends inside a part.
    let request = Request::new(memory(0x10_0000_0800, 7 * MIB), Access::REMOTE_READ)
        .parallel(Parallel { threads: 4, chunk: 2 * MIB, progress: Some(&progress) });
    let region = domain.submit(request).expect("register");
    assert_eq!(calls(), (4, 4));

    let live: Vec<_> =
        driver().live.iter().map(|(start, len)| (*start as u64, *len as u64)).collect();
    assert_eq!(live[0].0, 0x10_0000_0800);
    assert!(
        live.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0),
        "no gap, no overlap: {live:x?}"
    );
    let page = rustix::param::page_size() as u64;
    assert!(live[1..].iter().all(|(start, _)| start % page == 0), "seams lie on pages: {live:x?}");
    assert_eq!(live.iter().map(|(_, len)| len).sum::<u64>(), 7 * MIB);
    let pieces: Vec<_> =
        region.key().expect("key").pieces().map(|piece| (piece.base.0, piece.len)).collect();
    assert_eq!(pieces, live, "one region, in the order of its addresses");

    let mut told = told.into_inner().expect("no panic");
    told.sort_unstable();
    assert_eq!(told.len(), 4);
    assert_eq!(told.last(), Some(&(7 * MIB, 7 * MIB)), "{told:?}");
    region.close().map_err(|rejected| rejected.error).expect("close");
    assert!(driver().live.is_empty());
    Ok(())
}

/// VRB-07: the provider splits a range that is longer than the device's limit, and registers the
/// parts in parallel.
fn parts_over_the_device_limit_are_parallel_by_default() -> Outcome {
    if thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        return Err(Skipped("one CPU registers one part after the other".to_owned()));
    }
    let (domain, _alone) = domain(64 * MIB);
    driver().hold_for = 2;
    let region = domain.register(memory(0x10_0000_0000, 128 * MIB), Access::SEND);
    let region = region.expect("register");
    assert_eq!(calls(), (2, 2));
    region.close().map_err(|rejected| rejected.error).expect("close");
    assert!(driver().live.is_empty());
    Ok(())
}

fn range_within_the_limit_is_one_call_by_default() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    let region = domain.register(memory(0x10_0000_0000, 1 << 38), Access::SEND);
    let region = region.expect("register");
    assert_eq!(driver().calls, 1);
    region.key().expect("key").as_u64().expect("one key");
    Ok(())
}

fn refused_part_rolls_back_all_others() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    let memory = memory(0x10_0000_0000, 8 * MIB);
    let parallel = Parallel { threads: 4, chunk: MIB, progress: None };
    for refused in [0, 2, 7] {
        let start = 0x10_0000_0000 + refused * MIB;
        *driver() = Driver { hold_for: 4, refuse: Some(start as usize), ..Driver::default() };
        let request = Request::new(memory, Access::SEND).parallel(parallel);
        let error = domain.submit(request).expect_err("a part is refused").error;
        assert_eq!(error.os_errno().map(|errno| errno.0), Some(12), "{error}");
        assert!(
            format!("{error:#}").contains(&format!("{start:#x}")),
            "it names the part: {error}"
        );
        assert_eq!(driver().live, BTreeMap::new(), "part {refused}");
        assert_eq!((domain.live().regions, domain.live().page_registrations), (0, 0));
    }
    Ok(())
}

/// MR-18
fn panic_of_the_progress_callback_rolls_back_all_parts() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    for threads in [1, 4] {
        *driver() = Driver { hold_for: threads, ..Driver::default() };
        let progress = |done: u64, _| {
            if done >= 3 * MIB {
                panic::resume_unwind(Box::new("the caller's own panic"));
            }
        };
        let owner = Arc::new(());
        let memory = memory(0x10_0000_0000, 8 * MIB).keep(Arc::clone(&owner));
        let request = Request::new(memory, Access::SEND).parallel(Parallel {
            threads,
            chunk: MIB,
            progress: Some(&progress),
        });
        panics_with_the_text_of_the_caller(|| drop(domain.submit(request)));
        assert!(driver().calls >= 3, "parts were registered: {}", driver().calls);
        assert_eq!(driver().live, BTreeMap::new(), "{threads} threads");
        assert_eq!((domain.live().regions, domain.live().page_registrations), (0, 0));
        assert_eq!(Arc::strong_count(&owner), 1, "{threads} threads: the memory is kept");
    }
    Ok(())
}

/// MR-18
fn panic_of_the_prefault_callback_registers_nothing() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    let progress = |_, _| panic::resume_unwind(Box::new("the caller's own panic"));
    let owner =
        Arc::new(Mapping::anonymous(4096, ProtFlags::READ, MapFlags::PRIVATE).expect("a page"));
    // SAFETY: the region keeps the mapping, and nothing else uses it.
    let memory = unsafe { Raw::new(owner.range(), Promise::ReadOnly) }.keep(Arc::clone(&owner));
    let request = Request::new(memory, Access::SEND)
        .prefault(Prefault { threads: 1, progress: Some(&progress) });
    panics_with_the_text_of_the_caller(|| drop(domain.submit(request)));
    assert_eq!((driver().calls, domain.live().regions), (0, 0));
    assert_eq!(Arc::strong_count(&owner), 1, "the memory is kept");
    Ok(())
}

/// Checks that the call panics with `the caller's own panic`.
fn panics_with_the_text_of_the_caller(call: impl FnOnce()) {
    let panic = panic::catch_unwind(AssertUnwindSafe(call)).expect_err("the panic goes on");
    assert_eq!(panic.downcast_ref::<&str>().copied(), Some("the caller's own panic"));
}

fn parts_shorter_than_a_page_are_refused() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    let request = Request::new(memory(0x10_0000_0000, MIB), Access::SEND)
        .parallel(Parallel { chunk: 100, ..Parallel::default() });
    let error = domain.submit(request).expect_err("a part of 100 bytes").error;
    assert_eq!(
        (error.kind(), error.context_value("chunk")),
        (ErrorKind::InvalidArgument, Some("100"))
    );
    assert_eq!(driver().calls, 0);
    Ok(())
}

fn no_lock_is_held_while_the_driver_registers() -> Outcome {
    let (domain, _alone) = domain(1 << 40);
    let register = |start| domain.register(memory(start, 4096), Access::REMOTE_READ);
    let before = register(0x1000).expect("register");
    driver().hold_for = 3;
    thread::scope(|scope| {
        let held = scope.spawn(|| register(0x2000));
        let driver_has_it =
            DRIVER.1.wait_while(driver(), |driver| driver.calls < 2).expect("no panic");
        drop(driver_has_it);
        // While that call is in the driver, other calls proceed.
        before.key().expect("key").as_u64().expect("a number");
        before.raw_key().expect("raw key");
        assert_eq!(domain.live().regions, 1);
        let verbs = VerbsDomain::of(&domain).expect("verbs");
        VerbsMr::all_of(&before).expect("keys");
        before.close().map_err(|rejected| rejected.error).expect("close");
        assert_eq!((driver().in_flight, verbs.live().regions), (1, 0));
        // The third call in flight lets the second call return.
        let third = register(0x3000).expect("register");
        held.join().expect("no panic").expect("the blocked call succeeds");
        drop(third);
    });
    Ok(())
}
