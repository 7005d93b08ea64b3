//! The state of a domain: its mode, keys, windows and staging buffers.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::Arc,
};

use hmem_core::{
    AuthKey, ErrorKind, MrMode, ProcessMark, RawKey, Registry, Result,
    provider::{DomainRequest, NicRecord, RevocationListeners, StagingAttr},
};
use hmem_p2p::staging::Pool;
use parking_lot::{Mutex, RwLock};

use super::{
    RemapPolicy,
    keys::{self, DomainKeys, RawParts, Token},
    memory::Pinner,
    nic::Nic,
    progress::Wake,
    regions::Pages,
    window::Windows,
};

/// The state of a domain, shared by its endpoints, its progress thread and the application's
/// handle.
pub(super) struct DomainState {
    pub(super) nic: Arc<Nic>,
    /// The number that identifies the domain on its NIC.
    pub(super) id: u32,
    pub(super) mode: MrMode,
    pub(super) auth_key: AuthKey,
    pub(super) registry: Arc<Registry>,
    pub(super) keys: Arc<DomainKeys>,
    pub(super) wake: Arc<Wake>,
    /// The peers' raw keys that the application has mapped, by the numbers that
    /// [`DomainState::map_raw`] returned.
    pub(super) mapped: RwLock<HashMap<u64, RawParts>>,
    pub(super) windows: Windows,
    /// The pinner of host memory; `None` with [`RemapPolicy::Follow`].
    pub(super) pinner: Option<Pinner>,
    /// The record of the device's loss, and of the events of its port.
    pub(super) record: NicRecord,
    /// The listeners for revoked dma-bufs. The attachments of regions share them.
    pub(super) listeners: Arc<RevocationListeners>,
    /// The process that opened the domain. A forked child must not use the domain: a thread of the
    /// parent, which the child does not have, may hold any lock of the domain.
    pub(super) process: ProcessMark,
    staging: StagingAttr,
    /// The staging buffers; `None` until the first staged region is registered.
    pool: Mutex<Option<Arc<Pool>>>,
}

impl DomainState {
    pub(super) fn open(nic: &Arc<Nic>, request: &DomainRequest) -> Result<Self> {
        let keys = Arc::new(DomainKeys::new(nic.attr.key_size)?);
        let pinner = match nic.config.remap_policy {
            RemapPolicy::Follow => None,
            RemapPolicy::Pinned => Some(Pinner::new()?),
        };
        let id = nic.number_domain();
        let requested_keys = !request.mode.contains(MrMode::PROV_KEY);
        Ok(Self {
            nic: Arc::clone(nic),
            id,
            mode: request.mode,
            auth_key: request.auth_key.clone(),
            registry: Arc::clone(&request.registry),
            windows: Windows::new(nic, id, &keys, requested_keys),
            keys,
            wake: Arc::default(),
            mapped: RwLock::default(),
            pinner,
            record: NicRecord::default(),
            listeners: Arc::default(),
            process: ProcessMark::current()?,
            staging: request.staging,
            pool: Mutex::default(),
        })
    }

    /// Returns true if the application chooses the keys of regions.
    pub(super) fn requested_keys(&self) -> bool {
        !self.mode.contains(MrMode::PROV_KEY)
    }

    /// Returns an error if the device of the domain is lost.
    #[inline]
    pub(super) fn check_nic(&self, operation: &'static str) -> Result<()> {
        self.record.check(&self.nic.attr.nic, operation)
    }

    pub(super) fn deregister(&self, token: Token) -> Result<()> {
        let regions = &self.nic.regions;
        let removed = regions.remove(self.id, token).or_else(|error| {
            // A transfer may still use a window that was unbound when its endpoint closed.
            if error.kind() == ErrorKind::Busy && self.windows.end_bindings_to(token)? {
                regions.remove(self.id, token)
            } else {
                Err(error)
            }
        })?;
        match removed {
            Pages::Own(bytes) => self.nic.release(bytes),
            Pages::Parent(parent) => {
                self.nic.release(0);
                regions.remove_dependent(self.id, parent);
            }
        }
        Ok(())
    }

    /// Frees the windows and deregisters the regions that the application left open.
    pub(super) fn close(&self) {
        self.windows.free_all();
        let mut tokens = self.nic.regions.tokens_of(self.id);
        if !tokens.is_empty() {
            tracing::warn!(
                regions = tokens.len(),
                "a loopback domain was dropped with open regions; deregistering them"
            );
        }
        // A region cannot be deregistered before its sub-regions, so the loop tries again until
        // none is left or no call succeeds.
        while !tokens.is_empty() {
            let before = tokens.len();
            tokens.retain(|token| self.deregister(*token).is_err());
            if tokens.len() == before {
                tracing::error!(
                    regions = before,
                    "cannot deregister the regions of a dropped loopback domain: windows or \
                     sub-regions depend on them"
                );
                return;
            }
        }
    }

    /// Returns the staging buffers. Allocates them at the first call.
    pub(super) fn staging_pool(&self) -> Result<Arc<Pool>> {
        let mut pool = self.pool.lock();
        if let Some(pool) = &*pool {
            return Ok(Arc::clone(pool));
        }
        Ok(Arc::clone(pool.insert(Pool::new(self.staging, None)?)))
    }

    /// Returns the staging buffers if they are allocated.
    pub(super) fn pool(&self) -> Option<Arc<Pool>> {
        self.pool.lock().clone()
    }

    /// Stores a peer's raw key under an unused random number, and returns the number.
    ///
    /// # Errors
    /// - Malformed: the bytes are not a raw key of the NIC's size.
    /// - Unavailable: the random generator of the operating system fails.
    pub(super) fn map_raw(&self, raw: &RawKey) -> Result<u64> {
        let parts = keys::read_raw(raw, self.nic.attr.raw_key_size)?;
        let mut mapped = self.mapped.write();
        loop {
            let number = keys::random()?;
            if let Entry::Vacant(unused) = mapped.entry(number) {
                unused.insert(parts);
                return Ok(number);
            }
        }
    }

    /// Returns the raw key of a region.
    pub(super) fn raw_key(&self, token: Token) -> Result<RawKey> {
        let key = self.nic.regions.key_of(self.id, token)?;
        Ok(keys::write_raw(key, self.keys.cookie(key, token), self.nic.attr.raw_key_size))
    }
}

impl fmt::Debug for DomainState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DomainState")
            .field("nic", &self.nic.attr.nic.name)
            .field("mode", &self.mode)
            .field("auth_key", &self.auth_key)
            .finish_non_exhaustive()
    }
}
