//! Transfers: work requests, their segments, and their completions.
//!
//! Local addresses are the application's own. Remote addresses are [`Iova`]s of the region that the
//! key belongs to.

use std::fmt;

use smallvec::SmallVec;

use crate::{
    Address, Addressing, Error, ErrorKind, Iova, LocalKey, RemoteKey, Result,
    handle::ProviderWindow, named_enum, window::WindowBind,
};

/// A contiguous part of the local memory of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSegment {
    /// The first address. This is a virtual address of this process, also for regions with
    /// zero-based addressing.
    pub address: Address,
    /// The length in bytes.
    pub len: u64,
    /// The descriptor of the region that contains the segment. `None` if the memory is not
    /// registered, or if the domain registers it when the request is posted.
    pub desc: Option<LocalKey>,
}

/// A contiguous part of the peer's memory of a work request.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSegment<'a> {
    /// The address of the first byte, of the kind that [`RemoteKey::addressing`] returns.
    pub address: Iova,
    /// The length in bytes.
    pub len: u64,
    /// The key of the peer's region.
    pub key: &'a RemoteKey,
}

impl RemoteKey {
    /// Returns the segment of `len` bytes from `offset` of the region, for a transfer.
    ///
    /// ```
    /// use hmem_core::{Addressing, ErrorKind, Iova, RemoteKey};
    ///
    /// let key = RemoteKey::new(Addressing::Virtual, Iova(0x7000), 4096, 0x1234);
    /// let segment = key.slice(1024, 16)?;
    /// assert_eq!((segment.address, segment.len), (Iova(0x7400), 16));
    /// assert_eq!(key.slice(4090, 16).unwrap_err().kind(), ErrorKind::OutOfBounds);
    /// # Ok::<(), hmem_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the region.
    /// - [`ErrorKind::Unsupported`] if the bytes are in several pieces of a split region whose
    ///   addresses are not contiguous. A segment is one contiguous range of addresses.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RemoteSegment<'_>> {
        self.check_part("slice", offset, len)?;
        if self.addressing() == Addressing::ZeroBased {
            // These addresses count through all pieces.
            let address = Iova(self.base().0.wrapping_add(offset));
            return Ok(RemoteSegment { address, len, key: self });
        }
        let (mut skip, mut left) = (offset, len);
        let mut run: Option<(Iova, u64)> = None;
        for piece in self.pieces() {
            let behind = skip > piece.len || (skip == piece.len && left > 0);
            if run.is_none() && behind {
                skip -= piece.len;
                continue;
            }
            let at = piece.base.0.wrapping_add(skip);
            let (start, next) = *run.get_or_insert((Iova(at), at));
            if next != at {
                return Err(Error::new(ErrorKind::Unsupported, "slice")
                    .context("offset", offset)
                    .context("length", len)
                    .remedy("slice each piece of the split region by itself (RemoteKey::pieces)"));
            }
            let here = left.min(piece.len - skip);
            (skip, left) = (0, left - here);
            run = Some((start, at.wrapping_add(here)));
            if left == 0 {
                break;
            }
        }
        let address = run.map_or(self.base(), |(start, _)| start);
        Ok(RemoteSegment { address, len, key: self })
    }
}

/// The name of an endpoint, to send to a peer. Only the provider can interpret the bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct EndpointName(pub Vec<u8>);

impl fmt::Debug for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EndpointName(")?;
        for byte in &self.0 {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

/// A resolved peer (`fi_addr_t`). Valid only on the endpoint that resolved the peer's name: every
/// other endpoint refuses posts to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(pub u64);

named_enum! {
    /// An atomic operation of `fi_atomic(3)`, with the values of libfabric's `enum fi_op`: 0 to 18.
    #[repr(u32)]
    #[allow(missing_docs, reason = "fi_atomic(3) defines the operations by these names")]
    pub enum AtomicOp {
        Min = "FI_MIN",
        Max = "FI_MAX",
        Sum = "FI_SUM",
        Prod = "FI_PROD",
        Lor = "FI_LOR",
        Land = "FI_LAND",
        Bor = "FI_BOR",
        Band = "FI_BAND",
        Lxor = "FI_LXOR",
        Bxor = "FI_BXOR",
        AtomicRead = "FI_ATOMIC_READ",
        AtomicWrite = "FI_ATOMIC_WRITE",
        Cswap = "FI_CSWAP",
        CswapNe = "FI_CSWAP_NE",
        CswapLe = "FI_CSWAP_LE",
        CswapLt = "FI_CSWAP_LT",
        CswapGe = "FI_CSWAP_GE",
        CswapGt = "FI_CSWAP_GT",
        Mswap = "FI_MSWAP",
    }
}

impl AtomicOp {
    /// Returns true if the operation has a compare operand (`fi_compare_atomic`).
    #[must_use]
    pub const fn compares(self) -> bool {
        matches!(
            self,
            Self::Cswap
                | Self::CswapNe
                | Self::CswapLe
                | Self::CswapLt
                | Self::CswapGe
                | Self::CswapGt
                | Self::Mswap
        )
    }
}

/// An integer type of atomics, with the values of libfabric's `enum fi_datatype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names say it")]
pub enum AtomicType {
    I32 = 4,
    U32 = 5,
    I64 = 6,
    U64 = 7,
}

impl AtomicType {
    /// All datatypes.
    pub const ALL: [Self; 4] = [Self::I32, Self::U32, Self::I64, Self::U64];

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::I32 | Self::U32 => 4,
            Self::I64 | Self::U64 => 8,
        }
    }
}

/// The operation of a work request.
///
/// The local and the remote segments of a write or read must have the same total length. The
/// lengths of the single segments may differ.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Operation<'a> {
    /// RMA write from the local segments to the remote segments.
    Write {
        /// The peer's memory to write to.
        remote: &'a [RemoteSegment<'a>],
    },
    /// RMA write that also completes a receive of the peer, with immediate data
    /// ([`ProviderAttr::cq_data_size`](crate::provider::ProviderAttr::cq_data_size)).
    ///
    /// The write consumes the peer's next receive without a tag. If the peer has posted no receive,
    /// the write waits for a receive, as a message does. The bytes are in the peer's memory before
    /// that receive completes. The buffer of the receive is not changed.
    WriteImmediate {
        /// The peer's memory to write to.
        remote: &'a [RemoteSegment<'a>],
        /// The immediate data.
        data: u64,
    },
    /// RMA read from the remote segments into the local segments.
    Read {
        /// The peer's memory to read from.
        remote: &'a [RemoteSegment<'a>],
    },
    /// Atomic operation on an array of elements, with the operands in the local segments. A
    /// fetching operation has `result`; a comparing operation has `result` and `compare`.
    Atomic {
        /// The atomic operation.
        op: AtomicOp,
        /// The type of the elements.
        datatype: AtomicType,
        /// The target elements. Their address must be a multiple of the size of an element.
        remote: RemoteSegment<'a>,
        /// The destination of the old values, for fetching and comparing operations.
        result: Option<LocalSegment>,
        /// The values to compare with, for comparing operations.
        compare: Option<LocalSegment>,
    },
    /// Send of a message. A tagged message matches receives by its tag.
    Send {
        /// The tag of a tagged message. `None` for a message without a tag.
        tag: Option<u64>,
        /// The key of a window for the receiver's NIC to invalidate (send with invalidate), if any.
        invalidate: Option<&'a RemoteKey>,
    },
    /// Send of a message with immediate data, which the completion of the receive returns
    /// ([`ProviderAttr::cq_data_size`](crate::provider::ProviderAttr::cq_data_size)).
    SendImmediate {
        /// The tag of a tagged message. `None` for a message without a tag.
        tag: Option<u64>,
        /// The immediate data.
        data: u64,
    },
    /// Receive of one message into the local segments.
    Receive {
        /// The tag to match, and a mask of the tag's bits to ignore. `None` matches messages
        /// without a tag.
        tag: Option<(u64, u64)>,
        /// The peer to receive from. With `None` the receive accepts messages of every peer.
        from: Option<PeerId>,
    },
    /// Bind of a type 2 window. The low 8 bits of the new key are `tag`. The other bits are the
    /// index of the window.
    BindWindow {
        /// The window.
        window: ProviderWindow,
        /// The part of a region, and the rights to grant.
        bind: WindowBind,
        /// The low 8 bits of the new key.
        tag: u8,
    },
    /// Invalidation of the current key of a type 2 window.
    InvalidateWindow {
        /// The window.
        window: ProviderWindow,
    },
}

/// A request to post to an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// The operation, with its remote segments.
    pub operation: Operation<'a>,
    /// The local memory. The segments form one sequence of bytes.
    pub local: &'a [LocalSegment],
    /// The peer to transfer with, as the endpoint's `resolve` returned it. Receives and window
    /// operations ignore it.
    pub peer: PeerId,
    /// A number that the application chooses. The completion of the request returns it.
    pub context: u64,
}

/// An owned form of a [`WorkRequest`], for a provider that queues requests.
///
/// `L` and `R` are the forms of a local and of a remote segment. [`OwnedRequest::new`] copies the
/// segments. A provider that checks and resolves segments before it queues a request uses types of
/// its own as `L` and `R`.
#[derive(Clone, Debug)]
pub struct OwnedRequest<L = LocalSegment, R = OwnedRemoteSegment> {
    /// The operation, with its remote segments.
    pub operation: OwnedOperation<L, R>,
    /// The local memory.
    pub local: SegmentList<L>,
    /// The peer to transfer with.
    pub peer: PeerId,
    /// The number that the completion returns.
    pub context: u64,
}

/// A list of segments of an [`OwnedRequest`]. A list of one segment needs no allocation.
pub type SegmentList<T> = SmallVec<[T; 1]>;

/// An owned form of an [`Operation`].
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are those of Operation")]
pub enum OwnedOperation<L = LocalSegment, R = OwnedRemoteSegment> {
    /// A write, with immediate data if `data` is given.
    Write {
        remote: SegmentList<R>,
        data: Option<u64>,
    },
    Read {
        remote: SegmentList<R>,
    },
    Atomic(Box<OwnedAtomic<L, R>>),
    /// A message, with immediate data if `data` is given.
    Send {
        tag: Option<u64>,
        data: Option<u64>,
        invalidate: Option<Box<RemoteKey>>,
    },
    Receive {
        tag: Option<(u64, u64)>,
        from: Option<PeerId>,
    },
    BindWindow {
        window: ProviderWindow,
        bind: Box<WindowBind>,
        tag: u8,
    },
    InvalidateWindow {
        window: ProviderWindow,
    },
}

/// An owned form of [`Operation::Atomic`].
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of Operation::Atomic")]
pub struct OwnedAtomic<L = LocalSegment, R = OwnedRemoteSegment> {
    pub op: AtomicOp,
    pub datatype: AtomicType,
    pub remote: R,
    pub result: Option<L>,
    pub compare: Option<L>,
}

/// An owned copy of a [`RemoteSegment`].
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of RemoteSegment")]
pub struct OwnedRemoteSegment {
    pub address: Iova,
    pub len: u64,
    pub key: RemoteKey,
}

impl OwnedRemoteSegment {
    pub(crate) fn new(segment: &RemoteSegment<'_>) -> Self {
        Self { address: segment.address, len: segment.len, key: segment.key.clone() }
    }

    fn borrow(&self) -> RemoteSegment<'_> {
        RemoteSegment { address: self.address, len: self.len, key: &self.key }
    }
}

impl OwnedRequest {
    /// Copies a request with its lists.
    #[must_use]
    pub fn new(request: &WorkRequest<'_>) -> Self {
        Self {
            operation: OwnedOperation::new(&request.operation),
            local: SegmentList::from_slice(request.local),
            peer: request.peer,
            context: request.context,
        }
    }

    /// Runs `with` on the request as a [`WorkRequest`], and returns the result of `with`.
    pub fn with<T>(&self, with: impl FnOnce(&WorkRequest<'_>) -> T) -> T {
        let remote: Vec<_> =
            self.operation.remote().iter().map(OwnedRemoteSegment::borrow).collect();
        with(&WorkRequest {
            operation: self.operation.with_remote(&remote),
            local: &self.local,
            peer: self.peer,
            context: self.context,
        })
    }
}

impl OwnedOperation {
    /// Copies an operation with its lists.
    #[must_use]
    pub fn new(operation: &Operation<'_>) -> Self {
        let copy =
            |remote: &[RemoteSegment<'_>]| remote.iter().map(OwnedRemoteSegment::new).collect();
        match *operation {
            Operation::Write { remote } => Self::Write { remote: copy(remote), data: None },
            Operation::WriteImmediate { remote, data } => {
                Self::Write { remote: copy(remote), data: Some(data) }
            }
            Operation::Read { remote } => Self::Read { remote: copy(remote) },
            Operation::Atomic { op, datatype, remote, result, compare } => {
                let remote = OwnedRemoteSegment::new(&remote);
                Self::Atomic(Box::new(OwnedAtomic { op, datatype, remote, result, compare }))
            }
            Operation::Send { tag, invalidate } => {
                Self::Send { tag, data: None, invalidate: invalidate.cloned().map(Box::new) }
            }
            Operation::SendImmediate { tag, data } => {
                Self::Send { tag, data: Some(data), invalidate: None }
            }
            Operation::Receive { tag, from } => Self::Receive { tag, from },
            Operation::BindWindow { window, bind, tag } => {
                Self::BindWindow { window, bind: Box::new(bind), tag }
            }
            Operation::InvalidateWindow { window } => Self::InvalidateWindow { window },
        }
    }

    /// Returns the operation by reference. `remote` replaces the remote list of a write or read;
    /// other operations ignore it.
    #[must_use]
    pub fn with_remote<'a>(&'a self, remote: &'a [RemoteSegment<'a>]) -> Operation<'a> {
        match *self {
            Self::Write { data: None, .. } => Operation::Write { remote },
            Self::Write { data: Some(data), .. } => Operation::WriteImmediate { remote, data },
            Self::Read { .. } => Operation::Read { remote },
            Self::Atomic(ref atomic) => Operation::Atomic {
                op: atomic.op,
                datatype: atomic.datatype,
                remote: atomic.remote.borrow(),
                result: atomic.result,
                compare: atomic.compare,
            },
            Self::Send { tag, data: Some(data), .. } => Operation::SendImmediate { tag, data },
            Self::Send { tag, data: None, ref invalidate } => {
                Operation::Send { tag, invalidate: invalidate.as_deref() }
            }
            Self::Receive { tag, from } => Operation::Receive { tag, from },
            Self::BindWindow { window, ref bind, tag } => {
                Operation::BindWindow { window, bind: **bind, tag }
            }
            Self::InvalidateWindow { window } => Operation::InvalidateWindow { window },
        }
    }
}

impl<L, R> OwnedOperation<L, R> {
    /// Returns the remote list of a write or read. The list of other operations is empty.
    #[must_use]
    pub fn remote(&self) -> &[R] {
        match self {
            Self::Write { remote, .. } | Self::Read { remote } => remote,
            _ => &[],
        }
    }

    /// Returns the kind of the operation's completion.
    #[must_use]
    pub const fn kind(&self) -> CompletionKind {
        match self {
            Self::Write { .. } => CompletionKind::Write,
            Self::Read { .. } => CompletionKind::Read,
            Self::Atomic(_) => CompletionKind::Atomic,
            Self::Send { .. } => CompletionKind::Send,
            Self::Receive { .. } => CompletionKind::Receive,
            Self::BindWindow { .. } => CompletionKind::BindWindow,
            Self::InvalidateWindow { .. } => CompletionKind::InvalidateWindow,
        }
    }
}

/// The kind of request that a completion ends. Writes and sends with immediate data have the kinds
/// `Write` and `Send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "named like the operations")]
pub enum CompletionKind {
    Write,
    Read,
    Atomic,
    Send,
    Receive,
    /// A receive that a peer's write with immediate data consumed. The context is that of the
    /// receive. The peer's bytes are at the addresses that the peer wrote to, not in the buffer of
    /// the receive. If a NIC split the write, the number of bytes is that of the last part.
    RemoteWrite,
    BindWindow,
    InvalidateWindow,
}

/// The result of a request, which its completion queue reports.
///
/// A provider creates a completion with [`Completion::new`] and sets the other fields.
///
/// ```
/// use hmem_core::transfer::{Completion, CompletionKind};
///
/// let mut received = Completion::new(7, CompletionKind::Receive, Ok(64));
/// received.tag = Some(3);
/// assert_eq!((received.context, received.tag), (7, Some(3)));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The context of the request.
    pub context: u64,
    /// The kind of the request.
    pub kind: CompletionKind,
    /// The number of bytes that were transferred, or an error. After an error any part of the bytes
    /// may have been transferred.
    ///
    /// - Errors of the target: InvalidKey, AccessDenied, OutOfBounds, BadAddress, Unsupported
    ///   (atomics on staged memory). A NIC may report all of them as AccessDenied.
    /// - Errors of the local side: NoRegion, AccessDenied, OutOfBounds, BadAddress, MessageTooLong.
    /// - Errors of either side: BadState (a region that is disabled or being refreshed), Canceled,
    ///   Truncated, Unreachable, InvalidArgument, and Driver for other failures.
    pub result: Result<u64>,
    /// The tag of the message, for receives of tagged messages.
    pub tag: Option<u64>,
    /// The immediate data of the peer's message or write, for receives. It may be `None` if the
    /// receive failed.
    pub data: Option<u64>,
    /// The window key that the peer's message invalidated (send with invalidate), for receives. It
    /// is the number that [`RemoteKey::as_u64`] returns for that key.
    pub invalidated: Option<u64>,
}

impl Completion {
    /// Creates a completion without tag, data and invalidated key.
    #[must_use]
    pub const fn new(context: u64, kind: CompletionKind, result: Result<u64>) -> Self {
        Self { context, kind, result, tag: None, data: None, invalidated: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Addressing, handle::ProviderRegion};

    #[test]
    fn owned_request_gives_the_request_back() {
        let key = RemoteKey::new(Addressing::Virtual, Iova(0x1000), 64, 7);
        let far = RemoteSegment { address: Iova(0x1008), len: 8, key: &key };
        let near = LocalSegment { address: Address(16), len: 8, desc: None };
        let region = ProviderRegion { token: 1, local: LocalKey::from_provider(2), key: 3 };
        let window = ProviderWindow { token: 4, key: 5 };
        let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
        let bind = WindowBind { region, offset: 1, len: 2, access, addressing };
        let (op, datatype) = (AtomicOp::Cswap, AtomicType::U64);
        let (result, compare) = (Some(near), None);
        for operation in [
            Operation::Write { remote: &[far, far] },
            Operation::WriteImmediate { remote: &[far], data: 3 },
            Operation::Read { remote: &[] },
            Operation::Atomic { op, datatype, remote: far, result, compare },
            Operation::Send { tag: Some(1), invalidate: None },
            Operation::Send { tag: None, invalidate: Some(&key) },
            Operation::SendImmediate { tag: Some(1), data: 2 },
            Operation::Receive { tag: Some((1, 2)), from: Some(PeerId(3)) },
            Operation::BindWindow { window, bind, tag: 4 },
            Operation::InvalidateWindow { window },
        ] {
            let request =
                WorkRequest { operation, local: &[near, near], peer: PeerId(5), context: 6 };
            let back = OwnedRequest::new(&request).with(|back| format!("{back:?}"));
            assert_eq!(back, format!("{request:?}"));
        }
    }
}
