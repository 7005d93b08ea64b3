//! Registration: creates a live region from ranges and their backing.

use std::{
    fmt,
    sync::{Arc, Weak},
};

use hmem_core::{
    Access, AddressRange, Error, ErrorKind, LocalKey, MrFlags, MrMode, Result,
    iface::DmaBufImporter,
    provider::{Backing, KeyRequest, Piece, ProviderRegion, Registration, RevocationListeners},
};
use parking_lot::RwLock;

use super::{
    Few, NicCall,
    domain::DomainState,
    keys::Token,
    memory::{self, AnnouncedPages, DeviceMemory, PieceMemory, Pinned},
    nic::Reservation,
    region::{Region, RegionAttr, RegionPiece, SharedRegion},
    regions::Pages,
    window::EndpointLife,
};

impl DomainState {
    pub(super) fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        self.check_nic("register")?;
        let limit = self.nic.attr.mr_iov_limit;
        // A range of the request may consist of several pieces.
        if pieces.len() > limit {
            return Err(Error::new(ErrorKind::InvalidArgument, "register")
                .provider("loopback")
                .context("limit", "mr_iov_limit")
                .context("value", limit)
                .context("requested", pieces.len())
                .remedy("split the region"));
        }
        let len = pieces.iter().map(|piece| piece.range.len()).sum();
        let reservation = self.nic.reserve(len)?;
        let region = self.prepare(request, pieces, len)?;
        self.attach(&region, pieces)?;
        self.nic.config.faults.enter(NicCall::Register)?;
        self.insert(request.key, Pages::Own(len), region, reservation)
    }

    /// Attaches a new region to the dma-bufs of its pieces that their exporters can revoke.
    ///
    /// # Errors
    /// Unavailable: a dma-buf is revoked.
    fn attach(&self, region: &SharedRegion, pieces: &[Piece<'_>]) -> Result<()> {
        for piece in pieces {
            let Backing::DmaBuf { revocation: Some(revocation), .. } = &piece.backing else {
                continue;
            };
            let (of, listeners) = (Arc::downgrade(region), Arc::clone(&self.listeners));
            let attachment: Arc<dyn DmaBufImporter> =
                Arc::new(Attachment { region: of, range: piece.range, listeners });
            region.write().keep(Arc::clone(&attachment));
            let attached = revocation.attach(Arc::downgrade(&attachment));
            attached.map_err(|error| error.provider("loopback").context("range", piece.range))?;
        }
        Ok(())
    }

    /// Imports the memory of a new region. With MMU_NOTIFY, also finds the pages that the NIC may
    /// access at first: all memory that the region owns and, of other memory, the pages that are
    /// present now.
    fn prepare(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        len: u64,
    ) -> Result<SharedRegion> {
        let is_borrowed =
            |piece: &&Piece<'_>| matches!(piece.backing, Backing::Host { owned: false });
        let mut imported = Few::new();
        for piece in pieces {
            imported.push(self.import(request, piece)?);
        }
        let notified = self.mode.contains(MrMode::MMU_NOTIFY)
            && pieces.iter().any(|piece| is_borrowed(&piece));
        let announced_pages = notified.then(|| {
            let mut announced_pages =
                AnnouncedPages::present(pieces.iter().filter(is_borrowed).map(|piece| piece.range));
            for piece in pieces.iter().filter(|piece| !is_borrowed(piece)) {
                let start = piece.range.start().0;
                announced_pages.add(start, start.saturating_add(piece.range.len()));
            }
            Arc::new(RwLock::new(announced_pages))
        });
        self.new_region(request, imported, len, announced_pages, false)
    }

    /// Creates a region from its pieces and the properties in `request`. The region is persistent
    /// if `persistent` is true or the request has RMA_PMEM.
    ///
    /// # Errors
    /// BadFlags: the region is persistent and has memory of a device, and transfers may not call
    /// drivers. A driver would have to flush the device after each write.
    fn new_region(
        &self,
        request: &Registration<'_>,
        pieces: Few<RegionPiece>,
        len: u64,
        announced_pages: Option<Arc<RwLock<AnnouncedPages>>>,
        persistent: bool,
    ) -> Result<SharedRegion> {
        let persistent = persistent || request.flags.contains(MrFlags::RMA_PMEM);
        let flushes = persistent && pieces.iter().any(|piece| !piece.memory.is_host());
        if flushes && !request.driver_calls_in_transfers {
            let why = "flushes the device after each write";
            return Err(needs_driver_calls(ErrorKind::BadFlags, why)
                .context("flags", MrFlags::RMA_PMEM)
                .remedy("clear RMA_PMEM, or set DomainAttr::driver_calls_in_transfers"));
        }
        Ok(Region::shared(RegionAttr {
            len,
            access: request.access,
            addressing: request.addressing,
            pieces,
            auth_key: (*request.auth_key != self.auth_key).then(|| request.auth_key.clone()),
            announced_pages,
            persistent,
            single_use: request.flags.contains(MrFlags::MR_SINGLE_USE),
            enabled: request.enabled,
        }))
    }

    fn import(&self, request: &Registration<'_>, piece: &Piece<'_>) -> Result<RegionPiece> {
        if !request.driver_calls_in_transfers && matches!(piece.backing, Backing::PeerMemory { .. })
        {
            return Err(needs_driver_calls(
                ErrorKind::BadState,
                "copies this memory by its driver",
            )
            .context("range", piece.range)
            .remedy("use a dma-buf, or set DomainAttr::driver_calls_in_transfers"));
        }
        let start = piece.range.start().0;
        let (memory, at) = match &piece.backing {
            Backing::Host { owned: true } => (PieceMemory::Owned, start),
            Backing::Host { owned: false } => (self.import_borrowed(request, piece.range)?, start),
            Backing::DmaBuf { fd, offset, .. } => {
                memory::import_fd(*fd, offset.0, piece.range.len(), request.access.nic_writes())?
            }
            Backing::PeerMemory { iface, address } => {
                let memory = DeviceMemory::new(Arc::clone(iface));
                (PieceMemory::Indirect(Arc::new(memory)), address.0)
            }
            Backing::Staged { iface } => {
                self.staging_pool()?;
                (PieceMemory::Indirect(memory::staged(iface, piece.range)), 0)
            }
        };
        Ok(RegionPiece { range: piece.range, memory, at })
    }

    /// Imports host memory that the region does not own:
    ///
    /// - With [`RemapPolicy::Pinned`](super::RemapPolicy), pins all pages of the range. With
    ///   MMU_NOTIFY, pins only the present pages, because the application announces the others
    ///   later.
    /// - Otherwise pins nothing. In ALLOCATED mode, populates the pages of the range.
    ///
    /// # Errors
    /// BadAddress: a page is not mapped, or does not permit the accesses of the region's rights.
    fn import_borrowed(
        &self,
        request: &Registration<'_>,
        range: AddressRange,
    ) -> Result<PieceMemory> {
        let Some(pinner) = &self.pinner else {
            if self.mode.contains(MrMode::ALLOCATED) {
                memory::populate(range, request.access.nic_writes(), "register")?;
            }
            return Ok(PieceMemory::Borrowed);
        };
        let runs = if self.mode.contains(MrMode::MMU_NOTIFY) {
            let mut runs = Vec::new();
            for present in AnnouncedPages::present(std::iter::once(range)).ranges() {
                runs.extend(pinner.pin(present, "register")?);
            }
            runs
        } else {
            pinner.pin(range, "register")?
        };
        Ok(PieceMemory::Pinned(Arc::new(Pinned::new(runs))))
    }

    /// Adds a region to the table. The domain's mode decides whether the application or the NIC
    /// chooses the key. A key of 4 bytes that the NIC chooses is the region's index in the table
    /// with a tag.
    ///
    /// On success, `reservation` stays in force: the region counts toward the limits of the NIC
    /// until its deregistration.
    ///
    /// # Errors
    /// - NoKey: a region of the domain has the requested key, or a window of the domain has keys
    ///   that differ from the requested key only in their 8-bit tag.
    /// - KeyRejected: the requested key is longer than the NIC's keys.
    /// - OutOfResources: the table is full.
    fn insert(
        &self,
        key: KeyRequest,
        pages: Pages,
        region: SharedRegion,
        reservation: Reservation<'_>,
    ) -> Result<ProviderRegion> {
        let key = match key {
            KeyRequest::Application(number) if self.requested_keys() => {
                if self.windows.has_key(number) {
                    return Err(window_has_key(number));
                }
                if self.keys.narrow() && number > u64::from(u32::MAX) {
                    return Err(too_wide(number));
                }
                Some(number)
            }
            _ if self.keys.narrow() && !self.requested_keys() => None,
            _ => Some(self.unused_key()),
        };
        let (token, key) = self.nic.regions.insert(self.id, key, pages, region)?;
        reservation.keep();
        let token = token.to_u64();
        Ok(ProviderRegion { token, local: LocalKey::from_provider(token), key })
    }

    /// Returns a random key that no region or window of the domain has.
    fn unused_key(&self) -> u64 {
        loop {
            let number = self.keys.draw();
            let has_region = self.nic.regions.has_key(self.id, number..=number);
            if !has_region && !self.windows.has_key(number) {
                return number;
            }
        }
    }

    /// Registers a part of the region `base` with a key of its own.
    ///
    /// The call is safe. The caller of `register` promised that the memory of `base` stays valid
    /// and may be accessed with the rights of `base`. This call refuses requests that the promise
    /// does not cover: bytes outside `base`, and a right to write if `base` has none.
    pub(super) fn register_sub(
        &self,
        base: Token,
        request: &Registration<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion> {
        self.check_nic("register sub-region")?;
        self.nic.config.faults.enter(NicCall::RegisterSub)?;
        let regions = &self.nic.regions;
        regions.add_dependent(self.id, base, "register sub-region")?;
        let part = |parent: &Region| {
            let parent = &parent.attr;
            check_part(parent, request.access, offset, len)?;
            let announced = parent.announced_pages.clone();
            let pieces = parent.sub_pieces(offset, len);
            self.new_region(request, pieces, len, announced, parent.persistent)
        };
        let registered =
            regions.inspect(self.id, base, "register sub-region", part).and_then(|region| {
                let reservation = self.nic.reserve(0)?;
                self.insert(request.key, Pages::Parent(base), region, reservation)
            });
        if registered.is_err() {
            regions.remove_dependent(self.id, base);
        }
        registered
    }

    pub(super) fn bind_endpoint(&self, token: Token, endpoint: &EndpointLife) -> Result<()> {
        let refuse = |why: &'static str| {
            Err(Error::new(ErrorKind::BadState, "bind endpoint").provider("loopback").remedy(why))
        };
        if endpoint.is_closed() {
            return refuse("the endpoint is closed: bind an open one");
        }
        self.nic.regions.inspect(self.id, token, "bind endpoint", |region| {
            if region.bind_endpoint(endpoint.id) {
                Ok(())
            } else {
                refuse("the region is bound to an endpoint already: bind a region once")
            }
        })
    }

    pub(super) fn refresh(&self, token: Token, ranges: &[AddressRange]) -> Result<()> {
        let region = self.nic.regions.refresh(self.id, token)?;
        self.nic.config.faults.enter(NicCall::Refresh)?;
        let write = region.attr.access.nic_writes();
        let mut done = Vec::new();
        for (piece, pinned) in region.borrowed() {
            let named: Vec<_> = if ranges.is_empty() {
                vec![piece]
            } else {
                ranges.iter().filter_map(|range| piece.intersection(*range)).collect()
            };
            for range in named {
                let pages = range.page_aligned(rustix::param::page_size() as u64);
                let runs = match (&self.pinner, pinned) {
                    (Some(pinner), Some(_)) => pinner.pin(pages, "refresh")?,
                    _ => {
                        memory::populate(range, write, "refresh")?;
                        Vec::new()
                    }
                };
                done.push((pages, pinned, runs));
            }
        }
        // All pages are present, so no later step of the refresh can fail.
        for (pages, pinned, runs) in done {
            if let Some(pinned) = pinned {
                pinned.replace(runs);
            }
            if let Some(announced_pages) = &region.attr.announced_pages {
                announced_pages
                    .write()
                    .add(pages.start().0, pages.start().0.saturating_add(pages.len()));
            }
        }
        Ok(())
    }
}

/// The attachment of a region to the dma-buf of a piece, which the region keeps.
struct Attachment {
    region: Weak<RwLock<Region>>,
    /// The range of the piece.
    range: AddressRange,
    listeners: Arc<RevocationListeners>,
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment").field("range", &self.range).finish_non_exhaustive()
    }
}

impl DmaBufImporter for Attachment {
    /// Waits for the transfers that use the region, and then drops its memory.
    fn revoke(&self) {
        let Some(region) = self.region.upgrade() else { return };
        region.write().revoke();
        tracing::warn!(range = %self.range, "the exporter of a registered dma-buf revoked it");
        self.listeners.notify(&[self.range]);
    }
}

/// Checks that a sub-region has at least one byte and lies in its base. Also checks that its rights
/// let the NIC write only if those of the base do.
fn check_part(base: &RegionAttr, access: Access, offset: u64, len: u64) -> Result<()> {
    let refuse = |kind| Error::new(kind, "register sub-region").provider("loopback");
    if len == 0 {
        return Err(refuse(ErrorKind::ZeroLength).remedy("register at least one byte"));
    }
    if offset > base.len || len > base.len - offset {
        return Err(refuse(ErrorKind::OutOfBounds)
            .context("offset", offset)
            .context("length", len)
            .context("base", base.len)
            .remedy("register a range inside the base"));
    }
    if access.nic_writes() && !base.access.nic_writes() {
        return Err(refuse(ErrorKind::AccessDenied)
            .context("access", access)
            .context("base_access", base.access)
            .remedy("register the base with a right to write, for example RECV or REMOTE_WRITE"));
    }
    Ok(())
}

fn needs_driver_calls(kind: ErrorKind, why: &'static str) -> Error {
    Error::new(kind, "register")
        .provider("loopback")
        .context("why", format_args!("transfers may not call drivers, and the NIC {why}"))
}

fn window_has_key(key: u64) -> Error {
    Error::new(ErrorKind::NoKey, "register")
        .provider("loopback")
        .context("key", format_args!("{key:#x}"))
        .remedy("request another key: a window has this one")
}

fn too_wide(key: u64) -> Error {
    Error::new(ErrorKind::KeyRejected, "register")
        .provider("loopback")
        .context("key", format_args!("{key:#x}"))
        .context("key_size", 4)
        .remedy("request a key that fits the NIC's key size")
}
