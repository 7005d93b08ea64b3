//! Sets of free ranges: device addresses, or offsets in a memory file.

use std::collections::BTreeMap;

/// A set of free ranges. Adjacent ranges are merged.
#[derive(Debug)]
pub(crate) struct FreeRanges {
    /// The length of each range, by start.
    ranges: BTreeMap<u64, u64>,
}

impl FreeRanges {
    /// Creates a set with one free range.
    pub(crate) fn new(start: u64, len: u64) -> Self {
        Self { ranges: BTreeMap::from([(start, len)]) }
    }

    /// Removes the first range of `len` bytes that is free from `from` on, and returns its start.
    /// Returns `None` if no free range is long enough.
    pub(crate) fn take_from(&mut self, from: u64, len: u64) -> Option<u64> {
        let around = self.ranges.range(..from).next_back().map(|(start, free)| (*start, *free));
        let end = from.checked_add(len)?;
        let split = around.filter(|(start, free)| start + free >= end).map(|_| from);
        let start = split.or_else(|| {
            self.ranges.range(from..).find(|(_, free)| **free >= len).map(|(start, _)| *start)
        })?;
        self.take_at(start, len).then_some(start)
    }

    /// Removes the range of `len` bytes from `start` if all of it is free. Otherwise returns
    /// false and changes nothing.
    pub(crate) fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some((&free_start, &free_len)) = self.ranges.range(..=start).next_back() else {
            return false;
        };
        let free_end = free_start + free_len;
        let Some(end) = start.checked_add(len).filter(|end| *end <= free_end) else {
            return false;
        };
        if free_start < start {
            self.ranges.insert(free_start, start - free_start);
        } else {
            self.ranges.remove(&free_start);
        }
        if end < free_end {
            self.ranges.insert(end, free_end - end);
        }
        true
    }

    /// Adds a range to the set, and merges it with adjacent ranges.
    pub(crate) fn give(&mut self, start: u64, len: u64) {
        let (mut start, mut len) = (start, len);
        if let Some((&before, &before_len)) = self.ranges.range(..start).next_back()
            && before + before_len == start
        {
            self.ranges.remove(&before);
            (start, len) = (before, before_len + len);
        }
        if let Some(after_len) = self.ranges.remove(&(start + len)) {
            len += after_len;
        }
        self.ranges.insert(start, len);
    }
}
