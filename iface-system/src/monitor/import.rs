//! A monitor whose changes the application reports, for memory that it manages itself.

use std::{collections::HashMap, fmt, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, IfaceKind, Result,
    monitor::{
        DetectionMethod, InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription,
    },
};
use hmem_hook::{MonitorName, SLOTS, SubscriberTable, Subscribers};
use parking_lot::Mutex;

const NAME: MonitorName = MonitorName {
    name: "import",
    iface: IfaceKind::SYSTEM,
    fallback_hint: "use the memhooks monitor",
};

/// Callbacks of an application's own monitor, like libfabric's `fi_ops_mem_monitor`.
pub trait ImportCallbacks: std::fmt::Debug + Send + Sync {
    /// Called before a range is cached. From then on the application calls
    /// [`ImportMonitor::invalidate`] or [`ImportMonitor::while_changing`] before this memory is
    /// unmapped or replaced. Ranges may overlap, and may come more than once.
    ///
    /// # Errors
    /// Unsupported if the application cannot watch the range. It is then not cached.
    fn subscribe(&self, range: AddressRange) -> Result<()>;

    /// Called when the range is no longer cached: once for each successful
    /// [`ImportCallbacks::subscribe`], with the same range.
    fn unsubscribe(&self, range: AddressRange);
}

/// A monitor whose events are calls of the application, from any thread.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use hmem_core::{AddressRange, Result};
/// use hmem_iface_system::monitor::{ImportMonitor, ImportCallbacks};
///
/// /// A pool that reports its memory before it frees it.
/// #[derive(Debug)]
/// struct Pool;
///
/// impl ImportCallbacks for Pool {
///     fn subscribe(&self, _: AddressRange) -> Result<()> {
///         Ok(())
///     }
///
///     fn unsubscribe(&self, _: AddressRange) {}
/// }
///
/// let monitor = ImportMonitor::new(Arc::new(Pool))?;
/// let block = vec![0_u8; 4096];
/// monitor.invalidate(AddressRange::of(&block));
/// drop(block);
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct ImportMonitor {
    watcher: Arc<dyn ImportCallbacks>,
    subscribers: Subscribers<SubscriberTable>,
    book: Mutex<ImportSubscriptions>,
}

#[derive(Debug, Default)]
struct ImportSubscriptions {
    next: u64,
    subscriptions: HashMap<u64, (AddressRange, u8)>,
}

impl ImportMonitor {
    /// Creates a monitor that calls `watcher` for ranges to watch.
    ///
    /// # Errors
    /// - OutOfResources: no memory is left.
    /// - Unsupported: the kernel cannot wipe memory in forked children.
    pub fn new(watcher: Arc<dyn ImportCallbacks>) -> Result<Arc<Self>> {
        let subscribers = Subscribers::new(NAME)?;
        Ok(Arc::new(Self { watcher, subscribers, book: Mutex::default() }))
    }

    /// Reports that the memory behind `range` is unmapped, and is not mapped again before this
    /// returns. Allocates nothing and takes no lock.
    pub fn invalidate(&self, range: AddressRange) {
        self.subscribers
            .table()
            .pass()
            .each(|_, invalidator| invalidator.invalidate(range, InvalidationCause::Application));
    }

    /// Reports that the memory behind `range` changes while `change` runs. Cached registrations of
    /// it are invalidated before, and none is cached until `change` returns. Use this for changes
    /// during which another thread could register the range.
    ///
    /// `change` must not wait for a subscription to this monitor: the first subscription of a cache
    /// waits for `change`.
    pub fn while_changing<R>(&self, range: AddressRange, change: impl FnOnce() -> R) -> R {
        let pass = self.subscribers.table().pass();
        let mut changes = [const { None::<InvalidationToken> }; SLOTS];
        pass.each(|slot, invalidator| {
            changes[slot] =
                Some(invalidator.invalidate_start(range, InvalidationCause::Application));
        });
        let result = change();
        pass.each(|slot, invalidator| {
            if let Some(change) = changes[slot].take() {
                invalidator.invalidate_end(change);
            }
        });
        result
    }
}

impl fmt::Debug for ImportMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportMonitor")
            .field("name", &self.name())
            .field("detection", &self.detection())
            .finish_non_exhaustive()
    }
}

impl Monitor for ImportMonitor {
    fn name(&self) -> &str {
        NAME.name
    }

    fn rationale(&self) -> String {
        "reported by the application; other changes are not detected".into()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Callback
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Application
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        if !self.subscribers.shared().is_own_process() {
            return Err(NAME.forked("subscribe"));
        }
        let slot = self.subscribers.add(&invalidator)?;
        if let Err(error) = self.watcher.subscribe(range) {
            self.subscribers.remove(slot);
            return Err(error);
        }
        let mut book = self.book.lock();
        book.next += 1;
        let id = book.next;
        book.subscriptions.insert(id, (range, slot));
        Ok(Subscription(id))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.subscribers.shared().is_own_process() {
            return;
        }
        let Some((range, slot)) = self.book.lock().subscriptions.remove(&subscription.0) else {
            return;
        };
        self.subscribers.remove(slot);
        self.watcher.unsubscribe(range);
    }

    fn valid(&self, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for ImportMonitor {
    fn drop(&mut self) {
        if !self.subscribers.shared().is_own_process() {
            return;
        }
        for (_, (range, slot)) in self.book.get_mut().subscriptions.drain() {
            self.subscribers.remove(slot);
            self.watcher.unsubscribe(range);
        }
    }
}
