//! C declarations of libfabric: the structs, constants and exported functions that the benchmarks
//! and their tests use.
//!
//! libfabric exports only a few functions. Every other call is an inline function in a header,
//! which calls through an object's table of function pointers. The names are libfabric's own, so
//! that this file can be compared with `fabric.h`, `fi_domain.h`, `fi_endpoint.h`, `fi_rma.h`,
//! `fi_eq.h` and `fi_cm.h` of release 1.17 ([`API_VERSION`]).
//!
//! There are two kinds of struct:
//!
//! * Structs that *Rust code* allocates, such as attributes and completion entries, are complete.
//! * Structs that *libfabric* allocates, such as objects, function tables and `fi_info`, are
//!   accessed only through pointers. Their declarations end at the last used field. An unused
//!   function pointer before that field has the type [`UnusedOperation`].
//!
//! `tests/libfabric_peer` compares both kinds with the installed headers.

#![allow(non_camel_case_types, reason = "the names are those of libfabric's headers and man pages")]
#![allow(dead_code, reason = "a layout needs every field up to the last one used, read or not")]

use std::ffi::{CStr, c_char, c_int, c_void};

use super::error::FabricError;

/// File name for the dynamic loader: the soname of libfabric 1.x and 2.x.
pub(crate) const LIBRARY_NAME: &str = "libfabric.so.1";

/// The requested API version, `FI_VERSION(1, 17)`. This file declares that version's structs.
pub(crate) const API_VERSION: u32 = version(1, 17);

/// Encodes a version number as the C macro `FI_VERSION` does.
pub(crate) const fn version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

pub(crate) const FI_RMA: u64 = 1 << 2;
pub(crate) const FI_READ: u64 = 1 << 8;
pub(crate) const FI_WRITE: u64 = 1 << 9;
pub(crate) const FI_RECV: u64 = 1 << 10;
pub(crate) const FI_SEND: u64 = 1 << 11;
pub(crate) const FI_TRANSMIT: u64 = FI_SEND;
pub(crate) const FI_REMOTE_READ: u64 = 1 << 12;
pub(crate) const FI_REMOTE_WRITE: u64 = 1 << 13;
pub(crate) const FI_HMEM: u64 = 1 << 47;
pub(crate) const FI_SOURCE: u64 = 1 << 57;

pub(crate) const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub(crate) const FI_MR_ALLOCATED: c_int = 1 << 5;
pub(crate) const FI_MR_PROV_KEY: c_int = 1 << 6;
pub(crate) const FI_MR_HMEM: c_int = 1 << 10;

pub(crate) const FI_ORDER_RMA_WAW: u64 = 1 << 35;

pub(crate) const FI_AV_TABLE: c_int = 2;
pub(crate) const FI_CQ_FORMAT_CONTEXT: c_int = 1;
pub(crate) const FI_WAIT_NONE: c_int = 0;
pub(crate) const FI_THREAD_SAFE: c_int = 1;
pub(crate) const FI_EP_MSG: c_int = 1;
pub(crate) const FI_EP_RDM: c_int = 3;
pub(crate) const FI_HMEM_SYSTEM: c_int = 0;

/// `fi_control` command that enables an endpoint.
pub(crate) const FI_ENABLE: c_int = 6;

pub(crate) const FI_EAGAIN: i32 = 11;
pub(crate) const FI_ENODATA: i32 = 61;
pub(crate) const FI_EAVAIL: i32 = 259;
pub(crate) const FI_ENOKEY: i32 = 266;

/// Index of an endpoint in an address vector.
pub(crate) type fi_addr_t = u64;

/// A function pointer that the benchmarks never call.
pub(crate) type UnusedOperation = *const c_void;

/// `struct iovec` of `<sys/uio.h>`.
#[repr(C)]
pub(crate) struct iovec {
    pub(crate) iov_base: *const c_void,
    pub(crate) iov_len: usize,
}

/// First field of every libfabric object.
#[repr(C)]
pub(crate) struct fid {
    pub(crate) fclass: usize,
    pub(crate) context: *mut c_void,
    pub(crate) ops: *const fi_ops,
}

/// Table of the functions that every libfabric object has.
#[repr(C)]
pub(crate) struct fi_ops {
    pub(crate) size: usize,
    pub(crate) close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    pub(crate) bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    pub(crate) control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
}

/// An entry of the list that `fi_getinfo` returns: a provider with its attributes. `fi_getinfo`
/// also takes its hints in this struct.
#[repr(C)]
pub(crate) struct fi_info {
    pub(crate) next: *mut fi_info,
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) addr_format: u32,
    pub(crate) src_addrlen: usize,
    pub(crate) dest_addrlen: usize,
    pub(crate) src_addr: *mut c_void,
    pub(crate) dest_addr: *mut c_void,
    pub(crate) handle: *mut fid,
    pub(crate) tx_attr: *mut fi_tx_attr,
    pub(crate) rx_attr: *mut fi_rx_attr,
    pub(crate) ep_attr: *mut fi_ep_attr,
    pub(crate) domain_attr: *mut fi_domain_attr,
    pub(crate) fabric_attr: *mut fi_fabric_attr,
    pub(crate) nic: *mut c_void,
}

/// Attributes of an endpoint's transmit side.
#[repr(C)]
pub(crate) struct fi_tx_attr {
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) op_flags: u64,
    pub(crate) msg_order: u64,
    pub(crate) comp_order: u64,
    pub(crate) inject_size: usize,
    pub(crate) size: usize,
    pub(crate) iov_limit: usize,
    pub(crate) rma_iov_limit: usize,
    pub(crate) tclass: u32,
}

/// Attributes of an endpoint's receive side.
#[repr(C)]
pub(crate) struct fi_rx_attr {
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) op_flags: u64,
    pub(crate) msg_order: u64,
    pub(crate) comp_order: u64,
    pub(crate) total_buffered_recv: usize,
    pub(crate) size: usize,
    pub(crate) iov_limit: usize,
}

/// Attributes of an endpoint, as part of [`fi_info`].
#[repr(C)]
pub(crate) struct fi_ep_attr {
    pub(crate) r#type: c_int,
    pub(crate) protocol: u32,
    pub(crate) protocol_version: u32,
    pub(crate) max_msg_size: usize,
    pub(crate) msg_prefix_size: usize,
    pub(crate) max_order_raw_size: usize,
    pub(crate) max_order_war_size: usize,
    pub(crate) max_order_waw_size: usize,
    pub(crate) mem_tag_format: u64,
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) auth_key_size: usize,
    pub(crate) auth_key: *mut u8,
}

/// Attributes of a domain, as part of [`fi_info`].
#[repr(C)]
pub(crate) struct fi_domain_attr {
    pub(crate) domain: *mut fid_domain,
    pub(crate) name: *mut c_char,
    pub(crate) threading: c_int,
    pub(crate) control_progress: c_int,
    pub(crate) data_progress: c_int,
    pub(crate) resource_mgmt: c_int,
    pub(crate) av_type: c_int,
    pub(crate) mr_mode: c_int,
    pub(crate) mr_key_size: usize,
    pub(crate) cq_data_size: usize,
    pub(crate) cq_cnt: usize,
    pub(crate) ep_cnt: usize,
    pub(crate) tx_ctx_cnt: usize,
    pub(crate) rx_ctx_cnt: usize,
    pub(crate) max_ep_tx_ctx: usize,
    pub(crate) max_ep_rx_ctx: usize,
    pub(crate) max_ep_stx_ctx: usize,
    pub(crate) max_ep_srx_ctx: usize,
    pub(crate) cntr_cnt: usize,
    pub(crate) mr_iov_limit: usize,
    pub(crate) caps: u64,
    pub(crate) mode: u64,
    pub(crate) auth_key: *mut u8,
    pub(crate) auth_key_size: usize,
    pub(crate) max_err_data: usize,
    pub(crate) mr_cnt: usize,
    pub(crate) tclass: u32,
}

/// Attributes of a fabric, as part of [`fi_info`], with the provider's name.
#[repr(C)]
pub(crate) struct fi_fabric_attr {
    pub(crate) fabric: *mut fid_fabric,
    pub(crate) name: *mut c_char,
    pub(crate) prov_name: *mut c_char,
    pub(crate) prov_version: u32,
    pub(crate) api_version: u32,
}

/// libfabric's fabric object.
#[repr(C)]
pub(crate) struct fid_fabric {
    pub(crate) fid: fid,
    pub(crate) ops: *const fi_ops_fabric,
    pub(crate) api_version: u32,
}

/// Function table of a fabric, declared up to `domain`.
#[repr(C)]
pub(crate) struct fi_ops_fabric {
    pub(crate) size: usize,
    pub(crate) domain: Option<
        unsafe extern "C" fn(
            *mut fid_fabric,
            *mut fi_info,
            *mut *mut fid_domain,
            *mut c_void,
        ) -> c_int,
    >,
}

/// libfabric's domain object.
#[repr(C)]
pub(crate) struct fid_domain {
    pub(crate) fid: fid,
    pub(crate) ops: *const fi_ops_domain,
    pub(crate) mr: *const fi_ops_mr,
}

/// Function table of a domain, declared up to `endpoint`.
#[repr(C)]
pub(crate) struct fi_ops_domain {
    pub(crate) size: usize,
    pub(crate) av_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_av_attr,
            *mut *mut fid_av,
            *mut c_void,
        ) -> c_int,
    >,
    pub(crate) cq_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_cq_attr,
            *mut *mut fid_cq,
            *mut c_void,
        ) -> c_int,
    >,
    pub(crate) endpoint: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int,
    >,
}

/// Table of a domain's registration functions.
#[repr(C)]
pub(crate) struct fi_ops_mr {
    pub(crate) size: usize,
    pub(crate) reg: UnusedOperation,
    pub(crate) regv: UnusedOperation,
    pub(crate) regattr:
        Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

/// libfabric's memory region object.
#[repr(C)]
pub(crate) struct fid_mr {
    pub(crate) fid: fid,
    pub(crate) mem_desc: *mut c_void,
    pub(crate) key: u64,
}

/// Attributes of a registration, for `fi_mr_regattr`.
///
/// Later releases have more fields. A library that is opened for [`API_VERSION`] does not read
/// them.
#[repr(C)]
pub(crate) struct fi_mr_attr {
    pub(crate) mr_iov: *const iovec,
    pub(crate) iov_count: usize,
    pub(crate) access: u64,
    pub(crate) offset: u64,
    pub(crate) requested_key: u64,
    pub(crate) context: *mut c_void,
    pub(crate) auth_key_size: usize,
    pub(crate) auth_key: *mut u8,
    pub(crate) iface: c_int,
    /// Device number of the memory, or 0 for host memory. In C this field is a union.
    pub(crate) device: u64,
}

/// libfabric's address vector object.
#[repr(C)]
pub(crate) struct fid_av {
    pub(crate) fid: fid,
    pub(crate) ops: *const fi_ops_av,
}

/// Function table of an address vector, declared up to `insert`.
#[repr(C)]
pub(crate) struct fi_ops_av {
    pub(crate) size: usize,
    pub(crate) insert: Option<
        unsafe extern "C" fn(
            *mut fid_av,
            *const c_void,
            usize,
            *mut fi_addr_t,
            u64,
            *mut c_void,
        ) -> c_int,
    >,
}

/// Attributes that open an address vector.
#[repr(C)]
pub(crate) struct fi_av_attr {
    pub(crate) r#type: c_int,
    pub(crate) rx_ctx_bits: c_int,
    pub(crate) count: usize,
    pub(crate) ep_per_node: usize,
    pub(crate) name: *const c_char,
    pub(crate) map_addr: *mut c_void,
    pub(crate) flags: u64,
}

/// libfabric's completion queue object.
#[repr(C)]
pub(crate) struct fid_cq {
    pub(crate) fid: fid,
    pub(crate) ops: *const fi_ops_cq,
}

/// Function table of a completion queue, declared up to `readerr`.
#[repr(C)]
pub(crate) struct fi_ops_cq {
    pub(crate) size: usize,
    pub(crate) read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    pub(crate) readfrom: UnusedOperation,
    pub(crate) readerr:
        Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
}

/// Attributes that open a completion queue.
#[repr(C)]
pub(crate) struct fi_cq_attr {
    pub(crate) size: usize,
    pub(crate) flags: u64,
    pub(crate) format: c_int,
    pub(crate) wait_obj: c_int,
    pub(crate) signaling_vector: c_int,
    pub(crate) wait_cond: c_int,
    pub(crate) wait_set: *mut c_void,
}

/// A completion in the shortest format, `FI_CQ_FORMAT_CONTEXT`.
#[repr(C)]
pub(crate) struct fi_cq_entry {
    pub(crate) op_context: *mut c_void,
}

/// An error entry of a completion queue: the completion of a failed operation.
///
/// Later releases add the field `src_addr`. A library that is opened for [`API_VERSION`] does not
/// write it.
#[repr(C)]
pub(crate) struct fi_cq_err_entry {
    pub(crate) op_context: *mut c_void,
    pub(crate) flags: u64,
    pub(crate) len: usize,
    pub(crate) buf: *mut c_void,
    pub(crate) data: u64,
    pub(crate) tag: u64,
    pub(crate) olen: usize,
    pub(crate) err: c_int,
    pub(crate) prov_errno: c_int,
    pub(crate) err_data: *mut c_void,
    pub(crate) err_data_size: usize,
}

/// libfabric's endpoint object, declared up to `rma`.
#[repr(C)]
pub(crate) struct fid_ep {
    pub(crate) fid: fid,
    pub(crate) ops: *const c_void,
    pub(crate) cm: *const fi_ops_cm,
    pub(crate) msg: *const c_void,
    pub(crate) rma: *const fi_ops_rma,
}

/// Table of an endpoint's connection and naming functions, declared up to `getname`.
#[repr(C)]
pub(crate) struct fi_ops_cm {
    pub(crate) size: usize,
    pub(crate) setname: UnusedOperation,
    pub(crate) getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
}

/// Table of an endpoint's RMA functions, declared up to `write`.
#[repr(C)]
pub(crate) struct fi_ops_rma {
    pub(crate) size: usize,
    pub(crate) read: UnusedOperation,
    pub(crate) readv: UnusedOperation,
    pub(crate) readmsg: UnusedOperation,
    pub(crate) write: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            fi_addr_t,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
}

type FiVersion = unsafe extern "C" fn() -> u32;
type FiGetinfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const fi_info,
    *mut *mut fi_info,
) -> c_int;
type FiDupinfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FiFreeinfo = unsafe extern "C" fn(*mut fi_info);
type FiFabric =
    unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
type FiStrerror = unsafe extern "C" fn(c_int) -> *const c_char;

/// The exported libfabric functions that the benchmarks call.
///
/// `dlsym` returns the newest version of each symbol. The newest versions of `fi_getinfo`,
/// `fi_dupinfo` and `fi_freeinfo` all use one `fi_info` layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Functions {
    /// `fi_version`: returns the newest API version that the library supports.
    pub(crate) fi_version: FiVersion,
    /// `fi_getinfo`: returns a list of providers.
    pub(crate) fi_getinfo: FiGetinfo,
    /// `fi_dupinfo`: copies an `fi_info`, or allocates an empty one if the argument is null.
    pub(crate) fi_dupinfo: FiDupinfo,
    /// `fi_freeinfo`: frees a list of `fi_info`.
    pub(crate) fi_freeinfo: FiFreeinfo,
    /// `fi_fabric`: opens a fabric.
    pub(crate) fi_fabric: FiFabric,
    /// `fi_strerror`: returns a static description of an error number.
    pub(crate) fi_strerror: FiStrerror,
}

impl Functions {
    /// Looks up each function by `lookup`, which maps a symbol's name to its address.
    ///
    /// # Errors
    ///
    /// Returns the first error of `lookup`.
    ///
    /// # Safety
    ///
    /// Each address that `lookup` returns must be that of libfabric's function of this name, and
    /// must stay callable until the process ends.
    pub(crate) unsafe fn from_lookup(
        mut lookup: impl FnMut(&'static CStr) -> Result<*const c_void, FabricError>,
    ) -> Result<Self, FabricError> {
        macro_rules! symbol {
            ($name:literal as $function:ty) => {{
                let address = lookup($name)?;
                // SAFETY: data and function pointers have the same size on every platform with
                // `dlsym`. The caller guarantees that the address is the function of that name, so
                // it is not null and has the type that libfabric's header declares.
                unsafe { std::mem::transmute::<*const c_void, $function>(address) }
            }};
        }
        Ok(Self {
            fi_version: symbol!(c"fi_version" as FiVersion),
            fi_getinfo: symbol!(c"fi_getinfo" as FiGetinfo),
            fi_dupinfo: symbol!(c"fi_dupinfo" as FiDupinfo),
            fi_freeinfo: symbol!(c"fi_freeinfo" as FiFreeinfo),
            fi_fabric: symbol!(c"fi_fabric" as FiFabric),
            fi_strerror: symbol!(c"fi_strerror" as FiStrerror),
        })
    }
}
