//! Two operations measured by turns, and the ratio of the two.
//!
//! One after the other, each for seconds, they would meet different machines: other work comes and
//! goes, in milliseconds too. Here both run in blocks of a fifth of a millisecond, or of one
//! operation that takes longer, ours first in one pair of blocks and second in the next. A round is
//! as many pairs as fit, and gives the ratio of the medians of its blocks: one that was interrupted
//! counts for nothing. Medians over the rounds are printed, with the quartiles of the ratio.

use std::time::{Duration, Instant};

use super::Target;

const ROUNDS: usize = 400;
/// Of each side.
const ROUND: Duration = Duration::from_millis(4);
const BLOCK: Duration = Duration::from_micros(200);

/// One line of the report.
pub(crate) struct Turns {
    what: &'static str,
    target: Target,
    ours: Vec<f64>,
    /// Round by round as in `ours`; empty if the other is not here.
    other: Vec<f64>,
}

/// How often an operation fits into a block, and how often such a block into a round.
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

/// Nanoseconds of one operation.
fn block(operation: &mut impl FnMut(), times: u32) -> f64 {
    time(operation, times).as_secs_f64() * 1e9 / f64::from(times)
}

/// Measures hmem and its peer or limit in turns, and returns their figures.
pub(crate) fn against(
    what: &'static str,
    target: Target,
    mut ours: impl FnMut(),
    mut other: impl FnMut(),
) -> Turns {
    let ((our_times, our_blocks), (other_times, other_blocks)) = (fit(&mut ours), fit(&mut other));
    let blocks = our_blocks.min(other_blocks);
    let mut turns = Turns { what, target, ours: Vec::new(), other: Vec::new() };
    let mut pair = 0;
    for _ in 0..ROUNDS {
        let (mut of_ours, mut of_other) = (Vec::new(), Vec::new());
        for _ in 0..blocks {
            pair += 1;
            if pair % 2 == 0 {
                of_ours.push(block(&mut ours, our_times));
                of_other.push(block(&mut other, other_times));
            } else {
                of_other.push(block(&mut other, other_times));
                of_ours.push(block(&mut ours, our_times));
            }
        }
        turns.ours.push(median(of_ours));
        turns.other.push(median(of_other));
    }
    turns
}

/// Measures ours, where what it is held against is not here.
pub(crate) fn alone(what: &'static str, target: Target, mut ours: impl FnMut()) -> Turns {
    let (times, blocks) = fit(&mut ours);
    let mut round = || median((0..blocks).map(|_| block(&mut ours, times)).collect());
    let ours = (0..ROUNDS).map(|_| round()).collect();
    Turns { what, target, ours, other: Vec::new() }
}

fn median(values: Vec<f64>) -> f64 {
    let [_, median, _] = quartiles(values);
    median
}

/// The values at a quarter, a half and three quarters.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

/// Prints medians and ratios.
pub(crate) fn print(lines: Vec<Turns>) {
    println!(
        "\n{:<66} {:>10} {:>10} {:>6} {:>13} {:>6}",
        "figure (medians of rounds by turns, ns)", "ours", "other", "ratio", "quartiles", "goal"
    );
    for Turns { what, target, ours, other } in lines {
        if other.is_empty() {
            println!("{what:<66} {:>10.1} not measured: the other side", median(ours));
            continue;
        }
        let [low, ratio, high] =
            quartiles(ours.iter().zip(&other).map(|(ours, other)| ours / other).collect());
        let (ours, other) = (median(ours), median(other));
        let (goal, met) = target.holds(ours, ratio);
        let mark = if met { "" } else { "  over" };
        let spread = format!("{low:.2} to {high:.2}");
        let digits = if ratio < 0.1 { 4 } else { 2 };
        println!(
            "{what:<66} {ours:>10.1} {other:>10.1} {ratio:>6.digits$} {spread:>13} {goal:>6}{mark}"
        );
    }
}
