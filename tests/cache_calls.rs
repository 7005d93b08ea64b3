//! Counts, with the fake CUDA driver, the driver calls that find the owner of host memory.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

mod silent;

use std::{ptr, sync::Arc};

use hmem::{
    Access, Address, AddressRange, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, DomainAttr,
    ErrorKind, Hmem, Iface, IfaceKind, MrMode, Promise, Raw,
    cuda::{Cuda, sys::Functions},
    iface::AllocRequest,
    loopback::Loopback,
    system::monitor::ImportMonitor,
};
use hmem_fake_cuda::{FakeDriver, Profile};
use rustix::param::page_size;
use silent::Silent;

fn range(start: usize, len: usize) -> AddressRange {
    AddressRange::new(Address(start as u64), len as u64).expect("no wrap")
}

#[test]
fn registering_a_host_page_takes_one_driver_call_and_a_hit_none() {
    let driver = FakeDriver::start(Profile::default());
    // SAFETY: each function has the signature of its name in `cuda.h`, and functions live forever.
    let functions =
        unsafe { Functions::from_lookup(|name| driver.symbol(name)) }.expect("the table");
    let cuda: Arc<dyn Iface> = Arc::new(Cuda::builder().functions(functions).open().expect("open"));
    let import = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
    let builder = Hmem::builder().without_vendor_ifaces().imported_cache_monitor(import);
    let builder = builder.provider(Loopback::builder().build().expect("a software NIC"));
    let hmem = builder.shared_iface(Arc::clone(&cuda)).build().expect("started");
    let registry = hmem.registry();
    let (rights, own) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses the address, so the mapping replaces nothing.
    let pages = unsafe { libc::mmap(ptr::null_mut(), 4 * page_size(), rights, own, -1, 0) };
    assert_ne!(pages, libc::MAP_FAILED);
    let at = pages.expose_provenance();

    let of = |question: &dyn Fn()| {
        let before = driver.all_calls();
        question();
        driver.all_calls() - before
    };
    assert_eq!(
        of(&|| assert_eq!(registry.owner_of(Address(at as u64)).unwrap().iface, IfaceKind::SYSTEM)),
        1
    );
    for (offset, len, calls) in [
        (0, 1, 1),
        (0, page_size(), 1),
        (100, 200, 1),
        (page_size() - 1, 2, 2),
        (0, 4 * page_size(), 2),
    ] {
        let asked = range(at + offset, len);
        let owner =
            of(&|| assert_eq!(registry.owner_of_range(asked).unwrap().iface, IfaceKind::SYSTEM));
        assert_eq!(owner, calls, "{len} bytes at {offset}");
    }

    let attr = DomainAttr {
        mr_mode: MrMode::empty(),
        cache: Some(CacheAttr::default()),
        ..DomainAttr::default()
    };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let cache = domain.cache().expect("a cache");
    let get = || {
        // SAFETY: the test owns the memory, and keeps it mapped.
        let memory = unsafe { Raw::new(range(at, page_size()), Promise::ReadWrite) };
        drop(cache.get(memory, Access::REMOTE_READ).expect("registered"));
    };
    assert_eq!(of(&get), 1, "a miss");
    assert_eq!(of(&|| (0..10).for_each(|_| get())), 0);
    assert_eq!(cache.statistics().hits, 10);
    cache.evict_idle();

    // The owner of a range is found even if only one end of it lies in device memory.
    let request = AllocRequest { len: 2 << 20, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&cuda, &request).expect("device memory");
    let there = buffer.allocation().range;
    assert_eq!(registry.owner_of_range(there).unwrap().iface, IfaceKind::CUDA);
    let into = range(there.start().0 as usize - page_size(), 2 * page_size());
    assert_eq!(registry.owner_of_range(into).unwrap_err().kind(), ErrorKind::OutOfBounds);
    // SAFETY: the test's own mapping, which is no longer registered.
    assert_eq!(unsafe { libc::munmap(pages, 4 * page_size()) }, 0);
}
