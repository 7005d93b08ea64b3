//! The test cases of the golden traces: host memory, the simulated device and CUDA.

use std::{collections::BTreeSet, path::PathBuf};

use hmem::{
    AllocationKind, DeviceId, IfaceKind,
    cuda::sys::CuResult,
    p2p::path::Facts,
    path::P2pPolicy,
    provider::Imports,
    system::{DeviceCall, DmaBufKind, P2pMatrix, SIMULATED},
};
use hmem_fake_cuda::Profile;

use crate::{
    case::{Case, Device, Memory, PAGE},
    fake,
};

const KINDS: [AllocationKind; 5] = [
    AllocationKind::Device,
    AllocationKind::Virtual,
    AllocationKind::StreamOrdered,
    AllocationKind::Host,
    AllocationKind::Managed,
];

/// Returns a NIC's import abilities from letters: `d`ma-buf, `P`CIe mapping first, `p`eer memory,
/// `s`taged.
pub(crate) fn imports(letters: &str) -> Imports {
    Imports {
        dma_buf: letters.contains('d'),
        pcie_mapping_first: Some(letters.contains('P')),
        data_direct: None,
        peer_memory: letters.contains('p'),
        staged: letters.contains('s'),
    }
}

fn modules(names: &[&str]) -> Facts {
    let modules = names.iter().map(|name| (*name).to_owned()).collect();
    Facts { modules: Some(modules), ..Facts::default() }
}

/// Returns the facts of a machine with NVIDIA's closed kernel modules.
fn closed_modules() -> Facts {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("closed-modules-of-traces");
    let folder = root.join("proc/driver/nvidia");
    std::fs::create_dir_all(&folder).expect("a folder of the tests");
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n";
    std::fs::write(folder.join("version"), version).expect("a file of the tests");
    Facts { root: Some(root), ..Facts::default() }
}

pub(crate) fn all() -> Vec<Case> {
    [host(), simulated(), refused_by_the_device(), refused_by_the_nic(), several_nics(), cuda()]
        .concat()
}

fn host() -> Vec<Case> {
    let of = |memory| Case { memory, ..Case::default() };
    let part = |offset, len| of(Memory::Host { offset, len });
    let page = || part(0, PAGE);
    let mut cases = vec![part(0, 1), part(PAGE - 1, 2), part(17, 5 * PAGE)];
    cases.extend(P2pPolicy::ALL.map(|policy| Case { policy, ..page() }));
    cases.extend(["", "d", "dPps"].map(|letters| Case { imports: imports(letters), ..page() }));
    for (name, claim) in
        [("system", IfaceKind::SYSTEM), ("simulated", SIMULATED), ("cuda", IfaceKind::CUDA)]
    {
        cases.push(Case { what: format!("named {name}"), claim: Some(claim), ..page() });
    }
    cases.extend([
        of(Memory::HostTwice),
        of(Memory::Mixed),
        of(Memory::Part(AllocationKind::Host)),
    ]);
    for policy in P2pPolicy::ALL {
        for letters in ["ds", "s", ""] {
            cases.push(Case { imports: imports(letters), policy, ..of(Memory::File) });
        }
    }
    for code in [1, 5, 9, 11, 12, 13, 14, 19, 22, 28, 38, 95] {
        for memory in [Memory::Host { offset: 0, len: PAGE }, Memory::HostTwice, Memory::File] {
            let what = format!("NIC answers {code}");
            cases.push(Case { what, nic_refuses: vec![code], ..of(memory) });
        }
    }
    cases
}

fn simulated() -> Vec<Case> {
    let mut cases = Vec::new();
    let with = |what: &str, build| Case {
        what: what.into(),
        device: Device::Simulated(build),
        ..Case::default()
    };
    for kind in KINDS {
        for letters in ["ds", "dPs", "dps", "ps", "s", "d", ""] {
            for policy in P2pPolicy::ALL {
                cases.push(Case {
                    memory: Memory::Of(kind),
                    imports: imports(letters),
                    policy,
                    ..with("with peer memory", |builder| builder.peer_memory(true))
                });
            }
        }
    }
    let others = [
        with("no PCIe mapping", |builder| builder.pcie_mapping(false)),
        with("no dma-bufs", |builder| builder.dma_buf(DmaBufKind::None)),
        with("out of reach", |builder| builder.p2p(P2pMatrix::none_reachable()).peer_memory(true)),
        Case { p2p_off: true, ..with("direct access off", |builder| builder) },
        Case { claim: Some(SIMULATED), ..with("named simulated", |builder| builder) },
        Case { claim: Some(IfaceKind::SYSTEM), ..with("named system", |builder| builder) },
        with("segments of a page", |builder| builder.segment_len(PAGE)),
    ];
    for case in others {
        for policy in [P2pPolicy::Enabled, P2pPolicy::Required] {
            for memory in [
                Memory::Of(AllocationKind::Device),
                Memory::Of(AllocationKind::Virtual),
                Memory::NotExportable(AllocationKind::Device),
                Memory::NotExportable(AllocationKind::Virtual),
                Memory::Two(AllocationKind::Virtual),
                Memory::Part(AllocationKind::Virtual),
                Memory::Freed,
                Memory::PastTheEnd,
                Memory::File,
            ] {
                cases.push(Case { memory, policy, imports: imports("dPps"), ..case.clone() });
            }
        }
    }
    cases
}

fn refused_by_the_device() -> Vec<Case> {
    let mut cases = Vec::new();
    const MANY: &[i32] = &[1, 5, 12, 13, 14, 19, 22, 24, 28, 38, 95, 110, 121, 524];
    for (call, numbers, codes) in [
        (DeviceCall::ExportDmaBuf, 1..=1, MANY),
        (DeviceCall::ExportDmaBuf, 2..=2, &[12, 95]),
        (DeviceCall::CreateFd, 1..=2, &[12]),
        (DeviceCall::ReleaseDmaBuf, 1..=2, &[5]),
        (DeviceCall::Segments, 1..=2, &[5, 95]),
        (DeviceCall::ExportPeerMemory, 1..=2, &[5, 95]),
        // Only the first query fails here, since the number of queries may change.
        (DeviceCall::Query, 1..=1, &[5]),
        (DeviceCall::Devices, 1..=1, &[5]),
    ] {
        for (code, nth) in codes.iter().flat_map(|code| numbers.clone().map(move |n| (*code, n))) {
            cases.push(Case {
                what: format!("{} {nth} answers {code}", call.name()),
                device: Device::Simulated(|builder| builder.peer_memory(true).segment_len(PAGE)),
                memory: Memory::Of(AllocationKind::Virtual),
                imports: imports(if call == DeviceCall::ExportPeerMemory { "ps" } else { "dPps" }),
                device_refuses: Some((call, nth, code)),
                ..Case::default()
            });
        }
    }
    cases
}

fn refused_by_the_nic() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [AllocationKind::Device, AllocationKind::Host] {
        for code in [1, 5, 9, 11, 12, 13, 14, 19, 22, 28, 38, 95, 121, 524] {
            for count in if [12, 95].contains(&code) { [1, 4].as_slice() } else { &[1] } {
                cases.push(Case {
                    what: format!("NIC answers {code}, {count} times"),
                    device: Device::Simulated(|builder| builder.peer_memory(true)),
                    memory: Memory::Of(kind),
                    imports: imports("dPps"),
                    nic_refuses: vec![code; *count],
                    ..Case::default()
                });
            }
        }
    }
    let kernel = |major, minor| Facts { kernel: Some((major, minor)), ..Facts::default() };
    let options = BTreeSet::from(["PCI_P2PDMA".to_owned()]);
    for (what, facts) in [
        ("kernel 5.4", kernel(5, 4)),
        ("kernel 6.12", kernel(6, 12)),
        ("closed modules", closed_modules()),
        ("nvidia alone", modules(&["nvidia"])),
        ("nvidia_peermem", modules(&["nvidia_peermem"])),
        ("memlock", Facts { memlock: Some(65536), ..Facts::default() }),
        ("no memlock", Facts { memlock: Some(u64::MAX), ..Facts::default() }),
        ("ACS", Facts { acs_redirects: Some(true), ..Facts::default() }),
        ("IOMMU", Facts { iommu_translates: Some(true), ..Facts::default() }),
        ("BAR of 256 MiB", Facts { bar: Some(256 << 20), ..Facts::default() }),
        ("P2PDMA only", Facts { kernel_options: Some(options), ..Facts::default() }),
    ] {
        for (kind, letters, code) in [
            (AllocationKind::Device, "dps", 95),
            (AllocationKind::Device, "ps", 14),
            (AllocationKind::Device, "ds", 524),
            (AllocationKind::Host, "ds", 12),
        ] {
            cases.push(Case {
                what: format!("{what}, NIC answers {code}"),
                device: Device::Simulated(|builder| builder.peer_memory(true)),
                memory: Memory::Of(kind),
                imports: imports(letters),
                facts: facts.clone(),
                nic_refuses: vec![code],
                ..Case::default()
            });
        }
    }
    cases
}

fn several_nics() -> Vec<Case> {
    let mut cases = Vec::new();
    let blocked: fn(_) -> _ = |builder: hmem::system::SimulatedBuilder| {
        let matrix = P2pMatrix::all_reachable().block(DeviceId(0), "loop1");
        builder.segment_len(PAGE).p2p(matrix)
    };
    for policy in P2pPolicy::ALL {
        for memory in [
            Memory::Of(AllocationKind::Virtual),
            Memory::NotExportable(AllocationKind::Virtual),
            Memory::Host { offset: 0, len: PAGE },
            Memory::File,
        ] {
            for (what, code) in [("two NICs", None), ("two NICs, one answers 12", Some(12))] {
                cases.push(Case {
                    what: what.into(),
                    device: Device::Simulated(blocked),
                    memory,
                    policy,
                    nics: &["loop0", "loop1"],
                    nic_refuses: code.into_iter().collect(),
                    ..Case::default()
                });
            }
        }
    }
    cases
}

fn cuda() -> Vec<Case> {
    let on =
        |profile| Case { device: Device::Fake(fake::Profile::Cuda(profile)), ..Case::default() };
    let mut cases = Vec::new();
    for profile in Profile::all() {
        for kind in KINDS {
            for letters in ["ds", "dPps", "ps"] {
                for policy in [P2pPolicy::Enabled, P2pPolicy::Required] {
                    let memory = Memory::Of(kind);
                    let imports = imports(letters);
                    cases.push(Case { memory, imports, policy, ..on(profile.clone()) });
                }
            }
        }
        for handles in [&[true] as &[_], &[false], &[true; 3], &[true, false], &[false, true]] {
            let memory = Memory::Handles(handles);
            cases.push(Case { memory, imports: imports("dPs"), ..on(profile.clone()) });
        }
    }
    let newest = Profile::default;
    const EXPORT: &str = "cuMemGetHandleForAddressRange";
    for (what, profile) in [
        ("one dma-buf per handle", Profile { spanning_exports: false, ..newest() }),
        ("no PCIe mapping", Profile { pcie_mapping: false, ..newest() }),
        ("no RDMA", Profile { rdma: false, ..newest() }),
        ("no RDMA with VMM", Profile { rdma_with_vmm: false, ..newest() }),
        ("no export function", Profile { absent: vec![EXPORT], ..newest() }),
        ("memory made by VMM", Profile { allocates_by_vmm: true, ..newest() }),
        ("queries need a context", Profile { queries_need_context: true, ..newest() }),
    ] {
        for memory in [
            Memory::Of(AllocationKind::Device),
            Memory::Of(AllocationKind::Virtual),
            Memory::Handles(if profile.rdma_with_vmm { &[true; 2] } else { &[false; 2] }),
        ] {
            for letters in ["dPs", "ps"] {
                let imports = imports(letters);
                cases.push(Case { what: what.into(), memory, imports, ..on(profile.clone()) });
            }
        }
    }
    for memory in [
        Memory::Two(AllocationKind::Device),
        Memory::Part(AllocationKind::Device),
        Memory::Freed,
        Memory::PastTheEnd,
        Memory::Host { offset: 0, len: PAGE },
        Memory::Mixed,
    ] {
        cases.push(Case { memory, ..on(newest()) });
    }
    for (symbol, code) in [
        (EXPORT, CuResult::CUDA_ERROR_NOT_SUPPORTED),
        (EXPORT, CuResult::CUDA_ERROR_INVALID_VALUE),
        (EXPORT, CuResult::CUDA_ERROR_OUT_OF_MEMORY),
        (EXPORT, CuResult::CUDA_ERROR_NOT_PERMITTED),
        (EXPORT, CuResult::CUDA_ERROR_NOT_INITIALIZED),
        (EXPORT, CuResult::CUDA_ERROR_DEINITIALIZED),
        (EXPORT, CuResult::CUDA_ERROR_INVALID_CONTEXT),
        (EXPORT, CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        (EXPORT, CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE),
        (EXPORT, CuResult::CUDA_ERROR_NO_DEVICE),
        (EXPORT, CuResult::CUDA_ERROR_ILLEGAL_ADDRESS),
        ("cuMemGetAddressRange_v2", CuResult::CUDA_ERROR_NOT_FOUND),
        ("cuPointerGetAttributes", CuResult::CUDA_ERROR_INVALID_CONTEXT),
        ("cuPointerGetAttributes", CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE),
        ("cuPointerSetAttribute", CuResult::CUDA_ERROR_NOT_SUPPORTED),
    ] {
        for (kind, letters) in [(AllocationKind::Device, "dPps"), (AllocationKind::Virtual, "ds")] {
            cases.push(Case {
                what: format!("{symbol} answers {}", code.0),
                memory: Memory::Of(kind),
                imports: imports(letters),
                driver_refuses: Some((symbol, 1, code.0)),
                ..on(newest())
            });
        }
    }
    let closed = Profile::named("550-closed").expect("a profile");
    let small_bar = Facts { bar: Some(256 << 20), ..Facts::default() };
    let out_of_memory = (EXPORT, 1, CuResult::CUDA_ERROR_OUT_OF_MEMORY.0);
    let no_device = (EXPORT, 1, CuResult::CUDA_ERROR_INVALID_DEVICE.0);
    let unsupported = (EXPORT, 1, CuResult::CUDA_ERROR_NOT_SUPPORTED.0);
    let invalid = (EXPORT, 0, CuResult::CUDA_ERROR_INVALID_VALUE.0);
    let with =
        |what: &str, letters| Case { what: what.into(), imports: imports(letters), ..on(newest()) };
    let not_loaded = Case { nic_refuses: vec![14], ..with("no client, NIC answers 14", "ps") };
    let loaded = Case { nic_refuses: vec![14], ..with("nvidia_peermem, NIC answers 14", "ps") };
    cases.extend([
        Case { what: "closed modules".into(), facts: closed_modules(), ..on(closed) },
        Case { driver_refuses: Some(out_of_memory), facts: small_bar, ..with("small BAR", "ds") },
        Case {
            memory: Memory::Of(AllocationKind::Virtual),
            driver_refuses: Some(invalid),
            ..with("no export of the allocation", "ds")
        },
        Case { driver_refuses: Some(no_device), ..with("invalid device", "ds") },
        Case { driver_refuses: Some(unsupported), ..with("unsupported", "ds") },
        Case { facts: modules(&["nvidia"]), ..not_loaded },
        Case { facts: modules(&["nvidia_peermem"]), ..loaded },
        Case {
            memory: Memory::FreedAfterQuery,
            claim: Some(IfaceKind::CUDA),
            ..with("named cuda", "ds")
        },
    ]);
    cases
}
