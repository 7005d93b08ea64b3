//! Tests of the loopback NIC with the memory of a simulated device: local buffers with and without
//! a descriptor, and peer-memory imports.

use std::sync::Arc;

use crate::support::*;
use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt,
    MrMode, Registry,
    iface::AllocRequest,
    provider::{Backing, DomainRequest, Imports, Piece, Provider},
    transfer::{AtomicOp, AtomicType, LocalSegment, Operation, PeerId, RemoteSegment},
};
use hmem_iface_system::{SIMULATED, Simulated};
use hmem_provider_loopback::Loopback;

/// A length that exceeds the NIC's bounce buffer.
const LONG: usize = (1 << 20) + 77;

/// Two connected endpoints of domains with a simulated device.
struct Devices {
    pair: Pair,
    device: Arc<Simulated>,
    iface: Arc<dyn Iface>,
}

impl Devices {
    fn new(mode: MrMode) -> Self {
        let device = Arc::new(Simulated::builder().build().unwrap());
        let mut registry = Registry::new();
        registry.add(Arc::clone(&device) as Arc<dyn Iface>).unwrap();
        let registry = Arc::new(registry);
        let imports = Imports { peer_memory: true, ..Imports::default() };
        let provider = Loopback::builder().imports(imports).build().unwrap();
        let open = || {
            let request =
                DomainRequest { hmem: true, registry: Arc::clone(&registry), ..request(mode) };
            End::open(&provider.open_domain(&request).unwrap())
        };
        let (here, there) = (open(), open());
        let to = here.peer(&there);
        let iface = Arc::clone(&device) as _;
        Self { pair: Pair { provider, here, there, to }, device, iface }
    }

    fn allocate(&self, len: usize) -> Allocation {
        let request =
            AllocRequest { len: len as u64, device: DeviceId(0), kind: AllocationKind::Device };
        self.device.allocate(&request).unwrap()
    }

    fn bytes(&self, at: Address, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the tests call this for device memory that they have not freed.
        unsafe { self.device.read(at, &mut bytes) }.unwrap();
        bytes
    }

    fn fill(&self, at: Address, bytes: &[u8]) {
        // SAFETY: the tests call this for device memory that they have not freed, and hold no
        // references into it.
        unsafe { self.device.write(at, bytes) }.unwrap();
    }

    fn peer_memory(&self, range: AddressRange) -> Piece<'_> {
        let (iface, address) = (&self.iface, range.start());
        Piece { range, backing: Backing::PeerMemory { iface, address } }
    }
}

fn segment(allocation: &Allocation, offset: u64, len: usize) -> LocalSegment {
    LocalSegment { address: Address(allocation.base().0 + offset), len: len as u64, desc: None }
}

const SEND: Operation<'static> = Operation::Send { tag: None, invalidate: None };
const RECEIVE: Operation<'static> = Operation::Receive { tag: None, from: None };

#[test]
fn hmem_mode_refuses_device_buffers_without_descriptor() {
    let net = Devices::new(MrMode::HMEM);
    let Pair { here, there, to, .. } = &net.pair;
    let target = Buffer::new(64);
    let region = RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 64);
    let allocation = net.allocate(64);
    let device = [segment(&allocation, 0, 8)];
    let list = [RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    let atomic = |result| Operation::Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote: list[0],
        result,
        compare: None,
    };
    let host_buffer = Buffer::filled(8, 1);
    let posts = [
        (Operation::Write { remote: &list }, device),
        (Operation::Read { remote: &list }, device),
        (SEND, device),
        (RECEIVE, device),
        (atomic(None), device),
        (atomic(Some(device[0])), [host_buffer.whole()]),
    ];
    for (operation, local) in posts {
        let refusal = here.post(operation, &local, *to, 1).unwrap_err();
        assert_eq!(
            (refusal.kind(), refusal.operation()),
            (ErrorKind::NoRegion, "post"),
            "{refusal}"
        );
        assert!(refusal.to_string().contains("need a descriptor"), "{refusal}");
    }
    assert!(here.try_next().is_none(), "a refused post completed");
    // Host memory needs no descriptor in this mode.
    here.write(*to, &[host_buffer.whole()], &key, 0).unwrap();
    assert_eq!(target.bytes()[..8], [1; 8]);
}

#[test]
fn device_buffer_needs_no_descriptor_without_hmem_mode() {
    let net = Devices::new(MrMode::empty());
    let Pair { here, there, to, .. } = &net.pair;
    let target = Buffer::new(LONG);
    let region = RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, LONG as u64);
    let (near, far) = (net.allocate(LONG + 5), net.allocate(64));
    let content = Buffer::counting(LONG).bytes();
    net.fill(Address(near.base().0 + 3), &content);
    here.write(*to, &[segment(&near, 3, LONG)], &key, 0).unwrap();
    assert!(target.bytes() == content);
    target.write(0, b"from the peer");
    // Reads the first 5 bytes into device memory and the other 8 into host memory.
    let rest = Buffer::new(8);
    here.read(*to, &[segment(&near, 0, 5), rest.whole()], &key, 0).unwrap();
    assert_eq!(
        (net.bytes(near.base(), 5), rest.bytes()),
        (b"from ".to_vec(), b"the peer".to_vec())
    );
    assert_eq!(
        net.bytes(Address(near.base().0 + 5), 3),
        content[2..5],
        "a neighboring byte changed"
    );
    // Sends from device to device. The receive is posted before the send, and then after it.
    for receive_first in [true, false] {
        net.fill(far.base(), &[0; 64]);
        let receive = || there.post(RECEIVE, &[segment(&far, 10, 20)], PeerId(0), 2).unwrap();
        if receive_first {
            receive();
        }
        here.run(SEND, &[segment(&near, 100, 20)], *to).unwrap();
        if !receive_first {
            receive();
        }
        assert_eq!(there.next().result.unwrap(), 20);
        assert_eq!(net.bytes(Address(far.base().0 + 10), 20), content[97..117]);
    }
    // Operands and results of atomics may be in device memory too: only the target must support
    // atomics.
    target.write(0, &40u64.to_le_bytes());
    net.fill(far.base(), &2u64.to_le_bytes());
    let operation = Operation::Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote: RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key },
        result: Some(segment(&far, 8, 8)),
        compare: None,
    };
    here.run(operation, &[segment(&far, 0, 8)], *to).unwrap();
    assert_eq!(net.bytes(Address(far.base().0 + 8), 8), 40u64.to_le_bytes());
    assert_eq!(target.u64_at(0), 42);
}

#[test]
fn freed_device_buffer_fails_the_transfer() {
    let net = Devices::new(MrMode::empty());
    let Pair { here, there, to, .. } = &net.pair;
    let target = Buffer::filled(64, 5);
    let region = RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let key = remote(region, 64);
    let allocation = net.allocate(64);
    let past_the_end = segment(&allocation, 60, 8);
    refused(here.write(*to, &[past_the_end], &key, 0), ErrorKind::OutOfBounds);
    let list = [RemoteSegment { address: hmem_core::Iova(0), len: 8, key: &key }];
    here.post(Operation::Write { remote: &list }, &[segment(&allocation, 0, 8)], *to, 1).unwrap();
    // SAFETY: nothing refers to device memory.
    unsafe { net.device.free(&allocation) }.unwrap();
    here.next().result.unwrap_err();
    assert_eq!(target.bytes(), [5; 64]);
    here.write(*to, &[Buffer::filled(8, 6).whole()], &key, 0).unwrap();
}

#[test]
fn peer_memory_is_copied_by_its_iface() {
    let net = Devices::new(MrMode::empty());
    let Pair { here, there, to, .. } = &net.pair;
    let allocation = net.allocate(LONG + 20);
    let range = allocation.range.slice(10, LONG as u64).unwrap();
    let region = RegAttr::key(1).register(&*there.domain, &[net.peer_memory(range)]).unwrap();
    let key = remote(region, LONG as u64);
    let source = Buffer::counting(LONG - 1);
    here.write(*to, &[source.whole()], &key, 1).unwrap();
    assert!(net.bytes(Address(range.start().0 + 1), LONG - 1) == source.bytes());
    assert_eq!(net.bytes(allocation.base(), 11), [0; 11]);
    let back = Buffer::new(LONG - 1);
    here.read(*to, &[back.whole()], &key, 1).unwrap();
    assert!(back.bytes() == source.bytes());
    refused(
        here.write(*to, &[source.segment(0, 2, None)], &key, LONG as u64 - 1),
        ErrorKind::OutOfBounds,
    );
    // Writes to a sub-region, and then uses the region as a local buffer.
    let sub = there
        .domain
        .sub_regions()
        .unwrap()
        .register_sub(region, &RegAttr::key(2).request(), 1000, 10)
        .unwrap();
    here.write(*to, &[source.segment(0, 10, None)], &remote(sub, 10), 0).unwrap();
    assert_eq!(net.bytes(Address(range.start().0 + 1000), 10), source.bytes()[..10]);
    let from = LocalSegment {
        address: Address(range.start().0 + 1000),
        len: 10,
        desc: Some(region.local),
    };
    let sink = Buffer::new(10);
    here.post(RECEIVE, &[sink.whole()], PeerId(0), 2).unwrap();
    there.run(SEND, &[from], there.peer(here)).unwrap();
    here.next().result.unwrap();
    assert_eq!(sink.bytes(), source.bytes()[..10]);
    let refusal = here.fetch(*to, AtomicOp::Sum, 1, None, &key, 6).unwrap_err();
    assert_eq!((refusal.kind(), refusal.iface_kind()), (ErrorKind::Unsupported, Some(SIMULATED)));
    // SAFETY: nothing refers to device memory.
    unsafe { net.device.free(&allocation) }.unwrap();
    here.write(*to, &[source.segment(0, 8, None)], &key, 0).unwrap_err();
    there.domain.deregister(sub).unwrap();
    there.domain.deregister(region).unwrap();
}
