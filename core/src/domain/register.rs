//! Registration, from the request to the provider's handle.
//!
//! All registrations call [`register_on_nics`]: synchronous, asynchronous and cached registrations,
//! sub-regions, and registrations with several NICs.

#![allow(unsafe_code, reason = "calls the provider, with memory that the caller of `reg` keeps")]

use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    DomainInner,
    attr::{DmaBufAttr, MrAttr},
    owner::Allocations,
    prefault,
    region::MemoryRegion,
    region_state::{Asynchronous, Dependent, KeepAlive, Rare, RegionInner},
    validate::{self, Ranges},
};
use crate::{
    Access, AddressRange, Allocation, Error, ErrorKind, IfaceKind, MrFlags, MrMode, Result,
    event_queue::RegionId,
    path::{PathRegistration, Target},
    provider::{Backing, Features, Piece},
    registration::{KeyRequest, Memory, Registration},
    registry::{AddressOwner, Registry},
};

/// A guard that leaks the memory if its registration panics, because the NIC may have registered
/// the memory.
pub(super) struct LeakOnPanic<'a>(pub(super) &'a KeepAlive);

impl Drop for LeakOnPanic<'_> {
    fn drop(&mut self) {
        std::mem::forget(self.0.clone());
    }
}

impl DomainInner {
    /// Registers memory during the call, or queues a job for the domain's worker if the domain is
    /// bound to an event queue.
    #[inline]
    pub(super) fn register(
        self: &Arc<Self>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        keep: KeepAlive,
    ) -> Result<MemoryRegion> {
        match self.worker.get() {
            None => self.register_now(attr, flags, keep, None),
            Some(worker) => {
                let (region, job) = worker.job(self, attr, flags, keep)?;
                worker.submit(job);
                Ok(region)
            }
        }
    }

    /// Registers memory during the call. `owner` is the owner of the memory, if the caller has
    /// resolved it already.
    #[inline]
    pub(super) fn register_now(
        self: &Arc<Self>,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        keep: KeepAlive,
        owner: Option<&AddressOwner>,
    ) -> Result<MemoryRegion> {
        let ranges = self.check(attr, flags)?;
        let owned = keep.iface();
        let leak = LeakOnPanic(&keep);
        // The region is created as soon as the provider returns, so that an error or a panic after
        // that closes it.
        let mut region = None;
        let registered =
            register_on_nics(&[self], &ranges, attr, flags, owned, owner, &mut |done| {
                let made = new_region(self, &ranges, attr, flags, &keep, Ok(done));
                region = Some(MemoryRegion::new(made));
            });
        std::mem::forget(leak);
        registered?;
        region.ok_or_else(|| {
            Error::new(ErrorKind::Driver, "regattr")
                .context("why", "the path selector returned no region")
        })
    }

    /// Validates a request, and returns the ranges to register.
    #[inline]
    pub(super) fn check<'a>(&self, attr: &MrAttr<'a>, flags: MrFlags) -> Result<Ranges<'a>> {
        self.process.check("regattr")?;
        validate::check(attr, flags, self.effective, &self.provider_attr)
            .and_then(|ranges| {
                attr.base.map_or(Ok(()), |base| self.check_base(base, attr)).map(|()| ranges)
            })
            .inspect_err(|error| tracing::debug!(%error, "registration refused"))
    }

    fn check_base(&self, base: &MemoryRegion, attr: &MrAttr<'_>) -> Result<()> {
        if !std::ptr::eq(Arc::as_ptr(base.inner().domain()), self) {
            return Err(Error::new(ErrorKind::InvalidArgument, "regattr")
                .context("base", base.range())
                .remedy("pass a base that is registered in the same domain"));
        }
        validate::check_base(base, attr)
    }

    /// Resolves the owner of the memory, and populates host pages if the request asks for that.
    /// Queries the ifaces for the owner only if `owner` is `None`. `allocations` must be empty, and
    /// holds the allocations to which the result refers.
    fn resolve<'a>(
        &'a self,
        ranges: &[AddressRange],
        attr: &MrAttr<'a>,
        flags: MrFlags,
        owned: Option<IfaceKind>,
        owner: Option<&AddressOwner>,
        allocations: &'a mut Allocations,
    ) -> Result<Memory<'a>> {
        if let Some(base) = attr.base {
            let (Some(region), Some(offset)) =
                (base.inner().registered(), base.inner().offset_of(ranges[0]))
            else {
                return Err(
                    Error::new(ErrorKind::BadState, "regattr").context("base", base.range())
                );
            };
            self.check_part(base.inner(), ranges[0], attr, flags)?;
            return Ok(Memory::Part { base: region, offset });
        }
        if let Some(DmaBufAttr { fd, offset, .. }) = attr.dma_buf {
            let device = self.dma_buf_device(ranges[0], attr, flags)?;
            let named = attr.iface.filter(|_| self.attr.hmem);
            let iface = named.map(|named| self.registry.get(named)).transpose()?;
            return Ok(Memory::DmaBuf { fd, offset, iface, device });
        }
        let owner = match owner {
            Some(owner) => {
                allocations.extend(owner.allocation);
                owner.iface
            }
            None => self.owner(ranges, attr, flags, allocations)?,
        };
        check_owner(&self.registry, ranges[0], owned, owner)?;
        let owned = owned.is_some();
        if owner != IfaceKind::SYSTEM {
            let iface = self.registry.get(owner)?;
            return Ok(Memory::Device { iface, allocations, owned });
        }
        if let Some(prefault) = &attr.prefault {
            for range in ranges {
                prefault::prefault(*range, attr.access.nic_writes(), prefault)?;
            }
        }
        Ok(Memory::Host { owned })
    }

    #[inline(always)]
    fn registration<'a>(
        &'a self,
        ranges: &'a [AddressRange],
        memory: Memory<'a>,
        attr: &'a MrAttr<'_>,
        flags: MrFlags,
    ) -> Registration<'a> {
        match memory {
            Memory::Device { allocations, .. } => {
                let Allocation { iface, device, .. } = allocations[0];
                self.inbound.note(iface, device, attr.access);
            }
            Memory::DmaBuf { iface: Some(iface), device, .. } => {
                self.inbound.note(iface.kind(), device, attr.access);
            }
            Memory::DmaBuf { iface: None, .. } | Memory::Host { .. } | Memory::Part { .. } => {}
        }
        Registration {
            ranges,
            memory,
            access: attr.access,
            flags,
            key: match attr.requested_key {
                Some(key) if !self.effective.contains(MrMode::PROV_KEY) => {
                    KeyRequest::Application(key)
                }
                _ => KeyRequest::Provider,
            },
            auth_key: self.auth_key(attr.auth_key),
            addressing: self.addressing(),
            page_size: attr.page_size,
            enabled: self.starts_enabled(flags),
            parallel: attr.parallel.as_ref(),
            policy: self.attr.p2p,
            direct_paths: self.attr.direct_paths.as_deref(),
            ordering: attr.ordering.unwrap_or(self.attr.ordering),
            driver_calls_in_transfers: self.attr.driver_calls_in_transfers,
        }
    }
}

/// Registers the same memory with the NIC of each domain.
///
/// `done` receives the regions in the order of the domains. If a NIC fails, `done` has received the
/// regions of the NICs before it. The caller must have checked the request for every domain.
///
/// `owned` is the iface of the memory if a region owns the memory or a scope borrows it, and `None`
/// otherwise. `owner` is the owner of the memory, if the caller has resolved it already.
pub(super) fn register_on_nics(
    domains: &[&Arc<DomainInner>],
    ranges: &[AddressRange],
    attr: &MrAttr<'_>,
    flags: MrFlags,
    owned: Option<IfaceKind>,
    owner: Option<&AddressOwner>,
    done: &mut dyn FnMut(PathRegistration),
) -> Result<()> {
    let first = domains[0];
    let span = tracing::debug_span!(
        "register",
        nic = %first.provider_attr.nic,
        nics = domains.len(),
        range = %ranges[0],
        ranges = ranges.len(),
        access = %attr.access,
    );
    let _entered = span.enter();
    let mut done = |region: PathRegistration| {
        let path = region.decision.as_ref().unwrap_or(&first.plain_host).path;
        let nic = region.decision.as_ref().map(|decision| &*decision.nic);
        tracing::debug!(nic, %path, "registered");
        done(region);
    };
    let mut allocations = Allocations::new();
    // The memory is borrowed for speed, as in `DomainInner::owner`.
    let memory = first.resolve(ranges, attr, flags, owned, owner, &mut allocations);
    (memory.as_ref().map_err(Error::clone))
        .and_then(|memory| register_memory(domains, ranges, memory, attr, flags, &mut done))
        .inspect_err(|error| tracing::debug!(%error, "registration refused"))
}

/// Registers `memory`, which was resolved before, with the NIC of each domain.
fn register_memory(
    domains: &[&Arc<DomainInner>],
    ranges: &[AddressRange],
    memory: &Memory<'_>,
    attr: &MrAttr<'_>,
    flags: MrFlags,
    done: &mut dyn FnMut(PathRegistration),
) -> Result<()> {
    let first = domains[0];
    match *memory {
        Memory::Part { base, offset } => {
            let len = ranges[0].len();
            let sub_regions = first.provider.sub_regions().ok_or_else(|| {
                first.missing(
                    Features::SUB_REGIONS,
                    "register sub-region",
                    ErrorKind::Unsupported,
                    "this provider has no keys for part of a region: register the part by itself",
                )
            })?;
            let registration = first.registration(ranges, *memory, attr, flags);
            let region = sub_regions.register_sub(base, &registration, offset, len)?;
            let decision = attr.base.and_then(|base| base.inner().recorded_decision());
            done(PathRegistration { region, decision });
        }
        Memory::Host { owned } => {
            let backing = Backing::Host { owned };
            let piece = |range: &AddressRange| Piece { range: *range, backing: backing.clone() };
            // One range, the most frequent case, needs no list.
            let (one, several);
            let pieces: &[Piece<'_>] = if let [range] = ranges {
                one = piece(range);
                std::slice::from_ref(&one)
            } else {
                several = ranges.iter().map(piece).collect::<Vec<_>>();
                &several
            };
            for domain in domains {
                let registration = domain.registration(ranges, Memory::Host { owned }, attr, flags);
                // SAFETY: either the caller of an unsafe function guarantees that the memory may be
                // registered. Or the region owns the memory, or a scope borrows it; then `owned` is
                // set, and the memory stays allocated until the region is deregistered.
                let region = unsafe { domain.provider.register(&registration, pieces) }?;
                done(PathRegistration { region, decision: None });
            }
        }
        Memory::Device { .. } | Memory::DmaBuf { .. } => {
            let registrations: SmallVec<[Registration<'_>; 1]> = domains
                .iter()
                .map(|domain| domain.registration(ranges, *memory, attr, flags))
                .collect();
            let targets: SmallVec<[Target<'_>; 1]> = domains
                .iter()
                .zip(&registrations)
                .map(|(domain, registration)| Target { registration, provider: &*domain.provider })
                .collect();
            // SAFETY: either the caller of an unsafe function guarantees that the memory may be
            // registered, or the region owns the memory until it is deregistered.
            unsafe { first.selector.register(&targets, done) }?;
        }
    }
    Ok(())
}

/// Fails if the memory belongs to another iface (`found`) than its buffer reports (`owned`).
///
/// The domain treats memory of an iface that it does not know as host memory. A software NIC would
/// then access device memory with the CPU.
fn check_owner(
    registry: &Registry,
    range: AddressRange,
    owned: Option<IfaceKind>,
    found: IfaceKind,
) -> Result<()> {
    match owned {
        // A device API may claim host memory too, so a buffer of host memory is accepted in any
        // case.
        None | Some(IfaceKind::SYSTEM) => Ok(()),
        Some(iface) if iface == found => Ok(()),
        Some(iface) => Err(Error::new(ErrorKind::InvalidArgument, "regattr")
            .iface(registry.name_of(iface))
            .context("range", range)
            .context("found", registry.name_of(found))
            .remedy(
                "add the iface that allocated the buffer to the builder of the domain's `Hmem`",
            )),
    }
}

/// Creates a region, which is registered already or pending until the domain's worker registers it.
#[inline]
pub(super) fn new_region(
    domain: &Arc<DomainInner>,
    ranges: &[AddressRange],
    attr: &MrAttr<'_>,
    flags: MrFlags,
    keep: &KeepAlive,
    registered: Result<PathRegistration, RegionId>,
) -> Arc<RegionInner> {
    let id = registered.as_ref().err().copied();
    let owned = matches!(keep, KeepAlive::Region { .. });
    let is_rare = ranges.len() > 1 || attr.base.is_some() || owned || id.is_some();
    let rare = (is_rare || attr.page_size != 0).then(|| {
        let parent = attr.base.map(|base| Dependent::of(base.inner()));
        let page_size = parent.as_ref().map_or(attr.page_size, |parent| parent.page_size());
        Box::new(Rare {
            ranges: if ranges.len() > 1 { ranges.to_vec() } else { Vec::new() },
            parent,
            keep: Mutex::new(keep.clone()),
            page_size,
            asynchronous: id.map(Asynchronous::new),
        })
    });
    let MrAttr { access, context, .. } = *attr;
    RegionInner::new(domain, ranges[0], access, flags, context, rare, registered.ok())
}

impl MemoryRegion {
    /// Registers part of this region with a key and rights of its own (`base_mr`). If an event
    /// queue is bound ([`Domain::bind`](super::Domain::bind)), the result is a pending region.
    ///
    /// The NIC enforces the bounds and the rights. The part inherits iface, device and page size,
    /// pins no memory, and keeps this region registered. It has the write ordering of the domain:
    /// [`MrAttr::base`] with [`MrAttr::ordering`] requests another.
    ///
    /// ```no_run
    /// use hmem_core::{Access, MemoryRegion, RemoteKey, Result};
    ///
    /// /// Lets a peer read the first page, and nothing else.
    /// fn first_page(region: &MemoryRegion) -> Result<(MemoryRegion, RemoteKey)> {
    ///     let page = region.range().slice(0, 4096).expect("a region of at least a page");
    ///     let part = region.sub(page, Access::REMOTE_READ, None)?;
    ///     let key = part.key()?;
    ///     Ok((part, key))
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Domain::regattr`](super::Domain::regattr). The most common kinds are:
    ///
    /// - [`ErrorKind::BadState`] if this region is not registered yet, and in a forked child.
    /// - [`ErrorKind::ZeroLength`] for an empty range.
    /// - [`ErrorKind::OutOfBounds`] for a range that is not inside one range of this region.
    /// - [`ErrorKind::AccessDenied`] for a right that lets the NIC write, if this region has no
    ///   such right.
    /// - [`ErrorKind::NoKey`] or [`ErrorKind::KeyRejected`] for the requested key.
    /// - [`ErrorKind::Unsupported`] if the provider has no sub-regions.
    pub fn sub(
        &self,
        range: AddressRange,
        access: Access,
        requested_key: impl Into<Option<u64>>,
    ) -> Result<Self> {
        let ranges = [range];
        let requested_key = requested_key.into();
        let attr = MrAttr { base: Some(self), requested_key, ..MrAttr::new(&ranges, access) };
        self.inner()
            .domain
            .register(&attr, MrFlags::empty(), KeepAlive::Caller)
            .map_err(|error| error.of_call("sub"))
    }
}
