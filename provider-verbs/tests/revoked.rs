//! Revoked memory: over a fake library that moves bytes, and over a driver whose dma-bufs a test
//! can revoke.

mod fake;
mod support;
#[path = "../../tests/trials/mod.rs"]
mod trials;
mod wire;

use std::{
    fs, io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hmem_core::{
    Access, AddressRange, AllocationKind, AuthKey, CacheAttr, DeviceBuffer, DeviceId, Domain,
    DomainAttr, ErrorKind, Iface, MemoryRegion, Path, Promise, Raw, RegionState, Registry,
    iface::AllocRequest,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator},
    provider::{Backing, Piece, ProviderRegion, Registration, Revocations},
};
use hmem_iface_system::{DmaBufKind, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{Verbs, sys::WcStatus};
use support::{LOCAL, Pages, REMOTE, Side, device, remote, segment};
use trials::{Outcome, Skipped, trials};
use wire::{Misbehaviour, misbehave};

trials! {
    /// LIFE-07
    check_finds_memory_whose_keys_fail,
    /// LIFE-07
    check_tells_refused_keys_from_other_failures,
    /// LIFE-07
    check_that_cannot_run_finds_nothing,
    /// LIFE-07
    revoked_dma_buf_fails_requests_and_is_found_by_a_check,
    /// LIFE-07
    cache_drops_a_revoked_dma_buf,
}

/// The ranges that were invalidated, each with the cause.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<(AddressRange, InvalidationCause)>>);

impl Invalidator for Recorder {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        self.0.lock().expect("lock").push((range, cause));
    }

    fn invalidate_start(&self, _: AddressRange, _: InvalidationCause) -> InvalidationToken {
        unreachable!("a revocation is a single notification")
    }

    fn invalidate_end(&self, _: InvalidationToken) {}

    fn close_gate(&self) -> GateToken {
        unreachable!("the revoked memory is known")
    }

    fn open_gate(&self, _: GateToken) {}
}

/// A domain of the fake library, with a region of two pages that a peer-memory client resolves.
struct Fake {
    domain: Domain,
    region: ProviderRegion,
    pages: Pages,
}

impl Fake {
    fn open(is_rxe: bool) -> Self {
        let functions = wire::functions();
        misbehave(Misbehaviour { is_rxe, ..Misbehaviour::default() });
        let verbs = Verbs::builder().functions(functions).build().expect("start");
        let attr = DomainAttr::default();
        let paths = Arc::new(DefaultPathSelector::new());
        let domain = Domain::open(&verbs, Arc::new(Registry::new()), paths, attr).expect("open");
        let pages = Pages::new(8192);
        let (ranges, auth_key) = ([pages.range()], AuthKey::default());
        let registration = Registration::new(&ranges, Access::REMOTE_WRITE, &auth_key);
        let iface: Arc<dyn Iface> = Arc::new(hmem_iface_system::System::new());
        let backing = |address| Backing::PeerMemory { iface: &iface, address };
        let piece = |offset| {
            let range = pages.part(offset, 4096);
            Piece { range, backing: backing(range.start()) }
        };
        let provider = domain.provider_domain();
        // SAFETY: the pages stay mapped until the region is deregistered.
        let region = unsafe { provider.register(&registration, &[piece(0), piece(4096)]) };
        let region = region.expect("register");
        Self { domain, region, pages }
    }

    fn revocations(&self) -> &dyn Revocations {
        self.domain.provider_domain().revocations().expect("the facet")
    }

    fn close(self) {
        self.domain.provider_domain().deregister(self.region).expect("deregister");
        let live = self.domain.live();
        assert_eq!((live.regions, live.endpoints), (0, 0));
        self.domain.close().map_err(|rejected| rejected.error).expect("close");
    }
}

/// Memory is revoked for good once the NIC refuses one of its keys, and listeners learn of
/// it once.
fn check_finds_memory_whose_keys_fail() -> Outcome {
    let fake = Fake::open(false);
    let (recorder, revocations) = (Arc::<Recorder>::default(), fake.revocations());
    let listener: Arc<dyn Invalidator> = Arc::<Recorder>::clone(&recorder);
    revocations.listen(Arc::downgrade(&listener));
    assert!(!revocations.check_revoked(fake.region).expect("check"));
    wire::revoke(fake.pages.address + 4096);
    assert!(!revocations.is_revoked(fake.region), "nothing was reported");
    assert!(revocations.check_revoked(fake.region).expect("check"));
    assert!(revocations.is_revoked(fake.region));
    assert!(revocations.check_revoked(fake.region).expect("check"));
    let notified = [0, 4096].map(|at| (fake.pages.part(at, 4096), InvalidationCause::Revoke));
    assert_eq!(*recorder.0.lock().expect("lock"), notified);
    fake.close();
    Ok(())
}

/// A send that fails for a reason other than its local key does not make memory count as revoked.
fn check_tells_refused_keys_from_other_failures() -> Outcome {
    for is_rxe in [false, true] {
        let fake = Fake::open(is_rxe);
        let answer = |status| {
            misbehave(Misbehaviour { local_key: Some(status), ..Misbehaviour::default() });
            fake.revocations().check_revoked(fake.region)
        };
        wire::revoke(fake.pages.address);
        let error = answer(WcStatus::IBV_WC_RETRY_EXC_ERR).expect_err("the link failed");
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error:#}");
        assert!(!fake.revocations().is_revoked(fake.region));
        let flushed = answer(WcStatus::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(flushed.is_ok(), is_rxe, "rxe's status for a refused local key: {flushed:?}");
        assert_eq!(fake.revocations().is_revoked(fake.region), is_rxe);
        fake.close();
    }
    Ok(())
}

/// A NIC that cannot transfer at all does not make memory count as revoked.
fn check_that_cannot_run_finds_nothing() -> Outcome {
    let fake = Fake::open(false);
    misbehave(Misbehaviour { polls_fail: true, ..Misbehaviour::default() });
    fake.revocations().check_revoked(fake.region).expect_err("no poll works");
    assert!(!fake.revocations().is_revoked(fake.region));
    misbehave(Misbehaviour::default());
    assert!(!fake.revocations().check_revoked(fake.region).expect("check"));
    fake.close();
    Ok(())
}

/// The device under test, and a simulated device that exports genuine dma-bufs.
///
/// A revocation ends all dma-bufs of the NIC, so tests hold the lock.
struct Setup {
    name: String,
    verbs: Verbs,
    registry: Arc<Registry>,
    iface: Arc<dyn Iface>,
    _lock: MutexGuard<'static, ()>,
}

/// The file whose writer revokes all dma-bufs that a device has imported
/// (`tests/vm/rxe-dmabuf/rxe_dmabuf.c`).
const REVOKE: &str = "/sys/module/rdma_rxe/parameters/revoke_dma_bufs";

impl Setup {
    fn open() -> Result<Self, Skipped> {
        static LOCK: Mutex<()> = Mutex::new(());
        let name = device()?;
        if !fs::exists(REVOKE).expect("look for the file") {
            return Err(Skipped(format!("{name} has no dma-bufs that a test can revoke")));
        }
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let simulated = Simulated::builder().dma_buf(DmaBufKind::Udmabuf).build();
        let iface: Arc<dyn Iface> = Arc::new(simulated.expect("a device with dma-bufs"));
        let mut registry = Registry::new();
        registry.add(Arc::clone(&iface)).expect("add the device");
        let (verbs, registry) =
            (Verbs::builder().build().expect("load libibverbs"), registry.into());
        Ok(Self { name, verbs, registry, iface, _lock: lock })
    }

    fn domain(&self) -> Domain {
        let attr = DomainAttr {
            nic: Some(self.name.clone()),
            cache: Some(CacheAttr::default()),
            ..DomainAttr::default()
        };
        let paths = Arc::new(DefaultPathSelector::new());
        Domain::open(&self.verbs, Arc::clone(&self.registry), paths, attr).expect("open a domain")
    }

    fn buffer(&self) -> DeviceBuffer {
        let request =
            AllocRequest { len: 16 << 10, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(&self.iface, &request).expect("device memory")
    }

    fn revoke(&self) -> io::Result<()> {
        fs::write(REVOKE, &self.name)
    }
}

fn assert_revoked(region: &MemoryRegion) {
    assert_eq!(region.decision().expect("decided").path, Path::DmaBuf);
    assert_eq!(region.state(), RegionState::Enabled, "the driver reports no revocation");
    let error = region.check().expect_err("a revoked region");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:#}");
    assert_eq!(region.state(), RegionState::Revoked);
}

/// After a revocation, requests of peers and of the owner fail with typed errors, and a
/// check finds the revoked regions. Regions of host memory work.
fn revoked_dma_buf_fails_requests_and_is_found_by_a_check() -> Outcome {
    let setup = Setup::open()?;
    let (near, far) = (Side::new(setup.domain()), Side::new(setup.domain()));
    let connect = || {
        let names = [near.endpoint.name(), far.endpoint.name()];
        near.connect(&names[1]).expect("connect");
        far.connect(&names[0]).expect("connect");
    };
    connect();
    let host = Pages::new(4096);
    let bytes = host.fill(3);
    let host_region = near.register(host.range(), LOCAL).expect("register");
    let from_host = || segment(host.range(), host_region.desc().expect("desc"));
    let far_region = far.domain.register(setup.buffer(), REMOTE).expect("register");
    let own_region = near.domain.register(setup.buffer(), LOCAL).expect("register");
    let key = far_region.key().expect("key");
    near.write(from_host(), remote(&key, 0, 4096)).expect("write");
    let mut written = vec![0; 4096];
    far_region.read(0, &mut written).expect("copy");
    assert_eq!(written, bytes);
    far_region.check().expect("not revoked");
    own_region.check().expect("not revoked");
    setup.revoke().expect("revoke");
    let error = near.write(from_host(), remote(&key, 0, 4096)).expect_err("revoked memory");
    assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error:#}");
    connect();
    let own = own_region.range().slice(0, 4096).expect("a part");
    let target = Pages::new(4096);
    let target_region = far.register(target.range(), REMOTE).expect("register");
    let key = target_region.key().expect("key");
    let from_own = segment(own, own_region.desc().expect("desc"));
    let error = near.write(from_own, remote(&key, 0, 4096)).expect_err("revoked memory");
    println!("a request with revoked local memory: {error:#}");
    assert_eq!(target.get(0, 4096), [0; 4096], "nothing was written");
    assert_revoked(&far_region);
    assert_revoked(&own_region);
    host_region.check().expect("host memory");
    connect();
    near.write(from_host(), remote(&key, 0, 4096)).expect("host memory still works");
    assert_eq!(target.get(0, 4096), bytes);
    let buffer = far_region.close().map_err(|rejected| rejected.error).expect("close");
    let again = far.domain.register(buffer, REMOTE).expect("register again");
    again.check().expect("a new export");
    near.write(from_host(), remote(&again.key().expect("key"), 0, 4096)).expect("write");
    drop((again, own_region, target_region, host_region));
    assert_eq!((near.domain.live().regions, far.domain.live().regions), (0, 0));
    Ok(())
}

/// Once a check has found a revoked region, the cache returns it no more, and registers
/// the memory anew.
fn cache_drops_a_revoked_dma_buf() -> Outcome {
    let setup = Setup::open()?;
    let domain = setup.domain();
    let cache = domain.cache().expect("a cache");
    let buffer = setup.buffer();
    // SAFETY: the buffer outlives the domain's cache, and nothing else uses it.
    let memory = unsafe { Raw::new(buffer.allocation().range, Promise::ReadWrite) };
    let get = || cache.get(memory, REMOTE).expect("register");
    let old = get();
    setup.revoke().expect("revoke");
    assert_revoked(&old);
    let new = get();
    new.check().expect("a new registration");
    assert_eq!(new.state(), RegionState::Enabled);
    let counts = cache.statistics();
    assert_eq!((counts.registrations, counts.hits), (2, 0), "{counts:?}");
    assert_eq!(counts.invalidations(InvalidationCause::Revoke), 1, "{counts:?}");
    drop((old, new));
    cache.evict_idle();
    assert_eq!(domain.live().regions, 0);
    Ok(())
}
