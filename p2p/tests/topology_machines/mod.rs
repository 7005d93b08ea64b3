//! Machines made from descriptions: a folder with sysfs and procfs as a kernel shows them. It
//! includes serial numbers, network addresses and the host name, so that tests can check that a
//! recording has none of them.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

/// The recorded machines.
pub(crate) const MACHINES: [&str; 10] = [
    "dgx-a100",
    "hgx-h100",
    "two-socket-acs",
    "switch-acs",
    "cloud-vm",
    "laptop",
    "gh200",
    "gb200",
    "gb200-efa",
    "gb10",
];

/// Private texts in the files of every machine, which no recording may contain. [`SERIAL`] is their
/// binary counterpart.
pub(crate) const SECRETS: [&str; 9] = [
    "gpu-node-17",
    "a262:5500:03a1:420c",
    "0c:42:a1:55:62:a2",
    "UUID",
    "LABEL",
    "GPU-9221d5d1",
    "SN-4711-0815",
    "BOOT_IMAGE",
    "380000000000",
];
/// The serial number in every function's Device Serial Number capability.
pub(crate) const SERIAL: [u8; 8] = [0x0c, 0x42, 0xa1, 0x03, 0x00, 0x55, 0x62, 0xa2];

/// A temporary folder. Dropping the value removes it.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // A thousand small files are faster in memory, if there is such a file system.
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let path = parent.join(format!("hmem-topology-{}-{number}", std::process::id()));
        fs::create_dir(&path).expect("a folder of this name is free");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a path below the root")).expect("folders");
        fs::write(path, bytes).expect("a file");
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a path below the root")).expect("folders");
        symlink(target, path).expect("a link");
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("remove the test's folder");
    }
}

/// Returns the folder with the descriptions and recordings of machines.
pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/topology")
}

/// Returns the path of a machine's recording.
pub(crate) fn recording(name: &str) -> PathBuf {
    fixtures().join(format!("{name}.tar.gz"))
}

#[derive(Default)]
struct Machine {
    unprivileged: bool,
    groups: Option<String>,
    next_group: u32,
    /// The folders above the function that the current line describes, beginning with the host
    /// bridge's.
    above: Vec<String>,
    numa: String,
    /// The NUMA nodes by number. The CPUs of a node, or the node with CPUs to which it is attached.
    nodes: BTreeMap<u32, Result<String, u32>>,
}

/// Creates the files of the machine that `name.txt` describes.
pub(crate) fn make(name: &str) -> Folder {
    let text = fs::read_to_string(fixtures().join(format!("{name}.txt"))).expect("a description");
    let folder = Folder::new();
    let mut machine = Machine::default();
    folder.write("proc/sys/kernel/hostname", "gpu-node-17.example.net\n");
    folder.write("sys/class/dmi/id/product_serial", "SN-4711-0815\n");
    folder.write("proc/driver/nvidia/gpus/x/information", "GPU UUID: GPU-9221d5d1-b60b\n");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let depth = (line.len() - line.trim_start().len()) / 2;
        let words: Vec<_> = line.split_whitespace().collect();
        let rest = line.trim_start().split_once(' ').map_or("", |(_, rest)| rest);
        match words[0] {
            "unprivileged" => machine.unprivileged = true,
            "release" => {
                folder.write("proc/sys/kernel/osrelease", format!("{rest}\n"));
                folder.write("proc/version", format!("Linux version {rest} (root@gpu-node-17)\n"));
            }
            "cmdline" => folder.write("proc/cmdline", format!("{rest}\n")),
            "option" => {
                let release = fs::read_to_string(folder.path().join("proc/sys/kernel/osrelease"));
                let release = release.expect("release comes before option");
                let lines =
                    format!("CONFIG_DEFAULT_HOSTNAME=\"gpu-node-17\"\n{}\n", words[1..].join("\n"));
                folder.write(&format!("boot/config-{}", release.trim()), lines);
            }
            "module" => {
                let line = |name: &&str| format!("{name} 16384 0 - Live 0xffffffffc0a00000\n");
                folder.write("proc/modules", words[1..].iter().map(line).collect::<String>());
            }
            "nvidia" => {
                folder.write("proc/driver/nvidia/version", format!("{rest}\nGCC version: 11\n"))
            }
            "groups" => machine.groups = Some(rest.to_owned()),
            "node" => {
                let node = words[1].parse().expect("a number");
                machine.nodes.insert(node, Ok(words[2].to_owned()));
            }
            "attached" => {
                let (first, last) = words[1].split_once('-').expect("first-last");
                let at = words[2].parse().expect("a number");
                let (first, last): (u32, u32) = (first.parse().unwrap(), last.parse().unwrap());
                machine.nodes.extend((first..=last).map(|node| (node, Err(at))));
            }
            "memory" => folder.write("sys/devices/system/node/has_memory", format!("{rest}\n")),
            "host" => {
                machine.above = vec![format!("sys/devices/{}", words[1])];
                machine.numa = words[2].strip_prefix("numa=").expect("numa=").to_owned();
            }
            kind => {
                machine.above.truncate(depth);
                machine.function(&folder, kind, &words[1..]);
            }
        }
    }
    machine.write_nodes(&folder);
    folder
}

fn up(folder: &str, to: &str) -> String {
    format!("{}{to}", "../".repeat(folder.split('/').count()))
}

impl Machine {
    /// Writes the NUMA nodes. Machines with nodes without CPUs have distances, as Grace CPUs report
    /// them.
    fn write_nodes(&self, tree: &Folder) {
        let has_distances = self.nodes.values().any(Result::is_err);
        for (id, node) in &self.nodes {
            let at = |file: &str| format!("sys/devices/system/node/node{id}/{file}");
            tree.write(&at("cpulist"), format!("{}\n", node.as_deref().unwrap_or_default()));
            let distance = |(other, to): (&u32, &Result<String, u32>)| match (node, to) {
                _ if other == id => 10,
                (Ok(_), Ok(_)) => 40,
                (Err(at), Ok(_)) if at == other => 80,
                (Ok(_), Err(at)) if at == id => 80,
                (Ok(_), Err(_)) | (Err(_), Ok(_)) => 120,
                (Err(_), Err(_)) => 255,
            };
            if has_distances {
                let distances: Vec<_> =
                    self.nodes.iter().map(|other| distance(other).to_string()).collect();
                tree.write(&at("distance"), distances.join(" ") + "\n");
            }
        }
    }

    fn function(&mut self, tree: &Folder, kind: &str, words: &[&str]) {
        let (id, class) = (words[0], words[2]);
        let (vendor, device) = words[1].split_once(':').expect("vendor:device");
        let get =
            |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let folder = format!("{}/{id}", self.above.last().expect("host comes first"));
        self.above.push(folder.clone());
        let at = |name: &str| format!("{folder}/{name}");
        let below_sys = folder.strip_prefix("sys/").expect("inside sys");
        tree.link(&format!("sys/bus/pci/devices/{id}"), &format!("../../../{below_sys}"));
        tree.write(&at("class"), format!("0x{class}\n"));
        tree.write(&at("vendor"), format!("0x{vendor}\n"));
        tree.write(&at("device"), format!("0x{device}\n"));
        tree.write(&at("numa_node"), format!("{}\n", self.numa));
        tree.write(&at("vpd"), "SN-4711-0815");
        tree.write(&at("resource"), resource(get("bars")));
        let acs = get("acs").map(|acs| u16::from_str_radix(acs, 16).expect("hexadecimal"));
        let config = config(kind, class.starts_with("0604"), get("link").is_some(), acs);
        tree.write(&at("config"), if self.unprivileged { &config[..64] } else { &config });
        if let Some(link) = get("link") {
            let (max_speed, max_width) =
                get("max").unwrap_or(link).split_once('x').expect("speed x width");
            let (speed, width) = link.split_once('x').expect("speed x width");
            tree.write(&at("current_link_speed"), format!("{speed} GT/s PCIe\n"));
            tree.write(&at("current_link_width"), format!("{width}\n"));
            tree.write(&at("max_link_speed"), format!("{max_speed} GT/s PCIe\n"));
            tree.write(&at("max_link_width"), format!("{max_width}\n"));
        }
        if let Some(driver) = get("driver") {
            tree.link(&at("driver"), &up(&folder, &format!("sys/bus/pci/drivers/{driver}")));
        }
        if let Some(kind) = &self.groups {
            let group = format!("sys/kernel/iommu_groups/{}", self.next_group);
            self.next_group += 1;
            tree.write(&format!("{group}/type"), format!("{kind}\n"));
            tree.link(&at("iommu_group"), &up(&folder, &group));
        }
        if let Some(name) = get("rdma") {
            let rdma = at(&format!("infiniband/{name}"));
            tree.link(&format!("sys/class/infiniband/{name}"), &up("sys/class/infiniband", &rdma));
            tree.write(&format!("{rdma}/node_guid"), "a262:5500:03a1:420c\n");
            tree.write(&format!("{rdma}/node_desc"), format!("gpu-node-17 {name}\n"));
            let layer = get("layer").unwrap_or("InfiniBand");
            tree.write(&format!("{rdma}/ports/1/link_layer"), format!("{layer}\n"));
            let state = if words.contains(&"down") { "1: DOWN\n" } else { "4: ACTIVE\n" };
            tree.write(&format!("{rdma}/ports/1/state"), state);
            let rate = get("rate").expect("rate=");
            tree.write(&format!("{rdma}/ports/1/rate"), format!("{rate} Gb/sec (4X)\n"));
            tree.write(&format!("{rdma}/ports/1/gids/0"), "fe80::a262:5500:03a1:420c\n");
            tree.write(&at("net/ens1/address"), "0c:42:a1:55:62:a2\n");
        }
    }
}

fn resource(bars: Option<&str>) -> String {
    const BASE: u64 = 0x3800_0000_0000;
    let mut lines = vec!["0x0000000000000000 0x0000000000000000 0x0000000000000000".to_owned(); 13];
    for bar in bars.into_iter().flat_map(|bars| bars.split(',')) {
        let (index, size) = bar.split_once(':').expect("index:size");
        let (number, unit) = size.split_at(size.len() - 1);
        let shift = match unit {
            "K" => 10,
            "M" => 20,
            "G" => 30,
            _ => unreachable!("a unit"),
        };
        let size = number.parse::<u64>().expect("a number") << shift;
        let index: usize = index.parse().expect("a number");
        let flags = if size > 32 << 20 { 0x14_220c } else { 0x4_0200 };
        lines[index] = format!("0x{BASE:016x} 0x{:016x} 0x{flags:016x}", BASE + size - 1);
    }
    lines.join("\n") + "\n"
}

/// Returns a configuration space with power management, PCI Express, a serial number and ACS.
fn config(kind: &str, bridge: bool, express: bool, acs: Option<u16>) -> Vec<u8> {
    let mut bytes = vec![0; if express { 4096 } else { 256 }];
    let mut put = |at: usize, new: &[u8]| bytes[at..at + new.len()].copy_from_slice(new);
    put(0x06, &[0x10, 0]);
    put(0x0e, &[u8::from(bridge)]);
    put(0x34, &[0x60]);
    put(0x60, &[0x01, if express { 0x80 } else { 0 }, 0x03, 0]);
    if express {
        let port = match kind {
            "root" => 0x42,
            "up" => 0x52,
            "down" => 0x62,
            "dev" => 0x02,
            other => unreachable!("no kind of function: {other}"),
        };
        put(0x80, &[0x10, 0, port, 0]);
        let next = if acs.is_some() { 0x220 } else { 0 };
        put(0x100, &(0x0003_u32 | 1 << 16 | next << 20).to_le_bytes());
        put(0x104, &SERIAL);
        if let Some(acs) = acs {
            put(0x220, &(0x000d_u32 | 1 << 16).to_le_bytes());
            put(0x226, &acs.to_le_bytes());
        }
    }
    bytes
}
