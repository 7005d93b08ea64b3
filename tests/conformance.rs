//! The conformance suite over the ifaces and providers of this workspace, and over the example of a
//! plug-in.
#![allow(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use hmem::{
    MrMode,
    loopback::{Loopback, Memory, Progress},
    system::{DmaBufKind, Simulated, Style, System},
};
use hmem_conformance::Suite;

#[path = "../examples/plug_in_iface.rs"]
mod plug_in_iface;

fn main() -> ExitCode {
    let mut suite = Suite::from_args();
    suite.iface("system", || Ok(Arc::new(System::new())));
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
    suite.provider("verbs", verbs);
    suite.run()
}

/// The CUDA iface over the fake driver in each profile.
#[cfg(feature = "cuda")]
fn cuda(suite: &mut Suite) {
    use hmem::cuda::{Cuda, sys::Functions};
    use hmem_fake_cuda::{Profile, restart};

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
fn verbs() -> hmem::Result<Arc<dyn hmem::provider::Provider>> {
    use hmem::{
        Error, ErrorKind,
        verbs::{Verbs, VerbsOptions},
    };

    if std::env::var_os("HMEM_VERBS_DEVICE").is_none_or(|name| name.is_empty()) {
        return Err(Error::new(ErrorKind::Unavailable, "verbs")
            .remedy("name an RDMA device in HMEM_VERBS_DEVICE"));
    }
    // Endpoints are connected, and after an error connected anew, as if there were no connections.
    let builder = Verbs::builder().connect_in_process(true).options(VerbsOptions::MW_BIND);
    Ok(Arc::new(builder.build()?))
}
