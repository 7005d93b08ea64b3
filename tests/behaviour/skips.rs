//! Compares the list of skipped cases and their reasons with the committed list, so that no skip is
//! silent.

use std::{collections::BTreeSet, env, fs, path::PathBuf};

use crate::config::{Behaviour, VERBS_NEEDS};

const TABLES: &[&[Behaviour]] = &[
    crate::diag::BEHAVIOURS,
    crate::dmabuf::BEHAVIOURS,
    crate::evt::BEHAVIOURS,
    crate::grant::BEHAVIOURS,
    crate::hm::BEHAVIOURS,
    crate::key::BEHAVIOURS,
    crate::mode::BEHAVIOURS,
    crate::mr::BEHAVIOURS,
    crate::p2p::BEHAVIOURS,
    crate::persistent::BEHAVIOURS,
    crate::threads::BEHAVIOURS,
];

const HEADER: &str = "\
# Skipped cases of the behaviour suite: behaviour | test configurations that cannot show it: reason.
# Written by `HMEM_BLESS=1 cargo test --test behaviour skips`. A skip is not a pass.
";

const VERBS_HEADER: &str = "\
# Skips of the behaviour suite over an RDMA device (HMEM_VERBS_DEVICE), as in skipped.txt.
# tests/vm/run leaves out what \"every verbs configuration\" cannot show.
# Written by `HMEM_BLESS=1 cargo test --test behaviour skips`.
";

/// The list must not depend on the machine. If a machine cannot run a test configuration, the
/// behaviour fails there instead of being skipped.
#[test]
fn list_of_skips_equals_the_committed_list() {
    let behaviours = TABLES.iter().flat_map(|table| table.iter());
    compare("skipped.txt", HEADER, behaviours.flat_map(Behaviour::skipped).collect());
}

#[test]
fn list_of_verbs_skips_equals_the_committed_list() {
    let everywhere = VERBS_NEEDS
        .iter()
        .map(|need| format!("(every behaviour) | {}: {}", need.class, need.reason));
    let behaviours = TABLES.iter().flat_map(|table| table.iter());
    let actual = everywhere.chain(behaviours.flat_map(Behaviour::skipped_verbs)).collect();
    compare("skipped-verbs.txt", VERBS_HEADER, actual);
}

fn compare(file: &str, header: &str, actual: BTreeSet<String>) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(file);
    if env::var_os("HMEM_BLESS").is_some() {
        let lines = actual.iter().map(|line| format!("{line}\n")).collect::<String>();
        fs::write(&path, format!("{header}{lines}")).expect("write the list");
    }
    let text = fs::read_to_string(&path).expect("the committed list");
    let lines: Vec<_> =
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    assert!(lines.is_sorted(), "{} is not sorted", path.display());
    let committed: BTreeSet<_> = lines.into_iter().collect();
    let added: Vec<_> = actual.difference(&committed).map(|line| format!("+ {line}")).collect();
    let gone: Vec<_> = committed.difference(&actual).map(|line| format!("- {line}")).collect();
    assert!(
        added.is_empty() && gone.is_empty(),
        "skips changed; look at each, then run with HMEM_BLESS=1:\n{}",
        [gone, added].concat().join("\n")
    );
}

#[test]
fn every_requirement_of_the_suites_has_a_test() {
    let ids = |family: &str, numbers: &[u32]| {
        numbers.iter().map(|n| format!("{family}-{n:02}")).collect::<Vec<_>>()
    };
    let wanted = [
        ids("MR", &(1..=16).collect::<Vec<_>>()),
        ids("MODE", &(1..=13).collect::<Vec<_>>()),
        ids("KEY", &(1..=8).collect::<Vec<_>>()),
        ids("EVT", &[1, 2, 3, 4, 5]),
        ids("SUB", &[1, 2, 3]),
        ids("MW", &(1..=10).collect::<Vec<_>>()),
        ids("HM", &[1, 2, 3, 4, 6, 11, 12, 13]),
        ids("P2P", &[3, 6]),
        ids("DIAG", &[4]),
    ];
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let sources: String = ["tests/behaviour", "conformance/src/provider"]
        .into_iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).expect("a folder of the suite"))
        .map(|entry| fs::read_to_string(entry.expect("an entry").path()).expect("a source file"))
        .collect();
    let docs = sources.lines().filter_map(|line| line.trim().strip_prefix("///"));
    let words: BTreeSet<_> =
        docs.flat_map(|doc| doc.split([' ', ',', ':', '.'])).map(str::to_owned).collect();
    let missing: Vec<_> = wanted.concat().into_iter().filter(|id| !words.contains(id)).collect();
    assert!(missing.is_empty(), "no test for {missing:?}");
}
