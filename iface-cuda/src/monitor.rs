//! Noticing that memory of the devices was freed.
//!
//! The driver has no callback for frees. It has identities: no two allocations of a process get the
//! same buffer id, so that one call tells whether an address still holds what was registered. Frees
//! are told besides, before the memory goes, where they are made through this iface, announced by
//! the application ([`Cuda::while_freeing`](crate::Cuda::while_freeing)), or made through functions
//! of the driver that are hooked ([`FreeHooks`]). [`MonitorKind`] says which of these is relied on.
//!
//! VMM memory is not watched. The identity belongs to the reservation, and an application can map
//! other memory there (PyTorch's expandable segments do) without its changing.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    str::FromStr,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    monitor::{Cause, Change, Invalidator, Monitor, MonitorStyle, Subscription},
};
use parking_lot::Mutex;

use crate::{driver::Driver, hooks::FreeHooks};

/// What a cached registration of CUDA memory rests on.
///
/// # Examples
/// ```
/// use hmem_iface_cuda::MonitorKind;
///
/// assert_eq!("hooks".parse::<MonitorKind>()?, MonitorKind::Hooks);
/// assert!("hook".parse::<MonitorKind>().unwrap_err().to_string().contains("identity"));
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MonitorKind {
    /// The driver is asked for the identity at each hit; where its frees can be hooked, they are
    /// told before the memory goes as well. Right whoever frees, and however.
    #[default]
    Auto,
    /// The hooks alone, so that a hit costs no call of the driver. For applications that free
    /// through the driver's exported functions: what [`FreeHooks`] does not see leaves a stale
    /// registration. Stream-ordered memory, which goes when its stream gets there, is asked for
    /// its identity all the same.
    Hooks,
    /// The identity alone: no code is patched.
    Identity,
}

impl MonitorKind {
    const ALL: [Self; 3] = [Self::Auto, Self::Hooks, Self::Identity];

    /// The name as configuration has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Hooks => "hooks",
            Self::Identity => "identity",
        }
    }
}

impl fmt::Display for MonitorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MonitorKind {
    type Err = Error;

    /// # Errors
    /// InvalidArgument for an unknown name, with those that are known.
    fn from_str(name: &str) -> Result<Self> {
        let given = name.trim().to_ascii_lowercase();
        Self::ALL.into_iter().find(|kind| kind.name() == given).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "cache monitor")
                .iface(IfaceKind::CUDA)
                .context("name", name)
                .remedy(format!("use one of {}", Self::ALL.map(Self::name).join(", ")))
        })
    }
}

#[derive(Clone, Debug)]
struct Watch {
    range: AddressRange,
    invalidator: Arc<dyn Invalidator>,
    /// Held while the invalidator is called, so that unsubscribing waits for its end.
    active: Arc<Mutex<bool>>,
}

#[derive(Debug, Default)]
struct Watches {
    next: u64,
    by_id: BTreeMap<u64, Watch>,
    /// Ranges that are being freed, each as often as it is.
    going: Vec<AddressRange>,
}

/// Who wants to know of frees.
#[derive(Debug, Default)]
pub(crate) struct Subscriptions(Mutex<Watches>);

impl Subscriptions {
    /// Runs `free` while everything cached over `range` is dead and stays so.
    ///
    /// Frees of one range may overlap: as soon as the driver has an address back it may give it to
    /// another thread, which may free it before the first free has told of its end here.
    pub(crate) fn while_it_goes<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        let mut watches = self.0.lock();
        watches.going.push(range);
        let touched = watches.by_id.values().filter(|watch| watch.range.overlaps(range));
        let told: Vec<_> = touched.cloned().collect();
        drop(watches);
        let changes: Vec<(Watch, Change)> = told
            .into_iter()
            .filter_map(|watch| {
                let active = watch.active.lock();
                let change = active.then(|| watch.invalidator.begin(range, Cause::Free));
                drop(active);
                change.map(|change| (watch, change))
            })
            .collect();
        let result = free();
        for (watch, change) in changes {
            watch.invalidator.end(change);
        }
        let mut watches = self.0.lock();
        if let Some(at) = watches.going.iter().position(|going| *going == range) {
            watches.going.swap_remove(at);
        }
        result
    }

    fn add(&self, range: AddressRange, invalidator: Arc<dyn Invalidator>) -> Subscription {
        let watch = Watch { range, invalidator, active: Arc::new(Mutex::new(true)) };
        let mut watches = self.0.lock();
        watches.next += 1;
        let id = watches.next;
        watches.by_id.insert(id, watch.clone());
        // Who comes while the memory goes would never be told.
        let missed = watches.going.iter().copied().find(|going| going.overlaps(range));
        drop(watches);
        if let Some(going) = missed {
            watch.invalidator.invalidate(going, Cause::Free);
        }
        Subscription(id)
    }

    fn remove(&self, subscription: Subscription) {
        let watch = self.0.lock().by_id.remove(&subscription.0);
        if let Some(watch) = watch {
            *watch.active.lock() = false;
        }
    }
}

/// The monitor of CUDA memory.
#[derive(Debug)]
pub(crate) struct CudaMonitor {
    driver: Weak<Driver>,
    hooks: Option<Arc<FreeHooks>>,
    /// Whether hits rest on the hooks, and not on the identity.
    by_hooks: bool,
    why: String,
    /// Subscriptions of the hooks, by those of this monitor.
    hooked: Mutex<HashMap<u64, Subscription>>,
}

impl CudaMonitor {
    /// # Errors
    /// Why the frees cannot be hooked, where hooks were asked for by name.
    pub(crate) fn start(driver: &Arc<Driver>, kind: MonitorKind) -> Result<Self> {
        const ASKED: &str = "the driver is asked for the identity at each hit";
        let functions = &driver.functions;
        let (hooks, why) = match kind {
            MonitorKind::Identity => (None, format!("{ASKED}; no other was asked for")),
            MonitorKind::Hooks => {
                let hooks = FreeHooks::start(functions)?;
                let why = "the driver's frees are hooked, and a hit asks nothing, as was asked for; memory of graph nodes \
                           and frees that the CUDA runtime makes by tables of its own are not seen";
                (Some(hooks), why.to_owned())
            }
            // Whose code it is, only the application knows.
            MonitorKind::Auto if !functions.is_loaded() => {
                (None, format!("{ASKED}; functions that were injected are not patched unasked"))
            }
            MonitorKind::Auto => match FreeHooks::start(functions) {
                Ok(hooks) => {
                    let count = hooks.functions().len();
                    let why = format!(
                        "{ASKED}, since the CUDA runtime may free by other ways; frees through {count} hooked functions of \
                         the driver are told before the memory goes"
                    );
                    (Some(hooks), why)
                }
                Err(error) => {
                    tracing::debug!(%error, "the driver's frees are not hooked");
                    (None, format!("{ASKED}; its frees cannot be hooked: {error}"))
                }
            },
        };
        let by_hooks = kind == MonitorKind::Hooks;
        tracing::debug!(hooked = hooks.is_some(), "monitor of CUDA memory started");
        Ok(Self { driver: Arc::downgrade(driver), hooks, by_hooks, why, hooked: Mutex::default() })
    }

    fn driver(&self) -> Result<Arc<Driver>> {
        self.driver.upgrade().ok_or_else(closed)
    }

    /// Tells the invalidator of hooked frees too. In their absence identities are enough, unless
    /// hits rest on the hooks.
    fn hook(&self, subscription: Subscription, invalidator: Arc<dyn Invalidator>) -> Result<()> {
        let Some(hooks) = &self.hooks else { return Ok(()) };
        match hooks.subscribe(invalidator) {
            Ok(hooked) => {
                self.hooked.lock().insert(subscription.0, hooked);
                Ok(())
            }
            Err(error) if self.by_hooks => Err(error),
            Err(error) => {
                tracing::warn!(%error, "frees of CUDA memory are not told any longer: its identity is asked");
                Ok(())
            }
        }
    }

    fn unhook(&self, subscription: Subscription) {
        let hooked = self.hooked.lock().remove(&subscription.0);
        if let (Some(hooks), Some(hooked)) = (&self.hooks, hooked) {
            hooks.unsubscribe(hooked);
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "monitor")
        .iface(IfaceKind::CUDA)
        .remedy("the iface was closed: its memory is not watched any longer")
}

impl Monitor for CudaMonitor {
    fn name(&self) -> &str {
        match (&self.hooks, self.by_hooks) {
            (Some(_), true) => "cuda-hooks",
            (Some(_), false) => "cuda-hooks+identity",
            (None, _) => "cuda-identity",
        }
    }

    fn why(&self) -> String {
        self.why.clone()
    }

    fn style(&self) -> MonitorStyle {
        MonitorStyle::Identity
    }

    fn watches(&self, cause: Cause) -> bool {
        cause == Cause::Identity || cause == Cause::Free && self.hooks.is_some()
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let driver = self.driver()?;
        let refuse = |remedy| {
            Err(Error::new(ErrorKind::Unsupported, "subscribe")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy(remedy))
        };
        // Only after it was added: a free from here on is told, and one before is seen here.
        let subscription = driver.subscriptions.add(range, Arc::clone(&invalidator));
        let found = match self.hook(subscription, invalidator) {
            Ok(()) => driver.find(range.start()),
            Err(error) => Err(error),
        };
        let watched = match &found {
            Ok(Some(found)) => {
                found.allocation.kind != AllocationKind::Virtual
                    && found.allocation.kind != AllocationKind::HostRegistered
            }
            _ => false,
        };
        if watched {
            return Ok(subscription);
        }
        self.unhook(subscription);
        driver.subscriptions.remove(subscription);
        match found?.map(|found| found.allocation.kind) {
            None => refuse("only live allocations of CUDA can be watched"),
            Some(AllocationKind::HostRegistered) => {
                refuse("the application's own pages are watched by the monitors of system memory")
            }
            Some(_) => refuse(
                "other memory can be mapped into a reservation without its identity changing: VMM memory is \
                 registered uncached",
            ),
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        self.unhook(subscription);
        if let Some(driver) = self.driver.upgrade() {
            driver.subscriptions.remove(subscription);
        }
    }

    fn valid(&self, allocation: &Allocation) -> Result<bool> {
        match allocation.kind {
            AllocationKind::Virtual | AllocationKind::HostRegistered => Ok(false),
            // Its free is told when it is asked for, and takes effect when its stream gets there.
            AllocationKind::StreamOrdered => self.same(allocation),
            _ if self.by_hooks && self.driver.strong_count() > 0 => Ok(true),
            _ => self.same(allocation),
        }
    }
}

impl CudaMonitor {
    fn same(&self, allocation: &Allocation) -> Result<bool> {
        Ok(self.driver()?.identity(allocation.base())? == Some(allocation.id))
    }
}
