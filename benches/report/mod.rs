//! Reports of benchmarks: ratios of criterion's medians, or of operations that ran alternately.

pub(crate) mod alternating;

use std::path::{Path, PathBuf};

use serde_json::Value;

/// One line of a report: hmem's figure, the reference figure, and the goal.
pub(crate) struct Row {
    /// Name of the measured quantity.
    pub(crate) what: &'static str,
    /// Criterion's id of hmem's figure, as `group/function`.
    pub(crate) ours: &'static str,
    /// Criterion's id of the reference figure, as `group/function`.
    pub(crate) reference: &'static str,
    /// Goal for hmem's figure or for the ratio of the two figures.
    pub(crate) target: Target,
}

/// Goal of a measurement.
pub(crate) enum Target {
    /// Upper limit of hmem's figure divided by the reference figure.
    Ratio(f64),
    /// Upper limit of hmem's figure, in nanoseconds.
    Nanoseconds(f64),
    /// There is no goal: the report only shows the figures.
    Unlimited,
}

impl Target {
    /// Returns the goal as text, and true if the measurement meets the goal. `ours` is hmem's time
    /// in nanoseconds, and `ratio` is `ours` divided by the reference time.
    fn check(&self, ours: f64, ratio: f64) -> (String, bool) {
        match *self {
            Self::Ratio(most) => (format!("{most:.2}"), ratio <= most),
            Self::Nanoseconds(most) => (format!("{most:.0} ns"), ours <= most),
            Self::Unlimited => ("-".to_owned(), true),
        }
    }
}

fn target_dir() -> PathBuf {
    // Cargo runs a benchmark as `target/release/deps/NAME`, three levels below the target
    // directory.
    let bench = std::env::current_exe().expect("a running bench has a path");
    bench.ancestors().nth(3).expect("a bench is inside the target directory").join("criterion")
}

fn median(root: &Path, id: &str) -> Option<f64> {
    let text = std::fs::read_to_string(root.join(id).join("new/estimates.json")).ok()?;
    let estimates: Value = serde_json::from_str(&text).ok()?;
    estimates["median"]["point_estimate"].as_f64()
}

/// Prints hmem's median, the reference median and their ratio for each row. If criterion measured
/// only one of the two, the row says which is missing.
pub(crate) fn print(rows: &[Row]) {
    let root = target_dir();
    println!(
        "\n{:<66} {:>10} {:>10} {:>7} {:>7}",
        "figure (median of this run, ns)", "ours", "ref.", "ratio", "goal"
    );
    for row in rows {
        match (median(&root, row.ours), median(&root, row.reference)) {
            (Some(ours), Some(other)) => {
                let ratio = ours / other;
                let (goal, met) = row.target.check(ours, ratio);
                let mark = if met { "" } else { "  over" };
                println!(
                    "{:<66} {ours:>10.1} {other:>10.1} {ratio:>7.2} {goal:>7}{mark}",
                    row.what
                );
            }
            (ours, other) => {
                let missing = [(ours, row.ours), (other, row.reference)];
                let missing: Vec<_> = missing
                    .iter()
                    .filter(|(value, _)| value.is_none())
                    .map(|(_, id)| *id)
                    .collect();
                println!("{:<66} not measured: {}", row.what, missing.join(", "));
            }
        }
    }
}

/// Deletes criterion's results of earlier runs of a group, so that the report has only this run's
/// figures.
pub(crate) fn forget(group: &str) {
    let folder = target_dir().join(group);
    if folder.exists()
        && let Err(error) = std::fs::remove_dir_all(&folder)
    {
        eprintln!("{}: {error}", folder.display());
    }
}
