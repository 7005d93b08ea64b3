//! The state behind a [`MemoryRegion`]: small, because a million of them may be live.

use std::{
    any::Any,
    mem::ManuallyDrop,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

use parking_lot::{Condvar, Mutex};

use super::{
    DomainInner, MrAttr, OwnedBuffer, RegionState,
    set_once::SetOnce,
    shared::{Shared, Unique},
};
use crate::{
    Access, AddressRange, Decision, Error, ErrorKind, IfaceKind, LocalKey, MrFlags, MrMode, Result,
    counter::Counter, event_queue::RegionId, path::PathOutcome, provider::ProviderRegion,
};

/// Memory that a region keeps alive.
#[derive(Clone)]
pub(super) struct MemoryOwner {
    /// The iface of the memory, as the memory's owner reports it.
    pub(super) iface: IfaceKind,
    _memory: Arc<dyn Any + Send + Sync>,
}

impl MemoryOwner {
    pub(super) fn of<B: OwnedBuffer>(parts: &Arc<B::Parts>) -> Self {
        Self { iface: B::iface(parts), _memory: Arc::clone(parts) as _ }
    }
}

/// The hot part; what few regions have is in `rare`, because a million regions may be live.
pub(crate) struct RegionInner {
    pub(super) domain: Arc<DomainInner>,
    pub(super) registered: SetOnce<Registration>,
    pub(super) range: AddressRange,
    pub(super) access: Access,
    pub(super) flags: MrFlags,
    pub(super) context: u64,
    pub(super) rare: Option<Box<Rare>>,
    pub(super) bindings: OnceLock<Box<Bindings>>,
    /// Sub-regions and windows.
    pub(super) dependents: AtomicU32,
    pub(super) state: AtomicU8,
}

/// A [`ProviderRegion`] and its decision. The numbers of the region lie apart, and not in its own
/// order, so that they are copied from where the provider has just written them one by one: one
/// wide load over several narrow stores that are still under way waits for all of them.
#[repr(C)]
pub(super) struct Registration {
    local: LocalKey,
    pub(super) decision: Option<Arc<Decision>>,
    token: u64,
    key: u64,
}

impl Registration {
    #[inline]
    fn new(region: &ProviderRegion, decision: Option<Arc<Decision>>) -> Self {
        let ProviderRegion { token, local, key } = *region;
        Self { local, decision, token, key }
    }

    #[inline]
    pub(super) fn region(&self) -> ProviderRegion {
        ProviderRegion { token: self.token, local: self.local, key: self.key }
    }
}

/// What only vectored, nested, owned or asynchronous regions have.
#[derive(Default)]
pub(super) struct Rare {
    pub(super) ranges: Vec<AddressRange>,
    pub(super) parent: Option<Shared<RegionInner>>,
    pub(super) owner: Mutex<Option<MemoryOwner>>,
    /// Returns the iface of memory that cannot be freed while it is registered: the region owns it,
    /// or a scope borrows it.
    pub(super) owned: Option<IfaceKind>,
    pub(super) page_size: usize,
    pub(super) asynchronous: Option<(RegionId, Arc<Ended>)>,
}

/// Whether the worker is done with a region.
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

#[derive(Default)]
pub(super) struct Bindings {
    pub(super) counters: Mutex<Vec<Arc<Counter>>>,
    pub(super) endpoint: Mutex<bool>,
}

impl RegionInner {
    #[inline(always)]
    pub(super) fn pending(
        domain: &Arc<DomainInner>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        range: AddressRange,
        owner: Option<MemoryOwner>,
        id: Option<RegionId>,
    ) -> Unique<Self> {
        let needs_rare =
            attr.ranges.len() > 1 || attr.base.is_some() || owner.is_some() || id.is_some();
        let rare = (needs_rare || attr.page_size != 0).then(|| {
            let parent = attr.base.map(|base| Shared::clone(base.inner()));
            let page_size = match &parent {
                Some(parent) => parent.page_size(),
                None => attr.page_size,
            };
            if let Some(parent) = &parent {
                parent.dependents.fetch_add(1, Ordering::AcqRel);
            }
            let asynchronous = id.map(|id| (id, Arc::default()));
            let ranges = if attr.ranges.len() > 1 { attr.ranges.to_vec() } else { Vec::new() };
            let owned = owner.as_ref().map(|owner| owner.iface);
            Box::new(Rare {
                ranges,
                parent,
                owner: Mutex::new(owner),
                owned,
                page_size,
                asynchronous,
            })
        });
        Unique::new_with(|| Self {
            domain: Arc::clone(domain),
            registered: SetOnce::new(),
            range,
            access: attr.access,
            flags,
            context: attr.context,
            rare,
            bindings: OnceLock::new(),
            dependents: AtomicU32::new(0),
            state: AtomicU8::new(RegionState::Pending as u8),
        })
    }

    #[inline]
    pub(super) fn state(&self) -> RegionState {
        RegionState::from_u8(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn domain(&self) -> &Arc<DomainInner> {
        &self.domain
    }

    pub(crate) fn range(&self) -> AddressRange {
        self.range
    }

    pub(super) fn flags(&self) -> MrFlags {
        self.flags
    }

    pub(super) fn context(&self) -> u64 {
        self.context
    }

    pub(super) fn id(&self) -> Option<RegionId> {
        self.rare.as_ref()?.asynchronous.as_ref().map(|(id, _)| *id)
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

    #[inline]
    pub(super) fn owns_memory(&self) -> bool {
        self.owned_memory().is_some()
    }

    /// The iface of memory that the region owns.
    #[inline]
    pub(super) fn owned_memory(&self) -> Option<IfaceKind> {
        self.rare.as_ref()?.owned
    }

    /// For [`super::scope`]: the borrow of host memory outlives the registration, as if the region
    /// owned it.
    pub(super) fn borrow_for_scope(&mut self) {
        self.rare.get_or_insert_default().owned = Some(IfaceKind::SYSTEM);
    }

    #[inline]
    pub(super) fn starts_enabled(&self) -> bool {
        let mode = self.domain.effective();
        let waits_for_counter =
            mode.contains(MrMode::RMA_EVENT) && self.flags.contains(MrFlags::RMA_EVENT);
        !mode.contains(MrMode::ENDPOINT) && !waits_for_counter
    }

    #[inline]
    pub(crate) fn registered(&self) -> Option<ProviderRegion> {
        self.registered.get().map(Registration::region)
    }

    pub(super) fn recorded_decision(&self) -> Option<Arc<Decision>> {
        self.registered.get()?.decision.clone()
    }

    /// Runs a registration. If it panics, nobody knows whether the memory is registered, so memory
    /// that the region owns is leaked.
    #[inline(always)]
    pub(super) fn keep_if_panics<T>(&self, register: impl FnOnce() -> T) -> T {
        struct Keep<'a>(&'a RegionInner);

        impl Drop for Keep<'_> {
            #[cold]
            fn drop(&mut self) {
                std::mem::forget(self.0.release_owner());
            }
        }

        let keep = Keep(self);
        let registered = register();
        std::mem::forget(keep);
        registered
    }

    /// Lets go of the memory, once closed.
    pub(super) fn release_owner(&self) -> Option<MemoryOwner> {
        self.rare.as_ref()?.owner.lock().take()
    }

    pub(super) fn bindings(&self) -> &Bindings {
        self.bindings.get_or_init(Box::default)
    }

    #[inline]
    pub(super) fn registration(&self, operation: &'static str) -> Result<&Registration> {
        self.registered.get().ok_or_else(|| {
            Error::new(ErrorKind::BadState, operation)
                .context("state", format_args!("{:?}", self.state()))
                .remedy("the registration has not completed: wait for its event")
        })
    }

    /// How far into the region `range` starts, if it lies in one of its ranges.
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

    /// Ends a registration that worked, of a region that nobody else knows yet.
    #[inline]
    pub(super) fn complete_unshared(
        &mut self,
        region: &ProviderRegion,
        decision: Option<Arc<Decision>>,
    ) {
        self.registered.set_unshared(Registration::new(region, decision));
        *self.state.get_mut() = self.first_state() as u8;
    }

    /// Ends a registration that worked.
    #[inline]
    pub(super) fn complete(&self, outcome: PathOutcome) {
        self.registered.set(Registration::new(&outcome.region, outcome.decision));
        self.state.store(self.first_state() as u8, Ordering::Release);
    }

    #[inline]
    fn first_state(&self) -> RegionState {
        if self.starts_enabled() { RegionState::Enabled } else { RegionState::Disabled }
    }

    /// For the worker: claims a pending registration; `false` if it was given up.
    pub(super) fn start_registering(&self) -> bool {
        let (from, to) = (RegionState::Pending as u8, RegionState::Registering as u8);
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// For the worker: ends a registration that failed, unless the region was given up before.
    pub(super) fn fail(&self) {
        let (from, to) = (RegionState::Registering as u8, RegionState::Failed as u8);
        // Nothing else is done about a region that is closed already.
        let _was_given_up =
            self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_err();
    }

    /// For the worker: what a close waits for.
    pub(super) fn ended(&self) -> Option<Arc<Ended>> {
        self.rare.as_ref()?.asynchronous.as_ref().map(|(_, ended)| Arc::clone(ended))
    }

    pub(crate) fn parent(&self) -> Option<&Shared<Self>> {
        self.rare.as_ref()?.parent.as_ref()
    }

    pub(super) fn add_dependent(&self) {
        self.dependents.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn remove_dependent(&self) {
        self.dependents.fetch_sub(1, Ordering::AcqRel);
    }

    /// Takes back a registration that did not begin, and waits for one that did; `true` if nothing
    /// was registered.
    ///
    /// Either way the worker holds nothing of the region afterwards.
    fn give_up_or_wait(&self) -> bool {
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
        if self.rare.is_some() && self.give_up_or_wait() {
            return Ok(());
        }
        let dependents = self.dependents.load(Ordering::Acquire);
        if dependents > 0 {
            return Err(Error::new(ErrorKind::Busy, "close region")
                .context("range", self.range)
                .context("dependents", dependents)
                .remedy("close its sub-regions and free or unbind its windows first"));
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

    fn deregister(&self) -> Result<()> {
        let open = matches!(self.state(), RegionState::Enabled | RegionState::Disabled);
        // In a forked child this is a copy: the registration is the parent's.
        let open = open && self.domain.process.is_current();
        if let Some(registration) = self.registered.get().filter(|_| open) {
            self.domain.provider().deregister(registration.region())?;
            self.state.store(RegionState::Closed as u8, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        // Freed only once the NIC cannot reach it: the allocator would let the NIC write to other
        // data. A panic leaks it too.
        let owner = ManuallyDrop::new(self.release_owner());
        match self.deregister() {
            Ok(()) => drop(ManuallyDrop::into_inner(owner)),
            Err(error) => {
                tracing::error!(range = %self.range, %error, "a region could not be deregistered; its memory is leaked");
            }
        }
        if let Some(parent) = self.parent() {
            parent.remove_dependent();
        }
    }
}
