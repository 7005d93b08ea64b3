//! The search for a path: tries the paths that a policy allows, and records each attempt.

#![allow(unsafe_code, reason = "registers memory by address, on each path")]

use std::{os::fd::BorrowedFd, sync::Arc};

use hmem_core::{
    AddressRange, AllocationKind, Decision, Error, ErrorKind, Iface, IfaceKind, IfaceName, Path,
    Result,
    cause::{Facts, RefusalContext, Step},
    iface::DmaBufMapping,
    path::{Attempt, P2pPolicy, Target, Trace},
    provider::{Backing, Nic, Piece, ProviderAttr, ProviderDomain, ProviderRegion},
    registration::{Memory, Registration},
    registry::AddressOwner,
};

use super::{
    DefaultPathSelector,
    cause::{NO_PCIE_MAPPING, ProbableCause},
    exports::{ExportSet, ExportUnit, Exported, named},
    facts::FactSource,
    variant::{DmaBufLayout, PathRefusal, PathVariant},
};
use crate::staging::StagedRange;

/// A region that was registered over one path, with the earlier refusals of that path.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) region: ProviderRegion,
    /// Number of segments and dma-bufs; `None` if every range is one segment, or for a path without
    /// dma-bufs.
    pub(super) layout: Option<DmaBufLayout>,
    /// Refusals of whole ranges on this path. Their segments were then tried separately.
    pub(super) refused: Vec<PathRefusal>,
}

/// A search for a path: the memory, the NIC, and the attempts so far.
#[derive(Debug)]
pub(super) struct PathSearch<'a> {
    pub(super) registration: &'a Registration<'a>,
    pub(super) provider: &'a dyn ProviderDomain,
    pub(super) owner: &'a AddressOwner,
    /// The iface that owns the memory; `None` for a dma-buf whose iface the application did not
    /// name.
    pub(super) iface: Option<&'a Arc<dyn Iface>>,
    pub(super) kind: AllocationKind,
    /// The policy of the domain, or `Disabled` if direct access is disabled for the process.
    pub(super) policy: P2pPolicy,
    /// True if direct access is disabled for the process.
    pub(super) p2p_disabled: bool,
    fact_source: &'a dyn FactSource,
    /// Facts about the machine; `None` until the first refusal.
    facts: Option<Facts>,
    attempts: Vec<Attempt>,
    /// The kind of the last refusal by the iface or the NIC. Failed releases do not count.
    refused_with: Option<ErrorKind>,
    /// True if the iface or the NIC refused a path. A path that the NIC does not list among its
    /// imports does not count.
    pub(super) refused_by_driver: bool,
    /// True if a refusal may be temporary, so that a retry may succeed.
    pub(super) may_be_temporary: bool,
    /// True if every path would refuse the request, so that the search ends.
    pub(super) request_refused: bool,
    /// True if the driver does not support an export with the default mapping. A refusal of the
    /// PCIe mapping is then not due to the mapping.
    default_refused: bool,
    /// Number of segments and dma-bufs on the chosen path; `None` if every range is one segment, or
    /// for a path without dma-bufs.
    pub(super) layout: Option<DmaBufLayout>,
}

impl<'a> PathSearch<'a> {
    pub(super) fn new(
        selector: &'a DefaultPathSelector,
        target: Target<'a>,
        owner: &'a AddressOwner,
        iface: Option<&'a Arc<dyn Iface>>,
    ) -> Self {
        let Target { registration, provider } = target;
        Self {
            registration,
            provider,
            owner,
            iface,
            kind: kind_of(owner),
            policy: selector.policy_in_force(registration.policy),
            p2p_disabled: selector.disable_p2p,
            fact_source: &*selector.facts,
            facts: None,
            attempts: Vec::new(),
            refused_with: None,
            refused_by_driver: false,
            may_be_temporary: false,
            request_refused: false,
            default_refused: false,
            layout: None,
        }
    }

    /// Starts a new search for other memory of the same iface and device, with the same NIC and
    /// policy.
    pub(super) fn restart<'b>(
        &self,
        registration: &'b Registration<'b>,
        owner: &'b AddressOwner,
    ) -> PathSearch<'b>
    where
        'a: 'b,
    {
        PathSearch {
            registration,
            owner,
            kind: kind_of(owner),
            facts: None,
            attempts: Vec::new(),
            refused_with: None,
            refused_by_driver: false,
            may_be_temporary: false,
            request_refused: false,
            default_refused: false,
            layout: None,
            ..*self
        }
    }

    pub(super) fn attr(&self) -> &'a ProviderAttr {
        self.provider.attr()
    }

    /// Returns the kernel's name of the exporter of a dma-buf; `None` if the kernel does not tell.
    pub(super) fn dma_buf_exporter(&self, fd: BorrowedFd<'_>) -> Option<String> {
        self.fact_source.dma_buf_exporter(fd)
    }

    fn nic(&self) -> &'a Nic {
        &self.attr().nic
    }

    /// Registers the memory over the path `variant`.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`ProviderDomain::register`] for the
    /// registration of this search.
    pub(super) unsafe fn take(
        &self,
        variant: PathVariant,
        exports: &mut ExportSet<'_>,
    ) -> Result<Taken, PathRefusal> {
        let pieces: Vec<_> = match variant {
            PathVariant::DmaBuf(mapping) => {
                // SAFETY: the caller upholds the contract of this function, which covers this call.
                return unsafe { self.take_dma_bufs(mapping, exports) };
            }
            PathVariant::HostPages => {
                let owned = matches!(self.registration.memory, Memory::Device { owned: true, .. });
                self.pieces(|_| Backing::Host { owned })
            }
            PathVariant::PeerMemory => exports.peer_memory(self.nic())?,
            PathVariant::Staged => self.pieces(|range| {
                // SAFETY: the caller keeps the memory while it is registered, and the provider
                // does not use the range after that, as `ProviderDomain` promises.
                let staged = unsafe { StagedRange::new(Arc::clone(exports.iface()), range) };
                Backing::Staged(Arc::new(staged))
            }),
        };
        // SAFETY: the caller upholds the contract of this function, which covers this call.
        match unsafe { self.provider.register(self.registration, &pieces) } {
            Ok(region) => Ok(Taken { region, layout: None, refused: Vec::new() }),
            Err(error) => Err(PathRefusal::new(Step::Register, variant.call(None), error)),
        }
    }

    /// Registers one dma-buf for each range. If the driver or the NIC refuses a dma-buf of several
    /// segments, registers one dma-buf for each physical segment.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`ProviderDomain::register`] for the
    /// registration of this search.
    unsafe fn take_dma_bufs(
        &self,
        mapping: DmaBufMapping,
        exports: &mut ExportSet<'_>,
    ) -> Result<Taken, PathRefusal> {
        let mut refused = Vec::new();
        let mut unit = ExportUnit::Range;
        loop {
            let Exported { pieces, layout, refused: by_driver } =
                match exports.pieces(mapping, unit, self.nic()) {
                    Ok(exported) => exported,
                    Err(mut refusal) => {
                        refused.append(&mut refusal.before);
                        return Err(PathRefusal { before: refused, ..refusal });
                    }
                };
            refused.extend(by_driver);
            // SAFETY: the caller upholds the contract of this function, which covers this call.
            let error = match unsafe { self.provider.register(self.registration, &pieces) } {
                Ok(region) => return Ok(Taken { region, layout, refused }),
                Err(error) => error,
            };
            let call = PathVariant::DmaBuf(mapping).call(layout);
            let also = exports.refused(mapping, unit);
            let refusal = PathRefusal { also, ..PathRefusal::new(Step::Register, call, error) };
            if !layout.is_some_and(DmaBufLayout::spans) || refusal.is_about_the_request() {
                return Err(PathRefusal { before: refused, ..refusal });
            }
            refused.push(refusal);
            unit = ExportUnit::Segment;
        }
    }

    fn pieces<'b>(&self, backing: impl Fn(AddressRange) -> Backing<'b>) -> Vec<Piece<'b>> {
        let ranges = self.registration.ranges.iter();
        ranges.map(|&range| Piece { range, backing: backing(range) }).collect()
    }

    /// Tries the direct paths in order, except `tried`. Returns the region of the first path that
    /// works. Returns `None` if every path was refused, or if every path would refuse the request.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`ProviderDomain::register`] for the
    /// registration of this search.
    pub(super) unsafe fn direct(
        &mut self,
        exports: &mut ExportSet<'_>,
        tried: Option<PathVariant>,
    ) -> Option<(PathVariant, ProviderRegion)> {
        let imports = self.attr().imports;
        if !imports.dma_buf {
            self.not_imported(Path::DmaBuf, "dma-buf");
        }
        let has_pcie = exports
            .iface()
            .dma_buf()
            .is_some_and(|exporter| exporter.mappings().contains(&DmaBufMapping::Pcie));
        let mut mappings = mappings(imports.pcie_mapping_first, has_pcie).to_vec();
        if let Some(existing) = exports.existing() {
            // All NICs share the exports with the mapping `existing`. The search tries other
            // mappings only if `existing` is refused.
            mappings.retain(|mapping| *mapping != existing);
            mappings.insert(0, existing);
        }
        let dma_bufs = mappings.into_iter().filter(|_| imports.dma_buf).map(PathVariant::DmaBuf);
        let peer_memory = imports.peer_memory.then_some(PathVariant::PeerMemory);
        for variant in dma_bufs.chain(peer_memory) {
            if tried == Some(variant) {
                continue;
            }
            // SAFETY: the caller upholds the contract of this function, which covers this call.
            match unsafe { self.take(variant, exports) } {
                Ok(taken) => return Some((variant, self.taken(variant, taken))),
                Err(refusal) => self.refuse(variant, refusal),
            }
            if self.request_refused {
                return None;
            }
        }
        if !imports.peer_memory {
            self.not_imported(Path::PeerMemory, "peer memory");
        }
        None
    }

    /// Registers the memory as a region that is reached through staged copies. Returns `None` and
    /// records the refusal if the provider has no staged copies or refuses the region, or if the
    /// domain's transfers may not call drivers.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`ProviderDomain::register`] for the
    /// registration of this search.
    pub(super) unsafe fn staged(&mut self, exports: &mut ExportSet<'_>) -> Option<ProviderRegion> {
        if !self.attr().imports.staged {
            self.not_imported(Path::Staged, "staged copies");
            return None;
        }
        if !self.permits(PathVariant::Staged) {
            let error = Error::new(ErrorKind::Unsupported, "register")
                .provider(self.nic().to_string())
                .context(
                    "why",
                    "transfers may not call drivers, and staged copies are driver calls",
                )
                .remedy(
                    "make a direct path work, or set DomainAttr::driver_calls_in_transfers to true",
                );
            tracing::debug!(%error, "the domain forbids staged copies");
            self.attempts.push(Attempt::not_tried(Path::Staged, "stage", error));
            return None;
        }
        // SAFETY: the caller upholds the contract of this function, which covers this call.
        match unsafe { self.take(PathVariant::Staged, exports) } {
            Ok(taken) => Some(taken.region),
            Err(refusal) => {
                self.refuse(PathVariant::Staged, refusal);
                None
            }
        }
    }

    /// Returns false if transfers over the path `variant` need driver calls, which the domain
    /// forbids.
    pub(super) fn permits(&self, variant: PathVariant) -> bool {
        variant != PathVariant::Staged || self.registration.driver_calls_in_transfers
    }

    fn not_imported(&mut self, path: Path, what: &'static str) {
        let error = Error::new(ErrorKind::Unsupported, "import")
            .provider(self.nic().to_string())
            .context("why", what)
            .remedy("use a NIC and driver that support it");
        let cause = self.cause(path, Step::Import, DmaBufMapping::Default, &error);
        tracing::debug!(%path, %error, "the NIC does not have the path");
        let attempt = Attempt::not_tried(path, "import", error);
        self.attempts.push(ProbableCause::add_to(cause.as_ref(), attempt));
    }

    fn cause(
        &mut self,
        path: Path,
        step: Step,
        mapping: DmaBufMapping,
        error: &Error,
    ) -> Option<ProbableCause> {
        let facts = match self.facts.take() {
            Some(facts) => facts,
            None => {
                let bus_id = self.bus_id().unwrap_or_else(|error| {
                    let error = self.named(error);
                    self.attempts.push(Attempt::refused(path, "devices()", error));
                    None
                });
                self.fact_source.facts(bus_id.as_deref(), self.nic())
            }
        };
        let (facts, kind) = (self.facts.insert(facts), self.kind);
        let of_iface = self.iface.map_or(&[][..], |iface| iface.causes());
        let context = RefusalContext { path, step, kind, mapping, error };
        ProbableCause::find(of_iface, &context, facts)
    }

    /// Returns the PCI bus id of the device that owns the memory; `None` if the device or its bus
    /// id is not known.
    fn bus_id(&self) -> Result<Option<String>> {
        let (Some(iface), Some(device)) = (self.iface, self.owner.device) else { return Ok(None) };
        let known = iface.devices()?.into_iter().find(|known| known.id == device);
        Ok(known.and_then(|known| known.pci_bus_id))
    }

    /// Records that a path was refused.
    pub(super) fn refuse(&mut self, variant: PathVariant, refusal: PathRefusal) {
        self.refused_by_driver = true;
        self.may_be_temporary |= !refusal.is_permanent();
        self.request_refused |= refusal.is_about_the_request();
        self.record(variant, refusal);
    }

    /// Records the refusals that preceded a successful registration. Returns the registered region.
    pub(super) fn taken(&mut self, variant: PathVariant, taken: Taken) -> ProviderRegion {
        taken.refused.into_iter().for_each(|refusal| self.record(variant, refusal));
        self.layout = taken.layout;
        taken.region
    }

    fn record(&mut self, variant: PathVariant, refusal: PathRefusal) {
        let unsupported = refusal.step == Step::Export && refusal.is_unsupported();
        let PathRefusal { step, call, error, before, also, .. } = refusal;
        before.into_iter().for_each(|refusal| self.record(variant, refusal));
        let mapping = if self.default_refused { DmaBufMapping::Default } else { variant.mapping() };
        let cause = self.cause(variant.path(), step, mapping, &error);
        if unsupported && variant == PathVariant::DmaBuf(DmaBufMapping::Default) {
            self.default_is_refused(cause.as_ref());
        }
        self.refused_with = Some(error.kind());
        let attempt = Attempt::refused(variant.path(), call, self.named(error));
        let attempt = ProbableCause::add_to(cause.as_ref(), attempt);
        tracing::debug!(
            path = %attempt.path,
            step = step.name(),
            call = attempt.call,
            error = attempt.error.as_ref().map(tracing::field::display),
            cause = attempt.cause,
            remedy = attempt.remedy,
            "path refused"
        );
        self.attempts.push(attempt);
        self.attempts.extend(also);
    }

    fn named(&self, error: Error) -> Error {
        match self.iface {
            Some(iface) => named(iface, error),
            None => error,
        }
    }

    /// Corrects earlier refusals of the PCIe mapping after the driver refused the default mapping
    /// too. Sets their cause to `cause`, the cause of the refused default mapping.
    fn default_is_refused(&mut self, cause: Option<&ProbableCause>) {
        self.default_refused = true;
        for attempt in &mut self.attempts {
            if attempt.cause_name != Some(NO_PCIE_MAPPING) {
                continue;
            }
            let remedy = attempt.error.as_ref().and_then(Error::remedy_text).map(str::to_owned);
            attempt.cause_name = cause.map(|cause| cause.name);
            attempt.cause = cause.map(|cause| cause.cause.clone());
            attempt.remedy = cause.map(|cause| cause.remedy.to_owned()).or(remedy);
        }
    }

    /// Adds attempts to the trace that do not affect the search, such as failed releases.
    pub(super) fn note(&mut self, attempts: Vec<Attempt>) {
        self.attempts.extend(attempts);
    }

    pub(super) fn into_attempts(self) -> Vec<Attempt> {
        self.attempts
    }

    /// Records that the registration over `variant` succeeded, and returns the decision for this
    /// path.
    pub(super) fn decision(mut self, variant: PathVariant, reason: &str) -> Decision {
        self.attempts.push(variant.success(self.layout));
        self.recorded(variant, reason)
    }

    /// Returns the decision for the path `variant`. The caller must have recorded the successful
    /// attempt.
    pub(super) fn recorded(self, variant: PathVariant, reason: &str) -> Decision {
        let decision = Decision {
            path: variant.path(),
            reason: reason.into(),
            iface: self.owner.iface,
            iface_name: self.iface_name(),
            device: self.owner.device,
            nic: self.nic().to_string(),
            policy: self.policy,
            mapping: variant.mapping(),
            from_cache: false,
            attempts: self.attempts.into(),
        };
        tracing::debug!(%decision, "path decided");
        decision
    }

    /// Returns the name of the memory's iface, for texts.
    pub(super) fn iface_name(&self) -> IfaceName {
        self.iface.map_or_else(|| self.owner.iface.into(), IfaceName::from)
    }

    /// Returns the error for a search in which every path was refused, with all attempts. The error
    /// has the kind of the last refusal by the iface or the NIC. Without one, it has the kind of
    /// [`Trace::refusal`], or `Unsupported` if no path was tried.
    pub(super) fn exhausted(self, (why, remedy): (&'static str, &'static str)) -> Error {
        let iface = self.iface_name();
        let nic = self.nic().to_string();
        let trace = Trace::from(self.attempts);
        let kind = self.refused_with.or_else(|| trace.refusal().map(Error::kind));
        let kind = kind.unwrap_or(ErrorKind::Unsupported);
        let error = Error::new(kind, "path")
            .iface(iface)
            .provider(nic)
            .context("range", self.registration.ranges[0])
            .context("policy", self.policy)
            .context("why", why)
            .remedy(remedy)
            .with_trace(trace);
        match self.owner.device {
            Some(device) => error.device(device),
            None => error,
        }
    }
}

/// Returns the kind of the memory that an owner describes. An unknown kind counts as device memory.
pub(super) fn kind_of(owner: &AddressOwner) -> AllocationKind {
    match owner.allocation {
        Some(allocation) => allocation.kind,
        None if owner.iface == IfaceKind::SYSTEM => AllocationKind::System,
        None => AllocationKind::Device,
    }
}

/// Returns the dma-buf mappings in the order in which they are tried (HM-09).
fn mappings(pcie_first: bool, has_pcie: bool) -> &'static [DmaBufMapping] {
    if pcie_first && has_pcie {
        &[DmaBufMapping::Pcie, DmaBufMapping::Default]
    } else {
        &[DmaBufMapping::Default]
    }
}
