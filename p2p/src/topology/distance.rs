//! Distances and paths between PCI functions, in the classes of `nvidia-smi topo`.

use std::fmt;

use super::{
    Topology,
    bus_id::{BusId, RootBus},
    config_space::Port,
    device::PciDevice,
};

/// Distance class of two PCI functions, nearest first. The names are those of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// `X`: both ends of the path are the same function.
    Same,
    /// `PIX`: the path passes at most one switch. A bridge to conventional PCI counts as a switch.
    Pix,
    /// `PXB`: the path passes several switches, and no host bridge.
    Pxb,
    /// `PHB`: the path passes one host bridge (usually that of a CPU). For a device with
    /// NVLink-C2C, that link takes the place of the host bridge above the device.
    Phb,
    /// `NODE`: the path passes two host bridges of one NUMA node.
    Node,
    /// `SYS`: the path passes two host bridges of different NUMA nodes, or of unknown ones.
    Sys,
}

impl Distance {
    /// All classes, nearest first.
    pub const ALL: [Self; 6] = [Self::Same, Self::Pix, Self::Pxb, Self::Phb, Self::Node, Self::Sys];

    /// Returns the name of the distance class in `nvidia-smi topo`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Same => "X",
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
        }
    }

    /// Returns a short description of the class.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Same => "the same PCI function",
            Self::Pix => "at most one PCIe switch",
            Self::Pxb => "several PCIe switches, no host bridge",
            Self::Phb => "a PCIe host bridge (the CPU)",
            Self::Node => "two host bridges of one NUMA node",
            Self::Sys => "between NUMA nodes, or with an unknown NUMA node",
        }
    }
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A step of the path between two PCI functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Hop {
    /// The first or the last function of the path.
    Function(BusId),
    /// A bridge, or a port of a switch.
    Bridge(BusId, Port),
    /// A host bridge.
    HostBridge(RootBus),
    /// The interconnect between two host bridges. They may be in the same NUMA node or in two
    /// nodes.
    Interconnect,
    /// NVLink-C2C, between a device and the CPU.
    C2c,
}

impl fmt::Display for Hop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(id) => write!(f, "{id}"),
            Self::Bridge(id, port) => write!(f, "{id} ({port})"),
            Self::HostBridge(root) => write!(f, "{root} (host-bridge)"),
            Self::Interconnect => f.write_str("interconnect"),
            Self::C2c => f.write_str("NVLink-C2C"),
        }
    }
}

/// Redirection of a path's traffic to the root complex, by Access Control Services (ACS).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirection {
    /// No port on the path redirects traffic, or the path passes a host bridge anyway.
    None,
    /// These ports redirect traffic. Traffic that could stay in a switch goes through the root
    /// complex.
    By(Vec<BusId>),
    /// No port is known to redirect, but the ACS capabilities of these ports could not be read.
    Unknown(Vec<BusId>),
}

/// Path between two PCI functions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PciPath {
    /// Distance class of the two functions.
    pub distance: Distance,
    /// All hops of the path, both PCI functions included, in the order from the first function to
    /// the second.
    pub hops: Vec<Hop>,
    /// Redirection of the path's traffic to the root complex.
    pub redirection: Redirection,
    /// True if the class `SYS` is a guess, because the NUMA node of a function is not known.
    pub numa_unknown: bool,
}

impl Topology {
    /// Returns the path between two functions, or `None` if one of them is not in the tree.
    ///
    /// Between a device with NVLink-C2C (GB10 included) and another function, the path leads over
    /// that link, unless a PCIe switch or root port is above both.
    #[must_use]
    pub fn path(&self, from: BusId, to: BusId) -> Option<PciPath> {
        let (a, b) = (self.device(from)?, self.device(to)?);
        if from == to {
            return Some(PciPath {
                distance: Distance::Same,
                hops: vec![Hop::Function(from)],
                redirection: Redirection::None,
                numa_unknown: false,
            });
        }
        let shared = if a.root == b.root {
            a.bridges.iter().zip(&b.bridges).take_while(|(a, b)| a == b).count()
        } else {
            0
        };
        let (up, down) = (&a.bridges[shared..], &b.bridges[shared..]);
        let meeting = a.bridges[..shared].last().copied();
        let by_c2c = meeting.is_none() && a.is_coherent() != b.is_coherent();
        let (distance, numa_unknown) = self.classify(a, b, meeting, up, down);
        let distance = if by_c2c && distance == Distance::Node { Distance::Phb } else { distance };
        let bridge = |id: &BusId| {
            Hop::Bridge(*id, self.device(*id).map_or(Port::Bridge, |bridge| bridge.port))
        };
        // NVLink-C2C takes the place of the device's bridges and host bridge.
        let side = |end: &PciDevice, bridges: &[BusId]| -> Vec<Hop> {
            if by_c2c && end.is_coherent() {
                return vec![Hop::C2c];
            }
            let host = meeting.is_none().then_some(Hop::HostBridge(end.root));
            bridges.iter().rev().map(bridge).chain(host).collect()
        };
        let mut back = side(b, down);
        back.reverse();
        let mut hops = vec![Hop::Function(from)];
        hops.extend(side(a, up));
        if let Some(meeting) = meeting {
            hops.push(bridge(&meeting));
        } else if a.root == b.root && !by_c2c {
            back.remove(0);
        } else if !by_c2c || distance == Distance::Sys {
            hops.push(Hop::Interconnect);
        }
        hops.extend(back);
        hops.push(Hop::Function(to));
        Some(PciPath {
            distance,
            hops,
            redirection: self.redirection(distance, up, down),
            numa_unknown,
        })
    }

    /// Returns the distance class of two functions, and true if the class is a guess because a NUMA
    /// node is not known.
    ///
    /// `meeting` is the lowest bridge above both functions, if there is one. `up` are the bridges
    /// between `meeting` and `a`, and `down` are those between `meeting` and `b`. Without
    /// `meeting`, `up` and `down` begin below the host bridges of `a` and `b`.
    fn classify(
        &self,
        a: &PciDevice,
        b: &PciDevice,
        meeting: Option<BusId>,
        up: &[BusId],
        down: &[BusId],
    ) -> (Distance, bool) {
        if let Some(meeting) = meeting {
            // Each switch has exactly one upstream port, so the number of upstream ports is the
            // number of switches.
            let on_the_way = up.iter().chain(down).chain([&meeting]);
            let switches = on_the_way.filter(|id| self.port(**id) == Some(Port::Upstream)).count();
            // A bridge to conventional PCI has no upstream port. It counts as a switch, unless the
            // two branches meet there.
            let others =
                up.iter().chain(down).filter(|id| self.port(**id) == Some(Port::Bridge)).count();
            return (if switches + others <= 1 { Distance::Pix } else { Distance::Pxb }, false);
        }
        if a.root == b.root {
            return (Distance::Phb, false);
        }
        match (a.numa_node, b.numa_node) {
            (Some(a), Some(b)) if a == b => (Distance::Node, false),
            (Some(_), Some(_)) => (Distance::Sys, false),
            _ if self.has_one_cpu_node() => (Distance::Node, false),
            _ => (Distance::Sys, true),
        }
    }

    fn port(&self, id: BusId) -> Option<Port> {
        self.device(id).map(|device| device.port)
    }

    /// Returns the redirection of a path. Only downstream ports of switches can redirect a request
    /// up to the root complex. Of these, only the ports below the lowest common bridge of the two
    /// functions matter. Traffic that passes the root complex anyway is never redirected (see
    /// `drivers/pci/p2pdma.c`).
    fn redirection(&self, distance: Distance, up: &[BusId], down: &[BusId]) -> Redirection {
        if !matches!(distance, Distance::Pix | Distance::Pxb) {
            return Redirection::None;
        }
        let ports = up.iter().chain(down).filter_map(|id| self.device(*id));
        let ports = ports.filter(|port| port.port == Port::Downstream);
        let (mut by, mut unknown) = (Vec::new(), Vec::new());
        for port in ports {
            match port.acs.redirects() {
                Some(true) => by.push(port.bus_id),
                Some(false) => {}
                None => unknown.push(port.bus_id),
            }
        }
        match (by.is_empty(), unknown.is_empty()) {
            (false, _) => Redirection::By(by),
            (true, false) => Redirection::Unknown(unknown),
            (true, true) => Redirection::None,
        }
    }

    /// Returns the PCI addresses of the RDMA NICs with their paths, nearest to `device` first. If
    /// two NICs have the same distance class, the NIC with fewer hops comes first, then the NIC
    /// with the lower address. Each address occurs once.
    ///
    /// The list is empty if `device` is not in the tree or no NIC has a PCI address.
    #[must_use]
    pub fn nics_by_distance(&self, device: BusId) -> Vec<(BusId, PciPath)> {
        self.by_distance(device, self.rdma.iter().filter_map(|rdma| rdma.bus_id))
    }

    /// Returns the RDMA NICs that are nearest to `device`: those of
    /// [`nics_by_distance`](Self::nics_by_distance) with the distance class of the first one.
    #[must_use]
    pub fn nearest_nics(&self, device: BusId) -> Vec<(BusId, PciPath)> {
        nearest(self.nics_by_distance(device))
    }

    /// Returns the GPUs and accelerators of the distance class that is nearest to `nic`. Fewer hops
    /// come first. The list is empty if `nic` is not in the tree or there is no accelerator.
    #[must_use]
    pub fn nearest_accelerators(&self, nic: BusId) -> Vec<(BusId, PciPath)> {
        nearest(self.by_distance(nic, self.accelerators().map(|device| device.bus_id)))
    }

    fn by_distance(&self, from: BusId, to: impl Iterator<Item = BusId>) -> Vec<(BusId, PciPath)> {
        let mut to: Vec<_> = to.collect();
        to.sort_unstable();
        to.dedup();
        let mut paths: Vec<_> =
            to.into_iter().filter_map(|to| Some((to, self.path(from, to)?))).collect();
        paths.sort_by_key(|(to, path)| (path.distance, path.hops.len(), *to));
        paths
    }
}

/// Keeps the paths with the distance class of the first path.
fn nearest(mut paths: Vec<(BusId, PciPath)>) -> Vec<(BusId, PciPath)> {
    if let Some(best) = paths.first().map(|(_, path)| path.distance) {
        paths.retain(|(_, path)| path.distance == best);
    }
    paths
}
