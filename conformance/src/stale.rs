//! Transfers of memory that is freed and allocated again, which reveal stale registrations.

#![allow(unsafe_code, reason = "registers memory by address while it changes")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use hmem_core::{
    Access, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Domain, Endpoint, Error,
    ErrorKind, Iface, Iova, Promise, Raw, Region, RemoteKey, Result,
    cache::UncachedReason,
    iface::AllocRequest,
    provider::{CompletionQueue, EndpointAttr},
    transfer::{PeerId, RemoteSegment},
};

/// Maximum time for which a transfer is awaited.
const TRANSFER_TIME: Duration = Duration::from_secs(60);

/// Length of a transfer, in bytes. A short transfer shows stale pages as well as a long one.
const MOVED: usize = 64;

/// Access of the registered memory.
const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Memory that is freed and allocated again, if possible at the same address.
pub trait ReusableMemory {
    /// Returns the current address range.
    ///
    /// # Errors
    /// Fails if no memory is allocated.
    fn range(&self) -> Result<AddressRange>;

    /// Frees the memory and allocates new memory. `round` may select how the memory is freed.
    ///
    /// # Errors
    /// Fails if the memory cannot be freed or allocated.
    fn renew(&mut self, round: u64) -> Result<()>;

    /// Copies `from` to the start of the memory.
    ///
    /// # Errors
    /// Fails if the copy fails.
    fn write(&self, from: &[u8]) -> Result<()>;

    /// Copies the start of the memory to `into`.
    ///
    /// # Errors
    /// Fails if the copy fails.
    fn read(&self, into: &mut [u8]) -> Result<()>;
}

/// A page of device memory that is freed and allocated again through its iface.
#[derive(Debug)]
pub struct DeviceMemory {
    iface: Arc<dyn Iface>,
    /// The current allocation; `None` after a free and before the next allocation.
    buffer: Option<DeviceBuffer>,
}

impl DeviceMemory {
    /// Allocates a page on the iface's first device.
    ///
    /// # Errors
    /// The errors of [`DeviceBuffer::allocate`].
    pub fn allocate(iface: &Arc<dyn Iface>) -> Result<Self> {
        let mut memory = Self { iface: Arc::clone(iface), buffer: None };
        memory.renew(0)?;
        Ok(memory)
    }

    fn buffer(&self) -> Result<&DeviceBuffer> {
        let missing = || Error::new(ErrorKind::BadState, "reusable memory").iface(&self.iface);
        self.buffer.as_ref().ok_or_else(missing)
    }
}

impl ReusableMemory for DeviceMemory {
    fn range(&self) -> Result<AddressRange> {
        Ok(self.buffer()?.allocation().range)
    }

    fn renew(&mut self, _round: u64) -> Result<()> {
        self.buffer = None;
        let request = AllocRequest { len: 4096, device: DeviceId(0), kind: AllocationKind::Device };
        self.buffer = Some(DeviceBuffer::allocate(&self.iface, &request)?);
        Ok(())
    }

    fn write(&self, from: &[u8]) -> Result<()> {
        self.buffer()?.write(0, from)
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        self.buffer()?.read(0, into)
    }
}

/// Counts of rounds in which memory was freed and allocated again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleCounts {
    /// Completed rounds.
    pub rounds: u64,
    /// Rounds in which the new memory had the previous address.
    pub reused: u64,
    /// Cache lookups that found an existing registration.
    pub hits: u64,
    /// Rounds in which a transfer moved bytes of freed memory.
    pub stale: u64,
}

impl StaleCounts {
    /// Runs `rounds` rounds and adds them to the counts. After an error, `rounds` and `reused`
    /// count the rounds that were completed, and `hits` is not updated.
    ///
    /// Each round fills the memory with bytes that no other round uses, and transfers them through
    /// a registration from the domain's cache: a peer reads the memory in even rounds, and writes
    /// it in odd rounds. Then the round looks the registration up again, frees the memory and
    /// allocates new memory.
    ///
    /// # Errors
    /// - The errors of the domain and of the memory.
    /// - [`ErrorKind::Driver`] if a transfer does not complete within a minute.
    /// - The monitor's error, if the monitor cannot watch the memory: the cache then keeps no
    ///   registration of the memory.
    ///
    /// # Safety
    /// - The NIC of `domain` must keep the pages of a registration until it is deregistered, even
    ///   if the memory is freed before. Otherwise a transfer through a stale registration could
    ///   access memory of another owner.
    /// - `memory` must own its range, and nothing else may access that range.
    pub unsafe fn run(
        &mut self,
        domain: &Domain,
        memory: &mut dyn ReusableMemory,
        rounds: u64,
    ) -> Result<()> {
        let link = Link::open(domain, MOVED as u64)?;
        let before = domain.cache()?.statistics().hits;
        for number in 0..rounds {
            // SAFETY: the caller's promise.
            unsafe { self.round(&link, memory, number) }?;
            self.rounds += 1;
        }
        self.hits += domain.cache()?.statistics().hits - before;
        link.close()
    }

    /// Runs round `number`.
    ///
    /// # Safety
    /// Like [`Self::run`].
    unsafe fn round(
        &mut self,
        link: &Link<'_>,
        memory: &mut dyn ReusableMemory,
        number: u64,
    ) -> Result<()> {
        // New memory is zero, and earlier rounds have smaller numbers.
        let [before, after] =
            [1, 2].map(|part| (2 * number + part).to_le_bytes().repeat(MOVED / 8));
        let range = memory.range()?;
        memory.write(&before)?;
        let cache = link.domain.cache()?;
        // SAFETY: the caller promises that nothing else accesses the memory. A region may outlive
        // the memory: the caller promises that the NIC keeps the registered pages, so a stale hit
        // accesses no other memory.
        let raw = unsafe { Raw::new(range, Promise::ReadWrite) };
        {
            let region = cache.get(raw, REMOTE)?;
            // `Busy` is no error: the monitor may still be handling a change of the previous round.
            if let Some(UncachedReason::Unwatched(why)) = region.lease().uncached_reason()
                && !why.is_busy()
            {
                return Err(why.clone());
            }
            let key = region.key()?;
            let mut found = vec![0; MOVED];
            let expected = if number.is_multiple_of(2) {
                link.read(&key, 0, MOVED as u64)?;
                link.local.read(0, &mut found)?;
                before
            } else {
                link.write(&key, 0, &after)?;
                memory.read(&mut found)?;
                after
            };
            self.stale += u64::from(found != expected);
        }
        drop(cache.get(raw, REMOTE)?);
        memory.renew(number)?;
        self.reused += u64::from(memory.range()? == range);
        Ok(())
    }
}

/// An endpoint that is its own peer, and a registered buffer for the moved bytes.
pub(crate) struct Link<'a> {
    domain: &'a Domain,
    /// The buffer. It begins with the bytes of the last transfer.
    pub(crate) local: Region<Vec<u8>>,
    queue: Arc<dyn CompletionQueue>,
    endpoint: Endpoint,
    peer: PeerId,
}

impl<'a> Link<'a> {
    /// Opens a link for transfers of up to `len` bytes.
    pub(crate) fn open(domain: &'a Domain, len: u64) -> Result<Self> {
        let local = domain.register(vec![0; len as usize], Access::READ | Access::WRITE)?;
        let queue = domain.open_cq(16)?;
        let endpoint = domain.open_endpoint(&EndpointAttr::new(&queue))?;
        let peer = endpoint.resolve(&endpoint.name())?;
        Ok(Self { domain, local, queue, endpoint, peer })
    }

    /// Reads `len` bytes into the local buffer, `offset` bytes after the base address of `key`.
    /// Returns the number of bytes that were moved.
    pub(crate) fn read(&self, key: &RemoteKey, offset: u64, len: u64) -> Result<u64> {
        let local = self.local.slice(0, len)?;
        self.endpoint.read(&[local], &[remote(key, offset, len)], self.peer, 0)?;
        self.wait()
    }

    /// Writes bytes from the local buffer, `offset` bytes after the base address of `key`. Returns
    /// the number of bytes that were moved.
    pub(crate) fn write(&self, key: &RemoteKey, offset: u64, bytes: &[u8]) -> Result<u64> {
        let len = bytes.len() as u64;
        self.local.write(0, bytes)?;
        let local = self.local.slice(0, len)?;
        self.endpoint.write(&[local], &[remote(key, offset, len)], self.peer, 0)?;
        self.wait()
    }

    /// Waits for the next completion, and returns the number of bytes that were moved.
    fn wait(&self) -> Result<u64> {
        let mut done = Vec::with_capacity(1);
        let deadline = Instant::now() + TRANSFER_TIME;
        while self.queue.read(&mut done, 1)? == 0 {
            if self.domain.progress()? == 0 {
                if Instant::now() > deadline {
                    let remedy = "look for a fault of the NIC: a posted transfer did not complete";
                    return Err(Error::new(ErrorKind::Driver, "wait for a transfer").remedy(remedy));
                }
                std::thread::yield_now();
            }
        }
        done.remove(0).result
    }

    pub(crate) fn close(self) -> Result<()> {
        self.endpoint.close()?;
        self.local.close()?;
        Ok(())
    }
}

/// Returns a remote segment of `len` bytes, `offset` bytes after the base address of `key`.
fn remote(key: &RemoteKey, offset: u64, len: u64) -> RemoteSegment<'_> {
    RemoteSegment { address: Iova(key.base().0.wrapping_add(offset)), len, key }
}
