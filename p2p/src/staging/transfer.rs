//! Transfers between staged regions and peers, over a NIC that reaches only the staging buffers.

use std::sync::Arc;

use hmem_core::{
    Access, Address, Error, ErrorKind, Iova, LocalKey, Result,
    transfer::{
        LocalSegment, Operation, OwnedOperation, OwnedRemoteSegment, PeerId, RemoteSegment,
        WorkRequest,
    },
};

use super::{
    chunk_plan::ChunkPlan,
    pipeline::{FailedStep, Pipeline, Posted, Run, View},
    pool::{Claim, Pool, Use},
    range::StagedRange,
    region::StagedRegion,
};

fn refuse(kind: ErrorKind, why: &'static str) -> Error {
    Error::new(kind, "post").remedy(why)
}

/// Returns the right that an operation needs on staged memory, or `None` if staged memory does not
/// support the operation: atomics, and binds of windows.
#[must_use]
pub const fn staged_right(operation: &Operation<'_>) -> Option<Access> {
    Some(match operation {
        Operation::Write { .. } | Operation::WriteImmediate { .. } => Access::WRITE,
        Operation::Read { .. } => Access::READ,
        Operation::Send { .. } | Operation::SendImmediate { .. } => Access::SEND,
        Operation::Receive { .. } => Access::RECV,
        _ => return None,
    })
}

/// Returns true for a send or a receive. All bytes of such a request must be in one work request.
const fn is_message(operation: &OwnedOperation) -> bool {
    matches!(operation, OwnedOperation::Send { .. } | OwnedOperation::Receive { .. })
}

/// Checks that the remote list of a write or read has `len` bytes, the length of the local list.
fn check_len(operation: &OwnedOperation, len: u64) -> Result<()> {
    let far = operation.remote().iter().fold(0_u64, |sum, part| sum.saturating_add(part.len));
    if is_message(operation) || far == len {
        return Ok(());
    }
    let why = "pass as many remote bytes as local bytes";
    Err(refuse(ErrorKind::InvalidArgument, why).context("local", len).context("remote", far))
}

/// Consecutive local bytes of a request: either all in staged memory, or all in memory that the NIC
/// accesses directly.
#[derive(Clone, Copy, Debug)]
struct LocalPart {
    len: u64,
    /// The segment that the NIC accesses directly; `None` for staged memory, which chunks move
    /// through staging buffers.
    plain: Option<LocalSegment>,
}

/// The local memory of a request that names staged memory.
#[derive(Debug, Default)]
pub struct LocalMemory {
    near: Vec<LocalPart>,
    /// The parts of the request's local memory that are staged.
    runs: Vec<Run<Arc<StagedRange>>>,
    /// The staged regions that the request names.
    regions: Vec<Arc<StagedRegion>>,
    /// Length of the request in bytes.
    len: u64,
}

impl LocalMemory {
    /// Adds a segment that the NIC accesses directly.
    pub fn push_plain(&mut self, segment: LocalSegment) {
        if segment.len > 0 {
            self.near.push(LocalPart { len: segment.len, plain: Some(segment) });
            self.len = self.len.saturating_add(segment.len);
        }
    }

    /// Adds a segment of a staged region.
    ///
    /// # Errors
    /// OutOfBounds: the segment is not inside the region.
    pub fn push_staged(&mut self, region: Arc<StagedRegion>, segment: &LocalSegment) -> Result<()> {
        let runs = region.runs(segment.address, segment.len).ok_or_else(|| {
            refuse(ErrorKind::OutOfBounds, "use a segment inside its region")
                .context("address", segment.address)
                .context("length", segment.len)
        })?;
        for (memory, offset, len) in runs {
            self.runs.push(Run { at: self.len, len, memory, offset });
            self.near.push(LocalPart { len, plain: None });
            self.len = self.len.saturating_add(len);
        }
        self.regions.push(region);
        Ok(())
    }

    /// Returns true if at least one byte is staged.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Returns the maximum number of local segments that the request needs if it is one message.
    /// `slot_len` is the length of a staging buffer.
    fn segments(&self, slot_len: u64) -> u64 {
        let (mut at, mut count) = (0, 0);
        for LocalPart { len, plain } in &self.near {
            count += match plain {
                None => (at + len - 1) / slot_len - at / slot_len + 1,
                Some(_) => 1,
            };
            at += len;
        }
        count
    }

    /// Returns the local segments of a chunk (a part of the transfer). For staged memory, these are
    /// segments of the chunk's staging buffers.
    fn local(&self, view: &View<'_>, buffers: LocalKey) -> Vec<LocalSegment> {
        let end = view.at + view.len;
        let mut at = 0;
        let mut local = Vec::new();
        for LocalPart { len, plain } in &self.near {
            let (start, stop) = (at.max(view.at), (at + len).min(end));
            if start < stop {
                let len = stop - start;
                match plain {
                    None => local.extend(view.parts(start, len).map(|(address, _, len)| {
                        LocalSegment { address, len, desc: Some(buffers) }
                    })),
                    Some(LocalSegment { address, desc, .. }) => {
                        let address = Address(address.0.wrapping_add(start - at));
                        local.push(LocalSegment { address, len, desc: *desc });
                    }
                }
            }
            at += len;
        }
        local
    }
}

/// A request that names staged memory.
///
/// The request is divided into work requests over staging buffers. A send or receive is a single
/// work request, because one receive of the peer takes the whole message. So a message needs all
/// its staging buffers at once.
#[derive(Debug)]
pub struct Transfer {
    pipeline: Pipeline<Arc<StagedRange>>,
    memory: LocalMemory,
    operation: OwnedOperation,
    /// Local key of the staging buffers.
    buffers: LocalKey,
    peer: PeerId,
    context: u64,
}

impl Transfer {
    /// Creates the transfer of `request`, whose local memory is `memory`. `buffers` is the local
    /// key of the pool's memory, and `max_segments` the largest number of local segments in a
    /// message.
    ///
    /// # Errors
    /// - Unsupported: staged memory does not support the operation.
    /// - InvalidArgument: the local and the remote list have different lengths.
    /// - MessageTooLong: the message does not fit the buffers that one message may use, or has more
    ///   segments than `max_segments`.
    pub fn new(
        pool: &Arc<Pool>,
        buffers: LocalKey,
        request: &WorkRequest<'_>,
        mut memory: LocalMemory,
        max_segments: u64,
    ) -> Result<Self> {
        if staged_right(&request.operation).is_none() {
            let why = "keep the operands in host memory: staged copies cannot be atomic";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        let operation = OwnedOperation::new(&request.operation);
        let len = memory.len;
        check_len(&operation, len)?;
        let slot_len = pool.slot_len();
        let receives = matches!(operation, OwnedOperation::Receive { .. });
        let (purpose, cut) = match &operation {
            OwnedOperation::Send { .. } => (Use::Send, ChunkPlan::whole(len)),
            OwnedOperation::Receive { .. } => (Use::Receive, ChunkPlan::whole(len)),
            OwnedOperation::Write { data: Some(_), .. } => {
                (Use::Send, ChunkPlan::chunks(len, slot_len))
            }
            _ => (Use::Rma, ChunkPlan::chunks(len, slot_len)),
        };
        if is_message(&operation) {
            let most = pool.share(purpose) as u64 * slot_len;
            let segments = memory.segments(slot_len);
            if len > most || segments > max_segments {
                let why = "a staged message needs all its buffers at once: give the domain more or \
                           longer ones (DomainAttr::staging), send less at once, or use RMA, \
                           which is divided into chunks";
                return Err(refuse(ErrorKind::MessageTooLong, why)
                    .context("length", len)
                    .context("buffers hold", most)
                    .context("segments", segments)
                    .context("most segments", max_segments));
            }
        }
        let runs = std::mem::take(&mut memory.runs);
        let comes_in = receives || matches!(operation, OwnedOperation::Read { .. });
        let (sources, targets) = if comes_in { (Vec::new(), runs) } else { (runs, Vec::new()) };
        let pipeline = Pipeline::new(Claim::new(pool), purpose, cut, sources, targets);
        let (peer, context) = (request.peer, request.context);
        Ok(Self { pipeline, memory, operation, buffers, peer, context })
    }

    /// Returns the operation of the request.
    #[must_use]
    pub fn operation(&self) -> &OwnedOperation {
        &self.operation
    }

    /// Returns the length of the request in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.len
    }

    /// Returns the progress of the transfer.
    #[must_use]
    pub fn pipeline(&self) -> &Pipeline<Arc<StagedRange>> {
        &self.pipeline
    }

    /// Returns the progress of the transfer, to fail it, to stop it, or to report chunks that the
    /// NIC has finished. [`Self::step`] drives it.
    pub fn pipeline_mut(&mut self) -> &mut Pipeline<Arc<StagedRange>> {
        &mut self.pipeline
    }

    /// Sets the share of staging buffers that the transfer uses from now on. `behind_message` is
    /// true if an earlier request waits for the peer's receive. RMA behind such a request waits
    /// too, so it uses the share of sends. Does nothing if the transfer is a message.
    pub fn set_behind_message(&mut self, behind_message: bool) {
        if !is_message(&self.operation) {
            self.pipeline.set_purpose(if behind_message { Use::Send } else { Use::Rma });
        }
    }

    /// If the transfer uses a closed region, fails the transfer and returns true. After that none
    /// of its copies begins.
    pub fn fail_if_closed(&mut self) -> bool {
        let closed = self.memory.regions.iter().any(|region| region.is_closed());
        if closed {
            let error = Error::new(ErrorKind::NoRegion, "staged copy")
                .remedy("keep the region of a descriptor open until the transfer completes");
            self.pipeline.fail(FailedStep::NicTransfer, error);
        }
        closed
    }

    /// Calls [`Pipeline::step`]. `post` gets the number of each chunk with its work request. Only
    /// the last chunk of a write carries its immediate data.
    pub fn step(
        &mut self,
        may_begin: bool,
        post: &mut impl FnMut(u64, &WorkRequest<'_>) -> Result<Posted>,
    ) -> bool {
        let Self { pipeline, memory, operation, buffers, peer, context } = self;
        pipeline.step(may_begin, &mut |view: View<'_>| {
            let (local, remote) = (memory.local(&view, *buffers), part(operation.remote(), &view));
            let is_last = view.at + view.len == memory.len;
            let operation = match operation.with_remote(&remote) {
                Operation::WriteImmediate { remote, .. } if !is_last => Operation::Write { remote },
                operation => operation,
            };
            let (peer, context) = (*peer, *context);
            post(view.number, &WorkRequest { operation, local: &local, peer, context })
        })
    }
}

/// Returns the remote segments of a chunk, which is the part of a transfer that `view` describes.
fn part<'a>(list: &'a [OwnedRemoteSegment], view: &View<'_>) -> Vec<RemoteSegment<'a>> {
    let end = view.at + view.len;
    let mut at = 0;
    let mut part = Vec::new();
    for far in list {
        let (start, stop) = (at.max(view.at), (at + far.len).min(end));
        if start < stop {
            let address = Iova(far.address.0.wrapping_add(start - at));
            part.push(RemoteSegment { address, len: stop - start, key: &far.key });
        }
        at += far.len;
    }
    part
}
