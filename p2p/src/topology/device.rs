//! PCI functions: their class, their place in the tree, and the speed of their links.

use std::collections::{BTreeMap, btree_map::Entry};

use hmem_core::Result;

use super::{
    bars::{self, Bar},
    bus_id::{BusId, RootBus},
    config_space::{self, Acs, ConfigSpace, Port},
    source::Source,
};

/// Maximum number of functions from a root port to a device, both included. Real machines have
/// fewer than ten.
const DEEPEST: usize = 64;

/// A PCI function: a device, or one of several functions of a device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PciDevice {
    /// The PCI address of the function.
    pub bus_id: BusId,
    /// The host bridge above the device.
    pub root: RootBus,
    /// The bridges between the host bridge and the device, starting at the root port.
    pub bridges: Vec<BusId>,
    /// PCI class code: base class, subclass and interface, as in `0x030200`.
    pub class: u32,
    /// The PCI vendor id.
    pub vendor: u16,
    /// The PCI device id, which the vendor assigns.
    pub device: u16,
    /// The type of the function. If configuration space does not show the type, it is derived from
    /// the place in the PCI tree.
    pub port: Port,
    /// Access Control Services (ACS) of the function.
    pub acs: Acs,
    /// The NUMA node; `None` if firmware does not report it (-1 in sysfs).
    pub numa_node: Option<u32>,
    /// Number of the IOMMU group; `None` without an IOMMU.
    pub iommu_group: Option<u32>,
    /// Name of the kernel driver that is bound to the function; `None` without one.
    pub driver: Option<String>,
    /// The PCIe link of the function. The link of a root port or downstream port leads to the
    /// device below; other links lead towards the root complex. `None` if the kernel reports no
    /// maximum speed and width.
    pub link: Option<Link>,
    /// The base address registers with a nonzero size.
    pub bars: Vec<Bar>,
    /// The parsed configuration space; `None` if it could not be read or is malformed.
    pub(super) space: Option<ConfigSpace>,
}

/// A PCIe link: its current state and the device's maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Link {
    /// Speed in gigatransfers per second; `None` if unknown or while the link is down.
    pub speed: Option<f32>,
    /// Number of lanes; `None` if unknown or while the link is down.
    pub width: Option<u8>,
    /// Maximum speed in gigatransfers per second.
    pub max_speed: Option<f32>,
    /// Maximum number of lanes.
    pub max_width: Option<u8>,
}

impl Link {
    /// Returns whether the link is known to run slower or narrower than its maximum.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        let less = |now: Option<f32>, most: Option<f32>| {
            now.zip(most).is_some_and(|(now, most)| now < most)
        };
        less(self.speed, self.max_speed)
            || less(self.width.map(f32::from), self.max_width.map(f32::from))
    }
}

/// Role of a PCI function in RDMA transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// A GPU or another accelerator. NICs may access its memory.
    Accelerator,
    /// A network controller (NIC).
    Network,
    /// A bridge, switch port or host bridge.
    Bridge,
    /// Any other function.
    Other,
}

impl Role {
    /// Returns the name of the role for output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Accelerator => "accelerator",
            Self::Network => "network",
            Self::Bridge => "bridge",
            Self::Other => "other",
        }
    }
}

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;
const INTEL: u16 = 0x8086;
const AMAZON: u16 = 0x1d0f;
const MELLANOX: u16 = 0x15b3;

/// Returns true for the device ids of Inferentia and Trainium devices. The ids are those in the
/// Neuron kernel driver.
const fn is_neuron(device: u16) -> bool {
    matches!(device, 0x7064..=0x7067 | 0x7164 | 0x7264 | 0x7364)
}

impl PciDevice {
    /// Returns the role of the function in RDMA transfers.
    ///
    /// - GPUs are display controllers (class 03xx) of NVIDIA, AMD and Intel. The VGA controller of
    ///   a management chip does not count.
    /// - Accelerators are devices of class 12xx of any vendor, and Neuron devices of any class.
    #[must_use]
    pub const fn role(&self) -> Role {
        match (self.class >> 16, self.vendor) {
            (0x03, NVIDIA | AMD | INTEL) | (0x12, _) => Role::Accelerator,
            (_, AMAZON) if is_neuron(self.device) => Role::Accelerator,
            (0x02, _) => Role::Network,
            (0x06, _) => Role::Bridge,
            _ => Role::Other,
        }
    }

    /// Returns true if NVLink-C2C joins the memory of the function and of the CPU: the GPUs of
    /// GH200, GB200 and GB300.
    ///
    /// Sysfs does not show the link, so the device id decides. The ids are those of the kernel's
    /// vfio driver for these GPUs (`drivers/vfio/pci/nvgrace-gpu`). The NUMA nodes are no
    /// criterion: NVIDIA's driver can keep the memory to itself, and then the kernel has no nodes
    /// for it.
    #[must_use]
    pub const fn has_c2c(&self) -> bool {
        self.vendor == NVIDIA && matches!(self.device, 0x2342 | 0x2345 | 0x2348 | 0x2941 | 0x31c2)
    }

    /// Returns true if the function is a GPU that uses the CPU's memory and has none of its own
    /// (GB10). NICs reach none of the memory that its driver allocates for the GPU.
    #[must_use]
    pub const fn is_integrated(&self) -> bool {
        self.vendor == NVIDIA && self.device == 0x2e12
    }

    /// Returns true if a coherent link joins the function and the CPU. The link takes the place of
    /// the function's PCIe path.
    pub(super) const fn is_coherent(&self) -> bool {
        self.has_c2c() || self.is_integrated()
    }

    /// Returns true if the function is the Data Direct function of a Mellanox NIC. The NIC sends
    /// transfers through it if the memory was registered with
    /// `MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT`.
    #[must_use]
    pub const fn is_data_direct(&self) -> bool {
        self.vendor == MELLANOX && self.device == 0x2100
    }

    /// Returns whether other devices can be below this one.
    #[must_use]
    pub const fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }

    /// Returns the size of the largest memory BAR in bytes; 0 if there is none. Other devices can
    /// access at most this many bytes of the device's memory at once.
    #[must_use]
    pub fn largest_bar(&self) -> u64 {
        self.bars
            .iter()
            .filter(|bar| bar.memory && bar.index < 6)
            .map(|bar| bar.size)
            .max()
            .unwrap_or(0)
    }

    /// Returns the vendor's name; `None` if this library does not know the vendor.
    #[must_use]
    pub const fn vendor_name(&self) -> Option<&'static str> {
        Some(match self.vendor {
            NVIDIA => "NVIDIA",
            AMD | 0x1022 => "AMD",
            INTEL => "Intel",
            MELLANOX => "Mellanox",
            0x14e4 | 0x1000 => "Broadcom",
            0x10b5 => "PLX",
            0x11f8 => "Microchip",
            AMAZON => "Amazon",
            0x1414 => "Microsoft",
            0x1af4 | 0x1b36 => "Red Hat",
            0x1da3 => "Habana",
            0x1dd8 => "Pensando",
            0x1a03 => "ASPEED",
            0x144d => "Samsung",
            0x10ec => "Realtek",
            _ => return None,
        })
    }
}

/// Place of a function in the PCI tree, parsed from a folder of `/sys/devices`.
pub(super) struct PciLocation {
    pub(super) root: RootBus,
    /// The functions from the root port to the device, which is the last one.
    pub(super) functions: Vec<BusId>,
    /// The sysfs path of the last function.
    pub(super) path: String,
}

/// Parses a path such as `sys/devices/pci0000:00/0000:00:01.0/0000:07:00.0/infiniband/mlx5_0`.
///
/// Ignores all path components before the host bridge: a platform device, a hypervisor's bus, or
/// the function above the PCI domain of a volume management device (Intel VMD).
pub(super) fn place(path: &str) -> Option<PciLocation> {
    let parts: Vec<_> = path.split('/').collect();
    let at = parts.iter().rposition(|part| RootBus::read(part).is_some())?;
    let root = RootBus::read(parts[at])?;
    let functions: Vec<_> = parts[at + 1..].iter().map_while(|part| BusId::read(part)).collect();
    let path = parts[..=at + functions.len()].join("/");
    (!functions.is_empty()).then_some(PciLocation { root, functions, path })
}

/// The sysfs folder with a link to each PCI function.
const FOLDER: &str = "sys/bus/pci/devices";

/// Maximum number of PCI functions in a recording, which bounds the work on a recording of unknown
/// origin.
const MOST_FUNCTIONS: usize = 4096;

/// Reads every PCI function.
pub(super) fn read_all(source: &Source) -> Result<BTreeMap<BusId, PciDevice>> {
    let mut devices = BTreeMap::new();
    let names = source.names(FOLDER)?.unwrap_or_default();
    if !source.is_live() && names.len() > MOST_FUNCTIONS {
        let problem = format!("more than {MOST_FUNCTIONS} PCI functions");
        return Err(source.malformed(FOLDER, problem));
    }
    for name in names {
        let path = format!("{FOLDER}/{name}");
        let Some(id) = BusId::read(&name) else {
            return Err(source.malformed(&path, "not the address of a PCI function"));
        };
        let place = place_of(source, id)?;
        devices.insert(id, read(source, id, place)?);
    }
    check_bridges(source, &devices)?;
    infer_ports(&mut devices);
    Ok(devices)
}

/// Reads the given PCI functions and the bridges above them.
pub(super) fn read_with_bridges(
    source: &Source,
    wanted: &[BusId],
) -> Result<BTreeMap<BusId, PciDevice>> {
    let mut devices = BTreeMap::new();
    for id in wanted {
        for id in place_of(source, *id)?.functions {
            if let Entry::Vacant(entry) = devices.entry(id) {
                entry.insert(read(source, id, place_of(source, id)?)?);
            }
        }
    }
    check_bridges(source, &devices)?;
    infer_ports(&mut devices);
    Ok(devices)
}

/// Follows the link of a function and returns its place in the PCI tree.
fn place_of(source: &Source, id: BusId) -> Result<PciLocation> {
    let path = format!("{FOLDER}/{id}");
    let target =
        source.link(&path)?.ok_or_else(|| source.malformed(&path, "not a link to a device"))?;
    let Some(place) = place(&target) else {
        return Err(source.malformed(
            &path,
            format_args!("a link that leads to no place in a PCI tree: {target:.200}"),
        ));
    };
    if place.functions.last() != Some(&id) || place.path != target {
        return Err(
            source.malformed(&path, format_args!("a link to another device: {target:.200}"))
        );
    }
    if place.functions.len() > DEEPEST {
        return Err(source.malformed(
            &path,
            format_args!("more than {DEEPEST} functions from the root port to the device"),
        ));
    }
    Ok(place)
}

/// Checks that each bridge has the place that the paths of the devices below it imply.
fn check_bridges(source: &Source, devices: &BTreeMap<BusId, PciDevice>) -> Result<()> {
    for device in devices.values() {
        let path = format!("{FOLDER}/{}", device.bus_id);
        for (depth, bridge) in device.bridges.iter().enumerate() {
            match devices.get(bridge) {
                None => return Err(source.vanished(&format!("{FOLDER}/{bridge}"))),
                Some(found)
                    if found.bridges != device.bridges[..depth] || found.root != device.root =>
                {
                    return Err(
                        source.malformed(&path, format_args!("{bridge} is elsewhere in the tree"))
                    );
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// Derives missing port types from the place in the PCI tree. From the host bridge down, the
/// bridges are a root port, then upstream and downstream ports alternately.
fn infer_ports(devices: &mut BTreeMap<BusId, PciDevice>) {
    let mut order: Vec<_> =
        devices.values().map(|device| (device.bridges.len(), device.bus_id)).collect();
    order.sort_unstable();
    for (depth, id) in order {
        let above = devices[&id].bridges.last().map(|above| devices[above].port);
        let Some(device) = devices.get_mut(&id) else { continue };
        if device.space.and_then(|space| space.port).is_some() {
            continue;
        }
        device.port = match above {
            _ if !device.is_bridge() => Port::Endpoint,
            None if depth == 0 => Port::RootPort,
            Some(Port::RootPort | Port::Downstream) => Port::Upstream,
            Some(Port::Upstream) => Port::Downstream,
            _ => Port::Bridge,
        };
    }
}

fn read(source: &Source, bus_id: BusId, mut place: PciLocation) -> Result<PciDevice> {
    let at = |name: &str| format!("{}/{name}", place.path);
    let class = hex(source, &at("class"))?;
    let [vendor, device] = ["vendor", "device"].map(|name| {
        let path = at(name);
        let number = hex(source, &path)?;
        u16::try_from(number).map_err(|_| source.malformed(&path, "more than 16 bits"))
    });
    let (vendor, device) = (vendor?, device?);
    if class > 0xff_ffff {
        return Err(source.malformed(&at("class"), "more than 24 bits"));
    }
    let config = at("config");
    let space = match source.words(&config)? {
        Some(words) => source.parsed_or_skipped(&config, config_space::read(|at| words.at(at)))?,
        None => None,
    };
    let bars = source.parsed(&at("resource"), bars::read)?.unwrap_or_default();
    let last_part = |name: &str| -> Result<Option<String>> {
        Ok(source.link(&at(name))?.and_then(|target| target.rsplit('/').next().map(str::to_owned)))
    };
    let driver = last_part("driver")?.filter(|driver| is_word(driver));
    let iommu_group = match last_part("iommu_group")? {
        Some(number) => Some(number.parse().map_err(|_| {
            source.malformed(&at("iommu_group"), "a link that leads to no IOMMU group")
        })?),
        None => None,
    };
    let numa = at("numa_node");
    let numa_node = match source.text(&numa)?.as_deref() {
        None | Some("-1") => None,
        Some(node) => {
            let number = node.parse().ok().filter(|number| *number < super::numa::MOST_NODES);
            Some(number.ok_or_else(|| {
                source.malformed(&numa, format_args!("not a NUMA node: {node:.40}"))
            })?)
        }
    };
    let speed = |name: &str| source.parsed(&at(name), speed).map(Option::flatten);
    let width = |name: &str| source.parsed(&at(name), width).map(Option::flatten);
    let link = Link {
        speed: speed("current_link_speed")?,
        width: width("current_link_width")?,
        max_speed: speed("max_link_speed")?,
        max_width: width("max_link_width")?,
    };
    let link = (link.max_speed.is_some() && link.max_width.is_some()).then_some(link);
    place.functions.pop();
    Ok(PciDevice {
        bus_id,
        root: place.root,
        bridges: place.functions,
        class,
        vendor,
        device,
        port: space.and_then(|space| space.port).unwrap_or(Port::Endpoint),
        acs: space.map_or(Acs::Unreadable, |space| space.acs),
        numa_node,
        iommu_group,
        driver,
        link,
        bars,
        space,
    })
}

/// Returns whether `text` can be the name of a driver or module.
pub(super) fn is_word(text: &str) -> bool {
    !text.is_empty()
        && text.len() < 64
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

/// Reads a hexadecimal number from a required file.
fn hex(source: &Source, path: &str) -> Result<u32> {
    let text = source.needed(path)?;
    let digits = text
        .strip_prefix("0x")
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    digits
        .and_then(|digits| u32::from_str_radix(digits, 16).ok())
        .ok_or_else(|| source.malformed(path, format_args!("not a hexadecimal number: {text:.40}")))
}

/// Parses `16.0 GT/s PCIe`, `8 GT/s`, or `Unknown` for a link that is down.
fn speed(text: &str) -> Result<Option<f32>, String> {
    if text.starts_with("Unknown") {
        return Ok(None);
    }
    let number = text.split_once(" GT/s").and_then(|(number, _)| number.parse::<f32>().ok());
    match number.filter(|speed| (0.1..=1024.0).contains(speed)) {
        Some(speed) => Ok(Some(speed)),
        None => Err(format!("not a link speed: {text:.40}")),
    }
}

/// Parses a number of lanes. The values 0, 255 and 63 mean no link; a device that does not respond
/// gives 63, as the field has six bits.
fn width(text: &str) -> Result<Option<u8>, String> {
    match text.parse::<u8>() {
        Ok(0 | 63 | 255) => Ok(None),
        Ok(width @ 1..=32) => Ok(Some(width)),
        _ => Err(format!("not a link width: {text:.40}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::{super::source::SourceEntry, *};

    #[test]
    fn absurd_links_are_refused() {
        assert_eq!(speed("16.0 GT/s PCIe"), Ok(Some(16.0)));
        assert_eq!(speed("Unknown"), Ok(None));
        assert!(speed("NaN GT/s").is_err() && speed("-1 GT/s").is_err() && speed("fast").is_err());
        assert_eq!((width("16"), width("255"), width("63")), (Ok(Some(16)), Ok(None), Ok(None)));
        assert!(width("33").is_err() && width("-1").is_err());
    }

    #[test]
    fn places_begin_at_the_host_bridge() {
        let path =
            "sys/devices/LNXSYSTM:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0/infiniband/x";
        let found = place(path).unwrap();
        assert_eq!(found.root.to_string(), "pci0001:00");
        assert_eq!(found.functions.len(), 1);
        assert!(found.path.ends_with("pci0001:00/0001:00:00.0"));
        let vmd =
            place("sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0")
                .unwrap();
        assert_eq!((vmd.root.to_string().as_str(), vmd.functions.len()), ("pci10000:e0", 2));
        assert!(place("sys/devices/virtual/infiniband/rxe0").is_none());
        assert!(place("sys/devices/pci0000:00").is_none());
    }

    #[test]
    fn recording_with_too_many_functions_is_refused() {
        let entry = |nth: usize| {
            let path = format!("{FOLDER}/{nth:04x}:00:00.0");
            (path, SourceEntry::Link("nowhere".into()))
        };
        for (count, problem) in [(4096, "0000:00:00.0"), (4097, "more than 4096 PCI functions")] {
            let entries = (0..count).map(entry).collect();
            let error = read_all(&Source::Archive { name: "test".into(), entries }).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
        }
    }

    #[test]
    fn malformed_device_hides_no_other_on_a_live_machine() {
        let root = std::env::temp_dir().join(format!("hmem-odd-device-{}", std::process::id()));
        let folder = root.join("sys/devices/pci0000:00/0000:00:01.0");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(root.join(FOLDER)).unwrap();
        let link = root.join(FOLDER).join("0000:00:01.0");
        std::os::unix::fs::symlink("../../../devices/pci0000:00/0000:00:01.0", link).unwrap();
        let mut looped = vec![0; 256];
        (looped[6], looped[0x34], looped[0x40], looped[0x41]) = (0x10, 0x40, 1, 0x40);
        let files: [(&str, &[u8]); 8] = [
            ("class", b"0x020700"),
            ("vendor", b"0x15b3"),
            ("device", b"0x101b"),
            ("config", &looped),
            ("resource", b"0x5 0x2 0x200"),
            ("current_link_width", b"99"),
            ("max_link_width", b"16"),
            ("max_link_speed", b"16.0 GT/s PCIe"),
        ];
        for (name, bytes) in files {
            fs::write(folder.join(name), bytes).unwrap();
        }
        let read = |live| read_all(&Source::Folder { root: root.clone(), live });
        let (live, recorded) = (read(true), read(false));
        fs::remove_dir_all(&root).unwrap();
        let live = live.unwrap();
        let device = live.values().next().unwrap();
        assert_eq!(
            (device.acs, device.bars.len()),
            (Acs::Unreadable, 0),
            "an unknown value is left out"
        );
        assert_eq!(device.link.unwrap().width, None);
        assert!(recorded.unwrap_err().to_string().contains("0000:00:01.0/config"));
    }

    proptest! {
        /// REL-03: the parsers of link speeds, lane numbers and sysfs paths return for any text and
        /// do not panic.
        #[test]
        fn arbitrary_text_does_not_panic(text in ".{0,200}") {
            let _ = speed(&text);
            let _ = width(&text);
            let _ = place(&text);
        }
    }
}
