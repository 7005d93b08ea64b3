//! The constant parts of a libfabric domain that has endpoints.
//!
//! They include the limits of the domain, and the memory for liveness checks (`engine/peers.rs`).
//! In a liveness check, a domain reads a number from the memory of a peer's domain. If the read
//! returns the expected number, the peer's process still runs.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    Address, AddressRange, Registry, Result,
    provider::{MsgOrder, ProviderAttr},
    random::random_u64,
};

use super::{
    fellows::Fellows,
    listing::Entry,
    open::OpenDomain,
    peer_name::Alive,
    plan::Limits,
    region::{Part, Regions},
    staging::Staging,
    sys,
};

/// A domain's memory for liveness checks. The first word is a random number, which peers read to
/// check this domain. The other words receive the numbers that this domain reads from its peers.
#[derive(Debug)]
pub(super) struct AliveMemory {
    words: Box<[AtomicU64]>,
}

impl AliveMemory {
    const WORDS: usize = 64;

    pub(super) fn new() -> Result<Self> {
        let words: Box<[AtomicU64]> = (0..Self::WORDS).map(|_| AtomicU64::new(0)).collect();
        words[0].store(random_u64("libfabric")?, Ordering::Relaxed);
        Ok(Self { words })
    }

    pub(super) fn range(&self) -> Result<AddressRange> {
        let start = Address(self.words.as_ptr().expose_provenance() as u64);
        AddressRange::new(start, 8 * Self::WORDS as u64)
    }

    pub(super) fn number(&self) -> u64 {
        self.words[0].load(Ordering::Relaxed)
    }

    /// Returns the word that receives the peer's number in a liveness check, and the address of the
    /// word. `question` is the number of the check.
    pub(super) fn answer(&self, question: usize) -> (&AtomicU64, u64) {
        let word = &self.words[1 + question % (Self::WORDS - 1)];
        (word, std::ptr::from_ref(word).expose_provenance() as u64)
    }
}

/// The constant parts of a domain with endpoints.
pub(super) struct Hub {
    pub(super) open: Arc<OpenDomain>,
    pub(super) regions: Arc<Regions>,
    pub(super) registry: Arc<Registry>,
    /// True if the registry has an iface for device memory. Most registries have none, and plans
    /// then need not look up the owner of memory.
    pub(super) has_devices: bool,
    pub(super) entry: Entry,
    pub(super) limits: Limits,
    pub(super) fellows: Arc<Fellows>,
    /// True for a provider that reaches this machine only, through shared memory. Such a provider
    /// does not report the end of a peer's process.
    pub(super) local_only: bool,
    /// True for a provider over verbs, which reports the status of failed work completions. Such a
    /// failure ends the connection.
    pub(super) verbs: bool,
    /// The memory for liveness checks and its registration. `None` in ENDPOINT mode, in RAW mode
    /// and if `local_only` is true. The domain then exposes no such memory.
    pub(super) alive: Option<(AliveMemory, Part)>,
    pub(super) staging: Staging,
}

impl Hub {
    pub(super) fn attr(&self) -> &ProviderAttr {
        &self.open.attr.provider_attr
    }

    pub(super) fn has(&self, caps: u64) -> bool {
        self.open.attr.caps & caps == caps
    }

    /// Returns true if the NIC orders the writes to a peer.
    pub(super) fn orders_writes(&self) -> bool {
        self.attr().order.intersects(MsgOrder::WAW | MsgOrder::RMA_WAW)
    }

    /// Returns true if local segments need descriptors.
    pub(super) fn needs_desc(&self) -> bool {
        self.open.attr.mr_mode & sys::FI_MR_LOCAL != 0
    }

    /// Returns the address, key and number by which peers check this domain.
    pub(super) fn exposed(&self) -> Option<Alive> {
        self.alive.as_ref().map(|(memory, part)| Alive {
            address: part.base,
            key: part.key,
            number: memory.number(),
        })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if let Some((_, part)) = self.alive.take()
            && self.open.process.is_current()
        {
            super::open::close_all(&self.open, &mut [part].into(), "a region stays registered");
        }
    }
}
