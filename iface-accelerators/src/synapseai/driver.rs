//! The driver of the iface: calls of the SynapseAI runtime and of libhl-thunk.

#![allow(unsafe_code, reason = "calls the runtime and libhl-thunk")]

use std::{
    ffi::{CStr, c_int},
    os::fd::{FromRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use hmem_core::{
    Address, AddressRange, DeviceId, Errno, Error, ErrorKind, IfaceKind, Result,
    cause::RefusalCause,
    iface::{Device, Facet},
};
use hmem_iface_kit::announced::{Block, BlockRange, DmaBuf, Driver};
use parking_lot::Mutex;

use super::{
    causes::CAUSES,
    copy::{HostSide, Staging},
    error::{SYNAPSEAI, check, coded},
    sys::{DeviceInfo, SYN_DEVICE_GAUDI2, SynStatus, hlthunk, synapse},
};

/// The number that SynapseAI gives to the only device of a process.
const DEVICE: u32 = 0;
/// `O_RDWR | O_CLOEXEC`, the flags that libhl-thunk accepts.
const EXPORT_FLAGS: u32 = 0o2 | 0o2000000;

/// The SynapseAI runtime of this process.
#[derive(Debug)]
pub struct Synapse {
    functions: Arc<synapse::Functions>,
    /// Functions of libhl-thunk, or the reason why it cannot be loaded.
    hlthunk: std::result::Result<hlthunk::Functions, Arc<Error>>,
    staging: Staging,
    /// True if the iface may acquire a device.
    may_acquire: bool,
    /// Lock that a thread holds while it acquires a device, so that only one thread acquires one.
    acquiring: Mutex<()>,
}

impl Synapse {
    /// Initialises the runtime and counts the devices. Without libhl-thunk, the iface exports no
    /// dma-bufs.
    ///
    /// # Errors
    /// Unavailable if the runtime does not start or finds no device.
    pub(crate) fn start(
        functions: synapse::Functions,
        hlthunk: Result<hlthunk::Functions>,
        may_acquire: bool,
    ) -> Result<Self> {
        let unavailable = |operation| {
            SYNAPSEAI
                .unavailable(operation, functions.library())
                .remedy("no Gaudi device answers: see `hl-smi` and whether /dev/accel exists")
        };
        // SAFETY: the call has no precondition, and may follow a call of the application.
        match unsafe { (functions.initialize)() } {
            SynStatus::synSuccess
            | SynStatus::synAlreadyInitialized
            | SynStatus::synObjectAlreadyInitialized => {}
            code => return Err(coded(unavailable("synInitialize"), code)),
        }
        let mut devices = 0;
        // SAFETY: `devices` is writable.
        match unsafe { (functions.device_get_count)(&mut devices) } {
            SynStatus::synSuccess if devices > 0 => {}
            SynStatus::synSuccess => {
                return Err(unavailable("synDeviceGetCount").context("devices", 0));
            }
            code => return Err(coded(unavailable("synDeviceGetCount"), code)),
        }
        tracing::debug!(library = functions.library(), devices, "SynapseAI opened");
        let functions = Arc::new(functions);
        Ok(Self {
            staging: Staging::new(Arc::clone(&functions)),
            functions,
            hlthunk: hlthunk.map_err(Arc::new),
            may_acquire,
            acquiring: Mutex::default(),
        })
    }

    /// Returns the device that this process has acquired, or `None` if it has acquired none.
    fn acquired(&self) -> Result<Option<DeviceInfo>> {
        let mut info = DeviceInfo::default();
        // SAFETY: `info` is writable, with room for more members.
        match unsafe { (self.functions.device_get_info)(DEVICE, &mut info) } {
            SynStatus::synSuccess => Ok(Some(info)),
            // The runtime returns these codes if no device is acquired.
            SynStatus::synInvalidArgument
            | SynStatus::synNoDeviceFound
            | SynStatus::synObjectNotInitialized
            | SynStatus::synUninitialized
            | SynStatus::synUnavailable => Ok(None),
            code => check(code, "synDeviceGetInfoV2").map(|()| None),
        }
    }

    /// Returns the device that this process has acquired. If it has none and the iface may acquire
    /// a device, acquires one first.
    ///
    /// # Errors
    /// - Unavailable if the process has no device and the iface may acquire none.
    /// - Unsupported for a first-generation Gaudi device. If the iface acquired the device, it
    ///   stays acquired.
    /// - Otherwise the error of the runtime.
    fn device(&self) -> Result<DeviceInfo> {
        let _acquiring = self.acquiring.lock();
        let info = match self.acquired()? {
            Some(info) => info,
            None if self.may_acquire => {
                let mut device = 0;
                // SAFETY: `device` is writable; without a PCI bus id any device will do.
                let code = unsafe { (self.functions.device_acquire)(&mut device, ptr::null()) };
                check(code, "synDeviceAcquire")?;
                self.acquired()?.ok_or_else(not_acquired)?
            }
            None => return Err(not_acquired()),
        };
        if info.device_type < SYN_DEVICE_GAUDI2 {
            return Err(SYNAPSEAI
                .lacks(
                    "synDeviceGetInfoV2",
                    "addresses of first-generation Gaudi devices can equal those of host memory",
                )
                .context("device type", info.device_type));
        }
        Ok(info)
    }

    /// Returns the PCI bus id of a device, or `None` if libhl-thunk is absent or refuses the query.
    fn pci_bus_id(&self, info: &DeviceInfo) -> Option<String> {
        let mut text = [0u8; 16];
        let hlthunk = self.hlthunk.as_ref().ok()?;
        // SAFETY: the fd is that of the runtime, and the buffer is writable for the length that is
        // passed.
        let code = unsafe {
            (hlthunk.get_pci_bus_id)(
                info.fd.cast_signed(),
                text.as_mut_ptr().cast(),
                text.len() as c_int,
            )
        };
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?.trim();
        (code == 0 && !text.is_empty()).then(|| text.to_ascii_lowercase())
    }
}

/// Returns the error for exports without libhl-thunk. `error` is that of loading the library.
fn no_hlthunk(error: &Arc<Error>) -> Error {
    SYNAPSEAI
        .lacks(Facet::DmaBuf.operation(), "libhl-thunk cannot be loaded")
        .caused_by(Arc::clone(error))
        .remedy(error.remedy_text().unwrap_or_default().to_owned())
}

fn not_acquired() -> Error {
    SYNAPSEAI.error(ErrorKind::Unavailable, "synDeviceGetInfoV2").remedy(
        "set HMEM_SYNAPSEAI_START_RUNTIME=1 to let hmem acquire a Gaudi device (in Rust: \
         SynapseAi::builder().start_runtime(true)), or acquire one in the application",
    )
}

// SAFETY: the runtime uses a buffer of `synDeviceMalloc` for nothing else until `synDeviceFree`. A
// copy gets a range of bytes in the buffer, and has ended when the stream was synchronised. An
// export gets whole pages of the mapping of all device memory, and the dma-buf begins with them.
unsafe impl Driver for Synapse {
    type Handle = ();

    const KIND: IfaceKind = IfaceKind::SYNAPSEAI;
    const NAME: &'static str = "synapseai";

    fn device_count(&self) -> u32 {
        1
    }

    fn devices(&self) -> Result<Vec<Device>> {
        let info = self.acquired()?;
        let name = match info.map(|info| info.device_type) {
            Some(SYN_DEVICE_GAUDI2) => "Gaudi 2",
            Some(5) => "Gaudi 3",
            _ => "Gaudi",
        };
        Ok(vec![Device {
            id: DeviceId(DEVICE),
            name: name.to_owned(),
            pci_bus_id: info.and_then(|info| self.pci_bus_id(&info)),
            memory: info.map_or(0, |info| info.dram_size),
        }])
    }

    fn is_active(&self, _: DeviceId) -> Result<bool> {
        Ok(self.acquired()?.is_some())
    }

    fn allocate(&self, _: DeviceId, len: u64) -> Result<(Address, ())> {
        self.device()?;
        let mut address = 0;
        // SAFETY: `address` is writable; with address 0 the runtime chooses one.
        let code = unsafe { (self.functions.device_malloc)(DEVICE, len, 0, 0, &mut address) };
        check(code, "synDeviceMalloc")?;
        if address == 0 {
            return Err(SYNAPSEAI
                .error(ErrorKind::OutOfResources, "synDeviceMalloc")
                .context("why", "the call succeeded and returned address 0"));
        }
        Ok((Address(address), ()))
    }

    unsafe fn free(&self, _: DeviceId, address: Address, (): ()) -> Result<()> {
        // SAFETY: the caller promised that `allocate` returned the memory and nothing uses it.
        check(unsafe { (self.functions.device_free)(DEVICE, address.0, 0) }, "synDeviceFree")
    }

    unsafe fn write(&self, to: &BlockRange<()>, from: Address) -> Result<()> {
        // SAFETY: the caller promised that both sides are valid for the length of the copy.
        unsafe { self.staging.copy(to.address(), HostSide::Source(from), to.len) }
    }

    unsafe fn read(&self, from: &BlockRange<()>, to: Address) -> Result<()> {
        // SAFETY: the caller promised that both sides are valid for the length of the copy.
        unsafe { self.staging.copy(from.address(), HostSide::Destination(to), from.len) }
    }

    fn export(&self, _: &Block<()>, pages: AddressRange) -> Result<DmaBuf> {
        const CALL: &str = "hlthunk_device_mapped_memory_export_dmabuf_fd";
        let hlthunk = self.hlthunk.as_ref().map_err(no_hlthunk)?;
        let info = self.device()?;
        let base = info.global_hbm_base;
        let offset = pages.start().0.checked_sub(base).filter(|_| base != 0).ok_or_else(|| {
            SYNAPSEAI
                .lacks(CALL, "the software does not report where all device memory is mapped")
                .context("globalHbmBaseAddress", base)
                .remedy("install SynapseAI software of the kernel driver's release")
        })?;
        // SAFETY: the fd is that of the runtime, and the range is only looked up.
        let fd = unsafe {
            (hlthunk.export_dmabuf_fd)(
                info.fd.cast_signed(),
                base,
                pages.len(),
                offset,
                EXPORT_FLAGS,
            )
        };
        if fd < 0 {
            return Err(Error::os(Errno(fd.saturating_neg()), CALL).iface(IfaceKind::SYNAPSEAI));
        }
        // SAFETY: libhl-thunk opened the fd for this call, and no longer uses it.
        Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset: 0 })
    }

    fn close(&self) -> Result<()> {
        self.staging.release()
    }

    fn no_dma_buf(&self) -> Option<Error> {
        self.hlthunk.as_ref().err().map(no_hlthunk)
    }

    fn lacks(&self, facet: Facet) -> Error {
        let reason = match facet {
            Facet::CopyEngine => "the iface has blocking copies only",
            Facet::PeerMemory => "the iface exports dma-bufs only",
            Facet::HostRegistrar => "the iface does not map host memory for the device",
            Facet::Ipc => "SynapseAI does not hand memory to other processes",
            _ => "SynapseAI has no such call",
        };
        SYNAPSEAI.lacks(facet.operation(), reason)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }
}
