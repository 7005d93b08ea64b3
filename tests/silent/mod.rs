//! An application that watches its own memory, as far as it says.

use hmem::{AddressRange, Result, system::monitor::ImportCallbacks};

/// Takes every range, and tells of no change unless a test does.
#[derive(Debug)]
pub(crate) struct Silent;

impl ImportCallbacks for Silent {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}
