//! Compares the constants, layouts and signatures of `sys` with `cuda.h` of two releases, by the C
//! compiler.

#[path = "../../tests/c_headers/mod.rs"]
mod c_headers;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use std::{
    ffi::c_uint,
    fs,
    mem::offset_of,
    path::{Path, PathBuf},
};

use c_headers::{Assertions, has_word};
use hmem_iface_cuda::sys::{
    CONSTANTS, CU_IPC_HANDLE_SIZE, CuContext, CuDevice, CuDeviceAttribute, CuDevicePtr, CuEvent,
    CuIpcMemHandle, CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuMemLocation,
    CuPointerAttribute, CuResult, CuStream, CuStreamCaptureMode, Functions,
};
use trials::{Outcome, Skipped, trials};

/// Names that the header of CUDA 13.5 has and the header of CUDA 12.9 lacks.
const SINCE_13: [&str; 8] = [
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
    "CUDA_ERROR_MULTICAST_RESOURCE_FULL",
    "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION",
    "CUDA_ERROR_STREAM_DETACHED",
    "CUDA_ERROR_GRAPH_RECAPTURE_FAILURE",
    "CUDA_ERROR_FABRIC_NOT_READY",
    "CU_DEVICE_ATTRIBUTE_HOST_ALLOC_DMA_BUF_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_DMA_BUF_MMAP_SUPPORTED",
];

/// Returns the C spelling of a type in the function table.
fn c_type(rust: &str) -> &'static str {
    match rust {
        "c_uint" => "unsigned int",
        "*mut c_uint" => "unsigned int *",
        "c_int" => "int",
        "*mut c_int" => "int *",
        "u64" => "unsigned long long",
        "usize" => "size_t",
        "*mut usize" => "size_t *",
        "*mut c_char" => "char *",
        "*mut c_void" => "void *",
        "*const c_void" => "const void *",
        "*mut *mut c_void" => "void **",
        "CuResult" => "CUresult",
        "CuDevice" => "CUdevice",
        "*mut CuDevice" => "CUdevice *",
        "CuDeviceAttribute" => "CUdevice_attribute",
        "CuContext" => "CUcontext",
        "*mut CuContext" => "CUcontext *",
        "CuStream" => "CUstream",
        "*mut CuStream" => "CUstream *",
        "CuEvent" => "CUevent",
        "*mut CuEvent" => "CUevent *",
        "CuDevicePtr" => "CUdeviceptr",
        "*mut CuDevicePtr" => "CUdeviceptr *",
        "*mut CuStreamCaptureMode" => "CUstreamCaptureMode *",
        "CuPointerAttribute" => "CUpointer_attribute",
        "*mut CuPointerAttribute" => "CUpointer_attribute *",
        "CuMemHandle" => "CUmemGenericAllocationHandle",
        "*mut CuMemHandle" => "CUmemGenericAllocationHandle *",
        "*const CuMemAllocationProp" => "const CUmemAllocationProp *",
        "*mut CuMemAllocationProp" => "CUmemAllocationProp *",
        "*const CuMemAccessDesc" => "const CUmemAccessDesc *",
        "CuIpcMemHandle" => "CUipcMemHandle",
        "*mut CuIpcMemHandle" => "CUipcMemHandle *",
        other => panic!("say in this test what {other} is in C"),
    }
}

/// Arguments that are integers in the function table and enumerations of the same width in the
/// header: function, index and C type.
const ENUMERATIONS: [(&str, usize, &str); 4] = [
    ("cuMemGetHandleForAddressRange", 3, "CUmemRangeHandleType"),
    ("cuFlushGPUDirectRDMAWrites", 0, "CUflushGPUDirectRDMAWritesTarget"),
    ("cuFlushGPUDirectRDMAWrites", 1, "CUflushGPUDirectRDMAWritesScope"),
    ("cuMemGetAllocationGranularity", 2, "CUmemAllocationGranularity_flags"),
];

/// Returns the C assertions that must hold for the header of a release.
fn assertions(include: &Path, release: &str) -> Assertions {
    let header = fs::read_to_string(include.join("cuda.h")).expect("the header");
    let mut assert = Assertions::about(&["cuda.h"]);
    let codes = CuResult::ALL.iter().map(|code| (code.name().expect("named"), u64::from(code.0)));
    for (name, value) in codes.chain(CONSTANTS.iter().copied()) {
        if has_word(&header, name) {
            assert.value(name, value.into());
        } else {
            assert!(release == "12.9" && SINCE_13.contains(&name), "{release} has no {name}");
        }
    }
    assert.value("CU_IPC_HANDLE_SIZE", CU_IPC_HANDLE_SIZE as i128);
    assert.size("CUresult", size_of::<CuResult>());
    assert.size("CUdevice", size_of::<CuDevice>());
    assert.size("CUdeviceptr", size_of::<CuDevicePtr>());
    assert.size("CUcontext", size_of::<CuContext>());
    assert.size("CUstream", size_of::<CuStream>());
    assert.size("CUevent", size_of::<CuEvent>());
    assert.size("CUmemGenericAllocationHandle", size_of::<CuMemHandle>());
    assert.size("CUmemLocation", size_of::<CuMemLocation>());
    assert.size("CUmemAllocationProp", size_of::<CuMemAllocationProp>());
    assert.size("CUmemAccessDesc", size_of::<CuMemAccessDesc>());
    assert.size("CUipcMemHandle", size_of::<CuIpcMemHandle>());
    assert.size("CUpointer_attribute", size_of::<CuPointerAttribute>());
    assert.size("CUstreamCaptureMode", size_of::<CuStreamCaptureMode>());
    assert.size("CUdevice_attribute", size_of::<CuDeviceAttribute>());
    for (.., enumeration) in ENUMERATIONS {
        assert.size(enumeration, size_of::<c_uint>());
    }
    assert.offset("CUmemLocation", "type", offset_of!(CuMemLocation, kind));
    assert.offset("CUmemLocation", "id", offset_of!(CuMemLocation, id));
    assert.offset("CUmemAccessDesc", "location", offset_of!(CuMemAccessDesc, location));
    assert.offset("CUmemAccessDesc", "flags", offset_of!(CuMemAccessDesc, flags));
    for (field, ours) in [
        ("type", offset_of!(CuMemAllocationProp, kind)),
        ("requestedHandleTypes", offset_of!(CuMemAllocationProp, requested_handle_types)),
        ("location", offset_of!(CuMemAllocationProp, location)),
        ("win32HandleMetaData", offset_of!(CuMemAllocationProp, win32_handle_meta_data)),
        ("allocFlags.compressionType", offset_of!(CuMemAllocationProp, compression_type)),
        (
            "allocFlags.gpuDirectRDMACapable",
            offset_of!(CuMemAllocationProp, gpu_direct_rdma_capable),
        ),
        ("allocFlags.usage", offset_of!(CuMemAllocationProp, usage)),
        ("allocFlags.reserved", offset_of!(CuMemAllocationProp, reserved)),
    ] {
        assert.offset("CUmemAllocationProp", field, ours);
    }
    for (symbol, arguments, result) in Functions::SIGNATURES {
        let argument = |(at, rust): (usize, &&str)| {
            let written =
                ENUMERATIONS.iter().find(|(name, index, _)| (*name, *index) == (*symbol, at));
            written.map_or_else(|| c_type(rust), |(.., enumeration)| enumeration)
        };
        let arguments: Vec<_> = arguments.iter().enumerate().map(argument).collect();
        assert.function(symbol, &arguments, c_type(result));
    }
    assert
}

fn include(release: &str) -> Result<PathBuf, Skipped> {
    let header = format!("headers/{release}/cuda.h");
    let header = vendor_files::downloaded("cuda", "headers", &header).map_err(Skipped)?;
    Ok(header.parent().expect("a folder").to_owned())
}

fn headers_of_two_releases_match() -> Outcome {
    for release in ["12.9", "13.5"] {
        let include = include(release)?;
        assertions(&include, release).hold(&include);
    }
    Ok(())
}

fn wrong_constant_layout_or_signature_is_detected() -> Outcome {
    let include = include("12.9")?;
    let assertions = assertions(&include, "12.9");
    for (right, wrong) in [
        ("(CU_IPC_HANDLE_SIZE) == ", "(CU_IPC_HANDLE_SIZE) == 1"),
        ("(sizeof(CUmemLocation)) == ", "(sizeof(CUmemLocation)) == 1"),
        ("p_cuMemAlloc_v2)(CUdeviceptr *, size_t)", "p_cuMemAlloc_v2)(CUdeviceptr *, int)"),
    ] {
        assertions.rejects(&include, right, wrong);
    }
    Ok(())
}

trials! {
    /// HM-04
    headers_of_two_releases_match,
    /// HM-04
    wrong_constant_layout_or_signature_is_detected,
}
