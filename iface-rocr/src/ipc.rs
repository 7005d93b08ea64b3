//! Exchange of allocations with other processes. An IPC handle of this crate contains the runtime's
//! handle, the device and the length.

#![allow(unsafe_code, reason = "calls the runtime on IPC handles")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, ErrorKind, IfaceKind, Result,
    iface::{Ipc, IpcHandle},
};
use hmem_iface_kit::{log_failure, table::not_live};
use serde::{Deserialize, Serialize};

use crate::{
    error::{ROCR, check, coded, refused, symbol},
    lookup::Lookup,
    sys::{HsaStatus, IpcMemory},
    table::RocrOrigin,
};

/// Exports allocations to other processes, and opens allocations of other processes.
#[derive(Debug)]
pub(crate) struct IpcExchange {
    pub(crate) lookup: Arc<Lookup>,
}

/// Contents of a handle that another process opens.
#[derive(Debug, Serialize, Deserialize)]
struct Body {
    /// The runtime's handle.
    handle: [u32; 8],
    /// Requested length in bytes.
    len: u64,
    /// Length of the allocation in the runtime, which may round the requested length up.
    whole: u64,
    /// PCI bus id of the device, which is the same in every process.
    pci_bus_id: String,
}

impl Ipc for IpcExchange {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        const OPERATION: &str = "ipc_export";
        let not_live = || not_live(IfaceKind::ROCR, OPERATION, allocation);
        if allocation.kind != AllocationKind::Device {
            return Err(ROCR
                .lacks(OPERATION, "the runtime shares device memory of its pools only")
                .context("kind", allocation.kind.name())
                .context("range", allocation.range));
        }
        let create = symbol(self.lookup.runtime.functions.ipc_create, "hsa_amd_ipc_memory_create")?;
        let found = self.lookup.find(allocation.base())?;
        // `hsa_amd_ipc_memory_create` requires the first address of the whole allocation.
        let found = found
            .filter(|found| found.id == allocation.id && found.base() == allocation.base())
            .ok_or_else(not_live)?;
        let device = found.device.ok_or_else(not_live)?;
        // `hsa_amd_ipc_memory_create` requires the allocation's length in the runtime, which may be
        // rounded up.
        let info = self.lookup.pointer_info(found.base())?;
        if Address::of_ptr(info.agent_base) != found.base() || (info.len as u64) < found.range.len()
        {
            return Err(not_live());
        }
        let mut handle = IpcMemory::default();
        let base = ptr::with_exposed_provenance_mut::<c_void>(found.base().0 as usize);
        // SAFETY: `handle` is writable; address and length are those of a live allocation.
        let code = unsafe { create(base, info.len, &mut handle) };
        refused(code, "hsa_amd_ipc_memory_create")
            .map_err(|error| error.context("range", allocation.range))?;
        let entry = self.lookup.runtime.device(OPERATION, device)?;
        let pci_bus_id = entry.description.pci_bus_id.clone().unwrap_or_default();
        let (handle, len, whole) = (handle.handle, found.range.len(), info.len as u64);
        let body = Body { handle, len, whole, pci_bus_id };
        Ok(IpcHandle::encode(IfaceKind::ROCR, &body))
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        const OPERATION: &str = "ipc_open";
        let body: Body = handle.decode(IfaceKind::ROCR)?;
        if body.len > body.whole {
            return Err(handle.malformed(IfaceKind::ROCR, "length"));
        }
        let memory = IpcMemory { handle: body.handle };
        let f = &self.lookup.runtime.functions;
        let attach = symbol(f.ipc_attach, "hsa_amd_ipc_memory_attach")?;
        symbol(f.ipc_detach, "hsa_amd_ipc_memory_detach")?;
        let devices = &self.lookup.runtime.devices;
        let same = |id: &Option<String>| id.as_deref() == Some(body.pci_bus_id.as_str());
        let entry = devices.iter().find(|entry| same(&entry.description.pci_bus_id));
        let entry = entry.ok_or_else(|| {
            ROCR.error(ErrorKind::Unavailable, OPERATION)
                .context("device", &body.pci_bus_id)
                .remedy("the device of the memory is not visible here: see ROCR_VISIBLE_DEVICES")
        })?;
        let mut base = ptr::null_mut();
        let (len, agents) = (body.whole as usize, &raw const entry.agent);
        // AMD's header demands an error for a wrong length, so the length is not checked here. The
        // runtime's sources return that error for no length, and `hsa_amd_pointer_info` then
        // repeats the wrong one. The checksum finds damaged handles. A handle is trusted like the
        // process that made it.
        // SAFETY: `base` is writable, and the list is one agent. The runtime checks the handle.
        check_attach(unsafe { attach(&memory, len, 1, agents, &mut base) })?;
        let base = Address(base.expose_provenance() as u64);
        let enter = || {
            let range = AddressRange::new(base, body.len)?;
            let owner = self.lookup.pointer_info(base)?.owner;
            let other = self.lookup.runtime.device_of(owner);
            if other.is_some_and(|device| device.agent != entry.agent) {
                return Err(handle.malformed(IfaceKind::ROCR, "device"));
            }
            let (kind, device) = (AllocationKind::Imported, Some(entry.description.id));
            let id = self.lookup.table.next_id();
            let allocation =
                Allocation { iface: IfaceKind::ROCR, range, device, kind, id, token: 0 };
            // If two attaches returned the same address, this iface could not distinguish the two
            // allocations. AMD's header says that "each attach may return a different address".
            if self.lookup.table.own_around(base).is_some() {
                return Err(ROCR
                    .error(ErrorKind::Busy, OPERATION)
                    .context("range", range)
                    .remedy("this process has opened the memory already: use that address"));
            }
            self.lookup.table.own(allocation, RocrOrigin::Imported);
            Ok(allocation)
        };
        enter().inspect_err(|_| {
            let closed = self.detach(base);
            log_failure!(error, closed, "cannot close an allocation after a failed ipc_open");
        })
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        self.lookup.runtime.check_process("ipc_close")?;
        let origin = self.lookup.table.take("ipc_close", allocation, true)?;
        self.detach(allocation.base()).map_err(|error| {
            self.lookup.table.own(*allocation, origin);
            error.context("allocation", allocation.range)
        })
    }
}

impl IpcExchange {
    fn detach(&self, base: Address) -> Result<()> {
        const CALL: &str = "hsa_amd_ipc_memory_detach";
        let detach = symbol(self.lookup.runtime.functions.ipc_detach, CALL)?;
        // SAFETY: this runtime attached the memory. Each attach has one entry in the table, so it
        // is detached once. Without an entry, no caller has seen the memory.
        let code = unsafe { detach(ptr::with_exposed_provenance_mut(base.0 as usize)) };
        check(code, CALL)
    }
}

/// Converts the result code of `hsa_amd_ipc_memory_attach` to a result. The error for
/// INVALID_ARGUMENT has the kind Unavailable: the runtime returns this code for memory that was
/// freed, or that belongs to this process.
fn check_attach(code: HsaStatus) -> Result<()> {
    const CALL: &str = "hsa_amd_ipc_memory_attach";
    check(code, CALL).map_err(|error| match code {
        HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT => {
            coded(ROCR.error(ErrorKind::Unavailable, CALL), code).remedy(
                "the memory was freed, the process that owned it has ended, or the memory belongs \
                 to this process: use its address",
            )
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
        corpus::check("ipc-handle-rocr", 2..=u32::from(IpcHandle::VERSION), |bytes| {
            let handle = IpcHandle { iface: IfaceKind::ROCR, bytes: bytes.to_vec() };
            let Body { handle, len, whole, pci_bus_id } =
                handle.decode(IfaceKind::ROCR).expect("a handle");
            format!("handle {handle:x?} len {len} whole {whole} device {pci_bus_id}")
        });
    }
}
