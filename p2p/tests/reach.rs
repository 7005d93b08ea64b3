//! Reach checks (LIFE-11): before the first use of a direct path, the NIC reads and writes a page
//! of the device's memory. The software NIC can register memory and fail to transfer it.

mod path_support;

use std::sync::Arc;

use hmem_core::{
    Access, AllocationKind, Batch, Decision, DeviceId, Domain, DomainAttr, Errno, ErrorKind,
    IfaceKind, Path, Request,
    iface::DmaBufMapping,
    path::{DirectPath, P2pPolicy},
    provider::Imports,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, SIMULATED, Simulated};
use hmem_p2p::path::{DefaultPathSelector, ExplainRequest};
use hmem_provider_loopback::{Loopback, NicCall};
use path_support::{ALL_IMPORTS, Bench, REMOTE, alone, close, page_size, register, vendor::Vendor};

const EREMOTEIO: Errno = Errno(121);

fn bench() -> Bench {
    let device = Simulated::builder().dma_buf(DmaBufKind::MemFd).peer_memory(true);
    Bench::new(device, Imports { pcie_mapping_first: Some(false), ..ALL_IMPORTS })
}

fn domain(bench: &Bench, nic: &str, p2p: P2pPolicy) -> Domain {
    let (nic, reach_check) = (Some(nic.to_owned()), Some(true));
    bench.domain_with(DomainAttr { nic, p2p, reach_check, ..DomainAttr::default() }).expect("open")
}

fn decide(bench: &Bench, domain: &Domain) -> Arc<Decision> {
    let region = register(domain, bench.buffer(page_size())).expect("registered");
    let decision = Arc::clone(region.decision().expect("a decision"));
    close(region);
    decision
}

/// Returns each attempt with its outcome.
fn attempts(decision: &Decision) -> Vec<(&str, bool)> {
    decision.attempts.iter().map(|it| (it.call.as_str(), it.error.is_none())).collect()
}

const CHECK: &str = "check_reach(dma-buf, Default mapping)";
const DMA_BUF: &str = "register(dma-buf, Default mapping)";

#[test]
fn first_registration_checks_the_path_once_for_a_device_and_nic() {
    let _alone = alone();
    let bench = bench();
    bench.faults.start_counting();
    let first = domain(&bench, "loop0", P2pPolicy::Enabled);
    drop(bench.buffer(page_size()));
    let before = bench.residue();
    let decision = decide(&bench, &first);
    assert_eq!(attempts(&decision), [(CHECK, true), (DMA_BUF, true)], "{decision}");
    let transfers = || bench.faults.calls(NicCall::ImportedTransfer);
    assert_eq!(transfers(), 2, "one read and one write");
    assert_eq!(first.live().endpoints, 0);
    assert_eq!((first.live().regions, bench.residue_after(&before)), (0, before));

    let again = decide(&bench, &first);
    assert!(again.from_cache, "{again}");
    assert!(decide(&bench, &domain(&bench, "loop0", P2pPolicy::Required)).attempts.len() == 2);
    assert_eq!(transfers(), 2, "the result is remembered, for domains of another policy too");
    decide(&bench, &domain(&bench, "loop1", P2pPolicy::Enabled));
    assert_eq!(transfers(), 4, "another NIC");
    bench.paths.forget();
    decide(&bench, &first);
    assert_eq!(transfers(), 6, "forgotten");
}

#[test]
fn no_check_runs_without_the_setting() {
    let _alone = alone();
    let bench = bench();
    bench.faults.start_counting();
    let decision = decide(&bench, &bench.domain("loop0", P2pPolicy::Enabled));
    assert_eq!(attempts(&decision), [(DMA_BUF, true)], "{decision}");
    assert_eq!(bench.faults.calls(NicCall::Transfer), 0);
}

/// LIFE-11: kvcache-ai/Mooncake#3281.
#[test]
fn nic_that_registers_and_does_not_reach_the_device_gets_the_next_path() {
    let _alone = alone();
    let bench = bench();
    bench.faults.fail_always(NicCall::ImportedTransfer, EREMOTEIO);
    let checked = domain(&bench, "loop0", P2pPolicy::Enabled);
    let decision = decide(&bench, &checked);
    assert_eq!(decision.path, Path::Staged, "{decision}");
    assert_eq!(decision.attempts.len(), 3, "{decision}");
    for (attempt, path) in decision.attempts.iter().zip([Path::DmaBuf, Path::PeerMemory]) {
        assert_eq!(attempt.path, path, "{decision}");
        let error = attempt.error.as_ref().expect("out of reach");
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{decision}");
        assert!(error.full().to_string().contains("errno 121"), "{}", error.full());
        assert_eq!(attempt.cause_name, Some("device-not-reachable-from-nic"), "{decision}");
        assert!(attempt.remedy.is_some(), "{decision}");
    }
    let exports = bench.calls(DeviceCall::ExportDmaBuf);
    assert_eq!(decide(&bench, &checked).path, Path::Staged);
    let unchecked = decide(&bench, &bench.domain("loop0", P2pPolicy::Enabled));
    assert_eq!(unchecked.path, Path::DmaBuf, "a domain without the setting does as before");
    assert_eq!(bench.calls(DeviceCall::ExportDmaBuf), exports + 1, "staging is remembered");

    let error = register(&domain(&bench, "loop0", P2pPolicy::Required), bench.buffer(page_size()))
        .expect_err("no path");
    assert_eq!(error.error.kind(), ErrorKind::Unreachable, "{}", error.error);
}

#[test]
fn only_the_path_that_fails_is_left_out() {
    let _alone = alone();
    let bench = bench();
    bench.faults.fail_next(NicCall::ImportedTransfer, EREMOTEIO);
    let decision = decide(&bench, &domain(&bench, "loop0", P2pPolicy::Enabled));
    let expected =
        [(CHECK, false), ("check_reach(peer memory)", true), ("register(peer memory)", true)];
    assert_eq!(attempts(&decision), expected, "{decision}");
    bench.faults.clear();
    let listed = Some(vec![DirectPath::DmaBuf(DmaBufMapping::Default)]);
    let attr = DomainAttr {
        nic: Some("loop0".into()),
        direct_paths: listed,
        reach_check: Some(true),
        ..DomainAttr::default()
    };
    let decision = decide(&bench, &bench.domain_with(attr).expect("open"));
    assert_eq!(decision.path, Path::Staged, "the failure is remembered: {decision}");
}

/// The NIC reports success, but it transfers the bytes of another page.
#[test]
fn transfer_of_other_bytes_is_a_failed_check() {
    let _alone = alone();
    let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd);
    let memory = Arc::new(memory.build().expect("simulated memory"));
    let mut vendor = Vendor::new(IfaceKind::CUDA, Arc::clone(&memory));
    vendor.other_page = true;
    let nics = Loopback::builder().nic("loop0").imports(Imports {
        pcie_mapping_first: Some(false),
        peer_memory: false,
        ..ALL_IMPORTS
    });
    let vendor = Arc::new(vendor);
    let bench = Bench::over(memory, Arc::clone(&vendor) as _, nics, DefaultPathSelector::new());
    let domain = domain(&bench, "loop0", P2pPolicy::Enabled);
    let iface: Arc<dyn hmem_core::Iface> = vendor;
    let request = hmem_core::iface::AllocRequest {
        len: page_size(),
        device: DeviceId(0),
        kind: AllocationKind::Device,
    };
    let buffer = hmem_core::DeviceBuffer::allocate(&iface, &request).expect("memory");
    let region = register(&domain, buffer).expect("registered");
    let decision = Arc::clone(region.decision().expect("a decision"));
    close(region);
    assert_eq!(decision.path, Path::Staged, "{decision}");
    let error = decision.attempts[0].error.as_ref().expect("refused").full().to_string();
    assert!(error.contains("first wrong byte"), "{error}");
}

/// A NIC without an active port cannot check anything. The result is not remembered.
#[test]
fn check_that_cannot_run_is_an_attempt_and_is_repeated() {
    let _alone = alone();
    let bench = bench();
    let checked = domain(&bench, "loop0", P2pPolicy::Enabled);
    drop(bench.buffer(page_size()));
    let faults: [&dyn Fn(); 5] = [
        &|| bench.faults.fail_next(NicCall::OpenCq, Errno(24)),
        &|| bench.faults.fail_next(NicCall::OpenEndpoint, Errno(12)),
        &|| bench.faults.fail_next(NicCall::Resolve, Errno(113)),
        &|| bench.faults.fail_next(NicCall::Transfer, EREMOTEIO),
        &|| bench.device.faults().fail_nth(DeviceCall::CreateMemory, 2, Errno(12)),
    ];
    for fault in faults {
        let before = bench.residue();
        fault();
        let decision = decide(&bench, &checked);
        assert_eq!(attempts(&decision), [(CHECK, false), (DMA_BUF, true)], "{decision}");
        assert!(!decision.from_cache);
        bench.faults.clear();
        bench.device.faults().clear();
        assert_eq!(bench.residue_after(&before), before);
        assert_eq!((checked.live().endpoints, checked.live().regions), (0, 0));
    }
    let decision = decide(&bench, &checked);
    assert_eq!(attempts(&decision), [(CHECK, true), (DMA_BUF, true)], "{decision}");
}

/// LIFE-11: the failure is not taken for a device out of reach, and is not remembered.
#[test]
fn check_during_which_the_nic_went_down_is_repeated() {
    let _alone = alone();
    let bench = bench();
    let checked = domain(&bench, "loop0", P2pPolicy::Enabled);
    bench.faults.fail_next(NicCall::ImportedTransfer, EREMOTEIO);
    // The first transfer of host memory comes before the transfer with the device.
    bench.faults.fail_nth(NicCall::Transfer, 3, EREMOTEIO);
    let decision = decide(&bench, &checked);
    assert_eq!(attempts(&decision), [(CHECK, false), (DMA_BUF, true)], "{decision}");
    assert_eq!((checked.live().endpoints, checked.live().regions), (0, 0));
    bench.faults.clear();
    let decision = decide(&bench, &checked);
    assert_eq!(attempts(&decision), [(CHECK, true), (DMA_BUF, true)], "{decision}");
}

#[test]
fn each_nic_of_a_batch_is_checked() {
    let _alone = alone();
    let bench = bench();
    let domains = ["loop0", "loop1"].map(|nic| domain(&bench, nic, P2pPolicy::Enabled));
    bench.faults.fail_nth(NicCall::ImportedTransfer, 1, EREMOTEIO);
    let request = Request::new(bench.buffer(page_size()), REMOTE);
    let all: Vec<_> = domains.iter().collect();
    let batch = Batch::on(&all).add(request).register().expect("registered");
    let paths = batch.regions().iter().map(|region| region.decision().expect("decided").path);
    assert_eq!(paths.collect::<Vec<_>>(), [Path::PeerMemory, Path::DmaBuf]);
    drop(batch.close().map_err(hmem_core::Error::from).expect("close"));
}

#[test]
fn explanation_has_the_check() {
    let _alone = alone();
    let bench = bench();
    bench.faults.fail_always(NicCall::ImportedTransfer, EREMOTEIO);
    let request = ExplainRequest::new(SIMULATED).reach_check(true);
    let found = bench.paths.explain(&bench.registry, &bench.provider, &request).expect("explained");
    assert_eq!(found.path, Some(Path::Staged), "{found}");
    assert!(found.to_string().contains("check_reach(dma-buf"), "{found}");
    assert!(!found.remedies.is_empty());
}

#[test]
fn staged_memory_and_rights_of_the_request_stay_as_they_are() {
    let _alone = alone();
    let bench = bench();
    let checked = domain(&bench, "loop0", P2pPolicy::Disabled);
    bench.faults.start_counting();
    let region =
        checked.register(bench.buffer(page_size()), Access::REMOTE_READ).expect("register");
    assert_eq!(region.decision().expect("decided").path, Path::Staged);
    close(region);
    assert_eq!(bench.faults.calls(NicCall::Transfer), 0, "direct access is disabled");
}
