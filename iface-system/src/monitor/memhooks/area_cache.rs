//! A cache of mappings that have passed [`Maps::check`]. It is valid until the next hook runs.
//!
//! A query of the kernel costs a microsecond or more at each registration. With the cache, a
//! program that registers much and unmaps little needs one query for each mapping. A lookup takes
//! no lock: it is consistent if a version number is even and has the same value before and after
//! the lookup. A writer makes the version odd while it writes.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

use hmem_core::{AddressRange, Result};
use hmem_hook::SubscriberTable;
use parking_lot::Mutex;

use super::{super::maps::Maps, NAME};

/// Maximum number of mappings in the cache.
const REMEMBERED: usize = 16;

#[derive(Debug, Default)]
struct Area {
    start: AtomicU64,
    /// Address one past the last byte; 0 for an empty slot.
    end: AtomicU64,
}

/// The cached mappings of this process.
#[derive(Debug, Default)]
pub(super) struct AreaCache {
    version: AtomicU64,
    /// The subscriber table's [`quiet_stamp`](SubscriberTable::quiet_stamp) at the time of the
    /// queries. It changes when a hook runs.
    stamp: AtomicU64,
    areas: [Area; REMEMBERED],
    /// The writers' lock, with the number of areas written so far.
    writing: Mutex<usize>,
    maps: Maps,
}

impl AreaCache {
    /// Checks that a monitor of this process can see every change of a range. `table` is the table
    /// of the hooks, in which the caller is already subscribed.
    ///
    /// # Errors
    /// The errors of [`Maps::check`].
    #[inline]
    pub(super) fn check(&self, table: &SubscriberTable, range: AddressRange) -> Result<()> {
        // Read before the query, and `None` while a hook runs: a mapping found then may be unmapped
        // already.
        let stamp = table.quiet_stamp();
        if stamp.is_some_and(|stamp| self.holds(stamp, range)) {
            return Ok(());
        }
        let area = self.maps.check(range, NAME.name)?;
        if let Some(stamp) = stamp {
            self.remember(stamp, area.start, area.end);
        }
        Ok(())
    }

    #[inline]
    fn holds(&self, stamp: u64, range: AddressRange) -> bool {
        let first = range.start().0;
        let last = first.saturating_add(range.len().saturating_sub(1));
        let version = self.version.load(Acquire);
        let within =
            |area: &Area| area.start.load(Relaxed) <= first && last < area.end.load(Relaxed);
        let found = self.stamp.load(Relaxed) == stamp && self.areas.iter().any(within);
        // Orders the reads above before the second read of the version.
        fence(Acquire);
        found && version.is_multiple_of(2) && self.version.load(Relaxed) == version
    }

    #[cold]
    fn remember(&self, stamp: u64, start: u64, end: u64) {
        let mut written = self.writing.lock();
        let version = self.version.load(Relaxed);
        self.version.store(version + 1, Relaxed);
        // A reader that sees one of the stores below also sees the new version.
        fence(Release);
        if self.stamp.load(Relaxed) != stamp {
            self.areas.iter().for_each(|area| area.end.store(0, Relaxed));
            self.stamp.store(stamp, Relaxed);
            *written = 0;
        }
        let area = &self.areas[*written % REMEMBERED];
        area.start.store(start, Relaxed);
        area.end.store(end, Relaxed);
        *written += 1;
        self.version.store(version + 2, Release);
    }
}
