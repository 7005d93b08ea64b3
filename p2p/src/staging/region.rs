//! The memory of staged regions.

#![allow(unsafe_code, reason = "copies staged memory by address")]

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use hmem_core::{
    Access, Address, Error, ErrorKind, Result,
    provider::{Backing, Piece, Registration},
};

use super::range::StagedRange;

/// The staged pieces of memory of one region, for a NIC that reaches only the staging buffers.
///
/// RMA by a peer runs no code on this side, so nothing would copy the bytes. The region therefore
/// has no remote key, and peers cannot access it.
#[derive(Debug)]
pub struct StagedRegion {
    pieces: Vec<Arc<StagedRange>>,
    /// True once the region is closed. Transfers then start no copy of its memory.
    closed: AtomicBool,
}

impl StagedRegion {
    /// Creates the memory of a region from its staged pieces. `allowed` has the rights that staged
    /// regions of the provider may have
    /// ([`ProviderAttr::staged_access`](hmem_core::provider::ProviderAttr::staged_access)).
    ///
    /// # Safety
    /// The caller must follow the safety rules of
    /// [`ProviderDomain::register`](hmem_core::provider::ProviderDomain::register) for the pieces.
    /// The region stays registered until no transfer copies its memory.
    ///
    /// # Errors
    /// Unsupported: the request has other rights, or a piece is not staged.
    pub unsafe fn new(
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        allowed: Access,
    ) -> Result<Self> {
        let refuse = |why: &'static str| {
            Error::new(ErrorKind::Unsupported, "register").context("path", "staged").remedy(why)
        };
        if !allowed.contains(request.access) {
            return Err(refuse(
                "register with SEND, RECV, READ and WRITE only, as a peer's NIC cannot reach \
                 memory through copies, and let this side write to the peer, read from it or \
                 exchange messages; or make a direct path work",
            )
            .context("access", request.access - allowed));
        }
        let staged = |piece: &Piece<'_>| {
            let Backing::Staged { iface } = piece.backing else {
                return Err(refuse("stage a region as a whole or not at all"));
            };
            // SAFETY: the caller keeps the memory until it has deregistered the region, which is
            // after the last copy.
            Ok(Arc::new(unsafe { StagedRange::new(Arc::clone(iface), piece.range) }))
        };
        let pieces = pieces.iter().map(staged).collect::<Result<_>>()?;
        Ok(Self { pieces, closed: AtomicBool::new(false) })
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

    /// Returns true once the region is closed.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the region. A step of a transfer that begins after this call starts no copy of the
    /// region's memory, and fails the transfer.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}
