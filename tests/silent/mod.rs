//! An application that watches its own memory, as far as it says.

use hmem::{AddressRange, Result, system::monitor::Watcher};

/// Takes every range, and tells of no change unless a test does.
#[derive(Debug)]
pub(crate) struct Silent;

impl Watcher for Silent {
    fn subscribe(&self, _: AddressRange) -> Result<()> {
        Ok(())
    }

    fn unsubscribe(&self, _: AddressRange) {}
}
