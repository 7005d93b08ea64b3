//! The driver of the iface: calls of the Neuron runtime.

#![allow(unsafe_code, reason = "calls the runtime on tensors")]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use hmem_core::{
    Address, AddressRange, DeviceId, Error, IfaceKind, Result,
    cause::RefusalCause,
    iface::{Device, Facet},
};
use hmem_iface_kit::announced::{Block, BlockRange, DmaBuf, Driver};
use parking_lot::Mutex;

use super::{
    causes::CAUSES,
    error::{NEURON, check, coded, refusal},
    sys::{self, Functions, NrtStatus},
};

/// Pointer to a tensor of the runtime (`nrt_tensor_t *`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor(usize);

impl Tensor {
    fn new(tensor: *mut c_void) -> Self {
        Self(tensor.expose_provenance())
    }

    fn pointer(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0)
    }
}

/// Returns the number of NeuronCores that this process may use, or the runtime's failure code.
pub(crate) fn visible_cores(functions: &Functions) -> std::result::Result<u32, NrtStatus> {
    let mut cores = 0;
    // SAFETY: `cores` is writable. `nrt.h`: the call may be made before `nrt_init`.
    match unsafe { (functions.get_visible_nc_count)(&mut cores) } {
        NrtStatus::NRT_SUCCESS => Ok(cores),
        refused => Err(refused),
    }
}

/// The Neuron runtime of this process.
#[derive(Debug)]
pub struct Runtime {
    functions: Functions,
    /// Number of NeuronCores that this process may use.
    cores: u32,
    /// True if the iface may start the runtime with `nrt_init` when the application has not done
    /// so.
    may_start: bool,
    /// Lock that a thread holds while it starts the runtime, so that only one thread starts it.
    starting: Mutex<()>,
}

impl Runtime {
    pub(crate) fn new(functions: Functions, cores: u32, may_start: bool) -> Self {
        Self { functions, cores, may_start, starting: Mutex::default() }
    }

    /// Returns the handle and the address range of the application's tensor, as arguments for
    /// [`announce`](hmem_iface_kit::announced::Announced::announce).
    ///
    /// # Safety
    /// `tensor` must be a live tensor (`nrt_tensor_t *`).
    ///
    /// # Errors
    /// Unsupported if the tensor has no address.
    pub unsafe fn tensor(&self, tensor: *mut c_void) -> Result<(Tensor, AddressRange)> {
        let tensor = Tensor::new(tensor);
        // SAFETY: the caller promised a live tensor.
        Ok((tensor, unsafe { self.range_of(tensor) }?))
    }

    /// Returns the address range of a tensor.
    ///
    /// # Safety
    /// The tensor must be live.
    ///
    /// # Errors
    /// Unsupported if the tensor has no address.
    unsafe fn range_of(&self, tensor: Tensor) -> Result<AddressRange> {
        // SAFETY: the caller promised a live tensor.
        let (va, size) = unsafe {
            let tensor = tensor.pointer();
            ((self.functions.tensor_get_va)(tensor), (self.functions.tensor_get_size)(tensor))
        };
        if va.is_null() {
            return Err(
                NEURON.lacks("nrt_tensor_get_va", "the runtime maps no address for the tensor")
            );
        }
        AddressRange::new(Address::of_ptr(va), size as u64)
    }

    /// Makes one call of `nrt_tensor_allocate`. Returns the tensor of `len` bytes in the memory of
    /// a NeuronCore, or the runtime's failure code.
    fn new_tensor(&self, device: DeviceId, len: u64) -> std::result::Result<Tensor, NrtStatus> {
        let mut tensor: *mut c_void = ptr::null_mut();
        // SAFETY: the name is a C string, and `tensor` is writable.
        let code = unsafe {
            (self.functions.tensor_allocate)(
                sys::NRT_TENSOR_PLACEMENT_DEVICE,
                device.0 as c_int,
                len as usize,
                c"hmem".as_ptr(),
                &mut tensor,
            )
        };
        match code {
            NrtStatus::NRT_SUCCESS => Ok(Tensor::new(tensor)),
            refused => Err(refused),
        }
    }

    fn free_tensor(&self, tensor: Tensor) {
        let mut pointer = tensor.pointer();
        // SAFETY: `new_tensor` returned the tensor, and the caller no longer uses it.
        unsafe { (self.functions.tensor_free)(&mut pointer) }
    }

    /// Allocates a tensor of `len` bytes in the memory of a NeuronCore. If the runtime is not
    /// started and the iface may start the runtime, starts it first.
    ///
    /// # Errors
    /// - Unavailable if the runtime is not started and the iface may not start it, or if the
    ///   runtime was closed.
    /// - Otherwise the error of the runtime.
    fn allocate_tensor(&self, device: DeviceId, len: u64) -> Result<Tensor> {
        let refused = |code| refusal(code, "nrt_tensor_allocate");
        match self.new_tensor(device, len) {
            Err(NrtStatus::NRT_UNINITIALIZED) if self.may_start => {}
            allocated => return allocated.map_err(refused),
        }
        let _starting = self.starting.lock();
        // Another thread may have started the runtime in the meantime.
        match self.new_tensor(device, len) {
            Err(NrtStatus::NRT_UNINITIALIZED) => {}
            allocated => return allocated.map_err(refused),
        }
        // SAFETY: the arguments are C strings. The runtime is not initialised, and no other thread
        // of this iface initialises it.
        let code = unsafe {
            (self.functions.init)(sys::NRT_FRAMEWORK_TYPE_NO_FW, c"2.0".as_ptr(), c"".as_ptr())
        };
        check(code, "nrt_init")?;
        tracing::debug!("the Neuron runtime was started");
        self.new_tensor(device, len).map_err(refused)
    }

    /// Returns the memory size of a NeuronCore in bytes. Returns 0 if the library lacks the call,
    /// or if the call fails, as before `nrt_init`.
    fn memory_of(&self, core: u32) -> u64 {
        let Some(stats_of) = self.functions.get_vnc_memory_stats else { return 0 };
        let (mut stats, mut written) = (sys::MemoryStats::default(), 0);
        // SAFETY: `stats` is writable for the size that is passed.
        let code = unsafe { stats_of(core, &mut stats, size_of_val(&stats), &mut written) };
        if code == NrtStatus::NRT_SUCCESS { stats.bytes_limit as u64 } else { 0 }
    }
}

// SAFETY: the runtime uses the memory of a tensor for nothing else until `nrt_tensor_free`. Reads
// and writes get the tensor and a range of bytes in it, and block until the copy has ended. An
// export gets whole pages of a tensor's mapping. The dma-buf has them at the offset that
// `nrt_get_dmabuf_fd_v2` returns. A dma-buf of `nrt_get_dmabuf_fd` begins with them.
unsafe impl Driver for Runtime {
    type Handle = Tensor;

    const KIND: IfaceKind = IfaceKind::NEURON;
    const NAME: &'static str = "neuron";

    fn device_count(&self) -> u32 {
        self.cores
    }

    /// Lists the NeuronCores. Their PCI bus ids are `None`, since the runtime has no call for them.
    fn devices(&self) -> Result<Vec<Device>> {
        let device = |core| Device {
            id: DeviceId(core),
            name: format!("NeuronCore {core}"),
            pci_bus_id: None,
            memory: self.memory_of(core),
        };
        Ok((0..self.cores).map(device).collect())
    }

    /// Returns true if the runtime is started. No call of the runtime reports that, so this method
    /// allocates a tensor and frees it. A refusal for lack of memory also shows a started runtime.
    fn is_active(&self, device: DeviceId) -> Result<bool> {
        match self.new_tensor(device, 64) {
            Ok(tensor) => {
                self.free_tensor(tensor);
                Ok(true)
            }
            Err(NrtStatus::NRT_RESOURCE) => Ok(true),
            Err(NrtStatus::NRT_UNINITIALIZED | NrtStatus::NRT_CLOSED) => Ok(false),
            Err(refused) => Err(refusal(refused, "nrt_tensor_allocate")),
        }
    }

    fn allocate(&self, device: DeviceId, len: u64) -> Result<(Address, Tensor)> {
        let tensor = self.allocate_tensor(device, len)?;
        // SAFETY: the call above returned the tensor.
        match unsafe { self.range_of(tensor) } {
            Ok(range) => Ok((range.start(), tensor)),
            Err(error) => {
                self.free_tensor(tensor);
                Err(error)
            }
        }
    }

    unsafe fn free(&self, _: DeviceId, _: Address, tensor: Tensor) -> Result<()> {
        self.free_tensor(tensor);
        Ok(())
    }

    unsafe fn write(&self, to: &BlockRange<Tensor>, from: Address) -> Result<()> {
        let (tensor, from) =
            (to.block.handle.pointer(), ptr::with_exposed_provenance(from.0 as usize));
        // SAFETY: the range lies in a live tensor, and the caller's memory is readable.
        let code = unsafe {
            (self.functions.tensor_write)(tensor, from, to.offset as usize, to.len as usize)
        };
        check(code, "nrt_tensor_write")
    }

    unsafe fn read(&self, from: &BlockRange<Tensor>, to: Address) -> Result<()> {
        let (tensor, to) =
            (from.block.handle.pointer(), ptr::with_exposed_provenance_mut(to.0 as usize));
        // SAFETY: the range lies in a live tensor, and the caller's memory is writable.
        let code = unsafe {
            (self.functions.tensor_read)(tensor, to, from.offset as usize, from.len as usize)
        };
        check(code, "nrt_tensor_read")
    }

    fn export(&self, _: &Block<Tensor>, pages: AddressRange) -> Result<DmaBuf> {
        let (start, len) = (pages.start().0, pages.len());
        let (mut fd, mut offset): (c_int, u64) = (-1, 0);
        let (call, code) = if let Some(get) = self.functions.get_dmabuf_fd_v2 {
            // SAFETY: `fd` and `offset` are writable; the range is only looked up.
            let code = unsafe { get(start, len, &mut fd, &mut offset) };
            ("nrt_get_dmabuf_fd_v2", code)
        } else if let Some(get) = self.functions.get_dmabuf_fd {
            // SAFETY: `fd` is writable; the range is only looked up.
            ("nrt_get_dmabuf_fd", unsafe { get(start, len, &mut fd) })
        } else {
            return Err(no_export_call());
        };
        match code {
            NrtStatus::NRT_SUCCESS => {
                // SAFETY: the runtime opened the fd for this call, and no longer uses it.
                let fd = unsafe { NEURON.take_fd(fd, call) }?;
                Ok(DmaBuf { fd, offset })
            }
            // The runtime hides the kernel driver's reason, such as an old kernel or missing
            // peer-to-peer support.
            NrtStatus::NRT_INVALID | NrtStatus::NRT_FAILURE => Err(coded(
                NEURON.lacks(call, "the runtime exports no dma-buf of the memory"),
                code,
            )
            .remedy(concat!(
                "dma-bufs need Linux 5.15, a kernel module aws-neuronx-dkms that has them, ",
                "and NEURON_RT_ENABLE_P2P unset",
            ))),
            _ => Err(refusal(code, call)),
        }
    }

    fn no_dma_buf(&self) -> Option<Error> {
        let functions = &self.functions;
        let has = functions.get_dmabuf_fd.is_some() || functions.get_dmabuf_fd_v2.is_some();
        (!has).then(no_export_call)
    }

    fn lacks(&self, facet: Facet) -> Error {
        let reason = match facet {
            Facet::CopyEngine => "the iface has blocking copies only",
            Facet::PeerMemory => concat!(
                "the iface exports dma-bufs, ",
                "and does not use the older client of the EFA driver",
            ),
            Facet::HostRegistrar => "libnrt does not page-lock host memory",
            Facet::Ipc => "libnrt does not hand memory to other processes",
            _ => "libnrt has no such call",
        };
        NEURON.lacks(facet.operation(), reason)
    }

    fn causes(&self) -> &'static [RefusalCause] {
        CAUSES
    }
}

/// Returns the error for a library without the functions that export dma-bufs.
fn no_export_call() -> Error {
    NEURON
        .lacks(Facet::DmaBuf.operation(), "the library has no nrt_get_dmabuf_fd")
        .context("symbol", "nrt_get_dmabuf_fd")
        .remedy("install a newer aws-neuronx-runtime-lib")
}
