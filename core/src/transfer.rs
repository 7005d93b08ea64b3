//! Data transfer: work requests, their segments, and their completions.
//!
//! Addresses on the local side are the application's own; on the remote side they are [`Iova`]s of
//! the region that the key names.

use std::fmt;

use crate::{
    Access, Address, Addressing, Iova, LocalKey, RemoteKey, Result,
    handle::{ProviderRegion, ProviderWindow},
};

/// A piece of local memory in a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalSegment {
    /// Its first address. In zero-based verbs regions too, this is the application's address.
    pub address: Address,
    /// Bytes.
    pub len: u64,
    /// The descriptor of the region that it lies in, where there is one.
    pub desc: Option<LocalKey>,
}

/// A piece of a peer's memory in a work request.
#[derive(Clone, Copy, Debug)]
pub struct RemoteSegment<'a> {
    /// The first byte, in the addressing of the key.
    pub address: Iova,
    /// Bytes.
    pub len: u64,
    /// The peer's key.
    pub key: &'a RemoteKey,
}

/// An endpoint's name in the provider's own bytes, to send to a peer.
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

/// A resolved peer (`fi_addr_t`), valid for the endpoint that resolved it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId(pub u64);

/// `enum fi_op` of `rdma/fi_atomic.h`, with its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs, reason = "the names are those of fi_atomic(3), which defines them")]
pub enum AtomicOp {
    Min = 0,
    Max = 1,
    Sum = 2,
    Prod = 3,
    Lor = 4,
    Land = 5,
    Bor = 6,
    Band = 7,
    Lxor = 8,
    Bxor = 9,
    AtomicRead = 10,
    AtomicWrite = 11,
    Cswap = 12,
    CswapNe = 13,
    CswapLe = 14,
    CswapLt = 15,
    CswapGe = 16,
    CswapGt = 17,
    Mswap = 18,
}

impl AtomicOp {
    /// Every operation, in libfabric's order.
    pub const ALL: [Self; 19] = [
        Self::Min,
        Self::Max,
        Self::Sum,
        Self::Prod,
        Self::Lor,
        Self::Land,
        Self::Bor,
        Self::Band,
        Self::Lxor,
        Self::Bxor,
        Self::AtomicRead,
        Self::AtomicWrite,
        Self::Cswap,
        Self::CswapNe,
        Self::CswapLe,
        Self::CswapLt,
        Self::CswapGe,
        Self::CswapGt,
        Self::Mswap,
    ];

    /// Returns true if the operation takes a compare operand (`fi_compare_atomic`).
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

/// Integer datatypes of atomics (`enum fi_datatype`), with its values.
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
    /// Every datatype.
    pub const ALL: [Self; 4] = [Self::I32, Self::U32, Self::I64, Self::U64];

    /// Bytes of one element.
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
/// Local and remote lists of a write or read are runs of bytes of the same total length; the seams
/// need not agree.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Operation<'a> {
    /// RMA write from the local segments to the remote ones.
    Write {
        /// The destination.
        remote: &'a [RemoteSegment<'a>],
    },
    /// RMA read from the remote segments into the local ones.
    Read {
        /// The source.
        remote: &'a [RemoteSegment<'a>],
    },
    /// Atomic over an array of elements: operands in the local segments. A fetching one gives
    /// `result`, a comparing one gives `result` and `compare`.
    Atomic {
        /// The operation.
        op: AtomicOp,
        /// The element.
        datatype: AtomicType,
        /// The target elements; aligned to the element size.
        remote: RemoteSegment<'a>,
        /// The destination of the old values, for fetching and comparing forms.
        result: Option<LocalSegment>,
        /// The value to compare with, for comparing forms.
        compare: Option<LocalSegment>,
    },
    /// A message; a tagged one matches receives by tag.
    Send {
        /// The tag, for tagged messages.
        tag: Option<u64>,
        /// A window key that the receiver's NIC invalidates (send with invalidate).
        invalidate: Option<&'a RemoteKey>,
    },
    /// A buffer for one message.
    Receive {
        /// Tag and ignore mask, for tagged messages.
        tag: Option<(u64, u64)>,
        /// Only from this peer, where given.
        from: Option<PeerId>,
    },
    /// Binds a type 2 window. The key is the window's index with the given low 8 bits.
    BindWindow {
        /// The window.
        window: ProviderWindow,
        /// The region to bind it to.
        region: ProviderRegion,
        /// First byte, from the start of the region.
        offset: u64,
        /// Bytes, more than 0.
        len: u64,
        /// Remote rights.
        access: Access,
        /// The addressing for peers.
        addressing: Addressing,
        /// The low 8 bits of the new key.
        tag: u8,
    },
    /// Kills the current key of a type 2 window.
    InvalidateWindow {
        /// The window.
        window: ProviderWindow,
    },
}

/// One request to an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct WorkRequest<'a> {
    /// The remedy.
    pub operation: Operation<'a>,
    /// The local memory, as one run of bytes.
    pub local: &'a [LocalSegment],
    /// The peer; ignored by receives and window operations.
    pub peer: PeerId,
    /// Returned with the completion.
    pub context: u64,
}

/// The kind of request that a completion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named like the operations")]
pub enum CompletionKind {
    Write,
    Read,
    Atomic,
    Send,
    Receive,
    BindWindow,
    InvalidateWindow,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's context.
    pub context: u64,
    /// The kind of the request.
    pub kind: CompletionKind,
    /// Bytes moved, or why none may be relied on.
    ///
    /// Errors of the target side: InvalidKey, AccessDenied, OutOfBounds, BadAddress, Unsupported
    /// (atomics on staged memory); of the local side: NoRegion, AccessDenied, BadAddress;
    /// Canceled, Truncated, Unreachable.
    pub result: Result<u64>,
    /// The message's tag, for receives of tagged messages.
    pub tag: Option<u64>,
}
