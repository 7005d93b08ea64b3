//! Measurements of several sides in turns, so that other work on the machine meets all of them.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

/// Length and number of rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Duration of one side's part of a round.
    pub(super) round: Duration,
    /// Number of rounds.
    pub(super) rounds: usize,
}

impl Effort {
    /// The effort for published figures.
    pub(super) const FULL: Self = Self { round: Duration::from_millis(5), rounds: 121 };
    /// The effort for a quick test that the benchmark runs.
    pub(super) const QUICK: Self = Self { round: Duration::from_millis(1), rounds: 3 };

    /// Splits the time into shorter rounds, of which an interruption meets few. It is for sides
    /// that are nearly alike.
    pub(super) fn fine(self) -> Self {
        const PARTS: u32 = 25;
        Self { round: self.round / PARTS, rounds: self.rounds * PARTS as usize }
    }
}

/// One side of a measurement.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    /// Number of threads that run at the same time.
    pub(super) threads: usize,
    /// Does operations: the number of the first one, and how many.
    pub(super) run: &'a (dyn Fn(u64, u64) + Sync),
}

/// Returns the nanoseconds an operation of each side: medians over rounds in turns.
pub(super) fn in_turns(effort: Effort, sides: &[Side<'_>]) -> Vec<f64> {
    let mut next = vec![0; sides.len()];
    let counts: Vec<u64> =
        sides.iter().zip(&mut next).map(|(side, next)| calibrate(effort, *side, next)).collect();
    let mut seen = vec![Vec::with_capacity(effort.rounds); sides.len()];
    for _ in 0..effort.rounds {
        for (index, side) in sides.iter().enumerate() {
            let elapsed = time(*side, &mut next[index], counts[index]);
            seen[index].push(elapsed.as_nanos() as f64 / counts[index] as f64);
        }
    }
    seen.into_iter().map(median).collect()
}

/// Returns the number of operations that fill the duration of a round.
fn calibrate(effort: Effort, side: Side<'_>, next: &mut u64) -> u64 {
    let mut count = 64;
    loop {
        let elapsed = time(side, next, count);
        if elapsed >= effort.round / 2 {
            let fitting = count as f64 * effort.round.as_secs_f64() / elapsed.as_secs_f64();
            return (fitting as u64).max(1);
        }
        count *= 2;
    }
}

/// Returns the time of the slowest thread. Each does `count` operations, from `next` on.
fn time(Side { threads, run }: Side<'_>, next: &mut u64, count: u64) -> Duration {
    let start = *next;
    *next += count;
    if threads == 1 {
        let began = Instant::now();
        run(start, count);
        return began.elapsed();
    }
    let barrier = Barrier::new(threads);
    thread::scope(|scope| {
        let running: Vec<_> = (0..threads as u64)
            .map(|thread| {
                let barrier = &barrier;
                scope.spawn(move || {
                    // Threads start at different places of the same sequence.
                    let start = start.wrapping_add(thread << 32);
                    barrier.wait();
                    let began = Instant::now();
                    run(start, count);
                    began.elapsed()
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("a side does not panic")).max()
    })
    .unwrap_or_default()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns a number below `bound` for operation `number`, in a fixed pseudo-random order
/// (splitmix64).
#[inline]
pub(super) fn place(number: u64, bound: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z >> 32) * bound) >> 32
}
