//! Layouts and constants of `verbs::sys`, compared with `infiniband/verbs.h` if it is installed.

#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{collections::BTreeMap, mem::offset_of, process::Command};

use hmem_provider_verbs::sys::{
    AccessFlags, AhAttr, AtomicCap, CompChannel, Context, DeviceAttr, DeviceAttrEx, DeviceCaps,
    ForkStatus, Gid, GlobalRoute, IBV_ODP_SUPPORT, IBV_REREG_MR_CHANGE_ACCESS,
    IBV_REREG_MR_ERR_CMD, LinkLayer, Mr, Mw, MwBind, MwBindInfo, MwType, OdpCaps, Pd, PortAttr,
    PortState, Qp, QpAttr, QpAttrMask, QpCap, QpInitAttr, QpState, QpType, RecvWr, SendFlags,
    SendWr, Sge, VerbsContext, Wc, WcFlags, WcOpcode, WcStatus, WrOpcode,
};
use trials::{Outcome, Skipped, trials};

trials! {
    layouts_and_constants_match_the_header,
}

/// Expressions for the C compiler to evaluate, with this crate's values for them.
struct Probe {
    lines: Vec<String>,
    ours: BTreeMap<String, i128>,
}

impl Probe {
    fn ask(&mut self, expression: &str, ours: i128) {
        self.lines.push(format!("printf(\"{expression}\\t%lld\\n\", (long long)({expression}));"));
        self.ours.insert(expression.to_owned(), ours);
    }

    fn size<T>(&mut self, name: &str) {
        self.ask(&format!("sizeof(struct {name})"), size_of::<T>() as i128);
    }

    fn offset(&mut self, name: &str, field: &str, ours: usize) {
        self.ask(&format!("offsetof(struct {name}, {field})"), ours as i128);
    }
}

/// Adds the size of a structure and the offsets of its fields to a probe. The first list has fields
/// with equal names in C and Rust. The second list has Rust offsets with the C names.
macro_rules! structure {
    (
        $probe:expr, $rust:ident, $name:literal, [$($field:ident),* $(,)?],
        [$($ours:expr => $theirs:literal),* $(,)?]
    ) => {
        $probe.size::<$rust>($name);
        $($probe.offset($name, stringify!($field), offset_of!($rust, $field));)*
        $($probe.offset($name, $theirs, $ours);)*
    };
}

macro_rules! constants {
    ($probe:expr, $($type:ident: $($name:ident),+;)+) => {
        $($($probe.ask(stringify!($name), i128::from($type::$name.0));)+)+
    };
}

fn ask_everything(p: &mut Probe) {
    use hmem_provider_verbs::sys::{ContextOps, Cq};
    structure!(
        p,
        Context,
        "ibv_context",
        [device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat],
        []
    );
    structure!(
        p,
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
    structure!(p, VerbsContext, "verbs_context", [query_device_ex, sz, context], [
        offset_of!(VerbsContext, private) => "priv",
    ]);
    structure!(p, OdpCaps, "ibv_odp_caps", [general_caps], [
        offset_of!(OdpCaps, rc_odp_caps) => "per_transport_caps.rc_odp_caps",
        offset_of!(OdpCaps, ud_odp_caps) => "per_transport_caps.ud_odp_caps",
    ]);
    for field in ["orig_attr", "comp_mask", "odp_caps"] {
        let ours = match field {
            "orig_attr" => offset_of!(DeviceAttrEx, orig_attr),
            "comp_mask" => offset_of!(DeviceAttrEx, comp_mask),
            _ => offset_of!(DeviceAttrEx, odp_caps),
        };
        p.offset("ibv_device_attr_ex", field, ours);
    }
    p.offset("ibv_device_attr_ex", "completion_timestamp_mask", size_of::<DeviceAttrEx>());
    structure!(
        p,
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
        p,
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
    p.ask("sizeof(union ibv_gid)", size_of::<Gid>() as i128);
    p.ask("_Alignof(union ibv_gid)", align_of::<Gid>() as i128);
    structure!(p, Pd, "ibv_pd", [context, handle], []);
    structure!(p, Mr, "ibv_mr", [context, pd, addr, length, handle, lkey, rkey], []);
    structure!(p, Mw, "ibv_mw", [context, pd, rkey, handle], [offset_of!(Mw, mw_type) => "type"]);
    structure!(p, MwBindInfo, "ibv_mw_bind_info", [mr, addr, length, mw_access_flags], []);
    structure!(p, MwBind, "ibv_mw_bind", [wr_id, send_flags, bind_info], []);
    structure!(p, CompChannel, "ibv_comp_channel", [context, fd, refcnt], []);
    structure!(
        p,
        Cq,
        "ibv_cq",
        [context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed],
        []
    );
    structure!(
        p,
        Qp,
        "ibv_qp",
        [context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond],
        []
    );
    structure!(
        p,
        QpCap,
        "ibv_qp_cap",
        [max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data],
        []
    );
    structure!(
        p,
        QpInitAttr,
        "ibv_qp_init_attr",
        [qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all],
        []
    );
    structure!(
        p,
        GlobalRoute,
        "ibv_global_route",
        [dgid, flow_label, sgid_index, hop_limit, traffic_class],
        []
    );
    structure!(
        p,
        AhAttr,
        "ibv_ah_attr",
        [grh, dlid, sl, src_path_bits, static_rate, is_global, port_num],
        []
    );
    structure!(
        p,
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
    structure!(p, Sge, "ibv_sge", [addr, length, lkey], []);
    structure!(
        p,
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
    structure!(p, RecvWr, "ibv_recv_wr", [wr_id, next, sg_list, num_sge], []);
    structure!(
        p,
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
    constants!(p,
        AtomicCap: IBV_ATOMIC_NONE, IBV_ATOMIC_HCA, IBV_ATOMIC_GLOB;
        PortState: IBV_PORT_NOP, IBV_PORT_DOWN, IBV_PORT_INIT, IBV_PORT_ARMED, IBV_PORT_ACTIVE,
            IBV_PORT_ACTIVE_DEFER;
        LinkLayer: IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET;
        WcStatus: IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR,
            IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR,
            IBV_WC_MW_BIND_ERR, IBV_WC_BAD_RESP_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
            IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
            IBV_WC_RNR_RETRY_EXC_ERR,
            IBV_WC_REM_ABORT_ERR, IBV_WC_FATAL_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_GENERAL_ERR;
        WcOpcode: IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM;
        WrOpcode: IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
            IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
            IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_LOCAL_INV, IBV_WR_BIND_MW, IBV_WR_SEND_WITH_INV;
        QpType: IBV_QPT_RC;
        QpState: IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
            IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR;
        MwType: IBV_MW_TYPE_1, IBV_MW_TYPE_2;
        ForkStatus: IBV_FORK_DISABLED, IBV_FORK_ENABLED, IBV_FORK_UNNEEDED;
    );
    for (name, flag) in AccessFlags::all().iter_names() {
        p.ask(&format!("IBV_ACCESS_{name}"), flag.bits().into());
    }
    for (name, flag) in WcFlags::all().iter_names() {
        p.ask(&format!("IBV_WC_{name}"), i128::from(flag.bits()));
    }
    for (name, flag) in DeviceCaps::all().iter_names() {
        p.ask(&format!("IBV_DEVICE_{name}"), flag.bits().into());
    }
    for (name, flag) in SendFlags::all().iter_names() {
        p.ask(&format!("IBV_SEND_{name}"), flag.bits().into());
    }
    for (name, flag) in QpAttrMask::all().iter_names() {
        p.ask(&format!("IBV_QP_{name}"), flag.bits().into());
    }
    p.ask("IBV_ODP_SUPPORT", IBV_ODP_SUPPORT.into());
    p.ask("IBV_REREG_MR_CHANGE_ACCESS", IBV_REREG_MR_CHANGE_ACCESS.into());
    p.ask("IBV_REREG_MR_ERR_CMD", IBV_REREG_MR_ERR_CMD.into());
}

fn layouts_and_constants_match_the_header() -> Outcome {
    let mut probe = Probe { lines: Vec::new(), ours: BTreeMap::new() };
    ask_everything(&mut probe);
    let folder = std::env::temp_dir().join(format!("hmem-verbs-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the probe");
    let source = format!(
        "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n\
         int main(void) {{\n{}\nreturn 0; }}\n",
        probe.lines.join("\n")
    );
    let (file, program) = (folder.join("probe.c"), folder.join("probe"));
    std::fs::write(&file, source).expect("write the probe");
    let include = "#include <infiniband/verbs.h>\n";
    std::fs::write(folder.join("include.c"), include).expect("write the include");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let there = Command::new(&compiler).arg("-fsyntax-only").arg(folder.join("include.c")).output();
    match there {
        Err(error) => return Err(Skipped(format!("no C compiler ({compiler}: {error})"))),
        Ok(output) if !output.status.success() => {
            return Err(Skipped("infiniband/verbs.h is not installed".to_owned()));
        }
        Ok(_) => {}
    }
    let built = Command::new(&compiler)
        .arg("-o")
        .arg(&program)
        .arg(&file)
        .output()
        .expect("run the compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new(&program).output().expect("run the probe");
    std::fs::remove_dir_all(&folder).expect("remove the probe's folder");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (expression, theirs) in text.lines().filter_map(|line| line.split_once('\t')) {
        let theirs: i128 = theirs.parse().expect("a number");
        let ours = probe.ours[expression];
        compared += 1;
        if ours != theirs {
            wrong.push(format!("{expression}: {theirs} in the header, {ours} here"));
        }
    }
    assert_eq!(compared, probe.ours.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    println!("{compared} sizes, offsets and constants agree");
    Ok(())
}
