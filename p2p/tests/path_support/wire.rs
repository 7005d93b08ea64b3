//! Transfers between an initiator's endpoint and a target's, over one fabric.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, Atomic, Domain, Endpoint, Iova, Region, RemoteKey, Result,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
};

pub(crate) const LOCAL: Access =
    Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);

/// An endpoint with its completion queue.
pub(crate) struct End {
    pub(crate) endpoint: Endpoint,
    pub(crate) cq: Arc<dyn CompletionQueue>,
}

impl End {
    pub(crate) fn of(domain: &Domain) -> Result<Self> {
        let cq = domain.open_cq(64)?;
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq))?;
        Ok(Self { endpoint, cq })
    }
}

/// An initiator with a registered buffer, and the target that it is connected to.
pub(crate) struct Wire<'a> {
    near: End,
    pub(crate) far: End,
    domains: [&'a Domain; 2],
    peer: PeerId,
    pub(crate) local: Region<Vec<u8>>,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(near: &'a Domain, far: &'a Domain, len: usize) -> Self {
        Self::open(near, far, len).expect("a wire")
    }

    pub(crate) fn open(near: &'a Domain, far: &'a Domain, len: usize) -> Result<Self> {
        let domains = [near, far];
        let (near_end, far_end) = (End::of(near)?, End::of(far)?);
        let peer = near_end.endpoint.resolve(&far_end.endpoint.name())?;
        let local = near.register(vec![0u8; len], LOCAL)?;
        Ok(Self { near: near_end, far: far_end, domains, peer, local })
    }

    /// Closes the initiator's region and both endpoints.
    pub(crate) fn close(self) -> Result<()> {
        self.local.close()?;
        self.near.endpoint.close()?;
        self.far.endpoint.close()?;
        Ok(())
    }

    /// Waits for the next completion of one end and returns its result.
    fn end(&self, end: &End) -> Result<u64> {
        let mut out = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            for domain in self.domains {
                domain.progress()?;
            }
            if end.cq.read(&mut out, 1)? == 1 {
                return out.remove(0).result;
            }
        }
        panic!("the transfer never ended");
    }

    fn remote<'k>(key: &'k RemoteKey, at: u64, len: u64) -> RemoteSegment<'k> {
        RemoteSegment { address: Iova(key.base().0 + at), len, key }
    }

    /// Writes `bytes` to the target's region at offset `at`.
    pub(crate) fn push(&self, key: &RemoteKey, at: u64, bytes: &[u8]) -> Result<u64> {
        self.local.write(0, bytes)?;
        let local = [self.local.slice(0, bytes.len() as u64)?];
        self.near.endpoint.write(
            &local,
            &[Self::remote(key, at, bytes.len() as u64)],
            self.peer,
            1,
        )?;
        self.end(&self.near)
    }

    /// Reads `len` bytes of the target's region from offset `at`.
    pub(crate) fn pull(&self, key: &RemoteKey, at: u64, len: usize) -> Result<Vec<u8>> {
        let local = [self.local.slice(0, len as u64)?];
        self.near.endpoint.read(&local, &[Self::remote(key, at, len as u64)], self.peer, 2)?;
        self.end(&self.near)?;
        let mut bytes = vec![0; len];
        self.local.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Sends `bytes` as a message into part of the target's region.
    pub(crate) fn send(&self, into: hmem_core::RegionSlice, bytes: &[u8]) -> Result<u64> {
        self.local.write(0, bytes)?;
        self.far.endpoint.receive(&[into], None, 3)?;
        self.near.endpoint.send(&[self.local.slice(0, bytes.len() as u64)?], None, self.peer, 4)?;
        self.end(&self.near)?;
        self.end(&self.far)
    }

    /// Atomically adds `value` to the eight bytes at offset `at` of the target's region.
    pub(crate) fn add(&self, key: &RemoteKey, at: u64, value: u64) -> Result<u64> {
        self.local.write(0, &value.to_ne_bytes())?;
        let atomic = Atomic {
            op: hmem_core::transfer::AtomicOp::Sum,
            datatype: hmem_core::transfer::AtomicType::U64,
            operand: self.local.slice(0, 8)?,
            remote: Self::remote(key, at, 8),
            result: None,
            compare: None,
        };
        self.near.endpoint.atomic(&atomic, self.peer, 5)?;
        self.end(&self.near)
    }
}
