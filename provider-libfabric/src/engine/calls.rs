//! Calls of libfabric for the engine: posts of waiting parts, reads of completion queues, cancels.

#![allow(unsafe_code, reason = "calls libfabric's queues and endpoints, and reads their slots")]

use std::{
    ffi::{c_int, c_void},
    mem, ptr,
    time::{Duration, Instant},
};

use super::{
    super::{
        endpoint_state::{EndpointState, Waiting},
        errors,
        hub::Hub,
        part::{PartOp, Slot},
        sys::{self, fi_cq_err_entry, fi_cq_tagged_entry},
    },
    Engine, InFlight, canceled,
    staged::{Round, Turn, turn},
};

/// Number of completions that one call reads.
const BATCH: usize = 16;

/// The value of an entry of a completion queue before libfabric writes the entry.
const UNWRITTEN: fi_cq_tagged_entry = fi_cq_tagged_entry {
    op_context: ptr::null_mut(),
    flags: 0,
    len: 0,
    buf: ptr::null_mut(),
    data: 0,
    tag: 0,
};

/// The entries that a read of a completion queue fills.
///
/// A provider need not write the fields that an operation has no use for (`fi_cq(3)`). So each
/// entry is [`UNWRITTEN`] before a read.
pub(super) struct Entries([fi_cq_tagged_entry; BATCH]);

impl Default for Entries {
    fn default() -> Self {
        Self([UNWRITTEN; BATCH])
    }
}

/// Time limit for libfabric to connect to a peer. A part that waits longer fails with
/// `FI_ETIMEDOUT`.
const CONNECT: Duration = Duration::from_secs(10);

// SAFETY: libfabric's objects belong to no thread, and the owner of the value serialises the calls.
unsafe impl Send for Engine {}

impl Drop for Engine {
    fn drop(&mut self) {
        // libfabric may still use the slots of an endpoint that it did not close.
        if self.endpoints.is_empty() {
            for slot in self.in_flight.slots.drain(..) {
                // SAFETY: `Box::into_raw` returned the pointer. All endpoints are closed, so
                // libfabric uses no slot.
                drop(unsafe { Box::from_raw(slot) });
            }
        }
    }
}

impl InFlight {
    /// Posts as many waiting parts of an endpoint as libfabric takes, and advances the endpoint's
    /// staged requests. A part that libfabric does not take holds up the later parts to the same
    /// peer, so that their order is kept.
    pub(super) fn flush(&mut self, hub: &Hub, endpoint: &mut EndpointState) {
        if endpoint.waiting.is_empty() {
            return;
        }
        let mut round = Round::default();
        for _ in 0..endpoint.waiting.len() {
            let Some(waiting) = endpoint.waiting.pop_front() else { break };
            let stays = match waiting {
                Waiting::Part(index) => self.post_part(hub, endpoint, index, &mut round),
                Waiting::Staged(number) => self.step_staged(hub, endpoint, number, &mut round),
            };
            if stays {
                endpoint.waiting.push_back(waiting);
            }
        }
        for (index, error) in round.failed {
            self.part_failed(hub, endpoint, index, error, 0);
        }
        for index in round.canceled {
            let error = canceled(hub, "an earlier staged transfer failed");
            self.part_ended(hub, endpoint, index, Some(error));
        }
        for number in round.over {
            self.staged_ended(hub, endpoint, number);
        }
    }

    /// Posts a part of an application's request, if libfabric takes the part now. Returns true if
    /// the part must wait longer. Adds a part that libfabric refused, or that an earlier failure
    /// cancels, to the lists of `round`.
    pub(super) fn post_part(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        index: usize,
        round: &mut Round,
    ) -> bool {
        let Some(part) = &mut self.parts[index] else { return false };
        let Some(request) = self.requests.get(&part.request) else { return false };
        if round.stopped.contains(&request.peer) {
            round.canceled.push(index);
            return false;
        }
        if round.blocked.contains(&request.peer) {
            return true;
        }
        let carries_data = matches!(part.op, PartOp::Write { data: Some(_), .. });
        if carries_data || request.chunk_of.is_some() {
            match turn(&self.requests, request, carries_data, hub) {
                Turn::Now => {}
                Turn::Later => {
                    round.blocked.push(request.peer);
                    return true;
                }
                Turn::Never => {
                    round.canceled.push(index);
                    return false;
                }
            }
        }
        let returned = {
            let _guard = hub.open.lock();
            // SAFETY: the endpoint is open while it is in the table. Slots live as long as the
            // engine, or with the objects of their closed endpoint (`Fellows`). The caller of
            // `post` promised local memory that is valid, or it is that of a region, whose close
            // waits for the request, or a staging buffer, which its transfer keeps. Two kinds of
            // requests end before libfabric reports them. `end_lost_peers` ends those to a peer
            // that is closed or dead and so sends nothing more, after it has read completions. The
            // close of an endpoint whose objects `Fellows` keeps ends the endpoint's requests. A
            // peer may still finish these (2.5), and the caller of `Builder::build` promised that
            // the endpoint has no transfers then.
            unsafe { part.post(endpoint.objects.endpoint, self.slots[index]) }
        };
        let mut peer = request.peer.map(|peer| &mut endpoint.peers[peer]);
        match returned as c_int {
            0 => {
                part.posted = true;
                if let Some(peer) = &mut peer {
                    (peer.posted, peer.blocked) = (peer.posted + 1, None);
                }
                false
            }
            again if again == -sys::FI_EAGAIN => {
                let silent = peer.is_some_and(|peer| {
                    let since = *peer.blocked.get_or_insert_with(Instant::now);
                    let silent = peer.posted == 0 && since.elapsed() > CONNECT;
                    if silent {
                        peer.blocked = None;
                    }
                    silent
                });
                if silent {
                    round.failed.push((index, -sys::FI_ETIMEDOUT));
                    return false;
                }
                round.blocked.push(request.peer);
                true
            }
            error => {
                round.failed.push((index, error));
                false
            }
        }
    }

    /// Reads completions of an endpoint until its queue is empty. Without requests, it stops after
    /// a batch that is not full, which saves the read of an empty queue. Returns true if the last
    /// read found the queue empty.
    pub(super) fn poll_all(&mut self, hub: &Hub, endpoint: &mut EndpointState) -> bool {
        // A part in flight completes once, so only writes of peers can reach the limit. It keeps
        // these peers from holding the lock.
        for _ in 0..self.parts.len() + BATCH {
            match self.poll(hub, endpoint) {
                0 => return true,
                BATCH => {}
                _ if endpoint.has_requests() => {}
                _ => return false,
            }
        }
        false
    }

    /// Reads at most [`BATCH`] completions of an endpoint, and returns their number.
    fn poll(&mut self, hub: &Hub, endpoint: &mut EndpointState) -> usize {
        let queue = endpoint.objects.queue;
        let count = {
            let _guard = hub.open.lock();
            let entries = self.entries.0.as_mut_ptr().cast();
            // SAFETY: the queue is open while its endpoint is in the table, and has entries of
            // this format.
            unsafe {
                let read = (*(*queue).ops).read;
                read.map_or(0, |read| read(queue, entries, BATCH))
            }
        };
        if count == -(sys::FI_EAVAIL as isize) {
            self.read_error(hub, endpoint);
            return 1;
        }
        if count < 0 && count != -(sys::FI_EAGAIN as isize) && !endpoint.queue_failed {
            endpoint.queue_failed = true;
            let error = errors::call(&hub.attr().nic, "fi_cq_read", count as c_int);
            tracing::error!(error = %error.full(), "cannot read the completions of an endpoint");
            self.failed = Some(error);
        }
        let count = usize::try_from(count).unwrap_or(0).min(BATCH);
        for index in 0..count {
            let entry = mem::replace(&mut self.entries.0[index], UNWRITTEN);
            self.completed(hub, endpoint, &entry);
        }
        count
    }

    /// Reads an error entry of the completion queue.
    fn read_error(&mut self, hub: &Hub, endpoint: &mut EndpointState) {
        /// An error entry with room for the fields of later API versions.
        #[repr(C)]
        struct ErrorEntry {
            entry: fi_cq_err_entry,
            later: [u64; 16],
        }
        let queue = endpoint.objects.queue;
        // SAFETY: integers and pointers may be zero.
        let mut read: ErrorEntry = unsafe { mem::zeroed() };
        let count = {
            let _guard = hub.open.lock();
            // SAFETY: the queue is open, and the buffer has room for an entry of any version.
            unsafe {
                let readerr = (*(*queue).ops).readerr;
                readerr.map_or(0, |readerr| readerr(queue, (&raw mut read).cast(), 0))
            }
        };
        let fi_cq_err_entry { op_context, flags, err, prov_errno, .. } = read.entry;
        if count != 1 {
            return;
        }
        // The context of an error in a peer's operation need not be one of this engine.
        let of_peer = flags & (sys::FI_REMOTE_WRITE | sys::FI_REMOTE_READ) != 0;
        let index = if of_peer { None } else { self.slot_of(op_context) };
        match index {
            // Some providers negate the number.
            Some(index) => {
                self.part_failed(hub, endpoint, index, -err.saturating_abs(), prov_errno);
            }
            None => tracing::warn!(err, prov_errno, flags, "an error of no request of this side"),
        }
    }

    /// Returns the index of the slot at an address that libfabric returned. Returns `None` if the
    /// address is null, as in some entries, or if the slot has no part.
    pub(super) fn slot_of(&self, context: *mut c_void) -> Option<usize> {
        let slot: *const Slot = context.cast_const().cast();
        // SAFETY: libfabric returns the address of a slot that this engine posted, or null. Slots
        // live as long as the engine.
        let index = unsafe { slot.as_ref() }?.index;
        self.parts.get(index)?.is_some().then_some(index)
    }

    /// Cancels a posted part. Returns false if libfabric does not cancel it.
    pub(super) fn cancel(&self, hub: &Hub, endpoint: &EndpointState, index: usize) -> bool {
        let object = endpoint.objects.endpoint;
        let slot = self.slots[index];
        let _guard = hub.open.lock();
        // SAFETY: the endpoint is open while it is in the table. The call only compares the address
        // of the slot.
        unsafe {
            let cancel = (*(*object).ops).cancel;
            cancel.is_some_and(|cancel| cancel(object.cast(), slot.cast()) == 0)
        }
    }

    /// Returns the slots of an endpoint's posted parts, and puts new slots in their place.
    /// libfabric uses the returned slots until the endpoint's objects are closed.
    pub(super) fn bury_slots(&mut self, id: u64) -> Vec<*mut Slot> {
        let used = self.parts.iter().enumerate().filter_map(|(index, part)| {
            part.as_ref().is_some_and(|part| part.endpoint == id && part.posted).then_some(index)
        });
        let new = |index| Box::into_raw(Slot::new(index));
        let slots = &mut self.slots;
        used.map(|index| mem::replace(&mut slots[index], new(index))).collect()
    }
}
