//! Host memory: copies, the pages that are present, and write-back of persistent memory.
//!
//! Memory that is known to be mapped is copied directly. Other memory is copied by system calls,
//! which report unmapped pages.
//!
//! # Persistent memory
//!
//! RMA_PMEM makes bytes persistent before a remote write completes:
//!
//! | memory | written back by |
//! |---|---|
//! | pages of a file (page cache or DAX, also MAP_SYNC) | `msync(MS_SYNC)` of the touched pages |
//! | device DAX, owned by the region, on x86-64 | the cache lines of the touched bytes |
//! | other device DAX | nothing: the transfer fails |
//! | anonymous and private pages | nothing: no copy of them outlives the process |
//! | a file that the NIC imported by its fd | `msync` of its mapping, or `fdatasync` |
//! | memory of a device | the device's flush (`InboundFlush::flush`) |
//!
//! `msync` acts on the current mapping, which may have changed since the registration. The kernel
//! refuses `msync` of device DAX with EINVAL, since device DAX has no file to write to.

#![allow(unsafe_code, reason = "system calls that copy host memory by address")]

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt};

use hmem_core::{Address, AddressRange, Errno, Error, ErrorKind, Result};
use rustix::mm::{MsyncFlags, msync};

/// Converts an address to a pointer. The address lies in a region, in a mapping or buffer of the
/// NIC, or in memory that the caller of `post` keeps valid.
///
/// Never create a reference from the pointer, except to an atomic: the application accesses the
/// memory at the same time.
pub(in super::super) fn direct_pointer(at: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}

/// Copies `len` bytes from `from` to `to`, which may be unmapped addresses.
///
/// # Errors
/// BadAddress: an address at `from` is not readable, or an address at `to` is not writable. The
/// kernel does not tell which side failed, and the error always names an address at `from`.
pub(super) fn kernel_read(from: u64, to: u64, len: u64) -> Result<()> {
    // SAFETY: the kernel checks both ranges and reports what it cannot reach; it writes to `to`
    // only, which is memory that a region or a posted request names as a target.
    kernel_copy(from, to, len, |local, remote| unsafe {
        libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0)
    })
}

/// Copies `len` bytes from `from` to `to`, which may be unmapped addresses.
///
/// # Errors
/// BadAddress, as for [`kernel_read`], but the error always names an address at `to`.
pub(super) fn kernel_write(from: u64, to: u64, len: u64) -> Result<()> {
    // SAFETY: the kernel checks both ranges and reports what it cannot reach; it writes to `to`
    // only, which is memory that a region or a posted request names as a target.
    kernel_copy(to, from, len, |local, remote| unsafe {
        libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0)
    })
}

/// Copies `len` bytes between `remote` and `local`: repeats `call`, which may copy a part, until
/// all bytes are copied.
///
/// # Errors
/// - BadAddress: a page at `remote` or `local` is missing, or does not permit the access. The error
///   names an address at `remote`.
/// - Any other error of the kernel.
fn kernel_copy(
    remote: u64,
    local: u64,
    len: u64,
    call: impl Fn(libc::iovec, libc::iovec) -> isize,
) -> Result<()> {
    let mut done = 0;
    while done < len {
        let vector = |at: u64| libc::iovec {
            iov_base: direct_pointer(at + done).cast(),
            iov_len: (len - done) as usize,
        };
        let moved = call(vector(local), vector(remote));
        if moved > 0 {
            done += moved as u64;
            continue;
        }
        let error = std::io::Error::last_os_error();
        return Err(match (moved, error.raw_os_error()) {
            (0, _) => bad_address(remote + done, len - done),
            (_, Some(libc::EFAULT)) => {
                bad_address(remote + done, len - done).errno(Errno(libc::EFAULT))
            }
            _ => Error::os(Errno::of(&error), "process_vm_readv/process_vm_writev")
                .provider("loopback"),
        });
    }
    Ok(())
}

/// Populates the pages of a range, for writes if `write` is true and for reads otherwise.
///
/// # Errors
/// BadAddress: a page is not mapped, or is not writable or readable as requested.
pub(in super::super) fn populate(
    range: AddressRange,
    write: bool,
    operation: &'static str,
) -> Result<()> {
    let pages = range.page_aligned(rustix::param::page_size() as u64);
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    loop {
        // SAFETY: populating reads or touches pages without changing what they hold, and reports
        // ranges that are not mapped or not allowed instead of faulting.
        let result = unsafe {
            libc::madvise(direct_pointer(pages.start().0).cast(), pages.len() as usize, advice)
        };
        if result == 0 {
            return Ok(());
        }
        let errno = Errno::of(&std::io::Error::last_os_error());
        if errno.0 == libc::EINTR || errno.0 == libc::EAGAIN {
            continue;
        }
        return Err(Error::new(ErrorKind::BadAddress, operation)
            .provider("loopback")
            .errno(errno)
            .context("range", range)
            .context("needed", if write { "writable pages" } else { "readable pages" })
            .remedy("map and protect the whole range before registering it"));
    }
}

/// Returns the error of an access to absent pages.
pub(super) fn bad_address(at: u64, len: u64) -> Error {
    Error::new(ErrorKind::BadAddress, "transfer")
        .provider("loopback")
        .context("address", format_args!("{at:#x}"))
        .context("length", len)
        .remedy("pages must be mapped with the needed protection while a transfer reaches them")
}

/// Host memory that a peer has just written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) at: u64,
    pub(super) len: u64,
    /// True if the region owns the memory. Every byte is then mapped.
    pub(super) owned: bool,
}

impl Written {
    /// Writes the bytes back to the storage behind their mapping.
    ///
    /// # Errors
    /// - BadAddress: pages are no longer mapped.
    /// - Unsupported: the memory is device DAX, and the region does not own it or the processor is
    ///   not an x86-64.
    /// - Any other error of the kernel.
    ///
    /// The peer's bytes are in memory even if the write-back fails.
    pub(super) fn persist(self) -> Result<()> {
        let Self { at, len, owned } = self;
        loop {
            return match sync_pages(at, len) {
                Ok(()) => Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno @ rustix::io::Errno::NOMEM) => {
                    Err(bad_address(at, len).errno(Errno::from(errno)))
                }
                Err(rustix::io::Errno::INVAL) if owned && cfg!(target_arch = "x86_64") => {
                    // SAFETY: the region owns the bytes, and the transfer holds a guard of the
                    // region, so that the bytes stay mapped.
                    unsafe { write_back_lines(at, len) };
                    Ok(())
                }
                Err(errno @ rustix::io::Errno::INVAL) => {
                    let error = Error::new(ErrorKind::Unsupported, "msync").provider("loopback");
                    Err(error
                        .context("address", format_args!("{at:#x}"))
                        .context("length", len)
                        .errno(Errno::from(errno))
                        .remedy(
                            "the kernel has no file to write this mapping back to (device DAX): \
                             register it with Domain::register on x86-64, or map a file of a DAX \
                             file system",
                        ))
                }
                Err(errno) => Err(Error::os(errno, "msync")
                    .provider("loopback")
                    .context("address", format_args!("{at:#x}"))
                    .context("length", len)
                    .remedy(
                        "the bytes were written and may not be persistent: see to the storage \
                         behind the mapping and write them again",
                    )),
            };
        }
    }
}

/// Calls `msync(MS_SYNC)` on the pages that hold `len` bytes from `at`.
pub(super) fn sync_pages(at: u64, len: u64) -> rustix::io::Result<()> {
    let start = at - at % rustix::param::page_size() as u64;
    let pages = direct_pointer(start).cast();
    // SAFETY: writing pages back changes nothing in memory, and the kernel reports pages that are
    // not mapped.
    unsafe { msync(pages, (at - start + len) as usize, MsyncFlags::SYNC) }
}

/// Writes cache lines back with CLFLUSH, which every x86-64 processor has, and waits for them.
///
/// # Safety
/// All `len` bytes from `at` are mapped.
unsafe fn write_back_lines(at: u64, len: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_mm_clflush, _mm_mfence};
        /// The assumed length of a cache line. If lines are longer, a line is flushed twice, which
        /// does no harm.
        const LINE: u64 = 64;
        let mut line = at - at % LINE;
        while line < at + len {
            // SAFETY: the line holds a byte of the range, which the caller promises to be mapped,
            // and lines do not cross pages.
            unsafe { _mm_clflush(direct_pointer(line)) };
            line += LINE;
        }
        // SAFETY: a fence has no conditions; SSE2 is part of x86-64.
        unsafe { _mm_mfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("only x86-64 writes back cache lines: {len} bytes at {at:#x}");
}

/// The addresses of a region that the NIC may access in a domain with MMU_NOTIFY. The application
/// announces further pages by a refresh of the region.
///
/// Each entry of `runs` maps the start of a range of addresses to its end (exclusive). The ranges
/// are disjoint and not adjacent.
#[derive(Debug, Default)]
pub(in super::super) struct AnnouncedPages {
    runs: BTreeMap<u64, u64>,
}

impl AnnouncedPages {
    /// Creates a set of announced addresses: those addresses of `ranges` whose pages are present or
    /// swapped out.
    pub(in super::super) fn present(ranges: impl Iterator<Item = AddressRange>) -> Self {
        let mut announced_pages = Self::default();
        for range in ranges {
            for page in present_pages(range) {
                announced_pages.add(page.0, page.1);
            }
        }
        announced_pages
    }

    /// Returns the announced ranges in address order.
    pub(in super::super) fn ranges(&self) -> impl Iterator<Item = AddressRange> {
        self.runs
            .iter()
            .filter_map(|(&start, &end)| AddressRange::new(Address(start), end - start).ok())
    }

    /// Adds the addresses from `start` to `end` (exclusive) to the set. The NIC may access them
    /// from then on.
    pub(in super::super) fn add(&mut self, start: u64, end: u64) {
        let (mut start, mut end) = (start, end);
        while let Some((&from, &to)) = self.runs.range(..=end).next_back() {
            if to < start {
                break;
            }
            start = start.min(from);
            end = end.max(to);
            self.runs.remove(&from);
        }
        self.runs.insert(start, end);
    }

    /// Checks that the set contains all `len` addresses from `at`.
    ///
    /// # Errors
    /// BadAddress: the set lacks an address.
    pub(in super::super) fn check(&self, at: u64, len: u64) -> Result<()> {
        match self.runs.range(..=at).next_back() {
            Some((_, &end)) if len <= end - at.min(end) && at < end => Ok(()),
            _ => {
                Err(bad_address(at, len)
                    .remedy("the pages changed: refresh the region (MMU_NOTIFY)"))
            }
        }
    }
}

/// Returns the pages of a range that `/proc/self/pagemap` lists as present or swapped out. Each
/// page is given by its start and its end. Pages that lie only partly in the range are included.
///
/// If the kernel does not let the process read the file, the remaining pages count as absent. The
/// application then has to refresh them.
fn present_pages(range: AddressRange) -> Vec<(u64, u64)> {
    let mut present = Vec::new();
    if let Err(error) = read_pagemap(range, &mut present) {
        tracing::warn!(
            %error,
            %range,
            "cannot read /proc/self/pagemap: pages count as absent until a refresh"
        );
    }
    present
}

fn read_pagemap(range: AddressRange, present: &mut Vec<(u64, u64)>) -> std::io::Result<()> {
    const PRESENT_OR_SWAPPED: u64 = 1 << 63 | 1 << 62;
    let page = rustix::param::page_size() as u64;
    let pages = range.page_aligned(page);
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut entries = vec![0; 8 * 4096];
    let (mut first, last) = (pages.start().0 / page, pages.start().0 / page + pages.len() / page);
    while first < last {
        let want = ((last - first) * 8).min(entries.len() as u64) as usize;
        let got = pagemap.read_at(&mut entries[..want], first * 8)?;
        // The file ends: the remaining addresses exceed those that a process can have.
        if got < 8 {
            break;
        }
        for entry in entries[..got].chunks_exact(8) {
            let entry = u64::from_ne_bytes(entry.try_into().expect("chunks of 8 bytes"));
            if entry & PRESENT_OR_SWAPPED != 0 {
                present.push((first * page, (first + 1) * page));
            }
            first += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn access_is_allowed_if_every_byte_is_announced(
            runs in prop::collection::vec((0u64..200, 1u64..40), 0..12),
            at in 0u64..240,
            len in 1u64..60,
        ) {
            let mut announced_pages = AnnouncedPages::default();
            let mut naive = [false; 512];
            for (start, len) in runs {
                announced_pages.add(start, start + len);
                naive[start as usize..(start + len) as usize].fill(true);
            }
            let expected = naive[at as usize..(at + len) as usize].iter().all(|byte| *byte);
            prop_assert_eq!(announced_pages.check(at, len).is_ok(), expected);
        }
    }

    #[test]
    fn last_page_of_the_address_space_is_never_present() {
        let page = rustix::param::page_size() as u64;
        let last = AddressRange::new(Address(u64::MAX - page + 1), page).unwrap();
        assert_eq!(AnnouncedPages::present(std::iter::once(last)).ranges().count(), 0);
    }

    #[test]
    fn touched_pages_are_present() {
        let bytes = vec![1u8; 3 * rustix::param::page_size()];
        let announced_pages = AnnouncedPages::present(std::iter::once(AddressRange::of(&bytes)));
        announced_pages.check(bytes.as_ptr() as u64, bytes.len() as u64).unwrap();
    }
}
