//! Facts about the machine, which distinguish causes that have the same error number.
//!
//! Facts never choose a path: paths are tried. Facts only make the explanation of a refusal more
//! exact.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use hmem_core::{cause::Facts, provider::Nic};

use crate::topology::{KeptOptions, Kernel, Setting, Topology};

/// A source of facts about the machine.
pub trait FactSource: fmt::Debug + Send + Sync {
    /// Returns the facts about a device (by PCI bus id, if it has one) and a NIC.
    fn facts(&self, device: Option<&str>, nic: &Nic) -> Facts;
}

/// The running machine, read from procfs and sysfs.
///
/// The kernel's options are read once for a value and its clones, as they do not change. Everything
/// else is read at each call.
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
    /// Returns a machine whose `proc`, `sys` and `boot` folders are below `root`.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), options: Arc::default() }
    }

    fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok()
    }

    /// Returns the loaded modules, if the kernel lists them.
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

    fn bar(&self, bus_id: &str) -> Option<u64> {
        let resources = self.text(format!("sys/bus/pci/devices/{bus_id}/resource"))?;
        // The first six lines are the BARs: first address, last address, flags.
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
        let kernel = Topology::kernel_below(&self.root, &self.options).unwrap_or_default();
        Facts {
            kernel: kernel.release.as_deref().and_then(version),
            modules: self.modules(&kernel),
            kernel_options: kernel.options.as_ref().map(built_with),
            memlock: self
                .text("proc/self/limits")
                .and_then(|text| limit(&text, "Max locked memory")),
            iommu_translates: translates.reduce(|one, other| one || other),
            acs_redirects: self.acs_redirects(device, nic),
            bar: device.and_then(|bus_id| self.bar(bus_id)),
            root: Some(self.root.clone()),
        }
    }
}

/// Returns the options that are set, without `CONFIG_`.
fn built_with(options: &BTreeMap<String, Setting>) -> BTreeSet<String> {
    let set = options.iter().filter(|(_, setting)| **setting != Setting::No);
    set.map(|(name, _)| name.trim_start_matches("CONFIG_").to_owned()).collect()
}

/// Parses a kernel release: `6.12.117-amd64` is `(6, 12)`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the soft limit from the line `name` of `/proc/self/limits`.
fn limit(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
    if value == "unlimited" { Some(u64::MAX) } else { value.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(bus_id: Option<&str>) -> Nic {
        Nic {
            provider: "verbs".into(),
            name: "mlx5_0".into(),
            pci_bus_id: bus_id.map(str::to_owned),
        }
    }

    #[test]
    fn recorded_machine_gives_facts_and_missing_files_give_none() {
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
            iommu_translates: Some(true),
            acs_redirects: None,
            bar: Some(64 << 30),
            root: Some(root),
        };
        assert_eq!(facts, expected);
        let nothing = Facts { root: Some("/nonexistent".into()), ..Facts::default() };
        assert_eq!(LocalMachine::below("/nonexistent").facts(None, &nic(None)), nothing);
        assert_eq!((version("7.3.4"), version("7"), version("x")), (Some((7, 3)), None, None));
    }

    /// Distributions without `/boot/config-*` have the options packed in procfs. A module that is
    /// still loading does not count.
    #[test]
    fn kernel_facts_match_the_topology() {
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

    #[test]
    fn kernel_options_are_read_once_and_modules_each_time() {
        let root = std::env::temp_dir().join(format!("hmem-facts-kept-{}", std::process::id()));
        fs::create_dir_all(root.join("proc/sys/kernel")).unwrap();
        fs::create_dir_all(root.join("boot")).unwrap();
        let write = |path: &str, text: &str| fs::write(root.join(path), text).unwrap();
        let machine = LocalMachine::below(&root);
        let told = |machine: &LocalMachine| {
            let facts = machine.facts(None, &nic(None));
            (
                facts.has_option("PCI_P2PDMA"),
                facts.has_option("UDMABUF"),
                facts.has_module("nvidia"),
            )
        };
        write("proc/sys/kernel/osrelease", "6.12.1\n");
        write("proc/modules", "");
        assert_eq!(told(&machine), (None, None, Some(false)));
        write("boot/config-6.12.1", "CONFIG_PCI_P2PDMA=y\n");
        let found = (Some(true), Some(false), Some(false));
        assert_eq!(told(&machine), found, "a failed read is not kept");

        write("proc/config.gz", "not a gzip file");
        write("proc/modules", "nvidia 16384 0 - Live 0x0\n");
        let later = (Some(true), Some(false), Some(true));
        assert_eq!((told(&machine), told(&machine.clone())), (later, later));
        assert_eq!(
            LocalMachine::below(&root).facts(None, &nic(None)).kernel,
            None,
            "the options can be read now"
        );

        fs::remove_file(root.join("proc/config.gz")).unwrap();
        write("proc/sys/kernel/osrelease", "6.12.2\n");
        write("boot/config-6.12.2", "CONFIG_UDMABUF=m\n");
        let elsewhere = (Some(false), Some(true), Some(true));
        assert_eq!(told(&machine), elsewhere, "another kernel has its own options");
        fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn local_machine_has_a_kernel_and_limits() {
        let facts = LocalMachine::default().facts(None, &nic(None));
        assert!(facts.kernel.is_some() && facts.memlock.is_some(), "{facts:?}");
    }
}
