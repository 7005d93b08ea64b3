//! Allocating host memory of every sort.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fs,
    ptr::NonNull,
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, Error, ErrorKind, IfaceKind,
    Result,
};

use super::{MemFd, System};
use crate::sys::{self, Mapping};

const HUGE_PAGE: u64 = 2 << 20;
const HUGE_PAGES_PATH: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Zeroed memory of the global allocator.
#[derive(Debug)]
pub(super) struct Heap {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owned memory, which any thread may free; its bytes are only reached through raw
// addresses.
unsafe impl Send for Heap {}
// SAFETY: as above; `&Heap` gives out nothing.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(layout: Layout) -> Option<Self> {
        // SAFETY: `checked_len` refuses 0 bytes, so the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// What holds the bytes of an allocation.
#[derive(Debug)]
pub(super) enum Backing {
    Heap(Heap),
    Mapping(Mapping),
    MemFd(MemFd),
    /// Another process's memory file.
    Opened(MemFd),
}

impl Backing {
    fn start(&self) -> Address {
        match self {
            Self::Heap(heap) => Address::of_ptr(heap.start.as_ptr()),
            Self::Mapping(mapping) => mapping.address(),
            Self::MemFd(file) | Self::Opened(file) => file.range().start(),
        }
    }
}

/// One live allocation.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) allocation: Allocation,
    pub(super) backing: Backing,
}

impl Record {
    /// The memory file behind it.
    pub(super) fn memfd(&self) -> Option<&MemFd> {
        match &self.backing {
            Backing::MemFd(file) | Backing::Opened(file) => Some(file),
            Backing::Heap(_) | Backing::Mapping(_) => None,
        }
    }
}

impl System {
    /// Allocates `len` bytes as the global allocator does, aligned to `align` bytes: what a `Vec`
    /// has, neighbours in the same page included.
    ///
    /// # Errors
    /// [`ErrorKind::ZeroLength`]; [`ErrorKind::InvalidArgument`] for an alignment that is no power
    /// of two; [`ErrorKind::OutOfResources`].
    pub fn heap(&self, len: u64, align: u64) -> Result<Allocation> {
        let len = checked_len(len, "allocate heap")?;
        let layout =
            usize::try_from(align).ok().and_then(|align| Layout::from_size_align(len, align).ok());
        let layout = layout.ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "allocate heap")
                .iface(IfaceKind::SYSTEM)
                .context("align", align)
                .remedy("the alignment must be a power of two")
        })?;
        let heap = Heap::new(layout).ok_or_else(|| {
            Error::new(ErrorKind::OutOfResources, "allocate heap")
                .iface(IfaceKind::SYSTEM)
                .context("length", len)
        })?;
        self.enter(Backing::Heap(heap), len as u64)
    }

    /// Allocates `len` bytes of anonymous memory in pages of its own.
    /// [`Allocator::allocate`](hmem_core::iface::Allocator) does the same.
    ///
    /// # Errors
    /// [`ErrorKind::ZeroLength`]; what `mmap` reported.
    pub fn mmap(&self, len: u64) -> Result<Allocation> {
        let bytes = checked_len(len, "allocate mmap")?;
        let mapping = Mapping::memory(bytes).map_err(|errno| refused(errno, len))?;
        self.enter(Backing::Mapping(mapping), len)
    }

    /// Allocates `len` bytes in a memory file of their own, which can be exported and opened by
    /// other processes.
    ///
    /// # Errors
    /// As [`MemFd::new`].
    pub fn memfd(&self, len: u64) -> Result<Allocation> {
        self.enter(Backing::MemFd(MemFd::new(len)?), len)
    }

    /// Allocates `len` bytes, rounded up to 2 MiB, in huge pages.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the machine has too few free ones, with the number that it has
    /// in all and how to get more; [`ErrorKind::ZeroLength`]; what `mmap` reported otherwise.
    pub fn huge_pages(&self, len: u64) -> Result<Allocation> {
        let bytes = checked_len(len, "allocate huge pages")?;
        let whole = bytes.checked_next_multiple_of(HUGE_PAGE as usize).unwrap_or(usize::MAX);
        match Mapping::huge_pages(whole) {
            Ok(mapping) => self.enter(Backing::Mapping(mapping), len),
            Err(errno @ rustix::io::Errno::NOMEM) => {
                let there_are =
                    fs::read_to_string(HUGE_PAGES_PATH).unwrap_or_else(|error| error.to_string());
                Err(Error::new(ErrorKind::Unavailable, "allocate huge pages")
                    .errno(errno)
                    .iface(IfaceKind::SYSTEM)
                    .context("length", len)
                    .context("nr_hugepages", there_are.trim())
                    .remedy(format!("write a number of 2 MiB pages to {HUGE_PAGES_PATH}")))
            }
            Err(errno) => Err(refused(errno, len)),
        }
    }

    pub(super) fn enter(&self, backing: Backing, len: u64) -> Result<Allocation> {
        let range = AddressRange::new(backing.start(), len)?;
        let mut book = self.book.write();
        let allocation = Allocation {
            iface: IfaceKind::SYSTEM,
            range,
            device: None,
            kind: AllocationKind::System,
            id: AllocationId(book.next_id),
        };
        book.next_id += 1;
        book.by_start.insert(range.start().0, Arc::new(Record { allocation, backing }));
        Ok(allocation)
    }

    /// Ends an allocation that was made here, or `opened` here.
    pub(super) fn end(
        &self,
        allocation: &Allocation,
        opened: bool,
        operation: &'static str,
    ) -> Result<()> {
        let mut book = self.book.write();
        let start = allocation.base().0;
        let found = book.by_start.get(&start).filter(|record| {
            record.allocation == *allocation
                && matches!(record.backing, Backing::Opened(_)) == opened
        });
        if found.is_none() {
            return Err(not_live(allocation, operation));
        }
        let record = book.by_start.remove(&start);
        // Unmapping outside the lock: it takes its time, and may be watched by something that asks
        // us.
        drop(book);
        drop(record);
        Ok(())
    }

    /// The allocation that holds `address`.
    pub(super) fn record_at(&self, address: Address) -> Option<Arc<Record>> {
        let book = self.book.read();
        let (_, record) = book.by_start.range(..=address.0).next_back()?;
        record.allocation.range.contains(address).then(|| Arc::clone(record))
    }
}

/// The error for an allocation that is freed, or another iface's.
pub(super) fn not_live(allocation: &Allocation, operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .iface(IfaceKind::SYSTEM)
        .context("allocation", allocation.range)
        .context("identity", allocation.id.0)
        .remedy("not a live allocation of this iface: freed already, or opened where it should be allocated")
}

fn refused(errno: rustix::io::Errno, len: u64) -> Error {
    Error::os(errno, "mmap").iface(IfaceKind::SYSTEM).context("length", len)
}

fn checked_len(len: u64, operation: &'static str) -> Result<usize> {
    let error = |kind| Error::new(kind, operation).iface(IfaceKind::SYSTEM).context("length", len);
    if len == 0 {
        return Err(error(ErrorKind::ZeroLength).remedy("ask for at least one byte"));
    }
    let limit = isize::MAX as u64 - sys::page_size();
    usize::try_from(len)
        .ok()
        .filter(|_| len <= limit)
        .ok_or_else(|| error(ErrorKind::OutOfResources))
}
