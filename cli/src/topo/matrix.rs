//! A table of distances from accelerators to NICs.

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

use hmem::p2p::topology::{BusId, Distance, Redirection, Topology};

use super::report::{nic_functions, nic_names};
use crate::table::{Cell, Style, Table, Tone, abbreviated, grouped};

/// Returns the tone in which a distance is printed.
const fn tone(distance: Distance) -> Tone {
    match distance {
        Distance::Same | Distance::Pix | Distance::Pxb => Tone::Good,
        Distance::Phb => Tone::Plain,
        Distance::Node | Distance::Sys => Tone::Dim,
    }
}

/// Prints the table of distances, its legend, and the nearest NICs of each device.
pub(super) fn print(out: &mut dyn Write, topology: &Topology, style: Style) -> io::Result<()> {
    let accelerators: Vec<_> = topology.accelerators().map(|device| device.bus_id).collect();
    let nics = nic_functions(topology);
    style.heading(out, "Distances")?;
    let software = topology.rdma().iter().filter(|device| device.bus_id.is_none());
    let software: Vec<_> = software.map(|device| device.name.clone()).collect();
    if !software.is_empty() {
        style.item(out, "without PCI address:", &abbreviated(&software))?;
    }
    match (accelerators.is_empty(), nics.is_empty()) {
        (true, true) => {
            let text = "no GPU or accelerator, and no RDMA NIC with a PCI address";
            style.indented(out, ["", ""], text)?;
            return writeln!(out);
        }
        (true, false) => return writeln!(out, "no GPU or accelerator\n"),
        (false, true) => return writeln!(out, "no RDMA NIC with a PCI address\n"),
        (false, false) => {}
    }
    let mut seen = BTreeSet::new();
    let mut redirected: Vec<String> = Vec::new();
    let columns: Vec<_> =
        nics.iter().map(|nic| (*nic, nic_names(topology, *nic).join("+"))).collect();
    for columns in parts(&columns, style.width) {
        let names = columns.iter().map(|(_, name)| name.as_str());
        let mut table = Table::new(&std::iter::once("").chain(names).collect::<Vec<_>>());
        for device in &accelerators {
            let distance = |(nic, name): &(BusId, String)| {
                let Some(path) = topology.path(*device, *nic) else { return Cell::none() };
                seen.insert(path.distance);
                let by = matches!(path.redirection, Redirection::By(_));
                if by {
                    redirected.push(format!("{device} to {name}"));
                }
                let mark = if by { "*" } else { "" };
                Cell::in_tone(format!("{}{mark}", path.distance), tone(path.distance))
            };
            table.row([Cell::new(device)].into_iter().chain(columns.iter().map(distance)));
        }
        style.print(out, &table)?;
    }
    for distance in seen {
        style.item(out, &format!("{distance}:"), distance.meaning())?;
    }
    if !redirected.is_empty() {
        let pairs = abbreviated(&redirected);
        let text = format!("ACS redirects the traffic to the root complex ({pairs})");
        style.item(out, "*:", &text)?;
    }
    nearest(out, topology, &accelerators, style)?;
    writeln!(out)
}

/// Width of the first column, including its indent. It has PCI addresses such as `0000:3b:00.0`.
const DEVICE: usize = 14;

/// Splits the columns of NICs into groups whose tables each fit into lines of `line` characters. If
/// one column alone does not fit, returns all columns as one group, which is printed as lists.
fn parts(columns: &[(BusId, String)], line: usize) -> Vec<&[(BusId, String)]> {
    // No distance is wider than `NODE*`.
    let width = |name: &str| 1 + name.chars().count().max(5);
    if columns.iter().any(|(_, name)| DEVICE + width(name) > line) {
        return vec![columns];
    }
    let mut used = DEVICE;
    let parts = columns.chunk_by(|(_, name), (_, next)| {
        used += width(name);
        let fits = used + width(next) <= line;
        used = if fits { used } else { DEVICE };
        fits
    });
    parts.collect()
}

/// Prints the nearest NICs of each device, unless all NICs are equally near.
fn nearest(
    out: &mut dyn Write,
    topology: &Topology,
    devices: &[BusId],
    style: Style,
) -> io::Result<()> {
    let near = devices.iter().filter_map(|device| {
        let (nearest, all) = (topology.nearest_nics(*device), topology.nics_by_distance(*device));
        let names = nearest.iter().flat_map(|(nic, _)| nic_names(topology, *nic));
        (nearest.len() < all.len()).then(|| (names.collect::<Vec<_>>(), device.to_string()))
    });
    for (nics, devices) in grouped(near) {
        style.item(out, &format!("nearest to {}:", devices.join(", ")), &nics.join(", "))?;
    }
    Ok(())
}
