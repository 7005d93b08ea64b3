//! Monitors, which detect that registered memory was freed, unmapped or replaced.
//!
//! A monitor watches memory ranges for a cache, and notifies the cache's [`Invalidator`] of
//! changes. If a driver has no callbacks, [`Monitor::valid`] compares allocation identities
//! instead.

mod free;
mod token;

use std::{fmt, sync::Arc};

pub use free::FreeSubscriptions;
pub use token::{GateToken, InvalidationToken, Subscription, SubscriptionMap, TokenIssuer};

use crate::{AddressRange, Allocation, Result, named_enum};

/// The method by which a monitor detects changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetectionMethod {
    /// The monitor is notified of each change by a driver callback, a patched function, a kernel
    /// event or the application.
    Callback,
    /// The cache asks the monitor on each hit, and the monitor compares allocation identities.
    Identity,
}

named_enum! {
    /// The kind of change that invalidates cached memory.
    #[non_exhaustive]
    #[repr(u8)]
    pub enum InvalidationCause {
        /// A call of `munmap(2)` for the memory.
        Unmap = "munmap",
        /// A call of `mremap(2)`: it invalidates the old addresses of moved memory, and the end
        /// that was cut off from shrunk memory.
        Remap = "mremap",
        /// A call of `madvise(2)` with MADV_DONTNEED, MADV_FREE or MADV_REMOVE.
        Discard = "madvise",
        /// A call of `mmap(2)` with MAP_FIXED over the memory.
        Replace = "MAP_FIXED",
        /// A call of `brk(2)` with a lower address.
        Shrink = "brk",
        /// A call of `shmdt(2)` for the memory.
        Detach = "shmdt",
        /// A free by a device API.
        Free = "free",
        /// A change that a comparison of allocation identities found: another allocation, or none,
        /// is now at the address. A comparison that failed counts too.
        Identity = "identity",
        /// The process is a forked child.
        Fork = "fork",
        /// The application invalidated the memory explicitly.
        Application = "application",
        /// The exporter of the memory's dma-buf revoked it
        /// ([`Revocations`](crate::provider::Revocations)).
        Revoke = "revoked",
    }
}

/// The receiver of a monitor's notifications, which invalidates cached memory.
///
/// The thread that frees the memory may call the methods, even inside a driver's callback or a
/// patched `munmap`. A thread of the monitor may call them too. So an implementation must not take
/// a lock, allocate, log, run a destructor or call a cancellation point (`pthreads(7)`). It must be
/// cheap for memory that is not cached, because most notifications are for such memory.
pub trait Invalidator: fmt::Debug + Send + Sync {
    /// Invalidates a range of memory that is freed or changed.
    ///
    /// The caller must ensure:
    /// - No other memory is mapped or allocated at these addresses before this call returns.
    /// - Queries of the iface no longer report the old memory. Otherwise the cache may register the
    ///   old memory again after this call.
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause);

    /// Invalidates a range of memory that begins to change.
    ///
    /// Cached entries of the range become invalid at once. Entries of the range that are registered
    /// before [`Invalidator::invalidate_end`] become invalid too. Changes on several threads may
    /// overlap.
    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken;

    /// Ends a change that [`Invalidator::invalidate_start`] began. The caller calls this when the
    /// old memory is gone or the new memory is in place. Does nothing if the token belongs to
    /// another invalidator.
    fn invalidate_end(&self, change: InvalidationToken);

    /// Disables all hits of the cache until [`Invalidator::open_gate`]. Calls may be nested.
    ///
    /// A monitor calls this when it learns of a change but does not know yet which memory changed.
    fn close_gate(&self) -> GateToken;

    /// Undoes the call of [`Invalidator::close_gate`] that returned `closed`. Hits are enabled
    /// again when all calls are undone. Does nothing if the token belongs to another invalidator.
    fn open_gate(&self, closed: GateToken);
}

/// A description of a monitor: its name, and the changes that it detects.
///
/// The description is a snapshot. It gives no access to the monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MonitorDescription {
    /// The name of the monitor ([`Monitor::name`]).
    pub name: String,
    /// The reason why the monitor was chosen, and the changes that it misses
    /// ([`Monitor::rationale`]).
    pub rationale: String,
    /// The method by which the monitor detects changes.
    pub detection: DetectionMethod,
    /// The causes that the monitor detects, in the order of [`InvalidationCause::ALL`].
    pub causes: Vec<InvalidationCause>,
}

impl MonitorDescription {
    /// Describes a monitor as it is now.
    pub fn of<M: Monitor + ?Sized>(monitor: &M) -> Self {
        Self {
            name: monitor.name().to_owned(),
            rationale: monitor.rationale(),
            detection: monitor.detection(),
            causes: InvalidationCause::ALL
                .into_iter()
                .filter(|cause| monitor.detects(*cause))
                .collect(),
        }
    }
}

/// Detects changes of one iface's memory.
///
/// Threads may call the methods concurrently. The caches of several domains may share one monitor
/// or start several monitors ([`MonitorSource::start`](crate::iface::MonitorSource::start)). A
/// cache holds no lock during a call.
pub trait Monitor: fmt::Debug + Send + Sync {
    /// Returns the name for the configuration and `hmem info`, such as `memhooks`, `userfaultfd` or
    /// `import`.
    fn name(&self) -> &str;

    /// Returns a line of text with the reason why this monitor was chosen, and the changes that it
    /// misses.
    fn rationale(&self) -> String;

    /// Returns the method by which the monitor detects changes.
    fn detection(&self) -> DetectionMethod;

    /// Returns true if the monitor detects changes by `cause` in the ranges that it watches.
    fn detects(&self, cause: InvalidationCause) -> bool;

    /// Watches `range` and notifies `invalidator` of changes until [`Monitor::unsubscribe`].
    ///
    /// An invalidator with several subscriptions may get one notification for a change that affects
    /// several of them. It may also get notifications of changes near its ranges.
    ///
    /// # Errors
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) if the monitor cannot watch the
    ///   range.
    /// - [`ErrorKind::OutOfResources`](crate::ErrorKind::OutOfResources) if the monitor watches too
    ///   many ranges already. A domain's cache then evicts its idle entries and retries once.
    /// - [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the iface was closed.
    /// - Otherwise the error of a failed call of the driver or the operating system.
    ///
    /// After an error nothing is subscribed.
    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription>;

    /// Ends a subscription, after it waited for a notification in progress. The caller must not be
    /// inside a notification. Does nothing if the subscription belongs to another monitor.
    ///
    /// After the return, the monitor notifies the invalidator of no new change, unless the
    /// invalidator has other subscriptions. For a change that began earlier, the call of
    /// [`Invalidator::invalidate_end`] may still follow.
    fn unsubscribe(&self, subscription: Subscription);

    /// Returns true if the memory that `subscription` watches is still the memory that was there
    /// when the subscription began. A monitor with [`DetectionMethod::Callback`] always returns
    /// true.
    ///
    /// `allocation` is the allocation that contained the watched range when the subscription began.
    /// A monitor usually queries the address again and compares the identity of the allocation.
    ///
    /// That is not enough for memory that the application maps by hand into a reservation. There
    /// the reservation counts as the allocation, and stays while the memory in it changes. A
    /// monitor of such memory keeps more data for each subscription, and compares that too.
    fn valid(&self, subscription: &Subscription, allocation: &Allocation) -> Result<bool>;
}
