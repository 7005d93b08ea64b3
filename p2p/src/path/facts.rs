//! Facts about the machine, which distinguish causes with the same error number.
//!
//! The selector does not choose a path by facts: it tries the paths. Facts only make the
//! explanation of a refusal more exact. There are two exceptions:
//!
//! - The exporter of a dma-buf. While direct access is disabled, the selector must not try to
//!   register a dma-buf that may be device memory. So the exporter decides.
//! - A coherent link between device and CPU. Some NICs register a dma-buf with the wrong mapping
//!   without an error, and then fail to transfer. So the link decides which mapping is tried first.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    os::fd::{AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use hmem_core::{
    cause::{CoherentLink, Facts, IpcLock},
    provider::Nic,
};
use rustix::{
    fs::{Access, AtFlags, CWD},
    io::Errno,
};

use crate::topology::{KeptOptions, Kernel, Setting, Topology};

/// The bit of `CapEff` in `/proc/self/status` that exempts a process from the locked-memory limit.
const CAP_IPC_LOCK: u64 = 1 << 14;
/// The bit of a capability that only privileged containers get. A bounding set without this bit
/// shows that the process runs in a container.
const CAP_SYS_ADMIN: u64 = 1 << 21;

/// Sysfs classes of devices, each with the prefix of its node names in `/dev`. Registrations need
/// these nodes: NICs, render nodes, AMD's compute node, accelerators and Neuron devices.
const NODE_CLASSES: [(&str, &str); 5] = [
    ("infiniband_verbs", "infiniband/uverbs"),
    ("drm", "dri/renderD"),
    ("kfd", "kfd"),
    ("accel", "accel/accel"),
    ("neuron_device", "neuron"),
];

/// A source of facts about a machine, such as its kernel options and limits. Causes of refusals
/// depend on these facts.
pub trait FactSource: fmt::Debug + Send + Sync {
    /// Returns the facts that affect registrations of a device's memory with a NIC. `device` is the
    /// device's PCI bus id, if it has one.
    fn facts(&self, device: Option<&str>, nic: &Nic) -> Facts;

    /// Returns the coherent link between the device at this PCI bus id and the CPU, as
    /// [`Facts::coherent_link`]. The default calls [`FactSource::facts`] and returns the link in
    /// the result.
    ///
    /// The selector asks before the first attempt, because the link decides the order of the
    /// mappings of a dma-buf.
    fn coherent_link(&self, device: &str, nic: &Nic) -> Option<CoherentLink> {
        self.facts(Some(device), nic).coherent_link
    }

    /// Returns the kernel's name of the driver that exported a dma-buf (`udmabuf`, for example), or
    /// `None` if the kernel does not tell. The default is `None`.
    ///
    /// The selector asks for the exporter only while direct access is disabled, for a dma-buf whose
    /// iface the request does not name. Such a dma-buf is registered only if its exporter exports
    /// host memory.
    fn dma_buf_exporter(&self, fd: BorrowedFd<'_>) -> Option<String> {
        let _ = fd;
        None
    }
}

/// Facts of the local machine, from procfs, sysfs, `/dev` and the kernel's configuration file.
///
/// The kernel's options do not change while the kernel runs. A `LocalMachine` and its clones read
/// the options once. They read all other facts on each call.
#[derive(Clone, Debug)]
pub struct LocalMachine {
    root: PathBuf,
    options: Arc<KeptOptions>,
}

impl Default for LocalMachine {
    fn default() -> Self {
        Self::below("/")
    }
}

impl LocalMachine {
    /// Creates a source that reads `proc`, `sys`, `dev`, `boot` and `lib/modules` below `root`
    /// instead of `/`.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), options: Arc::default() }
    }

    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    /// Returns the loaded modules of [`MODULES`](crate::topology::MODULES); `None` if the kernel
    /// does not list modules.
    fn modules(&self, kernel: &Kernel) -> Option<BTreeSet<String>> {
        let listed =
            ["proc/modules", "sys/module"].iter().any(|path| self.root.join(path).exists());
        listed.then(|| kernel.modules.iter().cloned().collect())
    }

    fn iommu_translates(&self, bus_id: &str) -> Option<bool> {
        let group = self.text(format!("sys/bus/pci/devices/{bus_id}/iommu_group/type"))?;
        Some(group.trim() != "identity")
    }

    fn acs_redirects(&self, device: Option<&str>, nic: &Nic) -> Option<bool> {
        let id = |text: Option<&str>| text?.parse().ok();
        Topology::redirects_below(&self.root, id(device)?, id(nic.pci_bus_id.as_deref())?)
    }

    /// Returns the locked-memory limit of this process in bytes. A process with an effective
    /// `CAP_IPC_LOCK` has no limit: `u64::MAX`.
    fn memlock(&self, ipc_lock: Option<IpcLock>) -> Option<u64> {
        let limit = limit(&self.text("proc/self/limits")?, "Max locked memory")?;
        Some(if ipc_lock == Some(IpcLock::Effective) { u64::MAX } else { limit })
    }

    /// Returns the state of the capability `CAP_IPC_LOCK`. `status` is the text of
    /// `/proc/self/status`.
    fn ipc_lock(&self, status: &str) -> Option<IpcLock> {
        let has = |set, capability| {
            let mask = u64::from_str_radix(status_line(status, set)?, 16).ok()?;
            Some(mask & capability != 0)
        };
        if has("CapEff", CAP_IPC_LOCK)? {
            let ids = self.text("proc/self/uid_map").unwrap_or_default();
            let initial = ids.split_whitespace().eq(["0", "0", "4294967295"]);
            return Some(if initial { IpcLock::Effective } else { IpcLock::UserNamespace });
        }
        // The bounding set of a process outside of containers has all capabilities, which shows
        // nothing. A container's set has few, and IPC_LOCK only if somebody added it.
        let granted = has("CapBnd", CAP_IPC_LOCK) == Some(true)
            && has("CapBnd", CAP_SYS_ADMIN) == Some(false);
        Some(if granted { IpcLock::NotInherited } else { IpcLock::Absent })
    }

    /// Returns two sets of device nodes: those missing in `/dev`, and those that the process may
    /// not read and write.
    fn unusable_nodes(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let (mut missing, mut forbidden) = (BTreeSet::new(), BTreeSet::new());
        for node in self.nodes() {
            let path = self.root.join("dev").join(&node);
            let mode = Access::READ_OK | Access::WRITE_OK;
            match rustix::fs::accessat(CWD, &path, mode, AtFlags::EACCESS) {
                Ok(()) => {}
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    missing.insert(format!("/dev/{node}"));
                }
                Err(_) => {
                    forbidden.insert(format!("/dev/{node}"));
                }
            }
        }
        (missing, forbidden)
    }

    /// Returns the paths in `/dev` of the NICs and devices that sysfs lists.
    fn nodes(&self) -> Vec<String> {
        let entries = |folder: &Path| fs::read_dir(self.root.join(folder)).into_iter().flatten();
        let mut nodes = Vec::new();
        for (class, prefix) in NODE_CLASSES {
            for entry in entries(&Path::new("sys/class").join(class)).flatten() {
                let uevent = fs::read_to_string(entry.path().join("uevent")).unwrap_or_default();
                let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
                nodes.extend(name.filter(|name| name.starts_with(prefix)).map(str::to_owned));
            }
        }
        // NVIDIA's driver has no class in sysfs.
        for entry in entries(Path::new("proc/driver/nvidia/gpus")).flatten() {
            let text = fs::read_to_string(entry.path().join("information")).unwrap_or_default();
            let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"));
            nodes.extend(minor.map(|minor| format!("nvidia{}", minor.trim())));
            nodes.extend(["nvidiactl", "nvidia-uvm"].map(str::to_owned));
        }
        nodes
    }

    fn bar(&self, bus_id: &str) -> Option<u64> {
        let resources = self.text(format!("sys/bus/pci/devices/{bus_id}/resource"))?;
        // Six BARs come first, a line each: first address, last address, flags.
        let sizes = resources.lines().take(6).filter_map(|line| {
            let mut words = line
                .split_whitespace()
                .map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
            let (start, end) = (words.next()??, words.next()??);
            end.checked_sub(start)?.checked_add(1).filter(|size| *size > 1)
        });
        sizes.max()
    }
}

impl FactSource for LocalMachine {
    fn facts(&self, device: Option<&str>, nic: &Nic) -> Facts {
        let bus_ids = [nic.pci_bus_id.as_deref(), device];
        let translates =
            bus_ids.into_iter().flatten().filter_map(|bus_id| self.iommu_translates(bus_id));
        let (missing_nodes, forbidden_nodes) = self.unusable_nodes();
        let kernel = Topology::kernel_below(&self.root, &self.options).unwrap_or_default();
        let status = self.text("proc/self/status").unwrap_or_default();
        let ipc_lock = self.ipc_lock(&status);
        Facts {
            kernel: kernel.release.as_deref().and_then(version),
            modules: self.modules(&kernel),
            kernel_options: kernel.options.as_ref().map(built_with),
            memlock: self.memlock(ipc_lock),
            pinned: status_line(&status, "VmPin").and_then(kibibytes),
            ipc_lock,
            seccomp: status_line(&status, "Seccomp").map(|mode| mode == "2"),
            missing_nodes,
            forbidden_nodes,
            iommu_translates: translates.reduce(|one, other| one || other),
            acs_redirects: self.acs_redirects(device, nic),
            bar: device.and_then(|bus_id| self.bar(bus_id)),
            coherent_link: device.and_then(|device| self.coherent_link(device, nic)),
            memory_only_nodes: Topology::memory_only_nodes_below(&self.root),
            request: None,
            root: Some(self.root.clone()),
        }
    }

    fn coherent_link(&self, device: &str, nic: &Nic) -> Option<CoherentLink> {
        let nic = nic.pci_bus_id.as_deref().and_then(|id| id.parse().ok());
        Topology::coherent_link_below(&self.root, device.parse().ok()?, nic)
    }

    fn dma_buf_exporter(&self, fd: BorrowedFd<'_>) -> Option<String> {
        // A thread may have a table of file descriptors of its own, so `self` is not enough.
        let info = self.text(format!("proc/thread-self/fdinfo/{}", fd.as_raw_fd()))?;
        // The application can give the dma-buf a name, which may contain another such line. The
        // kernel writes the name after the exporter, so the first line names the exporter.
        let name = info.lines().find_map(|line| line.strip_prefix("exp_name:"))?;
        Some(name.trim().to_owned())
    }
}

/// Returns the names of the kernel options that are enabled, without the prefix `CONFIG_`.
fn built_with(options: &BTreeMap<String, Setting>) -> BTreeSet<String> {
    let set = options.iter().filter(|(_, setting)| **setting != Setting::No);
    set.map(|(name, _)| name.trim_start_matches("CONFIG_").to_owned()).collect()
}

/// Parses the major and minor version of a kernel release: `6.12.117-amd64` gives `(6, 12)`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the value of the field `name` in the text of `/proc/self/status`.
fn status_line<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Returns the bytes of an amount in `/proc/self/status`, such as `12 kB`.
fn kibibytes(text: &str) -> Option<u64> {
    text.strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the soft limit `name` from the text of `/proc/self/limits`; `u64::MAX` for no limit.
fn limit(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn nic(bus_id: Option<&str>) -> Nic {
        Nic {
            provider: "verbs".into(),
            name: "mlx5_0".into(),
            pci_bus_id: bus_id.map(str::to_owned),
        }
    }

    #[test]
    fn facts_are_read_from_files_and_absent_facts_are_none() {
        let root = std::env::temp_dir().join(format!("hmem-facts-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/osrelease", "5.4.0-150-generic\n");
        write(
            "boot/config-5.4.0-150-generic",
            "CONFIG_PCI_P2PDMA=y\n# CONFIG_X is not set\nCONFIG_N=\"t\"\n",
        );
        write("sys/module/nvidia_peermem/refcnt", "0");
        write(
            "proc/self/limits",
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n",
        );
        write("sys/bus/pci/devices/0000:17:00.0/iommu_group/type", "DMA-FQ\n");
        write(
            "sys/bus/pci/devices/0000:18:00.0/resource",
            "0x00000000fb000000 0x00000000fbffffff 0x0000000000040200\n\
             0x0000006000000000 0x0000006fffffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\nnot numbers\n",
        );
        let facts =
            LocalMachine::below(&root).facts(Some("0000:18:00.0"), &nic(Some("0000:17:00.0")));
        fs::remove_dir_all(&root).unwrap();
        let names = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        let expected = Facts {
            kernel: Some((5, 4)),
            modules: names(&["nvidia_peermem"]),
            kernel_options: names(&["PCI_P2PDMA"]),
            memlock: Some(65536),
            pinned: None,
            ipc_lock: None,
            seccomp: None,
            missing_nodes: BTreeSet::new(),
            forbidden_nodes: BTreeSet::new(),
            iommu_translates: Some(true),
            acs_redirects: None,
            bar: Some(64 << 30),
            coherent_link: None,
            memory_only_nodes: BTreeSet::new(),
            request: None,
            root: Some(root),
        };
        assert_eq!(facts, expected);
        let nothing = Facts { root: Some("/nonexistent".into()), ..Facts::default() };
        assert_eq!(LocalMachine::below("/nonexistent").facts(None, &nic(None)), nothing);
        assert_eq!((version("7.3.4"), version("7"), version("x")), (Some((7, 3)), None, None));
    }

    /// Facts include the kernel options in the compressed file `/proc/config.gz` if
    /// `/boot/config-*` does not exist. A module that is still loading does not count as loaded.
    #[cfg(feature = "recordings")]
    #[test]
    fn facts_of_the_kernel_are_those_of_the_topology() {
        let root = std::env::temp_dir().join(format!("hmem-facts-packed-{}", std::process::id()));
        fs::create_dir_all(root.join("proc")).unwrap();
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(
            &mut packed,
            b"CONFIG_PCI_P2PDMA=y\nCONFIG_UDMABUF=m\nCONFIG_OTHER=y\n",
        )
        .unwrap();
        fs::write(root.join("proc/config.gz"), packed.finish().unwrap()).unwrap();
        let modules = "nvidia_peermem 16384 0 - Loading 0x0\nib_uverbs 16384 0 - Live 0x0\n";
        fs::write(root.join("proc/modules"), modules).unwrap();
        let facts = LocalMachine::below(&root).facts(None, &nic(None));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            (facts.has_option("PCI_P2PDMA"), facts.has_option("UDMABUF")),
            (Some(true), Some(true))
        );
        assert_eq!(facts.has_option("DMABUF_MOVE_NOTIFY"), Some(false));
        assert_eq!(
            (facts.has_module("ib_uverbs"), facts.has_module("nvidia_peermem")),
            (Some(true), Some(false))
        );
    }

    #[cfg(feature = "recordings")]
    #[test]
    fn the_options_of_a_kernel_are_read_once_and_its_modules_each_time() {
        let root = std::env::temp_dir().join(format!("hmem-facts-kept-{}", std::process::id()));
        fs::create_dir_all(root.join("proc/sys/kernel")).unwrap();
        fs::create_dir_all(root.join("boot")).unwrap();
        let write = |path: &str, text: &str| fs::write(root.join(path), text).unwrap();
        let machine = LocalMachine::below(&root);
        let summary = |machine: &LocalMachine| {
            let facts = machine.facts(None, &nic(None));
            (
                facts.has_option("PCI_P2PDMA"),
                facts.has_option("UDMABUF"),
                facts.has_module("nvidia"),
            )
        };
        write("proc/sys/kernel/osrelease", "6.12.1\n");
        write("proc/modules", "");
        assert_eq!(summary(&machine), (None, None, Some(false)));
        write("boot/config-6.12.1", "CONFIG_PCI_P2PDMA=y\n");
        let found = (Some(true), Some(false), Some(false));
        assert_eq!(summary(&machine), found, "a failed read is repeated");

        write("proc/config.gz", "not compressed data");
        write("proc/modules", "nvidia 16384 0 - Live 0x0\n");
        let later = (Some(true), Some(false), Some(true));
        assert_eq!((summary(&machine), summary(&machine.clone())), (later, later));
        assert_eq!(
            LocalMachine::below(&root).facts(None, &nic(None)).kernel,
            None,
            "a new value reads the file"
        );

        fs::remove_file(root.join("proc/config.gz")).unwrap();
        write("proc/sys/kernel/osrelease", "6.12.2\n");
        write("boot/config-6.12.2", "CONFIG_UDMABUF=m\n");
        let elsewhere = (Some(false), Some(true), Some(true));
        assert_eq!(summary(&machine), elsewhere, "options of another kernel are not reused");
        fs::remove_dir_all(&root).unwrap();
    }

    /// DIAG-03: the facts about a machine include the limits that a container sets for the process.
    #[test]
    fn limits_of_a_container_are_facts() {
        let root = std::env::temp_dir().join(format!("hmem-facts-limits-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let status = |seccomp: u32, caps: &str| {
            let text = format!(
                "Name:\thmem\nVmPin:\t      40 kB\nCapEff:\t{caps}\nCapBnd:\t00000000a80465fb\n\
                 Seccomp:\t{seccomp}\n"
            );
            write("proc/self/status", &(text + "Seccomp_filters:\t1\n"));
        };
        write(
            "proc/self/limits",
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n",
        );
        write("proc/self/uid_map", "         0          0 4294967295\n");
        for (index, present) in [true, false].into_iter().enumerate() {
            let class = format!("sys/class/infiniband_verbs/uverbs{index}/uevent");
            write(&class, &format!("MAJOR=231\nDEVNAME=infiniband/uverbs{index}\n"));
            if present {
                write(&format!("dev/infiniband/uverbs{index}"), "");
            }
        }
        write("sys/class/drm/card0/uevent", "DEVNAME=dri/card0\n");
        write("sys/class/drm/renderD128/uevent", "DEVNAME=dri/renderD128\n");
        write("sys/class/kfd/kfd/uevent", "DEVNAME=kfd\n");
        write("dev/kfd", "");
        write("proc/driver/nvidia/gpus/0000:17:00.0/information", "Device Minor: \t 3\n");
        let facts = || LocalMachine::below(&root).facts(None, &nic(None));
        status(2, "00000000a80425fb");
        let limited = facts();
        status(0, "00000000a80465fb");
        let exempt = facts();
        write("proc/self/uid_map", "0 1000 1\n");
        let in_user_namespace = facts();
        write(
            "proc/self/status",
            "CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\nSeccomp:\t0\n",
        );
        let ordinary_user = facts();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!((limited.memlock, limited.seccomp), (Some(65536), Some(true)));
        assert_eq!((exempt.memlock, exempt.seccomp), (Some(u64::MAX), Some(false)));
        assert_eq!(in_user_namespace.memlock, Some(65536));
        let states = [&limited, &exempt, &in_user_namespace, &ordinary_user];
        let expected =
            [IpcLock::NotInherited, IpcLock::Effective, IpcLock::UserNamespace, IpcLock::Absent];
        assert_eq!(states.map(|facts| facts.ipc_lock), expected.map(Some));
        assert_eq!((limited.pinned, ordinary_user.pinned), (Some(40 << 10), None));
        let missing: Vec<_> = limited.missing_nodes.iter().map(String::as_str).collect();
        let expected = [
            "/dev/dri/renderD128",
            "/dev/infiniband/uverbs1",
            "/dev/nvidia-uvm",
            "/dev/nvidia3",
            "/dev/nvidiactl",
        ];
        assert_eq!(missing, expected);
        assert_eq!(limited.forbidden_nodes, BTreeSet::new());
    }

    /// P2P-02: the exporter of a dma-buf is the one in the kernel's description of the fd
    /// (`fdinfo`). The name that an application gives a dma-buf cannot forge the exporter. A file
    /// that is no dma-buf has no exporter.
    #[test]
    fn exporter_of_a_dma_buf_is_the_one_that_the_kernel_names() {
        let root = std::env::temp_dir().join(format!("hmem-facts-fd-{}", std::process::id()));
        let folder = root.join("proc/thread-self/fdinfo");
        fs::create_dir_all(&folder).unwrap();
        let file = fs::File::open(&root).unwrap();
        let exporter = |text: &str| {
            fs::write(folder.join(file.as_raw_fd().to_string()), text).unwrap();
            LocalMachine::below(&root).dma_buf_exporter(file.as_fd())
        };
        let common = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t42\n";
        let of_dma_buf = format!("{common}size:\t4096\ncount:\t1\nexp_name:\tudmabuf\n");
        let named = of_dma_buf.replace("udmabuf", "nvidia") + "name:\tx\nexp_name:\tudmabuf\n";
        let found = [exporter(&of_dma_buf), exporter(&named), exporter(common)];
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [Some("udmabuf".to_owned()), Some("nvidia".to_owned()), None]);
        // An ordinary file of this machine has no exporter.
        assert_eq!(LocalMachine::default().dma_buf_exporter(file.as_fd()), None);
    }

    #[test]
    fn this_machine_has_a_kernel_and_limits() {
        let facts = LocalMachine::default().facts(None, &nic(None));
        assert!(facts.kernel.is_some() && facts.memlock.is_some(), "{facts:?}");
    }
}
