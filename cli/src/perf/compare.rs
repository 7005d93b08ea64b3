//! `hmem perf --compare-paths`: measures each path between a device's memory and a NIC.
//!
//! The client uses memory of the device. The server uses host memory, and runs in the same process.
//! So each measurement uses one path only. Staged memory is measured too on NICs whose peers cannot
//! reach staged memory. In writes the NIC reads the device's memory. In reads the NIC writes the
//! device's memory.

use std::io::{self, Write};

use hmem::{DeviceId, Error, IfaceKind, Path, Result, path::DirectPath};
use serde::Serialize;

use super::{
    client::Plan,
    end::EndConfig,
    figures::{Bandwidth, Order},
    report::significant,
};
use crate::{
    args::{Measure, PerfOp},
    json::{Attempt, SCHEMA, memory_name},
    problem::Problem,
    progress::Progress,
    table::{Cell, Style, Table, bytes},
};

/// The results of a comparison of paths.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Comparison {
    /// The version of the JSON schema.
    pub schema: u32,
    /// The version of `hmem` that printed the document.
    pub version: &'static str,
    /// The iface of the memory.
    pub iface: String,
    /// The device that holds the memory.
    pub device: u32,
    /// The name of the NIC's provider.
    pub provider: String,
    /// The name of the NIC in its provider.
    pub nic: String,
    /// The size of a transfer in bytes.
    pub bytes: u64,
    /// The measured paths, in the order of the measurements.
    pub paths: Vec<Measured>,
    /// The setting that lists the direct paths that are not slower than staged copies, fastest
    /// first.
    pub setting: String,
}

/// The results of one path.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Measured {
    /// The name of the path, as `HMEM_DIRECT_PATHS` lists it, or `staged`.
    pub path: String,
    /// The bandwidth of writes to host memory; null if the path does not work.
    pub write: Option<Bandwidth>,
    /// The bandwidth of reads of host memory; null if the path does not work.
    pub read: Option<Bandwidth>,
    /// The reason why the path does not work, on one line; null if it works.
    pub error: Option<String>,
    /// The attempts to register the memory over the path.
    pub trace: Vec<Attempt>,
    #[serde(skip)]
    direct: Option<DirectPath>,
    #[serde(skip)]
    failed: Option<Error>,
}

impl Measured {
    /// Returns the lower of the two bandwidths in GiB per second; `None` if the path does not
    /// work.
    fn slower(&self) -> Option<f64> {
        Some(self.write?.gib_per_s.min(self.read?.gib_per_s))
    }

    /// Returns the reason why the path does not work, for text output: the first refusal with its
    /// probable cause, or else the error.
    fn why(&self) -> Option<String> {
        let error = self.error.clone()?;
        let refused = self.trace.iter().find_map(|attempt| {
            let reason = attempt.error.as_deref()?;
            Some(match &attempt.cause {
                Some(cause) => format!("{reason}; probable cause: {cause}"),
                None => reason.to_owned(),
            })
        });
        Some(refused.unwrap_or(error))
    }
}

/// Measures the direct paths and staged copies between the memory of `config` and its NIC, with
/// transfers of the largest size of `plan`.
pub(super) fn compare(
    config: &EndConfig<'_>,
    plan: Plan,
    progress: &mut Progress,
) -> Result<Comparison> {
    let size = plan.sizes.iter().copied().max().unwrap_or(1);
    let plan =
        Plan { sizes: vec![size], measure: Measure::Bandwidth, orders: &[Order::Strict], ..plan };
    let direct = DirectPath::ALL.into_iter().map(Some);
    let mut paths = Vec::new();
    for (at, path) in direct.chain([None]).enumerate() {
        let name = path.map_or(Path::Staged.name(), DirectPath::name);
        progress.show(at, DirectPath::ALL.len() + 1, name);
        paths.push(measure(config, &plan, path)?);
    }
    if let Some(error) =
        paths[0].failed.clone().filter(|_| paths.iter().all(|it| it.failed.is_some()))
    {
        return Err(error);
    }
    let nic = &config.nic.attr.nic;
    Ok(Comparison {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION"),
        iface: config.iface.name().to_owned(),
        device: config.device.0,
        provider: nic.provider.clone(),
        nic: nic.name.clone(),
        bytes: size,
        setting: format!("HMEM_DIRECT_PATHS={}", DirectPath::list(&fastest(&paths))),
        paths,
    })
}

/// Measures one path: a direct one, or staged copies for `None`.
fn measure(config: &EndConfig<'_>, plan: &Plan, path: Option<DirectPath>) -> Result<Measured> {
    let listed = path.as_slice();
    let near = EndConfig { direct_paths: Some(listed), ..*config };
    let system = config.hmem.iface(IfaceKind::SYSTEM)?;
    let far = EndConfig { iface: system, device: DeviceId(0), direct_paths: None, ..*config };
    let mut measured = Measured {
        path: path.map_or(Path::Staged.name(), DirectPath::name).to_owned(),
        write: None,
        read: None,
        error: None,
        trace: Vec::new(),
        direct: path,
        failed: None,
    };
    for op in [PerfOp::Write, PerfOp::Read] {
        let plan = Plan { op, ..plan.clone() };
        match super::both((&near, &far), &plan, &mut |_| Ok(())) {
            Ok(report) => {
                let bandwidth = report.results.first().and_then(|row| row.bandwidth);
                *if op == PerfOp::Write { &mut measured.write } else { &mut measured.read } =
                    bandwidth;
                measured.trace = report.local.trace;
            }
            Err(error) => {
                if !error.trace().is_empty() {
                    measured.trace = error.trace().iter().map(Attempt::from).collect();
                }
                measured.error = Some(format!("{error:#}"));
                (measured.write, measured.read) = (None, None);
                measured.failed = Some(error);
                break;
            }
        }
    }
    Ok(measured)
}

/// Returns the direct paths that work and are not slower than staged copies, fastest first.
fn fastest(paths: &[Measured]) -> Vec<DirectPath> {
    let staged = paths.iter().find(|path| path.direct.is_none()).and_then(Measured::slower);
    let with_speed = paths.iter().filter_map(|path| Some((path.direct?, path.slower()?)));
    let mut direct: Vec<_> =
        with_speed.filter(|(_, speed)| staged.is_none_or(|staged| *speed >= staged)).collect();
    direct.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    direct.into_iter().map(|(path, _)| path).collect()
}

/// Prints a comparison as readable text.
pub(super) fn text(out: &mut dyn Write, found: &Comparison, style: Style) -> io::Result<()> {
    let memory = memory_name(&found.iface, Some(found.device));
    let size = bytes(found.bytes);
    style.heading(
        out,
        &format!("Paths of {memory} on {}/{}, transfers of {size}", found.provider, found.nic),
    )?;
    let mut table = Table::new(&["Path", "Write GiB/s", "Read GiB/s"]).numbers([1, 2]);
    for path in &found.paths {
        let speed = |of: Option<Bandwidth>| match of {
            Some(of) => Cell::new(significant(of.gib_per_s)),
            None => Cell::none(),
        };
        table.row([Cell::new(&path.path), speed(path.write), speed(path.read)]);
    }
    style.print(out, &table)?;
    for path in &found.paths {
        if let Some(why) = path.why() {
            style.item(out, &format!("{}:", path.path), &why)?;
        }
    }
    style.item(out, "fastest first:", &found.setting)?;
    writeln!(out)
}

/// Returns the problem to report if `--compare-paths` is used with host memory.
pub(super) fn host_memory() -> Problem {
    Problem::new("host memory has one path only")
        .remedy("name the iface of a device (--iface, --device); `hmem info` lists the ifaces")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn measured(direct: Option<DirectPath>, seconds: Option<(u64, u64)>) -> Measured {
        let of = |seconds| Bandwidth::new(1, 1, 1 << 30, Duration::from_secs(seconds));
        Measured {
            path: String::new(),
            write: seconds.map(|(write, _)| of(write)),
            read: seconds.map(|(_, read)| of(read)),
            error: None,
            trace: Vec::new(),
            direct,
            failed: None,
        }
    }

    #[test]
    fn setting_lists_the_paths_that_are_faster_than_staging_by_their_slower_direction() {
        let [default, pcie, data_direct, peer] = DirectPath::ALL;
        let paths = [
            measured(Some(default), Some((1, 8))),
            measured(Some(pcie), Some((4, 4))),
            measured(Some(data_direct), None),
            measured(Some(peer), Some((1, 20))),
            measured(None, Some((10, 10))),
        ];
        assert_eq!(fastest(&paths), [pcie, default]);
        assert_eq!(fastest(&paths[..4]), [pcie, default, peer]);
        assert_eq!(DirectPath::list(&fastest(&paths[4..])), "none");
    }
}
