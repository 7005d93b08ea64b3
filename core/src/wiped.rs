//! Memory that is zeroed in a forked child.
//!
//! The library keeps state here that a forked child must not inherit: the number of the process,
//! and the state that a hook or a monitor's thread shares with the rest of the process. In a child
//! of `fork` or of a raw `clone`, this state is zero: no invalidator is subscribed, no lock is held
//! by a thread of the parent, and no hooked call is in flight. A `vfork` child and a new thread
//! share all memory with their parent, including this memory.

#![allow(unsafe_code, reason = "maps memory that is zeroed in a forked child")]

use std::{
    marker::PhantomData,
    ops::Deref,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};

use crate::{Error, ErrorKind, Mapping, Result};

/// A type whose values the kernel may replace by all-zero bytes in a forked child.
///
/// # Safety
/// - All-zero bytes must be a valid value. The kernel may replace any value by zeroes at the fork.
/// - The type must allow several threads to use a value at once.
/// - The type must not need a drop.
pub unsafe trait Wipeable: Send + Sync {}

// SAFETY: any bytes are a valid `AtomicU32`, which threads may share and which needs no drop.
unsafe impl Wipeable for AtomicU32 {}
// SAFETY: any bytes are a valid `AtomicUsize`, which threads may share and which needs no drop.
unsafe impl Wipeable for AtomicUsize {}
// SAFETY: any bytes are a valid `AtomicU64`, which threads may share and which needs no drop.
unsafe impl Wipeable for AtomicU64 {}

/// A `T` and a mark of the process that created it. The kernel zeroes both in a forked child.
#[repr(C)]
struct Marked<T> {
    /// The mark: 1 in the process that created the value, 0 in a forked child.
    ours: AtomicU32,
    value: T,
}

/// A `T` that is all zeroes at first, and again in a forked child.
#[derive(Debug)]
pub struct WipedOnFork<T> {
    /// The mapping of a `Marked<T>`.
    mapping: Mapping,
    value: PhantomData<T>,
}

impl<T: Wipeable> WipedOnFork<T> {
    /// Maps zeroed memory for a `T`.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfResources`] if no memory is left.
    /// - [`ErrorKind::Again`] if the process locks all its memory (`mlockall(2)`) and has reached
    ///   its locked-memory limit.
    /// - [`ErrorKind::Unsupported`] if the kernel cannot zero memory in a forked child (before
    ///   Linux 4.14).
    pub fn new() -> Result<Self> {
        // Mappings are aligned to pages, of which the smallest have 4 KiB.
        const { assert!(align_of::<Marked<T>>() <= 4096) };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = Mapping::anonymous(size_of::<Marked<T>>(), protection, MapFlags::PRIVATE)
            .map_err(|errno| Error::os(errno, "mmap"))?;
        let (at, len) = (mapping.as_ptr().cast(), mapping.len());
        // SAFETY: the mapping is this function's own, and zeroes are a valid `Marked<T>`.
        unsafe { madvise(at, len, Advice::LinuxWipeOnFork) }.map_err(|errno| {
            Error::new(ErrorKind::Unsupported, "madvise(MADV_WIPEONFORK)")
                .errno(errno)
                .remedy("use Linux 4.14 or newer, where a library can recognise a forked child")
        })?;
        let this = Self { mapping, value: PhantomData };
        this.marked().ours.store(1, Ordering::Relaxed);
        Ok(this)
    }

    /// Returns true in the process that created this value, and false in a forked child.
    #[inline]
    pub fn is_own_process(&self) -> bool {
        self.marked().ours.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn marked(&self) -> &Marked<T> {
        // SAFETY: `new` mapped the bytes of a `Marked<T>`, page-aligned, and they live as long as
        // `self`. They hold zeroes, or values that users of `&Marked<T>` wrote. Both are valid for
        // `T: Wipeable` and for an `AtomicU32`.
        unsafe { &*self.mapping.as_ptr().cast() }
    }
}

impl<T: Wipeable> Deref for WipedOnFork<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.marked().value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_finds_zeroes_and_the_parent_keeps_its_value() {
        let wiped = WipedOnFork::<AtomicU64>::new().unwrap();
        wiped.store(7, Ordering::Relaxed);
        // SAFETY: the child makes no call that could need a lock of another thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let zero = wiped.load(Ordering::Relaxed) == 0 && !wiped.is_own_process();
            // SAFETY: the call ends the child at once, and has no precondition.
            unsafe { libc::_exit(i32::from(!zero)) };
        }
        let mut status = -1;
        // SAFETY: the call waits for the child from above, and writes its status only.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(wiped.is_own_process());
        assert_eq!(wiped.load(Ordering::Relaxed), 7);
    }
}
