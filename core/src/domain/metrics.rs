//! The telemetry of a domain: counts of registrations, refusals and lookups.
//!
//! A successful registration adds to two counters of its path, without a lock: the registrations
//! and the bytes. A cache hit adds to neither, because the cache itself counts lookups. A refusal
//! is rare, and takes a lock.

use std::{
    array,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::Domain;
use crate::{Error, ErrorKind, Path, cache::CacheStatistics, provider::LiveObjects};

/// The number of buckets of a [`LatencyHistogram`]. The last one begins at 2^38 ns, some 4.6
/// minutes.
const BUCKETS: usize = 40;

/// A snapshot of the telemetry of a domain, which [`Domain::metrics`] returns. All counts are since
/// the domain was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DomainMetrics {
    paths: [PathMetrics; Path::ALL.len()],
    /// The registrations that failed, by kind and cause, in the order of their first failure.
    pub refusals: Vec<RefusalCount>,
    /// The latencies of successful registrations; `None` unless
    /// [`DomainAttr::registration_latency`](super::DomainAttr::registration_latency) is true.
    pub latency: Option<LatencyHistogram>,
    /// The hits, misses, evictions and entries of the domain's cache; `None` before the first use
    /// of the cache.
    pub cache: Option<CacheStatistics>,
    /// The objects that the domain has now.
    pub live: LiveObjects,
}

/// The registrations over one path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathMetrics {
    /// The number of successful registrations, including those of the cache and of sub-regions.
    pub registrations: u64,
    /// The number of bytes that were registered. Bytes that were registered several times count
    /// each time. A count that exceeds `u64::MAX` is `u64::MAX`.
    pub bytes: u64,
}

/// The number of registrations that failed with one kind of error and one cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusalCount {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The name of the most probable cause ([`Error::causes`]); `None` if no cause is known, for
    /// example for a request with a mistake.
    pub cause: Option<&'static str>,
    /// The number of registrations that failed in this way.
    pub count: u64,
}

impl DomainMetrics {
    /// Returns the registrations over `path`.
    #[must_use]
    pub fn path(&self, path: Path) -> PathMetrics {
        self.paths[path as usize]
    }

    /// Returns the number of successful registrations over all paths.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.paths.iter().map(|path| path.registrations).sum()
    }

    /// Returns the number of bytes that were registered over all paths.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.paths.iter().fold(0, |sum, path| sum.saturating_add(path.bytes))
    }

    /// Returns the number of registrations that failed.
    #[must_use]
    pub fn all_refusals(&self) -> u64 {
        self.refusals.iter().map(|refusal| refusal.count).sum()
    }
}

/// A histogram of durations. The upper bound of each bucket is twice that of the bucket before. The
/// last bucket has no upper bound.
///
/// ```
/// use std::time::Duration;
///
/// use hmem_core::LatencyHistogram;
///
/// let mut latencies = LatencyHistogram::default();
/// latencies.record(Duration::from_nanos(1000));
/// latencies.record(Duration::from_nanos(1030));
/// let counted: Vec<_> = latencies.buckets().filter(|(_, count)| *count > 0).collect();
/// assert_eq!(counted, [(Duration::from_nanos(1024), 1), (Duration::from_nanos(2048), 1)]);
/// assert_eq!(latencies.quantile(0.5), Some(Duration::from_nanos(1024)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatencyHistogram([u64; BUCKETS]);

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl LatencyHistogram {
    /// Counts a duration.
    pub fn record(&mut self, duration: Duration) {
        self.0[bucket_of(duration)] += 1;
    }

    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Returns the buckets in ascending order, each as the upper bound and the number of durations
    /// below it that are in no earlier bucket. The bound of the last bucket is [`Duration::MAX`].
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        self.0.iter().enumerate().map(|(at, count)| (bound_of(at), *count))
    }

    /// Returns the upper bound of the bucket with the quantile `quantile`, which is from 0 to 1.
    /// Returns `None` if nothing was counted.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let wanted = (self.count() as f64 * quantile.clamp(0.0, 1.0)).ceil().max(1.0);
        let mut below = 0;
        self.buckets().find_map(|(bound, count)| {
            below += count;
            (below as f64 >= wanted).then_some(bound)
        })
    }
}

fn bucket_of(duration: Duration) -> usize {
    let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    ((u64::BITS - nanoseconds.leading_zeros()) as usize).min(BUCKETS - 1)
}

fn bound_of(bucket: usize) -> Duration {
    if bucket == BUCKETS - 1 { Duration::MAX } else { Duration::from_nanos(1 << bucket) }
}

/// The counters of a domain. Any thread may add to them.
#[derive(Debug)]
pub(super) struct Counters {
    paths: [PathCounters; Path::ALL.len()],
    /// The buckets of the latency histogram. `None` if the domain does not measure latencies.
    latency: Option<Box<[AtomicU64; BUCKETS]>>,
    refusals: Mutex<Vec<RefusalCount>>,
}

#[derive(Debug, Default)]
struct PathCounters {
    registrations: AtomicU64,
    bytes: AtomicU64,
}

impl Counters {
    pub(super) fn new(latency: bool) -> Self {
        Self {
            paths: Default::default(),
            latency: latency.then(|| Box::new(array::from_fn(|_| AtomicU64::new(0)))),
            refusals: Mutex::default(),
        }
    }

    /// Returns the time at which a registration starts, if the domain measures latencies.
    #[inline]
    pub(super) fn start(&self) -> Option<Instant> {
        self.latency.as_ref().map(|_| Instant::now())
    }

    /// Counts a successful registration that started at `started`.
    #[inline]
    pub(super) fn count_registration(&self, path: Path, bytes: u64, started: Option<Instant>) {
        let counters = &self.paths[path as usize];
        counters.registrations.fetch_add(1, Ordering::Relaxed);
        if counters.bytes.fetch_add(bytes, Ordering::Relaxed).checked_add(bytes).is_none() {
            counters.bytes.store(u64::MAX, Ordering::Relaxed);
        }
        if let (Some(latency), Some(started)) = (&self.latency, started) {
            latency[bucket_of(started.elapsed())].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a registration that failed with `error`.
    #[cold]
    pub(super) fn count_refusal(&self, error: &Error) {
        let (kind, cause) = (error.kind(), error.causes().first().map(|cause| cause.name));
        let mut refusals = self.refusals.lock();
        match refusals.iter_mut().find(|known| (known.kind, known.cause) == (kind, cause)) {
            Some(known) => known.count += 1,
            None => refusals.push(RefusalCount { kind, cause, count: 1 }),
        }
    }
}

impl Domain {
    /// Returns a snapshot of the domain's counts: registrations and bytes by path, refusals by
    /// cause, lookups of the cache, and the objects that are open now.
    ///
    /// The snapshot is not atomic: if other threads register meanwhile, its counts may differ by
    /// these registrations. In a forked child, the list of refusals is empty.
    ///
    /// ```no_run
    /// use hmem_core::{Domain, Path};
    ///
    /// fn report(domain: &Domain) {
    ///     let metrics = domain.metrics();
    ///     let staged = metrics.path(Path::Staged).registrations;
    ///     println!("{staged} of {} registrations are staged", metrics.registrations());
    ///     for refusal in &metrics.refusals {
    ///         let cause = refusal.cause.unwrap_or("no known cause");
    ///         println!("{} refused: {}, {cause}", refusal.count, refusal.kind);
    ///     }
    /// }
    /// ```
    #[must_use]
    pub fn metrics(&self) -> DomainMetrics {
        let counters = &self.inner.metrics;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        // A forked child has the parent's counts and not its threads, one of which may hold the
        // lock.
        let is_child = !self.inner.process.is_current();
        DomainMetrics {
            paths: counters.paths.each_ref().map(|path| PathMetrics {
                registrations: read(&path.registrations),
                bytes: read(&path.bytes),
            }),
            refusals: if is_child { Vec::new() } else { counters.refusals.lock().clone() },
            latency: counters
                .latency
                .as_ref()
                .map(|latency| LatencyHistogram(latency.each_ref().map(read))),
            cache: self.cache.get().map(|cache| cache.statistics()),
            live: self.live(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_double_and_the_last_takes_all_longer_durations() {
        let nanoseconds = Duration::from_nanos;
        let of = [0, 1, 2, 3, 4, 1023, 1024, (1 << 38) - 1, 1 << 38, u64::MAX];
        assert_eq!(of.map(|ns| bucket_of(nanoseconds(ns))), [0, 1, 2, 2, 3, 10, 11, 38, 39, 39]);
        assert_eq!(bucket_of(Duration::MAX), BUCKETS - 1);
        for bucket in 0..BUCKETS - 1 {
            let bound = bound_of(bucket);
            assert_eq!(bucket_of(bound), bucket + 1);
            assert_eq!(bucket_of(bound - nanoseconds(1)), bucket);
        }
    }

    #[test]
    fn quantile_of_nothing_is_none_and_of_one_duration_its_bound() {
        let mut latencies = LatencyHistogram::default();
        assert_eq!(latencies.quantile(0.99), None);
        latencies.record(Duration::from_secs(1000));
        for quantile in [-1.0, 0.0, 0.5, 1.0, 2.0, f64::NAN] {
            assert_eq!(latencies.quantile(quantile), Some(Duration::MAX), "{quantile}");
        }
    }

    #[test]
    fn count_of_bytes_saturates() {
        let counters = Counters::new(false);
        for bytes in [u64::MAX - 1, 1, 4096, 1] {
            counters.count_registration(Path::PlainHost, bytes, None);
        }
        let host = &counters.paths[Path::PlainHost as usize];
        assert_eq!(host.bytes.load(Ordering::Relaxed), u64::MAX);
        assert_eq!(host.registrations.load(Ordering::Relaxed), 4);
    }
}
