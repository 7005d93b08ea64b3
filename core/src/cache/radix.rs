//! The table from addresses to entries: a page table whose leaves point straight at entries.
//!
//! Three levels of nodes: a slot stands for a page at the bottom, for 16 MiB in the middle, for 64
//! GiB at the top. An entry stands in every slot whose span it covers, as high up as that goes, and
//! in the slots of the pages that it covers in part. Where several things meet in one slot, a chain
//! of buckets hangs off it: entries, and the node below.
//!
//! Lookups and changes walk it without a lock; one thread at a time alters it ([`Shape`] is under
//! the cache's lock).

mod alter;

use super::{
    arena::{Arena, Zeroed},
    sync::{AtomicU32, Ordering, fence},
};
use crate::Result;

const PAGE_BITS: u32 = 12;
#[cfg(not(loom))]
const FAN_BITS: u32 = 12;
#[cfg(loom)]
const FAN_BITS: u32 = 1;
const FAN: usize = 1 << FAN_BITS;
#[cfg(not(loom))]
const TOP: u32 = 2;
#[cfg(loom)]
const TOP: u32 = 1;
/// Addresses from here on have no place in the table: user addresses end at 2^47 or 2^48.
const END: u64 = 1 << (PAGE_BITS + FAN_BITS * (TOP + 1));

/// The node that is always there.
const ROOT: u32 = 1;

/// What a slot holds, told by its two highest bits: nothing, an entry, a node or a chain.
const NODE: u32 = 1 << 31;
const CHAIN: u32 = 1 << 30;
const INDEX: u32 = CHAIN - 1;

/// The highest index that an entry may have.
pub(super) const MAX_INDEX: u32 = INDEX;

/// Slots that are read together.
const AT_ONCE: usize = 8;

/// So many are read to see that they are empty before anything else is tried.
const FEW: usize = 64;

#[repr(C)]
#[derive(Debug)]
struct Node {
    slots: [AtomicU32; FAN],
}

// SAFETY: an atomic of zero bytes is 0, and needs no drop.
unsafe impl Zeroed for Node {
    #[cfg(loom)]
    fn zeroed() -> Self {
        Self { slots: std::array::from_fn(|_| AtomicU32::new(0)) }
    }
}

#[cfg(not(loom))]
const WIDTH: usize = 5;
#[cfg(loom)]
const WIDTH: usize = 2;

/// A part of a chain.
#[repr(C)]
#[derive(Debug)]
struct Bucket {
    /// Counts how often the chain that this is the head of was taken apart.
    generation: AtomicU32,
    /// The node below the slot; only in the head.
    child: AtomicU32,
    next: AtomicU32,
    entries: [AtomicU32; WIDTH],
}

// SAFETY: an atomic of zero bytes is 0, and needs no drop.
unsafe impl Zeroed for Bucket {
    #[cfg(loom)]
    fn zeroed() -> Self {
        Self {
            generation: AtomicU32::new(0),
            child: AtomicU32::new(0),
            next: AtomicU32::new(0),
            entries: std::array::from_fn(|_| AtomicU32::new(0)),
        }
    }
}

/// What every thread may walk.
#[derive(Debug)]
pub(super) struct Radix {
    nodes: Arena<Node>,
    buckets: Arena<Bucket>,
}

/// What only the thread that alters the table knows.
#[derive(Debug)]
pub(super) struct Shape {
    /// Slots in use, by node.
    filled: Vec<u32>,
    /// A page whose lowest node may have been left empty.
    emptied: Option<u64>,
    free_nodes: Vec<u32>,
    buckets_made: u32,
    free_buckets: Vec<u32>,
}

#[inline(always)]
const fn slot_of(page: u64, level: u32) -> usize {
    (page >> (FAN_BITS * level)) as usize & (FAN - 1)
}

/// Pages that one slot of `level` stands for, as a power of two.
const fn span_bits(level: u32) -> u32 {
    FAN_BITS * level
}

/// Whether slots held nothing when they were read, one after the other.
#[inline(always)]
fn is_empty(slots: &[AtomicU32]) -> bool {
    let any =
        |slots: &[AtomicU32]| slots.iter().fold(0, |any, slot| any | slot.load(Ordering::Acquire));
    let (groups, rest) = slots.as_chunks::<AT_ONCE>();
    groups.iter().fold(any(rest), |all, group| all | any(group)) == 0
}

/// First and last page between two addresses; `None` if they have no place in the table.
pub(super) fn pages(start: u64, last: u64) -> Option<(u64, u64)> {
    (last < END).then_some((start >> PAGE_BITS, last >> PAGE_BITS))
}

impl Radix {
    /// A table for `entries` ranges.
    pub(super) fn new(entries: usize) -> Result<(Self, Shape)> {
        #[cfg(not(loom))]
        // Ranges that overlap take a bucket for each page that they share.
        let (nodes, buckets) = (
            entries.saturating_mul(2).clamp(64, 1 << 19),
            entries.saturating_mul(64).clamp(1 << 20, 1 << 24),
        );
        #[cfg(loom)]
        let (nodes, buckets) = (3, entries);
        let radix = Self {
            nodes: Arena::reserve(nodes)?.tag(NODE).small_pages(),
            buckets: Arena::reserve(buckets)?.small_pages(),
        };
        if !radix.nodes.ensure(ROOT) {
            return Err(crate::Error::new(crate::ErrorKind::OutOfResources, "mprotect"));
        }
        let shape = Shape {
            filled: vec![0, 0],
            emptied: None,
            free_nodes: Vec::new(),
            buckets_made: 0,
            free_buckets: Vec::new(),
        };
        Ok((radix, shape))
    }

    /// An entry at the page of `address`, or 0: one that `accept` took, or the only one that could
    /// be meant, which `accept` was not asked about.
    pub(super) fn find(&self, address: u64, accept: impl Fn(u32) -> bool) -> u32 {
        self.find_at_page(address).unwrap_or_else(|met| self.find_from(address, met, accept))
    }

    /// The way of [`Radix::find`] to an entry that stands alone at its page, or what it met before
    /// that: for [`Radix::find_from`].
    #[inline(always)]
    pub(super) fn find_at_page(&self, address: u64) -> std::result::Result<u32, Met> {
        // An address above those of the table finds another's entry, which does not cover it.
        let page = address >> PAGE_BITS;
        let mut value = self.nodes.at(ROOT).slots[slot_of(page, TOP)].load(Ordering::Acquire);
        for level in (0..TOP).rev() {
            if value & NODE == 0 {
                return Err(Met { value, level: level + 1 });
            }
            value = self.nodes.at_tagged(value).slots[slot_of(page, level)].load(Ordering::Acquire);
        }
        if value < CHAIN { Ok(value) } else { Err(Met { value, level: 0 }) }
    }

    /// The rest of the way of [`Radix::find`].
    pub(super) fn find_from(&self, address: u64, met: Met, accept: impl Fn(u32) -> bool) -> u32 {
        let page = address >> PAGE_BITS;
        let Met { mut value, mut level } = met;
        loop {
            if value & CHAIN != 0 {
                match self.find_in_chain(value & INDEX, &accept) {
                    Found::Entry(entry) => return entry,
                    Found::Below(child) => value = child,
                }
            }
            if value & NODE == 0 || level == 0 {
                // A node below a page is what a slot says that changed meaning under this walk.
                return if value < CHAIN { value } else { 0 };
            }
            level -= 1;
            value =
                self.nodes.at(value & INDEX).slots[slot_of(page, level)].load(Ordering::Acquire);
        }
    }

    #[inline(never)]
    fn find_in_chain(&self, head: u32, accept: &impl Fn(u32) -> bool) -> Found {
        let mut bucket = self.buckets.at(head);
        let child = bucket.child.load(Ordering::Acquire);
        loop {
            for cell in &bucket.entries {
                let entry = cell.load(Ordering::Acquire);
                if entry != 0 && accept(entry) {
                    return Found::Entry(entry);
                }
            }
            let next = bucket.next.load(Ordering::Acquire);
            if next == 0 {
                return Found::Below(child);
            }
            bucket = self.buckets.at(next);
        }
    }

    /// Calls `visit` with every entry that stands in a slot of these pages from before the walk
    /// until after it; more than once where it stands in several. Others may be among them.
    pub(super) fn walk(&self, first: u64, last: u64, visit: &mut impl FnMut(u32)) {
        let last = last.min((END - 1) >> PAGE_BITS);
        // Changes come again and again where little or nothing is.
        if let Some((_, slots)) = self.leaf(first, last)
            && slots.len() <= FEW
            && is_empty(slots)
        {
            return;
        }
        let (mut node, mut level) = (ROOT, TOP);
        // Down to the lowest node that has all the pages, where only nodes lead.
        while level > 0 && first >> span_bits(level) == last >> span_bits(level) {
            let value = self.nodes.at(node).slots[slot_of(first, level)].load(Ordering::Acquire);
            if value == 0 {
                return;
            }
            if value & NODE == 0 {
                break;
            }
            (node, level) = (value & INDEX, level - 1);
        }
        self.walk_node(node, level, first, last, visit);
    }

    fn walk_node(&self, node: u32, level: u32, first: u64, last: u64, visit: &mut impl FnMut(u32)) {
        let bits = span_bits(level);
        let slots = &self.nodes.at(node).slots[slot_of(first, level)..=slot_of(last, level)];
        let mut unit = first >> bits;
        let mut before = 0;
        // Most are empty, which is seen for several at once.
        for slots in slots.chunks(AT_ONCE) {
            if is_empty(slots) {
                unit += slots.len() as u64;
                continue;
            }
            for slot in slots {
                let mut value = slot.load(Ordering::Acquire);
                if value & CHAIN != 0 {
                    value = self.walk_chain(slot, value, visit);
                }
                if value & NODE != 0 {
                    if level > 0 {
                        let from = first.max(unit << bits);
                        let to = last.min(((unit + 1) << bits) - 1);
                        self.walk_node(value & INDEX, level - 1, from, to, visit);
                    }
                } else if value != 0 && value != before {
                    visit(value);
                }
                before = value;
                unit += 1;
            }
        }
    }

    /// Visits a chain's entries and returns what is left to see of the slot: its node, its only
    /// entry, or nothing.
    ///
    /// A chain that is taken apart under the walk could be in use elsewhere already and not show
    /// what is in this slot: the generation tells, and the slot is read again.
    #[cold]
    fn walk_chain(&self, slot: &AtomicU32, mut value: u32, visit: &mut impl FnMut(u32)) -> u32 {
        while value & CHAIN != 0 {
            let head = self.buckets.at(value & INDEX);
            let generation = head.generation.load(Ordering::Acquire);
            let again = slot.load(Ordering::Acquire);
            if again != value {
                value = again;
                continue;
            }
            let child = head.child.load(Ordering::Acquire);
            let mut bucket = head;
            // A chain that changes hands may lead anywhere, round in a circle too, until that is
            // seen.
            loop {
                for cell in &bucket.entries {
                    let entry = cell.load(Ordering::Acquire);
                    if entry != 0 {
                        visit(entry);
                    }
                }
                let next = bucket.next.load(Ordering::Acquire);
                if next == 0 || head.generation.load(Ordering::Relaxed) != generation {
                    break;
                }
                bucket = self.buckets.at(next);
            }
            fence(Ordering::Acquire);
            if head.generation.load(Ordering::Relaxed) == generation {
                return child;
            }
            value = slot.load(Ordering::Acquire);
        }
        value
    }

    /// The lowest node that has all these pages, and their slots of it, where they are not all of
    /// it and only nodes lead there: the place of most entries.
    #[inline(always)]
    fn leaf(&self, first: u64, last: u64) -> Option<(u32, &[AtomicU32])> {
        if first >> FAN_BITS != last >> FAN_BITS || last - first + 1 == FAN as u64 {
            return None;
        }
        let mut node = ROOT;
        for level in (1..=TOP).rev() {
            let value = self.nodes.at(node).slots[slot_of(first, level)].load(Ordering::Acquire);
            if value & NODE == 0 {
                return None;
            }
            node = value & INDEX;
        }
        Some((node, &self.nodes.at(node).slots[slot_of(first, 0)..=slot_of(last, 0)]))
    }
}

/// What a slot holds at a level.
#[derive(Clone, Copy)]
pub(super) struct Met {
    value: u32,
    level: u32,
}

enum Found {
    Entry(u32),
    /// The node below, or 0.
    Below(u32),
}

/// Returns the first and last page between the two addresses of a change, which may reach beyond
/// the end of the table. Returns `None` if the change begins there.
pub(super) fn touched(start: u64, last: u64) -> Option<(u64, u64)> {
    (start < END).then_some((start >> PAGE_BITS, last.min(END - 1) >> PAGE_BITS))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn ranges() -> impl Strategy<Value = (u64, u64)> {
        let start = prop_oneof![0..64_u64 * 4096, 15 * MIB..17 * MIB, 0..100_u64 << 30];
        let len = prop_oneof![1..3_u64 * 4096, 1..40 * MIB, Just(16 * MIB), Just(64 << 30)];
        (start, len).prop_map(|(start, len)| (start & !0xff, len))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn finds_and_walks_exactly_what_was_inserted(
            steps in proptest::collection::vec((ranges(), any::<bool>()), 1..12),
        ) {
            let (radix, mut shape) = Radix::new(64).unwrap();
            let mut oracle = BTreeMap::new();
            for (index, ((start, len), drop_first)) in steps.into_iter().enumerate() {
                let entry = index as u32 + 1;
                let (first, last) = pages(start, start + len - 1).unwrap();
                prop_assert!(radix.insert(&mut shape, first, last, entry));
                oracle.insert(entry, (first, last));
                if drop_first {
                    let (gone, (first, last)) = oracle.pop_first().unwrap();
                    radix.remove(&mut shape, first, last, gone);
                }
                for (entry, (first, last)) in &oracle {
                    for page in [*first, *last, first.midpoint(*last)] {
                        let found = radix.find(page << PAGE_BITS, |candidate| candidate == *entry);
                        let fits = |(first, last): &(u64, u64)| (*first..=*last).contains(&page);
                        prop_assert!(found == *entry || oracle.get(&found).is_some_and(fits));
                    }
                    let mut walked = std::collections::BTreeSet::new();
                    radix.walk(*first, *last, &mut |entry| { walked.insert(entry); });
                    let expected = oracle.iter().filter(|(_, (f, l))| f <= last && first <= l);
                    prop_assert_eq!(walked, expected.map(|(entry, _)| *entry).collect());
                }
            }
            for (entry, (first, last)) in oracle {
                radix.remove(&mut shape, first, last, entry);
            }
            if let Some(page) = shape.emptied {
                radix.prune(&mut shape, page);
            }
            prop_assert_eq!(&shape.filled[1..], &vec![0; shape.filled.len() - 1]);
            prop_assert_eq!(shape.free_nodes.len(), shape.filled.len() - 2);
            prop_assert_eq!(shape.free_buckets.len() as u32, shape.buckets_made);
        }
    }
}
