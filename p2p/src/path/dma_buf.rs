//! Dma-bufs that the application supplies by their fd.
//!
//! No other path can replace such a dma-buf. While direct access to device memory is disabled, the
//! selector registers a dma-buf only if it is host memory. A request declares a dma-buf as host
//! memory by naming the system iface, or by the flag HMEM_HOST_ALLOC. If a request has neither the
//! flag nor an iface, the selector asks the kernel for the exporter. The selector refuses exporters
//! that are not in [`HOST_EXPORTERS`], because most exporters are drivers of devices.

#![allow(unsafe_code, reason = "registers a dma-buf at an address of the caller")]

use std::{os::fd::BorrowedFd, sync::Arc};

use hmem_core::{
    DmaBufOffset, IfaceKind, MrFlags, Path, Result,
    cause::Step,
    iface::DmaBufMapping,
    path::{P2pPolicy, PathRegistration},
    provider::{Backing, Piece},
};

use super::{
    search::{PathSearch, lists},
    variant::{PathRefusal, PathVariant},
};

/// The kernel's names of exporters whose dma-bufs are host memory: udmabuf, and the dma-buf heaps
/// of ordinary and contiguous (CMA) memory.
const HOST_EXPORTERS: [&str; 5] =
    ["udmabuf", "system", "default_cma_region", "linux,cma", "reserved"];

/// Registers a dma-buf that the application supplied.
pub(super) fn register_dma_buf(
    mut search: PathSearch<'_>,
    fd: BorrowedFd<'_>,
    offset: DmaBufOffset,
) -> Result<PathRegistration> {
    let variant = PathVariant::DmaBuf(DmaBufMapping::Default);
    let left_out = |listed| !lists(listed, Path::DmaBuf);
    if search.registration.direct_paths.is_some_and(left_out) && !is_claimed_host_memory(&search) {
        return Err(search.exhausted((
            "the domain's list of direct paths leaves dma-bufs out, and a dma-buf has no other \
             path",
            "add dma-buf to DomainAttr::direct_paths or HMEM_DIRECT_PATHS, or, for host memory, \
             name the system iface (Request::owner)",
        )));
    }
    if search.policy == P2pPolicy::Disabled && !is_claimed_host_memory(&search) {
        if search.iface.is_some() {
            return Err(search.exhausted((
                "direct access is disabled, and a dma-buf has no other path",
                "unset FI_HMEM_DISABLE_P2P or change the domain's policy to allow direct access, \
                 or register the memory by address instead of by dma-buf",
            )));
        }
        let exporter = search.selector.facts.dma_buf_exporter(fd);
        if !exporter.as_deref().is_some_and(|name| HOST_EXPORTERS.contains(&name)) {
            let exporter = exporter.unwrap_or_else(|| "unknown".to_owned());
            let error = search.exhausted((
                "direct access is disabled, the request names no iface, and the kernel does not \
                 say that the dma-buf is host memory",
                "name the iface that owns the memory (Request::owner; the system iface for host \
                 memory), or unset FI_HMEM_DISABLE_P2P or change the domain's policy to allow \
                 direct access",
            ));
            return Err(error.context("exporter", exporter));
        }
    }
    if !search.imports(variant) {
        return Err(search.exhausted((
            "the NIC imports no dma-bufs, and a dma-buf has no other path",
            "register the memory by address instead of by dma-buf",
        )));
    }
    let range = search.registration.ranges[0];
    let mapping = variant.mapping();
    let backing = Backing::DmaBuf { fd, offset, mapping, revocation: None };
    let piece = Piece { range, backing };
    // SAFETY: the caller of `PathSearch::new` upholds the conditions on the registration. The piece
    // is the registration's only range, and the NIC imports dma-bufs.
    match unsafe { search.provider.register(search.registration, &[piece]) } {
        Ok(region) => {
            let decision = search.decision(variant, "the application brought the dma-buf");
            Ok(PathRegistration { region, decision: Some(Arc::new(decision)) })
        }
        Err(error) => {
            let call = format!("register(dma-buf offset {offset})");
            search.refuse(variant, PathRefusal::new(Step::Register, call, error));
            Err(search.exhausted((
                "the dma-buf was refused",
                "see the trace: a dma-buf has no other path",
            )))
        }
    }
}

/// Returns true if the request says that the dma-buf is host memory.
fn is_claimed_host_memory(search: &PathSearch<'_>) -> bool {
    search.iface.is_some_and(|iface| iface.kind() == IfaceKind::SYSTEM)
        || search.registration.flags.contains(MrFlags::HMEM_HOST_ALLOC)
}
