//! A NIC of the fabric: its table of regions, its limits, and who shares them.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{Error, ErrorKind, ProcessMark, Result, provider::ProviderAttr};
use parking_lot::{Mutex, RwLock};

use super::{
    atomic::AtomicLocks,
    config::Config,
    endpoint::EndpointState,
    keys,
    table::{DomainSlot, Table},
};

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
    pub(super) table: Table,
    pub(super) atomics: AtomicLocks,
    domains: Mutex<Domains>,
    regions: AtomicU64,
    pinned: AtomicU64,
}

#[derive(Debug, Default)]
struct Domains {
    last_id: u32,
    slots: u32,
    free_slots: Vec<u32>,
}

impl Nic {
    fn new(name: &str, config: &Config) -> Result<Self> {
        let mut attr = config.attr.clone();
        attr.nic.name = name.to_owned();
        let narrow = attr.key_size == 4;
        Ok(Self {
            attr,
            config: config.clone(),
            table: Table::new(keys::random()?, narrow),
            atomics: AtomicLocks::default(),
            domains: Mutex::default(),
            regions: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
        })
    }

    /// Numbers a new domain.
    pub(super) fn admit_domain(&self) -> DomainSlot {
        let mut domains = self.domains.lock();
        domains.last_id += 1;
        let slot = domains.free_slots.pop().unwrap_or_else(|| {
            domains.slots += 1;
            domains.slots - 1
        });
        let domain = DomainSlot { id: domains.last_id, slot };
        self.table.admit(domain);
        domain
    }

    /// Takes the slot of a closed domain back.
    pub(super) fn dismiss_domain(&self, domain: DomainSlot) {
        self.domains.lock().free_slots.push(domain.slot);
    }

    /// Counts a registration of `bytes` against the limits, where there are any.
    #[inline]
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        if self.config.limit_regions {
            take(&self.regions, 1, self.attr.max_mr_count, "max_mr_count")?;
        }
        if let Some(limit) = self.config.max_pinned_bytes
            && let Err(error) = take(&self.pinned, bytes, limit, "max_pinned_bytes")
        {
            if self.config.limit_regions {
                self.regions.fetch_sub(1, Ordering::Relaxed);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Takes back what [`Nic::reserve`] counted.
    #[inline]
    pub(super) fn release(&self, bytes: u64) {
        if self.config.limit_regions {
            self.regions.fetch_sub(1, Ordering::Relaxed);
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
