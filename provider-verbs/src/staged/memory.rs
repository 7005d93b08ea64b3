//! The memory of staged regions.

#![allow(unsafe_code, reason = "copies staged memory by address")]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use hmem_core::{
    Address, Error, ErrorKind,
    provider::{Backing, Piece},
};
use hmem_p2p::staging::StagedRange;

/// The memory of a staged region, in pieces.
#[derive(Debug)]
pub(crate) struct StagedRegion {
    pieces: Vec<Arc<StagedRange>>,
    /// True once the region is closed. Lanes then start no copy of its memory.
    closed: AtomicBool,
}

impl StagedRegion {
    /// Creates the memory of a region from its staged pieces.
    ///
    /// # Safety
    /// The caller must follow the safety rules of
    /// [`ProviderDomain::register`](hmem_core::provider::ProviderDomain::register) for the pieces.
    pub(super) unsafe fn new(pieces: &[Piece<'_>]) -> Self {
        let staged = |piece: &Piece<'_>| {
            let Backing::Staged { iface } = piece.backing else { return None };
            // SAFETY: the caller keeps the memory until it has deregistered the region. The close
            // of the region ends the copies (`ActiveLanes::abandon_closed`).
            Some(Arc::new(unsafe { StagedRange::new(Arc::clone(iface), piece.range) }))
        };
        let pieces = pieces.iter().filter_map(staged).collect();
        Self { pieces, closed: AtomicBool::new(false) }
    }

    /// Returns the pieces that hold the `left` bytes from `address` on, each with the offset and
    /// length of these bytes in the piece. Returns `None` if the region lacks some of the bytes.
    pub(super) fn runs(
        &self,
        mut address: Address,
        mut left: u64,
    ) -> Option<Vec<(Arc<StagedRange>, u64, u64)>> {
        let mut runs = Vec::new();
        while left > 0 {
            let piece = self.pieces.iter().find(|piece| piece.range().contains(address))?;
            let into = address.0 - piece.range().start().0;
            let len = left.min(piece.range().len() - into);
            runs.push((Arc::clone(piece), into, len));
            left -= len;
            address = Address(address.0.wrapping_add(len));
        }
        Some(runs)
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the region. A lane that is locked after this call starts no copy of the region's
    /// memory.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

/// Returns the error of a transfer whose staged region was closed.
pub(super) fn region_closed() -> Error {
    Error::new(ErrorKind::NoRegion, "staged copy")
        .provider("verbs")
        .remedy("keep the region of a descriptor open until the transfer completes")
}
