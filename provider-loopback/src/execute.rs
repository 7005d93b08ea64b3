//! Executing a request: every check first, then the bytes.
//!
//! A transfer holds the regions of both sides from its first check until its last byte, so that
//! deregistration waits for it, and it finds all the bytes of both sides before it moves any.

use std::sync::Arc;

use hmem_core::{Access, Error, ErrorKind, MrMode, Result, transfer::PeerId};

use super::{
    Call, Few,
    endpoint::{EndpointState, canceled_request},
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
    pub(super) fn execute(self: &Arc<Self>, work: &Work) -> Outcome {
        let result = match &work.task {
            Task::Write(remote) => self.rma(work, remote, true),
            Task::Read(remote) => self.rma(work, remote, false),
            Task::Atomic(task) => self.atomic_transfer(work, task),
            Task::Send { tag, invalidate } => return self.send(work, *tag, *invalidate),
            Task::BindWindow(task) => self.bind_posted(task).map(|()| 0),
            Task::InvalidateWindow(window) => self.domain.invalidate_window(*window).map(|()| 0),
        };
        Outcome::Done(result)
    }

    /// The peer of a request, if it is still there.
    pub(super) fn target(&self, work: &Work) -> Result<Arc<Self>> {
        self.peer(work.peer).ok_or_else(|| unreachable_peer(work.peer))
    }

    fn rma(&self, work: &Work, remote: &[RemotePart], write: bool) -> Result<u64> {
        let target = &self.target(work)?;
        let (local_right, remote_right) = if write {
            (Access::WRITE, Access::ANY_REMOTE_WRITE)
        } else {
            (Access::READ, Access::REMOTE_READ)
        };
        let near = LocalSide::hold(self, &work.local, local_right)?;
        let mut local = Few::new();
        near.spans(&work.local, &mut local)?;
        let far = RemoteSide::hold(self, target, remote, remote_right)?;
        let mut spans = Few::new();
        far.spans(remote, &mut spans)?;
        far.spend()?;
        self.domain.nic.config.faults.enter(Call::Transfer)?;
        let moved = if write {
            self.carry(target, (local.as_slice(), spans.as_slice()), local.as_slice())?
        } else {
            self.carry(target, (spans.as_slice(), local.as_slice()), local.as_slice())?
        };
        if write && moved > 0 {
            far.changed(target, remote)?;
        }
        Ok(moved)
    }

    /// Copies a run of bytes from or to memory of `target`, through staging buffers where one side
    /// needs them. `own` is the side that is this endpoint's.
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
        parts: &[LocalPart],
        right: Access,
    ) -> Result<Self> {
        let mut holds = Few::new();
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
    pub(super) fn spans<'a>(&'a self, parts: &[LocalPart], into: &mut Few<Span<'a>>) -> Result<()> {
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
    /// Holds the regions that the keys of the parts name. Each key must grant `initiator` one of
    /// the rights in `any_of`, through `target`.
    #[inline]
    pub(super) fn hold(
        initiator: &EndpointState,
        target: &'t EndpointState,
        parts: &[RemotePart],
        any_of: Access,
    ) -> Result<Self> {
        let mut holds = Few::new();
        for part in parts {
            holds.push(hold_key(initiator, target, part.key, any_of)?);
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
            hold.spans(part, into)?;
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

    /// Makes a write or atomic persistent if its region asks for it (RMA_PMEM), and then counts it,
    /// once for each region.
    #[inline]
    pub(super) fn changed(&self, target: &EndpointState, parts: &[RemotePart]) -> Result<()> {
        let holds = self.holds.as_slice();
        if holds.iter().all(|hold| hold.region.extended().is_none()) {
            return Ok(());
        }
        for (hold, part) in holds.iter().zip(parts) {
            if hold.region.is_persistent() {
                let mut written = Few::new();
                hold.spans(part, &mut written)?;
                hold.region.persist(written.as_slice(), &target.domain.registry)?;
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

impl RemoteHold<'_> {
    /// Adds the bytes of a part that this key names.
    #[inline]
    fn spans<'a>(&'a self, part: &RemotePart, into: &mut Few<Span<'a>>) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let place = match &self.window {
            Some(window) => window.place(&self.region, part.address, part.len)?,
            None => self.region.place(part.address),
        };
        self.region.spans(place, part.len, into)
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

/// Holds the region that one key names; the key must grant one of the rights in `any_of`.
#[inline(always)]
fn hold_key<'t>(
    initiator: &EndpointState,
    target: &'t EndpointState,
    key: KeyUse,
    any_of: Access,
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
        table.hold_requested(domain.slot.id, number, true)
    } else {
        match domain.keys.open(number) {
            Some((index, known)) => table.hold(index, known, true).and_then(|held| {
                // Another domain decodes the number to another token, which may be live.
                if held.domain() == domain.slot.id { Ok(held) } else { Err(Refusal::Dead) }
            }),
            None => Err(Refusal::Dead),
        }
    };
    let held = match held {
        Ok(held) => held,
        Err(Refusal::Dead) if cookie.is_none() && domain.has_windows() => {
            let (region, window) = domain.hold_window(number, target, any_of)?;
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
    if !held.access().intersects(any_of) {
        return Err(denied("key", any_of));
    }
    check_peer(initiator, target, &held)?;
    Ok(RemoteHold { region: held, window: None })
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

/// Returns the error for a missing right: any right of `any_of` would be enough.
#[cold]
pub(super) fn denied(side: &'static str, any_of: Access) -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("side", side)
        .context("needs", any_of)
        .remedy("register the region with this right, or with one of these rights")
}
