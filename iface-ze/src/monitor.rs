//! Noticing that memory of the devices was freed.

use std::sync::Arc;

use hmem_core::{Result, monitor::Monitor};

use crate::iface::{LevelZero, lacks};

pub(crate) fn monitor(_level_zero: &LevelZero) -> Result<Arc<dyn Monitor>> {
    Err(lacks("monitor", "hmem-iface-ze does not monitor frees yet"))
}
