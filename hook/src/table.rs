//! The subscriber table: a fixed number of invalidators that hooks read without a lock.
//!
//! # Implementation
//!
//! A *pass* is one use of the table by a reader: a hook, a monitor's thread or a call of the
//! application. The reader counts itself in, reads which slots are occupied, notifies the
//! invalidators in them, and counts itself out. It never waits. A writer holds the lock of
//! [`Subscribers`], changes the table, and waits until every pass that may have seen the old table
//! has ended. Therefore:
//! - After an invalidator was removed, no pass uses it, and its reference may be dropped.
//! - After an invalidator was added, every pass in flight notifies it: passes that saw the table
//!   without it have ended. Without this wait, a change in such a pass could free memory that was
//!   registered just after the subscription, and no cache would be notified.
//!
//! Like SRCU, the table counts passes on two sides, and the writer switches sides twice. Each time
//! it waits for the side that it leaves:
//! - A pass may read the current side, be delayed, and count itself in after the writer has left
//!   that side. The second switch waits for this pass.
//! - New passes count on the other side, so that continuous new passes cannot block a writer
//!   forever.
//! - A pass that counts itself after the writer saw zero reads the slots after the writer changed
//!   them. Its count, its read of the slots, the writer's changes and the writer's reads are all
//!   sequentially consistent.
//!
//! The counters are spread over cache lines by stack address, so that threads rarely share a line.
//! Each line has an exclusive counter, which one pass at a time uses. That pass begins with one
//! locked instruction and ends with a plain store. A writer that sees the store sees everything
//! that the pass did. Passes that find this counter in use (other threads, or a signal handler
//! within a pass) count on the line's second counter, with two locked instructions.

use std::{
    collections::HashMap,
    ptr,
    sync::{
        Arc,
        atomic::{
            AtomicPtr, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, Release, SeqCst},
        },
    },
    time::Duration,
};

use hmem_core::{AddressRange, Error, ErrorKind, Result, monitor::Invalidator};
use parking_lot::Mutex;

use crate::{MonitorName, Wipeable, WipedOnFork};

/// The maximum number of invalidators in a table: one for each cache of the process.
pub const SLOTS: usize = 64;

const LINES: usize = 16;

/// The two pass counters of a cache line. Lower half of each: passes in flight. Upper half: all
/// passes that ever began.
#[repr(align(64))]
#[derive(Debug)]
struct Line {
    /// The exclusive counter: no other thread changes it while a pass in flight uses it.
    alone: AtomicU64,
    beside: AtomicU64,
}

impl Line {
    fn counters(&self) -> [&AtomicU64; 2] {
        [&self.alone, &self.beside]
    }
}

const PASS: u64 = 1 << 32 | 1;
const UNDER_WAY: u64 = (1 << 32) - 1;

/// A table of invalidators that hooks read without a lock.
#[repr(C)]
#[derive(Debug)]
pub struct SubscriberTable {
    taken: AtomicU64,
    side: AtomicUsize,
    slots: [AtomicPtr<Arc<dyn Invalidator>>; SLOTS],
    passes: [[Line; LINES]; 2],
}

// SAFETY: zeroes are an empty table with no pass in flight. `Invalidator` is Sync, and only passes
// turn the pointers into references. The table needs no drop: a child forgets the invalidators
// together with the parent's other memory.
unsafe impl Wipeable for SubscriberTable {}

/// A type that contains a subscriber table. Monitors add fields that their hooks need.
pub trait HasTable: Wipeable {
    /// Returns the table.
    fn table(&self) -> &SubscriberTable;
}

impl HasTable for SubscriberTable {
    #[inline]
    fn table(&self) -> &SubscriberTable {
        self
    }
}

/// Guard of one reader's pass over the table. No invalidator in the table is freed until the guard
/// is dropped.
#[derive(Debug)]
pub struct TableReadGuard<'a> {
    table: &'a SubscriberTable,
    line: &'a Line,
    /// The value that dropping this guard stores in the thread's own counter. `None` if the guard
    /// is counted in the shared counter.
    after: Option<u64>,
    taken: u64,
}

impl SubscriberTable {
    /// Begins a pass: a use of the table that lasts until the guard is dropped.
    #[inline]
    pub fn pass(&self) -> TableReadGuard<'_> {
        let on_stack = 0_u8;
        let line = (ptr::addr_of!(on_stack).addr() >> 14) % LINES;
        let line = &self.passes[self.side.load(SeqCst) & 1][line];
        let seen = line.alone.load(Relaxed);
        let begun = seen.wrapping_add(PASS);
        let free = seen & UNDER_WAY == 0;
        let after = if free && line.alone.compare_exchange(seen, begun, SeqCst, Relaxed).is_ok() {
            Some(begun - 1)
        } else {
            line.beside.fetch_add(PASS, SeqCst);
            None
        };
        TableReadGuard { table: self, line, after, taken: self.taken.load(SeqCst) }
    }

    /// Returns a number that changes whenever a pass begins, or `None` while a pass is in flight.
    /// Two equal numbers mean that no pass began between the two calls.
    #[inline]
    pub fn quiet_stamp(&self) -> Option<u64> {
        let counters = self.passes.iter().flatten().flat_map(Line::counters);
        // The sum of the lower halves does not carry: there are far fewer threads.
        let sum = counters.fold(0_u64, |sum, counter| sum.wrapping_add(counter.load(SeqCst)));
        (sum & UNDER_WAY == 0).then_some(sum >> 32)
    }

    /// Returns the numbers of the slots that contain an invalidator.
    #[inline]
    pub(crate) fn taken(&self) -> impl Iterator<Item = usize> {
        let taken = self.taken.load(SeqCst);
        (0..SLOTS).filter(move |slot| taken >> slot & 1 != 0)
    }

    /// Waits until every read guard that existed at the call is dropped. The caller is the only
    /// writer.
    fn wait_for_passes(&self) {
        for _ in 0..2 {
            let old = self.side.fetch_add(1, SeqCst) & 1;
            for counter in self.passes[old].iter().flat_map(Line::counters) {
                let mut waits = 0_u32;
                while counter.load(SeqCst) & UNDER_WAY != 0 {
                    waits += 1;
                    match waits {
                        ..100 => std::hint::spin_loop(),
                        100..200 => std::thread::yield_now(),
                        // The pass waits for a long system call: yield the processor.
                        _ => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            }
        }
    }
}

impl TableReadGuard<'_> {
    /// Returns true if there is no subscriber.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.taken == 0
    }

    /// Calls `notify` with the slot number and the invalidator of each subscriber.
    ///
    /// Repeated calls in one pass see the same subscribers. A child that was forked during the pass
    /// sees none.
    #[inline]
    pub fn each(&self, mut notify: impl FnMut(usize, &dyn Invalidator)) {
        let mut left = self.taken;
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            left &= left - 1;
            let invalidator = self.table.slots[slot].load(SeqCst);
            // SAFETY: the slot was taken when this pass began, so its pointer was stored before,
            // from a box. The writer that removes it waits for this pass before it clears the
            // pointer and drops the box. The pointer is null only in a child that was forked within
            // the pass, where the table was wiped.
            if let Some(invalidator) = unsafe { invalidator.as_ref() } {
                notify(slot, &**invalidator);
            }
        }
    }
}

impl Drop for TableReadGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        match self.after {
            // `Release`: a writer that sees the store may free what the pass used.
            Some(after) => self.line.alone.store(after, Release),
            None => _ = self.line.beside.fetch_sub(1, SeqCst),
        }
    }
}

/// The slots of the invalidators and their numbers of subscriptions.
#[derive(Debug)]
struct SubscriptionCounts {
    /// The slot of each invalidator, by the invalidator's address. The reference in the slot keeps
    /// the invalidator alive.
    by_invalidator: HashMap<usize, u8>,
    subscriptions: [u64; SLOTS],
}

/// The invalidators that one set of hooks notifies, with their subscriptions.
///
/// Adding and removing subscriptions takes a lock. Hooks and forked children never take it.
pub struct Subscribers<T: Wipeable> {
    monitor: MonitorName,
    shared: WipedOnFork<T>,
    counts: Mutex<SubscriptionCounts>,
}

impl<T: Wipeable> std::fmt::Debug for Subscribers<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscribers").field("monitor", &self.monitor.name).finish_non_exhaustive()
    }
}

/// Returns a number that differs between invalidators that are alive at the same time.
pub(crate) fn identity(invalidator: &Arc<dyn Invalidator>) -> usize {
    Arc::as_ptr(invalidator).cast::<()>().addr()
}

impl<T: HasTable> Subscribers<T> {
    /// Creates a `T` with an empty table.
    ///
    /// # Errors
    /// - OutOfResources: no memory is left.
    /// - Unsupported: the kernel cannot wipe the table in a forked child.
    pub fn new(monitor: MonitorName) -> Result<Self> {
        let counts =
            SubscriptionCounts { by_invalidator: HashMap::new(), subscriptions: [0; SLOTS] };
        Ok(Self { monitor, shared: WipedOnFork::new(monitor)?, counts: Mutex::new(counts) })
    }

    /// Returns the memory that hooks and other threads read, which contains the table.
    #[inline]
    pub fn shared(&self) -> &WipedOnFork<T> {
        &self.shared
    }

    /// Returns the table.
    #[inline]
    pub fn table(&self) -> &SubscriberTable {
        self.shared.table()
    }

    /// Adds a subscription of `invalidator` and returns its slot. When the method returns, changes
    /// that are already in flight notify the invalidator too.
    ///
    /// # Errors
    /// - OutOfResources: [`SLOTS`] invalidators are subscribed.
    /// - Unsupported: this process is a forked child.
    pub fn add(&self, invalidator: &Arc<dyn Invalidator>) -> Result<u8> {
        if !self.shared.is_own_process() {
            return Err(self.monitor.forked("subscribe"));
        }
        let mut counts = self.counts.lock();
        let key = identity(invalidator);
        if let Some(&slot) = counts.by_invalidator.get(&key) {
            counts.subscriptions[usize::from(slot)] += 1;
            return Ok(slot);
        }
        let table = self.table();
        let slot = table.taken.load(SeqCst).trailing_ones() as usize;
        if slot == SLOTS {
            return Err(Error::new(ErrorKind::OutOfResources, "subscribe")
                .iface(self.monitor.iface)
                .context("monitor", self.monitor.name)
                .context("invalidators", SLOTS)
                .remedy("share one cache between domains, or close those that are not used"));
        }
        table.slots[slot].store(Box::into_raw(Box::new(Arc::clone(invalidator))), SeqCst);
        table.taken.fetch_or(1 << slot, SeqCst);
        table.wait_for_passes();
        counts.by_invalidator.insert(key, slot as u8);
        counts.subscriptions[slot] = 1;
        Ok(slot as u8)
    }

    /// Removes a subscription. Returns the invalidator if this was its last subscription: hooks no
    /// longer call it then.
    pub fn remove(&self, slot: u8) -> Option<Arc<dyn Invalidator>> {
        if !self.shared.is_own_process() {
            return None;
        }
        let mut counts = self.counts.lock();
        let slot = usize::from(slot);
        let left = counts.subscriptions.get(slot).and_then(|count| count.checked_sub(1))?;
        counts.subscriptions[slot] = left;
        if left > 0 {
            return None;
        }
        let table = self.table();
        table.taken.fetch_and(!(1 << slot), SeqCst);
        table.wait_for_passes();
        let invalidator = table.slots[slot].swap(ptr::null_mut(), SeqCst);
        // SAFETY: the pointer came from `Box::into_raw` in `add`. The slot is no longer taken, and
        // `wait_for_passes` saw the end of every pass that saw it taken, so nothing else uses it.
        let invalidator = unsafe { Box::from_raw(invalidator) };
        counts.by_invalidator.remove(&identity(&invalidator));
        Some(*invalidator)
    }
}

/// Returns the range for the `start` and `len` of a system call, clamped to the end of the address
/// space.
#[inline]
pub fn clamped(start: u64, len: u64) -> AddressRange {
    let longest = (u64::MAX - start).saturating_add(1);
    // `len` is clamped, so the range is valid. A hook could not allocate an error anyway.
    AddressRange::checked(hmem_core::Address(start), len.min(longest))
        .unwrap_or(AddressRange::of::<u8>(&[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> WipedOnFork<SubscriberTable> {
        let name =
            MonitorName { name: "test", iface: hmem_core::IfaceKind::SYSTEM, fallback_hint: "" };
        WipedOnFork::new(name).unwrap()
    }

    #[test]
    fn table_is_quiet_after_all_passes_in_any_order() {
        let table = table();
        let mut before = table.quiet_stamp().unwrap();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            // All passes of one thread are on one line; the first has the exclusive counter.
            let mut passes: Vec<_> = (0..3).map(|_| Some(table.pass())).collect();
            assert_eq!(passes.iter().flatten().filter(|pass| pass.after.is_some()).count(), 1);
            for which in order {
                assert_eq!(table.quiet_stamp(), None);
                passes[which] = None;
            }
            let after = table.quiet_stamp().unwrap();
            assert_eq!(after, before + 3);
            before = after;
        }
    }

    #[test]
    fn writer_waits_for_exclusive_and_shared_passes() {
        let table = table();
        for beside in [false, true] {
            let over = std::sync::atomic::AtomicBool::new(false);
            let first = table.pass();
            let last = beside.then(|| table.pass());
            let last = match last {
                Some(last) => {
                    drop(first);
                    last
                }
                None => first,
            };
            assert_eq!(last.after.is_none(), beside);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    table.wait_for_passes();
                    over.load(Relaxed)
                });
                // The writer has switched a side: it waits, or is about to.
                while table.side.load(SeqCst) % 4 == if beside { 2 } else { 0 } {
                    std::thread::yield_now();
                }
                over.store(true, Relaxed);
                drop(last);
                assert!(
                    writer.join().unwrap(),
                    "it saw the end of the pass, and what came before it"
                );
            });
        }
    }

    #[test]
    fn concurrent_passes_leave_the_table_quiet() {
        const EACH: u64 = 20_000;
        let table = table();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH / 2 {
                        let outer = table.pass();
                        drop(table.pass());
                        drop(outer);
                    }
                });
            }
            for _ in 0..100 {
                table.wait_for_passes();
            }
        });
        assert_eq!(table.quiet_stamp(), Some(4 * EACH));
    }
}
