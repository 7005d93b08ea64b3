//! Tests of the kinds of memory that a domain registers: borrowed memory, numbers, constants, and
//! addresses with an owner.
#![allow(unsafe_code)]

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::wire::{REMOTE, Wire, pattern, raw};
use hmem::{
    Access, AddressRange, AllocationKind, Atomic, Batch, CacheAttr, DeviceBuffer, DeviceId,
    DomainAttr, ErrorKind, Hmem, Items, KeptRaw, Memory, Path, Promise, Raw, RegionSlice, Rejected,
    RemoteKey, Request,
    iface::AllocRequest,
    loopback::Loopback,
    provider::EndpointAttr,
    system::{SIMULATED, Simulated},
    transfer::{AtomicOp, AtomicType, RemoteSegment},
};

/// The rights with which a NIC only reads memory.
const READS: Access = Access::REMOTE_READ.union(Access::WRITE).union(Access::SEND);
/// Rights with which a NIC writes to memory.
const WRITES: [Access; 3] = [Access::REMOTE_WRITE, Access::READ, Access::RECV];

/// Opens a domain with a cache on a software NIC, next to a simulated device.
fn open() -> (Hmem, Wire) {
    let hmem = Hmem::builder()
        .without_vendor_ifaces()
        .iface(Simulated::builder().build().expect("a simulated device"))
        .provider(Loopback::builder().build().expect("a software NIC"))
        .build()
        .expect("the ifaces start");
    let attr = DomainAttr { cache: Some(CacheAttr::default()), ..DomainAttr::default() };
    let wire = Wire::open(hmem.domain("loopback", attr).expect("a domain"));
    (hmem, wire)
}

fn device_buffer(hmem: &Hmem, len: u64) -> DeviceBuffer {
    let iface = hmem.iface(SIMULATED).expect("it was added");
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(iface, &request).expect("device memory")
}

/// Asserts that every safe transfer refuses to write to a slice of 8 bytes.
fn assert_no_sink(wire: &Wire, slice: RegionSlice) {
    let source = wire.domain.register(vec![0xEE_u8; 8], Access::all()).expect("registers");
    let key = source.key().expect("a key");
    let remote = RemoteSegment { address: key.base(), len: 8, key: &key };
    let queue = wire.domain.open_cq(8).expect("a queue");
    let endpoint = wire.domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
    let peer = endpoint.resolve(&endpoint.name()).expect("itself");
    let atomic = Atomic {
        op: AtomicOp::Sum,
        datatype: AtomicType::U64,
        remote,
        operand: source.slice(0, 8).expect("all of it"),
        result: Some(slice),
        compare: None,
    };
    for (transfer, posted) in [
        ("read", wire.read(slice, remote)),
        ("receive", endpoint.receive(&[slice], None, 1)),
        ("atomic", endpoint.atomic(&atomic, peer, 2)),
    ] {
        let error = posted.expect_err(transfer);
        assert_eq!((error.kind(), error.operation()), (ErrorKind::AccessDenied, transfer));
        assert!(error.remedy_text().is_some(), "{error}");
    }
}

/// MR-18
#[test]
fn shared_slice_in_a_scope_is_read_by_nics_only() {
    let (_hmem, wire) = open();
    let bytes = pattern(1, 5000);
    let scoped = wire.domain.scope(&bytes[..], READS, |region| {
        assert_eq!(region.range(), AddressRange::of(&bytes));
        let key = region.key().expect("a key");
        assert!(wire.get(&key, 0, 5000).expect("read") == bytes, "the NIC read other bytes");
        assert_eq!(wire.put(&key, 0, &[1]).unwrap_err().kind(), ErrorKind::AccessDenied);
        assert_no_sink(&wire, region.slice(8, 8).expect("inside"));
        assert_eq!(region.write(0, &[1]).unwrap_err().kind(), ErrorKind::AccessDenied);
        let mut last = [0];
        region.read(4999, &mut last).expect("inside");
        assert_eq!(last[0], bytes[4999]);
        wire.domain.live().regions
    });
    assert_eq!(scoped.expect("registers"), 1);
    for access in WRITES {
        let refused: hmem::Result<()> =
            wire.domain.scope(&bytes[..], access | READS, |_| panic!("it must not run"));
        let error = refused.expect_err("a right to write");
        assert_eq!((error.kind(), error.operation()), (ErrorKind::AccessDenied, "scope"));
    }
    assert_eq!((bytes, wire.domain.live().regions), (pattern(1, 5000), 0));
}

/// MR-18
#[test]
fn mutable_memory_in_a_scope_is_written_by_nics() {
    let (_hmem, wire) = open();
    let fill = |key: RemoteKey| wire.put(&key, 2, &[7; 60]).expect("write");
    let expected = [&[0; 2][..], &[7; 60], &[0; 2]].concat();
    let (mut array, mut vec, mut part) = ([0; 64], vec![0; 64], vec![0; 100]);
    let key = |region: &hmem::Scoped<'_>| region.key().expect("a key");
    wire.domain.scope(&mut array, REMOTE, |region| fill(key(region))).expect("an array");
    wire.domain.scope(&mut vec, REMOTE, |region| fill(key(region))).expect("a vector");
    wire.domain.scope(&mut part[10..74], REMOTE, |region| fill(key(region))).expect("a slice");
    assert_eq!((&array[..], &vec[..], &part[10..74]), (&*expected, &*expected, &*expected));
    assert_eq!((&part[..10], &part[74..]), (&[0; 10][..], &[0; 26][..]));
    // SAFETY: nothing refers to the vector while it is registered.
    let memory = unsafe { raw(AddressRange::of(&vec)) };
    let copy = wire.domain.scope(memory, REMOTE, |region| {
        wire.put(&key(region), 0, &[9; 2]).expect("write");
        region.read(0, &mut [0; 2])
    });
    let error = copy.expect("addresses").expect_err("the region has no memory to copy");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!((&vec[..3], wire.domain.live().regions), (&[9, 9, 7][..], 0));
}

/// MR-18
#[test]
fn device_buffer_in_a_scope_stays_with_its_owner() {
    let (hmem, wire) = open();
    let buffer = device_buffer(&hmem, 8192);
    let scoped = wire.domain.scope(&buffer, REMOTE, |region| {
        assert_eq!(region.decision().expect("a decision").path, Path::DmaBuf);
        assert_eq!(region.range(), buffer.range());
        let key = region.key().expect("a key");
        wire.put(&key, 100, &[5; 4]).expect("write");
        region.write(102, &[6]).expect("inside");
        assert_eq!(wire.get(&key, 100, 4).expect("read"), [5, 5, 6, 5]);
        key
    });
    let key = scoped.expect("registers");
    assert_eq!(wire.domain.live().regions, 0);
    assert!(wire.get(&key, 100, 4).is_err(), "the key works after the scope");
    let mut found = [0; 4];
    buffer.read(100, &mut found).expect("the memory is allocated");
    assert_eq!(found, [5, 5, 6, 5]);
}

/// MR-18
#[test]
fn numbers_are_registered_by_their_bytes() {
    let (_hmem, wire) = open();
    let items = Items::from(vec![0.5_f32; 1000]);
    let region = wire.domain.register(items, REMOTE).expect("registers");
    assert_eq!(region.len(), 4000);
    let key = region.key().expect("a key");
    assert_eq!(wire.get(&key, 3996, 4).expect("read"), 0.5_f32.to_ne_bytes());
    // Any bits are a float.
    let nan = f32::from_bits(0x7FC0_1234);
    wire.put(&key, 4, &[nan.to_ne_bytes(), (-2.0_f32).to_ne_bytes()].concat()).expect("write");
    region.write(12, &9.0_f32.to_ne_bytes()).expect("inside");
    let outside = region.write(3997, &[0; 4]).unwrap_err();
    assert_eq!(outside.kind(), ErrorKind::OutOfBounds, "{outside}");
    let items = region.close().expect("nothing depends on it").into_vec();
    assert_eq!((items.len(), items[1].to_bits()), (1000, nan.to_bits()));
    assert_eq!((items[0], items[2], items[3], items[4]), (0.5, -2.0, 9.0, 0.5));
    let boxed = wire.domain.register(vec![3_u8; 9].into_boxed_slice(), REMOTE).expect("registers");
    wire.put(&boxed.key().expect("a key"), 8, &[4]).expect("write");
    assert_eq!(*boxed.close().expect("closes"), [3, 3, 3, 3, 3, 3, 3, 3, 4]);
}

/// Registers constant bytes in every way, and asserts that no way lets a NIC write to them.
fn check_constant<M: Memory + AsRef<[u8]> + Clone>(memory: &M) {
    let (_hmem, wire) = open();
    let (domain, bytes) = (&wire.domain, memory.as_ref());
    let is_same = |other: &M| other.as_ref().as_ptr() == bytes.as_ptr();
    let pulled = |key: hmem::Result<RemoteKey>| {
        wire.get(&key.expect("a key"), 0, bytes.len()).expect("read")
    };
    let access = READS | Access::MW_BIND;
    let region = domain.register(memory.clone(), access).expect("registers");
    assert_eq!(pulled(region.key()), bytes);
    assert_no_sink(&wire, region.slice(8, 8).expect("inside"));
    let window = domain.alloc_type_1_window().expect("the software NIC has them");
    for refused in [
        region.write(0, &[1]),
        region.sub(region.range(), Access::REMOTE_WRITE, None).map(drop),
        window.bind(&region, 0, 8, Access::REMOTE_WRITE).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::AccessDenied);
    }
    let sub = region.sub(region.range(), READS, None).expect("a part");
    assert_eq!(pulled(sub.key()), bytes);
    sub.close().expect("nothing depends on it");
    assert!(is_same(&region.close().expect("nothing depends on it")));
    let cache = domain.cache().expect("a cache");
    for write in WRITES {
        let Rejected { value, error } = domain.register(memory.clone(), write).unwrap_err();
        assert!(is_same(&value) && error.remedy_text().is_some());
        assert_eq!((error.kind(), error.operation()), (ErrorKind::AccessDenied, "register"));
        let views = [(0..8, READS), (8..16, write)];
        let batch = Batch::on(&[domain]).add_views(memory.clone(), views).register();
        let Rejected { value, error } = batch.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        assert_eq!((error.context_value("view"), domain.live().regions), (Some("1"), 0));
        assert!(is_same(&value.close().expect("nothing is registered")[0]));
        let cached = cache.own(memory.clone()).expect("a buffer");
        let region = cached.get(0, bytes.len() as u64, READS).expect("registers");
        assert_eq!(pulled(region.view().key()), bytes);
        assert_no_sink(&wire, region.slice(8, 8).expect("inside"));
        drop(region);
        for refused in [cached.get(0, 8, write).map(drop), cached.write(0, &[1])] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::AccessDenied);
        }
        assert!(is_same(&cached.close().expect("no lease is left")));
    }
    assert_eq!(domain.live().regions, 0);
}

/// MR-18
#[test]
fn shared_heap_bytes_are_read_by_nics_only() {
    let bytes: Arc<[u8]> = pattern(2, 3000).into();
    check_constant(&bytes);
    assert_eq!((*bytes).to_vec(), pattern(2, 3000));
    assert_eq!(Arc::strong_count(&bytes), 1, "a closed region holds the bytes");
}

/// MR-18
///
/// A constant may lie in memory that is mapped read-only.
#[test]
fn static_bytes_are_read_by_nics_only() {
    static BYTES: [u8; 6000] = [0x5A; 6000];
    check_constant(&&BYTES[..]);
}

/// MR-18
#[test]
fn promise_to_read_only_is_kept_by_every_transfer() {
    let (_hmem, wire) = open();
    let bytes = pattern(3, 64);
    // SAFETY: the bytes outlive the regions, and nobody writes to them.
    let memory = unsafe { Raw::new(AddressRange::of(&bytes), Promise::ReadOnly) };
    let region = wire.domain.register(memory, READS).expect("registers");
    assert_no_sink(&wire, region.slice(0, 8).expect("inside"));
    for access in WRITES {
        let error = wire.domain.register(memory, access).unwrap_err().error;
        assert_eq!(error.kind(), ErrorKind::AccessDenied, "{error}");
        let error = wire.domain.cache().expect("a cache").get(memory, access).unwrap_err();
        assert_eq!((error.kind(), error.operation()), (ErrorKind::AccessDenied, "get"));
    }
    assert_eq!(wire.get(&region.key().expect("a key"), 0, 64).expect("read"), bytes);
}

/// The owner of device memory. Its drop increments a counter.
#[derive(Debug)]
struct Owner {
    buffer: DeviceBuffer,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

/// MR-18
#[test]
fn region_keeps_the_owner_of_its_addresses() {
    let (hmem, wire) = open();
    let domain = &wire.domain;
    let dropped = Arc::new(AtomicUsize::new(0));
    let drops = || dropped.swap(0, Ordering::SeqCst);
    let kept = |byte: u8| -> KeptRaw<Owner> {
        let buffer = device_buffer(&hmem, 4096);
        buffer.write(0, &[byte; 8]).expect("inside");
        let range = buffer.range();
        // SAFETY: the region keeps the buffer, and nothing refers into device memory.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        memory.keep(Owner { buffer, dropped: Arc::clone(&dropped) })
    };
    let pulled = |key: hmem::Result<RemoteKey>| {
        wire.get(&key.expect("a key"), 0, 8).expect("the memory is allocated")
    };

    let region = domain.register(kept(1), REMOTE).expect("registers");
    assert_eq!((pulled(region.key()), drops()), (vec![1; 8], 0));
    let owner = region.close().expect("nothing depends on it").into_owner();
    let mut found = [0; 8];
    owner.buffer.read(0, &mut found).expect("inside");
    assert_eq!((found, drops()), ([1; 8], 0), "close returns the owner");
    drop(owner);
    assert_eq!(drops(), 1);

    let region = domain.register(kept(2), REMOTE).expect("registers");
    let sub = region.sub(region.range(), REMOTE, None).expect("a part");
    drop(region);
    assert_eq!((pulled(sub.key()), drops()), (vec![2; 8], 0), "freed under a sub-region");
    drop(sub);
    assert_eq!((drops(), domain.live().regions), (1, 0));

    let unknown = Access::from_bits_retain(1 << 40);
    let rejected = domain.register(kept(3), unknown).expect_err("an unknown right");
    assert_eq!((drops(), rejected.error.kind()), (0, ErrorKind::BadAccess));
    drop(rejected);
    assert_eq!(drops(), 1);

    let batch = Batch::on(&[domain])
        .add(Request::new(kept(4), REMOTE))
        .add_views(kept(5), [(0..8, REMOTE), (8..16, REMOTE)])
        .register()
        .expect("registers");
    let sub = batch.regions()[1].sub(batch.regions()[1].range(), REMOTE, None).expect("a part");
    for (memory, byte) in [(0, 4), (1, 5)] {
        let view = batch.view(0, memory, 0).expect("there");
        assert_eq!((pulled(view.key()), drops()), (vec![byte; 8], 0));
    }
    let busy = batch.close().expect_err("a sub-region");
    assert_eq!((busy.error.kind(), drops()), (ErrorKind::Busy, 0));
    drop(sub);
    let owners = busy.value.close().expect("nothing depends on it any more");
    assert_eq!((owners.len(), drops()), (2, 0));
    for (kept, byte) in owners.iter().zip([4, 5]) {
        kept.owner().buffer.read(0, &mut found).expect("inside");
        assert_eq!((found, *kept.raw().at()), ([byte; 8], kept.owner().buffer.range()));
    }
    drop(owners);
    assert_eq!(drops(), 2);
    drop(Batch::on(&[domain]).add(Request::new(kept(6), REMOTE)).register().expect("registers"));
    assert_eq!((drops(), domain.live().regions), (1, 0));
}
