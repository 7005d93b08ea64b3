//! UCX's registration cache and its table of memory types, as measured for comparison. The
//! registrations in UCX's cache do nothing.
//!
//! A process loads at most one UCX, because two copies of `libucs` would both patch the C library
//! and configure the process. UCX's caches watch no memory here (`ucm_events` is 0), because UCX's
//! hooks and hmem's hooks patch the same functions. So UCX's times do not include the work of
//! watching.

mod sys;

use std::{
    ffi::{c_char, c_int, c_void},
    path::Path,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use self::sys::{Functions, Release, v1_13, v1_22};
use self::sys::{ucs_memory_info_t, ucs_rcache_region_t, ucs_rcache_t, ucs_status_t};

/// A loaded UCX. Copies refer to the same library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ucx {
    functions: &'static Functions,
}

/// State of the callbacks by which UCX registers and deregisters: how often UCX called them, and
/// the last registered range.
#[derive(Debug, Default)]
struct CallbackState {
    registrations: AtomicU64,
    deregistrations: AtomicU64,
    /// Start of the most recently registered range.
    start: AtomicU64,
    /// End of that range, exclusive.
    end: AtomicU64,
}

/// Increments a counter without an atomic read-modify-write. UCX holds the cache's write lock
/// during the callbacks that count, so they do not run at the same time.
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
    // SAFETY: the context is the `CallbackState` that `UcxCache` owns and frees after UCX's cache.
    let calls = unsafe { &*context.cast::<CallbackState>() };
    // SAFETY: UCX passes a region that it has allocated and filled in.
    let region = unsafe { &*region };
    count(&calls.registrations);
    calls.start.store(region.start, Ordering::Relaxed);
    calls.end.store(region.end, Ordering::Relaxed);
    sys::UCS_OK
}

extern "C" fn deregister(context: *mut c_void, _: *mut ucs_rcache_t, _: *mut ucs_rcache_region_t) {
    // SAFETY: the context is the `CallbackState` that `UcxCache` owns and frees after UCX's cache.
    count(unsafe { &(*context.cast::<CallbackState>()).deregistrations });
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
        // SAFETY: UCX passes a buffer of `room` writable bytes.
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
    /// Loads UCX from a folder or, for `None`, through the system's loader. Checks that UCX's cache
    /// works as expected.
    ///
    /// # Errors
    /// Returns one line of text that says why this UCX cannot be used.
    pub(super) fn load(folder: Option<&Path>) -> Result<Self, String> {
        let ucx = Functions::load(folder).map(|functions| Self { functions })?;
        ucx.probe().map_err(|why| format!("{}: {why}", ucx.name()))?;
        Ok(ucx)
    }

    /// Returns the name with the release, for example `UCX 1.22`.
    pub(super) fn name(self) -> &'static str {
        &self.functions.name
    }

    /// Checks that the loaded UCX has the struct layouts that [`sys`] declares, by lookups in a
    /// cache of two regions.
    fn probe(self) -> Result<(), String> {
        const LEN: u64 = 4096;
        let cache = self.cache(Some(2))?;
        let [a, b, c] = [1, 3, 5].map(|page| page * LEN);
        // Each step is a looked-up address, with the total registrations and evictions after the
        // lookup.
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
                    "its cache does not work as its headers say: after step {step} it has \
                     registered and evicted {seen:?} regions instead of {:?}; the last is \
                     {region:x?}",
                    (registrations, evictions)
                ));
            }
        }
        Ok(())
    }

    /// Creates a UCX cache of at most `max_regions` regions, or without a limit for `None`.
    ///
    /// Without a limit, UCX 1.22 does not track recent use. That is UCX's default and its fastest
    /// configuration. With a limit, UCX 1.22 tracks recent use without a lock (the flag
    /// `UCS_RCACHE_FLAG_NEED_LRU_LOCK` is not set), so only one thread at a time may use the cache.
    ///
    /// # Errors
    /// Returns the status of `ucs_rcache_create` as one line of text.
    pub(super) fn cache(self, max_regions: Option<u64>) -> Result<UcxCache, String> {
        let calls = Box::new(CallbackState::default());
        let context = ptr::from_ref(&*calls).cast_mut().cast();
        let max_regions = max_regions.unwrap_or(sys::NO_LIMIT as u64);
        // `UCS_RCACHE_FLAG_NO_PFN_CHECK` is not set: with it, UCX would not enforce the limits.
        // Without it, UCX still reads page frame numbers only if `UCX_RCACHE_CHECK_PFN` is set.
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
        // SAFETY: the parameters have the layout of the loaded release, and UCX copies them. The
        // operations are static, and `UcxCache` frees the context after UCX's cache.
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
        // SAFETY: the function has no arguments, and no other thread uses the table yet.
        unsafe { (self.functions.ucs_memtype_cache_global_init)() };
        let types = MemoryTypes { functions: self.functions, known: Vec::new() };
        // The first lookup creates the table. UCX ignores ranges that are added before.
        types.is_device(0);
        types
    }
}

/// A UCX registration cache. Its registrations do nothing.
#[derive(Debug)]
pub(super) struct UcxCache {
    functions: &'static Functions,
    cache: *mut ucs_rcache_t,
    calls: Box<CallbackState>,
}

// SAFETY: UCX's cache keeps its state on the heap and is not tied to a thread.
unsafe impl Send for UcxCache {}
// SAFETY: UCX documents that the cache is thread-safe (`ucs/memory/rcache.h`). A limited cache of
// UCX 1.22 is not, but the benchmark uses it on one thread only.
unsafe impl Sync for UcxCache {}

impl UcxCache {
    /// Returns the number of registrations since the cache was created.
    pub(super) fn registrations(&self) -> u64 {
        self.calls.registrations.load(Ordering::Relaxed)
    }

    /// Looks up the region of `len` bytes at each address, with read and write rights, and releases
    /// it.
    ///
    /// The two releases have separate loops, so that the measured loop does not check the release.
    #[inline]
    pub(super) fn get_put(&self, addresses: impl IntoIterator<Item = u64>, len: u64) {
        let (cache, len) = (self.cache, len as usize);
        let (prot, arg) = (sys::PROT_READ | sys::PROT_WRITE, ptr::null_mut());
        match self.functions.release {
            Release::V1_13 { ucs_rcache_get, .. } => self.each(addresses, |at, region| {
                // SAFETY: the cache is live, UCX does not access the range's memory, and `region`
                // is an exclusive borrow during the call.
                unsafe { ucs_rcache_get(cache, at, len, prot, arg, region) }
            }),
            Release::V1_22 { ucs_rcache_get, .. } => self.each(addresses, |at, region| {
                // SAFETY: the cache is live, UCX does not access the range's memory, and `region`
                // is an exclusive borrow during the call.
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
            // SAFETY: `get` returned the region from this cache, and nothing uses the region any
            // more.
            unsafe { (self.functions.ucs_rcache_region_put)(self.cache, region) };
        }
    }
}

impl Drop for UcxCache {
    fn drop(&mut self) {
        // SAFETY: `each` released every region, and this value is the only user of the cache.
        unsafe { (self.functions.ucs_rcache_destroy)(self.cache) };
        let [registered, deregistered] = [&self.calls.registrations, &self.calls.deregistrations]
            .map(|calls| calls.load(Ordering::Relaxed));
        assert_eq!(registered, deregistered, "UCX did not deregister every region");
    }
}

/// UCX's process-wide table of device memory.
#[derive(Debug)]
pub(super) struct MemoryTypes {
    functions: &'static Functions,
    known: Vec<(u64, u64)>,
}

impl MemoryTypes {
    /// Adds a range to the table as CUDA memory.
    pub(super) fn add_device(&mut self, address: u64, len: u64) {
        let (at, bytes) = (pointer(address), len as usize);
        let (kind, device) = (sys::UCS_MEMORY_TYPE_CUDA, sys::UCS_SYS_DEVICE_ID_UNKNOWN);
        match self.functions.release {
            Release::V1_13 { ucs_memtype_cache_update, .. } => {
                // SAFETY: the table stores the address and length, and does not access the memory.
                unsafe { ucs_memtype_cache_update(at, bytes, kind, device) };
            }
            Release::V1_22 { ucs_memtype_cache_update, .. } => {
                let flags = sys::UCS_MEM_FLAG_REGISTRABLE;
                // SAFETY: the table stores the address and length, and does not access the memory.
                unsafe { ucs_memtype_cache_update(at, bytes, kind, device, flags) };
            }
        }
        self.known.push((address, len));
    }

    /// Returns whether the table lists the address as CUDA memory.
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
        // SAFETY: `found` is an exclusive borrow during the call, and has the size of the largest
        // release's struct.
        let status =
            unsafe { (self.functions.ucs_memtype_cache_lookup)(pointer(address), 1, &mut found) };
        status == sys::UCS_OK && found.memory_type == sys::UCS_MEMORY_TYPE_CUDA
    }
}

impl Drop for MemoryTypes {
    fn drop(&mut self) {
        for &(address, len) in &self.known {
            // SAFETY: the table removes the range, and does not access the memory.
            unsafe { (self.functions.ucs_memtype_cache_remove)(pointer(address), len as usize) };
        }
    }
}

fn pointer(address: u64) -> *const c_void {
    ptr::without_provenance(address as usize)
}
