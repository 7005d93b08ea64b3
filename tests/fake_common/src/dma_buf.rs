//! Creates genuine dma-bufs of memory files, by `/dev/udmabuf`.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::{
    fs::{Mode, OFlags},
    io::{Errno, Result},
};

/// Maximum number of parts in one dma-buf.
const PARTS: usize = 64;

/// `struct udmabuf_create_item` of `linux/udmabuf.h`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Item {
    memory_file: u32,
    padding: u32,
    offset: u64,
    len: u64,
}

/// `struct udmabuf_create_list` of `linux/udmabuf.h`, with its items.
#[repr(C)]
struct List {
    flags: u32,
    count: u32,
    items: [Item; PARTS],
}

/// `UDMABUF_CREATE_LIST`: `_IOW('u', 0x43, struct udmabuf_create_list)`.
const CREATE_LIST: libc::c_ulong = 0x4008_7543;
/// `UDMABUF_FLAGS_CLOEXEC`.
const CLOEXEC: u32 = 1;

/// Creates a dma-buf of parts of memory files. Each part is a file, an offset and a length in
/// bytes. Returns `None` if this process cannot open `/dev/udmabuf`.
///
/// # Errors
/// Returns the errno of the ioctl, such as EINVAL for parts that are not whole pages of a sealed
/// memory file. EINVAL for more than 64 parts.
pub(crate) fn dma_buf(parts: &[(BorrowedFd<'_>, u64, u64)]) -> Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(device) = rustix::fs::open("/dev/udmabuf", flags, Mode::empty()) else {
        return Ok(None);
    };
    if parts.len() > PARTS {
        return Err(Errno::INVAL);
    }
    let mut list =
        List { flags: CLOEXEC, count: parts.len() as u32, items: [Item::default(); PARTS] };
    for (item, (file, offset, len)) in list.items.iter_mut().zip(parts) {
        let memory_file = file.as_raw_fd().cast_unsigned();
        *item = Item { memory_file, padding: 0, offset: *offset, len: *len };
    }
    // SAFETY: the device knows this ioctl, which reads `count` items of the list.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), CREATE_LIST as _, &raw const list) };
    if fd < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel returned a new descriptor, which nobody else owns.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }))
}
