//! The way of a hit, and putting back: no lock, and no line written that another thread writes.

use std::hint::cold_path;

use super::{
    Key, Source,
    blocks::{Block, Slot},
    entry::{Entry, state},
    lease::Held,
    radix::Met,
    shared::Shared,
    sync::{self, Ordering},
};
use crate::monitor::Cause;

/// What the plain way found.
pub(super) enum Look<'c, S: Source> {
    Hit(Held<'c, S>),
    /// No entry, and the slot is free.
    Nothing,
    /// What takes another way to find out.
    Again,
}

impl<'c, S: Source> Look<'c, S> {
    #[inline(always)]
    pub(super) fn hit(self) -> Option<Held<'c, S>> {
        match self {
            Self::Hit(held) => Some(held),
            Self::Nothing | Self::Again => None,
        }
    }
}

impl<S: Source> Shared<S> {
    /// A lease of a live entry that covers the key, if the first look finds one, and it was used
    /// lately, and there is nobody to ask. The caller has seen the gate open and that lookups
    /// need no fence, and owns the slot's block.
    #[inline(always)]
    pub(super) fn plain_hit<'c>(&'c self, slot: &'c Slot, key: &Key) -> Look<'c, S> {
        // A buffer is often used again and again.
        let mut index = slot.last.load(Ordering::Relaxed);
        let mut entry = self.entries.at(index);
        if !entry.starts_near(key) {
            index = self.find_live(key);
            entry = self.entries.at(index);
            slot.last.store(index, Ordering::Relaxed);
        }
        if !slot.is_free() {
            cold_path();
            return Look::Again;
        }
        if let Some(held) = self.lease_plainly(slot, index, entry, key) {
            return Look::Hit(held);
        }
        if index == 0 {
            return Look::Nothing;
        }
        // A copy, as in `Cache::get`.
        let key = *key;
        if entry.covers(&key) { Look::Again } else { self.look_in_table(slot, &key) }
    }

    /// The same where the slot's last entry is none for the key: others may start in the same page.
    #[cold]
    #[inline(never)]
    fn look_in_table<'c>(&'c self, slot: &'c Slot, key: &Key) -> Look<'c, S> {
        let index = self.find_live(key);
        let entry = self.entries.at(index);
        slot.last.store(index, Ordering::Relaxed);
        match self.lease_plainly(slot, index, entry, key) {
            Some(held) => Look::Hit(held),
            None if index == 0 => Look::Nothing,
            None => Look::Again,
        }
    }

    /// Publishes a lease of an entry that was found, and takes it back unless the entry then is
    /// what the key asks for.
    #[inline(always)]
    fn lease_plainly<'c>(
        &'c self,
        slot: &'c Slot,
        index: u32,
        entry: &'c Entry<S>,
        key: &Key,
    ) -> Option<Held<'c, S>> {
        slot.lease(index);
        sync::light_unfenced();
        // Entry 0 stands for none and is free, which is not plain.
        let plain = state::is_plain(entry.state.load(Ordering::Acquire));
        // SAFETY: the lease is published, and the entry was seen live after that.
        if plain && unsafe { entry.leased_covers(key) } {
            slot.count_hit();
            return Some(Held { entry, slot });
        }
        cold_path();
        self.release_plainly(entry, slot);
        None
    }

    /// The same, however open the gate is and whatever the entry wants.
    #[inline]
    pub(super) fn hit<'c>(&'c self, block: &'c Block, key: &Key) -> Option<Held<'c, S>> {
        if !self.gate.is_open() {
            return None;
        }
        let index = self.find_live(key);
        if index == 0 {
            return None;
        }
        let slot = self.blocks.slot(block)?;
        let entry = self.entries.at(index);
        slot.lease(index);
        self.barrier.light();
        if self.may_hit(entry, key) {
            slot.count_hit();
            return Some(Held { entry, slot });
        }
        self.release_slot(entry, slot);
        None
    }

    /// An entry that may be live and cover the key, or 0.
    #[inline(always)]
    fn find_live(&self, key: &Key) -> u32 {
        match self.radix.find_at_page(key.start) {
            Ok(index) => index,
            Err(met) => {
                // A copy, as in `Cache::get`.
                let key = *key;
                self.find_live_from(met, &key)
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn find_live_from(&self, met: Met, key: &Key) -> u32 {
        self.radix.find_from(key.start, met, |index| {
            let entry = self.entries.at(index);
            state::is_live(entry.state.load(Ordering::Relaxed)) && entry.covers(key)
        })
    }

    /// Whether an entry may be used of which the caller published a lease.
    pub(super) fn may_hit(&self, entry: &Entry<S>, key: &Key) -> bool {
        let word = entry.state.load(Ordering::Acquire);
        if !state::is_live(word) || !entry.covers(key) {
            return false;
        }
        if word & state::CHECKED != 0 && !self.is_valid(entry) {
            return false;
        }
        entry.mark_used(word);
        true
    }

    /// Asks the source; what it does not confirm is dead.
    #[inline(never)]
    fn is_valid(&self, entry: &Entry<S>) -> bool {
        // SAFETY: the caller published a lease before it saw the entry live.
        match self.source.valid(unsafe { entry.watch() }) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, "a cached region could not be confirmed"),
        }
        if entry.kill(|_| true) {
            self.counters.invalidated(Cause::Identity);
            self.push_dead(self.entries.index_of(entry));
        }
        false
    }

    /// Puts back.
    pub(super) fn release(&self, held: &Held<'_, S>) {
        self.release_slot(held.entry, held.slot);
    }

    /// Clears a slot, where lookups need no fence.
    #[inline(always)]
    pub(super) fn release_plainly(&self, entry: &Entry<S>, slot: &Slot) {
        slot.entry.store(0, Ordering::Release);
        sync::light_unfenced();
        // The entry may be another's by now, which at worst wakes the worker for nothing.
        if entry.state.load(Ordering::Relaxed) & state::DEAD != 0 {
            self.last_put();
        }
    }

    pub(super) fn release_slot(&self, entry: &Entry<S>, slot: &Slot) {
        slot.entry.store(0, Ordering::Release);
        self.barrier.light();
        if entry.state.load(Ordering::Relaxed) & state::DEAD != 0 {
            self.last_put();
        }
    }

    #[cold]
    #[inline(never)]
    fn last_put(&self) {
        if !self.gate.is_forked() {
            self.waker.wake();
        }
    }
}
