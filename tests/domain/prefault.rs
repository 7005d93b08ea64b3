//! Tests of touching the pages of memory before its registration (MR-16).

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex},
    thread,
    time::Duration,
};

use crate::link;
use hmem::{MrFlags, Prefault, fabric::MrAttr, prefault};
use hmem_conformance::link::{HostPages, REMOTE, mr_attr};
use rustix::{
    param::page_size,
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

/// Returns the number of pages of `pages` that are resident.
fn present(pages: &HostPages) -> usize {
    let (page, range) = (page_size(), pages.range());
    let (start, len) = (range.start().0 / page as u64, range.len() as usize / page);
    let mut entries = vec![0u8; len * 8];
    fs::File::open("/proc/self/pagemap")
        .and_then(|map| map.read_exact_at(&mut entries, start * 8))
        .expect("pagemap");
    entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count()
}

/// MR-16
#[test]
fn huge_range_is_prefaulted_in_parallel_and_reports_progress() {
    const LEN: usize = 96 << 20;
    let pages = HostPages::new(LEN);
    assert_eq!(present(&pages), 0);
    let (seen, arrived) = (Mutex::new((BTreeSet::new(), Vec::new())), Condvar::new());
    // Each chunk waits until two threads have reported. A single thread would time out.
    let progress = |done: u64, all: u64| {
        let mut seen = seen.lock().expect("not poisoned");
        seen.0.insert(format!("{:?}", thread::current().id()));
        seen.1.push((done, all));
        arrived.notify_all();
        let waited =
            arrived.wait_timeout_while(seen, Duration::from_secs(60), |seen| seen.0.len() < 2);
        assert!(!waited.expect("not poisoned").1.timed_out(), "one thread touches all pages");
    };
    prefault(pages.range(), true, &Prefault { threads: 2, progress: Some(&progress) })
        .expect("prefault");
    let (_, mut reports) = seen.into_inner().expect("not poisoned");
    reports.sort_unstable();
    assert_eq!(reports.last(), Some(&(LEN as u64, LEN as u64)));
    assert!(reports.windows(2).all(|pair| pair[0].0 < pair[1].0), "progress goes up: {reports:?}");
    assert_eq!(present(&pages), LEN / page_size());
}

/// MR-16
#[test]
fn registering_prefaults_on_request_and_reports_progress() {
    let link = link::plain();
    let memory = link.bytes(1 << 20);
    let ranges = [memory.range()];
    let reports = Mutex::new(Vec::new());
    let progress = |done: u64, all: u64| reports.lock().expect("not poisoned").push((done, all));
    let attr = mr_attr(&ranges, REMOTE);
    let untouched = link.try_expose(&attr, MrFlags::empty()).expect("register");
    assert_eq!(present(memory.pages()), 0, "nobody asked for pages");
    let prefault = Some(Prefault { threads: 0, progress: Some(&progress) });
    let touched =
        link.try_expose(&MrAttr { prefault, ..attr }, MrFlags::empty()).expect("register");
    assert_eq!(present(memory.pages()), (1 << 20) / page_size());
    assert_eq!(reports.lock().expect("not poisoned").last(), Some(&(1 << 20, 1 << 20)));
    drop((untouched, touched));
    memory.pages().remove_pages(0, memory.range().len());
    let before = link.live();
    link.try_expose(&MrAttr { prefault, ..attr }, MrFlags::empty())
        .expect_err("pages that cannot be allocated");
    assert_eq!(link.live(), before);
}

/// MR-16
///
/// The child has a limit of no further process, which binds every user but root.
#[test]
fn prefault_succeeds_if_no_further_thread_can_start() {
    let pages = HostPages::new(64 << 20);
    // SAFETY: the child only populates its copy of the pages, and exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork");
    if pid == 0 {
        let populated = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the calls only set a timer, which kills the child in case of a deadlock, and
            // change the user of the child.
            let is_user = unsafe {
                libc::alarm(60);
                libc::geteuid() != 0 || libc::setresuid(65534, 65534, 65534) == 0
            };
            let limit = Rlimit { current: Some(0), ..getrlimit(Resource::Nproc) };
            setrlimit(Resource::Nproc, limit).expect("a lower limit");
            assert!(is_user && thread::Builder::new().spawn(|| ()).is_err(), "no limit");
            prefault(pages.range(), true, &Prefault { threads: 2, progress: None }).is_ok()
        }));
        // SAFETY: the call ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!populated.is_ok_and(|populated| populated))) };
    }
    let mut status = -1;
    // SAFETY: the call waits for the new child, and writes only `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
}
