//! Cached registration of local memory that a transfer names without a descriptor.
//!
//! Some NICs need a descriptor for every local buffer (`mr_mode` LOCAL), or for those in device
//! memory (HMEM). For a local buffer without a descriptor, the endpoint leases a cached region and
//! uses the region's descriptor. The leases end when the application reads the request's
//! completion, or closes the endpoint:
//!
//! - The completion queue stores the leases of each request in a slot. The request is posted with a
//!   *marked* context, which identifies the slot.
//! - When the completion is read, the queue replaces the marked context by the application's
//!   context, and ends the leases.
//! - A request gets a slot, without leases, if the application's context looks like a marked one.
//!   So each marked context in a completion was made by the queue.
//! - When an endpoint is closed, the leases of its requests end, because the NIC no longer uses the
//!   memory. The slots stay until the completions are read.

#![allow(unsafe_code, reason = "posts requests that name memory by address")]

use std::{fmt, sync::Arc};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    cached::{Around, RegionCache, Registrations},
    terms::Promise,
};
use crate::{
    Access, AddressRange, Error, ErrorKind, Result,
    cache::OwnedLease,
    provider::ProviderEndpoint,
    transfer::{Completion, LocalSegment, Operation, WorkRequest},
};

/// The rights with which the cache registers memory that a transfer reads. This memory may be
/// read-only.
const SOURCE: Access = Access::SEND.union(Access::WRITE);
/// The rights with which the cache registers memory that a transfer writes.
const SINK: Access = SOURCE.union(Access::RECV).union(Access::READ);

/// The upper 16 bits of a marked context: the context of a posted request that has a slot. The
/// lower bits are the slot's generation (24 bits) and index (24 bits).
const MARK: u64 = 0xCAC4 << 48;
const MARK_BITS: u64 = 0xFFFF << 48;
const INDEX_BITS: u32 = 24;
const INDEX: u32 = (1 << INDEX_BITS) - 1;
const GENERATION: u32 = (1 << 24) - 1;

const fn is_marked(context: u64) -> bool {
    context & MARK_BITS == MARK
}

/// The requests of one completion queue that have a slot, until their completions are read.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    /// The indices of the free slots.
    free: Vec<u32>,
    /// The number of endpoint identifiers that were assigned, which is also the last identifier.
    endpoints: u64,
}

#[derive(Debug, Default)]
struct Slot {
    /// The number of requests that had this slot before, modulo 2^24.
    generation: u32,
    /// The identifier of the endpoint that posted the request. `None` if the slot is free.
    endpoint: Option<u64>,
    /// The request's context as the application set it.
    context: u64,
    /// The leases of the request. A free slot keeps the empty list, so that a later request does
    /// not allocate.
    leases: Vec<OwnedLease<Registrations>>,
}

impl Slots {
    /// Returns the slot that a marked context identifies, if the slot is in use.
    fn marked(&mut self, context: u64) -> Option<&mut Slot> {
        let generation = (context >> INDEX_BITS) as u32 & GENERATION;
        let slot = self.slots.get_mut((context as u32 & INDEX) as usize)?;
        (slot.generation == generation && slot.endpoint.is_some()).then_some(slot)
    }
}

impl InFlight {
    /// Returns the identifier with which a new endpoint labels its requests.
    fn new_endpoint_id(&self) -> u64 {
        let mut slots = self.slots.lock();
        slots.endpoints += 1;
        slots.endpoints
    }

    /// Assigns a slot to a request of `endpoint`, and returns the marked context to post it with.
    /// Returns `None` if all slots are in use.
    fn admit(&self, endpoint: u64, context: u64) -> Option<u64> {
        let mut slots = self.slots.lock();
        let index = match slots.free.pop() {
            Some(index) => index,
            None if slots.slots.len() >> INDEX_BITS > 0 => return None,
            None => {
                slots.slots.push(Slot::default());
                // The list of free slots gets room for all slots, so that freeing a slot does not
                // allocate.
                let all = slots.slots.len();
                slots.free.reserve(all);
                all as u32 - 1
            }
        };
        let slot = &mut slots.slots[index as usize];
        slot.endpoint = Some(endpoint);
        slot.context = context;
        Some(MARK | u64::from(slot.generation) << INDEX_BITS | u64::from(index))
    }

    /// Adds a lease to the slot that a marked context identifies.
    fn keep(&self, marked: u64, lease: OwnedLease<Registrations>) {
        if let Some(slot) = self.slots.lock().marked(marked) {
            slot.leases.push(lease);
        }
    }

    /// Ends a request and its leases, and returns the application's context. Returns `None` if the
    /// context identifies no slot in use.
    fn end(&self, marked: u64) -> Option<u64> {
        let (context, mut leases) = {
            let mut slots = self.slots.lock();
            let slot = slots.marked(marked)?;
            (slot.context, std::mem::take(&mut slot.leases))
        };
        // Dropping the leases may deregister regions, so the lock is released first. The slot stays
        // in use, so no other request gets it.
        leases.clear();
        let mut slots = self.slots.lock();
        let slot = slots.marked(marked)?;
        slot.leases = leases;
        slot.endpoint = None;
        slot.generation = (slot.generation + 1) & GENERATION;
        slots.free.push(marked as u32 & INDEX);
        Some(context)
    }

    /// Ends the leases of a closed endpoint's requests. The slots stay in use until the completions
    /// are read.
    fn release(&self, endpoint: u64) {
        let mut released = Vec::new();
        let mut slots = self.slots.lock();
        for slot in slots.slots.iter_mut().filter(|slot| slot.endpoint == Some(endpoint)) {
            released.append(&mut slot.leases);
        }
        drop(slots);
        drop(released);
    }

    /// Replaces the marked contexts of completions by the application's contexts, and ends the
    /// leases of their requests.
    pub(super) fn translate(&self, completions: &mut [Completion]) {
        for completion in completions.iter_mut().filter(|completion| is_marked(completion.context))
        {
            if let Some(context) = self.end(completion.context) {
                completion.context = context;
            }
        }
    }
}

/// One direction of an endpoint: its transmits or its receives.
struct Direction {
    /// The slots of the completion queue that reports the requests of this direction.
    in_flight: Arc<InFlight>,
    /// The identifier that the endpoint has in `in_flight`.
    endpoint: u64,
}

impl Direction {
    fn of(in_flight: Arc<InFlight>) -> Self {
        Self { endpoint: in_flight.new_endpoint_id(), in_flight }
    }
}

/// The state with which an endpoint leases local memory: the domain's cache, and the slots of the
/// endpoint's two completion queues.
pub(super) struct Leasing {
    cache: RegionCache,
    /// True if host memory needs a descriptor (LOCAL), false if only device memory needs one.
    host: bool,
    transmits: Direction,
    receives: Direction,
}

impl Leasing {
    /// Creates the state of an endpoint. `tx` has the slots of its completion queue for transmits,
    /// and `rx` those of its completion queue for receives.
    pub(super) fn new(
        cache: &RegionCache,
        host: bool,
        (tx, rx): (Arc<InFlight>, Arc<InFlight>),
    ) -> Self {
        let (transmits, receives) = (Direction::of(tx), Direction::of(rx));
        Self { cache: cache.share(), host, transmits, receives }
    }

    /// Posts a request. If local memory of the request needs a descriptor and has none, leases a
    /// cached region of that memory, and posts the region's descriptor.
    ///
    /// # Safety
    /// The conditions of [`ProviderEndpoint::post`].
    #[inline]
    pub(super) unsafe fn post(
        &self,
        to: &dyn ProviderEndpoint,
        request: &WorkRequest<'_>,
    ) -> Result<()> {
        if !is_marked(request.context) && !lacks_descriptor(request) {
            // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
            return unsafe { to.post(request) };
        }
        let receives = matches!(request.operation, Operation::Receive { .. });
        let direction = if receives { &self.receives } else { &self.transmits };
        let Some(context) = direction.in_flight.admit(direction.endpoint, request.context) else {
            return Err(Error::new(ErrorKind::Again, "post")
                .remedy("read completions first: too many requests are in flight"));
        };
        // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
        let posted = unsafe { self.post_leased(to, direction, request, context) };
        if posted.is_err() {
            direction.in_flight.end(context);
        }
        posted
    }

    /// Posts a request like [`Self::post`], with the marked context `context`. Stores the leases in
    /// the slot that this context identifies.
    ///
    /// # Safety
    /// The conditions of [`ProviderEndpoint::post`].
    unsafe fn post_leased(
        &self,
        to: &dyn ProviderEndpoint,
        direction: &Direction,
        request: &WorkRequest<'_>,
        context: u64,
    ) -> Result<()> {
        let lease = |segment: &mut LocalSegment, access| -> Result<()> {
            if let Some(lease) = self.lease(segment, access)? {
                segment.desc = Some(lease.desc()?);
                direction.in_flight.keep(context, lease);
            }
            Ok(())
        };
        let sink = matches!(request.operation, Operation::Read { .. } | Operation::Receive { .. });
        let mut segments: SmallVec<[LocalSegment; 8]> = SmallVec::from_slice(request.local);
        // A segment without bytes has no region.
        segments.retain(|segment| segment.desc.is_some() || segment.len > 0);
        for segment in &mut segments {
            lease(segment, if sink { SINK } else { SOURCE })?;
        }
        let mut operation = request.operation;
        if let Operation::Atomic { result, compare, .. } = &mut operation {
            if let Some(result) = result {
                lease(result, SINK)?;
            }
            if let Some(compare) = compare {
                lease(compare, SOURCE)?;
            }
        }
        // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`. Leased regions
        // stay registered until the completion is read or the endpoint is closed.
        unsafe { to.post(&WorkRequest { operation, local: &segments, context, ..*request }) }
    }

    /// Leases a cached region that contains the segment's memory. Returns `None` if the segment has
    /// a descriptor, or needs none.
    fn lease(
        &self,
        segment: &LocalSegment,
        access: Access,
    ) -> Result<Option<OwnedLease<Registrations>>> {
        if segment.desc.is_some() {
            return Ok(None);
        }
        let range = AddressRange::new(segment.address, segment.len)?;
        self.cache.lease(range, access, Around::of(Promise::ReadWrite), self.host)
    }

    /// Ends the leases of all requests of the endpoint. The caller has closed the endpoint.
    pub(super) fn release(&self) {
        for direction in [&self.transmits, &self.receives] {
            direction.in_flight.release(direction.endpoint);
        }
    }
}

/// Returns true if a local segment of the request has no descriptor.
#[inline]
fn lacks_descriptor(request: &WorkRequest<'_>) -> bool {
    let none = |segment: &LocalSegment| segment.desc.is_none();
    request.local.iter().any(none)
        || matches!(&request.operation, Operation::Atomic { result, compare, .. }
            if result.as_ref().is_some_and(none) || compare.as_ref().is_some_and(none))
}

impl fmt::Debug for Leasing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leasing")
            .field("cache", &self.cache)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}
