//! Compares `docs/requirements.md` and `docs/testing.md` with the requirement ids in the doc
//! comments of tests.

use crate::workspace;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

const FAMILIES: [&str; 18] = [
    "MR", "MODE", "KEY", "EVT", "SUB", "VRB", "MW", "HM", "CACHE", "MON", "P2P", "BNC", "DIAG",
    "REL", "ARM", "FAB", "LIFE", "DOOR",
];

/// Macros that define one test for each entry.
const TEST_LISTS: [&str; 4] = ["behaviours!", "cases!", "over_ways!", "trials!"];

/// Returns the requirement ids in a text, such as `MR-04`.
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

/// Returns the requirement ids in the doc comments of a file's tests: of `#[test]` functions, and
/// of entries of the macros in [`TEST_LISTS`]. Expects source text formatted by rustfmt.
fn carried(source: &str) -> BTreeSet<String> {
    let mut carried = BTreeSet::new();
    let mut docs = String::new();
    let mut is_test = false;
    let mut in_attribute = false;
    // Last line of the macro call that lists tests.
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

/// Returns the requirement ids in the first lines of the docstrings of a Python file's tests.
fn carried_by_python(source: &str) -> BTreeSet<String> {
    let lines: Vec<_> = source.lines().collect();
    let of_test = |pair: &&[&str]| pair[0].starts_with("def test_") && pair[1].contains("\"\"\"");
    lines.windows(2).filter(of_test).flat_map(|pair| ids(pair[1])).collect()
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

fn source_files(folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            if !path.ends_with("target") {
                source_files(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
            found.insert(path);
        }
    }
}

/// Returns the paths of the source files in `src` and `tests` of every crate of the workspace, and
/// of the tests of the Python package.
fn sources() -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    for package in workspace::packages() {
        let manifest = package["manifest_path"].as_str().expect("a path");
        let folder = Path::new(manifest).parent().expect("a folder");
        for part in ["src", "tests"].map(|part| folder.join(part)) {
            if part.is_dir() {
                source_files(&part, &mut files);
            }
        }
    }
    source_files(&Path::new(ROOT).join("python/tests"), &mut files);
    files
}

/// Maps each requirement id to the files with its tests, relative to the root of the workspace.
fn test_files() -> BTreeMap<String, BTreeSet<String>> {
    let mut files = BTreeMap::<_, BTreeSet<_>>::new();
    for path in sources() {
        let source = fs::read_to_string(&path).expect("a source file");
        let is_python = path.extension().is_some_and(|extension| extension == "py");
        let carried = if is_python { carried_by_python(&source) } else { carried(&source) };
        let path = path.strip_prefix(ROOT).expect("a file of the workspace").display();
        for id in carried {
            files.entry(id).or_default().insert(path.to_string());
        }
    }
    files
}

/// Formats a list of files. Files of one folder with one extension are joined, as in
/// `a/{b,c}.rs`.
fn by_folder(files: &BTreeSet<String>) -> String {
    let mut folders = BTreeMap::<_, Vec<_>>::new();
    for file in files {
        let (folder, name) = file.rsplit_once('/').expect("a file in a folder");
        let (name, extension) = name.rsplit_once('.').expect("a file with an extension");
        folders.entry((folder, extension)).or_default().push(name);
    }
    let entries = folders.iter().map(|((folder, extension), names)| match names[..] {
        [name] => format!("`{folder}/{name}.{extension}`"),
        _ => format!("`{folder}/{{{}}}.{extension}`", names.join(",")),
    });
    entries.collect::<Vec<_>>().join(", ")
}

/// Breaks a text at spaces into indented lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::from(" ")];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("a line");
        if last.len() + 1 + word.len() > 100 && last != " " {
            lines.push(format!("  {word}"));
        } else {
            *last = format!("{last} {word}");
        }
    }
    lines.join("\n") + "\n"
}

/// Returns the requirement id if an entry of `docs/requirements.md` begins in this line.
fn defined(line: &str) -> Option<&str> {
    line.strip_prefix("- **")?.split_once("**").map(|(id, _)| id).filter(|id| is_id(id))
}

/// Returns the text of `docs/requirements.md` with the list of tests of each requirement updated.
fn with_tests(document: &str, files: &BTreeMap<String, BTreeSet<String>>) -> String {
    let mut text = String::new();
    let mut id = None;
    let mut in_tests = false;
    for line in document.split_inclusive('\n') {
        id = defined(line).or(id);
        in_tests = line.starts_with("  Tests: ") || in_tests && line.starts_with("  ");
        if in_tests {
            continue;
        }
        text.push_str(line);
        if line.starts_with("  Source: ") {
            let tests = id.and_then(|id| files.get(id)).map_or("none yet.".into(), by_folder);
            text.push_str(&wrapped(&format!("Tests: {tests}")));
        }
    }
    text
}

fn document(name: &str) -> (PathBuf, String) {
    let path = Path::new(ROOT).join("docs").join(name);
    let text = fs::read_to_string(&path).expect("the document is there");
    (path, text)
}

#[test]
fn requirements_name_the_tests_that_hold_them() {
    let (path, found) = document("requirements.md");
    let expected = with_tests(&found, &test_files());
    if std::env::var_os("HMEM_BLESS").is_some() {
        fs::write(path, expected).expect("write the document");
        return;
    }
    let differs = found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
    assert!(
        found == expected,
        "docs/requirements.md has {differs:?}; \
         HMEM_BLESS=1 cargo test --test repository rewrites it"
    );
}

#[test]
fn each_requirement_has_a_test_or_is_documented_as_not_held() {
    let (_, requirements) = document("requirements.md");
    let defined: BTreeSet<_> =
        requirements.lines().filter_map(defined).map(str::to_owned).collect();
    let carried: BTreeSet<_> = test_files().into_keys().collect();
    let unknown: Vec<_> = carried.difference(&defined).collect();
    assert!(unknown.is_empty(), "named by tests, not in docs/requirements.md: {unknown:?}");

    let (_, testing) = document("testing.md");
    let (_, rest) = testing.split_once("## Not held yet").expect("a section");
    let (table, _) = rest.split_once("Limits of what").expect("the limits");
    let without_test: BTreeSet<_> = defined.difference(&carried).cloned().collect();
    let not_held = ids(table);
    let missing: Vec<_> = without_test.difference(&not_held).collect();
    assert!(missing.is_empty(), "no test, and not in docs/testing.md as not held: {missing:?}");
    let undefined: Vec<_> = not_held.difference(&defined).collect();
    assert!(undefined.is_empty(), "not held, and not in docs/requirements.md: {undefined:?}");
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
    let ways = "over_ways! {\n    /// MR-06\n    ///\n    /// Busy.\n    a: 0,\n}";
    assert_eq!(of(ways), list(&["MR-06"]));
    let behaviours = "behaviours! {\n    dyn Iface:\n    /// HM-15\n    a,\n    b,\n}";
    assert_eq!(of(behaviours), list(&["HM-15"]));
}

#[test]
fn files_of_one_folder_are_listed_together() {
    let files = list(&["a/b.rs", "a/c.rs", "a/d/e.rs"]);
    assert_eq!(by_folder(&files), "`a/{b,c}.rs`, `a/d/e.rs`");
}

#[test]
fn tests_of_a_requirement_replace_those_listed_before() {
    let files = BTreeMap::from([("MR-01".to_owned(), list(&["a/b.rs"]))]);
    let text = "- **MR-01** A.\n  Source: b.\n  Tests: `c`,\n  `d`\n- **MR-02** E.\n  Source: f.\n";
    let expected = "- **MR-01** A.\n  Source: b.\n  Tests: `a/b.rs`\n\
                    - **MR-02** E.\n  Source: f.\n  Tests: none yet.\n";
    assert_eq!(with_tests(text, &files), expected);
    assert_eq!(with_tests(expected, &files), expected);
}
