//! Keys of the loopback NIC: forged, stale and foreign ones reach nothing; raw keys; single use; sub-regions.

mod support;

use std::{collections::HashSet, sync::Arc};

use hmem_core::{
    Access, Addressing, AuthKey, ErrorKind, Iova, MrFlags, MrMode, RawKey, RemoteKey,
    provider::ProviderDomain,
    transfer::{AtomicOp, Operation, RemoteSegment},
};
use hmem_p2p::loopback::{Loopback, Progress};
use support::*;

/// A small generator, so that tries are the same each time.
struct Tries(u64);

impl Tries {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Writes with each key; every one must be refused. Returns how many were tried.
fn all_refused(pair: &Pair, keys: impl Iterator<Item = u64>) -> usize {
    let source = Buffer::filled(8, 0xee);
    let local = [source.whole()];
    let mut out = Vec::new();
    let mut tried = 0;
    for number in keys {
        let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 8, number);
        let remote = [RemoteSegment { address: Iova(0), len: 8, key: &key }];
        pair.here.post(Operation::Write { remote: &remote }, &local, pair.to, number).unwrap();
        pair.here.cq.read(&mut out, 1).unwrap();
        let completion = out.pop().unwrap();
        assert_eq!(completion.result.unwrap_err().kind(), ErrorKind::InvalidKey, "key {number:#x}");
        tried += 1;
    }
    tried
}

#[test]
fn key_07_forged_keys_reach_nothing() {
    for mode in [MrMode::PROV_KEY, MrMode::empty()] {
        let pair = Pair::new(Loopback::builder().build().unwrap(), mode);
        let target = Buffer::new(8);
        let domain = &*pair.there.domain;
        let regions: Vec<_> = (0..1000)
            .map(|n| {
                How::key(0xabcd_ef01_0000_0000 ^ (n << 7))
                    .register(domain, &[host(target.range(), true)])
                    .unwrap()
            })
            .collect();
        let keys: HashSet<u64> = regions.iter().map(|region| region.key).collect();
        let mut tries = Tries(1);
        // Near misses of live keys, their tokens and descriptors, small numbers, and noise.
        let near = regions.iter().flat_map(|region| (0..64).map(move |bit| region.key ^ 1 << bit));
        let inner = regions.iter().flat_map(|region| [region.token, region.local.to_provider()]);
        let noise = (0..500_000).map(|_| tries.next());
        let forged =
            near.chain(inner).chain(0..10_000).chain(noise).filter(|key| !keys.contains(key));
        let forged: Vec<u64> = if mode.is_empty() {
            forged.filter(|key| *key >= 10_000).collect()
        } else {
            forged.collect()
        };
        assert!(all_refused(&pair, forged.into_iter()) > 500_000);
        assert_eq!(target.bytes(), [0; 8]);
    }
}

#[test]
fn key_07_stale_and_foreign_keys_reach_nothing() {
    for size in [4, 8] {
        let provider = Loopback::builder().key_size(size).build().unwrap();
        let pair = Pair::new(provider, MrMode::PROV_KEY);
        let target = Buffer::new(8);
        let register = |domain: &dyn ProviderDomain| {
            How::provider_key().register(domain, &[host(target.range(), true)]).unwrap()
        };
        let mut stale = Vec::new();
        for _ in 0..2000 {
            let region = register(&*pair.there.domain);
            stale.push(region.key);
            pair.there.domain.deregister(region).unwrap();
        }
        let foreign: Vec<_> = (0..100).map(|_| register(&*pair.here.domain).key).collect();
        // The table's entries are in use again while the old keys are tried.
        let live: Vec<_> = (0..100).map(|_| register(&*pair.there.domain)).collect();
        all_refused(&pair, stale.iter().copied().chain(foreign));
        assert_eq!(target.bytes(), [0; 8]);
        let source = Buffer::filled(8, 1);
        pair.here.write(pair.to, &[source.whole()], &remote(live[50], 8), 0).unwrap();
    }
}

#[test]
fn key_02_narrow_keys_do_not_come_back_soon() {
    let domain = domain(&Loopback::builder().key_size(4).build().unwrap(), MrMode::PROV_KEY);
    let buffer = Buffer::new(8);
    let mut seen = HashSet::new();
    for _ in 0..60_000 {
        let region = How::provider_key().register(&*domain, &[host(buffer.range(), true)]).unwrap();
        assert!(region.key <= u64::from(u32::MAX));
        assert!(
            seen.insert(region.key),
            "key {:#x} came back after {} others",
            region.key,
            seen.len()
        );
        domain.deregister(region).unwrap();
    }
    // 24-bit indices: few are in use, and their tags turned.
    assert!(seen.iter().map(|key| key >> 8).collect::<HashSet<_>>().len() < 1000);
}

#[test]
fn raw_keys_work_where_they_were_mapped_and_nowhere_else() {
    for (size, mode) in
        [(16, MrMode::RAW), (40, MrMode::RAW | MrMode::PROV_KEY), (8, MrMode::empty())]
    {
        let provider = Loopback::builder().raw_key_size(size).build().unwrap();
        let pair = Pair::new(provider.clone(), mode);
        let target = Buffer::new(64);
        let region =
            How::key(77).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap();
        let raw = pair.there.domain.raw_key(region).unwrap();
        assert_eq!(raw.0.len(), size);
        let mapped = pair.here.domain.map_raw(Iova(0), 64, Addressing::ZeroBased, &raw).unwrap();
        assert!(mapped.is_mapped() && pair.here.domain.live().mapped_keys == 1);
        let source = Buffer::filled(64, 1);
        pair.here.write(pair.to, &[source.whole()], &mapped, 0).unwrap();
        let plain = pair.here.write(pair.to, &[source.whole()], &remote(region, 64), 0);
        if mode.contains(MrMode::RAW) {
            refused(plain, ErrorKind::InvalidKey)
        } else {
            assert_eq!(plain.unwrap(), 64)
        }
        let elsewhere = End::open(&domain(&provider, mode));
        let to = elsewhere.peer(&pair.there);
        refused(elsewhere.write(to, &[source.whole()], &mapped, 0), ErrorKind::InvalidKey);
        refused(elsewhere.domain.unmap_key(&mapped), ErrorKind::InvalidKey);
        if size > 8 {
            // The cookie is as much a part of the key as its number.
            let mut altered = raw.clone();
            altered.0[9] ^= 1;
            match pair.here.domain.map_raw(Iova(0), 64, Addressing::ZeroBased, &altered) {
                Ok(key) => refused(
                    pair.here.write(pair.to, &[source.whole()], &key, 0),
                    ErrorKind::InvalidKey,
                ),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Malformed),
            }
        }
        let short = RawKey(raw.0[..size - 1].to_vec());
        let result = pair.here.domain.map_raw(Iova(0), 64, Addressing::ZeroBased, &short);
        refused(result, ErrorKind::Malformed);
        pair.here.domain.unmap_key(&mapped).unwrap();
        refused(pair.here.write(pair.to, &[source.whole()], &mapped, 0), ErrorKind::InvalidKey);
        refused(pair.here.domain.unmap_key(&mapped), ErrorKind::InvalidKey);
    }
}

#[test]
fn a_single_use_key_dies_with_the_first_access_that_it_grants() {
    for mode in [MrMode::empty(), MrMode::PROV_KEY] {
        let pair = Pair::new(Loopback::builder().build().unwrap(), mode);
        let target = Buffer::new(64);
        let region = How::key(5)
            .flags(MrFlags::MR_SINGLE_USE)
            .access(Access::REMOTE_WRITE | Access::SEND)
            .register(&*pair.there.domain, &[host(target.range(), true)])
            .unwrap();
        let key = remote(region, 64);
        let source = Buffer::filled(64, 1);
        refused(pair.here.read(pair.to, &[source.whole()], &key, 0), ErrorKind::AccessDenied);
        refused(pair.here.write(pair.to, &[source.whole()], &key, 1), ErrorKind::OutOfBounds);
        // A request that names the key twice uses it once.
        let list = [0, 32].map(|at| RemoteSegment { address: Iova(at), len: 32, key: &key });
        pair.here.run(Operation::Write { remote: &list }, &[source.whole()], pair.to).unwrap();
        refused(pair.here.write(pair.to, &[source.whole()], &key, 0), ErrorKind::InvalidKey);
        refused(pair.here.fetch(pair.to, AtomicOp::Sum, 1, None, &key, 0), ErrorKind::InvalidKey);
        let send = Operation::Send { tag: None, invalidate: None };
        let back = pair.there.peer(&pair.here);
        pair.there.run(send, &[target.segment(0, 64, Some(region.local))], back).unwrap();
        pair.there.domain.deregister(region).unwrap();
    }
}

#[test]
fn one_of_many_threads_gets_a_single_use_key() {
    let provider = Loopback::builder().progress(Progress::Thread).build().unwrap();
    let there = End::open(&domain(&provider, MrMode::empty()));
    let ends: Vec<_> = (0..4).map(|_| End::open(&domain(&provider, MrMode::empty()))).collect();
    let target = Buffer::new(8);
    for round in 0..200 {
        let region = How::key(round)
            .flags(MrFlags::MR_SINGLE_USE)
            .register(&*there.domain, &[host(target.range(), true)])
            .unwrap();
        let key = remote(region, 8);
        let won: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = ends
                .iter()
                .map(|end| {
                    let (there, key) = (&there, &key);
                    scope.spawn(move || {
                        let source = Buffer::filled(8, 1);
                        let result = end.write(end.peer(there), &[source.whole()], key, 0);
                        if let Err(error) = &result {
                            assert_eq!(error.kind(), ErrorKind::InvalidKey);
                        }
                        usize::from(result.is_ok())
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(won, 1);
        there.domain.deregister(region).unwrap();
    }
}

#[test]
fn sub_regions_have_their_own_keys_and_rights_and_hold_their_base() {
    for owned in [true, false] {
        let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
        let target = Buffer::counting(1000);
        let domain = &*pair.there.domain;
        let base = How::key(1).register(domain, &[host(target.range(), owned)]).unwrap();
        let read = How::key(2).access(Access::REMOTE_READ);
        let middle = domain.register_sub(base, &read.request(), 100, 500).unwrap();
        let inner = domain.register_sub(middle, &How::key(3).request(), 50, 10).unwrap();
        refused(
            domain.register_sub(middle, &How::key(4).request(), 491, 10),
            ErrorKind::OutOfBounds,
        );
        refused(domain.register_sub(middle, &How::key(3).request(), 0, 10), ErrorKind::NoKey);
        let live = domain.live();
        assert_eq!((live.regions, live.page_registrations, live.bytes), (3, 1, 1000));
        let sink = Buffer::new(10);
        pair.here.read(pair.to, &[sink.whole()], &remote(middle, 500), 50).unwrap();
        assert_eq!(sink.bytes(), target.bytes()[150..160]);
        refused(
            pair.here.write(pair.to, &[sink.whole()], &remote(middle, 500), 50),
            ErrorKind::AccessDenied,
        );
        let ones = Buffer::filled(10, 1);
        pair.here.write(pair.to, &[ones.whole()], &remote(inner, 10), 0).unwrap();
        assert_eq!(target.bytes()[150..160], [1; 10]);
        refused(
            pair.here.write(pair.to, &[ones.whole()], &remote(inner, 10), 1),
            ErrorKind::OutOfBounds,
        );
        refused(domain.deregister(base), ErrorKind::Busy);
        refused(domain.deregister(middle), ErrorKind::Busy);
        for region in [inner, middle, base] {
            domain.deregister(region).unwrap();
        }
        assert_eq!(domain.live().regions, 0);
    }
}

#[test]
fn sub_regions_of_several_pieces_cut_them_right() {
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
    let targets = [Buffer::new(10), Buffer::new(10), Buffer::new(10)];
    let pieces: Vec<_> = targets.iter().map(|target| host(target.range(), true)).collect();
    let base = How::key(1).register(&*pair.there.domain, &pieces).unwrap();
    let sub = pair.there.domain.register_sub(base, &How::key(2).request(), 8, 14).unwrap();
    let source = Buffer::counting(14);
    pair.here.write(pair.to, &[source.whole()], &remote(sub, 14), 0).unwrap();
    let all: Vec<u8> = targets.iter().flat_map(Buffer::bytes).collect();
    assert_eq!(all[8..22], source.bytes());
    assert_eq!((all[7], all[22]), (0, 0));
}

#[test]
fn authorization_keys_must_agree() {
    let provider = Loopback::builder().build().unwrap();
    let there = End::open(&domain(&provider, MrMode::empty()));
    let own = AuthKey(vec![1, 2, 3]);
    let target = Buffer::new(8);
    let plain = How::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let guarded = How { auth_key: own.clone(), ..How::key(2) };
    let guarded = guarded.register(&*there.domain, &[host(target.range(), true)]).unwrap();
    let ours = domain(&provider, MrMode::empty());
    let without = End::open(&ours);
    let with = End::with(&ours, |attr| attr.auth_key = Some(own));
    let source = Buffer::filled(8, 1);
    for (end, region, granted) in [
        (&without, plain, true),
        (&without, guarded, false),
        (&with, plain, false),
        (&with, guarded, true),
    ] {
        let result = end.write(end.peer(&there), &[source.whole()], &remote(region, 8), 0);
        if granted {
            assert_eq!(result.unwrap(), 8)
        } else {
            refused(result, ErrorKind::AccessDenied)
        }
    }
}

#[test]
fn keys_of_split_regions_are_posted_at_their_seams() {
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
    let targets = [Buffer::new(10), Buffer::new(20)];
    let parts: Vec<_> = targets
        .iter()
        .zip(1..)
        .map(|(target, key)| {
            How::key(key).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap()
        })
        .collect();
    let piece = |base, len, key| hmem_core::RemotePiece { base: Iova(base), len, key };
    let key = RemoteKey::split(
        Addressing::ZeroBased,
        piece(0, 10, parts[0].key),
        vec![piece(10, 20, parts[1].key)],
    );
    let source = Buffer::counting(25);
    pair.here.write(pair.to, &[source.whole()], &key, 4).unwrap();
    let all: Vec<u8> = targets.iter().flat_map(Buffer::bytes).collect();
    assert_eq!(all[4..29], source.bytes());
    refused(pair.here.write(pair.to, &[source.whole()], &key, 6), ErrorKind::OutOfBounds);
}

#[test]
fn two_nics_of_a_fabric_reach_each_other_and_share_no_keys() {
    let provider = Loopback::builder().nic("a").nic("b").build().unwrap();
    let open = |nic: &str| {
        let request = hmem_core::provider::DomainRequest {
            nic: Some(nic.to_owned()),
            ..support::request(MrMode::empty())
        };
        hmem_core::provider::Provider::open_domain(&provider, &request)
    };
    let (a, b) = (End::open(&open("a").unwrap()), End::open(&open("b").unwrap()));
    assert_eq!(b.domain.attr().nic.name, "b");
    refused(open("c").map(|_| ()), ErrorKind::InvalidArgument);
    let target = Buffer::new(8);
    let region = How::key(1).register(&*b.domain, &[host(target.range(), true)]).unwrap();
    let source = Buffer::filled(8, 1);
    let (to_b, to_a) = (a.peer(&b), b.peer(&a));
    a.write(to_b, &[source.whole()], &remote(region, 8), 0).unwrap();
    refused(b.write(to_a, &[source.whole()], &remote(region, 8), 0), ErrorKind::InvalidKey);
    drop(Arc::clone(&a.domain));
}
