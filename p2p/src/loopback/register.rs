//! Registration: from a range and a way to reach it to a live entry in the table.

use std::sync::{Arc, OnceLock};

use hmem_core::{
    AddressRange, Error, ErrorKind, LocalKey, MrFlags, MrMode, Result,
    counter::Counter,
    provider::{Backing, KeyRequest, Piece, ProviderRegion, RegistrationRequest},
};
use parking_lot::RwLock;

use super::{
    Call, Memory,
    domain::DomainState,
    endpoint::EndpointState,
    keys::{self, Token},
    memory::{self, PieceMemory, Promises},
    region::{Body, Extended, Kind, RegionPiece},
    table::{Birth, NewKey},
};

impl DomainState {
    pub(super) fn register(
        &self,
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let len = self.check_size(pieces)?;
        self.nic.reserve(len)?;
        let registered = self.prepare(request, pieces, len).and_then(|body| {
            self.nic.config.faults.enter(Call::Register)?;
            self.insert(request, body, true)
        });
        if registered.is_err() {
            self.nic.release(len);
        }
        registered
    }

    fn check_size(&self, pieces: &[Piece<'_>]) -> Result<u64> {
        let attr = &self.nic.attr;
        if let [piece] = pieces
            && piece.range.len() <= attr.max_mr_size
        {
            return Ok(piece.range.len());
        }
        let refuse = |limit: &'static str, value: u64, asked: u64| {
            Error::new(ErrorKind::InvalidArgument, "register")
                .provider("loopback")
                .context("limit", limit)
                .context("value", value)
                .context("asked for", asked)
                .remedy("split the region")
        };
        if pieces.is_empty() || pieces.len() > attr.mr_iov_limit {
            return Err(refuse("mr_iov_limit", attr.mr_iov_limit as u64, pieces.len() as u64));
        }
        let len = pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.range.len()));
        match len {
            Some(len) if len <= attr.max_mr_size => Ok(len),
            _ => Err(refuse("max_mr_size", attr.max_mr_size, len.unwrap_or(u64::MAX))),
        }
    }

    /// The body of a region, its memory imported, pinned or checked as the mode demands.
    #[inline]
    fn prepare(&self, request: &RegistrationRequest<'_>, pieces: &[Piece<'_>], len: u64) -> Result<Body> {
        let mut body = Body {
            key: 0,
            base: 0,
            len,
            extended: OnceLock::new(),
            access: request.access.bits() as u16,
            kind: Kind::Pieces,
            addressing: request.addressing,
        };
        let pinned = self.nic.config.memory == Memory::Pinned;
        if let [Piece { range, backing: Backing::Host { owned } }] = pieces
            && (*owned || !pinned)
        {
            if !owned {
                self.check_pages(request, *range)?;
            }
            body.base = range.start().0;
            body.kind = if *owned { Kind::Owned } else { Kind::Borrowed };
        }
        let plain = body.kind != Kind::Pieces
            && !request.flags.contains(MrFlags::RMA_PMEM)
            && !self.mode.contains(MrMode::MMU_NOTIFY)
            && *request.auth_key == self.auth_key;
        if plain { Ok(body) } else { self.prepare_extended(request, pieces, body) }
    }

    fn prepare_extended(
        &self,
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
        body: Body,
    ) -> Result<Body> {
        let mut extended = Extended {
            auth_key: (*request.auth_key != self.auth_key).then(|| request.auth_key.clone()),
            persistent: request.flags.contains(MrFlags::RMA_PMEM),
            ..Extended::default()
        };
        if body.kind == Kind::Pieces {
            extended.pieces =
                pieces.iter().map(|piece| self.import(request, piece)).collect::<Result<_>>()?;
        }
        let borrowed = || {
            pieces
                .iter()
                .filter(|piece| matches!(piece.backing, Backing::Host { owned: false }))
                .map(|p| p.range)
        };
        if self.mode.contains(MrMode::MMU_NOTIFY) && borrowed().next().is_some() {
            let mut promises = Promises::present(borrowed());
            for piece in pieces {
                if !matches!(piece.backing, Backing::Host { owned: false }) {
                    promises
                        .add(piece.range.start().0, piece.range.start().0.saturating_add(piece.range.len()));
                }
            }
            extended.promises = Some(Arc::new(RwLock::new(promises)));
        }
        body.extended.get_or_init(|| Box::new(extended));
        Ok(body)
    }

    /// Checks that pages back borrowed memory, where they must.
    #[inline]
    fn check_pages(&self, request: &RegistrationRequest<'_>, range: AddressRange) -> Result<()> {
        if self.mode.contains(MrMode::ALLOCATED) {
            memory::populate(range, request.access.nic_writes(), "register")
        } else {
            Ok(())
        }
    }

    fn import(&self, request: &RegistrationRequest<'_>, piece: &Piece<'_>) -> Result<RegionPiece> {
        let at = piece.range.start().0;
        let (memory, at) = match &piece.backing {
            Backing::Host { owned: true } => (PieceMemory::Owned, at),
            Backing::Host { owned: false } => {
                self.check_pages(request, piece.range)?;
                (PieceMemory::Borrowed, at)
            }
            Backing::DmaBuf { .. } | Backing::PeerMemory { .. } | Backing::Staged(_) => {
                return Err(Error::new(ErrorKind::Unsupported, "register").provider("loopback"));
            }
        };
        Ok(RegionPiece { range: piece.range, memory, at })
    }

    /// Puts a region into the table under the key that the mode asks for.
    #[inline]
    fn insert(&self, request: &RegistrationRequest<'_>, body: Body, pages: bool) -> Result<ProviderRegion> {
        let birth = Birth {
            enabled: request.enabled,
            single_use: request.flags.contains(MrFlags::MR_SINGLE_USE),
            pages,
        };
        let table = &self.nic.table;
        let (token, key) = if !self.requested_keys() {
            table.insert(self.slot, &NewKey::Sealed(&self.keys), body, birth)?
        } else {
            let number = match request.key {
                KeyRequest::Application(number) => number,
                KeyRequest::Provider => self.unused_key()?,
            };
            if self.is_window_key(number) {
                return Err(Error::new(ErrorKind::NoKey, "register")
                    .provider("loopback")
                    .context("key", format_args!("{number:#x}"))
                    .remedy("a window has this key: request another"));
            }
            if self.keys.narrow() && number > u64::from(u32::MAX) {
                return Err(Error::new(ErrorKind::KeyRejected, "register")
                    .provider("loopback")
                    .context("key", format_args!("{number:#x}"))
                    .context("key_size", 4)
                    .remedy("request a key that fits the NIC's key size"));
            }
            table.insert(self.slot, &NewKey::Requested(number), body, birth)?
        };
        Ok(ProviderRegion { token: token.to_u64(), local: LocalKey::from_provider(token.to_u64()), key })
    }

    /// A random key that is not in use.
    fn unused_key(&self) -> Result<u64> {
        loop {
            let random = keys::random()?;
            let number = if self.keys.narrow() { random & u64::from(u32::MAX) } else { random };
            if !self.nic.table.is_requested(self.slot.id, number) {
                return Ok(number);
            }
        }
    }

    pub(super) fn register_sub(
        &self,
        base: Token,
        request: &RegistrationRequest<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        self.nic.config.faults.enter(Call::RegisterSub)?;
        let table = &self.nic.table;
        table.add_dependent(self.slot.id, base, "register sub-region")?;
        let registered = table
            .inspect(self.slot.id, base, "register sub-region", |parent| {
                if offset > parent.len || len > parent.len - offset {
                    return Err(Error::new(ErrorKind::OutOfBounds, "register sub-region")
                        .provider("loopback")
                        .context("offset", offset)
                        .context("length", len)
                        .context("base", parent.len)
                        .remedy("a sub-region lies inside its base"));
                }
                let extended = Extended {
                    pieces: parent.part(offset, len),
                    auth_key: (*request.auth_key != self.auth_key).then(|| request.auth_key.clone()),
                    promises: parent.extended().and_then(|extended| extended.promises.clone()),
                    parent: Some(base),
                    persistent: request.flags.contains(MrFlags::RMA_PMEM)
                        || parent.extended().is_some_and(|extended| extended.persistent),
                    ..Extended::default()
                };
                Ok(Body {
                    key: 0,
                    base: parent.base.wrapping_add(offset),
                    len,
                    extended: OnceLock::from(Box::new(extended)),
                    access: request.access.bits() as u16,
                    kind: parent.kind,
                    addressing: request.addressing,
                })
            })
            .and_then(|body| body)
            .and_then(|body| {
                self.nic.reserve(0)?;
                self.insert(request, body, false).inspect_err(|_| self.nic.release(0))
            });
        if registered.is_err() {
            table.remove_dependent(base);
        }
        registered
    }

    pub(super) fn deregister(&self, token: Token) -> Result<()> {
        let removed =
            self.nic.table.remove(self.slot, token, self.requested_keys(), |body| !body.is_sub())?;
        self.nic.release(removed.bytes);
        if let Some(extended) = removed.extended {
            if let Some(parent) = extended.parent {
                self.nic.table.remove_dependent(parent);
            }
            if let Some(endpoint) = extended.endpoint.read().as_ref().and_then(std::sync::Weak::upgrade) {
                endpoint.unbind();
            }
        }
        Ok(())
    }

    /// Deregisters what a dropped domain left, parts before what they are part of.
    pub(super) fn remove_all(&self, mut tokens: Vec<Token>) {
        while !tokens.is_empty() {
            let before = tokens.len();
            tokens.retain(|token| self.deregister(*token).is_err());
            if tokens.len() == before {
                tracing::error!(regions = before, "regions with windows outlive their loopback domain");
                return;
            }
        }
    }

    pub(super) fn bind_counter(&self, token: Token, counter: &Arc<Counter>) -> Result<()> {
        if !self.nic.attr.region_counters {
            return Err(Error::new(ErrorKind::NoSys, "bind counter")
                .provider("loopback")
                .remedy("this NIC counts no accesses of regions"));
        }
        self.nic.table.inspect(self.slot.id, token, "bind counter", |body| {
            body.extend().counters.write().push(Arc::clone(counter));
        })
    }

    pub(super) fn bind_endpoint(&self, token: Token, endpoint: &Arc<EndpointState>) -> Result<()> {
        endpoint.bind()?;
        let bound = self
            .nic
            .table
            .inspect(self.slot.id, token, "bind endpoint", |body| {
                let mut bound = body.extend().endpoint.write();
                if bound.is_some() {
                    return Err(Error::new(ErrorKind::BadState, "bind endpoint")
                        .provider("loopback")
                        .remedy("a region is bound to one endpoint, once"));
                }
                *bound = Some(Arc::downgrade(endpoint));
                Ok(())
            })
            .and_then(|bound| bound);
        if bound.is_err() {
            endpoint.unbind();
        }
        bound
    }

    pub(super) fn refresh(&self, token: Token, ranges: &[AddressRange]) -> Result<()> {
        let refreshing = self.nic.table.refresh(self.slot.id, token)?;
        self.nic.config.faults.enter(Call::Refresh)?;
        let write = refreshing.access().nic_writes();
        let mut named = refreshing.borrowed_ranges();
        if !ranges.is_empty() {
            let parts =
                named.iter().flat_map(|piece| ranges.iter().filter_map(|range| common(*piece, *range)));
            named = parts.collect();
        }
        for range in &named {
            memory::populate(*range, write, "refresh")?;
        }
        if let Some(promises) = refreshing.extended().and_then(|extended| extended.promises.as_ref()) {
            let page = rustix::param::page_size() as u64;
            let mut promises = promises.write();
            for range in &named {
                let pages = range.page_aligned(page);
                promises.add(pages.start().0, pages.start().0.saturating_add(pages.len()));
            }
        }
        Ok(())
    }
}

/// The addresses that two ranges share.
fn common(a: AddressRange, b: AddressRange) -> Option<AddressRange> {
    let start = a.start().max(b.start());
    let last = |range: AddressRange| range.start().0 + (range.len() - 1);
    if !a.overlaps(b) {
        return None;
    }
    let end = last(a).min(last(b));
    AddressRange::new(start, end - start.0 + 1).ok()
}
