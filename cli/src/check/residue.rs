//! What a check must leave as it found it: open fds, and the counts that the ifaces keep.

use std::fs;

use crate::machine::Machine;

/// Counts at one moment.
#[derive(Debug)]
pub(super) struct Residue {
    counts: Vec<(&'static str, u64)>,
}

impl Residue {
    /// Counts now.
    pub(super) fn count(machine: &Machine) -> Self {
        let fds = fds().into_iter().map(|fds| ("open fds", fds));
        let watched = machine.watches.iter().map(|watch| (watch.what, (watch.count)()));
        Self { counts: fds.chain(watched).collect() }
    }

    /// What is more now than it was then.
    pub(super) fn left_since(&self, before: &Self) -> Option<String> {
        let grown = self.counts.iter().filter_map(|(what, now)| {
            let (_, then) = before.counts.iter().find(|(known, _)| known == what)?;
            (now > then).then(|| format!("{what}: {now} after, {then} before"))
        });
        let grown: Vec<_> = grown.collect();
        (!grown.is_empty()).then(|| grown.join(", "))
    }
}

/// Open fds of this process, where /proc tells. The one that reads the directory counts every time.
fn fds() -> Option<u64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count() as u64)
}
