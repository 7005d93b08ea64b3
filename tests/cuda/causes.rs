//! DIAG-03: registrations of CUDA memory name each cause of a refusal that concerns CUDA, with its
//! text.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use hmem::{
    Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Errno,
    Iface, IfaceKind, MrMode, Registry, Request,
    cuda::{
        CAUSES, Cuda, CudaMonitorKind,
        sys::{CuContext, CuResult, Functions},
    },
    iface::AllocRequest,
    loopback::{Faults, Loopback, NicCall},
    p2p::path::{DefaultPathSelector, FactSource, Facts, cause},
    path::Trace,
    provider::{Imports, Nic},
    system::System,
};
use hmem_fake_cuda::{FakeDriver, Profile};

use crate::{
    link::{IMPORTS, REMOTE, check, not_over_a_gpu, raw},
    segments::Segments,
};

/// A source of facts about the machine that returns fixed ones.
#[derive(Debug)]
struct FixedFacts(Facts);

impl FactSource for FixedFacts {
    fn facts(&self, _: Option<&str>, _: &Nic) -> Facts {
        self.0.clone()
    }
}

/// The memory that a [`Case`] registers.
enum Memory {
    Of(AllocationKind),
    /// Memory in a context of the application, which the driver no longer knows after the query for
    /// its owner. For such memory the iface checks that the context still lives.
    FreedAfterQuery,
    /// A VMM reservation with a handle for each element, which is true if the handle was created
    /// for RDMA.
    Handles(&'static [bool]),
}

/// A test case: settings of the driver, the NIC and the machine under which a registration is
/// refused.
struct Case {
    profile: Profile,
    imports: Imports,
    facts: Facts,
    memory: Memory,
    /// Fault of the driver: the function that fails, the number of the call that fails (1 is the
    /// first, and `None` means every call), and the error code.
    refusal: Option<(&'static str, Option<u64>, CuResult)>,
    /// Errno with which the NIC refuses its first registration.
    nic: Option<Errno>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            profile: Profile::default(),
            imports: IMPORTS,
            facts: Facts::default(),
            memory: Memory::Of(AllocationKind::Device),
            refusal: None,
            nic: None,
        }
    }
}

impl Case {
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
        let paths = Arc::new(DefaultPathSelector::new().facts(Arc::new(FixedFacts(self.facts))));
        let mr_mode = MrMode::all().difference(MrMode::BASIC | MrMode::SCALABLE);
        let attr = DomainAttr { mr_mode, hmem: true, ..DomainAttr::default() };
        let domain = Domain::open(&nic, Arc::new(registry), paths, attr).expect("a domain");
        let refuse = || {
            match self.refusal {
                Some((symbol, Some(nth), code)) => driver.fail_nth(symbol, nth, code),
                Some((symbol, None, code)) => driver.fail_always(symbol, code),
                None => {}
            }
            if let Some(errno) = self.nic {
                faults.fail_nth(NicCall::Register, 1, errno);
            }
        };
        let allocate = |kind| {
            let request = AllocRequest { len: 8192, device: DeviceId(0), kind };
            DeviceBuffer::allocate(&cuda, &request).expect("allocate")
        };
        let registered = |range: AddressRange| {
            refuse();
            // SAFETY: the region is closed before its memory goes, and no reference into it exists.
            let claim = Request::new(unsafe { raw(range) }, REMOTE).owner(IfaceKind::CUDA, None);
            match domain.submit(claim) {
                Ok(region) => {
                    let trace = region.decision().expect("decision").attempts.clone();
                    region.close().expect("close");
                    trace
                }
                Err(rejected) => rejected.error.trace().clone(),
            }
        };
        match self.memory {
            Memory::Of(kind) => registered(allocate(kind).allocation().range),
            Memory::FreedAfterQuery => {
                let (mut context, mut popped, mut pointer) = (CuContext::NULL, CuContext::NULL, 0);
                // SAFETY: the outputs are writable, and device 0 exists.
                unsafe {
                    check(hmem_fake_cuda::cuCtxCreate_v2(&mut context, 0, 0));
                    check((functions.mem_alloc())(&mut pointer, 8192));
                    check((functions.ctx_pop_current())(&mut popped));
                }
                driver.forget_after(pointer, 1);
                registered(AddressRange::new(Address(pointer), 8192).expect("a range"))
            }
            Memory::Handles(handles) => {
                let memory = Segments::new(&functions, handles);
                registered(memory.range(0, handles.len() as u64 * memory.step))
            }
        }
    }
}

/// Returns the facts of a machine with NVIDIA's closed kernel modules.
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

/// Returns the test cases that provoke each cause, each with the name of its cause.
fn cases() -> Vec<(&'static str, Case)> {
    const EXPORT: &str = "cuMemGetHandleForAddressRange";
    let refused = |code| Case { refusal: Some((EXPORT, Some(1), code)), ..Case::default() };
    let of = |kind| Case { memory: Memory::Of(kind), ..Case::default() };
    let closed = || Profile::named("550-closed").expect("a profile");
    let pcie_first = Imports { pcie_mapping_first: Some(true), ..IMPORTS };
    let peer_only = Imports { dma_buf: false, peer_memory: true, ..IMPORTS };
    let before_the_flag = || Profile::named("550-open").expect("a profile");
    let mut cases = vec![
        (
            "nvidia-closed-modules",
            Case { profile: closed(), facts: closed_modules(), ..Case::default() },
        ),
        ("device-without-dma-buf", Case { profile: closed(), ..Case::default() }),
        ("device-without-dma-buf", refused(CuResult::CUDA_ERROR_NOT_SUPPORTED)),
        (
            "device-without-dma-buf",
            Case {
                profile: Profile { absent: vec![EXPORT], ..Profile::default() },
                ..Case::default()
            },
        ),
        ("vmm-range", Case { memory: Memory::Handles(&[true, false]), ..Case::default() }),
        (
            // The driver refuses the range and its whole allocation.
            "vmm-range",
            Case {
                refusal: Some((EXPORT, None, CuResult::CUDA_ERROR_INVALID_VALUE)),
                ..of(AllocationKind::Virtual)
            },
        ),
        (
            "other-export-unit",
            Case {
                refusal: Some((EXPORT, Some(1), CuResult::CUDA_ERROR_INVALID_VALUE)),
                ..of(AllocationKind::Virtual)
            },
        ),
        (
            "segments-not-in-one",
            Case {
                profile: Profile { spanning_exports: false, ..Profile::default() },
                memory: Memory::Handles(&[true; 2]),
                ..Case::default()
            },
        ),
        // This is the driver's error code for a range that contains unmapped addresses.
        (
            "vmm-range",
            Case {
                refusal: Some(("cuMemGetAddressRange_v2", Some(1), CuResult::CUDA_ERROR_NOT_FOUND)),
                ..of(AllocationKind::Virtual)
            },
        ),
        ("stream-ordered-pool", of(AllocationKind::StreamOrdered)),
        ("stream-ordered-pool", Case { imports: peer_only, ..of(AllocationKind::StreamOrdered) }),
        ("freed-or-outside", Case { memory: Memory::FreedAfterQuery, ..Case::default() }),
        (
            "bar-small",
            Case {
                facts: Facts { bar: Some(256 << 20), ..Facts::default() },
                ..refused(CuResult::CUDA_ERROR_OUT_OF_MEMORY)
            },
        ),
        ("bar-full", refused(CuResult::CUDA_ERROR_OUT_OF_MEMORY)),
        ("device-files", refused(CuResult::CUDA_ERROR_NOT_PERMITTED)),
        (
            "device-without-peer-memory",
            Case {
                profile: Profile { rdma: false, ..Profile::default() },
                imports: peer_only,
                ..Case::default()
            },
        ),
        (
            "peer-memory-module-missing",
            Case {
                imports: peer_only,
                facts: modules(&["nvidia"]),
                nic: Some(Errno(14)),
                ..Case::default()
            },
        ),
        (
            "peer-memory-range",
            Case {
                imports: peer_only,
                facts: modules(&["nvidia_peermem"]),
                nic: Some(Errno(14)),
                ..Case::default()
            },
        ),
    ];
    for kind in [AllocationKind::Device, AllocationKind::Virtual] {
        cases.push((
            "no-pcie-mapping",
            Case { profile: before_the_flag(), imports: pcie_first, ..of(kind) },
        ));
    }
    for code in [
        CuResult::CUDA_ERROR_NOT_INITIALIZED,
        CuResult::CUDA_ERROR_DEINITIALIZED,
        CuResult::CUDA_ERROR_INVALID_CONTEXT,
        CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    ] {
        cases.push(("wrong-context", refused(code)));
    }
    for code in [
        CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE,
        CuResult::CUDA_ERROR_NO_DEVICE,
        CuResult::CUDA_ERROR_INVALID_DEVICE,
        CuResult::CUDA_ERROR_ILLEGAL_ADDRESS,
    ] {
        cases.push(("device-lost", refused(code)));
    }
    cases
}

/// DIAG-03
///
/// The NIC prefers the PCIe mapping, and the driver supports it. If a registration with the mapping
/// is refused, the reported cause must not be a missing mapping.
#[test]
fn refusal_under_an_existing_pcie_mapping_has_its_own_cause() {
    if not_over_a_gpu("the driver must have the mapping and refuse") {
        return;
    }
    let imports = Imports { pcie_mapping_first: Some(true), ..IMPORTS };
    let with = |memory| Case { imports, memory, ..Case::default() };
    let one_by_one = Profile { spanning_exports: false, ..Profile::default() };
    let before_the_flag = Profile::named("550-open").expect("a profile");
    for (case, causes) in [
        (with(Memory::Of(AllocationKind::StreamOrdered)), &["stream-ordered-pool"; 2] as &[_]),
        (
            Case { profile: one_by_one, ..with(Memory::Handles(&[true; 2])) },
            &["segments-not-in-one"],
        ),
        (
            Case { profile: before_the_flag, ..with(Memory::Handles(&[true; 2])) },
            &["no-pcie-mapping"; 2],
        ),
    ] {
        let trace = case.play();
        let exports = trace.iter().filter(|attempt| attempt.call.starts_with("export_dma_buf"));
        let refused: Vec<_> = exports.collect();
        let named: Vec<_> = refused.iter().filter_map(|attempt| attempt.cause_name).collect();
        assert_eq!(named, causes, "{trace}");
        let error = refused[0].error.as_ref().expect("refused");
        assert_eq!(error.context_value("why"), Some("refused under the PCIe mapping"), "{error}");
    }
}

/// DIAG-03
#[test]
fn each_cuda_cause_is_named_by_a_registration() {
    if not_over_a_gpu("every answer of the driver must be selected") {
        return;
    }
    let mut met = BTreeSet::new();
    for (name, case) in cases() {
        let cause = CAUSES.iter().chain(cause::CAUSES).find(|cause| cause.name == name);
        let cause = cause.unwrap_or_else(|| panic!("no cause {name}"));
        let trace = case.play();
        let attempt = trace.iter().find(|attempt| attempt.cause_name == Some(name));
        let attempt = attempt.unwrap_or_else(|| panic!("{name} is not named: {trace}"));
        assert_eq!(attempt.cause.as_deref(), Some(cause.cause), "{name}");
        assert_eq!(attempt.remedy.as_deref(), Some(cause.remedy), "{name}");
        let text = attempt.to_string();
        assert!(text.contains(cause.cause) && text.contains(cause.remedy), "{text}");
        met.insert(name);
    }
    // Each cause of CUDA has a test case, and so has each general cause that a CUDA error code
    // leads to.
    const BY_KIND: [&str; 3] = ["bar-small", "bar-full", "segments-not-in-one"];
    for name in CAUSES.iter().map(|cause| cause.name).chain(BY_KIND) {
        assert!(met.contains(name), "no test case provokes {name}");
    }
}
