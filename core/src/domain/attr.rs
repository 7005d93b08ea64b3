//! Attributes of domains and registrations.

use std::{fmt, os::fd::BorrowedFd};

use crate::{
    Access, Address, AddressRange, AuthKey, DeviceId, DmaBufOffset, IfaceKind, MrMode,
    cache::Limits,
    domain::{growth::Growth, region::MemoryRegion},
    path::{DirectPath, P2pPolicy},
    provider::StagingAttr,
    registration::{Parallel, Progress, WriteOrdering},
};

/// Attributes of a domain (`fi_domain_attr` and the capabilities of `fi_getinfo`).
#[derive(Clone, Debug)]
pub struct DomainAttr {
    /// The NIC's name. `None` means the provider's first NIC.
    pub nic: Option<String>,
    /// The mr_mode bits that the application offers to the provider. Default: LOCAL, VIRT_ADDR,
    /// ALLOCATED, PROV_KEY and HMEM. The domain uses those that the provider needs.
    pub mr_mode: MrMode,
    /// True if the application uses device memory (`FI_HMEM`). Otherwise [`MrAttr::iface`] is
    /// ignored. Default: true.
    pub hmem: bool,
    /// The authorization key of regions and endpoints that do not have their own.
    pub auth_key: AuthKey,
    /// The settings of the registration cache ([`Domain::cache`](crate::Domain::cache)). `None`
    /// means no cache, and is the default.
    pub cache: Option<CacheAttr>,
    /// The policy for direct access to device memory. Default: [`P2pPolicy::Enabled`].
    pub p2p: P2pPolicy,
    /// The direct paths to device memory, in the order in which they are tried. `None` means the
    /// order that suits the NIC, and is the default: dma-buf (first with the PCIe mapping, for some
    /// NICs), then peer memory.
    ///
    /// A path that is not listed is not tried. With an empty list, device memory needs staged
    /// copies, and is refused under [`P2pPolicy::Required`]. A domain that is opened through
    /// `hmem::Hmem` uses the builder's list or the variable `HMEM_DIRECT_PATHS` for `None`.
    pub direct_paths: Option<Vec<DirectPath>>,
    /// The size and number of staging buffers, for device memory that the NIC cannot reach.
    pub staging: StagingAttr,
    /// The write ordering of cached regions, and of regions whose [`MrAttr::ordering`] is `None`.
    /// The default is strict. [`WriteOrdering`] tells when relaxed ordering is safe, and
    /// `hmem perf` measures its gain.
    pub ordering: WriteOrdering,
    /// True if transfers may call the drivers of devices. Default: true.
    ///
    /// If false, posts, [`Domain::progress`](crate::Domain::progress) and reads of completion
    /// queues call no iface (`FI_OPT_CUDA_API_PERMITTED` of libfabric). Use false if a driver call
    /// could wait for a kernel on the device that itself waits for a transfer. This has three
    /// consequences:
    ///
    /// - The application must offer LOCAL and give each local buffer of a transfer a descriptor,
    ///   even if the domain has a cache.
    /// - Device memory that the NIC reaches by staged copies only is refused with Unsupported.
    /// - Completion queues do not flush devices. The application calls
    ///   [`Domain::flush_inbound`](crate::Domain::flush_inbound), at a time when driver calls are
    ///   safe, before the device reads bytes that the NIC wrote.
    ///
    /// Registrations, lookups in the cache, and closing calls still call drivers. Over verbs, a
    /// read of a completion queue also advances staged transfers of the provider's other domains on
    /// the same device, if these permit driver calls. Open such domains on a provider of their own.
    pub driver_calls_in_transfers: bool,
}

impl Default for DomainAttr {
    /// Returns attributes that suit most hardware: the mr_mode bits that NICs usually need, device
    /// memory, direct access where possible, no cache.
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
            direct_paths: None,
            staging: StagingAttr::default(),
            ordering: WriteOrdering::default(),
            driver_calls_in_transfers: true,
        }
    }
}

/// The settings of a domain's registration cache.
///
/// For a setting that is `None`, a domain opened through `hmem::Hmem` uses the setting of the
/// builder of that `Hmem`, or else libfabric's environment variable. If neither is set, the default
/// of [`Limits`] applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheAttr {
    /// The largest number of entries. 0 disables caching, `None` means the default.
    pub max_count: Option<usize>,
    /// The largest total size of all entries in bytes. 0 disables caching, `None` means the
    /// default.
    pub max_bytes: Option<u64>,
    /// True to merge a new registration with cached ones that it overlaps or touches, false to keep
    /// them separate. `None` means the default.
    pub merge: Option<bool>,
    /// The permission for a miss to register more than the range of the lookup, so that later
    /// lookups in the same allocation are hits. [`Growth`] explains what this exposes to peers. All
    /// bytes of the larger entry count for [`CacheAttr::max_bytes`]. `None` means no growth: this
    /// setting has no environment variable.
    pub growth: Option<Growth>,
    /// The ifaces with a disabled monitor. Their memory is registered uncached. `None` means the
    /// default.
    pub without_monitors: Option<Vec<IfaceKind>>,
}

impl CacheAttr {
    /// Sets the largest number of entries.
    #[must_use]
    pub fn max_count(self, max_count: usize) -> Self {
        Self { max_count: Some(max_count), ..self }
    }

    /// Sets the largest total size of all entries in bytes.
    #[must_use]
    pub fn max_bytes(self, max_bytes: u64) -> Self {
        Self { max_bytes: Some(max_bytes), ..self }
    }

    /// Sets whether registrations that overlap or touch are merged.
    #[must_use]
    pub fn merge(self, merge: bool) -> Self {
        Self { merge: Some(merge), ..self }
    }

    /// Sets how much more than the range of the lookup a miss may register.
    #[must_use]
    pub fn growth(self, growth: Growth) -> Self {
        Self { growth: Some(growth), ..self }
    }

    /// Sets the ifaces with a disabled monitor.
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
    /// The file descriptor of the dma-buf. The application may close it when the registering call
    /// has returned.
    pub fd: BorrowedFd<'a>,
    /// The offset of the region in the dma-buf.
    pub offset: DmaBufOffset,
    /// The length in bytes, more than 0.
    pub len: u64,
    /// The application's address of the first byte of the dma-buf. `None` means 0. In VIRT_ADDR
    /// mode, peers address the first byte of the region as `base_addr + offset`.
    pub base_addr: Option<Address>,
}

/// The settings for populating pages before they are registered.
#[derive(Clone, Copy)]
pub struct Prefault<'a> {
    /// The number of threads. 0 means one per CPU. Ranges under 64 MiB use one thread, and longer
    /// ranges at most one thread per 16 MiB.
    pub threads: usize,
    /// A progress callback. Any of the threads may call it, after each part of the range.
    /// Asynchronous registrations ([`Domain::bind`](crate::Domain::bind)) do not call it.
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
    /// The ranges: 1 to `mr_iov_limit`, exactly one with [`MrAttr::base`], or none with
    /// [`MrAttr::dma_buf`].
    pub ranges: &'a [AddressRange],
    /// The rights of local and remote accesses.
    pub access: Access,
    /// Reserved: must be 0.
    pub offset: u64,
    /// The requested key. Ignored in PROV_KEY mode. With `None` the provider chooses the key.
    pub requested_key: Option<u64>,
    /// A number that the application chooses. The event of an asynchronous registration contains
    /// it.
    pub context: u64,
    /// The authorization key. `None` or an empty key means the domain's key.
    pub auth_key: Option<&'a AuthKey>,
    /// The iface that owns the memory. With `None` the domain queries its ifaces.
    ///
    /// The iface must be the owner, with one exception: memory of a device API's host allocator
    /// (CUDA: `cuMemHostAlloc`) may also be named as memory of the system iface. Managed memory may
    /// not. A dma-buf has no address to query: the domain trusts a named iface, and `None` means
    /// host memory. A sub-region has the iface of its base. Ignored if [`DomainAttr::hmem`] is
    /// false.
    pub iface: Option<IfaceKind>,
    /// The device that owns the memory. With `None` the domain queries its ifaces.
    ///
    /// For memory that belongs to no particular device, any device of the iface is accepted. For a
    /// dma-buf, which has no address to query, `None` means no device: completion queues then flush
    /// none ([`Domain::open_cq`](crate::Domain::open_cq)).
    ///
    /// The device is ignored in these cases:
    ///
    /// - [`MrAttr::iface`] is `None` or the system iface, or is ignored itself.
    /// - The request has [`MrFlags::HMEM_HOST_ALLOC`](crate::MrFlags::HMEM_HOST_ALLOC).
    pub device: Option<DeviceId>,
    /// Reserved: must be 0.
    pub hmem_data: u64,
    /// The page size that the provider should use, in bytes. With 0 the provider chooses. Must be 0
    /// for a sub-region.
    pub page_size: usize,
    /// The region of which the request registers a part. `None` registers new memory.
    pub base: Option<&'a MemoryRegion>,
    /// The expected number of sub-regions, as in `struct fi_mr_attr`. This library ignores the
    /// hint.
    pub sub_mr_count: usize,
    /// The dma-buf to register, if [`MrFlags::MR_DMABUF`](crate::MrFlags::MR_DMABUF) is set.
    pub dma_buf: Option<DmaBufAttr<'a>>,
    /// The settings for populating host pages on several CPUs before the registration. With `None`,
    /// the registration itself populates them.
    pub prefault: Option<Prefault<'a>>,
    /// The settings for registering host memory in several parts at once. With `None`, the provider
    /// registers each range in one part.
    pub parallel: Option<Parallel<'a>>,
    /// The order in which the NIC's writes become visible. `None` means the order of
    /// [`DomainAttr::ordering`]. Memory that software polls needs the strict order.
    pub ordering: Option<WriteOrdering>,
}

impl<'a> MrAttr<'a> {
    /// Creates a request for `ranges` with `access`, and defaults for everything else.
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

    /// Sets [`MrAttr::requested_key`].
    #[must_use]
    pub const fn key(mut self, requested_key: u64) -> Self {
        self.requested_key = Some(requested_key);
        self
    }
}
