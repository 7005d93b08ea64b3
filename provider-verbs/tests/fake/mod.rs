//! A fake libibverbs with separate state per thread. Tests set the results of its functions and
//! read the record of calls.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    cell::RefCell,
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem, ptr,
    sync::Arc,
};

use hmem_core::{Address, AddressRange, Domain, DomainAttr, Promise, Raw, Registry};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{
    Verbs,
    sys::{
        AsyncEvent, AtomicCap, CompChannel, Context, Cq, Device, DeviceAttr, DeviceAttrEx,
        DeviceCaps, DeviceExInput, ForkStatus, Functions, Gid, IBV_ODP_SUPPORT, Mr, Mw, MwType, Pd,
        PortAttr, Qp, QpAttr, QpInitAttr, VERBS_ABI_IS_EXTENDED, VerbsContext,
    },
};

/// Opens a domain without ifaces.
pub(crate) fn open(verbs: &Verbs) -> Domain {
    open_as(verbs, DomainAttr::default())
}

/// Opens a domain with these attributes, without ifaces.
pub(crate) fn open_as(verbs: &Verbs, attr: DomainAttr) -> Domain {
    let (registry, paths) = (Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()));
    Domain::open(verbs, registry, paths, attr).expect("open")
}

pub(crate) fn range(start: u64, len: u64) -> AddressRange {
    AddressRange::new(Address(start), len).expect("range")
}

/// Returns addresses for registrations with the fake library. No memory needs to be mapped there.
pub(crate) fn memory(start: u64, len: u64) -> Raw {
    // SAFETY: the fake library accesses no memory.
    unsafe { Raw::new(range(start, len), Promise::ReadWrite) }
}

/// Results that the fake library's functions return, and a record of the calls.
#[derive(Default)]
pub(crate) struct Script {
    /// Number of devices. With `None`, the library returns a null list with errno 38.
    pub(crate) devices: Option<usize>,
    pub(crate) max_mr_size: u64,
    /// Errno values of the next registrations, in order; 0 for success. Registrations after the end
    /// of the list succeed.
    pub(crate) register: Vec<i32>,
    /// Errno of every dma-buf registration; 0 for success.
    pub(crate) dma_buf: i32,
    pub(crate) dereg: i32,
    /// Index of a device that cannot be opened, and the errno of that failure.
    pub(crate) closed: Option<(usize, i32)>,
    /// Results and errno values of the next `ibv_rereg_mr` calls, in order; 0 for success. Calls
    /// after the end of the list succeed.
    pub(crate) rereg: Vec<(c_int, i32)>,
    /// True if devices that are opened later report on-demand paging.
    pub(crate) on_demand: bool,
    /// True if devices that are opened later report that they lack atomics.
    pub(crate) no_atomics: bool,
    /// True if devices that are opened later report memory windows.
    pub(crate) windows: bool,
    /// Path of the Data Direct function that libmlx5 reports for devices that are opened later, or
    /// the errno of the call. `None` if the devices are not those of mlx5.
    pub(crate) data_direct: Option<Result<&'static CStr, c_int>>,
    pub(crate) fork: c_int,
    pub(crate) calls: Vec<String>,
    next_key: u32,
}

thread_local! {
    static SCRIPT: RefCell<Script> = RefCell::default();
}

pub(crate) fn with<T>(body: impl FnOnce(&mut Script) -> T) -> T {
    SCRIPT.with_borrow_mut(body)
}

pub(crate) fn called(call: String) {
    with(|script| script.calls.push(call));
}

/// Returns the recorded calls and empties the record.
pub(crate) fn calls() -> Vec<String> {
    with(|script| mem::take(&mut script.calls))
}

pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the pointer is to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}

extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Device {
    let devices = with(|script| script.devices);
    let n = devices.unwrap_or(0);
    // SAFETY: the caller passes a writable count.
    unsafe { *count = n as c_int };
    if devices.is_none() {
        set_errno(38);
        return ptr::null_mut();
    }
    let list: Vec<*mut Device> = (0..n)
        .map(|index| ptr::without_provenance_mut(index + 1))
        .chain([ptr::null_mut()])
        .collect();
    Box::into_raw(list.into_boxed_slice()).cast()
}

extern "C" fn free_device_list(list: *mut *mut Device) {
    called("free_device_list".into());
    // SAFETY: the caller passes a list of `get_device_list`, which ends with a null pointer and is
    // freed once.
    unsafe {
        let count = (0..).take_while(|&index| !(*list.add(index)).is_null()).count();
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(list, count + 1)));
    }
}

extern "C" fn get_device_name(device: *mut Device) -> *const c_char {
    const NAMES: [&CStr; 3] = [c"fake0", c"fake1", c"fake2"];
    NAMES[device.addr() - 1].as_ptr()
}

extern "C" fn open_device(device: *mut Device) -> *mut Context {
    called("open_device".into());
    if let Some((_, errno)) =
        with(|script| script.closed).filter(|(closed, _)| closed + 1 == device.addr())
    {
        set_errno(errno);
        return ptr::null_mut();
    }
    context(device)
}

pub(crate) fn context(device: *mut Device) -> *mut Context {
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut surrounding: VerbsContext = unsafe { mem::zeroed() };
    surrounding.context.device = device;
    // No fd, so the provider reads no events.
    surrounding.context.async_fd = -1;
    if with(|script| script.windows) {
        surrounding.context.ops.alloc_mw = Some(alloc_mw);
    }
    if with(|script| script.on_demand) {
        surrounding.context.abi_compat = ptr::without_provenance_mut(VERBS_ABI_IS_EXTENDED);
        surrounding.sz = size_of::<VerbsContext>();
        surrounding.query_device_ex = Some(query_on_demand);
    }
    let surrounding = Box::into_raw(Box::new(surrounding));
    surrounding.wrapping_byte_add(mem::offset_of!(VerbsContext, context)).cast()
}

/// Fails: the fake reports windows, and has none.
unsafe extern "C" fn alloc_mw(_pd: *mut Pd, _kind: MwType) -> *mut Mw {
    set_errno(12);
    ptr::null_mut()
}

unsafe extern "C" fn query_on_demand(
    _context: *mut Context,
    _input: *const DeviceExInput,
    attr: *mut DeviceAttrEx,
    _size: usize,
) -> c_int {
    // SAFETY: the caller passes writable attributes.
    unsafe { (*attr).odp_caps.general_caps = IBV_ODP_SUPPORT };
    0
}

/// Returns a protection domain that the application created without the provider. Neither the
/// domain nor its context is ever freed.
pub(crate) fn foreign_pd() -> *mut c_void {
    Box::into_raw(Box::new(Pd { context: context(ptr::without_provenance_mut(1)), handle: 9 }))
        .cast()
}

extern "C" fn close_device(context: *mut Context) -> c_int {
    called("close_device".into());
    let surrounding = context.wrapping_byte_sub(mem::offset_of!(VerbsContext, context));
    // SAFETY: `context` boxed the surrounding structure, and each device is closed once.
    drop(unsafe { Box::from_raw(surrounding.cast::<VerbsContext>()) });
    0
}

extern "C" fn query_device(_context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: the caller passes writable attributes.
    let attr = unsafe { &mut *attr };
    (attr.max_mr_size, attr.max_mr, attr.phys_port_cnt) =
        (with(|script| script.max_mr_size), 1000, 1);
    (attr.max_cqe, attr.max_qp_wr, attr.max_sge, attr.atomic_cap) = (1000, 100, 4, atomics());
    if with(|script| script.data_direct.is_some()) {
        attr.vendor_id = 0x2c9;
    }
    if with(|script| script.windows) {
        (attr.max_mw, attr.device_cap_flags) = (1, DeviceCaps::MEM_WINDOW_TYPE_2B.bits());
    }
    0
}

/// Returns the level of atomics that the device reports.
pub(crate) fn atomics() -> AtomicCap {
    if with(|script| script.no_atomics) {
        AtomicCap::IBV_ATOMIC_NONE
    } else {
        AtomicCap::IBV_ATOMIC_HCA
    }
}

extern "C" fn query_port(_context: *mut Context, _port: u8, _attr: *mut PortAttr) -> c_int {
    22
}

extern "C" fn query_gid(_context: *mut Context, _port: u8, _index: c_int, _gid: *mut Gid) -> c_int {
    22
}

extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    called("alloc_pd".into());
    Box::into_raw(Box::new(Pd { context, handle: 1 }))
}

extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    called("dealloc_pd".into());
    // SAFETY: `alloc_pd` boxed the protection domain, and each one is freed once.
    drop(unsafe { Box::from_raw(pd) });
    0
}

fn register(pd: *mut Pd, addr: *mut c_void, length: usize) -> *mut Mr {
    let (errno, key) = with(|script| {
        script.next_key += 0x100;
        let errno = if script.register.is_empty() { 0 } else { script.register.remove(0) };
        (errno, script.next_key)
    });
    if errno != 0 {
        set_errno(errno);
        return ptr::null_mut();
    }
    let context = ptr::null_mut();
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key | 1 }))
}

extern "C" fn reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    called(format!("reg_mr {:#x}+{length:#x} {access:#x}", addr.addr()));
    register(pd, addr, length)
}

extern "C" fn reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    called(format!("reg_mr_iova2 {:#x}+{length:#x} at {iova:#x} {access:#x}", addr.addr()));
    register(pd, addr, length)
}

extern "C" fn reg_dmabuf_mr(
    pd: *mut Pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut Mr {
    let errno = with(|script| script.dma_buf);
    if fd == -1 || errno == 95 {
        set_errno(if errno == 95 { 95 } else { 9 });
        return ptr::null_mut();
    }
    called(format!("reg_dmabuf_mr {offset:#x}+{length:#x} at {iova:#x} {access:#x}"));
    if errno != 0 {
        set_errno(errno);
        return ptr::null_mut();
    }
    register(pd, ptr::null_mut(), length)
}

extern "C" fn mlx5_reg_dmabuf_mr(
    pd: *mut Pd,
    offset: u64,
    length: usize,
    iova: u64,
    _fd: c_int,
    access: c_int,
    mlx5_access: c_int,
) -> *mut Mr {
    called(format!(
        "mlx5_reg_dmabuf_mr {offset:#x}+{length:#x} at {iova:#x} {access:#x} {mlx5_access:#x}"
    ));
    register(pd, ptr::null_mut(), length)
}

extern "C" fn data_direct_path(_: *mut Context, buffer: *mut c_char, length: usize) -> c_int {
    called("data_direct_path".into());
    match with(|script| script.data_direct) {
        Some(Ok(path)) => {
            let bytes = path.to_bytes_with_nul();
            assert!(bytes.len() <= length, "the buffer is too short");
            // SAFETY: the caller passes a writable buffer of this length.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len()) };
            0
        }
        Some(Err(errno)) => errno,
        None => 95,
    }
}

extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    called("dereg_mr".into());
    let errno = with(|script| mem::take(&mut script.dereg));
    if errno == 0 {
        // SAFETY: `register` boxed the region, and no call after a success names it.
        drop(unsafe { Box::from_raw(mr) });
    }
    errno
}

extern "C" fn rereg_mr(
    mr: *mut Mr,
    flags: c_int,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    access: c_int,
) -> c_int {
    called(format!("rereg_mr {flags:#x} {access:#x}"));
    let (class, errno) =
        with(|script| if script.rereg.is_empty() { (0, 0) } else { script.rereg.remove(0) });
    if class == 0 {
        // SAFETY: the caller passes a live region, and a driver may change the region's keys.
        unsafe { ((*mr).lkey, (*mr).rkey) = ((*mr).lkey + 0x10, (*mr).rkey + 0x10) };
    } else {
        set_errno(errno);
    }
    class
}

extern "C" fn create_comp_channel(_: *mut Context) -> *mut CompChannel {
    set_errno(24);
    ptr::null_mut()
}

extern "C" fn destroy_comp_channel(_: *mut CompChannel) -> c_int {
    0
}

extern "C" fn get_cq_event(_: *mut CompChannel, _: *mut *mut Cq, _: *mut *mut c_void) -> c_int {
    set_errno(11);
    -1
}

extern "C" fn get_async_event(_: *mut Context, _: *mut AsyncEvent) -> c_int {
    set_errno(11);
    -1
}

extern "C" fn ack_async_event(_: *mut AsyncEvent) {}

extern "C" fn ack_cq_events(_: *mut Cq, _: c_uint) {}

extern "C" fn create_cq(
    _: *mut Context,
    _: c_int,
    _: *mut c_void,
    _: *mut CompChannel,
    _: c_int,
) -> *mut Cq {
    set_errno(12);
    ptr::null_mut()
}

extern "C" fn destroy_cq(_cq: *mut Cq) -> c_int {
    0
}

extern "C" fn create_qp(_pd: *mut Pd, _attr: *mut QpInitAttr) -> *mut Qp {
    set_errno(12);
    ptr::null_mut()
}

extern "C" fn destroy_qp(_qp: *mut Qp) -> c_int {
    0
}

extern "C" fn modify_qp(_qp: *mut Qp, _attr: *mut QpAttr, _mask: c_int) -> c_int {
    22
}

extern "C" fn query_qp(
    _qp: *mut Qp,
    _attr: *mut QpAttr,
    _mask: c_int,
    _init: *mut QpInitAttr,
) -> c_int {
    22
}

extern "C" fn fork_init() -> c_int {
    called("fork_init".into());
    0
}

extern "C" fn is_fork_initialized() -> ForkStatus {
    ForkStatus(with(|script| script.fork))
}

/// Returns the address of a function of the fake library; `None` if the fake library lacks the
/// function.
pub(crate) fn symbol(name: &str) -> Option<*const ()> {
    Some(match name {
        "ibv_get_device_list" => get_device_list as *const (),
        "ibv_free_device_list" => free_device_list as *const (),
        "ibv_get_device_name" => get_device_name as *const (),
        "ibv_open_device" => open_device as *const (),
        "ibv_close_device" => close_device as *const (),
        "ibv_query_device" => query_device as *const (),
        "ibv_query_port" => query_port as *const (),
        "ibv_query_gid" => query_gid as *const (),
        "ibv_alloc_pd" => alloc_pd as *const (),
        "ibv_dealloc_pd" => dealloc_pd as *const (),
        "ibv_reg_mr" => reg_mr as *const (),
        "ibv_reg_mr_iova2" => reg_mr_iova2 as *const (),
        "ibv_reg_dmabuf_mr" => reg_dmabuf_mr as *const (),
        "mlx5dv_reg_dmabuf_mr" => mlx5_reg_dmabuf_mr as *const (),
        "mlx5dv_get_data_direct_sysfs_path" => data_direct_path as *const (),
        "ibv_dereg_mr" => dereg_mr as *const (),
        "ibv_rereg_mr" => rereg_mr as *const (),
        "ibv_create_comp_channel" => create_comp_channel as *const (),
        "ibv_destroy_comp_channel" => destroy_comp_channel as *const (),
        "ibv_get_cq_event" => get_cq_event as *const (),
        "ibv_ack_cq_events" => ack_cq_events as *const (),
        "ibv_get_async_event" => get_async_event as *const (),
        "ibv_ack_async_event" => ack_async_event as *const (),
        "ibv_create_cq" => create_cq as *const (),
        "ibv_destroy_cq" => destroy_cq as *const (),
        "ibv_create_qp" => create_qp as *const (),
        "ibv_destroy_qp" => destroy_qp as *const (),
        "ibv_modify_qp" => modify_qp as *const (),
        "ibv_query_qp" => query_qp as *const (),
        "ibv_fork_init" => fork_init as *const (),
        "ibv_is_fork_initialized" => is_fork_initialized as *const (),
        _ => return None,
    })
}

/// Resets the fake library to one device, and returns its function table.
pub(crate) fn functions() -> Functions {
    with(|script| {
        *script = Script {
            devices: Some(1),
            max_mr_size: 1 << 40,
            dma_buf: 95,
            fork: 2,
            ..Script::default()
        };
    });
    // SAFETY: the functions above have the header's signatures.
    unsafe { Functions::from_lookup(|name, _| symbol(name)) }.expect("the fake is complete")
}
