//! Work requests: from core's words to chains of `ibv_send_wr`.

use std::{ptr, sync::Arc};

use hmem_core::{
    Access, Error, ErrorKind, Iova, LocalKey, RemoteKey, RemotePiece, Result,
    transfer::{CompletionKind, LocalSegment, Operation, RemoteSegment, WorkRequest},
};

use super::{
    atomic,
    endpoint::{EndpointState, InFlight, Inner},
    errors,
    region::{CpuAccess, Held},
    split::{Planned, Span, Target, plan},
    staged::Token,
    sys::{RdmaPart, RecvWr, SendFlags, SendWr, Sge, WrOpcode, WrPart},
};

/// Lists that a post fills, kept so that posting allocates nothing.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) spans: Vec<Span>,
    pub(super) targets: Vec<Target>,
    pub(super) segments: Vec<Sge>,
    pub(super) planned: Vec<Planned>,
    pub(super) requests: Vec<SendWr>,
}

/// The opcodes of RMA, and the right of the local side that each takes.
const WRITE: (WrOpcode, Access) = (WrOpcode::IBV_WR_RDMA_WRITE, Access::WRITE);
const READ: (WrOpcode, Access) = (WrOpcode::IBV_WR_RDMA_READ, Access::READ);

impl EndpointState {
    pub(super) fn refuse(&self, kind: ErrorKind, why: &'static str) -> Error {
        Error::new(kind, "post").provider(self.domain.pd.device.nic().to_string()).remedy(why)
    }

    /// # Safety
    /// As [`hmem_core::provider::ProviderEndpoint::post`].
    pub(super) unsafe fn post(self: &Arc<Self>, request: &WorkRequest<'_>) -> Result<()> {
        self.recover()?;
        if self.needs_lane(request) {
            return self.post_to_lane(request);
        }
        // SAFETY: passed on to the caller.
        unsafe { self.post_now(request, None) }
    }

    /// Posts to the NIC, for the application or for a lane.
    ///
    /// # Safety
    /// As [`EndpointState::post`].
    pub(super) unsafe fn post_now(
        self: &Arc<Self>,
        request: &WorkRequest<'_>,
        owner: Option<Token>,
    ) -> Result<()> {
        let mut inner = self.lock();
        inner.open()?;
        let held = self.domain.regions.hold();
        let context = request.context;
        let entry = |kind| InFlight { context, kind, bytes: 0, requests: 0, window: None, owner };
        let single = match request.operation {
            Operation::Write { remote } => {
                let lists = (request.local, remote);
                self.post_single(&held, &mut inner, lists, WRITE, entry(CompletionKind::Write))
            }
            Operation::Read { remote } => {
                let lists = (request.local, remote);
                self.post_single(&held, &mut inner, lists, READ, entry(CompletionKind::Read))
            }
            _ => None,
        };
        if let Some(posted) = single {
            return posted;
        }
        let mut scratch = std::mem::take(&mut inner.scratch);
        scratch.spans.clear();
        scratch.targets.clear();
        scratch.requests.clear();
        // SAFETY: passed on to the caller.
        let posted = unsafe { self.post_with(&held, &mut inner, &mut scratch, request, owner) };
        inner.scratch = scratch;
        posted
    }

    /// # Safety
    /// As [`EndpointState::post`].
    unsafe fn post_with(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        scratch: &mut Scratch,
        request: &WorkRequest<'_>,
        owner: Option<Token>,
    ) -> Result<()> {
        let context = request.context;
        let entry = |kind| InFlight { context, kind, bytes: 0, requests: 0, window: None, owner };
        match request.operation {
            Operation::Write { remote } => {
                let entry = entry(CompletionKind::Write);
                self.post_rma(held, inner, scratch, (request.local, remote), WRITE, entry)
            }
            Operation::Read { remote } => {
                let entry = entry(CompletionKind::Read);
                self.post_rma(held, inner, scratch, (request.local, remote), READ, entry)
            }
            Operation::Send { tag: Some(_), .. } | Operation::Receive { tag: Some(_), .. } => {
                Err(self.refuse(
                    ErrorKind::Unsupported,
                    "verbs has no tagged messages: send without a tag",
                ))
            }
            Operation::Send { tag: None, invalidate } => self.post_send(
                held,
                inner,
                scratch,
                (request.local, invalidate),
                entry(CompletionKind::Send),
            ),
            Operation::Receive { tag: None, .. } => self.post_receive(
                held,
                inner,
                scratch,
                request.local,
                entry(CompletionKind::Receive),
            ),
            Operation::Atomic { op, datatype, remote, result, compare } => {
                let entry = entry(CompletionKind::Atomic);
                let lists = (request.local, result, compare);
                self.post_atomic(held, inner, scratch, (op, datatype, remote), lists, entry)
            }
            Operation::BindWindow { window, region, offset, len, access, addressing, tag } => {
                let target = (region, offset, len);
                let entry = entry(CompletionKind::BindWindow);
                self.post_bind(inner, scratch, window, target, (access, addressing, tag), entry)
            }
            Operation::InvalidateWindow { window } => {
                let entry = entry(CompletionKind::InvalidateWindow);
                self.post_invalidate(inner, scratch, window, entry)
            }
            _ => Err(self.refuse(ErrorKind::Unsupported, "this operation is not known to verbs")),
        }
    }

    /// Translates the local list; says whether the CPU may read all of it, and its length.
    pub(super) fn local(
        &self,
        held: &Held<'_>,
        spans: &mut Vec<Span>,
        local: &[LocalSegment],
        right: Access,
    ) -> Result<(bool, u64)> {
        let (mut owned, mut bytes) = (true, 0_u64);
        for segment in local {
            let cpu = held.translate(segment.desc, segment.address, segment.len, right, spans)?;
            owned &= cpu == CpuAccess::Owned;
            bytes = bytes.saturating_add(segment.len);
        }
        Ok((owned, bytes))
    }

    /// Translates a peer's range. What lies in no piece of its key goes to the NIC with the last
    /// key all the same: it is the target that enforces.
    pub(super) fn remote(
        &self,
        targets: &mut Vec<Target>,
        segment: &RemoteSegment<'_>,
    ) -> Result<()> {
        if segment.key.is_mapped() {
            let pieces = self.domain.mapped_key(segment.key)?;
            cut(targets, pieces.iter(), segment);
        } else {
            cut(targets, segment.key.pieces(), segment);
        }
        Ok(())
    }

    fn post_rma(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        scratch: &mut Scratch,
        (local, remote): (&[LocalSegment], &[RemoteSegment<'_>]),
        (opcode, right): (WrOpcode, Access),
        mut entry: InFlight,
    ) -> Result<()> {
        let (owned, bytes) = self.local(held, &mut scratch.spans, local, right)?;
        let mut far = 0_u64;
        for segment in remote {
            far = far.saturating_add(segment.len);
            self.remote(&mut scratch.targets, segment)?;
        }
        if far != bytes {
            return Err(self
                .refuse(ErrorKind::InvalidArgument, "both lists hold the same number of bytes")
                .context("local", bytes)
                .context("remote", far));
        }
        let pair = inner.open()?;
        let limits = (pair.cap.max_send_sge as usize, pair.port.max_message);
        let inline = owned
            && opcode == WrOpcode::IBV_WR_RDMA_WRITE
            && bytes <= u64::from(pair.cap.max_inline_data);
        plan(&scratch.spans, &scratch.targets, limits, &mut scratch.segments, &mut scratch.planned);
        for planned in &scratch.planned {
            let mut wr = SendWr::new(opcode, 0);
            wr.wr = WrPart { rdma: RdmaPart { remote_addr: planned.address, rkey: planned.rkey } };
            wr.num_sge = planned.count as i32;
            // Segments do not move any more: the list is complete.
            wr.sg_list = scratch.segments[planned.first..].as_mut_ptr();
            if inline && bytes > 0 {
                wr.send_flags |= SendFlags::INLINE.bits();
            }
            scratch.requests.push(wr);
        }
        if scratch.requests.is_empty() {
            return Err(self.refuse(ErrorKind::InvalidArgument, "name a remote range"));
        }
        entry.bytes = bytes;
        self.submit(inner, &mut scratch.requests, entry)
    }

    fn post_send(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        scratch: &mut Scratch,
        (local, invalidate): (&[LocalSegment], Option<&RemoteKey>),
        mut entry: InFlight,
    ) -> Result<()> {
        let (owned, bytes) = self.local(held, &mut scratch.spans, local, Access::SEND)?;
        let pair = inner.open()?;
        self.one_message(scratch, pair.cap.max_send_sge, pair.port.max_message, bytes)?;
        let opcode = if invalidate.is_some() {
            WrOpcode::IBV_WR_SEND_WITH_INV
        } else {
            WrOpcode::IBV_WR_SEND
        };
        let mut wr = SendWr::new(opcode, 0);
        if let Some(key) = invalidate {
            wr.invalidate_rkey = number(key)?;
        }
        wr.num_sge = scratch.segments.len() as i32;
        wr.sg_list = scratch.segments.as_mut_ptr();
        if owned && bytes > 0 && bytes <= u64::from(pair.cap.max_inline_data) {
            wr.send_flags |= SendFlags::INLINE.bits();
        }
        scratch.requests.push(wr);
        entry.bytes = bytes;
        self.submit(inner, &mut scratch.requests, entry)
    }

    /// Fills the segment list for a message, which cannot be cut.
    fn one_message(
        &self,
        scratch: &mut Scratch,
        max_sge: u32,
        max_message: u64,
        bytes: u64,
    ) -> Result<()> {
        if bytes > max_message {
            return Err(self
                .refuse(ErrorKind::MessageTooLong, "send less at once, or use RMA")
                .context("length", bytes)
                .context("max_msg_sz", max_message));
        }
        let message = [Target { address: 0, len: bytes, rkey: 0 }];
        let limits = (usize::MAX, u64::MAX);
        plan(&scratch.spans, &message, limits, &mut scratch.segments, &mut scratch.planned);
        if scratch.segments.len() > max_sge as usize {
            return Err(self
                .refuse(
                    ErrorKind::TooManyRanges,
                    "give fewer local segments: a message cannot be cut",
                )
                .context("segments", scratch.segments.len())
                .context("max_sge", max_sge));
        }
        Ok(())
    }

    fn post_receive(
        &self,
        held: &Held<'_>,
        inner: &mut Inner,
        scratch: &mut Scratch,
        local: &[LocalSegment],
        mut entry: InFlight,
    ) -> Result<()> {
        let (_, bytes) = self.local(held, &mut scratch.spans, local, Access::RECV)?;
        let (most, cap, qp) = {
            let pair = inner.open()?;
            // A receive may be longer than any message.
            (pair.cap.max_recv_wr, pair.cap.max_recv_sge, pair.qp)
        };
        self.one_message(scratch, cap, u64::MAX, bytes)?;
        if inner.receives >= most {
            return Err(
                self.refuse(ErrorKind::Again, "the receive queue is full: read completions")
            );
        }
        let post =
            self.domain.pd.device.ops().post_recv.ok_or_else(|| {
                self.refuse(ErrorKind::Unsupported, "this driver has no receives")
            })?;
        entry.requests = 1;
        let wr_id = inner.admit(entry);
        let mut wr = RecvWr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: scratch.segments.as_mut_ptr(),
            num_sge: scratch.segments.len() as i32,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is open under the lock; the request and its segments live for the
        // call, and the memory that they name lies in regions that are registered, or were,
        // in which case the NIC refuses their keys.
        errors::status(unsafe { post(qp, &mut wr, &mut bad) }).map_err(|errno| {
            inner.take(wr_id);
            self.post_failed("ibv_post_recv", errno)
        })
    }

    /// Posts a chain of requests, which completes once.
    pub(super) fn submit(
        &self,
        inner: &mut Inner,
        requests: &mut [SendWr],
        mut entry: InFlight,
    ) -> Result<()> {
        let (most, qp) = {
            let pair = inner.open()?;
            (pair.cap.max_send_wr, pair.qp)
        };
        let count = requests.len() as u32;
        if inner.sends.saturating_add(count) > most {
            let (kind, why) = if inner.sends == 0 {
                (ErrorKind::MessageTooLong, "open the endpoint deeper, or transfer less at once")
            } else {
                (ErrorKind::Again, "the send queue is full: read completions")
            };
            return Err(self.refuse(kind, why).context("requests", count).context("depth", most));
        }
        let post = self
            .domain
            .pd
            .device
            .ops()
            .post_send
            .ok_or_else(|| self.refuse(ErrorKind::Unsupported, "this driver has no sends"))?;
        entry.requests = count;
        let wr_id = inner.admit(entry);
        let first = requests.as_mut_ptr();
        let last = requests.len() - 1;
        for (index, wr) in requests.iter_mut().enumerate() {
            wr.wr_id = wr_id;
            if index == last {
                wr.send_flags |= SendFlags::SIGNALED.bits();
            } else {
                wr.next = first.wrapping_add(index + 1);
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is open under the lock; requests and segments live for the call.
        // The memory that they name lies in regions that are held registered until this
        // returns; inline bytes are of memory that its region owns.
        let posted = errors::status(unsafe { post(qp, first, &mut bad) });
        posted.map_err(|errno| {
            inner.take(wr_id);
            if !bad.is_null() && bad != first {
                // Some of the chain is on its way and would go on behind the error: end the
                // connection.
                inner.note_failure();
                if let Ok(Err(error)) = inner.open().map(super::connect::QueuePair::to_error) {
                    tracing::error!(%error, "a partly posted request could not be stopped");
                }
            }
            self.post_failed("ibv_post_send", errno)
        })
    }

    fn post_failed(&self, symbol: &'static str, errno: hmem_core::Errno) -> Error {
        let error = errors::call(self.domain.pd.device.nic(), symbol, errno);
        match errno.0 {
            12 => Error::new(ErrorKind::Again, symbol)
                .errno(errno)
                .provider(self.domain.pd.device.nic().to_string())
                .remedy("the queue is full: read completions"),
            22 => error.remedy(
                "the endpoint is not connected (resolve the peer), or the request does not fit it",
            ),
            _ => error,
        }
    }
}

/// Cuts a remote segment where its key changes.
fn cut<'a>(
    targets: &mut Vec<Target>,
    pieces: impl Iterator<Item = &'a RemotePiece> + Clone,
    segment: &RemoteSegment<'_>,
) {
    let Iova(mut address) = segment.address;
    let mut left = segment.len;
    let mut rkey = 0;
    while left > 0 {
        let holds = |piece: &&RemotePiece| address.wrapping_sub(piece.base.0) < piece.len;
        let len = match pieces.clone().find(holds) {
            Some(piece) => {
                rkey = piece.key as u32;
                left.min(piece.len - (address - piece.base.0))
            }
            None => {
                if rkey == 0 {
                    rkey = pieces.clone().next().map_or(0, |piece| piece.key as u32);
                }
                left
            }
        };
        // A single key is taken to the end: the target's bounds are its own to enforce.
        let len = if pieces.clone().nth(1).is_none() { left } else { len };
        targets.push(Target { address, len, rkey });
        address = address.wrapping_add(len);
        left -= len;
    }
    if segment.len == 0 {
        let rkey = pieces.clone().next().map_or(0, |piece| piece.key as u32);
        targets.push(Target { address, len: 0, rkey });
    }
}

fn number(key: &RemoteKey) -> Result<u32> {
    u32::try_from(key.as_u64()?).map_err(|_| {
        Error::new(ErrorKind::InvalidKey, "post")
            .provider("verbs")
            .remedy("verbs keys have 32 bits")
    })
}

/// The descriptor of a scratch registration, for [`super::domain::DomainState::nowhere`].
pub(super) fn span_of(address: u64, lkey: LocalKey) -> Span {
    Span { address, len: atomic::ELEMENT, lkey: lkey.to_provider() as u32 }
}
