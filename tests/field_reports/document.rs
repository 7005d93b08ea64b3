//! Compares `docs/field-reports.md` with the tests that it names, and prints the score.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Write},
    path::Path,
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const TESTS: &str = "tests/field_reports";
const REPORTS: usize = 30;

/// A section of the document.
#[derive(Debug)]
struct Report<'d> {
    /// The tracker and number of the thread: `openucx/ucx#11584`.
    thread: &'d str,
    /// The bullets below the heading, each on one line.
    bullets: Vec<String>,
}

impl<'d> Report<'d> {
    /// Returns the sections of the document whose heading names a thread.
    fn all(document: &'d str) -> Vec<Self> {
        let sections = document.split("\n### ").skip(1);
        let report = |section: &'d str| {
            let section = section.split("\n## ").next().unwrap_or(section);
            let (heading, text) = section.split_once('\n').expect("a text");
            let (thread, _) = heading.split_once(": ").expect("a title after the thread");
            let bullets = text.split("\n- ").skip(1);
            let one_line = |bullet: &str| bullet.split_whitespace().collect::<Vec<_>>().join(" ");
            Self { thread, bullets: bullets.map(one_line).collect() }
        };
        sections.map(report).collect()
    }

    /// Returns the text of the bullet with this name.
    fn bullet(&self, name: &str) -> &str {
        let mut named = self.bullets.iter().filter_map(|bullet| bullet.strip_prefix(name));
        let text = named.next().unwrap_or_else(|| panic!("{}: no {name}", self.thread));
        assert!(named.next().is_none() && !text.is_empty(), "{}: {name}", self.thread);
        text
    }

    /// Returns true for an answer, and false for a failure with a reason.
    fn is_answered(&self) -> bool {
        match self.bullet("Result: ") {
            "answered." => true,
            text => {
                let missing = text.strip_prefix("failed: ");
                let missing = missing.unwrap_or_else(|| panic!("{}: {text}", self.thread));
                assert!(missing.len() > 20, "{}: {missing}", self.thread);
                false
            }
        }
    }

    /// Returns the names and files of the tests, which stand in backticks.
    fn tests(&self) -> Vec<(&str, &str)> {
        let text = self.bullet("Test: ");
        if text == "none." {
            return Vec::new();
        }
        let quoted: Vec<_> = text.split('`').skip(1).step_by(2).collect();
        let tests: Vec<_> = quoted.chunks_exact(2).map(|test| (test[0], test[1])).collect();
        assert!(!tests.is_empty() && quoted.len() % 2 == 0, "{}: {text}", self.thread);
        tests
    }

    /// Returns the start of the names of this report's own tests, such as `ucx_11584_`.
    fn prefix(&self) -> String {
        let (_, name) = self.thread.split_once('/').expect("owner/name#number");
        let name = name.to_lowercase().replace(['-', '#'], "_");
        format!("{name}_")
    }
}

/// Returns the names of the `#[test]` functions of a source file.
fn tests_of<'s>(source: &'s str) -> BTreeSet<&'s str> {
    let name = |text: &'s str| Some(text.split_once("fn ")?.1.split_once('(')?.0);
    source.split("#[test]\n").skip(1).filter_map(name).collect()
}

fn read(path: &str) -> String {
    let text = fs::read_to_string(Path::new(ROOT).join(path));
    text.unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// REL-06
#[test]
fn document_names_existing_tests_and_its_score_is_that_of_its_reports() {
    let document = read("docs/field-reports.md");
    let reports = Report::all(&document);
    let threads: BTreeSet<_> = reports.iter().map(|report| report.thread).collect();
    assert_eq!((reports.len(), threads.len()), (REPORTS, REPORTS), "each thread once");
    let mut own = BTreeSet::new();
    for report in &reports {
        for part in ["User: ", "Peer: ", "hmem: "] {
            report.bullet(part);
        }
        let tests = report.tests();
        assert!(!tests.is_empty() || !report.is_answered(), "{}: no test", report.thread);
        for (name, file) in tests {
            assert!(tests_of(&read(file)).contains(name), "{}: no {name} in {file}", report.thread);
            if file.starts_with(TESTS) {
                assert!(name.starts_with(&report.prefix()), "{}: {name}", report.thread);
                own.insert(name.to_owned());
            }
        }
    }
    // Each test of this binary has its report.
    for file in fs::read_dir(Path::new(ROOT).join(TESTS)).expect("a folder") {
        let file = file.expect("an entry").file_name().into_string().expect("a name");
        if file != "document.rs" {
            for name in tests_of(&read(&format!("{TESTS}/{file}"))) {
                assert!(own.contains(name), "{name} of {file} is in no report");
            }
        }
    }
    let answered = reports.iter().filter(|report| report.is_answered()).count();
    let score = format!("{answered} of {REPORTS} answered");
    // Not captured by the test harness, unlike `println!`.
    writeln!(io::stderr(), "field reports: {score}").expect("standard error");
    assert!(document.contains(&format!("\n**{score}.**")), "the document lacks: **{score}.**");
}

#[test]
fn missing_parts_of_a_report_are_found() {
    let report = |bullets: &str| {
        let text = format!("# Title\n\n## Peer\n\n### a/b-c#7: Title\n\n{bullets}\n## Next\n");
        let of = |look: fn(&Report<'_>)| {
            std::panic::catch_unwind(|| look(&Report::all(&text)[0])).is_ok()
        };
        (
            of(|report| drop(report.tests())),
            of(|report| {
                report.is_answered();
            }),
        )
    };
    assert_eq!(report("- Test: `x` in\n  `y.rs`.\n- Result: answered.\n"), (true, true));
    assert_eq!(
        report("- Test: none.\n- Result: failed: nothing of it exists yet.\n"),
        (true, true)
    );
    assert_eq!(report("- Test: `x`.\n- Result: failed: no.\n"), (false, false));
    assert_eq!(report("- Result: mostly answered.\n"), (false, false));
    let text = "\n### a/b-c#7: Title\n\n- Test: none.\n";
    assert_eq!(Report::all(text)[0].prefix(), "b_c_7_");
    assert_eq!(tests_of("/// A.\n#[test]\nfn a() {}\nfn b() {}\n"), BTreeSet::from(["a"]));
}
