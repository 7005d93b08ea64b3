//! Helpers for tests on a real driver: the device that `HMEM_VERBS_DEVICE` names, pages, and two
//! connected sides.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Address, AddressRange, Domain, DomainAttr, Endpoint, Iova, LocalKey, Promise, Raw,
    Region, Registry, RemoteKey, Result,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{
        AtomicOp, AtomicType, Completion, EndpointName, LocalSegment, Operation, PeerId,
        RemoteSegment, WorkRequest,
    },
};
use hmem_p2p::path::DefaultPathSelector;
use hmem_provider_verbs::{Builder, Verbs, VerbsDomain};

use crate::trials::Skipped;

/// All access rights for local use of a region.
pub(crate) const LOCAL: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);
/// All access rights for peers that the tests use.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Returns the name of the device under test. If `HMEM_VERBS_DEVICE` is not set, the test is
/// ignored. If the named device does not exist, the test fails.
pub(crate) fn device() -> Result<String, Skipped> {
    let name = std::env::var("HMEM_VERBS_DEVICE").ok().filter(|name| !name.is_empty());
    name.ok_or_else(|| Skipped("HMEM_VERBS_DEVICE names no device".to_owned()))
}

/// Anonymous memory pages. Dropping the value unmaps them.
pub(crate) struct Pages {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Self {
        Self::with_protection(len, libc::PROT_READ | libc::PROT_WRITE)
    }

    pub(crate) fn with_protection(len: usize, protection: i32) -> Self {
        // SAFETY: without a fixed address the kernel maps unused addresses.
        let mapped = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(mapped, libc::MAP_FAILED, "mmap");
        Self { address: mapped.expose_provenance() as u64, len }
    }

    pub(crate) fn range(&self) -> AddressRange {
        self.part(0, self.len as u64)
    }

    pub(crate) fn part(&self, offset: u64, len: u64) -> AddressRange {
        AddressRange::new(Address(self.address + offset), len).expect("inside the pages")
    }

    /// Replaces the pages with new zeroed pages at the same addresses.
    pub(crate) fn map_anew(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: this value owns the mapping that the call replaces.
        let mapped =
            unsafe { libc::mmap(self.pointer(0).cast(), self.len, protection, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED, "mmap");
    }

    fn pointer(&self, offset: usize) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.address as usize + offset)
    }

    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: the range is inside the mapping. The NIC writes only during a transfer, and tests
        // wait for its end.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(offset), bytes.len()) }
    }

    pub(crate) fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        // SAFETY: the range is inside the mapping, and tests wait for transfers before they read.
        unsafe { ptr::copy_nonoverlapping(self.pointer(offset), bytes.as_mut_ptr(), len) };
        bytes
    }

    /// Fills the pages with bytes that depend on their position and on the seed. Returns these
    /// bytes.
    pub(crate) fn fill(&self, seed: u8) -> Vec<u8> {
        let bytes: Vec<u8> = (0..self.len)
            .map(|index| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ seed)
            .collect();
        self.put(0, &bytes);
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping.
        unsafe { libc::munmap(self.pointer(0).cast::<c_void>(), self.len) };
    }
}

pub(crate) fn open(verbs: &Verbs, name: &str) -> Domain {
    let attr = DomainAttr { nic: Some(name.to_owned()), ..DomainAttr::default() };
    Domain::open(verbs, Arc::new(Registry::new()), Arc::new(DefaultPathSelector::new()), attr)
        .expect("open a domain")
}

/// One side of a connection: a domain, with an endpoint and its completion queue.
pub(crate) struct Side {
    pub(crate) endpoint: Endpoint,
    /// The other side, as the endpoint resolved it last.
    peer: Mutex<Option<PeerId>>,
    pub(crate) cq: Arc<dyn CompletionQueue>,
    pub(crate) domain: Domain,
}

impl Side {
    pub(crate) fn new(domain: Domain) -> Self {
        let cq = domain.open_cq(64).expect("open a completion queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("open an endpoint");
        Self { endpoint, peer: Mutex::default(), cq, domain }
    }

    /// Connects this side to the endpoint that `name` names.
    pub(crate) fn connect(&self, name: &EndpointName) -> Result<()> {
        *self.peer.lock().expect("lock") = Some(self.endpoint.resolve(name)?);
        Ok(())
    }

    /// Returns the other side, as this side's requests name it.
    pub(crate) fn peer(&self) -> PeerId {
        self.peer.lock().expect("lock").unwrap_or(PeerId(0))
    }

    pub(crate) fn verbs(&self) -> &VerbsDomain {
        VerbsDomain::of(&self.domain).expect("a domain of the verbs provider")
    }

    pub(crate) fn register(&self, range: AddressRange, access: Access) -> Result<Region<Raw>> {
        // SAFETY: the tests' pages outlive their regions, except in tests that remove pages on
        // purpose.
        let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
        Ok(self.domain.register(memory, access)?)
    }

    pub(crate) fn post(
        &self,
        operation: Operation<'_>,
        local: &[LocalSegment],
        context: u64,
    ) -> Result<()> {
        let request = WorkRequest { operation, local, peer: self.peer(), context };
        // SAFETY: the tests' pages outlive their transfers.
        unsafe { self.endpoint.post(&request) }
    }

    pub(crate) fn wait(&self) -> Completion {
        let until = Instant::now() + Duration::from_secs(60);
        let mut out = Vec::new();
        while self.cq.read(&mut out, 1).expect("read completions") == 0 {
            assert!(Instant::now() < until, "a transfer never completed");
            std::thread::yield_now();
        }
        out.remove(0)
    }

    pub(crate) fn transfer(&self, operation: Operation<'_>, local: &[LocalSegment]) -> Result<u64> {
        self.post(operation, local, 7)?;
        let completion = self.wait();
        assert_eq!(completion.context, 7, "a completion of another request");
        completion.result
    }

    pub(crate) fn write(&self, local: LocalSegment, remote: RemoteSegment<'_>) -> Result<u64> {
        self.transfer(Operation::Write { remote: &[remote] }, &[local])
    }

    pub(crate) fn read(&self, local: LocalSegment, remote: RemoteSegment<'_>) -> Result<u64> {
        self.transfer(Operation::Read { remote: &[remote] }, &[local])
    }

    pub(crate) fn atomic(
        &self,
        op: AtomicOp,
        remote: RemoteSegment<'_>,
        local: LocalSegment,
        result: Option<LocalSegment>,
        compare: Option<LocalSegment>,
    ) -> Result<u64> {
        let operation =
            Operation::Atomic { op, datatype: AtomicType::U64, remote, result, compare };
        self.transfer(operation, &[local])
    }
}

pub(crate) fn segment(range: AddressRange, desc: LocalKey) -> LocalSegment {
    LocalSegment { address: range.start(), len: range.len(), desc: Some(desc) }
}

pub(crate) fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0 + offset), len, key }
}

/// Two connected domains on one device.
pub(crate) struct Pair {
    pub(crate) near: Side,
    pub(crate) far: Side,
    pub(crate) verbs: Verbs,
}

impl Pair {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, Verbs::builder())
    }

    pub(crate) fn with(name: &str, builder: Builder) -> Self {
        let verbs = builder.build().expect("load libibverbs");
        let (near, far) = (Side::new(open(&verbs, name)), Side::new(open(&verbs, name)));
        let pair = Self { near, far, verbs };
        pair.connect();
        pair
    }

    /// Connects both sides. Tests call this again after a failed completion, which ends the
    /// connection and changes the endpoints' names.
    pub(crate) fn connect(&self) {
        let (near, far) = (self.near.endpoint.name(), self.far.endpoint.name());
        self.near.connect(&far).expect("connect the near side");
        self.far.connect(&near).expect("connect the far side");
    }
}
