//! Tests of this program over the fake driver: it reports all measurements, and a failure affects
//! only its own row.

use std::{path::Path, process::Command};

use hmem_iface_cuda::sys::Functions;

use crate::{
    Part,
    calls::{COUNTED, has_expected_calls},
    driver::Driver,
    exports::{exported, mappable, must_export},
    figures::{judged, reused},
    others,
    report::{Report, Row, attempt},
};

pub(crate) fn show(parts: &[Part], print: bool) {
    let mut out = Vec::new();
    let failures = crate::write(Driver::fake(), parts, &mut Report::new(&mut out));
    let report = String::from_utf8(out).expect("text");
    assert!(failures == 0 && !report.contains("FAILED") && !report.contains("NOT MET"), "{report}");
    if print {
        return print!("{report}");
    }
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let rows = std::panic::catch_unwind(rows);
    std::panic::set_hook(hook);
    rows.expect("rows");
    verdicts();
    faults();
    absence();
    gdrcopy();
    println!(
        "the report runs over the fake driver; HMEM_CUDA=real runs it over a GPU (tests/gpu/run)"
    );
}

/// The report contains every row. It counts rows that fail, panic or miss their requirement as
/// failures. It does not count rows that the machine cannot measure.
fn rows() {
    let mut out = Vec::new();
    let mut report = Report::new(&mut out);
    report.row(&["a"], || Err("no|thing\nhere".to_owned().into()));
    report.row(&["b"], || panic!("{} failed", "it"));
    report.row(&["c"], || Ok(Row::new(["0.94".to_owned()]).met(false)));
    report.row(&["d"], || Err(crate::report::Failure::lacking("not to be had")));
    report.row(&["e"], || Ok(Row::new(["1".to_owned(), "2".to_owned()])));
    assert_eq!(report.failures(), 3);
    let rows = "| a | FAILED: no\\|thing here |\n| b | FAILED: panicked: it failed |\n| c | 0.94 \
                |\n| d | not to be had |\n| e | 1 | 2 |\n";
    assert_eq!(String::from_utf8(out).expect("text"), rows);

    let driver = Driver::fake();
    let kind = hmem_core::AllocationKind::Device;
    attempt(|| driver.with::<()>(4096, kind, |_| panic!("over memory"))).expect_err("a panic");
    driver.close().expect("memory is freed after a panic");
}

fn verdicts() {
    assert_eq!(judged(0.95, 1 << 20, true), ("met", true));
    assert_eq!(judged(0.949, 1 << 20, true), ("NOT MET", false));
    assert_eq!(judged(0.5, (1 << 20) - 1, true), ("not judged", true));
    assert_eq!(judged(0.5, 1 << 20, false), ("not judged", true));
    assert_eq!((reused(0), reused(7)), ("0: nothing is shown".into(), "7".into()));
    let of_vmm = [true, false].map(|vmm| must_export(hmem_core::AllocationKind::Virtual, vmm));
    assert_eq!(of_vmm, [true, false], "VMM memory as the device reports it");
    let (host, device) =
        (Some(hmem_core::AllocationKind::Host), Some(hmem_core::AllocationKind::Device));
    assert!(
        has_expected_calls(1, 1, None)
            && has_expected_calls(6, 1, host)
            && has_expected_calls(3, 3, device)
    );
    assert!(
        !has_expected_calls(2, 1, None)
            && !has_expected_calls(7, 1, host)
            && !has_expected_calls(1, 2, host)
            && !has_expected_calls(1, 4, device)
    );
    let table = Functions::SYMBOLS.len() + Functions::OPTIONAL_SYMBOLS.len();
    assert_eq!(COUNTED, table, "each function of the table counts");
    let cells = |dma_buf: &str, left: &str| [dma_buf, "refused: 801", left].map(str::to_owned);
    assert!(others::judge_refusals(cells("refused: 1", "0")).1);
    assert!(
        !others::judge_refusals(cells("exported", "0")).1
            && !others::judge_refusals(cells("refused: 1", "1")).1
    );
    let refused = [Ok(()), Err(())];
    assert!(
        !exported(true, &refused[0], &refused[1]),
        "a refusal of an expected export does not \
                                                        meet the requirement"
    );
    assert!(exported(false, &refused[1], &refused[1]) && exported(true, &refused[0], &refused[0]));
    assert_eq!(mappable("yes".into(), true), ("yes".into(), true));
    assert_eq!(mappable("no: EPERM (1)".into(), false), ("no: EPERM (1)".into(), true));
    assert_eq!(mappable("no: EPERM (1)".into(), true), ("NOT MET: no: EPERM (1)".into(), false));
}

/// Runs this program over the library of the fake driver, in the way in which it runs over a GPU.
/// `fault` configures a failing call of the fake. Returns the exit status and the report.
fn run(library: &Path, fault: &str, parts: &[&str]) -> (Option<i32>, String) {
    let program = std::env::current_exe().expect("this program");
    let output = Command::new(program)
        .args(parts)
        .env("HMEM_CUDA", "real")
        .env("HMEM_CUDA_LIBRARY", library)
        .env("HMEM_FAKE_CUDA", format!("580-open;{fault}"))
        .output()
        .expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("panicked"), "{said}");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

/// Returns the path of the fake library. Cargo builds it beside this program, since it is a
/// dependency.
fn fake() -> std::path::PathBuf {
    let program = std::env::current_exe().expect("this program");
    let library = program.parent().expect("a folder").join("libhmem_fake_cuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// A driver call that always fails affects only the report rows that make this call.
fn faults() {
    for (fault, failing, code, part) in [
        ("cuMemHostAlloc=1", "page-locked", "CUDA_ERROR_INVALID_VALUE (1)", "copies-page-locked"),
        (
            "cuMemcpy=700",
            "pageable",
            "cuMemcpy: CUDA_ERROR_ILLEGAL_ADDRESS (700)",
            "copies-pageable",
        ),
        (
            "cuMemGetHandleForAddressRange=801",
            "device",
            "CUDA_ERROR_NOT_SUPPORTED (801)",
            "export-device",
        ),
        ("cuMemFree_v2=1", "device", "CUDA_ERROR_INVALID_VALUE (1)", "identities-device"),
        ("cuMemAllocManaged=1", "managed", "CUDA_ERROR_INVALID_VALUE (1)", "cost-managed"),
    ] {
        let (status, report) = run(&fake(), fault, &[part, "cost-system", "machine"]);
        assert_eq!(status, Some(1), "{fault}: {report}");
        let rows: Vec<_> =
            report.lines().filter(|line| line.starts_with(&format!("| {failing} |"))).collect();
        assert!(!rows.is_empty() && rows.iter().all(|row| row.contains(code)), "{fault}: {report}");
        assert!(report.contains("| the stack | "), "{fault}: {report}");
    }
    let (status, report) = run(&fake(), "devices=1", &[]);
    assert_eq!(status, Some(0), "{report}");
    assert!(
        report.starts_with("## The fake driver") && report.contains("1 MiB | to host"),
        "{report}"
    );
}

/// The report has one line about GDRCopy, which says that it is absent or that it fails.
fn gdrcopy() {
    let folder = std::env::temp_dir().join(format!("hmem-gpu-gdrcopy-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let run = |words: &str, wanted| {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .arg("gdrcopy")
            .env("HMEM_CUDA", "real")
            .env("HMEM_CUDA_LIBRARY", fake())
            .env("HMEM_FAKE_CUDA", "580-open")
            .env("LD_LIBRARY_PATH", &folder)
            .output()
            .expect("the program starts");
        let report = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.code() == Some(wanted) && report.contains(words), "{report}");
    };
    let place = folder.join(hmem_iface_cuda::gdrcopy::Gdrcopy::LIBRARY);
    std::fs::write(&place, "not a library").expect("a file");
    run("- GDRCopy: absent: ", 0);
    std::fs::remove_file(&place).expect("written just now");
    // The fake driver library also has the functions of GDRCopy, and refuses to pin.
    std::os::unix::fs::symlink(fake(), &place).expect("a link");
    run("- GDRCopy: FAILED: gdr_pin_buffer", 1);
    std::fs::remove_dir_all(&folder).expect("made above");
}

/// Without a driver or a GPU the program writes no report and exits with its own status. A driver
/// that fails is a failure.
fn absence() {
    for (library, fault, wanted) in [
        (Path::new("/nowhere/libcuda.so.1"), "devices=1", 3),
        (&fake(), "cuInit=100", 3),
        (&fake(), "cuInit=34", 3),
        (&fake(), "devices=0", 3),
        (&fake(), "cuInit=999", 1),
    ] {
        let (status, report) = run(library, fault, &["machine"]);
        assert_eq!(status, Some(wanted), "{} {fault}: {report}", library.display());
        assert_eq!(report.is_empty(), wanted == 3, "{report}");
    }
}
