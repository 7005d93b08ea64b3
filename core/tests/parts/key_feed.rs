//! Key feeds between an owner of memory and its peers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

use std::{thread, time::Duration};

use hmem_core::{
    Addressing, ErrorKind, Iova, RailKey, RailKeys, RemoteKey,
    key_feed::{KeyFeed, KeyPart, PeerKeys},
    provider::Nic,
};

fn nic(name: &str) -> Nic {
    Nic { provider: "verbs".into(), name: name.into(), pci_bus_id: None }
}

fn rail(name: &str, len: u64, number: u64) -> RailKey {
    RailKey::new(nic(name), RemoteKey::new(Addressing::ZeroBased, Iova(0), len, number))
}

/// A part of 4096 bytes with one key.
fn part(offset: u64, number: u64) -> KeyPart {
    KeyPart { offset, keys: RailKeys::new(vec![rail("mlx5_0", 4096, number)]).unwrap() }
}

/// LIFE-04
#[test]
fn every_generation_arrives_in_order_if_the_peer_reads_each() {
    let feed = KeyFeed::new().unwrap();
    let mut subscription = feed.subscribe();
    assert_eq!((feed.generation(), subscription.next()), (0, None));
    let mut peer = PeerKeys::default();
    for number in 1..=20 {
        assert_eq!(feed.publish(vec![part(0, number)]).unwrap(), number);
        let applied = peer.apply(&subscription.next().unwrap()).unwrap();
        assert_eq!((applied.generation, applied.missed), (number, 0));
        assert_eq!(peer.segments("mlx5_0", 8..16, number).unwrap()[0].address, Iova(8));
    }
    assert_eq!(subscription.next(), None);
}

/// LIFE-04
#[test]
fn peer_that_reads_late_learns_how_many_generations_it_missed() {
    let feed = KeyFeed::new().unwrap();
    let (mut subscription, mut peer) = (feed.subscribe(), PeerKeys::default());
    for number in 1..=5 {
        feed.publish(vec![part(0, number)]).unwrap();
    }
    let applied = peer.apply(&subscription.next().unwrap()).unwrap();
    assert_eq!((applied.generation, applied.missed), (5, 4));
    assert_eq!(subscription.next(), None);
}

#[test]
fn unchanged_list_is_no_new_generation() {
    let feed = KeyFeed::new().unwrap();
    assert_eq!(feed.publish(vec![]).unwrap(), 1, "the first list is a generation, even if empty");
    assert_eq!(feed.publish(vec![part(0, 1)]).unwrap(), 2);
    assert_eq!(feed.publish(vec![part(0, 1)]).unwrap(), 2);
}

/// LIFE-03
#[test]
fn bytes_that_were_named_before_a_change_are_refused_after_it() {
    let feed = KeyFeed::new().unwrap();
    let (mut subscription, mut peer) = (feed.subscribe(), PeerKeys::default());
    let mut update = |parts| {
        let generation = feed.publish(parts).unwrap();
        peer.apply(&subscription.next().unwrap()).unwrap();
        (generation, peer.clone())
    };
    let (first, _) = update(vec![part(0, 1), part(4096, 2)]);
    let (removed, peer) = update(vec![part(0, 1)]);
    let gone = peer.segments("mlx5_0", 0..8192, first).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::OutOfBounds);
    assert!(format!("{gone:#}").contains("first missing=4096"), "{gone:#}");
    let (again, peer) = update(vec![part(0, 1), part(4096, 3)]);
    for old in [first, removed] {
        let stale = peer.segments("mlx5_0", 4096..4100, old).unwrap_err();
        assert_eq!(stale.kind(), ErrorKind::InvalidKey, "named in generation {old}");
        peer.segments("mlx5_0", 0..4096, old).unwrap();
    }
    assert_eq!(peer.segments("mlx5_0", 0..8192, again).unwrap().len(), 2);
    let early = peer.segments("mlx5_0", 0..1, again + 1).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::Again);
    let other = peer.segments("mlx5_7", 0..1, again).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn dropped_feed_publishes_an_empty_last_generation() {
    let feed = KeyFeed::new().unwrap();
    let (mut subscription, mut peer) = (feed.subscribe(), PeerKeys::default());
    feed.publish(vec![part(0, 1)]).unwrap();
    peer.apply(&subscription.next().unwrap()).unwrap();
    assert!(!subscription.is_ended());
    drop(feed);
    assert!(!subscription.is_ended(), "the last generation has not been returned");
    peer.apply(&subscription.next().unwrap()).unwrap();
    assert_eq!((peer.parts().count(), peer.generation()), (0, 2));
    assert!(subscription.is_ended());
    assert_eq!(subscription.wait(Duration::MAX), None, "a closed feed makes nobody wait");
}

#[test]
fn waiting_subscription_returns_when_a_list_is_published() {
    let feed = KeyFeed::new().unwrap();
    let mut subscription = feed.subscribe();
    assert_eq!(subscription.wait(Duration::from_millis(1)), None);
    let waiting = thread::spawn(move || subscription.wait(Duration::MAX));
    feed.publish(vec![part(0, 1)]).unwrap();
    assert!(waiting.join().unwrap().is_some());
}

#[test]
fn part_has_a_key_for_each_nic() {
    let feed = KeyFeed::new().unwrap();
    let keys = RailKeys::new(vec![rail("mlx5_0", 64, 7), rail("mlx5_1", 64, 8)]).unwrap();
    feed.publish(vec![KeyPart { offset: 32, keys }]).unwrap();
    let mut peer = PeerKeys::default();
    peer.apply(&feed.subscribe().next().unwrap()).unwrap();
    for (nic, number) in [("mlx5_0", 7), ("mlx5_1", 8)] {
        let segments = peer.segments(nic, 40..96, 1).unwrap();
        assert_eq!(segments[0].key.as_u64().unwrap(), number);
        assert_eq!((segments[0].address, segments[0].len), (Iova(8), 56));
    }
    #[expect(clippy::reversed_empty_ranges, reason = "bad input")]
    for outside in [0..40, 95..97, 60..50] {
        let error = peer.segments("mlx5_0", outside.clone(), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{outside:?}");
    }
    assert_eq!(peer.segments("mlx5_0", 40..40, 1).unwrap().len(), 0);
}

#[test]
fn lists_that_describe_a_byte_twice_are_refused() {
    let feed = KeyFeed::new().unwrap();
    let unequal = RailKeys::new(vec![rail("mlx5_0", 64, 7), rail("mlx5_1", 65, 8)]).unwrap();
    for refused in [
        vec![part(0, 1), part(4095, 2)],
        vec![part(4096, 1), part(0, 2)],
        vec![part(u64::MAX - 4095, 1)],
        vec![KeyPart { offset: 0, keys: unequal }],
    ] {
        let error = feed.publish(refused.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{refused:?}");
    }
    assert_eq!(feed.generation(), 0);
    feed.publish(vec![part(u64::MAX - 4096, 1)]).unwrap();
}

#[test]
fn updates_that_are_old_foreign_or_altered_are_refused() {
    let feed = KeyFeed::new().unwrap();
    let mut subscription = feed.subscribe();
    feed.publish(vec![part(0, 1)]).unwrap();
    let first = subscription.next().unwrap();
    feed.publish(vec![part(0, 2)]).unwrap();
    let second = subscription.next().unwrap();
    let mut peer = PeerKeys::default();
    peer.apply(&second).unwrap();
    for old in [&first, &second] {
        assert_eq!(peer.apply(old).unwrap_err().kind(), ErrorKind::BadState);
    }
    let other = KeyFeed::new().unwrap();
    for number in 1..=3 {
        other.publish(vec![part(0, number)]).unwrap();
    }
    let foreign = peer.apply(&other.subscribe().next().unwrap()).unwrap_err();
    assert_eq!(foreign.kind(), ErrorKind::InvalidArgument);
    for at in 0..second.len() {
        let mut altered = second.clone();
        altered[at] ^= 1;
        let error = PeerKeys::default().apply(&altered).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "byte {at}");
        let cut = PeerKeys::default().apply(&second[..at]).unwrap_err();
        assert_eq!(cut.kind(), ErrorKind::Malformed, "{at} bytes");
    }
    assert_eq!(peer.generation(), 2);
}

/// LIFE-03, LIFE-10
#[test]
fn part_is_the_same_memory_while_one_nic_keeps_its_key() {
    let feed = KeyFeed::new().unwrap();
    let (mut subscription, mut peer) = (feed.subscribe(), PeerKeys::default());
    let mut publish = |keys: &[(&str, u64)]| {
        let keys = keys.iter().map(|(nic, number)| rail(nic, 4096, *number)).collect();
        let keys = RailKeys::new(keys).unwrap();
        let generation = feed.publish(vec![KeyPart { offset: 0, keys }]).unwrap();
        peer.apply(&subscription.next().unwrap()).unwrap();
        let kind_of = |nic: &str| peer.segments(nic, 0..8, 1).map(drop).map_err(|it| it.kind());
        (generation, kind_of("mlx5_0"), kind_of("mlx5_1"))
    };
    let unknown = Err(ErrorKind::InvalidArgument);
    assert_eq!(publish(&[("mlx5_0", 1), ("mlx5_1", 2)]), (1, Ok(()), Ok(())));
    assert_eq!(publish(&[("mlx5_1", 2)]), (2, unknown, Ok(())));
    assert_eq!(publish(&[("mlx5_0", 3), ("mlx5_1", 2)]), (3, Ok(()), Ok(())));
    let other = Err(ErrorKind::InvalidKey);
    assert_eq!(publish(&[("mlx5_0", 4), ("mlx5_1", 5)]), (4, other, other));
}
