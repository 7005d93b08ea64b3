//! Counts of subscriptions for each address. A *run* is a range of addresses with the same count.

use std::{collections::BTreeMap, ops::Range};

/// The number of subscriptions of each address, stored as ranges of addresses with the same count
/// (*runs*). Addresses without a subscription are in no run.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// The runs by start address. The value is the end address and the number of subscriptions.
    runs: BTreeMap<u64, (u64, u32)>,
    /// Number of separate watched ranges. Adjacent runs belong to the same range.
    apart: usize,
}

impl Counted {
    /// Counts one more subscription for every address of `range`.
    pub(super) fn add(&mut self, range: Range<u64>) {
        self.cut(range.start);
        self.cut(range.end);
        let mut at = range.start;
        while at < range.end {
            let next = self.runs.range_mut(at..range.end).next();
            match next {
                Some((&start, (end, count))) if start == at => {
                    *count += 1;
                    at = *end;
                }
                found => {
                    let end = found.map_or(range.end, |(&start, _)| start);
                    self.apart = self.apart + 1 - self.touching(&(at..end));
                    self.runs.insert(at, (end, 1));
                    at = end;
                }
            }
        }
    }

    /// Counts one subscription less for every address of `range`. Returns the parts that no
    /// subscription contains any more.
    pub(super) fn remove(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        self.cut(range.start);
        self.cut(range.end);
        let mut unwatched: Vec<Range<u64>> = Vec::new();
        for (&start, (end, count)) in self.runs.range_mut(range) {
            *count -= 1;
            if *count == 0 {
                match unwatched.last_mut() {
                    Some(last) if last.end == start => last.end = *end,
                    _ => unwatched.push(start..*end),
                }
            }
        }
        for gone in &unwatched {
            let starts: Vec<_> = self.runs.range(gone.clone()).map(|(start, _)| *start).collect();
            for start in starts {
                self.runs.remove(&start);
            }
            self.apart = self.apart + self.touching(gone) - 1;
        }
        unwatched
    }

    /// Returns the number of separate watched ranges. Adjacent ranges count as one, because the
    /// kernel keeps them in one mapping.
    pub(super) fn apart(&self) -> usize {
        self.apart
    }

    /// Returns the number of runs adjacent to `range`: 0, 1 or 2.
    fn touching(&self, range: &Range<u64>) -> usize {
        let before = self.runs.range(..range.start).next_back();
        usize::from(before.is_some_and(|(_, (end, _))| *end == range.start))
            + usize::from(self.runs.contains_key(&range.end))
    }

    /// Returns all runs, which together are the watched addresses.
    pub(super) fn all(&self) -> Vec<Range<u64>> {
        self.runs.iter().map(|(start, (end, _))| *start..*end).collect()
    }

    /// Returns the parts of `range` without a subscription.
    pub(super) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let before =
            self.runs.range(..range.start).next_back().filter(|(_, (end, _))| *end > range.start);
        let mut at = before.map_or(range.start, |(_, (end, _))| *end);
        let mut gaps = Vec::new();
        for (&start, (end, _)) in self.runs.range(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = *end;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    fn cut(&mut self, at: u64) {
        let Some((_, run)) = self.runs.range_mut(..at).next_back() else { return };
        let (end, count) = *run;
        if end > at {
            run.0 = at;
            self.runs.insert(at, (end, count));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 48;

    fn watched(counted: &Counted) -> Vec<u32> {
        let count = |page| {
            let run = counted.runs.range(..=page).next_back().filter(|(_, (end, _))| *end > page);
            run.map_or(0, |(_, (_, count))| *count)
        };
        (0..PAGES).map(count).collect()
    }

    proptest! {
        #[test]
        fn counts_equal_a_naive_count_per_page(
            changes in prop::collection::vec(
                (any::<bool>(), 0..PAGES, 1..16_u64, any::<prop::sample::Index>()),
                1..60,
            )
        ) {
            let mut counted = Counted::default();
            let mut naive = vec![0_u32; PAGES as usize];
            let mut live = Vec::new();
            for (add, start, len, which) in changes {
                if add || live.is_empty() {
                    let range = start..(start + len).min(PAGES);
                    counted.add(range.clone());
                    range.clone().for_each(|page| naive[page as usize] += 1);
                    live.push(range);
                } else {
                    let range = live.swap_remove(which.index(live.len()));
                    let mut unwatched = Vec::new();
                    for page in range.clone() {
                        naive[page as usize] -= 1;
                        if naive[page as usize] == 0 {
                            unwatched.push(page);
                        }
                    }
                    let removed: Vec<u64> = counted.remove(range).into_iter().flatten().collect();
                    prop_assert_eq!(removed, unwatched);
                }
                prop_assert_eq!(watched(&counted), naive.clone());
                let begins =
                    |page: &usize| naive[*page] > 0 && (*page == 0 || naive[*page - 1] == 0);
                prop_assert_eq!(counted.apart(), (0..PAGES as usize).filter(begins).count());
                let gaps: Vec<u64> = counted.gaps(3..PAGES - 2).into_iter().flatten().collect();
                let free: Vec<u64> =
                    (3..PAGES - 2).filter(|page| naive[*page as usize] == 0).collect();
                prop_assert_eq!(gaps, free);
            }
            for range in live {
                counted.remove(range);
            }
            prop_assert!(counted.runs.is_empty());
        }
    }
}
