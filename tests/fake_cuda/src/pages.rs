//! The bytes of the devices: memory files behind two windows of addresses.
//!
//! The first window is what an application sees: addresses without access, on which the CPU faults
//! as on real device memory (host and managed memory is mapped there too). The second, at a fixed
//! distance, is how the driver reaches the bytes. An exported dma-buf begins at the exported range,
//! and a memory file cannot begin in the middle of another: exporting moves the pages of the range
//! into a file of their own, which then backs that part of the second window.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    mm::{MapFlags, ProtFlags},
};

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;
/// Bytes of addresses that the devices share.
const WINDOW: usize = 1 << 40;

/// A memory file that cannot change its size, as a dma-buf cannot.
pub(crate) fn memory_file(len: u64) -> rustix::io::Result<OwnedFd> {
    let fd =
        rustix::fs::memfd_create("fake-cuda", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// The file once more, for somebody else; unlike a duplicate it is counted by [`is_used`].
pub(crate) fn reopen(fd: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Whether somebody else has the file open or mapped: a read lease is granted exactly when nobody
/// has.
fn is_used(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: plain fcntl on an open fd; the argument is a lease type.
    let granted = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } == 0;
    if granted {
        // SAFETY: as above.
        let returned = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
        assert_eq!(returned, 0, "a lease is given back");
    }
    !granted
}

/// The two windows.
#[derive(Debug)]
pub(crate) struct Pages {
    /// What applications see, as a number.
    visible: u64,
    /// Where the driver reaches it.
    alias: u64,
    /// Parts that have a file of their own: first address to length and file.
    files: BTreeMap<u64, (u64, OwnedFd)>,
}

impl Pages {
    pub(crate) fn new() -> Self {
        Self { visible: reserve(), alias: reserve(), files: BTreeMap::new() }
    }

    pub(crate) fn first(&self) -> u64 {
        self.visible
    }

    /// How many files are open.
    pub(crate) fn files(&self) -> usize {
        self.files.len()
    }

    pub(crate) fn holds(&self, address: u64) -> bool {
        address.wrapping_sub(self.visible) < WINDOW as u64
    }

    /// The driver's pointer to an address of the window.
    pub(crate) fn at(&self, address: u64) -> *mut u8 {
        ptr::with_exposed_provenance_mut((address - self.visible + self.alias) as usize)
    }

    /// Puts fresh zeroed pages behind a range; the CPU can reach them at their own address too if
    /// `host` says so.
    pub(crate) fn back(&mut self, address: u64, len: u64, host: bool) -> rustix::io::Result<()> {
        let file = memory_file(len)?;
        if host {
            map(ptr::with_exposed_provenance_mut(address as usize), len, file.as_fd())?;
        }
        self.place(address, len, file)
    }

    /// Puts the pages of a file behind a range.
    pub(crate) fn place(
        &mut self,
        address: u64,
        len: u64,
        file: OwnedFd,
    ) -> rustix::io::Result<()> {
        map(self.at(address), len, file.as_fd())?;
        self.enter(address, len, file);
        Ok(())
    }

    /// Takes the pages behind a range away.
    pub(crate) fn clear(&mut self, address: u64, len: u64) {
        self.files.retain(|start, _| !(address..address + len).contains(start));
        for start in [ptr::with_exposed_provenance_mut(address as usize), self.at(address)] {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            // SAFETY: the range lies in a window of this driver, and its memory was given back.
            unsafe {
                rustix::mm::mmap_anonymous(start.cast(), len as usize, ProtFlags::empty(), flags)
            }
            .expect("a window is mapped over");
        }
    }

    /// An fd whose first byte is that of the range: the file that backs exactly that range, made by
    /// moving its pages if there is none. `None` if somebody still uses a file that backs a
    /// part of it with other bounds, which a real driver allows and memory files cannot have.
    pub(crate) fn export(&mut self, address: u64, len: u64) -> rustix::io::Result<Option<OwnedFd>> {
        if let Some((backed, file)) = self.files.get(&address)
            && *backed == len
        {
            return reopen(file.as_fd()).map(Some);
        }
        if !self.own(address, len)? {
            return Ok(None);
        }
        reopen(self.files[&address].1.as_fd()).map(Some)
    }

    /// Moves a range into a file of its own; `false` if somebody uses a file that it is in with
    /// other bounds.
    fn own(&mut self, address: u64, len: u64) -> rustix::io::Result<bool> {
        let end = address + len;
        let touched = self.files.range(..end).filter(|(start, (len, _))| *start + len > address);
        if touched.into_iter().any(|(_, (_, file))| is_used(file.as_fd())) {
            return Ok(false);
        }
        self.move_to_new_file(address, len)?;
        Ok(true)
    }

    fn move_to_new_file(&mut self, address: u64, len: u64) -> rustix::io::Result<()> {
        let file = memory_file(len)?;
        let mut done = 0;
        while done < len {
            // SAFETY: the range is backed, and the driver's lock keeps everybody else of this
            // process out.
            let bytes = unsafe {
                std::slice::from_raw_parts(self.at(address + done), (len - done) as usize)
            };
            done += rustix::io::pwrite(&file, bytes, done)? as u64;
        }
        map(self.at(address), len, file.as_fd())?;
        self.enter(address, len, file);
        Ok(())
    }

    /// Enters the file that backs a range from now on. What files of other bounds back besides
    /// stays mapped, but they are no range's own file any longer.
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

    /// A handle of the file that backs exactly this range, for another process.
    pub(crate) fn file_of(&mut self, address: u64, len: u64) -> rustix::io::Result<Option<i32>> {
        let exact = |files: &BTreeMap<u64, (u64, OwnedFd)>| {
            files
                .get(&address)
                .filter(|(backed, _)| *backed == len)
                .map(|(_, file)| file.as_raw_fd())
        };
        if let Some(file) = exact(&self.files) {
            return Ok(Some(file));
        }
        Ok(if self.own(address, len)? { exact(&self.files) } else { None })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for start in [self.visible, self.alias] {
            let start: *mut c_void = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: reserved by this value; the driver is gone and with it everybody who used its
            // memory.
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

fn map(start: *mut u8, len: u64, file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    // SAFETY: the range lies in a window of this driver, which nobody else maps into.
    unsafe { rustix::mm::mmap(start.cast(), len as usize, prot, flags, file, 0)? };
    Ok(())
}
