//! Measures the number of driver calls of a query, by functions that count their calls and forward
//! them to the driver.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{Address, AddressRange, AllocationKind, Iface, IfaceExt, monitor::Monitor};
use hmem_iface_cuda::{
    Cuda, CudaMonitorKind,
    sys::{
        CuContext, CuDevice, CuDeviceAttribute, CuDevicePtr, CuEvent, CuIpcMemHandle,
        CuMemAccessDesc, CuMemAllocationProp, CuMemHandle, CuPointerAttribute, CuResult, CuStream,
        CuStreamCaptureMode, Functions,
    },
};

use crate::{
    KINDS,
    driver::{Driver, watched},
    report::{Failure, Outcome, Report, Row, and, attempt},
};

/// Number of driver calls of the first query of page-locked memory.
const FIRST: u64 = 6;

/// The driver to which the counting functions forward. A C function has no state, so this static
/// and the count are process-wide.
static DRIVER: OnceLock<Functions> = OnceLock::new();
static CALLS: AtomicU64 = AtomicU64::new(0);

macro_rules! counted {
    (
        required { $($symbol:ident = $field:ident($($name:ident: $type:ty),*);)+ }
        optional { $($osymbol:ident = $ofield:ident($($oname:ident: $otype:ty),*);)+ }
    ) => {
        /// Number of counting functions.
        pub(crate) const COUNTED: usize = [$(stringify!($field),)+ $(stringify!($ofield),)+].len();

        /// Returns the counting function for a symbol, or `None` for other symbols and for those
        /// that the driver lacks.
        fn counting(driver: &Functions, symbol: &str) -> Option<*const ()> {
            $(
                if symbol == stringify!($symbol) {
                    unsafe extern "C" fn call($($name: $type),*) -> CuResult {
                        CALLS.fetch_add(1, Ordering::Relaxed);
                        let call = DRIVER.get().expect("a driver").$field();
                        // SAFETY: the caller passes the arguments of the function, and they are
                        // forwarded unchanged.
                        unsafe { call($($name),*) }
                    }
                    return Some(call as *const ());
                }
            )+
            $(
                if symbol == stringify!($osymbol) && driver.$ofield().is_some() {
                    unsafe extern "C" fn call($($oname: $otype),*) -> CuResult {
                        CALLS.fetch_add(1, Ordering::Relaxed);
                        let call = DRIVER.get().expect("a driver").$ofield().expect("present");
                        // SAFETY: the caller passes the arguments of the function, unchanged.
                        unsafe { call($($oname),*) }
                    }
                    return Some(call as *const ());
                }
            )+
            None
        }
    };
}

/// Returns a table of functions that count their calls and forward them to `functions`. Later calls
/// of this function forward to the table of the first call.
///
/// With `hooks`, the functions that free memory are the driver's own, since the monitor patches
/// them.
fn counted(functions: &Functions, hooks: bool) -> Functions {
    let driver = DRIVER.get_or_init(|| functions.clone());
    let free = |symbol: &str| {
        let found = driver.frees().iter().find(|(name, _)| *name == symbol);
        found.map(|(_, entry)| std::ptr::with_exposed_provenance(*entry))
    };
    let lookup = |symbol: &'static str| match counting(driver, symbol) {
        Some(counting) => free(symbol).filter(|_| hooks).or(Some(counting)),
        None => free(symbol),
    };
    // SAFETY: the functions have the driver's signatures. The counting functions forward to the
    // driver's functions, and all live forever.
    unsafe { Functions::from_lookup(lookup) }.expect("the driver has the required functions")
}

counted! {
    required {
        cuInit = init(a: c_uint);
        cuDriverGetVersion = driver_get_version(a: *mut c_int);
        cuDeviceGetCount = device_get_count(a: *mut c_int);
        cuDeviceGet = device_get(a: *mut CuDevice, b: c_int);
        cuDeviceGetName = device_get_name(a: *mut c_char, b: c_int, c: CuDevice);
        cuDeviceTotalMem_v2 = device_total_mem(a: *mut usize, b: CuDevice);
        cuDeviceGetPCIBusId = device_get_pci_bus_id(a: *mut c_char, b: c_int, c: CuDevice);
        cuDeviceGetAttribute = device_get_attribute(
            a: *mut c_int, b: CuDeviceAttribute, c: CuDevice
        );
        cuDevicePrimaryCtxRetain = primary_ctx_retain(a: *mut CuContext, b: CuDevice);
        cuDevicePrimaryCtxRelease_v2 = primary_ctx_release(a: CuDevice);
        cuDevicePrimaryCtxGetState = primary_ctx_get_state(
            a: CuDevice, b: *mut c_uint, c: *mut c_int
        );
        cuCtxGetCurrent = ctx_get_current(a: *mut CuContext);
        cuCtxGetDevice = ctx_get_device(a: *mut CuDevice);
        cuCtxPushCurrent_v2 = ctx_push_current(a: CuContext);
        cuCtxPopCurrent_v2 = ctx_pop_current(a: *mut CuContext);
        cuPointerGetAttributes = pointer_get_attributes(
            a: c_uint, b: *mut CuPointerAttribute, c: *mut *mut c_void, d: CuDevicePtr
        );
        cuPointerSetAttribute = pointer_set_attribute(
            a: *const c_void, b: CuPointerAttribute, c: CuDevicePtr
        );
        cuMemGetAddressRange_v2 = mem_get_address_range(
            a: *mut CuDevicePtr, b: *mut usize, c: CuDevicePtr
        );
        cuMemAlloc_v2 = mem_alloc(a: *mut CuDevicePtr, b: usize);
        cuMemFree_v2 = mem_free(a: CuDevicePtr);
        cuMemHostAlloc = mem_host_alloc(a: *mut *mut c_void, b: usize, c: c_uint);
        cuMemFreeHost = mem_free_host(a: *mut c_void);
        cuMemHostGetFlags = mem_host_get_flags(a: *mut c_uint, b: *mut c_void);
        cuMemHostRegister_v2 = mem_host_register(a: *mut c_void, b: usize, c: c_uint);
        cuMemHostUnregister = mem_host_unregister(a: *mut c_void);
        cuMemAllocManaged = mem_alloc_managed(a: *mut CuDevicePtr, b: usize, c: c_uint);
        cuMemcpyAsync = memcpy_async(a: CuDevicePtr, b: CuDevicePtr, c: usize, d: CuStream);
        cuStreamCreate = stream_create(a: *mut CuStream, b: c_uint);
        cuStreamSynchronize = stream_synchronize(a: CuStream);
        cuStreamDestroy_v2 = stream_destroy(a: CuStream);
        cuEventCreate = event_create(a: *mut CuEvent, b: c_uint);
        cuEventRecord = event_record(a: CuEvent, b: CuStream);
        cuEventQuery = event_query(a: CuEvent);
        cuEventSynchronize = event_synchronize(a: CuEvent);
        cuEventDestroy_v2 = event_destroy(a: CuEvent);
        cuIpcGetMemHandle = ipc_get_mem_handle(a: *mut CuIpcMemHandle, b: CuDevicePtr);
        cuIpcOpenMemHandle_v2 = ipc_open_mem_handle(
            a: *mut CuDevicePtr, b: CuIpcMemHandle, c: c_uint
        );
        cuIpcCloseMemHandle = ipc_close_mem_handle(a: CuDevicePtr);
    }
    optional {
        cuMemGetHandleForAddressRange = mem_get_handle_for_address_range(
            a: *mut c_void, b: CuDevicePtr, c: usize, d: c_uint, e: u64
        );
        cuFlushGPUDirectRDMAWrites = flush_gpu_direct_rdma_writes(a: c_uint, b: c_uint);
        cuCtxGetFlags = ctx_get_flags(a: *mut c_uint);
        cuCtxSetFlags = ctx_set_flags(a: c_uint);
        cuThreadExchangeStreamCaptureMode =
            thread_exchange_stream_capture_mode(a: *mut CuStreamCaptureMode);
        cuMemAllocAsync = mem_alloc_async(a: *mut CuDevicePtr, b: usize, c: CuStream);
        cuMemFreeAsync = mem_free_async(a: CuDevicePtr, b: CuStream);
        cuMemGetAllocationGranularity = mem_get_allocation_granularity(
            a: *mut usize, b: *const CuMemAllocationProp, c: c_uint
        );
        cuMemAddressReserve = mem_address_reserve(
            a: *mut CuDevicePtr, b: usize, c: usize, d: CuDevicePtr, e: u64
        );
        cuMemAddressFree = mem_address_free(a: CuDevicePtr, b: usize);
        cuMemCreate = mem_create(
            a: *mut CuMemHandle, b: usize, c: *const CuMemAllocationProp, d: u64
        );
        cuMemRelease = mem_release(a: CuMemHandle);
        cuMemMap = mem_map(a: CuDevicePtr, b: usize, c: usize, d: CuMemHandle, e: u64);
        cuMemUnmap = mem_unmap(a: CuDevicePtr, b: usize);
        cuMemSetAccess = mem_set_access(
            a: CuDevicePtr, b: usize, c: *const CuMemAccessDesc, d: usize
        );
        cuMemRetainAllocationHandle = mem_retain_allocation_handle(
            a: *mut CuMemHandle, b: *mut c_void
        );
        cuMemGetAllocationPropertiesFromHandle = mem_get_allocation_properties(
            a: *mut CuMemAllocationProp, b: CuMemHandle
        );
    }
}

/// Runs a query, and returns its result with the number of its driver calls.
fn calls<T>(ask: impl FnOnce() -> hmem_core::Result<T>) -> Outcome<(T, u64)> {
    let before = CALLS.load(Ordering::Relaxed);
    let answer = ask()?;
    Ok((answer, CALLS.load(Ordering::Relaxed) - before))
}

/// Returns true if the first query and the next one make the expected number of driver calls. A
/// query makes one call, and the first query of page-locked memory makes more. For memory with a
/// context and without a legacy IPC handle, a query also retains and releases the VMM handle.
pub(crate) fn has_expected_calls(first: u64, then: u64, kind: Option<AllocationKind>) -> bool {
    let (most_first, most) = match kind {
        Some(AllocationKind::Host | AllocationKind::HostRegistered) => (FIRST, 1),
        Some(AllocationKind::Device | AllocationKind::Virtual) => (3, 3),
        _ => (1, 1),
    };
    first <= most_first && then <= most
}

pub(crate) fn write(driver: &Driver, report: &mut Report<'_>) {
    let columns = ["memory", "the first time", "then", "without a context"];
    report.table("Driver calls to find the owner of an address", &columns);
    report.row(&["the stack"], || {
        let on_the_stack = 0u8;
        let cuda = open(driver, CudaMonitorKind::Identity)?;
        let row = measure_queries(driver, &cuda, Address::of_ptr(&on_the_stack), None);
        and(row, close(cuda))
    });
    report.row(&["page-locked by the application"], || {
        let page = rustix::param::page_size() as u64;
        let memory = vec![0u8; 3 * page as usize];
        let start = Address(Address::of_ptr(memory.as_ptr()).0.next_multiple_of(page));
        let range = AddressRange::new(start, 2 * page).expect("no wrap");
        let cuda = open(driver, CudaMonitorKind::Identity)?;
        // SAFETY: the memory stays mapped until its page-locking ends below.
        unsafe { driver.cuda.host_register(range) }?;
        let row =
            attempt(|| measure_queries(driver, &cuda, start, Some(AllocationKind::HostRegistered)));
        let row = and(row, driver.cuda.host_unregister(range).map_err(Failure::from));
        and(row, close(cuda))
    });
    for kind in KINDS {
        report.row(&[kind.name()], || {
            driver.with(1 << 20, kind, |memory| {
                let cuda = open(driver, CudaMonitorKind::Identity)?;
                let row = attempt(|| measure_queries(driver, &cuda, memory.base(), Some(kind)));
                and(row, close(cuda))
            })
        });
    }

    let columns = ["memory", "by identity", "with hooks"];
    report.table("Driver calls of a cached hit", &columns);
    for kind in KINDS {
        report.row(&[kind.name()], || {
            driver.with(1 << 20, kind, |memory| {
                let hit = |monitor: &dyn Monitor| {
                    watched(monitor, memory, |subscription| {
                        let (there, calls) = calls(|| monitor.valid(subscription, memory))?;
                        if there {
                            Ok(calls)
                        } else {
                            Err("live memory counts as freed".to_owned().into())
                        }
                    })
                };
                let identity = with_monitor(driver, CudaMonitorKind::Identity, hit)?;
                // Stream-ordered memory is freed only when its stream reaches the free, after the
                // notification, so a hit queries it.
                let most = u64::from(kind == AllocationKind::StreamOrdered);
                let (hooks, met) = match with_monitor(driver, CudaMonitorKind::Hooks, hit) {
                    Ok(calls) => (calls.to_string(), calls <= most),
                    Err(failure) => (format!("not to be had: {}", failure.text()), true),
                };
                // A hit of VMM memory queries its mapping, and retains and releases a handle.
                let owed = if kind == AllocationKind::Virtual { 3 } else { 1 };
                Ok(Row::new([identity.to_string(), hooks]).met(met && identity <= owed))
            })
        });
    }
}

/// Opens an iface over the counting functions.
fn open(driver: &Driver, monitor: CudaMonitorKind) -> Outcome<Cuda> {
    let functions = counted(&driver.functions, monitor == CudaMonitorKind::Hooks);
    Ok(Cuda::builder().functions(functions).monitor(monitor).open()?)
}

fn close(cuda: Cuda) -> Outcome<()> {
    cuda.close().map_err(|refused| refused.error.into())
}

/// Starts a monitor of an iface of its own, and calls `hit` with it.
fn with_monitor(
    driver: &Driver,
    kind: CudaMonitorKind,
    hit: impl FnOnce(&dyn Monitor) -> Outcome<u64>,
) -> Outcome<u64> {
    let cuda = open(driver, kind)?;
    let outcome = attempt(|| hit(&*cuda.start_monitor()?));
    and(outcome, close(cuda))
}

/// Counts the driver calls of two queries with a current context, and of one query without a
/// context. The last count has no expected value, since some drivers then need more calls.
fn measure_queries(
    driver: &Driver,
    cuda: &Cuda,
    address: Address,
    kind: Option<AllocationKind>,
) -> Outcome<Row> {
    let ask = || {
        let (found, calls) = calls(|| cuda.query(address))?;
        match found.map(|found| found.kind) {
            found if found == kind => Ok(calls),
            found => Err(Failure::from(format!("taken for {found:?}"))),
        }
    };
    let (first, then) = driver.in_context(|| Ok((ask()?, ask()?)))?;
    let without = ask()?;
    let verdict =
        if has_expected_calls(first, then, kind) { String::new() } else { ": NOT MET".to_owned() };
    let without = if without <= then {
        without.to_string()
    } else {
        format!("{without}: the driver needs one")
    };
    let met = verdict.is_empty();
    Ok(Row::new([first.to_string(), format!("{then}{verdict}"), without]).met(met))
}
