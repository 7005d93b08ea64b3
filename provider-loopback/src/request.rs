//! Work requests: their checks at posting, and their form in the NIC's queue.

use hmem_core::{
    Addressing, Error, ErrorKind, IfaceKind, Iova, MrMode, RemoteKey, Result,
    provider::{ProviderWindow, WindowEvent},
    transfer::{
        AtomicOp, AtomicType, LocalSegment, Operation, OwnedAtomic, OwnedOperation, OwnedRequest,
        RemoteSegment, WorkRequest,
    },
};

use super::{Few, domain::DomainState, keys::Token};

/// A posted request that has been checked and not executed.
pub(super) type Work = OwnedRequest<LocalPart, RemotePart>;

/// The operation of a posted request.
pub(super) type Task = OwnedOperation<LocalPart, RemotePart>;

/// Returns the window and the event of a bind or invalidation; `None` for any other operation.
pub(super) const fn window_event(task: &Task) -> Option<(ProviderWindow, WindowEvent)> {
    match task {
        Task::BindWindow { window, bind, .. } if bind.len == 0 => {
            Some((*window, WindowEvent::BindNothing))
        }
        Task::BindWindow { window, .. } => Some((*window, WindowEvent::Bind)),
        Task::InvalidateWindow { window } => Some((*window, WindowEvent::Invalidate)),
        _ => None,
    }
}

/// A contiguous part of the local memory of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalPart {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) memory: LocalMemory,
}

/// The kind of local memory, which decides how the NIC accesses it.
#[derive(Clone, Copy, Debug)]
pub(super) enum LocalMemory {
    /// Memory of the region that the token names.
    Region(Token),
    /// Host memory without a region. The application keeps the memory valid until the request
    /// completes.
    Host,
    /// Device memory without a region. The iface of this kind copies the memory.
    Device(IfaceKind),
}

/// The number of a remote key, and the namespace in which the number is valid.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyUse {
    pub(super) number: u64,
    /// True if the number came from mapping a raw key. The number is then valid only in the
    /// initiator's domain.
    pub(super) mapped: bool,
}

impl KeyUse {
    pub(super) fn of(key: &RemoteKey) -> Result<Self> {
        Ok(Self { number: key.as_u64()?, mapped: key.is_mapped() })
    }
}

/// A contiguous part of the remote memory of a request, and the key of the part's region.
#[derive(Clone, Copy, Debug)]
pub(super) struct RemotePart {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) key: KeyUse,
}

#[inline(always)]
fn local_part(domain: &DomainState, segment: &LocalSegment) -> Result<LocalPart> {
    let (address, len) = (segment.address.0, segment.len);
    let refuse = |why: &'static str, remedy: &'static str| {
        Error::new(ErrorKind::NoRegion, "post")
            .provider("loopback")
            .context("address", segment.address)
            .context("why", why)
            .remedy(remedy)
    };
    if let Some(desc) = segment.desc {
        let token = Token::from_u64(desc.to_provider());
        if domain.nic.regions.is_live(domain.id, token) {
            return Ok(LocalPart { address, len, memory: LocalMemory::Region(token) });
        }
        return Err(refuse(
            "the descriptor is stale or of another domain",
            "pass the descriptor of a region of this domain that is open",
        ));
    }
    if domain.mode.contains(MrMode::LOCAL) {
        return Err(refuse("no descriptor", "in LOCAL mode every local buffer needs a descriptor"));
    }
    if len > 0 && address.checked_add(len - 1).is_none() {
        return Err(Error::new(ErrorKind::AddressWraps, "post")
            .provider("loopback")
            .context("address", segment.address)
            .context("length", len));
    }
    let owner =
        if len > 0 { domain.registry.owner_of(segment.address)?.iface } else { IfaceKind::SYSTEM };
    let memory = if owner == IfaceKind::SYSTEM {
        LocalMemory::Host
    } else if domain.mode.contains(MrMode::HMEM) {
        return Err(refuse("device memory", "in HMEM mode device buffers need a descriptor")
            .iface(domain.registry.name_of(owner)));
    } else {
        LocalMemory::Device(owner)
    };
    Ok(LocalPart { address, len, memory })
}

/// Checks local segments, and returns their parts and their total length.
#[inline]
pub(super) fn local_parts(
    domain: &DomainState,
    segments: &[LocalSegment],
) -> Result<(Few<LocalPart>, u64)> {
    let mut parts = Few::new();
    let mut total = 0u64;
    for segment in segments {
        parts.push(local_part(domain, segment)?);
        total =
            total.checked_add(segment.len).ok_or_else(|| invalid("the local lengths overflow"))?;
    }
    Ok((parts, total))
}

/// Checks a request other than a receive, and converts it to the form that the NIC queues.
pub(super) fn work(domain: &DomainState, request: &WorkRequest<'_>) -> Result<Work> {
    let (local, len) = local_parts(domain, request.local)?;
    let operation = match request.operation {
        Operation::Write { remote } => {
            Task::Write { remote: remote_parts(remote, len)?, data: None }
        }
        Operation::WriteImmediate { remote, data } => {
            domain.nic.attr.check_data(data)?;
            Task::Write { remote: remote_parts(remote, len)?, data: Some(data) }
        }
        Operation::Read { remote } => Task::Read { remote: remote_parts(remote, len)? },
        Operation::Atomic { op, datatype, remote, result, compare } => {
            atomic(domain, op, datatype, &remote, result.as_ref(), compare.as_ref(), len)?
        }
        Operation::SendImmediate { tag, data } => {
            domain.nic.attr.check_data(data)?;
            Task::Send { tag, data: Some(data), invalidate: None }
        }
        Operation::Send { tag, invalidate } => {
            invalidate.map(KeyUse::of).transpose()?;
            Task::Send { tag, data: None, invalidate: invalidate.cloned().map(Box::new) }
        }
        Operation::BindWindow { window, bind, tag } => {
            domain.windows.check_part(&bind)?;
            Task::BindWindow { window, bind: Box::new(bind), tag }
        }
        Operation::InvalidateWindow { window } => Task::InvalidateWindow { window },
        other => {
            return Err(Error::new(ErrorKind::Unsupported, "post")
                .provider("loopback")
                .context("operation", format_args!("{other:?}")));
        }
    };
    Ok(Work { operation, local, peer: request.peer, context: request.context })
}

fn atomic(
    domain: &DomainState,
    op: AtomicOp,
    datatype: AtomicType,
    remote: &RemoteSegment<'_>,
    result: Option<&LocalSegment>,
    compare: Option<&LocalSegment>,
    operands: u64,
) -> Result<Task> {
    let fits = |len: u64| len == remote.len;
    if remote.len == 0 || !remote.len.is_multiple_of(datatype.size()) {
        return Err(invalid("pass a target of one or more whole elements to an atomic"));
    }
    if op != AtomicOp::AtomicRead && !fits(operands) {
        return Err(invalid("pass one operand for each element to an atomic"));
    }
    if op.compares() != compare.is_some() {
        return Err(invalid("pass a compare operand to comparing atomics, and to no others"));
    }
    if (op.compares() || op == AtomicOp::AtomicRead) && result.is_none() {
        return Err(invalid("pass a result buffer to comparing and reading atomics"));
    }
    if !result.is_none_or(|segment| fits(segment.len))
        || !compare.is_none_or(|segment| fits(segment.len))
    {
        return Err(invalid("pass result and compare buffers of the target's length"));
    }
    Ok(Task::Atomic(Box::new(OwnedAtomic {
        op,
        datatype,
        remote: RemotePart {
            address: remote.address.0,
            len: remote.len,
            key: KeyUse::of(remote.key)?,
        },
        result: result.map(|segment| local_part(domain, segment)).transpose()?,
        compare: compare.map(|segment| local_part(domain, segment)).transpose()?,
    })))
}

/// Returns the remote parts of a write or read of `len` bytes. If a key has several pieces, the
/// access is split into one part for each piece that it touches.
#[inline]
fn remote_parts(segments: &[RemoteSegment<'_>], len: u64) -> Result<Few<RemotePart>> {
    let mut parts = Few::new();
    let mut total = 0u64;
    for segment in segments {
        total =
            total.checked_add(segment.len).ok_or_else(|| invalid("the remote lengths overflow"))?;
        let RemoteSegment { address, len, key, .. } = *segment;
        match KeyUse::of(key) {
            Ok(key) => parts.push(RemotePart { address: address.0, len, key }),
            // The key has several pieces.
            Err(_) => split(key, address, len, &mut parts)?,
        }
    }
    if segments.is_empty() || total != len {
        return Err(invalid(
            "pass local and remote lists of the same total length, and at least one remote segment",
        )
        .context("local", len)
        .context("remote", total));
    }
    Ok(parts)
}

/// Splits an access into one part for each piece of the remote key that the access touches.
///
/// A key has several pieces if its registration was split into several regions.
fn split(key: &RemoteKey, address: Iova, len: u64, parts: &mut Few<RemotePart>) -> Result<()> {
    let (mut at, mut left) = (address.0, len);
    for piece in key.pieces() {
        let skip = at.wrapping_sub(piece.base.0);
        if skip >= piece.len {
            continue;
        }
        let part = left.min(piece.len - skip);
        let address = match key.addressing() {
            Addressing::ZeroBased => skip,
            Addressing::Virtual => at,
        };
        parts.push(RemotePart {
            address,
            len: part,
            key: KeyUse { number: piece.key, mapped: key.is_mapped() },
        });
        at = at.wrapping_add(part);
        left -= part;
        if left == 0 {
            return Ok(());
        }
    }
    Err(Error::new(ErrorKind::OutOfBounds, "post")
        .provider("loopback")
        .context("address", address)
        .context("length", len)
        .remedy("access only bytes in the pieces of the key"))
}

pub(super) fn invalid(rule: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "post").provider("loopback").remedy(rule)
}

pub(super) fn full() -> Error {
    Error::new(ErrorKind::Again, "post").provider("loopback").remedy(concat!(
        "the endpoint has as many requests outstanding as its depth: read completions and ",
        "post again, or open a deeper endpoint",
    ))
}
