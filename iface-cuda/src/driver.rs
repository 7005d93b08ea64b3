//! The opened driver: its functions and its devices, which never change.
//!
//! Abilities of a device are read from its attributes. For an attribute that the driver does not
//! know, the driver returns INVALID_VALUE, and the device counts as lacking the ability.

#![allow(unsafe_code, reason = "calls the driver on devices")]

use std::ffi::{c_char, c_int};

use hmem_core::{DeviceId, Error, Result, iface};
use hmem_iface_kit::text;

use crate::{
    error::{CUDA, check},
    sys::{self, CuDevice, CuDeviceAttribute, CuResult, Functions},
};

/// Functions and devices of one opened iface.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) functions: Functions,
    /// Devices in the order of their ordinals.
    pub(crate) devices: Vec<DeviceEntry>,
}

/// Abilities of a device, read from its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Abilities {
    /// True if `cuMemAllocManaged` works on the device.
    pub(crate) managed: bool,
    /// True if `cuMemCreate` and `cuMemMap` work on the device.
    pub(crate) vmm: bool,
    /// True if `cuMemCreate` accepts the GPUDirect RDMA flag.
    pub(crate) rdma_with_vmm: bool,
    /// True if `cuMemAllocAsync` works on the device.
    pub(crate) pools: bool,
    /// True if the kernel's peer-memory clients can pin memory of the device.
    pub(crate) peer_memory: bool,
    /// True if the driver exports memory of the device as dma-bufs.
    pub(crate) dma_buf: bool,
    /// True if the device sees inbound writes in order without a flush.
    pub(crate) orders_writes: bool,
    /// True if `cuFlushGPUDirectRDMAWrites` works on the device.
    pub(crate) flushes: bool,
}

/// A device with its handle and abilities.
#[derive(Debug)]
pub(crate) struct DeviceEntry {
    pub(crate) handle: CuDevice,
    pub(crate) description: iface::Device,
    pub(crate) abilities: Abilities,
}

impl Driver {
    /// Queries the driver for its devices. The caller must have called `cuInit`.
    pub(crate) fn new(functions: Functions) -> Result<Self> {
        let mut count: c_int = 0;
        // SAFETY: `count` is writable.
        check(unsafe { (functions.device_get_count)(&mut count) }, "cuDeviceGetCount")?;
        let devices = (0..count.max(0).unsigned_abs())
            .map(|ordinal| {
                describe(&functions, ordinal).map_err(|error| error.device(DeviceId(ordinal)))
            })
            .collect::<Result<_>>()?;
        Ok(Self { functions, devices })
    }

    /// Returns the device with this ordinal. For an unknown ordinal, returns an error that names
    /// `operation`.
    pub(crate) fn device(&self, operation: &'static str, device: DeviceId) -> Result<&DeviceEntry> {
        let unknown = || CUDA.unknown_device(operation, device, self.devices.len());
        self.devices.get(device.0 as usize).ok_or_else(unknown)
    }
}

fn describe(functions: &Functions, ordinal: u32) -> Result<DeviceEntry> {
    let mut handle: CuDevice = 0;
    // SAFETY: `handle` is writable.
    check(unsafe { (functions.device_get)(&mut handle, ordinal.cast_signed()) }, "cuDeviceGet")?;
    // SAFETY: the buffer has `len` writable bytes.
    let name = |buffer, len| unsafe { (functions.device_get_name)(buffer, len, handle) };
    let name = text_of(name, "cuDeviceGetName")?;
    let mut memory = 0usize;
    // SAFETY: `memory` is writable.
    check(unsafe { (functions.device_total_mem)(&mut memory, handle) }, "cuDeviceTotalMem_v2")?;
    // SAFETY: the buffer has `len` writable bytes.
    let bus_id = |buffer, len| unsafe { (functions.device_get_pci_bus_id)(buffer, len, handle) };
    let bus_id = text_of(bus_id, "cuDeviceGetPCIBusId")?;
    let description = iface::Device {
        id: DeviceId(ordinal),
        name,
        pci_bus_id: Some(bus_id.to_ascii_lowercase()),
        memory: memory as u64,
    };
    Ok(DeviceEntry { handle, description, abilities: abilities(functions, handle)? })
}

/// Returns the C string that `write`, a driver call, writes to a buffer of a given length.
fn text_of(
    write: impl FnOnce(*mut c_char, c_int) -> CuResult,
    call: &'static str,
) -> Result<String> {
    let mut buffer = [0u8; 256];
    check(write(buffer.as_mut_ptr().cast(), 255), call)?;
    Ok(text(&buffer))
}

fn abilities(functions: &Functions, device: CuDevice) -> Result<Abilities> {
    let value = |attribute| attribute_of(functions, device, attribute);
    let has = |attribute| Ok::<_, Error>(value(attribute)? != 0);
    let flushes = value(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
    let ordering = value(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
    Ok(Abilities {
        managed: has(sys::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)?,
        vmm: has(sys::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
        rdma_with_vmm: has(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
        pools: has(sys::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)?,
        peer_memory: has(sys::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
        dma_buf: has(sys::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
        orders_writes: ordering >= sys::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER.cast_signed(),
        flushes: flushes.unsigned_abs() & sys::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST != 0,
    })
}

/// Returns an attribute's value, or 0 if the driver does not know the attribute.
fn attribute_of(
    functions: &Functions,
    device: CuDevice,
    attribute: CuDeviceAttribute,
) -> Result<c_int> {
    let mut value: c_int = 0;
    // SAFETY: `value` is writable.
    match unsafe { (functions.device_get_attribute)(&mut value, attribute, device) } {
        CuResult::CUDA_ERROR_INVALID_VALUE => Ok(0),
        code => check(code, "cuDeviceGetAttribute")
            .map(|()| value)
            .map_err(|error| error.context("attribute", attribute)),
    }
}
