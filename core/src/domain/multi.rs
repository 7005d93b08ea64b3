//! One range on several NICs: from the same exports, all of it or nothing (VRB-08).
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

use std::{fmt, ops::Deref, sync::Arc};

use super::{
    Domain, MemoryRegion, MrAttr,
    buffer::{OwnedBuffer, RegionSlice, keep_alive, take_back},
    region_state::KeepAlive,
    register::{LeakOnPanic, new_region, register_on_nics},
};
use crate::{
    Access, AddressRange, Error, ErrorKind, MrFlags, RailKey, RailKeys, Rejected, RemoteKey, Result,
};

/// Registers one range with several NICs, each through a domain of its own, by raw addresses or a
/// dma-buf.
///
/// The domains share their ifaces and path decisions: they were opened by one `Hmem`. The memory is
/// exported once, and every NIC that takes the export registers the same dma-buf; one that does not
/// takes its next way under the policy of its domain. A requested key is asked of every NIC. The
/// registration is done when this returns, also where an event queue is bound, and gives no event.
///
/// # Safety
/// As [`Domain::regattr`], for every domain.
///
/// # Errors
/// As [`Domain::regattr`], and [`ErrorKind::InvalidArgument`] for no domain, domains of different
/// registries, or a base region. Everything registered before is closed again: the value of the
/// error is empty. If a driver refuses that, the value holds what is left, to be closed again.
pub unsafe fn regattr_on(
    domains: &[&Domain],
    attr: &MrAttr<'_>,
    flags: MrFlags,
) -> Result<MultiRegion, Rejected<MultiRegion>> {
    register_all(domains, attr, flags, &KeepAlive::Caller, "regattr_on")
}

/// [`regattr_on`] for a buffer that the regions then own together: the safe door.
///
/// # Errors
/// As [`regattr_on`]. The buffer is in the value of the error, whose
/// [`close`](OwnedMultiRegion::close) gives it back: at once, unless a driver refused to undo what
/// was registered before.
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
                    tracing::error!(left = left.regions.len(), %why, "regions could not be closed again");
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
    let keep = LeakOnPanic::new(keep.clone());
    let mut left = domains.iter();
    let registered = register_on_nics(&domains, &ranges, attr, flags, owned, None, &mut |done| {
        let domain = left.next().expect("one region for each domain");
        let region = new_region(domain, &ranges, attr, flags, keep.get(), Ok(done));
        regions.push(MemoryRegion::new(region));
    });
    keep.release();
    registered
}

fn check(domains: &[&Domain], attr: &MrAttr<'_>) -> Result<()> {
    let refuse = |what: &'static str, remedy: &'static str| {
        Err(Error::new(ErrorKind::InvalidArgument, "regattr").context("what", what).remedy(remedy))
    };
    let Some(first) = domains.first() else {
        return refuse("no domain", "name at least one domain");
    };
    let strange = |domain: &&&Domain| {
        !Arc::ptr_eq(&domain.inner.registry, &first.inner.registry)
            || !Arc::ptr_eq(&domain.inner.selector, &first.inner.selector)
    };
    if domains.iter().any(|domain| strange(&domain)) {
        return refuse("domains of different libraries", "open all domains from one `Hmem`");
    }
    if attr.base.is_some() {
        return refuse(
            "a base region",
            "a base is a region of one domain: register its parts with `sub`",
        );
    }
    Ok(())
}

/// One range registered with several NICs: a region for each, in the order of the domains.
///
/// Dropping it deregisters as dropping the regions does.
#[derive(Debug)]
pub struct MultiRegion {
    regions: Vec<MemoryRegion>,
}

impl MultiRegion {
    /// The regions, in the order of the domains.
    #[must_use]
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// The remote key of each NIC, in the order of the domains.
    ///
    /// # Errors
    /// As [`MemoryRegion::key`].
    pub fn keys(&self) -> Result<Vec<RemoteKey>> {
        self.regions.iter().map(MemoryRegion::key).collect()
    }

    /// Returns the keys of all NICs as one value, which names the NIC of each and can be sent to a
    /// peer.
    ///
    /// # Errors
    /// As [`MultiRegion::keys`] and [`RailKeys::new`].
    pub fn rail_keys(&self) -> Result<RailKeys> {
        let rail = |region: &MemoryRegion| {
            Ok(RailKey::new(region.inner().domain().provider_attr.nic.clone(), region.key()?))
        };
        RailKeys::new(self.regions.iter().map(rail).collect::<Result<_>>()?)
    }

    /// Returns the number of NICs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns true if no NIC has the memory. In the value of an error this means that everything
    /// was undone.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Takes it apart into regions that live on their own.
    #[must_use]
    pub fn into_regions(self) -> Vec<MemoryRegion> {
        self.regions
    }

    /// Closes the regions of all NICs.
    ///
    /// # Errors
    /// As [`MemoryRegion::close`], the first of them; every region is tried, and those that were
    /// refused come back, still working.
    pub fn close(mut self) -> Result<(), Rejected<Self>> {
        match self.close_each() {
            Ok(()) => Ok(()),
            Err(error) => Err(Rejected::new(self, error)),
        }
    }

    fn close_each(&mut self) -> Result<()> {
        let mut first = Ok(());
        let mut left = Vec::new();
        for region in std::mem::take(&mut self.regions) {
            match region.inner().close() {
                // Not left to the drop of the region: a sub-region that another thread is dropping
                // may hold it a little longer.
                Ok(()) => drop(region.inner().release()),
                Err(error) => {
                    left.push(region);
                    first = first.and(Err(error));
                }
            }
        }
        self.regions = left;
        let left = self.regions.len();
        first.map_err(|error: Error| error.context("left registered", left))
    }
}

/// One buffer registered with several NICs and owned by their regions together.
///
/// Derefs to the regions. The bytes are reached by copies, as those of
/// [`OwnedRegion`](super::OwnedRegion).
pub struct OwnedMultiRegion<B: OwnedBuffer> {
    regions: MultiRegion,
    parts: Arc<B::Parts>,
}

impl<B: OwnedBuffer> OwnedMultiRegion<B> {
    /// Returns a buffer that no NIC has: the value of an error when nothing was registered.
    #[must_use]
    pub fn unregistered(buffer: B) -> Self {
        Self { regions: MultiRegion { regions: Vec::new() }, parts: Arc::new(buffer.into_parts()) }
    }

    /// Returns the memory of the buffer.
    #[must_use]
    pub fn range(&self) -> AddressRange {
        B::range(&self.parts)
    }

    /// A piece for the safe transfers of an endpoint of the NIC at `nic`, in the order of the
    /// domains.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfBounds`] if it reaches outside, or for a NIC past the last.
    pub fn slice(&self, nic: usize, offset: u64, len: u64) -> Result<RegionSlice> {
        let region = self.regions.regions.get(nic).ok_or_else(|| {
            Error::new(ErrorKind::OutOfBounds, "slice")
                .context("nic", nic)
                .context("nics", self.regions.len())
        })?;
        RegionSlice::of(region, offset, len)
    }

    /// Copies bytes out.
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

    /// Closes the regions of all NICs and gives the buffer back.
    ///
    /// # Errors
    /// As [`MultiRegion::close`]: what is left comes back, with the buffer.
    pub fn close(mut self) -> Result<B, Rejected<Self>> {
        if let Err(error) = self.regions.close_each() {
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
