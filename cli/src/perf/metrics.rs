//! The counts of a side's domains, for `--metrics`.

use std::{
    io::{self, Write},
    time::Duration,
};

use hmem::{Domain, Path};
use serde::Serialize;

use super::figures::Order;
use crate::table::{Style, bytes};

/// The counts of one domain of this side. Each write ordering has a domain of its own.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Metrics {
    /// The write ordering of the domain's registrations.
    pub ordering: Order,
    /// The registrations by path, without paths that have none.
    pub paths: Vec<PathCount>,
    /// The failed registrations by kind and cause.
    pub refusals: Vec<Refusals>,
    /// The times of the registrations in ranges that double, without empty ranges.
    pub latency: Vec<LatencyRange>,
}

/// The registrations over one path.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PathCount {
    /// The name of the path, such as `dma-buf`.
    pub path: &'static str,
    /// The number of registrations.
    pub registrations: u64,
    /// The number of registered bytes.
    pub bytes: u64,
}

/// The failed registrations with one kind of error and one cause.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Refusals {
    /// The kind of the error, in words.
    pub kind: &'static str,
    /// The name of the most probable cause; null if unknown.
    pub cause: Option<&'static str>,
    /// The number of registrations that failed in this way.
    pub count: u64,
}

/// The number of registrations whose time is in one range.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LatencyRange {
    /// The upper bound of the range in microseconds; the lower bound is half of it. Null for all
    /// times from 2^38 ns on.
    pub below_us: Option<f64>,
    /// The number of registrations.
    pub count: u64,
}

impl Metrics {
    pub(super) fn of(domain: &Domain, ordering: Order) -> Self {
        let metrics = domain.metrics();
        let paths = Path::ALL.into_iter().map(|path| (path, metrics.path(path)));
        let latency = metrics.latency.clone().unwrap_or_default();
        Self {
            ordering,
            paths: paths
                .filter(|(_, counts)| counts.registrations > 0)
                .map(|(path, counts)| PathCount {
                    path: path.name(),
                    registrations: counts.registrations,
                    bytes: counts.bytes,
                })
                .collect(),
            refusals: metrics
                .refusals
                .iter()
                .map(|refusal| Refusals {
                    kind: refusal.kind.text(),
                    cause: refusal.cause,
                    count: refusal.count,
                })
                .collect(),
            latency: latency
                .buckets()
                .filter(|(_, count)| *count > 0)
                .map(|(bound, count)| {
                    let is_last = bound == Duration::MAX;
                    let below_us = (!is_last).then(|| bound.as_nanos() as f64 / 1e3);
                    LatencyRange { below_us, count }
                })
                .collect(),
        }
    }

    /// Prints the counts as readable text instead of JSON.
    pub(super) fn print(&self, out: &mut dyn Write, style: Style) -> io::Result<()> {
        let ordering = match self.ordering {
            Order::Strict => "strict",
            Order::Relaxed => "relaxed",
        };
        style.heading(out, &format!("Registrations of this side ({ordering} ordering)"))?;
        for PathCount { path, registrations, bytes: size } in &self.paths {
            let counts = format!("{registrations} registered, {}", bytes(*size));
            style.item(out, &format!("{path}:"), &counts)?;
        }
        for LatencyRange { below_us, count } in &self.latency {
            let range = match below_us {
                Some(below) => format!("below {below} us:"),
                None => "longer:".to_owned(),
            };
            style.item(out, &range, &count.to_string())?;
        }
        for Refusals { kind, cause, count } in &self.refusals {
            let cause = cause.unwrap_or("no known cause");
            style.item(out, "refused:", &format!("{count}, {kind} ({cause})"))?;
        }
        writeln!(out)
    }
}
