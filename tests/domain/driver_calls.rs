//! Domains whose transfers may not call the drivers of devices
//! (`DomainAttr::driver_calls_in_transfers`).
#![allow(unsafe_code)]

use std::{sync::Arc, time::Duration};

use hmem::{
    Access, AllocationKind, Atomic, CacheAttr, DeviceBuffer, DeviceId, Domain, DomainAttr,
    Endpoint, Error, ErrorKind, Hmem, MrFlags, MrMode, Region, Request,
    fabric::{self, MrAttr},
    iface::AllocRequest,
    loopback::Loopback,
    path::{Attempt, P2pPolicy, Path},
    provider::{CompletionQueue, EndpointAttr, Imports},
    system::{DeviceCall, SIMULATED, Simulated},
    transfer::{
        AtomicOp, AtomicType, CompletionKind, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

const LEN: u64 = 4096;
const DMA_BUF: Imports = Imports {
    dma_buf: true,
    pcie_mapping_first: Some(false),
    data_direct: None,
    peer_memory: false,
    staged: false,
};

struct Fixture {
    hmem: Hmem,
    device: Arc<Simulated>,
}

impl Fixture {
    fn new(imports: Imports) -> Self {
        let device = Simulated::builder().peer_memory(imports.peer_memory);
        let device = Arc::new(device.build().expect("a simulated device"));
        let nic = Loopback::builder().imports(imports).build().expect("a software NIC");
        let builder = Hmem::builder().without_vendor_ifaces();
        let hmem = builder.shared_iface(Arc::clone(&device) as _).provider(nic).build();
        // The device counts queries on request only.
        device.faults().start_counting();
        Self { hmem: hmem.expect("builds"), device }
    }

    fn open(&self, attr: DomainAttr) -> Domain {
        self.hmem.domain("loopback", attr).expect("a domain")
    }

    /// Returns the number of calls that the device's driver has received.
    fn calls(&self) -> u64 {
        DeviceCall::ALL.iter().map(|call| self.device.faults().calls(*call)).sum()
    }

    fn buffer(&self) -> DeviceBuffer {
        let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
        DeviceBuffer::allocate(self.hmem.iface(SIMULATED).expect("added"), &request)
            .expect("device memory")
    }
}

/// Returns attributes of a domain with a cache, whose transfers may call drivers if `allowed`.
fn attr(allowed: bool) -> DomainAttr {
    DomainAttr {
        cache: Some(CacheAttr::default()),
        driver_calls_in_transfers: allowed,
        ..DomainAttr::default()
    }
}

/// Two connected endpoints of a domain.
struct Link {
    cq: Arc<dyn CompletionQueue>,
    here: Endpoint,
    there: Endpoint,
    to: PeerId,
}

impl Link {
    fn open(domain: &Domain) -> Self {
        let cq = domain.open_cq(16).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let (here, there) = (open(), open());
        let to = here.resolve(&there.name()).expect("the other endpoint");
        Self { cq, here, there, to }
    }

    /// Waits for the next completions, and returns their kinds.
    fn completed(&self, count: usize) -> Vec<CompletionKind> {
        let mut done = Vec::new();
        while done.len() < count {
            self.cq.wait(&mut done, count, Duration::MAX).expect("the queue");
        }
        let kind = |ended: hmem::transfer::Completion| ended.result.map(|_| ended.kind);
        done.into_iter().map(|ended| kind(ended).expect("completes")).collect()
    }
}

/// Transfers by every operation, into and out of device memory.
fn transfer(link: &Link, device: &Region<DeviceBuffer>, host: &Region<Vec<u8>>) {
    let key = device.key().expect("a key");
    let segment = |len| RemoteSegment { address: device.base_addr(), len, key: &key };
    let remote = [segment(LEN)];
    let (near, far) = (host.slice(0, LEN).expect("all"), device.slice(0, LEN).expect("all"));
    let Link { here, there, to, .. } = link;
    here.write(&[near], &remote, *to, 1).expect("posted");
    assert_eq!(link.completed(1), [CompletionKind::Write]);
    here.read(&[far], &remote, *to, 2).expect("posted");
    assert_eq!(link.completed(1), [CompletionKind::Read]);
    there.receive(&[far], None, 3).expect("posted");
    here.send(&[near], None, *to, 4).expect("posted");
    assert_eq!(link.completed(2).len(), 2);
    there.receive(&[], None, 5).expect("posted");
    here.write_immediate(&[near], &remote, 9, *to, 6).expect("posted");
    assert_eq!(link.completed(2).len(), 2);
    let add = Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote: segment(8),
        operand: host.slice(0, 8).expect("eight bytes"),
        result: Some(device.slice(8, 8).expect("eight bytes")),
        compare: None,
    };
    here.atomic(&add, *to, 7).expect("posted");
    assert_eq!(link.completed(1), [CompletionKind::Atomic]);
}

#[test]
fn transfers_call_no_driver_where_the_domain_forbids_it() {
    for allowed in [true, false] {
        let fixture = Fixture::new(DMA_BUF);
        let domain = fixture.open(attr(allowed));
        let all = Access::all().difference(Access::COLLECTIVE);
        let device = domain.register(fixture.buffer(), all).expect("device memory");
        assert_eq!(device.decision().expect("a decision").path, Path::DmaBuf);
        let host = domain.register(vec![3; LEN as usize], all).expect("host memory");
        let link = Link::open(&domain);
        let before = fixture.calls();
        transfer(&link, &device, &host);
        assert_eq!(domain.progress().expect("nothing is posted"), 0);
        let made = fixture.calls() - before;
        assert_eq!(made > 0, allowed, "{made} calls");

        domain.flush_inbound().expect("the application may call the driver");
        assert_eq!(fixture.calls() - before - made, 1);
        let buffer = device.close().map_err(Error::from).expect("close");
        let mut bytes = [0];
        buffer.read(LEN - 1, &mut bytes).expect("read");
        assert_eq!(bytes, [3]);
    }
}

/// Asserts that memory was refused because transfers may not call drivers.
fn assert_refused(error: &Error, kind: ErrorKind, domain: &Domain) {
    assert_eq!(error.kind(), kind, "{error}");
    let why = |attempt: &&Attempt| {
        attempt.error.as_ref().is_some_and(|error| {
            let why = error.context_value("why").unwrap_or_default();
            why.contains("transfers may not call drivers")
        })
    };
    let refused = error.trace().iter().find(why).expect("the setting is the reason");
    assert_eq!(refused.cause, None, "{error}");
    let remedy = refused.remedy.as_deref().unwrap_or_default();
    assert!(remedy.contains("DomainAttr::driver_calls_in_transfers"), "{error}");
    assert_eq!(domain.live().regions, 0);
}

#[test]
fn staged_copies_are_refused_where_transfers_may_not_call_drivers() {
    let fixture = Fixture::new(Imports { dma_buf: false, staged: true, ..DMA_BUF });
    for p2p in [P2pPolicy::Enabled, P2pPolicy::Disabled] {
        let register = |allowed| {
            let domain = fixture.open(DomainAttr { p2p, ..attr(allowed) });
            let region = domain.register(fixture.buffer(), Access::RECV);
            (region.map_err(|rejected| rejected.error), domain)
        };
        let refused = |register: (hmem::Result<_>, Domain)| {
            let (region, domain): (hmem::Result<Region<DeviceBuffer>>, _) = register;
            let error = region.expect_err("there is no other path");
            assert_refused(&error, ErrorKind::Unsupported, &domain);
            let tried = error.trace().last().expect("an attempt");
            assert_eq!((tried.path, tried.driver_called), (Path::Staged, false));
        };
        refused(register(false));
        // This registration makes the selector remember staged copies as the path of this memory.
        // The refusal that follows does not change that: the last decision comes from its cache.
        let (region, _domain) = register(true);
        assert!(!region.expect("staged").decision().expect("a decision").from_cache);
        refused(register(false));
        let (region, _domain) = register(true);
        assert!(region.expect("staged").decision().expect("a decision").from_cache);
    }
}

#[test]
fn memory_that_the_software_nic_reaches_by_driver_calls_is_refused() {
    let fixture = Fixture::new(Imports { dma_buf: false, peer_memory: true, ..DMA_BUF });
    for allowed in [true, false] {
        let domain = fixture.open(attr(allowed));
        match domain.register(fixture.buffer(), Access::RECV) {
            Ok(_) => assert!(allowed),
            Err(rejected) => {
                assert!(!allowed, "{rejected}");
                assert_refused(&rejected.error, ErrorKind::BadState, &domain);
            }
        }
    }
}

#[test]
fn persistent_device_memory_is_refused_where_transfers_may_not_call_drivers() {
    let fixture = Fixture::new(DMA_BUF);
    for allowed in [true, false] {
        let domain = fixture.open(attr(allowed));
        let persistent = Request::new(fixture.buffer(), Access::REMOTE_WRITE);
        match domain.submit(persistent.flags(MrFlags::RMA_PMEM)) {
            Ok(_) => assert!(allowed),
            Err(rejected) => {
                assert!(!allowed, "{rejected}");
                assert_refused(&rejected.error, ErrorKind::BadFlags, &domain);
            }
        }
        let whole = domain.register(fixture.buffer(), Access::REMOTE_WRITE).expect("registers");
        let part = MrAttr::new((&*whole, whole.range()), Access::REMOTE_WRITE);
        let part = fabric::regattr(&domain, &part, MrFlags::RMA_PMEM);
        assert_eq!(part.as_ref().err().map(Error::kind), (!allowed).then_some(ErrorKind::BadFlags));
        drop(part);
        let host = Request::new(vec![0u8; 64], Access::REMOTE_WRITE).flags(MrFlags::RMA_PMEM);
        domain.submit(host).expect("host memory needs no driver");
    }
}

#[test]
fn domain_whose_transfers_may_not_call_drivers_needs_descriptors() {
    let fixture = Fixture::new(DMA_BUF);
    for mr_mode in [MrMode::empty(), MrMode::HMEM, MrMode::BASIC, MrMode::SCALABLE] {
        let offered = DomainAttr { mr_mode, ..attr(false) };
        let error = fixture.hmem.domain("loopback", offered).expect_err("LOCAL is missing");
        assert_eq!(error.kind(), ErrorKind::ModeMismatch, "{error}");
        assert_eq!(error.context_value("bits"), Some("LOCAL"), "{error}");
        let why = error.context_value("why").unwrap_or_default();
        assert!(why.contains("transfers may not call drivers"), "{error}");
        assert!(error.remedy_text().is_some(), "{error}");
        fixture.hmem.domain("loopback", DomainAttr { mr_mode, ..attr(true) }).expect("opens");
    }
    for mr_mode in [MrMode::LOCAL, MrMode::BASIC | MrMode::LOCAL] {
        let domain = fixture.open(DomainAttr { mr_mode, ..attr(false) });
        assert!(domain.mr_mode().contains(MrMode::LOCAL));
        let link = Link::open(&domain);
        let bytes = [7u8; 8];
        let before = fixture.calls();
        let local =
            [LocalSegment { address: hmem::Address::of_ptr(bytes.as_ptr()), len: 8, desc: None }];
        let operation = Operation::Send { tag: None, invalidate: None };
        let request = WorkRequest { operation, local: &local, peer: link.to, context: 1 };
        // SAFETY: the request is refused, so nothing accesses the bytes later.
        let error = unsafe { link.here.post(&request) }.expect_err("no descriptor");
        assert_eq!(error.kind(), ErrorKind::NoRegion, "{error}");
        assert_eq!(fixture.calls(), before);
    }
}
