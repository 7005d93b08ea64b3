//! Registration of memory: checks, options, splitting, and the driver calls for addresses and
//! dma-bufs.

#![allow(unsafe_code, reason = "calls the library to register")]

use std::{
    ffi::{c_int, c_void},
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
    sync::atomic::AtomicBool,
};

use hmem_core::{
    Access, Address, AddressRange, DmaBufOffset, Error, ErrorKind, Parallel, Result,
    iface::DmaBufMapping,
    provider::{Backing, Piece, ProviderRegion, Registration},
};

use super::{
    access::{Settings, VerbsOptions, access_flags, added, check_flags, names},
    device::ProtectionDomain,
    errors::{self, BackingKind, RegistrationCall},
    huge::lies_in_huge_pages,
    parallel::{self, Division},
    region::{BoundWindows, CpuAccess, Kind, PartKey, Parts, Region, RegionPart, Regions, release},
    split::seams,
    sys::{self, AccessFlags, Mr, Pd},
};

const REREG: &str = "ibv_rereg_mr";
type ReregMr = unsafe extern "C" fn(*mut Mr, c_int, *mut Pd, *mut c_void, usize, c_int) -> c_int;

/// Registers memory in the protection domain of a domain, and adds the regions to the domain's
/// table.
#[derive(Debug)]
pub(super) struct Registrar<'a> {
    pub(super) pd: &'a ProtectionDomain,
    pub(super) regions: &'a Regions,
    /// Maximum length of one registration in bytes.
    pub(super) max: u64,
}

impl Registrar<'_> {
    fn refuse(&self, kind: ErrorKind, operation: &'static str, why: impl Into<String>) -> Error {
        self.pd.device.refuse(kind, operation, why.into())
    }

    /// Registers memory that the NIC accesses directly. The request names the access rights as
    /// fi_mr(3) does, and this function translates them to verbs flags.
    pub(super) fn register(
        &self,
        request: &Registration<'_>,
        pieces: &[Piece<'_>],
        settings: Settings,
    ) -> Result<ProviderRegion> {
        let device = &self.pd.device;
        device.check_atomics(request.access, "register")?;
        if tracing::enabled!(tracing::Level::DEBUG) {
            let added = added(request.access, device.rights);
            if !added.is_empty() {
                let nic = &device.nic;
                tracing::debug!(%nic, added = %names(added), "rights added that verbs requires");
            }
        }
        let kind = (request.parallel, Kind::Registered);
        self.register_pieces(request.access, pieces, settings, kind)
    }

    /// Registers the staging buffers with all local rights.
    pub(super) fn register_buffers(&self, range: AddressRange) -> Result<ProviderRegion> {
        let access = Access::READ | Access::WRITE | Access::SEND | Access::RECV;
        let piece = Piece { range, backing: Backing::Host { owned: true } };
        // Relaxed ordering is safe: the provider reads a buffer only after the completion of the
        // work request that writes the buffer.
        let options = self.pd.device.relaxed_ordering();
        let settings = Settings { options, iova: None };
        self.register_pieces(access, &[piece], settings, (None, Kind::Buffers))
    }

    fn register_pieces(
        &self,
        access: Access,
        pieces: &[Piece<'_>],
        Settings { options, iova }: Settings,
        (parallel, kind): (Option<&Parallel<'_>>, Kind),
    ) -> Result<ProviderRegion> {
        let flags = access_flags(access, self.pd.device.rights) | options.flags();
        check_flags(flags)?;
        if let Some(iova) = iova {
            self.check_iova(iova, options, pieces)?;
        }
        if !options.is_empty() {
            self.check_options(options, pieces)?;
        }
        let is_host = |piece: &Piece<'_>| matches!(piece.backing, Backing::Host { .. });
        let is_owned = |piece: &Piece<'_>| matches!(piece.backing, Backing::Host { owned: true });
        let is_shifted = options.contains(VerbsOptions::ZERO_BASED) || iova.is_some();
        let cpu = if !is_shifted && pieces.iter().all(is_owned) {
            CpuAccess::Owned
        } else if pieces.iter().all(is_host) {
            CpuAccess::Guarded
        } else {
            CpuAccess::None
        };
        let mut made = Unfinished { pd: self.pd, parts: Parts::with_capacity(pieces.len()) };
        let mut base = iova;
        for piece in pieces {
            self.register_piece(piece, flags, (parallel, base), &mut made.parts)?;
            base = base.map(|base| base.wrapping_add(piece.range.len()));
        }
        let parts = std::mem::take(&mut made.parts);
        if parts.len() > pieces.len() {
            let nic = &self.pd.device.nic;
            tracing::debug!(%nic, parts = parts.len(), max = self.max, "region split");
        }
        let (windows, revoked) = (BoundWindows::default(), AtomicBool::new(false));
        let region = Region { access, flags, options, cpu, parts, kind, windows, revoked };
        Ok(self.regions.insert(region))
    }

    /// Checks that the device and the memory support the options.
    fn check_options(&self, options: VerbsOptions, pieces: &[Piece<'_>]) -> Result<()> {
        let device = &self.pd.device;
        let lacks = |what: &'static str, why: String| {
            Err(self.refuse(ErrorKind::Unsupported, "register", why).context("option", what))
        };
        if options.contains(VerbsOptions::ON_DEMAND) && !device.on_demand {
            return lacks("ON_DEMAND", format!("{} does not page on demand", device.nic.name));
        }
        if options.contains(VerbsOptions::HUGETLB) {
            // Devices do not report support for HUGETLB. ibv_reg_mr(3) limits the flag to on-demand
            // regions.
            if !device.on_demand {
                return lacks(
                    "HUGETLB",
                    format!(
                        "{} does not page on demand, and HUGETLB is for regions that do \
                         (ibv_reg_mr(3)): register without it",
                        device.nic.name
                    ),
                );
            }
            for piece in pieces {
                self.check_huge(piece)?;
            }
        }
        if options.contains(VerbsOptions::MW_BIND) && device.window_types.is_empty() {
            return lacks("MW_BIND", format!("{} has no memory windows", device.nic.name));
        }
        if options.contains(VerbsOptions::RELAXED_ORDERING) {
            if device.library.functions.reg_mr_iova2.is_none() {
                return lacks(
                    "RELAXED_ORDERING",
                    "this libibverbs is too old (before IBVERBS_1.8)".into(),
                );
            }
            tracing::debug!(nic = %device.nic, "RELAXED_ORDERING requested, not confirmable");
        }
        if options.contains(VerbsOptions::ZERO_BASED) {
            let page = rustix::param::page_size() as u64;
            match pieces {
                [piece] if piece.range.len() <= self.max && piece.range.start().0 % page == 0 => {}
                _ => {
                    return Err(self.refuse(
                        ErrorKind::InvalidArgument,
                        "register",
                        "ZERO_BASED needs one page-aligned range in one registration",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Checks that a region can have the address [`Settings::iova`].
    ///
    /// # Errors
    /// InvalidArgument, in one of these cases:
    ///
    /// - The request also has ZERO_BASED.
    /// - A piece at this address would begin at another offset in a page than in the application's
    ///   memory.
    /// - The region would reach past the last address.
    fn check_iova(&self, iova: u64, options: VerbsOptions, pieces: &[Piece<'_>]) -> Result<()> {
        let refuse = |why| {
            Err(self
                .refuse(ErrorKind::InvalidArgument, "register", why)
                .context("iova", format_args!("{iova:#x}")))
        };
        if options.contains(VerbsOptions::ZERO_BASED) {
            return refuse("set ZERO_BASED or an iova, not both");
        }
        let page = rustix::param::page_size() as u64;
        let mut at = iova;
        for piece in pieces {
            if at % page != piece.range.start().0 % page {
                return refuse("choose an iova with the same offset in its page as the address");
            }
            let Some(end) = at.checked_add(piece.range.len()) else {
                return refuse("choose an iova at which the region ends in the address space");
            };
            at = end;
        }
        Ok(())
    }

    /// Checks that `piece` is host memory in huge pages. A driver may rely on the HUGETLB flag and
    /// not check the pages.
    ///
    /// # Errors
    /// InvalidArgument: the piece is not host memory or does not lie in huge pages, or
    /// `/proc/self/smaps` cannot be read.
    fn check_huge(&self, piece: &Piece<'_>) -> Result<()> {
        let refuse = |why| {
            self.refuse(ErrorKind::InvalidArgument, "register", why)
                .context("option", "HUGETLB")
                .context("range", piece.range)
        };
        if !matches!(piece.backing, Backing::Host { .. }) {
            return Err(refuse("register without HUGETLB: the option is for host memory"));
        }
        match lies_in_huge_pages(piece.range) {
            Ok(true) => Ok(()),
            Ok(false) => Err(refuse(
                "map the memory with MAP_HUGETLB or from hugetlbfs: the range is not in huge pages",
            )),
            Err(error) => {
                Err(refuse("make /proc/self/smaps readable: the check for HUGETLB reads this file")
                    .caused_by(error))
            }
        }
    }

    /// Registers one piece of a region, and appends its registrations to `parts`. A piece has
    /// several registrations if it is longer than `self.max`, or if the request asks for parallel
    /// calls. `base` is the address by which work requests name the first byte of the piece, if the
    /// request sets one.
    fn register_piece(
        &self,
        piece: &Piece<'_>,
        flags: AccessFlags,
        (parallel, base): (Option<&Parallel<'_>>, Option<u64>),
        parts: &mut Parts,
    ) -> Result<()> {
        let range = piece.range;
        // On-demand pages are not pinned, so parallel calls gain nothing. ZERO_BASED needs a single
        // registration.
        let whole = AccessFlags::ON_DEMAND | AccessFlags::ZERO_BASED;
        let division = match &piece.backing {
            Backing::Host { .. }
                if !flags.intersects(whole) && (parallel.is_some() || range.len() > self.max) =>
            {
                Division::new(range.len(), self.max, parallel, parallel::cpus())
            }
            _ => Division::none(self.max),
        };
        let one = |offset: u64, len: u64| self.register_part(piece, flags, base, (offset, len));
        if range.len() <= division.part {
            parts.push(one(0, range.len())?);
            return Ok(());
        }
        let page = rustix::param::page_size() as u64;
        let seams: Vec<_> = seams(range.start().0, range.len(), division.part, page).collect();
        let progress = parallel.and_then(|parallel| parallel.progress);
        parallel::register(&seams, division.threads, progress, one, parts)
    }

    /// Registers `len` bytes at `offset` of a piece with one driver call. `base` is the address by
    /// which work requests name the first byte of the piece, if the request sets one.
    fn register_part(
        &self,
        piece: &Piece<'_>,
        flags: AccessFlags,
        base: Option<u64>,
        (offset, len): (u64, u64),
    ) -> Result<RegionPart> {
        let part = AddressRange::new(Address(piece.range.start().0 + offset), len)?;
        let base = match base {
            Some(base) => base.wrapping_add(offset),
            None if flags.contains(AccessFlags::ZERO_BASED) => 0,
            None => part.start().0,
        };
        let mr = match &piece.backing {
            Backing::Host { .. } => {
                self.by_address(part, part.start(), base, flags, BackingKind::Host)?
            }
            Backing::PeerMemory { address, .. } => {
                let address = Address(address.0.wrapping_add(offset));
                self.by_address(part, address, base, flags, BackingKind::PeerMemory)?
            }
            Backing::DmaBuf { fd, offset: start, mapping, .. } => {
                let start = start.0.checked_add(offset).ok_or_else(|| {
                    self.refuse(ErrorKind::AddressWraps, "ibv_reg_dmabuf_mr", "the offset wraps")
                })?;
                self.by_dma_buf(part, (*fd, DmaBufOffset(start), *mapping), base, flags)?
            }
            Backing::Staged { .. } => {
                return Err(self.refuse(
                    ErrorKind::Unsupported,
                    "register",
                    "stage a region as a whole or not at all",
                ));
            }
        };
        // SAFETY: the driver returned the region, with its keys set.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(RegionPart { mr, key: PartKey { range: part, base, lkey, rkey } })
    }

    /// Registers memory at `address`. Work requests name the first byte by the address `base`.
    fn by_address(
        &self,
        range: AddressRange,
        address: Address,
        base: u64,
        flags: AccessFlags,
        backing: BackingKind,
    ) -> Result<*mut Mr> {
        let functions = &self.pd.device.library.functions;
        let pointer = ptr::with_exposed_provenance_mut(address.0 as usize);
        let len = range.len() as usize;
        let plain = base == address.0 && !flags.contains(AccessFlags::RELAXED_ORDERING);
        let (symbol, mr) = if plain {
            // SAFETY: the protection domain is alive, and the driver checks the range (EFAULT). The
            // caller of the registration promised that the NIC may access the range.
            let mr = unsafe { (functions.reg_mr)(self.pd.pd, pointer, len, flags.bits() as c_int) };
            ("ibv_reg_mr", mr)
        } else {
            const SYMBOL: &str = "ibv_reg_mr_iova2";
            let why = "this libibverbs is too old (before IBVERBS_1.8)";
            let lacks = || self.refuse(ErrorKind::Unsupported, SYMBOL, why);
            let register = functions.reg_mr_iova2.ok_or_else(lacks)?;
            // SAFETY: the protection domain is alive, and the driver checks the range (EFAULT). The
            // caller of the registration promised that the NIC may access the range.
            (SYMBOL, unsafe { register(self.pd.pd, pointer, len, base, flags.bits()) })
        };
        self.registered(mr, &RegistrationCall { symbol, range, flags, backing })
    }

    /// Returns the registration that the library call `call` has created just now, or the error of
    /// the call if the pointer is null.
    fn registered(&self, mr: *mut Mr, call: &RegistrationCall) -> Result<*mut Mr> {
        if mr.is_null() {
            let device = &self.pd.device;
            return Err(device.failed(errors::registration(&device.nic, errors::last(), call)));
        }
        Ok(mr)
    }

    fn by_dma_buf(
        &self,
        range: AddressRange,
        (fd, DmaBufOffset(offset), mapping): (BorrowedFd<'_>, DmaBufOffset, DmaBufMapping),
        base: u64,
        flags: AccessFlags,
    ) -> Result<*mut Mr> {
        let data_direct = mapping == DmaBufMapping::DataDirect;
        let symbol = if data_direct { "mlx5dv_reg_dmabuf_mr" } else { "ibv_reg_dmabuf_mr" };
        if flags.contains(AccessFlags::LOCAL_WRITE) {
            // Some exporters and drivers do not check the fd's mode: they accept write rights for a
            // heap's read-only fd.
            let mode = rustix::fs::fcntl_getfl(fd).map_err(|errno| {
                Error::os(errno, "fcntl(F_GETFL)").provider(self.pd.device.nic.to_string())
            })?;
            if !mode.contains(rustix::fs::OFlags::RDWR) {
                let why = "export the fd for writing: it is read-only";
                let refused = self.refuse(ErrorKind::AccessDenied, symbol, why);
                return Err(refused.context("access", names(flags)));
            }
        }
        let (len, raw, access) = (range.len() as usize, fd.as_raw_fd(), flags.bits() as c_int);
        let functions = &self.pd.device.library.functions;
        let mr = if data_direct {
            let why = "install libmlx5 of rdma-core 54 or newer (MLX5_1.25)";
            let lacks = || self.refuse(ErrorKind::Unsupported, symbol, why);
            let register = functions.mlx5_reg_dmabuf_mr.ok_or_else(lacks)?;
            let mlx5 = sys::MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT;
            // SAFETY: the protection domain is alive and the fd open for the call; the driver
            // checks offset and length. The library refuses a protection domain of another driver.
            unsafe { register(self.pd.pd, offset, len, base, raw, access, mlx5) }
        } else {
            let why = "this libibverbs is too old (before IBVERBS_1.12)";
            let lacks = || self.refuse(ErrorKind::Unsupported, symbol, why);
            let register = functions.reg_dmabuf_mr.ok_or_else(lacks)?;
            // SAFETY: the protection domain is alive and the fd open for the call; the driver
            // checks offset and length.
            unsafe { register(self.pd.pd, offset, len, base, raw, access) }
        };
        let call = RegistrationCall { symbol, range, flags, backing: BackingKind::DmaBuf };
        self.registered(mr, &call).map_err(|error| error.context("offset", offset))
    }

    /// Changes the rights of a region in place, if the driver supports it (requirement VRB-01). The
    /// keys may change: [`VerbsMr`](super::VerbsMr) has the new ones.
    pub(super) fn rereg(&self, handle: ProviderRegion, access: Access) -> Result<()> {
        let lacks =
            || self.refuse(ErrorKind::Unsupported, REREG, "this libibverbs has no ibv_rereg_mr");
        let rereg = self.pd.device.library.functions.rereg_mr.ok_or_else(lacks)?;
        self.regions.change(handle, REREG, |region| self.rereg_parts(rereg, region, access))
    }

    fn rereg_parts(&self, rereg: ReregMr, region: &mut Region, access: Access) -> Result<()> {
        let device = &self.pd.device;
        device.check_atomics(access, REREG)?;
        if access.contains(Access::MW_BIND) && device.window_types.is_empty() {
            let why = format!("{} has no memory windows", device.nic.name);
            return Err(self.refuse(ErrorKind::Unsupported, REREG, why));
        }
        // The option stays if the application set it apart from the right.
        let mut options = region.options;
        if region.access.contains(Access::MW_BIND) || access.contains(Access::MW_BIND) {
            options.set(VerbsOptions::MW_BIND, access.contains(Access::MW_BIND));
        }
        let flags = access_flags(access, device.rights) | options.flags();
        for index in 0..region.parts.len() {
            let Err((error, mut lost)) = self.rereg_part(rereg, &mut region.parts[index], flags)
            else {
                continue;
            };
            // Restore the rights of the parts before this one.
            for part in &mut region.parts[..index] {
                if let Err((error, _)) = self.rereg_part(rereg, part, region.flags) {
                    tracing::error!(
                        error = %error.full(),
                        "a region's registrations now differ in their rights"
                    );
                    lost = true;
                }
            }
            return Err(if lost {
                error.remedy(
                    "close the region: the driver reports that the region is no longer usable",
                )
            } else {
                error.remedy("register again with the other rights: this region is unchanged")
            });
        }
        (region.access, region.options, region.flags) = (access, options, flags);
        Ok(())
    }

    /// Changes the rights of one registration. On failure, returns the error, and true if the
    /// registration is no longer usable.
    fn rereg_part(
        &self,
        rereg: ReregMr,
        part: &mut RegionPart,
        flags: AccessFlags,
    ) -> Result<(), (Error, bool)> {
        let (pd, address, bits) = (ptr::null_mut(), ptr::null_mut(), flags.bits() as c_int);
        // SAFETY: `Regions::change` removed the region from the table, so no other thread has its
        // registrations. Only rights change, and the caller of `VerbsDomain::rereg` promised
        // that the NIC may use the new rights.
        let done = unsafe { rereg(part.mr, sys::IBV_REREG_MR_CHANGE_ACCESS, pd, address, 0, bits) };
        if done != 0 {
            // The call returns the class of the failure. The error number is in errno.
            let errno = errors::last();
            let error = Error::os(errno, REREG)
                .provider(self.pd.device.nic.to_string())
                .context("range", part.key.range)
                .context("access", names(flags));
            // A driver that lacks the call leaves the region unchanged, even if the library returns
            // another class.
            let lost = done <= sys::IBV_REREG_MR_ERR_CMD && errno.kind() != ErrorKind::Unsupported;
            return Err((error, lost));
        }
        // SAFETY: the registration is alive, and `Regions::change` keeps other threads from using
        // it. The driver wrote the current keys.
        (part.key.lkey, part.key.rkey) = unsafe { ((*part.mr).lkey, (*part.mr).rkey) };
        Ok(())
    }
}

/// The registrations that a call of [`Registrar::register_pieces`] has made so far. Dropping the
/// value deregisters them, after an error or a panic of the progress callback. The caller can then
/// free the memory.
struct Unfinished<'a> {
    pd: &'a ProtectionDomain,
    parts: Parts,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        for part in &self.parts {
            if let Err(error) = release(self.pd, part) {
                tracing::error!(
                    error = %error.full(),
                    "a part of a refused registration stays registered"
                );
            }
        }
    }
}
