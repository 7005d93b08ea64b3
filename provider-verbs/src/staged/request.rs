//! Requests that wait in a lane: what the caller's lists held, since those are the caller's again
//! when `post` returns.

use std::sync::Arc;

use hmem_core::{
    Access, Address, Addressing, Error, ErrorKind, Iova, LocalKey, RemoteKey, Result,
    provider::{ProviderRegion, ProviderWindow},
    transfer::{
        AtomicOp, AtomicType, CompletionKind, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};
use hmem_p2p::staging::{Run, View};

use super::memory::StagedPiece;

/// A piece of a peer's memory.
#[derive(Clone, Debug)]
pub(super) struct Far {
    address: Iova,
    len: u64,
    key: RemoteKey,
}

impl Far {
    fn of(segment: &RemoteSegment<'_>) -> Self {
        Self { address: segment.address, len: segment.len, key: segment.key.clone() }
    }

    fn segment(&self) -> RemoteSegment<'_> {
        RemoteSegment { address: self.address, len: self.len, key: &self.key }
    }
}

/// An [`Operation`] that owns what it names.
#[derive(Debug)]
enum Owned {
    Write(Vec<Far>),
    Read(Vec<Far>),
    Atomic {
        op: AtomicOp,
        datatype: AtomicType,
        remote: Far,
        result: Option<LocalSegment>,
        compare: Option<LocalSegment>,
    },
    Send(Option<RemoteKey>),
    Receive,
    BindWindow {
        window: ProviderWindow,
        region: ProviderRegion,
        offset: u64,
        len: u64,
        access: Access,
        addressing: Addressing,
        tag: u8,
    },
    InvalidateWindow(ProviderWindow),
}

/// A request for memory that the NIC reaches, waiting behind others.
#[derive(Debug)]
pub(super) struct Direct {
    operation: Owned,
    local: Vec<LocalSegment>,
    peer: PeerId,
    context: u64,
}

fn far_list(remote: &[RemoteSegment<'_>]) -> Vec<Far> {
    remote.iter().map(Far::of).collect()
}

pub(super) fn kind_of(operation: &Operation<'_>) -> CompletionKind {
    match operation {
        Operation::Write { .. } => CompletionKind::Write,
        Operation::Read { .. } => CompletionKind::Read,
        Operation::Atomic { .. } => CompletionKind::Atomic,
        Operation::Receive { .. } => CompletionKind::Receive,
        Operation::BindWindow { .. } => CompletionKind::BindWindow,
        Operation::InvalidateWindow { .. } => CompletionKind::InvalidateWindow,
        _ => CompletionKind::Send,
    }
}

impl Direct {
    /// Copies a request; `None` for those that verbs refuses whatever is before them.
    pub(super) fn of(request: &WorkRequest<'_>) -> Option<Self> {
        let operation = match request.operation {
            Operation::Write { remote } => Owned::Write(far_list(remote)),
            Operation::Read { remote } => Owned::Read(far_list(remote)),
            Operation::Atomic { op, datatype, remote, result, compare } => {
                Owned::Atomic { op, datatype, remote: Far::of(&remote), result, compare }
            }
            Operation::Send { tag: None, invalidate } => Owned::Send(invalidate.cloned()),
            Operation::Receive { tag: None, .. } => Owned::Receive,
            Operation::BindWindow { window, region, offset, len, access, addressing, tag } => {
                Owned::BindWindow { window, region, offset, len, access, addressing, tag }
            }
            Operation::InvalidateWindow { window } => Owned::InvalidateWindow(window),
            _ => return None,
        };
        let (local, peer, context) = (request.local.to_vec(), request.peer, request.context);
        Some(Self { operation, local, peer, context })
    }

    /// Runs `with` on the request.
    pub(super) fn with<T>(&self, with: impl FnOnce(&WorkRequest<'_>) -> T) -> T {
        let segments: Vec<_>;
        let operation = match &self.operation {
            Owned::Write(remote) => {
                segments = remote.iter().map(Far::segment).collect();
                Operation::Write { remote: &segments }
            }
            Owned::Read(remote) => {
                segments = remote.iter().map(Far::segment).collect();
                Operation::Read { remote: &segments }
            }
            Owned::Atomic { op, datatype, remote, result, compare } => Operation::Atomic {
                op: *op,
                datatype: *datatype,
                remote: remote.segment(),
                result: *result,
                compare: *compare,
            },
            Owned::Send(invalidate) => {
                Operation::Send { tag: None, invalidate: invalidate.as_ref() }
            }
            Owned::Receive => Operation::Receive { tag: None, from: None },
            Owned::BindWindow { window, region, offset, len, access, addressing, tag } => {
                Operation::BindWindow {
                    window: *window,
                    region: *region,
                    offset: *offset,
                    len: *len,
                    access: *access,
                    addressing: *addressing,
                    tag: *tag,
                }
            }
            Owned::InvalidateWindow(window) => Operation::InvalidateWindow { window: *window },
        };
        with(&WorkRequest { operation, local: &self.local, peer: self.peer, context: self.context })
    }
}

/// A run of the local bytes of a request that names staged memory.
#[derive(Clone, Copy, Debug)]
enum Near {
    /// In staging buffers when it is their turn.
    Staged { len: u64 },
    /// Where the NIC reaches it.
    Plain(LocalSegment),
}

impl Near {
    const fn len(&self) -> u64 {
        match self {
            Self::Staged { len } => *len,
            Self::Plain(segment) => segment.len,
        }
    }
}

/// The lists of a request that names staged memory.
#[derive(Debug, Default)]
pub(super) struct Lists {
    near: Vec<Near>,
    pub(super) runs: Vec<Run<Arc<StagedPiece>>>,
    pub(super) len: u64,
}

impl Lists {
    pub(super) fn push_plain(&mut self, segment: LocalSegment) {
        if segment.len > 0 {
            self.near.push(Near::Plain(segment));
            self.len = self.len.saturating_add(segment.len);
        }
    }

    pub(super) fn push_staged(&mut self, memory: Arc<StagedPiece>, offset: u64, len: u64) {
        self.runs.push(Run { at: self.len, len, memory, offset });
        self.near.push(Near::Staged { len });
        self.len = self.len.saturating_add(len);
    }

    /// The most segments that a message of all of it takes, with buffers of `slot_len` bytes.
    pub(super) fn segments(&self, slot_len: u64) -> u64 {
        let mut at = 0;
        let mut count = 0;
        for near in &self.near {
            count += match near {
                Near::Staged { len } => (at + len - 1) / slot_len - at / slot_len + 1,
                Near::Plain(_) => 1,
            };
            at += near.len();
        }
        count
    }

    /// The local list of a chunk.
    fn local(&self, view: &View<'_>, buffers: LocalKey) -> Vec<LocalSegment> {
        let end = view.at + view.len;
        let mut at = 0;
        let mut local = Vec::new();
        for near in &self.near {
            let (start, stop) = (at.max(view.at), (at + near.len()).min(end));
            if start < stop {
                match near {
                    Near::Staged { .. } => {
                        let parts = view.parts(start, stop - start);
                        local.extend(parts.map(|(address, _, len)| LocalSegment {
                            address,
                            len,
                            desc: Some(buffers),
                        }));
                    }
                    Near::Plain(segment) => local.push(LocalSegment {
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

/// What a request does that names staged memory.
#[derive(Debug)]
pub(super) enum Movement {
    Write(Vec<Far>),
    Read(Vec<Far>),
    Send(Option<RemoteKey>),
    Receive,
}

impl Movement {
    /// The movement of an operation, with the local right that it needs.
    pub(super) fn of(operation: &Operation<'_>) -> Option<(Self, Access)> {
        Some(match operation {
            Operation::Write { remote } => (Self::Write(far_list(remote)), Access::WRITE),
            Operation::Read { remote } => (Self::Read(far_list(remote)), Access::READ),
            Operation::Send { tag: None, invalidate } => {
                (Self::Send(invalidate.cloned()), Access::SEND)
            }
            Operation::Receive { tag: None, .. } => (Self::Receive, Access::RECV),
            _ => return None,
        })
    }

    /// Whether the bytes come from this side.
    pub(super) const fn goes_out(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Send(_))
    }

    /// Whether the NIC needs all of it in one request.
    pub(super) const fn is_message(&self) -> bool {
        matches!(self, Self::Send(_) | Self::Receive)
    }

    /// Checks that both sides have the same length.
    pub(super) fn check(&self, len: u64) -> Result<()> {
        let (Self::Write(remote) | Self::Read(remote)) = self else { return Ok(()) };
        let far = remote.iter().fold(0_u64, |sum, part| sum.saturating_add(part.len));
        if far == len {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidArgument, "post")
            .provider("verbs")
            .context("local", len)
            .context("remote", far)
            .remedy("both lists hold the same number of bytes"))
    }

    /// Runs `with` on the request for a chunk.
    pub(super) fn with_chunk<T>(
        &self,
        lists: &Lists,
        view: &View<'_>,
        (buffers, peer, context): (LocalKey, PeerId, u64),
        with: impl FnOnce(&WorkRequest<'_>) -> T,
    ) -> T {
        let local = lists.local(view, buffers);
        let remote;
        let operation = match self {
            Self::Write(list) => {
                remote = part(list, view);
                Operation::Write { remote: &remote }
            }
            Self::Read(list) => {
                remote = part(list, view);
                Operation::Read { remote: &remote }
            }
            Self::Send(invalidate) => {
                Operation::Send { tag: None, invalidate: invalidate.as_ref() }
            }
            Self::Receive => Operation::Receive { tag: None, from: None },
        };
        with(&WorkRequest { operation, local: &local, peer, context })
    }
}

/// The part of a remote list that a chunk covers.
fn part<'a>(list: &'a [Far], view: &View<'_>) -> Vec<RemoteSegment<'a>> {
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
