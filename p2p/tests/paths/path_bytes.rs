//! Transfers give equal bytes on every path and under every policy (P2P-06). Atomics on staged
//! memory are refused with the reason (BNC-03).

use crate::path_support::{
    ALL_IMPORTS, Bench, REMOTE, page_size,
    wire::{LOCAL, Wire},
};
use hmem_core::{
    AllocationKind, Decision, DeviceId, Domain, ErrorKind, Memory, Path, Region, RemoteKey,
    iface::DmaBufMapping, path::P2pPolicy, provider::Imports,
};
use hmem_iface_system::{DmaBufKind, P2pMatrix, Simulated, SimulatedBuilder};
use hmem_provider_loopback::{Loopback, Progress};

/// Returns the length of the memory in bytes.
fn memory_len() -> usize {
    73 * page_size() as usize + 992
}

/// A path, the kind of memory it reaches, and the setup that selects it.
struct PathSetup {
    kind: AllocationKind,
    expected: (Path, DmaBufMapping),
    device: fn(SimulatedBuilder) -> SimulatedBuilder,
    imports: Imports,
    policies: &'static [P2pPolicy],
}

const DIRECT: &[P2pPolicy] = &[P2pPolicy::Enabled, P2pPolicy::Preferred, P2pPolicy::Required];
const COPIES: &[P2pPolicy] = &[P2pPolicy::Enabled, P2pPolicy::Preferred];
const DEFAULT: Imports = Imports { pcie_mapping_first: Some(false), ..ALL_IMPORTS };

fn blocked(device: SimulatedBuilder) -> SimulatedBuilder {
    device.p2p(P2pMatrix::none_reachable())
}

fn setups() -> Vec<PathSetup> {
    let setup = |kind, path, policies| PathSetup {
        kind,
        expected: (path, DmaBufMapping::Default),
        device: |device| device,
        imports: DEFAULT,
        policies,
    };
    let peer = Imports { dma_buf: false, ..DEFAULT };
    let pcie = (Path::DmaBuf, DmaBufMapping::Pcie);
    let mut setups = vec![
        setup(AllocationKind::System, Path::PlainHost, &P2pPolicy::ALL),
        setup(AllocationKind::Host, Path::PlainHost, &P2pPolicy::ALL),
        setup(AllocationKind::Managed, Path::PlainHost, &P2pPolicy::ALL),
    ];
    for kind in [AllocationKind::Device, AllocationKind::StreamOrdered, AllocationKind::Virtual] {
        setups.push(setup(kind, Path::DmaBuf, DIRECT));
        setups.push(PathSetup {
            expected: pcie,
            imports: ALL_IMPORTS,
            ..setup(kind, Path::DmaBuf, DIRECT)
        });
        setups.push(PathSetup { imports: peer, ..setup(kind, Path::PeerMemory, DIRECT) });
        setups.push(setup(kind, Path::Staged, &[P2pPolicy::Disabled]));
        setups.push(PathSetup { device: blocked, ..setup(kind, Path::Staged, COPIES) });
    }
    setups
}

/// Calls `play` for each path and policy. `play` gets a connected initiator, the registered target,
/// and the key of the target's region.
fn over_every_path(mut play: impl FnMut(&Wire<'_>, &Target, &RemoteKey)) {
    for setup in setups() {
        for policy in setup.policies {
            for progress in [Progress::ByHand, Progress::Thread] {
                let device = Simulated::builder()
                    .dma_buf(DmaBufKind::MemFd)
                    .peer_memory(true)
                    .segment_len(16 * page_size());
                let provider =
                    Loopback::builder().imports(setup.imports).progress(progress).mr_iov_limit(64);
                let bench = Bench::with(
                    (setup.device)(device),
                    provider,
                    hmem_p2p::path::DefaultPathSelector::new(),
                );
                let (near, far) = (bench.domain("loop0", *policy), bench.domain("loop0", *policy));
                // The second round uses the remembered decision.
                for _ in 0..2 {
                    let target = Target::register(&bench, &far, setup.kind);
                    let decision = target.decision();
                    assert_eq!((decision.path, decision.mapping), setup.expected, "{decision}");
                    let wire = Wire::new(&near, &far, memory_len());
                    let key = target.key();
                    play(&wire, &target, &key);
                }
            }
        }
    }
}

/// The registered target of a transfer: device or host memory.
enum Target {
    Host(Region<Vec<u8>>),
    Device(Region<hmem_core::DeviceBuffer>),
}

impl Target {
    fn register(bench: &Bench, domain: &Domain, kind: AllocationKind) -> Self {
        let access = REMOTE | LOCAL;
        if kind == AllocationKind::System {
            return Self::Host(domain.register(vec![0u8; memory_len()], access).expect("register"));
        }
        let buffer = bench.buffer_of(kind, DeviceId(0), memory_len() as u64);
        Self::Device(domain.register(buffer, access).expect("register"))
    }

    fn decision(&self) -> &Decision {
        match self {
            Self::Host(region) => region.decision().expect("registered"),
            Self::Device(region) => region.decision().expect("registered"),
        }
    }

    fn key(&self) -> RemoteKey {
        match self {
            Self::Host(region) => region.key().expect("key"),
            Self::Device(region) => region.key().expect("key"),
        }
    }

    fn slice(&self, offset: u64, len: u64) -> hmem_core::RegionSlice {
        match self {
            Self::Host(region) => region.slice(offset, len).expect("inside"),
            Self::Device(region) => region.slice(offset, len).expect("inside"),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        fn all<B: Memory>(region: &Region<B>) -> Vec<u8> {
            let mut bytes = vec![0; memory_len()];
            region.read(0, &mut bytes).expect("inside");
            bytes
        }
        match self {
            Self::Host(region) => all(region),
            Self::Device(region) => all(region),
        }
    }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + (at >> 8) * 7 + seed) as u8).collect()
}

/// P2P-06
#[test]
fn every_path_and_policy_ends_with_the_same_bytes() {
    let mut ends: Option<Vec<u8>> = None;
    over_every_path(|wire, target, key| {
        let mut model = vec![0u8; memory_len()];
        // Lengths around pages, segments and chunks, at unaligned offsets.
        let page = page_size() as usize;
        let parts = [
            (0, 1),
            (1, page - 1),
            (page - 1, 2 * page + 1),
            (16 * page - 1, 2),
            (14 * page + 2657, 36 * page + 2545),
            (model.len() - 1, 1),
            (7, 0),
        ];
        for (seed, (at, len)) in parts.into_iter().enumerate() {
            let bytes = pattern(seed, len);
            assert_eq!(wire.push(key, at as u64, &bytes).expect("write"), len as u64);
            model[at..at + len].copy_from_slice(&bytes);
        }
        let message = pattern(99, page + 904);
        let at = 32 * page - 1;
        wire.send(target.slice(at as u64, message.len() as u64), &message).expect("send");
        model[at..at + message.len()].copy_from_slice(&message);
        for (at, len) in [(0, model.len()), (page + 1, 17 * page + 368), (32 * page - 2, 3)] {
            assert!(
                wire.pull(key, at as u64, len).expect("read") == model[at..at + len],
                "read at {at}"
            );
        }
        assert!(target.bytes() == model, "{}", target.decision());
        let first = ends.get_or_insert_with(|| model.clone());
        assert!(*first == model);
        assert_eq!(
            wire.push(key, memory_len() as u64, &[1]).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
    });
}

/// BNC-03
#[test]
fn atomics_are_refused_on_staged_memory_only() {
    let (mut refused, mut worked) = (0, 0);
    over_every_path(|wire, target, key| {
        wire.push(key, page_size(), &40u64.to_ne_bytes()).expect("write");
        let outcome = wire.add(key, page_size(), 2);
        let bytes = target.bytes()[page_size() as usize..][..8].try_into().expect("eight bytes");
        let value = u64::from_ne_bytes(bytes);
        match target.decision().path {
            Path::Staged => {
                let error = outcome.expect_err("an atomic was emulated");
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                let text = format!("{error:#}");
                assert!(text.contains("staged") && text.contains("dma-buf"), "{text}");
                assert_eq!(value, 40, "no byte changed");
                assert!(
                    target.decision().reason.contains("direct"),
                    "and why it is staged: {}",
                    target.decision()
                );
                refused += 1;
            }
            // The software NIC reaches device addresses through the iface's copies.
            Path::PeerMemory => {
                assert_eq!(
                    outcome.expect_err("an atomic was emulated").kind(),
                    ErrorKind::Unsupported
                );
                assert_eq!(value, 40);
            }
            Path::PlainHost | Path::DmaBuf => {
                outcome.expect("an atomic");
                assert_eq!(value, 42);
                worked += 1;
            }
            other => panic!("a path unknown to this test: {other}"),
        }
        // The endpoint still works.
        wire.push(key, 0, &[1]).expect("write");
    });
    assert!(refused > 0 && worked > 0);
}
