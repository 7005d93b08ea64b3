//! Regions. A region has one or several registrations (`ibv_mr`) under one handle.

#![allow(unsafe_code, reason = "deregisters, and shares `ibv_mr` between threads")]

use std::{
    collections::hash_map::{Entry, OccupiedEntry},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, Error, ErrorKind, Iova, LocalKey, RawKey, RemoteKey,
    RemotePiece, Result,
    provider::{LiveObjects, ProviderRegion},
    transfer::LocalSegment,
};
use hmem_p2p::staging::StagedRegion;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    access::VerbsOptions,
    device::ProtectionDomain,
    raw_key,
    split::Span,
    sys::{AccessFlags, Mr},
};

/// Range and keys of one registration.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartKey {
    /// The registered range, in addresses of the application.
    pub(super) range: AddressRange,
    /// Address by which work requests name the first byte: the application's address, or another
    /// address with ZERO_BASED or [`Settings::iova`](super::Settings::iova).
    pub(super) base: u64,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// One registration of a region: an `ibv_mr` with its keys.
#[derive(Debug)]
pub(super) struct RegionPart {
    pub(super) mr: *mut Mr,
    pub(super) key: PartKey,
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and only the owner of the region that
// holds the part deregisters the part.
unsafe impl Send for RegionPart {}
// SAFETY: a shared reference only allows reads. The key is plain data. The pointer is passed to the
// driver under the table's lock, or by the thread that removed the region from the table.
unsafe impl Sync for RegionPart {}

/// The registrations of a region, in the order of its ranges. Most regions have only one, which is
/// stored without an allocation.
pub(super) type Parts = SmallVec<[RegionPart; 1]>;

/// The way in which the CPU can read a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CpuAccess {
    /// The region owns the memory, so plain loads are safe.
    Owned,
    /// Host pages that the application may unmap. The kernel copies their bytes, so that an
    /// unmapped page is an error and not a fault.
    Guarded,
    /// Staged memory, or memory that the NIC imported (a dma-buf or peer memory). The provider does
    /// not read it with the CPU.
    None,
}

/// A region of a domain, as the table of regions holds it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) access: Access,
    /// Access flags of each registration. Empty for a staged region.
    pub(super) flags: AccessFlags,
    pub(super) options: VerbsOptions,
    pub(super) cpu: CpuAccess,
    pub(super) parts: Parts,
    pub(super) kind: Kind,
    pub(super) windows: BoundWindows,
    /// True once a check found that the memory was revoked.
    pub(super) revoked: AtomicBool,
}

/// Number of memory windows that are or may be bound to a region: the number of existing
/// [`WindowGuard`]s. A region with windows is neither deregistered nor changed.
#[derive(Debug, Default)]
pub(super) struct BoundWindows(Arc<()>);

/// Guard that counts one window in [`BoundWindows`]. It exists from before a bind is posted until
/// the window is unbound.
#[derive(Debug)]
pub(super) struct WindowGuard {
    _count: Arc<()>,
}

impl BoundWindows {
    /// Counts one more window. The caller holds a lock of the table of regions.
    pub(super) fn guard(&self) -> WindowGuard {
        WindowGuard { _count: Arc::clone(&self.0) }
    }

    fn count(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

/// Kind of a region's memory, and of the NIC's access to it.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// Application memory, registered with the NIC.
    Registered,
    /// Application memory that the provider copies through the staging buffers.
    Staged(Arc<StagedRegion>),
    /// The staging buffers of the provider, registered with the NIC.
    Buffers,
    /// Placeholder in the table while a thread changes the rights of the region. That thread holds
    /// the lock during the change, and has the region itself.
    Changing(Arc<Mutex<()>>),
}

/// Bit that marks a local key as a handle of the provider, not an lkey. A region gets a handle in
/// three cases:
///
/// - The region has no registration or several.
/// - Its addresses on the NIC differ from the application's.
/// - Its lkey is already the local key of another region in the table.
const HANDLE_BIT: u64 = 1 << 63;

/// Table of the regions of a domain, by local key.
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: RwLock<FxHashMap<u64, Region>>,
    /// The next local key that is a handle of the provider, without its bit [`HANDLE_BIT`].
    next: AtomicU64,
}

fn unknown(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("verbs")
        .remedy("use an open region of this domain")
}

fn changing(operation: &'static str) -> Error {
    Error::new(ErrorKind::Busy, operation)
        .provider("verbs")
        .remedy("wait until `rereg` has returned: another thread is changing the region's rights")
}

/// Returns the error for a caller that asks for the remote key of staged memory. Peers cannot
/// access staged memory, so it has no remote key.
fn no_remote_key(operation: &'static str) -> Error {
    Error::new(ErrorKind::KeyNotAvailable, operation)
        .provider("verbs")
        .context("path", "staged")
        .remedy(
            "a peer's NIC cannot reach memory through copies: let this side write, read or \
             exchange messages, or make a direct path work",
        )
}

impl Region {
    /// Creates a region without a registration.
    pub(super) fn without_parts(access: Access, kind: Kind) -> Self {
        Self {
            access,
            flags: AccessFlags::empty(),
            options: VerbsOptions::empty(),
            cpu: CpuAccess::None,
            parts: Parts::new(),
            kind,
            windows: BoundWindows::default(),
            revoked: AtomicBool::new(false),
        }
    }

    /// Returns an error if windows are bound to the region. The caller holds the write lock of the
    /// table, so that no thread binds another window.
    ///
    /// Not every driver refuses to deregister such a region, and librxe does not return the
    /// documented EBUSY.
    ///
    /// # Errors
    /// Busy: a window is bound, may be bound, or has a posted bind.
    fn check_unbound(&self, operation: &'static str) -> Result<()> {
        match self.windows.count() {
            0 => Ok(()),
            windows => Err(Error::new(ErrorKind::Busy, operation)
                .provider("verbs")
                .context("windows", windows)
                .remedy(
                    "free or unbind the memory windows of the region first, and read the \
                     completions of posted binds and invalidations",
                )),
        }
    }

    /// Marks the region as revoked, after the NIC refused one of `keys`.
    ///
    /// # Errors
    /// Busy: the region has other local keys now, because another thread has changed its rights.
    pub(super) fn set_revoked(&self, keys: &[PartKey], operation: &'static str) -> Result<()> {
        let now = self.parts.iter().map(|part| part.key.lkey);
        if !now.eq(keys.iter().map(|key| key.lkey)) {
            return Err(changing(operation));
        }
        self.revoked.store(true, Ordering::Release);
        Ok(())
    }

    fn addressing(&self) -> Addressing {
        if self.flags.contains(AccessFlags::ZERO_BASED) {
            Addressing::ZeroBased
        } else {
            Addressing::Virtual
        }
    }

    /// Returns true if work requests name the region's bytes by other addresses than those of the
    /// application.
    pub(super) fn is_shifted(&self) -> bool {
        self.parts.iter().any(|part| part.key.base != part.key.range.start().0)
    }

    fn pieces(&self) -> impl ExactSizeIterator<Item = RemotePiece> {
        self.parts.iter().map(|part| RemotePiece {
            base: Iova(part.key.base),
            len: part.key.range.len(),
            key: u64::from(part.key.rkey),
        })
    }

    /// Returns the registration that contains `address`.
    pub(super) fn part_at(&self, address: Address) -> Option<&RegionPart> {
        self.parts.iter().find(|part| part.key.range.contains(address))
    }

    /// Returns the registration that contains `len` bytes at `offset` of the region, and the
    /// address of the first byte. Returns `None` if no single registration contains all of the
    /// bytes.
    pub(super) fn slice(&self, offset: u64, len: u64) -> Option<(&RegionPart, Address)> {
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

    /// Splits `left` bytes from `address` on into [`Span`]s, and adds them to `out`. Returns `None`
    /// if the region does not contain all of the bytes.
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

/// Owner of a region that a placeholder ([`Kind::Changing`]) replaces in the table. Dropping the
/// value puts the region back.
struct RegionInChange<'a> {
    regions: &'a Regions,
    handle: ProviderRegion,
    region: Region,
}

impl Drop for RegionInChange<'_> {
    fn drop(&mut self) {
        if let Some(stand_in) = self.regions.map.write().get_mut(&self.handle.token) {
            std::mem::swap(stand_in, &mut self.region);
        }
    }
}

impl Regions {
    /// Adds a region. Its local key is the lkey of its registration, or a handle ([`HANDLE_BIT`]).
    pub(super) fn insert(&self, region: Region) -> ProviderRegion {
        let single = region.parts.len() == 1 && !region.is_shifted();
        let (lkey, key) =
            region.parts.first().map_or((0, 0), |part| (part.key.lkey, part.key.rkey));
        let mut map = self.map.write();
        let mut token = u64::from(lkey);
        if !single || map.contains_key(&token) {
            token = HANDLE_BIT | self.next.fetch_add(1, Ordering::Relaxed);
        }
        map.insert(token, region);
        ProviderRegion { token, local: LocalKey::from_provider(token), key: u64::from(key) }
    }

    /// Calls `with` with a region's table entry. First waits while another thread changes the
    /// region, because a driver accepts only one call at a time for a registration.
    fn settled<T>(
        &self,
        handle: ProviderRegion,
        operation: &'static str,
        with: impl FnOnce(OccupiedEntry<'_, u64, Region>) -> Result<T>,
    ) -> Result<T> {
        loop {
            let mut map = self.map.write();
            let Entry::Occupied(held) = map.entry(handle.token) else {
                return Err(unknown(operation));
            };
            let Kind::Changing(change) = &held.get().kind else { return with(held) };
            let change = Arc::clone(change);
            drop(map);
            drop(change.lock());
        }
    }

    /// Removes a region from the table, calls `change` with the region, and puts the region back,
    /// even if `change` fails or panics. So `change` can call the driver without a lock of the
    /// table. First waits while another thread changes the region.
    ///
    /// Meanwhile a placeholder in the table keeps the region's local key from being given to
    /// another region, and makes [`Regions::take`] wait.
    ///
    /// # Errors
    /// - The error of `change`.
    /// - InvalidArgument: the region is not in the table.
    /// - Unsupported: the region is staged.
    /// - Busy: a window is bound to the region, or may be.
    pub(super) fn change(
        &self,
        handle: ProviderRegion,
        operation: &'static str,
        change: impl FnOnce(&mut Region) -> Result<()>,
    ) -> Result<()> {
        let lock = Arc::new(Mutex::new(()));
        let _changing = lock.lock();
        let region = self.settled(handle, operation, |mut held| {
            if matches!(held.get().kind, Kind::Staged(_)) {
                return Err(Error::new(ErrorKind::Unsupported, operation).provider("verbs").remedy(
                    "close the region and register again: staged regions are not registered with \
                     the NIC",
                ));
            }
            held.get().check_unbound(operation)?;
            let kind = Kind::Changing(Arc::clone(&lock));
            let mut stand_in = Region::without_parts(Access::empty(), kind);
            *stand_in.revoked.get_mut() = held.get().revoked.load(Ordering::Acquire);
            Ok(std::mem::replace(held.get_mut(), stand_in))
        })?;
        let mut changed = RegionInChange { regions: self, handle, region };
        change(&mut changed.region)
    }

    /// Removes a region from the table to deregister it. Waits while another thread changes the
    /// region.
    ///
    /// # Errors
    /// - Busy: a window is bound to the region, or may be.
    /// - InvalidArgument: the region is not in the table.
    pub(super) fn take(&self, handle: ProviderRegion) -> Result<Region> {
        self.settled(handle, "deregister", |held| {
            held.get().check_unbound("deregister")?;
            Ok(held.remove())
        })
    }

    /// Locks the table for reading, so that every region stays registered. During an inline post
    /// the driver reads memory, which another thread could otherwise deregister and free.
    pub(super) fn hold(&self) -> Held<'_> {
        Held(self.map.read())
    }

    /// Returns true if a check found that the memory of the region was revoked. Returns false for a
    /// handle that names no region.
    pub(super) fn is_revoked(&self, region: ProviderRegion) -> bool {
        let map = self.map.read_recursive();
        map.get(&region.token).is_some_and(|region| region.revoked.load(Ordering::Acquire))
    }

    /// Calls `with` with a region, under the table's read lock. So no thread deregisters the region
    /// during the call.
    ///
    /// # Errors
    /// - The error of `with`.
    /// - InvalidArgument: the region is not in the table.
    /// - Busy: another thread is changing the region.
    pub(super) fn with<T>(
        &self,
        region: ProviderRegion,
        operation: &'static str,
        with: impl FnOnce(&Region) -> Result<T>,
    ) -> Result<T> {
        let map = self.map.read_recursive();
        let region = map.get(&region.token).ok_or_else(|| unknown(operation))?;
        if matches!(region.kind, Kind::Changing(_)) {
            Err(changing(operation))
        } else {
            with(region)
        }
    }

    /// Returns the staged region that a local segment names, with the rights of the region. Returns
    /// `None` for an empty segment, and if the NIC accesses the memory directly.
    pub(super) fn staged(&self, segment: &LocalSegment) -> Option<(Arc<StagedRegion>, Access)> {
        let desc = segment.desc.filter(|_| segment.len > 0)?;
        let map = self.map.read_recursive();
        let region = map.get(&desc.to_provider())?;
        let Kind::Staged(staged) = &region.kind else { return None };
        Some((Arc::clone(staged), region.access))
    }

    /// Checks a local segment, and returns the staged region that the segment names ([`staged`]).
    /// Does not check the bounds of a segment in a staged region.
    ///
    /// # Errors
    /// - AccessDenied: the region lacks `right`.
    /// - NoRegion: the descriptor names no open region of the domain, or a segment that is not
    ///   empty has no descriptor.
    /// - OutOfBounds: a directly accessed segment is not inside its region.
    /// - Busy: another thread is changing the rights of the region.
    ///
    /// [`staged`]: Self::staged
    pub(super) fn local(
        &self,
        segment: &LocalSegment,
        right: Access,
    ) -> Result<Option<Arc<StagedRegion>>> {
        let Some((staged, access)) = self.staged(segment) else {
            self.hold().translate(segment, right, &mut Vec::new())?;
            return Ok(None);
        };
        if !access.contains(right) {
            return Err(Error::new(ErrorKind::AccessDenied, "post")
                .provider("verbs")
                .context("address", segment.address)
                .context("length", segment.len)
                .context("access", access)
                .remedy("register the region with the right that this request needs"));
        }
        Ok(Some(staged))
    }

    /// Returns the numbers of open regions, of their registrations and of registered bytes, without
    /// the staging buffers. All other fields are 0.
    pub(super) fn live(&self) -> LiveObjects {
        let mut live = LiveObjects::default();
        let map = self.map.read();
        for region in map.values().filter(|region| !matches!(region.kind, Kind::Buffers)) {
            live.regions += 1;
            live.page_registrations += region.parts.len() as u64;
            live.bytes += region.parts.iter().map(|part| part.key.range.len()).sum::<u64>();
        }
        live
    }

    /// Deregisters a region that [`Regions::take`] removed from the table. If the driver refuses,
    /// the region returns to the table with its remaining registrations, and the caller can retry.
    pub(super) fn deregister(
        &self,
        pd: &ProtectionDomain,
        handle: ProviderRegion,
        mut region: Region,
    ) -> Result<()> {
        while let Some(part) = region.parts.pop() {
            if let Err(error) = release(pd, &part) {
                region.parts.push(part);
                self.map.write().insert(handle.token, region);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Deregisters all remaining regions of a domain that is being dropped.
    pub(super) fn clear(&self, pd: &ProtectionDomain) {
        let map = std::mem::take(&mut *self.map.write());
        let left = map.values().filter(|region| !matches!(region.kind, Kind::Buffers)).count();
        if left > 0 {
            let nic = &pd.device.nic;
            tracing::warn!(%nic, regions = left, "a domain was dropped with open regions");
        }
        for part in map.into_values().flat_map(|region| region.parts) {
            if let Err(error) = release(pd, &part) {
                let range = part.key.range;
                tracing::error!(
                    error = %error.full(),
                    %range,
                    "a region stays registered until the process ends"
                );
            }
        }
    }

    /// Returns the region's remote key. Returns `None` in three cases:
    ///
    /// - The remote key is `handle.key`: the region has one registration under the application's
    ///   addresses, and the rkey has not changed since [`Regions::insert`].
    /// - The table does not have the region.
    /// - The region has no registration.
    ///
    /// # Errors
    /// - KeyNotAvailable: the region is staged.
    /// - Busy: another thread is changing the region.
    pub(super) fn remote_key(&self, handle: ProviderRegion) -> Result<Option<RemoteKey>> {
        let map = self.map.read();
        let Some(region) = map.get(&handle.token) else { return Ok(None) };
        let mut pieces = region.pieces();
        match region.kind {
            Kind::Staged(_) => return Err(no_remote_key("key")),
            Kind::Changing(_) => return Err(changing("key")),
            Kind::Registered | Kind::Buffers => {}
        }
        let Some(first) = pieces.next() else { return Ok(None) };
        let rest: Vec<_> = pieces.collect();
        let usual = rest.is_empty() && !region.is_shifted() && first.key == handle.key;
        Ok((!usual).then(|| RemoteKey::split(region.addressing(), first, rest)))
    }

    pub(super) fn raw_key(&self, handle: ProviderRegion) -> Result<RawKey> {
        self.with(handle, "raw key", |region| {
            if matches!(region.kind, Kind::Staged(_)) {
                return Err(no_remote_key("raw_attr"));
            }
            Ok(raw_key::encode(region.addressing(), region.pieces()))
        })
    }
}

/// Read lock of the table of regions. While it is held, no thread removes a region.
pub(super) struct Held<'a>(RwLockReadGuard<'a, FxHashMap<u64, Region>>);

impl Held<'_> {
    /// Returns the keys of a region's only registration, if the region has the right and contains
    /// the local segment. In all other cases returns `None`.
    #[inline]
    pub(super) fn single(
        &self,
        local: &LocalSegment,
        right: Access,
    ) -> Option<(PartKey, CpuAccess)> {
        let region = self.0.get(&local.desc?.to_provider())?;
        let [part] = &region.parts[..] else { return None };
        let range = part.key.range;
        let into = local.address.0.checked_sub(range.start().0)?;
        let inside = into <= range.len() && local.len <= range.len() - into;
        (inside && region.access.contains(right)).then_some((part.key, region.cpu))
    }

    /// Translates a local segment to [`Span`]s, and adds them to `out`. Checks the right `right`
    /// and the bounds of the region, since a violation that the NIC detects ends the connection.
    pub(super) fn translate(
        &self,
        &LocalSegment { desc, address, len }: &LocalSegment,
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
                "pass the descriptor of the region that holds the memory",
            ));
        };
        let region = self.0.get(&desc.to_provider()).ok_or_else(|| {
            refuse(ErrorKind::NoRegion, "pass a descriptor of an open region of this domain")
        })?;
        if matches!(region.kind, Kind::Changing(_)) {
            return Err(changing("post").context("address", address).context("length", len));
        }
        if !region.access.contains(right) {
            return Err(refuse(
                ErrorKind::AccessDenied,
                "register the region with the right that this request needs",
            )
            .context("access", region.access)
            .context("needed", right));
        }
        if len > 0 && matches!(region.kind, Kind::Staged(_)) {
            return Err(refuse(
                ErrorKind::Unsupported,
                "use host memory or a direct path for atomics: this region is accessed through \
                 staged copies, which cannot be atomic",
            ));
        }
        let before = out.len();
        if region.spans(address, len, out).is_none() {
            out.truncate(before);
            return Err(refuse(ErrorKind::OutOfBounds, "use a segment inside its region"));
        }
        Ok(region.cpu)
    }
}

/// Deregisters one registration.
pub(super) fn release(pd: &ProtectionDomain, part: &RegionPart) -> Result<()> {
    let deregister = pd.device.library.functions.dereg_mr;
    // SAFETY: the part was registered in this domain. The caller removed the part from the table,
    // so no other thread uses it.
    pd.device.check_destroyed("ibv_dereg_mr", unsafe { deregister(part.mr) }).map_err(|error| {
        error
            .context("range", part.key.range)
            .remedy("free the windows first that other code has bound to the region")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// LIFE-07
    #[test]
    fn region_stays_revoked_while_its_rights_change() {
        let regions = Regions::default();
        let region = regions.insert(Region::without_parts(Access::empty(), Kind::Registered));
        let set = |region: &Region| region.set_revoked(&[], "check region");
        regions.with(region, "check region", set).expect("mark");
        let changed = regions.change(region, "change", |_| {
            assert!(regions.is_revoked(region), "during the change");
            Ok(())
        });
        changed.expect("change");
        assert!(regions.is_revoked(region), "after the change");
    }
}
