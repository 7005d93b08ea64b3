//! Changes that the application tells: for memory whose comings and goings it knows better than any
//! hook.

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

/// What an application's own monitor does, as `fi_ops_mem_monitor` of libfabric.
pub trait ImportCallbacks: std::fmt::Debug + Send + Sync {
    /// A range is about to be cached: from now on the application calls
    /// [`ImportMonitor::invalidate`], or [`ImportMonitor::while_changing`], before its memory goes.
    /// Ranges may overlap, and come more than once.
    ///
    /// # Errors
    /// Unsupported if the application cannot watch it: it is then not cached.
    fn subscribe(&self, range: AddressRange) -> Result<()>;

    /// The range is not cached any more. Called once for each successful
    /// [`ImportCallbacks::subscribe`], with the same range.
    fn unsubscribe(&self, range: AddressRange);
}

/// A monitor whose events are the application's calls, from any thread.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use hmem_core::{AddressRange, Result};
/// use hmem_iface_system::monitor::{ImportMonitor, ImportCallbacks};
///
/// /// Memory that is never freed before the pool is told.
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
    /// The monitor of an application that watches by `watcher`.
    ///
    /// # Errors
    /// OutOfResources without memory, Unsupported where the kernel cannot tell forked children
    /// apart.
    pub fn new(watcher: Arc<dyn ImportCallbacks>) -> Result<Arc<Self>> {
        let subscribers = Subscribers::new(NAME)?;
        Ok(Arc::new(Self { watcher, subscribers, book: Mutex::default() }))
    }

    /// The memory behind `range` goes, and does not come back as something else before this
    /// returns. Allocates nothing and takes no lock.
    pub fn invalidate(&self, range: AddressRange) {
        self.subscribers
            .table()
            .pass()
            .each(|_, invalidator| invalidator.invalidate(range, InvalidationCause::Application));
    }

    /// The memory behind `range` goes while `change` runs: what is cached over it is dead before,
    /// and nothing over it is cached until after. For changes that another thread could
    /// register over while they are under way. `change` must not wait for a subscription of
    /// this monitor: the first one of a cache waits for it.
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
        "told by the application; what it does not tell is not seen".into()
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
