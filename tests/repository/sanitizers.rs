//! Tests of `tests/sanitizers/run` and of its lists.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const SKIPPED: &str = "tests/skipped-sanitizers.txt";

fn lines(path: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(ROOT).join(path)).expect(path);
    text.lines().map(str::to_owned).collect()
}

/// Runs the script with a `cargo` that builds one shell script as the test binary `src/fake`.
fn run_over(name: &str, binary: Option<&str>) -> Output {
    use std::os::unix::fs::PermissionsExt;
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("sanitizers-{name}"));
    fs::create_dir_all(&folder).expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        path.display().to_string()
    };
    let message = binary.map(|text| {
        let binary = write("fake-0123", text);
        format!(
            r#"{{"manifest_path":"{ROOT}/src/Cargo.toml","profile":{{"test":true}},{}}}"#,
            format_args!(r#""executable":"{binary}""#)
        )
    });
    write("cargo", &format!("echo '{}'", message.unwrap_or_default()));
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    Command::new(Path::new(ROOT).join("tests/sanitizers/run"))
        .args(["address", "-p", "fake"])
        .env("PATH", path)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .output()
        .expect("bash")
}

const RESULT: &str =
    "echo 'test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out'";

/// REL-04
#[test]
fn run_fails_if_no_test_runs_or_a_binary_fails() {
    let text = |output: &Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let sound = run_over("sound", Some(RESULT));
    assert!(sound.status.success(), "{sound:?}");
    assert!(text(&sound).contains("address: 2 passed, 1 ignored, 0 left out in 1 binaries"));
    let no_test = RESULT.replace("2 passed", "0 passed");
    let unlisted = RESULT.replace("0 filtered", "1 filtered");
    let leak = format!("{RESULT}; exit 1");
    for (name, binary, said) in [
        ("none", None, "no test ran"),
        ("empty", Some(no_test.as_str()), "no test ran"),
        ("silent", Some("exit 0"), "src-fake: no result"),
        ("leak", Some(leak.as_str()), "src-fake: status 1"),
        ("unlisted", Some(unlisted.as_str()), "lists 0 tests, and 1 of them exist"),
    ] {
        let output = run_over(name, binary);
        assert_eq!(output.status.code(), Some(1), "{name}: {output:?}");
        assert!(text(&output).contains(said), "{name}: {output:?}");
    }
}

/// REL-04
#[test]
fn each_skipped_test_has_a_reason() {
    let listed: Vec<_> = lines(SKIPPED).into_iter().filter(|line| !line.starts_with('#')).collect();
    assert!(!listed.is_empty());
    for line in &listed {
        let fields: Vec<_> = line.split(" | ").collect();
        let [sanitizer, binary, test, reason] = fields[..] else { panic!("{line}") };
        assert!(["address", "thread"].contains(&sanitizer), "{line}");
        assert!([binary, test, reason].iter().all(|field| !field.trim().is_empty()), "{line}");
    }
    assert!(listed.is_sorted(), "{SKIPPED} is not sorted");
}

/// REL-04
#[test]
fn each_suppression_has_a_reason() {
    for path in ["tests/sanitizers/leak.supp", "tests/sanitizers/thread.supp"] {
        let lines = lines(path);
        let suppressions = lines.iter().enumerate().filter(|(_, line)| !line.starts_with('#'));
        for (number, line) in suppressions {
            let first = lines[..number].iter().rposition(|line| line.starts_with('#'));
            let comment = first.map(|first| lines[first].trim_start_matches('#').trim());
            assert!(comment.is_some_and(|reason| !reason.is_empty()), "{path}: {line}");
        }
    }
}
