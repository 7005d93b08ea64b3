//! Memory that is unmapped and mapped again at the same address.

use std::ptr;

use hmem::{Address, AddressRange, transfer::LocalSegment};

/// Pages of a test, which can be unmapped and mapped again at the same address.
pub(crate) struct Pages {
    pub(crate) at: usize,
    len: usize,
}

impl Pages {
    pub(crate) fn new(len: usize) -> Self {
        let mut pages = Self { at: 0, len };
        pages.map();
        pages
    }

    /// Maps new pages at the addresses of the previous ones, or elsewhere if another thread has
    /// mapped memory there.
    pub(crate) fn map(&mut self) {
        let fixed = if self.at == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
        self.at = self.mapped(fixed).or_else(|| self.mapped(0)).expect("memory");
    }

    fn mapped(&self, fixed: i32) -> Option<usize> {
        let (rights, own) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = ptr::with_exposed_provenance_mut(if fixed == 0 { 0 } else { self.at });
        // SAFETY: a new mapping, which replaces no other one.
        let place = unsafe { libc::mmap(at, self.len, rights, own | fixed, -1, 0) };
        (place != libc::MAP_FAILED).then(|| place.expose_provenance())
    }

    pub(crate) fn unmap(&self) {
        // SAFETY: this value's own mapping, and no reference into it exists.
        assert_eq!(unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.at), self.len) }, 0);
    }

    /// Replaces the pages, at the same address unless another thread maps memory there meanwhile.
    pub(crate) fn replace(&mut self) {
        self.unmap();
        self.map();
    }

    pub(crate) fn fill(&self, byte: u8) {
        // SAFETY: the pages are mapped, and nothing refers into them.
        unsafe { ptr::with_exposed_provenance_mut::<u8>(self.at).write_bytes(byte, self.len) };
    }

    pub(crate) fn forbid(&self) {
        let at = ptr::with_exposed_provenance_mut(self.at);
        // SAFETY: this value's own mapping, and no reference into it exists.
        assert_eq!(unsafe { libc::mprotect(at, self.len, libc::PROT_NONE) }, 0);
    }

    pub(crate) fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len);
        // SAFETY: the address is inside the mapping.
        unsafe { ptr::with_exposed_provenance::<u8>(self.at + at).read_volatile() }
    }

    pub(crate) fn bare(&self, offset: usize, len: usize) -> LocalSegment {
        assert!(offset + len <= self.len);
        LocalSegment { address: Address((self.at + offset) as u64), len: len as u64, desc: None }
    }

    pub(crate) fn range(&self) -> AddressRange {
        AddressRange::new(Address(self.at as u64), self.len as u64).expect("no wrap")
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.unmap();
    }
}
