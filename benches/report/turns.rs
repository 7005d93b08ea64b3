//! Two operations measured by turns, and the ratio of the two.
//!
//! One after the other, each for seconds, they would meet different machines: other work comes and goes. Here both run in
//! rounds of a few milliseconds, ours first in one round and second in the next, and each round gives a ratio. Medians
//! over the rounds are printed, with the quartiles of the ratio.

use std::time::{Duration, Instant};

use super::Target;

const ROUNDS: usize = 400;
const ROUND: Duration = Duration::from_millis(4);

/// One line of the report.
pub(crate) struct Turns {
    what: &'static str,
    target: Target,
    ours: Vec<f64>,
    /// Round by round as in `ours`; empty if the other is not here.
    other: Vec<f64>,
}

/// How often an operation fits into a round.
fn fit(operation: &mut impl FnMut()) -> u32 {
    let mut times = 1;
    loop {
        let took = time(operation, times);
        if took >= ROUND / 2 {
            return (f64::from(times) * ROUND.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
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

fn nanoseconds(operation: &mut impl FnMut(), times: u32) -> f64 {
    time(operation, times).as_secs_f64() * 1e9 / f64::from(times)
}

/// Measures both.
pub(crate) fn against(
    what: &'static str,
    target: Target,
    mut ours: impl FnMut(),
    mut other: impl FnMut(),
) -> Turns {
    let (our_times, other_times) = (fit(&mut ours), fit(&mut other));
    let mut turns = Turns { what, target, ours: Vec::new(), other: Vec::new() };
    for round in 0..ROUNDS {
        if round % 2 == 0 {
            turns.ours.push(nanoseconds(&mut ours, our_times));
            turns.other.push(nanoseconds(&mut other, other_times));
        } else {
            turns.other.push(nanoseconds(&mut other, other_times));
            turns.ours.push(nanoseconds(&mut ours, our_times));
        }
    }
    turns
}

/// Measures ours, where what it is held against is not here.
pub(crate) fn alone(what: &'static str, target: Target, mut ours: impl FnMut()) -> Turns {
    let times = fit(&mut ours);
    let ours = (0..ROUNDS).map(|_| nanoseconds(&mut ours, times)).collect();
    Turns { what, target, ours, other: Vec::new() }
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
            let [_, median, _] = quartiles(ours);
            println!("{what:<66} {median:>10.1} not measured: the other side");
            continue;
        }
        let [low, ratio, high] =
            quartiles(ours.iter().zip(&other).map(|(ours, other)| ours / other).collect());
        let ([_, ours, _], [_, other, _]) = (quartiles(ours), quartiles(other));
        let (goal, met) = target.holds(ours, ratio);
        let mark = if met { "" } else { "  over" };
        let spread = format!("{low:.2} to {high:.2}");
        println!("{what:<66} {ours:>10.1} {other:>10.1} {ratio:>6.2} {spread:>13} {goal:>6}{mark}");
    }
}
