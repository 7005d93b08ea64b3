//! Memory mappings that are unmapped on drop.

#![allow(unsafe_code, reason = "maps and unmaps memory")]

use std::{
    ffi::c_void,
    os::fd::AsFd,
    ptr::{self, NonNull},
};

use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags},
};

use crate::{Address, AddressRange};

/// A memory mapping of this process. Dropping the value unmaps it.
///
/// The mapping is removed through the C library, so that the hooks of a cache monitor see it.
///
/// ```
/// use hmem_core::Mapping;
/// use rustix::mm::{MapFlags, ProtFlags};
///
/// let mapping = Mapping::anonymous(4096, ProtFlags::READ, MapFlags::PRIVATE)?;
/// assert_eq!(mapping.len(), 4096);
/// # Ok::<(), rustix::io::Errno>(())
/// ```
///
/// # References
/// `mmap(2)`, `munmap(2)`
#[derive(Debug)]
#[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. All access to its bytes goes through
// raw pointers, and the users of those pointers synchronise.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives access to nothing but addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of anonymous memory, at an address that the kernel chooses.
    ///
    /// # Errors
    /// The error of `mmap`, for example if `len` is 0 or no memory is left.
    pub fn anonymous(len: usize, protection: ProtFlags, flags: MapFlags) -> Result<Self, Errno> {
        Self::anonymous_near(Address(0), len, protection, flags)
    }

    /// Maps memory like [`Mapping::anonymous`], but at the address `start`, or elsewhere if the
    /// addresses there are not free. Never replaces a mapping: `MAP_FIXED` is ignored.
    ///
    /// # Errors
    /// The errors of [`Mapping::anonymous`], and `EEXIST` if `flags` has `MAP_FIXED_NOREPLACE` and
    /// the addresses are not free.
    pub fn anonymous_near(
        start: Address,
        len: usize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Errno> {
        let start = ptr::with_exposed_provenance_mut(start.0 as usize);
        let flags = flags.difference(MapFlags::FIXED);
        // SAFETY: without `MAP_FIXED`, a new mapping replaces nothing.
        Self::from_kernel(
            unsafe { rustix::mm::mmap_anonymous(start, len, protection, flags)? },
            len,
        )
    }

    /// Maps `len` bytes of a file from `offset` on, as shared memory.
    ///
    /// # Errors
    /// The error of `mmap`, for example if the file cannot be mapped with this protection.
    pub fn shared(
        fd: impl AsFd,
        offset: u64,
        len: usize,
        protection: ProtFlags,
    ) -> Result<Self, Errno> {
        let (start, flags) = (ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe { rustix::mm::mmap(start, len, protection, flags, fd, offset)? };
        Self::from_kernel(start, len)
    }

    fn from_kernel(start: *mut c_void, len: usize) -> Result<Self, Errno> {
        let start = NonNull::new(start.cast::<u8>()).ok_or(Errno::FAULT)?;
        Ok(Self { start, len })
    }

    /// Returns a pointer to the first byte.
    #[inline]
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the length in bytes, as it was requested.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub fn address(&self) -> Address {
        Address::of_ptr(self.as_ptr())
    }

    /// Returns the addresses of the mapping.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        AddressRange::new(self.address(), self.len as u64).expect("a mapping does not wrap")
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value mapped the range, and its users use the range no longer than the
        // value lives.
        if unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) } != 0 {
            let error = std::io::Error::last_os_error();
            tracing::error!(%error, range = %self.range(), "cannot unmap memory: it is leaked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_mapped(address: Address) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
        maps.lines().any(|line| line.starts_with(&format!("{:x}-", address.0)))
    }

    /// Maps 64 KiB at `near`, or elsewhere if the addresses are not free. The mapping is executable
    /// only, unlike other memory of the process, so that the kernel does not merge it with a
    /// neighbour.
    fn reserve(near: Address) -> Result<Mapping, Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        Mapping::anonymous_near(near, 1 << 16, ProtFlags::EXEC, flags)
    }

    #[test]
    fn memory_is_unmapped_on_drop() {
        let mapping = reserve(Address(0)).expect("mapped");
        let start = mapping.address();
        assert!(is_mapped(start));
        drop(mapping);
        assert!(!is_mapped(start));
    }

    #[test]
    fn new_mapping_replaces_no_other() {
        let first = reserve(Address(0)).expect("mapped");
        let second = reserve(first.address()).expect("mapped elsewhere");
        assert!(!first.range().overlaps(second.range()));
    }
}
