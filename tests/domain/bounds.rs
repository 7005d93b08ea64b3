//! Property tests against naive models: requested keys, and the bounds and rights of regions and
//! sub-regions. Keys of grants.

use std::collections::{BTreeMap, HashSet};

use crate::link::Memory;
use crate::{link, machine};
use hmem::{
    Access, Address, AddressRange, Addressing, Error, ErrorKind, GrantKind, Iova, MemoryRegion,
    MrFlags, MrMode, RemoteKey,
    loopback::{Loopback, Progress, RemapPolicy},
    provider::WindowType,
    transfer::Operation,
};
use hmem_conformance::link::{Link, REMOTE, mr_attr, pattern, remote, segment};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};

fn check<S: Strategy>(
    cases: u32,
    strategy: &S,
    test: impl Fn(S::Value) -> Result<(), TestCaseError>,
) {
    let mut runner =
        TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    if let Err(error) = runner.run(strategy, test) {
        panic!("{error}");
    }
}

#[derive(Clone, Debug)]
enum KeyStep {
    Register(u64),
    Close(usize),
    Use(u64),
}

/// KEY-01
#[test]
fn requested_keys_match_a_map_of_used_keys() {
    let step = prop_oneof![
        4 => (0u64..12).prop_map(KeyStep::Register),
        3 => (0usize..8).prop_map(KeyStep::Close),
        2 => (0u64..12).prop_map(KeyStep::Use),
    ];
    for key_size in [4, 8] {
        check(40, &prop::collection::vec(step.clone(), 1..60), |steps| {
            let nic = Loopback::builder().key_size(key_size);
            let link = link::open(nic, MrMode::empty(), Memory::Host).link;
            let memory = link.bytes(4096);
            let mut live: BTreeMap<u64, (MemoryRegion, u8)> = BTreeMap::new();
            for (round, step) in steps.into_iter().enumerate() {
                match step {
                    KeyStep::Register(key) => {
                        let ranges = [memory.part(key * 64, 64)];
                        let attr = mr_attr(&ranges, REMOTE).key(key);
                        match link.target.regattr(&attr, MrFlags::empty()) {
                            Ok(region) => {
                                memory.put(key * 64, &[round as u8]);
                                prop_assert!(
                                    live.insert(key, (region, round as u8)).is_none(),
                                    "{key} given twice"
                                );
                            }
                            Err(error) => {
                                prop_assert_eq!(error.kind(), ErrorKind::NoKey);
                                prop_assert!(
                                    live.contains_key(&key),
                                    "{} is free and was refused",
                                    key
                                );
                            }
                        }
                    }
                    KeyStep::Close(at) => {
                        let key = live.keys().nth(at % live.len().max(1)).copied();
                        if let Some((region, _)) = key.and_then(|key| live.remove(&key)) {
                            region.close().expect("close");
                        }
                    }
                    KeyStep::Use(key) => {
                        let name = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, key);
                        let read = link.pull(&name, 0, 1).map_err(|error| error.kind());
                        let expected = live
                            .get(&key)
                            .map(|(_, byte)| vec![*byte])
                            .ok_or(ErrorKind::InvalidKey);
                        prop_assert_eq!(read, expected);
                    }
                }
                prop_assert_eq!(link.live().regions, live.len() as u64);
            }
            Ok(())
        });
    }
}

/// A generated test case: ranges and rights of one region, and accesses to it.
#[derive(Clone, Debug)]
struct Case {
    /// Ranges in ascending order, each as the gap before it and its length.
    ranges: Vec<(u64, u64)>,
    access: Access,
    /// Accesses by a peer, each as true for a write, the offset and the length.
    accesses: Vec<(bool, u64, u64)>,
}

fn rights() -> impl Strategy<Value = Access> {
    (0..1u64 << Access::all().iter().count()).prop_map(|bits| {
        Access::all()
            .iter()
            .enumerate()
            .filter(|(at, _)| bits >> at & 1 == 1)
            .map(|(_, bit)| bit)
            .collect()
    })
}

fn cases() -> impl Strategy<Value = Case> {
    let ranges = prop::collection::vec((0u64..40, 1u64..90), 1..6);
    (ranges, rights(), prop::collection::vec((any::<bool>(), 0u64..600, 0u64..200), 1..12))
        .prop_map(|(ranges, access, accesses)| Case { ranges, access, accesses })
}

const SPACE: u64 = 1024;

/// Makes every access of a case and compares its result with a model of the region's bytes.
fn run(link: &Link, case: &Case) -> Result<(), TestCaseError> {
    let memory = link.filled(&pattern(1, SPACE));
    let mut model = pattern(1, SPACE);
    let mut at = 0;
    let mut ranges = Vec::new();
    // Position in `memory` of each address that a peer may access.
    let mut places: BTreeMap<u64, usize> = BTreeMap::new();
    let mut run = 0;
    let base = case.ranges[0].0;
    for (gap, len) in &case.ranges {
        at += gap;
        ranges.push(memory.part(at, *len));
        for byte in at..at + len {
            let address = if link.has(MrMode::VIRT_ADDR) { byte - base } else { run };
            places.insert(address, byte as usize);
            run += 1;
        }
        at += len;
    }
    let attr = mr_attr(&ranges, case.access);
    let region = link.try_expose(&attr, MrFlags::empty()).expect("register");
    let key = link.key(&region);
    for (round, (write, offset, len)) in case.accesses.iter().enumerate() {
        let any_of = if *write {
            Access::REMOTE_WRITE | Access::REMOTE_RMA_WRITE
        } else {
            Access::REMOTE_READ
        };
        let bytes: Option<Vec<usize>> =
            (*offset..offset + len).map(|address| places.get(&address).copied()).collect();
        let expected = match &bytes {
            _ if !case.access.intersects(any_of) => Err(ErrorKind::AccessDenied),
            None => Err(ErrorKind::OutOfBounds),
            Some(_) => Ok(*len),
        };
        let data = pattern(round as u64 + 50, *len);
        let (moved, read) = if *write {
            (link.push(&key, *offset, &data), None)
        } else {
            let read = link.pull(&key, *offset, *len);
            (
                read.as_ref().map(|_| *len).map_err(|error| Error::new(error.kind(), "read")),
                read.ok(),
            )
        };
        prop_assert_eq!(
            moved.map_err(|error| error.kind()),
            expected,
            "access {} of {:?}",
            round,
            case
        );
        if let (Ok(_), Some(bytes)) = (expected, bytes) {
            for (from, to) in bytes.into_iter().enumerate() {
                match &read {
                    Some(read) => prop_assert_eq!(read[from], model[to]),
                    None => model[to] = data[from],
                }
            }
        }
    }
    prop_assert_eq!(memory.all(), model);
    region.close().expect("close");
    Ok(())
}

/// Returns a link for each memory, and for pages that the NIC follows or pins.
fn every_place(mode: MrMode) -> Vec<Link> {
    let place = |memory| {
        [RemapPolicy::Follow, machine::pages()]
            .map(|pages| link::open(Loopback::builder().remap_policy(pages), mode, memory).link)
    };
    Memory::ALL.into_iter().flat_map(place).collect()
}

/// MR-02
#[test]
fn both_ends_of_64_mib_of_pinned_pages_are_reached() {
    // Another test may pin pages at the same time.
    let len = (machine::lockable_memory() / 4).min(64 << 20) & !0xfff;
    for progress in [Progress::ByHand, Progress::Thread] {
        let nic = Loopback::builder().remap_policy(machine::pages()).progress(progress);
        let link = link::open(nic, MrMode::empty(), Memory::Host).link;
        let memory = link.bytes(len as usize);
        let region = link.expose(memory.range(), REMOTE);
        let key = link.key(&region);
        for at in [0, len - 1] {
            link.push(&key, at, &[0xA5]).expect("write");
            assert_eq!(memory.get(at, 1), [0xA5], "byte {at} of {len}");
        }
        let error = link.push(&key, len, &[0xA5]).expect_err("past the end");
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        region.close().expect("close");
    }
}

/// MR-09
#[test]
fn zero_based_bounds_and_rights_match_a_byte_map() {
    for link in every_place(MrMode::empty()) {
        check(60, &cases(), |case| run(&link, &case));
    }
}

/// MR-09
#[test]
fn virtual_bounds_and_rights_match_a_byte_map() {
    for link in every_place(MrMode::VIRT_ADDR) {
        check(60, &cases(), |case| run(&link, &case));
    }
}

/// MR-09
#[test]
fn local_accesses_match_their_rights() {
    for link in every_place(MrMode::LOCAL) {
        let memory = link.bytes(64);
        let region = link.expose(memory.range(), REMOTE);
        let key = link.key(&region);
        check(
            60,
            &(rights(), any::<bool>(), 0u64..40, 0u64..40),
            |(access, write, offset, len)| {
                let local = link.local(32, access);
                let outside =
                    AddressRange::new(Address(local.bytes.range().start().0 + offset), len)
                        .expect("range");
                let segment = segment(outside, Some(local.region.desc().expect("desc")));
                let to = [remote(&key, 0, len)];
                let operation = if write {
                    Operation::Write { remote: &to }
                } else {
                    Operation::Read { remote: &to }
                };
                let right = if write { Access::WRITE } else { Access::READ };
                let moved = link.transfer(operation, &[segment]).map_err(|error| error.kind());
                let expected = if !access.contains(right) {
                    Err(ErrorKind::AccessDenied)
                } else if len > 0 && offset + len > 32 {
                    Err(ErrorKind::OutOfBounds)
                } else {
                    Ok(len)
                };
                prop_assert_eq!(moved, expected, "{} bytes at {} with {}", len, offset, access);
                Ok(())
            },
        );
    }
}

/// SUB-01
#[test]
fn sub_regions_match_a_byte_map_of_their_base() {
    for mode in [MrMode::empty(), MrMode::VIRT_ADDR] {
        for link in every_place(mode) {
            let memory = link.filled(&pattern(9, SPACE));
            let base = link.expose(memory.part(100, 800), REMOTE);
            check(
                40,
                &(0u64..SPACE, 1u64..400, 0u64..500, 1u64..300),
                |(start, len, offset, count)| {
                    let range = memory.part(start, len.min(SPACE - start));
                    let inside = start >= 100 && start + range.len() <= 900;
                    match base.sub(range, Access::REMOTE_READ, link.fresh_key()) {
                        Err(error) => {
                            prop_assert_eq!(
                                (error.kind(), inside),
                                (ErrorKind::OutOfBounds, false)
                            );
                        }
                        Ok(sub) => {
                            prop_assert!(inside, "{range} is outside the base");
                            let read = link
                                .pull(&link.key(&sub), offset, count)
                                .map_err(|error| error.kind());
                            let expected = if offset + count <= range.len() {
                                let from = (start + offset) as usize;
                                Ok(pattern(9, SPACE)[from..from + count as usize].to_vec())
                            } else {
                                Err(ErrorKind::OutOfBounds)
                            };
                            prop_assert_eq!(read, expected);
                            sub.close().expect("close");
                        }
                    }
                    Ok(())
                },
            );
        }
    }
}

/// MW-09: each bind and each unbind of a type 1 window takes one of the 256 tags of its keys.
#[test]
fn grants_by_type_1_windows_reuse_no_key_soon() {
    let nic = Loopback::builder().key_size(4).windows([WindowType::One]);
    let target = link::open(nic, MrMode::PROV_KEY, Memory::Host).link.target;
    let access = Access::RECV | Access::MW_BIND;
    let region = target.domain.register(vec![0; 4096], access).expect("registered");
    let mut seen = HashSet::new();
    for round in 0..600 {
        let grant = region.grant(&target.endpoint, 0..64, Access::REMOTE_READ).expect("granted");
        assert_eq!(grant.kind(), GrantKind::Window(WindowType::One));
        let key = grant.key().expect("a key").as_u64().expect("one number");
        assert!(seen.insert(key), "the key of an earlier grant came back in round {round}");
        grant.revoke().expect("revoked");
    }
}
