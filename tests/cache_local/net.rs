//! The software NIC of these tests, a domain with a cache on it, and a peer.

use std::sync::Arc;

use hmem::{
    Access, CacheAttr, Domain, DomainAttr, Endpoint, Hmem, MrMode, RemoteKey, Result,
    cache::CacheStatistics,
    loopback::{Builder, Loopback},
    provider::{CompletionQueue, EndpointAttr},
    system::monitor::ImportMonitor,
    transfer::{Completion, LocalSegment, Operation, PeerId, RemoteSegment, WorkRequest},
};

use rustix::param::page_size;

use crate::{machine, silent::Silent};

/// A domain with a cache on a NIC that needs descriptors, and a peer (`far`) with a region to write
/// to.
pub(crate) struct Net {
    pub(crate) endpoint: Option<Endpoint>,
    pub(crate) cq: Arc<dyn CompletionQueue>,
    pub(crate) domain: Domain,
    pub(crate) peer: PeerId,
    pub(crate) key: RemoteKey,
    pub(crate) far: hmem::Region<Vec<u8>>,
    pub(crate) far_endpoint: Endpoint,
    pub(crate) far_cq: Arc<dyn CompletionQueue>,
    pub(crate) far_domain: Domain,
}

impl Net {
    pub(crate) fn open(hmem: &Hmem, mode: MrMode) -> Self {
        Self::with(hmem, DomainAttr { mr_mode: mode, ..DomainAttr::default() }, 16, 64)
    }

    pub(crate) fn with(hmem: &Hmem, attr: DomainAttr, depth: usize, queue: usize) -> Self {
        let domain = hmem
            .domain("loopback", DomainAttr { cache: Some(CacheAttr::default()), ..attr.clone() })
            .expect("a domain");
        let far_domain = hmem.domain("loopback", attr).expect("a domain");
        let open = |domain: &Domain| {
            let cq = domain.open_cq(queue).expect("a queue");
            let attr = EndpointAttr { depth, ..EndpointAttr::new(&cq) };
            (domain.open_endpoint(&attr).expect("an endpoint"), cq)
        };
        let ((endpoint, cq), (far_endpoint, far_cq)) = (open(&domain), open(&far_domain));
        let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::SEND | Access::RECV;
        let far = far_domain.register(vec![0_u8; 64 * page_size()], all).expect("registered");
        let peer = endpoint.resolve(&far_endpoint.name()).expect("the peer");
        far_endpoint.resolve(&endpoint.name()).expect("this side");
        let key = far.key().expect("a key");
        Self {
            endpoint: Some(endpoint),
            cq,
            domain,
            peer,
            key,
            far,
            far_endpoint,
            far_cq,
            far_domain,
        }
    }

    pub(crate) fn post(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        context: u64,
    ) -> Result<()> {
        let request = WorkRequest { operation, local, peer: self.peer, context };
        // SAFETY: the memory is the test's own, outlives the transfer, and no reference to it
        // exists.
        unsafe { self.endpoint.as_ref().expect("open").post(&request) }
    }

    pub(crate) fn remote(&self, offset: u64, len: u64) -> [RemoteSegment<'_>; 1] {
        [RemoteSegment { address: hmem::Iova(self.key.base().0 + offset), len, key: &self.key }]
    }

    pub(crate) fn write(&self, local: &[LocalSegment], context: u64) -> Result<()> {
        let remote = self.remote(0, local.iter().map(|segment| segment.len).sum());
        self.post(Operation::Write { remote: &remote }, local, context)
    }

    pub(crate) fn read(&self, local: &[LocalSegment], context: u64) -> Result<()> {
        let remote = self.remote(0, local.iter().map(|segment| segment.len).sum());
        self.post(Operation::Read { remote: &remote }, local, context)
    }

    pub(crate) fn wait(&self, cq: &Arc<dyn CompletionQueue>) -> Completion {
        let mut done = Vec::new();
        while cq.read(&mut done, 1).expect("the queue") == 0 {
            self.domain.progress().expect("progress");
            self.far_domain.progress().expect("progress");
        }
        done.remove(0)
    }

    pub(crate) fn done(&self, context: u64) -> u64 {
        let completion = self.wait(&self.cq);
        assert_eq!(completion.context, context);
        completion.result.expect("it worked")
    }

    pub(crate) fn far_bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.far.read(0, &mut bytes).expect("inside");
        bytes
    }

    pub(crate) fn statistics(&self) -> CacheStatistics {
        self.domain.cache().expect("a cache").statistics()
    }

    /// Asserts that no region is leased and that all regions can be deregistered.
    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.statistics().leases, 0);
        let cache = self.domain.cache().expect("a cache");
        cache.evict_idle();
        cache.reclaim();
        assert_eq!(self.domain.live().regions, 0, "{:?}", cache.statistics());
    }
}

pub(crate) fn nic() -> Builder {
    Loopback::builder().remap_policy(machine::pages()).needs(MrMode::LOCAL)
}

/// Returns an `Hmem` with this NIC and an imported monitor, which the test notifies of changes.
pub(crate) fn with_imported_monitor(nic: Builder) -> (Hmem, Arc<ImportMonitor>) {
    let import = ImportMonitor::new(Arc::new(Silent)).expect("a monitor");
    let builder =
        Hmem::builder().without_vendor_ifaces().imported_cache_monitor(Arc::clone(&import) as _);
    (builder.provider(nic.build().expect("a software NIC")).build().expect("started"), import)
}
