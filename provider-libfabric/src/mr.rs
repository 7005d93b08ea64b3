//! Keys and descriptors for requests of other code.

use std::{any::Any, ffi::c_void};

use hmem_core::{AddressRange, Error, ErrorKind, MemoryRegion, RawKey, Result};

use super::{domain::FabricDomain, region::Part};

/// One registration of a region, for requests of other code in the same libfabric domain
/// (requirement FAB-11).
///
/// The borrow keeps the region from being closed while the key is in use.
///
/// ```no_run
/// use std::ffi::c_void;
///
/// use hmem_core::{MemoryRegion, Result};
/// use hmem_provider_libfabric::FabricMr;
///
/// /// Returns the arguments of `fi_write` for the source of the bytes.
/// fn source(region: &MemoryRegion) -> Result<(u64, u64, *mut c_void)> {
///     let mr = FabricMr::of(region)?;
///     Ok((mr.range.start().0, mr.range.len(), mr.descriptor()))
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FabricMr<'r> {
    /// The registered range, in addresses of the application.
    pub range: AddressRange,
    /// The address by which peers name the first byte: the application's address in VIRT_ADDR mode,
    /// and otherwise 0.
    pub base: u64,
    part: Part,
    region: &'r MemoryRegion,
}

impl<'r> FabricMr<'r> {
    /// Returns the only registration of a region.
    ///
    /// # Errors
    /// - Unsupported: the region has several registrations, or none because it is staged. Use
    ///   [`FabricMr::all_of`].
    /// - The errors of [`FabricMr::all_of`].
    pub fn of(region: &'r MemoryRegion) -> Result<Self> {
        let all = Self::all_of(region)?;
        match &all[..] {
            [mr] => Ok(*mr),
            _ => Err(Error::new(ErrorKind::Unsupported, "keys")
                .provider("libfabric")
                .context("range", region.range())
                .context("registrations", all.len())
                .remedy(
                    "use FabricMr::all_of: the region has several registrations, or is staged",
                )),
        }
    }

    /// Returns the registrations of a region, in the order of its bytes. A staged region has none.
    ///
    /// # Errors
    /// - InvalidArgument: the region belongs to another provider.
    /// - BadState: the registration has not completed, or failed.
    pub fn all_of(region: &'r MemoryRegion) -> Result<Vec<Self>> {
        let domain = Self::domain(region)?;
        let of = |part: &Part| Self { range: part.range, base: part.base, part: *part, region };
        domain.regions.with(region.provider_region()?, "keys", |region| {
            Ok(region.parts.iter().map(of).collect())
        })
    }

    fn domain(region: &'r MemoryRegion) -> Result<&'r FabricDomain> {
        let domain: &dyn Any = region.provider_domain();
        domain.downcast_ref().ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "keys")
                .provider("libfabric")
                .context("range", region.range())
                .remedy("pass a region of a libfabric domain")
        })
    }

    /// Returns the key for requests of peers (`fi_mr_key`), or `None` if the region has no remote
    /// rights.
    #[must_use]
    pub fn key(&self) -> Option<u64> {
        (self.part.key != super::sys::FI_KEY_NOTAVAIL).then_some(self.part.key)
    }

    /// Returns the descriptor for local segments of requests (`fi_mr_desc`). The pointer is valid
    /// while the region is open.
    #[must_use]
    pub fn descriptor(&self) -> *mut c_void {
        self.part.desc
    }

    /// Returns the raw key (`fi_mr_raw_attr`), which a peer maps with `fi_mr_map_raw` and
    /// [`FabricMr::base`].
    ///
    /// # Errors
    /// - Unsupported: the domain has no raw keys (RAW mode).
    /// - The error that the provider reported.
    pub fn raw_key(&self) -> Result<RawKey> {
        Self::domain(self.region)?.raw_key_of(&self.part)
    }

    /// Returns the `fid_mr`, for libfabric calls of other code such as `fi_mr_bind` with a counter.
    /// The pointer is valid while the region is open. Other code must not close the object.
    #[must_use]
    pub fn as_ptr(&self) -> *mut c_void {
        self.part.mr.cast()
    }
}
