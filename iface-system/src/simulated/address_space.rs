//! Allocation of device addresses in the address range that the iface has reserved.

use std::collections::VecDeque;

use super::ranges::FreeRanges;

/// The policy for reusing freed device addresses. [`AddressReuse::JustFreed`] makes tests fail
/// whose code uses an outdated registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressReuse {
    /// Addresses are allocated in ascending order. Freed addresses are reused only after an
    /// allocation has reached the end of the iface's reserved range.
    #[default]
    Off,
    /// A new allocation gets addresses of the range that was freed last, among the freed ranges
    /// that are long enough. CUDA's allocator often does so.
    JustFreed,
}

/// Maximum number of freed ranges that an [`AddressSpace`] records for [`AddressReuse::JustFreed`].
const REMEMBERED: usize = 1024;

/// The allocator of device addresses in the range that the iface has reserved. Addresses are
/// offsets in that range. Addresses and lengths are whole pages, in bytes.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    free: FreeRanges,
    /// The end of the last allocation. The search for free addresses begins there.
    next: u64,
    /// Start and length of the ranges that were freed last, oldest first.
    freed: VecDeque<(u64, u64)>,
    pub(crate) reuse: AddressReuse,
}

impl AddressSpace {
    pub(crate) fn new(len: u64, reuse: AddressReuse) -> Self {
        Self { free: FreeRanges::new(0, len), next: 0, freed: VecDeque::new(), reuse }
    }

    /// Allocates `len` contiguous bytes. Returns the address of the first, or `None` if no free
    /// range is long enough.
    pub(crate) fn take(&mut self, len: u64) -> Option<u64> {
        if self.reuse == AddressReuse::JustFreed
            && let Some(start) = self.take_just_freed(len)
        {
            return Some(start);
        }
        let start = self.free.take_from(self.next, len).or_else(|| self.free.take_from(0, len))?;
        self.next = start + len;
        Some(start)
    }

    fn take_just_freed(&mut self, len: u64) -> Option<u64> {
        // A recorded range may be in use again, because other allocations use addresses without
        // removing the record.
        let found = self.freed.iter().rposition(|(_, freed)| *freed >= len)?;
        let (start, _) = self.freed.remove(found)?;
        self.free.take_at(start, len).then_some(start)
    }

    pub(crate) fn give(&mut self, start: u64, len: u64) {
        self.free.give(start, len);
        if self.freed.len() == REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back((start, len));
    }
}
