//! A runtime, the iface over it, and two endpoints of a software NIC.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hmem::{
    Access, AllocationKind, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint, Hmem,
    Iface, IfaceKind, Iova, RemoteKey, Result,
    iface::AllocRequest,
    loopback::{Loopback, Memory},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, Imports},
    rocr::{Rocr, sys::Functions},
    transfer::{Completion, PeerId, RemoteSegment},
};
use hmem_fake_rocr::{FakeRuntime, Live, Profile};

use crate::model;

/// All rights of peers.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Returns true if AMD's own runtime is selected.
pub(crate) fn is_model() -> bool {
    std::env::var("HMEM_ROCR").is_ok_and(|name| name == "model")
}

/// Opens an iface over the fake runtime, or over the model GPU.
pub(crate) fn open(fake: Option<&FakeRuntime>) -> Rocr {
    let functions = match fake {
        // SAFETY: each function has the signature of its name in AMD's headers, and functions live
        // forever.
        Some(fake) => unsafe { Functions::from_lookup(|name| fake.symbol(name)) },
        None => Ok(model::functions()),
    };
    Rocr::builder().functions(functions.expect("the table")).open().expect("a GPU")
}

static TURN: Mutex<()> = Mutex::new(());

/// Objects of one test. Fields are dropped in order, the runtime last.
pub(crate) struct World {
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    target: Endpoint,
    peer: PeerId,
    pub(crate) domain: Domain,
    pub(crate) hmem: Hmem,
    pub(crate) rocr: Arc<Rocr>,
    pub(crate) fake: Option<FakeRuntime>,
    _turn: MutexGuard<'static, ()>,
}

impl World {
    pub(crate) fn new(profile: Profile, p2p: P2pPolicy, memory: Memory, cached: bool) -> Self {
        let cache = cached.then(CacheAttr::default);
        Self::build(profile, memory, false, DomainAttr { p2p, cache, ..DomainAttr::default() })
    }

    pub(crate) fn with_pcie_mapping_first(
        profile: Profile,
        p2p: P2pPolicy,
        memory: Memory,
    ) -> Self {
        Self::build(profile, memory, true, DomainAttr { p2p, ..DomainAttr::default() })
    }

    pub(crate) fn without_monitor(profile: Profile) -> Self {
        let cache = Some(CacheAttr::default().without_monitors([IfaceKind::ROCR]));
        let attr = DomainAttr { cache, ..DomainAttr::default() };
        Self::build(profile, Memory::Follow, false, attr)
    }

    fn build(profile: Profile, memory: Memory, pcie_mapping_first: bool, attr: DomainAttr) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = (!is_model()).then(|| FakeRuntime::start(profile));
        let rocr = Arc::new(open(fake.as_ref()));
        let imports =
            Imports { dma_buf: true, pcie_mapping_first, peer_memory: false, staged: true };
        let nic = Loopback::builder().imports(imports).memory(memory).build().expect("a NIC");
        let hmem = Hmem::builder().without_vendor_ifaces();
        let hmem = hmem.shared_iface(Arc::clone(&rocr) as _).provider(nic).build().expect("start");
        let domain = hmem.domain("loopback", attr).expect("a domain");
        let queue = domain.open_cq(64).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let (initiator, target) = (open(), open());
        let peer = initiator.resolve(&target.name()).expect("the peer");
        Self { queue, initiator, target, peer, domain, hmem, rocr, fake, _turn: turn }
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        let iface: Arc<dyn Iface> = Arc::clone(&self.rocr) as _;
        DeviceBuffer::allocate(&iface, &request).expect("allocate")
    }

    fn wait(&self) -> Result<()> {
        let mut done: Vec<Completion> = Vec::new();
        while done.is_empty() {
            self.queue.read(&mut done, 1)?;
        }
        done.remove(0).result.map(drop)
    }

    /// Writes through the NIC, at `offset` of the region that the key is of.
    pub(crate) fn put(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<()> {
        let source = self.domain.register(bytes.to_vec(), Access::WRITE)?;
        let len = bytes.len() as u64;
        let remote = [RemoteSegment { address: Iova(key.base().0 + offset), len, key }];
        self.initiator.write(&[source.slice(0, len)?], &remote, self.peer, 1)?;
        self.wait()?;
        source.close()?;
        Ok(())
    }

    /// Reads through the NIC.
    pub(crate) fn get(&self, key: &RemoteKey, offset: u64, len: usize) -> Result<Vec<u8>> {
        let into = self.domain.register(vec![0u8; len], Access::READ)?;
        let remote = [RemoteSegment { address: Iova(key.base().0 + offset), len: len as u64, key }];
        self.initiator.read(&[into.slice(0, len as u64)?], &remote, self.peer, 2)?;
        self.wait()?;
        Ok(into.close()?)
    }

    /// Closes everything. Checks that nothing is left in the fake runtime and that no rule of the
    /// headers was violated.
    pub(crate) fn end(self) {
        let Self { queue, initiator, target, domain, hmem, rocr, fake, .. } = self;
        drop((initiator, target, queue, domain, hmem));
        let rocr = Arc::into_inner(rocr).expect("no other owner of the iface");
        rocr.close().map_err(hmem::Error::from).expect("close");
        if let Some(fake) = fake {
            assert_eq!(fake.live(), Live::default());
            assert_eq!(fake.violations(), Vec::<String>::new());
        }
    }
}

/// Returns bytes that differ by position and seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 31 + seed * 97 + (at >> 8) * 7) % 251 + 1) as u8).collect()
}
