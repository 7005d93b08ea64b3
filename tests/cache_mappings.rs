//! Tests that a cache with default settings leaves the application enough memory mappings.
//!
//! Each test runs in a process of its own, because mappings and their limit belong to the process.

mod child;
mod machine;
mod trials;

use std::{fs, ptr};

use hmem::{
    Access, Address, AddressRange, CacheAttr, Domain, DomainAttr, Hmem, IfaceKind, MrMode, Promise,
    Raw,
    cache::CacheStatistics,
    loopback::{Loopback, RemapPolicy},
    system::monitor::HostMonitorKind,
};
use rustix::param::page_size;
use trials::{Outcome, skip, trials};

trials! {
    /// MON-10
    cached_pages_leave_the_application_its_mappings,
    /// MON-10
    cached_pages_under_userfaultfd_leave_mappings_free,
    /// MON-10
    slow_million_cached_pages_leave_mappings_free,
    /// MON-10
    slow_million_pages_under_userfaultfd_leave_mappings_free,
}

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Number of pages that each test registers, except for the tests that are slow. A monitor that did
/// not limit its mappings would need more of them for these pages than a process may have.
const PAGES: usize = 40_000;

/// Returns the number of pages registered from one mapping, before the test maps another one. These
/// pages take 256 MiB.
fn block() -> usize {
    (256 << 20) / page_size()
}

fn map(pages: usize, sharing: i32) -> *mut libc::c_void {
    let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the kernel chooses the address, so the mapping replaces nothing.
    let at = unsafe { libc::mmap(ptr::null_mut(), pages * page_size(), protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    at
}

fn unmap(at: *mut libc::c_void, pages: usize) {
    // SAFETY: the test's own mapping, and nothing refers into it.
    assert_eq!(unsafe { libc::munmap(at, pages * page_size()) }, 0);
}

/// Returns the maximum number of mappings of a process (`vm.max_map_count`).
fn limit() -> usize {
    let limit = fs::read_to_string("/proc/sys/vm/max_map_count").expect("/proc");
    limit.trim().parse().expect("a number")
}

fn mappings() -> usize {
    fs::read_to_string("/proc/self/maps").expect("/proc").lines().count()
}

/// Creates the application's own mappings: all but 5,530 of those that the kernel allows.
fn take_mappings() {
    let own = limit() - 5_530;
    let at = map(own, libc::MAP_PRIVATE);
    for page in (0..own).step_by(2) {
        let at = at.wrapping_byte_add(page * page_size());
        // SAFETY: the test's own pages.
        assert_eq!(unsafe { libc::mprotect(at, page_size(), libc::PROT_READ) }, 0);
    }
    assert!(mappings() >= own, "{} mappings", mappings());
}

/// Registers and releases separate pages in a cache with default settings, while the application
/// maps and unmaps memory.
fn pass(hmem: &Hmem, pages: usize) -> (Domain, CacheStatistics, Option<String>) {
    let domain = {
        let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
        let cache = Some(CacheAttr::default());
        hmem.domain("loopback", DomainAttr { cache, ..attr }).expect("a domain")
    };
    take_mappings();
    let cache = domain.cache().expect("a cache");
    let (mut left, mut uncached) = (pages, None);
    while left > 0 {
        let now = left.min(block());
        let block = map(2 * now, libc::MAP_PRIVATE);
        for index in 0..now {
            let at = block.wrapping_byte_add(2 * index * page_size());
            let range =
                AddressRange::new(Address::of_ptr(at), page_size() as u64).expect("no wrap");
            // SAFETY: the page is unmapped without a lease left, and the cache is notified.
            let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
            let region = cache.get(memory, REMOTE);
            let region = region.unwrap_or_else(|error| panic!("page {index}: {error}"));
            let reason = region.lease().uncached_reason();
            uncached = uncached.or_else(|| reason.map(|reason| format!("page {index}: {reason}")));
            drop(region);
            if index % 500 == 0 {
                // The kernel never merges a shared anonymous mapping with another mapping.
                unmap(map(1, libc::MAP_SHARED), 1);
            }
        }
        assert!(mappings() < limit(), "{} mappings", mappings());
        left -= now;
        if left > 0 {
            unmap(block, 2 * now);
        }
    }
    let statistics = cache.statistics();
    assert_eq!(statistics.registrations + statistics.uncached, pages as u64, "{statistics:?}");
    assert_eq!(statistics.failures, 0);
    (domain, statistics, uncached)
}

fn hmem(kind: Option<HostMonitorKind>) -> Hmem {
    let loopback =
        Loopback::builder().remap_policy(RemapPolicy::Follow).build().expect("a software NIC");
    let builder = Hmem::builder().without_vendor_ifaces().provider(loopback);
    match kind {
        Some(kind) => builder.cache_monitor(kind),
        None => builder,
    }
    .build()
    .expect("the ifaces start")
}

fn with_defaults(pages: usize) {
    let hmem = hmem(None);
    assert_eq!(hmem.cache_monitor().expect("a monitor").choice().name, "memhooks+userfaultfd");
    let limits = &hmem.cache_monitor().expect("a monitor").choice().limits;
    assert!(limits.contains(&format!("vm.max_map_count = {}", limit())), "{limits}");
    let (domain, statistics, uncached) = pass(&hmem, pages);
    assert_eq!(statistics.uncached, 0, "memhooks watch what userfaultfd does not: {uncached:?}");
    let why = domain.cache().expect("a cache").monitor(IfaceKind::SYSTEM).expect("one").rationale;
    assert!(why.contains("the hooks alone watch"), "{why}");
}

fn with_userfaultfd_alone(pages: usize) {
    let (domain, statistics, _) = pass(&hmem(Some(HostMonitorKind::UserFaultFd)), pages);
    assert!(statistics.registrations > pages as u64 / 2, "{statistics:?}");
    let why = domain.cache().expect("a cache").monitor(IfaceKind::SYSTEM).expect("one").rationale;
    assert!(why.contains("refused so far"), "{why}");
}

fn cached_pages_leave_the_application_its_mappings() -> Outcome {
    skip(machine::without_userfaultfd())?;
    if child::alone("cached_pages_leave_the_application_its_mappings", &[]) {
        with_defaults(PAGES);
    }
    Ok(())
}

fn cached_pages_under_userfaultfd_leave_mappings_free() -> Outcome {
    skip(machine::without_userfaultfd())?;
    if child::alone("cached_pages_under_userfaultfd_leave_mappings_free", &[]) {
        with_userfaultfd_alone(PAGES);
    }
    Ok(())
}

fn slow_million_cached_pages_leave_mappings_free() -> Outcome {
    skip(machine::without_userfaultfd())?;
    if child::alone("slow_million_cached_pages_leave_mappings_free", &[]) {
        with_defaults(1_000_000);
    }
    Ok(())
}

fn slow_million_pages_under_userfaultfd_leave_mappings_free() -> Outcome {
    skip(machine::without_userfaultfd())?;
    if child::alone("slow_million_pages_under_userfaultfd_leave_mappings_free", &[]) {
        with_userfaultfd_alone(1_000_000);
    }
    Ok(())
}
