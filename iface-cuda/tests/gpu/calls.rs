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
        Functions,
    },
};

use crate::{
    KINDS,
    driver::Driver,
    report::{Failure, Outcome, Report, Row, and, attempt},
};

/// Number of driver calls of the first query of page-locked memory.
const FIRST: u64 = 4;

/// The driver to which the counting functions forward. A C function has no state, so this static
/// and the count are process-wide.
static DRIVER: OnceLock<Functions> = OnceLock::new();
static CALLS: AtomicU64 = AtomicU64::new(0);

macro_rules! counted {
    (
        required { $($field:ident($($name:ident: $type:ty),*);)+ }
        optional { $($ofield:ident($($oname:ident: $otype:ty),*);)+ }
    ) => {
        /// Number of counting functions.
        pub(crate) const COUNTED: usize = [$(stringify!($field),)+ $(stringify!($ofield),)+].len();

        /// Returns functions that count their calls and forward them to `functions`. Later calls of
        /// this function forward to the table of the first call.
        pub(crate) fn counted(functions: &Functions) -> Functions {
            let mut counted = DRIVER.get_or_init(|| functions.clone()).clone();
            $(
                counted.$field = {
                    unsafe extern "C" fn call($($name: $type),*) -> CuResult {
                        CALLS.fetch_add(1, Ordering::Relaxed);
                        // SAFETY: the caller passes the arguments of the function, and they are
                        // forwarded unchanged.
                        unsafe { (DRIVER.get().expect("a driver").$field)($($name),*) }
                    }
                    call
                };
            )+
            $(
                if counted.$ofield.is_some() {
                    unsafe extern "C" fn call($($oname: $otype),*) -> CuResult {
                        CALLS.fetch_add(1, Ordering::Relaxed);
                        let call = DRIVER.get().expect("a driver").$ofield.expect("present");
                        // SAFETY: the caller passes the arguments of the function, unchanged.
                        unsafe { call($($oname),*) }
                    }
                    counted.$ofield = Some(call);
                }
            )+
            counted
        }
    };
}

counted! {
    required {
        init(a: c_uint);
        driver_get_version(a: *mut c_int);
        device_get_count(a: *mut c_int);
        device_get(a: *mut CuDevice, b: c_int);
        device_get_name(a: *mut c_char, b: c_int, c: CuDevice);
        device_total_mem(a: *mut usize, b: CuDevice);
        device_get_pci_bus_id(a: *mut c_char, b: c_int, c: CuDevice);
        device_get_attribute(a: *mut c_int, b: CuDeviceAttribute, c: CuDevice);
        primary_ctx_retain(a: *mut CuContext, b: CuDevice);
        primary_ctx_release(a: CuDevice);
        primary_ctx_get_state(a: CuDevice, b: *mut c_uint, c: *mut c_int);
        ctx_get_current(a: *mut CuContext);
        ctx_get_device(a: *mut CuDevice);
        ctx_push_current(a: CuContext);
        ctx_pop_current(a: *mut CuContext);
        pointer_get_attributes(
            a: c_uint, b: *mut CuPointerAttribute, c: *mut *mut c_void, d: CuDevicePtr
        );
        pointer_set_attribute(a: *const c_void, b: CuPointerAttribute, c: CuDevicePtr);
        mem_get_address_range(a: *mut CuDevicePtr, b: *mut usize, c: CuDevicePtr);
        mem_alloc(a: *mut CuDevicePtr, b: usize);
        mem_free(a: CuDevicePtr);
        mem_host_alloc(a: *mut *mut c_void, b: usize, c: c_uint);
        mem_free_host(a: *mut c_void);
        mem_host_get_flags(a: *mut c_uint, b: *mut c_void);
        mem_host_register(a: *mut c_void, b: usize, c: c_uint);
        mem_host_unregister(a: *mut c_void);
        mem_alloc_managed(a: *mut CuDevicePtr, b: usize, c: c_uint);
        memcpy_async(a: CuDevicePtr, b: CuDevicePtr, c: usize, d: CuStream);
        stream_create(a: *mut CuStream, b: c_uint);
        stream_synchronize(a: CuStream);
        stream_destroy(a: CuStream);
        event_create(a: *mut CuEvent, b: c_uint);
        event_record(a: CuEvent, b: CuStream);
        event_query(a: CuEvent);
        event_synchronize(a: CuEvent);
        event_destroy(a: CuEvent);
        ipc_get_mem_handle(a: *mut CuIpcMemHandle, b: CuDevicePtr);
        ipc_open_mem_handle(a: *mut CuDevicePtr, b: CuIpcMemHandle, c: c_uint);
        ipc_close_mem_handle(a: CuDevicePtr);
    }
    optional {
        mem_get_handle_for_address_range(
            a: *mut c_void, b: CuDevicePtr, c: usize, d: c_uint, e: u64
        );
        flush_gpu_direct_rdma_writes(a: c_uint, b: c_uint);
        ctx_get_flags(a: *mut c_uint);
        ctx_set_flags(a: c_uint);
        mem_alloc_async(a: *mut CuDevicePtr, b: usize, c: CuStream);
        mem_free_async(a: CuDevicePtr, b: CuStream);
        mem_get_allocation_granularity(a: *mut usize, b: *const CuMemAllocationProp, c: c_uint);
        mem_address_reserve(a: *mut CuDevicePtr, b: usize, c: usize, d: CuDevicePtr, e: u64);
        mem_address_free(a: CuDevicePtr, b: usize);
        mem_create(a: *mut CuMemHandle, b: usize, c: *const CuMemAllocationProp, d: u64);
        mem_release(a: CuMemHandle);
        mem_map(a: CuDevicePtr, b: usize, c: usize, d: CuMemHandle, e: u64);
        mem_unmap(a: CuDevicePtr, b: usize);
        mem_set_access(a: CuDevicePtr, b: usize, c: *const CuMemAccessDesc, d: usize);
        mem_retain_allocation_handle(a: *mut CuMemHandle, b: *mut c_void);
        mem_get_allocation_properties(a: *mut CuMemAllocationProp, b: CuMemHandle);
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
        let memory = vec![0u8; 3 << 12];
        let start = Address(Address::of_ptr(memory.as_ptr()).0.next_multiple_of(4096));
        let range = AddressRange::new(start, 8192).expect("no wrap");
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
    // VMM memory is never cached, so it has no hits.
    for kind in KINDS.into_iter().filter(|kind| *kind != AllocationKind::Virtual) {
        report.row(&[kind.name()], || {
            driver.with(1 << 20, kind, |memory| {
                let hit = |monitor: &dyn Monitor| {
                    let (there, calls) = calls(|| monitor.valid(memory))?;
                    if there {
                        Ok(calls)
                    } else {
                        Err("live memory counts as freed".to_owned().into())
                    }
                };
                let identity = with_monitor(driver, CudaMonitorKind::Identity, hit)?;
                // Stream-ordered memory is freed only when its stream reaches the free, after the
                // notification, so a hit queries it.
                let most = u64::from(kind == AllocationKind::StreamOrdered);
                let (hooks, met) = match with_monitor(driver, CudaMonitorKind::Hooks, hit) {
                    Ok(calls) => (calls.to_string(), calls <= most),
                    Err(failure) => (format!("not to be had: {}", failure.text()), true),
                };
                Ok(Row::new([identity.to_string(), hooks]).met(met && identity <= 1))
            })
        });
    }
}

/// Opens an iface over the counting functions.
fn open(driver: &Driver, monitor: CudaMonitorKind) -> Outcome<Cuda> {
    Ok(Cuda::builder().functions(counted(&driver.functions)).monitor(monitor).open()?)
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
