//! The host memory of a staging pool: one mapping. It consists of huge pages if the pool is at
//! least one huge page long and enough huge pages are free.
//!
//! The mapping lies on the NIC's NUMA node if that node is known and has memory.

#![allow(unsafe_code, reason = "maps the memory of a staging pool")]

use std::ptr;

use hmem_core::{Error, Mapping, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};

/// Size of a huge page in bytes. Kernels for x86-64 have it, and those for arm64 with pages of 4,
/// 16 and 64 KiB. The default size of huge pages differs among them.
const HUGE_PAGE: usize = 2 << 20;

/// Maps at least `len` bytes and writes to each page. Uses memory of NUMA node `node`, if it is
/// given and has memory.
pub(super) fn map(len: usize, node: Option<u32>) -> Result<Mapping> {
    let map = |whole, flags| {
        Mapping::anonymous(whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
    };
    let is_long = len >= HUGE_PAGE;
    let whole = len.next_multiple_of(HUGE_PAGE);
    let huge = if is_long { map(whole, MapFlags::HUGETLB | MapFlags::HUGE_2MB).ok() } else { None };
    // The mapping with HUGETLB fails if too few huge pages are reserved. The kernel may still back
    // ordinary pages with huge ones.
    let huge_wanted = is_long && huge.is_none();
    let memory = match huge {
        Some(huge) => huge,
        None => {
            let whole = len.next_multiple_of(rustix::param::page_size());
            map(whole, MapFlags::empty()).map_err(|errno| {
                Error::os(errno, "mmap staging buffers").context("length", whole)
            })?
        }
    };
    if huge_wanted {
        advise(&memory, Advice::LinuxHugepage, "huge pages");
    }
    // After a fork, the kernel copies a page when the parent writes to it, and the parent gets the
    // copy. The NIC would still use the old page (MON-06).
    advise(&memory, Advice::LinuxDontFork, "exclusion from child processes");
    if let Some(node) = node {
        prefer(&memory, node);
    }
    // SAFETY: this function made the mapping, it is writable, and its address is not yet shared.
    unsafe { ptr::write_bytes(memory.as_ptr(), 0, memory.len()) };
    Ok(memory)
}

fn advise(memory: &Mapping, advice: Advice, what: &'static str) {
    // SAFETY: the caller of this function owns the mapping; neither advice changes its contents.
    if let Err(errno) = unsafe { madvise(memory.as_ptr().cast(), memory.len(), advice) } {
        tracing::debug!(%errno, what, "the kernel ignored advice about staging buffers");
    }
}

/// Asks the kernel to use memory of a NUMA node. The kernel uses other nodes if that node has no
/// memory left.
fn prefer(memory: &Mapping, node: u32) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let mut mask = [0u64; 16];
    let Some(word) = mask.get_mut(node as usize / 64) else { return };
    *word |= 1 << (node % 64);
    let bits = mask.len() * 64;
    let (start, len) = (memory.as_ptr(), memory.len());
    // SAFETY: the caller of this function owns the mapping, and the mask has `bits` bits.
    let done = unsafe {
        libc::syscall(libc::SYS_mbind, start, len, MPOL_PREFERRED, mask.as_ptr(), bits, 0)
    };
    if done != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(node, %error, "cannot choose the NUMA node of staging buffers");
    }
}
