//! Changing a region's rights in place, over a driver of the tests' own: the drivers at hand refuse it.
#![cfg(feature = "verbs")]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod verbs_fake;

use std::sync::Arc;

use hmem_core::{
    Access, Address, AddressRange, Domain, DomainAttr, ErrorKind, MemoryRegion, MrFlags, Registry,
};
use hmem_p2p::{
    path::Paths,
    verbs::{Verbs, VerbsDomain, sys::AccessFlags},
};
use verbs_fake::{calls, functions, with};

fn domain(max_mr_size: u64) -> Domain {
    let functions = functions();
    with(|script| script.max_mr_size = max_mr_size);
    let verbs = Verbs::builder().functions(functions).build().expect("start");
    Domain::open(&verbs, Arc::new(Registry::new()), Arc::new(Paths::new()), DomainAttr::default())
        .expect("open")
}

fn register(domain: &Domain, len: u64) -> MemoryRegion {
    let range = AddressRange::new(Address(0x1000), len).expect("range");
    // SAFETY: the fake touches no memory.
    unsafe { domain.reg(range, Access::REMOTE_READ, 0, MrFlags::empty()) }.expect("register")
}

#[test]
fn vrb_01_rereg_changes_rights_and_keys_of_every_part() {
    let domain = domain(0x2000);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = register(&domain, 0x4000);
    let handle = region.provider_region().expect("handle");
    let before = verbs.keys(handle).expect("keys");
    calls();
    verbs
        .rereg(handle, Access::REMOTE_READ | Access::REMOTE_WRITE)
        .expect("the fake changes rights");
    // CHANGE_ACCESS; remote read, write and atomic, and the local write that verbs demands.
    assert_eq!(calls(), ["rereg_mr 0x4 0xf", "rereg_mr 0x4 0xf"]);
    let after = verbs.keys(handle).expect("keys");
    for (before, after) in before.iter().zip(&after) {
        assert_eq!((after.rkey, after.lkey), (before.rkey + 0x10, before.lkey + 0x10));
    }
    assert!(verbs.flags(handle).expect("flags").contains(AccessFlags::REMOTE_WRITE));
    let keys: Vec<_> = region.key().expect("key").pieces().map(|piece| piece.key).collect();
    assert_eq!(
        keys,
        after.iter().map(|key| u64::from(key.rkey)).collect::<Vec<_>>(),
        "peers get the new ones"
    );
}

#[test]
fn vrb_01_a_refused_rereg_leaves_the_region_or_says_that_it_is_lost() {
    let domain = domain(1 << 40);
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let region = register(&domain, 0x1000);
    let handle = region.provider_region().expect("handle");
    for (class, errno, kind, word) in [
        (-1, 22, ErrorKind::InvalidArgument, "as it was"),
        (-4, 95, ErrorKind::Unsupported, "as it was"),
        (-4, 12, ErrorKind::OutOfResources, "must not be used"),
        (-5, 5, ErrorKind::Driver, "must not be used"),
    ] {
        with(|script| script.rereg = (class, errno));
        let error = verbs.rereg(handle, Access::REMOTE_WRITE).expect_err("refused");
        assert_eq!(
            (error.kind(), error.os_errno().map(|errno| errno.0)),
            (kind, Some(errno)),
            "{error}"
        );
        assert!(
            error.remedy_text().is_some_and(|remedy| remedy.contains(word)),
            "class {class}: {error}"
        );
        assert_eq!(verbs.flags(handle).expect("flags"), AccessFlags::REMOTE_READ);
    }
    region.close().map_err(|rejected| rejected.error).expect("it can still be closed");
    assert_eq!(domain.live().page_registrations, 0);
}
