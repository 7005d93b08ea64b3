//! The topology as JSON (`docs/topo-schema.md`).

use std::collections::BTreeMap;

use hmem::p2p::topology::{
    Acs, BusId, Kernel, PciDevice, PciPath, RdmaDevice, Redirection, Topology,
};
use serde::Serialize;

use crate::json::SCHEMA;

/// The wiring of a machine.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The version of `hmem` that printed the document.
    pub version: &'static str,
    /// The path of the recording that was read; null for this machine.
    pub from: Option<String>,
    /// The properties of the kernel.
    pub kernel: KernelEntry,
    /// The mode of the IOMMU.
    pub iommu: &'static str,
    /// The NUMA nodes.
    pub numa: Vec<NodeEntry>,
    /// Every PCI function.
    pub functions: Vec<FunctionEntry>,
    /// The RDMA devices of the machine.
    pub nics: Vec<RdmaEntry>,
    /// The PCIe paths between accelerators, and from them to RDMA devices.
    pub paths: Vec<PathEntry>,
}

/// The properties of the kernel that decide paths.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KernelEntry {
    /// The kernel release, as `uname -r` prints it; null if unknown.
    pub release: Option<String>,
    /// The words of the kernel command line that affect access of NICs to device memory.
    pub command_line: Vec<String>,
    /// Options of the kernel configuration that are set and affect access of NICs to device memory;
    /// null if the configuration cannot be read.
    pub options: Option<BTreeMap<String, &'static str>>,
    /// The loaded or built-in kernel modules that affect access of NICs to device memory.
    pub modules: Vec<String>,
    /// The peer-memory modules of the kernel, with which NICs register device memory by address.
    pub peer_memory: Vec<String>,
    /// The NVIDIA kernel driver; null if it is not loaded.
    pub nvidia: Option<NvidiaEntry>,
}

/// The version and variant of the NVIDIA kernel driver.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NvidiaEntry {
    /// The version of the driver.
    pub version: String,
    /// True if the open kernel modules are loaded.
    pub open: bool,
}

/// A NUMA node and its processors.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NodeEntry {
    /// The number of the node.
    pub node: u32,
    /// The processors of the node, as a list of ranges; empty for a node without processors.
    pub cpus: String,
    /// True if the node has memory; null if the kernel does not report it.
    pub memory: Option<bool>,
}

/// The properties of a PCI function and its place in the PCIe tree.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FunctionEntry {
    /// The PCI address of the function.
    pub pci_bus_id: String,
    /// The PCI host bridge above the function.
    pub host_bridge: String,
    /// The bridges above the function, from the root port down.
    pub bridges: Vec<String>,
    /// The role of the function for this library, such as accelerator or NIC.
    pub role: &'static str,
    /// The kind of PCIe port, such as `root-port` or `endpoint`.
    pub port: &'static str,
    /// The PCI class of the function, as in sysfs.
    pub class: String,
    /// The PCI vendor and device ids.
    pub id: String,
    /// The name of the vendor; null if unknown.
    pub vendor: Option<&'static str>,
    /// The kernel driver that is bound to the function; null if none is.
    pub driver: Option<String>,
    /// The NUMA node of the function; null if the firmware does not report it.
    pub numa_node: Option<u32>,
    /// The number of the function's IOMMU group; null without an IOMMU.
    pub iommu_group: Option<u32>,
    /// The type of the function's IOMMU group, as in sysfs; null if unknown.
    pub iommu_type: Option<String>,
    /// The state of Access Control Services (ACS): `present`, `absent` or `unreadable`. ACS can
    /// redirect traffic between devices.
    pub acs: &'static str,
    /// The ACS bits that are set.
    pub acs_control: Vec<&'static str>,
    /// The PCIe link of the function; null if there is none. The link of a root port or downstream
    /// port leads to the device below. Other links lead towards the root complex.
    pub link: Option<LinkEntry>,
    /// The coherent link between the function and the processor: `NVLink-C2C`, or `integrated` for
    /// a device that uses the processor's memory; null if there is none.
    pub coherent_link: Option<&'static str>,
    /// The base address registers of the function.
    pub bars: Vec<BarEntry>,
}

/// The speed and width of a PCIe link.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LinkEntry {
    /// The current speed, in gigatransfers per second; null while the link is down.
    pub speed: Option<f64>,
    /// The current number of lanes; null while the link is down.
    pub width: Option<u8>,
    /// The highest speed of the device, in gigatransfers per second; null if unknown.
    pub max_speed: Option<f64>,
    /// The maximum number of lanes of the device; null if unknown.
    pub max_width: Option<u8>,
}

/// A base address register (BAR) of a PCI function.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BarEntry {
    /// The number of the BAR.
    pub index: u8,
    /// The size of the address range, in bytes.
    pub size: u64,
    /// The address space of the BAR: `memory` or `ports`.
    pub kind: &'static str,
    /// True if the BAR has a 64-bit address.
    pub wide: bool,
    /// True if the processor may prefetch from the BAR.
    pub prefetchable: bool,
}

/// An RDMA device, its ports and its nearest accelerators.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RdmaEntry {
    /// The name of the RDMA device.
    pub name: String,
    /// The PCI address of the device; null for a software device.
    pub pci_bus_id: Option<String>,
    /// The ports of the device.
    pub ports: Vec<PortEntry>,
    /// The PCI addresses of the nearest accelerators.
    pub nearest: Vec<String>,
}

/// The state of one port of an RDMA device.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PortEntry {
    /// The number of the port.
    pub port: u32,
    /// The link layer: `InfiniBand` or `Ethernet`; null if unknown.
    pub link_layer: Option<String>,
    /// True if the port is active; null if unknown.
    pub active: Option<bool>,
    /// The data rate of the port, in gigabits per second; null if unknown.
    pub rate: Option<u32>,
}

/// The PCIe path between two functions, with its ends.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathEntry {
    /// The PCI address of the accelerator at one end of the PCIe route.
    pub from: String,
    /// The PCI address of the function at the other end of the PCIe route.
    pub to: String,
    /// The names of the RDMA devices at the other end; empty for an accelerator.
    pub nics: Vec<String>,
    /// The PCIe path between the two functions.
    #[serde(flatten)]
    pub topo_path: TopoPathEntry,
}

/// A PCIe path between two functions, with its distance and steps.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TopoPathEntry {
    /// The distance, as `nvidia-smi topo` names it.
    pub distance: &'static str,
    /// True if the distance is a guess, since a NUMA node is unknown.
    pub numa_unknown: bool,
    /// The steps of the path from one function to the other, in words.
    pub hops: Vec<String>,
    /// The redirection of traffic to the root complex by ACS: `none`, `by-ports` or `unknown`.
    pub redirection: &'static str,
    /// The ports that redirect traffic, or whose ACS state cannot be read.
    pub ports: Vec<String>,
}

fn texts<T: ToString>(items: &[T]) -> Vec<String> {
    items.iter().map(ToString::to_string).collect()
}

impl Report {
    /// Returns the report of a topology.
    pub(super) fn new(topology: &Topology, from: Option<String>) -> Self {
        let nodes = topology.numa().iter();
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            from,
            kernel: kernel(topology.kernel()),
            iommu: topology.iommu().name(),
            numa: nodes
                .map(|node| NodeEntry {
                    node: node.id,
                    cpus: node.cpus.clone(),
                    memory: node.memory,
                })
                .collect(),
            functions: topology.devices().map(|device| function(topology, device)).collect(),
            nics: topology.rdma().iter().map(|device| rdma(topology, device)).collect(),
            paths: paths(topology),
        }
    }
}

fn kernel(kernel: &Kernel) -> KernelEntry {
    let options = kernel.options.iter().flatten();
    let options = options.map(|(name, setting)| (name.clone(), setting.name()));
    let nvidia = kernel.nvidia.as_ref();
    KernelEntry {
        release: kernel.release.clone(),
        command_line: kernel.command_line.clone(),
        options: kernel.options.is_some().then(|| options.collect()),
        modules: kernel.modules.clone(),
        peer_memory: kernel.peer_memory().map(str::to_owned).collect(),
        nvidia: nvidia
            .map(|driver| NvidiaEntry { version: driver.version.clone(), open: driver.open }),
    }
}

fn function(topology: &Topology, device: &PciDevice) -> FunctionEntry {
    let (acs, acs_control) = match device.acs {
        Acs::Unreadable => ("unreadable", Vec::new()),
        Acs::Absent => ("absent", Vec::new()),
        Acs::Control(control) => ("present", control.names().collect()),
    };
    let iommu_type = device.iommu_group.and_then(|group| topology.group_type(group));
    let bars = device.bars.iter().map(|bar| BarEntry {
        index: bar.index,
        size: bar.size,
        kind: if bar.memory { "memory" } else { "ports" },
        wide: bar.wide,
        prefetchable: bar.prefetchable,
    });
    FunctionEntry {
        pci_bus_id: device.bus_id.to_string(),
        host_bridge: device.root.to_string(),
        bridges: texts(&device.bridges),
        role: device.role().name(),
        port: device.port.name(),
        class: format!("0x{:06x}", device.class),
        id: format!("{:04x}:{:04x}", device.vendor, device.device),
        vendor: device.vendor_name(),
        driver: device.driver.clone(),
        numa_node: device.numa_node,
        iommu_group: device.iommu_group,
        iommu_type: iommu_type.map(str::to_owned),
        acs,
        acs_control,
        link: device.link.map(|link| LinkEntry {
            speed: link.speed.map(f64::from),
            width: link.width,
            max_speed: link.max_speed.map(f64::from),
            max_width: link.max_width,
        }),
        coherent_link: coherent_link(device),
        bars: bars.collect(),
    }
}

/// Returns the name of the coherent link between a function and the processor.
pub(super) const fn coherent_link(device: &PciDevice) -> Option<&'static str> {
    if device.has_c2c() {
        return Some("NVLink-C2C");
    }
    if device.is_integrated() { Some("integrated") } else { None }
}

fn rdma(topology: &Topology, device: &RdmaDevice) -> RdmaEntry {
    let ports = device.ports.iter().map(|port| PortEntry {
        port: port.number,
        link_layer: port.link_layer.clone(),
        active: port.active,
        rate: port.rate,
    });
    let nearest = device.bus_id.map(|id| topology.nearest_accelerators(id)).unwrap_or_default();
    RdmaEntry {
        name: device.name.clone(),
        pci_bus_id: device.bus_id.map(|id| id.to_string()),
        ports: ports.collect(),
        nearest: nearest.iter().map(|(id, _)| id.to_string()).collect(),
    }
}

/// Returns each PCI function with RDMA devices once, in the order of the names of the devices.
pub(crate) fn nic_functions(topology: &Topology) -> Vec<BusId> {
    let mut functions: Vec<BusId> = Vec::new();
    for id in topology.rdma().iter().filter_map(|device| device.bus_id) {
        if topology.device(id).is_some() && !functions.contains(&id) {
            functions.push(id);
        }
    }
    functions
}

/// Returns the names of the RDMA devices of a function.
pub(crate) fn nic_names(topology: &Topology, id: BusId) -> Vec<String> {
    topology.rdma_at(id).map(|device| device.name.clone()).collect()
}

fn paths(topology: &Topology) -> Vec<PathEntry> {
    let accelerators: Vec<_> = topology.accelerators().map(|device| device.bus_id).collect();
    let nics = nic_functions(topology);
    let mut entries = Vec::new();
    for (at, from) in accelerators.iter().enumerate() {
        for to in accelerators[at + 1..].iter().chain(&nics) {
            entries.extend(topology.path(*from, *to).map(|path| PathEntry {
                from: from.to_string(),
                to: to.to_string(),
                nics: nic_names(topology, *to),
                topo_path: TopoPathEntry::new(&path),
            }));
        }
    }
    entries
}

impl TopoPathEntry {
    /// Returns the entry of a PCIe path.
    pub(crate) fn new(path: &PciPath) -> Self {
        let (redirection, ports) = match &path.redirection {
            Redirection::None => ("none", Vec::new()),
            Redirection::By(ports) => ("by-ports", texts(ports)),
            Redirection::Unknown(ports) => ("unknown", texts(ports)),
        };
        Self {
            distance: path.distance.name(),
            numa_unknown: path.numa_unknown,
            hops: texts(&path.hops),
            redirection,
            ports,
        }
    }
}
