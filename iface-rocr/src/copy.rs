//! Copies between host memory and memory of the devices.

use hmem_core::{Address, Result, iface::CopyEvent};

use crate::iface::{Rocr, lacks};

pub(crate) fn copy(_rocr: &Rocr, to: Address, from: Address, len: u64) -> Result<()> {
    Err(lacks("copy", "hmem-iface-rocr does not copy yet")
        .context("to", to)
        .context("from", from)
        .context("length", len))
}

pub(crate) fn copy_async(
    _rocr: &Rocr,
    to: Address,
    from: Address,
    len: u64,
) -> Result<Box<dyn CopyEvent>> {
    Err(lacks("copy_async", "hmem-iface-rocr does not copy asynchronously yet")
        .context("to", to)
        .context("from", from)
        .context("length", len))
}
