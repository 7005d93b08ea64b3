//! Behaviours of an iface's monitor, which detects that memory was freed.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use hmem_core::{
    AddressRange, Allocation, DeviceBuffer, Iface, Result,
    iface::{AllocRequest, Facet},
    monitor::{
        DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor,
        TokenIssuer,
    },
};

use super::{LEN, PARTS, buffers, first_device, is_missing, memory::part, need};
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
            // Fails if the receiver has stopped waiting, after `ANSWER_TIME`.
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

/// Number of allocations that [`AllocateAtNotification`] makes. One of them has the freed address
/// if the allocator reuses addresses soon.
const ALLOCATIONS: usize = 4;

/// An invalidator that allocates memory when it is first notified of a change of `range`. `reused`
/// has the allocations that were at addresses of `range` before the notification ended.
#[derive(Debug)]
struct AllocateAtNotification {
    iface: Arc<dyn Iface>,
    range: AddressRange,
    request: AllocRequest,
    notified: AtomicBool,
    reused: Mutex<Vec<AddressRange>>,
    /// The thread that allocates, which returns its buffers.
    thread: Mutex<Option<JoinHandle<Vec<DeviceBuffer>>>>,
}

impl AllocateAtNotification {
    /// Allocates memory at the first change of the range, and records the allocations at its
    /// addresses. Another thread allocates, because the notifying thread may hold a lock of the
    /// iface.
    fn note(&self, range: AddressRange) {
        if !range.overlaps(self.range) || self.notified.swap(true, Ordering::Relaxed) {
            return;
        }
        let (answer, answered) = mpsc::channel();
        let (iface, request) = (Arc::clone(&self.iface), self.request);
        let thread = thread::spawn(move || {
            let allocate = |_| DeviceBuffer::allocate(&iface, &request).ok();
            let buffers: Vec<_> = (0..ALLOCATIONS).map_while(allocate).collect();
            // Fails if the receiver has stopped waiting, after `ANSWER_TIME`.
            let _ = answer.send(buffers.iter().map(|new| new.allocation().range).collect());
            buffers
        });
        let mut new: Vec<AddressRange> = answered.recv_timeout(ANSWER_TIME).unwrap_or_default();
        new.retain(|new| new.overlaps(self.range));
        *self.reused.lock().unwrap_or_else(PoisonError::into_inner) = new;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }
}

impl Invalidator for AllocateAtNotification {
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
    let monitor = start_with_callbacks(&**iface)?;
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

/// Starts the monitor of an iface. Skips the behaviour if the monitor compares identities, and so
/// needs no notifications.
fn start_with_callbacks(iface: &dyn Iface) -> Result<Arc<dyn Monitor>, Skipped> {
    let monitor = start(iface)?;
    match monitor.detection() {
        DetectionMethod::Callback => Ok(monitor),
        DetectionMethod::Identity => {
            skip("the monitor compares identities and needs no notifications")
        }
    }
}

/// Tests that a subscription to some bytes of an allocation is notified of the allocation's free. A
/// cache watches the ranges that it registers, and these may be parts of an allocation.
pub(super) fn subscription_to_a_part_detects_the_free_of_its_allocation(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let monitor = start_with_callbacks(&**iface)?;
    let (mut watched, mut refusals) = (false, Vec::new());
    for extent in PARTS {
        for buffer in buffers(iface)? {
            let allocation = *buffer.allocation();
            let range = part(&buffer, extent);
            let counter = NotificationCounter::of(range);
            let subscription = match monitor.subscribe(range, counter.clone()) {
                Ok(subscription) => subscription,
                Err(why) if is_missing(&why) => {
                    refusals.push(why.to_string());
                    continue;
                }
                Err(why) => panic!("watch {range} of {allocation:?}: {why}"),
            };
            watched = true;
            drop(buffer);
            assert!(counter.count() > 0, "{range} was freed with {allocation:?}, and not notified");
            monitor.unsubscribe(subscription);
        }
    }
    outcome(watched, &refusals)
}

/// Tests that subscriptions to one allocation are independent: each is notified of the free, and
/// the end of one does not end another. The caches of several domains share a monitor.
pub(super) fn each_subscription_to_an_allocation_is_notified(iface: &Arc<dyn Iface>) -> Outcome {
    let monitor = start_with_callbacks(&**iface)?;
    let (mut watched, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let counters = [(); 4].map(|()| NotificationCounter::of(allocation.range));
        let mut subscriptions = Vec::new();
        for counter in &counters {
            match monitor.subscribe(allocation.range, counter.clone()) {
                Ok(subscription) => subscriptions.push(subscription),
                Err(why) if subscriptions.is_empty() && is_missing(&why) => {
                    refusals.push(why.to_string());
                    break;
                }
                Err(why) => panic!("watch {allocation:?} again: {why}"),
            }
        }
        if subscriptions.is_empty() {
            continue;
        }
        watched = true;
        let ended = 1;
        monitor.unsubscribe(subscriptions.remove(ended));
        drop(buffer);
        for (number, counter) in counters.iter().enumerate() {
            let notified = counter.count() > 0;
            assert_eq!(
                notified,
                number != ended,
                "subscription {number} to {allocation:?}, of which {ended} has ended, is notified",
            );
        }
        subscriptions.into_iter().for_each(|subscription| monitor.unsubscribe(subscription));
    }
    outcome(watched, &refusals)
}

/// Tests that the addresses of freed memory are not allocated again before the subscribers were
/// notified. Otherwise a cache returns its registration of the old memory for the new memory.
pub(super) fn freed_addresses_are_not_allocated_before_the_notification(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let monitor = start_with_callbacks(&**iface)?;
    let (mut watched, mut refusals) = (false, Vec::new());
    for buffer in buffers(iface)? {
        let Allocation { range, kind, .. } = *buffer.allocation();
        let allocation = Arc::new(AllocateAtNotification {
            iface: Arc::clone(iface),
            range,
            request: AllocRequest { len: LEN, device: first_device(&**iface), kind },
            notified: AtomicBool::new(false),
            reused: Mutex::default(),
            thread: Mutex::default(),
        });
        let invalidator: Arc<dyn Invalidator> = allocation.clone();
        let subscription = match monitor.subscribe(range, invalidator) {
            Ok(subscription) => subscription,
            Err(why) if is_missing(&why) => {
                refusals.push(why.to_string());
                continue;
            }
            Err(why) => panic!("watch {range}: {why}"),
        };
        watched = true;
        drop(buffer);
        monitor.unsubscribe(subscription);
        let thread = allocation.thread.lock().expect("no panic").take();
        let thread = thread.unwrap_or_else(|| panic!("no notification of the free of {range}"));
        drop(thread.join().expect("allocate"));
        let reused = allocation.reused.lock().expect("no panic");
        assert!(
            reused.is_empty(),
            "{kind:?} memory was allocated at {reused:?} before the free of {range} was notified",
        );
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
