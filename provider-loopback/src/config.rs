//! The configuration of the NICs of a fabric.

use hmem_core::{
    Access, MrFlags, MrMode,
    provider::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr, WindowType},
};

use super::Faults;

/// The pages that a host registration reaches after the application changed its mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    /// The pages mapped now, as a NIC with on-demand paging does.
    #[default]
    Follow,
    /// The pages mapped at registration, as most hardware does: they are pinned through io_uring
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

impl Default for Config {
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
            cq_data_size: 8,
        };
        Self {
            attr,
            memory: Memory::Follow,
            windows: vec![WindowType::One, WindowType::TwoA, WindowType::TwoB],
            region_counters: true,
            faults: Faults::new(),
            max_pinned_bytes: None,
            limit_regions: false,
            unexpected_bytes: 1 << 20,
        }
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
