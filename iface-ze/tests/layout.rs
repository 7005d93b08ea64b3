//! The constants, layouts and signatures of `sys`, compared with `ze_api.h` of two releases by the
//! C compiler.

mod support;

use std::{collections::BTreeMap, fmt::Write as _, path::Path, process::Command};

use hmem_iface_ze::sys::{
    CONSTANTS, Functions, IpcMemoryHandle, LAYOUTS, ZE_MAX_DEVICE_NAME, ZE_MAX_IPC_HANDLE_SIZE,
    ZeResult,
};

/// Result codes of this crate that the header of Level Zero 1.4 does not have yet.
const SINCE_1_4: [&str; 4] = [
    "ZE_RESULT_ERROR_SURVIVABILITY_MODE_DETECTED",
    "ZE_RESULT_ERROR_ADDRESS_NOT_FOUND",
    "ZE_RESULT_ERROR_INVALID_KERNEL_HANDLE",
    "ZE_RESULT_WARNING_ACTION_REQUIRED",
];

/// Returns the C spelling of an argument's type in the function table.
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
        other => panic!("say in this test what {other} is in C"),
    }
    .to_owned()
}

fn has(header: &str, name: &str) -> bool {
    header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == name)
}

/// Returns C code with a pointer to each function. A pointer has the type in the function table and
/// so compiles only if the header agrees.
fn signatures(header: &str) -> String {
    let mut code = String::new();
    for (symbol, arguments) in Functions::SIGNATURES {
        if !has(header, symbol) {
            assert!(Functions::OPTIONAL_SYMBOLS.contains(symbol), "the header has no {symbol}");
            continue;
        }
        let arguments: Vec<_> = arguments.iter().map(|rust| c_type(rust)).collect();
        let arguments = arguments.join(", ");
        writeln!(code, "ze_result_t (ZE_APICALL *const p_{symbol})({arguments}) = {symbol};")
            .expect("a string takes it");
    }
    code
}

/// Returns C expressions, each with the value that this crate has for it.
fn questions(header: &str, release: &str) -> BTreeMap<String, i128> {
    let mut ours = BTreeMap::new();
    let codes = ZeResult::ALL.iter().map(|code| (code.name().expect("named"), code.0));
    for (name, value) in codes.chain(CONSTANTS.iter().copied()) {
        let experimental = name.starts_with("ZE_RESULT_EXP_");
        let newer = release == "1.4" && (experimental || SINCE_1_4.contains(&name));
        assert!(has(header, name) || newer, "{release} has no {name}");
        if has(header, name) {
            ours.insert(format!("(unsigned)({name})"), i128::from(value));
        }
    }
    for layout in LAYOUTS {
        ours.insert(format!("sizeof({})", layout.name), layout.size as i128);
        for (field, offset) in layout.fields {
            ours.insert(format!("offsetof({}, {field})", layout.name), *offset as i128);
        }
    }
    ours.insert("sizeof(ze_ipc_mem_handle_t)".into(), size_of::<IpcMemoryHandle>() as i128);
    ours.insert("sizeof(ze_result_t)".into(), size_of::<ZeResult>() as i128);
    ours.insert("ZE_MAX_DEVICE_NAME".into(), ZE_MAX_DEVICE_NAME as i128);
    ours.insert("ZE_MAX_IPC_HANDLE_SIZE".into(), ZE_MAX_IPC_HANDLE_SIZE as i128);
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
    let Some(header) = support::cached("headers", &format!("headers/{release}/ze_api.h")) else {
        return;
    };
    let text = std::fs::read_to_string(&header).expect("the header");
    let name = format!("hmem-ze-layout-{}-{release}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let (probe, object) = (folder.join("probe"), folder.join("probe.o"));

    let ours = questions(&text, release);
    let lines: String = ours
        .keys()
        .map(|name| format!("printf(\"{name}\\t%lld\\n\", (long long)({name}));\n"))
        .collect();
    let head = "#include <stddef.h>\n#include <stdio.h>\n#include \"ze_api.h\"\n";
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
    let code = format!("{head}{}", signatures(&text));
    if let Err(errors) = compile(&folder, &header, &code, &arguments) {
        panic!("{release}: a signature differs from the header:\n{errors}");
    }
    // This shows that the check works: with one changed argument the code does not compile.
    let wrong = code.replace(
        "p_zeMemFree)(ze_context_handle_t, void *)",
        "p_zeMemFree)(ze_context_handle_t, int)",
    );
    assert_ne!(wrong, code);
    compile(&folder, &header, &wrong, &arguments).expect_err("a wrong signature is noticed");
    std::fs::remove_dir_all(&folder).expect("clean up");
}

#[test]
fn constants_layouts_and_signatures_equal_level_zero_1_4() {
    compare("1.4");
}

#[test]
fn constants_layouts_and_signatures_equal_level_zero_1_32() {
    compare("1.32");
}
