//! Cuts requests into parts that libfabric takes at once: one range of the peer's memory, and a few
//! ranges of local memory.

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use hmem_core::{
    Access, Addressing, Error, ErrorKind, Result,
    transfer::{LocalSegment, RemoteSegment},
};
use smallvec::SmallVec;

use super::{
    region::Regions,
    sys::{FI_HMEM_SYSTEM, fi_rma_iov, fi_rx_attr, fi_tx_attr, iovec},
};

/// Limits of endpoints, from the `fi_info`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The largest number of local ranges in one call.
    pub(super) vectors: usize,
    /// The largest number of bytes in one call.
    pub(super) longest: u64,
    /// The largest number of bytes that a post can copy.
    pub(super) inject: u64,
    /// The largest number of calls in flight: transmits and receives.
    pub(super) depths: [usize; 2],
    /// True if the data that libfabric carries with a write has 64 bits. The upper 32 bits then
    /// carry the length of the write, and the lower ones the application's immediate data.
    pub(super) carries_lengths: bool,
}

impl Limits {
    pub(super) fn of(
        transmit: &fi_tx_attr,
        receive: &fi_rx_attr,
        longest: usize,
        cq_data_size: usize,
    ) -> Self {
        Self {
            vectors: transmit.iov_limit.min(receive.iov_limit).max(1),
            longest: (longest as u64).max(1),
            inject: transmit.inject_size as u64,
            depths: [transmit.size.max(1), receive.size.max(1)],
            carries_lengths: cq_data_size >= 8,
        }
    }
}

/// A range of local memory with its descriptor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) desc: *mut c_void,
    /// libfabric's numbers for the iface and the device of the memory. `ofi_rxm` accesses all
    /// ranges of a call as the first descriptor says.
    pub(super) owner: (c_int, u64),
}

/// The owner of host memory.
pub(super) const HOST: (c_int, u64) = (FI_HMEM_SYSTEM, 0);

/// Local memory of a request.
#[derive(Debug, Default)]
pub(super) struct LocalList {
    pub(super) list: SmallVec<[Local; 2]>,
    /// The tokens of the regions.
    pub(super) tokens: SmallVec<[u64; 2]>,
    pub(super) bytes: u64,
    /// True if all bytes are in host memory, where a post may read them with the CPU.
    pub(super) host: bool,
}

/// Ranges of local memory for one call of libfabric.
#[derive(Debug, Default)]
pub(super) struct Vectors {
    pub(super) ranges: SmallVec<[iovec; 1]>,
    pub(super) descs: SmallVec<[*mut c_void; 1]>,
    pub(super) bytes: u64,
}

impl Vectors {
    pub(super) fn one(local: Local) -> Self {
        let mut this = Self::default();
        this.push(local);
        this
    }

    fn push(&mut self, local: Local) {
        let base = ptr::with_exposed_provenance(local.address as usize);
        self.ranges.push(iovec { iov_base: base, iov_len: local.len as usize });
        self.descs.push(local.desc);
        self.bytes += local.len;
    }
}

pub(super) fn refuse(kind: ErrorKind, why: &'static str) -> Error {
    Error::new(kind, "post").provider("libfabric").remedy(why)
}

impl LocalList {
    /// Translates local segments. `needs_desc` is true in LOCAL mode: each segment then needs the
    /// descriptor of a region with the right `right`. `is_device` returns true if a segment without
    /// a descriptor is memory of a device.
    ///
    /// # Errors
    /// - NoRegion: a segment without a descriptor needs one.
    /// - The errors of [`Regions::local`] and `is_device`.
    pub(super) fn new(
        regions: &Regions,
        segments: &[LocalSegment],
        right: Access,
        needs_desc: bool,
        is_device: impl Fn(&LocalSegment) -> Result<bool>,
    ) -> Result<Self> {
        let mut this = Self { host: true, ..Self::default() };
        for segment in segments {
            let (desc, host, owner) = match segment.desc {
                Some(desc) => {
                    let found =
                        regions.local(segment, desc, (right, needs_desc), |region, part| {
                            let host = region.is_host();
                            let named = needs_desc || !host;
                            let desc = if named { part.desc } else { ptr::null_mut() };
                            (desc, host, part.owner)
                        })?;
                    let Some(found) = found else { continue };
                    this.tokens.push(desc.to_provider());
                    found
                }
                None if needs_desc || is_device(segment)? => {
                    let why = "pass the descriptor of a region: the mode or the memory needs one";
                    return Err(refuse(ErrorKind::NoRegion, why));
                }
                None => (ptr::null_mut(), true, HOST),
            };
            this.host &= host;
            this.bytes = this.bytes.saturating_add(segment.len);
            this.list.push(Local { address: segment.address.0, len: segment.len, desc, owner });
        }
        Ok(this)
    }

    /// Returns all ranges for one call.
    ///
    /// # Errors
    /// - TooManyRanges: more ranges than `limit`.
    /// - MessageTooLong: more bytes than `longest`.
    /// - Unsupported: the ranges are in memory of different devices, or of the host and a device.
    pub(super) fn whole(&self, limit: usize, longest: u64) -> Result<Vectors> {
        if self.list.len() > limit {
            let error = refuse(ErrorKind::TooManyRanges, "use fewer local segments");
            return Err(error.context("segments", self.list.len()).context("limit", limit));
        }
        if self.bytes > longest {
            let error = refuse(ErrorKind::MessageTooLong, "send a shorter message");
            return Err(error.context("bytes", self.bytes).context("limit", longest));
        }
        if self.list.iter().any(|local| local.owner != self.list[0].owner) {
            let why = "use local segments of one device, or of the host alone: libfabric accesses \
                       all of them in one way";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        let mut vectors = Vectors::default();
        self.list.iter().for_each(|local| vectors.push(*local));
        Ok(vectors)
    }

    /// Cuts an RMA transfer into parts, and passes each to `add`. A part has one remote range, at
    /// most `limit` local ranges, all of one owner, and at most `longest` bytes.
    pub(super) fn cut(
        &self,
        remote: &[fi_rma_iov],
        limit: usize,
        longest: u64,
        mut add: impl FnMut(Vectors, fi_rma_iov),
    ) {
        let mut locals = self.list.iter().copied();
        let mut local = locals.next();
        for target in remote {
            let mut done = 0;
            loop {
                let (mut part, mut owner) = (Vectors::default(), None);
                let left = (target.len as u64 - done).min(longest);
                while part.bytes < left && part.ranges.len() < limit {
                    let Some(mut now) = local else { break };
                    if now.len > 0 && *owner.get_or_insert(now.owner) != now.owner {
                        break;
                    }
                    let take = now.len.min(left - part.bytes);
                    let rest = Local { address: now.address + take, len: now.len - take, ..now };
                    local = if rest.len > 0 { Some(rest) } else { locals.next() };
                    now.len = take;
                    if take > 0 {
                        part.push(now);
                    }
                }
                let len = part.bytes as usize;
                let addr = target.addr.wrapping_add(done);
                done += part.bytes;
                add(part, fi_rma_iov { addr, len, key: target.key });
                if done == target.len as u64 || len == 0 {
                    break;
                }
            }
        }
    }
}

/// Translates remote segments to ranges for libfabric. A segment becomes one range for each piece
/// of the remote key that it touches. Also returns the total length.
///
/// # Errors
/// - InvalidArgument: the list is empty.
/// - OutOfBounds: a segment is outside its key.
pub(super) fn remote_ranges(
    segments: &[RemoteSegment<'_>],
) -> Result<(SmallVec<[fi_rma_iov; 2]>, u64)> {
    if segments.is_empty() {
        return Err(refuse(ErrorKind::InvalidArgument, "pass a remote segment"));
    }
    let (mut ranges, mut bytes) = (SmallVec::new(), 0_u64);
    for segment in segments {
        bytes = bytes.saturating_add(segment.len);
        pieces(segment, &mut ranges).ok_or_else(|| {
            refuse(ErrorKind::OutOfBounds, "pass an address and a length inside the remote key")
                .context("address", format_args!("{:#x}", segment.address.0))
                .context("length", segment.len)
        })?;
    }
    Ok((ranges, bytes))
}

/// Adds the ranges of one segment. Returns `None` if the segment is not inside its key.
fn pieces(segment: &RemoteSegment<'_>, ranges: &mut SmallVec<[fi_rma_iov; 2]>) -> Option<()> {
    // Zero-based addresses count from the start of the first piece, and libfabric counts from the
    // start of each.
    let zero_based = segment.key.addressing() == Addressing::ZeroBased;
    let (mut before, mut at, mut left) = (segment.key.base().0, segment.address.0, segment.len);
    let mut found = false;
    for piece in segment.key.pieces() {
        let start = if zero_based { before } else { piece.base.0 };
        before = before.wrapping_add(piece.len);
        let skip = at.wrapping_sub(start);
        if skip > piece.len || (skip == piece.len && left > 0) {
            continue;
        }
        let len = left.min(piece.len - skip);
        let addr = piece.base.0.wrapping_add(skip);
        ranges.push(fi_rma_iov { addr, len: len as usize, key: piece.key });
        (at, left, found) = (at.wrapping_add(len), left - len, true);
        if left == 0 {
            break;
        }
    }
    (found && left == 0).then_some(())
}

#[cfg(test)]
mod tests {
    use hmem_core::{Iova, RemoteKey, RemotePiece};

    use super::*;

    fn piece(base: u64, len: u64, key: u64) -> RemotePiece {
        RemotePiece { base: Iova(base), len, key }
    }

    fn ranges(key: &RemoteKey, address: u64, len: u64) -> Option<Vec<(u64, usize, u64)>> {
        let segment = RemoteSegment { address: Iova(address), len, key };
        let (ranges, bytes) = remote_ranges(&[segment]).ok()?;
        assert_eq!(bytes, len);
        Some(ranges.iter().map(|range| (range.addr, range.len, range.key)).collect())
    }

    #[test]
    fn segments_are_cut_at_the_pieces_of_their_key() {
        let rest = vec![piece(0, 20, 2), piece(0, 30, 3)];
        let key = RemoteKey::split(Addressing::ZeroBased, piece(0, 10, 1), rest);
        assert_eq!(ranges(&key, 5, 40), Some(vec![(5, 5, 1), (0, 20, 2), (0, 15, 3)]));
        assert_eq!(ranges(&key, 10, 20), Some(vec![(0, 20, 2)]));
        assert_eq!(ranges(&key, 60, 0), Some(vec![(30, 0, 3)]));
        assert_eq!(ranges(&key, 59, 2), None);
        assert_eq!(ranges(&key, 61, 0), None);
        assert_eq!(ranges(&key, u64::MAX, 1), None);
        let rest = vec![piece(1010, 10, 2), piece(5000, 10, 3)];
        let key = RemoteKey::split(Addressing::Virtual, piece(1000, 10, 1), rest);
        assert_eq!(ranges(&key, 1005, 10), Some(vec![(1005, 5, 1), (1010, 5, 2)]));
        assert_eq!(ranges(&key, 5000, 10), Some(vec![(5000, 10, 3)]));
        assert_eq!(ranges(&key, 1015, 10), None, "a gap");
        assert_eq!(ranges(&key, 999, 2), None);
    }

    fn cut(
        list: &LocalList,
        remote: &[fi_rma_iov],
        limit: usize,
        longest: u64,
    ) -> Vec<(Vectors, fi_rma_iov)> {
        let mut parts = Vec::new();
        list.cut(remote, limit, longest, |vectors, target| parts.push((vectors, target)));
        parts
    }

    #[test]
    fn parts_keep_the_order_of_the_bytes_and_the_limits() {
        let local = |address, len| Local { address, len, desc: ptr::null_mut(), owner: HOST };
        let mut list = LocalList { host: true, ..LocalList::default() };
        for (address, len) in [(100, 3), (200, 0), (300, 4), (400, 5)] {
            list.list.push(local(address, len));
            list.bytes += len;
        }
        let remote =
            [fi_rma_iov { addr: 7, len: 4, key: 1 }, fi_rma_iov { addr: 50, len: 8, key: 2 }];
        for limit in 1..4 {
            for longest in 1..13 {
                let parts = cut(&list, &remote, limit, longest);
                let (mut near, mut far) = (Vec::new(), Vec::new());
                for (vectors, target) in &parts {
                    assert!(vectors.ranges.len() <= limit && vectors.bytes <= longest);
                    assert_eq!(vectors.bytes, target.len as u64);
                    for range in &vectors.ranges {
                        near.extend((0..range.iov_len).map(|at| range.iov_base.addr() + at));
                    }
                    far.extend((0..target.len as u64).map(|at| (target.key, target.addr + at)));
                }
                let expected: Vec<_> = (100..103).chain(300..304).chain(400..405).collect();
                assert_eq!(near, expected);
                let expected = (7..11).map(|at| (1, at)).chain((50..58).map(|at| (2, at)));
                assert!(far.iter().copied().eq(expected), "{far:?}");
            }
        }
        // `ofi_rxm` accesses all ranges of a part as the first descriptor says.
        let mut mixed = LocalList::default();
        for (address, owner) in [(100, HOST), (200, (1, 0)), (300, (1, 1)), (400, (1, 1))] {
            mixed.list.push(Local { owner, ..local(address, 2) });
            mixed.bytes += 2;
        }
        let refused = mixed.whole(4, 100).expect_err("several owners");
        assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
        let parts = cut(&mixed, &[fi_rma_iov { addr: 9, len: 8, key: 1 }], 4, 100);
        let parts: Vec<_> = parts.iter().map(|(near, far)| (near.bytes, far.addr)).collect();
        assert_eq!(parts, [(2, 9), (2, 11), (4, 13)]);
        let remote = [fi_rma_iov { addr: 9, len: 0, key: 1 }];
        let empty = cut(&LocalList::default(), &remote, 4, 100);
        assert_eq!((empty.len(), empty[0].1.addr), (1, 9), "a transfer of no bytes");
    }
}
