//! The order of the direct paths (LIFE-06): a setting of the domain, which the decision names.

use std::{os::fd::AsFd, sync::Arc};

use crate::path_support::{ALL_IMPORTS, Bench, REMOTE, page_size};
use hmem_core::IfaceExt;
use hmem_core::{
    Allocation, Batch, Decision, DmaBuf, Domain, DomainAttr, Errno, ErrorKind, IfaceKind, Path,
    Promise, Raw, Request,
    iface::DmaBufMapping,
    path::{DirectPath, P2pPolicy},
    provider::{Imports, Nic},
};
use hmem_iface_system::{DeviceCall, DmaBufKind, SIMULATED, Simulated};
use hmem_p2p::path::ExplainRequest;

const DMA_BUF: DirectPath = DirectPath::DmaBuf(DmaBufMapping::Default);
const PCIE: DirectPath = DirectPath::DmaBuf(DmaBufMapping::Pcie);
const PEER: DirectPath = DirectPath::PeerMemory;

/// Creates a device and NICs that have every path.
fn bench() -> Bench {
    bench_for(ALL_IMPORTS)
}

fn bench_for(imports: Imports) -> Bench {
    let device = Simulated::builder().dma_buf(DmaBufKind::MemFd).peer_memory(true);
    Bench::new(device.pcie_mapping(true), imports)
}

fn domain(bench: &Bench, p2p: P2pPolicy, paths: &[DirectPath]) -> Domain {
    let nic = Some("loop0".to_owned());
    let attr = DomainAttr { nic, p2p, direct_paths: Some(paths.to_vec()), ..DomainAttr::default() };
    bench.domain_with(attr).expect("open a domain")
}

fn decided(bench: &Bench, domain: &Domain) -> Arc<Decision> {
    let region = domain.register(bench.buffer(page_size()), REMOTE).expect("registered");
    Arc::clone(region.decision().expect("decided"))
}

fn tried(decision: &Decision) -> Vec<(Path, bool)> {
    decision.attempts.iter().map(|attempt| (attempt.path, attempt.driver_called)).collect()
}

/// LIFE-06
#[test]
fn first_listed_path_that_works_is_used() {
    let default = bench();
    let found = decided(&default, &default.domain("loop0", P2pPolicy::Enabled));
    assert_eq!((found.path, found.mapping), (Path::DmaBuf, DmaBufMapping::Pcie));
    assert!(found.direct_paths.is_none() && !found.to_string().contains("direct_paths"), "{found}");
    for (paths, path, mapping) in [
        (&[PEER, DMA_BUF][..], Path::PeerMemory, DmaBufMapping::Default),
        (&[DMA_BUF, PCIE], Path::DmaBuf, DmaBufMapping::Default),
        (&[PCIE, PEER], Path::DmaBuf, DmaBufMapping::Pcie),
    ] {
        let bench = bench();
        let domain = domain(&bench, P2pPolicy::Enabled, paths);
        // The second registration uses the remembered path.
        for _ in 0..2 {
            let found = decided(&bench, &domain);
            assert_eq!((found.path, found.mapping), (path, mapping), "{found}");
            assert_eq!(found.attempts.len(), 1, "{found}");
        }
    }
}

/// LIFE-06
#[test]
fn refused_path_is_followed_by_the_next_in_the_list() {
    let bench = bench();
    let domain = domain(&bench, P2pPolicy::Enabled, &[PEER, PCIE, DMA_BUF]);
    bench.device.faults().fail_next(DeviceCall::ExportPeerMemory, Errno(22));
    bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(22));
    let found = decided(&bench, &domain);
    let expected = [(Path::PeerMemory, true), (Path::DmaBuf, true), (Path::DmaBuf, true)];
    assert_eq!(tried(&found), expected, "{found}");
    assert_eq!(found.mapping, DmaBufMapping::Default);
}

/// LIFE-06
#[test]
fn path_that_the_list_leaves_out_is_not_tried() {
    let bench = bench();
    bench.device.faults().fail_always(DeviceCall::ExportPeerMemory, Errno(95));
    let found = decided(&bench, &domain(&bench, P2pPolicy::Enabled, &[PEER]));
    assert_eq!(bench.calls(DeviceCall::ExportDmaBuf), 0);
    let expected = [(Path::PeerMemory, true), (Path::DmaBuf, false), (Path::Staged, true)];
    assert_eq!(tried(&found), expected, "{found}");
    assert_eq!(found.reason, "every direct path that the domain lists was refused");
    let left_out = found.attempts[1].to_string();
    for word in ["leaves it out", "DomainAttr::direct_paths", "direct_paths=peer-memory"] {
        assert!(left_out.contains(word), "{left_out}");
    }

    let required = domain(&bench, P2pPolicy::Required, &[PEER]);
    let error = required.register(bench.buffer(page_size()), REMOTE).unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("no direct path that the domain lists works"), "{error}");
    assert_eq!(bench.calls(DeviceCall::ExportDmaBuf), 0);
}

/// LIFE-06
#[test]
fn listed_path_that_the_nic_lacks_is_recorded_once() {
    let bench = bench_for(Imports { dma_buf: false, ..ALL_IMPORTS });
    let found = decided(&bench, &domain(&bench, P2pPolicy::Enabled, &[PCIE, DMA_BUF, PEER]));
    assert_eq!(tried(&found), [(Path::DmaBuf, false), (Path::PeerMemory, true)], "{found}");
}

/// LIFE-06
#[test]
fn empty_list_leaves_staged_copies_or_a_refusal() {
    let bench = bench();
    let direct =
        || bench.calls(DeviceCall::ExportDmaBuf) + bench.calls(DeviceCall::ExportPeerMemory);
    let found = decided(&bench, &domain(&bench, P2pPolicy::Enabled, &[]));
    assert_eq!((found.path, &*found.reason), (Path::Staged, "the domain lists no direct path"));
    let required = domain(&bench, P2pPolicy::Required, &[]);
    let error = required.register(bench.buffer(page_size()), REMOTE).unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(direct(), 0);

    // Several NICs: the selector must not probe paths that the list leaves out.
    let domains =
        [domain(&bench, P2pPolicy::Enabled, &[]), domain(&bench, P2pPolicy::Enabled, &[])];
    bench.paths.forget();
    let (buffer, allocated) = (bench.buffer(page_size()), bench.calls(DeviceCall::CreateMemory));
    let nics = domains.each_ref();
    let request = Request::new(buffer, REMOTE);
    let shared = Batch::on(&nics).add(request).register().expect("staged");
    assert_eq!((shared.regions().len(), direct()), (2, 0));
    assert_eq!(bench.calls(DeviceCall::CreateMemory), allocated, "no page was probed");
}

/// LIFE-06
#[test]
fn path_listed_twice_is_refused_when_the_domain_is_opened() {
    let bench = bench();
    let twice = Some(vec![PEER, DMA_BUF, PEER]);
    let attr = DomainAttr { direct_paths: twice, ..DomainAttr::default() };
    let error = bench.domain_with(attr).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.context_value("twice"), Some("peer-memory"), "{error}");
}

/// LIFE-06
#[test]
fn domains_with_other_lists_remember_other_paths() {
    let bench = bench();
    let lists = [&[PEER, DMA_BUF][..], &[DMA_BUF, PEER], &[]];
    let domains = lists.map(|paths| domain(&bench, P2pPolicy::Enabled, paths));
    for remembered in [false, true] {
        for (domain, path) in domains.iter().zip([Path::PeerMemory, Path::DmaBuf, Path::Staged]) {
            let found = decided(&bench, domain);
            assert_eq!((found.path, found.from_cache), (path, remembered), "{found}");
        }
    }
}

/// LIFE-06
#[test]
fn order_holds_for_each_nic_of_a_shared_export() {
    let bench = bench();
    let lists = [&[PCIE][..], &[DMA_BUF, PCIE], &[PEER, PCIE]];
    let domains = lists.map(|paths| domain(&bench, P2pPolicy::Enabled, paths));
    for _ in 0..2 {
        let nics = domains.each_ref();
        let request = Request::new(bench.buffer(page_size()), REMOTE);
        let shared = Batch::on(&nics).add(request).register().expect("registered");
        let found = shared.regions().iter().map(|region| {
            let decision = region.decision().expect("decided");
            (decision.path, decision.mapping)
        });
        let expected = [
            (Path::DmaBuf, DmaBufMapping::Pcie),
            (Path::DmaBuf, DmaBufMapping::Default),
            (Path::PeerMemory, DmaBufMapping::Default),
        ];
        assert!(found.eq(expected));
    }
}

/// LIFE-06
#[test]
fn decision_and_explanation_name_the_list() {
    let bench = bench();
    let paths = vec![PEER, DMA_BUF];
    let found = decided(&bench, &domain(&bench, P2pPolicy::Enabled, &paths));
    assert_eq!(found.direct_paths.as_ref(), Some(&paths));
    assert!(
        found.to_string().contains("policy enabled, direct_paths peer-memory,dma-buf"),
        "{found}"
    );
    let json = serde_json::to_value(&*found).expect("JSON");
    assert_eq!(json["direct_paths"], serde_json::json!(["peer-memory", "dma-buf"]));

    let request = ExplainRequest::new(SIMULATED).direct_paths(paths);
    let explanation = bench.paths.explain(&bench.registry, &bench.provider, &request);
    let explanation = explanation.expect("explained");
    assert_eq!(explanation.path, Some(Path::PeerMemory));
    let text = explanation.to_string();
    assert!(text.contains("policy enabled, direct_paths peer-memory,dma-buf"), "{text}");
    let json = serde_json::to_value(&explanation).expect("JSON");
    assert_eq!(json["direct_paths"], serde_json::json!(["peer-memory", "dma-buf"]));
}

/// LIFE-06
#[test]
fn application_dma_buf_of_a_device_is_refused_if_the_list_leaves_dma_bufs_out() {
    let bench = bench();
    let buffer = bench.buffer(page_size());
    let Allocation { range, .. } = *buffer.allocation();
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let export = bench.device.export_dma_buf(range, &nic, DmaBufMapping::Default).expect("export");
    let register = |paths: &[DirectPath], iface| {
        let fd = export.as_fd().try_clone_to_owned().expect("a descriptor");
        let given = DmaBuf { fd, offset: export.offset, len: page_size(), base_addr: None };
        // SAFETY: the buffer is dropped after the region, and no reference to it exists.
        let memory = unsafe { Raw::new(given, Promise::ReadWrite) };
        let domain = domain(&bench, P2pPolicy::Enabled, paths);
        domain.submit(Request::new(memory, REMOTE).owner(iface, None))
    };
    let error = register(&[PEER], SIMULATED).unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("leaves dma-bufs out"), "{error}");
    assert!(register(&[PEER, PCIE], SIMULATED).is_ok());
    assert!(register(&[PEER], IfaceKind::SYSTEM).is_ok(), "host memory has no direct path");
}

/// LIFE-06
#[test]
fn lists_are_parsed_by_name_and_wrong_ones_are_typed_errors() {
    let parsed = DirectPath::parse_list("dma-buf-pcie, dma-buf,peer-memory").expect("a list");
    assert_eq!(parsed, [PCIE, DMA_BUF, PEER]);
    assert_eq!(DirectPath::list(&parsed), "dma-buf-pcie,dma-buf,peer-memory");
    assert_eq!(DirectPath::parse_list(&DirectPath::list(&[])).expect("an empty list"), []);
    for wrong in ["", "dmabuf", "dma-buf,", "dma-buf;peer-memory", "peer-memory,peer-memory"] {
        let error = DirectPath::parse_list(wrong).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{wrong}: {error}");
        assert!(error.remedy_text().is_some(), "{wrong}: {error}");
    }
}
