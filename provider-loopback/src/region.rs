//! What the table says about a region, and which bytes an access to it means.

use std::sync::{Arc, OnceLock, Weak};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, Error, ErrorKind, IfaceExt, Registry,
    Result, counter::Counter,
};
use parking_lot::RwLock;

use super::{
    Few,
    endpoint::EndpointState,
    keys::Token,
    memory::{PieceMemory, Pinned, Promises, Span},
};

/// A region: the common case in place, everything rarer behind [`Body::extended`].
#[derive(Debug)]
pub(super) struct Body {
    pub(super) key: u64,
    /// The first address of a region of one piece of host memory.
    pub(super) base: u64,
    /// Bytes in all.
    pub(super) len: u64,
    pub(super) extended: OnceLock<Box<Extended>>,
    /// [`Access`]; all its bits fit.
    pub(super) access: u32,
    pub(super) kind: Kind,
    pub(super) addressing: Addressing,
}

/// What a body is made of, before it has a key.
#[derive(Debug)]
pub(super) struct NewBody {
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) extended: Option<Box<Extended>>,
    pub(super) access: Access,
    pub(super) kind: Kind,
    pub(super) addressing: Addressing,
}

impl NewBody {
    /// Fills a body that has no extended part.
    #[inline]
    pub(super) fn write(self, body: &mut Body, key: u64) {
        body.key = key;
        body.base = self.base;
        body.len = self.len;
        body.access = self.access.bits() as u32;
        body.kind = self.kind;
        body.addressing = self.addressing;
        if let Some(extended) = self.extended {
            body.extended.get_or_init(|| extended);
        }
    }
}

/// Where a region's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// One piece of host memory that the region owns.
    Owned,
    /// One piece of host memory that may go away.
    Borrowed,
    /// [`Extended::pieces`].
    Pieces,
}

/// What few regions have.
#[derive(Debug, Default)]
pub(super) struct Extended {
    /// In zero-based order; empty where the body says it all.
    pub(super) pieces: Vec<RegionPiece>,
    /// The authorization key, if it is not the domain's.
    pub(super) auth_key: Option<AuthKey>,
    pub(super) counters: RwLock<Vec<Arc<Counter>>>,
    /// The only endpoint through which the region can be reached. The endpoint's address is not
    /// reused while this reference exists, so that no later endpoint is taken for a closed one.
    pub(super) endpoint: RwLock<Option<Weak<EndpointState>>>,
    /// The pages that may be touched, where the application says so (MMU_NOTIFY).
    pub(super) promises: Option<Arc<RwLock<Promises>>>,
    /// The region of which this is a part.
    pub(super) parent: Option<Token>,
    /// RMA_PMEM: the NIC makes peers' writes persistent before they complete.
    pub(super) persistent: bool,
}

impl Extended {
    /// Whether it says nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
            && self.auth_key.is_none()
            && self.promises.is_none()
            && self.parent.is_none()
            && !self.persistent
    }
}

/// A piece of a region, or a part of a piece for a sub-region.
#[derive(Clone, Debug)]
pub(super) struct RegionPiece {
    /// The application's addresses.
    pub(super) range: AddressRange,
    pub(super) memory: PieceMemory,
    /// Where the piece starts in `memory`.
    pub(super) at: u64,
}

/// Host memory of a region that does not own it.
#[derive(Debug)]
pub(super) struct Borrowed<'a> {
    pub(super) range: AddressRange,
    /// Its pinned pages, where it has some.
    pub(super) pinned: Option<&'a Arc<Pinned>>,
}

/// How an access says where it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Bytes from the start of the region.
    Offset(u64),
    /// An address of the application.
    Address(u64),
}

const _: () = assert!(Access::all().bits() <= u32::MAX as u64, "every right fits a body");

impl Body {
    pub(super) fn empty() -> Self {
        Self {
            key: 0,
            base: 0,
            len: 0,
            extended: OnceLock::new(),
            access: 0,
            kind: Kind::Borrowed,
            addressing: Addressing::ZeroBased,
        }
    }

    #[inline]
    pub(super) fn extended(&self) -> Option<&Extended> {
        self.extended.get().map(|extended| &**extended)
    }

    /// The extended part, made if there is none.
    pub(super) fn extend(&self) -> &Extended {
        self.extended.get_or_init(Box::default)
    }

    /// Whether it is a part of another region.
    #[inline]
    pub(super) fn is_sub(&self) -> bool {
        self.extended().is_some_and(|extended| extended.parent.is_some())
    }

    #[inline]
    pub(super) fn access(&self) -> Access {
        Access::from_bits_retain(u64::from(self.access))
    }

    /// The host memory that the region does not own: its pages may change.
    pub(super) fn borrowed(&self) -> Vec<Borrowed<'_>> {
        match self.kind {
            Kind::Owned => Vec::new(),
            Kind::Borrowed => {
                let range = AddressRange::new(Address(self.base), self.len)
                    .expect("a body of one piece has the range of that piece, or a part of it");
                vec![Borrowed { range, pinned: None }]
            }
            Kind::Pieces => self
                .pieces()
                .iter()
                .filter_map(|piece| match &piece.memory {
                    PieceMemory::Borrowed => Some(Borrowed { range: piece.range, pinned: None }),
                    PieceMemory::Pinned(pinned) => {
                        Some(Borrowed { range: piece.range, pinned: Some(pinned) })
                    }
                    PieceMemory::Owned | PieceMemory::Mapped(_) | PieceMemory::Far(_) => None,
                })
                .collect(),
        }
    }

    /// Returns whether the NIC makes peers' writes persistent before they complete.
    #[inline]
    pub(super) fn is_persistent(&self) -> bool {
        self.extended().is_some_and(|extended| extended.persistent)
    }

    /// Makes bytes of the region that were just written persistent, and flushes each device whose
    /// memory is in the region.
    #[cold]
    pub(super) fn persist(&self, spans: &[Span<'_>], registry: &Registry) -> Result<()> {
        for span in spans {
            span.persist()?;
        }
        for piece in self.pieces() {
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

    fn pieces(&self) -> &[RegionPiece] {
        self.extended().map_or(&[], |extended| &extended.pieces)
    }

    /// Where an access with a peer's address begins.
    #[inline]
    pub(super) fn place(&self, address: u64) -> Place {
        match self.addressing {
            Addressing::ZeroBased => Place::Offset(address),
            Addressing::Virtual => Place::Address(address),
        }
    }

    /// Where in a region of one piece an access begins.
    #[inline]
    fn offset_of_place(&self, place: Place, len: u64) -> Result<u64> {
        let offset = match place {
            Place::Offset(offset) => offset,
            Place::Address(address) => address.wrapping_sub(self.base),
        };
        if offset > self.len || len > self.len - offset {
            return Err(outside(place, len, self.len));
        }
        Ok(offset)
    }

    /// Finds the bytes of an access of at least one byte; all of it lies inside, or nothing is
    /// found.
    #[inline]
    pub(super) fn spans<'a>(
        &'a self,
        place: Place,
        len: u64,
        into: &mut Few<Span<'a>>,
    ) -> Result<()> {
        if self.kind == Kind::Pieces {
            return self.spans_of_pieces(place, len, into);
        }
        let at = self.base + self.offset_of_place(place, len)?;
        if let Some(promises) = self.extended().and_then(|extended| extended.promises.as_ref()) {
            promises.read().check(at, len)?;
        }
        into.push(match self.kind {
            Kind::Owned => Span::Direct { at, len, mapping: None },
            _ => Span::Kernel { at, len },
        });
        Ok(())
    }

    fn spans_of_pieces<'a>(
        &'a self,
        place: Place,
        len: u64,
        into: &mut Few<Span<'a>>,
    ) -> Result<()> {
        let promises = self.extended().and_then(|extended| extended.promises.as_ref());
        let mut take = |piece: &'a RegionPiece, skip: u64, len: u64| -> Result<()> {
            if let Some(promises) = promises {
                promises.read().check(piece.range.start().0 + skip, len)?;
            }
            piece.memory.span(piece.at + skip, len, into)
        };
        let mut left = len;
        match place {
            Place::Offset(mut skip) => {
                if skip > self.len || len > self.len - skip {
                    return Err(outside(place, len, self.len));
                }
                for piece in self.pieces() {
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
            Place::Address(mut address) => {
                while left > 0 {
                    let piece = self
                        .pieces()
                        .iter()
                        .find(|piece| piece.range.contains(Address(address)))
                        .ok_or_else(|| outside(place, len, self.len))?;
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

    /// The offset of an address in the run of all pieces, if the access stays in one run of
    /// addresses there.
    pub(super) fn offset_of(&self, address: u64, len: u64) -> Option<u64> {
        if self.kind != Kind::Pieces {
            let offset = address.wrapping_sub(self.base);
            return (offset <= self.len && len <= self.len - offset).then_some(offset);
        }
        let mut run = 0;
        for (at, piece) in self.pieces().iter().enumerate() {
            if piece.range.contains(Address(address))
                || (len == 0 && piece.range.start().0 == address)
            {
                let mut reach = piece.range.len() - (address - piece.range.start().0);
                let mut end = piece.range.end();
                for next in &self.pieces()[at + 1..] {
                    if reach >= len || end != Some(next.range.start()) {
                        break;
                    }
                    reach += next.range.len();
                    end = next.range.end();
                }
                return (reach >= len).then_some(run + (address - piece.range.start().0));
            }
            run += piece.range.len();
        }
        None
    }

    /// The parts of the pieces that a sub-region covers.
    pub(super) fn part(&self, offset: u64, len: u64) -> Vec<RegionPiece> {
        let (mut skip, mut left) = (offset, len);
        let mut parts = Vec::new();
        for piece in self.pieces() {
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

#[cold]
fn outside(place: Place, len: u64, region: u64) -> Error {
    let error = Error::new(ErrorKind::OutOfBounds, "transfer").provider("loopback");
    let error = match place {
        Place::Offset(offset) => error.context("offset", offset),
        Place::Address(address) => error.context("address", format_args!("{address:#x}")),
    };
    error
        .context("length", len)
        .context("region", format_args!("{region} bytes"))
        .remedy("every byte of an access lies in the region that its key names")
}
