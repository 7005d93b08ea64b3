//! Noticing that memory changed under a registration.
//!
//! A monitor watches ranges for a cache and calls an [`Invalidator`] when one of them is freed,
//! unmapped or replaced. Ifaces without callbacks answer [`Monitor::valid`] by allocation identity
//! instead.

mod free;

use std::{fmt, sync::Arc};

pub use free::FreeSubscriptions;

use crate::{AddressRange, Allocation, Result};

/// The way in which a monitor detects changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetectionMethod {
    /// It is called back before the memory goes.
    Callback,
    /// It compares identities when asked.
    Identity,
}

/// A change of memory that happened or is about to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum InvalidationCause {
    /// `munmap(2)`.
    Unmap,
    /// `mremap(2)`: the old place of what moved, and the part that shrinking cut off.
    Remap,
    /// `madvise(2)` with MADV_DONTNEED, MADV_FREE or MADV_REMOVE.
    Discard,
    /// `mmap(2)` with MAP_FIXED over it.
    Replace,
    /// `brk(2)` to a lower address.
    Shrink,
    /// `shmdt(2)`.
    Detach,
    /// A device driver's free.
    Free,
    /// Another allocation was found at the address.
    Identity,
    /// The process is a forked child.
    Fork,
    /// Said so by the application.
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

    /// The name as it is printed.
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

/// A change under way: what [`Invalidator::invalidate_start`] gives and
/// [`Invalidator::invalidate_end`] takes.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "nothing over the range can be cached until the change is ended"]
pub struct InvalidationToken(pub u32);

/// Told of ranges whose memory is about to go.
///
/// Called on whatever thread frees, possibly inside a driver's callback or a patched `munmap`: an
/// implementation takes no lock, allocates nothing, logs nothing and runs no destructor. Ranges
/// that it knows nothing about are the usual case and must be cheap.
pub trait Invalidator: fmt::Debug + Send + Sync {
    /// The memory behind `range` goes, and cannot come back as something else before this returns.
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause);

    /// The memory behind `range` begins to change: what is cached over it is dead at once, and
    /// nothing becomes valid over it until [`Invalidator::invalidate_end`]. Changes may overlap,
    /// from several threads.
    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken;

    /// The change is over: the memory is gone, or what is there now stays.
    fn invalidate_end(&self, change: InvalidationToken);

    /// Until [`Invalidator::open_gate`] no lookup hits: for a monitor that learns that something
    /// changed before it learns what. Gates nest.
    fn close_gate(&self);

    /// Undoes one [`Invalidator::close_gate`].
    fn open_gate(&self);
}

/// One subscription of a monitor; [`Monitor::unsubscribe`] takes it back. Those of one invalidator
/// may be equal: each is then taken back as often as it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Subscription(pub u64);

/// Watches memory of one iface.
pub trait Monitor: fmt::Debug + Send + Sync {
    /// Its name as configuration and `info` use it: `memhooks`, `userfaultfd`, `import`.
    fn name(&self) -> &str;

    /// Returns one line: why this monitor was chosen and which changes it misses.
    fn rationale(&self) -> String;

    /// Returns the way in which the monitor detects changes.
    fn detection(&self) -> DetectionMethod;

    /// Returns true if the monitor detects changes by `cause` in the ranges that it watches.
    fn detects(&self, cause: InvalidationCause) -> bool;

    /// Watches `range` and reports to `invalidator` until unsubscribed.
    ///
    /// An invalidator with several subscriptions may be told once of a change that touches several
    /// of them, and of changes next to them.
    ///
    /// # Errors
    /// Unsupported if this monitor cannot watch that range. OutOfResources if it already watches
    /// too many ranges: a domain's cache then evicts its idle entries and retries once.
    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription>;

    /// Stops watching. After it returns the invalidator of that subscription is not called, unless
    /// it has others.
    fn unsubscribe(&self, subscription: Subscription);

    /// Returns true if `allocation` still exists at its address. Monitors that are called back
    /// always return true.
    ///
    /// # Errors
    /// A failed driver call.
    fn valid(&self, allocation: &Allocation) -> Result<bool>;
}
