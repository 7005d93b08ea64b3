//! `hmem topo`: the built command with recorded machines.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use crate::hmem_process::schema;
use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/topo-schema.md");

fn hmem(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hmem"));
    command.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    command.args(arguments).output().expect("the binary runs")
}

fn recording(name: &str) -> String {
    format!("{}/../p2p/tests/fixtures/topology/{name}.tar.gz", env!("CARGO_MANIFEST_DIR"))
}

/// A temporary file, which is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("hmem-topo-{}-{name}", std::process::id())))
    }

    fn name(&self) -> &str {
        self.0.to_str().expect("a name of text")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn stdout(output: &Output) -> &str {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert_eq!(errors, "");
    std::str::from_utf8(&output.stdout).expect("output is UTF-8")
}

/// Asserts that the command failed with exit status `code`, all `words` on stderr and an empty
/// stdout.
fn refused(output: &Output, code: i32, words: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty());
    assert!(error.starts_with("error: "), "{error}");
    assert!(error.lines().skip(1).all(|line| line.starts_with("  ")), "{error}");
    for word in words {
        assert!(error.contains(word), "{word} is not in: {error}");
    }
}

fn document(name: &str) -> Value {
    let output = hmem(&["topo", "--json", "--from", &recording(name)]);
    serde_json::from_str(stdout(&output)).expect("JSON")
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().unwrap_or_else(|| panic!("{name} is no array"))
}

/// P2P-05
#[test]
fn topo_draws_the_tree_and_the_distances() {
    let output = hmem(&["topo", "--from", &recording("dgx-a100")]);
    let text = stdout(&output);
    let lines: Vec<_> = text.lines().collect();
    for line in &lines {
        assert!(line.chars().count() <= 120, "too wide: {line}");
        assert_eq!(*line, line.trim_end(), "blanks at the end");
    }
    assert!(!text.contains('\x1b'), "colours are for terminals");
    // Three switches stand between the root port and the GPU. Each adds one level of indentation.
    let gpu = lines
        .iter()
        .find(|line| line.contains("0000:07:00.0 GPU NVIDIA"))
        .expect("the GPU is drawn");
    assert!(
        gpu.starts_with("\u{2502}  \u{2502}     \u{2514}\u{2500} 06:00.0")
            || gpu.contains("06:00.0 \u{2192} 0000:07:00.0"),
        "{gpu}"
    );
    for word in ["BAR 64 GiB", "16 GT/s x16", "IOMMU group", "nvidia"] {
        assert!(gpu.contains(word), "{word} is not in: {gpu}");
    }
    let row =
        lines.iter().find(|line| line.starts_with("  0000:47:00.0 ")).expect("a row of distances");
    let cells: Vec<_> = row.split_whitespace().skip(1).collect();
    assert_eq!(
        cells,
        ["SYS", "SYS", "PXB", "PXB", "SYS", "SYS", "SYS", "SYS", "SYS", "SYS", "SYS", "SYS"]
    );
    for word in [
        "nearest to 0000:47:00.0, 0000:4e:00.0: mlx5_2, mlx5_3",
        "IOMMU: passthrough",
        "nvidia_peermem",
    ] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    assert!(
        stdout(&hmem(&["--color", "always", "topo", "--from", &recording("dgx-a100")]))
            .contains('\x1b')
    );
}

/// P2P-05, DIAG-03
///
/// The obstacles are ACS, a translating IOMMU and a missing privilege.
#[test]
fn obstacles_are_listed_with_their_remedies() {
    let output = hmem(&["topo", "--from", &recording("switch-acs")]);
    let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    for word in [
        "PIX*",
        "NODE",
        "13 ports redirect",
        "ports 0000:3c:04.0, 0000:3c:0c.0",
        "iommu=pt",
        "setpci",
        "(its group has type DMA)",
        "closed kernel modules",
        "load nvidia_peermem",
    ] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    let output = hmem(&["topo", "--from", &recording("laptop")]);
    let text = stdout(&output);
    for word in [
        "no RDMA NIC with a PCI address",
        "without CAP_SYS_ADMIN",
        "2.5 GT/s x16 of 8 GT/s x16",
        "other functions (--all)",
    ] {
        assert!(text.contains(word), "{word} is not in:\n{text}");
    }
    let all = hmem(&["topo", "--all", "--from", &recording("laptop")]);
    assert!(stdout(&all).contains("class 0x0c0330") && !stdout(&all).contains("--all"));
}

/// P2P-05
#[test]
fn coherent_links_and_memory_only_nodes_are_shown() {
    for (name, words) in [
        (
            "gb200",
            &[
                "GPU NVIDIA 10de:2941, NVLink-C2C, BAR 256",
                "NIC mlx5_4",
                "PHB",
                "memory-only NUMA nodes: 2, 10, 18, and 1 more",
                "no port of mlx5_0 (0000:01:00.0) is active",
                "the Data Direct function 0008:03:00.0",
                "dma-buf-data-direct",
            ][..],
        ),
        ("gb10", &["10de:2e12, integrated", "no GPUDirect RDMA", "cuMemHostAlloc"]),
    ] {
        let output = hmem(&["topo", "--from", &recording(name)]);
        let text = stdout(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        for word in words {
            assert!(text.contains(word), "{word} is not in:\n{text}");
        }
    }
    let gh200 = document("gh200");
    let memory: Vec<_> = list(&gh200, "numa").iter().map(|node| &node["memory"]).collect();
    assert_eq!(
        (memory.len(), memory[..3].to_vec()),
        (9, vec![&true.into(), &true.into(), &false.into()])
    );
    let functions = list(&gh200, "functions").iter();
    let links = functions.filter_map(|function| function["coherent_link"].as_str());
    assert_eq!(links.collect::<Vec<_>>(), ["NVLink-C2C"]);
    let path = &list(&gh200, "paths")[0];
    assert_eq!((&path["distance"], &path["hops"][1]), (&"PHB".into(), &"NVLink-C2C".into()));
}

/// P2P-05
#[test]
fn topo_json_matches_its_schema() {
    for name in ["dgx-a100", "two-socket-acs", "laptop", "cloud-vm", "gh200", "gb10"] {
        let document = document(name);
        schema::matches("topo", &document);
        for function in list(&document, "functions") {
            for (field, known) in [
                ("role", &["accelerator", "network", "bridge", "other"][..]),
                (
                    "port",
                    &["endpoint", "root-port", "switch-upstream", "switch-downstream", "bridge"],
                ),
                ("acs", &["unreadable", "absent", "present"]),
            ] {
                let value = function[field].as_str().expect("text");
                assert!(known.contains(&value) && PAGE.contains(&format!("`{value}`")), "{value}");
            }
        }
    }
}

/// P2P-05
///
/// Every pair is listed once. The distances are those that NVIDIA published for the DGX A100.
#[test]
fn topo_json_has_every_pair_with_its_distance() {
    let dgx = document("dgx-a100");
    let paths = list(&dgx, "paths");
    assert_eq!(paths.len(), 8 * 12 + 8 * 7 / 2);
    let mut count = BTreeMap::new();
    for path in paths.iter().filter(|path| !list(path, "nics").is_empty()) {
        *count.entry(path["distance"].as_str().expect("text")).or_insert(0) += 1;
    }
    assert_eq!(count, BTreeMap::from([("PXB", 16), ("SYS", 80)]));
    let nic = list(&dgx, "nics").iter().find(|nic| nic["name"] == "mlx5_9").expect("mlx5_9");
    assert_eq!(nic["nearest"], serde_json::json!(["0000:b7:00.0", "0000:bd:00.0"]));
}

/// P2P-05
///
/// The JSON output of both recordings is equal.
#[test]
fn recording_of_a_recording_is_identical() {
    let file = Scratch::new("again.tar.gz");
    let output = hmem(&["topo", "--from", &recording("two-socket-acs"), "--record", file.name()]);
    assert_eq!(stdout(&output), format!("wrote {}\n", file.name()));
    let again = hmem(&["topo", "--json", "--from", file.name()]);
    let mut again: Value = serde_json::from_str(stdout(&again)).expect("JSON");
    let mut first = document("two-socket-acs");
    for document in [&mut again, &mut first] {
        assert!(document["from"].take().is_string());
    }
    assert_eq!(again, first);
}

/// P2P-05
#[test]
fn this_machine_is_drawn_and_recorded() {
    let file = Scratch::new("here.tar.gz");
    assert!(stdout(&hmem(&["topo"])).contains("PCIe tree"));
    stdout(&hmem(&["topo", "--record", file.name()]));
    let [here, read] =
        [&["topo", "--json"][..], &["topo", "--json", "--from", file.name()]].map(|arguments| {
            let mut document: Value = serde_json::from_str(stdout(&hmem(arguments))).expect("JSON");
            document["from"].take();
            // A recording omits the release, which may contain the host name.
            document["kernel"]["release"].take();
            document
        });
    assert_eq!(here, read);
}

/// P2P-05
///
/// The table in the picture has a cell for each pair, too.
#[test]
fn picture_has_a_coloured_line_for_each_pair() {
    let file = Scratch::new("dgx.svg");
    stdout(&hmem(&["topo", "--from", &recording("dgx-a100"), "--svg", file.name()]));
    let svg = fs::read_to_string(&file.0).expect("a picture");
    assert!(
        svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && svg.ends_with("</svg>\n")
    );
    let lines: Vec<_> = svg.lines().filter(|line| line.starts_with("<path ")).collect();
    assert_eq!(lines.len(), 8 * 12);
    let colour = |line: &&str| {
        let (_, rest) = line.split_once("stroke=\"").expect("a colour");
        rest.split('"').next().map(str::to_owned).expect("a colour")
    };
    let mut colours = BTreeMap::new();
    lines.iter().for_each(|line| *colours.entry(colour(line)).or_insert(0) += 1);
    assert_eq!(colours.values().copied().collect::<BTreeSet<_>>(), BTreeSet::from([16, 80]));
    for text in [
        "mlx5_0",
        "mlx5_11",
        "0000:07:00.0",
        "NUMA node 3",
        "PIX: ",
        "PXB: ",
        "PHB: ",
        "NODE: ",
        "SYS: ",
    ] {
        assert!(svg.contains(text), "{text} is not in the picture");
    }
    assert_eq!(svg.matches(">PXB</text>").count(), 16);
    // Pairs with redirected traffic have dashed lines and a star.
    stdout(&hmem(&["topo", "--from", &recording("switch-acs"), "--svg", file.name()]));
    let svg = fs::read_to_string(&file.0).expect("a picture");
    assert_eq!(svg.matches("stroke-dasharray").count(), 4);
    assert_eq!(svg.matches(">PIX*</text>").count(), 4);
    // The picture of a machine without pairs contains a message instead.
    stdout(&hmem(&["topo", "--from", &recording("laptop"), "--svg", file.name()]));
    let svg = fs::read_to_string(&file.0).expect("a picture");
    assert!(svg.contains("no RDMA NIC with a PCI address") && !svg.contains("<path "));
}

/// P2P-05, REL-03
///
/// The exit status is 1 for a file that cannot be read or written, and 2 for a bad command line.
#[test]
fn topo_reports_errors_of_reading_and_writing() {
    refused(&hmem(&["topo", "--from", "/nowhere/at/all"]), 1, &["/nowhere/at/all", "--record"]);
    let file = Scratch::new("wrong.tar.gz");
    fs::write(&file.0, &fs::read(recording("laptop")).expect("a recording")[..1000])
        .expect("a file");
    refused(&hmem(&["topo", "--from", file.name()]), 1, &[file.name(), "--record"]);
    fs::write(&file.0, "no archive").expect("a file");
    refused(&hmem(&["topo", "--json", "--from", file.name()]), 1, &[file.name(), "tar"]);
    let laptop = recording("laptop");
    for option in ["--svg", "--record"] {
        refused(
            &hmem(&["topo", "--from", &laptop, option, "/nowhere/file"]),
            1,
            &["/nowhere/file"],
        );
    }
    refused(&hmem(&["topo", "--from"]), 2, &["--from"]);
    refused(&hmem(&["topo", "--frobnicate"]), 2, &["--frobnicate"]);
    refused(&hmem(&["topo", "--json", "--all"]), 2, &["--all"]);
}
