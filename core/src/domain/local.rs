//! Cached registration of local memory that a transfer names without a descriptor.
//!
//! Some NICs need a descriptor for every local buffer (`mr_mode` LOCAL), or for those in device
//! memory (HMEM). If a request has none, the endpoint leases a cached region of the memory and uses
//! its descriptor. The leases end when the application reads the request's completion, or closes
//! the endpoint:
//!
//! - The completion queue stores the leases of each request in a slot. The request is posted with a
//!   context that identifies the slot: a *marked* context.
//! - Reading the completion replaces the marked context by the application's context, and ends the
//!   leases.
//! - A request with an application context that looks like a marked one gets a slot too. So the
//!   queue never takes an application's context for a marked one. It passes on all other contexts
//!   unchanged.
//! - Closing an endpoint ends the leases of its requests, because the NIC no longer uses the
//!   memory. The slots stay until their completions are read.

#![allow(unsafe_code, reason = "posts requests that name memory by address")]

use std::{fmt, sync::Arc};

use parking_lot::Mutex;

use super::cached::{RegionCache, Registrations};
use crate::{
    Access, Address, AddressRange, Error, ErrorKind, Result,
    cache::OwnedLease,
    provider::ProviderEndpoint,
    transfer::{Completion, LocalSegment, Operation, WorkRequest},
};

/// The rights with which the cache registers memory that a transfer reads. This memory may be
/// read-only.
const SOURCE: Access = Access::SEND.union(Access::WRITE);
/// The rights with which the cache registers memory that a transfer writes.
const SINK: Access = SOURCE.union(Access::RECV).union(Access::READ);

/// The upper 16 bits of a marked context, which identifies the slot of a request. The lower 48 bits
/// hold 24 bits of the slot's generation and 24 bits of its index.
const MARK: u64 = 0xCAC4 << 48;
const MARK_BITS: u64 = 0xFFFF << 48;
const PLACE_BITS: u32 = 24;
const GENERATION: u32 = (1 << 24) - 1;

/// The largest number of local segments for which a post allocates no memory.
const INLINE: usize = 8;
const NOWHERE: LocalSegment = LocalSegment { address: Address(0), len: 0, desc: None };

const fn is_marked(context: u64) -> bool {
    context & MARK_BITS == MARK
}

/// The requests in flight that a completion queue tracks. Each has a slot, and a marked context
/// that identifies the slot.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    endpoints: u64,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    /// The endpoint of the request. `None` if the slot is free.
    endpoint: Option<u64>,
    context: u64,
    /// The leases of the request. A free slot keeps the empty list, so that a later request does
    /// not allocate.
    leases: Vec<OwnedLease<Registrations>>,
}

impl Slots {
    fn marked(&mut self, context: u64) -> Option<&mut Slot> {
        let place = context as u32 & ((1 << PLACE_BITS) - 1);
        let generation = (context >> PLACE_BITS) as u32 & GENERATION;
        let slot = self.slots.get_mut(place as usize)?;
        (slot.generation == generation && slot.endpoint.is_some()).then_some(slot)
    }
}

impl InFlight {
    /// Returns a number for a new endpoint, which identifies its requests.
    fn new_endpoint_id(&self) -> u64 {
        let mut slots = self.slots.lock();
        slots.endpoints += 1;
        slots.endpoints
    }

    /// Assigns a slot to a request. Returns the marked context, which identifies the slot, or
    /// `None` if all slots are in use.
    fn admit(&self, endpoint: u64, context: u64) -> Option<u64> {
        let mut slots = self.slots.lock();
        let place = match slots.free.pop() {
            Some(place) => place,
            None if slots.slots.len() >> PLACE_BITS > 0 => return None,
            None => {
                slots.slots.push(Slot::default());
                // The list of free slots gets room for all slots, so that freeing a slot does not
                // allocate.
                let all = slots.slots.len();
                slots.free.reserve(all);
                all as u32 - 1
            }
        };
        let slot = &mut slots.slots[place as usize];
        slot.endpoint = Some(endpoint);
        slot.context = context;
        Some(MARK | u64::from(slot.generation) << PLACE_BITS | u64::from(place))
    }

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
        // Dropping the leases may deregister regions, so the lock is released first. No other
        // thread uses the slot before the slot is in the list of free slots.
        leases.clear();
        let mut slots = self.slots.lock();
        let slot = slots.marked(marked)?;
        slot.leases = leases;
        slot.endpoint = None;
        slot.generation = (slot.generation + 1) & GENERATION;
        slots.free.push(marked as u32 & ((1 << PLACE_BITS) - 1));
        Some(context)
    }

    /// Ends the leases of a closed endpoint's requests. The slots stay until their completions are
    /// read.
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

/// The in-flight receives of an endpoint, or its other in-flight requests.
struct Direction {
    in_flight: Arc<InFlight>,
    endpoint: u64,
}

impl Direction {
    fn of(in_flight: Arc<InFlight>) -> Self {
        Self { endpoint: in_flight.new_endpoint_id(), in_flight }
    }
}

/// The means by which an endpoint registers local memory: the domain's cache, and the slots for
/// leases in the endpoint's completion queues.
pub(super) struct Leasing {
    cache: RegionCache,
    /// True if host memory needs a descriptor too, not only device memory.
    host: bool,
    transmits: Direction,
    receives: Direction,
}

impl Leasing {
    /// Creates the state of an endpoint with these queues of transmits and of receives.
    pub(super) fn new(
        cache: &RegionCache,
        host: bool,
        (tx, rx): (Arc<InFlight>, Arc<InFlight>),
    ) -> Self {
        let (transmits, receives) = (Direction::of(tx), Direction::of(rx));
        Self { cache: cache.share(), host, transmits, receives }
    }

    /// Posts a request, with leased regions for local memory without a descriptor.
    ///
    /// # Safety
    /// The conditions of [`ProviderEndpoint::post`].
    #[inline]
    pub(super) unsafe fn post(
        &self,
        to: &dyn ProviderEndpoint,
        request: &WorkRequest<'_>,
    ) -> Result<()> {
        let receives = matches!(request.operation, Operation::Receive { .. });
        let direction = if receives { &self.receives } else { &self.transmits };
        let bare = names_no_region(request);
        if bare || is_marked(request.context) {
            // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
            unsafe { self.post_marked(to, direction, request, bare) }
        } else {
            // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
            unsafe { to.post(request) }
        }
    }

    /// Assigns a slot to a request, and posts the request with the marked context that identifies
    /// the slot. If `bare` is true, leases regions for the local memory that needs a descriptor and
    /// has none.
    ///
    /// # Safety
    /// The conditions of [`ProviderEndpoint::post`].
    unsafe fn post_marked(
        &self,
        to: &dyn ProviderEndpoint,
        direction: &Direction,
        request: &WorkRequest<'_>,
        bare: bool,
    ) -> Result<()> {
        let Some(context) = direction.in_flight.admit(direction.endpoint, request.context) else {
            return Err(Error::new(ErrorKind::Again, "post")
                .remedy("read completions first: too many requests are in flight"));
        };
        let posted = if bare {
            // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
            unsafe { self.post_leased(to, direction, request, context) }
        } else {
            // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`.
            unsafe { to.post(&WorkRequest { context, ..*request }) }
        };
        if posted.is_err() {
            direction.in_flight.end(context);
        }
        posted
    }

    /// Posts a request with leased regions for the local memory that needs a descriptor and has
    /// none. `context` is the marked context that identifies the request's slot.
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
        let mut inline = [NOWHERE; INLINE];
        let mut more = Vec::new();
        let segments = match inline.get_mut(..request.local.len()) {
            Some(inline) => {
                inline.copy_from_slice(request.local);
                inline
            }
            None => {
                more.extend_from_slice(request.local);
                &mut more[..]
            }
        };
        let mut count = 0;
        for at in 0..segments.len() {
            // An empty segment has no region, and moves no bytes.
            if segments[at].desc.is_none() && segments[at].len == 0 {
                continue;
            }
            segments[count] = segments[at];
            lease(&mut segments[count], if sink { SINK } else { SOURCE })?;
            count += 1;
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
        let local = &segments[..count];
        // SAFETY: the caller guarantees the conditions of `ProviderEndpoint::post`. Leased regions
        // stay registered until the completion is read or the endpoint is closed.
        unsafe { to.post(&WorkRequest { operation, local, context, ..*request }) }
    }

    /// Leases a region of the segment's memory. Returns `None` if the segment already has a
    /// descriptor, or needs none.
    fn lease(
        &self,
        segment: &LocalSegment,
        access: Access,
    ) -> Result<Option<OwnedLease<Registrations>>> {
        if segment.desc.is_some() {
            return Ok(None);
        }
        let range = AddressRange::new(segment.address, segment.len)?;
        self.cache.lease(range, access, self.host)
    }

    /// Ends all leases after the endpoint was closed.
    pub(super) fn release(&self) {
        for direction in [&self.transmits, &self.receives] {
            direction.in_flight.release(direction.endpoint);
        }
    }
}

#[inline]
fn names_no_region(request: &WorkRequest<'_>) -> bool {
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
