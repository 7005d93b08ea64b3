//! Compares the constants, layouts and signatures of `sys` with AMD's headers of two releases. The
//! C compiler makes the comparison. `tests/rocr/fetch` downloads them; `HMEM_ROCR=headers` makes
//! their absence a failure.

#[path = "../../tests/c_headers/mod.rs"]
mod c_headers;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use std::{
    fs,
    mem::offset_of,
    path::{Path, PathBuf},
};

use c_headers::{Assertions, has_word};
use hmem_iface_rocr::sys::{
    AccessDesc, Agent, CONSTANTS, Functions, HdpFlush, HsaStatus, IpcMemory, MemoryPool,
    PointerInfo, Signal, VmemHandle,
};
use trials::{Outcome, Skipped, trials};

/// Substrings of the names that ROCm 7.2 has and ROCm 5.2 lacks.
const LATER: [&str; 11] = [
    "_dmabuf",
    "_vmem_",
    "_VMEM",
    "DMABUF",
    "VIRTUAL_MEM_API",
    "RESERVED_ADDR",
    "MEMORY_TYPE_PINNED",
    "CU_MASK_REDUCED",
    "OUT_OF_REGISTERS",
    "STATUS_ERROR_RESOURCE_BUSY",
    "STATUS_ERROR_NOT_SUPPORTED",
];

/// Returns the C spelling of a type in the function table.
fn c_type(rust: &str) -> &'static str {
    match rust {
        "HsaStatus" => "hsa_status_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "i32" => "int",
        "i64" => "hsa_signal_value_t",
        "usize" => "size_t",
        "Agent" => "hsa_agent_t",
        "*const Agent" => "const hsa_agent_t *",
        "*mut Agent" => "hsa_agent_t *",
        "*mut *mut Agent" => "hsa_agent_t **",
        "MemoryPool" => "hsa_amd_memory_pool_t",
        "Signal" => "hsa_signal_t",
        "*const Signal" => "const hsa_signal_t *",
        "*mut Signal" => "hsa_signal_t *",
        "VmemHandle" => "hsa_amd_vmem_alloc_handle_t",
        "*mut VmemHandle" => "hsa_amd_vmem_alloc_handle_t *",
        "*const AccessDesc" => "const hsa_amd_memory_access_desc_t *",
        "*const IpcMemory" => "const hsa_amd_ipc_memory_t *",
        "*mut IpcMemory" => "hsa_amd_ipc_memory_t *",
        "*mut PointerInfo" => "hsa_amd_pointer_info_t *",
        "*mut u32" => "uint32_t *",
        "*const u32" => "const uint32_t *",
        "*mut u64" => "uint64_t *",
        "*mut i32" => "int *",
        "*mut c_void" => "void *",
        "*const c_void" => "const void *",
        "*mut *mut c_void" => "void **",
        "AgentCallback" => "hsa_status_t (*)(hsa_agent_t, void *)",
        "PoolCallback" => "hsa_status_t (*)(hsa_amd_memory_pool_t, void *)",
        "DeallocationCallback" => "void (*)(void *, void *)",
        "ListAllocator" => "void *(*)(size_t)",
        other => panic!("say in this test what {other} is in C"),
    }
}

/// Arguments that are integers in the function table and enumerations of the same width in the
/// headers: function, index and C type.
const ENUMERATIONS: [(&str, usize, &str); 6] = [
    ("hsa_system_get_info", 0, "hsa_system_info_t"),
    ("hsa_agent_get_info", 1, "hsa_agent_info_t"),
    ("hsa_amd_memory_pool_get_info", 1, "hsa_amd_memory_pool_info_t"),
    ("hsa_signal_wait_scacquire", 1, "hsa_signal_condition_t"),
    ("hsa_signal_wait_scacquire", 4, "hsa_wait_state_t"),
    ("hsa_amd_vmem_handle_create", 2, "hsa_amd_memory_type_t"),
];

/// Returns the C assertions that must hold for the headers of a release.
fn assertions(include: &Path, release: &str) -> Assertions {
    const HEADERS: [&str; 2] = ["hsa/hsa.h", "hsa/hsa_ext_amd.h"];
    let read = |name| fs::read_to_string(include.join(name)).expect("a header");
    let headers = HEADERS.map(read).concat();
    let has = |name: &str| {
        let there = has_word(&headers, name);
        let later = release == "5.2" && LATER.iter().any(|part| name.contains(part));
        assert!(there || later, "the headers of {release} have no {name}");
        there
    };
    let mut assert = Assertions::about(&HEADERS);
    for code in HsaStatus::ALL {
        let name = code.name().expect("named");
        if has(name) {
            assert.value(format_args!("(uint32_t){name}"), code.0.into());
        }
    }
    for (name, value) in CONSTANTS.into_iter().flatten() {
        if has(name) {
            assert.value(name, (*value).into());
        }
    }
    for (name, size) in [
        ("hsa_status_t", size_of::<HsaStatus>()),
        ("hsa_agent_t", size_of::<Agent>()),
        ("hsa_amd_memory_pool_t", size_of::<MemoryPool>()),
        ("hsa_signal_t", size_of::<Signal>()),
        ("hsa_signal_value_t", size_of::<i64>()),
        ("hsa_amd_ipc_memory_t", size_of::<IpcMemory>()),
        ("hsa_amd_hdp_flush_t", size_of::<HdpFlush>()),
        ("hsa_amd_pointer_info_t", size_of::<PointerInfo>()),
        ("hsa_amd_vmem_alloc_handle_t", size_of::<VmemHandle>()),
        ("hsa_amd_memory_access_desc_t", size_of::<AccessDesc>()),
    ] {
        // The headers of ROCm 5.2 lack some types of `sys`, and the functions that use those types.
        if headers.contains(name) {
            assert.size(name, size);
        }
    }
    for (_, _, enumeration) in ENUMERATIONS {
        if headers.contains(enumeration) {
            assert.size(enumeration, 4);
        }
    }
    for (c, field, ours) in [
        ("hsa_amd_pointer_info_t", "size", offset_of!(PointerInfo, size)),
        ("hsa_amd_pointer_info_t", "type", offset_of!(PointerInfo, kind)),
        ("hsa_amd_pointer_info_t", "agentBaseAddress", offset_of!(PointerInfo, agent_base)),
        ("hsa_amd_pointer_info_t", "hostBaseAddress", offset_of!(PointerInfo, host_base)),
        ("hsa_amd_pointer_info_t", "sizeInBytes", offset_of!(PointerInfo, len)),
        ("hsa_amd_pointer_info_t", "userData", offset_of!(PointerInfo, user_data)),
        ("hsa_amd_pointer_info_t", "agentOwner", offset_of!(PointerInfo, owner)),
        ("hsa_amd_pointer_info_t", "global_flags", offset_of!(PointerInfo, global_flags)),
        ("hsa_amd_hdp_flush_t", "HDP_MEM_FLUSH_CNTL", offset_of!(HdpFlush, memory)),
        ("hsa_amd_memory_access_desc_t", "permissions", offset_of!(AccessDesc, permissions)),
        ("hsa_amd_memory_access_desc_t", "agent_handle", offset_of!(AccessDesc, agent)),
    ] {
        if headers.contains(c) {
            assert.offset(c, field, ours);
        }
    }
    for (symbol, arguments, result) in Functions::SIGNATURES {
        if !has(symbol) {
            continue;
        }
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
    vendor_files::downloaded("rocr", "headers", &format!("{release}/usr/include")).map_err(Skipped)
}

fn headers_of_two_releases_match() -> Outcome {
    for release in ["5.2", "7.2"] {
        let include = include(release)?;
        assertions(&include, release).hold(&include);
    }
    Ok(())
}

fn wrong_constant_layout_or_signature_is_detected() -> Outcome {
    let include = include("7.2")?;
    let assertions = assertions(&include, "7.2");
    for (right, wrong) in [
        ("((uint32_t)HSA_STATUS_ERROR_FATAL) == ", "((uint32_t)HSA_STATUS_ERROR_FATAL) == 1"),
        (
            "(offsetof(hsa_amd_pointer_info_t, agentOwner)) == ",
            "(offsetof(hsa_amd_pointer_info_t, agentOwner)) == 1",
        ),
        ("(*const p_hsa_amd_memory_lock)(void *,", "(*const p_hsa_amd_memory_lock)(const void *,"),
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
