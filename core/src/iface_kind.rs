//! The numbers that identify ifaces (memory interfaces) and their devices.
//!
//! ```
//! use hmem_core::IfaceKind;
//!
//! assert_eq!(IfaceKind::CUDA.0, 1);
//! assert_eq!("ze".parse::<IfaceKind>().unwrap(), IfaceKind::ZE);
//! assert!(IfaceKind(0x100).is_plug_in());
//! ```

use std::fmt;

/// The number of a memory interface. 0 to 5 are those of libfabric's `enum fi_hmem_iface`. Plug-ins
/// use 0x100 and up.
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
    /// The lowest number for plug-ins.
    pub const FIRST_PLUG_IN: Self = Self(0x100);

    /// The ifaces that libfabric defines, with their names.
    pub(crate) const NAMED: [(Self, &'static str); 6] = [
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

    /// Returns the iface's name, or `None` for a number that libfabric does not define.
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

/// The name of an iface in messages: its number, and its registered name if the name is known.
///
/// `Display` writes the registered name, or else the text of the [`IfaceKind`]: libfabric's name or
/// the number. `From` converts an iface, or an [`IfaceKind`] without a registered name.
///
/// ```
/// use hmem_core::{IfaceKind, IfaceName};
///
/// assert_eq!(IfaceName::new(IfaceKind(0x100), "simulated").to_string(), "simulated");
/// assert_eq!(IfaceName::from(IfaceKind::CUDA).to_string(), "cuda");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct IfaceName {
    kind: IfaceKind,
    name: Option<Box<str>>,
}

impl IfaceName {
    /// Creates the value for the iface `kind` with the registered name `name`.
    #[must_use]
    pub fn new(kind: IfaceKind, name: impl Into<Box<str>>) -> Self {
        Self { kind, name: Some(name.into()) }
    }

    /// Returns the number of the iface.
    #[must_use]
    pub const fn kind(&self) -> IfaceKind {
        self.kind
    }
}

impl From<IfaceKind> for IfaceName {
    fn from(kind: IfaceKind) -> Self {
        Self { kind, name: None }
    }
}

impl fmt::Display for IfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => f.write_str(name),
            None => self.kind.fmt(f),
        }
    }
}

impl fmt::Debug for IfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The number of a device within its iface, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
