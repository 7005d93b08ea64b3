//! The gate: a word that every lookup loads first. It holds the cache's number and a count of
//! closes, and is 0 after a fork.

use super::sync::{AtomicU64, Ordering};
use crate::Result;
#[cfg(not(loom))]
use crate::process::WipedWord;

/// Set if lookups must fence. Fast lookups, which do not fence, then see a closed gate.
const FENCED: u64 = 1;
/// Set once the gate is closed permanently.
const CLOSED_PERMANENTLY: u64 = 2;
/// The amount by which each close increases the word. The higher bits hold the cache's number.
const CLOSE: u64 = 4;
const NUMBER: u32 = 16;

/// Returns the value that the word of cache `number` has while fast lookups are enabled.
pub(super) const fn fast_open(number: u64) -> u64 {
    number << NUMBER
}

const fn open(number: u64, fenced: bool) -> u64 {
    fast_open(number) | if fenced { FENCED } else { 0 }
}

/// A switch that disables all hits while it is closed.
///
/// The word has a page of its own, which the kernel zeroes in a forked child (`MADV_WIPEONFORK`),
/// however the fork was made.
pub(super) struct Gate {
    #[cfg(not(loom))]
    word: WipedWord,
    #[cfg(loom)]
    word: AtomicU64,
}

impl Gate {
    #[cfg(not(loom))]
    pub(super) fn new(number: u64, fenced: bool) -> Result<Self> {
        let word = WipedWord::new()?;
        word.get().store(open(number, fenced), Ordering::Release);
        Ok(Self { word })
    }

    #[cfg(not(loom))]
    #[inline(always)]
    fn word(&self) -> &AtomicU64 {
        self.word.get()
    }

    #[cfg(loom)]
    pub(super) fn new(number: u64, fenced: bool) -> Result<Self> {
        Ok(Self { word: AtomicU64::new(open(number, fenced)) })
    }

    #[cfg(loom)]
    fn word(&self) -> &AtomicU64 {
        &self.word
    }

    /// Loads the word. Fast lookups are enabled if and only if it equals `fast_open(number)` for
    /// the cache's number ([`fast_open`]).
    #[inline(always)]
    pub(super) fn load(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }

    /// Returns whether lookups may hit.
    pub(super) fn is_open(&self) -> bool {
        let word = self.load();
        word != 0 && word & ((1 << NUMBER) - 1) & !FENCED == 0
    }

    /// Returns whether this process is a forked child of the process that created the cache. The
    /// child can use no lock, entry or thread of the cache.
    pub(super) fn is_forked(&self) -> bool {
        self.load() >> NUMBER == 0
    }

    /// Closes the gate permanently. Returns `true` if this call closed it, `false` if an earlier
    /// call did.
    pub(super) fn close_permanently(&self) -> bool {
        self.word().fetch_or(CLOSED_PERMANENTLY, Ordering::SeqCst) & CLOSED_PERMANENTLY == 0
    }

    /// Returns whether the gate is closed permanently.
    pub(super) fn is_closed_permanently(&self) -> bool {
        self.load() & CLOSED_PERMANENTLY != 0
    }

    /// Closes the gate until a matching [`Gate::open`]. Closes may be nested.
    pub(super) fn close(&self) {
        self.word().fetch_add(CLOSE, Ordering::SeqCst);
    }

    /// Undoes one [`Gate::close`].
    pub(super) fn open(&self) {
        self.word().fetch_sub(CLOSE, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("open", &self.is_open()).finish_non_exhaustive()
    }
}
