//! Tests of a provider that implements the six required methods of a domain and no facet:
//! `hmem-core` answers for the missing facets.

use std::sync::Arc;

use hmem::{
    Access, BindFlags, Domain, DomainAttr, Error, ErrorKind, Hmem, Iova, MrAttr, MrFlags, MrMode,
    RawKey, RegionState, Result,
    loopback::Loopback,
    provider::{
        CompletionQueue, DomainRequest, EndpointAttr, Features, LiveObjects, Piece, Provider,
        ProviderAttr, ProviderDomain, ProviderEndpoint, ProviderRegion, Registration,
    },
};

/// A provider over the software NIC that hides its optional traits (facets).
#[derive(Debug)]
struct Bare(Loopback);

impl Provider for Bare {
    fn name(&self) -> &str {
        "bare"
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        self.0.nics()
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        Ok(Arc::new(BareDomain(self.0.open_domain(request)?)))
    }
}

#[derive(Debug)]
struct BareDomain(Arc<dyn ProviderDomain>);

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
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { self.0.register(&Registration { enabled: true, ..*request }, pieces) }
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        self.0.deregister(region)
    }

    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        self.0.open_cq(depth)
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        self.0.open_endpoint(attr)
    }

    fn live(&self) -> LiveObjects {
        self.0.live()
    }
}

fn open(mode: MrMode) -> Domain {
    let nic = Loopback::builder().needs(mode).build().expect("a software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().provider(Bare(nic)).build().expect("start");
    let attr = DomainAttr { mr_mode: mode, ..DomainAttr::default() };
    hmem.domain("bare", attr).expect("open a domain")
}

#[test]
fn domain_without_facets_transfers() {
    let domain = open(MrMode::empty());
    assert_eq!(domain.features(), Features::empty());
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
        assert!(error.to_string().contains("loopback/loop0"), "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
    };
    let domain = open(MrMode::empty());
    let region = domain.register(vec![0u8; 4096], Access::all()).expect("register");
    let part = region.range().slice(0, 64).expect("inside");
    refused(region.sub(part, Access::READ, None).unwrap_err(), ErrorKind::Unsupported);
    refused(region.refresh(&[]).unwrap_err(), ErrorKind::NoSys);
    refused(region.raw_key().unwrap_err(), ErrorKind::Unsupported);
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
    let attr = MrAttr::new(&[], Access::all());
    let region = domain
        .register_with(vec![0u8; 64], &attr, MrFlags::RMA_EVENT)
        .map_err(|rejected| rejected.error)
        .expect("register");
    assert_eq!(region.state(), RegionState::Disabled);
    region.enable().expect("it was usable all along");
    assert_eq!(region.state(), RegionState::Enabled);
}
