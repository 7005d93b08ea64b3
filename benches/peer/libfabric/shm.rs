//! Writes with libfabric: `fi_write` between two endpoints of the `shm` provider in one process.
//!
//! A write is finished when the initiator has its completion *and* the bytes are in the target's
//! memory. For short writes, `shm` reports the completion as soon as the bytes are in the target's
//! command queue. The target copies them to its memory when it polls its own completion queue. A
//! measurement that stops at the completion would leave out the target's work.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_int;
use std::ptr::NonNull;

use super::error::FabricError;
use super::info::{Hints, Info};
use super::objects::Object;
use super::{Libfabric, sys};

/// Minimum length of a write, in bytes. The last eight bytes of each write are its mark: a number
/// that shows that the write has arrived.
const MARK: usize = size_of::<u64>();

/// Alignment and minimum size of the source and destination buffers, in bytes.
const PAGE: usize = 4096;

/// Number of polls after which a write counts as stalled. That many polls take seconds, and a write
/// takes microseconds.
const POLLS: u64 = 100_000_000;

/// Number of entries in each completion queue. Only one write is in flight at a time.
const COMPLETIONS: usize = 64;

/// Key under which the target's buffer is registered.
const TARGET_KEY: u64 = 1;

/// The mechanism by which `shm` moves the bytes of a write. `shm` chooses the mechanism from the
/// requested properties, so each variant requests different properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShmWritePath {
    /// Each write goes through the target's command queue, because writes must keep their order. Up
    /// to 4 KiB are copied into and out of the queue. For longer writes the target calls
    /// `process_vm_readv` or, if the kernel does not allow that, copies through bounce buffers.
    CommandQueue,
    /// The initiator calls `process_vm_writev` for each write, whatever the length. `shm` uses this
    /// mechanism by default, with virtual addresses and unordered writes. If the kernel refuses the
    /// call, the mechanism is that of [`Self::CommandQueue`].
    CrossMemoryAttach,
    /// Like [`Self::CommandQueue`], but long writes are always copied through bounce buffers. `shm`
    /// does not call `process_vm_readv` for device memory, so the benchmark requests `FI_HMEM`. The
    /// variable `FI_SHM_DISABLE_CMA` has the same effect, but only on the whole process and only if
    /// it is set before libfabric is loaded.
    Bounce,
}

impl ShmWritePath {
    fn hints(self) -> Hints {
        let caps = sys::FI_RMA | sys::FI_WRITE | sys::FI_REMOTE_WRITE;
        let (caps, mr_mode, message_order) = match self {
            Self::CommandQueue => (caps, sys::FI_MR_VIRT_ADDR, sys::FI_ORDER_RMA_WAW),
            Self::CrossMemoryAttach => (caps, sys::FI_MR_VIRT_ADDR, 0),
            Self::Bounce => {
                (caps | sys::FI_HMEM, sys::FI_MR_VIRT_ADDR | sys::FI_MR_HMEM, sys::FI_ORDER_RMA_WAW)
            }
        };
        Hints {
            provider: "shm",
            endpoint_type: sys::FI_EP_RDM,
            caps,
            mr_mode,
            message_order,
            source: None,
        }
    }
}

/// Zeroed, page-aligned bytes that libfabric reads and writes. Rust code accesses them only through
/// the raw pointer.
#[derive(Debug)]
struct Buffer {
    bytes: NonNull<u8>,
    layout: Layout,
}

impl Buffer {
    fn new(len: usize) -> Result<Self, FabricError> {
        let out_of_memory = || FabricError::OutOfMemory { bytes: len };
        let layout = Layout::from_size_align(len.max(PAGE), PAGE).map_err(|_| out_of_memory())?;
        // SAFETY: the layout has at least one page, so its size is not zero.
        let bytes = unsafe { alloc_zeroed(layout) };
        let bytes = NonNull::new(bytes).ok_or_else(out_of_memory)?;
        Ok(Self { bytes, layout })
    }

    /// Returns a pointer to the mark of a write of `len` bytes: the last eight bytes. The caller
    /// ensures that `len` is a positive multiple of 8 and at most the buffer's length.
    #[inline]
    fn mark(&self, len: usize) -> *mut u64 {
        debug_assert!(len >= MARK && len <= self.layout.size() && len.is_multiple_of(MARK));
        self.bytes.as_ptr().wrapping_add(len - MARK).cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the bytes with this layout, and they are freed only here.
        unsafe { dealloc(self.bytes.as_ptr(), self.layout) };
    }
}

/// An endpoint with its own completion queue and address vector. The fields are declared in the
/// order in which libfabric requires them to be closed.
#[derive(Debug)]
struct BoundEndpoint {
    endpoint: Object<sys::fid_ep>,
    completions: Object<sys::fid_cq>,
    addresses: Object<sys::fid_av>,
}

impl BoundEndpoint {
    fn open(domain: &Object<sys::fid_domain>, info: &Info) -> Result<Self, FabricError> {
        let bound = Self {
            endpoint: domain.endpoint(info)?,
            completions: domain.completion_queue(COMPLETIONS)?,
            addresses: domain.address_vector(2)?,
        };
        bound.endpoint.bind(&bound.completions, sys::FI_TRANSMIT | sys::FI_RECV)?;
        bound.endpoint.bind(&bound.addresses, 0)?;
        bound.endpoint.enable()?;
        Ok(bound)
    }

    fn close(self) -> Result<(), FabricError> {
        self.endpoint.close().and(self.completions.close()).and(self.addresses.close())
    }
}

/// Two endpoints of one libfabric domain. The initiator writes into the registered buffer of the
/// target.
///
/// The first five fields are declared in the order in which libfabric requires them to be closed.
/// The buffers follow, so that they outlive the objects that hold their addresses.
#[derive(Debug)]
pub(crate) struct ShmWritePeer {
    region: Object<sys::fid_mr>,
    initiator: BoundEndpoint,
    target: BoundEndpoint,
    domain: Object<sys::fid_domain>,
    fabric: Object<sys::fid_fabric>,
    source: Buffer,
    destination: Buffer,
    target_address: sys::fi_addr_t,
    remote: u64,
    key: u64,
    writes: u64,
    mr_mode: c_int,
}

impl ShmWritePeer {
    /// Length of both buffers and of the longest write, in bytes.
    pub(crate) const LARGEST: usize = 1 << 20;

    /// Opens both endpoints, exchanges their addresses, registers the target's buffer and performs
    /// a first write.
    ///
    /// # Errors
    ///
    /// - [`FabricError::ProviderMissing`] if libfabric has no `shm` provider, or `/dev/shm` is
    ///   full.
    /// - [`FabricError::Call`] if an object cannot be opened.
    /// - [`FabricError::OutOfMemory`] if a buffer cannot be allocated.
    /// - The errors of [`Self::write`] if the first write fails: [`FabricError::Stalled`] if the
    ///   endpoints do not connect.
    pub(crate) fn open(libfabric: Libfabric, path: ShmWritePath) -> Result<Self, FabricError> {
        let info = Info::find(libfabric, path.hints())?;
        let fabric = info.fabric()?;
        let domain = fabric.domain(&info)?;
        let source = Buffer::new(Self::LARGEST)?;
        let destination = Buffer::new(Self::LARGEST)?;
        let initiator = BoundEndpoint::open(&domain, &info)?;
        let target = BoundEndpoint::open(&domain, &info)?;
        let target_address = initiator.addresses.insert(&target.endpoint.name()?)?;
        let initiator_address = initiator.endpoint.name()?;
        target.addresses.insert(&initiator_address)?;
        let region = domain.register(
            destination.bytes.as_ptr(),
            Self::LARGEST,
            sys::FI_REMOTE_WRITE,
            TARGET_KEY,
            0,
        )?;
        let mr_mode = info.mr_mode();
        let remote = if mr_mode & sys::FI_MR_VIRT_ADDR == 0 {
            0
        } else {
            destination.bytes.as_ptr().expose_provenance() as u64
        };
        let mut peer = Self {
            key: region.key(),
            region,
            initiator,
            target,
            domain,
            fabric,
            source,
            destination,
            target_address,
            remote,
            writes: 0,
            mr_mode,
        };
        // During the first write, the two endpoints map each other's queues.
        peer.write_8_bytes()?;
        Ok(peer)
    }

    /// Returns the registration modes that the provider requires, as bits of `fi_mr(3)`.
    pub(crate) fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    /// Writes 8 bytes, and waits until they have completed and arrived.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::write`].
    #[inline]
    pub(crate) fn write_8_bytes(&mut self) -> Result<(), FabricError> {
        self.write(MARK)
    }

    /// Writes `len` bytes to the target, and waits until they have completed and arrived. `len` is
    /// a multiple of 8 between 8 and [`Self::LARGEST`].
    ///
    /// # Errors
    ///
    /// - [`FabricError::Length`] for any other `len`.
    /// - [`FabricError::Call`] if the write cannot be posted.
    /// - [`FabricError::Completion`] if the write fails.
    /// - [`FabricError::Stalled`] if the write does not finish.
    #[inline]
    pub(crate) fn write(&mut self, len: usize) -> Result<(), FabricError> {
        if !(MARK..=Self::LARGEST).contains(&len) || !len.is_multiple_of(MARK) {
            return Err(FabricError::Length { given: len, largest: Self::LARGEST });
        }
        // The mark is the number of this write, so the destination does not contain it yet.
        self.writes += 1;
        let mark = self.writes;
        // SAFETY: the length check places the mark inside the source, and the buffer's alignment
        // aligns it. The provider reads the source only in calls of this thread.
        unsafe { self.source.mark(len).write_volatile(mark) };

        let mut polls = 0;
        // SAFETY: both ranges are inside buffers that live as long as `self` and are accessed only
        // through raw pointers. On success, this function returns after the write has arrived.
        // After an error, the buffers still outlive the endpoints.
        while !unsafe {
            self.initiator.endpoint.write(
                self.source.bytes.as_ptr(),
                len,
                self.target_address,
                self.remote,
                self.key,
            )
        }? {
            self.initiator.completions.poll("fi_write")?;
            self.progress(&mut polls)?;
        }

        let arrived = self.destination.mark(len);
        let mut completed = false;
        loop {
            completed = completed || self.initiator.completions.poll("fi_write")?;
            self.progress(&mut polls)?;
            // SAFETY: the length check places the mark inside the destination, and the buffer's
            // alignment aligns it. The destination is written only in calls of this thread, by the
            // provider or by a system call of the provider.
            if completed && unsafe { arrived.read_volatile() } == mark {
                return Ok(());
            }
        }
    }

    /// Reads the mark of the last write of `len` bytes from the target's memory. The mark is the
    /// number of that write, counted from 1. Returns 0 if `len` is not a supported length.
    pub(crate) fn last_mark(&self, len: usize) -> u64 {
        if !(MARK..=Self::LARGEST).contains(&len) || !len.is_multiple_of(MARK) {
            return 0;
        }
        // SAFETY: the length check places the mark inside the destination, and the buffer's
        // alignment aligns it. The provider writes it only in calls of this thread.
        unsafe { self.destination.mark(len).read_volatile() }
    }

    /// Polls the target's completion queue, so that the target makes progress. Increases `polls` by
    /// 1, and fails with [`FabricError::Stalled`] after [`POLLS`] polls.
    #[inline]
    fn progress(&self, polls: &mut u64) -> Result<(), FabricError> {
        *polls += 1;
        if *polls > POLLS {
            return Err(FabricError::Stalled { operation: "fi_write", polls: POLLS });
        }
        // A write without remote completion data adds no completion to the target's queue.
        self.target.completions.poll("fi_write at its target")?;
        Ok(())
    }

    /// Closes the region, both endpoints, the domain and the fabric.
    ///
    /// # Errors
    ///
    /// Returns the first error. Closes the remaining objects even then.
    pub(crate) fn close(self) -> Result<(), FabricError> {
        self.region
            .close()
            .and(self.initiator.close())
            .and(self.target.close())
            .and(self.domain.close())
            .and(self.fabric.close())
    }
}
