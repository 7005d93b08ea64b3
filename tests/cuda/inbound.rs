//! What a NIC wrote into memory of a context is flushed in that context before its completion is read.

use hmem::{
    Address, AddressRange,
    cuda::sys::{CuContext, CuResult},
};
use hmem_fake_cuda::Profile;

use crate::link::{Link, not_over_a_gpu, pattern};

fn check(code: CuResult) {
    assert_eq!(code, CuResult::CUDA_SUCCESS);
}

/// HM-14
#[test]
fn hm_14_a_completion_is_read_after_a_flush_in_the_context_of_the_memory() {
    if not_over_a_gpu("which contexts are flushed the fake driver says") {
        return;
    }
    let link = Link::open(Profile { writes_ordering: 0, ..Profile::default() });
    let (mut context, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
    // SAFETY: places are writable; device 0 is there.
    unsafe {
        check(hmem_fake_cuda::cuCtxCreate_v2(&mut context, 0, 0));
        check((link.functions.mem_alloc)(&mut pointer, 8192));
        check((link.functions.ctx_pop_current)(&mut popped));
    }
    let range = AddressRange::new(Address(pointer), 8192).expect("a range");
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
    // SAFETY: made above; the region is closed.
    unsafe { check(hmem_fake_cuda::cuCtxDestroy_v2(context)) };
    link.domain.flush_inbound().expect("nothing is left to flush");
    assert_eq!((link.driver.flushed(), link.driver.strangers()), (vec![], 0));
}
