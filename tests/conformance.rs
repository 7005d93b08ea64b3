//! The conformance suite over the ifaces and providers of this workspace, and over the example of a
//! plug-in.
#![allow(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use hmem::{
    Address, Allocation, AllocationKind, Error, Iface, IfaceExt, IfaceKind, MrMode, Result,
    iface::{
        AllocRequest, Allocator, Device, DmaBufExporter, Facet, Ipc, MonitorSource, SegmentMap,
    },
    loopback::{Loopback, Memory, Progress},
    system::{DmaBufKind, Simulated, Style, System},
};
use hmem_conformance::Suite;

#[path = "../examples/plug_in_iface.rs"]
mod plug_in_iface;

fn main() -> ExitCode {
    let mut suite = Suite::from_args();
    suite.iface("system", || Ok(Arc::new(System::new())));
    suite.iface("system-files", || Ok(Arc::new(Files(System::new()))));
    for (name, style, exports) in [
        ("simulated", Style::Identity, DmaBufKind::Auto),
        ("simulated-callback", Style::Callback, DmaBufKind::MemFd),
        ("simulated-without-dma-bufs", Style::Identity, DmaBufKind::None),
    ] {
        let device = move || Simulated::builder().devices(2).style(style).dma_buf(exports).build();
        suite.iface(name, move || Ok(Arc::new(device()?)));
    }
    suite.iface("plug-in", || Ok(Arc::new(plug_in_iface::FileMemory::default())));
    #[cfg(feature = "cuda")]
    cuda(&mut suite);

    let hardware = MrMode::LOCAL | MrMode::ALLOCATED | MrMode::HMEM | MrMode::BASIC_MEANS;
    for (name, mode) in [
        ("loopback", MrMode::empty()),
        ("loopback-hardware", hardware),
        ("loopback-raw", MrMode::RAW),
        ("loopback-notify", MrMode::MMU_NOTIFY),
        ("loopback-rma-event", MrMode::RMA_EVENT),
        ("loopback-endpoint", MrMode::ENDPOINT),
    ] {
        suite.provider(name, move || Ok(Arc::new(Loopback::builder().needs(mode).build()?)));
    }
    suite.provider("loopback-pinned", move || {
        let builder = Loopback::builder().needs(hardware).key_size(4).memory(Memory::Pinned);
        Ok(Arc::new(builder.progress(Progress::Thread).build()?))
    });
    #[cfg(feature = "verbs")]
    verbs(&mut suite);
    suite.run()
}

/// The CUDA iface over the fake driver in each profile, or over a GPU where `HMEM_CUDA=real` asks
/// for one.
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

/// RDMA devices, where `HMEM_VERBS_DEVICE` asks for them.
#[cfg(feature = "verbs")]
fn verbs(suite: &mut Suite) {
    use hmem::{
        ErrorKind,
        provider::Provider,
        verbs::{Verbs, VerbsOptions},
    };

    let device = std::env::var("HMEM_VERBS_DEVICE").unwrap_or_default();
    let is_rxe = device.starts_with("rxe");
    let open = move |options| -> Result<Arc<dyn Provider>> {
        if device.is_empty() {
            return Err(Error::new(ErrorKind::Unavailable, "verbs")
                .remedy("name an RDMA device in HMEM_VERBS_DEVICE"));
        }
        // Endpoints are connected, and after an error connected anew, as if there were no
        // connections.
        Ok(Arc::new(Verbs::builder().connect_in_process(true).options(options).build()?))
    };
    let with_windows = open.clone();
    suite.provider("verbs", move || open(VerbsOptions::empty()));
    suite.provider("verbs-windows", move || with_windows(VerbsOptions::MW_BIND));
    for behaviour in [
        "window_is_reached_until_it_is_invalidated",
        "nothing_is_reached_outside_a_window",
        "region_with_a_bound_window_is_busy",
    ] {
        suite.ignore(&format!("verbs::{behaviour}"), "its regions take no windows");
    }
    if is_rxe {
        suite.ignore(
            "verbs-windows::nothing_is_reached_outside_a_window",
            "rdma_rxe enforces the bounds of a window's region, not those of the window",
        );
        suite.ignore(
            "verbs-windows::device_memory_is_reached_by_its_dma_buf",
            "the VM tier's rdma_rxe binds windows to host memory only",
        );
    }
}

/// Host memory whose allocations are memory files, which can be exported.
#[derive(Debug)]
struct Files(System);

// SAFETY: each answer is the system iface's, for an allocation of its own.
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
        // SAFETY: passed on to the caller.
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
        // SAFETY: passed on to the caller.
        unsafe { IfaceExt::free(&self.0, allocation) }
    }
}
