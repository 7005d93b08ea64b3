//! The word that every lookup reads first: whose it is, and whether it is open, closed by a
//! monitor, or wiped because the process is a forked child.

use super::sync::{AtomicU64, Ordering};
use crate::Result;
#[cfg(not(loom))]
use crate::process::WipedWord;

/// Set where lookups must fence: they are not to take the way on which they don't.
const FENCED: u64 = 1;
/// Set when the gate is closed for good.
const SHUT: u64 = 2;
/// Added by each closing; above its bits stands the cache's number.
const CLOSING: u64 = 4;
const NUMBER: u32 = 16;

/// The word of cache `number` while lookups may hit without a fence.
pub(super) const fn plainly_open(number: u64) -> u64 {
    number << NUMBER
}

const fn opened(number: u64, fenced: bool) -> u64 {
    plainly_open(number) | if fenced { FENCED } else { 0 }
}

/// The word, on a page of its own that the kernel zeroes in a forked child (`MADV_WIPEONFORK`),
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
        word.get().store(opened(number, fenced), Ordering::Release);
        Ok(Self { word })
    }

    #[cfg(not(loom))]
    #[inline(always)]
    fn word(&self) -> &AtomicU64 {
        self.word.get()
    }

    #[cfg(loom)]
    pub(super) fn new(number: u64, fenced: bool) -> Result<Self> {
        Ok(Self { word: AtomicU64::new(opened(number, fenced)) })
    }

    #[cfg(loom)]
    fn word(&self) -> &AtomicU64 {
        &self.word
    }

    /// The word: [`plainly_open`] of the cache's number as long as lookups may hit without a fence.
    #[inline(always)]
    pub(super) fn read(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }

    /// Whether lookups may hit.
    pub(super) fn is_open(&self) -> bool {
        let word = self.read();
        word != 0 && word & ((1 << NUMBER) - 1) & !FENCED == 0
    }

    /// Whether this process is a forked child of the one that made the cache: no lock, entry or
    /// thread of it is usable.
    pub(super) fn is_forked(&self) -> bool {
        self.read() >> NUMBER == 0
    }

    /// Closes the gate for good. Returns `true` if this call closed it, `false` if an earlier call
    /// did.
    pub(super) fn shut(&self) -> bool {
        self.word().fetch_or(SHUT, Ordering::SeqCst) & SHUT == 0
    }

    /// Returns whether the gate is closed for good.
    pub(super) fn is_shut(&self) -> bool {
        self.read() & SHUT != 0
    }

    pub(super) fn close(&self) {
        self.word().fetch_add(CLOSING, Ordering::SeqCst);
    }

    pub(super) fn open(&self) {
        self.word().fetch_sub(CLOSING, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("open", &self.is_open()).finish_non_exhaustive()
    }
}
