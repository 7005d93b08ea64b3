//! Memory by address: which allocation an address lies in, of which kind, and which of its parts
//! NICs can reach.

use std::{
    ffi::c_void,
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    IfaceKind, Result, Segment, iface::SegmentMap,
};

use crate::{
    context::{Workplace, within},
    driver::{Driver, Origin},
    error::check,
    sys::{self, CuContext, CuDevicePtr, CuPointerAttribute, CuResult},
};

/// What a query asks for, all in one call; the last only of drivers that know it.
const ATTRIBUTES: [CuPointerAttribute; 9] = [
    sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    sys::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    sys::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    sys::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    sys::CU_POINTER_ATTRIBUTE_BUFFER_ID,
    sys::CU_POINTER_ATTRIBUTE_IS_MANAGED,
    sys::CU_POINTER_ATTRIBUTE_CONTEXT,
    sys::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    sys::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
];

/// Beside a number of attributes: the driver has not answered so many yet.
const UNSEEN: u32 = 1 << 31;

/// An allocation as the driver describes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) allocation: Allocation,
    /// The context that it was allocated in; null for memory of no context.
    pub(crate) context: CuContext,
}

impl Found {
    /// The device to work on it with: its own, or the first for memory of no device.
    pub(crate) fn device(&self) -> DeviceId {
        self.allocation.device.unwrap_or(DeviceId(0))
    }
}

/// Which page-locked memory is the application's own, by identity: no pointer attribute says it.
///
/// `cuda.h` on BUFFER_ID: "Subsequent allocations do not reuse IDs from previous freed
/// allocations." So what was found out for an allocation holds for good, and nothing need be
/// forgotten. Page-locking is no allocation: that the driver gives it no identity that an
/// allocation had before is an assumption. Were it wrong, the application's own pages would
/// be taken for an allocation of CUDA's and cached by that identity, which says nothing of their
/// unmapping; an identity that earlier page-locking had does no harm. Each identity has one place,
/// where the next that falls on it takes over; a place is one word, so that a reader sees all of an
/// entry or none.
pub(crate) struct HostKinds([AtomicU64; Self::PLACES]);

impl HostKinds {
    const PLACES: usize = 256;

    /// What a place holds of an identity; `None` for one that is too wide, and for 0, which is no
    /// identity.
    fn entry(id: AllocationId, registered: bool) -> Option<u64> {
        (id.0 != 0 && id.0 >> 63 == 0).then_some(id.0 << 1 | u64::from(registered))
    }

    fn place(&self, id: AllocationId) -> &AtomicU64 {
        // Identities are given in rising order: neighbours do not meet.
        &self.0[id.0 as usize % Self::PLACES]
    }

    fn get(&self, id: AllocationId) -> Option<bool> {
        let held = self.place(id).load(Ordering::Relaxed);
        [false, true].into_iter().find(|registered| Self::entry(id, *registered) == Some(held))
    }

    fn keep(&self, id: AllocationId, registered: bool) {
        if let Some(entry) = Self::entry(id, registered) {
            self.place(id).store(entry, Ordering::Relaxed);
        }
    }
}

impl Default for HostKinds {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; Self::PLACES])
    }
}

impl fmt::Debug for HostKinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostKinds").finish_non_exhaustive()
    }
}

/// What the driver says of memory that was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Witnessed {
    Alive,
    Dead,
    /// It answers nothing without a context, and none could be asked in.
    Unknown,
}

/// What the driver answered about an address.
enum Answer<const N: usize> {
    Values([u64; N]),
    /// No context with unified addressing knows it, or none could be asked.
    NoContext,
    /// An attribute that the driver does not know, or the dialect of some for "foreign".
    Invalid,
}

impl SegmentMap for Driver {
    /// The parts of a range that are one mapping each, and whether they were made to be exported.
    /// Of memory that is not VMM no property tells: asking the driver for the export does.
    fn segments(&self, range: AddressRange) -> Result<Vec<Segment>> {
        let outside = || {
            Error::new(ErrorKind::OutOfBounds, "segments")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy("the range must lie in one live allocation")
        };
        let found = self.find(range.start())?.ok_or_else(outside)?;
        let allocation = found.allocation;
        if !allocation.range.contains_range(range) {
            return Err(outside().context("allocation", allocation.range));
        }
        if allocation.kind.cpu_accessible() {
            return Ok(vec![Segment { range, exportable: false }]);
        }
        if allocation.kind != AllocationKind::Virtual {
            return Ok(vec![Segment { range, exportable: true }]);
        }
        let workplace = self.workplace(found.context, found.device())?;
        let segments = self.mappings(range, &workplace);
        workplace.end(segments)
    }

    fn not_exportable(&self) -> &'static str {
        "IS_GPU_DIRECT_RDMA_CAPABLE is 0"
    }
}

impl Driver {
    /// One call for all attributes. It needs no context and dereferences nothing.
    fn ask<const N: usize>(
        &self,
        address: u64,
        mut attributes: [CuPointerAttribute; N],
        asked: u32,
    ) -> Result<Answer<N>> {
        // Zeroed and as wide as the widest attribute: what the driver writes narrower reads back
        // the same (little-endian), and what it does not write reads as the null that it
        // documents.
        const { assert!(cfg!(target_endian = "little")) };
        let mut values = [0u64; N];
        let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: the first `asked` entries of both arrays exist, and each place has the 8 bytes
        // that the widest attribute takes. The address is only looked up, never
        // dereferenced.
        let code = unsafe {
            (self.functions.pointer_get_attributes)(
                asked,
                attributes.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        match code {
            CuResult::CUDA_ERROR_INVALID_CONTEXT | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                Ok(Answer::NoContext)
            }
            CuResult::CUDA_ERROR_INVALID_VALUE => Ok(Answer::Invalid),
            code => check(code, "cuPointerGetAttributes")
                .map(|()| Answer::Values(values))
                .map_err(|error| error.context("address", Address(address))),
        }
    }

    /// Asks; where this thread has no context and the driver wants one, asks again within those
    /// that exist.
    ///
    /// `cuda.h`: INVALID_CONTEXT is the answer for an address that no context with unified
    /// addressing knows. A thread without a current context gets it from some drivers for any
    /// address, device memory included; so may one whose current context was destroyed.
    ///
    /// Over such a driver a thread without a context makes six calls for each device whose primary
    /// context somebody else has: holding it longer would keep it from being destroyed.
    fn ask_anywhere<const N: usize>(
        &self,
        address: u64,
        attributes: [CuPointerAttribute; N],
        asked: u32,
    ) -> Result<Answer<N>> {
        let first = self.ask(address, attributes, asked)?;
        if !matches!(first, Answer::NoContext) || self.current()?.is_some() {
            return Ok(first);
        }
        for entry in &self.devices {
            let device = entry.description.id;
            let Some(hold) = self.hold_if_active(device)? else { continue };
            let answer = hold.within(|| self.ask(address, attributes, asked));
            let answer = hold.end(answer)?;
            if !matches!(answer, Answer::NoContext) {
                return Ok(answer);
            }
        }
        Ok(Answer::NoContext)
    }

    /// Finds out how many of [`ATTRIBUTES`] the driver knows, by asking about an address that is
    /// not its own. From then on it is not to answer INVALID_VALUE: a driver that says so of
    /// foreign addresses cannot be told from one that lacks an attribute, and is refused here.
    ///
    /// # Errors
    /// Unsupported for a driver that cannot say which range an address is in.
    pub(crate) fn learn_attributes(&self) -> Result<()> {
        let foreign = std::ptr::from_ref(self).addr() as u64;
        for asked in [ATTRIBUTES.len() as u32, ATTRIBUTES.len() as u32 - 1] {
            match self.ask(foreign, ATTRIBUTES, asked)? {
                Answer::Invalid => {}
                Answer::Values(_) => {
                    self.attributes.store(asked, Ordering::Release);
                    return Ok(());
                }
                // It may refuse for want of a context before it looks at what it is asked for.
                Answer::NoContext => {
                    self.attributes.store(asked | UNSEEN, Ordering::Release);
                    return Ok(());
                }
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "cuPointerGetAttributes")
            .iface(IfaceKind::CUDA)
            .context("attribute", "RANGE_START_ADDR")
            .remedy("the driver must be of CUDA 10.2 or newer to say which range an address is in"))
    }

    /// The allocation around an address; `None` for memory that CUDA does not know.
    pub(crate) fn find(&self, address: Address) -> Result<Option<Found>> {
        let known = self.attributes.load(Ordering::Acquire);
        let (asked, unseen) = (known & !UNSEEN, known & UNSEEN != 0);
        match self.ask_anywhere(address.0, ATTRIBUTES, asked)? {
            Answer::Values(values) => {
                if unseen {
                    self.attributes.store(asked, Ordering::Release);
                }
                self.describe(address, values)
            }
            Answer::NoContext => Ok(None),
            Answer::Invalid if unseen && asked as usize == ATTRIBUTES.len() => {
                self.attributes.store((asked - 1) | UNSEEN, Ordering::Release);
                self.find(address)
            }
            // Not "foreign": that is how the call for one attribute says it. `cuda.h` on this one:
            // it "will not return an error when the ptr encountered is not a valid CUDA
            // pointer", and `learn_attributes` has seen that it does not. Taken for "
            // foreign", it would have the CPU write to device memory.
            Answer::Invalid => Err(Error::new(ErrorKind::Driver, "cuPointerGetAttributes")
                .iface(IfaceKind::CUDA)
                .driver_code(
                    "CUDA_ERROR_INVALID_VALUE",
                    CuResult::CUDA_ERROR_INVALID_VALUE.0.into(),
                )
                .context(
                    "reason",
                    "the driver refuses a question that it answered when the iface was opened",
                )
                .context("address", Address(address.0))),
        }
    }

    fn describe(&self, address: Address, values: [u64; ATTRIBUTES.len()]) -> Result<Option<Found>> {
        let [memory_type, start, len, ordinal, buffer, managed, context, legacy, pool] = values;
        let context = CuContext(context as usize);
        let mut kind = match memory_type as u32 {
            0 => return Ok(None),
            _ if managed != 0 => AllocationKind::Managed,
            sys::CU_MEMORYTYPE_HOST => AllocationKind::Host,
            sys::CU_MEMORYTYPE_DEVICE if pool != 0 => AllocationKind::StreamOrdered,
            sys::CU_MEMORYTYPE_DEVICE if context.is_null() => AllocationKind::Virtual,
            // That VMM memory has no context is written nowhere. Legacy handles are for what was
            // "created with cuMemAlloc", which saves asking further.
            sys::CU_MEMORYTYPE_DEVICE
                if legacy == 0
                    && !self.is_imported(Address(start))
                    && self.has_handle(address)? =>
            {
                AllocationKind::Virtual
            }
            sys::CU_MEMORYTYPE_DEVICE => AllocationKind::Device,
            other => return Err(inconsistent(address).context("memory_type", other)),
        };
        let range = AddressRange::new(Address(start), len)?;
        if !range.contains(address) {
            // Application memory that was page-locked may be known under the device's alias only.
            // The CPU reaches it as any memory of the system, and so does a NIC.
            if kind == AllocationKind::Host {
                tracing::debug!(%address, %range, "page-locked memory without a range of its own: left to the system");
                return Ok(None);
            }
            return Err(inconsistent(address).context("range", range));
        }
        match kind {
            AllocationKind::Host if self.is_registered(AllocationId(buffer), range, context)? => {
                kind = AllocationKind::HostRegistered;
            }
            AllocationKind::Device if self.is_imported(range.start()) => {
                kind = AllocationKind::Imported
            }
            _ => {}
        }
        // Host memory belongs to no device, managed memory to several. A negative ordinal is none.
        let device = match kind {
            AllocationKind::Host | AllocationKind::HostRegistered | AllocationKind::Managed => None,
            _ => u32::try_from(ordinal as i32).ok().map(DeviceId),
        };
        // What a driver names for a reservation is not where its physical memory lives and dies.
        let context = if kind == AllocationKind::Virtual { CuContext::NULL } else { context };
        let id = AllocationId(buffer);
        let allocation = Allocation { iface: IfaceKind::CUDA, range, device, kind, id };
        Ok(Some(Found { allocation, context }))
    }

    /// Whether the memory at an address is VMM memory: `cuda.h` on `cuMemRetainAllocationHandle`,
    /// "If the address requested is not mapped, the function will fail", mapped being what
    /// `cuMemMap` does. Where it cannot be asked, the memory is handled as VMM memory, which
    /// every other may be: by its mappings, and cached by nothing.
    fn has_handle(&self, address: Address) -> Result<bool> {
        let functions = &self.functions;
        let (Some(retain), Some(release)) =
            (functions.mem_retain_allocation_handle, functions.mem_release)
        else {
            return Ok(true);
        };
        let mut handle = 0;
        // SAFETY: `handle` is writable; the address is looked up, not followed.
        match unsafe { retain(&mut handle, address.0 as *mut c_void) } {
            CuResult::CUDA_ERROR_INVALID_VALUE | CuResult::CUDA_ERROR_NOT_SUPPORTED => Ok(false),
            code => {
                check(code, "cuMemRetainAllocationHandle")?;
                // SAFETY: retained once above, released once.
                check(unsafe { release(handle) }, "cuMemRelease").map(|()| true)
            }
        }
    }

    /// Whether page-locked memory is the application's own. Asked of the driver once for each
    /// memory.
    fn is_registered(
        &self,
        id: AllocationId,
        range: AddressRange,
        context: CuContext,
    ) -> Result<bool> {
        if let Some(known) = self.host_kinds.get(id) {
            return Ok(known);
        }
        let registered = self.ask_whether_registered(range, context)?;
        self.host_kinds.keep(id, registered);
        Ok(registered)
    }

    /// `cuda.h` has `cuMemHostGetFlags` fail for what `cuMemHostAlloc` did not allocate.
    fn ask_whether_registered(&self, range: AddressRange, context: CuContext) -> Result<bool> {
        let book = self.book.lock();
        if book.registered.contains_key(&range.start().0) {
            return Ok(true);
        }
        if book.owned.contains_key(&range.start().0) {
            return Ok(false);
        }
        drop(book);
        let asks = || {
            let mut flags = 0;
            // SAFETY: `flags` is writable; the address is looked up, not followed.
            let code = unsafe {
                (self.functions.mem_host_get_flags)(&mut flags, range.start().0 as *mut c_void)
            };
            match code {
                CuResult::CUDA_ERROR_INVALID_VALUE => Ok(true),
                code => check(code, "cuMemHostGetFlags")
                    .map(|()| false)
                    .map_err(|error| error.context("range", range)),
            }
        };
        if context.is_null() { asks() } else { within(&self.functions, context, asks) }
    }

    fn is_imported(&self, base: Address) -> bool {
        self.imported.load(Ordering::Acquire) > 0
            && matches!(
                self.book.lock().owned.get(&base.0),
                Some(owned) if matches!(owned.origin, Origin::Imported { .. })
            )
    }

    /// The identity of whatever is at `address` now; `None` if CUDA knows nothing there.
    pub(crate) fn identity(&self, address: Address) -> Result<Option<AllocationId>> {
        const IDENTITY: [CuPointerAttribute; 2] =
            [sys::CU_POINTER_ATTRIBUTE_BUFFER_ID, sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
        match self.ask_anywhere(address.0, IDENTITY, IDENTITY.len() as u32)? {
            Answer::Values([id, memory_type]) if memory_type != 0 => Ok(Some(AllocationId(id))),
            _ => Ok(None),
        }
    }

    /// Whether the memory of this identity and context is still there; of memory of no context,
    /// this identity.
    pub(crate) fn witness(
        &self,
        address: Address,
        id: AllocationId,
        context: CuContext,
    ) -> Result<Witnessed> {
        const WITNESS: [CuPointerAttribute; 2] =
            [sys::CU_POINTER_ATTRIBUTE_BUFFER_ID, sys::CU_POINTER_ATTRIBUTE_CONTEXT];
        Ok(match self.ask_anywhere(address.0, WITNESS, WITNESS.len() as u32)? {
            Answer::Values([found, of])
                if found == id.0 && (context.is_null() || of == context.0 as u64) =>
            {
                Witnessed::Alive
            }
            Answer::Values(_) | Answer::Invalid => Witnessed::Dead,
            Answer::NoContext => Witnessed::Unknown,
        })
    }

    /// The context in which the memory at an address was allocated or page-locked; null if the
    /// driver names none.
    pub(crate) fn context_of(&self, address: Address) -> Result<CuContext> {
        const CONTEXT: [CuPointerAttribute; 1] = [sys::CU_POINTER_ATTRIBUTE_CONTEXT];
        match self.ask_anywhere(address.0, CONTEXT, 1)? {
            Answer::Values([context]) => Ok(CuContext(context as usize)),
            Answer::NoContext | Answer::Invalid => Ok(CuContext::NULL),
        }
    }

    /// The mapped parts of a range of a reservation.
    fn mappings(&self, range: AddressRange, workplace: &Workplace<'_>) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        let mut done = 0;
        while let Some(rest) = range.slice(done, range.len() - done).filter(|rest| !rest.is_empty())
        {
            let mapping = workplace.within(|| self.mapping_at(rest.start()))?;
            let offset = rest.start().0.wrapping_sub(mapping.start().0);
            let len = mapping.len().saturating_sub(offset).min(rest.len());
            let part = rest.slice(0, len).filter(|part| !part.is_empty());
            let part =
                part.ok_or_else(|| inconsistent(rest.start()).context("mapping", mapping))?;
            segments.push(Segment { range: part, exportable: self.is_rdma_capable(part.start())? });
            done += len;
        }
        Ok(segments)
    }

    /// The mapping around an address of a reservation. `cuda.h` on RANGE_SIZE: "To retrieve the
    /// size of the mapped region, see cuMemGetAddressRange".
    fn mapping_at(&self, address: Address) -> Result<AddressRange> {
        let (mut base, mut size): (CuDevicePtr, usize) = (0, 0);
        // SAFETY: both are writable.
        let code =
            unsafe { (self.functions.mem_get_address_range)(&mut base, &mut size, address.0) };
        match code {
            CuResult::CUDA_ERROR_INVALID_VALUE | CuResult::CUDA_ERROR_NOT_FOUND => Err(Error::new(
                ErrorKind::OutOfBounds,
                "cuMemGetAddressRange_v2",
            )
            .iface(IfaceKind::CUDA)
            .driver_code(code.name().unwrap_or_default(), code.0.into())
            .context("address", address)
            .remedy("no memory is mapped there (cuMemMap): map it, or register the mapped parts")),
            code => check(code, "cuMemGetAddressRange_v2")
                .and_then(|()| AddressRange::new(Address(base), size as u64)),
        }
    }

    /// Whether GPUDirect RDMA reaches the memory at an address: the driver's own word where it has
    /// one, else that of the physical memory's properties. Where neither can be asked, trying
    /// to export it tells.
    pub(crate) fn is_rdma_capable(&self, address: Address) -> Result<bool> {
        const CAPABLE: [CuPointerAttribute; 1] =
            [sys::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE];
        if let Answer::Values([capable]) = self.ask_anywhere(address.0, CAPABLE, 1)? {
            return Ok(capable != 0);
        }
        let functions = &self.functions;
        let (Some(retain), Some(properties), Some(release)) = (
            functions.mem_retain_allocation_handle,
            functions.mem_get_allocation_properties,
            functions.mem_release,
        ) else {
            return Ok(true);
        };
        let mut handle = 0;
        // SAFETY: `handle` is writable; the address is looked up, not followed.
        let code = unsafe { retain(&mut handle, address.0 as *mut c_void) };
        if matches!(code, CuResult::CUDA_ERROR_INVALID_VALUE | CuResult::CUDA_ERROR_NOT_SUPPORTED) {
            // Not VMM memory: it has no handle.
            return Ok(true);
        }
        check(code, "cuMemRetainAllocationHandle")?;
        let mut of_memory = sys::CuMemAllocationProp::default();
        // SAFETY: the place is writable, and the handle was retained just now.
        let asked = check(
            unsafe { properties(&mut of_memory, handle) },
            "cuMemGetAllocationPropertiesFromHandle",
        );
        // SAFETY: retained once above, released once.
        check(unsafe { release(handle) }, "cuMemRelease")?;
        asked.map(|()| of_memory.gpu_direct_rdma_capable != 0)
    }
}

fn inconsistent(address: Address) -> Error {
    Error::new(ErrorKind::Driver, "query")
        .iface(IfaceKind::CUDA)
        .context(
            "reason",
            "the driver's attributes do not describe an allocation that holds the address",
        )
        .context("address", address)
}
