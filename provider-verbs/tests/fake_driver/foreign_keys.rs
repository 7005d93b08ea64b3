//! Keys for work requests of other code, and settings of one registration, over a fake library.

use std::sync::Arc;

use crate::fake;
use crate::fake::{calls, functions, memory, range};
use hmem_core::{Access, Domain, DomainAttr, ErrorKind, Promise, Raw, Registry, Request};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::Loopback;
use hmem_provider_verbs::{Settings, Verbs, VerbsMr, VerbsOptions};

fn domain() -> Domain {
    let builder = Verbs::builder().functions(functions());
    // SAFETY: the fake's protection domain is never freed.
    fake::open(&unsafe { builder.with_pd(fake::foreign_pd(), ()) }.expect("start"))
}

fn at(iova: u64) -> Settings {
    Settings { iova: Some(iova), ..Settings::default() }
}

/// VRB-04
#[test]
fn region_gives_range_keys_and_ibv_mr_in_one_call() {
    let domain = domain();
    let region = domain.register(memory(0x1000, 4096), Access::REMOTE_READ).expect("register");
    let mr = VerbsMr::of(&region).expect("one registration");
    assert_eq!((mr.range, mr.base), (range(0x1000, 4096), 0x1000));
    assert_eq!(u64::from(mr.rkey), region.key().expect("a key").as_u64().expect("one number"));
    assert!(!mr.as_ptr().is_null());
    assert_eq!(VerbsMr::all_of(&region).expect("registrations").len(), 1);
}

/// VRB-04
#[test]
fn region_of_several_registrations_lists_them_and_has_no_single_one() {
    let domain = domain();
    let ranges: Box<[_]> = [range(0x1000, 4096), range(0x9000, 64)].into();
    // SAFETY: the fake library accesses no memory.
    let raw = unsafe { Raw::new(ranges.clone(), Promise::ReadWrite) };
    let region = domain.register(raw, Access::SEND).expect("register");
    let error = VerbsMr::of(&region).expect_err("two registrations");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let all = VerbsMr::all_of(&region).expect("registrations");
    assert_eq!(all.iter().map(|mr| mr.range).collect::<Vec<_>>(), *ranges);
}

/// VRB-04
#[test]
fn region_of_another_provider_has_no_verbs_keys() {
    let loopback = Loopback::builder().build().expect("a software NIC");
    let (registry, selector) = (Registry::new(), DefaultPathSelector::new());
    let other =
        Domain::open(&loopback, Arc::new(registry), Arc::new(selector), DomainAttr::default())
            .expect("open");
    let region = other.register(vec![0; 64], Access::SEND).expect("register");
    assert_eq!(VerbsMr::of(&region).expect_err("not verbs").kind(), ErrorKind::InvalidArgument);

    let request = Request::new(vec![0; 64], Access::SEND).extension(Settings::default());
    let refused = other.submit(request).expect_err("settings of another provider");
    assert_eq!((refused.error.kind(), refused.value.len()), (ErrorKind::Unsupported, 64));
}

/// VRB-04
#[test]
fn iova_of_a_request_names_the_bytes_for_work_requests_and_peers() {
    let domain = domain();
    calls();
    let page = rustix::param::page_size() as u64;
    let (start, iova) = (page + 0x10, 0x700 * page + 0x10);
    let request = Request::new(memory(start, 64), Access::REMOTE_READ).extension(at(iova));
    let region = domain.submit(request).expect("register");
    assert_eq!(calls(), [format!("reg_mr_iova2 {start:#x}+0x40 at {iova:#x} 0x4")]);
    let mr = VerbsMr::of(&region).expect("one registration");
    assert_eq!((mr.range, mr.base), (range(start, 64), iova));
    assert_eq!(region.key().expect("a key").base().0, iova);
    assert_eq!(region.base_addr().0, iova);
}

/// VRB-04
#[test]
fn ranges_of_a_request_with_an_iova_follow_each_other() {
    let domain = domain();
    let page = rustix::param::page_size() as u64;
    let ranges: Box<[_]> = [range(page, page), range(9 * page, 64)].into();
    // SAFETY: the fake library accesses no memory.
    let raw = unsafe { Raw::new(ranges, Promise::ReadWrite) };
    let region = domain.submit(Request::new(raw, Access::SEND).extension(at(4 * page)));
    let region = region.expect("register");
    let bases: Vec<_> = VerbsMr::all_of(&region).expect("two").iter().map(|mr| mr.base).collect();
    assert_eq!(bases, [4 * page, 5 * page]);
}

/// VRB-04
#[test]
fn iova_that_no_driver_could_use_is_refused_before_the_driver_call() {
    let domain = domain();
    calls();
    let page = rustix::param::page_size() as u64;
    let zero = Settings { options: VerbsOptions::ZERO_BASED, iova: Some(2 * page) };
    for settings in [at(2 * page + 1), at(u64::MAX - (page - 1)), zero] {
        let request = Request::new(memory(page, 2 * page), Access::SEND).extension(settings);
        let error = domain.submit(request).expect_err("no such address").error;
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{settings:?}: {error}");
    }
    assert!(calls().is_empty(), "the driver was called");
}
