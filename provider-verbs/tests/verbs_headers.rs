//! Layouts and constants of `verbs::sys`, compared with `infiniband/verbs.h` if it is installed.

#[path = "../../tests/c_headers/mod.rs"]
mod c_headers;
#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{mem::offset_of, path::Path};

use c_headers::Assertions;
use hmem_provider_verbs::sys::{
    AccessFlags, AhAttr, AsyncEvent, AtomicCap, CompChannel, Context, DeviceAttr, DeviceAttrEx,
    DeviceCaps, EventType, ForkStatus, Gid, GlobalRoute, IBV_ODP_SUPPORT, IBV_QPF_GRH_REQUIRED,
    IBV_REREG_MR_CHANGE_ACCESS, IBV_REREG_MR_ERR_CMD, LinkLayer, Mr, Mw, MwBind, MwBindInfo,
    MwType, OdpCaps, Pd, PortAttr, PortState, Qp, QpAttr, QpAttrMask, QpCap, QpInitAttr, QpState,
    QpType, RecvWr, SendFlags, SendWr, Sge, VerbsContext, Wc, WcFlags, WcOpcode, WcStatus,
    WrOpcode,
};
use trials::{Outcome, Skipped, trials};

const HEADERS: &[&str] = &["infiniband/verbs.h"];

trials! {
    layouts_and_constants_match_the_header,
}

/// Asserts the size of a structure and the offsets of its fields. The first list holds fields that
/// have the same name in C and Rust. The second list holds Rust offsets, each with the C name of
/// the field.
macro_rules! structure {
    (
        $assert:expr, $rust:ident, $name:literal, [$($field:ident),* $(,)?],
        [$($ours:expr => $theirs:literal),* $(,)?]
    ) => {
        $assert.size(concat!("struct ", $name), size_of::<$rust>());
        $($assert.offset(
            concat!("struct ", $name), stringify!($field), offset_of!($rust, $field)
        );)*
        $($assert.offset(concat!("struct ", $name), $theirs, $ours);)*
    };
}

/// Asserts the values of enumerations.
macro_rules! enumerations {
    ($assert:expr, $($type:ident),+) => {
        $(for value in $type::ALL {
            $assert.value(value.name().expect("a name"), value.0.into());
        })+
    };
}

fn assertions() -> Assertions {
    let mut assert = Assertions::about(HEADERS);
    use hmem_provider_verbs::sys::{ContextOps, Cq};
    structure!(
        assert,
        Context,
        "ibv_context",
        [device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat],
        []
    );
    structure!(
        assert,
        ContextOps,
        "ibv_context_ops",
        [
            alloc_mw,
            bind_mw,
            dealloc_mw,
            poll_cq,
            req_notify_cq,
            post_srq_recv,
            post_send,
            post_recv
        ],
        []
    );
    structure!(assert, VerbsContext, "verbs_context", [query_device_ex, sz, context], [
        offset_of!(VerbsContext, private) => "priv",
    ]);
    structure!(assert, OdpCaps, "ibv_odp_caps", [general_caps], [
        offset_of!(OdpCaps, rc_odp_caps) => "per_transport_caps.rc_odp_caps",
        offset_of!(OdpCaps, ud_odp_caps) => "per_transport_caps.ud_odp_caps",
    ]);
    for field in ["orig_attr", "comp_mask", "odp_caps"] {
        let ours = match field {
            "orig_attr" => offset_of!(DeviceAttrEx, orig_attr),
            "comp_mask" => offset_of!(DeviceAttrEx, comp_mask),
            _ => offset_of!(DeviceAttrEx, odp_caps),
        };
        assert.offset("struct ibv_device_attr_ex", field, ours);
    }
    assert.offset(
        "struct ibv_device_attr_ex",
        "completion_timestamp_mask",
        size_of::<DeviceAttrEx>(),
    );
    structure!(
        assert,
        DeviceAttr,
        "ibv_device_attr",
        [
            fw_ver,
            node_guid,
            max_mr_size,
            page_size_cap,
            vendor_id,
            max_qp,
            max_qp_wr,
            device_cap_flags,
            max_sge,
            max_sge_rd,
            max_cq,
            max_cqe,
            max_mr,
            max_pd,
            max_qp_rd_atom,
            max_qp_init_rd_atom,
            atomic_cap,
            max_mw,
            max_srq_sge,
            max_pkeys,
            local_ca_ack_delay,
            phys_port_cnt,
        ],
        []
    );
    structure!(
        assert,
        PortAttr,
        "ibv_port_attr",
        [
            state,
            max_mtu,
            active_mtu,
            gid_tbl_len,
            port_cap_flags,
            max_msg_sz,
            pkey_tbl_len,
            lid,
            sm_lid,
            lmc,
            phys_state,
            link_layer,
            flags,
            port_cap_flags2,
        ],
        []
    );
    assert.value("sizeof(union ibv_gid)", size_of::<Gid>() as i128);
    assert.value("_Alignof(union ibv_gid)", align_of::<Gid>() as i128);
    structure!(assert, Pd, "ibv_pd", [context, handle], []);
    structure!(assert, Mr, "ibv_mr", [context, pd, addr, length, handle, lkey, rkey], []);
    structure!(
        assert,
        Mw,
        "ibv_mw",
        [context, pd, rkey, handle],
        [offset_of!(Mw, mw_type) => "type"]
    );
    structure!(assert, MwBindInfo, "ibv_mw_bind_info", [mr, addr, length, mw_access_flags], []);
    structure!(assert, MwBind, "ibv_mw_bind", [wr_id, send_flags, bind_info], []);
    structure!(assert, CompChannel, "ibv_comp_channel", [context, fd, refcnt], []);
    structure!(
        assert,
        Cq,
        "ibv_cq",
        [context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed],
        []
    );
    structure!(
        assert,
        Qp,
        "ibv_qp",
        [context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond],
        []
    );
    structure!(
        assert,
        QpCap,
        "ibv_qp_cap",
        [max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data],
        []
    );
    structure!(
        assert,
        QpInitAttr,
        "ibv_qp_init_attr",
        [qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all],
        []
    );
    structure!(
        assert,
        GlobalRoute,
        "ibv_global_route",
        [dgid, flow_label, sgid_index, hop_limit, traffic_class],
        []
    );
    structure!(
        assert,
        AhAttr,
        "ibv_ah_attr",
        [grh, dlid, sl, src_path_bits, static_rate, is_global, port_num],
        []
    );
    structure!(
        assert,
        QpAttr,
        "ibv_qp_attr",
        [
            qp_state,
            path_mtu,
            qkey,
            rq_psn,
            sq_psn,
            dest_qp_num,
            qp_access_flags,
            cap,
            ah_attr,
            alt_ah_attr,
            pkey_index,
            max_rd_atomic,
            max_dest_rd_atomic,
            min_rnr_timer,
            port_num,
            timeout,
            retry_cnt,
            rnr_retry,
            rate_limit,
        ],
        []
    );
    structure!(assert, Sge, "ibv_sge", [addr, length, lkey], []);
    structure!(
        assert,
        SendWr,
        "ibv_send_wr",
        [wr_id, next, sg_list, num_sge, opcode, send_flags, invalidate_rkey, wr, bind_mw],
        [
            offset_of!(SendWr, wr.rdma.remote_addr) => "wr.rdma.remote_addr",
            offset_of!(SendWr, wr.rdma.rkey) => "wr.rdma.rkey",
            offset_of!(SendWr, wr.atomic.compare_add) => "wr.atomic.compare_add",
            offset_of!(SendWr, wr.atomic.swap) => "wr.atomic.swap",
            offset_of!(SendWr, wr.atomic.rkey) => "wr.atomic.rkey",
            offset_of!(SendWr, remote_srqn) => "qp_type.xrc.remote_srqn",
            offset_of!(SendWr, bind_mw.rkey) => "bind_mw.rkey",
            offset_of!(SendWr, bind_mw.bind_info) => "bind_mw.bind_info",
        ]
    );
    structure!(assert, RecvWr, "ibv_recv_wr", [wr_id, next, sg_list, num_sge], []);
    structure!(
        assert,
        Wc,
        "ibv_wc",
        [
            wr_id,
            status,
            opcode,
            vendor_err,
            byte_len,
            invalidated_rkey,
            qp_num,
            wc_flags,
            pkey_index,
            sl
        ],
        []
    );
    enumerations!(
        assert, AtomicCap, PortState, LinkLayer, WcStatus, WcOpcode, WrOpcode, QpType, QpState,
        MwType, ForkStatus, EventType
    );
    structure!(assert, AsyncEvent, "ibv_async_event", [element, event_type], []);
    for (name, flag) in AccessFlags::all().iter_names() {
        assert.value(format_args!("IBV_ACCESS_{name}"), flag.bits().into());
    }
    for (name, flag) in WcFlags::all().iter_names() {
        assert.value(format_args!("IBV_WC_{name}"), i128::from(flag.bits()));
    }
    for (name, flag) in DeviceCaps::all().iter_names() {
        assert.value(format_args!("IBV_DEVICE_{name}"), flag.bits().into());
    }
    for (name, flag) in SendFlags::all().iter_names() {
        assert.value(format_args!("IBV_SEND_{name}"), flag.bits().into());
    }
    for (name, flag) in QpAttrMask::all().iter_names() {
        assert.value(format_args!("IBV_QP_{name}"), flag.bits().into());
    }
    assert.value("IBV_QPF_GRH_REQUIRED", IBV_QPF_GRH_REQUIRED.into());
    assert.value("IBV_ODP_SUPPORT", IBV_ODP_SUPPORT.into());
    assert.value("IBV_REREG_MR_CHANGE_ACCESS", IBV_REREG_MR_CHANGE_ACCESS.into());
    assert.value("IBV_REREG_MR_ERR_CMD", IBV_REREG_MR_ERR_CMD.into());
    assert
}

fn layouts_and_constants_match_the_header() -> Outcome {
    let include = Path::new("/usr/include");
    Assertions::about(HEADERS).compile(include).map_err(|error| {
        let reason = error.lines().next().unwrap_or_default();
        Skipped(format!("infiniband/verbs.h cannot be included: {reason}"))
    })?;
    assertions().hold(include);
    Ok(())
}
