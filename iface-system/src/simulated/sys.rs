//! System calls of the simulated device alone: reservations of address space, discarded pages, and
//! leases on memory files.

#![allow(unsafe_code, reason = "system calls on reservations and memory files")]

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::AtomicU64,
};

use rustix::{
    fs::FallocateFlags,
    io::Errno as OsErrno,
    mm::{MapFlags, ProtFlags},
};

use crate::sys::{Mapping, file_offset};

impl Mapping {
    /// Reserves `len` bytes of address space without memory or access rights.
    pub(crate) fn reserve(len: usize) -> Result<Self, OsErrno> {
        Self::anonymous(len, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    /// Maps `len` bytes of zeroed private memory. Only pages that are written occupy memory.
    pub(crate) fn lazy_zeroes(len: usize) -> Result<Self, OsErrno> {
        Self::anonymous(
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }

    /// Asks the kernel to use pages of about 2 MiB for parts of this mapping that are not written
    /// yet (`MADV_HUGEPAGE`). The kernel may have no such pages.
    pub(crate) fn prefer_huge_pages(&self) -> Result<(), OsErrno> {
        // SAFETY: the range is this mapping, and the call keeps its contents.
        done(unsafe { libc::madvise(self.as_ptr().cast(), self.len(), libc::MADV_HUGEPAGE) })
    }

    /// Returns a pointer `offset` bytes into the mapping.
    ///
    /// # Panics
    /// If `offset` is greater than the mapping's length.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        let offset = usize::try_from(offset).ok().filter(|offset| *offset <= self.len());
        self.as_ptr()
            .wrapping_add(offset.expect("the offset was checked against the mapping's length"))
    }

    /// Replaces `len` bytes at `offset` of this reservation by a shared mapping of `fd`. The mapped
    /// part of the file starts at its offset `in_file`.
    pub(crate) fn place_shared(
        &self,
        offset: u64,
        len: usize,
        fd: BorrowedFd<'_>,
        in_file: u64,
    ) -> Result<(), OsErrno> {
        let at = self.inside(offset, len)?;
        let offset = file_offset(in_file);
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: `inside` has checked that the fixed range lies in this mapping, and nothing else
        // maps into it.
        placed(unsafe { libc::mmap(at, len, prot, flags, fd.as_raw_fd(), offset) })
    }

    /// Undoes [`Mapping::place_shared`] for `len` bytes at `offset`. Afterwards these addresses are
    /// reserved without memory or access rights.
    pub(crate) fn place_nothing(&self, offset: u64, len: usize) -> Result<(), OsErrno> {
        let at = self.inside(offset, len)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: `inside` has checked that the fixed range lies in this mapping. The caller frees
        // the memory that was there.
        placed(unsafe { libc::mmap(at, len, libc::PROT_NONE, flags, -1, 0) })
    }

    /// Returns the pages of `len` bytes at `offset` to the kernel, after which the bytes read as
    /// zero. `offset` must be a multiple of the page size. Only for mappings that
    /// [`Mapping::lazy_zeroes`] created.
    pub(crate) fn discard(&self, offset: u64, len: usize) -> Result<(), OsErrno> {
        let at = self.inside(offset, len)?;
        // SAFETY: `inside` has checked that the range lies in this mapping. The users of the
        // mapping accept zeroes: the elements are atomics for which zero is a valid value.
        done(unsafe { libc::madvise(at, len, libc::MADV_DONTNEED) })
    }

    fn inside(&self, offset: u64, len: usize) -> Result<*mut c_void, OsErrno> {
        let end = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(len));
        if end.is_none_or(|end| end > self.len()) {
            Err(OsErrno::INVAL)
        } else {
            Ok(self.at(offset).cast())
        }
    }
}

fn placed(at: *mut c_void) -> Result<(), OsErrno> {
    if at == libc::MAP_FAILED { Err(last_errno()) } else { Ok(()) }
}

/// Returns true if a process has opened the memory file again for writing, or has a mapping made
/// with such an fd. The fd from `memfd_create` and its mappings do not count. The function tries to
/// set a read lease (`F_SETLEASE`), which the kernel grants only if there is no such process.
///
/// Also returns true if the lease fails for another reason. The lease ends before this function
/// returns. A process that opens the file during the lease waits for its end. The kernel then sends
/// `SIGURG` to the process that holds the lease. [`sealed_memfd`] chose that signal because it is
/// ignored by default.
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

/// Returns the pages of `len` bytes of a file to the kernel, after which the bytes read as zero.
pub(crate) fn punch_hole(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), OsErrno> {
    rustix::fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}

/// Returns a reference to a word that another process may change at any time.
///
/// # Safety
/// `word` must be aligned to 8 bytes and stay mapped for `'a`. All other accesses to it must be
/// atomic.
pub(crate) unsafe fn atomic_word<'a>(word: *mut u8) -> &'a AtomicU64 {
    // SAFETY: the caller promises an aligned, mapped word to which every access is atomic.
    unsafe { AtomicU64::from_ptr(word.cast()) }
}

fn done(result: libc::c_int) -> Result<(), OsErrno> {
    if result == 0 { Ok(()) } else { Err(last_errno()) }
}

fn last_errno() -> OsErrno {
    OsErrno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(OsErrno::IO)
}
