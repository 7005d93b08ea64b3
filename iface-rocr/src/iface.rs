//! The iface type, which opens the runtime and combines the components of the crate.

#![allow(unsafe_code, reason = "implements the trait, and loads the library")]

use std::sync::Arc;

use hmem_core::{
    Address, Allocation, DeviceId, Error, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{
        Allocator, CopyEngine, Device, DmaBufExporter, Facet, HostRegistrar, InboundFlush, Ipc,
        MonitorSource, PeerMemoryExporter,
    },
};
use hmem_iface_kit::check_idle;

use crate::{
    allocate::PoolAllocator,
    causes::CAUSES,
    copy::Copier,
    driver::Runtime,
    error::lacks_symbol,
    export::{Exporter, no_export_call},
    ipc::IpcExchange,
    lookup::Lookup,
    monitor::CallbackMonitors,
    sys::Functions,
    table::AllocationTable,
};

/// The iface for AMD ROCr memory, over the HSA runtime.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_rocr::Rocr;
///
/// if let Ok(rocr) = Rocr::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(rocr.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Rocr {
    lookup: Arc<Lookup>,
    allocator: PoolAllocator,
    copier: Copier,
    exporter: Exporter,
    ipc: IpcExchange,
    monitors: CallbackMonitors,
}

hmem_iface_kit::builder! {
    /// Builder of [`Rocr`]. The builder can load another library, or use functions that the caller
    /// passes.
    pub struct Builder {}
    functions: Functions,
    iface: "hmem_iface_rocr::Rocr",
    library: ("AMD's runtime library", "libhsa-runtime64.so.1", "HMEM_ROCR_LIBRARY"),
}
hmem_iface_kit::open!(Rocr, Builder, Functions);

impl Builder {
    /// Starts the runtime and lists its devices.
    ///
    /// # Errors
    /// - Unavailable if the library, a required symbol or a device is absent, or the
    ///   runtime does not start. The error names the library, and the runtime's code if there is
    ///   one.
    /// - The errors of [`ProcessMark::current`](hmem_core::ProcessMark::current).
    /// - Otherwise the error of a query for the properties of the runtime, an agent or a pool.
    pub fn open(mut self) -> Result<Rocr> {
        Rocr::start(self.load()?)
    }
}

impl Rocr {
    /// Frees the buffers for copies, and releases the iface's reference to the runtime.
    ///
    /// # Errors
    /// - Busy while memory of this iface is allocated, opened or page-locked, or a
    ///   copy is in flight.
    /// - BadState in a forked child.
    /// - Otherwise the runtime's error.
    ///
    /// The error holds the iface, which still works.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        let runtime = &self.lookup.runtime;
        let closed = runtime.check_process("close").and_then(|()| {
            check_idle(IfaceKind::ROCR, self.lookup.table.owned(), self.copier.in_flight())?;
            self.copier.release()?;
            runtime.release()
        });
        closed.map_err(|error| Rejected::new(self, error))
    }

    fn start(functions: Functions) -> Result<Self> {
        let runtime = Arc::new(Runtime::start(functions)?);
        let table = Arc::new(AllocationTable::new(runtime.process));
        let lookup = Arc::new(Lookup { runtime, table });
        let shared = || Arc::clone(&lookup);
        Ok(Self {
            allocator: PoolAllocator { lookup: shared() },
            copier: Copier::new(shared()),
            exporter: Exporter { lookup: shared() },
            ipc: IpcExchange { lookup: shared() },
            monitors: CallbackMonitors { lookup: shared() },
            lookup,
        })
    }
}

// SAFETY: `query` asks the runtime about an address each time, and returns an identity that ends in
// the callback for the free. The runtime makes the allocations, and they stay in the table until
// they are freed. `Copier::side` checks the bounds of both sides of a copy, and the event of the
// copy waits for the copy's signal. The runtime makes the exports and keeps their memory allocated.
unsafe impl Iface for Rocr {
    fn kind(&self) -> IfaceKind {
        IfaceKind::ROCR
    }

    fn name(&self) -> &str {
        "rocr"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.lookup.runtime.devices.iter().map(|entry| entry.description.clone()).collect())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        self.lookup.find(address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        unsafe { self.copier.copy(to, from, len) }
    }

    // This iface does not implement `address_span`: its queries also find page-locked host memory,
    // which can be at any address.

    fn has_identities(&self) -> bool {
        self.lookup.has_identities()
    }

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(&self.allocator)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        self.functions().async_copy.map(|_| &self.copier as _)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        let functions = self.functions();
        let has = functions.export_dmabuf.is_some() || functions.export_dmabuf_v2.is_some();
        has.then_some(&self.exporter)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        Some(&self.exporter)
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        self.functions().memory_lock.map(|_| &self.allocator as _)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.functions().ipc_create.map(|_| &self.ipc as _)
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(self)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        self.has_identities().then_some(&self.monitors)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }

    fn unavailable(&self, facet: Facet) -> Error {
        let lacking = |symbol| lacks_symbol(facet.operation(), symbol);
        match facet {
            Facet::CopyEngine => lacking("hsa_amd_memory_async_copy"),
            Facet::DmaBuf => no_export_call(),
            Facet::HostRegistrar => lacking("hsa_amd_memory_lock"),
            Facet::Ipc => lacking("hsa_amd_ipc_memory_create"),
            Facet::Monitor => lacking("hsa_amd_register_deallocation_callback"),
            _ => facet.unavailable(IfaceKind::ROCR),
        }
    }
}

impl Rocr {
    fn functions(&self) -> &Functions {
        &self.lookup.runtime.functions
    }
}

/// Flushes inbound PCIe writes by writing a register of the device. Does nothing if the device has
/// no such register.
impl InboundFlush for Rocr {
    fn flush(&self, device: DeviceId) -> Result<()> {
        let register = self.lookup.runtime.device("flush_inbound", device)?.flush_register;
        if register != 0 {
            let register = std::ptr::with_exposed_provenance_mut::<u32>(register);
            // SAFETY: the runtime keeps the register mapped while it is started, and this iface
            // holds a reference to it. Any thread may write 1, and the read waits for the write.
            unsafe {
                register.write_volatile(1);
                register.read_volatile();
            }
        }
        Ok(())
    }
}
