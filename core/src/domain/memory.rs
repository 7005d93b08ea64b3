//! Memory that regions hold: buffers that own it, and addresses under a promise ([`Raw`]).

#![allow(unsafe_code, reason = "memory by its addresses, and copies to and from it")]

use std::{
    mem::needs_drop,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr, slice,
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
};

use super::{region_state::KeepAlive, terms::Promise};
use crate::{
    Address, AddressRange, DmaBufOffset, Error, ErrorKind, Iface, IfaceExt, IfaceKind, Result,
    racing_copy,
};

/// Memory that a region can hold.
///
/// Registering splits the value into its parts, which have no Rust references to the memory.
/// Closing the region rebuilds the value from the parts.
///
/// # Safety
/// An implementation must guarantee, while the parts live:
///
/// - [`Memory::place`] always returns the same place. The place is valid memory that the parts own.
///   [`Place::Addresses`] and [`Place::DmaBuf`] need not be owned: their promise covers the memory.
/// - If NICs may write to the place, no Rust reference to the memory exists. If NICs only read it,
///   no mutable reference exists.
/// - If NICs may write to the place, any bytes are a valid value of the memory.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use hmem_core::{AddressRange, Memory, Place};
///
/// /// Bytes that never change and never move.
/// struct Constant(Arc<[u8]>);
///
/// // SAFETY: the block stays where it is while the `Arc` lives, and nobody can write to it.
/// unsafe impl Memory for Constant {
///     type Parts = Self;
///
///     fn into_parts(self) -> Self {
///         self
///     }
///
///     fn from_parts(parts: Self) -> Self {
///         parts
///     }
///
///     fn place(parts: &Self) -> Place<'_> {
///         Place::Host { range: AddressRange::of(&parts.0), writable: false }
///     }
/// }
/// ```
pub unsafe trait Memory: Sized {
    /// The parts of the memory, which have no Rust references to it. Dropping the parts releases
    /// the memory.
    type Parts: Send + Sync + 'static;

    /// Splits the memory into its parts.
    fn into_parts(self) -> Self::Parts;

    /// Rebuilds the memory from its parts.
    fn from_parts(parts: Self::Parts) -> Self;

    /// Returns the location of the memory. An empty range cannot be registered.
    fn place(parts: &Self::Parts) -> Place<'_>;
}

/// The location of memory, and the accesses that NICs may make.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Place<'p> {
    /// Host memory that the parts own.
    Host {
        /// The addresses of the memory, which is mapped readable.
        range: AddressRange,
        /// True if NICs may write, and the memory is mapped writable. If false, nobody writes to
        /// the memory.
        writable: bool,
    },
    /// Memory of a device iface that the parts own. NICs may read and write it.
    Device {
        /// The iface that copies between the memory and the host. A domain without an iface of this
        /// kind refuses to register the memory.
        iface: &'p Arc<dyn Iface>,
        /// The addresses of the memory.
        range: AddressRange,
    },
    /// Addresses of memory of any iface, which the application keeps valid under its promise.
    Addresses {
        /// The ranges of addresses, at least one.
        ranges: &'p [AddressRange],
        /// The promise of the application.
        promise: Promise,
    },
    /// A dma-buf.
    DmaBuf {
        /// The dma-buf, and the range of it that is registered.
        buffer: &'p DmaBuf,
        /// The promise of the application.
        promise: Promise,
    },
}

impl<'p> Place<'p> {
    /// Returns the promise of the application. For memory that the parts own, returns `ReadWrite`
    /// if NICs may write it, and `ReadOnly` if not.
    pub(super) fn promise(&self) -> Promise {
        match *self {
            Self::Host { writable: false, .. } => Promise::ReadOnly,
            Self::Host { .. } | Self::Device { .. } => Promise::ReadWrite,
            Self::Addresses { promise, .. } | Self::DmaBuf { promise, .. } => promise,
        }
    }

    /// Returns the length of the memory in bytes.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Host { range, .. } | Self::Device { range, .. } => range.len(),
            Self::Addresses { ranges, .. } => ranges.iter().map(|range| range.len()).sum(),
            Self::DmaBuf { buffer, .. } => buffer.len,
        }
    }

    /// Returns the range of the memory. `None` for several ranges and for a dma-buf.
    pub(super) fn range(&self) -> Option<AddressRange> {
        match *self {
            Self::Host { range, .. } | Self::Device { range, .. } => Some(range),
            Self::Addresses { ranges: [range], .. } => Some(*range),
            Self::Addresses { .. } | Self::DmaBuf { .. } => None,
        }
    }

    /// Returns the iface of memory that the parts own, or `None` for addresses and dma-bufs.
    pub(super) fn owned_iface(&self) -> Option<IfaceKind> {
        match self {
            Self::Host { .. } => Some(IfaceKind::SYSTEM),
            Self::Device { iface, .. } => Some(iface.kind()),
            Self::Addresses { .. } | Self::DmaBuf { .. } => None,
        }
    }

    /// Returns the address of the `len` bytes at `offset`. Fails for memory that the parts do not
    /// own.
    fn owned_part(&self, offset: u64, len: usize) -> Result<Address> {
        let (Self::Host { range, .. } | Self::Device { range, .. }) = *self else {
            return Err(Error::new(ErrorKind::Unsupported, "copy")
                .context("why", "the region holds addresses, not the memory")
                .remedy("copy through the owner of the memory, such as a DeviceBuffer"));
        };
        let part = range.slice(offset, len as u64).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "copy")
                .context("offset", offset)
                .context("length", len)
                .context("memory", range)
        })?;
        Ok(part.start())
    }

    /// Fills `into` with the bytes of the memory from `offset` on.
    ///
    /// # Safety
    /// The place must come from [`Memory::place`] of parts that live during the call, or from
    /// [`Borrowed::place`](super::Borrowed::place) of a value that lives during the call.
    pub(super) unsafe fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.owned_part(offset, into.len())?;
        match self {
            // SAFETY: the bytes lie in memory of the iface that the parts own, and they live during
            // the call.
            Self::Device { iface, .. } => return unsafe { iface.read(from, into) },
            Self::Host { writable: false, .. } => {
                let from = ptr::with_exposed_provenance(from.0 as usize);
                // SAFETY: the bytes lie in mapped host memory that the parts own and that nobody
                // writes.
                into.copy_from_slice(unsafe { slice::from_raw_parts(from, into.len()) });
            }
            // SAFETY: the bytes lie in mapped host memory that the parts own, and no reference to
            // them exists.
            _ => unsafe { copy_out(from, into) },
        }
        Ok(())
    }

    /// Copies `from` to the bytes of the memory from `offset` on.
    ///
    /// # Safety
    /// The condition of [`Place::read`].
    pub(super) unsafe fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.owned_part(offset, from.len())?;
        match self {
            // SAFETY: the bytes lie in memory of the iface that the parts own, and they live during
            // the call. Addresses of a device iface are no references.
            Self::Device { iface, .. } => unsafe { iface.write(to, from) },
            Self::Host { writable: false, .. } => Err(Error::new(ErrorKind::AccessDenied, "copy")
                .context("why", "the memory is read-only")
                .remedy("write to memory that the region owns, such as a Vec<u8>")),
            _ => {
                // SAFETY: the bytes lie in writable host memory that the parts own, and no
                // reference to them exists.
                unsafe { copy_in(to, from) };
                Ok(())
            }
        }
    }
}

/// Returns the guarantee that memory with these parts stays allocated.
pub(super) fn keep_alive<M: Memory>(parts: &Arc<M::Parts>) -> KeepAlive {
    let iface = M::place(parts).owned_iface();
    if iface.is_none() && !needs_drop::<M::Parts>() {
        return KeepAlive::Caller;
    }
    KeepAlive::Region { iface, memory: Arc::clone(parts) as _ }
}

/// Rebuilds memory from its parts. Fails if a registration panicked and leaked a reference to the
/// parts.
pub(super) fn take_back<M: Memory>(parts: Arc<M::Parts>) -> Result<M, (Arc<M::Parts>, Error)> {
    Arc::try_unwrap(parts).map(M::from_parts).map_err(|parts| {
        let mut error = Error::new(ErrorKind::Driver, "close region")
            .context("why", "its registration panicked, so the NIC may access the memory")
            .remedy("keep the memory allocated until the process ends");
        if let Some(range) = M::place(&parts).range() {
            error = error.context("range", range);
        }
        (parts, error)
    })
}

/// Addresses of memory that the application keeps valid: one [`AddressRange`], several ranges that
/// make up one region (`Box<[AddressRange]>`), or a [`DmaBuf`].
///
/// `Raw::new` is unsafe, and all later steps are safe: registering the memory, passing the value to
/// other code, and closing the region. A registration is refused if its rights go beyond the
/// promise.
///
/// A `Raw` does not keep the memory allocated. [`Raw::keep`] adds an owner that does.
///
/// ```no_run
/// use hmem_core::{Access, AddressRange, Domain, Promise, Raw, Result};
///
/// fn expose(domain: &Domain, mapped: AddressRange) -> Result<()> {
///     // SAFETY: the mapping lives until the process ends, and only the NIC uses it.
///     let memory = unsafe { Raw::new(mapped, Promise::ReadWrite) };
///     let region = domain.register(memory, Access::REMOTE_WRITE)?;
///     println!("{:?}", region.key()?);
///     region.close()?;
///     Ok(())
/// }
/// ```
///
/// Safe code cannot create a `Raw`:
///
/// ```compile_fail,E0133
/// use hmem_core::{AddressRange, Promise, Raw};
///
/// fn any_memory(range: AddressRange) -> Raw {
///     Raw::new(range, Promise::ReadWrite)
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Raw<A = AddressRange> {
    at: A,
    promise: Promise,
}

impl<A> Raw<A> {
    /// Creates the value for memory at `at`.
    ///
    /// # Safety
    /// The caller makes the promise. It must hold until every region, sub-region, window and grant
    /// that any code creates from this value or a copy is gone. A region is gone when it is closed,
    /// or when it was dropped and has no sub-region, window or grant any more. A registration cache
    /// keeps regions after the last lease: they are gone when the cache has evicted or invalidated
    /// them, or the domain is closed.
    pub const unsafe fn new(at: A, promise: Promise) -> Self {
        Self { at, promise }
    }

    /// Returns the addresses or the dma-buf.
    pub const fn at(&self) -> &A {
        &self.at
    }

    /// Returns the promise.
    #[must_use]
    pub const fn promise(&self) -> Promise {
        self.promise
    }

    /// Adds an owner of the memory, such as a tensor or a mapping. The region holds the owner until
    /// the region is closed, and so keeps the memory allocated.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    ///
    /// use hmem_core::{Access, AddressRange, Domain, Promise, Raw, Result};
    ///
    /// # struct Tensor;
    /// # impl Tensor { fn range(&self) -> AddressRange { unimplemented!() } }
    /// fn expose(domain: &Domain, tensor: Arc<Tensor>) -> Result<Arc<Tensor>> {
    ///     // SAFETY: the region holds the tensor, and only the NIC uses its memory meanwhile.
    ///     let memory = unsafe { Raw::new(tensor.range(), Promise::ReadWrite) }.keep(tensor);
    ///     let region = domain.register(memory, Access::REMOTE_READ)?;
    ///     // After the peer is done:
    ///     Ok(region.close()?.into_owner())
    /// }
    /// ```
    pub fn keep<O: Send + Sync + 'static>(self, owner: O) -> KeptRaw<O, A> {
        KeptRaw { raw: self, owner }
    }
}

impl Raw {
    /// Returns the addresses as a list of one range, for [`fabric`](crate::fabric).
    #[must_use]
    pub fn as_slice(&self) -> Raw<&[AddressRange]> {
        Raw { at: slice::from_ref(&self.at), promise: self.promise }
    }
}

impl Raw<Box<[AddressRange]>> {
    /// Returns the addresses as a borrowed list, for [`fabric`](crate::fabric).
    #[must_use]
    pub fn as_slice(&self) -> Raw<&[AddressRange]> {
        Raw { at: &self.at, promise: self.promise }
    }
}

/// Addresses of memory, with an owner that keeps the memory allocated. [`Raw::keep`] creates it.
#[derive(Clone, Debug)]
pub struct KeptRaw<O, A = AddressRange> {
    raw: Raw<A>,
    owner: O,
}

impl<O, A> KeptRaw<O, A> {
    /// Returns the addresses and the promise.
    #[must_use]
    pub fn raw(&self) -> &Raw<A> {
        &self.raw
    }

    /// Returns the owner by reference.
    #[must_use]
    pub fn owner(&self) -> &O {
        &self.owner
    }

    /// Returns the owner.
    #[must_use]
    pub fn into_owner(self) -> O {
        self.owner
    }
}

/// Defines the items of [`Memory`], except `place`, for a type that is its own `Parts`. Such a type
/// has no Rust reference to the memory.
macro_rules! own_parts {
    () => {
        type Parts = Self;

        fn into_parts(self) -> Self {
            self
        }

        fn from_parts(parts: Self) -> Self {
            parts
        }
    };
}
pub(super) use own_parts;

macro_rules! raw_memory {
    ($($at:ty, $raw:ident: $place:expr;)+) => {$(
        // SAFETY: the promise of `Raw::new` covers the place, which never changes.
        unsafe impl Memory for Raw<$at> {
            own_parts!();

            fn place($raw: &Self) -> Place<'_> {
                $place
            }
        }

        // SAFETY: the promise of `Raw::new` covers the place, which never changes.
        unsafe impl<O: Send + Sync + 'static> Memory for KeptRaw<O, $at> {
            own_parts!();

            fn place(kept: &Self) -> Place<'_> {
                <Raw<$at> as Memory>::place(&kept.raw)
            }
        }
    )+};
}

raw_memory! {
    AddressRange, raw: Place::Addresses { ranges: slice::from_ref(&raw.at), promise: raw.promise };
    Box<[AddressRange]>, raw: Place::Addresses { ranges: &raw.at, promise: raw.promise };
    DmaBuf, raw: Place::DmaBuf { buffer: &raw.at, promise: raw.promise };
}

/// A dma-buf to register, with the part of it that the region covers (`struct fi_mr_dmabuf`).
///
/// A region registered from a `Raw<DmaBuf>` keeps the file descriptor open.
/// [`Region::close`](super::Region::close) returns the `Raw` with the descriptor.
#[derive(Debug)]
pub struct DmaBuf {
    /// The file descriptor of the dma-buf.
    pub fd: OwnedFd,
    /// The offset of the region in the dma-buf.
    pub offset: DmaBufOffset,
    /// The length in bytes, more than 0.
    pub len: u64,
    /// The application's address of the first byte of the dma-buf. `None` means 0. In VIRT_ADDR
    /// mode, peers address the first byte of the region as `base_addr + offset`.
    pub base_addr: Option<Address>,
}

impl DmaBuf {
    /// Borrows the dma-buf.
    #[must_use]
    pub fn borrow(&self) -> BorrowedDmaBuf<'_> {
        let Self { ref fd, offset, len, base_addr } = *self;
        BorrowedDmaBuf { fd: fd.as_fd(), offset, len, base_addr }
    }
}

/// A [`DmaBuf`] with a borrowed descriptor, for [`fabric`](crate::fabric). The application may
/// close the descriptor when the registering call has returned.
#[derive(Clone, Copy, Debug)]
pub struct BorrowedDmaBuf<'a> {
    /// The file descriptor of the dma-buf.
    pub fd: BorrowedFd<'a>,
    /// The offset of the region in the dma-buf.
    pub offset: DmaBufOffset,
    /// The length in bytes, more than 0.
    pub len: u64,
    /// The application's address of the first byte of the dma-buf: see [`DmaBuf::base_addr`].
    pub base_addr: Option<Address>,
}

/// Copies bytes of host memory that a NIC may be writing.
///
/// If the region has the strict order and the call copied bytes that the NIC wrote, later reads of
/// the caller also see everything that the NIC wrote before these bytes.
///
/// # Safety
/// The `into.len()` bytes from `from` on must be host memory that stays mapped during the call. No
/// Rust reference to them may exist.
unsafe fn copy_out(from: Address, into: &mut [u8]) {
    let from = ptr::with_exposed_provenance(from.0 as usize);
    // SAFETY: the caller promises the source. The destination is borrowed by this call alone.
    unsafe { racing_copy(from, into.as_mut_ptr(), into.len()) };
    fence(Ordering::Acquire);
}

/// Copies bytes into host memory that a NIC may be reading.
///
/// # Safety
/// The `from.len()` bytes from `to` on must be writable host memory that stays mapped during the
/// call. No Rust reference to them may exist.
unsafe fn copy_in(to: Address, from: &[u8]) {
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

/// A copy of at most 8 bytes, aligned so that [`racing_copy`] can load the bytes as one atomic.
#[repr(align(8))]
struct Word([u8; 8]);
