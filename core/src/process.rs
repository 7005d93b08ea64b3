//! Process marks, which tell a forked child from its parent.
//!
//! A forked child has copies of its parent's objects, and shares the resources behind them: files,
//! queues, a driver's registrations. The child must not use those. So each object that owns such a
//! resource stores a [`ProcessMark`] and checks it.

use std::{
    ptr::{self, NonNull},
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{Error, ErrorKind, Result};

/// A mark of one process. A forked child never has the mark of one of its ancestors, by whatever
/// system call the fork was made.
///
/// ```
/// use hmem_core::ProcessMark;
///
/// let mark = ProcessMark::current()?;
/// assert!(mark.is_current());
/// mark.check("register")?;
/// # Ok::<(), hmem_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessMark(u64);

/// The word that holds this process's number, or 0 if it has none yet. The kernel zeroes the word
/// in a forked child. It is mapped once and never unmapped.
static NUMBER: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// The next number. A forked child continues from its parent's value at the fork, so its number is
/// greater than those of all its ancestors.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn number() -> Option<&'static AtomicU64> {
    // SAFETY: null, or a word that `current` mapped and that is never unmapped.
    unsafe { NUMBER.load(Ordering::Acquire).as_ref() }
}

fn numbered(word: &AtomicU64) -> ProcessMark {
    let seen = word.load(Ordering::Relaxed);
    if seen != 0 {
        return ProcessMark(seen);
    }
    let new = NEXT.fetch_add(1, Ordering::Relaxed);
    match word.compare_exchange(0, new, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => ProcessMark(new),
        Err(other) => ProcessMark(other),
    }
}

impl ProcessMark {
    /// Returns the mark of the calling process.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfResources`] if memory is short.
    /// - The operating system's own error if it cannot wipe memory in a fork (before Linux 4.14).
    ///
    /// After one success the call never fails in that process or in its children.
    pub fn current() -> Result<Self> {
        if let Some(word) = number() {
            return Ok(numbered(word));
        }
        let word = WipedWord::new()?;
        let new = word.0.as_ptr();
        // This uses no lock, because a forked child could find the lock held by a thread that
        // exists only in the parent.
        match NUMBER.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => std::mem::forget(word),
            Err(_) => drop(word),
        }
        Ok(number().map(numbered).expect("set by now"))
    }

    /// Returns the mark of the calling process, which is the marked process or a descendant of it.
    pub(crate) fn of_caller(self) -> Self {
        number().map_or(self, numbered)
    }

    /// Returns true if the calling process is the marked one, and not a child of it.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        number().is_some_and(|word| word.load(Ordering::Relaxed) == self.0)
    }

    /// Refuses `operation` in a forked child.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] unless the calling process is the marked one.
    #[inline]
    pub fn check(self, operation: &'static str) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(in_a_child(operation)) }
    }
}

#[cold]
fn in_a_child(operation: &'static str) -> Error {
    Error::new(ErrorKind::BadState, operation)
        .context("why", "this process was forked from the one that opened the NIC or domain")
        .remedy(
            "build a new `Hmem`, or open the provider again, in this process: a child cannot use \
             its parent's NIC",
        )
}

/// A word on a page of its own that the kernel zeroes in a forked child (`MADV_WIPEONFORK`).
pub(crate) struct WipedWord(NonNull<AtomicU64>);

/// The length of the mapping in bytes: the largest page size of the supported architectures.
const LEN: usize = 1 << 16;

// SAFETY: the page holds one atomic, which any thread may use, and is unmapped once, by Drop.
unsafe impl Send for WipedWord {}
// SAFETY: through a shared reference only the atomic is reached.
unsafe impl Sync for WipedWord {}

impl WipedWord {
    /// Maps a new word with the value 0.
    pub(crate) fn new() -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping replaces nothing.
        let page = unsafe { mmap_anonymous(ptr::null_mut(), LEN, protection, MapFlags::PRIVATE) }
            .map_err(|errno| Error::os(errno, "mmap"))?;
        let word = Self(NonNull::new(page.cast()).expect("a mapping is not at address 0"));
        // SAFETY: the page is the word's own, made above.
        unsafe { madvise(page, LEN, Advice::LinuxWipeOnFork) }.map_err(|errno| {
            Error::os(errno, "madvise")
                .context("advice", "MADV_WIPEONFORK")
                .remedy("use Linux 4.14 or newer, where a library can detect a forked child")
        })?;
        Ok(word)
    }

    /// Returns the word.
    #[cfg_attr(loom, allow(dead_code, reason = "models have one process"))]
    #[inline(always)]
    pub(crate) fn get(&self) -> &AtomicU64 {
        // SAFETY: `new` mapped the page, which stays mapped as long as the word lives, and holds an
        // atomic from the start: zero is one.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for WipedWord {
    fn drop(&mut self) {
        // SAFETY: the page is the word's own, mapped by `new`, and references to it have ended.
        if let Err(errno) = unsafe { munmap(self.0.as_ptr().cast(), LEN) } {
            tracing::error!(%errno, "cannot unmap the page of a process mark: the page is leaked");
        }
    }
}
