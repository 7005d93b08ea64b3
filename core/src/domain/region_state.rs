//! The state of a [`MemoryRegion`](super::MemoryRegion).

use std::{
    any::Any,
    collections::HashMap,
    mem::ManuallyDrop,
    ops::Deref,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

use parking_lot::{Condvar, Mutex};

use super::{
    DomainInner,
    terms::{Promise, Terms},
};
use crate::{
    Access, AddressRange, Decision, Error, ErrorKind, IfaceKind, MrFlags, Result, counter::Counter,
    event_queue::RegionId, path::PathRegistration, provider::ProviderRegion,
};

/// The state of a region, from its registration to its close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum RegionState {
    /// The region waits for its asynchronous registration.
    Pending = 0,
    /// The domain's worker is registering the region.
    Registering = 1,
    /// The region is registered, and usable after
    /// [`MemoryRegion::enable`](super::MemoryRegion::enable).
    Disabled = 2,
    /// The region is registered and usable.
    Enabled = 3,
    /// The asynchronous registration of the region failed.
    Failed = 4,
    /// The region is closed, or was cancelled before it was registered.
    Closed = 5,
    /// The region is registered, and the exporter of its memory revoked the dma-buf: the NIC
    /// refuses all accesses. The state is final until the region is closed.
    ///
    /// [`MemoryRegion::check`](super::MemoryRegion::check) finds revocations that no driver
    /// reports.
    Revoked = 6,
}

impl RegionState {
    pub(super) fn from_u8(state: u8) -> Self {
        match state {
            0 => Self::Pending,
            1 => Self::Registering,
            2 => Self::Disabled,
            3 => Self::Enabled,
            4 => Self::Failed,
            _ => Self::Closed,
        }
    }
}

/// The guarantee that memory stays allocated while it is registered.
#[derive(Clone)]
pub(super) enum KeepAlive {
    /// The caller of an unsafe function guarantees that the memory stays allocated.
    Caller,
    /// A call of [`Domain::scope`](super::Domain::scope) borrows the memory, which belongs to this
    /// iface.
    Scope(IfaceKind),
    /// The region owns the memory, possibly together with other regions.
    Region {
        /// The iface of the memory. `None` for memory by addresses, and for a region that owns only
        /// a part of its memory.
        iface: Option<IfaceKind>,
        #[expect(dead_code, reason = "held until the region is closed")]
        memory: Arc<dyn Any + Send + Sync>,
    },
}

impl KeepAlive {
    /// Returns the iface of memory that a region owns as a whole or a scope borrows. Returns `None`
    /// for memory by addresses, and for a region that owns only a part of its memory.
    pub(super) fn iface(&self) -> Option<IfaceKind> {
        match self {
            Self::Caller => None,
            Self::Scope(iface) => Some(*iface),
            Self::Region { iface, .. } => *iface,
        }
    }
}

/// The state of a region. It is small, because a million regions may be live: state that few
/// regions have is in `rare` and `bindings`.
pub(crate) struct RegionInner {
    pub(super) domain: Arc<DomainInner>,
    /// The result of a synchronous registration. An asynchronous registration has its result in
    /// `rare`.
    registered: Option<PathRegistration>,
    /// The first range.
    pub(super) range: AddressRange,
    pub(super) access: Access,
    pub(super) flags: MrFlags,
    /// True if the memory is promised for reading only, so that no transfer may write to it.
    pub(super) read_only: bool,
    /// The number that the application chose for the event of an asynchronous registration.
    pub(super) context: u64,
    rare: Option<Box<Rare>>,
    /// The windows, counters and endpoint of the region. Unset until the first of them is bound.
    bindings: OnceLock<Box<Bindings>>,
    /// The number of sub-regions and bound windows, each of which holds a [`Dependent`]. The region
    /// can be closed only while the number is 0.
    dependents: AtomicU32,
    /// The [`RegionState`] as a number.
    pub(super) state: AtomicU8,
}

/// State that few regions need: those with several ranges, an owned buffer, an asynchronous
/// registration or a requested page size, and all sub-regions.
pub(super) struct Rare {
    /// All ranges if there are several, otherwise empty.
    pub(super) ranges: Vec<AddressRange>,
    /// The base of a sub-region.
    pub(super) parent: Option<Dependent>,
    /// The guarantee that the memory stays allocated. [`RegionInner::release`] takes it out when
    /// the region is closed, and leaves [`KeepAlive::Caller`].
    pub(super) keep: Mutex<KeepAlive>,
    pub(super) page_size: usize,
    /// The asynchronous registration of the region. `None` if the registration is synchronous.
    pub(super) asynchronous: Option<Asynchronous>,
}

/// An asynchronous registration.
pub(super) struct Asynchronous {
    id: RegionId,
    ended: Arc<Ended>,
    /// The result, which the domain's worker stores after success.
    registered: OnceLock<PathRegistration>,
}

impl Asynchronous {
    pub(super) fn new(id: RegionId) -> Self {
        Self { id, ended: Arc::default(), registered: OnceLock::new() }
    }
}

/// The signal that the job of a region has ended or was withdrawn. Afterwards the domain's worker
/// no longer uses the region.
#[derive(Default)]
pub(super) struct Ended {
    done: Mutex<bool>,
    signal: Condvar,
}

impl Ended {
    pub(super) fn signal(&self) {
        *self.done.lock() = true;
        self.signal.notify_all();
    }

    fn is_signaled(&self) -> bool {
        *self.done.lock()
    }

    fn wait(&self) {
        let mut done = self.done.lock();
        while !*done {
            self.signal.wait(&mut done);
        }
    }
}

/// A type 2 window in the list of its region. The window may lose its binding without a call of the
/// application, for example because of a peer's message.
pub(super) trait Settle: Send + Sync {
    /// Asks the provider if this window is still bound. If it is not, drops the [`Dependent`] of
    /// the binding, so that the region can be closed.
    fn settle(&self);
}

/// The objects that are bound to a region.
#[derive(Default)]
pub(super) struct Bindings {
    windows: Mutex<WindowList>,
    pub(super) counters: Mutex<Vec<Arc<Counter>>>,
    /// True once an endpoint was bound.
    /// [`MemoryRegion::bind_endpoint`](super::MemoryRegion::bind_endpoint) holds the lock during
    /// the bind, so that only one endpoint is bound.
    pub(super) endpoint: Mutex<bool>,
}

/// The type 2 windows that were ever bound to a region, each listed once.
#[derive(Default)]
struct WindowList {
    /// The windows by address. A new window never has the address of a listed one, because the weak
    /// pointer in the list keeps the heap block of the listed window allocated.
    by_address: HashMap<usize, Weak<dyn Settle>>,
    /// A threshold: an insertion into a list of this length or more first removes the windows that
    /// were dropped.
    purge_at: usize,
}

impl WindowList {
    fn insert(&mut self, window: &Arc<dyn Settle>) {
        let listed = &mut self.by_address;
        if listed.len() >= self.purge_at {
            listed.retain(|_, window| window.strong_count() > 0);
            self.purge_at = (2 * listed.len()).max(8);
        }
        listed.insert(Arc::as_ptr(window).addr(), Arc::downgrade(window));
    }

    fn live(&self) -> Vec<Arc<dyn Settle>> {
        self.by_address.values().filter_map(Weak::upgrade).collect()
    }
}

/// A guard that a sub-region or a bound window holds. While the guard lives, the region that it
/// refers to cannot be closed.
pub(super) struct Dependent(Arc<RegionInner>);

impl Dependent {
    pub(super) fn of(region: &Arc<RegionInner>) -> Self {
        region.dependents.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(region))
    }
}

impl Deref for Dependent {
    type Target = RegionInner;

    fn deref(&self) -> &RegionInner {
        &self.0
    }
}

impl Drop for Dependent {
    fn drop(&mut self) {
        self.0.dependents.fetch_sub(1, Ordering::AcqRel);
    }
}

impl RegionInner {
    /// Creates a region. It is pending if `registered` is `None`.
    #[inline]
    pub(super) fn new(
        domain: &Arc<DomainInner>,
        range: AddressRange,
        terms: &Terms<'_>,
        promise: Promise,
        rare: Option<Box<Rare>>,
        registered: Option<PathRegistration>,
    ) -> Arc<Self> {
        let Terms { access, flags, context, .. } = *terms;
        let state =
            if registered.is_some() { domain.first_state(flags) } else { RegionState::Pending };
        Arc::new(Self {
            domain: Arc::clone(domain),
            registered,
            range,
            access,
            flags,
            read_only: promise == Promise::ReadOnly,
            context,
            rare,
            bindings: OnceLock::new(),
            dependents: AtomicU32::new(0),
            state: AtomicU8::new(state as u8),
        })
    }

    #[inline]
    pub(super) fn state(&self) -> RegionState {
        RegionState::from_u8(self.state.load(Ordering::Acquire))
    }

    /// Replaces the state `from` by `to`. Returns false if the region has another state.
    fn change_state(&self, from: RegionState, to: RegionState) -> bool {
        let (from, to) = (from as u8, to as u8);
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    pub(super) fn id(&self) -> Option<RegionId> {
        self.asynchronous().map(|asynchronous| asynchronous.id)
    }

    #[inline]
    pub(crate) fn ranges(&self) -> &[AddressRange] {
        match &self.rare {
            Some(rare) if rare.ranges.len() > 1 => &rare.ranges,
            _ => std::slice::from_ref(&self.range),
        }
    }

    pub(super) fn page_size(&self) -> usize {
        self.rare.as_ref().map_or(0, |rare| rare.page_size)
    }

    /// Returns a copy of the guarantee that keeps the memory allocated.
    pub(super) fn keep(&self) -> KeepAlive {
        self.rare.as_ref().map_or(KeepAlive::Caller, |rare| rare.keep.lock().clone())
    }

    fn asynchronous(&self) -> Option<&Asynchronous> {
        self.rare.as_ref()?.asynchronous.as_ref()
    }

    /// Returns the result of the registration, or `None` if it has not succeeded.
    #[inline]
    fn path_registration(&self) -> Option<&PathRegistration> {
        self.registered.as_ref().or_else(|| self.asynchronous()?.registered.get())
    }

    #[inline]
    pub(crate) fn registered(&self) -> Option<ProviderRegion> {
        self.path_registration().map(|registered| registered.region)
    }

    pub(super) fn recorded_decision(&self) -> Option<Arc<Decision>> {
        self.path_registration()?.decision.clone()
    }

    /// Takes the guarantee that keeps the memory allocated, and leaves [`KeepAlive::Caller`] in its
    /// place. The caller must not drop the guarantee before the region is closed.
    pub(super) fn release(&self) -> KeepAlive {
        let release = |rare: &Rare| std::mem::replace(&mut *rare.keep.lock(), KeepAlive::Caller);
        self.rare.as_deref().map_or(KeepAlive::Caller, release)
    }

    pub(super) fn bindings(&self) -> &Bindings {
        self.bindings.get_or_init(Box::default)
    }

    /// Adds a type 2 window to the region's list, before the window is bound to the region.
    pub(super) fn list_window(&self, window: &Arc<dyn Settle>) {
        self.bindings().windows.lock().insert(window);
    }

    /// Asks the provider which type 2 windows are still bound, and returns the number of
    /// sub-regions and bound windows.
    fn settled_dependents(&self) -> u32 {
        let dependents = self.dependents.load(Ordering::Acquire);
        let Some(bindings) = self.bindings.get().filter(|_| dependents > 0) else {
            return dependents;
        };
        // The list's lock is released first, because `settle` locks the window's own state.
        let windows = bindings.windows.lock().live();
        windows.iter().for_each(|window| window.settle());
        self.dependents.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn registration(&self, operation: &'static str) -> Result<&PathRegistration> {
        self.path_registration().ok_or_else(|| {
            Error::new(ErrorKind::BadState, operation)
                .context("state", format_args!("{:?}", self.state()))
                .remedy("the registration has not completed: wait for its event")
        })
    }

    /// Returns the offset of `range` in the region, if it lies in one of the region's ranges.
    pub(crate) fn offset_of(&self, range: AddressRange) -> Option<u64> {
        let mut before = 0;
        for own in self.ranges() {
            if own.contains_range(range) {
                return Some(before + (range.start().0 - own.start().0));
            }
            before += own.len();
        }
        None
    }

    /// Returns the addresses from the byte at `offset` of the region to the end of the range that
    /// contains this byte. Returns `None` if the region has no such byte.
    pub(super) fn rest_at(&self, offset: u64) -> Option<AddressRange> {
        let mut left = offset;
        for range in self.ranges() {
            if left < range.len() {
                return range.slice(left, range.len() - left);
            }
            left -= range.len();
        }
        None
    }

    /// Stores the result of a successful asynchronous registration. The domain's worker calls this
    /// method.
    pub(super) fn complete(&self, registered: PathRegistration) {
        let asynchronous = self.asynchronous().expect("the worker has asynchronous registrations");
        let set = asynchronous.registered.set(registered);
        debug_assert!(set.is_ok(), "the worker registers a region once");
        self.state.store(self.domain.first_state(self.flags) as u8, Ordering::Release);
    }

    /// Marks a pending region as being registered. Returns false if the registration was cancelled.
    /// The domain's worker calls this method.
    pub(super) fn start_registering(&self) -> bool {
        self.change_state(RegionState::Pending, RegionState::Registering)
    }

    /// Marks a region as failed, unless its registration was cancelled before. The domain's worker
    /// calls this method.
    pub(super) fn fail(&self) {
        self.change_state(RegionState::Registering, RegionState::Failed);
    }

    /// Returns the signal for which a close or a drop waits, or `None` for a synchronous
    /// registration.
    pub(super) fn ended(&self) -> Option<Arc<Ended>> {
        self.asynchronous().map(|asynchronous| Arc::clone(&asynchronous.ended))
    }

    pub(crate) fn parent(&self) -> Option<&Arc<Self>> {
        self.rare.as_ref()?.parent.as_ref().map(|parent| &parent.0)
    }

    /// Cancels an asynchronous registration that has not begun, or waits until it has ended.
    /// Returns true if the registration was cancelled.
    ///
    /// Afterwards the domain's worker no longer uses the region.
    ///
    /// # Errors
    /// Busy: the call is part of the region's own job, for example inside a call of the provider,
    /// and cannot wait for the job's end.
    fn cancel_or_wait(&self) -> Result<bool> {
        let cancelled = self.change_state(RegionState::Pending, RegionState::Closed);
        let worker = self.domain.worker.get();
        if cancelled
            && let (Some(worker), Some(id)) = (worker, self.id())
            && worker.withdraw(id)
        {
            return Ok(true);
        }
        if let Some(ended) = self.ended() {
            if worker.is_some_and(|worker| worker.is_current()) && !ended.is_signaled() {
                return Err(Error::new(ErrorKind::Busy, "close region")
                    .context("range", self.range)
                    .context("why", "the call is part of the region's own registration")
                    .remedy("close the region on another thread, or after its event"));
            }
            ended.wait();
        }
        Ok(cancelled)
    }

    /// Cancels the asynchronous registration of a dropped region, or waits until it has ended.
    ///
    /// If the drop is part of the region's own job, the region is deregistered at the end of the
    /// job.
    pub(super) fn abandon(&self) {
        if self.asynchronous().is_none() || !self.domain.process.is_current() {
            return;
        }
        if let Err(error) = self.cancel_or_wait() {
            tracing::debug!(%error, "a region is dropped inside its own registration");
        }
    }

    #[inline]
    pub(super) fn close(&self) -> Result<()> {
        if !self.domain.process.is_current() {
            return Ok(());
        }
        if self.rare.is_some() && self.cancel_or_wait()? {
            return Ok(());
        }
        self.check_unused()?;
        self.deregister()
    }

    /// Fails if the region has a sub-region, a bound window or an open counter.
    pub(super) fn check_unused(&self) -> Result<()> {
        let dependents = self.settled_dependents();
        if dependents > 0 {
            return Err(Error::new(ErrorKind::Busy, "close region")
                .context("range", self.range)
                .context("dependents", dependents)
                .remedy(
                    "revoke its grants, close its sub-regions and free or unbind its windows first",
                ));
        }
        let open_counters = self.bindings.get().map_or(0, |bindings| {
            bindings.counters.lock().iter().filter(|counter| !counter.is_closed()).count()
        });
        if open_counters > 0 {
            return Err(Error::new(ErrorKind::Busy, "close region")
                .context("range", self.range)
                .context("bound", "counter")
                .context("open_counters", open_counters)
                .remedy("close every counter that is bound to it first"));
        }
        Ok(())
    }

    /// Deregisters the region if it is registered. Must not be called in a forked child.
    fn deregister(&self) -> Result<()> {
        let open = matches!(self.state(), RegionState::Enabled | RegionState::Disabled);
        if let Some(registered) = self.path_registration().filter(|_| open) {
            self.domain.provider.deregister(registered.region)?;
            self.state.store(RegionState::Closed as u8, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        // In a forked child this value is a copy, and the registration belongs to the parent.
        if self.state() == RegionState::Closed || !self.domain.process.is_current() {
            return;
        }
        // The memory is freed only after the NIC has lost access to it. If `deregister` fails or
        // panics, the memory is leaked.
        let keep = ManuallyDrop::new(self.release());
        match self.deregister() {
            Ok(()) => drop(ManuallyDrop::into_inner(keep)),
            Err(error) => {
                let range = self.range;
                tracing::error!(
                    %range,
                    error = %error.full(),
                    "cannot deregister a region; its memory is leaked"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Window;

    impl Settle for Window {
        fn settle(&self) {}
    }

    /// MW-06: the window list of a region has each live window once, and dropped windows do not
    /// accumulate in it.
    #[test]
    fn window_list_holds_each_live_window_once() {
        let mut list = WindowList::default();
        let kept: Vec<Arc<dyn Settle>> = (0..20).map(|_| Arc::new(Window) as _).collect();
        for round in 0..1000 {
            list.insert(&kept[round % kept.len()]);
        }
        assert_eq!((list.by_address.len(), list.live().len()), (20, 20));
        for _ in 0..1000 {
            list.insert(&(Arc::new(Window) as _));
        }
        assert!(list.by_address.len() <= 41, "{} windows listed", list.by_address.len());
        assert_eq!(list.live().len(), 20);
    }
}
