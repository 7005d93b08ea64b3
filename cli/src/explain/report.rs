//! Explanations as JSON (`docs/explain-schema.md`) and as text.

use std::io::{self, Write};

use hmem::{p2p::path::Explanation, path::Attempt as Tried};
use serde::Serialize;

use super::Names;
use crate::{
    json::{Attempt, SCHEMA, Skipped},
    machine::Machine,
    table::{Style, Tone, bytes},
    topo::TopoPathEntry,
};

/// Explanations of all pairs that were asked for.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The schema number.
    pub schema: u32,
    /// The version of the command.
    pub version: &'static str,
    /// What was found out.
    pub explanations: Vec<Entry>,
    /// What was not.
    pub skipped: Vec<Skipped>,
}

/// The path of one pair of memory and NIC.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// The iface of the memory.
    pub iface: String,
    /// The device; null for host memory.
    pub device: Option<u32>,
    /// The kind of memory.
    pub kind: &'static str,
    /// Bytes that were registered.
    pub size: u64,
    /// The provider.
    pub provider: String,
    /// The NIC.
    pub nic: String,
    /// The policy.
    pub policy: &'static str,
    /// Whether device memory is kept from every NIC.
    pub p2p_disabled: bool,
    /// The path; null if every way was refused.
    pub path: Option<&'static str>,
    /// The mapping of the dma-buf.
    pub mapping: Option<String>,
    /// Why that path, or why none.
    pub reason: String,
    /// What would make it better, or work at all.
    pub remedies: Vec<String>,
    /// Everything that was tried.
    pub trace: Vec<Attempt>,
    /// What lies between the two.
    pub wiring: Wiring,
}

/// What lies between a device and a NIC.
#[derive(Debug, Default, Serialize)]
pub struct Wiring {
    /// Where the device is plugged in.
    pub device_pci_bus_id: Option<String>,
    /// Where the NIC is plugged in.
    pub nic_pci_bus_id: Option<String>,
    /// The way; null where it is not known.
    pub topo_path: Option<TopoPathEntry>,
    /// Why it is not.
    pub unknown: Option<String>,
    /// What the IOMMU does.
    pub iommu: Option<&'static str>,
    /// The device's largest BAR, in bytes.
    pub largest_bar: Option<u64>,
    /// What stands in the way.
    pub findings: Vec<FindingEntry>,
}

/// Something that stands in the way.
#[derive(Clone, Debug, Serialize)]
pub struct FindingEntry {
    /// Its name.
    pub name: &'static str,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub remedy: &'static str,
}

impl Report {
    pub(super) fn new(explanations: Vec<Entry>, skipped: Vec<Skipped>) -> Self {
        Self { schema: SCHEMA, version: env!("CARGO_PKG_VERSION"), explanations, skipped }
    }

    /// Whether each pair has a path, and there is one.
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.explanations.is_empty() && self.explanations.iter().all(|entry| entry.path.is_some())
    }
}

impl Entry {
    pub(super) fn new(machine: &Machine, names: &Names, found: &Explanation) -> Self {
        Self {
            iface: names.iface.clone(),
            device: found.device,
            kind: found.kind,
            size: found.size,
            provider: names.provider.clone(),
            nic: names.nic.clone(),
            policy: found.policy.name(),
            p2p_disabled: found.p2p_disabled,
            path: found.path.map(hmem::Path::name),
            mapping: found.mapping.map(|mapping| format!("{mapping:?}").to_lowercase()),
            reason: found.reason.clone(),
            remedies: found.remedies.clone(),
            trace: found.attempts.iter().map(|tried: &Tried| Attempt::from(tried)).collect(),
            wiring: Wiring::new(machine, names, found),
        }
    }

    /// Whose memory, in words.
    fn memory(&self) -> String {
        match self.device {
            Some(device) => format!("{}:{device}", self.iface),
            None => format!("{} (host)", self.iface),
        }
    }
}

impl Wiring {
    fn new(machine: &Machine, names: &Names, found: &Explanation) -> Self {
        let mut wiring = Self {
            device_pci_bus_id: found.device_pci_bus_id.clone(),
            nic_pci_bus_id: found.nic_pci_bus_id.clone(),
            iommu: machine.topology.as_ref().map(|topology| topology.iommu().name()),
            ..Self::default()
        };
        let Some(device) = found.device else {
            wiring.unknown = Some("host memory is behind no PCI function".to_owned());
            return wiring;
        };
        let device = machine
            .function(&format!("{}:{device}", names.iface), found.device_pci_bus_id.as_deref());
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
        let findings = topology.findings(device, nic, names.memory);
        wiring.findings = findings
            .into_iter()
            .map(|finding| FindingEntry {
                name: finding.name,
                what: finding.what,
                remedy: finding.remedy,
            })
            .collect();
        wiring
    }
}

/// Prints explanations for a person.
///
/// # Errors
/// What the writer reported.
pub fn text(out: &mut dyn Write, report: &Report, style: Style) -> io::Result<()> {
    for entry in &report.explanations {
        one(out, entry, style)?;
    }
    if !report.skipped.is_empty() {
        style.heading(out, "Not found out")?;
        for skipped in &report.skipped {
            style.item(out, &format!("{}:", skipped.what), &skipped.why)?;
        }
        writeln!(out)?;
    }
    if report.explanations.is_empty() {
        writeln!(out, "nothing was explained")?;
    }
    Ok(())
}

fn one(out: &mut dyn Write, entry: &Entry, style: Style) -> io::Result<()> {
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
    style.item(out, "path:", &format!("{} ({}{mapping})", style.word(path, tone), entry.reason))?;
    if entry.p2p_disabled {
        style.item(out, "direct access:", "switched off for every NIC (FI_HMEM_DISABLE_P2P)")?;
    }
    for tried in &entry.trace {
        let head = format!("tried {}:", tried.path);
        match &tried.error {
            None => style.item(out, &head, &format!("{} succeeded", tried.call))?,
            Some(error) => {
                let cause = tried.cause.as_ref().map(|cause| format!("; probable cause: {cause}"));
                let text = format!("{} refused: {error}{}", tried.call, cause.unwrap_or_default());
                style.item(out, &head, &text)?;
            }
        }
    }
    wiring(out, &entry.wiring, style)?;
    for remedy in &entry.remedies {
        style.item(out, "to do:", remedy)?;
    }
    for finding in &entry.wiring.findings {
        style.item(
            out,
            &format!("found ({}):", finding.name),
            &format!("{} -> {}", finding.what, finding.remedy),
        )?;
    }
    writeln!(out)
}

fn wiring(out: &mut dyn Write, wiring: &Wiring, style: Style) -> io::Result<()> {
    match (&wiring.topo_path, &wiring.unknown) {
        (Some(way), _) => {
            let guess = if way.numa_unknown { " (a guess: a NUMA node is not known)" } else { "" };
            style.item(out, "distance:", &format!("{}{guess}", way.distance))?;
            style.item(out, "by way of:", &way.hops.join(" -> "))?;
            let ports = way.ports.join(", ");
            let acs = match way.redirection {
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
            style.item(out, "distance:", &style.word(&format!("not known: {why}"), Tone::Dim))
        }
        (None, None) => Ok(()),
    }
}
