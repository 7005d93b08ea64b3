//! The built command: `info` and `check`, arguments, variables and exit statuses.

mod hmem_process;
#[path = "../../tests/machine/mod.rs"]
mod machine;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{
    collections::BTreeSet,
    io,
    os::unix::process::CommandExt,
    process::{Command, Output},
};

use hmem::Hmem;
use hmem_cli::{check::check_deaf_monitor, machine::Machine};
use hmem_process::schema;
use serde_json::Value;
use trials::{Outcome, skip, trials};

trials! {
    /// DIAG-01, HM-04
    info_lists_ifaces_devices_nics_and_paths_with_reasons,
    /// MON-04
    info_shows_the_cache_monitor_with_its_reason,
    /// CACHE-12
    info_shows_the_cache_limits_and_the_disabling_setting,
    /// DIAG-01
    info_names_the_seccomp_filter_that_slows_cache_lookups,
    /// DIAG-01, HM-04
    info_json_matches_its_schema,
    /// DIAG-02
    check_explains_the_words_of_its_tables,
    /// DIAG-02
    check_verifies_every_combination,
    /// DIAG-02, MR-07, CACHE-02
    check_covers_the_registration_cache_under_each_monitor,
    /// DIAG-02, MR-07, CACHE-02
    slow_check_frees_memory_ten_thousand_times_under_each_monitor,
    /// DIAG-02
    monitor_that_is_never_notified_fails_the_check,
    /// DIAG-02, MON-02
    monitor_forbidden_by_seccomp_is_skipped_with_the_reason,
    /// DIAG-02, DIAG-03
    transfer_that_seccomp_forbids_fails_with_the_cause_and_the_remedy,
    /// DIAG-02, HM-04
    check_of_an_unavailable_iface_fails_with_the_reason,
    /// DIAG-02
    check_of_an_unavailable_provider_fails_with_the_reason,
    /// DIAG-02
    check_covers_only_the_selected_size_path_and_nic,
    /// HM-12, P2P-02
    environment_filters_ifaces_and_forbids_direct_access,
    /// HM-12
    wrong_arguments_and_variables_exit_with_status_2,
    help_and_version_are_printed,
    colours_are_printed_only_on_terminals_or_on_request,
    /// DIAG-04
    logs_are_printed_only_on_request_and_on_stderr,
    document_with_another_or_missing_field_or_type_does_not_match_its_schema,
}

fn hmem(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    command(arguments, environment).output().expect("the binary runs")
}

fn command(arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    for name in [
        "FI_HMEM",
        "FI_HMEM_DISABLE_P2P",
        "FI_MR_CACHE_MONITOR",
        "FI_MR_CACHE_MAX_COUNT",
        "FI_MR_CACHE_MAX_SIZE",
        "FI_MR_CACHE_MERGE_REGIONS",
        "HMEM_DIRECT_PATHS",
        "HMEM_REACH_CHECK",
        "NO_COLOR",
        "CLICOLOR_FORCE",
    ] {
        command.env_remove(name);
    }
    command.args(arguments).envs(environment.iter().copied());
    command
}

/// Offset of the system call's number in the data of a seccomp filter.
const NUMBER: u32 = 0;

fn instruction(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Returns the instruction that loads a 32-bit word of the filter's data.
fn load(offset: u32) -> libc::sock_filter {
    instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

/// Returns the instruction that skips the next `jf` instructions unless the loaded word is `k`.
fn unless(k: u32, jf: u8) -> libc::sock_filter {
    libc::sock_filter { jf, ..instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, k) }
}

/// Returns the instruction that refuses the system call with EPERM.
fn refuse() -> libc::sock_filter {
    instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32)
}

/// Runs the command under a seccomp filter that refuses `userfaultfd` and `membarrier` with EPERM,
/// as container profiles do. The filter also refuses the ioctl of `/dev/userfaultfd`.
fn hmem_in_a_container(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    const USERFAULTFD_IOC_NEW: u32 = 0xaa00;
    const SECOND_ARGUMENT: u32 = 24;
    let filter = [
        load(NUMBER),
        unless(libc::SYS_userfaultfd as u32, 1),
        refuse(),
        unless(libc::SYS_membarrier as u32, 1),
        refuse(),
        unless(libc::SYS_ioctl as u32, 3),
        load(SECOND_ARGUMENT),
        unless(USERFAULTFD_IOC_NEW, 1),
        refuse(),
    ];
    filtered(command(arguments, environment), filter.to_vec())
}

/// Runs a command under a seccomp filter. A system call that no instruction refuses is allowed.
fn filtered(mut command: Command, mut filter: Vec<libc::sock_filter>) -> Output {
    filter.push(instruction(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let restrict = move || {
        let program =
            libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the calls restrict only the child process. `program` and its filter outlive them.
        #[allow(unsafe_code, reason = "std has no call for it")]
        let done = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
                    == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
    #[allow(unsafe_code, reason = "the filter must be in force before the command starts")]
    let command = unsafe { command.pre_exec(restrict) };
    command.output().expect("the binary runs")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("output is UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("errors are UTF-8")
}

fn json(output: &Output) -> Value {
    serde_json::from_str(stdout(output))
        .unwrap_or_else(|error| panic!("{error}: {}", stderr(output)))
}

fn list<'a>(document: &'a Value, name: &str) -> &'a Vec<Value> {
    document[name].as_array().unwrap_or_else(|| panic!("{name} is no array: {document}"))
}

/// Asserts that the command ended with exit status `code`.
fn ended(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}\n{}", stdout(output), stderr(output));
}

/// Asserts that the command failed with exit status `code`, all `words` on stderr and an empty
/// stdout.
fn refused(output: &Output, code: i32, words: &[&str]) {
    ended(output, code);
    assert_eq!(stdout(output), "");
    let error = stderr(output);
    assert!(error.starts_with("error: "), "{error}");
    assert!(error.lines().skip(1).all(|line| line.starts_with("  ")), "{error}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

fn info_lists_ifaces_devices_nics_and_paths_with_reasons() {
    let output = hmem(&["info"], &[]);
    ended(&output, 0);
    let text = stdout(&output);
    for word in [
        "system",
        "cuda",
        "rocr",
        "ze",
        "neuron",
        "synapseai",
        "simulated:1",
        "loopback/pinned",
        "dma-buf",
        "plain-host",
        "VIRT_ADDR",
        "software",
        "simulation",
    ] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    for line in text.lines() {
        assert!(line.chars().count() <= 110, "too wide: {line}");
        assert_eq!(line, line.trim_end(), "blanks at the end of: {line}");
    }
}

/// Covers the automatic choice and a requested monitor that is usable or unavailable, in text and
/// JSON.
fn info_shows_the_cache_monitor_with_its_reason() {
    let text = |output: &Output| stdout(output).split_whitespace().collect::<Vec<_>>().join(" ");
    let output = hmem(&["info"], &[]);
    ended(&output, 0);
    let said = text(&output);
    assert!(said.contains("Cache monitor of host memory"), "{said}");
    assert!(said.contains("tried memhooks:") && said.contains("tried userfaultfd:"), "{said}");

    let document = json(&hmem(&["info", "--json"], &[]));
    let monitor = &document["cache_monitor"];
    assert_eq!(monitor["requested"], "auto");
    let passed = list(monitor, "candidates").iter().filter(|tried| tried["refused"].is_null());
    let passed: Vec<_> = passed.map(|tried| tried["name"].as_str().expect("a name")).collect();
    let expected = if passed.is_empty() { "none".to_owned() } else { passed.join("+") };
    assert_eq!(monitor["name"], expected.as_str(), "{monitor}");

    for (asked, name) in
        [("disabled", "disabled"), ("uffd", "userfaultfd"), ("MemHooks", "memhooks")]
    {
        let output = hmem(&["info", "--json"], &[("FI_MR_CACHE_MONITOR", asked)]);
        if output.status.success() {
            let document = json(&output);
            assert_eq!(document["cache_monitor"]["name"], name);
            assert_eq!(document["cache_monitor"]["requested"], name);
            assert!(
                document["cache_monitor"]["why"]
                    .as_str()
                    .is_some_and(|why| why.contains("requested"))
            );
        } else {
            // An unavailable requested monitor is an error. The command does not use another
            // monitor instead.
            refused(&output, 1, &["FI_MR_CACHE_MONITOR", name]);
        }
    }
    let module = json(&hmem(&["info", "--json"], &[("FI_MR_CACHE_MONITOR", "kdreg2")]));
    assert_eq!(module["cache_monitor"]["requested"], "auto");
    let unknown = hmem(&["info"], &[("FI_MR_CACHE_MONITOR", "kdreg3")]);
    refused(
        &unknown,
        2,
        &["FI_MR_CACHE_MONITOR", "kdreg3", "memhooks", "userfaultfd", "import", "disabled"],
    );
    let import = hmem(&["info"], &[("FI_MR_CACHE_MONITOR", "import")]);
    refused(
        &import,
        2,
        &["FI_MR_CACHE_MONITOR", "import", "ImportMonitor::new", "Builder::imported_cache_monitor"],
    );
    let forbidden = hmem_in_a_container(&["info"], &[("FI_MR_CACHE_MONITOR", "uffd")]);
    refused(&forbidden, 1, &["FI_MR_CACHE_MONITOR", "userfaultfd", "seccomp"]);
}

/// The output contains cache limits, merging, and the variable that disables caching.
fn info_shows_the_cache_limits_and_the_disabling_setting() {
    let says = |environment: &[(&str, &str)]| {
        let output = hmem(&["info"], environment);
        ended(&output, 0);
        let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        (text, json(&hmem(&["info", "--json"], environment))["cache"].clone())
    };
    let (text, cache) = says(&[]);
    assert!(text.contains("limits: 65536 entries, any number of bytes merging: off"), "{text}");
    assert_eq!((&cache["disabled_by"], &cache["merge"]), (&Value::Null, &false.into()), "{cache}");
    assert_eq!(
        (&cache["max_count"], &cache["max_bytes"]),
        (&65_536.into(), &u64::MAX.into()),
        "{cache}"
    );

    let (text, cache) = says(&[
        ("FI_MR_CACHE_MAX_COUNT", "7"),
        ("FI_MR_CACHE_MAX_SIZE", "1048576"),
        ("FI_MR_CACHE_MERGE_REGIONS", "yes"),
    ]);
    assert!(text.contains("limits: 7 entries, 1 MiB of memory merging: on"), "{text}");
    assert_eq!((&cache["disabled_by"], &cache["merge"]), (&Value::Null, &true.into()), "{cache}");
    assert_eq!(
        (&cache["max_count"], &cache["max_bytes"]),
        (&7.into(), &1_048_576.into()),
        "{cache}"
    );

    for (variable, value) in [
        ("FI_MR_CACHE_MAX_COUNT", "0"),
        ("FI_MR_CACHE_MAX_SIZE", "0"),
        ("FI_MR_CACHE_MONITOR", "disabled"),
    ] {
        let (text, cache) = says(&[(variable, value)]);
        assert!(text.contains(&format!("off: {variable} disables them")), "{text}");
        assert_eq!(cache["disabled_by"], variable, "{cache}");
    }
}

/// Caches work without `membarrier`, only slower, so the command succeeds.
fn info_names_the_seccomp_filter_that_slows_cache_lookups() {
    let free = json(&hmem(&["info", "--json"], &[]));
    assert!(free["cache"]["fences"].is_null(), "{}", free["cache"]);
    let output = hmem_in_a_container(&["info"], &[("COLUMNS", "200")]);
    ended(&output, 0);
    let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    let slower = "lookups are correct but slower: membarrier: permission denied, EPERM (1) cause: \
                  probably, a seccomp filter is active";
    assert!(text.contains(slower), "{text}");
    let cache = json(&hmem_in_a_container(&["info", "--json"], &[]))["cache"].clone();
    for (field, word) in [("fences", "membarrier"), ("remedy", "--security-opt seccomp=")] {
        assert!(cache[field].as_str().is_some_and(|text| text.contains(word)), "{cache}");
    }
}

fn info_json_matches_its_schema() {
    let output = hmem(&["info", "--json"], &[]);
    ended(&output, 0);
    let document = json(&output);
    schema::matches("info", &document);
    for iface in list(&document, "ifaces") {
        assert_ne!(
            iface["available"],
            iface["reason"].is_string(),
            "an unavailable iface has a reason: {iface}"
        );
    }
    let names: BTreeSet<_> =
        list(&document, "ifaces").iter().filter_map(|iface| iface["name"].as_str()).collect();
    assert!(
        names.is_superset(&BTreeSet::from([
            "system",
            "cuda",
            "rocr",
            "ze",
            "neuron",
            "synapseai",
            "simulated"
        ])),
        "{names:?}"
    );
    for entry in list(&document, "p2p") {
        assert_eq!(
            entry["distance"].is_null() && !entry["device"].is_null(),
            entry["distance_unknown"].is_string(),
            "an unknown distance has a reason: {entry}"
        );
    }
    let (devices, nics) = (list(&document, "devices").len(), list(&document, "providers").len());
    assert_eq!(
        list(&document, "p2p").len(),
        (devices + 1) * nics,
        "host memory and every device with every NIC"
    );
}

fn check_explains_the_words_of_its_tables() -> Outcome {
    skip(machine::without_pinned_pages())?;
    let says = |environment: &[(&str, &str)]| {
        let output = hmem(&["check", "--quick", "--nic", "loopback/pinned"], environment);
        ended(&output, 0);
        stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let usual = says(&[]);
    for words in [
        "atomics refused: this path or NIC has no atomics",
        "borrowed: pages that are registered by their address",
        "verified: no stale transfer, a reused address and a cache hit",
        "system heap plain-host 65537 B yes",
    ] {
        assert!(usual.contains(words), "{words} is not in: {usual}");
    }
    assert!(!usual.contains("does not apply"), "{usual}");
    for (variable, value) in [("FI_MR_CACHE_MAX_COUNT", "0"), ("FI_MR_CACHE_MONITOR", "disabled")] {
        let text = says(&[(variable, value)]);
        let words = format!("caches: {variable} does not apply: each row has a cache");
        assert!(text.contains(&words), "{words} is not in: {text}");
    }
    Ok(())
}

fn check_verifies_every_combination() {
    let output = hmem(&["check", "--quick", "--json"], &[]);
    ended(&output, 0);
    let document = json(&output);
    schema::matches("check", &document);
    let mut seen = BTreeSet::new();
    for row in list(&document, "rows") {
        assert_eq!(row["verified"], true, "{row}");
        assert!(row["gib_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
        let copies = row["path"] == "staged" || row["path"] == "peer-memory";
        assert_eq!(row["atomic"], if copies { "refused" } else { "verified" }, "{row}");
        let trace = list(row, "trace");
        let last = trace.last().expect("a verified row was decided");
        assert!(last["error"].is_null() && last["path"] == row["path"], "{row}");
        seen.insert((row["iface"].to_string(), row["memory"].to_string(), row["path"].to_string()));
    }
    for (iface, memory, path) in [
        ("system", "heap", "plain-host"),
        ("system", "mmap", "plain-host"),
        ("system", "borrowed", "plain-host"),
        ("system", "memfd", "plain-host"),
        ("simulated", "device", "dma-buf"),
        ("simulated", "device", "staged"),
        ("simulated", "device", "peer-memory"),
        ("simulated", "virtual", "dma-buf"),
        ("simulated", "host", "plain-host"),
        ("simulated", "managed", "plain-host"),
    ] {
        let quoted = |word: &str| format!("\"{word}\"");
        assert!(
            seen.contains(&(quoted(iface), quoted(memory), quoted(path))),
            "{iface} {memory} {path}: {seen:?}"
        );
    }
}

/// Every monitor is checked, or skipped with its reason.
fn check_covers_the_registration_cache_under_each_monitor() -> Outcome {
    skip(machine::without_pinned_pages())?;
    covers_the_registration_cache(&["check", "--json", "--quick"], 500);
    // Only the NIC that keeps the pages of a registration can have stale registrations.
    let other =
        json(&hmem(&["check", "--quick", "--json", "--provider", "loopback/scalable"], &[]));
    assert_eq!(list(&other, "stale").len(), 0);
    Ok(())
}

fn slow_check_frees_memory_ten_thousand_times_under_each_monitor() -> Outcome {
    skip(machine::without_pinned_pages())?;
    covers_the_registration_cache(&["check", "--json", "--bytes", "64"], 10_000);
    Ok(())
}

/// Tests that the command looks for stale registrations under each monitor, in so many rounds.
fn covers_the_registration_cache(arguments: &[&str], rounds: u64) {
    let output = hmem(arguments, &[("FI_MR_CACHE_MAX_COUNT", "0")]);
    ended(&output, 0);
    let document = json(&output);
    schema::matches("check", &document);
    let mut seen = BTreeSet::new();
    for row in list(&document, "stale") {
        assert!(row["verified"] == true && row["stale"] == 0 && row["rounds"] == rounds, "{row}");
        // Addresses are reused and lookups hit in some rounds.
        let often = |field: &str| row[field].as_u64().is_some_and(|count| count > rounds / 2);
        assert!(often("reused") && often("hits"), "{row}");
        let name = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        seen.insert((name("iface"), name("monitor")));
    }
    let skipped: Vec<_> = list(&document, "skipped").iter().map(Value::to_string).collect();
    for (iface, monitor) in [
        ("system", "memhooks"),
        ("system", "userfaultfd"),
        ("system", "memhooks+userfaultfd"),
        ("system", "import"),
        ("simulated", "identity"),
        ("simulated", "callback"),
    ] {
        let excused = skipped
            .iter()
            .any(|skipped| skipped.contains("stale registrations") && skipped.contains(monitor));
        assert!(
            seen.contains(&(iface.to_owned(), monitor.to_owned())) || excused,
            "{iface} {monitor}: {seen:?}"
        );
    }
}

fn monitor_that_is_never_notified_fails_the_check() -> Outcome {
    let machine = Machine::find(Hmem::builder()).expect("a machine");
    let Some([deaf, notified]) = check_deaf_monitor(&machine, 100) else {
        return skip(machine::without_pinned_pages()).map(|()| panic!("no NIC pins pages"));
    };
    assert!(!deaf.verified && deaf.stale > 50, "{deaf:?}");
    assert!(deaf.error.as_deref().is_some_and(|error| error.contains("freed memory")), "{deaf:?}");
    // With a monitor that is notified, the same check passes.
    assert!(notified.verified && notified.stale == 0, "{notified:?}");
    assert!(notified.reused > 0 && notified.hits > 0, "{notified:?}");
    Ok(())
}

/// The check does not fail if seccomp forbids a monitor.
fn monitor_forbidden_by_seccomp_is_skipped_with_the_reason() -> Outcome {
    skip(machine::without_pinned_pages())?;
    let output = hmem_in_a_container(&["check", "--quick", "--json", "--iface", "system"], &[]);
    ended(&output, 0);
    let document = json(&output);
    for row in list(&document, "stale") {
        assert!(row["verified"] == true && row["monitor"] != "", "{row}");
    }
    for monitor in ["userfaultfd", "memhooks+userfaultfd"] {
        assert!(list(&document, "stale").iter().all(|row| row["monitor"] != monitor), "{document}");
        let what = format!("stale registrations of system under {monitor}");
        let skipped =
            list(&document, "skipped").iter().find(|skipped| skipped["what"] == what.as_str());
        let why = skipped.and_then(|skipped| skipped["why"].as_str()).unwrap_or_default();
        assert!(why.contains("seccomp") && why.contains("EPERM"), "{monitor}: {document}");
    }
    Ok(())
}

fn transfer_that_seccomp_forbids_fails_with_the_cause_and_the_remedy() {
    let check = command(&["check", "--quick", "--json", "--nic", "loopback/hardware"], &[]);
    let filter = vec![
        load(NUMBER),
        unless(libc::SYS_process_vm_readv as u32, 1),
        refuse(),
        unless(libc::SYS_process_vm_writev as u32, 1),
        refuse(),
    ];
    let output = filtered(check, filter);
    ended(&output, 1);
    let document = json(&output);
    let rows = list(&document, "rows");
    let failed: Vec<_> = rows.iter().filter_map(|row| row["error"].as_str()).collect();
    assert!(!failed.is_empty(), "{document}");
    for error in failed {
        for words in ["process_vm_readv", "probably, a seccomp filter", "security-opt"] {
            assert!(error.contains(words), "{words} is not in: {error}");
        }
    }
}

fn check_of_an_unavailable_iface_fails_with_the_reason() {
    let info = json(&hmem(&["info", "--json"], &[]));
    let check = json(&hmem(&["check", "--quick", "--json", "--iface", "system"], &[]));
    assert!(list(&check, "rows").iter().all(|row| row["iface"] == "system"));
    for iface in list(&info, "ifaces").iter().filter(|iface| iface["available"] == false) {
        let name = iface["name"].as_str().unwrap_or_default();
        let output = hmem(&["check", "--quick", "--json", "--iface", name], &[]);
        ended(&output, 1);
        let document = json(&output);
        assert!(list(&document, "rows").is_empty());
        let skipped = list(&document, "skipped");
        let why = skipped
            .iter()
            .find(|skipped| skipped["what"] == format!("iface {name}"))
            .expect("skipped");
        let why = why["why"].as_str().unwrap_or_default();
        // A library that is installed but finds no device is named.
        let variable = format!("HMEM_{}_LIBRARY", name.to_uppercase());
        assert!(why.contains(&variable) || why.contains("library="), "{why}");
    }
}

/// The check fails if the selected provider is unavailable.
fn check_of_an_unavailable_provider_fails_with_the_reason() {
    let info = json(&hmem(&["info", "--json"], &[]));
    for absent in list(&info, "absent") {
        let what = absent["what"].as_str().unwrap_or_default();
        let Some(name) = what.strip_prefix("provider ").or_else(|| what.strip_prefix("NIC "))
        else {
            continue;
        };
        let output = hmem(&["check", "--quick", "--json", "--provider", name], &[]);
        ended(&output, 1);
        let document = json(&output);
        assert!(list(&document, "rows").is_empty());
        assert!(list(&document, "skipped").contains(absent), "{document}");
    }
}

fn check_covers_only_the_selected_size_path_and_nic() {
    let arguments = [
        "check",
        "--json",
        "--provider",
        "loopback/hardware",
        "--path",
        "dma-buf",
        "--bytes",
        "12345",
    ];
    let output = hmem(&arguments, &[]);
    ended(&output, 0);
    let document = json(&output);
    let rows = list(&document, "rows");
    assert!(!rows.is_empty());
    for row in rows {
        assert_eq!(
            (&row["nic"], &row["path"], &row["bytes"]),
            (&"hardware".into(), &"dma-buf".into(), &12345.into())
        );
    }
}

/// The variables are libfabric's `FI_HMEM` and `FI_HMEM_DISABLE_P2P`.
fn environment_filters_ifaces_and_forbids_direct_access() {
    let output = hmem(&["info", "--json"], &[("FI_HMEM", "system")]);
    ended(&output, 0);
    let document = json(&output);
    for iface in list(&document, "ifaces") {
        assert_eq!(iface["available"], iface["name"] == "system", "{iface}");
    }
    assert!(list(&document, "devices").is_empty());

    let output = hmem(&["check", "--quick", "--iface", "simulated"], &[("FI_HMEM", "system")]);
    ended(&output, 1);
    assert!(stdout(&output).contains("nothing was checked"), "{}", stdout(&output));

    let output = hmem(&["check", "--quick", "--json"], &[("FI_HMEM_DISABLE_P2P", "1")]);
    ended(&output, 0);
    let document = json(&output);
    let paths: BTreeSet<_> =
        list(&document, "rows").iter().filter_map(|row| row["path"].as_str()).collect();
    assert_eq!(paths, BTreeSet::from(["plain-host", "staged"]));
    let skipped = list(&document, "skipped").iter().filter_map(|skipped| skipped["why"].as_str());
    assert!(skipped.into_iter().any(|why| why.contains("FI_HMEM_DISABLE_P2P")), "{document}");
}

fn wrong_arguments_and_variables_exit_with_status_2() {
    refused(&hmem(&["info"], &[("FI_HMEM", "system,nonsense")]), 2, &["nonsense", "FI_HMEM"]);
    refused(
        &hmem(&["check"], &[("FI_HMEM_DISABLE_P2P", "maybe")]),
        2,
        &["FI_HMEM_DISABLE_P2P", "maybe"],
    );
    refused(
        &hmem(&["check"], &[("HMEM_DIRECT_PATHS", "dma-buf,tcp")]),
        2,
        &["HMEM_DIRECT_PATHS", "dma-buf,tcp", "peer-memory"],
    );
    refused(
        &hmem(&["check", "--iface", "nonsense"], &[]),
        2,
        &["--iface", "nonsense", "simulated"],
    );
    refused(
        &hmem(&["check", "--provider", "nonsense"], &[]),
        2,
        &["--nic takes", "nonsense", "loopback/hardware"],
    );
    refused(&hmem(&["check", "--path", "nonsense"], &[]), 2, &["--path", "nonsense", "staged"]);
    refused(&hmem(&["check", "--bytes", "0"], &[]), 2, &["--bytes", "at least one byte"]);
    refused(&hmem(&["check", "--bytes", "999999999GiB"], &[]), 1, &["--bytes", "fewer"]);
    refused(&hmem(&["check", "--bytes", "many"], &[]), 2, &["--bytes", "many"]);
    refused(&hmem(&["--color", "purple", "info"], &[]), 2, &["purple", "never"]);
    refused(&hmem(&["frobnicate"], &[]), 2, &["frobnicate"]);
}

fn help_and_version_are_printed() {
    for arguments in [&["--help"][..], &["info", "--help"], &["check", "--help"], &["--version"]] {
        let output = hmem(arguments, &[]);
        ended(&output, 0);
        assert!(stdout(&output).contains("hmem"));
    }
    let output = hmem(&[], &[]);
    ended(&output, 2);
    assert!(stderr(&output).contains("Usage: hmem"));
}

fn colours_are_printed_only_on_terminals_or_on_request() {
    for arguments in [&["info"][..], &["check", "--quick"], &["--help"]] {
        let output = hmem(arguments, &[]);
        assert!(!stdout(&output).contains('\x1b') && !stderr(&output).contains('\x1b'));
    }
    assert!(stdout(&hmem(&["--color", "always", "info"], &[])).contains('\x1b'));
    assert!(!stdout(&hmem(&["--color", "never", "info"], &[])).contains('\x1b'));
}

/// The library prints nothing without a subscriber.
fn logs_are_printed_only_on_request_and_on_stderr() {
    let quiet = hmem(&["check", "--quick", "--path", "dma-buf"], &[]);
    assert_eq!(stderr(&quiet), "");
    let verbose = hmem(&["check", "--quick", "--json", "--path", "dma-buf", "--verbose"], &[]);
    assert!(stderr(&verbose).contains("path decided"), "{}", stderr(&verbose));
    json(&verbose);
}

fn document_with_another_or_missing_field_or_type_does_not_match_its_schema() {
    let schema = serde_json::json!({
        "$defs": {"Part": {"type": "object", "properties": {"size": {"type": "integer"}},
            "required": ["size"]}},
        "type": "object",
        "properties": {
            "schema": {"type": "integer", "const": 2},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/Part"}},
            "part": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]},
        },
        "required": ["schema", "parts"],
    });
    for (document, expected) in [
        (r#"{"schema": 2, "parts": [{"size": 1}], "part": null}"#, None),
        (r#"{"schema": 3, "parts": []}"#, Some(".schema has an unknown value: 3")),
        (r#"{"schema": 2}"#, Some(r#" lacks "parts": {"schema":2}"#)),
        (r#"{"schema": 2, "parts": [], "more": 1}"#, Some(".more is not in the schema")),
        (r#"{"schema": 2, "parts": [{}]}"#, Some(r#".parts[] lacks "size": {}"#)),
        (
            r#"{"schema": 2, "parts": [], "part": {"size": ""}}"#,
            Some(r#".part.size is no "integer": "", or  is no "null": {"size":""}"#),
        ),
    ] {
        let document = serde_json::from_str(document).expect("JSON");
        assert_eq!(schema::check(&schema, &schema, &document).err().as_deref(), expected);
    }
}
