//! Units of export (LIFE-05): if the driver or the NIC refuses a dma-buf of exactly the range, the
//! segment or the whole allocation is exported. The NIC then still registers only the range.

use std::{
    ffi::c_int,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::path_support::{
    ALL_IMPORTS, Bench, REMOTE, page_size, register_range,
    vendor::{Refuse, Vendor},
    wire::Wire,
};
use hmem_core::{
    Access, AddressRange, AllocationKind, Batch, Decision, DeviceBuffer, DeviceId, Domain, Errno,
    Error, ErrorKind, Iface, IfaceKind, MemoryRegion, Path, Promise, Raw, Region, Request,
    iface::AllocRequest,
    path::{ExportUnit, P2pPolicy},
    provider::Imports,
};
use hmem_iface_system::{DeviceCall, DmaBufKind, Simulated};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, NicCall};

/// Length of a segment in bytes.
fn step() -> u64 {
    4 * page_size()
}
const IMPORTS: Imports =
    Imports { pcie_mapping_first: Some(false), peer_memory: false, ..ALL_IMPORTS };
const EINVAL: c_int = 22;

struct World {
    bench: Bench,
    vendor: Arc<dyn Iface>,
    domain: Domain,
}

/// Creates a device that the NICs `loop0` and `loop1` reach by dma-bufs with the default mapping.
fn world(breaks: impl FnOnce(&mut Vendor)) -> World {
    let memory = Simulated::builder().window(1 << 32).dma_buf(DmaBufKind::MemFd);
    let memory = Arc::new(memory.segment_len(step()).build().expect("simulated memory"));
    let mut vendor = Vendor::new(IfaceKind::CUDA, Arc::clone(&memory));
    breaks(&mut vendor);
    let vendor: Arc<dyn Iface> = Arc::new(vendor);
    let nics = Loopback::builder().nic("loop0").nic("loop1").imports(IMPORTS);
    let bench = Bench::over(memory, Arc::clone(&vendor), nics, DefaultPathSelector::new());
    let domain = bench.domain("loop0", P2pPolicy::Enabled);
    World { bench, vendor, domain }
}

fn refused() -> Option<Error> {
    Some(
        Error::new(ErrorKind::InvalidArgument, "cuMemGetHandleForAddressRange")
            .iface(IfaceKind::CUDA)
            .driver_code("CUDA_ERROR_INVALID_VALUE", 1),
    )
}

impl World {
    fn buffer(&self, kind: AllocationKind, len: u64) -> DeviceBuffer {
        let request = AllocRequest { len, device: DeviceId(0), kind };
        DeviceBuffer::allocate(&self.vendor, &request).expect("memory")
    }

    fn exports(&self) -> u64 {
        self.bench.calls(DeviceCall::ExportDmaBuf)
    }

    fn refuse_next_import(&self) {
        self.bench.faults.fail_nth(NicCall::Register, 1, Errno(EINVAL));
    }
}

fn register(domain: &Domain, range: AddressRange) -> Region<Raw> {
    register_range(domain, range).unwrap_or_else(|error| panic!("{error}"))
}

fn part(buffer: &DeviceBuffer, start: u64, len: u64) -> AddressRange {
    buffer.range().slice(start, len).expect("a part of the buffer")
}

fn decision(region: &MemoryRegion) -> &Arc<Decision> {
    region.decision().expect("a device region has a decision")
}

/// Returns the units of the attempts that called a driver, each with its outcome.
fn units(decision: &Decision) -> Vec<(Option<ExportUnit>, bool)> {
    let called = decision.attempts.iter().filter(|attempt| attempt.driver_called);
    called.map(|attempt| (attempt.unit, attempt.error.is_none())).collect()
}

const RANGE: Option<ExportUnit> = Some(ExportUnit::Range);
const SEGMENT: Option<ExportUnit> = Some(ExportUnit::Segment);
const ALLOCATION: Option<ExportUnit> = Some(ExportUnit::Allocation);

/// LIFE-05
#[test]
fn refused_range_is_exported_by_its_allocation_and_the_decision_says_so() {
    let world = world(|vendor| vendor.less = refused);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    let region = register(&world.domain, part(&buffer, page_size(), page_size()));
    let decision = decision(&region);
    assert_eq!((decision.path, decision.unit), (Path::DmaBuf, ExportUnit::Allocation));
    assert_eq!(units(decision), [(RANGE, false), (ALLOCATION, true)], "{decision}");
    let attempts = &decision.attempts;
    assert_eq!(attempts[0].call, format!("export_dma_buf({}, Default)", region.range()));
    assert_eq!(attempts[0].cause_name, Some("other-export-unit"), "{decision}");
    assert_eq!(attempts[1].call, "register(dma-buf, Default mapping, whole allocation)");
    assert!(decision.to_string().contains(", exported by whole allocation\n"), "{decision}");
    let json = serde_json::to_value(&**decision).expect("JSON");
    assert_eq!(
        (&json["unit"], &json["attempts"][0]["unit"]),
        (&"allocation".into(), &"range".into())
    );
    assert_eq!(world.bench.device.stats().live_exports, 0);
}

/// LIFE-05
#[test]
fn range_that_the_nic_refuses_is_exported_by_its_allocation() {
    let world = world(|_| {});
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    world.refuse_next_import();
    let region = register(&world.domain, part(&buffer, page_size(), page_size()));
    let decision = decision(&region);
    assert_eq!(units(decision), [(RANGE, false), (ALLOCATION, true)], "{decision}");
    assert_eq!(decision.attempts[0].cause_name, Some("other-export-unit"), "{decision}");
    assert_eq!(world.bench.device.stats().live_exports, 0);
}

/// LIFE-05
#[test]
fn key_of_a_range_reaches_no_other_byte_of_its_exported_allocation() {
    let world = world(|vendor| vendor.less = refused);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    buffer.write(0, &vec![1; 4 * page_size() as usize]).expect("the device's own copy");
    let range = part(&buffer, page_size(), page_size());
    let region = register(&world.domain, range);
    let key = region.key().expect("a key");
    assert!(key.narrow(0, page_size()).is_ok() && key.narrow(0, page_size() + 1).is_err());

    let initiator = world.bench.domain("loop1", P2pPolicy::Enabled);
    let wire = Wire::new(&initiator, &world.domain, page_size() as usize);
    wire.push(&key, 0, &vec![2; page_size() as usize]).expect("the requested bytes can be written");
    for (at, len) in [
        (page_size(), 1),
        (page_size() - 1, 2),
        (2 * page_size(), 8),
        (page_size().wrapping_neg(), 8),
    ] {
        assert!(wire.push(&key, at, &[3; 8][..len]).is_err(), "{len} bytes at {at:#x}");
        assert!(wire.pull(&key, at, len).is_err(), "{len} bytes at {at:#x}");
    }
    let mut found = vec![0; 4 * page_size() as usize];
    buffer.read(0, &mut found).expect("the device's own copy");
    let written = |at| (page_size()..2 * page_size()).contains(&(at as u64));
    assert!(found.iter().enumerate().all(|(at, byte)| *byte == 1 + u8::from(written(at))));
}

/// LIFE-05
#[test]
fn unit_that_worked_is_tried_first_from_then_on() {
    let world = world(|vendor| vendor.less = refused);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    let first = register(&world.domain, part(&buffer, page_size(), page_size()));
    assert!(!decision(&first).from_cache);
    let again = register(&world.domain, part(&buffer, 2 * page_size(), page_size()));
    let another = register(&world.domain, part(&buffer, 3 * page_size(), page_size()));
    assert!(decision(&again).from_cache && decision(&again).unit == ExportUnit::Allocation);
    // A registration with a refusal of its own has a decision of its own.
    assert!(Arc::ptr_eq(decision(&again), decision(&another)));

    // A whole allocation is exported as the range, and does not change the memory of the unit.
    let whole = register(&world.domain, buffer.range());
    assert_eq!(units(decision(&whole)), [(RANGE, true)]);
    let part = register(&world.domain, part(&buffer, page_size(), page_size()));
    assert!(Arc::ptr_eq(decision(&part), decision(&again)));

    // Other NICs do not share the memory.
    let other = world.bench.domain("loop1", P2pPolicy::Enabled);
    let region = register(&other, buffer.range());
    assert_eq!(decision(&region).unit, ExportUnit::Range);
}

/// LIFE-05
#[test]
fn refused_unit_gives_way_to_another_one_which_is_then_remembered() {
    static LESS: AtomicBool = AtomicBool::new(true);
    let less: Refuse = || LESS.load(Ordering::Relaxed).then(refused).flatten();
    let world = world(|vendor| vendor.less = less);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    let register = || register(&world.domain, part(&buffer, page_size(), page_size()));
    assert_eq!(decision(&register()).unit, ExportUnit::Allocation);

    LESS.store(false, Ordering::Relaxed);
    world.bench.device.faults().fail_next(DeviceCall::ExportDmaBuf, Errno(EINVAL));
    let region = register();
    assert_eq!(units(decision(&region)), [(ALLOCATION, false), (RANGE, true)]);
    let exports = world.exports();
    assert_eq!(decision(&register()).unit, ExportUnit::Range);
    assert_eq!(world.exports() - exports, 1, "the range is tried first again");

    LESS.store(true, Ordering::Relaxed);
    assert_eq!(decision(&register()).unit, ExportUnit::Allocation);
    assert!(Arc::ptr_eq(decision(&register()), decision(&register())), "and the allocation");
}

/// LIFE-05
#[test]
fn whole_segment_is_tried_before_the_allocation() {
    for (breaks, tried) in [
        (
            (|vendor: &mut Vendor| vendor.part = refused) as fn(&mut Vendor),
            &[(RANGE, false), (SEGMENT, true)][..],
        ),
        (|vendor| vendor.less = refused, &[(RANGE, false), (SEGMENT, false), (ALLOCATION, true)]),
    ] {
        let world = world(|vendor| {
            vendor.segment_len = Some(step());
            breaks(vendor);
        });
        let buffer = world.buffer(AllocationKind::Device, 3 * step());
        let region = register(&world.domain, part(&buffer, step() + page_size(), page_size()));
        assert_eq!(units(decision(&region)), tried);
        let again = register(&world.domain, part(&buffer, step() + 2 * page_size(), page_size()));
        assert!(decision(&again).from_cache);
        assert_eq!(Some(decision(&again).unit), tried.last().expect("one succeeded").0);
        let initiator = world.bench.domain("loop1", P2pPolicy::Enabled);
        let wire = Wire::new(&initiator, &world.domain, page_size() as usize);
        wire.push(&again.key().expect("a key"), 8, &[7; 8]).expect("write");
        let mut found = [0; 24];
        buffer.read(step() + 2 * page_size(), &mut found).expect("the device's own copy");
        assert_eq!(found[..16], [[0; 8], [7; 8]].concat());
    }
}

/// LIFE-05
#[test]
fn range_of_whole_segments_is_not_exported_by_segments_again() {
    let world = world(|vendor| {
        vendor.segment_len = Some(step());
        vendor.less = refused;
    });
    let buffer = world.buffer(AllocationKind::Device, 3 * step());
    let region = register(&world.domain, part(&buffer, step(), step()));
    let found = decision(&region);
    assert_eq!(units(found), [(RANGE, false), (ALLOCATION, true)], "{found}");
}

/// LIFE-05
#[test]
fn range_over_several_segments_is_exported_by_whole_segments() {
    let world = world(|vendor| {
        vendor.segment_len = Some(step());
        (vendor.whole, vendor.part) = (refused, refused);
    });
    let buffer = world.buffer(AllocationKind::Device, 3 * step());
    let region =
        register(&world.domain, part(&buffer, step() - page_size(), step() + 2 * page_size()));
    let found = decision(&region);
    assert_eq!(units(found), [(RANGE, false), (RANGE, false), (SEGMENT, true)], "{found}");
    let call = &found.attempts[2].call;
    assert_eq!(
        call,
        "register(dma-buf, Default mapping, 3 segments in 3 dma-bufs, whole segments)"
    );
    let initiator = world.bench.domain("loop1", P2pPolicy::Enabled);
    let bytes: Vec<u8> =
        (0..step() + 2 * page_size()).map(|at| (at * 7 + (at >> 8)) as u8).collect();
    let wire = Wire::new(&initiator, &world.domain, bytes.len());
    wire.push(&region.key().expect("a key"), 0, &bytes).expect("write");
    let mut found = vec![0; 3 * step() as usize];
    buffer.read(0, &mut found).expect("the device's own copy");
    let start = (step() - page_size()) as usize;
    assert!(found[start..start + bytes.len()] == bytes);
    assert!(found[..start].iter().chain(&found[start + bytes.len()..]).all(|byte| *byte == 0));
}

/// LIFE-05
#[test]
fn allocation_with_a_segment_that_cannot_be_exported_is_not_tried() {
    let world = world(|_| {});
    let buffer = world.buffer(AllocationKind::Virtual, 2 * step());
    let base = buffer.allocation().base();
    world.bench.device.set_exportable(base, false).expect("a live allocation");
    for nth in [1, 2] {
        world.bench.device.faults().fail_nth(DeviceCall::ExportDmaBuf, nth, Errno(EINVAL));
    }
    let region = register(&world.domain, part(&buffer, step() + page_size(), page_size()));
    assert_eq!(decision(&region).path, Path::Staged);
    let expected = [(RANGE, false), (SEGMENT, false), (None, true)];
    assert_eq!(units(decision(&region)), expected, "{}", decision(&region));
}

/// LIFE-05
#[test]
fn range_that_is_the_allocation_is_tried_once() {
    let world = world(|_| {});
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    world.bench.device.faults().fail_always(DeviceCall::ExportDmaBuf, Errno(EINVAL));
    let region = register(&world.domain, buffer.range());
    assert_eq!(units(decision(&region)), [(RANGE, false), (None, true)]);
}

/// LIFE-05
#[test]
fn device_without_exports_has_the_same_cause_for_each_unit() {
    let unsupported: Refuse = || Some(Error::new(ErrorKind::Unsupported, "export"));
    let world = world(|vendor| vendor.dma_buf = unsupported);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    let region = register(&world.domain, part(&buffer, page_size(), page_size()));
    let found = decision(&region);
    assert_eq!(units(found), [(RANGE, false), (ALLOCATION, false), (None, true)], "{found}");
    for attempt in &found.attempts[..2] {
        assert_eq!(attempt.cause_name, Some("device-without-dma-buf"), "{found}");
    }
}

/// LIFE-05
#[test]
fn refusal_that_a_larger_export_would_not_change_ends_the_units() {
    let unreachable: Refuse = || Some(Error::new(ErrorKind::Unreachable, "export"));
    let world = world(|vendor| vendor.dma_buf = unreachable);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    let region = register(&world.domain, part(&buffer, page_size(), page_size()));
    assert_eq!(units(decision(&region)), [(RANGE, false), (None, true)]);
}

/// LIFE-05
#[test]
fn nics_share_the_export_of_an_allocation() {
    let world = world(|vendor| vendor.less = refused);
    let other = world.bench.domain("loop1", P2pPolicy::Enabled);
    let buffer = world.buffer(AllocationKind::Device, 4 * page_size());
    // The selector probes each NIC before it exports for several.
    drop(register(&world.domain, buffer.range()));
    drop(register(&other, buffer.range()));
    let exports = world.exports();
    // SAFETY: the buffer is dropped after the regions, and no reference to it exists.
    let memory = unsafe { Raw::new(part(&buffer, page_size(), page_size()), Promise::ReadWrite) };
    let nics = [&world.domain, &other];
    let request = Request::new(memory, Access::READ | REMOTE);
    let shared = Batch::on(&nics).add(request).register().expect("registered");
    let found = [0, 1].map(|at| units(decision(&shared.regions()[at])));
    assert_eq!(found[0], [(RANGE, false), (ALLOCATION, true)]);
    assert_eq!(found[1], [(ALLOCATION, true)], "the shared export is tried first");
    assert_eq!((world.exports() - exports, world.bench.device.stats().live_exports), (1, 0));
    shared.close().map_err(Error::from).expect("close");
}
