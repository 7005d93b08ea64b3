//! The region table of a NIC.
//!
//! # Use and deregistration
//!
//! Each region has a lock. A transfer takes the lock's *read* guard ([`RegionGuard`]) before it
//! reads or writes the region's memory, and keeps it until its last byte has moved. Deregistration
//! and refresh take the *write* guard, and so wait for every transfer that uses the region.
//!
//! A sub-region uses the pages of its *root*, the region that was registered with them. A transfer
//! through a sub-region has the read guards of both. A refresh takes the write guard of the root,
//! and so waits for the transfers of all sub-regions too.
//!
//! **The NIC never touches memory of a deregistered region.** A transfer takes its read guard under
//! the lock of the table, while the table contains the region. [`Regions::remove`] does three
//! steps:
//!
//! 1. It takes the region out of the table, so that no transfer can take a new guard.
//! 2. It waits for the existing guards.
//! 3. It drops the region's memory.
//!
//! **A transfer does not deadlock with itself.** [`Regions::hold`] never waits for a region's lock.
//! It refuses a region that has a write guard, or for which a thread waits for one. So one region
//! can be on both sides of a transfer: if its deregistration begins between the two holds, the
//! second hold fails. No thread waits for the lock of a region while it has the lock of the table.
//! One deadlock remains: a copy engine must neither deregister nor refresh a region of the transfer
//! that called it.
//!
//! # Keys and indices
//!
//! A token is an index and a generation, which counts the uses of the index. A handle or key of an
//! earlier generation names no region. An index is not used again after its last generation. Keys
//! of 4 bytes have only 8 bits of the generation. A key is then valid again after 256 uses of its
//! index, so freed indices wait before their reuse.

use std::{
    collections::{VecDeque, hash_map::Entry},
    ops::Deref,
    sync::Arc,
};

use hmem_core::{Error, ErrorKind, Result};
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockUpgradableReadGuard, ArcRwLockWriteGuard, RawRwLock, RwLock,
};

use rustc_hash::FxHashMap;

use super::{
    config::MAX_REGIONS,
    keys::{DomainKeys, KnownGeneration, Token},
    region::{Refusal, Region, RegionAttr},
};

type ReadGuard = ArcRwLockReadGuard<RawRwLock, Region>;

/// A guard of a region in use by a transfer. The region is neither deregistered nor refreshed until
/// the guard is dropped.
#[derive(Debug)]
pub(super) struct RegionGuard {
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
    /// The guard of the refreshed sub-region, or `None` if the region itself was registered with
    /// the pages.
    part: Option<ReadGuard>,
}

impl Deref for RefreshGuard {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.part.as_deref().unwrap_or(&self.root)
    }
}

/// With keys of 4 bytes, the number of free indices that the table holds back, so that no key is
/// reused soon.
const RESTING_INDICES: usize = 256;

/// Counts of the open regions of a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) regions: u64,
    pub(super) page_registrations: u64,
    pub(super) bytes: u64,
}

/// The key of a new region.
#[derive(Clone, Copy)]
pub(super) enum NewKey<'a> {
    /// The key that the application requested, or an unused random key in its place.
    Requested(u64),
    /// A key that the NIC creates with the domain's secrets.
    Sealed(&'a DomainKeys),
}

/// The regions of a NIC.
pub(super) struct Regions {
    state: RwLock<State>,
}

struct State {
    slots: IndexTable,
    /// The indices of regions with a [`NewKey::Requested`], by domain and key. The hash function
    /// has no secret seed, because an application that chooses colliding keys slows down only its
    /// own lookups.
    requested: FxHashMap<(u32, u64), u32>,
}

/// The live regions by index, and the free indices.
struct IndexTable {
    all: Vec<Slot>,
    /// Free indices, the oldest first.
    free: VecDeque<u32>,
    /// The number of free indices that the table holds back from reuse. The table reuses them only
    /// after every index has been used once.
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
    /// The region's key in [`State::requested`]. `None` for a [`NewKey::Sealed`].
    requested: Option<u64>,
    /// The number of registered bytes. `None` for a sub-region, which uses the pages of its root.
    pinned: Option<u64>,
    /// The root of a sub-region. The root stays live as long as its sub-regions, because each is a
    /// dependent of the root or of another sub-region.
    root: Option<Token>,
    region: Arc<RwLock<Region>>,
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

    fn live(&self, index: u32, known: KnownGeneration) -> Option<&Live> {
        let slot = self.all.get(index as usize)?;
        slot.live.as_ref().filter(|_| known.matches(slot.generation))
    }

    /// Returns the live region that a handle of the domain names.
    fn find(&self, domain: u32, token: Token) -> Option<&Live> {
        let known = KnownGeneration::Whole(token.generation);
        self.live(token.index, known).filter(|live| live.domain == domain)
    }

    fn root_of(&self, live: &Live) -> Option<&Live> {
        let root = live.root?;
        Some(self.find(live.domain, root).expect("a region with dependents is not removed"))
    }

    /// Takes the read guards of a region and, for a sub-region, of its root (the region that was
    /// registered with the pages). `by_key` is true if a peer's key named the region, and false if
    /// a handle of the domain did. The caller holds the lock of the table.
    ///
    /// While the caller holds that lock, only a refresh can have a write guard:
    /// [`Regions::remove`] takes one after it removed the region from the table.
    #[inline]
    fn hold(&self, live: &Live, by_key: bool) -> Result<RegionGuard, Refusal> {
        let region = live.region.try_read_arc().ok_or(Refusal::Refreshing)?;
        region.check_usable(by_key)?;
        let root = match self.root_of(live) {
            Some(root) => Some(root.region.try_read_arc().ok_or(Refusal::Refreshing)?),
            None => None,
        };
        Ok(RegionGuard { region, _root: root })
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

impl Regions {
    pub(super) fn new(narrow: bool) -> Self {
        let resting = if narrow { RESTING_INDICES } else { 0 };
        let slots = IndexTable { all: Vec::new(), free: VecDeque::new(), resting };
        Self { state: RwLock::new(State { slots, requested: FxHashMap::default() }) }
    }

    /// Counts the open regions of a domain. Visits every region of the NIC.
    pub(super) fn counts(&self, domain: u32) -> Counts {
        let mut counts = Counts::default();
        for (_, live) in self.state.read().slots.of_domain(domain) {
            counts.regions += 1;
            counts.page_registrations += u64::from(live.pinned.is_some());
            counts.bytes += live.pinned.unwrap_or(0);
        }
        counts
    }

    /// Adds a live region and returns its token and key.
    ///
    /// # Errors
    /// - NoKey: the domain already has a region with the requested key.
    /// - OutOfResources: the table is full.
    pub(super) fn insert(
        &self,
        domain: u32,
        key: NewKey<'_>,
        attr: RegionAttr,
    ) -> Result<(Token, u64)> {
        let state = &mut *self.state.write();
        let (token, key, requested) = match key {
            NewKey::Requested(key) => {
                let Entry::Vacant(unused) = state.requested.entry((domain, key)) else {
                    return Err(key_in_use(key));
                };
                let token = state.slots.take()?;
                unused.insert(token.index);
                (token, key, Some(key))
            }
            NewKey::Sealed(keys) => {
                let token = state.slots.take()?;
                (token, keys.seal(token), None)
            }
        };
        let pinned = attr.parent.is_none().then_some(attr.len);
        let root = attr.root;
        let region = Arc::new(RwLock::new(Region::new(token, key, attr)));
        state.slots.all[token.index as usize].live =
            Some(Live { domain, dependents: 0, requested, pinned, root, region });
        Ok((token, key))
    }

    /// Removes a region. Returns the number of its registered bytes, and its parent if it is a
    /// sub-region.
    ///
    /// The key becomes invalid at once. When the method returns, no transfer uses the region, and
    /// its memory is released.
    ///
    /// # Errors
    /// - NoRegion: the handle is stale.
    /// - Busy: windows or sub-regions depend on the region.
    pub(super) fn remove(&self, domain: u32, token: Token) -> Result<(u64, Option<Token>)> {
        let live = {
            let mut state = self.state.write();
            let found = state.slots.find(domain, token).ok_or_else(|| stale("deregister"))?;
            if found.dependents > 0 {
                return Err(has_dependents(found.dependents));
            }
            let live = state.slots.all[token.index as usize].live.take();
            let live = live.expect("the region was just found");
            state.slots.free(token.index);
            if let Some(key) = live.requested {
                state.requested.remove(&(domain, key));
            }
            live
        };
        let (pieces, parent) = {
            // Waits for the transfers that use the region. No new transfer can find the region.
            let mut region = live.region.write();
            (std::mem::take(&mut region.attr.pieces), region.attr.parent)
        };
        drop(pieces);
        Ok((live.pinned.unwrap_or(0), parent))
    }

    /// Returns true if a region of the domain has this requested key.
    pub(super) fn is_requested(&self, domain: u32, key: u64) -> bool {
        self.state.read().requested.contains_key(&(domain, key))
    }

    /// Returns true if a descriptor names a live region of the domain now.
    ///
    /// A transfer checks this again when it takes a guard of the region.
    #[inline]
    pub(super) fn is_live(&self, domain: u32, token: Token) -> bool {
        self.state.read().slots.find(domain, token).is_some()
    }

    /// Returns a guard that keeps the region at an index registered during a transfer.
    ///
    /// `by_key` is true if a peer's key named the region, and false if a handle of the domain did.
    /// The call never waits for a region's lock: it fails if the region is being refreshed.
    #[inline]
    pub(super) fn hold(
        &self,
        domain: u32,
        index: u32,
        known: KnownGeneration,
        by_key: bool,
    ) -> Result<RegionGuard, Refusal> {
        let state = self.state.read();
        let live = state.slots.live(index, known).filter(|live| live.domain == domain);
        state.slots.hold(live.ok_or(Refusal::NoRegion)?, by_key)
    }

    /// Returns a guard that keeps the region with a requested key registered during a transfer.
    ///
    /// The call never waits for a region's lock: it fails if the region is being refreshed.
    #[inline]
    pub(super) fn hold_requested(&self, domain: u32, key: u64) -> Result<RegionGuard, Refusal> {
        let state = self.state.read();
        let index = *state.requested.get(&(domain, key)).ok_or(Refusal::NoRegion)?;
        let live = state.slots.all[index as usize].live.as_ref().ok_or(Refusal::NoRegion)?;
        state.slots.hold(live, true)
    }

    /// Waits for the transfers that use a region's pages. Later transfers fail until the guard is
    /// dropped.
    ///
    /// # Errors
    /// - NoRegion: the handle is stale.
    /// - Busy: another refresh of the pages is in progress.
    pub(super) fn refresh(&self, domain: u32, token: Token) -> Result<RefreshGuard> {
        let state = self.state.read();
        let live = state.slots.find(domain, token).ok_or_else(|| stale("refresh"))?;
        let root = state.slots.root_of(live);
        // At most one thread can have the upgradable guard. Transfers can have read guards beside
        // it.
        let root = root.unwrap_or(live).region.try_upgradable_read_arc().ok_or_else(refreshing)?;
        let part = live.root.is_some().then(|| Arc::clone(&live.region));
        drop(state);
        let root = ArcRwLockUpgradableReadGuard::upgrade(root);
        // May wait for a deregistration of the sub-region, which then has no pieces left.
        let part = part.map(|part| part.read_arc());
        Ok(RefreshGuard { root, part })
    }

    fn find(
        &self,
        domain: u32,
        token: Token,
        operation: &'static str,
    ) -> Result<Arc<RwLock<Region>>> {
        let state = self.state.read();
        let live = state.slots.find(domain, token).ok_or_else(|| stale(operation))?;
        Ok(Arc::clone(&live.region))
    }

    /// Calls `look` with a live region, enabled or not. Waits for a refresh but not for transfers.
    ///
    /// If the region has no dependent, another thread may deregister it at the same time. `look`
    /// may then see the region without pieces.
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
        let region = self.find(domain, token, operation)?;
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
        let mut state = self.state.write();
        state.slots.find_mut(domain, token).ok_or_else(|| stale(operation))?.dependents += 1;
        Ok(())
    }

    /// Records that a window or sub-region, which [`Regions::add_dependent`] has counted, no longer
    /// depends on the region.
    pub(super) fn remove_dependent(&self, domain: u32, token: Token) {
        let mut state = self.state.write();
        let base = state.slots.find_mut(domain, token);
        base.expect("a region with dependents is not removed").dependents -= 1;
    }

    /// Returns the tokens of a domain's regions.
    pub(super) fn tokens_of(&self, domain: u32) -> Vec<Token> {
        self.state.read().slots.of_domain(domain).map(|(token, _)| token).collect()
    }

    /// Reserves an index for a window. No region gets that index until [`Regions::free_index`].
    ///
    /// # Errors
    /// OutOfResources: the table is full.
    pub(super) fn reserve_index(&self) -> Result<u32> {
        Ok(self.state.write().slots.take()?.index)
    }

    /// Frees an index that [`Regions::reserve_index`] has reserved.
    pub(super) fn free_index(&self, index: u32) {
        self.state.write().slots.free(index);
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
    use crate::{Few, memory::PieceMemory, region::RegionPiece};

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
            parent: None,
            root: None,
            persistent: false,
            single_use: false,
            enabled: true,
        }
    }

    fn insert(regions: &Regions, attr: RegionAttr) -> Token {
        regions.insert(DOMAIN, NewKey::Requested(1), attr).unwrap().0
    }

    fn hold(regions: &Regions, token: Token, by_key: bool) -> Result<RegionGuard, Refusal> {
        let known = KnownGeneration::Whole(token.generation);
        regions.hold(DOMAIN, token.index, known, by_key)
    }

    #[test]
    fn token_is_stale_after_its_region_is_removed() {
        let regions = Regions::new(false);
        let first = insert(&regions, attr());
        regions.remove(DOMAIN, first).unwrap();
        let second = insert(&regions, attr());
        assert_eq!(first.index, second.index);
        assert_eq!(hold(&regions, first, true).unwrap_err(), Refusal::NoRegion);
        assert_eq!(hold(&regions, second, true).unwrap().token, second);
        assert!(!regions.is_live(DOMAIN, first) && regions.is_live(DOMAIN, second));
        assert!(regions.remove(DOMAIN, first).is_err());
        assert!(regions.remove(DOMAIN + 1, second).is_err());
    }

    #[test]
    fn single_use_key_serves_one_of_two_transfers() {
        let regions = Regions::new(false);
        let token = insert(&regions, RegionAttr { single_use: true, ..attr() });
        let hold_key = || regions.hold_requested(DOMAIN, 1);
        let (one, two) = (hold_key().unwrap(), hold_key().unwrap());
        assert!(one.spend() && !two.spend());
        assert_eq!(hold_key().unwrap_err(), Refusal::NoRegion);
        drop(hold(&regions, token, false).unwrap());
    }

    #[test]
    fn removal_waits_for_transfers_and_releases_the_memory() {
        let regions = Regions::new(false);
        let token = insert(&regions, attr());
        let user = hold(&regions, token, true).unwrap();
        std::thread::scope(|scope| {
            let removal = scope.spawn(|| regions.remove(DOMAIN, token).unwrap());
            while regions.is_live(DOMAIN, token) {
                std::thread::yield_now();
            }
            // A second hold by the same transfer is refused here, because a wait would be a
            // deadlock.
            assert_eq!(hold(&regions, token, true).unwrap_err(), Refusal::NoRegion);
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
        let user = hold(&regions, token, true).unwrap();
        std::thread::scope(|scope| {
            let refresh = scope.spawn(|| regions.refresh(DOMAIN, token).unwrap().attr.len);
            while hold(&regions, token, true).is_ok() {
                std::thread::yield_now();
            }
            assert_eq!(hold(&regions, token, true).unwrap_err(), Refusal::Refreshing);
            assert!(!refresh.is_finished());
            drop(user);
            refresh.join().unwrap();
        });
        drop(hold(&regions, token, true).unwrap());
    }

    #[test]
    fn freed_index_waits_for_reuse_with_4_byte_keys() {
        let regions = Regions::new(true);
        let keys = DomainKeys::new(4).unwrap();
        let mut last_seen = FxHashMap::default();
        for round in 0..10 * RESTING_INDICES {
            let (token, key) = regions.insert(DOMAIN, NewKey::Sealed(&keys), attr()).unwrap();
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
        regions.state.write().slots.all[token.index as usize].generation = u32::MAX;
        let old = insert(&regions, attr());
        assert_eq!((old.index, old.generation), (token.index, u32::MAX));
        regions.remove(DOMAIN, old).unwrap();
        assert_ne!(insert(&regions, attr()).index, token.index);
    }
}
