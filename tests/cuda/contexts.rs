//! Registration leaves no contexts other than those of the application.

use hmem::Path;
use hmem_fake_cuda::{Live, Profile};

use crate::link::{Link, check, not_over_a_gpu};

/// HM-05
///
/// The fake driver refuses every direct path, so that the registration tries all paths.
#[test]
fn registration_in_the_applications_context_creates_no_other() {
    if not_over_a_gpu("the driver must refuse each direct path") {
        return;
    }
    let link = Link::open(Profile::named("550-closed").expect("a profile"));
    let (context, range) = link.own_context();
    for _ in 0..3 {
        let region = link.expose(range).expect("registered");
        assert_eq!(region.decision().expect("decision").path, Path::Staged);
        region.close().map_err(hmem::Error::from).expect("close");
        assert_eq!(link.driver.calls("cuDevicePrimaryCtxRetain"), 0);
    }
    assert_eq!(link.driver.live(), Live { allocations: 1, ..Live::default() });
    // SAFETY: `own_context` above made the context, and the regions are closed.
    check(unsafe { hmem_fake_cuda::cuCtxDestroy_v2(context) });
}
