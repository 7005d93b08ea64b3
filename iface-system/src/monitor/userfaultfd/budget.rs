//! The budget of mappings: the number of the process's mappings that its monitors may use.
//!
//! A watched range is *separate* if it touches no other watched range. The kernel makes a separate
//! mapping of each of them. It allows a process `vm.max_map_count` mappings, which the application
//! needs too. So the monitors use only a small share of them. They refuse ranges earlier if the
//! process comes near the limit.
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

use hmem_core::Result;
use hmem_hook::WipedOnFork;

use super::NAME;

/// The monitors together use at most 1/`SHARE` of the mappings that the kernel permits a process.
const SHARE: usize = 16;

/// At least 1/`SPARE` of these mappings always stays free for the process.
const SPARE: usize = 64;

/// The kernel's default of `vm.max_map_count`, used if the file cannot be read.
const DEFAULT: usize = 65_530;

/// The minimum number of new watched ranges between two counts of the process's mappings.
const BETWEEN_COUNTS: usize = 1024;

/// The number of separate ranges that all monitors of this process watch.
static WATCHED: OnceLock<WipedOnFork<AtomicUsize>> = OnceLock::new();

/// The reason why a range is beyond the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beyond {
    /// The monitors of the process have used their share.
    Share,
    /// The process has few mappings left.
    Process,
}

/// The budget of one monitor: decides whether it may watch more ranges.
#[derive(Debug)]
pub(super) struct Budget {
    /// The value of `vm.max_map_count`.
    limit: usize,
    /// The number of separate ranges that all monitors of the process watch.
    all: &'static AtomicUsize,
    /// The number of separate ranges that this monitor watches.
    own: usize,
    until_count: usize,
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
                let all = WipedOnFork::new(NAME)?;
                WATCHED.get_or_init(|| all)
            }
        };
        let limit = fs::read_to_string("/proc/sys/vm/max_map_count");
        let limit = limit.ok().and_then(|limit| limit.trim().parse().ok()).unwrap_or(DEFAULT);
        Ok(Self { limit, all, own: 0, until_count: 0, crowded: false })
    }

    /// Returns `vm.max_map_count`, the kernel's limit on the mappings of a process.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the maximum number of separate ranges that all monitors of a process may watch
    /// together. Each range counts as two mappings, because each of its ends may split a mapping.
    pub(super) fn ranges(&self) -> usize {
        self.limit / SHARE / 2
    }

    /// Counts the new ranges of a monitor that wants to watch `own` separate ranges. Fails beyond
    /// the budget.
    ///
    /// After the call to the kernel, the caller sets the real number by [`Budget::detects`].
    pub(super) fn allows(&mut self, own: usize) -> Result<(), Beyond> {
        if own <= self.own {
            return Ok(());
        }
        let (new, most) = (own - self.own, self.ranges());
        let more = |all| Some(all + new).filter(|all| *all <= most);
        let all = self.all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let ranges = all.map_err(|_| Beyond::Share)? + new;
        self.own = own;
        if self.until_count == 0 {
            let mappings = mappings();
            // The more mappings there are, the longer a count takes.
            self.until_count = BETWEEN_COUNTS.max(mappings / 8);
            // `ranges` is counted as two mappings each, as it will be.
            let others = mappings.saturating_sub(2 * ranges);
            self.crowded = others > self.limit - self.limit / SHARE - self.limit / SPARE;
        }
        self.until_count -= 1;
        if self.crowded { Err(Beyond::Process) } else { Ok(()) }
    }

    /// Sets the number of separate ranges that the monitor watches now.
    pub(super) fn detects(&mut self, own: usize) {
        // The number may grow on a removal: ranges fall apart when the one that joined them is
        // removed.
        self.all.fetch_add(own.wrapping_sub(self.own), Ordering::Relaxed);
        self.own = own;
    }

    /// Records that the kernel has refused a mapping: the process is at its limit.
    pub(super) fn refused(&mut self) {
        (self.crowded, self.until_count) = (true, BETWEEN_COUNTS);
    }
}

/// Returns the number of the process's mappings, or 0 if `/proc/self/maps` cannot be opened.
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
    use super::*;

    fn budget(limit: usize, all: &'static AtomicUsize) -> Budget {
        Budget { limit, all, own: 0, until_count: 0, crowded: false }
    }

    #[test]
    fn the_budget_is_a_share_of_the_limit_and_ends_near_it() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let mut large = budget(1_000_000, &ALL);
        assert_eq!(large.ranges(), 31_250);
        assert_eq!(large.allows(31_250), Ok(()));
        assert_eq!(large.allows(31_251), Err(Beyond::Share));
        large.detects(0);
        large.refused();
        assert_eq!(large.allows(1), Err(Beyond::Process));
        large.detects(0);
        // The process has more mappings than this.
        assert!(mappings() > 34);
        assert_eq!(budget(32, &ALL).allows(1), Err(Beyond::Process));
    }

    /// MON-10
    #[test]
    fn monitors_share_one_budget_and_give_back_their_part() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let (mut first, mut second) = (budget(1_000_000, &ALL), budget(1_000_000, &ALL));
        assert_eq!(first.allows(31_000), Ok(()));
        assert_eq!(second.allows(250), Ok(()));
        assert_eq!(second.allows(251), Err(Beyond::Share));
        assert_eq!(first.allows(31_001), Err(Beyond::Share));
        first.detects(30_999);
        assert_eq!(second.allows(251), Ok(()));
        second.detects(0);
        first.detects(0);
        assert_eq!(ALL.load(Ordering::Relaxed), 0);
    }
}
