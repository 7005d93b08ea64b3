//! The way of a miss: find again, wait for another thread's registration, or register outside every
//! lock.

use std::{ops::ControlFlow, sync::Arc};

use super::{
    Key, Source, Uncached,
    blocks::Slot,
    entry::state,
    lease::{Held, Lease},
    radix,
    shared::{Retirees, Shared, Structure, Telling},
    statistics::count,
    sync::{MutexGuard, Ordering, announce_by_exchange},
};
use crate::{Error, ErrorKind, Result, monitor::Invalidator};

/// How often a lookup lets others run before it does without the cache, while a monitor keeps the
/// gate closed.
const GATE_TRIES: u32 = 64;

/// Ends a registration that its source left by a panic.
struct Ends<'c, S: Source> {
    shared: &'c Shared<S>,
    index: u32,
    slot: &'c Slot,
    watch: Option<S::Watch>,
}

impl<S: Source> Drop for Ends<'_, S> {
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            self.shared.source.unwatch(watch);
        }
        let panicked =
            || Error::new(ErrorKind::BadState, "cached registration").context("source", "panicked");
        self.shared.fail(self.index, self.slot, Some(panicked()));
    }
}

impl<S: Source> Shared<S> {
    /// Registers, or leases what another thread registers meanwhile. The slot is free, and of a
    /// block that the caller owns.
    #[cold]
    #[inline(never)]
    pub(super) fn miss<'c>(
        &'c self,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c Slot,
        key: &Key,
    ) -> Result<Lease<'c, S>> {
        if let Some(why) = self.kept_out() {
            return self.alone(key, why);
        }
        let mut structure = self.structure.lock();
        let index = self.find_locked(key);
        if index != 0 {
            structure = match self.late(structure, index, slot, key) {
                ControlFlow::Continue(structure) => structure,
                ControlFlow::Break(lease) => return lease,
            };
        }
        self.register(structure, invalidator, slot, key, self.limits.merge)
    }

    /// The way of a miss that finds an entry under the lock; goes on with the lock if the entry is
    /// gone then.
    #[cold]
    #[inline(never)]
    fn late<'c>(
        &'c self,
        mut structure: MutexGuard<'c, Structure<S>>,
        mut index: u32,
        slot: &'c Slot,
        key: &Key,
    ) -> ControlFlow<Result<Lease<'c, S>>, MutexGuard<'c, Structure<S>>> {
        while index != 0 {
            slot.lease(index);
            let held = Held { entry: self.entries.at(index), slot };
            if let Some(error) = self.wait(structure, index, key) {
                count(&self.counters.failures);
                self.release(&held);
                return ControlFlow::Break(Err(error));
            }
            self.barrier.light();
            if self.may_hit(held.entry, key) {
                count(&self.counters.late_hits);
                return ControlFlow::Break(Ok(Lease::cached_anyhow(self, held)));
            }
            self.release(&held);
            if let Some(why) = self.kept_out() {
                return ControlFlow::Break(self.alone(key, why));
            }
            structure = self.structure.lock();
            index = self.find_locked(key);
        }
        ControlFlow::Continue(structure)
    }

    /// Why nothing may be looked up now.
    #[inline]
    fn kept_out(&self) -> Option<Uncached> {
        let off = self.limits.max_count == 0 || self.limits.max_bytes == 0;
        if self.gate.is_open() && !off { None } else { self.kept_out_now() }
    }

    #[cold]
    #[inline(never)]
    fn kept_out_now(&self) -> Option<Uncached> {
        for _ in 0..GATE_TRIES {
            if self.gate.is_forked() {
                return Some(Uncached::Forked);
            }
            if self.limits.max_count == 0 || self.limits.max_bytes == 0 {
                return Some(Uncached::Off);
            }
            if self.gate.is_open() {
                return None;
            }
            if self.gate.is_shut() {
                return Some(Uncached::Shut);
            }
            std::thread::yield_now();
        }
        Some(Uncached::ChangeUnderWay)
    }

    /// Waits until the entry that the caller leased under the lock is registered.
    ///
    /// If the registration failed, returns its error only if it had exactly the caller's range and
    /// rights. Otherwise a smaller range, or fewer rights, may well register.
    fn wait<'a>(
        &'a self,
        mut structure: MutexGuard<'a, Structure<S>>,
        index: u32,
        key: &Key,
    ) -> Option<Error> {
        let entry = self.entries.at(index);
        if entry.state.load(Ordering::Acquire) & state::REGISTERING == 0 {
            return None;
        }
        // The lease keeps the entry from being used anew, so that its state is about this
        // registration.
        let mut word = entry.state.fetch_or(state::WAITED, Ordering::AcqRel);
        while word & state::REGISTERING != 0 {
            structure = self.settled.wait(structure);
            word = entry.state.load(Ordering::Acquire);
        }
        let failed = word & state::FAILED != 0;
        let asked_for = entry.bounds() == (key.start, key.last) && entry.key().access == key.access;
        if failed && asked_for { structure.failures.get(&index).cloned() } else { None }
    }

    fn register<'c>(
        &'c self,
        mut structure: MutexGuard<'c, Structure<S>>,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c Slot,
        own: &Key,
        merge: bool,
    ) -> Result<Lease<'c, S>> {
        // Before `ends`, so that it is dropped after it, whatever happens.
        let mut telling = Telling::new();
        let mut retired = Retirees::new();
        let reserved = self.reserve(&mut structure, own, merge, &mut retired);
        if let Ok(index) = reserved {
            structure.registrations += 1;
            slot.lease(index);
        }
        // Announces the entry, which is in the table.
        drop(structure);
        announce_by_exchange();
        let index = match reserved {
            Ok(index) => index,
            Err(why) => {
                self.deregister(&mut retired, &mut telling);
                return self.alone(own, why);
            }
        };
        let mut ends = Ends { shared: self, index, slot, watch: None };
        let kept = self.deregister_for_another(&mut retired, &mut telling);
        let entry = self.entries.at(index);
        let key = &if merge { entry.key() } else { *own };
        let merged = merge && (key.start, key.last) != (own.start, own.last);
        // A change that begins from here on finds the entry. A change that began before is found
        // here.
        if let Some(cause) = self.changes.touching(key.start, key.last) {
            self.kill(index, cause);
        }
        let watch = self.source.watch(key, invalidator);
        drop(kept);
        let watch = match watch {
            Ok(watch) => ends.watch.insert(watch),
            Err(why) => {
                std::mem::forget(ends);
                self.fail(index, slot, None);
                if merged {
                    drop(telling);
                    return self.register_unmerged(invalidator, slot, own, &why);
                }
                let region = self.ask(key, &mut telling);
                self.count_instead(region.is_ok());
                return region.map(|region| Lease::alone(self, region, Uncached::Unwatched(why)));
            }
        };
        let checked = if self.source.checked(watch) { state::CHECKED } else { 0 };
        let region = self.ask(key, &mut telling);
        let watch = ends.watch.take().expect("set above");
        let region = match region {
            Ok(region) => region,
            Err(error) => {
                self.source.unwatch(watch);
                std::mem::forget(ends);
                if merged {
                    self.fail(index, slot, None);
                    drop(telling);
                    return self.register_unmerged(invalidator, slot, own, &error);
                }
                self.fail(index, slot, Some(error.clone()));
                return Err(error);
            }
        };
        entry.born.store(super::now(), Ordering::Relaxed);
        // SAFETY: this thread made the entry, and ends its registration below.
        unsafe { entry.put(region, watch) };
        std::mem::forget(ends);
        self.settle(index, checked);
        Ok(Lease::cached_anyhow(self, Held { entry, slot }))
    }

    /// Registers the caller's own range after a merged registration failed. The reason may be a
    /// neighbour's memory, for which the caller did not ask. The slot is free again.
    #[cold]
    #[inline(never)]
    fn register_unmerged<'c>(
        &'c self,
        invalidator: &Arc<dyn Invalidator>,
        slot: &'c Slot,
        own: &Key,
        why: &Error,
    ) -> Result<Lease<'c, S>> {
        tracing::debug!(%why, range = %own.range(), "a merged registration failed: not merging");
        let mut structure = self.structure.lock();
        // The lookup is counted by its final outcome, below.
        structure.registrations -= 1;
        let index = self.find_locked(own);
        if index != 0 {
            structure = match self.late(structure, index, slot, own) {
                ControlFlow::Continue(structure) => structure,
                ControlFlow::Break(lease) => return lease,
            };
        }
        self.register(structure, invalidator, slot, own, false)
    }

    /// Ends a registration, and wakes those who wait for it.
    fn settle(&self, index: u32, phase: u32) {
        let entry = self.entries.at(index);
        let mut word = entry.state.load(Ordering::Relaxed);
        loop {
            let next = word & !(state::REGISTERING | state::WAITED) | phase;
            match entry.state.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => word = now,
            }
        }
        if word & state::WAITED != 0 {
            let _between_their_look_and_their_wait = self.structure.lock();
            self.settled.notify_all();
        }
    }

    /// Ends a registration without a region. Threads that waited for just this range and these
    /// rights get the error; the others try themselves. Without an error all of them do, and the
    /// miss still counts as a registration.
    #[cold]
    #[inline(never)]
    fn fail(&self, index: u32, slot: &Slot, error: Option<Error>) {
        if let Some(error) = error {
            self.structure.lock().failures.insert(index, error);
            self.count_instead(false);
        }
        let entry = self.entries.at(index);
        if entry.kill(|_| true) {
            self.push_dead(index);
        }
        self.settle(index, state::FAILED);
        slot.entry.store(0, Ordering::Release);
        let mut retired = Retirees::new();
        let mut structure = self.structure.lock();
        self.collect(&mut structure, &mut retired);
        drop(structure);
        self.deregister(&mut retired, &mut Telling::new());
    }

    /// Counts a miss that made an entry as what became of it: in one step for those who read the
    /// counts.
    fn count_instead(&self, registered: bool) {
        let mut structure = self.structure.lock();
        structure.registrations -= 1;
        count(if registered { &self.counters.uncached } else { &self.counters.failures });
    }

    /// For a thread that can have no slot: it ends, or there are too many.
    pub(super) fn alone_without_slot(&self, key: &Key) -> Result<Lease<'_, S>> {
        self.alone(key, self.kept_out().unwrap_or(Uncached::Full))
    }

    /// A region for one lease only.
    #[cold]
    #[inline(never)]
    pub(super) fn alone(&self, key: &Key, why: Uncached) -> Result<Lease<'_, S>> {
        let region = match why {
            Uncached::Forked => self.source.register(key),
            _ => self.ask(key, &mut Telling::new()),
        };
        match region {
            Ok(region) => {
                count(&self.counters.uncached);
                Ok(Lease::alone(self, region, why))
            }
            Err(error) => {
                count(&self.counters.failures);
                Err(error)
            }
        }
    }

    /// Registers; when the provider is out of resources, once more after idle entries were given
    /// back.
    #[inline]
    fn ask(&self, key: &Key, telling: &mut Telling) -> Result<S::Region> {
        self.source.register(key).or_else(|error| self.ask_again(key, error, telling))
    }

    #[cold]
    #[inline(never)]
    fn ask_again(&self, key: &Key, error: Error, telling: &mut Telling) -> Result<S::Region> {
        if error.kind() != ErrorKind::OutOfResources || !self.give_back(telling) {
            return Err(error);
        }
        tracing::debug!(%error, "idle cached regions were given back; registering once more");
        self.source.register(key)
    }

    /// Takes an entry for the key or, with `merge`, for the range that it was merged to, which the
    /// entry then has. The entries that make room for it go to `retired`.
    fn reserve(
        &self,
        structure: &mut Structure<S>,
        key: &Key,
        merge: bool,
        retired: &mut Retirees<S>,
    ) -> Result<u32, Uncached> {
        if key.len() > self.limits.max_bytes {
            return Err(Uncached::TooLong);
        }
        let mut pages = radix::pages(key.start, key.last).ok_or(Uncached::NoPlace)?;
        self.drain_dead(structure);
        self.tidy(structure, retired);
        let mut key = *key;
        if merge {
            key = self.merge(structure, &key, retired);
            pages = radix::pages(key.start, key.last).ok_or(Uncached::NoPlace)?;
        }
        let (first, last) = pages;
        if !self.make_room(structure, key.len(), retired) {
            return Err(Uncached::Full);
        }
        let index = match structure.free.pop() {
            Some(index) => index,
            None if self.entries.ensure(structure.made + 1) => {
                structure.made += 1;
                structure.made
            }
            None => {
                // The worker may not have come to the dead yet.
                self.collect(structure, retired);
                structure.free.pop().ok_or(Uncached::Full)?
            }
        };
        let entry = self.entries.at(index);
        entry.fill(&key);
        if !self.radix.insert(&mut structure.shape, first, last, index) {
            if entry.kill(|_| true) {
                entry.free();
                structure.free.push(index);
            } else {
                // A hook saw it: it is on the dead stack, and counts until it is collected from
                // there.
                structure.count += 1;
                structure.bytes += key.len();
                entry.state.fetch_xor(state::REGISTERING | state::FAILED, Ordering::AcqRel);
            }
            return Err(Uncached::Full);
        }
        structure.count += 1;
        structure.bytes += key.len();
        Ok(index)
    }

    /// Grows the key over live entries of the same rights and memory that it overlaps or touches,
    /// and over those that these touch. All of them die; the idle ones go to `retired`.
    #[cold]
    #[inline(never)]
    fn merge(&self, structure: &mut Structure<S>, key: &Key, retired: &mut Retirees<S>) -> Key {
        let mut merged = *key;
        let mut into = Vec::new();
        loop {
            let before = merged;
            let start = merged.start.saturating_sub(1);
            let Some((first, last)) = radix::pages(start, merged.last.saturating_add(1)) else {
                break;
            };
            let mut near = Vec::new();
            self.radix.walk(first, last, &mut |index| near.push(index));
            for index in near {
                let entry = self.entries.at(index);
                let other = entry.key();
                let live = state::is_live(entry.state.load(Ordering::Acquire));
                if !live || into.contains(&index) || !other.joins(&merged) {
                    continue;
                }
                let start = merged.start.min(other.start);
                let union = Key { start, last: merged.last.max(other.last), ..merged };
                if union.len() > self.limits.max_bytes.min(self.source.longest()) {
                    continue;
                }
                merged = union;
                into.push(index);
            }
            if merged == before {
                break;
            }
        }
        if into.is_empty() {
            return merged;
        }
        for index in into {
            if self.entries.at(index).kill(|_| true) {
                count(&self.counters.merged);
                self.push_dead(index);
            }
        }
        // Also where the key contains all of them and did not grow: they are to go with the merge.
        self.collect(structure, retired);
        merged
    }
}
