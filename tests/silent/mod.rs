//! Callbacks of an imported cache monitor whose application reports no changes.

use hmem::{AddressRange, Result, system::monitor::ImportCallbacks};

/// Callbacks of an imported cache monitor. They accept every range and report no change.
#[derive(Debug)]
pub(crate) struct Silent;

impl ImportCallbacks for Silent {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}
