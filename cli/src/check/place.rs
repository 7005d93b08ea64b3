//! A host page that is freed and allocated again at the same address, which reveals stale
//! registrations.

#![allow(unsafe_code, reason = "unmaps pages by calls of the C library, as applications do")]

use std::{
    io,
    ptr::{self, with_exposed_provenance_mut},
    sync::Arc,
};

use hmem::{Address, AddressRange, Error, ErrorKind, Result, system::monitor::ImportMonitor};
use hmem_conformance::stale::ReusableMemory;
use rustix::param::page_size;

/// One host page, mapped with `mmap`.
#[derive(Debug)]
pub(super) struct HostPage {
    /// The address of the page; null if none is mapped.
    at: *mut libc::c_void,
    /// The monitor that this page notifies of each change; `None` for a monitor that detects
    /// changes itself, and for the monitor that is never notified.
    import: Option<Arc<ImportMonitor>>,
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const OWN: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

impl HostPage {
    pub(super) fn map(import: Option<Arc<ImportMonitor>>) -> Result<Self> {
        Ok(Self { at: map(ptr::null_mut(), OWN)?, import })
    }

    /// Frees the physical page and maps a new one, if possible at the same address. `round`
    /// selects one of four ways to do so, in turn.
    fn change(&mut self, round: u64) -> Result<()> {
        match round % 4 {
            0 => {
                // SAFETY: this value mapped the page and makes no reference into it.
                done("munmap", unsafe { libc::munmap(self.at, page_size()) })?;
                let at = std::mem::replace(&mut self.at, ptr::null_mut());
                self.at = map_again(at)?;
            }
            1 => self.at = map(self.at, OWN | libc::MAP_FIXED)?,
            // SAFETY: this value mapped the page and makes no reference into it.
            2 => done("madvise", unsafe {
                libc::madvise(self.at, page_size(), libc::MADV_DONTNEED)
            })?,
            _ => {
                let elsewhere = map(ptr::null_mut(), OWN)?;
                // SAFETY: this value mapped both pages and makes no reference into them. The page
                // at `elsewhere` is replaced here and unmapped below.
                let moved = unsafe {
                    let how = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    libc::mremap(self.at, page_size(), page_size(), how, elsewhere)
                };
                let last = io::Error::last_os_error();
                let moved_from = (moved != libc::MAP_FAILED)
                    .then(|| std::mem::replace(&mut self.at, ptr::null_mut()));
                // SAFETY: this value mapped the page at `elsewhere`, whether or not it was
                // replaced, and makes no reference into it.
                done("munmap", unsafe { libc::munmap(elsewhere, page_size()) })?;
                self.at = map_again(moved_from.ok_or_else(|| refused("mremap", &last))?)?;
            }
        }
        Ok(())
    }
}

/// Maps a page at an address that was unmapped, or elsewhere if another thread has mapped that
/// address since.
fn map_again(at: *mut libc::c_void) -> Result<*mut libc::c_void> {
    map(at, OWN | libc::MAP_FIXED_NOREPLACE).or_else(|_| map(ptr::null_mut(), OWN))
}

/// Maps a page. With `MAP_FIXED`, the new page replaces the page at `at`, which the caller must
/// own.
fn map(at: *mut libc::c_void, flags: i32) -> Result<*mut libc::c_void> {
    // SAFETY: the kernel chooses a free address; or `MAP_FIXED_NOREPLACE` replaces nothing; or the
    // caller owns the page that `MAP_FIXED` replaces.
    let mapped = unsafe { libc::mmap(at, page_size(), RW, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(refused("mmap", &io::Error::last_os_error()));
    }
    Ok(with_exposed_provenance_mut(mapped.expose_provenance()))
}

fn done(call: &'static str, status: i32) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(refused(call, &io::Error::last_os_error())) }
}

fn refused(call: &'static str, why: &io::Error) -> Error {
    Error::new(ErrorKind::OutOfResources, call).context("why", why)
}

impl ReusableMemory for HostPage {
    fn range(&self) -> Result<AddressRange> {
        AddressRange::new(Address::of_ptr(self.at), page_size() as u64)
    }

    fn renew(&mut self, round: u64) -> Result<()> {
        match self.import.clone() {
            Some(import) => {
                let range = self.range()?;
                import.while_changing(range, || self.change(round))
            }
            None => self.change(round),
        }
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        assert!(from.len() <= page_size());
        // SAFETY: the page is mapped and longer than `from`, as asserted. The caller has ended all
        // transfers, so that nothing else accesses it.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.at.cast(), from.len()) };
        Ok(())
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        assert!(into.len() <= page_size());
        // SAFETY: the page is mapped and longer than `into`, as asserted. The caller has ended all
        // transfers, so that nothing else writes it.
        unsafe { ptr::copy_nonoverlapping(self.at.cast(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

impl Drop for HostPage {
    fn drop(&mut self) {
        if self.at.is_null() {
            return;
        }
        // SAFETY: this value mapped the page and makes no reference into it.
        if let Err(error) = done("munmap", unsafe { libc::munmap(self.at, page_size()) }) {
            tracing::error!(%error, "cannot unmap a page of a check");
        }
    }
}
