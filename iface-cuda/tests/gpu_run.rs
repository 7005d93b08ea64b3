//! Tests of the script `tests/gpu/run`, over substitutes for the programs that it runs on the GPU
//! machine. A failure of one program must not hide the results of the others.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

const GPU: &str = r#"case "$1" in --parts) echo machine copies ;; *) echo "part $1" ;; esac"#;
const SUITE: &str = r#"case "$1" in
    --list) printf 'a_1: test\nb_2: test\n' ;;
    *) echo "test $2 ... ok"; echo "test result: ok. 1 passed; 0 failed" ;;
esac"#;
const BYTES: &str = r#"case "$1" in
    --list) printf 'c_3: test\nd_4: test\n' ;;
    *) [[ $2 != d_4 ]] || echo "test d_4 ... not over a GPU: it needs two of them"; echo ok
       echo "test result: ok. 1 passed; 0 failed" ;;
esac"#;
const HMEM: &str = r#"echo "hmem $*""#;

/// A temporary folder that holds test programs in place of those that `tests/gpu/run --carry`
/// copies. Dropping the value deletes the folder.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, gpu: &str, suite: &str, hmem: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-run-{name}"));
        fs::create_dir_all(&folder).expect("a folder");
        let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu/run");
        fs::copy(run, folder.join("run")).expect("the command");
        for (name, text) in [("gpu", gpu), ("suite", suite), ("bytes", BYTES), ("hmem", hmem)] {
            let path = folder.join(name);
            fs::write(&path, format!("#!/usr/bin/env bash\n{text}\n")).expect("a program");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
        }
        Self(folder)
    }

    /// Runs the script, and returns its exit status and the report.
    fn run(&self) -> (Option<i32>, String) {
        let output = Command::new("bash")
            .arg(self.0.join("run"))
            .env("HMEM_GPU_LIMIT", "60")
            .output()
            .expect("bash");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("ours");
    }
}

fn holds(report: &str, lines: &[&str]) {
    for line in lines {
        assert!(report.lines().any(|found| found == *line), "no {line:?} in:\n{report}");
    }
}

const WHOLE: [&str; 7] = [
    "part machine",
    "part copies",
    "| a_1 | passed |",
    "| b_2 | passed |",
    "    hmem check --iface cuda",
    "| c_3 | passed |",
    "| d_4 | not shown over the GPU: it needs two of them |",
];

#[test]
fn passing_run_is_reported_completely() {
    let (status, report) = Folder::new("passes", GPU, SUITE, HMEM).run();
    holds(&report, &WHOLE);
    assert_eq!(status, Some(0), "{report}");
}

#[test]
fn failing_test_is_reported_with_its_output_beside_all_others() {
    let suite = format!("if [[ $2 == a_1 ]]; then echo why it failed; kill -SEGV $$; fi\n{SUITE}");
    let (status, report) = Folder::new("suite", GPU, &suite, HMEM).run();
    holds(&report, &["| a_1 | FAILED: exit status 139 |", "    why it failed"]);
    holds(&report, &[WHOLE[0], WHOLE[1], WHOLE[3], WHOLE[4]]);
    assert_eq!(status, Some(1), "{report}");
}

#[test]
fn failing_part_or_check_is_reported_beside_all_others() {
    let gpu = format!("{GPU}\n[[ $1 != machine ]] || exit 1");
    let (status, report) = Folder::new("part", &gpu, SUITE, HMEM).run();
    holds(&report, &WHOLE);
    holds(&report, &["Part machine failed: exit status 1."]);
    assert_eq!(status, Some(1), "{report}");

    let (status, report) = Folder::new("check", GPU, SUITE, &format!("{HMEM}\nexit 1")).run();
    holds(&report, &WHOLE);
    assert_eq!(status, Some(1), "{report}");
}

#[test]
fn suite_that_does_not_start_is_a_failure() {
    let (status, report) = Folder::new("list", GPU, "exit 127", HMEM).run();
    holds(&report, &["part copies", "| the suite lists no test | FAILED |", WHOLE[4]]);
    assert_eq!(status, Some(1), "{report}");
}

#[test]
fn hanging_part_is_killed_and_reported() {
    let gpu = format!("[[ $1 != machine ]] || exec tail -f /dev/null\n{GPU}");
    let folder = Folder::new("hangs", &gpu, SUITE, HMEM);
    let output =
        Command::new("bash").arg(folder.0.join("run")).env("HMEM_GPU_LIMIT", "0.2").output();
    let output = output.expect("bash");
    let report = String::from_utf8_lossy(&output.stdout);
    holds(&report, &["Part machine failed: did not end in 0.2 s."]);
    assert_eq!(output.status.code(), Some(1), "{report}");
}

#[test]
fn hanging_test_is_killed_and_reported() {
    let suite = format!("[[ $2 != a_1 ]] || exec tail -f /dev/null\n{SUITE}");
    let folder = Folder::new("test-hangs", GPU, &suite, HMEM);
    let output =
        Command::new("bash").arg(folder.0.join("run")).env("HMEM_GPU_LIMIT", "0.2").output();
    let output = output.expect("bash");
    let report = String::from_utf8_lossy(&output.stdout);
    holds(&report, &["| a_1 | FAILED: did not end in 0.2 s |"]);
    assert_eq!(output.status.code(), Some(1), "{report}");
}

/// The report distinguishes a killed process from a process that reached its time limit.
#[test]
fn killed_process_is_reported_beside_all_others() {
    let killed = "was killed, as the system does where memory runs out";
    let gpu = format!("{GPU}\n[[ $1 != copies ]] || kill -KILL $$");
    let suite = format!("[[ $2 != a_1 ]] || kill -KILL $$\n{SUITE}");
    let (status, report) = Folder::new("killed", &gpu, &suite, HMEM).run();
    let (part, test) =
        (format!("Part copies failed: {killed}."), format!("| a_1 | FAILED: {killed} |"));
    holds(&report, &[&part, &test, WHOLE[3], WHOLE[4], WHOLE[5]]);
    assert_eq!(status, Some(1), "{report}");
    // A program may also exit with 124 itself, without reaching the time limit.
    let gpu = format!("{GPU}\n[[ $1 != machine ]] || exit 124");
    let (_, report) = Folder::new("says-124", &gpu, SUITE, HMEM).run();
    holds(&report, &["Part machine failed: exit status 124."]);
}

#[test]
fn gpu_lost_after_the_first_part_is_a_failure_beside_all_others() {
    let gpu = format!("{GPU}\n[[ $1 != copies ]] || exit 3");
    let (status, report) = Folder::new("gone", &gpu, SUITE, HMEM).run();
    holds(&report, &WHOLE);
    holds(&report, &["Part copies failed: exit status 3."]);
    assert_eq!(status, Some(1), "{report}");
}

#[test]
fn without_a_gpu_the_status_is_3_and_no_test_runs() {
    let gpu = format!("[[ $1 != machine ]] || exit 3\n{GPU}");
    let (status, report) = Folder::new("none", &gpu, SUITE, HMEM).run();
    assert_eq!((status, report.as_str()), (Some(3), ""));
}
