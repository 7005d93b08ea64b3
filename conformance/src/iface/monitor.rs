//! Behaviours of an iface's monitor, which detects that memory was freed.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use hmem_core::{
    AddressRange, Iface, Result,
    iface::Facet,
    monitor::{
        DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor,
        TokenIssuer,
    },
};

use super::{buffers, is_missing, need};
use crate::trial::{Outcome, Skipped, skip};

/// An invalidator that counts the notifications of ranges that overlap its own range.
#[derive(Debug)]
struct NotificationCounter {
    range: AddressRange,
    count: AtomicU64,
}

impl NotificationCounter {
    fn of(range: AddressRange) -> Arc<Self> {
        Arc::new(Self { range, count: AtomicU64::new(0) })
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn note(&self, range: AddressRange) {
        if range.overlaps(self.range) {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Invalidator for NotificationCounter {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        self.note(range);
    }

    fn invalidate_start(&self, range: AddressRange, _: InvalidationCause) -> InvalidationToken {
        self.note(range);
        InvalidationToken::unnumbered()
    }

    fn invalidate_end(&self, _: InvalidationToken) {}
    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }
    fn open_gate(&self, _: GateToken) {}
}

/// Time that a query has for its answer during a free. An iface that holds a lock while it frees
/// gives no answer until it has released the lock.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// An invalidator that queries the iface for the start of `range` at the end of each notification
/// about that range. `claims` counts the queries that still found an allocation there.
#[derive(Debug)]
struct QueryAtEnd {
    issuer: TokenIssuer,
    iface: Arc<dyn Iface>,
    range: AddressRange,
    claims: AtomicU64,
    queries: Mutex<Vec<JoinHandle<()>>>,
}

impl QueryAtEnd {
    /// Queries on another thread, because this thread may hold a lock of the iface.
    fn query(&self) {
        let (answer, answered) = mpsc::channel();
        let (iface, address) = (Arc::clone(&self.iface), self.range.start());
        let query = thread::spawn(move || {
            let claimed = iface.query(address).is_ok_and(|found| found.is_some());
            // The receiver is gone after `ANSWER_TIME`.
            let _ = answer.send(claimed);
        });
        if answered.recv_timeout(ANSWER_TIME) == Ok(true) {
            self.claims.fetch_add(1, Ordering::Relaxed);
        }
        self.queries.lock().unwrap_or_else(PoisonError::into_inner).push(query);
    }
}

impl Invalidator for QueryAtEnd {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        if range.overlaps(self.range) {
            self.query();
        }
    }

    fn invalidate_start(&self, range: AddressRange, _: InvalidationCause) -> InvalidationToken {
        InvalidationToken::new(&self.issuer, range.overlaps(self.range).into())
    }

    fn invalidate_end(&self, token: InvalidationToken) {
        if token.redeem(&self.issuer) == Some(1) {
            self.query();
        }
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }
    fn open_gate(&self, _: GateToken) {}
}

fn start(iface: &dyn Iface) -> Result<Arc<dyn Monitor>, Skipped> {
    let source = need(iface, iface.monitor(), Facet::Monitor)?;
    match source.start() {
        Ok(monitor) => Ok(monitor),
        Err(why) if is_missing(&why) => skip(why.to_string()),
        Err(why) => panic!("start the monitor: {why}"),
    }
}

/// Returns the outcome of a behaviour. `refusals` are the errors for the kinds of memory that the
/// monitor does not watch. If it watches no kind, the outcome skips the behaviour.
fn outcome(watched: bool, refusals: &[String]) -> Outcome {
    if watched {
        return Ok(());
    }
    skip(format!("the monitor watches no kind of memory: {}", refusals.join("; ")))
}

/// Tests that the monitor detects a free by its own detection method. A monitor with callbacks must
/// notify its subscriber. A monitor with identities must report that the allocation is no longer
/// valid.
pub(super) fn monitor_detects_a_free(iface: &Arc<dyn Iface>) -> Outcome {
    let monitor = start(&**iface)?;
    let (mut watched, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let counter = NotificationCounter::of(allocation.range);
        let subscription = match monitor.subscribe(allocation.range, counter.clone()) {
            Ok(subscription) => subscription,
            Err(why) if is_missing(&why) => {
                refusals.push(why.to_string());
                continue;
            }
            Err(why) => panic!("watch {allocation:?}: {why}"),
        };
        watched = true;
        let valid = || monitor.valid(&subscription, &allocation).expect("validate the identity");
        assert!(valid(), "live memory is not valid: {allocation:?}");
        assert_eq!(counter.count(), 0, "notified before a free");
        drop(buffer);
        match monitor.detection() {
            DetectionMethod::Callback => {
                assert!(counter.count() > 0, "no callback for the free of {allocation:?}");
            }
            DetectionMethod::Identity => {
                assert!(!valid(), "freed memory is valid: {allocation:?}");
                // The new allocations may reuse the address. If so, they have another identity.
                let again = buffers(iface)?;
                assert!(!valid(), "{allocation:?} is valid beside {again:?}");
            }
        }
        monitor.unsubscribe(subscription);
    }
    outcome(watched, &refusals)
}

/// Tests that the iface no longer claims freed memory when the notification of the free ends.
/// Otherwise a cache can register the memory again, and misses that the memory is gone.
pub(super) fn freed_memory_is_not_claimed_after_its_notification(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let monitor = start(&**iface)?;
    if monitor.detection() == DetectionMethod::Identity {
        return skip("the monitor compares identities and needs no notifications");
    }
    let (mut watched, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let query = Arc::new(QueryAtEnd {
            issuer: TokenIssuer::new(),
            iface: Arc::clone(iface),
            range: allocation.range,
            claims: AtomicU64::new(0),
            queries: Mutex::default(),
        });
        let invalidator: Arc<dyn Invalidator> = query.clone();
        let subscription = match monitor.subscribe(allocation.range, invalidator) {
            Ok(subscription) => subscription,
            Err(why) if is_missing(&why) => {
                refusals.push(why.to_string());
                continue;
            }
            Err(why) => panic!("watch {allocation:?}: {why}"),
        };
        watched = true;
        drop(buffer);
        monitor.unsubscribe(subscription);
        let queries = std::mem::take(&mut *query.queries.lock().expect("no panic"));
        for query in queries {
            query.join().expect("query the freed memory");
        }
        let claims = query.claims.load(Ordering::Relaxed);
        assert_eq!(claims, 0, "claimed after the callback of its free: {allocation:?}");
    }
    outcome(watched, &refusals)
}

pub(super) fn monitor_is_silent_after_unsubscribing(iface: &Arc<dyn Iface>) -> Outcome {
    let monitor = start(&**iface)?;
    let (mut watched, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let counter = NotificationCounter::of(buffer.allocation().range);
        match monitor.subscribe(buffer.allocation().range, counter.clone()) {
            Ok(subscription) => monitor.unsubscribe(subscription),
            Err(why) if is_missing(&why) => {
                refusals.push(why.to_string());
                continue;
            }
            Err(why) => panic!("watch {:?}: {why}", buffer.allocation()),
        }
        watched = true;
        drop(buffer);
        assert_eq!(counter.count(), 0, "notified of a free after the unsubscription");
    }
    outcome(watched, &refusals)
}
