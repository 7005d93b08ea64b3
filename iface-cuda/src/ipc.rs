//! Allocations for other processes: CUDA's handle, with the device and the length that it does not
//! carry.

use std::sync::atomic::Ordering;

use hmem_core::{
    Address, AddressRange, Allocation, AllocationKind, Error, ErrorKind, IfaceKind, Result,
    iface::{Ipc, IpcHandle},
};

use crate::{
    context::within,
    driver::{Driver, Origin, Owned, not_live},
    error::{check, lacks},
    sys::{self, CU_IPC_HANDLE_SIZE, CuDevicePtr, CuIpcMemHandle, CuResult},
};

/// The first bytes of a handle; the last of them is the version of the form.
const MAGIC: [u8; 4] = *b"HMC\x01";
/// Bytes of the checksum at the end.
const CHECKSUM: usize = 4;

/// A handle taken apart.
#[derive(Debug)]
struct Body {
    handle: CuIpcMemHandle,
    len: u64,
    /// The device, by the name that it has in every process.
    pci_bus_id: String,
}

impl Body {
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.handle.reserved.map(|byte| byte as u8));
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.pci_bus_id.bytes());
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>()?;
        if crc32fast::hash(body).to_le_bytes() != *checksum {
            return None;
        }
        let rest = body.strip_prefix(&MAGIC)?;
        let (handle, rest) = rest.split_first_chunk::<CU_IPC_HANDLE_SIZE>()?;
        let (len, rest) = rest.split_first_chunk::<8>()?;
        Some(Self {
            handle: CuIpcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) },
            len: u64::from_le_bytes(*len),
            pci_bus_id: std::str::from_utf8(rest).ok()?.to_owned(),
        })
    }
}

impl Ipc for Driver {
    fn export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        const OPERATION: &str = "ipc_export";
        if allocation.kind != AllocationKind::Device {
            return Err(lacks(OPERATION, "CUDA hands out memory of cuMemAlloc only")
                .context("kind", allocation.kind.name())
                .context("range", allocation.range));
        }
        let found = self.find(allocation.base())?;
        let live = found.filter(|found| {
            found.allocation.id == allocation.id && found.allocation.base() == allocation.base()
        });
        let found = live.ok_or_else(|| not_live(OPERATION, allocation))?;
        let workplace = self.workplace(found.context, found.device())?;
        let mut handle = CuIpcMemHandle { reserved: [0; CU_IPC_HANDLE_SIZE] };
        let exported = workplace.within(|| {
            // SAFETY: `handle` is writable; the address is the first of a live allocation.
            let code =
                unsafe { (self.functions.ipc_get_mem_handle)(&mut handle, allocation.base().0) };
            check(code, "cuIpcGetMemHandle")
        });
        workplace.end(exported).map_err(|error| error.context("range", allocation.range))?;
        let entry = crate::device::get(&self.devices, OPERATION, found.device())?;
        let pci_bus_id = entry.description.pci_bus_id.clone().unwrap_or_default();
        let body = Body { handle, len: found.allocation.range.len(), pci_bus_id };
        Ok(IpcHandle { iface: IfaceKind::CUDA, bytes: body.to_bytes() })
    }

    fn open(&self, handle: &IpcHandle) -> Result<Allocation> {
        const OPERATION: &str = "ipc_open";
        let malformed = || {
            Error::new(ErrorKind::Malformed, OPERATION)
                .iface(IfaceKind::CUDA)
                .context("bytes", handle.bytes.len())
                .remedy("pass the bytes of ipc_export unchanged")
        };
        if handle.iface != IfaceKind::CUDA {
            return Err(malformed().context("handle of", handle.iface));
        }
        let body = Body::parse(&handle.bytes).ok_or_else(malformed)?;
        let same_device = |entry: &&crate::device::DeviceEntry| {
            entry.description.pci_bus_id.as_deref() == Some(body.pci_bus_id.as_str())
        };
        let entry = self.devices.iter().find(same_device).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, OPERATION)
                .iface(IfaceKind::CUDA)
                .context("device", &body.pci_bus_id)
                .remedy("the device of the memory is not visible here: see CUDA_VISIBLE_DEVICES")
        })?;
        let device = entry.description.id;
        let hold = self.hold(device)?;
        let open = || {
            let mut base: CuDevicePtr = 0;
            let flags = sys::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
            // SAFETY: `base` is writable; the driver checks the handle.
            let code =
                unsafe { (self.functions.ipc_open_mem_handle)(&mut base, body.handle, flags) };
            ipc_refused(code).map(|()| base)
        };
        let close = |base| {
            // SAFETY: opened just now, and seen by nobody.
            check(unsafe { (self.functions.ipc_close_mem_handle)(base) }, "cuIpcCloseMemHandle")
        };
        let base = hold.within_or_undo(open, close)?;
        let entered = self.enter_imported(base, body.len, device);
        if entered.is_ok() {
            hold.keep();
        } else if let Err(error) = hold.within(|| close(base)) {
            hold.keep();
            tracing::error!(%error, "an opened allocation that failed stays open");
        }
        entered
    }

    unsafe fn close(&self, allocation: &Allocation) -> Result<()> {
        let (mut owned, last) = self.begin_close(allocation)?;
        let mut gone = false;
        let ended = self.primary(owned.device).and_then(|context| {
            let mut close = || {
                within(&self.functions, context, || {
                    self.give_back(allocation.base().0, owned.device, &mut owned.origin)
                        .inspect(|()| gone = true)
                })
            };
            if last { self.subscriptions.while_it_goes(allocation.range, close) } else { close() }
        });
        self.end_close(allocation, gone);
        ended.map_err(|error| error.context("allocation", allocation.range))
    }
}

impl Driver {
    fn enter_imported(
        &self,
        base: u64,
        len: u64,
        device: hmem_core::DeviceId,
    ) -> Result<Allocation> {
        let found = self.find(Address(base))?.ok_or_else(|| {
            Error::new(ErrorKind::Driver, "ipc_open")
                .iface(IfaceKind::CUDA)
                .context("address", Address(base))
                .context("reason", "the driver does not know memory that it opened just now")
        })?;
        let range = AddressRange::new(Address(base), len)?;
        let allocation = Allocation { range, kind: AllocationKind::Imported, ..found.allocation };
        let mut book = self.book.lock();
        let origin = Origin::Imported { opened: 0, closing: 0 };
        let fresh = Owned { id: allocation.id, range, device, origin };
        if !book.owned.contains_key(&base) {
            self.imported.fetch_add(1, Ordering::AcqRel);
        }
        let owned = book.owned.entry(base).or_insert_with(|| fresh.clone());
        if owned.id != allocation.id {
            // The driver has closed what was here, and its closer has not come back to the book
            // yet.
            *owned = fresh;
        }
        // `cuda.h`: a handle that is open already counts its opens and gives the same address.
        if let Origin::Imported { opened, .. } = &mut owned.origin {
            *opened += 1;
        }
        Ok(allocation)
    }

    /// Takes one open out of the book for a close to give back, so that of two threads that close
    /// at once each has its own. The entry stays until the driver has closed the last: until
    /// then the memory is an import.
    fn begin_close(&self, allocation: &Allocation) -> Result<(Owned, bool)> {
        let refused = || not_live("ipc_close", allocation);
        let mut book = self.book.lock();
        let owned =
            book.owned.get_mut(&allocation.base().0).filter(|owned| owned.id == allocation.id);
        let owned = owned.ok_or_else(refused)?;
        let Origin::Imported { opened, closing } = &mut owned.origin else {
            return Err(refused().context("allocated", "free it with free"));
        };
        *opened = opened.checked_sub(1).ok_or_else(refused)?;
        *closing += 1;
        let last = *opened == 0;
        Ok((owned.clone(), last))
    }

    /// Writes down how a close ended: what the driver refused can be closed again.
    fn end_close(&self, allocation: &Allocation, gone: bool) {
        let base = allocation.base().0;
        let mut book = self.book.lock();
        let owned = book.owned.get_mut(&base).filter(|owned| owned.id == allocation.id);
        let Some(Owned { origin: Origin::Imported { opened, closing }, .. }) = owned else {
            return;
        };
        *closing -= 1;
        if !gone {
            *opened += 1;
        }
        if *opened == 0 && *closing == 0 {
            book.owned.remove(&base);
            self.imported.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn ipc_refused(code: CuResult) -> Result<()> {
    check(code, "cuIpcOpenMemHandle_v2").map_err(|error| match code {
        CuResult::CUDA_ERROR_INVALID_CONTEXT => error.remedy(
            "memory cannot be opened in the process that allocated it: use it there as it is",
        ),
        CuResult::CUDA_ERROR_INVALID_HANDLE | CuResult::CUDA_ERROR_INVALID_VALUE => {
            Error::new(ErrorKind::Unavailable, "cuIpcOpenMemHandle_v2")
                .iface(IfaceKind::CUDA)
                .driver_code(code.name().unwrap_or_default(), code.0.into())
                .remedy("the memory was freed, or the process that owned it has ended")
        }
        CuResult::CUDA_ERROR_MAP_FAILED => {
            error.remedy("the device's BAR1 window may be full (`nvidia-smi -q -d MEMORY`)")
        }
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_way_and_no_altered_byte_does() {
        let mut handle = CuIpcMemHandle { reserved: [0; CU_IPC_HANDLE_SIZE] };
        handle.reserved[3] = -7;
        let body = Body { handle, len: 4096, pci_bus_id: "0000:3a:00.0".into() };
        let bytes = body.to_bytes();
        let back = Body::parse(&bytes).unwrap();
        assert_eq!(
            (back.handle, back.len, back.pci_bus_id.as_str()),
            (handle, 4096, "0000:3a:00.0")
        );
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 1;
            assert!(Body::parse(&altered).is_none(), "byte {at}");
            assert!(Body::parse(&bytes[..at]).is_none(), "cut at {at}");
        }
    }
}
