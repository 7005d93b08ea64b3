//! The search for a path: tries the paths that a policy allows, and records each attempt.

#![allow(unsafe_code, reason = "registers memory by address, on each path")]

use std::{cell::OnceCell, sync::Arc};

use hmem_core::{
    AddressRange, AllocationKind, Decision, Error, ErrorKind, Iface, IfaceKind, IfaceName, Path,
    ProbableCause, Result,
    cause::{CoherentLink, Facts, RefusalContext, Step},
    iface::DmaBufMapping,
    path::{Attempt, DirectPath, ExportUnit, P2pPolicy, Target, Trace},
    provider::{Backing, Nic, Piece, ProviderAttr, ProviderDomain, ProviderRegion},
    registration::{RegisteredMemory, Registration},
    registry::AddressOwner,
};

use super::{
    DefaultPathSelector,
    cause::{NO_PCIE_MAPPING, causes_of},
    exports::{Division, ExportSet, Exported, named},
    variant::{DmaBufLayout, ExportShape, PathRefusal, PathVariant},
};
use crate::topology::BusId;

/// A region that was registered over one path, with the earlier refusals of that path.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) region: ProviderRegion,
    pub(super) shape: ExportShape,
    /// Refusals of other exports of the same memory, which were tried before on this path.
    pub(super) refused: Vec<PathRefusal>,
}

/// The result of a reach check: a transfer between the NIC and a page of the device's memory.
#[derive(Clone, Debug)]
pub(super) enum Reach {
    /// The NIC read and wrote the page.
    Works,
    /// A transfer failed, or moved other bytes.
    Fails(Error),
    /// The check could not run.
    Unchecked(Error),
}

/// The error of a path whose refusal is already recorded in [`PathSearch::attempts`].
struct PathRefused;

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
    /// The policy of the domain, or `Disabled` if `selector` disables direct access.
    pub(super) policy: P2pPolicy,
    pub(super) selector: &'a DefaultPathSelector,
    /// Facts about the machine; `None` until the first refusal.
    facts: Option<Facts>,
    /// The attempts so far. The list also has the failed releases of exports, which do not affect
    /// the search.
    pub(super) attempts: Vec<Attempt>,
    /// The error kind of the last refusal by the iface or the NIC; `None` before the first refusal.
    /// If no path works, the error of the search has this kind.
    refused_with: Option<ErrorKind>,
    /// True if the iface or the NIC refused a path. Then the path of this search is not stored for
    /// other buffers without a probe. A path that the NIC does not list among its imports does not
    /// count as refused.
    pub(super) refused_by_driver: bool,
    /// True if a refusal may be temporary. A probe must then not conclude that no direct path
    /// works.
    pub(super) may_be_temporary: bool,
    /// True if the reach check of the chosen path could not run, so that the next registration must
    /// repeat it.
    pub(super) unchecked: bool,
    /// True if every path would refuse the request, so that the search ends.
    pub(super) request_refused: bool,
    /// True if the driver refused an export with the default mapping as unsupported. Then the PCIe
    /// mapping is not the cause if an export with it is refused too.
    default_refused: bool,
    /// The unit of exports that is tried first.
    pub(super) first_unit: ExportUnit,
    /// The exports of the chosen path.
    pub(super) shape: ExportShape,
    /// True if other exports of the memory were refused before those of the chosen path. The unit
    /// of the chosen path may then replace the remembered unit.
    pub(super) exports_refused: bool,
    /// The order of dma-buf mappings that suits NVLink-C2C ([`PathSearch::c2c_order`]); unset
    /// before the first use.
    c2c_order: OnceCell<Option<C2cOrder>>,
    /// The result of [`PathSearch::data_direct_first`]; unset before the first use.
    data_direct_first: OnceCell<bool>,
}

/// The order of dma-buf mappings for a device with NVLink-C2C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum C2cOrder {
    /// First the PCIe mapping: a PCIe switch or root port is above both the NIC and the device.
    PcieFirst,
    /// First the default mapping: the NIC reaches the device through the CPU and NVLink-C2C.
    DefaultFirst,
}

impl C2cOrder {
    const fn mappings(self) -> [DmaBufMapping; 2] {
        match self {
            Self::PcieFirst => [DmaBufMapping::Pcie, DmaBufMapping::Default],
            Self::DefaultFirst => [DmaBufMapping::Default, DmaBufMapping::Pcie],
        }
    }

    const fn reason(self) -> &'static str {
        match self {
            Self::PcieFirst => {
                "the PCIe mapping is tried first: the NIC and the device are below one PCIe \
                 switch, and the default mapping leads over NVLink-C2C"
            }
            Self::DefaultFirst => {
                "the default mapping is tried first: it leads over NVLink-C2C, and the NIC shares \
                 no PCIe switch with the device"
            }
        }
    }
}

impl<'a> PathSearch<'a> {
    /// Creates a search without attempts.
    ///
    /// # Safety
    /// The caller must uphold the safety contract of [`ProviderDomain::register`] for the
    /// registration of `target`. The conditions on pieces are excepted: the search creates the
    /// pieces.
    pub(super) unsafe fn new(
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
            policy: if selector.disable_p2p { P2pPolicy::Disabled } else { registration.policy },
            selector,
            facts: None,
            attempts: Vec::new(),
            refused_with: None,
            refused_by_driver: false,
            may_be_temporary: false,
            unchecked: false,
            request_refused: false,
            default_refused: false,
            first_unit: ExportUnit::Range,
            shape: ExportShape::default(),
            exports_refused: false,
            c2c_order: OnceCell::new(),
            data_direct_first: OnceCell::new(),
        }
    }

    pub(super) fn attr(&self) -> &'a ProviderAttr {
        self.provider.attr()
    }

    fn nic(&self) -> &'a Nic {
        &self.attr().nic
    }

    /// Registers the memory over the path `variant`. The NIC must support the path, and `exports`
    /// must have been created for the ranges of the registration.
    pub(super) fn take(
        &self,
        variant: PathVariant,
        exports: &mut ExportSet<'_>,
    ) -> Result<Taken, PathRefusal> {
        let pieces: Vec<_> = match variant {
            PathVariant::DmaBuf(mapping) => return self.take_dma_bufs(mapping, exports),
            PathVariant::HostPages => {
                let owned = matches!(
                    self.registration.memory,
                    RegisteredMemory::Device { owned: true, .. }
                );
                self.pieces(|_| Backing::Host { owned })
            }
            PathVariant::PeerMemory => exports.peer_memory(self.nic())?,
            PathVariant::Staged => self.pieces(|_| Backing::Staged { iface: exports.iface }),
        };
        // SAFETY: the caller of `new` upholds the conditions on the registration. Each piece is a
        // range of the registration. The NIC supports the path: `imports` has returned true, or the
        // path is remembered for a NIC with the same imports (`Key`).
        match unsafe { self.provider.register(self.registration, &pieces) } {
            Ok(region) => Ok(Taken { region, shape: ExportShape::default(), refused: Vec::new() }),
            Err(error) => {
                let call = variant.call(ExportShape::default());
                Err(PathRefusal::new(Step::Register, call, error))
            }
        }
    }

    /// Registers the memory as dma-bufs. Tries the divisions of the memory into exports in order,
    /// until the driver and the NIC accept one. A NIC registers only the ranges, however large the
    /// exports are.
    fn take_dma_bufs(
        &self,
        mapping: DmaBufMapping,
        exports: &mut ExportSet<'_>,
    ) -> Result<Taken, PathRefusal> {
        if mapping == DmaBufMapping::DataDirect {
            self.check_data_direct()?;
        }
        let mut refused: Vec<PathRefusal> = Vec::new();
        // True if the NIC refused a dma-buf of several segments.
        let mut spans = false;
        for division in Division::order(exports.unit_of(mapping).unwrap_or(self.first_unit)) {
            let last = refused.last();
            let wanted = match division {
                Division::Ranges => true,
                Division::Parts => spans,
                Division::Segments | Division::Allocations => {
                    last.is_none_or(PathRefusal::larger_may_help)
                        && exports.is_larger(mapping, division).unwrap_or_else(|refusal| {
                            refused.insert(refused.len().saturating_sub(1), refusal);
                            false
                        })
                }
            };
            if !wanted {
                continue;
            }
            let unit = division.unit();
            let of_unit = |refusal| PathRefusal { unit: Some(unit), ..refusal };
            let refusal = match exports.pieces(mapping, division, self.nic()) {
                Ok(Exported { pieces, shape, refused: by_driver }) => {
                    refused.extend(by_driver.into_iter().map(of_unit));
                    // SAFETY: the caller of `new` upholds the conditions on the registration.
                    // `ExportSet::pieces` returns the bytes of the ranges in their order. The NIC
                    // imports dma-bufs, as `take` explains.
                    match unsafe { self.provider.register(self.registration, &pieces) } {
                        Ok(region) => {
                            exports.store(mapping, division);
                            note_other_units(&mut refused, unit);
                            return Ok(Taken { region, shape, refused });
                        }
                        Err(error) => {
                            let call = PathVariant::DmaBuf(mapping).call(shape);
                            spans = division == Division::Ranges
                                && shape.layout.is_some_and(DmaBufLayout::spans);
                            let also = exports.refused(mapping, division);
                            PathRefusal { also, ..PathRefusal::new(Step::Register, call, error) }
                        }
                    }
                }
                Err(mut refusal) => {
                    refused.extend(refusal.before.drain(..).map(of_unit));
                    refusal
                }
            };
            let ends = refusal.is_about_the_request();
            refused.push(of_unit(refusal));
            if ends {
                break;
            }
        }
        let last = refused.pop().expect("the ranges are always tried");
        Err(PathRefusal { before: refused, ..last })
    }

    /// Refuses a range for Data Direct that does not begin at a page boundary. For Data Direct, the
    /// kernel requires two page boundaries: the offset of the first byte in the dma-buf, and the
    /// address by which peers name this byte.
    fn check_data_direct(&self) -> Result<(), PathRefusal> {
        let page = rustix::param::page_size() as u64;
        let unaligned = |range: &&AddressRange| !range.start().0.is_multiple_of(page);
        let Some(range) = self.registration.ranges.iter().find(unaligned) else { return Ok(()) };
        let error = Error::new(ErrorKind::Unsupported, "register")
            .provider(self.nic().to_string())
            .context("range", range)
            .context("page", page)
            .remedy("register memory that begins at a page boundary");
        let call = PathVariant::DmaBuf(DmaBufMapping::DataDirect).call(ExportShape::default());
        let refusal = PathRefusal::new(Step::Register, call, error);
        Err(PathRefusal { only_this_buffer: true, ..refusal })
    }

    fn pieces<'b>(&self, backing: impl Fn(AddressRange) -> Backing<'b>) -> Vec<Piece<'b>> {
        let ranges = self.registration.ranges.iter();
        ranges.map(|&range| Piece { range, backing: backing(range) }).collect()
    }

    /// Registers the memory over the path `variant`. Returns `None` and records the refusal if the
    /// iface or the NIC refuses the path.
    pub(super) fn try_path(
        &mut self,
        variant: PathVariant,
        exports: &mut ExportSet<'_>,
    ) -> Option<ProviderRegion> {
        match self.take(variant, exports) {
            Ok(taken) => Some(self.taken(variant, taken)),
            Err(refusal) => {
                self.refuse(variant, refusal);
                None
            }
        }
    }

    /// Returns the direct paths in the order that suits the NIC. `existing` is the dma-buf mapping
    /// with which the ranges are already exported.
    fn default_order(&self, existing: Option<DmaBufMapping>) -> Vec<DirectPath> {
        let first = self.attr().imports.pcie_mapping_first;
        let mut mappings = match self.c2c_order() {
            Some(order) => order.mappings().to_vec(),
            None if first == Some(true) && self.has_pcie_mapping() => {
                C2cOrder::PcieFirst.mappings().to_vec()
            }
            None => vec![DmaBufMapping::Default],
        };
        // All NICs share the exports with the dma-buf mapping `existing`, unless NVLink-C2C decides
        // the mapping. The search tries others only if `existing` is refused.
        if let Some(existing) = existing.filter(|_| self.c2c_order().is_none()) {
            mappings.retain(|mapping| *mapping != existing);
            mappings.insert(0, existing);
        }
        if self.data_direct_first() {
            mappings.insert(0, DmaBufMapping::DataDirect);
        }
        mappings.into_iter().map(DirectPath::DmaBuf).chain([DirectPath::PeerMemory]).collect()
    }

    /// Returns true if the search must try Data Direct first, because the NIC has a Data Direct
    /// function in the PCI domain of the device. Returns false in these cases:
    ///
    /// - The domain's list of direct paths decides the order, or the provider forbids the PCIe
    ///   mapping.
    /// - The iface does not have the PCIe mapping.
    /// - The PCI address of the device is not known.
    pub(super) fn data_direct_first(&self) -> bool {
        *self.data_direct_first.get_or_init(|| {
            let imports = self.attr().imports;
            let Some(domain) = imports.data_direct else { return false };
            let decided = self.registration.direct_paths.is_some()
                || imports.pcie_mapping_first == Some(false)
                || !self.has_pcie_mapping();
            if decided {
                return false;
            }
            let log = |error: &Error| tracing::debug!(%error, "the device's address is unknown");
            let device = self.bus_id().inspect_err(log).ok().flatten();
            device.and_then(|id| id.parse::<BusId>().ok()).is_some_and(|id| id.domain == domain)
        })
    }

    /// Returns true if NVLink-C2C or Data Direct decides the dma-buf mapping for the NIC. The NIC
    /// then does not use exports that another NIC made with another mapping.
    pub(super) fn has_own_mapping(&self) -> bool {
        self.c2c_order().is_some() || self.data_direct_first()
    }

    fn has_pcie_mapping(&self) -> bool {
        let exporter = self.iface.and_then(|iface| iface.dma_buf());
        exporter.is_some_and(|exporter| exporter.mappings().contains(&DmaBufMapping::Pcie))
    }

    /// Returns the order of dma-buf mappings if the device has NVLink-C2C. Returns `None` in these
    /// cases:
    ///
    /// - The device has no such link, or its PCI address is not known.
    /// - The domain's list of direct paths or the provider decides the order.
    /// - The NIC has no PCI address.
    /// - The iface does not have the PCIe mapping.
    pub(super) fn c2c_order(&self) -> Option<C2cOrder> {
        *self.c2c_order.get_or_init(|| {
            let decided = self.registration.direct_paths.is_some()
                || self.attr().imports.pcie_mapping_first.is_some()
                || self.nic().pci_bus_id.is_none()
                || !self.has_pcie_mapping();
            if decided {
                return None;
            }
            let log = |error: &Error| tracing::debug!(%error, "the device's address is unknown");
            let device = self.bus_id().inspect_err(log).ok()??;
            match self.selector.facts.coherent_link(&device, self.nic())? {
                CoherentLink::C2c { shares_switch: true } => Some(C2cOrder::PcieFirst),
                CoherentLink::C2c { shares_switch: false } => Some(C2cOrder::DefaultFirst),
                _ => None,
            }
        })
    }

    /// Tries the direct paths in order, except `tried`. Returns the region of the first path that
    /// works. Returns `None` if no path is left, or after an error that every path would give.
    pub(super) fn direct(
        &mut self,
        exports: &mut ExportSet<'_>,
        tried: Option<PathVariant>,
    ) -> Option<(PathVariant, ProviderRegion)> {
        let listed = self.registration.direct_paths;
        let order = match listed {
            Some(listed) => listed.to_vec(),
            None => self.default_order(exports.existing()),
        };
        let mut lacking = Vec::new();
        for path in order {
            let variant = PathVariant::from(path);
            // The mappings of a dma-buf are one import, except for Data Direct.
            let import = match variant {
                PathVariant::DmaBuf(mapping) if mapping != DmaBufMapping::DataDirect => {
                    PathVariant::DmaBuf(DmaBufMapping::Default)
                }
                variant => variant,
            };
            if lacking.contains(&import) || tried == Some(variant) {
                continue;
            }
            if !self.imports(variant) {
                lacking.push(import);
                continue;
            }
            let Ok(unchecked) = self.check_reach(variant) else { continue };
            if let Some(region) = self.try_path(variant, exports) {
                self.unchecked = unchecked.is_some();
                self.attempts.extend(unchecked);
                return Some((variant, region));
            }
            if self.request_refused {
                return None;
            }
        }
        for path in [Path::DmaBuf, Path::PeerMemory] {
            if listed.is_some_and(|listed| !lists(listed, path)) {
                self.not_listed(path);
            }
        }
        None
    }

    /// Checks that the NIC transfers bytes over the direct path `variant`, if the domain wants such
    /// checks. If the check fails, records the refusal of the path and returns an error. If the
    /// check cannot run, returns an attempt with the reason. The caller records this attempt if it
    /// registers the memory over the path.
    fn check_reach(&mut self, variant: PathVariant) -> Result<Option<Attempt>, PathRefused> {
        if !self.registration.reach_check {
            return Ok(None);
        }
        match self.selector.reach(self, variant) {
            Reach::Works => {
                self.attempts.push(Attempt::success(variant.path(), variant.check()));
                Ok(None)
            }
            Reach::Fails(error) => {
                let refusal = PathRefusal::new(Step::Transfer, variant.check(), error);
                self.refuse(variant, refusal);
                Err(PathRefused)
            }
            Reach::Unchecked(error) => {
                let error = self.named(error);
                Ok(Some(Attempt::refused(variant.path(), variant.check(), error)))
            }
        }
    }

    /// Returns true if the provider supports staged copies and the domain has transfers. Bytes are
    /// copied during transfers, so a domain without transfers cannot use staged memory.
    pub(super) fn imports_staged(&self) -> bool {
        self.attr().imports.staged && self.provider.transport().is_some()
    }

    /// Returns true if the NIC supports the path `variant`. If it does not, records a refusal and
    /// returns false.
    pub(super) fn imports(&mut self, variant: PathVariant) -> bool {
        let imports = self.attr().imports;
        let (is_imported, what) = match variant {
            PathVariant::HostPages => (true, "host memory"),
            PathVariant::DmaBuf(DmaBufMapping::DataDirect) => {
                (imports.dma_buf && imports.data_direct.is_some(), "dma-buf by Data Direct")
            }
            PathVariant::DmaBuf(_) => (imports.dma_buf, "dma-buf"),
            PathVariant::PeerMemory => (imports.peer_memory, "peer memory"),
            PathVariant::Staged => (self.imports_staged(), "staged copies"),
        };
        if !is_imported {
            let path = variant.path();
            let error = Error::new(ErrorKind::Unsupported, "import")
                .provider(self.nic().to_string())
                .context("why", what)
                .remedy("use a NIC and driver that support it");
            let causes = self.causes(path, Step::Import, variant.mapping(), &error);
            tracing::debug!(%path, %error, "the NIC does not have the path");
            let error = error.with_causes(causes);
            self.attempts.push(Attempt::not_tried(path, "import", error));
        }
        is_imported
    }

    /// Registers the memory as a region that is reached through staged copies. Returns `None` and
    /// records the refusal if the provider has no staged copies or refuses the region, or if the
    /// domain's transfers may not call drivers.
    pub(super) fn staged(&mut self, exports: &mut ExportSet<'_>) -> Option<ProviderRegion> {
        if !self.imports(PathVariant::Staged) {
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
        self.try_path(PathVariant::Staged, exports)
    }

    /// Returns false if transfers over the path `variant` need driver calls, which the domain
    /// forbids.
    pub(super) fn permits(&self, variant: PathVariant) -> bool {
        variant != PathVariant::Staged || self.registration.driver_calls_in_transfers
    }

    /// Records that the domain's list of direct paths leaves `path` out.
    fn not_listed(&mut self, path: Path) {
        let listed = self.registration.direct_paths.unwrap_or_default();
        let error = Error::new(ErrorKind::Unsupported, "direct_paths")
            .provider(self.nic().to_string())
            .context("why", "the domain's list of direct paths leaves it out")
            .context("direct_paths", DirectPath::list(listed))
            .remedy("add it to DomainAttr::direct_paths or HMEM_DIRECT_PATHS");
        tracing::debug!(%path, %error, "the domain does not list the path");
        self.attempts.push(Attempt::not_tried(path, "direct_paths", error));
    }

    fn causes(
        &mut self,
        path: Path,
        step: Step,
        mapping: DmaBufMapping,
        error: &Error,
    ) -> Vec<ProbableCause> {
        let facts = match self.facts.take() {
            Some(facts) => facts,
            None => {
                let bus_id = self.bus_id().unwrap_or_else(|error| {
                    let error = self.named(error);
                    self.attempts.push(Attempt::refused(path, "devices()", error));
                    None
                });
                let target = Target { registration: self.registration, provider: self.provider };
                self.selector.facts_of(target, bus_id.as_deref())
            }
        };
        let (facts, kind) = (&*self.facts.insert(facts), self.kind);
        let of_iface = self.iface.map_or(&[][..], |iface| iface.causes());
        let context = RefusalContext { path, step, kind, mapping, error };
        causes_of(of_iface, &context, || facts.clone())
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
        self.exports_refused = !taken.refused.is_empty();
        taken.refused.into_iter().for_each(|refusal| self.record(variant, refusal));
        self.shape = taken.shape;
        taken.region
    }

    fn record(&mut self, variant: PathVariant, refusal: PathRefusal) {
        let unsupported = refusal.step == Step::Export && refusal.is_unsupported();
        let PathRefusal { step, call, error, unit, before, also, .. } = refusal;
        before.into_iter().for_each(|refusal| self.record(variant, refusal));
        let mapping = match variant.mapping() {
            DmaBufMapping::DataDirect if matches!(step, Step::Register | Step::Transfer) => {
                DmaBufMapping::DataDirect
            }
            _ if self.default_refused => DmaBufMapping::Default,
            mapping => mapping.of_export(),
        };
        let causes = self.causes(variant.path(), step, mapping, &error);
        if unsupported && variant == PathVariant::DmaBuf(DmaBufMapping::Default) {
            self.default_is_refused(&causes);
        }
        self.refused_with = Some(error.kind());
        let error = self.named(error).with_causes(causes);
        let attempt = Attempt { unit, ..Attempt::refused(variant.path(), call, error) };
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

    /// Corrects the causes of earlier refusals of the PCIe mapping, because the driver refused the
    /// default mapping too. So the PCIe mapping is not the cause. The new causes are `causes`,
    /// those of the refused default mapping.
    fn default_is_refused(&mut self, causes: &[ProbableCause]) {
        self.default_refused = true;
        for attempt in &mut self.attempts {
            if attempt.cause_name == Some(NO_PCIE_MAPPING) {
                *attempt = attempt.clone().with_causes(causes.to_vec());
            }
        }
    }

    /// Records that the registration over `variant` succeeded, and returns the decision for this
    /// path. Moves the attempts of the search into the decision.
    pub(super) fn decision(&mut self, variant: PathVariant, reason: &str) -> Decision {
        let attempts = std::mem::take(&mut self.attempts);
        self.decision_of(variant, reason, self.shape, attempts)
    }

    /// Returns the decision for the path `variant`. Its attempts are `attempts` and the successful
    /// registration of the exports `shape`.
    pub(super) fn decision_of(
        &self,
        variant: PathVariant,
        reason: &str,
        shape: ExportShape,
        mut attempts: Vec<Attempt>,
    ) -> Decision {
        attempts.push(variant.success(shape));
        let order = self.order_reason();
        let decision = Decision {
            path: variant.path(),
            reason: order.map_or_else(|| reason.into(), |order| format!("{reason}; {order}")),
            iface: self.owner.iface,
            iface_name: self.iface_name(),
            device: self.owner.device,
            nic: self.nic().to_string(),
            policy: self.policy,
            direct_paths: self.registration.direct_paths.map(<[_]>::to_vec),
            mapping: variant.mapping(),
            unit: shape.unit,
            from_cache: false,
            attempts: attempts.into(),
        };
        tracing::debug!(%decision, "path decided");
        decision
    }

    /// Returns the reason for the order of the dma-buf mappings, if the search had one.
    fn order_reason(&self) -> Option<&'static str> {
        if self.data_direct_first.get() == Some(&true) {
            return Some(
                "Data Direct is tried first: the NIC's Data Direct function is in the PCI domain \
                 of the device",
            );
        }
        self.c2c_order.get().copied().flatten().map(C2cOrder::reason)
    }

    /// Returns the name of the memory's iface, for messages.
    pub(super) fn iface_name(&self) -> IfaceName {
        self.iface.map_or_else(|| self.owner.iface.into(), IfaceName::from)
    }

    /// Returns the error for a search in which every path was refused, with all attempts. The error
    /// has the kind of the last refusal by the iface or the NIC. Without such a refusal, it has the
    /// kind of [`Trace::refusal`], or `Unsupported` if no path was tried.
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

/// Returns true if a list of direct paths contains `path`.
pub(super) fn lists(listed: &[DirectPath], path: Path) -> bool {
    listed.iter().any(|listed| PathVariant::from(*listed).path() == path)
}

/// Changes the step of refusals of other units than `unit` to [`Step::ExportUnit`]. The export in
/// `unit` worked, so the exports in other units were refused only because of their size or place.
fn note_other_units(refused: &mut [PathRefusal], unit: ExportUnit) {
    for refusal in refused.iter_mut().filter(|refusal| refusal.unit != Some(unit)) {
        if matches!(refusal.step, Step::Export | Step::Register) {
            refusal.step = Step::ExportUnit;
        }
    }
}
