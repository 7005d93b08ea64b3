//! Changes of the table, made by one thread at a time while other threads walk the table.

use super::{
    super::super::sync::{AtomicU32, Ordering, advance_generation},
    Bucket, CHAIN, FAN, FAN_BITS, INDEX, NODE, ROOT, Radix, Shape, TOP, span_bits,
};

/// The number of free nodes for which the memory stays allocated.
const WARM_NODES: usize = 16;

impl Radix {
    /// Inserts an entry into the slots of these pages. Returns `false`, with nothing inserted, if
    /// the table has no room.
    #[inline]
    pub(in crate::cache) fn insert(
        &self,
        shape: &mut Shape,
        first: u64,
        last: u64,
        entry: u32,
    ) -> bool {
        let done = match self.leaf(first, last) {
            Some((node, slots)) => {
                slots.iter().all(|slot| self.add_entry(shape, node, slot, entry))
            }
            None => self.insert_into(shape, ROOT, TOP, first, last, entry),
        };
        if !done {
            self.remove_from(shape, ROOT, TOP, first, last, entry);
        }
        done
    }

    fn insert_into(
        &self,
        shape: &mut Shape,
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
                self.add_entry(shape, node, slot, entry)
            } else {
                self.child_of(shape, node, slot)
                    .is_some_and(|child| self.insert_into(shape, child, level - 1, from, to, entry))
            };
            if !done {
                return false;
            }
        }
        true
    }

    #[inline(always)]
    fn add_entry(&self, shape: &mut Shape, node: u32, slot: &AtomicU32, entry: u32) -> bool {
        let value = slot.load(Ordering::Relaxed);
        if value != 0 {
            return self.add_to_chain(shape, slot, value, entry);
        }
        shape.filled[node as usize] += 1;
        slot.store(entry, Ordering::Release);
        true
    }

    #[cold]
    #[inline(never)]
    fn add_to_chain(&self, shape: &mut Shape, slot: &AtomicU32, value: u32, entry: u32) -> bool {
        let Some(head) = self.chain_of(shape, slot, value) else { return false };
        let mut bucket = head;
        loop {
            if let Some(cell) = bucket.entries.iter().find(|cell| cell.load(Ordering::Relaxed) == 0)
            {
                cell.store(entry, Ordering::Release);
                return true;
            }
            let next = bucket.next.load(Ordering::Relaxed);
            if next == 0 {
                break;
            }
            bucket = self.buckets.at(next);
        }
        let Some(index) = self.take_bucket(shape) else { return false };
        self.buckets.at(index).entries[0].store(entry, Ordering::Release);
        bucket.next.store(index, Ordering::Release);
        true
    }

    /// Returns the node below a slot. Creates the node if the slot has none.
    fn child_of(&self, shape: &mut Shape, node: u32, slot: &AtomicU32) -> Option<u32> {
        let value = slot.load(Ordering::Relaxed);
        if value & NODE != 0 {
            return Some(value & INDEX);
        }
        if value == 0 {
            let child = self.take_node(shape)?;
            shape.filled[node as usize] += 1;
            slot.store(NODE | child, Ordering::Release);
            return Some(child);
        }
        let head = self.chain_of(shape, slot, value)?;
        let child = head.child.load(Ordering::Relaxed);
        if child != 0 {
            return Some(child & INDEX);
        }
        let child = self.take_node(shape)?;
        head.child.store(NODE | child, Ordering::Release);
        Some(child)
    }

    /// Returns the first bucket of the chain of a slot in use. If the slot has no chain, moves the
    /// slot's content into a new chain.
    fn chain_of(&self, shape: &mut Shape, slot: &AtomicU32, value: u32) -> Option<&Bucket> {
        if value & CHAIN != 0 {
            return Some(self.buckets.at(value & INDEX));
        }
        let index = self.take_bucket(shape)?;
        let head = self.buckets.at(index);
        if value & NODE != 0 {
            head.child.store(value, Ordering::Release);
        } else {
            head.entries[0].store(value, Ordering::Release);
        }
        slot.store(CHAIN | index, Ordering::Release);
        Some(head)
    }

    /// Removes an entry from the slots of these pages.
    #[inline(always)]
    pub(in crate::cache) fn remove(&self, shape: &mut Shape, first: u64, last: u64, entry: u32) {
        let Some((node, slots)) = self.leaf(first, last) else {
            self.remove_from(shape, ROOT, TOP, first, last, entry);
            return;
        };
        for slot in slots {
            self.remove_entry(shape, node, slot, entry);
        }
        if shape.filled[node as usize] == 0 {
            self.leave_empty(shape, first);
        }
    }

    /// Keeps the empty lowest node of this page in the table, because the next insertion is often
    /// near. Removes the empty node that the last such call kept.
    fn leave_empty(&self, shape: &mut Shape, page: u64) {
        if let Some(before) = shape.emptied.replace(page)
            && before >> FAN_BITS != page >> FAN_BITS
        {
            self.prune(shape, before);
        }
    }

    /// Removes the lowest node of a page if it is empty, and then each node above it that becomes
    /// empty.
    pub(in crate::cache) fn prune(&self, shape: &mut Shape, page: u64) {
        self.remove_from(shape, ROOT, TOP, page, page, 0);
    }

    /// Removes an entry, and then the empty nodes on the path to it. Entry 0 removes only nodes.
    fn remove_from(
        &self,
        shape: &mut Shape,
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
                    self.remove_entry(shape, node, slot, entry);
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
            self.remove_from(shape, child & INDEX, level - 1, from, to, entry);
            if shape.filled[(child & INDEX) as usize] == 0 {
                if value & CHAIN != 0 {
                    self.buckets.at(value & INDEX).child.store(0, Ordering::Release);
                    self.collapse(shape, node, slot, value & INDEX);
                } else {
                    slot.store(0, Ordering::Release);
                    shape.filled[node as usize] -= 1;
                }
                self.free_node(shape, child & INDEX);
            }
        }
    }

    #[inline(always)]
    fn remove_entry(&self, shape: &mut Shape, node: u32, slot: &AtomicU32, entry: u32) {
        let value = slot.load(Ordering::Relaxed);
        if value == entry {
            slot.store(0, Ordering::Release);
            shape.filled[node as usize] -= 1;
        } else if value & CHAIN != 0 {
            self.remove_from_chain(shape, node, slot, value & INDEX, entry);
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_from_chain(
        &self,
        shape: &mut Shape,
        node: u32,
        slot: &AtomicU32,
        head: u32,
        entry: u32,
    ) {
        let mut bucket = self.buckets.at(head);
        loop {
            if let Some(cell) =
                bucket.entries.iter().find(|cell| cell.load(Ordering::Relaxed) == entry)
            {
                cell.store(0, Ordering::Release);
                break;
            }
            let next = bucket.next.load(Ordering::Relaxed);
            if next == 0 {
                return;
            }
            bucket = self.buckets.at(next);
        }
        self.collapse(shape, node, slot, head);
    }

    /// Replaces a chain by its content if the content is only one entry, only one node, or nothing.
    fn collapse(&self, shape: &mut Shape, node: u32, slot: &AtomicU32, head: u32) {
        let mut left = self.buckets.at(head).child.load(Ordering::Relaxed);
        let mut index = head;
        while index != 0 {
            let bucket = self.buckets.at(index);
            for cell in &bucket.entries {
                let entry = cell.load(Ordering::Relaxed);
                if entry != 0 && left != 0 {
                    return;
                }
                left |= entry;
            }
            index = bucket.next.load(Ordering::Relaxed);
        }
        slot.store(left, Ordering::Release);
        if left == 0 {
            shape.filled[node as usize] -= 1;
        }
        advance_generation(&self.buckets.at(head).generation);
        let mut index = head;
        while index != 0 {
            let bucket = self.buckets.at(index);
            let next = bucket.next.load(Ordering::Relaxed);
            for cell in &bucket.entries {
                cell.store(0, Ordering::Release);
            }
            bucket.child.store(0, Ordering::Release);
            bucket.next.store(0, Ordering::Release);
            shape.free_buckets.push(index);
            index = next;
        }
    }

    fn take_node(&self, shape: &mut Shape) -> Option<u32> {
        if let Some(node) = shape.free_nodes.pop() {
            return Some(node);
        }
        let node = shape.filled.len() as u32;
        if !self.nodes.ensure(node) {
            return None;
        }
        shape.filled.push(0);
        Some(node)
    }

    fn free_node(&self, shape: &mut Shape, node: u32) {
        if shape.free_nodes.len() >= WARM_NODES {
            self.nodes.release_pages(node);
        }
        shape.free_nodes.push(node);
    }

    fn take_bucket(&self, shape: &mut Shape) -> Option<u32> {
        if let Some(bucket) = shape.free_buckets.pop() {
            return Some(bucket);
        }
        let bucket = shape.buckets_made + 1;
        if !self.buckets.ensure(bucket) {
            return None;
        }
        shape.buckets_made = bucket;
        Some(bucket)
    }
}
