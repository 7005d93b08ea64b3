//! The host memory of a staging pool: one mapping, of huge pages if the pool is long enough and
//! enough huge pages are free. It lies on the NIC's NUMA node if that node is known and has memory.

#![allow(unsafe_code, reason = "maps the memory of a staging pool")]

use std::ptr;

use hmem_core::{Address, AddressRange, Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size of a huge page in bytes: the default of x86-64, and of arm64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;

/// The mapped memory of a staging pool. Dropping the value unmaps it.
#[derive(Debug)]
pub(super) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory, and this type hands out addresses, never references.
unsafe impl Send for Memory {}
// SAFETY: the mapping is plain memory, and this type hands out addresses, never references.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps at least `len` bytes and writes to each page. Uses memory of NUMA node `node`, if it is
    /// given and has memory.
    pub(super) fn map(len: usize, node: Option<u32>) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut whole = len.next_multiple_of(HUGE_PAGE);
        let mut start = ptr::null_mut();
        if len >= HUGE_PAGE {
            // SAFETY: without a fixed address the kernel places the mapping where nothing is
            // mapped.
            let huge = unsafe {
                mmap_anonymous(start, whole, protection, MapFlags::PRIVATE | MapFlags::HUGETLB)
            };
            // Too few huge pages are reserved. The kernel may still back ordinary pages with huge
            // ones.
            start = huge.unwrap_or(start);
        }
        let mut huge_wanted = false;
        if start.is_null() {
            whole = len.next_multiple_of(rustix::param::page_size());
            // SAFETY: without a fixed address the kernel places the mapping where nothing is
            // mapped.
            start = unsafe { mmap_anonymous(start, whole, protection, MapFlags::PRIVATE) }
                .map_err(|errno| {
                    Error::os(errno, "mmap staging buffers").context("length", whole)
                })?;
            huge_wanted = len >= HUGE_PAGE;
        }
        let memory = Self { start: start.cast(), len: whole };
        if huge_wanted {
            memory.advise(Advice::LinuxHugepage, "huge pages");
        }
        // After a fork a write by the parent would move its page away from the one that the NIC has
        // pinned (MON-06).
        memory.advise(Advice::LinuxDontFork, "exclusion from child processes");
        if let Some(node) = node {
            memory.prefer(node);
        }
        // SAFETY: this function made the mapping, it is writable, and its address is not yet
        // shared.
        unsafe { ptr::write_bytes(memory.start, 0, whole) };
        Ok(memory)
    }

    fn advise(&self, advice: Advice, what: &'static str) {
        // SAFETY: `self` owns the mapping; neither advice changes its contents.
        if let Err(errno) = unsafe { madvise(self.start.cast(), self.len, advice) } {
            tracing::debug!(%errno, what, "the kernel ignored advice about staging buffers");
        }
    }

    /// Asks the kernel to use memory of a NUMA node. The kernel uses other nodes if that node has
    /// no memory left.
    fn prefer(&self, node: u32) {
        const MPOL_PREFERRED: libc::c_int = 1;
        let mut mask = [0u64; 16];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word |= 1 << (node % 64);
        let bits = mask.len() * 64;
        // SAFETY: `self` owns the mapping, and the mask has `bits` bits.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start,
                self.len,
                MPOL_PREFERRED,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        if done != 0 {
            let error = std::io::Error::last_os_error();
            tracing::debug!(node, %error, "cannot choose the NUMA node of staging buffers");
        }
    }

    pub(super) fn address(&self) -> Address {
        Address::of_ptr(self.start)
    }

    pub(super) fn range(&self) -> AddressRange {
        AddressRange::new(self.address(), self.len as u64).expect("a mapping does not wrap")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping. Every user of its addresses keeps the pool alive, and
        // the pool owns `self`.
        if let Err(errno) = unsafe { munmap(self.start.cast(), self.len) } {
            tracing::error!(%errno, "cannot unmap staging buffers");
        }
    }
}
