//! Insertion and removal of entries, by one thread at a time, while other threads read the table.

use std::iter;

use super::{
    super::super::sync::{AtomicU32, Ordering, advance_generation},
    Bucket, CHAIN, FAN, FAN_BITS, INDEX, NODE, ROOT, Radix, RadixState, TOP, span_bits,
};

/// The number of free nodes that keep their memory. Further free nodes return their pages to the
/// system.
const FREE_NODES_KEPT: usize = 16;

impl Radix {
    /// Inserts an entry into the slots of the pages from `first` to `last`. If no free node or
    /// bucket is left, removes the entry from all slots again and returns `false`. Other threads
    /// may find the entry meanwhile.
    #[inline]
    pub(in crate::cache) fn insert(
        &self,
        state: &mut RadixState,
        first: u64,
        last: u64,
        entry: u32,
    ) -> bool {
        let done = match self.leaf(first, last) {
            Some((node, slots)) => {
                slots.iter().all(|slot| self.add_entry(state, node, slot, entry))
            }
            None => self.insert_into(state, ROOT, TOP, first, last, entry),
        };
        if !done {
            self.remove_from(state, ROOT, TOP, first, last, entry);
        }
        done
    }

    fn insert_into(
        &self,
        state: &mut RadixState,
        node: u32,
        level: u32,
        first: u64,
        last: u64,
        entry: u32,
    ) -> bool {
        let bits = span_bits(level);
        for unit in first >> bits..=last >> bits {
            let from = first.max(unit << bits);
            let to = last.min(((unit + 1) << bits) - 1);
            let slot = &self.nodes.at(node).slots[unit as usize & (FAN - 1)];
            let whole = to - from + 1 == 1 << bits;
            let done = if whole {
                self.add_entry(state, node, slot, entry)
            } else {
                self.child_of(state, node, slot)
                    .is_some_and(|child| self.insert_into(state, child, level - 1, from, to, entry))
            };
            if !done {
                return false;
            }
        }
        true
    }

    #[inline(always)]
    fn add_entry(&self, state: &mut RadixState, node: u32, slot: &AtomicU32, entry: u32) -> bool {
        let value = slot.load(Ordering::Relaxed);
        if value != 0 {
            return self.add_to_chain(state, slot, value, entry);
        }
        state.used_slots[node as usize] += 1;
        slot.store(entry, Ordering::Release);
        true
    }

    #[cold]
    #[inline(never)]
    fn add_to_chain(
        &self,
        state: &mut RadixState,
        slot: &AtomicU32,
        value: u32,
        entry: u32,
    ) -> bool {
        let Some(head) = self.chain_of(state, slot, value) else { return false };
        let mut last = head;
        for bucket in self.buckets_from(head) {
            if let Some(cell) = bucket.entries.iter().find(|cell| cell.load(Ordering::Relaxed) == 0)
            {
                cell.store(entry, Ordering::Release);
                return true;
            }
            last = bucket;
        }
        let Some(index) = self.take_bucket(state) else { return false };
        self.buckets.at(index).entries[0].store(entry, Ordering::Release);
        last.next.store(index, Ordering::Release);
        true
    }

    /// Returns the buckets of a chain from `head` on. The iterator reads the link of each bucket
    /// before it returns the bucket.
    fn buckets_from<'a>(&'a self, head: &'a Bucket) -> impl Iterator<Item = &'a Bucket> {
        iter::successors(Some(head), |bucket| match bucket.next.load(Ordering::Relaxed) {
            0 => None,
            next => Some(self.buckets.at(next)),
        })
    }

    /// Returns the node below a slot, and creates it if necessary. Returns `None` if no free node
    /// or bucket is left.
    fn child_of(&self, state: &mut RadixState, node: u32, slot: &AtomicU32) -> Option<u32> {
        let value = slot.load(Ordering::Relaxed);
        if value & NODE != 0 {
            return Some(value & INDEX);
        }
        if value == 0 {
            let child = self.take_node(state)?;
            state.used_slots[node as usize] += 1;
            slot.store(NODE | child, Ordering::Release);
            return Some(child);
        }
        let head = self.chain_of(state, slot, value)?;
        let child = head.child.load(Ordering::Relaxed);
        if child != 0 {
            return Some(child & INDEX);
        }
        let child = self.take_node(state)?;
        head.child.store(NODE | child, Ordering::Release);
        Some(child)
    }

    /// Returns the first bucket of a slot's chain. If the slot has no chain, moves `value`, the
    /// slot's content, into a new chain. Returns `None` if no free bucket is left.
    fn chain_of(&self, state: &mut RadixState, slot: &AtomicU32, value: u32) -> Option<&Bucket> {
        if value & CHAIN != 0 {
            return Some(self.buckets.at(value & INDEX));
        }
        let index = self.take_bucket(state)?;
        let head = self.buckets.at(index);
        if value & NODE != 0 {
            head.child.store(value, Ordering::Release);
        } else {
            head.entries[0].store(value, Ordering::Release);
        }
        slot.store(CHAIN | index, Ordering::Release);
        Some(head)
    }

    /// Removes an entry from the slots of the pages from `first` to `last`.
    #[inline(always)]
    pub(in crate::cache) fn remove(
        &self,
        state: &mut RadixState,
        first: u64,
        last: u64,
        entry: u32,
    ) {
        let Some((node, slots)) = self.leaf(first, last) else {
            self.remove_from(state, ROOT, TOP, first, last, entry);
            return;
        };
        for slot in slots {
            self.remove_entry(state, node, slot, entry);
        }
        // The empty leaf node stays in the table instead of the one that became empty before.
        if state.used_slots[node as usize] == 0
            && let Some(before) = state.kept_empty.replace(first)
            && before >> FAN_BITS != first >> FAN_BITS
        {
            self.prune(state, before);
        }
    }

    /// Removes the leaf node of a page if the node is empty, and then each parent node that becomes
    /// empty.
    pub(in crate::cache) fn prune(&self, state: &mut RadixState, page: u64) {
        self.remove_from(state, ROOT, TOP, page, page, 0);
    }

    /// Removes an entry from the slots of the pages from `first` to `last`, at and below `node`.
    /// Then removes the nodes that became empty. If `entry` is 0, removes only empty nodes.
    fn remove_from(
        &self,
        state: &mut RadixState,
        node: u32,
        level: u32,
        first: u64,
        last: u64,
        entry: u32,
    ) {
        let bits = span_bits(level);
        for unit in first >> bits..=last >> bits {
            let from = first.max(unit << bits);
            let to = last.min(((unit + 1) << bits) - 1);
            let slot = &self.nodes.at(node).slots[unit as usize & (FAN - 1)];
            if to - from + 1 == 1 << bits {
                if entry != 0 {
                    self.remove_entry(state, node, slot, entry);
                }
                continue;
            }
            let value = slot.load(Ordering::Relaxed);
            let child = if value & CHAIN != 0 {
                self.buckets.at(value & INDEX).child.load(Ordering::Relaxed)
            } else {
                value
            };
            if child & NODE == 0 {
                continue;
            }
            self.remove_from(state, child & INDEX, level - 1, from, to, entry);
            if state.used_slots[(child & INDEX) as usize] == 0 {
                if value & CHAIN != 0 {
                    self.buckets.at(value & INDEX).child.store(0, Ordering::Release);
                    self.collapse(state, node, slot, value & INDEX);
                } else {
                    slot.store(0, Ordering::Release);
                    state.used_slots[node as usize] -= 1;
                }
                self.free_node(state, child & INDEX);
            }
        }
    }

    #[inline(always)]
    fn remove_entry(&self, state: &mut RadixState, node: u32, slot: &AtomicU32, entry: u32) {
        let value = slot.load(Ordering::Relaxed);
        if value == entry {
            slot.store(0, Ordering::Release);
            state.used_slots[node as usize] -= 1;
        } else if value & CHAIN != 0 {
            self.remove_from_chain(state, node, slot, value & INDEX, entry);
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_from_chain(
        &self,
        state: &mut RadixState,
        node: u32,
        slot: &AtomicU32,
        head: u32,
        entry: u32,
    ) {
        let mut cells = self.buckets_from(self.buckets.at(head)).flat_map(|bucket| &bucket.entries);
        if let Some(cell) = cells.find(|cell| cell.load(Ordering::Relaxed) == entry) {
            cell.store(0, Ordering::Release);
            self.collapse(state, node, slot, head);
        }
    }

    /// Replaces a slot's chain by the chain's content if that is a single entry, a single node or
    /// nothing.
    fn collapse(&self, state: &mut RadixState, node: u32, slot: &AtomicU32, head: u32) {
        let head = self.buckets.at(head);
        let mut left = head.child.load(Ordering::Relaxed);
        for cell in self.buckets_from(head).flat_map(|bucket| &bucket.entries) {
            let entry = cell.load(Ordering::Relaxed);
            if entry != 0 && left != 0 {
                return;
            }
            left |= entry;
        }
        slot.store(left, Ordering::Release);
        if left == 0 {
            state.used_slots[node as usize] -= 1;
        }
        advance_generation(&head.generation);
        for bucket in self.buckets_from(head) {
            for cell in &bucket.entries {
                cell.store(0, Ordering::Release);
            }
            bucket.child.store(0, Ordering::Release);
            bucket.next.store(0, Ordering::Release);
            state.free_buckets.push(self.buckets.index_of(bucket));
        }
    }

    fn take_node(&self, state: &mut RadixState) -> Option<u32> {
        if let Some(node) = state.free_nodes.pop() {
            return Some(node);
        }
        let node = state.used_slots.len() as u32;
        if !self.nodes.ensure(node) {
            return None;
        }
        state.used_slots.push(0);
        Some(node)
    }

    fn free_node(&self, state: &mut RadixState, node: u32) {
        if state.free_nodes.len() >= FREE_NODES_KEPT {
            self.nodes.release_pages(node);
        }
        state.free_nodes.push(node);
    }

    fn take_bucket(&self, state: &mut RadixState) -> Option<u32> {
        if let Some(bucket) = state.free_buckets.pop() {
            return Some(bucket);
        }
        let bucket = state.bucket_count + 1;
        if !self.buckets.ensure(bucket) {
            return None;
        }
        state.bucket_count = bucket;
        Some(bucket)
    }
}
