//! libibverbs.so.1: its function table, and the layouts and constants of `infiniband/verbs.h`, laid out by hand.
//!
//! Symbols are looked up with their version, since half of them exist as `IBVERBS_1.0` and `IBVERBS_1.1` with
//! different layouts behind. What the header has as inline functions goes through [`Context::ops`], as it does there.
//!
//! Public so that a driver of one's own can be injected with [`Functions::from_lookup`].
//!
//! ```
//! use hmem_p2p::verbs::sys::Functions;
//!
//! // SAFETY: the lookup returns nothing, so there is nothing that it must vouch for.
//! let error = unsafe { Functions::from_lookup(|_, _| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some("ibv_get_device_list@IBVERBS_1.1"));
//! ```

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    mem,
    path::Path,
    ptr,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

bitflags::bitflags! {
    /// `enum ibv_access_flags`, in verbs' own words and values.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: c_uint {
        /// The NIC may write for local work requests.
        const LOCAL_WRITE = 1;
        /// Peers may write; needs LOCAL_WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read.
        const REMOTE_READ = 1 << 2;
        /// Peers may apply atomics; needs LOCAL_WRITE.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to the region.
        const MW_BIND = 1 << 4;
        /// Addresses start at 0, on both sides.
        const ZERO_BASED = 1 << 5;
        /// Pages are brought in when the NIC reaches for them.
        const ON_DEMAND = 1 << 6;
        /// The memory lies in huge pages.
        const HUGETLB = 1 << 7;
        /// PCIe writes may pass each other. A driver may drop it silently.
        const RELAXED_ORDERING = 1 << 20;
    }
}

bitflags::bitflags! {
    /// `enum ibv_device_cap_flags`, as far as this crate looks at them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceCaps: c_uint {
        /// Type 1 windows.
        const MEM_WINDOW = 1 << 17;
        /// Local and remote invalidation, fast registration.
        const MEM_MGT_EXTENSIONS = 1 << 21;
        /// Type 2A windows.
        const MEM_WINDOW_TYPE_2A = 1 << 23;
        /// Type 2B windows.
        const MEM_WINDOW_TYPE_2B = 1 << 24;
    }
}

bitflags::bitflags! {
    /// `enum ibv_qp_attr_mask`, as far as the walk of an RC queue pair needs it.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: c_int {
        /// `IBV_QP_STATE`
        const STATE = 1;
        /// `IBV_QP_ACCESS_FLAGS`
        const ACCESS_FLAGS = 1 << 3;
        /// `IBV_QP_PKEY_INDEX`
        const PKEY_INDEX = 1 << 4;
        /// `IBV_QP_PORT`
        const PORT = 1 << 5;
        /// `IBV_QP_AV`
        const AV = 1 << 7;
        /// `IBV_QP_PATH_MTU`
        const PATH_MTU = 1 << 8;
        /// `IBV_QP_TIMEOUT`
        const TIMEOUT = 1 << 9;
        /// `IBV_QP_RETRY_CNT`
        const RETRY_CNT = 1 << 10;
        /// `IBV_QP_RNR_RETRY`
        const RNR_RETRY = 1 << 11;
        /// `IBV_QP_RQ_PSN`
        const RQ_PSN = 1 << 12;
        /// `IBV_QP_MAX_QP_RD_ATOMIC`
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `IBV_QP_MIN_RNR_TIMER`
        const MIN_RNR_TIMER = 1 << 15;
        /// `IBV_QP_SQ_PSN`
        const SQ_PSN = 1 << 16;
        /// `IBV_QP_MAX_DEST_RD_ATOMIC`
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `IBV_QP_DEST_QPN`
        const DEST_QPN = 1 << 20;
    }
}

bitflags::bitflags! {
    /// `enum ibv_send_flags`, as far as this crate uses them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SendFlags: c_uint {
        /// A completion is wanted.
        const SIGNALED = 1 << 1;
        /// The bytes are copied while posting.
        const INLINE = 1 << 3;
    }
}

macro_rules! numbers {
    ($($(#[doc = $doc:literal])+ $type:ident($repr:ty) { $($name:ident = $value:literal,)+ })+) => {$(
        $(#[doc = $doc])+
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $type(pub $repr);

        impl $type {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($value);
            )+

            /// The name in `infiniband/verbs.h`, where this crate knows it.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)+
                    _ => None,
                }
            }
        }
    )+};
}

numbers! {
    /// `enum ibv_atomic_cap`
    AtomicCap(c_int) {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
        IBV_ATOMIC_GLOB = 2,
    }
    /// `enum ibv_port_state`
    PortState(c_int) {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
    /// The link layers of a port.
    LinkLayer(u8) {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
    /// `enum ibv_wc_status`
    WcStatus(c_int) {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
    }
    /// `enum ibv_wr_opcode`, as far as this crate uses them.
    WrOpcode(c_int) {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_SEND = 2,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
    }
    /// `enum ibv_qp_type`, as far as this crate uses them.
    QpType(c_int) {
        IBV_QPT_RC = 2,
    }
    /// `enum ibv_qp_state`
    QpState(c_int) {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
    }
    /// `enum ibv_mw_type`
    MwType(c_int) {
        IBV_MW_TYPE_1 = 1,
        IBV_MW_TYPE_2 = 2,
    }
    /// `enum ibv_fork_status`
    ForkStatus(c_int) {
        IBV_FORK_DISABLED = 0,
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }
}

/// `IBV_ODP_SUPPORT` of [`OdpCaps::general_caps`].
pub const IBV_ODP_SUPPORT: u64 = 1;
/// `IBV_REREG_MR_CHANGE_ACCESS`
pub const IBV_REREG_MR_CHANGE_ACCESS: c_int = 1 << 2;
/// `IBV_REREG_MR_ERR_CMD`: from this value down the old region may not be used any more.
pub const IBV_REREG_MR_ERR_CMD: c_int = -4;
/// `__VERBS_ABI_IS_EXTENDED`: what [`Context::abi_compat`] holds where a [`VerbsContext`] surrounds it.
pub const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;

/// `struct ibv_device`, opaque: this crate asks the library about it.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    _opaque: [u8; 0],
}

/// A slot of an operations table that this crate does not call.
pub type Unused = Option<unsafe extern "C" fn()>;

/// `struct ibv_context_ops`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
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

/// `struct ibv_context`
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub abi_compat: *mut c_void,
}

/// `struct verbs_context`: what surrounds a [`Context`] whose `abi_compat` says so.
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct VerbsContext {
    pub _before_priv: [Unused; 26],
    pub private: *mut c_void,
    pub query_device_ex:
        Option<unsafe extern "C" fn(*mut Context, *const DeviceExInput, *mut DeviceAttrEx, usize) -> c_int>,
    pub _after: [Unused; 10],
    pub _placeholder: u64,
    pub sz: usize,
    pub context: Context,
}

/// `struct ibv_query_device_ex_input`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DeviceExInput {
    pub comp_mask: u32,
}

/// `struct ibv_odp_caps`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct OdpCaps {
    pub general_caps: u64,
    pub rc_odp_caps: u32,
    pub uc_odp_caps: u32,
    pub ud_odp_caps: u32,
}

/// `struct ibv_device_attr_ex`, as far as `odp_caps`; the call takes the size along.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub odp_caps: OdpCaps,
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
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

/// `struct ibv_port_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
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

/// `union ibv_gid`: 16 bytes in network order, aligned as its 64-bit halves.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Gid {
    pub raw: [u8; 16],
}

/// `struct ibv_pd`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Pd {
    pub context: *mut Context,
    pub handle: u32,
}

/// `struct ibv_mr`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub mw_type: MwType,
}

/// `struct ibv_mw_bind_info`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct MwBindInfo {
    pub mr: *mut Mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// `struct ibv_mw_bind`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct MwBind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_cq`
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Cq {
    pub context: *mut Context,
    pub channel: *mut c_void,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: libc::pthread_mutex_t,
    pub cond: libc::pthread_cond_t,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

/// `struct ibv_qp`
#[repr(C)]
#[allow(missing_docs, reason = "the names are those of the header")]
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

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: QpType,
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
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

/// `struct ibv_sge`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `wr.rdma` of [`SendWr`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct RdmaPart {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// `wr.atomic` of [`SendWr`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct AtomicPart {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// `wr` of [`SendWr`]: which one follows from the opcode.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub union WrPart {
    pub rdma: RdmaPart,
    pub atomic: AtomicPart,
}

/// `bind_mw` of [`SendWr`]; the header's other variant of this union (`tso`) is smaller.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct BindPart {
    pub mw: *mut Mw,
    pub rkey: u32,
    pub bind_info: MwBindInfo,
}

/// `struct ibv_send_wr`
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: WrOpcode,
    pub send_flags: c_uint,
    /// `imm_data` or `invalidate_rkey`.
    pub invalidate_rkey: u32,
    pub wr: WrPart,
    /// `qp_type.xrc.remote_srqn`
    pub remote_srqn: u32,
    pub bind_mw: BindPart,
}

impl SendWr {
    /// A request with nothing in it but what it does.
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

/// `struct ibv_recv_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct Wc {
    pub wr_id: u64,
    pub status: WcStatus,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// `imm_data` or `invalidated_rkey`.
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

/// `ibv_rereg_mr(mr, flags, pd, address, length, access)`
pub type ReregMr = unsafe extern "C" fn(*mut Mr, c_int, *mut Pd, *mut c_void, usize, c_int) -> c_int;

macro_rules! functions {
    (
        required { $($(#[doc = $doc:literal])+ $field:ident: $symbol:ident@$version:literal = $type:ty;)+ }
        optional { $($(#[doc = $odoc:literal])+ $ofield:ident: $osymbol:ident@$oversion:literal = $otype:ty;)+ }
    ) => {
        /// The functions of libibverbs.so.1 that this crate calls.
        #[derive(Clone, Debug)]
        pub struct Functions {
            library: Arc<str>,
            $($(#[doc = $doc])+ pub(crate) $field: $type,)+
            $($(#[doc = $odoc])+ pub(crate) $ofield: Option<$otype>,)+
        }

        impl Functions {
            /// Every symbol that the library must have, with its version.
            pub const SYMBOLS: &[(&str, &str)] = &[$((stringify!($symbol), $version)),+];
            /// Symbols that newer libraries have.
            pub const OPTIONAL: &[(&str, &str)] = &[$((stringify!($osymbol), $oversion)),+];

            /// # Safety
            /// As [`Functions::from_lookup`].
            unsafe fn fill(
                library: &str,
                mut lookup: impl FnMut(&'static str, &'static str) -> Option<*const ()>,
            ) -> Result<Self> {
                Ok(Self {
                    library: library.into(),
                    $($field: {
                        let address = lookup(stringify!($symbol), $version)
                            .filter(|address| !address.is_null())
                            .ok_or_else(|| {
                                lacks_symbol(library, concat!(stringify!($symbol), "@", $version))
                            })?;
                        // SAFETY: the caller promises that what it returns under this name and version is a
                        // function with the signature that the header declares for it, which is the one here.
                        unsafe { mem::transmute::<*const (), $type>(address) }
                    },)+
                    $($ofield: lookup(stringify!($osymbol), $oversion)
                        .filter(|address| !address.is_null())
                        // SAFETY: as above.
                        .map(|address| unsafe { mem::transmute::<*const (), $otype>(address) }),)+
                })
            }
        }
    };
}

functions! {
    required {
        /// `ibv_get_device_list(count)`
        get_device_list: ibv_get_device_list@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut c_int) -> *mut *mut Device;
        /// `ibv_free_device_list(list)`
        free_device_list: ibv_free_device_list@"IBVERBS_1.1" = unsafe extern "C" fn(*mut *mut Device);
        /// `ibv_get_device_name(device)`
        get_device_name: ibv_get_device_name@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Device) -> *const c_char;
        /// `ibv_open_device(device)`
        open_device: ibv_open_device@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Device) -> *mut Context;
        /// `ibv_close_device(context)`
        close_device: ibv_close_device@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Context) -> c_int;
        /// `ibv_query_device(context, attr)`
        query_device: ibv_query_device@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int;
        /// `ibv_query_port(context, port, attr)`: fills the part of the attributes that every version has
        query_port: ibv_query_port@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int;
        /// `ibv_query_gid(context, port, index, gid)`
        query_gid: ibv_query_gid@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
        /// `ibv_alloc_pd(context)`
        alloc_pd: ibv_alloc_pd@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Context) -> *mut Pd;
        /// `ibv_dealloc_pd(pd)`
        dealloc_pd: ibv_dealloc_pd@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Pd) -> c_int;
        /// `ibv_reg_mr(pd, address, length, access)`
        reg_mr: ibv_reg_mr@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        /// `ibv_dereg_mr(mr)`
        dereg_mr: ibv_dereg_mr@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Mr) -> c_int;
        /// `ibv_create_cq(context, entries, context, channel, vector)`
        create_cq: ibv_create_cq@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
        /// `ibv_destroy_cq(cq)`
        destroy_cq: ibv_destroy_cq@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Cq) -> c_int;
        /// `ibv_create_qp(pd, attr)`
        create_qp: ibv_create_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
        /// `ibv_destroy_qp(qp)`
        destroy_qp: ibv_destroy_qp@"IBVERBS_1.1" = unsafe extern "C" fn(*mut Qp) -> c_int;
        /// `ibv_modify_qp(qp, attr, mask)`
        modify_qp: ibv_modify_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
        /// `ibv_query_qp(qp, attr, mask, init)`
        query_qp: ibv_query_qp@"IBVERBS_1.1" =
            unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
        /// `ibv_fork_init()`
        fork_init: ibv_fork_init@"IBVERBS_1.1" = unsafe extern "C" fn() -> c_int;
    }
    optional {
        /// `ibv_reg_mr_iova2(pd, address, length, iova, access)`
        reg_mr_iova2: ibv_reg_mr_iova2@"IBVERBS_1.8" =
            unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
        /// `ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access)`
        reg_dmabuf_mr: ibv_reg_dmabuf_mr@"IBVERBS_1.12" =
            unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
        /// `ibv_rereg_mr(mr, flags, pd, address, length, access)`
        rereg_mr: ibv_rereg_mr@"IBVERBS_1.1" = ReregMr;
        /// `ibv_is_fork_initialized()`
        is_fork_initialized: ibv_is_fork_initialized@"IBVERBS_1.13" = unsafe extern "C" fn() -> ForkStatus;
    }
}

impl Functions {
    /// The name by which the dynamic loader finds the library.
    pub const LIBRARY: &str = "libibverbs.so.1";

    /// Loads the library at `path` and fills the table from it.
    ///
    /// The library stays loaded for the rest of the process.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the library, with the loader's reason, or with the first symbol that it
    /// lacks.
    pub fn load(path: &Path) -> Result<Self> {
        let library = path.display().to_string();
        // SAFETY: loading runs the library's initialisers; the caller names libibverbs, whose initialisers have no
        // precondition.
        let loaded = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|reason| not_loaded(&library, reason))?;
        let handle = loaded.into_raw();
        // SAFETY: the addresses come from the library itself under the names and versions of its own header. It is
        // never unloaded: the handle was given up above, since its drivers leave threads and fork handlers behind.
        unsafe { Self::fill(&library, |symbol, version| versioned(handle, symbol, version)) }
    }

    /// Fills the table from a lookup closure over symbol and version: a driver of the caller's own, such as a test's.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the first of [`Functions::SYMBOLS`] for which `lookup` has nothing.
    ///
    /// # Safety
    /// Each address that `lookup` returns is a function with the signature that `infiniband/verbs.h` declares for that
    /// name, keeps that header's rules about the objects it returns, and stays callable from any thread for as long as a
    /// copy of the table exists.
    pub unsafe fn from_lookup(
        lookup: impl FnMut(&'static str, &'static str) -> Option<*const ()>,
    ) -> Result<Self> {
        // SAFETY: the same promise, made by the caller.
        unsafe { Self::fill("(injected)", lookup) }
    }

    /// The library that the functions came from, as it was named.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }
}

/// `dlvsym`: a symbol in exactly this version.
#[cfg(target_env = "gnu")]
fn versioned(handle: *mut c_void, symbol: &str, version: &str) -> Option<*const ()> {
    let symbol = std::ffi::CString::new(symbol).ok()?;
    let version = std::ffi::CString::new(version).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; both names are NUL-terminated.
    let address = unsafe { libc::dlvsym(handle, symbol.as_ptr(), version.as_ptr()) };
    (!address.is_null()).then_some(address.cast_const().cast())
}

/// `dlsym`: other C libraries know no versions, and take the default one.
#[cfg(not(target_env = "gnu"))]
fn versioned(handle: *mut c_void, symbol: &str, _version: &str) -> Option<*const ()> {
    let symbol = std::ffi::CString::new(symbol).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; the name is NUL-terminated.
    let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    (!address.is_null()).then_some(address.cast_const().cast())
}

fn not_loaded(library: &str, reason: libloading::Error) -> Error {
    let error = Error::new(ErrorKind::Unavailable, "load library")
        .provider("verbs")
        .context("library", library)
        .remedy("install rdma-core's libibverbs, or name its library with Verbs::builder().library(path)");
    match reason {
        libloading::Error::DlOpen { source } => error.caused_by(source),
        other => error.caused_by(other),
    }
}

fn lacks_symbol(library: &str, symbol: &'static str) -> Error {
    Error::new(ErrorKind::Unavailable, "load library")
        .provider("verbs")
        .context("library", library)
        .context("symbol", symbol)
        .remedy("install a libibverbs of rdma-core, version 17 or newer")
}
