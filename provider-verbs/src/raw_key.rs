//! Raw keys: a region's addresses and rkeys, encoded for peers.

use hmem_core::{Addressing, Error, ErrorKind, Iova, RawKey, RemotePiece, Result};

/// Length in bytes of the raw key of a region with one registration. Each further registration adds
/// `PIECE` bytes.
pub(super) const RAW_KEY: usize = HEADER + PIECE;
const HEADER: usize = 4;
const PIECE: usize = 20;
const MAGIC: [u8; 3] = *b"vk\x01";

/// Encodes pieces of memory with their rkeys as a raw key.
pub(super) fn encode(
    addressing: Addressing,
    pieces: impl ExactSizeIterator<Item = RemotePiece>,
) -> RawKey {
    let mut raw = Vec::with_capacity(HEADER + PIECE * pieces.len());
    raw.extend_from_slice(&MAGIC);
    raw.push(u8::from(addressing == Addressing::ZeroBased));
    for piece in pieces {
        raw.extend_from_slice(&piece.base.0.to_be_bytes());
        raw.extend_from_slice(&piece.len.to_be_bytes());
        raw.extend_from_slice(&(piece.key as u32).to_be_bytes());
    }
    RawKey(raw)
}

/// Decodes the pieces of a raw key.
pub(super) fn decode(raw: &RawKey) -> Result<Vec<RemotePiece>> {
    let malformed = || {
        Error::new(ErrorKind::Malformed, "map raw key")
            .provider("verbs")
            .context("bytes", raw.0.len())
            .remedy("pass the bytes of raw_attr unchanged and complete")
    };
    let Some([0 | 1, body @ ..]) = raw.0.strip_prefix(&MAGIC) else { return Err(malformed()) };
    let (pieces, rest) = body.as_chunks::<PIECE>();
    if pieces.is_empty() || !rest.is_empty() {
        return Err(malformed());
    }
    let read = |piece: &[u8; PIECE]| {
        let number = |from: usize| {
            piece[from..].first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes))
        };
        let key = piece.last_chunk::<4>().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        RemotePiece { base: Iova(number(0)), len: number(8), key: u64::from(key) }
    };
    Ok(pieces.iter().map(read).collect())
}

#[cfg(test)]
#[path = "../../tests/corpus/reader.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    /// KEY-06: the decoder accepts the raw keys that any released version encoded.
    #[test]
    fn raw_keys_of_all_versions_are_decoded() {
        corpus::check("raw-key-verbs", 1..=u32::from(MAGIC[2]), |bytes| {
            let pieces = decode(&RawKey(bytes.to_vec())).expect("a raw key");
            let piece = |piece: &RemotePiece| {
                format!("{:#x}+{:#x} key {:#x}", piece.base.0, piece.len, piece.key)
            };
            pieces.iter().map(piece).collect::<Vec<_>>().join(", ")
        });
    }
}
