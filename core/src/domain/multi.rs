//! Registration of one memory range with several NICs: all of them, or none (VRB-08).
//!
//! ```no_run
//! use hmem_core::{Access, Domain, DeviceBuffer, Result, register_on};
//!
//! fn expose(nics: &[&Domain], buffer: DeviceBuffer) -> Result<DeviceBuffer> {
//!     let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
//!     let shared = register_on(nics, buffer, access)?;
//!     for rail in shared.rail_keys()?.rails() {
//!         println!("{}: {:?}", rail.nic, rail.key);
//!     }
//!     Ok(shared.close()?)
//! }
//! ```

#![allow(unsafe_code, reason = "registers memory by address, with several NICs")]

use std::{fmt, ops::Deref, sync::Arc};

use super::{
    Domain, MemoryRegion, MrAttr,
    buffer::{OwnedBuffer, RegionSlice, keep_alive, take_back},
    region::close_each,
    region_state::KeepAlive,
    register::{LeakOnPanic, new_region, register_on_nics},
};
use crate::{
    Access, AddressRange, Error, ErrorKind, MrFlags, RailKey, RailKeys, Rejected, RemoteKey, Result,
};

/// Registers one memory range with several NICs, by its raw addresses or its dma-buf.
///
/// Each NIC has a domain of its own. All domains must come from one `Hmem`, because they share its
/// ifaces and path selector. The memory is exported once, and the NICs register the same dma-buf. A
/// NIC that cannot import it uses its next path under the policy of its domain. A requested key is
/// requested from every NIC.
///
/// The call always waits for the registrations, even if an event queue is bound, and causes no
/// event.
///
/// # Safety
/// The conditions of [`Domain::regattr`], for every domain.
///
/// # Errors
/// The errors of [`Domain::regattr`], and [`ErrorKind::InvalidArgument`] for an empty list, for
/// domains with different registries or path selectors, and for a base region.
///
/// After an error the regions of earlier NICs are closed. If a driver refuses to close one, the
/// error carries the remaining regions ([`Rejected::value`]): try again to close them.
pub unsafe fn regattr_on(
    domains: &[&Domain],
    attr: &MrAttr<'_>,
    flags: MrFlags,
) -> Result<MultiRegion, Rejected<MultiRegion>> {
    register_all(domains, attr, flags, &KeepAlive::Caller, "regattr_on")
}

/// Registers a buffer with several NICs, whose regions then own it together. The call needs no
/// `unsafe`.
///
/// Works like [`regattr_on`].
///
/// ```no_run
/// use hmem_core::{Access, Domain, Result, register_on};
///
/// fn send_keys(nics: &[&Domain], send: impl FnOnce(Vec<u8>)) -> Result<Vec<u8>> {
///     let shared = register_on(nics, vec![0_u8; 1 << 20], Access::REMOTE_WRITE)?;
///     send(shared.rail_keys()?.to_bytes());
///     // After the peer is done.
///     Ok(shared.close()?)
/// }
/// ```
///
/// # Errors
/// The errors of [`regattr_on`]. [`OwnedMultiRegion::close`] of the error's value returns the
/// buffer, unless a driver refuses to close a region of an earlier NIC.
pub fn register_on<B: OwnedBuffer>(
    domains: &[&Domain],
    buffer: B,
    access: Access,
) -> Result<OwnedMultiRegion<B>, Rejected<OwnedMultiRegion<B>>> {
    let parts = Arc::new(buffer.into_parts());
    let range = [B::range(&parts)];
    let keep = keep_alive::<B>(&parts);
    match register_all(
        domains,
        &MrAttr::new(&range, access),
        MrFlags::empty(),
        &keep,
        "register_on",
    ) {
        Ok(regions) => Ok(OwnedMultiRegion { regions, parts }),
        Err(Rejected { value: regions, error }) => {
            Err(Rejected::new(OwnedMultiRegion { regions, parts }, error))
        }
    }
}

fn register_all(
    domains: &[&Domain],
    attr: &MrAttr<'_>,
    flags: MrFlags,
    keep: &KeepAlive,
    call: &'static str,
) -> Result<MultiRegion, Rejected<MultiRegion>> {
    let mut regions = Vec::with_capacity(domains.len());
    match try_register_all(domains, attr, flags, keep, &mut regions) {
        Ok(()) => Ok(MultiRegion { regions }),
        Err(error) => {
            let registered = regions.len();
            let error = error.of_call(call).context("registered before", registered);
            match (MultiRegion { regions }).close() {
                Ok(()) => Err(Rejected::new(MultiRegion { regions: Vec::new() }, error)),
                Err(Rejected { value: left, error: why }) => {
                    tracing::error!(left = left.regions.len(), %why, "cannot close regions");
                    let error = error
                        .context("left registered", left.regions.len())
                        .context("why left", why);
                    Err(Rejected::new(left, error))
                }
            }
        }
    }
}

fn try_register_all(
    domains: &[&Domain],
    attr: &MrAttr<'_>,
    flags: MrFlags,
    keep: &KeepAlive,
    regions: &mut Vec<MemoryRegion>,
) -> Result<()> {
    check(domains, attr)?;
    let domains: Vec<_> = domains.iter().map(|domain| &domain.inner).collect();
    let ranges = domains[0].check(attr, flags)?;
    for domain in &domains[1..] {
        domain.check(attr, flags)?;
    }
    let owned = keep.iface();
    let leak = LeakOnPanic(keep);
    let mut left = domains.iter();
    let registered = register_on_nics(&domains, &ranges, attr, flags, owned, None, &mut |done| {
        let domain = left.next().expect("one region for each domain");
        let region = new_region(domain, &ranges, attr, flags, keep, Ok(done));
        regions.push(MemoryRegion::new(region));
    });
    std::mem::forget(leak);
    registered
}

fn check(domains: &[&Domain], attr: &MrAttr<'_>) -> Result<()> {
    let refuse = |what: &'static str, remedy: &'static str| {
        Err(Error::new(ErrorKind::InvalidArgument, "regattr").context("why", what).remedy(remedy))
    };
    let Some(first) = domains.first() else {
        return refuse("no domain", "pass at least one domain");
    };
    let is_unrelated = |domain: &&&Domain| {
        !Arc::ptr_eq(&domain.inner.registry, &first.inner.registry)
            || !Arc::ptr_eq(&domain.inner.selector, &first.inner.selector)
    };
    if domains.iter().any(|domain| is_unrelated(&domain)) {
        return refuse("domains of different libraries", "open all domains from one `Hmem`");
    }
    if attr.base.is_some() {
        return refuse(
            "a base region",
            "register parts of a region with `MemoryRegion::sub`, in each domain",
        );
    }
    Ok(())
}

/// The regions of one memory range on several NICs, in the order of the domains.
///
/// Dropping the value drops the regions.
#[derive(Debug)]
pub struct MultiRegion {
    regions: Vec<MemoryRegion>,
}

impl MultiRegion {
    /// Returns the regions, in the order of the domains.
    #[must_use]
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// Returns the remote key of each NIC, in the order of the domains.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::key`].
    pub fn keys(&self) -> Result<Vec<RemoteKey>> {
        self.regions.iter().map(MemoryRegion::key).collect()
    }

    /// Returns the keys of all NICs as one value, with the name of each NIC, to send to a peer.
    ///
    /// # Errors
    /// The errors of [`MultiRegion::keys`] and [`RailKeys::new`].
    pub fn rail_keys(&self) -> Result<RailKeys> {
        let rail = |region: &MemoryRegion| {
            Ok(RailKey::new(region.inner().domain().provider_attr.nic.clone(), region.key()?))
        };
        RailKeys::new(self.regions.iter().map(rail).collect::<Result<_>>()?)
    }

    /// Returns the number of regions, which is the number of NICs. In the value of an error, this
    /// is the number of regions that could not be closed.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns true if there are no regions. In the value of an error this means that nothing is
    /// left registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Returns the regions by value.
    #[must_use]
    pub fn into_regions(self) -> Vec<MemoryRegion> {
        self.regions
    }

    /// Closes the regions of all NICs.
    ///
    /// # Errors
    /// The first error of [`MemoryRegion::close`]. The call tries to close every region. The error
    /// returns the regions that could not be closed, which still work.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match close_each(&mut self.regions) {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }
}

/// A buffer that is registered with several NICs, and owned by their regions together.
///
/// Derefs to the [`MultiRegion`]. Access the bytes through [`OwnedMultiRegion::read`] and
/// [`OwnedMultiRegion::write`], which copy.
pub struct OwnedMultiRegion<B: OwnedBuffer> {
    regions: MultiRegion,
    parts: Arc<B::Parts>,
}

impl<B: OwnedBuffer> OwnedMultiRegion<B> {
    /// Creates a value with a buffer and no regions. [`register_on`] returns this value in its
    /// error if nothing was registered.
    #[must_use]
    pub fn unregistered(buffer: B) -> Self {
        Self { regions: MultiRegion { regions: Vec::new() }, parts: Arc::new(buffer.into_parts()) }
    }

    /// Returns the address range of the buffer.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        B::range(&self.parts)
    }

    /// Returns a part of the buffer for the safe transfers of an endpoint. `nic` is the position of
    /// the endpoint's domain in the list of domains.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if the part reaches outside the buffer, or if `nic` is too large.
    pub fn slice(&self, nic: usize, offset: u64, len: u64) -> Result<RegionSlice> {
        let region = self.regions.regions.get(nic).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "slice")
                .context("nic", nic)
                .context("nics", self.regions.len())
        })?;
        RegionSlice::of(region, offset, len)
    }

    /// Fills `into` with the bytes of the buffer from `offset` on.
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
    /// The errors of [`OwnedMultiRegion::read`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        B::write(&self.parts, offset, from)
    }

    /// Closes the regions of all NICs and returns the buffer.
    ///
    /// # Errors
    /// The errors of [`MultiRegion::close`]. The error returns the regions that are left, with the
    /// buffer.
    pub fn close(mut self) -> Result<B, Rejected<Self>> {
        if let Err(error) = close_each(&mut self.regions.regions) {
            return Err(Rejected::new(self, error));
        }
        let Self { regions, parts } = self;
        match take_back(parts) {
            Ok(buffer) => Ok(buffer),
            Err((parts, error)) => Err(Rejected::new(Self { regions, parts }, error)),
        }
    }
}

impl<B: OwnedBuffer> Deref for OwnedMultiRegion<B> {
    type Target = MultiRegion;

    fn deref(&self) -> &MultiRegion {
        &self.regions
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedMultiRegion<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnedMultiRegion").field(&self.regions).finish()
    }
}
