//! Tests of the loopback NIC's access to memory: pinned pages, mappings, absent pages, files,
//! staged copies, and atomics on each kind of memory.

#[path = "support/copied_device.rs"]
mod copied_device;
mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::{Arc, Mutex},
};

use copied_device::{CopiedDevice, Copies};
use hmem_core::{
    Access, Address, AddressRange, Addressing, DmaBufOffset, Error, ErrorKind, Iface, Iova, MrMode,
    RemoteKey, Result,
    iface::DmaBufMapping,
    provider::{Backing, ManualProgress, Piece},
    transfer::{AtomicOp, AtomicType, Operation, RemoteSegment},
};
use hmem_provider_loopback::{Faults, Loopback, NicCall, Progress, RemapPolicy};
use rustix::{
    fs::{MemfdFlags, OFlags, SealFlags},
    mm::{MapFlags, MprotectFlags, ProtFlags},
    param::page_size,
};
use support::*;
use trials::{Outcome, skip, trials};

trials! {
    pinned_regions_keep_old_pages_and_others_follow_mappings,
    /// CACHE-13
    forked_child_cannot_use_or_close_the_parents_domain,
    pinned_memory_larger_than_the_scratch_file_is_copied,
    pinned_region_needs_pages_and_unpins_them_at_close,
    /// MODE-06
    allocated_mode_takes_read_only_pages_that_nobody_writes,
    /// MODE-08
    sub_region_allows_only_announced_pages_of_its_base,
    /// MODE-08
    mmu_notify_applies_to_each_range_of_a_region,
    /// MODE-08
    refresh_waits_for_a_transfer_in_flight,
    imported_file_is_accessed_at_exactly_its_bytes,
    file_that_shrinks_fails_the_transfer,
    refused_file_import_names_the_reason,
    file_import_needs_a_readable_fd_without_append,
    staged_memory_is_copied_in_chunks_and_refuses_atomics,
    atomics_through_different_mappings_are_atomic_together,
    /// MR-09
    atomic_across_two_pieces_is_refused,
}

/// Anonymous pages. A test can remap them at the same addresses.
struct Pages {
    start: *mut u8,
    len: usize,
}

impl Pages {
    fn new(pages: usize) -> Self {
        let len = pages * page_size();
        let flags = MapFlags::PRIVATE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        };
        Self { start: start.unwrap().cast(), len }
    }

    /// Maps new pages at the same addresses.
    fn remap(&self) {
        self.replace(0, self.len, ProtFlags::READ | ProtFlags::WRITE);
    }

    /// Maps new pages at some of the addresses. One system call replaces the pages, so that no
    /// other thread can map memory there in between.
    fn replace(&self, offset: usize, len: usize, access: ProtFlags) {
        assert!(offset + len <= self.len);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is this object's own mapping, and nothing holds references into it.
        let again = unsafe {
            rustix::mm::mmap_anonymous(self.start.add(offset).cast(), len, access, flags)
        };
        again.unwrap();
    }

    fn protect(&self, page: usize, protection: MprotectFlags) {
        assert!(page * page_size() < self.len);
        // SAFETY: the page is in this object's own mapping, and nothing holds references into it.
        unsafe {
            rustix::mm::mprotect(self.start.add(page * page_size()).cast(), page_size(), protection)
                .unwrap()
        }
    }

    /// Replaces a page by a page without access rights. Its address stays in use, so that no other
    /// memory is mapped there.
    fn punch(&self, page: usize) {
        self.replace(page * page_size(), page_size(), ProtFlags::empty());
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < self.len);
        // SAFETY: `at` is inside the mapping, and tests do not touch pages that they have punched.
        unsafe { self.start.add(at).write_volatile(byte) }
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: `at` is inside the mapping, which lives as long as `self`.
        unsafe { self.start.add(at).read_volatile() }
    }

    fn range(&self) -> AddressRange {
        AddressRange::new(Address(self.start.expose_provenance() as u64), self.len as u64).unwrap()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and no thread uses it after the drop.
        unsafe { rustix::mm::munmap(self.start.cast(), self.len).unwrap() }
    }
}

fn pair(memory: RemapPolicy, mode: MrMode) -> Pair {
    Pair::new(Loopback::builder().remap_policy(memory).build().unwrap(), mode)
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn file_bytes(fd: &OwnedFd, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(fd, &mut bytes, at).unwrap(), len);
    bytes
}

fn file(fd: &OwnedFd, offset: u64, len: u64) -> Piece<'_> {
    Piece {
        range: AddressRange::new(Address(0x7000_0000_0000 + offset % page_size() as u64), len)
            .unwrap(),
        backing: Backing::DmaBuf {
            fd: fd.as_fd(),
            offset: DmaBufOffset(offset),
            mapping: DmaBufMapping::Default,
            revocation: None,
        },
    }
}

fn pinned_regions_keep_old_pages_and_others_follow_mappings() -> Outcome {
    skip(without_pinned_pages())?;
    for memory in policies() {
        let pair = pair(memory, MrMode::empty());
        let pages = Pages::new(3);
        for at in 0..pages.len {
            pages.set(at, 1);
        }
        let region =
            RegAttr::key(1).register(&*pair.there.domain, &[host(pages.range(), false)]).unwrap();
        let key = remote(region, pages.len as u64);
        pages.remap();
        pages.set(100, 2);
        let source = Buffer::filled(page_size(), 9);
        let back = Buffer::new(pages.len);
        let at = page_size() + 904;
        pair.here.write(pair.to, &[source.whole()], &key, at as u64).unwrap();
        pair.here.read(pair.to, &[back.whole()], &key, 0).unwrap();
        let (mapped, read) = (pages.get(at), (back.get(0), back.get(100), back.get(at)));
        match memory {
            // The stale registration moves stale bytes, and the new mapping does not see the write.
            RemapPolicy::Pinned => assert_eq!((mapped, read), (0, (1, 1, 9))),
            RemapPolicy::Follow => assert_eq!((mapped, read), (9, (0, 2, 9))),
        }
        pair.there.domain.refresh().unwrap().refresh_pages(region, &[]).unwrap();
        pair.here.read(pair.to, &[back.whole()], &key, 0).unwrap();
        assert_eq!((back.get(0), back.get(100)), (0, 2));
        pair.there.domain.deregister(region).unwrap();
    }
    Ok(())
}

fn forked_child_cannot_use_or_close_the_parents_domain() {
    let kinds = [
        (Progress::ByHand, RemapPolicy::Pinned),
        (Progress::ByHand, RemapPolicy::Follow),
        (Progress::Thread, RemapPolicy::Follow),
    ];
    let policies = policies();
    for (progress, memory) in kinds.into_iter().filter(|(_, memory)| policies.contains(memory)) {
        let provider = Loopback::builder().remap_policy(memory).progress(progress).build().unwrap();
        let domain = domain(&provider, MrMode::empty());
        let pages = Pages::new(2);
        let region = RegAttr::key(1).register(&*domain, &[host(pages.range(), false)]).unwrap();
        let (by_thread, end) = (progress == Progress::Thread, End::open(&domain));
        let (to, key, source) =
            (end.peer(&end), remote(region, pages.len as u64), Buffer::filled(1, 1));
        let list = [RemoteSegment { address: Iova(0), len: 1, key: &key }];
        let post = || end.post(Operation::Write { remote: &list }, &[source.whole()], to, 5);
        post().unwrap();
        // SAFETY: the child only calls the code under test and exits by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let alone = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let part = RegAttr::key(3);
                let progress = |work: &dyn ManualProgress| work.progress().map(drop);
                let refused_all = [
                    RegAttr::key(2).register(&*domain, &[host(pages.range(), false)]).map(drop),
                    domain
                        .sub_regions()
                        .unwrap()
                        .register_sub(region, &part.request(), 0, 8)
                        .map(drop),
                    domain.refresh().unwrap().refresh_pages(region, &[]),
                    domain.raw_keys().unwrap().raw_key(region).map(drop),
                    end.cq.read(&mut Vec::new(), 1).map(drop),
                    post(),
                    end.endpoint.resolve(&end.endpoint.name()).map(drop),
                ];
                // The request that the parent posted does not execute in the child.
                let unchanged = by_thread || pages.get(0) == 0;
                let closed = end.endpoint.close().is_ok();
                let stepped = domain.manual_progress().map(progress);
                // Ends the child's copy of the region. The parent's region is not changed.
                let ended = domain.deregister(region).is_ok();
                // SAFETY: the child drops its copies once, and exits without using the original
                // handles.
                drop(unsafe {
                    (std::ptr::read(&raw const end), std::ptr::read(&raw const domain))
                });
                let refused = |result: &Result<()>| {
                    result.as_ref().is_err_and(|error| error.kind() == ErrorKind::BadState)
                };
                ended && closed && unchanged && refused_all.iter().chain(&stepped).all(refused)
            }));
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!alone.unwrap_or(false))) };
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let mut status = 0;
        // SAFETY: `child` is the process that was just forked. The call does not block, so that the
        // test can detect a hang.
        while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } != child {
            if std::time::Instant::now() > deadline {
                // SAFETY: the child was not waited for, so that the process id still names it.
                unsafe { libc::kill(child, libc::SIGKILL) };
                panic!("the child hangs with progress {progress:?}");
            }
            std::thread::yield_now();
        }
        assert_eq!(status, 0, "{progress:?}");
        assert_eq!((domain.live().regions, domain.live().endpoints), (1, 1));
        assert_eq!(end.next().result.unwrap(), 1);
        assert_eq!(pages.get(0), 1);
        domain.refresh().unwrap().refresh_pages(region, &[]).unwrap();
        domain.deregister(region).unwrap();
    }
}

fn pinned_memory_larger_than_the_scratch_file_is_copied() -> Outcome {
    skip(without_pinned_pages())?;
    let pair = pair(RemapPolicy::Pinned, MrMode::empty());
    let len = (3 << 20) + 12_345;
    let target = Buffer::new(len);
    let region =
        RegAttr::key(1).register(&*pair.there.domain, &[host(target.range(), false)]).unwrap();
    let source = Buffer::counting(len - 7);
    pair.here.write(pair.to, &[source.whole()], &remote(region, len as u64), 3).unwrap();
    let back = Buffer::new(len - 7);
    pair.here.read(pair.to, &[back.whole()], &remote(region, len as u64), 3).unwrap();
    assert!(target.bytes()[3..len - 4] == source.bytes()[..] && back.bytes() == source.bytes());
    Ok(())
}

fn pinned_region_needs_pages_and_unpins_them_at_close() -> Outcome {
    skip(without_pinned_pages())?;
    let provider = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let pages = Pages::new(3);
    pages.punch(1);
    refused(
        RegAttr::key(1).register(&*domain, &[host(pages.range(), false)]),
        ErrorKind::BadAddress,
    );
    assert_eq!(domain.live().regions, 0);
    let buffer = Buffer::new(100);
    let region = RegAttr::key(1).register(&*domain, &[host(buffer.range(), false)]).unwrap();
    domain.deregister(region).unwrap();
    assert_eq!(domain.live().bytes, 0);
    Ok(())
}

fn allocated_mode_takes_read_only_pages_that_nobody_writes() {
    let domain = domain(&Loopback::builder().build().unwrap(), MrMode::ALLOCATED);
    let pages = Pages::new(3);
    pages.protect(1, MprotectFlags::READ);
    let reads = RegAttr::key(1).access(Access::REMOTE_READ | Access::SEND);
    reads.register(&*domain, &[host(pages.range(), false)]).unwrap();
}

/// A sub-region can use pages that the application announced for its base, before or after it
/// registered the sub-region.
fn sub_region_allows_only_announced_pages_of_its_base() {
    for memory in policies() {
        for vectored in [false, true] {
            let pair = pair(memory, MrMode::MMU_NOTIFY);
            let pages = Pages::new(4);
            pages.set(page_size(), 1);
            let page = |n: usize| {
                pages.range().slice((n * page_size()) as u64, page_size() as u64).unwrap()
            };
            let halves = [0, 2].map(|first| {
                let start = (first * page_size()) as u64;
                host(pages.range().slice(start, 2 * page_size() as u64).unwrap(), false)
            });
            let whole = [host(pages.range(), false)];
            let pieces = if vectored { &halves[..] } else { &whole[..] };
            let there = &*pair.there.domain;
            let base = RegAttr::key(1).register(there, pieces).unwrap();
            let (start, len) = (page_size() as u64, 3 * page_size() as u64);
            let sub = there
                .sub_regions()
                .unwrap()
                .register_sub(base, &RegAttr::key(2).request(), start, len)
                .unwrap();
            let nested = there
                .sub_regions()
                .unwrap()
                .register_sub(sub, &RegAttr::key(3).request(), 0, len)
                .unwrap();
            let here = Buffer::filled(16, 5);
            for region in [sub, nested] {
                let key = remote(region, len);
                let write = |at: usize| pair.here.write(pair.to, &[here.whole()], &key, at as u64);
                write(0).unwrap();
                refused(write(2 * page_size()), ErrorKind::BadAddress);
                refused(write(page_size() - 8), ErrorKind::BadAddress);
            }
            there.refresh().unwrap().refresh_pages(base, &[page(3)]).unwrap();
            for region in [sub, nested] {
                let key = remote(region, len);
                let write = |at: usize| pair.here.write(pair.to, &[here.whole()], &key, at as u64);
                write(2 * page_size()).unwrap();
                refused(write(page_size()), ErrorKind::BadAddress);
            }
            assert_eq!((pages.get(page_size()), pages.get(3 * page_size())), (5, 5));
            assert_eq!(pages.get(2 * page_size() - 8), 0, "a refused write moved bytes");
        }
    }
}

fn mmu_notify_applies_to_each_range_of_a_region() {
    for memory in policies() {
        for addressing in [Addressing::ZeroBased, Addressing::Virtual] {
            let pair = pair(memory, MrMode::MMU_NOTIFY);
            let ranges = [Pages::new(2), Pages::new(2)];
            ranges[0].set(page_size(), 1);
            let pieces: Vec<_> = ranges.iter().map(|pages| host(pages.range(), false)).collect();
            let attr = RegAttr { addressing, ..RegAttr::key(1) };
            let region = attr.register(&*pair.there.domain, &pieces).unwrap();
            let len = 4 * page_size() as u64;
            // Returns the remote address of a page. The page numbers continue from the first range
            // to the second.
            let place = |page: usize| match addressing {
                Addressing::ZeroBased => (page * page_size()) as u64,
                Addressing::Virtual => {
                    ranges[page / 2].range().start().0 + (page % 2 * page_size()) as u64
                }
            };
            let key = RemoteKey::new(addressing, Iova(place(0)), len, region.key);
            let here = Buffer::filled(16, 5);
            let write = |at: u64| pair.here.write(pair.to, &[here.whole()], &key, at);
            write(place(1)).unwrap();
            refused(write(place(0)), ErrorKind::BadAddress);
            refused(write(place(2)), ErrorKind::BadAddress);
            let first_of_second = ranges[1].range().slice(0, page_size() as u64).unwrap();
            if addressing == Addressing::ZeroBased {
                let across_the_seam = place(2) - 8;
                refused(write(across_the_seam), ErrorKind::BadAddress);
                assert_eq!(ranges[0].get(2 * page_size() - 8), 0, "a refused write moved bytes");
                pair.there
                    .domain
                    .refresh()
                    .unwrap()
                    .refresh_pages(region, &[first_of_second])
                    .unwrap();
                write(across_the_seam).unwrap();
                assert_eq!((ranges[0].get(2 * page_size() - 8), ranges[1].get(7)), (5, 5));
            } else {
                pair.there
                    .domain
                    .refresh()
                    .unwrap()
                    .refresh_pages(region, &[first_of_second])
                    .unwrap();
            }
            write(place(2)).unwrap();
            refused(write(place(0)), ErrorKind::BadAddress);
            refused(write(place(3)), ErrorKind::BadAddress);
        }
    }
}

/// A refresh of a region or its sub-region waits for a transfer in flight through either of them.
fn refresh_waits_for_a_transfer_in_flight() {
    for (transferred, refreshed) in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 2), (3, 2)] {
        let faults = Faults::new();
        let provider = Loopback::builder().faults(&faults).build().unwrap();
        let pair = Pair::new(provider, MrMode::MMU_NOTIFY);
        let (target, source) = (Buffer::new(64), Buffer::filled(64, 3));
        target.fill(0);
        let there = &pair.there.domain;
        let region = RegAttr::key(1).register(&**there, &[host(target.range(), false)]).unwrap();
        let part = |base, key| {
            let parts = there.sub_regions().unwrap();
            parts.register_sub(base, &RegAttr::key(key).request(), 0, 64).unwrap()
        };
        let sub = part(region, 2);
        let regions = [region, sub, part(sub, 3), part(region, 4)];
        let key = remote(regions[transferred], 64);
        std::thread::scope(|scope| {
            let gate = faults.hold(NicCall::Transfer);
            let writing = scope.spawn(|| pair.here.write(pair.to, &[source.whole()], &key, 0));
            gate.wait_held();
            let refreshing = scope.spawn(|| {
                there.refresh().unwrap().refresh_pages(regions[refreshed], &[]).unwrap();
                target.bytes()
            });
            let late = End::open(&pair.here.domain);
            let to = late.peer(&pair.there);
            // Peers' accesses fail from the time that the refresh begins.
            while late.write(to, &[source.segment(0, 0, None)], &key, 0).is_ok() {
                assert!(!refreshing.is_finished(), "refreshed in the middle of a transfer");
                std::thread::yield_now();
            }
            // A refresh that does not wait would return during this loop.
            for _ in 0..1000 {
                std::thread::yield_now();
            }
            assert!(!refreshing.is_finished(), "refreshed in the middle of a transfer");
            gate.release();
            assert_eq!(writing.join().unwrap().unwrap(), 64);
            assert_eq!(refreshing.join().unwrap(), [3; 64], "the refresh did not wait");
        });
    }
}

fn imported_file_is_accessed_at_exactly_its_bytes() {
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::SHRINK | SealFlags::GROW] {
        let pair = pair(RemapPolicy::Follow, MrMode::empty());
        let fd = memfd(3 * page_size() as u64, seals);
        let (offset, len) = (page_size() as u64 + 123, page_size() as u64 + 904);
        let region =
            RegAttr::key(1).register(&*pair.there.domain, &[file(&fd, offset, len)]).unwrap();
        let key = remote(region, len);
        let source = Buffer::counting(len as usize);
        pair.here.write(pair.to, &[source.whole()], &key, 0).unwrap();
        assert_eq!(file_bytes(&fd, offset, len as usize), source.bytes());
        assert_eq!(file_bytes(&fd, offset - 1, 1), [0]);
        assert_eq!(file_bytes(&fd, offset + len, 1), [0]);
        let kept = fd.try_clone().unwrap();
        drop(fd);
        let back = Buffer::new(100);
        pair.here.read(pair.to, &[back.whole()], &key, 1000).unwrap();
        assert_eq!(back.bytes(), source.bytes()[1000..1100]);
        let old = pair.here.fetch(pair.to, AtomicOp::Sum, 3, None, &key, 5).unwrap();
        assert_eq!(old, source.u64_at(5));
        assert_eq!(file_bytes(&kept, offset + 5, 8), (old + 3).to_le_bytes());
        refused(
            pair.here.fetch(pair.to, AtomicOp::Sum, 3, None, &key, 6),
            ErrorKind::InvalidArgument,
        );
    }
}

fn file_that_shrinks_fails_the_transfer() {
    let pair = pair(RemapPolicy::Follow, MrMode::empty());
    let fd = memfd(2 * page_size() as u64, SealFlags::empty());
    let region = RegAttr::key(1)
        .register(&*pair.there.domain, &[file(&fd, 0, 2 * page_size() as u64)])
        .unwrap();
    let key = remote(region, 2 * page_size() as u64);
    rustix::fs::ftruncate(&fd, page_size() as u64).unwrap();
    let here = Buffer::filled(16, 1);
    refused(
        pair.here.write(pair.to, &[here.whole()], &key, page_size() as u64 - 8),
        ErrorKind::BadAddress,
    );
    refused(
        pair.here.read(pair.to, &[here.whole()], &key, page_size() as u64),
        ErrorKind::BadAddress,
    );
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, page_size() as i64);
    pair.here.write(pair.to, &[here.whole()], &key, 0).unwrap();
}

fn refused_file_import_names_the_reason() {
    let domain = domain(&Loopback::builder().build().unwrap(), MrMode::empty());
    let fd = memfd(page_size() as u64, SealFlags::SHRINK);
    let all = RegAttr::key(1);
    refused(all.register(&*domain, &[file(&fd, 1, page_size() as u64)]), ErrorKind::OutOfBounds);
    refused(all.register(&*domain, &[file(&fd, u64::MAX, 2)]), ErrorKind::OutOfBounds);
    let sealed = memfd(page_size() as u64, SealFlags::SHRINK | SealFlags::WRITE);
    refused(all.register(&*domain, &[file(&sealed, 0, 10)]), ErrorKind::AccessDenied);
    let region = RegAttr::key(1)
        .access(Access::REMOTE_READ)
        .register(&*domain, &[file(&sealed, 0, 10)])
        .unwrap();
    refused(
        domain.sub_regions().unwrap().register_sub(region, &RegAttr::key(2).request(), 0, 5),
        ErrorKind::AccessDenied,
    );
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    refused(all.register(&*domain, &[file(&pipe, 0, 10)]), ErrorKind::InvalidArgument);
    assert_eq!(domain.live().regions, 1);
}

fn file_import_needs_a_readable_fd_without_append() {
    let pair = pair(RemapPolicy::Follow, MrMode::empty());
    let domain = &*pair.there.domain;
    let fd = memfd(page_size() as u64, SealFlags::empty());
    let reopened = |flags| {
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty()).unwrap()
    };
    let all = RegAttr::key(1);
    let appending = reopened(OFlags::RDWR | OFlags::APPEND);
    let refusal = all.register(domain, &[file(&appending, 0, 64)]).unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::InvalidArgument, "{refusal}");
    assert!(refusal.to_string().contains("without O_APPEND"), "{refusal}");
    let (read_only, write_only) = (reopened(OFlags::RDONLY), reopened(OFlags::WRONLY));
    refused(all.register(domain, &[file(&read_only, 0, 64)]), ErrorKind::AccessDenied);
    refused(
        RegAttr::key(1).access(Access::REMOTE_READ).register(domain, &[file(&write_only, 0, 64)]),
        ErrorKind::AccessDenied,
    );
    let region = RegAttr::key(1)
        .access(Access::REMOTE_READ)
        .register(domain, &[file(&read_only, 0, 64)])
        .unwrap();
    refused(
        domain.sub_regions().unwrap().register_sub(region, &RegAttr::key(2).request(), 0, 8),
        ErrorKind::AccessDenied,
    );
    domain.deregister(region).unwrap();
    // The application sets O_APPEND after the registration, through its own fd.
    let region = all.register(domain, &[file(&fd, 0, 64)]).unwrap();
    let source = Buffer::filled(8, 7);
    pair.here.write(pair.to, &[source.whole()], &remote(region, 64), 8).unwrap();
    rustix::fs::fcntl_setfl(&fd, OFlags::APPEND).unwrap();
    let late = pair.here.write(pair.to, &[source.whole()], &remote(region, 64), 0);
    refused(late, ErrorKind::InvalidArgument);
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, page_size() as i64, "a write was appended");
    assert_eq!(file_bytes(&fd, 0, 16), [[0; 8], [7; 8]].concat());
}

/// A simulated device for staged copies. The vector is its memory.
#[derive(Debug)]
struct Device(Mutex<Vec<u8>>);

impl Copies for Device {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let bytes = self.0.lock().unwrap();
        let offset = offset as usize;
        into.copy_from_slice(
            bytes
                .get(offset..offset + into.len())
                .ok_or_else(|| Error::new(ErrorKind::OutOfBounds, "staged"))?,
        );
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let offset = offset as usize;
        self.0.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }
}

fn staged_memory_is_copied_in_chunks_and_refuses_atomics() {
    let pair = pair(RemapPolicy::Follow, MrMode::empty());
    let len = (1 << 20) + 77;
    let range = AddressRange::new(Address(0x10_0000_0000), len as u64).unwrap();
    let device = Arc::new(CopiedDevice { range, copies: Device(Mutex::new(vec![0; len])) });
    let iface = Arc::clone(&device) as Arc<dyn Iface>;
    let piece = Piece { range, backing: Backing::Staged { iface: &iface } };
    let region = RegAttr::key(1).register(&*pair.there.domain, &[piece]).unwrap();
    let source = Buffer::counting(len - 1);
    let key = remote(region, len as u64);
    pair.here.write(pair.to, &[source.whole()], &key, 1).unwrap();
    assert!(device.copies.0.lock().unwrap()[1..] == source.bytes()[..]);
    let back = Buffer::new(len - 1);
    pair.here.read(pair.to, &[back.whole()], &key, 1).unwrap();
    assert!(back.bytes() == source.bytes());
    let refusal = pair.here.fetch(pair.to, AtomicOp::Sum, 1, None, &key, 0).unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::Unsupported);
    assert!(refusal.to_string().contains("the region is staged"), "{refusal}");
    let sub = pair
        .there
        .domain
        .sub_regions()
        .unwrap()
        .register_sub(region, &RegAttr::key(2).request(), 1000, 10)
        .unwrap();
    pair.here.write(pair.to, &[source.segment(0, 10, None)], &remote(sub, 10), 0).unwrap();
    assert_eq!(device.copies.0.lock().unwrap()[1000..1010], source.bytes()[..10]);
}

fn atomics_through_different_mappings_are_atomic_together() {
    let pair = pair(RemapPolicy::Follow, MrMode::empty());
    let target = Buffer::new(64);
    let keys: Vec<_> = [true, false]
        .iter()
        .enumerate()
        .map(|(n, owned)| {
            RegAttr::key(n as u64)
                .register(&*pair.there.domain, &[host(target.range(), *owned)])
                .unwrap()
        })
        .map(|region| remote(region, 64))
        .collect();
    let rounds = 300;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let end = End::open(&pair.here.domain);
            let (there, keys) = (&pair.there, &keys);
            scope.spawn(move || {
                let to = end.peer(there);
                for round in 0..rounds {
                    end.fetch(to, AtomicOp::Sum, 1, None, &keys[(round + thread) % 2], 8).unwrap();
                }
            });
        }
    });
    assert_eq!(target.u64_at(8), 4 * rounds as u64);
}

fn atomic_across_two_pieces_is_refused() {
    for owned in [true, false] {
        let pair = pair(RemapPolicy::Follow, MrMode::empty());
        let targets = [Buffer::counting(64), Buffer::counting(64)];
        let before = targets.each_ref().map(Buffer::bytes);
        // Both pieces start at addresses that are multiples of 8. The second piece starts in the
        // middle of an element.
        let pieces = targets
            .each_ref()
            .map(|target| host(target.range().slice(0, 12).expect("a part"), owned));
        let region = RegAttr::key(1).register(&*pair.there.domain, &pieces).unwrap();
        let key = remote(region, 24);
        let operands = Buffer::filled(16, 1);
        let add = |at: u64, len: usize, datatype: AtomicType| {
            let operation = Operation::Atomic {
                op: AtomicOp::Sum,
                datatype,
                remote: RemoteSegment { address: Iova(at), len: len as u64, key: &key },
                result: None,
                compare: None,
            };
            pair.here.run(operation, &[operands.segment(0, len, None)], pair.to)
        };
        refused(add(8, 8, AtomicType::U64), ErrorKind::InvalidArgument);
        refused(add(0, 16, AtomicType::U64), ErrorKind::InvalidArgument);
        assert_eq!(
            targets.each_ref().map(Buffer::bytes),
            before,
            "a refused atomic changed memory"
        );
        // These elements end or begin at the boundary of the pieces, and do not cross it.
        add(8, 8, AtomicType::U32).unwrap();
        assert_eq!(targets[0].bytes()[8..12], [9, 10, 11, 12]);
        assert_eq!(targets[1].bytes()[..4], [1, 2, 3, 4]);
        for (target, before) in targets.iter().zip(&before) {
            assert_eq!(target.bytes()[12..], before[12..], "bytes outside the pieces changed");
        }
    }
}
