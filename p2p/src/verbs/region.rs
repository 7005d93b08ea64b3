//! Regions: one or several registrations presented as one.

use std::{
    collections::HashMap,
    ffi::c_int,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, DmaBufOffset, Error, ErrorKind, Iova, LocalKey, RawKey,
    RemoteKey, RemotePiece, Result,
    provider::{Backing, KeyRequest, Piece, ProviderRegion, RegistrationRequest, WindowType},
};
use parking_lot::RwLock;

use super::{
    VerbsOptions,
    access::{access_flags, access_of, check_flags, names},
    device::ProtectionDomain,
    errors::{self, BackingKind, Registration},
    split::{Span, seams},
    sys::{self, AccessFlags, Mr},
};

/// The keys of one registration, as any code that works on the same protection domain can use them (VRB-04).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerbsKey {
    /// The application's addresses.
    pub range: AddressRange,
    /// Where the NIC's addresses of it start, on both sides: the same, or 0 with ZERO_BASED.
    pub base: u64,
    /// For local segments.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// One `ibv_mr`.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) mr: *mut Mr,
    pub(super) key: VerbsKey,
}

// SAFETY: libibverbs objects may be used from any thread; the region that holds the part is the only one to deregister it.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

/// What the CPU may do with a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CpuAccess {
    /// The region owns it: plain loads.
    Owned,
    /// Host pages that may be gone: the kernel's fault-safe copy.
    Guarded,
    /// None.
    None,
}

#[derive(Debug)]
pub(super) struct Region {
    pub(super) access: Access,
    pub(super) flags: AccessFlags,
    pub(super) options: VerbsOptions,
    pub(super) cpu: CpuAccess,
    pub(super) parts: Vec<Part>,
}

/// Local keys from here up name regions whose lkey cannot stand for them: several, or not the application's addresses.
const NAMED: u64 = 1 << 63;

/// The regions of a domain, by local key.
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: RwLock<HashMap<u64, Region>>,
    next: AtomicU64,
}

/// Bytes of the raw key of a region of one registration; each further one adds the same without the header.
pub(super) const RAW_KEY: usize = RAW_HEADER + RAW_PIECE;
const RAW_HEADER: usize = 4;
const RAW_PIECE: usize = 20;
const RAW_MAGIC: [u8; 3] = *b"vk\x01";

fn unknown(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("verbs")
        .remedy("the region is not registered here, or is closed")
}

impl Region {
    fn addressing(&self) -> Addressing {
        if self.flags.contains(AccessFlags::ZERO_BASED) { Addressing::ZeroBased } else { Addressing::Virtual }
    }

    fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.key.range.len()).sum()
    }

    fn pieces(&self) -> impl Iterator<Item = RemotePiece> {
        self.parts.iter().map(|part| RemotePiece {
            base: Iova(part.key.base),
            len: part.key.range.len(),
            key: u64::from(part.key.rkey),
        })
    }

    /// The part that holds `address`.
    pub(super) fn part_at(&self, address: Address) -> Option<&Part> {
        self.parts.iter().find(|part| part.key.range.contains(address))
    }

    /// The part and address at `offset` from the region's start, for `len` bytes that lie in one part.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Option<(&Part, Address)> {
        let mut before = 0;
        for part in &self.parts {
            let size = part.key.range.len();
            if offset >= before && offset - before <= size && len <= size - (offset - before) {
                return Some((part, Address(part.key.range.start().0 + (offset - before))));
            }
            before += size;
        }
        None
    }

    /// Cuts a local segment into runs of one lkey.
    fn spans(&self, mut address: Address, mut left: u64, out: &mut Vec<Span>) -> Option<()> {
        while left > 0 {
            let part = self.part_at(address)?;
            let into = address.0 - part.key.range.start().0;
            let len = left.min(part.key.range.len() - into);
            out.push(Span { address: part.key.base + into, len, lkey: part.key.lkey });
            left -= len;
            address = Address(address.0.wrapping_add(len));
        }
        Some(())
    }
}

impl Regions {
    fn insert(&self, region: Region) -> ProviderRegion {
        let single = region.parts.len() == 1 && region.addressing() == Addressing::Virtual;
        let (lkey, key) = region.parts.first().map_or((0, 0), |part| (part.key.lkey, part.key.rkey));
        let mut map = self.map.write();
        let local = if single && !map.contains_key(&u64::from(lkey)) {
            u64::from(lkey)
        } else {
            NAMED | self.next.fetch_add(1, Ordering::Relaxed)
        };
        map.insert(local, region);
        ProviderRegion { token: local, local: LocalKey::from_provider(local), key: u64::from(key) }
    }

    /// Runs `with` while the region cannot go away.
    pub(super) fn with<T>(
        &self,
        region: ProviderRegion,
        operation: &'static str,
        with: impl FnOnce(&Region) -> Result<T>,
    ) -> Result<T> {
        with(self.map.read().get(&region.token).ok_or_else(|| unknown(operation))?)
    }

    /// Translates a local segment, checked for its right and its bounds before the NIC would end the connection over it.
    pub(super) fn translate(
        &self,
        desc: Option<LocalKey>,
        address: Address,
        len: u64,
        right: Access,
        out: &mut Vec<Span>,
    ) -> Result<CpuAccess> {
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "post")
                .provider("verbs")
                .context("address", address)
                .context("length", len)
                .remedy(why)
        };
        let Some(desc) = desc else {
            if len == 0 {
                return Ok(CpuAccess::Guarded);
            }
            return Err(refuse(
                ErrorKind::NoRegion,
                "give the descriptor of the region that the memory lies in",
            ));
        };
        let map = self.map.read();
        let region = map.get(&desc.to_provider()).ok_or_else(|| {
            refuse(ErrorKind::NoRegion, "the descriptor is of no open region of this domain")
        })?;
        if !region.access.contains(right) {
            return Err(refuse(
                ErrorKind::AccessDenied,
                "register the region with the right that this takes",
            )
            .context("access", region.access)
            .context("needed", right));
        }
        let before = out.len();
        if region.spans(address, len, out).is_none() {
            out.truncate(before);
            return Err(refuse(ErrorKind::OutOfBounds, "the segment reaches outside its region"));
        }
        Ok(region.cpu)
    }

    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let map = self.map.read();
        let parts = map.values().map(|region| region.parts.len() as u64).sum();
        (map.len() as u64, parts, map.values().map(Region::len).sum())
    }

    /// Deregisters; what the driver keeps stays registered, so that the call can be made again.
    pub(super) fn deregister(&self, pd: &ProtectionDomain, handle: ProviderRegion) -> Result<()> {
        let mut region = self.map.write().remove(&handle.token).ok_or_else(|| unknown("deregister"))?;
        while let Some(part) = region.parts.pop() {
            if let Err(error) = release(pd, &part) {
                region.parts.push(part);
                self.map.write().insert(handle.token, region);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Deregisters what is left when its domain goes.
    pub(super) fn clear(&self, pd: &ProtectionDomain) {
        let map = std::mem::take(&mut *self.map.write());
        if !map.is_empty() {
            tracing::warn!(nic = %pd.device.nic(), regions = map.len(), "a domain went with regions open");
        }
        for part in map.into_values().flat_map(|region| region.parts) {
            if let Err(error) = release(pd, &part) {
                tracing::error!(%error, range = %part.key.range, "a region is left to the process's end");
            }
        }
    }

    pub(super) fn keys(&self, region: ProviderRegion) -> Result<Vec<VerbsKey>> {
        self.with(region, "keys", |region| Ok(region.parts.iter().map(|part| part.key).collect()))
    }

    pub(super) fn remote_key(&self, handle: ProviderRegion) -> Option<RemoteKey> {
        let map = self.map.read();
        let region = map.get(&handle.token)?;
        let mut pieces = region.pieces();
        let first = pieces.next()?;
        let rest: Vec<_> = pieces.collect();
        let usual = rest.is_empty() && region.addressing() == Addressing::Virtual && first.key == handle.key;
        (!usual).then(|| RemoteKey::split(region.addressing(), first, rest))
    }

    pub(super) fn raw_key(&self, handle: ProviderRegion) -> Result<RawKey> {
        self.with(handle, "raw key", |region| {
            let mut raw = Vec::with_capacity(RAW_HEADER + RAW_PIECE * region.parts.len());
            raw.extend_from_slice(&RAW_MAGIC);
            raw.push(u8::from(region.addressing() == Addressing::ZeroBased));
            for piece in region.pieces() {
                raw.extend_from_slice(&piece.base.0.to_be_bytes());
                raw.extend_from_slice(&piece.len.to_be_bytes());
                raw.extend_from_slice(&(piece.key as u32).to_be_bytes());
            }
            Ok(RawKey(raw))
        })
    }
}

/// The pieces of a raw key.
pub(super) fn read_raw(raw: &RawKey) -> Result<Vec<RemotePiece>> {
    let malformed = || {
        Error::new(ErrorKind::Malformed, "map raw key")
            .provider("verbs")
            .context("bytes", raw.0.len())
            .remedy("pass on the bytes of raw_attr unchanged and whole")
    };
    let body = raw.0.strip_prefix(&RAW_MAGIC).ok_or_else(malformed)?;
    let Some((0 | 1, body)) = body.split_first().map(|(zero, body)| (*zero, body)) else {
        return Err(malformed());
    };
    let (pieces, rest) = body.as_chunks::<RAW_PIECE>();
    if pieces.is_empty() || !rest.is_empty() {
        return Err(malformed());
    }
    let read = |piece: &[u8; RAW_PIECE]| {
        let number =
            |from: usize| piece[from..].first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        let key = piece.last_chunk::<4>().map_or(0, |bytes| u32::from_be_bytes(*bytes));
        RemotePiece { base: Iova(number(0)), len: number(8), key: u64::from(key) }
    };
    Ok(pieces.iter().map(read).collect())
}

fn release(pd: &ProtectionDomain, part: &Part) -> Result<()> {
    let deregister = pd.device.library().functions.dereg_mr;
    // SAFETY: the part was registered in this domain and was taken out of its map, so that nobody else has it.
    errors::status(unsafe { deregister(part.mr) }).map_err(|errno| {
        let error = Error::os(errno, "ibv_dereg_mr")
            .provider(pd.device.nic().to_string())
            .context("range", part.key.range);
        // rxe answers EINVAL where the manual says EBUSY.
        error.remedy("if a memory window is bound to the region, free or unbind it first")
    })
}

/// How one domain registers: where, and with what limits.
#[derive(Debug)]
pub(super) struct Registrar<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) regions: &'a Regions,
    pub(super) max: u64,
}

impl Registrar<'_> {
    fn refuse(&self, kind: ErrorKind, operation: &'static str, why: impl Into<String>) -> Error {
        Error::new(kind, operation).provider(self.pd.device.nic().to_string()).remedy(why.into())
    }

    /// Registers in fi words.
    pub(super) fn register(
        &self,
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
    ) -> Result<ProviderRegion> {
        let refuse = |kind, why: &'static str| Err(self.refuse(kind, "register", why));
        if let KeyRequest::Application(_) = request.key {
            return refuse(ErrorKind::KeyRejected, "verbs chooses keys: offer PROV_KEY");
        }
        if !request.auth_key.0.is_empty() {
            return refuse(
                ErrorKind::Unsupported,
                "verbs has no authorization keys: separate peers by protection domains (domains)",
            );
        }
        if request.page_size != 0 && request.page_size != rustix::param::page_size() {
            return refuse(ErrorKind::BadPageSize, "verbs takes its page size from the mapping: use 0");
        }
        if !request.enabled {
            return refuse(ErrorKind::Unsupported, "verbs regions are usable at once");
        }
        let zero_based = options.contains(VerbsOptions::ZERO_BASED);
        if request.addressing == Addressing::ZeroBased && !zero_based {
            return refuse(ErrorKind::Unsupported, "offer VIRT_ADDR, or ask for the ZERO_BASED option");
        }
        let flags = access_flags(request.access, self.pd.device.rights());
        let added = flags.difference(access_flags(
            request.access.difference(Access::REMOTE_WRITE),
            self.pd.device.rights(),
        ));
        if added.contains(AccessFlags::LOCAL_WRITE) {
            tracing::debug!(nic = %self.pd.device.nic(), "LOCAL_WRITE added: verbs demands it under remote write");
        }
        self.register_pieces(request.access, flags, pieces, options)
    }

    /// Registers host pages in verbs' words.
    pub(super) fn register_flags(&self, range: AddressRange, flags: AccessFlags) -> Result<ProviderRegion> {
        check_flags(flags)?;
        let options = VerbsOptions::from_bits_truncate(flags.bits());
        let piece = Piece { range, backing: Backing::Host { owned: false } };
        self.register_pieces(access_of(flags), flags.difference(options.flags()), &[piece], options)
    }

    fn register_pieces(
        &self,
        access: Access,
        flags: AccessFlags,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
    ) -> Result<ProviderRegion> {
        let flags = flags | options.flags();
        check_flags(flags)?;
        self.check_options(options, pieces)?;
        let cpu = match pieces {
            _ if owned(pieces) && !options.contains(VerbsOptions::ZERO_BASED) => CpuAccess::Owned,
            _ if pieces.iter().all(|piece| matches!(piece.backing, Backing::Host { .. })) => {
                CpuAccess::Guarded
            }
            _ => CpuAccess::None,
        };
        let mut region = Region { access, flags, options, cpu, parts: Vec::with_capacity(pieces.len()) };
        for piece in pieces {
            if let Err(error) = self.register_piece(piece, flags, &mut region.parts) {
                for part in &region.parts {
                    if let Err(error) = release(self.pd, part) {
                        tracing::error!(%error, "a part of a refused registration is left registered");
                    }
                }
                return Err(error);
            }
        }
        if region.parts.len() > pieces.len() {
            tracing::debug!(nic = %self.pd.device.nic(), parts = region.parts.len(), max = self.max, "region split");
        }
        Ok(self.regions.insert(region))
    }

    fn check_options(&self, options: VerbsOptions, pieces: &[Piece<'_>]) -> Result<()> {
        let device = &self.pd.device;
        let lacks = |what: &'static str, why: String| {
            Err(self.refuse(ErrorKind::Unsupported, "register", why).context("option", what))
        };
        if options.contains(VerbsOptions::ON_DEMAND) && !device.on_demand() {
            return lacks("ON_DEMAND", format!("{} does not page on demand", device.nic().name));
        }
        if options.contains(VerbsOptions::MW_BIND) && device.provider_attr().windows.is_empty() {
            return lacks("MW_BIND", format!("{} has no memory windows", device.nic().name));
        }
        if options.contains(VerbsOptions::RELAXED_ORDERING) {
            if device.library().functions.reg_mr_iova2.is_none() {
                return lacks("RELAXED_ORDERING", "this libibverbs is too old (before IBVERBS_1.8)".into());
            }
            tracing::debug!(nic = %device.nic(), "RELAXED_ORDERING requested, not confirmable");
        }
        if options.contains(VerbsOptions::ZERO_BASED) {
            let page = rustix::param::page_size() as u64;
            match pieces {
                [piece] if piece.range.len() <= self.max && piece.range.start().0 % page == 0 => {}
                _ => {
                    return Err(self.refuse(
                        ErrorKind::InvalidArgument,
                        "register",
                        "ZERO_BASED takes one page-aligned range in one registration",
                    ));
                }
            }
        }
        Ok(())
    }

    fn register_piece(&self, piece: &Piece<'_>, flags: AccessFlags, parts: &mut Vec<Part>) -> Result<()> {
        let range = piece.range;
        if range.is_empty() {
            return Err(self.refuse(ErrorKind::ZeroLength, "register", "register at least one byte"));
        }
        let page = rustix::param::page_size() as u64;
        for (offset, len) in seams(range.start().0, range.len(), self.max, page) {
            let part = AddressRange::new(Address(range.start().0 + offset), len)?;
            let base = if flags.contains(AccessFlags::ZERO_BASED) { 0 } else { part.start().0 };
            let mr = match &piece.backing {
                Backing::Host { .. } => {
                    self.by_address(part, part.start(), base, flags, BackingKind::Host)?
                }
                Backing::PeerMemory { address } => {
                    let address = Address(address.0.wrapping_add(offset));
                    self.by_address(part, address, base, flags, BackingKind::PeerMemory)?
                }
                Backing::DmaBuf { fd, offset: start } => {
                    let start = start.0.checked_add(offset).ok_or_else(|| {
                        self.refuse(ErrorKind::AddressWraps, "ibv_reg_dmabuf_mr", "the offset wraps")
                    })?;
                    self.by_dma_buf(part, *fd, DmaBufOffset(start), base, flags)?
                }
                Backing::Staged(_) => {
                    return Err(self.refuse(
                        ErrorKind::Unsupported,
                        "register",
                        "hardware cannot reach memory through copies: register a host buffer and copy through it",
                    ));
                }
            };
            // SAFETY: the driver made the region just now; its keys are set before it is returned.
            let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
            parts.push(Part { mr, key: VerbsKey { range: part, base, lkey, rkey } });
        }
        Ok(())
    }

    fn by_address(
        &self,
        range: AddressRange,
        address: Address,
        base: u64,
        flags: AccessFlags,
        backing: BackingKind,
    ) -> Result<*mut Mr> {
        let functions = &self.pd.device.library().functions;
        let pointer = std::ptr::with_exposed_provenance_mut(address.0 as usize);
        let len = range.len() as usize;
        let plain = base == address.0 && !flags.contains(AccessFlags::RELAXED_ORDERING);
        let (symbol, mr) = match functions.reg_mr_iova2 {
            Some(register) if !plain => {
                // SAFETY: the protection domain is alive. The driver checks the range itself (EFAULT); that it may be
                // read and written from now on is what the caller of the registration vouched for.
                ("ibv_reg_mr_iova2", unsafe { register(self.pd.pd, pointer, len, base, flags.bits()) })
            }
            _ if plain => {
                // SAFETY: as above.
                let mr = unsafe { (functions.reg_mr)(self.pd.pd, pointer, len, flags.bits() as c_int) };
                ("ibv_reg_mr", mr)
            }
            _ => {
                return Err(self.refuse(
                    ErrorKind::Unsupported,
                    "ibv_reg_mr_iova2",
                    "this libibverbs is too old (before IBVERBS_1.8)",
                ));
            }
        };
        if mr.is_null() {
            let errno = errors::last();
            let what = Registration { symbol, range, flags, backing };
            return Err(errors::registration(self.pd.device.nic(), errno, &what));
        }
        Ok(mr)
    }

    fn by_dma_buf(
        &self,
        range: AddressRange,
        fd: BorrowedFd<'_>,
        DmaBufOffset(offset): DmaBufOffset,
        base: u64,
        flags: AccessFlags,
    ) -> Result<*mut Mr> {
        const SYMBOL: &str = "ibv_reg_dmabuf_mr";
        let lacks = || {
            self.refuse(ErrorKind::Unsupported, SYMBOL, "this libibverbs is too old (before IBVERBS_1.12)")
        };
        let register = self.pd.device.library().functions.reg_dmabuf_mr.ok_or_else(lacks)?;
        if flags.contains(AccessFlags::LOCAL_WRITE) {
            // Not every exporter and driver looks: a heap's read-only fd registers with write rights.
            let mode = rustix::fs::fcntl_getfl(fd).map_err(|errno| {
                Error::os(errno, "fcntl(F_GETFL)").provider(self.pd.device.nic().to_string())
            })?;
            if !mode.contains(rustix::fs::OFlags::RDWR) {
                return Err(self
                    .refuse(ErrorKind::AccessDenied, SYMBOL, "the fd is read-only: export it for writing")
                    .context("access", names(flags)));
            }
        }
        let (len, raw, access) = (range.len() as usize, fd.as_raw_fd(), flags.bits() as c_int);
        // SAFETY: the protection domain is alive and the fd open for the call; the driver checks offset and length.
        let mr = unsafe { register(self.pd.pd, offset, len, base, raw, access) };
        if mr.is_null() {
            let errno = errors::last();
            let what = Registration { symbol: SYMBOL, range, flags, backing: BackingKind::DmaBuf };
            return Err(errors::registration(self.pd.device.nic(), errno, &what).context("offset", offset));
        }
        Ok(mr)
    }

    /// Changes rights in place, where the driver has it (VRB-01). Keys may change; [`Regions::keys`] has the new ones.
    pub(super) fn rereg(&self, handle: ProviderRegion, access: Access) -> Result<()> {
        const SYMBOL: &str = "ibv_rereg_mr";
        let lacks = || self.refuse(ErrorKind::Unsupported, SYMBOL, "this libibverbs has no ibv_rereg_mr");
        let rereg = self.pd.device.library().functions.rereg_mr.ok_or_else(lacks)?;
        // Out of the map meanwhile: no lock is held while a driver registers.
        let mut region = self.regions.map.write().remove(&handle.token).ok_or_else(|| unknown(SYMBOL))?;
        let done = self.rereg_parts(rereg, &mut region, access);
        self.regions.map.write().insert(handle.token, region);
        done
    }

    fn rereg_parts(&self, rereg: sys::ReregMr, region: &mut Region, access: Access) -> Result<()> {
        const SYMBOL: &str = "ibv_rereg_mr";
        let flags = access_flags(access, self.pd.device.rights()) | region.options.flags();
        for part in &mut region.parts {
            let (pd, address) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the region was taken out of the map, so that nobody else has it; only its rights are changed.
            let done = unsafe {
                rereg(part.mr, sys::IBV_REREG_MR_CHANGE_ACCESS, pd, address, 0, flags.bits() as c_int)
            };
            if done != 0 {
                // The call returns a class of failure, and the number in errno.
                let error = Error::os(errors::last(), SYMBOL)
                    .provider(self.pd.device.nic().to_string())
                    .context("range", part.key.range)
                    .context("access", names(flags));
                return Err(if done <= sys::IBV_REREG_MR_ERR_CMD {
                    error.remedy("the driver says that the region must not be used any more: close it")
                } else {
                    error.remedy("the region is as it was: register again with the other rights")
                });
            }
            // SAFETY: as above; the driver has put the keys in force there.
            (part.key.lkey, part.key.rkey) = unsafe { ((*part.mr).lkey, (*part.mr).rkey) };
        }
        (region.access, region.flags) = (access, flags);
        Ok(())
    }
}

fn owned(pieces: &[Piece<'_>]) -> bool {
    pieces.iter().all(|piece| matches!(piece.backing, Backing::Host { owned: true }))
}

/// Whether a device has a window type.
pub(super) fn has_window(pd: &ProtectionDomain, kind: WindowType) -> bool {
    pd.device.provider_attr().windows.contains(&kind)
}
