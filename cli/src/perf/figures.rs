//! The figures of a measurement and its two sides, which reports print and peers exchange.

use std::time::Duration;

use hdrhistogram::Histogram;
use hmem::WriteOrdering;
use serde::{Deserialize, Serialize};

use crate::json::{Attempt, Cause, memory_name};

/// Maximum number of characters printed from a peer's text.
const WORDS: usize = 400;

/// The side that printed the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The client, which posted and timed the transfers.
    Client,
    /// The server, which provided the remote memory.
    Server,
}

/// The memory and the NIC of one side, and the path between them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct EndDescription {
    /// The iface of the memory.
    pub iface: String,
    /// The device that holds the memory; null for host memory.
    pub device: Option<u32>,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The path from memory to NIC.
    pub path: String,
    /// The reason why this path was chosen.
    pub reason: String,
    /// The paths that the path decision tried, in the order of the attempts.
    pub trace: Vec<Attempt>,
}

impl EndDescription {
    /// Applies [`plain`] to the texts of a peer.
    pub(super) fn plain(self) -> Self {
        let line = |text: Option<String>| text.as_deref().map(plain);
        let trace = self.trace.into_iter().map(|attempt| Attempt {
            path: plain(&attempt.path).into(),
            call: plain(&attempt.call),
            unit: attempt.unit.map(|unit| plain(&unit).into()),
            error: line(attempt.error),
            cause: line(attempt.cause),
            remedy: line(attempt.remedy),
            causes: attempt
                .causes
                .into_iter()
                .map(|cause| Cause {
                    name: plain(&cause.name).into(),
                    cause: plain(&cause.cause),
                    evidence: line(cause.evidence),
                    remedy: plain(&cause.remedy).into(),
                })
                .collect(),
        });
        Self {
            iface: plain(&self.iface),
            device: self.device,
            provider: plain(&self.provider),
            nic: plain(&self.nic),
            path: plain(&self.path),
            reason: plain(&self.reason),
            trace: trace.collect(),
        }
    }

    /// Describes the side on one line, for text output.
    pub(super) fn summary(&self) -> String {
        let memory = memory_name(&self.iface, self.device);
        format!("{memory} on {}/{} over {} ({})", self.provider, self.nic, self.path, self.reason)
    }
}

/// The bandwidth with many transfers in flight.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Maximum number of transfers in flight.
    pub depth: u32,
    /// Number of transfers in the measurement.
    pub transfers: u64,
    /// Seconds from the first post to the last completion.
    pub seconds: f64,
    /// Bandwidth in GiB (2^30 bytes) per second.
    pub gib_per_s: f64,
    /// Transfers per second.
    pub transfers_per_s: f64,
}

impl Bandwidth {
    pub(super) fn new(depth: u32, transfers: u64, size: u64, took: Duration) -> Self {
        let seconds = took.as_secs_f64().max(1e-9);
        let transfers_per_s = transfers as f64 / seconds;
        let gib_per_s = transfers_per_s * size as f64 / (1u64 << 30) as f64;
        Self { depth, transfers, seconds, gib_per_s, transfers_per_s }
    }
}

/// Times of single transfers from post to completion, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Latency {
    /// Number of transfers in the measurement.
    pub transfers: u64,
    /// The shortest time, in microseconds.
    pub min_us: f64,
    /// The median, in microseconds.
    pub p50_us: f64,
    /// The 90th percentile, in microseconds.
    pub p90_us: f64,
    /// The 99th percentile, in microseconds.
    pub p99_us: f64,
    /// The 99.9th percentile, in microseconds.
    pub p999_us: f64,
    /// The longest time, in microseconds.
    pub max_us: f64,
}

impl Latency {
    pub(super) fn new(ns: &Histogram<u64>) -> Self {
        let us = |ns: u64| ns as f64 / 1e3;
        let quantile = |quantile| us(ns.value_at_quantile(quantile));
        Self {
            transfers: ns.len(),
            min_us: us(ns.min()),
            p50_us: quantile(0.5),
            p90_us: quantile(0.9),
            p99_us: quantile(0.99),
            p999_us: quantile(0.999),
            max_us: us(ns.max()),
        }
    }
}

/// The write ordering of the registrations of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Strict ordering, which registrations have by default.
    Strict,
    /// Relaxed ordering of PCI Express, if the NIC and the machine have it.
    Relaxed,
}

impl From<Order> for WriteOrdering {
    fn from(order: Order) -> Self {
        match order {
            Order::Strict => Self::Strict,
            Order::Relaxed => Self::Relaxed,
        }
    }
}

/// The gain of relaxed over strict ordering, for one transfer size. 0.1 means 10 % better.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Gain {
    /// The gain in bandwidth; null if it was not measured.
    pub bandwidth: Option<f64>,
    /// The gain in median latency; null if it was not measured.
    pub latency: Option<f64>,
}

impl Gain {
    /// Returns the gain of the figures in `relaxed` over those in `strict`.
    pub(super) fn of(relaxed: &Row, strict: &Row) -> Self {
        let bandwidth = relaxed.bandwidth.zip(strict.bandwidth);
        let latency = relaxed.latency.zip(strict.latency);
        Self {
            bandwidth: bandwidth.map(|(new, old)| new.gib_per_s / old.gib_per_s - 1.0),
            latency: latency.map(|(new, old)| old.p50_us / new.p50_us - 1.0),
        }
    }
}

/// The measurements of one transfer size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Size of a transfer, in bytes.
    pub bytes: u64,
    /// The write ordering of the registrations on both sides.
    pub ordering: Order,
    /// Always true. A failed verification ends the command without a report.
    pub verified: bool,
    /// The bandwidth; null if it was not measured.
    pub bandwidth: Option<Bandwidth>,
    /// The latency; null if it was not measured.
    pub latency: Option<Latency>,
    /// The gain over the row of the same size with strict ordering; null for a row with strict
    /// ordering, and if only one ordering was measured.
    pub gain: Option<Gain>,
}

/// Returns at most [`WORDS`] characters of a peer's text on one line. Spaces replace control
/// characters, which a terminal would obey.
pub(super) fn plain(words: &str) -> String {
    let clean = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(WORDS).collect::<String>().split_whitespace().collect::<Vec<_>>().join(" ")
}
