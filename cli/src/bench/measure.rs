//! Measuring two sides in turns, so that what disturbs the machine disturbs both.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

/// How long and how often each side runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Of one side in one round.
    pub(super) round: Duration,
    /// Rounds.
    pub(super) rounds: usize,
}

impl Effort {
    /// For figures that are written down.
    pub(super) const FULL: Self = Self { round: Duration::from_millis(5), rounds: 121 };
    /// To see that it runs.
    pub(super) const QUICK: Self = Self { round: Duration::from_millis(1), rounds: 3 };

    /// The same time in shorter rounds, of which an interruption meets few: for sides that are nearly alike.
    pub(super) fn fine(self) -> Self {
        const PARTS: u32 = 25;
        Self { round: self.round / PARTS, rounds: self.rounds * PARTS as usize }
    }
}

/// What is measured.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    /// Threads that do it at once.
    pub(super) threads: usize,
    /// Does operations from a number on, so many of them.
    pub(super) run: &'a (dyn Fn(u64, u64) + Sync),
}

/// Nanoseconds an operation of each side, in the same order: medians over rounds that alternate.
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

/// How many operations fill a round.
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

/// The time of the slowest thread, each of which does `count` operations, from `next` on.
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

/// The place of operation `number` in a fixed pseudo-random order (splitmix64), below `bound`.
#[inline]
pub(super) fn place(number: u64, bound: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z >> 32) * bound) >> 32
}
