//! Requests that name staged memory.
//!
//! Such a request keeps its place in the order of its endpoint's posts. Each chunk becomes a
//! request of the engine. The parts of all chunks are posted before the later requests to the same
//! peer.
//!
//! The NIC need not keep the order of writes: the part with the immediate data is posted after the
//! other parts have ended. A failed copy cancels the requests to the same peer that wait behind the
//! staged request. So no message announces bytes that were not written.

use hmem_core::{Result, transfer::CompletionKind};
use hmem_p2p::staging::{FailedStep, Posted, Transfer};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    super::{
        endpoint_state::{EndpointState, Waiting},
        hub::Hub,
        request_plan::{Planned, carry_length, plan},
    },
    Engine, InFlight, Request, canceled,
};

/// The results of one pass over the waiting requests of an endpoint. In the lists of peers, `None`
/// stands for the receives.
#[derive(Default)]
pub(super) struct Round {
    /// Peers to which no later part is posted in this pass.
    pub(super) blocked: SmallVec<[Option<usize>; 4]>,
    /// Peers with a staged request that has not yet got all its staging buffers. Later requests to
    /// these peers take none in this pass.
    unbegun: Vec<Option<usize>>,
    /// Peers with a staged request that has failed in this pass. Later parts to these peers are
    /// canceled.
    pub(super) stopped: Vec<Option<usize>>,
    /// Slots of parts that libfabric refused, each with libfabric's error number.
    pub(super) failed: Vec<(usize, i32)>,
    /// Slots of parts that are canceled because of an earlier failure.
    pub(super) canceled: Vec<usize>,
    /// Staged requests that have ended.
    pub(super) over: Vec<u64>,
}

/// The time at which a part may be posted.
pub(super) enum Turn {
    Now,
    /// After other parts of the request have ended.
    Later,
    /// Never, because another part of the request has failed.
    Never,
}

/// Returns when a part of `request` may be posted. `carries_data` is true for the part of a write
/// that has the immediate data, which announces all bytes of the request.
pub(super) fn turn(
    requests: &FxHashMap<u64, Request>,
    request: &Request,
    carries_data: bool,
    hub: &Hub,
) -> Turn {
    let owner = request.chunk_of.and_then(|(number, _)| requests.get(&number));
    let has_failed = |transfer: &Transfer| transfer.pipeline().has_failed();
    let failed = owner.is_some_and(|owner| owner.staged.as_deref().is_some_and(has_failed));
    let others = request.left > 1 || owner.is_some_and(|owner| owner.chunks > 1);
    match () {
        () if failed || (carries_data && request.error.is_some()) => Turn::Never,
        () if carries_data && others && (owner.is_some() || !hub.orders_writes()) => Turn::Later,
        () => Turn::Now,
    }
}

impl InFlight {
    /// Advances a staged request: starts copies, and posts filled chunks. Returns true if the
    /// request has not ended.
    pub(super) fn step_staged(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        number: u64,
        round: &mut Round,
    ) -> bool {
        let Some(request) = self.requests.get_mut(&number) else { return false };
        let Some(mut transfer) = request.staged.take() else { return false };
        let peer = request.peer;
        if peer.is_some() && round.stopped.contains(&peer) {
            let error = canceled(hub, "an earlier staged transfer failed");
            transfer.pipeline_mut().fail(FailedStep::NicTransfer, error);
        }
        transfer.set_behind_message(self.is_behind_message(endpoint.number, number, peer));
        let may_begin = !round.unbegun.contains(&peer);
        let object = endpoint.objects.endpoint;
        let mut progressed = true;
        while progressed {
            let mut chunks: SmallVec<[(u64, Planned); 2]> = SmallVec::new();
            progressed = transfer.step(may_begin, &mut |chunk, work| {
                chunks.push((chunk, plan(hub, work, object)?));
                Ok(Posted::Sent)
            });
            for (chunk, planned) in chunks {
                self.post_chunk(hub, endpoint, (number, chunk), planned, round);
            }
        }
        let pipeline = transfer.pipeline();
        if !pipeline.has_begun() {
            round.unbegun.push(peer);
        }
        let (posted, failed, over) =
            (pipeline.is_posted(), pipeline.has_failed(), pipeline.is_over());
        if !posted {
            round.blocked.push(peer);
        }
        if over {
            round.over.push(number);
        }
        if let Some(request) = self.requests.get_mut(&number) {
            request.staged = Some(transfer);
            if posted && !request.settled {
                request.settled = true;
                if failed && peer.is_some() {
                    round.stopped.push(peer);
                }
            }
        }
        !over
    }

    /// Returns true if a message to the peer that was posted before the request has not ended.
    fn is_behind_message(&self, id: u64, number: u64, peer: Option<usize>) -> bool {
        peer.is_some()
            && self.requests.iter().any(|(other, request)| {
                *other < number
                    && request.kind == CompletionKind::Send
                    && (request.endpoint, request.peer) == (id, peer)
            })
    }

    /// Adds the request of a chunk, and posts its parts ahead of the later requests.
    fn post_chunk(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        (number, chunk): (u64, u64),
        mut planned: Planned,
        round: &mut Round,
    ) {
        let Some(owner) = self.requests.get_mut(&number) else { return };
        owner.chunks += 1;
        carry_length(&mut planned, owner.bytes);
        let mut request = Request::new(endpoint.number, planned.kind, planned.bytes, owner.peer);
        request.chunk_of = Some((number, chunk));
        let (_, parts) = self.admit(hub, endpoint, request, &mut planned);
        for index in parts {
            if self.post_part(hub, endpoint, index, round) {
                endpoint.waiting.push_back(Waiting::Part(index));
            }
        }
    }

    /// Reports the end of a chunk to its staged request, which ends in a later pass.
    pub(super) fn chunk_ended(
        &mut self,
        number: u64,
        chunk: u64,
        request: &Request,
        result: Result<u64>,
    ) {
        let Some(owner) = self.requests.get_mut(&number) else { return };
        owner.chunks -= 1;
        if request.receives() {
            (owner.tag, owner.data) = (request.tag, request.data);
        }
        if let Some(transfer) = &mut owner.staged {
            transfer.pipeline_mut().landed(chunk, result);
        }
    }

    /// Ends a staged request whose copies and chunks have ended.
    pub(super) fn staged_ended(&mut self, hub: &Hub, endpoint: &mut EndpointState, number: u64) {
        let Some(request) = self.requests.get_mut(&number) else { return };
        let Some(transfer) = &mut request.staged else { return };
        match transfer.pipeline_mut().result() {
            Ok(bytes) => request.bytes = bytes,
            Err((_, error)) => request.error = Some(error),
        }
        request.left = 0;
        endpoint.side(request.kind).in_flight -= 1;
        self.request_ended(hub, endpoint, number);
    }

    /// Returns the transfers of a closed endpoint that have chunks in flight. Their copies have
    /// stopped, but libfabric may still use their staging buffers.
    pub(super) fn bury_transfers(&mut self, hub: &Hub, id: u64) -> Vec<Transfer> {
        let used = |request: &&mut Request| request.endpoint == id && request.chunks > 0;
        let transfers = self.requests.values_mut().filter(used).filter_map(|request| {
            let mut transfer = request.staged.take()?;
            let error = canceled(hub, "its endpoint was closed");
            transfer.pipeline_mut().fail(FailedStep::NicTransfer, error);
            transfer.pipeline_mut().stop();
            Some(*transfer)
        });
        transfers.collect()
    }
}

impl Engine {
    /// Fails the staged requests that use a closed region, and waits until their copies have
    /// stopped. The requests keep the staging buffers that libfabric may still use.
    pub(super) fn abandon_staged(&mut self, hub: &Hub, token: u64) {
        let mut receives: SmallVec<[(u64, u64); 2]> = SmallVec::new();
        for (number, request) in &mut self.in_flight.requests {
            if let Some(transfer) = &mut request.staged
                && request.tokens.contains(&token)
                && transfer.fail_if_closed()
            {
                transfer.pipeline_mut().stop();
                request.tokens.retain(|used| *used != token);
                if request.receives() {
                    receives.push((request.endpoint, *number));
                }
            }
        }
        for (id, number) in receives {
            if let Some(endpoint) = self.endpoints.get_mut(&id) {
                self.in_flight.cancel_receive(hub, endpoint, number);
            }
        }
    }
}
