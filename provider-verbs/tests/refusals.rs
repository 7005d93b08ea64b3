//! Requests refused before the driver call, and the ranges of bound windows, over injected
//! functions.

#[allow(dead_code, reason = "other tests use the rest of it")]
mod fake;
#[allow(dead_code, reason = "other tests use the rest of it")]
mod wire;

use std::sync::Arc;

use hmem_core::{
    Access, Address, AddressRange, Addressing, Domain, DomainAttr, Endpoint, ErrorKind, LocalKey,
    OwnedRegion, Registry, Result,
    provider::{CompletionQueue, EndpointAttr, ProviderDomain, WindowBind, WindowType, Windows},
    transfer::{LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{
    Verbs, VerbsDomain, VerbsOptions,
    sys::{AccessFlags, Functions},
};

const LEN: u64 = 1024;

fn open(options: VerbsOptions) -> Domain {
    open_on(wire::functions(), options)
}

fn open_on(functions: Functions, options: VerbsOptions) -> Domain {
    let builder = Verbs::builder().functions(functions).options(options);
    let verbs = builder.build().expect("start");
    let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    Domain::open(&verbs, registry, paths, DomainAttr::default()).expect("open")
}

fn buffer(domain: &Domain, access: Access) -> OwnedRegion<Vec<u8>> {
    let bytes = vec![1; LEN as usize];
    domain.register(bytes, access).map_err(|rejected| rejected.error).expect("register")
}

/// An endpoint that is connected to itself, with memory for its transfers.
struct Loop {
    endpoint: Endpoint,
    cq: Arc<dyn CompletionQueue>,
    target: OwnedRegion<Vec<u8>>,
    domain: Domain,
}

impl Loop {
    fn new() -> Self {
        let domain = open(VerbsOptions::empty());
        let cq = domain.open_cq(64).expect("open a queue");
        let attr = EndpointAttr { depth: 4, ..EndpointAttr::new(&cq) };
        let endpoint = domain.open_endpoint(&attr).expect("open an endpoint");
        endpoint.resolve(&endpoint.name()).expect("connect it to itself");
        let target = buffer(&domain, Access::REMOTE_READ | Access::REMOTE_WRITE);
        Self { endpoint, cq, target, domain }
    }

    /// Writes `far` bytes to the peer from a list of local segments.
    fn write(&self, local: &[LocalSegment], far: u64) -> Result<u64> {
        let key = self.target.key().expect("key");
        let remote = [RemoteSegment { address: key.base(), len: far, key: &key }];
        let operation = Operation::Write { remote: &remote };
        let request = WorkRequest { operation, local, peer: PeerId(0), context: 1 };
        // SAFETY: the segments lie in regions that own their memory.
        unsafe { self.endpoint.post(&request) }?;
        let mut out = Vec::new();
        while out.is_empty() {
            self.cq.read(&mut out, 1).expect("read completions");
        }
        out.remove(0).result
    }
}

fn segment(desc: LocalKey, start: u64, len: u64) -> LocalSegment {
    LocalSegment { address: Address(start), len, desc: Some(desc) }
}

/// MR-09
#[test]
fn invalid_local_lists_are_refused_before_the_driver_call() {
    let net = Loop::new();
    let readable = buffer(&net.domain, Access::WRITE);
    let (desc, start) = (readable.desc().expect("desc"), readable.range().start().0);
    let other = buffer(&net.domain, Access::READ | Access::SEND);
    let (wrong, elsewhere) = (other.desc().expect("desc"), other.range().start().0);
    // Alone, and after a valid segment.
    for before in [&[][..], &[segment(desc, start, 8)]] {
        let kind = |last: LocalSegment| {
            let list = [before, &[last]].concat();
            let len = list.iter().map(|segment| segment.len).sum();
            net.write(&list, len).map_err(|error| error.kind())
        };
        assert_eq!(kind(segment(desc, start + LEN - 8, 9)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start - 1, 8)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start + LEN, 1)), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(desc, start, u64::from(u32::MAX))), Err(ErrorKind::OutOfBounds));
        assert_eq!(kind(segment(wrong, elsewhere, 8)), Err(ErrorKind::AccessDenied));
        let all = 8 * (before.len() as u64 + 1);
        assert_eq!(kind(segment(desc, start + LEN - 8, 8)), Ok(all), "the last bytes");
    }
}

#[test]
fn lists_of_different_lengths_are_refused() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let (desc, start) = (source.desc().expect("desc"), source.range().start().0);
    let (one, two) = (segment(desc, start, 8), segment(desc, start + 100, 8));
    for (local, far) in [(&[one][..], 7), (&[one], 9), (&[one, two], 8), (&[one, two], 17)] {
        let error = net.write(local, far).expect_err("different lengths");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert_eq!(error.context_value("remote"), Some(far.to_string().as_str()), "{error}");
    }
    assert_eq!(net.write(&[one, two], 16).expect("the same length"), 16);
}

#[test]
fn full_send_queue_refuses_requests_until_it_is_read() {
    let net = Loop::new();
    let source = buffer(&net.domain, Access::WRITE);
    let key = net.target.key().expect("key");
    let remote = [RemoteSegment { address: key.base(), len: 8, key: &key }];
    let post = || {
        let from = [source.slice(0, 8).expect("slice")];
        net.endpoint.write(&from, &remote, PeerId(0), 1).map_err(|error| error.kind())
    };
    // The requested depth, plus entries that the provider adds for requests of several parts.
    let posted = (0..100).take_while(|_| post().is_ok()).count();
    assert_eq!(posted, 4 + 16);
    assert_eq!(post(), Err(ErrorKind::Again));
    let mut out = Vec::new();
    while out.is_empty() {
        net.cq.read(&mut out, 1).expect("read completions");
    }
    post().expect("there is room again");
}

#[test]
fn endpoint_refuses_queues_of_another_device() {
    let (domain, other) = (open(VerbsOptions::empty()), open(VerbsOptions::empty()));
    let cq = other.open_cq(8).expect("open a queue");
    let error = domain.open_endpoint(&EndpointAttr::new(&cq)).expect_err("another context's");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(domain.live().endpoints, 0);
}

/// Binds a window through the provider, without the checks of [`Domain`].
fn bind(
    domain: &Domain,
    region: &OwnedRegion<Vec<u8>>,
    what: (u64, u64, Access),
) -> Result<String> {
    let verbs = VerbsDomain::of(domain).expect("verbs");
    let window = verbs.alloc_window(WindowType::One)?;
    let (offset, len, access) = what;
    let (region, addressing) = (region.provider_region().expect("handle"), Addressing::Virtual);
    fake::calls();
    let bound = verbs.bind_window(window, &WindowBind { region, offset, len, access, addressing });
    let asked = fake::calls().into_iter().find(|call| call.starts_with("bind_mw"));
    verbs.free_window(window).expect("free");
    match bound {
        Ok(_) => Ok(asked.expect("the driver was called")),
        Err(error) => {
            assert_eq!(asked, None, "the driver was asked: {error}");
            Err(error)
        }
    }
}

/// MW-05
#[test]
fn a_window_is_bound_with_the_rights_that_were_asked_for() {
    let domain = open(VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ | Access::WRITE);
    let start = region.range().start().0;
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    for (access, flags) in [
        (read, AccessFlags::REMOTE_READ),
        (Access::REMOTE_RMA_WRITE, AccessFlags::REMOTE_WRITE),
        (Access::REMOTE_ATOMIC, AccessFlags::REMOTE_ATOMIC),
        (write, writes),
        (read | write, AccessFlags::REMOTE_READ | writes),
    ] {
        let asked = bind(&domain, &region, (16, 64, access)).expect("bind");
        assert_eq!(asked, format!("bind_mw {:#x}+0x40 {:#x}", start + 16, flags.bits()));
    }
}

/// MW-07
#[test]
fn a_bind_outside_its_region_or_beyond_its_rights_goes_to_no_nic() {
    let domain = open(VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ);
    let kind = |domain: &Domain, region: &_, what| {
        bind(domain, region, what).map(drop).map_err(|error| error.kind())
    };
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    for (offset, len) in [(LEN - 8, 9), (LEN, 1), (LEN + 1, 1), (u64::MAX, 2), (1, u64::MAX)] {
        let outside = kind(&domain, &region, (offset, len, read));
        assert_eq!(outside, Err(ErrorKind::OutOfBounds), "{len} bytes at {offset}");
    }
    assert_eq!(kind(&domain, &region, (LEN - 8, 8, write)), Ok(()), "the last bytes");
    let narrow = buffer(&domain, Access::SEND);
    assert_eq!(kind(&domain, &narrow, (0, 8, write)), Err(ErrorKind::AccessDenied));
    assert_eq!(kind(&domain, &narrow, (0, 8, read)), Ok(()));

    let plain = open(VerbsOptions::empty());
    let region = buffer(&plain, Access::READ);
    assert_eq!(kind(&plain, &region, (0, 8, read)), Err(ErrorKind::AccessDenied), "no MW_BIND");
}

/// VRB-02
#[test]
fn a_device_without_atomics_refuses_to_bind_a_window_with_the_right_to_them() {
    let functions = wire::functions();
    fake::with(|script| script.no_atomics = true);
    let domain = open_on(functions, VerbsOptions::MW_BIND);
    let region = buffer(&domain, Access::READ | Access::WRITE);
    for access in [Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC | Access::REMOTE_READ] {
        let error = bind(&domain, &region, (16, 64, access)).expect_err("no atomics");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert_eq!(error.context_value("access"), Some("REMOTE_ATOMIC"), "{error}");
        assert!(error.to_string().contains("fake0"), "{error}");
    }
    // The device has no atomics: REMOTE_WRITE then grants RMA writes only.
    let asked = bind(&domain, &region, (16, 64, Access::REMOTE_WRITE)).expect("bind");
    let start = region.range().start().0;
    let flags = AccessFlags::REMOTE_WRITE.bits();
    assert_eq!(asked, format!("bind_mw {:#x}+0x40 {flags:#x}", start + 16));
}

/// MW-01
#[test]
fn windows_bind_to_regions_with_virtual_addresses_only() {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let domain = open(VerbsOptions::MW_BIND | VerbsOptions::ZERO_BASED);
    let page = Box::new(Page([0; 4096]));
    let start = Address(page.0.as_ptr().expose_provenance() as u64);
    let range = AddressRange::new(start, 4096).expect("range");
    let verbs = VerbsDomain::of(&domain).expect("verbs");
    let flags = AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND | AccessFlags::ZERO_BASED;
    // SAFETY: the page outlives the region, and nothing is transferred.
    let region = unsafe { verbs.reg_mr(range, flags) }.expect("register");
    let window = verbs.alloc_window(WindowType::One).expect("allocate");
    let (access, addressing) = (Access::REMOTE_READ, Addressing::Virtual);
    let bind = WindowBind { region, offset: 0, len: 8, access, addressing };
    let error = verbs.bind_window(window, &bind).expect_err("addresses from 0");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    verbs.deregister(region).expect("deregister");
}
