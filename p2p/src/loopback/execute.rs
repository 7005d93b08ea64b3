//! Executing a request: every check first, then the bytes.
//!
//! A transfer holds the regions of both sides from its first check until its last byte, so that deregistration
//! waits for it, and it finds all the bytes of both sides before it moves any.

use std::sync::Arc;

use hmem_core::{Access, Error, ErrorKind, MrMode, Result, transfer::PeerId};

use super::{
    Call,
    endpoint::{EndpointState, Recent, RecentKey, RecentPeer, canceled_request},
    few::Few,
    keys::{KnownGeneration, Token},
    memory::{self, DeviceMemory, Span},
    post::{KeyUse, LocalPart, Origin, RemotePart, Task, Work},
    region::{Body, Place},
    table::{Held, Refusal},
    window::BoundUse,
};

/// How far a request came.
pub(super) enum Outcome {
    /// It ended.
    Done(Result<u64>),
    /// The receiver has no room: try again later, and nothing behind it before.
    NotReady,
}

impl EndpointState {
    #[inline]
    pub(super) fn execute(self: &Arc<Self>, work: &Work, recent: &mut Recent) -> Outcome {
        let result = match &work.task {
            Task::Write(remote) => self.rma(work, remote, true, recent),
            Task::Read(remote) => self.rma(work, remote, false, recent),
            Task::Atomic(task) => self.atomic_transfer(work, task, recent),
            Task::Send { tag, invalidate } => return self.send(work, *tag, *invalidate, recent),
            Task::BindWindow(task) => self.bind_posted(task).map(|()| 0),
            Task::InvalidateWindow(window) => self.domain.invalidate_window(*window).map(|()| 0),
        };
        Outcome::Done(result)
    }

    /// The peer of a request, if it is still there.
    #[inline]
    pub(super) fn target<'r>(
        &self,
        work: &Work,
        recent: &'r mut RecentPeer,
    ) -> Result<&'r Arc<Self>> {
        self.peer(work.peer, recent).ok_or_else(|| unreachable_peer(work.peer))
    }

    fn rma(
        &self,
        work: &Work,
        remote: &Few<RemotePart>,
        write: bool,
        recent: &mut Recent,
    ) -> Result<u64> {
        let Recent { peer, key } = recent;
        let target = self.target(work, peer)?;
        if let (Few::One(near), Few::One(far)) = (&work.local, remote)
            && let Some(moved) = self.plain_rma(target, near, far, write, key)?
        {
            return Ok(moved);
        }
        let (local_right, remote_right) = rights(write);
        let near = LocalSide::hold(self, &work.local, local_right)?;
        let mut local = Few::None;
        near.spans(&work.local, &mut local)?;
        let far = RemoteSide::hold(self, target, remote.as_slice(), remote_right, key)?;
        let mut spans = Few::None;
        far.spans(remote.as_slice(), &mut spans)?;
        far.spend()?;
        self.domain.nic.config.faults.enter(Call::Transfer)?;
        let moved = if write {
            self.carry(target, (local.as_slice(), spans.as_slice()), local.as_slice())?
        } else {
            self.carry(target, (spans.as_slice(), local.as_slice()), local.as_slice())?
        };
        if write && moved > 0 {
            far.changed(spans.as_slice())?;
        }
        Ok(moved)
    }

    /// Copies a run of bytes from or to memory of `target`, through staging buffers where one side needs them. `own` is
    /// the side that is this endpoint's.
    pub(super) fn carry(
        &self,
        target: &Self,
        (from, to): (&[Span<'_>], &[Span<'_>]),
        own: &[Span<'_>],
    ) -> std::result::Result<u64, memory::Failed> {
        let staged = |spans: &[Span<'_>]| spans.iter().any(|span| span.staged().is_some());
        if !staged(from) && !staged(to) {
            return memory::copy(from, to).map_err(memory::Failed::on_the_wire);
        }
        let own = if staged(own) { self } else { target };
        let pool = own.domain.staging_pool().map_err(memory::Failed::on_the_wire)?;
        let canceled = || match (self.is_closed(), target.is_closed()) {
            (true, _) => Some(canceled_request()),
            (_, true) => Some(
                Error::new(ErrorKind::Unreachable, "transfer")
                    .provider("loopback")
                    .remedy("the peer's endpoint was closed in the middle of the transfer"),
            ),
            _ => None,
        };
        memory::pipe(from, to, &pool, canceled, || self.domain.nic.config.faults.enter(Call::Chunk))
    }

    /// A write or read from one run of bytes to another, where both regions are as simple as can be: the same checks
    /// as in [`EndpointState::rma`] without the lists. `None` where they are not that simple; nothing is done then.
    #[inline]
    fn plain_rma(
        &self,
        target: &Self,
        near: &LocalPart,
        far: &RemotePart,
        write: bool,
        recent: &mut RecentKey,
    ) -> Result<Option<u64>> {
        let (local_right, remote_right) = rights(write);
        if near.len == 0 || far.len != near.len {
            return Ok(None);
        }
        let local_region;
        let local = match near.origin {
            Origin::Host => Span::Kernel { at: near.address, len: near.len },
            Origin::Region(token) => {
                local_region = hold_local(self, token, local_right)?;
                match local_region.plain_span(Place::Address(near.address), near.len)? {
                    Some(span) => span,
                    None => return Ok(None),
                }
            }
            Origin::Device(_) => return Ok(None),
        };
        let hold = hold_key(self, target, far.key, remote_right, recent)?;
        if hold.window.is_some() {
            return Ok(None);
        }
        let Some(remote) = hold.region.plain_span(hold.region.place(far.address), far.len)? else {
            return Ok(None);
        };
        if !hold.region.spend() {
            return Err(refused_remote(Refusal::Dead));
        }
        self.domain.nic.config.faults.enter(Call::Transfer)?;
        let (from, to) = if write { (local, remote) } else { (remote, local) };
        memory::copy_span(from, to)?;
        Ok(Some(far.len))
    }
}

/// The rights that a write or read needs on the local and on the remote side.
const fn rights(write: bool) -> (Access, Access) {
    if write { (Access::WRITE, Access::REMOTE_WRITE) } else { (Access::READ, Access::REMOTE_READ) }
}

/// The local side of a transfer, held.
pub(super) struct LocalSide<'t> {
    holds: Few<LocalHold<'t>>,
}

enum LocalHold<'t> {
    Region(Held<'t>),
    Host,
    Device(DeviceMemory),
}

impl<'t> LocalSide<'t> {
    /// Holds the regions of the parts, which must grant `right`.
    #[inline]
    pub(super) fn hold(
        endpoint: &'t EndpointState,
        parts: &Few<LocalPart>,
        right: Access,
    ) -> Result<Self> {
        let mut holds = Few::None;
        for part in parts.iter() {
            holds.push(match part.origin {
                Origin::Region(token) => LocalHold::Region(hold_local(endpoint, token, right)?),
                Origin::Host => LocalHold::Host,
                Origin::Device(kind) => LocalHold::Device(DeviceMemory::new(Arc::clone(
                    endpoint.domain.registry.get(kind)?,
                ))),
            });
        }
        Ok(Self { holds })
    }

    /// Adds the bytes of the parts.
    #[inline]
    pub(super) fn spans<'a>(
        &'a self,
        parts: &Few<LocalPart>,
        into: &mut Few<Span<'a>>,
    ) -> Result<()> {
        for (hold, part) in self.holds.iter().zip(parts.iter()) {
            let (at, len) = (part.address, part.len);
            if len == 0 {
                continue;
            }
            match hold {
                LocalHold::Region(held) => held.spans(Place::Address(at), len, into)?,
                LocalHold::Host => into.push(Span::Kernel { at, len }),
                LocalHold::Device(memory) => into.push(Span::Far { at, len, memory }),
            }
        }
        Ok(())
    }
}

/// The remote side of a transfer, held.
pub(super) struct RemoteSide<'t> {
    holds: Few<RemoteHold<'t>>,
}

struct RemoteHold<'t> {
    region: Held<'t>,
    /// The window through which the region is reached.
    window: Option<BoundUse>,
}

impl<'t> RemoteSide<'t> {
    /// Holds what the keys of the parts name, which must grant `right` to `initiator` through `target`.
    #[inline]
    pub(super) fn hold(
        initiator: &EndpointState,
        target: &'t EndpointState,
        parts: &[RemotePart],
        right: Access,
        recent: &mut RecentKey,
    ) -> Result<Self> {
        let mut holds = Few::None;
        for part in parts {
            holds.push(hold_key(initiator, target, part.key, right, recent)?);
        }
        Ok(Self { holds })
    }

    /// Adds the bytes of the parts.
    #[inline]
    pub(super) fn spans<'a>(
        &'a self,
        parts: &[RemotePart],
        into: &mut Few<Span<'a>>,
    ) -> Result<()> {
        for (hold, part) in self.holds.iter().zip(parts) {
            if part.len == 0 {
                continue;
            }
            let place = match &hold.window {
                Some(window) => window.place(&hold.region, part.address, part.len)?,
                None => hold.region.place(part.address),
            };
            hold.region.spans(place, part.len, into)?;
        }
        Ok(())
    }

    /// Uses up single-use keys; a request that names one twice uses it once.
    #[inline]
    pub(super) fn spend(&self) -> Result<()> {
        let holds = self.holds.as_slice();
        for (at, hold) in holds.iter().enumerate() {
            let first = hold.window.is_none()
                && !holds[..at]
                    .iter()
                    .any(|other| other.window.is_none() && other.region.token == hold.region.token);
            if first && !hold.region.spend() {
                return Err(refused_remote(Refusal::Dead));
            }
        }
        Ok(())
    }

    /// Writes persistent memory back and counts a write or atomic, once for each region.
    #[inline]
    pub(super) fn changed(&self, spans: &[Span<'_>]) -> Result<()> {
        let holds = self.holds.as_slice();
        if holds.iter().all(|hold| hold.region.extended().is_none()) {
            return Ok(());
        }
        let extended =
            |hold: &'_ RemoteHold<'t>| hold.region.extended().map(|extended| extended.persistent);
        if holds.iter().any(|hold| extended(hold) == Some(true)) {
            for span in spans {
                span.persist()?;
            }
        }
        for (at, hold) in holds.iter().enumerate() {
            if holds[..at].iter().any(|other| other.region.token == hold.region.token) {
                continue;
            }
            if let Some(extended) = hold.region.extended() {
                for counter in extended.counters.read().iter() {
                    counter.add(1);
                }
            }
        }
        Ok(())
    }
}

/// Holds the region of a local descriptor.
#[inline]
fn hold_local(endpoint: &EndpointState, token: Token, right: Access) -> Result<Held<'_>> {
    let known = KnownGeneration::Whole(token.generation);
    let held = endpoint.domain.nic.table.hold(token.index, known, false).map_err(refused_local)?;
    if held.domain() != endpoint.domain.slot.id {
        return Err(refused_local(Refusal::Dead));
    }
    if !held.access().contains(right) {
        return Err(denied("local side", right));
    }
    check_endpoint(&held, endpoint)?;
    Ok(held)
}

/// Holds what one key names.
#[inline(always)]
fn hold_key<'t>(
    initiator: &EndpointState,
    target: &'t EndpointState,
    key: KeyUse,
    right: Access,
    recent: &mut RecentKey,
) -> Result<RemoteHold<'t>> {
    let domain = &target.domain;
    let table = &domain.nic.table;
    let (number, cookie) = if key.mapped {
        let parts =
            initiator.domain.mapped_key(key.number).ok_or_else(|| refused_remote(Refusal::Dead))?;
        (parts.key, Some(parts))
    } else if initiator.domain.mode.contains(MrMode::RAW) || domain.mode.contains(MrMode::RAW) {
        return Err(refused_remote(Refusal::Dead)
            .remedy("in RAW mode map the peer's raw key and use the mapped key"));
    } else {
        (key.number, None)
    };
    let held = if domain.requested_keys() {
        hold_requested(target, number, recent)
    } else {
        match domain.keys.open(number) {
            Some((index, known)) => table.hold(index, known, true).and_then(|held| {
                let ours = held.domain() == domain.slot.id && held.key == number;
                if ours { Ok(held) } else { Err(Refusal::Dead) }
            }),
            None => Err(Refusal::Dead),
        }
    };
    let held = match held {
        Ok(held) => held,
        Err(Refusal::Dead) if cookie.is_none() && domain.has_windows() => {
            let (region, window) = domain.hold_window(number, target, right)?;
            check_peer(initiator, target, &region)?;
            return Ok(RemoteHold { region, window: Some(window) });
        }
        Err(refusal) => return Err(refused_remote(refusal)),
    };
    if let Some(parts) = cookie
        && (domain.keys.cookie(number, held.token) ^ parts.cookie) & parts.mask != 0
    {
        return Err(refused_remote(Refusal::Dead));
    }
    if !held.access().contains(right) {
        return Err(denied("key", right));
    }
    check_peer(initiator, target, &held)?;
    Ok(RemoteHold { region: held, window: None })
}

/// Holds the region of a requested key.
#[inline]
fn hold_requested<'t>(
    target: &'t EndpointState,
    key: u64,
    recent: &mut RecentKey,
) -> Result<Held<'t>, Refusal> {
    let table = &target.domain.nic.table;
    if let Some((endpoint, number, token)) = *recent
        && (endpoint, number) == (target.id, key)
    {
        // As long as this life of the entry lasts, the key is its.
        match table.hold(token.index, KnownGeneration::Whole(token.generation), true) {
            Err(Refusal::Dead) => {}
            other => return other,
        }
    }
    let held = table.hold_requested(target.domain.slot.id, key, true)?;
    *recent = Some((target.id, key, held.token));
    Ok(held)
}

/// Checks that the initiator may reach the region through this endpoint.
#[inline]
fn check_peer(initiator: &EndpointState, target: &EndpointState, region: &Body) -> Result<()> {
    let extended = region.extended();
    let auth_key =
        extended.and_then(|extended| extended.auth_key.as_ref()).unwrap_or(&target.domain.auth_key);
    let agree = (auth_key.0.is_empty() && initiator.auth_key.0.is_empty())
        || *auth_key == initiator.auth_key;
    if !agree {
        return Err(wrong_auth_key());
    }
    check_endpoint(region, target)?;
    if let Some(extended) = extended
        && !target.rma_event
        && !extended.counters.read().is_empty()
    {
        return Err(Error::new(ErrorKind::AccessDenied, "transfer")
            .provider("loopback")
            .context(
                "why",
                "the region counts accesses and the target endpoint was opened without RMA_EVENT",
            )
            .remedy("open the target endpoint with the RMA_EVENT capability"));
    }
    Ok(())
}

/// Checks that the region may be reached through this endpoint of its domain.
#[inline]
fn check_endpoint(region: &Body, endpoint: &EndpointState) -> Result<()> {
    let bound = region.extended().and_then(|extended| extended.endpoint.read().clone());
    match bound {
        Some(bound) if !std::ptr::eq(bound.as_ptr(), endpoint) => {
            Err(wrong_endpoint("the region is bound to another endpoint"))
        }
        None if endpoint.domain.mode.contains(MrMode::ENDPOINT) => {
            Err(wrong_endpoint("the region is bound to no endpoint"))
        }
        _ => Ok(()),
    }
}

#[cold]
fn wrong_auth_key() -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("why", "authorization keys differ")
        .remedy("open the endpoint with the authorization key of the region")
}

#[cold]
fn wrong_endpoint(why: &'static str) -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("why", why)
        .remedy("a bound region is reached through its endpoint only")
}

#[cold]
pub(super) fn unreachable_peer(peer: PeerId) -> Error {
    Error::new(ErrorKind::Unreachable, "transfer")
        .provider("loopback")
        .context("peer", peer.0)
        .remedy("the peer's endpoint is closed, or this endpoint did not resolve it")
}

/// Why a peer's key leads nowhere.
#[cold]
pub(super) fn refused_remote(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Dead => Error::new(ErrorKind::InvalidKey, "transfer")
            .provider("loopback")
            .remedy("ask the peer for the key of a region that is open"),
        _ => not_now(refusal, "the peer's region"),
    }
}

#[cold]
fn refused_local(refusal: Refusal) -> Error {
    match refusal {
        Refusal::Dead => Error::new(ErrorKind::NoRegion, "transfer")
            .provider("loopback")
            .remedy("keep the region of a descriptor open until the transfer completes"),
        _ => not_now(refusal, "the local region"),
    }
}

fn not_now(refusal: Refusal, which: &'static str) -> Error {
    let why = match refusal {
        Refusal::Disabled => "not enabled",
        Refusal::Refreshing => "being refreshed",
        Refusal::Dead => "closed",
    };
    Error::new(ErrorKind::BadState, "transfer")
        .provider("loopback")
        .context("region", which)
        .context("why", why)
}

#[cold]
pub(super) fn denied(side: &'static str, right: Access) -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("side", side)
        .context("needs", right)
        .remedy("register the region with this right")
}
