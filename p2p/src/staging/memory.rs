//! The host memory of a pool: one mapping, of huge pages where the machine has them free, near the
//! NIC where it is known where that is.

use std::ptr;

use hmem_core::{Address, AddressRange, Error, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The huge pages that are asked for: the default size of x86-64 and of arm64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;

/// Pages of the pool's own, unmapped with it.
#[derive(Debug)]
pub(super) struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory; nobody is given a reference into it, only addresses.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps at least `len` bytes and touches them, on `node` where that is given and has them.
    pub(super) fn map(len: usize, node: Option<u32>) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut whole = len.next_multiple_of(HUGE_PAGE);
        let mut start = ptr::null_mut();
        if len >= HUGE_PAGE {
            // SAFETY: a new mapping touches nobody's memory.
            let huge = unsafe {
                mmap_anonymous(start, whole, protection, MapFlags::PRIVATE | MapFlags::HUGETLB)
            };
            // None set aside, or not enough: ordinary pages, which the kernel may make huge itself.
            start = huge.unwrap_or(start);
        }
        let mut huge_wanted = false;
        if start.is_null() {
            whole = len.next_multiple_of(rustix::param::page_size());
            // SAFETY: as above.
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
        // A child would get the pages at its first write, and we others: what the NIC has pinned
        // must stay ours (MON-06).
        memory.advise(Advice::LinuxDontFork, "keeping from children");
        if let Some(node) = node {
            memory.prefer(node);
        }
        // SAFETY: the mapping is ours, writable, and nobody else's yet.
        unsafe { ptr::write_bytes(memory.start, 0, whole) };
        Ok(memory)
    }

    fn advise(&self, advice: Advice, what: &'static str) {
        // SAFETY: the mapping is ours; neither advice changes its contents.
        if let Err(errno) = unsafe { madvise(self.start.cast(), self.len, advice) } {
            tracing::debug!(%errno, what, "advice about staging buffers was not taken");
        }
    }

    /// Asks for pages of a node; others will do where it has none left.
    fn prefer(&self, node: u32) {
        const MPOL_PREFERRED: libc::c_int = 1;
        let mut mask = [0u64; 16];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word |= 1 << (node % 64);
        let bits = mask.len() * 64;
        // SAFETY: the mapping is ours, and the mask has `bits` bits.
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
            tracing::debug!(node, %error, "staging buffers are on whatever node the kernel picks");
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
        // SAFETY: the mapping is ours, and who was given addresses in it held the pool.
        if let Err(errno) = unsafe { munmap(self.start.cast(), self.len) } {
            tracing::error!(%errno, "staging buffers could not be unmapped");
        }
    }
}
