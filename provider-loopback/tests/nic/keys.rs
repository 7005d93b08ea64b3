//! Tests of the loopback NIC's keys: forged, stale and foreign keys, raw keys, single-use keys, and
//! keys of sub-regions.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use crate::support::*;
use hmem_core::{
    Access, Addressing, ErrorKind, Iova, MrFlags, MrMode, RawKey, RemoteKey,
    provider::{ProviderDomain, WindowBind, WindowType},
    transfer::{AtomicOp, Operation, RemoteSegment},
};
use hmem_provider_loopback::{Loopback, Progress};

/// Writes to the peer with each key, and checks that the NIC refuses every write. Returns the
/// number of keys.
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

/// KEY-07
#[test]
fn forged_keys_are_refused() {
    for mode in [MrMode::PROV_KEY, MrMode::empty()] {
        let pair = Pair::new(Loopback::builder().build().unwrap(), mode);
        let target = Buffer::new(8);
        let domain = &*pair.there.domain;
        let regions: Vec<_> = (0..1000)
            .map(|n| {
                RegAttr::key(0xabcd_ef01_0000_0000 ^ (n << 7))
                    .register(domain, &[host(target.range(), true)])
                    .unwrap()
            })
            .collect();
        let keys: HashSet<u64> = regions.iter().map(|region| region.key).collect();
        // Live keys with one bit changed, tokens and descriptors of live regions, small numbers,
        // and random numbers.
        let near = regions.iter().flat_map(|region| (0..64).map(move |bit| region.key ^ 1 << bit));
        let inner = regions.iter().flat_map(|region| [region.token, region.local.to_provider()]);
        let noise = noise(1).take(500_000);
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

/// KEY-07
#[test]
fn stale_and_foreign_keys_are_refused() {
    for size in [4, 8] {
        let provider = Loopback::builder().key_size(size).build().unwrap();
        let pair = Pair::new(provider, MrMode::PROV_KEY);
        let target = Buffer::new(8);
        let register = |domain: &dyn ProviderDomain| {
            RegAttr::provider_key().register(domain, &[host(target.range(), true)]).unwrap()
        };
        let mut stale = Vec::new();
        for _ in 0..2000 {
            let region = register(&*pair.there.domain);
            stale.push(region.key);
            pair.there.domain.deregister(region).unwrap();
        }
        // New regions of the same domain use the indices of the stale keys again.
        let live: Vec<_> = (0..100).map(|_| register(&*pair.there.domain)).collect();
        let foreign: Vec<_> = (0..100).map(|_| register(&*pair.here.domain).key).collect();
        all_refused(&pair, stale.iter().copied().chain(foreign));
        if size == 4 {
            // The upper bits of a key are not cut off.
            all_refused(&pair, (32..64).map(|bit| live[50].key | 1 << bit));
        }
        assert_eq!(target.bytes(), [0; 8]);
        let source = Buffer::filled(8, 1);
        pair.here.write(pair.to, &[source.whole()], &remote(live[50], 8), 0).unwrap();
    }
}

/// KEY-02
#[test]
fn four_byte_keys_are_not_reused_soon() {
    let domain = domain(&Loopback::builder().key_size(4).build().unwrap(), MrMode::PROV_KEY);
    let buffer = Buffer::new(8);
    let mut seen = HashSet::new();
    let mut tags = HashMap::new();
    for _ in 0..60_000 {
        let region =
            RegAttr::provider_key().register(&*domain, &[host(buffer.range(), true)]).unwrap();
        assert!(region.key <= u64::from(u32::MAX));
        assert!(
            seen.insert(region.key),
            "key {:#x} came back after {} others",
            region.key,
            seen.len()
        );
        let (index, tag) = (region.key >> 8, region.key & 0xff);
        if let Some(last) = tags.insert(index, tag) {
            assert_eq!(tag, (last + 1) & 0xff, "the tag of index {index} does not count up");
        }
        domain.deregister(region).unwrap();
    }
    // Few 24-bit indices were used: the keys differ mostly in the tag.
    assert!(seen.iter().map(|key| key >> 8).collect::<HashSet<_>>().len() < 1000);
}

/// KEY-02, KEY-07: windows and regions take their keys from the same indices.
#[test]
fn four_byte_keys_of_windows_and_regions_are_not_reused_soon() {
    let domain = domain(&Loopback::builder().key_size(4).build().unwrap(), MrMode::PROV_KEY);
    let windows = domain.windows().unwrap();
    let (buffer, access) = (Buffer::new(8), Access::RECV | Access::MW_BIND);
    let register = || {
        let attr = RegAttr::provider_key().access(access);
        attr.register(&*domain, &[host(buffer.range(), true)]).unwrap()
    };
    let base = register();
    let mut seen = HashSet::from([base.key]);
    let mut new = |key| assert!(seen.insert(key), "key {key:#x} came back");
    for round in 0..3000 {
        let region = register();
        new(region.key);
        domain.deregister(region).unwrap();
        let mut window = windows.alloc_window(WindowType::One).unwrap();
        for len in [8, 0].into_iter().cycle().take(2 * (round % 3) + 2) {
            let access = if len > 0 { Access::REMOTE_READ } else { Access::empty() };
            let addressing = Addressing::Virtual;
            let bind = WindowBind { region: base, offset: 0, len, access, addressing };
            window = windows.bind_window(window, &bind).unwrap();
            new(window.key);
        }
        windows.free_window(window).unwrap();
    }
}

/// KEY-02
#[test]
fn eight_byte_keys_that_the_nic_chooses_do_not_come_back() {
    let provider = Loopback::builder().build().unwrap();
    let buffer = Buffer::new(8);
    let mut seen = HashSet::new();
    for mode in [MrMode::PROV_KEY, MrMode::PROV_KEY, MrMode::empty()] {
        let domain = domain(&provider, mode);
        for _ in 0..20_000 {
            let region =
                RegAttr::provider_key().register(&*domain, &[host(buffer.range(), true)]).unwrap();
            assert!(seen.insert(region.key), "key {:#x} came back", region.key);
            domain.deregister(region).unwrap();
        }
    }
    // The keys do not follow one another: about half of them are above the middle.
    let high = seen.iter().filter(|key| **key >> 63 == 1).count();
    assert!((20_000..40_000).contains(&high), "{high} of 60,000 keys are in the upper half");
}

/// KEY-03: each bit of a raw key counts, even if the raw key is too short for the whole cookie.
#[test]
fn raw_key_with_an_altered_bit_reaches_nothing() {
    for size in (8..=16).chain([40]) {
        let provider = Loopback::builder().raw_key_size(size).build().unwrap();
        let pair = Pair::new(provider, MrMode::RAW | MrMode::PROV_KEY);
        let target = Buffer::new(8);
        let region =
            RegAttr::provider_key().register(&*pair.there.domain, &[host(target.range(), true)]);
        let raw = pair.there.domain.raw_keys().unwrap().raw_key(region.unwrap()).unwrap();
        let keys = pair.here.domain.raw_keys().unwrap();
        let source = Buffer::filled(8, 1);
        let write = |raw: &RawKey| {
            let key = keys.map_raw(Iova(0), 8, Addressing::ZeroBased, raw)?;
            let written = pair.here.write(pair.to, &[source.whole()], &key, 0);
            keys.unmap_key(&key).unwrap();
            written
        };
        for bit in 0..8 * size {
            let mut altered = raw.clone();
            altered.0[bit / 8] ^= 1 << (bit % 8);
            // A long raw key ends with a checksum.
            let kinds = [ErrorKind::InvalidKey, ErrorKind::Malformed];
            refused(write(&altered), kinds[usize::from(size > 16)]);
        }
        assert_eq!(target.bytes(), [0; 8], "a refused write moved bytes");
        assert_eq!(write(&raw).unwrap(), 8);
    }
}

/// MODE-04
#[test]
fn plain_key_is_refused_if_either_domain_is_in_raw_mode() {
    for (initiator, target_mode) in [
        (MrMode::empty(), MrMode::RAW),
        (MrMode::RAW, MrMode::empty()),
        (MrMode::PROV_KEY, MrMode::RAW | MrMode::PROV_KEY),
    ] {
        let provider = Loopback::builder().build().unwrap();
        let here = End::open(&domain(&provider, initiator));
        let there = End::open(&domain(&provider, target_mode));
        let to = here.peer(&there);
        let target = Buffer::new(8);
        let region =
            RegAttr::key(1).register(&*there.domain, &[host(target.range(), true)]).unwrap();
        let source = Buffer::filled(8, 1);
        let plain = remote(region, 8);
        refused(here.write(to, &[source.whole()], &plain, 0), ErrorKind::InvalidKey);
        refused(here.read(to, &[source.whole()], &plain, 0), ErrorKind::InvalidKey);
        refused(here.fetch(to, AtomicOp::Sum, 1, None, &plain, 0), ErrorKind::InvalidKey);
        assert_eq!(target.bytes(), [0; 8], "a refused transfer moved bytes");
        let raw = there.domain.raw_keys().unwrap().raw_key(region).unwrap();
        let mapped = here
            .domain
            .raw_keys()
            .unwrap()
            .map_raw(Iova(0), 8, Addressing::ZeroBased, &raw)
            .unwrap();
        here.write(to, &[source.whole()], &mapped, 0).unwrap();
        assert_eq!(target.bytes(), [1; 8]);
    }
}

/// KEY-07
///
/// A raw key that was made from the number of a window is refused, because windows have no raw
/// keys.
#[test]
fn raw_key_with_the_number_of_a_window_is_refused() {
    for key_size in [8, 4] {
        for mode in [MrMode::empty(), MrMode::PROV_KEY, MrMode::RAW] {
            // A raw key of 16 bytes contains the number and the cookie, but no checksum.
            let builder = Loopback::builder().key_size(key_size).raw_key_size(16);
            let pair = Pair::new(builder.build().unwrap(), mode);
            let target = Buffer::new(8);
            let there = &*pair.there.domain;
            let region = RegAttr::key(1).register(there, &[host(target.range(), true)]).unwrap();
            let bind = WindowBind {
                region,
                offset: 0,
                len: 8,
                access: Access::REMOTE_READ | Access::REMOTE_WRITE,
                addressing: Addressing::Virtual,
            };
            let window = there.windows().unwrap().alloc_window(WindowType::One).unwrap();
            let window = there.windows().unwrap().bind_window(window, &bind).unwrap();
            let base = target.address().0;
            let source = Buffer::filled(8, 1);
            let write = |key: &RemoteKey| pair.here.write(pair.to, &[source.whole()], key, base);
            // Tries the cookie of a region, and an invented cookie.
            let own = there.raw_keys().unwrap().raw_key(region).unwrap().0[8..].to_vec();
            for cookie in [own, vec![0; 8]] {
                let forged = RawKey([window.key.to_le_bytes().to_vec(), cookie].concat());
                let map = pair.here.domain.raw_keys().unwrap().map_raw(
                    Iova(base),
                    8,
                    Addressing::Virtual,
                    &forged,
                );
                refused(write(&map.unwrap()), ErrorKind::InvalidKey);
            }
            assert_eq!(target.bytes(), [0; 8], "a forged key moved bytes");
            if !mode.contains(MrMode::RAW) {
                let plain = RemoteKey::new(Addressing::Virtual, Iova(base), 8, window.key);
                write(&plain).expect("the window is bound and grants the write");
            }
        }
    }
}

/// KEY-07
#[test]
fn foreign_and_stale_region_handles_are_refused() {
    for mode in [MrMode::empty(), MrMode::PROV_KEY] {
        let pair = Pair::new(Loopback::builder().build().unwrap(), mode);
        let (target, source) = (Buffer::new(64), Buffer::filled(8, 1));
        let there = &*pair.there.domain;
        let register = |attr: RegAttr| attr.register(there, &[host(target.range(), true)]).unwrap();
        let earlier = register(RegAttr::key(1));
        there.deregister(earlier).unwrap();
        let region = register(RegAttr::key(1).disabled());
        let key = remote(region, 64);
        for (end, region) in [(&pair.here, region), (&pair.there, earlier)] {
            let domain = &*end.domain;
            let window = domain.windows().unwrap().alloc_window(WindowType::One).unwrap();
            let bind = WindowBind {
                region,
                offset: 0,
                len: 8,
                access: Access::REMOTE_READ,
                addressing: Addressing::Virtual,
            };
            refused(domain.enabling().unwrap().enable(region), ErrorKind::NoRegion);
            refused(
                domain.region_counters().unwrap().bind_counter(region, &Arc::default()),
                ErrorKind::NoRegion,
            );
            refused(
                domain.endpoint_binding().unwrap().bind_endpoint(region, &*end.endpoint),
                ErrorKind::NoRegion,
            );
            refused(domain.refresh().unwrap().refresh_pages(region, &[]), ErrorKind::NoRegion);
            refused(domain.raw_keys().unwrap().raw_key(region), ErrorKind::NoRegion);
            let part = RegAttr::key(2);
            refused(
                domain.sub_regions().unwrap().register_sub(region, &part.request(), 0, 8),
                ErrorKind::NoRegion,
            );
            refused(domain.windows().unwrap().bind_window(window, &bind), ErrorKind::NoRegion);
            refused(domain.deregister(region), ErrorKind::NoRegion);
            domain.windows().unwrap().free_window(window).unwrap();
            end.endpoint.close().expect("nothing was bound to the endpoint");
        }
        // The calls with stale handles have not changed the live region.
        let ends = [End::open(&pair.here.domain), End::open(&pair.there.domain)];
        let to = ends[0].peer(&ends[1]);
        refused(ends[0].write(to, &[source.whole()], &key, 0), ErrorKind::BadState);
        there.enabling().unwrap().enable(region).unwrap();
        ends[0].write(to, &[source.whole()], &key, 0).unwrap();
        there.deregister(region).unwrap();
        assert_eq!(there.live().regions, 0);
    }
}

#[test]
fn single_use_key_serves_one_of_many_threads() {
    let provider = Loopback::builder().progress(Progress::Thread).build().unwrap();
    let there = End::open(&domain(&provider, MrMode::empty()));
    let ends: Vec<_> = (0..4).map(|_| End::open(&domain(&provider, MrMode::empty()))).collect();
    let target = Buffer::new(8);
    for round in 0..200 {
        let region = RegAttr::key(round)
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
fn sub_region_covers_the_right_part_of_several_pieces() {
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
    let targets = [Buffer::new(10), Buffer::new(10), Buffer::new(10)];
    let pieces: Vec<_> = targets.iter().map(|target| host(target.range(), true)).collect();
    let base = RegAttr::key(1).register(&*pair.there.domain, &pieces).unwrap();
    let sub = pair
        .there
        .domain
        .sub_regions()
        .unwrap()
        .register_sub(base, &RegAttr::key(2).request(), 8, 14)
        .unwrap();
    let source = Buffer::counting(14);
    pair.here.write(pair.to, &[source.whole()], &remote(sub, 14), 0).unwrap();
    let all: Vec<u8> = targets.iter().flat_map(Buffer::bytes).collect();
    assert_eq!(all[8..22], source.bytes());
    assert_eq!((all[7], all[22]), (0, 0));
}

#[test]
fn access_by_a_split_key_is_split_at_piece_boundaries() {
    let pair = Pair::new(Loopback::builder().build().unwrap(), MrMode::empty());
    let targets = [Buffer::new(10), Buffer::new(20)];
    let parts: Vec<_> = targets
        .iter()
        .zip(1..)
        .map(|(target, key)| {
            RegAttr::key(key).register(&*pair.there.domain, &[host(target.range(), true)]).unwrap()
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
fn nics_of_a_fabric_connect_and_share_no_keys() {
    let provider = Loopback::builder().nic("a").nic("b").build().unwrap();
    let open = |nic: &str| {
        let request = hmem_core::provider::DomainRequest {
            nic: Some(nic.to_owned()),
            ..request(MrMode::empty())
        };
        hmem_core::provider::Provider::open_domain(&provider, &request)
    };
    let (a, b) = (End::open(&open("a").unwrap()), End::open(&open("b").unwrap()));
    assert_eq!(b.domain.attr().nic.name, "b");
    refused(open("c").map(|_| ()), ErrorKind::InvalidArgument);
    let target = Buffer::new(8);
    let region = RegAttr::key(1).register(&*b.domain, &[host(target.range(), true)]).unwrap();
    let source = Buffer::filled(8, 1);
    let (to_b, to_a) = (a.peer(&b), b.peer(&a));
    a.write(to_b, &[source.whole()], &remote(region, 8), 0).unwrap();
    refused(b.write(to_a, &[source.whole()], &remote(region, 8), 0), ErrorKind::InvalidKey);
    drop(Arc::clone(&a.domain));
}
