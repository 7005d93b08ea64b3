//! UCX as a peer to measure against, in the same process and the same run: its registration cache with a registration
//! that does nothing, and its lookup of memory types.
//!
//! The library is loaded at run time; a machine without it gets the reason. It is not asked to watch memory (no
//! `ucm_events`, no hooks unless the environment asks for them), because its hooks and ours would patch the same
//! functions: what that saves is its own.

mod sys;

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use self::sys::{Functions, ucs_memory_info_t, ucs_rcache_ops_t, ucs_rcache_params_t};
use self::sys::{ucs_rcache_region_t, ucs_rcache_t, ucs_status_t};

/// The loaded library. Copies refer to the same one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ucx {
    functions: &'static Functions,
}

/// Counts in the context. UCX holds its lock meanwhile.
extern "C" fn register(
    context: *mut c_void,
    _: *mut ucs_rcache_t,
    _: *mut c_void,
    _: *mut ucs_rcache_region_t,
    _: u16,
) -> ucs_status_t {
    // SAFETY: the context is the counter that `UcxCache` owns, and frees after UCX's cache.
    let registrations = unsafe { &*context.cast::<AtomicU64>() };
    registrations.store(registrations.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    sys::UCS_OK
}

extern "C" fn deregister(_: *mut c_void, _: *mut ucs_rcache_t, _: *mut ucs_rcache_region_t) {}

extern "C" fn describe(
    _: *mut c_void,
    _: *mut ucs_rcache_t,
    _: *mut ucs_rcache_region_t,
    text: *mut c_char,
    room: usize,
) {
    if room > 0 {
        // SAFETY: UCX gives `room` writable bytes.
        unsafe { text.write(0) };
    }
}

static OPERATIONS: ucs_rcache_ops_t =
    ucs_rcache_ops_t { mem_reg: register, mem_dereg: deregister, dump_region: describe };

impl Ucx {
    /// Loads it.
    ///
    /// # Errors
    /// Why it cannot be used, in one line.
    pub(super) fn load() -> Result<Self, String> {
        Functions::load().map(|functions| Self { functions })
    }

    /// A registration cache for at most `max_regions`.
    ///
    /// # Errors
    /// What UCX said.
    pub(super) fn cache(self, max_regions: usize) -> Result<UcxCache, String> {
        let registrations = Box::new(AtomicU64::new(0));
        let parameters = ucs_rcache_params_t {
            region_struct_size: size_of::<ucs_rcache_region_t>(),
            alignment: sys::MIN_ALIGNMENT,
            max_alignment: sys::MIN_ALIGNMENT,
            ucm_events: 0,
            ucm_event_priority: 0,
            ops: &OPERATIONS,
            context: ptr::from_ref(&*registrations).cast_mut().cast(),
            // With UCS_RCACHE_FLAG_NO_PFN_CHECK, 1.13 never looks at the limits. Page frames are compared only where
            // UCX_RCACHE_CHECK_PFN asks for it.
            flags: 0,
            max_regions: max_regions as _,
            max_size: usize::MAX,
            max_unreleased: usize::MAX,
        };
        let mut cache = ptr::null_mut();
        // SAFETY: the parameters are complete and read during the call only, but for the operations, which are static.
        let status = unsafe {
            (self.functions.ucs_rcache_create)(
                &parameters,
                c"bench".as_ptr(),
                ptr::null_mut(),
                &mut cache,
            )
        };
        if status != sys::UCS_OK {
            return Err(format!("ucs_rcache_create: {}", self.functions.status(status)));
        }
        Ok(UcxCache { functions: self.functions, cache, registrations })
    }

    /// The process's table of device memory.
    pub(super) fn memory_types(self) -> MemoryTypes {
        // SAFETY: no arguments; UCX makes its one table, once.
        unsafe { (self.functions.ucs_memtype_cache_global_init)() };
        let types = MemoryTypes { functions: self.functions, known: Vec::new() };
        // The first lookup makes the table; what is added before is lost.
        types.is_device(0);
        types
    }
}

/// A registration cache whose registrations do nothing.
#[derive(Debug)]
pub(super) struct UcxCache {
    functions: &'static Functions,
    cache: *mut ucs_rcache_t,
    registrations: Box<AtomicU64>,
}

// SAFETY: "This data structure is thread safe" (`ucs/memory/rcache.h`).
unsafe impl Send for UcxCache {}
// SAFETY: as above.
unsafe impl Sync for UcxCache {}

impl UcxCache {
    /// Registrations so far.
    pub(super) fn registrations(&self) -> u64 {
        self.registrations.load(Ordering::Relaxed)
    }

    /// Gets the region of a range for reading and writing, and puts it back.
    #[inline]
    pub(super) fn get_put(&self, address: u64, len: u64) {
        let mut region = ptr::null_mut();
        // SAFETY: the cache is live; UCX does not touch the memory of the range, and gives a region that is put back below.
        let status = unsafe {
            (self.functions.ucs_rcache_get)(
                self.cache,
                ptr::without_provenance_mut(address as usize),
                len as usize,
                sys::PROT_READ | sys::PROT_WRITE,
                ptr::null_mut(),
                &mut region,
            )
        };
        assert_eq!(status, sys::UCS_OK, "ucs_rcache_get: {}", self.functions.status(status));
        // SAFETY: the region was got above and is not used any more.
        unsafe { (self.functions.ucs_rcache_region_put)(self.cache, region) };
    }
}

impl Drop for UcxCache {
    fn drop(&mut self) {
        // SAFETY: every region was put back by `get_put`, and nobody else has the cache.
        unsafe { (self.functions.ucs_rcache_destroy)(self.cache) };
    }
}

/// UCX's table of device memory, of which a process has one.
#[derive(Debug)]
pub(super) struct MemoryTypes {
    functions: &'static Functions,
    known: Vec<(u64, u64)>,
}

impl MemoryTypes {
    /// Says that a range is CUDA memory.
    pub(super) fn add_device(&mut self, address: u64, len: u64) {
        let (kind, device): (c_int, u8) =
            (sys::UCS_MEMORY_TYPE_CUDA, sys::UCS_SYS_DEVICE_ID_UNKNOWN);
        // SAFETY: the table keeps the numbers and touches no memory.
        unsafe {
            (self.functions.ucs_memtype_cache_update)(pointer(address), len as usize, kind, device)
        };
        self.known.push((address, len));
    }

    /// Whether the address is device memory.
    #[inline]
    pub(super) fn is_device(&self, address: u64) -> bool {
        let mut found = ucs_memory_info_t {
            memory_type: 0,
            sys_dev: 0,
            base_address: ptr::null_mut(),
            alloc_length: 0,
        };
        // SAFETY: `found` is an exclusive borrow for the call.
        let status =
            unsafe { (self.functions.ucs_memtype_cache_lookup)(pointer(address), 1, &mut found) };
        status == sys::UCS_OK && found.memory_type == sys::UCS_MEMORY_TYPE_CUDA
    }
}

impl Drop for MemoryTypes {
    fn drop(&mut self) {
        for &(address, len) in &self.known {
            // SAFETY: as in `add_device`.
            unsafe { (self.functions.ucs_memtype_cache_remove)(pointer(address), len as usize) };
        }
    }
}

fn pointer(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}
