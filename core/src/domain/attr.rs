//! Attributes of domains and registrations.

use std::{fmt, os::fd::BorrowedFd};

use crate::{
    Access, Address, AddressRange, AuthKey, DeviceId, DmaBufOffset, IfaceKind, MrMode,
    cache::Limits,
    domain::{growth::Growth, region::MemoryRegion},
    path::P2pPolicy,
    provider::StagingAttr,
    registration::{Parallel, Progress, WriteOrdering},
};

/// Attributes of a domain (`fi_domain_attr` and the capabilities of `fi_getinfo`).
#[derive(Clone, Debug)]
pub struct DomainAttr {
    /// The NIC's name; `None` for the provider's first.
    pub nic: Option<String>,
    /// The mr_mode bits that the application is ready for.
    pub mr_mode: MrMode,
    /// Set if the application uses device memory (`FI_HMEM`). Without it `MrAttr::iface` is
    /// ignored.
    pub hmem: bool,
    /// The authorization key of regions and endpoints that name none.
    pub auth_key: AuthKey,
    /// Caches registrations in [`Domain::cache`](crate::Domain::cache); `None` leaves it out.
    pub cache: Option<CacheAttr>,
    /// The policy for direct access to device memory.
    pub p2p: P2pPolicy,
    /// The buffers through which device memory is copied that the NIC cannot reach.
    pub staging: StagingAttr,
    /// The ordering of regions whose [`MrAttr::ordering`] is `None`, and of cached ones. Default:
    /// relaxed.
    pub ordering: WriteOrdering,
}

impl Default for DomainAttr {
    /// Ready for what hardware usually needs, with device memory, direct where possible.
    fn default() -> Self {
        Self {
            nic: None,
            mr_mode: MrMode::LOCAL
                | MrMode::VIRT_ADDR
                | MrMode::ALLOCATED
                | MrMode::PROV_KEY
                | MrMode::HMEM,
            hmem: true,
            auth_key: AuthKey::default(),
            cache: None,
            p2p: P2pPolicy::Enabled,
            staging: StagingAttr::default(),
            ordering: WriteOrdering::default(),
        }
    }
}

/// Settings of a domain's registration cache.
///
/// A setting that is `None` is libfabric's environment variable if the domain is opened through
/// `hmem::Hmem`, and the default of [`Limits`] otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheAttr {
    /// Largest number of entries; 0 turns caching off.
    pub max_count: Option<usize>,
    /// Largest number of bytes; 0 turns caching off.
    pub max_bytes: Option<u64>,
    /// Merges registrations that overlap or touch.
    pub merge: Option<bool>,
    /// Lets a miss register more than the range that was looked up, so that later lookups of the
    /// same allocation hit. [`Growth`] says what this exposes to peers. The entry counts with all
    /// its bytes. No environment variable sets it.
    pub growth: Option<Growth>,
    /// Ifaces whose monitors are disabled. Their memory is registered uncached.
    pub without_monitors: Option<Vec<IfaceKind>>,
}

impl CacheAttr {
    /// Sets the largest number of entries.
    #[must_use]
    pub fn max_count(self, max_count: usize) -> Self {
        Self { max_count: Some(max_count), ..self }
    }

    /// Sets the largest number of bytes.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes: Some(max_bytes), ..self }
    }

    /// Sets whether registrations that overlap or touch are merged.
    #[must_use]
    pub fn merge(self, merge: bool) -> Self {
        Self { merge: Some(merge), ..self }
    }

    /// Sets how far a miss may grow.
    #[must_use]
    pub fn growth(self, growth: Growth) -> Self {
        Self { growth: Some(growth), ..self }
    }

    /// Sets the ifaces whose monitors are disabled.
    #[must_use]
    pub fn without_monitors(self, ifaces: impl Into<Vec<IfaceKind>>) -> Self {
        Self { without_monitors: Some(ifaces.into()), ..self }
    }

    pub(super) fn limits(&self) -> Limits {
        let default = Limits::default();
        Limits {
            max_count: self.max_count.unwrap_or(default.max_count),
            max_bytes: self.max_bytes.unwrap_or(default.max_bytes),
            merge: self.merge.unwrap_or(default.merge),
        }
    }
}

/// A dma-buf to register (`struct fi_mr_dmabuf`).
#[derive(Clone, Copy, Debug)]
pub struct DmaBufAttr<'a> {
    /// The dma-buf; the registration outlives it.
    pub fd: BorrowedFd<'a>,
    /// The offset of the region in the dma-buf.
    pub offset: DmaBufOffset,
    /// Bytes, more than 0.
    pub len: u64,
    /// The address that the application knows the buffer's start by; `None` counts as 0. In
    /// VIRT_ADDR mode peers address from `base_addr + offset`.
    pub base_addr: Option<Address>,
}

/// Touching pages before they are registered.
#[derive(Clone, Copy)]
pub struct Prefault<'a> {
    /// Threads to use; 0 for one per CPU. Ranges under 64 MiB use one.
    pub threads: usize,
    /// Told after each chunk, from any of the threads.
    pub progress: Option<Progress<'a>>,
}

impl fmt::Debug for Prefault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefault").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// A request to register memory (`struct fi_mr_attr`).
#[derive(Clone, Copy, Debug)]
pub struct MrAttr<'a> {
    /// The ranges, 1 to `mr_iov_limit`; none with [`MrAttr::dma_buf`].
    pub ranges: &'a [AddressRange],
    /// Rights.
    pub access: Access,
    /// Reserved: 0.
    pub offset: u64,
    /// The key to use; ignored in PROV_KEY mode. `None` (which `fi_mr_attr` cannot say) leaves it
    /// to the provider.
    pub requested_key: Option<u64>,
    /// Returned with the event of an asynchronous registration.
    pub context: u64,
    /// The authorization key; `None` for the domain's.
    pub auth_key: Option<&'a AuthKey>,
    /// The owner of the memory, if the caller knows it; found out otherwise. Ignored without the
    /// HMEM capability.
    pub iface: Option<IfaceKind>,
    /// The device, if the caller knows it.
    pub device: Option<DeviceId>,
    /// Reserved: 0.
    pub hmem_data: u64,
    /// The page size that the provider should use, in bytes; 0 leaves it to the provider.
    pub page_size: usize,
    /// Registers inside this region instead of on its own.
    pub base: Option<&'a MemoryRegion>,
    /// A hint: how many sub-regions will follow.
    pub sub_mr_count: usize,
    /// The buffer, with [`MrFlags::MR_DMABUF`](crate::MrFlags::MR_DMABUF).
    pub dma_buf: Option<DmaBufAttr<'a>>,
    /// Touches host pages first, in parallel.
    pub prefault: Option<Prefault<'a>>,
    /// Lets the provider register host memory in parts, several at once.
    pub parallel: Option<Parallel<'a>>,
    /// The order in which the bytes that the NIC writes become visible; `None` for the domain's.
    /// Memory that software polls needs the strict order.
    pub ordering: Option<WriteOrdering>,
}

impl<'a> MrAttr<'a> {
    /// Registers `ranges` with `access`, and nothing else asked for.
    #[must_use]
    pub const fn new(ranges: &'a [AddressRange], access: Access) -> Self {
        Self {
            ranges,
            access,
            offset: 0,
            requested_key: None,
            context: 0,
            auth_key: None,
            iface: None,
            device: None,
            hmem_data: 0,
            page_size: 0,
            base: None,
            sub_mr_count: 0,
            dma_buf: None,
            prefault: None,
            parallel: None,
            ordering: None,
        }
    }

    /// With a requested key.
    #[must_use]
    pub const fn key(mut self, requested_key: u64) -> Self {
        self.requested_key = Some(requested_key);
        self
    }
}
