//! The memory of one side: pages that steps register, a page that nobody may access, and a page for
//! the local buffers of transfers. All of it is a file, whose descriptor stands for a dma-buf.

#![allow(unsafe_code, reason = "maps memory, and accesses it by address")]

use std::{
    fs::File,
    os::fd::{AsRawFd, FromRawFd},
    ptr,
};

use hmem_core::{Address, AddressRange};

/// Unit of the layout. A multiple of every page size, so that [`HOLE`] holds whole pages.
const PAGE: u64 = 64 << 10;

/// Length of the registered part in bytes.
pub(crate) const LEN: u64 = PAGE;
/// Offset of the page that nobody may access.
pub(crate) const HOLE: u64 = LEN;
/// Offset of the page for local buffers.
const SCRATCH: u64 = LEN + PAGE;
const TOTAL: u64 = SCRATCH + PAGE;

/// The memory of one side. Every side has the same layout at other addresses.
#[derive(Debug)]
pub(crate) struct Memory {
    start: u64,
    pub(crate) file: File,
}

impl Memory {
    pub(crate) fn new() -> Self {
        // SAFETY: the name is a string. The kernel maps unused addresses, and nothing accesses the
        // hole.
        unsafe {
            let fd = libc::memfd_create(c"differential".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0, "memfd_create");
            let file = File::from_raw_fd(fd);
            file.set_len(TOTAL).expect("a length");
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let memory = libc::mmap(
                ptr::null_mut(),
                TOTAL as usize,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(memory, libc::MAP_FAILED);
            let this = Self { start: memory.expose_provenance() as u64, file };
            let hole = ptr::with_exposed_provenance_mut(this.address(HOLE) as usize);
            assert_eq!(libc::mprotect(hole, PAGE as usize, libc::PROT_NONE), 0);
            this
        }
    }

    /// Returns the address of an offset.
    pub(crate) fn address(&self, offset: u64) -> u64 {
        self.start + offset
    }

    pub(crate) fn range(&self, (offset, len): (u64, u64)) -> AddressRange {
        AddressRange::new(Address(self.address(offset)), len).expect("a range of the memory")
    }

    /// Returns the address of the local buffer.
    pub(crate) fn scratch(&self) -> u64 {
        self.address(SCRATCH)
    }

    /// Returns the range of the local buffer.
    pub(crate) fn scratch_range(&self) -> AddressRange {
        self.range((SCRATCH, PAGE))
    }

    fn parts(&self) -> [(u64, usize); 2] {
        [(self.start, LEN as usize), (self.scratch(), PAGE as usize)]
    }

    /// Returns a copy of all bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity((LEN + PAGE) as usize);
        for (start, len) in self.parts() {
            // SAFETY: the part is mapped, and no transfer is in flight.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(ptr::with_exposed_provenance(start as usize), len)
            });
        }
        bytes
    }

    /// Replaces all bytes.
    pub(crate) fn set(&self, bytes: &[u8]) {
        let mut from = bytes;
        for (start, len) in self.parts() {
            let (part, rest) = from.split_at(len);
            let to = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: the part is mapped, no transfer is in flight, and no reference to it exists.
            unsafe { ptr::copy_nonoverlapping(part.as_ptr(), to, len) };
            from = rest;
        }
    }

    /// Returns the bytes of a memory before the first step: each differs from its neighbours.
    pub(crate) fn initial() -> Vec<u8> {
        (0..LEN + PAGE).map(|at| (at * 7 % 251) as u8).collect()
    }

    /// Fills the local buffer with bytes that depend on the number of the step.
    pub(crate) fn fill_scratch(&self, initial: &[u8], step: usize) {
        let bytes = &initial[step..][..PAGE as usize];
        let to = ptr::with_exposed_provenance_mut(self.scratch() as usize);
        // SAFETY: the page is mapped, no transfer is in flight, and no reference to it exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let memory = ptr::with_exposed_provenance_mut(self.start as usize);
        // SAFETY: `new` made the mapping, and every region of it is closed.
        unsafe { libc::munmap(memory, TOTAL as usize) };
    }
}
