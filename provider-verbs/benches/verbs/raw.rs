//! Direct verbs calls like those of a C program. The benchmark compares this crate's calls with
//! them.

use std::{
    ffi::{c_int, c_void},
    fs, ptr,
};

use hmem_provider_verbs::{
    VerbsDomain,
    sys::{
        AccessFlags, AhAttr, Context, Cq, Gid, GlobalRoute, Mr, Pd, Qp, QpAttr, QpAttrMask, QpCap,
        QpInitAttr, QpState, QpType, RdmaPart, SendFlags, SendWr, Sge, Wc, WcStatus, WrOpcode,
        WrPart,
    },
};

pub(crate) type RegMr = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
pub(crate) type DeregMr = unsafe extern "C" fn(*mut Mr) -> c_int;
type CreateCq =
    unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
type CreateQp = unsafe extern "C" fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
type ModifyQp = unsafe extern "C" fn(*mut Qp, *mut QpAttr, c_int) -> c_int;

/// Looks up a function in the libibverbs that the provider has loaded.
fn find<T: Copy>(name: &std::ffi::CStr) -> T {
    assert_eq!(size_of::<T>(), size_of::<*mut c_void>());
    // SAFETY: the library is loaded already, and each caller names a function of the header with
    // its type.
    unsafe {
        let library = libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "libibverbs loads");
        let symbol = libc::dlvsym(library, name.as_ptr(), c"IBVERBS_1.1".as_ptr());
        assert!(!symbol.is_null(), "{name:?}");
        std::mem::transmute_copy(&symbol)
    }
}

/// Direct calls of `ibv_reg_mr` and `ibv_dereg_mr` in one protection domain.
#[derive(Clone, Copy)]
pub(crate) struct RawRegistration {
    pub(crate) reg_mr: RegMr,
    pub(crate) dereg_mr: DeregMr,
    pub(crate) pd: *mut Pd,
}

impl RawRegistration {
    /// Looks up `ibv_reg_mr` and `ibv_dereg_mr`, for calls with the protection domain of `domain`.
    pub(crate) fn of(domain: &VerbsDomain) -> Self {
        Self {
            reg_mr: find(c"ibv_reg_mr"),
            dereg_mr: find(c"ibv_dereg_mr"),
            pd: domain.pd().cast(),
        }
    }

    pub(crate) fn register(&self, address: u64, len: u64, flags: AccessFlags) -> *mut Mr {
        let pointer = ptr::with_exposed_provenance_mut(address as usize);
        // SAFETY: the protection domain is alive; the driver checks the range, which the bench
        // keeps mapped.
        let mr = unsafe { (self.reg_mr)(self.pd, pointer, len as usize, flags.bits() as c_int) };
        assert!(!mr.is_null(), "ibv_reg_mr: {}", std::io::Error::last_os_error());
        mr
    }

    pub(crate) fn release(&self, mr: *mut Mr) {
        // SAFETY: `register` returned the region, and each caller releases it once.
        assert_eq!(unsafe { (self.dereg_mr)(mr) }, 0, "ibv_dereg_mr");
    }

    #[inline(never)]
    pub(crate) fn register_and_release(&self, address: u64, len: u64, flags: AccessFlags) {
        self.release(self.register(address, len, flags));
    }
}

/// A connected queue pair and a write request that is posted repeatedly.
#[derive(Clone, Copy)]
pub(crate) struct RawWrite {
    pub(crate) qp: *mut Qp,
    pub(crate) cq: *mut Cq,
    pub(crate) context: *mut Context,
    pub(crate) from: Sge,
    pub(crate) to: RdmaPart,
}

impl RawWrite {
    #[inline(never)]
    pub(crate) fn post_and_poll(&self) {
        let mut segment = self.from;
        let mut request = SendWr::new(WrOpcode::IBV_WR_RDMA_WRITE, 7);
        request.sg_list = &mut segment;
        request.num_sge = 1;
        request.send_flags = SendFlags::SIGNALED.bits();
        request.wr = WrPart { rdma: self.to };
        let mut bad = ptr::null_mut();
        let mut done = Wc::default();
        // SAFETY: context, queue pair and queue live as long as the bench; both regions stay
        // registered.
        unsafe {
            let ops = &(*self.context).ops;
            let (post, poll) =
                (ops.post_send.expect("a driver posts"), ops.poll_cq.expect("a driver polls"));
            assert_eq!(post(self.qp, &mut request, &mut bad), 0, "ibv_post_send");
            while poll(self.cq, 1, &mut done) == 0 {
                // A software NIC executes requests on a CPU, so this thread yields to the NIC's
                // thread.
                std::thread::yield_now();
            }
        }
        assert_eq!(done.status, WcStatus::IBV_WC_SUCCESS);
    }
}

/// Two connected queue pairs of one device, created as in the examples of rdma-core.
pub(crate) struct RawPair {
    pub(crate) near: (*mut Qp, *mut Cq),
    pub(crate) context: *mut Context,
}

/// Returns the index and the bytes of the first RoCE version 2 GID with an IPv4 address. Without
/// one, of the first GID.
fn best_gid(device: &str) -> (u8, [u8; 16]) {
    let port = format!("/sys/class/infiniband/{device}/ports/1");
    let entries = (0..16_u8).filter_map(|index| {
        let text = fs::read_to_string(format!("{port}/gids/{index}")).ok()?;
        let kind = fs::read_to_string(format!("{port}/gid_attrs/types/{index}")).ok()?;
        let mut gid = [0; 16];
        for (place, word) in gid.chunks_mut(2).zip(text.trim().split(':')) {
            place.copy_from_slice(&u16::from_str_radix(word, 16).ok()?.to_be_bytes());
        }
        let ipv4 = gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        (gid != [0; 16]).then_some((!(ipv4 && kind.contains("v2")), index, gid))
    });
    let (_, index, gid) = entries.min().expect("the device has an address");
    (index, gid)
}

impl RawPair {
    pub(crate) fn connect(device: &str, domain: &VerbsDomain) -> Self {
        let (context, pd): (*mut Context, *mut Pd) = (domain.context().cast(), domain.pd().cast());
        let gid = best_gid(device);
        let create_cq: CreateCq = find(c"ibv_create_cq");
        let create_qp: CreateQp = find(c"ibv_create_qp");
        let make = || {
            // SAFETY: the context is open; no channel, vector 0.
            let cq = unsafe { create_cq(context, 256, ptr::null_mut(), ptr::null_mut(), 0) };
            assert!(!cq.is_null(), "ibv_create_cq");
            let cap = QpCap {
                max_send_wr: 80,
                max_recv_wr: 64,
                max_send_sge: 16,
                max_recv_sge: 16,
                ..QpCap::default()
            };
            let mut attr = QpInitAttr {
                qp_context: ptr::null_mut(),
                send_cq: cq,
                recv_cq: cq,
                srq: ptr::null_mut(),
                cap,
                qp_type: QpType::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: the protection domain and the queue are alive.
            let qp = unsafe { create_qp(pd, &mut attr) };
            assert!(!qp.is_null(), "ibv_create_qp");
            (qp, cq)
        };
        let (near, far) = (make(), make());
        // SAFETY: both queue pairs are alive.
        let (a, b) = unsafe { ((*near.0).qp_num, (*far.0).qp_num) };
        walk(near.0, b, gid);
        walk(far.0, a, gid);
        Self { near, context }
    }
}

/// Moves a queue pair through the states RESET, INIT, RTR and RTS.
fn walk(qp: *mut Qp, peer: u32, (index, gid): (u8, [u8; 16])) {
    let modify_qp: ModifyQp = find(c"ibv_modify_qp");
    let modify = |mut attr: QpAttr, mask: QpAttrMask| {
        // SAFETY: the queue pair is alive; the mask says which attributes are set.
        let modified = unsafe { modify_qp(qp, &mut attr, mask.bits()) };
        assert_eq!(modified, 0, "ibv_modify_qp {:?}", attr.qp_state);
    };
    let rights = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    modify(
        QpAttr {
            qp_state: QpState::IBV_QPS_INIT,
            port_num: 1,
            qp_access_flags: rights.bits(),
            ..QpAttr::default()
        },
        QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS,
    );
    let route = GlobalRoute {
        dgid: Gid { raw: gid },
        sgid_index: index,
        hop_limit: 64,
        ..GlobalRoute::default()
    };
    modify(
        QpAttr {
            qp_state: QpState::IBV_QPS_RTR,
            path_mtu: 3,
            dest_qp_num: peer,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr: AhAttr { grh: route, is_global: 1, port_num: 1, ..AhAttr::default() },
            ..QpAttr::default()
        },
        QpAttrMask::STATE
            | QpAttrMask::AV
            | QpAttrMask::PATH_MTU
            | QpAttrMask::DEST_QPN
            | QpAttrMask::RQ_PSN
            | QpAttrMask::MAX_DEST_RD_ATOMIC
            | QpAttrMask::MIN_RNR_TIMER,
    );
    modify(
        QpAttr {
            qp_state: QpState::IBV_QPS_RTS,
            timeout: 17,
            retry_cnt: 6,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..QpAttr::default()
        },
        QpAttrMask::STATE
            | QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::SQ_PSN
            | QpAttrMask::MAX_QP_RD_ATOMIC,
    );
}
