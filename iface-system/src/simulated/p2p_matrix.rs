//! Reachability of devices by NICs.

use std::collections::BTreeMap;

use hmem_core::{DeviceId, provider::Nic};

/// The reachability of devices by NICs, for each pair of device and NIC name. Pairs that were not
/// set have the default of the constructor.
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
    otherwise: bool,
    known: BTreeMap<(DeviceId, String), bool>,
}

impl Default for P2pMatrix {
    fn default() -> Self {
        Self::all_reachable()
    }
}

impl P2pMatrix {
    /// Creates a matrix in which every NIC reaches every device.
    #[must_use]
    pub const fn all_reachable() -> Self {
        Self { otherwise: true, known: BTreeMap::new() }
    }

    /// Creates a matrix in which no NIC reaches any device.
    #[must_use]
    pub const fn none_reachable() -> Self {
        Self { otherwise: false, known: BTreeMap::new() }
    }

    /// Declares that the NIC of this name ([`Nic::name`]) does not reach the device.
    #[must_use]
    pub fn block(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), false);
        self
    }

    /// Declares that the NIC of this name reaches the device.
    #[must_use]
    pub fn allow(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), true);
        self
    }

    /// Returns true if the NIC of this name reaches the device.
    #[must_use]
    pub fn reaches(&self, device: DeviceId, nic: &str) -> bool {
        // A lookup by a borrowed key would need a second map. Matrices are small, and read once per
        // registration.
        self.known.get(&(device, nic.to_owned())).copied().unwrap_or(self.otherwise)
    }

    pub(crate) fn reaches_nic(&self, device: Option<DeviceId>, nic: &Nic) -> bool {
        device.is_none_or(|device| self.reaches(device, &nic.name))
    }
}
