//! Regions: one or several registrations presented as one.

use std::{
    collections::hash_map::{Entry, OccupiedEntry},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    Access, Address, AddressRange, Addressing, Error, ErrorKind, Iova, LocalKey, RawKey, RemoteKey,
    RemotePiece, Result, provider::ProviderRegion, transfer::LocalSegment,
};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::{
    access::VerbsOptions,
    device::ProtectionDomain,
    errors, raw_key,
    split::Span,
    staged::StagedRegion,
    sys::{AccessFlags, Mr},
};

/// The keys of one registration, as any code that works on the same protection domain can use them
/// (VRB-04).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsKey {
    /// The application's addresses.
    pub range: AddressRange,
    /// The start of the range in the NIC's addresses: the application's, or 0 with ZERO_BASED.
    pub base: u64,
    /// For local segments.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// An `ibv_mr` with its keys.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) mr: *mut Mr,
    pub(super) key: VerbsKey,
}

// SAFETY: libibverbs objects may be used from any thread; the region that holds the part is the
// only one to deregister it.
unsafe impl Send for Part {}
// SAFETY: a shared reference is only read. Its key is plain data, and drivers are handed the
// pointer under the table's lock, or by the thread that took the region out.
unsafe impl Sync for Part {}

/// The registrations of a region, in the order of its ranges: most have one, and allocate nothing
/// for it.
pub(super) type Parts = SmallVec<[Part; 1]>;

/// The CPU's access to a region's memory.
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
    pub(super) parts: Parts,
    pub(super) kind: Kind,
}

/// The owner of a region, and the NIC's access to it.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    /// The application's, registered with the NIC.
    Registered,
    /// The application's, reached through the staging buffers.
    Staged(Arc<StagedRegion>),
    /// The staging buffers.
    Buffers,
    /// Stands in for a region whose rights a driver call is changing. The thread that changes them
    /// holds the lock.
    Changing(Arc<Mutex<()>>),
}

/// The NIC's access to local memory of a request.
#[derive(Debug)]
pub(super) enum Local {
    Plain,
    Staged(Arc<StagedRegion>),
}

/// Local keys from here up name regions whose lkey cannot stand for them: several, or not the
/// application's addresses.
const NAMED: u64 = 1 << 63;

/// The regions of a domain, by local key.
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: RwLock<FxHashMap<u64, Region>>,
    next: AtomicU64,
}

fn unknown(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("verbs")
        .remedy("the region is not registered here, or is closed")
}

fn changing(operation: &'static str) -> Error {
    Error::new(ErrorKind::Busy, operation)
        .provider("verbs")
        .remedy("another thread is changing the region's rights: wait until `rereg` has returned")
}

/// Returns the error for a key of staged memory, which peers cannot reach.
fn no_remote_key(operation: &'static str) -> Error {
    Error::new(ErrorKind::KeyNotAvailable, operation).provider("verbs").context("path", "staged").remedy(
        "a peer's NIC cannot reach memory through copies: let this side write, read or exchange messages, or make a \
         direct path work",
    )
}

impl Region {
    fn addressing(&self) -> Addressing {
        if self.flags.contains(AccessFlags::ZERO_BASED) {
            Addressing::ZeroBased
        } else {
            Addressing::Virtual
        }
    }

    fn pieces(&self) -> impl ExactSizeIterator<Item = RemotePiece> {
        self.parts.iter().map(|part| RemotePiece {
            base: Iova(part.key.base),
            len: part.key.range.len(),
            key: u64::from(part.key.rkey),
        })
    }

    /// Returns the part that holds `address`.
    pub(super) fn part_at(&self, address: Address) -> Option<&Part> {
        self.parts.iter().find(|part| part.key.range.contains(address))
    }

    /// Returns the part and address at `offset` from the region's start, for `len` bytes that lie
    /// in one part.
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

/// A region whose place in the table a stand-in holds. Dropping the value puts the region back.
struct Changed<'a> {
    regions: &'a Regions,
    handle: ProviderRegion,
    region: Region,
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        if let Some(stand_in) = self.regions.map.write().get_mut(&self.handle.token) {
            std::mem::swap(stand_in, &mut self.region);
        }
    }
}

impl Regions {
    pub(super) fn insert(&self, region: Region) -> ProviderRegion {
        let single = region.parts.len() == 1 && region.addressing() == Addressing::Virtual;
        let (lkey, key) =
            region.parts.first().map_or((0, 0), |part| (part.key.lkey, part.key.rkey));
        let known_as = |local| ProviderRegion {
            token: local,
            local: LocalKey::from_provider(local),
            key: u64::from(key),
        };
        let mut map = self.map.write();
        let local = u64::from(lkey);
        if single && let Entry::Vacant(entry) = map.entry(local) {
            entry.insert(region);
            return known_as(local);
        }
        let local = NAMED | self.next.fetch_add(1, Ordering::Relaxed);
        map.insert(local, region);
        known_as(local)
    }

    /// Runs `with` on a region's place in the table. Waits while another thread changes the region,
    /// since the driver handles one call at a time for a registration.
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

    /// Runs `change`, which calls the driver, on a region that is out of the table during the call:
    /// no lock of the table is held over a driver call. A stand-in takes the region's place. It
    /// reserves the region's name, since the keys may pass to other regions, and makes
    /// [`Regions::take`] wait. The region returns to its place after a panic too.
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
                    "a staged region is not registered with the NIC: close it and register again",
                ));
            }
            let stand_in = Region {
                access: Access::empty(),
                flags: AccessFlags::empty(),
                options: VerbsOptions::empty(),
                cpu: CpuAccess::None,
                parts: Parts::new(),
                kind: Kind::Changing(Arc::clone(&lock)),
            };
            Ok(std::mem::replace(held.get_mut(), stand_in))
        })?;
        let mut changed = Changed { regions: self, handle, region };
        change(&mut changed.region)
    }

    /// Takes a region out to deregister it. Waits while another thread changes it.
    pub(super) fn take(&self, handle: ProviderRegion) -> Result<Region> {
        self.settled(handle, "deregister", |held| Ok(held.remove()))
    }

    /// Puts a region back that was taken out.
    pub(super) fn put_back(&self, handle: ProviderRegion, region: Region) {
        self.map.write().insert(handle.token, region);
    }

    /// Keeps every region where it is: a post that copies inline reads memory that a close on
    /// another thread would free.
    pub(super) fn hold(&self) -> Held<'_> {
        Held(self.map.read())
    }

    /// Runs `with` while the region cannot go away.
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

    /// Returns true if a local segment lies in staged memory.
    pub(super) fn is_staged(&self, segment: &LocalSegment) -> bool {
        segment.len > 0
            && segment.desc.is_some_and(|desc| {
                let map = self.map.read_recursive();
                map.get(&desc.to_provider())
                    .is_some_and(|region| matches!(region.kind, Kind::Staged(_)))
            })
    }

    /// Returns how the NIC reaches a local segment, after the checks of [`Held::translate`], for a
    /// right if one is given.
    pub(super) fn local(&self, segment: &LocalSegment, right: Option<Access>) -> Result<Local> {
        let staged = segment.desc.filter(|_| segment.len > 0).and_then(|desc| {
            let map = self.map.read_recursive();
            let region = map.get(&desc.to_provider())?;
            let Kind::Staged(staged) = &region.kind else { return None };
            Some((Arc::clone(staged), region.access))
        });
        let Some((staged, access)) = staged else {
            let right = right.unwrap_or(Access::empty());
            self.hold().translate(
                segment.desc,
                segment.address,
                segment.len,
                right,
                &mut Vec::new(),
            )?;
            return Ok(Local::Plain);
        };
        if right.is_some_and(|right| !access.contains(right)) {
            return Err(Error::new(ErrorKind::AccessDenied, "post")
                .provider("verbs")
                .context("address", segment.address)
                .context("length", segment.len)
                .context("access", access)
                .remedy("register the region with the right that this takes"));
        }
        Ok(Local::Staged(staged))
    }

    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let map = self.map.read();
        let mut counts = (0, 0, 0);
        for region in map.values().filter(|region| !matches!(region.kind, Kind::Buffers)) {
            counts.0 += 1;
            counts.1 += region.parts.len() as u64;
            counts.2 += region.parts.iter().map(|part| part.key.range.len()).sum::<u64>();
        }
        counts
    }

    /// Deregisters a region that was taken out. Puts the registrations that the driver keeps back,
    /// so that the call can be made again.
    pub(super) fn deregister(
        &self,
        pd: &ProtectionDomain,
        handle: ProviderRegion,
        mut region: Region,
    ) -> Result<()> {
        while let Some(part) = region.parts.pop() {
            if let Err(error) = release(pd, &part) {
                region.parts.push(part);
                self.put_back(handle, region);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Deregisters what is left when its domain goes.
    pub(super) fn clear(&self, pd: &ProtectionDomain) {
        let map = std::mem::take(&mut *self.map.write());
        let left = map.values().filter(|region| !matches!(region.kind, Kind::Buffers)).count();
        if left > 0 {
            tracing::warn!(nic = %pd.device.nic(), regions = left, "a domain went with regions open");
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
        let usual = rest.is_empty()
            && region.addressing() == Addressing::Virtual
            && first.key == handle.key;
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

/// The table of regions, locked so that every region stays.
pub(super) struct Held<'a>(RwLockReadGuard<'a, FxHashMap<u64, Region>>);

impl Held<'_> {
    /// Returns the registration that holds a local segment, if the region has only one and grants
    /// the right.
    #[inline]
    pub(super) fn single(
        &self,
        local: &LocalSegment,
        right: Access,
    ) -> Option<(VerbsKey, CpuAccess)> {
        let region = self.0.get(&local.desc?.to_provider())?;
        let [part] = &region.parts[..] else { return None };
        let range = part.key.range;
        let into = local.address.0.checked_sub(range.start().0)?;
        let inside = into <= range.len() && local.len <= range.len() - into;
        (inside && region.access.contains(right)).then_some((part.key, region.cpu))
    }

    /// Translates a local segment. Checks its right and its bounds, over which the NIC would end
    /// the connection.
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
        let region = self.0.get(&desc.to_provider()).ok_or_else(|| {
            refuse(ErrorKind::NoRegion, "the descriptor is of no open region of this domain")
        })?;
        if matches!(region.kind, Kind::Changing(_)) {
            return Err(changing("post").context("address", address).context("length", len));
        }
        if !region.access.contains(right) {
            return Err(refuse(
                ErrorKind::AccessDenied,
                "register the region with the right that this takes",
            )
            .context("access", region.access)
            .context("needed", right));
        }
        if len > 0 && matches!(region.kind, Kind::Staged(_)) {
            return Err(refuse(
                ErrorKind::Unsupported,
                "the region is reached through staged copies, which cannot be atomic: atomics take host memory or a \
                 direct path",
            ));
        }
        let before = out.len();
        if region.spans(address, len, out).is_none() {
            out.truncate(before);
            return Err(refuse(ErrorKind::OutOfBounds, "the segment reaches outside its region"));
        }
        Ok(region.cpu)
    }
}

/// Deregisters one part.
pub(super) fn release(pd: &ProtectionDomain, part: &Part) -> Result<()> {
    let deregister = pd.device.library().functions.dereg_mr;
    // SAFETY: the part was registered in this domain and was taken out of its map, so that nobody
    // else has it.
    errors::status(unsafe { deregister(part.mr) }).map_err(|errno| {
        let error = Error::os(errno, "ibv_dereg_mr")
            .provider(pd.device.nic().to_string())
            .context("range", part.key.range);
        // rxe answers EINVAL where the manual says EBUSY.
        error.remedy("if a memory window is bound to the region, free or unbind it first")
    })
}
