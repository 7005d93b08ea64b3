//! dma-bufs of `/dev/udmabuf` over a real driver, if the driver imports dma-bufs.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use hmem_core::{
    Access, Address, BorrowedDmaBuf, DmaBufOffset, ErrorKind, MemoryRegion, MrFlags, Promise, Raw,
    Result,
    fabric::{self, MrAttr},
};
use support::{LOCAL, Pages, Pair, REMOTE, Side, device, remote, segment};
use trials::{Outcome, Skipped, trials};

trials! {
    dma_buf_import_is_probed,
    dma_buf_transfers_work_after_its_fd_is_closed,
    invalid_dma_bufs_and_ranges_are_refused,
}

const LEN: usize = 64 << 10;

/// A file in memory (memfd), and a dma-buf of its pages.
struct Buffer {
    file: File,
    fd: OwnedFd,
}

impl Buffer {
    fn new() -> Self {
        #[repr(C)]
        struct Create {
            memfd: u32,
            flags: u32,
            offset: u64,
            size: u64,
        }
        const UDMABUF_CREATE: libc::c_ulong = 0x4018_7542;
        // SAFETY: the name is NUL-terminated; the result is checked.
        let memfd = unsafe { libc::memfd_create(c"dma-buf".as_ptr(), libc::MFD_ALLOW_SEALING) };
        assert!(memfd >= 0, "memfd_create");
        // SAFETY: the descriptor is new, and only the file owns it.
        let file = unsafe { File::from_raw_fd(memfd) };
        file.set_len(LEN as u64).expect("size");
        // SAFETY: the file is open.
        let sealed = unsafe { libc::fcntl(memfd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        assert_eq!(sealed, 0, "seal");
        let maker =
            File::options().read(true).write(true).open("/dev/udmabuf").expect("/dev/udmabuf");
        let create = Create { memfd: memfd as u32, flags: 0, offset: 0, size: LEN as u64 };
        // SAFETY: the structure has the layout of linux/udmabuf.h.
        let fd = unsafe { libc::ioctl(maker.as_raw_fd(), UDMABUF_CREATE as _, &create) };
        assert!(fd >= 0, "UDMABUF_CREATE: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new, and only this value owns it.
        Self { file, fd: unsafe { OwnedFd::from_raw_fd(fd) } }
    }

    /// Registers part of the buffer. The region does not keep the descriptor open.
    fn register(&self, side: &Side, offset: u64, len: u64, access: Access) -> Result<MemoryRegion> {
        let base_addr = Some(Address(0x7000_0000_0000));
        let buffer =
            BorrowedDmaBuf { fd: self.fd.as_fd(), offset: DmaBufOffset(offset), len, base_addr };
        // SAFETY: only the region uses the buffer while it is open.
        let memory = unsafe { Raw::new(buffer, Promise::ReadWrite) };
        fabric::regattr(&side.domain, &MrAttr::new(memory, access), MrFlags::MR_DMABUF)
    }

    fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(&self.file, &mut bytes, offset).expect("read");
        bytes
    }
}

fn importing_pair(name: &str) -> Result<Pair, Skipped> {
    let pair = Pair::new(name);
    if pair.near.domain.provider_attr().imports.dma_buf {
        return Ok(pair);
    }
    Err(Skipped(format!("{name} imports no dma-bufs")))
}

fn dma_buf_import_is_probed() -> Outcome {
    let name = device()?;
    let pair = Pair::new(&name);
    let attr = pair.near.domain.provider_attr();
    println!("{name}: imports dma-bufs: {}", attr.imports.dma_buf);
    assert_eq!(attr.flags.contains(MrFlags::MR_DMABUF), attr.imports.dma_buf);
    if name.starts_with("rxe") {
        let modified = std::env::var_os("HMEM_VERBS_DMA_BUF").is_some_and(|set| !set.is_empty());
        assert_eq!(attr.imports.dma_buf, modified, "the stock rxe imports none");
    }
    Ok(())
}

fn dma_buf_transfers_work_after_its_fd_is_closed() -> Outcome {
    let name = device()?;
    let pair = importing_pair(&name)?;
    let buffer = Buffer::new();
    let local = Pages::new(LEN);
    let bytes = local.fill(6);
    let near = pair.near.register(local.range(), LOCAL).expect("register");
    // Neither offset nor length is a multiple of the page size.
    let (offset, len) = (4096 + 100, 20_000_u64);
    let far = buffer.register(&pair.far, offset, len, REMOTE).expect("register the dma-buf");
    let key = far.key().expect("key");
    assert_eq!(key.base().0, 0x7000_0000_0000 + offset, "addressed by base_addr + offset");
    let part = segment(local.part(0, len), near.desc().expect("desc"));
    pair.near.write(part, remote(&key, 0, len)).expect("write");
    assert_eq!(buffer.bytes(offset, len as usize), bytes[..len as usize]);
    assert_eq!(buffer.bytes(offset + len, 64), [0; 64], "nothing past the end");
    let file = buffer.file.try_clone().expect("keep the memory file");
    drop(buffer);
    local.put(0, &[0; LEN]);
    pair.near.read(part, remote(&key, 0, len)).expect("read after the fd was closed");
    assert_eq!(local.get(0, len as usize), bytes[..len as usize]);
    far.close().map_err(|rejected| rejected.error).expect("close");
    drop(file);
    Ok(())
}

fn invalid_dma_bufs_and_ranges_are_refused() -> Outcome {
    let name = device()?;
    let pair = importing_pair(&name)?;
    let buffer = Buffer::new();
    let error = buffer.register(&pair.far, 0, LEN as u64 + 4096, REMOTE).expect_err("past the end");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let file =
        Buffer { fd: OwnedFd::from(buffer.file.try_clone().expect("clone")), file: buffer.file };
    let error = file.register(&pair.far, 0, 4096, REMOTE).expect_err("a memory file is no dma-buf");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(pair.far.domain.live().regions, 0);
    Ok(())
}
