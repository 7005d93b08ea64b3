//! The system calls of this crate: mappings, memory files, udmabuf, positioned reads and writes.
//! `simulated/sys.rs` has those that only the simulated device makes.
//!
//! Most calls go through rustix. Three kinds go through libc:
//! - leases, which rustix lacks;
//! - reads and writes by raw address, since no reference may exist to bytes that a NIC or another
//!   process may write meanwhile;
//! - calls that unmap, replace or discard memory, since cache monitors hook libc's functions, and
//!   rustix makes raw system calls.

#![allow(unsafe_code, reason = "system calls on mappings and memory files")]

use std::{
    ffi::c_void,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

use hmem_core::{Address, Errno, Error, Mapping, Result};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags},
    io::Errno as OsErrno,
    ioctl::{Ioctl, IoctlOutput, Opcode, opcode},
    mm::{MapFlags, ProtFlags},
};

/// The `fcntl` command `F_SETSIG` of `asm-generic/fcntl.h`. The crate libc defines it for some
/// targets only.
const F_SETSIG: libc::c_int = 10;

const READ_WRITE: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Maps `len` bytes of anonymous memory. `flags` are in addition to `MAP_PRIVATE`.
pub(crate) fn map_memory(len: usize, flags: MapFlags) -> Result<Mapping, OsErrno> {
    Mapping::anonymous(len, READ_WRITE, MapFlags::PRIVATE | flags)
}

/// Maps `len` bytes in huge pages of `page_size` bytes. `len` must be a multiple of that size.
pub(crate) fn map_huge_pages(len: usize, page_size: usize) -> Result<Mapping, OsErrno> {
    let bits = page_size.trailing_zeros() << libc::MAP_HUGE_SHIFT;
    map_memory(len, MapFlags::HUGETLB | MapFlags::from_bits_retain(bits))
}

/// Maps the first `len` bytes of a file as shared memory.
pub(crate) fn map_file(fd: BorrowedFd<'_>, len: u64) -> Result<Mapping> {
    Mapping::shared(fd, 0, usize::try_from(len).unwrap_or(usize::MAX), READ_WRITE)
        .map_err(|errno| Error::os(errno, "mmap").context("length", len))
}

/// Creates a memory file of a fixed size. It is sealed against shrinking (which udmabuf requires),
/// growing, and further seals.
pub(crate) fn sealed_memfd(name: &str, len: u64) -> Result<OwnedFd> {
    let failed =
        |call: &'static str| move |errno: OsErrno| Error::os(errno, call).context("length", len);
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(failed("memfd_create"))?;
    rustix::fs::ftruncate(&fd, len).map_err(failed("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(failed("fcntl(F_ADD_SEALS)"))?;
    // SAFETY: a plain fcntl on an fd that this function owns; the argument is a signal number.
    if unsafe { libc::fcntl(fd.as_raw_fd(), F_SETSIG, libc::SIGURG) } != 0 {
        return Err(Error::os(Errno::of(&std::io::Error::last_os_error()), "fcntl(F_SETSIG)"));
    }
    Ok(fd)
}

/// Returns device and inode of a file, which identify a memory file across processes.
pub(crate) fn file_identity(fd: BorrowedFd<'_>) -> Result<(u64, u64)> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os(errno, "fstat"))?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Opens the file of an fd a second time, for reading and writing. While the new fd is open,
/// `simulated::sys::is_open_elsewhere` returns true. A duplicate of the fd would not have this
/// effect.
pub(crate) fn reopen(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    open(&format!("/proc/self/fd/{}", fd.as_raw_fd()), OFlags::RDWR)
}

/// Returns an `O_PATH` fd of a file. The file itself is not opened, so that no device driver is
/// called.
pub(crate) fn find_path(path: &str) -> Result<OwnedFd> {
    open(path, OFlags::PATH)
}

fn open(path: &str, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| Error::os(errno, "open").context("path", path))
}

/// Copies `len` bytes of a file, from `offset` on, to a host address. Fails with `EFAULT`, without
/// a signal, if the address cannot be written.
///
/// # Safety
/// The caller must allow this function to overwrite `len` bytes at `to`.
pub(crate) unsafe fn read_at(fd: BorrowedFd<'_>, offset: u64, to: Address, len: u64) -> Result<()> {
    let (fd, at) = (fd.as_raw_fd(), host_ptr(to).cast::<c_void>());
    transfer(len, |done, left| {
        let offset = (offset + done as u64) as libc::off_t;
        // SAFETY: the kernel checks the addresses, and the caller allows overwriting them.
        unsafe { libc::pread(fd, at.wrapping_byte_add(done), left, offset) }
    })
    .map_err(|errno| Error::os(errno, "pread").context("address", to).context("length", len))
}

/// Copies `len` bytes from a host address to a file, at `offset`. Fails with `EFAULT`, without a
/// signal, if the address cannot be read.
pub(crate) fn write_at(fd: BorrowedFd<'_>, offset: u64, from: Address, len: u64) -> Result<()> {
    let (fd, at) = (fd.as_raw_fd(), host_ptr(from).cast::<c_void>());
    transfer(len, |done, left| {
        let offset = (offset + done as u64) as libc::off_t;
        // SAFETY: the kernel checks the addresses and only reads them.
        unsafe { libc::pwrite(fd, at.wrapping_byte_add(done), left, offset) }
    })
    .map_err(|errno| Error::os(errno, "pwrite").context("address", from).context("length", len))
}

/// Calls `call` until it has moved `len` bytes. The arguments of `call` are the number of bytes
/// that were moved and the number that are left.
fn transfer(len: u64, mut call: impl FnMut(usize, usize) -> isize) -> Result<(), Errno> {
    let (mut done, len) = (0, len as usize);
    while done < len {
        match call(done, len - done) {
            moved @ 1.. => done += moved as usize,
            0 => return Err(Errno(libc::EIO)),
            _ => match Errno::of(&std::io::Error::last_os_error()) {
                Errno(libc::EINTR) => {}
                errno => return Err(errno),
            },
        }
    }
    Ok(())
}

/// Converts a host address to a pointer. Only the kernel, or code that knows the address to be
/// valid, may dereference it.
pub(crate) fn host_ptr(address: Address) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address.0 as usize)
}

/// Returns the page size of this machine in bytes.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// The argument of the ioctl `UDMABUF_CREATE`: `struct udmabuf_create` of `linux/udmabuf.h`.
#[repr(C)]
#[derive(Debug)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// The flag `UDMABUF_FLAGS_CLOEXEC` of `linux/udmabuf.h`: exec closes the new fd.
const UDMABUF_FLAGS_CLOEXEC: u32 = 1;

// SAFETY: `UDMABUF_CREATE` reads one `struct udmabuf_create` and returns a new fd.
unsafe impl Ioctl for UdmabufCreate {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::write::<Self>(b'u', 0x42)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::from_mut(self).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the ioctl succeeded, so `out` is a new fd that nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// The open device `/dev/udmabuf`, which creates dma-bufs from memory files.
#[derive(Debug)]
pub(crate) struct Udmabuf(OwnedFd);

impl Udmabuf {
    /// Opens `/dev/udmabuf`.
    pub(crate) fn open() -> Result<Self> {
        rustix::fs::open("/dev/udmabuf", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map(Self)
            .map_err(|errno| {
                Error::os(errno, "open /dev/udmabuf")
                    .remedy("run `modprobe udmabuf`, and allow this user to open the file")
            })
    }

    /// Creates a dma-buf of a page-aligned part of a memory file.
    pub(crate) fn create(&self, memfd: BorrowedFd<'_>, offset: u64, size: u64) -> Result<OwnedFd> {
        let create = UdmabufCreate {
            memfd: memfd.as_raw_fd() as u32,
            flags: UDMABUF_FLAGS_CLOEXEC,
            offset,
            size,
        };
        // SAFETY: the fd is `/dev/udmabuf`, which implements this ioctl.
        unsafe { rustix::ioctl::ioctl(self.0.as_fd(), create) }.map_err(|errno| {
            Error::os(errno, "ioctl(UDMABUF_CREATE)")
                .context("offset", offset)
                .context("size", size)
                .remedy(
                    "raise /sys/module/udmabuf/parameters/size_limit_mb if the range is longer \
                     than that",
                )
        })
    }
}

/// Exports `len` bytes of a memory file, from `offset` on: as a dma-buf if `udmabuf` is open, or
/// else as a new fd of the file. Returns the fd, and the offset of the bytes in it.
pub(crate) fn export(
    udmabuf: Option<&Udmabuf>,
    memfd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
) -> Result<(OwnedFd, u64)> {
    let Some(udmabuf) = udmabuf else { return Ok((reopen(memfd)?, offset)) };
    let in_page = offset % page_size();
    let whole_pages = (in_page + len).next_multiple_of(page_size());
    Ok((udmabuf.create(memfd, offset - in_page, whole_pages)?, in_page))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udmabuf_layout_and_opcode_are_those_of_the_kernel_header() {
        // The value of `UDMABUF_CREATE` of linux/udmabuf.h on every architecture with the generic
        // ioctl encoding.
        const UDMABUF_CREATE: u32 = 0x4018_7542;
        let create = UdmabufCreate { memfd: 0, flags: 0, offset: 0, size: 0 };
        assert_eq!(u64::from(create.opcode()), u64::from(UDMABUF_CREATE));
        assert_eq!(std::mem::offset_of!(UdmabufCreate, offset), 8);
        assert_eq!(std::mem::offset_of!(UdmabufCreate, size), 16);
    }
}
