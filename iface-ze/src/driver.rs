//! The opened driver: its functions, its devices and a context for each driver behind the loader.

#![allow(unsafe_code, reason = "calls the driver on devices and contexts")]

use std::ptr;

use hmem_core::{DeviceId, ErrorKind, IfaceKind, ProcessMark, Result, iface::Device};
use hmem_iface_kit::{log_failure, text};
use parking_lot::RwLock;

use crate::{
    error::{ZE, check, coded},
    sys::{
        self, ContextDescription, ContextHandle, DeviceExternalMemoryProperties, DeviceHandle,
        DeviceMemoryProperties, DeviceProperties, DriverHandle, Functions, PciProperties,
        QueueGroupProperties, ZeResult,
    },
};

/// A root device: a GPU that is not a part of another device.
#[derive(Debug)]
pub(crate) struct DeviceEntry {
    pub(crate) description: Device,
    pub(crate) handle: DeviceHandle,
    /// Handles of the sub-devices. Their memory counts as memory of this device.
    sub_devices: Vec<DeviceHandle>,
    /// Index of the device's driver in [`Driver::contexts`].
    pub(crate) driver: usize,
    /// Types of exports that the device supports, as `ZE_EXTERNAL_MEMORY_TYPE_FLAG_*` bits.
    pub(crate) exports: u32,
    /// Types of imports that the device supports, as `ZE_EXTERNAL_MEMORY_TYPE_FLAG_*` bits.
    imports: u32,
    /// UUID of the device, which is the same in every process.
    pub(crate) uuid: [u8; 16],
    /// Ordinal of the queue group that runs copies.
    pub(crate) copy_group: u32,
}

impl DeviceEntry {
    /// Returns true if memory of the device can be exported as a dma-buf.
    pub(crate) fn exports_dma_bufs(&self) -> bool {
        self.exports & sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF != 0
    }

    /// Returns true if dma-bufs can be imported as memory of the device.
    pub(crate) fn imports_dma_bufs(&self) -> bool {
        self.imports & sys::ZE_EXTERNAL_MEMORY_TYPE_FLAG_DMA_BUF != 0
    }
}

/// The opened loader: its functions, the devices of all its drivers, and contexts of this iface.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) functions: Functions,
    /// The process that opened the loader. A forked child releases nothing: its driver has the
    /// device files of the parent, with the parent's memory. The child also takes no lock of the
    /// iface to release or to watch memory, since a thread of the parent may have held the lock
    /// during the fork.
    pub(crate) process: ProcessMark,
    pub(crate) devices: Vec<DeviceEntry>,
    /// One context for each driver with a GPU. Calls hold the lock while they use a context, so
    /// that no other thread destroys it.
    pub(crate) contexts: RwLock<Vec<ContextHandle>>,
}

impl Driver {
    pub(crate) fn start(functions: Functions) -> Result<Self> {
        let process = ProcessMark::current().map_err(|error| error.iface(IfaceKind::ZE))?;
        // SAFETY: the header defines the flag, and any thread may make the call any number of
        // times.
        let code = unsafe { (functions.init)(sys::ZE_INIT_FLAG_GPU_ONLY) };
        if code != ZeResult::ZE_RESULT_SUCCESS {
            return Err(coded(ZE.unavailable("zeInit", functions.library()), code).remedy(
                match code {
                    ZeResult::ZE_RESULT_ERROR_UNINITIALIZED => {
                        "no Level Zero driver starts: check that a GPU driver for Level Zero is \
                         installed and that this user may open /dev/dri/renderD*"
                    }
                    _ => "see ZE_ENABLE_LOADER_DEBUG_TRACE=1 for what the loader tried",
                },
            ));
        }
        // From here on, dropping `driver` destroys the contexts.
        let (devices, contexts) = (Vec::new(), RwLock::default());
        let mut driver = Self { functions, process, devices, contexts };
        let drivers = list(DriverHandle::NULL, "zeDriverGet", |count, into| {
            // SAFETY: `list` passes valid pointers.
            unsafe { (driver.functions.driver_get)(count, into) }
        })?;
        for (index, handle) in drivers.into_iter().enumerate() {
            driver.add(index as u32, handle)?;
        }
        if driver.devices.is_empty() {
            return Err(ZE
                .unavailable("zeDeviceGet", driver.functions.library())
                .context("devices", 0)
                .remedy(
                    "no GPU is visible: see ZE_AFFINITY_MASK, and check that this user may open \
                         /dev/dri/renderD*",
                ));
        }
        Ok(driver)
    }

    /// Adds the GPUs of one driver. If the driver has a GPU, creates a context.
    fn add(&mut self, index: u32, driver: DriverHandle) -> Result<()> {
        let number = self.contexts.read().len();
        let mut found = Vec::new();
        let devices = list(DeviceHandle::NULL, "zeDeviceGet", |count, into| {
            // SAFETY: the driver is one that the loader listed; `list` passes valid pointers.
            unsafe { (self.functions.device_get)(driver, count, into) }
        })?;
        for (place, handle) in devices.into_iter().enumerate() {
            // The device number equals libfabric's `fi_hmem_ze_device(driver index, device index)`.
            let id = DeviceId(index << 16 | place as u32);
            found.extend(self.describe(handle, id, number).map_err(|error| error.device(id))?);
        }
        if found.is_empty() {
            return Ok(());
        }
        let (description, mut context) = (ContextDescription::default(), ContextHandle::NULL);
        // SAFETY: the driver is one that the loader listed, the description is complete, `context`
        // is writable.
        let code = unsafe { (self.functions.context_create)(driver, &description, &mut context) };
        check(code, "zeContextCreate")?;
        self.contexts.write().push(context);
        self.devices.extend(found);
        Ok(())
    }

    /// Returns the entry of a device.
    ///
    /// # Errors
    /// InvalidArgument for an unknown device.
    pub(crate) fn device(&self, operation: &'static str, device: DeviceId) -> Result<&DeviceEntry> {
        let entry = self.devices.iter().find(|entry| entry.description.id == device);
        entry.ok_or_else(|| {
            ZE.error(ErrorKind::InvalidArgument, operation)
                .device(device)
                .context("devices", self.devices.len())
                .remedy(
                    "a device number has the index of the driver in bits 16 and up, and below \
                         them the index of the device",
                )
        })
    }

    /// Returns the root device for a handle of a root device or sub-device. Returns `None` for a
    /// device that the driver did not list.
    pub(crate) fn device_of(&self, handle: DeviceHandle) -> Option<&DeviceEntry> {
        self.devices
            .iter()
            .find(|entry| entry.handle == handle || entry.sub_devices.contains(&handle))
    }

    /// Checks that the calling process opened the loader.
    ///
    /// # Errors
    /// BadState in a forked child.
    pub(crate) fn check_process(&self, operation: &'static str) -> Result<()> {
        self.process.check(operation).map_err(|error| error.iface(IfaceKind::ZE))
    }

    /// Calls a function with the context of a driver. No other thread destroys the context during
    /// the call.
    ///
    /// # Errors
    /// BadState if the iface was closed. Otherwise the error of the function.
    pub(crate) fn with_context<T>(
        &self,
        driver: usize,
        call: impl FnOnce(ContextHandle) -> Result<T>,
    ) -> Result<T> {
        let contexts = self.contexts.read();
        let context = contexts.get(driver).copied().ok_or_else(|| {
            ZE.error(ErrorKind::BadState, "context").remedy("the iface was closed: open it again")
        })?;
        call(context)
    }

    /// Destroys the contexts of this iface. After an error, the contexts that were not destroyed
    /// remain.
    pub(crate) fn release(&self) -> Result<()> {
        let mut contexts = self.contexts.write();
        while let Some(context) = contexts.last() {
            // SAFETY: `add` created the context, no other code has it, and the list loses it once
            // it is destroyed.
            check(unsafe { (self.functions.context_destroy)(*context) }, "zeContextDestroy")?;
            contexts.pop();
        }
        Ok(())
    }

    /// Returns the entry for a device, or `None` if the device is not a GPU.
    fn describe(
        &self,
        handle: DeviceHandle,
        id: DeviceId,
        driver: usize,
    ) -> Result<Option<DeviceEntry>> {
        let functions = &self.functions;
        let mut properties = DeviceProperties::default();
        // SAFETY: the driver listed the device. The structure has its type in `stype` and ends the
        // chain.
        let code = unsafe { (functions.device_get_properties)(handle, &mut properties) };
        check(code, "zeDeviceGetProperties")?;
        if properties.kind != sys::ZE_DEVICE_TYPE_GPU {
            return Ok(None);
        }
        let mut external = DeviceExternalMemoryProperties::default();
        let get = functions.device_get_external_memory_properties;
        // SAFETY: the driver listed the device. The structure has its type in `stype` and ends the
        // chain.
        check(unsafe { get(handle, &mut external) }, "zeDeviceGetExternalMemoryProperties")?;
        let description = Device {
            id,
            name: text(&properties.name.map(|character| character as u8)),
            pci_bus_id: self.pci_bus_id(handle),
            memory: self.memory_of(handle)?,
        };
        Ok(Some(DeviceEntry {
            description,
            handle,
            sub_devices: self.sub_devices(handle)?,
            driver,
            exports: external.memory_export_types,
            imports: external.memory_import_types,
            uuid: properties.uuid,
            copy_group: self.copy_group(handle)?,
        }))
    }

    /// Returns the PCI address of a device, or `None` if its driver refuses the query.
    ///
    /// A driver without the extension returns UNSUPPORTED_FEATURE. Intel's driver returns
    /// UNINITIALIZED for a device that is not on a PCI bus.
    fn pci_bus_id(&self, handle: DeviceHandle) -> Option<String> {
        let mut pci = PciProperties::default();
        // SAFETY: the driver listed the device. The structure has its type in `stype` and ends the
        // chain.
        let code = unsafe { (self.functions.device_pci_get_properties)(handle, &mut pci) };
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

    /// Returns the total size of the device's memories in bytes.
    fn memory_of(&self, handle: DeviceHandle) -> Result<u64> {
        let empty = DeviceMemoryProperties::default();
        let memories = list(empty, "zeDeviceGetMemoryProperties", |count, into| {
            // SAFETY: the driver listed the device, and `list` passes valid pointers.
            unsafe { (self.functions.device_get_memory_properties)(handle, count, into) }
        })?;
        Ok(memories.iter().map(|memory| memory.total_size).fold(0, u64::saturating_add))
    }

    /// Returns the ordinal of the queue group for copies: the first group of copy engines only, or
    /// else the first group that supports copies, or else 0.
    fn copy_group(&self, handle: DeviceHandle) -> Result<u32> {
        const CALL: &str = "zeDeviceGetCommandQueueGroupProperties";
        let groups = list(QueueGroupProperties::default(), CALL, |count, into| {
            // SAFETY: the driver listed the device, and `list` passes valid pointers.
            unsafe { (self.functions.device_get_queue_groups)(handle, count, into) }
        })?;
        let copy = sys::ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
        let both = copy | sys::ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE;
        let engines = groups.iter().position(|group| group.flags & both == copy);
        let any = || groups.iter().position(|group| group.flags & copy != 0);
        // Every group of compute queues supports copies, even without the flag for copies.
        Ok(engines.or_else(any).unwrap_or(0) as u32)
    }

    fn sub_devices(&self, device: DeviceHandle) -> Result<Vec<DeviceHandle>> {
        list(DeviceHandle::NULL, "zeDeviceGetSubDevices", |count, into| {
            // SAFETY: the driver listed the device, and `list` passes valid pointers.
            unsafe { (self.functions.device_get_sub_devices)(device, count, into) }
        })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.process.is_current() {
            log_failure!(warn, self.release(), "cannot destroy a Level Zero context");
        }
    }
}

/// Queries a list of the driver: first its length, then its elements. `get` receives a pointer to a
/// writable count, and either null or a pointer to that many elements.
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
