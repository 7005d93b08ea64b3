//! Splitting of regions into registrations that the device supports, and of transfers at changes of
//! keys.
//!
//! Pure arithmetic without driver calls, tested against an oracle.

use super::sys::Sge;

/// Splits `len` bytes from address `start` on into parts of at most `max` bytes (0 counts as 1).
/// Returns the offset and length of each part. Each part but the last ends at a multiple of `page`
/// (a power of two) if the part contains such an address.
pub(super) fn seams(start: u64, len: u64, max: u64, page: u64) -> impl Iterator<Item = (u64, u64)> {
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
            // A page that two parts share would be registered twice.
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
pub(super) struct Span {
    /// Address by which work requests name the first byte.
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) lkey: u32,
}

/// Consecutive bytes of a peer's memory under one rkey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitTarget {
    /// Address by which work requests to the peer name the first byte.
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) rkey: u32,
}

/// A work request that [`plan`] has planned: a range of a peer's memory, and a slice of the list of
/// local segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// Remote address of the first byte.
    pub(super) address: u64,
    /// Number of bytes that the request moves.
    pub(super) len: u64,
    pub(super) rkey: u32,
    /// Index of the request's first local segment in the list.
    pub(super) first: usize,
    /// Number of local segments that the request uses, from `first` on.
    pub(super) count: usize,
}

/// Splits a transfer into work requests of at most `max_sge` local segments and `max_message`
/// bytes. A work request has one rkey, so a new work request begins where the rkey changes. `local`
/// and `remote` must have the same number of bytes. A transfer of 0 bytes becomes one empty work
/// request to the first element of `remote`, or none if `remote` is empty.
///
/// Clears `segments` and `requests`, and fills them with the local segments and the work requests.
pub(super) fn plan(
    local: &[Span],
    remote: &[SplitTarget],
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
        let (address, rkey) = (target.address, target.rkey);
        requests.push(Planned { address, len: 0, rkey, first: 0, count: 0 });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seams_lie_on_pages() {
        assert_eq!(
            seams(0x1800, 0x3000, 0x1000, 0x1000).collect::<Vec<_>>(),
            [(0, 0x800), (0x800, 0x1000), (0x1800, 0x1000), (0x2800, 0x800),]
        );
    }

    proptest! {
        #[test]
        fn seams_cover_the_range_and_are_page_aligned(
            start in 0_u64..1 << 40,
            len in 1_u64..1 << 24,
            max in 1_u64..1 << 22,
            page_bits in 12_u32..16,
        ) {
            let page = 1 << page_bits;
            prop_assume!(len / max < 5000);
            let parts: Vec<_> = seams(start, len, max, page).collect();
            let mut next = 0;
            for (index, (offset, part)) in parts.iter().enumerate() {
                prop_assert_eq!(*offset, next);
                prop_assert!(*part >= 1 && *part <= max);
                next += part;
                if index + 1 < parts.len() && max >= page {
                    prop_assert_eq!((start + next) % page, 0, "every seam can lie on a page");
                }
            }
            prop_assert_eq!(next, len);
        }

        #[test]
        fn planned_requests_move_every_byte_to_its_target(
            local in prop::collection::vec(0_u64..50, 0..12),
            cuts in prop::collection::vec(1_u64..60, 1..8),
            max_sge in 1_usize..5, max_message in 1_u64..80,
        ) {
            // The oracle lists the source and the target of each byte.
            let mut spans = Vec::new();
            let mut from = Vec::new();
            for (index, len) in local.iter().enumerate() {
                let (address, lkey) = (index as u64 * 1000, index as u32);
                spans.push(Span { address, len: *len, lkey });
                from.extend((0..*len).map(|byte| (address + byte, lkey)));
            }
            let mut targets = Vec::new();
            let mut left = from.len() as u64;
            let mut to = Vec::new();
            for (index, cut) in cuts.iter().enumerate() {
                let len = if index + 1 == cuts.len() { left } else { left.min(*cut) };
                let (address, rkey) = (1 << 20 | (index as u64 * 10_000), 100 + index as u32);
                targets.push(SplitTarget { address, len, rkey });
                to.extend((0..len).map(|byte| (address + byte, rkey)));
                left -= len;
            }
            let (mut segments, mut requests) = (Vec::new(), Vec::<Planned>::new());
            plan(&spans, &targets, (max_sge, max_message), &mut segments, &mut requests);
            let mut moved = Vec::new();
            for request in &requests {
                prop_assert!(request.count <= max_sge && request.len <= max_message);
                let mut at = request.address;
                for segment in &segments[request.first..request.first + request.count] {
                    for byte in 0..u64::from(segment.length) {
                        moved.push(((segment.addr + byte, segment.lkey), (at, request.rkey)));
                        at += 1;
                    }
                }
                prop_assert_eq!(at - request.address, request.len);
            }
            let expected: Vec<_> = from.into_iter().zip(to).collect();
            prop_assert_eq!(moved, expected);
            prop_assert!(!requests.is_empty());
        }
    }
}
