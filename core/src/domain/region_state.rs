//! The state behind a [`MemoryRegion`](super::MemoryRegion): small, because a million of them may
//! be live.

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
    /// A [`Domain::scope`](super::Domain::scope) call borrows the memory of this iface.
    Scope(IfaceKind),
    /// The region owns the memory, possibly together with other regions.
    Region {
        /// The iface that the buffer reports for the memory. `None` if the region owns only a part
        /// of the memory, and the caller guarantees that the rest stays allocated.
        iface: Option<IfaceKind>,
        #[expect(dead_code, reason = "held until the region is closed")]
        memory: Arc<dyn Any + Send + Sync>,
    },
}

impl KeepAlive {
    /// Returns the iface of memory that a region owns as a whole or a scope borrows, or `None` for
    /// other memory.
    pub(super) fn iface(&self) -> Option<IfaceKind> {
        match self {
            Self::Caller => None,
            Self::Scope(iface) => Some(*iface),
            Self::Region { iface, .. } => *iface,
        }
    }
}

/// The state that every region has. State that few regions have is in `rare`, because a million
/// regions may be live.
pub(crate) struct RegionInner {
    pub(super) domain: Arc<DomainInner>,
    /// The registration that the region was created with. `None` for an asynchronous registration,
    /// which has it in `rare`.
    pub(super) registered: Option<PathRegistration>,
    pub(super) range: AddressRange,
    pub(super) access: Access,
    pub(super) flags: MrFlags,
    /// True if the memory is promised for reading only, so that no transfer may write to it.
    read_only: bool,
    pub(super) context: u64,
    pub(super) rare: Option<Box<Rare>>,
    pub(super) bindings: OnceLock<Box<Bindings>>,
    /// The number of sub-regions and bound windows.
    pub(super) dependents: AtomicU32,
    pub(super) state: AtomicU8,
}

/// State of sub-regions, and of regions with several ranges, an owned buffer, an asynchronous
/// registration or a requested page size.
pub(super) struct Rare {
    pub(super) ranges: Vec<AddressRange>,
    pub(super) parent: Option<Dependent>,
    pub(super) keep: Mutex<KeepAlive>,
    pub(super) page_size: usize,
    pub(super) asynchronous: Option<Asynchronous>,
}

/// An asynchronous registration, and its result once it succeeded.
pub(super) struct Asynchronous {
    id: RegionId,
    ended: Arc<Ended>,
    registered: OnceLock<PathRegistration>,
}

impl Asynchronous {
    pub(super) fn new(id: RegionId) -> Self {
        Self { id, ended: Arc::default(), registered: OnceLock::new() }
    }
}

/// A signal that the domain's worker raises when the worker no longer uses a region.
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
    /// Asks the provider if this window is still bound. If it is not, removes the window from the
    /// count of the region's dependents, so that the region can be closed.
    fn settle(&self);
}

#[derive(Default)]
pub(super) struct Bindings {
    windows: Mutex<WindowList>,
    pub(super) counters: Mutex<Vec<Arc<Counter>>>,
    pub(super) endpoint: Mutex<bool>,
}

/// The type 2 windows that were ever bound to a region, each listed once.
#[derive(Default)]
struct WindowList {
    /// The windows, by the address of their allocation. A weak pointer keeps the allocation, so no
    /// later window has the same address.
    by_address: HashMap<usize, Weak<dyn Settle>>,
    /// The number of windows in `by_address` at which the next insertion removes the dropped
    /// windows.
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

/// A guard for a sub-region or a bound window. The guard keeps the region from being closed.
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
    /// Creates a region, which is registered already or pending until the domain's worker registers
    /// it.
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

    pub(crate) fn domain(&self) -> &Arc<DomainInner> {
        &self.domain
    }

    /// Returns true if the memory is promised for reading only.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(super) fn flags(&self) -> MrFlags {
        self.flags
    }

    pub(super) fn context(&self) -> u64 {
        self.context
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

    /// Returns another reference to the guarantee that keeps the memory allocated.
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

    /// Takes out the guarantee that kept the memory allocated. The caller may drop the result only
    /// once the region is closed.
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

    /// Returns the number of sub-regions and bound windows. Queries the provider for the state of
    /// type 2 windows first.
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
        let (from, to) = (RegionState::Pending as u8, RegionState::Registering as u8);
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks a region as failed, unless its registration was cancelled before. The domain's worker
    /// calls this method.
    pub(super) fn fail(&self) {
        let (from, to) = (RegionState::Registering as u8, RegionState::Failed as u8);
        // A region that is already closed needs nothing else.
        let _cancelled_before =
            self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_err();
    }

    /// Returns the signal that the domain's worker raises when its asynchronous registration call
    /// has returned, or `None` for a synchronous registration. A close waits for the signal.
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
    fn cancel_or_wait(&self) -> bool {
        let (from, to) = (RegionState::Pending as u8, RegionState::Closed as u8);
        let given_up =
            self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if given_up
            && let (Some(worker), Some(id)) = (self.domain.worker.get(), self.id())
            && worker.withdraw(id)
        {
            return true;
        }
        if let Some(ended) = self.ended() {
            ended.wait();
        }
        given_up
    }

    #[inline]
    pub(super) fn close(&self) -> Result<()> {
        if !self.domain.process.is_current() {
            return Ok(());
        }
        if self.rare.is_some() && self.cancel_or_wait() {
            return Ok(());
        }
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
        self.deregister()
    }

    /// Deregisters the region if it is registered. The caller has checked that this process is not
    /// a forked child.
    fn deregister(&self) -> Result<()> {
        let open = matches!(self.state(), RegionState::Enabled | RegionState::Disabled);
        if let Some(registered) = self.path_registration().filter(|_| open) {
            self.domain.provider().deregister(registered.region)?;
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
        // The memory is freed only once the NIC cannot access it. Otherwise the NIC could write to
        // data that the allocator places there next. A panic also leaks the memory.
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

    /// MW-06
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
