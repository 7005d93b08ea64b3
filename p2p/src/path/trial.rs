//! Trying ways on one buffer for one NIC, and writing down what came of each.

use std::{ops::Deref, sync::Arc};

use hmem_core::{
    AddressRange, AllocationKind, Decision, DeviceId, Error, ErrorKind, Iface, IfaceExt, Path,
    Result,
    iface::DmaBufMapping,
    path::{Attempt, P2pPolicy, PathRequest, Trace},
    provider::{Backing, Imports, Nic, Piece, ProviderDomain, ProviderRegion},
};

use super::{
    cause::{self, Cause, Circumstance, NO_PCIE_MAPPING, Step},
    exports::{Exports, Grain, Laid, Spread},
    facts::{FactSource, Facts},
};
use crate::staging::StagedRange;

/// A way from memory to a NIC, as exactly as it can be taken again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    HostPages,
    DmaBuf(DmaBufMapping),
    PeerMemory,
    Staged,
}

impl Way {
    pub(super) const fn path(self) -> Path {
        match self {
            Self::HostPages => Path::PlainHost,
            Self::DmaBuf(_) => Path::DmaBuf,
            Self::PeerMemory => Path::PeerMemory,
            Self::Staged => Path::Staged,
        }
    }

    pub(super) const fn mapping(self) -> DmaBufMapping {
        match self {
            Self::DmaBuf(mapping) => mapping,
            _ => DmaBufMapping::Default,
        }
    }

    pub(super) fn registering(self) -> String {
        match self {
            Self::HostPages => "register(host pages)".into(),
            Self::DmaBuf(mapping) => format!("register(dma-buf, {mapping:?} mapping)"),
            Self::PeerMemory => "register(peer memory)".into(),
            Self::Staged => "register(staged)".into(),
        }
    }

    /// The same for ranges of several segments.
    fn registering_as(self, spread: Option<Spread>) -> String {
        match (self, spread) {
            (Self::DmaBuf(mapping), Some(spread)) => {
                format!("register(dma-buf, {mapping:?} mapping, {spread})")
            }
            _ => self.registering(),
        }
    }

    /// The attempt that ended well.
    pub(super) fn success(self, spread: Option<Spread>) -> Attempt {
        Attempt::success(self.path(), self.registering_as(spread))
    }
}

/// What a way came to.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) region: ProviderRegion,
    /// How the segments lie, where a range has several.
    pub(super) spread: Option<Spread>,
    /// What was refused of the same way before, with more of the range in one dma-buf.
    pub(super) refused: Vec<Refusal>,
}

/// A way that was refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) step: Step,
    pub(super) call: String,
    pub(super) error: Error,
    /// Whether it is about this buffer alone, by what the iface says of its segments: no driver
    /// was asked.
    pub(super) own: bool,
    /// What was refused of the same way before, with more of the range in one dma-buf.
    pub(super) before: Vec<Refusal>,
    /// What else went wrong while it was undone.
    pub(super) also: Vec<Attempt>,
}

impl Refusal {
    pub(super) fn new(step: Step, call: String, error: Error) -> Self {
        Self { step, call, error, own: false, before: Vec::new(), also: Vec::new() }
    }

    /// Whether every way would meet the same refusal: it is about what was asked for, not about how
    /// the NIC gets there.
    pub(super) fn is_about_the_request(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::NoKey
                | ErrorKind::KeyRejected
                | ErrorKind::BadFlags
                | ErrorKind::BadAccess
                | ErrorKind::BadPageSize
                | ErrorKind::TooManyRanges
                | ErrorKind::TooLong
                | ErrorKind::ZeroLength
                | ErrorKind::AddressWraps
                | ErrorKind::ModeMismatch
                | ErrorKind::BadState
                | ErrorKind::Canceled
        )
    }

    /// Whether two exports were refused in the same way, as far as their kinds tell.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        self.error.kind() == other.error.kind() || (self.is_lacking() && other.is_lacking())
    }

    /// Whether the driver does not do what was asked for: what it answers then differs by release.
    fn is_lacking(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::Unsupported | ErrorKind::NoSys | ErrorKind::InvalidArgument
        )
    }

    /// Whether another buffer of the same class would meet the same refusal at another time, as far
    /// as its kind tells.
    fn lasts(&self) -> bool {
        matches!(
            self.error.kind(),
            ErrorKind::Unsupported
                | ErrorKind::NoSys
                | ErrorKind::Unreachable
                | ErrorKind::InvalidArgument
                | ErrorKind::BadAddress
                | ErrorKind::PermissionDenied
                | ErrorKind::AccessDenied
        )
    }
}

/// What is to be registered, and where.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) request: &'a PathRequest<'a>,
    pub(super) kind: AllocationKind,
    pub(super) provider: &'a dyn ProviderDomain,
    /// The policy in force.
    pub(super) policy: P2pPolicy,
    /// Whether direct access is switched off for the process.
    pub(super) off: bool,
    /// Whom to ask about the machine when a way is refused.
    pub(super) machine: Machine<'a>,
}

/// What causes are told apart by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine<'a> {
    pub(super) source: &'a dyn FactSource,
    pub(super) iface: Option<&'a dyn Iface>,
}

impl Machine<'_> {
    /// The facts, and what kept the device from being found among those of its iface.
    #[cold]
    fn facts(&self, device: Option<DeviceId>, nic: &Nic) -> (Facts, Option<Error>) {
        match self.bus_id(device) {
            Ok(bus_id) => (self.source.facts(bus_id.as_deref(), nic), None),
            Err(error) => (self.source.facts(None, nic), Some(error)),
        }
    }

    fn bus_id(&self, device: Option<DeviceId>) -> Result<Option<String>> {
        let (Some(iface), Some(device)) = (self.iface, device) else { return Ok(None) };
        let known = iface.devices()?.into_iter().find(|known| known.id == device);
        Ok(known.and_then(|known| known.pci_bus_id))
    }
}

/// The same, of an iface that can be asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) asked: Asked<'a>,
    pub(super) iface: &'a Arc<dyn Iface>,
}

impl<'a> Deref for Subject<'a> {
    type Target = Asked<'a>;

    fn deref(&self) -> &Asked<'a> {
        &self.asked
    }
}

impl<'a> Subject<'a> {
    fn imports(&self) -> Imports {
        self.provider.attr().imports
    }

    pub(super) fn exports(&self) -> Exports<'a> {
        Exports::new(&**self.iface, self.request.ranges)
    }

    /// Takes one way.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    pub(super) unsafe fn take(
        &self,
        way: Way,
        exports: &mut Exports<'_>,
    ) -> Result<Taken, Refusal> {
        let nic = &self.provider.attr().nic;
        let registered = match way {
            Way::HostPages => {
                let backing = Backing::Host { owned: self.request.owned };
                let pieces = self.pieces(|_| backing.clone());
                // SAFETY: passed on to the caller.
                unsafe { self.register(&pieces) }
            }
            Way::DmaBuf(mapping) => {
                // SAFETY: passed on to the caller.
                return unsafe { self.take_dma_bufs(mapping, exports) };
            }
            Way::PeerMemory => {
                let mut pieces = Vec::with_capacity(self.request.ranges.len());
                for range in self.request.ranges {
                    let export = self.iface.export_peer_memory(*range, nic).map_err(|error| {
                        Refusal::new(Step::Export, format!("export_peer_memory({range})"), error)
                    })?;
                    let backing = Backing::PeerMemory { address: export.address };
                    pieces.push(Piece { range: *range, backing });
                }
                // SAFETY: passed on to the caller.
                unsafe { self.register(&pieces) }
            }
            Way::Staged => {
                let pieces = self.pieces(|range| {
                    // SAFETY: the caller keeps the memory while it is registered, and the provider
                    // does not use the range after that, as `ProviderDomain` promises.
                    let staged = unsafe { StagedRange::new(Arc::clone(self.iface), range) };
                    Backing::Staged(Arc::new(staged))
                });
                // SAFETY: passed on to the caller.
                unsafe { self.register(&pieces) }
            }
        };
        match registered {
            Ok(region) => Ok(Taken { region, spread: None, refused: Vec::new() }),
            Err(error) => Err(Refusal::new(Step::Register, way.registering(), error)),
        }
    }

    /// Registers from one dma-buf for each range; from one for each physical segment where the
    /// driver or the NIC refuses that.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    unsafe fn take_dma_bufs(
        &self,
        mapping: DmaBufMapping,
        exports: &mut Exports<'_>,
    ) -> Result<Taken, Refusal> {
        let nic = &self.provider.attr().nic;
        let mut refused = Vec::new();
        let mut grain = Grain::Range;
        loop {
            let laid = exports.pieces(mapping, grain, nic);
            let Laid { pieces, spread, refused: by_driver } = match laid {
                Ok(laid) => laid,
                Err(mut refusal) => {
                    refused.append(&mut refusal.before);
                    return Err(Refusal { before: refused, ..refusal });
                }
            };
            refused.extend(by_driver);
            // SAFETY: passed on to the caller.
            let error = match unsafe { self.register(&pieces) } {
                Ok(region) => return Ok(Taken { region, spread, refused }),
                Err(error) => error,
            };
            let call = Way::DmaBuf(mapping).registering_as(spread);
            let also = exports.refused(mapping, grain);
            let refusal = Refusal { also, ..Refusal::new(Step::Register, call, error) };
            if !spread.is_some_and(Spread::spans) || refusal.is_about_the_request() {
                return Err(Refusal { before: refused, ..refusal });
            }
            refused.push(refusal);
            grain = Grain::Segment;
        }
    }

    fn pieces<'b>(&self, backing: impl Fn(AddressRange) -> Backing<'b>) -> Vec<Piece<'b>> {
        self.request
            .ranges
            .iter()
            .map(|range| Piece { range: *range, backing: backing(*range) })
            .collect()
    }

    /// # Safety
    /// As [`ProviderDomain::register`].
    unsafe fn register(&self, pieces: &[Piece<'_>]) -> Result<ProviderRegion> {
        // SAFETY: passed on to the caller.
        unsafe { self.provider.register(&self.request.registration, pieces) }
    }
}

/// One decision under way.
#[derive(Debug)]
pub(super) struct Trial<'a> {
    asked: Asked<'a>,
    attempts: Vec<Attempt>,
    /// Read at the first refusal.
    facts: Option<Facts>,
    /// Whether a driver refused a way, and not only the NIC's list of imports.
    pub(super) refused_by_driver: bool,
    /// Whether some refusal may be gone the next time.
    pub(super) may_pass: bool,
    /// Whether no other way needs to be tried.
    pub(super) request_refused: bool,
    /// Whether the driver does not export under the mapping that every driver has: no other
    /// mapping is at fault then.
    default_lacking: bool,
    /// How the segments lie in the way that worked, where a range has several.
    pub(super) spread: Option<Spread>,
}

impl<'a> Trial<'a> {
    pub(super) fn new(asked: Asked<'a>) -> Self {
        Self {
            asked,
            attempts: Vec::new(),
            facts: None,
            refused_by_driver: false,
            may_pass: false,
            request_refused: false,
            default_lacking: false,
            spread: None,
        }
    }

    /// Tries the direct ways in order, but for one that was tried already.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    pub(super) unsafe fn direct(
        &mut self,
        subject: &Subject<'_>,
        exports: &mut Exports<'_>,
        tried: Option<Way>,
    ) -> Option<(Way, ProviderRegion)> {
        let imports = subject.imports();
        if !imports.dma_buf {
            self.lacks(Path::DmaBuf, "dma-buf");
        }
        let pcie = subject
            .iface
            .dma_buf()
            .is_some_and(|exporter| exporter.mappings().contains(&DmaBufMapping::Pcie));
        let mut mappings = mappings(imports.pcie_mapping_first, pcie).to_vec();
        if let Some(existing) = exports.existing() {
            // One export for all NICs: another mapping only where this one is refused.
            mappings.retain(|mapping| *mapping != existing);
            mappings.insert(0, existing);
        }
        let dma_bufs = mappings.into_iter().filter(|_| imports.dma_buf).map(Way::DmaBuf);
        let ways: Vec<_> = dma_bufs.chain(imports.peer_memory.then_some(Way::PeerMemory)).collect();
        for way in ways {
            if tried == Some(way) {
                continue;
            }
            // SAFETY: passed on to the caller.
            match unsafe { subject.take(way, exports) } {
                Ok(taken) => return Some((way, self.taken(way, taken))),
                Err(refusal) => self.refuse(way, refusal),
            }
            if self.request_refused {
                return None;
            }
        }
        if !imports.peer_memory {
            self.lacks(Path::PeerMemory, "peer memory");
        }
        None
    }

    /// Stages copies.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    pub(super) unsafe fn staged(
        &mut self,
        subject: &Subject<'_>,
        exports: &mut Exports<'_>,
    ) -> Option<ProviderRegion> {
        if !subject.imports().staged {
            self.lacks(Path::Staged, "staged copies");
            return None;
        }
        // SAFETY: passed on to the caller.
        match unsafe { subject.take(Way::Staged, exports) } {
            Ok(taken) => Some(taken.region),
            Err(refusal) => {
                self.refuse(Way::Staged, refusal);
                None
            }
        }
    }

    fn lacks(&mut self, path: Path, what: &'static str) {
        let error = Error::new(ErrorKind::Unsupported, "import")
            .provider(self.asked.provider.attr().nic.to_string())
            .context("what", what)
            .remedy("use a NIC and driver that have it");
        let mapping = DmaBufMapping::Default;
        let cause = self.cause(path, Step::Import, mapping, &error);
        tracing::debug!(%path, %error, "path not there");
        self.attempts.push(explained(Attempt::lacking(path, error), cause));
    }

    fn cause(
        &mut self,
        path: Path,
        step: Step,
        mapping: DmaBufMapping,
        error: &Error,
    ) -> Option<&'static Cause> {
        let Asked { request, kind, provider, machine, .. } = self.asked;
        let facts = match self.facts.take() {
            Some(facts) => facts,
            None => {
                let (facts, refused) = machine.facts(request.owner.device, &provider.attr().nic);
                self.attempts
                    .extend(refused.map(|error| Attempt::refused(path, "devices()", error)));
                facts
            }
        };
        let facts = self.facts.insert(facts);
        let iface = request.owner.iface;
        cause::probable(&Circumstance { path, step, iface, kind, mapping, error }, facts)
    }

    /// Writes the refusal of a way down.
    pub(super) fn refuse(&mut self, way: Way, refusal: Refusal) {
        self.refused_by_driver = true;
        self.may_pass |= !refusal.lasts();
        self.request_refused |= refusal.is_about_the_request();
        self.write(way, refusal);
    }

    /// Writes down what was refused of a way that worked nevertheless, and returns its region.
    pub(super) fn taken(&mut self, way: Way, taken: Taken) -> ProviderRegion {
        taken.refused.into_iter().for_each(|refusal| self.write(way, refusal));
        self.spread = taken.spread;
        taken.region
    }

    fn write(&mut self, way: Way, refusal: Refusal) {
        let lacking = refusal.step == Step::Export && refusal.is_lacking();
        let Refusal { step, call, error, before, also, .. } = refusal;
        before.into_iter().for_each(|refusal| self.write(way, refusal));
        let mapping = if self.default_lacking { DmaBufMapping::Default } else { way.mapping() };
        let cause = self.cause(way.path(), step, mapping, &error);
        if lacking && way == Way::DmaBuf(DmaBufMapping::Default) {
            self.default_lacks(cause);
        }
        let attempt = explained(Attempt::refused(way.path(), call, error), cause);
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

    /// The driver exports under no mapping: the cause of that is the cause of what was said of
    /// another mapping before.
    fn default_lacks(&mut self, cause: Option<&'static Cause>) {
        self.default_lacking = true;
        for attempt in &mut self.attempts {
            if attempt.cause_name != Some(NO_PCIE_MAPPING) {
                continue;
            }
            let remedy = attempt.error.as_ref().and_then(Error::remedy_text).map(str::to_owned);
            attempt.cause_name = cause.map(|cause| cause.name);
            attempt.cause = cause.map(|cause| cause.cause.to_owned());
            attempt.remedy = cause.map(|cause| cause.remedy.to_owned()).or(remedy);
        }
    }

    /// Writes down what went wrong without changing the way.
    pub(super) fn note(&mut self, attempts: Vec<Attempt>) {
        self.attempts.extend(attempts);
    }

    /// What was tried.
    pub(super) fn into_attempts(self) -> Vec<Attempt> {
        self.attempts
    }

    /// The decision for a way that worked.
    pub(super) fn decision(mut self, way: Way, reason: &str) -> Decision {
        self.attempts.push(way.success(self.spread));
        self.recorded(way, reason)
    }

    /// The decision for a way whose success is written down already.
    pub(super) fn recorded(self, way: Way, reason: &str) -> Decision {
        let request = self.asked.request;
        let decision = Decision {
            path: way.path(),
            reason: reason.into(),
            iface: request.owner.iface,
            device: request.owner.device,
            nic: self.asked.provider.attr().nic.to_string(),
            policy: self.asked.policy,
            mapping: way.mapping(),
            remembered: false,
            attempts: self.attempts.into(),
        };
        tracing::debug!(%decision, "path decided");
        decision
    }

    /// No way is left: the kind of the last refusal, with the whole trace.
    pub(super) fn exhausted(self, why: &'static str, remedy: &'static str) -> Error {
        let trace = Trace::from(self.attempts);
        let request = self.asked.request;
        let kind = trace.refusal().map_or(ErrorKind::Unsupported, Error::kind);
        let mut error = Error::new(kind, "path")
            .iface(request.owner.iface)
            .provider(self.asked.provider.attr().nic.to_string())
            .context("range", request.ranges[0])
            .context("policy", self.asked.policy)
            .context("why", why)
            .remedy(remedy)
            .with_trace(trace);
        if let Some(device) = request.owner.device {
            error = error.device(device);
        }
        error
    }
}

fn explained(attempt: Attempt, cause: Option<&'static Cause>) -> Attempt {
    match cause {
        Some(cause) => attempt.because(cause.name, cause.cause, cause.remedy),
        None => attempt,
    }
}

/// Mappings in the order to try them (HM-09).
fn mappings(pcie_first: bool, has_pcie: bool) -> &'static [DmaBufMapping] {
    if pcie_first && has_pcie {
        &[DmaBufMapping::Pcie, DmaBufMapping::Default]
    } else {
        &[DmaBufMapping::Default]
    }
}
