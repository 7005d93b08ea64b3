//! Queries of `/proc/self/maps`. The file stays open, because opening it takes five times as long
//! as a query.

#![allow(unsafe_code, reason = "drops a file in the process that opened it alone")]

use std::{
    mem::ManuallyDrop,
    os::fd::{AsFd, OwnedFd},
};

use hmem_core::{AddressRange, Result};
use parking_lot::RwLock;
use rustix::{fs::OFlags, io::Errno};

use super::area::{self, Area};

/// A flag of `open(2)` that this crate sets to recognise its own open `/proc/self/maps`. The flag
/// has no effect on this file, and other code does not open the file with it.
const MARK: OFlags = OFlags::NONBLOCK;

/// The open `/proc/self/maps`, or `None` before the first query. On kernels without `PROCMAP_QUERY`
/// the value stays `None`, and each query opens the file.
///
/// A forked child needs a new value, since the inherited file still shows the mappings of the
/// parent.
#[derive(Debug, Default)]
pub(super) struct Maps(RwLock<Option<OpenMaps>>);

/// An open `/proc/self/maps`, which detects that other code has closed its fd.
///
/// Some programs close all fds of the process. Then the program may open a file that gets the same
/// fd number.
///
/// - If that file is not `/proc/self/maps`, this value does not use the fd.
/// - If that file is `/proc/self/maps`, this value may query it, but must not close it. Only files
///   that this crate opened have the flag [`MARK`].
#[derive(Debug)]
struct OpenMaps {
    file: ManuallyDrop<OwnedFd>,
    device: u64,
    inode: u64,
}

impl OpenMaps {
    fn new(file: OwnedFd) -> Result<Self, Errno> {
        let stat = rustix::fs::fstat(&file)?;
        Ok(Self { file: ManuallyDrop::new(file), device: stat.st_dev, inode: stat.st_ino })
    }

    fn is_same_file(&self) -> bool {
        rustix::fs::fstat(&*self.file)
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (self.device, self.inode))
    }

    fn is_own_file(&self) -> bool {
        rustix::fs::fcntl_getfl(&*self.file).is_ok_and(|flags| flags.contains(MARK))
    }
}

impl Drop for OpenMaps {
    fn drop(&mut self) {
        if self.is_same_file() && self.is_own_file() {
            // SAFETY: only this destructor drops the file, and nothing uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

impl Maps {
    /// Checks that a monitor can see every change of `range` by this process, like [`area::check`].
    ///
    /// # Errors
    /// The errors of [`area::check`].
    pub(super) fn check(&self, range: AddressRange, monitor: &'static str) -> Result<Area> {
        area::check(range, monitor, |address| self.at_or_after(address))
    }

    fn at_or_after(&self, address: u64) -> Result<Option<Area>, Errno> {
        if let Some(open_fd) = &*self.0.read()
            && open_fd.is_same_file()
            && let Ok(answer) = area::queried(open_fd.file.as_fd(), address)
        {
            return Ok(answer);
        }
        self.reopen_and_query(address)
    }

    #[cold]
    fn reopen_and_query(&self, address: u64) -> Result<Option<Area>, Errno> {
        let file = area::open(MARK)?;
        match area::queried(file.as_fd(), address) {
            Err(errno) if area::has_no_query(errno) => area::read(file.as_fd(), address),
            answer => {
                *self.0.write() = Some(OpenMaps::new(file)?);
                answer
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsRawFd, FromRawFd};

    use rustix::{fs::Mode, mm::MapFlags};

    use super::*;
    use crate::sys;

    fn open_fd(maps: &Maps) -> Option<i32> {
        maps.0.read().as_ref().map(|open_fd| open_fd.file.as_raw_fd())
    }

    #[test]
    fn reused_fd_number_is_neither_queried_nor_closed() {
        let mapping = sys::map_memory(4096, MapFlags::empty()).unwrap();
        let address = mapping.address().0;
        let maps = Maps::default();
        let query =
            |maps: &Maps| maps.at_or_after(address).unwrap().map(|area| (area.start, area.end));
        let area = query(&maps);
        assert!(area.is_some_and(|(start, end)| start <= address && address < end));
        // Before Linux 6.11, and under qemu-user, the file does not stay open.
        let Some(number) = open_fd(&maps) else { return };
        query(&maps);
        assert_eq!(open_fd(&maps), Some(number), "the file is opened once");

        // SAFETY: the test closes the fd of `maps` as a program that closes all its fds does, which
        // `maps` must withstand. No other value owns the fd.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        let other =
            rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        if other.as_raw_fd() != number {
            // Another thread has opened a file, which got the number of the closed fd. The test
            // then continues with that file.
            eprintln!("the number was taken by another thread");
        }
        assert!(query(&maps).is_some());
        let again = open_fd(&maps).unwrap();
        assert_ne!(again, other.as_raw_fd());
        assert!(rustix::fs::fstat(&other).is_ok(), "the other file is not closed");
        drop(maps);
        assert!(rustix::fs::fstat(&other).is_ok());
    }

    #[test]
    fn same_file_at_a_reused_number_is_queried_not_closed() {
        let mapping = sys::map_memory(4096, MapFlags::empty()).unwrap();
        let maps = Maps::default();
        maps.at_or_after(mapping.address().0).unwrap();
        let Some(number) = open_fd(&maps) else { return };
        let other = area::open(OFlags::empty()).unwrap();
        // SAFETY: the test replaces the file at the number as a program may do, which `maps` must
        // withstand. The returned value is the new file's only owner.
        let theirs = unsafe {
            assert_eq!(libc::dup2(other.as_raw_fd(), number), number);
            OwnedFd::from_raw_fd(number)
        };
        assert!(maps.at_or_after(mapping.address().0).unwrap().is_some());
        assert_eq!(open_fd(&maps), Some(number));
        drop(maps);
        assert!(rustix::fs::fstat(&theirs).is_ok(), "the program's file is not closed");
    }
}
