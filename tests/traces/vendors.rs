//! The test cases of the golden traces for vendors other than NVIDIA.

use std::collections::BTreeSet;

use hmem::{
    AllocationKind, IfaceKind, neuron::sys::NrtStatus, p2p::path::Facts, path::P2pPolicy,
    rocr::sys::HsaStatus, ze::sys::ZeResult,
};
use hmem_fake_accelerators::Profile as Accelerators;
use hmem_fake_rocr::Profile as Rocr;
use hmem_fake_ze::Profile as LevelZero;

use crate::{
    case::{Case, Device, Memory, PAGE},
    fake::Profile,
    simulated_and_cuda::imports,
};

pub(crate) fn all() -> Vec<Case> {
    [rocr(), level_zero(), accelerators()].concat()
}

fn on(profile: Profile) -> Case {
    Case { device: Device::Fake(profile), ..Case::default() }
}

/// Returns a test case for each kind of memory, each NIC and each of the policies Enabled and
/// Required.
fn kinds(case: &Case, kinds: &[AllocationKind], nics: &[&str]) -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in kinds {
        for letters in nics {
            for policy in [P2pPolicy::Enabled, P2pPolicy::Required] {
                let (memory, imports) = (Memory::Of(*kind), imports(letters));
                cases.push(Case { memory, imports, policy, ..case.clone() });
            }
        }
    }
    cases
}

/// Returns test cases with memory other than one live allocation of the iface.
fn odd_memory(case: &Case, iface: IfaceKind) -> Vec<Case> {
    let memory = [
        Memory::Two(AllocationKind::Device),
        Memory::Part(AllocationKind::Device),
        Memory::Freed,
        Memory::PastTheEnd,
        Memory::Mixed,
    ];
    let mut cases: Vec<_> =
        memory.into_iter().map(|memory| Case { memory, ..case.clone() }).collect();
    for memory in [Memory::Freed, Memory::Host { offset: 0, len: PAGE }] {
        let what = format!("named {iface}");
        cases.push(Case { what, memory, claim: Some(iface), ..case.clone() });
    }
    cases
}

fn rocr() -> Vec<Case> {
    use AllocationKind::{Device, Host, Virtual};
    let on = |profile| on(Profile::Rocr(profile));
    let release = |name| Rocr::named(name).expect("a release");
    let newest = Rocr::default;
    let mut cases = kinds(&on(release("5.2")), &[Device, Host], &["ds", "dPps", "d"]);
    for profile in [release("6.4"), newest()] {
        cases.extend(kinds(&on(profile), &[Device, Virtual, Host], &["ds", "dPps", "s"]));
    }
    cases.extend(odd_memory(&on(newest()), IfaceKind::ROCR));
    for memory in [Memory::Application(PAGE), Memory::Application(PAGE + 1)] {
        cases.push(Case { memory, ..on(newest()) });
    }
    let lacks_options = Facts { kernel_options: Some(BTreeSet::new()), ..Facts::default() };
    for (what, profile, facts) in [
        ("small BAR", Rocr { large_bar: false, ..newest() }, Facts::default()),
        ("no dma-bufs", Rocr { dma_buf: false, ..newest() }, Facts::default()),
        ("no dma-bufs, kernel without P2P", Rocr { dma_buf: false, ..newest() }, lacks_options),
    ] {
        let case = Case { what: what.into(), facts, ..on(profile) };
        cases.extend(kinds(&case, &[Device], &["dPs"]));
    }
    const EXPORT: &str = "hsa_amd_portable_export_dmabuf_v2";
    for (symbol, code) in [
        (EXPORT, HsaStatus::HSA_STATUS_ERROR_OUT_OF_RESOURCES),
        (EXPORT, HsaStatus::HSA_STATUS_ERROR_INVALID_ALLOCATION),
        (EXPORT, HsaStatus::HSA_STATUS_ERROR_INVALID_AGENT),
        (EXPORT, HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT),
        (EXPORT, HsaStatus::HSA_STATUS_ERROR_NOT_SUPPORTED),
        (EXPORT, HsaStatus::HSA_STATUS_ERROR),
        ("hsa_amd_pointer_info", HsaStatus::HSA_STATUS_ERROR_NOT_INITIALIZED),
    ] {
        for letters in ["dPps", "ds"] {
            cases.push(Case {
                what: format!("{symbol} answers {:#x}", code.0),
                imports: imports(letters),
                driver_refuses: Some((symbol, 1, code.0)),
                ..on(newest())
            });
        }
    }
    cases
}

fn level_zero() -> Vec<Case> {
    use AllocationKind::{Device, Host, Managed};
    let on = |profile| on(Profile::LevelZero(profile));
    let newest = LevelZero::default;
    let mut cases = Vec::new();
    for profile in LevelZero::all() {
        cases.extend(kinds(&on(profile), &[Device, Host, Managed], &["ds", "dPps", "d"]));
    }
    cases.extend(odd_memory(&on(newest()), IfaceKind::ZE));
    // The driver allocates small memory from a pool, and larger memory without.
    for memory in [Memory::Application(PAGE), Memory::Application(3 << 20)] {
        cases.push(Case { memory, ..on(newest()) });
    }
    let tiles = LevelZero { tiles: true, ..newest() };
    cases.push(Case { what: "memory of several tiles".into(), len: 128 << 10, ..on(tiles) });
    const PROPERTIES: &str = "zeMemGetAllocProperties";
    for code in
        [ZeResult::ZE_RESULT_ERROR_DEVICE_LOST, ZeResult::ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS]
    {
        cases.push(Case {
            what: format!("{PROPERTIES} answers {:#x}", code.0),
            driver_refuses: Some((PROPERTIES, 1, code.0)),
            ..on(newest())
        });
    }
    cases
}

fn accelerators() -> Vec<Case> {
    const NEURON: &str = "nrt_get_dmabuf_fd_v2";
    const GAUDI: &str = "hlthunk_device_mapped_memory_export_dmabuf_fd";
    /// -EINVAL as a `u32`, the error code of libhl-thunk.
    const INVALID: u32 = (-22_i32) as u32;
    let mut cases = Vec::new();
    for (profile, iface, export, code) in [
        (Profile::Neuron as fn(_) -> _, IfaceKind::NEURON, NEURON, NrtStatus::NRT_INVALID.0 as u32),
        (Profile::SynapseAi as fn(_) -> _, IfaceKind::SYNAPSEAI, GAUDI, INVALID),
    ] {
        let case = on(profile(Accelerators::running()));
        cases.extend(kinds(&case, &[AllocationKind::Device], &["ds", "dPps", "s"]));
        cases.extend(odd_memory(&case, iface));
        cases.push(Case {
            what: format!("{export} answers {}", code as i32),
            driver_refuses: Some((export, 1, code)),
            ..case
        });
        let without = Accelerators::running().without(&[export, "nrt_get_dmabuf_fd"]);
        cases.push(Case { what: "no export function".into(), ..on(profile(without)) });
    }
    cases
}
