//! A fake libibverbs that moves bytes, over reliable connections between queue pairs. The library
//! enforces keys, bounds, rights and the capacity of completion queues, waits for receives, and
//! ends a connection at its first failure. Requests run when a completion queue is polled, so
//! posted requests stay in flight until then.
//!
//! Each device numbers its queue pairs from 1 on, as hardware does. A thread has a library of its
//! own, unless it enters that of another thread ([`Shared`]).
#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod life;

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    ffi::{c_int, c_uint, c_void},
    mem,
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use hmem_provider_verbs::sys::{
    AccessFlags, AhAttr, CompChannel, Context, Cq, Device, DeviceAttr, DeviceCaps, Functions, Gid,
    IBV_QPF_GRH_REQUIRED, LinkLayer, Mr, Mw, MwBind, MwBindInfo, MwType, Pd, PortAttr, PortState,
    Qp, QpAttr, QpAttrMask, QpInitAttr, QpState, RecvWr, SendFlags, SendWr, Sge, Wc, WcFlags,
    WcOpcode, WcStatus, WrOpcode,
};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::fake;

#[derive(Clone, Copy)]
struct Region {
    start: u64,
    len: u64,
    /// Address of the first byte in work requests.
    base: u64,
    access: AccessFlags,
}

struct Send {
    wr_id: u64,
    opcode: WrOpcode,
    signaled: bool,
    segments: Vec<Sge>,
    /// Bytes of an inline request, which the post copies; `None` for other requests.
    inline: Option<Vec<u8>>,
    remote: (u64, u32),
    /// The request's immediate data, or the key that the request invalidates.
    extra: u32,
}

/// Opcodes of requests that consume a receive of the peer.
const TAKE_RECEIVES: [WrOpcode; 4] = [
    WrOpcode::IBV_WR_SEND,
    WrOpcode::IBV_WR_SEND_WITH_IMM,
    WrOpcode::IBV_WR_SEND_WITH_INV,
    WrOpcode::IBV_WR_RDMA_WRITE_WITH_IMM,
];

struct Receive {
    wr_id: u64,
    segments: Vec<Sge>,
}

/// A queue pair. The library identifies it by the `handle` of its `ibv_qp`.
struct Pair {
    /// The address of the device, and the number of the queue pair on that device.
    place: (usize, u32),
    state: QpState,
    /// Address of the queue pair's structure.
    qp: usize,
    /// The handle of the queue pair that this one is connected to.
    peer: u32,
    cqs: (usize, usize),
    sends: VecDeque<Send>,
    receives: VecDeque<Receive>,
}

#[derive(Default)]
struct Wire {
    next: u32,
    regions: HashMap<u32, Region>,
    pairs: HashMap<u32, Pair>,
    /// The number of the queue pair that each device created last.
    numbers: HashMap<usize, u32>,
    done: HashMap<usize, VecDeque<Wc>>,
    /// The capacity of each completion queue, by its address.
    capacities: HashMap<usize, usize>,
    /// Number of completions that were lost because their queue was full.
    overruns: u64,
    /// The immediate data of the request that was posted last, as the bytes of its work request.
    immediate: [u8; 4],
    /// Post that will fail, by its number in the count `posts`, and the errno of that failure.
    refuse: Option<(u64, c_int)>,
    posts: u64,
    /// Addresses of the local segments, and the remote address, of each posted work request.
    addresses: Vec<(Vec<u64>, u64)>,
    misbehaviour: Misbehaviour,
    /// Completions of binds that the device delivers late: the queue pair's handle, the completion
    /// queue's address, and the completion.
    late_binds: Vec<(u32, usize, Wc)>,
    /// Device and number of the queue pair that was destroyed last. The next queue pair of the
    /// device may reuse the number.
    free: Option<(usize, u32)>,
    /// Asynchronous events of the open contexts, by the address of the context.
    lives: HashMap<usize, life::ContextLife>,
    /// Number of calls until the devices are removed; `None` if they stay.
    removal: Option<u32>,
    /// Event channels of completion queues, by the address of the queue.
    channels: HashMap<usize, Events>,
}

/// Event channel of a completion queue, with the state of its events.
struct Events {
    /// Address of the channel structure.
    channel: usize,
    fd: RawFd,
    armed: bool,
    /// Number of events that the caller has read but not acknowledged.
    taken: u32,
}

/// Faulty behavior of the fake device that a test selects.
#[derive(Clone, Copy, Default)]
pub(crate) struct Misbehaviour {
    /// True if polls of completion queues fail.
    pub(crate) polls_fail: bool,
    /// True if the device neither executes nor flushes requests.
    pub(crate) hangs: bool,
    /// Errno with which a reset of a queue pair fails; 0 for success.
    pub(crate) refuses_resets: c_int,
    /// True if the next reset leaves its queue pair in the state ERR, as rdma_rxe does if it
    /// changes the state during the reset because of a failed request.
    pub(crate) fails_during_reset: bool,
    /// True if a reset completes the requests that it drops with the status "flushed". A driver
    /// does so if it writes the completions between the provider's last poll and the reset.
    pub(crate) flushes_at_reset: bool,
    /// True if requests of a destroyed queue pair succeed later. The next queue pair reuses the
    /// number of the destroyed queue pair.
    pub(crate) completes_late: bool,
    /// Errno with which the creation of an event channel fails; 0 for success.
    pub(crate) refuses_channels: c_int,
    /// Errno with which calls on an event channel fail; 0 for success.
    pub(crate) channels_fail: c_int,
    /// True if devices that are opened later have no event channels.
    pub(crate) has_no_channels: bool,
    /// True if devices that are opened later are rdma_rxe devices, which report an invalidated key
    /// with the kernel's flag.
    pub(crate) is_rxe: bool,
    /// Status with which binds of type 1 windows complete. With `None`, a bind succeeds, but
    /// completes only after the next bind is posted.
    pub(crate) bind: Option<WcStatus>,
    /// Status of a send or write whose local key is not valid; `None` for a local protection error.
    pub(crate) local_key: Option<WcStatus>,
    /// Gate at which binds of type 1 windows wait; `None` for no gate.
    pub(crate) bind_gate: Option<&'static Gate>,
    /// Errno with which the destruction of a queue pair fails; 0 for success.
    pub(crate) refuses_destruction: c_int,
    /// Errno with which a free of a window fails; 0 for success.
    pub(crate) refuses_frees: c_int,
    /// True if packets of the port must have a global route header. Connections without that
    /// header, or to another GID than that of the port, then fail with EINVAL.
    pub(crate) needs_route: bool,
}

/// Gate in a call of the library. Binds of type 1 windows complete once their gate is open. Other
/// calls wait until their gate is open ([`hold`]).
#[derive(Default)]
pub(crate) struct Gate {
    /// True once a bind was posted, or a call has reached the gate.
    pub(crate) reached: AtomicBool,
    pub(crate) open: AtomicBool,
}

/// Calls that can be held at a gate.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Call {
    PollQueue,
    QueryPair,
    /// The return of a call that has destroyed a queue pair.
    DestroyPair,
}

/// Holds the `nth` of these calls by this thread from now on at a gate. The thread spins there, so
/// that a thread that sleeps is known to wait for something else.
pub(crate) fn hold(call: Call, nth: u32, gate: &Arc<Gate>) {
    HELD.set(Some((call, nth, Arc::clone(gate))));
}

/// Waits at the gate of this thread, if the thread has one for this call.
fn pass(call: Call) {
    let gate = HELD.with_borrow_mut(|held| {
        let (_, left, _) = held.as_mut().filter(|(held, ..)| *held == call)?;
        *left -= 1;
        held.take_if(|(_, left, _)| *left == 0).map(|(.., gate)| gate)
    });
    if let Some(gate) = gate {
        gate.reached.store(true, Ordering::Release);
        while !gate.open.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    }
}

/// Selects the faulty behavior of the device from now on.
pub(crate) fn misbehave(misbehaviour: Misbehaviour) {
    with(|wire| wire.misbehaviour = misbehaviour);
}

thread_local! {
    static WIRE: RefCell<Shared> = RefCell::default();
    static HELD: RefCell<Option<(Call, u32, Arc<Gate>)>> = const { RefCell::new(None) };
}

fn with<T>(body: impl FnOnce(&mut Wire) -> T) -> T {
    let wire = WIRE.with_borrow(Shared::clone);
    let mut wire = wire.0.lock();
    body(&mut wire)
}

/// A handle to one thread's fake library, which other threads can use through it.
#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Wire>>);

impl Shared {
    /// Returns the fake library that this thread uses.
    pub(crate) fn of_this_thread() -> Self {
        WIRE.with_borrow(Self::clone)
    }

    /// Makes this thread use the library of the handle.
    pub(crate) fn enter(&self) {
        WIRE.set(self.clone());
    }
}

/// Returns the number of completions that were lost because their queue was full.
pub(crate) fn overruns() -> u64 {
    with(|wire| wire.overruns)
}

/// Returns the immediate data of the request that was posted last, as the bytes of its work
/// request.
pub(crate) fn immediate_bytes() -> [u8; 4] {
    with(|wire| wire.immediate)
}

/// Makes the `nth` post from now on fail with `errno`. It must be the post of a send request.
pub(crate) fn refuse_post(nth: u64, errno: c_int) {
    with(|wire| wire.refuse = Some((wire.posts + nth, errno)));
}

/// Returns the number of chains of send requests, and of receives, that were posted.
pub(crate) fn posts() -> u64 {
    with(|wire| wire.posts)
}

/// Cancels [`refuse_post`]. Returns true if the post that was to fail has not happened.
pub(crate) fn forget_refusal() -> bool {
    with(|wire| wire.refuse.take()).is_some()
}

/// Ends the connection of the queue pair that was created last.
pub(crate) fn fail_last_pair() {
    with(|wire| {
        let last = wire.pairs.keys().copied().max().expect("a queue pair");
        wire.fail(last);
    });
}

/// Ends the connection of a queue pair. The queue pair that was created first has the index 0.
pub(crate) fn fail_pair(index: usize) {
    with(|wire| {
        let mut pairs: Vec<_> = wire.pairs.keys().copied().collect();
        pairs.sort_unstable();
        wire.fail(pairs[index]);
    });
}

/// Ends the connections of all queue pairs.
pub(crate) fn fail_all_pairs() {
    with(|wire| wire.pairs.values_mut().for_each(|pair| pair.state = QpState::IBV_QPS_ERR));
}

/// Returns the addresses of the local segments, and the remote address, of each work request posted
/// since the last call.
pub(crate) fn addresses() -> Vec<(Vec<u64>, u64)> {
    with(|wire| mem::take(&mut wire.addresses))
}

/// Returns the number of live registrations.
pub(crate) fn regions() -> usize {
    with(|wire| wire.regions.len())
}

impl Wire {
    /// Returns a pointer to `len` bytes at `address`, or `None` if `key` does not grant `right` to
    /// all of them.
    fn reach(&self, key: u32, address: u64, len: u64, right: AccessFlags) -> Option<*mut u8> {
        let region =
            self.regions.get(&(key >> 8)).filter(|region| region.access.contains(right))?;
        let offset = address.checked_sub(region.base)?;
        (offset <= region.len && len <= region.len - offset)
            .then(|| ptr::with_exposed_provenance_mut((region.start + offset) as usize))
    }

    fn gather(&self, segments: &[Sge]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for segment in segments {
            let len = segment.length as usize;
            let from = self.reach(
                segment.lkey,
                segment.addr,
                u64::from(segment.length),
                AccessFlags::empty(),
            )?;
            // SAFETY: `reach` found the range in a region, and its owner keeps the memory mapped.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from, len) });
        }
        Some(bytes)
    }

    fn scatter(&self, segments: &[Sge], mut bytes: &[u8]) -> Option<()> {
        for segment in segments {
            let (part, rest) = bytes.split_at(bytes.len().min(segment.length as usize));
            let to = self.reach(
                segment.lkey,
                segment.addr,
                part.len() as u64,
                AccessFlags::LOCAL_WRITE,
            )?;
            // SAFETY: `reach` found the range in a region, and its owner keeps the memory mapped.
            unsafe { ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
            bytes = rest;
        }
        bytes.is_empty().then_some(())
    }

    /// Returns the number of a queue pair on its device.
    fn number(&self, pair: u32) -> u32 {
        self.pairs.get(&pair).map_or(0, |pair| pair.place.1)
    }

    fn push(&mut self, cq: usize, qp_num: u32, wr_id: u64, status: WcStatus, bytes: u64) {
        let wc = Wc { wr_id, status, qp_num, byte_len: bytes as u32, ..Wc::default() };
        self.complete(cq, wc);
    }

    fn complete(&mut self, cq: usize, wc: Wc) {
        let done = self.done.entry(cq).or_default();
        if done.len() >= self.capacities.get(&cq).copied().unwrap_or(0) {
            self.overruns += 1;
            return;
        }
        done.push_back(wc);
        if let Some(events) = self.channels.get_mut(&cq)
            && mem::take(&mut events.armed)
        {
            // SAFETY: a channel is destroyed after its queue.
            let fd = unsafe { BorrowedFd::borrow_raw(events.fd) };
            rustix::io::write(fd, &1u64.to_ne_bytes()).expect("an event fd");
        }
    }

    fn fail(&mut self, number: u32) {
        if let Some(pair) = self.pairs.get_mut(&number) {
            pair.state = QpState::IBV_QPS_ERR;
        }
    }

    /// Completes requests with the status "flushed".
    fn flush(
        &mut self,
        number: u32,
        cqs: (usize, usize),
        sends: VecDeque<Send>,
        receives: VecDeque<Receive>,
    ) {
        let number = self.number(number);
        for send in sends {
            self.push(cqs.0, number, send.wr_id, WcStatus::IBV_WC_WR_FLUSH_ERR, 0);
        }
        for receive in receives {
            self.push(cqs.1, number, receive.wr_id, WcStatus::IBV_WC_WR_FLUSH_ERR, 0);
        }
    }

    /// Executes the oldest send of a queue pair, or flushes all requests if the connection has
    /// ended. Returns false if the call did neither.
    fn run(&mut self, number: u32) -> bool {
        if self.misbehaviour.hangs {
            return false;
        }
        let Some(pair) = self.pairs.get_mut(&number) else { return false };
        let (peer, cqs) = (pair.peer, pair.cqs);
        if pair.state == QpState::IBV_QPS_ERR {
            let (sends, receives) = (mem::take(&mut pair.sends), mem::take(&mut pair.receives));
            let any = !sends.is_empty() || !receives.is_empty();
            self.flush(number, cqs, sends, receives);
            return any;
        }
        if pair.state != QpState::IBV_QPS_RTS {
            return false;
        }
        let Some(send) = pair.sends.pop_front() else { return false };
        if TAKE_RECEIVES.contains(&send.opcode)
            && self.pairs.get(&peer).is_none_or(|pair| pair.receives.is_empty())
        {
            self.pairs.get_mut(&number).expect("it was there").sends.push_front(send);
            return false;
        }
        let status = self.carry(peer, &send);
        if status != WcStatus::IBV_WC_SUCCESS {
            self.fail(number);
            self.fail(peer);
        }
        if send.signaled || status != WcStatus::IBV_WC_SUCCESS {
            self.push(cqs.0, self.number(number), send.wr_id, status, 0);
        }
        true
    }

    fn carry(&mut self, peer: u32, send: &Send) -> WcStatus {
        let len = send.segments.iter().map(|segment| u64::from(segment.length)).sum();
        let (address, rkey) = send.remote;
        if matches!(send.opcode, WrOpcode::IBV_WR_BIND_MW | WrOpcode::IBV_WR_LOCAL_INV) {
            return WcStatus::IBV_WC_SUCCESS;
        }
        if send.opcode == WrOpcode::IBV_WR_RDMA_READ {
            let Some(from) = self.reach(rkey, address, len, AccessFlags::REMOTE_READ) else {
                return WcStatus::IBV_WC_REM_ACCESS_ERR;
            };
            // SAFETY: `reach` found the range in a region, and its owner keeps the memory mapped.
            let bytes = unsafe { std::slice::from_raw_parts(from, len as usize) }.to_vec();
            return match self.scatter(&send.segments, &bytes) {
                Some(()) => WcStatus::IBV_WC_SUCCESS,
                None => WcStatus::IBV_WC_LOC_PROT_ERR,
            };
        }
        let Some(bytes) = send.inline.clone().or_else(|| self.gather(&send.segments)) else {
            return self.misbehaviour.local_key.unwrap_or(WcStatus::IBV_WC_LOC_PROT_ERR);
        };
        let with_immediate = send.opcode == WrOpcode::IBV_WR_RDMA_WRITE_WITH_IMM;
        if send.opcode == WrOpcode::IBV_WR_RDMA_WRITE || with_immediate {
            let Some(to) = self.reach(rkey, address, len, AccessFlags::REMOTE_WRITE) else {
                return WcStatus::IBV_WC_REM_ACCESS_ERR;
            };
            // SAFETY: `reach` found the range in a region, and its owner keeps the memory mapped.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            if with_immediate {
                self.receive(peer, WcStatus::IBV_WC_SUCCESS, send, len);
            }
            return WcStatus::IBV_WC_SUCCESS;
        }
        let pair = self.pairs.get_mut(&peer).expect("it was there");
        let segments = pair.receives.front().expect("it was there").segments.clone();
        let (here, there) = match self.scatter(&segments, &bytes) {
            Some(()) => (WcStatus::IBV_WC_SUCCESS, WcStatus::IBV_WC_SUCCESS),
            None => (WcStatus::IBV_WC_REM_INV_REQ_ERR, WcStatus::IBV_WC_LOC_LEN_ERR),
        };
        self.receive(peer, there, send, len);
        here
    }

    /// Completes the oldest receive of a queue pair.
    fn receive(&mut self, number: u32, status: WcStatus, send: &Send, len: u64) {
        let pair = self.pairs.get_mut(&number).expect("it was there");
        let (receive, cq) = (pair.receives.pop_front().expect("it was there"), pair.cqs.1);
        let (opcode, flags) = match send.opcode {
            WrOpcode::IBV_WR_RDMA_WRITE_WITH_IMM => {
                (WcOpcode::IBV_WC_RECV_RDMA_WITH_IMM, WcFlags::WITH_IMM)
            }
            WrOpcode::IBV_WR_SEND_WITH_IMM => (WcOpcode::IBV_WC_RECV, WcFlags::WITH_IMM),
            WrOpcode::IBV_WR_SEND_WITH_INV if self.misbehaviour.is_rxe => {
                (WcOpcode::IBV_WC_RECV, WcFlags::IP_CSUM_OK)
            }
            WrOpcode::IBV_WR_SEND_WITH_INV => (WcOpcode::IBV_WC_RECV, WcFlags::WITH_INV),
            _ => (WcOpcode::IBV_WC_RECV, WcFlags::empty()),
        };
        let wc = Wc {
            wr_id: receive.wr_id,
            status,
            opcode,
            byte_len: len as u32,
            invalidated_rkey: send.extra,
            qp_num: self.number(number),
            wc_flags: flags.bits(),
            ..Wc::default()
        };
        self.complete(cq, wc);
    }
}

extern "C" fn query_device(_context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: the caller passes writable attributes.
    let attr = unsafe { &mut *attr };
    (attr.max_mr_size, attr.max_mr, attr.phys_port_cnt) = (1 << 40, 1000, 1);
    (attr.max_cqe, attr.max_qp_wr, attr.max_sge) = (10_000, 1000, 16);
    (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom) = (16, 16);
    attr.atomic_cap = fake::atomics();
    attr.vendor_id = if with(|wire| wire.misbehaviour.is_rxe) { 0xff_ffff } else { 0x2c9 };
    attr.max_mw = 100;
    attr.device_cap_flags = DeviceCaps::all().bits();
    0
}

/// Difference between the local identifier (LID) of a device's port and the device's address.
const LIDS: usize = 6;

extern "C" fn query_port(context: *mut Context, _port: u8, attr: *mut PortAttr) -> c_int {
    // SAFETY: the caller passes a live context and writable attributes.
    let (device, attr) = unsafe { ((*context).device.addr(), &mut *attr) };
    (attr.state, attr.active_mtu, attr.max_msg_sz, attr.lid) =
        (PortState::IBV_PORT_ACTIVE, 5, 1 << 30, (LIDS + device) as u16);
    attr.link_layer = LinkLayer::IBV_LINK_LAYER_INFINIBAND;
    attr.gid_tbl_len = 2;
    if with(|wire| wire.misbehaviour.needs_route) {
        attr.flags = IBV_QPF_GRH_REQUIRED;
    }
    0
}

/// Returns an entry of the GID table of every port.
fn gid(index: u8) -> Gid {
    let mut raw = [0; 16];
    (raw[0], raw[1], raw[15]) = (0xfe, 0x80, 1 + index);
    Gid { raw }
}

extern "C" fn query_gid(_context: *mut Context, _port: u8, index: c_int, out: *mut Gid) -> c_int {
    // SAFETY: the caller passes a writable GID.
    unsafe { *out = gid(index as u8) };
    0
}

extern "C" fn open_device(device: *mut Device) -> *mut Context {
    let context = fake::context(device);
    // SAFETY: this function boxed the context just now.
    let ops = unsafe { &mut (*context).ops };
    ops.poll_cq = Some(poll_cq);
    ops.req_notify_cq =
        (!with(|wire| wire.misbehaviour.has_no_channels)).then_some(req_notify_cq as _);
    ops.post_send = Some(post_send);
    ops.post_recv = Some(post_recv);
    ops.alloc_mw = Some(alloc_mw);
    ops.bind_mw = Some(bind_mw);
    ops.dealloc_mw = Some(dealloc_mw);
    // SAFETY: the context is live.
    unsafe { life::add(context) };
    context
}

extern "C" fn reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    reg_mr_iova2(pd, addr, length, addr.addr() as u64, access as c_uint)
}

extern "C" fn reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    base: u64,
    access: c_uint,
) -> *mut Mr {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*pd).context }) {
        return ptr::null_mut();
    }
    let key = with(|wire| {
        wire.next += 1;
        let access = AccessFlags::from_bits_truncate(access);
        let start = addr.expose_provenance() as u64;
        wire.regions.insert(wire.next, Region { start, len: length as u64, base, access });
        wire.next << 8
    });
    let context = ptr::null_mut();
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key | 1 }))
}

extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*(*mr).pd).context }) {
        return libc::EIO;
    }
    // SAFETY: `reg_mr` boxed the region, and each region is deregistered once.
    let mr = unsafe { Box::from_raw(mr) };
    with(|wire| wire.regions.remove(&(mr.lkey >> 8)));
    0
}

/// Makes the keys of the registration that begins at this address fail.
pub(crate) fn revoke(start: u64) {
    with(|wire| wire.regions.retain(|_, region| region.start != start));
}

extern "C" fn create_comp_channel(context: *mut Context) -> *mut CompChannel {
    if life::is_removed(context) {
        return ptr::null_mut();
    }
    let errno = with(|wire| wire.misbehaviour.refuses_channels);
    if errno != 0 {
        fake::set_errno(errno);
        return ptr::null_mut();
    }
    let fd = eventfd(0, EventfdFlags::SEMAPHORE).expect("an event fd").into_raw_fd();
    Box::into_raw(Box::new(CompChannel { context, fd, refcnt: 0 }))
}

extern "C" fn destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    // SAFETY: the caller passes a live channel.
    let (left, context) = unsafe { ((*channel).refcnt, (*channel).context) };
    if left > 0 && with(|wire| wire.is_removed(context)) {
        // As in libibverbs, a queue whose destruction failed still counts.
        return libc::EBUSY;
    }
    // SAFETY: `create_comp_channel` boxed the channel, and each channel is destroyed once.
    let channel = unsafe { Box::from_raw(channel) };
    assert_eq!(channel.refcnt, 0, "a channel is destroyed after its queue");
    fake::called("destroy_comp_channel".into());
    // SAFETY: the channel owns the fd.
    drop(unsafe { OwnedFd::from_raw_fd(channel.fd) });
    0
}

extern "C" fn get_cq_event(
    channel: *mut CompChannel,
    cq: *mut *mut Cq,
    _context: *mut *mut c_void,
) -> c_int {
    let errno = with(|wire| wire.misbehaviour.channels_fail);
    if errno != 0 {
        fake::set_errno(errno);
        return -1;
    }
    // SAFETY: the caller passes a live channel.
    let fd = unsafe { BorrowedFd::borrow_raw((*channel).fd) };
    if let Err(errno) = rustix::io::read(fd, &mut [0; 8]) {
        fake::set_errno(errno.raw_os_error());
        return -1;
    }
    with(|wire| {
        let (address, events) = wire
            .channels
            .iter_mut()
            .find(|(_, events)| events.channel == channel.addr())
            .expect("a queue of the channel");
        events.taken += 1;
        // SAFETY: the caller passes a writable pointer to a queue.
        unsafe { *cq = ptr::with_exposed_provenance_mut(*address) };
    });
    0
}

extern "C" fn ack_cq_events(cq: *mut Cq, count: c_uint) {
    with(|wire| {
        let events = wire.channels.get_mut(&cq.addr()).expect("a queue with a channel");
        events.taken = events.taken.checked_sub(count).expect("acknowledged once");
    });
}

unsafe extern "C" fn req_notify_cq(cq: *mut Cq, solicited: c_int) -> c_int {
    assert_eq!(solicited, 0);
    fake::called("req_notify_cq".into());
    with(|wire| {
        wire.channels.get_mut(&cq.addr()).expect("a queue with a channel").armed = true;
    });
    0
}

extern "C" fn create_cq(
    context: *mut Context,
    entries: c_int,
    _: *mut c_void,
    channel: *mut CompChannel,
    _: c_int,
) -> *mut Cq {
    if life::is_removed(context) {
        return ptr::null_mut();
    }
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut cq: Cq = unsafe { mem::zeroed() };
    (cq.context, cq.channel) = (context, channel);
    let cq = Box::into_raw(Box::new(cq));
    with(|wire| wire.capacities.insert(cq.expose_provenance(), entries as usize));
    if !channel.is_null() {
        // SAFETY: the caller passes a live channel.
        let fd = unsafe {
            (*channel).refcnt += 1;
            (*channel).fd
        };
        let events = Events { channel: channel.addr(), fd, armed: false, taken: 0 };
        with(|wire| wire.channels.insert(cq.expose_provenance(), events));
    }
    cq
}

extern "C" fn destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*cq).context }) {
        return libc::EIO;
    }
    fake::called("destroy_cq".into());
    let events = with(|wire| {
        wire.done.remove(&cq.addr());
        wire.capacities.remove(&cq.addr());
        wire.channels.remove(&cq.addr())
    });
    // A real driver would wait here for the acknowledgements.
    assert_eq!(events.map_or(0, |events| events.taken), 0, "unacknowledged events");
    // SAFETY: `create_cq` boxed the queue, and each queue is destroyed once. Its channel is alive.
    unsafe {
        let cq = Box::from_raw(cq);
        if !cq.channel.is_null() {
            (*cq.channel).refcnt -= 1;
        }
    }
    0
}

extern "C" fn create_qp(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*pd).context }) {
        return ptr::null_mut();
    }
    // SAFETY: all zeros is a valid value of this plain structure; the caller passes attributes and
    // a protection domain.
    let (qp, attr, device) = unsafe {
        (Box::into_raw(Box::new(mem::zeroed::<Qp>())), &*attr, (*(*pd).context).device.addr())
    };
    let address = qp.expose_provenance();
    // SAFETY: the queue pair was boxed just now.
    let qp = unsafe { &mut *qp };
    (qp.pd, qp.send_cq, qp.recv_cq) = (pd, attr.send_cq, attr.recv_cq);
    (qp.handle, qp.qp_num) = with(|wire| {
        let reuses = wire.misbehaviour.completes_late;
        let reused = wire.free.take_if(|(of, _)| reuses && *of == device);
        let number = reused.map_or_else(
            || {
                let last = wire.numbers.entry(device).or_default();
                *last += 1;
                *last
            },
            |(_, number)| number,
        );
        wire.next += 1;
        let cqs = (attr.send_cq.addr(), attr.recv_cq.addr());
        let (sends, receives) = (VecDeque::new(), VecDeque::new());
        let (place, state) = ((device, number), QpState::IBV_QPS_RESET);
        wire.pairs
            .insert(wire.next, Pair { place, state, qp: address, peer: 0, cqs, sends, receives });
        (wire.next, number)
    });
    qp
}

extern "C" fn destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*(*qp).pd).context }) {
        return libc::EIO;
    }
    let errno = with(|wire| wire.misbehaviour.refuses_destruction);
    if errno != 0 {
        return errno;
    }
    // SAFETY: `create_qp` boxed the queue pair, and each queue pair is destroyed once.
    let qp = unsafe { Box::from_raw(qp) };
    fake::called("destroy_qp".into());
    with(|wire| {
        let pair = wire.pairs.remove(&qp.handle).expect("a queue pair that is alive");
        wire.late_binds.retain(|(pair, ..)| *pair != qp.handle);
        wire.free = Some(pair.place);
        if wire.misbehaviour.completes_late {
            for send in pair.sends.iter().filter(|send| send.signaled) {
                wire.push(pair.cqs.0, qp.qp_num, send.wr_id, WcStatus::IBV_WC_SUCCESS, 0);
            }
        }
    });
    pass(Call::DestroyPair);
    0
}

extern "C" fn modify_qp(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*(*qp).pd).context }) {
        return libc::EIO;
    }
    // SAFETY: the caller passes a live queue pair and its attributes.
    let (number, attr) = unsafe { ((*qp).handle, &*attr) };
    let mask = QpAttrMask::from_bits_truncate(mask);
    with(|wire| {
        if attr.qp_state == QpState::IBV_QPS_RESET && wire.misbehaviour.refuses_resets != 0 {
            return wire.misbehaviour.refuses_resets;
        }
        if mask.contains(QpAttrMask::AV) && wire.misbehaviour.needs_route {
            let AhAttr { is_global, grh, .. } = attr.ah_attr;
            if is_global == 0 || grh.sgid_index != 0 || grh.dgid != gid(0) {
                return libc::EINVAL;
            }
        }
        let far = (usize::from(attr.ah_attr.dlid).wrapping_sub(LIDS), attr.dest_qp_num);
        let peer = wire.pairs.iter().find(|(_, pair)| pair.place == far).map(|(id, _)| *id);
        let pair = wire.pairs.get_mut(&number).expect("a queue pair that is alive");
        let from_reset = [QpState::IBV_QPS_RESET, QpState::IBV_QPS_INIT].contains(&pair.state);
        if attr.qp_state == QpState::IBV_QPS_INIT && !from_reset {
            return libc::EINVAL;
        }
        pair.state = attr.qp_state;
        if mask.contains(QpAttrMask::DEST_QPN) {
            pair.peer = peer.unwrap_or(0);
        }
        if attr.qp_state == QpState::IBV_QPS_RESET {
            let (sends, receives) = (mem::take(&mut pair.sends), mem::take(&mut pair.receives));
            let cqs = pair.cqs;
            if wire.misbehaviour.flushes_at_reset {
                wire.flush(number, cqs, sends, receives);
            }
            let pair = wire.pairs.get_mut(&number).expect("it was there");
            if mem::take(&mut wire.misbehaviour.fails_during_reset) {
                pair.state = QpState::IBV_QPS_ERR;
            }
        }
        0
    })
}

extern "C" fn query_qp(
    qp: *mut Qp,
    attr: *mut QpAttr,
    _mask: c_int,
    _init: *mut QpInitAttr,
) -> c_int {
    pass(Call::QueryPair);
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*(*qp).pd).context }) {
        return libc::EIO;
    }
    // SAFETY: the caller passes a live queue pair and writable attributes.
    let (number, attr) = unsafe { ((*qp).handle, &mut *attr) };
    attr.qp_state = with(|wire| wire.pairs[&number].state);
    0
}

/// Copies a list of segments.
///
/// # Safety
/// `list` points to `count` segments.
unsafe fn segments(list: *const Sge, count: c_int) -> Vec<Sge> {
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller promises that `list` points to `count` segments.
    unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec()
}

unsafe extern "C" fn post_send(qp: *mut Qp, mut wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    with(|wire| {
        wire.posts += 1;
        if let Some((_, errno)) = wire.refuse.take_if(|(nth, _)| *nth == wire.posts) {
            // SAFETY: the caller passes a writable pointer for the refused request.
            unsafe { *bad = wr };
            return errno;
        }
        // SAFETY: the caller passes a live queue pair, and a chain of requests with their
        // lists.
        unsafe {
            let number = (*qp).handle;
            while !wr.is_null() {
                let request = &*wr;
                let segments = segments(request.sg_list, request.num_sge);
                let flags = SendFlags::from_bits_truncate(request.send_flags);
                let copy = |segment: &Sge| {
                    let from = ptr::with_exposed_provenance::<u8>(segment.addr as usize);
                    std::slice::from_raw_parts(from, segment.length as usize).to_vec()
                };
                let inline = flags
                    .contains(SendFlags::INLINE)
                    .then(|| segments.iter().flat_map(copy).collect());
                let remote = match request.opcode {
                    WrOpcode::IBV_WR_SEND
                    | WrOpcode::IBV_WR_SEND_WITH_IMM
                    | WrOpcode::IBV_WR_SEND_WITH_INV => (0, 0),
                    _ => (request.wr.rdma.remote_addr, request.wr.rdma.rkey),
                };
                wire.addresses.push((segments.iter().map(|it| it.addr).collect(), remote.0));
                let signaled = flags.contains(SendFlags::SIGNALED);
                let (wr_id, opcode) = (request.wr_id, request.opcode);
                let extra = request.invalidate_rkey;
                wire.immediate = extra.to_ne_bytes();
                let send = Send { wr_id, opcode, signaled, segments, inline, remote, extra };
                wire.pairs
                    .get_mut(&number)
                    .expect("a queue pair that is alive")
                    .sends
                    .push_back(send);
                wr = request.next;
            }
        }
        0
    })
}

unsafe extern "C" fn post_recv(qp: *mut Qp, wr: *mut RecvWr, _bad: *mut *mut RecvWr) -> c_int {
    // SAFETY: the caller passes a live queue pair and one request with its list of segments.
    let (number, request, segments) =
        unsafe { ((*qp).handle, &*wr, segments((*wr).sg_list, (*wr).num_sge)) };
    with(|wire| {
        wire.posts += 1;
        wire.addresses.push((segments.iter().map(|it| it.addr).collect(), 0));
        let pair = wire.pairs.get_mut(&number).expect("a queue pair that is alive");
        pair.receives.push_back(Receive { wr_id: request.wr_id, segments });
    });
    0
}

unsafe extern "C" fn alloc_mw(pd: *mut Pd, mw_type: MwType) -> *mut Mw {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*pd).context }) {
        return ptr::null_mut();
    }
    let rkey = with(|wire| {
        wire.next += 1;
        wire.next << 8
    });
    // SAFETY: the caller passes a live protection domain.
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(Mw { context, pd, rkey, handle: 0, mw_type }))
}

unsafe extern "C" fn dealloc_mw(mw: *mut Mw) -> c_int {
    fake::called("dealloc_mw".into());
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*mw).context }) {
        return libc::EIO;
    }
    let errno = with(|wire| wire.misbehaviour.refuses_frees);
    if errno != 0 {
        return errno;
    }
    // SAFETY: `alloc_mw` boxed the window, and each window is freed once.
    drop(unsafe { Box::from_raw(mw) });
    0
}

unsafe extern "C" fn bind_mw(qp: *mut Qp, mw: *mut Mw, bind: *mut MwBind) -> c_int {
    // SAFETY: the caller passes a live object.
    if life::is_removed(unsafe { (*(*qp).pd).context }) {
        return libc::EIO;
    }
    // SAFETY: the caller passes a live queue pair, a live window and the bind.
    let (id, qp_num, wr_id) = unsafe {
        let MwBindInfo { addr, length, mw_access_flags, .. } = (*bind).bind_info;
        fake::called(format!("bind_mw {addr:#x}+{length:#x} {mw_access_flags:#x}"));
        (*mw).rkey = ((*mw).rkey & !0xff) | (((*mw).rkey + 1) & 0xff);
        ((*qp).handle, (*qp).qp_num, (*bind).wr_id)
    };
    with(|wire| {
        for (_, cq, wc) in mem::take(&mut wire.late_binds) {
            wire.complete(cq, wc);
        }
        let cq = wire.pairs[&id].cqs.0;
        if let Some(gate) = wire.misbehaviour.bind_gate {
            gate.reached.store(true, Ordering::Release);
            wire.late_binds.push((id, cq, Wc { wr_id, qp_num, ..Wc::default() }));
            return;
        }
        match wire.misbehaviour.bind {
            Some(status) => wire.push(cq, qp_num, wr_id, status, 0),
            None => wire.late_binds.push((id, cq, Wc { wr_id, qp_num, ..Wc::default() })),
        }
    });
    0
}

unsafe extern "C" fn poll_cq(cq: *mut Cq, most: c_int, out: *mut Wc) -> c_int {
    pass(Call::PollQueue);
    with(|wire| {
        if wire.misbehaviour.polls_fail {
            return -1;
        }
        let numbers: Vec<_> = wire.pairs.keys().copied().collect();
        for number in numbers {
            // Each poll runs one request of each queue pair, so that requests interleave and stay
            // in flight.
            wire.run(number);
        }
        if wire.misbehaviour.bind_gate.is_some_and(|gate| gate.open.load(Ordering::Acquire)) {
            for (_, cq, wc) in mem::take(&mut wire.late_binds) {
                wire.complete(cq, wc);
            }
        }
        let Some(done) = wire.done.get_mut(&cq.addr()) else { return 0 };
        let count = done.len().min(most as usize);
        for (index, wc) in done.drain(..count).enumerate() {
            // SAFETY: the caller passes an array of `most` completions.
            unsafe { *out.add(index) = wc };
        }
        count as c_int
    })
}

/// Resets the fake library to one device, and returns its function table.
pub(crate) fn functions() -> Functions {
    // This call resets the state of `fake`, which provides the functions that this module does not
    // replace.
    drop(fake::functions());
    misbehave(Misbehaviour { bind: Some(WcStatus::IBV_WC_SUCCESS), ..Misbehaviour::default() });
    let symbol = |name: &str| {
        Some(match name {
            "ibv_open_device" => open_device as *const (),
            "ibv_close_device" => life::close_device as *const (),
            "ibv_get_async_event" => life::get_async_event as *const (),
            "ibv_ack_async_event" => life::ack_async_event as *const (),
            "ibv_query_device" => query_device as *const (),
            "ibv_query_port" => query_port as *const (),
            "ibv_query_gid" => query_gid as *const (),
            "ibv_reg_mr" => reg_mr as *const (),
            "ibv_reg_mr_iova2" => reg_mr_iova2 as *const (),
            "ibv_dereg_mr" => dereg_mr as *const (),
            "ibv_create_comp_channel" => create_comp_channel as *const (),
            "ibv_destroy_comp_channel" => destroy_comp_channel as *const (),
            "ibv_get_cq_event" => get_cq_event as *const (),
            "ibv_ack_cq_events" => ack_cq_events as *const (),
            "ibv_create_cq" => create_cq as *const (),
            "ibv_destroy_cq" => destroy_cq as *const (),
            "ibv_create_qp" => create_qp as *const (),
            "ibv_destroy_qp" => destroy_qp as *const (),
            "ibv_modify_qp" => modify_qp as *const (),
            "ibv_query_qp" => query_qp as *const (),
            other => return fake::symbol(other),
        })
    };
    // SAFETY: the functions above have the header's signatures.
    unsafe { Functions::from_lookup(|name, _| symbol(name)) }.expect("the library is complete")
}
