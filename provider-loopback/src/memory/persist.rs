//! Write-back of persistent memory (RMA_PMEM) before a remote write completes.
//!
//! | memory | written back by |
//! |---|---|
//! | pages of a file, its page cache or DAX, MAP_SYNC too | `msync(MS_SYNC)` of the touched pages |
//! | device DAX, owned by the region | the cache lines of the touched bytes |
//! | device DAX, not owned by the region | nothing: the transfer fails |
//! | anonymous and private pages | nothing: no copy of them outlives the process |
//! | a file that the NIC imported by its fd | `msync` of its mapping, or `fdatasync` |
//! | memory of a device | the device's flush (`InboundFlush::flush`) |
//!
//! The kernel acts on the current mapping, which may have changed since the registration. It
//! refuses device DAX with EINVAL, since that has no file to write to.

#![allow(unsafe_code)]

use hmem_core::{Errno, Error, ErrorKind, Result};
use rustix::mm::{MsyncFlags, msync};

use super::{bad_address, direct_pointer};

/// Host memory of the application that was just written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Set if the region owns the memory, so that every byte is mapped.
    pub(super) owned: bool,
}

impl Written {
    /// Writes the bytes back to the storage behind their mapping.
    ///
    /// # Errors
    /// - BadAddress for pages that are no longer mapped.
    /// - Unsupported for device DAX that the region does not own.
    /// - Otherwise the error that the kernel reported.
    ///
    /// The bytes are in memory even after an error.
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
                    // SAFETY: the region owns the bytes and is held by the transfer, so that they
                    // stay mapped.
                    unsafe { write_back_lines(at, len) };
                    Ok(())
                }
                Err(errno @ rustix::io::Errno::INVAL) => {
                    Err(failed(ErrorKind::Unsupported, at, len).errno(Errno::from(errno)).remedy(
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
        /// The shortest line of any processor: more flushes than needed do no harm.
        const LINE: u64 = 64;
        let mut line = at - at % LINE;
        while line < at + len {
            // SAFETY: the line holds a byte of the run, which the caller vouches for, and lines do
            // not cross pages.
            unsafe { _mm_clflush(direct_pointer(line)) };
            line += LINE;
        }
        // SAFETY: a fence has no conditions; SSE2 is part of x86-64.
        unsafe { _mm_mfence() };
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("asked for {len} bytes at {at:#x} on x86-64 only");
}

#[cold]
fn failed(kind: ErrorKind, at: u64, len: u64) -> Error {
    Error::new(kind, "msync")
        .provider("loopback")
        .context("address", format_args!("{at:#x}"))
        .context("length", len)
}
