//! Tests of the userfaultfd monitor: MON-02, MON-05, MON-06, MON-10.
//!
//! Each case runs in a process of its own, and is ignored if that process cannot use userfaultfd.
#![allow(missing_docs)]

#[path = "monitors/mod.rs"]
mod monitors;
#[path = "../../hook/tests/supervised/mod.rs"]
mod supervised;

use std::{
    cell::Cell,
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    AddressRange, ErrorKind,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor},
};
use hmem_iface_system::monitor::{HostMonitorKind, MemHooks, SystemMonitor, UserFaultFd};
use monitors::*;

cases! {
    /// MON-02
    a_seccomp_filter_is_named,
    interrupted_calls_are_retried,
    auto_reports_and_logs_missing_userfaultfd,
    /// MON-02
    unprivileged_users_can_watch,
    /// MON-02
    no_fault_of_the_application_waits,
    events_are_delivered_behind_a_closed_gate,
    /// MON-02
    announced_advices_are_those_that_raise_events,
    overlapping_subscriptions_are_watched_until_the_last_is_gone,
    remapped_memory_is_watched_again,
    moved_memory_is_not_watched_for_ever,
    unwatchable_memory_is_refused_with_the_reason,
    too_many_mappings_are_an_error_that_names_the_limit,
    /// MON-10
    room_of_unmapped_foreign_memory_is_found_within_64_subscriptions,
    /// MON-10
    many_monitors_share_one_budget_of_mappings,
    /// MON-05
    unmaps_of_uncached_memory_cost_bounded_memory,
    /// MON-06
    a_forked_child_is_disarmed_and_the_parent_undisturbed,
    /// MON-06
    dropped_monitor_blocks_no_thread_despite_a_child,
    dropping_during_unmaps_blocks_no_thread;
    slow: another_thread_can_get_a_stale_hit,
}

/// Makes the system call `userfaultfd` fail by a seccomp filter, as in a container.
fn refuse_by_seccomp() {
    let instruction =
        |code: u32, jump: u8, k: u32| libc::sock_filter { code: code as u16, jt: jump, jf: 0, k };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let filter = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        libc::sock_filter {
            jf: 1,
            ..instruction(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                0,
                libc::SYS_userfaultfd as u32,
            )
        },
        instruction(libc::BPF_RET | libc::BPF_K, 0, refused),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: the calls only restrict this process, which runs nothing but this case.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program),
            0
        );
    }
}

/// Drops the privileges of root, so that this process cannot open `/dev/userfaultfd` either.
fn give_up_root() {
    // SAFETY: the calls only restrict this process, which runs nothing but this case.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgid(65534), 0);
            assert_eq!(libc::setuid(65534), 0);
        }
        // After `setuid`, the files in `/proc/self` belong to root until the process is dumpable
        // again.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
    }
}

fn a_seccomp_filter_is_named() {
    give_up_root();
    refuse_by_seccomp();
    let error = UserFaultFd::start().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{text}");
    assert!(
        text.contains("seccomp") && text.contains("EPERM") && text.contains("/dev/userfaultfd"),
        "{text}"
    );
    assert!(error.remedy_text().is_some());
}

/// MON-02
fn interrupted_calls_are_retried() {
    need_userfaultfd();
    for refusal in [libc::EAGAIN, libc::EINTR] {
        let mut calls = 0;
        let answer = |_| {
            calls += 1;
            // The monitor makes the call twice: one userfaultfd queries the kernel's features, and
            // one uses them.
            [1, 2, 4].contains(&calls).then_some(refusal)
        };
        supervised::run(libc::SYS_userfaultfd, answer, || {
            let chosen = SystemMonitor::start(HostMonitorKind::Auto).unwrap();
            assert_eq!(chosen.choice().name, "memhooks+userfaultfd", "{}", chosen.choice());
        });
        assert_eq!(calls, 5);
    }
}

/// A `tracing` subscriber that records warnings and errors.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = String::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            text += &format!("{field}={value:?} ");
        });
        self.0.lock().unwrap().push(text);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// MON-02
fn auto_reports_and_logs_missing_userfaultfd() {
    need_userfaultfd();
    give_up_root();
    let warnings = Warnings::default();
    let subscriber = warnings.clone();
    supervised::run(
        libc::SYS_userfaultfd,
        |_| Some(libc::EAGAIN),
        move || {
            tracing::subscriber::with_default(subscriber, || {
                let chosen = SystemMonitor::start(HostMonitorKind::Auto).unwrap();
                let text = chosen.choice().to_string();
                assert_eq!(chosen.choice().name, "memhooks", "{text}");
                assert!(text.contains("userfaultfd refused") && text.contains("EAGAIN"), "{text}");
            });
        },
    );
    let warnings = warnings.0.lock().unwrap();
    let [warning] = &**warnings else { panic!("one warning: {warnings:?}") };
    assert!(warning.contains("userfaultfd does not work here"), "{warning}");
    assert!(warning.contains("EAGAIN"), "{warning}");
}

fn unprivileged_users_can_watch() {
    give_up_root();
    let monitor = start_userfaultfd();
    let recorder = Recorder::new();
    let block = map(page());
    let here = range(block, page());
    let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    unmap(block, page());
    expect_notified(&recorder, here, &[InvalidationCause::Unmap]);
    monitor.unsubscribe(subscription);
}

/// Waits until `recorder` has as many notifications for the range `here` as `causes` has elements,
/// and compares the causes of the notifications with `causes`. The wait is necessary because a
/// thread that unmaps continues before subscribers are notified.
fn expect_notified(recorder: &Recorder, here: AddressRange, causes: &[InvalidationCause]) {
    while recorder.about(here).len() < causes.len() {
        thread::yield_now();
    }
    let expected: Vec<_> = causes.iter().map(|cause| (*cause, How::Invalidated)).collect();
    assert_eq!(recorder.about(here), expected);
    recorder.clear();
}

/// The kernel sends an event for each advice that memhooks announce, and none for
/// MADV_GUARD_INSTALL.
fn announced_advices_are_those_that_raise_events() {
    const GUARD_INSTALL: i32 = 102;
    let monitor = start_userfaultfd();
    let page = page();
    let advices = [
        (libc::MADV_DONTNEED, libc::MAP_PRIVATE, true),
        (libc::MADV_FREE, libc::MAP_PRIVATE, true),
        (libc::MADV_DONTNEED_LOCKED, libc::MAP_PRIVATE, true),
        (libc::MADV_REMOVE, libc::MAP_SHARED, true),
        (GUARD_INSTALL, libc::MAP_PRIVATE, false),
    ];
    // Each advice has memory of its own: a subscription is also told of discards of its range that
    // may still be in progress.
    let blocks = advices.map(|(_, sharing, _)| {
        let flags = sharing | libc::MAP_ANONYMOUS;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let block = unsafe { libc::mmap(ptr::null_mut(), page, prot, flags, -1, 0) };
        assert_ne!(block, libc::MAP_FAILED);
        block
    });
    for ((advice, _, raises), block) in advices.into_iter().zip(blocks) {
        let (here, recorder) = (range(block, page), Recorder::new());
        let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
        // SAFETY: the page belongs to this function.
        let advised = unsafe { libc::syscall(libc::SYS_madvise, block, page, advice) };
        // Linux has MADV_GUARD_INSTALL since 6.13.
        assert!(advised == 0 || advice == GUARD_INSTALL, "advice {advice}");
        if raises {
            expect_notified(&recorder, here, &[InvalidationCause::Discard]);
        }
        // The events of one range arrive in order: no event of the discard precedes this one.
        unmap(block, page);
        expect_notified(&recorder, here, &[InvalidationCause::Unmap]);
        monitor.unsubscribe(subscription);
    }
}

fn no_fault_of_the_application_waits() {
    /// An invalidator that blocks the monitor's thread during a notification.
    #[derive(Debug)]
    struct Stopping {
        inside: AtomicBool,
        go_on: AtomicBool,
    }
    impl Invalidator for Stopping {
        fn invalidate(&self, _: AddressRange, _: InvalidationCause) {
            self.inside.store(true, SeqCst);
            while !self.go_on.load(SeqCst) {
                thread::yield_now();
            }
        }
        fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
            InvalidationToken::unnumbered()
        }
        fn invalidate_end(&self, _: InvalidationToken) {}
        fn close_gate(&self) -> GateToken {
            GateToken::unnumbered()
        }
        fn open_gate(&self, _: GateToken) {}
    }
    let monitor = start_userfaultfd();
    let page = page();
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let block = unsafe { libc::mmap(ptr::null_mut(), 256 * page, prot, flags, -1, 0) };
    let stopping =
        Arc::new(Stopping { inside: AtomicBool::new(false), go_on: AtomicBool::new(false) });
    let subscription =
        monitor.subscribe(range(block, 256 * page), Arc::<Stopping>::clone(&stopping)).unwrap();
    // SAFETY: the page belongs to this function, and no reference to it exists.
    assert_eq!(unsafe { libc::madvise(block, page, libc::MADV_DONTNEED) }, 0);
    while !stopping.inside.load(SeqCst) {
        thread::yield_now();
    }
    // The monitor's thread is blocked now. The page faults below must not wait for it.
    for index in 0..256 {
        let at = block.cast::<u8>().wrapping_add(index * page);
        // SAFETY: the page belongs to this function, and no reference to it exists.
        unsafe {
            assert_eq!(at.read_volatile(), 0, "a read fault");
            at.write_volatile(7);
        }
    }
    // SAFETY: the page belongs to this function, and the child writes to its own copy.
    assert_eq!(forked(|| unsafe { block.cast::<u8>().write_volatile(8) }), 0);
    // SAFETY: the page belongs to this function. The write causes a copy-on-write fault.
    unsafe { block.cast::<u8>().write_volatile(9) };
    stopping.go_on.store(true, SeqCst);
    monitor.unsubscribe(subscription);
    unmap(block, 256 * page);
}

fn events_are_delivered_behind_a_closed_gate() {
    let monitor = start_userfaultfd();
    let recorder = Recorder::new();
    let page = page();
    let block = map(4 * page);
    let whole = range(block, 4 * page);
    // The range is not whole pages, so the monitor watches more than the range.
    let inner = range(block.wrapping_byte_add(100), 3 * page);
    let subscription = monitor.subscribe(inner, Arc::<Recorder>::clone(&recorder)).unwrap();
    // SAFETY: the calls change only pages that belong to this function.
    unsafe {
        assert_eq!(libc::madvise(block, page, libc::MADV_DONTNEED), 0);
        expect_notified(&recorder, range(block, page), &[InvalidationCause::Discard]);
        let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let elsewhere = map(page);
        assert_eq!(libc::mremap(block, page, page, fixed, elsewhere), elsewhere);
        expect_notified(
            &recorder,
            range(block, page),
            &[InvalidationCause::Remap, InvalidationCause::Unmap],
        );
    }
    // Raw system calls raise events too.
    raw_unmap(block.wrapping_byte_add(3 * page), page);
    expect_notified(
        &recorder,
        range(block.wrapping_byte_add(3 * page), page),
        &[InvalidationCause::Unmap],
    );
    monitor.unsubscribe(subscription);
    while recorder.gates.load(SeqCst) != 0 {
        thread::yield_now();
    }
    assert!(recorder.closings.load(SeqCst) >= 3, "{recorder:?}");
    recorder.clear();
    raw_unmap(block.wrapping_byte_add(page), 2 * page);
    drop(monitor);
    assert_eq!(recorder.about(whole), []);
}

/// Returns true if `/proc/self/smaps` shows that a userfaultfd watches the mapping at `at`.
fn watched(at: *mut libc::c_void) -> bool {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inside = false;
    for line in maps.lines() {
        let bounds = line.split(' ').next().and_then(|bounds| bounds.split_once('-'));
        if let Some((Ok(start), Ok(end))) = bounds
            .map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)))
        {
            inside = (start..end).contains(&at.addr());
        }
        if inside && let Some(flags) = line.strip_prefix("VmFlags:") {
            return flags.split(' ').any(|flag| flag == "uw");
        }
    }
    panic!("nothing is mapped there");
}

fn overlapping_subscriptions_are_watched_until_the_last_is_gone() {
    let monitor = start_userfaultfd();
    let recorder = Recorder::new();
    let page = page();
    let block = map(6 * page);
    let at = |index: usize| block.wrapping_byte_add(index * page);
    let pages = |from: usize, to: usize| range(at(from), (to - from) * page);
    let subscribe = |range| monitor.subscribe(range, Arc::<Recorder>::clone(&recorder)).unwrap();
    let (low, high, inner) =
        (subscribe(pages(0, 4)), subscribe(pages(2, 6)), subscribe(pages(3, 4)));
    let now = || (0..6).map(|index| watched(at(index))).collect::<Vec<_>>();
    assert_eq!(now(), [true; 6]);
    let other = start_userfaultfd();
    let elsewhere = range(map(page), page);
    monitor.unsubscribe(other.subscribe(elsewhere, Recorder::new()).unwrap());
    assert_eq!(monitor.subscriptions(), 3, "a subscription of another monitor ends nothing");
    monitor.unsubscribe(low);
    assert_eq!(now(), [false, false, true, true, true, true]);
    monitor.unsubscribe(high);
    assert_eq!(now(), [false, false, false, true, false, false]);
    assert_eq!(monitor.subscriptions(), 1);
    unmap(at(3), page);
    expect_notified(&recorder, pages(3, 4), &[InvalidationCause::Unmap]);
    monitor.unsubscribe(inner);
    assert_eq!(Arc::strong_count(&recorder), 1);
}

fn remapped_memory_is_watched_again() {
    let monitor = start_userfaultfd();
    let recorder = Recorder::new();
    let page = page();
    let block = map(page);
    let here = range(block, page);
    let stale = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: the call replaces a page that belongs to this function.
    assert_eq!(unsafe { libc::mmap(block, page, libc::PROT_READ, flags, -1, 0) }, block);
    expect_notified(&recorder, here, &[InvalidationCause::Unmap]);
    assert!(!watched(block));
    // The subscription to the old mapping, `stale`, still exists.
    let fresh = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    monitor.unsubscribe(stale);
    assert!(watched(block));
    unmap(block, page);
    expect_notified(&recorder, here, &[InvalidationCause::Unmap]);
    monitor.unsubscribe(fresh);
}

fn moved_memory_is_not_watched_for_ever() {
    let monitor = start_userfaultfd();
    let recorder = Recorder::new();
    let page = page();
    let (block, elsewhere) = (map(page), map(page));
    let here = range(block, page);
    let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    let fixed = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the calls change only pages that belong to this function.
    assert_eq!(unsafe { libc::mremap(block, page, page, fixed, elsewhere) }, elsewhere);
    expect_notified(&recorder, here, &[InvalidationCause::Remap, InvalidationCause::Unmap]);
    assert!(watched(elsewhere), "the kernel still watches moved memory");
    monitor.unsubscribe(subscription);
    assert!(!watched(elsewhere));
}

fn unwatchable_memory_is_refused_with_the_reason() {
    let monitor = start_userfaultfd();
    let page = page();
    let refused = |at, len| monitor.subscribe(range(at, len), Recorder::new()).unwrap_err();
    // SAFETY: the kernel chooses the addresses, so the new mappings replace no others.
    let (segment, file) = unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, page, libc::IPC_CREAT | 0o600);
        let segment = libc::shmat(id, ptr::null(), 0);
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
        let fd = libc::memfd_create(c"hmem-test".as_ptr(), libc::MFD_CLOEXEC);
        assert_eq!(libc::ftruncate(fd, page as i64), 0);
        (segment, libc::mmap(ptr::null_mut(), page, libc::PROT_READ, libc::MAP_SHARED, fd, 0))
    };
    let error = refused(segment, page);
    assert!(error.is_unsupported() && error.to_string().contains("System V"), "{error}");
    let error = refused(file, page);
    assert!(error.is_unsupported() && error.to_string().contains("truncated"), "{error}");
    let block = map(page);
    let blocker = Blocker::new(block, page);
    let error = refused(block, page);
    assert!(error.is_busy() && error.to_string().contains("another userfaultfd"), "{error}");
    drop(blocker);
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(range(block, page), recorder).unwrap();
    monitor.unsubscribe(subscription);
    unmap(block, page);
    assert_eq!(refused(block, page).kind(), ErrorKind::BadAddress);
    assert_eq!(monitor.subscriptions(), 0);
}

fn too_many_mappings_are_an_error_that_names_the_limit() {
    let monitor = start_userfaultfd();
    let page = page();
    let limit: usize =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let block = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(ptr::null_mut(), (limit + 4) * page, libc::PROT_READ, flags, -1, 0)
    };
    assert_ne!(
        block,
        libc::MAP_FAILED,
        "this case needs a limit that an address space can exceed: {limit}"
    );
    let recorder = Recorder::new();
    let mut subscriptions = Vec::new();
    // Every other page is subscribed, so that each page and each gap becomes a separate mapping.
    let error = (0..limit).find_map(|index| {
        let here = range(block.wrapping_byte_add(2 * index * page), page);
        match monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)) {
            Ok(subscription) => {
                subscriptions.push(subscription);
                None
            }
            Err(error) => Some(error),
        }
    });
    let error = error.expect("the limit was reached");
    assert_eq!(error.kind(), ErrorKind::OutOfResources);
    assert!(error.to_string().contains("vm.max_map_count"), "{error}");
    // The earlier subscriptions still exist. Ending them permits new subscriptions.
    assert_eq!(monitor.subscriptions(), subscriptions.len());
    for subscription in subscriptions {
        monitor.unsubscribe(subscription);
    }
    let again = monitor.subscribe(range(block, page), recorder).unwrap();
    monitor.unsubscribe(again);
}

fn room_of_unmapped_foreign_memory_is_found_within_64_subscriptions() {
    let monitor = start_userfaultfd();
    let page = page();
    let limit: usize =
        std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    // Fewer mappings than the kernel allows, and more than the monitor's share leaves free.
    let foreign = limit - limit / 16;
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let block = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(ptr::null_mut(), foreign * page, libc::PROT_NONE, flags, -1, 0)
    };
    assert_ne!(block, libc::MAP_FAILED);
    for index in (1..foreign).step_by(2) {
        // SAFETY: the page is part of the mapping, and nothing uses it.
        let cut =
            unsafe { libc::mprotect(block.wrapping_byte_add(index * page), page, libc::PROT_READ) };
        assert_eq!(cut, 0);
    }
    let watched = map(page);
    let subscribe = || monitor.subscribe(range(watched, page), Recorder::new());
    assert_eq!(subscribe().unwrap_err().kind(), ErrorKind::Busy);
    unmap(block, foreign * page);
    let refused = (0..limit).take_while(|_| subscribe().is_err()).count();
    assert!(refused < 64, "{refused} subscriptions were refused after the memory was unmapped");
}

fn many_monitors_share_one_budget_of_mappings() {
    let start = |count| -> Vec<_> { (0..count).map(|_| start_userfaultfd()).collect() };
    let monitors = start(20);
    let (page, most) = (page(), monitors[0].most_ranges());
    assert!(most > monitors.len());
    let recorder = Recorder::new();
    // Subscribes separate pages to the monitors in turn, until a monitor refuses or twice `most`
    // pages are subscribed. Returns the number of pages.
    let fill = |monitors: &[Arc<UserFaultFd>]| {
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let block = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(ptr::null_mut(), 4 * most * page, libc::PROT_READ, flags, -1, 0)
        };
        assert_ne!(block, libc::MAP_FAILED);
        for count in 0..2 * most {
            let here = range(block.wrapping_byte_add(2 * count * page), page);
            let monitor = &monitors[count % monitors.len()];
            if let Err(error) = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)) {
                assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
                assert!(error.to_string().contains("vm.max_map_count"), "{error}");
                return count;
            }
        }
        2 * most
    };
    assert_eq!(fill(&monitors), most);
    for monitor in &monitors {
        assert_eq!(fill(std::slice::from_ref(monitor)), 0, "all monitors share one budget");
    }
    // The application can still create mappings. The kernel does not merge them, since each is
    // shared memory of its own.
    let own: Vec<_> = (0..2000)
        .map(|_| {
            let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
            // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
            let at = unsafe { libc::mmap(ptr::null_mut(), page, libc::PROT_READ, flags, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
            at
        })
        .collect();
    own.into_iter().for_each(|at| unmap(at, page));
    // The monitors of a forked child have the whole budget.
    let status = forked(|| {
        let own = start(2);
        assert_eq!(fill(&own), most);
        // Dropping the copy of a parent's monitor does not change the child's budget.
        // SAFETY: the child has its own copy of the reference count, and does not use the monitor
        // again.
        drop(unsafe { Arc::from_raw(Arc::as_ptr(&monitors[0])) });
        assert_eq!(fill(&own), 0);
    });
    assert_eq!(status, 0);
    drop(monitors);
    // Dropping the monitors has freed the whole budget, and no more than that.
    let again = start(1);
    assert_eq!(fill(&again), most);
    assert_eq!(fill(&start(1)), 0);
}

fn unmaps_of_uncached_memory_cost_bounded_memory() {
    let monitor = start_userfaultfd();
    assert_eq!(
        notifications_of_uncached_unmaps(&*monitor),
        0,
        "unwatched memory causes no notification"
    );
}

fn a_forked_child_is_disarmed_and_the_parent_undisturbed() {
    let monitor = start_userfaultfd();
    let page = page();
    let block = map(page);
    let here = range(block, page);
    let recorder = Recorder::new();
    let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    // The child has a copy of the subscription.
    let subscription = Cell::new(Some(subscription));
    let status = forked(|| {
        // The child's unmap does not wait for the parent's thread that reads events.
        unmap(block, page);
        assert!(monitor.subscribe(here, Recorder::new()).unwrap_err().is_unsupported());
        monitor.unsubscribe(subscription.take().unwrap());
        assert_eq!(monitor.subscriptions(), 0);
        // SAFETY: the child has its own copy of the reference count, and does not use the monitor
        // again.
        drop(unsafe { Arc::from_raw(Arc::as_ptr(&monitor)) });
        let own = start_userfaultfd();
        let at = map(page);
        let theirs = Recorder::new();
        let watched = own.subscribe(range(at, page), Arc::<Recorder>::clone(&theirs)).unwrap();
        unmap(at, page);
        expect_notified(&theirs, range(at, page), &[InvalidationCause::Unmap]);
        own.unsubscribe(watched);
    });
    assert_eq!(status, 0);
    assert_eq!(recorder.about(here), []);
    unmap(block, page);
    expect_notified(&recorder, here, &[InvalidationCause::Unmap]);
    monitor.unsubscribe(subscription.take().unwrap());
}

fn dropped_monitor_blocks_no_thread_despite_a_child() {
    let monitor = start_userfaultfd();
    let page = page();
    let block = map(2 * page);
    monitor.subscribe(range(block, 2 * page), Recorder::new()).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: the calls create a pipe, and a child that only waits until the pipe closes. Until
    // then it keeps every file open.
    let child = unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        let child = libc::fork();
        if child == 0 {
            libc::close(pipe[1]);
            libc::read(pipe[0], [0_u8].as_mut_ptr().cast(), 1);
            libc::_exit(0);
        }
        child
    };
    unmap(block, page);
    drop(monitor);
    // The userfaultfd is still open in the child. If it still watched this memory, the call would
    // never return.
    unmap(block.wrapping_byte_add(page), page);
    // SAFETY: the calls close the pipe, which ends the child, and wait for the child.
    unsafe {
        libc::close(pipe[1]);
        libc::waitpid(child, ptr::null_mut(), 0);
    }
}

fn dropping_during_unmaps_blocks_no_thread() {
    let page = page();
    for _ in 0..100 {
        let monitor = start_userfaultfd();
        thread::scope(|scope| {
            for _ in 0..3 {
                let block = map(64 * page);
                monitor.subscribe(range(block, 64 * page), Recorder::new()).unwrap();
                let at = block.expose_provenance();
                scope.spawn(move || {
                    for index in 0..64 {
                        unmap(ptr::with_exposed_provenance_mut(at + index * page), page);
                    }
                });
            }
            drop(monitor);
        });
    }
}

/// A model of a cache with one entry. The entry is valid until it is invalidated. Lookups do not
/// hit while the gate is closed.
#[derive(Debug, Default)]
struct OneEntry {
    start: AtomicU64,
    valid: AtomicBool,
    gates: AtomicU64,
    changing: AtomicU64,
}

impl OneEntry {
    fn hits(&self) -> bool {
        self.gates.load(SeqCst) == 0 && self.valid.load(SeqCst)
    }
}

impl Invalidator for OneEntry {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        if range.contains(hmem_core::Address(self.start.load(SeqCst))) {
            self.valid.store(false, SeqCst);
        }
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        self.changing.fetch_add(1, SeqCst);
        self.invalidate(range, cause);
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {
        self.changing.fetch_sub(1, SeqCst);
    }

    fn close_gate(&self) -> GateToken {
        self.gates.fetch_add(1, SeqCst);
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {
        self.gates.fetch_sub(1, SeqCst);
    }
}

/// Returns two counts of stale hits: those of the thread that unmapped the memory, and those of a
/// second thread that mapped other memory at the address.
fn stale_hits(monitor: &dyn Monitor, rounds: usize) -> (u64, u64) {
    let page = page();
    let (mut own, mut other) = (0, 0);
    for _ in 0..rounds {
        let block = map(page);
        let entry = Arc::new(OneEntry::default());
        entry.start.store(range(block, page).start().0, SeqCst);
        entry.valid.store(true, SeqCst);
        let subscription =
            monitor.subscribe(range(block, page), Arc::<OneEntry>::clone(&entry)).unwrap();
        let at = block.expose_provenance();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let remap = move || {
            let at = ptr::with_exposed_provenance_mut::<libc::c_void>(at);
            // SAFETY: with MAP_FIXED_NOREPLACE the call maps memory only if the address is free.
            unsafe { libc::mmap(at, page, libc::PROT_READ, flags, -1, 0) == at }
        };
        let remapped = thread::scope(|scope| {
            let racing = scope.spawn(|| {
                for _ in 0..2000 {
                    if remap() {
                        // This thread now owns other memory at the address, so a hit would be
                        // stale.
                        return Some(entry.hits());
                    }
                }
                None
            });
            unmap(block, page);
            let mine = remap();
            if mine {
                own += u64::from(entry.hits());
            }
            let theirs = racing.join().unwrap();
            other += u64::from(theirs == Some(true));
            mine || theirs.is_some()
        });
        if remapped {
            unmap(block, page);
        }
        monitor.unsubscribe(subscription);
    }
    (own, other)
}

/// Tests the time between an unmap and its event, which the documentation of [`UserFaultFd`]
/// describes. Only threads other than the one that unmaps get stale hits, and with memhooks no
/// thread does.
fn another_thread_can_get_a_stale_hit() {
    let rounds = 20_000;
    let monitor = start_userfaultfd();
    let (own, other) = stale_hits(&*monitor, rounds);
    println!(
        "userfaultfd: {own} stale hits of the thread that unmaps, {other} of another, in {rounds} \
         rounds"
    );
    assert_eq!(own, 0);
    assert!(
        other > 0,
        "no thread got the stale hit that the documentation describes, in {rounds} rounds"
    );
    drop(monitor);
    let monitor = MemHooks::start().unwrap();
    assert_eq!(stale_hits(&*monitor, rounds), (0, 0));
}
