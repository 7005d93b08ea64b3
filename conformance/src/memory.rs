//! Memory under test: host pages with a mapping that the test controls, or a device buffer.

#![allow(unsafe_code, reason = "maps pages, and copies by address")]

use std::{ptr, slice, sync::Arc};

use hmem_core::{
    AddressRange, AllocationKind, DeviceBuffer, DeviceId, Iface, Mapping, Memory, Place,
    iface::AllocRequest,
};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

/// Anonymous pages, unmapped on drop.
#[derive(Debug)]
pub struct HostPages(Mapping);

impl HostPages {
    /// Maps new pages, which are zeroed.
    pub fn new(len: usize) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        Self(Mapping::anonymous(len, access, MapFlags::PRIVATE).expect("mmap"))
    }

    /// Reserves addresses without access and without pages.
    pub fn reserved(len: usize) -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        Self(Mapping::anonymous(len, ProtFlags::empty(), flags).expect("mmap"))
    }

    /// Returns the addresses of the whole memory.
    pub fn range(&self) -> AddressRange {
        self.0.range()
    }

    /// Replaces the pages by new zeroed ones, as a free and a new allocation at the address would.
    /// The process may read and write the new pages.
    pub fn replace_pages(&self) {
        let (access, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the range is this value's own mapping, and tests hold no references into it.
        unsafe { mmap_anonymous(self.0.as_ptr().cast(), self.0.len(), access, flags) }
            .expect("mmap");
    }

    /// Removes pages and access of a part, but keeps the addresses reserved.
    pub fn remove_pages(&self, offset: u64, len: u64) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let start = self.pointer(offset, len).cast();
        // SAFETY: the range is a part of this value's own mapping, and tests hold no references
        // into it.
        unsafe { mmap_anonymous(start, len as usize, ProtFlags::empty(), flags) }.expect("mmap");
    }

    /// Makes the pages read-only for the process.
    pub fn make_read_only(&self) {
        // SAFETY: the range is this value's own mapping, and tests hold no references into it.
        unsafe { mprotect(self.0.as_ptr().cast(), self.0.len(), MprotectFlags::READ) }
            .expect("mprotect");
    }

    fn pointer(&self, offset: u64, len: u64) -> *mut u8 {
        assert!(
            self.range().slice(offset, len).is_some(),
            "the test reaches outside its own memory"
        );
        self.0.as_ptr().wrapping_add(offset as usize)
    }
}

/// Memory under test: host pages or a device buffer.
#[derive(Debug)]
pub enum Bytes {
    /// Host pages.
    Host(HostPages),
    /// A buffer of a device.
    Device(DeviceBuffer),
}

impl Bytes {
    /// Allocates `len` bytes on a device.
    pub fn on_device(iface: &Arc<dyn Iface>, device: u32, len: usize) -> Self {
        let request = AllocRequest {
            len: len as u64,
            device: DeviceId(device),
            kind: AllocationKind::Device,
        };
        Self::Device(DeviceBuffer::allocate(iface, &request).expect("allocate device memory"))
    }

    /// Returns the addresses of the whole memory.
    pub fn range(&self) -> AddressRange {
        match self {
            Self::Host(pages) => pages.range(),
            Self::Device(buffer) => buffer.allocation().range,
        }
    }

    /// Returns the addresses of a part. Panics if the part is not inside the memory.
    pub fn part(&self, offset: u64, len: u64) -> AddressRange {
        self.range().slice(offset, len).expect("a part of the test's own memory")
    }

    /// Copies `bytes` to the memory, `offset` bytes after its start. No transfer may be in flight.
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        match self {
            Self::Host(pages) => {
                let to = pages.pointer(offset, bytes.len() as u64);
                // SAFETY: the range was just checked to be in bounds, and nothing else uses the
                // bytes while no transfer is in flight.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            }
            Self::Device(buffer) => buffer.write(offset, bytes).expect("copy to the device"),
        }
    }

    /// Returns `len` bytes, `offset` bytes after the start. No transfer may be in flight.
    pub fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        match self {
            Self::Host(pages) => {
                // SAFETY: the range is in bounds, and nothing writes the bytes while no transfer is
                // in flight.
                unsafe { slice::from_raw_parts(pages.pointer(offset, len as u64), len) }.to_vec()
            }
            Self::Device(buffer) => {
                let mut bytes = vec![0; len];
                buffer.read(offset, &mut bytes).expect("copy from the device");
                bytes
            }
        }
    }

    /// Returns all bytes. No transfer may be in flight.
    pub fn all(&self) -> Vec<u8> {
        self.get(0, self.range().len() as usize)
    }

    /// Returns the host pages. Panics for a device buffer.
    pub fn pages(&self) -> &HostPages {
        match self {
            Self::Host(pages) => pages,
            Self::Device(_) => panic!("only system memory has pages that a test can move"),
        }
    }
}

/// Host memory that a region owns. The test keeps the memory mapped for longer than the region.
#[derive(Debug)]
pub struct Owned(AddressRange);

impl Owned {
    /// Returns memory at these addresses.
    ///
    /// # Safety
    /// The memory must stay mapped as long as the value or a region of it lives, and no reference
    /// to it may exist.
    pub(crate) unsafe fn new(range: AddressRange) -> Self {
        Self(range)
    }
}

// SAFETY: the caller of `new` keeps the memory mapped and without references.
unsafe impl Memory for Owned {
    type Parts = AddressRange;

    fn into_parts(self) -> AddressRange {
        self.0
    }

    fn from_parts(parts: AddressRange) -> Self {
        Self(parts)
    }

    fn place(parts: &AddressRange) -> Place<'_> {
        Place::Host { range: *parts, writable: true }
    }
}
