//! A monitor of an application that reports no changes.

use hmem::{AddressRange, Result, system::monitor::ImportCallbacks};

/// Accepts every range, and reports a change only when a test does.
#[derive(Debug)]
pub(crate) struct Silent;

impl ImportCallbacks for Silent {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}
