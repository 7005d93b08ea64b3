//! Table of the decisions of earlier registrations. The key is the class of the registration
//! (iface, device, kind of memory, policy, list of direct paths) and the NIC.
//!
//! Each [`DefaultPathSelector`](super::DefaultPathSelector) has its own table. An entry names the
//! path, and the unit of export, that the next registration of its class tries first. The selector
//! removes the entry when that path is refused. A refusal that concerns only one buffer is never
//! stored: see the module [`probe`](mod@super::probe).

use std::{collections::HashMap, fmt, sync::Arc};

use hmem_core::{
    AllocationKind, Decision, DeviceId, IfaceKind,
    path::{DirectPath, P2pPolicy},
    provider::{Imports, Nic, ProviderAttr},
};
use parking_lot::RwLock;

use super::variant::PathVariant;

/// Key of a decision: a class of registrations, and the NIC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key<'a> {
    class: Class,
    nic: &'a Nic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Class {
    iface: IfaceKind,
    device: Option<DeviceId>,
    kind: AllocationKind,
    /// The domain's policy. The setting `disable_p2p` is not in the key, because it is the same for
    /// all registrations of a selector, and each selector has its own table.
    policy: P2pPolicy,
    /// The domain's list of direct paths, without duplicates; `None` for the NIC's own order.
    direct_paths: Option<[Option<DirectPath>; DirectPath::ALL.len()]>,
    /// True if the domain checks direct paths by transfers.
    reach_check: bool,
    /// The kinds of memory that the NIC can import. They are part of the key because two providers
    /// with the same name may differ in them.
    imports: Imports,
}

/// The settings of a domain on which decisions depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings<'a> {
    pub(super) policy: P2pPolicy,
    pub(super) direct_paths: Option<&'a [DirectPath]>,
    pub(super) reach_check: bool,
}

impl<'a> Key<'a> {
    pub(super) fn new(
        iface: IfaceKind,
        device: Option<DeviceId>,
        kind: AllocationKind,
        Settings { policy, direct_paths, reach_check }: Settings<'_>,
        attr: &'a ProviderAttr,
    ) -> Self {
        let place = |listed: &[DirectPath]| std::array::from_fn(|at| listed.get(at).copied());
        let direct_paths = direct_paths.map(place);
        let imports = attr.imports;
        let class = Class { iface, device, kind, policy, direct_paths, reach_check, imports };
        Self { class, nic: &attr.nic }
    }
}

/// A stored decision, with the path and dma-buf mapping of that decision.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) variant: PathVariant,
    /// True if NVLink-C2C or Data Direct decides the dma-buf mapping for the NIC. Such a NIC tries
    /// the mapping of `variant`, even if another NIC of the registration has already made exports
    /// with another mapping.
    pub(super) own_mapping: bool,
    /// The decision that later registrations return, with [`Decision::from_cache`] set.
    pub(super) decision: Arc<Decision>,
}

impl Decided {
    pub(super) fn new(variant: PathVariant, own_mapping: bool, decision: Decision) -> Self {
        let decision = Arc::new(Decision { from_cache: true, ..decision });
        Self { variant, own_mapping, decision }
    }
}

#[derive(Debug)]
struct RememberedPath {
    nic: Nic,
    /// The stored decision. `None` before the first decision is stored, and after the path of the
    /// stored decision was refused.
    decided: Option<Decided>,
    /// The number of registrations that succeeded over another path after the iface or the NIC had
    /// refused one. A refusal that is known to concern only the buffer does not count
    /// (`PathRefusal::only_this_buffer`). The number determines when to probe
    /// ([`DecisionTable::count_refused`]).
    refused: u32,
}

/// The stored decisions by class. The list of a class has an entry for each NIC.
#[derive(Default)]
pub(super) struct DecisionTable(RwLock<HashMap<Class, Vec<RememberedPath>>>);

impl fmt::Debug for DecisionTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let classes = self.0.read().len();
        f.debug_struct("DecisionTable").field("classes", &classes).finish_non_exhaustive()
    }
}

impl DecisionTable {
    /// Returns the stored decision for a key, if there is one.
    pub(super) fn get(&self, key: &Key<'_>) -> Option<Decided> {
        let classes = self.0.read();
        classes.get(&key.class)?.iter().find(|entry| entry.is_of(key.nic))?.decided.clone()
    }

    pub(super) fn insert(&self, key: &Key<'_>, decided: Decided) {
        self.change(key, |entry| entry.decided = Some(decided));
    }

    /// Removes a decision after its path was refused, unless another thread has replaced the
    /// decision.
    pub(super) fn remove(&self, key: &Key<'_>, failed: &Decided) {
        self.change(key, |entry| {
            entry.decided.take_if(|decided| Arc::ptr_eq(&decided.decision, &failed.decision));
        });
    }

    /// Counts a registration that succeeded after a refusal. Returns true if the caller must now
    /// probe with an ordinary page: at the counts 1, 2, 4, 8 and so on.
    ///
    /// So an unusual buffer that is registered again and again costs few probes, and the probes
    /// still detect a device and a NIC that no longer work together.
    pub(super) fn count_refused(&self, key: &Key<'_>) -> bool {
        self.change(key, |entry| {
            entry.refused = entry.refused.wrapping_add(1);
            entry.refused.is_power_of_two()
        })
    }

    pub(super) fn clear(&self) {
        self.0.write().clear();
    }

    fn change<T>(&self, key: &Key<'_>, change: impl FnOnce(&mut RememberedPath) -> T) -> T {
        let mut classes = self.0.write();
        let entries = classes.entry(key.class).or_default();
        let at = entries.iter().position(|entry| entry.is_of(key.nic)).unwrap_or_else(|| {
            entries.push(RememberedPath { nic: key.nic.clone(), decided: None, refused: 0 });
            entries.len() - 1
        });
        change(&mut entries[at])
    }
}

impl RememberedPath {
    /// Returns true if the entry belongs to `nic`. Compares names only: NICs with equal names have
    /// equal bus ids.
    fn is_of(&self, nic: &Nic) -> bool {
        self.nic.name == nic.name && self.nic.provider == nic.provider
    }
}

#[cfg(test)]
mod tests {
    use hmem_core::{iface::DmaBufMapping, path::ExportUnit};

    use super::*;

    fn decided(reason: &str) -> Decided {
        let decision = Arc::new(Decision {
            path: hmem_core::Path::Staged,
            reason: reason.to_owned(),
            iface: IfaceKind::CUDA,
            iface_name: IfaceKind::CUDA.into(),
            device: None,
            nic: String::new(),
            policy: P2pPolicy::Enabled,
            direct_paths: None,
            mapping: DmaBufMapping::Default,
            unit: ExportUnit::Range,
            from_cache: true,
            attempts: Vec::new().into(),
        });
        Decided { variant: PathVariant::Staged, own_mapping: false, decision }
    }

    fn classes_and_nics() -> Vec<(Class, Nic)> {
        let peer_memory = Imports { peer_memory: true, ..Imports::default() };
        let mut keys = Vec::new();
        for device in [None, Some(DeviceId(0)), Some(DeviceId(1))] {
            let listed = |first, second| Some([first, second, None, None]);
            let [dma_buf, _, _, peer] = DirectPath::ALL.map(Some);
            for (policy, direct_paths, reach_check, imports) in [
                (P2pPolicy::Enabled, None, false, Imports::default()),
                (P2pPolicy::Enabled, None, true, Imports::default()),
                (P2pPolicy::Enabled, None, false, peer_memory),
                (P2pPolicy::Enabled, listed(None, None), false, peer_memory),
                (P2pPolicy::Enabled, listed(dma_buf, peer), false, peer_memory),
                (P2pPolicy::Enabled, listed(peer, dma_buf), false, peer_memory),
                (P2pPolicy::Disabled, None, false, Imports::default()),
            ] {
                let (iface, kind) = (IfaceKind::CUDA, AllocationKind::Device);
                let class =
                    Class { iface, device, kind, policy, direct_paths, reach_check, imports };
                for provider in ["verbs", "loopback"] {
                    for name in ["mlx5_0", "mlx5_1"] {
                        let (provider, name) = (provider.into(), name.into());
                        keys.push((class, Nic { provider, name, pci_bus_id: None }));
                    }
                }
            }
        }
        keys
    }

    #[test]
    fn keys_that_differ_in_any_field_have_separate_decisions() {
        let table = DecisionTable::default();
        let all = classes_and_nics();
        let keys = || all.iter().map(|(class, nic)| Key { class: *class, nic });
        for (at, key) in keys().enumerate() {
            assert!(table.get(&key).is_none());
            table.insert(&key, decided(&at.to_string()));
        }
        for (at, key) in keys().enumerate() {
            assert_eq!(table.get(&key).unwrap().decision.reason, at.to_string());
        }
        assert!(keys().all(|key| table.count_refused(&key)));
        table.clear();
        assert!(keys().all(|key| table.get(&key).is_none() && table.count_refused(&key)));
        assert!(keys().all(|key| table.count_refused(&key)), "clearing resets the count");
        assert!(keys().all(|key| !table.count_refused(&key)), "three is not a power of two");
    }

    #[test]
    fn failed_decision_is_removed_unless_it_was_replaced() {
        let table = DecisionTable::default();
        let all = classes_and_nics();
        let (class, nic) = &all[0];
        let key = Key { class: *class, nic };
        table.insert(&key, decided("first"));
        let first = table.get(&key).unwrap();
        table.insert(&key, decided("second"));
        table.remove(&key, &first);
        let second = table.get(&key).expect("another decision is there by now");
        table.remove(&key, &second);
        assert!(table.get(&key).is_none());
    }
}
