//! The host memory of a staging pool: one mapping. The mapping consists of huge pages if one of the
//! kernel's sizes suits the pool (`suitable`), and enough pages of that size are free. Otherwise it
//! consists of ordinary pages.
//!
//! The mapping lies on the NIC's NUMA node if that node is known and has memory.

#![allow(unsafe_code, reason = "maps the memory of a staging pool")]

use std::ptr;

use hmem_core::{Error, Mapping, Result, os_page_sizes};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};

/// Returns the sizes of huge pages that suit a mapping of `len` bytes, largest first. A size suits
/// if it makes the mapping longer by at most an eighth of `len`, because the whole mapping is
/// pinned. `sizes` are the page sizes of the kernel in ascending order. The first of them is no
/// huge page.
fn suitable(len: usize, sizes: &[usize]) -> impl Iterator<Item = usize> {
    let huge = sizes.iter().skip(1).rev().copied();
    huge.filter(move |size| len.next_multiple_of(*size) - len <= len / 8)
}

/// Returns the flags of `mmap` for huge pages of `size` bytes.
fn huge_flags(size: usize) -> MapFlags {
    let bits = size.trailing_zeros() << libc::MAP_HUGE_SHIFT;
    MapFlags::HUGETLB | MapFlags::from_bits_retain(bits)
}

/// Maps at least `len` bytes and writes to each page. Uses memory of NUMA node `node`, if it is
/// given and has memory.
pub(super) fn map(len: usize, node: Option<u32>) -> Result<Mapping> {
    let map = |whole, flags| {
        Mapping::anonymous(whole, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | flags)
    };
    let mut sizes = suitable(len, os_page_sizes()).peekable();
    let is_long = sizes.peek().is_some();
    let huge = sizes.find_map(|size| map(len.next_multiple_of(size), huge_flags(size)).ok());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// ARM-02: the huge pages of a pool have the sizes that the kernel has, on x86-64 and on arm64
    /// with each of its page sizes. No size is used that would make the pool longer by more than an
    /// eighth.
    #[test]
    fn huge_pages_of_a_pool_follow_the_sizes_of_the_kernel() {
        const KIB: usize = 1 << 10;
        const MIB: usize = 1 << 20;
        // The page sizes of x86-64, and of arm64 with pages of 4, 16 and 64 KiB.
        let x86 = [4 * KIB, 2 * MIB, 1024 * MIB];
        let arm_4k = [4 * KIB, 64 * KIB, 2 * MIB, 32 * MIB, 1024 * MIB];
        let arm_16k = [16 * KIB, 2 * MIB, 32 * MIB, 1024 * MIB];
        let arm_64k = [64 * KIB, 2 * MIB, 512 * MIB, 16 << 30];
        for (len, sizes, expected) in [
            (4 * MIB, &x86[..], &[2 * MIB][..]),
            (4 * MIB, &arm_4k, &[2 * MIB, 64 * KIB]),
            (32 * MIB, &arm_16k, &[32 * MIB, 2 * MIB]),
            (512 * MIB, &arm_64k, &[512 * MIB, 2 * MIB]),
            // Pages of 512 MiB and 1 GiB would be pinned for little memory.
            (600 * MIB, &arm_64k, &[2 * MIB]),
            (1025 * MIB, &x86, &[2 * MIB]),
            (MIB, &x86, &[]),
            (4 * MIB, &x86[..1], &[]),
        ] {
            assert_eq!(suitable(len, sizes).collect::<Vec<_>>(), expected, "{len} of {sizes:?}");
        }
        let flags = |size| huge_flags(size).difference(MapFlags::HUGETLB).bits();
        let (kib_64, gib_16) = (libc::MAP_HUGE_64KB as u32, libc::MAP_HUGE_16GB as u32);
        assert_eq!([flags(64 * KIB), flags(16 << 30)], [kib_64, gib_16]);
        assert_eq!(flags(2 * MIB), MapFlags::HUGE_2MB.bits());
    }
}
