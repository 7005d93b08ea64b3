//! Lookup of addresses: the allocation that an address lies in, its kind and its identity.

#![allow(unsafe_code, reason = "calls the driver to look up addresses")]

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use hmem_core::{
    Address, AddressRange, Allocation, AllocationId, AllocationKind, DeviceId, Error, ErrorKind,
    IfaceKind, Result,
};

use crate::{
    context::{PrimaryContexts, with_context},
    driver::Driver,
    error::{CUDA, check, coded},
    handles::with_handle,
    sys::{self, CuContext, CuPointerAttribute, CuResult},
};

/// Attributes that [`PointerLookup::find`] queries in one call. Older drivers lack the last
/// attribute.
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

/// Flag in [`PointerLookup::known`] until the driver has returned the values of a query. Until then
/// the driver may not know the last attribute.
const UNSEEN: u32 = 1 << 31;

/// Looks up allocations by address.
#[derive(Debug)]
pub(crate) struct PointerLookup {
    pub(crate) contexts: PrimaryContexts,
    /// Number of the first [`ATTRIBUTES`] that the driver knows. The bit [`UNSEEN`] is set while
    /// this number is not confirmed.
    known: AtomicU32,
    host_kinds: HostKinds,
}

/// An allocation, with the context in which it was allocated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundAllocation {
    pub(crate) allocation: Allocation,
    /// Context in which the memory was allocated; null for memory without a context.
    pub(crate) context: CuContext,
}

impl FoundAllocation {
    /// Returns the device for operations on the memory: the memory's own device, or the first
    /// device for memory without a device.
    pub(crate) fn device(&self) -> DeviceId {
        self.allocation.device.unwrap_or(DeviceId(0))
    }
}

/// Cache that maps the identity of page-locked memory to its kind: page-locked by the application,
/// or allocated by CUDA. No pointer attribute states that kind.
///
/// `cuda.h` on BUFFER_ID: "Subsequent allocations do not reuse IDs from previous freed
/// allocations." So the kind of an identity never changes, and no entry needs to be removed.
///
/// `cuda.h` does not say this of memory that the application page-locks, since page-locking is not
/// an allocation. The cache assumes that such memory never gets the identity of an earlier
/// allocation. Otherwise the iface would take the application's pages for an allocation of CUDA,
/// and a hit could not detect that the pages were unmapped. Reuse of the identity of earlier
/// page-locked memory is harmless, since the kind is the same.
///
/// Each identity has one slot. A later identity with the same slot replaces an earlier one. A slot
/// is one word, so a reader never sees a part of an entry.
#[derive(Debug)]
pub(crate) struct HostKinds([AtomicU64; Self::SLOTS]);

impl HostKinds {
    const SLOTS: usize = 256;

    /// Returns the word that a slot holds for an identity. `registered` is true for memory that the
    /// application page-locked. Returns `None` if the identity does not fit into the word, or is 0,
    /// which means no identity.
    fn entry(id: AllocationId, registered: bool) -> Option<u64> {
        (id.0 != 0 && id.0 >> 63 == 0).then_some(id.0 << 1 | u64::from(registered))
    }

    fn slot(&self, id: AllocationId) -> &AtomicU64 {
        // Identities ascend, so that consecutive identities have different slots.
        &self.0[id.0 as usize % Self::SLOTS]
    }

    /// Returns the kind of an identity: true for memory that the application page-locked. Returns
    /// `None` if the slot does not hold the identity.
    fn get(&self, id: AllocationId) -> Option<bool> {
        let held = self.slot(id).load(Ordering::Relaxed);
        [false, true].into_iter().find(|registered| Self::entry(id, *registered) == Some(held))
    }

    fn keep(&self, id: AllocationId, registered: bool) {
        if let Some(entry) = Self::entry(id, registered) {
            self.slot(id).store(entry, Ordering::Relaxed);
        }
    }
}

/// State of memory that an earlier lookup found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Liveness {
    Alive,
    Dead,
    /// The driver answers only in a context, and the lookup found no context that the driver
    /// accepts.
    Unknown,
}

/// Answer of the driver to a query of an address.
enum LookupAnswer<const N: usize> {
    Values([u64; N]),
    /// No context with unified addressing knows the address, or the driver needs a current context
    /// and the thread has none.
    NoContext,
    /// The driver does not know an attribute, or refuses an address that is not CUDA memory.
    Invalid,
}

impl PointerLookup {
    /// Creates a lookup. Queries an address that is not CUDA memory, to find out how many of
    /// [`ATTRIBUTES`] the driver knows.
    ///
    /// An INVALID_VALUE of a later query is an error of the driver. So this function refuses a
    /// driver that returns this code for an address that is not CUDA memory, whatever the number of
    /// attributes.
    ///
    /// # Errors
    /// - Unsupported if the driver cannot return the range of the allocation at an address.
    /// - Otherwise the error of the driver.
    pub(crate) fn new(contexts: PrimaryContexts) -> Result<Self> {
        let (known, host_kinds) =
            (AtomicU32::new(0), HostKinds([const { AtomicU64::new(0) }; HostKinds::SLOTS]));
        let lookup = Self { contexts, known, host_kinds };
        let foreign = std::ptr::from_ref(&lookup).addr() as u64;
        for count in [ATTRIBUTES.len() as u32, ATTRIBUTES.len() as u32 - 1] {
            let known = match lookup.query(foreign, ATTRIBUTES, count)? {
                LookupAnswer::Invalid => continue,
                LookupAnswer::Values(_) => count,
                // Without a context the driver may fail before it reads the attributes, so the
                // count is not confirmed.
                LookupAnswer::NoContext => count | UNSEEN,
            };
            lookup.known.store(known, Ordering::Release);
            return Ok(lookup);
        }
        Err(CUDA
            .error(ErrorKind::Unsupported, "cuPointerGetAttributes")
            .context("attribute", "RANGE_START_ADDR")
            .remedy("the driver must be of CUDA 10.2 or newer to say which range an address is in"))
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.contexts.driver
    }

    /// Queries the first `count` of `attributes` in one driver call. The call does not access the
    /// memory at the address.
    fn query<const N: usize>(
        &self,
        address: u64,
        mut attributes: [CuPointerAttribute; N],
        count: u32,
    ) -> Result<LookupAnswer<N>> {
        // Each element of `values` has the size of the widest attribute, and is zero. A narrower
        // value that the driver writes is read correctly (little-endian). If the driver writes no
        // value, the element has the documented null value.
        const { assert!(cfg!(target_endian = "little")) };
        let mut values = [0u64; N];
        let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: both arrays have at least `count` elements, and each pointer in `places` has room
        // for 8 bytes, the size of the widest attribute. The address is only looked up, never
        // dereferenced.
        let code = unsafe {
            (self.contexts.driver.functions.pointer_get_attributes)(
                count,
                attributes.as_mut_ptr(),
                places.as_mut_ptr(),
                address,
            )
        };
        match code {
            CuResult::CUDA_ERROR_INVALID_CONTEXT | CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                Ok(LookupAnswer::NoContext)
            }
            CuResult::CUDA_ERROR_INVALID_VALUE => Ok(LookupAnswer::Invalid),
            code => check(code, "cuPointerGetAttributes")
                .map(|()| LookupAnswer::Values(values))
                .map_err(|error| error.context("address", Address(address))),
        }
    }

    /// Queries the attributes of an address. If the driver needs a context and this thread has
    /// none, repeats the query in each existing primary context.
    ///
    /// According to `cuda.h`, INVALID_CONTEXT means that no context with unified addressing knows
    /// the address. On a thread without a current context, some drivers return the code for any
    /// address, even of device memory. Some drivers return it also if the thread's current context
    /// was destroyed.
    ///
    /// With such a driver, a thread without a context makes up to twelve calls for each device
    /// whose primary context the process has. The iface does not retain the context between
    /// queries, so that the application can destroy the context.
    fn query_anywhere<const N: usize>(
        &self,
        address: Address,
        attributes: [CuPointerAttribute; N],
        count: u32,
    ) -> Result<LookupAnswer<N>> {
        self.anywhere(
            || self.query(address.0, attributes, count),
            |answer| matches!(answer, Ok(LookupAnswer::NoContext)),
        )
    }

    /// Makes a call that some drivers answer only in a context. If `lacks_context` returns true for
    /// the result and this thread has no context, repeats the call in each existing primary
    /// context.
    fn anywhere<T>(
        &self,
        call: impl Fn() -> Result<T>,
        lacks_context: impl Fn(&Result<T>) -> bool,
    ) -> Result<T> {
        let mut result = call();
        if !lacks_context(&result) || self.contexts.current()?.is_some() {
            return result;
        }
        for entry in &self.contexts.driver.devices {
            let retained = self.contexts.retain_if_active(entry.description.id)?;
            let Some(primary) = retained else { continue };
            result = primary.run(&call);
            if !lacks_context(&result) {
                break;
            }
        }
        result
    }

    /// Makes driver calls about VMM memory. If the driver needs a context and this thread has none,
    /// repeats the calls in each existing primary context.
    pub(crate) fn in_any_context<T>(&self, calls: impl Fn() -> Result<T>) -> Result<T> {
        let codes =
            [CuResult::CUDA_ERROR_INVALID_CONTEXT, CuResult::CUDA_ERROR_CONTEXT_IS_DESTROYED];
        self.anywhere(calls, |result| {
            let code = result.as_ref().err().and_then(hmem_core::Error::driver);
            code.is_some_and(|driver| codes.iter().any(|code| i64::from(code.0) == driver.code))
        })
    }

    /// Returns the allocation that contains an address. Returns `None` in three cases:
    ///
    /// - CUDA does not know the address;
    /// - the driver needs a context, and neither the thread nor the process has one;
    /// - the address is page-locked memory that CUDA knows by another address only.
    ///
    /// # Errors
    /// - Driver if the driver refuses a query that it answered when the iface was opened.
    /// - Driver if the attributes contradict each other.
    /// - Otherwise the error of the driver.
    pub(crate) fn find(&self, address: Address) -> Result<Option<FoundAllocation>> {
        let known = self.known.load(Ordering::Acquire);
        let (count, unseen) = (known & !UNSEEN, known & UNSEEN != 0);
        match self.query_anywhere(address, ATTRIBUTES, count)? {
            LookupAnswer::Values(values) => {
                if unseen {
                    self.known.store(count, Ordering::Release);
                }
                self.describe(address, values)
            }
            LookupAnswer::NoContext => Ok(None),
            LookupAnswer::Invalid if unseen && count as usize == ATTRIBUTES.len() => {
                self.known.store((count - 1) | UNSEEN, Ordering::Release);
                self.find(address)
            }
            // INVALID_VALUE does not mean that the address is outside CUDA memory. `cuda.h` on this
            // call: it "will not return an error when the ptr encountered is not a valid CUDA
            // pointer", and `new` has checked that. If device memory were taken for host memory,
            // the CPU would write to it.
            LookupAnswer::Invalid => {
                let error = CUDA.error(ErrorKind::Driver, "cuPointerGetAttributes");
                Err(coded(error, CuResult::CUDA_ERROR_INVALID_VALUE)
                    .context(
                        "why",
                        "the driver refuses a query that it answered when the iface was opened",
                    )
                    .context("address", address))
            }
        }
    }

    fn describe(
        &self,
        address: Address,
        values: [u64; ATTRIBUTES.len()],
    ) -> Result<Option<FoundAllocation>> {
        let [memory_type, start, len, ordinal, buffer, managed, context, legacy, pool] = values;
        let context = CuContext(context as usize);
        let mut kind = match memory_type as u32 {
            0 => return Ok(None),
            _ if managed != 0 => AllocationKind::Managed,
            sys::CU_MEMORYTYPE_HOST => AllocationKind::Host,
            sys::CU_MEMORYTYPE_DEVICE if pool != 0 => AllocationKind::StreamOrdered,
            sys::CU_MEMORYTYPE_DEVICE if context.is_null() => AllocationKind::Virtual,
            // No document says that VMM memory has no context. Memory with a legacy IPC handle was
            // "created with cuMemAlloc", so `has_handle` queries only memory without one.
            sys::CU_MEMORYTYPE_DEVICE
                if legacy == 0
                    && !self.contexts.allocations.is_imported(Address(start))
                    && self.has_handle(address)? =>
            {
                AllocationKind::Virtual
            }
            sys::CU_MEMORYTYPE_DEVICE => AllocationKind::Device,
            other => return Err(inconsistent(address).context("memory_type", other)),
        };
        let range = AddressRange::new(Address(start), len)?;
        if !range.contains(address) {
            // The driver may know memory that the application page-locked under the device's alias
            // address only. The CPU and NICs access that memory as system memory.
            if kind == AllocationKind::Host {
                tracing::debug!(%address, %range, "page-locked memory without a range of its own \
                                                   is handled as system memory");
                return Ok(None);
            }
            return Err(inconsistent(address).context("range", range));
        }
        match kind {
            AllocationKind::Host
                if self.is_page_locked(AllocationId(buffer), range, context)? =>
            {
                kind = AllocationKind::HostRegistered;
            }
            AllocationKind::Device if self.contexts.allocations.is_imported(range.start()) => {
                kind = AllocationKind::Imported
            }
            _ => {}
        }
        // Host memory belongs to no device, and managed memory to several. A negative ordinal means
        // no device.
        let device = match kind {
            AllocationKind::Host | AllocationKind::HostRegistered | AllocationKind::Managed => None,
            _ => u32::try_from(ordinal as i32).ok().map(DeviceId),
        };
        // The context of a reservation does not determine when its physical memory is freed.
        let context = if kind == AllocationKind::Virtual { CuContext::NULL } else { context };
        let id = AllocationId(buffer);
        let token = context.0 as u64;
        let allocation = Allocation { iface: IfaceKind::CUDA, range, device, kind, id, token };
        Ok(Some(FoundAllocation { allocation, context }))
    }

    /// Returns true if the memory at an address is VMM memory: the driver returns a handle for
    /// memory that `cuMemMap` mapped, and for no other memory.
    ///
    /// Returns true also if the driver lacks the call `cuMemRetainAllocationHandle`. Any memory can
    /// be treated as VMM memory: the iface exports it one mapping at a time, and caches a
    /// registration only if the memory has a handle.
    fn has_handle(&self, address: Address) -> Result<bool> {
        let functions = &self.contexts.driver.functions;
        if functions.mem_retain_allocation_handle.is_none() || functions.mem_release.is_none() {
            return Ok(true);
        }
        Ok(with_handle(functions, address, |_| Ok(()))?.is_some())
    }

    /// Returns true if the application page-locked the memory, and false if CUDA allocated it.
    /// Queries the driver only if neither [`HostKinds`] nor the iface's table has the answer.
    fn is_page_locked(
        &self,
        id: AllocationId,
        range: AddressRange,
        context: CuContext,
    ) -> Result<bool> {
        if let Some(known) = self.host_kinds.get(id) {
            return Ok(known);
        }
        let locked = match self.contexts.allocations.is_page_locked(range.start()) {
            Some(locked) => locked,
            None => self.query_page_locked(range, context)?,
        };
        self.host_kinds.keep(id, locked);
        Ok(locked)
    }

    /// Queries the driver whether the application page-locked the memory. `cuda.h`:
    /// `cuMemHostGetFlags` fails for memory that `cuMemHostAlloc` did not allocate.
    fn query_page_locked(&self, range: AddressRange, context: CuContext) -> Result<bool> {
        let functions = &self.contexts.driver.functions;
        let query = || {
            let mut flags = 0;
            // SAFETY: `flags` is writable; the address is only looked up, never dereferenced.
            let code = unsafe {
                (functions.mem_host_get_flags)(&mut flags, range.start().0 as *mut c_void)
            };
            match code {
                CuResult::CUDA_ERROR_INVALID_VALUE => Ok(true),
                code => check(code, "cuMemHostGetFlags")
                    .map(|()| false)
                    .map_err(|error| error.context("range", range)),
            }
        };
        if context.is_null() { query() } else { with_context(functions, context, query) }
    }

    /// Returns an allocation that [`Self::find`] returned before, with its context. Returns `None`
    /// if the context may have been destroyed, and the allocation with it.
    ///
    /// The field `token` of `of` holds the context, but the caller may have set the field to any
    /// number, and a destroyed context must not be passed to the driver. So this method accepts a
    /// context that is null, retained by the iface or current on this thread. Any other context is
    /// accepted only if the driver returns that context for the memory at `address`.
    pub(crate) fn if_live(
        &self,
        of: &Allocation,
        address: Address,
    ) -> Result<Option<FoundAllocation>> {
        let found = FoundAllocation { allocation: *of, context: CuContext(of.token as usize) };
        let context = found.context;
        let is_live = context.is_null()
            || self.contexts.keeps(context, found.device())
            || self.contexts.current()?.is_some_and(|(current, _)| current == context)
            || self.liveness(address, of.id, context)? == Liveness::Alive;
        Ok(is_live.then_some(found))
    }

    /// Returns the identity of the memory that is now at `address`, or `None` if the driver returns
    /// none.
    pub(crate) fn identity(&self, address: Address) -> Result<Option<AllocationId>> {
        const IDENTITY: [CuPointerAttribute; 2] =
            [sys::CU_POINTER_ATTRIBUTE_BUFFER_ID, sys::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
        match self.query_anywhere(address, IDENTITY, IDENTITY.len() as u32)? {
            LookupAnswer::Values([id, memory_type]) if memory_type != 0 => {
                Ok(Some(AllocationId(id)))
            }
            _ => Ok(None),
        }
    }

    /// Returns whether the memory of this identity and context is still at `address`. Memory
    /// without a context is compared by its identity only.
    pub(crate) fn liveness(
        &self,
        address: Address,
        id: AllocationId,
        context: CuContext,
    ) -> Result<Liveness> {
        const IDENTITY: [CuPointerAttribute; 2] =
            [sys::CU_POINTER_ATTRIBUTE_BUFFER_ID, sys::CU_POINTER_ATTRIBUTE_CONTEXT];
        Ok(match self.query_anywhere(address, IDENTITY, IDENTITY.len() as u32)? {
            LookupAnswer::Values([found, of])
                if found == id.0 && (context.is_null() || of == context.0 as u64) =>
            {
                Liveness::Alive
            }
            LookupAnswer::Values(_) | LookupAnswer::Invalid => Liveness::Dead,
            LookupAnswer::NoContext => Liveness::Unknown,
        })
    }

    /// Returns the context in which the memory at an address was allocated or page-locked. Returns
    /// null if the driver returns no context.
    pub(crate) fn context_of(&self, address: Address) -> Result<CuContext> {
        let context = self.attribute(address, sys::CU_POINTER_ATTRIBUTE_CONTEXT)?;
        Ok(context.map_or(CuContext::NULL, |context| CuContext(context as usize)))
    }

    /// Returns an attribute of the memory at an address. Returns `None` if the driver does not know
    /// the attribute or the address, or needs a context and none exists.
    pub(crate) fn attribute(
        &self,
        address: Address,
        attribute: CuPointerAttribute,
    ) -> Result<Option<u64>> {
        match self.query_anywhere(address, [attribute], 1)? {
            LookupAnswer::Values([value]) => Ok(Some(value)),
            LookupAnswer::NoContext | LookupAnswer::Invalid => Ok(None),
        }
    }
}

/// Returns the error for an address that has contradictory attributes.
pub(crate) fn inconsistent(address: Address) -> Error {
    CUDA.error(ErrorKind::Driver, "query")
        .context(
            "why",
            "the driver's attributes do not describe an allocation that holds the address",
        )
        .context("address", address)
}
