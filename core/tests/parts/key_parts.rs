//! Tests of remote keys: segments for transfers, narrowed keys, and keys as bytes.

use hmem_core::{Addressing, ErrorKind, Iova, RemoteKey, RemotePiece};
use proptest::prelude::*;

fn piece(base: u64, len: u64, key: u64) -> RemotePiece {
    RemotePiece { base: Iova(base), len, key }
}

fn pieces(key: &RemoteKey) -> Vec<(u64, u64, u64)> {
    key.pieces().map(|piece| (piece.base.0, piece.len, piece.key)).collect()
}

/// Returns a key of three pieces: two adjacent ones, and one at other addresses.
fn split(addressing: Addressing) -> RemoteKey {
    let rest = vec![piece(0x1100, 0x200, 2), piece(0x9000, 0x80, 3)];
    RemoteKey::split(addressing, piece(0x1000, 0x100, 1), rest)
}

#[test]
fn slice_of_a_split_key_is_a_contiguous_range() {
    let key = split(Addressing::Virtual);
    for (offset, len, address) in [
        (0, 0x380 - 0x80, 0x1000),
        (0x80, 0x100, 0x1080),
        (0xff, 1, 0x10ff),
        (0x100, 0x200, 0x1100),
        (0x300, 0x80, 0x9000),
        (0x37f, 1, 0x907f),
        (0x40, 0, 0x1040),
    ] {
        let segment = key.slice(offset, len).expect("a contiguous range");
        assert_eq!((segment.address, segment.len), (Iova(address), len), "{offset:#x}");
        assert_eq!(segment.key, &key);
    }
    let apart = key.slice(0x2ff, 2).unwrap_err();
    assert_eq!((apart.kind(), apart.operation()), (ErrorKind::Unsupported, "slice"), "{apart}");
    for (offset, len) in [(0x380, 1), (0x381, 0), (0, 0x381), (1, u64::MAX), (u64::MAX, 1)] {
        let outside = key.slice(offset, len).unwrap_err();
        assert_eq!(outside.kind(), ErrorKind::OutOfBounds, "{offset:#x} {len:#x}");
        assert_eq!(key.narrow(offset, len).unwrap_err().kind(), ErrorKind::OutOfBounds);
    }
    // Zero-based addresses count through all pieces, whatever the bases of the later ones are.
    let zero = split(Addressing::ZeroBased);
    for (offset, len) in [(0, 0x380), (0x80, 0x100), (0x2ff, 2), (0x300, 0x80), (0x380, 0)] {
        let segment = zero.slice(offset, len).expect("inside");
        let address = Iova(zero.base().0 + offset);
        assert_eq!((segment.address, segment.len), (address, len), "{offset:#x}");
    }
    assert_eq!(zero.slice(0x380, 1).unwrap_err().kind(), ErrorKind::OutOfBounds);
}

#[test]
fn narrowed_split_key_has_parts_of_its_pieces() {
    let key = split(Addressing::Virtual);
    assert_eq!(
        pieces(&key.narrow(0x80, 0x90).expect("a part of two pieces")),
        [(0x1080, 0x80, 1), (0x1100, 0x10, 2)]
    );
    assert_eq!(pieces(&key.narrow(0x300, 0x10).expect("a part of one piece")), [(0x9000, 0x10, 3)]);
    assert_eq!(key.narrow(0, 0x380).expect("the whole key"), key);
    assert_eq!(key.narrow(5, 0).unwrap_err().kind(), ErrorKind::ZeroLength);
    // With zero-based addresses, the NIC counts offsets from the start of each piece. The key of a
    // part cannot express another start.
    let zero = split(Addressing::ZeroBased);
    assert_eq!(zero.narrow(0x80, 0x90).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(zero.narrow(0, 0x380).expect("the whole key"), zero);
}

#[test]
fn narrowed_mapped_key_stays_mapped() {
    let key = RemoteKey::mapped(Addressing::ZeroBased, Iova(0), 4096, 7);
    let part = key.narrow(100, 8).expect("inside");
    assert!(part.is_mapped() && part.as_u64().is_ok_and(|number| number == 7));
}

/// KEY-06: The receiver refuses a remote key with pieces of 2^64 bytes or more in total.
#[test]
fn keys_of_2_to_the_64_bytes_or_more_are_refused() {
    let keys = |first, rest| RemoteKey::split(Addressing::Virtual, first, rest);
    for key in [
        keys(piece(1, u64::MAX, 1), vec![piece(1, u64::MAX, 2)]),
        keys(piece(0, u64::MAX, 1), vec![piece(0, 1, 2)]),
        keys(piece(0, 8, 1), vec![piece(0, u64::MAX - 1, 2), piece(0, 8, 3)]),
    ] {
        let refused = RemoteKey::from_bytes(&key.to_bytes()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Malformed);
        let wrong = refused.context_value("why");
        assert_eq!(wrong, Some("pieces with more bytes than an address space"), "{key:?}");
        // A process can also create a key of this length itself. Calls with the key do not panic.
        key.narrow(u64::MAX - 2, 2).expect("a part");
        let _ = (key.narrow(3, 9), key.slice(3, 9));
    }
    // A piece that wraps around the address space is still accepted, because earlier versions wrote
    // such keys.
    let key = keys(piece(u64::MAX, 4, 1), vec![piece(3, u64::MAX - 4, 2)]);
    let key = RemoteKey::from_bytes(&key.to_bytes()).expect("bytes that can be counted");
    assert_eq!(pieces(&key.narrow(2, 3).expect("a part")), [(1, 2, 1), (3, 1, 2)]);
    assert_eq!(key.slice(2, 3).expect("a contiguous range").address, Iova(1));
}

/// KEY-06: a program that deserializes a key in a format of its own gets no key that
/// [`RemoteKey::from_bytes`] refuses.
#[test]
fn deserialization_refuses_the_keys_that_from_bytes_refuses() {
    let good = split(Addressing::Virtual);
    let mapped = RemoteKey::mapped(Addressing::ZeroBased, Iova(0), 4096, 7);
    let long = RemoteKey::split(Addressing::Virtual, piece(0, u64::MAX, 1), vec![piece(0, 1, 2)]);
    for (key, valid) in [(good, true), (mapped, false), (long, false)] {
        let bytes = postcard::to_extend(&key, Vec::new()).expect("bytes");
        let read = postcard::from_bytes::<RemoteKey>(&bytes).ok();
        assert_eq!(read, valid.then(|| key.clone()), "{key:?}");
        assert_eq!(RemoteKey::from_bytes(&key.to_bytes()).ok(), read);
    }
}

proptest! {
    #[test]
    fn slice_of_a_narrowed_key_equals_slice_of_the_whole(
        base in 0..u64::MAX / 2, len in 1..1_u64 << 40,
        cut in any::<[u64; 4]>(),
    ) {
        let key = RemoteKey::new(Addressing::Virtual, Iova(base), len, 9);
        let (offset, inner) = (cut[0] % len, cut[2]);
        let part = key.narrow(offset, 1 + cut[1] % (len - offset)).expect("inside");
        let inner = inner % part.first_len();
        let inner_len = cut[3] % (part.first_len() - inner + 1);
        let of_part = part.slice(inner, inner_len).expect("inside the part");
        let of_whole = key.slice(offset + inner, inner_len).expect("inside the key");
        prop_assert_eq!(of_part.address, of_whole.address);
        prop_assert_eq!(RemoteKey::from_bytes(&part.to_bytes()).expect("bytes"), part);
    }
}

/// KEY-06
#[test]
fn truncated_and_altered_keys_are_refused() {
    let piece = |base| piece(base, 4096, base ^ 0x5A5A);
    for key in [
        RemoteKey::new(Addressing::ZeroBased, Iova(0), 1, 0),
        RemoteKey::new(Addressing::Virtual, Iova(u64::MAX), u64::MAX, u64::MAX),
        RemoteKey::split(Addressing::Virtual, piece(1 << 40), vec![piece(2 << 40), piece(3 << 40)]),
    ] {
        let bytes = key.to_bytes();
        assert_eq!(RemoteKey::from_bytes(&bytes).expect("unchanged"), key);
        assert_eq!(&bytes[..5], b"hmRK\x01", "the form says what it is and which version");
        let refused = |bytes: &[u8], what: &str| {
            let error = RemoteKey::from_bytes(bytes)
                .err()
                .unwrap_or_else(|| panic!("{what} was read as a key"));
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.context_value("why").is_some());
        };
        for len in 0..bytes.len() {
            refused(&bytes[..len], "a truncated key");
        }
        refused(&[&bytes[..], &[0]].concat(), "a key with a byte left over");
        for bit in 0..bytes.len() * 8 {
            let mut altered = bytes.clone();
            altered[bit / 8] ^= 1 << (bit % 8);
            refused(&altered, "an altered key");
        }
    }
    assert_eq!(RemoteKey::from_bytes(b"hmRK\x02").unwrap_err().kind(), ErrorKind::Malformed);
}
