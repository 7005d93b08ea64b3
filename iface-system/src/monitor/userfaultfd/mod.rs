//! The userfaultfd monitor: the kernel reports changes, raw system calls included.
//!
//! Ranges are registered with a userfaultfd in write-protect mode, but no page is ever
//! write-protected. So the kernel sends events of `munmap`, `mremap` and `madvise`, and no page
//! fault of the application ever waits for this library. No privilege is needed since Linux 5.11.
//!
//! # The time until the monitor learns of an unmap
//!
//! The thread that unmaps waits until the monitor reads the event. The monitor closes the gate of
//! [`Invalidator`] before it reads, and opens the gate after it has invalidated. So that thread
//! cannot hit a registration of the memory that it has just unmapped.
//!
//! *Another* thread can. The kernel frees the addresses before it queues the event. The other
//! thread may map these addresses again, look them up and hit, before the monitor closes the gate.
//! A program in which one thread unmaps addresses that another thread maps again at once needs
//! memhooks.
//!
//! # Discards
//!
//! `madvise` discards the pages after its event was read. Until the call has returned, the monitor
//! refuses subscriptions of the range, so that the range is not cached (`discards.rs`).
//!
//! # Mappings
//!
//! Each watched range that touches no other costs the process up to two mappings. The kernel allows
//! `vm.max_map_count` mappings, and all monitors together use only a part of them (`budget.rs`).

mod budget;
mod discards;
mod range_queue;
mod ranges;
mod sys;
mod thread;

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use hmem_core::{
    AddressRange, Allocation, Error, ErrorKind, IfaceKind, Result,
    monitor::{
        DetectionMethod, InvalidationCause, Invalidator, Monitor, Subscription, SubscriptionMap,
    },
};
use hmem_hook::{MonitorName, SlotSubscription, Subscribers};
use parking_lot::Mutex;
use rustix::{event::EventfdFlags, io::Errno};

use self::{
    budget::{Budget, Unwatched},
    discards::Discards,
    ranges::Counted,
    thread::Watched,
};
use super::{area::Area, maps::Maps};
use crate::sys::page_size;

const NAME: MonitorName = MonitorName {
    name: "userfaultfd",
    iface: IfaceKind::SYSTEM,
    fallback_hint: "use the memhooks monitor",
};

/// The monitor that learns of changes from the events that the kernel sends through a userfaultfd.
///
/// Events of unmapped memory arrive after the change. A thread that maps the same addresses again
/// at once, while another thread still unmaps them, can get a hit on the old registration. The
/// kernel sends no events for `remap_file_pages`, MADV_GUARD_INSTALL, and `shmat` with SHM_REMAP.
///
/// # Examples
/// ```
/// use hmem_iface_system::monitor::UserFaultFd;
///
/// match UserFaultFd::start() {
///     Ok(monitor) => println!("{monitor:?}"),
///     // The error names the kernel option, sysctl or seccomp filter, and the remedy.
///     Err(error) => println!("{error}"),
/// }
/// ```
pub struct UserFaultFd {
    watched: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
    subscriptions: Mutex<UffdSubscriptions>,
    maps: Maps,
    discards: Mutex<Discards>,
    /// True if `discards` may contain pending discards. A false flag lets
    /// [`UserFaultFd::check_settled`] return without the lock `discards`. Only the holder of that
    /// lock changes the flag.
    discarding: AtomicBool,
    /// The number of subscriptions that were refused because the [`Budget`] did not allow them.
    beyond_budget: AtomicU64,
    /// The value of `vm.max_map_count` when the monitor was started.
    limit: usize,
}

#[derive(Debug)]
struct UffdSubscriptions {
    /// The watched addresses of each subscription, and its entry in the subscriber table.
    current: SubscriptionMap<(Range<u64>, SlotSubscription)>,
    counted: Counted,
    budget: Budget,
}

impl UserFaultFd {
    /// Opens a userfaultfd and starts the thread that reads its events.
    ///
    /// # Errors
    /// - Unsupported: the kernel lacks userfaultfd or one of the events.
    /// - PermissionDenied: a sysctl, a seccomp filter or a security module forbids userfaultfd.
    /// - OutOfResources: no fd or memory is left.
    /// - Another kind: the kernel refuses a call for another reason. The error contains the errno.
    ///
    /// If the kernel refuses to open a userfaultfd, the error names the cause and a remedy.
    pub fn start() -> Result<Arc<Self>> {
        let events = sys::open()?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| Error::os(errno, "eventfd").iface(IfaceKind::SYSTEM))?;
        let subscribers = Subscribers::new(NAME)?;
        let beneath_hooks = AtomicBool::new(false);
        let watched = Arc::new(Watched { events, stop, subscribers, beneath_hooks });
        let budget = Budget::new()?;
        let thread = Some(thread::start(&watched)?);
        let limit = budget.limit;
        let (current, counted) = (SubscriptionMap::default(), Counted::default());
        let subscriptions = Mutex::new(UffdSubscriptions { current, counted, budget });
        Ok(Arc::new(Self {
            watched,
            thread,
            subscriptions,
            maps: Maps::default(),
            discards: Mutex::default(),
            discarding: AtomicBool::new(false),
            beyond_budget: AtomicU64::new(0),
            limit,
        }))
    }

    /// Returns the maximum number of ranges that all userfaultfd monitors of this process watch
    /// together. Adjacent ranges of one monitor count as one.
    ///
    /// Each range uses up to two of the `vm.max_map_count` mappings of the process. The monitors
    /// use only a part of these mappings, so that the application can use the others.
    #[must_use]
    pub fn most_ranges(&self) -> usize {
        budget::ranges(self.limit)
    }

    /// Returns the number of subscriptions that were refused because the monitors had used their
    /// share of mappings, or because the process had few mappings left.
    #[must_use]
    pub fn beyond_budget(&self) -> u64 {
        self.beyond_budget.load(Ordering::Relaxed)
    }

    /// Returns a phrase for error messages: how many ranges the monitors of this process may watch,
    /// and the kernel's limit from which that number follows.
    pub(super) fn budget(&self) -> String {
        let (most, limit) = (self.most_ranges(), self.limit);
        format!(
            "at most {most} separate ranges in the process, a 16th of vm.max_map_count = {limit} \
             mappings,"
        )
    }

    /// Records that memhooks also notify all subscribers of this monitor. From then on, the event
    /// of a hooked discard no longer makes the discarded range uncacheable, since the hook itself
    /// notifies before and after the call.
    pub(super) fn set_beneath_hooks(&self) {
        self.watched.beneath_hooks.store(true, Ordering::Relaxed);
    }

    /// Returns the current number of subscriptions, which is 0 in a forked child.
    #[must_use]
    pub fn subscriptions(&self) -> usize {
        if self.is_own_process() { self.subscriptions.lock().current.len() } else { 0 }
    }

    fn is_own_process(&self) -> bool {
        self.watched.subscribers.shared().is_own_process()
    }

    /// Subscribes to changes of a range like [`Monitor::subscribe`], but does not check that the
    /// range is anonymous memory or a System V segment. `area` is the result of the caller's own
    /// check ([`Maps::check`]).
    pub(super) fn watch(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
        area: &Area,
    ) -> Result<Subscription> {
        if !self.is_own_process() {
            return Err(NAME.forked("subscribe"));
        }
        if let Some(errno) = self.watched.subscribers.shared().failure() {
            return Err(refused(range, ErrorKind::BadState)
                .errno(errno)
                .context("why", "the monitor's thread has ended")
                .remedy("the program has closed the monitor's file: start a new monitor"));
        }
        // The kernel watches only whole huge pages. The pages of the range's mappings may be
        // smaller than `page`, but end with the mappings.
        let (page, pages) = (area.page_size, range.page_aligned(area.page_size));
        let whole = area.addresses().intersection(pages).unwrap_or(pages);
        let pages = whole.start().0..whole.start().0.saturating_add(whole.len());
        // The invalidator is added before the range is registered, since an event may arrive at
        // once and must notify the invalidator.
        let entry = self.watched.subscribers.add(&invalidator)?;
        // No lock is held here: the page fault may wait for a userfaultfd handler of the
        // application, and that handler may register memory itself.
        sys::touch(pages.start);
        if pages.end - pages.start > page {
            sys::touch(pages.end - page);
        }
        let mut subscriptions = self.subscriptions.lock();
        // The range is registered even if it counts as watched already, since new memory may have
        // been mapped there meanwhile. A second registration of the same memory changes nothing.
        if let Err(unwatched) = self.register(&mut subscriptions, &pages) {
            drop(subscriptions);
            self.watched.subscribers.remove(entry);
            return Err(self.explained(range, unwatched));
        }
        let subscription = subscriptions.current.insert((pages, entry));
        self.forget_moved(&subscriptions.counted);
        Ok(subscription)
    }

    /// Adds a subscription of the address range `pages` to the counts. If the budget allows the
    /// range, asks the kernel to watch it. If either refuses, removes the subscription from the
    /// counts again.
    fn register(
        &self,
        subscriptions: &mut UffdSubscriptions,
        pages: &Range<u64>,
    ) -> Result<(), Unwatched> {
        subscriptions.counted.add(pages.clone());
        let allowed = subscriptions.budget.reserve(subscriptions.counted.apart());
        let watched = allowed.and_then(|()| {
            let len = pages.end - pages.start;
            sys::register(&self.watched.events, pages.start, len).map_err(Unwatched::Kernel)
        });
        if let Err(unwatched) = watched {
            let gone = subscriptions.counted.remove(pages.clone());
            match unwatched {
                Unwatched::Kernel(errno) => {
                    self.unregister(&gone);
                    if errno == Errno::NOMEM {
                        subscriptions.budget.refused();
                    }
                }
                Unwatched::Share | Unwatched::Process => {
                    self.beyond_budget.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        subscriptions.budget.set_watched(subscriptions.counted.apart());
        watched
    }

    /// Checks that no thread is discarding pages of `range`. The caller must subscribe first, so
    /// that later discards notify the caller's invalidator.
    ///
    /// # Errors
    /// Busy: a call that discards pages of `range` may not have returned yet.
    pub(super) fn check_settled(&self, range: AddressRange) -> Result<()> {
        let shared = self.watched.subscribers.shared();
        if shared.no_discards() && !self.discarding.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut discards = self.discards.lock();
        // The flag is set before the discards are removed from the queue, so that a thread that
        // finds the queue empty sees the flag.
        self.discarding.store(true, Ordering::Release);
        discards.take(shared);
        let whole = range.page_aligned(page_size());
        let last = whole.start().0.saturating_add(whole.len());
        let settled = discards.settled(&(whole.start().0..last));
        self.discarding.store(!discards.is_empty(), Ordering::Release);
        drop(discards);
        if settled {
            return Ok(());
        }
        Err(refused(range, ErrorKind::Busy)
            .context(
                "why",
                "a thread discards pages of the range by madvise, and may not have returned yet",
            )
            .remedy(
                "the range is cached again once the other threads of the process were seen asleep; \
                 to avoid this, use the memhooks monitor and the C library's madvise",
            ))
    }

    /// Returns the error for a range that the monitor does not watch, with the reason and a remedy.
    fn explained(&self, range: AddressRange, unwatched: Unwatched) -> Error {
        const RAISE: &str =
            "raise vm.max_map_count, watch fewer or larger ranges, or use the memhooks monitor";
        let (kind, why, remedy) = match unwatched {
            Unwatched::Share => (
                ErrorKind::OutOfResources,
                "each separately watched range uses mappings of the process, and the monitors \
                 have used up their share",
                RAISE,
            ),
            Unwatched::Process => (
                ErrorKind::Busy,
                "the process has few mappings left, which are reserved for the application",
                "raise vm.max_map_count, or use the memhooks monitor",
            ),
            Unwatched::Kernel(Errno::NOMEM) => (
                ErrorKind::OutOfResources,
                "each separately watched range is a mapping of its own, and the process has too \
                 many mappings",
                RAISE,
            ),
            Unwatched::Kernel(Errno::BUSY) => (
                ErrorKind::Busy,
                "another userfaultfd of this process watches the range",
                "use the memhooks monitor for memory that another userfaultfd watches",
            ),
            Unwatched::Kernel(Errno::INVAL) => (
                ErrorKind::Unsupported,
                "userfaultfd does not watch this kind of mapping (files, System V segments, \
                 devices; shared memory before Linux 5.19)",
                "use the memhooks monitor, or anonymous memory",
            ),
            Unwatched::Kernel(errno) => (
                hmem_core::Errno::from(errno).kind(),
                "the kernel does not watch the range",
                "use the memhooks monitor",
            ),
        };
        let error = refused(range, kind).context("why", why).remedy(remedy);
        match unwatched {
            Unwatched::Kernel(errno) => error.errno(errno),
            Unwatched::Share => error
                .context("separate ranges", self.most_ranges())
                .context("vm.max_map_count", self.limit),
            Unwatched::Process => error.context("vm.max_map_count", self.limit),
        }
    }

    /// Asks the kernel to stop watching ranges. The caller holds the lock `self.subscriptions`.
    fn unregister(&self, unwatched: &[Range<u64>]) {
        for range in unwatched {
            match sys::unregister(&self.watched.events, range.start, range.end - range.start) {
                // The range is unmapped by now, contains other memory that cannot be watched, or
                // cannot be split off its mapping.
                Ok(()) | Err(Errno::INVAL | Errno::NOMEM) => {}
                Err(errno) => {
                    tracing::debug!(%errno, ?range, "still watches a range: its events cost time")
                }
            }
        }
    }

    /// Stops watching memory that `mremap` has moved, except at addresses with a subscription.
    /// Without this, the kernel would continue to watch the memory at its new addresses.
    fn forget_moved(&self, counted: &Counted) {
        while let Some((start, len)) = self.watched.subscribers.shared().moved.take() {
            self.unregister(&counted.gaps(start..start.saturating_add(len)));
        }
    }

    /// Ends all watches before the userfaultfd is closed. Stops watching every range with a
    /// subscription and every range in the queue of moved memory. Then waits until the monitor's
    /// thread has read every pending event, because the threads that caused these events are
    /// blocked until then.
    ///
    /// Closing the userfaultfd is not enough. A forked child may have the userfaultfd open too, and
    /// then the kernel would still watch the ranges. A thread that unmaps a watched range would
    /// wait forever for a reader.
    fn quiesce(&self) {
        let mut subscriptions = self.subscriptions.lock();
        self.forget_moved(&subscriptions.counted);
        // Before Linux 6.15, unregistering a range also ends the watches of other userfaultfds on
        // it. So this unregisters only ranges with a subscription, not all mappings.
        self.unregister(&subscriptions.counted.all());
        subscriptions.budget.set_watched(0);
        drop(subscriptions);
        while self.watched.subscribers.shared().failure().is_none()
            && sys::changes_under_way(&self.watched.events)
        {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

fn refused(range: AddressRange, kind: ErrorKind) -> Error {
    Error::new(kind, "subscribe")
        .iface(IfaceKind::SYSTEM)
        .context("monitor", NAME.name)
        .context("range", range)
}

impl fmt::Debug for UserFaultFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserFaultFd").finish_non_exhaustive()
    }
}

impl Monitor for UserFaultFd {
    fn name(&self) -> &str {
        NAME.name
    }

    fn rationale(&self) -> String {
        let beyond = match self.beyond_budget() {
            0 => String::new(),
            beyond => format!("; {beyond} refused so far"),
        };
        format!("notified by the kernel after memory was unmapped, of {}{beyond}", self.budget())
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    /// Returns true for the causes for which the kernel sends events. `Replace` (`MAP_FIXED`) and
    /// `Shrink` (`brk`) are among them, but are reported as [`InvalidationCause::Unmap`], since the
    /// kernel sends the same event for all three.
    fn detects(&self, cause: InvalidationCause) -> bool {
        matches!(
            cause,
            InvalidationCause::Unmap
                | InvalidationCause::Remap
                | InvalidationCause::Discard
                | InvalidationCause::Replace
                | InvalidationCause::Shrink
        )
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        if !self.is_own_process() {
            return Err(NAME.forked("subscribe"));
        }
        let area = self.maps.check(range, NAME.name)?;
        let before = self.beyond_budget();
        let subscription = self.watch(range, invalidator, &area).inspect_err(|error| {
            if before == 0 && self.beyond_budget() > 0 {
                tracing::warn!(
                    error = %error.full(),
                    "memory beyond the monitor's budget is not cached"
                );
            }
        })?;
        if let Err(error) = self.check_settled(range) {
            self.unsubscribe(subscription);
            return Err(error);
        }
        Ok(subscription)
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.is_own_process() {
            return;
        }
        let mut subscriptions = self.subscriptions.lock();
        let Some((pages, entry)) = subscriptions.current.remove(subscription) else { return };
        let unwatched = subscriptions.counted.remove(pages);
        self.unregister(&unwatched);
        let UffdSubscriptions { counted, budget, .. } = &mut *subscriptions;
        budget.set_watched(counted.apart());
        self.forget_moved(&subscriptions.counted);
        drop(subscriptions);
        self.watched.subscribers.remove(entry);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for UserFaultFd {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.is_own_process() {
            // This is a forked child. It has no thread to join, because the thread runs in the
            // parent only.
            std::mem::forget(thread);
            return;
        }
        self.quiesce();
        if let Err(errno) = rustix::io::write(&self.watched.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%errno, "the userfaultfd monitor's thread cannot be stopped");
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the userfaultfd monitor's thread has panicked");
        }
        for (_, entry) in self.subscriptions.get_mut().current.drain() {
            self.watched.subscribers.remove(entry);
        }
    }
}
