//! The region table of a NIC.
//!
//! # Use and deregistration
//!
//! Each region has a lock. A transfer takes the lock's *read* guard ([`RegionGuard`]) before it
//! reads or writes the region's memory, and keeps the guard until its last byte has moved.
//! Deregistration and refresh take the *write* guard, and so wait for every transfer that uses the
//! region.
//!
//! A sub-region uses the pages of its *root*, the region that was registered with these pages. A
//! transfer through a sub-region has the read guards of both. A refresh takes the write guard of
//! the root, and so waits for the transfers of all sub-regions too.
//!
//! **The NIC never touches memory of a deregistered region.** A transfer takes its read guard under
//! the lock of the table, while the table contains the region. [`Regions::remove`] does three
//! steps:
//!
//! 1. It takes the region out of the table, so that no transfer can take a new guard.
//! 2. It waits for the existing guards. Each guard has a reference to the region. So if the table's
//!    reference was the only one, there is no guard to wait for.
//! 3. It drops the region's memory.
//!
//! **A transfer does not deadlock with itself.** One region can be on both sides of a transfer,
//! which then takes two read guards. A deregistration may begin between the two. If the second hold
//! waited for the deregistration, the transfer would wait for itself. So [`RegionTable::hold`]
//! never waits for a region's lock: it fails if another thread has the write guard or waits for it.
//! In general, no thread waits for the lock of a region while it has the lock of the table.
//!
//! One deadlock remains: a copy engine must neither deregister nor refresh a region of the transfer
//! that called it, nor revoke its dma-buf.
//!
//! **Revocation** (`Attachment` in `register.rs`) takes the write guard of a root without the lock
//! of the table, marks the root as revoked, and drops its memory. Each later hold of the root or of
//! its sub-regions then fails. The region stays in the table until it is deregistered.
//!
//! # Keys and indices
//!
//! A token is an index and a generation, which counts the uses of the index. A handle of an earlier
//! generation names no region. After the last generation, which is 2^32 - 1, the index is never
//! used again.
//!
//! A map finds the index of a region by domain and key. A key of 4 bytes that the NIC chooses
//! consists of the index and 8 bits of the generation. Such a key repeats after 256 uses of its
//! index, so freed indices wait before their reuse. The keys of a window take their tags from the
//! same count. Each bind of a type 1 window uses the index once. The application chooses the tags
//! of type 2 binds, which the count skips if they are consecutive.

use std::{
    collections::{VecDeque, hash_map::Entry},
    ops::{Deref, RangeInclusive},
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result, provider::LiveObjects};
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockUpgradableReadGuard, ArcRwLockWriteGuard, RawRwLock, RwLock,
    RwLockReadGuard,
};
use rustc_hash::FxHashMap;

use super::{
    config::MAX_REGIONS,
    keys::Token,
    region::{Refusal, Region, SharedRegion},
};

type ReadGuard = ArcRwLockReadGuard<RawRwLock, Region>;

/// A guard of a region in use by a transfer. The region is neither deregistered, refreshed nor
/// revoked until the guard is dropped.
#[derive(Debug)]
pub(super) struct RegionGuard {
    pub(super) token: Token,
    region: ReadGuard,
    /// For a sub-region, the guard of its root: the region that was registered with the pages.
    _root: Option<ReadGuard>,
}

impl Deref for RegionGuard {
    type Target = Region;

    #[inline]
    fn deref(&self) -> &Region {
        &self.region
    }
}

/// A guard of a region whose pages are being refreshed. Until the guard is dropped, no transfer
/// uses the pages, and transfers that begin fail.
#[derive(Debug)]
pub(super) struct RefreshGuard {
    root: ArcRwLockWriteGuard<RawRwLock, Region>,
    /// The guard of the region whose refresh was requested, if that is a sub-region of `root`.
    /// `None` if it is `root` itself.
    part: Option<ReadGuard>,
}

impl Deref for RefreshGuard {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.part.as_deref().unwrap_or(&self.root)
    }
}

/// The value of [`IndexTable::resting`] with keys of 4 bytes. Such keys contain the index, so an
/// index that is reused late gives keys that repeat late.
const RESTING_INDICES: usize = 256;

/// The origin of a region's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// The pages were registered with this region. The value is the number of their bytes.
    Own(u64),
    /// The region is a sub-region and uses pages of its parent: the region that it is a part of.
    Parent(Token),
}

/// The regions of a NIC.
pub(super) struct Regions {
    table: RwLock<RegionTable>,
}

/// The table of a NIC's regions, under the lock of [`Regions`].
pub(super) struct RegionTable {
    slots: IndexTable,
    /// The indices of the regions by domain and key. The hash function has no secret seed, because
    /// an application that chooses colliding keys slows down only its own lookups.
    by_key: FxHashMap<(u32, u64), u32>,
}

/// The live regions by index, and the free indices.
struct IndexTable {
    all: Vec<Slot>,
    /// Free indices, the oldest first.
    free: VecDeque<u32>,
    /// The number of free indices that stay unused while other indices were never used. An index is
    /// reused only if more indices than this are free, or if every index has been used once.
    resting: usize,
}

struct Slot {
    generation: u32,
    live: Option<Live>,
}

struct Live {
    domain: u32,
    /// The number of windows and sub-regions that depend on the region. While the number is not 0,
    /// the region cannot be removed.
    dependents: u32,
    key: u64,
    pages: Pages,
    /// The root of a sub-region: the region that was registered with the pages. The root cannot be
    /// removed before its sub-regions, because each of these counts as a dependent of its parent.
    root: Option<Token>,
    region: SharedRegion,
}

impl IndexTable {
    /// Allocates an index for a region or window: the oldest freed index, or one that was never
    /// used.
    ///
    /// # Errors
    /// OutOfResources: no index is free.
    fn take(&mut self) -> Result<Token> {
        let fresh = self.all.len();
        // A freed index is reused if more than `resting` indices are free, or if no unused index is
        // left.
        if self.free.len() <= self.resting && fresh < MAX_REGIONS as usize {
            self.all.push(Slot { generation: 1, live: None });
            return Ok(Token { index: fresh as u32, generation: 1 });
        }
        let index = self.free.pop_front().ok_or_else(full)?;
        Ok(Token { index, generation: self.all[index as usize].generation })
    }

    /// Frees an index and increments its generation. After the last generation the index is not
    /// used again.
    fn free(&mut self, index: u32) {
        let slot = &mut self.all[index as usize];
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push_back(index);
        }
    }

    /// Returns the live region that a handle of the domain names.
    fn find(&self, domain: u32, token: Token) -> Option<&Live> {
        let slot = self.all.get(token.index as usize)?;
        let live = slot.live.as_ref().filter(|_| slot.generation == token.generation);
        live.filter(|live| live.domain == domain)
    }

    fn root_of(&self, live: &Live) -> Option<&Live> {
        let root = live.root?;
        Some(self.find(live.domain, root).expect("a region with dependents is not removed"))
    }

    /// Takes the read guard of a live region. For a sub-region, also takes that of its root (the
    /// region that was registered with the pages). `by_key` is true if a peer's key named the
    /// region, and false if a handle of the domain did.
    ///
    /// The caller holds the lock of the table. So if a write guard stands in the way, a refresh or
    /// a revocation has it, not [`Regions::remove`], which takes one only after it has removed the
    /// region from the table.
    #[inline(always)]
    fn hold(&self, token: Token, live: &Live, by_key: bool) -> Result<RegionGuard, Refusal> {
        let region = live.region.try_read_arc().ok_or(Refusal::Refreshing)?;
        region.check_usable(by_key)?;
        let root = match self.root_of(live) {
            Some(root) => {
                let root = root.region.try_read_arc().ok_or(Refusal::Refreshing)?;
                if root.is_revoked() {
                    return Err(Refusal::Revoked);
                }
                Some(root)
            }
            None => None,
        };
        Ok(RegionGuard { token, region, _root: root })
    }

    fn find_mut(&mut self, domain: u32, token: Token) -> Option<&mut Live> {
        self.find(domain, token)?;
        self.all[token.index as usize].live.as_mut()
    }

    /// Returns the live regions of a domain, with their tokens.
    fn of_domain(&self, domain: u32) -> impl Iterator<Item = (Token, &Live)> {
        (0..).zip(&self.all).filter_map(move |(index, slot)| {
            let live = slot.live.as_ref().filter(|live| live.domain == domain)?;
            Some((Token { index, generation: slot.generation }, live))
        })
    }
}

impl RegionTable {
    /// Takes a guard of the region that a handle of the domain names. The region stays registered
    /// until the guard is dropped. The call never waits for a region's lock: it fails if the region
    /// is being refreshed or revoked.
    #[inline(always)]
    pub(super) fn hold(&self, domain: u32, token: Token) -> Result<RegionGuard, Refusal> {
        let live = self.slots.find(domain, token).ok_or(Refusal::NoRegion)?;
        self.slots.hold(token, live, false)
    }

    /// Like [`RegionTable::hold`], but a peer named the region by its key.
    #[inline(always)]
    pub(super) fn hold_key(&self, domain: u32, key: u64) -> Result<RegionGuard, Refusal> {
        let index = *self.by_key.get(&(domain, key)).ok_or(Refusal::NoRegion)?;
        let slot = &self.slots.all[index as usize];
        let live = slot.live.as_ref().expect("the keys are those of live regions");
        self.slots.hold(Token { index, generation: slot.generation }, live, true)
    }
}

impl Regions {
    pub(super) fn new(narrow: bool) -> Self {
        let resting = if narrow { RESTING_INDICES } else { 0 };
        let slots = IndexTable { all: Vec::new(), free: VecDeque::new(), resting };
        Self { table: RwLock::new(RegionTable { slots, by_key: FxHashMap::default() }) }
    }

    /// Locks the table for lookups. No region is added or removed until the guard is dropped.
    ///
    /// A thread that has the guard must not lock the table again, and must not wait for a lock
    /// whose holder may wait for the table.
    #[inline]
    pub(super) fn lock(&self) -> RwLockReadGuard<'_, RegionTable> {
        self.table.read()
    }

    /// Adds the open regions of a domain to the counts in `live`. Visits every region of the NIC.
    pub(super) fn count(&self, domain: u32, live: &mut LiveObjects) {
        for (_, region) in self.lock().slots.of_domain(domain) {
            live.regions += 1;
            if let Pages::Own(bytes) = region.pages {
                live.page_registrations += 1;
                live.bytes += bytes;
            }
        }
    }

    /// Adds a live region and returns its token and key. If `key` is `None`, the key is
    /// [`Token::to_narrow_key`] of the token.
    ///
    /// # Errors
    /// - NoKey: the domain already has a region with the key.
    /// - NoRegion: the parent is not live.
    /// - OutOfResources: the table is full.
    pub(super) fn insert(
        &self,
        domain: u32,
        key: Option<u64>,
        pages: Pages,
        region: SharedRegion,
    ) -> Result<(Token, u64)> {
        let table = &mut *self.table.write();
        let root = match pages {
            Pages::Own(_) => None,
            Pages::Parent(parent) => {
                let live = table.slots.find(domain, parent);
                live.ok_or_else(|| stale("register sub-region"))?.root.or(Some(parent))
            }
        };
        let token = table.slots.take()?;
        let key = key.unwrap_or(token.to_narrow_key());
        let Entry::Vacant(unused) = table.by_key.entry((domain, key)) else {
            table.slots.free(token.index);
            return Err(key_in_use(key));
        };
        unused.insert(token.index);
        table.slots.all[token.index as usize].live =
            Some(Live { domain, dependents: 0, key, pages, root, region });
        Ok((token, key))
    }

    /// Removes a region. Returns its number of bytes, or the parent if it is a sub-region.
    ///
    /// The key becomes invalid at once. When the method returns, no transfer uses the region, and
    /// its memory is released.
    ///
    /// # Errors
    /// - NoRegion: the handle is stale.
    /// - Busy: windows or sub-regions depend on the region.
    pub(super) fn remove(&self, domain: u32, token: Token) -> Result<Pages> {
        let (mut region, pages) = {
            let mut table = self.table.write();
            let found = table.slots.find(domain, token).ok_or_else(|| stale("deregister"))?;
            if found.dependents > 0 {
                return Err(has_dependents(found.dependents));
            }
            let live = table.slots.all[token.index as usize].live.take();
            let Live { key, pages, region, .. } = live.expect("the region was just found");
            table.slots.free(token.index);
            table.by_key.remove(&(domain, key));
            (region, pages)
        };
        // No transfer can find the region any more, so no new guard is taken. If this is the only
        // reference, no guard of the region exists. `get_mut` then acquires what the last guard
        // released, so that all copies happen before this call returns. It finds no region whose
        // dma-buf can be revoked to be the only reference, because the attachment has a weak one.
        if Arc::get_mut(&mut region).is_none() {
            // Waits for the transfers that use the region.
            let pieces = std::mem::take(&mut region.write().attr.pieces);
            drop(pieces);
        }
        drop(region);
        Ok(pages)
    }

    /// Returns true if a region of the domain has one of the keys.
    pub(super) fn has_key(&self, domain: u32, mut keys: RangeInclusive<u64>) -> bool {
        let table = self.lock();
        keys.any(|key| table.by_key.contains_key(&(domain, key)))
    }

    /// Returns the key of a region.
    ///
    /// # Errors
    /// NoRegion: the handle is stale.
    pub(super) fn key_of(&self, domain: u32, token: Token) -> Result<u64> {
        let table = self.lock();
        Ok(table.slots.find(domain, token).ok_or_else(|| stale("raw key"))?.key)
    }

    /// Returns true if a descriptor names a live region of the domain now. The region may be
    /// deregistered later, so a transfer checks again when it takes a guard of the region.
    #[inline]
    pub(super) fn is_live(&self, domain: u32, token: Token) -> bool {
        self.lock().slots.find(domain, token).is_some()
    }

    /// Returns true if the exporter of the memory of the region, or of its root, revoked it. Waits
    /// for a refresh but not for transfers. Returns false for a stale handle.
    pub(super) fn is_revoked(&self, domain: u32, token: Token) -> bool {
        let table = self.lock();
        let Some(live) = table.slots.find(domain, token) else { return false };
        let root = Arc::clone(&table.slots.root_of(live).unwrap_or(live).region);
        drop(table);
        root.read_recursive().is_revoked()
    }

    /// Waits for the transfers that use a region's pages. Later transfers fail until the guard is
    /// dropped.
    ///
    /// # Errors
    /// - NoRegion: the handle is stale.
    /// - Busy: another refresh of the pages is in progress.
    pub(super) fn refresh(&self, domain: u32, token: Token) -> Result<RefreshGuard> {
        let table = self.lock();
        let live = table.slots.find(domain, token).ok_or_else(|| stale("refresh"))?;
        let root = table.slots.root_of(live);
        // At most one thread can have the upgradable guard. Transfers can have read guards beside
        // it.
        let root = root.unwrap_or(live).region.try_upgradable_read_arc().ok_or_else(refreshing)?;
        let part = live.root.is_some().then(|| Arc::clone(&live.region));
        drop(table);
        let root = ArcRwLockUpgradableReadGuard::upgrade(root);
        // May wait for a deregistration of the sub-region, which then has no pieces left.
        let part = part.map(|part| part.read_arc());
        Ok(RefreshGuard { root, part })
    }

    /// Calls `look` with a live region, enabled or not. Waits for a refresh but not for transfers.
    ///
    /// Another thread may deregister the region at the same time, unless the region has a
    /// dependent. `look` may then see the region without pieces. A revocation removes the pieces of
    /// a region with dependents too.
    ///
    /// # Errors
    /// - NoRegion: the handle is stale.
    /// - The error of `look`.
    pub(super) fn inspect<T>(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
        look: impl FnOnce(&Region) -> Result<T>,
    ) -> Result<T> {
        let table = self.lock();
        let live = table.slots.find(domain, token).ok_or_else(|| stale(operation))?;
        let region = Arc::clone(&live.region);
        drop(table);
        // The read is recursive, because this thread may already have a read guard for a transfer
        // while a refresh waits for the lock.
        look(&region.read_recursive())
    }

    /// Counts one more window or sub-region that depends on the region. A region with dependents
    /// cannot be removed.
    pub(super) fn add_dependent(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
    ) -> Result<()> {
        let mut table = self.table.write();
        table.slots.find_mut(domain, token).ok_or_else(|| stale(operation))?.dependents += 1;
        Ok(())
    }

    /// Records that a window or sub-region, which [`Regions::add_dependent`] has counted, no longer
    /// depends on the region.
    pub(super) fn remove_dependent(&self, domain: u32, token: Token) {
        let mut table = self.table.write();
        let base = table.slots.find_mut(domain, token);
        base.expect("a region with dependents is not removed").dependents -= 1;
    }

    /// Returns the tokens of a domain's regions.
    pub(super) fn tokens_of(&self, domain: u32) -> Vec<Token> {
        self.lock().slots.of_domain(domain).map(|(token, _)| token).collect()
    }

    /// Reserves an index for a window. No region gets that index until [`Regions::free_index`].
    ///
    /// # Errors
    /// OutOfResources: the table is full.
    pub(super) fn reserve_index(&self) -> Result<Token> {
        self.table.write().slots.take()
    }

    /// Frees an index that [`Regions::reserve_index`] has reserved. Skips the generations whose
    /// tags the window's keys had, from the tag of the reserved generation to `last_tag`.
    pub(super) fn free_index(&self, index: u32, last_tag: u8) {
        let slots = &mut self.table.write().slots;
        let generation = &mut slots.all[index as usize].generation;
        let skipped = last_tag.wrapping_sub(*generation as u8);
        *generation = generation.saturating_add(u32::from(skipped));
        slots.free(index);
    }
}

fn full() -> Error {
    Error::new(ErrorKind::OutOfResources, "register")
        .provider("loopback")
        .context("limit", "2^24 table entries")
        .remedy("close regions before registering more")
}

fn has_dependents(dependents: u32) -> Error {
    Error::new(ErrorKind::Busy, "deregister")
        .provider("loopback")
        .context("dependents", dependents)
        .remedy("close its sub-regions and unbind its windows first")
}

fn stale(operation: &'static str) -> Error {
    Error::new(ErrorKind::NoRegion, operation)
        .provider("loopback")
        .remedy("pass the handle of a region of this domain that is not closed")
}

fn refreshing() -> Error {
    Error::new(ErrorKind::Busy, "refresh")
        .provider("loopback")
        .remedy("refresh again once the refresh in progress has ended")
}

fn key_in_use(key: u64) -> Error {
    Error::new(ErrorKind::NoKey, "register")
        .provider("loopback")
        .context("key", format_args!("{key:#x}"))
        .remedy("close the region that has this key, or request another")
}

#[cfg(test)]
mod tests {
    use hmem_core::{Access, Address, AddressRange, Addressing};

    use super::*;
    use crate::{
        Few,
        memory::PieceMemory,
        region::{RegionAttr, RegionPiece},
    };

    const DOMAIN: u32 = 7;

    fn attr() -> RegionAttr {
        let range = AddressRange::new(Address(4096), 64).unwrap();
        let piece = RegionPiece { range, memory: PieceMemory::Borrowed, at: 4096 };
        RegionAttr {
            len: 64,
            access: Access::REMOTE_READ,
            addressing: Addressing::ZeroBased,
            pieces: Few::from_iter([piece]),
            auth_key: None,
            announced_pages: None,
            persistent: false,
            single_use: false,
            enabled: true,
        }
    }

    fn insert(regions: &Regions, attr: RegionAttr) -> Token {
        regions.insert(DOMAIN, Some(1), Pages::Own(64), Region::shared(attr)).unwrap().0
    }

    fn hold(regions: &Regions, token: Token) -> Result<RegionGuard, Refusal> {
        regions.lock().hold(DOMAIN, token)
    }

    #[test]
    fn token_is_stale_after_its_region_is_removed() {
        let regions = Regions::new(false);
        let first = insert(&regions, attr());
        regions.remove(DOMAIN, first).unwrap();
        let second = insert(&regions, attr());
        assert_eq!(first.index, second.index);
        assert_eq!(hold(&regions, first).unwrap_err(), Refusal::NoRegion);
        assert_eq!(hold(&regions, second).unwrap().token, second);
        assert!(!regions.is_live(DOMAIN, first) && regions.is_live(DOMAIN, second));
        assert!(regions.remove(DOMAIN, first).is_err());
        assert!(regions.remove(DOMAIN + 1, second).is_err());
    }

    #[test]
    fn single_use_key_serves_one_of_two_transfers() {
        let regions = Regions::new(false);
        let token = insert(&regions, RegionAttr { single_use: true, ..attr() });
        let hold_key = || regions.lock().hold_key(DOMAIN, 1);
        let (one, two) = (hold_key().unwrap(), hold_key().unwrap());
        assert!(one.spend() && !two.spend());
        assert_eq!(hold_key().unwrap_err(), Refusal::NoRegion);
        drop(hold(&regions, token).unwrap());
    }

    #[test]
    fn removal_waits_for_transfers_and_releases_the_memory() {
        let regions = Regions::new(false);
        let token = insert(&regions, attr());
        let user = hold(&regions, token).unwrap();
        std::thread::scope(|scope| {
            let removal = scope.spawn(|| regions.remove(DOMAIN, token).unwrap());
            while regions.is_live(DOMAIN, token) {
                std::thread::yield_now();
            }
            // A second hold by the same transfer is refused here, because a wait would be a
            // deadlock.
            assert_eq!(hold(&regions, token).unwrap_err(), Refusal::NoRegion);
            assert!(!removal.is_finished());
            assert_eq!(user.attr.pieces.len(), 1);
            drop(user);
            removal.join().unwrap();
        });
    }

    #[test]
    fn refresh_waits_for_transfers_and_refuses_new_ones() {
        let regions = Regions::new(false);
        let token = insert(&regions, attr());
        let user = hold(&regions, token).unwrap();
        std::thread::scope(|scope| {
            let refresh = scope.spawn(|| regions.refresh(DOMAIN, token).unwrap().attr.len);
            while hold(&regions, token).is_ok() {
                std::thread::yield_now();
            }
            assert_eq!(hold(&regions, token).unwrap_err(), Refusal::Refreshing);
            assert!(!refresh.is_finished());
            drop(user);
            refresh.join().unwrap();
        });
        drop(hold(&regions, token).unwrap());
    }

    #[test]
    fn freed_index_waits_for_reuse_with_4_byte_keys() {
        let regions = Regions::new(true);
        let mut last_seen = FxHashMap::default();
        for round in 0..10 * RESTING_INDICES {
            let (token, key) =
                regions.insert(DOMAIN, None, Pages::Own(64), Region::shared(attr())).unwrap();
            assert_eq!(key >> 8, u64::from(token.index));
            if let Some(before) = last_seen.insert(token.index, round) {
                assert!(
                    round - before >= RESTING_INDICES,
                    "index {} came back after {}",
                    token.index,
                    round - before
                );
            }
            regions.remove(DOMAIN, token).unwrap();
        }
        assert!(last_seen.len() <= RESTING_INDICES + 1);
    }

    #[test]
    fn index_is_not_reused_after_its_last_generation() {
        let regions = Regions::new(false);
        let token = insert(&regions, attr());
        regions.remove(DOMAIN, token).unwrap();
        regions.table.write().slots.all[token.index as usize].generation = u32::MAX;
        let old = insert(&regions, attr());
        assert_eq!((old.index, old.generation), (token.index, u32::MAX));
        regions.remove(DOMAIN, old).unwrap();
        assert_ne!(insert(&regions, attr()).index, token.index);
    }
}
