//! Memory of a fake driver's devices: memory files mapped into two address ranges ("windows").
//!
//! Applications see the first window. Device addresses in it have no access rights, so that the CPU
//! faults as on device memory; host and managed memory is mapped there. The driver accesses the
//! bytes through the second window, at a fixed distance.
//!
//! Exports are genuine dma-bufs where `/dev/udmabuf` can be opened, and memory files otherwise. A
//! dma-buf begins at the exported range, but a memory file cannot begin in the middle of another.
//! Without `/dev/udmabuf`, an export therefore moves the pages of the range into a file of their
//! own, which then backs that part of the second window.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    io::{Errno, Result},
    mm::{MapFlags, ProtFlags},
};

use crate::dma_buf::dma_buf;

/// Length in bytes of the address range that all devices share.
const WINDOW: usize = 1 << 40;

/// Returns the size of the machine's pages in bytes.
#[must_use]
pub fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Creates a memory file whose size is sealed, since the size of a dma-buf cannot change either.
///
/// # Errors
/// Returns the errno of the call that failed.
pub fn memory_file(len: u64) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("fake-device", flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Opens the file behind a process's fd again for reading and writing. Unlike a duplicate, the new
/// fd is a second open file, which [`Pages::export`] notices as a use of the memory.
///
/// # Errors
/// Returns the errno of the open: ENXIO for a genuine dma-buf, which can only be duplicated.
pub fn reopen(process: u32, fd: RawFd) -> Result<OwnedFd> {
    let path = format!("/proc/{process}/fd/{fd}");
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Opens the memory file behind an fd again, or duplicates the fd of a dma-buf.
///
/// # Errors
/// Returns the errno of the call that failed.
pub fn another(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    match reopen(std::process::id(), fd.as_raw_fd()) {
        Err(Errno::NXIO) => rustix::io::fcntl_dupfd_cloexec(fd, 0),
        opened => opened,
    }
}

/// Exports a whole memory file: as a genuine dma-buf where `/dev/udmabuf` can be opened, and as
/// the file itself otherwise.
///
/// # Errors
/// Returns the errno of the call that failed.
pub fn share(file: BorrowedFd<'_>, len: u64) -> Result<OwnedFd> {
    match dma_buf(&[(file, 0, len)])? {
        Some(genuine) => Ok(genuine),
        None => another(file),
    }
}

/// Returns true if a memory file was opened again for writing, and that second open file is still
/// open or mapped. The kernel then refuses a read lease. The file's own mappings, duplicates of the
/// fd and openings for reading do not count.
fn is_used(fd: BorrowedFd<'_>) -> bool {
    let lease = |kind: libc::c_int| {
        // SAFETY: F_SETLEASE takes a lease type by value, and the borrowed fd is open.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) == 0 }
    };
    let granted = lease(libc::F_RDLCK);
    if granted {
        assert!(lease(libc::F_UNLCK), "a granted lease can be removed");
    }
    !granted
}

/// Memory mapped at two addresses: one that applications see, and one at which the driver accesses
/// it.
#[derive(Debug)]
pub struct Pages {
    /// First address of the window that applications see.
    visible: u64,
    /// First address of the window at which the driver accesses the pages.
    alias: u64,
    /// Memory files by the first address of the range that they back, each with the range's length.
    files: BTreeMap<u64, (u64, OwnedFd)>,
}

impl Default for Pages {
    fn default() -> Self {
        Self { visible: reserve(), alias: reserve(), files: BTreeMap::new() }
    }
}

impl Pages {
    /// Returns the first address of the window that applications see.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.visible
    }

    /// Returns the number of memory files that back the pages.
    #[must_use]
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns true if an address lies in the window that applications see.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        address.wrapping_sub(self.visible) < WINDOW as u64
    }

    /// Returns a pointer through which the driver accesses the byte that applications see at
    /// `address`.
    #[must_use]
    pub fn at(&self, address: u64) -> *mut u8 {
        ptr::with_exposed_provenance_mut((address - self.visible + self.alias) as usize)
    }

    /// Backs a range with new zeroed pages. If `host` is true, the application's CPU code can
    /// access them.
    ///
    /// # Errors
    /// Returns the errno of the call that failed.
    pub fn back(&mut self, address: u64, len: u64, host: bool) -> Result<()> {
        let file = memory_file(len)?;
        if host {
            map(ptr::with_exposed_provenance_mut(address as usize), len, file.as_fd())?;
        }
        self.place(address, len, file)
    }

    /// Backs a range with the pages of `file`.
    ///
    /// # Errors
    /// Returns the errno of the mapping.
    pub fn place(&mut self, address: u64, len: u64, file: OwnedFd) -> Result<()> {
        map(self.at(address), len, file.as_fd())?;
        self.enter(address, len, file);
        Ok(())
    }

    /// Removes the pages behind a range.
    pub fn clear(&mut self, address: u64, len: u64) {
        self.files.retain(|start, _| !(address..address + len).contains(start));
        for start in [ptr::with_exposed_provenance_mut(address as usize), self.at(address)] {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: the range lies in a window of this driver, and its memory was freed.
            let empty = unsafe {
                rustix::mm::mmap_anonymous(start.cast(), len as usize, ProtFlags::empty(), flags)
            };
            empty.expect("addresses without access");
        }
    }

    /// Exports a range: a dma-buf or memory file that begins with the range. Without
    /// `/dev/udmabuf`, returns `None` if a part of the range is still exported with other bounds.
    /// Real drivers support that; memory files cannot.
    ///
    /// # Errors
    /// Returns the errno of the call that failed.
    pub fn export(&mut self, address: u64, len: u64) -> Result<Option<OwnedFd>> {
        if let Some(genuine) = self.genuine(address, len)? {
            return Ok(Some(genuine));
        }
        Ok(match self.file_of(address, len)? {
            Some(file) => Some(another(file)?),
            None => None,
        })
    }

    /// Creates a genuine dma-buf of a range. Returns `None` if `/dev/udmabuf` cannot be opened, or
    /// if a part of the range has no recorded file.
    fn genuine(&self, address: u64, len: u64) -> Result<Option<OwnedFd>> {
        let end = address + len;
        let mut parts: Vec<_> = self
            .files
            .range(..end)
            .rev()
            .take_while(|(start, (backed, _))| *start + backed > address)
            .map(|(start, (backed, file))| {
                let (from, to) = (address.max(*start), end.min(start + backed));
                (file.as_fd(), from - start, to - from)
            })
            .collect();
        parts.reverse();
        if parts.iter().map(|(_, _, len)| len).sum::<u64>() < len {
            // A part has no recorded file: an export by memory file has replaced the file that
            // backed it.
            return Ok(None);
        }
        dma_buf(&parts)
    }

    /// Moves the pages of a range into a memory file of their own. Returns false if a second open
    /// file of a memory file behind the range is still in use ([`is_used`]).
    fn own(&mut self, address: u64, len: u64) -> Result<bool> {
        let end = address + len;
        let touched = self.files.range(..end).filter(|(start, (len, _))| *start + len > address);
        if touched.into_iter().any(|(_, (_, file))| is_used(file.as_fd())) {
            return Ok(false);
        }
        let file = memory_file(len)?;
        let mut done = 0;
        while done < len {
            // SAFETY: the range is backed, and the driver's lock excludes every other thread of
            // this process.
            let bytes = unsafe {
                std::slice::from_raw_parts(self.at(address + done), (len - done) as usize)
            };
            done += rustix::io::pwrite(&file, bytes, done)? as u64;
        }
        self.place(address, len, file)?;
        Ok(true)
    }

    /// Records `file` as the file that backs a range, and removes the records of overlapping files.
    /// Other ranges of those files stay mapped, but without a record.
    fn enter(&mut self, address: u64, len: u64, file: OwnedFd) {
        let end = address + len;
        let before =
            self.files.range(..end).rev().take_while(|(start, (len, _))| *start + len > address);
        let replaced: Vec<_> = before.map(|(start, _)| *start).collect();
        for start in replaced {
            self.files.remove(&start);
        }
        self.files.insert(address, (len, file));
    }

    /// Returns the memory file that backs exactly this range. If there is none, moves the pages
    /// into a new file. Returns `None` if a file behind the range is still in use elsewhere.
    ///
    /// # Errors
    /// Returns the errno of the call that failed.
    pub fn file_of(&mut self, address: u64, len: u64) -> Result<Option<BorrowedFd<'_>>> {
        let is_exact = self.files.get(&address).is_some_and(|(backed, _)| *backed == len);
        if !is_exact && !self.own(address, len)? {
            return Ok(None);
        }
        Ok(self.files.get(&address).map(|(_, file)| file.as_fd()))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for start in [self.visible, self.alias] {
            let start: *mut c_void = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: this value reserved the window, and the driver's users are gone.
            unsafe { rustix::mm::munmap(start, WINDOW) }.expect("munmap");
        }
    }
}

fn reserve() -> u64 {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
    let start =
        unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), WINDOW, ProtFlags::empty(), flags) };
    start.expect("a window of addresses").expose_provenance() as u64
}

fn map(start: *mut u8, len: u64, file: BorrowedFd<'_>) -> Result<()> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: the range lies in a window of this driver, which maps only under its lock.
    unsafe { rustix::mm::mmap(start.cast(), len as usize, prot, flags, file, 0)? };
    Ok(())
}
