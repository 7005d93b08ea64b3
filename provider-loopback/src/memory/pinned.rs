//! Pinned memory: the pages that were mapped at registration or at the last refresh, as a hardware
//! NIC pins them.
//!
//! A buffer registered with io_uring keeps its pages until it is unregistered, even if the
//! application changes its mappings. The io_uring requests READ_FIXED and WRITE_FIXED name such a
//! buffer, and copy bytes between its pages and a scratch file. They do not use the application's
//! mappings.

#![allow(unsafe_code, reason = "pins pages by an io_uring, and copies them")]

use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use hmem_core::{AddressRange, Errno, Error, ErrorKind, ProcessMark, Result};
use io_uring::{IoUring, opcode, types};
use parking_lot::{Mutex, RwLock};
use rustix::fs::MemfdFlags;

use super::{
    host::{Written, bad_address, direct_pointer},
    indirect::IndirectMemory,
};

/// The size of the scratch file, and so the maximum number of bytes that one io_uring request
/// copies.
const SCRATCH_LEN: usize = 1 << 20;
/// The maximum number of buffers of one io_uring. Further buffers use another io_uring.
const MAX_BUFFERS: u16 = 4096;
/// The maximum size of an io_uring buffer.
const MAX_BUFFER_LEN: u64 = 1 << 30;

/// The maximum number of retries of an io_uring request that the kernel refuses because memory is
/// short.
const MAX_RETRIES: u32 = 1000;
const RAISE_MEMLOCK: &str = "raise the locked-memory limit (`ulimit -l unlimited`, `docker run \
                             --ulimit memlock=-1`, LimitMEMLOCK= in systemd), or close regions";

/// The pinner of a domain's host memory.
pub(in super::super) struct Pinner {
    process: ProcessMark,
    /// The io_urings. The last one pins new buffers.
    rings: Mutex<Vec<Arc<Ring>>>,
}

impl Pinner {
    /// Creates a pinner with one io_uring and the memfd through which the io_uring copies.
    ///
    /// # Errors
    /// - Unavailable: the kernel, a sysctl, a seccomp filter or a limit refuses the io_uring or the
    ///   memfd.
    /// - The errors of [`ProcessMark::current`].
    pub(in super::super) fn new() -> Result<Self> {
        let process = ProcessMark::current()?;
        Ok(Self { process, rings: Mutex::new(vec![Arc::new(Ring::new()?)]) })
    }

    /// Pins the pages of a range.
    ///
    /// # Errors
    /// - BadAddress: pages are absent or not writable.
    /// - OutOfResources: the locked-memory limit is reached.
    /// - BadState: this process is a forked child.
    /// - The errors of [`Pinner::new`], if the pinner needs another io_uring.
    /// - Another error of the kernel, for pages of a file that it does not pin.
    ///
    /// After an error no page of the range stays pinned.
    pub(in super::super) fn pin(
        &self,
        range: AddressRange,
        operation: &'static str,
    ) -> Result<Vec<PinnedRun>> {
        self.process.check(operation)?;
        let mut runs = Vec::new();
        let mut done = 0;
        while done < range.len() {
            let len = (range.len() - done).min(MAX_BUFFER_LEN);
            let start = range.start().0 + done;
            let slot = Arc::new(self.pin_buffer(start, len, operation)?);
            runs.push(PinnedRun { start, len, slot });
            done += len;
        }
        Ok(runs)
    }

    fn pin_buffer(&self, start: u64, len: u64, operation: &'static str) -> Result<PinnedBuffer> {
        loop {
            let ring = self.rings.lock().last().map(Arc::clone);
            if let Some(ring) = ring
                && let Some(slot) = ring.pin(start, len, operation)?
            {
                return Ok(slot);
            }
            let mut rings = self.rings.lock();
            // This drops the list's references to broken io_urings. A region that uses a broken
            // io_uring keeps it alive.
            rings.retain(|ring| !ring.is_broken());
            // The loop tries the last io_uring of the list first. So an io_uring with free slots
            // moves to the end.
            match rings.iter().position(|ring| ring.has_room()) {
                Some(at) => {
                    let last = rings.len() - 1;
                    rings.swap(at, last);
                }
                None => rings.push(Arc::new(Ring::new()?)),
            }
        }
    }
}

impl fmt::Debug for Pinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinner").field("rings", &self.rings.lock().len()).finish()
    }
}

/// An io_uring with a table of registered buffers and a scratch file to copy through.
///
/// One lock covers transfers and pinning, so transfers wait while a long buffer is pinned. A second
/// lock would not help, because the kernel has the same limit: it pins under a lock that each
/// `io_uring_enter` takes too.
///
/// A forked child shares the io_uring and the file with its parent, and so must not touch either.
struct Ring {
    process: ProcessMark,
    state: Mutex<RingState>,
}

struct RingState {
    uring: IoUring,
    /// The file through which bytes are copied to and from pinned pages.
    scratch: OwnedFd,
    /// The unused indices of the buffer table.
    free: Vec<u16>,
    /// True once a failed call has left a request in the io_uring's queue.
    ///
    /// The kernel could still execute that request after its transfer has ended, and its completion
    /// could be mistaken for that of a later request. So the NIC submits no more requests to this
    /// io_uring. Buffers can still be unregistered.
    broken: bool,
}

impl Ring {
    fn new() -> Result<Self> {
        let refuse = |call: &'static str| {
            move |error: std::io::Error| {
                let errno = Errno::of(&error);
                Error::new(ErrorKind::Unavailable, "pinned memory")
                    .provider("loopback")
                    .errno(errno)
                    .context("call", call)
                    .remedy(match errno.0 {
                        libc::EPERM => {
                            "allow io_uring: seccomp or kernel.io_uring_disabled forbids it"
                        }
                        libc::ENOSYS => {
                            "use a kernel with io_uring, and no seccomp filter that hides it"
                        }
                        libc::ENOMEM => RAISE_MEMLOCK,
                        _ => "use Linux 5.19 or later: io_uring needs sparse buffer tables",
                    })
            }
        };
        let uring = IoUring::new(8).map_err(refuse("io_uring_setup"))?;
        uring
            .submitter()
            .register_buffers_sparse(u32::from(MAX_BUFFERS))
            .map_err(refuse("IORING_REGISTER_BUFFERS2"))?;
        let scratch = rustix::fs::memfd_create("hmem-scratch", MemfdFlags::CLOEXEC)
            .and_then(|scratch| {
                rustix::fs::ftruncate(&scratch, SCRATCH_LEN as u64).map(|()| scratch)
            })
            .map_err(|errno| refuse("memfd_create")(errno.into()))?;
        Ok(Self {
            process: ProcessMark::current()?,
            state: Mutex::new(RingState {
                uring,
                scratch,
                free: (0..MAX_BUFFERS).rev().collect(),
                broken: false,
            }),
        })
    }

    fn has_room(&self) -> bool {
        !self.state.lock().free.is_empty()
    }

    fn is_broken(&self) -> bool {
        self.state.lock().broken
    }

    /// Pins a buffer. Returns `None` if the io_uring's buffer table is full or the io_uring is
    /// broken.
    fn pin(
        self: &Arc<Self>,
        start: u64,
        len: u64,
        operation: &'static str,
    ) -> Result<Option<PinnedBuffer>> {
        let mut state = self.state.lock();
        if state.broken {
            return Ok(None);
        }
        let Some(index) = state.free.pop() else { return Ok(None) };
        let vector = libc::iovec { iov_base: direct_pointer(start).cast(), iov_len: len as usize };
        if let Err(error) = state.update(index, vector) {
            state.free.push(index);
            return Err(refused(&error, start, len, operation));
        }
        Ok(Some(PinnedBuffer { ring: Arc::clone(self), index }))
    }
}

impl RingState {
    fn update(&self, index: u16, vector: libc::iovec) -> std::io::Result<()> {
        // SAFETY: the kernel takes references to the pages that the vector names, or reports that
        // it cannot. It does not rely on the addresses afterwards, so that the application may
        // unmap them while the buffer is registered.
        unsafe { self.uring.submitter().register_buffers_update(u32::from(index), &[vector], None) }
    }

    /// Executes one READ_FIXED or WRITE_FIXED request. Returns the number of bytes that it moved.
    ///
    /// # Errors
    /// - BadState: the ring is broken.
    /// - Driver: the queue of the ring is full.
    /// - The error of io_uring for the request.
    /// - The error of `io_uring_enter`. The ring is broken afterwards.
    fn run(&mut self, entry: &io_uring::squeue::Entry) -> Result<u64> {
        if self.broken {
            return Err(Error::new(ErrorKind::BadState, "io_uring")
                .provider("loopback")
                .context("why", "an earlier request was left in the queue of the ring")
                .remedy("close the region and register it again"));
        }
        // SAFETY: the entry names a registered buffer and the scratch file, both of which outlive
        // the request: this function waits for the end of the request under the ring's lock. If it
        // cannot wait, it marks the ring as broken, and the ring submits no request any more.
        unsafe { self.uring.submission().push(entry) }.map_err(|_| {
            Error::new(ErrorKind::Driver, "io_uring submission").provider("loopback")
        })?;
        let mut retries = 0;
        loop {
            match self.uring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // The kernel is short of memory for the moment.
                Err(error)
                    if error.raw_os_error() == Some(libc::EAGAIN) && retries < MAX_RETRIES =>
                {
                    retries += 1;
                    std::thread::yield_now();
                }
                Err(error) => {
                    self.broken = true;
                    tracing::error!(%error, "io_uring failed: new regions use another ring");
                    return Err(Error::os(Errno::of(&error), "io_uring_enter").provider("loopback"));
                }
            }
            if let Some(completion) = self.uring.completion().next() {
                let result = completion.result();
                return u64::try_from(result)
                    .map_err(|_| Error::os(Errno(-result), "io_uring").provider("loopback"));
            }
        }
    }
}

fn refused(error: &std::io::Error, start: u64, len: u64, operation: &'static str) -> Error {
    let errno = Errno::of(error);
    match errno.0 {
        libc::ENOMEM => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit =
                limit.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"));
            Error::os(errno, operation)
                .provider("loopback")
                .context("why", format_args!("the locked-memory limit (RLIMIT_MEMLOCK) is {limit}"))
                .context("requested", len)
                .context("limit", "locked memory of the user")
                .remedy(RAISE_MEMLOCK)
        }
        libc::EFAULT => Error::new(ErrorKind::BadAddress, operation)
            .provider("loopback")
            .errno(errno)
            .context("range", format_args!("{start:#x}+{len}"))
            .remedy("register mapped, writable pages: this NIC pins them"),
        _ => Error::os(errno, operation)
            .provider("loopback")
            .context("range", format_args!("{start:#x}+{len}"))
            .remedy(
                "register pages of anonymous memory, memfd or hugetlbfs: the kernel does not pin \
                 those of other files for long",
            ),
    }
}

/// A registered buffer: its slot in the buffer table of an io_uring. Dropping the value unregisters
/// the buffer.
struct PinnedBuffer {
    ring: Arc<Ring>,
    index: u16,
}

impl PinnedBuffer {
    /// Copies bytes from `address` to the start of `into`. Returns their number, which is at least
    /// 1.
    fn load(&self, address: u64, into: &mut [u8]) -> Result<usize> {
        self.ring.process.check("transfer")?;
        let mut ring = self.ring.state.lock();
        let scratch = types::Fd(ring.scratch.as_raw_fd());
        let entry = opcode::WriteFixed::new(
            scratch,
            direct_pointer(address),
            into.len() as u32,
            self.index,
        )
        .build();
        let moved = ring.run(&entry)? as usize;
        if moved == 0 {
            return Err(bad_address(address, into.len() as u64));
        }
        rustix::io::pread(&ring.scratch, &mut into[..moved], 0)
            .map_err(|errno| Error::os(errno, "pread").provider("loopback"))
    }

    /// Copies bytes from the start of `from` to `address`. Returns their number, which is at least
    /// 1.
    fn store(&self, address: u64, from: &[u8]) -> Result<usize> {
        self.ring.process.check("transfer")?;
        let mut ring = self.ring.state.lock();
        let put = rustix::io::pwrite(&ring.scratch, from, 0)
            .map_err(|errno| Error::os(errno, "pwrite").provider("loopback"))?;
        let scratch = types::Fd(ring.scratch.as_raw_fd());
        let entry =
            opcode::ReadFixed::new(scratch, direct_pointer(address), put as u32, self.index)
                .build();
        let moved = ring.run(&entry)? as usize;
        if moved == 0 {
            return Err(bad_address(address, from.len() as u64));
        }
        Ok(moved)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if !self.ring.process.is_current() {
            // In a forked child, the buffer belongs to the parent and stays registered.
            return;
        }
        let mut state = self.ring.state.lock();
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        match state.update(self.index, none) {
            Ok(()) => state.free.push(self.index),
            Err(error) => tracing::error!(%error, "cannot unregister a pinned buffer"),
        }
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({})", self.index)
    }
}

/// Pinned pages at contiguous addresses in one io_uring buffer. The run is the whole buffer, or a
/// part of it after a refresh of the other pages.
#[derive(Clone, Debug)]
pub(in super::super) struct PinnedRun {
    start: u64,
    len: u64,
    slot: Arc<PinnedBuffer>,
}

impl PinnedRun {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The pinned pages of a region's piece. The argument `at` of its methods is an address of the
/// application.
#[derive(Debug)]
pub(in super::super) struct Pinned {
    /// The pinned runs, disjoint and in address order.
    runs: RwLock<Vec<PinnedRun>>,
}

impl Pinned {
    pub(in super::super) fn new(runs: Vec<PinnedRun>) -> Self {
        Self { runs: RwLock::new(runs) }
    }

    /// Replaces the old runs at the addresses of newly pinned runs. Parts of old runs at other
    /// addresses stay.
    pub(in super::super) fn replace(&self, new: Vec<PinnedRun>) {
        let mut runs = self.runs.write();
        for run in &new {
            let parts = runs.drain(..).flat_map(|old| {
                let before = PinnedRun {
                    len: run.start.saturating_sub(old.start).min(old.len),
                    ..old.clone()
                };
                let after_start = run.end().max(old.start);
                let after = PinnedRun {
                    start: after_start,
                    len: old.end().saturating_sub(after_start),
                    slot: Arc::clone(&old.slot),
                };
                [before, after]
            });
            *runs = parts.filter(|part| part.len > 0).collect();
        }
        runs.extend(new);
        runs.sort_by_key(|run| run.start);
    }

    /// Returns the buffer that contains the address `at`. Also returns the number of bytes that one
    /// request can copy from there, at most `len`.
    fn find(&self, at: u64, len: u64) -> Result<(Arc<PinnedBuffer>, u64)> {
        let runs = self.runs.read();
        let after = runs.partition_point(|run| run.start <= at);
        let run = after.checked_sub(1).map(|index| &runs[index]).filter(|run| at < run.end());
        let run = run.ok_or_else(|| bad_address(at, len))?;
        Ok((Arc::clone(&run.slot), len.min(run.end() - at).min(SCRATCH_LEN as u64)))
    }
}

impl IndirectMemory for Pinned {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let address = at + done as u64;
            let (slot, part) = self.find(address, (into.len() - done) as u64)?;
            done += slot.load(address, &mut into[done..done + part as usize])?;
        }
        Ok(())
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < from.len() {
            let address = at + done as u64;
            let (slot, part) = self.find(address, (from.len() - done) as u64)?;
            done += slot.store(address, &from[done..done + part as usize])?;
        }
        Ok(())
    }

    fn atomic_address(&self, at: u64) -> Result<u64> {
        Ok(at)
    }

    /// Writes the bytes back to storage through the application's mapping of the addresses.
    ///
    /// If the application has mapped other pages at the addresses, the call acts on those pages
    /// instead of the pinned ones. It fails if those pages cannot be written back.
    fn persist(&self, at: u64, len: u64) -> Result<()> {
        Written { at, len, owned: false }.persist()
    }
}
