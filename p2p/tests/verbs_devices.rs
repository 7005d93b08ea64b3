//! Devices that cannot be opened, and ports that cannot be spoken through.
#![cfg(feature = "verbs")]

#[allow(dead_code, reason = "other tests use the rest of it")]
mod verbs_fake;
mod verbs_support;

use std::sync::Arc;

use hmem_core::{
    Domain, DomainAttr, ErrorKind, Registry,
    provider::{EndpointAttr, Provider},
};
use hmem_p2p::{path::Paths, verbs::Verbs};
use verbs_fake::{functions, with};
use verbs_support::{device, open};

#[test]
fn a_device_that_may_not_be_opened_is_left_out_with_its_reason() {
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    with(|script| (script.devices, script.closed) = (Some(3), Some((1, 13))));
    let nics: Vec<_> =
        verbs.nics().expect("two are left").into_iter().map(|attr| attr.nic.name).collect();
    assert_eq!(nics, ["fake0", "fake2"]);
    let left_out = verbs.left_out().expect("devices are there");
    let [(name, error)] = &left_out[..] else { panic!("{left_out:?}") };
    assert_eq!((name.as_str(), error.kind()), ("fake1", ErrorKind::AccessDenied));
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(13));
    assert!(
        error.remedy_text().is_some_and(|remedy| remedy.contains("/dev/infiniband")),
        "{error}"
    );

    // One device, and no permission: that is the error.
    with(|script| (script.devices, script.closed) = (Some(1), Some((0, 13))));
    let verbs = Verbs::builder().functions(functions()).build().expect("start");
    with(|script| script.closed = Some((0, 13)));
    let error = verbs.nics().expect_err("none is left");
    assert_eq!(
        (error.kind(), error.operation()),
        (ErrorKind::AccessDenied, "ibv_open_device"),
        "{error}"
    );
}

#[test]
fn a_port_or_gid_that_is_not_there_is_named() {
    let Some(name) = device() else { return };
    for (builder, words) in [
        (Verbs::builder().port(9), &["ibv_query_port", "port=9"][..]),
        (Verbs::builder().gid_index(200), &["ibv_query_gid", "index=200", "address"]),
    ] {
        let verbs = builder.build().expect("load libibverbs");
        let domain = open(&verbs, &name);
        let queue = domain.open_cq(4).expect("open a completion queue");
        let error = domain.open_endpoint(&EndpointAttr::new(&queue)).expect_err("no such port");
        let line = error.to_string();
        for word in words {
            assert!(line.contains(word), "{word} is not in: {line}");
        }
        assert!(error.remedy_text().is_some(), "{line}");
        assert_eq!(domain.live().endpoints, 0);
    }
}

#[test]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let Some(name) = device() else { return };
    let verbs = Verbs::open().expect("load libibverbs");
    let attr = DomainAttr { nic: Some("nonsense".into()), ..DomainAttr::default() };
    let error = Domain::open(&verbs, Arc::new(Registry::new()), Arc::new(Paths::new()), attr)
        .expect_err("no such device");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("nic"), Some("nonsense"));
    assert!(
        error.context_value("nics").is_some_and(|nics| nics.split(',').any(|nic| nic == name)),
        "{error}"
    );
}
