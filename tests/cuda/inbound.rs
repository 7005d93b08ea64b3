//! Inbound writes are flushed in the context of the written memory before their completion is read.

use hmem_fake_cuda::Profile;

use crate::link::{Link, check, not_over_a_gpu, pattern};

/// HM-14
#[test]
fn completion_follows_a_flush_in_the_memorys_context() {
    if not_over_a_gpu("only the fake driver shows which contexts are flushed") {
        return;
    }
    let link = Link::open(Profile { writes_ordering: 0, ..Profile::default() });
    let (context, range) = link.own_context();
    let region = link.expose(range).expect("registered");
    let key = region.key().expect("key");
    let bytes = pattern(1, 100);
    link.put(&key, 50, &bytes).expect("write");
    assert_eq!(link.driver.flushed(), [], "the NIC of the target has no completion of it");
    assert_eq!(link.get(&key, 50, 100).expect("read"), bytes);
    assert_eq!(link.driver.flushed(), [context], "a read is completed");
    link.domain.flush_inbound().expect("flush");
    assert_eq!(link.driver.flushed(), [context]);
    region.close().map_err(hmem::Error::from).expect("close");
    // SAFETY: `own_context` above made the context, and the region is closed.
    check(unsafe { hmem_fake_cuda::cuCtxDestroy_v2(context) });
    link.domain.flush_inbound().expect("nothing is left to flush");
    assert_eq!((link.driver.flushed(), link.driver.undefined_calls()), (vec![], 0));
}
