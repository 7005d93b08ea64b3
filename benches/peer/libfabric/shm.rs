//! Data transfer: `fi_write` between two endpoints of the `shm` provider in one process.
//!
//! A write counts as done when the initiator has its completion *and* the bytes are in the target's
//! memory. For short writes `shm` completes at the initiator as soon as the bytes are in the
//! target's command queue, which the target empties when its own completion queue is read; a
//! measurement that stops at the completion leaves half of the work out.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_int;
use std::ptr::NonNull;

use super::error::FabricError;
use super::info::{Hints, Info};
use super::objects::Object;
use super::{Libfabric, sys};

/// Minimum length of a write: its mark, by which the benchmark recognises its arrival.
const MARK: usize = size_of::<u64>();

/// Alignment of both buffers, in bytes.
const PAGE: usize = 4096;

/// Number of polls after which a write counts as stalled. These polls take seconds, and a write
/// takes microseconds.
const POLLS: u64 = 100_000_000;

/// Entries in each completion queue; one write is under way at a time.
const COMPLETIONS: usize = 64;

/// The key under which the target's buffer is registered.
const TARGET_KEY: u64 = 1;

/// How the bytes of a write travel. `shm` decides by what is asked of it; these are the ways of
/// asking that make it decide differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShmWritePath {
    /// Writes are to keep their order, so each goes through the target's command queue: up to 4 KiB
    /// copied in and copied out, above that one `process_vm_readv` by the target where the kernel
    /// allows it, bounce buffers otherwise.
    CommandQueue,
    /// No order and virtual addresses, `shm`'s own default: the initiator calls
    /// `process_vm_writev` for every write, however short. If the kernel refuses that call, the
    /// path is that of [`Self::CommandQueue`].
    CrossMemoryAttach,
    /// Like [`Self::CommandQueue`], but without `process_vm_readv`: long writes are copied through
    /// bounce buffers. `shm` does not use the system call if device memory may be involved, so the
    /// benchmark requests `FI_HMEM`. `FI_SHM_DISABLE_CMA` has the same effect, but for every
    /// endpoint of the process and only if it is set before libfabric is loaded.
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
        // SAFETY: the layout has at least one page.
        let bytes = unsafe { alloc_zeroed(layout) };
        let bytes = NonNull::new(bytes).ok_or_else(out_of_memory)?;
        Ok(Self { bytes, layout })
    }

    /// The mark of a write of `len` bytes: its last eight. `len` is a multiple of 8 that the caller
    /// has compared with the buffer's length.
    #[inline]
    fn mark(&self, len: usize) -> *mut u64 {
        debug_assert!(len >= MARK && len <= self.layout.size() && len.is_multiple_of(MARK));
        self.bytes.as_ptr().wrapping_add(len - MARK).cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout and freed once, here.
        unsafe { dealloc(self.bytes.as_ptr(), self.layout) };
    }
}

/// An endpoint with its own completion queue and address vector, in the order in which libfabric
/// requires them to be closed.
#[derive(Debug)]
struct Side {
    endpoint: Object<sys::fid_ep>,
    completions: Object<sys::fid_cq>,
    addresses: Object<sys::fid_av>,
}

impl Side {
    fn open(domain: &Object<sys::fid_domain>, info: &Info) -> Result<Self, FabricError> {
        let side = Self {
            endpoint: domain.endpoint(info)?,
            completions: domain.completion_queue(COMPLETIONS)?,
            addresses: domain.address_vector(2)?,
        };
        side.endpoint.bind(&side.completions, sys::FI_TRANSMIT | sys::FI_RECV)?;
        side.endpoint.bind(&side.addresses, 0)?;
        side.endpoint.enable()?;
        Ok(side)
    }

    fn close(self) -> Result<(), FabricError> {
        self.endpoint.close().and(self.completions.close()).and(self.addresses.close())
    }
}

/// Two endpoints of one domain, one writing into the other's registered buffer.
///
/// The fields are in the order in which libfabric lets go of them; the buffers outlive what knows
/// their addresses.
#[derive(Debug)]
pub(crate) struct ShmWritePeer {
    region: Object<sys::fid_mr>,
    initiator: Side,
    target: Side,
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
    /// The longest write, in bytes.
    pub(crate) const LARGEST: usize = 1 << 20;

    /// Opens both endpoints, introduces them to one another and registers the target's buffer.
    ///
    /// # Errors
    ///
    /// [`FabricError::ProviderMissing`] when the library was built without `shm` or `/dev/shm` has
    /// no room, [`FabricError::Call`] when something does not open, [`FabricError::Stalled`] when
    /// the endpoints do not find one another.
    pub(crate) fn open(libfabric: Libfabric, path: ShmWritePath) -> Result<Self, FabricError> {
        let info = Info::find(libfabric, path.hints())?;
        let fabric = info.fabric()?;
        let domain = fabric.domain(&info)?;
        let source = Buffer::new(Self::LARGEST)?;
        let destination = Buffer::new(Self::LARGEST)?;
        let initiator = Side::open(&domain, &info)?;
        let target = Side::open(&domain, &info)?;
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
        // The first write waits for the two to map one another's queues.
        peer.write_8_bytes()?;
        Ok(peer)
    }

    /// The registration modes that the provider demands; bits as in `fi_mr(3)`.
    pub(crate) fn mr_mode(&self) -> i32 {
        self.mr_mode
    }

    /// Writes 8 bytes and waits until they have completed and arrived.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::write`].
    #[inline]
    pub(crate) fn write_8_bytes(&mut self) -> Result<(), FabricError> {
        self.write(MARK)
    }

    /// Writes the first `len` bytes of the buffer and waits until they have completed and arrived.
    /// `len` is a multiple of 8 between 8 and [`Self::LARGEST`].
    ///
    /// # Errors
    ///
    /// [`FabricError::Length`] for any other `len`, [`FabricError::Call`] if the write cannot be
    /// posted, [`FabricError::Completion`] if it fails, [`FabricError::Stalled`] if it does not
    /// complete.
    #[inline]
    pub(crate) fn write(&mut self, len: usize) -> Result<(), FabricError> {
        if !(MARK..=Self::LARGEST).contains(&len) || !len.is_multiple_of(MARK) {
            return Err(FabricError::Length { given: len, largest: Self::LARGEST });
        }
        // A mark that the destination cannot hold already: the count of writes so far, plus one.
        self.writes += 1;
        let mark = self.writes;
        // SAFETY: the mark is inside the source by the check above and aligned because the buffer
        // is; the provider reads the source only inside calls that this thread makes.
        unsafe { self.source.mark(len).write_volatile(mark) };

        let mut polls = 0;
        // SAFETY: both ranges are inside buffers that live as long as `self` and are only reached
        // through their pointers; this function does not return success before the write arrived,
        // and after an error the buffers still outlive the endpoints.
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
            // SAFETY: inside the destination and aligned, as above. The provider writes it from
            // this thread, in the polls, or the kernel does in a system call made there.
            if completed && unsafe { arrived.read_volatile() } == mark {
                return Ok(());
            }
        }
    }

    /// Reads the mark of the last write of `len` bytes from the target's memory. The mark is the
    /// number of writes at that time. Returns 0 for a `len` that [`Self::write`] does not support.
    pub(crate) fn last_mark(&self, len: usize) -> u64 {
        if !(MARK..=Self::LARGEST).contains(&len) || !len.is_multiple_of(MARK) {
            return 0;
        }
        // SAFETY: inside the destination by the check above and aligned because the buffer is; the
        // provider writes it only inside calls that this thread makes.
        unsafe { self.destination.mark(len).read_volatile() }
    }

    /// Lets the target work, and counts how often it was asked.
    #[inline]
    fn progress(&self, polls: &mut u64) -> Result<(), FabricError> {
        *polls += 1;
        if *polls > POLLS {
            return Err(FabricError::Stalled { operation: "fi_write", polls: POLLS });
        }
        // A write without remote completion data leaves nothing in the target's queue.
        self.target.completions.poll("fi_write at its target")?;
        Ok(())
    }

    /// Closes everything.
    ///
    /// # Errors
    ///
    /// The first refusal; what comes after it is still closed.
    pub(crate) fn close(self) -> Result<(), FabricError> {
        self.region
            .close()
            .and(self.initiator.close())
            .and(self.target.close())
            .and(self.domain.close())
            .and(self.fabric.close())
    }
}
