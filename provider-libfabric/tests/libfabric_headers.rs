//! Compares the layouts and constants of [`sys`] with libfabric's headers.
//!
//! The test writes a C program that prints the number of each [`Expectation`] in order, compiles
//! the program and compares its output. `HMEM_LIBFABRIC_INCLUDE` names the folder with the headers;
//! the compiler's own folders otherwise. Without a compiler or the headers the test is ignored.

#[path = "../../tests/trials/mod.rs"]
mod trials;

use std::{env, fmt::Write as _, path::Path, process::Command};

use hmem_core::{MrMode, provider::MsgOrder};
use hmem_provider_libfabric::sys;
use trials::{Outcome, Skipped, trials};

/// One number to compare: its C expression, its value in this crate, and the release since which
/// the headers have it, as (major, minor).
type Expectation = (String, u64, (u32, u32));

/// The oldest supported release.
const OLDEST: (u32, u32) = (1, 17);

const INCLUDES: &str = "\
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/uio.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
";

/// Adds the offsets of the named fields of C structures, and their sizes: the exact size after
/// `whole`, a minimum after `head`, and after `grown` the size of the oldest release and a minimum
/// for later ones. A field written `a => b` is named `a` here and `b` in C.
macro_rules! layouts {
    ($out:ident; $($kind:ident $object:ident { $($field:ident $(=> $c:ident)?),+ $(,)? })+) => {$(
        $(
            let c_name = [stringify!($field) $(, stringify!($c))?];
            $out.push((
                format!("offsetof(struct {}, {})", stringify!($object), c_name[c_name.len() - 1]),
                std::mem::offset_of!(sys::$object, $field) as u64,
                OLDEST,
            ));
        )+
        layouts!(@size $out $kind $object);
    )+};
    (@size $out:ident whole $object:ident) => {
        $out.push((
            format!("sizeof(struct {})", stringify!($object)),
            size_of::<sys::$object>() as u64,
            OLDEST,
        ));
    };
    (@size $out:ident grown $object:ident) => {
        let (size, object) = (size_of::<sys::$object>(), stringify!($object));
        $out.push((
            format!(
                "sizeof(struct {object}) == {size} || (sizeof(struct {object}) > {size} && \
                 FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) > FI_VERSION(1, 17))"
            ),
            1,
            OLDEST,
        ));
    };
    (@size $out:ident head $object:ident) => {
        // The library's structure may be longer than this crate's, but not shorter.
        $out.push((
            format!("sizeof(struct {}) >= {}", stringify!($object), size_of::<sys::$object>()),
            1,
            OLDEST,
        ));
    };
}

macro_rules! constants {
    ($out:ident; $($name:ident),+ $(,)?) => {$(
        $out.push((format!("(uint64_t) ({})", stringify!($name)), sys::$name as u64, OLDEST));
    )+};
}

fn expectations() -> Vec<Expectation> {
    let mut out: Vec<Expectation> = Vec::new();
    layouts! { out;
        whole iovec { iov_base, iov_len }
        whole fid { fclass, context, ops }
        head fi_ops { size, close, bind, control }
        whole fi_info {
            next, caps, mode, addr_format, src_addrlen, dest_addrlen, src_addr, dest_addr, handle,
            tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr, nic,
        }
        whole fi_tx_attr {
            caps, mode, op_flags, msg_order, comp_order, inject_size, size, iov_limit,
            rma_iov_limit, tclass,
        }
        whole fi_rx_attr {
            caps, mode, op_flags, msg_order, comp_order, total_buffered_recv, size, iov_limit,
        }
        whole fi_ep_attr {
            r#type => type, protocol, protocol_version, max_msg_size, msg_prefix_size,
            max_order_raw_size, max_order_war_size, max_order_waw_size, mem_tag_format, tx_ctx_cnt,
            rx_ctx_cnt, auth_key_size, auth_key,
        }
        grown fi_domain_attr {
            domain, name, threading, control_progress, data_progress, resource_mgmt, av_type,
            mr_mode, mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt,
            max_ep_tx_ctx, max_ep_rx_ctx, max_ep_stx_ctx, max_ep_srx_ctx, cntr_cnt, mr_iov_limit,
            caps, mode, auth_key, auth_key_size, max_err_data, mr_cnt, tclass,
        }
        whole fi_fabric_attr { fabric, name, prov_name, prov_version, api_version }
        whole fid_fabric { fid, ops, api_version }
        head fi_ops_fabric { size, domain }
        whole fid_domain { fid, ops, mr }
        head fi_ops_domain { size, av_open, cq_open, endpoint }
        whole fi_ops_mr { size, reg, regv, regattr }
        whole fid_mr { fid, mem_desc, key }
        head fid_nic { fid, device_attr, bus_attr }
        whole fi_bus_attr { bus_type, attr }
        whole fi_pci_attr { domain_id, bus_id, device_id, function_id }
        whole fi_mr_raw_attr { flags, base_addr, raw_key, key_size }
        whole fi_mr_map_raw { flags, base_addr, raw_key, key_size, key }
        whole fid_av { fid, ops }
        head fi_ops_av { size, insert }
        whole fi_av_attr { r#type => type, rx_ctx_bits, count, ep_per_node, name, map_addr, flags }
        whole fid_cq { fid, ops }
        head fi_ops_cq { size, read, readfrom, readerr }
        whole fi_cq_attr {
            size, flags, format, wait_obj, signaling_vector, wait_cond, wait_set,
        }
        whole fi_cq_entry { op_context }
        grown fi_cq_err_entry {
            op_context, flags, len, buf, data, tag, olen, err, prov_errno, err_data, err_data_size,
        }
        whole fi_cq_tagged_entry { op_context, flags, len, buf, data, tag }
        head fid_ep { fid, ops, cm, msg, rma, tagged, atomic }
        head fi_ops_ep { size, cancel }
        head fi_ops_cm { size, setname, getname }
        head fi_ops_msg { size, recv, recvv, recvmsg, send, sendv, sendmsg }
        head fi_ops_tagged { size, recv, recvv, recvmsg, send, sendv, sendmsg }
        whole fi_msg { msg_iov, desc, iov_count, addr, context, data }
        whole fi_msg_tagged { msg_iov, desc, iov_count, addr, tag, ignore, context, data }
        head fi_ops_rma { size, read, readv, readmsg, write, writev, writemsg }
        whole fi_rma_iov { addr, len, key }
        whole fi_msg_rma {
            msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, context, data,
        }
        whole fi_ops_atomic {
            size, write, writev, writemsg, inject, readwrite, readwritev, readwritemsg, compwrite,
            compwritev, compwritemsg, writevalid, readwritevalid, compwritevalid,
        }
        whole fi_ioc { addr, count }
        whole fi_rma_ioc { addr, count, key }
        whole fi_msg_atomic {
            msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, datatype, op, context, data,
        }
    }
    constants! { out;
        FI_MSG, FI_RMA, FI_ATOMIC, FI_READ, FI_WRITE, FI_RECV, FI_SEND, FI_TRANSMIT,
        FI_REMOTE_READ, FI_REMOTE_WRITE, FI_HMEM, FI_RMA_PMEM, FI_RMA_EVENT, FI_SOURCE,
        FI_CONTEXT, FI_CONTEXT2, FI_TAGGED, FI_ENOMEM, FI_ENOSYS, FI_MR_LOCAL, FI_MR_RAW,
        FI_MR_VIRT_ADDR, FI_MR_ALLOCATED, FI_MR_PROV_KEY, FI_MR_RMA_EVENT, FI_MR_ENDPOINT,
        FI_MR_HMEM, FI_ORDER_RMA_WAW, FI_AV_UNSPEC, FI_ADDR_UNSPEC, FI_REMOTE_CQ_DATA,
        FI_COMPLETION, FI_INJECT, FI_DELIVERY_COMPLETE, FI_CQ_FORMAT_TAGGED, FI_ECANCELED,
        FI_ECONNRESET, FI_ETIMEDOUT, FI_ETRUNC, FI_AV_TABLE, FI_CQ_FORMAT_CONTEXT, FI_WAIT_NONE,
        FI_THREAD_SAFE, FI_THREAD_DOMAIN, FI_PROGRESS_AUTO, FI_BUS_PCI, FI_CLASS_DOMAIN,
        FI_CLASS_EP, FI_EP_MSG, FI_EP_RDM, FI_HMEM_SYSTEM, FI_KEY_NOTAVAIL, FI_ENABLE,
        FI_GET_RAW_MR, FI_MAP_RAW_MR, FI_UNMAP_KEY, FI_EAGAIN, FI_ENODATA, FI_EOPBADSTATE,
        FI_EAVAIL, FI_EBADFLAGS, FI_EDOMAIN, FI_ENOKEY,
    }
    for (name, flag) in MsgOrder::all().iter_names() {
        out.push((format!("(uint64_t) (FI_ORDER_{name})"), flag.bits(), OLDEST));
    }
    for (name, bit) in MrMode::all().iter_names() {
        out.push((format!("(uint64_t) (FI_MR_{name})"), u64::from(bit.bits()), OLDEST));
    }
    out.push(("FI_VERSION(1, 17)".to_owned(), u64::from(sys::API_VERSION), OLDEST));
    out.push(("sizeof(fi_addr_t)".to_owned(), size_of::<sys::fi_addr_t>() as u64, OLDEST));
    out.extend(registration_attributes());
    out
}

/// Returns the expectations for `fi_mr_attr`, which grew in several releases, and for dma-bufs.
fn registration_attributes() -> Vec<Expectation> {
    let mut out = Vec::new();
    macro_rules! since {
        ($($release:tt: $object:ident { $($field:ident),+ })+) => {$($(out.push((
            format!("offsetof(struct {}, {})", stringify!($object), stringify!($field)),
            std::mem::offset_of!(sys::$object, $field) as u64,
            $release,
        ));)+)+};
    }
    since! {
        (1, 17): fi_mr_attr {
            mr_iov, iov_count, access, offset, requested_key, context, auth_key_size, auth_key,
            iface, device
        }
        (1, 19): fi_mr_attr { hmem_data }
        (1, 22): fi_mr_attr { page_size }
        (2, 0): fi_mr_attr { base_mr, sub_mr_cnt }
        (1, 20): fi_mr_dmabuf { fd, offset, len, base_addr }
    }
    let sizes = [
        ("fi_mr_attr", size_of::<sys::fi_mr_attr>(), (2, 0)),
        ("fi_mr_dmabuf", size_of::<sys::fi_mr_dmabuf>(), (1, 20)),
    ];
    out.extend(
        sizes.map(|(object, size, since)| (format!("sizeof(struct {object})"), size as u64, since)),
    );
    out.push(("(uint64_t) (FI_MR_DMABUF)".to_owned(), sys::FI_MR_DMABUF, (1, 20)));
    out.push(("(uint64_t) (FI_ENOMR)".to_owned(), sys::FI_ENOMR as u64, (1, 20)));
    // No release has a longer structure than this crate: the library never reads beyond it.
    let size = size_of::<sys::fi_mr_attr>();
    out.push((format!("sizeof(struct fi_mr_attr) <= {size}"), 1, OLDEST));
    out
}

/// Compiles `source` to `program`. On failure returns the compiler's messages.
fn compile(source: &Path, program: &Path) -> Result<(), String> {
    let include = env::var_os("HMEM_LIBFABRIC_INCLUDE").filter(|folder| !folder.is_empty());
    let output = Command::new("cc")
        .args(include.iter().flat_map(|folder| ["-I".as_ref(), folder.as_os_str()]))
        .arg("-o")
        .arg(program)
        .arg(source)
        .output()
        .map_err(|error| format!("cc cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn layouts_and_constants_are_those_of_the_headers() -> Outcome {
    let directory = std::env::temp_dir().join(format!("libfabric-layout-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let source = directory.join("probe.c");
    let program = directory.join("probe");

    std::fs::write(&source, format!("{INCLUDES}int main(void) {{ return 0; }}\n")).unwrap();
    if let Err(reason) = compile(&source, &program) {
        std::fs::remove_dir_all(&directory).unwrap();
        let reason = reason.lines().next().unwrap_or("no reason given");
        return Err(Skipped(format!("libfabric's headers cannot be compiled: {reason}")));
    }

    let expectations = expectations();
    let mut text = format!("{INCLUDES}int main(void) {{\n");
    for (expression, _, (major, minor)) in &expectations {
        writeln!(
            text,
            "#if FI_MAJOR_VERSION > {major} || \
             (FI_MAJOR_VERSION == {major} && FI_MINOR_VERSION >= {minor})\n\
             \tprintf(\"%llu\\n\", (unsigned long long) ({expression}));\n\
             #else\n\
             \tprintf(\"later\\n\");\n\
             #endif"
        )
        .unwrap();
    }
    text.push_str("\treturn 0;\n}\n");
    std::fs::write(&source, text).unwrap();
    compile(&source, &program).unwrap();
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(&directory).unwrap();

    let output = String::from_utf8(output.stdout).unwrap();
    let numbers: Vec<&str> = output.lines().collect();
    assert_eq!(numbers.len(), expectations.len());
    let compared = || expectations.iter().zip(&numbers).filter(|(_, theirs)| **theirs != "later");
    let different: Vec<String> = compared()
        .filter(|((_, ours, _), theirs)| ours.to_string() != **theirs)
        .map(|((expression, ours, _), theirs)| format!("{expression}: {ours} here, {theirs} in C"))
        .collect();
    assert!(different.is_empty(), "{different:#?}");
    println!("{} of {} numbers are in the headers", compared().count(), expectations.len());
    Ok(())
}

trials! {
    /// FAB-02
    layouts_and_constants_are_those_of_the_headers,
}
