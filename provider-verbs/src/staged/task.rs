//! The state of a request in a lane.

use std::sync::Arc;

use hmem_core::{
    Access, ErrorKind, LocalKey, Result,
    transfer::{CompletionKind, Operation, OwnedOperation, OwnedRequest, PeerId, WorkRequest},
};
use hmem_p2p::staging::{ChunkPlan, Claim, FailedStep, Pipeline, StagedRange, Use};

use super::{
    memory::region_closed,
    request::{Lists, check_len, is_message, staged_right},
};
use crate::{
    chain::check_keys,
    completion::canceled,
    domain_state::DomainState,
    in_flight::{Arrival, Token},
    post::immediate,
    sys::QpCap,
    window::check_part,
};

/// A request in a lane (a queue of staged transfers), with its progress.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    /// Number of the request. Later requests of the lane have greater numbers.
    pub(super) number: u64,
    pub(super) kind: CompletionKind,
    /// True if the request consumes a receive that the peer posts.
    pub(super) takes_receive: bool,
    pub(super) context: u64,
    pub(super) task: Task,
    /// Data about the received message, which is known once a receive has ended.
    pub(super) arrival: Arrival,
    /// True once the lane has handled the failure of this request by canceling the later requests.
    pub(super) noticed: bool,
}

/// State of the work on a request.
#[derive(Debug)]
pub(super) enum Task {
    /// A request that names staged memory. It stays in this variant until it leaves the lane.
    Staged(Box<Transfer>),
    /// A request without staged memory that waits for earlier requests.
    Waiting(OwnedRequest),
    /// A request without staged memory that the NIC processes.
    Posted,
    /// A request without staged memory that has ended.
    Ended(Result<u64>),
}

/// A request that names staged memory.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) pipeline: Pipeline<Arc<StagedRange>>,
    pub(super) lists: Lists,
    pub(super) operation: OwnedOperation,
    /// Local key of the staging buffers.
    pub(super) buffers: LocalKey,
    pub(super) peer: PeerId,
}

impl QueuedRequest {
    pub(super) fn is_over(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => transfer.pipeline.is_over(),
            Task::Ended(_) => true,
            Task::Waiting(_) | Task::Posted => false,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => transfer.pipeline.has_failed(),
            Task::Ended(result) => result.is_err(),
            Task::Waiting(_) | Task::Posted => false,
        }
    }

    /// Returns true if copies of the request are in flight.
    pub(super) fn is_copying(&self) -> bool {
        matches!(&self.task, Task::Staged(transfer) if transfer.pipeline.is_copying())
    }

    /// Returns true if the request has to take further staging buffers.
    pub(super) fn needs_buffers(&self) -> bool {
        matches!(&self.task, Task::Staged(transfer) if !transfer.pipeline.has_begun())
    }

    /// Returns true if a part of the request has not been posted to the NIC yet.
    pub(super) fn is_unposted(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => !transfer.pipeline.is_posted(),
            Task::Waiting(_) => true,
            Task::Posted | Task::Ended(_) => false,
        }
    }

    /// Cancels all parts of the request that the NIC is not processing.
    pub(super) fn cancel(&mut self) {
        match &mut self.task {
            Task::Staged(transfer) => {
                transfer.pipeline.fail(FailedStep::NicTransfer, canceled(self.kind))
            }
            Task::Waiting(_) => self.task = Task::Ended(Err(canceled(self.kind))),
            Task::Posted | Task::Ended(_) => {}
        }
    }

    /// Applies the result of a work request that the lane posted for this request.
    pub(super) fn ended(&mut self, token: Token, result: Result<u64>, arrival: Arrival) {
        self.arrival = arrival;
        match &mut self.task {
            // A write with immediate data does not fill the buffers of the receive that it
            // consumes.
            Task::Staged(transfer) if arrival.written.is_some() => {
                transfer.pipeline.landed(token.chunk, result.map(|_| 0));
            }
            Task::Staged(transfer) => transfer.pipeline.landed(token.chunk, result),
            task => *task = Task::Ended(result),
        }
    }

    pub(super) fn result(self) -> Result<u64> {
        match self.task {
            Task::Staged(mut transfer) => transfer.pipeline.result().map_err(|(_, error)| error),
            Task::Ended(result) => result,
            Task::Waiting(_) | Task::Posted => Err(canceled(self.kind)),
        }
    }
}

impl Task {
    /// Checks a request and copies it, so that a lane can run the request after the post. Also
    /// checks the keys, so that a wrong key fails the post and not a later chunk. `cap` has the
    /// limits of the queue pair.
    pub(super) fn new(domain: &DomainState, request: &WorkRequest<'_>, cap: QpCap) -> Result<Self> {
        immediate(domain, &request.operation)?;
        check_keys(domain, &request.operation)?;
        if let Operation::BindWindow { bind, .. } = &request.operation {
            check_part(&domain.pd, &domain.regions, bind)?;
        }
        let right = staged_right(&request.operation);
        let lists = lists(domain, request, right)?;
        let refuse = |why| Err(domain.refuse_post(ErrorKind::Unsupported, why));
        let is_tagged = right.is_none()
            && !matches!(
                request.operation,
                Operation::Atomic { .. }
                    | Operation::BindWindow { .. }
                    | Operation::InvalidateWindow { .. }
            );
        if is_tagged {
            return refuse("send without a tag: verbs has no tagged messages");
        }
        if lists.runs.is_empty() {
            return Ok(Self::Waiting(OwnedRequest::new(request)));
        }
        if right.is_none() {
            return refuse("keep the operands in host memory: staged copies cannot be atomic");
        }
        let operation = OwnedOperation::new(&request.operation);
        check_len(&operation, lists.len)?;
        let transfer = Transfer::new(domain, request.peer, operation, lists, cap)?;
        Ok(Self::Staged(Box::new(transfer)))
    }
}

/// Splits a request's local memory into parts of staged memory and segments of other memory.
///
/// # Errors
/// - The errors of [`Regions::local`](crate::region::Regions::local).
/// - OutOfBounds: a segment is not inside its staged region.
fn lists(domain: &DomainState, request: &WorkRequest<'_>, right: Option<Access>) -> Result<Lists> {
    let mut lists = Lists::default();
    for segment in request.local {
        let Some(staged) = domain.regions.local(segment, right.unwrap_or(Access::empty()))? else {
            lists.push_plain(*segment);
            continue;
        };
        let runs = staged.runs(segment.address, segment.len).ok_or_else(|| {
            domain
                .refuse_post(ErrorKind::OutOfBounds, "use a segment inside its region")
                .context("address", segment.address)
                .context("length", segment.len)
        })?;
        for (piece, offset, len) in runs {
            lists.push_staged(piece, offset, len);
        }
        lists.regions.push(staged);
    }
    Ok(lists)
}

impl Transfer {
    /// If the transfer uses a closed region, fails the transfer and returns true. After that none
    /// of its copies begins.
    pub(super) fn fail_if_closed(&mut self) -> bool {
        let closed = self.lists.regions.iter().any(|region| region.is_closed());
        if closed {
            self.pipeline.fail(FailedStep::NicTransfer, region_closed());
        }
        closed
    }

    fn new(
        domain: &DomainState,
        peer: PeerId,
        operation: OwnedOperation,
        mut lists: Lists,
        cap: QpCap,
    ) -> Result<Self> {
        let (pool, buffers) = domain
            .staging
            .buffers()
            .ok_or_else(|| domain.refuse_post(ErrorKind::NoRegion, "the region is closed"))?;
        let slot_len = pool.slot_len();
        let receives = matches!(operation, OwnedOperation::Receive { .. });
        let (purpose, cut) = match &operation {
            OwnedOperation::Send { .. } => (Use::Send, ChunkPlan::whole(lists.len)),
            OwnedOperation::Receive { .. } => (Use::Receive, ChunkPlan::whole(lists.len)),
            OwnedOperation::Write { data: Some(_), .. } => {
                (Use::Send, ChunkPlan::chunks(lists.len, slot_len))
            }
            _ => (Use::Rma, ChunkPlan::chunks(lists.len, slot_len)),
        };
        if is_message(&operation) {
            let most = pool.share(purpose) as u64 * slot_len;
            let segments = lists.segments(slot_len);
            let max_sge = if receives { cap.max_recv_sge } else { cap.max_send_sge };
            if lists.len > most || segments > u64::from(max_sge) {
                let why = "a staged message needs all its buffers at once: give the domain more or \
                           longer ones (DomainAttr::staging), send less at once, or use RMA, \
                           which is divided into chunks";
                return Err(domain
                    .refuse_post(ErrorKind::MessageTooLong, why)
                    .context("length", lists.len)
                    .context("buffers hold", most)
                    .context("segments", segments)
                    .context("max_sge", max_sge));
            }
        }
        let runs = std::mem::take(&mut lists.runs);
        let comes_in = receives || matches!(operation, OwnedOperation::Read { .. });
        let (sources, targets) = if comes_in { (Vec::new(), runs) } else { (runs, Vec::new()) };
        let pipeline = Pipeline::new(Claim::new(&pool), purpose, cut, sources, targets);
        Ok(Self { pipeline, lists, operation, buffers, peer })
    }
}
