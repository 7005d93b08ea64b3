//! Checks requests, and cuts them into parts.

#![allow(unsafe_code, reason = "asks an endpoint for its atomics")]

use hmem_core::{
    Access, AddressRange, ErrorKind, IfaceKind, Result,
    provider::MsgOrder,
    transfer::{AtomicOp, CompletionKind, LocalSegment, Operation, RemoteSegment, WorkRequest},
};
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
    pub(super) local: LocalList,
    /// True if the parts may copy their bytes at the post.
    pub(super) copies: bool,
}

/// Returns the data that libfabric carries for a write with immediate data. The length goes along
/// in the upper half, because some providers do not report it.
fn carried(data: u64, bytes: u64) -> u64 {
    data | (bytes << 32)
}

/// Returns the immediate data and the length in the data that [`carried`] returned. `reported` is
/// the length that libfabric reports, or 0.
pub(super) fn received(carried: u64, reported: u64) -> (u64, u64) {
    let bytes = if reported > 0 { reported } else { carried >> 32 };
    (carried & u64::from(u32::MAX), bytes)
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
        let (bytes, copies) = (local.bytes, kind == CompletionKind::Send);
        let parts = SmallVec::from_iter([(op, vectors)]);
        Ok(Planned { kind, bytes, parts, local, copies })
    };
    match request.operation {
        Operation::Write { remote } => rma(hub, local(Access::WRITE)?, remote, None, true),
        Operation::WriteImmediate { remote, data } => {
            hub.attr().check_data(data)?;
            rma(hub, local(Access::WRITE)?, remote, Some(data), true)
        }
        Operation::Read { remote } => rma(hub, local(Access::READ)?, remote, None, false),
        Operation::Send { invalidate: Some(_), .. } => {
            let why = "send without a window's key: libfabric has no memory windows";
            Err(refuse(ErrorKind::Unsupported, why))
        }
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
            // SAFETY: the endpoint is in the table of open endpoints, and has atomics.
            let most = unsafe { atomic.limit(endpoint) } as u64;
            if most == 0 {
                let why = "use another operation or type: the provider does not have this atomic";
                return Err(refuse(ErrorKind::Unsupported, why).context("operation", op));
            }
            if bytes / datatype.size() > most {
                let why = "use fewer elements in one atomic";
                return Err(refuse(ErrorKind::MessageTooLong, why).context("limit", most));
            }
            let parts = SmallVec::from_iter([(PartOp::Atomic(Box::new(atomic)), vectors)]);
            let kind = CompletionKind::Atomic;
            Ok(Planned { kind, bytes, parts, local: list, copies: false })
        }
        _ => Err(refuse(ErrorKind::Unsupported, "use an operation of fi_rma(3) or fi_msg(3)")),
    }
}

fn local_list(hub: &Hub, segments: &[LocalSegment], right: Access) -> Result<LocalList> {
    // Host memory is the only memory of most registries.
    let devices = hub.registry.iter().count() > 1;
    LocalList::new(&hub.regions, segments, right, hub.needs_desc(), |segment| {
        let range = AddressRange::new(segment.address, segment.len.max(1))?;
        Ok(devices && hub.registry.owner_of_range(range)?.iface != IfaceKind::SYSTEM)
    })
}

/// Plans a write (`writes`) or a read.
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
    let cut = local.cut(&ranges, hub.limits.vectors, hub.limits.longest);
    let last = cut.len() - 1;
    if data.is_some() && last > 0 && !hub.attr().order.intersects(MsgOrder::WAW | MsgOrder::RMA_WAW)
    {
        let why = "write with immediate data to one range: the provider does not order writes";
        return Err(refuse(ErrorKind::Unsupported, why).context("parts", cut.len()));
    }
    let parts = cut.into_iter().enumerate().map(|(at, (vectors, remote))| {
        let data = data.filter(|_| at == last).map(|data| carried(data, bytes));
        let op = if writes { PartOp::Write { remote, data } } else { PartOp::Read { remote } };
        (op, vectors)
    });
    let parts = parts.collect();
    let kind = if writes { CompletionKind::Write } else { CompletionKind::Read };
    Ok(Planned { kind, bytes, parts, local, copies: writes })
}
