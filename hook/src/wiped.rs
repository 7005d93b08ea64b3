//! Memory that is zeroed in a forked child.
//!
//! This memory holds the state that a hook or a monitor's thread shares with the rest of the
//! process. So a child of `fork` or of a raw `clone` finds in it no invalidator, no lock that
//! another thread held, and no hooked call in flight. A `vfork` child and a new thread share all
//! memory with their parent, including this memory.

#![allow(unsafe_code, reason = "maps memory that is zeroed in a forked child")]

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

/// A type whose values the kernel may replace by all-zero bytes in a forked child.
///
/// # Safety
/// - All-zero bytes must be a valid value. The kernel may replace any value by zeroes at the fork.
/// - The type must allow several threads to use a value at once.
/// - The type must not need a drop.
pub unsafe trait Wipeable: Sync {}

// SAFETY: any bytes are a valid `AtomicUsize`, which threads may share and which needs no drop.
unsafe impl Wipeable for AtomicUsize {}

/// A `T`, and a mark of the process that created it. The kernel zeroes both in a forked child, so a
/// mark of zero identifies a forked child.
#[repr(C)]
struct Marked<T> {
    ours: AtomicU32,
    value: T,
}

/// A `T` that is all zeroes at first, and again in a forked child.
#[derive(Debug)]
pub struct WipedOnFork<T> {
    marked: NonNull<Marked<T>>,
}

// SAFETY: a mapping belongs to the process, not to a thread. `T: Wipeable` lets threads share the
// value and needs no drop, so that any thread may drop the mapping.
unsafe impl<T: Wipeable> Send for WipedOnFork<T> {}
// SAFETY: `&WipedOnFork` gives access to nothing but `&T`, which `T: Wipeable` lets threads share.
unsafe impl<T: Wipeable> Sync for WipedOnFork<T> {}

impl<T: Wipeable> WipedOnFork<T> {
    /// Maps zeroed memory for a `T`. Each error contains the iface of `monitor`.
    ///
    /// # Errors
    /// - OutOfResources: no memory is left.
    /// - Unsupported: the kernel cannot wipe memory in a child (before Linux 4.14).
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
        // SAFETY: the mapping is this function's own, and zeroes are a valid `Marked<T>`.
        unsafe { rustix::mm::madvise(at, len, Advice::LinuxWipeOnFork) }.map_err(|errno| {
            Error::new(ErrorKind::Unsupported, "madvise(MADV_WIPEONFORK)")
                .iface(monitor.iface)
                .context("monitor", monitor.name)
                .errno(errno)
                .remedy(
                    "use Linux 4.14 or newer: the monitor needs this call to recognise a forked \
                     child",
                )
        })?;
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
        unsafe { self.marked.as_ref() }
    }
}

impl<T> Drop for WipedOnFork<T> {
    fn drop(&mut self) {
        // SAFETY: `new` mapped these bytes with this length, and the dropped value was their only
        // user.
        let done =
            unsafe { rustix::mm::munmap(self.marked.as_ptr().cast(), size_of::<Marked<T>>()) };
        if let Err(errno) = done {
            tracing::error!(%errno, "cannot unmap the memory of the hooks: the memory is leaked");
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

    // SAFETY: any bytes are a valid `AtomicU64`, which threads may share and which needs no drop.
    unsafe impl Wipeable for Word {}

    #[test]
    #[cfg_attr(
        target_arch = "aarch64",
        ignore = "qemu-user accepts MADV_WIPEONFORK and ignores it"
    )]
    fn a_forked_child_finds_zeroes_and_the_parent_keeps_its_value() {
        let name = MonitorName { name: "test", iface: IfaceKind::SYSTEM, fallback_hint: "" };
        let wiped = WipedOnFork::<Word>::new(name).unwrap();
        wiped.0.store(7, Ordering::Relaxed);
        // SAFETY: the child makes no call that could need a lock of another thread.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let zero = wiped.0.load(Ordering::Relaxed) == 0 && !wiped.is_own_process();
            // SAFETY: the call ends the child at once, and has no precondition.
            unsafe { libc::_exit(i32::from(!zero)) };
        }
        let mut status = -1;
        // SAFETY: the call waits for the child from above, and writes its status only.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(wiped.is_own_process());
        assert_eq!(wiped.0.load(Ordering::Relaxed), 7);
    }
}
