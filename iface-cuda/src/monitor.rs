//! Monitor: detects frees of CUDA memory.
//!
//! The driver has no callback for frees. It has identities: no two allocations of a process have
//! the same buffer id. So one query shows whether the registered memory is still at an address.
//!
//! Some frees also notify the subscribers before the memory is freed:
//!
//! - frees through this iface;
//! - frees that the application makes in [`Cuda::while_freeing`](crate::Cuda::while_freeing);
//! - frees through hooked functions of the driver ([`FreeHooks`]).
//!
//! [`CudaMonitorKind`] selects the detection on which cached registrations rely.
//!
//! The identity of VMM memory is that of its reservation, into which an application can map other
//! memory (PyTorch's expandable segments do). So the monitor compares the mappings and the handles
//! of their physical memory instead ([`MappedMemory`]).
//!
//! Host memory that the application page-locked is not monitored: the monitor of system memory
//! watches it.

use std::{
    fmt,
    str::FromStr,
    sync::{Arc, Weak},
};

use hmem_core::{
    AddressRange, Allocation, AllocationKind, Error, ErrorKind, ProcessMark, Result,
    iface::MonitorSource,
    monitor::{
        DetectionMethod, FreeSubscriptions, InvalidationCause, Invalidator, Monitor, Subscription,
        SubscriptionMap,
    },
};
use parking_lot::Mutex;

use crate::{error::CUDA, hooks::FreeHooks, lookup::PointerLookup, segments::MappedMemory};

/// Method that detects frees of cached CUDA memory.
///
/// # Examples
/// ```
/// use hmem_iface_cuda::CudaMonitorKind;
///
/// assert_eq!("hooks".parse::<CudaMonitorKind>()?, CudaMonitorKind::Hooks);
/// assert!("hook".parse::<CudaMonitorKind>().unwrap_err().to_string().contains("identity"));
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaMonitorKind {
    /// Queries the driver for the identity at each hit, which detects every free. If the driver's
    /// functions can be hooked, frees also invalidate registrations before the memory is freed.
    /// Functions that the application passed to the builder are not hooked.
    #[default]
    Auto,
    /// Relies on the hooks alone, so that a hit costs no driver call. If the functions cannot be
    /// hooked, the monitor does not start. Suits applications that free only through the driver's
    /// exported functions: a free that [`FreeHooks`] does not see leaves a stale registration. The
    /// identity of stream-ordered memory is queried nevertheless, since the driver frees such
    /// memory later, when the stream reaches the free. The monitor retains no handles of VMM
    /// memory, so the application's release frees the memory at once.
    Hooks,
    /// Queries the driver for the identity at each hit, which detects every free. Patches no code.
    ///
    /// VMM memory has no such identity. A hit queries each mapping of the region, and the monitor
    /// retains the handle of the mapping's physical memory. So memory that the application unmaps
    /// and releases stays allocated until its registration leaves the cache. That is also true of
    /// [`Auto`](Self::Auto) if the driver's functions cannot be hooked.
    Identity,
}

impl CudaMonitorKind {
    const ALL: [Self; 3] = [Self::Auto, Self::Hooks, Self::Identity];

    /// Returns the name used in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Hooks => "hooks",
            Self::Identity => "identity",
        }
    }
}

impl fmt::Display for CudaMonitorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CudaMonitorKind {
    type Err = Error;

    /// Parses the name of a monitor ([`name`](Self::name)). Ignores case, and spaces around the
    /// name.
    ///
    /// # Errors
    /// InvalidArgument if the name is unknown. The error lists the known names.
    fn from_str(name: &str) -> Result<Self> {
        let given = name.trim().to_ascii_lowercase();
        Self::ALL.into_iter().find(|kind| kind.name() == given).ok_or_else(|| {
            CUDA.error(ErrorKind::InvalidArgument, "cache monitor")
                .context("why", format_args!("no monitor is named {name}"))
                .context("name", name)
                .remedy(format!("use one of {}", Self::ALL.map(Self::name).join(", ")))
        })
    }
}

/// Creates monitors of CUDA memory.
#[derive(Debug)]
pub(crate) struct CudaMonitors {
    pub(crate) lookup: Arc<PointerLookup>,
    pub(crate) subscriptions: Arc<FreeSubscriptions>,
    pub(crate) kind: CudaMonitorKind,
}

impl MonitorSource for CudaMonitors {
    /// Returns [`DetectionMethod::Identity`]: the driver has no callback for frees, but a query of
    /// the identity shows whether memory was freed. A started monitor may use hooks too.
    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    /// Creates a monitor that detects frees by the selected method.
    ///
    /// # Errors
    /// The reason why frees cannot be hooked, if [`CudaMonitorKind::Hooks`] was selected.
    fn start(&self) -> Result<Arc<dyn Monitor>> {
        const ASKED: &str = "the driver is queried for the identity at each hit";
        let (kind, functions) = (self.kind, &self.lookup.driver().functions);
        let (hooks, why) = match kind {
            CudaMonitorKind::Identity => (None, format!("{ASKED}; hooks were not selected")),
            CudaMonitorKind::Hooks => {
                let hooks = FreeHooks::start(functions)?;
                let why = "the driver's frees are hooked, and a hit queries nothing, as selected; \
                           memory of graph nodes and frees that the CUDA runtime makes by tables \
                           of its own are not seen";
                (Some(hooks), why.to_owned())
            }
            // The application passed these functions to the builder, and only the application knows
            // whether their code may be patched.
            CudaMonitorKind::Auto if !functions.is_loaded() => (
                None,
                format!(
                    "{ASKED}; injected functions are patched only if hooks are selected by name"
                ),
            ),
            CudaMonitorKind::Auto => match FreeHooks::start(functions) {
                Ok(hooks) => {
                    let count = hooks.functions().len();
                    let why = format!(
                        "{ASKED}, since the CUDA runtime may free by other functions; frees \
                         through {count} hooked functions of the driver notify before the memory \
                         is freed"
                    );
                    (Some(hooks), why)
                }
                Err(error) => {
                    tracing::debug!(%error, "the driver's frees are not hooked");
                    (None, format!("{ASKED}; its frees cannot be hooked: {error:#}"))
                }
            },
        };
        tracing::debug!(hooked = hooks.is_some(), "monitor of CUDA memory started");
        Ok(Arc::new(CudaMonitor {
            lookup: Arc::downgrade(&self.lookup),
            subscriptions: Arc::downgrade(&self.subscriptions),
            hooks,
            by_hooks: kind == CudaMonitorKind::Hooks,
            why,
            process: self.lookup.contexts.process,
            watches: Mutex::default(),
        }))
    }
}

/// A monitor of CUDA memory. The monitor does not keep the iface open.
struct CudaMonitor {
    lookup: Weak<PointerLookup>,
    subscriptions: Weak<FreeSubscriptions>,
    /// Hooks of the driver's frees, or `None` if hits rely on identities alone.
    hooks: Option<Arc<FreeHooks>>,
    /// True if a hit relies on the hooks, and does not query the identity.
    by_hooks: bool,
    /// The monitor's [`rationale`](Monitor::rationale).
    why: String,
    /// The process that opened the iface. A forked child takes no lock of the monitor.
    process: ProcessMark,
    watches: Mutex<SubscriptionMap<Watch>>,
}

/// A subscription to a monitor.
#[derive(Debug)]
struct Watch {
    /// Subscription to frees by the iface.
    frees: Subscription,
    /// Subscription to the hooks. `None` if the monitor has no hooks, or if the hooks refused the
    /// subscription and hits rely on identities.
    hooked: Option<Subscription>,
    /// VMM memory that was mapped when the subscription began. `None` for other memory, and if hits
    /// rely on the hooks.
    mapped: Option<Arc<MappedMemory>>,
}

impl CudaMonitor {
    /// Subscribes the invalidator to the hooked frees. A failure is an error only if hits rely on
    /// the hooks. Otherwise this method returns `None`, and identities detect the frees.
    fn hook(&self, invalidator: Arc<dyn Invalidator>) -> Result<Option<Subscription>> {
        let Some(hooks) = &self.hooks else { return Ok(None) };
        match hooks.subscribe(invalidator) {
            Ok(hooked) => Ok(Some(hooked)),
            Err(error) if self.by_hooks => Err(error),
            Err(error) => {
                tracing::warn!(
                    error = %error.full(),
                    "cannot hook CUDA frees; cache hits query the allocation identity instead"
                );
                Ok(None)
            }
        }
    }

    /// Ends the subscriptions of a watch, and releases the handles of its memory. A hit that
    /// compares the memory at this moment keeps the handles until the comparison ends.
    fn end(&self, watch: Watch) {
        if let (Some(hooks), Some(hooked)) = (&self.hooks, watch.hooked) {
            hooks.unsubscribe(hooked);
        }
        if let Some(subscriptions) = self.subscriptions.upgrade() {
            subscriptions.remove(watch.frees);
        }
    }
}

impl fmt::Debug for CudaMonitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMonitor")
            .field("name", &self.name())
            .field("detection", &self.detection())
            .finish_non_exhaustive()
    }
}

impl Monitor for CudaMonitor {
    fn name(&self) -> &str {
        match (&self.hooks, self.by_hooks) {
            (Some(_), true) => "cuda-hooks",
            (Some(_), false) => "cuda-hooks+identity",
            (None, _) => "cuda-identity",
        }
    }

    fn rationale(&self) -> String {
        self.why.clone()
    }

    fn detection(&self) -> DetectionMethod {
        DetectionMethod::Identity
    }

    fn detects(&self, cause: InvalidationCause) -> bool {
        cause == InvalidationCause::Identity
            || cause == InvalidationCause::Free && self.hooks.is_some()
    }

    fn subscribe(
        &self,
        range: AddressRange,
        invalidator: Arc<dyn Invalidator>,
    ) -> Result<Subscription> {
        let (lookup, subscriptions) = self.iface()?;
        lookup.contexts.check_process("subscribe")?;
        // The memory is queried after the subscription. The query detects an earlier free, and a
        // later free notifies the subscriber.
        let frees = subscriptions.add(range, Arc::clone(&invalidator));
        let mut watch = Watch { frees, hooked: None, mapped: None };
        let watched = self.hook(invalidator).and_then(|hooked| {
            watch.hooked = hooked;
            self.mapped_memory(&lookup, range)
        });
        match watched {
            Ok(mapped) => {
                watch.mapped = mapped.map(Arc::new);
                Ok(self.watches.lock().insert(watch))
            }
            Err(error) => {
                self.end(watch);
                Err(error)
            }
        }
    }

    fn unsubscribe(&self, subscription: Subscription) {
        if !self.process.is_current() {
            return;
        }
        // The lock is released before the watch ends, which calls the driver.
        let watch = self.watches.lock().remove(subscription);
        if let Some(watch) = watch {
            self.end(watch);
        }
    }

    fn valid(&self, subscription: &Subscription, allocation: &Allocation) -> Result<bool> {
        match allocation.kind {
            AllocationKind::HostRegistered => Ok(false),
            // Stream-ordered memory is freed when its stream reaches the free, after the hook has
            // run. So the identity is queried.
            AllocationKind::StreamOrdered => self.is_same(allocation),
            _ if self.by_hooks && self.lookup.strong_count() > 0 => Ok(true),
            AllocationKind::Virtual => self.is_unchanged(subscription),
            _ => self.is_same(allocation),
        }
    }
}

impl CudaMonitor {
    fn iface(&self) -> Result<(Arc<PointerLookup>, Arc<FreeSubscriptions>)> {
        let iface = self.lookup.upgrade().zip(self.subscriptions.upgrade());
        iface.ok_or_else(|| CUDA.not_watched())
    }

    /// Returns the VMM memory in a range, if hits must compare its mappings. Returns `None` if hits
    /// query the identity of the memory, or rely on the hooks.
    ///
    /// # Errors
    /// - Unsupported if the range cannot be watched, with the reason.
    /// - Otherwise the error of a driver call.
    fn mapped_memory(
        &self,
        lookup: &PointerLookup,
        range: AddressRange,
    ) -> Result<Option<MappedMemory>> {
        let refuse = |remedy| {
            Err(CUDA
                .error(ErrorKind::Unsupported, "subscribe")
                .context("range", range)
                .remedy(remedy))
        };
        match lookup.find(range.start())?.map(|found| found.allocation.kind) {
            None => refuse("only live allocations of CUDA can be watched"),
            Some(AllocationKind::HostRegistered) => {
                refuse("the monitor of system memory watches the application's own pages")
            }
            // The hooks see each unmapping of memory that has a handle. They may miss the end of
            // memory without a handle, so such memory is refused with hooks too.
            Some(AllocationKind::Virtual) => match MappedMemory::retain(lookup, range)? {
                Some(_) if self.by_hooks => Ok(None),
                Some(mapped) => Ok(Some(mapped)),
                None => refuse(
                    "a part of the range is not mapped, or the driver has no handle for it \
                     (cuMemRetainAllocationHandle): nothing shows that other memory is mapped \
                     there, and the memory is registered uncached",
                ),
            },
            Some(_) => Ok(None),
        }
    }

    /// Returns true if the VMM memory of a subscription is still mapped where it was.
    fn is_unchanged(&self, subscription: &Subscription) -> Result<bool> {
        let (lookup, _) = self.iface()?;
        let mapped = self.watches.lock().get(subscription).and_then(|watch| watch.mapped.clone());
        mapped.map_or(Ok(false), |mapped| mapped.is_unchanged(&lookup))
    }

    fn is_same(&self, allocation: &Allocation) -> Result<bool> {
        let (lookup, _) = self.iface()?;
        Ok(lookup.identity(allocation.base())? == Some(allocation.id))
    }
}
