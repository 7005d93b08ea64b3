//! The state of a request in a lane.

use hmem_core::{
    Access, ErrorKind, Result,
    transfer::{CompletionKind, Operation, OwnedRequest, WorkRequest},
};
use hmem_p2p::staging::{FailedStep, LocalMemory, Transfer, Use, staged_right};

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

impl QueuedRequest {
    pub(super) fn is_over(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => transfer.pipeline().is_over(),
            Task::Ended(_) => true,
            Task::Waiting(_) | Task::Posted => false,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => transfer.pipeline().has_failed(),
            Task::Ended(result) => result.is_err(),
            Task::Waiting(_) | Task::Posted => false,
        }
    }

    /// Returns true if copies of the request are in flight.
    pub(super) fn is_copying(&self) -> bool {
        matches!(&self.task, Task::Staged(transfer) if transfer.pipeline().is_copying())
    }

    /// Returns true if the request has to take further staging buffers.
    pub(super) fn needs_buffers(&self) -> bool {
        matches!(&self.task, Task::Staged(transfer) if !transfer.pipeline().has_begun())
    }

    /// Returns true if a part of the request has not been posted to the NIC yet.
    pub(super) fn is_unposted(&self) -> bool {
        match &self.task {
            Task::Staged(transfer) => !transfer.pipeline().is_posted(),
            Task::Waiting(_) => true,
            Task::Posted | Task::Ended(_) => false,
        }
    }

    /// Cancels all parts of the request that the NIC is not processing.
    pub(super) fn cancel(&mut self) {
        match &mut self.task {
            Task::Staged(transfer) => {
                transfer.pipeline_mut().fail(FailedStep::NicTransfer, canceled(self.kind))
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
                transfer.pipeline_mut().landed(token.chunk, result.map(|_| 0));
            }
            Task::Staged(transfer) => transfer.pipeline_mut().landed(token.chunk, result),
            task => *task = Task::Ended(result),
        }
    }

    pub(super) fn result(self) -> Result<u64> {
        match self.task {
            Task::Staged(mut transfer) => {
                transfer.pipeline_mut().result().map_err(|(_, error)| error)
            }
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
        let refuse = |why| Err(domain.refuse_post(ErrorKind::Unsupported, why));
        let is_tagged = matches!(
            request.operation,
            Operation::Send { tag: Some(_), .. }
                | Operation::SendImmediate { tag: Some(_), .. }
                | Operation::Receive { tag: Some(_), .. }
        );
        if is_tagged {
            return refuse("send without a tag: verbs has no tagged messages");
        }
        let memory = local_memory(domain, request)?;
        if !memory.is_staged() {
            return Ok(Self::Waiting(OwnedRequest::new(request)));
        }
        let Some((pool, buffers)) = domain.staging.buffers() else {
            return Err(domain.refuse_post(ErrorKind::NoRegion, "the region is closed"));
        };
        let receives = matches!(request.operation, Operation::Receive { .. });
        let max_sge = if receives { cap.max_recv_sge } else { cap.max_send_sge };
        let transfer = Transfer::new(&pool, buffers, request, memory, u64::from(max_sge))
            .map_err(|error| error.provider(domain.pd.device.nic.to_string()))?;
        // A write with immediate data waits for the peer's receive, like a send. Its chunks use the
        // buffers of sends.
        let has_data = matches!(request.operation, Operation::WriteImmediate { .. });
        if has_data && transfer.bytes() > 0 && pool.share(Use::Send) == 0 {
            let why = "give the domain at least 3 staging buffers (DomainAttr::staging), or write \
                       without immediate data";
            return Err(domain.refuse_post(ErrorKind::MessageTooLong, why));
        }
        Ok(Self::Staged(Box::new(transfer)))
    }
}

/// Splits a request's local memory into parts of staged memory and segments of other memory.
///
/// # Errors
/// - The errors of [`Regions::local`](crate::region::Regions::local).
/// - OutOfBounds: a segment is not inside its staged region.
fn local_memory(domain: &DomainState, request: &WorkRequest<'_>) -> Result<LocalMemory> {
    let right = staged_right(&request.operation).unwrap_or(Access::empty());
    let mut memory = LocalMemory::default();
    for segment in request.local {
        match domain.regions.local(segment, right)? {
            None => memory.push_plain(*segment),
            Some(region) => memory
                .push_staged(region, segment)
                .map_err(|error| error.provider(domain.pd.device.nic.to_string()))?,
        }
    }
    Ok(memory)
}

/// Returns the kind of the completion of a request.
pub(super) fn kind_of(operation: &Operation<'_>) -> CompletionKind {
    match operation {
        Operation::Write { .. } | Operation::WriteImmediate { .. } => CompletionKind::Write,
        Operation::Read { .. } => CompletionKind::Read,
        Operation::Atomic { .. } => CompletionKind::Atomic,
        Operation::Receive { .. } => CompletionKind::Receive,
        Operation::BindWindow { .. } => CompletionKind::BindWindow,
        Operation::InvalidateWindow { .. } => CompletionKind::InvalidateWindow,
        _ => CompletionKind::Send,
    }
}
