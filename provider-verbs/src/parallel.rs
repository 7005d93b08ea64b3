//! Parallel registration of long ranges. One driver call pins pages with one CPU, so several calls
//! at once are faster.

use std::{
    num::NonZero,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    thread,
};

use hmem_core::{Parallel, Progress, Result};
use parking_lot::Mutex;

use super::region::{Parts, RegionPart};

/// Minimum number of bytes for each thread. A shorter registration ends before a second CPU starts,
/// so another thread would gain nothing. The application may choose shorter parts
/// ([`Parallel::chunk`]).
const MIN_PARALLEL_LEN: u64 = 64 << 20;
/// Length of a huge page in bytes. If the provider chooses how long the parts of a range are
/// ([`Division::part`]), the length is a multiple of `HUGE`, or the maximum length that the device
/// registers in one call.
const HUGE: u64 = 2 << 20;

/// Division of one range into parts that are registered separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Maximum length of a part in bytes.
    pub(super) part: u64,
    /// Maximum number of driver calls at once.
    pub(super) threads: usize,
}

impl Division {
    /// Returns the division into parts of `max` bytes that are registered one after the other.
    /// `max` is the maximum length that the device registers in one call.
    pub(super) const fn none(max: u64) -> Self {
        Self { part: max, threads: 1 }
    }

    /// Returns the division of `len` bytes of host memory, on a device that registers at most `max`
    /// bytes in one call. `asked` are the request's settings, and `cpus` is the number of CPUs.
    pub(super) fn new(len: u64, max: u64, asked: Option<&Parallel<'_>>, cpus: usize) -> Self {
        let calls = |part: u64| usize::try_from(len.div_ceil(part.max(1))).unwrap_or(usize::MAX);
        let Some(asked) = asked else {
            // If the device needs several calls, a long range is worth several threads.
            let threads = if len >= MIN_PARALLEL_LEN { cpus.min(calls(max)) } else { 1 };
            return Self { part: max, threads: threads.max(1) };
        };
        let wanted = if asked.threads == 0 { cpus } else { asked.threads };
        let part = match asked.chunk {
            0 => {
                let gain =
                    usize::try_from(len / MIN_PARALLEL_LEN).unwrap_or(usize::MAX).min(wanted);
                if gain > 1 { len.div_ceil(gain as u64).next_multiple_of(HUGE) } else { max }
            }
            chunk => chunk,
        };
        let part = part.min(max);
        Self { part, threads: wanted.min(calls(part)).max(1) }
    }
}

/// Returns the number of CPUs that this process may use.
pub(super) fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Registers the parts of one range, with at most `threads` driver calls at once. `seams` has the
/// offset and length of each part. `one` registers the part with the given offset and length. The
/// registrations are appended to `parts` in the order of `seams`.
///
/// After an error or a panic, `parts` has the registrations made so far.
pub(super) fn register(
    seams: &[(u64, u64)],
    threads: usize,
    progress: Option<Progress<'_>>,
    one: impl Fn(u64, u64) -> Result<RegionPart> + Sync,
    parts: &mut Parts,
) -> Result<()> {
    let total = seams.iter().map(|(_, len)| len).sum();
    let (next, done, stop) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let made = Mutex::new(Vec::with_capacity(seams.len()));
    let work = || -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(offset, len)) = seams.get(index) else { break };
            let part = one(offset, len).inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
            made.lock().push((index, part));
            let before = done.fetch_add(len, Ordering::Relaxed);
            if let Some(progress) = progress {
                progress(before + len, total);
            }
        }
        Ok(())
    };
    let all = || {
        thread::scope(|scope| {
            let spawn = |_| {
                let builder = thread::Builder::new().name("hmem-register".into());
                let fewer = |error: &_| tracing::debug!(%error, "registering with fewer threads");
                builder.spawn_scoped(scope, work).inspect_err(fewer).ok()
            };
            let workers: Vec<_> = (1..threads.min(seams.len())).filter_map(spawn).collect();
            let mine = work();
            workers.into_iter().fold(mine, |result, worker| match worker.join() {
                Ok(theirs) => result.and(theirs),
                Err(panic) => resume_unwind(panic),
            })
        })
    };
    // An uncaught panic would leak the registrations, which have no owner yet.
    let result = catch_unwind(AssertUnwindSafe(all));
    let mut made = made.into_inner();
    made.sort_unstable_by_key(|(index, _)| *index);
    parts.extend(made.into_iter().map(|(_, part)| part));
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn asked(threads: usize, chunk: u64) -> Parallel<'static> {
        Parallel { threads, chunk, progress: None }
    }

    #[test]
    fn range_is_split_on_request_if_it_is_long_enough() {
        let cut = |len, asked: Option<Parallel<'_>>, cpus| {
            let division = Division::new(len, u64::MAX, asked.as_ref(), cpus);
            (division.part, division.threads)
        };
        let whole = (u64::MAX, 1);
        assert_eq!(cut(GIB, None, 8), whole, "not requested: one key");
        assert_eq!(cut(GIB, Some(asked(0, 0)), 8), (GIB / 8, 8));
        assert_eq!(cut(GIB, Some(asked(3, 0)), 8), (342 << 20, 3));
        assert_eq!(cut(GIB, Some(asked(0, 0)), 1), whole, "one CPU gains nothing");
        assert_eq!(cut(127 << 20, Some(asked(0, 0)), 8), whole, "too short to gain");
        assert_eq!(cut(1 << 20, Some(asked(0, 64 << 10)), 8), (64 << 10, 8));
        assert_eq!(cut(100 << 10, Some(asked(0, 64 << 10)), 8), (64 << 10, 2));
    }

    #[test]
    fn parts_over_the_device_limit_are_registered_in_parallel() {
        let cut = |len, max, asked: Option<Parallel<'_>>| {
            let division = Division::new(len, max, asked.as_ref(), 8);
            (division.part, division.threads)
        };
        assert_eq!(cut(4 * GIB, GIB, None), (GIB, 4));
        assert_eq!(cut(40 * GIB, GIB, Some(asked(2, 0))), (GIB, 2));
        assert_eq!(cut(40 * GIB, GIB, Some(asked(0, 8 * GIB))), (GIB, 8));
        assert_eq!(cut(4096, 1024, None), (1024, 1), "short: one after the other");
    }
}
