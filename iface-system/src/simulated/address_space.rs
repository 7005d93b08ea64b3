//! Allocation of addresses in the window.

use std::collections::VecDeque;

use super::ranges::FreeRanges;

/// The moment at which a freed address is reused. Reuse is what stale registrations fail on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressReuse {
    /// An address is reused only after the whole window was used.
    #[default]
    Off,
    /// The next allocation that fits gets the address that was freed last, as CUDA's allocator
    /// often does.
    JustFreed,
}

/// Number of freed ranges that are remembered for reuse.
const REMEMBERED: usize = 1024;

/// The addresses of the window, in pages from its start.
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

    /// Takes `pages` free pages, and returns the first.
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
        // A remembered range may be in use: other allocations take addresses without looking here.
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
