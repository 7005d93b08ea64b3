//! Checks requests, and cuts them into parts.

#![allow(unsafe_code, reason = "asks an endpoint for its atomics")]

use hmem_core::{
    Access, AddressRange, Error, ErrorKind, IfaceKind, LocalKey, Result,
    transfer::{AtomicOp, CompletionKind, LocalSegment, Operation, RemoteSegment, WorkRequest},
};
use hmem_p2p::staging::{LocalMemory, Transfer, staged_right};
use smallvec::SmallVec;

use super::{
    hub::Hub,
    part::{AtomicPart, PartOp},
    plan::{Local, LocalList, Vectors, refuse, remote_ranges},
    sys,
};

/// The parts of a request, before it is posted.
pub(super) struct Planned {
    pub(super) kind: CompletionKind,
    pub(super) bytes: u64,
    pub(super) parts: SmallVec<[(PartOp, Vectors); 1]>,
    /// The tokens of the regions that the local segments use.
    pub(super) tokens: SmallVec<[u64; 2]>,
    /// True if the request is a write or a message, whose bytes a post may copy.
    pub(super) copies: bool,
}

impl Planned {
    /// Creates a plan without parts. Its parts are added later, or each chunk gets a plan of its
    /// own.
    pub(super) fn none(kind: CompletionKind, bytes: u64) -> Self {
        Self { kind, bytes, parts: SmallVec::new(), tokens: SmallVec::new(), copies: false }
    }
}

/// Returns the data that libfabric carries for a write with immediate data. The upper half is the
/// length of the write, because some providers do not report it. A provider with 4 bytes of data
/// drops the upper half, and reports the length.
fn carried(data: u64, bytes: u64) -> u64 {
    data | (bytes << 32)
}

/// Returns the immediate data and the length of a peer's write. The argument `carried` is the data
/// that libfabric delivered, which the peer made by the function [`carried`]. `reported` is the
/// length that libfabric reports: that of the last part of the write, or 0. `carries_lengths` is
/// [`Limits::carries_lengths`](super::plan::Limits::carries_lengths).
pub(super) fn received(carried: u64, reported: u64, carries_lengths: bool) -> (u64, u64) {
    if !carries_lengths {
        return (carried, reported);
    }
    let (low, length) = (u64::from(u32::MAX), carried >> 32);
    // The carried length lacks the upper bits of a write of 4 GiB or more.
    let bytes = if reported & low == length { reported } else { length };
    (carried & low, bytes)
}

/// Sets the length that a write with immediate data carries to `bytes`, the length of the whole
/// write. The parts in `planned` may be those of one chunk.
pub(super) fn carry_length(planned: &mut Planned, bytes: u64) {
    for (op, _) in &mut planned.parts {
        if let PartOp::Write { data: Some(data), .. } = op {
            *data = carried(*data & u64::from(u32::MAX), bytes);
        }
    }
}

/// The transfer of a request that names bytes of staged memory, and the tokens of the regions that
/// the request uses.
pub(super) type StagedTransfer = (Box<Transfer>, SmallVec<[u64; 2]>);

/// Returns the transfer of a request that names bytes of staged memory. Returns `None` for other
/// requests.
///
/// # Errors
/// - Unsupported: the operation is an atomic.
/// - The errors of [`LocalMemory::push_staged`], [`Transfer::new`] and [`Regions::staged`].
///
/// [`Regions::staged`]: super::region::Regions::staged
pub(super) fn stage(hub: &Hub, request: &WorkRequest<'_>) -> Result<Option<StagedTransfer>> {
    if !hub.regions.has_staged() {
        return Ok(None);
    }
    let Some(right) = staged_right(&request.operation) else { return Ok(None) };
    let (mut memory, mut tokens) = (LocalMemory::default(), SmallVec::new());
    for segment in request.local {
        let staged = segment.desc.map(|desc| hub.regions.staged(desc, right)).transpose()?;
        match staged.flatten() {
            Some(region) => memory.push_staged(region, segment)?,
            None => memory.push_plain(*segment),
        }
        tokens.extend(segment.desc.map(LocalKey::to_provider));
    }
    let Some((pool, buffers)) = hub.staging.buffers().filter(|_| memory.is_staged()) else {
        return Ok(None);
    };
    match request.operation {
        Operation::WriteImmediate { .. } if !hub.limits.carries_lengths => {
            let why = "write with immediate data from host memory: the data has no room for the \
                       length of a write in several parts";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        Operation::WriteImmediate { data, .. } | Operation::SendImmediate { data, .. } => {
            hub.attr().check_data(data)?;
        }
        Operation::Send { invalidate: Some(_), .. } => return Err(no_windows()),
        _ => {}
    }
    let transfer = Transfer::new(&pool, buffers, request, memory, hub.limits.vectors as u64)?;
    if transfer.bytes() > hub.limits.longest && transfer.operation().remote().is_empty() {
        let error = refuse(ErrorKind::MessageTooLong, "send a shorter message");
        return Err(error.context("bytes", transfer.bytes()).context("limit", hub.limits.longest));
    }
    Ok(Some((Box::new(transfer), tokens)))
}

fn no_windows() -> Error {
    refuse(ErrorKind::Unsupported, "send without a window's key: libfabric has no memory windows")
}

/// Checks a request, and cuts it into parts.
pub(super) fn plan(
    hub: &Hub,
    request: &WorkRequest<'_>,
    endpoint: *mut sys::fid_ep,
) -> Result<Planned> {
    let local = |right| local_list(hub, request.local, right);
    let limits = hub.limits;
    let whole = |kind, op, local: LocalList| {
        let vectors = local.whole(limits.vectors, limits.longest)?;
        let (bytes, copies) = (local.bytes, kind == CompletionKind::Send && local.host);
        let parts = SmallVec::from_buf([(op, vectors)]);
        Ok(Planned { kind, bytes, parts, tokens: local.tokens, copies })
    };
    match request.operation {
        Operation::Write { remote } => rma(hub, local(Access::WRITE)?, remote, None, true),
        Operation::WriteImmediate { remote, data } => {
            hub.attr().check_data(data)?;
            rma(hub, local(Access::WRITE)?, remote, Some(data), true)
        }
        Operation::Read { remote } => rma(hub, local(Access::READ)?, remote, None, false),
        Operation::Send { invalidate: Some(_), .. } => Err(no_windows()),
        Operation::Send { tag, invalidate: None } => {
            let op = PartOp::Send { tag, data: None };
            whole(CompletionKind::Send, op, local(Access::SEND)?)
        }
        Operation::SendImmediate { tag, data } => {
            hub.attr().check_data(data)?;
            let op = PartOp::Send { tag, data: Some(data) };
            whole(CompletionKind::Send, op, local(Access::SEND)?)
        }
        Operation::Receive { tag, .. } => {
            let op = PartOp::Receive { tag };
            whole(CompletionKind::Receive, op, local(Access::RECV)?)
        }
        Operation::Atomic { op, datatype, remote, result, compare } => {
            if !hub.has(sys::FI_ATOMIC) {
                let why = "use another provider: this one has no atomics (FI_ATOMIC)";
                return Err(refuse(ErrorKind::Unsupported, why));
            }
            let mut list = local(Access::WRITE)?;
            let mut one = |segment: Option<LocalSegment>, right| -> Result<Option<Local>> {
                let Some(segment) = segment else { return Ok(None) };
                let mut more = local_list(hub, &[segment], right)?;
                list.tokens.append(&mut more.tokens);
                Ok(more.list.pop())
            };
            let (result, compare) = (one(result, Access::READ)?, one(compare, Access::WRITE)?);
            let (ranges, bytes) = remote_ranges(&[remote])?;
            let wrong = |why| Err(refuse(ErrorKind::InvalidArgument, why));
            let [remote] = ranges[..] else {
                return wrong("use elements in one piece of the remote key");
            };
            let reads = op == AtomicOp::AtomicRead;
            let has_operands = list.bytes == bytes || (reads && list.bytes == 0);
            let as_long = |local: &Option<Local>| local.is_none_or(|local| local.len == bytes);
            if !has_operands || !as_long(&result) || !as_long(&compare) {
                return wrong("pass as many bytes of operands and results as of elements");
            }
            if bytes == 0 || bytes % datatype.size() != 0 {
                return wrong("pass whole elements, at least one");
            }
            if op.compares() != compare.is_some() {
                return wrong(
                    "pass values to compare with for comparing operations, and only then",
                );
            }
            if (op.compares() || reads) && result.is_none() {
                return wrong("pass a place for the result of this operation");
            }
            let vectors = list.whole(limits.vectors, limits.longest)?;
            let atomic = AtomicPart { op, datatype, remote, result, compare };
            let most = {
                let _guard = hub.open.lock();
                // SAFETY: the endpoint is in the table of open endpoints, and has atomics.
                unsafe { atomic.limit(endpoint) as u64 }
            };
            if most == 0 {
                let why = "use another operation or type: the provider does not have this atomic";
                return Err(refuse(ErrorKind::Unsupported, why).context("operation", op));
            }
            if bytes / datatype.size() > most {
                let why = "use fewer elements in one atomic";
                return Err(refuse(ErrorKind::MessageTooLong, why).context("limit", most));
            }
            let parts = SmallVec::from_buf([(PartOp::Atomic(Box::new(atomic)), vectors)]);
            let kind = CompletionKind::Atomic;
            Ok(Planned { kind, bytes, parts, tokens: list.tokens, copies: false })
        }
        _ => Err(refuse(ErrorKind::Unsupported, "use an operation of fi_rma(3) or fi_msg(3)")),
    }
}

fn local_list(hub: &Hub, segments: &[LocalSegment], right: Access) -> Result<LocalList> {
    LocalList::new(&hub.regions, segments, right, hub.needs_desc(), |segment| {
        let range = AddressRange::new(segment.address, segment.len.max(1))?;
        Ok(hub.has_devices && hub.registry.owner_of_range(range)?.iface != IfaceKind::SYSTEM)
    })
}

/// Plans a write if `writes` is true, and otherwise a read.
fn rma(
    hub: &Hub,
    local: LocalList,
    remote: &[RemoteSegment<'_>],
    data: Option<u64>,
    writes: bool,
) -> Result<Planned> {
    let (ranges, bytes) = remote_ranges(remote)?;
    if bytes != local.bytes {
        let why = "pass as many remote bytes as local bytes";
        return Err(refuse(ErrorKind::InvalidArgument, why)
            .context("local", local.bytes)
            .context("remote", bytes));
    }
    let mut parts = SmallVec::new();
    local.cut(&ranges, hub.limits.vectors, hub.limits.longest, |vectors, remote| {
        let write = PartOp::Write { remote, data: None };
        parts.push((if writes { write } else { PartOp::Read { remote } }, vectors));
    });
    if data.is_some() && parts.len() > 1 && !hub.limits.carries_lengths {
        let why = "write with immediate data to one range: the peer sees the length of the last";
        return Err(refuse(ErrorKind::Unsupported, why).context("parts", parts.len()));
    }
    if let Some((PartOp::Write { data: last, .. }, _)) = parts.last_mut() {
        *last = data.map(|data| carried(data, bytes));
    }
    let kind = if writes { CompletionKind::Write } else { CompletionKind::Read };
    Ok(Planned { kind, bytes, parts, tokens: local.tokens, copies: writes && local.host })
}
