//! Abilities that a provider's domain may have beyond its core: one small trait each.

use std::sync::Arc;

use super::{ProviderDomain, ProviderEndpoint};
use crate::{
    Access, AddressRange, Addressing, Error, ErrorKind, Iova, RawKey, RemoteKey, Result,
    counter::Counter,
    handle::{ProviderRegion, ProviderWindow},
    registration::Registration,
    window::{WindowStatus, WindowType},
};

bitflags::bitflags! {
    /// The facets of an open domain.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Features: u32 {
        /// Registers parts of regions without their pages ([`SubRegions`]).
        const SUB_REGIONS = 1 << 0;
        /// Keeps disabled regions unusable until they are enabled ([`Enabling`]).
        const ENABLING = 1 << 1;
        /// Has remote keys of more than one number ([`CompositeKeys`]).
        const COMPOSITE_KEYS = 1 << 2;
        /// Has raw keys ([`RawKeys`]).
        const RAW_KEYS = 1 << 3;
        /// Refreshes the pages of a region ([`Refresh`]).
        const REFRESH = 1 << 4;
        /// Has memory windows ([`Windows`]).
        const WINDOWS = 1 << 5;
        /// Counts accesses to regions ([`RegionCounters`]).
        const REGION_COUNTERS = 1 << 6;
        /// Binds regions to endpoints ([`EndpointBinding`]).
        const ENDPOINT_BINDING = 1 << 7;
        /// Has staging buffers ([`StagingAccess`]).
        const STAGING = 1 << 8;
        /// Has work that only calls execute ([`ManualProgress`]).
        const MANUAL_PROGRESS = 1 << 9;
    }
}

impl Features {
    /// Returns the facets that a domain has. They are read from the domain itself, so that they
    /// cannot differ from what it does.
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
        ];
        facets.into_iter().filter(|(present, _)| *present).map(|(_, feature)| feature).collect()
    }
}

/// Regions that are parts of others.
pub trait SubRegions {
    /// Registers `len` bytes from `offset` of `base` with its own key and rights, without touching
    /// pages.
    ///
    /// This call is safe, because it grants nothing beyond `base`: the caller promised the bytes
    /// and the rights of `base` to [`ProviderDomain::register`].
    ///
    /// # Errors
    /// OutOfBounds outside `base`; ZeroLength; AccessDenied for rights that let the NIC write where
    /// those of `base` do not. Otherwise as [`ProviderDomain::register`].
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion>;
}

/// Regions that are registered disabled ([`Registration::enabled`]). A provider without this facet
/// does not refuse such a registration: the region is usable at once, and only the domain waits
/// until it is enabled.
pub trait Enabling {
    /// Makes a region usable that was registered disabled.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn enable(&self, region: ProviderRegion) -> Result<()>;
}

/// Remote keys that one number over the region's length does not describe.
pub trait CompositeKeys {
    /// Returns the remote key of a region that takes more than one number (VRB-07), or that peers
    /// address otherwise than the domain's other regions. `None` stands for a region whose key is
    /// [`ProviderRegion::key`] over its length.
    ///
    /// # Errors
    /// KeyNotAvailable for a region that no peer can reach: a staged one, where the NIC does not
    /// reach staged memory.
    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>>;
}

/// Keys that peers exchange as bytes.
pub trait RawKeys {
    /// Returns the raw key of a region.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey>;

    /// Makes a peer's raw key usable in transfers of this domain.
    ///
    /// # Errors
    /// Malformed for bytes that are no raw key; OutOfResources.
    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey>;

    /// Frees a mapped key.
    ///
    /// # Errors
    /// InvalidKey for a key that this domain did not map.
    fn unmap_key(&self, key: &RemoteKey) -> Result<()>;
}

/// Regions whose pages may change while they are registered.
pub trait Refresh {
    /// Looks at the pages again: of `ranges` (addresses inside the region), or of all of it if
    /// there are none. Waits for the transfers that use the pages, through sub-regions too. Peers'
    /// accesses fail while it runs.
    ///
    /// # Errors
    /// BadAddress if pages are missing; what was promised before for other pages stays.
    fn refresh_pages(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()>;
}

/// A part of a region to which a window is bound.
#[derive(Clone, Copy, Debug)]
pub struct WindowBind {
    /// The region.
    pub region: ProviderRegion,
    /// First byte, counted from the start of the region.
    pub offset: u64,
    /// Bytes; 0 unbinds a type 1 window.
    pub len: u64,
    /// Remote rights.
    pub access: Access,
    /// The addressing for peers.
    pub addressing: Addressing,
}

/// Memory windows. Their states and the rules between them are those of [`WindowType::after`].
pub trait Windows {
    /// Returns the types that the NIC has, at least one.
    fn window_types(&self) -> &[WindowType];

    /// Allocates an unbound window.
    ///
    /// # Errors
    /// Unsupported for a type that the NIC lacks; OutOfResources.
    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow>;

    /// Binds a type 1 window, or unbinds it with length 0; the handle comes back with its new key.
    ///
    /// # Errors
    /// That of the rule that was broken; the driver's own.
    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow>;

    /// Frees a window; its key is dead.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn free_window(&self, window: ProviderWindow) -> Result<()>;

    /// Returns what the provider knows about a window.
    ///
    /// # Errors
    /// InvalidArgument for a window that is not allocated here.
    fn window_status(&self, window: ProviderWindow) -> Result<WindowStatus>;

    /// Binds a type 2 window through an endpoint, without a completion: when it returns, the key
    /// works. The bind comes after the requests that were posted to the endpoint before, where the
    /// NIC executes them in order.
    ///
    /// # Errors
    /// Unsupported where a bind always has a completion; that of the rule that was broken; the
    /// driver's own.
    fn bind_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
        bind: &WindowBind,
        tag: u8,
    ) -> Result<()> {
        let _unused = (endpoint, window, bind, tag);
        Err(Error::new(ErrorKind::Unsupported, "bind window")
            .remedy("this provider binds type 2 windows by posted requests only"))
    }

    /// Invalidates the key of a type 2 window through the endpoint that bound it, without a
    /// completion: when it returns, the key is dead and the window free.
    ///
    /// # Errors
    /// Unsupported where an invalidation always has a completion, or where the driver cannot do it
    /// safely; that of the rule that was broken; the driver's own.
    fn invalidate_window_now(
        &self,
        endpoint: &dyn ProviderEndpoint,
        window: ProviderWindow,
    ) -> Result<()> {
        let _unused = (endpoint, window);
        Err(Error::new(ErrorKind::Unsupported, "invalidate window")
            .remedy("this provider invalidates windows by posted requests only"))
    }
}

/// Counters of the accesses to a region.
pub trait RegionCounters {
    /// Counts remote writes and atomics of the region in `counter` too; a region may have several
    /// counters, each bound once.
    ///
    /// # Errors
    /// The error that the driver reported.
    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()>;
}

/// Regions that serve one endpoint (ENDPOINT mode).
pub trait EndpointBinding {
    /// Makes the region reachable through `endpoint` only.
    ///
    /// # Errors
    /// InvalidArgument for an endpoint of another domain.
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()>;
}

/// The domain's staging buffers.
pub trait StagingAccess {
    /// Returns the bytes of the buffers: 0 before the first staged region, the same ever after.
    fn staging_bytes(&self) -> u64;
}

/// Work that only calls execute: all transfers where progress is manual
/// ([`ProgressModel::Manual`](super::ProgressModel::Manual)), or only the staged ones.
pub trait ManualProgress {
    /// Executes such work; returns how many requests it ended.
    ///
    /// # Errors
    /// A dead device.
    fn progress(&self) -> Result<usize>;
}
