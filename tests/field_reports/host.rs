//! Reports about host memory and the limits of a NIC.

use std::ptr;

use hmem::{
    Access, Address, AddressRange, CacheAttr, DomainAttr, ErrorKind, Hmem, Promise, Raw,
    loopback::{Builder, Loopback},
};

use crate::wire::{REMOTE, Wire, pattern};

fn wire(nic: Builder, cache: Option<CacheAttr>) -> Wire {
    let nic = nic.build().expect("a software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().build().expect("the ifaces start");
    let attr = DomainAttr { cache, ..DomainAttr::default() };
    Wire::open(hmem.domain_on(&nic, attr).expect("a domain"))
}

/// A page that the process may only read. Its bytes are 7.
struct ReadOnlyPage(*mut libc::c_void, usize);

impl ReadOnlyPage {
    fn new() -> Self {
        let (page, anonymous) =
            (rustix::param::page_size(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new page of the test's own.
        unsafe {
            let at = libc::mmap(ptr::null_mut(), page, writable, anonymous, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            ptr::write_bytes(at.cast::<u8>(), 7, page);
            assert_eq!(libc::mprotect(at, page, libc::PROT_READ), 0);
            Self(at, page)
        }
    }

    fn range(&self) -> AddressRange {
        AddressRange::new(Address::of_ptr(self.0.cast::<u8>()), self.1 as u64).expect("a range")
    }
}

impl Drop for ReadOnlyPage {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the page, and its regions are closed.
        assert_eq!(unsafe { libc::munmap(self.0, self.1) }, 0);
    }
}

/// REL-06, VRB-03, CACHE-02
///
/// The page is mapped without write access.
#[test]
fn libfabric_6467_read_only_memory_is_registered_with_the_right_to_read_alone() {
    let wire = wire(Loopback::builder(), Some(CacheAttr::default()));
    let page = ReadOnlyPage::new();
    // SAFETY: the page outlives the regions, and nobody writes to it.
    let memory = || unsafe { Raw::new(page.range(), Promise::ReadOnly) };
    let region = wire.domain.register(memory(), Access::REMOTE_READ).expect("registered");
    let key = region.key().expect("a key");
    assert_eq!(wire.get(&key, 0, 64).expect("read"), [7; 64]);
    let refused = wire.put(&key, 0, &[9]).expect_err("peers may only read");
    assert_eq!(refused.kind(), ErrorKind::AccessDenied, "{refused}");
    region.close().expect("close");

    let cache = wire.domain.cache().expect("a cache");
    let cached = cache.get(memory(), Access::REMOTE_READ).expect("registered");
    assert_eq!(wire.get(&cached.key().expect("a key"), 1, 8).expect("read"), [7; 8]);
    drop(cached);
    cache.evict_idle();

    let error = wire.domain.register(memory(), REMOTE).expect_err("only promised for reading");
    assert_eq!(error.error.kind(), ErrorKind::AccessDenied, "{}", error.error);
}

/// REL-06, MR-05
///
/// The cache holds a registration of the same bytes while the application closes its own.
#[test]
fn libfabric_11112_key_of_a_closed_region_is_dead_although_the_bytes_stay_cached() {
    let wire = wire(Loopback::builder(), Some(CacheAttr::default()));
    let bytes = pattern(4, 8192);
    // SAFETY: the bytes outlive the regions, and nobody else uses them.
    let memory = || unsafe { Raw::new(AddressRange::of(&bytes), Promise::ReadOnly) };
    let cache = wire.domain.cache().expect("a cache");
    let cached = cache.get(memory(), Access::REMOTE_READ).expect("registered");
    let region = wire.domain.register(memory(), Access::REMOTE_READ).expect("registered");
    let (own, of_the_cache) = (region.key().expect("a key"), cached.key().expect("a key"));
    assert_eq!(wire.get(&own, 0, 8192).expect("read"), bytes);
    region.close().expect("close");
    let error = wire.get(&own, 0, 1).expect_err("the key is dead");
    assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
    assert_eq!(wire.get(&of_the_cache, 0, 8192).expect("read"), bytes);
    drop(cached);
    cache.evict_idle();
    wire.get(&of_the_cache, 0, 1).expect_err("evicted");
}

/// REL-06, DIAG-03
///
/// The NIC has a limit for the bytes of all regions.
#[test]
fn libfabric_9739_exhausted_nic_is_reported_with_the_limits_to_look_at() {
    let wire = wire(Loopback::builder().max_pinned_bytes(96 << 20), None);
    let first = wire.domain.register(vec![1_u8; 95 << 20], REMOTE).expect("95 are possible");
    let rejected = wire.domain.register(vec![2_u8; 2 << 20], REMOTE).expect_err("97 are not");
    let error = &rejected.error;
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    let remedy = error.remedy_text().expect("a remedy");
    assert!(remedy.contains("close regions"), "{remedy}");
    assert_eq!(rejected.value, vec![2; 2 << 20], "the memory comes back");
    first.close().map_err(hmem::Error::from).expect("close");
    let again = wire.domain.register(rejected.value, REMOTE).expect("room again");
    drop(again);
}

/// REL-06, MR-04
///
/// A segment is larger than the NIC's longest region.
#[test]
fn mooncake_364_segment_beyond_the_longest_region_is_refused_and_not_clipped() {
    let wire = wire(Loopback::builder().max_mr_size(1 << 20), None);
    let rejected = wire.domain.register(vec![3_u8; (1 << 20) + 1], REMOTE).expect_err("too long");
    let error = &rejected.error;
    assert_eq!(error.kind(), ErrorKind::TooLong, "{error}");
    let text = format!("{error:#}");
    assert!(text.contains("1048577") && text.contains("1048576"), "both lengths: {text}");
    assert!(error.remedy_text().is_some(), "{error}");
    assert_eq!((wire.domain.live().regions, rejected.value.len()), (0, (1 << 20) + 1));
    // The remedy works: several regions, without a copy of the memory.
    let memory = rejected.value;
    let parts = [0..1 << 20, 1 << 20..(1 << 20) + 1];
    let nics = [&wire.domain];
    let batch = hmem::Batch::on(&nics).add_views(memory, parts.map(|part| (part, REMOTE)));
    let registered = batch.register().map_err(hmem::Error::from).expect("two regions");
    let last = registered.view(0, 0, 1).expect("the last byte").key().expect("a key");
    assert_eq!(wire.get(&last, 0, 1).expect("read"), [3]);
}
