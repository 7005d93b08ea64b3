//! Tests of freed CUDA memory, and of new memory at its address.

use hmem::{AllocationKind, path::P2pPolicy};
use hmem_fake_cuda::Profile;

use crate::link::{IMPORTS, Link, not_over_a_gpu};

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
