//! The iface type, which opens the driver and combines the components of the crate.

#![allow(unsafe_code, reason = "implements the trait, and loads the library")]

use std::{fmt, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, Error, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    environment,
    iface::{
        Allocator, CopyEngine, Device, DmaBufExporter, Facet, HostRegistrar, InboundFlush, Ipc,
        MonitorSource, PeerMemoryExporter, SegmentMap,
    },
    monitor::FreeSubscriptions,
};
use hmem_iface_kit::check_idle;

use crate::{
    allocate::DeviceAllocator,
    causes::CAUSES,
    context::PrimaryContexts,
    copy::Copier,
    driver::Driver,
    error::{CUDA, coded, remedy},
    export::{Exporter, no_export_call, no_peer_memory},
    flush::InboundFlusher,
    ipc::IpcExchange,
    lookup::PointerLookup,
    monitor::{CudaMonitorKind, CudaMonitors},
    segments::Segments,
    sys::Functions,
};

/// The iface for NVIDIA CUDA memory, over the driver library.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_cuda::Cuda;
///
/// if let Ok(cuda) = Cuda::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(cuda.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub struct Cuda {
    lookup: Arc<PointerLookup>,
    flusher: Arc<InboundFlusher>,
    allocator: DeviceAllocator,
    copier: Copier,
    pub(crate) exporter: Exporter,
    ipc: IpcExchange,
    monitors: CudaMonitors,
}

hmem_iface_kit::builder! {
    /// Builder of [`Cuda`]. The builder can load another library, or use functions that the caller
    /// passes.
    pub struct Builder {
        /// Method that detects frees. `None` unless `monitor` was called.
        monitor: Option<CudaMonitorKind>,
    }
    functions: Functions,
    iface: "hmem_iface_cuda::Cuda",
    library: ("NVIDIA's driver library", "libcuda.so.1", "HMEM_CUDA_LIBRARY"),
}
hmem_iface_kit::open!(Cuda, Builder, Functions);

impl Builder {
    /// Selects the method that detects frees of cached CUDA memory. Overrides `HMEM_CUDA_MONITOR`.
    /// Without this call and the variable, the method is [`CudaMonitorKind::Auto`].
    pub fn monitor(mut self, kind: CudaMonitorKind) -> Self {
        self.monitor = Some(kind);
        self
    }

    /// Starts the driver and lists its devices.
    ///
    /// # Errors
    /// - InvalidArgument for an unknown monitor in the environment, unless the
    ///   builder selects a monitor.
    /// - Unavailable if the library, a required symbol or a device is absent, or the
    ///   driver does not start. The error names the library, and the driver's code if there is one.
    /// - Unavailable if the driver cannot return the range of an allocation.
    /// - The errors of [`ProcessMark::current`](hmem_core::ProcessMark::current).
    /// - Otherwise the error of a query for the devices or for an address.
    pub fn open(mut self) -> Result<Cuda> {
        let monitor = match self.monitor {
            Some(monitor) => monitor,
            None if self.without_environment => CudaMonitorKind::default(),
            None => monitor_in_environment()?,
        };
        Cuda::start(self.load()?, monitor)
    }
}

/// Returns the monitor that `HMEM_CUDA_MONITOR` names, or the default if the variable is unset or
/// empty.
fn monitor_in_environment() -> Result<CudaMonitorKind> {
    let kind = environment::parsed(Cuda::MONITOR_VARIABLE);
    Ok(kind.map_err(|error| error.iface(IfaceKind::CUDA))?.unwrap_or_default())
}

impl Cuda {
    /// Environment variable that names the [`CudaMonitorKind`]: `auto`, `hooks` or `identity`. A
    /// kind that the builder selects takes precedence.
    pub const MONITOR_VARIABLE: &str = "HMEM_CUDA_MONITOR";

    /// Releases the primary contexts that this iface retains, with their streams and events.
    ///
    /// # Errors
    /// - Busy while memory of this iface is allocated, opened or page-locked, or a copy is in
    ///   flight.
    /// - BadState in a forked child.
    /// - Otherwise the driver's error.
    ///
    /// The error holds the iface, which still works.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        let contexts = &self.lookup.contexts;
        let closed = contexts.check_process("close").and_then(|()| {
            check_idle(IfaceKind::CUDA, contexts.allocations.len(), self.copier.in_flight())?;
            contexts.release_all()
        });
        closed.map_err(|error| Rejected::new(self, error))
    }

    /// Invalidates the cached registrations of `range`, and then calls `free`, by which the
    /// application frees its memory.
    ///
    /// Without this call, a hook detects the free, or the next cache hit detects the changed
    /// identity ([`CudaMonitorKind`]). An allocator of the application can call this method for
    /// each free, so that no registration outlives its memory. An example is a pluggable allocator
    /// of PyTorch.
    ///
    /// In a forked child, only calls `free`.
    pub fn while_freeing<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        if !self.lookup.contexts.is_own_process() {
            return free();
        }
        self.allocator.subscriptions.while_freeing(range, free)
    }

    fn start(functions: Functions, kind: CudaMonitorKind) -> Result<Self> {
        let library = functions.library().to_owned();
        // SAFETY: the driver defines no flags, so 0 is the only value. Any thread may make the call
        // any number of times.
        let code = unsafe { (functions.init)(0) };
        if !code.is_success() {
            let remedy = remedy(code, "cuInit");
            return Err(coded(CUDA.unavailable("cuInit", &library), code)
                .remedy(remedy.unwrap_or("see `nvidia-smi` for the state of the driver")));
        }
        let driver = Driver::new(functions)?;
        let devices = driver.devices.len();
        if devices == 0 {
            return Err(CUDA
                .unavailable("cuDeviceGetCount", &library)
                .context("devices", 0)
                .remedy(
                    "no NVIDIA device is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
                ));
        }
        let lookup = PointerLookup::new(PrimaryContexts::new(driver)?).map_err(|error| {
            if error.is_unsupported() {
                CUDA.unavailable("cuPointerGetAttributes", &library).caused_by(error)
            } else {
                error
            }
        })?;
        tracing::debug!(library, devices, "CUDA opened");
        let lookup = Arc::new(lookup);
        let shared = || Arc::clone(&lookup);
        let flusher = Arc::new(InboundFlusher::new(shared()));
        let subscriptions = Arc::new(FreeSubscriptions::default());
        let allocator = DeviceAllocator { lookup: shared(), subscriptions };
        let subscriptions = || Arc::clone(&allocator.subscriptions);
        Ok(Self {
            copier: Copier::new(shared()),
            exporter: Exporter {
                segments: Segments { lookup: shared() },
                flusher: Arc::clone(&flusher),
                by_mappings: (kind != CudaMonitorKind::Hooks).then(subscriptions),
            },
            ipc: IpcExchange { lookup: shared(), subscriptions: subscriptions() },
            monitors: CudaMonitors { lookup: shared(), subscriptions: subscriptions(), kind },
            allocator,
            flusher,
            lookup,
        })
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda").field("name", &self.name()).finish_non_exhaustive()
    }
}

// SAFETY: `query` and `segments` ask the driver about an address each time, and the driver never
// reuses a buffer id. The driver makes the allocations, and they stay in the table until they are
// freed. `Copier::side` checks the bounds of both sides of a copy, and the event of the copy
// completes after the copy on its stream. The driver makes the exports and keeps their memory
// allocated.
unsafe impl Iface for Cuda {
    fn kind(&self) -> IfaceKind {
        IfaceKind::CUDA
    }

    fn name(&self) -> &str {
        "cuda"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.lookup.driver().devices.iter().map(|entry| entry.description.clone()).collect())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.lookup.find(address)?.map(|found| found.allocation))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller upholds the contract of `Iface::copy`.
        unsafe { self.copier.copy(to, from, len) }
    }

    // This iface does not implement `address_span`: its queries also find page-locked host memory,
    // which can be at any address.

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(&self.allocator)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        Some(&self.copier)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        let call = self.lookup.driver().functions.mem_get_handle_for_address_range;
        call.map(|_| &self.exporter as _)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        let pinned = self.lookup.driver().devices.iter().any(|entry| entry.abilities.peer_memory);
        pinned.then_some(&self.exporter)
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        Some(&self.allocator)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(&self.ipc)
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Some(&self.exporter.segments)
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(&*self.flusher)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(&self.monitors)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }

    fn unavailable(&self, facet: Facet) -> Error {
        match facet {
            Facet::DmaBuf => no_export_call(),
            Facet::PeerMemory => no_peer_memory(),
            _ => facet.unavailable(IfaceKind::CUDA),
        }
    }
}
