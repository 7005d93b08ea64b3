//! What registering leaves of contexts: none but those that the application made.

use hmem::{
    Address, AddressRange, Path,
    cuda::sys::{CuContext, CuResult},
};
use hmem_fake_cuda::{Live, Profile};

use crate::link::{Link, not_over_a_gpu};

fn check(code: CuResult) {
    assert_eq!(code, CuResult::CUDA_SUCCESS);
}

/// HM-05: though the driver refuses each direct way, so that there is something to find out.
#[test]
fn hm_05_registering_memory_of_the_applications_context_makes_no_other() {
    if not_over_a_gpu("the driver is to refuse each direct way") {
        return;
    }
    let link = Link::open(Profile::named("550-closed").expect("a profile"));
    let (mut context, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
    // SAFETY: places are writable; device 0 is there.
    unsafe {
        check(hmem_fake_cuda::cuCtxCreate_v2(&mut context, 0, 0));
        check((link.functions.mem_alloc)(&mut pointer, 8192));
        check((link.functions.ctx_pop_current)(&mut popped));
    }
    let range = AddressRange::new(Address(pointer), 8192).expect("a range");
    for _ in 0..3 {
        let region = link.expose(range).expect("registered");
        assert_eq!(region.decision().expect("decision").path, Path::Staged);
        region.close().map_err(hmem::Error::from).expect("close");
        assert_eq!(link.driver.calls("cuDevicePrimaryCtxRetain"), 0);
    }
    assert_eq!(link.driver.live(), Live { allocations: 1, ..Live::default() });
    // SAFETY: made above; the regions are closed.
    unsafe { check(hmem_fake_cuda::cuCtxDestroy_v2(context)) };
}
