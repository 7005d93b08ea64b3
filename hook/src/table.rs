//! The subscriber table: a fixed number of invalidators that hooks read without a lock.
//!
//! # Implementation
//!
//! A *reader* is a hook, a monitor's thread or a call of the application that uses the table. It
//! increments a counter, reads which slots are occupied, notifies the invalidators in them, and
//! decrements the counter. A reader never waits. A writer holds the lock of [`Subscribers`],
//! changes the table, and waits until every reader that may have seen the old table has finished.
//! Therefore:
//! - After the writer has removed an invalidator, no reader uses it, and its reference may be
//!   dropped.
//! - After the writer has added an invalidator, every reader in flight notifies it, because readers
//!   that saw the table without it have finished. Without this wait, a hook that saw the old table
//!   could let memory be freed that was registered just after the subscription, and no cache would
//!   be notified.
//!
//! Like SRCU, the table has two sets of counters, called sides, and the writer switches sides
//! twice. After each switch, the writer waits for the readers that count on the old side:
//! - A reader may load the current side, be delayed, and increment a counter of that side after the
//!   writer has switched. The writer waits for this reader after the second switch.
//! - New readers count on the new side, so that a continuous stream of readers cannot block a
//!   writer forever.
//! - A reader may increment a counter after the writer saw zero in this counter. Then the reader
//!   reads the slots after the writer changed them. The reader's increment, its loads of the slots,
//!   the writer's changes and the writer's loads of the counters are all sequentially consistent.
//!
//! The counters are spread over cache lines by stack address, so that threads rarely share a line.
//! Each line has an exclusive counter, which one reader at a time uses. That reader begins with one
//! locked instruction and ends with a plain store. A writer that sees the store sees everything
//! that the reader did. Readers that find this counter in use (other threads, or a signal handler
//! that interrupted a reader) use the line's shared counter, with two locked instructions.

#![allow(unsafe_code, reason = "invalidators behind pointers, read without a lock")]

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

use hmem_core::{
    AddressRange, Error, ErrorKind, Result, Wipeable, WipedOnFork,
    monitor::{Invalidator, Subscription, TokenIssuer},
};
use parking_lot::Mutex;

use crate::MonitorName;

/// The maximum number of invalidators in a table. Each cache of the process has one invalidator.
pub const SLOTS: usize = 64;

/// The number of cache lines in each of the two sets of reader counters (*sides*).
const LINES: usize = 16;

/// A cache line with two counters of readers: one for a single reader at a time, and one for the
/// others. The lower half of each counter is the number of readers in flight. The upper half is the
/// number of readers that have begun so far.
#[repr(align(64))]
#[derive(Debug)]
struct Line {
    /// The counter that only one reader at a time uses. While that reader is in flight, no other
    /// thread writes this counter.
    exclusive: AtomicU64,
    /// The counter of readers that found the counter `exclusive` in use.
    shared: AtomicU64,
}

impl Line {
    fn counters(&self) -> [&AtomicU64; 2] {
        [&self.exclusive, &self.shared]
    }
}

/// The increment of a counter when a reader begins: 1 in each half.
const ONE_READER: u64 = 1 << 32 | 1;
/// The mask of a counter's lower half: the number of readers in flight.
const IN_FLIGHT: u64 = (1 << 32) - 1;

/// A table of invalidators that hooks read without a lock.
#[repr(C)]
#[derive(Debug)]
pub struct SubscriberTable {
    /// One bit for each slot: 1 if the slot contains an invalidator.
    taken: AtomicU64,
    /// Number of switches between the two sides so far. New readers count in `readers[side & 1]`.
    side: AtomicUsize,
    /// The invalidator in each slot, as a pointer from `Box::into_raw`. Null in a free slot.
    slots: [AtomicPtr<Arc<dyn Invalidator>>; SLOTS],
    /// The counters of readers, in two sets (*sides*) that take turns.
    readers: [[Line; LINES]; 2],
}

// SAFETY: all-zero bytes are an empty table with no reader in flight. `Invalidator` is Sync, and
// only readers turn the pointers into references. The table needs no drop: a forked child leaks its
// copies of the invalidators, like other memory of its parent.
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

/// A guard that lets a thread read the table. [`SubscriberTable::pass`] creates the guard.
#[derive(Debug)]
pub struct TableReadGuard<'a> {
    table: &'a SubscriberTable,
    line: &'a Line,
    /// The value to store in the line's exclusive counter when this guard is dropped. `None` if the
    /// guard is counted in the line's shared counter.
    after: Option<u64>,
    /// The value of [`SubscriberTable::taken`] when the guard was created.
    taken: u64,
}

impl SubscriberTable {
    /// Begins to read the table. No invalidator in the table is freed until the returned guard is
    /// dropped.
    #[inline]
    pub fn pass(&self) -> TableReadGuard<'_> {
        let on_stack = 0_u8;
        let line = (ptr::addr_of!(on_stack).addr() >> 14) % LINES;
        let line = &self.readers[self.side.load(SeqCst) & 1][line];
        let seen = line.exclusive.load(Relaxed);
        let begun = seen.wrapping_add(ONE_READER);
        let free = seen & IN_FLIGHT == 0;
        let after = if free && line.exclusive.compare_exchange(seen, begun, SeqCst, Relaxed).is_ok()
        {
            Some(begun - 1)
        } else {
            line.shared.fetch_add(ONE_READER, SeqCst);
            None
        };
        TableReadGuard { table: self, line, after, taken: self.taken.load(SeqCst) }
    }

    /// Returns a number that changes whenever a guard is created, or `None` while a guard exists.
    /// If two calls return the same number, no guard existed between the calls.
    #[inline]
    pub fn quiet_stamp(&self) -> Option<u64> {
        let counters = self.readers.iter().flatten().flat_map(Line::counters);
        // The sum of the lower halves does not overflow into the upper half, because far fewer than
        // 2^32 guards exist at once.
        let sum = counters.fold(0_u64, |sum, counter| sum.wrapping_add(counter.load(SeqCst)));
        (sum & IN_FLIGHT == 0).then_some(sum >> 32)
    }

    /// Returns the numbers of the slots that contain an invalidator.
    #[inline]
    pub(crate) fn taken(&self) -> impl Iterator<Item = usize> {
        let taken = self.taken.load(SeqCst);
        (0..SLOTS).filter(move |slot| taken >> slot & 1 != 0)
    }

    /// Waits until every read guard that exists at the call is dropped. No other thread may change
    /// the table or make this call at the same time.
    fn wait_for_readers(&self) {
        for _ in 0..2 {
            let old = self.side.fetch_add(1, SeqCst) & 1;
            for counter in self.readers[old].iter().flat_map(Line::counters) {
                let mut waits = 0_u32;
                while counter.load(SeqCst) & IN_FLIGHT != 0 {
                    waits += 1;
                    match waits {
                        ..100 => std::hint::spin_loop(),
                        100..200 => std::thread::yield_now(),
                        // The reader is in a long system call, so this thread sleeps instead of
                        // spinning.
                        _ => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            }
        }
    }
}

impl TableReadGuard<'_> {
    /// Returns true if the table had no subscriber when the guard was created.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.taken == 0
    }

    /// Calls `notify` with the slot number and the invalidator of each subscriber.
    ///
    /// Repeated calls on one guard see the same subscribers. In a child that was forked while the
    /// guard existed, calls on the guard see no subscribers.
    #[inline]
    pub fn each(&self, mut notify: impl FnMut(usize, &dyn Invalidator)) {
        let mut left = self.taken;
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            left &= left - 1;
            let invalidator = self.table.slots[slot].load(SeqCst);
            // SAFETY: the slot was occupied when this guard was created, so a writer had stored a
            // pointer from a box in it. A writer that removes the invalidator waits until this
            // guard is dropped before it clears the pointer and drops the box. The pointer is null
            // only in a child that was forked while the guard existed, where the kernel wiped the
            // table.
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
            // `Release`: a writer that sees this store may free the invalidators that this guard
            // protected.
            Some(after) => self.line.exclusive.store(after, Release),
            None => _ = self.line.shared.fetch_sub(1, SeqCst),
        }
    }
}

/// The slot of each invalidator in the table, and the number of its subscriptions.
#[derive(Debug)]
struct SubscriptionCounts {
    /// The slot of each invalidator, by the invalidator's address. The reference in the slot keeps
    /// the invalidator alive.
    by_invalidator: HashMap<usize, usize>,
    /// The number of subscriptions of the invalidator in each slot.
    subscriptions: [u64; SLOTS],
}

/// A subscription of an invalidator to a table, which [`Subscribers::remove`] ends.
#[derive(Debug)]
pub struct SlotSubscription {
    slot: usize,
    subscription: Subscription,
}

impl SlotSubscription {
    /// Returns the slot of the invalidator, below [`SLOTS`].
    #[inline]
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }
}

/// The invalidators that one set of hooks notifies, with their subscriptions.
///
/// Adding and removing subscriptions takes a lock. Hooks and forked children never take this lock.
pub struct Subscribers<T: Wipeable> {
    monitor: MonitorName,
    issuer: TokenIssuer,
    shared: WipedOnFork<T>,
    /// The slot and the number of subscriptions of each invalidator. A thread that changes these
    /// counts or the table holds this lock.
    counts: Mutex<SubscriptionCounts>,
}

impl<T: Wipeable> std::fmt::Debug for Subscribers<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscribers").field("monitor", &self.monitor.name).finish_non_exhaustive()
    }
}

/// Returns the address of an invalidator, which no other live invalidator has.
pub(crate) fn identity(invalidator: &Arc<dyn Invalidator>) -> usize {
    Arc::as_ptr(invalidator).cast::<()>().addr()
}

impl<T: HasTable> Subscribers<T> {
    /// Maps a `T` with an empty table, which the kernel zeroes in a forked child. Errors contain
    /// the iface of `monitor`.
    ///
    /// # Errors
    /// - OutOfResources: no memory is left.
    /// - Unsupported: the kernel cannot wipe the table in a forked child (before Linux 4.14).
    pub fn new(monitor: MonitorName) -> Result<Self> {
        let counts =
            SubscriptionCounts { by_invalidator: HashMap::new(), subscriptions: [0; SLOTS] };
        Ok(Self {
            monitor,
            issuer: TokenIssuer::new(),
            shared: WipedOnFork::new().map_err(|error| monitor.add_to(error))?,
            counts: Mutex::new(counts),
        })
    }

    /// Returns the memory that contains the table and the fields that the monitor added (`T`). The
    /// kernel zeroes this memory in a forked child.
    #[inline]
    pub fn shared(&self) -> &WipedOnFork<T> {
        &self.shared
    }

    /// Returns the table with the invalidators.
    #[inline]
    pub fn table(&self) -> &SubscriberTable {
        self.shared.table()
    }

    /// Adds a subscription of `invalidator`. Every reader of the table that is in flight when this
    /// method returns notifies the invalidator too.
    ///
    /// The first subscription of an invalidator waits until every [`TableReadGuard`] of earlier
    /// readers is dropped. So the caller must not hold such a guard.
    ///
    /// # Errors
    /// - OutOfResources: [`SLOTS`] other invalidators are subscribed.
    /// - Unsupported: this process is a forked child.
    pub fn add(&self, invalidator: &Arc<dyn Invalidator>) -> Result<SlotSubscription> {
        if !self.shared.is_own_process() {
            return Err(self.monitor.forked("subscribe"));
        }
        let mut counts = self.counts.lock();
        let key = identity(invalidator);
        if let Some(&slot) = counts.by_invalidator.get(&key) {
            counts.subscriptions[slot] += 1;
            return Ok(self.issue(slot));
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
        table.wait_for_readers();
        counts.by_invalidator.insert(key, slot);
        counts.subscriptions[slot] = 1;
        Ok(self.issue(slot))
    }

    fn issue(&self, slot: usize) -> SlotSubscription {
        SlotSubscription { slot, subscription: Subscription::new(&self.issuer, slot as u64) }
    }

    /// Removes a subscription. If this was the invalidator's last subscription, returns the
    /// invalidator, which hooks no longer call. Returns `None` if the invalidator has subscriptions
    /// left, if `subscription` came from another `Subscribers`, and in a forked child.
    ///
    /// The removal of the last subscription waits until every [`TableReadGuard`] of earlier readers
    /// is dropped. So the caller must not hold such a guard.
    pub fn remove(&self, subscription: SlotSubscription) -> Option<Arc<dyn Invalidator>> {
        if !self.shared.is_own_process() {
            return None;
        }
        let slot = subscription.subscription.redeem(&self.issuer)? as usize;
        let mut counts = self.counts.lock();
        counts.subscriptions[slot] -= 1;
        if counts.subscriptions[slot] > 0 {
            return None;
        }
        let table = self.table();
        table.taken.fetch_and(!(1 << slot), SeqCst);
        table.wait_for_readers();
        let invalidator = table.slots[slot].swap(ptr::null_mut(), SeqCst);
        // SAFETY: the pointer came from `Box::into_raw` in `add`. The slot is no longer occupied,
        // and `wait_for_readers` waited for every reader that saw it occupied. So nothing else uses
        // the box.
        let invalidator = unsafe { Box::from_raw(invalidator) };
        counts.by_invalidator.remove(&identity(&invalidator));
        Some(*invalidator)
    }
}

/// Returns the range of `len` bytes from `start`. If these bytes would pass the end of the address
/// space, the range ends there. Hooks call this function with the arguments of a system call.
#[inline]
pub fn clamped(start: u64, len: u64) -> AddressRange {
    let longest = (u64::MAX - start).saturating_add(1);
    // `len` is clamped, so `checked` returns `Some`. This code must not create an error, because a
    // hook must not allocate.
    AddressRange::checked(hmem_core::Address(start), len.min(longest))
        .unwrap_or(AddressRange::of::<u8>(&[]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> WipedOnFork<SubscriberTable> {
        WipedOnFork::new().unwrap()
    }

    #[test]
    fn table_is_quiet_after_all_guards_are_dropped_in_any_order() {
        let table = table();
        let mut before = table.quiet_stamp().unwrap();
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            // All guards of one thread are counted in one line, and the first guard in the line's
            // exclusive counter.
            let mut guards: Vec<_> = (0..3).map(|_| Some(table.pass())).collect();
            assert_eq!(guards.iter().flatten().filter(|guard| guard.after.is_some()).count(), 1);
            for which in order {
                assert_eq!(table.quiet_stamp(), None);
                guards[which] = None;
            }
            let after = table.quiet_stamp().unwrap();
            assert_eq!(after, before + 3);
            before = after;
        }
    }

    #[test]
    fn writer_waits_for_exclusive_and_shared_readers() {
        let table = table();
        for shared in [false, true] {
            let over = std::sync::atomic::AtomicBool::new(false);
            let first = table.pass();
            let last = shared.then(|| table.pass());
            let last = match last {
                Some(last) => {
                    drop(first);
                    last
                }
                None => first,
            };
            assert_eq!(last.after.is_none(), shared);
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| {
                    table.wait_for_readers();
                    over.load(Relaxed)
                });
                // The loop ends when the writer has switched sides. The writer then waits for
                // `last`, or is about to wait.
                while table.side.load(SeqCst) % 4 == if shared { 2 } else { 0 } {
                    std::thread::yield_now();
                }
                over.store(true, Relaxed);
                drop(last);
                assert!(
                    writer.join().unwrap(),
                    "the writer sees stores from before the guard was dropped"
                );
            });
        }
    }

    #[test]
    fn concurrent_readers_leave_the_table_quiet() {
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
                table.wait_for_readers();
            }
        });
        assert_eq!(table.quiet_stamp(), Some(4 * EACH));
    }
}
