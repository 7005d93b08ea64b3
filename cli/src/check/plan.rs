//! What there is to check on this machine, and what cannot be.

use std::{fmt, sync::Arc};

use hmem::{
    Access, AllocationKind, DeviceId, Iface, IfaceExt, IfaceKind, Path, path::P2pPolicy,
    system::System,
};

use super::{Memory, Selection, memory::HugeBuffer, skip};
use crate::{
    json::Skipped,
    machine::{Fabric, Machine},
};

/// How the NIC should get at the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As host pages.
    Host,
    /// Straight from the device, over this path.
    Direct(Path),
    /// Through copies.
    Staged,
}

impl Way {
    /// The path that the decision should come to.
    #[must_use]
    pub const fn path(self) -> Path {
        match self {
            Self::Host => Path::PlainHost,
            Self::Direct(path) => path,
            Self::Staged => Path::Staged,
        }
    }

    /// The policy that leaves no other.
    #[must_use]
    pub const fn policy(self) -> P2pPolicy {
        match self {
            Self::Host => P2pPolicy::Enabled,
            Self::Direct(_) => P2pPolicy::Required,
            Self::Staged => P2pPolicy::Disabled,
        }
    }
}

/// One combination.
#[derive(Clone, Debug)]
pub struct Case<'a> {
    /// The memory.
    pub memory: Memory,
    /// The NIC.
    pub nic: &'a Fabric,
    /// The way between them.
    pub way: Way,
    /// Whether both are software, which has no excuse for refusing.
    pub software: bool,
}

impl fmt::Display for Case<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {} over {}", self.memory, self.nic.attr.nic, self.way.path())
    }
}

/// What to check, and what not.
#[derive(Debug, Default)]
pub struct Plan<'a> {
    /// In the order of the report.
    pub cases: Vec<Case<'a>>,
    /// With reasons.
    pub skipped: Vec<Skipped>,
}

/// Lists every combination of memory, NIC and way that was selected.
#[must_use]
pub fn plan<'a>(machine: &'a Machine, selection: &Selection) -> Plan<'a> {
    let mut plan = Plan::default();
    let registry = machine.hmem.registry();
    let wanted = |iface: &str| selection.iface.as_deref().is_none_or(|wanted| wanted == iface);

    for (kind, why) in registry.absent() {
        let name = machine.iface_name(kind);
        if wanted(&name) {
            plan.skipped.push(skip(format!("iface {name}"), why));
        }
    }
    // What is only looked at is not there to be checked.
    for absent in machine.absent.iter().filter(|absent| absent.sort != "topology") {
        let by = if absent.sort == "iface" { &selection.iface } else { &selection.provider };
        let narrowed = selection.iface.is_some() || selection.provider.is_some();
        let named =
            |name: &String| *name == absent.name || absent.name.starts_with(&format!("{name}/"));
        if by.as_ref().map_or(!narrowed, named) {
            plan.skipped.push(absent.into());
        }
    }

    let mut memories = Vec::new();
    for iface in registry.iter().filter(|iface| wanted(iface.name())) {
        if iface.kind() == IfaceKind::SYSTEM {
            let (mapped, borrowed) = (Arc::clone(iface), Arc::clone(iface));
            memories.extend([
                Memory::Heap,
                Memory::Mapped(mapped),
                Memory::Borrowed(borrowed),
                Memory::MemFd,
            ]);
            memories.extend(huge_pages(&mut plan.skipped));
        } else {
            memories.extend(of_devices(iface, &mut plan.skipped));
        }
    }
    let wanted =
        |nic: &Fabric| selection.provider.as_deref().is_none_or(|name| nic.answers_to(name));
    for nic in machine.nics.iter().filter(|nic| wanted(nic)) {
        for memory in &memories {
            let simulated = matches!(memory, Memory::Allocated { iface, .. } if machine.is_software(iface.kind()));
            for way in ways(memory, simulated, nic, machine.hmem.p2p_disabled(), &mut plan.skipped)
            {
                if selection.path.is_none_or(|path| path == way.path()) {
                    let software =
                        nic.software && (simulated || memory.iface_kind() == IfaceKind::SYSTEM);
                    plan.cases.push(Case { memory: memory.clone(), nic, way, software });
                }
            }
        }
    }
    plan
}

/// Huge pages, if the machine gives one out.
fn huge_pages(skipped: &mut Vec<Skipped>) -> Option<Memory> {
    let system = Arc::new(System::new());
    match HugeBuffer::allocate(&system, 1) {
        Ok(_) => Some(Memory::HugePages(system)),
        Err(error) => {
            skipped.push(skip("system huge-pages", error));
            None
        }
    }
}

/// What a device iface allocates: each kind on each device, and host memory once.
fn of_devices(iface: &Arc<dyn Iface>, skipped: &mut Vec<Skipped>) -> Vec<Memory> {
    let name = iface.name();
    if iface.allocator().is_none() {
        skipped.push(skip(
            format!("iface {name}"),
            "it started, but does not allocate memory in this version",
        ));
        return Vec::new();
    }
    let devices = match iface.devices() {
        Ok(devices) if devices.is_empty() => {
            skipped.push(skip(format!("iface {name}"), "it has no device"));
            return Vec::new();
        }
        Ok(devices) => devices,
        Err(error) => {
            skipped.push(skip(format!("iface {name}"), error));
            return Vec::new();
        }
    };
    let of = |device: Option<DeviceId>, kind| Memory::Allocated {
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
    memories
}

/// The ways that could be there between memory and NIC.
fn ways(
    memory: &Memory,
    simulated: bool,
    nic: &Fabric,
    p2p_disabled: bool,
    skipped: &mut Vec<Skipped>,
) -> Vec<Way> {
    let Memory::Allocated { iface, .. } = memory else { return vec![Way::Host] };
    if memory.is_host() {
        return vec![Way::Host];
    }
    let (imports, can) = (nic.attr.imports, iface.capability());
    // Peer-memory clients are the kernel's, and it knows no simulated device.
    let peer_memory = can.peer_memory && (nic.software || !simulated);
    let mut ways = Vec::new();
    let between = || format!("{} to {}", iface.name(), nic.attr.nic);
    if p2p_disabled {
        let why = "direct access to device memory is switched off (FI_HMEM_DISABLE_P2P)";
        skipped.push(skip(format!("{} directly", between()), why));
    } else if imports.dma_buf && can.dma_buf {
        ways.push(Way::Direct(Path::DmaBuf));
    } else if imports.peer_memory && peer_memory {
        ways.push(Way::Direct(Path::PeerMemory));
    } else {
        let why = format!(
            "no direct way: dma-buf needs export ({}) and import ({}), peer memory needs both sides too",
            can.dma_buf, imports.dma_buf
        );
        skipped.push(skip(format!("{} directly", between()), why));
    }
    let exposed = Access::REMOTE_READ | Access::REMOTE_WRITE;
    if imports.staged && nic.attr.staged_access.contains(exposed) {
        ways.push(Way::Staged);
    } else if imports.staged {
        let why =
            "peers cannot reach memory that this NIC is given copies of, and a check lets them";
        skipped.push(skip(format!("{} over staged", between()), why));
    } else {
        skipped.push(skip(format!("{} over staged", between()), "this NIC takes no staged copies"));
    }
    ways
}
