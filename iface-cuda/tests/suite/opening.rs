//! Tests of opening drivers that are incomplete, fail or have no device.

use hmem_core::{DeviceId, ErrorKind, Iface, IfaceExt, IfaceKind};
use hmem_fake_cuda::{FakeDriver, Profile};
use hmem_iface_cuda::{
    Cuda,
    sys::{CuResult, Functions},
};

use crate::{
    vendor_files,
    world::{each, start},
};

fn open(driver: &FakeDriver) -> hmem_core::Result<Cuda> {
    // SAFETY: each function has the signature of its name in `cuda.h`, and functions live forever.
    Cuda::builder().functions(unsafe { Functions::from_lookup(|name| driver.symbol(name)) }?).open()
}

/// HM-04
#[test]
fn every_missing_symbol_is_named() {
    for missing in Functions::SYMBOLS {
        let driver = start(Profile { absent: vec![missing], ..Profile::default() });
        let error = open(&driver).expect_err("a symbol is missing");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(error.context_value("symbol"), Some(*missing));
    }
}

/// HM-04
#[test]
fn driver_without_an_optional_symbol_opens_and_names_it() {
    for missing in Functions::OPTIONAL_SYMBOLS {
        let driver = start(Profile { absent: vec![missing], ..Profile::default() });
        let cuda = open(&driver).expect("an older driver");
        assert!(!cuda.devices().expect("devices").is_empty());
        assert_eq!(cuda.capability().dma_buf, *missing != "cuMemGetHandleForAddressRange");
        let kind = match *missing {
            "cuMemAllocAsync" => Some(hmem_core::AllocationKind::StreamOrdered),
            "cuMemCreate" | "cuMemMap" | "cuMemAddressReserve" | "cuMemSetAccess" => {
                Some(hmem_core::AllocationKind::Virtual)
            }
            _ => None,
        };
        if let Some(kind) = kind {
            let request = hmem_core::iface::AllocRequest { len: 64, device: DeviceId(0), kind };
            let error = cuda.allocate(&request).expect_err("the call is missing");
            assert!(error.is_unsupported(), "{error}");
            assert_eq!(error.context_value("symbol"), Some(*missing), "{error}");
        }
        cuda.close().expect("close");
    }
}

/// HM-04
#[test]
fn driver_that_does_not_start_is_unavailable_with_code_and_remedy() {
    for (code, remedy) in [
        (CuResult::CUDA_ERROR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
        (CuResult::CUDA_ERROR_STUB_LIBRARY, "stub: take its folder"),
        (CuResult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "kernel module"),
        (CuResult::CUDA_ERROR_UNKNOWN, "nvidia-smi"),
    ] {
        let driver = start(Profile::default());
        driver.fail_always("cuInit", code);
        let error = open(&driver).expect_err("no driver");
        assert_eq!((error.kind(), error.operation()), (ErrorKind::Unavailable, "cuInit"));
        assert_eq!(error.driver().expect("the driver's code").code, i64::from(code.0));
        let text = error.to_string();
        assert!(text.contains(remedy) && text.contains(code.name().expect("named")), "{text}");
        assert!(error.context_value("library").is_some());
    }
}

/// HM-04
#[test]
fn driver_without_devices_is_unavailable() {
    let driver = start(Profile { devices: 0, ..Profile::default() });
    let error = open(&driver).expect_err("no device");
    assert_eq!(error.driver().expect("code").name, "CUDA_ERROR_NO_DEVICE");
}

/// HM-04
#[test]
fn driver_without_range_attributes_is_unavailable() {
    let driver = start(Profile { last_pointer_attribute: 10, ..Profile::default() });
    let error = open(&driver).expect_err("too old");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("10.2"), "{error}");
}

#[test]
fn requested_gpu_is_the_only_driver_shown() {
    let seen = std::cell::RefCell::new(Vec::new());
    each(|world| seen.borrow_mut().push(world.name.clone()));
    let fakes: Vec<_> = Profile::all().into_iter().map(|profile| profile.name.to_owned()).collect();
    let wanted =
        if vendor_files::is_required("cuda", "real") { vec!["real".to_owned()] } else { fakes };
    assert_eq!(seen.into_inner(), wanted);
}

/// HM-01
#[test]
fn devices_are_listed_with_name_memory_and_pci_bus_id() {
    each(|world| {
        assert_eq!((world.cuda.kind(), world.cuda.name()), (IfaceKind::CUDA, "cuda"));
        let devices = world.cuda.devices().expect("devices");
        for (number, device) in devices.iter().enumerate() {
            assert_eq!(device.id, DeviceId(number as u32));
            assert!(!device.name.is_empty() && device.memory > 0);
            let id = device.pci_bus_id.as_deref().expect("a PCI device");
            assert!(id.len() >= 12 && id == id.to_ascii_lowercase(), "{id}");
        }
        if let Some((_, profile)) = &world.fake {
            assert_eq!(devices[1].name, format!("NVIDIA Fake {} 1", profile.name));
            assert_eq!(world.cuda.capability().dma_buf, profile.dma_buf);
            assert!(world.cuda.capability().peer_memory && world.cuda.capability().identity);
        }
    });
}
