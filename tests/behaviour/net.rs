//! Two domains on one NIC: a target that exposes memory, and an initiator that accesses it.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hmem::{
    Access, AddressRange, AuthKey, Domain, DomainAttr, Endpoint, ErrorKind, Hmem, Iface, Iova,
    LocalKey, MemoryRegion, MrFlags, MrMode, Promise, Raw, RemoteKey, Result,
    fabric::{self, MrAttr},
    loopback::{self, Faults, Gate, Loopback, NicCall},
    provider::{CompletionQueue, EndpointAttr, LiveObjects, Provider},
    system::{FreeDetection, Simulated},
    transfer::{
        AtomicOp, AtomicType, Completion, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

use crate::{
    config::{Memory, Nic, TestConfig},
    hold::Hold,
    memory::{Bytes, HostPages},
};

/// All access rights of local operations.
pub(crate) const LOCAL: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
/// Rights of peers to read and write.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
/// Name of the software NIC's provider.
pub(crate) const LOOPBACK: &str = "loopback";

const SCRATCH: u64 = 64 << 10;

/// Settings of the fixture [`Net`]. A test may change them before it opens the fixture.
pub(crate) struct Setup {
    pub(crate) config: TestConfig,
    pub(crate) provider: loopback::Builder,
    pub(crate) target: DomainAttr,
    pub(crate) initiator: DomainAttr,
    /// True if the target's endpoint has the RMA_EVENT capability.
    pub(crate) rma_event: bool,
    pub(crate) initiator_key: Option<AuthKey>,
    pub(crate) faults: Faults,
}

impl Setup {
    pub(crate) fn of(config: &TestConfig) -> Self {
        let faults = Faults::new();
        let attr = DomainAttr {
            mr_mode: config.mode.offered,
            hmem: true,
            p2p: config.policy,
            nic: nic_name(config),
            ..DomainAttr::default()
        };
        Self {
            config: *config,
            provider: Loopback::builder()
                .needs(config.mode.needed)
                .key_size(config.key_size)
                .remap_policy(config.pages)
                .progress(config.progress)
                .faults(&faults),
            target: attr.clone(),
            initiator: attr,
            rma_event: true,
            initiator_key: None,
            faults,
        }
    }

    pub(crate) fn open(self) -> Net {
        let mut builder = Hmem::builder().without_vendor_ifaces();
        builder = match self.config.nic {
            Nic::Loopback => {
                builder.provider(self.provider.build().expect("build the software NIC"))
            }
            Nic::Verbs { .. } => builder.shared_provider(verbs()),
        };
        let device = match self.config.memory {
            Memory::System => None,
            Memory::Device(style) => Some(device(style)),
        };
        if let Some(device) = &device {
            builder = builder.shared_iface(Arc::clone(device) as Arc<dyn Iface>);
        }
        let hmem = builder.build().expect("start the ifaces");
        let provider = provider_name(&self.config);
        let target = Side::open(&hmem, provider, self.target, self.rma_event, None);
        let initiator = Side::open(&hmem, provider, self.initiator, true, self.initiator_key);
        let peer = initiator.endpoint.resolve(&target.endpoint.name()).expect("find the target");
        Net {
            config: self.config,
            scratch: OnceLock::new(),
            operands: OnceLock::new(),
            initiator,
            target,
            hmem,
            device,
            peer,
            faults: self.faults,
            next_key: AtomicU64::new(100),
        }
    }
}

/// Returns the name of the provider of a test configuration.
pub(crate) fn provider_name(config: &TestConfig) -> &'static str {
    if config.is_loopback() { LOOPBACK } else { "verbs" }
}

/// Returns the name of the NIC of a test configuration; `None` for the software NIC.
pub(crate) fn nic_name(config: &TestConfig) -> Option<String> {
    let verbs = || std::env::var("HMEM_VERBS_DEVICE").expect("set in verbs configurations");
    (!config.is_loopback()).then(verbs)
}

/// Returns the verbs provider. Its endpoints connect automatically, and reconnect after an error.
#[cfg(feature = "verbs")]
pub(crate) fn verbs() -> Arc<dyn Provider> {
    use hmem::verbs::Verbs;

    use crate::hold;

    let builder = Verbs::builder().functions(hold::verbs::functions());
    Arc::new(builder.connect_in_process(true).build().expect("start"))
}

#[cfg(not(feature = "verbs"))]
pub(crate) fn verbs() -> Arc<dyn Provider> {
    panic!("HMEM_VERBS_DEVICE names a device, and this build is without the cargo feature `verbs`")
}

/// Creates a simulated iface with two devices and the given detection of frees.
pub(crate) fn device(style: FreeDetection) -> Arc<Simulated> {
    let builder = Simulated::builder().devices(2).free_detection(style).window(1 << 32);
    Arc::new(builder.build().expect("build the simulated device"))
}

/// One end of a connection: a domain with an endpoint and a completion queue.
pub(crate) struct Side {
    pub(crate) endpoint: Endpoint,
    pub(crate) cq: Arc<dyn CompletionQueue>,
    pub(crate) domain: Domain,
}

impl Side {
    pub(crate) fn open(
        hmem: &Hmem,
        provider: &str,
        attr: DomainAttr,
        rma_event: bool,
        key: Option<AuthKey>,
    ) -> Self {
        let domain = hmem.domain(provider, attr).expect("open a domain");
        let (endpoint, cq) = open_endpoint(&domain, rma_event, key);
        Self { endpoint, cq, domain }
    }

    /// Registers memory. In ENDPOINT mode, also binds the region to the endpoint and enables it.
    pub(crate) fn register(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        let region = fabric::regattr(&self.domain, attr, flags)?;
        self.make_usable(&region)?;
        Ok(region)
    }

    pub(crate) fn make_usable(&self, region: &MemoryRegion) -> Result<()> {
        if self.domain.mr_mode().contains(MrMode::ENDPOINT) {
            region.bind_endpoint(&self.endpoint)?;
            region.enable()?;
        }
        Ok(())
    }

    /// Waits for this side's next completion, and makes progress on `others` meanwhile.
    pub(crate) fn wait(&self, others: &[&Self]) -> Completion {
        let mut out = Vec::new();
        eventually("the end of a transfer", || {
            for side in others {
                side.domain.progress().expect("progress");
            }
            self.cq.read(&mut out, 1).expect("read completions") == 1
        });
        out.remove(0)
    }
}

/// Waits for a state that another thread reaches. Fails after a minute instead of hanging.
pub(crate) fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        // Lets the other processor of an emulated machine run in the meantime.
        std::hint::spin_loop();
        std::thread::yield_now();
    }
}

/// Waits until the gate holds a call of the software NIC.
pub(crate) fn wait_held(gate: &Gate) {
    eventually("the held call", || gate.is_holding());
}

pub(crate) fn open_endpoint(
    domain: &Domain,
    rma_event: bool,
    auth_key: Option<AuthKey>,
) -> (Endpoint, Arc<dyn CompletionQueue>) {
    let cq = domain.open_cq(1024).expect("open a completion queue");
    let attr = EndpointAttr {
        tx_cq: Arc::clone(&cq),
        rx_cq: Arc::clone(&cq),
        rma_event,
        auth_key,
        tx_counter: None,
        rx_counter: None,
        depth: 256,
    };
    (domain.open_endpoint(&attr).expect("open an endpoint"), cq)
}

/// A buffer registered in the initiator's domain.
pub(crate) struct Local {
    pub(crate) region: MemoryRegion,
    pub(crate) bytes: Bytes,
}

impl Local {
    pub(crate) fn segment(&self, offset: u64, len: u64) -> LocalSegment {
        let desc = self.region.desc().expect("the local buffer is registered");
        segment(self.bytes.part(offset, len), Some(desc))
    }
}

pub(crate) fn segment(range: AddressRange, desc: Option<LocalKey>) -> LocalSegment {
    LocalSegment { address: range.start(), len: range.len(), desc }
}

/// The fixture of most tests: a connected initiator and target in one test configuration.
pub(crate) struct Net {
    pub(crate) config: TestConfig,
    scratch: OnceLock<Local>,
    /// Buffer for the operands of atomics. The first atomic allocates it.
    operands: OnceLock<Local>,
    pub(crate) initiator: Side,
    pub(crate) target: Side,
    pub(crate) hmem: Hmem,
    pub(crate) device: Option<Arc<Simulated>>,
    /// The handle of the target in the initiator's address vector.
    pub(crate) peer: PeerId,
    pub(crate) faults: Faults,
    next_key: AtomicU64,
}

impl Net {
    pub(crate) fn open(config: &TestConfig) -> Self {
        Setup::of(config).open()
    }

    /// Returns the error kind that the initiator sees when the target refuses an access with
    /// `refusal`.
    pub(crate) fn seen(&self, refusal: ErrorKind) -> ErrorKind {
        self.config.seen(refusal)
    }

    /// Counts the live objects of the target's domain.
    pub(crate) fn live(&self) -> LiveObjects {
        self.target.domain.live()
    }

    /// Holds the target's next registration in flight, until the returned guard releases it. The
    /// software NIC also holds a registration of the initiator, if that one comes first.
    pub(crate) fn hold_registration(&self) -> Hold {
        match self.config.nic {
            Nic::Loopback => Hold::SoftwareNic(self.faults.hold(NicCall::Register)),
            #[cfg(feature = "verbs")]
            Nic::Verbs { .. } => Hold::Verbs(crate::hold::verbs::Gate::hold(&self.target.domain)),
            #[cfg(not(feature = "verbs"))]
            Nic::Verbs { .. } => unreachable!("a build without verbs opens no such configuration"),
        }
    }

    /// Returns a key number that no registration has requested yet.
    pub(crate) fn fresh_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    /// Allocates zeroed memory of the configuration's kind. In MMU_NOTIFY mode its pages are
    /// present.
    pub(crate) fn bytes(&self, len: usize) -> Bytes {
        let memory = match &self.device {
            None => Bytes::Host(HostPages::new(len)),
            Some(device) => Bytes::on_device(&(Arc::clone(device) as Arc<dyn Iface>), 0, len),
        };
        if self.config.has(MrMode::MMU_NOTIFY) {
            memory.put(0, &vec![0; len]);
        }
        memory
    }

    /// Allocates memory of the configuration's kind and fills it with `bytes`.
    pub(crate) fn filled(&self, bytes: &[u8]) -> Bytes {
        let memory = self.bytes(bytes.len());
        memory.put(0, bytes);
        memory
    }

    /// Registers one range in the target's domain. Binds and enables the region if the mode
    /// requires it.
    pub(crate) fn expose(&self, range: AddressRange, access: Access) -> MemoryRegion {
        self.expose_all(&[range], access)
    }

    pub(crate) fn expose_all(&self, ranges: &[AddressRange], access: Access) -> MemoryRegion {
        self.try_expose(&mr_attr(ranges, access), MrFlags::empty()).expect("register")
    }

    pub(crate) fn try_expose(&self, attr: &MrAttr<'_>, flags: MrFlags) -> Result<MemoryRegion> {
        self.target.register(&attr.key(self.fresh_key()), flags)
    }

    /// Returns the key that the initiator uses: the region's key, mapped by the initiator in RAW
    /// mode.
    pub(crate) fn key(&self, region: &MemoryRegion) -> RemoteKey {
        if self.config.has(MrMode::RAW) {
            let raw = region.raw_key().expect("raw key");
            self.initiator
                .domain
                .map_raw(region.base_addr(), region.len(), &raw)
                .expect("map the raw key")
        } else {
            region.key().expect("key")
        }
    }

    /// Allocates a buffer and registers it in the initiator's domain with these rights.
    pub(crate) fn local(&self, len: usize, access: Access) -> Local {
        self.local_of(self.bytes(len), access)
    }

    fn local_of(&self, bytes: Bytes, access: Access) -> Local {
        let attr = [bytes.range()];
        let attr = mr_attr(&attr, access).key(self.fresh_key());
        let region =
            self.initiator.register(&attr, MrFlags::empty()).expect("register the local buffer");
        Local { region, bytes }
    }

    fn scratch(&self) -> &Local {
        self.scratch.get_or_init(|| self.local(SCRATCH as usize, LOCAL))
    }

    /// Posts an operation from the initiator and waits for its completion.
    pub(crate) fn transfer(&self, operation: Operation<'_>, local: &[LocalSegment]) -> Result<u64> {
        self.post(operation, local, 1)?;
        let completion = self.completion();
        assert_eq!(completion.context, 1, "a completion of another request");
        completion.result
    }

    pub(crate) fn post(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        context: u64,
    ) -> Result<()> {
        let request = WorkRequest { operation, local, peer: self.peer, context };
        // SAFETY: the local memory belongs to the test and outlives the transfer.
        unsafe { self.initiator.endpoint.post(&request) }
    }

    pub(crate) fn completion(&self) -> Completion {
        self.initiator.wait(&[&self.target])
    }

    /// Writes bytes at an offset of the region with `key`.
    pub(crate) fn push(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<u64> {
        let local = self.scratch();
        local.bytes.put(0, bytes);
        let remote = [remote(key, offset, bytes.len() as u64)];
        self.transfer(Operation::Write { remote: &remote }, &[local.segment(0, bytes.len() as u64)])
    }

    /// Reads bytes at an offset of the region with `key`. Asserts that a failed read leaves the
    /// local buffer unchanged.
    pub(crate) fn pull(&self, key: &RemoteKey, offset: u64, len: usize) -> Result<Vec<u8>> {
        let local = self.scratch();
        let before = vec![0xEE; len];
        local.bytes.put(0, &before);
        let remote = [remote(key, offset, len as u64)];
        let moved =
            self.transfer(Operation::Read { remote: &remote }, &[local.segment(0, len as u64)]);
        let after = local.bytes.get(0, len);
        match moved {
            Ok(moved) => {
                assert_eq!(moved, len as u64, "a completed read moves all of its bytes");
                Ok(after)
            }
            Err(error) => {
                assert_eq!(after, before, "a refused read moved bytes");
                Err(error)
            }
        }
    }

    /// Adds to the 64-bit number at an offset of the region with `key`. Returns the previous value.
    pub(crate) fn fetch_add(&self, key: &RemoteKey, offset: u64, value: u64) -> Result<u64> {
        // A verbs request carries the operands, which the CPU reads.
        let operands = || match self.config.nic {
            Nic::Loopback => self.local(16, LOCAL),
            Nic::Verbs { .. } => self.local_of(Bytes::Host(HostPages::new(16)), LOCAL),
        };
        let local = self.operands.get_or_init(operands);
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
    pub(crate) fn send(
        &self,
        message: LocalSegment,
        into: LocalSegment,
    ) -> (Result<u64>, Result<u64>) {
        let receive = Operation::Receive { tag: None, from: None };
        let request =
            WorkRequest { operation: receive, local: &[into], peer: PeerId(0), context: 2 };
        // SAFETY: the memory belongs to the test and outlives the transfer.
        if let Err(error) = unsafe { self.target.endpoint.post(&request) } {
            return (Ok(0), Err(error));
        }
        let sent = self.transfer(Operation::Send { tag: None, invalidate: None }, &[message]);
        if let Err(error) = sent {
            return (Err(error), Ok(0));
        }
        (sent, self.target.wait(&[&self.initiator]).result)
    }

    /// Asserts that a write to the region succeeds and that a read returns the written bytes.
    pub(crate) fn assert_works(&self, key: &RemoteKey) {
        let bytes = b"the region is alive";
        assert_eq!(self.push(key, 0, bytes).expect("write"), bytes.len() as u64);
        assert_eq!(self.pull(key, 0, bytes.len()).expect("read"), bytes);
    }
}

/// Returns a request to register memory of a test by its addresses.
pub(crate) fn mr_attr(ranges: &[AddressRange], access: Access) -> MrAttr<'_> {
    MrAttr::new(raw(ranges), access)
}

/// Returns addresses, or a dma-buf, of memory of a test.
pub(crate) fn raw<A>(at: A) -> Raw<A> {
    // SAFETY: the tests own the memory for longer than the regions and hold no references into it.
    unsafe { Raw::new(at, Promise::ReadWrite) }
}

/// Returns a remote segment of `len` bytes at an offset of the region with `key`.
pub(crate) fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0.wrapping_add(offset)), len, key }
}
