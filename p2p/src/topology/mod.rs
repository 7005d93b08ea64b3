//! Topology of a machine: which device is near which NIC, and the switches and bridges between
//! them.
//!
//! A [`Topology`] is read from sysfs and procfs. It holds the PCIe tree with its switches and root
//! ports, links and base address registers, NUMA nodes, Access Control Services, IOMMU groups, the
//! kernel's options and its peer-memory modules. [`Topology::read`] reads this machine.
//! [`Topology::record`] writes a recording, which [`Topology::open`] reads from a folder, a tar or
//! a tar.gz.
//!
//! Devices are identified by [`BusId`]. Unlike a device number, this address does not depend on
//! `CUDA_VISIBLE_DEVICES`.
//!
//! # Examples
//!
//! ```
//! use hmem_p2p::topology::{Distance, Topology};
//!
//! let recordings = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/topology");
//! let dgx = Topology::open(format!("{recordings}/dgx-a100.tar.gz"))?;
//! let gpu = "0000:07:00.0".parse()?;
//! let nearest = dgx.nearest_nics(gpu);
//! assert_eq!(nearest.len(), 2);
//! assert_eq!(nearest[0].1.distance, Distance::Pxb);
//! assert_eq!(dgx.rdma_at(nearest[0].0).next().unwrap().name, "mlx5_0");
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! # Limits
//!
//! The module chooses no path: a near NIC may still be unable to reach a device, and only a
//! registration shows it. Of NVLink the module knows only the link between a GPU and its CPU
//! ([`PciDevice::has_c2c`]). It does not see devices that a hypervisor hides.

#[cfg(feature = "recordings")]
mod archive;
#[cfg(not(feature = "recordings"))]
#[path = "no_archive.rs"]
mod archive;
mod bars;
mod bus_id;
mod config_space;
mod device;
mod distance;
mod findings;
mod kernel;
mod nearest;
mod numa;
mod rdma;
mod record;
mod source;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    path::Path,
};

use hmem_core::{Errno, Error, ErrorKind, Result, cause::CoherentLink};

pub(crate) use self::kernel::KeptOptions;
pub use self::{
    bars::Bar,
    bus_id::{BusId, RootBus},
    config_space::{Acs, AcsControl, Port},
    device::{Link, PciDevice, Role},
    distance::{Distance, Hop, PciPath, Redirection},
    findings::Finding,
    kernel::{IommuMode, Kernel, MODULES, NvidiaDriver, OPTIONS, PEER_MEMORY, Setting},
    nearest::{Locality, NearestNics, RankedNic},
    numa::NumaNode,
    rdma::{RdmaDevice, RdmaPort},
};
use self::{
    record::{MARK, VERSION},
    source::Source,
};

/// The PCIe tree, NUMA nodes, RDMA devices and kernel of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    devices: BTreeMap<BusId, PciDevice>,
    rdma: Vec<RdmaDevice>,
    numa: Vec<NumaNode>,
    /// The types of the IOMMU groups by number. A type is empty if the kernel does not report it.
    groups: BTreeMap<u32, String>,
    kernel: Kernel,
    /// The host name of this machine; recordings leave it out.
    host: Option<String>,
}

impl Topology {
    /// Reads this machine.
    ///
    /// # Errors
    /// - Malformed: a file has an unknown format; the context names it. Malformed values of a
    ///   single device (configuration space, registers, link) are left out and logged.
    /// - Unavailable: a file vanished during the read, as when a device is unplugged.
    /// - The kind of the operating system's error if a read failed.
    pub fn read() -> Result<Self> {
        Self::from_source(&Source::Folder { root: "/".into(), live: true })
    }

    /// Reads a recording: a folder with `sys` and `proc` in it, or a tar or tar.gz file of such a
    /// folder.
    ///
    /// # Errors
    /// - Malformed: the recording is cut off, altered, too large, or in an unknown version of the
    ///   format; the context names the file.
    /// - Unavailable: `path` or a required file does not exist.
    /// - Unsupported: `path` is an archive, and the cargo feature `recordings` is off.
    /// - The kind of the operating system's error if a read failed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error: std::io::Error| {
            Error::os(Errno::of(&error), "open topology")
                .context("file", path.display())
                .remedy("give a folder or archive that hmem topo --record FILE made")
        };
        let source = if fs::metadata(path).map_err(failed)?.is_dir() {
            Source::Folder { root: path.to_owned(), live: false }
        } else {
            let name = path.display().to_string();
            let entries = archive::unpack(&name, File::open(path).map_err(failed)?)?;
            Source::Archive { name, entries }
        };
        Self::from_source(&source)
    }

    fn from_source(source: &Source) -> Result<Self> {
        if !source.is_live() {
            check_mark(source)?;
        }
        Ok(Self {
            devices: device::read_all(source)?,
            rdma: rdma::read_all(source)?,
            numa: numa::read_all(source)?,
            groups: kernel::groups(source)?,
            kernel: kernel::read(source, &KeptOptions::default())?,
            host: source.text("proc/sys/kernel/hostname")?,
        })
    }

    /// Returns whether ACS redirects traffic between two functions of the machine at `root`. Reads
    /// only these functions and the bridges above them. Returns `None` in two cases: a function
    /// cannot be read, or the ACS of a port cannot be read and no other port redirects.
    pub(crate) fn redirects_below(root: &Path, one: BusId, other: BusId) -> Option<bool> {
        let topology = Self::of_functions(root, &[one, other])?;
        match topology.path(one, other)?.redirection {
            Redirection::None => Some(false),
            Redirection::By(_) => Some(true),
            Redirection::Unknown(_) => None,
        }
    }

    /// Returns the coherent link between `device` and the CPU of the machine at `root`, as the NIC
    /// at `nic` sees it. Reads only these functions and the bridges above them. Returns `None` if
    /// the device has no such link or cannot be read.
    pub(crate) fn coherent_link_below(
        root: &Path,
        device: BusId,
        nic: Option<BusId>,
    ) -> Option<CoherentLink> {
        let topology = Self::of_functions(root, &[device])?;
        let function = topology.device(device)?;
        if function.is_integrated() {
            return Some(CoherentLink::Integrated);
        }
        let path = || {
            let nic = nic?;
            Self::of_functions(root, &[device, nic])?.path(device, nic)
        };
        function.has_c2c().then(|| CoherentLink::C2c {
            shares_switch: path()
                .is_some_and(|path| matches!(path.distance, Distance::Pix | Distance::Pxb)),
        })
    }

    /// Returns the numbers of NUMA nodes with memory and without CPUs of the machine at `root`. The
    /// set is empty if a file is malformed or a read failed.
    pub(crate) fn memory_only_nodes_below(root: &Path) -> BTreeSet<u32> {
        numa::memory_only(&Source::of_machine(root)).unwrap_or_default()
    }

    /// Returns a topology with only these functions and the bridges above them.
    fn of_functions(root: &Path, wanted: &[BusId]) -> Option<Self> {
        Some(Self {
            devices: device::read_with_bridges(&Source::of_machine(root), wanted).ok()?,
            rdma: Vec::new(),
            numa: Vec::new(),
            groups: BTreeMap::new(),
            kernel: Kernel::default(),
            host: None,
        })
    }

    /// Reads the facts about the kernel of the machine at `root`. Takes the configuration options
    /// from the cache `kept` if they are there. Returns `None` if a file is malformed or a read
    /// failed.
    pub(crate) fn kernel_below(root: &Path, kept: &KeptOptions) -> Option<Kernel> {
        kernel::read(&Source::of_machine(root), kept).ok()
    }

    /// Returns every PCI function, ordered by address.
    pub fn devices(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices.values()
    }

    /// Returns the PCI function at this address; `None` if there is none.
    #[must_use]
    pub fn device(&self, id: BusId) -> Option<&PciDevice> {
        self.devices.get(&id)
    }

    /// Returns the GPUs and accelerators ([`Role::Accelerator`]).
    pub fn accelerators(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices().filter(|device| device.role() == Role::Accelerator)
    }

    /// Returns the RDMA devices, ordered by name and number. Software devices have no PCI address.
    #[must_use]
    pub fn rdma(&self) -> &[RdmaDevice] {
        &self.rdma
    }

    /// Returns the RDMA devices that belong to a PCI function.
    pub fn rdma_at(&self, id: BusId) -> impl Iterator<Item = &RdmaDevice> {
        self.rdma.iter().filter(move |device| device.bus_id == Some(id))
    }

    /// Returns the NUMA nodes. The list is empty if the kernel does not support NUMA.
    #[must_use]
    pub fn numa(&self) -> &[NumaNode] {
        &self.numa
    }

    /// Returns the facts about the kernel that paths depend on.
    #[must_use]
    pub const fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Returns the mode of the IOMMU, combined over all its groups.
    #[must_use]
    pub fn iommu(&self) -> IommuMode {
        kernel::mode(&self.groups)
    }

    /// Returns the type of an IOMMU group, as in `identity`, `DMA` or `DMA-FQ`; `None` if the group
    /// does not exist or the kernel does not report its type.
    #[must_use]
    pub fn group_type(&self, group: u32) -> Option<&str> {
        self.groups.get(&group).map(String::as_str).filter(|kind| !kind.is_empty())
    }

    /// Returns the root ports and downstream ports whose ACS capability could not be read, mostly
    /// for lack of `CAP_SYS_ADMIN`.
    pub fn unreadable_ports(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices().filter(|device| {
            device.acs == Acs::Unreadable
                && matches!(device.port, Port::RootPort | Port::Downstream)
        })
    }
}

/// Checks that `source` is a recording of a version that this library can read.
fn check_mark(source: &Source) -> Result<()> {
    match source.text(MARK)? {
        Some(version) if version == VERSION => Ok(()),
        Some(version) => Err(source.malformed(
            MARK,
            format_args!("an unknown version of the recording format: {version:.40}"),
        )),
        // Copies of sysfs that other tools made lack the file with the version.
        None if source.names("sys")?.is_some() => Ok(()),
        None => Err(Error::new(ErrorKind::Malformed, "read topology")
            .context("file", source.root())
            .context("why", "it holds no sys folder")
            .remedy("give a folder or archive that hmem topo --record FILE made")),
    }
}
