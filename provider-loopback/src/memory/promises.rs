//! Which pages of a region the NIC may touch, where the application has to say so (MMU_NOTIFY).

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt};

use hmem_core::{Address, AddressRange, Result};

use super::bad_address;

/// Promised addresses: disjoint runs, start to end, that do not touch.
#[derive(Debug, Default)]
pub(in super::super) struct Promises {
    runs: BTreeMap<u64, u64>,
}

impl Promises {
    /// Those parts of `ranges` that pages back now.
    pub(in super::super) fn present(ranges: impl Iterator<Item = AddressRange>) -> Self {
        let mut promises = Self::default();
        for range in ranges {
            for page in present_pages(range) {
                promises.add(page.0, page.1);
            }
        }
        promises
    }

    /// What is promised, in address order.
    pub(in super::super) fn ranges(&self) -> impl Iterator<Item = AddressRange> {
        self.runs
            .iter()
            .filter_map(|(&start, &end)| AddressRange::new(Address(start), end - start).ok())
    }

    /// Adds the addresses from `start` up to `end`.
    pub(in super::super) fn add(&mut self, start: u64, end: u64) {
        let (mut start, mut end) = (start, end);
        while let Some((&from, &to)) = self.runs.range(..=end).next_back() {
            if to < start {
                break;
            }
            start = start.min(from);
            end = end.max(to);
            self.runs.remove(&from);
        }
        self.runs.insert(start, end);
    }

    /// Whether all of an access is promised.
    pub(in super::super) fn check(&self, at: u64, len: u64) -> Result<()> {
        match self.runs.range(..=at).next_back() {
            Some((_, &end)) if len <= end - at.min(end) && at < end => Ok(()),
            _ => {
                Err(bad_address(at, len)
                    .remedy("the pages changed: refresh the region (MMU_NOTIFY)"))
            }
        }
    }
}

/// The parts of a range that the page table maps or has swapped out, by `/proc/self/pagemap`; none
/// where that cannot be read, so that everything has to be refreshed.
fn present_pages(range: AddressRange) -> Vec<(u64, u64)> {
    const PRESENT_OR_SWAPPED: u64 = 1 << 63 | 1 << 62;
    let page = rustix::param::page_size() as u64;
    let pages = range.page_aligned(page);
    let mut present = Vec::new();
    let unknown = |error: std::io::Error| {
        tracing::warn!(%error, %range, "/proc/self/pagemap cannot be read: pages count as absent until a refresh");
    };
    let pagemap = match File::open("/proc/self/pagemap") {
        Ok(pagemap) => pagemap,
        Err(error) => {
            unknown(error);
            return present;
        }
    };
    let mut entries = vec![0; 8 * 4096];
    let (mut first, last) = (pages.start().0 / page, pages.start().0 / page + pages.len() / page);
    while first < last {
        let want = ((last - first) * 8).min(entries.len() as u64) as usize;
        let got = match pagemap.read_at(&mut entries[..want], first * 8) {
            Ok(got) => got,
            Err(error) => {
                unknown(error);
                break;
            }
        };
        // Past the addresses that a process can have.
        if got < 8 {
            break;
        }
        for entry in entries[..got].chunks_exact(8) {
            let entry = u64::from_ne_bytes(entry.try_into().expect("chunks of 8 bytes"));
            if entry & PRESENT_OR_SWAPPED != 0 {
                present.push((first * page, (first + 1) * page));
            }
            first += 1;
        }
    }
    present
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_access_is_promised_if_every_byte_is(
            runs in prop::collection::vec((0u64..200, 1u64..40), 0..12),
            at in 0u64..240,
            len in 1u64..60,
        ) {
            let mut promises = Promises::default();
            let mut naive = [false; 512];
            for (start, len) in runs {
                promises.add(start, start + len);
                naive[start as usize..(start + len) as usize].fill(true);
            }
            let expected = naive[at as usize..(at + len) as usize].iter().all(|byte| *byte);
            prop_assert_eq!(promises.check(at, len).is_ok(), expected);
        }
    }

    #[test]
    fn the_last_page_of_all_addresses_is_never_present() {
        let last = AddressRange::new(Address(u64::MAX - 4095), 4096).unwrap();
        assert_eq!(Promises::present(std::iter::once(last)).ranges().count(), 0);
    }

    #[test]
    fn touched_pages_are_present() {
        let bytes = vec![1u8; 3 * 4096];
        let promises = Promises::present(std::iter::once(AddressRange::of(&bytes)));
        promises.check(bytes.as_ptr() as u64, bytes.len() as u64).unwrap();
    }
}
