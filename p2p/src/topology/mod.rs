//! How the machine is wired: which device is near which NIC, and what lies between them.
//!
//! A [`Topology`] is read from sysfs and procfs: the PCIe tree with its switches and root ports,
//! NUMA nodes, Access Control Services, IOMMU groups, sizes of base address registers, links, the
//! kernel's options and its peer-memory modules. It comes from this machine ([`Topology::read`]) or
//! from a recording of one ([`Topology::open`], which takes a folder, a tar or a tar.gz), and
//! [`Topology::record`] makes a recording.
//!
//! Everything is keyed by [`BusId`]: unlike ordinals, it is the same under every
//! `CUDA_VISIBLE_DEVICES`.
//!
//! # Examples
//!
//! ```
//! use hmem_p2p::topology::{Distance, Topology};
//!
//! let dgx = Topology::open(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/topology/dgx-a100.tar.gz"))?;
//! let gpu = "0000:07:00.0".parse()?;
//! let nearest = dgx.nearest_nics(gpu);
//! assert_eq!(nearest.len(), 2);
//! assert_eq!(nearest[0].1.distance, Distance::Pxb);
//! assert_eq!(dgx.rdma_at(nearest[0].0).next().unwrap().name, "mlx5_0");
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! # Things this module does not do
//!
//! It decides nothing: what is near can be out of reach, and only a registration tells. It does not
//! see NVLink, or what a hypervisor hides.

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
    collections::BTreeMap,
    fs::{self, File},
    path::Path,
};

use hmem_core::{Errno, Error, ErrorKind, Result};

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

/// How a machine is wired.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    devices: BTreeMap<BusId, PciDevice>,
    rdma: Vec<RdmaDevice>,
    numa: Vec<NumaNode>,
    groups: BTreeMap<u32, String>,
    kernel: Kernel,
    /// The machine's name, so that a recording can leave it out.
    host: Option<String>,
}

impl Topology {
    /// Reads this machine.
    ///
    /// # Errors
    /// - Malformed: a file of another form than any kernel known here writes; the context names it.
    ///   What a single device answers oddly (configuration space, registers, link) is left out and
    ///   logged.
    /// - Unavailable: a file vanished meanwhile, as when a device is unplugged.
    /// - As the operating system's number says, where it failed to read.
    pub fn read() -> Result<Self> {
        Self::from_source(&Source::Folder { root: "/".into(), live: true })
    }

    /// Reads a recording: a folder with `sys` and `proc` in it, or a tar or tar.gz of one.
    ///
    /// # Errors
    /// - Malformed: cut off, altered, of absurd size, or of a later form; the context names the
    ///   file.
    /// - Unavailable: a file that must be there is missing, or `path` itself.
    /// - Unsupported: `path` is an archive, and the cargo feature `recordings` is off.
    /// - As the operating system's number says, where it failed to read.
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
        let topology = Self {
            devices: device::read_all(source)?,
            rdma: rdma::read_all(source)?,
            numa: numa::read_all(source)?,
            groups: kernel::groups(source)?,
            kernel: kernel::read(source, &KeptOptions::default())?,
            host: source.text("proc/sys/kernel/hostname")?,
        };
        Ok(topology)
    }

    /// Whether ACS redirects what two functions below `root` exchange, by reading them and the
    /// bridges above them alone; nothing where they, or it, cannot be read.
    pub(crate) fn redirects_below(root: &Path, one: BusId, other: BusId) -> Option<bool> {
        let source = Source::Folder { root: root.to_owned(), live: root == Path::new("/") };
        let devices = device::read_with_bridges(&source, &[one, other]).ok()?;
        let topology = Self {
            devices,
            rdma: Vec::new(),
            numa: Vec::new(),
            groups: BTreeMap::new(),
            kernel: Kernel::default(),
            host: None,
        };
        match topology.path(one, other)?.redirection {
            Redirection::None => Some(false),
            Redirection::By(_) => Some(true),
            Redirection::Unknown(_) => None,
        }
    }

    /// What of the kernel decides paths, read below `root` but for options kept from an earlier
    /// time; nothing where a file of it makes no sense.
    pub(crate) fn kernel_below(root: &Path, kept: &KeptOptions) -> Option<Kernel> {
        kernel::read(&Source::Folder { root: root.to_owned(), live: root == Path::new("/") }, kept)
            .ok()
    }

    /// Every PCI function, in the order of their addresses.
    pub fn devices(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices.values()
    }

    /// The PCI function at an address.
    #[must_use]
    pub fn device(&self, id: BusId) -> Option<&PciDevice> {
        self.devices.get(&id)
    }

    /// The GPUs and accelerators ([`Role::Accelerator`]).
    pub fn accelerators(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices().filter(|device| device.role() == Role::Accelerator)
    }

    /// The RDMA devices, in the order of their names and numbers; those of software have no PCI
    /// address.
    #[must_use]
    pub fn rdma(&self) -> &[RdmaDevice] {
        &self.rdma
    }

    /// The RDMA device of a name.
    #[must_use]
    pub fn rdma_named(&self, name: &str) -> Option<&RdmaDevice> {
        self.rdma.iter().find(|device| device.name == name)
    }

    /// The RDMA devices of a PCI function.
    pub fn rdma_at(&self, id: BusId) -> impl Iterator<Item = &RdmaDevice> {
        self.rdma.iter().filter(move |device| device.bus_id == Some(id))
    }

    /// The NUMA nodes; none where the kernel has no notion of them.
    #[must_use]
    pub fn numa(&self) -> &[NumaNode] {
        &self.numa
    }

    /// The kernel, as far as paths depend on it.
    #[must_use]
    pub const fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// What the IOMMU does, over all its groups.
    #[must_use]
    pub fn iommu(&self) -> IommuMode {
        kernel::mode(&self.groups)
    }

    /// The type of an IOMMU group, as in `identity`, `DMA` or `DMA-FQ`; nothing where the kernel
    /// does not say.
    #[must_use]
    pub fn group_type(&self, group: u32) -> Option<&str> {
        self.groups.get(&group).map(String::as_str).filter(|kind| !kind.is_empty())
    }

    /// The ports of which configuration space ends before ACS: this process lacks the privilege to
    /// read it.
    pub fn unreadable_ports(&self) -> impl Iterator<Item = &PciDevice> {
        self.devices().filter(|device| {
            device.acs == Acs::Unreadable
                && matches!(device.port, Port::RootPort | Port::Downstream)
        })
    }
}

/// Refuses what is no recording, and one of a later form.
fn check_mark(source: &Source) -> Result<()> {
    match source.text(MARK)? {
        Some(version) if version == VERSION => Ok(()),
        Some(version) => {
            Err(source.malformed(MARK, format_args!("a recording of another form: {version:.40}")))
        }
        // Trees of other makers (copies of sysfs) have no mark.
        None if source.names("sys")?.is_some() => Ok(()),
        None => Err(Error::new(ErrorKind::Malformed, "read topology")
            .context("file", source.root())
            .context("problem", "it holds no sys folder")
            .remedy("give a folder or archive that hmem topo --record FILE made")),
    }
}
