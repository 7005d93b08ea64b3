//! The PCIe tree, drawn with branches.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use hmem::p2p::topology::{BusId, PciDevice, Port, Role, RootBus, Topology};

use super::report::{coherent_link, nic_names};
use crate::table::{Style, Tone, bytes};

/// The PCI functions of a topology, for printing as a tree.
struct Tree<'a> {
    topology: &'a Topology,
    style: Style,
    /// True to print all functions, not only accelerators, network controllers and their bridges.
    all: bool,
    /// The functions directly below each function.
    below: BTreeMap<BusId, Vec<&'a PciDevice>>,
}

/// Prints the tree. Without `all`, functions other than accelerators, network controllers and their
/// bridges are only counted.
pub(super) fn print(
    out: &mut dyn Write,
    topology: &Topology,
    all: bool,
    style: Style,
) -> io::Result<()> {
    let mut below: BTreeMap<BusId, Vec<&PciDevice>> = BTreeMap::new();
    let mut roots: BTreeMap<RootBus, Vec<&PciDevice>> = BTreeMap::new();
    for device in topology.devices() {
        match device.bridges.last() {
            Some(bridge) => below.entry(*bridge).or_default().push(device),
            None => roots.entry(device.root).or_default().push(device),
        }
    }
    style.heading(out, "PCIe tree")?;
    if roots.is_empty() {
        return writeln!(out, "no PCI function\n");
    }
    let tree = Tree { topology, style, all, below };
    let mut hidden = 0;
    for (root, devices) in &roots {
        let shown: Vec<_> = devices.iter().copied().filter(|device| tree.shows(device)).collect();
        hidden += devices.iter().map(|device| tree.hidden(device)).sum::<usize>();
        if shown.is_empty() {
            continue;
        }
        style.indented(out, ["", "  "], &format!("{root}{}", tree.node_of(devices)))?;
        for (at, device) in shown.iter().enumerate() {
            tree.print(out, device, "", at + 1 == shown.len())?;
        }
    }
    if hidden > 0 {
        let functions = if hidden == 1 { "function" } else { "functions" };
        let text = format!("and {hidden} other {functions} (--all)");
        writeln!(out, "{}", style.word(&text, Tone::Dim))?;
    }
    writeln!(out)
}

impl Tree<'_> {
    fn below(&self, device: &PciDevice) -> &[&PciDevice] {
        self.below.get(&device.bus_id).map_or(&[], Vec::as_slice)
    }

    /// Returns those functions directly below `device` that the tree shows.
    fn shown_below(&self, device: &PciDevice) -> Vec<&PciDevice> {
        self.below(device).iter().copied().filter(|device| self.shows(device)).collect()
    }

    /// Returns whether the tree shows this function or a function below it.
    fn shows(&self, device: &PciDevice) -> bool {
        self.all
            || matches!(device.role(), Role::Accelerator | Role::Network)
            || self.topology.rdma_at(device.bus_id).next().is_some()
            || self.below(device).iter().any(|device| self.shows(device))
    }

    /// Counts the functions that the tree does not show among `device` and all functions below it.
    fn hidden(&self, device: &PciDevice) -> usize {
        usize::from(!self.shows(device))
            + self.below(device).iter().map(|below| self.hidden(below)).sum::<usize>()
    }

    /// Describes the NUMA node of a host bridge, taken from the PCI functions below the bridge.
    fn node_of(&self, devices: &[&PciDevice]) -> String {
        let Some(node) = devices.iter().find_map(|device| device.numa_node) else {
            return " (NUMA node unknown)".to_owned();
        };
        match self.topology.numa().iter().find(|numa| numa.id == node) {
            Some(numa) if !numa.cpus.is_empty() => {
                format!(" (NUMA node {node}, CPUs {})", numa.cpus)
            }
            _ => format!(" (NUMA node {node})"),
        }
    }

    /// Prints a function and the functions below it. `last` is true if no function at the same
    /// level follows.
    fn print(
        &self,
        out: &mut dyn Write,
        device: &PciDevice,
        indent: &str,
        last: bool,
    ) -> io::Result<()> {
        let branch = if last { "\u{2514}\u{2500} " } else { "\u{251c}\u{2500} " };
        // A port with a single function below it is printed on the line of that function.
        let mut ports = String::new();
        let mut device = device;
        while matches!(device.port, Port::RootPort | Port::Downstream) {
            let shown = self.shown_below(device);
            let [only] = shown.as_slice() else { break };
            ports.push_str(&self.port(device));
            ports.push_str(" \u{2192} ");
            device = only;
        }
        let first = format!("{indent}{branch}");
        let indent = format!("{indent}{}", if last { "   " } else { "\u{2502}  " });
        let shown = self.shown_below(device);
        let next = format!("{indent}{}", if shown.is_empty() { "  " } else { "\u{2502} " });
        let text = format!("{ports}{}", self.describe(device));
        self.style.indented(out, [&first, &next], &text)?;
        for (at, below) in shown.iter().enumerate() {
            self.print(out, below, &indent, at + 1 == shown.len())?;
        }
        Ok(())
    }

    /// Returns the address of a port, followed by `ACS` if ACS redirects traffic at the port.
    fn port(&self, device: &PciDevice) -> String {
        let address = self.style.word(&short(device.bus_id), Tone::Dim);
        match device.acs.redirects() {
            Some(true) => format!("{address} {}", self.style.word("ACS", Tone::Bad)),
            _ => address,
        }
    }

    /// Describes a function on one line.
    fn describe(&self, device: &PciDevice) -> String {
        let nics = nic_names(self.topology, device.bus_id);
        let kind = match (device.port, device.role()) {
            (Port::RootPort, _) => return format!("{} root port", self.port(device)),
            (Port::Downstream, _) => return format!("{} switch port", self.port(device)),
            (Port::Upstream, _) => "switch".to_owned(),
            (Port::Bridge, _) => "bridge".to_owned(),
            (_, Role::Accelerator) if device.class >> 16 == 0x03 => "GPU".to_owned(),
            (_, Role::Accelerator) => "accelerator".to_owned(),
            _ if !nics.is_empty() => format!("NIC {}", nics.join(", ")),
            (_, Role::Network) => "network, no RDMA".to_owned(),
            _ => format!("class 0x{:06x}", device.class),
        };
        let vendor = device.vendor_name().map(|vendor| format!(" {vendor}")).unwrap_or_default();
        if device.role() != Role::Accelerator && nics.is_empty() {
            let link = self.link(device, true).map(|link| format!(", {link}")).unwrap_or_default();
            return format!("{} {kind}{vendor}{link}", short(device.bus_id));
        }
        let mut words = vec![format!(
            "{} {}{vendor} {:04x}:{:04x}",
            device.bus_id,
            self.style.word(&kind, Tone::Good),
            device.vendor,
            device.device
        )];
        words.extend(coherent_link(device).map(str::to_owned));
        if device.largest_bar() > 0 {
            words.push(format!("BAR {}", bytes(device.largest_bar())));
        }
        words.extend(self.link(device, false));
        if let Some(group) = device.iommu_group {
            words.push(format!("IOMMU group {group}"));
        }
        words.extend(device.driver.clone());
        words.join(", ")
    }

    /// Describes the link of a function. Returns `None` if the function has no link, or if
    /// `only_if_degraded` is true and the link has its full speed and width.
    fn link(&self, device: &PciDevice, only_if_degraded: bool) -> Option<String> {
        let link = device.link?;
        let of =
            |speed: Option<f32>, width: Option<u8>| Some(format!("{} GT/s x{}", speed?, width?));
        let now = of(link.speed, link.width).unwrap_or_else(|| "link down".to_owned());
        if link.is_degraded() {
            let most = of(link.max_speed, link.max_width)?;
            return Some(self.style.word(&format!("{now} of {most}"), Tone::Bad));
        }
        (!only_if_degraded).then_some(now)
    }
}

/// Formats an address without its PCI domain. The tree prints the domain with the host bridge.
fn short(id: BusId) -> String {
    format!("{:02x}:{:02x}.{:x}", id.bus, id.device, id.function)
}
