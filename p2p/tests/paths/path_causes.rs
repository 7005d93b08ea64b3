//! Causes and remedies (DIAG-03). For every entry of the table a registration is refused with the
//! real driver's error, and the trace names the entry. `docs/causes.md` is made from the table.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::PathBuf,
    sync::{Arc, LazyLock},
};

use crate::path_support::{
    ALL_IMPORTS, REMOTE, page_size, register_range,
    vendor::{Refuse, Vendor, causes_of},
};
use hmem_core::{
    Access, AllocationKind, Decision, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno, Error,
    ErrorKind, IfaceKind, MrMode, Path, Registry,
    cause::{Answer, CoherentLink, IpcLock, RefusalCause, RefusalContext, RequestFacts, Step},
    iface::{AllocRequest, DmaBufMapping},
    path::{DirectPath, Trace},
    provider::{Imports, Nic},
};
use hmem_iface_system::{DmaBufKind, Simulated, System};
use hmem_p2p::{
    path::{DefaultPathSelector, ExplainRequest, FactSource, Facts, cause::CAUSES},
    topology::PEER_MEMORY,
};
use hmem_provider_loopback::{Faults, Loopback, NicCall};

/// A fact source that always returns the same facts.
#[derive(Debug)]
struct FixedFacts(Facts);

impl FactSource for FixedFacts {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        self.0.clone()
    }
}

/// A setup in which a registration is refused for one cause.
struct Scene {
    iface: IfaceKind,
    kind: AllocationKind,
    imports: Imports,
    facts: Facts,
    /// Configures the failures of the iface.
    iface_breaks: fn(&mut Vendor),
    /// Errno values with which the NIC refuses successive registrations.
    nic_answers: &'static [i32],
    /// The refusal of exports of several segments as one dma-buf; `None` if they are not refused.
    /// With a refusal the memory has segments of one page.
    whole: Option<Refuse>,
    unexportable: bool,
    /// True to register only the second half of the memory. The explanation registers all of it.
    half: bool,
    /// Length of the registration in bytes.
    size: u64,
    /// The direct paths of the domain; `None` for the default order.
    direct_paths: Option<Vec<DirectPath>>,
}

const DEFAULT_FIRST: Imports = Imports { pcie_mapping_first: Some(false), ..ALL_IMPORTS };
const PEER_ONLY: Imports = Imports { dma_buf: false, ..DEFAULT_FIRST };
const NO_PEER: Imports = Imports { peer_memory: false, ..DEFAULT_FIRST };
const NOTHING: Imports = Imports {
    dma_buf: false,
    pcie_mapping_first: Some(false),
    data_direct: None,
    peer_memory: false,
    staged: false,
};

impl Scene {
    fn of(iface: IfaceKind) -> Self {
        Self {
            iface,
            kind: AllocationKind::Device,
            imports: DEFAULT_FIRST,
            facts: Facts::default(),
            iface_breaks: |_| {},
            nic_answers: &[],
            whole: None,
            unexportable: false,
            half: false,
            size: page_size(),
            direct_paths: None,
        }
    }

    fn cuda() -> Self {
        Self::of(IfaceKind::CUDA)
    }

    /// Registers the scene's memory, then explains the registration, and returns both traces.
    fn play(&self) -> Vec<Trace> {
        let memory =
            Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd).peer_memory(true);
        let mut vendor =
            Vendor::new(self.iface, Arc::new(memory.build().expect("simulated memory")));
        (self.iface_breaks)(&mut vendor);
        if let Some(refuse) = self.whole {
            (vendor.segment_len, vendor.whole) = (Some(page_size()), refuse);
        }
        let simulated = Arc::clone(&vendor.memory);
        let vendor: Arc<dyn hmem_core::Iface> = Arc::new(vendor);
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("the first");
        registry.add(Arc::clone(&vendor)).expect("its kind is free");
        let registry = Arc::new(registry);
        let faults = Faults::new();
        let provider =
            Loopback::builder().imports(self.imports).faults(&faults).build().expect("a fabric");
        let paths =
            Arc::new(DefaultPathSelector::new().facts(Arc::new(FixedFacts(self.facts.clone()))));
        let answer = || {
            for (nth, errno) in self.nic_answers.iter().enumerate() {
                faults.fail_nth(NicCall::Register, nth as u64 + 1, Errno(*errno));
            }
        };
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let direct_paths = self.direct_paths.clone();
        let attr = DomainAttr { mr_mode, hmem: true, direct_paths, ..DomainAttr::default() };
        let domain =
            Domain::open(&provider, Arc::clone(&registry), paths.clone(), attr).expect("open");
        let request = AllocRequest { len: self.size, device: DeviceId(0), kind: self.kind };
        let buffer = DeviceBuffer::allocate(&vendor, &request).expect("memory");
        if self.unexportable {
            simulated.set_exportable(buffer.allocation().base(), false).expect("a live allocation");
        }
        answer();
        let trace = |decision: &Decision| decision.attempts.clone();
        let registered = if self.half {
            let half = buffer.range().slice(self.size / 2, self.size / 2).expect("a part");
            let region = register_range(&domain, half).expect("another unit works");
            trace(region.decision().expect("registered"))
        } else {
            match domain.register(buffer, REMOTE) {
                Ok(region) => trace(region.decision().expect("registered")),
                Err(rejected) => rejected.error.trace().clone(),
            }
        };
        faults.clear();
        answer();
        let request = ExplainRequest::new(self.iface).kind(self.kind).size(self.size);
        let request = request.direct_paths(self.direct_paths.clone());
        let explained =
            paths.explain(&registry, &provider, &request).expect("an explanation").attempts;
        faults.clear();
        assert_eq!(domain.live().regions, 0);
        vec![registered, explained]
    }
}

/// The ifaces that have causes of their own.
const VENDORS: [IfaceKind; 5] =
    [IfaceKind::CUDA, IfaceKind::ROCR, IfaceKind::ZE, IfaceKind::NEURON, IfaceKind::SYNAPSEAI];

/// Returns all causes, general causes first. Each cause of an iface comes with that iface.
fn causes() -> impl Iterator<Item = (Option<IfaceKind>, &'static RefusalCause)> {
    let of = |kind: IfaceKind| causes_of(kind).iter().map(move |cause| (Some(kind), cause));
    CAUSES.iter().map(|cause| (None, cause)).chain(VENDORS.into_iter().flat_map(of))
}

/// Returns the facts of a machine with NVIDIA's closed kernel modules. Writes the machine's files
/// only once, since other tests read them at the same time.
fn closed_modules() -> Facts {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("closed-modules");
        let folder = root.join("proc/driver/nvidia");
        std::fs::create_dir_all(&folder).expect("a folder of the tests");
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15\n";
        std::fs::write(folder.join("version"), version).expect("a file of the tests");
        root
    });
    Facts { root: Some(ROOT.clone()), ..Facts::default() }
}

/// Returns facts of a machine that does not limit the control group of the process.
fn unlimited_group() -> Facts {
    let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("unlimited-group");
    for (path, text) in [
        ("proc/self/cgroup", "0::/user.slice\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu rdma\n"),
        ("sys/fs/cgroup/user.slice/rdma.max", "loop0 hca_handle=max hca_object=max\n"),
        ("sys/fs/cgroup/user.slice/rdma.current", "loop0 hca_handle=1 hca_object=700\n"),
    ] {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("create");
        fs::write(path, text).expect("write");
    }
    Facts { root: Some(root), ..Facts::default() }
}

fn modules(names: &[&str]) -> Facts {
    let modules = names.iter().map(|name| (*name).to_owned()).collect();
    Facts { modules: Some(modules), ..Facts::default() }
}

fn cuda(name: &'static str, code: i64) -> Error {
    let kind = match code {
        801 => ErrorKind::Unsupported,
        1 => ErrorKind::InvalidArgument,
        2 => ErrorKind::OutOfResources,
        46 => ErrorKind::Unavailable,
        201 => ErrorKind::BadState,
        _ => ErrorKind::Driver,
    };
    Error::new(kind, "cuMemGetHandleForAddressRange").iface(IfaceKind::CUDA).driver_code(name, code)
}

/// Returns an error as ROCr's export reports it.
fn hsa(kind: ErrorKind, name: &'static str, code: i64) -> Option<Error> {
    let error = Error::new(kind, "hsa_amd_portable_export_dmabuf_v2").iface(IfaceKind::ROCR);
    Some(error.driver_code(name, code))
}

/// Changes a scene to use ROCr as the iface.
fn rocr(scene: Scene) -> Scene {
    Scene { iface: IfaceKind::ROCR, ..scene }
}

fn not_supported() -> Option<Error> {
    Some(cuda("CUDA_ERROR_NOT_SUPPORTED", 801))
}

fn lacking() -> Option<Error> {
    Some(Error::new(ErrorKind::Unsupported, "export dma-buf"))
}

fn out_of_reach() -> Option<Error> {
    Some(Error::os(Errno(524), "export dma-buf"))
}

/// Returns scenes, each with the name of the cause that its refusal must have.
fn scenes() -> Vec<(&'static str, Scene)> {
    let nic = |nic_answers| Scene { nic_answers, ..Scene::cuda() };
    let broken = |iface_breaks| Scene { iface_breaks, ..Scene::cuda() };
    let plug_in = |iface_breaks| Scene { iface_breaks, ..Scene::of(IfaceKind::FIRST_PLUG_IN) };
    let host = |nic_answers| Scene { kind: AllocationKind::Host, ..nic(nic_answers) };
    let kernel = |major, minor| Facts { kernel: Some((major, minor)), ..Facts::default() };
    let linked = |link| Facts {
        coherent_link: Some(link),
        iommu_translates: Some(true),
        ..Facts::default()
    };
    let c2c = |shares_switch| linked(CoherentLink::C2c { shares_switch });
    let integrated = linked(CoherentLink::Integrated);
    let memory_only = Facts { memory_only_nodes: [1].into(), ..Facts::default() };
    let cannot_reach: fn(&mut Vendor) = |vendor| {
        vendor.dma_buf = out_of_reach;
        vendor.peer_memory = out_of_reach;
    };
    let data_direct = |data_direct, nic_answers| Scene {
        imports: Imports { data_direct, ..DEFAULT_FIRST },
        direct_paths: Some(vec![
            DirectPath::DmaBuf(DmaBufMapping::DataDirect),
            DirectPath::DmaBuf(DmaBufMapping::Default),
        ]),
        ..nic(nic_answers)
    };
    vec![
        ("nic-without-data-direct", data_direct(None, &[])),
        ("data-direct-unaligned", data_direct(Some(0), &[95])),
        ("data-direct-function", data_direct(Some(0), &[22])),
        (
            "file-descriptors",
            broken(|vendor| vendor.dma_buf = || Some(Error::os(Errno(24), "export"))),
        ),
        ("kernel-without-dma-buf", Scene { facts: kernel(5, 4), ..nic(&[95]) }),
        (
            "kernel-without-dma-buf",
            Scene { facts: kernel(5, 4), imports: PEER_ONLY, ..Scene::cuda() },
        ),
        ("nic-driver-without-dma-buf", Scene { facts: kernel(6, 12), ..nic(&[95]) }),
        ("nic-driver-without-dma-buf", nic(&[38])),
        ("nic-driver-without-dma-buf", Scene { imports: NOTHING, ..Scene::cuda() }),
        (
            "nvidia-closed-modules",
            Scene { facts: closed_modules(), ..broken(|vendor| vendor.dma_buf = not_supported) },
        ),
        (
            "vmm-range",
            Scene {
                kind: AllocationKind::Virtual,
                ..broken(|vendor| vendor.dma_buf = || Some(cuda("CUDA_ERROR_INVALID_VALUE", 1)))
            },
        ),
        (
            "stream-ordered-pool",
            Scene {
                kind: AllocationKind::StreamOrdered,
                ..broken(|vendor| vendor.dma_buf = not_supported)
            },
        ),
        ("segment-not-exportable", Scene { unexportable: true, ..Scene::cuda() }),
        (
            "freed-or-outside",
            broken(|vendor| {
                vendor.segments = || Some(Error::new(ErrorKind::OutOfBounds, "segments"))
            }),
        ),
        (
            "wrong-context",
            broken(|vendor| vendor.dma_buf = || Some(cuda("CUDA_ERROR_INVALID_CONTEXT", 201))),
        ),
        (
            "bar-small",
            Scene {
                facts: Facts { bar: Some(256 << 20), ..Facts::default() },
                ..broken(|vendor| vendor.dma_buf = || Some(Error::os(Errno(12), "export")))
            },
        ),
        (
            "bar-full",
            broken(|vendor| vendor.dma_buf = || Some(cuda("CUDA_ERROR_OUT_OF_MEMORY", 2))),
        ),
        ("bar-full", broken(|vendor| vendor.dma_buf = || Some(Error::os(Errno(28), "export")))),
        (
            "rocr-file-descriptors",
            rocr(broken(|vendor| {
                vendor.dma_buf =
                    || hsa(ErrorKind::OutOfResources, "HSA_STATUS_ERROR_OUT_OF_RESOURCES", 0x1008);
            })),
        ),
        (
            "rocr-not-exportable",
            rocr(broken(|vendor| {
                vendor.dma_buf =
                    || hsa(ErrorKind::InvalidArgument, "HSA_STATUS_ERROR_INVALID_AGENT", 0x1004);
            })),
        ),
        (
            "rocr-small-bar",
            Scene {
                imports: ALL_IMPORTS,
                ..rocr(broken(|vendor| {
                    vendor.pcie =
                        || hsa(ErrorKind::Unsupported, "HSA_STATUS_ERROR_NOT_SUPPORTED", 0x2f);
                }))
            },
        ),
        (
            "rocr-old-runtime",
            rocr(broken(|vendor| {
                vendor.dma_buf = || {
                    let error = Error::new(ErrorKind::Unsupported, "export_dma_buf");
                    Some(error.errno(Errno(38)).iface(IfaceKind::ROCR))
                };
            })),
        ),
        (
            "rocr-kernel-options",
            Scene {
                iface: IfaceKind::ROCR,
                facts: Facts {
                    kernel_options: Some(BTreeSet::from(["PCI_P2PDMA".to_owned()])),
                    ..Facts::default()
                },
                ..broken(|vendor| {
                    vendor.dma_buf = || {
                        Some(Error::new(ErrorKind::Unsupported, "hsa_amd_portable_export_dmabuf"))
                    };
                })
            },
        ),
        (
            "ze-not-exportable",
            Scene {
                iface: IfaceKind::ZE,
                ..broken(|vendor| {
                    vendor.dma_buf =
                        || Some(Error::new(ErrorKind::Unsupported, "zeMemGetAllocProperties"));
                })
            },
        ),
        (
            "neuron-export-invalid",
            Scene {
                iface: IfaceKind::NEURON,
                ..broken(|vendor| {
                    vendor.dma_buf = || {
                        let error = Error::new(ErrorKind::Unsupported, "nrt_get_dmabuf_fd");
                        Some(error.driver_code("NRT_INVALID", 2))
                    };
                })
            },
        ),
        (
            "synapseai-export-invalid",
            Scene {
                iface: IfaceKind::SYNAPSEAI,
                ..broken(|vendor| {
                    vendor.dma_buf = || Some(Error::os(Errno(22), "hlthunk"));
                })
            },
        ),
        (
            "segments-not-in-one",
            Scene {
                size: 2 * page_size(),
                whole: Some(|| Some(cuda("CUDA_ERROR_INVALID_VALUE", 1))),
                ..Scene::cuda()
            },
        ),
        (
            "other-export-unit",
            Scene {
                size: 2 * page_size(),
                half: true,
                ..broken(|vendor| vendor.less = not_supported)
            },
        ),
        (
            "no-pcie-mapping",
            Scene { imports: ALL_IMPORTS, ..broken(|vendor| vendor.pcie = not_supported) },
        ),
        ("device-without-dma-buf", broken(|vendor| vendor.dma_buf = not_supported)),
        (
            "acs",
            Scene {
                facts: Facts { acs_redirects: Some(true), ..Facts::default() },
                ..broken(cannot_reach)
            },
        ),
        (
            "iommu",
            Scene {
                facts: Facts { iommu_translates: Some(true), ..Facts::default() },
                ..broken(cannot_reach)
            },
        ),
        ("c2c-pcie-mapping", Scene { imports: ALL_IMPORTS, facts: c2c(false), ..nic(&[524]) }),
        ("c2c-default-mapping", Scene { facts: c2c(true), ..nic(&[524]) }),
        ("c2c-default-mapping", Scene { facts: c2c(false), ..nic(&[121]) }),
        (
            "integrated-device",
            Scene { facts: integrated.clone(), ..broken(|vendor| vendor.dma_buf = not_supported) },
        ),
        ("integrated-device", Scene { imports: PEER_ONLY, facts: integrated, ..nic(&[14]) }),
        ("memory-only-node", Scene { facts: memory_only, ..host(&[12]) }),
        ("device-not-reachable-from-nic", broken(cannot_reach)),
        ("device-not-reachable-from-nic", nic(&[524])),
        ("device-not-reachable-from-nic", nic(&[121])),
        (
            "peer-memory-module-missing",
            Scene { imports: PEER_ONLY, facts: modules(&["nvidia"]), ..nic(&[14]) },
        ),
        (
            "peer-memory-module-missing",
            Scene { imports: NO_PEER, facts: modules(&["nvidia"]), ..nic(&[95]) },
        ),
        (
            "peer-memory-range",
            Scene { imports: PEER_ONLY, facts: modules(&["nvidia_peermem"]), ..nic(&[14]) },
        ),
        ("nic-without-peer-memory", Scene { imports: NO_PEER, ..nic(&[95]) }),
        (
            "device-without-peer-memory",
            Scene { imports: PEER_ONLY, ..broken(|vendor| vendor.peer_memory = not_supported) },
        ),
        (
            "memlock",
            Scene { facts: Facts { memlock: Some(65536), ..Facts::default() }, ..host(&[12]) },
        ),
        ("memlock", Scene { facts: Facts { memlock: Some(0), ..Facts::default() }, ..host(&[1]) }),
        (
            "ipc-lock-inert",
            Scene {
                facts: Facts {
                    memlock: Some(65536),
                    ipc_lock: Some(IpcLock::UserNamespace),
                    ..Facts::default()
                },
                ..host(&[12])
            },
        ),
        ("rdma-cgroup", nic(&[11])),
        ("nic-keys-used-up", Scene { facts: unlimited_group(), ..nic(&[11]) }),
        ("nic-keys-used-up", Scene { facts: unlimited_group(), ..host(&[11]) }),
        ("nic-tables-full", nic(&[12])),
        (
            "nic-tables-full",
            Scene { facts: Facts { memlock: Some(u64::MAX), ..Facts::default() }, ..host(&[12]) },
        ),
        (
            "too-many-segments",
            Scene {
                size: 17 * page_size(),
                whole: Some(|| Some(cuda("CUDA_ERROR_INVALID_VALUE", 1))),
                ..Scene::cuda()
            },
        ),
        ("beyond-the-export", nic(&[22])),
        ("dma-buf-not-mappable", nic(&[14])),
        ("bad-host-pages", host(&[14])),
        ("closed-descriptor", nic(&[9])),
        ("device-files", nic(&[13])),
        ("device-files", host(&[1])),
        (
            "device-lost",
            broken(|vendor| vendor.dma_buf = || Some(cuda("CUDA_ERROR_DEVICE_UNAVAILABLE", 46))),
        ),
        ("nic-lost", nic(&[19, 19, 19])),
        ("nic-lost", nic(&[5])),
        ("nic-takes-no-copies", Scene { imports: NOTHING, ..Scene::cuda() }),
        (
            "no-pcie-mapping",
            Scene {
                iface: IfaceKind::ROCR,
                imports: ALL_IMPORTS,
                ..broken(|vendor| vendor.pcie = lacking)
            },
        ),
        (
            "device-without-dma-buf",
            Scene { iface: IfaceKind::ROCR, ..broken(|vendor| vendor.dma_buf = lacking) },
        ),
        ("device-files", Scene { iface: IfaceKind::ROCR, ..nic(&[13]) }),
        ("device-files", Scene { iface: IfaceKind::ZE, ..nic(&[13]) }),
        // The general causes, for a driver without causes of its own.
        (
            "no-pcie-mapping",
            Scene { imports: ALL_IMPORTS, ..plug_in(|vendor| vendor.pcie = lacking) },
        ),
        (
            "vmm-range",
            Scene { kind: AllocationKind::Virtual, ..plug_in(|vendor| vendor.dma_buf = lacking) },
        ),
        (
            "stream-ordered-pool",
            Scene {
                kind: AllocationKind::StreamOrdered,
                ..plug_in(|vendor| vendor.dma_buf = lacking)
            },
        ),
        ("device-without-dma-buf", plug_in(|vendor| vendor.dma_buf = lacking)),
        (
            "peer-memory-module-missing",
            Scene {
                imports: PEER_ONLY,
                facts: modules(&["nvidia"]),
                nic_answers: &[14],
                ..plug_in(|_| {})
            },
        ),
    ]
}

/// DIAG-03
#[test]
fn every_cause_is_named_in_its_registration_and_explanation() {
    let mut met = BTreeSet::new();
    for (name, scene) in scenes() {
        for (who, trace) in ["registration", "explanation"].into_iter().zip(scene.play()) {
            // The memory that the explanation allocates can be exported, and is registered whole.
            if (scene.unexportable || scene.half) && who == "explanation" {
                continue;
            }
            let attempt = trace.iter().find(|attempt| attempt.cause_name == Some(name));
            let attempt = attempt.unwrap_or_else(|| panic!("{who} of {name}: {trace}"));
            let words = |row: &RefusalCause| {
                attempt.cause.as_ref().is_some_and(|cause| cause.starts_with(row.cause))
                    && attempt.remedy.as_deref() == Some(row.remedy)
            };
            let rows = causes().filter(|(iface, cause)| {
                cause.name == name && iface.is_none_or(|iface| iface == scene.iface) && words(cause)
            });
            let (rows, text) = (rows.collect::<Vec<_>>(), attempt.to_string());
            assert!(!rows.is_empty(), "words of another row: {text}");
            for (iface, cause) in rows {
                assert!(text.contains(cause.cause) && text.contains(cause.remedy), "{text}");
                met.insert((iface, name));
            }
        }
    }
    met.extend(limits().map(|(name, ..)| (None, name)));
    // These are never the most probable causes. The tests below have refusals with them.
    met.extend(["atomic-right", "dma-buf-revoked"].map(|name| (None, name)));
    let rows = causes().map(|(iface, cause)| (iface, cause.name));
    let unmet: Vec<_> = rows.filter(|row| !met.contains(row)).collect();
    assert!(unmet.is_empty(), "causes without a scene: {unmet:?}");
}

/// Registers and explains memory of CUDA that the NIC refuses with `errnos`. Checks the causes of
/// the first refusal, in their order. Returns the traces.
fn refused_with_causes(errnos: &'static [i32], causes: &[&str]) -> Vec<Trace> {
    let traces = Scene { nic_answers: errnos, ..Scene::cuda() }.play();
    for trace in &traces {
        let error = trace[0].error.as_ref().expect("refused");
        let names: Vec<_> = error.causes().iter().map(|cause| cause.name).collect();
        assert_eq!(names, causes, "{trace}");
    }
    traces
}

/// DIAG-03
///
/// A driver that refuses atomics for device memory answers EINVAL, as AMD's ionic does (mori 497).
/// The error alone does not tell this from a wrong range, so both are listed.
#[test]
fn refusal_of_device_memory_that_grants_atomics_also_names_the_right() {
    for trace in refused_with_causes(&[22], &["beyond-the-export", "atomic-right"]) {
        assert!(trace[0].to_string().contains("REMOTE_RMA_WRITE"), "{trace}");
    }
}

/// DIAG-03, LIFE-07
///
/// A NIC that is lost and an exporter that revoked its dma-buf both give ENODEV.
#[test]
fn dma_buf_refused_with_enodev_may_be_revoked() {
    refused_with_causes(&[19], &["nic-lost", "dma-buf-revoked"]);
}

/// DIAG-03
#[test]
fn remedies_for_plug_ins_load_no_module_of_another_vendor() {
    for cause in CAUSES {
        let text = cause.remedy.replace('-', "_");
        for module in PEER_MEMORY {
            assert!(!text.contains(module), "{}: {}", cause.name, cause.remedy);
        }
    }
}

/// Returns errors that a container's limits cause: for NICs, for devices and for system calls. Each
/// comes with the facts about the machine and the words that the cause must contain.
fn limits() -> [(&'static str, Step, Error, Facts, &'static str); 8] {
    let nodes = |nodes: &[&str]| nodes.iter().map(|node| (*node).to_owned()).collect();
    let all = nodes(&["/dev/dri/renderD128", "/dev/infiniband/uverbs0", "/dev/nvidia0"]);
    let missing = Facts { missing_nodes: all, ..Facts::default() };
    let forbidden = Facts { forbidden_nodes: missing.missing_nodes.clone(), ..Facts::default() };
    let filtered = Facts { seccomp: Some(true), ..Facts::default() };
    let ring = |errno| {
        Error::new(ErrorKind::Unavailable, "pinned memory")
            .errno(errno)
            .context("call", "io_uring_setup")
    };
    let request =
        RequestFacts { len: 8192, access: Access::REMOTE_READ, regions: 0, max_regions: 1 };
    let room =
        Facts { memlock: Some(65536), pinned: Some(0), request: Some(request), ..Facts::default() };
    let of_user =
        Error::os(Errno(12), "io_uring_register").context("limit", "locked memory of the user");
    [
        ("memlock-of-user", Step::Register, of_user, room, "io_uring"),
        ("seccomp-filter", Step::SystemCall, ring(Errno(1)), filtered.clone(), "seccomp"),
        ("seccomp-filter", Step::SystemCall, ring(Errno(38)), filtered, "seccomp"),
        (
            "nic-node-missing",
            Step::OpenNic,
            Error::os(Errno(2), "ibv_open_device"),
            missing.clone(),
            "(/dev/infiniband/uverbs0)",
        ),
        (
            "device-node-missing",
            Step::OpenDevice,
            Error::new(ErrorKind::Unavailable, "cuInit").driver_code("CUDA_ERROR_NO_DEVICE", 100),
            missing,
            "(/dev/dri/renderD128, /dev/nvidia0)",
        ),
        (
            "nic-node-forbidden",
            Step::OpenNic,
            Error::os(Errno(13), "ibv_open_device"),
            forbidden.clone(),
            "(/dev/infiniband/uverbs0)",
        ),
        (
            "nic-node-forbidden",
            Step::OpenNic,
            Error::os(Errno(1), "ibv_open_device"),
            Facts::default(),
            "/dev",
        ),
        (
            "device-node-forbidden",
            Step::OpenDevice,
            Error::new(ErrorKind::Unavailable, "cuInit").driver_code("CUDA_ERROR_NO_DEVICE", 100),
            forbidden,
            "(/dev/dri/renderD128, /dev/nvidia0)",
        ),
    ]
}

/// DIAG-03
#[test]
fn limits_of_a_container_are_causes_of_unavailability() {
    for (name, step, error, facts, words) in limits() {
        let paths = DefaultPathSelector::new().facts(Arc::new(FixedFacts(facts)));
        let found = paths.explain_unavailable(step, &error).expect(name);
        assert_eq!(found.name, name, "{found:?}");
        assert!(found.to_string().contains(words), "{found:?}");
        assert!(found.remedy.contains('`'), "a command: {found:?}");
    }
    let everything = Facts {
        seccomp: Some(false),
        missing_nodes: BTreeSet::from(["/dev/kfd".to_owned()]),
        ..Facts::default()
    };
    let paths = DefaultPathSelector::new().facts(Arc::new(FixedFacts(everything)));
    let unrelated = [
        (Step::SystemCall, Error::os(Errno(1), "io_uring_setup")),
        (Step::OpenNic, Error::os(Errno(2), "ibv_open_device")),
        (Step::OpenDevice, Error::new(ErrorKind::Unavailable, "load library")),
    ];
    for (step, error) in unrelated {
        assert_eq!(paths.explain_unavailable(step, &error), None, "{error}");
    }
}

/// DIAG-03
///
/// If each segment alone is refused too, the number of segments is not the cause. The refusal then
/// has the cause of a range of one segment. In this test single segments succeed, so nothing else
/// is refused.
#[test]
fn refused_whole_range_export_has_the_cause_of_a_segment() {
    let known = Facts::default;
    let refusals: [(&str, Refuse, Facts); 11] = [
        ("file-descriptors", || Some(Error::os(Errno(24), "export")), known()),
        ("wrong-context", || Some(cuda("CUDA_ERROR_INVALID_CONTEXT", 201)), known()),
        ("freed-or-outside", || Some(Error::new(ErrorKind::OutOfBounds, "export")), known()),
        (
            "bar-small",
            || Some(cuda("CUDA_ERROR_OUT_OF_MEMORY", 2)),
            Facts { bar: Some(256 << 20), ..known() },
        ),
        ("bar-full", || Some(cuda("CUDA_ERROR_OUT_OF_MEMORY", 2)), known()),
        ("acs", out_of_reach, Facts { acs_redirects: Some(true), ..known() }),
        ("iommu", out_of_reach, Facts { iommu_translates: Some(true), ..known() }),
        ("device-not-reachable-from-nic", out_of_reach, known()),
        ("device-files", || Some(Error::os(Errno(13), "export")), known()),
        ("device-lost", || Some(cuda("CUDA_ERROR_DEVICE_UNAVAILABLE", 46)), known()),
        ("segments-not-in-one", not_supported, known()),
    ];
    for (name, refuse, facts) in refusals {
        let scene = Scene { facts, size: 2 * page_size(), whole: Some(refuse), ..Scene::cuda() };
        for trace in scene.play() {
            let [refused, made] = &trace[..] else { panic!("{name}: {trace}") };
            assert_eq!(refused.cause_name, Some(name), "{trace}");
            assert!(made.call.contains("2 segments in 2 dma-bufs"), "{trace}");
        }
    }
}

/// DIAG-03
#[test]
fn explanation_names_the_cause_of_refused_host_memory() {
    let faults = Faults::new();
    let provider = Loopback::builder().faults(&faults).build().unwrap();
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new())).unwrap();
    let facts = Facts { memlock: Some(65536), ..Facts::default() };
    let paths = DefaultPathSelector::new().facts(Arc::new(FixedFacts(facts)));
    faults.fail_nth(NicCall::Register, 1, Errno(12));
    let explanation = paths
        .explain(&Arc::new(registry), &provider, &ExplainRequest::new(IfaceKind::SYSTEM))
        .unwrap();
    assert_eq!(explanation.path, None);
    assert_eq!(explanation.attempts[0].cause_name, Some("memlock"), "{explanation}");
    assert!(explanation.remedies[0].contains("ulimit -l"), "{explanation}");
    let cause = explanation.attempts[0].cause.as_deref().unwrap_or_default();
    let evidence = format!("(the limit is 65536 bytes; the request needs {})", page_size());
    assert!(cause.ends_with(&evidence), "{explanation}");
}

fn page() -> String {
    let mut page = String::from(
        "# Causes and remedies\n\n\
         This page lists the reasons why a path from memory to a NIC is refused, and the remedies. \
         The name of a cause is the `cause_name` of an attempt in a decision's trace \
         (`hmem explain`, `hmem info --json`). Special causes come before general ones. The first \
         cause that fits is the most probable one. A cause that the error and the facts do not \
         prove has the note \"ambiguous\": the error then also lists the next causes that fit, \
         up to the first without the note (`Error::causes`, `causes` in JSON). Facts about the \
         machine choose between causes, \
         and order the mappings of a dma-buf for a device with NVLink-C2C; the library tries each \
         path to find out if it works.\n\n\
         Causes of \"opening the NIC\", \"opening the device\" and \"system call\" explain NICs, \
         devices and facilities that are unavailable, often in containers.\n\n\
         If a range of several segments is refused as one dma-buf, and then each segment in the \
         same way, both have the cause of the segment's export. If an export is refused under both \
         mappings, or in every unit (range, segment, allocation), these attempts have the same \
         cause.\n\n\
         An iface may have its own text for a general cause. The iface's name is then given in \
         brackets. The rank is for authors of such texts (`RefusalCause::rank`): of the causes \
         that fit, the lowest rank is reported, and the iface's cause among equal ranks.\n\n\
         The page is generated from `p2p/src/path/cause.rs` and the `causes.rs` of the ifaces. A \
         test compares it with them (`HMEM_BLESS=1 cargo test -p hmem-p2p \
         --test paths path_causes` writes it).\n",
    );
    for (iface, cause) in by_rank() {
        let paths = join(cause.paths.iter().map(|path| path.name().to_owned()));
        let steps = join(cause.steps.iter().map(|step| step.name().to_owned()));
        let mut when = format!("Rank {}: {paths}, on {steps}", cause.rank);
        if let Some(iface) = iface {
            write!(when, ", {iface}").unwrap();
        }
        if let Some(kind) = cause.kind {
            write!(when, ", {} memory", kind.name()).unwrap();
        }
        when.push_str(match cause.mapping {
            Some(DmaBufMapping::Pcie) => ", PCIe mapping",
            Some(DmaBufMapping::DataDirect) => ", Data Direct",
            Some(DmaBufMapping::Default) | None => "",
        });
        let alike = causes().filter(|(_, other)| other.name == cause.name);
        let mut answered: Vec<_> = alike.flat_map(|(_, cause)| cause.answers).copied().collect();
        answered.sort_by_key(|answer| match answer {
            Answer::Errno(_) => 0,
            Answer::Driver(_) => 1,
            Answer::Kind(_) => 2,
            Answer::Limit(_) => 3,
        });
        let mut answers: Vec<_> = answered.into_iter().flat_map(answers).collect();
        let mut known = BTreeSet::new();
        answers.retain(|answer| known.insert(answer.clone()));
        let answers = join(answers.into_iter());
        write!(when, ": {answers}").unwrap();
        if let Some(needs) = cause.needs {
            write!(when, "; {}", needs.text).unwrap();
        }
        if cause.ambiguous {
            when.push_str("; ambiguous");
        }
        let RefusalCause { name, cause, remedy, .. } = cause;
        write!(page, "\n## {name}\n\n{when}.\n\n- Cause: {cause}.\n- Remedy: {remedy}.\n").unwrap();
        for (of, own) in causes().filter(|(of, own)| *of != iface && own.name == *name) {
            let of = of.expect("a general cause comes first");
            if own.cause != *cause {
                writeln!(page, "- Cause ({of}): {}.", own.cause).unwrap();
            }
            if own.remedy != *remedy {
                writeln!(page, "- Remedy ({of}): {}.", own.remedy).unwrap();
            }
        }
    }
    page.lines().map(wrapped).collect()
}

/// Returns the causes in the order of the search. Leaves out causes of ifaces that only add error
/// codes or other wording to a general cause.
fn by_rank() -> Vec<(Option<IfaceKind>, &'static RefusalCause)> {
    let mut all: Vec<_> = causes().collect();
    all.sort_by_key(|(_, cause)| cause.rank);
    all.dedup_by_key(|(_, cause)| cause.name);
    all
}

/// Wraps a line at 100 columns. Continuation lines of a list item are indented.
fn wrapped(line: &str) -> String {
    let indent = if line.starts_with("- ") { "\n  " } else { "\n" };
    let mut lines = String::new();
    let mut columns = 0;
    for word in line.split(' ') {
        let len = word.chars().count();
        let separator = match columns {
            0 => "",
            columns if columns + 1 + len > 100 => indent,
            _ => " ",
        };
        columns = if separator == indent { indent.len() - 1 } else { columns + separator.len() };
        columns += len;
        lines.extend([separator, word]);
    }
    lines + "\n"
}

fn join(words: impl Iterator<Item = String>) -> String {
    words.collect::<Vec<_>>().join(" or ")
}

fn answers(answer: Answer) -> Vec<String> {
    match answer {
        Answer::Errno(numbers) => numbers.iter().map(|number| Errno(*number).to_string()).collect(),
        Answer::Driver(codes) => codes.iter().map(|code| format!("driver code {code}")).collect(),
        Answer::Kind(kinds) => kinds.iter().map(|kind| format!("\"{kind}\"")).collect(),
        Answer::Limit(name) => vec![format!("the limit {name}")],
    }
}

/// DIAG-03: `docs/causes.md` equals the page that is generated from the tables of causes.
#[test]
fn page_of_causes_matches_the_table() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/causes.md");
    if std::env::var_os("HMEM_BLESS").is_some() {
        std::fs::write(&path, page()).expect("write the page");
    }
    let written = std::fs::read_to_string(&path).expect("docs/causes.md exists");
    assert_eq!(
        written,
        page(),
        "docs/causes.md differs from the table: check the table, then run with HMEM_BLESS=1"
    );
}

/// DIAG-03: every cause has its texts, paths, steps and errors, and different causes have different
/// ranks.
#[test]
fn tables_are_complete_and_consistent() {
    for (iface, cause) in causes() {
        let RefusalCause { name, rank, paths, steps, answers, cause, remedy, .. } = cause;
        assert!(!paths.is_empty() && !steps.is_empty() && !answers.is_empty(), "{name}");
        assert!(cause.len() > 20 && remedy.len() > 10, "{name}");
        assert!(!cause.ends_with('.') && !remedy.ends_with('.'), "{name} is a clause");
        for (_, other) in causes().filter(|(other, _)| *other != iface) {
            if other.name == *name {
                assert_eq!(other.rank, *rank, "{name} stands twice, with different ranks");
            } else {
                assert_ne!(other.rank, *rank, "{name} and {}", other.name);
            }
        }
    }
    for table in [CAUSES].into_iter().chain(VENDORS.map(causes_of)) {
        assert!(table.is_sorted_by(|one, next| one.rank < next.rank), "{table:?}");
    }
    // The well-known error numbers of InfiniBand drivers each have an entry.
    for errno in [12, 14, 22, 95, 524] {
        let named = |cause: &&RefusalCause| {
            cause
                .answers
                .iter()
                .any(|answer| matches!(answer, Answer::Errno(numbers) if numbers.contains(&errno)))
        };
        assert!(CAUSES.iter().any(|cause| named(&cause)), "errno {errno}");
    }
}

/// The required order of these causes, which their ranks must give. The first cause that fits is
/// the probable one.
const ORDER: [&str; 34] = [
    "file-descriptors",
    "kernel-without-dma-buf",
    "nic-driver-without-dma-buf",
    "nvidia-closed-modules",
    "no-pcie-mapping",
    "vmm-range",
    "stream-ordered-pool",
    "segment-not-exportable",
    "wrong-context",
    "freed-or-outside",
    "bar-small",
    "bar-full",
    "rocr-kernel-options",
    "ze-not-exportable",
    "segments-not-in-one",
    "device-without-dma-buf",
    "acs",
    "iommu",
    "device-not-reachable-from-nic",
    "peer-memory-module-missing",
    "peer-memory-range",
    "nic-without-peer-memory",
    "device-without-peer-memory",
    "memlock",
    "rdma-cgroup",
    "nic-tables-full",
    "beyond-the-export",
    "dma-buf-not-mappable",
    "bad-host-pages",
    "closed-descriptor",
    "device-files",
    "device-lost",
    "nic-lost",
    "nic-takes-no-copies",
];

/// Returns an error for each error code that a cause lists. A driver's code gets the error kind
/// that `hmem-iface-cuda` assigns to it.
fn answered() -> Vec<Error> {
    let mut errors = vec![Error::new(ErrorKind::Driver, "call")];
    for answer in causes().flat_map(|(_, cause)| cause.answers) {
        match answer {
            Answer::Errno(numbers) => {
                errors.extend(numbers.iter().map(|errno| Error::os(Errno(*errno), "call")));
            }
            Answer::Kind(kinds) => {
                errors.extend(kinds.iter().map(|kind| Error::new(*kind, "call")))
            }
            Answer::Driver(_) | Answer::Limit(_) => {}
        }
    }
    let codes = [
        (1, ErrorKind::InvalidArgument),
        (2, ErrorKind::OutOfResources),
        (3, ErrorKind::Unavailable),
        (4, ErrorKind::Unavailable),
        (46, ErrorKind::Unavailable),
        (100, ErrorKind::Unavailable),
        (101, ErrorKind::InvalidArgument),
        (201, ErrorKind::BadState),
        (709, ErrorKind::BadState),
        (801, ErrorKind::Unsupported),
        // The driver's answer for a mapping that it does not support.
        (1, ErrorKind::Unsupported),
    ];
    errors.extend(codes.map(|(code, kind)| Error::new(kind, "call").driver_code("CODE", code)));
    errors
}

/// Returns machines with no known fact, with one known fact each, and with all facts known.
fn machines() -> Vec<Facts> {
    let unknown = Facts::default;
    let nodes =
        || (["/dev/infiniband/uverbs0", "/dev/kfd"].map(str::to_owned)).into_iter().collect();
    let one = [
        Facts { kernel: Some((5, 4)), ..unknown() },
        Facts { kernel_options: Some(BTreeSet::new()), ..unknown() },
        Facts { bar: Some(256 << 20), ..unknown() },
        Facts { acs_redirects: Some(true), ..unknown() },
        Facts { iommu_translates: Some(true), ..unknown() },
        Facts { memlock: Some(65536), ..unknown() },
        Facts { seccomp: Some(true), ..unknown() },
        Facts { missing_nodes: nodes(), ..unknown() },
        Facts { forbidden_nodes: nodes(), ..unknown() },
        modules(&["nvidia"]),
        closed_modules(),
        unlimited_group(),
    ];
    let every = Facts {
        kernel: Some((5, 4)),
        modules: modules(&["nvidia"]).modules,
        kernel_options: Some(BTreeSet::new()),
        memlock: Some(65536),
        pinned: Some(0),
        ipc_lock: Some(IpcLock::UserNamespace),
        seccomp: Some(true),
        missing_nodes: nodes(),
        forbidden_nodes: nodes(),
        iommu_translates: Some(true),
        acs_redirects: Some(true),
        bar: Some(256 << 20),
        coherent_link: Some(CoherentLink::C2c { shares_switch: false }),
        memory_only_nodes: [1].into(),
        request: None,
        root: closed_modules().root,
    };
    [unknown()].into_iter().chain(one).chain([every]).collect()
}

/// DIAG-03
///
/// The ranks of all causes give the required order for every refusal. The causes of an iface and
/// the general causes are merged by rank.
#[test]
fn ranks_give_the_required_order_for_every_refusal() {
    for (at, name) in ORDER.into_iter().enumerate() {
        let rows = causes().filter(|(_, cause)| cause.name == name);
        let ranks: Vec<_> = rows.map(|(_, cause)| cause.rank as usize).collect();
        assert!(!ranks.is_empty() && ranks.iter().all(|rank| *rank == 10 * (at + 1)), "{name}");
    }
    let (errors, machines) = (answered(), machines());
    let place = |row: &RefusalCause| ORDER.iter().position(|name| *name == row.name);
    let mut named = BTreeSet::new();
    for iface in VENDORS.into_iter().chain([IfaceKind::FIRST_PLUG_IN]) {
        // Causes that are not in `ORDER` have ranks between the multiples of 10.
        let listed = |row: &&RefusalCause| ORDER.contains(&row.name);
        let rows: Vec<_> = causes_of(iface).iter().chain(CAUSES).filter(listed).collect();
        let mut compare = |context: RefusalContext<'_>| {
            // The other rows fit the refusal on no machine.
            let rows: Vec<_> = rows.iter().copied().filter(|row| row.may_fit(&context)).collect();
            for facts in &machines {
                let fitting = rows.iter().filter(|row| row.fits(&context, facts));
                let first = fitting.filter_map(|row| place(row)).min().map(|at| ORDER[at]);
                let found = RefusalCause::ranked(rows.iter().copied(), &context, facts);
                let found = found.first().map(|cause| cause.name);
                assert_eq!(found, first, "{iface}, {context:?}, {facts:?}");
                named.extend(found);
            }
        };
        for path in [Path::PlainHost, Path::DmaBuf, Path::PeerMemory, Path::Staged] {
            for step in Step::ALL {
                for kind in [
                    AllocationKind::Host,
                    AllocationKind::Device,
                    AllocationKind::StreamOrdered,
                    AllocationKind::Virtual,
                ] {
                    for mapping in [DmaBufMapping::Default, DmaBufMapping::Pcie] {
                        for error in &errors {
                            compare(RefusalContext { path, step, kind, mapping, error });
                        }
                    }
                }
            }
        }
    }
    assert_eq!(named.len(), ORDER.len(), "each cause explains a refusal");
}
