//! Host memory: direct copies of what is known to be mapped, and the kernel's fault-safe copies of
//! what is not.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use hmem_core::{AddressRange, Errno, Error, ErrorKind, Result};

use super::bad_address;

/// An address that a region or the caller of `post` vouches for, as a pointer.
///
/// It is for memory that others use too, through pointers of their own: never make a reference of
/// it.
#[inline]
pub(in super::super) fn direct_pointer(at: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}

/// Copies as a NIC does: other threads may read and write the same bytes meanwhile and see them
/// change in any order. Words of up to 8 bytes at their natural alignment move as a whole.
///
/// # Safety
/// Both runs of `len` bytes are mapped, readable and writable respectively.
#[inline]
pub(super) unsafe fn copy_direct(from: *const u8, to: *mut u8, len: usize) {
    macro_rules! word {
        ($atomic:ty) => {
            if (from.addr() | to.addr()) & (size_of::<$atomic>() - 1) == 0 {
                // SAFETY: the caller vouches for `len` mapped bytes, which is this type's size;
                // both are aligned for it. Atomics may be read while others write, which
                // plain loads may not.
                unsafe {
                    let value = (*from.cast::<$atomic>()).load(Ordering::Relaxed);
                    (*to.cast::<$atomic>()).store(value, Ordering::Relaxed);
                }
                return;
            }
        };
    }
    match len {
        8 => word!(AtomicU64),
        4 => word!(AtomicU32),
        2 => word!(AtomicU16),
        1 => word!(AtomicU8),
        _ => {}
    }
    // SAFETY: the caller vouches for both runs; memmove allows them to overlap. It is called in the
    // C library, whose code the compiler knows nothing about, so that bytes racing with the
    // application are only unspecified.
    unsafe { libc::memmove(to.cast(), from.cast(), len) };
}

/// Copies from `from`, mapped or not, to `to`, mapped or not.
pub(super) fn kernel_read(from: u64, to: u64, len: u64) -> Result<()> {
    // SAFETY: the kernel checks both ranges and reports what it cannot reach; it writes to `to`
    // only, which is memory that a region or a posted request names as a target.
    kernel_copy(from, to, len, |local, remote| unsafe {
        libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0)
    })
}

/// Copies from `from`, which is mapped, to `to`, mapped or not.
pub(super) fn kernel_write(from: u64, to: u64, len: u64) -> Result<()> {
    // SAFETY: as in `kernel_read`.
    kernel_copy(to, from, len, |local, remote| unsafe {
        libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0)
    })
}

/// Repeats a copy between `remote` and `local` until all of it is done or a page is missing.
fn kernel_copy(
    remote: u64,
    local: u64,
    len: u64,
    call: impl Fn(libc::iovec, libc::iovec) -> isize,
) -> Result<()> {
    let mut done = 0;
    while done < len {
        let vector = |at: u64| libc::iovec {
            iov_base: direct_pointer(at + done).cast(),
            iov_len: (len - done) as usize,
        };
        let moved = call(vector(local), vector(remote));
        if moved > 0 {
            done += moved as u64;
            continue;
        }
        let error = std::io::Error::last_os_error();
        return Err(match (moved, error.raw_os_error()) {
            (0, _) => bad_address(remote + done, len - done),
            (_, Some(libc::EFAULT)) => {
                bad_address(remote + done, len - done).errno(Errno(libc::EFAULT))
            }
            _ => Error::os(Errno::of(&error), "process_vm_readv/process_vm_writev")
                .provider("loopback"),
        });
    }
    Ok(())
}

/// Fills `into` from addresses that may not be mapped.
pub(in super::super) fn load_host(at: u64, into: &mut [u8]) -> Result<()> {
    kernel_read(at, into.as_mut_ptr().expose_provenance() as u64, into.len() as u64)
}

/// Writes `from` to addresses that may not be mapped.
pub(in super::super) fn store_host(at: u64, from: &[u8]) -> Result<()> {
    kernel_write(from.as_ptr().expose_provenance() as u64, at, from.len() as u64)
}

/// Makes sure that pages back a range, writable ones if the NIC may write.
pub(in super::super) fn populate(
    range: AddressRange,
    write: bool,
    operation: &'static str,
) -> Result<()> {
    let pages = range.page_aligned(rustix::param::page_size() as u64);
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    loop {
        // SAFETY: populating reads or touches pages without changing what they hold, and reports
        // ranges that are not mapped or not allowed instead of faulting.
        let result = unsafe {
            libc::madvise(direct_pointer(pages.start().0).cast(), pages.len() as usize, advice)
        };
        if result == 0 {
            return Ok(());
        }
        let errno = Errno::of(&std::io::Error::last_os_error());
        if errno.0 == libc::EINTR || errno.0 == libc::EAGAIN {
            continue;
        }
        return Err(Error::new(ErrorKind::BadAddress, operation)
            .provider("loopback")
            .errno(errno)
            .context("range", range)
            .context("needed", if write { "writable pages" } else { "readable pages" })
            .remedy("map and protect the whole range before registering it"));
    }
}
