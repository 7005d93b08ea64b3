//! Two domains on one NIC. The target exposes memory, and the initiator accesses it.

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
    Access, AddressRange, AuthKey, BindFlags, Domain, DomainAttr, Endpoint, ErrorKind, Iface, Iova,
    LocalKey, Memory, MemoryRegion, MrFlags, MrMode, Promise, Raw, Region, RegionState, Registry,
    Rejected, RemoteKey, Request, Result,
    counter::Counter,
    fabric::{self, MrAttr},
    provider::{CompletionQueue, EndpointAttr, LiveObjects},
    testing::Gate,
    transfer::{
        AtomicOp, AtomicType, Completion, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::DefaultPathSelector;

use super::{
    case::{Case, LOCAL, REMOTE, TestMemory},
    memory::{Bytes, HostPages, Owned},
};
use crate::{
    bytes::{assert_bytes, pattern},
    control::Call,
    trial::{Outcome, skip},
};

/// Depth of each endpoint: the maximum number of sends in flight, and of receives in flight. Each
/// completion queue is for both, and so is twice as deep.
pub(super) const DEPTH: u64 = 64;

/// Length of the initiator's buffer for writes and reads.
const SCRATCH: usize = 256 << 10;

/// Settings of a [`Link`]. A test may change them before it opens the link.
pub(super) struct Setup {
    case: Case,
    pub(super) target: DomainAttr,
    pub(super) initiator: DomainAttr,
    /// True if the target's endpoint has the RMA_EVENT capability.
    pub(super) rma_event: bool,
    /// The authorization key of the initiator's endpoint. `None` means the domain's key.
    pub(super) initiator_key: Option<AuthKey>,
}

impl Setup {
    pub(super) fn of(case: &Case) -> Self {
        let (mr_mode, p2p) = (case.attr.required_mr_mode, case.policy());
        let attr = DomainAttr { mr_mode, p2p, ..DomainAttr::default() };
        let (target, initiator) = (attr.clone(), attr);
        Self { case: case.clone(), target, initiator, rma_event: true, initiator_key: None }
    }

    pub(super) fn open(self) -> Link {
        self.try_open().expect("open two domains with an endpoint each")
    }

    /// Opens both domains on the provider's first NIC.
    ///
    /// # Errors
    /// The errors of a domain or an endpoint that cannot be opened.
    pub(super) fn try_open(self) -> Result<Link> {
        let device = Arc::new(Simulated::builder().build().expect("a simulated device"));
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("add host memory");
        registry.add(Arc::<Simulated>::clone(&device)).expect("add the device");
        let registry = Arc::new(registry);
        let open = |attr, rma_event, key| {
            LinkSide::open(&self.case, Arc::clone(&registry), attr, rma_event, key)
        };
        let target = open(self.target, self.rma_event, None)?;
        let initiator = open(self.initiator, true, self.initiator_key)?;
        let peer = initiator.endpoint.resolve(&target.endpoint.name()).expect("find the target");
        Ok(Link {
            scratch: OnceLock::new(),
            operands: OnceLock::new(),
            initiator,
            target,
            peer,
            device,
            case: self.case,
        })
    }
}

/// One end of a link: a domain with an endpoint and a completion queue.
pub(super) struct LinkSide {
    pub(super) endpoint: Endpoint,
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) domain: Domain,
    memory: TestMemory,
    /// The key of the next request, in modes in which the application chooses keys.
    next_key: AtomicU64,
}

impl LinkSide {
    fn open(
        case: &Case,
        registry: Arc<Registry>,
        attr: DomainAttr,
        rma_event: bool,
        auth_key: Option<AuthKey>,
    ) -> Result<Self> {
        let selector = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(&*case.provider, registry, selector, attr)?;
        let (endpoint, cq) = open_endpoint(&domain, rma_event, auth_key)?;
        Ok(Self { endpoint, cq, domain, memory: case.memory, next_key: AtomicU64::new(100) })
    }

    /// Returns a key that this domain has not requested before.
    pub(super) fn fresh_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers memory. Binds and enables the region if the mode requires it.
    pub(super) fn register<M: Memory>(&self, memory: M, access: Access) -> Region<M> {
        let request = Request::new(memory, access).key(self.fresh_key());
        let region = self.domain.submit(request).expect("register");
        self.make_usable(&region);
        region
    }

    /// Registers by a call of `fi_mr(3)`. Binds and enables the region if the mode requires it.
    pub(super) fn regattr(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        let region = fabric::regattr(&self.domain, attr, flags)?;
        self.make_usable(&region);
        Ok(region)
    }

    /// Registers a part of the test's memory, which the region owns in such cases. Binds and
    /// enables the region if the mode requires it.
    pub(super) fn expose(&self, range: AddressRange, access: Access) -> Exposed {
        if self.memory == TestMemory::OwnedHost {
            // SAFETY: the test keeps the memory for longer than its regions, and holds no
            // references to it.
            return Exposed::Owned(self.register(unsafe { Owned::new(range) }, access));
        }
        let attr = mr_attr(std::slice::from_ref(&range), access).key(self.fresh_key());
        Exposed::ByAddress(self.regattr(&attr, MrFlags::empty()).expect("register"))
    }

    /// Binds and enables a region if the mode requires it.
    pub(super) fn make_usable(&self, region: &MemoryRegion) {
        if region.state() == RegionState::Disabled {
            if self.domain.mr_mode().contains(MrMode::ENDPOINT) {
                region.bind_endpoint(&self.endpoint).expect("bind");
            }
            region.enable().expect("enable");
        }
    }

    /// Waits for the next completion of this end of the link. Meanwhile drives the progress of the
    /// other end, `other`.
    pub(super) fn wait(&self, other: &Self) -> Completion {
        let mut done = Vec::new();
        eventually("the end of a transfer", || {
            other.domain.progress().expect("progress");
            self.cq.read(&mut done, 1).expect("read completions") == 1
        });
        done.remove(0)
    }

    /// Posts a receive into one segment.
    pub(super) fn receive(&self, into: LocalSegment, context: u64) -> Result<()> {
        let operation = Operation::Receive { tag: None, from: None };
        let request = WorkRequest { operation, local: &[into], peer: PeerId(0), context };
        // SAFETY: the memory belongs to the test and outlives the transfer.
        unsafe { self.endpoint.post(&request) }
    }
}

/// A region of a part of the test's memory.
#[derive(Debug)]
pub(super) enum Exposed {
    Owned(Region<Owned>),
    ByAddress(MemoryRegion),
}

impl Exposed {
    pub(super) fn close(self) -> Result<(), Rejected<Self>> {
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
pub(super) fn open_endpoint(
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

/// Waits until `reached` returns true. Panics after a minute, so that a test fails instead of
/// hanging. `what` names the awaited event in the panic.
pub(super) fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < deadline, "{what} did not happen within a minute");
        // Lets the other processor of an emulated machine run in the meantime.
        std::hint::spin_loop();
        std::thread::yield_now();
    }
}

/// Waits until the gate holds a call.
pub(super) fn wait_held(gate: &Gate) {
    eventually("the held call", || gate.is_holding());
}

/// A buffer registered in the initiator's domain.
pub(super) struct Local {
    pub(super) region: Exposed,
    pub(super) bytes: Bytes,
}

impl Local {
    pub(super) fn segment(&self, offset: u64, len: u64) -> LocalSegment {
        let desc = self.region.desc().expect("the local buffer is registered");
        segment(self.bytes.part(offset, len), Some(desc))
    }
}

pub(super) fn segment(range: AddressRange, desc: Option<LocalKey>) -> LocalSegment {
    LocalSegment { address: range.start(), len: range.len(), desc }
}

/// A connected initiator and target on one NIC.
pub(super) struct Link {
    /// The initiator's buffer for writes and reads. The first of them registers it.
    scratch: OnceLock<Local>,
    /// The operands of atomics. The first atomic registers them.
    operands: OnceLock<Local>,
    pub(super) initiator: LinkSide,
    pub(super) target: LinkSide,
    /// Address of the target's endpoint, for requests of the initiator.
    pub(super) peer: PeerId,
    /// A simulated device whose memory both domains can register.
    pub(super) device: Arc<Simulated>,
    pub(super) case: Case,
}

impl Link {
    pub(super) fn open(case: &Case) -> Self {
        Setup::of(case).open()
    }

    /// Returns the initiator and the target without regions of the link's own.
    pub(super) fn into_sides(self) -> [LinkSide; 2] {
        [self.initiator, self.target]
    }

    /// Returns whether the mode of both domains has the bits `mode`.
    pub(super) fn has(&self, mode: MrMode) -> bool {
        self.target.domain.mr_mode().effective().contains(mode)
    }

    /// Counts the live objects of the target's domain.
    pub(super) fn live(&self) -> LiveObjects {
        self.target.domain.live()
    }

    /// Returns a key that the target's domain has not requested before.
    pub(super) fn fresh_key(&self) -> u64 {
        self.target.fresh_key()
    }

    /// Makes the next call of this kind wait at the returned gate.
    pub(super) fn hold(&self, call: Call) -> Gate {
        let control = self.case.control.as_ref().expect("the behaviour needs control");
        control.hold(call).expect("the back end holds calls")
    }

    /// Returns the number of calls of this kind.
    pub(super) fn calls(&self, call: Call) -> u64 {
        let control = self.case.control.as_ref().expect("the behaviour needs control");
        control.calls(call).expect("the back end counts calls")
    }

    /// Allocates zeroed memory of the case. In MMU_NOTIFY mode its pages are present.
    pub(super) fn bytes(&self, len: usize) -> Bytes {
        let memory = if self.case.is_host() {
            Bytes::Host(HostPages::new(len))
        } else {
            Bytes::on_device(&(Arc::clone(&self.device) as Arc<dyn Iface>), 0, len)
        };
        if self.has(MrMode::MMU_NOTIFY) {
            memory.put(0, &vec![0; len]);
        }
        memory
    }

    /// Allocates memory of the case and fills it with `bytes`.
    pub(super) fn filled(&self, bytes: &[u8]) -> Bytes {
        let memory = self.bytes(bytes.len());
        memory.put(0, bytes);
        memory
    }

    /// Registers one range in the target's domain. Binds and enables the region if the mode
    /// requires it.
    pub(super) fn expose(&self, range: AddressRange, access: Access) -> Exposed {
        self.target.expose(range, access)
    }

    /// Registers by a call of `fi_mr(3)` in the target's domain, with a fresh key.
    pub(super) fn try_expose(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        self.target.regattr(&attr.key(self.fresh_key()), flags)
    }

    /// Binds a new counter of remote writes to a region of this domain that was registered with
    /// RMA_EVENT. Binds and enables the region if the mode requires it.
    pub(super) fn count(&self, region: &MemoryRegion) -> Arc<Counter> {
        let counter = Arc::new(Counter::new());
        region.bind_counter(&counter, BindFlags::REMOTE_WRITE).expect("bind the counter");
        self.target.make_usable(region);
        counter
    }

    /// Registers a range with a counter of remote writes in the target's domain.
    pub(super) fn counted(
        &self,
        range: AddressRange,
        access: Access,
    ) -> (MemoryRegion, Arc<Counter>) {
        let ranges = [range];
        let attr = mr_attr(&ranges, access).key(self.fresh_key());
        let region = fabric::regattr(&self.target.domain, &attr, MrFlags::RMA_EVENT);
        let region = region.expect("register");
        let counter = self.count(&region);
        (region, counter)
    }

    /// Returns the key with which the initiator accesses a region. In RAW mode the initiator maps
    /// the raw key first.
    pub(super) fn key(&self, region: &MemoryRegion) -> RemoteKey {
        if !self.has(MrMode::RAW) {
            return region.key().expect("key");
        }
        let raw = region.raw_key().expect("raw key");
        let mapped = self.initiator.domain.map_raw(region.base_addr(), region.len(), &raw);
        mapped.expect("map the raw key")
    }

    /// Allocates a buffer and registers it in the initiator's domain.
    pub(super) fn local(&self, len: usize, access: Access) -> Local {
        let bytes = self.bytes(len);
        Local { region: self.initiator.expose(bytes.range(), access), bytes }
    }

    /// Posts an operation from the initiator, and returns the result of its completion.
    pub(super) fn transfer(&self, operation: Operation<'_>, local: &[LocalSegment]) -> Result<u64> {
        self.post(operation, local, 1)?;
        self.ended()
    }

    /// Posts an operation from the initiator to the target.
    pub(super) fn post(
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
    pub(super) fn completion(&self) -> Completion {
        self.initiator.wait(&self.target)
    }

    /// Waits for the target's next completion.
    pub(super) fn received(&self) -> Completion {
        self.target.wait(&self.initiator)
    }

    /// Waits for the completion of the initiator's only request in flight, and returns its result.
    pub(super) fn ended(&self) -> Result<u64> {
        let completion = self.completion();
        assert_eq!(completion.context, 1, "a completion of another request");
        completion.result
    }

    fn scratch(&self) -> &Local {
        self.scratch.get_or_init(|| self.local(SCRATCH, LOCAL))
    }

    /// Writes `bytes` to the target's memory, `offset` bytes after the base address of `key`. Waits
    /// for the completion, and returns the number of bytes.
    pub(super) fn push(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<u64> {
        let (local, len) = (self.scratch(), bytes.len() as u64);
        local.bytes.put(0, bytes);
        let remote = [remote(key, offset, len)];
        self.transfer(Operation::Write { remote: &remote }, &[local.segment(0, len)])
    }

    /// Reads `len` bytes of the target's memory, `offset` bytes after the base address of `key`.
    /// Waits for the completion. Asserts that a failed read leaves the local buffer unchanged.
    pub(super) fn pull(&self, key: &RemoteKey, offset: u64, len: u64) -> Result<Vec<u8>> {
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

    /// Adds to the 64-bit number at an offset of the region with `key`. Returns the previous value.
    pub(super) fn fetch_add(&self, key: &RemoteKey, offset: u64, value: u64) -> Result<u64> {
        // The request of an RDMA device carries the operands, which the CPU reads.
        let local = self.operands.get_or_init(|| {
            let host = self.case.control.is_none();
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

    /// Returns the outcome that skips a behaviour if the NIC has no atomics.
    pub(super) fn need_atomics(&self) -> Outcome {
        let memory = self.bytes(8);
        let region = self.expose(memory.range(), REMOTE);
        match self.fetch_add(&self.key(&region), 0, 1) {
            Err(why) if why.kind() == ErrorKind::Unsupported => skip(why.to_string()),
            added => {
                added.expect("atomic");
                Ok(())
            }
        }
    }

    /// Sends `message` from the initiator. The target receives it into `into`. Returns the results
    /// of the send and of the receive. If the receive cannot be posted, nothing is sent, and the
    /// result of the send is `Ok(0)`. If the send fails, the result of the receive is `Ok(0)`.
    pub(super) fn send(
        &self,
        message: LocalSegment,
        into: LocalSegment,
    ) -> (Result<u64>, Result<u64>) {
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
    pub(super) fn arrived(&self) -> (Completion, Vec<Completion>) {
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

    /// Asserts that the key gives no access: a write and a read of the byte at `offset` are
    /// refused. `what` names the access in failures.
    #[track_caller]
    pub(super) fn assert_dead(&self, key: &RemoteKey, offset: u64, why: ErrorKind, what: &str) {
        self.case.assert_refused(self.push(key, offset, &[0xFF]), why, what);
        self.case.assert_refused(self.pull(key, offset, 1), why, what);
    }

    /// Asserts that the key gives access: a write and a read succeed.
    #[track_caller]
    pub(super) fn assert_works(&self, key: &RemoteKey) {
        let bytes = pattern(9, 19);
        assert_eq!(self.push(key, 0, &bytes).expect("write"), 19, "bytes written");
        assert_bytes(&self.pull(key, 0, 19).expect("read"), &bytes, "bytes read");
    }
}

/// Returns a request to register memory of a test by its addresses.
pub(super) fn mr_attr(ranges: &[AddressRange], access: Access) -> MrAttr<'_> {
    MrAttr::new(raw(ranges), access)
}

/// Returns addresses of memory of a test.
pub(super) fn raw<A>(at: A) -> Raw<A> {
    // SAFETY: the tests own the memory for longer than the regions and hold no references into it.
    unsafe { Raw::new(at, Promise::ReadWrite) }
}

/// Returns a remote segment of `len` bytes, `offset` bytes after the base address of `key`.
pub(super) fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0.wrapping_add(offset)), len, key }
}
