//! Detection of peers that have ended, by liveness checks and by a look at this machine's
//! processes.
//!
//! A liveness check reads the number that the peer's domain exposes (`PeerName::alive`). If the
//! read returns this number, the peer's process runs.

use std::{
    mem, ptr,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use hmem_core::{Errno, Error, ErrorKind, transfer::CompletionKind};
use smallvec::SmallVec;

use super::{
    super::{
        endpoint_state::{EndpointState, LOOK, Waiting},
        errors,
        hub::Hub,
        part::PartOp,
        plan::{HOST, Local, Vectors},
        request_plan::Planned,
        sys,
    },
    Engine, InFlight, Request,
};

/// Time limit of a liveness check. A peer without an answer until then counts as lost.
const ANSWER: Duration = Duration::from_secs(5);

/// Time during which a failed liveness check is repeated. After a refusal, the provider may still
/// be ending the old connection.
const AGAIN: Duration = Duration::from_secs(1);

impl InFlight {
    /// Starts a liveness check of a peer, unless one is in flight. Returns false if this domain or
    /// the peer's domain exposes no memory for the check.
    pub(super) fn ask(&mut self, hub: &Hub, endpoint: &mut EndpointState, peer: usize) -> bool {
        self.ask_since(hub, endpoint, peer, Instant::now())
    }

    /// Like [`Self::ask`], for a liveness check whose first read was posted at `since`.
    fn ask_since(
        &mut self,
        hub: &Hub,
        endpoint: &mut EndpointState,
        peer: usize,
        since: Instant,
    ) -> bool {
        let Some((memory, own)) = &hub.alive else { return false };
        let target = &mut endpoint.peers[peer];
        let Some(alive) = target.alive else { return false };
        if mem::replace(&mut target.asked, true) {
            return true;
        }
        self.last_question += 1;
        let (word, address) = memory.answer(self.last_question);
        word.store(!alive.number, Ordering::Relaxed);
        let desc = if hub.needs_desc() { own.desc } else { ptr::null_mut() };
        let local = Local { address, len: 8, desc, owner: HOST };
        let remote = sys::fi_rma_iov { addr: alive.address, len: 8, key: alive.key };
        let mut request = Request::new(endpoint.number, CompletionKind::Read, 8, Some(peer));
        request.question = Some((self.last_question, since));
        let mut planned = Planned::none(CompletionKind::Read, 8);
        planned.parts.push((PartOp::Read { remote }, Vectors::one(local)));
        let (number, parts) = self.admit(hub, endpoint, request, &mut planned);
        self.questions.push(number);
        // A staged request that waits for the answer holds up the requests behind it.
        for index in parts {
            endpoint.waiting.push_front(Waiting::Part(index));
        }
        true
    }

    /// Ends a liveness check, and the requests that waited for its result. Repeats a failed check
    /// instead if its first read was posted less than [`AGAIN`] ago.
    pub(super) fn answered(&mut self, hub: &Hub, endpoint: &mut EndpointState, number: u64) {
        let Some(request) = self.requests.remove(&number) else { return };
        let (Some(index), Some((question, asked))) = (request.peer, request.question) else {
            return;
        };
        let peer = &mut endpoint.peers[index];
        let expected = peer.alive.map(|alive| alive.number);
        let lives = request.error.is_none()
            && hub.alive.as_ref().is_some_and(|(memory, _)| {
                Some(memory.answer(question).0.load(Ordering::Relaxed)) == expected
            });
        peer.asked = false;
        let held = mem::take(&mut peer.held);
        if !lives && asked.elapsed() < AGAIN {
            // The provider may still be ending the old connection.
            if self.ask_since(hub, endpoint, index, asked) {
                endpoint.peers[index].held = held;
                return;
            }
        }
        self.end_held(hub, endpoint, held, lives);
    }

    fn end_held(&mut self, hub: &Hub, endpoint: &mut EndpointState, held: Vec<u64>, lives: bool) {
        for number in held {
            let Some(request) = self.requests.get_mut(&number) else { continue };
            // The status of a work completion says what happened.
            let told = |error: &mut Error| error.os_errno() == Some(Errno(errors::EIO));
            if let Some(error) = request.error.take_if(|error| !told(error)) {
                request.error = Some(if lives {
                    let why = "use a valid key, a range inside the region and a right that it \
                               grants: the peer lives and refused this access, or another one that \
                               was in flight with it";
                    Error::new(ErrorKind::AccessDenied, "transfer")
                        .provider(hub.attr().nic.to_string())
                        .caused_by(error)
                        .remedy(why)
                } else {
                    unreachable_peer(hub, error)
                });
            }
            self.finish(endpoint, number, None);
        }
    }
}

impl Engine {
    /// Ends the requests that have waited longer than [`ANSWER`] for a liveness check. The peer
    /// counts as lost.
    pub(super) fn end_old_questions(&mut self, hub: &Hub) {
        let mut silent: SmallVec<[(u64, usize); 1]> = SmallVec::new();
        let InFlight { questions, requests, .. } = &mut self.in_flight;
        questions.retain(|number| {
            let Some(request) = requests.get(number) else { return false };
            if let (Some((_, asked)), Some(peer)) = (request.question, request.peer)
                && asked.elapsed() > ANSWER
            {
                silent.push((request.endpoint, peer));
            }
            true
        });
        for (id, peer) in silent {
            let Some(endpoint) = self.endpoints.get_mut(&id) else { continue };
            let held = mem::take(&mut endpoint.peers[peer].held);
            self.in_flight.end_held(hub, endpoint, held, false);
        }
    }

    /// Ends the requests to peers of this machine that are closed, or whose process has ended.
    pub(super) fn end_lost_peers(&mut self, hub: &Hub) {
        if self.in_flight.requests.is_empty() || self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        let requests = &self.in_flight.requests;
        let to = |request: &Request| Some((request.endpoint, request.peer?));
        let mut peers: SmallVec<[_; 4]> = requests.values().filter_map(to).collect();
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|(id, peer)| {
            self.endpoints.get_mut(id).is_some_and(|endpoint| endpoint.peers[*peer].is_gone(hub))
        });
        // Set after the checks above. Otherwise the next search could come less than `LOOK` after a
        // peer's check, and would use that check's result.
        self.looked = Some(Instant::now());
        // Requests that libfabric has completed are reported as completed. Once a read after the
        // end of a peer finds the queue empty, no request to the peer completes any more. Until
        // then the requests wait for the next search.
        peers.retain(|(id, _)| {
            let endpoint = self.endpoints.get_mut(id);
            endpoint.is_some_and(|endpoint| self.in_flight.poll_all(hub, endpoint))
        });
        if peers.is_empty() {
            return;
        }
        let lost = self.in_flight.requests.iter().filter(|(_, request)| {
            to(request).is_some_and(|peer| peers.binary_search(&peer).is_ok())
        });
        let mut lost: Vec<_> = lost.map(|(number, _)| *number).collect();
        lost.sort_unstable();
        for number in lost {
            let Some(request) = self.in_flight.requests.get(&number) else { continue };
            let (id, kind, left) = (request.endpoint, request.kind, request.left);
            let (own, question) = (request.of_application(), request.question.is_some());
            let Some(endpoint) = self.endpoints.get_mut(&id) else { continue };
            // The slots of parts in flight stay in use until the endpoint closes.
            let (parts, free) = (&mut self.in_flight.parts, &mut self.in_flight.free);
            endpoint.waiting.retain(|waiting| {
                let Waiting::Part(index) = *waiting else {
                    return *waiting != Waiting::Staged(number);
                };
                let of_other = parts[index].as_ref().is_some_and(|part| part.request != number);
                if !of_other {
                    parts[index] = None;
                    free.push(index);
                }
                of_other
            });
            if own {
                endpoint.side(kind).in_flight -= left;
            }
            if question {
                self.in_flight.requests.remove(&number);
            } else {
                let cause = errors::call(&hub.attr().nic, "transfer", -sys::FI_ECONNRESET);
                let error = unreachable_peer(hub, cause);
                self.in_flight.finish(endpoint, number, Some(Err(error)));
            }
        }
    }
}

pub(super) fn unreachable_peer(hub: &Hub, cause: Error) -> Error {
    Error::new(ErrorKind::Unreachable, "transfer")
        .provider(hub.attr().nic.to_string())
        .caused_by(cause)
        .remedy("check that the peer's process runs: the connection to its endpoint was lost")
}
