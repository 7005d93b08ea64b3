//! The patched C library: MON-03, MON-05, MON-06.
//!
//! Each case runs in a process of its own.
#![allow(missing_docs)]

#[path = "monitors/mod.rs"]
mod monitors;

use std::{
    alloc::{GlobalAlloc, Layout, System as SystemAllocator},
    cell::Cell,
    ptr,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    AddressRange, AllocationKind, DeviceId, ErrorKind, Iface,
    iface::AllocRequest,
    monitor::{Cause, Change, Invalidator, Monitor},
};
use hmem_iface_system::{
    System,
    monitor::{MemHooks, MonitorKind, SystemMonitor, UserFaultFd},
};
use monitors::*;

cases! {
    mon_03_each_function_tells_before_and_after,
    mon_03_results_and_errno_are_those_of_the_c_library,
    mon_03_glibcs_own_calls_are_seen,
    mon_03_hooks_allocate_nothing_and_take_no_lock,
    mon_03_a_thread_inside_the_call_while_it_is_patched_and_unpatched_comes_back,
    mon_03_threads_run_the_functions_while_they_are_patched,
    mon_03_install_twice_and_uninstall,
    mon_03_threads_that_start_at_once_share_the_patches,
    mon_03_a_later_patch_of_another_library_is_noticed,
    mon_03_an_earlier_patch_of_another_library_is_refused_by_name,
    mon_03_subscribing_waits_for_a_change_under_way,
    mon_03_an_invalidator_is_not_called_after_its_last_subscription,
    mon_05_unmaps_of_uncached_memory_cost_bounded_memory,
    mon_06_a_forked_child_is_disarmed_and_the_parent_undisturbed,
    mon_06_forks_while_other_threads_subscribe_do_not_deadlock,
    more_invalidators_than_slots_are_refused,
    files_are_refused_with_the_reason,
    the_system_ifaces_own_frees_are_told;
    slow: mon_03_threads_run_the_functions_while_they_are_patched_many_times,
}

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller's.
        unsafe { SystemAllocator.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller's.
        unsafe { SystemAllocator.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// The entry of a function of the C library.
fn entry(name: &std::ffi::CStr) -> *mut u8 {
    // SAFETY: finds a symbol of a loaded library.
    unsafe {
        let libc = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        libc::dlsym(libc, name.as_ptr()).cast()
    }
}

fn code(name: &std::ffi::CStr) -> [u8; 32] {
    // SAFETY: code of the C library is readable.
    unsafe { entry(name).cast::<[u8; 32]>().read_unaligned() }
}

const PATCHED: [&std::ffi::CStr; 7] = [c"munmap", c"mmap", c"mremap", c"madvise", c"brk", c"shmat", c"shmdt"];

fn mon_03_each_function_tells_before_and_after() {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    let page = page();
    let block = map(8 * page);
    let whole = range(block, 8 * page);
    let at = |index: usize| block.wrapping_byte_add(index * page);
    let subscription = monitor.subscribe(whole, Arc::<Recorder>::clone(&recorder)).unwrap();

    let expect = |ranges: &[(AddressRange, Cause)]| {
        let mut events = recorder.events();
        events.retain(|(told, ..)| ranges.iter().any(|(range, _)| range == told));
        let begun = ranges.iter().map(|(range, cause)| (*range, *cause, How::Begun));
        let ended = ranges.iter().map(|(range, cause)| (*range, *cause, How::Ended));
        assert_eq!(events, begun.chain(ended).collect::<Vec<_>>());
        recorder.clear();
    };
    recorder.clear();
    // SAFETY: all calls are on pages of this function's own.
    unsafe {
        assert_eq!(libc::madvise(at(0), page, libc::MADV_DONTNEED), 0);
        expect(&[(range(at(0), page), Cause::Discard)]);
        assert_eq!(libc::madvise(at(0), page, libc::MADV_FREE), 0);
        expect(&[(range(at(0), page), Cause::Discard)]);
        assert_eq!(libc::madvise(at(0), page, libc::MADV_WILLNEED), 0);
        assert!(recorder.about(whole).is_empty());
        assert_eq!(libc::mmap(at(1), page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0), at(1));
        expect(&[(range(at(1), page), Cause::Replace)]);
        assert_eq!(libc::mremap(at(6), 2 * page, page, 0), at(6));
        expect(&[(range(at(7), page), Cause::Remap)]);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(libc::mremap(at(6), page, page, fixed, at(2)), at(2));
        expect(&[(range(at(6), page), Cause::Remap), (range(at(2), page), Cause::Replace)]);
        assert_eq!(libc::munmap(at(3), 3 * page), 0);
        expect(&[(range(at(3), 3 * page), Cause::Unmap)]);

        let id = libc::shmget(libc::IPC_PRIVATE, 3 * page, libc::IPC_CREAT | 0o600);
        let segment = libc::shmat(id, ptr::null(), 0);
        assert_ne!(segment.addr(), usize::MAX);
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
        let attached =
            monitor.subscribe(range(segment, 3 * page), Arc::<Recorder>::clone(&recorder)).unwrap();
        assert_eq!(libc::shmdt(segment), 0);
        expect(&[(range(segment, 3 * page), Cause::Detach)]);
        monitor.unsubscribe(attached);

        // No other thread runs here: the break is this thread's to move.
        let top = libc::sbrk((4 * page) as isize);
        let up = top.wrapping_byte_add(top.align_offset(page));
        recorder.clear();
        assert_ne!(libc::sbrk(-((4 * page) as isize)).addr(), usize::MAX);
        let shrunk = recorder.events();
        assert_eq!(shrunk[0], (range(up, 4 * page), Cause::Shrink, How::Begun));
        assert_eq!(shrunk[1], (range(up, 4 * page), Cause::Shrink, How::Ended));
    }
    monitor.unsubscribe(subscription);
    unmap(at(0), 3 * page);
}

/// What a call returned, and `errno` after it, where 77 was before.
fn observed(call: impl FnOnce() -> usize) -> (usize, i32) {
    // SAFETY: `errno` of this thread.
    unsafe {
        *libc::__errno_location() = 77;
        let result = call();
        (result, *libc::__errno_location())
    }
}

fn mon_03_results_and_errno_are_those_of_the_c_library() {
    let page = page();
    let nowhere = ptr::without_provenance_mut::<libc::c_void>(1);
    let results = || {
        let block = map(4 * page);
        // SAFETY: refused calls, and calls on this function's own pages.
        unsafe {
            vec![
                observed(|| libc::munmap(nowhere, page) as usize),
                observed(|| libc::munmap(block, 0) as usize),
                observed(|| {
                    libc::mmap(block, page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0).addr() - block.addr()
                }),
                observed(|| libc::mmap(block, page, RW, libc::MAP_SHARED | libc::MAP_FIXED, -1, 0).addr()),
                observed(|| libc::mmap(ptr::null_mut(), 0, RW, ANONYMOUS, -1, 0).addr()),
                observed(|| libc::mmap(ptr::null_mut(), page, RW, ANONYMOUS, -1, 7).addr()),
                observed(|| libc::mremap(nowhere, page, page, libc::MREMAP_MAYMOVE).addr()),
                observed(|| libc::mremap(block, 4 * page, 3 * page, 0).addr() - block.addr()),
                observed(|| libc::madvise(nowhere, page, libc::MADV_DONTNEED) as usize),
                observed(|| libc::madvise(block, page, libc::MADV_DONTNEED) as usize),
                observed(|| libc::madvise(block, page, 12345) as usize),
                observed(|| libc::brk(ptr::null_mut()) as usize),
                observed(|| libc::brk(usize::MAX as *mut libc::c_void) as usize),
                observed(|| libc::shmdt(nowhere) as usize),
                observed(|| libc::shmdt(block) as usize),
                observed(|| libc::shmat(-1, ptr::null(), 0).addr()),
                observed(|| libc::shmat(-1, block, 0o40000).addr()),
                observed(|| libc::munmap(block, 3 * page) as usize),
            ]
        }
    };
    let unhooked = results();
    assert!(unhooked.contains(&(usize::MAX, libc::EINVAL)), "{unhooked:?}");
    let monitor = MemHooks::start().unwrap();
    assert_eq!(results(), unhooked, "hooked, with nobody to tell");
    let block = map(page);
    let subscription = monitor.subscribe(range(block, page), Recorder::new()).unwrap();
    assert_eq!(results(), unhooked, "hooked, with somebody to tell");
    monitor.unsubscribe(subscription);
    drop(monitor);
    assert_eq!(results(), unhooked, "unhooked again");
}

fn mon_03_glibcs_own_calls_are_seen() {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    // Above the threshold at which malloc maps each block on its own.
    let len = 64 << 20;
    // SAFETY: a block of this function's own, freed once.
    let block = unsafe { libc::malloc(len) };
    let subscription = monitor.subscribe(range(block, len), Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: as above.
    unsafe { libc::free(block) };
    assert_eq!(recorder.about(range(block, len)), [(Cause::Unmap, How::Begun), (Cause::Unmap, How::Ended)]);
    monitor.unsubscribe(subscription);
    drop(monitor);
}

fn mon_03_hooks_allocate_nothing_and_take_no_lock() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    let recorders: Vec<_> = (0..8).map(|_| Recorder::new()).collect();
    let subscribed: Vec<_> = recorders
        .iter()
        .map(|recorder| monitor.subscribe(range(block, page), Arc::<Recorder>::clone(recorder)).unwrap())
        .collect();
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..1000 {
        let at = map(4 * page);
        // SAFETY: this function's own pages.
        unsafe {
            libc::madvise(at, page, libc::MADV_DONTNEED);
            libc::mmap(at, page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0);
            libc::mremap(at, 4 * page, 2 * page, 0);
            libc::brk(ptr::null_mut());
            libc::shmdt(at);
        }
        unmap(at, 2 * page);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
    for recorder in &recorders {
        assert!(recorder.count() >= 8000, "{}", recorder.count());
    }
    for subscription in subscribed {
        monitor.unsubscribe(subscription);
    }
    // No lock: `mon_03_subscribing_waits_for_a_change_under_way` unmaps while the lock is held.
}

fn need_userfaultfd() {
    drop(
        UserFaultFd::start()
            .expect("this case makes munmap wait by a userfaultfd, which this machine must have"),
    );
}

fn mon_03_a_thread_inside_the_call_while_it_is_patched_and_unpatched_comes_back() {
    need_userfaultfd();
    let page = page();
    let blocked = |at: usize| {
        thread::spawn(move || {
            let at = ptr::with_exposed_provenance_mut(at);
            // SAFETY: the test's own mapping.
            observed(|| unsafe { libc::munmap(at, page) } as usize)
        })
    };
    // In the unpatched function: patched meanwhile.
    let block = map(page);
    let blocker = Blocker::new(block, page);
    let inside = blocked(block.expose_provenance());
    blocker.wait();
    let monitor = MemHooks::start().unwrap();
    blocker.release();
    assert_eq!(inside.join().unwrap(), (0, 77));
    // In the patched function, and its hook: unpatched and patched again meanwhile.
    let block = map(page);
    let blocker = Blocker::new(block, page);
    let inside = blocked(block.expose_provenance());
    blocker.wait();
    let before = code(c"munmap");
    // Dropping takes the patch out; nothing is subscribed, so nothing waits for the thread inside.
    drop(monitor);
    assert_ne!(code(c"munmap"), before, "the patch is out");
    blocker.release();
    assert_eq!(inside.join().unwrap(), (0, 77));
}

/// Threads loop over every function while the patches come and go; returns how often each thread went round.
fn stress(patchings: usize) {
    let page = page();
    let threads = 4;
    let (running, start) = (AtomicBool::new(true), Barrier::new(threads + 1));
    let rounds = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                start.wait();
                while running.load(SeqCst) {
                    let at = map(4 * page);
                    // SAFETY: this thread's own pages.
                    unsafe {
                        assert_eq!(
                            observed(|| libc::madvise(at, page, libc::MADV_DONTNEED) as usize),
                            (0, 77)
                        );
                        let fixed = ANONYMOUS | libc::MAP_FIXED;
                        assert_eq!(
                            observed(|| libc::mmap(at, page, RW, fixed, -1, 0).addr()),
                            (at.addr(), 77)
                        );
                        assert_eq!(
                            observed(|| libc::mremap(at, 4 * page, 2 * page, 0).addr()),
                            (at.addr(), 77)
                        );
                        assert_eq!(observed(|| libc::brk(ptr::null_mut()) as usize).0, 0);
                        assert_eq!(observed(|| libc::shmdt(at) as usize), (usize::MAX, libc::EINVAL));
                        assert_eq!(observed(|| libc::shmat(-1, at, 0).addr()), (usize::MAX, libc::EINVAL));
                        assert_eq!(observed(|| libc::munmap(at, 2 * page) as usize), (0, 77));
                    }
                    rounds.fetch_add(1, SeqCst);
                }
            });
        }
        start.wait();
        let before: Vec<_> = PATCHED.iter().map(|name| code(name)).collect();
        for _ in 0..patchings {
            let monitor = MemHooks::start().unwrap();
            for (name, before) in PATCHED.iter().zip(&before) {
                assert_ne!(code(name), *before, "{name:?}");
            }
            drop(monitor);
            for (name, before) in PATCHED.iter().zip(&before) {
                assert_eq!(code(name), *before, "{name:?}");
            }
        }
        let until = rounds.load(SeqCst) + 4 * threads as u64;
        while rounds.load(SeqCst) < until {
            thread::yield_now();
        }
        running.store(false, SeqCst);
    });
}

fn mon_03_threads_run_the_functions_while_they_are_patched() {
    stress(200);
}

fn mon_03_threads_run_the_functions_while_they_are_patched_many_times() {
    stress(20_000);
}

fn mon_03_install_twice_and_uninstall() {
    let page = page();
    let original: Vec<_> = PATCHED.iter().map(|name| code(name)).collect();
    let (first, second) = (MemHooks::start().unwrap(), MemHooks::start().unwrap());
    assert!(first.functions().contains(&"munmap"));
    let recorder = Recorder::new();
    let block = map(page);
    let here = range(block, page);
    let kept = second.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    // Not taken back: dropping the monitor does that.
    first.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    drop(first);
    second.check().unwrap();
    unmap(block, page);
    assert_eq!(recorder.about(here), [(Cause::Unmap, How::Begun), (Cause::Unmap, How::Ended)], "told once");
    second.unsubscribe(kept);
    assert_eq!(Arc::strong_count(&recorder), 1, "the dropped monitor took its subscriptions back");
    drop(second);
    for (name, original) in PATCHED.iter().zip(original) {
        assert_eq!(code(name), original, "{name:?} is as it was");
    }
    let block = map(page);
    recorder.clear();
    unmap(block, page);
    assert_eq!(recorder.count(), 0);
    // And again.
    MemHooks::start().unwrap().check().unwrap();
}

/// The first starts of a process plan the patches; nobody may go by a plan that is not whole.
fn mon_03_threads_that_start_at_once_share_the_patches() {
    const THREADS: usize = 8;
    let (page, together) = (page(), Barrier::new(THREADS));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                together.wait();
                for _ in 0..20 {
                    let hooks = MemHooks::start().unwrap();
                    unmap(map(page), page);
                    drop(hooks);
                }
            });
        }
    });
}

/// munmap as another library's hooks have it: past the C library's.
unsafe extern "C" fn their_munmap(at: *mut libc::c_void, len: usize) -> i32 {
    // SAFETY: as the caller's.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) as i32 }
}

/// Patches the entry of munmap as other libraries do: an absolute jump over its first bytes, threads or no threads.
fn patch_as_others_do() {
    let at = entry(c"munmap");
    let target = (their_munmap as *const ()).addr() as u64;
    #[cfg(target_arch = "x86_64")]
    let jump = {
        // movabs $target,%r11; jmp *%r11
        let mut jump = vec![0x49, 0xbb];
        jump.extend(target.to_le_bytes());
        jump.extend([0x41, 0xff, 0xe3]);
        jump
    };
    #[cfg(target_arch = "aarch64")]
    let jump = {
        // ldr x16, #8; br x16
        let mut jump = vec![0x50, 0x00, 0x00, 0x58, 0x00, 0x02, 0x1f, 0xd6];
        jump.extend(target.to_le_bytes());
        jump
    };
    let page = page();
    let start = at.map_addr(|at| at & !(page - 1)).cast();
    // SAFETY: the page stays readable and executable; no thread runs munmap now.
    unsafe {
        assert_eq!(libc::mprotect(start, page, RW | libc::PROT_EXEC), 0);
        ptr::copy_nonoverlapping(jump.as_ptr(), at, jump.len());
        assert_eq!(libc::mprotect(start, page, libc::PROT_READ | libc::PROT_EXEC), 0);
    }
}

fn mon_03_a_later_patch_of_another_library_is_noticed() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    monitor.check().unwrap();
    patch_as_others_do();
    let theirs = code(c"munmap");
    let own = std::env::current_exe().unwrap().display().to_string();
    for error in [monitor.check().unwrap_err(), MemHooks::start().unwrap_err(), {
        monitor.subscribe(range(block, page), Recorder::new()).unwrap_err()
    }] {
        let text = error.to_string();
        assert!(error.is_busy() && text.contains("munmap") && text.contains(&own), "{text}");
    }
    drop(monitor);
    assert_eq!(code(c"munmap"), theirs, "theirs is left as it is");
    unmap(block, page);
    let error = MemHooks::start().unwrap_err();
    assert!(error.is_busy() && error.to_string().contains("munmap"), "{error}");
}

fn mon_03_an_earlier_patch_of_another_library_is_refused_by_name() {
    patch_as_others_do();
    let others = code(c"mmap");
    let error = MemHooks::start().unwrap_err();
    let own = std::env::current_exe().unwrap().display().to_string();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(text.contains("munmap") && text.contains("another library") && text.contains(&own), "{text}");
    assert_eq!(code(c"mmap"), others, "nothing is half patched");
}

fn mon_03_subscribing_waits_for_a_change_under_way() {
    need_userfaultfd();
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let (block, other) = (map(page), map(page));
    let blocker = Blocker::new(block, page);
    let at = block.expose_provenance();
    // This change began when nobody was subscribed: nobody will be told of it.
    let inside = thread::spawn(move || unmap(ptr::with_exposed_provenance_mut(at), page));
    blocker.wait();
    let subscribed = Arc::new(AtomicBool::new(false));
    let subscribing = {
        let (monitor, subscribed, here) = (Arc::clone(&monitor), Arc::clone(&subscribed), range(other, page));
        thread::spawn(move || {
            let subscription = monitor.subscribe(here, Recorder::new()).unwrap();
            subscribed.store(true, SeqCst);
            subscription
        })
    };
    // Meanwhile no hook waits, although the subscriber holds its lock.
    for _ in 0..20_000 {
        let at = map(page);
        unmap(at, page);
    }
    assert!(!subscribed.load(SeqCst), "who is subscribed hears of every change that is not over");
    blocker.release();
    inside.join().unwrap();
    monitor.unsubscribe(subscribing.join().unwrap());
}

/// Fails when it is told after it was dropped.
#[derive(Debug)]
struct Mortal {
    alive: AtomicU64,
    told: Arc<AtomicU64>,
}

const ALIVE: u64 = 0x600d_600d_600d_600d;

impl Invalidator for Mortal {
    fn invalidate(&self, _: AddressRange, _: Cause) {}

    fn begin(&self, _: AddressRange, _: Cause) -> Change {
        assert_eq!(self.alive.load(SeqCst), ALIVE);
        Change(5)
    }

    fn end(&self, change: Change) {
        assert_eq!((self.alive.load(SeqCst), change), (ALIVE, Change(5)));
        self.told.fetch_add(1, SeqCst);
    }

    fn close_gate(&self) {}

    fn open_gate(&self) {}
}

impl Drop for Mortal {
    fn drop(&mut self) {
        self.alive.store(0, SeqCst);
    }
}

fn mon_03_an_invalidator_is_not_called_after_its_last_subscription() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let told = Arc::new(AtomicU64::new(0));
    let running = AtomicBool::new(true);
    let block = map(page);
    let here = range(block, page);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while running.load(SeqCst) {
                    unmap(map(page), page);
                }
            });
        }
        for _ in 0..2000 {
            let mortal = Arc::new(Mortal { alive: AtomicU64::new(ALIVE), told: Arc::clone(&told) });
            let twice = [(); 2].map(|()| monitor.subscribe(here, Arc::<Mortal>::clone(&mortal)).unwrap());
            for subscription in twice {
                assert!(Arc::strong_count(&mortal) > 1);
                monitor.unsubscribe(subscription);
            }
            assert_eq!(Arc::strong_count(&mortal), 1, "nobody has it any more");
        }
        while told.load(SeqCst) == 0 {
            let mortal = Arc::new(Mortal { alive: AtomicU64::new(ALIVE), told: Arc::clone(&told) });
            let subscription = monitor.subscribe(here, mortal).unwrap();
            thread::yield_now();
            monitor.unsubscribe(subscription);
        }
        running.store(false, SeqCst);
    });
}

fn mon_05_unmaps_of_uncached_memory_cost_bounded_memory() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let kept = map(page);
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(range(kept, page), Arc::<Recorder>::clone(&recorder)).unwrap();
    let round = || (0..40_000).for_each(|_| unmap(map(page), page));
    round();
    let before = resident();
    round();
    let grown = resident().saturating_sub(before);
    assert!(recorder.count() >= 160_000);
    assert!(grown < 512 << 10, "grown by {grown} bytes");
    monitor.unsubscribe(subscription);
}

fn in_children(monitor: &Arc<MemHooks>, subscription: hmem_core::monitor::Subscription, here: AddressRange) {
    let page = page();
    let block = map(page);
    // SAFETY: the child's memory is its own copy.
    let raw_fork = || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    let child = |monitor: &Arc<MemHooks>| {
        unmap(block, page);
        let error = monitor.subscribe(here, Recorder::new()).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("forked"), "{error}");
        assert!(monitor.check().is_err());
        monitor.unsubscribe(subscription);
        // One of its own works, and is its own.
        let own = MemHooks::start().unwrap();
        let recorder = Recorder::new();
        let at = map(page);
        let watched = own.subscribe(range(at, page), Arc::<Recorder>::clone(&recorder)).unwrap();
        unmap(at, page);
        assert_eq!(recorder.about(range(at, page)).len(), 2);
        own.unsubscribe(watched);
    };
    assert_eq!(forked(|| child(monitor)), 0);
    let pid = raw_fork();
    if pid == 0 {
        child(monitor);
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: waits for the child.
    unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
    assert_eq!(status, 0);
    unmap(block, page);
}

fn mon_06_a_forked_child_is_disarmed_and_the_parent_undisturbed() {
    /// Counts in memory that a child shares.
    #[derive(Debug)]
    struct Shared(usize);
    impl Invalidator for Shared {
        fn invalidate(&self, _: AddressRange, _: Cause) {}
        fn begin(&self, _: AddressRange, _: Cause) -> Change {
            // SAFETY: a shared mapping of this process and its children that is never unmapped.
            unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(self.0) }.fetch_add(1, SeqCst);
            Change(0)
        }
        fn end(&self, _: Change) {}
        fn close_gate(&self) {}
        fn open_gate(&self) {}
    }
    let page = page();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, zeroed.
    let shared = unsafe { libc::mmap(ptr::null_mut(), page, RW, flags, -1, 0) }.expose_provenance();
    // SAFETY: as in `begin`.
    let told = || unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(shared) }.load(SeqCst);
    let monitor = MemHooks::start().unwrap();
    let block = map(page);
    let here = range(block, page);
    let subscription = monitor.subscribe(here, Arc::new(Shared(shared))).unwrap();
    let before = told();
    assert_eq!(forked(|| unmap(block, page)), 0);
    assert_eq!(told(), before, "what a child unmaps is the child's own");
    in_children(&monitor, subscription, here);
    let before = told();
    unmap(block, page);
    assert_eq!(told(), before + 1, "the parent hears of its own");
    monitor.unsubscribe(subscription);
    monitor.check().unwrap();
}

fn mon_06_forks_while_other_threads_subscribe_do_not_deadlock() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    let here = range(block, page);
    let recorder = Recorder::new();
    let kept = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    let running = AtomicBool::new(true);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while running.load(SeqCst) {
                    let subscription = monitor.subscribe(here, Recorder::new()).unwrap();
                    unmap(map(page), page);
                    monitor.unsubscribe(subscription);
                }
            });
        }
        for _ in 0..200 {
            let status = forked(|| {
                raw_fork_safe(&monitor, here, kept, block, page);
            });
            assert_eq!(status, 0);
        }
        running.store(false, SeqCst);
    });
    monitor.unsubscribe(kept);
}

/// What a child may do at any time, also while another thread of its parent held any lock.
fn raw_fork_safe(
    monitor: &Arc<MemHooks>,
    here: AddressRange,
    kept: hmem_core::monitor::Subscription,
    block: *mut libc::c_void,
    page: usize,
) {
    monitor.unsubscribe(kept);
    let own: Arc<dyn Invalidator> = Arc::new(Mortal { alive: AtomicU64::new(ALIVE), told: Arc::default() });
    assert!(monitor.subscribe(here, own).is_err());
    unmap(block, page);
    // SAFETY: the reference that the child has is its own; dropping it as the last one must not wait either.
    drop(unsafe { Arc::from_raw(Arc::as_ptr(monitor)) });
}

fn more_invalidators_than_slots_are_refused() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    let mut subscriptions: Vec<_> =
        (0..64).map(|_| monitor.subscribe(range(block, page), Recorder::new()).unwrap()).collect();
    let error = monitor.subscribe(range(block, page), Recorder::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    monitor.unsubscribe(subscriptions.pop().unwrap());
    let again = monitor.subscribe(range(block, page), Recorder::new()).unwrap();
    monitor.unsubscribe(again);
}

fn files_are_refused_with_the_reason() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let refused = |at, len| monitor.subscribe(range(at, len), Recorder::new()).unwrap_err();
    // SAFETY: a new memory file and mapping.
    let file = unsafe {
        let fd = libc::memfd_create(c"hmem-test".as_ptr(), libc::MFD_CLOEXEC);
        assert_eq!(libc::ftruncate(fd, page as i64), 0);
        libc::mmap(ptr::null_mut(), page, RW, libc::MAP_SHARED, fd, 0)
    };
    let error = refused(file, page);
    assert!(error.is_unsupported(), "{error}");
    assert!(
        error.to_string().contains("memfd:hmem-test") && error.to_string().contains("truncating"),
        "{error}"
    );
    let block = map(2 * page);
    // Remembered as watchable, until something is mapped over it.
    let subscription = monitor.subscribe(range(block, 2 * page), Recorder::new()).unwrap();
    monitor.unsubscribe(subscription);
    // SAFETY: moves the file's mapping over the second page.
    unsafe {
        let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let onto = block.wrapping_byte_add(page);
        assert_eq!(libc::mremap(file, page, page, moves, onto), onto);
    }
    assert!(refused(block, 2 * page).is_unsupported(), "a file behind the second page");
    unmap(block, page);
    assert_eq!(refused(block, page).kind(), ErrorKind::BadAddress);
}

/// rustix, which the iface uses otherwise, makes raw system calls.
fn the_system_ifaces_own_frees_are_told() {
    let monitor = MemHooks::start().unwrap();
    let system = System::new().with_monitor(SystemMonitor::start(MonitorKind::MemHooks).unwrap());
    assert_eq!(system.monitor().unwrap().name(), "memhooks");
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::System };
    let memory = system.allocate(&request).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(memory.range, Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: nobody uses the memory.
    unsafe { system.free(&memory) }.unwrap();
    assert_eq!(recorder.about(memory.range), [(Cause::Unmap, How::Begun), (Cause::Unmap, How::Ended)]);
    monitor.unsubscribe(subscription);
}
