//! The configuration of a loopback fabric, and its builder.

use std::fmt;

use hmem_core::{
    Access, Error, ErrorKind, MrFlags, MrMode, Result,
    provider::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr, WindowType},
};

use super::{Faults, Loopback};

/// The pages that a host registration reaches after the application changed its mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// Those mapped now, as a NIC with on-demand paging does.
    #[default]
    Follow,
    /// Those mapped at registration, as most hardware does: they are pinned through io_uring
    /// registered buffers, and a stale registration moves stale bytes. Pages must be there, and
    /// writable, at registration.
    Pinned,
}

/// The thread that executes posted requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// Calls of `progress` and reads of completion queues: nothing happens behind a test's back.
    #[default]
    ByHand,
    /// One thread per domain, parked while there is nothing to do.
    Thread,
}

/// Builds a [`Loopback`].
///
/// ```
/// use hmem_provider_loopback::{Faults, Loopback, Memory, Progress};
///
/// let faults = Faults::new();
/// let provider = Loopback::builder()
///     .nic("nic0")
///     .nic("nic1")
///     .memory(Memory::Follow)
///     .progress(Progress::Thread)
///     .max_mr_count(1000)
///     .faults(&faults)
///     .build()?;
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Builder {
    names: Vec<String>,
    pub(super) config: Config,
}

/// The part of the configuration that every NIC of a fabric shares.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) attr: ProviderAttr,
    pub(super) memory: Memory,
    pub(super) windows: Vec<WindowType>,
    pub(super) region_counters: bool,
    pub(super) faults: Faults,
    pub(super) max_pinned_bytes: Option<u64>,
    pub(super) limit_regions: bool,
    pub(super) unexpected_bytes: u64,
}

/// Regions that a NIC can hold: 24 bits of index.
pub(super) const MAX_REGIONS: u64 = 1 << 24;

impl Default for Builder {
    fn default() -> Self {
        let attr = ProviderAttr {
            nic: Nic { provider: "loopback".into(), name: String::new(), pci_bus_id: None },
            required_mr_mode: MrMode::empty(),
            basic_mr_mode: MrMode::BASIC_MEANS,
            key_size: 8,
            raw_key_size: 32,
            mr_iov_limit: 16,
            max_mr_size: u64::MAX,
            max_mr_count: MAX_REGIONS,
            page_sizes: page_sizes(),
            staged_access: Access::all(),
            imports: Imports {
                dma_buf: true,
                pcie_mapping_first: false,
                peer_memory: false,
                staged: true,
            },
            flags: MrFlags::all(),
            progress: ProgressModel::Manual,
            // An endpoint executes its requests one after the other, each to its end.
            order: MsgOrder::all(),
        };
        Self {
            names: Vec::new(),
            config: Config {
                attr,
                memory: Memory::Follow,
                windows: vec![WindowType::One, WindowType::TwoA, WindowType::TwoB],
                region_counters: true,
                faults: Faults::new(),
                max_pinned_bytes: None,
                limit_regions: false,
                unexpected_bytes: 1 << 20,
            },
        }
    }
}

impl Builder {
    /// Adds a NIC; without any there is one named `loop0`.
    pub fn nic(mut self, name: impl Into<String>) -> Self {
        self.names.push(name.into());
        self
    }

    /// Sets the PCI address that the NICs report, so that a test can put them into a recorded
    /// topology. Default: none.
    pub fn pci_bus_id(mut self, id: impl Into<String>) -> Self {
        self.config.attr.nic.pci_bus_id = Some(id.into());
        self
    }

    /// The mr_mode bits that an application must offer. Default: none.
    pub fn needs(mut self, modes: MrMode) -> Self {
        self.config.attr.required_mr_mode = modes;
        self
    }

    /// The mr_mode bits that BASIC may force. Default: those that BASIC stands for.
    pub fn can(mut self, modes: MrMode) -> Self {
        self.config.attr.basic_mr_mode = modes;
        self
    }

    /// Bytes of a key: 4 (24-bit index, 8-bit tag) or 8 (salted per domain). Default: 8.
    pub fn key_size(mut self, bytes: usize) -> Self {
        self.config.attr.key_size = bytes;
        self
    }

    /// Bytes of a raw key, 8 or more. Default: 32.
    pub fn raw_key_size(mut self, bytes: usize) -> Self {
        self.config.attr.raw_key_size = bytes;
        self
    }

    /// Ranges in one region, at least 1. Default: 16.
    pub fn mr_iov_limit(mut self, ranges: usize) -> Self {
        self.config.attr.mr_iov_limit = ranges;
        self
    }

    /// Bytes in one region. Default: no limit.
    pub fn max_mr_size(mut self, bytes: u64) -> Self {
        self.config.attr.max_mr_size = bytes;
        self
    }

    /// Regions at once on a NIC. Default: 2^24.
    pub fn max_mr_count(mut self, regions: u64) -> Self {
        self.config.attr.max_mr_count = regions.min(MAX_REGIONS);
        self.config.limit_regions = true;
        self
    }

    /// Bytes that registrations may hold at once on a NIC, like RLIMIT_MEMLOCK: each region counts,
    /// the same pages again too. Default: no limit.
    pub fn max_pinned_bytes(mut self, bytes: u64) -> Self {
        self.config.max_pinned_bytes = Some(bytes);
        self
    }

    /// Sets the kinds of memory that the NICs import. Default: dma-buf fds and staged memory.
    pub fn imports(mut self, imports: Imports) -> Self {
        self.config.attr.imports = imports;
        self
    }

    /// The page sizes that registrations may ask for, in bytes. Default: those of this machine.
    pub fn page_sizes(mut self, sizes: impl Into<Vec<usize>>) -> Self {
        self.config.attr.page_sizes = sizes.into();
        self
    }

    /// The registration flags that are honoured. Default: all.
    pub fn flags(mut self, flags: MrFlags) -> Self {
        self.config.attr.flags = flags;
        self
    }

    /// The window types. Default: all.
    pub fn windows(mut self, types: impl Into<Vec<WindowType>>) -> Self {
        self.config.windows = types.into();
        self
    }

    /// Sets whether counters can be bound to regions. Default: yes.
    pub fn region_counters(mut self, possible: bool) -> Self {
        self.config.region_counters = possible;
        self
    }

    /// Bytes of messages that an endpoint keeps before a receive is posted; beyond it they wait at
    /// the sender. Default: 1 MiB.
    pub fn unexpected_bytes(mut self, bytes: u64) -> Self {
        self.config.unexpected_bytes = bytes;
        self
    }

    /// Sets the pages that host registrations reach. Default: [`Memory::Follow`].
    pub fn memory(mut self, memory: Memory) -> Self {
        self.config.memory = memory;
        self
    }

    /// Sets the thread that executes posted requests. Default: [`Progress::ByHand`].
    pub fn progress(mut self, progress: Progress) -> Self {
        self.config.attr.progress = match progress {
            Progress::ByHand => ProgressModel::Manual,
            Progress::Thread => ProgressModel::Thread,
        };
        self
    }

    /// Sets the faults, by which tests inject failures and hold calls in flight.
    pub fn faults(mut self, faults: &Faults) -> Self {
        self.config.faults = faults.clone();
        self
    }

    /// Builds the fabric: endpoints of all its NICs and domains find one another.
    ///
    /// # Errors
    /// InvalidArgument for a key size other than 4 and 8, a raw key size below 8, an iov limit of
    /// 0, unknown mode bits, BASIC or SCALABLE among the needs, or two NICs of one name.
    pub fn build(mut self) -> Result<Loopback> {
        let attr = &self.config.attr;
        let refuse = |what: &'static str, value: &dyn fmt::Display, remedy: &'static str| {
            Err(Error::new(ErrorKind::InvalidArgument, "build loopback")
                .provider("loopback")
                .context(what, value)
                .remedy(remedy))
        };
        if !matches!(attr.key_size, 4 | 8) {
            return refuse("key_size", &attr.key_size, "a key has 4 or 8 bytes");
        }
        if attr.raw_key_size < 8 {
            return refuse(
                "raw_key_size",
                &attr.raw_key_size,
                "a raw key holds at least the 8 bytes of a key",
            );
        }
        if attr.mr_iov_limit == 0 {
            return refuse("mr_iov_limit", &0, "a region has at least one range");
        }
        let required = attr.required_mr_mode;
        if required.intersects(MrMode::BASIC | MrMode::SCALABLE)
            || !MrMode::all().contains(required)
        {
            return refuse("needs", &required, "name single mode bits");
        }
        if self.names.is_empty() {
            self.names.push("loop0".into());
        }
        for (at, name) in self.names.iter().enumerate() {
            if self.names[..at].contains(name) {
                return refuse("nic", name, "NIC names are unique");
            }
        }
        Loopback::new(&self.names, &self.config)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("nics", &self.names)
            .field("attr", &self.config.attr)
            .field("memory", &self.config.memory)
            .finish_non_exhaustive()
    }
}

/// The page sizes of this machine: the base one, and those of hugetlbfs.
fn page_sizes() -> Vec<usize> {
    let mut sizes = vec![rustix::param::page_size()];
    if let Ok(folder) = std::fs::read_dir("/sys/kernel/mm/hugepages") {
        sizes.extend(folder.flatten().filter_map(|entry| {
            let name = entry.file_name();
            let kib: usize =
                name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            kib.checked_mul(1024)
        }));
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}
