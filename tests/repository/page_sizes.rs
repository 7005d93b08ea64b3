//! Refuses numbers in library code that could be the size of a page of 4 KiB. Page size is asked
//! from the system (`rustix::param::page_size`), since arm64 also has pages of 16 and 64 KiB.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Ways to write 4 KiB, its number of bits, or its mask.
const SPELLINGS: [&str; 7] = ["4096", "0x1000", "0xfff", "4 << 10", "<< 12", ">> 12", "4 * 1024"];

/// The types that may follow a number.
const TYPES: [&str; 6] = ["_u64", "u64", "_usize", "usize", "_u32", "u32"];

/// Lines that contain one of [`SPELLINGS`] and mean something else: a part of the file's path, a
/// part of the line, and the meaning.
const OTHERS: &[(&str, &str, &str)] = &[
    ("c/src/call.rs", "LARGEST", "the largest size of a structure"),
    ("c/src/lib.rs", "HMEM_REMOTE_READ", "a right"),
    ("cli/src/args.rs", "range(1..=4096)", "the number of transfers in flight"),
    ("cli/src/perf/wire.rs", "let mut rest", "a buffer for bytes that are dropped"),
    ("cli/src/perf/server.rs", "MOST_DEPTH", "the number of transfers in flight"),
    ("cli/src/perf/layout.rs", "BLOCK", "a distance on which both ends agree"),
    ("cli/src/perf/mod.rs", "DEFAULT_SIZES", "sizes of transfers"),
    ("cli/src/check/mod.rs", "Extent {", "sizes of transfers"),
    ("core/src/cache/invalidations.rs", "addr() >> 12", "a hash of a thread's stack"),
    ("core/src/cache/cache_core.rs", "SPARE_ENTRIES", "a number of entries"),
    ("core/src/cache/index/entry.rs", "GRANULE", "what a slot of the table covers"),
    ("core/src/domain/rail_endpoint.rs", "MIN_CHUNK", "the shortest part of a striped transfer"),
    ("core/src/error.rs", "self.code >= 0x1000", "a vendor's status code"),
    ("core/src/provider/facets.rs", "REVOCATIONS", "a bit of a set of features"),
    ("core/src/access.rs", "REMOTE_READ", "a bit of libfabric's flags"),
    ("core/src/domain/cached.rs", "MOST_UNGROWABLE", "a number of ranges"),
    ("core/src/wiped.rs", "align_of", "a limit below every page size"),
    ("iface-rocr/src/sys.rs", "HSA_STATUS_ERROR", "a status code"),
    ("iface-system/src/monitor/userfaultfd/discards.rs", "PENDING", "a number of ranges"),
    ("iface-system/src/monitor/userfaultfd/sys.rs", "WP_HUGETLBFS_SHMEM", "a feature bit"),
    ("p2p/src/topology/device.rs", "MOST_FUNCTIONS", "a number of PCI functions"),
    ("p2p/src/topology/source.rs", "target.len()", "the length of a link's target"),
    ("p2p/src/topology/config_space.rs", "EXTENDED", "the length of a configuration space"),
    ("p2p/src/topology/device.rs", "Broadcom", "a vendor's PCI id"),
    ("p2p/src/staging/chunk_plan.rs", "MTU", "the largest MTU of InfiniBand"),
    ("provider-loopback/src/memory/host.rs", "entries", "a number of pages"),
    ("provider-loopback/src/memory/pinned.rs", "MAX_BUFFERS", "a number of buffers"),
    ("provider-libfabric/src/sys/layout.rs", "FI_REMOTE_READ", "a bit of libfabric's flags"),
    ("provider-verbs/src/sys/codes.rs", "RQ_PSN", "a bit of libibverbs' masks"),
    ("provider-verbs/src/device.rs", "register(pd", "a call that the driver must refuse"),
];

/// Folders and files with test code only.
const TESTS: [&str; 4] = [
    "conformance/src/",
    "core/src/cache/stress.rs",
    "core/src/cache/searches.rs",
    "core/src/cache/models/",
];

/// Adds the Rust files below a folder.
fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("read a folder of the workspace") {
        let path = entry.expect("read a folder of the workspace").path();
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn library_files() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    collect(&root.join("src"), &mut found);
    for member in fs::read_dir(root).expect("read the root") {
        let source = member.expect("read the root").path().join("src");
        if source.is_dir() && !source.starts_with(root.join("target")) {
            collect(&source, &mut found);
        }
    }
    found
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(root).expect("below the root").display().to_string();
            (name, fs::read_to_string(&path).expect("a UTF-8 file"))
        })
        .filter(|(name, _)| !TESTS.iter().any(|tests| name.starts_with(tests)))
        .collect()
}

/// Returns the lines of code before a file's tests that contain a spelling, with their numbers.
fn suspects(text: &str) -> Vec<(usize, &str)> {
    let code = text.split("\n#[cfg(test)]\nmod ").next().expect("a first part");
    let code = code.split("\n#[cfg(all(test, not(loom)))]\nmod ").next().expect("a first part");
    (1..)
        .zip(code.lines())
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
        .filter(|(_, line)| SPELLINGS.iter().any(|spelling| contains_number(line, spelling)))
        .collect()
}

/// Returns true if `line` contains `spelling`, which is no part of a longer number.
fn contains_number(line: &str, spelling: &str) -> bool {
    line.match_indices(spelling).any(|(at, _)| {
        let digit = |character: Option<char>| {
            character.is_some_and(|character| character.is_ascii_alphanumeric())
        };
        let before = line[..at].chars().next_back();
        let after = &line[at + spelling.len()..];
        let after = TYPES.iter().find_map(|name| after.strip_prefix(name)).unwrap_or(after);
        let after = after.chars().next();
        !digit(before) && !digit(after) && after != Some('_')
    })
}

#[test]
fn page_size_is_no_literal() {
    let mut used = vec![false; OTHERS.len()];
    let mut literals = Vec::new();
    for (name, text) in library_files() {
        for (number, line) in suspects(&text) {
            let other = OTHERS
                .iter()
                .position(|(path, part, _)| name.starts_with(path) && line.contains(part));
            match other {
                Some(index) => used[index] = true,
                None => literals.push(format!("{name}:{number}: {}", line.trim())),
            }
        }
    }
    assert!(
        literals.is_empty(),
        "ask for the page size with rustix::param::page_size, or add the line to OTHERS with its \
         meaning:\n{}",
        literals.join("\n")
    );
    let unused: Vec<_> =
        OTHERS.iter().zip(used).filter_map(|(other, used)| (!used).then_some(other)).collect();
    assert!(unused.is_empty(), "these lines are gone: remove them from OTHERS: {unused:?}");
}

/// ARM-01: the tests that are left out on aarch64 exist, each once in the list, with a reason.
#[test]
fn each_test_left_out_on_aarch64_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let list = fs::read_to_string(root.join("tests/vm/skipped-aarch64.txt")).expect("the list");
    let mut seen = std::collections::HashSet::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let parts: Vec<_> = line.split(" | ").collect();
        let [binary, test, reason] = parts[..] else { panic!("three parts: {line}") };
        // The name of a binary begins with the folder of its package.
        let places = [("", binary)].into_iter().chain(binary.match_indices('-').map(|(at, _)| {
            let (package, name) = binary.split_at(at);
            (package, &name[1..])
        }));
        let sources = places.flat_map(|(package, name)| {
            let tests = root.join(package).join("tests");
            let (file, folder) = (tests.join(format!("{name}.rs")), tests.join(name));
            let mut files = if file.exists() { vec![file] } else { Vec::new() };
            if folder.exists() {
                collect(&folder, &mut files);
            }
            files
        });
        let sources: String =
            sources.map(|file| fs::read_to_string(file).expect("a UTF-8 file")).collect();
        let mut names = test.rsplit("::");
        let function = names.next().map(|name| format!("fn {name}("));
        for declared in function.into_iter().chain(names.map(|name| format!("mod {name};"))) {
            assert!(sources.contains(&declared), "no `{declared}` in the binary: {line}");
        }
        assert!(!reason.is_empty() && seen.insert((binary, test)), "no reason, or twice: {line}");
    }
    assert!(!seen.is_empty());
}

#[test]
fn literal_is_found_in_code_only() {
    let text = "const PAGE: u64 = 4096;\n// 4096\nlet a = x & !0xfff;\nlet b = 14096;\n\
                let c = 4096_u64 + 4096usize;\nlet d = 4096_000;\n\
                #[cfg(test)]\nmod tests {\n    let e = 4096;\n";
    let found: Vec<_> = suspects(text).into_iter().map(|(number, _)| number).collect();
    assert_eq!(found, [1, 3, 5]);
}
