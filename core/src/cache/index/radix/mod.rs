//! The table from addresses to entries: a page table with slots that point directly to entries.
//!
//! The table has three levels of nodes. A slot covers 64 GiB in the root node, 16 MiB in a node of
//! the middle level, and a page of 4 KiB in a leaf node, on machines of every page size. An entry
//! is stored in the highest slots whose pages it all touches. A page counts even if the entry
//! covers only a part of the page. If a slot must hold several entries, or entries and a node, it
//! points to a chain of buckets.
//!
//! Lookups and invalidations walk the table without a lock. One thread at a time alters it:
//! [`RadixState`] is under the cache's lock.

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
/// The number of slots in a node.
const FAN: usize = 1 << FAN_BITS;
/// The level of the root node. Leaf nodes have the level 0.
#[cfg(not(loom))]
const TOP: u32 = 2;
#[cfg(loom)]
const TOP: u32 = 1;
/// The end of the table's addresses. Addresses that differ by a multiple of this number share
/// slots. User addresses of the CPU usually end at 2^47 or 2^48.
const END: u64 = 1 << (PAGE_BITS + FAN_BITS * (TOP + 1));

/// The index of the root node, which always exists.
const ROOT: u32 = 1;

/// The tag bit of a slot's value, set if the slot holds the index of a node.
const NODE: u32 = 1 << 31;
/// The tag bit of a slot's value, set if the slot holds the index of the first bucket of a chain. A
/// slot without a tag holds the index of an entry, or 0.
const CHAIN: u32 = 1 << 30;
/// The mask of the index in a slot's value.
const INDEX: u32 = CHAIN - 1;

/// The highest index that an entry may have.
pub(in crate::cache) const MAX_INDEX: u32 = INDEX;

/// The number of slots that a walk tests for being empty in one step.
const SLOTS_PER_TEST: usize = 8;

/// The largest number of slots that a walk tests at its start. If these slots are in one leaf node
/// and all empty, the walk ends at once.
const MAX_SLOTS_TO_TEST: usize = 64;

#[repr(C)]
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
struct Node {
    slots: [AtomicU32; FAN],
}

// SAFETY: an atomic of zero bytes is 0 and needs no drop.
#[allow(unsafe_code, reason = "zero bytes are an empty node")]
unsafe impl Zeroed for Node {}

/// The number of entries that one bucket can hold.
#[cfg(not(loom))]
const WIDTH: usize = 5;
#[cfg(loom)]
const WIDTH: usize = 2;

/// A member of a chain, the linked list of buckets for a slot with more than one entry or node.
#[repr(C)]
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))]
struct Bucket {
    /// The generation of the chains that begin with this bucket: incremented each time such a chain
    /// is removed from its slot. The number wraps around.
    generation: AtomicU32,
    /// The tagged index of the node below the chain's slot, or 0. Used only in the first bucket of
    /// a chain.
    child: AtomicU32,
    /// The index of the chain's next bucket, or 0.
    next: AtomicU32,
    /// The indices of the bucket's entries, with 0 for each unused element.
    entries: [AtomicU32; WIDTH],
}

// SAFETY: an atomic of zero bytes is 0 and needs no drop.
#[allow(unsafe_code, reason = "zero bytes are an empty bucket")]
unsafe impl Zeroed for Bucket {}

/// The nodes and buckets of the table, which any thread may read.
#[derive(Debug)]
pub(in crate::cache) struct Radix {
    nodes: Arena<Node>,
    buckets: Arena<Bucket>,
}

/// The part of the table's state that the cache's lock protects. Lookups do not read it.
#[derive(Debug)]
pub(in crate::cache) struct RadixState {
    /// The number of slots in use in each node, by the node's index.
    used_slots: Vec<u32>,
    /// A page of the kept leaf node, which stays in the table although it became empty, because the
    /// next insertion is often near. The next leaf node that becomes empty takes its place. The
    /// kept node may have entries again.
    kept_empty: Option<u64>,
    free_nodes: Vec<u32>,
    /// The number of buckets that were used at least once. Their indices begin at 1.
    bucket_count: u32,
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

/// Returns whether all slots are empty.
#[inline(always)]
fn is_empty(slots: &[AtomicU32]) -> bool {
    let any =
        |slots: &[AtomicU32]| slots.iter().fold(0, |any, slot| any | slot.load(Ordering::Acquire));
    let (groups, rest) = slots.as_chunks::<SLOTS_PER_TEST>();
    groups.iter().fold(any(rest), |all, group| all | any(group)) == 0
}

/// Returns the first and last page of the table that a range touches, or `None` if the range
/// crosses the table's end.
///
/// Addresses that differ only in their highest bits share a slot. Device memory may lie in the
/// upper half of the address space, where all the highest bits are set (Intel's does). So a thread
/// that finds an entry must compare whole addresses.
pub(in crate::cache) fn pages(start: u64, last: u64) -> Option<(u64, u64)> {
    let page = |address: u64| (address % END) >> PAGE_BITS;
    (start / END == last / END).then_some((page(start), page(last)))
}

impl Radix {
    /// Creates a table for up to `entries` ranges.
    pub(in crate::cache) fn new(entries: usize) -> Result<(Self, RadixState)> {
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
        let state = RadixState {
            used_slots: vec![0, 0],
            kept_empty: None,
            free_nodes: Vec::new(),
            bucket_count: 0,
            free_buckets: Vec::new(),
        };
        Ok((radix, state))
    }

    /// Returns an entry in a slot of `address`, or 0 for none. If the slot holds only one entry,
    /// returns that entry without asking `accept`. If the slot holds several, returns the first one
    /// for which `accept` returns true.
    pub(in crate::cache) fn find(&self, address: u64, accept: impl Fn(u32) -> bool) -> u32 {
        self.find_at_page(address)
            .unwrap_or_else(|partial| self.find_from(address, partial, accept))
    }

    /// Searches for `address` from the root node down to a leaf node. Returns the entry in the leaf
    /// node's slot, or 0 if that slot is empty.
    ///
    /// # Errors
    /// The slot at which the search stopped, for [`Radix::find_from`]. The search stops at a slot
    /// that holds a chain. Above the leaf nodes it also stops at a slot that holds an entry or is
    /// empty.
    #[inline(always)]
    pub(in crate::cache) fn find_at_page(
        &self,
        address: u64,
    ) -> std::result::Result<u32, PartialSearch> {
        // Addresses with the same lower 48 bits share slots. The caller compares the whole address.
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

    /// Continues a search from the slot at which [`Radix::find_at_page`] stopped.
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
                // If other threads altered the table meanwhile, a slot of the lowest level may seem
                // to hold a node. Then the search returns 0, which means "no entry".
                return if value < CHAIN { value } else { 0 };
            }
            level -= 1;
            value =
                self.nodes.at(value & INDEX).slots[slot_of(page, level)].load(Ordering::Acquire);
        }
    }

    /// Returns the first entry of a chain that `accept` accepts, or else the node below the chain's
    /// slot. `head` is the index of the chain's first bucket.
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

    /// Calls `visit` with the entries in the slots of the pages from `first` to `last`. The walk
    /// visits each entry that is in such a slot during the whole walk, and may visit an entry
    /// several times. It may or may not visit entries that other threads insert or remove
    /// meanwhile.
    pub(in crate::cache) fn walk(&self, first: u64, last: u64, visit: &mut impl FnMut(u32)) {
        let last = last.min((END - 1) >> PAGE_BITS);
        // Most invalidations concern pages with few entries or none.
        if let Some((_, slots)) = self.leaf(first, last)
            && slots.len() <= MAX_SLOTS_TO_TEST
            && is_empty(slots)
        {
            return;
        }
        let (mut node, mut level) = (ROOT, TOP);
        // Descend to the lowest node that covers all these pages, or to a node whose slot for them
        // holds an entry or a chain.
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

    /// Visits the entries in the slots of the pages from `first` to `last`, at and below `node`.
    fn walk_node(&self, node: u32, level: u32, first: u64, last: u64, visit: &mut impl FnMut(u32)) {
        let bits = span_bits(level);
        let slots = &self.nodes.at(node).slots[slot_of(first, level)..=slot_of(last, level)];
        let mut unit = first >> bits;
        let mut before = 0;
        // Most slots are empty, so several are tested in one step.
        for slots in slots.chunks(SLOTS_PER_TEST) {
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

    /// Visits the entries of a slot's chain. Returns the node below the chain, or 0 for none. If
    /// another thread replaces the chain meanwhile, returns the slot's new content: an entry, a
    /// node or 0.
    ///
    /// During the walk, another thread may remove the chain and reuse its buckets for another slot.
    /// That changes the generation of the chain's first bucket, and the walk reads the slot again.
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
            // If the chain's buckets are being reused, their links may even form a cycle. The
            // changed generation ends the loop.
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

    /// Returns the leaf node that holds the pages from `first` to `last`, with the slots of these
    /// pages. Callers try this before a walk from the root node, because most entries are in leaf
    /// nodes.
    ///
    /// Returns `None` in these cases:
    ///
    /// - The pages are in several leaf nodes, or are all pages of one leaf node.
    /// - No leaf node exists for the pages, or a chain or an entry is in a slot above it.
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

/// The slot at which [`Radix::find_at_page`] stopped: its value and its level in the table.
#[derive(Clone, Copy)]
pub(in crate::cache) struct PartialSearch {
    value: u32,
    level: u32,
}

enum Found {
    Entry(u32),
    /// The search found no acceptable entry in the chain. The value is the tagged index of the node
    /// below the chain's slot, or 0 if there is no node.
    Below(u32),
}

/// Returns the first and last page of the table that an invalidated range touches. For a range that
/// crosses the table's end, these are all pages.
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
        // The upper half of the address space, with four and with five levels of page tables.
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
            let (radix, mut state) = Radix::new(64).unwrap();
            let mut oracle = BTreeMap::new();
            for (index, ((start, len), drop_first)) in steps.into_iter().enumerate() {
                let entry = index as u32 + 1;
                let (first, last) = pages(start, start + len - 1).unwrap();
                prop_assert!(radix.insert(&mut state, first, last, entry));
                oracle.insert(entry, (first, last));
                if drop_first {
                    let (gone, (first, last)) = oracle.pop_first().unwrap();
                    radix.remove(&mut state, first, last, gone);
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
                radix.remove(&mut state, first, last, entry);
            }
            if let Some(page) = state.kept_empty {
                radix.prune(&mut state, page);
            }
            prop_assert_eq!(&state.used_slots[1..], &vec![0; state.used_slots.len() - 1]);
            prop_assert_eq!(state.free_nodes.len(), state.used_slots.len() - 2);
            prop_assert_eq!(state.free_buckets.len() as u32, state.bucket_count);
        }
    }
}
