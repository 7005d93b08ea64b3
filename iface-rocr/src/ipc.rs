//! Exchange of allocations with other processes. A handle holds the runtime's handle, the device
//! and the length.

#![allow(unsafe_code, reason = "calls the runtime on IPC handles")]

use std::{ffi::c_void, ptr, sync::Arc};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    iface::{Ipc, IpcHandle},
};

use crate::{
    error::{check, lacks, refused, symbol},
    memory::Lookup,
    sys::{HsaStatus, IpcMemory},
    table::{Origin, not_live},
};

/// Exports allocations to other processes, and opens allocations of other processes.
#[derive(Debug)]
pub(crate) struct IpcExchange {
    pub(crate) lookup: Arc<Lookup>,
}

/// First four bytes of a handle. The fourth byte is the version of the format.
const MAGIC: [u8; 4] = *b"HMR\x02";

/// Contents of a handle that another process opens.
#[derive(Debug, PartialEq, Eq)]
struct Body {
    handle: IpcMemory,
    /// Requested length in bytes.
    len: u64,
    /// Length of the allocation in the runtime, which may round the requested length up.
    whole: u64,
    /// PCI bus id of the device, which is the same in every process.
    pci_bus_id: String,
}

impl Body {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.handle.handle.iter().flat_map(|word| word.to_le_bytes()));
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.whole.to_le_bytes());
        bytes.extend(self.pci_bus_id.bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (body, checksum) = bytes.split_last_chunk::<4>()?;
        if crc32fast::hash(body).to_le_bytes() != *checksum {
            return None;
        }
        let (words, rest) = body.strip_prefix(&MAGIC)?.split_first_chunk::<32>()?;
        let (len, rest) = rest.split_first_chunk::<8>()?;
        let (whole, rest) = rest.split_first_chunk::<8>()?;
        let mut handle = IpcMemory::default();
        for (word, bytes) in handle.handle.iter_mut().zip(words.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let pci_bus_id = std::str::from_utf8(rest).ok()?.to_owned();
        let (len, whole) = (u64::from_le_bytes(*len), u64::from_le_bytes(*whole));
        (len <= whole).then_some(Self { handle, len, whole, pci_bus_id })
    }
}

impl Ipc for IpcExchange {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        const OPERATION: &str = "ipc_export";
        let refuse = |reason| {
            Err(lacks(OPERATION, reason)
                .context("kind", allocation.kind.name())
                .context("range", allocation.range))
        };
        if allocation.kind != AllocationKind::Device {
            return refuse("the runtime shares device memory of its pools only");
        }
        let create = symbol(self.lookup.runtime.functions.ipc_create, "hsa_amd_ipc_memory_create")?;
        let found = self.lookup.find(allocation.base())?;
        let found = found.filter(|found| found.id == allocation.id).filter(|found| {
            // `hsa_amd_ipc_memory_create` requires the first address of the whole allocation.
            found.base() == allocation.base()
        });
        let found = found.ok_or_else(|| not_live(OPERATION, allocation))?;
        let device = found.device.ok_or_else(|| not_live(OPERATION, allocation))?;
        // `hsa_amd_ipc_memory_create` requires the allocation's length in the runtime, which may be
        // rounded up.
        let info = self.lookup.pointer_info(found.base())?;
        if Address::of_ptr(info.agent_base) != found.base() || (info.len as u64) < found.range.len()
        {
            return Err(not_live(OPERATION, allocation));
        }
        let mut handle = IpcMemory::default();
        let base = ptr::with_exposed_provenance_mut::<c_void>(found.base().0 as usize);
        // SAFETY: `handle` is writable; address and length are those of a live allocation.
        let code = unsafe { create(base, info.len, &mut handle) };
        refused(code, "hsa_amd_ipc_memory_create")
            .map_err(|error| error.context("range", allocation.range))?;
        let entry = self.lookup.runtime.device(OPERATION, device)?;
        let pci_bus_id = entry.description.pci_bus_id.clone().unwrap_or_default();
        let body = Body { handle, len: found.range.len(), whole: info.len as u64, pci_bus_id };
        Ok(IpcHandle { iface: IfaceKind::ROCR, bytes: body.to_bytes() })
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        const OPERATION: &str = "ipc_open";
        let malformed = || {
            Error::new(ErrorKind::Malformed, OPERATION)
                .iface(IfaceKind::ROCR)
                .context("bytes", handle.bytes.len())
                .remedy("pass the bytes of ipc_export unchanged")
        };
        if handle.iface != IfaceKind::ROCR {
            return Err(malformed().context("handle of", handle.iface));
        }
        let body = Body::parse(&handle.bytes).ok_or_else(malformed)?;
        let f = &self.lookup.runtime.functions;
        let attach = symbol(f.ipc_attach, "hsa_amd_ipc_memory_attach")?;
        symbol(f.ipc_detach, "hsa_amd_ipc_memory_detach")?;
        let devices = &self.lookup.runtime.devices;
        let same = |id: &Option<String>| id.as_deref() == Some(body.pci_bus_id.as_str());
        let entry = devices.iter().find(|entry| same(&entry.description.pci_bus_id));
        let entry = entry.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, OPERATION)
                .iface(IfaceKind::ROCR)
                .context("device", &body.pci_bus_id)
                .remedy("the device of the memory is not visible here: see ROCR_VISIBLE_DEVICES")
        })?;
        let mut base = ptr::null_mut();
        let (len, agents) = (body.whole as usize, &raw const entry.agent);
        // SAFETY: `base` is writable, and the list is one agent. The runtime checks the handle.
        check_attach(unsafe { attach(&body.handle, len, 1, agents, &mut base) })?;
        let base = Address(base.expose_provenance() as u64);
        let enter = || {
            let range = AddressRange::new(base, body.len)?;
            let (kind, device) = (AllocationKind::Imported, Some(entry.description.id));
            let id = self.lookup.table.next_id();
            let allocation =
                Allocation { iface: IfaceKind::ROCR, range, device, kind, id, token: 0 };
            // If two attaches returned the same address, this iface could not distinguish the two
            // allocations. AMD's header says that "each attach may return a different address".
            if self.lookup.table.own_around(base).is_some() {
                return Err(Error::new(ErrorKind::Busy, OPERATION)
                    .iface(IfaceKind::ROCR)
                    .context("range", range)
                    .remedy("this process has opened the memory already: use that address"));
            }
            self.lookup.table.own(allocation, Origin::Imported);
            Ok(allocation)
        };
        enter().inspect_err(|_| {
            if let Err(error) = self.detach(base) {
                tracing::error!(%error, "cannot close an allocation after a failed ipc_open");
            }
        })
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
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
        HsaStatus::HSA_STATUS_ERROR_INVALID_ARGUMENT => Error::new(ErrorKind::Unavailable, CALL)
            .iface(IfaceKind::ROCR)
            .driver_code(code.name().unwrap_or_default(), code.0.into())
            .remedy(
                "the memory was freed, the process that owned it has ended, or the memory belongs \
                 to this process: use its address",
            ),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_handle_equals_the_written_one_and_an_altered_one_is_refused() {
        let handle = IpcMemory { handle: [1, 2, 3, 4, 5, 6, 7, u32::MAX] };
        let body = Body { handle, len: 4096, whole: 8192, pci_bus_id: "0000:c1:00.0".into() };
        let bytes = body.to_bytes();
        assert_eq!(Body::parse(&bytes).as_ref(), Some(&body));
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            assert_eq!(Body::parse(&altered), None, "byte {at}");
            assert_eq!(Body::parse(&bytes[..at]), None, "cut at {at}");
        }
    }
}
