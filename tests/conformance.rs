//! The conformance suite over the ifaces and providers of this workspace, and over the examples of
//! plug-ins.
#![allow(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use hmem::{
    Address, Allocation, AllocationKind, Error, ErrorKind, Iface, IfaceExt, IfaceKind, MrMode,
    Result,
    iface::{
        AllocRequest, Allocator, Device, DmaBufExporter, Facet, Ipc, MonitorSource, SegmentMap,
    },
    loopback::{Faults, Loopback, Progress, RemapPolicy},
    system::{DmaBufKind, FreeDetection, Simulated, System},
};
use hmem_conformance::Suite;

mod machine;
#[path = "../examples/plug_in_iface.rs"]
mod plug_in_iface;
#[path = "../examples/plug_in_provider.rs"]
mod plug_in_provider;
#[cfg(feature = "rocr")]
#[path = "rocr/model.rs"]
mod rocr_model;

fn main() -> ExitCode {
    let mut suite = Suite::from_args();
    suite.iface("system", || Ok(Arc::new(System::new())));
    suite.iface("system-files", || Ok(Arc::new(Files(System::new()))));
    for (name, style, exports) in [
        ("simulated", FreeDetection::Identity, DmaBufKind::Auto),
        ("simulated-callback", FreeDetection::Callback, DmaBufKind::MemFd),
        ("simulated-without-dma-bufs", FreeDetection::Identity, DmaBufKind::None),
    ] {
        let device =
            move || Simulated::builder().devices(2).free_detection(style).dma_buf(exports).build();
        suite.iface(name, move || Ok(Arc::new(device()?)));
    }
    suite.iface("plug-in", || Ok(Arc::new(plug_in_iface::FileMemory::default())));
    #[cfg(feature = "cuda")]
    cuda(&mut suite);
    #[cfg(feature = "rocr")]
    rocr(&mut suite);
    #[cfg(feature = "ze")]
    level_zero(&mut suite);
    #[cfg(feature = "neuron")]
    neuron(&mut suite);
    #[cfg(feature = "synapseai")]
    synapseai(&mut suite);

    software_nics(&mut suite);
    suite.provider("plug-in", || Ok(Arc::new(plug_in_provider::CopyNic::default())));
    #[cfg(feature = "verbs")]
    verbs(&mut suite);
    suite.run()
}

/// Adds tests of the software NIC in every mode. All combinations of key size, progress and pages
/// occur, each with one or two modes. The tests with pinned pages are ignored if the process cannot
/// pin pages.
fn software_nics(suite: &mut Suite) {
    let hardware = MrMode::LOCAL | MrMode::ALLOCATED | MrMode::HMEM | MrMode::BASIC_MEANS;
    let modes = [
        ("default", MrMode::empty()),
        ("local", MrMode::LOCAL),
        ("raw", MrMode::RAW),
        ("virt-addr", MrMode::VIRT_ADDR),
        ("allocated", MrMode::ALLOCATED),
        ("prov-key", MrMode::PROV_KEY),
        ("notify", MrMode::MMU_NOTIFY),
        ("rma-event", MrMode::RMA_EVENT),
        ("endpoint", MrMode::ENDPOINT),
        ("hmem", MrMode::HMEM),
        ("collective", MrMode::COLLECTIVE),
        ("basic", MrMode::BASIC_MEANS),
        ("hardware", hardware),
    ];
    for (number, (name, mode)) in modes.into_iter().enumerate() {
        let key_size = [8, 4][number % 2];
        let progress = [Progress::ByHand, Progress::Thread][number / 2 % 2];
        let pages = [RemapPolicy::Follow, RemapPolicy::Pinned][number / 4 % 2];
        suite.controlled_provider(&format!("loopback-{name}"), move || {
            let unpinned = machine::without_pinned_pages();
            if let Some(why) = unpinned.filter(|_| pages == RemapPolicy::Pinned) {
                return Err(Error::new(ErrorKind::Unavailable, "pinned pages").caused_by(why));
            }
            let faults = Faults::new();
            let builder = Loopback::builder().needs(mode).key_size(key_size).faults(&faults);
            let builder = builder.progress(progress).remap_policy(pages);
            let data = if mode == MrMode::COLLECTIVE { 0 } else { key_size };
            let nic = builder.cq_data_size(data).build()?;
            Ok((Arc::new(nic.clone()), Arc::new((nic, faults))))
        });
    }
}

/// Adds tests of the CUDA iface: over the fake driver with each profile (set of simulated
/// properties), or over a GPU if `HMEM_CUDA` lists `real`.
#[cfg(feature = "cuda")]
fn cuda(suite: &mut Suite) {
    use hmem::cuda::{Cuda, sys::Functions};
    use hmem_fake_cuda::{Profile, restart};

    let asked = std::env::var("HMEM_CUDA").unwrap_or_default();
    if asked.split(',').any(|name| name.trim() == "real") {
        return suite.iface("cuda", || Ok(Arc::new(Cuda::open()?)));
    }
    for profile in Profile::all() {
        suite.iface(&format!("cuda-{}", profile.name), move || {
            // SAFETY: each function has the signature of its name in `cuda.h`, and functions live
            // forever.
            let functions = unsafe { Functions::from_lookup(restart(profile.clone())) }?;
            Ok(Arc::new(Cuda::builder().functions(functions).open()?))
        });
    }
}

/// Adds tests of the ROCr iface: over the fake runtime with each profile (set of simulated
/// properties), or over AMD's runtime with a model GPU if `HMEM_ROCR=model` (`tests/rocr/run`).
#[cfg(feature = "rocr")]
fn rocr(suite: &mut Suite) {
    use hmem::rocr::{Rocr, sys::Functions};
    use hmem_fake_rocr::{Profile, restart};

    if std::env::var("HMEM_ROCR").is_ok_and(|name| name == "model") {
        return suite.iface("rocr-model", || {
            let rocr = Rocr::builder().functions(rocr_model::functions()).open()?;
            Ok(Arc::new(rocr))
        });
    }
    for profile in Profile::all() {
        suite.iface(&format!("rocr-{}", profile.name), move || {
            // SAFETY: each function has the signature of its name in AMD's headers, and functions
            // live forever.
            let functions = unsafe { Functions::from_lookup(restart(profile.clone())) }?;
            Ok(Arc::new(Rocr::builder().functions(functions).open()?))
        });
    }
}

/// Adds tests of the Level Zero iface: over the fake driver with each profile (set of simulated
/// properties), or over the real driver if `HMEM_ZE` lists `real`.
#[cfg(feature = "ze")]
fn level_zero(suite: &mut Suite) {
    use hmem::ze::{LevelZero, sys::Functions};
    use hmem_fake_ze::{Profile, restart};

    if std::env::var("HMEM_ZE")
        .is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"))
    {
        return suite.iface("ze", || Ok(Arc::new(LevelZero::open()?)));
    }
    for profile in Profile::all() {
        suite.iface(&format!("ze-{}", profile.name), move || {
            // SAFETY: each function has the signature of its name in `ze_api.h`, and functions live
            // forever.
            let functions = unsafe { Functions::from_lookup(restart(profile.clone())) }?;
            Ok(Arc::new(LevelZero::builder().functions(functions).open()?))
        });
    }
}

/// Adds tests of the Neuron iface: over the fake runtime with both versions of the export call and
/// without it, or over a device if `HMEM_NEURON=real`.
#[cfg(feature = "neuron")]
fn neuron(suite: &mut Suite) {
    use hmem::neuron::{Neuron, sys::Functions};
    use hmem_fake_accelerators::{Profile, restart};

    if std::env::var("HMEM_NEURON").is_ok_and(|asked| asked == "real") {
        let open = || Ok(Arc::new(Neuron::builder().start_runtime(true).open()?) as _);
        return suite.iface("neuron", open);
    }
    const EXPORTS: [&str; 2] = ["nrt_get_dmabuf_fd_v2", "nrt_get_dmabuf_fd"];
    for (name, absent) in
        [("neuron", 0), ("neuron-first-export-call", 1), ("neuron-without-dma-bufs", EXPORTS.len())]
    {
        suite.iface(name, move || {
            // SAFETY: each function has the signature of its name in `nrt.h`, and functions live
            // forever.
            let functions = unsafe {
                Functions::from_lookup(restart(Profile::running().without(&EXPORTS[..absent])))
            }?;
            Ok(Arc::new(Neuron::builder().functions(functions).open()?))
        });
    }
}

/// Adds tests of the SynapseAI iface: over the fake runtime, or over a device if
/// `HMEM_SYNAPSEAI=real`.
#[cfg(feature = "synapseai")]
fn synapseai(suite: &mut Suite) {
    use hmem::synapseai::{
        SynapseAi,
        sys::{hlthunk, synapse},
    };
    use hmem_fake_accelerators::{Profile, restart};

    if std::env::var("HMEM_SYNAPSEAI").is_ok_and(|asked| asked == "real") {
        let open = || Ok(Arc::new(SynapseAi::builder().start_runtime(true).open()?) as _);
        return suite.iface("synapseai", open);
    }
    suite.iface("synapseai", || {
        let lookup = restart(Profile::running());
        // SAFETY: each function has the signature of its name in the vendor's header, and functions
        // live forever.
        let (synapse, hlthunk) = unsafe {
            (synapse::Functions::from_lookup(&lookup)?, hlthunk::Functions::from_lookup(&lookup)?)
        };
        Ok(Arc::new(SynapseAi::builder().functions(synapse).hlthunk_functions(hlthunk).open()?))
    });
}

/// Adds tests of the verbs provider, if `HMEM_VERBS_DEVICE` names an RDMA device.
#[cfg(feature = "verbs")]
fn verbs(suite: &mut Suite) {
    use hmem::{provider::Provider, verbs::Verbs};

    let device = std::env::var("HMEM_VERBS_DEVICE").unwrap_or_default();
    let open = move || -> Result<Arc<dyn Provider>> {
        if device.is_empty() {
            return Err(Error::new(ErrorKind::Unavailable, "verbs")
                .remedy("name an RDMA device in HMEM_VERBS_DEVICE"));
        }
        // Endpoints connect automatically, and reconnect after an error.
        Ok(Arc::new(Verbs::builder().connect_in_process(true).build()?))
    };
    suite.provider("verbs", open);
}

/// An iface for host memory in memory files, which can be exported as dma-bufs.
#[derive(Debug)]
struct Files(System);

// SAFETY: each answer comes from the system iface, for its own allocations.
unsafe impl Iface for Files {
    fn kind(&self) -> IfaceKind {
        self.0.kind()
    }

    fn name(&self) -> &str {
        "system-files"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        self.0.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.0.query(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.copy(to, from, len) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        self.0.dma_buf()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.0.ipc()
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Iface::segments(&self.0)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        self.0.monitor()
    }

    fn unavailable(&self, facet: Facet) -> Error {
        self.0.unavailable(facet)
    }
}

impl Allocator for Files {
    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        match request.kind {
            AllocationKind::System => self.0.memfd(request.len),
            _ => IfaceExt::allocate(&self.0, request),
        }
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { IfaceExt::free(&self.0, allocation) }
    }
}
