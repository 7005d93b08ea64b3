//! The name of a NIC.

use std::fmt;

/// A NIC of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nic {
    /// The provider's name.
    pub provider: String,
    /// The device name, such as `mlx5_0`; unique within the provider.
    pub name: String,
    /// PCI bus id as `domain:bus:device.function`, for hardware.
    pub pci_bus_id: Option<String>,
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.provider, self.name)
    }
}
