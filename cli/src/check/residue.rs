//! Detection of leaks: counts of open fds and of the ifaces' resources.

use std::fs;

use crate::machine::Machine;

/// A snapshot of resource counts. A later snapshot with higher counts shows a leak.
#[derive(Debug)]
pub(super) struct Residue {
    /// Each resource with its count.
    counts: Vec<(&'static str, u64)>,
}

impl Residue {
    /// Counts the open fds and the resources in [`Machine::watches`].
    pub(super) fn count(machine: &Machine) -> Self {
        let fds = fds().into_iter().map(|fds| ("open fds", fds));
        let watched = machine.watches.iter().map(|watch| (watch.what, (watch.count)()));
        Self { counts: fds.chain(watched).collect() }
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

/// Returns the number of open fds in `/proc/self/fd`, including the fd that reads that folder;
/// `None` if the folder cannot be opened.
fn fds() -> Option<u64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as u64)
}
