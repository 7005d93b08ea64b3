//! The IPC handle of an allocation: the owner's pid and fd, and the identity that the opening
//! process verifies.

use std::os::fd::{AsFd, OwnedFd};

use hmem_core::{Error, ErrorKind, IfaceName, Result, iface::IpcHandle};
use rustix::{
    fs::SealFlags,
    process::{Pid, PidfdFlags, PidfdGetfdFlags},
};
use serde::{Deserialize, Serialize};

use crate::sys;

/// The content of an IPC handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HandleBody {
    /// Process id of the allocation's owner, as `/proc` shows it to processes in the owner's pid
    /// namespace.
    pub(crate) pid: u32,
    /// Number of the owner's fd for the memory file that holds the allocation.
    pub(crate) fd: u32,
    /// Number of the allocation's device.
    pub(crate) device: Option<u32>,
    /// The allocation's kind, as a number. The iface that created the handle defines the numbers.
    pub(crate) kind: u8,
    /// Device and inode of the memory file, to detect that the owner has closed the fd and reused
    /// its number.
    pub(crate) file: (u64, u64),
    /// Offset of the allocation in the memory file, in bytes.
    pub(crate) offset: u64,
    /// Length of the allocation in bytes.
    pub(crate) len: u64,
    /// Identity of the allocation in the owner's process.
    pub(crate) id: u64,
    /// Index of a word in the memory file's header, or `NO_STAMP` if the file has no header. The
    /// word holds the allocation's identity until the owner frees the allocation.
    pub(crate) stamp: u64,
}

/// Value of [`HandleBody::stamp`] for a memory file without a header. Such a file holds a single
/// allocation, and the owner closes the file when it frees the allocation.
pub(crate) const NO_STAMP: u64 = u64::MAX;

const CANNOT_OPEN: &str =
    "the owner or its fd does not exist, or this process may not access the owner's fds";

impl HandleBody {
    /// Returns the content of a handle.
    ///
    /// # Errors
    /// Malformed in these cases:
    ///
    /// - [`IpcHandle::encode`] did not make the handle from a `HandleBody` for this iface.
    /// - The range in the handle is empty, or ends beyond the maximum size of a file.
    pub(crate) fn decode(handle: &IpcHandle, iface: impl Into<IfaceName>) -> Result<Self> {
        let iface = iface.into();
        let body: Self = handle.decode(iface.clone())?;
        let end = body.offset.checked_add(body.len);
        if body.len == 0 || end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(handle.malformed(iface, "range"));
        }
        Ok(body)
    }

    /// Opens the owner's memory file. Returns the fd, and the file's length in bytes.
    ///
    /// # Errors
    /// - Unavailable: the file cannot be found through the owner's process, for example because the
    ///   process has ended or has closed the file.
    /// - Malformed: the file is not sealed against shrinking, so it holds no allocation.
    /// - The error of the kernel if it refuses to open or query the file.
    pub(crate) fn open_file(&self) -> Result<(OwnedFd, u64)> {
        // Opening by path needs fewer privileges than `pidfd_getfd`.
        let found = sys::find_path(&format!("/proc/{}/fd/{}", self.pid, self.fd));
        let found = found.or_else(|by_path| self.duplicate_fd().map_err(|_| by_path));
        let found = found.map_err(|error| self.gone(CANNOT_OPEN).caused_by(error))?;
        // The file is opened only after this check: the fd number may belong to a device file by
        // now, and opening a device file could have side effects.
        if sys::file_identity(found.as_fd())? != self.file {
            return Err(self.gone("the owner's fd number belongs to another file by now"));
        }
        // Opening the file again makes this process count as a user of the file. A duplicate of the
        // owner's fd does not.
        let file = sys::reopen(found.as_fd())?;
        // A handle is bytes from another process. A file that shrinks under a mapping ends this
        // process with SIGBUS. The files of allocations are sealed against shrinking, so a file
        // without that seal is refused.
        let seals = rustix::fs::fcntl_get_seals(&file);
        if !seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(Error::new(ErrorKind::Malformed, "ipc_open")
                .context(
                    "why",
                    "the handle names a file that can shrink, which holds no allocation",
                )
                .context("pid", self.pid)
                .remedy("pass the bytes of ipc_export unchanged"));
        }
        let stat = rustix::fs::fstat(&file).map_err(|errno| Error::os(errno, "fstat"))?;
        Ok((file, stat.st_size as u64))
    }

    /// Duplicates the owner's fd by `pidfd_getfd`.
    fn duplicate_fd(&self) -> Result<OwnedFd> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| self.gone("no such process"))?;
        let owner = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|errno| Error::os(errno, "pidfd_open").context("pid", self.pid))?;
        rustix::process::pidfd_getfd(&owner, self.fd as i32, PidfdGetfdFlags::empty())
            .map_err(|errno| Error::os(errno, "pidfd_getfd").context("pid", self.pid))
    }

    /// Returns the error for an IPC handle that names an allocation or a process that no longer
    /// exists. `why` is the reason in the error's text.
    pub(crate) fn gone(&self, why: &'static str) -> Error {
        Error::new(ErrorKind::Unavailable, "ipc_open")
            .context("why", why)
            .context("pid", self.pid)
            .context("identity", self.id)
            .remedy("the owner must keep the allocation until every process has opened it")
    }
}

#[cfg(test)]
#[path = "../../tests/corpus/reader.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use hmem_core::IfaceKind;

    use super::*;

    #[test]
    fn handles_of_all_versions_are_read() {
        corpus::check("ipc-handle-system", 2..=u32::from(IpcHandle::VERSION), |bytes| {
            let handle = IpcHandle { iface: IfaceKind::SYSTEM, bytes: bytes.to_vec() };
            let body = HandleBody::decode(&handle, IfaceKind::SYSTEM).expect("a handle");
            let device = body.device.map_or_else(|| "-".to_owned(), |device| device.to_string());
            let HandleBody { pid, fd, kind, file: (volume, inode), offset, len, id, stamp, .. } =
                body;
            format!(
                "pid {pid} fd {fd} device {device} kind {kind} file {volume}:{inode} offset \
                 {offset} len {len} id {id} stamp {stamp}"
            )
        });
    }

    /// HM-10: the range in a handle must not be empty, and must end at or below `i64::MAX`, the
    /// maximum size of a file.
    #[test]
    fn handle_of_an_impossible_range_is_malformed() {
        for (offset, len, possible) in
            [(0, 1, true), (0, 0, false), (u64::MAX, 1, false), (i64::MAX as u64, 1, false)]
        {
            let (file, id, stamp) = ((1, 2), 3, NO_STAMP);
            let body =
                HandleBody { pid: 1, fd: 1, device: None, kind: 0, file, offset, len, id, stamp };
            let handle = IpcHandle::encode(IfaceKind::SYSTEM, &body);
            let decoded = HandleBody::decode(&handle, IfaceKind::SYSTEM);
            let kind = decoded.as_ref().err().map(Error::kind);
            assert_eq!(kind, (!possible).then_some(ErrorKind::Malformed), "{offset} {len}");
        }
    }
}
