//! UCX as a peer: its registration cache, with a registration that does nothing, and its table of
//! memory types.
//!
//! A process loads one UCX at most, because two copies of `libucs` would patch and configure the
//! same process. UCX's caches watch no memory here (no `ucm_events`), because UCX's hooks and ours
//! would patch the same functions. That saves UCX the work of watching.

mod sys;

use std::{
    ffi::{c_char, c_int, c_void},
    path::Path,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use self::sys::{Functions, Release, v1_13, v1_22};
use self::sys::{ucs_memory_info_t, ucs_rcache_region_t, ucs_rcache_t, ucs_status_t};

/// The loaded library. Copies refer to the same one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ucx {
    functions: &'static Functions,
}

/// Calls that UCX made to register and deregister.
#[derive(Debug, Default)]
struct Calls {
    registrations: AtomicU64,
    deregistrations: AtomicU64,
    /// First and last address of the region registered last.
    start: AtomicU64,
    end: AtomicU64,
}

/// Increments a counter without a locked instruction. UCX holds the cache's write lock during both
/// callbacks when it registers and evicts.
fn count(calls: &AtomicU64) {
    calls.store(calls.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

extern "C" fn register(
    context: *mut c_void,
    _: *mut ucs_rcache_t,
    _: *mut c_void,
    region: *mut ucs_rcache_region_t,
    _: u16,
) -> ucs_status_t {
    // SAFETY: the context is the `Calls` that `UcxCache` owns and frees after UCX's cache.
    let calls = unsafe { &*context.cast::<Calls>() };
    // SAFETY: UCX passes a region that it has allocated and filled in.
    let region = unsafe { &*region };
    count(&calls.registrations);
    calls.start.store(region.start, Ordering::Relaxed);
    calls.end.store(region.end, Ordering::Relaxed);
    sys::UCS_OK
}

extern "C" fn deregister(context: *mut c_void, _: *mut ucs_rcache_t, _: *mut ucs_rcache_region_t) {
    // SAFETY: the context is the `Calls` that `UcxCache` owns and frees after UCX's cache.
    count(unsafe { &(*context.cast::<Calls>()).deregistrations });
}

extern "C" fn merge(
    _: *mut c_void,
    _: *mut ucs_rcache_t,
    _: *mut c_void,
    _: *mut ucs_rcache_region_t,
) {
}

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

static OPERATIONS_1_13: v1_13::ucs_rcache_ops_t =
    v1_13::ucs_rcache_ops_t { mem_reg: register, mem_dereg: deregister, dump_region: describe };
static OPERATIONS_1_22: v1_22::ucs_rcache_ops_t = v1_22::ucs_rcache_ops_t {
    mem_reg: register,
    mem_dereg: deregister,
    merge,
    dump_region: describe,
};

impl Ucx {
    /// Loads UCX from a folder, or from where the system's loader finds it, and tries its cache.
    ///
    /// # Errors
    /// One line that says why this UCX cannot be used.
    pub(super) fn load(folder: Option<&Path>) -> Result<Self, String> {
        let ucx = Functions::load(folder).map(|functions| Self { functions })?;
        ucx.probe().map_err(|why| format!("{}: {why}", ucx.name()))?;
        Ok(ucx)
    }

    /// `UCX 1.22`.
    pub(super) fn name(self) -> &'static str {
        &self.functions.name
    }

    /// Checks that the declared struct layouts fit the loaded UCX, with a test cache of two
    /// regions.
    fn probe(self) -> Result<(), String> {
        const LEN: u64 = 4096;
        let cache = self.cache(Some(2))?;
        let [a, b, c] = [1, 3, 5].map(|page| page * LEN);
        // Each range, registrations and evictions after it.
        let steps = [
            (a, 1, 0),
            (a, 1, 0),
            (b, 2, 0),
            (c, 3, 1),
            (b, 3, 1),
            (c, 3, 1),
            (a, 4, 2),
            (c, 4, 2),
        ];
        for (step, (address, registrations, evictions)) in steps.into_iter().enumerate() {
            let before = cache.registrations();
            cache.get_put([address], LEN);
            let calls = &cache.calls;
            let region = [&calls.start, &calls.end].map(|end| end.load(Ordering::Relaxed));
            let seen = (cache.registrations(), calls.deregistrations.load(Ordering::Relaxed));
            if seen != (registrations, evictions)
                || (before != registrations && region != [address, address + LEN])
            {
                return Err(format!(
                    "its cache is not as its headers say: after step {step} it has registered and \
                     evicted {seen:?} regions and not {:?}, the last at {region:x?}",
                    (registrations, evictions)
                ));
            }
        }
        Ok(())
    }

    /// Creates a registration cache for at most `max_regions`.
    ///
    /// Without a limit, 1.22 keeps no list of recent use, which is its default and its fastest
    /// form. With a limit it leaves that list without a lock of its own
    /// (`UCS_RCACHE_FLAG_NEED_LRU_LOCK`): one thread at a time may use the cache.
    ///
    /// # Errors
    /// UCX's status, in one line.
    pub(super) fn cache(self, max_regions: Option<u64>) -> Result<UcxCache, String> {
        let calls = Box::new(Calls::default());
        let context = ptr::from_ref(&*calls).cast_mut().cast();
        let max_regions = max_regions.unwrap_or(sys::NO_LIMIT as u64);
        // With UCS_RCACHE_FLAG_NO_PFN_CHECK, neither release compares its limits. Page frames are
        // looked at only if UCX_RCACHE_CHECK_PFN asks for it.
        let flags = 0;
        let of_1_13 = v1_13::ucs_rcache_params_t {
            region_struct_size: v1_13::REGION_SIZE,
            alignment: sys::MIN_ALIGNMENT,
            max_alignment: sys::MIN_ALIGNMENT,
            ucm_events: 0,
            ucm_event_priority: 0,
            ops: &OPERATIONS_1_13,
            context,
            flags,
            max_regions,
            max_size: sys::NO_LIMIT,
            max_unreleased: sys::NO_LIMIT,
        };
        let of_1_22 = v1_22::ucs_rcache_params_t {
            region_struct_size: v1_22::REGION_SIZE,
            ucm_events: 0,
            ucm_event_priority: 0,
            ops: &OPERATIONS_1_22,
            context,
            flags,
            max_regions,
            max_size: sys::NO_LIMIT,
            max_unreleased: sys::NO_LIMIT,
        };
        let parameters: *const c_void = match self.functions.release {
            Release::V1_13 { .. } => ptr::from_ref(&of_1_13).cast(),
            Release::V1_22 { .. } => ptr::from_ref(&of_1_22).cast(),
        };
        let mut cache = ptr::null_mut();
        // SAFETY: the parameters are those of the release, and UCX copies them. Their operations
        // are static, and `UcxCache` frees the context after UCX's cache.
        let status = unsafe {
            (self.functions.ucs_rcache_create)(
                parameters,
                c"bench".as_ptr(),
                ptr::null_mut(),
                &mut cache,
            )
        };
        if status != sys::UCS_OK {
            return Err(format!("ucs_rcache_create: {}", self.functions.status(status)));
        }
        Ok(UcxCache { functions: self.functions, cache, calls })
    }

    /// Returns UCX's table of the process's device memory.
    pub(super) fn memory_types(self) -> MemoryTypes {
        // SAFETY: it has no arguments, and nobody uses the table yet.
        unsafe { (self.functions.ucs_memtype_cache_global_init)() };
        let types = MemoryTypes { functions: self.functions, known: Vec::new() };
        // The first lookup makes the table. UCX drops ranges that are added before.
        types.is_device(0);
        types
    }
}

/// A registration cache whose registrations do nothing.
#[derive(Debug)]
pub(super) struct UcxCache {
    functions: &'static Functions,
    cache: *mut ucs_rcache_t,
    calls: Box<Calls>,
}

// SAFETY: UCX's cache belongs to no thread: its state is on the heap.
unsafe impl Send for UcxCache {}
// SAFETY: "This data structure is thread safe" (`ucs/memory/rcache.h`). The bench keeps a limited
// cache of 1.22, which is not, to one thread.
unsafe impl Sync for UcxCache {}

impl UcxCache {
    /// Returns the number of registrations so far.
    pub(super) fn registrations(&self) -> u64 {
        self.calls.registrations.load(Ordering::Relaxed)
    }

    /// Gets the region of each range for reading and writing, and puts it back.
    ///
    /// Each release has a loop of its own, so that no call pays for the choice.
    #[inline]
    pub(super) fn get_put(&self, addresses: impl IntoIterator<Item = u64>, len: u64) {
        let (cache, len) = (self.cache, len as usize);
        let (prot, arg) = (sys::PROT_READ | sys::PROT_WRITE, ptr::null_mut());
        match self.functions.release {
            Release::V1_13 { ucs_rcache_get, .. } => self.each(addresses, |at, region| {
                // SAFETY: the cache is live, UCX touches no memory of the range, and `region` is an
                // exclusive borrow for the call.
                unsafe { ucs_rcache_get(cache, at, len, prot, arg, region) }
            }),
            Release::V1_22 { ucs_rcache_get, .. } => self.each(addresses, |at, region| {
                // SAFETY: the cache is live, UCX touches no memory of the range, and `region` is an
                // exclusive borrow for the call.
                unsafe { ucs_rcache_get(cache, at, len, sys::MIN_ALIGNMENT, prot, arg, region) }
            }),
        }
    }

    #[inline]
    fn each(
        &self,
        addresses: impl IntoIterator<Item = u64>,
        get: impl Fn(*mut c_void, &mut *mut ucs_rcache_region_t) -> ucs_status_t,
    ) {
        for address in addresses {
            let mut region = ptr::null_mut();
            let status = get(ptr::without_provenance_mut(address as usize), &mut region);
            assert_eq!(status, sys::UCS_OK, "ucs_rcache_get: {}", self.functions.status(status));
            // SAFETY: `get` got the region from this cache, and nobody uses it any more.
            unsafe { (self.functions.ucs_rcache_region_put)(self.cache, region) };
        }
    }
}

impl Drop for UcxCache {
    fn drop(&mut self) {
        // SAFETY: `each` put every region back, and nobody else has the cache.
        unsafe { (self.functions.ucs_rcache_destroy)(self.cache) };
        let [registered, deregistered] = [&self.calls.registrations, &self.calls.deregistrations]
            .map(|calls| calls.load(Ordering::Relaxed));
        assert_eq!(registered, deregistered, "UCX left regions registered");
    }
}

/// UCX's table of device memory, of which a process has one.
#[derive(Debug)]
pub(super) struct MemoryTypes {
    functions: &'static Functions,
    known: Vec<(u64, u64)>,
}

impl MemoryTypes {
    /// Adds a range of CUDA memory.
    pub(super) fn add_device(&mut self, address: u64, len: u64) {
        let (at, bytes) = (pointer(address), len as usize);
        let (kind, device) = (sys::UCS_MEMORY_TYPE_CUDA, sys::UCS_SYS_DEVICE_ID_UNKNOWN);
        match self.functions.release {
            Release::V1_13 { ucs_memtype_cache_update, .. } => {
                // SAFETY: the table keeps the numbers and touches no memory.
                unsafe { ucs_memtype_cache_update(at, bytes, kind, device) };
            }
            Release::V1_22 { ucs_memtype_cache_update, .. } => {
                let flags = sys::UCS_MEM_FLAG_REGISTRABLE;
                // SAFETY: the table keeps the numbers and touches no memory.
                unsafe { ucs_memtype_cache_update(at, bytes, kind, device, flags) };
            }
        }
        self.known.push((address, len));
    }

    /// Returns whether the address is device memory.
    #[inline]
    pub(super) fn is_device(&self, address: u64) -> bool {
        const UNSET: c_int = 0;
        let mut found = ucs_memory_info_t {
            memory_type: UNSET,
            sys_dev: 0,
            base_address: ptr::null_mut(),
            alloc_length: 0,
            mem_flags: 0,
        };
        // SAFETY: `found` is an exclusive borrow for the call, and as large as the larger of the
        // two releases' structures.
        let status =
            unsafe { (self.functions.ucs_memtype_cache_lookup)(pointer(address), 1, &mut found) };
        status == sys::UCS_OK && found.memory_type == sys::UCS_MEMORY_TYPE_CUDA
    }
}

impl Drop for MemoryTypes {
    fn drop(&mut self) {
        for &(address, len) in &self.known {
            // SAFETY: the table forgets the numbers and touches no memory.
            unsafe { (self.functions.ucs_memtype_cache_remove)(pointer(address), len as usize) };
        }
    }
}

fn pointer(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}
