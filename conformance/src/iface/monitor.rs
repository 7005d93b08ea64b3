//! Behaviours of an iface's monitor, which detects that memory was freed.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceBuffer, Iface, Result,
    iface::{AllocRequest, Facet},
    monitor::{
        DetectionMethod, GateToken, InvalidationCause, InvalidationToken, Invalidator, Monitor,
        Subscription, TokenIssuer,
    },
};

use super::{LEN, PARTS, buffers, first_device, is_missing, memory::part, need};
use crate::trial::{Outcome, Skipped, skip};

/// A test's reaction to the changes of a watched range.
trait Reaction: fmt::Debug + Send + Sync {
    /// Runs when a change of the range begins.
    fn begun(&self) {}

    /// Runs when a change of the range ends.
    fn ended(&self) {}
}

/// An invalidator that runs a reaction at each change of memory that overlaps `range`.
#[derive(Debug)]
struct Watcher<R> {
    issuer: TokenIssuer,
    range: AddressRange,
    reaction: R,
}

impl<R> Watcher<R> {
    fn new(range: AddressRange, reaction: R) -> Arc<Self> {
        Arc::new(Self { issuer: TokenIssuer::new(), range, reaction })
    }
}

impl<R: Reaction> Invalidator for Watcher<R> {
    fn invalidate(&self, range: AddressRange, _: InvalidationCause) {
        if range.overlaps(self.range) {
            self.reaction.begun();
            self.reaction.ended();
        }
    }

    fn invalidate_start(&self, range: AddressRange, _: InvalidationCause) -> InvalidationToken {
        let overlaps = range.overlaps(self.range);
        if overlaps {
            self.reaction.begun();
        }
        InvalidationToken::new(&self.issuer, overlaps.into())
    }

    fn invalidate_end(&self, token: InvalidationToken) {
        if token.redeem(&self.issuer) == Some(1) {
            self.reaction.ended();
        }
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

/// Counts changes.
impl Reaction for AtomicU64 {
    fn begun(&self) {
        self.fetch_add(1, Ordering::Relaxed);
    }
}

impl Watcher<AtomicU64> {
    fn counter(range: AddressRange) -> Arc<Self> {
        Self::new(range, AtomicU64::new(0))
    }

    fn count(&self) -> u64 {
        self.reaction.load(Ordering::Relaxed)
    }
}

/// Maximum time for which a reaction waits, inside a notification, for another thread that queries
/// or allocates memory. Without a maximum, an iface that holds a lock while it notifies would block
/// both threads.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// The answer to a query: true if it found an allocation.
type Claimed = Result<bool>;

/// Queries the iface for an address at the end of each change.
#[derive(Debug)]
struct QueryAtEnd {
    iface: Arc<dyn Iface>,
    address: Address,
    /// The threads that query. A thread may answer after the notification, if the iface holds a
    /// lock while it notifies.
    queries: Mutex<Vec<JoinHandle<Claimed>>>,
}

impl Reaction for QueryAtEnd {
    /// Starts a query on another thread, because this thread may hold a lock of the iface.
    fn ended(&self) {
        let (answer, answered) = mpsc::channel();
        let (iface, address) = (Arc::clone(&self.iface), self.address);
        let query = thread::spawn(move || {
            let found = iface.query(address);
            // Fails if the receiver has stopped waiting, after `ANSWER_TIME`.
            let _ = answer.send(());
            Ok(found?.is_some())
        });
        // After a timeout, the thread has the answer.
        let _ = answered.recv_timeout(ANSWER_TIME);
        self.queries.lock().unwrap_or_else(PoisonError::into_inner).push(query);
    }
}

/// Number of allocations that [`AllocateAtStart`] makes. One of them has the freed address if the
/// allocator reuses addresses soon.
const ALLOCATIONS: usize = 4;

/// Allocates memory when the first change of the watched range begins.
#[derive(Debug)]
struct AllocateAtStart {
    iface: Arc<dyn Iface>,
    request: AllocRequest,
    /// True once a change of the watched range has begun.
    notified: AtomicBool,
    /// The ranges that `thread` had allocated when [`Reaction::begun`] returned for the first
    /// change. The notification of that change was still in progress then. Empty if `thread` took
    /// longer than [`ANSWER_TIME`].
    allocated: Mutex<Vec<AddressRange>>,
    /// The thread that allocates memory. It returns the buffers, or the error of an allocation.
    /// `None` before the first change.
    thread: Mutex<Option<JoinHandle<Result<Vec<DeviceBuffer>>>>>,
}

impl Reaction for AllocateAtStart {
    /// Starts the allocations on another thread, because this thread may hold a lock of the iface.
    fn begun(&self) {
        if self.notified.swap(true, Ordering::Relaxed) {
            return;
        }
        let (answer, answered) = mpsc::channel();
        let (iface, request) = (Arc::clone(&self.iface), self.request);
        let thread = thread::spawn(move || {
            let allocate = |_| DeviceBuffer::allocate(&iface, &request);
            let buffers = (0..ALLOCATIONS).map(allocate).collect::<Result<Vec<_>>>()?;
            // Fails if the receiver has stopped waiting, after `ANSWER_TIME`.
            let _ = answer.send(buffers.iter().map(|new| new.allocation().range).collect());
            Ok(buffers)
        });
        let allocated = answered.recv_timeout(ANSWER_TIME).unwrap_or_default();
        *self.allocated.lock().unwrap_or_else(PoisonError::into_inner) = allocated;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }
}

/// The monitor of an iface, with the results of subscriptions to each kind of memory.
struct Subscriber {
    monitor: Arc<dyn Monitor>,
    /// True once a subscription has succeeded.
    watched: bool,
    /// The errors for the kinds of memory that the monitor does not watch.
    refusals: Vec<String>,
}

impl Subscriber {
    /// Starts the monitor of an iface. Skips the behaviour if the iface has none.
    fn start(iface: &dyn Iface) -> Result<Self, Skipped> {
        let source = need(iface, iface.monitor(), Facet::Monitor)?;
        match source.start() {
            Ok(monitor) => Ok(Self { monitor, watched: false, refusals: Vec::new() }),
            Err(why) if is_missing(&why) => skip(why.to_string()),
            Err(why) => panic!("start the monitor: {why}"),
        }
    }

    /// Starts the monitor like [`Self::start`]. Skips the behaviour if the iface has no monitor,
    /// and also if the monitor detects changes by comparing identities. Such a monitor notifies
    /// nobody.
    fn start_with_callbacks(iface: &dyn Iface) -> Result<Self, Skipped> {
        let started = Self::start(iface)?;
        match started.monitor.detection() {
            DetectionMethod::Callback => Ok(started),
            DetectionMethod::Identity => {
                skip("the monitor compares identities and needs no notifications")
            }
        }
    }

    /// Subscribes to a range. Returns `None` if the monitor does not watch this kind of memory.
    fn subscribe(
        &mut self,
        range: AddressRange,
        watcher: Arc<dyn Invalidator>,
    ) -> Option<Subscription> {
        match self.monitor.subscribe(range, watcher) {
            Ok(subscription) => {
                self.watched = true;
                Some(subscription)
            }
            Err(why) if is_missing(&why) => {
                self.refusals.push(why.to_string());
                None
            }
            Err(why) => panic!("watch {range}: {why}"),
        }
    }

    /// Returns the outcome of the behaviour: a success if a subscription has succeeded, and a skip
    /// if the monitor watches no kind of memory.
    fn outcome(self) -> Outcome {
        if self.watched {
            return Ok(());
        }
        skip(format!("the monitor watches no kind of memory: {}", self.refusals.join("; ")))
    }
}

/// Tests that the monitor detects a free by its own detection method. A monitor with callbacks must
/// notify its subscriber. A monitor with identities must report that the allocation is no longer
/// valid.
pub(super) fn monitor_detects_a_free(iface: &Arc<dyn Iface>) -> Outcome {
    let mut subscriber = Subscriber::start(&**iface)?;
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let counter = Watcher::counter(allocation.range);
        let subscription = subscriber.subscribe(allocation.range, counter.clone());
        let Some(subscription) = subscription else { continue };
        let valid =
            || subscriber.monitor.valid(&subscription, &allocation).expect("validate the identity");
        assert!(valid(), "live memory is not valid: {allocation:?}");
        assert_eq!(counter.count(), 0, "notified before a free");
        drop(buffer);
        match subscriber.monitor.detection() {
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
        subscriber.monitor.unsubscribe(subscription);
    }
    subscriber.outcome()
}

/// Tests that the iface no longer claims freed memory when the notification of the free ends.
/// Otherwise a cache can register the memory again, and does not notice that the memory is gone.
pub(super) fn freed_memory_is_not_claimed_after_its_notification(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let mut subscriber = Subscriber::start_with_callbacks(&**iface)?;
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let query = QueryAtEnd {
            iface: Arc::clone(iface),
            address: allocation.base(),
            queries: Mutex::default(),
        };
        let watcher = Watcher::new(allocation.range, query);
        let subscription = subscriber.subscribe(allocation.range, watcher.clone());
        let Some(subscription) = subscription else { continue };
        drop(buffer);
        subscriber.monitor.unsubscribe(subscription);
        let queries = std::mem::take(&mut *watcher.reaction.queries.lock().expect("no panic"));
        assert!(!queries.is_empty(), "no notification of the free of {allocation:?}");
        for query in queries {
            // Nothing allocates memory meanwhile, so a late answer is no later allocation.
            let claimed = query.join().expect("no panic").expect("query the freed memory");
            assert!(!claimed, "claimed after the callback of its free: {allocation:?}");
        }
    }
    subscriber.outcome()
}

/// Tests that a subscription to some bytes of an allocation is notified of the allocation's free. A
/// cache watches the ranges that it registers, and these may be parts of an allocation.
pub(super) fn subscription_to_a_part_detects_the_free_of_its_allocation(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let mut subscriber = Subscriber::start_with_callbacks(&**iface)?;
    for extent in PARTS {
        for buffer in buffers(iface)? {
            let allocation = *buffer.allocation();
            let range = part(&buffer, extent);
            let counter = Watcher::counter(range);
            let subscription = subscriber.subscribe(range, counter.clone());
            let Some(subscription) = subscription else { continue };
            drop(buffer);
            assert!(counter.count() > 0, "{range} was freed with {allocation:?}, and not notified");
            subscriber.monitor.unsubscribe(subscription);
        }
    }
    subscriber.outcome()
}

/// Tests that subscriptions to one allocation are independent: each is notified of the free, and
/// the end of one does not end another. The caches of several domains share a monitor.
pub(super) fn each_subscription_to_an_allocation_is_notified(iface: &Arc<dyn Iface>) -> Outcome {
    let mut subscriber = Subscriber::start_with_callbacks(&**iface)?;
    for buffer in buffers(iface)? {
        let allocation = *buffer.allocation();
        let counters = [(); 4].map(|()| Watcher::counter(allocation.range));
        let first = subscriber.subscribe(allocation.range, counters[0].clone());
        let Some(first) = first else { continue };
        let mut subscriptions = vec![first];
        for counter in &counters[1..] {
            let again = subscriber.monitor.subscribe(allocation.range, counter.clone());
            let again = again.unwrap_or_else(|why| panic!("watch {allocation:?} again: {why}"));
            subscriptions.push(again);
        }
        let ended = 1;
        subscriber.monitor.unsubscribe(subscriptions.remove(ended));
        drop(buffer);
        for (number, counter) in counters.iter().enumerate() {
            let notified = counter.count() > 0;
            assert_eq!(
                notified,
                number != ended,
                "subscription {number} to {allocation:?}, of which {ended} has ended, is notified",
            );
        }
        subscriptions
            .into_iter()
            .for_each(|subscription| subscriber.monitor.unsubscribe(subscription));
    }
    subscriber.outcome()
}

/// Tests that the addresses of freed memory are not allocated again before the subscribers were
/// notified. Otherwise a cache returns its registration of the old memory for the new memory.
pub(super) fn freed_addresses_are_not_allocated_before_the_notification(
    iface: &Arc<dyn Iface>,
) -> Outcome {
    let mut subscriber = Subscriber::start_with_callbacks(&**iface)?;
    let (mut tested, mut untested) = (false, "no freed address is allocated again soon".to_owned());
    for buffer in buffers(iface)? {
        let Allocation { range, kind, .. } = *buffer.allocation();
        let allocate = AllocateAtStart {
            iface: Arc::clone(iface),
            request: AllocRequest { len: LEN, device: first_device(&**iface), kind },
            notified: AtomicBool::new(false),
            allocated: Mutex::default(),
            thread: Mutex::default(),
        };
        let watcher = Watcher::new(range, allocate);
        let subscription = subscriber.subscribe(range, watcher.clone());
        let Some(subscription) = subscription else { continue };
        drop(buffer);
        subscriber.monitor.unsubscribe(subscription);
        let thread = watcher.reaction.thread.lock().expect("no panic").take();
        let thread = thread.unwrap_or_else(|| panic!("no notification of the free of {range}"));
        let others = thread.join().expect("no panic");
        let mut reused = watcher.reaction.allocated.lock().expect("no panic");
        if reused.is_empty() {
            // Late allocations may be from after the notification.
            let error = others.err().map(|why| why.to_string());
            untested = error.unwrap_or_else(|| "allocations wait for notifications".to_owned());
        } else {
            // The freed address must come back after the notification. Otherwise its absence
            // before the notification shows nothing.
            let request = watcher.reaction.request;
            let allocate = |_| DeviceBuffer::allocate(iface, &request).expect("allocate");
            let later: Vec<_> = (0..ALLOCATIONS).map(allocate).collect();
            tested |= later.iter().any(|new| new.allocation().range.overlaps(range));
        }
        reused.retain(|new| new.overlaps(range));
        assert!(
            reused.is_empty(),
            "{kind:?} memory was allocated at {reused:?} before the free of {range} was notified",
        );
    }
    subscriber.outcome()?;
    if tested { Ok(()) } else { skip(untested) }
}

pub(super) fn monitor_is_silent_after_unsubscribing(iface: &Arc<dyn Iface>) -> Outcome {
    let mut subscriber = Subscriber::start_with_callbacks(&**iface)?;
    for buffer in buffers(iface)? {
        let counter = Watcher::counter(buffer.allocation().range);
        let subscription = subscriber.subscribe(buffer.allocation().range, counter.clone());
        let Some(subscription) = subscription else { continue };
        subscriber.monitor.unsubscribe(subscription);
        drop(buffer);
        assert_eq!(counter.count(), 0, "notified of a free after the unsubscription");
    }
    subscriber.outcome()
}
