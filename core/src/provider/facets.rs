//! The facets of a provider's domain: one small trait for each optional ability.

use std::sync::Arc;

use super::{CompletionQueue, EndpointAttr, ProviderDomain, ProviderEndpoint};
use crate::{
    AddressRange, Addressing, Error, ErrorKind, Iova, RawKey, RemoteKey, Result,
    counter::Counter,
    handle::{ProviderRegion, ProviderWindow},
    registration::Registration,
    window::{WindowBind, WindowStatus, WindowType},
};

bitflags::bitflags! {
    /// The facets of an open domain.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// The domain registers parts of regions without pinning pages ([`SubRegions`]).
        const SUB_REGIONS = 1 << 0;
        /// The domain keeps disabled regions unusable until they are enabled ([`Enabling`]).
        const ENABLING = 1 << 1;
        /// A remote key of the domain may consist of several numbers ([`CompositeKeys`]).
        const COMPOSITE_KEYS = 1 << 2;
        /// The domain has raw keys ([`RawKeys`]).
        const RAW_KEYS = 1 << 3;
        /// The domain refreshes the pages of a region ([`Refresh`]).
        const REFRESH = 1 << 4;
        /// The domain has memory windows ([`Windows`]).
        const WINDOWS = 1 << 5;
        /// The domain counts accesses to regions ([`RegionCounters`]).
        const REGION_COUNTERS = 1 << 6;
        /// The domain binds regions to endpoints ([`EndpointBinding`]).
        const ENDPOINT_BINDING = 1 << 7;
        /// The domain has staging buffers ([`StagingAccess`]).
        const STAGING = 1 << 8;
        /// The domain has requests that proceed only during the application's calls
        /// ([`ManualProgress`]).
        const MANUAL_PROGRESS = 1 << 9;
        /// The domain opens completion queues and endpoints ([`Transport`]).
        const TRANSPORT = 1 << 10;
        /// The domain knows the state of its NIC ([`NicLife`](super::NicLife)).
        const NIC_LIFE = 1 << 11;
        /// The domain finds revoked dma-bufs ([`Revocations`](super::Revocations)).
        const REVOCATIONS = 1 << 12;
    }
}

impl Features {
    /// Returns the facets of a domain.
    #[must_use]
    pub fn of(domain: &dyn ProviderDomain) -> Self {
        let facets = [
            (domain.sub_regions().is_some(), Self::SUB_REGIONS),
            (domain.enabling().is_some(), Self::ENABLING),
            (domain.composite_keys().is_some(), Self::COMPOSITE_KEYS),
            (domain.raw_keys().is_some(), Self::RAW_KEYS),
            (domain.refresh().is_some(), Self::REFRESH),
            (domain.windows().is_some(), Self::WINDOWS),
            (domain.region_counters().is_some(), Self::REGION_COUNTERS),
            (domain.endpoint_binding().is_some(), Self::ENDPOINT_BINDING),
            (domain.staging().is_some(), Self::STAGING),
            (domain.manual_progress().is_some(), Self::MANUAL_PROGRESS),
            (domain.transport().is_some(), Self::TRANSPORT),
            (domain.nic_life().is_some(), Self::NIC_LIFE),
            (domain.revocations().is_some(), Self::REVOCATIONS),
        ];
        facets.into_iter().filter(|(present, _)| *present).map(|(_, feature)| feature).collect()
    }
}

/// The facet for transfers through endpoints of the domain.
///
/// A provider without it registers memory for requests that other code posts, on queue pairs of its
/// own for example.
pub trait Transport {
    /// Opens a completion queue with room for `depth` requests, which are counted as for
    /// [`EndpointAttr::depth`]. A depth of 0 counts as 1.
    ///
    /// # Errors
    /// - OutOfResources if the driver cannot create another queue.
    /// - Otherwise the error that the driver reported.
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>>;

    /// Opens an endpoint.
    ///
    /// # Errors
    /// - OutOfResources if the driver cannot create another endpoint.
    /// - InvalidArgument for queues that another domain opened.
    /// - Unsupported for an authorization key, if the provider does not support these keys.
    /// - Otherwise the error that the driver reported.
    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>>;
}

/// The facet for sub-regions: regions that are parts of other regions.
pub trait SubRegions {
    /// Registers `len` bytes from `offset` of `base` as a region with its own key and rights.
    ///
    /// The call pins no pages. The call is safe, because the new region grants nothing beyond
    /// `base`: the caller of [`ProviderDomain::register`] guaranteed the memory and the rights of
    /// `base`.
    ///
    /// # Errors
    /// - OutOfBounds for bytes outside `base`.
    /// - ZeroLength if `len` is 0.
    /// - AccessDenied if the new rights let the NIC write
    ///   ([`Access::nic_writes`](crate::Access::nic_writes)) and those of `base` do not.
    /// - The errors of [`ProviderDomain::register`].
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion>;
}

/// The facet for regions that are disabled at first ([`Registration::enabled`]).
///
/// A provider without this facet accepts such registrations, but its regions are usable at once.
pub trait Enabling {
    /// Enables a region that was registered disabled.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn enable(&self, region: ProviderRegion) -> Result<()>;
}

/// The facet for remote keys that one number cannot describe.
pub trait CompositeKeys {
    /// Returns the remote key of a region if the key consists of several numbers, or if its
    /// addressing differs from that of the domain's other regions. `None` means that the single
    /// number [`ProviderRegion::key`] is the key of the whole region.
    ///
    /// # Errors
    /// KeyNotAvailable for a staged region, if peers cannot access staged memory.
    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>>;
}

/// The facet for raw keys, which peers exchange as bytes.
pub trait RawKeys {
    /// Returns the raw key of a region.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey>;

    /// Maps a peer's raw key, so that transfers of this domain can use it.
    ///
    /// # Errors
    /// - Malformed for bytes that are not a raw key.
    /// - OutOfResources if no more keys can be mapped.
    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey>;

    /// Unmaps a key that [`map_raw`](Self::map_raw) returned.
    ///
    /// # Errors
    /// InvalidKey for a key that this domain did not map.
    fn unmap_key(&self, key: &RemoteKey) -> Result<()>;
}

/// The facet for regions whose pages may change while the region is registered.
pub trait Refresh {
    /// Makes the NIC use the current pages of `ranges`, which must lie in the region. An empty list
    /// means the whole region.
    ///
    /// The call waits for transfers that use the pages, also through sub-regions. Accesses by peers
    /// during the call fail.
    ///
    /// # Errors
    /// BadAddress if a page is not mapped. Other pages of the region stay usable.
    fn refresh_pages(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()>;
}

/// The facet for memory windows. [`WindowType::after`] defines the states of a window.
pub trait Windows {
    /// Returns the window types that the NIC supports, at least one.
    fn window_types(&self) -> &[WindowType];

    /// Returns true if the NIC confines the peers of a window to the bytes of the window.
    ///
    /// If the result is false, a peer with the window's key reaches the whole region, with the
    /// rights of the window. [`MemoryRegion::grant`](crate::MemoryRegion::grant) then prefers
    /// sub-regions.
    fn enforces_bounds(&self) -> bool;

    /// Allocates an unbound window.
    ///
    /// # Errors
    /// - Unsupported for a type that the NIC does not support.
    /// - OutOfResources if the NIC has no more windows.
    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow>;

    /// Binds a type 1 window, or unbinds it if `bind.len` is 0. Returns a handle of the same window
    /// with its new key.
    ///
    /// # Errors
    /// - The error of a [`WindowRule`](super::WindowRule) that the operation breaks.
    /// - The error that the driver reported.
    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow>;

    /// Frees a window. Its key becomes invalid.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn free_window(&self, window: ProviderWindow) -> Result<()>;

    /// Returns the current state and key of a window.
    ///
    /// # Errors
    /// InvalidArgument for a window that this domain did not allocate.
    fn window_status(&self, window: ProviderWindow) -> Result<WindowStatus>;

    /// Binds a type 2 window through an endpoint. The bind produces no completion.
    ///
    /// When the call returns, the key works. If the NIC executes requests in order, the bind takes
    /// effect after the requests that were posted to the endpoint earlier.
    ///
    /// # Errors
    /// - Unsupported if each bind of this provider produces a completion.
    /// - The error of a [`WindowRule`](super::WindowRule) that the operation breaks.
    /// - The error that the driver reported.
    fn bind_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
        bind: &WindowBind,
        tag: u8,
    ) -> Result<()> {
        let _unused = (endpoint, window, bind, tag);
        Err(Error::new(ErrorKind::Unsupported, "bind window")
            .remedy("bind type 2 windows by posted requests: this provider has no call for it"))
    }

    /// Invalidates the key of a type 2 window through the endpoint that bound the window.
    ///
    /// The call produces no completion. When it returns, the key is invalid and the window is free.
    ///
    /// # Errors
    /// - Unsupported if the provider invalidates only by posted requests, or if its driver cannot
    ///   invalidate safely in this way.
    /// - The error of a [`WindowRule`](super::WindowRule) that the operation breaks.
    /// - The error that the driver reported.
    fn invalidate_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
    ) -> Result<()> {
        let _unused = (endpoint, window);
        Err(Error::new(ErrorKind::Unsupported, "invalidate window")
            .remedy("invalidate windows by posted requests: this provider has no call for it"))
    }
}

/// The facet for counters of accesses to a region.
pub trait RegionCounters {
    /// Binds a counter, which then counts remote writes and atomics that change the region. A
    /// region may have several counters. The core binds a counter to a region at most once.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()>;
}

/// The facet for regions that must be bound to an endpoint (ENDPOINT mode).
pub trait EndpointBinding {
    /// Binds a region to an endpoint. Peers then reach the region through this endpoint only.
    ///
    /// # Errors
    /// InvalidArgument for an endpoint of another domain.
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()>;
}

/// The facet of a domain with staging buffers.
pub trait StagingAccess {
    /// Returns the size of all staging buffers in bytes: 0 before the first staged region, constant
    /// after that.
    fn staging_bytes(&self) -> u64;
}

/// The facet of a domain with requests that proceed only during the application's calls of
/// [`progress`](Self::progress) and [`CompletionQueue::read`]. With
/// [`ProgressModel::Manual`](super::ProgressModel::Manual) these are all requests, otherwise only
/// those with staged memory.
pub trait ManualProgress {
    /// Executes posted requests as far as possible, without waiting. Returns the number of requests
    /// that ended.
    ///
    /// # Errors
    /// The driver's error if the device failed.
    fn progress(&self) -> Result<usize>;
}
