//! Path decisions: the choice of how a NIC reaches a buffer (plain host, dma-buf, peer memory or
//! staged copies).
//!
//! The selector tries paths by registering the buffer over them. It records a refusal with its
//! error, probable cause and remedy before it tries the next path. It remembers a path that worked
//! and tries it first for the same iface, device, kind of memory, NIC, policy and list of direct
//! paths. It forgets a path that fails.
//!
//! A single unusual buffer does not change the path of other buffers. After a refusal the selector
//! may register and close a page of the same kind. It then remembers only the result of that page.
//!
//! [`DefaultPathSelector::explain`] shows a decision and leaves nothing registered.
//!
//! Layers, lower ones first: `cgroup`, [`cause`], `facts`, `variant`, `exports`, `search`, `probe`,
//! `reach`, `dma_buf`, `decisions`, this file, `explain`.
//!
//! ```
//! use hmem_core::{Path, path::PathSelector, provider::Nic};
//! use hmem_p2p::path::DefaultPathSelector;
//!
//! let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
//! let decision = DefaultPathSelector::new().plain_host(&nic);
//! assert_eq!(decision.path, Path::PlainHost);
//! ```

pub mod cause;
mod cgroup;
mod decisions;
mod dma_buf;
mod explain;
mod exports;
mod facts;
mod probe;
mod reach;
mod search;
mod variant;

use std::sync::Arc;

use hmem_core::{
    AllocationKind, Decision, Error, ErrorKind, IfaceKind, Path, Result,
    cause::{RequestFacts, Step},
    iface::DmaBufMapping,
    path::{DirectPath, ExportUnit, P2pPolicy, PathRegistration, PathSelector, Target},
    provider::{Nic, ProviderAttr, ProviderDomain, ProviderRegion},
    registration::{RegisteredMemory, Registration},
    registry::AddressOwner,
};

use self::{
    cause::host_causes,
    decisions::{Decided, DecisionTable, Key, Settings},
    dma_buf::register_dma_buf,
    exports::ExportSet,
    probe::{ProbeResult, probe},
    reach::{ReachTable, check_reach},
    search::{PathSearch, Reach, kind_of},
    variant::{ExportShape, PathVariant},
};
pub use self::{
    explain::{ExplainRequest, Explanation},
    facts::{FactSource, LocalMachine},
};
pub use hmem_core::{ProbableCause, cause::Facts};

/// The library's path selector. It remembers its decisions for later registrations.
#[derive(Debug)]
pub struct DefaultPathSelector {
    disable_p2p: bool,
    facts: Arc<dyn FactSource>,
    decisions: DecisionTable,
    reached: ReachTable,
}

impl Default for DefaultPathSelector {
    fn default() -> Self {
        Self {
            disable_p2p: false,
            facts: Arc::new(LocalMachine::default()),
            decisions: DecisionTable::default(),
            reached: ReachTable::default(),
        }
    }
}

impl DefaultPathSelector {
    /// Creates a selector that follows the policy of each domain.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether direct access to device memory is forbidden for every NIC, as libfabric's
    /// variable `FI_HMEM_DISABLE_P2P=1` does. The selector does not read the variable. The setting
    /// overrides the policies of domains.
    #[must_use]
    pub fn disable_p2p(mut self, disable: bool) -> Self {
        self.disable_p2p = disable;
        self
    }

    /// Sets the source of facts about the machine. The selector uses them to name the cause of a
    /// refusal. The default is [`LocalMachine`].
    #[must_use]
    pub fn facts(mut self, source: Arc<dyn FactSource>) -> Self {
        self.facts = source;
        self
    }

    /// Returns the remembered decision for the owner's memory on the NIC, if there is one.
    /// Registrations of domains with these settings try the path of that decision first. Calls no
    /// driver.
    #[must_use]
    pub fn remembered(
        &self,
        owner: &AddressOwner,
        nic: &ProviderAttr,
        policy: P2pPolicy,
        direct_paths: Option<&[DirectPath]>,
        reach_check: bool,
    ) -> Option<Arc<Decision>> {
        let kind = kind_of(owner);
        let settings = Settings { policy, direct_paths, reach_check };
        let key = Key::new(owner.iface, owner.device, kind, settings, nic);
        self.decisions.get(&key).map(|decided| decided.decision)
    }

    /// Forgets every decision and every reach check. Later registrations then notice changes of the
    /// machine, such as a loaded module or a raised limit.
    pub fn forget(&self) {
        self.decisions.clear();
        self.reached.clear();
    }

    /// Returns the result of the reach check for the device and NIC of `search` over the direct
    /// path `variant`. The first call runs the check.
    fn reach(&self, search: &PathSearch<'_>, variant: PathVariant) -> Reach {
        self.reached.get(search, variant).unwrap_or_else(|| {
            let reach = check_reach(search, variant);
            self.reached.store(search, variant, &reach);
            reach
        })
    }

    /// Returns the facts about the machine and the request of `target`. `device` is the PCI bus id
    /// of the device that owns the memory, if it has one.
    fn facts_of(&self, target: Target<'_>, device: Option<&str>) -> Facts {
        let Target { registration, provider } = target;
        let page = rustix::param::page_size() as u64;
        let pages = registration.ranges.iter().fold(0, |sum: u64, range| {
            sum.saturating_add((range.start().0 % page).saturating_add(range.len()).div_ceil(page))
        });
        let request = RequestFacts {
            len: pages.saturating_mul(page),
            access: registration.access,
            regions: provider.live().regions,
            max_regions: provider.attr().max_mr_count,
        };
        Facts { request: Some(request), ..self.facts.facts(device, &provider.attr().nic) }
    }

    /// Registers over the remembered path. If no path is remembered, or if the remembered path is
    /// refused, searches for a path and passes the result to [`learn`](Self::learn).
    fn decide(
        &self,
        mut search: PathSearch<'_>,
        exports: &mut ExportSet<'_>,
    ) -> Result<PathRegistration> {
        let key = key_of(&search);
        let mut failed = None;
        // All domains share the decisions. So the remembered path may need driver calls that this
        // domain forbids.
        let decided = self.decisions.get(&key).filter(|decided| search.permits(decided.variant));
        if let Some(decided) = decided {
            let variant = match (decided.variant, exports.existing()) {
                // All NICs share one export, under the dma-buf mapping that the first NIC used.
                (PathVariant::DmaBuf(_), Some(existing))
                    if search.registration.direct_paths.is_none()
                        && !search.registration.reach_check
                        && !decided.own_mapping =>
                {
                    PathVariant::DmaBuf(existing)
                }
                (variant, _) => variant,
            };
            search.first_unit = decided.decision.unit;
            match search.take(variant, exports) {
                Ok(taken) => {
                    let region = search.taken(variant, taken);
                    if !exports.shared {
                        search.attempts.extend(exports.close());
                    }
                    let shape = search.shape;
                    // The units also differ if the remembered unit would export no more than the
                    // ranges of this buffer: the search then skips that unit. Only a refusal
                    // replaces the remembered unit.
                    let replaces = search.exports_refused
                        && shape.unit != decided.decision.unit
                        && variant == decided.variant;
                    let decision = remembered_now(&decided.decision, variant, search);
                    if replaces {
                        let decision = Decision::clone(&decision);
                        self.remember_shape(&key, variant, decided.own_mapping, decision, shape);
                    }
                    return Ok(PathRegistration { region, decision: Some(decision) });
                }
                Err(refusal) => {
                    if variant == decided.variant
                        && !refusal.only_this_buffer
                        && !refusal.is_about_the_request()
                    {
                        self.decisions.remove(&key, &decided);
                    }
                    failed = Some((variant, refusal));
                }
            }
        }
        let span = tracing::debug_span!(
            "path",
            iface = %search.iface_name(),
            device = ?search.owner.device.map(|id| id.0),
            kind = search.kind.name(),
            nic = %search.attr().nic,
            policy = %search.policy,
        );
        let _entered = span.enter();
        let mut tried = None;
        let mut only_this_buffer = false;
        if let Some((variant, refusal)) = failed {
            tried = Some(variant);
            only_this_buffer = refusal.only_this_buffer;
            search.refuse(variant, refusal);
        }
        let found = search_by_policy(&mut search, exports, tried);
        if !exports.shared || found.is_err() {
            search.attempts.extend(exports.close());
        }
        let (variant, region) = match found {
            Ok(found) => found,
            Err(why) => return Err(search.exhausted(why)),
        };
        let guard = DeregisterOnPanic { provider: search.provider, region };
        let decision = Arc::new(search.decision(variant, reason(variant, &search)));
        self.learn(&search, variant, &decision, only_this_buffer);
        std::mem::forget(guard);
        Ok(PathRegistration { region, decision: Some(decision) })
    }

    /// Probes with one page before a range is exported for several NICs. Without the probe, the
    /// selector would export the whole range only to test the paths of the first NIC.
    fn probe_beforehand(&self, search: &PathSearch<'_>) {
        let direct = search.policy != P2pPolicy::Disabled
            && search.registration.direct_paths != Some(&[])
            && !search.kind.cpu_accessible();
        if direct && self.decisions.get(&key_of(search)).is_none() {
            let staged = search.imports_staged()
                && search.registration.policy != P2pPolicy::Required
                && search.permits(PathVariant::Staged);
            self.remember_probe(search, staged);
        }
    }

    /// Probes with one page, and stores a path for later registrations: the direct path that works,
    /// or staged copies if no direct path can work and `staged` is true. Otherwise stores nothing.
    fn remember_probe(&self, search: &PathSearch<'_>, staged: bool) {
        let key = key_of(search);
        match probe(search) {
            ProbeResult::Direct(variant, decision) => {
                let decided = Decided::new(variant, search.has_own_mapping(), *decision);
                self.decisions.insert(&key, decided);
            }
            ProbeResult::NoDirect(attempts) if staged => {
                let variant = PathVariant::Staged;
                let reason = reason(variant, search);
                let decision =
                    search.decision_of(variant, reason, ExportShape::default(), attempts);
                self.decisions.insert(&key, Decided::new(variant, false, decision));
            }
            ProbeResult::NoDirect(_) | ProbeResult::Unknown => {}
        }
    }

    /// Stores a decision for later registrations of the same class and NIC. If the attempts of the
    /// decision depend on the physical segments of this registration's memory, replaces them by one
    /// successful attempt that does not name the segments.
    fn remember_shape(
        &self,
        key: &Key<'_>,
        variant: PathVariant,
        own_mapping: bool,
        mut decision: Decision,
        shape: ExportShape,
    ) {
        if shape.layout.is_some() {
            decision.attempts = vec![variant.success(ExportShape { layout: None, ..shape })].into();
        }
        self.decisions.insert(key, Decided::new(variant, own_mapping, decision));
    }

    /// Stores a path for later registrations of other buffers:
    ///
    /// - If the reach check of the path could not run, stores nothing.
    /// - If no driver refused a path, stores the path of this registration, `variant`.
    /// - If a refusal is known to concern only this buffer (`only_this_buffer`), stores nothing.
    /// - After any other refusal, stores the result of a probe with an ordinary page, if
    ///   [`DecisionTable::count_refused`] says that a probe is due. The refusal may concern only
    ///   this buffer.
    fn learn(
        &self,
        search: &PathSearch<'_>,
        variant: PathVariant,
        decision: &Decision,
        only_this_buffer: bool,
    ) {
        let key = key_of(search);
        if search.unchecked {
            return;
        }
        if !search.refused_by_driver {
            let own_mapping = search.has_own_mapping();
            self.remember_shape(&key, variant, own_mapping, decision.clone(), search.shape);
        } else if !only_this_buffer && self.decisions.count_refused(&key) {
            self.remember_probe(search, variant == PathVariant::Staged);
        }
    }
}

/// Guard that deregisters a region if a panic occurs before the caller gets the region's
/// handle.
struct DeregisterOnPanic<'a> {
    provider: &'a dyn ProviderDomain,
    region: ProviderRegion,
}

impl Drop for DeregisterOnPanic<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.provider.deregister(self.region) {
            tracing::error!(
                error = %error.full(),
                "a region whose registration panicked is left registered"
            );
        }
    }
}

fn key_of<'a>(search: &PathSearch<'a>) -> Key<'a> {
    let AddressOwner { iface, device, .. } = *search.owner;
    let Registration { policy, direct_paths, reach_check, .. } = *search.registration;
    let settings = Settings { policy, direct_paths, reach_check };
    Key::new(iface, device, search.kind, settings, search.attr())
}

/// Returns the decision that a registration over the remembered path reports. This is the
/// remembered `decision` itself, or a changed copy in these cases:
///
/// - The registration has ranges of several segments. The copy has their layout.
/// - The registration has attempts of its own: failed releases of exports, or refusals. The copy
///   has these attempts.
/// - The registration used another dma-buf mapping or unit of export. The copy names those.
///
/// A copy contains the remembered refusals only if the registration used the remembered mapping,
/// and no smaller unit of export than the remembered one.
fn remembered_now(
    decision: &Arc<Decision>,
    variant: PathVariant,
    search: PathSearch<'_>,
) -> Arc<Decision> {
    let (shape, now) = (search.shape, search.attempts);
    let (mapping, unit) = (variant.mapping(), shape.unit);
    let from_cache = decision.mapping == mapping;
    if now.is_empty() && shape.layout.is_none() && from_cache && decision.unit == unit {
        return Arc::clone(decision);
    }
    let keeps = from_cache && decision.unit <= unit;
    let earlier = decision.attempts.iter().filter(|attempt| keeps && attempt.error.is_some());
    let attempts: Vec<_> = earlier.cloned().chain(now).chain([variant.success(shape)]).collect();
    let decision = Decision::clone(decision);
    Arc::new(Decision { mapping, unit, from_cache, attempts: attempts.into(), ..decision })
}

/// The reason why no path is left to try, and a remedy.
type Exhausted = (&'static str, &'static str);

/// Tries the paths that the policy allows, in order. Skips `tried`, which the caller has already
/// tried.
fn search_by_policy(
    search: &mut PathSearch<'_>,
    exports: &mut ExportSet<'_>,
    tried: Option<PathVariant>,
) -> Result<(PathVariant, ProviderRegion), Exhausted> {
    const REFUSED: Exhausted =
        ("every path would refuse this request", "change the request as the trace says");
    if search.request_refused {
        return Err(REFUSED);
    }
    if search.kind.cpu_accessible() {
        if tried.is_none()
            && let Some(region) = search.try_path(PathVariant::HostPages, exports)
        {
            return Ok((PathVariant::HostPages, region));
        }
        return Err((
            "its host pages were refused",
            "see the trace: host pages have no other path",
        ));
    }
    if search.policy == P2pPolicy::Disabled {
        if search.selector.disable_p2p && search.registration.policy == P2pPolicy::Required {
            return Err((
                "direct access is required by the domain and disabled for the process",
                ALLOW_IN_PROCESS,
            ));
        }
        if tried.is_none()
            && let Some(region) = search.staged(exports)
        {
            return Ok((PathVariant::Staged, region));
        }
        return Err((
            "direct access to device memory is disabled, and staged copies were refused",
            allow(search.selector.disable_p2p),
        ));
    }
    if let Some(found) = search.direct(exports, tried) {
        return Ok(found);
    }
    if search.request_refused {
        return Err(REFUSED);
    }
    if search.policy == P2pPolicy::Required {
        return Err(match search.registration.direct_paths {
            None => (
                "direct access is required, and no direct path works",
                "make a path in the trace work, or set the policy to Enabled (staged copies)",
            ),
            Some(_) => (
                "direct access is required, and no direct path that the domain lists works",
                "list further paths in DomainAttr::direct_paths or HMEM_DIRECT_PATHS, make a path \
                 in the trace work, or set the policy to Enabled (staged copies)",
            ),
        });
    }
    if search.policy == P2pPolicy::Preferred {
        let range = search.registration.ranges[0];
        tracing::warn!(%range, "no direct path to device memory: staging copies");
    }
    if tried != Some(PathVariant::Staged)
        && let Some(region) = search.staged(exports)
    {
        return Ok((PathVariant::Staged, region));
    }
    Err((
        "every direct path and staged copies were refused",
        "make one of the paths in the trace work",
    ))
}

const ALLOW_IN_PROCESS: &str = "unset FI_HMEM_DISABLE_P2P (or the builder's disable_p2p) to allow \
                                direct access, or set the policy to Enabled, which stages copies";

/// Returns the remedy for forbidden direct access. `by_process` is true if the process forbids it,
/// and false if the policy does.
pub(crate) const fn allow(by_process: bool) -> &'static str {
    if by_process {
        "unset FI_HMEM_DISABLE_P2P (or the builder's disable_p2p) to try direct access"
    } else {
        "set the domain's policy to Enabled to try direct access"
    }
}

fn reason(variant: PathVariant, search: &PathSearch<'_>) -> &'static str {
    match (variant, search.kind) {
        (PathVariant::DmaBuf(_), _) => "the device exports it and the NIC imports it",
        (PathVariant::PeerMemory, _) => "a peer-memory client resolves the device address",
        (PathVariant::Staged, _) if search.policy != P2pPolicy::Disabled => {
            match search.registration.direct_paths {
                None => "every direct path was refused",
                Some([]) => "the domain lists no direct path",
                Some(_) => "every direct path that the domain lists was refused",
            }
        }
        (PathVariant::Staged, _) if search.registration.policy == P2pPolicy::Disabled => {
            "direct access to device memory is disabled by the domain's policy"
        }
        (PathVariant::Staged, _) => "direct access to device memory is disabled for the process",
        (PathVariant::HostPages, AllocationKind::Managed) => {
            "managed memory migrates: its host pages are registered, not device memory"
        }
        (PathVariant::HostPages, _) => "the device API's host memory consists of host pages",
    }
}

// SAFETY: the handle of a path registration is the handle that the target's provider returned for
// the target's ranges and rights. A path that fails has registered nothing, as `ProviderDomain`
// promises.
#[allow(unsafe_code, reason = "registers memory by address")]
unsafe impl PathSelector for DefaultPathSelector {
    fn plain_host(&self, nic: &Nic) -> Decision {
        Decision {
            path: Path::PlainHost,
            reason: "host memory needs no export".into(),
            iface: IfaceKind::SYSTEM,
            iface_name: IfaceKind::SYSTEM.into(),
            device: None,
            nic: nic.to_string(),
            policy: P2pPolicy::Enabled,
            direct_paths: None,
            mapping: DmaBufMapping::Default,
            unit: ExportUnit::Range,
            from_cache: false,
            attempts: vec![PathVariant::HostPages.success(ExportShape::default())].into(),
        }
    }

    fn explain_host(&self, target: Target<'_>, error: Error) -> Error {
        let causes = host_causes(Step::Register, &error, || self.facts_of(target, None));
        error.with_causes(causes)
    }

    unsafe fn register(
        &self,
        targets: &[Target<'_>],
        done: &mut dyn FnMut(PathRegistration),
    ) -> Result<()> {
        let mut exports = None;
        for (at, target) in targets.iter().enumerate() {
            match &target.registration.memory {
                RegisteredMemory::Device { iface, allocations, .. } => {
                    let exports = exports.get_or_insert_with(|| {
                        let Registration { ranges, exports, .. } = *target.registration;
                        ExportSet::new(iface, ranges, allocations, exports)
                    });
                    let owner = AddressOwner::of(&allocations[0]);
                    // SAFETY: the caller of this function upholds the same contract for each
                    // target.
                    let search = unsafe { PathSearch::new(self, *target, &owner, Some(*iface)) };
                    if targets.len() > 1 {
                        self.probe_beforehand(&search);
                    }
                    // The search for the last NIC releases the exports and records errors of the
                    // release.
                    exports.shared = at + 1 < targets.len();
                    done(self.decide(search, exports)?);
                }
                RegisteredMemory::DmaBuf { fd, offset, iface, device } => {
                    let kind = iface.map_or(IfaceKind::SYSTEM, |iface| iface.kind());
                    let owner = AddressOwner { iface: kind, device: *device, allocation: None };
                    // SAFETY: the caller of this function upholds the same contract for each
                    // target.
                    let search = unsafe { PathSearch::new(self, *target, &owner, *iface) };
                    done(register_dma_buf(search, *fd, *offset)?);
                }
                RegisteredMemory::Host { .. } | RegisteredMemory::Part { .. } => {
                    return Err(Error::new(ErrorKind::InvalidArgument, "path")
                        .context("range", target.registration.ranges[0])
                        .remedy(
                            "register host memory without a path: only device memory and dma-bufs \
                             need one",
                        ));
                }
            }
        }
        Ok(())
    }
}
