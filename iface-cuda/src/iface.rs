//! The iface: opening the driver, and the trait, each facet in a line.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, Allocation, Error, ErrorKind, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{
        Allocator, CopyEngine, CopyEvent, Device, DmaBufExporter, Facet, HostRegistrar,
        InboundFlush, Ipc, MonitorSource, PeerMemoryExporter, SegmentMap,
    },
    monitor::{Monitor, MonitorStyle},
};

use crate::{
    causes::CAUSES,
    device,
    driver::Driver,
    error::{refused, unavailable},
    export::{no_export_call, no_peer_memory},
    monitor::{CudaMonitor, MonitorKind},
    sys::Functions,
};

/// CUDA memory, over the driver library.
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
#[derive(Debug)]
pub struct Cuda {
    pub(crate) driver: Arc<Driver>,
    monitor: MonitorKind,
}

/// Where [`Cuda`] finds its driver.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_cuda::Cuda;
///
/// let error = Cuda::builder().library("/nowhere/libcuda.so.1").open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// assert_eq!(error.context_value("library"), Some("/nowhere/libcuda.so.1"));
/// ```
#[derive(Debug)]
#[must_use = "a builder does nothing until it opens"]
pub struct Builder {
    source: Source,
    monitor: Option<MonitorKind>,
}

#[derive(Debug)]
enum Source {
    /// What the environment names, else the dynamic loader's.
    Found,
    Library(PathBuf),
    Functions(Box<Functions>),
}

impl Builder {
    /// Loads the library at `path` instead of the one that `HMEM_CUDA_LIBRARY` names or the dynamic
    /// loader finds.
    pub fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.source = Source::Library(path.as_ref().to_owned());
        self
    }

    /// Calls these functions instead of loading a library.
    pub fn functions(mut self, functions: Functions) -> Self {
        self.source = Source::Functions(Box::new(functions));
        self
    }

    /// What cached registrations of its memory rest on; overrides `HMEM_CUDA_MONITOR`. Without
    /// either it is [`MonitorKind::Auto`].
    pub fn monitor(mut self, kind: MonitorKind) -> Self {
        self.monitor = Some(kind);
        self
    }

    /// Starts the driver and lists its devices.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a monitor in the environment that is none.
    /// [`ErrorKind::Unavailable`] without the library, without a symbol of it, without a device, or
    /// with a driver that does not start; the library is named, and the driver's code where
    /// there is one. Otherwise what a device answered when asked for its properties.
    pub fn open(self) -> Result<Cuda> {
        let named = || std::env::var(Cuda::MONITOR_VARIABLE).ok().filter(|name| !name.is_empty());
        let monitor = match self.monitor {
            Some(monitor) => monitor,
            None => named()
                .map(|name| name.parse())
                .transpose()
                .map_err(in_environment)?
                .unwrap_or_default(),
        };
        let functions = match self.source {
            Source::Functions(functions) => *functions,
            Source::Library(path) => Functions::load(&path)?,
            Source::Found => {
                match std::env::var_os(Cuda::LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
                    Some(path) => Functions::load(Path::new(&path))?,
                    None => Functions::load(Path::new(Functions::LIBRARY))?,
                }
            }
        };
        Cuda::start(functions, monitor)
    }
}

fn in_environment(error: Error) -> Error {
    error.context("variable", Cuda::MONITOR_VARIABLE)
}

impl Cuda {
    /// The environment variable that names the library to load, where the builder names none.
    pub const LIBRARY_VARIABLE: &str = "HMEM_CUDA_LIBRARY";

    /// The environment variable that names the [`MonitorKind`], where the builder names none.
    pub const MONITOR_VARIABLE: &str = "HMEM_CUDA_MONITOR";

    /// Opens the driver library that `HMEM_CUDA_LIBRARY` names, or the one that the dynamic loader
    /// finds.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// To open another library, or a driver of one's own.
    pub fn builder() -> Builder {
        Builder { source: Source::Found, monitor: None }
    }

    /// Gives back what this iface holds of the driver: the streams and primary contexts that it
    /// needed.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while memory that it allocated, opened or page-locked is not given back,
    /// or a copy is under way; what the driver reported otherwise. The iface comes back, still
    /// working.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        let busy = |what: &'static str, count: usize| {
            Error::new(ErrorKind::Busy, "close")
                .iface(IfaceKind::CUDA)
                .context(what, count)
                .remedy("free what was allocated and wait for copies before the iface is closed")
        };
        let (allocations, copies) = (self.driver.in_use(), Arc::strong_count(&self.driver) - 1);
        if allocations > 0 {
            return Err(Rejected::new(self, busy("allocations", allocations)));
        }
        if copies > 0 {
            return Err(Rejected::new(self, busy("copies", copies)));
        }
        match self.driver.release_contexts() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    /// Frees memory of the application's own, with `free`, while everything cached over `range` is
    /// dead.
    ///
    /// Identities tell of such a free in any case, when a cached registration is next asked for. An
    /// allocator that knows its frees (PyTorch's pluggable one, for example) can tell of them
    /// before: then nothing is registered any longer when the memory goes.
    pub fn while_freeing<T>(&self, range: AddressRange, free: impl FnOnce() -> T) -> T {
        self.driver.subscriptions.while_it_goes(range, free)
    }

    fn start(functions: Functions, monitor: MonitorKind) -> Result<Self> {
        let library = functions.library().to_owned();
        // SAFETY: no flags are defined, 0 is the one value; any thread may call it any number of
        // times.
        let code = unsafe { (functions.init)(0) };
        if !code.is_success() {
            let remedy = refused(code, "cuInit").remedy_text().map(str::to_owned);
            return Err(unavailable("cuInit", &library)
                .driver_code(code.name().unwrap_or_default(), code.0.into())
                .remedy(remedy.unwrap_or_else(|| {
                    "see `nvidia-smi` for the state of the driver".to_owned()
                })));
        }
        let devices = device::list(&functions)?;
        if devices.is_empty() {
            return Err(unavailable("cuDeviceGetCount", &library).context("devices", 0).remedy(
                "no NVIDIA device is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
            ));
        }
        let driver = Driver::new(functions, devices);
        driver.learn_attributes().map_err(|error| {
            if error.is_unsupported() {
                unavailable("cuPointerGetAttributes", &library).caused_by(error)
            } else {
                error
            }
        })?;
        tracing::debug!(library, devices = driver.devices.len(), "CUDA opened");
        Ok(Self { driver: Arc::new(driver), monitor })
    }
}

// SAFETY: `query` and `segments` repeat what the driver knows of an address now, whose buffer ids
// are never reused. Allocations are the driver's own, entered in a table until they are freed.
// `Driver::side` checks both ends of a copy, whose event waits for its stream. Exports are made by
// the driver, which keeps the memory behind them.
unsafe impl Iface for Cuda {
    fn kind(&self) -> IfaceKind {
        IfaceKind::CUDA
    }

    fn name(&self) -> &str {
        "cuda"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.driver.devices.iter().map(|entry| entry.description.clone()).collect())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        Ok(self.driver.find(address)?.map(|found| found.allocation))
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.driver.copy(to, from, len) }
    }

    // No `address_span`: page-locked host memory is found too, and lies where the application has
    // it.

    fn allocator(&self) -> Option<&dyn Allocator> {
        Some(&*self.driver)
    }

    fn copy_engine(&self) -> Option<&dyn CopyEngine> {
        Some(self)
    }

    fn dma_buf(&self) -> Option<&dyn DmaBufExporter> {
        let call = self.driver.functions.mem_get_handle_for_address_range;
        call.map(|_| &*self.driver as _)
    }

    fn peer_memory(&self) -> Option<&dyn PeerMemoryExporter> {
        let pinned = self.driver.devices.iter().any(|entry| entry.abilities.peer_memory);
        pinned.then_some(&*self.driver)
    }

    fn host_registrar(&self) -> Option<&dyn HostRegistrar> {
        Some(&*self.driver)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(&*self.driver)
    }

    fn segments(&self) -> Option<&dyn SegmentMap> {
        Some(&*self.driver)
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(&*self.driver)
    }

    fn monitor(&self) -> Option<&dyn MonitorSource> {
        Some(self)
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

impl CopyEngine for Cuda {
    unsafe fn start_copy(
        &self,
        to: Address,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.driver.start_copy(to, from, len) }
    }
}

impl MonitorSource for Cuda {
    /// The driver has no callback for frees. Its functions can be hooked, which is the monitor's
    /// own doing.
    fn detection(&self) -> MonitorStyle {
        MonitorStyle::Identity
    }

    fn start(&self) -> Result<Arc<dyn Monitor>> {
        Ok(Arc::new(CudaMonitor::start(&self.driver, self.monitor)?))
    }
}
