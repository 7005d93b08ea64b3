//! Path decisions: the chosen path, the registrations that share a decision, and remembered
//! decisions (P2P-01, P2P-03, P2P-04, HM-09).

use std::sync::Arc;

use crate::path_support;
use crate::path_support::{ALL_IMPORTS, Bench, close, page_size, register, vendor::Vendor};
use hmem_core::{
    AllocationKind, DeviceBuffer, DeviceId, Errno, Error, ErrorKind, Iface, IfaceKind, Path,
    iface::{AllocRequest, DmaBufMapping},
    path::P2pPolicy,
    provider::{Imports, Provider},
};
use hmem_iface_system::{DeviceCall, DmaBufKind, P2pMatrix, Simulated};
use hmem_p2p::path::{DefaultPathSelector, ExplainRequest};
use hmem_provider_loopback::{Loopback, NicCall};

const DMA_BUF: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: Some(false),
    data_direct: None,
    peer_memory: false,
    staged: true,
};

fn device() -> hmem_iface_system::SimulatedBuilder {
    Simulated::builder().devices(2).dma_buf(DmaBufKind::MemFd)
}

/// P2P-01
#[test]
fn each_device_and_nic_has_its_own_decision() {
    let matrix = P2pMatrix::all_reachable().block(DeviceId(0), "loop1").block(DeviceId(1), "loop0");
    let bench = Bench::new(device().p2p(matrix), DMA_BUF);
    for round in 0..3 {
        for nic in ["loop0", "loop1"] {
            let domain = bench.domain(nic, P2pPolicy::Enabled);
            for id in [DeviceId(0), DeviceId(1)] {
                let region =
                    register(&domain, bench.buffer_of(AllocationKind::Device, id, page_size()))
                        .unwrap();
                let decision = region.decision().unwrap();
                let near = (nic == "loop0") == (id == DeviceId(0));
                let expected = if near { Path::DmaBuf } else { Path::Staged };
                assert_eq!(decision.path, expected, "{decision}");
                assert_eq!(
                    (decision.device, decision.nic.as_str()),
                    (Some(id), &*format!("loopback/{nic}"))
                );
                assert_eq!(decision.from_cache, round > 0, "{decision}");
                close(region);
            }
        }
    }
}

/// P2P-01: the selector probes a device and NIC without a direct path once, with one page.
#[test]
fn pair_without_a_direct_path_is_probed_once() {
    let matrix = P2pMatrix::none_reachable();
    let bench = Bench::new(device().p2p(matrix).peer_memory(true), ALL_IMPORTS);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let calls = || {
        [DeviceCall::ExportDmaBuf, DeviceCall::ExportPeerMemory, DeviceCall::Segments]
            .map(|call| bench.calls(call))
    };
    let first = close(register(&domain, bench.buffer(page_size())).unwrap());
    // The selector tries two mappings and one peer-memory export, first for the buffer and then for
    // a page. The page shows that the buffer is not at fault.
    assert_eq!(calls(), [4, 2, 2]);
    assert_eq!(bench.calls(DeviceCall::CreateMemory), 2, "the probe allocated one page");
    for _ in 0..50 {
        let region = register(&domain, bench.buffer(page_size())).unwrap();
        assert_eq!(region.decision().unwrap().path, Path::Staged);
    }
    assert_eq!(calls(), [4, 2, 2], "a remembered decision calls no driver");
    assert_eq!(bench.calls(DeviceCall::CreateMemory), 52);
    // Another NIC with this device is another pair, which has its own decision.
    let other = bench.domain("loop1", P2pPolicy::Enabled);
    close(register(&other, first).unwrap());
    assert_eq!(calls(), [8, 4, 4]);
}

/// P2P-01: the selector does not probe a device and NIC if the first path works.
#[test]
fn pair_with_a_direct_path_is_not_probed() {
    let bench = Bench::new(device(), DMA_BUF);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    for done in 1..=20 {
        close(register(&domain, bench.buffer(page_size())).unwrap());
        assert_eq!(bench.calls(DeviceCall::ExportDmaBuf), done);
    }
    assert_eq!(bench.calls(DeviceCall::CreateMemory), 20, "only the test allocated");
}

/// HM-09
#[test]
fn refusal_of_the_pcie_mapping_is_remembered() {
    // The driver claims to support the mapping and refuses it: one fault for each call.
    let bench = Bench::new(device(), ALL_IMPORTS);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let both = register(&domain, bench.buffer(page_size())).unwrap();
    let decision = both.decision().unwrap();
    assert_eq!((decision.mapping, decision.attempts.len()), (DmaBufMapping::Pcie, 1), "{decision}");
    close(both);
    bench.paths.forget();
    bench.device.faults().fail_nth(DeviceCall::ExportDmaBuf, 1, Errno(95));
    bench.device.faults().fail_nth(DeviceCall::ExportDmaBuf, 3, Errno(95));
    let before = bench.calls(DeviceCall::ExportDmaBuf);
    let region = register(&domain, bench.buffer(page_size())).unwrap();
    let decision = region.decision().unwrap();
    let calls: Vec<_> = decision.attempts.iter().map(|attempt| attempt.call.as_str()).collect();
    assert!(calls[0].starts_with("export_dma_buf(") && calls[0].ends_with(", Pcie)"), "{calls:?}");
    assert_eq!(calls[1], "register(dma-buf, Default mapping)");
    assert_eq!(decision.mapping, DmaBufMapping::Default);
    assert_eq!(
        bench.calls(DeviceCall::ExportDmaBuf) - before,
        4,
        "the buffer's two and the page's two"
    );
    let again = register(&domain, bench.buffer(page_size())).unwrap();
    assert_eq!(again.decision().unwrap().mapping, DmaBufMapping::Default);
    assert_eq!(
        bench.calls(DeviceCall::ExportDmaBuf) - before,
        5,
        "the refused mapping is not tried again"
    );
}

/// P2P-01: a refusal of one unusual buffer does not change the path of ordinary buffers.
#[test]
fn odd_buffers_do_not_demote_ordinary_buffers() {
    let bench = Bench::new(device(), DMA_BUF);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let path = |buffer| close_and_path(&domain, buffer);
    // The first round has no remembered decision, the later rounds have one.
    for _ in 0..3 {
        assert_eq!(path(bench.odd(page_size())), Path::Staged);
        assert_eq!(path(bench.buffer(page_size())), Path::DmaBuf);
    }
    // The driver refuses, not the iface: nothing marks the odd buffer beforehand.
    for errno in [95, 22, 12, 5] {
        bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(errno));
        assert_eq!(path(bench.buffer(page_size())), Path::Staged, "errno {errno}");
        assert_eq!(path(bench.buffer(page_size())), Path::DmaBuf, "errno {errno}");
    }
    // The NIC refuses the buffer.
    bench.faults.fail_nth(NicCall::Register, 1, Errno(524));
    assert_eq!(path(bench.buffer(page_size())), Path::Staged);
    assert_eq!(path(bench.buffer(page_size())), Path::DmaBuf);
}

/// P2P-01
///
/// The selector leaks a probe page that a NIC may still have registered. That probe decides nothing
/// for other buffers.
#[test]
fn page_that_stays_registered_is_leaked_and_decides_nothing() {
    for (refusals, leaked) in [(1, 0), (2, 1)] {
        let bench = Bench::new(device(), DMA_BUF);
        let domain = bench.domain("loop0", P2pPolicy::Enabled);
        let buffer = bench.odd(page_size());
        let owner = bench.registry.owner_of(buffer.allocation().base()).unwrap();
        (1..=refusals).for_each(|nth| bench.faults.fail_nth(NicCall::Deregister, nth, Errno(5)));
        let region = register(&domain, buffer).unwrap();
        assert_eq!(region.decision().unwrap().path, Path::Staged);
        assert_eq!(domain.live().regions, 1 + leaked, "{refusals} refusals");
        close(region);
        assert_eq!(bench.device.stats().live_allocations, leaked, "{refusals} refusals");
        let decided =
            bench.paths.remembered(&owner, domain.provider_attr(), P2pPolicy::Enabled, None, false);
        assert_eq!(decided.map(|decision| decision.path), (leaked == 0).then_some(Path::DmaBuf));
        assert_eq!(close_and_path(&domain, bench.buffer(page_size())), Path::DmaBuf);
    }
}

fn close_and_path(domain: &hmem_core::Domain, buffer: hmem_core::DeviceBuffer) -> Path {
    let region = register(domain, buffer).unwrap();
    let path = region.decision().unwrap().path;
    close(region);
    path
}

/// P2P-01: 64 refused buffers cost at most seven probes.
#[test]
fn many_odd_buffers_cost_few_probes() {
    let bench = Bench::new(device(), DMA_BUF);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    close(register(&domain, bench.buffer(page_size())).unwrap());
    let before = bench.calls(DeviceCall::CreateMemory);
    for _ in 0..64 {
        bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(95));
        assert_eq!(close_and_path(&domain, bench.buffer(page_size())), Path::Staged);
    }
    let probes = bench.calls(DeviceCall::CreateMemory) - before - 64;
    assert!((1..=7).contains(&probes), "{probes} probes for 64 odd buffers");
}

/// P2P-01: the selector forgets a remembered decision when its path fails.
#[test]
fn failure_of_the_path_removes_the_decision() {
    let bench = Bench::new(device(), DMA_BUF);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let attr = domain.provider_attr();
    let buffer = bench.buffer(page_size());
    let owner = bench.registry.owner_of(buffer.allocation().base()).unwrap();
    let remembered = || bench.paths.remembered(&owner, attr, P2pPolicy::Enabled, None, false);
    assert!(remembered().is_none());
    let buffer = close(register(&domain, buffer).unwrap());
    assert_eq!(remembered().unwrap().path, Path::DmaBuf);
    // A temporary failure says nothing about the device and NIC: no probe runs, and nothing is
    // remembered.
    bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(12));
    bench.device.faults().fail_next(DeviceCall::CreateMemory, Errno(12));
    let region = register(&domain, buffer).unwrap();
    let decision = region.decision().unwrap();
    assert!(!decision.from_cache && decision.attempts[0].error.is_some(), "{decision}");
    assert!(remembered().is_none());
    close(region);
    assert_eq!(close_and_path(&domain, bench.buffer(page_size())), Path::DmaBuf);
    assert!(remembered().is_some());
    bench.paths.forget();
    assert!(remembered().is_none());
}

/// P2P-01: each path selector remembers its own decisions only.
#[test]
fn selectors_do_not_share_decisions() {
    let near = Bench::new(device(), DMA_BUF);
    let far = Bench::new(device().p2p(P2pMatrix::none_reachable()), DMA_BUF);
    for _ in 0..2 {
        for (bench, expected) in [(&near, Path::DmaBuf), (&far, Path::Staged)] {
            let domain = bench.domain("loop0", P2pPolicy::Enabled);
            assert_eq!(close_and_path(&domain, bench.buffer(page_size())), expected);
        }
    }
}

/// P2P-03: the list of tried paths is in the decision of a registration or in its error, as text
/// and as JSON.
#[test]
fn trace_is_in_decisions_errors_text_and_json() {
    let bench = Bench::new(device().p2p(P2pMatrix::none_reachable()), DMA_BUF);
    let enabled = bench.domain("loop0", P2pPolicy::Enabled);
    let buffer = bench.buffer(page_size());
    let range = buffer.allocation().range;
    let region = register(&enabled, buffer).unwrap();
    let decision = region.decision().unwrap();
    let [export, peer, staged] = &decision.attempts[..] else { panic!("{decision}") };
    assert_eq!(export.call, format!("export_dma_buf({range}, Default)"));
    assert_eq!(export.error.as_ref().unwrap().os_errno(), Some(Errno(524)));
    assert!(export.remedy.as_ref().is_some_and(|remedy| !remedy.is_empty()));
    assert_eq!(
        (peer.path, peer.error.as_ref().unwrap().kind()),
        (Path::PeerMemory, ErrorKind::Unsupported)
    );
    assert!(staged.error.is_none() && staged.call == "register(staged)");
    let json = serde_json::to_value(&**decision).unwrap();
    assert_eq!(json["path"], "staged");
    assert_eq!(json["policy"], "enabled");
    assert_eq!(json["attempts"][0]["call"], export.call);
    assert!(json["attempts"][0]["error"].as_str().unwrap().contains("ENOTSUPP (524)"));
    close(region);

    let required = bench.domain("loop0", P2pPolicy::Required);
    let error = register(&required, bench.buffer(page_size())).unwrap_err().error;
    assert_eq!(error.trace().len(), 2);
    assert_eq!(
        error.kind(),
        ErrorKind::Unreachable,
        "the driver's refusal counts, not the NIC's missing imports"
    );
    let text = format!("{error:#}");
    assert!(!text.contains('\n'), "{text}");
    for once in [
        "export_dma_buf(",
        "ENOTSUPP (524)",
        "same PCIe switch",
        "policy=required",
        "staged copies",
    ] {
        assert_eq!(text.matches(once).count(), 1, "{once:?} in {text}");
    }
    let source = std::error::Error::source(&error).expect("the refusal");
    assert_eq!(source.to_string(), error.trace()[0].error.as_ref().unwrap().to_string());
}

/// Returns a bench with a plug-in that reports an error at each release of an export.
fn with_failing_releases() -> (Bench, Arc<dyn Iface>) {
    let memory = Arc::new(device().window(1 << 32).build().unwrap());
    let mut vendor = Vendor::new(IfaceKind::FIRST_PLUG_IN, Arc::clone(&memory));
    vendor.release = || {
        let error = Error::new(ErrorKind::Driver, "release");
        Some(error.iface(IfaceKind::FIRST_PLUG_IN))
    };
    let vendor: Arc<dyn Iface> = Arc::new(vendor);
    let nic = Loopback::builder().imports(DMA_BUF);
    (Bench::over(memory, Arc::clone(&vendor), nic, DefaultPathSelector::new()), vendor)
}

/// P2P-03
#[test]
fn error_has_the_kind_of_the_refusal_and_not_of_a_failed_release() {
    let (bench, vendor) = with_failing_releases();
    let domain = bench.domain("loop0", P2pPolicy::Required);
    let request =
        AllocRequest { len: page_size(), device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(&vendor, &request).unwrap();
    bench.faults.fail_nth(NicCall::Register, 1, Errno(12));
    let error = register(&domain, buffer).unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::OutOfResources, "{error}");
    assert_eq!(error.trace()[1].error.as_ref().unwrap().kind(), ErrorKind::Driver, "{error}");
}

/// P2P-03: the error of a failed release of an export names a plug-in, even if the plug-in's error
/// has only its number.
#[test]
fn failed_release_names_a_plug_in() {
    let kind = IfaceKind::FIRST_PLUG_IN;
    let (bench, _) = with_failing_releases();
    let explain = || {
        let request = ExplainRequest::new(kind);
        let explained = bench.paths.explain(&bench.registry, &bench.provider, &request).unwrap();
        assert!(explained.attempts.iter().any(|attempt| attempt.call.contains("release_dma_buf")));
        (explained.path, explained.to_string())
    };
    // The release after a registration, and the release after a refused registration.
    let direct = explain();
    bench.faults.fail_nth(NicCall::Register, 1, Errno(524));
    let staged = explain();
    assert_eq!((direct.0, staged.0), (Some(Path::DmaBuf), Some(Path::Staged)));
    for text in [direct.1, staged.1] {
        assert!(text.contains("iface=vendor") && !text.contains(&kind.to_string()), "{text}");
    }
}

/// P2P-04: the selector tries an export even if the device claims not to support it.
#[test]
fn paths_are_tried_whatever_the_driver_claims() {
    // The device claims no exports, the NIC claims all imports: both are tried.
    let bench = Bench::new(device().dma_buf(DmaBufKind::None).peer_memory(true), ALL_IMPORTS);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let region = register(&domain, bench.buffer(page_size())).unwrap();
    assert_eq!(region.decision().unwrap().path, Path::PeerMemory);
    assert!(bench.calls(DeviceCall::ExportDmaBuf) > 0);
    close(region);
    assert_eq!(bench.device.stats().live_allocations, 0, "the page of the probe was freed");
    assert_eq!((domain.live().regions, domain.live().bytes), (0, 0));
}

/// P2P-04: an explanation leaves no memory allocated and nothing registered.
#[test]
fn explanation_leaves_nothing_behind() {
    let matrix = P2pMatrix::all_reachable().block(DeviceId(1), "loop0");
    let bench = Bench::new(device().p2p(matrix), DMA_BUF);
    let before = bench.device.stats().live_allocations;
    let kind = hmem_iface_system::SIMULATED;
    let explain = |id, policy, nic: &str| {
        let request = ExplainRequest::new(kind)
            .device(DeviceId(id))
            .policy(policy)
            .nic(nic.to_owned())
            .size(10_000);
        bench.paths.explain(&bench.registry, &bench.provider, &request)
    };
    let near = explain(0, P2pPolicy::Enabled, "loop0").unwrap();
    assert_eq!((near.path, near.mapping), (Some(Path::DmaBuf), Some(DmaBufMapping::Default)));
    assert!(near.remedies.is_empty(), "{near}");
    let far = explain(1, P2pPolicy::Enabled, "loop0").unwrap();
    assert_eq!(far.path, Some(Path::Staged));
    assert!(far.remedies.iter().any(|remedy| remedy.contains("PCIe switch")), "{far}");
    let refused = explain(1, P2pPolicy::Required, "loop0").unwrap();
    assert_eq!(refused.path, None);
    assert!(
        refused.reason.contains("required") && refused.to_string().starts_with("no path"),
        "{refused}"
    );
    let json = serde_json::to_value(&refused).unwrap();
    assert_eq!(json["path"], serde_json::Value::Null);
    assert_eq!(json["attempts"].as_array().unwrap().len(), 2);
    assert_eq!((&json["size"], &json["device"]), (&10_000.into(), &1.into()));
    let ordered = explain(0, P2pPolicy::Disabled, "loop1").unwrap();
    assert_eq!(ordered.path, Some(Path::Staged));
    assert!(ordered.remedies[0].contains("policy to Enabled"), "{ordered}");

    assert_eq!(
        explain(7, P2pPolicy::Enabled, "loop0").unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    assert_eq!(
        explain(0, P2pPolicy::Enabled, "loop7").unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let host = ExplainRequest::new(hmem_core::IfaceKind::SYSTEM);
    let host = bench.paths.explain(&bench.registry, &bench.provider, &host).unwrap();
    assert_eq!((host.path, host.kind), (Some(Path::PlainHost), "system"));
    assert_eq!(bench.device.stats().live_allocations, before);
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    let owner = bench.registry.owner_of(bench.buffer(page_size()).allocation().base()).unwrap();
    assert!(
        bench
            .paths
            .remembered(&owner, domain.provider_attr(), P2pPolicy::Enabled, None, false)
            .is_none()
    );
}

/// P2P-04
#[test]
fn explanation_says_that_the_process_disabled_direct_access() {
    let provider = Loopback::builder().imports(DMA_BUF);
    let bench = Bench::with(device(), provider, DefaultPathSelector::new().disable_p2p(true));
    let request = ExplainRequest::new(hmem_iface_system::SIMULATED);
    let explanation = bench.paths.explain(&bench.registry, &bench.provider, &request).unwrap();
    assert!(explanation.p2p_disabled && explanation.path == Some(Path::Staged));
    assert!(explanation.remedies[0].contains("FI_HMEM_DISABLE_P2P"), "{explanation}");
    assert_eq!(bench.provider.nics().unwrap()[0].nic.name, "loop0");
}

/// P2P-01: the selector tries no further path after an error that every path would report.
#[test]
fn invalid_request_ends_the_search() {
    use hmem_core::Request;
    let bench =
        Bench::with(device(), Loopback::builder().imports(DMA_BUF), DefaultPathSelector::new());
    let attr = hmem_core::DomainAttr { hmem: true, ..hmem_core::DomainAttr::default() };
    let registry = std::sync::Arc::clone(&bench.registry);
    let domain =
        hmem_core::Domain::open(&bench.provider, registry, bench.paths.clone(), attr).unwrap();
    let register = |buffer| domain.submit(Request::new(buffer, path_support::REMOTE).key(7));
    let first = register(bench.buffer(page_size())).unwrap();
    let exports = bench.calls(DeviceCall::ExportDmaBuf);
    for _ in 0..2 {
        let error = register(bench.buffer(page_size())).unwrap_err().error;
        assert_eq!((error.kind(), error.trace().len()), (ErrorKind::NoKey, 1), "{error}");
    }
    assert_eq!(
        bench.calls(DeviceCall::ExportDmaBuf) - exports,
        2,
        "no other path and no probe was tried"
    );
    close(first);
    assert!(
        register(bench.buffer(page_size())).unwrap().decision().unwrap().from_cache,
        "the decision is still remembered"
    );
}
