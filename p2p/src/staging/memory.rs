//! The host memory of a staging pool: one mapping, of huge pages if the pool is long enough and
//! enough huge pages are free. It lies on the NIC's NUMA node if that node is known and has memory.

#![allow(unsafe_code, reason = "maps the memory of a staging pool")]

use std::ptr;

use hmem_core::{Address, AddressRange, Error, Mapping, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};

/// Size of a huge page in bytes: the default of x86-64, and of arm64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;

/// The mapped memory of a staging pool. Dropping the value unmaps it: every user of its addresses
/// keeps the pool alive, and the pool owns this value.
#[derive(Debug)]
pub(super) struct PoolMemory(Mapping);

impl PoolMemory {
    /// Maps at least `len` bytes and writes to each page. Uses memory of NUMA node `node`, if it is
    /// given and has memory.
    pub(super) fn map(len: usize, node: Option<u32>) -> Result<Self> {
        let map = |whole, flags| {
            Mapping::anonymous(whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
        };
        let whole = len.next_multiple_of(HUGE_PAGE);
        let huge = if len >= HUGE_PAGE { map(whole, MapFlags::HUGETLB).ok() } else { None };
        // Too few huge pages may be reserved. The kernel may still back ordinary pages with huge
        // ones.
        let huge_wanted = len >= HUGE_PAGE && huge.is_none();
        let memory = match huge {
            Some(huge) => Self(huge),
            None => {
                let whole = len.next_multiple_of(rustix::param::page_size());
                Self(map(whole, MapFlags::empty()).map_err(|errno| {
                    Error::os(errno, "mmap staging buffers").context("length", whole)
                })?)
            }
        };
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
        unsafe { ptr::write_bytes(memory.0.as_ptr(), 0, memory.0.len()) };
        Ok(memory)
    }

    fn advise(&self, advice: Advice, what: &'static str) {
        // SAFETY: `self` owns the mapping; neither advice changes its contents.
        if let Err(errno) = unsafe { madvise(self.0.as_ptr().cast(), self.0.len(), advice) } {
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
                self.0.as_ptr(),
                self.0.len(),
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
        self.0.address()
    }

    pub(super) fn range(&self) -> AddressRange {
        self.0.range()
    }
}
