//! Which addresses of the window the next allocation gets.

use std::collections::VecDeque;

use super::ranges::FreeRanges;

/// Whether a freed address comes back at once: the trap that stale registrations fall into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressReuse {
    /// An address comes back only when the whole window has been used.
    #[default]
    Off,
    /// The next allocation that fits gets the address that was freed last, as CUDA's allocator
    /// tends to do.
    JustFreed,
}

/// Freed ranges that are remembered for reuse.
const REMEMBERED: usize = 1024;

/// The window's addresses, in pages from its start.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    free: FreeRanges,
    next: u64,
    freed: VecDeque<(u64, u64)>,
    reuse: AddressReuse,
}

impl AddressSpace {
    pub(crate) fn new(pages: u64, reuse: AddressReuse) -> Self {
        Self { free: FreeRanges::new(0, pages), next: 0, freed: VecDeque::new(), reuse }
    }

    pub(crate) fn set_reuse(&mut self, reuse: AddressReuse) {
        self.reuse = reuse;
    }

    /// The first page of `pages` free ones.
    pub(crate) fn take(&mut self, pages: u64) -> Option<u64> {
        if self.reuse == AddressReuse::JustFreed
            && let Some(start) = self.take_just_freed(pages)
        {
            return Some(start);
        }
        let start =
            self.free.take_from(self.next, pages).or_else(|| self.free.take_from(0, pages))?;
        self.next = start + pages;
        Some(start)
    }

    fn take_just_freed(&mut self, pages: u64) -> Option<u64> {
        // A remembered range may be gone: addresses are handed out of it without looking here.
        let found = self.freed.iter().rposition(|(_, len)| *len >= pages)?;
        let (start, _) = self.freed.remove(found)?;
        self.free.take_at(start, pages).then_some(start)
    }

    pub(crate) fn give(&mut self, start: u64, pages: u64) {
        self.free.give(start, pages);
        if self.freed.len() == REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back((start, pages));
    }
}
