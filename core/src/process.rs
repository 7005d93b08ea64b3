//! Process marks, which tell a forked child from its parent.
//!
//! A forked child has copies of its parent's objects, and shares the resources behind them: files,
//! queues, a driver's registrations. The child must not use these resources. So each object that
//! owns such a resource stores a [`ProcessMark`] and checks it.

#![allow(unsafe_code, reason = "refers to the integer that is zeroed in a forked child")]

use std::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
};

use crate::{Error, ErrorKind, Result, WipedOnFork};

/// A mark that distinguishes a process from its forked children.
///
/// A mark that a process got before a fork is never the mark of the child, whichever system call
/// made the fork. A child that shares the memory of its parent (`vfork(2)`) has the parent's mark.
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

/// The address of a 64-bit integer: the number of this process, or 0 if this process has no number
/// yet. The address is null until the first use, which maps the integer. The integer is never
/// unmapped. The kernel zeroes the integer in a forked child.
static NUMBER: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

/// The number for the next process that needs a number. A forked child inherits the value, so the
/// child's number is greater than each number that an ancestor had at the fork.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn own_number() -> Option<&'static AtomicU64> {
    // SAFETY: the pointer is null, or the address of an integer that `current` mapped and that is
    // never unmapped.
    unsafe { NUMBER.load(Ordering::Acquire).as_ref() }
}

fn mark_of(word: &AtomicU64) -> ProcessMark {
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
    /// The errors of [`WipedOnFork::new`].
    ///
    /// After one success the call never fails in that process or in its children.
    pub fn current() -> Result<Self> {
        if let Some(word) = own_number() {
            return Ok(mark_of(word));
        }
        let word = WipedOnFork::<AtomicU64>::new()?;
        let new = ptr::from_ref(&*word).cast_mut();
        // No lock is used, because a forked child could find the lock held by a thread that exists
        // only in the parent.
        match NUMBER.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => std::mem::forget(word),
            Err(_) => drop(word),
        }
        Ok(own_number().map(mark_of).expect("this call or another thread stored the word"))
    }

    /// Returns the mark of the calling process, which must be the marked process or a descendant of
    /// it.
    pub(crate) fn of_caller(self) -> Self {
        own_number().map_or(self, mark_of)
    }

    /// Returns true if the calling process is the marked process, and false in its forked children.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        own_number().is_some_and(|word| word.load(Ordering::Relaxed) == self.0)
    }

    /// Checks that the calling process is the marked one. The error names `operation`.
    ///
    /// # Errors
    /// [`ErrorKind::BadState`] in a forked child of the marked process.
    #[inline]
    pub fn check(self, operation: &'static str) -> Result<()> {
        if self.is_current() { Ok(()) } else { Err(in_a_child(operation)) }
    }
}

#[cold]
fn in_a_child(operation: &'static str) -> Error {
    Error::new(ErrorKind::BadState, operation)
        .context("why", "this process was forked from the one that opened the NIC, domain or iface")
        .remedy(
            "build a new `Hmem`, or open the provider or iface again, in this process: a child \
             cannot use the NICs and devices of its parent",
        )
}
