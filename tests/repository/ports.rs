//! Checks what can be checked of the ports of other programs (`ports`) without a download. Their
//! tests run with `ports/run`.

use std::{fs, path::Path, process::Command};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Returns the changed lines of a patch that begin with `sign`.
fn changed(patch: &str, sign: char) -> usize {
    let header = String::from(sign).repeat(3);
    patch.lines().filter(|line| line.starts_with(sign) && !line.starts_with(&header)).count()
}

/// DOOR-01
#[test]
fn each_port_removes_more_lines_than_it_adds_and_changes_no_tests() {
    let entries = fs::read_dir(Path::new(ROOT).join("ports")).expect("read ports");
    let paths = entries.map(|entry| entry.expect("read ports").path());
    let patches: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|name| name == "patch")).collect();
    assert!(!patches.is_empty());
    for path in patches {
        let name = path.display();
        let patch = fs::read_to_string(&path).expect("read a patch");
        let (added, removed) = (changed(&patch, '+'), changed(&patch, '-'));
        assert!(added < removed, "{name} adds {added} lines and removes {removed}");
        let files = patch.lines().filter_map(|line| line.strip_prefix("+++ b/"));
        let tests: Vec<_> = files.filter(|file| file.contains("test")).collect();
        assert!(tests.is_empty(), "{name} changes {tests:?}");
        let readme = fs::read_to_string(path.with_file_name("README.md")).expect("read README.md");
        for figure in [format!("adds {added}"), format!("removes {removed}")] {
            assert!(
                readme.split_whitespace().collect::<Vec<_>>().join(" ").contains(&figure),
                "README.md of ports says otherwise than: {figure} lines"
            );
        }
    }
}

/// DOOR-01
#[test]
fn a_port_without_its_program_is_left_out_and_says_so() {
    let run = |arguments: &[&str]| {
        Command::new(Path::new(ROOT).join("ports/run"))
            .args(arguments)
            .output()
            .expect("start bash")
    };
    let output = run(&["pegaflow-transfer"]);
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("pegaflow-transfer is left out: no registry has it"), "{said}");
    let output = run(&["pegaflow-transfer", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(run(&["no-such-program"]).status.code(), Some(2));
}
