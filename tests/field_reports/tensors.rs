//! Reports about tensors: many in few allocations, and tensors with gaps.

use std::sync::Arc;

use hmem::{
    AllocationKind, Batch, DeviceBuffer, DeviceId, DomainAttr, ErrorKind, Growth, Hmem, Iface,
    IfaceExt, SparseRegion, iface::AllocRequest, key_feed::PeerKeys, loopback::Loopback,
    path::P2pPolicy, system::Simulated, transfer::RemoteSegment,
};

use crate::wire::{REMOTE, Wire, pattern, raw};

fn wire_to(device: Arc<dyn Iface>) -> Wire {
    let nic = Loopback::builder().build().expect("a software NIC");
    let hmem = Hmem::builder().without_vendor_ifaces().shared_iface(device);
    let hmem = hmem.build().expect("the ifaces start");
    let attr = DomainAttr { p2p: P2pPolicy::Required, ..DomainAttr::default() };
    Wire::open(hmem.domain_on(&nic, attr).expect("a domain"))
}

fn device_and_wire() -> (Arc<dyn Iface>, Wire) {
    let device: Arc<dyn Iface> = Arc::new(Simulated::builder().build().expect("a device"));
    (Arc::clone(&device), wire_to(device))
}

fn buffer(device: &Arc<dyn Iface>, len: u64) -> DeviceBuffer {
    let request = AllocRequest { len, device: DeviceId(0), kind: AllocationKind::Device };
    DeviceBuffer::allocate(device, &request).expect("allocate")
}

/// REL-06, MR-17
///
/// The 148 parameters of GPT-2 (12 layers of 12, and 4 more) lie in a few blocks of PyTorch's
/// allocator.
#[test]
fn nixl_77_parameters_of_a_model_cost_a_registration_for_each_block() {
    const BLOCKS: usize = 4;
    const PARAMETERS: usize = 12 * 12 + 4;
    const LEN: u64 = 6 * 1024;
    let (device, wire) = device_and_wire();
    let nics = [&wire.domain];
    let parts = |_| (0..(PARAMETERS / BLOCKS) as u64).map(|at| (at * LEN..(at + 1) * LEN, REMOTE));
    for (growth, registrations) in [(Growth::None, PARAMETERS), (Growth::Allocation, BLOCKS)] {
        let blocks = (0..BLOCKS).map(|_| buffer(&device, 1 << 20));
        let batch = blocks
            .enumerate()
            .fold(Batch::on(&nics), |batch, (block, memory)| batch.add_views(memory, parts(block)));
        let registered = batch.grow(growth).register().map_err(hmem::Error::from);
        let registered = registered.expect("the whole model");
        assert_eq!(registered.regions().len(), registrations);
        assert_eq!(registered.views(0).len(), PARAMETERS);
        for number in 0..PARAMETERS {
            let (block, parameter) = (number * BLOCKS / PARAMETERS, number % (PARAMETERS / BLOCKS));
            let view = registered.view(0, block, parameter).expect("there");
            let key = view.key().expect("a key");
            wire.put(&key, LEN - 4, &(number as u32).to_ne_bytes()).expect("write");
            key.slice(LEN, 1).expect_err("the next parameter");
        }
        for number in 0..PARAMETERS {
            let (block, parameter) = (number * BLOCKS / PARAMETERS, number % (PARAMETERS / BLOCKS));
            let mut found = [0; 4];
            let at = (parameter as u64 + 1) * LEN - 4;
            registered.read(block, at, &mut found).expect("inside");
            assert_eq!(u32::from_ne_bytes(found), number as u32);
        }
        registered.close().map_err(hmem::Error::from).expect("close");
        assert_eq!(wire.domain.live().regions, 0);
    }
}

/// REL-06, MR-17
///
/// `torch.tensor([[1, 2], [3, 4]])[:, 1]` is 2 and 4, with a gap between them.
#[test]
fn nixl_563_column_of_a_tensor_is_registered_by_its_elements() {
    let (device, wire) = device_and_wire();
    let tensor = buffer(&device, 4 * 8);
    for (at, number) in [1_u64, 2, 3, 4].into_iter().enumerate() {
        tensor.write(8 * at as u64, &number.to_ne_bytes()).expect("inside");
    }
    let column = [8..16, 24..32].map(|element| (element, REMOTE));
    let nics = [&wire.domain];
    let registered = Batch::on(&nics).add_views(tensor, column).register();
    let registered = registered.map_err(hmem::Error::from).expect("both elements");
    for (view, expected) in [2_u64, 4].into_iter().enumerate() {
        let key = registered.view(0, 0, view).expect("there").key().expect("a key");
        assert_eq!(wire.get(&key, 0, 8).expect("read"), expected.to_ne_bytes());
        wire.get(&key, 8, 1).expect_err("an element of the other column");
        wire.put(&key, 0, &(10 * expected).to_ne_bytes()).expect("write");
    }
    let tensor = registered.close().map_err(hmem::Error::from).expect("close").remove(0);
    let mut found = [0; 32];
    tensor.read(0, &mut found).expect("inside");
    let numbers = found.chunks_exact(8).map(|of| u64::from_ne_bytes(of.try_into().expect("eight")));
    assert!(numbers.eq([1, 20, 3, 40]));
}

/// REL-06, LIFE-02
///
/// A tensor of the segment may span two mappings.
#[test]
fn monarch_4756_growing_segment_costs_a_registration_for_each_mapping() {
    const MAPPINGS: u64 = 8;
    const MAPPING: u64 = 64 << 10;
    const TENSOR: u64 = 3 << 10;
    let device = Arc::new(Simulated::builder().build().expect("a device"));
    let wire = wire_to(Arc::clone(&device) as _);
    let reserved = device.reserve(MAPPINGS * MAPPING).expect("addresses");
    // SAFETY: the region is closed before the memory is freed, and nothing refers to it.
    let memory = unsafe { raw(reserved) };
    let segment = SparseRegion::new(&[&wire.domain], memory, REMOTE).expect("a region");
    let (mut updates, mut peer) = (segment.subscribe(), PeerKeys::default());
    let nic = wire.domain.provider_attr().nic.name.clone();
    let mut named = Vec::new();
    let mut memories = Vec::new();
    for mapped in 1..=MAPPINGS {
        let next = reserved.slice((mapped - 1) * MAPPING, MAPPING).expect("inside");
        memories.push(device.map(next, DeviceId(0)).expect("map"));
        let generation = segment.refresh().expect("refresh");
        peer.apply(&updates.next().expect("keys")).expect("an update");
        while (named.len() as u64 + 1) * TENSOR <= mapped * MAPPING {
            let number = named.len() as u64;
            named.push((number * TENSOR..(number + 1) * TENSOR, generation));
        }
        assert_eq!(wire.domain.live().regions, mapped, "{} tensors", named.len());
        // Tensors that were named before the segment grew still have their keys.
        for (number, (offsets, generation)) in (0..).zip(&named) {
            let bytes = pattern(number, TENSOR as usize);
            let segments = peer.segments(&nic, offsets.clone(), *generation).expect("mapped");
            let mut at = 0;
            for RemoteSegment { address, len, key } in segments {
                let (start, end) = (address.0 - key.base().0, at + len as usize);
                wire.put(key, start, &bytes[at..end]).expect("write");
                assert_eq!(wire.get(key, start, len as usize).expect("read"), bytes[at..end]);
                at = end;
            }
            assert_eq!(at, bytes.len());
        }
    }
    let missing = peer.segments(&nic, MAPPINGS * MAPPING..MAPPINGS * MAPPING + 1, 1);
    assert_eq!(missing.expect_err("no memory").kind(), ErrorKind::OutOfBounds);
    segment.close().map_err(hmem::Error::from).expect("close");
    assert_eq!(wire.domain.live().regions, 0);
    for memory in memories {
        // SAFETY: `map` mapped the memory, and no registration uses it any more.
        unsafe { device.free(&memory) }.expect("free");
    }
}
