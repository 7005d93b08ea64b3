//! libfabric's binary interface, as much of it as the peer uses: layouts, constants and the table
//! of exported functions.
//!
//! libfabric exports a handful of symbols; every other call is an inline function in its headers
//! that follows a pointer from an object to a table of operations. The names are libfabric's own,
//! so that this file can be read next to `fabric.h`, `fi_domain.h`, `fi_endpoint.h`, `fi_rma.h`,
//! `fi_eq.h` and `fi_cm.h` of release 1.17 ([`API_VERSION`]).
//!
//! Two kinds of structure are told apart:
//!
//! * structures that *we* allocate and libfabric reads (attributes, completion entries) have their
//!   full length;
//! * structures that *libfabric* allocates (objects, tables of operations, `fi_info`) are only ever
//!   reached through a pointer, so a table stops after the last operation that is used. An
//!   operation that is not used but precedes one that is used is an [`UnusedOperation`].
//!
//! Both are compared with the installed headers by the layout test.

#![allow(non_camel_case_types, reason = "the names are those of libfabric's headers and man pages")]
#![allow(dead_code, reason = "a layout needs every field up to the last one used, read or not")]

use std::ffi::{CStr, c_char, c_int, c_void};

use super::error::FabricError;

/// File name given to the dynamic loader: the soname of libfabric 1.x and 2.x.
pub(super) const LIBRARY_NAME: &str = "libfabric.so.1";

/// The interface version asked for, `FI_VERSION(1, 17)`: the headers that this file mirrors.
pub(super) const API_VERSION: u32 = version(1, 17);

/// Packs a version the way `fi_version` and `fi_getinfo` exchange it.
pub(super) const fn version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

pub(super) const FI_RMA: u64 = 1 << 2;
pub(super) const FI_READ: u64 = 1 << 8;
pub(super) const FI_WRITE: u64 = 1 << 9;
pub(super) const FI_RECV: u64 = 1 << 10;
pub(super) const FI_SEND: u64 = 1 << 11;
pub(super) const FI_TRANSMIT: u64 = FI_SEND;
pub(super) const FI_REMOTE_READ: u64 = 1 << 12;
pub(super) const FI_REMOTE_WRITE: u64 = 1 << 13;
pub(super) const FI_HMEM: u64 = 1 << 47;
pub(super) const FI_SOURCE: u64 = 1 << 57;

pub(super) const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub(super) const FI_MR_ALLOCATED: c_int = 1 << 5;
pub(super) const FI_MR_PROV_KEY: c_int = 1 << 6;
pub(super) const FI_MR_HMEM: c_int = 1 << 10;

pub(super) const FI_ORDER_RMA_WAW: u64 = 1 << 35;

pub(super) const FI_AV_TABLE: c_int = 2;
pub(super) const FI_CQ_FORMAT_CONTEXT: c_int = 1;
pub(super) const FI_WAIT_NONE: c_int = 0;
pub(super) const FI_THREAD_SAFE: c_int = 1;
pub(super) const FI_EP_MSG: c_int = 1;
pub(super) const FI_EP_RDM: c_int = 3;
pub(super) const FI_HMEM_SYSTEM: c_int = 0;

/// `fi_control` command that turns a bound endpoint on.
pub(super) const FI_ENABLE: c_int = 6;

pub(super) const FI_EAGAIN: i32 = 11;
pub(super) const FI_ENODATA: i32 = 61;
pub(super) const FI_EAVAIL: i32 = 259;
pub(super) const FI_ENOKEY: i32 = 266;

/// Index of an endpoint in an address vector.
pub(super) type fi_addr_t = u64;

/// Slot of a table whose operation the peer never calls.
pub(super) type UnusedOperation = *const c_void;

/// `struct iovec` of `<sys/uio.h>`.
#[repr(C)]
pub(super) struct iovec {
    pub(super) iov_base: *const c_void,
    pub(super) iov_len: usize,
}

/// Head of every libfabric object.
#[repr(C)]
pub(super) struct fid {
    pub(super) fclass: usize,
    pub(super) context: *mut c_void,
    pub(super) ops: *const fi_ops,
}

/// Operations that every object has.
#[repr(C)]
pub(super) struct fi_ops {
    pub(super) size: usize,
    pub(super) close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    pub(super) bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    pub(super) control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
}

/// One way of talking to one provider, as found by `fi_getinfo`.
#[repr(C)]
pub(super) struct fi_info {
    pub(super) next: *mut fi_info,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) addr_format: u32,
    pub(super) src_addrlen: usize,
    pub(super) dest_addrlen: usize,
    pub(super) src_addr: *mut c_void,
    pub(super) dest_addr: *mut c_void,
    pub(super) handle: *mut fid,
    pub(super) tx_attr: *mut fi_tx_attr,
    pub(super) rx_attr: *mut fi_rx_attr,
    pub(super) ep_attr: *mut fi_ep_attr,
    pub(super) domain_attr: *mut fi_domain_attr,
    pub(super) fabric_attr: *mut fi_fabric_attr,
    pub(super) nic: *mut c_void,
}

/// Transmit side of an endpoint.
#[repr(C)]
pub(super) struct fi_tx_attr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) inject_size: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
    pub(super) rma_iov_limit: usize,
    pub(super) tclass: u32,
}

/// Receive side of an endpoint.
#[repr(C)]
pub(super) struct fi_rx_attr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) total_buffered_recv: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
}

/// Endpoint as a whole.
#[repr(C)]
pub(super) struct fi_ep_attr {
    pub(super) r#type: c_int,
    pub(super) protocol: u32,
    pub(super) protocol_version: u32,
    pub(super) max_msg_size: usize,
    pub(super) msg_prefix_size: usize,
    pub(super) max_order_raw_size: usize,
    pub(super) max_order_war_size: usize,
    pub(super) max_order_waw_size: usize,
    pub(super) mem_tag_format: u64,
    pub(super) tx_ctx_cnt: usize,
    pub(super) rx_ctx_cnt: usize,
    pub(super) auth_key_size: usize,
    pub(super) auth_key: *mut u8,
}

/// Domain.
#[repr(C)]
pub(super) struct fi_domain_attr {
    pub(super) domain: *mut fid_domain,
    pub(super) name: *mut c_char,
    pub(super) threading: c_int,
    pub(super) control_progress: c_int,
    pub(super) data_progress: c_int,
    pub(super) resource_mgmt: c_int,
    pub(super) av_type: c_int,
    pub(super) mr_mode: c_int,
    pub(super) mr_key_size: usize,
    pub(super) cq_data_size: usize,
    pub(super) cq_cnt: usize,
    pub(super) ep_cnt: usize,
    pub(super) tx_ctx_cnt: usize,
    pub(super) rx_ctx_cnt: usize,
    pub(super) max_ep_tx_ctx: usize,
    pub(super) max_ep_rx_ctx: usize,
    pub(super) max_ep_stx_ctx: usize,
    pub(super) max_ep_srx_ctx: usize,
    pub(super) cntr_cnt: usize,
    pub(super) mr_iov_limit: usize,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) auth_key: *mut u8,
    pub(super) auth_key_size: usize,
    pub(super) max_err_data: usize,
    pub(super) mr_cnt: usize,
    pub(super) tclass: u32,
}

/// Fabric; names the provider.
#[repr(C)]
pub(super) struct fi_fabric_attr {
    pub(super) fabric: *mut fid_fabric,
    pub(super) name: *mut c_char,
    pub(super) prov_name: *mut c_char,
    pub(super) prov_version: u32,
    pub(super) api_version: u32,
}

/// Fabric object.
#[repr(C)]
pub(super) struct fid_fabric {
    pub(super) fid: fid,
    pub(super) ops: *const fi_ops_fabric,
    pub(super) api_version: u32,
}

/// Operations of a fabric, up to `domain`.
#[repr(C)]
pub(super) struct fi_ops_fabric {
    pub(super) size: usize,
    pub(super) domain: Option<
        unsafe extern "C" fn(*mut fid_fabric, *mut fi_info, *mut *mut fid_domain, *mut c_void) -> c_int,
    >,
}

/// Domain object.
#[repr(C)]
pub(super) struct fid_domain {
    pub(super) fid: fid,
    pub(super) ops: *const fi_ops_domain,
    pub(super) mr: *const fi_ops_mr,
}

/// Operations of a domain, up to `endpoint`.
#[repr(C)]
pub(super) struct fi_ops_domain {
    pub(super) size: usize,
    pub(super) av_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_av_attr, *mut *mut fid_av, *mut c_void) -> c_int,
    >,
    pub(super) cq_open: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_cq_attr, *mut *mut fid_cq, *mut c_void) -> c_int,
    >,
    pub(super) endpoint:
        Option<unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int>,
}

/// Registration operations of a domain.
#[repr(C)]
pub(super) struct fi_ops_mr {
    pub(super) size: usize,
    pub(super) reg: UnusedOperation,
    pub(super) regv: UnusedOperation,
    pub(super) regattr:
        Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

/// Memory region object.
#[repr(C)]
pub(super) struct fid_mr {
    pub(super) fid: fid,
    pub(super) mem_desc: *mut c_void,
    pub(super) key: u64,
}

/// What to register, for `fi_mr_regattr`.
///
/// Later releases append fields; a library opened for [`API_VERSION`] does not read them.
#[repr(C)]
pub(super) struct fi_mr_attr {
    pub(super) mr_iov: *const iovec,
    pub(super) iov_count: usize,
    pub(super) access: u64,
    pub(super) offset: u64,
    pub(super) requested_key: u64,
    pub(super) context: *mut c_void,
    pub(super) auth_key_size: usize,
    pub(super) auth_key: *mut u8,
    pub(super) iface: c_int,
    /// A union of device numbers in C; zero for host memory.
    pub(super) device: u64,
}

/// Address vector object.
#[repr(C)]
pub(super) struct fid_av {
    pub(super) fid: fid,
    pub(super) ops: *const fi_ops_av,
}

/// Operations of an address vector, up to `insert`.
#[repr(C)]
pub(super) struct fi_ops_av {
    pub(super) size: usize,
    pub(super) insert: Option<
        unsafe extern "C" fn(*mut fid_av, *const c_void, usize, *mut fi_addr_t, u64, *mut c_void) -> c_int,
    >,
}

/// What an address vector is to be.
#[repr(C)]
pub(super) struct fi_av_attr {
    pub(super) r#type: c_int,
    pub(super) rx_ctx_bits: c_int,
    pub(super) count: usize,
    pub(super) ep_per_node: usize,
    pub(super) name: *const c_char,
    pub(super) map_addr: *mut c_void,
    pub(super) flags: u64,
}

/// Completion queue object.
#[repr(C)]
pub(super) struct fid_cq {
    pub(super) fid: fid,
    pub(super) ops: *const fi_ops_cq,
}

/// Operations of a completion queue, up to `readerr`.
#[repr(C)]
pub(super) struct fi_ops_cq {
    pub(super) size: usize,
    pub(super) read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    pub(super) readfrom: UnusedOperation,
    pub(super) readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
}

/// What a completion queue is to be.
#[repr(C)]
pub(super) struct fi_cq_attr {
    pub(super) size: usize,
    pub(super) flags: u64,
    pub(super) format: c_int,
    pub(super) wait_obj: c_int,
    pub(super) signaling_vector: c_int,
    pub(super) wait_cond: c_int,
    pub(super) wait_set: *mut c_void,
}

/// A completion in the shortest format, `FI_CQ_FORMAT_CONTEXT`.
#[repr(C)]
pub(super) struct fi_cq_entry {
    pub(super) op_context: *mut c_void,
}

/// A failed operation.
///
/// Later releases append `src_addr`; a library opened for [`API_VERSION`] does not write it.
#[repr(C)]
pub(super) struct fi_cq_err_entry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
    pub(super) buf: *mut c_void,
    pub(super) data: u64,
    pub(super) tag: u64,
    pub(super) olen: usize,
    pub(super) err: c_int,
    pub(super) prov_errno: c_int,
    pub(super) err_data: *mut c_void,
    pub(super) err_data_size: usize,
}

/// Endpoint object, up to `rma`.
#[repr(C)]
pub(super) struct fid_ep {
    pub(super) fid: fid,
    pub(super) ops: *const c_void,
    pub(super) cm: *const fi_ops_cm,
    pub(super) msg: *const c_void,
    pub(super) rma: *const fi_ops_rma,
}

/// Connection and naming operations of an endpoint, up to `getname`.
#[repr(C)]
pub(super) struct fi_ops_cm {
    pub(super) size: usize,
    pub(super) setname: UnusedOperation,
    pub(super) getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
}

/// Remote memory access operations of an endpoint, up to `write`.
#[repr(C)]
pub(super) struct fi_ops_rma {
    pub(super) size: usize,
    pub(super) read: UnusedOperation,
    pub(super) readv: UnusedOperation,
    pub(super) readmsg: UnusedOperation,
    pub(super) write: Option<
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
type FiGetinfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const fi_info, *mut *mut fi_info) -> c_int;
type FiDupinfo = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FiFreeinfo = unsafe extern "C" fn(*mut fi_info);
type FiFabric = unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
type FiStrerror = unsafe extern "C" fn(c_int) -> *const c_char;

/// The exported functions that the peer calls.
///
/// An unversioned look-up yields the newest interface of each symbol, which for `fi_getinfo`,
/// `fi_dupinfo` and `fi_freeinfo` is the same one in any given library: the three belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Functions {
    /// `fi_version`: the newest interface that the library implements.
    pub(super) fi_version: FiVersion,
    /// `fi_getinfo`: look for providers.
    pub(super) fi_getinfo: FiGetinfo,
    /// `fi_dupinfo`: copy, or allocate when given null.
    pub(super) fi_dupinfo: FiDupinfo,
    /// `fi_freeinfo`: free a whole list.
    pub(super) fi_freeinfo: FiFreeinfo,
    /// `fi_fabric`: open a fabric.
    pub(super) fi_fabric: FiFabric,
    /// `fi_strerror`: a static string for an error number.
    pub(super) fi_strerror: FiStrerror,
}

impl Functions {
    /// Fills the table from `lookup`, which maps a symbol's name to its address.
    ///
    /// # Errors
    ///
    /// The first error of `lookup`.
    ///
    /// # Safety
    ///
    /// Each address that `lookup` returns is that of libfabric's function of that name, and stays
    /// callable for the rest of the process.
    pub(super) unsafe fn from_lookup(
        mut lookup: impl FnMut(&'static CStr) -> Result<*const c_void, FabricError>,
    ) -> Result<Self, FabricError> {
        macro_rules! symbol {
            ($name:literal as $function:ty) => {{
                let address = lookup($name)?;
                // SAFETY: a data pointer and a function pointer have the same size on every
                // platform with `dlsym`; the caller vouches that the address is the function of
                // that name, whose signature the type repeats, so it is not null either.
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
