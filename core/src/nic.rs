//! Identification of NICs.

use std::fmt;

/// The identification of a NIC: its provider, its device name and its address on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nic {
    /// The provider's name.
    pub provider: String,
    /// The device name, for example `mlx5_0`. It is unique within the provider.
    pub name: String,
    /// The PCI bus id as `domain:bus:device.function`. `None` if the NIC is not a PCI device.
    pub pci_bus_id: Option<String>,
}

impl Nic {
    /// Returns true for the NIC's device name, and for its provider and device name
    /// (`verbs/mlx5_0`).
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.name == name || self.to_string() == name
    }

    /// Returns true for the same device of the same provider.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (&self.provider, &self.name) == (&other.provider, &other.name)
    }
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.provider, self.name)
    }
}
