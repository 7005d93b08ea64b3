//! Memory regions, the results of registrations.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use crate::{
    Access, AddressRange, Addressing, BindFlags, Decision, DeviceId, Error, ErrorKind, IfaceKind,
    Iova, LocalKey, MrFlags, MrMode, RailKey, RailKeys, RawKey, Rejected, RemoteKey, Result,
    counter::Counter,
    domain::region_state::{RegionInner, RegionState},
    event_queue::RegionId,
    provider::{self, Features, ProviderDomain, ProviderRegion, Revocations, revoked},
};

/// A registered memory region (`fid_mr`).
///
/// Dropping the value deregisters the region. If the region has sub-regions, windows or grants, it
/// is deregistered when the last of them is dropped. [`MemoryRegion::close`] also reports errors.
///
/// Dropping a pending region cancels its asynchronous registration. If the registration is in
/// progress, the drop waits for its end. Only a drop inside that registration, on the domain's own
/// thread, does not wait: then the region is deregistered when its registration has ended.
pub struct MemoryRegion {
    pub(super) inner: Arc<RegionInner>,
}

impl MemoryRegion {
    /// Returns the first range. Most regions have only one.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.inner.range
    }

    /// Returns all ranges, in the order of the request.
    #[must_use]
    pub fn ranges(&self) -> &[AddressRange] {
        self.inner.ranges()
    }

    /// Returns the length of all ranges together, in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.ranges().iter().map(|range| range.len()).sum()
    }

    /// Returns false: a region has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the access rights with which the region was registered. Its keys grant these rights.
    #[must_use]
    pub fn access(&self) -> Access {
        self.inner.access
    }

    /// Returns the state of the region, for example [`RegionState::Enabled`].
    #[must_use]
    pub fn state(&self) -> RegionState {
        match self.revocations() {
            Some((revocations, region)) if revocations.is_revoked(region) => RegionState::Revoked,
            _ => self.inner.state(),
        }
    }

    /// Returns the facet for revoked memory, and the registered region. Returns `None` if the
    /// region is not registered, and in a forked child.
    fn revocations(&self) -> Option<(&dyn Revocations, ProviderRegion)> {
        let registered = matches!(self.inner.state(), RegionState::Disabled | RegionState::Enabled);
        let domain = &self.inner.domain;
        let facet = domain.provider.revocations().filter(|_| registered);
        facet.filter(|_| domain.process.is_current()).zip(self.inner.registered())
    }

    /// Checks that the memory of the region was not revoked.
    ///
    /// The exporter of a dma-buf can revoke it, for example when a device is reset. Most drivers of
    /// NICs report nothing then: only the accesses of the NIC fail. So a domain that is not
    /// notified lets the NIC read one byte of each dma-buf of the region, between two endpoints of
    /// its own. If the memory was revoked, some drivers report
    /// [`NicEvent::EndpointFailed`](provider::NicEvent::EndpointFailed) for one of these endpoints.
    /// Call this after a request with the region failed, or after a peer reported that its key is
    /// refused.
    ///
    /// If the memory was revoked, the state is [`RegionState::Revoked`] from then on, and the
    /// registration cache of the domain drops its regions of this memory.
    ///
    /// ```
    /// use hmem_core::{Domain, ErrorKind, Memory, Region, RegionState, Result};
    ///
    /// /// Closes a region whose memory was revoked.
    /// fn close_if_revoked<M: Memory>(region: Region<M>) -> Result<Option<Region<M>>> {
    ///     match region.check() {
    ///         Ok(()) => Ok(Some(region)),
    ///         Err(_) if region.state() == RegionState::Revoked => {
    ///             region.close()?;
    ///             Ok(None)
    ///         }
    ///         Err(error) => Err(error),
    ///     }
    /// }
    /// ```
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`] if the memory was revoked. The context value `cause` says so.
    /// - [`ErrorKind::BadState`] before the registration completed, or after it failed, and in a
    ///   forked child.
    /// - [`ErrorKind::Unsupported`] if the provider cannot find revocations
    ///   ([`Features::REVOCATIONS`]).
    /// - The reason why the check could not run, such as a lost device.
    pub fn check(&self) -> Result<()> {
        const OPERATION: &str = "check region";
        let domain = &self.inner.domain;
        domain.process.check(OPERATION)?;
        self.inner.registration(OPERATION)?;
        let Some((revocations, region)) = self.revocations() else {
            let remedy = "watch the exporter by other means: this provider finds no revocations";
            let kind = ErrorKind::Unsupported;
            return Err(domain.missing(Features::REVOCATIONS, OPERATION, kind, remedy));
        };
        match revocations.check_revoked(region)? {
            false => Ok(()),
            true => Err(revoked(ErrorKind::Unavailable, OPERATION)
                .provider(domain.provider_attr.nic.to_string())
                .context("range", self.range())),
        }
    }

    /// Returns the region's identifier in events. Returns `None` for a region that was registered
    /// synchronously.
    #[must_use]
    pub fn id(&self) -> Option<RegionId> {
        self.inner.id()
    }

    /// Returns the requested page size in bytes, or 0 for the provider's choice. A sub-region has
    /// the page size of its base.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.inner.page_size()
    }

    /// Returns the iface and the device that own the memory.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    pub fn iface(&self) -> Result<(IfaceKind, Option<DeviceId>)> {
        let decision = self.decision()?;
        Ok((decision.iface, decision.device))
    }

    /// Returns the path by which the NIC reaches the memory, and the reasons for it.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    pub fn decision(&self) -> Result<&Arc<Decision>> {
        let registration = self.inner.registration("decision")?;
        Ok(registration.decision.as_ref().unwrap_or(&self.inner.domain.plain_host))
    }

    /// Returns the provider's own domain, which can be downcast like
    /// [`Domain::provider_domain`](super::Domain::provider_domain).
    #[must_use]
    pub fn provider_domain(&self) -> &dyn ProviderDomain {
        &*self.inner.domain.provider
    }

    /// Returns the provider's own handle, for functions that only this provider has.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    pub fn provider_region(&self) -> Result<ProviderRegion> {
        Ok(self.inner.registration("provider region")?.region)
    }

    /// Returns the local descriptor (`fi_mr_desc`).
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] before the registration completed, or after it failed.
    #[inline]
    pub fn desc(&self) -> Result<LocalKey> {
        Ok(self.inner.registration("desc")?.region.local)
    }

    /// Returns the remote key (`fi_mr_key`).
    ///
    /// # Errors
    /// [`ErrorKind::KeyNotAvailable`]:
    ///
    /// - before the registration completed, and after it failed;
    /// - in RAW mode, which has [`MemoryRegion::raw_key`] instead;
    /// - for a staged region that peers cannot reach, because the NIC cannot copy for them.
    pub fn key(&self) -> Result<RemoteKey> {
        let unavailable =
            |why: &'static str| Error::new(ErrorKind::KeyNotAvailable, "key").remedy(why);
        let Some(region) = self.inner.registered() else {
            return Err(unavailable(
                "wait for the event of the region: its registration has not completed",
            ));
        };
        if self.inner.domain.effective.contains(MrMode::RAW) {
            return Err(unavailable("in RAW mode use raw_attr here and map_raw at the peer"));
        }
        self.remote_key(region)
    }

    fn remote_key(&self, region: ProviderRegion) -> Result<RemoteKey> {
        let domain = &self.inner.domain;
        provider::remote_key(&*domain.provider, region, domain.addressing(), self.ranges())
    }

    /// Returns the address at which peers access the first byte: the virtual address in VIRT_ADDR
    /// mode, and 0 otherwise. Settings of a provider may choose another address
    /// ([`Request::extension`](super::Request::extension)).
    #[must_use]
    pub fn base_addr(&self) -> Iova {
        let key = self.inner.registered().map(|region| self.remote_key(region));
        match (key, self.inner.domain.addressing()) {
            (Some(Ok(key)), _) => key.base(),
            (_, Addressing::ZeroBased) => Iova(0),
            (_, Addressing::Virtual) => Iova(self.inner.range.start().0),
        }
    }

    /// Writes the raw key to `buffer` (`fi_mr_raw_attr`). Returns the base address and the key's
    /// length.
    ///
    /// The domain need not be in RAW mode.
    ///
    /// # Errors
    /// - [`ErrorKind::TooSmall`] if the key does not fit. The context value `needed` is its length.
    /// - [`ErrorKind::KeyNotAvailable`] before the registration completed, or after it failed.
    /// - [`ErrorKind::Unsupported`] if the provider has no raw keys.
    pub fn raw_attr(&self, buffer: &mut [u8]) -> Result<(Iova, usize)> {
        let raw = self.raw_key()?;
        let Some(out) = buffer.get_mut(..raw.0.len()) else {
            return Err(Error::new(ErrorKind::TooSmall, "raw_attr")
                .context("given", buffer.len())
                .context("needed", raw.0.len())
                .remedy("pass a buffer of the needed size (ProviderAttr::raw_key_size)"));
        };
        out.copy_from_slice(&raw.0);
        Ok((self.base_addr(), raw.0.len()))
    }

    /// Returns the raw key, which a peer maps by [`Domain::map_raw`](super::Domain::map_raw).
    ///
    /// # Errors
    /// - [`ErrorKind::KeyNotAvailable`] before the registration completed, or after it failed.
    /// - [`ErrorKind::Unsupported`] if the provider has no raw keys.
    pub fn raw_key(&self) -> Result<RawKey> {
        let region = self.inner.registered().ok_or_else(|| {
            Error::new(ErrorKind::KeyNotAvailable, "raw_attr")
                .remedy("wait for the event of the region: its registration has not completed")
        })?;
        self.inner.domain.raw_keys("raw_attr")?.raw_key(region)
    }

    /// Binds a counter, which then counts the remote writes and atomics that change the region
    /// (`fi_mr_bind` with a counter).
    ///
    /// A region may have several counters, each bound by a call of its own. The region cannot be
    /// closed before all its counters are closed.
    ///
    /// # Errors
    /// - [`ErrorKind::NoSys`] if the provider does not count accesses.
    /// - [`ErrorKind::BadFlags`] unless `flags` is REMOTE_WRITE.
    /// - [`ErrorKind::BadState`] before the registration completed or after it failed, for a
    ///   counter that is bound already, and for a region that started disabled and is enabled now.
    ///   In RMA_EVENT mode also for a region without the RMA_EVENT flag.
    /// - The driver's own error.
    pub fn bind_counter(&self, counter: &Arc<Counter>, flags: BindFlags) -> Result<()> {
        let domain = &self.inner.domain;
        let refuse = |kind, why: &'static str| Err(Error::new(kind, "bind counter").remedy(why));
        let counters = domain.provider.region_counters().ok_or_else(|| {
            domain.missing(
                Features::REGION_COUNTERS,
                "bind counter",
                ErrorKind::NoSys,
                "this provider does not count accesses to a region",
            )
        })?;
        if flags != BindFlags::REMOTE_WRITE {
            let remedy = "bind a counter with REMOTE_WRITE and nothing else";
            return refuse(ErrorKind::BadFlags, remedy);
        }
        let registration = self.inner.registration("bind counter")?;
        if domain.effective.contains(MrMode::RMA_EVENT)
            && !self.inner.flags.contains(MrFlags::RMA_EVENT)
        {
            let remedy = "in RMA_EVENT mode register with the RMA_EVENT flag";
            return refuse(ErrorKind::BadState, remedy);
        }
        if !domain.starts_enabled(self.inner.flags) && self.state() != RegionState::Disabled {
            return refuse(ErrorKind::BadState, "bind before enable (RMA_EVENT, ENDPOINT)");
        }
        let mut bound = self.inner.bindings().counters.lock();
        if bound.iter().any(|bound| Arc::ptr_eq(bound, counter)) {
            return refuse(ErrorKind::BadState, "bind each counter once: this one is bound");
        }
        counters.bind_counter(registration.region, counter)?;
        bound.push(Arc::clone(counter));
        Ok(())
    }

    /// Makes a disabled region usable (`fi_mr_enable`).
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the region is not disabled, and in ENDPOINT mode if it is not
    ///   bound to an endpoint.
    /// - The driver's own error. The region stays disabled.
    pub fn enable(&self) -> Result<()> {
        let registration = self.inner.registration("enable")?;
        if self.state() != RegionState::Disabled {
            return Err(Error::new(ErrorKind::BadState, "enable")
                .context("state", format_args!("{:?}", self.state()))
                .remedy(
                    "enable a region once, and only if it was created disabled (RMA_EVENT, \
                     ENDPOINT)",
                ));
        }
        let endpoint_mode = self.inner.domain.effective.contains(MrMode::ENDPOINT);
        if endpoint_mode && !*self.inner.bindings().endpoint.lock() {
            return Err(Error::new(ErrorKind::BadState, "enable")
                .remedy("bind the region to an endpoint first: the domain is in ENDPOINT mode"));
        }
        // Without the facet, the provider's regions are usable as soon as they are registered.
        if let Some(enabling) = self.inner.domain.provider.enabling() {
            enabling.enable(registration.region)?;
        }
        self.inner.state.store(RegionState::Enabled as u8, Ordering::Release);
        Ok(())
    }

    /// Notifies the provider that the pages of `ranges` changed (`fi_mr_refresh`). An empty list
    /// means the whole region.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] before the registration completed, or after it failed.
    /// - [`ErrorKind::OutOfBounds`] for a range that is not inside one range of the region.
    /// - [`ErrorKind::BadAddress`] if pages are missing.
    /// - [`ErrorKind::NoSys`] if the provider pins the pages of its regions.
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
        let refresh = domain.provider.refresh().ok_or_else(|| {
            domain.missing(
                Features::REFRESH,
                "refresh",
                ErrorKind::NoSys,
                "regions of this provider keep their pages: close the region and register again",
            )
        })?;
        refresh.refresh_pages(registration.region, ranges)
    }

    /// Deregisters the region (`fi_close`).
    ///
    /// After the call, the NIC does not access the memory, and the keys are invalid. A pending
    /// asynchronous registration is cancelled, and its event has the error [`ErrorKind::Canceled`].
    /// If the registration is in progress, the call waits for its end.
    ///
    /// # Errors
    /// - [`ErrorKind::Busy`] while the region has a sub-region, a bound window, a grant or an open
    ///   counter.
    /// - The driver's own error.
    ///
    /// The error returns the region, which still works.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        match self.inner.close() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }
}

/// Returns the key of each region, with the NIC that accepts it. The regions are those of one
/// memory on different NICs.
pub(super) fn rail_keys<'a>(
    regions: impl IntoIterator<Item = &'a MemoryRegion>,
) -> Result<RailKeys> {
    let rail = |region: &MemoryRegion| {
        let nic = region.inner.domain.provider_attr.nic.clone();
        Ok(RailKey::new(nic, region.key()?))
    };
    RailKeys::new(regions.into_iter().map(rail).collect::<Result<_>>()?)
}

/// Closes the regions of a list. Regions that could not be closed stay in the list. Returns the
/// first error.
pub(super) fn close_each(regions: &mut Vec<MemoryRegion>) -> Result<()> {
    let mut first = Ok(());
    regions.retain(|region| match region.inner.close() {
        Ok(()) => {
            // Another thread that is dropping a sub-region may hold the region for a moment. The
            // memory is released now.
            drop(region.inner.release());
            false
        }
        Err(error) => {
            if first.is_ok() {
                first = Err(error);
            }
            true
        }
    });
    first.map_err(|error: Error| error.context("left registered", regions.len()))
}

impl Drop for MemoryRegion {
    #[inline]
    fn drop(&mut self) {
        self.inner.abandon();
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
