//! Helpers of the loopback tests: domains, connected endpoints, and requests. A helper that
//! executes a request returns after the request has completed.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::{fmt, sync::Arc};

use hmem_core::{
    Access, Address, AddressRange, Addressing, AuthKey, ErrorKind, Iova, LocalKey, MrFlags, MrMode,
    Registry, RemoteKey, Result,
    provider::{
        Backing, CompletionQueue, DomainRequest, EndpointAttr, KeyRequest, Piece, Provider,
        ProviderDomain, ProviderEndpoint, ProviderRegion, Registration, StagingAttr,
    },
    transfer::{
        AtomicOp, AtomicType, Completion, LocalSegment, Operation, PeerId, RemoteSegment,
        WorkRequest,
    },
};
use hmem_provider_loopback::{Loopback, RemapPolicy};

/// Returns pseudo-random numbers to try as keys. Equal seeds give equal numbers.
pub(crate) fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    })
}

/// Returns every right except COLLECTIVE.
pub(crate) fn all_rights() -> Access {
    Access::all().difference(Access::COLLECTIVE)
}

/// Returns a domain request with default attributes.
pub(crate) fn request(mode: MrMode) -> DomainRequest {
    DomainRequest {
        nic: None,
        mode,
        auth_key: AuthKey::default(),
        hmem: false,
        registry: Arc::new(Registry::new()),
        staging: StagingAttr::default(),
    }
}

/// Returns the reason why this process cannot pin pages, or `None` if it can.
pub(crate) fn without_pinned_pages() -> Option<String> {
    let pinned = Loopback::builder().remap_policy(RemapPolicy::Pinned).build().unwrap();
    let error = pinned.open_domain(&request(MrMode::empty())).err();
    error.filter(|error| error.kind() == ErrorKind::Unavailable).map(|error| error.to_string())
}

/// Returns the policies that this process can use: without io_uring, no page can be pinned.
pub(crate) fn policies() -> Vec<RemapPolicy> {
    let pinned = without_pinned_pages().is_none().then_some(RemapPolicy::Pinned);
    [RemapPolicy::Follow].into_iter().chain(pinned).collect()
}

/// Opens a domain on the first NIC.
pub(crate) fn domain(provider: &Loopback, mode: MrMode) -> Arc<dyn ProviderDomain> {
    provider.open_domain(&request(mode)).unwrap()
}

/// The attributes of a registration. By default the region is enabled and zero-based, and has every
/// right except COLLECTIVE.
#[derive(Clone)]
pub(crate) struct RegAttr {
    pub(crate) access: Access,
    pub(crate) flags: MrFlags,
    pub(crate) key: KeyRequest,
    pub(crate) auth_key: AuthKey,
    pub(crate) addressing: Addressing,
    pub(crate) enabled: bool,
}

impl RegAttr {
    pub(crate) fn key(number: u64) -> Self {
        Self {
            access: all_rights(),
            flags: MrFlags::empty(),
            key: KeyRequest::Application(number),
            auth_key: AuthKey::default(),
            addressing: Addressing::ZeroBased,
            enabled: true,
        }
    }

    pub(crate) fn provider_key() -> Self {
        Self { key: KeyRequest::Provider, ..Self::key(0) }
    }

    pub(crate) fn access(self, access: Access) -> Self {
        Self { access, ..self }
    }

    pub(crate) fn flags(self, flags: MrFlags) -> Self {
        Self { flags, ..self }
    }

    pub(crate) fn virtual_addresses(self) -> Self {
        Self { addressing: Addressing::Virtual, ..self }
    }

    pub(crate) fn disabled(self) -> Self {
        Self { enabled: false, ..self }
    }

    pub(crate) fn request(&self) -> Registration<'_> {
        Registration {
            flags: self.flags,
            key: self.key,
            addressing: self.addressing,
            enabled: self.enabled,
            ..Registration::new(&[], self.access, &self.auth_key)
        }
    }

    pub(crate) fn register(
        &self,
        domain: &dyn ProviderDomain,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion> {
        // SAFETY: the tests keep their memory until they have deregistered it. A test that does not
        // explains why that is sound.
        unsafe { domain.register(&self.request(), pieces) }
    }
}

/// Returns a piece of host memory.
pub(crate) fn host(range: AddressRange, owned: bool) -> Piece<'static> {
    Piece { range, backing: Backing::Host { owned } }
}

/// Returns the range of a buffer.
pub(crate) fn range_of(bytes: &Buffer) -> AddressRange {
    AddressRange::new(bytes.address(), bytes.len() as u64).unwrap()
}

/// Bytes at a fixed, page-aligned address. The NIC changes the bytes too, so that the tests access
/// them only through pointers.
pub(crate) struct Buffer {
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory is accessed by volatile reads and writes of single bytes, and its only owner
// frees it.
unsafe impl Send for Buffer {}
// SAFETY: shared references access the memory by volatile reads and writes of single bytes only.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: the layout has at least one byte.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) };
        assert!(!start.is_null());
        Self { start, len }
    }

    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len.max(1), rustix::param::page_size()).unwrap()
    }

    pub(crate) fn filled(len: usize, byte: u8) -> Self {
        let buffer = Self::new(len);
        buffer.fill(byte);
        buffer
    }

    pub(crate) fn counting(len: usize) -> Self {
        let buffer = Self::new(len);
        for at in 0..len {
            buffer.set(at, (at % 251) as u8);
        }
        buffer
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn address(&self) -> Address {
        Address(self.start.expose_provenance() as u64)
    }

    pub(crate) fn range(&self) -> AddressRange {
        range_of(self)
    }

    pub(crate) fn get(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: in bounds of the allocation, which lives as long as `self`.
        unsafe { self.start.add(at).read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, byte: u8) {
        assert!(at < self.len);
        // SAFETY: in bounds of the allocation, which lives as long as `self`.
        unsafe { self.start.add(at).write_volatile(byte) }
    }

    pub(crate) fn fill(&self, byte: u8) {
        for at in 0..self.len {
            self.set(at, byte);
        }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        (0..self.len).map(|at| self.get(at)).collect()
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        for (offset, byte) in bytes.iter().enumerate() {
            self.set(at + offset, *byte);
        }
    }

    pub(crate) fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|n| self.get(at + n)))
    }

    pub(crate) fn segment(&self, at: usize, len: usize, desc: Option<LocalKey>) -> LocalSegment {
        assert!(at + len <= self.len);
        LocalSegment { address: Address(self.address().0 + at as u64), len: len as u64, desc }
    }

    pub(crate) fn whole(&self) -> LocalSegment {
        self.segment(0, self.len, None)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with the same layout.
        unsafe { std::alloc::dealloc(self.start, Self::layout(self.len)) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:#x}+{})", self.address().0, self.len)
    }
}

/// An endpoint with its completion queue.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) domain: Arc<dyn ProviderDomain>,
    pub(crate) cq: Arc<dyn CompletionQueue>,
    pub(crate) endpoint: Arc<dyn ProviderEndpoint>,
}

impl End {
    pub(crate) fn open(domain: &Arc<dyn ProviderDomain>) -> Self {
        Self::with(domain, |_| {})
    }

    pub(crate) fn with(
        domain: &Arc<dyn ProviderDomain>,
        change: impl FnOnce(&mut EndpointAttr),
    ) -> Self {
        let cq = domain.transport().unwrap().open_cq(256).unwrap();
        let mut attr = EndpointAttr {
            tx_cq: Arc::clone(&cq),
            rx_cq: Arc::clone(&cq),
            rma_event: false,
            auth_key: None,
            tx_counter: None,
            rx_counter: None,
            depth: 64,
        };
        change(&mut attr);
        let endpoint = domain.transport().unwrap().open_endpoint(&attr).unwrap();
        Self { domain: Arc::clone(domain), cq, endpoint }
    }

    pub(crate) fn peer(&self, other: &Self) -> PeerId {
        self.endpoint.resolve(&other.endpoint.name()).unwrap()
    }

    pub(crate) fn post(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        peer: PeerId,
        context: u64,
    ) -> Result<()> {
        // SAFETY: the tests keep the buffers of their requests until they have read the
        // completions.
        unsafe { self.endpoint.post(&WorkRequest { operation, local, peer, context }) }
    }

    /// Waits for the next completion of this endpoint, and returns it.
    pub(crate) fn next(&self) -> Completion {
        let mut out = Vec::new();
        loop {
            self.cq.read(&mut out, 1).unwrap();
            match out.pop() {
                Some(completion) => return completion,
                None => std::thread::yield_now(),
            }
        }
    }

    /// Returns the next completion if there is one.
    pub(crate) fn try_next(&self) -> Option<Completion> {
        let mut out = Vec::new();
        self.cq.read(&mut out, 1).unwrap();
        out.pop()
    }

    /// Posts a request and waits for its completion. Returns the completion's result.
    pub(crate) fn run(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        peer: PeerId,
    ) -> Result<u64> {
        self.post(operation, local, peer, 7)?;
        let completion = self.next();
        assert_eq!(completion.context, 7);
        completion.result
    }

    pub(crate) fn write(
        &self,
        peer: PeerId,
        local: &[LocalSegment],
        key: &RemoteKey,
        at: u64,
    ) -> Result<u64> {
        let len = local.iter().map(|segment| segment.len).sum();
        let remote = [RemoteSegment { address: Iova(at), len, key }];
        self.run(Operation::Write { remote: &remote }, local, peer)
    }

    pub(crate) fn read(
        &self,
        peer: PeerId,
        local: &[LocalSegment],
        key: &RemoteKey,
        at: u64,
    ) -> Result<u64> {
        let len = local.iter().map(|segment| segment.len).sum();
        let remote = [RemoteSegment { address: Iova(at), len, key }];
        self.run(Operation::Read { remote: &remote }, local, peer)
    }

    /// Executes a fetching atomic on one 64-bit element, and returns the old value.
    pub(crate) fn fetch(
        &self,
        peer: PeerId,
        op: AtomicOp,
        operand: u64,
        compare: Option<u64>,
        key: &RemoteKey,
        at: u64,
    ) -> Result<u64> {
        let buffers = [Buffer::new(8), Buffer::new(8), Buffer::new(8)];
        buffers[0].write(0, &operand.to_le_bytes());
        if let Some(compare) = compare {
            buffers[1].write(0, &compare.to_le_bytes());
        }
        let operation = Operation::Atomic {
            op,
            datatype: AtomicType::U64,
            remote: RemoteSegment { address: Iova(at), len: 8, key },
            result: Some(buffers[2].whole()),
            compare: compare.map(|_| buffers[1].whole()),
        };
        self.run(operation, &[buffers[0].whole()], peer)?;
        Ok(buffers[2].u64_at(0))
    }
}

/// Returns a remote key for a zero-based region of `len` bytes.
pub(crate) fn remote(region: ProviderRegion, len: u64) -> RemoteKey {
    RemoteKey::new(Addressing::ZeroBased, Iova(0), len, region.key)
}

/// Returns a remote key for a region that peers address by virtual addresses.
pub(crate) fn remote_virtual(region: ProviderRegion, range: AddressRange) -> RemoteKey {
    RemoteKey::new(Addressing::Virtual, Iova(range.start().0), range.len(), region.key)
}

/// Checks that a result is an error of this kind.
#[track_caller]
pub(crate) fn refused<T: fmt::Debug>(result: Result<T>, kind: ErrorKind) {
    match result {
        Ok(value) => panic!("expected {kind:?}, got {value:?}"),
        Err(error) => assert_eq!(error.kind(), kind, "{error}"),
    }
}

/// Two endpoints of two domains of one NIC. `here` has resolved `there`.
pub(crate) struct Pair {
    pub(crate) provider: Loopback,
    pub(crate) here: End,
    pub(crate) there: End,
    /// The peer id of `there` in requests of `here`.
    pub(crate) to: PeerId,
}

impl Pair {
    pub(crate) fn new(provider: Loopback, mode: MrMode) -> Self {
        let here = End::open(&domain(&provider, mode));
        let there = End::open(&domain(&provider, mode));
        let to = here.peer(&there);
        Self { provider, here, there, to }
    }
}
