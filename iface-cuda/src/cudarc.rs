//! Slices of the [`cudarc`] crate as registered buffers (cargo feature `cudarc`).
//!
//! A region owns a [`CudaSlice`] by [`CudarcBuffer`] until the region is closed, or borrows it for
//! a closure by [`scope`]. The application chooses the CUDA version for which `cudarc` is built, by
//! a `cuda-*` feature of its own dependency or the environment variable `CUDARC_CUDA_VERSION`. This
//! crate chooses no version, because one build of `cudarc` cannot have two versions. `cudarc` finds
//! and loads the driver library by itself.
//!
//! By default `cudarc` allocates stream-ordered memory, which the driver may not export to a NIC.
//! The region's decision then has the path `Staged`, with the reason.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use cudarc::driver::CudaContext;
//! use hmem_core::{Access, Domain, Iface};
//! use hmem_iface_cuda::cudarc::CudarcBuffer;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # fn domain() -> Domain { unimplemented!() }
//! # fn iface() -> Arc<dyn Iface> { unimplemented!() }
//! let stream = CudaContext::new(0)?.default_stream();
//! let slice = stream.alloc_zeros::<f32>(1024)?;
//! let buffer = CudarcBuffer::new(&iface(), slice)?;
//! let region = domain().register(buffer, Access::REMOTE_WRITE)?;
//! // ... a peer writes ...
//! let slice = region.close()?.into_slice();
//! # Ok(())
//! # }
//! ```

#![allow(unsafe_code, reason = "slices of cudarc as owned buffers")]

use std::{fmt, sync::Arc};

use cudarc::driver::{CudaSlice, DevicePtr};
use hmem_core::{
    Access, Address, AddressRange, AnyBits, Domain, Error, ErrorKind, Iface, IfaceKind, Memory,
    Place, Promise, Raw, Rejected, Result, Scoped,
};

use crate::{
    error::{CUDA, refused},
    sys::CuResult,
};

/// A slice of `cudarc` that a region can own.
pub struct CudarcBuffer<T: AnyBits> {
    slice: CudaSlice<T>,
    range: AddressRange,
    iface: Arc<dyn Iface>,
}

impl<T: AnyBits> CudarcBuffer<T> {
    /// Wraps a slice for registration. Waits for earlier work on the slice's stream, so that a NIC
    /// reads the result of that work.
    ///
    /// `iface` copies between the slice and the host. Its kind must be [`IfaceKind::CUDA`].
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if `iface` is not of the kind [`IfaceKind::CUDA`].
    /// - [`ErrorKind::OutOfBounds`] if the driver of `iface` does not know the memory.
    /// - Otherwise the driver's error.
    ///
    /// The error holds the slice.
    pub fn new(
        iface: &Arc<dyn Iface>,
        slice: CudaSlice<T>,
    ) -> Result<Self, Rejected<CudaSlice<T>>> {
        match ready(&**iface, &slice) {
            Ok(range) => Ok(Self { slice, range, iface: Arc::clone(iface) }),
            Err(error) => Err(Rejected::new(slice, error)),
        }
    }

    /// Returns a reference to the wrapped slice.
    #[must_use]
    pub fn slice(&self) -> &CudaSlice<T> {
        &self.slice
    }

    /// Consumes the buffer and returns the slice.
    #[must_use]
    pub fn into_slice(self) -> CudaSlice<T> {
        self.slice
    }
}

impl<T: AnyBits> fmt::Debug for CudarcBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudarcBuffer").field("range", &self.range).finish_non_exhaustive()
    }
}

// SAFETY: the slice owns its memory, which does not move until the slice is dropped. `ready`
// checked that it is memory of the CUDA iface. A `CudaSlice` is not a reference to the memory:
// device memory is accessed by addresses. Any bytes are valid elements, as `AnyBits` says.
unsafe impl<T: AnyBits> Memory for CudarcBuffer<T> {
    type Parts = Self;

    fn into_parts(self) -> Self {
        self
    }

    fn from_parts(parts: Self) -> Self {
        parts
    }

    fn place(parts: &Self) -> Place<'_> {
        Place::Device { iface: &parts.iface, range: parts.range }
    }
}

/// Registers a borrowed slice while `body` runs. The region is closed before this function returns,
/// also if `body` panics.
///
/// # Errors
/// The errors of [`Domain::scope`] and [`CudarcBuffer::new`]. After an error `body` has not run.
pub fn scope<T: AnyBits, R>(
    domain: &Domain,
    iface: &Arc<dyn Iface>,
    slice: &mut CudaSlice<T>,
    access: Access,
    body: impl FnOnce(&Scoped<'_>) -> R,
) -> Result<R> {
    let range = ready(&**iface, slice)?;
    // SAFETY: the slice is borrowed exclusively for the length of the call, so that its memory
    // stays, and no other code gets it. No reference to device memory exists.
    let memory = unsafe { Raw::new(range, Promise::ReadWrite) };
    domain.scope(memory, access, body)
}

/// Waits for the slice's stream, and returns the slice's range if the iface knows its memory.
fn ready<T>(iface: &dyn Iface, slice: &CudaSlice<T>) -> Result<AddressRange> {
    const OPERATION: &str = "register CudaSlice";
    if iface.kind() != IfaceKind::CUDA {
        return Err(Error::new(ErrorKind::InvalidArgument, OPERATION)
            .iface(iface.kind())
            .remedy("pass the CUDA iface: Hmem::iface(IfaceKind::CUDA)"));
    }
    let (pointer, recorded) = slice.device_ptr(slice.stream());
    drop(recorded);
    slice.stream().synchronize().map_err(|error| {
        let code = error.0 as u32;
        refused(CuResult(code), "cuStreamSynchronize").context("through", "cudarc")
    })?;
    let range = AddressRange::new(Address(pointer), slice.num_bytes() as u64)?;
    let known = iface
        .query(range.start())?
        .is_some_and(|allocation| allocation.range.contains_range(range));
    if known || range.is_empty() {
        return Ok(range);
    }
    Err(CUDA
        .error(ErrorKind::OutOfBounds, OPERATION)
        .context("range", range)
        .remedy("cudarc and this iface use different driver libraries: name one for both"))
}
