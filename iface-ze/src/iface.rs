//! The iface type, which opens the driver and combines the components of the crate.

#![allow(unsafe_code, reason = "implements the trait, and loads the library")]

use std::sync::Arc;

use hmem_core::{
    Address, Allocation, Error, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{Allocator, CopyEngine, Device, DmaBufExporter, Facet, Ipc, MonitorSource},
};
use hmem_iface_kit::check_idle;

use crate::{
    allocate::DeviceAllocator,
    causes::CAUSES,
    copy::Copier,
    driver::{DeviceEntry, Driver},
    error::ZE,
    export::Exporter,
    ipc::IpcExchange,
    lookup::Lookup,
    monitor::Monitors,
    sys::Functions,
};

/// The iface for oneAPI Level Zero memory, over the loader library.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_ze::LevelZero;
///
/// if let Ok(level_zero) = LevelZero::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(level_zero.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Debug)]
pub struct LevelZero {
    copier: Copier,
    allocator: DeviceAllocator,
    exporter: Exporter,
    ipc: IpcExchange,
    monitors: Monitors,
    lookup: Arc<Lookup>,
}

hmem_iface_kit::builder! {
    /// Builder of [`LevelZero`]. The builder can load another library, or use functions that the
    /// caller passes.
    pub struct Builder {}
    functions: Functions,
    iface: "hmem_iface_ze::LevelZero",
    library: ("the loader of Level Zero", "libze_loader.so.1", "HMEM_ZE_LIBRARY"),
}
hmem_iface_kit::open!(LevelZero, Builder, Functions);

impl Builder {
    /// Starts the driver and lists its devices.
    ///
    /// # Errors
    /// - Unavailable if the library, a required symbol or a device is absent, or the
    ///   driver does not start. The error names the library, and the driver's code if there is one.
    /// - The errors of [`ProcessMark::current`](hmem_core::ProcessMark::current).
    /// - Otherwise the error of a query for the drivers or devices, or of the creation of a
    ///   context.
    pub fn open(mut self) -> Result<LevelZero> {
        let driver = Arc::new(Driver::start(self.load()?)?);
        tracing::debug!(
            library = driver.functions.library(),
            devices = driver.devices.len(),
            "Level Zero opened"
        );
        let lookup = Arc::new(Lookup::new(driver));
        let shared = || Arc::clone(&lookup);
        Ok(LevelZero {
            copier: Copier::new(shared()),
            allocator: DeviceAllocator { lookup: shared() },
            exporter: Exporter { lookup: shared() },
            ipc: IpcExchange { lookup: shared(), exporter: Exporter { lookup: shared() } },
            monitors: Monitors { lookup: shared() },
            lookup,
        })
    }
}

impl LevelZero {
    /// Destroys the command lists and contexts of this iface.
    ///
    /// Dropping the iface also destroys them. If the driver refuses, the drop logs the error.
    ///
    /// # Errors
    /// - Busy while memory of this iface is allocated or opened, or a copy is in
    ///   flight.
    /// - BadState in a forked child.
    /// - Otherwise the driver's error.
    ///
    /// The error holds the iface, which can be closed again. Calls for a device whose context was
    /// destroyed before the error fail with BadState.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        let driver = &self.lookup.driver;
        let closed = driver.check_process("close").and_then(|()| {
            check_idle(IfaceKind::ZE, self.lookup.owned.len(), self.copier.in_flight())?;
            self.copier.release()?;
            driver.release()
        });
        closed.map_err(|error| Rejected::new(self, error))
    }
}

// SAFETY: `query` asks the driver about an address each time, and returns an exact range and a
// number that the driver assigns to only one allocation. The allocations of a pool share a number,
// so the application's memory in a pool is never cached. The driver makes the allocations with the
// requested length, and they stay until the table's entry is removed. Copies check both sides
// first. They run on lanes that only one copy uses at a time, and a failed copy has ended. A
// dma-buf is the buffer of the allocation, which the kernel keeps while it is registered. If the
// buffer may begin elsewhere than the allocation, the export is refused.
unsafe impl Iface for LevelZero {
    fn kind(&self) -> IfaceKind {
        IfaceKind::ZE
    }

    fn name(&self) -> &str {
        "ze"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let devices = &self.lookup.driver.devices;
        Ok(devices.iter().map(|entry| entry.description.clone()).collect())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.lookup.find(address)?.map(|found| found.allocation))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        unsafe { self.copier.copy(to, from, len) }
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(&self.allocator)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        Some(&self.copier)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        Some(&self.exporter)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        let both = |entry: &DeviceEntry| entry.exports_dma_bufs() && entry.imports_dma_bufs();
        self.lookup.driver.devices.iter().any(both).then_some(&self.ipc as _)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(&self.monitors)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }

    fn unavailable(&self, facet: Facet) -> Error {
        ZE.lacks(
            facet.operation(),
            match facet {
                Facet::PeerMemory => {
                    "kernel drivers of Level Zero's devices have no peer-memory client"
                }
                Facet::HostRegistrar => {
                    "Level Zero has no call that page-locks the application's memory"
                }
                Facet::Ipc => "no device both exports its memory as dma-bufs and imports them",
                _ => "Level Zero has no call for it",
            },
        )
    }
}
