//! Keys for work requests of other code.

#![allow(unsafe_code, reason = "shares a pointer that only other code uses")]

use std::{any::Any, ffi::c_void, marker::PhantomData};

use hmem_core::{AddressRange, Error, ErrorKind, MemoryRegion, Result};

use super::{domain::VerbsDomain, region::RegionPart};

/// One registration of a region with its keys, for work requests of other code in the same
/// protection domain (requirement VRB-04).
///
/// The borrow keeps the region from being closed while the keys are in use.
///
/// ```no_run
/// use hmem_core::{MemoryRegion, Result};
/// use hmem_provider_verbs::VerbsMr;
///
/// fn segment(region: &MemoryRegion) -> Result<(u64, u64, u32)> {
///     let mr = VerbsMr::of(region)?;
///     Ok((mr.base, mr.range.len(), mr.lkey))
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct VerbsMr<'r> {
    /// The registered range, in addresses of the application.
    pub range: AddressRange,
    /// The address by which work requests name the first byte: the application's address, that of
    /// [`Settings::iova`](super::Settings::iova), or 0 with ZERO_BASED.
    pub base: u64,
    /// The lkey, for local segments of work requests.
    pub lkey: u32,
    /// The rkey, for requests of peers.
    pub rkey: u32,
    mr: *mut c_void,
    region: PhantomData<&'r MemoryRegion>,
}

// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and this type only returns the
// pointer.
unsafe impl Send for VerbsMr<'_> {}
// SAFETY: any thread may use libibverbs objects (ibverbs(7)), and this type only returns the
// pointer.
unsafe impl Sync for VerbsMr<'_> {}

impl<'r> VerbsMr<'r> {
    /// Returns the only registration of a region.
    ///
    /// # Errors
    /// - Unsupported: the region has several registrations, or none because it is staged. Use
    ///   [`VerbsMr::all_of`].
    /// - The errors of [`VerbsMr::all_of`].
    pub fn of(region: &'r MemoryRegion) -> Result<Self> {
        let all = Self::all_of(region)?;
        match &all[..] {
            [mr] => Ok(*mr),
            _ => Err(Error::new(ErrorKind::Unsupported, "keys")
                .provider("verbs")
                .context("range", region.range())
                .context("registrations", all.len())
                .remedy(
                    "use VerbsMr::all_of: the region has another number of registrations than one",
                )),
        }
    }

    /// Returns the registrations of a region, in the order of its bytes. A staged region has none.
    ///
    /// # Errors
    /// - InvalidArgument: the region belongs to another provider.
    /// - BadState: the registration has not completed, or failed.
    /// - Busy: another thread is changing the region's rights ([`VerbsDomain::rereg`]).
    pub fn all_of(region: &'r MemoryRegion) -> Result<Vec<Self>> {
        let domain: &dyn Any = region.provider_domain();
        let Some(domain) = domain.downcast_ref::<VerbsDomain>() else {
            return Err(Error::new(ErrorKind::InvalidArgument, "keys")
                .provider("verbs")
                .context("range", region.range())
                .remedy("pass a region of a verbs domain"));
        };
        let of = |part: &RegionPart| Self {
            range: part.key.range,
            base: part.key.base,
            lkey: part.key.lkey,
            rkey: part.key.rkey,
            mr: part.mr.cast(),
            region: PhantomData,
        };
        let regions = &domain.state.regions;
        regions
            .with(region.provider_region()?, "keys", |held| Ok(held.parts.iter().map(of).collect()))
    }

    /// Returns the `ibv_mr`, for verbs calls of other code (such as those for indirect memory
    /// keys). The pointer is valid while the region is open. Other code must not deregister it.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.mr
    }
}
