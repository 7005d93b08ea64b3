//! Parts of requests. One call of libfabric posts one part.

#![allow(unsafe_code, reason = "calls the tables of an endpoint")]

use std::{
    ffi::{c_int, c_void},
    ptr,
};

use hmem_core::transfer::{AtomicOp, AtomicType};

use super::{
    plan::{Local, Vectors},
    sys::{
        self, fi_addr_t, fi_ioc, fi_msg, fi_msg_atomic, fi_msg_rma, fi_msg_tagged, fi_rma_ioc,
        fi_rma_iov, fid_ep,
    },
};

/// Storage of a part in flight. libfabric uses the first 64 bytes (`fi_context2`), and returns the
/// slot's address with the completion. A domain uses its slots again, and frees them at its end.
#[repr(C)]
pub(super) struct Slot {
    context: [u64; 8],
    /// The index in the table of slots.
    pub(super) index: usize,
}

impl Slot {
    pub(super) fn new(index: usize) -> Box<Self> {
        Box::new(Self { context: [0; 8], index })
    }
}

/// The operation of a part.
#[derive(Debug)]
pub(super) enum PartOp {
    Write { remote: fi_rma_iov, data: Option<u64> },
    Read { remote: fi_rma_iov },
    Send { tag: Option<u64>, data: Option<u64> },
    Receive { tag: Option<(u64, u64)> },
    Atomic(Box<AtomicPart>),
}

/// An atomic on an array of elements.
#[derive(Debug)]
pub(super) struct AtomicPart {
    pub(super) op: AtomicOp,
    pub(super) datatype: AtomicType,
    pub(super) remote: fi_rma_iov,
    pub(super) result: Option<Local>,
    pub(super) compare: Option<Local>,
}

/// A part of a request.
#[derive(Debug)]
pub(super) struct Part {
    /// The number of the endpoint in the engine. `request` is the number of the request there.
    pub(super) endpoint: u64,
    pub(super) request: u64,
    /// The peer's index in the address vector. Receives ignore it.
    pub(super) peer: fi_addr_t,
    pub(super) op: PartOp,
    pub(super) local: Vectors,
    /// True if the post copies the bytes of a write or a message (`FI_INJECT`).
    pub(super) inject: bool,
    /// True once libfabric has taken the part.
    pub(super) posted: bool,
}

const UNSUPPORTED: isize = -(sys::FI_ENOSYS as isize);

impl Part {
    /// Posts the part. Returns 0 or a negative error number.
    ///
    /// # Safety
    /// The endpoint is open, and no other thread calls libfabric for the endpoint unless the domain
    /// allows that. The slot stays allocated until the completion. Local memory is valid until the
    /// completion, or during the call if `inject` is true.
    pub(super) unsafe fn post(&mut self, endpoint: *mut fid_ep, slot: *mut Slot) -> isize {
        let (context, addr): (*mut c_void, _) = (slot.cast(), self.peer);
        let (iov, desc) = (self.local.ranges.as_ptr(), self.local.descs.as_mut_ptr());
        let iov_count = self.local.ranges.len();
        let inject = if self.inject { sys::FI_INJECT } else { 0 };
        let with = |data: Option<u64>| if data.is_some() { sys::FI_REMOTE_CQ_DATA } else { 0 };
        let rma = |remote: *const fi_rma_iov, data: Option<u64>| fi_msg_rma {
            msg_iov: iov,
            desc,
            iov_count,
            addr,
            rma_iov: remote,
            rma_iov_count: 1,
            context,
            data: data.unwrap_or(0),
        };
        match &self.op {
            PartOp::Write { remote, data } => {
                // The completion means that the bytes are in the peer's memory. A write of no bytes
                // with this flag never completes over `shm` of 1.17.
                let delivery = if self.local.bytes > 0 { sys::FI_DELIVERY_COMPLETE } else { 0 };
                let flags = sys::FI_COMPLETION | delivery | inject | with(*data);
                let message = rma(remote, *data);
                // SAFETY: the caller promises an open endpoint, so its tables are valid. The
                // message outlives the call, which copies it.
                unsafe {
                    (*(*endpoint).rma)
                        .writemsg
                        .map_or(UNSUPPORTED, |write| write(endpoint, &raw const message, flags))
                }
            }
            PartOp::Read { remote } => {
                let message = rma(remote, None);
                // SAFETY: as for a write: open endpoint, and the message outlives the call.
                unsafe {
                    (*(*endpoint).rma).readmsg.map_or(UNSUPPORTED, |read| {
                        read(endpoint, &raw const message, sys::FI_COMPLETION)
                    })
                }
            }
            PartOp::Send { tag: None, data } => {
                let data_of = data.unwrap_or(0);
                let message =
                    fi_msg { msg_iov: iov, desc, iov_count, addr, context, data: data_of };
                let flags = sys::FI_COMPLETION | inject | with(*data);
                // SAFETY: the caller promises an open endpoint. The message outlives the call.
                unsafe {
                    (*(*endpoint).msg)
                        .sendmsg
                        .map_or(UNSUPPORTED, |send| send(endpoint, &raw const message, flags))
                }
            }
            PartOp::Receive { tag: None } => {
                let addr = sys::FI_ADDR_UNSPEC;
                let message = fi_msg { msg_iov: iov, desc, iov_count, addr, context, data: 0 };
                // SAFETY: the caller promises an open endpoint. The message outlives the call.
                unsafe {
                    (*(*endpoint).msg).recvmsg.map_or(UNSUPPORTED, |receive| {
                        receive(endpoint, &raw const message, sys::FI_COMPLETION)
                    })
                }
            }
            PartOp::Send { tag: Some(tag), data } => {
                let message = fi_msg_tagged {
                    msg_iov: iov,
                    desc,
                    iov_count,
                    addr,
                    tag: *tag,
                    ignore: 0,
                    context,
                    data: data.unwrap_or(0),
                };
                let flags = sys::FI_COMPLETION | inject | with(*data);
                // SAFETY: the caller promises an open endpoint. The message outlives the call.
                unsafe {
                    (*(*endpoint).tagged)
                        .sendmsg
                        .map_or(UNSUPPORTED, |send| send(endpoint, &raw const message, flags))
                }
            }
            PartOp::Receive { tag: Some((tag, ignore)) } => {
                let message = fi_msg_tagged {
                    msg_iov: iov,
                    desc,
                    iov_count,
                    addr: sys::FI_ADDR_UNSPEC,
                    tag: *tag,
                    ignore: *ignore,
                    context,
                    data: 0,
                };
                // SAFETY: the caller promises an open endpoint. The message outlives the call.
                unsafe {
                    (*(*endpoint).tagged).recvmsg.map_or(UNSUPPORTED, |receive| {
                        receive(endpoint, &raw const message, sys::FI_COMPLETION)
                    })
                }
            }
            PartOp::Atomic(atomic) => {
                // SAFETY: the caller's promise.
                unsafe { atomic.post(endpoint, context, addr, &mut self.local) }
            }
        }
    }
}

impl AtomicPart {
    fn elements(&self, address: *mut c_void, bytes: usize) -> fi_ioc {
        fi_ioc { addr: address, count: bytes / self.datatype.size() as usize }
    }

    /// Posts the atomic. Returns 0 or a negative error number.
    ///
    /// # Safety
    /// The promises of [`Part::post`].
    unsafe fn post(
        &self,
        endpoint: *mut fid_ep,
        context: *mut c_void,
        addr: fi_addr_t,
        local: &mut Vectors,
    ) -> isize {
        let of = |local: &Local| {
            let address = ptr::with_exposed_provenance_mut(local.address as usize);
            self.elements(address, local.len as usize)
        };
        let mut result = self.result.as_ref().map(of);
        let compare = self.compare.as_ref().map(of);
        let mut operands: Vec<fi_ioc> = local
            .ranges
            .iter()
            .map(|range| self.elements(range.iov_base.cast_mut(), range.iov_len))
            .collect();
        let mut descs = local.descs.clone();
        if operands.is_empty() {
            // A pure read has no operands. libfabric counts those that it gets all the same.
            operands.extend(result);
            descs.extend(self.result.map(|result| result.desc));
        }
        let remote = fi_rma_ioc {
            addr: self.remote.addr,
            count: self.remote.len / self.datatype.size() as usize,
            key: self.remote.key,
        };
        let message = fi_msg_atomic {
            msg_iov: operands.as_ptr(),
            desc: descs.as_mut_ptr(),
            iov_count: operands.len(),
            addr,
            rma_iov: &raw const remote,
            rma_iov_count: 1,
            datatype: self.datatype as c_int,
            op: self.op as c_int,
            context,
            data: 0,
        };
        let mut result_desc = self.result.map_or(ptr::null_mut(), |result| result.desc);
        let mut compare_desc = self.compare.map_or(ptr::null_mut(), |compare| compare.desc);
        let message = &raw const message;
        // SAFETY: the caller promises an open endpoint, so its tables are valid. The message, with
        // the lists that it points to, outlives the call, which copies it.
        unsafe {
            let table = &*(*endpoint).atomic;
            match (&mut result, compare) {
                (None, _) => {
                    let flags = sys::FI_COMPLETION | sys::FI_DELIVERY_COMPLETE;
                    table.writemsg.map_or(UNSUPPORTED, |write| write(endpoint, message, flags))
                }
                (Some(result), None) => table.readwritemsg.map_or(UNSUPPORTED, |fetch| {
                    let desc = &raw mut result_desc;
                    fetch(endpoint, message, result, desc, 1, sys::FI_COMPLETION)
                }),
                (Some(result), Some(compare)) => table.compwritemsg.map_or(UNSUPPORTED, |swap| {
                    let (compare, first) = (&raw const compare, &raw mut compare_desc);
                    let (result, second) = (&raw mut *result, &raw mut result_desc);
                    let flags = sys::FI_COMPLETION;
                    swap(endpoint, message, compare, first, 1, result, second, 1, flags)
                }),
            }
        }
    }

    /// Returns the maximum number of elements of one atomic with this operation and datatype.
    /// Returns 0 if the endpoint does not support the atomic.
    ///
    /// # Safety
    /// The endpoint is open, and its domain has `FI_ATOMIC`.
    pub(super) unsafe fn limit(&self, endpoint: *mut fid_ep) -> usize {
        let mut count = 0;
        // SAFETY: the caller promises an open endpoint with a table of atomics.
        unsafe {
            let table = &*(*endpoint).atomic;
            let valid = match (&self.result, &self.compare) {
                (None, _) => table.writevalid,
                (Some(_), None) => table.readwritevalid,
                (Some(_), Some(_)) => table.compwritevalid,
            };
            let (datatype, op) = (self.datatype as c_int, self.op as c_int);
            match valid.map(|valid| valid(endpoint, datatype, op, &raw mut count)) {
                Some(0) => count,
                _ => 0,
            }
        }
    }
}
