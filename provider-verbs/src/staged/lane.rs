//! Lanes: queues of the requests in one direction of an endpoint that has staged transfers. An
//! entry is a request in a lane.
//!
//! Like the NIC, a lane runs requests in the order of their posts. A lane posts a request's chunks
//! after all chunks of earlier requests, and completes requests in that order. While a lane has
//! entries, each new request goes through the lane, staged or not. A failed request in a lane ends
//! the connection and cancels the requests behind it.
//!
//! A request takes staging buffers only after all earlier requests have theirs, which rules out a
//! deadlock of requests that wait for buffers. A request behind a message also waits for the
//! receiver. Its buffers then come from the share for messages, not from the share for RMA.
//!
//! A post advances its lane. A reader of any completion queue, or a call of `progress`, advances
//! all lanes of the device. The reason is that a transfer may wait for the staging buffers of
//! another transfer, whose completion queue no thread reads.
//!
//! # Sleep
//!
//! A thread may sleep for a completion queue while lanes have entries: the NIC wakes the thread
//! when a request completes to the queue. The thread must not sleep while a lane needs calls (see
//! [`ActiveLanes::need_calls`]). Three calls can make a lane need calls, and then make the queues'
//! fds readable: a post, a cancellation, and the close of a region.

#![allow(unsafe_code, reason = "posts requests of staged transfers")]

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    ErrorKind, Result,
    transfer::{CompletionKind, WorkRequest},
};
use hmem_p2p::staging::Posted;
use parking_lot::Mutex;

use super::task::{QueuedRequest, Task, kind_of};
use crate::{
    cq::Room,
    in_flight::{Arrival, LaneUpdates, RequestOwner, Token},
    post::{Poster, takes_receive},
    queue::{CqState, Queues},
    ready::Ready,
};

/// The two lanes (queues of requests) of an endpoint that has staged transfers: one for sends and
/// one for receives.
pub(crate) struct Lanes {
    poster: Arc<Poster>,
    queues: Queues,
    active: Arc<ActiveLanes>,
    send: Lane,
    receive: Lane,
}

/// A queue of the requests in one direction of an endpoint.
struct Lane {
    /// Length of `entries`. It changes only while `entries` is locked.
    busy: AtomicUsize,
    entries: Mutex<VecDeque<QueuedRequest>>,
    /// Number that the next request in the lane gets.
    next: AtomicU64,
    /// Results of posted requests, which the [`Poster`] writes, and cancellations, which
    /// [`Lanes::cancel`] writes. A thread that holds this lock takes no other lock.
    updates: Arc<Mutex<LaneUpdates>>,
}

impl Lane {
    fn new(updates: &Arc<Mutex<LaneUpdates>>) -> Self {
        Self {
            busy: AtomicUsize::new(0),
            entries: Mutex::default(),
            next: AtomicU64::new(0),
            updates: Arc::clone(updates),
        }
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire) > 0
    }

    /// Applies the results and the cancellation in `self.updates` to the requests of the lane, and
    /// clears `self.updates`. Returns false if there was nothing to apply.
    fn take_updates(&self, entries: &mut VecDeque<QueuedRequest>) -> bool {
        let LaneUpdates { ended, canceled_before } = std::mem::take(&mut *self.updates.lock());
        for entry in entries.iter_mut().filter(|entry| entry.number < canceled_before) {
            entry.cancel();
        }
        let any = !ended.is_empty() || canceled_before > 0;
        for (token, result, arrival) in ended {
            if let Some(entry) = entries.iter_mut().find(|entry| entry.number == token.entry) {
                entry.ended(token, result, arrival);
            }
        }
        any
    }
}

impl Lanes {
    pub(crate) fn new(poster: &Arc<Poster>, queues: &Queues, active: &Arc<ActiveLanes>) -> Self {
        Self {
            poster: Arc::clone(poster),
            queues: queues.clone(),
            active: Arc::clone(active),
            send: Lane::new(poster.updates(CompletionKind::Send)),
            receive: Lane::new(poster.updates(CompletionKind::Receive)),
        }
    }

    fn of(&self, kind: CompletionKind) -> &Lane {
        if kind == CompletionKind::Receive { &self.receive } else { &self.send }
    }

    fn is_busy(&self) -> bool {
        self.send.is_busy() || self.receive.is_busy()
    }

    /// Makes both lanes cancel their present requests when they advance next. Work requests that
    /// the NIC already processes still complete.
    pub(crate) fn cancel(&self) {
        for lane in [&self.send, &self.receive] {
            lane.updates.lock().canceled_before = lane.next.load(Ordering::Acquire);
        }
        self.queues.ring();
    }

    /// Returns true if a request must go through a lane, because the request names staged memory or
    /// earlier requests are in the lane.
    #[inline]
    pub(crate) fn takes(&self, request: &WorkRequest<'_>) -> bool {
        if self.of(kind_of(&request.operation)).is_busy() {
            return true;
        }
        let domain = &self.poster.domain;
        domain.staging.has_regions()
            && request.local.iter().any(|segment| domain.regions.staged(segment).is_some())
    }

    /// Adds a request to the lane for sends or the lane for receives.
    ///
    /// # Errors
    /// - Again: the lane or the completion queue is full.
    /// - BadState: the endpoint is closed.
    /// - The errors of [`Task::new`].
    pub(crate) fn post(self: &Arc<Self>, request: &WorkRequest<'_>) -> Result<()> {
        let kind = kind_of(&request.operation);
        let (depth, cap) = {
            let state = self.poster.lock();
            let pair = state.connection.open()?;
            (pair.depth, pair.cap)
        };
        let task = Task::new(&self.poster.domain, request, cap)?;
        let lane = self.of(kind);
        let mut entries = lane.entries.lock();
        if entries.len() >= depth as usize {
            return Err(self
                .poster
                .domain
                .refuse_post(ErrorKind::Again, "the queue is full: read completions"));
        }
        // An earlier failure must not cancel this request, so the lane handles that failure first.
        self.step(lane, &mut entries);
        self.poster.reserve(kind, Room::COMPLETION)?;
        entries.push_back(QueuedRequest {
            number: lane.next.fetch_add(1, Ordering::AcqRel),
            kind,
            takes_receive: takes_receive(&request.operation),
            context: request.context,
            task,
            arrival: Arrival::default(),
            noticed: false,
        });
        lane.busy.store(entries.len(), Ordering::Release);
        self.active.add(self);
        self.step(lane, &mut entries);
        let needs_calls = entries.iter().any(|entry| entry.is_copying() || entry.is_unposted());
        drop(entries);
        if needs_calls {
            self.active.ring();
        }
        Ok(())
    }

    /// Advances the requests in both lanes. Returns the number of requests that ended.
    pub(crate) fn step_all(&self) -> usize {
        let mut ended = 0;
        for lane in [&self.send, &self.receive] {
            // If another thread holds the lock, that thread advances the lane.
            if lane.is_busy()
                && let Some(mut entries) = lane.entries.try_lock()
            {
                ended += self.step(lane, &mut entries);
            }
        }
        ended
    }

    /// Advances the requests of a lane until none of them changes. Then moves the completions of
    /// ended requests to their completion queue, and returns the number of completions.
    fn step(&self, lane: &Lane, entries: &mut VecDeque<QueuedRequest>) -> usize {
        while self.advance(lane, entries) {}
        self.hand_out(lane, entries)
    }

    /// Returns true if a lane that completes to another queue than `queue` has requests.
    fn is_busy_beside(&self, queue: &Arc<CqState>) -> bool {
        self.send.is_busy() && !Arc::ptr_eq(&self.queues.tx, queue)
            || self.receive.is_busy() && !Arc::ptr_eq(&self.queues.rx, queue)
    }

    /// Advances the requests in both lanes. Returns true if a reader of `queue` must not sleep, for
    /// the reasons of [`ActiveLanes::need_calls`].
    ///
    /// `others_busy` is true if a lane that completes to another queue had requests before this
    /// call, and so may hold staging buffers.
    fn need_calls(&self, queue: &Arc<CqState>, others_busy: bool) -> bool {
        [(&self.send, &self.queues.tx), (&self.receive, &self.queues.rx)].into_iter().any(
            |(lane, completes_to)| {
                if !lane.is_busy() {
                    return false;
                }
                // Another thread holds the lock, and may leave work to do.
                let Some(mut entries) = lane.entries.try_lock() else { return true };
                let progressed = self.advance(lane, &mut entries);
                self.hand_out(lane, &mut entries);
                let is_own = Arc::ptr_eq(completes_to, queue);
                let is_send = std::ptr::eq(lane, &self.send);
                progressed
                    || entries.iter().any(|entry| {
                        entry.is_copying()
                            || (is_own && others_busy && entry.needs_buffers())
                            || (!is_own && is_send && entry.is_unposted())
                    })
            },
        )
    }

    /// Advances each request of a lane as far as possible without waiting. Returns true if a
    /// request changed.
    fn advance(&self, lane: &Lane, entries: &mut VecDeque<QueuedRequest>) -> bool {
        let mut progressed = lane.take_updates(entries);
        let (mut may_begin, mut may_post, mut failed) = (true, true, false);
        let mut behind_message = self.poster.lock().requests.has_messages();
        for entry in entries.iter_mut() {
            if failed && !entry.has_failed() {
                entry.cancel();
                entry.noticed = true;
                progressed = true;
            }
            let failed_before = entry.has_failed();
            let number = entry.number;
            match &mut entry.task {
                Task::Staged(transfer) => {
                    transfer.fail_if_closed();
                    transfer.set_behind_message(behind_message || entry.takes_receive);
                    progressed |= transfer.step(may_begin, &mut |chunk, request| {
                        if !may_post {
                            return Ok(Posted::Full);
                        }
                        self.post_now(request, Token { entry: number, chunk })
                    });
                    may_begin &= transfer.pipeline().has_begun();
                    may_post &= transfer.pipeline().is_posted();
                }
                Task::Waiting(request) if may_post => {
                    let token = Token { entry: number, chunk: 0 };
                    match request.with(|request| self.post_now(request, token)) {
                        Ok(Posted::Full) => may_post = false,
                        Ok(_) => (entry.task, progressed) = (Task::Posted, true),
                        Err(error) => (entry.task, progressed) = (Task::Ended(Err(error)), true),
                    }
                }
                Task::Waiting(_) | Task::Posted | Task::Ended(_) => {}
            }
            behind_message |= entry.takes_receive && !entry.is_over();
            if entry.has_failed() && !entry.noticed {
                (entry.noticed, failed) = (true, true);
                if !failed_before {
                    self.end_connection();
                }
            }
        }
        progressed
    }

    /// Posts a work request of a lane to the NIC. Returns [`Posted::Full`] if a queue of the NIC is
    /// full.
    fn post_now(&self, request: &WorkRequest<'_>, token: Token) -> Result<Posted> {
        // SAFETY: the memory lies in regions whose descriptors the request names, or in staging
        // buffers, which live as long as their domain.
        match unsafe { self.poster.post(request, RequestOwner::Lane(token)) } {
            Ok(()) => Ok(Posted::Sent),
            Err(error) if error.kind() == ErrorKind::Again => Ok(Posted::Full),
            Err(error) => Err(error),
        }
    }

    /// Ends the connection after a copy or a post of this side has failed, so that the peer
    /// receives no later request.
    fn end_connection(&self) {
        let connection = &mut self.poster.lock().connection;
        if !connection.has_failed() {
            connection.fail("cannot stop the connection of a failed staged transfer");
        }
    }

    /// Moves the completions of ended requests to their completion queue, in order. Returns the
    /// number of completions.
    fn hand_out(&self, lane: &Lane, entries: &mut VecDeque<QueuedRequest>) -> usize {
        let mut ended = 0;
        while entries.front().is_some_and(QueuedRequest::is_over)
            && let Some(entry) = entries.pop_front()
        {
            let (kind, context, arrival) = (entry.kind, entry.context, entry.arrival);
            let completion = self.poster.finish(kind, context, entry.result(), arrival);
            self.queues.of(kind).ready.push(completion);
            ended += 1;
        }
        lane.busy.store(entries.len(), Ordering::Release);
        ended
    }

    /// Ends every request in both lanes. The caller has destroyed the queue pair, so that the NIC
    /// processes no request of the endpoint.
    pub(crate) fn shut(&self) {
        for lane in [&self.send, &self.receive] {
            let mut entries = lane.entries.lock();
            lane.take_updates(&mut entries);
            for entry in entries.iter_mut() {
                entry.cancel();
                if let Task::Staged(transfer) = &mut entry.task {
                    transfer.pipeline_mut().stop();
                }
            }
            self.hand_out(lane, &mut entries);
        }
    }

    /// Fails the transfers that use closed regions. Waits for their copies in flight.
    fn abandon_closed(&self) {
        let mut stopped = false;
        for lane in [&self.send, &self.receive] {
            if !lane.is_busy() {
                continue;
            }
            for entry in lane.entries.lock().iter_mut() {
                if let Task::Staged(transfer) = &mut entry.task
                    && transfer.fail_if_closed()
                {
                    transfer.pipeline_mut().stop();
                    stopped = true;
                }
            }
        }
        if stopped {
            self.queues.ring();
        }
    }
}

/// The lanes (queues of staged transfers) of a device that are not empty, and all completion queues
/// of the device.
#[derive(Default)]
pub(crate) struct ActiveLanes {
    /// Length of `lanes`. It changes only while `lanes` is locked.
    count: AtomicUsize,
    /// The lanes with requests. [`Self::progress`] removes lanes that have become empty.
    lanes: Mutex<Vec<Weak<Lanes>>>,
    queues: Mutex<Vec<Weak<Ready>>>,
}

impl ActiveLanes {
    /// Adds a completion queue of the device. The queue's readers advance the lanes (queues of
    /// staged transfers).
    pub(crate) fn add_queue(&self, queue: &Arc<Ready>) {
        let mut queues = self.queues.lock();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(queue));
    }

    fn add(&self, lanes: &Arc<Lanes>) {
        let mut active = self.lanes.lock();
        if active.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(lanes))) {
            return;
        }
        active.push(Arc::downgrade(lanes));
        self.count.store(active.len(), Ordering::Release);
    }

    /// Wakes the threads that wait for any completion queue of the device. Each of these threads
    /// then advances the staged transfers of the device.
    fn ring(&self) {
        self.queues.lock().iter().filter_map(Weak::upgrade).for_each(|queue| queue.ring());
    }

    /// Returns true if a reader of `queue` must not sleep, because a staged transfer advances only
    /// during calls of the application.
    ///
    /// The NIC wakes the reader for completions of `queue` only. Five things need calls:
    ///
    /// - Copies in flight: a copy engine does not announce their end.
    /// - Requests of a lane that completes to `queue` and waits for buffers, while a lane of
    ///   another queue is busy. That other lane may hold the buffers.
    /// - Requests of a send lane of another queue that are not posted. The peer may wait for these
    ///   requests, and their own queue may have no reader.
    /// - A lane that another thread is advancing: that thread may leave work to do.
    /// - A lane that this call has advanced: there may be more work to do.
    ///
    /// Requests that the NIC processes need no calls. A posted receive may wait for its peer
    /// without limit.
    pub(crate) fn need_calls(&self, queue: &Arc<CqState>) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let lanes = self.list();
        // `others_busy` is computed before the lanes of `queue` advance. A lane that is idle now
        // has released its buffers already, so the lanes of `queue` can use them.
        let others_busy = lanes.iter().any(|lanes| lanes.is_busy_beside(queue));
        lanes.iter().any(|lanes| lanes.need_calls(queue, others_busy))
    }

    fn list(&self) -> Vec<Arc<Lanes>> {
        self.lanes.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Advances all lanes of the device. Returns the number of requests that ended.
    #[inline]
    pub(crate) fn progress(&self) -> usize {
        if self.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut ended = 0;
        for lanes in self.list() {
            if let Err(error) = lanes.queues.drain() {
                // A reader of that queue gets the same error.
                tracing::debug!(%error, "cannot read a queue with staged transfers");
            }
            ended += lanes.step_all();
        }
        // If a post fills an idle lane meanwhile, that post adds the lane to the list again under
        // this lock.
        let mut active = self.lanes.lock();
        active.retain(|lanes| lanes.upgrade().is_some_and(|lanes| lanes.is_busy()));
        self.count.store(active.len(), Ordering::Release);
        ended
    }

    /// Fails the transfers that use closed regions. Waits for their copies in flight.
    pub(crate) fn abandon_closed(&self) {
        for lanes in self.list() {
            lanes.abandon_closed();
        }
    }
}
