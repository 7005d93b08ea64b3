//! Builds the work requests of a request from its local and remote lists. One driver call posts
//! them as a chain.

#![allow(unsafe_code, reason = "pointers inside a chain of work requests")]

use hmem_core::{
    Access, Error, ErrorKind, Iova, RemoteKey, RemotePiece, Result,
    transfer::{AtomicOp, AtomicType, CompletionKind, LocalSegment, Operation, RemoteSegment},
};

use super::{
    atomic::{AtomicOperands, ELEMENT},
    connection::QueuePair,
    domain_state::DomainState,
    region::{CpuAccess, Held},
    split::{Planned, Span, SplitTarget, plan},
    sys::{AtomicPart, RdmaPart, SendFlags, SendWr, Sge, WrOpcode, WrPart},
};

/// Kind of an RMA operation: the opcode, the required local right, and the kind of completion.
#[derive(Clone, Copy)]
pub(super) struct Rma {
    pub(super) opcode: WrOpcode,
    right: Access,
    pub(super) kind: CompletionKind,
}

pub(super) const WRITE: Rma =
    Rma { opcode: WrOpcode::IBV_WR_RDMA_WRITE, right: Access::WRITE, kind: CompletionKind::Write };
pub(super) const READ: Rma =
    Rma { opcode: WrOpcode::IBV_WR_RDMA_READ, right: Access::READ, kind: CompletionKind::Read };

/// Adds immediate data, if there is any, to the work request of a write or a message.
pub(super) fn carry(request: &mut SendWr, data: Option<u32>) {
    let Some(data) = data else { return };
    request.opcode = if request.opcode == WrOpcode::IBV_WR_RDMA_WRITE {
        WrOpcode::IBV_WR_RDMA_WRITE_WITH_IMM
    } else {
        WrOpcode::IBV_WR_SEND_WITH_IMM
    };
    request.invalidate_rkey = data.to_be();
}

/// Fast path: builds the work request of a transfer that needs only one work request with one local
/// segment. The work request points to `segment`, which this call fills in.
///
/// Returns the transfer's length in bytes. Returns `None` for other transfers and for invalid ones:
/// the caller then calls [`Chain::rma`], which builds the work requests or returns the error.
#[inline]
pub(super) fn single(
    held: &Held<'_>,
    pair: &QueuePair,
    (local, remote): (&[LocalSegment], &[RemoteSegment<'_>]),
    rma: Rma,
    request: &mut SendWr,
    segment: &mut Sge,
) -> Option<u64> {
    let ([local], [remote]) = (local, remote) else { return None };
    let most = pair.port.max_message.min(u64::from(u32::MAX));
    if local.len != remote.len || local.len == 0 || local.len > most || remote.key.is_mapped() {
        return None;
    }
    let rkey = rkey(remote.key.as_u64().ok()?).ok()?;
    let (part, cpu) = held.single(local, rma.right)?;
    let addr = part.base + (local.address.0 - part.range.start().0);
    *segment = Sge { addr, length: local.len as u32, lkey: part.lkey };
    request.wr = WrPart { rdma: RdmaPart { remote_addr: remote.address.0, rkey } };
    request.num_sge = 1;
    request.sg_list = segment;
    let is_write = rma.opcode == WrOpcode::IBV_WR_RDMA_WRITE;
    request.send_flags = inline(pair, is_write && cpu == CpuAccess::Owned, local.len);
    Some(local.len)
}

/// Returns the flag INLINE if a post of `bytes` bytes can be inline, and 0 if not. `readable` is
/// true if the CPU may read the bytes during the post.
#[inline]
fn inline(pair: &QueuePair, readable: bool, bytes: u64) -> u32 {
    let fits = bytes > 0 && bytes <= u64::from(pair.cap.max_inline_data);
    if readable && fits { SendFlags::INLINE.bits() } else { 0 }
}

/// The work requests of one request, or the segments of one receive. Each post clears the vectors
/// and fills them again, so that most posts allocate no memory.
#[derive(Default)]
pub(super) struct Chain {
    spans: Vec<Span>,
    targets: Vec<SplitTarget>,
    pub(super) segments: Vec<Sge>,
    planned: Vec<Planned>,
    pub(super) requests: Vec<SendWr>,
}

// SAFETY: the raw pointers in `requests` point into the value's own vectors and are only followed
// during a post, under the lock of the poster that holds the value.
unsafe impl Send for Chain {}

impl Chain {
    fn clear(&mut self) {
        self.spans.clear();
        self.targets.clear();
        self.requests.clear();
    }

    /// Translates local segments to [`Span`]s and adds them to `self.spans`. Returns true if every
    /// region owns its memory: the CPU may then read the bytes for an inline post. Also returns the
    /// total length of the segments in bytes.
    fn local(
        &mut self,
        held: &Held<'_>,
        local: &[LocalSegment],
        right: Access,
    ) -> Result<(bool, u64)> {
        let (mut owned, mut bytes) = (true, 0_u64);
        for segment in local {
            let cpu = held.translate(segment, right, &mut self.spans)?;
            owned &= cpu == CpuAccess::Owned;
            bytes = bytes.saturating_add(segment.len);
        }
        Ok((owned, bytes))
    }

    /// Builds the work requests of an RMA transfer. Returns the transfer's length in bytes.
    pub(super) fn rma(
        &mut self,
        domain: &DomainState,
        held: &Held<'_>,
        pair: &QueuePair,
        (local, remote): (&[LocalSegment], &[RemoteSegment<'_>]),
        rma: Rma,
    ) -> Result<u64> {
        self.clear();
        let (owned, bytes) = self.local(held, local, rma.right)?;
        let mut far = 0_u64;
        for segment in remote {
            far = far.saturating_add(segment.len);
            targets(&mut self.targets, domain, segment)?;
        }
        if far != bytes {
            return Err(domain
                .refuse_post(ErrorKind::InvalidArgument, "pass as many remote bytes as local bytes")
                .context("local", bytes)
                .context("remote", far));
        }
        let limits = (pair.cap.max_send_sge as usize, pair.port.max_message);
        let flags = inline(pair, owned && rma.opcode == WrOpcode::IBV_WR_RDMA_WRITE, bytes);
        let Self { spans, targets, segments, planned, requests } = self;
        plan(spans, targets, limits, segments, planned);
        for planned in planned {
            let mut wr = SendWr::new(rma.opcode, 0);
            wr.wr = WrPart { rdma: RdmaPart { remote_addr: planned.address, rkey: planned.rkey } };
            wr.num_sge = planned.count as i32;
            // `segments` is complete, so its elements do not move any more.
            wr.sg_list = segments[planned.first..].as_mut_ptr();
            wr.send_flags = flags;
            requests.push(wr);
        }
        if requests.is_empty() {
            return Err(domain.refuse_post(ErrorKind::InvalidArgument, "pass a remote range"));
        }
        Ok(bytes)
    }

    /// Builds the work request that sends a message. Returns the message's length in bytes.
    pub(super) fn send(
        &mut self,
        domain: &DomainState,
        held: &Held<'_>,
        pair: &QueuePair,
        (local, invalidate): (&[LocalSegment], Option<&RemoteKey>),
    ) -> Result<u64> {
        self.clear();
        let (owned, bytes) = self.local(held, local, Access::SEND)?;
        self.message(domain, pair.cap.max_send_sge, pair.port.max_message, bytes)?;
        let opcode = if invalidate.is_some() {
            WrOpcode::IBV_WR_SEND_WITH_INV
        } else {
            WrOpcode::IBV_WR_SEND
        };
        let mut wr = SendWr::new(opcode, 0);
        if let Some(key) = invalidate {
            wr.invalidate_rkey = window_rkey(key)?;
        }
        wr.num_sge = self.segments.len() as i32;
        wr.sg_list = self.segments.as_mut_ptr();
        wr.send_flags = inline(pair, owned, bytes);
        self.requests.push(wr);
        Ok(bytes)
    }

    /// Fills in `segments` for a receive.
    pub(super) fn receive(
        &mut self,
        domain: &DomainState,
        held: &Held<'_>,
        pair: &QueuePair,
        local: &[LocalSegment],
    ) -> Result<()> {
        self.clear();
        let (_, bytes) = self.local(held, local, Access::RECV)?;
        // A receive may be longer than any message.
        self.message(domain, pair.cap.max_recv_sge, u64::MAX, bytes)
    }

    /// Fills in `segments` for a message of `bytes` bytes, which must fit in one work request.
    fn message(
        &mut self,
        domain: &DomainState,
        max_sge: u32,
        max_message: u64,
        bytes: u64,
    ) -> Result<()> {
        if bytes > max_message {
            return Err(domain
                .refuse_post(ErrorKind::MessageTooLong, "send less at once, or use RMA")
                .context("length", bytes)
                .context("max_msg_sz", max_message));
        }
        let message = [SplitTarget { address: 0, len: bytes, rkey: 0 }];
        let limits = (usize::MAX, u64::MAX);
        plan(&self.spans, &message, limits, &mut self.segments, &mut self.planned);
        if self.segments.len() > max_sge as usize {
            return Err(domain
                .refuse_post(
                    ErrorKind::TooManyRanges,
                    "pass fewer local segments: a message cannot be split",
                )
                .context("segments", self.segments.len())
                .context("max_sge", max_sge));
        }
        Ok(())
    }

    /// Builds the work requests of an atomic operation, one for each element.
    pub(super) fn atomic(
        &mut self,
        domain: &DomainState,
        held: &Held<'_>,
        (op, datatype, remote): (AtomicOp, AtomicType, &RemoteSegment<'_>),
        (local, result, compare): (&[LocalSegment], Option<LocalSegment>, Option<LocalSegment>),
    ) -> Result<u64> {
        self.clear();
        let operands =
            AtomicOperands::read(domain, held, (op, datatype, remote), (local, compare))?;
        match result {
            Some(segment) if segment.len == remote.len => {
                self.local(held, &[segment], Access::READ)?;
            }
            Some(_) => {
                return Err(domain.refuse_post(
                    ErrorKind::InvalidArgument,
                    "pass a result buffer as long as the target",
                ));
            }
            // Verbs always returns the old value, here to memory that no code reads.
            None => {
                self.spans.extend(std::iter::repeat_n(domain.discard_buffer()?, operands.len()))
            }
        }
        targets(&mut self.targets, domain, remote)?;
        let Self { spans, targets, segments, planned, requests } = self;
        plan(spans, targets, (usize::MAX, ELEMENT), segments, planned);
        for (index, planned) in planned.iter().enumerate() {
            if planned.len != ELEMENT || planned.count != 1 {
                return Err(domain.refuse_post(
                    ErrorKind::Unsupported,
                    "use elements that do not cross a boundary of two registrations",
                ));
            }
            let mut wr = SendWr::new(operands.opcode, 0);
            let (compare_add, swap) = operands.fields(index);
            let (remote_addr, rkey) = (planned.address, planned.rkey);
            wr.wr = WrPart { atomic: AtomicPart { remote_addr, compare_add, swap, rkey } };
            wr.num_sge = 1;
            wr.sg_list = segments[planned.first..].as_mut_ptr();
            requests.push(wr);
        }
        Ok(remote.len)
    }
}

/// Checks the keys of an operation that a lane (queue of staged transfers) posts later.
///
/// # Errors
/// - InvalidKey: a key has more than 32 bits, or is a mapped key (`map_raw`) that this domain did
///   not map or has unmapped.
/// - The errors of [`window_rkey`], for the key that a message invalidates.
pub(super) fn check_keys(domain: &DomainState, operation: &Operation<'_>) -> Result<()> {
    let remote = match operation {
        Operation::Write { remote }
        | Operation::WriteImmediate { remote, .. }
        | Operation::Read { remote } => remote,
        Operation::Atomic { remote, .. } => std::slice::from_ref(remote),
        Operation::Send { invalidate: Some(key), .. } => return window_rkey(key).map(drop),
        _ => return Ok(()),
    };
    let mut found = Vec::new();
    remote.iter().try_for_each(|segment| targets(&mut found, domain, segment))
}

/// Splits a range of a peer's memory into targets that each have one rkey, and adds them to
/// `targets`. The range's key is a list of pieces: ranges of addresses, each with its rkey.
///
/// From the first byte that lies outside all pieces, the rest of the range is one target. Its rkey
/// is that of the bytes before it, or that of the first piece if no bytes are before it. The peer's
/// NIC then refuses the access.
fn targets(
    targets: &mut Vec<SplitTarget>,
    domain: &DomainState,
    segment: &RemoteSegment<'_>,
) -> Result<()> {
    if segment.key.is_mapped() {
        let pieces = domain.mapped_key(segment.key)?;
        cut(targets, pieces.iter(), segment)
    } else {
        cut(targets, segment.key.pieces(), segment)
    }
}

/// Splits `segment` as [`targets`] describes. `pieces` are the pieces of the segment's key.
fn cut<'a>(
    targets: &mut Vec<SplitTarget>,
    pieces: impl Iterator<Item = &'a RemotePiece> + Clone,
    segment: &RemoteSegment<'_>,
) -> Result<()> {
    let Iova(mut address) = segment.address;
    let mut left = segment.len;
    let first = pieces.clone().next().map_or(Ok(0), |piece| rkey(piece.key))?;
    let mut current = first;
    // Each search continues where the last one ended: the pieces of a region are in address order,
    // and a search from the first piece for each target would be quadratic. A key with another
    // order, which only a faulty peer sends, is searched from the first piece again.
    let mut rest = pieces.clone();
    while left > 0 {
        let holds = |piece: &&RemotePiece| address.wrapping_sub(piece.base.0) < piece.len;
        let found = rest.find(holds).or_else(|| {
            rest = pieces.clone();
            rest.find(holds)
        });
        let len = match found {
            Some(piece) => {
                current = rkey(piece.key)?;
                left.min(piece.len - address.wrapping_sub(piece.base.0))
            }
            None => left,
        };
        // With one rkey, the whole segment is one target.
        let len = if pieces.clone().nth(1).is_none() { left } else { len };
        targets.push(SplitTarget { address, len, rkey: current });
        address = address.wrapping_add(len);
        left -= len;
    }
    if segment.len == 0 {
        targets.push(SplitTarget { address, len: 0, rkey: first });
    }
    Ok(())
}

/// Converts the number of a peer's key to an rkey.
///
/// # Errors
/// InvalidKey: the number has more than 32 bits, so it is no rkey.
#[inline]
fn rkey(key: u64) -> Result<u32> {
    u32::try_from(key).map_err(|_| {
        invalid("pass the key of a verbs region: the keys of verbs have 32 bits")
            .context("key", format_args!("{key:#x}"))
    })
}

/// Returns the rkey of the window that a message invalidates.
///
/// # Errors
/// - InvalidKey: the key is mapped, or has more than 32 bits.
/// - Unsupported: the key has several pieces.
fn window_rkey(key: &RemoteKey) -> Result<u32> {
    if key.is_mapped() {
        return Err(invalid("pass the key of a window: windows have no raw keys"));
    }
    rkey(key.as_u64()?)
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidKey, "post").provider("verbs").remedy(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// KEY-06: pieces of a raw key with addresses that wrap around at 2^64 cause no panic.
    #[test]
    fn pieces_that_wrap_around_do_not_panic() {
        let piece = |base, len, key| RemotePiece { base: Iova(base), len, key };
        let pieces = [piece(u64::MAX, 3, 1), piece(0x1000, 0x10, 2)];
        let key = RemoteKey::new(hmem_core::Addressing::Virtual, Iova(0), 8, 0);
        let mut targets = Vec::new();
        let segment = RemoteSegment { address: Iova(1), len: 1, key: &key };
        cut(&mut targets, pieces.iter(), &segment).unwrap();
        assert_eq!(targets, [SplitTarget { address: 1, len: 1, rkey: 1 }]);
    }

    /// KEY-06: the search visits each of a key's many pieces only a few times. Pieces that are not
    /// in address order are found too.
    #[test]
    fn many_pieces_are_found_in_one_pass() {
        const PIECES: u32 = 1000;
        let key = RemoteKey::new(hmem_core::Addressing::Virtual, Iova(0), 8, 0);
        let segment = RemoteSegment { address: Iova(0), len: u64::from(PIECES), key: &key };
        let piece = |at: u32| RemotePiece { base: Iova(at.into()), len: 1, key: at.into() };
        let mut pieces: Vec<_> = (0..PIECES).map(piece).collect();
        let expected: Vec<_> =
            (0..PIECES).map(|at| SplitTarget { address: at.into(), len: 1, rkey: at }).collect();
        for limit in [4 * PIECES, u32::MAX] {
            let (visits, mut targets) = (std::cell::Cell::new(0), Vec::new());
            let counted = pieces.iter().inspect(|_| visits.set(visits.get() + 1));
            cut(&mut targets, counted, &segment).unwrap();
            assert_eq!(targets, expected);
            assert!(visits.get() <= limit, "{} visits", visits.get());
            pieces.reverse();
        }
    }
}
