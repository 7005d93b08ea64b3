//! Allocation and freeing of host memory.

#![allow(unsafe_code, reason = "allocates and frees owned buffers")]

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    fs,
    ptr::NonNull,
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, Error, ErrorKind, IfaceKind,
    Mapping, Result, os_page_sizes,
};
use rustix::{io::Errno, mm::MapFlags};

use super::{MemFd, System};
use crate::sys;

/// A block of zeroed memory from the global allocator, which is freed on drop.
#[derive(Debug)]
pub(super) struct HeapBlock {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the value owns its memory, which any thread may free. Its bytes are only accessed through
// raw addresses.
unsafe impl Send for HeapBlock {}
// SAFETY: a shared reference to `HeapBlock` gives no access to the bytes.
unsafe impl Sync for HeapBlock {}

impl HeapBlock {
    fn new(layout: Layout) -> Option<Self> {
        // SAFETY: `checked_len` refuses 0 bytes, so the layout is not empty.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }
}

impl Drop for HeapBlock {
    fn drop(&mut self) {
        // SAFETY: `alloc_zeroed` returned the memory for this layout, and drop runs once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The memory behind an allocation. Dropping the value frees the memory.
#[derive(Debug)]
pub(super) enum HostBacking {
    Heap(HeapBlock),
    Mapping(Mapping),
    MemFd(MemFd),
    /// A memory file of another process, which this process opened through an IPC handle.
    Opened(MemFd),
}

impl HostBacking {
    fn start(&self) -> Address {
        match self {
            Self::Heap(heap) => Address::of_ptr(heap.start.as_ptr()),
            Self::Mapping(mapping) => mapping.address(),
            Self::MemFd(file) | Self::Opened(file) => file.range().start(),
        }
    }
}

/// A live allocation of host memory, and the object that owns its memory.
#[derive(Debug)]
pub(super) struct HostAllocation {
    pub(super) allocation: Allocation,
    pub(super) backing: HostBacking,
}

impl HostAllocation {
    /// Returns the memory file behind the allocation, if there is one.
    pub(super) fn memfd(&self) -> Option<&MemFd> {
        match &self.backing {
            HostBacking::MemFd(file) | HostBacking::Opened(file) => Some(file),
            HostBacking::Heap(_) | HostBacking::Mapping(_) => None,
        }
    }
}

impl System {
    /// Allocates `len` bytes from the global allocator, aligned to `align` bytes. Like a `Vec`, the
    /// memory may share pages with other allocations.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`]: `len` is 0.
    /// - [`ErrorKind::InvalidArgument`]: the alignment is no power of two, or is too large.
    /// - [`ErrorKind::OutOfResources`]: no memory is left.
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
        let heap = HeapBlock::new(layout).ok_or_else(|| {
            Error::new(ErrorKind::OutOfResources, "allocate heap")
                .iface(IfaceKind::SYSTEM)
                .context("length", len)
        })?;
        self.add(HostBacking::Heap(heap), len as u64)
    }

    /// Allocates `len` bytes of anonymous memory that shares no page with other allocations, like
    /// [`Allocator::allocate`](hmem_core::iface::Allocator).
    ///
    /// # Errors
    /// [`ErrorKind::ZeroLength`], or the error of `mmap`.
    pub fn mmap(&self, len: u64) -> Result<Allocation> {
        let bytes = checked_len(len, "allocate mmap")?;
        let mapping =
            sys::map_memory(bytes, MapFlags::empty()).map_err(|errno| refused(errno, len))?;
        self.add(HostBacking::Mapping(mapping), len)
    }

    /// Allocates `len` bytes in a new memory file. The allocation can be exported, and other
    /// processes can open it.
    ///
    /// # Errors
    /// The errors of [`MemFd::new`].
    pub fn memfd(&self, len: u64) -> Result<Allocation> {
        self.add(HostBacking::MemFd(MemFd::new(len)?), len)
    }

    /// Allocates `len` bytes in huge pages of `page_size` bytes, which belong to this allocation
    /// only. The allocation has the length `len`, even if that is no multiple of the page size.
    ///
    /// # Errors
    /// - [`ErrorKind::BadPageSize`]: the kernel has no huge pages of this size.
    ///   [`os_page_sizes`] returns its page sizes.
    /// - [`ErrorKind::Unavailable`]: too few huge pages are free. The error states how many huge
    ///   pages the machine has, and the remedy.
    /// - [`ErrorKind::ZeroLength`]: `len` is 0.
    /// - Any other error of `mmap`.
    pub fn huge_pages(&self, len: u64, page_size: usize) -> Result<Allocation> {
        const OPERATION: &str = "allocate huge pages";
        let bytes = checked_len(len, OPERATION)?;
        let sizes = &os_page_sizes()[1..];
        if !sizes.contains(&page_size) {
            return Err(Error::new(ErrorKind::BadPageSize, OPERATION)
                .iface(IfaceKind::SYSTEM)
                .context("page_size", page_size)
                .context("os", format_args!("{sizes:?}"))
                .remedy("use a size of huge pages that the operating system has"));
        }
        let whole = bytes.checked_next_multiple_of(page_size).unwrap_or(usize::MAX);
        match sys::map_huge_pages(whole, page_size) {
            Ok(mapping) => self.add(HostBacking::Mapping(mapping), len),
            Err(errno @ Errno::NOMEM) => {
                let kib = page_size >> 10;
                let path = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
                let there_are = fs::read_to_string(&path).unwrap_or_else(|_| "unknown".to_owned());
                Err(Error::new(ErrorKind::Unavailable, OPERATION)
                    .errno(errno)
                    .iface(IfaceKind::SYSTEM)
                    .context("length", whole)
                    .context("nr_hugepages", there_are.trim())
                    .remedy(format!("reserve pages of {kib} KiB: `echo 64 > {path}` as root")))
            }
            Err(errno) => Err(refused(errno, len)),
        }
    }

    /// Assigns an identity to memory of `len` bytes, and adds it to the live allocations.
    pub(super) fn add(&self, backing: HostBacking, len: u64) -> Result<Allocation> {
        let range = AddressRange::new(backing.start(), len)?;
        let mut allocations = self.allocations.write();
        let allocation = Allocation {
            iface: IfaceKind::SYSTEM,
            range,
            device: None,
            kind: AllocationKind::System,
            id: AllocationId(allocations.next_id),
            token: 0,
        };
        allocations.next_id += 1;
        allocations
            .by_start
            .insert(range.start().0, Arc::new(HostAllocation { allocation, backing }));
        Ok(allocation)
    }

    /// Removes an allocation and releases its memory. `opened` tells the two callers apart: it is
    /// false to free an allocation of this process, and true to close one that this iface opened
    /// through an IPC handle. An allocation of the other sort is refused.
    pub(super) fn end(
        &self,
        allocation: &Allocation,
        opened: bool,
        operation: &'static str,
    ) -> Result<()> {
        let mut allocations = self.allocations.write();
        let start = allocation.base().0;
        let found = allocations.by_start.get(&start).filter(|record| {
            record.allocation == *allocation
                && matches!(record.backing, HostBacking::Opened(_)) == opened
        });
        if found.is_none() {
            return Err(not_live(allocation, operation));
        }
        let record = allocations.by_start.remove(&start);
        // The memory is unmapped outside the lock: unmapping takes long, and a monitor that watches
        // the memory may call this iface.
        drop(allocations);
        drop(record);
        Ok(())
    }

    /// Returns the record of the allocation that contains `address`.
    pub(super) fn record_at(&self, address: Address) -> Option<Arc<HostAllocation>> {
        let allocations = self.allocations.read();
        let (_, record) = allocations.by_start.range(..=address.0).next_back()?;
        record.allocation.range.contains(address).then(|| Arc::clone(record))
    }
}

/// Returns the error for an allocation that was freed or belongs to another iface.
pub(super) fn not_live(allocation: &Allocation, operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .iface(IfaceKind::SYSTEM)
        .context("allocation", allocation.range)
        .context("identity", allocation.id.0)
        .remedy(
            "pass a live allocation of this iface, once: to `free` if the iface allocated it, to \
             `ipc_close` if the iface opened it",
        )
}

fn refused(errno: Errno, len: u64) -> Error {
    let error = Error::os(errno, "mmap").iface(IfaceKind::SYSTEM).context("length", len);
    if errno == Errno::NOMEM {
        return error.remedy("allocate less, free memory, or raise the limit `ulimit -v`");
    }
    error
}

fn checked_len(len: u64, operation: &'static str) -> Result<usize> {
    let error = |kind| Error::new(kind, operation).iface(IfaceKind::SYSTEM).context("length", len);
    if len == 0 {
        return Err(error(ErrorKind::ZeroLength).remedy("allocate at least one byte"));
    }
    let limit = isize::MAX as u64 - sys::page_size();
    usize::try_from(len)
        .ok()
        .filter(|_| len <= limit)
        .ok_or_else(|| error(ErrorKind::OutOfResources))
}
