//! Compares the constants, layouts and signatures of `sys` with `ze_api.h` of two releases, by the
//! C compiler.

#[path = "../../tests/c_headers/mod.rs"]
mod c_headers;
#[path = "../../tests/trials/mod.rs"]
mod trials;
#[path = "../../tests/vendor_files/mod.rs"]
mod vendor_files;

use std::{
    fs,
    path::{Path, PathBuf},
};

use c_headers::{Assertions, has_word};
use hmem_iface_ze::sys::{
    CONSTANTS, Functions, IpcMemoryHandle, LAYOUTS, ZE_MAX_DEVICE_NAME, ZE_MAX_IPC_HANDLE_SIZE,
    ZeResult,
};
use trials::{Outcome, Skipped, trials};

/// Result codes of this crate that the header of Level Zero 1.4 lacks.
const SINCE_1_4: [&str; 4] = [
    "ZE_RESULT_ERROR_SURVIVABILITY_MODE_DETECTED",
    "ZE_RESULT_ERROR_ADDRESS_NOT_FOUND",
    "ZE_RESULT_ERROR_INVALID_KERNEL_HANDLE",
    "ZE_RESULT_WARNING_ACTION_REQUIRED",
];

/// Returns the C spelling of a type in the function table.
fn c_type(rust: &str) -> String {
    if let Some(target) = rust.strip_prefix("*mut ") {
        return format!("{} *", c_type(target));
    }
    if let Some(target) = rust.strip_prefix("*const ") {
        return format!("const {} *", c_type(target));
    }
    match rust {
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "c_void" => "void",
        "DriverHandle" => "ze_driver_handle_t",
        "DeviceHandle" => "ze_device_handle_t",
        "ContextHandle" => "ze_context_handle_t",
        "CommandListHandle" => "ze_command_list_handle_t",
        "EventPoolHandle" => "ze_event_pool_handle_t",
        "EventHandle" => "ze_event_handle_t",
        "DeviceProperties" => "ze_device_properties_t",
        "DeviceMemoryProperties" => "ze_device_memory_properties_t",
        "DeviceExternalMemoryProperties" => "ze_device_external_memory_properties_t",
        "QueueGroupProperties" => "ze_command_queue_group_properties_t",
        "PciProperties" => "ze_pci_ext_properties_t",
        "ContextDescription" => "ze_context_desc_t",
        "DeviceMemoryDescription" => "ze_device_mem_alloc_desc_t",
        "HostMemoryDescription" => "ze_host_mem_alloc_desc_t",
        "MemoryAllocationProperties" => "ze_memory_allocation_properties_t",
        "QueueDescription" => "ze_command_queue_desc_t",
        "EventPoolDescription" => "ze_event_pool_desc_t",
        "EventDescription" => "ze_event_desc_t",
        "IpcMemoryHandle" => "ze_ipc_mem_handle_t",
        "ZeResult" => "ze_result_t",
        other => panic!("say in this test what {other} is in C"),
    }
    .to_owned()
}

/// Returns the C assertions that must hold for the header of a release.
fn assertions(include: &Path, release: &str) -> Assertions {
    let header = fs::read_to_string(include.join("ze_api.h")).expect("the header");
    let mut assert = Assertions::about(&["ze_api.h"]);
    let codes = ZeResult::ALL.iter().map(|code| (code.name().expect("named"), code.0));
    for (name, value) in codes.chain(CONSTANTS.iter().copied()) {
        if has_word(&header, name) {
            assert.value(format_args!("(unsigned){name}"), value.into());
        } else {
            let experimental = name.starts_with("ZE_RESULT_EXP_");
            let newer = release == "1.4" && (experimental || SINCE_1_4.contains(&name));
            assert!(newer, "{release} has no {name}");
        }
    }
    assert.value("ZE_MAX_DEVICE_NAME", ZE_MAX_DEVICE_NAME as i128);
    assert.value("ZE_MAX_IPC_HANDLE_SIZE", ZE_MAX_IPC_HANDLE_SIZE as i128);
    for layout in LAYOUTS {
        assert.size(layout.name, layout.size);
        for (field, offset) in layout.fields {
            assert.offset(layout.name, field, *offset);
        }
    }
    assert.size("ze_ipc_mem_handle_t", size_of::<IpcMemoryHandle>());
    assert.size("ze_result_t", size_of::<ZeResult>());
    for (symbol, arguments, result) in Functions::SIGNATURES {
        if has_word(&header, symbol) {
            let arguments: Vec<_> = arguments.iter().map(|rust| c_type(rust)).collect();
            assert.function(symbol, &arguments, &c_type(result));
        } else {
            assert!(Functions::OPTIONAL_SYMBOLS.contains(symbol), "{release} has no {symbol}");
        }
    }
    assert
}

fn include(release: &str) -> Result<PathBuf, Skipped> {
    let header = format!("headers/{release}/ze_api.h");
    let header = vendor_files::downloaded("ze", "headers", &header).map_err(Skipped)?;
    Ok(header.parent().expect("a folder").to_owned())
}

fn headers_of_two_releases_match() -> Outcome {
    for release in ["1.4", "1.32"] {
        let include = include(release)?;
        assertions(&include, release).hold(&include);
    }
    Ok(())
}

fn wrong_constant_layout_or_signature_is_detected() -> Outcome {
    let include = include("1.32")?;
    let assertions = assertions(&include, "1.32");
    for (right, wrong) in [
        ("(ZE_MAX_DEVICE_NAME) == ", "(ZE_MAX_DEVICE_NAME) == 1"),
        ("(sizeof(ze_context_desc_t)) == ", "(sizeof(ze_context_desc_t)) == 1"),
        ("p_zeMemFree)(ze_context_handle_t, void *)", "p_zeMemFree)(ze_context_handle_t, int)"),
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
