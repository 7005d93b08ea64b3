//! `hmem info`: ifaces, devices, NICs, and the path from each device to each NIC.

mod report;

use hmem::{
    Decision, Error, Iface, IfaceExt, IfaceKind, Path,
    cause::Step,
    cuda::gdrcopy::Gdrcopy,
    iface::Capability,
    path::P2pPolicy,
    provider::{Features, Imports, ProgressModel, ProviderAttr, WindowType},
};
use serde::Serialize;

pub use self::report::text;
use crate::{
    json::{Attempt, SCHEMA, Skipped},
    machine::{Fabric, Machine, reason_and_remedy, root},
    probe,
};

/// What the machine has.
#[derive(Debug, Serialize)]
pub struct Inventory {
    /// The schema number.
    pub schema: u32,
    /// The version of the command.
    pub version: &'static str,
    /// The ifaces, those that did not start included.
    pub ifaces: Vec<IfaceEntry>,
    /// The devices of all ifaces.
    pub devices: Vec<DeviceEntry>,
    /// The NICs of all providers.
    pub providers: Vec<NicEntry>,
    /// From memory to NIC.
    pub p2p: Vec<P2pEntry>,
    /// How domains cache registrations.
    pub cache: CacheEntry,
    /// What notices that host memory went under a cached registration.
    pub cache_monitor: CacheMonitorEntry,
    /// The same for the memory of each device iface.
    pub device_monitors: Vec<DeviceMonitorEntry>,
    /// GDRCopy: the CPU's own access to memory of CUDA devices.
    pub gdrcopy: GdrcopyEntry,
    /// Providers and NICs that are not here, and what could not be listed.
    pub absent: Vec<Skipped>,
}

/// One iface.
#[derive(Debug, Serialize)]
pub struct IfaceEntry {
    /// Its name.
    pub name: String,
    /// Its number: libfabric's, or 256 and up.
    pub kind: u32,
    /// Whether it is a simulation.
    pub software: bool,
    /// Whether it started.
    pub available: bool,
    /// Why not.
    pub reason: Option<String>,
    /// What would make it start.
    pub remedy: Option<String>,
    /// What it can do.
    pub capability: Vec<&'static str>,
}

/// The settings of the registration caches.
#[derive(Debug, Serialize)]
pub struct CacheEntry {
    /// What turns caching off; null where it is on.
    pub disabled_by: Option<&'static str>,
    /// Entries that a cache may hold.
    pub max_count: usize,
    /// Bytes that a cache may hold.
    pub max_bytes: u64,
    /// Whether registrations that overlap or touch are joined.
    pub merge: bool,
}

/// The monitor of host memory.
#[derive(Debug, Serialize)]
pub struct CacheMonitorEntry {
    /// What was asked for.
    pub requested: &'static str,
    /// What is used.
    pub name: &'static str,
    /// Why that one.
    pub why: String,
    /// What it does not notice.
    pub limits: String,
    /// What was tried, in order.
    pub candidates: Vec<MonitorCandidateEntry>,
}

/// The monitor of an iface's memory.
#[derive(Debug, Serialize)]
pub struct DeviceMonitorEntry {
    /// The iface.
    pub iface: String,
    /// The monitor; null where the iface has none, or where it is left out.
    pub name: Option<String>,
    /// Why that one and what it does not see, or why none.
    pub why: String,
    /// What leaves it out of the caches; null where nothing does.
    pub disabled_by: Option<&'static str>,
    /// What would help where there is none.
    pub remedy: Option<String>,
}

/// GDRCopy, without which the CPU copies through the driver.
#[derive(Debug, Serialize)]
pub struct GdrcopyEntry {
    /// The library that was looked for.
    pub library: &'static str,
    /// Whether it is there and its kernel module opened.
    pub available: bool,
    /// Why not.
    pub reason: Option<String>,
    /// What would make it work.
    pub remedy: Option<String>,
}

/// A monitor that was tried.
#[derive(Debug, Serialize)]
pub struct MonitorCandidateEntry {
    /// Its name.
    pub name: &'static str,
    /// Why it was not taken; null if it passed its test.
    pub refused: Option<String>,
    /// What would make it work.
    pub remedy: Option<String>,
}

/// One device.
#[derive(Debug, Serialize)]
pub struct DeviceEntry {
    /// Its iface.
    pub iface: String,
    /// Its ordinal there.
    pub device: u32,
    /// The driver's name for it.
    pub name: String,
    /// Where it is plugged in.
    pub pci_bus_id: Option<String>,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Whether it is simulated.
    pub software: bool,
}

/// One NIC.
#[derive(Debug, Serialize)]
pub struct NicEntry {
    /// Its provider.
    pub provider: String,
    /// Its name there.
    pub nic: String,
    /// Whether it is software.
    pub software: bool,
    /// What it stands for.
    pub note: String,
    /// Where it is plugged in.
    pub pci_bus_id: Option<String>,
    /// The mr_mode bits that an application must offer.
    pub required_mr_mode: Vec<String>,
    /// The mr_mode bits that it can run in if BASIC forces them.
    pub basic_mr_mode: Vec<String>,
    /// Bytes of a key.
    pub key_size: usize,
    /// Bytes of a raw key.
    pub raw_key_size: usize,
    /// Ranges in one region.
    pub mr_iov_limit: usize,
    /// Bytes in one region.
    pub max_mr_size: u64,
    /// Regions at once.
    pub max_mr_count: u64,
    /// Page sizes that can be asked for, in bytes.
    pub page_sizes: Vec<usize>,
    /// What it imports.
    pub imports: Vec<&'static str>,
    /// The registration flags that it honours.
    pub flags: Vec<String>,
    /// The agent that executes transfers.
    pub progress: &'static str,
    /// The order that the requests of one endpoint keep.
    pub order: Vec<String>,
    /// The facets of a domain; null where none can be opened.
    pub features: Option<Vec<String>>,
    /// The types of memory windows.
    pub windows: Vec<&'static str>,
}

/// The path from one device to one NIC.
#[derive(Debug, Serialize)]
pub struct P2pEntry {
    /// The iface.
    pub iface: String,
    /// The device; null for host memory.
    pub device: Option<u32>,
    /// The provider.
    pub provider: String,
    /// The NIC.
    pub nic: String,
    /// How far they are apart, as `nvidia-smi topo` names it; null where that is not known.
    pub distance: Option<&'static str>,
    /// Why it is not known; null for host memory, which is no device.
    pub distance_unknown: Option<String>,
    /// The path that a registration took just now; null if every way was refused.
    pub path: Option<&'static str>,
    /// Why that way, or why none.
    pub reason: String,
    /// What would make it work, if nothing did.
    pub remedy: Option<String>,
    /// Everything that was tried.
    pub trace: Vec<Attempt>,
}

/// Looks at the machine: starts nothing that is not started, registers a page for each pair of
/// device and NIC.
#[must_use]
pub fn inventory(machine: &Machine) -> Inventory {
    let mut absent: Vec<_> = machine.absent.iter().map(Skipped::from).collect();
    let devices = devices(machine, &mut absent);
    let providers = machine.nics.iter().map(|fabric| nic(machine, fabric, &mut absent)).collect();
    Inventory {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        ifaces: ifaces(machine),
        p2p: p2p(machine, &devices),
        cache: cache(machine),
        cache_monitor: cache_monitor(machine),
        device_monitors: device_monitors(machine),
        gdrcopy: gdrcopy(),
        devices,
        providers,
        absent,
    }
}

fn ifaces(machine: &Machine) -> Vec<IfaceEntry> {
    let registry = machine.hmem.registry();
    let present = registry.iter().map(|iface| IfaceEntry {
        name: iface.name().to_owned(),
        kind: iface.kind().0,
        software: machine.is_software(iface.kind()),
        available: true,
        reason: None,
        remedy: None,
        capability: capability(iface.capability()),
    });
    let absent = registry.absent().map(|(kind, why)| {
        let (mut reason, mut remedy) = reason_and_remedy(why);
        if let Some(found) = machine.hmem.paths().explain_unavailable(Step::OpenDevice, why) {
            reason = format!("{reason}; probable cause: {}", found.cause);
            remedy = Some(found.remedy.to_owned());
        }
        IfaceEntry {
            name: machine.iface_name(kind),
            kind: kind.0,
            software: machine.is_software(kind),
            available: false,
            reason: Some(reason),
            remedy,
            capability: Vec::new(),
        }
    });
    let mut ifaces: Vec<_> = present.chain(absent).collect();
    ifaces.sort_by_key(|iface| iface.kind);
    ifaces
}

fn cache(machine: &Machine) -> CacheEntry {
    let limits = machine.hmem.cache_limits();
    CacheEntry {
        disabled_by: machine.hmem.cache_off_by(),
        max_count: limits.max_count,
        max_bytes: limits.max_bytes,
        merge: limits.merge,
    }
}

fn cache_monitor(machine: &Machine) -> CacheMonitorEntry {
    let choice = machine.hmem.cache_monitor().choice();
    let candidates = choice.candidates.iter().map(|tried| {
        let (refused, remedy) = tried.refused.as_ref().map(reason_and_remedy).unzip();
        MonitorCandidateEntry { name: tried.name, refused, remedy: remedy.flatten() }
    });
    CacheMonitorEntry {
        requested: choice.requested.name(),
        name: choice.name,
        why: choice.why.clone(),
        limits: choice.limits.clone(),
        candidates: candidates.collect(),
    }
}

fn device_monitors(machine: &Machine) -> Vec<DeviceMonitorEntry> {
    let devices = machine.hmem.registry().iter().filter(|iface| iface.kind() != IfaceKind::SYSTEM);
    devices.map(|iface| device_monitor(machine, &**iface)).collect()
}

fn device_monitor(machine: &Machine, iface: &dyn Iface) -> DeviceMonitorEntry {
    let disabled_by = machine.hmem.cache_monitor_left_out_by(iface.kind());
    let (name, why, remedy) = match disabled_by {
        // What is left out is not started to be shown.
        Some(setting) => {
            let why = format!("left out by {setting}: its memory is registered uncached");
            (None, why, Some(format!("change {setting} to have it cached")))
        }
        None => match iface.start_monitor() {
            Ok(monitor) => (Some(monitor.name().to_owned()), monitor.rationale(), None),
            Err(error) => {
                let (why, remedy) = reason_and_remedy(&error);
                (None, why, remedy)
            }
        },
    };
    DeviceMonitorEntry { iface: iface.name().to_owned(), name, why, disabled_by, remedy }
}

fn gdrcopy() -> GdrcopyEntry {
    let opened = Gdrcopy::open();
    let (reason, remedy) = opened.as_ref().err().map(reason_and_remedy).unzip();
    GdrcopyEntry {
        library: Gdrcopy::LIBRARY,
        available: opened.is_ok(),
        reason,
        remedy: remedy.flatten(),
    }
}

fn capability(can: Capability) -> Vec<&'static str> {
    let all = [
        (can.allocate, "allocate"),
        (can.dma_buf, "dma-buf"),
        (can.pcie_mapping, "pcie-mapping"),
        (can.peer_memory, "peer-memory"),
        (can.async_copy, "async-copy"),
        (can.host_register, "host-register"),
        (can.ipc, "ipc"),
        (can.identity, "identity"),
        (can.free_callback, "free-callback"),
    ];
    all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
}

fn devices(machine: &Machine, absent: &mut Vec<Skipped>) -> Vec<DeviceEntry> {
    let mut entries = Vec::new();
    for iface in machine.hmem.registry().iter() {
        match iface.devices() {
            Ok(devices) => entries.extend(devices.into_iter().map(|device| DeviceEntry {
                iface: iface.name().to_owned(),
                device: device.id.0,
                name: device.name,
                pci_bus_id: device.pci_bus_id,
                memory: device.memory,
                software: machine.is_software(iface.kind()),
            })),
            Err(error) => absent.push(Skipped {
                what: format!("devices of {}", iface.name()),
                why: error.to_string(),
            }),
        }
    }
    entries
}

fn names<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names.map(str::to_owned).collect()
}

fn imports(imports: Imports) -> Vec<&'static str> {
    let all = [
        (imports.dma_buf, "dma-buf"),
        (imports.pcie_mapping_first, "pcie-mapping-first"),
        (imports.peer_memory, "peer-memory"),
        (imports.staged, "staged"),
    ];
    all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
}

/// Only an open domain has facets, so that one is opened for them.
fn nic(machine: &Machine, fabric: &Fabric, absent: &mut Vec<Skipped>) -> NicEntry {
    let domain = fabric.open(&machine.hmem, P2pPolicy::default());
    if let Err(error) = &domain {
        let subject = format!("domain on {}", fabric.attr.nic);
        absent.push(Skipped { what: subject, why: error.to_string() });
    }
    let domain = domain.ok();
    let windows = domain.as_ref().and_then(|domain| domain.provider_domain().windows());
    let ProviderAttr { nic, required_mr_mode, basic_mr_mode, .. } = &fabric.attr;
    let attr = &fabric.attr;
    NicEntry {
        provider: nic.provider.clone(),
        nic: nic.name.clone(),
        software: fabric.software,
        note: fabric.note.to_owned(),
        pci_bus_id: nic.pci_bus_id.clone(),
        required_mr_mode: names(required_mr_mode.iter_names().map(|(name, _)| name)),
        basic_mr_mode: names(basic_mr_mode.iter_names().map(|(name, _)| name)),
        key_size: attr.key_size,
        raw_key_size: attr.raw_key_size,
        mr_iov_limit: attr.mr_iov_limit,
        max_mr_size: attr.max_mr_size,
        max_mr_count: attr.max_mr_count,
        page_sizes: attr.page_sizes.clone(),
        imports: imports(attr.imports),
        flags: names(attr.flags.iter_names().map(|(name, _)| name)),
        progress: match attr.progress {
            ProgressModel::Nic => "nic",
            ProgressModel::Thread => "thread",
            ProgressModel::Manual => "manual",
        },
        order: names(attr.order.iter_names().map(|(name, _)| name)),
        features: domain.as_ref().map(|domain| features(domain.features())),
        windows: windows.map_or_else(Vec::new, |windows| {
            windows.window_types().iter().map(|window| window_name(*window)).collect()
        }),
    }
}

fn features(features: Features) -> Vec<String> {
    features.iter_names().map(|(name, _)| name.to_lowercase().replace('_', "-")).collect()
}

const fn window_name(window: WindowType) -> &'static str {
    match window {
        WindowType::One => "1",
        WindowType::TwoA => "2A",
        WindowType::TwoB => "2B",
    }
}

fn p2p(machine: &Machine, devices: &[DeviceEntry]) -> Vec<P2pEntry> {
    let mut entries: Vec<_> = machine
        .nics
        .iter()
        .map(|nic| entry(machine, "system", None, nic, probe::host(machine, nic).as_deref()))
        .collect();
    for iface in machine.hmem.registry().iter() {
        for device in devices.iter().filter(|device| device.iface == iface.name()) {
            for nic in &machine.nics {
                let decision = probe::device(machine, nic, iface, hmem::DeviceId(device.device));
                entries.push(entry(machine, &device.iface, Some(device), nic, decision.as_deref()));
            }
        }
    }
    entries
}

fn entry(
    machine: &Machine,
    iface: &str,
    device: Option<&DeviceEntry>,
    nic: &Fabric,
    decision: Result<&Decision, &Error>,
) -> P2pEntry {
    let way = if device.is_some() { Path::Staged } else { Path::PlainHost };
    let (path, reason, remedy, trace) = match decision {
        Ok(decision) => {
            let trace = decision.attempts.iter().map(Attempt::from).collect();
            (Some(decision.path.name()), decision.reason.clone(), None, trace)
        }
        Err(error) => {
            let (reason, remedy) = reason_and_remedy(root(error));
            (None, reason, remedy, vec![Attempt::refused(way, error)])
        }
    };
    let (distance, distance_unknown) = match device.map(|device| distance(machine, device, nic)) {
        None => (None, None),
        Some(Ok(distance)) => (Some(distance), None),
        Some(Err(why)) => (None, Some(why)),
    };
    P2pEntry {
        iface: iface.to_owned(),
        device: device.map(|device| device.device),
        distance,
        distance_unknown,
        provider: nic.attr.nic.provider.clone(),
        nic: nic.attr.nic.name.clone(),
        path,
        reason,
        remedy,
        trace,
    }
}

/// How far a device and a NIC are apart, or why that is not known.
fn distance(machine: &Machine, device: &DeviceEntry, nic: &Fabric) -> Result<&'static str, String> {
    let name = format!("{}:{}", device.iface, device.device);
    let (topology, from) = machine.function(&name, device.pci_bus_id.as_deref())?;
    let (_, to) =
        machine.function(&nic.attr.nic.to_string(), nic.attr.nic.pci_bus_id.as_deref())?;
    topology
        .path(from, to)
        .map(|path| path.distance.name())
        .ok_or_else(|| "not in the PCIe tree".to_owned())
}
