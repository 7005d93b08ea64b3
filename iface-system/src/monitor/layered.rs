//! A monitor that combines memhooks and userfaultfd. The hooks notify before a call of the C
//! library unmaps memory. Userfaultfd notifies after a raw system call has unmapped memory.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, Result,
    monitor::{
        DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription, SubscriptionMap,
    },
};
use parking_lot::Mutex;

use super::{MemHooks, UserFaultFd, maps::Maps};

const NAME: &str = "memhooks+userfaultfd";

/// [`MemHooks`] together with [`UserFaultFd`], which catches the changes that the hooks do not see.
///
/// Ranges that userfaultfd refuses are watched by the hooks alone. [`Layered::uffd_refusals`]
/// counts them. Examples are:
///
/// - ranges that userfaultfd cannot watch (System V segments);
/// - ranges beyond the maximum number that userfaultfd may watch ([`UserFaultFd::most_ranges`]);
/// - ranges that another userfaultfd of the process watches.
pub struct Layered {
    hooks: Arc<MemHooks>,
    uffd: Arc<UserFaultFd>,
    /// Queried for each subscription. Unlike the hooks alone, this monitor caches no result: a raw
    /// system call may map a file at addresses that had anonymous memory, and the hooks, which
    /// would end the caching, do not see that call.
    maps: Maps,
    /// The current subscriptions. Each value is a subscription to the hooks, and a subscription to
    /// userfaultfd unless userfaultfd refused the range.
    subscriptions: Mutex<SubscriptionMap<(Subscription, Option<Subscription>)>>,
    /// Number of subscriptions that userfaultfd has refused.
    uffd_refusals: AtomicU64,
    /// The error of the last refusal.
    last_refusal: Mutex<Option<Error>>,
    /// The error kinds of userfaultfd's refusals that are already in the log. Each kind is logged
    /// once.
    logged: Mutex<Vec<ErrorKind>>,
}

impl Layered {
    /// Combines the hooks with userfaultfd. From then on, use `uffd` only through the returned
    /// value: `uffd` relies on the hooks for discards by the C library's `madvise`.
    #[must_use]
    pub fn new(hooks: Arc<MemHooks>, uffd: Arc<UserFaultFd>) -> Arc<Self> {
        uffd.set_beneath_hooks();
        Arc::new(Self {
            hooks,
            uffd,
            maps: Maps::default(),
            subscriptions: Mutex::default(),
            uffd_refusals: AtomicU64::new(0),
            last_refusal: Mutex::default(),
            logged: Mutex::default(),
        })
    }

    /// Returns the number of subscriptions that userfaultfd has refused so far.
    #[must_use]
    pub fn uffd_refusals(&self) -> u64 {
        self.uffd_refusals.load(Ordering::Relaxed)
    }

    /// Returns the reason for userfaultfd's last refusal of a subscription, or `None` if there was
    /// no refusal.
    #[must_use]
    pub fn why_uffd_refusals(&self) -> Option<String> {
        self.last_refusal.lock().as_ref().map(ToString::to_string)
    }

    /// Tests that the hooks are in place and notify subscribers, like [`MemHooks::check`].
    ///
    /// # Errors
    /// The errors of [`MemHooks::check`].
    pub fn check(&self) -> Result<()> {
        self.hooks.check()
    }
}

impl fmt::Debug for Layered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layered").finish_non_exhaustive()
    }
}

impl Monitor for Layered {
    fn name(&self) -> &str {
        NAME
    }

    fn rationale(&self) -> String {
        let hooks = self.hooks.rationale();
        let without = match self.uffd_refusals() {
            0 => String::new(),
            count => format!("; the hooks alone watch {count} subscriptions so far"),
        };
        format!(
            "{hooks}; raw system calls: by the kernel's events, {}{without}",
            self.uffd.budget()
        )
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        self.hooks.detects(cause) || self.uffd.detects(cause)
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let hooked = self.hooks.watch(&invalidator)?;
        let area = match self.maps.check(range, NAME) {
            Ok(area) => area,
            Err(error) => {
                self.hooks.unsubscribe(hooked);
                return Err(error);
            }
        };
        let caught = match self.uffd.watch(range, invalidator, &area) {
            Ok(caught) => Some(caught),
            Err(error) => {
                self.uffd_refusals.fetch_add(1, Ordering::Relaxed);
                // The lock is released before the event, because a tracing subscriber may map
                // memory and register it.
                let is_news = {
                    let mut logged = self.logged.lock();
                    let is_news = !logged.contains(&error.kind());
                    logged.extend(is_news.then_some(error.kind()));
                    is_news
                };
                if is_news {
                    tracing::warn!(
                        error = %error.full(),
                        "userfaultfd beneath memhooks does not watch a range: raw system calls on \
                         it are not detected"
                    );
                }
                *self.last_refusal.lock() = Some(error);
                None
            }
        };
        if let Err(error) = self.uffd.check_settled(range) {
            if let Some(caught) = caught {
                self.uffd.unsubscribe(caught);
            }
            self.hooks.unsubscribe(hooked);
            return Err(error);
        }
        Ok(self.subscriptions.lock().insert((hooked, caught)))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.hooks.is_own_process() {
            return;
        }
        let Some((hooked, caught)) = self.subscriptions.lock().remove(subscription) else {
            return;
        };
        if let Some(caught) = caught {
            self.uffd.unsubscribe(caught);
        }
        self.hooks.unsubscribe(hooked);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}
