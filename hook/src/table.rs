//! Who is told: a fixed table of invalidators that is read without a lock.
//!
//! # Implementation
//!
//! A reader (a hook, a monitor's thread, an application's call) *passes* through the table: it counts itself in,
//! reads which slots are taken, tells their invalidators, and counts itself out. It waits for nobody. A writer
//! holds the lock of [`Subscribers`], changes the table, and then waits until every pass that may have seen the old
//! table is over. So:
//! - after an invalidator was taken out, no pass has it, and its reference may be dropped;
//! - after one was put in, every pass that is under way tells it: a change that began before and saw an empty table
//!   is over. Without this wait, what is registered right after could be taken away by a change that nobody hears of.
//!
//! Passes are counted per side, and the writer turns the sides twice, waiting for the one that is left each time, as
//! SRCU does: a pass may read the side, be held up, and count itself on a side that was turned since, which the
//! second turn waits for; and new passes count on the other side, so that a stream of them starves no writer. A
//! pass that counts itself after a writer saw zero reads the slots after the writer changed them, since all of it
//! is sequentially consistent. Counters are spread over lines by stack address, so that threads share none as a rule.

use std::{
    collections::HashMap,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use hmem_core::{AddressRange, Error, ErrorKind, Result, monitor::Invalidator};
use parking_lot::Mutex;

use crate::{MonitorName, Wipeable, WipedOnFork};

/// How many invalidators one monitor tells: one for each cache of the process.
pub const SLOTS: usize = 64;

const LINES: usize = 16;

/// Passes under way in the lower half, passes ever begun in the upper.
#[repr(align(64))]
#[derive(Debug)]
struct Line(AtomicU64);

const PASS: u64 = 1 << 32 | 1;
const UNDER_WAY: u64 = (1 << 32) - 1;

/// The invalidators of a monitor.
#[repr(C)]
#[derive(Debug)]
pub struct Table {
    taken: AtomicU64,
    side: AtomicUsize,
    slots: [AtomicPtr<Arc<dyn Invalidator>>; SLOTS],
    passes: [[Line; LINES]; 2],
}

// SAFETY: zeroes are an empty table with no pass under way. `Invalidator` is Sync, and the pointers are only turned
// into references within passes. It needs no drop: in a child the invalidators are forgotten with the parent's.
unsafe impl Wipeable for Table {}

/// One reader's time in the table.
#[derive(Debug)]
pub struct Pass<'a> {
    table: &'a Table,
    line: &'a AtomicU64,
    taken: u64,
}

impl Table {
    /// Counts the caller in.
    #[inline]
    pub fn pass(&self) -> Pass<'_> {
        let on_stack = 0_u8;
        let line = (ptr::addr_of!(on_stack).addr() >> 14) % LINES;
        let line = &self.passes[self.side.load(SeqCst) & 1][line].0;
        line.fetch_add(PASS, SeqCst);
        Pass { table: self, line, taken: self.taken.load(SeqCst) }
    }

    /// A number that differs whenever a pass began in between; `None` while one is under way.
    pub fn quiet_stamp(&self) -> Option<u64> {
        let mut stamp = 0_u64;
        for line in self.passes.iter().flatten() {
            let passes = line.0.load(SeqCst);
            if passes & UNDER_WAY != 0 {
                return None;
            }
            stamp = stamp.wrapping_add(passes >> 32);
        }
        Some(stamp)
    }

    /// Waits until every pass is over that began before. The caller is the only writer.
    fn wait_for_passes(&self) {
        for _ in 0..2 {
            let old = self.side.fetch_add(1, SeqCst) & 1;
            for line in &self.passes[old] {
                let mut turns = 0_u32;
                while line.0.load(SeqCst) & UNDER_WAY != 0 {
                    turns += 1;
                    match turns {
                        ..100 => std::hint::spin_loop(),
                        100..200 => std::thread::yield_now(),
                        // A long system call is beneath: give the processor away.
                        _ => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            }
        }
    }
}

impl Pass<'_> {
    /// Whether there is nobody to tell.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.taken == 0
    }

    /// Calls `tell` with each slot's number and invalidator: the same ones each time within a pass.
    #[inline]
    pub fn each(&self, mut tell: impl FnMut(usize, &dyn Invalidator)) {
        let mut left = self.taken;
        while left != 0 {
            let slot = left.trailing_zeros() as usize;
            left &= left - 1;
            let invalidator = self.table.slots[slot].load(SeqCst);
            // SAFETY: the slot was taken when this pass began, so its pointer was set before, from a box; the
            // writer that takes it out waits for this pass before it clears the pointer and drops the box.
            tell(slot, unsafe { &**invalidator });
        }
    }
}

impl Drop for Pass<'_> {
    #[inline]
    fn drop(&mut self) {
        self.line.fetch_sub(1, SeqCst);
    }
}

/// Which invalidators have how many subscriptions.
#[derive(Debug)]
struct Book {
    /// Slot and subscriptions, by the address of the invalidator, which the slot keeps alive.
    by_invalidator: HashMap<usize, u8>,
    subscriptions: [u64; SLOTS],
}

/// The invalidators of one monitor with their subscriptions.
///
/// The lock is never taken by whoever tells, nor in a forked child.
pub struct Subscribers<T: Wipeable> {
    monitor: MonitorName,
    table: fn(&T) -> &Table,
    shared: WipedOnFork<T>,
    book: Mutex<Book>,
}

impl<T: Wipeable> std::fmt::Debug for Subscribers<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscribers").field("monitor", &self.monitor.name).finish_non_exhaustive()
    }
}

fn identity(invalidator: &Arc<dyn Invalidator>) -> usize {
    Arc::as_ptr(invalidator).cast::<()>().addr()
}

impl<T: Wipeable> Subscribers<T> {
    /// Subscribers whose table is the part of `shared` that `table` names.
    ///
    /// # Errors
    /// OutOfResources without memory; Unsupported where the kernel cannot wipe the table in a forked child.
    pub fn new(monitor: MonitorName, table: fn(&T) -> &Table) -> Result<Self> {
        let book = Book { by_invalidator: HashMap::new(), subscriptions: [0; SLOTS] };
        Ok(Self { monitor, table, shared: WipedOnFork::new(monitor)?, book: Mutex::new(book) })
    }

    /// What hooks and threads share.
    #[inline]
    pub fn shared(&self) -> &WipedOnFork<T> {
        &self.shared
    }

    /// The table.
    #[inline]
    pub fn table(&self) -> &Table {
        (self.table)(&self.shared)
    }

    /// Counts a subscription of `invalidator` and returns its slot. When it returns, every change under way is one
    /// that the invalidator is told of.
    ///
    /// # Errors
    /// OutOfResources when [`SLOTS`] invalidators are subscribed; Unsupported in a forked child.
    pub fn add(&self, invalidator: Arc<dyn Invalidator>) -> Result<u8> {
        if !self.shared.is_ours() {
            return Err(self.monitor.forked("subscribe"));
        }
        let mut book = self.book.lock();
        let key = identity(&invalidator);
        if let Some(&slot) = book.by_invalidator.get(&key) {
            book.subscriptions[usize::from(slot)] += 1;
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
        table.slots[slot].store(Box::into_raw(Box::new(invalidator)), SeqCst);
        table.taken.fetch_or(1 << slot, SeqCst);
        table.wait_for_passes();
        book.by_invalidator.insert(key, slot as u8);
        book.subscriptions[slot] = 1;
        Ok(slot as u8)
    }

    /// Takes a subscription back. After the last one of an invalidator it is not called any more.
    pub fn remove(&self, slot: u8) {
        if !self.shared.is_ours() {
            return;
        }
        let mut book = self.book.lock();
        let slot = usize::from(slot);
        let Some(left) = book.subscriptions.get(slot).and_then(|count| count.checked_sub(1)) else { return };
        book.subscriptions[slot] = left;
        if left > 0 {
            return;
        }
        let table = self.table();
        table.taken.fetch_and(!(1 << slot), SeqCst);
        table.wait_for_passes();
        let invalidator = table.slots[slot].swap(ptr::null_mut(), SeqCst);
        // SAFETY: it came from `Box::into_raw` in `add`; the slot is not taken, and no pass that saw it taken is
        // left, so that nobody else has it.
        let invalidator = unsafe { Box::from_raw(invalidator) };
        book.by_invalidator.remove(&identity(&invalidator));
        drop(book);
        drop(invalidator);
    }
}

/// A range for `start` and `len` as a system call was given them: to the end of the address space where they wrap.
#[inline]
pub fn clamped(start: u64, len: u64) -> AddressRange {
    let longest = (u64::MAX - start).saturating_add(1);
    AddressRange::new(hmem_core::Address(start), len.min(longest)).unwrap_or(AddressRange::of::<u8>(&[]))
}
