//! `docs/testing.md` says which acceptance ids are held, and it is true: test code carries exactly those.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

const FAMILIES: [&str; 14] = [
    "MR", "MODE", "KEY", "EVT", "SUB", "VRB", "MW", "HM", "CACHE", "MON", "P2P", "BNC", "DIAG",
    "REL",
];

/// Ids in a text, as `MR-04` or as the start of a test's name, `mr_04_`.
fn ids(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'));
    words.filter_map(id).collect()
}

fn id(word: &str) -> Option<String> {
    let upper = word.to_ascii_uppercase();
    let (family, rest) = upper.split_once(['-', '_'])?;
    let number = rest.get(..2).filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))?;
    let ends = rest[2..].chars().next().is_none_or(|next| next == '_');
    (FAMILIES.contains(&family) && ends).then(|| format!("{family}-{number}"))
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn the_documented_ids_are_those_that_tests_carry() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document =
        fs::read_to_string(root.join("docs/testing.md")).expect("docs/testing.md is there");
    let (held, not_held) = document.split_once("## Not held yet").expect("two sections");
    let (_, held) = held.split_once("## Acceptance ids held").expect("two sections");

    let mut files = Vec::new();
    for package in
        ["", "core", "iface-system", "iface-cuda", "iface-rocr", "iface-ze", "p2p", "cli"]
    {
        let folder = root.join(package).join("tests");
        if folder.is_dir() {
            rust_files(&folder, &mut files);
        }
    }
    files.retain(|file| {
        !file.ends_with("acceptance_ids.rs") && !file.starts_with(root.join("tests/vm"))
    });
    let carried: BTreeSet<_> = files
        .iter()
        .flat_map(|file| ids(&fs::read_to_string(file).expect("a test file")))
        .collect();

    let held = ids(held);
    let missing: Vec<_> = held.difference(&carried).collect();
    assert!(missing.is_empty(), "documented as held, carried by no test: {missing:?}");
    let unexplained: Vec<_> =
        carried.difference(&held).filter(|id| !ids(not_held).contains(*id)).collect();
    assert!(unexplained.is_empty(), "carried by tests, not in docs/testing.md: {unexplained:?}");
    let both: Vec<_> = held
        .intersection(&ids(not_held.split("Limits of what").next().unwrap_or("")))
        .cloned()
        .collect();
    assert!(both.is_empty(), "both held and not held: {both:?}");
}
