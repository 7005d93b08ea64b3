//! Tests of lookups of the allocation at an address: HM-01, HM-02, HM-05.

mod support;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, Iface, IfaceExt,
    IfaceKind, Registry, iface::AllocRequest,
};
use hmem_iface_system::{AddressReuse, SIMULATED, Simulated, System};
use proptest::prelude::*;
use support::*;

fn registry(simulated: Simulated) -> (Registry, Arc<Simulated>) {
    let simulated = Arc::new(simulated);
    let mut registry = Registry::new();
    registry.add(Arc::new(System::new())).unwrap();
    registry.add(Arc::clone(&simulated) as Arc<dyn Iface>).unwrap();
    (registry, simulated)
}

/// HM-02
#[test]
fn query_finds_each_of_ten_thousand_allocations() {
    let (registry, simulated) = registry(simulated());
    let page = page();
    let lens = [1, 63, page - 1, page, page + 1, 17 * page + 368];
    let allocations: Vec<Allocation> =
        (0..10_000).map(|i| device(&*simulated, lens[i % lens.len()])).collect();
    for allocation in &allocations {
        let len = allocation.range.len();
        for offset in [0, len / 2, len - 1] {
            let owner = registry.owner_of(at(allocation, offset)).unwrap();
            assert_eq!(owner.allocation, Some(*allocation));
            assert_eq!((owner.iface, owner.device), (SIMULATED, Some(DeviceId(0))));
        }
        assert_ne!(registry.owner_of(at(allocation, len)).unwrap().allocation, Some(*allocation));
        assert_eq!(
            registry.owner_of_range(allocation.range).unwrap().allocation,
            Some(*allocation)
        );
    }
}

/// HM-02
#[test]
fn address_without_a_device_belongs_to_system() {
    let (registry, simulated) = registry(simulated());
    let allocation = device(&*simulated, 4096);
    let on_the_stack = [0_u8; 64];
    let window = simulated.window();
    let outside = [
        Address::of_ptr(on_the_stack.as_ptr()),
        Address(0),
        Address(u64::MAX),
        Address(window.start().0 - 1),
        window.end().unwrap(),
    ];
    for address in outside {
        let owner = registry.owner_of(address).unwrap();
        assert_eq!((owner.iface, owner.allocation), (IfaceKind::SYSTEM, None), "{address}");
    }
    free(&*simulated, &allocation).unwrap();
    assert_eq!(registry.owner_of(allocation.base()).unwrap().iface, IfaceKind::SYSTEM);
}

/// HM-02
#[test]
fn two_simulated_devices_in_one_process_keep_their_memory_apart() {
    let one = simulated();
    let other = Simulated::builder().kind(IfaceKind(0x101)).name("other").build().unwrap();
    let (ours, theirs) = (device(&one, 100), device(&other, 100));
    assert_eq!(one.query(theirs.base()).unwrap(), None);
    assert_eq!(other.query(theirs.base()).unwrap(), Some(theirs));
    let mut registry = Registry::new();
    registry.add(Arc::new(one)).unwrap();
    registry.add(Arc::new(other)).unwrap();
    assert_eq!(registry.owner_of(ours.base()).unwrap().iface, SIMULATED);
    assert_eq!(registry.owner_of(theirs.base()).unwrap().iface, IfaceKind(0x101));
}

#[test]
fn allocations_larger_than_many_table_blocks_are_found_everywhere() {
    let simulated = Simulated::builder().memory_per_device(1 << 40).build().unwrap();
    let page = page();
    let before = device(&simulated, 3 * page);
    let large = device(&simulated, (5 << 30) + 12_345);
    let after = device(&simulated, page);
    let step = 3 * (1 << 20) + 17;
    for offset in (0..large.range.len()).step_by(step) {
        assert_eq!(simulated.query(at(&large, offset)).unwrap(), Some(large));
    }
    assert_eq!(simulated.query(at(&large, large.range.len() - 1)).unwrap(), Some(large));
    assert_eq!(simulated.query(at(&before, 3 * page - 1)).unwrap(), Some(before));
    assert_eq!(simulated.query(after.base()).unwrap(), Some(after));
    free(&simulated, &large).unwrap();
    for offset in (0..large.range.len()).step_by(step) {
        assert_eq!(simulated.query(at(&large, offset)).unwrap(), None);
    }
    assert_eq!(simulated.query(after.base()).unwrap(), Some(after));
}

/// HM-05
#[test]
fn device_out_of_range_is_an_error_with_its_number() {
    let simulated = Simulated::builder().devices(2).build().unwrap();
    let request = AllocRequest { len: 64, device: DeviceId(2), kind: AllocationKind::Device };
    let error = simulated.allocate(&request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("device 2 of 2"), "{error}");
    assert_eq!(
        simulated.flush_inbound(DeviceId(2)).unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    // Host memory belongs to no device, so the request's device number is ignored.
    let host = AllocRequest { kind: AllocationKind::Host, ..request };
    assert_eq!(simulated.allocate(&host).unwrap().device, None);
    let device = DeviceId(1);
    let managed = AllocRequest { kind: AllocationKind::Managed, device, ..request };
    assert_eq!(simulated.allocate(&managed).unwrap().device, Some(device));
}

/// HM-05
#[test]
fn any_thread_may_use_any_device() {
    let simulated = Arc::new(Simulated::builder().devices(4).build().unwrap());
    let threads: Vec<_> = (0..4)
        .map(|number| {
            let simulated = Arc::clone(&simulated);
            thread::spawn(move || {
                let request = AllocRequest {
                    len: 999,
                    device: DeviceId(number),
                    kind: AllocationKind::Device,
                };
                let allocation = simulated.allocate(&request).unwrap();
                let other_thread = Arc::clone(&simulated);
                thread::spawn(move || {
                    other_thread.write_bytes(allocation.base(), &pattern(999, 1)).unwrap();
                    free(&*other_thread, &allocation).unwrap();
                })
                .join()
                .unwrap();
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(simulated.stats().live_allocations, 0);
}

#[derive(Clone, Debug)]
enum Step {
    Allocate { kind: usize, len: u64 },
    Free { which: usize },
    Query { which: usize, offset: u64 },
    Reuse(AddressReuse),
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![1_u64..20_000, 1_u64..10_000_000, Just(4 << 20), Just(12 << 20)];
    prop_oneof![
        4 => (0..DEVICE_KINDS.len(), len).prop_map(|(kind, len)| Step::Allocate { kind, len }),
        3 => any::<usize>().prop_map(|which| Step::Free { which }),
        6 => (any::<usize>(), any::<u64>())
            .prop_map(|(which, offset)| Step::Query { which, offset }),
        1 => prop_oneof![Just(AddressReuse::Off), Just(AddressReuse::JustFreed)]
            .prop_map(Step::Reuse),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// HM-01, HM-02
    ///
    /// After any sequence of allocations and frees, a lookup returns the same as a linear search of
    /// the list of live allocations.
    #[test]
    fn lookups_agree_with_a_plain_list(steps in prop::collection::vec(step(), 1..120)) {
        // The window is small, so that addresses are reused.
        let simulated = Simulated::builder().window(256 << 20).arena(8 << 20).build().unwrap();
        let mut live: Vec<Allocation> = Vec::new();
        let mut ever: Vec<AddressRange> = Vec::new();
        let mut last_id = 0;
        for step in steps {
            match step {
                Step::Allocate { kind, len } => {
                    let Ok(allocation) = try_allocate(&simulated, len, DEVICE_KINDS[kind]) else {
                        continue;
                    };
                    prop_assert!(allocation.id.0 > last_id);
                    last_id = allocation.id.0;
                    prop_assert!(simulated.window().contains_range(allocation.range));
                    prop_assert!(!live.iter().any(|other| other.range.overlaps(allocation.range)));
                    live.push(allocation);
                    ever.push(allocation.range);
                }
                Step::Free { which } if !live.is_empty() => {
                    let allocation = live.swap_remove(which % live.len());
                    free(&simulated, &allocation).unwrap();
                    prop_assert!(free(&simulated, &allocation).is_err());
                }
                Step::Query { which, offset } if !ever.is_empty() => {
                    let range = ever[which % ever.len()];
                    let address = Address(range.start().0 + offset % (range.len() + 8192) - 4096);
                    let expected =
                        live.iter().find(|allocation| allocation.range.contains(address)).copied();
                    prop_assert_eq!(simulated.query(address).unwrap(), expected);
                }
                Step::Reuse(reuse) => simulated.set_address_reuse(reuse),
                Step::Free { .. } | Step::Query { .. } => {}
            }
        }
        for allocation in &live {
            free(&simulated, allocation).unwrap();
        }
        prop_assert_eq!(simulated.stats().live_bytes, 0);
    }
}

/// HM-01
///
/// A lookup that races with frees and allocations never returns a mixture of two allocations. It
/// finds every allocation that stays, and none that was freed before the lookup began.
#[test]
fn lookups_that_race_with_frees_are_consistent() {
    const ROUNDS: u64 = 20_000;
    let page = page();
    let simulated =
        Arc::new(Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap());
    let stays: Vec<Allocation> = (0..64).map(|_| device(&*simulated, page)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    // The highest identity of the freed allocations.
    let gone = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (simulated, stays) = (Arc::clone(&simulated), stays.clone());
            let (stop, gone) = (Arc::clone(&stop), Arc::clone(&gone));
            thread::spawn(move || {
                let mut seen = HashMap::new();
                let mut i = 0_u64;
                while !stop.load(Ordering::Acquire) {
                    i += 1;
                    let kept = &stays[i as usize % stays.len()];
                    assert_eq!(simulated.query(at(kept, i % page)).unwrap(), Some(*kept));
                    let address = Address(stays[63].base().0 + page + i * 512 % (8 * page));
                    let gone_before = gone.load(Ordering::Acquire);
                    if let Some(found) = simulated.query(address).unwrap() {
                        assert!(found.range.contains(address));
                        assert!(found.id.0 > gone_before, "the lookup found a freed allocation");
                        seen.insert(found.id, found);
                    }
                }
                seen
            })
        })
        .collect();
    let mut made = HashMap::new();
    for round in 0..ROUNDS {
        let allocation = device(&*simulated, 1 + round * 977 % (6 * page));
        made.insert(allocation.id, allocation);
        free(&*simulated, &allocation).unwrap();
        gone.store(allocation.id.0, Ordering::Release);
    }
    stop.store(true, Ordering::Release);
    for reader in readers {
        for (id, found) in reader.join().unwrap() {
            assert_eq!(made.get(&id), Some(&found), "the lookup mixed two allocations");
        }
    }
}

#[test]
fn threads_allocate_and_free_concurrently() {
    let simulated =
        Arc::new(Simulated::builder().address_reuse(AddressReuse::JustFreed).build().unwrap());
    let threads: Vec<_> = (0..4_u64)
        .map(|number| {
            let simulated = Arc::clone(&simulated);
            thread::spawn(move || {
                let mut mine = Vec::new();
                for i in 0..3_000_u64 {
                    let kind = DEVICE_KINDS[(i + number) as usize % DEVICE_KINDS.len()];
                    mine.push(allocate(&*simulated, 1 + i * 131 % 9000, kind));
                    let looked_up = mine[i as usize * 7 % mine.len()];
                    assert_eq!(simulated.query(at(&looked_up, 0)).unwrap(), Some(looked_up));
                    if mine.len() > 40 {
                        let allocation = mine.swap_remove(i as usize * 13 % mine.len());
                        free(&*simulated, &allocation).unwrap();
                    }
                }
                mine.iter().for_each(|allocation| free(&*simulated, allocation).unwrap());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let stats = simulated.stats();
    assert_eq!((stats.live_allocations, stats.live_bytes), (0, 0));
}
