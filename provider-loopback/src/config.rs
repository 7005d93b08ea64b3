//! The configuration of the NICs of a fabric.

use hmem_core::{
    Access, MrFlags, MrMode, os_page_sizes,
    provider::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr, WindowType},
};

use super::Faults;

/// The choice of the pages that a host region uses when the application maps other pages at the
/// region's addresses.
///
/// The choice does not affect memory that stays mapped until the region is closed
/// ([`Backing::Host`](hmem_core::provider::Backing::Host) with `owned`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemapPolicy {
    /// Each transfer uses the pages that are mapped at that time, as on a NIC with on-demand
    /// paging.
    #[default]
    Follow,
    /// Transfers use the pages that were mapped at registration, as on most hardware.
    ///
    /// The NIC pins these pages as io_uring registered buffers. If the application remaps the
    /// addresses, transfers still move the bytes of the old pages, until a refresh of the region.
    ///
    /// - Opening a domain fails with Unavailable if the process cannot use io_uring.
    /// - Registration fails unless every page is mapped and writable. With MMU_NOTIFY, this applies
    ///   only to the pages that are present.
    /// - The kernel may refuse to pin pages of files other than memfds and hugetlbfs files.
    Pinned,
}

/// The choice of the thread that executes posted requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// The application's threads execute the requests of a domain: in calls of its `progress`, and
    /// in reads of its completion queues and waits for them. No request executes between those
    /// calls.
    #[default]
    ByHand,
    /// One thread of each domain executes the domain's requests. It sleeps while no request can
    /// make progress.
    Thread,
}

/// The configuration that all NICs of a fabric share.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) attr: ProviderAttr,
    pub(super) remap_policy: RemapPolicy,
    pub(super) windows: Vec<WindowType>,
    pub(super) region_counters: bool,
    pub(super) faults: Faults,
    /// The maximum number of bytes in all live regions of a NIC; `None` for no limit.
    pub(super) max_pinned_bytes: Option<u64>,
    /// True if the builder set a maximum number of live regions of a NIC (`attr.max_mr_count`).
    pub(super) limit_regions: bool,
    pub(super) unexpected_bytes: u64,
    /// The bandwidth of each NIC in bytes per second; 0 for no limit.
    pub(super) bandwidth: u64,
}

/// The maximum number of entries in the region table of a NIC, because region indices have 24 bits.
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
            page_sizes: os_page_sizes().to_vec(),
            staged_access: Access::all(),
            imports: Imports {
                dma_buf: true,
                pcie_mapping_first: Some(false),
                data_direct: None,
                peer_memory: false,
                staged: true,
            },
            flags: MrFlags::all(),
            progress: ProgressModel::Manual,
            // An endpoint finishes each request before it starts the next request.
            order: MsgOrder::all(),
            cq_data_size: 8,
            driver_cache: None,
        };
        Self {
            attr,
            remap_policy: RemapPolicy::Follow,
            windows: vec![WindowType::One, WindowType::TwoA, WindowType::TwoB],
            region_counters: true,
            faults: Faults::new(),
            max_pinned_bytes: None,
            limit_regions: false,
            unexpected_bytes: 1 << 20,
            bandwidth: 0,
        }
    }
}
