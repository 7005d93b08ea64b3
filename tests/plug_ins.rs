//! Tests of plug-ins that an application adds by the builder: the reasons for absent ones, and
//! their names in error messages and explanations.

use hmem::{
    DomainAttr, Error, ErrorKind, Hmem, IfaceKind, Result,
    loopback::Loopback,
    p2p::path::ExplainRequest,
    system::{Simulated, SimulatedBuilder},
};

const MINE: IfaceKind = IfaceKind(0x5155);

fn mine() -> SimulatedBuilder {
    Simulated::builder().kind(MINE).name("mine")
}

fn without_library<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unavailable, "load library")
        .context("library", "libmine.so")
        .remedy("install the driver"))
}

fn absent() -> hmem::Builder {
    Hmem::builder().without_vendor_ifaces().iface_or_absent(
        MINE,
        "mine",
        without_library::<Simulated>(),
    )
}

/// HM-04
#[test]
fn absent_plug_in_is_listed_with_its_reason() {
    let hmem = absent().build().unwrap();
    let error = hmem.iface(MINE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.remedy_text(), Some("install the driver"));
    let text = error.to_string();
    assert!(text.contains("iface=mine") && text.contains("libmine.so"), "{text}");
    assert!(hmem.registry().absent().any(|(kind, _)| kind == MINE));
    assert_eq!(hmem.missing_ifaces().count(), 0, "nothing named it");
}

/// HM-04
#[test]
fn named_absent_plug_in_is_missing() {
    let hmem = absent().ifaces("mine").build().unwrap();
    let missing: Vec<_> = hmem.missing_ifaces().collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert_eq!((missing[0].0, missing[0].1.kind()), (MINE, ErrorKind::Unavailable));

    let hmem = absent().ifaces("system").build().unwrap();
    assert_eq!(hmem.missing_ifaces().count(), 0);
    let error = hmem.iface(MINE).unwrap_err();
    assert!(error.to_string().contains("Builder::ifaces"), "{error}");

    let error = absent().ifaces("mien").build().unwrap_err();
    assert!(error.remedy_text().unwrap().contains("mine"), "{error}");
}

#[test]
fn opened_plug_in_is_added() {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface_or_absent(MINE, "mine", mine().build())
        .provider_or_absent("loopback", Loopback::builder().build())
        .build()
        .unwrap();
    assert_eq!(hmem.iface(MINE).unwrap().name(), "mine");
    hmem.domain("loopback", DomainAttr::default()).unwrap();
}

/// HM-04
#[test]
fn absent_provider_is_listed_with_its_reason() {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .provider_or_absent("my-nic", without_library::<Loopback>())
        .build()
        .unwrap();
    let error = hmem.domain("my-nic", DomainAttr::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.remedy_text(), Some("install the driver"));
    assert_eq!(hmem.absent_providers().map(|(name, _)| name).collect::<Vec<_>>(), ["my-nic"]);
}

/// P2P-03
#[test]
fn explanation_names_a_plug_in() {
    let nic =
        Loopback::builder().imports(hmem::provider::Imports { staged: true, ..Default::default() });
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(mine().build().unwrap())
        .provider(nic.build().unwrap())
        .build()
        .unwrap();
    let explained = hmem.explain("loopback", &ExplainRequest::new(MINE)).unwrap();
    assert_eq!(&*explained.iface_name, "mine");
    let text = explained.to_string();
    assert!(text.contains("of mine") && !text.contains("iface-0x"), "{text}");
}
