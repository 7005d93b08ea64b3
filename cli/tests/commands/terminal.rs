//! The built command on terminals: narrow widths, rows printed as they finish, progress bars,
//! errors with causes, names of plug-ins, invalid variables, completions and man pages.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    os::fd::{FromRawFd, OwnedFd},
    process::{Command, Output, Stdio},
    ptr,
};

use crate::hmem_process::{hmem, one_line, refused, text};
use crate::machine;
use serde_json::Value;

fn run(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let command = hmem(arguments[0], &arguments[1..]).envs(environment.iter().copied()).output();
    command.expect("the command runs")
}

fn recording(name: &str) -> String {
    format!("{}/../p2p/tests/fixtures/topology/{name}.tar.gz", env!("CARGO_MANIFEST_DIR"))
}

/// Asserts that no line is wider than `width`, that units stand beside their numbers, and that each
/// text in `whole` is on one line.
fn fits(output: &Output, width: usize, whole: &[&str]) {
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}{}", text(&output.stderr));
    for line in printed.lines() {
        assert!(line.chars().count() <= width, "wider than {width}: {line}");
        assert_eq!(line, line.trim_end(), "blanks at the end of: {line}");
        // A unit at the start of a line was separated from its number.
        let first = line.trim_start_matches(|c: char| !c.is_ascii_alphanumeric());
        let unit = first.split([' ', ',', ';']).next().unwrap_or_default();
        assert!(!["KiB", "MiB", "GiB", "GT/s", "transfers/s"].contains(&unit), "{line}");
    }
    for word in whole {
        assert!(printed.contains(word), "{word} is split or missing:\n{printed}");
    }
}

/// DIAG-01
#[test]
fn output_fits_terminals_of_60_and_40_columns() {
    let names = ["loopback/peer-memory", "simulated:1"];
    let topology = recording("dgx-a100");
    let page = format!("{} KiB", rustix::param::page_size() / 1024);
    // Without pinned pages, the check does not list the monitors.
    let monitor = machine::without_pinned_pages().is_none().then_some("memhooks+userfaultfd");
    let checked: Vec<_> = names.into_iter().chain(monitor).collect();
    let cases: [(&[&str], &[&str]); 7] = [
        (&["info"], &[&names[..], &["MR_SINGLE_USE", "endpoint-binding", &page]].concat()),
        (&["check", "--quick"], &checked),
        (&["explain"], &names),
        (&["topo"], &[]),
        (&["topo", "--from", &topology], &["0000:07:00.0", "mlx5_11", "64 GiB", "16 GT/s x16"]),
        (&["topo", "--all", "--from", &topology], &["0000:07:00.0", "0000:61:00.1"]),
        (
            &["perf", "--loopback", "--iterations", "20", "--size", "8,64KiB,65537"],
            &["loopback/hardware", "64 KiB", "65537 B"],
        ),
    ];
    for (arguments, whole) in cases {
        for width in [60, 40] {
            fits(&run(arguments, &[("COLUMNS", &width.to_string())]), width, whole);
        }
    }
}

/// Names and values of environment variables.
type Variables<'a> = [(&'a str, &'a str)];

/// Opens a pseudoterminal of this width. Returns the controlling end and the terminal end.
///
/// The number of rows is 0, as after `stty cols` on a new terminal.
fn terminal(columns: u16) -> (File, OwnedFd) {
    let size = libc::winsize { ws_row: 0, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut controller, mut terminal) = (-1, -1);
    // SAFETY: all pointers are valid for the call, or null where null is allowed.
    #[allow(unsafe_code, reason = "std has no call for it")]
    let opened = unsafe {
        libc::openpty(&raw mut controller, &raw mut terminal, ptr::null_mut(), ptr::null(), &size)
    };
    assert_eq!(opened, 0, "{}", io::Error::last_os_error());
    // SAFETY: the call above opened both descriptors, and nothing else owns them.
    #[allow(unsafe_code, reason = "the call returns raw descriptors")]
    unsafe {
        (File::from_raw_fd(controller), OwnedFd::from_raw_fd(terminal))
    }
}

/// Runs a command, and returns what it prints on the terminal that is its stdout or stderr.
fn on_terminal(mut command: Command, columns: u16, stdout: bool) -> String {
    let (mut controller, terminal) = terminal(columns);
    if stdout {
        command.stdout(terminal)
    } else {
        command.stderr(terminal)
    };
    let mut child = command.spawn().expect("the command starts");
    // Closes this process's descriptor of the terminal. The last close ends the output with EIO.
    drop(command);
    let mut printed = Vec::new();
    let _ = controller.read_to_end(&mut printed);
    assert!(child.wait().expect("the process ends").success());
    String::from_utf8(printed).expect("UTF-8")
}

#[test]
fn output_is_no_wider_than_the_terminal() {
    let printed = on_terminal(hmem("--color", &["never", "info"]), 40, true);
    assert!(printed.contains("loopback/peer-memory"), "{printed}");
    for line in printed.lines() {
        assert!(line.chars().count() <= 40, "{line}");
    }
}

#[test]
fn progress_bar_of_perf_is_printed_only_on_terminals() {
    let perf = ["--loopback", "--size", "8", "--iterations", "20"];
    let printed = on_terminal(hmem("perf", &perf), 80, false);
    assert!(printed.contains("bandwidth of 8 B"), "{printed:?}");
    let output = run(&[&["perf"], &perf[..]].concat(), &[]);
    assert_eq!(text(&output.stderr), "");
    assert!(!text(&output.stdout).contains("bandwidth of"));
}

/// No line of the output contains both a visible bar and a row, and each bar is narrower than the
/// terminal.
#[test]
fn progress_bar_of_perf_is_erased_before_each_row_and_never_wraps() {
    let perf = ["--loopback", "--color", "never", "--size", "8,16", "--iterations", "20"];
    for columns in [80, 40] {
        let (mut controller, terminal) = terminal(columns);
        let mut command = hmem("perf", &perf);
        command.stderr(terminal.try_clone().expect("a descriptor")).stdout(terminal);
        let mut child = command.spawn().expect("the command starts");
        drop(command);
        let mut printed = Vec::new();
        let _ = controller.read_to_end(&mut printed);
        assert!(child.wait().expect("the process ends").success());
        let printed = String::from_utf8(printed).expect("UTF-8");
        assert!(printed.contains("\u{2591} 1/4 "), "{printed:?}");
        for line in printed.lines() {
            let mut states: Vec<_> = line.split("\r\x1b[2K").collect();
            let left = states.pop().unwrap_or_default();
            assert!(!left.contains('\u{2591}'), "a row follows the bar: {line:?}");
            for bar in states {
                assert!(bar.chars().count() < columns.into(), "{bar:?}");
            }
        }
        assert!(printed.contains("\n") && printed.contains("16 B"), "{printed:?}");
    }
}

/// Kills the command after its first row. The output must not contain the other rows.
#[test]
fn perf_prints_each_row_as_it_finishes() {
    let sizes = "8,16,32,64";
    let arguments = ["--loopback", "--size", sizes, "--duration", "1", "--measure", "latency"];
    let mut child = hmem("perf", &arguments).spawn().expect("the command starts");
    let mut stdout = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("8 B ") {
        line.clear();
        assert!(stdout.read_line(&mut line).expect("UTF-8") > 0, "no row");
    }
    child.kill().expect("the process is killed");
    child.wait().expect("the process ends");
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("UTF-8");
    assert!(rest.lines().count() < 3, "the rows were printed at the end:\n{rest}");
}

/// DIAG-01, DIAG-02
///
#[test]
fn output_that_cannot_be_written_fails_the_command() {
    for arguments in [&["--help"][..], &["perf", "--help"], &["topo"], &["man"]] {
        let mut command = hmem(arguments[0], &arguments[1..]);
        let full = File::options().write(true).open("/dev/full").expect("a full device");
        let output = command.stdout(full).output().expect("the command runs");
        refused(&output, 1, &["cannot write the output", "No space left"]);
    }
}

/// A closed pipe changes neither the exit status nor the text on stderr, which is empty.
#[test]
fn closed_stdout_leaves_the_exit_status_of_the_command() {
    let quick = ["check", "--quick", "--nic", "loopback/hardware", "--iface", "system"];
    let absent = [("FI_HMEM", "cuda"), ("HMEM_CUDA_LIBRARY", "/nonexistent.so")];
    let cases: [(&[&str], &Variables, i32); 6] = [
        (&["info"], &[], 0),
        (&["man"], &[], 0),
        (&["perf", "--loopback", "--iterations", "20"], &[], 0),
        (&quick, &[], 0),
        (&quick, &absent, 1),
        (&["explain", "--nic", "loopback/hardware"], &absent, 1),
    ];
    for (arguments, variables, status) in cases {
        let mut command = hmem(arguments[0], &arguments[1..]);
        let mut child =
            command.envs(variables.iter().copied()).spawn().expect("the command starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("the process ends");
        assert_eq!(text(&output.stderr), "");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    }
}

/// DIAG-01
///
/// The log and error messages go to stderr.
#[test]
fn closed_stderr_leaves_the_exit_status_of_the_command() {
    for (arguments, status) in [
        (&["info", "-vv"][..], 0),
        (&["info", "--frobnicate"], 2),
        (&["perf", "--loopback", "--nic", "nonsense"], 2),
    ] {
        let mut child = hmem(arguments[0], &arguments[1..]).spawn().expect("the command starts");
        drop(child.stderr.take());
        let output = child.wait_with_output().expect("the process ends");
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    }
}

/// DIAG-02, HM-04
#[test]
fn skips_of_one_cause_are_grouped_with_their_count() {
    let missing = ["CUDA", "ROCR", "ZE", "NEURON", "SYNAPSEAI"]
        .map(|name| (format!("HMEM_{name}_LIBRARY"), "/nonexistent.so"));
    let missing: Vec<_> = missing.iter().map(|(name, path)| (name.as_str(), *path)).collect();
    let output = run(&["check", "--quick", "--provider", "loopback"], &missing);
    let printed = text(&output.stdout);
    let groups: Vec<_> =
        printed.lines().filter(|line| line.contains("library cannot be loaded")).collect();
    assert_eq!(groups.len(), 1, "{printed}");
    assert!(groups[0].contains("(5 skipped)"), "{printed}");
    assert!(printed.contains("iface cuda, iface neuron, iface rocr, and 2 more"), "{printed}");
}

/// HM-12
#[test]
fn plug_ins_are_named_by_their_registered_names() {
    let filtered = [("FI_HMEM", "system")];
    let forbidden = [("FI_HMEM_DISABLE_P2P", "1")];
    let perf = ["perf", "--loopback", "--iface", "simulated", "--iterations", "20"];
    let cases: [(&[&str], &Variables); 10] = [
        (&["info"], &[]),
        (&["info", "--json"], &filtered),
        (&["info"], &filtered),
        (&["check", "--quick", "--json"], &filtered),
        (&["check", "--quick", "--provider", "verbs"], &filtered),
        (&["explain", "--iface", "simulated"], &filtered),
        (&["explain", "--policy", "required", "--json"], &forbidden),
        (&["explain", "--policy", "required"], &forbidden),
        (&perf, &[]),
        (&perf, &filtered),
    ];
    for (arguments, environment) in cases {
        let output = run(arguments, environment);
        for printed in [text(&output.stdout), text(&output.stderr)] {
            assert!(!printed.contains("iface-0x"), "{arguments:?} {environment:?}:\n{printed}");
        }
        // A group of skipped ifaces lists only a few names, so `simulated` may be missing.
        let named =
            [&output.stdout, &output.stderr].map(|printed| text(printed).contains("simulated"));
        let grouped = arguments[0] == "check" && !arguments.contains(&"--json");
        assert!(named.contains(&true) || grouped, "{arguments:?} {environment:?}");
    }
}

/// HM-12
#[test]
fn invalid_value_of_any_variable_exits_with_status_2() {
    let boolean = "use 0, no, false, off, 1, yes, true or on";
    for (variable, value, accepted) in [
        ("FI_HMEM", "nonsense", "system, cuda, rocr"),
        ("FI_HMEM_DISABLE_P2P", "maybe", boolean),
        ("FI_MR_CACHE_MAX_COUNT", "-1", "decimal number"),
        ("FI_MR_CACHE_MAX_SIZE", "1GiB", "decimal number"),
        ("FI_MR_CACHE_MERGE_REGIONS", "maybe", boolean),
        ("FI_MR_CACHE_MONITOR", "kdreg3", "memhooks, userfaultfd"),
        ("FI_MR_CACHE_MONITOR", "import", "another monitor"),
        ("FI_MR_CUDA_CACHE_MONITOR_ENABLED", "maybe", boolean),
        ("FI_MR_ROCR_CACHE_MONITOR_ENABLED", "maybe", boolean),
        ("FI_MR_ZE_CACHE_MONITOR_ENABLED", "maybe", boolean),
        ("HMEM_CUDA_MONITOR", "hook", "auto, hooks, identity"),
        ("HMEM_NEURON_START_RUNTIME", "maybe", boolean),
        ("HMEM_SYNAPSEAI_START_RUNTIME", "maybe", boolean),
        ("HMEM_VERBS_PCIE_MAPPING", "maybe", boolean),
        ("COLUMNS", "wide", "decimal number"),
    ] {
        // `explain` opens no cache, so that it does not read the variables of caches.
        let commands = ["info", "check", "explain"];
        let readers = if variable.starts_with("FI_MR_") { &commands[..2] } else { &commands };
        for command in readers {
            let output = run(&[command], &[(variable, value)]);
            refused(&output, 2, &[&format!("invalid value {value:?} in {variable}"), accepted]);
            one_line(text(&output.stderr), &[]);
        }
    }
}

/// HM-12
#[test]
fn unknown_iface_of_the_filter_is_named_with_the_accepted_names() {
    for filter in ["bogus", "system;bogus", "SYSTEM, Bogus"] {
        let output = run(&["info"], &[("FI_HMEM", filter)]);
        let accepted = "use system, cuda, rocr, ze, neuron, synapseai, simulated";
        refused(&output, 2, &["in FI_HMEM; bogus is no iface: ", accepted]);
    }
    let output = run(&["info"], &[("FI_HMEM", "system")]);
    let printed = text(&output.stdout);
    assert!(printed.contains("FI_HMEM names only other ifaces"), "{printed}");
    assert!(!printed.contains("Builder::ifaces"), "{printed}");
}

/// HM-04
#[test]
fn info_says_that_the_file_in_a_library_variable_cannot_be_loaded() {
    for (iface, variable) in [
        ("cuda", "HMEM_CUDA_LIBRARY"),
        ("rocr", "HMEM_ROCR_LIBRARY"),
        ("ze", "HMEM_ZE_LIBRARY"),
        ("neuron", "HMEM_NEURON_LIBRARY"),
        ("synapseai", "HMEM_SYNAPSEAI_LIBRARY"),
    ] {
        let output = run(&["info"], &[(variable, "/nonexistent.so")]);
        let printed = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        let said =
            format!("iface {iface}: the file /nonexistent.so in {variable} cannot be loaded");
        assert!(printed.contains(&said), "{said} is not in: {printed}");
        assert!(printed.contains(&format!("remedy: correct {variable}")), "{printed}");
    }
}

/// HM-04
#[test]
fn unusable_driver_library_is_named_with_the_missing_symbol() {
    for (iface, name, variable, symbol) in [
        ("cuda", "CUDA driver", "HMEM_CUDA_LIBRARY", "cuInit"),
        ("rocr", "HSA runtime", "HMEM_ROCR_LIBRARY", "hsa_init"),
        ("ze", "Level Zero loader", "HMEM_ZE_LIBRARY", "zeInit"),
    ] {
        for command in ["info", "explain", "perf"] {
            let arguments: &[&str] = match command {
                "info" => &["info"],
                "explain" => &["explain", "--iface", iface],
                _ => &["perf", "--loopback", "--iface", iface],
            };
            let output = run(arguments, &[(variable, "libc.so.6"), ("COLUMNS", "140")]);
            let printed = [text(&output.stdout), text(&output.stderr)].concat();
            let printed = printed.split_whitespace().collect::<Vec<_>>().join(" ");
            let said = format!(
                "the file libc.so.6 in {variable} is not a usable {name}: it has no {symbol}"
            );
            assert!(printed.contains(&said), "{said} is not in: {printed}");
            assert!(printed.contains(&format!("remedy: correct {variable}")), "{printed}");
        }
    }
}

/// HM-12, DIAG-02
#[test]
fn check_fails_if_an_iface_named_by_the_filter_is_unavailable() {
    let environment = [("FI_HMEM", "cuda"), ("HMEM_CUDA_LIBRARY", "/nonexistent.so")];
    let output = run(&["check", "--quick"], &environment);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["FI_HMEM names cuda, which is unavailable", "/nonexistent.so: cannot open"] {
        assert_eq!(printed.matches(words).count(), 1, "{words} is not once in: {printed}");
    }
    let output = run(&["check", "--quick", "--json"], &environment);
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(document["missing"][0]["what"], "cuda", "{document}");
    assert_eq!(run(&["explain"], &environment).status.code(), Some(1));
}

#[test]
fn similar_names_are_suggested() {
    for (arguments, error) in [
        (
            &["check", "--provider", "lopback"][..],
            "error: no provider named lopback; did you mean loopback?\n",
        ),
        (
            &["perf", "--loopback", "--provider", "lopback"],
            "error: no provider named lopback; did you mean loopback?\n",
        ),
        (
            &["explain", "--nic", "loopback/pined"],
            "error: no NIC named loopback/pined; did you mean loopback/pinned?\n",
        ),
        (
            &["check", "--iface", "simulted"],
            "error: no iface named simulted; did you mean simulated?\n",
        ),
        (&["man", "chek"], "error: no subcommand named chek; did you mean check?\n"),
    ] {
        let output = run(arguments, &[]);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stderr), error);
    }
}

/// DIAG-03
#[test]
fn nested_errors_are_printed_once_with_their_causes_beneath() {
    let missing = [("HMEM_CUDA_LIBRARY", "/nonexistent.so")];
    let output = run(&["perf", "--loopback", "--iface", "cuda"], &missing);
    refused(&output, 1, &[]);
    let error = text(&output.stderr);
    let lines: Vec<_> = error.lines().collect();
    assert_eq!(lines.len(), 4, "{error}");
    assert_eq!(lines[0], "error: the iface cuda is unavailable");
    assert!(lines[1].starts_with("  cause: the file /nonexistent.so in HMEM_CUDA_LIBRARY"));
    assert!(lines[2].starts_with("    cause: /nonexistent.so: cannot open"), "{error}");
    assert!(lines[3].starts_with("  remedy: correct HMEM_CUDA_LIBRARY"), "{error}");
    assert_eq!(error.matches("cannot open shared object").count(), 1, "{error}");
}

#[test]
fn errors_are_no_wider_than_the_terminal() {
    for arguments in
        [&["perf", "--loopback", "--nic", "nonsense"][..], &["check", "--path", "nonsense"]]
    {
        let mut command = hmem(arguments[0], &arguments[1..]);
        let (mut controller, terminal) = terminal(40);
        command.stderr(terminal);
        let mut child = command.spawn().expect("the command starts");
        drop(command);
        let mut printed = Vec::new();
        let _ = controller.read_to_end(&mut printed);
        assert_eq!(child.wait().expect("the process ends").code(), Some(2));
        let printed = String::from_utf8(printed).expect("UTF-8");
        assert!(printed.lines().count() > 1, "{printed}");
        for (at, line) in printed.lines().enumerate() {
            assert!(line.chars().count() <= 40, "{line}");
            assert!(line.starts_with(if at == 0 { "error: " } else { "  " }), "{printed}");
        }
    }
}

#[test]
fn unavailable_provider_of_a_named_nic_is_listed_with_its_remedy() {
    let folder = std::env::temp_dir().join(format!("hmem-libibverbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    // A text file cannot be loaded as a library, so libibverbs is absent on every machine.
    std::fs::write(folder.join("libibverbs.so.1"), "text").expect("a file");
    let absent = [("LD_LIBRARY_PATH", folder.to_str().expect("UTF-8"))];
    let arguments = ["check", "--quick", "--nic", "verbs/nonsense"];
    let (absent, machine) = (run(&arguments, &absent), run(&arguments, &[]));
    std::fs::remove_dir_all(&folder).expect("made above");
    let is_listed = |output: &Output, remedies: &[&str]| {
        let printed = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(printed.contains("  provider verbs: "), "{printed}");
        let has = |remedy: &&str| printed.contains(&format!("remedy: {remedy}"));
        assert!(remedies.iter().any(has), "{printed}");
    };
    is_listed(&absent, &["install libibverbs"]);
    if machine.status.code() == Some(2) {
        // The machine has a device, so the name is refused.
        refused(&machine, 2, &["verbs/nonsense"]);
    } else {
        // `absent_device_is_unavailable_and_names_the_library` of the provider has the remedies of
        // a library without devices.
        is_listed(&machine, &["install libibverbs", "load the NIC's driver and ib_uverbs"]);
    }
}

#[test]
fn explain_names_the_missing_iface_that_fi_hmem_asks_for() {
    let variables = [("FI_HMEM", "cuda"), ("HMEM_CUDA_LIBRARY", "/nonexistent.so")];
    let output = run(&["explain", "--iface", "system"], &variables);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stdout);
    let last = printed.lines().last().unwrap_or_default();
    assert_eq!(last, "FAILED: FI_HMEM names cuda, which is unavailable", "{printed}");
}

#[test]
fn man_pages_are_not_hyphenated() {
    for page in [&["man"][..], &["man", "perf"]] {
        let output = run(page, &[]);
        let printed = text(&output.stdout);
        let (title, rest) = printed.split_once(".TH ").expect("a title");
        assert!(!title.contains(".nh"), "the title turns hyphenation on again: {printed}");
        assert_eq!(rest.lines().nth(1), Some(".nh"), "{printed}");
    }
}

#[test]
fn remedies_name_a_variable_or_command_before_a_rust_method() {
    let output = run(&["info"], &[("COLUMNS", "140")]);
    let printed = text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for remedy in printed.split("remedy: ").skip(1) {
        let (method, variable) = (remedy.find("::builder()"), remedy.find("HMEM_"));
        let first = method.is_none_or(|method| {
            variable.is_some_and(|variable| variable < method) || remedy.starts_with("install")
        });
        assert!(first, "{remedy}");
    }
}

#[test]
fn errors_of_arguments_list_shells_and_have_tips_on_their_own_line() {
    for (arguments, error) in [
        (
            &["chek"][..],
            "error: unrecognized subcommand 'chek'\n  tip: a similar subcommand exists: 'check'\n",
        ),
        (
            &["explain", "--iface", "system", "--device", "3"],
            "error: system has no device 3; leave out --device: this iface has no devices\n",
        ),
        (
            &["perf", "--loopback", "--size", "8.."],
            "error: invalid value '8..' for '--size <SIZES>': a range has two ends, for example \
             8..1M\n",
        ),
        (
            &["perf", "--loopback", "--iterations", "0"],
            "error: invalid value '0' for '--iterations <N>': use a number, 1 or more\n",
        ),
        (
            &["check", "--bytes", "99999999999999999999"],
            "error: invalid value '99999999999999999999' for '--bytes <N>': must be below 2^64 \
             bytes\n",
        ),
        (
            &["completions"],
            "error: the following required arguments were not provided: <SHELL>; use bash, elvish, \
             fish, powershell, zsh\n",
        ),
    ] {
        let output = run(arguments, &[]);
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stderr), error);
    }
}

#[test]
fn completion_scripts_cover_every_shell() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = run(&["completions", shell], &[]);
        assert_eq!(output.status.code(), Some(0));
        for word in ["explain", "policy"] {
            assert!(text(&output.stdout).contains(word), "{shell}: no {word}");
        }
    }
    let script = run(&["completions", "bash"], &[]).stdout;
    let file = std::env::temp_dir().join(format!("hmem-completions-{}", std::process::id()));
    std::fs::write(&file, script).expect("a file");
    let mut bash = Command::new("bash");
    let checked = bash.arg("-n").arg(&file).stdin(Stdio::null()).output().expect("bash runs");
    std::fs::remove_file(&file).expect("written just now");
    assert!(checked.status.success(), "{}", text(&checked.stderr));
}

#[test]
fn help_of_a_command_is_also_a_subcommand() {
    for command in ["info", "check", "explain", "topo", "perf", "completions", "man"] {
        let (help, option) = (run(&["help", command], &[]), run(&[command, "--help"], &[]));
        assert_eq!(help.status.code(), Some(0), "{}", text(&help.stderr));
        assert_eq!(text(&help.stdout), text(&option.stdout));
    }
}

#[test]
fn help_fits_terminals_of_60_and_40_columns() {
    for width in [60, 40] {
        let environment = [("COLUMNS", width.to_string())];
        let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
        for command in ["", "info", "check", "explain", "topo", "perf", "completions", "man"] {
            let arguments: &[&str] =
                if command.is_empty() { &["--help"] } else { &[command, "-h"] };
            let output = run(arguments, &environment);
            let printed = text(&output.stdout);
            for line in printed.lines() {
                assert!(line.chars().count() <= width, "{command}: wider than {width}: {line}");
            }
            let status = !["completions", "man"].contains(&command);
            assert!(!status || printed.contains("Exit status:\n  0  "), "{printed}");
        }
        // On narrow terminals a description is printed beneath its variable, with a larger indent.
        let help = run(&["--help"], &environment);
        let expected = "\n  FI_MR_CACHE_MAX_COUNT\n      most entries of a";
        assert!(text(&help.stdout).contains(expected), "{}", text(&help.stdout));
    }
    let wide = run(&["--help"], &[("COLUMNS", "100")]);
    let expected = "\n  NO_COLOR                          no colours, unless --color";
    assert!(text(&wide.stdout).contains(expected), "{}", text(&wide.stdout));
}

#[test]
fn man_pages_describe_exit_statuses_and_variables() {
    let output = run(&["man"], &[]);
    assert_eq!(output.status.code(), Some(0));
    let version = format!("\"hmem {}\"", env!("CARGO_PKG_VERSION"));
    for words in [
        ".TH hmem 1",
        &version,
        "\n.SH ENVIRONMENT\n",
        "\n.SH \"EXIT STATUS\"\n",
        "\n.TP\n\\fBFI_HMEM_DISABLE_P2P\\fR\nboolean: ",
        "HMEM_CUDA_LIBRARY",
    ] {
        assert!(text(&output.stdout).contains(words), "{words} is missing");
    }
    assert!(!text(&output.stdout).contains("EXTRA"));
    for command in ["info", "check", "explain", "topo", "perf"] {
        let page = run(&["man", command], &[]);
        let page = text(&page.stdout);
        assert!(page.contains(&format!(".TH hmem-{command} 1")), "{page}");
        assert!(page.contains(&version), "{page}");
        assert!(page.contains("\n.SH \"EXIT STATUS\"\n.TP\n\\fB0\\fR\n"), "{page}");
    }
    let help = run(&["--help"], &[]);
    assert!(text(&help.stdout).contains("Exit status"));
}
