//! Memory of a file descriptor: a dma-buf, or a memfd in its place.
//!
//! The NIC maps a file that cannot shrink, and copies its bytes directly. Such a file is a genuine
//! dma-buf, or a memfd that is sealed against shrinking. If any other file shrank under a mapping,
//! an access would end the process with SIGBUS. So the NIC reads and writes those files through the
//! descriptor. An access past their end fails the transfer.

#![allow(unsafe_code, reason = "maps dma-bufs and memory files")]

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::Arc,
};

use hmem_core::{Errno, Error, ErrorKind, Mapping as MappedFile, Result};
use rustix::{
    fs::{FileType, OFlags, SealFlags, SeekFrom},
    mm::ProtFlags,
};

use super::{
    PieceMemory,
    host::{bad_address, sync_pages},
    indirect::IndirectMemory,
};

/// `DMA_BUF_MAGIC` of `linux/magic.h`: the file system type of dma-bufs.
const DMA_BUF_MAGIC: u64 = 0x444d_4142;
/// `DMA_BUF_IOCTL_SYNC` of `linux/dma-buf.h`: `_IOW('b', 0, struct dma_buf_sync)`.
const DMA_BUF_IOCTL_SYNC: libc::Ioctl = 0x4008_6200;
const DMA_BUF_SYNC_READ: u64 = 1;
const DMA_BUF_SYNC_WRITE: u64 = 2;
const DMA_BUF_SYNC_END: u64 = 4;

/// Imports `len` bytes at `offset` of a file. Returns the imported memory, and the offset of the
/// first byte in it.
///
/// # Errors
/// - InvalidArgument: the fd is neither a dma-buf nor a regular file, or the file can shrink and
///   the fd has `O_APPEND`.
/// - OutOfBounds: the range reaches past the end of the file.
/// - AccessDenied: the fd is write-only, or `write` is true and the fd does not permit writes.
/// - Another error of the kernel, for a dma-buf that the CPU cannot map for example.
pub(in super::super) fn import(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    write: bool,
) -> Result<(PieceMemory, u64)> {
    let file = Properties::of(fd)?;
    if offset.checked_add(len).is_none_or(|end| end > file.len) {
        return Err(Error::new(ErrorKind::OutOfBounds, "register")
            .provider("loopback")
            .context("offset", offset)
            .context("length", len)
            .context("file", format_args!("{} bytes", file.len))
            .remedy("register a range inside the exported buffer"));
    }
    if write && !file.writable {
        return Err(Error::new(ErrorKind::AccessDenied, "register")
            .provider("loopback")
            .context(
                "why",
                "the fd is read-only or sealed against writes, and the rights let the NIC write",
            )
            .remedy("export the buffer writable, or register it without rights to write"));
    }
    if file.can_shrink {
        let memory = FileMemory { file: own(fd)?.into() };
        memory.check_position("register")?;
        return Ok((PieceMemory::Indirect(Arc::new(memory)), offset));
    }
    let start = offset - offset % file.page;
    let mapping = Mapping::new(fd, start, offset - start + len, &file)?;
    let at = offset - start;
    Ok((PieceMemory::Mapped(Arc::new(mapping)), at))
}

fn own(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let failed = |error| failed("fcntl(F_DUPFD_CLOEXEC)")(Errno::of(&error));
    fd.try_clone_to_owned().map_err(failed)
}

/// Returns a function that converts the error number of a failed `call` to an error.
fn failed<E: Into<Errno>>(call: &'static str) -> impl FnOnce(E) -> Error {
    move |errno| Error::os(errno.into(), call).provider("loopback")
}

/// The properties of a file that decide how the NIC accesses it.
struct Properties {
    len: u64,
    writable: bool,
    can_shrink: bool,
    dma_buf: bool,
    /// The page size of the file. Offsets of mappings are multiples of it.
    page: u64,
}

impl Properties {
    fn of(fd: BorrowedFd<'_>) -> Result<Self> {
        let file_system = rustix::fs::fstatfs(fd).ok().map(|fs| fs.f_type as u64);
        let dma_buf = file_system == Some(DMA_BUF_MAGIC);
        let stat = rustix::fs::fstat(fd).map_err(failed("fstat"))?;
        let mode = rustix::fs::fcntl_getfl(fd).map_err(failed("fcntl(F_GETFL)"))? & OFlags::ACCMODE;
        if !dma_buf && FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Error::new(ErrorKind::InvalidArgument, "register")
                .provider("loopback")
                .context("why", "the fd is neither a dma-buf nor a file")
                .remedy("pass the fd of a dma-buf export or of a memfd"));
        }
        if mode == OFlags::WRONLY {
            return Err(Error::new(ErrorKind::AccessDenied, "register")
                .provider("loopback")
                .context("why", "the fd is write-only, and the NIC reads what it maps")
                .remedy("open the file for reading and writing"));
        }
        let len = if dma_buf {
            let len = rustix::fs::seek(fd, SeekFrom::End(0)).map_err(failed("lseek(SEEK_END)"))?;
            rustix::fs::seek(fd, SeekFrom::Start(0)).map_err(failed("lseek(SEEK_SET)"))?;
            len
        } else {
            stat.st_size.unsigned_abs()
        };
        // The call fails with EINVAL for a file that is not a memfd. Such a file has no seals.
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        let write_sealed = seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
        let base_page = rustix::param::page_size() as u64;
        // The field has 64 bits on x86-64 and 32 on aarch64.
        let block = u64::try_from(stat.st_blksize).unwrap_or(base_page);
        let huge = file_system == Some(libc::HUGETLBFS_MAGIC as u64);
        Ok(Self {
            len,
            writable: mode == OFlags::RDWR && !write_sealed,
            can_shrink: !dma_buf && !seals.contains(SealFlags::SHRINK),
            dma_buf,
            page: if huge { block.max(base_page) } else { base_page },
        })
    }
}

/// The NIC's mapping of a file that cannot shrink.
#[derive(Debug)]
pub(in super::super) struct Mapping {
    mapping: MappedFile,
    /// For a genuine dma-buf, the fd on which the NIC announces the CPU's accesses.
    dma_buf: Option<OwnedFd>,
}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, start: u64, len: u64, file: &Properties) -> Result<Self> {
        let dma_buf = if file.dma_buf { Some(own(fd)?) } else { None };
        let mut protection = ProtFlags::READ;
        if file.writable {
            protection |= ProtFlags::WRITE;
        }
        // The file cannot shrink (`Properties::of`), so that every access finds bytes of the file.
        let mapping = MappedFile::shared(fd, start, len as usize, protection).map_err(|errno| {
            Error::os(errno, "mmap")
                .provider("loopback")
                .context("offset", start)
                .context("length", len)
                .remedy("the exporter does not let the CPU map this buffer")
        })?;
        Ok(Self { mapping, dma_buf })
    }

    /// Returns the address of the byte at offset `at` of the mapping.
    pub(super) fn address(&self, at: u64) -> u64 {
        self.mapping.address().0 + at
    }

    /// Announces the start of a CPU access, or its end if `stage` is `DMA_BUF_SYNC_END`. Does
    /// nothing if the file is not a genuine dma-buf.
    fn announce(&self, write: bool, stage: u64) -> Result<()> {
        let Some(fd) = &self.dma_buf else { return Ok(()) };
        let access = if write { DMA_BUF_SYNC_READ | DMA_BUF_SYNC_WRITE } else { DMA_BUF_SYNC_READ };
        let flags = access | stage;
        loop {
            // SAFETY: the request reads one `struct dma_buf_sync`, which is a u64 of flags.
            let result =
                unsafe { libc::ioctl(fd.as_raw_fd(), DMA_BUF_IOCTL_SYNC, &raw const flags) };
            if result == 0 {
                return Ok(());
            }
            let errno = Errno::of(&std::io::Error::last_os_error());
            if errno.0 != libc::EINTR && errno.0 != libc::EAGAIN {
                return Err(failed("DMA_BUF_IOCTL_SYNC")(errno));
            }
        }
    }

    /// Writes bytes back to the file. Does nothing for a genuine dma-buf, which has no file. Its
    /// device saw the bytes when the NIC announced the end of the access.
    pub(super) fn persist(&self, address: u64, len: u64) -> Result<()> {
        if self.dma_buf.is_some() {
            return Ok(());
        }
        sync_pages(address, len).map_err(failed("msync"))
    }
}

/// A guard of a CPU access to a mapped file, which may be a dma-buf. Dropping the guard announces
/// the end of the access.
pub(in super::super) struct DmaBufAccess<'a> {
    mapping: &'a Mapping,
    write: bool,
}

impl<'a> DmaBufAccess<'a> {
    /// Announces the start of an access to `mapping`. `write` is true if the access writes.
    pub(in super::super) fn begin(
        mapping: Option<&'a Mapping>,
        write: bool,
    ) -> Result<Option<Self>> {
        let Some(mapping) = mapping else { return Ok(None) };
        mapping.announce(write, 0)?;
        Ok(Some(Self { mapping, write }))
    }
}

impl Drop for DmaBufAccess<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.mapping.announce(self.write, DMA_BUF_SYNC_END) {
            tracing::warn!(
                error = %error.full(),
                "cannot announce the end of a CPU access to a dma-buf"
            );
        }
    }
}

/// A file that could shrink, so the NIC accesses it by `pread` and `pwrite`. The argument `at` of
/// its methods is an offset in the file.
#[derive(Debug)]
struct FileMemory {
    file: File,
}

impl FileMemory {
    /// Refuses a file with `O_APPEND`, because each write would go to the end of the file.
    ///
    /// The check precedes each write. The NIC's fd is a duplicate of the application's fd and
    /// shares its flags, so the application can set the flag at any time.
    fn check_position(&self, operation: &'static str) -> Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file).map_err(failed("fcntl(F_GETFL)"))?;
        if flags.contains(OFlags::APPEND) {
            return Err(Error::new(ErrorKind::InvalidArgument, operation)
                .provider("loopback")
                .context(
                    "why",
                    "the fd was opened with O_APPEND: every write would go to the end of the file",
                )
                .remedy(
                    "open the file without O_APPEND, or seal it against shrinking (F_SEAL_SHRINK)",
                ));
        }
        Ok(())
    }
}

impl IndirectMemory for FileMemory {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(into, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => past_the_end(at, into.len()),
            _ => failed("pread")(Errno::of(&error)),
        })
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        self.check_position("transfer")?;
        // Checks the size first, because a write past the end would make the file longer.
        let stat = rustix::fs::fstat(&self.file).map_err(failed("fstat"))?;
        if at + from.len() as u64 > stat.st_size.unsigned_abs() {
            return Err(past_the_end(at, from.len()));
        }
        self.file.write_all_at(from, at).map_err(|error| match error.kind() {
            io::ErrorKind::WriteZero => past_the_end(at, from.len()),
            _ => failed("pwrite")(Errno::of(&error)),
        })
    }

    fn atomic_address(&self, at: u64) -> Result<u64> {
        Ok(at)
    }

    fn persist(&self, _at: u64, _len: u64) -> Result<()> {
        rustix::fs::fdatasync(&self.file).map_err(failed("fdatasync"))
    }
}

fn past_the_end(at: u64, len: usize) -> Error {
    bad_address(at, len as u64).context("why", "the file became shorter than the region")
}
