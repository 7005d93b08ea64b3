//! Page-locking of the application's own memory.

#![allow(unsafe_code, reason = "calls the driver to page-lock host memory")]

use std::{ffi::c_void, sync::Arc};

use hmem_core::{AddressRange, Error, ErrorKind, IfaceKind, Result, iface::HostRegistrar};

use crate::{
    context::WorkContext,
    error::check,
    lookup::PointerLookup,
    sys::{self, CuResult},
    table::PageLockedRange,
};

/// Page-locks the application's own memory.
#[derive(Debug)]
pub(crate) struct PageLocker {
    pub(crate) lookup: Arc<PointerLookup>,
}

impl HostRegistrar for PageLocker {
    unsafe fn register(&self, range: AddressRange) -> Result<()> {
        if range.is_empty() {
            return Err(Error::new(ErrorKind::ZeroLength, "host_register").iface(IfaceKind::CUDA));
        }
        let functions = &self.lookup.driver().functions;
        let work_context = self.lookup.contexts.work_context_for_host()?;
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let register = || {
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
            let len = range.len() as usize;
            // SAFETY: the caller of `HostRegistrar::register` keeps the range mapped.
            let code = unsafe { (functions.mem_host_register)(pointer, len, flags) };
            check(code, "cuMemHostRegister_v2")
        };
        let undo = |()| {
            // SAFETY: `cuMemHostRegister_v2` above registered the range.
            check(unsafe { (functions.mem_host_unregister)(pointer) }, "cuMemHostUnregister")
        };
        let locked = work_context
            .with_context_or_undo(register, undo)
            .map_err(|error| error.context("range", range));
        if locked.is_ok() {
            work_context.keep();
            let device = work_context.primary_of();
            self.lookup.contexts.allocations.insert_page_locked(PageLockedRange { range, device });
        }
        work_context.end(locked)
    }

    fn unregister(&self, range: AddressRange) -> Result<()> {
        let Some(locked) = self.lookup.contexts.allocations.take_page_locked(range) else {
            return Err(Error::new(ErrorKind::InvalidArgument, "host_unregister")
                .iface(IfaceKind::CUDA)
                .context("range", range)
                .remedy("unregister exactly the range that was registered, once"));
        };
        let pointer = std::ptr::with_exposed_provenance_mut::<c_void>(range.start().0 as usize);
        let mut unlocked = false;
        let result = self.context_of(locked).and_then(|work_context| {
            work_context.run(|| {
                // SAFETY: this driver registered the range. Only the thread that removed the
                // table's entry unregisters the range.
                let code = unsafe { (self.lookup.driver().functions.mem_host_unregister)(pointer) };
                let ended = if code == CuResult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED {
                    tracing::debug!(%range, "the driver ended the page-locking with its context");
                    Ok(())
                } else {
                    check(code, "cuMemHostUnregister")
                };
                ended.inspect(|()| unlocked = true)
            })
        });
        if !unlocked {
            self.lookup.contexts.allocations.insert_page_locked(locked);
        }
        result.map_err(|error| error.context("range", range))
    }
}

impl PageLocker {
    /// Returns the context in which a range was page-locked. If the application has destroyed that
    /// context, returns another one.
    fn context_of(&self, locked: PageLockedRange) -> Result<WorkContext<'_>> {
        if let Some(device) = locked.device {
            return self.lookup.contexts.retain(device);
        }
        let context = self.lookup.context_of(locked.range.start())?;
        if context.is_null() {
            self.lookup.contexts.work_context_for_host()
        } else {
            Ok(WorkContext::borrowed(&self.lookup.driver().functions, context))
        }
    }
}
