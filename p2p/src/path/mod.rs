//! Which way a NIC gets at memory: plain host, dma-buf, peer memory, or staged copies.
//!
//! Ways are tried, not guessed: each attempt registers, and a refusal is recorded with its error,
//! probable cause and remedy before the next way is tried. What worked is tried first the next time
//! for the same iface, device, kind of memory, NIC and policy, and is forgotten when it fails. One
//! odd buffer demotes nobody: where a way was refused, a page of the same kind is registered and
//! given back, and only what that page showed is remembered.
//!
//! [`Paths::explain`] says what would be decided without leaving anything registered.
//!
//! ```
//! use hmem_core::{Path, path::{P2pPolicy, PathDecider}, provider::Nic};
//! use hmem_p2p::path::Paths;
//!
//! let nic = Nic { provider: "loopback".into(), name: "loop0".into(), pci_bus_id: None };
//! let decision = Paths::new().plain_host(&nic);
//! assert_eq!(decision.path, Path::PlainHost);
//! ```

mod cache;
pub mod cause;
mod explain;
mod exports;
mod facts;
mod probe;
mod trial;

use std::{os::fd::BorrowedFd, sync::Arc};

use hmem_core::{
    AllocationKind, Decision, DmaBufOffset, IfaceKind, Path, Registry, Result,
    iface::DmaBufMapping,
    path::{Attempt, P2pPolicy, PathDecider, PathOutcome, PathRequest},
    provider::{Backing, Nic, Piece, ProviderAttr, ProviderDomain, ProviderRegion},
    registry::Owner,
};

use self::{
    cache::{Cache, Key},
    cause::Step,
    exports::{Exports, Spread},
    probe::{Shown, probe},
    trial::{Asked, Machine, Refusal, Subject, Trial, Way},
};
pub use self::{
    explain::{ExplainRequest, Explanation},
    facts::{FactSource, Facts, ThisMachine},
};

/// The path decision of this library, with the decisions made so far.
#[derive(Debug)]
pub struct Paths {
    disable_p2p: bool,
    facts: Arc<dyn FactSource>,
    cache: Cache,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            disable_p2p: false,
            facts: Arc::new(ThisMachine::default()),
            cache: Cache::default(),
        }
    }
}

impl Paths {
    /// Decides by the policy of each domain.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps device memory from every NIC, whatever the domains' policies
    /// (`FI_HMEM_DISABLE_P2P=1`).
    #[must_use]
    pub fn disable_p2p(mut self, disable: bool) -> Self {
        self.disable_p2p = disable;
        self
    }

    /// Takes facts about the machine from here, to name causes; [`ThisMachine`] unless said.
    #[must_use]
    pub fn facts(mut self, source: Arc<dyn FactSource>) -> Self {
        self.facts = source;
        self
    }

    /// Whether device memory is kept from every NIC.
    #[must_use]
    pub fn is_p2p_disabled(&self) -> bool {
        self.disable_p2p
    }

    /// What is tried first for memory of this owner on this NIC: the decision made earlier for its
    /// class, if there is one.
    ///
    /// Takes no lock and asks no driver.
    #[must_use]
    pub fn remembered(
        &self,
        owner: &Owner,
        nic: &ProviderAttr,
        policy: P2pPolicy,
    ) -> Option<Arc<Decision>> {
        let key = Key::new(owner.iface, owner.device, kind_of(owner), policy, nic);
        self.cache.decision(&key)
    }

    /// Forgets every decision, so that what changed on the machine (a module loaded, a limit
    /// raised) is found out.
    pub fn forget(&self) {
        self.cache.clear();
    }

    /// The same settings, and no decisions.
    fn without_memory(&self) -> Self {
        Self {
            disable_p2p: self.disable_p2p,
            facts: Arc::clone(&self.facts),
            cache: Cache::default(),
        }
    }

    #[inline]
    fn policy(&self, asked: P2pPolicy) -> P2pPolicy {
        if self.disable_p2p { P2pPolicy::Disabled } else { asked }
    }

    /// Takes the way that was remembered, or finds one and remembers it.
    ///
    /// # Safety
    /// As [`ProviderDomain::register`], for the ranges of the request.
    unsafe fn decide(
        &self,
        subject: Subject<'_>,
        exports: &mut Exports<'_>,
    ) -> Result<PathOutcome> {
        let request = subject.request;
        let attr = subject.provider.attr();
        let key =
            Key::new(request.owner.iface, request.owner.device, subject.kind, request.policy, attr);
        let mut tried = None;
        if let Some(decided) = self.cache.decided(&key) {
            let way = match (decided.way, exports.existing()) {
                // One export for all NICs, whichever mapping the first asked for.
                (Way::DmaBuf(_), Some(existing)) => Way::DmaBuf(existing),
                (way, _) => way,
            };
            // SAFETY: passed on to the caller.
            match unsafe { subject.take(way, exports) } {
                Ok(taken) => {
                    let mut trial = Trial::new(subject.asked);
                    let region = trial.taken(way, taken);
                    if !exports.shared {
                        trial.note(exports.close());
                    }
                    let decision = remembered_now(&decided.decision, way, trial);
                    return Ok(PathOutcome { region, decision: Some(decision) });
                }
                Err(refusal) => {
                    if way == decided.way && !refusal.own && !refusal.is_about_the_request() {
                        self.cache.slot(&key).forget(&decided);
                    }
                    tried = Some((way, refusal));
                }
            }
        }
        let span = tracing::debug_span!("path", iface = %request.owner.iface, device = ?request.owner.device.map(|id| id.0),
            kind = subject.kind.name(), nic = %attr.nic, policy = %subject.policy);
        let _entered = span.enter();
        let mut trial = Trial::new(subject.asked);
        let failed = tried.map(|(way, refusal)| {
            let own = refusal.own;
            trial.refuse(way, refusal);
            (way, own)
        });
        // SAFETY: passed on to the caller.
        let found = unsafe { ways_left(&subject, &mut trial, exports, failed.map(|(way, _)| way)) };
        if !exports.shared {
            trial.note(exports.close());
        }
        let (way, region) = match found {
            Ok(found) => found,
            Err((why, remedy)) => return Err(trial.exhausted(why, remedy)),
        };
        let learn = Learn {
            refused_by_driver: trial.refused_by_driver,
            own: failed.is_some_and(|(_, own)| own),
            spread: trial.spread.is_some(),
        };
        let decision = Arc::new(trial.decision(way, reason(way, &subject)));
        self.learn(&key, &subject, way, &decision, learn);
        Ok(PathOutcome { region, decision: Some(decision) })
    }

    /// Decides by a page, before anything is exported that several NICs are to share: what one of
    /// them can do is then not found out by an export of the range for it alone.
    fn decide_beforehand(&self, subject: &Subject<'_>) {
        let attr = subject.provider.attr();
        let owner = &subject.request.owner;
        let key = Key::new(owner.iface, owner.device, subject.kind, subject.request.policy, attr);
        let direct = subject.policy != P2pPolicy::Disabled && !subject.kind.cpu_accessible();
        if !direct || self.cache.decided(&key).is_some() {
            return;
        }
        let staged = attr.imports.staged && subject.policy != P2pPolicy::Required;
        match probe(subject) {
            Shown::Direct(way, decision) => {
                let decision = Decision { remembered: true, ..*decision };
                self.cache.slot(&key).remember(way, Arc::new(decision));
            }
            Shown::NoDirect(mut attempts) if staged => {
                attempts.push(Attempt::success(Path::Staged, Way::Staged.registering()));
                let mut trial = Trial::new(subject.asked);
                trial.note(attempts);
                let decision = trial.recorded(Way::Staged, reason(Way::Staged, subject));
                let decision = Decision { remembered: true, ..decision };
                self.cache.slot(&key).remember(Way::Staged, Arc::new(decision));
            }
            Shown::NoDirect(_) | Shown::Nothing => {}
        }
    }

    /// Remembers what holds for other buffers too.
    fn learn(
        &self,
        key: &Key<'_>,
        subject: &Subject<'_>,
        way: Way,
        decision: &Arc<Decision>,
        learn: Learn,
    ) {
        if !learn.refused_by_driver {
            let mut decision = Decision { remembered: true, ..Decision::clone(decision) };
            if learn.spread {
                decision.attempts = vec![way.success(None)].into();
            }
            return self.cache.slot(key).remember(way, Arc::new(decision));
        }
        if learn.own || !self.cache.slot(key).count_refused() {
            return;
        }
        match probe(subject) {
            Shown::Direct(way, decision) => {
                let decision = Decision { remembered: true, ..*decision };
                self.cache.slot(key).remember(way, Arc::new(decision));
            }
            Shown::NoDirect(mut attempts) if way == Way::Staged => {
                attempts.push(Attempt::success(way.path(), way.registering()));
                let attempts = attempts.into();
                let decision = Decision { remembered: true, attempts, ..Decision::clone(decision) };
                self.cache.slot(key).remember(way, Arc::new(decision));
            }
            Shown::NoDirect(_) | Shown::Nothing => {}
        }
    }
}

/// What a registration says about others of its class.
#[derive(Clone, Copy, Debug)]
struct Learn {
    /// A driver refused a way before one worked.
    refused_by_driver: bool,
    /// What was remembered holds still: the buffer itself could not take it.
    own: bool,
    /// It had ranges of several segments: how those went says nothing about others.
    spread: bool,
}

/// The remembered decision, or a copy where something is to be added: how ranges of several
/// segments went, exports that could not be given back, or that it was another mapping.
#[inline]
fn remembered_now(decision: &Arc<Decision>, way: Way, trial: Trial<'_>) -> Arc<Decision> {
    let spread = trial.spread;
    let attempts = trial.into_attempts();
    if attempts.is_empty() && spread.is_none() && decision.mapping == way.mapping() {
        Arc::clone(decision)
    } else {
        added_to(decision, way, attempts, spread)
    }
}

/// Under the mapping decided earlier, why that one still holds; under another, only what was done
/// now.
#[cold]
fn added_to(
    decision: &Decision,
    way: Way,
    now: Vec<Attempt>,
    spread: Option<Spread>,
) -> Arc<Decision> {
    let mapping = way.mapping();
    let remembered = decision.mapping == mapping;
    let earlier = decision.attempts.iter().filter(|attempt| remembered && attempt.error.is_some());
    let attempts: Vec<_> = earlier.cloned().chain(now).chain([way.success(spread)]).collect();
    Arc::new(Decision { mapping, remembered, attempts: attempts.into(), ..decision.clone() })
}

/// The ways that the policy leaves, but for one that was just refused.
///
/// # Safety
/// As [`ProviderDomain::register`], for the ranges of the request.
unsafe fn ways_left(
    subject: &Subject<'_>,
    trial: &mut Trial<'_>,
    exports: &mut Exports<'_>,
    tried: Option<Way>,
) -> Result<(Way, ProviderRegion), (&'static str, &'static str)> {
    const REFUSED: (&str, &str) = (
        "what was asked for was refused, whatever the way",
        "ask for something else, as the trace says",
    );
    if trial.request_refused {
        return Err(REFUSED);
    }
    if subject.kind.cpu_accessible() {
        if tried.is_none() {
            // SAFETY: passed on to the caller.
            match unsafe { subject.take(Way::HostPages, exports) } {
                Ok(taken) => return Ok((Way::HostPages, taken.region)),
                Err(refusal) => trial.refuse(Way::HostPages, refusal),
            }
        }
        return Err((
            "its host pages were refused",
            "see the trace: there is no other way to host pages",
        ));
    }
    if subject.policy == P2pPolicy::Disabled {
        if subject.off && subject.request.policy == P2pPolicy::Required {
            return Err((
                "direct access is required by the domain and switched off for the process",
                ALLOW_IN_PROCESS,
            ));
        }
        if tried.is_none() {
            // SAFETY: passed on to the caller.
            if let Some(region) = unsafe { trial.staged(subject, exports) } {
                return Ok((Way::Staged, region));
            }
        }
        return Err((
            "direct access to device memory is disabled, and staged copies were refused",
            allow(subject.off),
        ));
    }
    // SAFETY: passed on to the caller.
    if let Some(found) = unsafe { trial.direct(subject, exports, tried) } {
        return Ok(found);
    }
    if trial.request_refused {
        return Err(REFUSED);
    }
    if subject.policy == P2pPolicy::Required {
        return Err((
            "direct access is required and every way was refused",
            "make one of the ways in the trace work, or let the policy be Enabled, which stages copies",
        ));
    }
    if subject.policy == P2pPolicy::Preferred {
        tracing::warn!(range = %subject.request.ranges[0], "no direct path to device memory: staging copies");
    }
    if tried != Some(Way::Staged) {
        // SAFETY: passed on to the caller.
        if let Some(region) = unsafe { trial.staged(subject, exports) } {
            return Ok((Way::Staged, region));
        }
    }
    Err(("no direct way worked, nor did staged copies", "make one of the ways in the trace work"))
}

const ALLOW_IN_PROCESS: &str = "allow direct access again (unset FI_HMEM_DISABLE_P2P, or the builder's disable_p2p), or \
                                let the policy be Enabled, which stages copies";

/// What lets direct access be tried that was switched off.
pub(crate) const fn allow(by_process: bool) -> &'static str {
    if by_process {
        "unset FI_HMEM_DISABLE_P2P (or the builder's disable_p2p) to have direct access tried"
    } else {
        "let the domain's policy be Enabled to have direct access tried"
    }
}

fn reason(way: Way, subject: &Subject<'_>) -> &'static str {
    match (way, subject.kind) {
        (Way::DmaBuf(_), _) => "the device exports it and the NIC imports it",
        (Way::PeerMemory, _) => "a peer-memory client resolves the device address",
        (Way::Staged, _) if subject.policy != P2pPolicy::Disabled => "no direct way worked",
        (Way::Staged, _) if subject.request.policy == P2pPolicy::Disabled => {
            "direct access to device memory is disabled by the domain's policy"
        }
        (Way::Staged, _) => "direct access to device memory is disabled for the process",
        (Way::HostPages, AllocationKind::Managed) => {
            "managed memory migrates: its host pages are registered, not device memory"
        }
        (Way::HostPages, _) => "the device API's host memory consists of host pages",
    }
}

#[inline]
fn kind_of(owner: &Owner) -> AllocationKind {
    match owner.allocation {
        Some(allocation) => allocation.kind,
        None if owner.iface == IfaceKind::SYSTEM => AllocationKind::System,
        None => AllocationKind::Device,
    }
}

// SAFETY: the handle of an outcome is what the request's own provider returned for its ranges and
// rights. A way that fails has registered nothing, as `ProviderDomain` promises.
unsafe impl PathDecider for Paths {
    fn plain_host(&self, nic: &Nic) -> Decision {
        Decision {
            path: Path::PlainHost,
            reason: "host memory needs no export".into(),
            iface: IfaceKind::SYSTEM,
            device: None,
            nic: nic.to_string(),
            policy: P2pPolicy::Enabled,
            mapping: DmaBufMapping::Default,
            remembered: false,
            attempts: vec![Attempt::success(Path::PlainHost, "register(host pages)")].into(),
        }
    }

    unsafe fn register(
        &self,
        request: &PathRequest<'_>,
        registry: &Registry,
        provider: &dyn ProviderDomain,
    ) -> Result<PathOutcome> {
        if request.dma_buf.is_none() && request.owner.iface == IfaceKind::SYSTEM {
            // SAFETY: passed on to the caller.
            let region = unsafe { register_host(request, provider) }?;
            return Ok(PathOutcome { region, decision: None });
        }
        let policy = self.policy(request.policy);
        let machine = Machine { source: &*self.facts, iface: None };
        let asked = Asked {
            request,
            kind: kind_of(&request.owner),
            provider,
            policy,
            off: self.disable_p2p,
            machine,
        };
        if let Some((fd, offset)) = request.dma_buf {
            // SAFETY: passed on to the caller.
            return unsafe { given_dma_buf(asked, fd, offset) };
        }
        let iface = registry.get(request.owner.iface)?;
        let asked = Asked { machine: Machine { iface: Some(&**iface), ..machine }, ..asked };
        let subject = Subject { asked, iface };
        // SAFETY: passed on to the caller.
        unsafe { self.decide(subject, &mut subject.exports()) }
    }

    unsafe fn register_on(
        &self,
        requests: &[(PathRequest<'_>, &dyn ProviderDomain)],
        registry: &Registry,
        done: &mut Vec<PathOutcome>,
    ) -> Result<()> {
        let Some((first, _)) = requests.first() else { return Ok(()) };
        if first.dma_buf.is_some() || first.owner.iface == IfaceKind::SYSTEM {
            for (request, provider) in requests {
                // SAFETY: passed on to the caller.
                done.push(unsafe { self.register(request, registry, *provider) }?);
            }
            return Ok(());
        }
        let iface = registry.get(first.owner.iface)?;
        let mut exports = Exports::new(&**iface, first.ranges);
        for (at, (request, provider)) in requests.iter().enumerate() {
            let machine = Machine { source: &*self.facts, iface: Some(&**iface) };
            let (kind, policy) = (kind_of(&request.owner), self.policy(request.policy));
            let asked = Asked {
                request,
                kind,
                provider: *provider,
                policy,
                off: self.disable_p2p,
                machine,
            };
            let subject = Subject { asked, iface };
            self.decide_beforehand(&subject);
            // The last one gives the exports back, and writes down what went wrong with that.
            exports.shared = at + 1 < requests.len();
            // SAFETY: passed on to the caller.
            done.push(unsafe { self.decide(subject, &mut exports) }?);
        }
        Ok(())
    }
}

/// # Safety
/// As [`ProviderDomain::register`], for the ranges of the request.
unsafe fn register_host(
    request: &PathRequest<'_>,
    provider: &dyn ProviderDomain,
) -> Result<ProviderRegion> {
    let backing = Backing::Host { owned: request.owned };
    let pieces: Vec<_> = request
        .ranges
        .iter()
        .map(|range| Piece { range: *range, backing: backing.clone() })
        .collect();
    // SAFETY: passed on to the caller.
    unsafe { provider.register(&request.registration, &pieces) }
}

/// Memory that the application brought as a dma-buf: there is no other way to it.
///
/// # Safety
/// As [`ProviderDomain::register`], for the ranges of the request.
unsafe fn given_dma_buf(
    asked: Asked<'_>,
    fd: BorrowedFd<'_>,
    offset: DmaBufOffset,
) -> Result<PathOutcome> {
    let (request, way) = (asked.request, Way::DmaBuf(DmaBufMapping::Default));
    let mut trial = Trial::new(asked);
    if asked.policy == P2pPolicy::Disabled && request.owner.iface != IfaceKind::SYSTEM {
        return Err(trial.exhausted(
            "direct access is disabled, and a dma-buf can be reached in no other way",
            "allow direct access (the domain's policy, FI_HMEM_DISABLE_P2P), or bring the memory by address instead of by \
             dma-buf",
        ));
    }
    let piece = Piece { range: request.ranges[0], backing: Backing::DmaBuf { fd, offset } };
    // SAFETY: passed on to the caller.
    match unsafe { asked.provider.register(&request.registration, &[piece]) } {
        Ok(region) => {
            let decision = trial.decision(way, "the application brought the dma-buf");
            Ok(PathOutcome { region, decision: Some(Arc::new(decision)) })
        }
        Err(error) => {
            let call = format!("register(dma-buf offset {offset})");
            trial.refuse(way, Refusal::new(Step::Register, call, error));
            Err(trial.exhausted(
                "the dma-buf was refused",
                "see the trace: a dma-buf can be reached in no other way",
            ))
        }
    }
}
