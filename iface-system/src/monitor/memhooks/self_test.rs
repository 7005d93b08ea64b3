//! The self-test of memhooks. It calls hooked functions on memory of the test, and checks that a
//! subscriber is notified.

#![allow(unsafe_code, reason = "calls the hooked functions on memory of the test")]

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use hmem_core::{
    Address, AddressRange, Error, ErrorKind, IfaceKind, Result,
    monitor::{GateToken, InvalidationCause, InvalidationToken, Invalidator, TokenIssuer},
};
use hmem_hook::Subscribers;

use super::hook::MemhooksState;
use crate::sys;

/// An invalidator that counts the notifications with the expected range and cause.
#[derive(Debug, Default)]
struct Expecting {
    issuer: TokenIssuer,
    /// Start of the expected range, or `u64::MAX` if no notification is expected.
    start: AtomicU64,
    len: AtomicU64,
    cause: AtomicU64,
    /// Number of notifications with the expected range and cause before a change.
    begun: AtomicU64,
    /// Number of notifications with the expected range and cause after a change.
    ended: AtomicU64,
}

impl Invalidator for Expecting {
    fn invalidate(&self, range: AddressRange, cause: InvalidationCause) {
        let change = self.invalidate_start(range, cause);
        self.invalidate_end(change);
    }

    fn invalidate_start(&self, range: AddressRange, cause: InvalidationCause) -> InvalidationToken {
        let expected = range.start().0 == self.start.load(Ordering::SeqCst)
            // The hook may report a longer range, because it assumes huge pages where it does not
            // know the page size.
            && range.len() >= self.len.load(Ordering::SeqCst)
            && cause as u64 == self.cause.load(Ordering::SeqCst);
        if expected {
            self.begun.fetch_add(1, Ordering::SeqCst);
        }
        InvalidationToken::new(&self.issuer, u64::from(expected))
    }

    fn invalidate_end(&self, change: InvalidationToken) {
        let expected = change.redeem(&self.issuer).unwrap_or(0);
        self.ended.fetch_add(expected, Ordering::SeqCst);
    }

    fn close_gate(&self) -> GateToken {
        GateToken::unnumbered()
    }

    fn open_gate(&self, _: GateToken) {}
}

impl Expecting {
    /// Runs `call`. Fails if `call` returns false, or if the hook of the called function does not
    /// notify the subscriber of the expected change both before and after the call.
    fn arrives(
        &self,
        function: &'static str,
        (start, len, cause): (*mut libc::c_void, usize, InvalidationCause),
        call: impl FnOnce() -> bool,
    ) -> Result<()> {
        self.cause.store(cause as u64, Ordering::SeqCst);
        self.len.store(len as u64, Ordering::SeqCst);
        self.begun.store(0, Ordering::SeqCst);
        self.ended.store(0, Ordering::SeqCst);
        self.start.store(Address::of_ptr(start).0, Ordering::SeqCst);
        let called = call();
        let errno = std::io::Error::last_os_error();
        self.start.store(u64::MAX, Ordering::SeqCst);
        if !called {
            return Err(failed(function).context("the call itself failed", errno));
        }
        match (self.begun.load(Ordering::SeqCst), self.ended.load(Ordering::SeqCst)) {
            (1.., 1..) => Ok(()),
            (begun, ended) => Err(failed(function)
                .context("changes begun", begun)
                .context("changes ended", ended)
                .remedy(
                    "another library intercepts the C library's function and does not call it: \
                     turn its memory hooks off, or use the userfaultfd monitor",
                )),
        }
    }
}

fn failed(function: &'static str) -> Error {
    Error::new(ErrorKind::Busy, "memhooks self-test")
        .iface(IfaceKind::SYSTEM)
        .context("function", function)
}

/// Changes memory through the hooked functions, and tests that a subscriber is notified of each
/// change.
///
/// Two functions are not tested. Kernels before Linux 6.13 refuse to discard memory by
/// `process_madvise`. For `remap_file_pages`, the kernel would log that the program uses a
/// deprecated call.
///
/// # Errors
/// - Busy: a call failed, or did not notify the subscriber. The error names the function.
/// - The errors of [`Subscribers::add`].
pub(super) fn run(subscribers: &Subscribers<MemhooksState>) -> Result<()> {
    let expecting = Arc::new(Expecting { start: AtomicU64::new(u64::MAX), ..Expecting::default() });
    let invalidator: Arc<dyn Invalidator> = Arc::<Expecting>::clone(&expecting);
    let entry = subscribers.add(&invalidator)?;
    let result = fire(&expecting).and_then(|()| fire_brk(subscribers));
    subscribers.remove(entry);
    result
}

/// Tests the functions other than `brk`.
fn fire(test: &Expecting) -> Result<()> {
    let page = sys::page_size() as usize;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
    let map = || match unsafe { libc::mmap(ptr::null_mut(), 2 * page, prot, flags, -1, 0) } {
        libc::MAP_FAILED => Err(failed("mmap").context("os", std::io::Error::last_os_error())),
        mapped => Ok(mapped),
    };
    let memory = map()?;
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("madvise", (memory, page, InvalidationCause::Discard), || unsafe {
        libc::madvise(memory, page, libc::MADV_DONTNEED) == 0
    })?;
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("mmap", (memory, page, InvalidationCause::Replace), || unsafe {
        libc::mmap(memory, page, prot, flags | libc::MAP_FIXED, -1, 0) == memory
    })?;
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("munmap", (memory, 2 * page, InvalidationCause::Unmap), || unsafe {
        libc::munmap(memory, 2 * page) == 0
    })?;
    let memory = map()?;
    let tail = memory.wrapping_byte_add(page);
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("mremap", (tail, page, InvalidationCause::Remap), || unsafe {
        libc::mremap(memory, 2 * page, page, 0) == memory
    })?;
    let mut moved = libc::MAP_FAILED;
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("mremap", (memory, page, InvalidationCause::Remap), || unsafe {
        moved = libc::mremap(memory, page, 2 * page, libc::MREMAP_MAYMOVE);
        moved != libc::MAP_FAILED
    })?;
    // SAFETY: the pages are this function's own and still mapped.
    test.arrives("munmap", (moved, 2 * page, InvalidationCause::Unmap), || unsafe {
        libc::munmap(moved, 2 * page) == 0
    })?;
    fire_shm(test, page)
}

/// Tests `shmat` and `shmdt`. Succeeds without a test if no System V segment can be created, for
/// example because of a limit or a seccomp filter.
fn fire_shm(test: &Expecting, page: usize) -> Result<()> {
    // SAFETY: the call creates a segment and touches no memory.
    let id = unsafe { libc::shmget(libc::IPC_PRIVATE, page, libc::IPC_CREAT | 0o600) };
    if id < 0 {
        tracing::debug!(
            error = %std::io::Error::last_os_error(),
            "no System V segment to test shmdt with"
        );
        return Ok(());
    }
    // SAFETY: the kernel chooses the address, so the segment replaces no mapping.
    let attached = unsafe { libc::shmat(id, ptr::null(), 0) };
    // SAFETY: the call touches no memory. The kernel removes the segment after its last detach.
    unsafe { libc::shmctl(id, libc::IPC_RMID, ptr::null_mut()) };
    if attached.addr() == usize::MAX {
        return Err(failed("shmat").context("os", std::io::Error::last_os_error()));
    }
    // SAFETY: the call maps the same segment over its own mapping, which only this function uses.
    test.arrives("shmat", (attached, page, InvalidationCause::Replace), || unsafe {
        libc::shmat(id, attached, libc::SHM_REMAP) == attached
    })?;
    // SAFETY: only this function uses the segment.
    test.arrives("shmdt", (attached, page, InvalidationCause::Detach), || unsafe {
        libc::shmdt(attached) == 0
    })
}

/// Tests that `brk` is hooked: calls `brk(NULL)`, which the hook counts. Other calls of `brk` would
/// move the end of the heap, while allocations of other threads use the heap.
fn fire_brk(subscribers: &Subscribers<MemhooksState>) -> Result<()> {
    let arrived = || subscribers.shared().brk_probes.load(Ordering::SeqCst);
    let before = arrived();
    // SAFETY: for an address below the heap, the kernel returns the current break and changes
    // nothing.
    unsafe { libc::brk(ptr::null_mut()) };
    if arrived() == before {
        return Err(failed("brk")
            .remedy("another library intercepts the C library's brk: turn its memory hooks off"));
    }
    Ok(())
}
