//! `hmem info`: ifaces, devices, NICs, and the path from each device to each NIC.

mod report;

use hmem::{
    CacheDefaults, Decision, Error, Iface, IfaceExt, IfaceKind, Path, Result,
    cause::Step,
    cuda::gdrcopy::Gdrcopy,
    iface::Capability,
    path::P2pPolicy,
    provider::{Features, Imports, ProgressModel, WindowType},
    system::monitor::{HostMonitorKind, SystemMonitor},
};
use serde::Serialize;

pub use self::report::text;
use crate::{
    Failure,
    json::{Attempt, SCHEMA, Skipped, memory_name},
    machine::{Machine, ProviderNic, root},
    probe,
    problem::Problem,
};

/// The ifaces, devices, NICs and settings of a machine.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Inventory {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The version of `hmem` that printed the document.
    pub version: &'static str,
    /// All ifaces, including those that are unavailable.
    pub ifaces: Vec<IfaceEntry>,
    /// The devices of all ifaces.
    pub devices: Vec<DeviceEntry>,
    /// The NICs of all providers.
    pub providers: Vec<NicEntry>,
    /// The path from each NIC to host memory and to each device.
    pub p2p: Vec<P2pEntry>,
    /// The settings of registration caches.
    pub cache: CacheEntry,
    /// The monitor of cached host memory.
    pub cache_monitor: CacheMonitorEntry,
    /// The monitor of each device iface.
    pub device_monitors: Vec<DeviceMonitorEntry>,
    /// GDRCopy, with which the CPU accesses memory of CUDA devices.
    pub gdrcopy: GdrcopyEntry,
    /// Unavailable providers and NICs, and queries that failed, with reasons.
    pub absent: Vec<Skipped>,
}

/// An iface, with its availability and features.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct IfaceEntry {
    /// The name under which the iface is registered.
    pub name: String,
    /// The number of the iface in libfabric's `enum fi_hmem_iface`; 256 and above for plug-ins.
    pub kind: u32,
    /// True if the iface simulates its devices.
    pub software: bool,
    /// True if the iface started and can be used.
    pub available: bool,
    /// The reason why the iface is unavailable; null if it is available.
    pub reason: Option<String>,
    /// The change that would make the iface available; null if unknown or not needed.
    pub remedy: Option<String>,
    /// The optional features of the iface, such as `dma-buf`.
    pub capability: Vec<&'static str>,
    /// The error and its remedy for text output; `None` without an error. Not part of the JSON.
    #[serde(skip)]
    pub problem: Option<Problem>,
}

/// The settings of the registration caches.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CacheEntry {
    /// The setting that disables caching; null if caching is on.
    pub disabled_by: Option<&'static str>,
    /// Maximum number of entries in a cache.
    pub max_count: usize,
    /// Maximum size of a cache's regions together, in bytes.
    pub max_bytes: u64,
    /// True if the cache merges overlapping and adjacent regions.
    pub merge: bool,
    /// The reason why lookups use fences and are slower; null if they use `membarrier`.
    pub fences: Option<String>,
    /// The change that would make lookups use `membarrier`; null if unknown or not needed.
    pub remedy: Option<String>,
    /// The error and its remedy for text output; `None` without an error. Not part of the JSON.
    #[serde(skip)]
    pub problem: Option<Problem>,
}

/// The cache monitor of host memory, with the reason for the choice.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CacheMonitorEntry {
    /// The monitor that the environment requests; `auto` by default.
    pub requested: &'static str,
    /// The monitor in use.
    pub name: &'static str,
    /// The reason why this monitor was chosen.
    pub why: String,
    /// The changes of memory that the monitor cannot detect.
    pub limits: String,
    /// The tried monitors, in the order of the attempts.
    pub candidates: Vec<MonitorCandidateEntry>,
}

/// The cache monitor of one device iface's memory.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceMonitorEntry {
    /// The name of the iface that owns the watched memory.
    pub iface: String,
    /// The monitor; null if the iface has none, or if a setting disables it.
    pub name: Option<String>,
    /// The reason why this monitor was chosen and the changes that it cannot detect, or the reason
    /// why there is no monitor.
    pub why: String,
    /// The setting that disables the monitor; null if none does.
    pub disabled_by: Option<&'static str>,
    /// The change that would start a monitor; null if unknown or not needed.
    pub remedy: Option<String>,
}

/// The state of GDRCopy. Without GDRCopy, CPU access to CUDA memory uses the driver's copies.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GdrcopyEntry {
    /// The file name of the GDRCopy library.
    pub library: &'static str,
    /// True if the library and its kernel module could be opened.
    pub available: bool,
    /// The reason why GDRCopy is unavailable; null if it is available.
    pub reason: Option<String>,
    /// The change that would make GDRCopy available; null if unknown or not needed.
    pub remedy: Option<String>,
    /// The error and its remedy for text output; `None` without an error. Not part of the JSON.
    #[serde(skip)]
    pub problem: Option<Problem>,
}

/// A monitor of host memory that the command tried, and the outcome.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MonitorCandidateEntry {
    /// The name of the monitor.
    pub name: &'static str,
    /// The reason why the monitor was rejected; null if it passed its test.
    pub refused: Option<String>,
    /// The change that would make the monitor work; null if unknown or not needed.
    pub remedy: Option<String>,
    /// The error and its remedy for text output; `None` without an error. Not part of the JSON.
    #[serde(skip)]
    pub problem: Option<Problem>,
}

/// A device of an iface.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DeviceEntry {
    /// The name of the iface that the device belongs to.
    pub iface: String,
    /// The number of the device in its iface, from 0.
    pub device: u32,
    /// The name that the driver reports for the device.
    pub name: String,
    /// The PCI address of the device; null if it has none, as a simulated device.
    pub pci_bus_id: Option<String>,
    /// The size of the device's memory, in bytes.
    pub memory: u64,
    /// True if the device is simulated.
    pub software: bool,
}

/// The attributes of one NIC.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct NicEntry {
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// True for a loopback NIC; false for every other NIC, also for software NICs of libfabric.
    pub software: bool,
    /// A short description of the NIC.
    pub note: String,
    /// The PCI address of the NIC; null if it has none, as a software NIC.
    pub pci_bus_id: Option<String>,
    /// The mr_mode bits that an application must support.
    pub required_mr_mode: Vec<String>,
    /// The mr_mode bits that the NIC supports if the application requests the legacy mode `BASIC`.
    pub basic_mr_mode: Vec<String>,
    /// Size of a remote key, in bytes.
    pub key_size: usize,
    /// Size of a raw remote key, in bytes.
    pub raw_key_size: usize,
    /// The maximum number of address ranges in one region.
    pub mr_iov_limit: usize,
    /// The maximum length of one region, in bytes.
    pub max_mr_size: u64,
    /// The maximum number of regions that are registered at the same time.
    pub max_mr_count: u64,
    /// The page sizes that a registration can request, in bytes.
    pub page_sizes: Vec<usize>,
    /// The ways to import device memory that the NIC supports, such as dma-buf.
    pub imports: Vec<&'static str>,
    /// The registration flags that the NIC supports.
    pub flags: Vec<String>,
    /// The agent that executes transfers: `nic`, `thread` (of the provider) or `manual` (the
    /// application's calls).
    pub progress: &'static str,
    /// The pairs of request kinds that an endpoint executes in the order of their posting.
    pub order: Vec<String>,
    /// The optional features of a domain on the NIC, such as `windows`; null if no domain opens.
    pub features: Option<Vec<String>>,
    /// The types of memory windows that the NIC supports; empty if no domain opens.
    pub windows: Vec<&'static str>,
}

/// The path from host memory or one device to one NIC.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct P2pEntry {
    /// The name of the iface that owns the memory.
    pub iface: String,
    /// The number of the device in its iface; null for host memory.
    pub device: Option<u32>,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The distance, as `nvidia-smi topo` names it; null if it is unknown.
    pub distance: Option<&'static str>,
    /// The reason why the distance is unknown; null if it is known, and for host memory.
    pub distance_unknown: Option<String>,
    /// The path of a registration that this command made; null if every path was refused.
    pub path: Option<&'static str>,
    /// The reason why this path was chosen, or why every path was refused.
    pub reason: String,
    /// The change that would make a path work; null if unknown, or if a path works.
    pub remedy: Option<String>,
    /// The tried paths, in the order of the attempts.
    pub trace: Vec<Attempt>,
}

/// Collects the inventory of a machine, with the NICs that `nic` names, or all for `None`. The
/// function registers a page of host memory and of each device with each NIC to find the paths. It
/// also starts the cache monitors, except those that a setting disables.
///
/// # Errors
/// - [`Failure::Usage`] if the machine has neither a provider nor a NIC of this name.
/// - The errors of [`Hmem::cache_defaults`](hmem::Hmem::cache_defaults) and
///   [`Hmem::cache_monitor`](hmem::Hmem::cache_monitor), such as a malformed variable.
pub fn inventory(machine: &Machine, nic: Option<&str>) -> Result<Inventory, Failure> {
    machine.check_names(None, nic)?;
    let nics: Vec<_> = machine.nics(nic).collect();
    let defaults = machine.hmem.cache_defaults()?;
    let cache_monitor = cache_monitor(machine.hmem.cache_monitor()?);
    let mut absent: Vec<_> = machine.absent.iter().map(Skipped::from).collect();
    let devices = devices(machine, &mut absent);
    let providers = nics.iter().map(|nic| nic_entry(machine, nic, &mut absent)).collect();
    let ifaces_with_devices =
        machine.hmem.registry().iter().filter(|iface| iface.kind() != IfaceKind::SYSTEM);
    let device_monitors = ifaces_with_devices.map(|iface| device_monitor(defaults, &**iface));
    Ok(Inventory {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        ifaces: ifaces(machine),
        p2p: p2p(machine, &nics, &devices),
        cache: cache(machine, defaults),
        cache_monitor,
        device_monitors: device_monitors.collect(),
        gdrcopy: gdrcopy(),
        devices,
        providers,
        absent,
    })
}

fn ifaces(machine: &Machine) -> Vec<IfaceEntry> {
    let registry = machine.hmem.registry();
    let entry = |name, kind: IfaceKind, capability, problem: Option<Problem>| IfaceEntry {
        name,
        kind: kind.0,
        software: machine.is_software(kind),
        available: problem.is_none(),
        reason: problem.as_ref().map(Problem::reason),
        remedy: remedy(&problem),
        capability,
        problem,
    };
    let present = registry.iter().map(|iface| {
        entry(iface.name().to_owned(), iface.kind(), capability(iface.capability()), None)
    });
    let absent = registry.absent().map(|(kind, why)| {
        let problem = machine.explained(Step::OpenDevice, why);
        entry(machine.iface_name(kind), kind, Vec::new(), Some(problem))
    });
    let mut ifaces: Vec<_> = present.chain(absent).collect();
    ifaces.sort_by_key(|iface| iface.kind);
    ifaces
}

fn remedy(problem: &Option<Problem>) -> Option<String> {
    problem.as_ref().and_then(|problem| problem.remedy.clone())
}

fn cache(machine: &Machine, defaults: &CacheDefaults) -> CacheEntry {
    let limits = defaults.limits();
    let refused = hmem::cache::use_membarrier().err();
    let problem = refused.map(|error| machine.explained(Step::SystemCall, &error));
    CacheEntry {
        disabled_by: defaults.off_by(),
        max_count: limits.max_count,
        max_bytes: limits.max_bytes,
        merge: limits.merge,
        fences: problem.as_ref().map(Problem::reason),
        remedy: remedy(&problem),
        problem,
    }
}

fn cache_monitor(monitor: &SystemMonitor) -> CacheMonitorEntry {
    let choice = monitor.choice();
    let candidates = choice.candidates.iter().map(|tried| {
        let problem = tried.refused.as_ref().map(Problem::from);
        MonitorCandidateEntry {
            name: tried.name,
            refused: problem.as_ref().map(Problem::reason),
            remedy: remedy(&problem),
            problem,
        }
    });
    CacheMonitorEntry {
        requested: choice.requested.name(),
        name: choice.name,
        why: choice.why.clone(),
        limits: choice.limits.clone(),
        candidates: candidates.collect(),
    }
}

/// Returns the monitor of a device iface. Starts the monitor unless a setting disables it.
fn device_monitor(defaults: &CacheDefaults, iface: &dyn Iface) -> DeviceMonitorEntry {
    let disabled_by = match defaults.monitor() {
        HostMonitorKind::Disabled => defaults.off_by(),
        _ => defaults.monitor_left_out_by(iface.kind()),
    };
    let (name, why, remedy) = match disabled_by {
        Some(setting) => {
            let why = format!("disabled by {setting}: memory is registered uncached");
            (None, why, Some(format!("change {setting} to cache registrations")))
        }
        None => match iface.start_monitor() {
            Ok(monitor) => (Some(monitor.name().to_owned()), monitor.rationale(), None),
            Err(error) => {
                let problem = Problem::from(&error);
                (None, problem.reason(), problem.remedy)
            }
        },
    };
    DeviceMonitorEntry { iface: iface.name().to_owned(), name, why, disabled_by, remedy }
}

fn gdrcopy() -> GdrcopyEntry {
    let problem = Gdrcopy::open().err().map(Problem::from);
    GdrcopyEntry {
        library: Gdrcopy::LIBRARY,
        available: problem.is_none(),
        reason: problem.as_ref().map(Problem::reason),
        remedy: remedy(&problem),
        problem,
    }
}

fn capability(can: Capability) -> Vec<&'static str> {
    having([
        (can.allocate, "allocate"),
        (can.dma_buf, "dma-buf"),
        (can.pcie_mapping, "pcie-mapping"),
        (can.peer_memory, "peer-memory"),
        (can.async_copy, "async-copy"),
        (can.host_register, "host-register"),
        (can.ipc, "ipc"),
        (can.identity, "identity"),
        (can.free_callback, "free-callback"),
    ])
}

/// Returns the names whose flag is true.
fn having<const N: usize>(all: [(bool, &'static str); N]) -> Vec<&'static str> {
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
            Err(error) => absent.push(Skipped::new(format!("devices of {}", iface.name()), &error)),
        }
    }
    entries
}

/// Returns the names of the flags that the iterator `set` yields.
fn names<'a, F>(set: impl Iterator<Item = (&'a str, F)>) -> Vec<String> {
    set.map(|(name, _)| name.to_owned()).collect()
}

fn imports(imports: Imports) -> Vec<&'static str> {
    having([
        (imports.dma_buf, "dma-buf"),
        (imports.pcie_mapping_first == Some(true), "pcie-mapping-first"),
        (imports.data_direct.is_some(), "data-direct"),
        (imports.peer_memory, "peer-memory"),
        (imports.staged, "staged"),
    ])
}

/// Returns the entry of a NIC. Opens a domain on the NIC to query the domain's features. If this
/// fails, the entry has no features, and the error is added to `absent`.
fn nic_entry(machine: &Machine, nic: &ProviderNic, absent: &mut Vec<Skipped>) -> NicEntry {
    let domain = nic.open(&machine.hmem, P2pPolicy::default());
    if let Err(error) = &domain {
        absent.push(Skipped::new(format!("domain on {}", nic.attr.nic), error));
    }
    let domain = domain.ok();
    let windows = domain.as_ref().and_then(|domain| domain.provider_domain().windows());
    let attr = &nic.attr;
    NicEntry {
        provider: attr.nic.provider.clone(),
        nic: attr.nic.name.clone(),
        software: nic.software,
        note: nic.note.to_owned(),
        pci_bus_id: attr.nic.pci_bus_id.clone(),
        required_mr_mode: names(attr.required_mr_mode.iter_names()),
        basic_mr_mode: names(attr.basic_mr_mode.iter_names()),
        key_size: attr.key_size,
        raw_key_size: attr.raw_key_size,
        mr_iov_limit: attr.mr_iov_limit,
        max_mr_size: attr.max_mr_size,
        max_mr_count: attr.max_mr_count,
        page_sizes: attr.page_sizes.clone(),
        imports: imports(attr.imports),
        flags: names(attr.flags.iter_names()),
        progress: match attr.progress {
            ProgressModel::Nic => "nic",
            ProgressModel::Thread => "thread",
            ProgressModel::Manual => "manual",
        },
        order: names(attr.order.iter_names()),
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

fn p2p(machine: &Machine, nics: &[&ProviderNic], devices: &[DeviceEntry]) -> Vec<P2pEntry> {
    let mut entries: Vec<_> = nics
        .iter()
        .map(|nic| entry(machine, "system", None, nic, probe::host(machine, nic).as_deref()))
        .collect();
    for iface in machine.hmem.registry().iter() {
        for device in devices.iter().filter(|device| device.iface == iface.name()) {
            for nic in nics {
                let decision = probe::device(machine, nic, iface, hmem::DeviceId(device.device));
                entries.push(entry(machine, &device.iface, Some(device), nic, decision.as_deref()));
            }
        }
    }
    entries
}

/// Returns the entry of a pair of memory and NIC. `device` is `None` for host memory.
fn entry(
    machine: &Machine,
    iface: &str,
    device: Option<&DeviceEntry>,
    nic: &ProviderNic,
    decision: Result<&Decision, &Error>,
) -> P2pEntry {
    let assumed = if device.is_some() { Path::Staged } else { Path::PlainHost };
    let (path, reason, remedy, trace) = match decision {
        Ok(decision) => {
            let trace: Vec<_> = decision.attempts.iter().map(Attempt::from).collect();
            (Some(decision.path.name()), decision.reason.clone(), None, trace)
        }
        Err(error) => {
            let problem = Problem::from(root(error));
            (None, problem.reason(), problem.remedy, vec![Attempt::refused(assumed, error)])
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
        trace: trace.into_iter().map(|attempt| attempt.with_needed_advice(path)).collect(),
    }
}

/// Returns the distance between a device and a NIC, or the reason why it is unknown.
fn distance(
    machine: &Machine,
    device: &DeviceEntry,
    nic: &ProviderNic,
) -> Result<&'static str, String> {
    let name = memory_name(&device.iface, Some(device.device));
    let (topology, from) = machine.function(&name, device.pci_bus_id.as_deref())?;
    let (_, to) =
        machine.function(&nic.attr.nic.to_string(), nic.attr.nic.pci_bus_id.as_deref())?;
    topology
        .path(from, to)
        .map(|path| path.distance.name())
        .ok_or_else(|| "not in the PCIe tree".to_owned())
}
