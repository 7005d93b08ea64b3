//! `docs/testing.md` says which acceptance ids are held, and it is true: the doc comments of tests
//! carry exactly those.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

const FAMILIES: [&str; 15] = [
    "MR", "MODE", "KEY", "EVT", "SUB", "VRB", "MW", "HM", "CACHE", "MON", "P2P", "BNC", "DIAG",
    "REL", "FAB",
];

/// Macros whose entries are tests.
const TEST_LISTS: [&str; 5] = ["behaviours!", "cases!", "over_ways!", "over_worlds!", "trials!"];

/// Ids in a text, as `MR-04`.
fn ids(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    words.filter(|word| is_id(word)).map(str::to_owned).collect()
}

fn is_id(word: &str) -> bool {
    word.split_once('-').is_some_and(|(family, number)| {
        FAMILIES.contains(&family)
            && number.len() == 2
            && number.bytes().all(|byte| byte.is_ascii_digit())
    })
}

/// Ids in the doc comments of the tests of a source file: `#[test]` functions, and entries of the
/// macros in [`TEST_LISTS`]. The source is formatted by rustfmt.
fn carried(source: &str) -> BTreeSet<String> {
    let mut carried = BTreeSet::new();
    let mut docs = String::new();
    let mut is_test = false;
    let mut in_attribute = false;
    // The line that ends the macro call which lists tests.
    let mut list_end = None;
    for line in source.lines() {
        let text = line.trim();
        let is_comment = text.starts_with("//") && !text.starts_with("///");
        if in_attribute {
            in_attribute = !text.ends_with(']');
        } else if let Some(doc) = text.strip_prefix("///") {
            docs.push_str(doc);
            docs.push('\n');
        } else if text.starts_with("#[") {
            is_test |= text.starts_with("#[test]");
            in_attribute = !text.ends_with(']');
        } else if !text.is_empty() && !is_comment {
            if Some(line) == list_end.as_deref() {
                list_end = None;
            }
            let is_item_of_test =
                if is_function(text) { is_test } else { list_end.is_some() && is_entry(text) };
            if is_item_of_test {
                carried.append(&mut ids(&docs));
            }
            if TEST_LISTS.iter().any(|list| text.starts_with(list)) {
                list_end = Some(format!("{}}}", &line[..line.len() - line.trim_start().len()]));
            }
            docs.clear();
            is_test = false;
        }
    }
    carried
}

/// Returns true if a line declares a function.
fn is_function(text: &str) -> bool {
    text.split_once("fn ").is_some_and(|(before, _)| {
        let mut words = before.split_whitespace();
        words.all(|word| word.starts_with("pub") || ["async", "const", "unsafe"].contains(&word))
    })
}

fn is_entry(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

fn rust_files(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            if !path.ends_with("target") {
                rust_files(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.insert(path);
        }
    }
}

/// The source files of every crate of the workspace.
fn sources() -> BTreeSet<PathBuf> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let mut files = BTreeSet::new();
    for package in metadata["packages"].as_array().expect("packages") {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let folder = Path::new(manifest).parent().expect("a folder");
        for part in ["src", "tests"].map(|part| folder.join(part)) {
            if part.is_dir() {
                rust_files(&part, &mut files);
            }
        }
    }
    files
}

#[test]
fn the_documented_ids_are_those_that_tests_carry() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/testing.md");
    let document = fs::read_to_string(document).expect("docs/testing.md is there");
    let (held, not_held) = document.split_once("## Not held yet").expect("two sections");
    let (_, held) = held.split_once("## Acceptance ids held").expect("two sections");
    let (not_held, _) = not_held.split_once("Limits of what").expect("the limits");

    let carried: BTreeSet<_> = sources()
        .iter()
        .flat_map(|file| carried(&fs::read_to_string(file).expect("a source file")))
        .collect();

    let (held, not_held) = (ids(held), ids(not_held));
    let missing: Vec<_> = held.difference(&carried).collect();
    assert!(missing.is_empty(), "documented as held, carried by no test: {missing:?}");
    let documented = &held | &not_held;
    let unexplained: Vec<_> = carried.difference(&documented).collect();
    assert!(unexplained.is_empty(), "carried by tests, not in docs/testing.md: {unexplained:?}");
    let both: Vec<_> = held.intersection(&not_held).collect();
    assert!(both.is_empty(), "both held and not held: {both:?}");
}

fn list(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|&id| id.to_owned()).collect()
}

#[test]
fn ids_in_the_doc_comment_of_a_test_count() {
    let of = |source: &str| carried(source);
    assert_eq!(of("/// MR-06\n#[test]\nfn a() {}"), list(&["MR-06"]));
    assert_eq!(of("#[test]\n/// MR-06\nfn a() {}"), list(&["MR-06"]));
    let prose = "/// HM-05, MON-07: contexts that\n/// CACHE-02 needs.\n#[test]\nfn a() {}";
    assert_eq!(of(prose), list(&["CACHE-02", "HM-05", "MON-07"]));
    let attributes = "/// MR-06\n#[test]\n#[cfg_attr(\n    a,\n    ignore\n)]\n// why\nfn a() {}";
    assert_eq!(of(attributes), list(&["MR-06"]));
    let module = "mod tests {\n    /// FAB-01\n    #[test]\n    pub(crate) fn a() {}\n}";
    assert_eq!(of(module), list(&["FAB-01"]));
}

#[test]
fn ids_anywhere_else_do_not_count() {
    for source in [
        "// MR-06\n#[test]\nfn a() {}",
        "//! MR-06\n#[test]\nfn a() {}",
        "#[test]\nfn a() {\n    // MR-06\n    b(); // MR-07\n}",
        "#[test]\nfn a() {\n    let id = \"MR-06\";\n}",
        "/// MR-06\nfn a() {}\n#[test]\nfn b() {}",
        "/// MR-06\nstruct A;\n\n#[test]\nfn b() {}",
        "/// MR-06\n#[derive(Debug)]\nstruct A(fn ());\n\n#[test]\nfn b() {}",
        "/// MR-06x, MR-6, XR-06, MR-060\n#[test]\nfn a() {}",
        "other! {\n    /// MR-06\n    a,\n}",
        "cases! {\n    a,\n}\n\n/// MR-06\nfn b() {}",
    ] {
        assert_eq!(carried(source), BTreeSet::new(), "{source}");
    }
}

#[test]
fn ids_of_entries_in_lists_of_tests_count() {
    let of = |source: &str| carried(source);
    let cases = "cases! {\n    /// MON-03\n    a,\n    b;\n    slow:\n    /// MON-05\n    c,\n}";
    assert_eq!(of(cases), list(&["MON-03", "MON-05"]));
    let worlds =
        "over_worlds! {\n    /// MR-06\n    ///\n    /// Busy.\n    a: Pairs, needs::X;\n}";
    assert_eq!(of(worlds), list(&["MR-06"]));
    assert_eq!(of("over_ways! {\n    /// REL-01\n    a: 0,\n}"), list(&["REL-01"]));
    let behaviours = "behaviours! {\n    dyn Iface:\n    /// HM-15\n    a,\n    b,\n}";
    assert_eq!(of(behaviours), list(&["HM-15"]));
}
