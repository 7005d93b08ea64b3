//! Facts about the kernel that paths depend on: its options, command line, modules, and the mode of
//! the IOMMU.

use std::{collections::BTreeMap, fmt};

use hmem_core::Result;
use parking_lot::Mutex;

use super::{
    archive,
    device::is_word,
    source::{LARGEST_FILE, Source},
};

/// Kernel configuration options that direct paths depend on, each with its meaning.
pub const OPTIONS: [(&str, &str); 16] = [
    ("CONFIG_PCI_P2PDMA", "transfers between PCI devices"),
    ("CONFIG_ZONE_DEVICE", "device memory as pages, which P2PDMA needs"),
    ("CONFIG_DMA_SHARED_BUFFER", "dma-buf"),
    ("CONFIG_DMABUF_MOVE_NOTIFY", "dma-bufs whose memory moves"),
    ("CONFIG_UDMABUF", "dma-bufs of a process's own memory"),
    ("CONFIG_DMABUF_HEAPS", "dma-bufs from the kernel's heaps"),
    ("CONFIG_INFINIBAND", "RDMA"),
    ("CONFIG_INFINIBAND_USER_ACCESS", "RDMA from user space"),
    ("CONFIG_INFINIBAND_ON_DEMAND_PAGING", "regions that follow the page tables"),
    ("CONFIG_MLX5_INFINIBAND", "mlx5 NICs"),
    ("CONFIG_RDMA_RXE", "RDMA in software over Ethernet"),
    ("CONFIG_HSA_AMD", "ROCm's kernel driver"),
    ("CONFIG_HSA_AMD_P2P", "transfers between AMD GPUs and other devices"),
    ("CONFIG_IOMMU_DEFAULT_PASSTHROUGH", "an IOMMU that does not translate by default"),
    ("CONFIG_INTEL_IOMMU_DEFAULT_ON", "Intel's IOMMU, on by default"),
    ("CONFIG_STRICT_DEVMEM", "no mapping of device memory through /dev/mem"),
];

/// Kernel modules that paths depend on, each with its purpose.
pub const MODULES: [(&str, &str); 25] = [
    ("nvidia_peermem", "peer memory of NVIDIA GPUs"),
    ("nv_peer_mem", "peer memory of NVIDIA GPUs, before nvidia_peermem"),
    ("ib_peer_mem", "peer memory of the vendors' RDMA stack"),
    ("nvidia", "NVIDIA GPUs"),
    ("nvidia_uvm", "CUDA"),
    ("nvidia_fs", "GPUDirect Storage"),
    ("gdrdrv", "GDRCopy"),
    ("nouveau", "NVIDIA GPUs, without CUDA"),
    ("amdgpu", "AMD GPUs, with dma-buf export"),
    ("amdkfd", "peer memory of AMD GPUs, before it was a part of amdgpu"),
    ("i915", "Intel GPUs"),
    ("xe", "Intel GPUs"),
    ("habanalabs", "Gaudi accelerators"),
    ("neuron", "Trainium and Inferentia accelerators"),
    ("ib_core", "RDMA"),
    ("ib_uverbs", "RDMA from user space"),
    ("mlx5_ib", "mlx5 NICs"),
    ("mlx4_ib", "mlx4 NICs"),
    ("bnxt_re", "Broadcom NICs"),
    ("irdma", "Intel NICs"),
    ("efa", "Amazon NICs"),
    ("mana_ib", "Microsoft NICs"),
    ("rdma_rxe", "RDMA in software over Ethernet"),
    ("siw", "iWARP in software"),
    ("udmabuf", "dma-bufs of a process's own memory"),
];

/// The peer-memory modules of [`MODULES`]. With such a module, a NIC driver can register device
/// addresses without a dma-buf.
pub const PEER_MEMORY: [&str; 4] = ["nvidia_peermem", "nv_peer_mem", "ib_peer_mem", "amdkfd"];

/// Parameters of the kernel command line that change how devices access each other's memory.
const WORDS: [&str; 14] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "arm-smmu.disable_bypass",
    "iommu.passthrough",
    "iommu.strict",
    "iommu.forcedac",
    "pci",
    "pcie_acs_override",
    "pcie_aspm",
    "pcie_ports",
    "module_blacklist",
    "mem_encrypt",
    "amdgpu.pcie_p2p",
];

/// Facts about the running kernel that paths depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kernel {
    /// The kernel release, as printed by `uname -r`.
    pub release: Option<String>,
    /// The values of the [`OPTIONS`] that the kernel configuration lists; `None` if the
    /// configuration cannot be read. A configuration that is in `/proc/config.gz` alone needs the
    /// cargo feature `recordings`.
    pub options: Option<BTreeMap<String, Setting>>,
    /// The parameters of the command line that change how devices access each other's memory.
    pub command_line: Vec<String>,
    /// The modules of [`MODULES`] that are loaded or built in.
    pub modules: Vec<String>,
    /// The kernel module `nvidia`; `None` if it is not loaded.
    pub nvidia: Option<NvidiaDriver>,
}

/// Value of a kernel configuration option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Setting {
    /// Built into the kernel (`y`).
    Yes,
    /// Built as a module (`m`).
    Module,
    /// Not built (`n`).
    No,
}

impl Setting {
    /// Returns the letter for the value in a kernel configuration file: `y`, `m` or `n`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Yes => "y",
            Self::Module => "m",
            Self::No => "n",
        }
    }
}

/// The kernel module `nvidia`. Only its open variant exports dma-bufs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NvidiaDriver {
    /// The version of the kernel module, as in `535.161.08`.
    pub version: String,
    /// True for the open variant of the kernel module.
    pub open: bool,
}

impl Kernel {
    /// Returns whether a module of [`MODULES`] is loaded or built in.
    #[must_use]
    pub fn has_module(&self, name: &str) -> bool {
        self.modules.iter().any(|module| module == name)
    }

    /// Returns the modules of [`PEER_MEMORY`] that are loaded or built in.
    pub fn peer_memory(&self) -> impl Iterator<Item = &str> {
        self.modules.iter().map(String::as_str).filter(|module| PEER_MEMORY.contains(module))
    }

    /// Returns a sentence that explains why `driver` exports no dma-bufs; `None` if it may export
    /// them.
    pub(super) fn without_dma_buf(&self, driver: &str) -> Option<String> {
        let closed = self.nvidia.as_ref().filter(|module| driver == "nvidia" && !module.open)?;
        Some(format!(
            "the driver {driver} {} has closed kernel modules, which export no dma-buf",
            closed.version
        ))
    }

    /// Returns the value of an option of [`OPTIONS`]; `None` if the configuration cannot be read.
    /// An option that the configuration does not list has the value [`Setting::No`].
    #[must_use]
    pub fn option(&self, name: &str) -> Option<Setting> {
        self.options.as_ref().map(|options| options.get(name).copied().unwrap_or(Setting::No))
    }
}

/// The way in which the IOMMU handles the addresses that devices use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IommuMode {
    /// The machine has no IOMMU, or the IOMMU is off.
    Off,
    /// The IOMMU does not translate addresses for any group (identity mapping).
    Passthrough,
    /// The IOMMU translates addresses for every group.
    Translating,
    /// The IOMMU translates addresses for some groups only.
    Mixed,
    /// The IOMMU is on, but the kernel does not report its mode.
    Unknown,
}

impl IommuMode {
    /// Returns the name of the mode for output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Passthrough => "passthrough",
            Self::Translating => "translating",
            Self::Mixed => "mixed",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for IommuMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Cache of a kernel's configuration options; `None` until they were read. The options never change
/// while the kernel runs, and decompressing them takes longer than reading all other facts.
#[derive(Debug, Default)]
pub(crate) struct KeptOptions(Mutex<Option<KernelOptions>>);

/// A kernel's release and its configuration options. The release differs from the current one if
/// the process was migrated to another kernel (checkpoint and restore).
#[derive(Debug)]
struct KernelOptions {
    release: Option<String>,
    options: BTreeMap<String, Setting>,
}

impl KeptOptions {
    /// Returns the cached options if they belong to the kernel release `release`. Otherwise reads
    /// the options, and caches them unless the configuration cannot be read.
    fn or_read(
        &self,
        source: &Source,
        release: Option<&str>,
    ) -> Result<Option<BTreeMap<String, Setting>>> {
        if let Some(kept) = &*self.0.lock()
            && kept.release.as_deref() == release
        {
            return Ok(Some(kept.options.clone()));
        }
        let read = options(source, release)?;
        if let Some(options) = read.clone() {
            let release = release.map(str::to_owned);
            *self.0.lock() = Some(KernelOptions { release, options });
        }
        Ok(read)
    }
}

pub(super) const GROUPS: &str = "sys/kernel/iommu_groups";

/// Reads the IOMMU groups with their types (`identity`, `DMA`, `DMA-FQ`). The type is empty if the
/// kernel does not report it.
pub(super) fn groups(source: &Source) -> Result<BTreeMap<u32, String>> {
    let mut groups = BTreeMap::new();
    for name in source.names(GROUPS)?.unwrap_or_default() {
        let path = format!("{GROUPS}/{name}");
        let Ok(number) = name.parse() else {
            return Err(source.malformed(&path, "no IOMMU group"));
        };
        let kind = source.text(&format!("{path}/type"))?.unwrap_or_default();
        if !kind.is_empty() && !is_word(&kind) {
            return Err(
                source.malformed(&format!("{path}/type"), format_args!("no type: {kind:.40}"))
            );
        }
        groups.insert(number, kind);
    }
    Ok(groups)
}

/// Returns the mode of the IOMMU, combined over all groups.
pub(super) fn mode(groups: &BTreeMap<u32, String>) -> IommuMode {
    let identity = groups.values().filter(|kind| *kind == "identity").count();
    let unknown = groups.values().filter(|kind| kind.is_empty()).count();
    match groups.len() {
        0 => IommuMode::Off,
        _ if unknown > 0 => IommuMode::Unknown,
        all if identity == all => IommuMode::Passthrough,
        _ if identity == 0 => IommuMode::Translating,
        _ => IommuMode::Mixed,
    }
}

pub(super) fn read(source: &Source, kept: &KeptOptions) -> Result<Kernel> {
    let release = source.text("proc/sys/kernel/osrelease")?.filter(|release| is_release(release));
    let command_line = source.text("proc/cmdline")?.map(|text| words(&text)).unwrap_or_default();
    Ok(Kernel {
        options: kept.or_read(source, release.as_deref())?,
        command_line,
        modules: modules(source)?,
        nvidia: nvidia(source)?,
        release,
    })
}

fn is_release(text: &str) -> bool {
    !text.is_empty()
        && text.len() < 128
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.+~".contains(&byte))
}

/// Returns the parameters of a kernel command line that are in [`WORDS`]. Words after `--` are not
/// parameters of the kernel. Words with control characters, which a recording may contain, are left
/// out, since a terminal would obey them.
fn words(text: &str) -> Vec<String> {
    let own = text.split_whitespace().take_while(|word| *word != "--");
    let name = |word: &str| word.split('=').next().map(str::to_owned);
    own.filter(|word| name(word).is_some_and(|name| WORDS.contains(&name.as_str())))
        .filter(|word| word.len() < 256 && !word.contains(char::is_control))
        .map(str::to_owned)
        .collect()
}

/// Reads the options from `/proc/config.gz`, or from the configuration file of the kernel
/// `release`.
fn options(source: &Source, release: Option<&str>) -> Result<Option<BTreeMap<String, Setting>>> {
    const PACKED: &str = "proc/config.gz";
    let packed = source.bytes(PACKED)?;
    if let Some(text) = packed.and_then(|packed| archive::gunzip(&packed, LARGEST_FILE + 1)) {
        let text = text.map_err(|error| source.malformed(PACKED, error))?;
        if text.len() as u64 > LARGEST_FILE {
            return Err(source.malformed(PACKED, format_args!("larger than {LARGEST_FILE} bytes")));
        }
        return Ok(Some(settings(&String::from_utf8_lossy(&text))));
    }
    let Some(release) = release else { return Ok(None) };
    for path in [format!("boot/config-{release}"), format!("lib/modules/{release}/config")] {
        if let Some(bytes) = source.bytes(&path)? {
            return Ok(Some(settings(&String::from_utf8_lossy(&bytes))));
        }
    }
    Ok(None)
}

fn settings(text: &str) -> BTreeMap<String, Setting> {
    let set = text.lines().filter_map(|line| {
        let (name, value) = line.split_once('=')?;
        let setting = match value.trim() {
            "y" => Setting::Yes,
            "m" => Setting::Module,
            _ => return None,
        };
        OPTIONS.iter().any(|(option, _)| *option == name).then(|| (name.to_owned(), setting))
    });
    set.collect()
}

/// Returns the loaded modules of [`MODULES`], from `/proc/modules`, and the built-in modules that
/// have a folder in sysfs. A module that is being loaded or unloaded has such a folder too, and is
/// left out.
fn modules(source: &Source) -> Result<Vec<String>> {
    const LOADED: &str = "proc/modules";
    let text = source.text(LOADED)?.unwrap_or_default();
    let mut listed = Vec::new();
    for line in text.lines() {
        // A line is, for example: "nvidia_peermem 16384 0 - Live 0x0000000000000000"
        let mut fields = line.split_whitespace();
        let (name, size) = (fields.next(), fields.next().map(str::parse::<u64>));
        let (Some(name), Some(Ok(_))) = (name, size) else {
            return Err(source.malformed(LOADED, format_args!("no module: {line:.60}")));
        };
        listed.push((name, fields.nth(2).is_none_or(|state| state == "Live")));
    }
    let mut found = Vec::new();
    let folders = source.names("sys/module")?.unwrap_or_default();
    for (name, _) in MODULES {
        let live = listed.iter().find(|(module, _)| *module == name).map(|(_, live)| *live);
        if live.unwrap_or_else(|| folders.iter().any(|folder| folder == name)) {
            found.push(name.to_owned());
        }
    }
    Ok(found)
}

fn nvidia(source: &Source) -> Result<Option<NvidiaDriver>> {
    let Some(text) = source.text("proc/driver/nvidia/version")? else { return Ok(None) };
    // The line is, for example: "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64
    // 535.161.08  Release Build (builder)"
    let line = text.lines().next().unwrap_or_default();
    let version = line.split_whitespace().find(|word| {
        word.contains('.')
            && word.len() < 32
            && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    });
    Ok(version.map(|version| NvidiaDriver {
        version: version.to_owned(),
        open: line.contains("Open Kernel Module"),
    }))
}

/// Returns a text that [`nvidia`] parses as `driver`. Unlike the text of the kernel module, it does
/// not name the person who built the driver.
pub(super) fn write_nvidia(driver: &NvidiaDriver) -> String {
    let open = if driver.open { "Open " } else { "" };
    format!("NVRM version: NVIDIA UNIX {open}Kernel Module  {}\n", driver.version)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::source::SourceEntry, read as read_keeping, *};

    fn read(source: &Source) -> Result<Kernel> {
        read_keeping(source, &KeptOptions::default())
    }

    fn with(path: &str, bytes: impl Into<Vec<u8>>) -> Source {
        let entries = BTreeMap::from([(path.to_owned(), SourceEntry::File(bytes.into()))]);
        Source::Archive { name: "test".into(), entries }
    }

    #[test]
    fn only_known_words_of_the_command_line_are_kept() {
        let line =
            "BOOT_IMAGE=/vmlinuz root=UUID=123 intel_iommu=on iommu=pt pci=realloc quiet -- pci=no";
        assert_eq!(words(line), ["intel_iommu=on", "iommu=pt", "pci=realloc"]);
        assert_eq!(words("iommu=\u{1b}[2Jpt iommu=\u{9b}pt pci=realloc"), ["pci=realloc"]);
    }

    #[test]
    fn modules_that_still_load_are_not_listed() {
        let text = "nvidia_peermem 16384 0 - Live 0x0\nnvidia 1 2 a,b, Loading 0x0 (POE)\n\
                    snd 3 0 - Live 0x0\n";
        let mut source = with("proc/modules", text);
        assert_eq!(modules(&source).unwrap(), ["nvidia_peermem"]);
        if let Source::Archive { entries, .. } = &mut source {
            for module in ["nvidia_peermem", "nvidia", "ib_core"] {
                let state = format!("sys/module/{module}/initstate");
                entries.insert(state, SourceEntry::File(Vec::new()));
            }
        }
        assert_eq!(modules(&source).unwrap(), ["nvidia_peermem", "ib_core"]);
        assert!(modules(&with("proc/modules", "nvidia many 0")).is_err());
        assert_eq!(modules(&with("sys/module/ib_core/version", "")).unwrap(), ["ib_core"]);
    }

    #[test]
    fn open_driver_is_distinguished_from_the_closed_one() {
        let line = |open: &str| {
            format!(
                "NVRM version: NVIDIA UNIX {open}x86_64 Kernel Module  535.161.08  Sat Feb 24 \
                 (root@host)\nGCC: x"
            )
        };
        let read =
            |text: String| nvidia(&with("proc/driver/nvidia/version", text)).unwrap().unwrap();
        let open = read(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build"
                .into(),
        );
        assert_eq!((open.version.as_str(), open.open), ("550.54.15", true));
        assert_eq!((read(line("")).version.as_str(), read(line("")).open), ("535.161.08", false));
        assert_eq!(read(write_nvidia(&open)), open);
    }

    #[test]
    fn iommu_mode_follows_from_all_groups() {
        let groups = |kinds: &[&str]| {
            mode(
                &kinds
                    .iter()
                    .map(|kind| (*kind).into())
                    .enumerate()
                    .map(|(n, k)| (n as u32, k))
                    .collect(),
            )
        };
        assert_eq!(groups(&[]), IommuMode::Off);
        assert_eq!(groups(&["identity", "identity"]), IommuMode::Passthrough);
        assert_eq!(groups(&["DMA-FQ", "DMA"]), IommuMode::Translating);
        assert_eq!(groups(&["DMA", "identity"]), IommuMode::Mixed);
        assert_eq!(groups(&["DMA", ""]), IommuMode::Unknown);
    }

    #[cfg(feature = "recordings")]
    #[test]
    fn configuration_that_is_not_gzip_is_refused() {
        let error = read(&with("proc/config.gz", "CONFIG_PCI_P2PDMA=y")).unwrap_err().to_string();
        assert!(error.contains("proc/config.gz"), "{error}");
    }

    #[cfg(not(feature = "recordings"))]
    #[test]
    fn compressed_configuration_is_left_out_without_the_feature_recordings() {
        let options_of = |files: &[(&str, &str)]| {
            let file =
                |&(path, text): &(&str, &str)| (path.to_owned(), SourceEntry::File(text.into()));
            let entries = files.iter().map(file).collect();
            read(&Source::Archive { name: "test".into(), entries }).unwrap().options
        };
        let packed = ("proc/config.gz", "compressed");
        let release = ("proc/sys/kernel/osrelease", "6.12.1");
        assert_eq!(options_of(&[packed, release]), None);
        let boot = ("boot/config-6.12.1", "CONFIG_PCI_P2PDMA=y");
        let options = BTreeMap::from([("CONFIG_PCI_P2PDMA".to_owned(), Setting::Yes)]);
        assert_eq!(options_of(&[packed, release, boot]), Some(options));
    }

    proptest! {
        /// REL-03: the parsers of kernel files return for any contents and do not panic.
        #[test]
        fn arbitrary_files_do_not_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..400), text in ".{0,200}",
        ) {
            let version = "proc/driver/nvidia/version";
            for path in ["proc/config.gz", "proc/modules", "proc/cmdline", version] {
                let _ = read(&with(path, bytes.clone()));
                let _ = read(&with(path, text.clone()));
            }
            let _ = groups(&with("sys/kernel/iommu_groups/0/type", text));
        }
    }
}
