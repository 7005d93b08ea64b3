//! Two domains on one NIC with an endpoint each, for tests that move bytes. The target exposes
//! memory, and the initiator accesses it.
//!
//! All functions panic on errors that a test does not expect.

#![allow(unsafe_code, reason = "registers memory by address, and posts requests by address")]

use std::{
    ops::Deref,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hmem_core::{
    Access, AddressRange, AuthKey, Domain, Endpoint, Iface, Iova, LocalKey, Memory, MemoryRegion,
    MrFlags, MrMode, Promise, Raw, Region, RegionState, Rejected, RemoteKey, Request, Result,
    fabric::{self, MrAttr},
    provider::{CompletionQueue, EndpointAttr, LiveObjects},
    testing::Gate,
    transfer::{
        AtomicOp, AtomicType, Completion, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

use crate::bytes::assert_bytes;
pub use crate::bytes::pattern;
pub use crate::memory::{Bytes, HostPages, Owned};

/// Depth of each endpoint: the maximum number of sends in flight, and of receives in flight. A
/// completion queue serves both, so it is twice as deep.
pub const DEPTH: u64 = 256;

/// Length of the initiator's buffer for writes and reads.
const SCRATCH: usize = 256 << 10;

/// All access rights that a domain's own requests can need.
pub const LOCAL: Access = Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
/// All access rights that a peer's requests can need.
pub const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// One end of a link: a domain with an endpoint and a completion queue.
#[derive(Debug)]
pub struct LinkSide {
    /// The endpoint. Its sends and receives complete in `cq`.
    pub endpoint: Endpoint,
    /// The completion queue of the endpoint.
    pub cq: Arc<dyn CompletionQueue>,
    /// The domain of the endpoint.
    pub domain: Domain,
    /// True if regions own their memory, false if they are registered by addresses.
    owned: bool,
    /// The key of the next request, in modes in which the application chooses keys.
    next_key: AtomicU64,
}

impl LinkSide {
    /// Opens an endpoint in a domain, by [`open_endpoint`].
    ///
    /// # Errors
    /// The errors of an endpoint or a queue that cannot be opened.
    pub fn open(domain: Domain, rma_event: bool, auth_key: Option<AuthKey>) -> Result<Self> {
        let (endpoint, cq) = open_endpoint(&domain, rma_event, auth_key)?;
        Ok(Self { endpoint, cq, domain, owned: false, next_key: AtomicU64::new(100) })
    }

    /// Makes [`expose`](Self::expose) register memory that the region owns.
    pub(crate) fn owning(self) -> Self {
        Self { owned: true, ..self }
    }

    /// Returns a key that this domain has not requested before.
    pub fn fresh_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers memory. Binds and enables the region if the mode requires it.
    pub fn register<M: Memory>(&self, memory: M, access: Access) -> Region<M> {
        let request = Request::new(memory, access).key(self.fresh_key());
        let region = self.domain.submit(request).expect("register");
        self.make_usable(&region);
        region
    }

    /// Registers memory by [`fabric::regattr`]. Binds and enables the region if the mode requires
    /// it.
    pub fn regattr(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        let region = fabric::regattr(&self.domain, attr, flags)?;
        self.make_usable(&region);
        Ok(region)
    }

    /// Registers a part of the test's memory. After `owning`, the region owns the memory. Otherwise
    /// the memory is registered by its addresses. Binds and enables the region if the mode requires
    /// it.
    pub fn expose(&self, range: AddressRange, access: Access) -> Exposed {
        if self.owned {
            // SAFETY: the test keeps the memory for longer than its regions, and holds no
            // references to it.
            return Exposed::Owned(self.register(unsafe { Owned::new(range) }, access));
        }
        let attr = mr_attr(std::slice::from_ref(&range), access).key(self.fresh_key());
        Exposed::ByAddress(self.regattr(&attr, MrFlags::empty()).expect("register"))
    }

    /// Binds and enables a region if the mode requires it.
    pub fn make_usable(&self, region: &MemoryRegion) {
        if region.state() == RegionState::Disabled {
            if self.domain.mr_mode().contains(MrMode::ENDPOINT) {
                region.bind_endpoint(&self.endpoint).expect("bind");
            }
            region.enable().expect("enable");
        }
    }

    /// Waits for the next completion of this end of the link. Meanwhile drives the progress of the
    /// other end, `other`.
    pub fn wait(&self, other: &Self) -> Completion {
        let mut done = Vec::new();
        eventually("the end of a transfer", || {
            other.domain.progress().expect("progress");
            self.cq.read(&mut done, 1).expect("read completions") == 1
        });
        done.remove(0)
    }

    /// Posts a receive into one segment.
    pub fn receive(&self, into: LocalSegment, context: u64) -> Result<()> {
        let operation = Operation::Receive { tag: None, from: None };
        let request = WorkRequest { operation, local: &[into], peer: PeerId(0), context };
        // SAFETY: the memory belongs to the test and outlives the transfer.
        unsafe { self.endpoint.post(&request) }
    }
}

/// A region of a part of the test's memory.
#[derive(Debug)]
pub enum Exposed {
    /// The region owns its memory.
    Owned(Region<Owned>),
    /// The memory was registered by its addresses.
    ByAddress(MemoryRegion),
}

impl Exposed {
    /// Closes the region.
    ///
    /// # Errors
    /// The region and the error, if the region cannot be closed now.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        match self {
            Self::Owned(region) => match region.close() {
                Ok(_) => Ok(()),
                Err(rejected) => Err(Rejected::new(Self::Owned(rejected.value), rejected.error)),
            },
            Self::ByAddress(region) => region
                .close()
                .map_err(|rejected| Rejected::new(Self::ByAddress(rejected.value), rejected.error)),
        }
    }
}

impl Deref for Exposed {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        match self {
            Self::Owned(region) => region,
            Self::ByAddress(region) => region,
        }
    }
}

/// Opens an endpoint with a completion queue for sends and receives. The endpoint has the RMA_EVENT
/// capability if `rma_event` is true and the NIC counts accesses to regions.
///
/// # Errors
/// The errors of an endpoint or a queue that cannot be opened.
pub fn open_endpoint(
    domain: &Domain,
    rma_event: bool,
    auth_key: Option<AuthKey>,
) -> Result<(Endpoint, Arc<dyn CompletionQueue>)> {
    let rma_event = rma_event && domain.provider_domain().region_counters().is_some();
    let cq = domain.open_cq(2 * DEPTH as usize)?;
    let depth = DEPTH as usize;
    let attr = EndpointAttr { rma_event, auth_key, depth, ..EndpointAttr::new(&cq) };
    Ok((domain.open_endpoint(&attr)?, cq))
}

/// Waits until `reached` returns true. Panics after 15 seconds, so that a test fails instead of
/// hanging. `what` names the awaited event in the panic.
pub fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(15);
    while !reached() {
        assert!(Instant::now() < deadline, "{what} did not happen within 15 seconds");
        // Lets the other processor of an emulated machine run in the meantime.
        std::hint::spin_loop();
        std::thread::yield_now();
    }
}

/// Waits until the gate holds a call.
pub fn wait_held(gate: &Gate) {
    eventually("the held call", || gate.is_holding());
}

/// A buffer registered in the initiator's domain.
#[derive(Debug)]
pub struct Local {
    /// The region of all bytes of the buffer.
    pub region: Exposed,
    /// The memory of the buffer.
    pub bytes: Bytes,
}

impl Local {
    /// Returns a part of the buffer with its descriptor, for a request of the initiator.
    pub fn segment(&self, offset: u64, len: u64) -> LocalSegment {
        let desc = self.region.desc().expect("the local buffer is registered");
        segment(self.bytes.part(offset, len), Some(desc))
    }
}

/// Returns local memory for a request, with the descriptor of its region.
pub fn segment(range: AddressRange, desc: Option<LocalKey>) -> LocalSegment {
    LocalSegment { address: range.start(), len: range.len(), desc }
}

/// A connected initiator and target.
#[derive(Debug)]
pub struct Link {
    /// The initiator's buffer for writes and reads. The first write or read registers the buffer.
    scratch: OnceLock<Local>,
    /// The operands of atomics. The first atomic registers the operands.
    operands: OnceLock<Local>,
    /// The domain that accesses memory.
    pub initiator: LinkSide,
    /// The domain that exposes memory.
    pub target: LinkSide,
    /// Address of the target's endpoint, for requests of the initiator.
    pub peer: PeerId,
    /// The device whose memory the test uses; `None` for host memory.
    device: Option<Arc<dyn Iface>>,
    /// True if the NIC can read the operands of atomics from host memory only.
    host_operands: bool,
}

impl Link {
    /// Connects two sides. The test uses memory of `device`, or host memory if `device` is `None`.
    /// Pass true as `host_operands` for NICs that read the operands of atomics from host memory
    /// only.
    pub fn connect(
        initiator: LinkSide,
        target: LinkSide,
        device: Option<Arc<dyn Iface>>,
        host_operands: bool,
    ) -> Self {
        let peer = initiator.endpoint.resolve(&target.endpoint.name()).expect("find the target");
        let (scratch, operands) = (OnceLock::new(), OnceLock::new());
        Self { scratch, operands, initiator, target, peer, device, host_operands }
    }

    /// Returns the initiator and the target, and closes the link's own regions: the initiator's
    /// buffers for transfers and atomics.
    pub fn into_sides(self) -> [LinkSide; 2] {
        [self.initiator, self.target]
    }

    /// Returns true if the mode of both domains has the bits `mode`.
    pub fn has(&self, mode: MrMode) -> bool {
        self.target.domain.mr_mode().effective().contains(mode)
    }

    /// Counts the live objects of the target's domain.
    pub fn live(&self) -> LiveObjects {
        self.target.domain.live()
    }

    /// Returns a key that the target's domain has not requested before.
    pub fn fresh_key(&self) -> u64 {
        self.target.fresh_key()
    }

    /// Allocates zeroed memory of the device, or host memory. In MMU_NOTIFY mode, the memory has
    /// pages when the call returns, so that a registration covers them.
    pub fn bytes(&self, len: usize) -> Bytes {
        let memory = match &self.device {
            None => Bytes::Host(HostPages::new(len)),
            Some(device) => Bytes::on_device(device, 0, len),
        };
        if self.has(MrMode::MMU_NOTIFY) {
            memory.put(0, &vec![0; len]);
        }
        memory
    }

    /// Allocates memory as [`Self::bytes`] does, and copies the argument `bytes` to the memory.
    pub fn filled(&self, bytes: &[u8]) -> Bytes {
        let memory = self.bytes(bytes.len());
        memory.put(0, bytes);
        memory
    }

    /// Registers one range in the target's domain. Binds and enables the region if the mode
    /// requires it.
    pub fn expose(&self, range: AddressRange, access: Access) -> Exposed {
        self.target.expose(range, access)
    }

    /// Registers memory by [`fabric::regattr`] in the target's domain, with a fresh key.
    pub fn try_expose(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        self.target.regattr(&attr.key(self.fresh_key()), flags)
    }

    /// Returns the key with which the initiator accesses a region. In RAW mode the initiator maps
    /// the raw key first.
    pub fn key(&self, region: &MemoryRegion) -> RemoteKey {
        if !self.has(MrMode::RAW) {
            return region.key().expect("key");
        }
        let raw = region.raw_key().expect("raw key");
        let mapped = self.initiator.domain.map_raw(region.base_addr(), region.len(), &raw);
        mapped.expect("map the raw key")
    }

    /// Allocates a buffer and registers it in the initiator's domain.
    pub fn local(&self, len: usize, access: Access) -> Local {
        let bytes = self.bytes(len);
        Local { region: self.initiator.expose(bytes.range(), access), bytes }
    }

    /// Posts an operation from the initiator, and returns the result of its completion.
    pub fn transfer(&self, operation: Operation<'_>, local: &[LocalSegment]) -> Result<u64> {
        self.post(operation, local, 1)?;
        self.ended()
    }

    /// Posts an operation from the initiator to the target.
    pub fn post(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        context: u64,
    ) -> Result<()> {
        let request = WorkRequest { operation, local, peer: self.peer, context };
        // SAFETY: the local memory belongs to the test and outlives the transfer.
        unsafe { self.initiator.endpoint.post(&request) }
    }

    /// Waits for the initiator's next completion.
    pub fn completion(&self) -> Completion {
        self.initiator.wait(&self.target)
    }

    /// Waits for the target's next completion.
    pub fn received(&self) -> Completion {
        self.target.wait(&self.initiator)
    }

    /// Waits for the completion of the initiator's only request in flight, and returns its result.
    pub fn ended(&self) -> Result<u64> {
        let completion = self.completion();
        assert_eq!(completion.context, 1, "a completion of another request");
        completion.result
    }

    fn scratch(&self) -> &Local {
        self.scratch.get_or_init(|| self.local(SCRATCH, LOCAL))
    }

    /// Writes `bytes` to the target's memory, `offset` bytes after the base address of `key`. Waits
    /// for the completion, and returns the number of bytes.
    pub fn push(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<u64> {
        let (local, len) = (self.scratch(), bytes.len() as u64);
        local.bytes.put(0, bytes);
        let remote = [remote(key, offset, len)];
        self.transfer(Operation::Write { remote: &remote }, &[local.segment(0, len)])
    }

    /// Reads `len` bytes of the target's memory, `offset` bytes after the base address of `key`.
    /// Waits for the completion. Asserts that a failed read leaves the local buffer unchanged.
    pub fn pull(&self, key: &RemoteKey, offset: u64, len: u64) -> Result<Vec<u8>> {
        let local = self.scratch();
        let before = vec![0xEE; len as usize];
        local.bytes.put(0, &before);
        let remote = [remote(key, offset, len)];
        let moved = self.transfer(Operation::Read { remote: &remote }, &[local.segment(0, len)]);
        let after = local.bytes.get(0, len as usize);
        match moved {
            Ok(moved) => assert_eq!(moved, len, "a completed read moves all of its bytes"),
            Err(_) => assert_bytes(&after, &before, "the buffer of a failed read"),
        }
        moved.map(|_| after)
    }

    /// Adds `value` to the 64-bit number `offset` bytes after the base address of `key`, by an
    /// atomic of the initiator. Returns the previous value.
    pub fn fetch_add(&self, key: &RemoteKey, offset: u64, value: u64) -> Result<u64> {
        // The request of an RDMA device carries the operands, which the CPU reads.
        let local = self.operands.get_or_init(|| {
            let host = self.host_operands;
            let bytes = if host { Bytes::Host(HostPages::new(16)) } else { self.bytes(16) };
            if host {
                bytes.put(0, &[0; 16]);
            }
            let region = self.initiator.expose(bytes.range(), LOCAL);
            Local { region, bytes }
        });
        local.bytes.put(0, &value.to_le_bytes());
        local.bytes.put(8, &[0; 8]);
        let operation = Operation::Atomic {
            op: AtomicOp::Sum,
            datatype: AtomicType::U64,
            remote: remote(key, offset, 8),
            result: Some(local.segment(8, 8)),
            compare: None,
        };
        self.transfer(operation, &[local.segment(0, 8)])?;
        Ok(u64::from_le_bytes(local.bytes.get(8, 8).try_into().expect("8 bytes")))
    }

    /// Sends `message` from the initiator. The target receives it into `into`. Returns the results
    /// of the send and of the receive. If the receive cannot be posted, nothing is sent, and the
    /// result of the send is `Ok(0)`. If the send fails, the result of the receive is `Ok(0)`.
    pub fn send(&self, message: LocalSegment, into: LocalSegment) -> (Result<u64>, Result<u64>) {
        if let Err(error) = self.target.receive(into, 2) {
            return (Ok(0), Err(error));
        }
        let sent = self.transfer(Operation::Send { tag: None, invalidate: None }, &[message]);
        if sent.is_err() {
            return (sent, Ok(0));
        }
        (sent, self.received().result)
    }

    /// Waits for the target's next completion. Returns that completion, and the initiator's
    /// completions that were read meanwhile. Panics if a request of the initiator failed.
    pub fn arrived(&self) -> (Completion, Vec<Completion>) {
        let (mut arrived, mut ended) = (Vec::new(), Vec::new());
        eventually("the end of a receive", || {
            self.initiator.cq.read(&mut ended, 1).expect("read completions");
            for completion in &ended {
                assert!(completion.result.is_ok(), "a request of the initiator: {completion:?}");
            }
            self.target.cq.read(&mut arrived, 1).expect("read completions") == 1
        });
        (arrived.remove(0), ended)
    }

    /// Asserts that the key gives access: a write and a read succeed.
    #[track_caller]
    pub fn assert_works(&self, key: &RemoteKey) {
        let bytes = pattern(9, 19);
        assert_eq!(self.push(key, 0, &bytes).expect("write"), 19, "bytes written");
        assert_bytes(&self.pull(key, 0, 19).expect("read"), &bytes, "bytes read");
    }
}

/// Returns a request to register memory of a test by its addresses.
pub fn mr_attr(ranges: &[AddressRange], access: Access) -> MrAttr<'_> {
    MrAttr::new(raw(ranges), access)
}

/// Returns memory of a test for registration by its addresses.
pub fn raw<A>(at: A) -> Raw<A> {
    // SAFETY: the tests own the memory for longer than the regions and hold no references into it.
    unsafe { Raw::new(at, Promise::ReadWrite) }
}

/// Returns a remote segment of `len` bytes, `offset` bytes after the base address of `key`.
pub fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0.wrapping_add(offset)), len, key }
}
