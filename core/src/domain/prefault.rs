//! Populating pages before they are registered, on several CPUs.
//!
//! A driver that pins untouched memory spends most of its time zeroing pages, on one CPU.

#![allow(unsafe_code, reason = "`madvise` of the pages to populate")]

use std::{
    ffi::c_void,
    fmt,
    num::NonZero,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    io::Errno,
    mm::{Advice, madvise},
};

use crate::{AddressRange, Error, Result, registration::Progress};

/// The number of bytes that one call of `madvise(2)` populates.
const CHUNK: u64 = 16 << 20;
/// The length in bytes from which several threads populate a range.
const PARALLEL_FROM: u64 = 64 << 20;

/// The settings for populating pages before they are registered.
#[derive(Clone, Copy)]
pub struct Prefault<'a> {
    /// The number of threads. 0 means one per CPU. Ranges under 64 MiB use one thread, and longer
    /// ranges at most one thread per 16 MiB.
    pub threads: usize,
    /// A progress callback, which the threads call after each 16 MiB.
    /// Asynchronous registrations ([`Domain::bind`](crate::Domain::bind)) do not call it.
    pub progress: Option<Progress<'a>>,
}

impl fmt::Debug for Prefault<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefault").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// Populates the pages of a range of host memory, so that registering it is fast.
///
/// If `write` is true, pages that are shared copy-on-write are copied now, before a NIC pins them.
/// The bytes do not change.
///
/// # Errors
/// The context value `range` is the part that failed. Other parts may have been populated.
///
/// - [`ErrorKind::InvalidArgument`](crate::ErrorKind::InvalidArgument) if the protection of the
///   memory forbids the access, and on Linux before 5.14.
/// - [`ErrorKind::OutOfResources`](crate::ErrorKind::OutOfResources) if nothing is mapped there, or
///   if memory ran out.
/// - [`ErrorKind::BadAddress`](crate::ErrorKind::BadAddress) for pages past the end of a file.
/// - Otherwise the error of `madvise(2)`.
pub fn prefault(range: AddressRange, write: bool, options: &Prefault<'_>) -> Result<()> {
    let pages = range.page_aligned(rustix::param::page_size() as u64);
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let wanted = if options.threads == 0 { cpus } else { options.threads };
    let threads = if pages.len() < PARALLEL_FROM {
        1
    } else {
        wanted.min(pages.len().div_ceil(CHUNK) as usize)
    };
    let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = || -> Result<()> {
        loop {
            let offset = next.fetch_add(CHUNK, Ordering::Relaxed);
            let Some(rest) = pages.len().checked_sub(offset).filter(|rest| *rest > 0) else {
                return Ok(());
            };
            let Some(chunk) = pages.slice(offset, rest.min(CHUNK)) else { return Ok(()) };
            populate(chunk, write)?;
            let before = done.fetch_add(chunk.len(), Ordering::Relaxed);
            if let Some(progress) = options.progress {
                progress(before + chunk.len(), pages.len());
            }
        }
    };
    if threads == 1 {
        return work();
    }
    std::thread::scope(|scope| {
        let spawn = |_| {
            let builder = std::thread::Builder::new().name("hmem-prefault".into());
            let fewer = |error: &_| tracing::debug!(%error, "populating pages with fewer threads");
            builder.spawn_scoped(scope, work).inspect_err(fewer).ok()
        };
        let workers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mine = work();
        workers.into_iter().fold(mine, |result, worker| match worker.join() {
            Ok(theirs) => result.and(theirs),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn populate(chunk: AddressRange, write: bool) -> Result<()> {
    let advice = if write { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    let start = chunk.start().0 as *mut c_void;
    // SAFETY: the call changes no byte and unmaps nothing. The kernel refuses a range that is not
    // mapped.
    unsafe { madvise(start, chunk.len() as usize, advice) }.map_err(|errno| {
        let error = Error::os(errno, "madvise(MADV_POPULATE)").context("range", chunk);
        match errno {
            Errno::NOMEM | Errno::FAULT => error.remedy(
                "map the range before registering it, with write permission if the NIC writes",
            ),
            Errno::INVAL => error.remedy(
                "map the range with write permission if the NIC writes, and use Linux 5.14 or \
                 newer",
            ),
            _ => error,
        }
    })
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;
    use crate::{ErrorKind, Mapping};

    /// MR-16: populating read-only memory for writing fails, and the error's remedy asks for write
    /// permission.
    #[test]
    fn prefault_of_read_only_memory_for_writing_is_refused_with_a_remedy() {
        let len = rustix::param::page_size();
        let page = Mapping::anonymous(len, ProtFlags::READ, MapFlags::PRIVATE).expect("a page");
        let range = page.range();
        let options = Prefault { threads: 1, progress: None };
        prefault(range, false, &options).expect("readable");
        let error = prefault(range, true, &options).expect_err("not writable");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.remedy_text().is_some_and(|text| text.contains("write permission")));
    }
}
