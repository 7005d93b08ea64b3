//! From a checked request to a registered region.

use std::sync::Arc;

use super::{
    DomainInner, MemoryRegion, MrAttr,
    inner::{MemoryOwner, RegionInner},
    prefault,
    shared::Unique,
    validate,
};
use crate::{
    Error, ErrorKind, IfaceKind, MrFlags, MrMode, Result,
    event_queue::RegionId,
    path::{PathOutcome, PathRequest},
    provider::{Backing, Features, KeyRequest, Piece, ProviderRegion, RegistrationRequest},
    registry::Owner,
};

impl DomainInner {
    /// Checks the request and makes the region that it will fill; nothing is registered yet.
    #[inline]
    pub(super) fn prepare(
        self: &Arc<Self>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        owner: Option<MemoryOwner>,
    ) -> Result<Unique<RegionInner>> {
        let id = self.worker.get().map(|_| RegionId::next());
        self.prepare_as(id, attr, flags, owner)
    }

    #[inline]
    pub(super) fn prepare_as(
        self: &Arc<Self>,
        id: Option<RegionId>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        owner: Option<MemoryOwner>,
    ) -> Result<Unique<RegionInner>> {
        self.process.check("regattr")?;
        let checked = validate::check(attr, flags, self.effective, &self.provider_attr)
            .and_then(|checked| {
                attr.base.map_or(Ok(()), |base| self.check_base(base, attr)).map(|()| checked)
            })
            .inspect_err(|error| tracing::debug!(%error, "registration refused"))?;
        let range = checked.dma_buf_range.unwrap_or_else(|| attr.ranges[0]);
        Ok(RegionInner::pending(self, attr, flags, range, owner, id))
    }

    /// Registers at once, or hands the region to the worker where an event queue is bound.
    #[inline]
    pub(super) fn submit(
        &self,
        region: Unique<RegionInner>,
        attr: &MrAttr<'_>,
    ) -> Result<MemoryRegion> {
        match self.worker.get() {
            None => self.register_now(region, attr),
            Some(worker) => {
                let region = MemoryRegion::new(region);
                worker.submit(worker.job(&region, attr)?);
                Ok(region)
            }
        }
    }

    #[inline]
    pub(super) fn register_now(
        &self,
        mut region: Unique<RegionInner>,
        attr: &MrAttr<'_>,
    ) -> Result<MemoryRegion> {
        if !tracing::enabled!(tracing::Level::DEBUG)
            && let Some(registered) =
                region.keep_if_panics(|| self.register_plain(&region, attr))?
        {
            region.complete_unshared(&registered, None);
        } else {
            let outcome = region.keep_if_panics(|| self.register_pages(&region, attr))?;
            region.complete_unshared(&outcome.region, outcome.decision);
        }
        Ok(MemoryRegion::new(region))
    }

    fn check_base(&self, base: &MemoryRegion, attr: &MrAttr<'_>) -> Result<()> {
        let refuse = |kind, remedy: &'static str| {
            Err(Error::new(kind, "regattr").context("base", base.range()).remedy(remedy))
        };
        if !std::ptr::eq(Arc::as_ptr(base.inner().domain()), self) {
            return refuse(
                ErrorKind::InvalidArgument,
                "the base must be a region of the same domain",
            );
        }
        if base.inner().registered().is_none() {
            return refuse(ErrorKind::BadState, "wait until the base is registered");
        }
        let [range] = attr.ranges else {
            return refuse(ErrorKind::TooManyRanges, "a sub-region is one range of its base");
        };
        if base.inner().offset_of(*range).is_none() {
            return Err(Error::new(ErrorKind::OutOfBounds, "regattr")
                .context("range", range)
                .context("base", base.range())
                .remedy("a sub-region lies inside one range of its base"));
        }
        if attr.access.nic_writes() && !base.access().nic_writes() {
            return Err(Error::new(ErrorKind::AccessDenied, "regattr")
                .context("access", attr.access)
                .context("base_access", base.access())
                .remedy(
                    "the base's pages are registered for reading: register it with a right that writes",
                ));
        }
        if attr.page_size != 0 {
            return refuse(
                ErrorKind::BadPageSize,
                "a sub-region inherits its base's page size: use 0",
            );
        }
        Ok(())
    }

    #[inline]
    pub(super) fn register_pages(
        &self,
        inner: &RegionInner,
        attr: &MrAttr<'_>,
    ) -> Result<PathOutcome> {
        if tracing::enabled!(tracing::Level::DEBUG) {
            self.register_traced(inner, attr)
        } else {
            self.register_decided(inner, attr)
        }
    }

    #[cold]
    fn register_traced(&self, inner: &RegionInner, attr: &MrAttr<'_>) -> Result<PathOutcome> {
        let span = tracing::debug_span!(
            "register",
            nic = %self.provider_attr.nic,
            range = %inner.range(),
            ranges = inner.ranges().len(),
            access = %attr.access,
        );
        let _entered = span.enter();
        let outcome = self.register_decided(inner, attr);
        match &outcome {
            Ok(outcome) => {
                let path = outcome.decision.as_ref().unwrap_or(&self.plain_host).path;
                tracing::debug!(%path, "registered");
            }
            Err(error) => tracing::debug!(%error, "registration refused"),
        }
        outcome
    }

    #[inline]
    pub(super) fn request<'a>(
        &'a self,
        inner: &RegionInner,
        attr: &'a MrAttr<'_>,
    ) -> RegistrationRequest<'a> {
        RegistrationRequest {
            access: attr.access,
            flags: inner.flags(),
            key: match attr.requested_key {
                Some(key) if !self.effective.contains(MrMode::PROV_KEY) => {
                    KeyRequest::Application(key)
                }
                _ => KeyRequest::Provider,
            },
            auth_key: self.auth_key(attr.auth_key),
            addressing: self.addressing(),
            page_size: attr.page_size,
            enabled: inner.starts_enabled(),
            parallel: attr.parallel.as_ref(),
        }
    }

    fn register_decided(&self, inner: &RegionInner, attr: &MrAttr<'_>) -> Result<PathOutcome> {
        match self.register_plain(inner, attr)? {
            Some(region) => Ok(PathOutcome { region, decision: None }),
            None => self.register_rare(inner, attr, self.request(inner, attr)),
        }
    }

    /// Registers one range of ordinary host memory, about which there is nothing to decide; `None`
    /// if it is anything else.
    #[inline(always)]
    fn register_plain(
        &self,
        inner: &RegionInner,
        attr: &MrAttr<'_>,
    ) -> Result<Option<ProviderRegion>> {
        if inner.parent().is_some() || attr.dma_buf.is_some() || attr.prefault.is_some() {
            return Ok(None);
        }
        let [range] = inner.ranges() else { return Ok(None) };
        if !self.is_plain_host(*range, attr, inner.flags())? {
            return Ok(None);
        }
        check_owner(inner, IfaceKind::SYSTEM)?;
        let piece =
            [Piece { range: *range, backing: Backing::Host { owned: inner.owns_memory() } }];
        // SAFETY: the memory is the caller's of an unsafe registration call, or owned by the region
        // or borrowed by the scope that is being registered; `owns_memory` says which.
        unsafe { self.provider.register(&self.request(inner, attr), &piece) }.map(Some)
    }

    /// Sub-regions, dma-bufs, several ranges, device memory.
    #[cold]
    fn register_rare(
        &self,
        inner: &RegionInner,
        attr: &MrAttr<'_>,
        registration: RegistrationRequest<'_>,
    ) -> Result<PathOutcome> {
        if let Some(parent) = inner.parent() {
            let (Some(parent_region), Some(offset)) =
                (parent.registered(), parent.offset_of(inner.range()))
            else {
                return Err(
                    Error::new(ErrorKind::BadState, "regattr").context("base", parent.range())
                );
            };
            let len = inner.range().len();
            let sub_regions = self.provider.sub_regions().ok_or_else(|| {
                self.missing(
                    Features::SUB_REGIONS,
                    "register sub-region",
                    ErrorKind::Unsupported,
                    "this provider has no key for part of a registration: register the part by itself",
                )
            })?;
            let region = sub_regions.register_sub(parent_region, &registration, offset, len)?;
            return Ok(PathOutcome { region, decision: parent.recorded_decision() });
        }
        let owner = self.resolve(inner, attr)?;
        let request = self.path_request(inner, attr, registration, owner);
        // SAFETY: as in `register_decided`.
        unsafe { self.decider.register(&request, &self.registry, &*self.provider) }
    }

    /// Finds out whose memory it is, and touches the pages where that was asked for.
    pub(super) fn resolve(&self, inner: &RegionInner, attr: &MrAttr<'_>) -> Result<Owner> {
        let ranges = inner.ranges();
        let owner = if attr.dma_buf.is_some() {
            self.claimed_owner(attr, inner.flags())?
        } else {
            let owner = self.owner(ranges, attr, inner.flags())?;
            check_owner(inner, owner.iface)?;
            owner
        };
        if let Some(prefault) = &attr.prefault
            && owner.iface == IfaceKind::SYSTEM
            && attr.dma_buf.is_none()
        {
            for range in ranges {
                prefault::prefault(*range, attr.access.nic_writes(), prefault)?;
            }
        }
        Ok(owner)
    }

    pub(super) fn path_request<'a>(
        &self,
        inner: &'a RegionInner,
        attr: &MrAttr<'a>,
        registration: RegistrationRequest<'a>,
        owner: Owner,
    ) -> PathRequest<'a> {
        self.inbound.note(&owner, attr.access);
        PathRequest {
            registration,
            ranges: inner.ranges(),
            dma_buf: attr.dma_buf.map(|buffer| (buffer.fd, buffer.offset)),
            owner,
            owned: inner.owns_memory(),
            policy: self.attr.p2p,
        }
    }
}

/// Refuses memory that belongs to another iface than its buffer names. The domain would treat
/// memory of an iface that it does not have as host memory, and a software NIC would access it.
#[inline]
fn check_owner(inner: &RegionInner, found: IfaceKind) -> Result<()> {
    match inner.owned_memory() {
        // A device's API knows host memory that is nevertheless the allocator's.
        None | Some(IfaceKind::SYSTEM) => Ok(()),
        Some(iface) if iface == found => Ok(()),
        Some(iface) => Err(Error::new(ErrorKind::InvalidArgument, "register")
            .iface(iface)
            .context("range", inner.range())
            .context("found", found)
            .remedy(
                "add the iface that allocated the buffer to the builder of the domain's `Hmem`",
            )),
    }
}
