//! Decisions already made, found again without a lock.
//!
//! One slot for each (iface, device, kind of memory, NIC with what it imports, policy) of one
//! [`Paths`](super::Paths); nothing is shared by the process. A slot holds what the next
//! registration of its class tries first, and forgets it when that fails. What one odd buffer ran
//! into is never remembered for others: see [`super::probe`].
//!
//! Slots are chained in buckets and stay until the cache goes, forgotten ones empty: there are as
//! many as devices and NICs were ever paired, and a reader needs neither a lock nor a count to keep
//! one.

use std::{
    fmt,
    hash::{BuildHasher, Hash, Hasher},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use arc_swap::ArcSwapOption;
use hashbrown::DefaultHashBuilder;
use hmem_core::{
    AllocationKind, Decision, DeviceId, IfaceKind,
    path::P2pPolicy,
    provider::{Imports, Nic, ProviderAttr},
};

use super::trial::Way;

/// A node of eight GPUs and eight NICs has 64 pairs, of which each is used under a policy or two.
const BUCKETS: usize = 128;

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
    fn new(key: &Key<'_>) -> Self {
        Self {
            class: key.class,
            nic: key.nic.clone(),
            decided: ArcSwapOption::empty(),
            refused: AtomicU32::new(0),
        }
    }

    /// Whether it is the key's. The bus id of the NIC says nothing more than its name.
    #[inline]
    fn is_of(&self, key: &Key<'_>) -> bool {
        self.class == key.class
            && self.nic.name == key.nic.name
            && self.nic.provider == key.nic.provider
    }

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

    /// Counts a buffer that was refused, and says whether it is time to look at an ordinary page:
    /// at the first, second, fourth, eighth. Odd buffers thus cost few probes, and a pair that
    /// broke later is noticed.
    pub(super) fn count_refused(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed).wrapping_add(1).is_power_of_two()
    }
}

/// A slot, and the place of the next one of its bucket.
struct Link {
    slot: Slot,
    next: Place,
}

type Place = OnceLock<Box<Link>>;

/// The slots.
pub(super) struct Cache {
    buckets: Box<[Place]>,
    hasher: DefaultHashBuilder,
}

impl Default for Cache {
    fn default() -> Self {
        let buckets = (0..BUCKETS).map(|_| Place::new()).collect();
        Self { buckets, hasher: DefaultHashBuilder::default() }
    }
}

impl Cache {
    #[inline]
    fn bucket(&self, key: &Key<'_>) -> &Place {
        // NICs are numbered: the ends of their names tell those of a machine apart.
        let hash = self.hasher.hash_one((key.class, tail(&key.nic.name)));
        &self.buckets[hash as usize % BUCKETS]
    }

    #[inline]
    fn find(&self, key: &Key<'_>) -> Option<&Slot> {
        let mut place = self.bucket(key);
        while let Some(link) = place.get() {
            if link.slot.is_of(key) {
                return Some(&link.slot);
            }
            place = &link.next;
        }
        None
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        let links = |bucket| std::iter::successors(Place::get(bucket), |link| link.next.get());
        self.buckets.iter().flat_map(links).map(|link| &link.slot)
    }

    /// The decision of a key, for those who only want to know it.
    #[inline]
    pub(super) fn decision(&self, key: &Key<'_>) -> Option<Arc<Decision>> {
        self.find(key)?.decided.load().as_ref().map(|decided| Arc::clone(&decided.decision))
    }

    /// The decision of a key, with its way.
    #[inline]
    pub(super) fn decided(&self, key: &Key<'_>) -> Option<Arc<Decided>> {
        self.find(key)?.decided()
    }

    /// The slot of a key, made if it is new.
    pub(super) fn slot(&self, key: &Key<'_>) -> &Slot {
        let mut place = self.bucket(key);
        loop {
            let link =
                place.get_or_init(|| Box::new(Link { slot: Slot::new(key), next: Place::new() }));
            if link.slot.is_of(key) {
                return &link.slot;
            }
            place = &link.next;
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        for slot in self.slots() {
            slot.decided.store(None);
            slot.refused.store(0, Ordering::Relaxed);
        }
    }
}

/// The last bytes of a name, as one number.
#[inline]
fn tail(name: &str) -> u64 {
    let bytes = name.as_bytes();
    match bytes.last_chunk() {
        Some(last) => u64::from_le_bytes(*last),
        None => bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.slots()).finish()
    }
}

#[cfg(test)]
mod tests {
    use hmem_core::iface::DmaBufMapping;

    use super::*;

    fn decision(reason: &str) -> Arc<Decision> {
        Arc::new(Decision {
            path: hmem_core::Path::Staged,
            reason: reason.to_owned(),
            iface: IfaceKind::CUDA,
            device: None,
            nic: String::new(),
            policy: P2pPolicy::Enabled,
            mapping: DmaBufMapping::Default,
            remembered: true,
            attempts: Vec::new().into(),
        })
    }

    /// As many keys as make buckets of several slots, and names that only their beginnings tell
    /// apart.
    fn classes_and_nics() -> Vec<(Class, Nic)> {
        let mut keys = Vec::new();
        for device in [None, Some(DeviceId(0)), Some(DeviceId(1))] {
            for (policy, imports) in
                [(P2pPolicy::Enabled, 0), (P2pPolicy::Enabled, 3), (P2pPolicy::Disabled, 0)]
            {
                let class = Class {
                    iface: IfaceKind::CUDA,
                    device,
                    kind: AllocationKind::Device,
                    policy,
                    imports,
                };
                for (provider, name) in ["verbs", "loopback"].into_iter().flat_map(|provider| {
                    let names = (0..20)
                        .map(|n| format!("mlx5_{n}"))
                        .chain((0..20).map(|n| format!("nic{n}_with_one_end")));
                    names.map(move |name| (provider, name))
                }) {
                    keys.push((class, Nic { provider: provider.into(), name, pci_bus_id: None }));
                }
            }
        }
        keys
    }

    #[test]
    fn keys_that_differ_in_anything_have_slots_of_their_own_until_all_is_forgotten() {
        let cache = Cache::default();
        let all = classes_and_nics();
        let keys = || all.iter().map(|(class, nic)| Key { class: *class, nic });
        assert!(all.len() > 2 * BUCKETS);
        for (at, key) in keys().enumerate() {
            assert!(cache.decision(&key).is_none());
            cache.slot(&key).remember(Way::Staged, decision(&at.to_string()));
        }
        for (at, key) in keys().enumerate() {
            assert_eq!(cache.decision(&key).unwrap().reason, at.to_string());
            assert_eq!(cache.decided(&key).unwrap().decision.reason, at.to_string());
        }
        assert_eq!(cache.slots().count(), all.len());
        assert!(keys().all(|key| cache.slot(&key).count_refused()));
        cache.clear();
        assert!(
            keys().all(|key| cache.decision(&key).is_none() && cache.slot(&key).count_refused())
        );
        assert!(keys().all(|key| cache.slot(&key).count_refused()), "counted from the start again");
        assert_eq!(cache.slots().count(), all.len());
    }

    #[test]
    fn threads_that_ask_for_a_new_slot_at_once_get_the_same() {
        let cache = Cache::default();
        let all = classes_and_nics();
        let slots: Vec<Vec<_>> = std::thread::scope(|scope| {
            let ask =
                || all.iter().map(|(class, nic)| cache.slot(&Key { class: *class, nic })).collect();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for others in &slots[1..] {
            assert!(others.iter().zip(&slots[0]).all(|(a, b)| std::ptr::eq(*a, *b)));
        }
    }
}
