//! Data Direct over a fake library: which NICs have it, and how memory is registered with it.

use std::{ffi::CStr, sync::Arc};

use crate::fake::{calls, functions, symbol, with};
use hmem_core::{
    Access, AllocationKind, Decision, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, ErrorKind,
    Iface, Registry, Result,
    iface::{AllocRequest, DmaBufMapping},
    path::DirectPath,
    provider::Provider,
};
use hmem_iface_system::{DeviceCall, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{Verbs, sys::Functions};

const FUNCTION: &CStr = c"/devices/pci0008:00/0008:00:00.0/0008:01:00.0/0008:03:00.0";
const DATA_DIRECT: DirectPath = DirectPath::DmaBuf(DmaBufMapping::DataDirect);

/// Starts the provider over an mlx5 NIC for which libmlx5 reports this Data Direct function.
fn verbs(function: Result<&'static CStr, i32>) -> Verbs {
    let functions = functions();
    with(|script| (script.dma_buf, script.data_direct) = (0, Some(function)));
    Verbs::builder().functions(functions).build().expect("start")
}

fn data_direct(verbs: &Verbs) -> Option<u32> {
    verbs.nics().expect("one device")[0].imports.data_direct
}

/// A device at the PCI address `id`, and a domain with these direct paths.
struct Machine {
    device: Arc<Simulated>,
    domain: Domain,
}

impl Machine {
    fn new(verbs: &Verbs, id: &str, direct_paths: Option<Vec<DirectPath>>) -> Self {
        let device = Simulated::builder().window(1 << 30).pci_bus_ids([id]).build();
        let device = Arc::new(device.expect("a device"));
        let mut registry = Registry::new();
        registry.add(Arc::clone(&device) as Arc<dyn Iface>).expect("add the device");
        let paths = Arc::new(DefaultPathSelector::new());
        let attr = DomainAttr { direct_paths, ..DomainAttr::default() };
        let domain = Domain::open(verbs, Arc::new(registry), paths, attr).expect("open");
        Self { device, domain }
    }

    /// Registers a page of device memory. Returns the decision and the calls of the library.
    fn decide(&self) -> (Arc<Decision>, Vec<String>) {
        let iface: Arc<dyn Iface> = Arc::clone(&self.device) as _;
        let len = rustix::param::page_size() as u64;
        let wanted = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
        let buffer = DeviceBuffer::allocate(&iface, &wanted).expect("device memory");
        calls();
        let region = self.domain.register(buffer, Access::REMOTE_WRITE).expect("register");
        let (decision, calls) = (Arc::clone(region.decision().expect("decided")), calls());
        region.close().expect("close");
        (decision, calls)
    }
}

#[test]
fn nic_has_data_direct_if_libmlx5_reports_a_pci_function() {
    assert_eq!(data_direct(&verbs(Ok(FUNCTION))), Some(8));
    assert_eq!(data_direct(&verbs(Ok(c"/devices/pci10e2:0/10e2:03:00.0"))), Some(0x10e2));
    let sub_function = c"/devices/pci0008:00/0008:01:00.0/mlx5_core.sf.4";
    assert_eq!(data_direct(&verbs(Ok(sub_function))), Some(8));
    for function in [Ok(c""), Ok(c"/devices/virtual"), Err(19), Err(95)] {
        assert_eq!(data_direct(&verbs(function)), None, "{function:?}");
    }
    let functions = functions();
    with(|script| script.dma_buf = 0);
    let other = Verbs::builder().functions(functions).build().expect("start");
    calls();
    assert_eq!(data_direct(&other), None);
    assert!(!calls().contains(&"data_direct_path".to_owned()), "the NIC is not of mlx5");
}

/// Finds the mapping by itself: only a function in the PCI domain of the device is used.
#[test]
fn memory_in_the_pci_domain_of_the_function_is_registered_with_data_direct() {
    let verbs = verbs(Ok(FUNCTION));
    let (decision, calls) = Machine::new(&verbs, "0008:04:00.0", None).decide();
    assert_eq!((decision.mapping, decision.attempts.len()), (DmaBufMapping::DataDirect, 1));
    assert!(decision.reason.contains("Data Direct is tried first"), "{decision}");
    assert!(calls[0].starts_with("mlx5_reg_dmabuf_mr ") && calls[0].ends_with(" 0x1"), "{calls:?}");
    assert_eq!(calls.len(), 1, "{calls:?}");

    let (decision, calls) = Machine::new(&verbs, "0009:04:00.0", None).decide();
    assert_eq!((decision.mapping, decision.attempts.len()), (DmaBufMapping::Default, 1));
    assert!(calls[0].starts_with("reg_dmabuf_mr "), "{calls:?}");
}

#[test]
fn refused_data_direct_is_recorded_and_the_next_mapping_is_used() {
    let verbs = verbs(Ok(FUNCTION));
    for (errno, cause) in [(95, "data-direct-unaligned"), (22, "data-direct-function")] {
        let machine = Machine::new(&verbs, "0008:04:00.0", None);
        with(|script| script.register = vec![errno]);
        let (decision, _) = machine.decide();
        assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
        let refused = &decision.attempts[0];
        let error = refused.error.as_ref().expect("refused");
        assert_eq!(error.os_errno(), Some(Errno(errno)), "{decision}");
        assert_eq!(error.operation(), "mlx5dv_reg_dmabuf_mr");
        assert_eq!(refused.cause_name, Some(cause), "{decision}");
    }
}

#[test]
fn device_without_the_pcie_mapping_falls_back_to_the_default_mapping() {
    let verbs = verbs(Ok(FUNCTION));
    let machine = Machine::new(&verbs, "0008:04:00.0", None);
    machine.device.faults().fail_nth(DeviceCall::ExportDmaBuf, 1, Errno(95));
    let (decision, _) = machine.decide();
    assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("no-pcie-mapping"), "{decision}");
}

#[test]
fn data_direct_that_is_listed_and_absent_is_an_attempt_with_its_cause() {
    let verbs = verbs(Err(19));
    let listed = vec![DATA_DIRECT, DirectPath::DmaBuf(DmaBufMapping::Default)];
    let (decision, _) = Machine::new(&verbs, "0008:04:00.0", Some(listed)).decide();
    assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("nic-without-data-direct"), "{decision}");
    let error = decision.attempts[0].error.as_ref().expect("not tried");
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    let (decision, _) = Machine::new(&verbs, "0008:04:00.0", None).decide();
    assert_eq!(decision.attempts.len(), 1, "the normal search is silent: {decision}");
}

#[test]
fn listed_data_direct_is_used_in_any_pci_domain() {
    let verbs = verbs(Ok(FUNCTION));
    let (decision, _) = Machine::new(&verbs, "0009:04:00.0", Some(vec![DATA_DIRECT])).decide();
    assert_eq!(decision.mapping, DmaBufMapping::DataDirect, "{decision}");
}

#[test]
fn library_without_the_functions_of_mlx5_has_no_data_direct() {
    let of_mlx5 = |name: &str| name.starts_with("mlx5dv_");
    functions();
    with(|script| (script.dma_buf, script.data_direct) = (0, Some(Ok(FUNCTION))));
    // SAFETY: the fake library's functions have the signatures of the header.
    let functions = unsafe {
        Functions::from_lookup(|name, _| if of_mlx5(name) { None } else { symbol(name) })
    };
    let verbs = Verbs::builder().functions(functions.expect("complete")).build().expect("start");
    assert_eq!(data_direct(&verbs), None);
}
