//! A monitor of an application that reports no changes.

use hmem::{AddressRange, Result, system::monitor::ImportCallbacks};

/// A monitor that accepts every range. It reports a change only if the test does so itself.
#[derive(Debug)]
pub(crate) struct Silent;

impl ImportCallbacks for Silent {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}
