//! Regions. A region has one or several registrations (`fid_mr`) under one handle.

#![allow(unsafe_code, reason = "shares pointers to libfabric's objects between threads")]

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    AddressRange, Addressing, Error, ErrorKind, Iova, LocalKey, RemoteKey, RemotePiece, Result,
    provider::{LiveObjects, ProviderRegion},
};
use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::sys::fid_mr;

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
}

impl Region {
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
#[derive(Debug, Default)]
pub(super) struct Regions {
    map: RwLock<FxHashMap<u64, Region>>,
    next: AtomicU64,
}

impl Regions {
    /// Adds a region with at least one registration. Its token was never used before.
    pub(super) fn insert(&self, region: Region) -> ProviderRegion {
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let key = region.parts[0].key;
        self.map.write().insert(token, region);
        ProviderRegion { token, local: LocalKey::from_provider(token), key }
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

    /// Removes a region.
    ///
    /// # Errors
    /// InvalidArgument: the region is not open in this domain.
    pub(super) fn take(&self, region: ProviderRegion, operation: &'static str) -> Result<Region> {
        self.map.write().remove(&region.token).ok_or_else(|| unknown(operation))
    }

    /// Puts a region back that [`Self::take`] removed.
    pub(super) fn put_back(&self, token: ProviderRegion, region: Region) {
        self.map.write().insert(token.token, region);
    }

    /// Removes all regions.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Region> {
        self.map.get_mut().drain().map(|(_, region)| region)
    }

    pub(super) fn live(&self) -> LiveObjects {
        let map = self.map.read();
        let parts = || map.values().flat_map(|region| &region.parts);
        let mut live = LiveObjects::default();
        live.regions = map.len() as u64;
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
