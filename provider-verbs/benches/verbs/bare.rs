//! A fake libibverbs with functions that do nothing. The measured time of a call is then the time
//! of this crate's own code.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    ffi::{c_int, c_void},
    mem, ptr,
};

use hmem_provider_verbs::sys::{
    CompChannel, Context, Cq, Device, Functions, LinkLayer, Mr, Pd, PortAttr, PortState, Qp,
    QpAttr, QpInitAttr, QpState, SendWr, Wc, WcStatus,
};

use crate::fake;

thread_local! {
    static POSTED: RefCell<VecDeque<(u64, u32)>> = const { RefCell::new(VecDeque::new()) };
    static REGION: Cell<*mut Mr> = const { Cell::new(ptr::null_mut()) };
}

pub(crate) extern "C" fn reg_mr(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    _access: c_int,
) -> *mut Mr {
    // The last region is reused, so that the time of an allocation is not measured.
    let kept = REGION.take();
    let mr = if kept.is_null() {
        Box::into_raw(Box::new(Mr {
            context: ptr::null_mut(),
            pd,
            addr,
            length,
            handle: 0,
            lkey: 0,
            rkey: 0,
        }))
    } else {
        kept
    };
    // SAFETY: this function boxed the region, and no other code has it.
    unsafe {
        (*mr).addr = addr;
        (*mr).length = length;
        (*mr).lkey = addr.addr() as u32 >> 8;
        (*mr).rkey = (*mr).lkey;
    }
    mr
}

pub(crate) extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    REGION.set(mr);
    0
}

pub(crate) extern "C" fn post_send(
    qp: *mut Qp,
    request: *mut SendWr,
    _bad: *mut *mut SendWr,
) -> c_int {
    // SAFETY: the caller passes a live queue pair and a chain of requests.
    unsafe {
        let mut request = request;
        while !request.is_null() {
            POSTED.with_borrow_mut(|posted| posted.push_back(((*request).wr_id, (*qp).qp_num)));
            request = (*request).next;
        }
    }
    0
}

pub(crate) extern "C" fn poll_cq(_cq: *mut Cq, most: c_int, out: *mut Wc) -> c_int {
    POSTED.with_borrow_mut(|posted| {
        let mut count = 0;
        while count < most
            && let Some((wr_id, qp_num)) = posted.pop_front()
        {
            let done = Wc { wr_id, qp_num, status: WcStatus::IBV_WC_SUCCESS, ..Wc::default() };
            // SAFETY: the caller passes an array of `most` completions.
            unsafe { *out.add(count as usize) = done };
            count += 1;
        }
        count
    })
}

pub(crate) extern "C" fn open_device(device: *mut Device) -> *mut Context {
    let context = fake::context(device);
    // SAFETY: this function allocated the context just now.
    let ops = unsafe { &mut (*context).ops };
    ops.post_send = Some(post_send);
    ops.poll_cq = Some(poll_cq);
    context
}

extern "C" fn query_port(_context: *mut Context, _port: u8, attr: *mut PortAttr) -> c_int {
    let (state, max_msg_sz, active_mtu) = (PortState::IBV_PORT_ACTIVE, 1 << 30, 3);
    let link_layer = LinkLayer::IBV_LINK_LAYER_INFINIBAND;
    // SAFETY: the caller passes a writable structure for the attributes.
    unsafe {
        *attr = PortAttr { state, max_msg_sz, active_mtu, link_layer, ..PortAttr::default() }
    };
    0
}

extern "C" fn create_cq(
    _: *mut Context,
    _: c_int,
    _: *mut c_void,
    _: *mut CompChannel,
    _: c_int,
) -> *mut Cq {
    // SAFETY: all zeros is a valid value of this plain structure.
    Box::into_raw(Box::new(unsafe { mem::zeroed() }))
}

extern "C" fn create_qp(_pd: *mut Pd, _attr: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut qp: Qp = unsafe { mem::zeroed() };
    qp.qp_num = 77;
    Box::into_raw(Box::new(qp))
}

extern "C" fn modify_qp(_qp: *mut Qp, _attr: *mut QpAttr, _mask: c_int) -> c_int {
    0
}

extern "C" fn query_qp(
    _qp: *mut Qp,
    attr: *mut QpAttr,
    _mask: c_int,
    _init: *mut QpInitAttr,
) -> c_int {
    // SAFETY: the caller passes a writable structure for the attributes.
    unsafe { (*attr).qp_state = QpState::IBV_QPS_RTS };
    0
}

/// Returns the function table of the fake library, which has one device.
pub(crate) fn functions() -> Functions {
    fake::functions();
    let own = |name: &str| {
        Some(match name {
            "ibv_open_device" => open_device as *const (),
            "ibv_query_port" => query_port as *const (),
            "ibv_reg_mr" => reg_mr as *const (),
            "ibv_dereg_mr" => dereg_mr as *const (),
            "ibv_create_cq" => create_cq as *const (),
            "ibv_create_qp" => create_qp as *const (),
            "ibv_modify_qp" => modify_qp as *const (),
            "ibv_query_qp" => query_qp as *const (),
            _ => return fake::symbol(name),
        })
    };
    // SAFETY: the functions above have the header's signatures.
    unsafe { Functions::from_lookup(|name, _| own(name)) }.expect("complete")
}
