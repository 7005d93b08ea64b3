//! Policies over every combination of device and NIC (P2P-02), checked by the NIC's record of its
//! registrations.

use std::{
    num::NonZeroUsize,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    sync::Arc,
    thread,
};

use crate::path_support::{Bench, REMOTE, close, page_size, recording::RegisteredAs, register};
use hmem_core::{
    AllocationKind, BorrowedDmaBuf, DeviceId, DmaBuf, ErrorKind, Iface, IfaceExt, IfaceKind,
    MrFlags, Path, Promise, Raw, Request,
    fabric::{self, MrAttr},
    iface::DmaBufMapping,
    path::P2pPolicy,
    provider::{Imports, Nic},
};
use hmem_iface_system::{DeviceCall, DmaBufKind, FreeDetection, P2pMatrix, Simulated};
use hmem_p2p::path::{DefaultPathSelector, FactSource, Facts};
use hmem_provider_loopback::Loopback;

/// A combination of device, NIC and policy.
#[derive(Clone, Copy, Debug)]
struct Case {
    style: FreeDetection,
    /// True for each export that the device supports, in this order: dma-bufs, dma-bufs with the
    /// PCIe mapping, and peer memory.
    exports: [bool; 3],
    reachable: bool,
    imports: Imports,
    policy: P2pPolicy,
    disabled: bool,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for bits in 0..1u32 << 10 {
            let bit = |at: u32| bits >> at & 1 == 1;
            let style = if bit(0) { FreeDetection::Callback } else { FreeDetection::Identity };
            let exports = [bit(1), bit(2), bit(3)];
            if exports[1] && !exports[0] {
                continue;
            }
            let imports = Imports {
                dma_buf: bit(5),
                pcie_mapping_first: Some(bit(6)),
                data_direct: None,
                peer_memory: bit(7),
                staged: bit(8),
            };
            for policy in P2pPolicy::ALL {
                let (reachable, disabled) = (bit(4), bit(9));
                cases.push(Self { style, exports, reachable, imports, policy, disabled });
            }
        }
        cases
    }

    /// Returns the result that the documented policies require.
    fn expected(&self) -> Result<(Path, DmaBufMapping), &'static str> {
        let [dma_buf, pcie, peer_memory] = self.exports;
        let direct = if dma_buf && self.imports.dma_buf && self.reachable {
            let mapping = if pcie && self.imports.pcie_mapping_first == Some(true) {
                DmaBufMapping::Pcie
            } else {
                DmaBufMapping::Default
            };
            Some((Path::DmaBuf, mapping))
        } else if peer_memory && self.imports.peer_memory && self.reachable {
            Some((Path::PeerMemory, DmaBufMapping::Default))
        } else {
            None
        };
        let staged = (Path::Staged, DmaBufMapping::Default);
        match (self.policy, self.disabled, direct) {
            (P2pPolicy::Required, true, _) => Err("FI_HMEM_DISABLE_P2P"),
            (P2pPolicy::Disabled, false, _) if !self.imports.staged => Err("policy to Enabled"),
            (_, true, _) if !self.imports.staged => Err("FI_HMEM_DISABLE_P2P"),
            (P2pPolicy::Disabled, ..) | (_, true, _) => Ok(staged),
            (_, _, Some(direct)) => Ok(direct),
            (P2pPolicy::Required, _, None) => Err("set the policy to Enabled"),
            (_, _, None) if self.imports.staged => Ok(staged),
            (_, _, None) => Err("make one of the paths in the trace work"),
        }
    }

    fn bench(&self) -> Bench {
        let [dma_buf, pcie, peer_memory] = self.exports;
        let matrix =
            if self.reachable { P2pMatrix::all_reachable() } else { P2pMatrix::none_reachable() };
        let device = Simulated::builder()
            .free_detection(self.style)
            .dma_buf(if dma_buf { DmaBufKind::MemFd } else { DmaBufKind::None })
            .pcie_mapping(pcie)
            .peer_memory(peer_memory)
            .p2p(matrix);
        let provider = Loopback::builder().imports(self.imports);
        Bench::with(device, provider, DefaultPathSelector::new().disable_p2p(self.disabled))
    }

    fn is_off(&self) -> bool {
        self.disabled || self.policy == P2pPolicy::Disabled
    }
}

/// P2P-02: for every combination of device, NIC and policy, the selector chooses a path that the
/// policy allows.
#[test]
fn every_combination_takes_an_allowed_path() {
    let cases = Case::all();
    assert_eq!(cases.len(), 2 * 6 * 2 * 16 * 2 * 4);
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        for part in cases.chunks(cases.len().div_ceil(threads)) {
            scope.spawn(|| part.iter().for_each(Case::takes_the_path_that_its_policy_allows));
        }
    });
}

impl Case {
    fn takes_the_path_that_its_policy_allows(&self) {
        let case = self;
        let bench = case.bench();
        let domain = bench.domain("loop0", case.policy);
        // The second round uses the remembered decision.
        for round in 0..2 {
            let outcome = register(&domain, bench.buffer(page_size()));
            let handed = bench.record.handed();
            match (case.expected(), outcome) {
                (Ok((path, mapping)), Ok(region)) => {
                    let decision = region.decision().unwrap();
                    assert_eq!(
                        (decision.path, decision.mapping),
                        (path, mapping),
                        "{case:?}: {decision}"
                    );
                    let given = match path {
                        Path::DmaBuf => {
                            handed.iter().any(|handed| matches!(handed, RegisteredAs::DmaBuf(_)))
                        }
                        Path::PeerMemory => handed.contains(&RegisteredAs::DeviceAddress),
                        _ => handed.contains(&RegisteredAs::Copies),
                    };
                    assert!(given, "{case:?}: {handed:?}");
                    close(region);
                }
                (Err(says), Err(rejected)) => {
                    let error = rejected.error;
                    let text = format!("{error:#}");
                    assert!(text.contains(says), "{case:?}: {text}");
                    let policy = if case.disabled { P2pPolicy::Disabled } else { case.policy };
                    assert_eq!(error.context_value("policy"), Some(policy.name()), "{text}");
                    assert!(
                        matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Unreachable),
                        "{case:?}: {text}"
                    );
                }
                (expected, outcome) => {
                    panic!(
                        "{case:?}, round {round}: {expected:?}, not {:?}",
                        outcome.map_err(|e| e.error)
                    )
                }
            }
            if case.policy == P2pPolicy::Required {
                assert!(
                    !handed.contains(&RegisteredAs::Copies),
                    "{case:?}: copied instead of failing"
                );
            }
            if case.is_off() {
                assert!(
                    !handed.iter().any(|handed| handed.is_device_handle()),
                    "{case:?}: {handed:?}"
                );
                let exports = bench.calls(DeviceCall::ExportDmaBuf)
                    + bench.calls(DeviceCall::ExportPeerMemory);
                assert_eq!(exports, 0, "{case:?}");
            }
        }
        assert_eq!(domain.live().regions, 0, "{case:?}");
        let stats = bench.device.stats();
        assert_eq!((stats.live_allocations, stats.live_exports), (0, 0), "{case:?}");
    }
}

/// P2P-02
///
/// A remembered path is used only under the policy for which it was found, although domains with
/// different policies share one path selector.
#[test]
fn remembered_path_holds_for_its_policy_only() {
    for disabled in [false, true] {
        let device = Simulated::builder().dma_buf(DmaBufKind::MemFd);
        let bench = Bench::with(
            device,
            Loopback::builder(),
            DefaultPathSelector::new().disable_p2p(disabled),
        );
        for _ in 0..2 {
            for policy in P2pPolicy::ALL.into_iter().chain(P2pPolicy::ALL.into_iter().rev()) {
                let domain = bench.domain("loop0", policy);
                let outcome = register(&domain, bench.buffer(page_size()));
                let path = outcome.as_ref().ok().map(|region| region.decision().unwrap().path);
                let expected = match (policy, disabled) {
                    (P2pPolicy::Required, true) => None,
                    (P2pPolicy::Disabled, _) | (_, true) => Some(Path::Staged),
                    _ => Some(Path::DmaBuf),
                };
                assert_eq!(path, expected, "{policy}, switched off for the process: {disabled}");
            }
        }
    }
}

/// P2P-02
#[test]
fn cpu_accessible_memory_is_host_pages_under_every_policy() {
    for (policy, disabled) in
        P2pPolicy::ALL.into_iter().flat_map(|policy| [(policy, false), (policy, true)])
    {
        let bench = Bench::with(
            Simulated::builder(),
            Loopback::builder(),
            DefaultPathSelector::new().disable_p2p(disabled),
        );
        let domain = bench.domain("loop0", policy);
        for kind in [AllocationKind::Host, AllocationKind::Managed] {
            for remembered in [false, true] {
                let region =
                    register(&domain, bench.buffer_of(kind, DeviceId(0), page_size())).unwrap();
                let decision = region.decision().unwrap();
                assert_eq!(
                    (decision.path, decision.from_cache),
                    (Path::PlainHost, remembered),
                    "{decision}"
                );
                let managed = decision.reason.contains("managed");
                assert_eq!(managed, kind == AllocationKind::Managed, "{decision}");
                close(region);
            }
        }
        let host = domain.register(vec![0u8; 100], REMOTE).unwrap();
        assert_eq!(host.decision().unwrap().path, Path::PlainHost);
        assert_eq!(bench.record.handed(), vec![RegisteredAs::HostPages; 5]);
    }
}

/// P2P-02
#[test]
fn application_dma_buf_is_refused_without_direct_access() {
    for (policy, disabled) in
        P2pPolicy::ALL.into_iter().flat_map(|policy| [(policy, false), (policy, true)])
    {
        let device = Simulated::builder().dma_buf(DmaBufKind::MemFd);
        let bench = Bench::with(
            device,
            Loopback::builder(),
            DefaultPathSelector::new().disable_p2p(disabled),
        );
        let domain = bench.domain("loop0", policy);
        let buffer = bench.buffer(page_size());
        let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
        let range = buffer.allocation().range;
        let export = bench.device.export_dma_buf(range, &nic, DmaBufMapping::Default).unwrap();
        let fd = export.as_fd().try_clone_to_owned().unwrap();
        let handed_fd = fd.as_raw_fd();
        let given = DmaBuf { fd, offset: export.offset, len: page_size(), base_addr: None };
        // SAFETY: the buffer is dropped after the region, and no reference to it exists.
        let memory = unsafe { Raw::new(given, Promise::ReadWrite) };
        let request = Request::new(memory, REMOTE).owner(bench.device.kind(), None);
        let region = domain.submit(request);
        let handed = bench.record.handed();
        if disabled || policy == P2pPolicy::Disabled {
            let error = region.unwrap_err().error;
            assert!(error.to_string().contains("to allow direct access"), "{error}");
            assert!(handed.is_empty(), "{handed:?}");
        } else {
            assert_eq!(region.unwrap().decision().unwrap().path, Path::DmaBuf);
            assert_eq!(handed, [RegisteredAs::DmaBuf(handed_fd)]);
        }
        bench.device.release_dma_buf(export).unwrap();
    }
}

/// A fact source in which the kernel names the exporter of every dma-buf.
#[derive(Debug)]
struct ExportedBy(Option<&'static str>);

impl FactSource for ExportedBy {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        Facts::default()
    }

    fn dma_buf_exporter(&self, _: BorrowedFd<'_>) -> Option<String> {
        self.0.map(str::to_owned)
    }
}

/// P2P-02: without direct access a NIC gets a dma-buf only if the request or the kernel says that
/// it is host memory. The simulated device's memory files have no exporter.
#[test]
fn dma_buf_of_unknown_memory_is_refused_without_direct_access() {
    let device_iface = Some(hmem_iface_system::SIMULATED);
    let (system, none) = (Some(IfaceKind::SYSTEM), MrFlags::empty());
    for (exporter, iface, flags, registers) in [
        (None, None, none, false),
        (Some("nvidia"), None, none, false),
        (Some("drm"), None, none, false),
        (Some("udmabuf"), None, none, true),
        (Some("system"), None, none, true),
        (None, system, none, true),
        (None, device_iface, MrFlags::HMEM_HOST_ALLOC, true),
        (Some("udmabuf"), device_iface, none, false),
        (Some("udmabuf"), device_iface, MrFlags::HMEM_DEVICE_ONLY, false),
    ] {
        for (policy, disabled) in [
            (P2pPolicy::Disabled, false),
            (P2pPolicy::Enabled, true),
            (P2pPolicy::Required, true),
            (P2pPolicy::Enabled, false),
        ] {
            let device = Simulated::builder().dma_buf(DmaBufKind::MemFd);
            let mut bench = Bench::with(device, Loopback::builder(), DefaultPathSelector::new());
            let paths = DefaultPathSelector::new().disable_p2p(disabled);
            bench.paths = Arc::new(paths.facts(Arc::new(ExportedBy(exporter))));
            let domain = bench.domain("loop0", policy);
            let buffer = bench.buffer(page_size());
            let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
            let range = buffer.allocation().range;
            let export = bench.device.export_dma_buf(range, &nic, DmaBufMapping::Default).unwrap();
            let (fd, offset) = (export.as_fd(), export.offset);
            let given = BorrowedDmaBuf { fd, offset, len: page_size(), base_addr: None };
            // SAFETY: the buffer is dropped after the region, and no reference to it exists.
            let memory = unsafe { Raw::new(given, Promise::ReadWrite) };
            let attr = MrAttr { iface, ..MrAttr::new(memory, REMOTE) };
            let region = fabric::regattr(&domain, &attr, MrFlags::MR_DMABUF | flags);
            let handed = bench.record.handed();
            let case = (exporter, iface, flags, policy, disabled);
            if registers || !disabled && policy != P2pPolicy::Disabled {
                assert_eq!(region.unwrap().decision().unwrap().path, Path::DmaBuf, "{case:?}");
                assert_eq!(handed, [RegisteredAs::DmaBuf(export.fd.as_raw_fd())], "{case:?}");
            } else {
                let error = region.expect_err("device memory may have reached the NIC");
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{case:?}: {error}");
                let remedy = error.remedy_text().unwrap();
                assert_eq!(remedy.contains("Request::owner"), iface.is_none(), "{case:?}: {error}");
                assert!(handed.is_empty(), "{case:?}: {handed:?}");
                assert_eq!(domain.live().regions, 0);
            }
            bench.device.release_dma_buf(export).unwrap();
        }
    }
}
