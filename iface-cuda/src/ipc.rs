//! Exchange of allocations with other processes. An IPC handle of this crate contains CUDA's
//! handle, the device and the length.

#![allow(unsafe_code, reason = "calls the driver on IPC handles")]

use std::{array, ffi::c_char, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, DeviceId, ErrorKind, IfaceKind, Result,
    iface::{Ipc, IpcHandle},
    monitor::FreeSubscriptions,
};
use hmem_iface_kit::table::not_live;
use serde::{Deserialize, Serialize};

use crate::{
    context::with_context,
    driver::DeviceEntry,
    error::{CUDA, check, coded},
    lookup::PointerLookup,
    sys::{self, CU_IPC_HANDLE_SIZE, CuDevicePtr, CuIpcMemHandle, CuResult},
};

/// Exports allocations to other processes, and opens allocations of other processes.
#[derive(Debug)]
pub(crate) struct IpcExchange {
    pub(crate) lookup: Arc<PointerLookup>,
    pub(crate) subscriptions: Arc<FreeSubscriptions>,
}

/// Contents of a handle that another process opens.
#[derive(Debug, Serialize, Deserialize)]
struct Body {
    /// Bytes of CUDA's handle, in two halves, since `serde` has no arrays of 64 bytes.
    handle: [[u8; CU_IPC_HANDLE_SIZE / 2]; 2],
    len: u64,
    /// PCI bus id of the device, which is the same in every process.
    pci_bus_id: String,
}

impl Ipc for IpcExchange {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        const OPERATION: &str = "ipc_export";
        if allocation.kind != AllocationKind::Device {
            return Err(CUDA
                .lacks(OPERATION, "CUDA shares memory of cuMemAlloc only")
                .context("kind", allocation.kind.name())
                .context("range", allocation.range));
        }
        let found = self.lookup.find(allocation.base())?;
        let live = found.filter(|found| {
            found.allocation.id == allocation.id && found.allocation.base() == allocation.base()
        });
        let found = live.ok_or_else(|| not_live(IfaceKind::CUDA, OPERATION, allocation))?;
        let work_context = self.lookup.contexts.work_context(found.context, found.device())?;
        let mut handle = CuIpcMemHandle { reserved: [0; CU_IPC_HANDLE_SIZE] };
        let exported = work_context.run(|| {
            let get = self.lookup.driver().functions.ipc_get_mem_handle;
            // SAFETY: `handle` is writable; the address is the first of a live allocation.
            check(unsafe { get(&mut handle, allocation.base().0) }, "cuIpcGetMemHandle")
        });
        exported.map_err(|error| error.context("range", allocation.range))?;
        let entry = self.lookup.driver().device(OPERATION, found.device())?;
        let pci_bus_id = entry.description.pci_bus_id.clone().unwrap_or_default();
        let half = |from: usize| array::from_fn(|at| handle.reserved[from + at] as u8);
        let handle = [half(0), half(CU_IPC_HANDLE_SIZE / 2)];
        let body = Body { handle, len: found.allocation.range.len(), pci_bus_id };
        Ok(IpcHandle::encode(IfaceKind::CUDA, &body))
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        const OPERATION: &str = "ipc_open";
        let body: Body = handle.decode(IfaceKind::CUDA)?;
        let bytes = body.handle.as_flattened();
        let memory = CuIpcMemHandle { reserved: array::from_fn(|at| bytes[at] as c_char) };
        let same_device = |entry: &&DeviceEntry| {
            entry.description.pci_bus_id.as_deref() == Some(body.pci_bus_id.as_str())
        };
        let entry = self.lookup.driver().devices.iter().find(same_device).ok_or_else(|| {
            CUDA.error(ErrorKind::Unavailable, OPERATION)
                .context("device", &body.pci_bus_id)
                .remedy("the device of the memory is not visible here: see CUDA_VISIBLE_DEVICES")
        })?;
        let device = entry.description.id;
        let primary = self.lookup.contexts.retain(device)?;
        let open = || {
            let mut base: CuDevicePtr = 0;
            let flags = sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
            // SAFETY: `base` is writable; the driver checks the handle.
            let code = unsafe {
                (self.lookup.driver().functions.ipc_open_mem_handle)(&mut base, memory, flags)
            };
            check_open(code).map(|()| base)
        };
        let base = primary.with_context_or_undo(open, |base| self.close_handle(base))?;
        let entered = self.enter(base, body.len, device, handle);
        if entered.is_ok() {
            primary.keep();
        } else if let Err(error) = primary.with_context(|| self.close_handle(base)) {
            primary.keep();
            tracing::error!(
                error = %error.full(),
                "cannot close an allocation after a failed ipc_open"
            );
        }
        entered
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.contexts.check_process("ipc_close")?;
        let (device, last) = self.lookup.contexts.allocations.begin_close(allocation)?;
        let mut closed = false;
        let ended = self.lookup.contexts.retain_until_close(device).and_then(|context| {
            let mut close = || {
                with_context(&self.lookup.driver().functions, context, || {
                    self.close_handle(allocation.base().0).inspect(|()| closed = true)
                })
            };
            if last { self.subscriptions.while_freeing(allocation.range, close) } else { close() }
        });
        self.lookup.contexts.allocations.end_close(allocation, closed);
        ended.map_err(|error| error.context("allocation", allocation.range))
    }
}

impl IpcExchange {
    fn enter(
        &self,
        base: u64,
        len: u64,
        device: DeviceId,
        handle: &IpcHandle,
    ) -> Result<Allocation> {
        let found = self.lookup.find(Address(base))?.ok_or_else(|| {
            CUDA.error(ErrorKind::Driver, "ipc_open")
                .context("address", Address(base))
                .context("why", "the driver does not recognise memory that it has opened")
        })?;
        let range = AddressRange::new(Address(base), len)?;
        if !found.allocation.range.contains_range(range) {
            return Err(handle.malformed(IfaceKind::CUDA, "length"));
        }
        let allocation = Allocation { range, kind: AllocationKind::Imported, ..found.allocation };
        self.lookup.contexts.allocations.insert_open(&allocation, device);
        Ok(allocation)
    }

    /// Ends one open of another process's memory. The caller must make the device's primary context
    /// current.
    fn close_handle(&self, base: u64) -> Result<()> {
        let close = self.lookup.driver().functions.ipc_close_mem_handle;
        // SAFETY: this driver opened the memory. The table counts the opens, so each is closed
        // once. Without an entry in the table, no caller has seen the memory.
        check(unsafe { close(base) }, "cuIpcCloseMemHandle")
    }
}

/// Converts the code of `cuIpcOpenMemHandle_v2` to a result. If the driver does not know the
/// handle, the error is Unavailable: the caller has checked the handle's bytes with
/// `IpcHandle::decode`, so the handle was valid once.
fn check_open(code: CuResult) -> Result<()> {
    check(code, "cuIpcOpenMemHandle_v2").map_err(|error| match code {
        CuResult::CUDA_ERROR_INVALID_CONTEXT => error.remedy(
            "memory cannot be opened in the process that allocated it: use its address there",
        ),
        CuResult::CUDA_ERROR_INVALID_HANDLE | CuResult::CUDA_ERROR_INVALID_VALUE => {
            coded(CUDA.error(ErrorKind::Unavailable, "cuIpcOpenMemHandle_v2"), code)
                .remedy("the memory was freed, or the process that owned it has ended")
        }
        CuResult::CUDA_ERROR_MAP_FAILED => {
            error.remedy("the device's BAR1 window may be full (`nvidia-smi -q -d MEMORY`)")
        }
        _ => error,
    })
}

#[cfg(test)]
#[path = "../../tests/corpus/reader.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_all_versions_are_read() {
        corpus::check("ipc-handle-cuda", 2..=u32::from(IpcHandle::VERSION), |bytes| {
            let handle = IpcHandle { iface: IfaceKind::CUDA, bytes: bytes.to_vec() };
            let Body { handle, len, pci_bus_id } =
                handle.decode(IfaceKind::CUDA).expect("a handle");
            let handle: String =
                handle.as_flattened().iter().map(|byte| format!("{byte:02x}")).collect();
            format!("handle {handle} len {len} device {pci_bus_id}")
        });
    }
}
