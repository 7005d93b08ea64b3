//! Noticing that memory of the devices was freed.

use std::sync::Arc;

use hmem_core::{Result, monitor::Monitor};

use crate::iface::{Cuda, lacks};

pub(crate) fn monitor(_cuda: &Cuda) -> Result<Arc<dyn Monitor>> {
    Err(lacks("monitor", "hmem-iface-cuda does not monitor frees yet"))
}
