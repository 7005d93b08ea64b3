//! The budget of mappings: the mappings of the process that its userfaultfd monitors may use.
//!
//! A watched range is *separate* if it touches no other watched range. The kernel keeps each
//! separate range in a mapping of its own. The kernel allows a process `vm.max_map_count` mappings,
//! which the application needs too. So the monitors use only a small part of these mappings, and
//! refuse ranges if the whole process comes near the limit.
//!
//! The limit applies to the whole process. So all monitors of a process count their ranges
//! together. The count starts at zero in a forked child.

use std::{
    fs::{self, File},
    io::Read,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use hmem_core::{Result, WipedOnFork};
use rustix::io::Errno;

use super::NAME;

/// Divisor of the kernel's limit: all monitors of a process together use at most `limit / SHARE`
/// mappings.
const SHARE: usize = 16;

/// Divisor of the kernel's limit for the reserve of the application. Monitors watch no further
/// range if the rest of the process has more than `limit - limit / SHARE - limit / SPARE` mappings.
/// The rest means all mappings except those of watched ranges.
const SPARE: usize = 64;

/// The kernel's default of `vm.max_map_count`, which is used if `/proc` does not show the real
/// value.
const DEFAULT: usize = 65_530;

/// The number of calls of [`Budget::reserve`] between two counts of the process's mappings. If the
/// process has many mappings, there are more calls between two counts. Near the limit, the number
/// is [`REFUSALS_BETWEEN_COUNTS`] instead.
const BETWEEN_COUNTS: usize = 1024;

/// The number of refused ranges after which the process's mappings are counted again. Only a new
/// count shows that the application has unmapped other memory, so that there is room again.
/// Counting at each refusal would be slow: a count of 60,000 mappings takes some 10 ms.
const REFUSALS_BETWEEN_COUNTS: usize = 64;

/// The number of separate (not adjacent) ranges that all userfaultfd monitors of this process
/// watch.
static WATCHED: OnceLock<WipedOnFork<AtomicUsize>> = OnceLock::new();

/// The reason why a monitor does not watch a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unwatched {
    /// The monitors of the process together have used up their share of the kernel's limit.
    Share,
    /// The whole process is near the kernel's limit on the number of mappings.
    Process,
    /// The kernel has refused to watch the range, with this errno.
    Kernel(Errno),
}

/// The state by which one monitor decides if it may watch more ranges.
#[derive(Debug)]
pub(super) struct Budget {
    /// The value of `vm.max_map_count`.
    pub(super) limit: usize,
    /// The number of separate (not adjacent) ranges that all monitors of the process watch.
    all: &'static AtomicUsize,
    /// The number of separate (not adjacent) ranges that this monitor watches.
    own: usize,
    /// The number of calls of [`Budget::reserve`] that are left until the next count of the
    /// process's mappings. Calls that reserve nothing, or that fail with [`Unwatched::Share`], are
    /// not counted.
    until_count: usize,
    /// True if the process is near the kernel's limit on mappings: the last count showed it, or the
    /// kernel has refused a mapping since.
    crowded: bool,
}

impl Budget {
    /// Creates the budget of a monitor that watches nothing.
    ///
    /// # Errors
    /// The errors of [`WipedOnFork::new`].
    pub(super) fn new() -> Result<Self> {
        let all = match WATCHED.get() {
            Some(all) => all,
            None => {
                let all = WipedOnFork::new().map_err(|error| NAME.add_to(error))?;
                WATCHED.get_or_init(|| all)
            }
        };
        let limit = fs::read_to_string("/proc/sys/vm/max_map_count");
        let limit = limit.ok().and_then(|limit| limit.trim().parse().ok()).unwrap_or(DEFAULT);
        Ok(Self { limit, all, own: 0, until_count: 0, crowded: false })
    }

    /// Reserves mappings, so that this monitor may watch `own` separate ranges in total. Succeeds
    /// at once if the monitor watches that many already.
    ///
    /// Then the caller asks the kernel to watch the ranges. After that, the caller passes the real
    /// number of watched ranges to [`Budget::set_watched`]. The caller also does so if this method
    /// or the kernel fails.
    ///
    /// # Errors
    /// - [`Unwatched::Share`]: the process's monitors would exceed their share.
    /// - [`Unwatched::Process`]: the process has few mappings left.
    pub(super) fn reserve(&mut self, own: usize) -> Result<(), Unwatched> {
        if own <= self.own {
            return Ok(());
        }
        let (new, most) = (own - self.own, ranges(self.limit));
        let more = |all| Some(all + new).filter(|all| *all <= most);
        let all = self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let watched = all.map_err(|_| Unwatched::Share)? + new;
        self.own = own;
        if self.until_count == 0 {
            let mappings = mappings();
            // `mappings` includes the mappings of watched ranges: two for each range.
            let others = mappings.saturating_sub(2 * watched);
            self.crowded = others > self.limit - self.limit / SHARE - self.limit / SPARE;
            // Counting takes longer the more mappings there are, so the next count comes later. In
            // a crowded process, each call before the next count is a refusal, and 64 refusals
            // lead to that count.
            self.until_count = match self.crowded {
                true => REFUSALS_BETWEEN_COUNTS,
                false => BETWEEN_COUNTS.max(mappings / 8),
            };
        }
        self.until_count -= 1;
        if self.crowded { Err(Unwatched::Process) } else { Ok(()) }
    }

    /// Records that this monitor now watches `own` separate ranges.
    pub(super) fn set_watched(&mut self, own: usize) {
        // The number also grows when the middle of a range is no longer watched: the range becomes
        // two.
        self.all.fetch_add(own.wrapping_sub(self.own), Ordering::Relaxed);
        self.own = own;
    }

    /// Records that the kernel has refused a mapping because the process is at its limit. Until the
    /// next count of mappings, the budget allows no further ranges.
    pub(super) fn refused(&mut self) {
        (self.crowded, self.until_count) = (true, REFUSALS_BETWEEN_COUNTS);
    }
}

/// Returns the maximum number of separate (not adjacent) ranges that all monitors of a process may
/// watch together, if `vm.max_map_count` is `limit`. Each range counts as two mappings, because
/// each of its ends may split a mapping.
pub(super) fn ranges(limit: usize) -> usize {
    limit / SHARE / 2
}

/// Returns the number of the process's mappings. If `/proc/self/maps` cannot be read, returns the
/// number of those that were read.
fn mappings() -> usize {
    let mut text = [0_u8; 1 << 14];
    let mut lines = 0;
    let Ok(mut maps) = File::open("/proc/self/maps") else { return 0 };
    loop {
        match maps.read(&mut text) {
            Ok(0) | Err(_) => return lines,
            Ok(read) => lines += text[..read].iter().filter(|byte| **byte == b'\n').count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use hmem_core::Mapping;
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;
    use crate::sys::page_size;

    fn budget(limit: usize, all: &'static AtomicUsize) -> Budget {
        Budget { limit, all, own: 0, until_count: 0, crowded: false }
    }

    /// Creates 40 shared mappings, which the kernel does not merge. So the process has more than 34
    /// mappings, which is too many for a budget with a limit of 32.
    fn more_mappings_than_34() -> Vec<Mapping> {
        let map = |_| {
            let access = ProtFlags::READ;
            Mapping::anonymous(page_size() as usize, access, MapFlags::SHARED).expect("mmap")
        };
        let held: Vec<_> = (0..40).map(map).collect();
        assert!(mappings() > 34);
        held
    }

    #[test]
    fn the_budget_is_a_share_of_the_limit_and_ends_near_it() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let mut large = budget(1_000_000, &ALL);
        assert_eq!(ranges(large.limit), 31_250);
        assert_eq!(large.reserve(31_250), Ok(()));
        assert_eq!(large.reserve(31_251), Err(Unwatched::Share));
        large.set_watched(0);
        large.refused();
        assert_eq!(large.reserve(1), Err(Unwatched::Process));
        large.set_watched(0);
        let _held = more_mappings_than_34();
        assert_eq!(budget(32, &ALL).reserve(1), Err(Unwatched::Process));
    }

    /// MON-10: after 64 refusals for lack of mappings, a monitor counts the mappings again, and so
    /// finds out that the process has freed some.
    #[test]
    fn mappings_are_counted_again_after_64_refusals() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let _held = more_mappings_than_34();
        let mut budget = budget(32, &ALL);
        let refused = |budget: &mut Budget| {
            let reserved = budget.reserve(1);
            budget.set_watched(0);
            reserved == Err(Unwatched::Process)
        };
        assert!(refused(&mut budget));
        // The test process has fewer mappings than this limit allows, so the next count ends the
        // refusals.
        budget.limit = 1_000_000;
        assert_eq!((0..10_000).take_while(|_| refused(&mut budget)).count(), 63);
        budget.refused();
        assert_eq!((0..10_000).take_while(|_| refused(&mut budget)).count(), 64);
    }

    /// MON-10: the limit on watched ranges applies to all monitors together. A monitor that watches
    /// fewer ranges leaves the difference to the others.
    #[test]
    fn monitors_share_one_budget_and_return_their_part() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let (mut first, mut second) = (budget(1_000_000, &ALL), budget(1_000_000, &ALL));
        assert_eq!(first.reserve(31_000), Ok(()));
        assert_eq!(second.reserve(250), Ok(()));
        assert_eq!(second.reserve(251), Err(Unwatched::Share));
        assert_eq!(first.reserve(31_001), Err(Unwatched::Share));
        first.set_watched(30_999);
        assert_eq!(second.reserve(251), Ok(()));
        second.set_watched(0);
        first.set_watched(0);
        assert_eq!(ALL.load(Ordering::Relaxed), 0);
    }
}
