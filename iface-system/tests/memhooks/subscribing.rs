//! Tests of subscribing and unsubscribing during changes, and of the kinds of memory that can be
//! watched.

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::{
    AddressRange, ErrorKind,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor, TokenIssuer},
};
use hmem_iface_system::monitor::MemHooks;

use crate::{RW, monitors::*};

pub(crate) fn subscribing_waits_for_a_change_in_flight() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let (block, other) = (map(page), map(page));
    let blocker = Blocker::new(block, page);
    let at = block.expose_provenance();
    // This unmap begins before the first subscription, so it notifies no invalidator.
    let inside = thread::spawn(move || unmap(ptr::with_exposed_provenance_mut(at), page));
    blocker.wait();
    let subscribed = Arc::new(AtomicBool::new(false));
    let subscribing = {
        let (monitor, subscribed, here) =
            (Arc::clone(&monitor), Arc::clone(&subscribed), range(other, page));
        thread::spawn(move || {
            let subscription = monitor.subscribe(here, Recorder::new()).unwrap();
            subscribed.store(true, SeqCst);
            subscription
        })
    };
    // The hooked calls below do not wait, although the thread that subscribes holds the monitor's
    // lock.
    for _ in 0..20_000 {
        let at = map(page);
        unmap(at, page);
    }
    assert!(!subscribed.load(SeqCst), "a subscription waits for changes that began before it");
    blocker.release();
    inside.join().unwrap();
    monitor.unsubscribe(subscribing.join().unwrap());
}

/// An invalidator that detects a notification after its drop.
#[derive(Debug)]
pub(crate) struct Mortal {
    issuer: TokenIssuer,
    alive: AtomicU64,
    notified: Arc<AtomicU64>,
}

const ALIVE: u64 = 0x600d_600d_600d_600d;

impl Mortal {
    pub(crate) fn new(notified: &Arc<AtomicU64>) -> Self {
        let (issuer, alive) = (TokenIssuer::new(), AtomicU64::new(ALIVE));
        Self { issuer, alive, notified: Arc::clone(notified) }
    }
}

impl Invalidator for Mortal {
    fn invalidate(&self, _: AddressRange, _: InvalidationCause) {}

    fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
        assert_eq!(self.alive.load(SeqCst), ALIVE);
        InvalidationToken::new(&self.issuer, 5)
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        assert_eq!((self.alive.load(SeqCst), change.redeem(&self.issuer)), (ALIVE, Some(5)));
        self.notified.fetch_add(1, SeqCst);
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

impl Drop for Mortal {
    fn drop(&mut self) {
        self.alive.store(0, SeqCst);
    }
}

pub(crate) fn an_invalidator_is_not_called_after_its_last_subscription() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let notified = Arc::new(AtomicU64::new(0));
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
            let mortal = Arc::new(Mortal::new(&notified));
            let twice =
                [(); 2].map(|()| monitor.subscribe(here, Arc::<Mortal>::clone(&mortal)).unwrap());
            for subscription in twice {
                assert!(Arc::strong_count(&mortal) > 1);
                monitor.unsubscribe(subscription);
            }
            assert_eq!(Arc::strong_count(&mortal), 1, "an unsubscribed invalidator is dropped");
        }
        while notified.load(SeqCst) == 0 {
            let mortal = Arc::new(Mortal::new(&notified));
            let subscription = monitor.subscribe(here, mortal).unwrap();
            thread::yield_now();
            monitor.unsubscribe(subscription);
        }
        running.store(false, SeqCst);
    });
}

pub(crate) fn more_invalidators_than_slots_are_refused() {
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

pub(crate) fn files_are_refused_with_the_reason() {
    let monitor = MemHooks::start().unwrap();
    let page = page();
    let refused = |at, len| monitor.subscribe(range(at, len), Recorder::new()).unwrap_err();
    // SAFETY: the calls create a file and a mapping at an address that the kernel chooses.
    let file = unsafe {
        let fd = libc::memfd_create(c"hmem-test".as_ptr(), libc::MFD_CLOEXEC);
        assert_eq!(libc::ftruncate(fd, page as i64), 0);
        libc::mmap(ptr::null_mut(), page, RW, libc::MAP_SHARED, fd, 0)
    };
    let error = refused(file, page);
    assert!(error.is_unsupported(), "{error}");
    assert!(
        error.context_value("mapping of").is_some_and(|of| of.contains("memfd:hmem-test"))
            && error.to_string().contains("truncated"),
        "{error:#}"
    );
    let block = map(2 * page);
    // The monitor now remembers that the pages can be watched, until a hook runs.
    let subscription = monitor.subscribe(range(block, 2 * page), Recorder::new()).unwrap();
    monitor.unsubscribe(subscription);
    // SAFETY: the call moves the test's mapping of the file over the test's second page.
    unsafe {
        let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let onto = block.wrapping_byte_add(page);
        assert_eq!(libc::mremap(file, page, page, moves, onto), onto);
    }
    assert!(refused(block, 2 * page).is_unsupported(), "a file behind the second page");
    unmap(block, page);
    assert_eq!(refused(block, page).kind(), ErrorKind::BadAddress);
}
