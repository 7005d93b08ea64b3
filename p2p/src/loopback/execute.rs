//! Executing a request: every check first, then the bytes.
//!
//! A transfer holds the regions of both sides from its first check until its last byte, so that deregistration
//! waits for it, and it finds all the bytes of both sides before it moves any.

use std::sync::Arc;

use hmem_core::{Access, Addressing, Error, ErrorKind, MrMode, Result};

use super::{
    Call,
    endpoint::{EndpointState, KeyUse, LocalPart, Origin, RemotePart, Task, Work},
    few::Few,
    keys::KnownGeneration,
    memory::{self, DeviceMemory, Span},
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
        self.peer(work.peer).ok_or_else(|| {
            Error::new(ErrorKind::Unreachable, "transfer")
                .provider("loopback")
                .context("peer", work.peer.0)
                .remedy("the peer's endpoint is closed, or this endpoint did not resolve it")
        })
    }

    fn rma(&self, work: &Work, remote: &Few<RemotePart>, write: bool) -> Result<u64> {
        let target = self.target(work)?;
        let (local_right, remote_right) =
            if write { (Access::WRITE, Access::REMOTE_WRITE) } else { (Access::READ, Access::REMOTE_READ) };
        let near = LocalSide::hold(self, &work.local, local_right)?;
        let mut local = Few::None;
        near.spans(&work.local, &mut local)?;
        let far = RemoteSide::hold(self, &target, remote.as_slice(), remote_right)?;
        let mut spans = Few::None;
        far.spans(remote.as_slice(), &mut spans)?;
        far.spend()?;
        self.domain.nic.config.faults.enter(Call::Transfer)?;
        let moved = if write {
            memory::copy(local.as_slice(), spans.as_slice())?
        } else {
            memory::copy(spans.as_slice(), local.as_slice())?
        };
        if write && moved > 0 {
            far.changed(spans.as_slice())?;
        }
        Ok(moved)
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
    pub(super) fn hold(endpoint: &'t EndpointState, parts: &Few<LocalPart>, right: Access) -> Result<Self> {
        let mut holds = Few::None;
        for part in parts.iter() {
            holds.push(match part.origin {
                Origin::Region(token) => {
                    let known = KnownGeneration::Whole(token.generation);
                    let held = endpoint.domain.nic.table.hold(token.index, known, false);
                    let held = held.map_err(refused_local)?;
                    if held.domain() != endpoint.domain.slot.id {
                        return Err(refused_local(Refusal::Dead));
                    }
                    if !held.access().contains(right) {
                        return Err(denied("local side", right));
                    }
                    check_endpoint(&held, endpoint)?;
                    LocalHold::Region(held)
                }
                Origin::Host => LocalHold::Host,
                Origin::Device(kind) => {
                    LocalHold::Device(DeviceMemory::new(Arc::clone(endpoint.domain.registry.get(kind)?)))
                }
            });
        }
        Ok(Self { holds })
    }

    /// Adds the bytes of the parts.
    #[inline]
    pub(super) fn spans<'a>(&'a self, parts: &Few<LocalPart>, into: &mut Few<Span<'a>>) -> Result<()> {
        for (hold, part) in self.holds.iter().zip(parts.iter()) {
            let (at, len) = (part.address, part.len);
            if len == 0 {
                continue;
            }
            match hold {
                LocalHold::Region(held) => held.spans(Place::Address(at), len, into)?,
                LocalHold::Host => into.push(Span::Direct { at, len, mapping: None }),
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
    ) -> Result<Self> {
        let mut holds = Few::None;
        for part in parts {
            holds.push(hold_key(initiator, target, part.key, right)?);
        }
        Ok(Self { holds })
    }

    /// Adds the bytes of the parts.
    #[inline]
    pub(super) fn spans<'a>(&'a self, parts: &[RemotePart], into: &mut Few<Span<'a>>) -> Result<()> {
        for (hold, part) in self.holds.iter().zip(parts) {
            if part.len == 0 {
                continue;
            }
            let place = match &hold.window {
                Some(window) => window.place(&hold.region, part.address, part.len)?,
                None if hold.region.addressing == Addressing::Virtual => Place::Address(part.address),
                None => Place::Offset(part.address),
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
        let extended = |hold: &'_ RemoteHold<'t>| hold.region.extended().map(|extended| extended.persistent);
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

/// Holds what one key names.
#[inline]
fn hold_key<'t>(
    initiator: &EndpointState,
    target: &'t EndpointState,
    key: KeyUse,
    right: Access,
) -> Result<RemoteHold<'t>> {
    let domain = &target.domain;
    let table = &domain.nic.table;
    let (number, cookie) = if key.mapped {
        let parts = initiator.domain.mapped_key(key.number).ok_or_else(|| refused_remote(Refusal::Dead))?;
        (parts.key, Some(parts))
    } else if initiator.domain.mode.contains(MrMode::RAW) || domain.mode.contains(MrMode::RAW) {
        return Err(
            refused_remote(Refusal::Dead).remedy("in RAW mode map the peer's raw key and use the mapped key")
        );
    } else {
        (key.number, None)
    };
    let held = if domain.requested_keys() {
        table.hold_requested(domain.slot.id, number, true)
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

/// Checks that the initiator may reach the region through this endpoint.
#[inline]
fn check_peer(initiator: &EndpointState, target: &EndpointState, region: &Body) -> Result<()> {
    let extended = region.extended();
    let auth_key =
        extended.and_then(|extended| extended.auth_key.as_ref()).unwrap_or(&target.domain.auth_key);
    if *auth_key != initiator.auth_key {
        return Err(Error::new(ErrorKind::AccessDenied, "transfer")
            .provider("loopback")
            .context("why", "authorization keys differ")
            .remedy("open the endpoint with the authorization key of the region"));
    }
    check_endpoint(region, target)?;
    if let Some(extended) = extended
        && !target.rma_event
        && !extended.counters.read().is_empty()
    {
        return Err(Error::new(ErrorKind::AccessDenied, "transfer")
            .provider("loopback")
            .context("why", "the region counts accesses and the target endpoint was opened without RMA_EVENT")
            .remedy("open the target endpoint with the RMA_EVENT capability"));
    }
    Ok(())
}

/// Checks that the region may be reached through this endpoint of its domain.
#[inline]
fn check_endpoint(region: &Body, endpoint: &EndpointState) -> Result<()> {
    let refuse = |why: &'static str| {
        Err(Error::new(ErrorKind::AccessDenied, "transfer")
            .provider("loopback")
            .context("why", why)
            .remedy("a bound region is reached through its endpoint only"))
    };
    let bound = region.extended().and_then(|extended| extended.endpoint.read().clone());
    match bound {
        Some(bound) if !std::ptr::eq(bound.as_ptr(), endpoint) => {
            refuse("the region is bound to another endpoint")
        }
        None if endpoint.domain.mode.contains(MrMode::ENDPOINT) => {
            refuse("the region is bound to no endpoint")
        }
        _ => Ok(()),
    }
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
