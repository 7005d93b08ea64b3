//! Requests that wait in a lane. They own copies of the caller's lists, since the caller may reuse
//! the lists once `post` returns.

use std::sync::Arc;

use hmem_core::{
    Access, Address, Error, ErrorKind, Iova, LocalKey, RemoteKey, Result,
    transfer::{
        AtomicOp, AtomicType, CompletionKind, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};
use hmem_p2p::staging::{Run, StagedRange, View};

use super::memory::StagedRegion;

/// An owned copy of a [`RemoteSegment`], a piece of a peer's memory.
#[derive(Clone, Debug)]
pub(super) struct OwnedRemoteSegment {
    address: Iova,
    len: u64,
    key: RemoteKey,
}

impl OwnedRemoteSegment {
    fn of(segment: &RemoteSegment<'_>) -> Self {
        Self { address: segment.address, len: segment.len, key: segment.key.clone() }
    }

    fn segment(&self) -> RemoteSegment<'_> {
        RemoteSegment { address: self.address, len: self.len, key: &self.key }
    }
}

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

/// A transfer operation with its own copy of the remote list.
#[derive(Debug)]
pub(super) enum Movement {
    /// A write. Its last chunk carries the immediate data, if there is any.
    Write(Vec<OwnedRemoteSegment>, Option<u64>),
    Read(Vec<OwnedRemoteSegment>),
    Send(Option<RemoteKey>),
    SendImmediate(u64),
    Receive,
}

impl Movement {
    /// Copies an operation, and returns it with the right that it needs on local memory. Returns
    /// `None` for an operation that staged memory does not support.
    pub(super) fn of(operation: &Operation<'_>) -> Option<(Self, Access)> {
        let far_list =
            |remote: &[RemoteSegment<'_>]| remote.iter().map(OwnedRemoteSegment::of).collect();
        Some(match operation {
            Operation::Write { remote } => (Self::Write(far_list(remote), None), Access::WRITE),
            Operation::WriteImmediate { remote, data } => {
                (Self::Write(far_list(remote), Some(*data)), Access::WRITE)
            }
            Operation::Read { remote } => (Self::Read(far_list(remote)), Access::READ),
            Operation::Send { tag: None, invalidate } => {
                (Self::Send(invalidate.cloned()), Access::SEND)
            }
            Operation::SendImmediate { tag: None, data } => {
                (Self::SendImmediate(*data), Access::SEND)
            }
            Operation::Receive { tag: None, .. } => (Self::Receive, Access::RECV),
            _ => return None,
        })
    }

    fn remote(&self) -> &[OwnedRemoteSegment] {
        match self {
            Self::Write(remote, _) | Self::Read(remote) => remote,
            Self::Send(_) | Self::SendImmediate(_) | Self::Receive => &[],
        }
    }

    /// Returns the operation for one chunk (a part of the transfer), with `remote` as its remote
    /// list.
    fn operation<'a>(&'a self, remote: &'a [RemoteSegment<'a>], is_last: bool) -> Operation<'a> {
        match self {
            Self::Write(_, Some(data)) if is_last => {
                Operation::WriteImmediate { remote, data: *data }
            }
            Self::Write(..) => Operation::Write { remote },
            Self::Read(_) => Operation::Read { remote },
            Self::Send(invalidate) => {
                Operation::Send { tag: None, invalidate: invalidate.as_ref() }
            }
            Self::SendImmediate(data) => Operation::SendImmediate { tag: None, data: *data },
            Self::Receive => Operation::Receive { tag: None, from: None },
        }
    }

    /// Returns true if the operation sends bytes to the peer.
    pub(super) const fn goes_out(&self) -> bool {
        matches!(self, Self::Write(..) | Self::Send(_) | Self::SendImmediate(_))
    }

    /// Returns true if the operation consumes a receive of the peer.
    pub(super) const fn takes_receive(&self) -> bool {
        matches!(self, Self::Write(_, Some(_)) | Self::Send(_) | Self::SendImmediate(_))
    }

    /// Returns true if all bytes must be in one work request, as in a message.
    pub(super) const fn is_message(&self) -> bool {
        matches!(self, Self::Send(_) | Self::SendImmediate(_) | Self::Receive)
    }

    /// Checks that the remote list has `len` bytes, the length of the local list. Messages pass the
    /// check: they have no remote list.
    pub(super) fn check(&self, len: u64) -> Result<()> {
        let far = self.remote().iter().fold(0_u64, |sum, part| sum.saturating_add(part.len));
        if self.is_message() || far == len {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, "post")
            .provider("verbs")
            .context("local", len)
            .context("remote", far)
            .remedy("pass as many remote bytes as local bytes"))
    }

    /// Calls `with` with the work request for one chunk (a part of the transfer).
    pub(super) fn with_chunk<T>(
        &self,
        lists: &Lists,
        view: &View<'_>,
        (buffers, peer, context): (LocalKey, PeerId, u64),
        with: impl FnOnce(&WorkRequest<'_>) -> T,
    ) -> T {
        let (local, remote) = (lists.local(view, buffers), part(self.remote(), view));
        let operation = self.operation(&remote, view.at + view.len == lists.len);
        with(&WorkRequest { operation, local: &local, peer, context })
    }
}

/// An [`Operation`] with its own copies of the lists of memory.
#[derive(Debug)]
enum OwnedOperation {
    Movement(Movement),
    Atomic {
        op: AtomicOp,
        datatype: AtomicType,
        remote: OwnedRemoteSegment,
        result: Option<LocalSegment>,
        compare: Option<LocalSegment>,
    },
    /// An operation on a memory window. Such an operation has no lists.
    Window(Operation<'static>),
}

/// A request without staged memory that waits in a lane for earlier requests.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    operation: OwnedOperation,
    local: Vec<LocalSegment>,
    peer: PeerId,
    context: u64,
}

impl QueuedRequest {
    /// Copies a request. Returns `None` for a kind of request that verbs does not support.
    pub(super) fn of(request: &WorkRequest<'_>) -> Option<Self> {
        let operation = match request.operation {
            Operation::Atomic { op, datatype, remote, result, compare } => OwnedOperation::Atomic {
                op,
                datatype,
                remote: OwnedRemoteSegment::of(&remote),
                result,
                compare,
            },
            Operation::BindWindow { window, bind, tag } => {
                OwnedOperation::Window(Operation::BindWindow { window, bind, tag })
            }
            Operation::InvalidateWindow { window } => {
                OwnedOperation::Window(Operation::InvalidateWindow { window })
            }
            operation => OwnedOperation::Movement(Movement::of(&operation)?.0),
        };
        let (local, peer, context) = (request.local.to_vec(), request.peer, request.context);
        Some(Self { operation, local, peer, context })
    }

    /// Calls `with` with the copied request.
    pub(super) fn with<T>(&self, with: impl FnOnce(&WorkRequest<'_>) -> T) -> T {
        let remote: Vec<_>;
        let operation = match &self.operation {
            OwnedOperation::Movement(movement) => {
                remote = movement.remote().iter().map(OwnedRemoteSegment::segment).collect();
                movement.operation(&remote, true)
            }
            OwnedOperation::Atomic { op, datatype, remote, result, compare } => Operation::Atomic {
                op: *op,
                datatype: *datatype,
                remote: remote.segment(),
                result: *result,
                compare: *compare,
            },
            OwnedOperation::Window(operation) => *operation,
        };
        with(&WorkRequest { operation, local: &self.local, peer: self.peer, context: self.context })
    }
}

/// Consecutive local bytes of a request: either all in staged memory, or all in memory that the NIC
/// accesses directly.
#[derive(Clone, Copy, Debug)]
enum LocalPart {
    /// Bytes of staged memory. Each chunk moves its part of them through staging buffers.
    Staged { len: u64 },
    /// Bytes of memory that the NIC accesses directly.
    Plain(LocalSegment),
}

impl LocalPart {
    const fn len(&self) -> u64 {
        match self {
            Self::Staged { len } => *len,
            Self::Plain(segment) => segment.len,
        }
    }
}

/// The local and remote memory of a request that names staged memory.
#[derive(Debug, Default)]
pub(super) struct Lists {
    near: Vec<LocalPart>,
    pub(super) runs: Vec<Run<Arc<StagedRange>>>,
    /// The staged regions that the request names.
    pub(super) regions: Vec<Arc<StagedRegion>>,
    pub(super) len: u64,
}

impl Lists {
    pub(super) fn push_plain(&mut self, segment: LocalSegment) {
        if segment.len > 0 {
            self.near.push(LocalPart::Plain(segment));
            self.len = self.len.saturating_add(segment.len);
        }
    }

    pub(super) fn push_staged(&mut self, memory: Arc<StagedRange>, offset: u64, len: u64) {
        self.runs.push(Run { at: self.len, len, memory, offset });
        self.near.push(LocalPart::Staged { len });
        self.len = self.len.saturating_add(len);
    }

    /// Returns the maximum number of local segments that the request needs if it is one message.
    /// `slot_len` is the length of a staging buffer.
    pub(super) fn segments(&self, slot_len: u64) -> u64 {
        let mut at = 0;
        let mut count = 0;
        for near in &self.near {
            count += match near {
                LocalPart::Staged { len } => (at + len - 1) / slot_len - at / slot_len + 1,
                LocalPart::Plain(_) => 1,
            };
            at += near.len();
        }
        count
    }

    /// Returns the local segments of a chunk (a part of the transfer). For staged memory, these are
    /// segments of the chunk's staging buffers.
    fn local(&self, view: &View<'_>, buffers: LocalKey) -> Vec<LocalSegment> {
        let end = view.at + view.len;
        let mut at = 0;
        let mut local = Vec::new();
        for near in &self.near {
            let (start, stop) = (at.max(view.at), (at + near.len()).min(end));
            if start < stop {
                match near {
                    LocalPart::Staged { .. } => {
                        let parts = view.parts(start, stop - start);
                        local.extend(parts.map(|(address, _, len)| LocalSegment {
                            address,
                            len,
                            desc: Some(buffers),
                        }));
                    }
                    LocalPart::Plain(segment) => local.push(LocalSegment {
                        address: Address(segment.address.0.wrapping_add(start - at)),
                        len: stop - start,
                        desc: segment.desc,
                    }),
                }
            }
            at += near.len();
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
