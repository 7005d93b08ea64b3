//! The gate of a cache: a word that every lookup loads first. A lookup that begins while the gate
//! is closed does not hit until the gate opens.
//!
//! The word holds the cache's number, the number of closes that were not undone, and two flags. The
//! word is 0 in a forked child.

use super::sync::{AtomicU64, Ordering};
use crate::Result;
#[cfg(not(loom))]
use crate::WipedOnFork;

/// A bit of the gate's word, set if each lookup of the cache needs a memory fence. The bit disables
/// fast lookups, which issue no fence.
const FENCED: u64 = 1;
/// A bit of the gate's word, set if the gate is closed permanently.
const CLOSED_PERMANENTLY: u64 = 2;
/// The amount by which each [`Gate::close`] increases the gate's word.
const CLOSE: u64 = 4;
/// The position of the lowest bit of the cache's number in the gate's word.
const NUMBER: u32 = 16;

/// Returns the value that the gate's word has while fast lookups are enabled. `number` is the
/// cache's number.
pub(super) const fn fast_open(number: u64) -> u64 {
    number << NUMBER
}

/// A switch that disables all hits while it is closed.
///
/// The word has a page of its own, which the kernel zeroes in a forked child (`MADV_WIPEONFORK`),
/// whichever system call forked it.
pub(super) struct Gate {
    #[cfg(not(loom))]
    word: WipedOnFork<AtomicU64>,
    #[cfg(loom)]
    word: AtomicU64,
}

impl Gate {
    /// Creates the open gate of the cache with this number. `fenced` is true if each lookup of the
    /// cache needs a memory fence.
    pub(super) fn new(number: u64, fenced: bool) -> Result<Self> {
        #[cfg(not(loom))]
        let word = WipedOnFork::<AtomicU64>::new()?;
        #[cfg(loom)]
        let word = AtomicU64::new(0);
        word.store(fast_open(number) | if fenced { FENCED } else { 0 }, Ordering::Release);
        Ok(Self { word })
    }

    /// Loads the gate's word. Fast lookups are enabled if and only if it equals [`fast_open`] of
    /// the cache's number.
    #[inline(always)]
    pub(super) fn load(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// Returns whether the gate is open, so that lookups may hit.
    pub(super) fn is_open(&self) -> bool {
        let word = self.load();
        word != 0 && word & ((1 << NUMBER) - 1) & !FENCED == 0
    }

    /// Returns whether this process is a forked child of the process that created the cache. The
    /// child must not use the cache's locks, entries or thread.
    pub(super) fn is_forked(&self) -> bool {
        self.load() >> NUMBER == 0
    }

    /// Closes the gate permanently. Returns `true` if this call closed it, `false` if an earlier
    /// call did.
    pub(super) fn close_permanently(&self) -> bool {
        self.word.fetch_or(CLOSED_PERMANENTLY, Ordering::SeqCst) & CLOSED_PERMANENTLY == 0
    }

    /// Returns whether the gate is closed permanently.
    pub(super) fn is_closed_permanently(&self) -> bool {
        self.load() & CLOSED_PERMANENTLY != 0
    }

    /// Closes the gate until a matching [`Gate::open`]. Closes may be nested. Does nothing in a
    /// forked child, where the gate stays closed.
    pub(super) fn close(&self) {
        if !self.is_forked() {
            self.word.fetch_add(CLOSE, Ordering::SeqCst);
        }
    }

    /// Undoes one call of [`Gate::close`]. The gate is open again when all calls are undone.
    ///
    /// Does nothing in a forked child, where the gate stays closed. The fork may have come between
    /// the two calls of a pair, so that the child calls `open` alone.
    pub(super) fn open(&self) {
        if !self.is_forked() {
            self.word.fetch_sub(CLOSE, Ordering::SeqCst);
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("open", &self.is_open()).finish_non_exhaustive()
    }
}
