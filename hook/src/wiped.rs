//! Memory that a forked child finds zeroed.
//!
//! What a hook or a monitor's thread shares with the rest of the process lives in it, so that a
//! child, however it was made (`fork`, raw `clone`), has no invalidator, no lock that another
//! thread held, and nothing under way. A child that shares the parent's memory (`vfork`, threads)
//! shares this too, as it must.

use std::{
    ops::Deref,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicUsize, Ordering},
};

use hmem_core::{Error, ErrorKind, Result};
use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
};

use crate::MonitorName;

/// What zeroed memory is a valid value of, at any moment.
///
/// # Safety
/// All-zero bytes are a valid value even where another value was a moment ago, sharing it between
/// threads is sound, and it needs no drop.
pub unsafe trait Wipeable: Sync {}

// SAFETY: any bytes are an `AtomicUsize`, which threads may share and which needs no drop.
unsafe impl Wipeable for AtomicUsize {}

/// `T` behind a mark that a child does not have.
#[repr(C)]
struct Marked<T> {
    ours: AtomicU32,
    value: T,
}

/// One `T` that starts as zeroes, and is zeroes again in a forked child.
#[derive(Debug)]
pub struct WipedOnFork<T> {
    marked: NonNull<Marked<T>>,
}

// SAFETY: a mapping belongs to the process, not to a thread; what lies in it is shared as `T:
// Wipeable` allows, which needs no drop, so that any thread may drop it.
unsafe impl<T: Wipeable> Send for WipedOnFork<T> {}
// SAFETY: as above; `&WipedOnFork` gives out nothing but `&T`.
unsafe impl<T: Wipeable> Sync for WipedOnFork<T> {}

impl<T: Wipeable> WipedOnFork<T> {
    /// For a monitor, which is named where it cannot be had.
    ///
    /// # Errors
    /// OutOfResources without memory; Unsupported where the kernel cannot wipe (before Linux 4.14).
    pub fn new(monitor: MonitorName) -> Result<Self> {
        assert!(align_of::<Marked<T>>() <= rustix::param::page_size(), "mappings are page-aligned");
        let len = size_of::<Marked<T>>();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let failed = |errno: Errno| Error::os(errno, "mmap").iface(monitor.iface);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let at =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) };
        let at = at.map_err(failed)?;
        let this = Self { marked: NonNull::new(at.cast()).ok_or_else(|| failed(Errno::FAULT))? };
        // SAFETY: the mapping is this function's own, and zeroes are what its users accept.
        unsafe { rustix::mm::madvise(at, len, Advice::LinuxWipeOnFork) }.map_err(|errno| {
            Error::new(ErrorKind::Unsupported, "madvise(MADV_WIPEONFORK)")
                .iface(monitor.iface)
                .context("monitor", monitor.name)
                .errno(errno)
                .remedy(
                    "it needs Linux 4.14: without that call a forked child could not be told apart",
                )
        })?;
        this.marked().ours.store(1, Ordering::Relaxed);
        Ok(this)
    }

    /// Whether this process made it. Not so in a forked child, where it holds zeroes.
    #[inline]
    pub fn is_own_process(&self) -> bool {
        self.marked().ours.load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn marked(&self) -> &Marked<T> {
        // SAFETY: the mapping is as long as a `Marked<T>`, aligned, lives as long as `self`, and
        // holds zeroes or what `&Marked<T>` was used to write; `T: Wipeable` accepts both,
        // and so does an `AtomicU32`.
        unsafe { self.marked.as_ref() }
    }
}

impl<T> Drop for WipedOnFork<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, of this length, and whoever drops it has no use for it any
        // longer.
        let done =
            unsafe { rustix::mm::munmap(self.marked.as_ptr().cast(), size_of::<Marked<T>>()) };
        if let Err(errno) = done {
            tracing::error!(%errno, "munmap failed");
        }
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
    use std::sync::atomic::AtomicU64;

    use hmem_core::IfaceKind;

    use super::*;

    struct Word(AtomicU64);

    // SAFETY: any bit pattern is an `AtomicU64`.
    unsafe impl Wipeable for Word {}

    #[test]
    #[cfg_attr(
        target_arch = "aarch64",
        ignore = "qemu-user takes MADV_WIPEONFORK and does nothing"
    )]
    fn a_forked_child_finds_zeroes_and_the_parent_keeps_its_value() {
        let name = MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "" };
        let wiped = WipedOnFork::<Word>::new(name).unwrap();
        wiped.0.store(7, Ordering::Relaxed);
        // SAFETY: the child makes no call that could need a lock of another thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let zero = wiped.0.load(Ordering::Relaxed) == 0 && !wiped.is_own_process();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!zero)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(wiped.is_own_process());
        assert_eq!(wiped.0.load(Ordering::Relaxed), 7);
    }
}
