//! The setting for reach checks (LIFE-11): of the domain, of the builder, or the variable
//! `HMEM_REACH_CHECK`.

mod child;

use hmem::{
    Access, AllocationKind, DeviceBuffer, DeviceId, DomainAttr, Errno, ErrorKind, Hmem, MrMode,
    Path,
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    p2p::path::ExplainRequest,
    system::{SIMULATED, Simulated},
};

/// Builds a library whose NIC registers dma-bufs and cannot transfer them.
fn build(check: Option<bool>) -> (Hmem, Faults) {
    let faults = Faults::new();
    faults.fail_always(NicCall::ImportedTransfer, Errno(121));
    let loopback = Loopback::builder().faults(&faults).build().expect("a software NIC");
    let simulated = Simulated::builder().build().expect("a simulated device");
    let builder = Hmem::builder().without_vendor_ifaces().iface(simulated).provider(loopback);
    let builder = check.into_iter().fold(builder, |builder, check| builder.reach_check(check));
    (builder.build().expect("builds"), faults)
}

fn path(hmem: &Hmem, reach_check: Option<bool>) -> Path {
    let attr = DomainAttr { mr_mode: MrMode::empty(), reach_check, ..DomainAttr::default() };
    let domain = hmem.domain("loopback", attr).expect("opens");
    let iface = hmem.iface(SIMULATED).expect("it was added");
    let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(iface, &request).expect("device memory");
    let region = domain.register(buffer, Access::REMOTE_READ).expect("registers");
    region.decision().expect("registered").path
}

/// LIFE-11
#[test]
fn reach_check_comes_from_the_domain_the_builder_or_the_variable() {
    const NAME: &str = "reach_check_comes_from_the_domain_the_builder_or_the_variable";
    if !child::alone(NAME, &[("HMEM_REACH_CHECK", "1")]) {
        return;
    }
    let (hmem, _faults) = build(None);
    assert_eq!(path(&hmem, None), Path::Staged, "the variable");
    assert_eq!(path(&hmem, Some(false)), Path::DmaBuf, "the domain");
    let explained = hmem.explain("loopback", &ExplainRequest::new(SIMULATED)).expect("explained");
    assert_eq!(explained.path, Some(Path::Staged));
    let (hmem, _faults) = build(Some(false));
    assert_eq!(path(&hmem, None), Path::DmaBuf, "the builder");
    assert_eq!(path(&hmem, Some(true)), Path::Staged, "the domain");
}

#[test]
fn wrong_variable_of_the_reach_check_is_an_error_that_names_it() {
    const NAME: &str = "wrong_variable_of_the_reach_check_is_an_error_that_names_it";
    if !child::alone(NAME, &[("HMEM_REACH_CHECK", "maybe")]) {
        return;
    }
    let error = Hmem::builder().without_vendor_ifaces().build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("variable"), Some("HMEM_REACH_CHECK"), "{error}");
}
