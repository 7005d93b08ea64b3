//! A region: its memory, who may reach it, and which bytes an access to it means.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, Error, ErrorKind, IfaceExt, Registry,
    Result, counter::Counter,
};
use parking_lot::{Mutex, RwLock};

use super::{
    Few,
    keys::Token,
    memory::{PieceMemory, Pinned, Promises, Span},
};

/// A region in the table.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) token: Token,
    pub(super) key: u64,
    pub(super) attr: RegionAttr,
    /// Set once peers and transfers may use the region.
    enabled: AtomicBool,
    /// Set once a single-use key was used.
    spent: AtomicBool,
    /// Made with the first counter: most regions have none.
    counters: OnceLock<Mutex<Vec<Arc<Counter>>>>,
    /// The only endpoint through which the region can be reached, by its number.
    endpoint: OnceLock<u64>,
}

/// Properties that a registration decides. Only deregistration and refresh change them.
#[derive(Debug)]
pub(super) struct RegionAttr {
    /// Bytes in all.
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) addressing: Addressing,
    /// Pieces in zero-based order; none once the region is deregistered.
    pub(super) pieces: Few<RegionPiece>,
    /// The authorization key, if it is not the domain's.
    pub(super) auth_key: Option<AuthKey>,
    /// The pages that may be touched, where the application says so (MMU_NOTIFY).
    pub(super) promises: Option<Arc<RwLock<Promises>>>,
    /// The region of which this is a part.
    pub(super) parent: Option<Token>,
    /// The region that has the pages, for a part of it or of one of its parts.
    pub(super) root: Option<Token>,
    /// RMA_PMEM: the NIC makes peers' writes persistent before they complete.
    pub(super) persistent: bool,
    /// MR_SINGLE_USE: the key is good for one access of a peer.
    pub(super) single_use: bool,
    /// Set if the region can be used from the start.
    pub(super) enabled: bool,
}

/// A piece of a region, or a part of a piece for a sub-region.
#[derive(Clone, Debug)]
pub(super) struct RegionPiece {
    /// The application's addresses.
    pub(super) range: AddressRange,
    pub(super) memory: PieceMemory,
    /// Start of the piece in `memory`.
    pub(super) at: u64,
}

/// Start of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessStart {
    /// Bytes from the start of the region.
    Offset(u64),
    /// An address of the application.
    Address(u64),
}

/// Reason why a region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Dead,
    Disabled,
    Refreshing,
}

impl RegionAttr {
    /// Copies the parts of the pieces that a sub-region covers.
    pub(super) fn part(&self, offset: u64, len: u64) -> Few<RegionPiece> {
        let (mut skip, mut left) = (offset, len);
        let mut parts = Few::new();
        for piece in &self.pieces {
            if skip >= piece.range.len() {
                skip -= piece.range.len();
                continue;
            }
            let part = left.min(piece.range.len() - skip);
            if part == 0 {
                break;
            }
            parts.push(RegionPiece {
                range: piece.range.slice(skip, part).expect("the part was cut to fit the piece"),
                memory: piece.memory.clone(),
                at: piece.at + skip,
            });
            left -= part;
            skip = 0;
        }
        parts
    }
}

impl Region {
    pub(super) fn new(token: Token, key: u64, attr: RegionAttr) -> Self {
        Self {
            token,
            key,
            enabled: AtomicBool::new(attr.enabled),
            spent: AtomicBool::new(false),
            counters: OnceLock::new(),
            endpoint: OnceLock::new(),
            attr,
        }
    }

    pub(super) fn enable(&self) {
        self.enabled.store(true, Ordering::Release);
    }

    /// Checks that the region can be used now, by a peer's key or by the domain's own handle.
    #[inline]
    pub(super) fn check_usable(&self, by_key: bool) -> Result<(), Refusal> {
        if by_key && self.attr.single_use && self.spent.load(Ordering::Acquire) {
            return Err(Refusal::Dead);
        }
        if self.enabled.load(Ordering::Acquire) { Ok(()) } else { Err(Refusal::Disabled) }
    }

    /// Uses up the key if it is good for one use only. Returns false if another access was first.
    #[inline]
    pub(super) fn spend(&self) -> bool {
        !self.attr.single_use || !self.spent.swap(true, Ordering::AcqRel)
    }

    pub(super) fn bind_counter(&self, counter: &Arc<Counter>) {
        self.counters.get_or_init(Mutex::default).lock().push(Arc::clone(counter));
    }

    /// Returns whether counters are bound to the region.
    pub(super) fn has_counters(&self) -> bool {
        self.counters.get().is_some()
    }

    /// Counts a write or atomic of a peer.
    pub(super) fn count(&self) {
        if let Some(counters) = self.counters.get() {
            counters.lock().iter().for_each(|counter| counter.add(1));
        }
    }

    /// Binds the region to an endpoint. Returns false if it is bound already.
    pub(super) fn bind_endpoint(&self, endpoint: u64) -> bool {
        self.endpoint.set(endpoint).is_ok()
    }

    /// The number of the endpoint to which the region is bound.
    pub(super) fn endpoint(&self) -> Option<u64> {
        self.endpoint.get().copied()
    }

    /// Host memory that the region does not own, whose pages may change, with its pinned pages.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = (AddressRange, Option<&Arc<Pinned>>)> {
        self.attr.pieces.iter().filter_map(|piece| match &piece.memory {
            PieceMemory::Borrowed => Some((piece.range, None)),
            PieceMemory::Pinned(pinned) => Some((piece.range, Some(pinned))),
            PieceMemory::Owned | PieceMemory::Mapped(_) | PieceMemory::Indirect(_) => None,
        })
    }

    /// Makes bytes of the region that were just written persistent, and flushes each device whose
    /// memory is in the region.
    pub(super) fn persist(&self, spans: &[Span<'_>], registry: &Registry) -> Result<()> {
        for span in spans {
            span.persist()?;
        }
        for piece in &self.attr.pieces {
            let host = matches!(
                piece.memory,
                PieceMemory::Owned | PieceMemory::Borrowed | PieceMemory::Pinned(_)
            );
            if host {
                continue;
            }
            let owner = registry.owner_of(piece.range.start())?;
            if let Some(device) = owner.device {
                registry.get(owner.iface)?.flush_inbound(device)?;
            }
        }
        Ok(())
    }

    /// Start of an access with a peer's address.
    pub(super) fn access_start(&self, address: u64) -> AccessStart {
        match self.attr.addressing {
            Addressing::ZeroBased => AccessStart::Offset(address),
            Addressing::Virtual => AccessStart::Address(address),
        }
    }

    /// Finds the bytes of an access of at least one byte; all of it lies inside, or the call fails.
    #[inline]
    pub(super) fn spans<'a>(
        &'a self,
        start: AccessStart,
        len: u64,
        into: &mut Few<Span<'a>>,
    ) -> Result<()> {
        let attr = &self.attr;
        let outside = || outside(start, len, attr.len);
        let mut take = |piece: &'a RegionPiece, skip: u64, len: u64| -> Result<()> {
            if let Some(promises) = &attr.promises {
                promises.read().check(piece.range.start().0 + skip, len)?;
            }
            into.push(piece.memory.span(piece.at + skip, len));
            Ok(())
        };
        let mut left = len;
        match start {
            AccessStart::Offset(mut skip) => {
                if skip > attr.len || len > attr.len - skip {
                    return Err(outside());
                }
                for piece in &attr.pieces {
                    if left == 0 {
                        break;
                    }
                    if skip >= piece.range.len() {
                        skip -= piece.range.len();
                        continue;
                    }
                    let part = left.min(piece.range.len() - skip);
                    take(piece, skip, part)?;
                    left -= part;
                    skip = 0;
                }
            }
            AccessStart::Address(mut address) => {
                while left > 0 {
                    let piece = attr
                        .pieces
                        .iter()
                        .find(|piece| piece.range.contains(Address(address)))
                        .ok_or_else(outside)?;
                    let skip = address - piece.range.start().0;
                    let part = left.min(piece.range.len() - skip);
                    take(piece, skip, part)?;
                    left -= part;
                    address = address.wrapping_add(part);
                }
            }
        }
        Ok(())
    }

    /// Offset of an address in the run of all pieces, if the access of at least one byte stays in
    /// one run of addresses there.
    pub(super) fn offset_of(&self, address: u64, len: u64) -> Option<u64> {
        let pieces = &self.attr.pieces;
        let mut run = 0;
        for (at, piece) in pieces.iter().enumerate() {
            if piece.range.contains(Address(address)) {
                let skip = address - piece.range.start().0;
                let mut reach = piece.range.len() - skip;
                let mut end = piece.range.end();
                for next in &pieces[at + 1..] {
                    if reach >= len || end != Some(next.range.start()) {
                        break;
                    }
                    reach += next.range.len();
                    end = next.range.end();
                }
                return (reach >= len).then_some(run + skip);
            }
            run += piece.range.len();
        }
        None
    }
}

impl Refusal {
    /// Returns the error for a peer's key that cannot be used.
    pub(super) fn of_key(self) -> Error {
        match self {
            Self::Dead => Error::new(ErrorKind::InvalidKey, "transfer")
                .provider("loopback")
                .remedy("ask the peer for the key of a region that is open"),
            _ => self.not_now("the peer's region"),
        }
    }

    /// Returns the error for a local descriptor that cannot be used.
    pub(super) fn of_descriptor(self) -> Error {
        match self {
            Self::Dead => Error::new(ErrorKind::NoRegion, "transfer")
                .provider("loopback")
                .remedy("keep the region of a descriptor open until the transfer completes"),
            _ => self.not_now("the local region"),
        }
    }

    fn not_now(self, region: &'static str) -> Error {
        let why = match self {
            Self::Disabled => "not enabled",
            Self::Refreshing => "being refreshed",
            Self::Dead => "closed",
        };
        Error::new(ErrorKind::BadState, "transfer")
            .provider("loopback")
            .context("region", region)
            .context("why", why)
    }
}

/// Returns the error for a missing right: any right of `any_of` would be enough.
pub(super) fn denied(side: &'static str, any_of: Access) -> Error {
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("side", side)
        .context("needs", any_of)
        .remedy("register the region with this right, or with one of these rights")
}

fn outside(start: AccessStart, len: u64, region: u64) -> Error {
    let error = Error::new(ErrorKind::OutOfBounds, "transfer").provider("loopback");
    let error = match start {
        AccessStart::Offset(offset) => error.context("offset", offset),
        AccessStart::Address(address) => error.context("address", format_args!("{address:#x}")),
    };
    error
        .context("length", len)
        .context("region", format_args!("{region} bytes"))
        .remedy("every byte of an access lies in the region that its key names")
}
