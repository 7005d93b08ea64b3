//! Dma-bufs of an allocation. A dma-buf may still be in use when its allocation is freed.
//!
//! A CUDA or ROCr driver keeps the pages of a dma-buf until the last user has released the dma-buf.
//! The kernel drivers of Neuron and Gaudi do not: memory that is freed under a registration may be
//! allocated again while the NIC still reaches it. So the iface keeps a descriptor of each dma-buf
//! that it exported. The iface frees the memory once these descriptors are the only users.
//!
//! The kernel shows the number of users in `/proc/self/fdinfo`: descriptors, mappings, and
//! attachments of drivers.

use std::{
    fs,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

/// Exported dma-bufs of one allocation. The iface keeps a descriptor of each.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    kept: Vec<OwnedFd>,
    /// Number of kept descriptors at which [`Self::keep`] closes the descriptors that are no longer
    /// needed. `keep` then sets this limit to twice the number of the remaining descriptors.
    limit: usize,
}

impl Exports {
    /// Keeps `fd` if its dma-buf has other users, and closes `fd` otherwise.
    pub(crate) fn keep(&mut self, fd: OwnedFd, others_use: impl Fn(BorrowedFd<'_>) -> bool) {
        if !others_use(fd.as_fd()) {
            return;
        }
        // The check reads a file of procfs for each descriptor, so it does not run at each export.
        if self.kept.len() >= self.limit {
            self.close_unused(others_use);
            self.limit = (self.kept.len() * 2).max(1);
        }
        self.kept.push(fd);
    }

    /// Closes the descriptors of dma-bufs without other users.
    pub(crate) fn close_unused(&mut self, others_use: impl Fn(BorrowedFd<'_>) -> bool) {
        self.kept.retain(|fd| others_use(fd.as_fd()));
    }

    /// Returns true if no descriptor is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }
}

/// Returns true if the dma-buf has users besides the descriptor `fd`, or if procfs cannot be read.
pub(crate) fn others_use(fd: BorrowedFd<'_>) -> bool {
    users(fd).is_none_or(|users| users > 1)
}

/// Returns the number of users of a dma-buf: descriptors including `fd`, mappings, and attachments
/// of drivers. Returns 1 for any other file, and `None` if procfs cannot be read.
fn users(fd: BorrowedFd<'_>) -> Option<u64> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    // Only dma-bufs have the line `count:`. Any other file keeps its memory by itself, so that `fd`
    // is its only user here.
    Some(count(&info).unwrap_or(1))
}

/// Parses the number of users from the `fdinfo` file of a dma-buf. Returns `None` for the file of
/// any other descriptor.
fn count(info: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix("count:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_has_the_number_of_users_of_a_dma_buf() {
        let info = "pos:\t0\nflags:\t02000002\nmnt_id:\t15\nino:\t1072\nsize:\t65536\ncount:\t3\n\
                    exp_name:\tneuron\n";
        assert_eq!(count(info), Some(3));
        assert_eq!(count("pos:\t0\nflags:\t02\n"), None);
    }

    #[test]
    fn file_other_than_a_dma_buf_is_not_kept() {
        let mut exports = Exports::default();
        exports.keep(OwnedFd::from(fs::File::open("/dev/null").expect("a file")), others_use);
        assert!(exports.is_empty());
    }
}
