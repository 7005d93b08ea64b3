//! The functions of `libSynapse.so` and `libhl-thunk.so` that this crate calls.

#![allow(non_upper_case_globals, reason = "the vendor's own spelling of status codes")]

use std::ffi::{c_char, c_int, c_void};

hmem_core::c_enum! {
    /// Status code of the runtime (`synStatus`).
    SynStatus(c_int) {
        synSuccess = 0,
        synInvalidArgument = 1,
        synOutOfHostMemory = 3,
        synOutOfDeviceMemory = 4,
        synObjectAlreadyInitialized = 5,
        synObjectNotInitialized = 6,
        synNoDeviceFound = 8,
        synDeviceTypeMismatch = 9,
        synFailedToAllocateDeviceMemory = 14,
        synFailedToFreeDeviceMemory = 15,
        synFailedNotEnoughDevicesFound = 16,
        synDeviceReset = 17,
        synUnsupported = 18,
        synDeviceAlreadyAcquired = 20,
        synBusy = 22,
        synAllResourcesTaken = 23,
        synUnavailable = 24,
        synFail = 26,
        synOutOfResources = 27,
        synUninitialized = 28,
        synAlreadyInitialized = 29,
        synMappingNotFound = 34,
        synTimeout = 42,
    }
}

/// `HOST_TO_DRAM` of `synDmaDir`: a copy from host to device memory.
pub const HOST_TO_DRAM: c_int = 0;
/// `DRAM_TO_HOST` of `synDmaDir`: a copy from device to host memory.
pub const DRAM_TO_HOST: c_int = 1;

/// Device type of Gaudi 2 (`synDeviceGaudi2`). Later devices have higher numbers.
pub const SYN_DEVICE_GAUDI2: c_int = 4;

/// Properties of an acquired device (`synDeviceInfoV2`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceInfo {
    /// First address of the SRAM, in the device's address space.
    pub sram_base: u64,
    /// First address of the DRAM, in the device's address space.
    pub dram_base: u64,
    /// Size of the SRAM in bytes.
    pub sram_size: u32,
    /// Size of the DRAM in bytes.
    pub dram_size: u64,
    /// Bit mask of the compute units in use.
    pub tpc_enabled_mask: u64,
    /// 1 if the device has DRAM, else 0.
    pub dram_enabled: u8,
    /// Number that identifies the device in this process.
    pub device_id: u32,
    /// File descriptor of the device's file, which the runtime opened.
    pub fd: u32,
    /// Type of the device (`synDeviceType`).
    pub device_type: c_int,
    /// Number that identifies the device on the machine.
    pub device_index: u8,
    /// First address of the range at which all memory of the device is mapped in the device's
    /// address space. Addresses from `synDeviceMalloc` lie in this range. 0 if the installed
    /// `libSynapse.so` is too old to report the address.
    pub global_hbm_base: u64,
    /// Space for members that newer versions of `libSynapse.so` write.
    pub reserved: [u64; 23],
}

const _: () = assert!(size_of::<DeviceInfo>() == 256);
const _: () = assert!(std::mem::offset_of!(DeviceInfo, dram_size) == 24);
const _: () = assert!(std::mem::offset_of!(DeviceInfo, device_id) == 44);
const _: () = assert!(std::mem::offset_of!(DeviceInfo, fd) == 48);
const _: () = assert!(std::mem::offset_of!(DeviceInfo, device_type) == 52);
const _: () = assert!(std::mem::offset_of!(DeviceInfo, global_hbm_base) == 64);

/// Functions of `libSynapse.so`.
pub mod synapse {
    use hmem_core::IfaceKind;

    use super::{DeviceInfo, SynStatus, c_char, c_int, c_void};

    hmem_core::function_table! {
        /// Table of the functions of `libSynapse.so` that this crate calls.
        // SAFETY: the vendor supports loading its library in any process. The signatures are those
        // of the vendor's headers.
        unsafe Functions {
            library: "libSynapse.so",
            variable: "HMEM_SYNAPSEAI_LIBRARY",
            iface: IfaceKind::SYNAPSEAI,
            not_loaded: "install the SynapseAI software (habanalabs-graph), or name its library \
                 in HMEM_SYNAPSEAI_LIBRARY (in Rust: SynapseAi::builder().library(path))",
            lacks_symbol: "the library has no such symbol: it is not libSynapse.so, or too old",
        }
        required {
            initialize: synInitialize() -> SynStatus;
            device_get_count: synDeviceGetCount(*mut u32) -> SynStatus;
            /// Reads the properties of an acquired device: `synDeviceGetInfoV2(device, info)`.
            device_get_info: synDeviceGetInfoV2(u32, *mut DeviceInfo) -> SynStatus;
            /// Acquires a device for this process: `synDeviceAcquire(device, pci_bus_id)`.
            device_acquire: synDeviceAcquire(*mut u32, *const c_char) -> SynStatus;
            /// Allocates device memory: `synDeviceMalloc(device, size, address, flags, buffer)`.
            device_malloc: synDeviceMalloc(u32, u64, u64, u32, *mut u64) -> SynStatus;
            /// Frees device memory: `synDeviceFree(device, buffer, flags)`.
            device_free: synDeviceFree(u32, u64, u32) -> SynStatus;
            /// Allocates page-locked host memory: `synHostMalloc(device, size, flags, buffer)`.
            host_malloc: synHostMalloc(u32, u64, u32, *mut *mut c_void) -> SynStatus;
            /// Frees memory of `synHostMalloc`: `synHostFree(device, buffer, flags)`.
            host_free: synHostFree(u32, *const c_void, u32) -> SynStatus;
            /// Creates a stream: `synStreamCreateGeneric(stream, device, flags)`.
            stream_create: synStreamCreateGeneric(*mut *mut c_void, u32, u32) -> SynStatus;
            stream_destroy: synStreamDestroy(*mut c_void) -> SynStatus;
            stream_synchronize: synStreamSynchronize(*mut c_void) -> SynStatus;
            /// Starts a copy on a stream:
            /// `synMemCopyAsync(stream, source, size, destination, direction)`.
            mem_copy_async: synMemCopyAsync(*mut c_void, u64, u64, u64, c_int) -> SynStatus;
        }
        optional {}
    }
}

/// Functions of `libhl-thunk.so`.
pub mod hlthunk {
    use hmem_core::IfaceKind;

    use super::{c_char, c_int};

    hmem_core::function_table! {
        /// Table of the functions of `libhl-thunk.so` that this crate calls. Version 6.3 (2023) of
        /// the library was the first to have all of them.
        // SAFETY: the vendor supports loading its library in any process. The signatures are those
        // of the vendor's headers.
        unsafe Functions {
            library: "libhl-thunk.so",
            variable: "HMEM_HLTHUNK_LIBRARY",
            iface: IfaceKind::SYNAPSEAI,
            not_loaded: "install habanalabs-thunk, or name its library in HMEM_HLTHUNK_LIBRARY \
                 (in Rust: SynapseAi::builder().hlthunk(path))",
            lacks_symbol: "the library has no such symbol: it is not libhl-thunk.so, or too old",
        }
        required {
            /// Exports a range as a dma-buf and returns its descriptor:
            /// `hlthunk_device_mapped_memory_export_dmabuf_fd(fd, address, size, offset, flags)`.
            export_dmabuf_fd: hlthunk_device_mapped_memory_export_dmabuf_fd(
                c_int, u64, u64, u64, u32
            ) -> c_int;
            /// Reads the PCI bus id of a device: `hlthunk_get_pci_bus_id_from_fd(fd, bus_id, len)`.
            get_pci_bus_id: hlthunk_get_pci_bus_id_from_fd(c_int, *mut c_char, c_int) -> c_int;
        }
        optional {}
    }
}
