//! Tests of forked children of a process with a patched C library.

use std::{
    cell::Cell,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    AddressRange,
    monitor::{
        GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription,
    },
};
use hmem_iface_system::monitor::MemHooks;

use crate::{RW, monitors::*, subscribing::Mortal};

/// A subscription of the parent. A forked child that takes the value takes its own copy.
type Inherited = Cell<Option<Subscription>>;

fn in_children(monitor: &Arc<MemHooks>, subscription: &Inherited, here: AddressRange) {
    let page = page();
    let block = map(page);
    // SAFETY: the child runs on a copy of this process's memory.
    let raw_fork = || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    let child = |monitor: &Arc<MemHooks>| {
        unmap(block, page);
        let error = monitor.subscribe(here, Recorder::new()).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("forked"), "{error}");
        assert!(monitor.check().is_err());
        monitor.unsubscribe(subscription.take().unwrap());
        // A monitor that the child starts itself works.
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
        // SAFETY: the call ends the child without running destructors.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: the call waits for the child, and writes only `status`.
    unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
    assert_eq!(status, 0);
    unmap(block, page);
}

pub(crate) fn a_forked_child_is_disarmed_and_the_parent_undisturbed() {
    /// An invalidator that counts notifications in memory that it shares with a child.
    #[derive(Debug)]
    struct Shared(usize);
    impl Invalidator for Shared {
        fn invalidate(&self, _: AddressRange, _: InvalidationCause) {}
        fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
            // SAFETY: the address is that of a shared, zeroed mapping, which is never unmapped.
            unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(self.0) }.fetch_add(1, SeqCst);
            InvalidationToken::unnumbered()
        }
        fn invalidate_end(&self, _: InvalidationToken) {}
        fn close_gate(&self) -> GateToken {
            GateToken::unnumbered()
        }
        fn open_gate(&self, _: GateToken) {}
    }
    let page = page();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let shared = unsafe { libc::mmap(ptr::null_mut(), page, RW, flags, -1, 0) }.expose_provenance();
    // SAFETY: the address is that of a shared, zeroed mapping, which is never unmapped.
    let notified = || unsafe { &*ptr::with_exposed_provenance::<AtomicU64>(shared) }.load(SeqCst);
    let monitor = MemHooks::start().unwrap();
    let block = map(page);
    let here = range(block, page);
    let subscription = Cell::new(Some(monitor.subscribe(here, Arc::new(Shared(shared))).unwrap()));
    let before = notified();
    assert_eq!(forked(|| unmap(block, page)), 0);
    assert_eq!(notified(), before, "an unmap in a child notifies nobody");
    in_children(&monitor, &subscription, here);
    let before = notified();
    unmap(block, page);
    assert_eq!(notified(), before + 1, "an unmap in the parent notifies the subscriber");
    monitor.unsubscribe(subscription.take().unwrap());
    monitor.check().unwrap();
}

pub(crate) fn forks_while_other_threads_subscribe_do_not_deadlock() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let block = map(page);
    let here = range(block, page);
    let recorder = Recorder::new();
    let subscribed = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
    let subscription = Cell::new(Some(subscribed));
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
                raw_fork_safe(&monitor, here, &subscription, block, page);
            });
            assert_eq!(status, 0);
        }
        running.store(false, SeqCst);
    });
    monitor.unsubscribe(subscription.take().unwrap());
}

/// Runs the operations that must work in a forked child, even if another thread of the parent held
/// a lock at the fork.
fn raw_fork_safe(
    monitor: &Arc<MemHooks>,
    here: AddressRange,
    subscription: &Inherited,
    block: *mut libc::c_void,
    page: usize,
) {
    monitor.unsubscribe(subscription.take().unwrap());
    let own: Arc<dyn Invalidator> = Arc::new(Mortal::new(&Arc::default()));
    assert!(monitor.subscribe(here, own).is_err());
    unmap(block, page);
    // SAFETY: the child has its own copy of the reference count, and does not use `monitor` again.
    // The drop of the last reference must not wait.
    drop(unsafe { Arc::from_raw(Arc::as_ptr(monitor)) });
}
