//! `hmem topo`: shows or records how the machine's devices and NICs are connected.

mod matrix;
mod report;
mod svg;
mod tree;

use std::{
    fs,
    io::{self, Write},
    path::Path,
};

use hmem::p2p::topology::{Finding, Topology};

pub use self::report::{
    BarEntry, FunctionEntry, KernelEntry, LinkEntry, NodeEntry, NvidiaEntry, PathEntry, PortEntry,
    RdmaEntry, Report, TopoPathEntry,
};
use crate::{
    Failure,
    args::TopoArgs,
    json,
    problem::Problem,
    table::{Style, Tone, abbreviated, grouped, list_or},
};

/// Reads the topology, draws and records it as the arguments ask, and prints it as JSON or text. If
/// files are written, their names are printed instead of the text.
///
/// # Errors
/// [`Failure::Failed`] for a tree that cannot be read or a file that cannot be written;
/// [`Failure::Output`] if `out` fails.
pub fn run(args: &TopoArgs, style: Style, out: &mut dyn Write) -> Result<(), Failure> {
    let topology = match &args.from {
        Some(path) => Topology::open(path)?,
        None => Topology::read()?,
    };
    if let Some(path) = &args.record {
        let mut bytes = Vec::new();
        topology.record(&mut bytes)?;
        write(path, &bytes)?;
    }
    if let Some(path) = &args.svg {
        write(path, svg::draw(&topology).as_bytes())?;
    }
    if args.json {
        let from = args.from.as_ref().map(|path| path.display().to_string());
        json::write(out, &Report::new(&topology, from))?;
        return Ok(());
    }
    for path in [&args.record, &args.svg].into_iter().flatten() {
        writeln!(out, "wrote {}", path.display())?;
    }
    if args.record.is_none() && args.svg.is_none() {
        text(out, &topology, args.all, style)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).map_err(|error| {
        Failure::failed(
            Problem::new(format!("cannot write {}", path.display()))
                .caused_by(Problem::new(error.to_string()))
                .remedy("name a file in a writable folder"),
        )
    })
}

/// Prints the topology as readable text instead of JSON.
fn text(out: &mut dyn Write, topology: &Topology, all: bool, style: Style) -> io::Result<()> {
    tree::print(out, topology, all, style)?;
    matrix::print(out, topology, style)?;
    facts(out, topology, style)?;
    findings(out, topology, style)
}

/// Prints the obstacles between devices and their nearest NICs, grouped by remedy.
fn findings(out: &mut dyn Write, topology: &Topology, style: Style) -> io::Result<()> {
    let mut seen: Vec<Finding> = Vec::new();
    for device in topology.accelerators().map(|device| device.bus_id) {
        for (nic, _) in topology.nearest_nics(device) {
            for finding in topology.findings(device, nic, None) {
                if !seen.contains(&finding) {
                    seen.push(finding);
                }
            }
        }
    }
    if seen.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    style.heading(out, "Obstacles between devices and their nearest NICs")?;
    seen.sort_by_key(|finding| finding.remedy);
    for (remedy, what) in grouped(seen.iter().map(|finding| (finding.remedy, &finding.what))) {
        // Lists a few of the obstacles that the remedy removes, and then the remedy.
        const FEW: usize = 2;
        for what in what.iter().take(FEW) {
            style.item(out, "-", what)?;
        }
        if let Some(more) = what.len().checked_sub(FEW + 1) {
            style.item(out, "-", &format!("and {} more", more + 1))?;
        }
        style.detail(out, "remedy:", remedy)?;
    }
    Ok(())
}

/// Prints the properties of the whole machine that decide paths.
fn facts(out: &mut dyn Write, topology: &Topology, style: Style) -> io::Result<()> {
    style.heading(out, "Machine")?;
    let kernel = topology.kernel();
    let release = kernel.release.as_deref().unwrap_or("unknown");
    style.item(out, "kernel:", release)?;
    if !kernel.command_line.is_empty() {
        style.item(out, "command line:", &kernel.command_line.join(" "))?;
    }
    let memory_only = topology.numa().iter().filter(|node| node.is_memory_only());
    let memory_only: Vec<_> = memory_only.map(|node| node.id.to_string()).collect();
    if !memory_only.is_empty() {
        let text = format!(
            "{} (memory of GPUs or CXL devices that the kernel uses as host memory)",
            abbreviated(&memory_only)
        );
        style.item(out, "memory-only NUMA nodes:", &text)?;
    }
    style.item(out, "IOMMU:", topology.iommu().name())?;
    let peer: Vec<_> = kernel.peer_memory().collect();
    style.item(out, "peer memory:", &list_or("no module loaded", &peer))?;
    if let Some(driver) = &kernel.nvidia {
        let kind = if driver.open { "open" } else { "closed: it exports no dma-buf" };
        style.item(out, "NVIDIA driver:", &format!("{} ({kind})", driver.version))?;
    }
    if !kernel.modules.is_empty() {
        style.item(out, "modules:", &kernel.modules.join(", "))?;
    }
    match &kernel.options {
        None => {
            let text = "unknown: the configuration of this kernel cannot be read";
            style.item(out, "options:", text)?;
        }
        Some(options) if options.is_empty() => {
            style.item(out, "options:", "none that decides paths")?;
        }
        Some(options) => {
            let set = options.iter().map(|(name, setting)| format!("{name}={}", setting.name()));
            style.item(out, "options:", &set.collect::<Vec<_>>().join(" "))?;
        }
    }
    let unreadable = topology.unreadable_ports().count();
    if unreadable > 0 {
        let text = format!(
            "unknown for {unreadable} ports: configuration space ends at 64 bytes without \
             CAP_SYS_ADMIN"
        );
        style.item(out, "ACS:", &style.word(&text, Tone::Dim))?;
        style.detail(out, "remedy:", "run the command as root")?;
    } else {
        let on = topology.devices().filter(|device| device.acs.redirects() == Some(true)).count();
        let text = match on {
            0 => "no port redirects".to_owned(),
            1 => "1 port redirects peer traffic to the root complex".to_owned(),
            _ => format!("{on} ports redirect peer traffic to the root complex"),
        };
        style.item(out, "ACS:", &text)?;
    }
    Ok(())
}
