//! Areas that were found to be memory and nothing else, as long as no hook has run since.
//!
//! Asking the kernel costs a microsecond or more, at each registration; a program that registers
//! much and unmaps little asks once for each area. Whoever finds an area here takes no lock: a
//! version that is odd while somebody writes, and that is another one afterwards, says whether what
//! was read was whole.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

use hmem_core::{AddressRange, Result};
use hmem_hook::SubscriberTable;
use parking_lot::Mutex;

use super::{super::maps::Maps, NAME};

/// Areas that are remembered.
const REMEMBERED: usize = 16;

#[derive(Debug, Default)]
struct Area {
    start: AtomicU64,
    /// One past the last byte; 0 for none.
    end: AtomicU64,
}

/// What is known of the process's memory.
#[derive(Debug, Default)]
pub(super) struct AreaCache {
    version: AtomicU64,
    /// Of the table when the areas were found.
    stamp: AtomicU64,
    areas: [Area; REMEMBERED],
    /// Held by who writes: how many areas were written.
    writing: Mutex<usize>,
    maps: Maps,
}

impl AreaCache {
    /// Whether all of the range is memory that a monitor of this process sees the end of; the table
    /// is that of the hooks, which tell the caller of changes already.
    ///
    /// # Errors
    /// As [`Maps::check`].
    #[inline]
    pub(super) fn check(&self, table: &SubscriberTable, range: AddressRange) -> Result<()> {
        // Taken before looking, and none while a change is under way: what is found then may be
        // gone already.
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
        // What was read is older than the version that is read now.
        fence(Acquire);
        found && version.is_multiple_of(2) && self.version.load(Relaxed) == version
    }

    #[cold]
    fn remember(&self, stamp: u64, start: u64, end: u64) {
        let mut written = self.writing.lock();
        let version = self.version.load(Relaxed);
        self.version.store(version + 1, Relaxed);
        // Whoever reads something of what is written below reads another version than before.
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
