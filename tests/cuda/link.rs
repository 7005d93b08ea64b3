//! The fake driver, the iface over it, and two endpoints of a software NIC.

use std::sync::Arc;

use hmem::{
    Access, AddressRange, AllocationKind, CacheAttr, CachedRegion, DeviceBuffer, DeviceId, Domain,
    DomainAttr, Endpoint, Hmem, Iface, Iova, MemoryRegion, MrAttr, MrFlags, Registered, RemoteKey, Result,
    cuda::{Cuda, MonitorKind, sys::Functions},
    iface::AllocRequest,
    p2p::loopback::{Loopback, Memory},
    path::P2pPolicy,
    provider::{CompletionQueue, EndpointAttr, Imports},
    transfer::{Completion, PeerId, RemoteSegment},
};
use hmem_fake_cuda::{FakeDriver, Profile};

/// Every right of peers.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// What a NIC with everything imports.
pub(crate) const IMPORTS: Imports =
    Imports { dma_buf: true, pcie_mapping_first: false, peer_memory: false, staged: true };

/// One world: fields are dropped in order, the driver last.
pub(crate) struct Link {
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    _target: Endpoint,
    peer: PeerId,
    pub(crate) domain: Domain,
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) functions: Functions,
    pub(crate) driver: FakeDriver,
}

impl Link {
    pub(crate) fn open(profile: Profile) -> Self {
        Self::with(profile, IMPORTS, P2pPolicy::Enabled, Memory::Follow)
    }

    pub(crate) fn with(profile: Profile, imports: Imports, p2p: P2pPolicy, memory: Memory) -> Self {
        Self::new(profile, imports, memory, MonitorKind::Auto, DomainAttr { p2p, ..DomainAttr::default() })
    }

    /// With a cache, over this monitor.
    pub(crate) fn cached(
        profile: Profile,
        imports: Imports,
        p2p: P2pPolicy,
        memory: Memory,
        monitor: MonitorKind,
    ) -> Self {
        let cache = Some(CacheAttr::default());
        Self::new(profile, imports, memory, monitor, DomainAttr { p2p, cache, ..DomainAttr::default() })
    }

    fn new(
        profile: Profile,
        imports: Imports,
        memory: Memory,
        monitor: MonitorKind,
        attr: DomainAttr,
    ) -> Self {
        let driver = FakeDriver::start(profile);
        // SAFETY: each function has the signature of its name in `cuda.h`, and functions live forever.
        let functions = unsafe { Functions::from_lookup(|name| driver.symbol(name)) }.expect("the table");
        let cuda =
            Arc::new(Cuda::builder().functions(functions.clone()).monitor(monitor).open().expect("open"));
        let nic = Loopback::builder().imports(imports).memory(memory).build().expect("the software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces();
        let hmem = hmem.shared_iface(Arc::clone(&cuda) as _).provider(nic).build().expect("start");
        let domain = hmem.domain("loopback", attr).expect("a domain");
        let queue = domain.open_cq(64).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let (initiator, target) = (open(), open());
        let peer = initiator.resolve(&target.name()).expect("the peer");
        Self { queue, initiator, _target: target, peer, domain, cuda, functions, driver }
    }

    pub(crate) fn iface(&self) -> Arc<dyn Iface> {
        Arc::clone(&self.cuda) as _
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        DeviceBuffer::allocate(&self.iface(), &request).expect("allocate")
    }

    /// A cached region.
    ///
    /// # Safety
    /// As of [`RegionCache::get`].
    pub(crate) unsafe fn cache_get(&self, range: AddressRange) -> CachedRegion<'_> {
        let cache = self.domain.cache().expect("a cache");
        // SAFETY: as the caller's.
        unsafe { cache.get(range, REMOTE) }.expect("registered")
    }

    /// Registers for peers. The caller keeps the memory alive until the region is closed.
    pub(crate) fn expose(&self, range: AddressRange) -> Result<MemoryRegion> {
        // SAFETY: tests close the region before they free the memory, and hold no reference into it.
        unsafe { self.domain.regattr(&MrAttr::new(&[range], REMOTE), MrFlags::empty()) }
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
}

/// Bytes that tell their position and seed apart.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 31 + seed * 97 + (at >> 8) * 7) % 251 + 1) as u8).collect()
}

/// Closes a region that owns its buffer.
pub(crate) fn close(region: Registered<DeviceBuffer>) -> DeviceBuffer {
    region.close().map_err(hmem::Error::from).expect("close")
}
