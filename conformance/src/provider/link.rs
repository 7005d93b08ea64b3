//! Two domains on one NIC. The target exposes memory, and the initiator accesses it.

use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Domain, DomainAttr, Endpoint, ErrorKind, Iova, Memory, MemoryRegion, MrMode, Region,
    RegionState, Registry, RemoteKey, Request, Result,
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, Provider},
    transfer::{Completion, PeerId, RemoteSegment},
};
use hmem_iface_system::{Simulated, System};
use hmem_p2p::path::DefaultPathSelector;

use crate::bytes::{assert_bytes, pattern};

/// All access rights that a domain's own requests can need.
pub(super) const LOCAL: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
/// All access rights that a peer's requests can need.
pub(super) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Depth of each endpoint: the maximum number of sends in flight, and of receives in flight. Each
/// completion queue is for both, and so is twice as deep.
pub(super) const DEPTH: u64 = 64;

/// One end of a link: a domain with an endpoint and a completion queue.
pub(super) struct LinkSide {
    pub(super) endpoint: Endpoint,
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) domain: Domain,
    /// The key of the next request, in modes in which the application chooses keys.
    next_key: Cell<u64>,
}

impl LinkSide {
    fn open(provider: &dyn Provider, registry: &Arc<Registry>, attr: DomainAttr) -> Self {
        let selector = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(provider, Arc::clone(registry), selector, attr);
        let domain = domain.expect("open a domain");
        let rma_event = domain.provider_domain().region_counters().is_some();
        let cq = domain.open_cq(2 * DEPTH as usize).expect("open a completion queue");
        let attr = EndpointAttr { rma_event, depth: DEPTH as usize, ..EndpointAttr::new(&cq) };
        let endpoint = domain.open_endpoint(&attr).expect("open an endpoint");
        Self { endpoint, cq, domain, next_key: Cell::new(100) }
    }

    /// Returns a key that this domain has not requested before.
    pub(super) fn fresh_key(&self) -> u64 {
        self.next_key.replace(self.next_key.get() + 1)
    }

    /// Registers memory. Binds and enables the region if the mode requires it.
    pub(super) fn register<M: Memory>(&self, memory: M, access: Access) -> Region<M> {
        let request = Request::new(memory, access).key(self.fresh_key());
        let region = self.domain.submit(request).expect("register");
        self.make_usable(&region);
        region
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
}

/// Waits until `reached` returns true. Panics after a minute, so that a test fails instead of
/// hanging. `what` names the awaited event in the panic.
pub(super) fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(Instant::now() < deadline, "{what} did not happen within a minute");
        std::thread::yield_now();
    }
}

/// An initiator and a target on one NIC, for the tests of a provider.
pub(super) struct Link {
    pub(super) initiator: LinkSide,
    pub(super) target: LinkSide,
    /// Address of the target's endpoint, for requests of the initiator.
    pub(super) peer: PeerId,
    /// A simulated device whose memory both domains can register.
    pub(super) device: Arc<Simulated>,
}

impl Link {
    pub(super) fn open(provider: &Arc<dyn Provider>) -> Self {
        Self::with(provider, P2pPolicy::Enabled)
    }

    /// Opens both domains on the provider's first NIC, with the registration mode that the NIC
    /// requires.
    pub(super) fn with(provider: &Arc<dyn Provider>, p2p: P2pPolicy) -> Self {
        let nics = provider.nics().expect("list the NICs");
        let nic = nics.first().expect("the provider has a NIC");
        let device = Arc::new(Simulated::builder().build().expect("a simulated device"));
        let mut registry = Registry::new();
        registry.add(Arc::new(System::new())).expect("add host memory");
        registry.add(Arc::<Simulated>::clone(&device)).expect("add the device");
        let registry = Arc::new(registry);
        let attr = DomainAttr { mr_mode: nic.required_mr_mode, p2p, ..DomainAttr::default() };
        let initiator = LinkSide::open(&**provider, &registry, attr.clone());
        let target = LinkSide::open(&**provider, &registry, attr);
        let peer = initiator.endpoint.resolve(&target.endpoint.name()).expect("find the target");
        Self { initiator, target, peer, device }
    }

    /// Returns whether the mode of both domains has the bits `mode`.
    pub(super) fn has(&self, mode: MrMode) -> bool {
        self.target.domain.mr_mode().effective().contains(mode)
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

    /// Writes `bytes` to the target's memory, `offset` bytes after the base address of `key`. Waits
    /// for the completion, and returns the number of bytes.
    pub(super) fn push(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<u64> {
        let source = self.initiator.register(bytes.to_vec(), LOCAL);
        let len = bytes.len() as u64;
        let remote = [remote(key, offset, len)];
        self.initiator.endpoint.write(&[source.slice(0, len)?], &remote, self.peer, 1)?;
        self.ended()
    }

    /// Reads `len` bytes of the target's memory, `offset` bytes after the base address of `key`.
    /// Waits for the completion.
    pub(super) fn pull(&self, key: &RemoteKey, offset: u64, len: u64) -> Result<Vec<u8>> {
        let sink = self.initiator.register(vec![0xEE; len as usize], LOCAL);
        let remote = [remote(key, offset, len)];
        self.initiator.endpoint.read(&[sink.slice(0, len)?], &remote, self.peer, 1)?;
        let moved = self.ended();
        let bytes = sink.close()?;
        match moved {
            Ok(moved) => assert_eq!(moved, len, "a completed read moves all of its bytes"),
            Err(_) => assert!(bytes.iter().all(|byte| *byte == 0xEE), "a failed read moved bytes"),
        }
        moved.map(|_| bytes)
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

    /// Waits for the completion of the initiator's only request in flight, and returns its result.
    pub(super) fn ended(&self) -> Result<u64> {
        let completion = self.initiator.wait(&self.target);
        assert_eq!(completion.context, 1, "a completion of another request");
        completion.result
    }

    /// Asserts that the key gives no access: a write and a read of the byte at `offset` are
    /// refused. `what` names the key in failures.
    #[track_caller]
    pub(super) fn assert_dead(&self, key: &RemoteKey, offset: u64, what: &str) {
        assert_refused(self.push(key, offset, &[0xFF]), what);
        assert_refused(self.pull(key, offset, 1), what);
    }

    /// Asserts that the key gives access: a write and a read succeed.
    #[track_caller]
    pub(super) fn assert_works(&self, key: &RemoteKey) {
        let bytes = pattern(9, 19);
        assert_eq!(self.push(key, 0, &bytes).expect("write"), 19, "bytes written");
        assert_bytes(&self.pull(key, 0, 19).expect("read"), &bytes, "bytes read");
    }
}

/// Returns a remote segment of `len` bytes, `offset` bytes after the base address of `key`.
pub(super) fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0.wrapping_add(offset)), len, key }
}

/// Asserts that a request failed with an access error. Every kind of access error is accepted,
/// because RDMA devices do not report the reason. `what` names the request in failures.
#[track_caller]
pub(super) fn assert_refused<T>(result: Result<T>, what: &str) {
    match result {
        Ok(_) => panic!("{what} succeeded"),
        Err(error) => assert!(
            matches!(
                error.kind(),
                ErrorKind::AccessDenied
                    | ErrorKind::InvalidKey
                    | ErrorKind::OutOfBounds
                    | ErrorKind::BadAddress
            ),
            "{what}: {error}"
        ),
    }
}

/// Returns the bytes of a region's memory.
pub(super) fn contents<M: Memory>(region: &Region<M>) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes).expect("copy from the memory");
    bytes
}
