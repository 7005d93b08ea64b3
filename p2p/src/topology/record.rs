//! Recordings: a tree of files with the facts of a [`Topology`] and nothing else.
//!
//! Recording copies no file of the machine: it writes each file from the [`Topology`]. A recording
//! thus cannot hold serial numbers, MAC addresses, GUIDs, physical addresses, or the rest of
//! configuration space and of the command line. The host name is removed from every name.

use std::{collections::BTreeMap, io::Write};

use hmem_core::Result;

use super::{
    Topology, archive, bars,
    config_space::{self, ConfigSpace},
    device::{Link, PciDevice},
    kernel::{GROUPS, write_nvidia},
    numa,
    rdma::{self, RdmaDevice, RdmaPort},
    source::SourceEntry,
};

/// Name of the file that marks a folder as a recording. The file holds the version of the format.
pub(super) const MARK: &str = "hmem-recording";
pub(super) const VERSION: &str = "version 1";
/// The text that replaces the host name of the machine.
const REPLACED: &str = "host";

/// A recording under construction.
struct Recording<'a> {
    topology: &'a Topology,
    entries: BTreeMap<String, SourceEntry>,
}

impl Topology {
    /// Writes the topology as a tar.gz that [`Topology::open`] reads.
    ///
    /// The recording holds no serial numbers, no network or memory addresses and no host name. A
    /// host name of one or two letters, and `localhost`, are not removed, since they occur in other
    /// words. Equal topologies give equal bytes.
    ///
    /// # Errors
    /// - `Unsupported`: the cargo feature `recordings` is off.
    /// - The kind of the operating system's error if the writer failed.
    pub fn record(&self, out: impl Write) -> Result<()> {
        archive::pack(&self.entries(), out)
    }

    pub(super) fn entries(&self) -> BTreeMap<String, SourceEntry> {
        let mut recording = Recording { topology: self, entries: BTreeMap::new() };
        recording.file(MARK, VERSION);
        for device in self.devices() {
            recording.device(device);
        }
        for device in self.rdma() {
            recording.rdma(device);
        }
        for node in self.numa() {
            let at = |file: &str| format!("{}/node{}/{file}", numa::FOLDER, node.id);
            recording.file(&at("cpulist"), &node.cpus);
            if !node.distances.is_empty() {
                let distances: Vec<_> = node.distances.iter().map(u32::to_string).collect();
                recording.file(&at("distance"), &distances.join(" "));
            }
        }
        if self.numa.iter().any(|node| node.memory.is_some()) {
            let with_memory = self.numa.iter().filter(|node| node.memory == Some(true));
            let numbers: Vec<_> = with_memory.map(|node| node.id.to_string()).collect();
            recording.file(numa::HAS_MEMORY, &numbers.join(","));
        }
        for (group, kind) in &self.groups {
            recording.file(&format!("{GROUPS}/{group}/type"), kind);
        }
        recording.kernel();
        recording.entries
    }
}

impl Recording<'_> {
    /// Adds a file with these bytes, which must not contain the host name.
    fn raw(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.entries.insert(path.to_owned(), SourceEntry::File(bytes.into()));
    }

    /// Adds a file with one line of text, without the host name.
    fn file(&mut self, path: &str, text: &str) {
        self.raw(path, format!("{}\n", self.anonymous(text)));
    }

    fn link(&mut self, path: &str, target: String) {
        self.entries.insert(path.to_owned(), SourceEntry::Link(target));
    }

    /// Returns `text` without the host name of this machine.
    fn anonymous(&self, text: &str) -> String {
        let host = self.topology.host.as_deref().unwrap_or_default();
        let mut names = vec![host, host.split('.').next().unwrap_or_default()];
        // Short names and `localhost` stay, since they occur in other words.
        names.retain(|name| name.len() >= 3 && *name != "localhost");
        without(text, &names)
    }

    fn device(&mut self, device: &PciDevice) {
        let folder = folder(device);
        let listed = format!("sys/bus/pci/devices/{}", device.bus_id);
        self.link(&listed, format!("../../../{}", folder.strip_prefix("sys/").unwrap_or(&folder)));
        let at = |name: &str| format!("{folder}/{name}");
        self.file(&at("class"), &format!("0x{:06x}", device.class));
        self.file(&at("vendor"), &format!("0x{:04x}", device.vendor));
        self.file(&at("device"), &format!("0x{:04x}", device.device));
        self.file(&at("numa_node"), &device.numa_node.map_or("-1".into(), |node| node.to_string()));
        if !device.bars.is_empty() {
            self.raw(&at("resource"), bars::write(&device.bars));
        }
        if let Some(space) = device.space {
            let space = ConfigSpace { acs: device.acs, ..space };
            self.raw(&at("config"), config_space::write(space, device.is_bridge()));
        }
        if let Some(driver) = &device.driver {
            let driver = self.anonymous(driver);
            self.link(&at("driver"), up(&folder, &format!("sys/bus/pci/drivers/{driver}")));
        }
        if let Some(group) = device.iommu_group {
            self.link(&at("iommu_group"), up(&folder, &format!("{GROUPS}/{group}")));
        }
        if let Some(Link { speed, width, max_speed, max_width }) = device.link {
            let written = |speed: Option<f32>| {
                speed.map_or("Unknown".into(), |speed| format!("{speed:.1} GT/s PCIe"))
            };
            self.file(&at("current_link_speed"), &written(speed));
            self.file(&at("current_link_width"), &width.unwrap_or(0).to_string());
            self.file(&at("max_link_speed"), &written(max_speed));
            self.file(&at("max_link_width"), &max_width.unwrap_or(0).to_string());
        }
    }

    fn rdma(&mut self, device: &RdmaDevice) {
        let name = self.anonymous(&device.name);
        let above = device.bus_id.and_then(|id| self.topology.device(id)).map(folder);
        let folder =
            format!("{}/infiniband/{name}", above.as_deref().unwrap_or("sys/devices/virtual"));
        self.link(&format!("{}/{name}", rdma::FOLDER), up(rdma::FOLDER, &folder));
        // A folder has no entry of its own in a recording: this file creates it.
        self.file(&format!("{folder}/name"), &name);
        for port in &device.ports {
            let at = |file: &str| format!("{folder}/ports/{}/{file}", port.number);
            if let Some(layer) = &port.link_layer {
                self.file(&at("link_layer"), layer);
            }
            if let Some(active) = port.active {
                self.file(&at("state"), if active { "4: ACTIVE" } else { "1: DOWN" });
            }
            if let Some(rate) = port.rate {
                self.file(&at("rate"), &format!("{rate} Gb/sec"));
            }
            if let RdmaPort { link_layer: None, active: None, rate: None, .. } = port {
                // An empty link layer is read as an unknown one. This file creates the folder.
                self.file(&at("link_layer"), "");
            }
        }
    }

    fn kernel(&mut self) {
        let kernel = &self.topology.kernel;
        let release = kernel.release.as_deref().map(|release| self.anonymous(release));
        if let Some(release) = &release {
            self.file("proc/sys/kernel/osrelease", release);
        }
        self.file("proc/cmdline", &kernel.command_line.join(" "));
        let modules: String =
            kernel.modules.iter().map(|module| format!("{module} 0 0 - Live 0x0\n")).collect();
        self.raw("proc/modules", modules);
        if let Some(options) = &kernel.options {
            let text: String = options
                .iter()
                .map(|(name, setting)| format!("{name}={}\n", setting.name()))
                .collect();
            let release = release.unwrap_or_else(|| REPLACED.to_owned());
            self.file("proc/sys/kernel/osrelease", &release);
            self.raw(&format!("boot/config-{release}"), text);
        }
        if let Some(driver) = &kernel.nvidia {
            self.raw("proc/driver/nvidia/version", write_nvidia(driver));
        }
    }
}

/// Returns `text` with [`REPLACED`] in place of each of `names`, in upper or lower case. The first
/// name is replaced first.
fn without(text: &str, names: &[&str]) -> String {
    let Some((name, others)) = names.split_first() else { return text.to_owned() };
    let (lower, name) = (text.to_ascii_lowercase(), name.to_ascii_lowercase());
    let mut start = 0;
    let ends = lower.match_indices(&name).map(|(at, _)| at).chain([text.len()]);
    let parts = ends.map(|end| {
        let part = without(&text[start..end], others);
        start = end + name.len();
        part
    });
    parts.collect::<Vec<_>>().join(REPLACED)
}

/// Returns the path of a PCI function's folder in a recording.
fn folder(device: &PciDevice) -> String {
    let mut path = format!("sys/devices/{}", device.root);
    for id in device.bridges.iter().chain([&device.bus_id]) {
        path.push_str(&format!("/{id}"));
    }
    path
}

/// Returns the relative path that leads from `folder` to `path`, for a link.
fn up(folder: &str, path: &str) -> String {
    format!("{}{path}", "../".repeat(folder.split('/').count()))
}

#[cfg(all(test, feature = "recordings"))]
mod tests {
    use proptest::prelude::*;

    use super::{super::source::Source, *};

    fn laptop() -> BTreeMap<String, SourceEntry> {
        let recording = include_bytes!("../../tests/fixtures/topology/laptop.tar.gz");
        archive::unpack("laptop", &recording[..]).unwrap()
    }

    fn read(entries: BTreeMap<String, SourceEntry>) -> Result<Topology> {
        Topology::from_source(&Source::Archive { name: "altered".into(), entries })
    }

    #[test]
    fn recording_of_a_recording_is_the_same() {
        let entries = laptop();
        assert_eq!(read(entries.clone()).unwrap().entries(), entries);
    }

    #[test]
    fn port_whose_files_cannot_be_read_is_recorded() {
        let mut entries = laptop();
        let device = "sys/devices/virtual/infiniband/rxe0";
        let link = SourceEntry::Link("../../devices/virtual/infiniband/rxe0".to_owned());
        entries.insert("sys/class/infiniband/rxe0".to_owned(), link);
        // Of the files in the folder of the port, only one is there that no topology holds.
        let lid = format!("{device}/ports/1/lid");
        entries.insert(lid, SourceEntry::File(b"0x0\n".to_vec()));
        let topology = read(entries).unwrap();
        let port = RdmaPort { number: 1, link_layer: None, active: None, rate: None };
        assert_eq!(topology.rdma()[0].ports, [port]);
        assert_eq!(read(topology.entries()).unwrap(), topology);
    }

    #[test]
    fn words_with_nul_bytes_in_the_command_line_are_left_out() {
        let mut entries = laptop();
        let line = SourceEntry::File(b"intel_iommu=a\0\0b iommu=pt\n".to_vec());
        entries.insert("proc/cmdline".to_owned(), line);
        let topology = read(entries).unwrap();
        assert_eq!(topology.kernel().command_line, ["iommu=pt"]);
        assert_eq!(read(topology.entries()).unwrap(), topology);
    }

    #[test]
    fn host_name_is_replaced_whole_before_its_first_label() {
        let names = ["node7.example", "node7"];
        assert_eq!(without("a-NODE7.example\0node7-node7x", &names), "a-host\0host-hostx");
        assert_eq!(without("ghosts", &["host.x", "host"]), "ghosts");
        assert_eq!(without("text", &[]), "text");
    }

    fn entry() -> impl Strategy<Value = Option<SourceEntry>> {
        prop_oneof![
            Just(None),
            prop::collection::vec(any::<u8>(), 0..300)
                .prop_map(|bytes| Some(SourceEntry::File(bytes))),
            "(0x)?-?[0-9a-f.]{0,20}( GT/s)?\n"
                .prop_map(|text: String| Some(SourceEntry::File(text.into_bytes()))),
            "(\\.\\./){0,4}[a-z0-9:./]{0,40}".prop_map(|target| Some(SourceEntry::Link(target))),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 512, failure_persistence: None, ..ProptestConfig::default()
        })]

        /// REL-03: a recording in which a file was altered, removed or replaced by a link gives a
        /// topology or an error. That topology can be recorded and read again.
        #[test]
        fn tree_with_altered_files_does_not_panic(
            changes in prop::collection::vec((any::<prop::sample::Index>(), entry()), 1..6),
            moved in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let mut entries = laptop();
            let paths: Vec<_> = entries.keys().cloned().collect();
            if let Some(entry) = entries.remove(moved.0.get(&paths)) {
                entries.insert(moved.1.get(&paths).clone(), entry);
            }
            for (at, change) in changes {
                let path = at.get(&paths);
                match change {
                    Some(entry) => entries.insert(path.clone(), entry),
                    None => entries.remove(path),
                };
            }
            match read(entries) {
                Ok(topology) => prop_assert_eq!(read(topology.entries()).unwrap(), topology),
                Err(error) => prop_assert!(
                    error.remedy_text().is_some() && error.to_string().contains("altered"),
                    "{}", error
                ),
            }
        }
    }
}
