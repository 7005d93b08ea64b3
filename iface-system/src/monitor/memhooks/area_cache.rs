//! A cache of mappings that have passed [`Maps::check`]. The content becomes invalid when the next
//! hook runs.
//!
//! A query of the kernel costs a microsecond or more. Without the cache, each registration would
//! need a query. With it, a program that registers much and unmaps little needs one for each
//! mapping.
//!
//! A lookup takes no lock. A writer makes a version number odd while it writes. So the result of a
//! lookup counts only if the version was even and did not change during the lookup.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

use hmem_core::{AddressRange, Result};
use hmem_hook::SubscriberTable;
use parking_lot::Mutex;

use super::{super::maps::Maps, NAME};

/// Maximum number of mappings in an [`AreaCache`].
const REMEMBERED: usize = 16;

#[derive(Debug, Default)]
struct CachedArea {
    start: AtomicU64,
    /// Address one past the last byte of the cached mapping, or 0 if this slot of the cache is
    /// empty.
    end: AtomicU64,
}

/// A cache of mappings that have passed [`Maps::check`]: a monitor in this process can see every
/// change of them.
#[derive(Debug, Default)]
pub(super) struct AreaCache {
    /// Sequence number of the cache's content, which is odd while a thread changes the content.
    version: AtomicU64,
    /// The version of the hooks' subscriber table ([`quiet_stamp`](SubscriberTable::quiet_stamp))
    /// at which the mappings were cached. Each hook that runs changes the table's version. The
    /// cached mappings are valid only while the two versions are equal.
    stamp: AtomicU64,
    areas: [CachedArea; REMEMBERED],
    /// Lock that a thread holds while it inserts a mapping into this cache. The value is the number
    /// of mappings that were inserted since `stamp` was last set.
    writing: Mutex<usize>,
    maps: Maps,
}

impl AreaCache {
    /// Checks that a monitor in this process can see every change of a range, like [`Maps::check`].
    /// `table` is the hooks' table of subscribers. The caller must have added its invalidator to
    /// that table.
    ///
    /// # Errors
    /// The errors of [`Maps::check`].
    #[inline]
    pub(super) fn check(&self, table: &SubscriberTable, range: AddressRange) -> Result<()> {
        // The stamp is read before the query. It is `None` while a hook runs, because a mapping
        // that the query finds may then be unmapped already.
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
            |area: &CachedArea| area.start.load(Relaxed) <= first && last < area.end.load(Relaxed);
        let found = self.stamp.load(Relaxed) == stamp && self.areas.iter().any(within);
        // The fence orders the reads above before the second read of the version.
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
