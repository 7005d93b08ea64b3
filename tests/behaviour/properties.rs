//! Property tests against naive models: keys, bounds, rights, addressing and forged keys.

use std::collections::BTreeMap;

use hmem::{
    Access, Addressing, ErrorKind, Iova, MemoryRegion, MrFlags, RemoteKey, transfer::Operation,
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRng, TestRunner},
};

use crate::{
    config::{DEFAULT, MODES, Mode, TestConfig},
    memory::pattern,
    net::{LOCAL, Local, Net, REMOTE, mr_attr, register, remote},
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

fn mode(name: &str) -> Mode {
    *MODES.iter().find(|mode| mode.name == name).expect("a mode of that name")
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
        let config = TestConfig { key_size, ..TestConfig::PLAIN };
        check(40, &prop::collection::vec(step.clone(), 1..60), |steps| {
            let net = Net::open(&config);
            let memory = net.bytes(4096);
            let mut live: BTreeMap<u64, (MemoryRegion, u8)> = BTreeMap::new();
            for (round, step) in steps.into_iter().enumerate() {
                match step {
                    KeyStep::Register(key) => {
                        let ranges = [memory.part(key * 64, 64)];
                        let attr = mr_attr(&ranges, REMOTE).key(key);
                        match register(&net.target, &attr, MrFlags::empty()) {
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
                        let read = net.pull(&name, 0, 1).map_err(|error| error.kind());
                        let expected = live
                            .get(&key)
                            .map(|(_, byte)| vec![*byte])
                            .ok_or(ErrorKind::InvalidKey);
                        prop_assert_eq!(read, expected);
                    }
                }
                prop_assert_eq!(net.live().regions, live.len() as u64);
            }
            Ok(())
        });
    }
}

/// KEY-02
#[test]
fn provider_keys_never_name_two_regions() {
    for key_size in [4, 8] {
        let config = TestConfig { key_size, ..TestConfig::PLAIN.with_mode(mode("PROV_KEY")) };
        check(30, &prop::collection::vec(any::<(bool, prop::sample::Index)>(), 1..150), |steps| {
            let net = Net::open(&config);
            let memory = net.bytes(64);
            let mut live: BTreeMap<u64, MemoryRegion> = BTreeMap::new();
            let mut last_use: BTreeMap<u64, usize> = BTreeMap::new();
            for (round, (register, which)) in steps.into_iter().enumerate() {
                if register || live.is_empty() {
                    let region = net.expose(memory.range(), REMOTE);
                    let key = region.key().expect("key").as_u64().expect("one piece");
                    let again = last_use.insert(key, round);
                    prop_assert!(again.is_none(), "key {key:#x} came back after {again:?}");
                    prop_assert!(live.insert(key, region).is_none());
                } else {
                    let keys: Vec<_> = live.keys().copied().collect();
                    live.remove(which.get(&keys)).expect("live").close().expect("close");
                }
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

const SPACE: usize = 1024;

/// Makes every access of a case and compares its result with a model of the region's bytes.
fn run(net: &Net, case: &Case) -> Result<(), TestCaseError> {
    let memory = net.filled(&pattern(1, SPACE));
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
            let address = if net.config.virtual_addresses() { byte - base } else { run };
            places.insert(address, byte as usize);
            run += 1;
        }
        at += len;
    }
    let region = net.expose_all(&ranges, case.access);
    let key = net.key(&region);
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
        let data = pattern(round as u64 + 50, *len as usize);
        let (moved, read) = if *write {
            (net.push(&key, *offset, &data), None)
        } else {
            let read = net.pull(&key, *offset, *len as usize);
            (
                read.as_ref().map(|_| *len).map_err(|error| hmem::Error::new(error.kind(), "read")),
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

fn every_place(mode: Mode) -> Vec<Net> {
    crate::config::ConfigSet::DefaultMode
        .list()
        .into_iter()
        .filter(|config| config.progress == hmem::loopback::Progress::ByHand && config.runs_here())
        .map(|config| Net::open(&config.with_mode(mode)))
        .collect()
}

/// MR-09
#[test]
fn zero_based_bounds_and_rights_match_a_byte_map() {
    for net in every_place(DEFAULT) {
        check(60, &cases(), |case| run(&net, &case));
    }
}

/// MR-09
#[test]
fn virtual_bounds_and_rights_match_a_byte_map() {
    for net in every_place(mode("VIRT_ADDR")) {
        check(60, &cases(), |case| run(&net, &case));
    }
}

/// MR-09
#[test]
fn local_accesses_match_their_rights() {
    for net in every_place(mode("LOCAL")) {
        let memory = net.bytes(64);
        let region = net.expose(memory.range(), REMOTE);
        let key = net.key(&region);
        check(
            60,
            &(rights(), any::<bool>(), 0u64..40, 0u64..40),
            |(access, write, offset, len)| {
                let local = net.local(32, access);
                let outside = hmem::AddressRange::new(
                    hmem::Address(local.bytes.range().start().0 + offset),
                    len,
                )
                .expect("range");
                let segment =
                    crate::net::segment(outside, Some(local.region.desc().expect("desc")));
                let to = [remote(&key, 0, len)];
                let operation = if write {
                    Operation::Write { remote: &to }
                } else {
                    Operation::Read { remote: &to }
                };
                let right = if write { Access::WRITE } else { Access::READ };
                let moved = net.transfer(operation, &[segment]).map_err(|error| error.kind());
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
    for mode in [DEFAULT, mode("VIRT_ADDR")] {
        for net in every_place(mode) {
            let memory = net.filled(&pattern(9, SPACE));
            let base = net.expose(memory.part(100, 800), REMOTE);
            check(
                40,
                &(0u64..SPACE as u64, 1u64..400, 0u64..500, 1u64..300),
                |(start, len, offset, count)| {
                    let range = memory.part(start, len.min(SPACE as u64 - start));
                    let inside = start >= 100 && start + range.len() <= 900;
                    match base.sub(range, Access::REMOTE_READ, net.fresh_key()) {
                        Err(error) => {
                            prop_assert_eq!(
                                (error.kind(), inside),
                                (ErrorKind::OutOfBounds, false)
                            );
                        }
                        Ok(sub) => {
                            prop_assert!(inside, "{range} is outside the base");
                            let read = net
                                .pull(&net.key(&sub), offset, count as usize)
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

/// Writes with each key, in batches. Returns the number of keys and the number of writes that
/// succeeded. Panics if a write fails for another reason than an invalid key.
fn successes(net: &Net, keys: impl Iterator<Item = u64>) -> (u64, u64) {
    const BATCH: usize = 128;
    let local = net.local(64, LOCAL);
    let segment = [local.segment(0, 1)];
    let (mut tries, mut hits, mut waiting) = (0, 0, 0);
    let drain = |waiting: &mut u64, hits: &mut u64| {
        for _ in 0..*waiting {
            let completion = net.completion();
            match completion.result {
                Ok(_) => *hits += 1,
                Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}"),
            }
        }
        *waiting = 0;
    };
    for key in keys {
        let name = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, key);
        let to = [remote(&name, 0, 1)];
        net.post(Operation::Write { remote: &to }, &segment, 1).expect("post");
        (tries, waiting) = (tries + 1, waiting + 1);
        if waiting == BATCH as u64 {
            drain(&mut waiting, &mut hits);
        }
    }
    drain(&mut waiting, &mut hits);
    (tries, hits)
}

const LIVE: usize = 1000;
const TRIES: usize = 1_000_000;

/// The keys of a target's live regions, and dead keys: those of its closed regions, and those of
/// closed and of live regions of another domain.
struct Keys {
    net: Net,
    live: Vec<u64>,
    dead: Vec<u64>,
    memory: crate::memory::Bytes,
    _regions: Vec<MemoryRegion>,
    _foreign: Vec<Local>,
}

fn keys(key_size: usize) -> Keys {
    let net = Net::open(&TestConfig { key_size, ..TestConfig::PLAIN.with_mode(mode("PROV_KEY")) });
    let memory = net.bytes(4096);
    let number = |region: &MemoryRegion| region.key().expect("key").as_u64().expect("one piece");
    let stale: Vec<_> = (0..LIVE).map(|_| net.expose(memory.range(), REMOTE)).collect();
    let mut dead: Vec<_> = stale.iter().map(number).collect();
    drop(stale);
    let regions: Vec<_> = (0..LIVE).map(|_| net.expose(memory.range(), REMOTE)).collect();
    let live: Vec<_> = regions.iter().map(number).collect();
    for _ in 0..LIVE {
        dead.push(
            net.local(64, REMOTE | LOCAL).region.key().expect("key").as_u64().expect("one piece"),
        );
    }
    let foreign: Vec<_> = (0..LIVE).map(|_| net.local(64, REMOTE | LOCAL)).collect();
    dead.extend(foreign.iter().map(|local| number(&local.region)));
    Keys { net, live, dead, memory, _regions: regions, _foreign: foreign }
}

/// KEY-07
#[test]
fn a_million_forged_stale_and_foreign_keys_reach_nothing() {
    let Keys { net, live, dead, memory, _regions, _foreign } = keys(8);
    let mut random = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    let known: std::collections::BTreeSet<_> = live.iter().copied().collect();
    let forged = (0..TRIES).map(|at| match at % 8 {
        0 => dead[at / 8 % dead.len()],
        // Near a live key: neighbours, single bits, halves of two keys, the other byte order.
        1 => live[at % live.len()].wrapping_add(1 + at as u64 % 64),
        2 => live[at % live.len()] ^ 1 << (at / 8 % 64),
        3 => live[at % live.len()] & !0xFFFF_FFFF | live[(at + 1) % live.len()] & 0xFFFF_FFFF,
        4 => live[at % live.len()].swap_bytes(),
        // Small numbers and shifted indices, which an attacker would try first.
        5 => at as u64,
        6 => (at as u64) << 32 | random.next_u64() & 0xff,
        _ => random.next_u64(),
    });
    let (tries, hits) = successes(&net, forged.filter(|key| !known.contains(key)));
    assert!(tries > TRIES as u64 * 9 / 10);
    assert_eq!(hits, 0, "{hits} of {tries} forged keys reached memory");
    assert_eq!(memory.all(), [0; 4096]);
    // `successes` counts all live keys, which shows that it works.
    assert_eq!(successes(&net, live.into_iter()), (LIVE as u64, LIVE as u64));
}

/// KEY-07
#[test]
fn stale_32_bit_keys_reach_nothing() {
    // All fields are bound: a pattern with `..` would close the regions at once.
    let Keys { net, live, dead, memory: _memory, _regions, _foreign } = keys(4);
    let known: std::collections::BTreeSet<_> = live.iter().copied().collect();
    let foreign_that_are_ours = dead.iter().filter(|key| known.contains(key)).count();
    let stale = dead[..LIVE].iter().copied();
    assert_eq!(successes(&net, stale), (LIVE as u64, 0), "a stale key reached memory");
    assert_eq!(foreign_that_are_ours, 0, "another domain's key is one of ours");
    let (_, hits) = successes(&net, dead.iter().copied());
    assert_eq!(hits, 0, "a stale or foreign key reached memory");
    let mut random = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    let (tries, hits) = successes(&net, (0..TRIES).map(|_| u64::from(random.next_u32())));
    let expected = tries as f64 * live.len() as f64 / 2f64.powi(32);
    println!(
        "32-bit keys: {hits} of {tries} random guesses hit one of {} live keys; expected \
         {expected:.3}",
        live.len()
    );
    // The expected number of hits is 0.23. 40 hits have a probability below 10^-60, and would mean
    // that keys cluster where an attacker guesses.
    assert!(hits as f64 <= expected + 40.0);
    let wide = (0..10_000u64).map(|at| live[at as usize % live.len()] | (at + 1) << 32);
    assert_eq!(
        successes(&net, wide).1,
        0,
        "upper bits of a 32-bit key were cut off instead of refused"
    );
    // `successes` counts all live keys, which shows that it works.
    assert_eq!(successes(&net, live.into_iter()), (LIVE as u64, LIVE as u64));
}
