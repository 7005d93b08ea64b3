//! The figures of a measurement and its two sides: reports print them, and peers exchange them.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::json::Attempt;

/// Characters of a peer's words that are passed on.
const WORDS: usize = 400;

/// The memory and the NIC of one side, and the path between them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Side {
    /// The iface of the memory.
    pub iface: String,
    /// The device; null for memory of none.
    pub device: Option<u32>,
    /// The provider.
    pub provider: String,
    /// The NIC within the provider.
    pub nic: String,
    /// The path from memory to NIC.
    pub path: String,
    /// The reason for the path.
    pub reason: String,
    /// The ordering that the memory was registered with: `relaxed` or `strict`.
    #[serde(default)]
    pub ordering: String,
    /// The attempts of the path decision.
    pub trace: Vec<Attempt>,
}

impl Side {
    /// Removes control characters, which a terminal would act on, from the words of a peer.
    pub(super) fn plain(self) -> Self {
        let line = |text: Option<String>| text.as_deref().map(plain);
        Self {
            iface: plain(&self.iface),
            device: self.device,
            provider: plain(&self.provider),
            nic: plain(&self.nic),
            path: plain(&self.path),
            reason: plain(&self.reason),
            ordering: plain(&self.ordering),
            trace: self
                .trace
                .into_iter()
                .map(|attempt| Attempt {
                    path: plain(&attempt.path).into(),
                    call: plain(&attempt.call),
                    error: line(attempt.error),
                    cause: line(attempt.cause),
                    remedy: line(attempt.remedy),
                })
                .collect(),
        }
    }

    pub(super) fn summary(&self) -> String {
        let memory = match self.device {
            Some(device) => format!("{}:{device}", self.iface),
            None => self.iface.clone(),
        };
        format!("{memory} on {}/{} over {} ({})", self.provider, self.nic, self.path, self.reason)
    }
}

/// The bandwidth of many transfers at once.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bandwidth {
    /// Transfers outstanding.
    pub depth: u32,
    /// Transfers.
    pub transfers: u64,
    /// Seconds from the first post to the last completion.
    pub seconds: f64,
    /// GiB (2^30 bytes) per second.
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

/// The time of single transfers from post to completion, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latency {
    /// Transfers.
    pub transfers: u64,
    /// The quickest.
    pub min_us: f64,
    /// Half took no longer.
    pub p50_us: f64,
    /// 90% took no longer.
    pub p90_us: f64,
    /// 99% took no longer.
    pub p99_us: f64,
    /// 99.9% took no longer.
    pub p999_us: f64,
    /// The slowest.
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

/// The measurements of one size.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Bytes of a transfer.
    pub bytes: u64,
    /// Set if every byte was right after each run of transfers. There is no report otherwise.
    pub verified: bool,
    /// With many transfers outstanding; null if not asked for.
    pub bandwidth: Option<Bandwidth>,
    /// With one; null if not asked for.
    pub latency: Option<Latency>,
}

/// Returns a peer's words on one line, without control characters.
pub(super) fn plain(words: &str) -> String {
    let clean = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(WORDS).collect::<String>().split_whitespace().collect::<Vec<_>>().join(" ")
}
