//! Attributes of a domain, read from the `fi_info` with which it was opened.

#![allow(unsafe_code, reason = "reads the structs of an `fi_info`")]

use std::{ffi::c_int, num::NonZero};

use hmem_core::{
    Access, MrFlags, MrMode,
    provider::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr},
};

use super::{
    library::{Names, version_text},
    sys::{self, fi_domain_attr, fi_info},
};

/// Maximum number of ranges in one region. Each range has a registration of its own.
const RANGES: usize = 32;

/// Core providers whose registrations import dma-bufs. Other providers ignore `FI_MR_DMABUF`, and
/// some of them then access the memory by its address.
const IMPORTING: [&str; 3] = ["cxi", "efa", "verbs"];

/// The API version since which a registration may name a dma-buf.
const DMA_BUF_API: u32 = sys::version(1, 20);

/// Settings of the application that replace attributes which libfabric does not report.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Overrides {
    pub(super) dma_buf: Option<bool>,
    pub(super) own_cache: Option<bool>,
}

/// Attributes of a domain.
#[derive(Clone, Debug)]
pub(super) struct DomainAttr {
    pub(super) provider_attr: ProviderAttr,
    /// The bits of `fi_domain_attr::mr_mode`. FI_MR_BASIC is replaced by the bits that it means.
    pub(super) mr_mode: c_int,
    /// The capabilities of `fi_info` (`FI_HMEM`, `FI_ATOMIC` and so on).
    pub(super) caps: u64,
    /// The length of a key in bytes. More than 8 for raw keys.
    pub(super) key_size: usize,
    /// The length of the domain's authorization keys in bytes; `None` if it has none.
    pub(super) auth_key_size: Option<NonZero<usize>>,
    /// True if calls of the domain must not run at the same time: the domain lacks
    /// `FI_THREAD_SAFE`.
    pub(super) serial: bool,
}

impl DomainAttr {
    /// Reads the attributes. `own_cache` describes libfabric's own registration cache.
    ///
    /// # Safety
    /// `info` is an `fi_info` with the structs that it points to.
    pub(super) unsafe fn of(
        info: &fi_info,
        domain: &fi_domain_attr,
        names: &Names,
        api_version: u32,
        overrides: Overrides,
        own_cache: Option<String>,
    ) -> Self {
        let (mr_mode, caps) = (without_basic(domain.mr_mode), info.caps);
        let hmem = caps & sys::FI_HMEM != 0;
        let imports = names.provider.split(';').any(|layer| IMPORTING.contains(&layer));
        let dma_buf = overrides.dma_buf.unwrap_or(hmem && imports) && api_version >= DMA_BUF_API;
        let key_size = if domain.mr_key_size == 0 { 8 } else { domain.mr_key_size };
        // SAFETY: the caller promises complete structs.
        let order = unsafe { info.tx_attr.as_ref() }.map_or(0, |transmit| transmit.msg_order);
        // SAFETY: the caller promises complete structs.
        let pci_bus_id = unsafe { pci_bus_id(info) };
        let name = format!("{}:{}", names.provider, names.domain);
        let nic = Nic { provider: "libfabric".into(), name, pci_bus_id };
        tracing::debug!(%nic, api = version_text(api_version), mr_mode, dma_buf, "attributes read");
        let provider_attr = ProviderAttr {
            nic,
            required_mr_mode: required(mr_mode),
            basic_mr_mode: required(mr_mode),
            key_size: key_size.min(8),
            raw_key_size: key_size,
            mr_iov_limit: RANGES,
            max_mr_size: u64::MAX,
            max_mr_count: if domain.mr_cnt == 0 { u64::MAX } else { domain.mr_cnt as u64 },
            page_sizes: vec![rustix::param::page_size()],
            imports: Imports {
                dma_buf,
                pcie_mapping_first: None,
                data_direct: None,
                // Only a registration shows whether libfabric was built for the memory.
                peer_memory: hmem,
                staged: false,
            },
            staged_access: Access::empty(),
            flags: flags(caps, dma_buf),
            progress: match domain.data_progress {
                sys::FI_PROGRESS_AUTO => ProgressModel::Nic,
                _ => ProgressModel::Manual,
            },
            order: MsgOrder::from_bits_truncate(order),
            cq_data_size: domain.cq_data_size.min(8),
            driver_cache: match overrides.own_cache {
                Some(false) => None,
                Some(true) => own_cache.or_else(|| Some("libfabric's cache".to_owned())),
                None => own_cache,
            },
        };
        Self {
            provider_attr,
            mr_mode,
            caps,
            key_size,
            auth_key_size: NonZero::new(domain.auth_key_size),
            serial: domain.threading != sys::FI_THREAD_SAFE,
        }
    }

    /// Returns a mask of the bits that a key of the provider's choice may have. The mask lacks the
    /// highest of 64 bits, because the number `u64::MAX` means that there is no key.
    pub(super) fn key_mask(&self) -> u64 {
        match self.key_size {
            bytes @ 1..8 => (1 << (8 * bytes)) - 1,
            _ => u64::MAX >> 1,
        }
    }
}

/// Returns `mr_mode` with FI_MR_BASIC replaced by the bits that it means. libfabric leaves
/// FI_MR_BASIC in the mode if the program offers it.
fn without_basic(mr_mode: c_int) -> c_int {
    let all = MrMode::from_bits_retain(mr_mode.unsigned_abs());
    all.effective().bits().cast_signed()
}

/// Returns the mode bits that the application must offer. ENDPOINT is not among them, because the
/// provider binds and enables regions itself.
fn required(mr_mode: c_int) -> MrMode {
    MrMode::from_bits_truncate(mr_mode.unsigned_abs()).difference(MrMode::ENDPOINT)
}

/// Returns the registration flags that the domain supports.
fn flags(caps: u64, dma_buf: bool) -> MrFlags {
    let mut flags = MrFlags::empty();
    flags.set(MrFlags::MR_DMABUF, dma_buf);
    let hmem = MrFlags::HMEM_HOST_ALLOC | MrFlags::HMEM_DEVICE_ONLY;
    flags.set(hmem, caps & sys::FI_HMEM != 0);
    flags.set(MrFlags::RMA_PMEM, caps & sys::FI_RMA_PMEM != 0);
    flags.set(MrFlags::RMA_EVENT, caps & sys::FI_RMA_EVENT != 0);
    flags
}

/// Returns the PCI bus id of the NIC, if the `fi_info` has it.
///
/// # Safety
/// `info` is an `fi_info` with the structs that it points to.
unsafe fn pci_bus_id(info: &fi_info) -> Option<String> {
    // SAFETY: the caller promises complete structs.
    let bus = unsafe { info.nic.as_ref()?.bus_attr.as_ref() }?;
    let pci = &bus.attr;
    (bus.bus_type == sys::FI_BUS_PCI).then(|| {
        let sys::fi_pci_attr { domain_id, bus_id, device_id, function_id } = pci;
        format!("{domain_id:04x}:{bus_id:02x}:{device_id:02x}.{function_id:x}")
    })
}
