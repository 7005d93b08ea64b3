//! Tests of writes, reads and keys on the loopback NIC, through the provider traits.

use std::sync::Arc;

use crate::support::*;
use hmem_core::{
    Address, Addressing, Domain, DomainAttr, ErrorKind, Iova, MrMode, Registry, RemoteKey,
    counter::Counter,
    provider::EndpointAttr,
    transfer::{LocalSegment, Operation, RemoteSegment},
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_loopback::{Loopback, Progress};

fn pair(mode: MrMode) -> Pair {
    Pair::new(Loopback::builder().build().unwrap(), mode)
}

#[test]
fn segments_of_local_and_remote_lists_may_differ() {
    let pair = pair(MrMode::empty());
    let targets = [Buffer::new(100), Buffer::new(50), Buffer::new(7)];
    let pieces: Vec<_> =
        targets.iter().enumerate().map(|(n, b)| host(b.range(), n % 2 == 0)).collect();
    let region = RegAttr::key(1).register(&*pair.there.domain, &pieces).unwrap();
    let key = remote(region, 157);
    let source = Buffer::counting(157);
    let local =
        [source.segment(0, 3, None), source.segment(3, 120, None), source.segment(123, 34, None)];
    let list: Vec<_> = [(0u64, 99u64), (99, 2), (101, 56)]
        .iter()
        .map(|(at, len)| RemoteSegment { address: Iova(*at), len: *len, key: &key })
        .collect();
    assert_eq!(pair.here.run(Operation::Write { remote: &list }, &local, pair.to).unwrap(), 157);
    let all: Vec<u8> = targets.iter().flat_map(Buffer::bytes).collect();
    assert_eq!(all, source.bytes());
}

#[test]
fn virtual_access_may_cross_adjacent_pieces() {
    let pair = pair(MrMode::VIRT_ADDR);
    let block = Buffer::new(300);
    let other = Buffer::new(100);
    let pieces = [
        host(block.range().slice(100, 100).unwrap(), true),
        host(other.range(), true),
        host(block.range().slice(0, 100).unwrap(), true),
    ];
    let region =
        RegAttr::key(1).virtual_addresses().register(&*pair.there.domain, &pieces).unwrap();
    let key = RemoteKey::new(Addressing::Virtual, Iova(block.address().0), 300, region.key);
    let source = Buffer::counting(150);
    let base = block.address().0;
    pair.here.write(pair.to, &[source.whole()], &key, base + 25).unwrap();
    assert_eq!(block.bytes()[25..175], source.bytes());
    pair.here.write(pair.to, &[source.segment(0, 100, None)], &key, other.address().0).unwrap();
    assert_eq!(other.bytes(), source.bytes()[..100]);
    refused(pair.here.write(pair.to, &[source.whole()], &key, base + 51), ErrorKind::OutOfBounds);
}

/// MODE-02
#[test]
fn absent_page_of_a_local_buffer_fails_only_the_transfer() {
    let pair = pair(MrMode::empty());
    for owned in [true, false] {
        let target = Buffer::new(64);
        let region =
            RegAttr::key(7).register(&*pair.there.domain, &[host(target.range(), owned)]).unwrap();
        let key = remote(region, 64);
        let nothing = LocalSegment { address: Address(0x1000), len: 64, desc: None };
        refused(pair.here.write(pair.to, &[nothing], &key, 0), ErrorKind::BadAddress);
        refused(pair.here.read(pair.to, &[nothing], &key, 0), ErrorKind::BadAddress);
        assert_eq!(target.bytes(), [0; 64]);
        pair.there.domain.deregister(region).unwrap();
    }
}

/// MR-11
///
/// An endpoint holds no strong reference to the peers that it has written to.
#[test]
fn endpoints_that_wrote_to_each_other_are_freed() {
    for by_thread in [true, false] {
        for first in 0..3 {
            let progress = if by_thread { Progress::Thread } else { Progress::ByHand };
            let provider = Loopback::builder().progress(progress).build().unwrap();
            let counter = Arc::new(Counter::new());
            let open = || {
                let domain = domain(&provider, MrMode::empty());
                End::with(&domain, |attr| attr.tx_counter = Some(Arc::clone(&counter)))
            };
            let mut ends = vec![open(), open(), open()];
            let buffer = Buffer::new(8);
            let keys: Vec<_> = ends
                .iter()
                .map(|end| {
                    RegAttr::key(1).register(&*end.domain, &[host(buffer.range(), true)]).unwrap()
                })
                .map(|region| remote(region, 8))
                .collect();
            // Each endpoint writes to the next endpoint, and then each writes to itself.
            for step in [1, 0] {
                for from in 0..3 {
                    let to = (from + step) % 3;
                    let peer = ends[from].peer(&ends[to]);
                    ends[from].write(peer, &[buffer.whole()], &keys[to], 0).unwrap();
                }
            }
            let closed = ends[first].peer(&ends[first]);
            let to_closed = ends[(first + 1) % 3].peer(&ends[first]);
            ends[(first + 1) % 3].write(to_closed, &[buffer.whole()], &keys[first], 0).unwrap();
            ends[first].endpoint.close().unwrap();
            let again = ends[(first + 1) % 3].write(to_closed, &[buffer.whole()], &keys[first], 0);
            refused(again, ErrorKind::Unreachable);
            assert!(
                ends[first]
                    .post(Operation::Send { tag: None, invalidate: None }, &[], closed, 0)
                    .is_err()
            );
            drop(ends.swap_remove(first));
            drop(ends);
            drop(provider);
            assert_eq!(Arc::strong_count(&counter), 1, "an endpoint outlived its handle");
        }
    }
}

/// MR-01: slices of a zero-based region count from 0 on the local side as well, and the NIC moves
/// the bytes at these offsets.
#[test]
fn zero_based_region_is_addressed_from_0_on_both_sides() {
    for memory in policies() {
        let provider = Loopback::builder().remap_policy(memory).build().unwrap();
        let selector = Arc::new(DefaultPathSelector::new());
        let attr = DomainAttr::default();
        let domain = Domain::open(&provider, Arc::new(Registry::new()), selector, attr).unwrap();
        let cq = domain.open_cq(8).unwrap();
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).unwrap();
        let to = endpoint.resolve(&endpoint.name()).unwrap();
        let bytes: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
        let region = domain.register(bytes, all_rights()).map_err(|rejected| rejected.error);
        let region = region.unwrap();
        let key = region.key().unwrap();
        assert_eq!((key.addressing(), key.base()), (Addressing::ZeroBased, Iova(0)));
        let slice = |at, len| [region.slice(at, len).unwrap()];
        let wait = |count: usize| {
            let mut out = Vec::new();
            while out.len() < count {
                cq.read(&mut out, count).unwrap();
            }
            assert!(out.iter().all(|done| done.result.is_ok()), "{out:?}");
        };
        let remote = |at, len| [RemoteSegment { address: Iova(at), len, key: &key }];
        endpoint.write(&slice(0, 300), &remote(1000, 300), to, 1).unwrap();
        wait(1);
        endpoint.read(&slice(2000, 300), &remote(1, 300), to, 2).unwrap();
        wait(1);
        endpoint.receive(&slice(3000, 300), None, 3).unwrap();
        endpoint.send(&slice(2, 300), None, to, 4).unwrap();
        wait(2);
        // An application's address is no offset.
        endpoint.write(&slice(0, 8), &remote(region.range().start().0, 8), to, 5).unwrap();
        let mut out = Vec::new();
        while cq.read(&mut out, 1).unwrap() == 0 {}
        refused(out.remove(0).result, ErrorKind::OutOfBounds);
        let bytes = region.close().map_err(|rejected| rejected.error).unwrap();
        for (from, to) in [(0, 1000), (1, 2000), (2, 3000)] {
            assert_eq!(bytes[to..to + 300], bytes[from..from + 300], "{from} to {to}");
        }
    }
}
