//! Tests of the real `libcuda.so.1` of two releases without a device. With `HMEM_CUDA=driver`, a
//! missing library is a failure.

#[path = "../../tests/child/mod.rs"]
mod child;
#[path = "../../tests/subscriber/mod.rs"]
mod subscriber;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use std::{env, ffi::c_int, path::Path, sync::Arc};

use hmem_core::ErrorKind;
use hmem_iface_cuda::{
    Cuda, FreeHooks,
    sys::{self, CuContext, CuDevicePtr, CuResult, Functions},
};
use subscriber::Recorder;
use trials::{Outcome, Skipped, trials};

/// Runs `test` once for each release of the driver. Each run is in a new process that runs only the
/// test `name`, since two releases in one process would share global state.
fn for_each_release(name: &str, test: impl Fn(&str, &Path)) -> Outcome {
    const RELEASE: &str = "HMEM_CUDA_RELEASE";
    if Path::new("/proc/driver/nvidia/version").exists() {
        return Err(Skipped("this machine has its own driver".into()));
    }
    let wanted = env::var(RELEASE);
    for release in ["535", "550"] {
        let file = format!("driver/{release}/libcuda.so.1");
        let path = vendor_files::downloaded("cuda", "driver", &file).map_err(Skipped)?;
        match &wanted {
            Ok(wanted) if wanted == release => test(release, &path),
            Ok(_) => {}
            Err(_) => drop(child::passes(child::command(name).env(RELEASE, release))),
        }
    }
    Ok(())
}

fn real_driver_without_a_device_is_unavailable() -> Outcome {
    for_each_release("real_driver_without_a_device_is_unavailable", |release, path| {
        // SAFETY: the file is the vendor's library.
        let error = unsafe { Cuda::builder().library(path) }.open().expect_err("no device");
        assert_eq!(
            (error.kind(), error.operation()),
            (ErrorKind::Unavailable, "cuInit"),
            "{release}: {error}"
        );
        let code = error.driver().expect("the driver's code");
        assert_eq!((code.name.as_ref(), code.code), ("CUDA_ERROR_NO_DEVICE", 100), "{release}");
        assert_eq!(error.context_value("library"), Some(path.display().to_string().as_str()));
        assert!(error.remedy_text().is_some());
    })
}

/// The library has every required symbol of the table, and the optional ones that the test names.
/// Before a successful `cuInit` its functions return the same codes as the fake driver.
fn real_driver_before_start_answers_as_recorded() -> Outcome {
    for_each_release("real_driver_before_start_answers_as_recorded", |release, path| {
        // SAFETY: the file is the vendor's library.
        let f = unsafe { Functions::load(path) }.expect("load");
        let not_started = CuResult::CUDA_ERROR_NOT_INITIALIZED;
        let (mut number, mut pointer): (c_int, CuDevicePtr) = (7, 7);
        let mut context = CuContext(7);
        // SAFETY: every output is writable. The driver is not started, so that no call reaches a
        // device.
        unsafe {
            assert_eq!((f.init())(0), CuResult::CUDA_ERROR_NO_DEVICE, "{release}");
            assert_eq!((f.device_get_count())(&mut number), not_started);
            assert_eq!((f.ctx_get_current())(&mut context), not_started);
            assert_eq!((f.mem_alloc())(&mut pointer, 4096), not_started);
            let mut attributes = [sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
            let mut kind = 0u32;
            let mut data = [std::ptr::from_mut(&mut kind).cast()];
            let code =
                (f.pointer_get_attributes())(1, attributes.as_mut_ptr(), data.as_mut_ptr(), 0x1000);
            assert_eq!(code, not_started);
            let mut size = 7usize;
            pointer = 7;
            assert_eq!((f.mem_get_address_range())(&mut pointer, &mut size, 0x1000), not_started);
            assert_eq!((pointer, size), (0, 0), "{release}: the outputs are zeroed on failure");
            let export = f.mem_get_handle_for_address_range().expect("the symbol");
            let code = export((&raw mut number).cast(), 0x1000, 4096, 1, 0);
            assert_eq!(
                code,
                CuResult::CUDA_ERROR_NOT_SUPPORTED,
                "{release}: not the code of the others"
            );
            assert!((f.driver_get_version())(&mut number).is_success());
            let version = if release == "535" { 12_020 } else { 12_040 };
            assert_eq!(number, version, "the version of the fake's profile");
        }
        for optional in [
            f.flush_gpu_direct_rdma_writes().is_some(),
            f.ctx_set_flags().is_some(),
            f.mem_alloc_async().is_some(),
            f.mem_create().is_some(),
            f.mem_get_allocation_properties().is_some(),
        ] {
            assert!(optional, "{release}");
        }
    })
}

/// Every function of the real library can be hooked. The hooks also see calls of functions that
/// `cuGetProcAddress` returned. Hooked functions return the driver's results. Afterwards the code
/// of the library is restored.
fn real_driver_frees_are_hooked_for_every_lookup() -> Outcome {
    if !cfg!(target_arch = "x86_64") {
        return Err(Skipped("it compares the code of the x86-64 library".into()));
    }
    for_each_release("real_driver_frees_are_hooked_for_every_lookup", |release, path| {
        // SAFETY: the file is the vendor's library.
        let f = unsafe { Functions::load(path) }.expect("load");
        let missing: Vec<_> = Functions::FREES
            .iter()
            .filter(|name| !f.frees().iter().any(|(there, _)| there == *name))
            .collect();
        // CUDA 12.4 added `cuGreenCtxDestroy`.
        let newer: &[&str] = if release == "535" { &["cuGreenCtxDestroy"] } else { &[] };
        assert_eq!(missing.iter().map(|name| **name).collect::<Vec<_>>(), newer, "{release}");
        // SAFETY: code of a loaded library is readable.
        let code = |entry: usize| unsafe {
            std::ptr::with_exposed_provenance::<[u8; 16]>(entry).read_unaligned()
        };
        let untouched: Vec<_> = f.frees().iter().map(|(_, entry)| code(*entry)).collect();
        // Each entry begins with a comparison (`81 3d`), which a conditional branch (`74`) follows.
        for (bytes, (name, _)) in untouched.iter().zip(f.frees()) {
            assert_eq!(
                (&bytes[..2], &bytes[10..11]),
                (&[0x81, 0x3d][..], &[0x74][..]),
                "{release}: {name}"
            );
        }

        let not_started = CuResult::CUDA_ERROR_NOT_INITIALIZED;
        // SAFETY: the library is loaded already, so that no initialiser runs.
        let library = unsafe { libloading::Library::new(path) }.expect("loaded just now");
        type Find =
            unsafe extern "C" fn(*const std::ffi::c_char, *mut usize, c_int, u64) -> CuResult;
        // SAFETY: the symbol is the function of that name in `cuda.h` of CUDA 11.
        let find = unsafe { library.get::<Find>("cuGetProcAddress") }.expect("the symbol");
        let mut found = 0;
        // SAFETY: `found` is writable.
        assert!(unsafe { find(c"cuMemFree".as_ptr(), &mut found, 12_000, 0) }.is_success());
        // SAFETY: the driver returned the address as that of `cuMemFree` of CUDA 12.
        let by_name: unsafe extern "C" fn(CuDevicePtr) -> CuResult =
            unsafe { std::mem::transmute(std::ptr::with_exposed_provenance::<()>(found)) };

        let told = Arc::new(Recorder::default());
        let hooks = FreeHooks::start(&f).expect("hooked");
        assert_eq!(hooks.functions().len(), f.frees().len());
        let subscription = hooks.subscribe(Arc::clone(&told) as _).expect("subscribed");
        // SAFETY: the driver is not started, so that no call frees memory.
        let free = |times| unsafe {
            for _ in 0..times {
                assert_eq!((f.mem_free())(0x1000), not_started, "{release}");
                assert_eq!(by_name(0x1000), not_started, "{release}");
                assert_eq!((f.mem_free_host())(0x2000 as *mut _), not_started, "{release}");
                assert_eq!((f.primary_ctx_release())(0), not_started, "{release}");
                assert_eq!((f.mem_free())(0), not_started, "a free of null notifies nobody");
            }
        };
        free(3);
        assert_eq!(told.changes().len(), 12, "{release}");
        hooks.unsubscribe(subscription);
        free(1);
        assert_eq!(told.changes().len(), 12, "{release}");
        drop(hooks);
        let left: Vec<_> = f.frees().iter().map(|(_, entry)| code(*entry)).collect();
        assert!(left == untouched, "{release}: the code is not restored");
        free(1);
    })
}

trials! {
    /// HM-04
    real_driver_without_a_device_is_unavailable,
    /// HM-04
    real_driver_before_start_answers_as_recorded,
    /// MON-07
    real_driver_frees_are_hooked_for_every_lookup,
}
