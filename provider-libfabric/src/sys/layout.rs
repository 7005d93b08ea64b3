//! Structs and constants of libfabric's headers, with the headers' names.
//!
//! There are two kinds of struct:
//!
//! * Structs that *Rust code* allocates, such as attributes and completion entries, are complete.
//! * Structs that *libfabric* allocates, such as objects, function tables and `fi_info`, are
//!   accessed only through pointers. Their declarations end at the last used field. An unused
//!   function pointer before that field has the type [`UnusedOperation`].
//!
//! `tests/layout.rs` compares both kinds with the headers of releases 1.17 and 2.1.

#![allow(missing_docs, reason = "the names are those of libfabric's headers and man pages")]
#![allow(missing_debug_implementations, reason = "the structs are C data with pointers")]
#![allow(non_camel_case_types, reason = "the names are those of libfabric's headers and man pages")]

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
};

use super::{
    basic::{UnusedOperation, fi_addr_t, fid, iovec},
    transfer::fid_ep,
};

/// The oldest supported release, `FI_VERSION(1, 17)`. Later releases have added fields to some
/// structs. All structs but [`fi_mr_attr`] have the fields of this release.
pub const API_VERSION: u32 = version(1, 17);

/// Encodes a version number as the C macro `FI_VERSION` does.
#[must_use]
pub const fn version(major: u32, minor: u32) -> u32 {
    (major << 16) | minor
}

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_TAGGED: u64 = 1 << 3;
pub const FI_ATOMIC: u64 = 1 << 4;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_TRANSMIT: u64 = FI_SEND;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_MR_DMABUF: u64 = 1 << 40;
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_RMA_PMEM: u64 = 1 << 49;
pub const FI_RMA_EVENT: u64 = 1 << 56;
pub const FI_SOURCE: u64 = 1 << 57;

/// Mode bits of [`fi_info::mode`]: the context of each request points to storage of the provider.
pub const FI_CONTEXT2: u64 = 1 << 52;
pub const FI_CONTEXT: u64 = 1 << 59;

pub const FI_MR_LOCAL: c_int = 1 << 2;
pub const FI_MR_RAW: c_int = 1 << 3;
pub const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub const FI_MR_ALLOCATED: c_int = 1 << 5;
pub const FI_MR_PROV_KEY: c_int = 1 << 6;
pub const FI_MR_RMA_EVENT: c_int = 1 << 8;
pub const FI_MR_ENDPOINT: c_int = 1 << 9;
pub const FI_MR_HMEM: c_int = 1 << 10;

pub const FI_ORDER_RMA_WAW: u64 = 1 << 35;

pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
pub const FI_AV_UNSPEC: c_int = 0;
pub const FI_AV_TABLE: c_int = 2;
pub const FI_CQ_FORMAT_CONTEXT: c_int = 1;
pub const FI_CQ_FORMAT_TAGGED: c_int = 4;
pub const FI_WAIT_NONE: c_int = 0;
pub const FI_THREAD_SAFE: c_int = 1;
pub const FI_THREAD_DOMAIN: c_int = 3;
pub const FI_PROGRESS_AUTO: c_int = 1;
pub const FI_BUS_PCI: c_int = 1;
pub const FI_CLASS_DOMAIN: usize = 2;
pub const FI_CLASS_EP: usize = 3;
pub const FI_EP_MSG: c_int = 1;
pub const FI_EP_RDM: c_int = 3;
pub const FI_HMEM_SYSTEM: c_int = 0;

/// The key of a region that peers cannot access.
pub const FI_KEY_NOTAVAIL: u64 = u64::MAX;

/// `fi_control` command that enables an endpoint or a region.
pub const FI_ENABLE: c_int = 6;
/// `fi_control` command that reads the raw key of a region.
pub const FI_GET_RAW_MR: c_int = 8;
/// `fi_control` command that maps a peer's raw key.
pub const FI_MAP_RAW_MR: c_int = 9;
/// `fi_control` command that unmaps a key.
pub const FI_UNMAP_KEY: c_int = 10;

pub const FI_EOPBADSTATE: i32 = 258;
pub const FI_EBADFLAGS: i32 = 260;
pub const FI_EDOMAIN: i32 = 262;
pub const FI_ENOMR: i32 = 270;
pub const FI_EAGAIN: i32 = 11;
pub const FI_ENOMEM: i32 = 12;
pub const FI_ENOSYS: i32 = 38;
pub const FI_ENODATA: i32 = 61;
pub const FI_EAVAIL: i32 = 259;
pub const FI_ENOKEY: i32 = 266;
pub const FI_ECONNRESET: i32 = 104;
pub const FI_ETIMEDOUT: i32 = 110;
pub const FI_ECANCELED: i32 = 125;
pub const FI_ETRUNC: i32 = 265;

/// An entry of the list that `fi_getinfo` returns: a provider with its attributes. `fi_getinfo`
/// also takes its hints in this struct.
#[repr(C)]
pub struct fi_info {
    pub next: *mut fi_info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut fid,
    pub tx_attr: *mut fi_tx_attr,
    pub rx_attr: *mut fi_rx_attr,
    pub ep_attr: *mut fi_ep_attr,
    pub domain_attr: *mut fi_domain_attr,
    pub fabric_attr: *mut fi_fabric_attr,
    pub nic: *mut fid_nic,
}

/// The hardware behind an [`fi_info`], declared up to `bus_attr`.
#[repr(C)]
pub struct fid_nic {
    pub fid: fid,
    pub device_attr: *mut c_void,
    pub bus_attr: *mut fi_bus_attr,
}

/// Bus address of a NIC. In C the PCI fields are those of a struct in a union.
#[repr(C)]
pub struct fi_bus_attr {
    pub bus_type: c_int,
    pub attr: fi_pci_attr,
}

/// PCI address of a NIC.
#[repr(C)]
pub struct fi_pci_attr {
    pub domain_id: u16,
    pub bus_id: u8,
    pub device_id: u8,
    pub function_id: u8,
}

/// Attributes of an endpoint's transmit side.
#[repr(C)]
pub struct fi_tx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

/// Attributes of an endpoint's receive side.
#[repr(C)]
pub struct fi_rx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

/// Attributes of an endpoint, as part of [`fi_info`].
#[repr(C)]
pub struct fi_ep_attr {
    pub r#type: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order_raw_size: usize,
    pub max_order_war_size: usize,
    pub max_order_waw_size: usize,
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

/// Attributes of a domain, as part of [`fi_info`].
#[repr(C)]
pub struct fi_domain_attr {
    pub domain: *mut fid_domain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

/// Attributes of a fabric, as part of [`fi_info`], with the provider's name.
#[repr(C)]
pub struct fi_fabric_attr {
    pub fabric: *mut fid_fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

/// libfabric's fabric object.
#[repr(C)]
pub struct fid_fabric {
    pub fid: fid,
    pub ops: *const fi_ops_fabric,
    pub api_version: u32,
}

/// Function table of a fabric, declared up to `domain`.
#[repr(C)]
pub struct fi_ops_fabric {
    pub size: usize,
    pub domain: Option<
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
pub struct fid_domain {
    pub fid: fid,
    pub ops: *const fi_ops_domain,
    pub mr: *const fi_ops_mr,
}

/// Function table of a domain, declared up to `endpoint`.
#[repr(C)]
pub struct fi_ops_domain {
    pub size: usize,
    pub av_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_av_attr,
            *mut *mut fid_av,
            *mut c_void,
        ) -> c_int,
    >,
    pub cq_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_cq_attr,
            *mut *mut fid_cq,
            *mut c_void,
        ) -> c_int,
    >,
    pub endpoint: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int,
    >,
}

/// Table of a domain's registration functions.
#[repr(C)]
pub struct fi_ops_mr {
    pub size: usize,
    pub reg: UnusedOperation,
    pub regv: UnusedOperation,
    pub regattr:
        Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

/// libfabric's memory region object.
#[repr(C)]
pub struct fid_mr {
    pub fid: fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

/// Attributes of a registration, for `fi_mr_regattr`, as release 2.1 declares them.
///
/// Earlier releases have fewer fields. The library reads only the fields of the API version for
/// which the domain was opened, so a longer structure suits every version.
#[repr(C)]
pub struct fi_mr_attr {
    /// The address of the ranges, or of [`fi_mr_dmabuf`] structs with [`FI_MR_DMABUF`]. In C this
    /// field is a union.
    pub mr_iov: *const iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: c_int,
    /// Device number of the memory, or 0 for host memory. In C this field is a union.
    pub device: u64,
    /// New in release 1.19.
    pub hmem_data: *mut c_void,
    /// New in release 1.22.
    pub page_size: usize,
    /// New in release 2.0.
    pub base_mr: *const fid_mr,
    /// New in release 2.0.
    pub sub_mr_cnt: usize,
}

impl fi_mr_attr {
    /// Attributes without a range.
    pub const EMPTY: Self = Self {
        mr_iov: ptr::null(),
        iov_count: 0,
        access: 0,
        offset: 0,
        requested_key: 0,
        context: ptr::null_mut(),
        auth_key_size: 0,
        auth_key: ptr::null_mut(),
        iface: FI_HMEM_SYSTEM,
        device: 0,
        hmem_data: ptr::null_mut(),
        page_size: 0,
        base_mr: ptr::null(),
        sub_mr_cnt: 0,
    };
}

/// A range of a dma-buf, since 1.20.
#[repr(C)]
pub struct fi_mr_dmabuf {
    pub fd: c_int,
    pub offset: u64,
    pub len: usize,
    /// The address of the first byte of the dma-buf. The range begins `offset` bytes later.
    pub base_addr: *mut c_void,
}

/// Argument of [`FI_GET_RAW_MR`].
#[repr(C)]
pub struct fi_mr_raw_attr {
    pub flags: u64,
    pub base_addr: *mut u64,
    pub raw_key: *mut u8,
    pub key_size: *mut usize,
}

/// Argument of [`FI_MAP_RAW_MR`].
#[repr(C)]
pub struct fi_mr_map_raw {
    pub flags: u64,
    pub base_addr: u64,
    pub raw_key: *mut u8,
    pub key_size: usize,
    pub key: *mut u64,
}

/// libfabric's address vector object.
#[repr(C)]
pub struct fid_av {
    pub fid: fid,
    pub ops: *const fi_ops_av,
}

/// Function table of an address vector, declared up to `insert`.
#[repr(C)]
pub struct fi_ops_av {
    pub size: usize,
    pub insert: Option<
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
pub struct fi_av_attr {
    pub r#type: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

/// libfabric's completion queue object.
#[repr(C)]
pub struct fid_cq {
    pub fid: fid,
    pub ops: *const fi_ops_cq,
}

/// Function table of a completion queue, declared up to `readerr`.
#[repr(C)]
pub struct fi_ops_cq {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    pub readfrom: UnusedOperation,
    pub readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
}

/// Attributes that open a completion queue.
#[repr(C)]
pub struct fi_cq_attr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

/// A completion in the shortest format, `FI_CQ_FORMAT_CONTEXT`.
#[repr(C)]
pub struct fi_cq_entry {
    pub op_context: *mut c_void,
}

/// A completion in the longest format, `FI_CQ_FORMAT_TAGGED`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct fi_cq_tagged_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
}

/// An error entry of a completion queue: the completion of a failed operation.
///
/// Later releases add the field `src_addr`. A library that is opened for [`API_VERSION`] does not
/// write it.
#[repr(C)]
pub struct fi_cq_err_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}
