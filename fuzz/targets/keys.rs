//! Remote keys, rail keys and updates of key feeds, as peers send them.

use hmem::{RailKeys, RemoteKey, key_feed::PeerKeys};

use super::{Verdict, refusal, with_crc};

/// Checks that a received key is written and read back unchanged, and that its parts stay inside
/// it.
fn check(key: &RemoteKey) {
    assert_eq!(RemoteKey::from_bytes(&key.to_bytes()).as_ref().ok(), Some(key));
    let total: u64 = key.pieces().map(|piece| piece.len).sum();
    for (offset, len) in
        [(0, total), (total / 3, total / 2), (total, 0), (total, 1), (1, u64::MAX), (u64::MAX, 1)]
    {
        let inside = offset.checked_add(len).is_some_and(|end| end <= total);
        if let Ok(part) = key.narrow(offset, len) {
            assert!(inside, "{offset}+{len} of {total} bytes");
            assert_eq!(part.pieces().map(|piece| piece.len).sum::<u64>(), len);
        }
        if let Ok(segment) = key.slice(offset, len) {
            assert!(inside, "{offset}+{len} of {total} bytes");
            assert_eq!(segment.len, len);
        }
    }
}

pub(super) fn remote_keys(data: &[u8]) -> Verdict {
    let key = RemoteKey::from_bytes(data).or_else(|_| RemoteKey::from_bytes(&with_crc(data)));
    key.map(|key| check(&key)).map_err(refusal)
}

pub(super) fn rail_keys(data: &[u8]) -> Verdict {
    let keys = RailKeys::from_bytes(data).or_else(|_| RailKeys::from_bytes(&with_crc(data)));
    let keys = keys.map_err(refusal)?;
    assert_eq!(RailKeys::from_bytes(&keys.to_bytes()).as_ref().ok(), Some(&keys));
    for rail in keys.rails() {
        check(&rail.key);
        assert!(keys.of(&rail.nic.name).is_some() && keys.of(&rail.nic.to_string()).is_some());
    }
    Ok(())
}

/// Applies an update of a key feed, and checks that it is applied whole and only once, and that its
/// segments are those of its parts.
pub(super) fn key_updates(data: &[u8]) -> Verdict {
    let mut peer = PeerKeys::default();
    let with_crc = with_crc(data);
    let applied = match peer.apply(data) {
        Ok(applied) => Ok((applied, data)),
        Err(_) => peer.apply(&with_crc).map(|applied| (applied, &*with_crc)),
    };
    let (applied, bytes) = applied.map_err(refusal)?;
    assert_eq!(applied.missed, applied.generation - 1);
    assert_eq!(peer.generation(), applied.generation);
    peer.apply(bytes).expect_err("an update is applied once");
    let mut end = 0;
    for (offsets, keys) in peer.parts() {
        assert!(end <= offsets.start && offsets.start < offsets.end, "{offsets:?} after {end}");
        end = offsets.end;
        for rail in keys.rails() {
            check(&rail.key);
            let whole = peer.segments(&rail.nic.to_string(), offsets.clone(), applied.generation);
            if let Ok(segments) = whole {
                let len: u64 = segments.iter().map(|segment| segment.len).sum();
                assert_eq!(len, offsets.end - offsets.start);
            }
        }
    }
    Ok(())
}
