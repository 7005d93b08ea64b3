//! Regions that own their memory, which are registered without `unsafe`.

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::Deref,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use super::{DomainInner, attr::MrAttr, region::MemoryRegion, region_state::KeepAlive};
use crate::{
    Access, Address, AddressRange, Allocation, Error, ErrorKind, Iface, IfaceExt, IfaceKind,
    MrFlags, Rejected, Result, iface::AllocRequest, transfer::LocalSegment,
};

/// A buffer that a region can own.
///
/// # Safety
/// An implementation promises, for as long as the parts live:
///
/// - The range that [`OwnedBuffer::range`] returns is the same each time. It is valid memory of the
///   iface that [`OwnedBuffer::iface`] names, and belongs to the parts alone. Host memory is mapped
///   readable and writable.
/// - No Rust reference to the memory exists: the parts are plain addresses.
/// - Any bytes in the memory are a valid value of the buffer, which peers may have written.
pub unsafe trait OwnedBuffer: Sized {
    /// The buffer taken apart. Dropping the parts frees the memory.
    type Parts: Send + Sync + 'static;

    /// Takes the buffer apart.
    fn into_parts(self) -> Self::Parts;

    /// Puts it together again.
    fn from_parts(parts: Self::Parts) -> Self;

    /// The memory. May be empty; registering it is then refused.
    fn range(parts: &Self::Parts) -> AddressRange;

    /// Returns the iface of the memory: the system's, unless an implementation says otherwise. A
    /// domain that does not have this iface refuses to register the buffer.
    fn iface(parts: &Self::Parts) -> IfaceKind {
        let _ = parts;
        IfaceKind::SYSTEM
    }

    /// Copies bytes out, from `offset` bytes in.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    fn read(parts: &Self::Parts, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Copies bytes in, from `offset` bytes in.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    fn write(parts: &Self::Parts, offset: u64, from: &[u8]) -> Result<()>;
}

/// Keeps a buffer's memory allocated for as long as a region is registered.
pub(super) fn keep_alive<B: OwnedBuffer>(parts: &Arc<B::Parts>) -> KeepAlive {
    KeepAlive::Region { iface: Some(B::iface(parts)), memory: Arc::clone(parts) as _ }
}

/// Copies host bytes that a NIC may be writing. Byte-wise atomics make a race a mixture of old and
/// new bytes instead of undefined behaviour.
pub(super) fn copy_out(from: Address, into: &mut [u8]) {
    for (at, byte) in into.iter_mut().enumerate() {
        *byte = cell(from, at).load(Ordering::Relaxed);
    }
    std::sync::atomic::fence(Ordering::Acquire);
}

/// The other way.
pub(super) fn copy_in(to: Address, from: &[u8]) {
    for (at, byte) in from.iter().enumerate() {
        cell(to, at).store(*byte, Ordering::Relaxed);
    }
    std::sync::atomic::fence(Ordering::Release);
}

fn cell<'a>(base: Address, at: usize) -> &'a AtomicU8 {
    // SAFETY: callers pass addresses inside memory that a region owns (or borrows for a scope) as
    // host memory, checked to be in bounds; nobody holds a non-atomic reference to it
    // meanwhile.
    unsafe { AtomicU8::from_ptr((base.0 as usize + at) as *mut u8) }
}

/// A `Vec<u8>` taken apart: pointer, length and capacity, freed on drop.
#[derive(Debug)]
pub struct VecParts {
    pointer: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts own their heap block exclusively and hand out no references into it.
unsafe impl Send for VecParts {}
// SAFETY: through a shared reference the block is only accessed by byte-wise atomics.
unsafe impl Sync for VecParts {}

impl VecParts {
    fn new(vec: Vec<u8>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let (len, capacity) = (vec.len(), vec.capacity());
        // SAFETY: a Vec's pointer is never null.
        let pointer = unsafe { NonNull::new_unchecked(vec.as_mut_ptr()) };
        Self { pointer, len, capacity }
    }

    fn into_vec(self) -> Vec<u8> {
        let parts = ManuallyDrop::new(self);
        // SAFETY: the three came from one Vec in `new`, and `ManuallyDrop` keeps the block from
        // being freed twice.
        unsafe { Vec::from_raw_parts(parts.pointer.as_ptr(), parts.len, parts.capacity) }
    }

    fn address(&self) -> Address {
        Address::of_ptr(self.pointer.as_ptr())
    }
}

impl Drop for VecParts {
    fn drop(&mut self) {
        // SAFETY: the three came from one Vec in `new`; `into_vec` does not run this drop.
        drop(unsafe { Vec::from_raw_parts(self.pointer.as_ptr(), self.len, self.capacity) });
    }
}

/// The address of a part of a buffer that lies inside it.
fn part(range: AddressRange, offset: u64, len: usize) -> Result<Address> {
    let part = range.slice(offset, len as u64).ok_or_else(|| {
        Error::new(ErrorKind::OutOfBounds, "copy")
            .context("offset", offset)
            .context("length", len)
            .context("buffer", range)
    })?;
    Ok(part.start())
}

macro_rules! heap_buffer {
    ($($buffer:ty: $into:expr, $from:expr;)+) => {$(
        // SAFETY: the heap block stays where it is until the parts are dropped, and `VecParts`
        // holds it as a raw pointer.
        unsafe impl OwnedBuffer for $buffer {
            type Parts = VecParts;

            fn into_parts(self) -> VecParts {
                VecParts::new($into(self))
            }

            fn from_parts(parts: VecParts) -> Self {
                $from(parts.into_vec())
            }

            fn range(parts: &VecParts) -> AddressRange {
                AddressRange::new(parts.address(), parts.len as u64).unwrap_or_else(|_| AddressRange::of::<u8>(&[]))
            }

            fn read(parts: &VecParts, offset: u64, into: &mut [u8]) -> Result<()> {
                copy_out(part(Self::range(parts), offset, into.len())?, into);
                Ok(())
            }

            fn write(parts: &VecParts, offset: u64, from: &[u8]) -> Result<()> {
                copy_in(part(Self::range(parts), offset, from.len())?, from);
                Ok(())
            }
        }
    )+};
}

heap_buffer! {
    Vec<u8>: std::convert::identity, std::convert::identity;
    Box<[u8]>: <[u8]>::into_vec, Vec::into_boxed_slice;
}

/// Memory allocated from any iface, freed on drop.
pub struct DeviceBuffer {
    iface: Arc<dyn Iface>,
    allocation: Allocation,
}

impl DeviceBuffer {
    /// Allocates.
    ///
    /// # Errors
    /// As [`Allocator::allocate`](crate::iface::Allocator::allocate), and
    /// [`ErrorKind::ZeroLength`].
    pub fn allocate(iface: &Arc<dyn Iface>, request: &AllocRequest) -> Result<Self> {
        if request.len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "allocate").iface(iface.kind()));
        }
        let allocation = iface.allocate(request)?;
        Ok(Self { iface: Arc::clone(iface), allocation })
    }

    /// Returns the allocation.
    #[must_use]
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// The iface that it is from.
    #[must_use]
    pub fn iface(&self) -> &Arc<dyn Iface> {
        &self.iface
    }

    fn slice(&self, offset: u64, len: u64) -> Result<AddressRange> {
        self.allocation.range.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(self.iface.kind())
                .context("offset", offset)
                .context("length", len)
                .context("allocation", self.allocation.range)
        })
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.slice(offset, into.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes.
        unsafe { self.iface.read(from, into) }
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.slice(offset, from.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes. No
        // reference to it exists, as `Allocator::allocate` promises and as `self` gives out none.
        unsafe { self.iface.write(to, from) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: the buffer owns the allocation and hands out no references into it.
        if let Err(error) = unsafe { self.iface.free(&self.allocation) } {
            tracing::error!(%error, "device memory could not be freed");
        }
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceBuffer")
            .field("iface", &self.iface.name())
            .field("allocation", &self.allocation)
            .finish()
    }
}

// SAFETY: the allocation stays where it is until it is freed on drop; no references into it exist,
// since addresses of an iface are not pointers.
unsafe impl OwnedBuffer for DeviceBuffer {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn range(parts: &Self) -> AddressRange {
        parts.allocation.range
    }

    fn iface(parts: &Self) -> IfaceKind {
        parts.iface.kind()
    }

    fn read(parts: &Self, offset: u64, into: &mut [u8]) -> Result<()> {
        parts.read(offset, into)
    }

    fn write(parts: &Self, offset: u64, from: &[u8]) -> Result<()> {
        parts.write(offset, from)
    }
}

// SAFETY: as for `DeviceBuffer`. Others that share it reach the memory through its copies alone,
// which are copies of the iface.
unsafe impl OwnedBuffer for Arc<DeviceBuffer> {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn range(parts: &Self) -> AddressRange {
        parts.allocation.range
    }

    fn iface(parts: &Self) -> IfaceKind {
        parts.iface.kind()
    }

    fn read(parts: &Self, offset: u64, into: &mut [u8]) -> Result<()> {
        DeviceBuffer::read(parts, offset, into)
    }

    fn write(parts: &Self, offset: u64, from: &[u8]) -> Result<()> {
        DeviceBuffer::write(parts, offset, from)
    }
}

/// A piece of a region that owns its memory: what the safe transfers of an
/// [`Endpoint`](super::Endpoint) take.
///
/// It may outlive the region: the descriptor in it is refused once the region is closed.
#[derive(Clone, Copy, Debug)]
pub struct RegionSlice {
    segment: LocalSegment,
    access: Access,
}

impl RegionSlice {
    pub(super) fn of(region: &MemoryRegion, offset: u64, len: u64) -> Result<Self> {
        Self::within(region, region.range(), offset, len)
    }

    /// Returns a piece of the part `within` of a region.
    pub(super) fn within(
        region: &MemoryRegion,
        within: AddressRange,
        offset: u64,
        len: u64,
    ) -> Result<Self> {
        let range = within.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "slice")
                .context("offset", offset)
                .context("length", len)
                .context("region", within)
        })?;
        let segment = LocalSegment { address: range.start(), len, desc: Some(region.desc()?) };
        Ok(Self { segment, access: region.access() })
    }

    #[inline]
    pub(super) fn segment(self) -> LocalSegment {
        self.segment
    }

    pub(super) fn address(self) -> Address {
        self.segment.address
    }

    pub(super) fn access(self) -> Access {
        self.access
    }
}

/// A region together with the buffer that it owns.
///
/// The bytes are reached by copies: no slice is handed out while a NIC may write to them. Derefs to
/// the region.
///
/// If a sub-region or a window still needs the memory when this is dropped, the last of them frees
/// it.
pub struct OwnedRegion<B: OwnedBuffer> {
    region: MemoryRegion,
    parts: Arc<B::Parts>,
}

impl<B: OwnedBuffer> OwnedRegion<B> {
    pub(super) fn register(
        domain: &Arc<DomainInner>,
        buffer: B,
        attr: &MrAttr<'_>,
        flags: MrFlags,
        call: &'static str,
    ) -> Result<Self, Rejected<B>> {
        if attr.base.is_some() || attr.dma_buf.is_some() {
            let error = Error::new(ErrorKind::InvalidArgument, call).remedy(
                "a buffer is registered on its own: use regattr for sub-regions and dma-bufs",
            );
            return Err(Rejected::new(buffer, error));
        }
        let parts = Arc::new(buffer.into_parts());
        let range = [B::range(&parts)];
        let attr = MrAttr { ranges: &range, ..*attr };
        match domain.register(&attr, flags, keep_alive::<B>(&parts)) {
            Ok(region) => Ok(Self { region, parts }),
            Err(error) => {
                let parts = Arc::into_inner(parts).expect("a region that failed lets go of them");
                Err(Rejected::new(B::from_parts(parts), error.of_call(call)))
            }
        }
    }

    /// A piece for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if it reaches outside; [`ErrorKind::BadState`] before the
    /// registration completed.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::of(&self.region, offset, len)
    }

    /// Copies bytes out. Bytes that the NIC writes meanwhile come out in any mixture; those of a
    /// completed transfer are all there.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        B::read(&self.parts, offset, into)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`]; what the device reported otherwise.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        B::write(&self.parts, offset, from)
    }

    /// Closes the region and gives the buffer back.
    ///
    /// # Errors
    /// As [`MemoryRegion::close`]; the region comes back, still working. [`ErrorKind::Driver`] if
    /// an asynchronous registration panicked: the buffer is not given back, since a NIC may reach
    /// it.
    pub fn close(self) -> Result<B, Rejected<Self>> {
        if let Err(error) = self.region.inner().close() {
            return Err(Rejected::new(self, error));
        }
        drop(self.region.inner().release());
        let Self { region, parts } = self;
        match take_back(parts) {
            Ok(buffer) => Ok(buffer),
            Err((parts, error)) => Err(Rejected::new(Self { region, parts }, error)),
        }
    }
}

/// Reassembles a buffer after its regions have released its parts.
pub(super) fn take_back<B: OwnedBuffer>(parts: Arc<B::Parts>) -> Result<B, (Arc<B::Parts>, Error)> {
    Arc::try_unwrap(parts).map(B::from_parts).map_err(|parts| {
        let error = Error::new(ErrorKind::Driver, "close region")
            .context("range", B::range(&parts))
            .context("why", "its registration panicked, so the NIC may reach the memory")
            .remedy("leave the memory alone until the process ends");
        (parts, error)
    })
}

impl<B: OwnedBuffer> Deref for OwnedRegion<B> {
    type Target = MemoryRegion;

    fn deref(&self) -> &MemoryRegion {
        &self.region
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedRegion<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedRegion").field(&self.region).finish()
    }
}
