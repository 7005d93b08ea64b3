//! Compares the lists of exported symbols and of the ABI with the C header, and checks the exported
//! functions. `c/run` compares the header with the code.

use std::{collections::BTreeSet, fs, path::Path};

/// The sources with C items.
const SOURCES: [&str; 7] =
    ["lib.rs", "error.rs", "owner.rs", "library.rs", "domain.rs", "region.rs", "window.rs"];

fn read(name: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::read_to_string(file).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the names of the exported functions in the sources.
fn functions() -> BTreeSet<String> {
    let sources = SOURCES.map(|name| read(&format!("src/{name}"))).concat();
    let declared = sources.split("extern \"C\" fn ").skip(1);
    let names = declared.map(|rest| rest.split('(').next().unwrap_or_default().to_owned());
    names.filter(|name| name.starts_with("hmem_")).collect()
}

/// Requirement DOOR-04: each function of the header is exported with a version, and no other
/// symbol.
#[test]
fn each_function_is_exported_with_a_version() {
    let map = read("hmem.map");
    let names = map.lines().filter_map(|line| line.trim().strip_suffix(';'));
    let exported: BTreeSet<_> = names.filter(|name| name.starts_with("hmem_")).collect();
    let functions = functions();
    assert!(functions.len() > 30, "{functions:?}");
    assert_eq!(exported, functions.iter().map(String::as_str).collect());
    let header = read("include/hmem.h");
    for name in functions {
        let declared = header.matches(&format!("{name}(")).count();
        assert_eq!(declared, 1, "declarations of {name} in the header");
    }
}

/// Requirement DOOR-04: the sizes, offsets and numbers of all items of the header are listed.
#[test]
fn each_item_of_the_header_is_in_the_list_of_the_abi() {
    let (header, list) = (read("include/hmem.h"), read("tests/abi.c"));
    let mut items = Vec::new();
    let mut structure = "";
    for line in header.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("typedef struct ").and_then(|l| l.strip_suffix(" {"))
        {
            structure = name;
            items.push(format!("sizeof({name}) =="));
        } else if line.starts_with("}") {
            structure = "";
        } else if let Some(field) = line.strip_suffix(';').filter(|_| !structure.is_empty()) {
            let name = field.rsplit([' ', '*']).next().expect("a name");
            items.push(format!("offsetof({structure}, {name}) =="));
        } else if line.starts_with("HMEM_KIND_") || line.starts_with("#define HMEM_") {
            let name = line.trim_start_matches("#define ").split(' ').next().expect("a name");
            items.push(format!("({name} =="));
        }
    }
    assert!(items.len() > 80, "{items:?}");
    for item in items.iter().filter(|item| *item != "(HMEM_H ==") {
        assert!(list.contains(item), "tests/abi.c lacks {item}");
    }
}

/// Requirement DOOR-03: each exported function catches panics, or only reads a field.
#[test]
fn each_function_that_works_catches_panics() {
    // These read or free an object that the library made, and return a constant.
    let plain = [
        "hmem_error_kind",
        "hmem_error_errno",
        "hmem_error_message",
        "hmem_error_remedy",
        "hmem_error_json",
        "hmem_error_free",
        "hmem_string_free",
        "hmem_version",
    ];
    for source in SOURCES {
        let text = read(&format!("src/{source}"));
        for body in text.split("#[unsafe(no_mangle)]").skip(1) {
            let (_, body) = body.split_once("extern \"C\" fn ").expect("a function");
            let (name, body) = body.split_once('(').expect("arguments");
            let body = body.split("\n}").next().unwrap_or_default();
            let caught = body.contains(&format!("Call::run(\"{name}\","));
            assert!(caught || plain.contains(&name), "{name} does not catch panics");
        }
    }
}
