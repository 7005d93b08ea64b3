//! Memory that a forked child finds zeroed.
//!
//! What a hook or a monitor's thread shares with the rest of the process lives in it, so that a child, however it
//! was made (`fork`, raw `clone`), has no invalidator, no lock that another thread held, and nothing under way.
//! A child that shares the parent's memory (`vfork`, threads) shares this too, as it must.

use std::{ops::Deref, sync::atomic::AtomicU32};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use rustix::{io::Errno, mm::Advice};

use crate::sys::Mapping;

/// What zeroed memory is a valid value of, at any moment.
///
/// # Safety
/// All-zero bytes are a valid value even where another value was a moment ago, sharing it between threads is
/// sound, and it needs no drop.
pub(crate) unsafe trait Wipeable: Sync {}

/// `T` behind a mark that a child does not have.
#[repr(C)]
struct Marked<T> {
    ours: AtomicU32,
    value: T,
}

/// One `T` that starts as zeroes, and is zeroes again in a forked child.
#[derive(Debug)]
pub(crate) struct WipedOnFork<T> {
    mapping: Mapping,
    value: std::marker::PhantomData<T>,
}

impl<T: Wipeable> WipedOnFork<T> {
    /// # Errors
    /// OutOfResources without memory; Unsupported where the kernel cannot wipe (before Linux 4.14).
    pub(crate) fn new() -> Result<Self> {
        assert!(align_of::<Marked<T>>() <= rustix::param::page_size(), "mappings are page-aligned");
        let failed = |call: &'static str| move |errno: Errno| Error::os(errno, call).iface(IfaceKind::SYSTEM);
        let mapping = Mapping::memory(size_of::<Marked<T>>()).map_err(failed("mmap"))?;
        // SAFETY: the mapping is this function's own, and zeroes are what its users accept.
        unsafe { rustix::mm::madvise(mapping.as_ptr().cast(), mapping.len(), Advice::LinuxWipeOnFork) }
            .map_err(|errno| {
                Error::new(ErrorKind::Unsupported, "madvise(MADV_WIPEONFORK)")
                    .iface(IfaceKind::SYSTEM)
                    .errno(errno)
                    .remedy("monitors of host memory need Linux 4.14: without it a forked child could not be told apart")
            })?;
        let this = Self { mapping, value: std::marker::PhantomData };
        this.marked().ours.store(1, std::sync::atomic::Ordering::Relaxed);
        Ok(this)
    }

    /// Whether this process made it. Not so in a forked child, where it holds zeroes.
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        self.marked().ours.load(std::sync::atomic::Ordering::Relaxed) != 0
    }

    #[inline]
    fn marked(&self) -> &Marked<T> {
        // SAFETY: the mapping is as long as a `Marked<T>`, aligned, lives as long as `self`, and holds zeroes or
        // what `&Marked<T>` was used to write; `T: Wipeable` accepts both, and so does an `AtomicU32`.
        unsafe { &*self.mapping.as_ptr().cast::<Marked<T>>() }
    }
}

impl<T: Wipeable> Deref for WipedOnFork<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.marked().value
    }
}

/// What a monitor answers in a child of the process that it watches.
#[cold]
pub(crate) fn forked(operation: &'static str, monitor: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, operation)
        .iface(IfaceKind::SYSTEM)
        .context("monitor", monitor)
        .context("why", "this process was forked from the one that the monitor watches")
        .remedy("start a monitor of its own in the child, or exec")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    struct Word(AtomicU64);

    // SAFETY: any bit pattern is an `AtomicU64`.
    unsafe impl Wipeable for Word {}

    #[test]
    #[cfg_attr(target_arch = "aarch64", ignore = "qemu-user takes MADV_WIPEONFORK and does nothing")]
    fn a_forked_child_finds_zeroes_and_the_parent_keeps_its_value() {
        let wiped = WipedOnFork::<Word>::new().unwrap();
        wiped.0.store(7, Ordering::Relaxed);
        // SAFETY: the child makes no call that could need a lock of another thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let zero = wiped.0.load(Ordering::Relaxed) == 0 && !wiped.is_ours();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!zero)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(wiped.is_ours());
        assert_eq!(wiped.0.load(Ordering::Relaxed), 7);
    }
}
