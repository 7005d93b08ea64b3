//! Findings: properties of the hardware or the kernel that block or slow the path between a device
//! and a NIC, with remedies.

use super::{BusId, Distance, Hop, Link, PciDevice, PciPath, Port, Redirection, Topology};

/// Property of the hardware or the kernel that blocks or slows the path between a device and a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// Name of the finding: `acs`, `iommu`, `bar`, `link`, `port`, `distance`, `data-direct`,
    /// `peer-memory` or `integrated`.
    pub name: &'static str,
    /// Description of the finding in one sentence.
    pub what: String,
    /// Remedy for the finding.
    pub remedy: &'static str,
}

const ACS: &str = "turn off ACS redirection on these ports, in firmware or with setpci, if the \
                   devices are trusted; or turn on ATS in the NIC";
const ACS_UNKNOWN: &str = "run the command as root (CAP_SYS_ADMIN) to read ACS; if it still cannot \
                           be read, boot without pci=nommconf";
const IOMMU: &str = "boot with iommu=pt, so that the IOMMU does not translate";
const IOMMU_ARM: &str = "boot with iommu.passthrough=1, so that the IOMMU does not translate";
const BAR: &str = "turn on Above 4G Decoding and Resizable BAR in firmware, or choose a device \
                   whose whole memory can be mapped";
const LINK: &str =
    "measure again under load, since idle links slow down; then check the slot, riser or cable";
const PORT: &str =
    "connect the port and bring its link up (`rdma link`, `ibstat`), or use another NIC";
const DATA_DIRECT: &str = "none needed, since the NIC reaches the memory over NVLink-C2C; with \
                           Linux 6.12 and rdma-core 54 or newer, the verbs provider registers \
                           device memory by this function (dma-buf-data-direct)";
const INTEGRATED: &str = "allocate the buffers as page-locked host memory (cuMemHostAlloc), and \
                          register them as host memory";
const DISTANCE: &str = "use a nearer NIC";
const FAR: &str =
    "move one of them under the same PCIe switch, or copy through host memory near the NIC";
const PEER_MEMORY: &str =
    "load nvidia_peermem, or install the driver's open kernel modules, which export dma-bufs";

impl Topology {
    /// Returns the findings about the path between `device` and `nic`, in the order of
    /// [`Finding::name`]. The list is empty if one of the two is not in the tree.
    ///
    /// `memory` is the size of the device's memory in bytes, if it is known. If the BAR is smaller,
    /// peers can access only part of the memory. Findings do not prove that direct access works or
    /// fails: only a registration shows that.
    #[must_use]
    pub fn findings(&self, device: BusId, nic: BusId, memory: Option<u64>) -> Vec<Finding> {
        let (Some(path), Some(gpu), Some(card)) =
            (self.path(device, nic), self.device(device), self.device(nic))
        else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut add = |name, what, remedy| found.push(Finding { name, what, remedy });
        let list =
            |ids: &[BusId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match &path.redirection {
            Redirection::By(ports) => {
                let what = format!(
                    "ACS redirects traffic between {device} and {nic} to the root complex (ports \
                     {})",
                    list(ports)
                );
                add("acs", what, ACS);
            }
            Redirection::Unknown(ports) => {
                let what = format!("ACS of ports {} cannot be read", list(ports));
                add("acs", what, ACS_UNKNOWN);
            }
            Redirection::None => {}
        }
        let translated = |id: Option<u32>| {
            id.and_then(|id| self.group_type(id)).filter(|kind| *kind != "identity")
        };
        if let Some(kind) = translated(card.iommu_group) {
            let what =
                format!("the IOMMU translates the addresses of {nic} (its group has type {kind})");
            // The CPUs of devices with NVLink-C2C are of the Arm architecture.
            add("iommu", what, if gpu.is_coherent() { IOMMU_ARM } else { IOMMU });
        }
        let bar = gpu.largest_bar();
        if let Some(memory) = memory.filter(|memory| bar < *memory) {
            let what =
                format!("{device} shows {bar} of its {memory} bytes of memory through its BAR");
            add("bar", what, BAR);
        }
        for (id, link) in self.degraded_links(&path, gpu, card) {
            let speed = |it: Option<f32>| it.map_or("?".into(), |speed| speed.to_string());
            let lanes = |it: Option<u8>| it.map_or("?".into(), |width| width.to_string());
            let what = format!(
                "the link of {id} runs at {} GT/s x{} of {} GT/s x{}",
                speed(link.speed),
                lanes(link.width),
                speed(link.max_speed),
                lanes(link.max_width)
            );
            add("link", what, LINK);
        }
        for rdma in self.rdma_at(nic) {
            let down = rdma.ports.iter().all(|port| port.active == Some(false));
            if down && !rdma.ports.is_empty() {
                add("port", format!("no port of {} ({nic}) is active", rdma.name), PORT);
            }
        }
        let nearest = self.nearest_nics(device);
        let nearer = nearest.first().filter(|(_, best)| best.distance < path.distance);
        if let Some((best, shorter)) = nearer {
            let name = self.rdma_at(*best).next().map_or("a NIC", |device| &device.name);
            let what = format!(
                "{nic} is {} from {device}; {name} ({best}) is {}",
                path.distance, shorter.distance
            );
            add("distance", what, DISTANCE);
        } else if path.distance >= Distance::Node {
            let apart = path.distance;
            add(
                "distance",
                format!("{device} and {nic} are {apart} apart, and no NIC is nearer"),
                FAR,
            );
        }
        let beside = |other: BusId| {
            let path = self.path(device, other);
            path.is_some_and(|path| matches!(path.distance, Distance::Pix | Distance::Pxb))
        };
        let mut direct = self.devices().filter(|other| other.is_data_direct());
        let direct = direct.find(|other| gpu.has_c2c() && beside(other.bus_id));
        if let Some(direct) = direct.filter(|direct| direct.vendor == card.vendor && !beside(nic)) {
            let what = format!(
                "the Data Direct function {} is below the PCIe switch of {device}, and \
                 registrations with {nic} do not use it",
                direct.bus_id
            );
            add("data-direct", what, DATA_DIRECT);
        }
        // A driver that exports dma-bufs needs no peer-memory module.
        let closed = gpu.driver.as_deref().and_then(|driver| self.kernel.without_dma_buf(driver));
        if let Some(closed) = closed.filter(|_| self.kernel.peer_memory().next().is_none()) {
            let what = format!("{closed}, and no peer-memory module is loaded");
            add("peer-memory", what, PEER_MEMORY);
        }
        if gpu.is_integrated() {
            let what = format!(
                "{device} uses the CPU's memory, and its driver opens none of it to NICs (no \
                 GPUDirect RDMA)"
            );
            add("integrated", what, INTEGRATED);
        }
        found
    }

    /// Returns the degraded links of the path, each with the function at its lower end. This is the
    /// device, the NIC or the upstream port of a switch, for example of the one on an AMD card. The
    /// upper end may be a port that is faster than the function.
    fn degraded_links(
        &self,
        path: &PciPath,
        gpu: &PciDevice,
        card: &PciDevice,
    ) -> impl Iterator<Item = (BusId, Link)> {
        path.hops.iter().filter_map(|hop| {
            let id = match hop {
                Hop::Function(id) => *id,
                // The traffic of two devices below one switch does not cross its upstream link.
                Hop::Bridge(id, Port::Upstream)
                    if !(gpu.bridges.contains(id) && card.bridges.contains(id)) =>
                {
                    *id
                }
                _ => return None,
            };
            let link = self.device(id)?.link.filter(Link::is_degraded)?;
            Some((id, link))
        })
    }
}
