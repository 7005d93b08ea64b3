//! The import monitor: the application reports the changes of memory that it manages itself.

use std::{fmt, sync::Arc};

use hmem_core::{
    AddressRange, Allocation, IfaceKind, Result,
    monitor::{
        DetectionMethod, InvalidationCause, InvalidationToken, Invalidator, Monitor, Subscription,
        SubscriptionMap,
    },
};
use hmem_hook::{
    MonitorName, SLOTS, SlotSubscription, SubscriberTable, Subscribers, TableReadGuard,
};
use parking_lot::Mutex;

const NAME: MonitorName = MonitorName {
    name: "import",
    iface: IfaceKind::SYSTEM,
    fallback_hint: "use the memhooks monitor",
};

/// Callbacks of an application's own monitor, like libfabric's `fi_ops_mem_monitor`.
pub trait ImportCallbacks: std::fmt::Debug + Send + Sync {
    /// Starts watching a range. The cache calls this before it caches a registration of the range.
    ///
    /// From then on the application must call [`ImportMonitor::invalidate`] or
    /// [`ImportMonitor::while_changing`] before this memory is unmapped or replaced. Ranges may
    /// overlap and repeat.
    ///
    /// # Errors
    /// Unsupported: the application cannot watch the range. Registrations of the range are then not
    /// cached.
    fn subscribe(&self, range: AddressRange) -> Result<()>;

    /// Stops watching a range. The cache calls this once for each successful
    /// [`ImportCallbacks::subscribe`], with the same range, when the range is no longer cached. A
    /// forked child makes no such calls.
    fn unsubscribe(&self, range: AddressRange);
}

/// A monitor that gets its events from the application. Any thread may report a change.
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
    callbacks: Arc<dyn ImportCallbacks>,
    subscribers: Subscribers<SubscriberTable>,
    /// The watched range of each subscription, and its entry in the subscriber table.
    subscriptions: Mutex<SubscriptionMap<(AddressRange, SlotSubscription)>>,
}

impl ImportMonitor {
    /// Creates a monitor that passes the ranges to watch to the application's `callbacks`.
    ///
    /// # Errors
    /// - OutOfResources: no memory is left.
    /// - Unsupported: the kernel cannot wipe memory in forked children.
    pub fn new(callbacks: Arc<dyn ImportCallbacks>) -> Result<Arc<Self>> {
        let subscribers = Subscribers::new(NAME)?;
        Ok(Arc::new(Self { callbacks, subscribers, subscriptions: Mutex::default() }))
    }

    /// Invalidates the cached registrations of a range that was or will be unmapped. The method
    /// allocates nothing and takes no lock.
    ///
    /// The application must not map the addresses again before this method returns. If another
    /// thread could register the range between this call and the unmap, use
    /// [`ImportMonitor::while_changing`] instead.
    pub fn invalidate(&self, range: AddressRange) {
        self.subscribers
            .table()
            .pass()
            .each(|_, invalidator| invalidator.invalidate(range, InvalidationCause::Application));
    }

    /// Runs `change`, which changes the memory behind `range`.
    ///
    /// The cached registrations of the range are invalidated before `change` runs. Until `change`
    /// returns or panics, no new registration of the range is cached. Use this method if another
    /// thread could register the range during the change.
    ///
    /// A cache waits for `change` to return when it makes its first subscription to this monitor,
    /// and when it ends its last one. So `change` must neither begin or end subscriptions to this
    /// monitor, nor wait for a thread that does.
    pub fn while_changing<R>(&self, range: AddressRange, change: impl FnOnce() -> R) -> R {
        let pass = self.subscribers.table().pass();
        let mut tokens = [const { None::<InvalidationToken> }; SLOTS];
        pass.each(|slot, invalidator| {
            tokens[slot] =
                Some(invalidator.invalidate_start(range, InvalidationCause::Application));
        });
        let _ended_on_drop = ChangeInProgress { pass, tokens };
        change()
    }
}

/// A change in progress, which ends on drop.
struct ChangeInProgress<'a> {
    pass: TableReadGuard<'a>,
    /// The token of each subscriber, by the subscriber's slot.
    tokens: [Option<InvalidationToken>; SLOTS],
}

impl Drop for ChangeInProgress<'_> {
    fn drop(&mut self) {
        let Self { pass, tokens } = self;
        pass.each(|slot, invalidator| {
            if let Some(token) = tokens[slot].take() {
                invalidator.invalidate_end(token);
            }
        });
    }
}

impl fmt::Debug for ImportMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportMonitor").finish_non_exhaustive()
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
        let entry = self.subscribers.add(&invalidator)?;
        if let Err(error) = self.callbacks.subscribe(range) {
            self.subscribers.remove(entry);
            return Err(error);
        }
        Ok(self.subscriptions.lock().insert((range, entry)))
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.subscribers.shared().is_own_process() {
            return;
        }
        let Some((range, entry)) = self.subscriptions.lock().remove(subscription) else { return };
        self.subscribers.remove(entry);
        self.callbacks.unsubscribe(range);
    }

    fn valid(&self, _: &Subscription, _: &Allocation) -> Result<bool> {
        Ok(true)
    }
}

impl Drop for ImportMonitor {
    fn drop(&mut self) {
        if !self.subscribers.shared().is_own_process() {
            return;
        }
        for (range, entry) in self.subscriptions.get_mut().drain() {
            self.subscribers.remove(entry);
            self.callbacks.unsubscribe(range);
        }
    }
}
