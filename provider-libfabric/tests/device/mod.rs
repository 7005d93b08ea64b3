//! A simulated device with the number of a vendor's devices at libfabric.

#![allow(unsafe_code, reason = "implements an iface")]

use hmem_core::{
    Address, Allocation, Iface, IfaceKind, Result,
    iface::{self, Allocator, CopyEngine, DmaBufExporter, PeerMemoryExporter},
};
use hmem_iface_system::Simulated;

/// An iface of any kind over a simulated device.
#[derive(Debug)]
pub(crate) struct Device(pub(crate) IfaceKind, pub(crate) Simulated);

// SAFETY: the simulated device answers every call. This type only changes the kind.
unsafe impl Iface for Device {
    fn kind(&self) -> IfaceKind {
        self.0
    }

    fn name(&self) -> &str {
        "device"
    }

    fn devices(&self) -> Result<Vec<iface::Device>> {
        self.1.devices()
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        let found = self.1.query(address)?;
        Ok(found.map(|allocation| Allocation { iface: self.0, ..allocation }))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method, which is the same here.
        unsafe { self.1.copy(to, from, len) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        self.1.allocator()
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.1.copy_engine()
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        self.1.dma_buf()
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        self.1.peer_memory()
    }
}
