//! Reliable connections: queue pairs, their names, and their states RESET, INIT, RTR and RTS.

#![allow(unsafe_code, reason = "calls the library on queue pairs")]

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    mem, ptr,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result};

use super::{
    cq::VerbsCq,
    device::{OpenDevice, ProtectionDomain},
    errors,
    peer_name::PeerName,
    port::Port,
    sys::{
        AccessFlags, AhAttr, Gid, GlobalRoute, Qp, QpAttr, QpAttrMask, QpCap, QpInitAttr, QpState,
        QpType,
    },
};

/// Maximum number of RMA reads and atomics in flight, in each direction.
const DEPTH_OF_READS: i32 = 16;
/// Exponent of the time after which the NIC resends a packet: 4.096 us << 17 is half a second.
const TIMEOUT: u8 = 17;
/// Number of resends before the NIC reports that the peer is gone. The maximum is 7, but with 7 rxe
/// resends forever.
const RETRIES: u8 = 6;
/// Number of resends while the peer has posted no receive. 7 stands for no limit.
const RECEIVER_RETRIES: u8 = 7;
/// Code of the time after which a NIC resends to a peer without a posted receive: 12 stands for
/// 0.64 ms.
const RECEIVER_NOT_READY: u8 = 12;
/// Maximum number of routers between the two NICs.
const HOPS: u8 = 64;

/// Requested maximum length in bytes of inline sends. The device may support less.
const INLINE: u32 = 220;
/// Requested maximum number of local segments in a work request. The device may support fewer.
const SEGMENTS: i32 = 16;

/// Owner of an `ibv_qp`. Dropping the value destroys the queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) device: Arc<OpenDevice>,
    /// The queue pair; null once it is destroyed.
    pub(super) qp: *mut Qp,
    pub(super) port: Port,
    pub(super) cap: QpCap,
    /// Maximum number of work requests in flight in each direction. The poster enforces this
    /// maximum, because the driver may round up the capacities in `cap`.
    pub(super) depth: u32,
    /// Sequence number of the first packet that the queue pair sends.
    psn: u32,
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and only the drop of this value
// destroys the queue pair.
unsafe impl Send for QueuePair {}
// SAFETY: libibverbs locks a queue pair in each call on the queue pair (ibverbs(7)).
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a reliable-connection (RC) queue pair in the state INIT, for `depth` work requests
    /// in each direction. The work requests complete to the given completion queues.
    pub(super) fn create(
        pd: &ProtectionDomain,
        (tx, rx): (&VerbsCq, &VerbsCq),
        port: Port,
        depth: usize,
    ) -> Result<Self> {
        let device = &pd.device;
        let limits = &device.attr;
        let most = u32::try_from(limits.max_qp_wr).unwrap_or(0).max(1);
        let depth = u32::try_from(depth).unwrap_or(u32::MAX).clamp(1, most);
        let segments = u32::try_from(limits.max_sge.min(SEGMENTS)).unwrap_or(0).max(1);
        let mut cap = QpCap {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_send_sge: segments,
            max_recv_sge: segments,
            max_inline_data: INLINE,
        };
        let mut created = Self::try_create(pd, (tx, rx), cap);
        if created.is_err() {
            cap.max_inline_data = 0;
            created = Self::try_create(pd, (tx, rx), cap);
        }
        let (qp, cap) = created.map_err(|error| {
            let why = "raise the locked-memory limit (ulimit -l), or close endpoints: the NIC may \
                       be out of queue pairs";
            errors::advise(error.context("depth", depth), why)
        })?;
        let psn = RandomState::new().build_hasher().finish() as u32 & 0xff_ffff;
        let pair = Self { device: Arc::clone(device), qp, port, cap, depth, psn };
        pair.to_init()?;
        Ok(pair)
    }

    fn try_create(
        pd: &ProtectionDomain,
        (tx, rx): (&VerbsCq, &VerbsCq),
        cap: QpCap,
    ) -> Result<(*mut Qp, QpCap)> {
        let mut attr = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: tx.cq,
            recv_cq: rx.cq,
            srq: ptr::null_mut(),
            cap,
            qp_type: QpType::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the protection domain and both queues are alive, and the endpoint keeps them
        // alive.
        let qp = unsafe { (pd.device.library.functions.create_qp)(pd.pd, &mut attr) };
        Ok((pd.device.created("ibv_create_qp", qp)?, attr.cap))
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives as long as `self`; its number never changes.
        unsafe { (*self.qp).qp_num }
    }

    /// Returns the device's maximum number of RMA reads and atomics in flight, but at most
    /// [`DEPTH_OF_READS`].
    fn reads(limit: i32) -> u8 {
        u8::try_from(limit.clamp(0, DEPTH_OF_READS)).unwrap_or(0)
    }

    pub(super) fn name(&self, epoch: u16) -> PeerName {
        PeerName {
            qpn: self.number(),
            psn: self.psn,
            gid: self.port.gid.map_or([0; 16], |entry| entry.gid),
            lid: self.port.lid,
            mtu: u8::try_from(self.port.mtu).unwrap_or(1),
            reads: Self::reads(self.device.attr.max_qp_rd_atom),
            epoch,
        }
    }

    fn modify(&self, mut attr: QpAttr, mask: QpAttrMask) -> Result<()> {
        let modify = self.device.library.functions.modify_qp;
        // SAFETY: the queue pair lives as long as `self`; the mask says which attributes are set.
        let modified = unsafe { modify(self.qp, &mut attr, mask.bits()) };
        self.device
            .check("ibv_modify_qp", modified)
            .map_err(|error| error.context("state", attr.qp_state.name().unwrap_or_default()))
    }

    fn to_init(&self) -> Result<()> {
        let mut rights = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        rights.set(AccessFlags::REMOTE_ATOMIC, self.device.rights.atomics);
        let attr = QpAttr {
            qp_state: QpState::IBV_QPS_INIT,
            port_num: self.port.number,
            qp_access_flags: rights.bits(),
            ..QpAttr::default()
        };
        let mask = QpAttrMask::STATE
            | QpAttrMask::PKEY_INDEX
            | QpAttrMask::PORT
            | QpAttrMask::ACCESS_FLAGS;
        self.modify(attr, mask)
    }

    /// Resets the queue pair to the state INIT. The NIC drops requests in flight and writes no more
    /// completions for them. Completions that were written earlier may stay in the completion
    /// queues.
    ///
    /// Repeats the reset once for rdma_rxe. Some time after a request has failed or was refused,
    /// that driver changes the queue pair to the state ERR. If this happens during the reset, the
    /// change to INIT fails with EINVAL. The driver changes the state once, so the second reset
    /// succeeds.
    pub(super) fn reset(&self) -> Result<()> {
        let attr = QpAttr { qp_state: QpState::IBV_QPS_RESET, ..QpAttr::default() };
        self.modify(attr, QpAttrMask::STATE)?;
        match self.to_init() {
            Err(_) if self.state().is_ok_and(|state| state == QpState::IBV_QPS_ERR) => {
                self.modify(attr, QpAttrMask::STATE)?;
                self.to_init()
            }
            result => result,
        }
    }

    /// Ends the connection. Requests in flight complete with the status "flushed".
    pub(super) fn to_error(&self) -> Result<()> {
        let attr = QpAttr { qp_state: QpState::IBV_QPS_ERR, ..QpAttr::default() };
        self.modify(attr, QpAttrMask::STATE)
    }

    /// Connects to `peer`: moves the queue pair from INIT to RTS.
    pub(super) fn connect(&self, peer: &PeerName) -> Result<()> {
        let global = peer.gid != [0; 16];
        let gid_index = self.port.gid.map_or(0, |entry| entry.index);
        let ah_attr = AhAttr {
            grh: GlobalRoute {
                dgid: Gid { raw: peer.gid },
                sgid_index: gid_index,
                hop_limit: HOPS,
                ..GlobalRoute::default()
            },
            dlid: peer.lid,
            is_global: u8::from(global),
            port_num: self.port.number,
            ..AhAttr::default()
        };
        let ready_to_receive = QpAttr {
            qp_state: QpState::IBV_QPS_RTR,
            path_mtu: self.port.mtu.min(i32::from(peer.mtu)).max(1),
            dest_qp_num: peer.qpn,
            rq_psn: peer.psn,
            max_dest_rd_atomic: Self::reads(self.device.attr.max_qp_rd_atom),
            min_rnr_timer: RECEIVER_NOT_READY,
            ah_attr,
            ..QpAttr::default()
        };
        self.modify(
            ready_to_receive,
            QpAttrMask::STATE
                | QpAttrMask::AV
                | QpAttrMask::PATH_MTU
                | QpAttrMask::DEST_QPN
                | QpAttrMask::RQ_PSN
                | QpAttrMask::MAX_DEST_RD_ATOMIC
                | QpAttrMask::MIN_RNR_TIMER,
        )?;
        let ready_to_send = QpAttr {
            qp_state: QpState::IBV_QPS_RTS,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RECEIVER_RETRIES,
            sq_psn: self.psn,
            max_rd_atomic: Self::reads(self.device.attr.max_qp_init_rd_atom).min(peer.reads),
            ..QpAttr::default()
        };
        self.modify(
            ready_to_send,
            QpAttrMask::STATE
                | QpAttrMask::TIMEOUT
                | QpAttrMask::RETRY_CNT
                | QpAttrMask::RNR_RETRY
                | QpAttrMask::SQ_PSN
                | QpAttrMask::MAX_QP_RD_ATOMIC,
        )
    }

    /// Destroys the queue pair. After an error the NIC may still process the queue pair's requests.
    fn destroy(&mut self) -> Result<()> {
        let destroy = self.device.library.functions.destroy_qp;
        // SAFETY: `create` made the queue pair, and it is destroyed once: a destroyed queue pair is
        // null. Each post borrows `self`, so no post is running.
        self.device.check_destroyed("ibv_destroy_qp", unsafe { destroy(self.qp) })?;
        self.qp = ptr::null_mut();
        Ok(())
    }

    /// Queries the NIC for the state of the queue pair.
    pub(super) fn state(&self) -> Result<QpState> {
        let mut attr = QpAttr::default();
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut init: QpInitAttr = unsafe { mem::zeroed() };
        let query = self.device.library.functions.query_qp;
        // SAFETY: the queue pair lives as long as `self`; both structures are writable for the
        // call.
        let queried = unsafe { query(self.qp, &mut attr, QpAttrMask::STATE.bits(), &mut init) };
        self.device.check("ibv_query_qp", queried)?;
        Ok(attr.qp_state)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.qp.is_null() || self.device.is_inherited() {
            return;
        }
        if let Err(error) = self.destroy() {
            tracing::error!(error = %error.full(), "cannot destroy a queue pair");
        }
    }
}

/// The connection of an endpoint: the endpoint's queue pair and its peer.
#[derive(Default)]
pub(super) struct Connection {
    /// The queue pair; `None` once the endpoint is closed.
    pair: Option<QueuePair>,
    /// Name of the peer; `None` until the endpoint is first connected.
    peer: Option<PeerName>,
    /// True from the failure of the connection until the endpoint connects again.
    failed: bool,
    /// Number of connections of the endpoint that have failed, modulo 2^16.
    epoch: u16,
}

impl Connection {
    pub(super) fn new(pair: QueuePair) -> Self {
        Self { pair: Some(pair), ..Self::default() }
    }

    /// Returns the queue pair.
    ///
    /// # Errors
    /// BadState if the endpoint is closed.
    #[inline]
    pub(super) fn open(&self) -> Result<&QueuePair> {
        self.pair.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::BadState, "endpoint")
                .provider("verbs")
                .remedy("open another endpoint: this one is closed")
        })
    }

    pub(super) fn is_open(&self) -> bool {
        self.pair.is_some()
    }

    pub(super) fn peer(&self) -> Option<PeerName> {
        self.peer
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Returns the endpoint's current name, which a peer needs to connect.
    pub(super) fn name(&self) -> Result<PeerName> {
        Ok(self.open()?.name(self.epoch))
    }

    /// Records that the connection has failed, and changes the endpoint's name. Later calls have no
    /// effect until the endpoint connects again.
    pub(super) fn note_failure(&mut self) {
        if !self.failed {
            self.failed = true;
            self.epoch = self.epoch.wrapping_add(1);
        }
    }

    /// Ends the connection after a failure that the NIC did not detect. Requests in flight complete
    /// with the status "flushed".
    pub(super) fn fail(&mut self, why: &'static str) {
        self.note_failure();
        if let Ok(Err(error)) = self.open().map(QueuePair::to_error) {
            tracing::error!(error = %error.full(), "{why}");
        }
    }

    /// Queries the NIC for the state of the queue pair, and records a failure if the connection has
    /// ended. A connection without requests in flight can end without a completion.
    pub(super) fn refresh(&mut self) -> Result<()> {
        if self.peer.is_some() && !self.failed && self.open()?.state()? != QpState::IBV_QPS_RTS {
            self.note_failure();
        }
        Ok(())
    }

    /// Resets the queue pair and returns true. Returns false without a reset if the queue pair was
    /// never connected, because a reset would drop the receives that were posted before.
    pub(super) fn reset(&mut self) -> Result<bool> {
        if self.peer.is_none() {
            return Ok(false);
        }
        let pair = self.open()?;
        pair.to_error()?;
        pair.reset()?;
        Ok(true)
    }

    /// Connects the queue pair to `peer`. The queue pair must be new, or reset by
    /// [`Connection::reset`].
    pub(super) fn connect(&mut self, peer: PeerName) -> Result<()> {
        let pair = self.open()?;
        pair.connect(&peer)?;
        tracing::debug!(
            qp = pair.number(),
            peer = peer.qpn,
            epoch = peer.epoch,
            "endpoint connected"
        );
        self.peer = Some(peer);
        self.failed = false;
        Ok(())
    }

    /// Destroys the queue pair. Does nothing if the endpoint is closed. After an error the endpoint
    /// keeps its queue pair.
    pub(super) fn destroy(&mut self) -> Result<()> {
        if let Some(pair) = &mut self.pair {
            pair.destroy()?;
            self.pair = None;
        }
        Ok(())
    }
}
