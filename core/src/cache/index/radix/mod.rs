//! The table from addresses to entries: a page table with slots that point directly to entries.
//!
//! The table has three levels of nodes. A slot covers a page at the bottom level, 16 MiB in the
//! middle and 64 GiB at the top. An entry is stored in the highest slots that it covers completely,
//! and in the slots of the pages that it covers in part. If a slot must hold several entries, or
//! entries and a node, it points to a chain of buckets.
//!
//! Lookups and invalidations walk the table without a lock. One thread at a time alters it:
//! [`Shape`] is under the cache's lock.

mod alter;

use super::super::{
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
/// The first address past the table. User addresses of the CPU end at 2^47 or 2^48.
const END: u64 = 1 << (PAGE_BITS + FAN_BITS * (TOP + 1));

/// The index of the top node, which always exists.
const ROOT: u32 = 1;

/// The tag of a slot that points to a node. The two highest bits of a slot tell if it holds an
/// entry, a node or a chain.
const NODE: u32 = 1 << 31;
const CHAIN: u32 = 1 << 30;
const INDEX: u32 = CHAIN - 1;

/// The highest index that an entry may have.
pub(in crate::cache) const MAX_INDEX: u32 = INDEX;

/// The number of slots that a walk tests at once for being empty.
const AT_ONCE: usize = 8;

/// The largest number of slots of a leaf for which a walk first tests if all of them are empty.
const FEW: usize = 64;

#[repr(C)]
#[derive(Debug)]
struct Node {
    slots: [AtomicU32; FAN],
}

// SAFETY: an atomic of zero bytes is 0 and needs no drop.
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

/// One link of a chain: up to [`WIDTH`] entries, and the index of the next bucket.
#[repr(C)]
#[derive(Debug)]
struct Bucket {
    /// Counts how often a chain that began with this bucket was taken apart.
    generation: AtomicU32,
    /// The node below the slot, or 0. Used only in the first bucket of a chain.
    child: AtomicU32,
    next: AtomicU32,
    entries: [AtomicU32; WIDTH],
}

// SAFETY: an atomic of zero bytes is 0 and needs no drop.
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

/// Nodes and buckets, which any thread may walk.
#[derive(Debug)]
pub(in crate::cache) struct Radix {
    nodes: Arena<Node>,
    buckets: Arena<Bucket>,
}

/// The state of the table that only the altering thread needs.
#[derive(Debug)]
pub(in crate::cache) struct Shape {
    /// The number of slots in use of each node, by the node's index.
    filled: Vec<u32>,
    /// A page with a lowest node that may be empty, and that the table keeps.
    emptied: Option<u64>,
    free_nodes: Vec<u32>,
    buckets_made: u32,
    free_buckets: Vec<u32>,
}

#[inline(always)]
const fn slot_of(page: u64, level: u32) -> usize {
    (page >> (FAN_BITS * level)) as usize & (FAN - 1)
}

/// Returns the binary logarithm of the number of pages that one slot of `level` covers.
const fn span_bits(level: u32) -> u32 {
    FAN_BITS * level
}

/// Returns whether each slot was empty when it was read.
#[inline(always)]
fn is_empty(slots: &[AtomicU32]) -> bool {
    let any =
        |slots: &[AtomicU32]| slots.iter().fold(0, |any, slot| any | slot.load(Ordering::Acquire));
    let (groups, rest) = slots.as_chunks::<AT_ONCE>();
    groups.iter().fold(any(rest), |all, group| all | any(group)) == 0
}

/// Returns the first and last page of a range in the table, or `None` if the range goes past the
/// table's end.
///
/// Addresses that differ only in their highest bits share a slot. Device memory may lie in the
/// upper half of the address space, where all the highest bits are set (Intel's does). So users of
/// the table compare whole addresses.
pub(in crate::cache) fn pages(start: u64, last: u64) -> Option<(u64, u64)> {
    let page = |address: u64| (address % END) >> PAGE_BITS;
    (start / END == last / END).then_some((page(start), page(last)))
}

impl Radix {
    /// Creates a table for up to `entries` ranges.
    pub(in crate::cache) fn new(entries: usize) -> Result<(Self, Shape)> {
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

    /// Returns an entry at the page of `address`, or 0. `accept` chooses among the entries of a
    /// chain. `accept` is not called for an entry that is the only one in its slot.
    pub(in crate::cache) fn find(&self, address: u64, accept: impl Fn(u32) -> bool) -> u32 {
        self.find_at_page(address)
            .unwrap_or_else(|partial| self.find_from(address, partial, accept))
    }

    /// Returns the only entry in the slot of `address`, or 0 if the slot is empty. If the search
    /// reaches anything else, for example a chain, returns its state for [`Radix::find_from`].
    #[inline(always)]
    pub(in crate::cache) fn find_at_page(
        &self,
        address: u64,
    ) -> std::result::Result<u32, PartialSearch> {
        // Addresses that agree in the lower 48 bits share slots; the caller compares the whole
        // address.
        let page = address >> PAGE_BITS;
        let mut value = self.nodes.at(ROOT).slots[slot_of(page, TOP)].load(Ordering::Acquire);
        for level in (0..TOP).rev() {
            if value & NODE == 0 {
                return Err(PartialSearch { value, level: level + 1 });
            }
            value = self.nodes.at_tagged(value).slots[slot_of(page, level)].load(Ordering::Acquire);
        }
        if value < CHAIN { Ok(value) } else { Err(PartialSearch { value, level: 0 }) }
    }

    /// Continues a search from the point where [`Radix::find_at_page`] stopped.
    pub(in crate::cache) fn find_from(
        &self,
        address: u64,
        partial: PartialSearch,
        accept: impl Fn(u32) -> bool,
    ) -> u32 {
        let page = address >> PAGE_BITS;
        let PartialSearch { mut value, mut level } = partial;
        loop {
            if value & CHAIN != 0 {
                match self.find_in_chain(value & INDEX, &accept) {
                    Found::Entry(entry) => return entry,
                    Found::Below(child) => value = child,
                }
            }
            if value & NODE == 0 || level == 0 {
                // A slot that changed its meaning during this search may show a node below a page.
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

    /// Calls `visit` with every entry that is in a slot of these pages during the whole walk, once
    /// for each slot. Other entries may be visited too.
    pub(in crate::cache) fn walk(&self, first: u64, last: u64, visit: &mut impl FnMut(u32)) {
        let last = last.min((END - 1) >> PAGE_BITS);
        // Most invalidations concern pages with few entries or none.
        if let Some((_, slots)) = self.leaf(first, last)
            && slots.len() <= FEW
            && is_empty(slots)
        {
            return;
        }
        let (mut node, mut level) = (ROOT, TOP);
        // Descend to the lowest node that has all the pages, as long as slots hold only a node.
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
        // Most slots are empty, which one test shows for several slots.
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

    /// Visits the entries of a slot's chain. Returns the content of the slot that is left to visit:
    /// its node, its only entry, or nothing.
    ///
    /// A chain that is taken apart during the walk may already be in use at another slot. Then the
    /// generation differs, and the slot is read again.
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
            // A chain that is being reused may lead anywhere, even in a circle, until the
            // generation shows it.
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

    /// Returns the lowest node and its slots for these pages. Most entries are in slots of lowest
    /// nodes. Returns `None` unless one lowest node has all the pages and at least one more page,
    /// and each slot on the path to it holds only a node.
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

/// The point where [`Radix::find_at_page`] stopped at a chain: the slot's value and the slot's
/// level.
#[derive(Clone, Copy)]
pub(in crate::cache) struct PartialSearch {
    value: u32,
    level: u32,
}

enum Found {
    Entry(u32),
    /// The index of the node below the slot, or 0 if there is none.
    Below(u32),
}

/// Returns the first and last page of an invalidated range in the table: all pages if it goes past
/// the table's end.
pub(in crate::cache) fn pages_or_all(start: u64, last: u64) -> (u64, u64) {
    pages(start, last).unwrap_or((0, (END - 1) >> PAGE_BITS))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn ranges() -> impl Strategy<Value = (u64, u64)> {
        let low = prop_oneof![0..64_u64 * 4096, 15 * MIB..17 * MIB, 0..100_u64 << 30];
        // Addresses of the upper half, in four and in five levels of page tables.
        let half = prop_oneof![Just(0), Just(0xffff_u64 << 48), Just(0xff00_u64 << 48)];
        let start = (low, half).prop_map(|(low, half)| low | half);
        let len = prop_oneof![1..3_u64 * 4096, 1..40 * MIB, Just(16 * MIB), Just(64 << 30)];
        (start, len).prop_map(|(start, len)| (start & !0xff, len))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn find_and_walk_return_exactly_the_inserted_entries(
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
