//! Tests of the write ordering with which a domain registers memory.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use hmem::{
    Access, AddressRange, AllocationKind, Batch, CacheAttr, DeviceBuffer, DeviceId, Domain,
    DomainAttr, DomainBindFlags, Hmem, MemoryRegion, MrMode, Promise, Raw, Request, Result,
    WriteOrdering,
    event_queue::EventQueue,
    iface::AllocRequest,
    loopback::Loopback,
    provider::{
        DomainRequest, LiveObjects, Piece, Provider, ProviderAttr, ProviderDomain, ProviderRegion,
        SubRegions, Transport,
    },
    registration::Registration,
    system::{SIMULATED, Simulated},
};

/// The write orderings of registrations, in order.
type Record = Arc<Mutex<Vec<WriteOrdering>>>;

/// A software NIC that records the write ordering of each registration.
#[derive(Debug)]
struct Recording(Loopback, Record);

impl Provider for Recording {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.0.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(RecordingDomain(self.0.open_domain(request)?, Arc::clone(&self.1))))
    }
}

#[derive(Debug)]
struct RecordingDomain(Arc<dyn ProviderDomain>, Record);

impl RecordingDomain {
    fn record(&self, request: &Registration<'_>) {
        self.1.lock().expect("not poisoned").push(request.ordering);
    }
}

// SAFETY: every call goes to the software NIC's domain, which upholds the contract.
unsafe impl ProviderDomain for RecordingDomain {
    fn attr(&self) -> &ProviderAttr {
        self.0.attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        self.record(request);
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.register(request, pieces) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.0.deregister(region)
    }

    fn transport(&self) -> Option<&dyn Transport> {
        self.0.transport()
    }

    fn live(&self) -> LiveObjects {
        self.0.live()
    }

    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        Some(self)
    }
}

impl SubRegions for RecordingDomain {
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        self.record(request);
        let inner = self.0.sub_regions().expect("the software NIC has sub-regions");
        inner.register_sub(base, request, offset, len)
    }
}

const ACCESS: Access = Access::REMOTE_WRITE;

struct World {
    hmem: Hmem,
    provider: Recording,
}

impl World {
    fn new() -> Self {
        let simulated = Simulated::builder().build().expect("a simulated device");
        let builder = Hmem::builder().without_vendor_ifaces().iface(simulated);
        let loopback = Loopback::builder().build().expect("a software NIC");
        Self {
            hmem: builder.build().expect("builds"),
            provider: Recording(loopback, Record::default()),
        }
    }

    fn domain(&self, ordering: Option<WriteOrdering>) -> Domain {
        let default = DomainAttr::default();
        let ordering = ordering.unwrap_or(default.ordering);
        let (mr_mode, cache) = (MrMode::empty(), Some(CacheAttr::default()));
        let attr = DomainAttr { mr_mode, cache, ordering, ..default };
        self.hmem.domain_on(&self.provider, attr).expect("opens")
    }

    fn device_buffer(&self) -> DeviceBuffer {
        let iface = self.hmem.iface(SIMULATED).expect("it was added");
        let request = AllocRequest { len: 8192, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(iface, &request).expect("device memory")
    }

    /// Registers in every way that takes no ordering. Asserts that each has `expected`.
    fn registers_with(&self, domain: &Domain, expected: WriteOrdering) {
        let check = |way: &str| {
            let orderings = std::mem::take(&mut *self.provider.1.lock().expect("not poisoned"));
            assert!(!orderings.is_empty(), "{way} registers");
            assert!(orderings.iter().all(|found| *found == expected), "{way}: {orderings:?}");
        };
        let host = domain.register(vec![0_u8; 8192], ACCESS).expect("registers");
        check("host memory");
        let device = domain.register(self.device_buffer(), ACCESS).expect("registers");
        check("device memory");
        for (memory, region) in [("host", &*host), ("device", &*device)] {
            let part = region.range().slice(0, 64).expect("a part");
            let sub: MemoryRegion = region.sub(part, ACCESS, None).expect("a sub-region");
            sub.close().expect("nothing depends on it");
            check(&format!("a sub-region of {memory} memory"));
        }
        let cache = domain.cache().expect("a cache");
        let (vec, buffer) = (vec![0_u8; 4096], self.device_buffer());
        for range in [AddressRange::of(&vec), buffer.range()] {
            // SAFETY: no transfer uses the regions, and the memory outlives them.
            let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
            drop(cache.get(memory, ACCESS).expect("registers"));
            check("a cached lookup");
            drop(domain.register(memory, ACCESS).expect("registers"));
            check("memory by its addresses");
        }
        cache.evict_idle();
        let batch = Batch::on(&[domain])
            .add(Request::new(self.device_buffer(), ACCESS))
            .add_views(self.device_buffer(), [(0..64, ACCESS)])
            .register();
        drop(batch.expect("registers"));
        check("a batch");
        let events = Arc::new(EventQueue::new());
        domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
        let pending = domain.register(vec![0_u8; 4096], ACCESS).expect("a sound request");
        let event = events.wait(Duration::from_secs(60)).expect("an event");
        event.result.expect("registered");
        check("an asynchronous registration");
        drop(pending);
    }
}

/// "Data, then flag" polling works without a setting.
#[test]
fn registrations_are_strictly_ordered_by_default() {
    let world = World::new();
    assert_eq!(WriteOrdering::default(), WriteOrdering::Strict);
    world.registers_with(&world.domain(None), WriteOrdering::Strict);
}

#[test]
fn every_registration_has_the_ordering_of_its_domain() {
    let world = World::new();
    for ordering in [WriteOrdering::Relaxed, WriteOrdering::Strict] {
        world.registers_with(&world.domain(Some(ordering)), ordering);
    }
}

/// EVT-01
#[test]
fn registration_may_have_another_ordering_than_its_domain() {
    let world = World::new();
    for is_asynchronous in [false, true] {
        for of_domain in [WriteOrdering::Relaxed, WriteOrdering::Strict] {
            let domain = world.domain(Some(of_domain));
            let events = Arc::new(EventQueue::new());
            if is_asynchronous {
                domain.bind(&events, DomainBindFlags::REG_MR).expect("the first queue");
            }
            for requested in [WriteOrdering::Strict, WriteOrdering::Relaxed] {
                world.provider.1.lock().expect("not poisoned").clear();
                let request = Request::new(world.device_buffer(), ACCESS).ordering(requested);
                let region = domain.submit(request);
                if is_asynchronous {
                    let event = events.wait(Duration::from_secs(60)).expect("an event");
                    event.result.expect("registered");
                }
                region.expect("a sound request").close().expect("nothing depends on it");
                assert_eq!(*world.provider.1.lock().expect("not poisoned"), [requested]);
            }
        }
    }
}
