//! Lookup of addresses, and the table of memory that this iface allocated or opened.

#![allow(unsafe_code, reason = "calls the driver on allocations")]

use std::{
    ffi::c_void,
    mem,
    os::fd::OwnedFd,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, Error, ErrorKind, IfaceKind,
    ProcessMark, Result,
};
use hmem_iface_kit::table::Owned;
use parking_lot::Mutex;

use crate::{
    driver::{DeviceEntry, Driver},
    error::{ZE, check},
    sys::{self, ContextHandle, DeviceHandle, MemoryAllocationProperties, ZeResult},
};

/// Looks up allocations by address, and records the memory that the iface must release.
#[derive(Debug)]
pub(crate) struct Lookup {
    pub(crate) driver: Arc<Driver>,
    pub(crate) owned: Owned<DriverMemory>,
}

/// Memory that this iface allocated, or imported from another process.
#[derive(Debug)]
pub(crate) struct DriverMemory {
    /// Number that the driver assigns to the allocation. Allocations of one pool share the number
    /// of the pool.
    driver_id: u64,
    /// True if the driver took the memory from a pool.
    pooled: bool,
    /// Index of the memory's driver in [`Driver::contexts`].
    pub(crate) driver: usize,
    /// The dma-buf to which IPC handles refer. `None` until the first handle is exported. Released
    /// when the memory is freed.
    pub(crate) shared: Option<Arc<OwnedFd>>,
    /// The dma-buf of memory that was imported from another process. `None` for other memory.
    _imported: Option<ImportedBuffer>,
}

/// Devices and dma-bufs of all [`ImportedBuffer`]s, with the processes that imported them.
static IMPORTED: Mutex<Vec<(ProcessMark, DeviceHandle, FileId)>> = Mutex::new(Vec::new());

/// File system and inode of a file, which together identify the file.
pub(crate) type FileId = (u64, u64);

/// The right to import a dma-buf as memory of a device, until the value is dropped. All ifaces of a
/// process together have the right once.
///
/// Intel's driver imports a dma-buf once: a second import returns the address of the first, and the
/// first free ends both.
#[derive(Debug)]
pub(crate) struct ImportedBuffer((ProcessMark, DeviceHandle, FileId));

impl ImportedBuffer {
    /// Takes the right to import the dma-buf `file` as memory of `device`.
    ///
    /// # Errors
    /// - Busy if this process has imported the dma-buf already.
    /// - The errors of [`ProcessMark::current`].
    pub(crate) fn new(device: DeviceHandle, file: FileId) -> Result<Self> {
        let this = (ProcessMark::current()?, device, file);
        let mut imported = IMPORTED.lock();
        if imported.contains(&this) {
            return Err(ZE
                .error(ErrorKind::Busy, "ipc_open")
                .remedy("this process has opened the memory already: use that allocation"));
        }
        imported.push(this);
        Ok(Self(this))
    }
}

impl Drop for ImportedBuffer {
    fn drop(&mut self) {
        let Self(this) = self;
        if this.0.is_current() {
            IMPORTED.lock().retain(|imported| imported != this);
        }
    }
}

/// An allocation, with its device, driver, page size and pool.
#[derive(Debug)]
pub(crate) struct FoundAllocation<'a> {
    pub(crate) allocation: Allocation,
    /// Device on which the memory was allocated. `None` for host and shared memory, and for memory
    /// of a device that the driver did not list.
    pub(crate) device: Option<&'a DeviceEntry>,
    /// Index of the memory's driver in [`Driver::contexts`].
    pub(crate) driver: usize,
    /// Page size of the memory in bytes.
    pub(crate) page_size: u64,
    /// True if the driver took the memory from a pool.
    pub(crate) pooled: bool,
    /// True if this iface allocated the memory, or imported it from another process.
    pub(crate) owned: bool,
    /// Number that the driver assigns to the allocation, or to its pool.
    driver_id: u64,
}

/// Values that the driver returned for an address.
struct LookupAnswer {
    kind: u32,
    id: u64,
    page_size: u64,
    device: DeviceHandle,
}

impl Lookup {
    pub(crate) fn new(driver: Arc<Driver>) -> Self {
        Self { driver, owned: Owned::new(IfaceKind::ZE) }
    }

    /// Returns the allocation that contains an address, or `None` if no driver knows the address.
    pub(crate) fn find(&self, address: Address) -> Result<Option<FoundAllocation<'_>>> {
        // Validation layers of the loader refuse the null pointer as an invalid argument, so the
        // driver is not queried.
        if address.0 == 0 {
            return Ok(None);
        }
        let contexts = self.driver.contexts.read();
        for (driver, context) in contexts.iter().enumerate() {
            let found = self.find_in(driver, *context, address);
            if let Some(found) = found.map_err(|error| error.context("address", address))? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn find_in(
        &self,
        driver: usize,
        context: ContextHandle,
        address: Address,
    ) -> Result<Option<FoundAllocation<'_>>> {
        let answer = self.properties(context, address)?;
        let kind = match answer.kind {
            sys::ZE_MEMORY_TYPE_UNKNOWN => return Ok(None),
            sys::ZE_MEMORY_TYPE_HOST => AllocationKind::Host,
            sys::ZE_MEMORY_TYPE_DEVICE => AllocationKind::Device,
            sys::ZE_MEMORY_TYPE_SHARED => AllocationKind::Managed,
            other => return Err(inconsistent().context("type", other)),
        };
        let (mut base, mut len) = (ptr::null_mut(), 0usize);
        let get = self.driver.functions.mem_get_address_range;
        // SAFETY: the caller keeps the context alive; `base` and `len` are writable. The address is
        // only looked up.
        match unsafe { get(context, pointer(address), &mut base, &mut len) } {
            // The address is in a part of a pool that belongs to no allocation.
            ZeResult::ZE_RESULT_ERROR_ADDRESS_NOT_FOUND => return Ok(None),
            code => check(code, "zeMemGetAddressRange")?,
        }
        let range = AddressRange::new(Address::of_ptr(base), len as u64)?;
        // The address is in the padding that follows the allocation in a pool.
        if range.end().is_some_and(|end| address >= end) {
            return Ok(None);
        }
        if !range.contains(address) {
            return Err(inconsistent().context("range", range));
        }
        let owned = {
            let entries = self.owned.entries();
            let entry = entries.get(&range.start().0);
            let entry = entry.filter(|entry| entry.memory.driver_id == answer.id);
            entry.map(|entry| (entry.id, entry.memory.pooled, entry.imported))
        };
        let (id, pooled, imported) = match owned {
            Some(entry) => entry,
            None => {
                let pooled = self.is_pooled(context, range, answer.id)?;
                (identity(driver, answer.id, pooled.then_some(range)), pooled, false)
            }
        };
        // Host memory belongs to no device, shared memory to several.
        let on_device = kind == AllocationKind::Device;
        let device = on_device.then(|| self.driver.device_of(answer.device)).flatten();
        let kind = if imported { AllocationKind::Imported } else { kind };
        let allocation = Allocation {
            iface: IfaceKind::ZE,
            range,
            device: device.map(|entry| entry.description.id),
            kind,
            id,
            token: 0,
        };
        Ok(Some(FoundAllocation {
            allocation,
            device,
            driver,
            page_size: answer.page_size,
            pooled,
            owned: owned.is_some(),
            driver_id: answer.id,
        }))
    }

    /// Returns true if the driver took a range from a pool: the byte before or after the range has
    /// the number `id` too. Intel's driver uses pools for small allocations that were not requested
    /// to be exportable.
    fn is_pooled(&self, context: ContextHandle, range: AddressRange, id: u64) -> Result<bool> {
        for next in [range.start().0.checked_add(range.len()), range.start().0.checked_sub(1)] {
            let Some(next) = next.filter(|next| *next != 0) else { continue };
            let answer = self.properties(context, Address(next))?;
            if answer.kind != sys::ZE_MEMORY_TYPE_UNKNOWN && answer.id == id {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn properties(&self, context: ContextHandle, address: Address) -> Result<LookupAnswer> {
        let mut properties = MemoryAllocationProperties::default();
        let mut device = DeviceHandle::NULL;
        let get = self.driver.functions.mem_get_alloc_properties;
        // SAFETY: the caller keeps the context alive. The structure has its type in `stype` and
        // ends the chain. `device` is writable. The address is only looked up, never dereferenced.
        let code = unsafe { get(context, pointer(address), &mut properties, &mut device) };
        check(code, "zeMemGetAllocProperties")?;
        let MemoryAllocationProperties { kind, id, page_size, .. } = properties;
        Ok(LookupAnswer { kind, id, page_size, device })
    }

    /// Adds new memory of the driver to the table, and returns the memory as an allocation.
    /// Takes the dma-buf of imported memory out of `imported`, but leaves it there after an error:
    /// the caller must free the memory before it drops the dma-buf.
    pub(crate) fn enter(
        &self,
        driver: usize,
        base: *mut c_void,
        imported: &mut Option<ImportedBuffer>,
    ) -> Result<Allocation> {
        let base = Address::of_ptr(base);
        let found = self.driver.with_context(driver, |context| self.find_in(driver, context, base));
        let found = found?.ok_or_else(|| {
            ZE.error(ErrorKind::Driver, "allocate")
                .context("address", base)
                .context("why", "the driver does not recognise memory that it has allocated")
        })?;
        let FoundAllocation { mut allocation, driver_id, pooled, .. } = found;
        let is_imported = imported.is_some();
        if is_imported {
            allocation.kind = AllocationKind::Imported;
        }
        if pooled {
            // The driver's answers do not show a free of pooled memory, so the table assigns the
            // identity.
            static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
            allocation.id = AllocationId(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        let (shared, _imported) = (None, imported.take());
        let memory = DriverMemory { driver_id, pooled, driver, shared, _imported };
        self.owned.insert(&allocation, is_imported, memory);
        Ok(allocation)
    }

    /// Returns the dma-buf by which other processes open an allocation of this iface. The first
    /// call exports the allocation.
    ///
    /// # Errors
    /// - InvalidArgument if the allocation is not in the table.
    /// - The error of `export`.
    pub(crate) fn share(
        &self,
        allocation: &Allocation,
        export: impl FnOnce() -> Result<OwnedFd>,
    ) -> Result<Arc<OwnedFd>> {
        const OPERATION: &str = "ipc_export";
        let shared = self.owned.live(OPERATION, allocation, |owned| owned.shared.clone())?;
        if let Some(fd) = shared {
            return Ok(fd);
        }
        let fd = Arc::new(export()?);
        self.owned.live(OPERATION, allocation, |owned| Arc::clone(owned.shared.get_or_insert(fd)))
    }

    /// Frees memory that the driver allocated or imported.
    pub(crate) fn free(&self, driver: usize, base: Address) -> Result<()> {
        self.driver.with_context(driver, |context| {
            let pointer = ptr::with_exposed_provenance_mut(base.0 as usize);
            // SAFETY: the driver allocated the memory. It is freed once: the caller removed the
            // table's entry, or has not made one. The caller of `Allocator::free` or `Ipc::close`
            // promises that nothing uses the memory.
            check(unsafe { (self.driver.functions.mem_free)(context, pointer) }, "zeMemFree")
        })
    }
}

impl Drop for Lookup {
    /// In a forked child, leaks the table of the parent's memory, whose drop would report the
    /// memory as not freed.
    fn drop(&mut self) {
        if !self.driver.process.is_current() {
            mem::forget(mem::replace(&mut self.owned, Owned::new(IfaceKind::ZE)));
        }
    }
}

/// Returns the identity of an allocation with the driver's `number`. Each driver numbers its
/// allocations from 1. The index of the driver, in the top bits, distinguishes allocations of two
/// drivers. The address distinguishes allocations of one pool.
fn identity(driver: usize, number: u64, in_pool: Option<AddressRange>) -> AllocationId {
    let place = in_pool.map_or(0, |range| range.start().0);
    AllocationId((number ^ place) & (u64::MAX >> 8) | (driver as u64) << 56)
}

pub(crate) fn pointer(address: Address) -> *const c_void {
    ptr::with_exposed_provenance(address.0 as usize)
}

fn inconsistent() -> Error {
    ZE.error(ErrorKind::Driver, "query").context(
        "why",
        "the driver's answer does not describe an allocation that holds the address",
    )
}
