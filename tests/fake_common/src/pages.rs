//! The bytes of the devices: memory files behind two windows of addresses.
//!
//! Applications see the first window: addresses without access, on which the CPU faults as on
//! device memory. Host and managed memory is mapped there too. The driver reaches the bytes through
//! the second window, at a fixed distance.
//!
//! Exports are genuine dma-bufs where `/dev/udmabuf` can be opened, and memory files otherwise. A
//! dma-buf begins at the exported range, and a memory file cannot begin in the middle of another:
//! exporting then moves the pages of the range into a file of their own, which backs that part of
//! the second window from then on.

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

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// Length of the address range that all devices share, in bytes.
const WINDOW: usize = 1 << 40;

/// Makes a memory file that cannot change its size, as a dma-buf cannot.
///
/// # Errors
/// The errno of the call that failed.
pub fn memory_file(len: u64) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("fake-device", flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Opens the file of a process's fd once more. Unlike a duplicate, the new fd makes the file count
/// as used by others.
///
/// # Errors
/// The errno of the open: ENXIO for a genuine dma-buf, which can only be duplicated.
pub fn reopen(process: u32, fd: RawFd) -> Result<OwnedFd> {
    let path = format!("/proc/{process}/fd/{fd}");
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Returns a new fd of the same memory file or dma-buf.
///
/// # Errors
/// The errno of the call that failed.
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
/// The errno of the call that failed.
pub fn share(file: BorrowedFd<'_>, len: u64) -> Result<OwnedFd> {
    match dma_buf(&[(file, 0, len)])? {
        Some(genuine) => Ok(genuine),
        None => another(file),
    }
}

/// Returns true if the file is also open or mapped elsewhere. The kernel then refuses a read lease.
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

/// Memory that is mapped twice: where applications see it, and where the driver accesses it.
#[derive(Debug)]
pub struct Pages {
    /// First address at which applications see the pages.
    visible: u64,
    /// First address at which the driver maps the pages.
    alias: u64,
    /// Files that back a range, by its first address, with its length.
    files: BTreeMap<u64, (u64, OwnedFd)>,
}

impl Default for Pages {
    fn default() -> Self {
        Self { visible: reserve(), alias: reserve(), files: BTreeMap::new() }
    }
}

impl Pages {
    /// Returns the first address at which applications see the pages.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.visible
    }

    /// Returns the number of open files.
    #[must_use]
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns true for an address at which applications see pages.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        address.wrapping_sub(self.visible) < WINDOW as u64
    }

    /// Returns the driver's pointer to the byte that applications see at `address`.
    #[must_use]
    pub fn at(&self, address: u64) -> *mut u8 {
        ptr::with_exposed_provenance_mut((address - self.visible + self.alias) as usize)
    }

    /// Backs a range with new zeroed pages. With `host` the CPU can access them at that address.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn back(&mut self, address: u64, len: u64, host: bool) -> Result<()> {
        let file = memory_file(len)?;
        if host {
            map(ptr::with_exposed_provenance_mut(address as usize), len, file.as_fd())?;
        }
        self.place(address, len, file)
    }

    /// Backs a range with the pages of a file.
    ///
    /// # Errors
    /// The errno of the mapping.
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

    /// Returns an fd that begins with the range. Returns `None` if a part of the range lies in a
    /// file of other bounds that is still in use: real drivers export it, memory files cannot.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn export(&mut self, address: u64, len: u64) -> Result<Option<OwnedFd>> {
        if let Some(genuine) = self.genuine(address, len)? {
            return Ok(Some(genuine));
        }
        Ok(match self.file_of(address, len)? {
            Some(file) => Some(another(file)?),
            None => None,
        })
    }

    /// Creates a genuine dma-buf of a range, or returns `None` if `/dev/udmabuf` cannot be opened.
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
            // A part has lost its file to one of other bounds, which only memory files do.
            return Ok(None);
        }
        dma_buf(&parts)
    }

    /// Moves a range into a file of its own. Returns false if a file that backs a part of the range
    /// is in use elsewhere.
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

    /// Records `file` as the file that backs a range, and forgets the files that it replaces. Other
    /// ranges of the replaced files stay mapped, but no file is recorded for them.
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

    /// Returns the file that backs exactly this range, made by moving its pages if there is none.
    /// Returns `None` in the cases of [`Pages::export`].
    ///
    /// # Errors
    /// The errno of the call that failed.
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
