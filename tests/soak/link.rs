//! Two connected endpoints on a NIC.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use hmem::{
    Access, Domain, Endpoint, Region, RemoteKey, Result,
    provider::{CompletionQueue, EndpointAttr},
    transfer::PeerId,
};

use crate::load::Registered;

/// All rights that requests of a domain can need for its own memory.
const LOCAL: Access = Access::READ.union(Access::WRITE).union(Access::SEND).union(Access::RECV);

/// The size of the local buffer.
pub(crate) const SCRATCH: usize = 64 << 10;

/// An initiator with a registered buffer, and a peer in the domain that exposes memory.
pub(crate) struct Link {
    buffer: Region<Vec<u8>>,
    pub(crate) target: Endpoint,
    pub(crate) target_cq: Arc<dyn CompletionQueue>,
    pub(crate) peer: PeerId,
    pub(crate) endpoint: Endpoint,
    cq: Arc<dyn CompletionQueue>,
    _domain: Domain,
}

impl Link {
    /// Opens a link between two domains on the same NIC.
    pub(crate) fn open(domain: Domain, target: &Domain, registered: &Registered) -> Self {
        let cq = domain.open_cq(64).expect("a queue");
        let target_cq = target.open_cq(64).expect("a queue");
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&cq)).expect("an endpoint");
        let target = target.open_endpoint(&EndpointAttr::new(&target_cq)).expect("an endpoint");
        let peer = endpoint.resolve(&target.name()).expect("the target");
        let buffer = domain.register(vec![0; SCRATCH], LOCAL).expect("a buffer");
        registered.opened.fetch_add(1, Relaxed);
        Self { buffer, target, target_cq, peer, endpoint, cq, _domain: domain }
    }

    /// Waits for the completion of the initiator's request.
    pub(crate) fn completion(&self) -> Result<u64> {
        completion(&*self.cq)
    }

    /// Writes bytes at an offset of the memory with `key`.
    pub(crate) fn push(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<()> {
        self.buffer.write(0, bytes)?;
        let len = bytes.len() as u64;
        self.endpoint.write(
            &[self.buffer.slice(0, len)?],
            &[key.slice(offset, len)?],
            self.peer,
            1,
        )?;
        assert_eq!(self.completion()?, len, "bytes of a write");
        Ok(())
    }

    /// Reads bytes at an offset of the memory with `key`. Asserts that a failed read changes
    /// nothing.
    pub(crate) fn pull(&self, key: &RemoteKey, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0xEE; len];
        self.buffer.write(0, &bytes)?;
        let local = [self.buffer.slice(0, len as u64)?];
        self.endpoint.read(&local, &[key.slice(offset, len as u64)?], self.peer, 2)?;
        let read = self.completion();
        self.buffer.read(0, &mut bytes)?;
        if let Err(error) = read {
            assert!(bytes.iter().all(|byte| *byte == 0xEE), "a refused read moved bytes: {error}");
            return Err(error);
        }
        Ok(bytes)
    }

    /// Sends a message into memory of the target. Returns its length as the receiver sees it.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<u64> {
        self.buffer.write(0, bytes)?;
        let local = [self.buffer.slice(0, bytes.len() as u64)?];
        self.endpoint.send(&local, None, self.peer, 3)?;
        self.completion()?;
        completion(&*self.target_cq)
    }
}

/// Waits for a request to end. The watchdog ends the process if it never does.
pub(crate) fn completion(cq: &dyn CompletionQueue) -> Result<u64> {
    let mut done = Vec::with_capacity(1);
    cq.wait(&mut done, 1, Duration::MAX)?;
    done.remove(0).result
}
