//! Tests a CUDA driver that is loaded as a library: by default its frees are hooked, so no freed
//! memory stays registered, even if the application frees it directly. The library is the fake
//! driver's. The binary has one test, because a process has one driver.
#![cfg(all(feature = "cuda", target_arch = "x86_64"))]
#![allow(unsafe_code)]

use std::{ffi::CStr, path::PathBuf, sync::Arc};

use hmem::{
    Access, Address, AddressRange, CacheAttr, DomainAttr, Hmem, IfaceExt, IfaceKind, Promise, Raw,
    cuda::{
        Cuda,
        sys::{CuContext, CuDevicePtr, CuResult, Functions},
    },
    loopback::Loopback,
    monitor::InvalidationCause,
};
use libloading::os::unix::Library;

/// Returns the path of the fake driver's library, which Cargo builds in the folder of this test.
fn path() -> PathBuf {
    let _: fn() -> Vec<hmem_fake_cuda::Profile> = hmem_fake_cuda::Profile::all;
    let test = std::env::current_exe().expect("this test");
    let library = test.parent().expect("a folder").join("libhmem_fake_cuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// MON-07, CACHE-02, MR-07
#[test]
fn direct_frees_in_a_loaded_library_end_cached_registrations() {
    let path = path();
    // SAFETY: the file is the fake driver's library.
    let builder = unsafe { Cuda::builder().library(&path) };
    let cuda = Arc::new(builder.open().expect("the fake driver"));
    // The application's own handle of the library. SAFETY: the library is loaded already, so no
    // initialiser runs.
    let library = unsafe { Library::new(&path) }.expect("loaded just now");
    // SAFETY: the file is the fake driver's library.
    let driver = unsafe { Functions::load(&path) }.expect("loaded just now");
    // SAFETY: the fake driver defines this function with this signature.
    let calls = *unsafe {
        library.get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>("hmem_fake_cuda_calls")
    }
    .expect("the fake has it");
    // SAFETY: `name` is a C string.
    let calls = |name: &CStr| unsafe { calls(name.as_ptr()) };

    let nic = Loopback::builder().build().expect("the software NIC");
    let hmem =
        Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&cuda) as _).provider(nic);
    let hmem = hmem.build().expect("started");
    let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("a domain");
    let cache = domain.cache().expect("a cache");
    let monitor = cache.monitor(IfaceKind::CUDA).expect("a monitor");
    assert_eq!(monitor.name, "cuda-hooks+identity", "{}", monitor.rationale);

    let check = |code| assert_eq!(code, CuResult::CUDA_SUCCESS);
    let mut context = CuContext::NULL;
    // SAFETY: the output is writable, device 0 exists, and its context is current on this thread.
    unsafe {
        check((driver.primary_ctx_retain())(&mut context, 0));
        check((driver.ctx_push_current())(context));
    }
    let (mut last, mut reused) = (0, 0);
    for round in 0..500u32 {
        let mut at: CuDevicePtr = 0;
        // SAFETY: the output is writable.
        check(unsafe { (driver.mem_alloc())(&mut at, 1 << 20) });
        reused += u32::from(std::mem::replace(&mut last, at) == at);
        let range = AddressRange::new(Address(at), 1 << 20).expect("a range");
        // SAFETY: allocated above, freed below, and nothing refers to it.
        unsafe { cuda.write(range.start(), &round.to_le_bytes()) }.expect("write");
        for asked in [None, Some(1)] {
            let before = calls(c"");
            // SAFETY: the region is not used after the memory is freed.
            let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
            let region = cache.get(memory, Access::REMOTE_READ).expect("registered");
            assert!(region.lease().uncached_reason().is_none(), "{:?}", region.lease());
            if let Some(most) = asked {
                assert_eq!(calls(c"") - before, most, "the driver's calls of a hit");
            }
        }
        assert_eq!(domain.live().regions, 1, "round {round}");
        // SAFETY: allocated above, and nothing uses it.
        check(unsafe { (driver.mem_free())(at) });
        cache.reclaim();
        assert_eq!(domain.live().regions, 0, "round {round}: registered memory that is freed");
    }
    assert_eq!(reused, 499, "the address did not come back");
    let now = cache.statistics();
    assert_eq!(
        (now.registrations, now.hits, now.invalidations(InvalidationCause::Free)),
        (500, 500, 500),
        "{now:?}"
    );
    // SAFETY: the context was made above, and nothing uses it any longer.
    unsafe {
        check((driver.ctx_pop_current())(&mut context));
        check((driver.primary_ctx_release())(0));
    }
}
