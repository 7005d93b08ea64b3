//! Comparison of two operations that run alternately, with the ratio of their times.
//!
//! Other work on the machine changes within milliseconds, so the two operations run in short
//! alternating blocks. A block lasts a fifth of a millisecond, or one operation if that takes
//! longer. One block of each operation forms a pair. hmem's block comes first in every other pair.
//!
//! A round has as many pairs of blocks as fit into its duration. The result of a round is the
//! median of its blocks, so that interrupted blocks do not count. The report shows the median of
//! each operation over all rounds, and the quartiles of the ratio.

use std::time::{Duration, Instant};

const ROUNDS: usize = 400;
/// Time for which each operation runs in one round.
const ROUND: Duration = Duration::from_millis(4);
const BLOCK: Duration = Duration::from_micros(200);

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

/// The measured times of hmem and of its reference: one line of the report.
pub(crate) struct Comparison {
    what: &'static str,
    target: Target,
    ours: Vec<f64>,
    /// Times of the reference operation, one for each round. Empty if only hmem was measured.
    reference: Vec<f64>,
}

/// Returns how many operations fit into a block, and how many of these blocks fit into a round.
fn fit(operation: &mut impl FnMut()) -> (u32, u32) {
    let mut times = 1;
    loop {
        let took = time(operation, times);
        if took >= BLOCK / 2 {
            let each = took.as_secs_f64() / f64::from(times);
            let times = (BLOCK.as_secs_f64() / each).ceil() as u32;
            let blocks = ROUND.as_secs_f64() / (each * f64::from(times));
            return (times, blocks.ceil() as u32);
        }
        times *= 2;
    }
}

fn time(operation: &mut impl FnMut(), times: u32) -> Duration {
    let start = Instant::now();
    for _ in 0..times {
        operation();
    }
    start.elapsed()
}

/// Runs an operation `times` times. Returns the nanoseconds per operation.
fn block(operation: &mut impl FnMut(), times: u32) -> f64 {
    time(operation, times).as_secs_f64() * 1e9 / f64::from(times)
}

/// Measures hmem and a reference operation alternately.
pub(crate) fn compare(
    what: &'static str,
    target: Target,
    mut ours: impl FnMut(),
    mut reference: impl FnMut(),
) -> Comparison {
    let (our_times, our_blocks) = fit(&mut ours);
    let (reference_times, reference_blocks) = fit(&mut reference);
    let blocks = our_blocks.min(reference_blocks);
    let mut comparison = Comparison { what, target, ours: Vec::new(), reference: Vec::new() };
    let mut pair = 0;
    for _ in 0..ROUNDS {
        let (mut of_ours, mut of_reference) = (Vec::new(), Vec::new());
        for _ in 0..blocks {
            pair += 1;
            if pair % 2 == 0 {
                of_ours.push(block(&mut ours, our_times));
                of_reference.push(block(&mut reference, reference_times));
            } else {
                of_reference.push(block(&mut reference, reference_times));
                of_ours.push(block(&mut ours, our_times));
            }
        }
        comparison.ours.push(median(of_ours));
        comparison.reference.push(median(of_reference));
    }
    comparison
}

/// Measures hmem without a reference, if there is none or it is not installed.
pub(crate) fn measure_alone(
    what: &'static str,
    target: Target,
    mut ours: impl FnMut(),
) -> Comparison {
    let (times, blocks) = fit(&mut ours);
    let mut round = || median((0..blocks).map(|_| block(&mut ours, times)).collect());
    let ours = (0..ROUNDS).map(|_| round()).collect();
    Comparison { what, target, ours, reference: Vec::new() }
}

fn median(values: Vec<f64>) -> f64 {
    let [_, median, _] = quartiles(values);
    median
}

/// Returns the lower quartile, the median and the upper quartile.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

/// Prints a line for each comparison: the median times, the ratio with its quartiles, and the goal.
pub(crate) fn print(lines: Vec<Comparison>) {
    println!(
        "\n{:<66} {:>10} {:>10} {:>6} {:>13} {:>6}",
        "figure (median of alternating rounds, ns)", "ours", "ref.", "ratio", "quartiles", "goal"
    );
    for Comparison { what, target, ours, reference } in lines {
        if reference.is_empty() {
            println!("{what:<66} {:>10.1} not compared: no reference", median(ours));
            continue;
        }
        let [low, ratio, high] = quartiles(
            ours.iter().zip(&reference).map(|(ours, reference)| ours / reference).collect(),
        );
        let (ours, reference) = (median(ours), median(reference));
        let (goal, met) = target.check(ours, ratio);
        let mark = if met { "" } else { "  over" };
        let spread = format!("{low:.2} to {high:.2}");
        let digits = if ratio < 0.1 { 4 } else { 2 };
        println!(
            "{what:<66} {ours:>10.1} {reference:>10.1} {ratio:>6.digits$} {spread:>13} \
             {goal:>6}{mark}"
        );
    }
}
