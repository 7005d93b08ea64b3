//! Tests of freed CUDA memory, and of new memory at its address.

use hmem::{
    Address, AddressRange, AllocationKind, ErrorKind, IfaceKind, Path, Request,
    cuda::CudaMonitorKind, path::P2pPolicy,
};
use hmem_fake_cuda::Profile;

use crate::link::{
    IMPORTS, Link, REMOTE, assert_reused, close, direct, not_over_a_gpu, pattern, raw,
};

/// MR-07
///
/// Covers dma-bufs, which keep their pages, and staged copies.
#[test]
fn registration_after_reallocation_reaches_the_new_bytes() {
    for policy in [direct(), P2pPolicy::Disabled] {
        let link = Link::with(Profile::default(), IMPORTS, policy);
        let kinds = [AllocationKind::Device, AllocationKind::Virtual];
        for kind in kinds.into_iter().filter(|kind| !link.lacks(*kind)) {
            for len in [5000u64, 3 << 20] {
                let (mut last, mut reused) = (None, 0);
                for round in 0..40 {
                    let buffer = link.buffer(len, kind);
                    reused += u32::from(
                        last.replace(buffer.allocation().base())
                            == Some(buffer.allocation().base()),
                    );
                    let region = link.domain.register(buffer, REMOTE).map_err(hmem::Error::from);
                    let region = region.unwrap_or_else(|error| panic!("{error}"));
                    let path = region.decision().expect("decision").path;
                    let staged = policy == P2pPolicy::Disabled;
                    assert!(
                        if staged { path == Path::Staged } else { link.is_direct(path, kind) },
                        "{path:?}"
                    );
                    let (key, bytes) = (region.key().expect("key"), pattern(round, 4000));
                    link.put(&key, 500, &bytes).expect("write");
                    let mut found = vec![0; bytes.len()];
                    region.read(500, &mut found).expect("read");
                    assert!(
                        found == bytes,
                        "{kind:?}, round {round}: the NIC wrote to other memory"
                    );
                    drop(close(region));
                    link.put(&key, 0, &[1]).expect_err("the key is invalid");
                }
                assert_reused(reused > 20);
            }
        }
    }
}

/// MR-04
///
/// A registration that names the CUDA iface is refused if the driver does not know the memory.
#[test]
fn freed_or_foreign_pointer_claimed_for_cuda_is_unknown() {
    for cached in [false, true] {
        let profile = Profile::default();
        let link = if cached {
            Link::cached(profile, IMPORTS, P2pPolicy::Enabled, CudaMonitorKind::Auto)
        } else {
            Link::open(profile)
        };
        let buffer = link.buffer(8192, AllocationKind::Device);
        let freed = buffer.allocation().range;
        drop(buffer);
        let foreign =
            AddressRange::new(Address(freed.start().0 + (1 << 40)), 4096).expect("no wrap");
        for unknown in [freed, foreign] {
            // SAFETY: the registration is refused.
            let memory = unsafe { raw(unknown) };
            let error = if cached {
                let cache = link.domain.cache().expect("a cache");
                cache.get_of(memory, REMOTE, IfaceKind::CUDA, None).map(drop)
            } else {
                let claim = Request::new(memory, REMOTE).owner(IfaceKind::CUDA, None);
                link.domain.submit(claim).map(drop).map_err(hmem::Error::from)
            };
            let error = error.expect_err("no iface knows it");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            let text = format!("{error:#}");
            assert!(text.contains("cuda") && text.contains("does not know the address"), "{text}");
            assert!(text.contains("freed") && text.contains("another process"), "{text}");
        }
    }
}

/// MR-07
///
/// Shows the bug that the cache must prevent: if a region stays registered after a free, transfers
/// read the bytes of the old allocation instead of the new one. They do not fail, since the
/// exported pages outlive their allocation.
#[test]
fn region_that_outlives_its_memory_reaches_no_new_memory() {
    if not_over_a_gpu("the driver determines what happens to freed memory of a dma-buf") {
        return;
    }
    for len in [2 << 20, 3 << 20] {
        let link = Link::with(Profile::default(), IMPORTS, P2pPolicy::Required);
        let first = link.buffer(len, AllocationKind::Device);
        let base = first.allocation().base();
        first.write(0, &[1; 4000]).expect("write");
        let stale = link.expose(first.allocation().range).expect("register");
        drop(first);
        let second = link.buffer(len, AllocationKind::Device);
        assert_eq!(second.allocation().base(), base, "the address did not come back");
        second.write(0, &[2; 4000]).expect("write");
        let key = stale.key().expect("key");
        assert_eq!(
            link.get(&key, 0, 4000).expect("read"),
            [1; 4000],
            "stale bytes, which a cache must not return"
        );
        link.put(&key, 0, &[3; 4000]).expect("write");
        let mut found = [0; 4000];
        second.read(0, &mut found).expect("read");
        assert_eq!(found, [2; 4000]);
        stale.close().expect("close");
    }
}
