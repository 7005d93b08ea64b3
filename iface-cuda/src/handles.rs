//! Handles of physical memory (`cuMemCreate`), and the mappings that an application makes of it
//! (`cuMemMap`).

#![allow(unsafe_code, reason = "calls the driver on handles of physical memory")]

use std::ffi::c_void;

use hmem_core::{Address, AddressRange, ErrorKind, ProcessMark, Result};
use hmem_iface_kit::log_failure;

use crate::{
    error::{CUDA, check, coded, lacks_symbol},
    sys::{self, CuDevicePtr, CuMemAllocationProp, CuMemHandle, CuResult, Functions},
};

/// A reference to the physical memory that is mapped at an address. Dropping the value releases the
/// reference.
///
/// The driver reuses the number of a handle only after the last reference was released and the last
/// mapping was removed. So while this value exists, the physical memory stays allocated, and a
/// handle with an equal number is the same memory.
#[derive(Debug)]
pub(crate) struct RetainedHandle {
    handle: CuMemHandle,
    release: unsafe extern "C" fn(CuMemHandle) -> CuResult,
    /// The process that retained the handle. A forked child must not release the handle.
    owner: ProcessMark,
}

impl RetainedHandle {
    /// Retains the handle of the physical memory that is mapped at an address. Returns `None` if no
    /// memory is mapped there by `cuMemMap`, or the driver has no handles.
    ///
    /// `cuda.h` on `cuMemRetainAllocationHandle`: "The handle is guaranteed to be the same handle
    /// value used to map the memory", and "If the address requested is not mapped, the function
    /// will fail".
    pub(crate) fn of(functions: &Functions, address: Address) -> Result<Option<Self>> {
        let (Some(retain), Some(release)) =
            (functions.mem_retain_allocation_handle, functions.mem_release)
        else {
            return Ok(None);
        };
        let owner = ProcessMark::current()?;
        let mut handle = 0;
        // SAFETY: `handle` is writable; the address is only looked up, never dereferenced.
        match unsafe { retain(&mut handle, address.0 as *mut c_void) } {
            CuResult::CUDA_ERROR_INVALID_VALUE | CuResult::CUDA_ERROR_NOT_SUPPORTED => Ok(None),
            code => check(code, "cuMemRetainAllocationHandle")
                .map(|()| Some(Self { handle, release, owner })),
        }
    }

    /// Returns the handle, which stays valid until this value is dropped.
    pub(crate) fn handle(&self) -> CuMemHandle {
        self.handle
    }

    /// Releases the reference.
    pub(crate) fn release(self) -> Result<()> {
        let this = std::mem::ManuallyDrop::new(self);
        this.release_once()
    }

    /// Releases the reference. The caller must not call this method again.
    fn release_once(&self) -> Result<()> {
        if !self.owner.is_current() {
            return Ok(());
        }
        // SAFETY: `of` retained the handle in this process. Only `release`, which suppresses the
        // drop, and the drop call this method, so that the reference is released once.
        check(unsafe { (self.release)(self.handle) }, "cuMemRelease")
    }
}

impl Drop for RetainedHandle {
    fn drop(&mut self) {
        log_failure!(
            error,
            self.release_once(),
            handle = self.handle,
            "cannot release a handle: its physical memory stays allocated"
        );
    }
}

/// Calls `with` with the handle of the VMM memory at an address, and releases the handle. Returns
/// `None` if no VMM memory is there, or the driver has no handles.
pub(crate) fn with_handle<T>(
    functions: &Functions,
    address: Address,
    with: impl FnOnce(CuMemHandle) -> Result<T>,
) -> Result<Option<T>> {
    let Some(retained) = RetainedHandle::of(functions, address)? else { return Ok(None) };
    let result = with(retained.handle());
    retained.release()?;
    result.map(Some)
}

/// Returns the mapping that contains an address of reserved memory. Calls `cuMemGetAddressRange`,
/// because the attribute RANGE_SIZE is the size of the whole reservation.
///
/// # Errors
/// - OutOfBounds if no memory is mapped at the address.
/// - Otherwise the driver's error.
pub(crate) fn mapping_at(functions: &Functions, address: Address) -> Result<AddressRange> {
    let (mut base, mut size): (CuDevicePtr, usize) = (0, 0);
    // SAFETY: `base` and `size` are writable.
    match unsafe { (functions.mem_get_address_range)(&mut base, &mut size, address.0) } {
        code @ (CuResult::CUDA_ERROR_INVALID_VALUE | CuResult::CUDA_ERROR_NOT_FOUND) => {
            let error = CUDA.error(ErrorKind::OutOfBounds, "cuMemGetAddressRange_v2");
            Err(coded(error, code).context("address", address).remedy(
                "no memory is mapped there (cuMemMap): map it, or register the mapped parts",
            ))
        }
        code => check(code, "cuMemGetAddressRange_v2")
            .and_then(|()| AddressRange::new(Address(base), size as u64)),
    }
}

/// Returns the granularity of physical memory with these properties: the length and the addresses
/// of every mapping are multiples of it.
///
/// # Errors
/// - Unsupported if the driver has no VMM memory.
/// - Otherwise the driver's error.
pub(crate) fn granularity(
    functions: &Functions,
    properties: &CuMemAllocationProp,
) -> Result<usize> {
    const CALL: &str = "cuMemGetAllocationGranularity";
    let Some(query) = functions.mem_get_allocation_granularity else {
        return Err(lacks_symbol("virtual memory", CALL));
    };
    let mut step = 0;
    let option = sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: `step` is writable, and the properties are complete.
    check(unsafe { query(&mut step, properties, option) }, CALL).map(|()| step.max(1))
}
