//! The numbers of ifaces and of their devices.
//!
//! ```
//! use hmem_core::IfaceKind;
//!
//! assert_eq!(IfaceKind::CUDA.0, 1);
//! assert_eq!("ze".parse::<IfaceKind>().unwrap(), IfaceKind::ZE);
//! assert!(IfaceKind(0x100).is_plug_in());
//! ```

use std::{fmt, str::FromStr};

/// The number of a memory interface: libfabric's `enum fi_hmem_iface` for 0 to 5, and 0x100 and up
/// for plug-ins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IfaceKind(pub u32);

impl IfaceKind {
    /// Host memory of the operating system.
    pub const SYSTEM: Self = Self(0);
    /// NVIDIA CUDA.
    pub const CUDA: Self = Self(1);
    /// AMD ROCr.
    pub const ROCR: Self = Self(2);
    /// oneAPI Level Zero.
    pub const ZE: Self = Self(3);
    /// AWS Neuron.
    pub const NEURON: Self = Self(4);
    /// Habana SynapseAI.
    pub const SYNAPSEAI: Self = Self(5);
    /// The lowest number that a plug-in may take.
    pub const FIRST_PLUG_IN: Self = Self(0x100);

    const NAMED: [(Self, &'static str); 6] = [
        (Self::SYSTEM, "system"),
        (Self::CUDA, "cuda"),
        (Self::ROCR, "rocr"),
        (Self::ZE, "ze"),
        (Self::NEURON, "neuron"),
        (Self::SYNAPSEAI, "synapseai"),
    ];

    /// Returns true if the number lies in the range for plug-ins.
    #[must_use]
    pub const fn is_plug_in(self) -> bool {
        self.0 >= Self::FIRST_PLUG_IN.0
    }

    /// Returns the name, or `None` for a number that libfabric does not define.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        Self::NAMED.iter().find(|(kind, _)| *kind == self).map(|(_, name)| *name)
    }
}

impl fmt::Display for IfaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "iface-{:#x}", self.0),
        }
    }
}

impl fmt::Debug for IfaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for IfaceKind {
    type Err = UnknownIfaceName;

    /// Parses the name of an iface that libfabric defines.
    fn from_str(name: &str) -> Result<Self, UnknownIfaceName> {
        let named = Self::NAMED.iter().find(|(_, known)| *known == name);
        named.map(|(kind, _)| *kind).ok_or_else(|| UnknownIfaceName(name.to_owned()))
    }
}

/// The error for a name that is not the name of a libfabric iface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownIfaceName(pub String);

impl fmt::Display for UnknownIfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "unknown iface name {:?}: use one of system, cuda, rocr, ze, neuron, synapseai",
            self.0
        )
    }
}

impl std::error::Error for UnknownIfaceName {}

/// A device of an iface: the iface's own number for it, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
