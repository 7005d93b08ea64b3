//! Registered memory that moves from NIC to NIC, or is on several NICs, and publishes its current
//! keys.

use std::{fmt, sync::Arc};

use super::{
    Domain, DomainInner,
    memory::{Memory, keep_alive},
    region::{MemoryRegion, rail_keys},
    request::{RegionRequest, Source},
    terms::Terms,
    typed_region::Region,
};
use crate::{
    Access, Error, ErrorKind, MrFlags, Rejected, Result,
    key_feed::{KeyFeed, KeyPart},
    nic::Nic,
};

/// A registered memory that can be registered again on the same or another NIC, and that publishes
/// its current keys to peers.
///
/// The memory stays where it is. Peers name its bytes by their offsets, and learn the key of each
/// registration from a [`KeyFeed`]. Call [`RoamingRegion::reopen`] after the device of the domain
/// was lost ([`NicState::Lost`](crate::provider::NicState::Lost)), or to move the memory to another
/// NIC while both work.
///
/// The memory can be on several NICs at once, its rails: [`RoamingRegion::add`] and
/// [`RoamingRegion::remove`] change one rail, and the feed has the keys of all of them.
/// [`RailEndpoint`](crate::RailEndpoint) divides transfers among rails.
///
/// ```
/// use hmem_core::{Domain, Result, RoamingRegion, provider::NicState};
///
/// /// Replaces a domain whose device is lost. `open` opens a domain on a NIC that works.
/// fn replace_if_lost(
///     domain: &mut Domain,
///     region: &mut RoamingRegion<Vec<u8>>,
///     open: impl Fn() -> Result<Domain>,
/// ) -> Result<()> {
///     if domain.nic_state() == NicState::Lost {
///         let next = open()?;
///         // Peers that apply the next update of `region.feed()` have the new key.
///         region.reopen(&next)?;
///         let lost = std::mem::replace(domain, next);
///         lost.close()?;
///     }
///     Ok(())
/// }
/// ```
pub struct RoamingRegion<M: Memory> {
    /// The regions, one for each NIC; none after [`RoamingRegion::withdraw`].
    regions: Vec<Region<M>>,
    /// Earlier regions that a driver did not close. Their keys are not published. Each change of
    /// the regions tries again to close them.
    closing: Vec<Region<M>>,
    parts: Arc<M::Parts>,
    /// The rights, flags and page size for the next registration of the memory.
    settings: Settings,
    feed: KeyFeed,
}

/// The settings with which a roaming region registers its memory each time. They are those of the
/// first region.
#[derive(Clone, Copy)]
struct Settings {
    access: Access,
    flags: MrFlags,
    page_size: usize,
}

impl<M: Memory> RoamingRegion<M> {
    /// Publishes the key of a region as generation 1 of a new feed.
    ///
    /// # Errors
    /// The error returns the region.
    ///
    /// - The errors of [`MemoryRegion::key`]: a region without a key has nothing to publish.
    /// - [`ErrorKind::Unavailable`] if the operating system's random
    ///   generator fails.
    pub fn new(region: Region<M>) -> Result<Self, Rejected<Region<M>>> {
        let published = |feed: KeyFeed| publish(&feed, &[&region]).map(|_| feed);
        let feed = match KeyFeed::new().and_then(published) {
            Ok(feed) => feed,
            Err(error) => return Err(Rejected::new(region, error)),
        };
        let (access, page_size) = (region.access(), region.page_size());
        let settings = Settings { access, flags: region.region.inner.flags, page_size };
        let parts = Arc::clone(&region.parts);
        Ok(Self { regions: vec![region], closing: Vec::new(), parts, settings, feed })
    }

    /// Returns the region on the NIC that was added first. `None` if the memory is on no NIC.
    #[must_use]
    pub fn region(&self) -> Option<&Region<M>> {
        self.regions.first()
    }

    /// Returns the regions, one for each NIC.
    #[must_use]
    pub fn regions(&self) -> &[Region<M>] {
        &self.regions
    }

    /// Returns the feed of the memory's keys. It has one part at offset 0 with a key for each NIC,
    /// or no part if the memory is on no NIC.
    #[must_use]
    pub fn feed(&self) -> &KeyFeed {
        &self.feed
    }

    /// Registers the memory in `domain`, publishes the new key alone, and then closes all old
    /// regions. Returns the number of the new generation.
    ///
    /// The new region has the rights, flags and page size of the first region, and defaults for all
    /// other settings. The registration is synchronous, even if an event queue is bound to the
    /// domain. Until the call returns, the old regions exist too. If an old region has sub-regions,
    /// windows or grants, it is deregistered when the last of them is dropped.
    ///
    /// # Errors
    /// - The errors of [`Domain::register`] and of [`MemoryRegion::key`]. The old regions and their
    ///   generation stay.
    /// - The driver's own error if it does not deregister an old region. The new key is published
    ///   alone, and each later change of the regions tries again to close the old region. Until
    ///   then its NIC accepts the old key.
    pub fn reopen(&mut self, domain: &Domain) -> Result<u64> {
        let region = self.register(domain, "reopen")?;
        let generation = publish(&self.feed, &[&region])?;
        self.closing.append(&mut self.regions);
        self.regions.push(region);
        self.close_replaced()?;
        Ok(generation)
    }

    /// Registers the memory in `domain` too, and publishes the keys of all NICs. Returns the number
    /// of the new generation.
    ///
    /// If the memory is already on the domain's NIC, the new region replaces that region, as after
    /// the loss and the return of the NIC. The new region is made as by [`RoamingRegion::reopen`].
    ///
    /// # Errors
    /// The errors of [`RoamingRegion::reopen`].
    pub fn add(&mut self, domain: &Domain) -> Result<u64> {
        let new = self.register(domain, "add rail")?;
        let nic = nic_of(&new);
        let at = self.regions.iter().position(|region| nic_of(region).is_same(nic));
        let at = at.unwrap_or(self.regions.len());
        let mut all: Vec<_> = self.regions.iter().map(|region| &region.region).collect();
        all.splice(at..(at + 1).min(all.len()), [&new.region]);
        let generation = publish(&self.feed, &all)?;
        self.closing.extend(self.regions.splice(at..(at + 1).min(self.regions.len()), [new]));
        self.close_replaced()?;
        Ok(generation)
    }

    /// Publishes the keys of the other NICs, and closes the region on `nic`. Returns the number of
    /// the new generation. `nic` is a name as in [`RailKeys::of`](crate::RailKeys::of).
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if the memory is not on this NIC.
    /// - The errors of [`MemoryRegion::close`]. The region stays registered, without a published
    ///   key.
    pub fn remove(&mut self, nic: &str) -> Result<u64> {
        let at = self.regions.iter().position(|region| nic_of(region).is_named(nic));
        let at = at.ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "remove rail")
                .context("nic", nic)
                .remedy("name a NIC that the memory is on (RoamingRegion::regions)")
        })?;
        let mut others: Vec<_> = self.regions.iter().map(|region| &region.region).collect();
        others.remove(at);
        let generation = publish(&self.feed, &others)?;
        self.close_at(at)?;
        self.close_replaced()?;
        Ok(generation)
    }

    /// Publishes an empty list of keys, and closes all regions. The memory stays, so that
    /// [`RoamingRegion::reopen`] and [`RoamingRegion::add`] can register it again. Returns the
    /// number of the new generation.
    ///
    /// After the loss of a device, withdraw all regions and close the domain, because some kernel
    /// drivers (rdma_rxe, siw) complete the removal of the device only then. The device can come
    /// back only after its removal is complete.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::close`]. The region stays registered, without a published key.
    pub fn withdraw(&mut self) -> Result<u64> {
        let generation = publish(&self.feed, &[])?;
        while !self.regions.is_empty() {
            self.close_at(self.regions.len() - 1)?;
        }
        self.close_replaced()?;
        Ok(generation)
    }

    fn register(&self, domain: &Domain, call: &'static str) -> Result<Region<M>> {
        let Settings { access, flags, page_size } = self.settings;
        let terms = Terms { flags, page_size, ..Terms::new(access) };
        let place = M::place(&self.parts);
        let request = RegionRequest {
            source: Source::of(&place),
            promise: place.promise(),
            keep: keep_alive::<M>(&self.parts),
            terms: &terms,
        };
        let registered = domain.inner.register_now(&request, None);
        let region = registered.map_err(|error| error.of_call(call))?;
        Ok(Region { region, parts: Arc::clone(&self.parts) })
    }

    /// Closes a region, and takes it out of the list.
    fn close_at(&mut self, at: usize) -> Result<()> {
        let region = &self.regions[at].region.inner;
        region.close()?;
        drop(region.release());
        self.regions.remove(at);
        Ok(())
    }

    /// Closes the regions that others have replaced. A region with sub-regions, windows, grants or
    /// counters is only dropped: the last of them ends it. Regions that a driver does not close
    /// stay in the list. Returns the first error.
    fn close_replaced(&mut self) -> Result<()> {
        let mut first = Ok(());
        self.closing.retain(|region| {
            let inner = &region.region.inner;
            if inner.domain.process.is_current() && inner.check_unused().is_err() {
                return false;
            }
            match inner.close() {
                Ok(()) => {
                    drop(inner.release());
                    false
                }
                Err(error) => {
                    if first.is_ok() {
                        first = Err(error);
                    }
                    true
                }
            }
        });
        first
    }

    /// Returns the region that is registered in a domain, if there is one.
    pub(super) fn region_in(&self, domain: &Arc<DomainInner>) -> Option<&Region<M>> {
        self.regions.iter().find(|region| Arc::ptr_eq(&region.region.inner.domain, domain))
    }

    /// Closes the regions, ends the feed, and returns the memory.
    ///
    /// # Errors
    /// The error returns the value.
    ///
    /// - The errors of [`RoamingRegion::withdraw`].
    /// - [`ErrorKind::Busy`] while a sub-region, window or grant of an earlier region exists.
    pub fn close(mut self) -> Result<M, Rejected<Self>> {
        if let Err(error) = self.withdraw() {
            return Err(Rejected::new(self, error));
        }
        let Self { regions, closing, parts, settings, feed } = self;
        Arc::try_unwrap(parts).map(M::from_parts).map_err(|parts| {
            let error = Error::new(ErrorKind::Busy, "close region")
                .context("why", "an earlier region of the memory is still registered")
                .remedy(
                    "drop the sub-regions, windows and grants of earlier regions first; if none \
                     is left, the log has the driver's error",
                );
            Rejected::new(Self { regions, closing, parts, settings, feed }, error)
        })
    }
}

/// Publishes the keys of the regions of a memory, and returns the number of the generation.
fn publish(feed: &KeyFeed, regions: &[&MemoryRegion]) -> Result<u64> {
    if regions.is_empty() {
        return feed.publish(Vec::new());
    }
    feed.publish(vec![KeyPart { offset: 0, keys: rail_keys(regions.iter().copied())? }])
}

fn nic_of(region: &MemoryRegion) -> &Nic {
    &region.inner.domain.provider_attr.nic
}

impl<M: Memory> fmt::Debug for RoamingRegion<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoamingRegion")
            .field("regions", &self.regions)
            .field("feed", &self.feed)
            .finish_non_exhaustive()
    }
}
