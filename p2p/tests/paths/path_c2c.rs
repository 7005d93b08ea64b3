//! Path decisions on recorded machines with NVLink-C2C: the order of the dma-buf mappings for each
//! NIC, with its reason, and the causes of refusals.

use std::sync::Arc;

use crate::path_support::{Bench, REMOTE, close, page_size, register};
use crate::topology_machines::{Folder, make};
use hmem_core::{
    AllocationKind, Batch, Decision, DeviceId, Domain, DomainAttr, Errno, Path, Request,
    iface::DmaBufMapping,
    path::{DirectPath, P2pPolicy},
    provider::Imports,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, Simulated};
use hmem_p2p::path::{DefaultPathSelector, LocalMachine};
use hmem_provider_loopback::{Loopback, NicCall};

/// Imports of a NIC whose provider leaves the order of the mappings to the path search.
const OPEN: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: None,
    data_direct: None,
    peer_memory: false,
    staged: true,
};

/// A simulated device and NICs at PCI addresses of a recorded machine.
struct Machine {
    bench: Bench,
    _files: Folder,
}

impl Machine {
    /// Creates a device at the address `gpu` and a NIC at each of `nics`.
    fn new(name: &str, gpu: &str, nics: &[(&str, &str)], imports: Imports) -> Self {
        let files = make(name);
        let device = Simulated::builder().dma_buf(DmaBufKind::MemFd).pci_bus_ids([gpu]);
        let fabric = Loopback::builder().imports(imports);
        let fabric = nics.iter().fold(fabric, |fabric, (nic, id)| fabric.nic_at(*nic, *id));
        let mut bench = Bench::with(device, fabric, DefaultPathSelector::new());
        let facts = Arc::new(LocalMachine::below(files.path()));
        bench.paths = Arc::new(DefaultPathSelector::new().facts(facts));
        Self { bench, _files: files }
    }

    /// Creates a GB200 with EFA: `efa_0` is at the switch of the GPU, and `efa_2` at the CPU.
    fn gb200_efa(imports: Imports) -> Self {
        let nics = [("efa_0", "0008:04:00.0"), ("efa_2", "0000:01:00.0")];
        Self::new("gb200-efa", "0008:03:00.0", &nics, imports)
    }

    /// Creates a GB200 with a NIC at the CPU. The GPU is beside a Data Direct function.
    fn gb200(imports: Imports) -> Self {
        Self::new("gb200", "0008:04:00.0", &[("mlx5_4", "0006:01:00.0")], imports)
    }

    fn decide_in(&self, domain: &Domain) -> Decision {
        let region = register(domain, self.bench.buffer(page_size())).expect("registered");
        let decision = Decision::clone(region.decision().expect("a decision"));
        close(region);
        decision
    }

    fn decide(&self, nic: &str) -> Decision {
        self.decide_in(&self.bench.domain(nic, P2pPolicy::Enabled))
    }
}

fn calls(decision: &Decision) -> Vec<&str> {
    decision.attempts.iter().map(|attempt| attempt.call.as_str()).collect()
}

/// ARM-05, HM-09, P2P-03: the mapping depends on the NIC's place, and the reason names it.
#[test]
fn each_nic_has_the_mapping_that_leads_to_the_device() {
    let machine = Machine::gb200_efa(OPEN);
    let near = machine.decide("efa_0");
    assert_eq!((near.mapping, near.attempts.len()), (DmaBufMapping::Pcie, 1), "{near}");
    assert!(near.reason.contains("the PCIe mapping is tried first"), "{near}");
    let far = machine.decide("efa_2");
    assert_eq!((far.mapping, far.attempts.len()), (DmaBufMapping::Default, 1), "{far}");
    assert!(far.reason.contains("the default mapping is tried first"), "{far}");
    for decision in [&near, &far] {
        assert!(decision.reason.contains("NVLink-C2C"), "{decision}");
    }
    let again = machine.decide("efa_0");
    assert_eq!((again.mapping, again.from_cache, again.reason), (near.mapping, true, near.reason));
}

/// HM-09: a NIC does not share exports of a mapping that does not lead to the device from there.
/// Without a probe, in the first round, no decision is remembered.
#[test]
fn nics_of_one_batch_have_their_own_mappings() {
    let machine = Machine::gb200_efa(OPEN);
    for nics in [["efa_0", "efa_2"], ["efa_2", "efa_0"]] {
        let domains = nics.map(|nic| machine.bench.domain(nic, P2pPolicy::Enabled));
        let expected = nics.map(|nic| match nic {
            "efa_0" => DmaBufMapping::Pcie,
            _ => DmaBufMapping::Default,
        });
        for probed in [false, true, true] {
            let buffer = machine.bench.buffer(page_size());
            if !probed {
                for nth in 1..=2 {
                    machine.bench.device.faults().fail_nth(
                        DeviceCall::CreateMemory,
                        nth,
                        Errno(12),
                    );
                }
            }
            let domains: Vec<_> = domains.iter().collect();
            let batch = Batch::on(&domains).add(Request::new(buffer, REMOTE)).register().unwrap();
            let mappings = batch.regions().iter().map(|region| region.decision().unwrap().mapping);
            assert_eq!(mappings.collect::<Vec<_>>(), expected);
            drop(batch.close().map_err(hmem_core::Error::from).unwrap());
            machine.bench.device.faults().clear();
            if !probed {
                machine.bench.paths.forget();
            }
        }
        machine.bench.paths.forget();
    }
}

/// HM-09: the provider's setting, and the domain's list of paths, count more than the topology.
#[test]
fn settings_count_more_than_the_topology() {
    for (first, expected) in [(true, DmaBufMapping::Pcie), (false, DmaBufMapping::Default)] {
        let machine = Machine::gb200_efa(Imports { pcie_mapping_first: Some(first), ..OPEN });
        for nic in ["efa_0", "efa_2"] {
            let decision = machine.decide(nic);
            assert_eq!(decision.mapping, expected, "{decision}");
            assert!(!decision.reason.contains("C2C"), "{decision}");
        }
    }
    let machine = Machine::gb200_efa(OPEN);
    let attr = DomainAttr {
        nic: Some("efa_2".into()),
        direct_paths: Some(vec![DirectPath::DmaBuf(DmaBufMapping::Pcie)]),
        ..DomainAttr::default()
    };
    let decision = machine.decide_in(&machine.bench.domain_with(attr).unwrap());
    assert_eq!(decision.mapping, DmaBufMapping::Pcie, "{decision}");
    assert!(!decision.reason.contains("C2C"), "{decision}");
}

/// HM-09: without NVLink-C2C, or without a place of the NIC, the order and the reason are the same
/// as before.
#[test]
fn other_machines_try_only_the_default_mapping() {
    let reason = "the device exports it and the NIC imports it";
    let hgx = Machine::new("hgx-h100", "0000:1c:00.0", &[("mlx5_8", "0000:1b:00.0")], OPEN);
    let decision = hgx.decide("mlx5_8");
    assert_eq!((decision.mapping, &*decision.reason), (DmaBufMapping::Default, reason));
    let device = Simulated::builder().dma_buf(DmaBufKind::MemFd).pci_bus_ids(["0008:04:00.0"]);
    let mut without_place = Machine::gb200(OPEN);
    let facts = Arc::new(LocalMachine::below(without_place._files.path()));
    without_place.bench = Bench::with(
        device,
        Loopback::builder().nic("rxe0").imports(OPEN),
        DefaultPathSelector::new(),
    );
    without_place.bench.paths = Arc::new(DefaultPathSelector::new().facts(facts));
    assert_eq!(without_place.decide("rxe0").reason, reason);
}

/// HM-09, P2P-03: openucx/ucx#11571, #11584 and ai-dynamo/nixl#1694 had this refusal. The IOMMU
/// translates on this machine, and is not the cause.
#[test]
fn refused_pcie_mapping_of_a_far_nic_names_the_link() {
    let machine = Machine::gb200(Imports { pcie_mapping_first: Some(true), ..OPEN });
    machine.bench.faults.fail_nth(NicCall::Register, 1, Errno(524));
    let decision = machine.decide("mlx5_4");
    assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
    let refused = &decision.attempts[0];
    assert_eq!(refused.cause_name, Some("c2c-pcie-mapping"), "{decision}");
    let (cause, remedy) = (refused.cause.clone().unwrap(), refused.remedy.clone().unwrap());
    assert!(cause.contains("NVLink-C2C"), "{cause}");
    assert!(remedy.contains("HMEM_VERBS_PCIE_MAPPING"), "{remedy}");
}

/// HM-09, P2P-03
#[test]
fn refused_default_mapping_is_followed_by_the_pcie_mapping() {
    let machine = Machine::gb200(OPEN);
    machine.bench.faults.fail_nth(NicCall::Register, 1, Errno(524));
    let decision = machine.decide("mlx5_4");
    assert_eq!(calls(&decision).len(), 2, "{decision}");
    assert_eq!(decision.mapping, DmaBufMapping::Pcie, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("c2c-default-mapping"), "{decision}");
    assert!(decision.reason.contains("the default mapping is tried first"), "{decision}");
}

/// HM-09: drivers before CUDA 12.8 do not know the mapping (ofiwg/libfabric#10976).
#[test]
fn near_nic_falls_back_to_the_default_mapping() {
    let machine = Machine::gb200_efa(OPEN);
    machine.bench.device.faults().fail_nth(DeviceCall::ExportDmaBuf, 1, Errno(22));
    let decision = machine.decide("efa_0");
    assert_eq!(decision.mapping, DmaBufMapping::Default, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("no-pcie-mapping"), "{decision}");
}

/// P2P-03: the GPU of GB10 opens no memory to NICs.
#[test]
fn integrated_device_is_staged_and_the_cause_says_why() {
    let nics = [("rocep1s0f0", "0000:01:00.0")];
    let machine = Machine::new("gb10", "000f:01:00.0", &nics, OPEN);
    machine.bench.device.faults().fail_nth(DeviceCall::ExportDmaBuf, 1, Errno(95));
    let domain = machine.bench.domain("rocep1s0f0", P2pPolicy::Enabled);
    let buffer = machine.bench.buffer_of(AllocationKind::Device, DeviceId(0), page_size());
    let region = register(&domain, buffer).unwrap();
    let decision = region.decision().unwrap();
    assert_eq!(decision.path, Path::Staged, "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("integrated-device"), "{decision}");
    assert!(decision.attempts[0].remedy.as_ref().unwrap().contains("cuMemHostAlloc"));
}
