//! Reach checks over verbs: the two endpoints of a check connect and transfer over a fake library
//! that moves bytes.

use std::sync::Arc;

use crate::wire;
use crate::wire::{Misbehaviour, misbehave};
use hmem_core::{
    Access, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Iface, Path,
    Registry, iface::AllocRequest,
};
use hmem_iface_system::{DeviceCall, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::Verbs;

/// Registers device memory in a domain with reach checks. The device has no memory for the page of
/// the check. Returns the text of the check's error.
fn check(misbehaviour: Misbehaviour) -> String {
    let verbs = Verbs::builder().functions(wire::functions()).build().expect("start");
    misbehave(misbehaviour);
    let device = Simulated::builder().window(1 << 30).peer_memory(true).build().expect("a device");
    let device = Arc::new(device);
    let iface: Arc<dyn Iface> = Arc::clone(&device) as _;
    let mut registry = Registry::new();
    registry.add(Arc::clone(&iface)).expect("add the device");
    let attr = DomainAttr { reach_check: Some(true), ..DomainAttr::default() };
    let paths = Arc::new(DefaultPathSelector::new());
    let domain = Domain::open(&verbs, Arc::new(registry), paths, attr).expect("open");
    let wanted = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&iface, &wanted).expect("device memory");
    device.faults().fail_next(DeviceCall::CreateMemory, Errno(12));
    let region = domain.register(buffer, Access::REMOTE_WRITE).expect("register");
    let decision = Arc::clone(region.decision().expect("decided"));
    assert_eq!(decision.path, Path::PeerMemory, "{decision}");
    let checked = decision.attempts.iter().find(|attempt| attempt.call.starts_with("check_reach"));
    let error = checked.and_then(|attempt| attempt.error.clone()).expect("it could not run");
    region.close().expect("close");
    let live = domain.live();
    assert_eq!((live.regions, live.endpoints), (0, 0));
    domain.close().map_err(|rejected| rejected.error).expect("close");
    error.full().to_string()
}

/// LIFE-11: the NIC transfers between pages of the host before the check allocates device memory.
#[test]
fn endpoints_of_a_check_connect_and_transfer() {
    let error = check(Misbehaviour::default());
    assert!(error.contains("sim_create_memory"), "the transfer failed before: {error}");
}

#[test]
fn nic_that_cannot_transfer_fails_no_path() {
    let error = check(Misbehaviour { polls_fail: true, ..Misbehaviour::default() });
    assert!(!error.contains("sim_create_memory"), "{error}");
}
