//! Decisions already made, found again without a lock.
//!
//! One slot for each (iface, device, kind of memory, NIC with what it imports, policy) of one [`Paths`](super::Paths);
//! nothing is shared by the process. A slot holds what the next registration of its class tries first, and forgets it
//! when that fails. What one odd buffer ran into is never remembered for others: see [`super::probe`].

use std::{
    fmt,
    hash::{BuildHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::{ArcSwap, ArcSwapOption};
use hashbrown::{DefaultHashBuilder, HashTable};
use hmem_core::{
    AllocationKind, Decision, DeviceId, IfaceKind,
    path::P2pPolicy,
    provider::{Imports, Nic, ProviderAttr},
};
use parking_lot::Mutex;

use super::trial::Way;

/// What decisions are told apart by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key<'a> {
    pub(super) class: Class,
    pub(super) nic: &'a Nic,
}

/// The part of a key that is plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class {
    iface: IfaceKind,
    device: Option<DeviceId>,
    kind: AllocationKind,
    /// The domain's: where direct access is off for the process, it is for all of them.
    policy: P2pPolicy,
    /// Providers of one name may differ in what their NICs import.
    imports: u8,
}

/// In two words instead of one for each field.
impl Hash for Class {
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let device = self.device.map_or(u64::MAX, |device| u64::from(device.0));
        let small = (self.kind as u64) << 16 | (self.policy as u64) << 8 | u64::from(self.imports);
        state.write_u64(device);
        state.write_u64(u64::from(self.iface.0) << 32 | small);
    }
}

impl<'a> Key<'a> {
    #[inline]
    pub(super) fn new(
        iface: IfaceKind,
        device: Option<DeviceId>,
        kind: AllocationKind,
        policy: P2pPolicy,
        attr: &'a ProviderAttr,
    ) -> Self {
        let Imports { dma_buf, pcie_mapping_first, peer_memory, staged } = attr.imports;
        let imports = u8::from(dma_buf)
            | u8::from(pcie_mapping_first) << 1
            | u8::from(peer_memory) << 2
            | u8::from(staged) << 3;
        Self { class: Class { iface, device, kind, policy, imports }, nic: &attr.nic }
    }
}

/// A decision, and the way that it came to.
#[derive(Debug)]
pub(super) struct Decided {
    pub(super) way: Way,
    /// As later registrations keep it: said to be remembered.
    pub(super) decision: Arc<Decision>,
}

/// The place of one key.
#[derive(Debug)]
pub(super) struct Slot {
    class: Class,
    nic: Nic,
    decided: ArcSwapOption<Decided>,
    /// Buffers that a driver refused a direct way.
    refused: AtomicU32,
}

impl Slot {
    /// What was decided.
    #[inline]
    pub(super) fn decided(&self) -> Option<Arc<Decided>> {
        self.decided.load_full()
    }

    pub(super) fn remember(&self, way: Way, decision: Arc<Decision>) {
        self.decided.store(Some(Arc::new(Decided { way, decision })));
    }

    /// Forgets a decision that failed, unless another took its place meanwhile.
    pub(super) fn forget(&self, failed: &Arc<Decided>) {
        self.decided.compare_and_swap(failed, None);
    }

    /// Counts a buffer that was refused, and says whether it is time to look at an ordinary page: at the first,
    /// second, fourth, eighth. Odd buffers thus cost few probes, and a pair that broke later is noticed.
    pub(super) fn count_refused(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_power_of_two()
    }
}

/// The slots.
pub(super) struct Cache {
    /// Replaced as a whole when a slot is added: readers take no lock.
    slots: ArcSwap<HashTable<Arc<Slot>>>,
    adding: Mutex<()>,
    hasher: DefaultHashBuilder,
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            slots: ArcSwap::from_pointee(HashTable::new()),
            adding: Mutex::new(()),
            hasher: DefaultHashBuilder::default(),
        }
    }
}

impl Cache {
    #[inline]
    fn hash(&self, class: Class, nic: &Nic) -> u64 {
        // The bus id says nothing more.
        self.hasher.hash_one((class, nic.name.as_str(), nic.provider.as_str()))
    }

    /// The decision of a key, for those who only want to know it.
    #[inline]
    pub(super) fn decision(&self, key: &Key<'_>) -> Option<Arc<Decision>> {
        let slots = self.slots.load();
        let slot = find(&slots, self.hash(key.class, key.nic), key)?;
        slot.decided.load().as_ref().map(|decided| Arc::clone(&decided.decision))
    }

    /// The decision of a key, with its way.
    #[inline]
    pub(super) fn decided(&self, key: &Key<'_>) -> Option<Arc<Decided>> {
        let slots = self.slots.load();
        find(&slots, self.hash(key.class, key.nic), key)?.decided()
    }

    /// The slot of a key, made if it is new.
    pub(super) fn slot(&self, key: &Key<'_>) -> Arc<Slot> {
        let hash = self.hash(key.class, key.nic);
        if let Some(slot) = find(&self.slots.load(), hash, key) {
            return Arc::clone(slot);
        }
        let _adding = self.adding.lock();
        let slots = self.slots.load();
        if let Some(slot) = find(&slots, hash, key) {
            return Arc::clone(slot);
        }
        let slot = Arc::new(Slot {
            class: key.class,
            nic: key.nic.clone(),
            decided: ArcSwapOption::empty(),
            refused: AtomicU32::new(0),
        });
        let mut more = HashTable::clone(&slots);
        more.insert_unique(hash, Arc::clone(&slot), |slot| self.hash(slot.class, &slot.nic));
        self.slots.store(Arc::new(more));
        slot
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        let _adding = self.adding.lock();
        self.slots.store(Arc::new(HashTable::new()));
    }
}

#[inline]
fn find<'a>(slots: &'a HashTable<Arc<Slot>>, hash: u64, key: &Key<'_>) -> Option<&'a Arc<Slot>> {
    slots.find(hash, |slot| {
        slot.class == key.class && slot.nic.name == key.nic.name && slot.nic.provider == key.nic.provider
    })
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.slots.load().iter()).finish()
    }
}
