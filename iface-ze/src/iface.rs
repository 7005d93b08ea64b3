//! The iface: opens the driver, lists its devices and implements the trait.

use std::{
    ffi::{CStr, c_char},
    path::{Path, PathBuf},
    ptr,
    sync::Arc,
};

use hmem_core::{
    Address, Allocation, DeviceId, Error, ErrorKind, Iface, IfaceKind, Rejected, Result,
    cause::RefusalCause,
    iface::{Device, Facet, InboundFlush},
};

use crate::{
    causes::CAUSES,
    error::{check, coded, lacks, unavailable},
    memory,
    sys::{
        self, ContextDescription, ContextHandle, DeviceHandle, DeviceMemoryProperties,
        DeviceProperties, DriverHandle, Functions, PciProperties, ZE_MAX_DEVICE_NAME, ZeResult,
    },
};

/// Level Zero memory, over the loader library.
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
    functions: Arc<Functions>,
    devices: Vec<Device>,
    /// Every root device and sub-device, with the device that it counts as.
    handles: Vec<(DeviceHandle, DeviceId)>,
    /// One context for each driver with a GPU.
    contexts: Vec<ContextHandle>,
}

/// Opens [`LevelZero`] over a driver library of choice.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_ze::LevelZero;
///
/// let error = LevelZero::builder().library("/nowhere/libze_loader.so.1").open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// assert_eq!(error.context_value("library"), Some("/nowhere/libze_loader.so.1"));
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
    /// [`ErrorKind::Unavailable`] without the library, without a symbol of it, without a device, or
    /// with a driver that does not start. The error names the library, and the driver's code if
    /// there is one. Otherwise the error of a device that was asked for its properties.
    pub fn open(self) -> Result<LevelZero> {
        let functions = match self.driver {
            Driver::Library(path) => Functions::load(&path)?,
            Driver::Functions(functions) => functions,
        };
        LevelZero::start(functions)
    }
}

impl LevelZero {
    /// Opens the loader library that the dynamic loader finds.
    ///
    /// # Errors
    /// As [`Builder::open`].
    pub fn open() -> Result<Self> {
        Self::builder().open()
    }

    /// Returns a builder, which can open another library or injected functions.
    pub fn builder() -> Builder {
        Builder { driver: Driver::Library(PathBuf::from(Functions::LIBRARY)) }
    }

    /// Destroys the contexts of this iface.
    ///
    /// Dropping does the same, and can only log a refusal.
    ///
    /// # Errors
    /// The driver's error. The iface comes back.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.release() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn start(functions: Functions) -> Result<Self> {
        // SAFETY: the flag is one of the header's; any thread may call it any number of times.
        let code = unsafe { (functions.init)(sys::ZE_INIT_FLAG_GPU_ONLY) };
        if code != ZeResult::ZE_RESULT_SUCCESS {
            return Err(coded(unavailable("zeInit", functions.library()), code).remedy(match code {
                ZeResult::ZE_RESULT_ERROR_UNINITIALIZED => {
                    "no Level Zero driver starts: see whether a GPU driver for Level Zero is installed and this user \
                     may open /dev/dri/renderD*"
                }
                _ => "see ZE_ENABLE_LOADER_DEBUG_TRACE=1 for what the loader tried",
            }));
        }
        // From here on, dropping it gives the contexts back.
        let mut level_zero = Self {
            functions: Arc::new(functions),
            devices: Vec::new(),
            handles: Vec::new(),
            contexts: Vec::new(),
        };
        for driver in drivers(&level_zero.functions)? {
            level_zero.add(driver)?;
        }
        if level_zero.devices.is_empty() {
            return Err(unavailable("zeDeviceGet", level_zero.functions.library())
                .context("devices", 0)
                .remedy("no GPU is visible: see ZE_AFFINITY_MASK, and whether this user may open /dev/dri/renderD*"));
        }
        tracing::debug!(
            library = level_zero.functions.library(),
            devices = level_zero.devices.len(),
            "Level Zero opened"
        );
        Ok(level_zero)
    }

    /// Adds a driver's GPUs, and a context if it has any.
    fn add(&mut self, driver: DriverHandle) -> Result<()> {
        let before = self.devices.len();
        for handle in devices(&self.functions, driver)? {
            let id = DeviceId(self.devices.len() as u32);
            let Some(device) =
                describe(&self.functions, handle, id).map_err(|error| error.device(id))?
            else {
                continue;
            };
            self.devices.push(device);
            self.handles.push((handle, id));
            for part in sub_devices(&self.functions, handle).map_err(|error| error.device(id))? {
                self.handles.push((part, id));
            }
        }
        if self.devices.len() > before {
            let description = ContextDescription {
                stype: sys::ZE_STRUCTURE_TYPE_CONTEXT_DESC,
                next: ptr::null(),
                flags: 0,
            };
            let mut context = ContextHandle::NULL;
            // SAFETY: the driver is one that the loader listed, the description is complete,
            // `context` is writable.
            let code =
                unsafe { (self.functions.context_create)(driver, &description, &mut context) };
            check(code, "zeContextCreate")?;
            self.contexts.push(context);
        }
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        while let Some(context) = self.contexts.last() {
            // SAFETY: `start` created it, nobody else knows it, and it leaves the list once
            // destroyed.
            check(unsafe { (self.functions.context_destroy)(*context) }, "zeContextDestroy")?;
            self.contexts.pop();
        }
        Ok(())
    }
}

impl Drop for LevelZero {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            tracing::warn!(%error, "a Level Zero context stays behind");
        }
    }
}

/// Describes a device. Returns `None` if it is no GPU.
fn describe(functions: &Functions, handle: DeviceHandle, id: DeviceId) -> Result<Option<Device>> {
    let mut properties = DeviceProperties {
        stype: sys::ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES,
        next: ptr::null_mut(),
        kind: 0,
        vendor_id: 0,
        device_id: 0,
        flags: 0,
        subdevice_id: 0,
        core_clock_rate: 0,
        max_mem_alloc_size: 0,
        max_hardware_contexts: 0,
        max_command_queue_priority: 0,
        num_threads_per_eu: 0,
        physical_eu_simd_width: 0,
        num_eus_per_subslice: 0,
        num_subslices_per_slice: 0,
        num_slices: 0,
        timer_resolution: 0,
        timestamp_valid_bits: 0,
        kernel_timestamp_valid_bits: 0,
        uuid: [0; 16],
        name: [0; ZE_MAX_DEVICE_NAME],
    };
    check(
        // SAFETY: the device is one that its driver listed; the structure says its type and ends
        // the chain.
        unsafe { (functions.device_get_properties)(handle, &mut properties) },
        "zeDeviceGetProperties",
    )?;
    if properties.kind != sys::ZE_DEVICE_TYPE_GPU {
        return Ok(None);
    }
    Ok(Some(Device {
        id,
        name: text(properties.name),
        pci_bus_id: pci_bus_id(functions, handle),
        memory: memory_of(functions, handle)?,
    }))
}

/// Returns the PCI address of a device, or `None` if its driver does not say.
///
/// A driver without the extension says unsupported; Intel's says uninitialized of a device that is
/// on no PCI bus.
fn pci_bus_id(functions: &Functions, handle: DeviceHandle) -> Option<String> {
    let mut pci = PciProperties {
        stype: sys::ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES,
        next: ptr::null_mut(),
        domain: 0,
        bus: 0,
        device: 0,
        function: 0,
        speed_generation: -1,
        speed_width: -1,
        speed_bandwidth: -1,
    };
    // SAFETY: the device is one that its driver listed; the structure says its type and ends the
    // chain.
    let code = unsafe { (functions.device_pci_get_properties)(handle, &mut pci) };
    match check(code, "zeDevicePciGetPropertiesExt") {
        Ok(()) => Some(format!(
            "{:04x}:{:02x}:{:02x}.{:x}",
            pci.domain, pci.bus, pci.device, pci.function
        )),
        Err(error) => {
            tracing::debug!(%error, "a device without a PCI bus id");
            None
        }
    }
}

/// Returns the sum of the device's memories.
fn memory_of(functions: &Functions, handle: DeviceHandle) -> Result<u64> {
    let empty = DeviceMemoryProperties {
        stype: sys::ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES,
        next: ptr::null_mut(),
        flags: 0,
        max_clock_rate: 0,
        max_bus_width: 0,
        total_size: 0,
        name: [0; ZE_MAX_DEVICE_NAME],
    };
    let memories = list(empty, "zeDeviceGetMemoryProperties", |count, into| {
        // SAFETY: the device is one that its driver listed; `list` keeps the two pointers'
        // promises.
        unsafe { (functions.device_get_memory_properties)(handle, count, into) }
    })?;
    Ok(memories.iter().map(|memory| memory.total_size).fold(0, u64::saturating_add))
}

fn drivers(functions: &Functions) -> Result<Vec<DriverHandle>> {
    list(DriverHandle::NULL, "zeDriverGet", |count, into| {
        // SAFETY: `list` keeps the two pointers' promises.
        unsafe { (functions.driver_get)(count, into) }
    })
}

fn devices(functions: &Functions, driver: DriverHandle) -> Result<Vec<DeviceHandle>> {
    list(DeviceHandle::NULL, "zeDeviceGet", |count, into| {
        // SAFETY: the driver is one that the loader listed; `list` keeps the two pointers'
        // promises.
        unsafe { (functions.device_get)(driver, count, into) }
    })
}

fn sub_devices(functions: &Functions, device: DeviceHandle) -> Result<Vec<DeviceHandle>> {
    list(DeviceHandle::NULL, "zeDeviceGetSubDevices", |count, into| {
        // SAFETY: the device is one that its driver listed; `list` keeps the two pointers'
        // promises.
        unsafe { (functions.device_get_sub_devices)(device, count, into) }
    })
}

/// Asks for the count, then for as many elements: the first pointer is a writable count, the second
/// null or the start of that many elements.
fn list<T: Clone>(
    empty: T,
    operation: &'static str,
    get: impl Fn(*mut u32, *mut T) -> ZeResult,
) -> Result<Vec<T>> {
    let mut count = 0u32;
    check(get(&mut count, ptr::null_mut()), operation)?;
    let mut elements = vec![empty; count as usize];
    if !elements.is_empty() {
        check(get(&mut count, elements.as_mut_ptr()), operation)?;
        elements.truncate(count as usize);
    }
    Ok(elements)
}

/// Returns the text that a driver wrote, up to its NUL.
fn text(buffer: [c_char; ZE_MAX_DEVICE_NAME]) -> String {
    let bytes = buffer.map(|character| character as u8);
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

// SAFETY: nothing is allocated, copied or exported yet. `query` repeats what the driver knows of an
// address now, with the driver's ids, which are never reused.
unsafe impl Iface for LevelZero {
    fn kind(&self) -> IfaceKind {
        IfaceKind::ZE
    }

    fn name(&self) -> &str {
        "ze"
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.devices.clone())
    }

    fn query(&self, address: Address) -> Result<Option<Allocation>> {
        memory::query(&self.functions, &self.contexts, &self.handles, address)
    }

    unsafe fn copy(&self, to: Address, from: Address, len: u64) -> Result<()> {
        Err(lacks("copy", "hmem-iface-ze does not copy yet")
            .context("to", to)
            .context("from", from)
            .context("length", len))
    }

    fn inbound_flush(&self) -> Option<&dyn InboundFlush> {
        Some(self)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }

    fn unavailable(&self, facet: Facet) -> Error {
        lacks(
            facet.operation(),
            match facet {
                Facet::Allocator => "hmem-iface-ze does not allocate yet",
                Facet::CopyEngine => "hmem-iface-ze does not copy asynchronously yet",
                Facet::DmaBuf => "hmem-iface-ze does not export dma-bufs yet",
                Facet::PeerMemory => "hmem-iface-ze does not export peer memory yet",
                Facet::HostRegistrar => "hmem-iface-ze does not page-lock host memory yet",
                Facet::Ipc => "hmem-iface-ze does not hand allocations to other processes yet",
                Facet::Monitor => "hmem-iface-ze does not monitor frees yet",
                _ => "hmem-iface-ze does not have it yet",
            },
        )
    }
}

/// Refuses, so that no caller takes a NIC's writes for visible: the devices may need a flush that
/// this crate does not make yet.
impl InboundFlush for LevelZero {
    fn flush(&self, device: DeviceId) -> Result<()> {
        if device.0 as usize >= self.devices.len() {
            return Err(Error::new(ErrorKind::InvalidArgument, "flush_inbound")
                .iface(IfaceKind::ZE)
                .device(device)
                .context("devices", self.devices.len())
                .remedy("devices count from 0"));
        }
        Err(lacks("flush_inbound", "hmem-iface-ze does not flush inbound writes yet")
            .device(device))
    }
}
