//! Table of the NICs that can access each device's memory directly.

use std::collections::BTreeMap;

use hmem_core::DeviceId;

/// Table that says which NICs can access the memory of which devices. The constructor sets the
/// default for all pairs of NIC and device, and the other methods change single pairs.
///
/// ```
/// use hmem_core::DeviceId;
/// use hmem_iface_system::P2pMatrix;
///
/// let matrix = P2pMatrix::all_reachable().block(DeviceId(1), "loop0");
/// assert!(matrix.reaches(DeviceId(0), "loop0"));
/// assert!(!matrix.reaches(DeviceId(1), "loop0"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct P2pMatrix {
    /// The access of pairs that are not in `known`: true if the NIC can access the device.
    otherwise: bool,
    known: BTreeMap<(DeviceId, String), bool>,
}

impl Default for P2pMatrix {
    fn default() -> Self {
        Self::all_reachable()
    }
}

impl P2pMatrix {
    /// Creates a matrix in which every NIC can access every device.
    #[must_use]
    pub const fn all_reachable() -> Self {
        Self { otherwise: true, known: BTreeMap::new() }
    }

    /// Creates a matrix in which no NIC can access any device.
    #[must_use]
    pub const fn none_reachable() -> Self {
        Self { otherwise: false, known: BTreeMap::new() }
    }

    /// Declares that the NIC with name `nic` ([`Nic::name`](hmem_core::provider::Nic::name)) cannot
    /// access the device.
    #[must_use]
    pub fn block(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), false);
        self
    }

    /// Declares that the NIC with name `nic` can access the device.
    #[must_use]
    pub fn allow(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), true);
        self
    }

    /// Returns true if the NIC with name `nic` can access the device.
    #[must_use]
    pub fn reaches(&self, device: DeviceId, nic: &str) -> bool {
        // A lookup by `&str` would need nested maps. Copying the name is cheap enough: this lookup
        // runs once per registration.
        self.known.get(&(device, nic.to_owned())).copied().unwrap_or(self.otherwise)
    }

    /// Returns true if every NIC can access every device.
    pub(crate) fn reaches_all(&self) -> bool {
        self.otherwise && self.known.values().all(|reaches| *reaches)
    }
}
