//! From an address to its allocation: a page table read without locks.
//!
//! The window of addresses is cut into pages, and as many pages as a page has slots make a block (1,024 where
//! pages are 4 KiB), so that the slots of an empty block can be given back. A block that one allocation covers
//! whole has a slot of its own; all other pages have a slot each. A slot holds the number of an [`Entry`] plus
//! one, or 0. Slots and entries lie in arrays that take memory only where they are used, so a lookup is two
//! loads that don't wait for each other, and the entry.
//!
//! Entries are type-stable: a freed one is used again, never unmapped. Its identity doubles as the sequence
//! number of a seqlock: it is 0 while the fields change, and no identity comes twice, so a reader that sees the
//! same identity before and after has fields that belong together. A reader that doesn't has raced with a free
//! of the allocation that its slot named, and may answer that there is none: at some moment of the lookup there
//! was none. No reader ever waits.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, IfaceKind, Result,
};
use rustix::io::Errno;

use crate::lazy::{LazyArray, ZeroValid};

/// Allocations that can be alive at once.
pub(crate) const MAX_ENTRIES: usize = 1 << 24;

const NO_DEVICE: u64 = 0xffff_ffff;

#[derive(Debug)]
#[repr(C, align(32))]
struct Entry {
    id: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    kind_and_device: AtomicU64,
}

// SAFETY: four atomics, for which zero is a value like any other.
unsafe impl ZeroValid for Entry {}

/// Readers' side and writers' side; writers hold the iface's lock.
#[derive(Debug)]
pub(crate) struct Table {
    iface: IfaceKind,
    start: u64,
    len: u64,
    page_shift: u32,
    /// From a page's number to its block's.
    block_shift: u32,
    blocks: LazyArray<AtomicU32>,
    pages: LazyArray<AtomicU32>,
    entries: LazyArray<Entry>,
}

/// What only writers know: how full each block is, and which one emptied last.
#[derive(Debug)]
pub(crate) struct TableWriter {
    used_pages: Vec<u16>,
    emptied: Option<usize>,
}

impl Table {
    /// A table over a window of whole pages.
    pub(crate) fn new(
        iface: IfaceKind,
        window: AddressRange,
        page_size: u64,
    ) -> Result<(Self, TableWriter), Errno> {
        let page_shift = page_size.trailing_zeros();
        let block_shift = page_shift - size_of::<AtomicU32>().trailing_zeros();
        let pages = (window.len() >> page_shift) as usize;
        let blocks = pages.div_ceil(1 << block_shift);
        let table = Self {
            iface,
            start: window.start().0,
            len: window.len(),
            page_shift,
            block_shift,
            blocks: LazyArray::new(blocks)?,
            pages: LazyArray::new(pages)?,
            entries: LazyArray::new_in_huge_pages(MAX_ENTRIES)?,
        };
        Ok((table, TableWriter { used_pages: vec![0; blocks], emptied: None }))
    }

    /// The addresses that the table covers.
    pub(crate) fn window(&self) -> AddressRange {
        AddressRange::new(Address(self.start), self.len).unwrap_or_else(|_| AddressRange::of::<u8>(&[]))
    }

    /// Whether the address lies in the window: the whole cost of a foreign address.
    #[inline]
    pub(crate) fn is_mine(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.start) < self.len
    }

    /// The allocation at an address.
    #[inline]
    pub(crate) fn lookup(&self, address: Address) -> Option<Allocation> {
        let offset = address.0.wrapping_sub(self.start);
        if offset >= self.len {
            return None;
        }
        let page = (offset >> self.page_shift) as usize;
        let small = self.pages[page].load(Ordering::Acquire);
        let large = self.blocks[page >> self.block_shift].load(Ordering::Acquire);
        let slot = if large != 0 { large } else { small };
        if slot == 0 {
            return None;
        }
        self.read(slot - 1, || ()).filter(|allocation| allocation.range.contains(address))
    }

    /// The number of the entry that an address leads to. Only exact for writers.
    pub(crate) fn entry_of(&self, address: Address) -> Option<u32> {
        let offset = address.0.wrapping_sub(self.start);
        if offset >= self.len {
            return None;
        }
        let page = (offset >> self.page_shift) as usize;
        let large = self.blocks[page >> self.block_shift].load(Ordering::Acquire);
        let slot = if large != 0 { large } else { self.pages[page].load(Ordering::Acquire) };
        slot.checked_sub(1)
    }

    /// `meanwhile` is what other threads do between the fields and the second look at the identity; only tests
    /// have something there.
    #[inline]
    fn read(&self, number: u32, meanwhile: impl FnOnce()) -> Option<Allocation> {
        let entry = &self.entries[number as usize];
        let id = entry.id.load(Ordering::Acquire);
        if id == 0 {
            return None;
        }
        let base = entry.base.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        let kind_and_device = entry.kind_and_device.load(Ordering::Relaxed);
        meanwhile();
        // Pairs with the release fence of a writer whose fields we may have read: then we see its identity too.
        fence(Ordering::Acquire);
        if entry.id.load(Ordering::Relaxed) != id {
            return None;
        }
        let device = kind_and_device >> 8;
        Some(Allocation {
            iface: self.iface,
            range: AddressRange::new(Address(base), len).ok()?,
            device: (device != NO_DEVICE).then_some(DeviceId(device as u32)),
            kind: kind_of(kind_and_device as u8),
            id: AllocationId(id),
        })
    }

    /// Makes an allocation visible under an entry number that is free.
    pub(crate) fn publish(&self, writer: &mut TableWriter, number: u32, allocation: &Allocation) {
        let entry = &self.entries[number as usize];
        let device = allocation.device.map_or(NO_DEVICE, |device| u64::from(device.0));
        entry.id.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.base.store(allocation.range.start().0, Ordering::Relaxed);
        entry.len.store(allocation.range.len(), Ordering::Relaxed);
        entry.kind_and_device.store(device << 8 | u64::from(code_of(allocation.kind)), Ordering::Relaxed);
        entry.id.store(allocation.id.0, Ordering::Release);
        self.fill(writer, allocation.range, number + 1);
    }

    /// Makes an allocation invisible.
    pub(crate) fn withdraw(&self, writer: &mut TableWriter, number: u32, range: AddressRange) {
        self.entries[number as usize].id.store(0, Ordering::Relaxed);
        self.fill(writer, range, 0);
    }

    fn fill(&self, writer: &mut TableWriter, range: AddressRange, slot: u32) {
        let offset = range.start().0 - self.start;
        let first = offset >> self.page_shift;
        let end = ((offset + range.len() - 1) >> self.page_shift) + 1;
        let mut page = first;
        while page < end {
            let block = page >> self.block_shift;
            let stop = ((block + 1) << self.block_shift).min(end);
            let count = stop - page;
            let block = block as usize;
            if count == 1 << self.block_shift {
                self.blocks[block].store(slot, Ordering::Release);
            } else {
                for page in page..stop {
                    self.pages[page as usize].store(slot, Ordering::Release);
                }
            }
            writer.count(self, block, count as u16, slot != 0);
            page = stop;
        }
    }
}

impl TableWriter {
    /// Keeps the count of a block, and gives the slots of an emptied block back once another one has emptied:
    /// a block that fills and empties in turn costs no system call.
    fn count(&mut self, table: &Table, block: usize, pages: u16, used: bool) {
        if used {
            self.used_pages[block] += pages;
            return;
        }
        self.used_pages[block] -= pages;
        let had_no_slots = pages == 1 << table.block_shift;
        if self.used_pages[block] > 0 || had_no_slots || self.emptied == Some(block) {
            return;
        }
        if let Some(before) = self.emptied.replace(block)
            && self.used_pages[before] == 0
        {
            let first = before << table.block_shift;
            let count = (1 << table.block_shift).min(table.pages.len() - first);
            if let Err(errno) = table.pages.discard(first, count) {
                tracing::warn!(%errno, "the slots of an empty block stay in memory");
            }
        }
    }
}

const KINDS: [AllocationKind; 6] = [
    AllocationKind::Device,
    AllocationKind::Host,
    AllocationKind::Managed,
    AllocationKind::StreamOrdered,
    AllocationKind::Virtual,
    AllocationKind::System,
];

/// The kind as the number that entries and IPC handles hold.
pub(crate) fn code_of(kind: AllocationKind) -> u8 {
    KINDS.iter().position(|known| *known == kind).unwrap_or(KINDS.len()) as u8
}

#[inline]
pub(crate) fn kind_of(code: u8) -> AllocationKind {
    KINDS.get(usize::from(code)).copied().unwrap_or(AllocationKind::Device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(start: u64, id: u64) -> Allocation {
        Allocation {
            iface: IfaceKind::FIRST_PLUG_IN,
            range: AddressRange::new(Address(start), 4096).unwrap(),
            device: Some(DeviceId(1)),
            kind: AllocationKind::Device,
            id: AllocationId(id),
        }
    }

    #[test]
    fn a_reader_overtaken_by_a_free_or_by_the_next_use_of_the_entry_finds_nothing() {
        let window = AddressRange::new(Address(1 << 30), 64 << 20).unwrap();
        let (table, mut writer) = Table::new(IfaceKind::FIRST_PLUG_IN, window, 4096).unwrap();
        let (first, second) = (allocation(1 << 30, 1), allocation((1 << 30) + 8192, 2));
        table.publish(&mut writer, 0, &first);
        assert_eq!(table.read(0, || ()), Some(first));
        assert_eq!(table.read(0, || table.withdraw(&mut writer, 0, first.range)), None);
        table.publish(&mut writer, 0, &first);
        let use_again = || {
            table.withdraw(&mut writer, 0, first.range);
            table.publish(&mut writer, 0, &second);
        };
        assert_eq!(table.read(0, use_again), None);
        assert_eq!(table.lookup(second.base()), Some(second));
        assert_eq!(table.lookup(first.base()), None);
    }

    #[test]
    fn a_block_that_fills_and_empties_gives_its_slots_back_and_works_again() {
        let window = AddressRange::new(Address(1 << 30), 64 << 20).unwrap();
        let (table, mut writer) = Table::new(IfaceKind::FIRST_PLUG_IN, window, 4096).unwrap();
        let block = 4 << 20;
        for round in 1..5 {
            for number in 0..8_u32 {
                let at = allocation((1 << 30) + u64::from(number) * block, u64::from(round * 8 + number));
                table.publish(&mut writer, number, &at);
                assert_eq!(table.lookup(at.base()), Some(at));
            }
            for number in 0..8_u32 {
                let at = allocation((1 << 30) + u64::from(number) * block, 0);
                table.withdraw(&mut writer, number, at.range);
                assert_eq!(table.lookup(at.base()), None);
            }
        }
        assert!(writer.used_pages.iter().all(|used| *used == 0));
    }
}
