//! The bytes of the devices: memory files behind two windows of addresses.
//!
//! The first window is what an application sees: addresses without access, on which the CPU faults
//! as on device memory behind a small BAR (host pools are mapped there too). The second, at a fixed
//! distance, is how the runtime reaches the bytes.

use std::{
    ffi::c_void,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
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

/// Makes a memory file that cannot change its size, as a dma-buf cannot.
pub(crate) fn memory_file(len: u64) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("fake-rocr", flags)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// Opens the file of another fd once more.
pub(crate) fn reopen(process: u32, fd: i32) -> rustix::io::Result<OwnedFd> {
    let path = format!("/proc/{process}/fd/{fd}");
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a file of this process once more.
pub(crate) fn share(fd: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    reopen(std::process::id(), fd.as_raw_fd())
}

/// The two windows.
#[derive(Debug)]
pub(crate) struct Windows {
    visible: u64,
    alias: u64,
}

impl Windows {
    pub(crate) fn new() -> Self {
        Self { visible: reserve(), alias: reserve() }
    }

    /// Returns the first address that allocations may have.
    pub(crate) fn first(&self) -> u64 {
        self.visible.next_multiple_of(2 << 20)
    }

    /// Returns the address at which the runtime reaches the byte.
    pub(crate) fn alias(&self, address: u64) -> u64 {
        address - self.visible + self.alias
    }

    /// Puts a file behind addresses, where the CPU can see it or not.
    pub(crate) fn map(
        &self,
        address: u64,
        len: u64,
        file: BorrowedFd<'_>,
        visible: bool,
    ) -> rustix::io::Result<()> {
        place(self.alias(address), len, file)?;
        if visible { place(address, len, file) } else { Ok(()) }
    }

    /// Takes the file away.
    pub(crate) fn unmap(&self, address: u64, len: u64) {
        for start in [address, self.alias(address)] {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
            let start: *mut c_void = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: the range lies in a window of this runtime.
            let empty = unsafe {
                rustix::mm::mmap_anonymous(start, len as usize, ProtFlags::empty(), flags)
            };
            empty.expect("addresses without access");
        }
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        for start in [self.visible, self.alias] {
            let start: *mut c_void = ptr::with_exposed_provenance_mut(start as usize);
            // SAFETY: reserved by this value; the runtime is gone, and with it everybody who used
            // its memory.
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

fn place(start: u64, len: u64, file: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    let start: *mut c_void = ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the range lies in a window of this runtime, which nobody else maps into.
    unsafe { rustix::mm::mmap(start, len as usize, prot, flags, file, 0)? };
    Ok(())
}
