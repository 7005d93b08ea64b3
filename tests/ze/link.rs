//! A driver, the iface over it, and two endpoints of a software NIC.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hmem::{
    Access, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint,
    Hmem, Iface, Iova, MemoryRegion, MrAttr, MrFlags, RemoteKey, Result,
    iface::AllocRequest,
    loopback::{Loopback, Memory},
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
    ze::{LevelZero, sys::Functions},
};
use hmem_fake_ze::{FakeDriver, Profile};

/// All rights of peers.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Returns true if the real driver is selected instead of the fake.
pub(crate) fn real() -> bool {
    std::env::var("HMEM_ZE").is_ok_and(|names| names.split(',').any(|name| name.trim() == "real"))
}

/// Returns the profiles of the drivers to test.
pub(crate) fn profiles() -> Vec<Profile> {
    if real() { vec![Profile::without_exports()] } else { Profile::all() }
}

static TURN: Mutex<()> = Mutex::new(());

/// Objects of one test. Fields are dropped in order, the driver last.
pub(crate) struct Link {
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    _target: Endpoint,
    peer: PeerId,
    pub(crate) domain: Domain,
    pub(crate) hmem: Hmem,
    pub(crate) ze: Arc<LevelZero>,
    /// The fake driver, unless the real one is selected.
    pub(crate) driver: Option<FakeDriver>,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Link {
    pub(crate) fn open(profile: Profile, attr: DomainAttr) -> Self {
        let turn = real().then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner));
        let driver = (!real()).then(|| FakeDriver::start(profile));
        let ze = match &driver {
            Some(fake) => {
                // SAFETY: each function has the signature of its name in `ze_api.h`, and functions
                // live forever.
                let functions = unsafe { Functions::from_lookup(|name| fake.symbol(name)) };
                LevelZero::builder().functions(functions.expect("the table")).open()
            }
            None => LevelZero::open(),
        };
        let ze = Arc::new(ze.expect("a device"));
        let nic = Loopback::builder().memory(Memory::Pinned).build().expect("the software NIC");
        let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&ze) as _);
        let hmem = hmem.provider(nic).build().expect("start");
        let domain = hmem.domain("loopback", attr).expect("a domain");
        let queue = domain.open_cq(64).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let (initiator, target) = (open(), open());
        let peer = initiator.resolve(&target.name()).expect("the peer");
        Self { queue, initiator, _target: target, peer, domain, hmem, ze, driver, _turn: turn }
    }

    pub(crate) fn iface(&self) -> Arc<dyn Iface> {
        Arc::clone(&self.ze) as _
    }

    pub(crate) fn buffer(&self, len: u64, kind: AllocationKind, device: DeviceId) -> DeviceBuffer {
        let request = AllocRequest { len, device, kind };
        DeviceBuffer::allocate(&self.iface(), &request).expect("allocate")
    }

    /// Registers for peers. The caller keeps the memory until the region is closed.
    pub(crate) fn expose(&self, range: AddressRange) -> Result<MemoryRegion> {
        // SAFETY: tests close the region before they free the memory, and hold no reference into
        // it.
        unsafe { self.domain.regattr(&MrAttr::new(&[range], REMOTE), MrFlags::empty()) }
    }

    fn wait(&self) -> Result<()> {
        let mut done = Vec::new();
        while done.is_empty() {
            self.queue.read(&mut done, 1)?;
        }
        done.remove(0).result.map(drop)
    }

    /// Writes through the NIC.
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

/// Returns bytes that differ by position and seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 31 + seed * 97 + (at >> 8) * 7) % 251 + 1) as u8).collect()
}
