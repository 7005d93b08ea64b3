//! Persistent memory (RMA_PMEM): a remote write completes after its bytes were written back.
//!
//! The tests refuse the system calls that write memory back, so transfers that make such a call
//! fail. A failed transfer shows a test which pages the provider tried to write back.

#![allow(unsafe_code)]

use std::{ops::Range, os::fd::AsFd, thread};

use crate::link::{Memory, Opened};
use crate::{link, machine};
use hmem::{
    Access, BorrowedDmaBuf, DmaBufOffset, Errno, Error, ErrorKind, MrFlags, MrMode, Region,
    RemoteKey, Request,
    fabric::MrAttr,
    loopback::{Builder, Loopback, Progress, RemapPolicy},
    system::DeviceCall,
};
use hmem_conformance::link::{
    Bytes, HostPages, LOCAL, Link, REMOTE, mr_attr, pattern, raw, remote,
};
use rustix::fs::{MemfdFlags, SealFlags};

/// Returns the page size of the machine.
fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Errno with which an `msync` of exactly the expected pages fails. Any other `msync` fails with
/// [`UNEXPECTED`].
const EXPECTED: i32 = libc::EIO;
const UNEXPECTED: i32 = libc::E2BIG;
/// Errno with which every `fdatasync` fails.
const FILE: i32 = libc::ENOSPC;

/// Runs `body` on a new thread on which system calls that write memory back fail. They also fail on
/// threads that this thread starts.
///
/// `msync(MS_SYNC)` of exactly the address range `pages` fails with `errno`. `msync` of another
/// range or with other flags fails with [`UNEXPECTED`]. `fdatasync` fails with [`FILE`].
fn refusing<T: Send>(pages: Range<u64>, errno: i32, body: impl FnOnce() -> T + Send) -> T {
    let len = pages.end - pages.start;
    thread::scope(|scope| {
        let refused = scope.spawn(|| {
            refuse(pages.start, len as u32, errno);
            body()
        });
        refused.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Installs the seccomp filter of [`refusing`] on the calling thread.
fn refuse(start: u64, len: u32, errno: i32) {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const ABOVE: u32 = libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    /// Offset of the system call number in `struct seccomp_data`. `argument` returns that of the
    /// low half of an argument (little endian).
    const NUMBER: u32 = 0;
    let argument = |at: u32| 16 + 8 * at;
    let line =
        |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let fail = |errno: i32| libc::SECCOMP_RET_ERRNO | errno as u32;
    let (low, high) = (start as u32, (start >> 32) as u32);
    let mut program = [
        line(LOAD, NUMBER, 0, 0),
        line(EQUAL, libc::SYS_fdatasync as u32, 13, 0),
        line(EQUAL, libc::SYS_msync as u32, 0, 11),
        line(LOAD, argument(0), 0, 0),
        line(EQUAL, low, 0, 8),
        line(LOAD, argument(0) + 4, 0, 0),
        line(EQUAL, high, 0, 6),
        // The kernel rounds the length up to pages.
        line(LOAD, argument(1), 0, 0),
        line(ABOVE, len, 4, 0),
        line(ABOVE, len - page_size() as u32, 0, 3),
        line(LOAD, argument(2), 0, 0),
        line(EQUAL, libc::MS_SYNC as u32, 0, 1),
        line(RETURN, fail(errno), 0, 0),
        line(RETURN, fail(UNEXPECTED), 0, 0),
        line(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        line(RETURN, fail(FILE), 0, 0),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: both calls affect this thread only, and the program outlives the call that installs
    // it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0, "no_new_privs");
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let installed = libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program);
        assert_eq!(installed, 0, "seccomp: {}", std::io::Error::last_os_error());
    }
}

/// Returns the errno with which a transfer failed; `None` if it succeeded.
fn errno<T>(result: Result<T, Error>) -> Option<i32> {
    result.err().map(|error| error.os_errno().unwrap_or_else(|| panic!("{error}")).0)
}

/// Returns a software NIC for each way of progress, and with pages that it follows or pins.
fn nics() -> [Builder; 2] {
    let by_hand = Loopback::builder().progress(Progress::ByHand).remap_policy(RemapPolicy::Follow);
    [by_hand, Loopback::builder().progress(Progress::Thread).remap_policy(machine::pages())]
}

/// MR-12
#[test]
fn persistent_write_completes_after_its_pages_are_written_back() {
    for mode in [MrMode::empty(), MrMode::VIRT_ADDR] {
        for nic in nics() {
            persistent_host_write(&|| link::open(nic.clone(), mode, Memory::Host).link);
        }
    }
}

fn persistent_host_write(open: &(dyn Fn() -> Link + Sync)) {
    let memory = Bytes::Host(HostPages::new(4 * page_size() as usize));
    memory.put(0, &pattern(1, 4 * page_size()));
    let start = memory.range().start().0;
    // The written range begins with the last byte of the second page and ends with the first byte
    // of the fourth page.
    let (at, len) = (2 * page_size() - 1, page_size() as usize + 2);
    refusing(start + page_size()..start + 4 * page_size(), EXPECTED, || {
        let link = open();
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let persistent = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        let ordinary = link.expose(memory.range(), REMOTE);
        let (key, plain) = (link.key(&persistent), link.key(&ordinary));
        assert_eq!(errno(link.push(&key, at, &pattern(2, len as u64))), Some(EXPECTED));
        assert_eq!(memory.get(at, len), pattern(2, len as u64), "the bytes arrive all the same");
        link.push(&plain, at, &pattern(3, len as u64))
            .expect("memory that is not said to be persistent");
        assert_eq!(
            link.pull(&key, at, len as u64).expect("reads change nothing"),
            pattern(3, len as u64)
        );
        assert_eq!(errno(link.push(&key, 0, &[1])), Some(UNEXPECTED), "other pages, written back");
        // A failed write leaves the region usable.
        assert_eq!(errno(link.push(&key, at, &pattern(4, len as u64))), Some(EXPECTED));
    });
    refusing(start + page_size()..start + 2 * page_size(), EXPECTED, || {
        let link = open();
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let persistent = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        assert_eq!(
            errno(link.fetch_add(&link.key(&persistent), page_size() + 8, 1)),
            Some(EXPECTED)
        );
    });
    // If the kernel writes the memory back, the remote write succeeds.
    let link = open();
    let ranges = [memory.range()];
    let persistent =
        link.try_expose(&mr_attr(&ranges, REMOTE), MrFlags::RMA_PMEM).expect("register");
    link.assert_works(&link.key(&persistent));
}

/// MR-12
#[test]
fn persistent_device_memory_is_flushed_before_a_write_completes() {
    for (nic, memory) in nics().into_iter().zip([Memory::Device, Memory::Staged]) {
        let Opened { link, device } = link::open(nic, MrMode::empty(), memory);
        let memory = link.bytes(64);
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let persistent = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        let ordinary = link.expose(memory.range(), REMOTE);
        let (key, plain) = (link.key(&persistent), link.key(&ordinary));
        // Allocates the initiator's buffers before the fault is injected.
        link.assert_works(&key);
        device.faults().fail_always(DeviceCall::FlushInbound, Errno(EXPECTED));
        assert_eq!(errno(link.push(&key, 0, &[7; 8])), Some(EXPECTED));
        link.push(&plain, 0, &[8; 8]).expect("memory that is not said to be persistent");
        device.faults().clear();
        link.assert_works(&key);
    }
}

/// Asserts that a write with each of these keys fails with [`EXPECTED`]. The NIC then tried to
/// write back exactly the expected pages.
fn assert_written_back(link: &Link, keys: &[(&str, RemoteKey)]) {
    for (name, key) in keys {
        assert_eq!(errno(link.push(key, 0, &[9; 16])), Some(EXPECTED), "{name}");
    }
}

/// MR-12
#[test]
fn windows_and_sub_regions_write_persistent_memory_back() {
    let memory = Bytes::Host(HostPages::new(page_size() as usize));
    let start = memory.range().start().0;
    refusing(start..start + page_size(), EXPECTED, || {
        let link = link::plain();
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE | LOCAL | Access::MW_BIND);
        let base = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        let sub = base.sub(memory.part(64, 64), REMOTE, link.fresh_key()).expect("sub-region");
        let window = link.target.domain.alloc_type_1_window().expect("window");
        let through = window.bind(&base, 128, 64, REMOTE).expect("bind");
        let keys = [("sub-region", link.key(&sub)), ("window", through)];
        assert_written_back(&link, &keys);

        let plain = link.expose(memory.range(), REMOTE | LOCAL);
        let attr = MrAttr::new((&*plain, memory.part(64, 64)), REMOTE);
        let own = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("sub-region");
        assert_written_back(&link, &[("a sub-region's own flag", link.key(&own))]);
        link.assert_works(&link.key(&plain));
    });
}

/// MR-12
///
/// The seccomp filter lets the write-back of one range succeed and that of the other fail. A write
/// over both ranges must fail.
#[test]
fn write_over_two_persistent_ranges_writes_back_both() {
    const WRITTEN_BACK: i32 = 0;
    let memory = Bytes::Host(HostPages::new(3 * page_size() as usize));
    // The ranges are in descending order of addresses, with a page between them.
    let ranges = [memory.part(2 * page_size(), page_size()), memory.part(0, page_size())];
    let seam = page_size() - 8;
    for (only, its_own, others) in [(0, 0, page_size()), (1, page_size(), 0)] {
        let start = ranges[only].start().0;
        refusing(start..start + page_size(), WRITTEN_BACK, || {
            let link = link::plain();
            let attr = mr_attr(&ranges, REMOTE);
            let region = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
            let key = link.key(&region);
            let bytes = pattern(only as u64 + 1, 16);
            assert_eq!(errno(link.push(&key, seam, &bytes)), Some(UNEXPECTED), "range {only}");
            assert_eq!(memory.get(3 * page_size() - 8, 8), bytes[..8]);
            assert_eq!(memory.get(0, 8), bytes[8..]);
            link.push(&key, its_own, &[1; 8]).expect("its pages are written back");
            assert_eq!(errno(link.push(&key, others, &[1; 8])), Some(UNEXPECTED), "range {only}");
        });
    }
}

/// MR-12
#[test]
fn one_request_writes_back_only_its_persistent_regions() {
    use hmem::transfer::Operation;
    let (kept, passing) = (
        Bytes::Host(HostPages::new(page_size() as usize)),
        Bytes::Host(HostPages::new(page_size() as usize)),
    );
    let start = kept.range().start().0;
    refusing(start..start + page_size(), EXPECTED, || {
        let link = link::plain();
        let ranges = [kept.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let kept = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        let passing = link.expose(passing.range(), REMOTE);
        let (first, second) = (link.key(&passing), link.key(&kept));
        let local = link.local(32, LOCAL);
        let remote = [remote(&first, 0, 16), remote(&second, 0, 16)];
        let written = link.transfer(Operation::Write { remote: &remote }, &[local.segment(0, 32)]);
        assert_eq!(errno(written), Some(EXPECTED));
    });
}

/// MR-12
#[test]
fn persistent_files_given_by_their_fd_are_written_back() {
    for (seals, expected) in [(SealFlags::empty(), FILE), (SealFlags::SHRINK, UNEXPECTED)] {
        let fd = rustix::fs::memfd_create("persistent", MemfdFlags::ALLOW_SEALING).expect("memfd");
        rustix::fs::ftruncate(&fd, page_size()).expect("ftruncate");
        rustix::fs::fcntl_add_seals(&fd, seals).expect("seals");
        // The test does not know the address of the NIC's own mapping, so every `msync` is
        // unexpected.
        refusing(page_size()..2 * page_size(), EXPECTED, || {
            let link = link::plain();
            let (fd, offset) = (fd.as_fd(), DmaBufOffset(0));
            let buffer = BorrowedDmaBuf { fd, offset, len: page_size(), base_addr: None };
            let attr = MrAttr::new(raw(buffer), REMOTE);
            let expose =
                |flags| link.try_expose(&attr, flags | MrFlags::MR_DMABUF).expect("register");
            let (kept, passing) = (expose(MrFlags::RMA_PMEM), expose(MrFlags::empty()));
            assert_eq!(errno(link.push(&link.key(&kept), 8, &[1; 8])), Some(expected), "{seals:?}");
            link.push(&link.key(&passing), 8, &[2; 8]).expect("without the flag");
        });
    }
}

/// MR-12
///
/// The kernel refuses `msync` on device DAX with EINVAL, since there is no file to write to.
#[test]
fn owned_device_dax_is_written_back_by_cache_lines() {
    let memory = Bytes::Host(HostPages::new(page_size() as usize));
    let start = memory.range().start().0;
    refusing(start..start + page_size(), libc::EINVAL, || {
        let link = link::plain();
        let ranges = [memory.range()];
        let attr = mr_attr(&ranges, REMOTE);
        let borrowed = link.try_expose(&attr, MrFlags::RMA_PMEM).expect("register");
        let error = link.push(&link.key(&borrowed), 0, &[1; 8]).expect_err("not written back");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.remedy_text().is_some_and(|text| text.contains("device DAX")), "{error}");
    });
    let (buffer, page) = owned();
    refusing(page.start..page.end, libc::EINVAL, || {
        let link = link::plain();
        let (region, key, at) = register_owned(&link, buffer, page.start);
        let written = link.push(&key, at, &[5; 16]);
        if cfg!(target_arch = "x86_64") {
            written.expect("written back without the kernel");
        } else {
            assert_eq!(written.expect_err("not written back").kind(), ErrorKind::Unsupported);
        }
        let bytes = region.close().expect("close");
        assert_eq!(bytes[at as usize..at as usize + 16], [5; 16]);
    });
}

/// Returns a buffer that a region can own, and the address range of a whole page inside it.
fn owned() -> (Vec<u8>, Range<u64>) {
    let buffer = vec![0; 3 * page_size() as usize];
    let page = (buffer.as_ptr().addr() as u64).next_multiple_of(page_size());
    (buffer, page..page + page_size())
}

/// Registers a buffer as persistent memory. Returns the region, its key and the offset of the
/// address `page` in it.
fn register_owned(link: &Link, buffer: Vec<u8>, page: u64) -> (Region<Vec<u8>>, RemoteKey, u64) {
    let at = page - buffer.as_ptr().addr() as u64;
    let request = Request::new(buffer, REMOTE).key(link.fresh_key()).flags(MrFlags::RMA_PMEM);
    let region = link.target.domain.submit(request).expect("register");
    let key = region.key().expect("key");
    (region, key, at)
}

/// MR-12
#[test]
fn owned_persistent_memory_is_written_back() {
    let (buffer, page) = owned();
    refusing(page.start..page.end, EXPECTED, || {
        let link = link::plain();
        let (_region, key, at) = register_owned(&link, buffer, page.start);
        assert_eq!(errno(link.push(&key, at, &[5; 16])), Some(EXPECTED));
    });
}
