//! Memory regions: what a registration hands out.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use crate::{
    Access, AddressRange, BindFlags, Decision, DeviceId, Error, ErrorKind, IfaceKind, Iova,
    LocalKey, MrFlags, MrMode, RawKey, Rejected, RemoteKey, Result,
    counter::Counter,
    domain::region_state::{RegionInner, RegionState},
    event_queue::RegionId,
    provider::{Features, ProviderRegion},
};

/// A registered memory region (`fid_mr`).
///
/// Dropping it deregisters, unless a sub-region or a window still needs it: then the last of them
/// does. [`MemoryRegion::close`] does the same and says what went wrong.
pub struct MemoryRegion {
    inner: Arc<RegionInner>,
}

impl MemoryRegion {
    #[inline]
    pub(super) fn new(inner: Arc<RegionInner>) -> Self {
        Self { inner }
    }

    #[inline]
    pub(super) fn inner(&self) -> &Arc<RegionInner> {
        &self.inner
    }

    /// The first (for most regions, the only) range.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.inner.range
    }

    /// All ranges, in the order given.
    #[must_use]
    pub fn ranges(&self) -> &[AddressRange] {
        self.inner.ranges()
    }

    /// Bytes in all ranges.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.ranges().iter().map(|range| range.len()).sum()
    }

    /// Never: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The rights that its own keys grant.
    #[must_use]
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Returns the state.
    #[must_use]
    pub fn state(&self) -> RegionState {
        self.inner.state()
    }

    /// Its name in events, for regions registered asynchronously.
    #[must_use]
    pub fn id(&self) -> Option<RegionId> {
        self.inner.id()
    }

    /// The page size asked for, in bytes; a sub-region's is its base's. 0: the provider's choice.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.inner.page_size()
    }

    /// The iface and device that the memory was found to belong to.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed.
    pub fn iface(&self) -> Result<(IfaceKind, Option<DeviceId>)> {
        let decision = self.decision()?;
        Ok((decision.iface, decision.device))
    }

    /// Returns the path by which the NIC reaches the memory, with its reasons.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed.
    pub fn decision(&self) -> Result<&Arc<Decision>> {
        let registration = self.inner.registration("decision")?;
        Ok(registration.decision.as_ref().unwrap_or(&self.inner.domain.plain_host))
    }

    /// The provider's own handle, for what only that provider has.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    pub fn provider_region(&self) -> Result<ProviderRegion> {
        Ok(self.inner.registration("provider region")?.region)
    }

    /// The local descriptor (`fi_mr_desc`).
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    #[inline]
    pub fn desc(&self) -> Result<LocalKey> {
        Ok(self.inner.registration("desc")?.region.local)
    }

    /// The remote key (`fi_mr_key`).
    ///
    /// # Errors
    /// [`ErrorKind::KeyNotAvailable`] before the registration completed, after it failed, in RAW
    /// mode, and for a staged region of a NIC that needs this side's help to reach it: no peer
    /// can.
    pub fn key(&self) -> Result<RemoteKey> {
        let unavailable =
            |why: &'static str| Error::new(ErrorKind::KeyNotAvailable, "key").remedy(why);
        let Some(region) = self.inner.registered() else {
            return Err(unavailable("the registration has not completed: wait for its event"));
        };
        if self.inner.domain.effective().contains(MrMode::RAW) {
            return Err(unavailable("in RAW mode use raw_attr here and map_raw at the peer"));
        }
        let single = || {
            RemoteKey::new(self.inner.domain.addressing(), self.base_addr(), self.len(), region.key)
        };
        let composite = match self.inner.domain.provider().composite_keys() {
            Some(keys) => keys.remote_key(region)?,
            None => None,
        };
        Ok(composite.unwrap_or_else(single))
    }

    /// Returns the address of the first byte for peers: 0, or the virtual address in VIRT_ADDR
    /// mode.
    #[must_use]
    pub fn base_addr(&self) -> Iova {
        match self.inner.domain.addressing() {
            crate::Addressing::ZeroBased => Iova(0),
            crate::Addressing::Virtual => Iova(self.inner.range.start().0),
        }
    }

    /// The raw key (`fi_mr_raw_attr`): writes it to `buffer` and returns the base address and the
    /// key's length.
    ///
    /// Works in every mode.
    ///
    /// # Errors
    /// [`ErrorKind::TooSmall`] whose context `needed` is the size; [`ErrorKind::KeyNotAvailable`]
    /// before the registration completed.
    pub fn raw_attr(&self, buffer: &mut [u8]) -> Result<(Iova, usize)> {
        let raw = self.raw_key()?;
        let Some(out) = buffer.get_mut(..raw.0.len()) else {
            return Err(Error::new(ErrorKind::TooSmall, "raw_attr")
                .context("given", buffer.len())
                .context("needed", raw.0.len())
                .remedy("give a buffer of the needed size (ProviderAttr::raw_key_size)"));
        };
        out.copy_from_slice(&raw.0);
        Ok((self.base_addr(), raw.0.len()))
    }

    /// The raw key by value.
    ///
    /// # Errors
    /// [`ErrorKind::KeyNotAvailable`] before the registration completed.
    pub fn raw_key(&self) -> Result<RawKey> {
        let region = self.inner.registered().ok_or_else(|| {
            Error::new(ErrorKind::KeyNotAvailable, "raw_attr")
                .remedy("the registration has not completed: wait for its event")
        })?;
        self.inner.domain.raw_keys("raw_attr")?.raw_key(region)
    }

    /// Binds a counter, which counts each remote write and atomic of the region once
    /// (`fi_mr_bind` with a counter).
    ///
    /// Several counters may be bound, one call each. The region closes once all of them are closed.
    ///
    /// # Errors
    /// [`ErrorKind::NoSys`] where the provider cannot; [`ErrorKind::BadFlags`] unless `flags` is
    /// REMOTE_WRITE; [`ErrorKind::BadState`] in RMA_EVENT mode for a region without the
    /// RMA_EVENT flag, for a region that was created disabled and is enabled, and where this
    /// counter is bound already.
    pub fn bind_counter(&self, counter: &Arc<Counter>, flags: BindFlags) -> Result<()> {
        let domain = &self.inner.domain;
        let refuse = |kind, why: &'static str| Err(Error::new(kind, "bind counter").remedy(why));
        let counters = domain.provider().region_counters().ok_or_else(|| {
            domain.missing(
                Features::REGION_COUNTERS,
                "bind counter",
                ErrorKind::NoSys,
                "this provider does not count accesses to a region",
            )
        })?;
        if flags != BindFlags::REMOTE_WRITE {
            return refuse(
                ErrorKind::BadFlags,
                "bind a counter with REMOTE_WRITE and nothing else",
            );
        }
        let registration = self.inner.registration("bind counter")?;
        if domain.effective().contains(MrMode::RMA_EVENT)
            && !self.inner.flags.contains(MrFlags::RMA_EVENT)
        {
            return refuse(
                ErrorKind::BadState,
                "in RMA_EVENT mode register with the RMA_EVENT flag",
            );
        }
        if !domain.starts_enabled(self.inner.flags) && self.state() != RegionState::Disabled {
            return refuse(ErrorKind::BadState, "bind before enable (RMA_EVENT, ENDPOINT)");
        }
        let mut bound = self.inner.bindings().counters.lock();
        if bound.iter().any(|bound| Arc::ptr_eq(bound, counter)) {
            return refuse(ErrorKind::BadState, "this counter is bound already: bind it once");
        }
        counters.bind_counter(registration.region, counter)?;
        bound.push(Arc::clone(counter));
        Ok(())
    }

    /// Makes a disabled region usable (`fi_mr_enable`).
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] if it is not disabled, or in ENDPOINT mode without an endpoint
    /// bound.
    pub fn enable(&self) -> Result<()> {
        let registration = self.inner.registration("enable")?;
        if self.state() != RegionState::Disabled {
            return Err(Error::new(ErrorKind::BadState, "enable")
                .context("state", format_args!("{:?}", self.state()))
                .remedy("only regions created disabled (RMA_EVENT, ENDPOINT) are enabled, once"));
        }
        let endpoint_mode = self.inner.domain.effective().contains(MrMode::ENDPOINT);
        if endpoint_mode && !*self.inner.bindings().endpoint.lock() {
            return Err(Error::new(ErrorKind::BadState, "enable")
                .remedy("in ENDPOINT mode bind the region to an endpoint first"));
        }
        // Without the facet, the region has been usable since it was registered.
        if let Some(enabling) = self.inner.domain.provider().enabling() {
            enabling.enable(registration.region)?;
        }
        self.inner.state.store(RegionState::Enabled as u8, Ordering::Release);
        Ok(())
    }

    /// Tells the provider that pages changed (`fi_mr_refresh`): in `ranges`, or anywhere if there
    /// are none.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] for a range outside the region; [`ErrorKind::BadAddress`] where
    /// pages are missing; [`ErrorKind::NoSys`] where the provider cannot.
    pub fn refresh(&self, ranges: &[AddressRange]) -> Result<()> {
        let registration = self.inner.registration("refresh")?;
        for range in ranges {
            if self.inner.offset_of(*range).is_none() {
                return Err(Error::new(ErrorKind::OutOfBounds, "refresh")
                    .context("range", range)
                    .context("region", self.range())
                    .remedy("refresh ranges inside the region"));
            }
        }
        let domain = &self.inner.domain;
        let refresh = domain.provider().refresh().ok_or_else(|| {
            domain.missing(
                Features::REFRESH,
                "refresh",
                ErrorKind::NoSys,
                "regions of this provider keep their pages: close the region and register again",
            )
        })?;
        refresh.refresh_pages(registration.region, ranges)
    }

    /// Closes the region (`fi_close`): after it returns nothing touches the memory and the keys are
    /// dead.
    ///
    /// A registration still pending is given up; one that the worker is busy with is waited for.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] as long as a sub-region, a window or an open counter is bound to it;
    /// what the driver reported otherwise. The region comes back, still working.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        match self.inner.close() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("ranges", &self.ranges())
            .field("access", &self.access())
            .field("state", &self.state())
            .field("decision", &self.decision().ok().map(|decision| decision.path))
            .finish_non_exhaustive()
    }
}
