//! Tests of the binary form of rail keys: the keys of one range on several NICs.

use hmem_core::{
    Addressing, ErrorKind, Iova, RailKey, RailKeys, RemoteKey, RemotePiece, provider::Nic,
};
use proptest::{collection, option, prelude::*};

/// A strategy for key pieces. Any four pieces together are shorter than the address space.
fn piece() -> impl Strategy<Value = RemotePiece> {
    let (base, len) = (..=u64::MAX - u64::MAX / 4, ..=u64::MAX / 4);
    (base, len, any::<u64>()).prop_map(|(base, len, key)| RemotePiece {
        base: Iova(base),
        len,
        key,
    })
}

fn key() -> impl Strategy<Value = RemoteKey> {
    let addressing = prop_oneof![Just(Addressing::ZeroBased), Just(Addressing::Virtual)];
    (addressing, piece(), collection::vec(piece(), 0..3))
        .prop_map(|(addressing, first, rest)| RemoteKey::split(addressing, first, rest))
}

/// A strategy for the keys of one to five NICs with different names.
fn rails() -> impl Strategy<Value = RailKeys> {
    let nic = ("[a-z]{1,8}", "[a-z0-9_]{0,12}|\u{fc}ber", option::of("[0-9a-f:.]{0,12}"));
    collection::vec((nic, key()), 1..6).prop_map(|rails| {
        let rail = |(at, ((provider, name, pci_bus_id), key))| {
            let nic = Nic { provider, name: format!("{name}{at}"), pci_bus_id };
            RailKey::new(nic, key)
        };
        RailKeys::new(rails.into_iter().enumerate().map(rail).collect()).unwrap()
    })
}

fn wrong(bytes: &[u8]) -> String {
    let error = RailKeys::from_bytes(bytes).expect_err("the bytes were read as rail keys");
    assert_eq!(error.kind(), ErrorKind::Malformed);
    assert!(error.remedy_text().is_some());
    error.context_value("why").expect("the error says what is wrong").to_owned()
}

proptest! {
    /// KEY-06: The receiver reads rail keys unchanged, and refuses cut, extended or altered bytes.
    #[test]
    fn rail_keys_are_read_back_and_refused_when_altered(
        keys in rails(),
        cut in any::<prop::sample::Index>(),
        flips in collection::vec((any::<prop::sample::Index>(), 1_u8..), 1..4),
        more in collection::vec(any::<u8>(), 1..9),
    ) {
        let bytes = keys.to_bytes();
        prop_assert_eq!(&bytes[..5], b"hmRL\x01");
        prop_assert_eq!(&RailKeys::from_bytes(&bytes).unwrap(), &keys);
        for rail in keys.rails() {
            prop_assert_eq!(keys.of(&rail.nic.name), Some(&rail.key));
            prop_assert_eq!(keys.of(&rail.nic.to_string()), Some(&rail.key));
        }
        wrong(&bytes[..cut.index(bytes.len())]);
        wrong(&[&bytes[..], &more].concat());
        let mut altered = bytes.clone();
        for (at, flip) in flips {
            altered[at.index(bytes.len())] ^= flip;
        }
        if altered != bytes {
            wrong(&altered);
        }
    }

    /// KEY-06: The receiver refuses random bytes. With a valid header and checksum, it reads or
    /// refuses them without a panic.
    #[test]
    fn random_bytes_are_refused_as_rail_keys(bytes in collection::vec(any::<u8>(), 0..200)) {
        wrong(&bytes);
        // With a valid header and a valid checksum, only the payload can be wrong.
        let body = [b"hmRL\x01", &bytes[..]].concat();
        let sum = crc32fast::hash(&body).to_le_bytes();
        if let Ok(keys) = RailKeys::from_bytes(&[&body[..], &sum].concat()) {
            prop_assert_eq!(RailKeys::from_bytes(&keys.to_bytes()).unwrap(), keys);
        }
    }
}

/// KEY-06: The receiver refuses rail keys with one flipped bit, and rail keys that were cut short.
#[test]
fn any_flipped_bit_of_rail_keys_is_detected() {
    let nic = |name: &str| Nic { provider: "verbs".into(), name: name.into(), pci_bus_id: None };
    let key = |key| RemoteKey::new(Addressing::Virtual, Iova(0x7f00_0000_1000), 4096, key);
    let keys = RailKeys::new(vec![
        RailKey::new(nic("mlx5_0"), key(1)),
        RailKey::new(nic("mlx5_1"), key(2)),
    ]);
    let bytes = keys.unwrap().to_bytes();
    for bit in 0..bytes.len() * 8 {
        let mut altered = bytes.clone();
        altered[bit / 8] ^= 1 << (bit % 8);
        wrong(&altered);
    }
    for len in 0..bytes.len() {
        wrong(&bytes[..len]);
    }
    // The key of a single NIC has another magic number.
    assert_eq!(wrong(&key(1).to_bytes()), "magic");
    assert_eq!(RemoteKey::from_bytes(&bytes).unwrap_err().context_value("why"), Some("magic"));
}

/// KEY-06: The sender refuses an empty list of rails, a NIC that is listed twice, and a key that
/// `RemoteKey::mapped` created, which is valid only in the domain that mapped it. The receiver
/// refuses an empty list.
#[test]
fn invalid_rail_lists_are_refused_by_sender_and_receiver() {
    let nic = |name: &str| Nic { provider: "verbs".into(), name: name.into(), pci_bus_id: None };
    let key = RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, 7);
    let mapped = RemoteKey::mapped(Addressing::ZeroBased, Iova(0), 64, 7);
    let rail = |name: &str| RailKey::new(nic(name), key.clone());
    for (rails, what) in [
        (vec![], "no rail"),
        (vec![rail("a"), rail("b"), rail("a")], "a NIC that is in the list twice"),
        (vec![rail("a"), RailKey::new(nic("b"), mapped)], "a mapped key"),
    ] {
        let error = RailKeys::new(rails).expect_err("the list was accepted");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.context_value("why").unwrap().starts_with(what), "{error}");
        assert!(error.remedy_text().is_some());
    }
    let other = Nic { provider: "loopback".into(), ..nic("a") };
    let both = RailKeys::new(vec![rail("a"), RailKey::new(other, key.clone())]);
    assert_eq!(both.expect("NICs of two providers may share a name").rails().len(), 2);
    // An empty list with a valid checksum, as another implementation might send it.
    let body = b"hmRL\x01\x00";
    let sum = crc32fast::hash(body).to_le_bytes();
    assert_eq!(wrong(&[&body[..], &sum].concat()), "no rail");
}

/// KEY-06: The sender and the receiver accept 256 rails, and refuse more.
#[test]
fn lists_of_more_than_256_rails_are_refused() {
    let rail = |at: usize| {
        let nic = Nic { provider: "verbs".into(), name: at.to_string(), pci_bus_id: None };
        RailKey::new(nic, RemoteKey::new(Addressing::ZeroBased, Iova(0), 64, 7))
    };
    let bytes = RailKeys::new((0..256).map(rail).collect()).expect("256 rails").to_bytes();
    assert_eq!(RailKeys::from_bytes(&bytes).expect("256 rails").rails().len(), 256);
    let error = RailKeys::new((0..257).map(rail).collect()).expect_err("257 rails");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(error.context_value("why"), Some("more than 256 rails"));
    // The bytes of 256 rails with the last one repeated. The length before the rails has two bytes.
    let one = RailKeys::new(vec![rail(255)]).expect("one rail").to_bytes();
    let last = &one[6..one.len() - 4];
    assert_eq!(bytes[5..7], [0x80, 2], "the length is 256");
    let body = [b"hmRL\x01\x81\x02", &bytes[7..bytes.len() - 4], last].concat();
    let sum = crc32fast::hash(&body).to_le_bytes();
    assert_eq!(wrong(&[&body[..], &sum].concat()), "more than 256 rails");
}

/// KEY-06: The receiver refuses rail keys with a key of 2^64 bytes or more in total.
#[test]
fn rails_of_2_to_the_64_bytes_or_more_are_refused() {
    let piece = |base, len| RemotePiece { base: Iova(base), len, key: 1 };
    let keys = |first, rest| {
        let nic = Nic { provider: "verbs".into(), name: "mlx5_0".into(), pci_bus_id: None };
        let key = RemoteKey::split(Addressing::Virtual, first, rest);
        RailKeys::new(vec![RailKey::new(nic, key)]).expect("one rail")
    };
    for keys in [
        keys(piece(0, u64::MAX), vec![piece(0, 1)]),
        keys(piece(0, 1), vec![piece(0, u64::MAX / 2), piece(0, u64::MAX)]),
    ] {
        assert_eq!(wrong(&keys.to_bytes()), "pieces with more bytes than an address space");
    }
}
