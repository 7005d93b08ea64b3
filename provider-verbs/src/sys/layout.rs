//! Structures of `infiniband/verbs.h`, with the field names and field order of the header.

#![allow(missing_docs, reason = "the names are those of the header")]

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
};

use super::codes::{
    AtomicCap, EventType, LinkLayer, MwType, PortState, QpState, QpType, WcOpcode, WcStatus,
    WrOpcode,
};

/// `struct ibv_device`. This crate uses only pointers to it and reads none of its fields.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    _opaque: [u8; 0],
}

/// A function pointer in a driver's table that this crate does not call.
pub type Unused = Option<unsafe extern "C" fn()>;

/// `struct ibv_context_ops`: a driver's table of functions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ContextOps {
    pub _compat_before_mw: [Unused; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut Pd, MwType) -> *mut Mw>,
    pub bind_mw: Option<unsafe extern "C" fn(*mut Qp, *mut Mw, *mut MwBind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    pub _compat_create_cq: Unused,
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub _compat_cq_srq: [Unused; 7],
    pub post_srq_recv: Unused,
    pub _compat_qp: [Unused; 4],
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub _compat_after: [Unused; 5],
}

/// `struct ibv_context`: an open device.
#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

/// `struct verbs_context`. It contains a [`Context`] whose `abi_compat` marks the extension.
#[repr(C)]
pub struct VerbsContext {
    pub _before_priv: [Unused; 26],
    pub private: *mut c_void,
    pub query_device_ex: Option<
        unsafe extern "C" fn(*mut Context, *const DeviceExInput, *mut DeviceAttrEx, usize) -> c_int,
    >,
    pub _after: [Unused; 10],
    pub _placeholder: u64,
    pub sz: usize,
    pub context: Context,
}

/// `struct ibv_query_device_ex_input`: the reserved argument of `ibv_query_device_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceExInput {
    pub comp_mask: u32,
}

/// `struct ibv_odp_caps`: support of a device for on-demand paging.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct OdpCaps {
    pub general_caps: u64,
    pub rc_odp_caps: u32,
    pub uc_odp_caps: u32,
    pub ud_odp_caps: u32,
}

/// `struct ibv_device_attr_ex` up to the field `odp_caps`. A query passes the size of this
/// structure, so the library writes no later field.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub odp_caps: OdpCaps,
}

/// `struct ibv_device_attr`: properties and limits of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: AtomicCap,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`: properties of a port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PortAttr {
    pub state: PortState,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: LinkLayer,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// `union ibv_gid`: 16 bytes in network byte order, with the alignment of a `u64`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid {
    pub raw: [u8; 16],
}

/// `struct ibv_pd`: a protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

/// `struct ibv_mr`: a registered memory region with its keys.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`: a memory window.
#[repr(C)]
#[derive(Debug)]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub mw_type: MwType,
}

/// `struct ibv_mw_bind_info`: the range and the rights of a bind of a memory window.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MwBindInfo {
    pub mr: *mut Mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// `struct ibv_mw_bind`: the argument of `ibv_bind_mw`, a bind of a type 1 window.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MwBind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_comp_channel`: a channel for completion events.
#[repr(C)]
#[derive(Debug)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// `struct ibv_cq`: a completion queue.
#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

/// The object of an [`AsyncEvent`]. The type of the event tells which field is valid.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "only the event's type tells the valid field")]
pub union EventElement {
    pub cq: *mut Cq,
    pub qp: *mut Qp,
    pub srq: *mut c_void,
    pub port_num: c_int,
}

/// `struct ibv_async_event`: an asynchronous event of a context.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_debug_implementations, reason = "the element has no debug form")]
pub struct AsyncEvent {
    pub element: EventElement,
    pub event_type: EventType,
}

/// `struct ibv_qp`: a queue pair.
#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub handle: u32,
    pub qp_num: u32,
    pub state: QpState,
    pub qp_type: QpType,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub events_completed: u32,
}

/// `struct ibv_qp_cap`: the limits of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`: the argument of `ibv_create_qp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: QpType,
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`: the GID of a peer and the route to the peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`: the network address of a peer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`: the attributes that `ibv_modify_qp` sets and `ibv_query_qp` returns.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttr {
    pub qp_state: QpState,
    pub cur_qp_state: QpState,
    pub path_mtu: c_int,
    pub path_mig_state: c_int,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_sge`: a segment of local memory in a work request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `wr.rdma` of [`SendWr`]: the remote memory of an RMA request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RdmaPart {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// `wr.atomic` of [`SendWr`]: the remote memory and the operands of an atomic request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AtomicPart {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// `wr` of [`SendWr`], a union of arguments. The opcode of the request selects the field.
#[repr(C)]
#[derive(Clone, Copy)]
pub union WrPart {
    pub rdma: RdmaPart,
    pub atomic: AtomicPart,
}

/// `bind_mw` of [`SendWr`]: the arguments of a bind of a type 2 window. The union's other field
/// (`tso`) is smaller.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BindPart {
    pub mw: *mut Mw,
    pub rkey: u32,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_send_wr`: a work request for the send queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: WrOpcode,
    pub send_flags: c_uint,
    /// `imm_data` in network byte order, or `invalidate_rkey`. The opcode selects the meaning.
    pub invalidate_rkey: u32,
    pub wr: WrPart,
    /// `qp_type.xrc.remote_srqn`: a number that only XRC queue pairs use.
    pub remote_srqn: u32,
    pub bind_mw: BindPart,
}

impl SendWr {
    /// Creates a work request with the given opcode and `wr_id`. All other fields are zero.
    #[must_use]
    pub const fn new(opcode: WrOpcode, wr_id: u64) -> Self {
        let bind_info = MwBindInfo { mr: ptr::null_mut(), addr: 0, length: 0, mw_access_flags: 0 };
        Self {
            wr_id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags: 0,
            invalidate_rkey: 0,
            wr: WrPart { atomic: AtomicPart { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
            remote_srqn: 0,
            bind_mw: BindPart { mw: ptr::null_mut(), rkey: 0, bind_info },
        }
    }
}

/// `struct ibv_recv_wr`: a work request for the receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`: a work completion.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: WcStatus,
    pub opcode: WcOpcode,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// `imm_data` in network byte order, or `invalidated_rkey`. `wc_flags` selects the meaning.
    pub invalidated_rkey: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

macro_rules! opaque_debug {
    ($($name:ident),+) => {$(
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )+};
}

opaque_debug!(Context, VerbsContext, Cq, Qp, WrPart, SendWr);
