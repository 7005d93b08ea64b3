//! DIAG-03: registrations of CUDA memory name each cause of the CUDA driver, with its text.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use hmem::{
    AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Iface,
    IfaceKind, MrAttr, MrFlags, MrMode, Registry,
    cuda::{
        CAUSES, Cuda, CudaMonitorKind,
        sys::{CuResult, Functions},
    },
    iface::AllocRequest,
    loopback::{Call, Faults, Loopback},
    p2p::path::{DefaultPathSelector, FactSource, Facts, cause},
    path::Trace,
    provider::{Imports, Nic},
    system::System,
};
use hmem_fake_cuda::{FakeDriver, Profile};

use crate::{
    link::{IMPORTS, REMOTE, not_over_a_gpu},
    segments::Segments,
};

/// A source of fixed facts about a machine.
#[derive(Debug)]
struct Told(Facts);

impl FactSource for Told {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        self.0.clone()
    }
}

/// The memory that a scene registers.
enum Memory {
    Of(AllocationKind),
    /// A reservation with a handle for each entry, created for RDMA or not.
    Handles(&'static [bool]),
}

/// A driver, a NIC and a machine, one of which refuses the registration.
struct Scene {
    profile: Profile,
    imports: Imports,
    facts: Facts,
    memory: Memory,
    /// Injected refusal of the driver: the function, the number of the call that fails, and the
    /// error code.
    refusal: Option<(&'static str, u64, CuResult)>,
    /// Number of queries after which the driver no longer knows the memory.
    forgotten_after: Option<u64>,
    /// Code of the NIC for its first registration.
    nic: Option<Errno>,
}

impl Default for Scene {
    fn default() -> Self {
        Self {
            profile: Profile::default(),
            imports: IMPORTS,
            facts: Facts::default(),
            memory: Memory::Of(AllocationKind::Device),
            refusal: None,
            forgotten_after: None,
            nic: None,
        }
    }
}

impl Scene {
    fn play(self) -> Trace {
        let driver = FakeDriver::start(self.profile);
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
        // forever.
        let functions =
            unsafe { Functions::from_lookup(|name| driver.symbol(name)) }.expect("the table");
        let cuda = Cuda::builder().functions(functions.clone()).monitor(CudaMonitorKind::Identity);
        let cuda: Arc<dyn Iface> = Arc::new(cuda.open().expect("open"));
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        registry.add(Arc::clone(&cuda)).expect("its kind is free");
        let faults = Faults::new();
        let nic = Loopback::builder().imports(self.imports).faults(&faults).build().expect("a NIC");
        let paths = Arc::new(DefaultPathSelector::new().facts(Arc::new(Told(self.facts))));
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let attr = DomainAttr { mr_mode, hmem: true, ..DomainAttr::default() };
        let domain = Domain::open(&nic, Arc::new(registry), paths, attr).expect("a domain");
        let refuse = || {
            if let Some((symbol, nth, code)) = self.refusal {
                driver.fail_nth(symbol, nth, code);
            }
            if let Some(errno) = self.nic {
                faults.fail(Call::Register, 1, errno);
            }
        };
        let allocate = |kind| {
            let request = AllocRequest { len: 8192, device: DeviceId(0), kind };
            DeviceBuffer::allocate(&cuda, &request).expect("allocate")
        };
        let registered = |range: AddressRange| {
            refuse();
            if let Some(queries) = self.forgotten_after {
                driver.forget_after(range.start().0, queries);
            }
            let ranges = [range];
            let attr = MrAttr { iface: Some(IfaceKind::CUDA), ..MrAttr::new(&ranges, REMOTE) };
            // SAFETY: the region is closed before its memory goes, and no reference into it exists.
            match unsafe { domain.regattr(&attr, MrFlags::empty()) } {
                Ok(region) => {
                    let trace = region.decision().expect("decision").attempts.clone();
                    region.close().expect("close");
                    trace
                }
                Err(error) => error.trace().clone(),
            }
        };
        match self.memory {
            Memory::Of(kind) => registered(allocate(kind).allocation().range),
            Memory::Handles(handles) => {
                let memory = Segments::new(&functions, handles);
                registered(memory.range(0, handles.len() as u64 * memory.step))
            }
        }
    }
}

/// Facts of a machine with NVIDIA's closed kernel modules.
fn closed_modules() -> Facts {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("closed-modules-of-cuda");
    let folder = root.join("proc/driver/nvidia");
    std::fs::create_dir_all(&folder).expect("a folder of the tests");
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n";
    std::fs::write(folder.join("version"), version).expect("a file of the tests");
    Facts { root: Some(root), ..Facts::default() }
}

fn modules(names: &[&str]) -> Facts {
    let modules = names.iter().map(|name| (*name).to_owned()).collect();
    Facts { modules: Some(modules), ..Facts::default() }
}

/// Returns the scenes that provoke each cause, with the cause's name.
fn scenes() -> Vec<(&'static str, Scene)> {
    const EXPORT: &str = "cuMemGetHandleForAddressRange";
    let refused = |code| Scene { refusal: Some((EXPORT, 1, code)), ..Scene::default() };
    let of = |kind| Scene { memory: Memory::Of(kind), ..Scene::default() };
    let closed = || Profile::named("550-closed").expect("a profile");
    let pcie_first = Imports { pcie_mapping_first: true, ..IMPORTS };
    let peer_only = Imports { dma_buf: false, peer_memory: true, ..IMPORTS };
    let before_the_flag = || Profile::named("550-open").expect("a profile");
    let mut scenes = vec![
        (
            "nvidia-closed-modules",
            Scene { profile: closed(), facts: closed_modules(), ..Scene::default() },
        ),
        ("device-without-dma-buf", Scene { profile: closed(), ..Scene::default() }),
        ("device-without-dma-buf", refused(CuResult::CUDA_ERROR_NOT_SUPPORTED)),
        (
            "device-without-dma-buf",
            Scene {
                profile: Profile { absent: vec![EXPORT], ..Profile::default() },
                ..Scene::default()
            },
        ),
        ("vmm-range", Scene { memory: Memory::Handles(&[true, false]), ..Scene::default() }),
        (
            "vmm-range",
            Scene {
                refusal: Some((EXPORT, 1, CuResult::CUDA_ERROR_INVALID_VALUE)),
                ..of(AllocationKind::Virtual)
            },
        ),
        (
            "segments-not-in-one",
            Scene {
                profile: Profile { spanning_exports: false, ..Profile::default() },
                memory: Memory::Handles(&[true; 2]),
                ..Scene::default()
            },
        ),
        // The code of the driver for a hole.
        (
            "vmm-range",
            Scene {
                refusal: Some(("cuMemGetAddressRange_v2", 1, CuResult::CUDA_ERROR_NOT_FOUND)),
                ..of(AllocationKind::Virtual)
            },
        ),
        ("stream-ordered-pool", of(AllocationKind::StreamOrdered)),
        ("stream-ordered-pool", Scene { imports: peer_only, ..of(AllocationKind::StreamOrdered) }),
        // The first query finds the owner; the next one does not know the address.
        ("freed-or-outside", Scene { forgotten_after: Some(1), ..Scene::default() }),
        (
            "bar-small",
            Scene {
                facts: Facts { bar: Some(256 << 20), ..Facts::default() },
                ..refused(CuResult::CUDA_ERROR_OUT_OF_MEMORY)
            },
        ),
        ("bar-full", refused(CuResult::CUDA_ERROR_OUT_OF_MEMORY)),
        ("device-files", refused(CuResult::CUDA_ERROR_NOT_PERMITTED)),
        (
            "device-without-peer-memory",
            Scene {
                profile: Profile { rdma: false, ..Profile::default() },
                imports: peer_only,
                ..Scene::default()
            },
        ),
        (
            "peer-memory-module-missing",
            Scene {
                imports: peer_only,
                facts: modules(&["nvidia"]),
                nic: Some(Errno(14)),
                ..Scene::default()
            },
        ),
        (
            "peer-memory-range",
            Scene {
                imports: peer_only,
                facts: modules(&["nvidia_peermem"]),
                nic: Some(Errno(14)),
                ..Scene::default()
            },
        ),
    ];
    for kind in [AllocationKind::Device, AllocationKind::Virtual] {
        scenes.push((
            "no-pcie-mapping",
            Scene { profile: before_the_flag(), imports: pcie_first, ..of(kind) },
        ));
    }
    for code in [
        CuResult::CUDA_ERROR_NOT_INITIALIZED,
        CuResult::CUDA_ERROR_DEINITIALIZED,
        CuResult::CUDA_ERROR_INVALID_CONTEXT,
        CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    ] {
        scenes.push(("wrong-context", refused(code)));
    }
    for code in [
        CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE,
        CuResult::CUDA_ERROR_NO_DEVICE,
        CuResult::CUDA_ERROR_INVALID_DEVICE,
        CuResult::CUDA_ERROR_ILLEGAL_ADDRESS,
    ] {
        scenes.push(("device-lost", refused(code)));
    }
    scenes
}

/// DIAG-03
///
/// The NIC prefers the PCIe mapping, and the driver supports it. If a registration with the mapping
/// is refused, the reported cause is not a missing mapping.
#[test]
fn refusal_under_an_existing_pcie_mapping_has_its_own_cause() {
    if not_over_a_gpu("the driver must have the mapping and refuse") {
        return;
    }
    let imports = Imports { pcie_mapping_first: true, ..IMPORTS };
    let with = |memory| Scene { imports, memory, ..Scene::default() };
    let one_by_one = Profile { spanning_exports: false, ..Profile::default() };
    let before_the_flag = Profile::named("550-open").expect("a profile");
    for (scene, causes) in [
        (with(Memory::Of(AllocationKind::StreamOrdered)), &["stream-ordered-pool"; 2] as &[_]),
        (
            Scene { profile: one_by_one, ..with(Memory::Handles(&[true; 2])) },
            &["segments-not-in-one"],
        ),
        (
            Scene { profile: before_the_flag, ..with(Memory::Handles(&[true; 2])) },
            &["no-pcie-mapping"; 2],
        ),
    ] {
        let trace = scene.play();
        let exports = trace.iter().filter(|attempt| attempt.call.starts_with("export_dma_buf"));
        let refused: Vec<_> = exports.collect();
        let named: Vec<_> = refused.iter().filter_map(|attempt| attempt.cause_name).collect();
        assert_eq!(named, causes, "{trace}");
        let error = refused[0].error.as_ref().expect("refused");
        assert_eq!(
            error.context_value("reason"),
            Some("refused under the PCIe mapping"),
            "{error}"
        );
    }
}

/// DIAG-03
#[test]
fn each_cuda_cause_is_named_by_a_registration() {
    if not_over_a_gpu("every answer of the driver must be selected") {
        return;
    }
    let mut met = BTreeSet::new();
    for (name, scene) in scenes() {
        let cause = CAUSES.iter().chain(cause::CAUSES).find(|cause| cause.name == name);
        let cause = cause.unwrap_or_else(|| panic!("no cause {name}"));
        let trace = scene.play();
        let attempt = trace.iter().find(|attempt| attempt.cause_name == Some(name));
        let attempt = attempt.unwrap_or_else(|| panic!("{name} is not named: {trace}"));
        assert_eq!(attempt.cause.as_deref(), Some(cause.cause), "{name}");
        assert_eq!(attempt.remedy.as_deref(), Some(cause.remedy), "{name}");
        let text = attempt.to_string();
        assert!(text.contains(cause.cause) && text.contains(cause.remedy), "{text}");
        met.insert(name);
    }
    // Each row of CUDA, and each general row that the kind of a CUDA code leads to, has a scene.
    const BY_KIND: [&str; 3] = ["bar-small", "bar-full", "segments-not-in-one"];
    for name in CAUSES.iter().map(|cause| cause.name).chain(BY_KIND) {
        assert!(met.contains(name), "no scene meets {name}");
    }
}
