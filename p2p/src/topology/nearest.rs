//! Choice of the NICs that are nearest to memory, with the reasons for the choice.

use std::fmt;

use hmem_core::{Error, ErrorKind, Result, provider::Nic};

use super::{
    Topology,
    bus_id::BusId,
    distance::{Distance, PciPath},
};

/// Place of memory in a machine. Distances of NICs are measured from this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Locality {
    /// Memory of the device at this PCI address.
    Device(BusId),
    /// Host memory of this NUMA node.
    Node(u32),
}

impl fmt::Display for Locality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(id) => write!(f, "device {id}"),
            Self::Node(node) => write!(f, "NUMA node {node}"),
        }
    }
}

/// A NIC and its distance to the memory for which NICs are chosen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RankedNic {
    /// Index of the NIC in the caller's list.
    pub index: usize,
    /// Provider, name and PCI address of the NIC.
    pub nic: Nic,
    /// The distance to the memory; `None` if it is not known.
    pub distance: Option<Distance>,
    /// The path between the NIC and the device; `None` for host memory or an unknown distance.
    pub path: Option<PciPath>,
    /// The reason why the distance is unknown or a guess; `None` if it is certain.
    pub note: Option<&'static str>,
}

/// Sort key of a NIC: the distance class, then the number of hops. `None` if the distance is not
/// known.
type Nearness = Option<(Distance, usize)>;

impl RankedNic {
    /// Returns the sort key of the NIC. NICs with equal keys are equally near.
    fn nearness(&self) -> Nearness {
        Some((self.distance?, self.path.as_ref().map_or(0, |path| path.hops.len())))
    }
}

impl fmt::Display for RankedNic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at ", self.nic)?;
        match self.distance {
            Some(distance) => write!(f, "{distance} ({})", distance.meaning())?,
            None => f.write_str("an unknown distance")?,
        }
        match self.note {
            Some(note) => write!(f, ": {note}"),
            None => Ok(()),
        }
    }
}

/// NICs of a list that were chosen for memory, and the NICs that were not.
///
/// `Display` prints the place of the memory, then one line for each NIC with its distance. A mark
/// shows the NICs that were not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct NearestNics {
    memory: Locality,
    /// All NICs, nearest first.
    ranked: Vec<RankedNic>,
    /// Number of chosen NICs: the first ones of `ranked`.
    count: usize,
}

impl NearestNics {
    /// Returns the place of the memory for which the NICs were chosen.
    #[must_use]
    pub const fn memory(&self) -> Locality {
        self.memory
    }

    /// Returns the NICs that were chosen, nearest first.
    #[must_use]
    pub fn chosen(&self) -> &[RankedNic] {
        &self.ranked[..self.count]
    }

    /// Returns the NICs that were not chosen, nearest first.
    #[must_use]
    pub fn others(&self) -> &[RankedNic] {
        &self.ranked[self.count..]
    }

    /// Returns the items of the chosen NICs. `items` holds one item (such as a domain) for each NIC
    /// of the original list, in that order.
    ///
    /// # Panics
    /// If `items` has no item for a chosen NIC.
    #[must_use]
    pub fn pick<T: Copy>(&self, items: &[T]) -> Vec<T> {
        self.chosen().iter().map(|nic| items[nic.index]).collect()
    }
}

impl fmt::Display for NearestNics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nearest to {}:", self.memory)?;
        for (at, nic) in self.ranked.iter().enumerate() {
            write!(f, "\n  {}{nic}", if at < self.count { "" } else { "not chosen: " })?;
        }
        Ok(())
    }
}

impl Topology {
    /// Chooses the `count` NICs that are nearest to memory, out of `nics`.
    ///
    /// The order is: the distance class, then the number of hops (for device memory), as in
    /// [`nics_by_distance`](Self::nics_by_distance). Host memory has the distance `NODE` to the
    /// NICs of its NUMA node, and `SYS` to others. If at most one node has CPUs, the distance is
    /// always `NODE`. Memory of a node without CPUs has the distances of the nearest node with
    /// CPUs. The distance of a NIC is unknown if the NIC has no PCI address or is not in the tree.
    /// Such NICs come last.
    ///
    /// NICs that are equally near to a device have this order:
    ///
    /// 1. A NIC may be the only nearest NIC of other accelerators. NICs with fewer such
    ///    accelerators come first.
    /// 2. NICs with equally many have the order of `nics`, rotated so that devices that share
    ///    several NICs begin with different ones. The rotation is the device's index among the
    ///    accelerators to which exactly the same NICs are equally near.
    ///
    /// For host memory, the order of `nics` decides between equally near NICs. Equal arguments give
    /// equal choices in every process.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`]: `count` is 0 or above the number of NICs, a NIC is listed
    ///   twice, or the machine does not have the NUMA node.
    /// - [`ErrorKind::Unavailable`]: the device is not in the tree.
    pub fn choose_nics(
        &self,
        memory: Locality,
        nics: &[&Nic],
        count: usize,
    ) -> Result<NearestNics> {
        let refuse = |kind, why: &'static str, remedy: &'static str| {
            let error =
                Error::new(kind, "nearest NICs").context("why", why).context("memory", memory);
            Err(error.context("asked for", count).context("nics", nics.len()).remedy(remedy))
        };
        let invalid = ErrorKind::InvalidArgument;
        if count == 0 {
            return refuse(invalid, "the number of NICs is 0", "ask for at least one NIC");
        }
        if count > nics.len() {
            let remedy = "request fewer NICs, or open domains on more NICs";
            return refuse(invalid, "more NICs are requested than exist", remedy);
        }
        fn name(nic: &Nic) -> (&str, &str) {
            (&nic.provider, &nic.name)
        }
        let twice = |(at, nic): (usize, &&Nic)| nics[..at].iter().any(|n| name(n) == name(nic));
        if nics.iter().enumerate().any(twice) {
            let remedy = "choose from one domain of each NIC";
            return refuse(invalid, "a NIC is listed twice", remedy);
        }
        let has_node = |node: u32| {
            let nodes = self.numa();
            nodes.iter().any(|known| known.id == node) || (nodes.is_empty() && node == 0)
        };
        match memory {
            Locality::Device(id) if self.device(id).is_none() => {
                return refuse(
                    ErrorKind::Unavailable,
                    "the device is not in the PCIe tree",
                    "read the topology of this machine, or choose the NICs yourself",
                );
            }
            Locality::Node(node) if !has_node(node) => {
                let remedy = "read the topology of the machine that has the memory";
                return refuse(invalid, "the machine does not have the NUMA node", remedy);
            }
            Locality::Device(_) | Locality::Node(_) => {}
        }
        let mut ranked: Vec<_> =
            nics.iter().enumerate().map(|(at, nic)| self.rank(memory, at, nic)).collect();
        // The sort is stable: equal NICs keep the caller's order.
        ranked.sort_by_key(|nic| (nic.distance.is_none(), nic.nearness()));
        if let Locality::Device(device) = memory {
            self.spread(device, &mut ranked, nics);
        }
        Ok(NearestNics { memory, ranked, count })
    }

    /// Orders equally near NICs for `device` as [`choose_nics`](Self::choose_nics) says. `ranked`
    /// is sorted by nearness.
    fn spread(&self, device: BusId, ranked: &mut [RankedNic], nics: &[&Nic]) {
        let nearness_of = |other: BusId| -> Vec<Nearness> {
            let rank = |(at, nic): (usize, &&Nic)| self.rank(Locality::Device(other), at, nic);
            nics.iter().enumerate().map(|nic| rank(nic).nearness()).collect()
        };
        let others = self.accelerators().map(|other| other.bus_id).filter(|id| *id != device);
        let others: Vec<_> = others.map(|id| (id, nearness_of(id))).collect();
        // For each NIC, the number of other devices for which it is the only nearest NIC.
        let mut wanted = vec![0; nics.len()];
        for only in others.iter().filter_map(|(_, near)| only_nearest(near)) {
            wanted[only] += 1;
        }
        for group in ranked.chunk_by_mut(|one, other| one.nearness() == other.nearness()) {
            let members: Vec<_> = group.iter().map(|nic| nic.index).collect();
            // Returns true if exactly these NICs are equally near to another device, too.
            let shares = |near: &[Nearness]| {
                let nearness = near[members[0]];
                let is_member = |at: usize| members.contains(&at);
                nearness.is_some()
                    && (0..near.len()).all(|at| is_member(at) == (near[at] == nearness))
            };
            let before = others.iter().filter(|(id, near)| *id < device && shares(near)).count();
            group.sort_by_key(|nic| wanted[nic.index]);
            let wanted_alike =
                |one: &RankedNic, other: &RankedNic| wanted[one.index] == wanted[other.index];
            for equal in group.chunk_by_mut(wanted_alike) {
                equal.rotate_left(before % equal.len());
            }
        }
    }

    fn rank(&self, memory: Locality, index: usize, nic: &Nic) -> RankedNic {
        let mut ranked =
            RankedNic { index, nic: nic.clone(), distance: None, path: None, note: None };
        let Some(address) = &nic.pci_bus_id else {
            ranked.note = Some("the NIC has no PCI address");
            return ranked;
        };
        let Some(function) = address.parse().ok().and_then(|id| self.device(id)) else {
            ranked.note = Some("the NIC is not in the PCIe tree");
            return ranked;
        };
        let numa_unknown = match memory {
            Locality::Device(device) => {
                ranked.path = self.path(device, function.bus_id);
                ranked.distance = ranked.path.as_ref().map(|path| path.distance);
                ranked.path.as_ref().is_some_and(|path| path.numa_unknown)
            }
            Locality::Node(node) => {
                let one_node = self.has_one_cpu_node();
                let near = self.nearest_cpu_node(node).unwrap_or(node);
                let is_near = one_node || function.numa_node == Some(near);
                ranked.distance = Some(if is_near { Distance::Node } else { Distance::Sys });
                if self.numa().iter().any(|known| known.id == node && known.cpus.is_empty()) {
                    ranked.note = Some("from the nearest node with CPUs: the memory's has none");
                }
                !one_node && function.numa_node.is_none()
            }
        };
        if numa_unknown {
            ranked.note = Some("a guess, because a NUMA node is not known");
        }
        ranked
    }
}

/// Returns the index of the NIC that is nearer than all others; `None` if two are equally near.
fn only_nearest(near: &[Nearness]) -> Option<usize> {
    let best = near.iter().flatten().min()?;
    let mut nearest = (0..near.len()).filter(|at| near[*at].as_ref() == Some(best));
    nearest.next().filter(|_| nearest.next().is_none())
}
