//! Handles, by which a provider names its regions and windows.

use crate::LocalKey;

/// A provider's handle of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderRegion {
    /// The provider's own identifier.
    pub token: u64,
    /// The local descriptor.
    pub local: LocalKey,
    /// The remote key as a number.
    pub key: u64,
}

/// A provider's handle of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderWindow {
    /// The provider's own identifier.
    pub token: u64,
    /// The window's current key.
    pub key: u64,
}
