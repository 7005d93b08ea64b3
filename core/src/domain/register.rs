//! Registration, from the request to the provider's handle.
//!
//! All registrations call [`register_on_nics`]: synchronous, asynchronous and cached registrations,
//! sub-regions, and registrations with several NICs.

#![allow(unsafe_code, reason = "calls the provider, with memory that the caller of `reg` keeps")]

use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
    time::Instant,
};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    DomainInner,
    owner::Allocations,
    prefault,
    region::MemoryRegion,
    region_state::{Asynchronous, Dependent, KeepAlive, Rare, RegionInner},
    request::{Checked, RegionRequest, Source},
    terms::Terms,
};
use crate::{
    Access, AddressRange, Allocation, Error, ErrorKind, IfaceKind, MrMode, Result,
    event_queue::RegionId,
    path::{PathRegistration, Target},
    provider::{Backing, Features, Piece},
    registration::{KeyRequest, Parallel, Progress, RegisteredMemory, Registration},
    registry::{AddressOwner, Registry},
};

/// A guard that leaks the memory of a registration if the provider or the path selector panics. The
/// NIC may have registered the memory before the panic, so the memory must not be freed. If nothing
/// panics, `mem::forget` disarms the guard.
struct LeakOnPanic<'a>(&'a KeepAlive);

impl Drop for LeakOnPanic<'_> {
    fn drop(&mut self) {
        std::mem::forget(self.0.clone());
    }
}

impl DomainInner {
    /// Registers memory: on the domain's worker if an event queue is bound, otherwise in this call.
    #[inline]
    pub(super) fn register(self: &Arc<Self>, request: &RegionRequest<'_>) -> Result<MemoryRegion> {
        match self.worker.get() {
            None => self.register_now(request, None),
            Some(worker) => {
                let (region, job) = worker.job(self, request)?;
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
        request: &RegionRequest<'_>,
        owner: Option<&AddressOwner>,
    ) -> Result<MemoryRegion> {
        let checked = self.check(request)?;
        // The callback creates the region as soon as the provider has registered. A later error or
        // panic then closes the region.
        let mut region = None;
        register_regions(&[self], &checked, owner, &mut |made| region = Some(made))?;
        Ok(region.expect("one region for each domain"))
    }

    /// Returns the memory of a request with its owner. If the request asks for it, also populates
    /// host pages.
    ///
    /// Queries the ifaces for the owner only if `owner` is `None`. The result borrows
    /// `allocations`, an empty list to which this method adds the allocations of device memory.
    fn resolve<'a>(
        &'a self,
        checked: &Checked<'a>,
        owner: Option<&AddressOwner>,
        allocations: &'a mut Allocations,
    ) -> Result<RegisteredMemory<'a>> {
        let Checked { request: &RegionRequest { source, ref keep, terms, .. }, ref ranges, part } =
            *checked;
        match source {
            Source::Part { base, range } => {
                let (base_region, offset) = part.expect("`check` resolved the part");
                self.check_part(&base.inner, range, terms)?;
                return Ok(RegisteredMemory::Part { base: base_region, offset });
            }
            Source::DmaBuf(buffer) => {
                let device = self.dma_buf_device(ranges[0], terms)?;
                let named = terms.iface.filter(|_| self.attr.hmem);
                let iface = named.map(|named| self.registry.get(named)).transpose()?;
                let (fd, offset) = (buffer.fd, buffer.offset);
                return Ok(RegisteredMemory::DmaBuf { fd, offset, iface, device });
            }
            Source::Ranges(_) => {}
        }
        let owner = match owner {
            Some(owner) => {
                allocations.extend(owner.allocation);
                owner.iface
            }
            None => self.owner(ranges, terms, allocations)?,
        };
        let owned = keep.iface();
        check_owner(&self.registry, ranges[0], owned, owner)?;
        let owned = owned.is_some();
        if owner != IfaceKind::SYSTEM {
            let iface = self.registry.get(owner)?;
            return Ok(RegisteredMemory::Device { iface, allocations, owned });
        }
        if let Some(prefault) = &terms.prefault {
            for range in &**ranges {
                prefault::prefault(*range, terms.access.nic_writes(), prefault)?;
            }
        }
        Ok(RegisteredMemory::Host { owned })
    }

    /// Returns the registration to request from the provider. If the NIC may write the memory, adds
    /// the memory's device to those that completion queues flush.
    #[inline(always)]
    fn registration<'a>(
        &'a self,
        ranges: &'a [AddressRange],
        memory: RegisteredMemory<'a>,
        terms: &'a Terms<'_>,
        parallel: Option<&'a Parallel<'a>>,
    ) -> Registration<'a> {
        match memory {
            RegisteredMemory::Device { allocations, .. } => {
                let Allocation { iface, device, .. } = allocations[0];
                self.inbound.note(iface, device, terms.access);
            }
            RegisteredMemory::DmaBuf { iface: Some(iface), device, .. } => {
                self.inbound.note(iface.kind(), device, terms.access);
            }
            RegisteredMemory::DmaBuf { iface: None, .. }
            | RegisteredMemory::Host { .. }
            | RegisteredMemory::Part { .. } => {}
        }
        Registration {
            ranges,
            memory,
            access: terms.access,
            flags: terms.flags,
            key: match terms.key {
                Some(key) if !self.effective.contains(MrMode::PROV_KEY) => {
                    KeyRequest::Application(key)
                }
                _ => KeyRequest::Provider,
            },
            auth_key: self.auth_key(terms.auth_key.as_deref()),
            addressing: self.addressing(),
            page_size: terms.page_size,
            enabled: self.starts_enabled(terms.flags),
            parallel,
            policy: self.attr.p2p,
            direct_paths: self.attr.direct_paths.as_deref(),
            reach_check: self.attr.reach_check == Some(true),
            ordering: terms.ordering.unwrap_or(self.attr.ordering),
            driver_calls_in_transfers: self.attr.driver_calls_in_transfers,
            exports: terms.exports.as_ref(),
            extension: terms.extension.as_deref().map(|settings| settings as _),
        }
    }
}

/// Registers the same memory with the NIC of each domain, and creates the regions.
///
/// `done` receives the regions in the order of the domains, one for each domain. If a NIC fails,
/// `done` has received the regions of the NICs before it. The caller must have checked the request
/// for every domain.
pub(super) fn register_regions(
    domains: &[&Arc<DomainInner>],
    checked: &Checked<'_>,
    owner: Option<&AddressOwner>,
    done: &mut dyn FnMut(MemoryRegion),
) -> Result<()> {
    let mut left = domains.iter();
    register_on_nics(domains, checked, owner, &mut |registered| {
        let domain = left.next().expect("one region for each domain");
        done(MemoryRegion { inner: new_region(domain, checked, Ok(registered)) });
    })
}

/// Registers the same memory with the NIC of each domain, without creating regions.
///
/// `done` receives the registrations in the order of the domains, one for each domain. If a NIC
/// fails, `done` has received those of the NICs before it. The caller must have checked the request
/// for every domain. `owner` is the owner of the memory, if the caller has resolved it already.
///
/// # Panics
/// - If a progress callback panicked. The caller closes what `done` received, and nothing else is
///   registered.
/// - If the provider or the path selector panics. The memory of the request is then leaked.
pub(super) fn register_on_nics(
    domains: &[&Arc<DomainInner>],
    checked: &Checked<'_>,
    owner: Option<&AddressOwner>,
    done: &mut dyn FnMut(PathRegistration),
) -> Result<()> {
    let first = domains[0];
    let span = tracing::debug_span!(
        "register",
        nic = %first.provider_attr.nic,
        nics = domains.len(),
        range = %checked.ranges[0],
        ranges = checked.ranges.len(),
        access = %checked.request.terms.access,
    );
    let _entered = span.enter();
    let bytes = checked.ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(range.len()));
    // The time at which the registration with the next NIC starts, if any domain measures it.
    let mut started = domains.iter().find_map(|domain| domain.metrics.start());
    let registered = Cell::new(0);
    let mut done = |region: PathRegistration| {
        let path = region.decision.as_ref().unwrap_or(&first.plain_host).path;
        let nic = region.decision.as_ref().map(|decision| &*decision.nic);
        tracing::debug!(nic, %path, "registered");
        let metrics = &domains[registered.replace(registered.get() + 1)].metrics;
        metrics.count_registration(path, bytes, started);
        done(region);
        started = started.map(|_| Instant::now());
    };
    let mut allocations = Allocations::new();
    // A move of the result would be slow, for the reason in `DomainInner::owner`.
    let memory = first.resolve(checked, owner, &mut allocations);
    (memory.as_ref().map_err(Error::clone))
        .and_then(|memory| register_resolved(domains, checked, memory, &mut done))
        .and_then(|()| check_count(registered.get(), domains.len()))
        .inspect_err(|error| {
            domains[registered.get().min(domains.len() - 1)].metrics.count_refusal(error);
            tracing::debug!(%error, "registration refused");
        })
}

/// Fails if a plug-in's path selector succeeded without a region for each domain.
#[inline]
fn check_count(registered: usize, domains: usize) -> Result<()> {
    if registered == domains {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Driver, "regattr")
        .context("why", "the path selector returned too few regions")
        .context("regions", registered)
        .context("domains", domains)
        .remedy("call `done` once for each target in PathSelector::register"))
}

/// Registers `memory`, which was resolved before, with the NIC of each domain.
///
/// A panic of the progress callback does not unwind through the provider: the registration runs to
/// its end without further calls of the callback, and the panic then continues.
fn register_resolved(
    domains: &[&Arc<DomainInner>],
    checked: &Checked<'_>,
    memory: &RegisteredMemory<'_>,
    done: &mut dyn FnMut(PathRegistration),
) -> Result<()> {
    let RegionRequest { keep, terms, .. } = checked.request;
    let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
    let progress = terms.parallel.and_then(|parallel| parallel.progress);
    let report = |done: u64, total: u64| {
        let Some(progress) = progress.filter(|_| panic.lock().is_none()) else { return };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| progress(done, total))) {
            panic.lock().get_or_insert(payload);
        }
    };
    let report: Progress<'_> = &report;
    let parallel = terms
        .parallel
        .map(|parallel| Parallel { progress: parallel.progress.and(Some(report)), ..parallel });
    let leak = LeakOnPanic(keep);
    let registered = register_memory(domains, checked, memory, parallel.as_ref(), done);
    std::mem::forget(leak);
    match panic.into_inner() {
        Some(payload) => resume_unwind(payload),
        None => registered,
    }
}

/// Registers `memory` with the NIC of each domain. `parallel` are the request's settings, with a
/// callback that does not panic.
fn register_memory(
    domains: &[&Arc<DomainInner>],
    checked: &Checked<'_>,
    memory: &RegisteredMemory<'_>,
    parallel: Option<&Parallel<'_>>,
    done: &mut dyn FnMut(PathRegistration),
) -> Result<()> {
    let first = domains[0];
    let ranges = &*checked.ranges;
    let terms = checked.request.terms;
    match *memory {
        RegisteredMemory::Part { base, offset } => {
            let len = ranges[0].len();
            let registration = first.registration(ranges, *memory, terms, parallel);
            let sub_regions = first.provider.sub_regions().ok_or_else(|| {
                first.missing(
                    Features::SUB_REGIONS,
                    "regattr",
                    ErrorKind::Unsupported,
                    "this provider has no keys for part of a region: register the part by itself",
                )
            })?;
            let region = sub_regions
                .register_sub(base, &registration, offset, len)
                .map_err(|error| error.of_call("regattr"))?;
            let decision = checked.request.base().and_then(|base| base.inner.recorded_decision());
            done(PathRegistration { region, decision });
        }
        RegisteredMemory::Host { owned } => {
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
                let memory = RegisteredMemory::Host { owned };
                let registration = domain.registration(ranges, memory, terms, parallel);
                // SAFETY: if `owned` is set, the region owns the memory or a scope borrows it,
                // until the region is deregistered. Otherwise the caller of an unsafe function
                // guarantees that the memory may be registered.
                let region = unsafe { domain.provider.register(&registration, pieces) };
                let region = region.map_err(|error| {
                    let provider = &*domain.provider;
                    let target = Target { registration: &registration, provider };
                    domain.selector.explain_host(target, error)
                })?;
                done(PathRegistration { region, decision: None });
            }
        }
        RegisteredMemory::Device { .. } | RegisteredMemory::DmaBuf { .. } => {
            let registrations: SmallVec<[Registration<'_>; 1]> = domains
                .iter()
                .map(|domain| domain.registration(ranges, *memory, terms, parallel))
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
/// Without this check, device memory of an iface that the domain does not have would count as host
/// memory, and a software NIC would access it with the CPU.
fn check_owner(
    registry: &Registry,
    range: AddressRange,
    owned: Option<IfaceKind>,
    found: IfaceKind,
) -> Result<()> {
    match owned {
        // A buffer of host memory is accepted for every owner, because a device API may have
        // registered the memory and claim it.
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

/// Creates a region: a registered one, or a pending one with the identifier of its event.
#[inline]
pub(super) fn new_region(
    domain: &Arc<DomainInner>,
    checked: &Checked<'_>,
    registered: Result<PathRegistration, RegionId>,
) -> Arc<RegionInner> {
    let Checked { request, ranges, .. } = checked;
    let RegionRequest { ref keep, terms, promise, .. } = **request;
    let id = registered.as_ref().err().copied();
    let base = request.base();
    let owned = matches!(keep, KeepAlive::Region { .. });
    let is_rare = ranges.len() > 1 || base.is_some() || owned || id.is_some();
    let rare = (is_rare || terms.page_size != 0).then(|| {
        let parent = base.map(|base| Dependent::of(&base.inner));
        let page_size = parent.as_ref().map_or(terms.page_size, |parent| parent.page_size());
        Box::new(Rare {
            ranges: if ranges.len() > 1 { ranges.to_vec() } else { Vec::new() },
            parent,
            keep: Mutex::new(keep.clone()),
            page_size,
            asynchronous: id.map(Asynchronous::new),
        })
    });
    RegionInner::new(domain, ranges[0], terms, promise, rare, registered.ok())
}

impl MemoryRegion {
    /// Registers part of this region with a key and rights of its own (`base_mr`). If an event
    /// queue is bound ([`Domain::bind`](super::Domain::bind)), the result is a pending region.
    ///
    /// The NIC enforces the bounds and the rights of the part. The part pins no memory, and keeps
    /// this region registered. The part has the iface, device and page size of this region, and the
    /// domain's write ordering.
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
    /// The errors of [`Domain::register`](super::Domain::register). The most common kinds are:
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
        let terms = Terms { key: requested_key.into(), ..Terms::new(access) };
        self.inner
            .domain
            .register(&RegionRequest::part(self, range, &terms))
            .map_err(|error| error.of_call("sub"))
    }
}
