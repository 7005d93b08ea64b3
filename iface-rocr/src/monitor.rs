//! Noticing that memory of the devices was freed.

use std::sync::Arc;

use hmem_core::{Result, monitor::Monitor};

use crate::iface::{Rocr, lacks};

pub(crate) fn monitor(_rocr: &Rocr) -> Result<Arc<dyn Monitor>> {
    Err(lacks("monitor", "hmem-iface-rocr does not monitor frees yet"))
}
