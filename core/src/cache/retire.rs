//! How entries end: eviction, retirement, deregistration.

use std::sync::Arc;

use smallvec::smallvec;

use super::{
    Source,
    entry::{Entry, state},
    radix,
    shared::{Retired, Retirees, Shared, Structure, Telling, Told},
    sync::Ordering,
};
use crate::{ProcessMark, Rejected};

/// Entries that one eviction may give up beyond what is needed: this part of those there are, and
/// no more than [`MOST_AT_ONCE`]. They share one barrier.
const BATCH_PART: usize = 16;
pub(super) const MOST_AT_ONCE: usize = 64;

/// What an eviction is to give up.
struct Wanted {
    /// So many entries,
    batch: usize,
    /// and more if they have not so many bytes together.
    bytes: u64,
    /// Also those that were hit since the hand last passed.
    all: bool,
    /// Whether others than the caller may look up meanwhile.
    others_look: bool,
}

/// Ends deregistrations, those too that a source leaves by a panic: the ones behind it are tried
/// again.
struct EndsFlights<'a, S: Source> {
    shared: &'a Shared<S>,
    many: usize,
    retired: &'a mut Retirees<S>,
    refused: Vec<Retired<S>>,
    telling: &'a mut Telling,
}

impl<S: Source> Drop for EndsFlights<'_, S> {
    fn drop(&mut self) {
        self.refused.extend(self.retired.drain(..));
        if !self.refused.is_empty() {
            // Before they end: nobody is to find them neither under way nor here.
            self.shared.structure.lock().stuck.append(&mut self.refused);
        }
        if self.shared.flights.end(self.many) {
            self.shared.tell_that_flights_ended(self.telling);
        }
    }
}

/// A watch of what is registered no more. A monitor that tells each cache once begins and ends that
/// with a cache's first subscription and its last, at a price: so the last is not ended right
/// before another begins.
pub(super) struct Kept<'a, S: Source> {
    shared: &'a Shared<S>,
    watch: Option<S::Watch>,
}

impl<S: Source> Drop for Kept<'_, S> {
    #[inline]
    fn drop(&mut self) {
        if let Some(watch) = self.watch.take() {
            self.shared.source.unwatch(watch);
        }
    }
}

#[cold]
fn take_told<S: Source>(structure: &mut Structure<S>, index: u32) -> Option<Box<[Arc<Told>]>> {
    structure.told.remove(&index).map(Vec::into_boxed_slice)
}

impl<S: Source> Shared<S> {
    /// Evicts until one more entry of `len` bytes fits; `false` if what is left is in use.
    #[inline]
    pub(super) fn make_room(
        &self,
        structure: &mut Structure<S>,
        len: u64,
        retired: &mut Retirees<S>,
    ) -> bool {
        self.fits(structure, len) || self.evict_for(structure, len, retired)
    }

    #[inline]
    fn fits(&self, structure: &Structure<S>, len: u64) -> bool {
        structure.count < self.limits.max_count
            && structure.bytes.saturating_add(len) <= self.limits.max_bytes
    }

    #[inline(never)]
    fn evict_for(&self, structure: &mut Structure<S>, len: u64, retired: &mut Retirees<S>) -> bool {
        // The caller is one of them. Asked before the look at the slots: so that sees what those
        // who left did with theirs.
        let others_look = self.blocks.lookers() > 1;
        if !self.has_idle(structure) {
            return false;
        }
        // Twice round: the first pass may only clear the marks of use.
        let mut looks = 2 * structure.made as usize + 1;
        while !self.fits(structure, len) && looks > 0 {
            let too_many =
                structure.bytes.saturating_add(len).saturating_sub(self.limits.max_bytes);
            let batch = (structure.count / BATCH_PART).clamp(1, MOST_AT_ONCE);
            let wanted = Wanted { batch, bytes: too_many, all: false, others_look };
            self.evict(structure, &wanted, &mut looks, retired);
        }
        self.fits(structure, len)
    }

    /// Evicts idle entries, of which [`Shared::has_idle`] marked those that are not; how many, and
    /// which, `wanted` says.
    fn evict(
        &self,
        structure: &mut Structure<S>,
        wanted: &Wanted,
        looks: &mut usize,
        retired: &mut Retirees<S>,
    ) {
        retired.reserve(wanted.batch.min(structure.count).min(MOST_AT_ONCE));
        if wanted.others_look {
            self.evict_beside_lookups(structure, wanted, looks, retired);
            return;
        }
        // Nobody can have taken a lease since.
        let (mut given_up, mut found) = (0, 0);
        while (given_up < wanted.batch || found < wanted.bytes)
            && let Some((index, word)) = self.next_idle(structure, wanted.all, looks)
        {
            let entry = self.entries.at(index);
            // What dies in this moment is collected from the dead stack.
            if self.end(structure, entry, word) {
                found += entry.len();
                self.retire(structure, index, retired);
                given_up += 1;
            }
        }
    }

    fn evict_beside_lookups(
        &self,
        structure: &mut Structure<S>,
        wanted: &Wanted,
        looks: &mut usize,
        retired: &mut Retirees<S>,
    ) {
        let mut candidates = std::mem::take(&mut structure.candidates);
        let mut found = 0;
        while (candidates.len() < wanted.batch || found < wanted.bytes)
            && let Some((index, word)) = self.next_idle(structure, wanted.all, looks)
        {
            let entry = self.entries.at(index);
            let marked = word | state::EVICTING;
            if entry
                .state
                .compare_exchange(word, marked, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
            {
                candidates.push(index);
                found += entry.len();
            }
        }
        let scanned = !candidates.is_empty() && self.barrier();
        if scanned {
            self.scan(structure);
        }
        for index in candidates.drain(..) {
            let entry = self.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let idle = scanned && entry.leased_at.load(Ordering::Relaxed) != structure.scan;
            // One that died meanwhile is on the dead stack and is collected from there.
            if idle && word & state::DEAD == 0 && self.end(structure, entry, word) {
                self.retire(structure, index, retired);
            } else {
                entry.state.fetch_and(!state::EVICTING, Ordering::Release);
            }
        }
        structure.candidates = candidates;
    }

    /// Where the hand comes by next that is live, was in no lease at the last scan and, unless
    /// `all` will do, was not hit since the hand last passed; with its state.
    fn next_idle(
        &self,
        structure: &mut Structure<S>,
        all: bool,
        looks: &mut usize,
    ) -> Option<(u32, u32)> {
        while *looks > 0 {
            *looks -= 1;
            structure.hand = if structure.hand >= structure.made { 1 } else { structure.hand + 1 };
            let entry = self.entries.at(structure.hand);
            let word = entry.state.load(Ordering::Acquire);
            if !state::is_live(word) || entry.leased_at.load(Ordering::Relaxed) == structure.scan {
                continue;
            }
            if all || word & state::UNUSED != 0 {
                return Some((structure.hand, word));
            }
            entry.state.fetch_or(state::UNUSED, Ordering::Relaxed);
        }
        None
    }

    /// Ends the use of an entry that nobody uses, if its state is `word` still: it counts no more,
    /// and is for [`Shared::retire`].
    fn end(&self, structure: &mut Structure<S>, entry: &Entry<S>, word: u32) -> bool {
        let (ok, seen) = (Ordering::AcqRel, Ordering::Relaxed);
        let ended = entry.state.compare_exchange(word, state::unfindable(word), ok, seen).is_ok();
        if ended {
            structure.count -= 1;
            structure.bytes -= entry.len();
            structure.evictions += 1;
        }
        ended
    }

    /// Marks the entries that are leased as far as can be seen without a barrier; `false` if all
    /// are.
    fn has_idle(&self, structure: &mut Structure<S>) -> bool {
        structure.scan = structure.scan.wrapping_add(1);
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

    /// Passes the barrier after which no lookup takes what was ended before it; `false` if there is
    /// none any more.
    pub(super) fn barrier(&self) -> bool {
        let passed = self.barrier.heavy();
        // The cache cannot rule out leases any more: all regions stay registered, and lookups find
        // none. The gate is closed once, however often the kernel refuses: the count of closings
        // must not overflow.
        if !passed && self.gate.shut() {
            tracing::error!(
                "membarrier is refused after it worked: the registration cache is closed for good, \
                 and its regions stay registered until it is dropped; let the process call \
                 membarrier(2), or open the domain after the filter is installed"
            );
        }
        passed
    }

    /// Marks every entry that somebody holds a lease of with the scan's number. After a
    /// [barrier](Shared::barrier).
    pub(super) fn scan(&self, structure: &mut Structure<S>) {
        structure.scan = structure.scan.wrapping_add(1);
        let scan = structure.scan;
        self.blocks.leased(|index| self.entries.at(index).leased_at.store(scan, Ordering::Relaxed));
    }

    /// Takes an entry that nobody can find or use out of the table, and makes it free.
    #[inline(always)]
    pub(super) fn retire(
        &self,
        structure: &mut Structure<S>,
        index: u32,
        retired: &mut Retirees<S>,
    ) {
        let entry = self.unlink(structure, index);
        // SAFETY: it was registered, and no lookup takes it any more. There is no lease of it: a
        // scan found none after the entry's end and a barrier, or after it or before it
        // where nobody else could take one, or the cache is at its end, which borrows of it
        // do not outlive.
        let (region, watch) = unsafe { entry.take() };
        let told = if structure.told.is_empty() { None } else { take_told(structure, index) };
        entry.free();
        structure.free.push(index);
        structure.retired += 1;
        retired.push(Retired { region: Some(region), watch: Some(watch), told });
    }

    /// The same of one whose registration failed.
    pub(super) fn retire_failed(
        &self,
        structure: &mut Structure<S>,
        index: u32,
        retired: &mut Retirees<S>,
    ) {
        let entry = self.unlink(structure, index);
        structure.failures.remove(&index);
        let told = take_told(structure, index);
        entry.free();
        structure.free.push(index);
        structure.retired += 1;
        retired.push(Retired { region: None, watch: None, told });
    }

    #[inline(always)]
    fn unlink(&self, structure: &mut Structure<S>, index: u32) -> &Entry<S> {
        let entry = self.entries.at(index);
        let (start, last) = entry.bounds();
        if let Some((first, last)) = radix::pages(start, last) {
            self.radix.remove(&mut structure.shape, first, last, index);
        }
        entry
    }

    /// Deregisters what is there, with no lock held.
    #[inline]
    pub(super) fn deregister(&self, retired: &mut Retirees<S>, telling: &mut Telling) {
        if !retired.is_empty() {
            self.deregister_each(retired, telling, None);
        }
    }

    /// The same, but one of them is watched as long as the caller keeps what is returned.
    #[inline]
    pub(super) fn deregister_for_another(
        &self,
        retired: &mut Retirees<S>,
        telling: &mut Telling,
    ) -> Kept<'_, S> {
        let mut kept = Kept { shared: self, watch: None };
        if !retired.is_empty() {
            self.deregister_each(retired, telling, Some(&mut kept));
        }
        kept
    }

    #[inline(never)]
    fn deregister_each(
        &self,
        retired: &mut Retirees<S>,
        telling: &mut Telling,
        mut kept: Option<&mut Kept<'_, S>>,
    ) {
        let many = retired.len();
        let mut ends = EndsFlights { shared: self, many, retired, refused: Vec::new(), telling };
        while let Some(next) = ends.retired.last_mut() {
            // It stays in the list meanwhile: its watch is not to be lost if the source panics.
            let ended = next.region.take().map(|region| self.source.deregister(region));
            let Some(mut one) = ends.retired.pop() else { break };
            match ended {
                Some(Err(Rejected { value, error })) => {
                    tracing::error!(%error, "a cached region could not be deregistered; it is tried again");
                    one.region = Some(value);
                    ends.refused.push(one);
                }
                Some(Ok(())) | None => {
                    let mut watch = one.watch.take();
                    if watch.is_some()
                        && let Some(kept) = &mut kept
                    {
                        std::mem::swap(&mut watch, &mut kept.watch);
                    }
                    if let Some(watch) = watch {
                        self.source.unwatch(watch);
                    }
                    if let Some(waiting) = one.told.take() {
                        ends.telling.extend(waiting);
                    }
                }
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_that_flights_ended(&self, telling: &mut Telling) {
        let mut structure = self.structure.lock();
        telling.extend(self.told_after(&mut structure));
        self.settled.notify_all();
    }

    /// Who is to be told now that no deregistration is under way, if none is.
    pub(super) fn told_after(&self, structure: &mut Structure<S>) -> Telling {
        if structure.told_after.is_empty() || self.flights.any(structure.retired) {
            return Vec::new();
        }
        self.flights.awaited();
        std::mem::take(&mut structure.told_after)
    }

    /// Deregisters a region that belongs to no entry and that `process` registered.
    pub(super) fn drop_alone(&self, region: S::Region, process: ProcessMark) {
        if !process.is_current() {
            // A copy of what a process registered that this one was forked from.
            std::mem::forget(region);
            return;
        }
        if self.gate.is_forked() {
            // The lock is not taken: a thread of the parent may have held it at the fork. So a
            // failed deregistration is not retried.
            if let Err(Rejected { error, .. }) = self.source.deregister(region) {
                tracing::error!(%error, "a forked child could not deregister a region");
            }
            return;
        }
        self.structure.lock().retired += 1;
        let retired = &mut smallvec![Retired { region: Some(region), watch: None, told: None }];
        self.deregister(retired, &mut Telling::new());
    }

    /// Gives back everything that is idle, and waits for deregistrations under way; `false` if
    /// there was nothing.
    pub(super) fn give_back(&self, telling: &mut Telling) -> bool {
        if self.gate.is_forked() {
            return false;
        }
        let mut retired = Retirees::new();
        let mut structure = self.structure.lock();
        let others = self.flights.any(structure.retired);
        self.collect(&mut structure, &mut retired);
        // Before the look at the slots, as in `evict_for`.
        let others_look = self.blocks.lookers() > 0;
        let mut looks = if self.has_idle(&mut structure) { structure.made as usize } else { 0 };
        let everything = Wanted { batch: usize::MAX, bytes: u64::MAX, all: true, others_look };
        while looks > 0 {
            self.evict(&mut structure, &everything, &mut looks, &mut retired);
        }
        drop(structure);
        let any = !retired.is_empty();
        self.deregister(&mut retired, telling);
        self.wait_for_deregistrations();
        any || others
    }

    /// Takes out whatever is left, leases that were forgotten included. Only for the cache's end.
    pub(super) fn clear(&self) {
        self.give_back(&mut Telling::new());
        let mut retired = Retirees::new();
        let mut structure = self.structure.lock();
        for index in 1..=structure.made {
            let word = self.entries.at(index).state.load(Ordering::Acquire);
            if state::is_registered(word) {
                self.retire(&mut structure, index, &mut retired);
            }
        }
        drop(structure);
        self.deregister(&mut retired, &mut Telling::new());
        let stuck = std::mem::take(&mut self.structure.lock().stuck);
        for mut stuck in stuck {
            if let Some(watch) = stuck.watch.take() {
                self.source.unwatch(watch);
            }
        }
    }
}
