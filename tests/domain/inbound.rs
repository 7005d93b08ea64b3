//! HM-14: bytes that a NIC wrote into device memory are flushed before the completion is returned.

use std::{sync::Arc, time::Duration};

use hmem::{
    Access, AllocationKind, Atomic, Batch, DeviceBuffer, DeviceId, Domain, DomainAttr, Endpoint,
    Errno, Hmem, Memory, MrMode, Region, RegionSlice, Request,
    iface::AllocRequest,
    loopback::Loopback,
    provider::{CompletionQueue, EndpointAttr},
    system::{DeviceCall, SIMULATED, Simulated},
    transfer::{AtomicOp, AtomicType, Completion, CompletionKind, RemoteSegment},
};

const LEN: u64 = 4096;

struct Side {
    domain: Domain,
    cq: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
}

impl Side {
    fn open(hmem: &Hmem) -> Self {
        let attr = DomainAttr { mr_mode: MrMode::empty(), ..DomainAttr::default() };
        let domain = hmem.domain("loopback", attr).expect("the loopback needs no mode");
        let cq = domain.open_cq(8).expect("a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        Self { domain, cq, endpoint }
    }

    /// Waits for this side's next completion, and makes progress on `other` meanwhile.
    fn completed(&self, other: &Self) -> Completion {
        let mut done = Vec::new();
        while self.cq.read(&mut done, 1).expect("the queue") == 0 {
            other.domain.progress().expect("progress");
        }
        done.remove(0)
    }

    /// Waits for this side's next completion, and makes progress on this side only.
    fn waited(&self) -> Completion {
        let mut done = Vec::new();
        assert_eq!(self.cq.wait(&mut done, 1, Duration::MAX).expect("the queue"), 1);
        done.remove(0)
    }

    fn host(&self, access: Access) -> Region<Vec<u8>> {
        self.domain.register(vec![7_u8; LEN as usize], access).expect("host memory")
    }
}

struct Fixture {
    hmem: Hmem,
    device: Arc<Simulated>,
}

impl Fixture {
    fn new() -> Self {
        let device = Arc::new(Simulated::builder().devices(2).build().expect("simulated devices"));
        let builder =
            Hmem::builder().without_vendor_ifaces().shared_iface(Arc::clone(&device) as _);
        let loopback = Loopback::builder().build().expect("a software NIC");
        Self { hmem: builder.provider(loopback).build().expect("builds"), device }
    }

    fn flushes(&self) -> u64 {
        self.device.faults().calls(DeviceCall::FlushInbound)
    }

    fn on_device(&self, domain: &Domain, device: u32, access: Access) -> Region<DeviceBuffer> {
        let iface = self.hmem.iface(SIMULATED).expect("it was added");
        let request =
            AllocRequest { len: LEN, device: DeviceId(device), kind: AllocationKind::Device };
        let buffer = DeviceBuffer::allocate(iface, &request).expect("device memory");
        domain.register(buffer, access).expect("device memory is registered")
    }
}

fn slice<B: Memory>(region: &Region<B>) -> RegionSlice {
    region.slice(0, LEN).expect("all of it")
}

/// HM-14
#[test]
fn a_receive_completes_after_a_flush_of_every_written_device() {
    let fixture = Fixture::new();
    let (target, sender) = (Side::open(&fixture.hmem), Side::open(&fixture.hmem));
    let source = sender.host(Access::SEND | Access::WRITE);
    let peer = sender.endpoint.resolve(&target.endpoint.name()).expect("the target");
    let send = |into: RegionSlice| {
        target.endpoint.receive(&[into], None, 1).expect("posted");
        sender.endpoint.send(&[slice(&source)], None, peer, 2).expect("posted");
        let sent = sender.completed(&target);
        assert_eq!((sent.kind, sent.result.expect("sent")), (CompletionKind::Send, LEN));
        let before = fixture.flushes();
        let received = target.completed(&sender);
        assert_eq!(
            (received.kind, received.result.expect("received")),
            (CompletionKind::Receive, LEN)
        );
        fixture.flushes() - before
    };

    let host = target.host(Access::RECV);
    assert_eq!(send(slice(&host)), 0, "no device has memory that the NIC writes");
    let only_read = fixture.on_device(&target.domain, 1, Access::REMOTE_READ);
    assert_eq!(send(slice(&host)), 0, "the NIC may only read the device");
    let first = fixture.on_device(&target.domain, 0, Access::RECV);
    assert_eq!(send(slice(&first)), 1);
    let second = fixture.on_device(&target.domain, 1, Access::REMOTE_WRITE);
    assert_eq!(send(slice(&first)), 2);

    // The sender writes into the second device, which causes no completion at the target, and then
    // sends a message.
    let key = second.key().expect("a key");
    let remote = [RemoteSegment { address: second.base_addr(), len: LEN, key: &key }];
    sender.endpoint.write(&[slice(&source)], &remote, peer, 3).expect("posted");
    let written = sender.completed(&target);
    assert_eq!((written.kind, written.result.expect("written")), (CompletionKind::Write, LEN));
    assert_eq!(send(slice(&host)), 2, "a message follows the writes before it");

    // `CompletionQueue::wait` also flushes before it returns a receive.
    target.endpoint.receive(&[slice(&host)], None, 1).expect("posted");
    sender.endpoint.send(&[slice(&source)], None, peer, 2).expect("posted");
    sender.waited().result.expect("sent");
    let before = fixture.flushes();
    assert_eq!(target.waited().kind, CompletionKind::Receive);
    assert_eq!(fixture.flushes() - before, 2);

    // A completion is returned even if the device cannot be flushed.
    fixture.device.faults().fail_always(DeviceCall::FlushInbound, Errno(libc::EIO));
    assert_eq!(send(slice(&first)), 2);
    drop(only_read);
}

/// HM-14
#[test]
fn each_nic_flushes_for_its_own_receives() {
    let fixture = Fixture::new();
    let [first, second, sender] = [(); 3].map(|()| Side::open(&fixture.hmem));
    let iface = fixture.hmem.iface(SIMULATED).expect("it was added");
    let request = AllocRequest { len: LEN, device: DeviceId(0), kind: AllocationKind::Device };
    let buffer = DeviceBuffer::allocate(iface, &request).expect("device memory");
    let nics = [&first.domain, &second.domain];
    let both = Batch::on(&nics).add(Request::new(buffer, Access::RECV)).register();
    let both = both.expect("registered");
    let source = sender.host(Access::SEND);
    for side in [&first, &second] {
        let host = side.host(Access::RECV);
        side.endpoint.receive(&[slice(&host)], None, 1).expect("posted");
        let peer = sender.endpoint.resolve(&side.endpoint.name()).expect("the target");
        sender.endpoint.send(&[slice(&source)], None, peer, 2).expect("posted");
        sender.completed(side).result.expect("sent");
        let before = fixture.flushes();
        side.completed(&sender).result.expect("received");
        assert_eq!(fixture.flushes() - before, 1);
    }
    drop(both);
}

/// HM-14
#[test]
fn read_into_a_device_completes_after_a_flush() {
    let fixture = Fixture::new();
    let (reader, target) = (Side::open(&fixture.hmem), Side::open(&fixture.hmem));
    let source = target.host(Access::REMOTE_READ);
    target.domain.flush_inbound().expect("there is nothing to flush");
    assert_eq!(fixture.flushes(), 0);
    let into = fixture.on_device(&reader.domain, 0, Access::READ);
    let key = source.key().expect("a key");
    let remote = [RemoteSegment { address: source.base_addr(), len: LEN, key: &key }];
    let peer = reader.endpoint.resolve(&target.endpoint.name()).expect("the target");
    reader.endpoint.read(&[slice(&into)], &remote, peer, 1).expect("posted");
    let read = reader.completed(&target);
    assert_eq!((read.kind, read.result.expect("read")), (CompletionKind::Read, LEN));
    assert_eq!(fixture.flushes(), 1);

    reader.domain.flush_inbound().expect("the device flushes");
    assert_eq!(fixture.flushes(), 2);
    fixture.device.faults().fail_next(DeviceCall::FlushInbound, Errno(libc::EIO));
    let error = reader.domain.flush_inbound().expect_err("an injected fault");
    assert_eq!(error.os_errno(), Some(Errno(libc::EIO)), "{error}");
}

/// HM-14
#[test]
fn an_atomic_into_a_device_completes_after_a_flush() {
    let fixture = Fixture::new();
    let (asking, target) = (Side::open(&fixture.hmem), Side::open(&fixture.hmem));
    let counter = target.host(Access::REMOTE_READ | Access::REMOTE_WRITE);
    let (one, result) = (asking.host(Access::WRITE), asking.host(Access::READ));
    let key = counter.key().expect("a key");
    let remote = RemoteSegment { address: counter.base_addr(), len: 8, key: &key };
    let peer = asking.endpoint.resolve(&target.endpoint.name()).expect("the target");
    let fetch = |result: RegionSlice| {
        let operand = one.slice(0, 8).expect("inside");
        let (op, datatype) = (AtomicOp::Sum, AtomicType::U64);
        let atomic = Atomic { op, datatype, remote, operand, result: Some(result), compare: None };
        asking.endpoint.atomic(&atomic, peer, 1).expect("posted");
        let before = fixture.flushes();
        let done = asking.completed(&target);
        assert_eq!((done.kind, done.result.expect("done")), (CompletionKind::Atomic, 8));
        fixture.flushes() - before
    };

    assert_eq!(fetch(result.slice(0, 8).expect("inside")), 0, "no device has such memory");
    let on_device = fixture.on_device(&asking.domain, 0, Access::READ);
    assert_eq!(fetch(on_device.slice(0, 8).expect("inside")), 1);
    let mut fetched = [0; 8];
    on_device.read(0, &mut fetched).expect("the device's own copy");
    assert_eq!(u64::from_le_bytes(fetched), 2 * u64::from_le_bytes([7; 8]), "its second value");
}
