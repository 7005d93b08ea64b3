//! From an address to its allocation: a page table read without locks.
//!
//! The window of addresses is cut into pages, and as many pages as a page has slots make a block
//! (1,024 where pages are 4 KiB), so that the slots of an empty block can be given back. A block
//! that one allocation covers whole has a slot of its own; all other pages have a slot each. A slot
//! holds the place of an [`Entry`], or 0, where an entry lies that is never written. Slots and
//! entries lie in arrays that take memory only where they are used, so a lookup is two loads that
//! don't wait for each other, and the entry.
//!
//! Entries are type-stable: a freed one is used again, never unmapped. Its identity doubles as the
//! sequence number of a seqlock: it is 0 while the fields change, and no identity comes twice, so a
//! reader that sees the same identity before and after has fields that belong together. A reader
//! that doesn't has raced with a free of the allocation that its slot named, and may answer that
//! there is none: at some moment of the lookup there was none. No reader ever waits.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, IfaceKind, Result,
};
use rustix::io::Errno;

use crate::lazy::{LazyArray, ZeroValid};

/// Allocations that can be alive at once.
pub(crate) const MAX_ENTRIES: usize = 1 << 24;

/// The lowest bit of an entry's last word: whether its upper half is a device's number. The kind
/// lies in between.
const HAS_DEVICE: u64 = 1;
const KIND_SHIFT: u32 = 1;

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
pub(crate) struct PageTable {
    iface: IfaceKind,
    start: u64,
    len: u64,
    page_shift: u32,
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

impl PageTable {
    /// A table over a window of whole pages.
    pub(crate) fn new(
        iface: IfaceKind,
        window: AddressRange,
        page_size: u64,
    ) -> Result<(Self, TableWriter), Errno> {
        let page_shift = page_size.trailing_zeros();
        assert!(
            ONLY_PAGE_SHIFT.is_none_or(|only| only == page_shift),
            "pages of {page_size} bytes"
        );
        let pages = (window.len() >> page_shift) as usize;
        let blocks = pages.div_ceil(1 << block_shift(page_shift));
        let table = Self {
            iface,
            start: window.start().0,
            len: window.len(),
            page_shift,
            blocks: LazyArray::new(blocks)?,
            pages: LazyArray::new(pages)?,
            entries: LazyArray::new_in_huge_pages(MAX_ENTRIES + 1)?,
        };
        Ok((table, TableWriter { used_pages: vec![0; blocks], emptied: None }))
    }

    /// The addresses that the table covers.
    pub(crate) fn window(&self) -> AddressRange {
        AddressRange::new(Address(self.start), self.len)
            .unwrap_or_else(|_| AddressRange::of::<u8>(&[]))
    }

    /// Whether the address lies in the window.
    pub(crate) fn is_mine(&self, address: Address) -> bool {
        address.0.wrapping_sub(self.start) < self.len
    }

    #[inline]
    fn page_shift(&self) -> u32 {
        ONLY_PAGE_SHIFT.unwrap_or(self.page_shift)
    }

    /// From a page's number to its block's.
    #[inline]
    fn block_shift(&self) -> u32 {
        block_shift(self.page_shift())
    }

    /// The slot that an address leads to: 0 where there is nothing, `None` outside the window. Only
    /// exact for writers.
    #[inline]
    fn slot_of(&self, address: Address) -> Option<u32> {
        // The window is whole pages, so that what lies outside has no page in it.
        let page = (address.0.wrapping_sub(self.start) >> self.page_shift()) as usize;
        let small = self.pages.get(page)?.load(Ordering::Acquire);
        let large = self.blocks.get(page >> self.block_shift())?.load(Ordering::Acquire);
        Some(if large != 0 { large } else { small })
    }

    /// The allocation at an address.
    #[inline]
    pub(crate) fn lookup(&self, address: Address) -> Option<Allocation> {
        self.read(self.slot_of(address)?, address, || ())
    }

    /// The number of the entry that an address leads to. Only exact for writers.
    pub(crate) fn entry_of(&self, address: Address) -> Option<u32> {
        self.slot_of(address)?.checked_sub(1)
    }

    /// The allocation of a slot's entry, if it holds the address. `meanwhile` is what other threads
    /// do between the fields and the second look at the identity; only tests have something
    /// there.
    #[inline]
    fn read(&self, slot: u32, address: Address, meanwhile: impl FnOnce()) -> Option<Allocation> {
        let entry = self.entries.get(slot as usize)?;
        let id = entry.id.load(Ordering::Acquire);
        if id == 0 {
            return None;
        }
        let base = entry.base.load(Ordering::Relaxed);
        let len = entry.len.load(Ordering::Relaxed);
        let kind_and_device = entry.kind_and_device.load(Ordering::Relaxed);
        meanwhile();
        // Pairs with the release fence of a writer whose fields we may have read: then we see its
        // identity too.
        fence(Ordering::Acquire);
        if entry.id.load(Ordering::Relaxed) != id || address.0.wrapping_sub(base) >= len {
            return None;
        }
        Some(Allocation {
            iface: self.iface,
            range: AddressRange::checked(Address(base), len)?,
            device: (kind_and_device & HAS_DEVICE != 0)
                .then_some(DeviceId((kind_and_device >> 32) as u32)),
            kind: kind_of((kind_and_device >> KIND_SHIFT) as u8),
            id: AllocationId(id),
        })
    }

    /// Makes an allocation visible under an entry number that is free.
    pub(crate) fn publish(&self, writer: &mut TableWriter, number: u32, allocation: &Allocation) {
        let slot = number + 1;
        let entry = &self.entries[slot as usize];
        let device = allocation.device.map_or(0, |device| u64::from(device.0) << 32 | HAS_DEVICE);
        let kind = u64::from(code_of(allocation.kind)) << KIND_SHIFT;
        entry.id.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.base.store(allocation.range.start().0, Ordering::Relaxed);
        entry.len.store(allocation.range.len(), Ordering::Relaxed);
        entry.kind_and_device.store(device | kind, Ordering::Relaxed);
        entry.id.store(allocation.id.0, Ordering::Release);
        self.fill(writer, allocation.range, slot);
    }

    /// Makes an allocation invisible.
    pub(crate) fn withdraw(&self, writer: &mut TableWriter, number: u32, range: AddressRange) {
        self.entries[number as usize + 1].id.store(0, Ordering::Relaxed);
        self.fill(writer, range, 0);
    }

    fn fill(&self, writer: &mut TableWriter, range: AddressRange, slot: u32) {
        let offset = range.start().0 - self.start;
        let first = offset >> self.page_shift();
        let end = ((offset + range.len() - 1) >> self.page_shift()) + 1;
        let mut page = first;
        while page < end {
            let block = page >> self.block_shift();
            let stop = ((block + 1) << self.block_shift()).min(end);
            let count = stop - page;
            let block = block as usize;
            if count == 1 << self.block_shift() {
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
    /// Keeps the count of a block, and gives the slots of an emptied block back once another one
    /// has emptied: a block that fills and empties in turn costs no system call.
    fn count(&mut self, table: &PageTable, block: usize, pages: u16, used: bool) {
        if used {
            self.used_pages[block] += pages;
            return;
        }
        self.used_pages[block] -= pages;
        let had_no_slots = pages == 1 << table.block_shift();
        if self.used_pages[block] > 0 || had_no_slots || self.emptied == Some(block) {
            return;
        }
        if let Some(before) = self.emptied.replace(block)
            && self.used_pages[before] == 0
        {
            let first = before << table.block_shift();
            let count = (1 << table.block_shift()).min(table.pages.len() - first);
            if let Err(errno) = table.pages.discard(first, count) {
                tracing::warn!(%errno, "the slots of an empty block stay in memory");
            }
        }
    }
}

/// Where all machines of an architecture have pages of one size: a shift by a constant costs less.
const ONLY_PAGE_SHIFT: Option<u32> = if cfg!(target_arch = "x86_64") { Some(12) } else { None };

const fn block_shift(page_shift: u32) -> u32 {
    page_shift - size_of::<AtomicU32>().trailing_zeros()
}

const CODES: u8 = 8;

/// The kind as the number that entries and IPC handles hold.
pub(crate) fn code_of(kind: AllocationKind) -> u8 {
    (0..CODES).find(|code| kind_of(*code) == kind).unwrap_or(CODES)
}

/// In the enum's order, so that there is nothing to do but for numbers that no kind has.
#[inline]
pub(crate) fn kind_of(code: u8) -> AllocationKind {
    match code {
        1 => AllocationKind::Host,
        2 => AllocationKind::HostRegistered,
        3 => AllocationKind::Managed,
        4 => AllocationKind::StreamOrdered,
        5 => AllocationKind::Virtual,
        6 => AllocationKind::Imported,
        7 => AllocationKind::System,
        _ => AllocationKind::Device,
    }
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
        let (table, mut writer) = PageTable::new(IfaceKind::FIRST_PLUG_IN, window, 4096).unwrap();
        let (first, second) = (allocation(1 << 30, 1), allocation((1 << 30) + 8192, 2));
        table.publish(&mut writer, 0, &first);
        assert_eq!(table.read(1, first.base(), || ()), Some(first));
        assert_eq!(
            table.read(1, first.base(), || table.withdraw(&mut writer, 0, first.range)),
            None
        );
        table.publish(&mut writer, 0, &first);
        let use_again = || {
            table.withdraw(&mut writer, 0, first.range);
            table.publish(&mut writer, 0, &second);
        };
        assert_eq!(table.read(1, first.base(), use_again), None);
        assert_eq!(table.lookup(second.base()), Some(second));
        assert_eq!(table.lookup(first.base()), None);
    }

    #[test]
    fn a_block_that_fills_and_empties_gives_its_slots_back_and_works_again() {
        let window = AddressRange::new(Address(1 << 30), 64 << 20).unwrap();
        let (table, mut writer) = PageTable::new(IfaceKind::FIRST_PLUG_IN, window, 4096).unwrap();
        let block = 4 << 20;
        for round in 1..5 {
            for number in 0..8_u32 {
                let at = allocation(
                    (1 << 30) + u64::from(number) * block,
                    u64::from(round * 8 + number),
                );
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
