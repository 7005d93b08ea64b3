//! A libfabric with one NIC, whose calls do nothing. A write completes at once. The library frees
//! no object.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    mem, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use hmem_provider_libfabric::sys;

/// The only NIC, which has this provider's name too.
pub(crate) const NAME: &str = "nothing";
const C_NAME: &CStr = c"nothing";

/// The context of the write whose completion was not read, or null.
static POSTED: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The region that every registration returns.
static REGION: AtomicPtr<sys::fid_mr> = AtomicPtr::new(ptr::null_mut());

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn zeroed<T>() -> T {
    // SAFETY: the structs of libfabric are plain data, for which zeros are valid.
    unsafe { mem::zeroed() }
}

fn object(fclass: usize) -> sys::fid {
    let ops = sys::fi_ops { size: 0, close: Some(close), bind: Some(bind), control: Some(control) };
    sys::fid { fclass, context: ptr::null_mut(), ops: leak(ops) }
}

unsafe extern "C" fn close(_: *mut sys::fid) -> c_int {
    0
}

unsafe extern "C" fn bind(_: *mut sys::fid, _: *mut sys::fid, _: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut sys::fid, _: c_int, _: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn regattr(
    _: *mut sys::fid,
    _: *const sys::fi_mr_attr,
    _: u64,
    out: *mut *mut sys::fid_mr,
) -> c_int {
    // SAFETY: the caller passes a place for the region.
    unsafe { *out = REGION.load(Ordering::Relaxed) };
    0
}

unsafe extern "C" fn writemsg(
    _: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    _: u64,
) -> isize {
    // SAFETY: the caller passes a message.
    POSTED.store(unsafe { (*message).context }, Ordering::Relaxed);
    0
}

unsafe extern "C" fn read(_: *mut sys::fid_cq, entries: *mut c_void, _: usize) -> isize {
    let op_context = POSTED.load(Ordering::Relaxed);
    if op_context.is_null() {
        return -(sys::FI_EAGAIN as isize);
    }
    POSTED.store(ptr::null_mut(), Ordering::Relaxed);
    let entry = sys::fi_cq_tagged_entry { op_context, ..zeroed() };
    // SAFETY: the caller passes room for an entry of this format.
    unsafe { entries.cast::<sys::fi_cq_tagged_entry>().write(entry) };
    1
}

unsafe extern "C" fn getname(_: *mut sys::fid, name: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: the caller passes a buffer of `len` bytes, which is longer than one.
    unsafe { (*name.cast::<u8>(), *len) = (1, 1) };
    0
}

unsafe extern "C" fn insert(
    _: *mut sys::fid_av,
    _: *const c_void,
    _: usize,
    index: *mut sys::fi_addr_t,
    _: u64,
    _: *mut c_void,
) -> c_int {
    // SAFETY: the caller passes a place for the index.
    unsafe { *index = 0 };
    1
}

unsafe extern "C" fn av_open(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_av_attr,
    out: *mut *mut sys::fid_av,
    _: *mut c_void,
) -> c_int {
    let ops = leak(sys::fi_ops_av { size: 0, insert: Some(insert) });
    // SAFETY: the caller passes a place for the object.
    unsafe { *out = leak(sys::fid_av { fid: object(0), ops }) };
    0
}

unsafe extern "C" fn cq_open(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_cq_attr,
    out: *mut *mut sys::fid_cq,
    _: *mut c_void,
) -> c_int {
    let readfrom = ptr::null();
    let ops = leak(sys::fi_ops_cq { size: 0, read: Some(read), readfrom, readerr: None });
    // SAFETY: the caller passes a place for the object.
    unsafe { *out = leak(sys::fid_cq { fid: object(0), ops }) };
    0
}

unsafe extern "C" fn endpoint(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_info,
    out: *mut *mut sys::fid_ep,
    _: *mut c_void,
) -> c_int {
    let mut new: sys::fid_ep = zeroed();
    new.fid = object(sys::FI_CLASS_EP);
    new.cm = leak(sys::fi_ops_cm { size: 0, setname: ptr::null(), getname: Some(getname) });
    new.rma = leak(sys::fi_ops_rma { writemsg: Some(writemsg), ..zeroed() });
    // SAFETY: the caller passes a place for the object.
    unsafe { *out = leak(new) };
    0
}

unsafe extern "C" fn domain(
    _: *mut sys::fid_fabric,
    _: *mut sys::fi_info,
    out: *mut *mut sys::fid_domain,
    _: *mut c_void,
) -> c_int {
    let ops = leak(sys::fi_ops_domain {
        size: 0,
        av_open: Some(av_open),
        cq_open: Some(cq_open),
        endpoint: Some(endpoint),
    });
    let none = ptr::null();
    let mr = leak(sys::fi_ops_mr { size: 0, reg: none, regv: none, regattr: Some(regattr) });
    let region = sys::fid_mr { fid: object(0), mem_desc: ptr::null_mut(), key: 77 };
    REGION.store(leak(region), Ordering::Relaxed);
    // SAFETY: the caller passes a place for the object.
    unsafe { *out = leak(sys::fid_domain { fid: object(sys::FI_CLASS_DOMAIN), ops, mr }) };
    0
}

unsafe extern "C" fn fabric(
    _: *mut sys::fi_fabric_attr,
    out: *mut *mut sys::fid_fabric,
    _: *mut c_void,
) -> c_int {
    let ops = leak(sys::fi_ops_fabric { size: 0, domain: Some(domain) });
    // SAFETY: the caller passes a place for the object.
    unsafe { *out = leak(sys::fid_fabric { fid: object(0), ops, api_version: 0 }) };
    0
}

extern "C" fn version() -> u32 {
    sys::API_VERSION
}

extern "C" fn strerror(_: c_int) -> *const c_char {
    C_NAME.as_ptr()
}

unsafe extern "C" fn dupinfo(_: *const sys::fi_info) -> *mut sys::fi_info {
    let mut info: sys::fi_info = zeroed();
    info.tx_attr = leak(sys::fi_tx_attr { size: 64, iov_limit: 4, ..zeroed() });
    info.rx_attr = leak(sys::fi_rx_attr { size: 64, iov_limit: 4, ..zeroed() });
    info.ep_attr = leak(sys::fi_ep_attr { max_msg_size: 1 << 20, ..zeroed() });
    info.domain_attr = leak(zeroed());
    info.fabric_attr = leak(zeroed());
    leak(info)
}

unsafe extern "C" fn freeinfo(_: *mut sys::fi_info) {}

unsafe extern "C" fn getinfo(
    _: u32,
    _: *const c_char,
    _: *const c_char,
    _: u64,
    hints: *const sys::fi_info,
    out: *mut *mut sys::fi_info,
) -> c_int {
    // SAFETY: the caller passes hints that `dupinfo` returned, and a place for the list. `dupinfo`
    // sets the pointers of `info` that are read here.
    unsafe {
        let info = dupinfo(ptr::null());
        (*info).caps = (*hints).caps;
        let domain = &mut *(*info).domain_attr;
        (domain.threading, domain.mr_key_size) = (sys::FI_THREAD_SAFE, 8);
        domain.name = C_NAME.as_ptr().cast_mut();
        (*(*info).fabric_attr).prov_name = C_NAME.as_ptr().cast_mut();
        *out = info;
    }
    0
}

/// Returns the library's functions.
pub(crate) fn functions() -> sys::Functions {
    // SAFETY: the functions have the signatures of their names.
    let functions = unsafe {
        sys::Functions::from_lookup(|name| {
            Some(match name {
                "fi_version" => version as *const (),
                "fi_getinfo" => getinfo as *const (),
                "fi_dupinfo" => dupinfo as *const (),
                "fi_freeinfo" => freeinfo as *const (),
                "fi_fabric" => fabric as *const (),
                "fi_strerror" => strerror as *const (),
                _ => return None,
            })
        })
    };
    functions.expect("every function")
}
