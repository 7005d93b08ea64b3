//! Constants of `infiniband/verbs.h`: bit flags, and enumerations with the names of their values.

use std::ffi::{c_int, c_uint};

bitflags::bitflags! {
    /// `enum ibv_access_flags`. The names and values are those of verbs.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: c_uint {
        /// The NIC may write to the memory for local work requests.
        const LOCAL_WRITE = 1;
        /// Peers may write to the memory. This flag needs LOCAL_WRITE.
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read the memory.
        const REMOTE_READ = 1 << 2;
        /// Peers may apply atomics to the memory. This flag needs LOCAL_WRITE.
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

    /// `enum ibv_device_cap_flags`: optional features of a device. Only values that this crate
    /// reads are listed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct DeviceCaps: c_uint {
        /// The device supports type 1 windows.
        const MEM_WINDOW = 1 << 17;
        /// The device supports type 2A windows.
        const MEM_WINDOW_TYPE_2A = 1 << 23;
        /// The device supports type 2B windows.
        const MEM_WINDOW_TYPE_2B = 1 << 24;
    }

    /// `enum ibv_qp_attr_mask`: the attributes that a call queries, or sets from a
    /// [`QpAttr`](super::QpAttr). Only values that connecting an RC queue pair needs are listed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: c_int {
        /// `IBV_QP_STATE`: selects `qp_state`, the state to move to.
        const STATE = 1;
        /// `IBV_QP_ACCESS_FLAGS`: selects `qp_access_flags`, the operations that the peer may
        /// request.
        const ACCESS_FLAGS = 1 << 3;
        /// `IBV_QP_PKEY_INDEX`: selects `pkey_index`, the index of the partition key.
        const PKEY_INDEX = 1 << 4;
        /// `IBV_QP_PORT`: selects `port_num`, the number of the local port.
        const PORT = 1 << 5;
        /// `IBV_QP_AV`: selects `ah_attr`, the address of the peer.
        const AV = 1 << 7;
        /// `IBV_QP_PATH_MTU`: selects `path_mtu`, the maximum payload of a packet.
        const PATH_MTU = 1 << 8;
        /// `IBV_QP_TIMEOUT`: selects `timeout`, the time after which the NIC resends a packet.
        const TIMEOUT = 1 << 9;
        /// `IBV_QP_RETRY_CNT`: selects `retry_cnt`, the number of resends if the peer does not
        /// answer.
        const RETRY_CNT = 1 << 10;
        /// `IBV_QP_RNR_RETRY`: selects `rnr_retry`, the number of resends if the peer has posted no
        /// receive.
        const RNR_RETRY = 1 << 11;
        /// `IBV_QP_RQ_PSN`: selects `rq_psn`, the sequence number of the first packet to receive.
        const RQ_PSN = 1 << 12;
        /// `IBV_QP_MAX_QP_RD_ATOMIC`: selects `max_rd_atomic`, the limit of outgoing reads and
        /// atomics in flight.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `IBV_QP_MIN_RNR_TIMER`: selects `min_rnr_timer`, the delay after which a peer resends if
        /// this side has posted no receive.
        const MIN_RNR_TIMER = 1 << 15;
        /// `IBV_QP_SQ_PSN`: selects `sq_psn`, the sequence number of the first packet to send.
        const SQ_PSN = 1 << 16;
        /// `IBV_QP_MAX_DEST_RD_ATOMIC`: selects `max_dest_rd_atomic`, the limit of incoming reads
        /// and atomics in flight.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `IBV_QP_DEST_QPN`: selects `dest_qp_num`, the number of the peer's queue pair.
        const DEST_QPN = 1 << 20;
    }

    /// `enum ibv_send_flags`: options of a send work request. Only values that this crate uses are
    /// listed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SendFlags: c_uint {
        /// The request produces a work completion when it succeeds.
        const SIGNALED = 1 << 1;
        /// The post copies the bytes, so the memory may be reused at once (inline send).
        const INLINE = 1 << 3;
    }

    /// `enum ibv_wc_flags`: the optional contents of a work completion. Only values that this crate
    /// reads are listed.
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

hmem_core::c_enum! {
    /// `enum ibv_atomic_cap`: the atomics that a device supports.
    AtomicCap(c_int) {
        IBV_ATOMIC_NONE = 0,
        IBV_ATOMIC_HCA = 1,
        IBV_ATOMIC_GLOB = 2,
    }
    /// `enum ibv_port_state`: the logical state of a port.
    PortState(c_int) {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
    /// Values of `link_layer` in `ibv_port_attr`: the network type of a port.
    LinkLayer(u8) {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
    /// `enum ibv_event_type`: the type of an asynchronous event.
    EventType(c_int) {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }
    /// `enum ibv_wc_status`: the result in a work completion.
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
    /// `enum ibv_wc_opcode`: the operation in a work completion. Only the values for receives are
    /// listed.
    WcOpcode(c_int) {
        IBV_WC_RECV = 128,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    /// `enum ibv_wr_opcode`: the operation of a work request. Only values that this crate uses are
    /// listed.
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
    /// `enum ibv_qp_type`: the transport of a queue pair. Only reliable connection (RC) is listed.
    QpType(c_int) {
        IBV_QPT_RC = 2,
    }
    /// `enum ibv_qp_state`: the state of a queue pair.
    QpState(c_int) {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_SQD = 4,
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
    }
    /// `enum ibv_mw_type`: the type of a memory window.
    MwType(c_int) {
        IBV_MW_TYPE_1 = 1,
        IBV_MW_TYPE_2 = 2,
    }
    /// `enum ibv_fork_status`: the protection of registered pages when the process forks.
    ForkStatus(c_int) {
        IBV_FORK_DISABLED = 0,
        IBV_FORK_ENABLED = 1,
        IBV_FORK_UNNEEDED = 2,
    }
}

/// `IBV_QPF_GRH_REQUIRED`, the bit of [`PortAttr::flags`](super::PortAttr::flags) of a port whose
/// packets must have a global route header (GRH).
pub const IBV_QPF_GRH_REQUIRED: u8 = 1;
/// `IBV_ODP_SUPPORT`, the bit of [`OdpCaps::general_caps`](super::OdpCaps::general_caps) for
/// support of on-demand paging.
pub const IBV_ODP_SUPPORT: u64 = 1;
/// `MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT` of `infiniband/mlx5dv.h`: registers a dma-buf for the
/// NIC's Data Direct function.
pub const MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT: c_int = 1;
/// `IBV_REREG_MR_CHANGE_ACCESS`: the flag of `ibv_rereg_mr` to change the access rights.
pub const IBV_REREG_MR_CHANGE_ACCESS: c_int = 1 << 2;
/// `IBV_REREG_MR_ERR_CMD`. After a failure with this value or a lower one, the old region cannot be
/// used.
pub const IBV_REREG_MR_ERR_CMD: c_int = -4;
/// `__VERBS_ABI_IS_EXTENDED`: the value of [`Context::abi_compat`](super::Context::abi_compat)
/// inside a [`VerbsContext`](super::VerbsContext).
pub const VERBS_ABI_IS_EXTENDED: usize = usize::MAX;
