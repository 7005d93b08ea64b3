//! Monitors, which detect that registered memory was freed, unmapped or replaced.
//!
//! A monitor watches memory ranges for a cache, and notifies the cache's [`Invalidator`] of
//! changes. If a driver has no callbacks, [`Monitor::valid`] compares allocation identities
//! instead.

mod free;

use std::{fmt, sync::Arc};

pub use free::FreeSubscriptions;

use crate::{AddressRange, Allocation, Result};

/// The method by which a monitor detects changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetectionMethod {
    /// The monitor is called before the memory is freed, by a driver callback or a patched
    /// function.
    Callback,
    /// The cache asks the monitor on each hit, and the monitor compares allocation identities.
    Identity,
}

/// The kind of change that invalidates cached memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum InvalidationCause {
    /// `munmap(2)`.
    Unmap,
    /// `mremap(2)`, for the old addresses of moved memory and for the end of shrunk memory.
    Remap,
    /// `madvise(2)` with MADV_DONTNEED, MADV_FREE or MADV_REMOVE.
    Discard,
    /// `mmap(2)` with MAP_FIXED over the memory.
    Replace,
    /// `brk(2)` to a lower address.
    Shrink,
    /// `shmdt(2)`.
    Detach,
    /// A free by a device API.
    Free,
    /// A comparison of identities found another allocation at the address.
    Identity,
    /// The process is a forked child.
    Fork,
    /// The application invalidated the memory explicitly.
    Application,
}

impl InvalidationCause {
    /// Every cause, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::Unmap,
        Self::Remap,
        Self::Discard,
        Self::Replace,
        Self::Shrink,
        Self::Detach,
        Self::Free,
        Self::Identity,
        Self::Fork,
        Self::Application,
    ];

    /// Returns the name, as it is printed.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unmap => "munmap",
            Self::Remap => "mremap",
            Self::Discard => "madvise",
            Self::Replace => "MAP_FIXED",
            Self::Shrink => "brk",
            Self::Detach => "shmdt",
            Self::Free => "free",
            Self::Identity => "identity",
            Self::Fork => "fork",
            Self::Application => "application",
        }
    }
}

impl fmt::Display for InvalidationCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A token for a change in progress, which [`Invalidator::invalidate_start`] returns and
/// [`Invalidator::invalidate_end`] ends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "nothing over the range can be cached until the change is ended"]
pub struct InvalidationToken(pub u32);

/// The receiver of a monitor's notifications, which invalidates cached memory.
///
/// The thread that frees the memory calls the methods, possibly inside a driver's callback or a
/// patched `munmap`. So an implementation takes no lock, allocates nothing, logs nothing and runs
/// no destructor. Most notifications are for memory that is not cached, and must be cheap.
pub trait Invalidator: fmt::Debug + Send + Sync {
    /// Invalidates a range of memory that is freed or changed. Until this returns, no other memory
    /// can be at these addresses.
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause);

    /// Invalidates a range of memory that begins to change.
    ///
    /// All entries of the range are invalid at once, and new ones do not become valid until
    /// [`Invalidator::invalidate_end`]. Changes on several threads may overlap.
    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken;

    /// Ends a change: the memory is gone, or the new memory is in place.
    fn invalidate_end(&self, change: InvalidationToken);

    /// Disables all hits until [`Invalidator::open_gate`]. Calls may be nested.
    ///
    /// For monitors that learn of a change before they know which memory changed.
    fn close_gate(&self);

    /// Undoes one [`Invalidator::close_gate`].
    fn open_gate(&self);
}

/// A subscription to a monitor, which [`Monitor::unsubscribe`] ends.
///
/// Subscriptions of one invalidator may be equal. Each [`Monitor::subscribe`] still needs its own
/// [`Monitor::unsubscribe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subscription(pub u64);

/// A monitor of the memory of one iface.
pub trait Monitor: fmt::Debug + Send + Sync {
    /// Returns the name that the configuration and `info` use: `memhooks`, `userfaultfd`, `import`.
    fn name(&self) -> &str;

    /// Returns one line: why this monitor was chosen and which changes it misses.
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
    /// - [`ErrorKind::OutOfResources`](crate::ErrorKind::OutOfResources) if it watches too many
    ///   ranges already. A domain's cache then evicts its idle entries and retries once.
    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription>;

    /// Ends a subscription. After this the invalidator gets no notification, unless it has other
    /// subscriptions.
    fn unsubscribe(&self, subscription: Subscription);

    /// Returns true if `allocation` still exists at its address. A monitor with
    /// [`DetectionMethod::Callback`] always returns true.
    ///
    /// # Errors
    /// A failed driver call.
    fn valid(&self, allocation: &Allocation) -> Result<bool>;
}
