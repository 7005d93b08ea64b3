//! How entries end: eviction, collection of the dead, deregistration.

use std::sync::Arc;

use super::{
    Source,
    entry::state,
    radix,
    shared::{Retired, Shared, Structure, Told},
    sync::Ordering,
};
use crate::{
    AddressRange, Rejected,
    monitor::{Cause, Invalidator},
};

/// Entries that one eviction may give up beyond what is needed: this part of those there are, and no more than
/// [`MOST_AT_ONCE`]. They share one barrier.
const BATCH_PART: usize = 16;
const MOST_AT_ONCE: usize = 64;

impl<S: Source> Shared<S> {
    /// Evicts until one more entry of `len` bytes fits; `false` if what is left is in use.
    pub(super) fn make_room(
        &self,
        structure: &mut Structure<S>,
        len: u64,
        retired: &mut Vec<Retired<S>>,
    ) -> bool {
        let fits = |structure: &Structure<S>| {
            structure.count < self.limits.max_count
                && structure.bytes.saturating_add(len) <= self.limits.max_bytes
        };
        if fits(structure) {
            return true;
        }
        if !self.has_idle(structure) {
            return false;
        }
        // Twice round: the first pass may only clear the marks of use.
        let mut looks = 2 * structure.made as usize + 1;
        while !fits(structure) && looks > 0 {
            let too_many = structure.bytes.saturating_add(len).saturating_sub(self.limits.max_bytes);
            let batch = (structure.count / BATCH_PART).clamp(1, MOST_AT_ONCE);
            let given_up = self.evict(structure, batch, too_many, false, &mut looks, retired);
            self.counters.evictions.fetch_add(given_up, Ordering::Relaxed);
        }
        fits(structure)
    }

    /// Evicts up to `batch` idle entries, more if they have not `bytes` bytes together, that were not hit since the
    /// hand last passed (or any, if `all`); returns how many.
    fn evict(
        &self,
        structure: &mut Structure<S>,
        batch: usize,
        bytes: u64,
        all: bool,
        looks: &mut usize,
        retired: &mut Vec<Retired<S>>,
    ) -> u64 {
        let mut candidates = std::mem::take(&mut structure.candidates);
        let mut found = 0;
        while *looks > 0 && (candidates.len() < batch || found < bytes) {
            *looks -= 1;
            structure.hand = if structure.hand >= structure.made { 1 } else { structure.hand + 1 };
            let entry = self.entries.at(structure.hand);
            let word = entry.state.load(Ordering::Relaxed);
            if !state::is_live(word) {
                continue;
            }
            if entry.leased_at.load(Ordering::Relaxed) == structure.scan {
                continue;
            }
            if !all && word & state::UNUSED == 0 {
                entry.state.fetch_or(state::UNUSED, Ordering::Relaxed);
                continue;
            }
            let marked = word | state::EVICTING;
            if entry.state.compare_exchange(word, marked, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                candidates.push(structure.hand);
                found += entry.len();
            }
        }
        let scanned = !candidates.is_empty() && self.scan(structure);
        let mut given_up = 0;
        for index in candidates.drain(..) {
            let entry = self.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let idle = scanned && entry.leased_at.load(Ordering::Relaxed) != structure.scan;
            // One that died meanwhile is on the dead stack and is collected from there.
            let ours = idle
                && word & state::DEAD == 0
                && entry
                    .state
                    .compare_exchange(word, state::unfindable(word), Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok();
            if ours {
                structure.count -= 1;
                structure.bytes -= entry.len();
                self.retire(structure, index, true, retired);
                given_up += 1;
            } else {
                entry.state.fetch_and(!state::EVICTING, Ordering::Release);
            }
        }
        structure.candidates = candidates;
        given_up
    }

    /// Marks the entries that are leased as far as can be seen without a barrier; `false` if all are.
    fn has_idle(&self, structure: &mut Structure<S>) -> bool {
        structure.scan += 1;
        let scan = structure.scan;
        let mut busy = 0;
        self.blocks.leased(|index| {
            let entry = self.entries.at(index);
            let counts = entry.state.load(Ordering::Relaxed) & (state::FREE | state::DEAD) == 0;
            if counts && entry.leased_at.load(Ordering::Relaxed) != scan {
                entry.leased_at.store(scan, Ordering::Relaxed);
                busy += 1;
            }
        });
        busy < structure.count
    }

    /// After a barrier, marks every entry that somebody holds a lease of with the scan's number.
    fn scan(&self, structure: &mut Structure<S>) -> bool {
        if !self.barrier.heavy() {
            // No lease can be ruled out any more: whatever is registered stays, and nothing is looked up.
            tracing::error!("membarrier is refused after it worked: the registration cache is closed");
            self.gate.close();
            return false;
        }
        structure.scan += 1;
        let scan = structure.scan;
        self.blocks.leased(|index| self.entries.at(index).leased_at.store(scan, Ordering::Relaxed));
        true
    }

    /// Retires the dead that nobody uses any more, and takes up what the provider refused before.
    pub(super) fn collect(&self, structure: &mut Structure<S>, retired: &mut Vec<Retired<S>>) {
        self.drain_dead(structure);
        for stuck in std::mem::take(&mut structure.stuck) {
            structure.in_flight += 1;
            retired.push(stuck);
        }
        if structure.dying.is_empty() || !self.scan(structure) {
            return;
        }
        let mut dying = std::mem::take(&mut structure.dying);
        dying.retain(|index| {
            let entry = self.entries.at(*index);
            let word = entry.state.load(Ordering::Acquire);
            if word & state::REGISTERING != 0 || entry.leased_at.load(Ordering::Relaxed) == structure.scan {
                return true;
            }
            self.retire(structure, *index, word & state::FAILED == 0, retired);
            false
        });
        structure.dying = dying;
    }

    /// Takes an entry that nobody can find or use out of the table, and makes it free.
    fn retire(
        &self,
        structure: &mut Structure<S>,
        index: u32,
        registered: bool,
        retired: &mut Vec<Retired<S>>,
    ) {
        let entry = self.entries.at(index);
        let key = entry.key();
        if let Some((first, last)) = radix::pages(key.start, key.last) {
            self.radix.remove(&mut structure.shape, first, last, index);
        }
        let (region, watch) = if registered {
            // SAFETY: it was registered, a scan after its end found no lease, and no lookup takes it any more.
            let (region, watch) = unsafe { entry.take() };
            (Some(region), Some(watch))
        } else {
            structure.failures.remove(&index);
            (None, None)
        };
        let told = if structure.told.is_empty() {
            Vec::new()
        } else {
            structure.told.remove(&index).unwrap_or_default()
        };
        entry.free();
        structure.free.push(index);
        structure.in_flight += 1;
        retired.push(Retired { region, watch, told });
    }

    /// Deregisters, with no lock held.
    pub(super) fn deregister(&self, retired: Vec<Retired<S>>) {
        if retired.is_empty() {
            return;
        }
        let many = retired.len();
        let mut refused = Vec::new();
        let mut told = Vec::new();
        for mut one in retired {
            match one.region.take().map(|region| self.source.deregister(region)) {
                Some(Err(Rejected { value, error })) => {
                    tracing::error!(%error, "a cached region could not be deregistered; it is tried again");
                    one.region = Some(value);
                    refused.push(one);
                }
                Some(Ok(())) | None => {
                    if let Some(watch) = one.watch.take() {
                        self.source.unwatch(watch);
                    }
                    told.append(&mut one.told);
                }
            }
        }
        let mut structure = self.structure.lock();
        structure.in_flight -= many;
        structure.stuck.append(&mut refused);
        if structure.in_flight == 0 {
            told.append(&mut structure.told_after);
        }
        self.settled.notify_all();
        drop(structure);
        // Those who are told may use the cache.
        drop(told);
    }

    /// Deregisters a region that no entry knew.
    pub(super) fn drop_alone(&self, region: S::Region) {
        if self.gate.is_forked() {
            // It is the parent's, if it is anybody's.
            std::mem::forget(region);
            return;
        }
        self.structure.lock().in_flight += 1;
        self.deregister(vec![Retired { region: Some(region), watch: None, told: Vec::new() }]);
    }

    /// Gives back everything that is idle, and waits for deregistrations under way; `false` if there was nothing.
    pub(super) fn give_back(&self) -> bool {
        if self.gate.is_forked() {
            return false;
        }
        let mut retired = Vec::new();
        let mut structure = self.structure.lock();
        let others = structure.in_flight > 0;
        self.collect(&mut structure, &mut retired);
        let mut looks = if self.has_idle(&mut structure) { structure.made as usize } else { 0 };
        while looks > 0 {
            let given_up = self.evict(&mut structure, usize::MAX, u64::MAX, true, &mut looks, &mut retired);
            self.counters.evictions.fetch_add(given_up, Ordering::Relaxed);
        }
        drop(structure);
        let any = !retired.is_empty();
        self.deregister(retired);
        self.wait_for_deregistrations();
        any || others
    }

    /// Deregisters the dead that nobody uses, and waits until no deregistration is under way.
    pub(super) fn flush(&self) {
        if self.gate.is_forked() {
            return;
        }
        let mut retired = Vec::new();
        let mut structure = self.structure.lock();
        self.collect(&mut structure, &mut retired);
        drop(structure);
        self.deregister(retired);
        self.wait_for_deregistrations();
    }

    fn wait_for_deregistrations(&self) {
        let mut structure = self.structure.lock();
        while structure.in_flight > 0 {
            structure = self.settled.wait(structure);
        }
    }

    /// What the worker does when it is woken.
    pub(super) fn collect_once(&self) {
        let mut retired = Vec::new();
        let mut structure = self.structure.lock();
        self.collect(&mut structure, &mut retired);
        drop(structure);
        self.deregister(retired);
    }

    /// Marks everything dead that touches the range, and has `told` told once it is deregistered.
    pub(super) fn invalidate_then(&self, range: AddressRange, told: Told) {
        let told = Arc::new(told);
        let Some((first, last)) = radix::touched(range).filter(|_| !self.gate.is_forked()) else { return };
        // Nothing is retired while the lock is held, so that each entry is found here or was in flight before.
        let mut structure = self.structure.lock();
        self.invalidate(range, Cause::Application);
        self.radix.walk(first, last, &mut |index| {
            if self.entries.at(index).state.load(Ordering::Acquire) & state::DEAD != 0 {
                let waiting = structure.told.entry(index).or_default();
                if !waiting.iter().any(|other| Arc::ptr_eq(other, &told)) {
                    waiting.push(Arc::clone(&told));
                }
            }
        });
        if structure.in_flight > 0 {
            structure.told_after.push(Arc::clone(&told));
        }
        drop(structure);
        self.waker.wake();
    }

    /// Takes out whatever is left, leases that were forgotten included. Only for the cache's end.
    pub(super) fn clear(&self) {
        self.give_back();
        let mut retired = Vec::new();
        let mut structure = self.structure.lock();
        for index in 1..=structure.made {
            let word = self.entries.at(index).state.load(Ordering::Acquire);
            if state::is_registered(word) {
                self.retire(&mut structure, index, true, &mut retired);
            }
        }
        drop(structure);
        self.deregister(retired);
        for mut stuck in std::mem::take(&mut self.structure.lock().stuck) {
            if let Some(watch) = stuck.watch.take() {
                self.source.unwatch(watch);
            }
        }
    }
}
