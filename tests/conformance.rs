//! The conformance suite over the ifaces and providers of this workspace, and over the example of a
//! plug-in.
#![allow(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use hmem::system::{DmaBufKind, Simulated, Style, System};
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
