//! A table of distances from accelerators to NICs.

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

use hmem::p2p::topology::{BusId, Distance, Redirection, Topology};

use super::report::{nic_functions, nic_names};
use crate::table::{Style, Tone, abbreviated};

/// Returns the tone in which a distance is printed.
pub(crate) const fn tone(distance: Distance) -> Tone {
    match distance {
        Distance::Same | Distance::Pix | Distance::Pxb => Tone::Good,
        Distance::Phb => Tone::Plain,
        Distance::Node | Distance::Sys => Tone::Dim,
    }
}

/// Prints the table of distances, its legend, and the nearest NICs of each device.
///
/// # Errors
/// Fails if writing to `out` fails.
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
    let names: Vec<_> = nics.iter().map(|nic| nic_names(topology, *nic).join("+")).collect();
    let columns: Vec<_> = nics.iter().zip(&names).collect();
    let narrow = names.iter().any(|name| 3 + DEVICE + width(name) > style.width());
    let parts = if narrow { Vec::new() } else { fitting(&columns, style.width()) };
    if narrow {
        for device in &accelerators {
            let mut distances = Vec::new();
            for (nic, name) in &columns {
                let Some(path) = topology.path(*device, **nic) else { continue };
                seen.insert(path.distance);
                let by = matches!(path.redirection, Redirection::By(_));
                if by {
                    redirected.push(format!("{device} to {name}"));
                }
                distances.push(format!("{name} {}{}", path.distance, if by { "*" } else { "" }));
            }
            style.item(out, &format!("{device}:"), &distances.join(", "))?;
        }
        writeln!(out)?;
    }
    for columns in parts {
        let head: String =
            columns.iter().map(|(_, name)| format!(" {name:<0$}", width(name))).collect();
        writeln!(out, "{}", format!("  {:DEVICE$}{head}", "").trim_end())?;
        for device in &accelerators {
            let mut line = format!("  {:DEVICE$}", device.to_string());
            for (nic, name) in columns {
                let Some(path) = topology.path(*device, **nic) else { continue };
                seen.insert(path.distance);
                let by = matches!(path.redirection, Redirection::By(_));
                if by {
                    redirected.push(format!("{device} to {name}"));
                }
                let text = format!("{}{}", path.distance, if by { "*" } else { "" });
                let blanks = " ".repeat(width(name) - text.len());
                line.push_str(&format!(" {}{blanks}", style.word(&text, tone(path.distance))));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        writeln!(out)?;
    }
    for distance in seen {
        style.item(out, &format!("{distance}:"), distance.meaning())?;
    }
    if !redirected.is_empty() {
        style.item(
            out,
            "*:",
            &format!(
                "ACS redirects the traffic to the root complex ({})",
                abbreviated(&redirected)
            ),
        )?;
    }
    nearest(out, topology, &accelerators, style)?;
    writeln!(out)
}

/// The column width of a PCI address such as `0000:3b:00.0`, with a space.
const DEVICE: usize = 13;

/// Returns the width of a NIC's column: the length of its name, and at least that of `NODE*`.
fn width(name: &str) -> usize {
    name.chars().count().max(5)
}

/// Splits the columns into parts that each fit into a line.
fn fitting<'a, 'b>(
    columns: &'a [(&'b BusId, &'b String)],
    line: usize,
) -> Vec<&'a [(&'b BusId, &'b String)]> {
    let (mut parts, mut first, mut used) = (Vec::new(), 0, DEVICE + 2);
    for (at, (_, name)) in columns.iter().enumerate() {
        let more = width(name) + 1;
        if used + more > line && at > first {
            parts.push(&columns[first..at]);
            (first, used) = (at, DEVICE + 2);
        }
        used += more;
    }
    parts.push(&columns[first..]);
    parts
}

/// Prints the nearest NICs of each device, unless all NICs are equally near.
fn nearest(
    out: &mut dyn Write,
    topology: &Topology,
    devices: &[BusId],
    style: Style,
) -> io::Result<()> {
    let mut near: Vec<(Vec<String>, Vec<String>)> = Vec::new();
    for device in devices {
        let (nearest, all) = (topology.nearest_nics(*device), topology.nics_by_distance(*device));
        if nearest.len() == all.len() {
            continue;
        }
        let names: Vec<_> = nearest.iter().flat_map(|(nic, _)| nic_names(topology, *nic)).collect();
        match near.iter_mut().find(|(nics, _)| *nics == names) {
            Some((_, devices)) => devices.push(device.to_string()),
            None => near.push((names, vec![device.to_string()])),
        }
    }
    for (nics, devices) in near {
        style.item(out, &format!("nearest to {}:", devices.join(", ")), &nics.join(", "))?;
    }
    Ok(())
}
