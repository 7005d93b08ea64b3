//! What notices that host memory was unmapped: nothing in this crate yet.

use std::sync::Arc;

use hmem_core::{Error, ErrorKind, IfaceKind, Result, monitor::Monitor};

/// The reason that there is none.
pub(super) fn monitor() -> Result<Arc<dyn Monitor>> {
    Err(Error::new(ErrorKind::Unsupported, "monitor")
        .iface(IfaceKind::SYSTEM)
        .remedy("host memory is unmapped behind this iface's back: pass a system monitor to the cache"))
}
