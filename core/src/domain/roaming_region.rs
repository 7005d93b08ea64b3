//! Registered memory that moves from NIC to NIC, and publishes its current key.

use std::{fmt, slice, sync::Arc};

use super::{
    Domain,
    memory::{Memory, keep_alive},
    region::{MemoryRegion, rail_keys},
    request::{RegionRequest, Source},
    terms::Terms,
    typed_region::Region,
};
use crate::{
    Access, Error, ErrorKind, MrFlags, Rejected, Result,
    key_feed::{KeyFeed, KeyPart},
};

/// A registered memory that can be registered again on the same or another NIC, and that publishes
/// its current key to peers.
///
/// The memory stays where it is. Peers name its bytes by their offsets, and learn the key of each
/// registration from a [`KeyFeed`]. Call [`RoamingRegion::reopen`] after the device of the domain
/// was lost ([`NicState::Lost`](crate::provider::NicState::Lost)), or to move the memory to another
/// NIC while both work.
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
    /// The region; `None` after [`RoamingRegion::withdraw`].
    region: Option<Region<M>>,
    parts: Arc<M::Parts>,
    /// The settings of each registration.
    settings: Settings,
    feed: KeyFeed,
}

/// The settings that a roaming region keeps.
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
        let feed = match KeyFeed::new().and_then(|feed| publish(&feed, &region).map(|_| feed)) {
            Ok(feed) => feed,
            Err(error) => return Err(Rejected::new(region, error)),
        };
        let (access, page_size) = (region.access(), region.page_size());
        let settings = Settings { access, flags: region.region.inner.flags, page_size };
        let parts = Arc::clone(&region.parts);
        Ok(Self { region: Some(region), parts, settings, feed })
    }

    /// Returns the current region. `None` after [`RoamingRegion::withdraw`].
    #[must_use]
    pub fn region(&self) -> Option<&Region<M>> {
        self.region.as_ref()
    }

    /// Returns the feed of the memory's keys. It has one part at offset 0, or none after
    /// [`RoamingRegion::withdraw`].
    #[must_use]
    pub fn feed(&self) -> &KeyFeed {
        &self.feed
    }

    /// Registers the memory in `domain`, publishes the new key, and then closes the old region.
    /// Returns the number of the new generation.
    ///
    /// The new region has the rights, flags and page size of the first one, and defaults for all
    /// other settings. The registration is synchronous, even if an event queue is bound to the
    /// domain. Until the call returns, both regions exist. If the old region has sub-regions,
    /// windows or grants, it is deregistered when the last of them is dropped.
    ///
    /// # Errors
    /// The old region and its generation stay after an error.
    ///
    /// - The errors of [`Domain::register`] and of [`MemoryRegion::key`].
    pub fn reopen(&mut self, domain: &Domain) -> Result<u64> {
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
        let region = registered.map_err(|error| error.of_call("reopen"))?;
        let generation = publish(&self.feed, &region)?;
        self.region = Some(Region { region, parts: Arc::clone(&self.parts) });
        Ok(generation)
    }

    /// Publishes an empty list of keys, and closes the region. The memory stays, so that
    /// [`RoamingRegion::reopen`] can register it again. Returns the number of the new generation.
    ///
    /// Some kernel drivers (rdma_rxe, siw) complete the removal of a device only once all its users
    /// have closed it. Withdraw all regions and close the domain, before the device comes back.
    ///
    /// # Errors
    /// The errors of [`MemoryRegion::close`]. The region stays registered, without a published key.
    pub fn withdraw(&mut self) -> Result<u64> {
        let generation = self.feed.publish(Vec::new())?;
        if let Some(region) = &self.region {
            region.region.inner.close()?;
            drop(region.region.inner.release());
            self.region = None;
        }
        Ok(generation)
    }

    /// Closes the region, ends the feed, and returns the memory.
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
        let Self { region, parts, settings, feed } = self;
        Arc::try_unwrap(parts).map(M::from_parts).map_err(|parts| {
            let error = Error::new(ErrorKind::Busy, "close region")
                .context("why", "an earlier region of the memory is still registered")
                .remedy("drop the sub-regions, windows and grants of earlier regions first");
            Rejected::new(Self { region, parts, settings, feed }, error)
        })
    }
}

/// Publishes the key of a region, and returns the number of the generation.
fn publish(feed: &KeyFeed, region: &MemoryRegion) -> Result<u64> {
    feed.publish(vec![KeyPart { offset: 0, keys: rail_keys(slice::from_ref(region))? }])
}

impl<M: Memory> fmt::Debug for RoamingRegion<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoamingRegion")
            .field("region", &self.region)
            .field("feed", &self.feed)
            .finish_non_exhaustive()
    }
}
