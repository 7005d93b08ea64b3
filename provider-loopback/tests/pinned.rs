//! Tests of pinned pages that count what the whole process pins, or break one of its io_urings.
//! Each runs alone.

mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    fs,
    os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use hmem_core::{ErrorKind, MrMode};
use hmem_provider_loopback::{Loopback, RemapPolicy};
use support::*;
use trials::{Outcome, Skipped, skip, trials};

trials! {
    request_left_in_the_ring_never_runs,
    /// CACHE-13
    forked_child_unpins_nothing_of_its_parent,
    /// MR-05
    more_regions_than_the_buffer_table_of_one_io_uring_are_pinned,
}

/// A lock that a test holds while no other test may pin pages or open io_urings.
static ALONE: Mutex<()> = Mutex::new(());

/// A guard that makes an io_uring's fd refer to `/dev/null`. Dropping the guard restores the fd.
struct BrokenFd {
    ring: RawFd,
    kept: OwnedFd,
}

impl BrokenFd {
    fn new(ring: RawFd) -> Self {
        // SAFETY: the domain that the test keeps open owns the fd.
        let kept = unsafe { BorrowedFd::borrow_raw(ring) }.try_clone_to_owned().unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        replace(ring, &null.into());
        Self { ring, kept }
    }
}

impl Drop for BrokenFd {
    fn drop(&mut self) {
        replace(self.ring, &self.kept);
    }
}

/// Makes an fd of an io_uring refer to another file.
fn replace(ring: RawFd, by: &OwnedFd) {
    use std::os::fd::FromRawFd;
    // SAFETY: the fd stays open, and goes back to its owner, which only sees its next call fail.
    let mut ring = unsafe { OwnedFd::from_raw_fd(ring) };
    let replaced = rustix::io::dup2(by, &mut ring);
    let _ = ring.into_raw_fd();
    replaced.unwrap();
}

/// Returns the fds of the process's io_urings.
fn io_urings() -> Vec<RawFd> {
    let entries = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap());
    let is_ring = |path| fs::read_link(path).is_ok_and(|to| to.ends_with("anon_inode:[io_uring]"));
    let rings = entries.filter(|entry| is_ring(entry.path()));
    rings.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// Returns the line of `/proc/self/status` with the size of the pinned pages.
fn pinned_size() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find(|line| line.starts_with("VmPin:")).unwrap().to_owned()
}

fn request_left_in_the_ring_never_runs() -> Outcome {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    skip(without_pinned_pages())?;
    let provider = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let here = End::open(&domain(&provider, MrMode::empty()));
    let others = io_urings();
    let there = End::open(&domain(&provider, MrMode::empty()));
    let ring = io_urings().into_iter().find(|ring| !others.contains(ring)).expect("an io_uring");
    let to = here.peer(&there);
    let (unpinned, memory) = (pinned_size(), Buffer::filled(200, 7));
    let register =
        |key| RegAttr::key(key).register(&*there.domain, &[host(memory.range(), false)]).unwrap();
    let read = |region, at| {
        let back = Buffer::new(16);
        here.read(to, &[back.whole()], &remote(region, 200), at).map(|_| back.bytes())
    };
    let region = register(1);
    assert_eq!(read(region, 0).unwrap(), [7; 16]);
    {
        let _broken = BrokenFd::new(ring);
        let source = Buffer::filled(8, 9);
        here.write(to, &[source.whole()], &remote(region, 200), 0).unwrap_err();
    }
    refused(read(region, 100), ErrorKind::BadState);
    assert_eq!(memory.bytes(), [7; 200], "the refused request ran later");
    // Later regions use another io_uring.
    let again = register(2);
    assert_eq!(read(again, 0).unwrap(), [7; 16]);
    assert_eq!(io_urings().len(), others.len() + 2);
    assert_ne!(pinned_size(), unpinned);
    [region, again].into_iter().for_each(|region| there.domain.deregister(region).unwrap());
    // Some kernels unpin the pages a moment later.
    let deadline = Instant::now() + Duration::from_secs(60);
    while pinned_size() != unpinned {
        assert!(Instant::now() < deadline, "a buffer of the broken io_uring stays pinned");
        std::thread::yield_now();
    }
    Ok(())
}

fn forked_child_unpins_nothing_of_its_parent() -> Outcome {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    skip(without_pinned_pages())?;
    let provider = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let buffer = Buffer::filled(16, 7);
    let region = RegAttr::key(1).register(&*domain, &[host(buffer.range(), false)]).unwrap();
    let pinned = pinned_size();
    // SAFETY: the child only drops its copies of the handles and exits by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the child drops its copies once, and exits without using the original handles.
        drop(unsafe { (std::ptr::read(&raw const domain), std::ptr::read(&raw const provider)) });
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `child` is the process that was just forked.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!((status, pinned_size()), (0, pinned));
    let (end, back) = (End::open(&domain), Buffer::new(16));
    end.read(end.peer(&end), &[back.whole()], &remote(region, 16), 0).unwrap();
    assert_eq!(back.bytes(), [7; 16]);
    Ok(())
}

fn more_regions_than_the_buffer_table_of_one_io_uring_are_pinned() -> Outcome {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    skip(without_pinned_pages())?;
    let provider = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let domain = domain(&provider, MrMode::empty());
    let buffer = Buffer::new(100);
    let mut regions = Vec::new();
    for key in 0..5000 {
        match RegAttr::key(key).register(&*domain, &[host(buffer.range(), false)]) {
            Ok(region) => regions.push(region),
            Err(error) if error.to_string().contains("RLIMIT_MEMLOCK") => {
                regions.into_iter().for_each(|region| domain.deregister(region).unwrap());
                return Err(Skipped(format!("this user may not lock 5,000 pages: {error}")));
            }
            Err(error) => panic!("{error}"),
        }
    }
    regions.into_iter().for_each(|region| domain.deregister(region).unwrap());
    assert_eq!(domain.live().bytes, 0);
    Ok(())
}
