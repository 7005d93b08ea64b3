//! The combinations of memory, NIC and path that a check covers, and those that it skips.

use std::{fmt, sync::Arc};

use hmem::{
    Access, AllocationKind, DeviceId, Iface, IfaceExt, IfaceKind, Path, iface::Device,
    path::P2pPolicy, system::System,
};

use super::{MemorySort, Selection, memory::HugeBuffer};
use crate::{
    json::Skipped,
    machine::{Machine, ProviderNic},
};

/// The expected path from the memory to the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathVariant {
    /// Direct access to host memory (`plain-host`).
    Host,
    /// Direct access to device memory, over this path.
    Direct(Path),
    /// Copies through staging buffers.
    Staged,
}

impl PathVariant {
    /// Returns the path that a registration must take for the check to succeed.
    pub(super) const fn path(self) -> Path {
        match self {
            Self::Host => Path::PlainHost,
            Self::Direct(path) => path,
            Self::Staged => Path::Staged,
        }
    }

    /// Returns the policy for the domain of the check. For device memory, the policy permits only
    /// direct paths, or only staged copies.
    pub(super) const fn policy(self) -> P2pPolicy {
        match self {
            Self::Host => P2pPolicy::Enabled,
            Self::Direct(_) => P2pPolicy::Required,
            Self::Staged => P2pPolicy::Disabled,
        }
    }
}

/// A combination of memory, NIC and path to check.
#[derive(Clone, Debug)]
pub(super) struct Case<'a> {
    pub(super) memory: MemorySort,
    pub(super) nic: &'a ProviderNic,
    pub(super) variant: PathVariant,
    /// True if the NIC is software, and the memory is host memory or simulated. An unsupported
    /// allocation or registration is then a failure. If the field is false, the check skips the
    /// combination, since the hardware may lack the feature.
    pub(super) software: bool,
}

impl fmt::Display for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {} over {}", self.memory, self.nic.attr.nic, self.variant.path())
    }
}

/// The combinations to check, and the skipped ones.
#[derive(Debug, Default)]
pub(super) struct Plan<'a> {
    /// The combinations, in the order of the report.
    pub(super) cases: Vec<Case<'a>>,
    /// The devices, NICs and combinations that are not checked, with reasons.
    pub(super) skipped: Vec<Skipped>,
    /// The NICs that cannot be opened and the ifaces whose devices cannot be listed.
    pub(super) failures: Vec<Skipped>,
    /// The names of the ifaces whose device memory must be verified: those that `FI_HMEM` names and
    /// that have devices. Empty if only host memory is checked.
    pub(super) required: Vec<String>,
}

/// Lists the combinations of `selection` that this machine supports, and the skipped ones with
/// reasons.
pub(super) fn plan<'a>(machine: &'a Machine, selection: &Selection) -> Plan<'a> {
    let mut plan = Plan::default();
    for (kind, why) in machine.hmem.registry().absent() {
        let name = machine.iface_name(kind);
        if selection.iface.as_ref().is_none_or(|wanted| *wanted == name) {
            plan.skipped.push(Skipped::new(format!("iface {name}"), why));
        }
    }
    // The check does not use the topology, so an unreadable one is not listed.
    for absent in machine.absent.iter().filter(|absent| absent.sort != "topology") {
        let by = if absent.sort == "iface" { &selection.iface } else { &selection.provider };
        let narrowed = selection.iface.is_some() || selection.provider.is_some();
        let missed =
            |name: &String| absent.is_missed_by(name, machine.nics(Some(name)).next().is_some());
        let failed = machine.failed_to_open(absent);
        if by.as_ref().map_or(failed || !narrowed, missed) {
            let list = if failed { &mut plan.failures } else { &mut plan.skipped };
            list.push(absent.into());
        }
    }

    let mut memories = Vec::new();
    for iface in machine.ifaces(selection.iface.as_deref()) {
        if iface.kind() == IfaceKind::SYSTEM {
            memories.extend([
                MemorySort::Heap,
                MemorySort::Mapped(Arc::clone(iface)),
                MemorySort::Borrowed(Arc::clone(iface)),
                MemorySort::MemFd,
            ]);
            memories.extend(huge_pages(&mut plan.skipped));
        } else {
            let name = iface.name();
            let devices = match iface.devices() {
                Ok(devices) => devices,
                Err(why) => {
                    plan.failures.push(Skipped::new(format!("devices of {name}"), why));
                    continue;
                }
            };
            let host_only = selection.path == Some(Path::PlainHost);
            if machine.hmem.names_iface(iface.kind()) && !devices.is_empty() && !host_only {
                plan.required.push(name.to_owned());
            }
            match of_devices(iface, &devices) {
                Ok(found) => memories.extend(found),
                Err(why) => plan.skipped.push(Skipped::new(format!("iface {name}"), why)),
            }
        }
    }
    for nic in machine.nics(selection.provider.as_deref()) {
        for memory in &memories {
            let simulated = machine.is_software(memory.iface_kind());
            for variant in
                variants(memory, simulated, nic, machine.hmem.p2p_disabled(), &mut plan.skipped)
            {
                if selection.path.is_none_or(|path| path == variant.path()) {
                    let software =
                        nic.software && (simulated || memory.iface_kind() == IfaceKind::SYSTEM);
                    plan.cases.push(Case { memory: memory.clone(), nic, variant, software });
                }
            }
        }
    }
    plan
}

/// Returns the huge-page memory to check. If no huge page can be allocated, adds the error to
/// `skipped` and returns `None`.
fn huge_pages(skipped: &mut Vec<Skipped>) -> Option<MemorySort> {
    let system = Arc::new(System::new());
    match HugeBuffer::allocate(&system, 1) {
        Ok(_) => Some(MemorySort::HugePages(system)),
        Err(error) => {
            skipped.push(Skipped::new("system huge-pages", error));
            None
        }
    }
}

/// Returns each kind of memory on each device of an iface, and the iface's host memory once.
///
/// # Errors
/// The reason why the iface has no memory to check: it has no allocator or no device.
fn of_devices(iface: &Arc<dyn Iface>, devices: &[Device]) -> Result<Vec<MemorySort>, &'static str> {
    if iface.allocator().is_none() {
        return Err("this iface cannot allocate memory");
    }
    if devices.is_empty() {
        return Err("the iface has no device");
    }
    let of = |device: Option<DeviceId>, kind| MemorySort::Allocated {
        iface: Arc::clone(iface),
        device,
        kind,
    };
    let mut memories = vec![of(None, AllocationKind::Host)];
    for device in devices {
        for kind in [
            AllocationKind::Device,
            AllocationKind::Managed,
            AllocationKind::StreamOrdered,
            AllocationKind::Virtual,
        ] {
            memories.push(of(Some(device.id), kind));
        }
    }
    Ok(memories)
}

/// Returns the paths from the memory to the NIC. The direct path to device memory is dma-buf if
/// the iface and the NIC support it, and otherwise peer memory. If the direct path or staging is
/// impossible, adds an entry with the reason to `skipped`.
fn variants(
    memory: &MemorySort,
    simulated: bool,
    nic: &ProviderNic,
    p2p_disabled: bool,
    skipped: &mut Vec<Skipped>,
) -> Vec<PathVariant> {
    let MemorySort::Allocated { iface, .. } = memory else { return vec![PathVariant::Host] };
    if memory.is_host() {
        return vec![PathVariant::Host];
    }
    let (imports, can) = (nic.attr.imports, iface.capability());
    // Peer-memory clients are kernel modules, and the kernel does not know simulated devices.
    let peer_memory = can.peer_memory && (nic.software || !simulated);
    let mut variants = Vec::new();
    let between = || format!("{} to {}", iface.name(), nic.attr.nic);
    if p2p_disabled {
        let why = "FI_HMEM_DISABLE_P2P forbids direct access to device memory";
        skipped.push(Skipped::new(format!("{} directly", between()), why));
    } else if imports.dma_buf && can.dma_buf {
        variants.push(PathVariant::Direct(Path::DmaBuf));
    } else if imports.peer_memory && peer_memory {
        variants.push(PathVariant::Direct(Path::PeerMemory));
    } else {
        let why = match (can.dma_buf, imports.dma_buf) {
            (false, true) => "the device does not export dma-bufs, and they share no peer memory",
            (true, false) => "the NIC does not import dma-bufs, and they share no peer memory",
            _ => "neither exchanges dma-bufs, and they share no peer memory",
        };
        skipped.push(Skipped::new(format!("{} directly", between()), why));
    }
    let exposed = Access::REMOTE_READ | Access::REMOTE_WRITE;
    if imports.staged && nic.attr.staged_access.contains(exposed) {
        variants.push(PathVariant::Staged);
    } else {
        let why = match imports.staged {
            true => "peers cannot access staged memory of this NIC, which the check requires",
            false => "this NIC has no staged copies",
        };
        skipped.push(Skipped::new(format!("{} over staged", between()), why));
    }
    variants
}
