//! A region: its memory, the checks of an access, and the spans that an access covers.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, Error, ErrorKind, IfaceExt, Registry,
    Result, counter::Counter, iface::DmaBufImporter, provider::revoked,
};
use parking_lot::{Mutex, RwLock};

use super::{
    Few,
    memory::{AnnouncedPages, PieceMemory, Pinned, Span},
};

/// A registered region, as the NIC's region table stores it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) attr: RegionAttr,
    /// True once transfers may use the region.
    enabled: AtomicBool,
    /// True once an access has used the region's single-use key.
    spent: AtomicBool,
    /// The counters bound to the region. The list is created with the first counter, because most
    /// regions have none.
    counters: OnceLock<Box<Mutex<Vec<Arc<Counter>>>>>,
    /// The number of the endpoint that the region is bound to. Transfers through other endpoints
    /// are refused.
    endpoint: OnceLock<u64>,
    /// True once the exporter of a dma-buf of the region revoked it. The region then has no pieces.
    revoked: bool,
    /// The region's attachments to dma-bufs that their exporters can revoke.
    attachments: Vec<Arc<dyn DmaBufImporter>>,
}

/// A region with its lock.
pub(super) type SharedRegion = Arc<RwLock<Region>>;

/// The properties of a region that its registration sets. Deregistration and revocation empty
/// `pieces`.
#[derive(Debug)]
pub(super) struct RegionAttr {
    /// The length of the region: the total number of bytes of its pieces.
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) addressing: Addressing,
    /// The pieces in the order of their offsets. Empty once the region is deregistered or revoked.
    pub(super) pieces: Few<RegionPiece>,
    /// The region's authorization key, if it differs from the authorization key of the domain.
    pub(super) auth_key: Option<AuthKey>,
    /// With MMU_NOTIFY, the addresses that the NIC may access. A sub-region shares the set of its
    /// parent. `None` if the NIC may access the whole region.
    pub(super) announced_pages: Option<Arc<RwLock<AnnouncedPages>>>,
    /// True with RMA_PMEM: the NIC makes peers' writes persistent before they complete.
    pub(super) persistent: bool,
    /// True with MR_SINGLE_USE: the key is valid for one access by a peer.
    pub(super) single_use: bool,
    /// True if peers can use the key as soon as the memory is registered. False for a region that
    /// the application enables later (`FI_MR_ENDPOINT`, `FI_RMA_EVENT`).
    pub(super) enabled: bool,
}

/// A contiguous piece of a region. A sub-region has parts of its parent's pieces.
#[derive(Clone, Debug)]
pub(super) struct RegionPiece {
    /// The application's addresses of the piece.
    pub(super) range: AddressRange,
    pub(super) memory: PieceMemory,
    /// The place of the piece's first byte in `memory`, as the argument `at` of
    /// [`PieceMemory::span`].
    pub(super) at: u64,
}

/// The first byte of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessStart {
    /// An offset in the region.
    Offset(u64),
    /// A virtual address of the application.
    Address(u64),
}

/// The reason why a region cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The key or handle names no live region, or is a single-use key that was used.
    NoRegion,
    /// The region is not enabled yet.
    Disabled,
    /// The region's pages are being refreshed, or its dma-buf is being revoked.
    Refreshing,
    /// The exporter revoked a dma-buf of the region.
    Revoked,
}

impl RegionAttr {
    /// Returns the parts of the pieces that hold `len` bytes from `offset`. Each item is a piece,
    /// the offset of the part in the piece, and the length of the part.
    #[inline]
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = (&RegionPiece, u64, u64)> {
        let (mut skip, mut left) = (offset, len);
        self.pieces.iter().filter_map(move |piece| {
            let start = skip.min(piece.range.len());
            let part = left.min(piece.range.len() - start);
            skip -= start;
            left -= part;
            (part > 0).then_some((piece, start, part))
        })
    }

    /// Returns the pieces of a sub-region of `len` bytes at `offset`.
    pub(super) fn sub_pieces(&self, offset: u64, len: u64) -> Few<RegionPiece> {
        let cut = |(piece, start, part): (&RegionPiece, u64, u64)| RegionPiece {
            range: piece.range.slice(start, part).expect("the part lies in the piece"),
            memory: piece.memory.clone(),
            at: piece.at + start,
        };
        self.parts(offset, len).map(cut).collect()
    }
}

impl Region {
    #[inline]
    pub(super) fn shared(attr: RegionAttr) -> SharedRegion {
        Arc::new(RwLock::new(Self {
            enabled: AtomicBool::new(attr.enabled),
            spent: AtomicBool::new(false),
            counters: OnceLock::new(),
            endpoint: OnceLock::new(),
            revoked: false,
            attachments: Vec::new(),
            attr,
        }))
    }

    pub(super) fn enable(&self) {
        self.enabled.store(true, Ordering::Release);
    }

    /// Keeps an attachment to a dma-buf until the region is deregistered.
    pub(super) fn keep(&mut self, attachment: Arc<dyn DmaBufImporter>) {
        self.attachments.push(attachment);
    }

    /// Marks the region as revoked, and drops its memory. The caller has the write guard, so that
    /// no transfer uses the memory.
    pub(super) fn revoke(&mut self) {
        self.revoked = true;
        drop(std::mem::take(&mut self.attr.pieces));
    }

    #[inline]
    pub(super) fn is_revoked(&self) -> bool {
        self.revoked
    }

    /// Checks that the region is enabled, and that no exporter has revoked its memory. If `by_key`
    /// is true, also checks that its key is not a single-use key that was used.
    ///
    /// `by_key` is true if a peer's key named the region, and false if a handle of the domain did.
    #[inline]
    pub(super) fn check_usable(&self, by_key: bool) -> Result<(), Refusal> {
        if by_key && self.attr.single_use && self.spent.load(Ordering::Acquire) {
            return Err(Refusal::NoRegion);
        }
        if self.revoked {
            return Err(Refusal::Revoked);
        }
        if self.enabled.load(Ordering::Acquire) { Ok(()) } else { Err(Refusal::Disabled) }
    }

    /// Marks a single-use key as used. Returns false if an earlier access has used it. Returns true
    /// for other keys.
    #[inline]
    pub(super) fn spend(&self) -> bool {
        !self.attr.single_use || !self.spent.swap(true, Ordering::AcqRel)
    }

    pub(super) fn bind_counter(&self, counter: &Arc<Counter>) {
        self.counters.get_or_init(Box::default).lock().push(Arc::clone(counter));
    }

    /// Returns true if counters are bound to the region.
    pub(super) fn has_counters(&self) -> bool {
        self.counters.get().is_some()
    }

    /// Increments each counter that is bound to the region. The NIC calls this after a write or
    /// atomic of a peer.
    pub(super) fn increment_counters(&self) {
        if let Some(counters) = self.counters.get() {
            counters.lock().iter().for_each(|counter| counter.add(1));
        }
    }

    /// Binds the region to an endpoint. Returns false if the region is bound already.
    pub(super) fn bind_endpoint(&self, endpoint: u64) -> bool {
        self.endpoint.set(endpoint).is_ok()
    }

    /// Returns the number of the endpoint that the region is bound to.
    pub(super) fn endpoint(&self) -> Option<u64> {
        self.endpoint.get().copied()
    }

    /// Returns the ranges of host memory that the region does not own, whose pages the application
    /// may change. If the NIC pins memory, each range comes with its pinned pages.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = (AddressRange, Option<&Arc<Pinned>>)> {
        self.attr.pieces.iter().filter_map(|piece| match &piece.memory {
            PieceMemory::Borrowed => Some((piece.range, None)),
            PieceMemory::Pinned(pinned) => Some((piece.range, Some(pinned))),
            PieceMemory::Owned | PieceMemory::Mapped(_) | PieceMemory::Indirect(_) => None,
        })
    }

    /// Makes written bytes of the region persistent, and flushes each device that owns memory of
    /// the region.
    pub(super) fn persist(&self, spans: &[Span<'_>], registry: &Registry) -> Result<()> {
        for span in spans {
            span.persist()?;
        }
        for piece in &self.attr.pieces {
            if piece.memory.is_host() {
                continue;
            }
            let owner = registry.owner_of(piece.range.start())?;
            if let Some(device) = owner.device {
                registry.get(owner.iface)?.flush_inbound(device)?;
            }
        }
        Ok(())
    }

    /// Interprets an address from a peer's request: as an offset if the region is zero-based, and
    /// as a virtual address otherwise.
    pub(super) fn access_start(&self, address: u64) -> AccessStart {
        match self.attr.addressing {
            Addressing::ZeroBased => AccessStart::Offset(address),
            Addressing::Virtual => AccessStart::Address(address),
        }
    }

    /// Appends to `into` the spans of memory that an access covers. The access has at least one
    /// byte.
    ///
    /// # Errors
    /// - OutOfBounds: a byte lies outside the region.
    /// - BadAddress: with MMU_NOTIFY, the application has not refreshed the page of a byte
    ///   (`fi_mr_refresh`).
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
            if let Some(announced_pages) = &attr.announced_pages {
                announced_pages.read().check(piece.range.start().0 + skip, len)?;
            }
            into.push(piece.memory.span(piece.at + skip, len));
            Ok(())
        };
        match start {
            AccessStart::Offset(offset) => {
                if offset > attr.len || len > attr.len - offset {
                    return Err(outside());
                }
                for (piece, skip, part) in attr.parts(offset, len) {
                    take(piece, skip, part)?;
                }
            }
            AccessStart::Address(mut address) => {
                let mut left = len;
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

    /// Returns the offset in the region of the byte at `address`.
    ///
    /// The `len` bytes from `address` must all lie in the region. They may lie in several pieces if
    /// these follow each other both in the region and in their addresses. Otherwise returns `None`.
    /// `len` is at least 1.
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
    /// Returns the error for a peer's key that cannot be used: InvalidKey for
    /// [`Refusal::NoRegion`] and [`Refusal::Revoked`], and BadState if the region is disabled or
    /// being refreshed or revoked.
    pub(super) fn of_key(self) -> Error {
        match self {
            Self::NoRegion => {
                Error::new(ErrorKind::InvalidKey, "transfer").provider("loopback").remedy(
                    "ask the peer for a new key: its region was closed, or its grant was revoked",
                )
            }
            Self::Revoked => revoked(ErrorKind::InvalidKey, "transfer")
                .provider("loopback")
                .remedy("ask the peer to register its memory again, and for the new key"),
            _ => self.unusable("the peer's region"),
        }
    }

    /// Returns the error for a local descriptor that cannot be used: NoRegion for
    /// [`Refusal::NoRegion`] and [`Refusal::Revoked`], and BadState if the region is disabled or
    /// being refreshed or revoked.
    pub(super) fn of_descriptor(self) -> Error {
        match self {
            Self::NoRegion => Error::new(ErrorKind::NoRegion, "transfer")
                .provider("loopback")
                .remedy("keep the region of a descriptor open until the transfer completes"),
            Self::Revoked => revoked(ErrorKind::NoRegion, "transfer").provider("loopback"),
            _ => self.unusable("the local region"),
        }
    }

    fn unusable(self, region: &'static str) -> Error {
        let why = match self {
            Self::Disabled => "not enabled",
            Self::Refreshing => "being refreshed or revoked",
            Self::NoRegion => "closed",
            Self::Revoked => "revoked",
        };
        Error::new(ErrorKind::BadState, "transfer")
            .provider("loopback")
            .context("region", region)
            .context("why", why)
    }
}

/// The name of the local side of a transfer, as the argument `side` of [`denied`].
pub(super) const LOCAL_SIDE: &str = "local side";

/// Returns the error for a region or window that grants no right in `any_of`. `side` is
/// [`LOCAL_SIDE`], or the means by which the peer granted access: "key" or "window".
pub(super) fn denied(side: &'static str, any_of: Access) -> Error {
    let rights: Vec<_> = any_of.iter_names().map(|(name, _)| name).collect();
    let rights = rights.join(" or ");
    let remedy = match side {
        LOCAL_SIDE => format!("register the local memory with the right {rights}"),
        _ => format!("ask the peer for a {side} that grants {rights}"),
    };
    Error::new(ErrorKind::AccessDenied, "transfer")
        .provider("loopback")
        .context("side", side)
        .context("needs", any_of)
        .remedy(remedy)
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
        .remedy("access only bytes of the region that the key names")
}
