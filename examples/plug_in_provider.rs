//! A plug-in provider: a software NIC that copies bytes when a request is posted.
//!
//! `docs/adding-a-provider.md` uses this provider as a skeleton. The provider has the required
//! methods and no facet, and passes the conformance suite. A real plug-in calls its driver in the
//! same places. In a crate of its own, the provider needs `hmem-core` and `libc`.
//!
//! ```text
//! cargo run --example plug_in_provider
//! ```

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use hmem::{
    Access, Address, AddressRange, AuthKey, Error, ErrorKind, LocalKey, MrFlags, MrMode, Result,
    os_page_sizes,
    provider::{
        Backing, CompletionQueue, DomainRequest, EndpointAttr, Imports, LiveObjects, MsgOrder, Nic,
        Piece, ProgressModel, Provider, ProviderAttr, ProviderDomain, ProviderEndpoint,
        ProviderRegion, Registration, Transport,
    },
    transfer::{
        Completion, CompletionKind, EndpointName, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};

const NAME: &str = "copy-nic";
/// The first bytes of each endpoint's name.
const MAGIC: [u8; 4] = *b"copy";

fn refused(kind: ErrorKind, operation: &'static str) -> Error {
    Error::new(kind, operation).provider(NAME)
}

/// The provider. All its domains share one fabric, so that endpoints of different domains reach
/// each other.
#[derive(Debug, Default)]
pub(crate) struct CopyNic {
    fabric: Arc<Fabric>,
}

impl Provider for CopyNic {
    fn name(&self) -> &str {
        NAME
    }

    fn nics(&self) -> Result<Vec<ProviderAttr>> {
        Ok(vec![attr()])
    }

    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>> {
        // The core has checked the NIC's name and negotiated the mode.
        let id = self.fabric.lock().next_id();
        let (fabric, auth_key) = (Arc::clone(&self.fabric), request.auth_key.clone());
        Ok(Arc::new(CopyDomain { id, attr: attr(), auth_key, fabric }))
    }
}

/// Returns the attributes of the NIC. The core checks requests against them.
fn attr() -> ProviderAttr {
    ProviderAttr {
        nic: Nic { provider: NAME.into(), name: "copy0".into(), pci_bus_id: None },
        required_mr_mode: MrMode::LOCAL | MrMode::VIRT_ADDR | MrMode::PROV_KEY,
        basic_mr_mode: MrMode::BASIC_MEANS,
        key_size: 8,
        raw_key_size: 0,
        mr_iov_limit: 1,
        max_mr_size: 1 << 30,
        max_mr_count: u64::MAX,
        page_sizes: os_page_sizes().to_vec(),
        imports: Imports::default(),
        staged_access: Access::empty(),
        flags: MrFlags::empty(),
        // A request is executed by the call that posts it.
        progress: ProgressModel::Nic,
        order: MsgOrder::all(),
        cq_data_size: 0,
        driver_cache: None,
    }
}

/// The state of all domains. One lock orders transfers against registrations: no transfer is in
/// flight while a region is deregistered.
#[derive(Debug, Default)]
struct Fabric(Mutex<State>);

impl Fabric {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct State {
    last_id: u64,
    /// The regions by key. A key is never used for a second region.
    regions: BTreeMap<u64, Region>,
    endpoints: BTreeMap<u64, EndpointState>,
}

#[derive(Debug)]
struct Region {
    domain: u64,
    range: AddressRange,
    access: Access,
    auth_key: AuthKey,
}

#[derive(Debug)]
struct EndpointState {
    domain: u64,
    auth_key: AuthKey,
    receives: VecDeque<(u64, Vec<LocalSegment>)>,
    messages: VecDeque<Vec<u8>>,
    rx_cq: CopyQueue,
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Returns the ranges of local segments. Fails unless their regions have the right `access`.
    fn local(
        &self,
        domain: u64,
        segments: &[LocalSegment],
        access: Access,
    ) -> Result<Vec<AddressRange>> {
        let range = |segment: &LocalSegment| {
            let region = segment.desc.and_then(|desc| self.regions.get(&desc.to_provider()));
            let region = region.filter(|region| region.domain == domain).ok_or_else(|| {
                refused(ErrorKind::NoRegion, "post")
                    .remedy("name a descriptor of a region that is registered in this domain")
            })?;
            part(region, segment.address, segment.len, access)
        };
        segments.iter().map(range).collect()
    }

    /// Returns the ranges of a peer's memory that remote segments name.
    fn remote(
        &self,
        endpoint: &CopyEndpoint,
        peer: PeerId,
        segments: &[RemoteSegment<'_>],
        access: Access,
    ) -> Result<Vec<AddressRange>> {
        let peer = self.endpoint(peer)?;
        let range = |segment: &RemoteSegment<'_>| {
            let region = self.regions.get(&segment.key.as_u64()?);
            let region = region
                .filter(|region| region.domain == peer.domain)
                .ok_or_else(|| refused(ErrorKind::InvalidKey, "transfer"))?;
            if region.auth_key != endpoint.auth_key {
                return Err(refused(ErrorKind::AccessDenied, "transfer")
                    .remedy("use the authorization key of the region"));
            }
            // In VIRT_ADDR mode peers use the region's own addresses.
            part(region, Address(segment.address.0), segment.len, access)
        };
        segments.iter().map(range).collect()
    }

    fn endpoint(&self, peer: PeerId) -> Result<&EndpointState> {
        self.endpoints.get(&peer.0).ok_or_else(|| refused(ErrorKind::Unreachable, "transfer"))
    }

    /// Matches the messages of an endpoint with its posted receives.
    fn deliver(&mut self, id: u64) {
        let Some(endpoint) = self.endpoints.get_mut(&id) else { return };
        let mut matched = Vec::new();
        while !endpoint.messages.is_empty() && !endpoint.receives.is_empty() {
            matched.extend(endpoint.messages.pop_front().zip(endpoint.receives.pop_front()));
        }
        let (domain, queue) = (endpoint.domain, endpoint.rx_cq.clone());
        for (message, (context, segments)) in matched {
            // The region may have been closed since the receive was posted.
            let buffer = self.local(domain, &segments, Access::RECV);
            let result = buffer.and_then(|buffer| {
                if len(&buffer) < message.len() as u64 {
                    return Err(refused(ErrorKind::Truncated, "receive"));
                }
                scatter(&buffer, &message)
            });
            queue.push(Completion::new(context, CompletionKind::Receive, result));
        }
    }
}

/// Returns the range of a part of a region. Checks the bounds and the rights, as hardware does.
fn part(region: &Region, start: Address, len: u64, access: Access) -> Result<AddressRange> {
    let range = AddressRange::checked(start, len).filter(|&range| {
        region.range.contains_range(range) || (len == 0 && region.range.contains(start))
    });
    let range = range.ok_or_else(|| {
        refused(ErrorKind::OutOfBounds, "transfer").context("region", region.range)
    })?;
    match region.access.intersects(access) {
        true => Ok(range),
        false => Err(refused(ErrorKind::AccessDenied, "transfer").context("needs", access)),
    }
}

/// A domain of the NIC.
#[derive(Debug)]
struct CopyDomain {
    id: u64,
    attr: ProviderAttr,
    auth_key: AuthKey,
    fabric: Arc<Fabric>,
}

// SAFETY: every access checks the bounds and rights of a region under the lock of the fabric, and
// ends before the lock is released. `register` adds one region and `deregister` removes it under
// the same lock. Handles are keys, which are looked up and never reused. A request completes after
// its bytes were copied.
unsafe impl ProviderDomain for CopyDomain {
    fn attr(&self) -> &ProviderAttr {
        &self.attr
    }

    unsafe fn register(
        &self,
        registration: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        let [Piece { range, backing: Backing::Host { .. } }] = pieces else {
            return Err(refused(ErrorKind::Unsupported, "register")
                .remedy("this NIC registers one range of host memory"));
        };
        let mut state = self.fabric.lock();
        let key = state.next_id();
        let region = Region {
            domain: self.id,
            range: *range,
            access: registration.access,
            auth_key: registration.auth_key.clone(),
        };
        state.regions.insert(key, region);
        Ok(ProviderRegion { token: key, local: LocalKey::from_provider(key), key })
    }

    fn deregister(&self, region: ProviderRegion) -> Result<()> {
        let mut state = self.fabric.lock();
        match state.regions.get(&region.token) {
            Some(found) if found.domain == self.id => {
                state.regions.remove(&region.token);
                Ok(())
            }
            _ => Err(refused(ErrorKind::InvalidKey, "deregister")),
        }
    }

    fn live(&self) -> LiveObjects {
        let state = self.fabric.lock();
        let regions = state.regions.values().filter(|region| region.domain == self.id);
        let endpoints = state.endpoints.values().filter(|endpoint| endpoint.domain == self.id);
        let mut live = LiveObjects::default();
        live.endpoints = endpoints.count() as u64;
        for region in regions {
            live.regions += 1;
            live.page_registrations += 1;
            live.bytes += region.range.len();
        }
        live
    }

    fn transport(&self) -> Option<&dyn Transport> {
        Some(self)
    }
}

impl Transport for CopyDomain {
    fn open_cq(&self, _depth: usize) -> Result<Arc<dyn CompletionQueue>> {
        Ok(Arc::new(CopyQueue::default()))
    }

    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>> {
        let auth_key = attr.auth_key.clone().unwrap_or_else(|| self.auth_key.clone());
        let (tx_cq, rx_cq) = (CopyQueue::of(&*attr.tx_cq)?, CopyQueue::of(&*attr.rx_cq)?);
        let mut state = self.fabric.lock();
        let id = state.next_id();
        let endpoint = EndpointState {
            domain: self.id,
            auth_key: auth_key.clone(),
            receives: VecDeque::new(),
            messages: VecDeque::new(),
            rx_cq,
        };
        state.endpoints.insert(id, endpoint);
        let (domain, depth, fabric) = (self.id, attr.depth, Arc::clone(&self.fabric));
        let (nic, peers) = (self.attr.clone(), Mutex::default());
        Ok(Arc::new(CopyEndpoint { id, domain, nic, auth_key, depth, tx_cq, peers, fabric }))
    }
}

/// A completion queue. Clones share the queue.
#[derive(Clone, Debug, Default)]
struct CopyQueue(Arc<Mutex<VecDeque<Completion>>>);

impl CopyQueue {
    /// Returns the queue behind a trait object. Fails unless it is a queue of this provider.
    fn of(queue: &dyn CompletionQueue) -> Result<Self> {
        let queue: &dyn std::any::Any = queue;
        queue.downcast_ref::<Self>().cloned().ok_or_else(|| {
            refused(ErrorKind::InvalidArgument, "open endpoint")
                .remedy("open both queues on this domain")
        })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Completion>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, completion: Completion) {
        self.lock().push_back(completion);
    }
}

impl CompletionQueue for CopyQueue {
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize> {
        let mut queue = self.lock();
        let count = max.min(queue.len());
        out.extend(queue.drain(..count));
        Ok(count)
    }
}

/// An endpoint of a domain.
#[derive(Debug)]
struct CopyEndpoint {
    id: u64,
    domain: u64,
    nic: ProviderAttr,
    auth_key: AuthKey,
    depth: usize,
    tx_cq: CopyQueue,
    /// The ids of the resolved peers.
    peers: Mutex<BTreeSet<u64>>,
    fabric: Arc<Fabric>,
}

impl CopyEndpoint {
    fn peers(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a request with local memory, and queues its completion. The call fails if the queue
    /// is full of unread completions or a local segment is invalid. The completion reports every
    /// other error.
    fn execute(
        &self,
        state: &mut State,
        request: &WorkRequest<'_>,
        (kind, access): (CompletionKind, Access),
        run: impl FnOnce(&mut State, &[AddressRange]) -> Result<u64>,
    ) -> Result<()> {
        if self.tx_cq.lock().len() >= self.depth {
            return Err(refused(ErrorKind::Again, "post").remedy("read completions first"));
        }
        let local = state.local(self.domain, request.local, access)?;
        let result = run(state, &local);
        self.tx_cq.push(Completion::new(request.context, kind, result));
        Ok(())
    }
}

impl ProviderEndpoint for CopyEndpoint {
    fn name(&self) -> EndpointName {
        EndpointName([&MAGIC[..], &self.id.to_le_bytes()].concat())
    }

    fn resolve(&self, name: &EndpointName) -> Result<PeerId> {
        let id = name.0.strip_prefix(&MAGIC).and_then(|id| id.try_into().ok());
        let id = id.ok_or_else(|| refused(ErrorKind::Malformed, "resolve"))?;
        let peer = PeerId(u64::from_le_bytes(id));
        self.fabric.lock().endpoint(peer)?;
        self.peers().insert(peer.0);
        Ok(peer)
    }

    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()> {
        let peer = request.peer;
        let is_receive = matches!(request.operation, Operation::Receive { .. });
        if !is_receive && !self.peers().contains(&peer.0) {
            return Err(refused(ErrorKind::InvalidArgument, "post")
                .remedy("name a peer that this endpoint has resolved"));
        }
        let mut state = self.fabric.lock();
        let state = &mut *state;
        match request.operation {
            Operation::Write { remote } => {
                let kind = (CompletionKind::Write, Access::WRITE);
                self.execute(state, request, kind, |state, from| {
                    let to = state.remote(self, peer, remote, Access::ANY_REMOTE_WRITE)?;
                    transfer(from, &to)
                })
            }
            Operation::Read { remote } => {
                let kind = (CompletionKind::Read, Access::READ);
                self.execute(state, request, kind, |state, to| {
                    let from = state.remote(self, peer, remote, Access::REMOTE_READ)?;
                    transfer(&from, to)
                })
            }
            Operation::Send { tag: None, invalidate: None } => {
                let kind = (CompletionKind::Send, Access::SEND);
                self.execute(state, request, kind, |state, from| {
                    let message = gather(from)?;
                    let target = state.endpoints.get_mut(&peer.0);
                    let target = target
                        .filter(|target| target.auth_key == self.auth_key)
                        .ok_or_else(|| refused(ErrorKind::Unreachable, "send"))?;
                    let sent = message.len() as u64;
                    target.messages.push_back(message);
                    state.deliver(peer.0);
                    Ok(sent)
                })
            }
            Operation::Receive { tag: None, from: None } => {
                state.local(self.domain, request.local, Access::RECV)?;
                let own = state.endpoints.get_mut(&self.id);
                let own = own.ok_or_else(|| refused(ErrorKind::BadState, "receive"))?;
                if own.receives.len() >= self.depth {
                    return Err(refused(ErrorKind::Again, "receive"));
                }
                own.receives.push_back((request.context, request.local.to_vec()));
                state.deliver(self.id);
                Ok(())
            }
            // Always an error, because the NIC's `cq_data_size` is 0.
            Operation::WriteImmediate { data, .. } | Operation::SendImmediate { data, .. } => {
                self.nic.check_data(data)
            }
            _ => Err(refused(ErrorKind::Unsupported, "post")
                .remedy("this NIC has writes, reads, and messages without tags")),
        }
    }

    fn close(&self) -> Result<()> {
        let Some(own) = self.fabric.lock().endpoints.remove(&self.id) else { return Ok(()) };
        for (context, _) in own.receives {
            let canceled = Err(refused(ErrorKind::Canceled, "receive"));
            own.rx_cq.push(Completion::new(context, CompletionKind::Receive, canceled));
        }
        Ok(())
    }
}

fn len(ranges: &[AddressRange]) -> u64 {
    ranges.iter().map(|range| range.len()).sum()
}

/// Copies the bytes of the ranges `from` to the ranges `to`, and returns the number of bytes. Fails
/// if the two lists differ in their total bytes.
fn transfer(from: &[AddressRange], to: &[AddressRange]) -> Result<u64> {
    if len(from) != len(to) {
        return Err(refused(ErrorKind::InvalidArgument, "transfer")
            .remedy("name as many local bytes as remote ones"));
    }
    scatter(to, &gather(from)?)
}

fn gather(ranges: &[AddressRange]) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len(ranges) as usize];
    let mut rest = &mut bytes[..];
    for range in ranges {
        let (now, later) = rest.split_at_mut(range.len() as usize);
        let local = libc::iovec { iov_base: now.as_mut_ptr().cast(), iov_len: now.len() };
        // SAFETY: the local side is a part of `bytes`. The kernel checks the other side.
        let moved =
            unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &iov(*range), 1, 0) };
        arrived(moved, *range)?;
        rest = later;
    }
    Ok(bytes)
}

fn scatter(ranges: &[AddressRange], bytes: &[u8]) -> Result<u64> {
    let mut rest = bytes;
    for range in ranges {
        let (now, later) = rest.split_at(rest.len().min(range.len() as usize));
        let range = range.slice(0, now.len() as u64).expect("no longer than the range");
        let local = libc::iovec { iov_base: now.as_ptr().cast_mut().cast(), iov_len: now.len() };
        // SAFETY: the local side is a part of `bytes`, which the kernel only reads. The other side
        // is a part of a region that grants writes, as the caller of `register` allowed.
        let moved =
            unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &iov(range), 1, 0) };
        arrived(moved, range)?;
        rest = later;
    }
    Ok(bytes.len() as u64)
}

/// Returns a range in the form of the kernel's copy calls. The kernel detects unmapped pages, so
/// the transfer fails and the process does not crash.
fn iov(range: AddressRange) -> libc::iovec {
    libc::iovec { iov_base: range.start().0 as *mut _, iov_len: range.len() as usize }
}

fn arrived(moved: isize, range: AddressRange) -> Result<()> {
    if moved >= 0 && moved as u64 == range.len() {
        return Ok(());
    }
    Err(refused(ErrorKind::BadAddress, "transfer").context("range", range))
}

pub(crate) fn run() -> Result<()> {
    use std::time::Duration;

    use hmem::{DomainAttr, Hmem};

    let hmem = Hmem::builder().without_vendor_ifaces().provider(CopyNic::default()).build()?;
    let domain = hmem.domain(NAME, DomainAttr::default())?;
    let source = domain.register(b"by way of a plug-in".to_vec(), Access::WRITE)?;
    let target = domain.register(vec![0; 19], Access::REMOTE_WRITE)?;
    println!("registered: {}", target.decision()?);

    let queue = domain.open_cq(256)?;
    let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
    let peer = endpoint.resolve(&endpoint.name())?;
    let key = target.key()?;
    endpoint.write(&[source.slice(0, 19)?], &[key.slice(0, 19)?], peer, 1)?;
    let mut done = Vec::new();
    queue.wait(&mut done, 1, Duration::MAX)?;
    println!("moved: {} bytes", done.remove(0).result?);

    let bytes = target.close()?;
    println!("arrived: {}", String::from_utf8_lossy(&bytes));
    assert_eq!(bytes, b"by way of a plug-in");
    Ok(())
}

#[allow(dead_code, reason = "the test that includes this file calls `run`")]
fn main() -> Result<()> {
    run()
}
