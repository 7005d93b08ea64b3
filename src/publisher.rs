//! Publishes the counts of domains through the crate `metrics`.

use std::time::Duration;

use hmem_core::{Domain, DomainMetrics, Path, monitor::InvalidationCause};
use metrics::{counter, gauge, histogram};

/// Publishes the counts of one domain ([`Domain::metrics`]) to the recorder of the crate `metrics`
/// that the program installed.
///
/// The library never publishes by itself. The program calls [`MetricsPublisher::publish`] from time
/// to time, for example before each scrape. All metrics have the labels `domain`, which is the name
/// of the publisher, and `nic`:
///
/// - counters `hmem_registrations_total` and `hmem_registered_bytes_total`, also with `path`
/// - counter `hmem_refusals_total`, also with `kind` and `cause` (empty if unknown)
/// - histogram `hmem_registration_seconds`, if
///   [`DomainAttr::registration_latency`](crate::DomainAttr::registration_latency) is true; each
///   value is the upper bound of its bucket in [`LatencyHistogram`](crate::LatencyHistogram)
/// - counters `hmem_cache_hits_total`, `hmem_cache_misses_total` and
///   `hmem_cache_evictions_total`, and counter `hmem_cache_invalidations_total`, also with `cause`
/// - gauges `hmem_cache_entries`, `hmem_cache_bytes`, `hmem_regions` and `hmem_pinned_bytes`
///
/// ```no_run
/// use hmem::{Domain, MetricsPublisher};
///
/// fn scrape(domain: &Domain, publisher: &mut MetricsPublisher) {
///     // Created once, by `MetricsPublisher::new("weights")`.
///     publisher.publish(domain);
/// }
/// ```
#[derive(Debug)]
pub struct MetricsPublisher {
    name: String,
    /// The count of each latency bucket at the last publication. Empty before the first
    /// publication.
    published: Vec<u64>,
}

impl MetricsPublisher {
    /// Creates a publisher for one domain. `name` becomes the label `domain`, and distinguishes
    /// domains of one process that share a NIC.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), published: Vec::new() }
    }

    /// Publishes the present counts of `domain`, which must be the same in each call.
    pub fn publish(&mut self, domain: &Domain) {
        let metrics = domain.metrics();
        let nic = domain.provider_attr().nic.to_string();
        let labels = || [("domain", self.name.clone()), ("nic", nic.clone())];
        registrations(&metrics, labels);
        cache(&metrics, labels);
        gauge!("hmem_regions", &labels()).set(metrics.live.regions as f64);
        gauge!("hmem_pinned_bytes", &labels()).set(metrics.live.bytes as f64);
        let Some(latency) = &metrics.latency else { return };
        let recorded = histogram!("hmem_registration_seconds", &labels());
        let mut counts = Vec::new();
        let mut lower = Duration::ZERO;
        for (at, (bound, count)) in latency.buckets().enumerate() {
            let before = self.published.get(at).copied().unwrap_or(0);
            // The last bucket has no bound, so its lower bound stands for its values.
            let value = if bound == Duration::MAX { lower } else { bound };
            let new = usize::try_from(count.saturating_sub(before)).unwrap_or(usize::MAX);
            recorded.record_many(value.as_secs_f64(), new);
            counts.push(count);
            lower = bound;
        }
        self.published = counts;
    }
}

type Labels = [(&'static str, String); 2];

fn registrations(metrics: &DomainMetrics, labels: impl Fn() -> Labels) {
    for path in Path::ALL {
        let [domain, nic] = labels();
        let labels = [domain, nic, ("path", path.name().to_owned())];
        let counts = metrics.path(path);
        counter!("hmem_registrations_total", &labels).absolute(counts.registrations);
        counter!("hmem_registered_bytes_total", &labels).absolute(counts.bytes);
    }
    for refusal in &metrics.refusals {
        let [domain, nic] = labels();
        let kind = ("kind", refusal.kind.text().to_owned());
        let cause = ("cause", refusal.cause.unwrap_or_default().to_owned());
        counter!("hmem_refusals_total", &[domain, nic, kind, cause]).absolute(refusal.count);
    }
}

fn cache(metrics: &DomainMetrics, labels: impl Fn() -> Labels) {
    let Some(cache) = &metrics.cache else { return };
    counter!("hmem_cache_hits_total", &labels()).absolute(cache.hits);
    counter!("hmem_cache_misses_total", &labels()).absolute(cache.misses);
    counter!("hmem_cache_evictions_total", &labels()).absolute(cache.evictions);
    for cause in InvalidationCause::ALL {
        let [domain, nic] = labels();
        let labels = [domain, nic, ("cause", cause.name().to_owned())];
        let count = cache.invalidations(cause);
        counter!("hmem_cache_invalidations_total", &labels).absolute(count);
    }
    gauge!("hmem_cache_entries", &labels()).set(cache.entries as f64);
    gauge!("hmem_cache_bytes", &labels()).set(cache.bytes as f64);
}
