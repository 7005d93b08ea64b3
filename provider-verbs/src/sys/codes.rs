//! Constants of `infiniband/verbs.h`: bit flags, and enumerations with the names of their values.

use std::ffi::{c_int, c_uint};

bitflags::bitflags! {
    /// `enum ibv_access_flags`. The names and values are those of verbs.
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
        /// The first byte of the region has address 0, in local and remote requests.
        const ZERO_BASED = 1 << 5;
        /// Pages are not pinned. The NIC faults them in on access.
        const ON_DEMAND = 1 << 6;
        /// The caller states that the memory lies in huge pages.
        const HUGETLB = 1 << 7;
        /// The NIC may reorder its PCIe writes. A driver may ignore the flag silently.
        const RELAXED_ORDERING = 1 << 20;
    }
}

bitflags::bitflags! {
    /// `enum ibv_device_cap_flags`: the values that this crate reads.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceCaps: c_uint {
        /// The device supports type 1 windows.
        const MEM_WINDOW = 1 << 17;
        /// The device supports local and remote invalidation, and fast registration.
        const MEM_MGT_EXTENSIONS = 1 << 21;
        /// The device supports type 2A windows.
        const MEM_WINDOW_TYPE_2A = 1 << 23;
        /// The device supports type 2B windows.
        const MEM_WINDOW_TYPE_2B = 1 << 24;
    }
}

bitflags::bitflags! {
    /// `enum ibv_qp_attr_mask`: the values that connecting an RC queue pair needs.
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
    /// `enum ibv_send_flags`: the values that this crate uses.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SendFlags: c_uint {
        /// The request gives a completion when it succeeds.
        const SIGNALED = 1 << 1;
        /// The post copies the bytes, so the memory may be reused at once (inline send).
        const INLINE = 1 << 3;
    }
}

bitflags::bitflags! {
    /// `enum ibv_wc_flags`: the values that this crate reads.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WcFlags: c_uint {
        /// The completion carries immediate data.
        const WITH_IMM = 1 << 1;
        /// The checksums of the packet are correct.
        const IP_CSUM_OK = 1 << 2;
        /// The completion names the key that the NIC invalidated.
        const WITH_INV = 1 << 3;
    }
}

macro_rules! numbers {
    ($(
        $(#[doc = $doc:literal])+ $type:ident($repr:ty) { $($name:ident = $value:literal,)+ }
    )+) => {$(
        $(#[doc = $doc])+
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $type(pub $repr);

        impl $type {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                pub const $name: Self = Self($value);
            )+

            /// Returns the name in `infiniband/verbs.h`, if this crate knows it.
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
    /// Values of `link_layer` in `ibv_port_attr`.
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
    /// `enum ibv_wc_opcode`: the values that this crate reads.
    WcOpcode(c_int) {
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    /// `enum ibv_wr_opcode`: the values that this crate uses.
    WrOpcode(c_int) {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
    }
    /// `enum ibv_qp_type`: the values that this crate uses.
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

/// `IBV_ODP_SUPPORT`, a bit of [`OdpCaps::general_caps`](super::OdpCaps::general_caps).
pub const IBV_ODP_SUPPORT: u64 = 1;
/// `IBV_REREG_MR_CHANGE_ACCESS`
pub const IBV_REREG_MR_CHANGE_ACCESS: c_int = 1 << 2;
/// `IBV_REREG_MR_ERR_CMD`. After a failure with this value or a lower one, the old region cannot be
/// used.
pub const IBV_REREG_MR_ERR_CMD: c_int = -4;
/// `__VERBS_ABI_IS_EXTENDED`: the value of [`Context::abi_compat`](super::Context::abi_compat)
/// inside a [`VerbsContext`](super::VerbsContext).
pub const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;
