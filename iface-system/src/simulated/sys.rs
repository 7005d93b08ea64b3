//! System calls of the simulated device alone: reservations of address space, discarded pages, and
//! leases on memory files.

#![allow(unsafe_code, reason = "system calls on reservations and memory files")]

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd},
};

use hmem_core::Mapping;
use rustix::{
    fs::FallocateFlags,
    io::Errno as OsErrno,
    mm::{Advice, MapFlags, ProtFlags},
};

/// Reserves `len` bytes of address space without memory or access rights.
pub(crate) fn reserve(len: usize) -> Result<Mapping, OsErrno> {
    Mapping::anonymous(len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
}

/// Asks the kernel for huge pages in a mapping (`MADV_HUGEPAGE`). Only parts that are not written
/// yet get huge pages, and only if the kernel has some.
pub(crate) fn prefer_huge_pages(mapping: &Mapping) -> Result<(), OsErrno> {
    let (at, len) = (mapping.as_ptr().cast(), mapping.len());
    // SAFETY: the range is this mapping, and the call keeps its contents.
    unsafe { rustix::mm::madvise(at, len, Advice::LinuxHugepage) }
}

/// Replaces `len` bytes at `offset` of a reservation by a shared mapping of a file, beginning with
/// the file's byte at offset `in_file`.
pub(crate) fn place_shared(
    reservation: &Mapping,
    offset: u64,
    len: usize,
    fd: BorrowedFd<'_>,
    in_file: u64,
) -> Result<(), OsErrno> {
    let at = inside(reservation, offset, len)?;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: `inside` has checked that the fixed range lies in the reservation, and nothing else
    // maps into it.
    let placed =
        unsafe { libc::mmap(at, len, prot, flags, fd.as_raw_fd(), in_file as libc::off_t) };
    succeeded(placed != libc::MAP_FAILED)
}

/// Undoes [`place_shared`] for `len` bytes at `offset`. Afterwards these addresses are reserved
/// without memory or access rights.
pub(crate) fn place_nothing(reservation: &Mapping, offset: u64, len: usize) -> Result<(), OsErrno> {
    let at = inside(reservation, offset, len)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: `inside` has checked that the fixed range lies in the reservation. The caller frees
    // the memory that was there.
    let placed = unsafe { libc::mmap(at, len, libc::PROT_NONE, flags, -1, 0) };
    succeeded(placed != libc::MAP_FAILED)
}

/// Frees the pages of `len` bytes at `offset`, after which the bytes read as zero. `offset` must be
/// a multiple of the page size.
///
/// # Safety
/// The mapping must be anonymous. Its users must accept that the bytes become zero at any time.
pub(crate) unsafe fn discard(mapping: &Mapping, offset: u64, len: usize) -> Result<(), OsErrno> {
    let at = inside(mapping, offset, len)?;
    // SAFETY: `inside` has checked that the range lies in this mapping. The caller promises that
    // the users of the mapping accept zeroes.
    succeeded(unsafe { libc::madvise(at, len, libc::MADV_DONTNEED) } == 0)
}

/// Returns the address of `len` bytes at `offset`. Fails with `INVAL` if they do not lie in the
/// mapping.
fn inside(mapping: &Mapping, offset: u64, len: usize) -> Result<*mut c_void, OsErrno> {
    let inside = mapping.range().slice(offset, len as u64).ok_or(OsErrno::INVAL)?;
    Ok(crate::sys::host_ptr(inside.start()).cast())
}

/// Returns the error of the last system call unless `success` is true.
fn succeeded(success: bool) -> Result<(), OsErrno> {
    if success {
        return Ok(());
    }
    Err(OsErrno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(OsErrno::IO))
}

/// Returns true if a process has opened the memory file again for writing, or has a mapping made
/// with such an fd. The fd from `memfd_create` and its mappings do not count.
///
/// The function tries to set a read lease (`F_SETLEASE`), which the kernel grants only if no
/// process has the file open for writing. Also returns true if the lease fails for another reason.
///
/// The lease ends before this function returns. If another process opens the file during the lease,
/// that process waits, and the kernel sends the signal `SIGURG` to the holder of the lease.
/// [`sealed_memfd`](crate::sys::sealed_memfd) selects that signal because it is ignored by default.
pub(crate) fn is_open_elsewhere(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain fcntl on a borrowed, open fd; the argument is a lease type.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } != 0 {
        return true;
    }
    // SAFETY: a plain fcntl on a borrowed, open fd; the argument is a lease type.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) } != 0 {
        tracing::error!(error = %std::io::Error::last_os_error(), "cannot release a lease");
    }
    false
}

/// Frees the pages of `len` bytes of a file, from `offset` on, after which the bytes read as zero.
pub(crate) fn punch_hole(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), OsErrno> {
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}
