//! Tests of the modified rdma_rxe (`--dma-buf`): regions of genuine dma-bufs, and transfers through
//! them.

use std::{
    env, fs, io,
    ops::{Deref, DerefMut},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr, slice,
};

use crate::verbs::{
    Domain, LOCAL_WRITE, Loopback, Operation, REMOTE_ATOMIC, REMOTE_READ, REMOTE_WRITE, Verbs,
};

const ALL: i32 = LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE | REMOTE_ATOMIC;

/// Returns the page size of the machine.
fn page_size() -> usize {
    // SAFETY: the call reads a constant of the process.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("a page size")
}

fn checked(result: i32, what: &str) -> i32 {
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
    result
}

/// A dma-buf and a mapping of the same memory.
struct Buffer {
    fd: OwnedFd,
    mapping: *mut u8,
    length: usize,
}

impl Buffer {
    fn mapped(fd: OwnedFd, behind: &impl AsRawFd, offset: usize, length: usize) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapping = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length,
                protection,
                libc::MAP_SHARED,
                behind.as_raw_fd(),
                offset as i64,
            )
        };
        assert_ne!(mapping, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        Self { fd, mapping: mapping.cast(), length }
    }

    /// Creates a dma-buf of a part of a new memory file, by `/dev/udmabuf`.
    fn udmabuf(flags: u32, file_length: usize, offset: usize, length: usize) -> Self {
        #[repr(C)]
        struct Create {
            memfd: u32,
            flags: u32,
            offset: u64,
            size: u64,
        }
        // SAFETY: system calls over owned descriptors and a structure of the ioctl's shape.
        unsafe {
            let memory = checked(
                libc::memfd_create(c"test".as_ptr(), flags | libc::MFD_ALLOW_SEALING),
                "memfd_create",
            );
            let memory = OwnedFd::from_raw_fd(memory);
            checked(libc::ftruncate(memory.as_raw_fd(), file_length as i64), "ftruncate");
            checked(
                libc::fcntl(memory.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK),
                "F_ADD_SEALS",
            );
            let device = fs::File::options().read(true).write(true).open("/dev/udmabuf").unwrap();
            let create = Create {
                memfd: memory.as_raw_fd() as u32,
                flags: 1,
                offset: offset as u64,
                size: length as u64,
            };
            let fd =
                checked(libc::ioctl(device.as_raw_fd(), 0x4018_7542, &create), "UDMABUF_CREATE");
            // A mapping of a huge-page file begins at a huge page, so the whole file is mapped.
            let mut buffer = Self::mapped(OwnedFd::from_raw_fd(fd), &memory, 0, file_length);
            buffer.mapping = buffer.mapping.add(offset);
            buffer.length = length;
            buffer
        }
    }

    fn system_heap(length: usize) -> Self {
        let fd = system_heap_fd(length, libc::O_RDWR);
        let behind = fd.try_clone().unwrap();
        Self::mapped(fd, &behind, 0, length)
    }
}

fn system_heap_fd(length: usize, mode: i32) -> OwnedFd {
    #[repr(C)]
    struct Allocate {
        length: u64,
        fd: u32,
        fd_flags: u32,
        heap_flags: u64,
    }
    let heap = fs::File::open("/dev/dma_heap/system").unwrap();
    let fd_flags = (mode | libc::O_CLOEXEC) as u32;
    let mut allocate = Allocate { length: length as u64, fd: 0, fd_flags, heap_flags: 0 };
    // SAFETY: a structure of the ioctl's shape; the descriptor that comes back is new.
    unsafe {
        checked(
            libc::ioctl(heap.as_raw_fd(), 0xc018_4800_u64 as _, &mut allocate),
            "DMA_HEAP_IOCTL_ALLOC",
        );
        OwnedFd::from_raw_fd(allocate.fd as i32)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has this length and lives until the process ends. The tests wait for
        // completions before they read.
        unsafe { slice::from_raw_parts(self.mapping, self.length) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length and lives until the process ends. Only this buffer
        // writes to it, and the tests wait for completions before they do.
        unsafe { slice::from_raw_parts_mut(self.mapping, self.length) }
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 7 + index / 251) as u8).collect()
}

fn with_domain(test: impl FnOnce(&Domain<'_>)) {
    let verbs = Verbs::load();
    let domain = verbs.open(&env::var("HMEM_VERBS_DEVICE").unwrap());
    test(&domain);
    assert_eq!(domain.try_close(), 0, "ibv_dealloc_pd: something of it is left");
    domain.close_device();
}

/// Registers `buffer[offset..offset + length]`, closes the dma-buf's fd, and then writes to, reads
/// from and adds to the region.
fn bytes_move(mut buffer: Buffer, offset: usize, length: usize, iova: u64) {
    with_domain(|domain| {
        buffer.fill(0xee);
        let region = domain
            .register_dma_buf(buffer.fd.as_raw_fd(), offset as u64, length, iova, ALL)
            .unwrap();
        buffer.fd = fs::File::open("/dev/null").unwrap().into();
        let loopback = Loopback::new(domain);
        let mut source = pattern(length);
        let expected = source.clone();
        let source_region = domain.register(&mut source, LOCAL_WRITE).unwrap();
        let here = (source.as_ptr().expose_provenance() as u64, length as u32, source_region.key());

        assert_eq!(loopback.run(Operation::Write, here, (iova, region.key()), 0), 0);
        assert!(buffer[offset..offset + length] == expected, "what was written is in the buffer");
        assert!(
            buffer[..offset].iter().chain(&buffer[offset + length..]).all(|byte| *byte == 0xee),
            "and nothing else"
        );

        buffer[offset..offset + length].reverse();
        let mut mirrored = expected;
        mirrored.reverse();
        assert_eq!(loopback.run(Operation::Read, here, (iova, region.key()), 0), 0);
        assert!(source == mirrored, "what is in the buffer was read");

        let (at, word) = (offset.next_multiple_of(8), 1_000_u64);
        buffer[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        let remote = (iova + (at - offset) as u64, region.key());
        assert_eq!(loopback.run(Operation::FetchAdd, (here.0, 8, here.2), remote, 234), 0);
        assert_eq!(buffer[at..at + 8], 1_234_u64.to_ne_bytes());
        assert_eq!(source[..8], word.to_ne_bytes());
    });
}

#[test]
fn bytes_move_through_a_whole_udmabuf() {
    bytes_move(
        Buffer::udmabuf(0, 16 * page_size(), 0, 16 * page_size()),
        0,
        16 * page_size(),
        0x10_0000,
    );
}

#[test]
fn bytes_move_through_an_unaligned_part_of_a_udmabuf() {
    bytes_move(
        Buffer::udmabuf(0, 64 * page_size(), 3 * page_size(), 16 * page_size()),
        2 * page_size() + 333,
        5 * page_size() + 1,
        0x7000_0000_014d,
    );
}

#[test]
fn bytes_move_through_a_udmabuf_inside_huge_pages() {
    let (huge, flags) = (2 << 20, libc::MFD_HUGETLB);
    bytes_move(
        Buffer::udmabuf(flags, 2 * huge, 5 * page_size(), huge),
        7 * page_size() + 16,
        huge - 9 * page_size(),
        0x4000_0010,
    );
}

#[test]
fn bytes_move_through_a_system_heap_buffer() {
    bytes_move(Buffer::system_heap(300 * page_size()), page_size() + 8, 290 * page_size(), 0x8);
}

#[test]
fn the_local_buffer_may_be_a_dma_buf() {
    with_domain(|domain| {
        let mut buffer = Buffer::udmabuf(0, 4 * page_size(), 0, 4 * page_size());
        buffer.copy_from_slice(&pattern(4 * page_size()));
        let region = domain
            .register_dma_buf(buffer.fd.as_raw_fd(), 100, 2 * page_size(), 100, LOCAL_WRITE)
            .unwrap();
        let mut target = vec![0; 2 * page_size()];
        let target_region = domain.register(&mut target, ALL).unwrap();
        let remote = (target.as_ptr().expose_provenance() as u64, target_region.key());
        let loopback = Loopback::new(domain);
        assert_eq!(
            loopback.run(Operation::Write, (100, 2 * page_size() as u32, region.key()), remote, 0),
            0
        );
        assert!(target == buffer[100..100 + 2 * page_size()]);
    });
}

#[test]
fn bounds_and_rights_of_a_region_hold() {
    with_domain(|domain| {
        let buffer = Buffer::udmabuf(0, 4 * page_size(), 0, 4 * page_size());
        let fd = buffer.fd.as_raw_fd();
        let region =
            domain.register_dma_buf(fd, 0, page_size(), 0, LOCAL_WRITE | REMOTE_READ).unwrap();
        let mut source = vec![0; 2 * page_size()];
        let source_region = domain.register(&mut source, LOCAL_WRITE).unwrap();
        let here = source.as_ptr().expose_provenance() as u64;
        let refused = 10;
        let outcome = |operation, length, remote| {
            Loopback::new(domain).run(
                operation,
                (here, length, source_region.key()),
                (remote, region.key()),
                0,
            )
        };
        assert_eq!(outcome(Operation::Read, page_size() as u32, 0), 0);
        assert_eq!(outcome(Operation::Read, page_size() as u32 + 1, 0), refused);
        assert_eq!(outcome(Operation::Read, 1, page_size() as u64), refused);
        assert_eq!(outcome(Operation::Write, 1, 0), refused);
    });
}

#[test]
fn invalid_dma_buf_regions_are_refused() {
    with_domain(|domain| {
        let buffer = Buffer::udmabuf(0, 4 * page_size(), 0, 4 * page_size());
        let fd = buffer.fd.as_raw_fd();
        let file = fs::File::open("/proc/self/exe").unwrap();
        let refusal = |fd, offset, length, iova, access| {
            domain
                .register_dma_buf(fd, offset, length, iova, access)
                .err()
                .map(|error| error.raw_os_error().unwrap())
        };
        assert_eq!(refusal(-1, 0, page_size(), 0, ALL), Some(libc::EBADF));
        assert_eq!(
            refusal(file.as_raw_fd(), 0, page_size(), 0, ALL),
            Some(libc::EINVAL),
            "not a dma-buf"
        );
        assert_eq!(
            refusal(fd, 4 * page_size() as u64, page_size(), 0, ALL),
            Some(libc::EINVAL),
            "past the end"
        );
        assert_eq!(
            refusal(fd, 0, 5 * page_size(), 0, ALL),
            Some(libc::EINVAL),
            "longer than the buffer"
        );
        assert_eq!(
            refusal(fd, 8, page_size(), 16, ALL),
            Some(libc::EINVAL),
            "address and offset differ inside their pages"
        );
        assert_eq!(
            refusal(fd, 0, page_size(), 0, REMOTE_WRITE),
            Some(libc::EINVAL),
            "remote write without local write"
        );
        assert_eq!(refusal(fd, 0, page_size(), 0, LOCAL_WRITE | 16), Some(libc::EINVAL), "MW_BIND");
        assert_eq!(
            refusal(fd, 0, page_size(), 0, LOCAL_WRITE | 64),
            Some(libc::EINVAL),
            "ON_DEMAND"
        );
        assert_eq!(refusal(fd, 0, page_size(), 0, ALL), None);
    });
}

/// The driver does not check the access mode of the fd. A caller that needs this check must make it
/// itself.
#[test]
fn a_read_only_fd_registers_for_writing() {
    with_domain(|domain| {
        let fd = system_heap_fd(page_size(), libc::O_RDONLY);
        domain.register_dma_buf(fd.as_raw_fd(), 0, page_size(), 0, ALL).unwrap();
    });
}

#[test]
fn a_thousand_regions_leak_no_buffer() {
    with_domain(|domain| {
        for round in 0..1000 {
            let buffer = Buffer::udmabuf(0, 4 * page_size(), 0, 4 * page_size());
            let offset = round % (2 * page_size() as u64);
            domain
                .register_dma_buf(buffer.fd.as_raw_fd(), offset, page_size(), offset, ALL)
                .unwrap();
            // SAFETY: the mapping belongs to the buffer, which is not used again.
            unsafe { libc::munmap(buffer.mapping.cast(), buffer.length) };
        }
        // A leaked region would keep its buffer alive. Other tests have live buffers too.
        let alive = fs::read_to_string("/sys/kernel/debug/dma_buf/bufinfo").unwrap();
        let total = alive.lines().rev().find_map(|line| line.strip_prefix("Total ")).unwrap();
        assert!(total.split(' ').next().unwrap().parse::<u32>().unwrap() < 50, "{total}");
    });
}
