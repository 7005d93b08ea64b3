//! Tests of notifications by hooks, and of the results and cost of hooked calls.

use std::{ptr, sync::Arc, thread, time::Duration};

use hmem_core::{
    AddressRange, AllocationKind, DeviceId, IfaceExt,
    iface::AllocRequest,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor},
};
use hmem_iface_system::{
    System,
    monitor::{HostMonitorKind, Layered, MemHooks, SystemMonitor},
};

use crate::{ANONYMOUS, RW, counting, monitors::*, observed};

pub(crate) fn each_function_notifies_before_and_after() {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    let page = page();
    let block = map(8 * page);
    let whole = range(block, 8 * page);
    let at = |index: usize| block.wrapping_byte_add(index * page);
    let subscription = monitor.subscribe(whole, Arc::<Recorder>::clone(&recorder)).unwrap();

    let expect = |ranges: &[(AddressRange, InvalidationCause)]| {
        let mut events = recorder.events();
        events.retain(|(notified, ..)| ranges.iter().any(|(range, _)| range == notified));
        let begun = ranges.iter().map(|(range, cause)| (*range, *cause, How::Begun));
        let ended = ranges.iter().map(|(range, cause)| (*range, *cause, How::Ended));
        assert_eq!(events, begun.chain(ended).collect::<Vec<_>>());
        recorder.clear();
    };
    recorder.clear();
    // SAFETY: all calls change only pages that belong to this function.
    unsafe {
        assert_eq!(libc::madvise(at(0), page, libc::MADV_DONTNEED), 0);
        expect(&[(range(at(0), page), InvalidationCause::Discard)]);
        assert_eq!(libc::madvise(at(0), page, libc::MADV_FREE), 0);
        expect(&[(range(at(0), page), InvalidationCause::Discard)]);
        assert_eq!(libc::madvise(at(0), page, libc::MADV_SEQUENTIAL), 0);
        assert!(recorder.about(whole).is_empty());
        assert_eq!(libc::mmap(at(1), page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0), at(1));
        expect(&[(range(at(1), page), InvalidationCause::Replace)]);
        assert_eq!(libc::mremap(at(6), 2 * page, page, 0), at(6));
        expect(&[(range(at(7), page), InvalidationCause::Remap)]);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(libc::mremap(at(6), page, page, fixed, at(2)), at(2));
        expect(&[
            (range(at(6), page), InvalidationCause::Remap),
            (range(at(2), page), InvalidationCause::Replace),
        ]);
        assert_eq!(libc::munmap(at(3), 3 * page), 0);
        expect(&[(range(at(3), 3 * page), InvalidationCause::Unmap)]);

        let id = libc::shmget(libc::IPC_PRIVATE, 3 * page, libc::IPC_CREAT | 0o600);
        let segment = libc::shmat(id, ptr::null(), 0);
        assert_ne!(segment.addr(), usize::MAX);
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
        let attached =
            monitor.subscribe(range(segment, 3 * page), Arc::<Recorder>::clone(&recorder)).unwrap();
        assert_eq!(libc::shmdt(segment), 0);
        expect(&[(range(segment, 3 * page), InvalidationCause::Detach)]);
        monitor.unsubscribe(attached);

        // The process has no other thread that could move the break.
        let top = libc::sbrk((4 * page) as isize);
        let up = top.wrapping_byte_add(top.align_offset(page));
        recorder.clear();
        assert_ne!(libc::sbrk(-((4 * page) as isize)).addr(), usize::MAX);
        let shrunk = recorder.events();
        assert_eq!(shrunk[0], (range(up, 4 * page), InvalidationCause::Shrink, How::Begun));
        assert_eq!(shrunk[1], (range(up, 4 * page), InvalidationCause::Shrink, How::Ended));
    }
    monitor.unsubscribe(subscription);
    unmap(at(0), 3 * page);
}

pub(crate) fn results_and_errno_are_those_of_the_c_library() {
    let page = page();
    let nowhere = ptr::without_provenance_mut::<libc::c_void>(1);
    let results = || {
        let block = map(4 * page);
        // SAFETY: the calls fail, or change only pages that belong to this function.
        unsafe {
            vec![
                observed(|| libc::munmap(nowhere, page) as usize),
                observed(|| libc::munmap(block, 0) as usize),
                observed(|| {
                    libc::mmap(block, page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0).addr()
                        - block.addr()
                }),
                observed(|| {
                    libc::mmap(block, page, RW, libc::MAP_SHARED | libc::MAP_FIXED, -1, 0).addr()
                }),
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
                observed(|| libc::shmat(-1, block, libc::SHM_REMAP).addr()),
                observed(|| libc::munmap(block, 3 * page) as usize),
            ]
        }
    };
    let unhooked = results();
    assert!(unhooked.contains(&(usize::MAX, libc::EINVAL)), "{unhooked:?}");
    let monitor = MemHooks::start().unwrap();
    assert_eq!(results(), unhooked, "hooked, without a subscriber");
    let block = map(page);
    let subscription = monitor.subscribe(range(block, page), Recorder::new()).unwrap();
    assert_eq!(results(), unhooked, "hooked, with a subscriber");
    monitor.unsubscribe(subscription);
    drop(monitor);
    assert_eq!(results(), unhooked, "unhooked again");
}

pub(crate) fn glibcs_own_calls_are_seen() {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    // This length is above malloc's threshold for blocks that get a mapping of their own.
    let len = 64 << 20;
    // SAFETY: the block belongs to this function, which frees it once.
    let block = unsafe { libc::malloc(len) };
    let subscription =
        monitor.subscribe(range(block, len), Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: the block belongs to this function, and nothing uses it any longer.
    unsafe { libc::free(block) };
    assert_eq!(
        recorder.about(range(block, len)),
        [(InvalidationCause::Unmap, How::Begun), (InvalidationCause::Unmap, How::Ended)]
    );
    monitor.unsubscribe(subscription);
    drop(monitor);
}

pub(crate) fn hooks_are_no_cancellation_points() {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    let page = page();
    let block = map(page);
    let subscription =
        monitor.subscribe(range(block, page), Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: the calls create a segment, and map it at an address that the kernel chooses.
    let segment = unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, page, libc::IPC_CREAT | 0o600);
        let segment = libc::shmat(id, ptr::null(), 0);
        assert_ne!(segment.addr(), usize::MAX);
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
        segment
    };
    let here = range(segment, page);
    let at = segment.expose_provenance();
    // The hook opens and closes `/proc/self/maps`.
    with_pending_cancellation(|| {
        // SAFETY: the segment belongs to the test, and nothing uses it any longer.
        assert_eq!(unsafe { libc::shmdt(ptr::with_exposed_provenance(at)) }, 0);
    });
    assert_eq!(
        recorder.about(here),
        [(InvalidationCause::Detach, How::Begun), (InvalidationCause::Detach, How::Ended)]
    );
    monitor.unsubscribe(subscription);
    unmap(block, page);
}

pub(crate) fn hook_that_waits_for_userfaultfd_is_no_cancellation_point() {
    /// An invalidator that delays the thread that reads userfaultfd events.
    #[derive(Debug)]
    struct Slow(Arc<Recorder>);
    impl Invalidator for Slow {
        fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
            thread::sleep(Duration::from_millis(50));
            self.0.invalidate(range, cause);
        }
        fn invalidate_start(
            &self,
            range: AddressRange,
            cause: InvalidationCause,
        ) -> InvalidationToken {
            self.0.invalidate_start(range, cause)
        }
        fn invalidate_end(&self, change: InvalidationToken) {
            self.0.invalidate_end(change);
        }
        fn close_gate(&self) -> GateToken {
            self.0.close_gate()
        }
        fn open_gate(&self, closed: GateToken) {
            self.0.open_gate(closed);
        }
    }
    let uffd = start_userfaultfd();
    let monitor = Layered::new(MemHooks::start().unwrap(), uffd);
    let recorder = Recorder::new();
    let page = page();
    let block = map(page);
    let here = range(block, page);
    let subscription =
        monitor.subscribe(here, Arc::new(Slow(Arc::<Recorder>::clone(&recorder)))).unwrap();
    recorder.clear();
    let at = block.expose_provenance();
    // The hook sleeps until the thread that reads events has notified the invalidator.
    with_pending_cancellation(|| {
        let at = ptr::with_exposed_provenance_mut(at);
        // SAFETY: the page belongs to the test, and no reference to it exists.
        assert_eq!(unsafe { libc::madvise(at, page, libc::MADV_DONTNEED) }, 0);
    });
    let mut about = recorder.about(here);
    about.retain(|(_, how)| *how != How::Invalidated);
    assert_eq!(
        about,
        [(InvalidationCause::Discard, How::Begun), (InvalidationCause::Discard, How::Ended)]
    );
    monitor.unsubscribe(subscription);
    // The first subscription of an invalidator waits for all hooked calls.
    let again = monitor.subscribe(here, Recorder::new()).unwrap();
    monitor.unsubscribe(again);
    unmap(block, page);
}

pub(crate) fn hooks_allocate_nothing_and_take_no_lock() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    let recorders: Vec<_> = (0..8).map(|_| Recorder::new()).collect();
    let subscribed: Vec<_> = recorders
        .iter()
        .map(|recorder| {
            monitor.subscribe(range(block, page), Arc::<Recorder>::clone(recorder)).unwrap()
        })
        .collect();
    let before = counting::calls();
    assert!(before.0 > 0 && before.1 > 0, "allocations are counted");
    for _ in 0..1000 {
        let at = map(4 * page);
        // SAFETY: the calls change only pages that belong to this function.
        unsafe {
            libc::madvise(at, page, libc::MADV_DONTNEED);
            libc::mmap(at, page, RW, ANONYMOUS | libc::MAP_FIXED, -1, 0);
            libc::mremap(at, 4 * page, 2 * page, 0);
            libc::brk(ptr::null_mut());
            libc::shmdt(at);
        }
        unmap(at, 2 * page);
    }
    assert_eq!(counting::calls(), before);
    for recorder in &recorders {
        assert!(recorder.count() >= 8000, "{}", recorder.count());
    }
    for subscription in subscribed {
        monitor.unsubscribe(subscription);
    }
    // The case `subscribing_waits_for_a_change_in_flight` tests that hooks take no lock.
}

pub(crate) fn unmaps_of_uncached_memory_cost_bounded_memory() {
    let monitor = MemHooks::start().unwrap();
    assert!(notifications_of_uncached_unmaps(&*monitor) >= 160_000);
}

/// Tests that [`System`] unmaps memory by a hooked function of the C library. An unmap by rustix
/// would be a raw system call, which the hooks do not see.
pub(crate) fn frees_of_the_system_iface_are_notified() {
    let monitor = MemHooks::start().unwrap();
    let system =
        System::new().with_monitor(SystemMonitor::start(HostMonitorKind::MemHooks).unwrap());
    assert_eq!(system.start_monitor().unwrap().name(), "memhooks");
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::System };
    let memory = system.allocate(&request).unwrap();
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(memory.range, Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: nothing uses the memory any longer.
    unsafe { system.free(&memory) }.unwrap();
    assert_eq!(
        recorder.about(memory.range),
        [(InvalidationCause::Unmap, How::Begun), (InvalidationCause::Unmap, How::Ended)]
    );
    monitor.unsubscribe(subscription);
}
