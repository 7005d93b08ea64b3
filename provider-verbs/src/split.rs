//! Splitting of regions into registrations that the device supports, and of transfers at changes of
//! keys.
//!
//! Pure arithmetic without driver calls, tested against an oracle.

use super::sys::Sge;

/// Returns the offset and length of the parts into which `len` bytes from address `start` are
/// split. No part is longer than `max`; 0 counts as 1. `page` is a power of two. Parts end at
/// addresses that are multiples of `page`, unless `max` is smaller.
///
/// ```
/// use hmem_provider_verbs::seams;
///
/// assert_eq!(seams(0x1800, 0x3000, 0x1000, 0x1000).collect::<Vec<_>>(), [
///     (0, 0x800), (0x800, 0x1000), (0x1800, 0x1000), (0x2800, 0x800),
/// ]);
/// ```
pub fn seams(start: u64, len: u64, max: u64, page: u64) -> impl Iterator<Item = (u64, u64)> {
    let max = max.max(1);
    let mut offset = 0u64;
    std::iter::from_fn(move || {
        let left = len - offset;
        if left == 0 {
            return None;
        }
        let at = offset;
        let mut part = left.min(max);
        if part < left {
            // A page that two parts share would be registered twice. So a part ends at a page
            // boundary if the part contains one.
            let over = start.wrapping_add(offset).wrapping_add(part) & (page - 1);
            if over < part {
                part -= over;
            }
        }
        offset += part;
        Some((at, part))
    })
}

/// Consecutive bytes of local memory under one lkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address of the first byte, as work requests name it.
    pub address: u64,
    /// Number of bytes.
    pub len: u64,
    /// The lkey of the bytes.
    pub lkey: u32,
}

/// Consecutive bytes of a peer's memory under one rkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Address of the first byte, as work requests to the peer name it.
    pub address: u64,
    /// Number of bytes.
    pub len: u64,
    /// The rkey of the bytes.
    pub rkey: u32,
}

/// A planned work request: a remote address, and a slice of the list of local segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Remote address of the first byte.
    pub address: u64,
    /// Number of bytes that the request moves.
    pub len: u64,
    /// The rkey of the peer's memory.
    pub rkey: u32,
    /// Index of the request's first local segment in the list.
    pub first: usize,
    /// Number of local segments that the request uses, from `first` on.
    pub count: usize,
}

/// Splits a transfer into work requests of at most `max_sge` local segments and `max_message`
/// bytes. Each work request has one rkey. Both lists must hold the same number of bytes. A transfer
/// of 0 bytes becomes one empty work request to the first target, if there is a target.
///
/// Clears `segments` and `requests`, and fills them with the local segments and the work requests.
pub fn plan(
    local: &[Span],
    remote: &[Target],
    (max_sge, max_message): (usize, u64),
    segments: &mut Vec<Sge>,
    requests: &mut Vec<Planned>,
) {
    segments.clear();
    requests.clear();
    // A segment's length has 32 bits.
    let max_message = max_message.clamp(1, u64::from(u32::MAX));
    let max_sge = max_sge.max(1);
    let mut spans = local.iter().copied().filter(|span| span.len > 0);
    let mut span = spans.next();
    for target in remote.iter().filter(|target| target.len > 0) {
        let (mut address, mut left) = (target.address, target.len);
        while left > 0 {
            let first = segments.len();
            let mut bytes = 0;
            while let Some(from) = span
                && bytes < left.min(max_message)
                && segments.len() - first < max_sge
            {
                let take = from.len.min(left.min(max_message) - bytes);
                segments.push(Sge { addr: from.address, length: take as u32, lkey: from.lkey });
                bytes += take;
                span = if take == from.len {
                    spans.next()
                } else {
                    Some(Span {
                        address: from.address.wrapping_add(take),
                        len: from.len - take,
                        ..from
                    })
                };
            }
            if bytes == 0 {
                return;
            }
            let count = segments.len() - first;
            requests.push(Planned { address, len: bytes, rkey: target.rkey, first, count });
            address = address.wrapping_add(bytes);
            left -= bytes;
        }
    }
    if requests.is_empty()
        && let Some(target) = remote.first()
    {
        requests.push(Planned {
            address: target.address,
            len: 0,
            rkey: target.rkey,
            first: 0,
            count: 0,
        });
    }
}
