//! Memory under test: host pages with a mapping that the test controls, or a device buffer.

use std::{ptr, slice, sync::Arc};

use hmem::{
    Address, AddressRange, AllocationKind, DeviceBuffer, DeviceId, Iface, IfaceExt, Mapping,
    Result, iface::AllocRequest,
};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Anonymous pages, unmapped on drop.
#[derive(Debug)]
pub(crate) struct HostPages(Mapping);

impl HostPages {
    pub(crate) fn new(len: usize) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        Self(Mapping::anonymous(len, access, MapFlags::PRIVATE).expect("mmap"))
    }

    /// Reserves addresses without access and without pages.
    pub(crate) fn reserved(len: usize) -> Self {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        Self(Mapping::anonymous(len, ProtFlags::empty(), flags).expect("mmap"))
    }

    pub(crate) fn range(&self) -> AddressRange {
        self.0.range()
    }

    /// Removes pages and access but keeps the addresses reserved.
    pub(crate) fn remove_pages(&self) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is this value's own mapping, and tests hold no references into it.
        unsafe { mmap_anonymous(self.0.as_ptr().cast(), self.0.len(), ProtFlags::empty(), flags) }
            .expect("mmap");
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
pub(crate) enum Bytes {
    Host(HostPages),
    Device(DeviceBuffer),
}

impl Bytes {
    pub(crate) fn on_device(iface: &Arc<dyn Iface>, device: u32, len: usize) -> Self {
        let request = AllocRequest {
            len: len as u64,
            device: DeviceId(device),
            kind: AllocationKind::Device,
        };
        Self::Device(DeviceBuffer::allocate(iface, &request).expect("allocate device memory"))
    }

    pub(crate) fn range(&self) -> AddressRange {
        match self {
            Self::Host(pages) => pages.range(),
            Self::Device(buffer) => buffer.allocation().range,
        }
    }

    pub(crate) fn part(&self, offset: u64, len: u64) -> AddressRange {
        self.range().slice(offset, len).expect("a part of the test's own memory")
    }

    pub(crate) fn put(&self, offset: u64, bytes: &[u8]) {
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

    pub(crate) fn get(&self, offset: u64, len: usize) -> Vec<u8> {
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

    pub(crate) fn all(&self) -> Vec<u8> {
        self.get(0, self.range().len() as usize)
    }

    /// Returns the host pages. Panics for a device buffer.
    pub(crate) fn pages(&self) -> &HostPages {
        match self {
            Self::Host(pages) => pages,
            Self::Device(_) => panic!("only system memory has pages that a test can move"),
        }
    }
}

/// Returns bytes other than 0 that depend on their position and on the seed. The pattern repeats
/// after a prime number of bytes, so that no page, chunk or word equals its neighbour.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let block: Vec<_> = (0..257).map(|at| ((at * 31 + seed * 97) % 251 + 1) as u8).collect();
    let mut bytes = block.repeat(len / block.len() + 1);
    bytes.truncate(len);
    bytes
}

/// Safe wrappers of the unsafe copies by address. No test frees memory during a copy of it.
pub(crate) trait HeldCopies: Iface {
    fn read_bytes(&self, from: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call.
        unsafe { IfaceExt::read(self, from, into) }
    }

    fn write_bytes(&self, to: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the test keeps the memory for the length of the call, and no reference to it
        // exists.
        unsafe { IfaceExt::write(self, to, from) }
    }
}

impl<I: Iface + ?Sized> HeldCopies for I {}
