//! Timing of several workloads in alternating rounds, so that other work on the machine slows all
//! of them alike.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

/// Duration and number of the rounds of a measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Time for which each workload runs in a round.
    pub(super) round: Duration,
    /// Number of rounds.
    pub(super) rounds: usize,
}

impl Effort {
    /// Settings of a full run, for published figures.
    pub(super) const FULL: Self = Self { round: Duration::from_millis(5), rounds: 121 };
    /// Settings of a quick run, for a test that only checks that the benchmark works.
    pub(super) const QUICK: Self = Self { round: Duration::from_millis(1), rounds: 3 };

    /// Returns settings with shorter and more rounds. An interruption then affects fewer
    /// operations, which helps to compare workloads with similar times.
    pub(super) fn fine(self) -> Self {
        const PARTS: u32 = 25;
        Self { round: self.round / PARTS, rounds: self.rounds * PARTS as usize }
    }
}

/// One of the workloads that a measurement compares. A workload repeats an operation, and numbers
/// the repetitions.
#[derive(Clone, Copy)]
pub(super) struct Workload<'a> {
    /// Number of threads that run the operation at the same time.
    pub(super) threads: usize,
    /// Runs the operation several times in a row. The first argument is the number of the first
    /// repetition, and the second is how many repetitions to run.
    pub(super) run: &'a (dyn Fn(u64, u64) + Sync),
}

/// Measures workloads in alternating rounds. Returns the median nanoseconds per operation of each
/// workload.
pub(super) fn alternate(effort: Effort, workloads: &[Workload<'_>]) -> Vec<f64> {
    let mut next = vec![0; workloads.len()];
    let counts: Vec<u64> = workloads
        .iter()
        .zip(&mut next)
        .map(|(workload, next)| calibrate(effort, *workload, next))
        .collect();
    let mut seen = vec![Vec::with_capacity(effort.rounds); workloads.len()];
    for _ in 0..effort.rounds {
        for (index, workload) in workloads.iter().enumerate() {
            let elapsed = time(*workload, &mut next[index], counts[index]);
            seen[index].push(elapsed.as_nanos() as f64 / counts[index] as f64);
        }
    }
    seen.into_iter().map(median).collect()
}

/// Measures how many operations of a workload fit into one round. Starts with operation number
/// `next`, and adds the number of operations that it ran to `next`.
fn calibrate(effort: Effort, workload: Workload<'_>, next: &mut u64) -> u64 {
    let mut count = 64;
    loop {
        let elapsed = time(workload, next, count);
        if elapsed >= effort.round / 2 {
            let fitting = count as f64 * effort.round.as_secs_f64() / elapsed.as_secs_f64();
            return (fitting as u64).max(1);
        }
        count *= 2;
    }
}

/// Runs `count` operations on each thread of a workload, starting with number `next`. Adds `count`
/// to `next`. Returns the time of the slowest thread.
fn time(Workload { threads, run }: Workload<'_>, next: &mut u64, count: u64) -> Duration {
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
                    // Each thread starts at a different number, so that the threads look up
                    // different regions.
                    let start = start.wrapping_add(thread << 32);
                    barrier.wait();
                    let began = Instant::now();
                    run(start, count);
                    began.elapsed()
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("an operation does not panic")).max()
    })
    .unwrap_or_default()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Maps the number of an operation to a pseudo-random number below `bound` (splitmix64). The result
/// is the same in every run.
#[inline]
pub(super) fn pseudo_random(number: u64, bound: u64) -> u64 {
    let mut z = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z >> 32) * bound) >> 32
}
