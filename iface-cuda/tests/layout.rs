//! The constants, layouts and signatures of `sys`, compared with `cuda.h` of two releases by the C
//! compiler.

mod support;

use std::{collections::BTreeMap, fmt::Write as _, mem::offset_of, path::Path, process::Command};

use hmem_iface_cuda::sys::{
    CONSTANTS, CU_IPC_HANDLE_SIZE, CuContext, CuDevice, CuDevicePtr, CuEvent, CuIpcMemHandle,
    CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuMemLocation, CuResult, CuStream,
    Functions,
};

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

/// Returns the C spelling of an argument's type in the function table.
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
        "*mut *const c_char" => "const char **",
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

/// Returns C code with a pointer to each function. A pointer has the type in the function table and
/// so compiles only if the header agrees.
fn signatures() -> String {
    let mut code = String::new();
    for (symbol, arguments) in Functions::SIGNATURES {
        let arguments: Vec<_> = arguments
            .iter()
            .enumerate()
            .map(|(at, rust)| {
                let written =
                    ENUMERATIONS.iter().find(|(name, index, _)| (*name, *index) == (*symbol, at));
                written.map_or_else(|| c_type(rust), |(.., enumeration)| enumeration)
            })
            .collect();
        writeln!(
            code,
            "CUresult (CUDAAPI *const p_{symbol})({}) = {symbol};",
            arguments.join(", ")
        )
        .expect("a string takes it");
    }
    code
}

/// Returns C expressions, each with the value that this crate has for it.
fn questions(header: &str, release: &str) -> BTreeMap<String, i128> {
    let mut ours = BTreeMap::new();
    let codes = CuResult::ALL.iter().map(|code| (code.name().expect("named"), u64::from(code.0)));
    for (name, value) in codes.chain(CONSTANTS.iter().copied()) {
        let there =
            header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == name);
        assert!(
            there || (release == "12.9" && SINCE_13.contains(&name)),
            "{release} has no {name}"
        );
        if there {
            ours.insert(name.to_owned(), i128::from(value));
        }
    }
    let mut size =
        |name: &str, ours_is: usize| ours.insert(format!("sizeof({name})"), ours_is as i128);
    size("CUresult", size_of::<CuResult>());
    size("CUdevice", size_of::<CuDevice>());
    size("CUdeviceptr", size_of::<CuDevicePtr>());
    size("CUcontext", size_of::<CuContext>());
    size("CUstream", size_of::<CuStream>());
    size("CUevent", size_of::<CuEvent>());
    size("CUmemGenericAllocationHandle", size_of::<CuMemHandle>());
    size("CUmemLocation", size_of::<CuMemLocation>());
    size("CUmemAllocationProp", size_of::<CuMemAllocationProp>());
    size("CUmemAccessDesc", size_of::<CuMemAccessDesc>());
    size("CUipcMemHandle", size_of::<CuIpcMemHandle>());
    size("CUpointer_attribute", size_of::<hmem_iface_cuda::sys::CuPointerAttribute>());
    size("CUdevice_attribute", size_of::<hmem_iface_cuda::sys::CuDeviceAttribute>());
    for enumeration in ENUMERATIONS {
        size(enumeration.2, size_of::<std::ffi::c_uint>());
    }
    ours.insert("CU_IPC_HANDLE_SIZE".into(), CU_IPC_HANDLE_SIZE as i128);
    let mut offset = |c: &str, field: &str, ours_is: usize| {
        ours.insert(format!("offsetof({c}, {field})"), ours_is as i128)
    };
    offset("CUmemLocation", "type", offset_of!(CuMemLocation, kind));
    offset("CUmemLocation", "id", offset_of!(CuMemLocation, id));
    offset("CUmemAccessDesc", "location", offset_of!(CuMemAccessDesc, location));
    offset("CUmemAccessDesc", "flags", offset_of!(CuMemAccessDesc, flags));
    for (c, ours_is) in [
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
        offset("CUmemAllocationProp", c, ours_is);
    }
    ours
}

fn compile(folder: &Path, header: &Path, code: &str, arguments: &[&str]) -> Result<(), String> {
    let source = folder.join("probe.c");
    std::fs::write(&source, code).expect("write the probe");
    let include = format!("-I{}", header.parent().expect("a folder").display());
    let output = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Werror", &include])
        .args(arguments)
        .arg(&source)
        .output()
        .expect("a C compiler runs");
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn compare(release: &str) {
    let Some(header) = support::cached("headers", &format!("headers/{release}/cuda.h")) else {
        return;
    };
    let text = std::fs::read_to_string(&header).expect("the header");
    let folder =
        std::env::temp_dir().join(format!("hmem-cuda-layout-{}-{release}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (probe, object) = (folder.join("probe"), folder.join("probe.o"));

    let ours = questions(&text, release);
    let lines: String = ours
        .keys()
        .map(|name| format!("printf(\"{name}\\t%lld\\n\", (long long)({name}));\n"))
        .collect();
    let head = "#include <stddef.h>\n#include <stdio.h>\n#include \"cuda.h\"\n";
    let main = format!("{head}int main(void) {{\n{lines}return 0;\n}}\n");
    compile(&folder, &header, &main, &["-o", probe.to_str().expect("utf-8")])
        .expect("the probe compiles");
    let output = Command::new(&probe).output().expect("the probe runs");
    let theirs = String::from_utf8(output.stdout).expect("text");
    assert_eq!(theirs.lines().count(), ours.len());
    for line in theirs.lines() {
        let (name, value) = line.split_once('\t').expect("name and value");
        assert_eq!(value.parse::<i128>().expect("a number"), ours[name], "{release}: {name}");
    }

    // A pointer of another type is an error with -Werror. The code is compiled only, never linked
    // or run.
    let arguments = ["-c", "-o", object.to_str().expect("utf-8")];
    let code = format!("{head}{}", signatures());
    if let Err(errors) = compile(&folder, &header, &code, &arguments) {
        panic!("{release}: a signature differs from the header:\n{errors}");
    }
    // This shows that the check works: with one changed argument the code does not compile.
    let wrong = code
        .replace("p_cuMemAlloc_v2)(CUdeviceptr *, size_t)", "p_cuMemAlloc_v2)(CUdeviceptr *, int)");
    assert_ne!(wrong, code);
    compile(&folder, &header, &wrong, &arguments).expect_err("a wrong signature is noticed");
    std::fs::remove_dir_all(&folder).expect("clean up");
}

#[test]
fn constants_layouts_and_signatures_equal_cuda_12_9() {
    compare("12.9");
}

#[test]
fn constants_layouts_and_signatures_equal_cuda_13_5() {
    compare("13.5");
}
