//! Two endpoints of one domain, and bytes that its NIC moves between them.

use std::sync::Arc;

use hmem::{
    Access, AddressRange, Domain, Endpoint, Iova, Promise, Raw, Region, RegionSlice, RemoteKey,
    Result,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
};

/// The rights of peers to read and write.
pub(crate) const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Two connected endpoints of one domain. Fields drop in order, the domain last.
pub(crate) struct Wire {
    queue: Arc<dyn CompletionQueue>,
    initiator: Endpoint,
    _target: Endpoint,
    peer: PeerId,
    pub(crate) domain: Domain,
}

impl Wire {
    pub(crate) fn open(domain: Domain) -> Self {
        let queue = domain.open_cq(64).expect("a queue");
        let open = || domain.open_endpoint(&EndpointAttr::new(&queue)).expect("an endpoint");
        let (initiator, target) = (open(), open());
        let peer = initiator.resolve(&target.name()).expect("the target");
        target.resolve(&initiator.name()).expect("the initiator");
        Self { queue, initiator, _target: target, peer, domain }
    }

    /// Registers a range for access by peers. The caller keeps the memory until the region is
    /// closed.
    pub(crate) fn expose(&self, range: AddressRange) -> Result<Region<Raw>> {
        // SAFETY: tests close the region before they free the memory, and hold no reference into
        // it.
        Ok(self.domain.register(unsafe { raw(range) }, REMOTE)?)
    }

    fn wait(&self) -> Result<()> {
        let mut done = Vec::new();
        while done.is_empty() {
            self.queue.read(&mut done, 1)?;
        }
        done.remove(0).result.map(drop)
    }

    /// Writes bytes through the NIC, at `offset` of the key's region.
    pub(crate) fn put(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<()> {
        let source = self.domain.register(bytes.to_vec(), Access::WRITE)?;
        let len = bytes.len() as u64;
        let remote = RemoteSegment { address: Iova(key.base().0 + offset), len, key };
        self.write(source.slice(0, len)?, remote)?;
        source.close()?;
        Ok(())
    }

    /// Writes bytes of registered memory through the NIC.
    pub(crate) fn write(&self, source: RegionSlice, remote: RemoteSegment<'_>) -> Result<()> {
        self.initiator.write(&[source], &[remote], self.peer, 1)?;
        self.wait()
    }

    /// Reads `len` bytes through the NIC, at `offset` of the key's region.
    pub(crate) fn get(&self, key: &RemoteKey, offset: u64, len: usize) -> Result<Vec<u8>> {
        let into = self.domain.register(vec![0u8; len], Access::READ)?;
        let remote = RemoteSegment { address: Iova(key.base().0 + offset), len: len as u64, key };
        self.read(into.slice(0, len as u64)?, remote)?;
        Ok(into.close()?)
    }

    /// Reads bytes through the NIC into registered memory.
    pub(crate) fn read(&self, into: RegionSlice, remote: RemoteSegment<'_>) -> Result<()> {
        self.initiator.read(&[into], &[remote], self.peer, 2)?;
        self.wait()
    }
}

/// Returns memory by its addresses.
///
/// # Safety
/// The caller makes the promise [`Promise::ReadWrite`], as [`Raw::new`] describes.
pub(crate) unsafe fn raw(range: AddressRange) -> Raw {
    // SAFETY: the caller makes the promise.
    unsafe { Raw::new(range, Promise::ReadWrite) }
}

/// Returns nonzero bytes that depend on the seed. Adjacent pages differ.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    hmem_conformance::link::pattern(seed, len as u64)
}
