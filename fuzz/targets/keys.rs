//! Remote keys and rail keys, as peers send them.

use hmem::{RailKeys, RemoteKey};

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
