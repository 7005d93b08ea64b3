//! Ratios of what one run measured, read from criterion's own estimates, or taken by turns.

pub(crate) mod turns;

use std::path::{Path, PathBuf};

use serde_json::Value;

/// One line of the report: a figure of hmem, the figure to compare it with, and the goal.
pub(crate) struct Row {
    /// The measured quantity.
    pub(crate) what: &'static str,
    /// Criterion's id of our figure, `group/function`.
    pub(crate) ours: &'static str,
    /// Criterion's id of the figure to compare with.
    pub(crate) other: &'static str,
    /// Goal for the ratio.
    pub(crate) target: Target,
}

/// A goal.
pub(crate) enum Target {
    /// Upper limit of hmem's figure divided by the other figure.
    Ratio(f64),
    /// Upper limit of hmem's figure, in nanoseconds.
    Nanoseconds(f64),
    /// No limit: the figure is printed for orientation.
    Orientation,
}

impl Target {
    /// The goal as it is printed, and whether our figure and the ratio are within it.
    fn holds(&self, ours: f64, ratio: f64) -> (String, bool) {
        match *self {
            Self::Ratio(most) => (format!("{most:.2}"), ratio <= most),
            Self::Nanoseconds(most) => (format!("{most:.0} ns"), ours <= most),
            Self::Orientation => ("-".to_owned(), true),
        }
    }
}

fn target_dir() -> PathBuf {
    // target/release/deps/<bench>: three levels up.
    let bench = std::env::current_exe().expect("a running bench has a path");
    bench.ancestors().nth(3).expect("a bench lies in the target directory").join("criterion")
}

fn median(root: &Path, id: &str) -> Option<f64> {
    let text = std::fs::read_to_string(root.join(id).join("new/estimates.json")).ok()?;
    let estimates: Value = serde_json::from_str(&text).ok()?;
    estimates["median"]["point_estimate"].as_f64()
}

/// Prints the ratios of medians. Figures that this run did not measure are reported as missing.
pub(crate) fn print(rows: &[Row]) {
    let root = target_dir();
    println!(
        "\n{:<66} {:>10} {:>10} {:>7} {:>7}",
        "figure (medians of this run, ns)", "ours", "other", "ratio", "goal"
    );
    for row in rows {
        match (median(&root, row.ours), median(&root, row.other)) {
            (Some(ours), Some(other)) => {
                let ratio = ours / other;
                let (goal, met) = row.target.holds(ours, ratio);
                let mark = if met { "" } else { "  over" };
                println!(
                    "{:<66} {ours:>10.1} {other:>10.1} {ratio:>7.2} {goal:>7}{mark}",
                    row.what
                );
            }
            (ours, other) => {
                let missing = [(ours, row.ours), (other, row.other)];
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

/// Deletes the results of earlier runs, so that the report contains only figures of this run.
pub(crate) fn forget(group: &str) {
    let folder = target_dir().join(group);
    if folder.exists()
        && let Err(error) = std::fs::remove_dir_all(&folder)
    {
        eprintln!("{}: {error}", folder.display());
    }
}
