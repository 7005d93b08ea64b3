//! Lookup of allocations by address: a page table that is read without locks.
//!
//! # Slots
//!
//! The window of addresses is divided into pages, and consecutive pages form blocks. Each block and
//! each page has a slot. A slot holds the index of an [`AllocationEntry`], or 0. If one allocation
//! covers a whole block, the slot of the block is set. Otherwise the slots of its pages are used. A
//! lookup loads both slots independently of each other, and then the entry. Entry 0 is never
//! written.
//!
//! Slots and entries lie in arrays that use memory only where they were written. A block has as
//! many pages as slots fit into one page of memory (1,024 with pages of 4 KiB). So the slots of an
//! empty block fill one page, which can be returned to the kernel.
//!
//! # Entries
//!
//! Entries are type-stable: a freed entry is reused, and never unmapped. The identity in an entry
//! is also the sequence number of a seqlock. It is 0 while the other fields change, and no identity
//! occurs twice. If a reader sees the same identity before and after it reads the other fields,
//! these are consistent.
//!
//! If the two identities differ, the allocation was freed during the lookup. The reader may then
//! return `None`, because at some moment of the lookup there was no allocation. No reader ever
//! waits.

#![allow(unsafe_code, reason = "arrays of zeroed elements")]

use std::{
    ops::RangeInclusive,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    IfaceKind, Result, Wipeable,
};

use super::lazy::LazyArray;

/// The maximum number of live allocations of one iface.
pub(crate) const MAX_ENTRIES: usize = 1 << 24;

/// A bit of [`AllocationEntry::kind_and_device`], set if the allocation belongs to a device. The
/// upper 32 bits then hold the device's number. The allocation's kind is in the bits between.
const HAS_DEVICE: u64 = 1;
const KIND_SHIFT: u32 = 1;

#[derive(Debug)]
#[repr(C, align(32))]
struct AllocationEntry {
    /// The allocation's identity, or 0 while the entry is free or a writer changes it.
    id: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    kind_and_device: AtomicU64,
}

// SAFETY: the entry is four atomics. Zero is a valid value of each, and they need no drop.
unsafe impl Wipeable for AllocationEntry {}

/// The page table of one simulated iface. Readers need no lock. Writers must hold the iface's lock.
#[derive(Debug)]
pub(crate) struct PageTable {
    iface: IfaceKind,
    /// The addresses that the table covers.
    window: AddressRange,
    /// Base-2 logarithm of the page size.
    page_shift: u32,
    /// The slot of each block of pages, which is used if one allocation covers the whole block.
    blocks: LazyArray<AtomicU32>,
    /// The slot of each page, which is valid only if the slot of the page's block is 0.
    pages: LazyArray<AtomicU32>,
    entries: LazyArray<AllocationEntry>,
}

/// The state of a [`PageTable`] that only writers use.
#[derive(Debug)]
pub(crate) struct TableWriter {
    /// The number of pages of each block that belong to an allocation.
    used_pages: Vec<u16>,
    /// The block that became empty last, among those whose page slots were in use. The kernel gets
    /// the memory of its slots back only when another block becomes empty.
    emptied: Option<usize>,
}

impl PageTable {
    /// Creates an empty table for the addresses of `window`, which must be whole pages.
    ///
    /// # Errors
    /// - Unsupported: the table cannot have pages of this size.
    /// - The error of `mmap`.
    pub(crate) fn new(
        iface: IfaceKind,
        window: AddressRange,
        page_size: u64,
    ) -> Result<(Self, TableWriter)> {
        let page_shift = page_size.trailing_zeros();
        if !page_size.is_power_of_two() || !PAGE_SHIFTS.contains(&page_shift) {
            return Err(Error::new(ErrorKind::Unsupported, "build simulated device")
                .context("page size", page_size)
                .context("smallest", 1_u64 << PAGE_SHIFTS.start())
                .context("largest", 1_u64 << PAGE_SHIFTS.end())
                .remedy("run the kernel with pages of a size in between: no other is supported"));
        }
        let failed = |errno| Error::os(errno, "mmap").context("table of a window of", window.len());
        let pages = (window.len() >> page_shift) as usize;
        let blocks = pages.div_ceil(1 << block_shift(page_shift));
        let table = Self {
            iface,
            window,
            page_shift,
            blocks: LazyArray::new(blocks).map_err(failed)?,
            pages: LazyArray::new(pages).map_err(failed)?,
            entries: LazyArray::new_in_huge_pages(MAX_ENTRIES + 1).map_err(failed)?,
        };
        Ok((table, TableWriter { used_pages: vec![0; blocks], emptied: None }))
    }

    /// Returns the addresses that the table covers.
    pub(crate) fn window(&self) -> AddressRange {
        self.window
    }

    /// Returns true if the address lies in the range that the table covers.
    pub(crate) fn is_mine(&self, address: Address) -> bool {
        self.window.contains(address)
    }

    #[inline]
    fn page_shift(&self) -> u32 {
        ONLY_PAGE_SHIFT.unwrap_or(self.page_shift)
    }

    /// Returns the number of bits by which a page number is shifted right to get its block number.
    #[inline]
    fn block_shift(&self) -> u32 {
        block_shift(self.page_shift())
    }

    /// Returns the content of an address's slot: the index of an entry, or 0 if there is no
    /// allocation. Returns `None` if the table does not cover the address. For callers without the
    /// writers' lock, the result may be out of date.
    #[inline]
    fn slot_of(&self, address: Address) -> Option<u32> {
        // The range `window` consists of whole pages, so an address outside it lies on none of its
        // pages.
        let offset = address.0.wrapping_sub(self.window.start().0);
        let page = (offset >> self.page_shift()) as usize;
        let small = self.pages.get(page)?.load(Ordering::Acquire);
        let large = self.blocks.get(page >> self.block_shift())?.load(Ordering::Acquire);
        Some(if large != 0 { large } else { small })
    }

    /// Returns the allocation that contains `address`, if there is one.
    #[inline]
    pub(crate) fn lookup(&self, address: Address) -> Option<Allocation> {
        self.read(self.slot_of(address)?, address, || ())
    }

    /// Returns the number of the entry for the allocation that contains `address`, if there is one.
    /// The caller must hold the writers' lock.
    pub(crate) fn entry_of(&self, address: Address) -> Option<u32> {
        self.slot_of(address)?.checked_sub(1)
    }

    /// Returns the allocation in entry `slot` if it contains `address`. Returns `None` if the
    /// allocation does not contain `address`, if the entry is free, or if another thread changes
    /// the entry during the call.
    ///
    /// Tests pass a function `meanwhile` that changes the entry. It runs after the fields were read
    /// and before they are checked.
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
        // The fence pairs with the release fence in `publish`. If this reader has read fields of a
        // new allocation, it also sees that the identity has changed.
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
            token: 0,
        })
    }

    /// Writes an allocation to the free entry `number`, and makes it visible to lookups.
    pub(crate) fn publish(&self, writer: &mut TableWriter, number: u32, allocation: &Allocation) {
        let slot = number + 1;
        let entry = &self.entries[slot as usize];
        let device = allocation.device.map_or(0, |device| u64::from(device.0) << 32 | HAS_DEVICE);
        let kind = (allocation.kind as u64) << KIND_SHIFT;
        entry.id.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        entry.base.store(allocation.range.start().0, Ordering::Relaxed);
        entry.len.store(allocation.range.len(), Ordering::Relaxed);
        entry.kind_and_device.store(device | kind, Ordering::Relaxed);
        entry.id.store(allocation.id.0, Ordering::Release);
        self.fill(writer, allocation.range, slot);
    }

    /// Empties entry `number` and the slots of `range`, so that lookups find the allocation no
    /// longer.
    pub(crate) fn withdraw(&self, writer: &mut TableWriter, number: u32, range: AddressRange) {
        self.entries[number as usize + 1].id.store(0, Ordering::Relaxed);
        self.fill(writer, range, 0);
    }

    fn fill(&self, writer: &mut TableWriter, range: AddressRange, slot: u32) {
        let offset = range.start().0 - self.window.start().0;
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
    /// Counts `pages` pages of a block as used or unused.
    ///
    /// The memory for the slots of an empty block is freed only when another block becomes empty.
    /// So a block that repeatedly fills and empties costs no system call.
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

/// Base-2 logarithm of the page size, or `None` if machines of this architecture differ in page
/// size. The constant makes lookups cheaper.
const ONLY_PAGE_SHIFT: Option<u32> = if cfg!(target_arch = "x86_64") { Some(12) } else { None };

/// Base-2 logarithms of the page sizes that a [`PageTable`] can have. The number of pages of a
/// block, which grows with the page size, must fit into an element of [`TableWriter::used_pages`].
const PAGE_SHIFTS: RangeInclusive<u32> = match ONLY_PAGE_SHIFT {
    Some(only) => only..=only,
    None => 12..=17,
};

const fn block_shift(page_shift: u32) -> u32 {
    page_shift - size_of::<AtomicU32>().trailing_zeros()
}

/// Returns the allocation kind with the enum's discriminant `code`, or `Device` for an unknown
/// number. Table entries and IPC handles store kinds as these numbers.
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
            token: 0,
        }
    }

    #[test]
    fn reader_that_races_with_free_or_reuse_finds_nothing() {
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

    /// ARM-02: the table refuses a page size that is no power of two, or is too small or too large.
    #[test]
    fn page_size_that_the_table_cannot_have_is_refused() {
        let window = AddressRange::new(Address(1 << 30), 64 << 20).unwrap();
        assert!(1 << block_shift(*PAGE_SHIFTS.end()) <= usize::from(u16::MAX));
        for page_size in [0, 1, 1 << 11, 3 << 12, 1 << 18] {
            let refused = PageTable::new(IfaceKind::FIRST_PLUG_IN, window, page_size).err();
            let error = refused.expect("pages of an odd size");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let value = page_size.to_string();
            assert_eq!(error.context_value("page size"), Some(value.as_str()));
            assert!(error.remedy_text().is_some());
        }
    }

    #[test]
    fn emptied_block_returns_its_slots_and_is_reusable() {
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
