//! Detection of leaks: counts of resources, before and after a check.

use crate::machine::Machine;

/// A snapshot of resource counts. A later snapshot with higher counts shows a leak.
#[derive(Debug)]
pub(super) struct Residue {
    /// Each resource with its count.
    counts: Vec<(&'static str, u64)>,
}

impl Residue {
    /// Counts the resources in [`Machine::watches`].
    pub(super) fn count(machine: &Machine) -> Self {
        let counts = machine.watches.iter().map(|watch| (watch.what, (watch.count)()));
        Self { counts: counts.collect() }
    }

    /// Describes the counts that are higher than in `before`, or returns `None` if there are none.
    pub(super) fn left_since(&self, before: &Self) -> Option<String> {
        let grown = self.counts.iter().filter_map(|(what, now)| {
            let (_, then) = before.counts.iter().find(|(known, _)| known == what)?;
            (now > then).then(|| format!("{what}: {now} after, {then} before"))
        });
        let grown: Vec<_> = grown.collect();
        (!grown.is_empty()).then(|| grown.join(", "))
    }
}
