//! Tests of providers with few facets: `hmem-core` answers for the missing ones. One provider has
//! transfers and no other facet. The other implements only the four required methods of a domain.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hmem::{
    Access, AddressRange, Allocation, AllocationKind, BindFlags, DeviceBuffer, DeviceId, Domain,
    DomainAttr, Error, ErrorKind, Hmem, IfaceExt, Iova, LocalKey, MrFlags, MrMode, Promise, Raw,
    RawKey, RegionState, Request, Result, SparseRegion,
    iface::AllocRequest,
    loopback::Loopback,
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, Features, Imports, KeyRequest, LiveObjects,
        Nic, Piece, Provider, ProviderAttr, ProviderDomain, ProviderRegion, Registration,
        Transport,
    },
    system::{FreeDetection, SIMULATED, Simulated},
};

/// A provider over the software NIC that hides its optional traits (facets), except transfers.
#[derive(Debug)]
struct Bare {
    nic: Loopback,
    panics: Arc<Panics>,
}

/// The panics of a provider.
#[derive(Debug, Default)]
struct Panics {
    /// True to panic in the next deregistration.
    deregister: AtomicBool,
    /// The number of the registration that panics, counted from 1. 0 for none.
    register: AtomicU64,
}

impl Provider for Bare {
    fn name(&self) -> &str {
        "bare"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.nic.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        let panics = Arc::clone(&self.panics);
        Ok(Arc::new(BareDomain(self.nic.open_domain(request)?, panics)))
    }
}

#[derive(Debug)]
struct BareDomain(Arc<dyn ProviderDomain>, Arc<Panics>);

// SAFETY: each call is forwarded to the software NIC's domain, which upholds the trait's contract.
unsafe impl ProviderDomain for BareDomain {
    fn attr(&self) -> &ProviderAttr {
        self.0.attr()
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let left = self.1.register.load(Ordering::SeqCst);
        self.1.register.store(left.saturating_sub(1), Ordering::SeqCst);
        assert!(left != 1, "by the test");
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.register(&Registration { enabled: true, ..*request }, pieces) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        assert!(!self.1.deregister.swap(false, Ordering::SeqCst), "by the test");
        self.0.deregister(region)
    }

    fn transport(&self) -> Option<&dyn Transport> {
        self.0.transport()
    }

    fn live(&self) -> LiveObjects {
        self.0.live()
    }
}

fn open(mode: MrMode) -> Domain {
    let nic = Loopback::builder().needs(mode).build().expect("a software NIC");
    let bare = Bare { nic, panics: Arc::default() };
    let hmem = Hmem::builder().without_vendor_ifaces().provider(bare).build().expect("start");
    let attr = DomainAttr { mr_mode: mode, ..DomainAttr::default() };
    hmem.domain("bare", attr).expect("open a domain")
}

#[test]
fn domain_without_facets_transfers() {
    let domain = open(MrMode::empty());
    assert_eq!(domain.features(), Features::TRANSPORT);
    let region = domain.register(vec![7u8; 64], Access::all()).expect("register");
    let cq = domain.open_cq(8).expect("open a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("it reaches itself");
    let key = region.key().expect("one number over the length");
    let remote = hmem::transfer::RemoteSegment { address: Iova(32), len: 32, key: &key };
    let local = region.slice(0, 32).expect("inside");
    endpoint.write(&[local], &[remote], peer, 5).expect("post");
    let mut done = Vec::new();
    assert_eq!(cq.read(&mut done, 1).expect("read"), 1);
    assert_eq!(*done[0].result.as_ref().expect("write"), 32);
    assert_eq!((domain.progress().expect("nothing waits for it"), domain.staging_bytes()), (0, 0));
    endpoint.close().expect("close the endpoint");
    region.close().expect("close the region");
    assert_eq!(domain.live(), LiveObjects::default());
}

#[test]
fn calls_that_need_a_missing_facet_are_refused() {
    let refused = |error: Error, kind: ErrorKind| {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(format!("{error:#}").contains("loopback/loop0"), "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
    };
    let domain = open(MrMode::empty());
    let region = domain.register(vec![0u8; 4096], Access::all()).expect("register");
    let part = region.range().slice(0, 64).expect("inside");
    refused(region.sub(part, Access::READ, None).unwrap_err(), ErrorKind::Unsupported);
    refused(region.refresh(&[]).unwrap_err(), ErrorKind::NoSys);
    refused(region.raw_key().unwrap_err(), ErrorKind::Unsupported);
    refused(region.check().unwrap_err(), ErrorKind::Unsupported);
    let raw = RawKey(vec![0; 32]);
    refused(domain.map_raw(Iova(0), 64, &raw).unwrap_err(), ErrorKind::Unsupported);
    refused(domain.unmap_key(&region.key().expect("key")).unwrap_err(), ErrorKind::Unsupported);
    refused(domain.alloc_type_1_window().unwrap_err(), ErrorKind::Unsupported);
    let count = region.bind_counter(&Arc::default(), BindFlags::REMOTE_WRITE);
    refused(count.unwrap_err(), ErrorKind::NoSys);
    assert_eq!(domain.live().regions, 1);

    let domain = open(MrMode::ENDPOINT);
    let region = domain.register(vec![0u8; 64], Access::all()).expect("register");
    let cq = domain.open_cq(8).expect("open a queue");
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
    refused(region.bind_endpoint(&endpoint).unwrap_err(), ErrorKind::NoSys);
}

#[test]
fn disabled_region_is_enabled_without_the_facet() {
    let domain = open(MrMode::RMA_EVENT);
    let request = Request::new(vec![0u8; 64], Access::all()).flags(MrFlags::RMA_EVENT);
    let region = domain.submit(request).expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    region.enable().expect("it was usable all along");
    assert_eq!(region.state(), RegionState::Enabled);
}

/// The length of one part of a [`Sparse`] world.
const STEP: u64 = 64 << 10;

/// A sparse region over reserved addresses of a simulated device, on a bare provider.
struct Sparse {
    device: Arc<Simulated>,
    addresses: AddressRange,
    domain: Domain,
    region: SparseRegion,
    panics: Arc<Panics>,
}

impl Sparse {
    fn new(steps: u64) -> Self {
        let device = Simulated::builder().free_detection(FreeDetection::Callback);
        let device = Arc::new(device.build().expect("a simulated device"));
        let panics = Arc::<Panics>::default();
        let nic = Loopback::builder().build().expect("a software NIC");
        let hmem = Hmem::builder()
            .without_vendor_ifaces()
            .shared_iface(Arc::clone(&device) as _)
            .provider(Bare { nic, panics: Arc::clone(&panics) })
            .build()
            .expect("start");
        let domain = hmem.domain("bare", DomainAttr::default()).expect("open a domain");
        let addresses = device.reserve(steps * STEP).expect("reserve");
        // SAFETY: no reference to the memory exists, and registrations keep it allocated.
        let memory = unsafe { Raw::new(addresses, Promise::ReadWrite) };
        let region = SparseRegion::new(&[&domain], memory, Access::REMOTE_READ).expect("a region");
        Self { device, addresses, domain, region, panics }
    }

    fn map(&self, step: u64) -> Allocation {
        let range = self.addresses.slice(step * STEP, STEP).expect("inside");
        self.device.map(range, DeviceId(0)).expect("map")
    }
}

/// LIFE-03
#[test]
fn sparse_region_keeps_withdrawing_after_its_provider_panicked() {
    let world = Sparse::new(2);
    let Sparse { device, domain, region, panics, .. } = &world;
    let mapped = [0, 1].map(|step| world.map(step));
    region.refresh().expect("refresh");
    let mut updates = region.subscribe();
    assert!(updates.next().is_some() && domain.live().regions == 2);
    panics.deregister.store(true, Ordering::SeqCst);
    for allocation in &mapped {
        // SAFETY: only registrations use the memory, and they keep it.
        unsafe { device.free(allocation) }.expect("unmap");
        // The region's thread publishes a generation without the part.
        updates.wait(Duration::from_secs(60)).expect("a new generation");
        let left = region.parts().len();
        let panics = panics.deregister.load(Ordering::SeqCst);
        assert!(!panics, "the first deregistration panicked; left: {left}");
    }
    assert_eq!((region.parts().len(), domain.live().regions), (0, 0), "the first was retried");
    assert_eq!(device.stats().subscriptions, 0);
}

/// LIFE-02
#[test]
fn sparse_region_knows_its_parts_after_its_provider_panicked() {
    let world = Sparse::new(3);
    let Sparse { domain, region, panics, .. } = &world;
    world.map(2);
    region.refresh().expect("refresh");
    // The first new part lies before the old one. The second makes the provider panic.
    for step in [0, 1] {
        world.map(step);
    }
    panics.register.store(2, Ordering::SeqCst);
    let panicked = catch_unwind(AssertUnwindSafe(|| region.refresh().map(drop)));
    assert!(panicked.is_err() && domain.live().regions == 2);
    region.refresh().expect("the next call");
    let parts: Vec<_> = region.parts().iter().map(|part| part.range).collect();
    assert!(parts.is_sorted());
    assert_eq!((parts.len(), domain.live().regions), (3, 3), "each part is registered once");
}

/// A provider that only registers, for requests that other code posts. It records the ranges that a
/// driver would register, and the kind of key that was requested for each.
#[derive(Debug, Default)]
struct Registrar {
    mr_mode: MrMode,
    regions: Arc<Mutex<HashMap<u64, (AddressRange, KeyRequest)>>>,
}

impl Registrar {
    fn attr(&self) -> ProviderAttr {
        let loopback = Loopback::builder().needs(self.mr_mode).build().expect("a software NIC");
        let mut attr = loopback.nics().expect("its attributes").remove(0);
        attr.nic = Nic { provider: "registrar".into(), name: "reg0".into(), pci_bus_id: None };
        // The path search ignores `staged`: without transfers nothing copies staged memory.
        attr.imports = Imports { staged: true, ..Imports::default() };
        attr
    }
}

impl Provider for Registrar {
    fn name(&self) -> &str {
        "registrar"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(vec![self.attr()])
    }

    fn open_domain(&self, _: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(RegistrarDomain { attr: self.attr(), regions: Arc::clone(&self.regions) }))
    }
}

#[derive(Debug)]
struct RegistrarDomain {
    attr: ProviderAttr,
    regions: Arc<Mutex<HashMap<u64, (AddressRange, KeyRequest)>>>,
}

// SAFETY: nothing accesses the memory. A handle is the key of an entry of the map.
unsafe impl ProviderDomain for RegistrarDomain {
    fn attr(&self) -> &ProviderAttr {
        &self.attr
    }

    unsafe fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        // The path search passes only the backings of `Imports`, and host memory.
        let [Piece { range, .. }] = pieces else {
            return Err(Error::new(ErrorKind::Unsupported, "register").provider("registrar"));
        };
        let mut regions = self.regions.lock().expect("no panic");
        let token = (0..).find(|token| !regions.contains_key(token)).expect("a free number");
        regions.insert(token, (*range, request.key));
        Ok(ProviderRegion { token, local: LocalKey::from_provider(token), key: token })
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        let known = self.regions.lock().expect("no panic").remove(&region.token);
        known.map(drop).ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "deregister"))
    }

    fn live(&self) -> LiveObjects {
        let mut live = LiveObjects::default();
        live.regions = self.regions.lock().expect("no panic").len() as u64;
        live
    }
}

#[test]
fn four_methods_are_enough_to_register() {
    let provider = Registrar::default();
    let regions = Arc::clone(&provider.regions);
    let device = Simulated::builder().build().expect("a simulated device");
    let hmem = Hmem::builder().without_vendor_ifaces().iface(device).provider(provider);
    let hmem = hmem.build().expect("start");
    let domain = hmem.domain("registrar", DomainAttr::default()).expect("open a domain");
    assert_eq!(domain.features(), Features::empty());
    let region = domain.register(vec![7u8; 64], Access::all()).expect("register");
    let registered = regions.lock().expect("no panic").values().next().copied();
    assert_eq!(registered, Some((region.range(), KeyRequest::Provider)));
    let handle = region.provider_region().expect("registered");
    assert_eq!(region.key().expect("a key").as_u64().expect("one number"), handle.key);

    for error in [
        domain.open_cq(8).expect_err("no queues"),
        domain.open_endpoint(&EndpointAttr::new(&queue_of_a_software_nic())).expect_err("none"),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
    }

    // Device memory that the NIC cannot reach directly is refused, not staged.
    let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
    let iface = hmem.iface(SIMULATED).expect("it was added");
    let buffer = DeviceBuffer::allocate(iface, &request).expect("allocate");
    let refused = domain.register(buffer, Access::READ).expect_err("no path").error;
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert_eq!(regions.lock().expect("no panic").len(), 1);

    region.close().expect("close");
    assert_eq!(domain.live(), LiveObjects::default());
}

/// KEY-01
#[test]
fn requested_key_reaches_the_provider_unless_it_chooses_the_keys() {
    for (mr_mode, expected) in
        [(MrMode::empty(), KeyRequest::Application(5)), (MrMode::PROV_KEY, KeyRequest::Provider)]
    {
        let provider = Registrar { mr_mode, ..Registrar::default() };
        let regions = Arc::clone(&provider.regions);
        let hmem = Hmem::builder().without_vendor_ifaces().provider(provider).build();
        let attr = DomainAttr { mr_mode, ..DomainAttr::default() };
        let domain = hmem.expect("start").domain("registrar", attr).expect("open a domain");
        let request = Request::new(vec![0u8; 64], Access::all()).key(5);
        let _region = domain.submit(request).expect("register");
        let requested: Vec<_> =
            regions.lock().expect("no panic").values().map(|(_, key)| *key).collect();
        assert_eq!(requested, [expected]);
    }
}

fn queue_of_a_software_nic() -> Arc<dyn CompletionQueue> {
    open(MrMode::empty()).open_cq(1).expect("open a queue")
}
