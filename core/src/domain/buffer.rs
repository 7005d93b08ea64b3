//! Regions that own their memory, so that registering it needs no `unsafe`.

#![allow(unsafe_code, reason = "owned buffers by their addresses, and copies to and from them")]

use std::{
    fmt,
    mem::ManuallyDrop,
    ops::Deref,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use super::{DomainInner, attr::MrAttr, region::MemoryRegion, region_state::KeepAlive};
use crate::{
    Access, Address, AddressRange, Allocation, Error, ErrorKind, Iface, IfaceExt, IfaceKind,
    MrFlags, ProcessMark, Rejected, Result, iface::AllocRequest, racing_copy,
    transfer::LocalSegment,
};

/// A buffer that a region can own.
///
/// Registering splits the buffer into its parts, which are plain addresses. Closing the region
/// rebuilds the buffer from the parts.
///
/// # Safety
/// An implementation must guarantee, while the parts live:
///
/// - [`OwnedBuffer::range`] always returns the same range. The range is valid memory of the iface
///   that [`OwnedBuffer::iface`] returns, and belongs to the parts alone. Host memory is mapped
///   readable and writable.
/// - No Rust reference to the memory exists.
/// - Any bytes, which peers may write at any time, are a valid value of the buffer.
pub unsafe trait OwnedBuffer: Sized {
    /// The parts of the buffer. Dropping them frees the memory.
    type Parts: Send + Sync + 'static;

    /// Splits the buffer into its parts.
    fn into_parts(self) -> Self::Parts;

    /// Rebuilds the buffer from its parts.
    fn from_parts(parts: Self::Parts) -> Self;

    /// Returns the memory of the buffer. An empty range cannot be registered.
    fn range(parts: &Self::Parts) -> AddressRange;

    /// Returns the iface of the memory. The default is the system iface.
    ///
    /// A domain without this iface refuses to register the buffer.
    fn iface(parts: &Self::Parts) -> IfaceKind {
        let _ = parts;
        IfaceKind::SYSTEM
    }

    /// Fills `into` with the bytes of the buffer from `offset` on.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the buffer.
    /// - The error of the device that the memory belongs to.
    fn read(parts: &Self::Parts, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Copies `from` to the bytes of the buffer from `offset` on.
    ///
    /// # Errors
    /// The errors of [`OwnedBuffer::read`].
    fn write(parts: &Self::Parts, offset: u64, from: &[u8]) -> Result<()>;
}

/// Returns the reference with which a region keeps a buffer's memory allocated.
pub(super) fn keep_alive<B: OwnedBuffer>(parts: &Arc<B::Parts>) -> KeepAlive {
    KeepAlive::Region { iface: Some(B::iface(parts)), memory: Arc::clone(parts) as _ }
}

/// Copies bytes of host memory that a NIC may be writing. Later reads of the caller see writes that
/// precede the copied bytes in the order of a strictly ordered region.
///
/// # Safety
/// `into.len()` bytes from `from` on must be host memory that stays mapped during the call and that
/// no Rust reference exists to.
pub(super) unsafe fn copy_out(from: Address, into: &mut [u8]) {
    let from = ptr::with_exposed_provenance(from.0 as usize);
    // SAFETY: the caller promises the source. The destination is borrowed by this call alone.
    unsafe { racing_copy(from, into.as_mut_ptr(), into.len()) };
    fence(Ordering::Acquire);
}

/// Copies bytes into host memory that a NIC may be reading.
///
/// # Safety
/// `from.len()` bytes from `to` on must be host memory as in [`copy_out`], and writable.
pub(super) unsafe fn copy_in(to: Address, from: &[u8]) {
    let to = ptr::with_exposed_provenance_mut(to.0 as usize);
    // `racing_copy` loads a short source as an atomic, which a shared slice does not allow.
    let mut short = Word([0; 8]);
    let source = match short.0.get_mut(..from.len()) {
        Some(copy) => {
            copy.copy_from_slice(from);
            copy.as_mut_ptr().cast_const()
        }
        None => from.as_ptr(),
    };
    // SAFETY: the caller promises the destination. The source is `from`, or a local copy that may
    // be written.
    unsafe { racing_copy(source, to, from.len()) };
    fence(Ordering::Release);
}

/// The source of a short copy, aligned so that the copy is one atomic store.
#[repr(align(8))]
struct Word([u8; 8]);

/// The parts of a `Vec<u8>`: pointer, length and capacity. Dropping them frees the memory.
#[derive(Debug)]
pub struct VecParts {
    pointer: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the parts own their heap block exclusively and hand out no references into it.
unsafe impl Send for VecParts {}
// SAFETY: through a shared reference the block is only accessed by `racing_copy`, which allows
// racing copies.
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
        // SAFETY: the three fields came from one Vec in `new`, and `ManuallyDrop` keeps the block
        // from being freed twice.
        unsafe { Vec::from_raw_parts(parts.pointer.as_ptr(), parts.len, parts.capacity) }
    }

    fn address(&self) -> Address {
        Address::of_ptr(self.pointer.as_ptr())
    }
}

impl Drop for VecParts {
    fn drop(&mut self) {
        // SAFETY: the three fields came from one Vec in `new`, and `into_vec` does not run this
        // drop.
        drop(unsafe { Vec::from_raw_parts(self.pointer.as_ptr(), self.len, self.capacity) });
    }
}

/// Returns the address at `offset` in `range`. Fails if the `len` bytes from there are not all in
/// `range`.
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
                AddressRange::new(parts.address(), parts.len as u64)
                    .unwrap_or_else(|_| AddressRange::of::<u8>(&[]))
            }

            fn read(parts: &VecParts, offset: u64, into: &mut [u8]) -> Result<()> {
                let from = part(Self::range(parts), offset, into.len())?;
                // SAFETY: `part` checked that the bytes lie in the heap block of the parts, which
                // own it and to which they make no reference.
                unsafe { copy_out(from, into) };
                Ok(())
            }

            fn write(parts: &VecParts, offset: u64, from: &[u8]) -> Result<()> {
                let to = part(Self::range(parts), offset, from.len())?;
                // SAFETY: `part` checked that the bytes lie in the heap block of the parts, which
                // own it and to which they make no reference.
                unsafe { copy_in(to, from) };
                Ok(())
            }
        }
    )+};
}

heap_buffer! {
    Vec<u8>: std::convert::identity, std::convert::identity;
    Box<[u8]>: <[u8]>::into_vec, Vec::into_boxed_slice;
}

/// Memory allocated from an iface. Dropping the value frees the memory. Dropping a forked child's
/// copy frees nothing.
pub struct DeviceBuffer {
    iface: Arc<dyn Iface>,
    allocation: Allocation,
    /// The process that allocated the memory. A forked child must not free the memory.
    process: ProcessMark,
}

impl DeviceBuffer {
    /// Allocates memory from an iface.
    ///
    /// # Errors
    /// - [`ErrorKind::ZeroLength`] for a request of no bytes.
    /// - The errors of [`IfaceExt::allocate`] and of [`ProcessMark::current`].
    pub fn allocate(iface: &Arc<dyn Iface>, request: &AllocRequest) -> Result<Self> {
        if request.len == 0 {
            return Err(Error::new(ErrorKind::ZeroLength, "allocate").iface(iface));
        }
        let process = ProcessMark::current()?;
        let allocation = iface.allocate(request)?;
        Ok(Self { iface: Arc::clone(iface), allocation, process })
    }

    /// Returns the iface's description of the allocation.
    #[must_use]
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }

    /// Returns the range of the memory. Its length may exceed the length of the request.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        self.allocation.range
    }

    /// Returns the iface that allocated the memory.
    #[must_use]
    pub fn iface(&self) -> &Arc<dyn Iface> {
        &self.iface
    }

    fn slice(&self, offset: u64, len: u64) -> Result<AddressRange> {
        self.allocation.range.slice(offset, len).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .iface(&self.iface)
                .context("offset", offset)
                .context("length", len)
                .context("allocation", self.allocation.range)
        })
    }

    /// Fills `into` with the bytes of the memory from `offset` on.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the allocation.
    /// - The error that the device reported.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.slice(offset, into.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes.
        unsafe { self.iface.read(from, into) }
    }

    /// Copies `from` to the bytes of the memory from `offset` on.
    ///
    /// # Errors
    /// The errors of [`DeviceBuffer::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.slice(offset, from.len() as u64)?.start();
        // SAFETY: the allocation is freed when `self` is dropped, which the borrow excludes. No
        // reference to the memory exists: `Allocator::allocate` guarantees that there is none, and
        // `self` creates none.
        unsafe { self.iface.write(to, from) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The driver's state and the iface's locks belong to the parent.
            return;
        }
        // SAFETY: the buffer owns the allocation and has handed out no references into it.
        if let Err(error) = unsafe { self.iface.free(&self.allocation) } {
            tracing::error!(%error, "cannot free device memory");
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

// SAFETY: the allocation stays where it is until the drop frees it. No references into it exist,
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

// SAFETY: the allocation stays where it is until the last reference is dropped. Every owner of the
// `Arc` accesses it only through `DeviceBuffer::read` and `DeviceBuffer::write`, where the iface
// copies.
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

/// A part of a registered region, for the safe transfers of an [`Endpoint`](super::Endpoint). The
/// memory stays allocated until the region is closed: the region owns the memory, a scope borrows
/// the memory, or the caller of an unsafe function guarantees this.
///
/// A slice may outlive its region. The provider refuses the slice's descriptor once the region is
/// closed.
#[derive(Clone, Copy, Debug)]
pub struct RegionSlice {
    segment: LocalSegment,
    access: Access,
}

impl RegionSlice {
    pub(super) fn of(region: &MemoryRegion, offset: u64, len: u64) -> Result<Self> {
        Self::within(region, region.range(), offset, len)
    }

    /// Returns a slice of the region: `len` bytes, beginning `offset` bytes after the start of
    /// `within`. The range `within` must be a part of the region.
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
                .remedy("pass an offset and a length inside the region")
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

/// A region that owns its buffer.
///
/// Access the bytes through [`OwnedRegion::read`] and [`OwnedRegion::write`], which copy. There is
/// no way to borrow the bytes, because the NIC may write them at any time. Derefs to the
/// [`MemoryRegion`].
///
/// If sub-regions or windows still use the memory when this is dropped, the last of them frees the
/// memory.
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
            let error = Error::new(ErrorKind::InvalidArgument, call)
                .remedy("use MemoryRegion::sub for sub-regions, and Domain::regattr for dma-bufs");
            return Err(Rejected::new(buffer, error));
        }
        let parts = Arc::new(buffer.into_parts());
        let range = [B::range(&parts)];
        let attr = MrAttr { ranges: &range, ..*attr };
        match domain.register(&attr, flags, keep_alive::<B>(&parts)) {
            Ok(region) => Ok(Self { region, parts }),
            Err(error) => {
                let parts = Arc::into_inner(parts).expect("no region refers to the parts");
                Err(Rejected::new(B::from_parts(parts), error.of_call(call)))
            }
        }
    }

    /// Returns a part of the region for the safe transfers of an endpoint.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the part reaches outside the region.
    /// - [`ErrorKind::BadState`] before the registration completed, or after it failed.
    pub fn slice(&self, offset: u64, len: u64) -> Result<RegionSlice> {
        RegionSlice::of(&self.region, offset, len)
    }

    /// Fills `into` with the bytes of the buffer from `offset` on.
    ///
    /// All bytes of a completed transfer are visible. Bytes that the NIC is writing during the call
    /// are read old or new, each independently.
    ///
    /// # Errors
    /// - [`ErrorKind::OutOfBounds`] if the bytes are not all in the buffer.
    /// - The error of the device that the memory belongs to.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        B::read(&self.parts, offset, into)
    }

    /// Copies `from` to the bytes of the buffer from `offset` on.
    ///
    /// # Errors
    /// The errors of [`OwnedRegion::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        B::write(&self.parts, offset, from)
    }

    /// Closes the region and returns the buffer.
    ///
    /// # Errors
    /// - The errors of [`MemoryRegion::close`]. The error returns the region, which still works.
    /// - [`ErrorKind::Driver`] if an asynchronous registration panicked. The buffer is lost,
    ///   because the NIC may still access it.
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

/// Rebuilds a buffer from its parts. Fails if a region still refers to the parts.
pub(super) fn take_back<B: OwnedBuffer>(parts: Arc<B::Parts>) -> Result<B, (Arc<B::Parts>, Error)> {
    Arc::try_unwrap(parts).map(B::from_parts).map_err(|parts| {
        let error = Error::new(ErrorKind::Driver, "close region")
            .context("range", B::range(&parts))
            .context("why", "its registration panicked, so the NIC may access the memory")
            .remedy("keep the memory allocated until the process ends");
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
