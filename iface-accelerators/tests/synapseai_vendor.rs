//! Checks that Habana's own headers contain the declarations from which the function tables were
//! written, and the values of the status codes. Calls a real libhl-thunk, built from its source,
//! without a device.
#![allow(unsafe_code)]

#[path = "../../tests/accelerators/mod.rs"]
mod accelerators;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use accelerators::{cached, enumerates, has, header};
use hmem_core::{
    AllocationKind, DeviceId, Iface, IfaceExt,
    iface::{AllocRequest, DmaBufMapping},
    provider::Nic,
};
use hmem_fake_accelerators::{Fake, Profile};
use hmem_iface_accelerators::synapseai::{
    SynapseAi,
    sys::{SynStatus, synapse},
};
use trials::{Outcome, trials};

trials! {
    /// HM-01
    functions_are_declared_as_in_synapse_api_h,
    /// HM-01
    statuses_have_the_values_of_synapse_common_types_h,
    /// HM-06
    functions_are_declared_as_in_hlthunk_h,
    /// HM-04 HM-06
    real_libhlthunk_refuses_a_file_that_is_no_device,
}

/// The header of Habana's reference implementation contains the declarations from which the
/// function table was written. This header is too old for `synDeviceGetInfoV2` and
/// `synStreamCreateGeneric`, so the test does not check these two.
fn functions_are_declared_as_in_synapse_api_h() -> Outcome {
    let header = header("synapseai/synapse_api.h")?;
    has(
        &header,
        &[
            "synInitialize();",
            "synDeviceGetCount(uint32_t* pCount);",
            "synDeviceAcquire(synDeviceId* pDeviceId, const char* pciBus);",
            "synDeviceMalloc(const synDeviceId deviceId, const uint64_t size, uint64_t reqAddr, \
             const uint32_t flags, uint64_t* buffer);",
            "synDeviceFree(const synDeviceId deviceId, const uint64_t buffer, \
             const uint32_t flags);",
            "synHostMalloc(const synDeviceId deviceId, const uint64_t size, const uint32_t flags, \
             void** buffer);",
            "synHostFree(const synDeviceId deviceId, const void* buffer, const uint32_t flags);",
            "synStreamDestroy(const synStreamHandle streamHandle);",
            "synStreamSynchronize(const synStreamHandle streamHandle);",
            "synMemCopyAsync(const synStreamHandle streamHandle, const uint64_t src, \
             const uint64_t size, const uint64_t dst, const synDmaDir direction);",
        ],
    );
    Ok(())
}

fn statuses_have_the_values_of_synapse_common_types_h() -> Outcome {
    let header = header("synapseai/synapse_common_types.h")?;
    // The reference implementation has only these codes.
    let named = (0..26).filter_map(|code| Some((SynStatus(code).name()?, code)));
    let named: Vec<_> = named.collect();
    assert!(named.len() >= 16, "{named:?}");
    enumerates(&header, named);
    has(&header, &["typedef enum synDmaDir { HOST_TO_DRAM, DRAM_TO_HOST,"]);
    Ok(())
}

fn functions_are_declared_as_in_hlthunk_h() -> Outcome {
    let header = header("hl-thunk/include/uapi/hlthunk.h")?;
    has(
        &header,
        &[
            "int hlthunk_device_mapped_memory_export_dmabuf_fd(int fd, uint64_t addr, \
             uint64_t size, uint64_t offset, uint32_t flags);",
            "int hlthunk_get_pci_bus_id_from_fd(int fd, char *pci_bus_id, int len);",
        ],
    );
    Ok(())
}

/// Exports through a file that is no device. EBADF shows that libhl-thunk accepts the flags of this
/// crate: for other flags it returns EINVAL before it calls the kernel.
fn real_libhlthunk_refuses_a_file_that_is_no_device() -> Outcome {
    const EBADF: i32 = 9;
    let library = cached("hl-thunk/libhl-thunk.so")?;
    let fake = Fake::start(Profile::running());
    // SAFETY: the fake's functions have the signatures of their names and live forever.
    let functions = unsafe { synapse::Functions::from_lookup(|name| fake.symbol(name)) };
    let builder = SynapseAi::builder().functions(functions.expect("all functions"));
    // SAFETY: the file is the vendor's library.
    let gaudi = unsafe { builder.hlthunk(library) }.open().expect("a device");
    assert!(gaudi.dma_buf().is_some());
    assert_eq!(gaudi.devices().expect("devices")[0].pci_bus_id, None, "no device is at this fd");
    let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
    let own = gaudi.allocate(&request).expect("allocate");
    let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
    let error = gaudi.export_dma_buf(own.range, &nic, DmaBufMapping::Default).unwrap_err();
    assert_eq!(error.os_errno().map(|errno| errno.0), Some(EBADF), "{error}");
    // SAFETY: nothing uses the memory.
    unsafe { gaudi.free(&own) }.expect("free");
    Ok(())
}
