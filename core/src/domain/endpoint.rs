//! Endpoints of a domain, with transfers that need no `unsafe`.

#![allow(unsafe_code, reason = "posts requests that name memory by address")]

use std::{fmt, sync::Arc};

use smallvec::SmallVec;

use super::{
    DomainInner, cached::RegionCache, local::Leasing, queue::DomainQueue, region::MemoryRegion,
    region_slice::RegionSlice, region_state::RegionState,
};
use crate::{
    Access, Error, ErrorKind, MrMode, Rejected, RemoteKey, Result,
    provider::{EndpointAttr, Features, ProviderEndpoint, Transport},
    transfer::{
        AtomicOp, AtomicType, EndpointName, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

/// An endpoint, which posts transfers and receives messages (`fid_ep`).
///
/// The safe methods take [`RegionSlice`]s, which are parts of registered regions.
/// [`Endpoint::post`] takes raw addresses. Each request ends with a completion in one of the
/// endpoint's queues.
///
/// ```no_run
/// use std::time::Duration;
///
/// use hmem_core::{
///     Domain, Region, RemoteKey, Result, provider::EndpointAttr, transfer::EndpointName,
/// };
///
/// /// Writes the start of `block` to a peer, which sent its name and its key.
/// fn push(
///     domain: &Domain,
///     block: &Region<Vec<u8>>,
///     peer: &EndpointName,
///     key: &RemoteKey,
/// ) -> Result<()> {
///     let queue = domain.open_cq(256)?;
///     let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
///     let peer = endpoint.resolve(peer)?;
///     endpoint.write(&[block.slice(0, 64)?], &[key.slice(0, 64)?], peer, 1)?;
///     let mut done = Vec::new();
///     queue.wait(&mut done, 1, Duration::MAX)?;
///     done.remove(0).result.map(|_bytes| ())
/// }
/// ```
pub struct Endpoint {
    pub(super) provider: Arc<dyn ProviderEndpoint>,
    pub(super) domain: Arc<DomainInner>,
    /// The cache and the leases with which this endpoint supplies missing descriptors of local
    /// memory. `None` if `Domain::leases_local_memory` is false: then the application supplies all
    /// descriptors.
    leasing: Option<Leasing>,
    /// True after [`Endpoint::close`], so that the drop does not close the endpoint again.
    closed: bool,
}

/// An atomic operation with operands in registered memory.
#[derive(Clone, Copy, Debug)]
pub struct Atomic<'a> {
    /// The operation to apply to each element.
    pub op: AtomicOp,
    /// The type of the elements in memory.
    pub datatype: AtomicType,
    /// The elements in the peer's memory.
    pub remote: RemoteSegment<'a>,
    /// The operands of the operation, in local memory.
    pub operand: RegionSlice,
    /// The destination of the old values, for fetching and comparing operations.
    pub result: Option<RegionSlice>,
    /// The values to compare with, for comparing operations.
    pub compare: Option<RegionSlice>,
}

impl Endpoint {
    pub(super) fn open(
        domain: &Arc<DomainInner>,
        transport: &dyn Transport,
        attr: &EndpointAttr,
        cache: Option<&RegionCache>,
    ) -> Result<Self> {
        let tx = DomainQueue::of(domain, &attr.tx_cq)?;
        let rx = DomainQueue::of(domain, &attr.rx_cq)?;
        let attr = EndpointAttr {
            tx_cq: Arc::clone(&tx.queue),
            rx_cq: Arc::clone(&rx.queue),
            ..attr.clone()
        };
        let leases = cache.zip(tx.in_flight.clone().zip(rx.in_flight.clone()));
        let host = domain.effective.contains(MrMode::LOCAL);
        let leasing = leases.map(|(cache, requests)| Leasing::new(cache, host, requests));
        let provider = transport.open_endpoint(&attr)?;
        Ok(Self { provider, domain: Arc::clone(domain), leasing, closed: false })
    }

    /// Returns the endpoint's name, to send to peers.
    #[must_use]
    pub fn name(&self) -> EndpointName {
        self.provider.name()
    }

    /// Resolves a peer's name, and connects to the peer if the transport needs that.
    ///
    /// # Errors
    /// - [`ErrorKind::Unreachable`] if no endpoint has this name, or the peer does not answer.
    /// - [`ErrorKind::Malformed`] for bytes that are not a name.
    pub fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.provider.resolve(name)
    }

    /// Connects the endpoint to its peer again after an error has ended the connection.
    ///
    /// On connected transports (verbs), a failed request ends the connection on both sides, also a
    /// request that the peer refuses. All later requests complete as [`ErrorKind::Canceled`]. Both
    /// sides then call `reconnect`. They exchange no names, and the ids of peers stay valid. Two
    /// rules keep requests from being lost without an error:
    ///
    /// - Call `reconnect` only if the peer has no request in flight on the old connection: each of
    ///   the peer's requests has completed, or the peer's own `reconnect` has returned. Otherwise
    ///   the peer's NIC may repeat an old request on the new connection. So the side with requests
    ///   in flight calls first.
    /// - Post the next request after both calls have returned. The peer loses requests that arrive
    ///   before its call.
    ///
    /// If the sides cannot agree on this order, exchange names and call [`Endpoint::resolve`]
    /// instead: a name that has changed shows that the peer's old connection has ended.
    ///
    /// Outstanding requests, including posted receives, complete as [`ErrorKind::Canceled`]. Their
    /// completions are in the queues when the call returns, except those of staged transfers, which
    /// follow when their copies have ended. Regions and their keys stay valid.
    ///
    /// The call also ends a connection that works. On the software NIC, whose endpoints work on
    /// after every failure, the call does nothing.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] if the endpoint was never connected.
    /// - [`ErrorKind::Busy`] while a type 2A window is bound through the endpoint.
    /// - The driver's error if the device failed.
    pub fn reconnect(&self) -> Result<()> {
        self.provider.reconnect()
    }

    /// Posts any work request, with raw local addresses.
    ///
    /// # Safety
    /// For each local segment without a descriptor:
    ///
    /// - The memory stays valid until the request completes.
    /// - If the operation writes to the memory, no Rust reference to the memory exists until then.
    /// - If the domain has a cache, the promise of [`Raw::new`](super::Raw::new) holds for as long
    ///   as the cache keeps the memory registered. The cache gives peers no rights.
    ///
    /// # Errors
    /// - [`ErrorKind::Again`] if the endpoint has as many requests outstanding as its depth, or if
    ///   its completion queue has no room for another completion. Read completions, then post
    ///   again.
    /// - [`ErrorKind::NoRegion`] for a descriptor that is missing or that is not of this domain.
    /// - [`ErrorKind::InvalidArgument`] for local and remote lists of different total lengths, for
    ///   operands that do not fit the operation, and for a peer that this endpoint did not resolve.
    /// - The errors of [`Domain::register`](super::Domain::register), if the cache registers
    ///   memory.
    /// - The other errors of [`ProviderEndpoint::post`].
    ///
    /// An error that only the target can detect is reported by the completion.
    #[inline]
    pub unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        match &self.leasing {
            // SAFETY: the caller guarantees the conditions of this function, which are those of the
            // call.
            None => unsafe { self.provider.post(request) },
            // SAFETY: the caller guarantees the conditions of this function, which are those of the
            // call.
            Some(leasing) => unsafe { leasing.post(&*self.provider, request) },
        }
    }

    #[inline]
    fn post_slices(
        &self,
        operation: Operation<'_>,
        local: &[RegionSlice],
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        let (one, several);
        let segments: &[LocalSegment] = if let [slice] = local {
            one = slice.segment;
            std::slice::from_ref(&one)
        } else {
            several = local.iter().map(|slice| slice.segment).collect::<SmallVec<[_; 8]>>();
            &several
        };
        // SAFETY: each segment has the descriptor of a region. The provider refuses the descriptor
        // once the region is closed, and the region's memory stays allocated until then.
        unsafe { self.post(&WorkRequest { operation, local: segments, peer, context }) }
    }

    /// Writes the bytes of `local` to `remote` (RMA write).
    ///
    /// Both lists are sequences of bytes of the same total length. [`Endpoint`] has an example.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    #[inline]
    pub fn write(
        &self,
        local: &[RegionSlice],
        remote: &[RemoteSegment<'_>],
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Write { remote }, local, peer, context)
    }

    /// Writes like [`Endpoint::write`], and completes one receive of the peer with `data`.
    ///
    /// The receive completes with
    /// [`RemoteWrite`](crate::transfer::CompletionKind::RemoteWrite) once the bytes are in the
    /// peer's memory.
    ///
    /// # Errors
    /// - The errors of [`Endpoint::post`].
    /// - [`ErrorKind::Unsupported`] if the NIC has no immediate data.
    /// - [`ErrorKind::InvalidArgument`] for data that is wider than
    ///   [`cq_data_size`](crate::provider::ProviderAttr::cq_data_size).
    pub fn write_immediate(
        &self,
        local: &[RegionSlice],
        remote: &[RemoteSegment<'_>],
        data: u64,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::WriteImmediate { remote, data }, local, peer, context)
    }

    /// Reads the bytes of `remote` into `local` (RMA read).
    ///
    /// Both lists are sequences of bytes of the same total length.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    pub fn read(
        &self,
        local: &[RegionSlice],
        remote: &[RemoteSegment<'_>],
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        local.iter().try_for_each(|slice| slice.check_sink("read"))?;
        self.post_slices(Operation::Read { remote }, local, peer, context)
    }

    /// Applies an atomic operation to elements of the peer's memory.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    pub fn atomic(&self, atomic: &Atomic<'_>, peer: PeerId, context: u64) -> Result<()> {
        if let Some(result) = &atomic.result {
            result.check_sink("atomic")?;
        }
        let operation = Operation::Atomic {
            op: atomic.op,
            datatype: atomic.datatype,
            remote: atomic.remote,
            result: atomic.result.map(|slice| slice.segment),
            compare: atomic.compare.map(|slice| slice.segment),
        };
        self.post_slices(operation, &[atomic.operand], peer, context)
    }

    /// Sends the bytes of `local` as a message, with `tag` if given.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    pub fn send(
        &self,
        local: &[RegionSlice],
        tag: Option<u64>,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Send { tag, invalidate: None }, local, peer, context)
    }

    /// Sends a message like [`Endpoint::send`]. The peer's receive completes with `data`.
    ///
    /// # Errors
    /// The errors of [`Endpoint::write_immediate`].
    pub fn send_immediate(
        &self,
        local: &[RegionSlice],
        tag: Option<u64>,
        data: u64,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::SendImmediate { tag, data }, local, peer, context)
    }

    /// Sends a message that makes the receiver's NIC invalidate the key of a type 2 window. The
    /// completion of the receive has the key's number.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    pub fn send_invalidate(
        &self,
        local: &[RegionSlice],
        key: &RemoteKey,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Send { tag: None, invalidate: Some(key) }, local, peer, context)
    }

    /// Posts a buffer for one message. `tag` is the tag that the message must have, with a mask of
    /// the bits to ignore.
    ///
    /// `local` may be empty, for a peer's [`write_immediate`](Self::write_immediate) or for a
    /// message without bytes.
    ///
    /// # Errors
    /// The errors of [`Endpoint::post`].
    pub fn receive(
        &self,
        local: &[RegionSlice],
        tag: Option<(u64, u64)>,
        context: u64,
    ) -> Result<()> {
        local.iter().try_for_each(|slice| slice.check_sink("receive"))?;
        self.post_slices(Operation::Receive { tag, from: None }, local, PeerId(0), context)
    }

    /// Closes the endpoint. Outstanding requests complete as canceled.
    ///
    /// In ENDPOINT mode, no new access reaches the regions that are bound to the endpoint. These
    /// regions can still be closed, and closing them waits for accesses in flight.
    ///
    /// # Errors
    /// - [`ErrorKind::Busy`] while a type 2A window is bound through the endpoint.
    /// - The driver's error. Requests can then still be in flight, and use their memory, until a
    ///   later call succeeds.
    ///
    /// The error returns the endpoint.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.shut() {
            Ok(()) => {
                self.closed = true;
                Ok(())
            }
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn shut(&self) -> Result<()> {
        if !self.domain.process.is_current() {
            // In a forked child, closing the endpoint would close an object of the parent.
            std::mem::forget(Arc::clone(&self.provider));
            return Ok(());
        }
        self.provider.close()?;
        if let Some(leasing) = &self.leasing {
            leasing.release();
        }
        Ok(())
    }

    /// Takes part in a broadcast, which every member calls with the same `tag`.
    ///
    /// `members` are the other members, each with the id from [`Endpoint::resolve`] of this
    /// endpoint. `root` is one of them, or `None` if this endpoint is the root. The root posts one
    /// send of `buffer` for each member, each with `context`. Every other member posts a receive
    /// that accepts a message with `tag` from any peer, so no other message may have this tag.
    ///
    /// The buffer's region needs the right SEND at the root and RECV elsewhere. In COLLECTIVE mode
    /// the region also needs the right COLLECTIVE (`fi_mr(3)`).
    ///
    /// # Errors
    /// - The errors of [`Endpoint::post`].
    /// - [`ErrorKind::AccessDenied`] in COLLECTIVE mode for a region without the right COLLECTIVE.
    /// - [`ErrorKind::InvalidArgument`] for a root that is not a member.
    ///
    /// If a send of the root fails, the sends to earlier members are posted already.
    pub fn broadcast(
        &self,
        buffer: RegionSlice,
        members: &[PeerId],
        root: Option<PeerId>,
        tag: u64,
        context: u64,
    ) -> Result<()> {
        let needs_right = self.domain.effective.contains(MrMode::COLLECTIVE);
        if needs_right && !buffer.access.contains(Access::COLLECTIVE) {
            return Err(Error::new(ErrorKind::AccessDenied, "broadcast")
                .context("access", buffer.access)
                .remedy("in COLLECTIVE mode register the buffer with the COLLECTIVE right"));
        }
        match root {
            Some(root) if members.contains(&root) => {
                self.receive(&[buffer], Some((tag, 0)), context)
            }
            Some(root) => Err(Error::new(ErrorKind::InvalidArgument, "broadcast")
                .context("root", root.0)
                .remedy("name one of the members as the root")),
            None => members
                .iter()
                .try_for_each(|member| self.send(&[buffer], Some(tag), *member, context)),
        }
    }
}

impl MemoryRegion {
    /// Binds the region to an endpoint in ENDPOINT mode (`fi_mr_bind` with an endpoint).
    ///
    /// Peers reach the region through this endpoint only. The region and the endpoint can be closed
    /// in either order. Once the endpoint is closed, no peer reaches the region.
    ///
    /// # Errors
    /// - [`ErrorKind::BadState`] in other modes, and for a region that is not registered yet,
    ///   enabled already or bound already.
    /// - [`ErrorKind::InvalidArgument`] for an endpoint of another domain.
    /// - [`ErrorKind::NoSys`] if the provider does not bind regions to endpoints.
    pub fn bind_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        let domain = &self.inner.domain;
        let refuse = |kind, why: &'static str| Err(Error::new(kind, "bind endpoint").remedy(why));
        if !domain.effective.contains(MrMode::ENDPOINT) {
            return refuse(ErrorKind::BadState, "only ENDPOINT mode binds regions to endpoints");
        }
        if self.state() != RegionState::Disabled {
            return refuse(ErrorKind::BadState, "bind after registration and before enable");
        }
        if !Arc::ptr_eq(&endpoint.domain, domain) {
            return refuse(
                ErrorKind::InvalidArgument,
                "bind an endpoint of the region's own domain",
            );
        }
        let registration = self.inner.registration("bind endpoint")?;
        let mut bound = self.inner.bindings().endpoint.lock();
        if *bound {
            return refuse(ErrorKind::BadState, "an endpoint is bound already");
        }
        let binding = domain.provider.endpoint_binding().ok_or_else(|| {
            domain.missing(
                Features::ENDPOINT_BINDING,
                "bind endpoint",
                ErrorKind::NoSys,
                "this provider does not bind regions to endpoints",
            )
        })?;
        binding.bind_endpoint(registration.region, &*endpoint.provider)?;
        *bound = true;
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        // A bound type 2A window keeps the provider's endpoint alive.
        match self.shut() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Busy => {
                tracing::debug!(%error, "endpoint dropped with a bound window");
            }
            Err(error) => tracing::error!(error = %error.full(), "cannot close an endpoint"),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.name()).finish_non_exhaustive()
    }
}
