//! Handles, by which a provider names its regions and windows.

use crate::LocalKey;

/// A provider's handle of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderRegion {
    /// The number by which the provider finds the region.
    pub token: u64,
    /// The local descriptor of the region.
    pub local: LocalKey,
    /// The remote key of the region as a number.
    pub key: u64,
}

/// A provider's handle of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderWindow {
    /// The number by which the provider finds the window.
    pub token: u64,
    /// The window's current key.
    pub key: u64,
}
