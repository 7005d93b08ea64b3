//! What becomes of the dead: who retires them, and who deregisters them.

use std::sync::Arc;

use super::{
    Source,
    entry::state,
    radix,
    retire::MOST_AT_ONCE,
    shared::{Retirees, Shared, Structure, Telling, Told},
    sync::Ordering,
};
use crate::AddressRange;

/// So many more dead entries than those that were leased lately a miss leaves where they are, if it
/// takes a barrier to retire them.
#[cfg(not(loom))]
const CROWD: usize = 8;
#[cfg(loom)]
const CROWD: usize = 1;

impl<S: Source> Shared<S> {
    /// Takes up what the provider refused before, and what died; `false` if nothing of that waits
    /// for its last lease.
    fn take_up(&self, structure: &mut Structure<S>, retired: &mut Retirees<S>) -> bool {
        self.drain_dead(structure);
        structure.retired += (structure.stuck.len() + structure.left.len()) as u64;
        retired.extend(structure.stuck.drain(..));
        retired.extend(structure.left.drain(..));
        !structure.dying.is_empty()
    }

    /// Retires the dead for a miss, and leaves it to the worker to deregister them; unless it has
    /// much to do already. What is mapped next is often where something was unmapped: the dead
    /// would be in the way of what is registered there.
    #[inline]
    pub(super) fn tidy(&self, structure: &mut Structure<S>, retired: &mut Retirees<S>) {
        if structure.dying.len() > structure.leased_dead {
            self.tidy_up(structure, retired);
        }
    }

    #[cold]
    #[inline(never)]
    fn tidy_up(&self, structure: &mut Structure<S>, retired: &mut Retirees<S>) {
        // As in `evict_for`: the caller is one of them, and it is asked before the look at the
        // slots.
        let alone = self.blocks.lookers() == 1;
        let crowd = structure.dying.len() >= structure.leased_dead + CROWD;
        if !(alone || crowd && self.barrier()) {
            return;
        }
        let mut left = Retirees::new();
        self.retire_dead(structure, structure.drained, &mut left);
        if left.is_empty() {
            return;
        }
        structure.retired -= left.len() as u64;
        structure.left.extend(left);
        if structure.left.len() < MOST_AT_ONCE {
            // It may have taken up the rest already.
            self.waker.wake();
        } else {
            structure.retired += structure.left.len() as u64;
            retired.extend(structure.left.drain(..));
        }
    }

    /// Retires the dead that nobody uses any more, and takes up what the provider refused before.
    pub(super) fn collect(&self, structure: &mut Structure<S>, retired: &mut Retirees<S>) {
        if self.take_up(structure, retired) && self.barrier() {
            self.retire_dead(structure, structure.drained, retired);
        }
    }

    /// Retires those of the dead that nobody uses any more and that were drained by then, before a
    /// barrier or where nobody else may look up.
    fn retire_dead(&self, structure: &mut Structure<S>, drained: u64, retired: &mut Retirees<S>) {
        self.scan(structure);
        let mut dying = std::mem::take(&mut structure.dying);
        dying.retain(|&(index, by)| {
            let entry = self.entries.at(index);
            let word = entry.state.load(Ordering::Acquire);
            let leased = entry.leased_at.load(Ordering::Relaxed) == structure.scan;
            if by > drained || word & state::REGISTERING != 0 || leased {
                return true;
            }
            if word & state::FAILED == 0 {
                self.retire(structure, index, retired);
            } else {
                self.retire_failed(structure, index, retired);
            }
            false
        });
        structure.leased_dead = dying.len();
        structure.dying = dying;
    }

    /// Deregisters the dead that nobody uses, and waits until no deregistration is under way.
    pub(super) fn flush(&self) {
        if self.gate.is_forked() {
            return;
        }
        let mut retired = Retirees::new();
        let mut structure = self.structure.lock();
        self.collect(&mut structure, &mut retired);
        drop(structure);
        self.deregister(&mut retired, &mut Telling::new());
        self.wait_for_deregistrations();
    }

    pub(super) fn wait_for_deregistrations(&self) {
        let mut structure = self.structure.lock();
        self.flights.await_end();
        while self.flights.any(structure.retired) {
            structure = self.settled.wait(structure);
        }
        self.flights.awaited();
    }

    /// What the worker does when it is called. The barrier, a system call that interrupts every
    /// processor, holds up no miss.
    pub(super) fn collect_once(&self) {
        let mut retired = Retirees::new();
        let mut structure = self.structure.lock();
        if self.take_up(&mut structure, &mut retired) {
            let drained = structure.drained;
            drop(structure);
            let passed = self.barrier();
            structure = self.structure.lock();
            if passed {
                self.retire_dead(&mut structure, drained, &mut retired);
            }
        }
        drop(structure);
        self.deregister(&mut retired, &mut Telling::new());
    }

    /// Marks the entries dead that have a byte of the range. Calls `told` once all of them are
    /// deregistered.
    pub(super) fn invalidate_then(&self, range: AddressRange, told: Told) {
        let told = Arc::new(told);
        let Some(last) = range.len().checked_sub(1) else { return };
        let (start, last) = (range.start().0, range.start().0 + last);
        let Some((first_page, last_page)) = radix::touched(start, last) else { return };
        if self.gate.is_forked() {
            return;
        }
        // Nothing is retired while the lock is held, so that each entry is found here, or was left
        // to the worker or in flight before.
        let mut structure = self.structure.lock();
        self.invalidate_bytes(range);
        self.radix.walk(first_page, last_page, &mut |index| {
            let entry = self.entries.at(index);
            let dead = entry.state.load(Ordering::Acquire) & state::DEAD != 0;
            if dead && entry.overlaps(start, last) {
                let waiting = structure.told.entry(index).or_default();
                if !waiting.iter().any(|other| Arc::ptr_eq(other, &told)) {
                    waiting.push(Arc::clone(&told));
                }
            }
        });
        for left in &mut structure.left {
            let waiting = left.told.take().map(Vec::from).into_iter().flatten();
            left.told = Some(waiting.chain([Arc::clone(&told)]).collect());
        }
        if structure.told_after.is_empty() {
            self.flights.await_end();
        }
        structure.told_after.push(Arc::clone(&told));
        let now = self.told_after(&mut structure);
        drop(structure);
        drop(now);
        self.waker.wake();
    }
}
