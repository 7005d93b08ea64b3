//! Requests that wait in a lane, and the work requests of their chunks.

use std::sync::Arc;

use hmem_core::{
    Access, Address, Error, ErrorKind, Iova, LocalKey, Result,
    transfer::{
        CompletionKind, LocalSegment, Operation, OwnedOperation, OwnedRemoteSegment, PeerId,
        RemoteSegment, WorkRequest,
    },
};
use hmem_p2p::staging::{Run, StagedRange, View};

use super::memory::StagedRegion;

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

/// Returns the right that an operation needs on staged memory, or `None` if staged memory does not
/// support the operation.
pub(super) const fn staged_right(operation: &Operation<'_>) -> Option<Access> {
    Some(match operation {
        Operation::Write { .. } | Operation::WriteImmediate { .. } => Access::WRITE,
        Operation::Read { .. } => Access::READ,
        Operation::Send { tag: None, .. } | Operation::SendImmediate { tag: None, .. } => {
            Access::SEND
        }
        Operation::Receive { tag: None, .. } => Access::RECV,
        _ => return None,
    })
}

/// Returns true for a send or a receive. All bytes of such a request must be in one work request.
pub(super) const fn is_message(operation: &OwnedOperation) -> bool {
    matches!(operation, OwnedOperation::Send { .. } | OwnedOperation::Receive { .. })
}

/// Checks that the remote list of a write or read has `len` bytes, the length of the local list.
pub(super) fn check_len(operation: &OwnedOperation, len: u64) -> Result<()> {
    let far = operation.remote().iter().fold(0_u64, |sum, part| sum.saturating_add(part.len));
    if is_message(operation) || far == len {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidArgument, "post")
        .provider("verbs")
        .context("local", len)
        .context("remote", far)
        .remedy("pass as many remote bytes as local bytes"))
}

/// Calls `with` with the work request for one chunk (a part of the transfer). Only the last chunk
/// of a write carries its immediate data.
pub(super) fn with_chunk<T>(
    operation: &OwnedOperation,
    lists: &Lists,
    view: &View<'_>,
    (buffers, peer, context): (LocalKey, PeerId, u64),
    with: impl FnOnce(&WorkRequest<'_>) -> T,
) -> T {
    let (local, remote) = (lists.local(view, buffers), part(operation.remote(), view));
    let is_last = view.at + view.len == lists.len;
    let operation = match operation.with_remote(&remote) {
        Operation::WriteImmediate { remote, .. } if !is_last => Operation::Write { remote },
        operation => operation,
    };
    with(&WorkRequest { operation, local: &local, peer, context })
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
pub(super) struct Lists {
    near: Vec<LocalPart>,
    /// The parts of the request's local memory that are staged.
    pub(super) runs: Vec<Run<Arc<StagedRange>>>,
    /// The staged regions that the request names.
    pub(super) regions: Vec<Arc<StagedRegion>>,
    /// Length of the request in bytes.
    pub(super) len: u64,
}

impl Lists {
    pub(super) fn push_plain(&mut self, segment: LocalSegment) {
        if segment.len > 0 {
            self.near.push(LocalPart { len: segment.len, plain: Some(segment) });
            self.len = self.len.saturating_add(segment.len);
        }
    }

    pub(super) fn push_staged(&mut self, memory: Arc<StagedRange>, offset: u64, len: u64) {
        self.runs.push(Run { at: self.len, len, memory, offset });
        self.near.push(LocalPart { len, plain: None });
        self.len = self.len.saturating_add(len);
    }

    /// Returns the maximum number of local segments that the request needs if it is one message.
    /// `slot_len` is the length of a staging buffer.
    pub(super) fn segments(&self, slot_len: u64) -> u64 {
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
