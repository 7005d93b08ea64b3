//! Which NIC reaches which device.

use std::collections::BTreeMap;

use hmem_core::{DeviceId, provider::Nic};

/// Reachability by device and NIC name; what was not said is reachable, or not, as the matrix was
/// made.
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
    /// Every NIC reaches every device.
    #[must_use]
    pub const fn all_reachable() -> Self {
        Self { otherwise: true, known: BTreeMap::new() }
    }

    /// No NIC reaches any device.
    #[must_use]
    pub const fn none_reachable() -> Self {
        Self { otherwise: false, known: BTreeMap::new() }
    }

    /// The NIC of this name (as in [`Nic::name`]) does not reach the device.
    #[must_use]
    pub fn block(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), false);
        self
    }

    /// The NIC of this name reaches the device.
    #[must_use]
    pub fn allow(mut self, device: DeviceId, nic: impl Into<String>) -> Self {
        self.known.insert((device, nic.into()), true);
        self
    }

    /// Whether the NIC of this name reaches the device.
    #[must_use]
    pub fn reaches(&self, device: DeviceId, nic: &str) -> bool {
        // The borrowed key would need a second map; matrices are small and asked once a
        // registration.
        self.known.get(&(device, nic.to_owned())).copied().unwrap_or(self.otherwise)
    }

    pub(crate) fn reaches_nic(&self, device: Option<DeviceId>, nic: &Nic) -> bool {
        device.is_none_or(|device| self.reaches(device, &nic.name))
    }
}
