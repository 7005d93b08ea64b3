//! The local and the remote side of a transfer.
//!
//! A transfer keeps guards of the regions of both sides from its first check until its last byte
//! has moved, so that deregistration waits for the transfer. Keys, descriptors, rights and bounds
//! of both sides are checked before the transfer changes memory of either side. Absent pages are
//! detected during the copy.

use std::sync::Arc;

use hmem_core::{Access, Error, ErrorKind, MrMode, Result};
use hmem_p2p::staging::FailedStep;
use parking_lot::RwLockReadGuard;

use super::{
    Few, NicCall,
    endpoint::EndpointState,
    keys::Token,
    memory::{self, CopyError, DeviceMemory, Span},
    region::{AccessStart, LOCAL_SIDE, Refusal, Region, denied},
    regions::{RegionGuard, RegionTable},
    request::{KeyUse, LocalMemory, LocalPart, RemotePart},
    window::BindingGuard,
};

/// Guards of the regions on a transfer's local side. None of these regions is deregistered until
/// the value is dropped.
#[derive(Default)]
pub(super) struct LocalSide {
    holds: Few<LocalHold>,
}

/// The access to one local part of a transfer.
enum LocalHold {
    /// The part lies in a region.
    Region(RegionGuard),
    /// The part is host memory without a region.
    Host,
    /// The part is device memory without a region.
    Device(DeviceMemory),
}

impl LocalSide {
    /// Takes guards of the regions that `parts` name. `table` is the region table of the endpoint's
    /// NIC. A part that lies in no region needs no right.
    ///
    /// # Errors
    /// - NoRegion: a region is closed.
    /// - BadState: a region is disabled, or is being refreshed or revoked.
    /// - AccessDenied: a region does not grant `right`, or [`check_endpoint`] refuses the use of
    ///   the region through `endpoint`.
    #[inline]
    pub(super) fn hold(
        &mut self,
        table: &RegionTable,
        endpoint: &EndpointState,
        parts: &[LocalPart],
        right: Access,
    ) -> Result<()> {
        for part in parts.iter() {
            self.holds.push(match part.memory {
                LocalMemory::Region(token) => {
                    LocalHold::Region(hold_local(table, endpoint, token, right)?)
                }
                LocalMemory::Host => LocalHold::Host,
                LocalMemory::Device(kind) => LocalHold::Device(DeviceMemory::new(Arc::clone(
                    endpoint.domain.registry.get(kind)?,
                ))),
            });
        }
        Ok(())
    }

    /// Appends to `into` the spans of memory that `parts` cover.
    #[inline]
    pub(super) fn spans<'a>(&'a self, parts: &[LocalPart], into: &mut Few<Span<'a>>) -> Result<()> {
        for (hold, part) in self.holds.iter().zip(parts.iter()) {
            let (at, len) = (part.address, part.len);
            if len == 0 {
                continue;
            }
            match hold {
                LocalHold::Region(held) => held.spans(AccessStart::Address(at), len, into)?,
                LocalHold::Host => into.push(Span::Kernel { at, len }),
                LocalHold::Device(memory) => into.push(Span::Indirect { at, len, memory }),
            }
        }
        Ok(())
    }
}

/// Guards of the regions on a transfer's remote side. None of these regions is deregistered until
/// the value is dropped.
#[derive(Default)]
pub(super) struct RemoteSide {
    holds: Few<RemoteHold>,
}

struct RemoteHold {
    region: RegionGuard,
    /// A guard of the memory window's binding, if the remote key is a window's key. The binding
    /// does not end until the guard is dropped.
    window: Option<BindingGuard>,
}

impl RemoteSide {
    /// Takes guards of the regions and windows that the keys of `parts` name. `table` is the locked
    /// region table of the target's NIC, which this call unlocks at its end.
    ///
    /// # Errors
    /// - InvalidKey: a key names no region or window of the target's domain, or is a single-use key
    ///   that was used.
    /// - BadState: a region is disabled, or is being refreshed or revoked.
    /// - AccessDenied: a key grants no right in `any_of`, or [`check_peer`] refuses the access.
    #[inline]
    pub(super) fn hold(
        &mut self,
        mut table: RwLockReadGuard<'_, RegionTable>,
        initiator: &EndpointState,
        target: &EndpointState,
        parts: &[RemotePart],
        any_of: Access,
    ) -> Result<()> {
        for part in parts {
            self.holds.push(hold_key(&mut table, initiator, target, part.key, any_of)?);
        }
        Ok(())
    }

    /// Appends to `into` the spans of memory that `parts` cover.
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

    /// Marks the single-use keys of the request as used. If the request names a key several times,
    /// that counts as one use.
    ///
    /// # Errors
    /// InvalidKey: another request has already used one of the keys. Those keys of this request
    /// that were marked before stay marked as used.
    #[inline]
    pub(super) fn spend(&self) -> Result<()> {
        let holds = self.holds.as_slice();
        for (at, hold) in holds.iter().enumerate() {
            let first = hold.window.is_none()
                && !holds[..at]
                    .iter()
                    .any(|other| other.window.is_none() && other.region.token == hold.region.token);
            if first && !hold.region.spend() {
                return Err(Refusal::NoRegion.of_key());
            }
        }
        Ok(())
    }

    /// Makes the bytes of a write or atomic persistent in regions with RMA_PMEM. Then increments
    /// the bound counters of each changed region. A region that the request changes in several
    /// places counts once.
    #[inline]
    pub(super) fn persist_and_count(
        &self,
        target: &EndpointState,
        parts: &[RemotePart],
    ) -> Result<()> {
        // A part of zero bytes changes nothing.
        let changed = || self.holds.iter().zip(parts).filter(|(_, part)| part.len > 0);
        for (hold, part) in changed() {
            if hold.region.attr.persistent {
                let mut written = Few::new();
                hold.spans(part, &mut written)?;
                hold.region.persist(written.as_slice(), &target.domain.registry)?;
            }
        }
        for (at, (hold, _)) in changed().enumerate() {
            let is_same = |other: &RemoteHold| other.region.token == hold.region.token;
            if !changed().take(at).any(|(other, _)| is_same(other)) {
                hold.region.increment_counters();
            }
        }
        Ok(())
    }
}

impl RemoteHold {
    /// Appends to `into` the spans of memory that `part` covers.
    #[inline]
    fn spans<'a>(&'a self, part: &RemotePart, into: &mut Few<Span<'a>>) -> Result<()> {
        if part.len == 0 {
            return Ok(());
        }
        let start = match &self.window {
            Some(window) => window.access_start(&self.region, part.address, part.len)?,
            None => self.region.access_start(part.address),
        };
        self.region.spans(start, part.len, into)
    }
}

/// Takes a guard of the region that a local descriptor names. The errors are those of
/// [`LocalSide::hold`].
#[inline(always)]
fn hold_local(
    table: &RegionTable,
    endpoint: &EndpointState,
    token: Token,
    right: Access,
) -> Result<RegionGuard> {
    let region = table.hold(endpoint.domain.id, token).map_err(Refusal::of_descriptor)?;
    if !region.attr.access.contains(right) {
        return Err(denied(LOCAL_SIDE, right));
    }
    check_endpoint(&region, endpoint)?;
    Ok(region)
}

/// Takes guards of the region and window that a key names. The errors are those of
/// [`RemoteSide::hold`].
#[inline(always)]
fn hold_key(
    table: &mut RwLockReadGuard<'_, RegionTable>,
    initiator: &EndpointState,
    target: &EndpointState,
    key: KeyUse,
    any_of: Access,
) -> Result<RemoteHold> {
    let domain = &target.domain;
    let (number, cookie) = if key.mapped {
        let parts = initiator.domain.mapped.read().get(&key.number).copied();
        let parts = parts.ok_or_else(|| Refusal::NoRegion.of_key())?;
        (parts.key, Some(parts))
    } else if initiator.domain.mode.contains(MrMode::RAW) || domain.mode.contains(MrMode::RAW) {
        return Err(Refusal::NoRegion
            .of_key()
            .remedy("in RAW mode map the peer's raw key and use the mapped key"));
    } else {
        (key.number, None)
    };
    let region = match table.hold_key(domain.id, number) {
        Ok(region) => region,
        Err(Refusal::NoRegion) if cookie.is_none() => {
            // A thread that holds a lock of the windows may be waiting for the lock of the table.
            return RwLockReadGuard::unlocked(table, || {
                let (region, window) = domain.windows.hold(number, target.id(), any_of)?;
                check_peer(initiator, target, &region)?;
                Ok(RemoteHold { region, window: Some(window) })
            });
        }
        Err(refusal) => return Err(refusal.of_key()),
    };
    if let Some(parts) = cookie
        && (domain.keys.cookie(number, region.token) ^ parts.cookie) & parts.mask != 0
    {
        return Err(Refusal::NoRegion.of_key());
    }
    if !region.attr.access.intersects(any_of) {
        return Err(denied("key", any_of));
    }
    check_peer(initiator, target, &region)?;
    Ok(RemoteHold { region, window: None })
}

/// Checks that `initiator` may access the region through the endpoint `target`:
///
/// - The region and `initiator` have the same authorization key.
/// - [`check_endpoint`] accepts `target`.
/// - If counters are bound to the region, `target` has the RMA_EVENT capability.
#[inline]
fn check_peer(initiator: &EndpointState, target: &EndpointState, region: &Region) -> Result<()> {
    let auth_key = region.attr.auth_key.as_ref().unwrap_or(&target.domain.auth_key);
    if *auth_key != initiator.auth_key {
        return Err(no_access(
            "authorization keys differ",
            "open the endpoint with the authorization key of the region",
        ));
    }
    check_endpoint(region, target)?;
    if !target.rma_event && region.has_counters() {
        return Err(no_access(
            "the region counts accesses and the target endpoint was opened without RMA_EVENT",
            "open the target endpoint with the RMA_EVENT capability",
        ));
    }
    Ok(())
}

/// Checks that the region is bound to `endpoint` or, unless the domain has ENDPOINT mode, to no
/// endpoint.
#[inline]
fn check_endpoint(region: &Region, endpoint: &EndpointState) -> Result<()> {
    let why = match region.endpoint() {
        Some(bound) if bound != endpoint.id() => "the region is bound to another endpoint",
        None if endpoint.domain.mode.contains(MrMode::ENDPOINT) => {
            "the region is bound to no endpoint"
        }
        _ => return Ok(()),
    };
    Err(no_access(why, "access the region through the endpoint that it is bound to"))
}

fn no_access(why: &'static str, remedy: &'static str) -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("why", why)
        .remedy(remedy)
}

/// Copies bytes between memory of `initiator` and memory of `target`, and returns their number.
/// `own` is the list with the initiator's memory: the same as `from` for a write or a send, and as
/// `to` for a read.
///
/// If either list contains staged memory, the copy goes through staging buffers. These belong to
/// the initiator's domain if `own` contains staged memory, and otherwise to the target's domain.
pub(super) fn copy(
    initiator: &EndpointState,
    target: &EndpointState,
    (from, to): (&[Span<'_>], &[Span<'_>]),
    own: &[Span<'_>],
) -> Result<u64, CopyError> {
    let staged = |spans: &[Span<'_>]| spans.iter().any(|span| span.staged().is_some());
    if !staged(from) && !staged(to) {
        return memory::copy_reporting_side(from, to);
    }
    let own = if staged(own) { initiator } else { target };
    let failed = |error| CopyError { step: FailedStep::NicTransfer, error };
    let pool = own.domain.staging_pool().map_err(failed)?;
    let canceled = || match (initiator.is_closed(), target.is_closed()) {
        (true, _) => Some(initiator.canceled()),
        (_, true) => Some(
            Error::new(ErrorKind::Unreachable, "transfer")
                .provider("loopback")
                .context("why", "the peer's endpoint was closed during the transfer"),
        ),
        _ => None,
    };
    memory::pipe(from, to, &pool, canceled, || {
        initiator.domain.nic.config.faults.enter(NicCall::Chunk)
    })
}
