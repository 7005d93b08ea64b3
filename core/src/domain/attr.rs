//! Attributes of domains and of their caches.

use crate::{
    AuthKey, IfaceKind, MrMode,
    cache::Limits,
    domain::growth::Growth,
    path::{DirectPath, P2pPolicy},
    provider::StagingAttr,
    registration::WriteOrdering,
};

/// Attributes of a domain (`fi_domain_attr` and the capabilities of `fi_getinfo`).
#[derive(Clone, Debug)]
pub struct DomainAttr {
    /// The NIC's name. `None` means the provider's first NIC.
    pub nic: Option<String>,
    /// The mr_mode bits that the application offers to the provider. Default: LOCAL, VIRT_ADDR,
    /// ALLOCATED, PROV_KEY and HMEM. The domain uses those that the provider needs.
    pub mr_mode: MrMode,
    /// True if the application uses device memory (`FI_HMEM`). If false, the domain ignores
    /// [`Request::owner`](super::Request::owner). Default: true.
    pub hmem: bool,
    /// The authorization key of regions and endpoints that do not have their own.
    pub auth_key: AuthKey,
    /// The settings of the registration cache ([`Domain::cache`](crate::Domain::cache)). `None`,
    /// the default, means no cache.
    pub cache: Option<CacheAttr>,
    /// The policy for direct access to device memory. Default: [`P2pPolicy::Enabled`].
    pub p2p: P2pPolicy,
    /// The direct paths to device memory, in the order in which they are tried. A path that is not
    /// listed is not tried. With an empty list, device memory needs staged copies.
    ///
    /// `None`, the default, means the list of `hmem::Builder::direct_paths` or the variable
    /// `HMEM_DIRECT_PATHS`, if `hmem::Hmem` opens the domain. Without such a list, `None` means
    /// dma-buf, then peer memory. Dma-bufs with the PCIe mapping are tried first if
    /// [`Imports::pcie_mapping_first`](crate::provider::Imports::pcie_mapping_first) is true. Data
    /// Direct comes before both if [`Imports::data_direct`](crate::provider::Imports::data_direct)
    /// is the PCI domain of the device.
    pub direct_paths: Option<Vec<DirectPath>>,
    /// True to check each direct path of a device and NIC before its first use: the NIC reads and
    /// writes a page of the device's memory, in a transfer to itself. Some machines register device
    /// memory for a NIC that cannot reach it, and only transfers show that.
    ///
    /// The result is an attempt in the decision. All domains of one `hmem::Hmem` reuse the result
    /// for later registrations. After a failed check the search tries the next path. A check
    /// allocates a page of device memory, and opens two endpoints for a moment. A check cannot run
    /// on a NIC without an active port, for example. Such a check is also an attempt, but does not
    /// change the decision, and the next registration repeats the check. A dma-buf that the
    /// application supplies is not checked.
    ///
    /// `None`, the default, means the setting of `hmem::Builder::reach_check` or the variable
    /// `HMEM_REACH_CHECK`, if `hmem::Hmem` opens the domain, and otherwise false.
    pub reach_check: Option<bool>,
    /// The size and number of staging buffers, for device memory that the NIC cannot reach.
    pub staging: StagingAttr,
    /// The write ordering of cached regions, and of requests without
    /// [`Request::ordering`](super::Request::ordering). Default: strict.
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
    /// read of a completion queue also advances the staged transfers of all other domains that
    /// have this setting true and share the provider and the NIC, so it calls drivers for them.
    /// Open those domains on another provider.
    pub driver_calls_in_transfers: bool,
    /// True to measure the time of each registration, for
    /// [`DomainMetrics::latency`](super::DomainMetrics::latency). Default: false, because two reads
    /// of the clock are a fifth of the time that the software NIC needs to register.
    pub registration_latency: bool,
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
            reach_check: None,
            staging: StagingAttr::default(),
            ordering: WriteOrdering::default(),
            driver_calls_in_transfers: true,
            registration_latency: false,
        }
    }
}

/// The settings of a domain's registration cache.
///
/// For a setting that is `None`, a domain opened through `hmem::Hmem` uses the setting of
/// `hmem::Builder::cache`, or else libfabric's environment variable. If neither is set, the default
/// of [`Limits`] applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheAttr {
    /// The largest number of entries. 0 disables caching.
    pub max_count: Option<usize>,
    /// The largest total size of all entries in bytes. 0 disables caching.
    pub max_bytes: Option<u64>,
    /// True to merge a new registration with the cached registrations that it overlaps or touches.
    pub merge: Option<bool>,
    /// The permission for a miss to register more than the range of the lookup, so that later
    /// lookups in the same allocation are hits. [`Growth`] explains what this exposes to peers. All
    /// bytes of the larger entry count for [`CacheAttr::max_bytes`]. This setting has no
    /// environment variable, and its default is [`Growth::None`].
    pub growth: Option<Growth>,
    /// The ifaces with a disabled monitor. Their memory is registered uncached. Default: none.
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

    /// Returns the limits of a cache with these settings. [`Limits::default`] has the values for
    /// settings that are `None`.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let default = Limits::default();
        Limits {
            max_count: self.max_count.unwrap_or(default.max_count),
            max_bytes: self.max_bytes.unwrap_or(default.max_bytes),
            merge: self.merge.unwrap_or(default.merge),
        }
    }
}
