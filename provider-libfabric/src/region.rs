//! Regions. A region has one or several registrations (`fid_mr`) under one handle.

#![allow(unsafe_code, reason = "shares pointers to libfabric's objects between threads")]

use std::{
    ffi::{c_int, c_void},
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use hmem_core::{
    Access, AddressRange, Addressing, Error, ErrorKind, Iova, LocalKey, RemoteKey, RemotePiece,
    Result,
    provider::{LiveObjects, ProviderRegion},
    random::random_u64,
    transfer::LocalSegment,
};
use hmem_p2p::staging::StagedRegion;
use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::sys::{FI_KEY_NOTAVAIL, fid_mr};

/// The rights that a region needs at libfabric for requests of the domain's own endpoints.
pub(super) const LOCAL_RIGHTS: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);

/// One registration of a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) mr: *mut fid_mr,
    /// The registered range, in addresses of the application.
    pub(super) range: AddressRange,
    /// The address by which peers name the first byte: the application's address, or 0.
    pub(super) base: u64,
    /// The key for peers, or `FI_KEY_NOTAVAIL` if the region has no remote rights.
    pub(super) key: u64,
    /// The descriptor for local segments of requests.
    pub(super) desc: *mut c_void,
    /// libfabric's numbers for the iface and the device of the memory.
    pub(super) owner: (c_int, u64),
}

// SAFETY: libfabric's objects belong to no thread. The domain's lock serialises the calls if the
// program opened the domain so.
unsafe impl Send for Part {}
// SAFETY: a shared reference only allows reads of the fields.
unsafe impl Sync for Part {}

/// The registrations of a region, in the order of its ranges. Most regions have only one, which is
/// stored without an allocation.
pub(super) type Parts = SmallVec<[Part; 1]>;

/// A region of a domain.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) parts: Parts,
    pub(super) addressing: Addressing,
    pub(super) access: Access,
    pub(super) kind: Kind,
}

/// The memory of a region.
#[derive(Debug)]
pub(super) enum Kind {
    /// Host memory, whose bytes a post may copy.
    Host,
    /// Memory of a device, or a dma-buf, that libfabric reaches.
    Direct,
    /// A dma-buf that libfabric would access as host memory in local requests, by an address that
    /// the CPU does not have. Only peers access it.
    RemoteOnly,
    /// Memory that requests move through the staging buffers. The region has no registrations.
    Staged(Arc<StagedRegion>),
    /// The staging buffers of the domain.
    Buffers,
}

impl Region {
    /// Returns true if a post may copy the bytes.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.kind, Kind::Host | Kind::Buffers)
    }

    /// Refuses a caller that asks for the key of a staged region.
    ///
    /// # Errors
    /// KeyNotAvailable: the region is staged.
    pub(super) fn check_has_key(&self) -> Result<()> {
        if matches!(self.kind, Kind::Staged(_)) {
            let why = "let this side write to the peer, read from it or exchange messages: peers \
                       cannot reach memory through copies, so it has no key";
            return Err(Error::new(ErrorKind::KeyNotAvailable, "key")
                .provider("libfabric")
                .context("path", "staged")
                .remedy(why));
        }
        Ok(())
    }

    /// Returns the remote key of a region with several registrations, and otherwise `None`.
    pub(super) fn composite_key(&self) -> Option<RemoteKey> {
        let piece = |part: &Part| RemotePiece {
            base: Iova(part.base),
            len: part.range.len(),
            key: part.key,
        };
        let (first, rest) = self.parts.split_first().filter(|(_, rest)| !rest.is_empty())?;
        let rest = rest.iter().map(piece).collect();
        Some(RemoteKey::split(self.addressing, piece(first), rest))
    }
}

/// Table of the regions of a domain, by token.
#[derive(Debug)]
pub(super) struct Regions {
    map: RwLock<FxHashMap<u64, Region>>,
    next: AtomicU64,
    /// The number of staged regions.
    staged: AtomicUsize,
}

impl Regions {
    /// Creates a table whose first token is a random number, so that another domain's descriptor
    /// names no region.
    pub(super) fn new() -> Result<Self> {
        let next = AtomicU64::new(random_u64("libfabric")?);
        Ok(Self { map: RwLock::default(), next, staged: AtomicUsize::new(0) })
    }

    /// Adds a region. Its token was never used before.
    pub(super) fn insert(&self, region: Region) -> ProviderRegion {
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let key = region.parts.first().map_or(FI_KEY_NOTAVAIL, |part| part.key);
        self.count_staged(&region, 1);
        self.map.write().insert(token, region);
        ProviderRegion { token, local: LocalKey::from_provider(token), key }
    }

    /// Adds `change` to the number of staged regions if `region` is one of them.
    fn count_staged(&self, region: &Region, change: isize) {
        if matches!(region.kind, Kind::Staged(_)) {
            self.staged.fetch_add(change.cast_unsigned(), Ordering::AcqRel);
        }
    }

    /// Returns true if a region is staged.
    pub(super) fn has_staged(&self) -> bool {
        self.staged.load(Ordering::Acquire) > 0
    }

    /// Returns the staged region that a descriptor names. Returns `None` if the descriptor names no
    /// region, or one that is not staged.
    ///
    /// # Errors
    /// AccessDenied: the region lacks the right `right`.
    pub(super) fn staged(
        &self,
        desc: LocalKey,
        right: Access,
    ) -> Result<Option<Arc<StagedRegion>>> {
        let map = self.map.read();
        let Some(region) = map.get(&desc.to_provider()) else { return Ok(None) };
        let Kind::Staged(staged) = &region.kind else { return Ok(None) };
        if !region.access.contains(right) {
            return Err(Error::new(ErrorKind::AccessDenied, "post")
                .provider("libfabric")
                .context("needs", right)
                .remedy("register the memory with this right"));
        }
        Ok(Some(Arc::clone(staged)))
    }

    /// Calls `read` with a region, which no other thread can remove meanwhile. If `read` calls
    /// libfabric, the caller holds the lock of the domain.
    ///
    /// # Errors
    /// - InvalidArgument: the region is not open in this domain.
    /// - The error of `read`.
    pub(super) fn with<T>(
        &self,
        region: ProviderRegion,
        operation: &'static str,
        read: impl FnOnce(&Region) -> Result<T>,
    ) -> Result<T> {
        self.map.read().get(&region.token).ok_or_else(|| unknown(operation)).and_then(read)
    }

    /// Finds the registration that contains a local segment, and calls `read` with the region and
    /// the registration. Checks the right `right` only if `checked` is true. Returns `None` for an
    /// empty segment of a staged region.
    ///
    /// # Errors
    /// - Unsupported: only peers access the region, or it is staged. Only atomics get here with a
    ///   staged region.
    /// - NoRegion: the descriptor is not that of a region of this domain.
    /// - OutOfBounds: the segment is not inside one range of its region.
    /// - AccessDenied: the region lacks the right.
    pub(super) fn local<T>(
        &self,
        segment: &LocalSegment,
        desc: LocalKey,
        (right, checked): (Access, bool),
        read: impl FnOnce(&Region, &Part) -> T,
    ) -> Result<Option<T>> {
        let refuse = |kind, why: &'static str| {
            Error::new(kind, "post")
                .provider("libfabric")
                .context("address", segment.address)
                .context("length", segment.len)
                .remedy(why)
        };
        let map = self.map.read();
        let region = map.get(&desc.to_provider()).ok_or_else(|| {
            refuse(ErrorKind::NoRegion, "pass the descriptor of an open region of this domain")
        })?;
        if matches!(region.kind, Kind::Staged(_)) {
            let why = "keep the operands in host memory: staged copies cannot be atomic";
            return match segment.len {
                0 => Ok(None),
                _ => Err(refuse(ErrorKind::Unsupported, why)),
            };
        }
        if matches!(region.kind, Kind::RemoteOnly) {
            let why =
                "register the memory again with local rights alone, so that copies are staged";
            return Err(refuse(ErrorKind::Unsupported, why));
        }
        let inside = |part: &&Part| {
            let start = segment.address.0.checked_sub(part.range.start().0);
            start.is_some_and(|start| {
                start <= part.range.len() && segment.len <= part.range.len() - start
            })
        };
        let part = region.parts.iter().find(inside).ok_or_else(|| {
            refuse(ErrorKind::OutOfBounds, "pass bytes inside one range of the region")
        })?;
        if checked && !region.access.contains(right) {
            return Err(refuse(ErrorKind::AccessDenied, "register the memory with this right")
                .context("needs", right));
        }
        Ok(Some(read(region, part)))
    }

    /// Removes a region.
    ///
    /// # Errors
    /// InvalidArgument: the region is not open in this domain.
    pub(super) fn take(&self, region: ProviderRegion, operation: &'static str) -> Result<Region> {
        let taken = self.map.write().remove(&region.token).ok_or_else(|| unknown(operation))?;
        self.count_staged(&taken, -1);
        Ok(taken)
    }

    /// Puts a region back that [`Self::take`] removed.
    pub(super) fn put_back(&self, token: ProviderRegion, region: Region) {
        self.count_staged(&region, 1);
        self.map.write().insert(token.token, region);
    }

    /// Removes all regions and returns them.
    pub(super) fn take_all(&self) -> impl Iterator<Item = Region> + use<> {
        mem::take(&mut *self.map.write()).into_values()
    }

    pub(super) fn live(&self) -> LiveObjects {
        let map = self.map.read();
        let own = |region: &&Region| !matches!(region.kind, Kind::Buffers);
        let parts = || map.values().filter(own).flat_map(|region| &region.parts);
        let mut live = LiveObjects::default();
        live.regions = map.values().filter(own).count() as u64;
        live.page_registrations = parts().count() as u64;
        live.bytes = parts().map(|part| part.range.len()).sum();
        live
    }
}

fn unknown(operation: &'static str) -> Error {
    Error::new(ErrorKind::InvalidArgument, operation)
        .provider("libfabric")
        .remedy("use an open region of this domain")
}
