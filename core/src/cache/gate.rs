//! The word that every lookup reads first: whose it is, and whether it is open, closed by a monitor, or wiped because the process is a forked child.

use super::sync::{AtomicU64, Ordering};
#[cfg(loom)]
use crate::Result;

/// Set where lookups must fence: they are not to take the way on which they don't.
const FENCED: u64 = 1;
/// Added by each closing; above its bits stands the cache's number.
const CLOSING: u64 = 2;
const NUMBER: u32 = 16;

/// The word of cache `number` while lookups may hit without a fence.
pub(super) const fn plainly_open(number: u64) -> u64 {
    number << NUMBER
}

const fn opened(number: u64, fenced: bool) -> u64 {
    plainly_open(number) | if fenced { FENCED } else { 0 }
}

/// The word, on a page of its own that the kernel zeroes in a forked child (`MADV_WIPEONFORK`), however the fork was made.
pub(super) struct Gate {
    #[cfg(not(loom))]
    page: std::ptr::NonNull<AtomicU64>,
    #[cfg(loom)]
    word: AtomicU64,
}

#[cfg(not(loom))]
mod page {
    use std::ptr::{self, NonNull};

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::{AtomicU64, Gate, Ordering};
    use crate::{Error, Result};

    /// The largest page of any architecture here.
    const LEN: usize = 1 << 16;

    // SAFETY: the page holds one atomic, which any thread may use, and is unmapped once, by Drop.
    unsafe impl Send for Gate {}
    // SAFETY: as above.
    unsafe impl Sync for Gate {}

    impl Gate {
        pub(in crate::cache) fn new(number: u64, fenced: bool) -> Result<Self> {
            let len = LEN;
            // SAFETY: a new mapping replaces nothing.
            let page = unsafe {
                mmap_anonymous(
                    ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE,
                )
            }
            .map_err(|errno| Error::os(errno, "mmap"))?;
            let page = NonNull::new(page.cast()).expect("a mapping is not at address 0");
            let gate = Self { page };
            // SAFETY: the page is this gate's own.
            unsafe { madvise(page.as_ptr().cast(), len, Advice::LinuxWipeOnFork) }.map_err(
                |errno| {
                    Error::os(errno, "madvise")
                        .context("advice", "MADV_WIPEONFORK")
                        .remedy("the registration cache must notice a fork: it needs Linux 4.14")
                },
            )?;
            gate.word().store(super::opened(number, fenced), Ordering::Release);
            Ok(gate)
        }

        #[inline(always)]
        pub(super) fn word(&self) -> &AtomicU64 {
            // SAFETY: the page stays mapped as long as the gate lives, and holds an atomic from the start: zero is one.
            unsafe { self.page.as_ref() }
        }
    }

    impl Drop for Gate {
        fn drop(&mut self) {
            // SAFETY: the page is this gate's own, and references to it have ended.
            if let Err(errno) = unsafe { munmap(self.page.as_ptr().cast(), LEN) } {
                tracing::error!(%errno, "a page of a registration cache is leaked");
            }
        }
    }
}

impl Gate {
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

    /// Whether this process is a forked child of the one that made the cache: no lock, entry or thread of it is usable.
    pub(super) fn is_forked(&self) -> bool {
        self.read() >> NUMBER == 0
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
