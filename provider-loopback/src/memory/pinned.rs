//! Pinned memory: the pages that were mapped at registration, like those of hardware.
//!
//! A buffer registered with io_uring keeps its pages until it is unregistered, even if the
//! application changes its mappings. READ_FIXED and WRITE_FIXED copy bytes between a scratch file
//! and those pages. They name the buffer and do not use the page table.

#![allow(unsafe_code)]

use std::{
    fmt,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use hmem_core::{
    AddressRange, Errno, Error, ErrorKind, ProcessMark, Result, provider::StagedMemory,
};
use io_uring::{IoUring, opcode, types};
use parking_lot::{Mutex, RwLock};
use rustix::fs::MemfdFlags;

use super::{
    host::{Written, bad_address, direct_pointer},
    indirect::IndirectMemory,
};

/// The maximum number of bytes that one request copies.
const SCRATCH: usize = 1 << 20;
/// The maximum number of buffers of one io_uring. Further buffers use another io_uring.
const SLOTS: u16 = 4096;
/// The maximum size of an io_uring buffer.
const BUFFER: u64 = 1 << 30;

/// The number of retries of a request that the kernel refuses because memory is short.
const REFUSALS: u32 = 1000;

/// The pinner of a domain's host memory.
pub(in super::super) struct Pinner {
    process: ProcessMark,
    rings: Mutex<Vec<Arc<Ring>>>,
}

impl Pinner {
    /// Creates a pinner. Fails unless the process may use io_uring.
    ///
    /// # Errors
    /// Unavailable: the kernel, a sysctl or a seccomp filter refuses io_uring.
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
    pub(in super::super) fn pin(
        &self,
        range: AddressRange,
        operation: &'static str,
    ) -> Result<Vec<Run>> {
        self.process.check(operation)?;
        let mut runs = Vec::new();
        let mut done = 0;
        while done < range.len() {
            let len = (range.len() - done).min(BUFFER);
            let start = range.start().0 + done;
            let slot = Arc::new(self.pin_buffer(start, len, operation)?);
            runs.push(Run { start, len, slot });
            done += len;
        }
        Ok(runs)
    }

    fn pin_buffer(&self, start: u64, len: u64, operation: &'static str) -> Result<Slot> {
        loop {
            let ring = self.rings.lock().last().map(Arc::clone);
            if let Some(ring) = ring
                && let Some(slot) = ring.pin(start, len, operation)?
            {
                return Ok(slot);
            }
            let mut rings = self.rings.lock();
            // Regions that use a broken ring keep it alive.
            rings.retain(|ring| !ring.is_broken());
            // A ring with free slots moves to the end of the list, which is tried first.
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

/// An io_uring with a table of buffers and a file to copy through.
///
/// One lock covers both transfers and pinning, so that a transfer through a ring waits while a long
/// buffer is pinned with the same ring. A second lock would not change that: the kernel pins under
/// the lock of the ring that every `io_uring_enter` takes too.
///
/// A forked child shares the ring and the file with its parent: it must not touch them.
struct Ring {
    process: ProcessMark,
    state: Mutex<RingState>,
}

struct RingState {
    uring: IoUring,
    scratch: OwnedFd,
    free: Vec<u16>,
    /// Set once a failed call has left a request in the queue.
    ///
    /// That request could copy bytes after its transfer has ended, and its completion could be
    /// mistaken for that of a later request. So nothing is submitted to the ring any more. Buffers
    /// can still be unregistered.
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
                        _ => "use Linux 5.19 or later: io_uring needs sparse buffer tables",
                    })
            }
        };
        let uring = IoUring::new(8).map_err(refuse("io_uring_setup"))?;
        uring
            .submitter()
            .register_buffers_sparse(u32::from(SLOTS))
            .map_err(refuse("IORING_REGISTER_BUFFERS2"))?;
        let scratch = rustix::fs::memfd_create("hmem-scratch", MemfdFlags::CLOEXEC)
            .and_then(|scratch| rustix::fs::ftruncate(&scratch, SCRATCH as u64).map(|()| scratch))
            .map_err(|errno| refuse("memfd_create")(errno.into()))?;
        Ok(Self {
            process: ProcessMark::current()?,
            state: Mutex::new(RingState {
                uring,
                scratch,
                free: (0..SLOTS).rev().collect(),
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

    /// Pins a buffer. Returns `None` if the table is full or the ring is broken.
    fn pin(
        self: &Arc<Self>,
        start: u64,
        len: u64,
        operation: &'static str,
    ) -> Result<Option<Slot>> {
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
        Ok(Some(Slot { ring: Arc::clone(self), index }))
    }
}

impl RingState {
    fn update(&self, index: u16, vector: libc::iovec) -> std::io::Result<()> {
        // SAFETY: the kernel takes references to the pages that the vector names, or reports that
        // it cannot. It does not rely on the addresses afterwards, so they may be unmapped
        // while the buffer is registered; that is what this is for.
        unsafe { self.uring.submitter().register_buffers_update(u32::from(index), &[vector], None) }
    }

    /// Runs one READ_FIXED or WRITE_FIXED on the scratch file and returns how many bytes it moved.
    ///
    /// # Errors
    /// The error of io_uring for the request. An error of `io_uring_enter` itself ends the use of
    /// the ring.
    fn run(&mut self, entry: &io_uring::squeue::Entry) -> Result<u64> {
        if self.broken {
            return Err(Error::new(ErrorKind::BadState, "io_uring")
                .provider("loopback")
                .context("why", "an earlier request was left in the queue of the ring")
                .remedy("close the region and register it again"));
        }
        // SAFETY: the entry names a registered buffer and the scratch file, both of which outlive
        // the request: this waits for its end under the ring's lock.
        unsafe { self.uring.submission().push(entry) }.map_err(|_| {
            Error::new(ErrorKind::Driver, "io_uring submission").provider("loopback")
        })?;
        let mut refusals = 0;
        loop {
            match self.uring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // Memory is short for the moment.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && refusals < REFUSALS => {
                    refusals += 1;
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
                .context("limit", "RLIMIT_MEMLOCK")
                .context("value", limit)
                .context("requested", len)
                .remedy("raise the locked-memory limit (ulimit -l), or close regions")
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
struct Slot {
    ring: Arc<Ring>,
    index: u16,
}

impl Slot {
    fn load(&self, address: u64, into: &mut [u8]) -> Result<()> {
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
        let got = rustix::io::pread(&ring.scratch, &mut into[..moved], 0)
            .map_err(|errno| Error::os(errno, "pread").provider("loopback"))?;
        drop(ring);
        if got < into.len() { self.load(address + got as u64, &mut into[got..]) } else { Ok(()) }
    }

    fn store(&self, address: u64, from: &[u8]) -> Result<()> {
        self.ring.process.check("transfer")?;
        let mut ring = self.ring.state.lock();
        let put = rustix::io::pwrite(&ring.scratch, from, 0)
            .map_err(|errno| Error::os(errno, "pwrite").provider("loopback"))?;
        let scratch = types::Fd(ring.scratch.as_raw_fd());
        let entry =
            opcode::ReadFixed::new(scratch, direct_pointer(address), put as u32, self.index)
                .build();
        let moved = ring.run(&entry)? as usize;
        drop(ring);
        if moved == 0 {
            return Err(bad_address(address, from.len() as u64));
        }
        if moved < from.len() { self.store(address + moved as u64, &from[moved..]) } else { Ok(()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.ring.process.is_current() {
            // In a forked child: the buffer is the parent's and stays registered.
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

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.index)
    }
}

/// The pinned pages of contiguous addresses, in one buffer.
#[derive(Clone, Debug)]
pub(in super::super) struct Run {
    start: u64,
    len: u64,
    slot: Arc<Slot>,
}

impl Run {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// The pinned pages of a region's piece. Positions are the application's addresses.
#[derive(Debug)]
pub(in super::super) struct Pinned {
    /// The pinned runs, disjoint and in address order.
    runs: RwLock<Vec<Run>>,
}

impl Pinned {
    pub(in super::super) fn new(runs: Vec<Run>) -> Self {
        Self { runs: RwLock::new(runs) }
    }

    /// Puts newly pinned runs in the place of the old runs at the same addresses.
    pub(in super::super) fn replace(&self, new: Vec<Run>) {
        let mut runs = self.runs.write();
        for run in &new {
            let parts = runs.drain(..).flat_map(|old| {
                let before =
                    Run { len: run.start.saturating_sub(old.start).min(old.len), ..old.clone() };
                let after_start = run.end().max(old.start);
                let after = Run {
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

    /// Returns the buffer that contains an address, and the number of bytes from there that one
    /// request can copy: at most `len`.
    fn find(&self, at: u64, len: u64) -> Result<(Arc<Slot>, u64)> {
        let runs = self.runs.read();
        let after = runs.partition_point(|run| run.start <= at);
        let run = after.checked_sub(1).map(|index| &runs[index]).filter(|run| at < run.end());
        let run = run.ok_or_else(|| bad_address(at, len))?;
        Ok((Arc::clone(&run.slot), len.min(run.end() - at).min(SCRATCH as u64)))
    }
}

impl IndirectMemory for Pinned {
    fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let address = at + done as u64;
            let (slot, part) = self.find(address, (into.len() - done) as u64)?;
            slot.load(address, &mut into[done..done + part as usize])?;
            done += part as usize;
        }
        Ok(())
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < from.len() {
            let address = at + done as u64;
            let (slot, part) = self.find(address, (from.len() - done) as u64)?;
            slot.store(address, &from[done..done + part as usize])?;
            done += part as usize;
        }
        Ok(())
    }

    fn atomic_address(&self, at: u64) -> Result<u64> {
        Ok(at)
    }

    /// Writes back through the application's mapping. Fails if that mapping shows other pages than
    /// the pinned ones and cannot be written back.
    fn persist(&self, at: u64, len: u64) -> Result<()> {
        Written { at, len, owned: false }.persist()
    }

    fn staged(&self) -> Option<&dyn StagedMemory> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guard that replaces a ring's fd by one of `/dev/null`, and restores it on drop.
    struct Away {
        ring: i32,
        kept: OwnedFd,
    }

    impl Away {
        fn take(ring: &Ring) -> Self {
            use std::os::fd::BorrowedFd;
            let ring = ring.state.lock().uring.as_raw_fd();
            // SAFETY: the ring that the caller borrows has the fd open.
            let kept = unsafe { BorrowedFd::borrow_raw(ring) }.try_clone_to_owned().unwrap();
            let null = std::fs::File::open("/dev/null").unwrap();
            // SAFETY: replaces what the fd means, which its owner finds out as a refused call.
            assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), ring) }, ring);
            Self { ring, kept }
        }
    }

    impl Drop for Away {
        fn drop(&mut self) {
            // SAFETY: gives the fd its old meaning back.
            assert_eq!(unsafe { libc::dup2(self.kept.as_raw_fd(), self.ring) }, self.ring);
        }
    }

    #[test]
    fn request_left_in_the_ring_never_runs() {
        let pinner = Pinner::new().unwrap();
        let memory = vec![7u8; 4096];
        let range = AddressRange::of(&memory);
        let pinned = Pinned::new(pinner.pin(range, "test").unwrap());
        let ring = Arc::clone(&pinner.rings.lock()[0]);
        let at = range.start().0;
        let mut back = [0; 16];
        pinned.load(at, &mut back).unwrap();
        assert_eq!(back, [7; 16]);
        {
            let _away = Away::take(&ring);
            pinned.store(at, &[9; 8]).unwrap_err();
        }
        back = [0; 16];
        assert_eq!(pinned.load(at + 100, &mut back).unwrap_err().kind(), ErrorKind::BadState);
        assert_eq!(back, [0; 16]);
        // SAFETY: the vector is alive; the NIC may have written to it.
        assert_eq!(unsafe { memory.as_ptr().read_volatile() }, 7, "the refused request ran later");
        // Later registrations have another ring.
        let again = Pinned::new(pinner.pin(range, "test").unwrap());
        again.load(at, &mut back).unwrap();
        assert_eq!(back, [7; 16]);
        assert_eq!(pinner.rings.lock().len(), 1);
        drop(pinned);
        assert_eq!(
            ring.state.lock().free.len(),
            usize::from(SLOTS),
            "a broken ring takes its buffers back"
        );
    }

    /// CACHE-13
    #[test]
    fn forked_child_does_not_touch_the_parents_rings() {
        let pinner = Pinner::new().unwrap();
        let (memory, other) = (vec![7u8; 4096], vec![8u8; 4096]);
        let range = AddressRange::of(&memory);
        let pinned = Pinned::new(pinner.pin(range, "test").unwrap());
        let at = range.start().0;
        // SAFETY: the child calls what is tested and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let alone = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let kinds = [
                    pinner.pin(AddressRange::of(&other), "test").map(drop),
                    pinned.load(at, &mut [0; 16]),
                    pinned.store(at, &[9; 16]),
                ];
                // SAFETY: the original is in the parent; this process leaves without using it.
                drop(unsafe { std::ptr::read(&raw const pinned) });
                kinds.iter().all(|refused| {
                    refused.as_ref().is_err_and(|error| error.kind() == ErrorKind::BadState)
                })
            }));
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!alone.unwrap_or(false))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        let mut back = [0; 16];
        pinned.load(at, &mut back).expect("the child released nothing");
        assert_eq!(back, [7; 16]);
    }
}
