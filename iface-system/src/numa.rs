//! NUMA nodes of host memory.

#![allow(unsafe_code, reason = "system calls on NUMA nodes")]

use std::{collections::BTreeMap, ptr};

use hmem_core::{AddressRange, Errno, Error, Result};

/// Maximum number of pages to query in a range, evenly spread over it.
const SAMPLES: u64 = 512;

/// Returns the NUMA node that holds most pages of a range of host memory.
///
/// Up to 512 pages, spread evenly over the range, are queried. If several nodes hold equally many
/// pages, the result is the lowest of them.
///
/// Pages that have not been touched are on no node yet. If no page of the range has been touched,
/// the result is the node of the calling thread: with the default memory policy a registration by
/// this thread puts the pages there.
///
/// # Errors
/// The error of the kernel, which names the system call: [`NoSys`] if it has no NUMA support, and
/// [`PermissionDenied`] if a container's seccomp filter forbids `move_pages`.
///
/// # References
/// `move_pages(2)`, `getcpu(2)`
///
/// [`NoSys`]: hmem_core::ErrorKind::NoSys
/// [`PermissionDenied`]: hmem_core::ErrorKind::PermissionDenied
pub fn numa_node(range: AddressRange) -> Result<u32> {
    let page = rustix::param::page_size() as u64;
    let first = range.start().0 / page;
    let last = (range.start().0 + range.len().saturating_sub(1)) / page;
    let step = ((last - first) / SAMPLES + 1) as usize;
    let pages: Vec<_> = (first..=last).step_by(step).map(|number| number * page).collect();
    let mut nodes: BTreeMap<u32, usize> = BTreeMap::new();
    // A negative status is the error of that page alone, which may not be populated.
    for node in statuses(&pages)?.into_iter().filter_map(|status| u32::try_from(status).ok()) {
        *nodes.entry(node).or_default() += 1;
    }
    let most = nodes.iter().max_by_key(|(node, pages)| (**pages, std::cmp::Reverse(**node)));
    match most {
        Some((node, _)) => Ok(*node),
        None => own_node(),
    }
}

/// Returns a number for each page: its NUMA node, or a negative errno.
fn statuses(pages: &[u64]) -> Result<Vec<i32>> {
    let mut status = vec![0_i32; pages.len()];
    // SAFETY: without a list of target nodes the call moves nothing: it reads `pages.len()`
    // addresses, does not touch the memory at them, and writes as many numbers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            ptr::null::<i32>(),
            status.as_mut_ptr(),
            0,
        )
    };
    if result < 0 { Err(failed("move_pages")) } else { Ok(status) }
}

/// Returns the NUMA node of the CPU that runs the calling thread.
fn own_node() -> Result<u32> {
    let mut node = 0_u32;
    // SAFETY: the call writes one number to `node`; the other pointers may be null.
    let result = unsafe {
        libc::syscall(libc::SYS_getcpu, ptr::null_mut::<u32>(), &raw mut node, ptr::null::<u8>())
    };
    if result < 0 { Err(failed("getcpu")) } else { Ok(node) }
}

fn failed(call: &'static str) -> Error {
    let errno = Errno::of(&std::io::Error::last_os_error());
    Error::os(errno, call).remedy(
        "allow the call (a container's seccomp filter may forbid it), or choose the NICs yourself",
    )
}

#[cfg(test)]
mod tests {
    use hmem_core::Address;

    use super::*;

    /// The range ends at the last address, so its start plus its length overflows 64 bits.
    #[test]
    fn range_at_the_end_of_the_address_space_is_queried() {
        let range = AddressRange::new(Address(u64::MAX - 4095), 4096).unwrap();
        if let Err(error) = numa_node(range) {
            assert_eq!(error.operation(), "move_pages", "a seccomp filter may refuse the call");
        }
    }
}
