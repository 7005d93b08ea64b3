//! The state behind a [`MemoryRegion`]: small, because a million of them may be live.

use std::{
    any::Any,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU32, Ordering},
    },
};

use parking_lot::{Condvar, Mutex};

use super::{
    DomainInner, MrAttr, RegionState,
    set_once::SetOnce,
    shared::{Shared, Unique},
};
use crate::{
    Access, AddressRange, Decision, Error, ErrorKind, LocalKey, MrFlags, MrMode, Result,
    counter::Counter, event_queue::RegionId, path::PathOutcome, provider::ProviderRegion,
};

/// Memory that a region keeps alive.
pub(super) type MemoryOwner = Arc<dyn Any + Send + Sync>;

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

/// A [`ProviderRegion`] and its decision. The numbers of the region lie apart, and not in its own order, so that they are
/// copied from where the provider has just written them one by one: one wide load over several narrow stores that are still
/// under way waits for all of them.
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
    pub(super) owned: bool,
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
    pub(super) counter: Mutex<Option<Arc<Counter>>>,
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
            let owned = owner.is_some();
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
        self.rare.as_ref().is_some_and(|rare| rare.owned)
    }

    /// For [`super::scope`]: the borrow outlives the registration, as if the region owned the memory.
    pub(super) fn borrow_for_scope(&mut self) {
        self.rare.get_or_insert_default().owned = true;
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

    /// Takes back a registration that did not begin, and waits for one that did; `true` if nothing was registered.
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
        if let Some(bindings) = self.bindings.get()
            && bindings.counter.lock().as_ref().is_some_and(|counter| !counter.is_closed())
        {
            return Err(Error::new(ErrorKind::Busy, "close region")
                .context("range", self.range)
                .context("bound", "counter")
                .remedy("close the counter first"));
        }
        self.deregister()
    }

    fn deregister(&self) -> Result<()> {
        let open = matches!(self.state(), RegionState::Enabled | RegionState::Disabled);
        if let Some(registration) = self.registered.get().filter(|_| open) {
            self.domain.provider().deregister(registration.region())?;
            self.state.store(RegionState::Closed as u8, Ordering::Release);
        }
        Ok(())
    }
}

impl Drop for RegionInner {
    fn drop(&mut self) {
        if let Err(error) = self.deregister() {
            tracing::error!(range = %self.range, %error, "a region could not be deregistered; its memory is leaked");
            // The NIC can still reach it: giving it back to the allocator would let it write to other data.
            std::mem::forget(self.release_owner());
        }
        if let Some(parent) = self.parent() {
            parent.remove_dependent();
        }
    }
}
