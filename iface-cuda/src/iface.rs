//! The iface: opening the driver, its devices, the trait, and the driver's codes as errors.

use std::{
    ffi::{CStr, c_char, c_int},
    path::{Path, PathBuf},
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, Allocation, DeviceId, Error, ErrorKind, Iface, IfaceKind, Rejected, Result,
    Segment,
    iface::{
        AllocRequest, Capability, CopyEvent, Device, DmaBufExport, DmaBufMapping, IpcHandle, PeerMemoryExport,
    },
    monitor::Monitor,
    provider::Nic,
};

use crate::{
    copy, export, memory, monitor,
    sys::{self, CuDevice, CuResult, Functions},
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
    pub(crate) functions: Arc<Functions>,
    devices: Vec<Device>,
    /// Whether the driver knows which pool stream-ordered memory came from.
    pub(crate) pool_handles: bool,
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
    driver: Driver,
}

#[derive(Debug)]
enum Driver {
    Library(PathBuf),
    Functions(Functions),
}

impl Builder {
    /// Loads the library at `path` instead of the one that the dynamic loader finds.
    pub fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.driver = Driver::Library(path.as_ref().to_owned());
        self
    }

    /// Calls these functions instead of loading a library.
    pub fn functions(mut self, functions: Functions) -> Self {
        self.driver = Driver::Functions(functions);
        self
    }

    /// Starts the driver and lists its devices.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] without the library, without a symbol of it, without a device, or with a driver
    /// that does not start; the library is named, and the driver's code where there is one. Otherwise what a
    /// device answered when asked for its properties.
    pub fn open(self) -> Result<Cuda> {
        let functions = match self.driver {
            Driver::Library(path) => Functions::load(&path)?,
            Driver::Functions(functions) => functions,
        };
        Cuda::start(functions)
    }
}

impl Cuda {
    /// Opens the driver library that the dynamic loader finds.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// To open another library, or a driver of one's own.
    pub fn builder() -> Builder {
        Builder { driver: Driver::Library(PathBuf::from(Functions::LIBRARY)) }
    }

    /// Gives back what this iface holds of the driver.
    ///
    /// CUDA has no counterpart to `cuInit`, and no context is held, so that there is nothing to refuse it yet.
    ///
    /// # Errors
    /// What the driver reported, with the iface.
    pub fn close(self) -> Result<(), Rejected<Self>> {
        Ok(())
    }

    fn start(functions: Functions) -> Result<Self> {
        // SAFETY: no flags are defined, 0 is the one value; any thread may call it any number of times.
        let code = unsafe { (functions.init)(0) };
        if code != CuResult::CUDA_SUCCESS {
            return Err(unavailable("cuInit", functions.library()).driver_code(name(code), code.0.into()).remedy(
                match code {
                    CuResult::CUDA_ERROR_NO_DEVICE => {
                        "no NVIDIA device is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"
                    }
                    CuResult::CUDA_ERROR_STUB_LIBRARY => {
                        "this is the toolkit's stub: take its folder out of LD_LIBRARY_PATH, so that the driver's \
                         own library is found"
                    }
                    CuResult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
                        "the library and the kernel module are of different versions: reload the module or restart"
                    }
                    _ => "see `nvidia-smi` for the state of the driver",
                },
            ));
        }
        let mut version: c_int = 0;
        // SAFETY: `version` is writable.
        check(unsafe { (functions.driver_get_version)(&mut version) }, "cuDriverGetVersion")?;
        if version < sys::VERSION_WITH_RANGES {
            return Err(unavailable("cuDriverGetVersion", functions.library())
                .context("version", version)
                .remedy(
                    "the driver must be of CUDA 10.2 (10020) or newer to say which range an address is in",
                ));
        }
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        check(unsafe { (functions.device_get_count)(&mut count) }, "cuDeviceGetCount")?;
        if count <= 0 {
            return Err(unavailable("cuDeviceGetCount", functions.library())
                .context("devices", count)
                .remedy("no NVIDIA device is visible: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"));
        }
        let devices = (0..count.unsigned_abs())
            .map(|ordinal| describe(&functions, ordinal).map_err(|error| error.device(DeviceId(ordinal))))
            .collect::<Result<Vec<_>>>()?;
        tracing::debug!(library = functions.library(), version, devices = devices.len(), "CUDA opened");
        Ok(Self {
            functions: Arc::new(functions),
            devices,
            pool_handles: version >= sys::VERSION_WITH_POOL_HANDLE,
        })
    }

    /// The device, if there is one of that number.
    pub(crate) fn device(&self, operation: &'static str, device: DeviceId) -> Result<&Device> {
        self.devices.get(device.0 as usize).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, operation)
                .iface(IfaceKind::CUDA)
                .device(device)
                .context("devices", self.devices.len())
                .remedy("devices count from 0")
        })
    }
}

fn describe(functions: &Functions, ordinal: u32) -> Result<Device> {
    let mut device: CuDevice = 0;
    // SAFETY: `device` is writable.
    check(unsafe { (functions.device_get)(&mut device, ordinal.cast_signed()) }, "cuDeviceGet")?;
    let name = text(|buffer, len| {
        // SAFETY: the buffer has `len` writable bytes.
        check(unsafe { (functions.device_get_name)(buffer, len, device) }, "cuDeviceGetName")
    })?;
    let mut memory = 0usize;
    // SAFETY: `memory` is writable.
    check(unsafe { (functions.device_total_mem)(&mut memory, device) }, "cuDeviceTotalMem_v2")?;
    let pci_bus_id = text(|buffer, len| {
        // SAFETY: the buffer has `len` writable bytes.
        check(unsafe { (functions.device_get_pci_bus_id)(buffer, len, device) }, "cuDeviceGetPCIBusId")
    })?;
    Ok(Device {
        id: DeviceId(ordinal),
        name,
        pci_bus_id: Some(pci_bus_id.to_ascii_lowercase()),
        memory: memory as u64,
    })
}

/// The text that a driver call writes, up to its NUL.
fn text(write: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
    let mut buffer = [0u8; 256];
    write(buffer.as_mut_ptr().cast(), 255)?;
    Ok(CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy().into_owned())
}

/// A driver that does not start or has no device.
fn unavailable(operation: &'static str, library: &str) -> Error {
    Error::new(ErrorKind::Unavailable, operation).iface(IfaceKind::CUDA).context("library", library)
}

/// An operation that this crate does not have.
pub(crate) fn lacks(operation: &'static str, reason: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, operation).iface(IfaceKind::CUDA).context("reason", reason)
}

/// The one place where the driver's codes become errors.
pub(crate) fn check(code: CuResult, operation: &'static str) -> Result<()> {
    let kind = match code {
        CuResult::CUDA_SUCCESS => return Ok(()),
        CuResult::CUDA_ERROR_INVALID_VALUE
        | CuResult::CUDA_ERROR_INVALID_DEVICE
        | CuResult::CUDA_ERROR_INVALID_HANDLE => ErrorKind::InvalidArgument,
        CuResult::CUDA_ERROR_OUT_OF_MEMORY
        | CuResult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
        | CuResult::CUDA_ERROR_TOO_MANY_PEERS => ErrorKind::OutOfResources,
        CuResult::CUDA_ERROR_NOT_INITIALIZED
        | CuResult::CUDA_ERROR_DEINITIALIZED
        | CuResult::CUDA_ERROR_STUB_LIBRARY
        | CuResult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CuResult::CUDA_ERROR_NO_DEVICE
        | CuResult::CUDA_ERROR_DEVICE_NOT_LICENSED
        | CuResult::CUDA_ERROR_SYSTEM_NOT_READY
        | CuResult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => ErrorKind::Unavailable,
        CuResult::CUDA_ERROR_INVALID_CONTEXT
        | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CuResult::CUDA_ERROR_ILLEGAL_STATE => ErrorKind::BadState,
        CuResult::CUDA_ERROR_NOT_READY => ErrorKind::Again,
        CuResult::CUDA_ERROR_ILLEGAL_ADDRESS => ErrorKind::BadAddress,
        CuResult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => ErrorKind::Busy,
        CuResult::CUDA_ERROR_NOT_PERMITTED => ErrorKind::PermissionDenied,
        CuResult::CUDA_ERROR_NOT_SUPPORTED
        | CuResult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
        | CuResult::CUDA_ERROR_UNSUPPORTED_LIMIT
        | CuResult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        | CuResult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => ErrorKind::Unsupported,
        _ => ErrorKind::Driver,
    };
    Err(Error::new(kind, operation).iface(IfaceKind::CUDA).driver_code(name(code), code.0.into()))
}

fn name(code: CuResult) -> &'static str {
    code.name().unwrap_or_default()
}

impl Iface for Cuda {
    fn kind(&self) -> IfaceKind {
        IfaceKind::CUDA
    }

    fn name(&self) -> &str {
        "cuda"
    }

    fn capability(&self) -> Capability {
        Capability { identity: true, ..Capability::default() }
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.devices.clone())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        memory::query(self, address)
    }

    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        memory::segments(self, range)
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocation> {
        memory::allocate(self, request)
    }

    unsafe fn free(&self, allocation: &Allocation) -> Result<()> {
        memory::free(self, allocation)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        copy::copy(self, to, from, len)
    }

    unsafe fn copy_async(&self, to: Address, from: Address, len: u64) -> Result<Box<dyn CopyEvent>> {
        copy::copy_async(self, to, from, len)
    }

    fn export_dma_buf(&self, range: AddressRange, nic: &Nic, mapping: DmaBufMapping) -> Result<DmaBufExport> {
        export::export_dma_buf(self, range, nic, mapping)
    }

    fn release_dma_buf(&self, export: DmaBufExport) -> Result<()> {
        export::release_dma_buf(self, export)
    }

    fn export_peer_memory(&self, range: AddressRange, nic: &Nic) -> Result<PeerMemoryExport> {
        export::export_peer_memory(self, range, nic)
    }

    unsafe fn host_register(&self, range: AddressRange) -> Result<()> {
        memory::host_register(self, range)
    }

    fn host_unregister(&self, range: AddressRange) -> Result<()> {
        memory::host_unregister(self, range)
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        export::ipc_export(self, allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        export::ipc_open(self, handle)
    }

    unsafe fn ipc_close(&self, allocation: &Allocation) -> Result<()> {
        export::ipc_close(self, allocation)
    }

    fn flush_inbound(&self, device: DeviceId) -> Result<()> {
        export::flush_inbound(self, device)
    }

    fn monitor(&self) -> Result<Arc<dyn Monitor>> {
        monitor::monitor(self)
    }
}
