//! Endpoints of a domain, and transfers that need no `unsafe`.

use std::{fmt, sync::Arc};

use super::{
    DomainInner,
    buffer::RegionSlice,
    local::{Leasing, LeasingQueue},
    region::MemoryRegion,
    region_state::RegionState,
};
use crate::{
    Access, Error, ErrorKind, MrMode, Rejected, RemoteKey, Result,
    provider::{EndpointAttr, Features, ProviderEndpoint},
    transfer::{
        AtomicOp, AtomicType, EndpointName, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

/// An endpoint: posts transfers and receives messages.
///
/// The safe methods take [`RegionSlice`]s, pieces of regions that own their memory;
/// [`Endpoint::post`] takes raw addresses.
pub struct Endpoint {
    inner: Arc<dyn ProviderEndpoint>,
    domain: Arc<DomainInner>,
    /// For local memory that names no region, where the domain's cache registers it.
    leasing: Option<Leasing>,
    closed: bool,
}

/// An atomic operation over owned memory.
#[derive(Clone, Copy, Debug)]
pub struct Atomic<'a> {
    /// The operation.
    pub op: AtomicOp,
    /// The element.
    pub datatype: AtomicType,
    /// The target.
    pub remote: RemoteSegment<'a>,
    /// The operands.
    pub operand: RegionSlice,
    /// The destination of the old values, for fetching and comparing forms.
    pub result: Option<RegionSlice>,
    /// The value to compare with, for comparing forms.
    pub compare: Option<RegionSlice>,
}

const INLINE_SEGMENTS: usize = 8;

impl Endpoint {
    pub(super) fn open(
        domain: &Arc<DomainInner>,
        attr: &EndpointAttr,
        leasing: Option<Leasing>,
    ) -> Result<Self> {
        let inner = domain.provider().open_endpoint(&LeasingQueue::unwrapped(attr))?;
        Ok(Self { inner, domain: Arc::clone(domain), leasing, closed: false })
    }

    pub(super) fn domain(&self) -> &Arc<DomainInner> {
        &self.domain
    }

    pub(super) fn provider(&self) -> &dyn ProviderEndpoint {
        &*self.inner
    }

    pub(super) fn shared_provider(&self) -> Arc<dyn ProviderEndpoint> {
        Arc::clone(&self.inner)
    }

    /// Returns the provider's own endpoint. As a `&dyn Any` it can be cast down to the provider's
    /// type, for abilities that only that provider has.
    #[must_use]
    pub fn provider_endpoint(&self) -> &dyn ProviderEndpoint {
        &*self.inner
    }

    /// The name to send to peers.
    #[must_use]
    pub fn name(&self) -> EndpointName {
        self.inner.name()
    }

    /// Finds the peer of a name.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if nobody answers to it; [`ErrorKind::Malformed`] for bytes that
    /// are no name.
    pub fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        self.inner.resolve(name)
    }

    /// Posts any work request over raw addresses.
    ///
    /// # Safety
    /// Until its completion, local memory named without a descriptor stays valid and, where the
    /// operation writes it, unreferenced. Where the domain's cache registers it,
    /// [`RegionCache::get_or_register`](super::RegionCache::get_or_register)'s conditions are
    /// added, with no right for peers.
    ///
    /// # Errors
    /// [`ErrorKind::Again`] if the queue is full; [`ErrorKind::NoRegion`] for a descriptor that is
    /// missing or foreign; where the cache registers what names no region, the errors of that.
    /// Errors that only the target can detect come back as a failed completion.
    #[inline]
    pub unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        match &self.leasing {
            // SAFETY: passed on to the caller.
            None => unsafe { self.inner.post(request) },
            // SAFETY: as above.
            Some(leasing) => unsafe { leasing.post(&*self.inner, request) },
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
        if let [slice] = local {
            let request = WorkRequest { operation, local: &[slice.segment()], peer, context };
            // SAFETY: as below.
            return unsafe { self.post(&request) };
        }
        if local.len() > INLINE_SEGMENTS {
            let segments: Vec<_> = local.iter().map(|slice| slice.segment()).collect();
            // SAFETY: as below.
            return unsafe {
                self.post(&WorkRequest { operation, local: &segments, peer, context })
            };
        }
        let empty = LocalSegment { address: crate::Address(0), len: 0, desc: None };
        let mut segments = [empty; INLINE_SEGMENTS];
        for (segment, slice) in segments.iter_mut().zip(local) {
            *segment = slice.segment();
        }
        let request = WorkRequest { operation, local: &segments[..local.len()], peer, context };
        // SAFETY: every segment carries the descriptor of a region that owns its memory; the
        // provider refuses it once that region is closed, and the memory is not freed
        // before.
        unsafe { self.post(&request) }
    }

    /// RMA write of `local` to `remote`, each as one run of bytes.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
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

    /// RMA write of `local` to `remote` that also completes a receive of the peer, with `data`.
    ///
    /// The peer posts receives as for messages. The receive that the write takes completes with
    /// [`RemoteWrite`](crate::transfer::CompletionKind::RemoteWrite) once the bytes are in the peer's memory.
    ///
    /// ```
    /// use hmem_core::{Endpoint, OwnedRegion, RemoteKey, Result};
    /// use hmem_core::transfer::{PeerId, RemoteSegment};
    ///
    /// fn push(endpoint: &Endpoint, block: &OwnedRegion<Vec<u8>>, key: &RemoteKey) -> Result<()> {
    ///     let there = RemoteSegment { address: key.base(), len: 64, key };
    ///     // The peer learns which block came.
    ///     endpoint.write_immediate(&[block.slice(0, 64)?], &[there], 17, PeerId(0), 1)
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`Endpoint::post`]. [`ErrorKind::Unsupported`] if the NIC carries no immediate data, and
    /// [`ErrorKind::InvalidArgument`] for data that is wider than
    /// [`cq_data_size`](crate::provider::ProviderAttr::cq_data_size).
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

    /// RMA read of `remote` into `local`, each as one run of bytes.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    pub fn read(
        &self,
        local: &[RegionSlice],
        remote: &[RemoteSegment<'_>],
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Read { remote }, local, peer, context)
    }

    /// An atomic operation.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    pub fn atomic(&self, atomic: &Atomic<'_>, peer: PeerId, context: u64) -> Result<()> {
        let operation = Operation::Atomic {
            op: atomic.op,
            datatype: atomic.datatype,
            remote: atomic.remote,
            result: atomic.result.map(|slice| slice.segment()),
            compare: atomic.compare.map(|slice| slice.segment()),
        };
        self.post_slices(operation, &[atomic.operand], peer, context)
    }

    /// Sends a message, tagged if `tag` is given.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    pub fn send(
        &self,
        local: &[RegionSlice],
        tag: Option<u64>,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Send { tag, invalidate: None }, local, peer, context)
    }

    /// Sends a message, tagged if `tag` is given, with immediate data: its receive completes with
    /// `data`.
    ///
    /// # Errors
    /// As [`Endpoint::write_immediate`].
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

    /// Sends a message and has the receiver's NIC invalidate a type 2 window's key. The completion
    /// of the receive names the key.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    pub fn send_invalidate(
        &self,
        local: &[RegionSlice],
        key: &RemoteKey,
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Send { tag: None, invalidate: Some(key) }, local, peer, context)
    }

    /// Posts a buffer for one message; `tag` is a tag and a mask of bits to ignore.
    ///
    /// # Errors
    /// As [`Endpoint::post`].
    pub fn receive(
        &self,
        local: &[RegionSlice],
        tag: Option<(u64, u64)>,
        context: u64,
    ) -> Result<()> {
        self.post_slices(Operation::Receive { tag, from: None }, local, PeerId(0), context)
    }

    /// Closes the endpoint; outstanding requests complete as canceled.
    ///
    /// In ENDPOINT mode a region that is bound to the endpoint does not keep it open. From then on
    /// no new access reaches that region, and it can still be closed, which waits for accesses in
    /// flight. `fi_mr(3)` has the endpoint close first, libfabric's providers the region; here
    /// either order works.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the endpoint back, as long as a type 2A window is bound.
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
            // In a forked child, closing it would close what the parent uses.
            std::mem::forget(Arc::clone(&self.inner));
            return Ok(());
        }
        self.inner.close()?;
        if let Some(leasing) = &self.leasing {
            leasing.release();
        }
        Ok(())
    }

    /// This endpoint's part of a broadcast among its `members`, which all call it with the same
    /// tag: the root sends the bytes of `buffer` to every other member (one completion each,
    /// with `context`), the others receive them.
    ///
    /// `members` holds the other members as this endpoint resolved them; `root` is one of them, or
    /// `None` if this endpoint is the root. The buffer's region needs SEND at the root and RECV
    /// elsewhere, and in COLLECTIVE mode the COLLECTIVE right (`fi_mr(3)`).
    ///
    /// # Errors
    /// [`ErrorKind::AccessDenied`] for a region without COLLECTIVE in that mode;
    /// [`ErrorKind::InvalidArgument`] for a root that is no member; as [`Endpoint::post`]
    /// otherwise.
    pub fn broadcast(
        &self,
        buffer: RegionSlice,
        members: &[PeerId],
        root: Option<PeerId>,
        tag: u64,
        context: u64,
    ) -> Result<()> {
        let needs_right = self.domain().effective().contains(MrMode::COLLECTIVE);
        if needs_right && !buffer.access().contains(Access::COLLECTIVE) {
            return Err(Error::new(ErrorKind::AccessDenied, "broadcast")
                .context("access", buffer.access())
                .remedy("in COLLECTIVE mode register the buffer with the COLLECTIVE right"));
        }
        match root {
            Some(root) if members.contains(&root) => {
                self.receive(&[buffer], Some((tag, 0)), context)
            }
            Some(root) => Err(Error::new(ErrorKind::InvalidArgument, "broadcast")
                .context("root", root.0)
                .remedy("the root is one of the members")),
            None => members
                .iter()
                .try_for_each(|member| self.send(&[buffer], Some(tag), *member, context)),
        }
    }
}

impl MemoryRegion {
    /// Makes the region reachable through `endpoint` (`fi_mr_bind` with an endpoint), in ENDPOINT
    /// mode.
    ///
    /// Region and endpoint close in either order. Once the endpoint is closed nothing reaches the
    /// region, which is closed as usual.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] in other modes, once enabled, or bound;
    /// [`ErrorKind::InvalidArgument`] for another domain's endpoint; [`ErrorKind::NoSys`] where the
    /// provider cannot.
    pub fn bind_endpoint(&self, endpoint: &Endpoint) -> Result<()> {
        let domain = self.inner().domain();
        let refuse = |kind, why: &'static str| Err(Error::new(kind, "bind endpoint").remedy(why));
        if !domain.effective().contains(MrMode::ENDPOINT) {
            return refuse(ErrorKind::BadState, "only ENDPOINT mode binds regions to endpoints");
        }
        if self.state() != RegionState::Disabled {
            return refuse(ErrorKind::BadState, "bind after registration and before enable");
        }
        if !Arc::ptr_eq(endpoint.domain(), domain) {
            return refuse(
                ErrorKind::InvalidArgument,
                "bind an endpoint of the region's own domain",
            );
        }
        let registration = self.inner().registration("bind endpoint")?;
        let mut bound = self.inner().bindings().endpoint.lock();
        if *bound {
            return refuse(ErrorKind::BadState, "an endpoint is bound already");
        }
        let binding = domain.provider().endpoint_binding().ok_or_else(|| {
            domain.missing(
                Features::ENDPOINT_BINDING,
                "bind endpoint",
                ErrorKind::NoSys,
                "this provider does not bind regions to endpoints",
            )
        })?;
        binding.bind_endpoint(registration.region, endpoint.provider())?;
        *bound = true;
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        // A type 2A window that is bound keeps the provider's endpoint alive.
        match self.shut() {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Busy => {
                tracing::debug!(%error, "endpoint dropped with something bound to it");
            }
            Err(error) => tracing::error!(%error, "endpoint could not be closed"),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("name", &self.name()).finish_non_exhaustive()
    }
}
