//! Explanations as JSON (`docs/explain-schema.md`) and as text.

use std::io::{self, Write};

use hmem::{
    p2p::{path::Explanation, topology::Finding},
    path::ExportUnit,
};
use serde::Serialize;

use super::{Pair, PointerEntry, pointers, unit_text};
use crate::{
    json::{Attempt, Skipped, memory_name, needed_advice},
    machine::Machine,
    table::{Style, Tone, bytes, list_or},
    topo::TopoPathEntry,
};

/// Explanations of all selected pairs.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The version of `hmem` that printed the document.
    pub version: &'static str,
    /// The explanations, one for each pair of memory and NIC.
    pub explanations: Vec<PathEntry>,
    /// The pairs of memory and NIC, and the ifaces, NICs and pointers, that could not be explained,
    /// with reasons.
    pub skipped: Vec<Skipped>,
    /// The outcomes of `--pointer`, which replace the explanations; absent without that option.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pointers: Option<Vec<PointerEntry>>,
    /// The unavailable ifaces that `FI_HMEM` names.
    #[serde(skip)]
    pub(super) missing: Vec<String>,
    /// True if a pair, the devices of an iface, or a NIC could not be explained because of an
    /// error. Memory of an iface that cannot allocate does not count.
    #[serde(skip)]
    pub(super) failed: bool,
}

/// The explanation of the path between one memory and one NIC.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathEntry {
    /// The iface of the memory.
    pub iface: String,
    /// The number of the device in its iface; null for host memory.
    pub device: Option<u32>,
    /// The kind of memory: `system` or `device`.
    pub kind: &'static str,
    /// Size of the registration, in bytes.
    pub size: u64,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The policy for direct access of NICs to device memory.
    pub policy: &'static str,
    /// The direct paths that `HMEM_DIRECT_PATHS` lists, in order; null if the variable is not set.
    pub direct_paths: Option<Vec<&'static str>>,
    /// True if `FI_HMEM_DISABLE_P2P` forbids direct access to device memory for every NIC.
    pub p2p_disabled: bool,
    /// The chosen path; null if every path was refused.
    pub path: Option<&'static str>,
    /// The dma-buf mapping that the driver was asked for, such as `pcie`; null for other paths.
    pub mapping: Option<String>,
    /// The memory that was exported as a dma-buf, such as `allocation`; null for other paths.
    pub unit: Option<&'static str>,
    /// The reason why this path was chosen, or why every path was refused.
    pub reason: String,
    /// The changes that would enable a better path, or any path if every one was refused.
    pub remedies: Vec<String>,
    /// The paths to the memory (dma-buf, peer memory, staged copies) that were tried, in order.
    pub trace: Vec<Attempt>,
    /// The wiring between memory and NIC.
    pub wiring: Wiring,
}

/// The wiring between a device and a NIC.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Wiring {
    /// The PCI address of the device; null if it has none.
    pub device_pci_bus_id: Option<String>,
    /// The PCI address of the NIC; null if it has none.
    pub nic_pci_bus_id: Option<String>,
    /// The PCIe path between the device and the NIC; null if it is unknown.
    pub topo_path: Option<TopoPathEntry>,
    /// The reason why the PCIe path is unknown; null if it is known.
    pub unknown: Option<String>,
    /// The mode of the IOMMU, such as `translating`; null if the topology cannot be read.
    pub iommu: Option<&'static str>,
    /// The size of the device's largest memory BAR, in bytes, or 0 if it has none; null if the PCIe
    /// path is unknown.
    pub largest_bar: Option<u64>,
    /// The properties of the PCI topology that hinder direct access, such as ACS.
    pub findings: Vec<FindingEntry>,
}

/// An obstacle to direct access in the wiring, such as an enabled IOMMU.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct FindingEntry {
    /// The name of the obstacle, such as `acs`.
    pub name: &'static str,
    /// A description of the obstacle.
    pub what: String,
    /// The change that removes the obstacle.
    pub remedy: &'static str,
}

impl Report {
    /// Returns whether the command succeeded.
    ///
    /// All ifaces that `FI_HMEM` names must be available. Without `--pointer`, there must be a
    /// pair, and each pair must have a path, except pairs whose iface cannot allocate memory. Each
    /// NIC that an available library lists must open, and each iface must list its devices. With
    /// `--pointer`, there must be a pointer, nothing may be skipped, and each pointer must have the
    /// correct outcome.
    #[must_use]
    pub fn passed(&self) -> bool {
        let correct = match &self.pointers {
            Some(pointers) => {
                self.skipped.is_empty()
                    && !pointers.is_empty()
                    && pointers.iter().all(|pointer| pointer.correct)
            }
            None => {
                !self.explanations.is_empty()
                    && !self.failed
                    && self.explanations.iter().all(|entry| entry.path.is_some())
            }
        };
        correct && self.missing.is_empty()
    }
}

impl PathEntry {
    pub(super) fn new(machine: &Machine, pair: &Pair<'_>, found: &Explanation) -> Self {
        let path = found.path.map(hmem::Path::name);
        let attempts =
            found.attempts.iter().map(|attempt| Attempt::from(attempt).with_needed_advice(path));
        let remedies = found.remedies.iter().map(|remedy| needed_advice(remedy, path).to_owned());
        Self {
            iface: machine.iface_name(pair.iface.kind()),
            device: found.device,
            kind: found.kind,
            size: found.size,
            provider: pair.nic.attr.nic.provider.clone(),
            nic: pair.nic.attr.nic.name.clone(),
            policy: found.policy.name(),
            direct_paths: found
                .direct_paths
                .as_ref()
                .map(|paths| paths.iter().map(|path| path.name()).collect()),
            p2p_disabled: found.p2p_disabled,
            path,
            mapping: found.mapping.map(|mapping| format!("{mapping:?}").to_lowercase()),
            unit: found.unit.map(ExportUnit::name),
            reason: found.reason.clone(),
            remedies: remedies.collect(),
            trace: attempts.collect(),
            wiring: Wiring::new(machine, pair, found),
        }
    }

    /// Returns the name of the memory for text output, such as `cuda:0` or `system (host)`.
    fn memory(&self) -> String {
        let host = if self.device.is_none() { " (host)" } else { "" };
        memory_name(&self.iface, self.device) + host
    }
}

impl Wiring {
    fn new(machine: &Machine, pair: &Pair<'_>, found: &Explanation) -> Self {
        let mut wiring = Self {
            device_pci_bus_id: found.device_pci_bus_id.clone(),
            nic_pci_bus_id: found.nic_pci_bus_id.clone(),
            iommu: machine.topology.as_ref().map(|topology| topology.iommu().name()),
            ..Self::default()
        };
        let Some(device) = found.device else {
            wiring.unknown = Some("host memory is not behind a PCI function".to_owned());
            return wiring;
        };
        let memory = memory_name(&machine.iface_name(pair.iface.kind()), Some(device));
        let device = machine.function(&memory, found.device_pci_bus_id.as_deref());
        let nic = machine.function(&found.nic, found.nic_pci_bus_id.as_deref());
        let (topology, device, nic) = match (device, nic) {
            (Ok((topology, device)), Ok((_, nic))) => (topology, device, nic),
            (Err(device), Err(nic)) if device != nic => {
                wiring.unknown = Some(format!("{device}; {nic}"));
                return wiring;
            }
            (Err(why), _) | (_, Err(why)) => {
                wiring.unknown = Some(why);
                return wiring;
            }
        };
        wiring.topo_path = topology.path(device, nic).map(|path| TopoPathEntry::new(&path));
        wiring.largest_bar = topology.device(device).map(|device| device.largest_bar());
        let findings = topology.findings(device, nic, pair.memory).into_iter();
        let entry = |found: Finding| FindingEntry {
            name: found.name,
            what: found.what,
            remedy: found.remedy,
        };
        wiring.findings = findings.map(entry).collect();
        wiring
    }
}

/// Prints explanations as readable text instead of JSON.
///
/// # Errors
/// Fails if writing to `out` fails.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    for entry in &report.explanations {
        one(out, entry, style)?;
    }
    let pointers = report.pointers.as_deref().unwrap_or_default();
    pointers::text(out, pointers, style)?;
    if !report.skipped.is_empty() {
        style.heading(out, "Not explained")?;
        for skipped in &report.skipped {
            skipped.problem.item(out, &format!("{}:", skipped.what), style)?;
        }
        writeln!(out)?;
    }
    if report.explanations.is_empty() && pointers.is_empty() {
        writeln!(out, "nothing was explained")?;
    }
    if !report.missing.is_empty() {
        let text =
            format!("FAILED: FI_HMEM names {}, which is unavailable", report.missing.join(", "));
        style.indented(out, ["", "  "], &style.word(&text, Tone::Bad))?;
    }
    Ok(())
}

fn one(out: &mut dyn Write, entry: &PathEntry, style: Style) -> io::Result<()> {
    let size = bytes(entry.size);
    let heading = format!(
        "{} to {}/{} ({} memory, {size}, policy {})",
        entry.memory(),
        entry.provider,
        entry.nic,
        entry.kind,
        entry.policy
    );
    style.heading(out, &heading)?;
    let (path, tone) = match entry.path {
        None => ("none", Tone::Bad),
        Some("staged") => ("staged", Tone::Plain),
        Some(path) => (path, Tone::Good),
    };
    let mapping = match entry.mapping.as_deref() {
        None | Some("default") => String::new(),
        Some(mapping) => format!(", {mapping} mapping"),
    };
    let unit = unit_text(entry.unit);
    let path = style.word(path, tone);
    style.item(out, "path:", &format!("{path} ({}{mapping}{unit})", entry.reason))?;
    if let Some(paths) = &entry.direct_paths {
        let paths = list_or("none", paths);
        style.item(out, "direct paths:", &format!("{paths} (HMEM_DIRECT_PATHS)"))?;
    }
    if entry.p2p_disabled {
        style.item(out, "direct access:", "forbidden for every NIC (FI_HMEM_DISABLE_P2P)")?;
    }
    for tried in &entry.trace {
        let head = format!("tried {}:", tried.path);
        match &tried.error {
            None => style.item(out, &head, &format!("{} succeeded", tried.call))?,
            Some(reason) => {
                style.item(out, &head, &format!("{} refused: {reason}", tried.call))?;
                if let Some(cause) = &tried.cause {
                    style.detail(out, "probable cause:", cause)?;
                }
                if let (Some(chosen), Some(remedy)) = (entry.path, &tried.remedy) {
                    style.detail(out, &tried.remedy_label(chosen), remedy)?;
                }
                for cause in tried.causes.iter().skip(1) {
                    style.detail(out, "less probable cause:", &cause.text())?;
                    style.detail(out, "remedy:", &cause.remedy)?;
                }
            }
        }
    }
    wiring(out, &entry.wiring, style)?;
    // If a path was chosen, the remedy of each refused path was printed with its attempt.
    let beside = |remedy: &&String| {
        entry.path.is_some()
            && entry.trace.iter().any(|tried| {
                tried.remedy.as_ref() == Some(remedy)
                    || tried.causes.iter().any(|cause| cause.remedy == **remedy)
            })
    };
    for remedy in entry.remedies.iter().filter(|remedy| !beside(remedy)) {
        style.item(out, "remedy:", remedy)?;
    }
    for finding in &entry.wiring.findings {
        style.item(out, &format!("obstacle ({}):", finding.name), &finding.what)?;
        style.detail(out, "remedy:", finding.remedy)?;
    }
    writeln!(out)
}

fn wiring(out: &mut dyn Write, wiring: &Wiring, style: Style) -> io::Result<()> {
    match (&wiring.topo_path, &wiring.unknown) {
        (Some(path), _) => {
            let guess = if path.numa_unknown { " (a guess: a NUMA node is unknown)" } else { "" };
            style.item(out, "distance:", &format!("{}{guess}", path.distance))?;
            style.item(out, "PCIe path:", &path.hops.join(" -> "))?;
            let ports = path.ports.join(", ");
            let acs = match path.redirection {
                "none" => "no port redirects".to_owned(),
                "unknown" => format!("cannot be read on {ports}"),
                _ => format!("redirects at {ports}"),
            };
            style.item(out, "ACS:", &acs)?;
            if let Some(iommu) = wiring.iommu {
                style.item(out, "IOMMU:", iommu)?;
            }
            if let Some(bar) = wiring.largest_bar {
                style.item(out, "largest BAR:", &bytes(bar))?;
            }
            Ok(())
        }
        (None, Some(why)) => {
            style.item(out, "distance:", &style.word(&format!("unknown: {why}"), Tone::Dim))
        }
        (None, None) => Ok(()),
    }
}
