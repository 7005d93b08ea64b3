//! A NIC of the fabric: its table of regions, its limits, and who shares them.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

use hmem_core::{Error, ErrorKind, ProcessMark, Result, provider::ProviderAttr};
use parking_lot::RwLock;

use super::{atomic::AtomicLocks, config::Config, endpoint::EndpointState, keys, regions::Regions};

/// What all NICs share: the wire, that is who can be reached by which name.
pub(super) struct Fabric {
    /// Goes into endpoint names, so that a name of another fabric is told apart.
    pub(super) id: u64,
    pub(super) nics: Vec<Arc<Nic>>,
    endpoints: RwLock<HashMap<u64, Weak<EndpointState>>>,
    /// The process that made the fabric, the only one in which it opens domains: a forked child
    /// may have copied locks that another thread held.
    pub(super) process: ProcessMark,
}

impl Fabric {
    pub(super) fn new(names: &[String], config: &Config) -> Result<Self> {
        let nics =
            names.iter().map(|name| Nic::new(name, config).map(Arc::new)).collect::<Result<_>>()?;
        let process = ProcessMark::current()?;
        Ok(Self { id: keys::random()?, nics, endpoints: RwLock::default(), process })
    }

    pub(super) fn attach(&self, endpoint: &Arc<EndpointState>) {
        self.endpoints.write().insert(endpoint.id, Arc::downgrade(endpoint));
    }

    pub(super) fn detach(&self, id: u64) {
        self.endpoints.write().remove(&id);
    }

    pub(super) fn find(&self, id: u64) -> Option<Arc<EndpointState>> {
        self.endpoints.read().get(&id).and_then(Weak::upgrade)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric").field("nics", &self.nics).finish_non_exhaustive()
    }
}

/// One NIC.
pub(super) struct Nic {
    pub(super) attr: ProviderAttr,
    pub(super) config: Config,
    pub(super) regions: Regions,
    pub(super) atomics: AtomicLocks,
    last_domain: AtomicU32,
    registered: AtomicU64,
    pinned: AtomicU64,
}

impl Nic {
    fn new(name: &str, config: &Config) -> Result<Self> {
        let mut attr = config.attr.clone();
        attr.nic.name = name.to_owned();
        let narrow = attr.key_size == 4;
        Ok(Self {
            attr,
            config: config.clone(),
            regions: Regions::new(narrow),
            atomics: AtomicLocks::default(),
            last_domain: AtomicU32::new(0),
            registered: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
        })
    }

    /// Numbers a new domain; numbers are not reused.
    pub(super) fn number_domain(&self) -> u32 {
        self.last_domain.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Counts a registration of `bytes` against the limits, where there are any.
    #[inline]
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        if self.config.limit_regions {
            take(&self.registered, 1, self.attr.max_mr_count, "max_mr_count")?;
        }
        if let Some(limit) = self.config.max_pinned_bytes
            && let Err(error) = take(&self.pinned, bytes, limit, "max_pinned_bytes")
        {
            if self.config.limit_regions {
                self.registered.fetch_sub(1, Ordering::Relaxed);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Takes back what [`Nic::reserve`] counted.
    #[inline]
    pub(super) fn release(&self, bytes: u64) {
        if self.config.limit_regions {
            self.registered.fetch_sub(1, Ordering::Relaxed);
        }
        if self.config.max_pinned_bytes.is_some() {
            self.pinned.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nic").field("attr", &self.attr).finish_non_exhaustive()
    }
}

fn take(used: &AtomicU64, more: u64, limit: u64, name: &'static str) -> Result<()> {
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
        now.checked_add(more).filter(|sum| *sum <= limit)
    })
    .map(|_| ())
    .map_err(|now| {
        Error::new(ErrorKind::OutOfResources, "register")
            .provider("loopback")
            .context("limit", name)
            .context("value", limit)
            .context("in use", now)
            .context("asked for", more)
            .remedy("close regions, or raise the limit")
    })
}
