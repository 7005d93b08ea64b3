//! Tests `hmem` together with the crate sideway, which owns the device, the protection domain, the
//! queues and the work requests. `hmem` registers in that protection domain, and its keys move the
//! bytes.
//!
//! Both crates load libibverbs at run time by the same name. They share one copy of it, as
//! `with_pd` requires.
#![cfg(test)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem::{
    Access, Domain, DomainAttr, Hmem, Memory, Region,
    verbs::{Verbs, VerbsDomain, VerbsMr},
};
use sideway::ibverbs::{
    AccessFlags,
    address::{AddressHandleAttribute, GidType},
    completion::{GenericCompletionQueue, WorkCompletionStatus},
    device::{DeviceInfo, DeviceList},
    device_context::{DeviceContext, Mtu},
    protection_domain::ProtectionDomain,
    queue_pair::{
        GenericQueuePair, PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState,
        SetScatterGatherEntry, WorkRequestFlags,
    },
};

const LOCAL: Access = Access::READ.union(Access::WRITE);
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
const LEN: usize = 8192;
const SUCCESS: u32 = WorkCompletionStatus::Success as u32;

/// Objects of sideway: a queue pair that is connected to itself.
struct Sideway {
    qp: GenericQueuePair,
    cq: GenericCompletionQueue,
    pd: Arc<ProtectionDomain>,
}

impl Sideway {
    fn open() -> Self {
        let name = std::env::var("HMEM_VERBS_DEVICE").expect("the name of a device");
        let devices = DeviceList::new().expect("devices");
        let device = devices.iter().find(|device| device.name() == name).expect("the device");
        let context = device.open().expect("open the device");
        let pd = context.alloc_pd().expect("a protection domain");
        let mut cq = context.create_cq_builder();
        let cq = GenericCompletionQueue::from(cq.setup_cqe(16).build().expect("a queue"));
        let mut qp = pd.create_qp_builder();
        qp.setup_send_cq(cq.clone()).setup_recv_cq(cq.clone());
        let mut qp = GenericQueuePair::from(qp.build().expect("a queue pair"));
        connect_to_itself(&context, &mut qp);
        Self { qp, cq, pd }
    }

    /// Returns the raw protection domain, to be passed to `with_pd`.
    fn raw_pd(&self) -> *mut std::ffi::c_void {
        // SAFETY: the pointer is used only while `self` lives.
        unsafe { self.pd.pd() }.as_ptr().cast()
    }

    /// Posts an RDMA write or read of `len` bytes with these keys, and returns the completion's
    /// status.
    ///
    /// # Safety
    /// Each address must be valid for `len` bytes until the call returns, unless no memory
    /// is registered at it.
    unsafe fn transfer(
        &mut self,
        write: bool,
        local: (u32, u64),
        remote: (u32, u64),
        len: usize,
    ) -> u32 {
        let mut guard = self.qp.start_post_send();
        let request = guard.construct_wr(7, WorkRequestFlags::Signaled);
        let request = if write {
            request.setup_write(remote.0, remote.1)
        } else {
            request.setup_read(remote.0, remote.1)
        };
        // SAFETY: the caller promised that the memory is valid until the call returns.
        unsafe { request.setup_sge(local.0, local.1, len as u32) };
        guard.post().expect("post");
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Ok(mut poller) = self.cq.start_poll()
                && let Some(completion) = poller.next()
            {
                assert_eq!(completion.wr_id(), 7);
                return completion.status();
            }
            assert!(Instant::now() < end, "the request never completed");
            std::thread::yield_now();
        }
    }
}

fn connect_to_itself(context: &Arc<DeviceContext>, qp: &mut GenericQueuePair) {
    let access = AccessFlags::LocalWrite | AccessFlags::RemoteWrite | AccessFlags::RemoteRead;
    let mut attr = QueuePairAttribute::new();
    attr.setup_state(QueuePairState::Init)
        .setup_pkey_index(0)
        .setup_port(1)
        .setup_access_flags(access);
    qp.modify(&attr).expect("init");

    let gids = context.query_gid_table().expect("GIDs");
    let usable = |gid: &&sideway::ibverbs::address::GidEntry| {
        gid.port_num() == 1
            && (!gid.gid().is_unicast_link_local() || gid.gid_type() != GidType::RoceV2)
    };
    let gid = gids.iter().find(usable).expect("a GID");
    let mut address = AddressHandleAttribute::new();
    address
        .setup_dest_lid(context.query_port(1).expect("the port").lid())
        .setup_port(1)
        .setup_service_level(1)
        .setup_grh_src_gid_index(gid.gid_index() as u8)
        .setup_grh_dest_gid(&gid.gid())
        .setup_grh_hop_limit(64);
    let mut attr = QueuePairAttribute::new();
    attr.setup_state(QueuePairState::ReadyToReceive)
        .setup_path_mtu(Mtu::Mtu1024)
        .setup_dest_qp_num(qp.qp_number())
        .setup_rq_psn(1)
        .setup_max_dest_read_atomic(1)
        .setup_min_rnr_timer(1)
        .setup_address_vector(&address);
    qp.modify(&attr).expect("ready to receive");

    let mut attr = QueuePairAttribute::new();
    attr.setup_state(QueuePairState::ReadyToSend)
        .setup_sq_psn(1)
        .setup_timeout(14)
        .setup_retry_cnt(7)
        .setup_rnr_retry(7)
        .setup_max_read_atomic(1);
    qp.modify(&attr).expect("ready to send");
}

/// Opens a domain of `hmem` in the protection domain of sideway.
fn hmem_domain(owner: &Sideway) -> Domain {
    // SAFETY: a live protection domain of the libibverbs that both crates share. The tests drop
    // every object of hmem before the objects of sideway.
    let verbs = unsafe { Verbs::builder().with_pd(owner.raw_pd(), ()) }.expect("with_pd");
    let hmem = Hmem::builder().without_vendor_ifaces().build().expect("build");
    hmem.domain_on(&verbs, DomainAttr::default()).expect("a domain")
}

/// Returns the keys of a region.
fn keys<M: Memory>(region: &Region<M>) -> VerbsMr<'_> {
    VerbsMr::of(region).expect("one registration")
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..LEN).map(|byte| (byte * 31 + seed * 7 + byte / 256) as u8).collect()
}

/// VRB-04
#[test]
fn our_keys_move_bytes_in_work_requests_of_another_crate() {
    let mut sideway = Sideway::open();
    let domain = hmem_domain(&sideway);
    assert_eq!(VerbsDomain::of(&domain).unwrap().pd(), sideway.raw_pd());
    let source = domain.register(pattern(1), LOCAL).expect("register");
    let target = domain.register(vec![0; LEN], LOCAL | REMOTE).expect("register");
    let sink = domain.register(vec![0; LEN], LOCAL).expect("register");
    let (from, to, back) = (keys(&source), keys(&target), keys(&sink));
    let at = |mr: &VerbsMr<'_>| mr.base;

    // SAFETY: the regions own their memory and live until the end of the test.
    let written =
        unsafe { sideway.transfer(true, (from.lkey, at(&from)), (to.rkey, at(&to)), LEN) };
    assert_eq!(written, SUCCESS);
    let mut seen = vec![0; LEN];
    target.read(0, &mut seen).expect("read");
    assert_eq!(seen, pattern(1));

    target.write(0, &pattern(2)).expect("write");
    // SAFETY: the regions own their memory and live until the end of the test.
    let read = unsafe { sideway.transfer(false, (back.lkey, at(&back)), (to.rkey, at(&to)), LEN) };
    assert_eq!(read, SUCCESS);
    sink.read(0, &mut seen).expect("read");
    assert_eq!(seen, pattern(2));
}

/// VRB-04
///
/// The keys of closed regions reach nothing. The objects of sideway still work after those of hmem
/// are closed.
#[test]
fn closed_keys_reach_nothing_and_the_protection_domain_stays() {
    let mut sideway = Sideway::open();
    let domain = hmem_domain(&sideway);
    let source = domain.register(pattern(3), LOCAL).expect("register");
    let target = domain.register(vec![0; LEN], REMOTE).expect("register");
    let from = keys(&source);
    // Plain numbers, because the keys of an open region borrow it.
    let (rkey, address) = (keys(&target).rkey, keys(&target).base);
    let untouched = target.close().map_err(hmem::Error::from).expect("close");
    // SAFETY: the source is registered, and no memory is registered at the target.
    let status = unsafe { sideway.transfer(true, (from.lkey, from.base), (rkey, address), LEN) };
    // The queue pair is its own peer, so the refusal may move it to the error state before the
    // response arrives.
    let refused = [
        WorkCompletionStatus::RemoteAccessError as u32,
        WorkCompletionStatus::WorkRequestFlushedError as u32,
    ];
    assert!(refused.contains(&status), "status {status}");
    assert_eq!(untouched, vec![0; LEN]);
    drop(source);
    domain.close().map_err(hmem::Error::from).expect("nothing of ours is left");

    let memory = vec![0_u8; LEN];
    // SAFETY: the memory outlives the region.
    let region =
        unsafe { sideway.pd.reg_mr(memory.as_ptr() as usize, LEN, AccessFlags::LocalWrite) };
    assert_ne!(region.expect("the protection domain is still sideway's").lkey(), 0);
}
