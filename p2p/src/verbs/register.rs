//! Registering: checks, options, cuts, and the calls by address and by dma-buf.

use std::{
    ffi::c_int,
    os::fd::{AsRawFd, BorrowedFd},
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, DmaBufOffset, Error, ErrorKind, Parallel, Result,
    provider::{Backing, KeyRequest, Piece, ProviderRegion, RegistrationRequest, WindowType},
};

use super::{
    VerbsKey, VerbsOptions,
    access::{access_flags, access_of, added, check_flags, names},
    device::ProtectionDomain,
    errors::{self, BackingKind, Registration},
    parallel::{self, Cut},
    region::{CpuAccess, Kind, Part, Parts, Region, Regions, release},
    split::seams,
    sys::{self, AccessFlags, Mr},
};

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

    /// Checks what no registration can have.
    pub(super) fn check(&self, request: &RegistrationRequest<'_>) -> Result<()> {
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
            return refuse(
                ErrorKind::BadPageSize,
                "verbs takes its page size from the mapping: use 0",
            );
        }
        if !request.enabled {
            return refuse(ErrorKind::Unsupported, "verbs regions are usable at once");
        }
        Ok(())
    }

    /// Registers in fi words.
    pub(super) fn register(
        &self,
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
    ) -> Result<ProviderRegion> {
        self.check(request)?;
        let refuse = |kind, why: &'static str| Err(self.refuse(kind, "register", why));
        let zero_based = options.contains(VerbsOptions::ZERO_BASED);
        if request.addressing == Addressing::ZeroBased && !zero_based {
            return refuse(
                ErrorKind::Unsupported,
                "offer VIRT_ADDR, or ask for the ZERO_BASED option",
            );
        }
        let flags = access_flags(request.access, self.pd.device.rights());
        if tracing::enabled!(tracing::Level::DEBUG) {
            let added = added(request.access, self.pd.device.rights());
            if !added.is_empty() {
                tracing::debug!(nic = %self.pd.device.nic(), added = %names(added), "rights added: verbs demands them");
            }
        }
        self.register_pieces(
            request.access,
            flags,
            pieces,
            options,
            (request.parallel, Kind::Registered),
        )
    }

    /// Registers the staging buffers, for every local use.
    pub(super) fn register_buffers(&self, range: AddressRange) -> Result<ProviderRegion> {
        let access = Access::READ | Access::WRITE | Access::SEND | Access::RECV;
        let flags = access_flags(access, self.pd.device.rights());
        let piece = Piece { range, backing: Backing::Host { owned: true } };
        self.register_pieces(access, flags, &[piece], VerbsOptions::empty(), (None, Kind::Buffers))
    }

    /// Registers host pages in verbs' words.
    pub(super) fn register_flags(
        &self,
        range: AddressRange,
        flags: AccessFlags,
    ) -> Result<ProviderRegion> {
        check_flags(flags)?;
        let options = VerbsOptions::from_bits_truncate(flags.bits());
        let piece = Piece { range, backing: Backing::Host { owned: false } };
        let flags = flags.difference(options.flags());
        self.register_pieces(access_of(flags), flags, &[piece], options, (None, Kind::Registered))
    }

    fn register_pieces(
        &self,
        access: Access,
        flags: AccessFlags,
        pieces: &[Piece<'_>],
        options: VerbsOptions,
        (parallel, kind): (Option<&Parallel<'_>>, Kind),
    ) -> Result<ProviderRegion> {
        let flags = flags | options.flags();
        check_flags(flags)?;
        if !options.is_empty() {
            self.check_options(options, pieces)?;
        }
        let cpu = match pieces {
            _ if owned(pieces) && !options.contains(VerbsOptions::ZERO_BASED) => CpuAccess::Owned,
            _ if pieces.iter().all(|piece| matches!(piece.backing, Backing::Host { .. })) => {
                CpuAccess::Guarded
            }
            _ => CpuAccess::None,
        };
        let parts = Parts::with_capacity(pieces.len());
        let mut region = Region { access, flags, options, cpu, parts, kind };
        for piece in pieces {
            if let Err(error) = self.register_piece(piece, flags, parallel, &mut region.parts) {
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
                return lacks(
                    "RELAXED_ORDERING",
                    "this libibverbs is too old (before IBVERBS_1.8)".into(),
                );
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

    fn register_piece(
        &self,
        piece: &Piece<'_>,
        flags: AccessFlags,
        parallel: Option<&Parallel<'_>>,
        parts: &mut Parts,
    ) -> Result<()> {
        let range = piece.range;
        if range.is_empty() {
            return Err(self.refuse(
                ErrorKind::ZeroLength,
                "register",
                "register at least one byte",
            ));
        }
        // Pages that come on demand take no time now, and addresses from 0 need one registration.
        let whole = AccessFlags::ON_DEMAND | AccessFlags::ZERO_BASED;
        let cut = match &piece.backing {
            Backing::Host { .. }
                if !flags.intersects(whole) && (parallel.is_some() || range.len() > self.max) =>
            {
                Cut::new(range.len(), self.max, parallel, parallel::cpus())
            }
            _ => Cut::none(self.max),
        };
        let one = |offset: u64, len: u64| self.register_part(piece, flags, offset, len);
        if range.len() <= cut.part {
            parts.push(one(0, range.len())?);
            return Ok(());
        }
        let page = rustix::param::page_size() as u64;
        let seams: Vec<_> = seams(range.start().0, range.len(), cut.part, page).collect();
        let progress = parallel.and_then(|parallel| parallel.progress);
        parallel::register(&seams, cut.threads, progress, one, parts)
    }

    /// One registration: `len` bytes at `offset` of a piece.
    fn register_part(
        &self,
        piece: &Piece<'_>,
        flags: AccessFlags,
        offset: u64,
        len: u64,
    ) -> Result<Part> {
        let part = AddressRange::new(Address(piece.range.start().0 + offset), len)?;
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
                    "a region is staged as a whole or not at all",
                ));
            }
        };
        // SAFETY: the driver made the region just now; its keys are set before it is returned.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Part { mr, key: VerbsKey { range: part, base, lkey, rkey } })
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
                ("ibv_reg_mr_iova2", unsafe {
                    register(self.pd.pd, pointer, len, base, flags.bits())
                })
            }
            _ if plain => {
                // SAFETY: as above.
                let mr =
                    unsafe { (functions.reg_mr)(self.pd.pd, pointer, len, flags.bits() as c_int) };
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
            self.refuse(
                ErrorKind::Unsupported,
                SYMBOL,
                "this libibverbs is too old (before IBVERBS_1.12)",
            )
        };
        let register = self.pd.device.library().functions.reg_dmabuf_mr.ok_or_else(lacks)?;
        if flags.contains(AccessFlags::LOCAL_WRITE) {
            // Not every exporter and driver looks: a heap's read-only fd registers with write rights.
            let mode = rustix::fs::fcntl_getfl(fd).map_err(|errno| {
                Error::os(errno, "fcntl(F_GETFL)").provider(self.pd.device.nic().to_string())
            })?;
            if !mode.contains(rustix::fs::OFlags::RDWR) {
                return Err(self
                    .refuse(
                        ErrorKind::AccessDenied,
                        SYMBOL,
                        "the fd is read-only: export it for writing",
                    )
                    .context("access", names(flags)));
            }
        }
        let (len, raw, access) = (range.len() as usize, fd.as_raw_fd(), flags.bits() as c_int);
        // SAFETY: the protection domain is alive and the fd open for the call; the driver checks offset and length.
        let mr = unsafe { register(self.pd.pd, offset, len, base, raw, access) };
        if mr.is_null() {
            let errno = errors::last();
            let what = Registration { symbol: SYMBOL, range, flags, backing: BackingKind::DmaBuf };
            return Err(
                errors::registration(self.pd.device.nic(), errno, &what).context("offset", offset)
            );
        }
        Ok(mr)
    }

    /// Changes rights in place, where the driver has it (VRB-01). Keys may change; [`Regions::keys`] has the new ones.
    pub(super) fn rereg(&self, handle: ProviderRegion, access: Access) -> Result<()> {
        const SYMBOL: &str = "ibv_rereg_mr";
        let lacks =
            || self.refuse(ErrorKind::Unsupported, SYMBOL, "this libibverbs has no ibv_rereg_mr");
        let rereg = self.pd.device.library().functions.rereg_mr.ok_or_else(lacks)?;
        let mut region = self.regions.take_to_change(handle, SYMBOL)?;
        let done = self.rereg_parts(rereg, &mut region, access);
        self.regions.put_back(handle, region);
        done
    }

    fn rereg_parts(&self, rereg: sys::ReregMr, region: &mut Region, access: Access) -> Result<()> {
        const SYMBOL: &str = "ibv_rereg_mr";
        let flags = access_flags(access, self.pd.device.rights()) | region.options.flags();
        for part in &mut region.parts {
            let (pd, address) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: the region was taken out of the map, so that nobody else has it; only its rights are changed.
            let done = unsafe {
                rereg(
                    part.mr,
                    sys::IBV_REREG_MR_CHANGE_ACCESS,
                    pd,
                    address,
                    0,
                    flags.bits() as c_int,
                )
            };
            if done != 0 {
                // The call returns a class of failure, and the number in errno.
                let errno = errors::last();
                let error = Error::os(errno, SYMBOL)
                    .provider(self.pd.device.nic().to_string())
                    .context("range", part.key.range)
                    .context("access", names(flags));
                // A driver without the call has touched nothing, whatever class the library puts that in.
                let lost =
                    done <= sys::IBV_REREG_MR_ERR_CMD && errno.kind() != ErrorKind::Unsupported;
                return Err(if lost {
                    error.remedy(
                        "the driver says that the region must not be used any more: close it",
                    )
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
