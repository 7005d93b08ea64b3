//! Mixed load from eight threads in each of two processes, with checked bytes, keys, counters and
//! resources.
//!
//! `cargo xtask soak [--minutes N]` runs it for an hour or for N minutes, and
//! `tests/vm/run --dma-buf --soak N` over rdma_rxe. Without the argument `--soak`, the binary runs
//! tests: a few seconds of the load, and of the load with one planted fault, which the checks must
//! detect.

#[path = "../trials/mod.rs"]
mod trials;

mod accounts;
mod link;
mod load;
mod workers;

use std::{
    env,
    panic::PanicHookInfo,
    process::{Command, ExitCode, Stdio},
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use accounts::{Check, Resources, fds, peak_kib, threads_of_children};
use load::{Load, Me, Shared};
use trials::{Outcome, Skipped, trials};
use workers::{WORKERS, second};

/// Exit status of a run that this machine cannot do.
const MISSING: u8 = 3;

/// The environment variable with the name of an RDMA device that registers dma-bufs.
pub(crate) const DEVICE: &str = "HMEM_VERBS_DEVICE";

/// The environment variable with the seconds for which the test over an RDMA device runs.
const RDMA_SECONDS: &str = "HMEM_SOAK_SECONDS";

/// A fault that a test plants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plant {
    /// A leaked file descriptor.
    Leak,
    /// Leaked memory.
    Memory,
    /// A leaked registration.
    Region,
    /// A lookup that returns the region of replaced memory.
    Stale,
    /// A write that is never posted.
    Lost,
    /// A wait for a request that never ends.
    Hang,
    /// A kind of check that never runs.
    Unchecked,
}

impl Plant {
    const ALL: [(&str, Self); 7] = [
        ("leak", Self::Leak),
        ("memory", Self::Memory),
        ("region", Self::Region),
        ("stale", Self::Stale),
        ("lost", Self::Lost),
        ("hang", Self::Hang),
        ("unchecked", Self::Unchecked),
    ];
}

/// The options of a run.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    duration: Duration,
    /// The longest time that a worker's step may take.
    step_limit: Duration,
    pub(crate) plant: Option<Plant>,
    /// True in the second process, which runs until the first one stops it.
    pub(crate) second: bool,
    /// True for the RDMA device that [`DEVICE`] names, false for the software NIC.
    pub(crate) rdma: bool,
}

const USAGE: &str = "--soak [--rdma] [--minutes N | --seconds N] [--step-limit SECONDS] \
                     [--plant leak|memory|region|stale|lost|hang|unchecked]";

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Option<Self> {
        let (hour, limit) = (Duration::from_secs(3600), Duration::from_secs(120));
        let mut options =
            Self { duration: hour, step_limit: limit, plant: None, second: false, rdma: false };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--second" => options.second = true,
                "--rdma" => options.rdma = true,
                _ => options.set(&word, &words.next()?)?,
            }
        }
        (!options.duration.is_zero()).then_some(options)
    }

    /// Sets the option `word`, or returns `None` if it has no such value.
    fn set(&mut self, word: &str, value: &str) -> Option<()> {
        let seconds = |unit| Some(Duration::from_secs(value.parse::<u64>().ok()? * unit));
        match word {
            "--minutes" => self.duration = seconds(60)?,
            "--seconds" => self.duration = seconds(1)?,
            "--step-limit" => self.step_limit = seconds(1)?,
            "--plant" => self.plant = Some(Plant::ALL.iter().find(|(name, _)| *name == value)?.1),
            _ => return None,
        }
        Some(())
    }

    /// Returns the time between two samples: a minute, or a quarter of a shorter run.
    fn interval(&self) -> Duration {
        Duration::from_secs(60).min(self.duration / 4)
    }
}

fn main() -> ExitCode {
    let mut words = env::args().skip(1);
    if words.next().as_deref() != Some("--soak") {
        return trials::run(TESTS);
    }
    let Some(options) = Options::parse(words) else {
        eprintln!("usage: {USAGE}");
        return ExitCode::from(2);
    };
    let load = match Load::open(options) {
        Ok(load) => load,
        Err(error) => {
            eprintln!("soak: cannot run here: {}", error.full());
            return ExitCode::from(MISSING);
        }
    };
    let shared = Arc::clone(&load.shared);
    std::panic::set_hook(Box::new(move |panic| fail(&shared, panic)));
    run(&load);
    ExitCode::SUCCESS
}

/// Ends the process at the first failed check, with the state of all workers.
fn fail(shared: &Shared, panic: &PanicHookInfo<'_>) {
    let name = thread::current().name().unwrap_or("a thread").to_owned();
    eprintln!(
        "soak: FAILED in {}{name}: {panic}\n{}  fds: {:?}\n{}",
        shared.process(),
        shared.dump(),
        fds(),
        threads_of_children()
    );
    // SAFETY: ends the process, also a forked child, without destructors.
    unsafe { libc::_exit(1) };
}

/// Runs the workers, and samples the resources while they pause.
fn run(load: &Load) {
    let (shared, options) = (&*load.shared, load.options);
    let (child, mut pipes) = match options.second {
        true => (None, None),
        false => {
            let (child, pipes) = second(&options);
            (Some(child), Some(pipes))
        }
    };
    let started = Instant::now();
    thread::scope(|scope| {
        for (index, (name, worker)) in WORKERS.into_iter().enumerate() {
            let pipes = pipes.take_if(|_| index == WORKERS.len() - 1);
            let builder = thread::Builder::new().name(name.to_owned());
            let me = Me { shared, index };
            me.begin("the start of the load");
            let body = move || worker(load, me, pipes);
            builder.spawn_scoped(scope, body).expect("a thread");
        }
        let watchdog = thread::Builder::new().name("watchdog".to_owned());
        watchdog.spawn_scoped(scope, || watch(shared, options.step_limit)).expect("a thread");
        while !shared.all_started() && !shared.ended.load(Relaxed) {
            thread::sleep(Duration::from_millis(20));
        }
        let mut first: Option<Resources> = None;
        let mut next = Instant::now();
        loop {
            next += options.interval();
            // Between two samples each worker does a step, also on a slow machine.
            let before = shared.progress();
            let stepped = || shared.progress().iter().zip(before).all(|(now, then)| *now > then);
            while (Instant::now() < next || !stepped()) && !shared.ended.load(Relaxed) {
                thread::sleep(Duration::from_millis(20));
            }
            // A slow machine may need the whole time until the first sample.
            let is_last = first.is_some()
                && match options.second {
                    true => shared.ended.load(Relaxed),
                    false => started.elapsed() >= options.duration,
                };
            sample(load, started, &mut first);
            if is_last {
                break;
            }
        }
        shared.stop.store(true, Relaxed);
    });
    shared.checks.assert_all_ran();
    load.assert_cached();
    println!(
        "{}passed after {} s: {} steps, peak {} KiB\n  steps: {}\n  checks: {}",
        shared.process(),
        started.elapsed().as_secs(),
        shared.steps(),
        peak_kib(),
        shared.steps_by_worker(),
        shared.checks,
    );
    if let Some(mut child) = child {
        let status = child.wait().expect("the second process");
        assert!(status.success(), "the second process failed: {status}");
    }
}

/// Pauses the workers, compares the resources with those of the first sample and the counters with
/// each other, and prints a line.
fn sample(load: &Load, started: Instant, first: &mut Option<Resources>) {
    let shared = &*load.shared;
    let paused = shared.pause.write().expect("a panic ends the process");
    let now = Resources::sample(load.settle());
    load.assert_counters_agree();
    shared.checks.count(Check::Counters);
    let seconds = started.elapsed().as_secs();
    println!("{}{seconds:>5} s: {} steps, {now}", shared.process(), shared.steps());
    match first {
        None => *first = Some(now),
        Some(first) => {
            now.assert_bounded(first);
            shared.checks.count(Check::Resources);
        }
    }
    drop(paused);
}

/// Fails if a worker is busy with one step for longer than `limit`.
fn watch(shared: &Shared, limit: Duration) {
    while !shared.stops() {
        thread::sleep(Duration::from_millis(100));
        if let Some(stuck) = shared.stuck(limit) {
            panic!("hang: {stuck} has been busy with one step for {} s", limit.as_secs());
        }
    }
}

trials! {
    const TESTS;
    /// REL-02
    mixed_load_passes_every_check,
    /// REL-02
    mixed_load_over_an_rdma_device_passes_every_check,
    /// REL-02
    leaked_fd_is_caught,
    /// REL-02
    leaked_memory_is_caught,
    /// REL-02
    leaked_registration_is_caught,
    /// REL-02
    stale_key_is_caught,
    /// REL-02
    lost_write_is_caught,
    /// REL-02
    hang_is_caught,
    /// REL-02
    check_that_never_ran_is_caught,
    bounds_are_documented,
}

/// Runs the load for some seconds in a process of its own. Returns true if it passed, and its
/// output.
fn soak(seconds: u64, extra: &[&str]) -> Result<(bool, String), Skipped> {
    let mut command = Command::new(env::current_exe().expect("this test"));
    command.args(["--soak", "--seconds", &seconds.to_string()]).args(extra).stdin(Stdio::null());
    let output = command.output().expect("started");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.code() == Some(MISSING.into()) {
        return Err(Skipped(text));
    }
    Ok((output.status.success(), text))
}

fn mixed_load_passes_every_check() -> Outcome {
    let (passed, text) = soak(4, &[])?;
    assert!(passed && text.matches("passed after").count() == 2, "{text}");
    Ok(())
}

fn mixed_load_over_an_rdma_device_passes_every_check() -> Outcome {
    if env::var_os(DEVICE).is_none() {
        return Err(Skipped(format!("{DEVICE} names no RDMA device that registers dma-bufs")));
    }
    let seconds = env::var(RDMA_SECONDS).map_or(8, |text| text.parse().expect(RDMA_SECONDS));
    let (passed, text) = soak(seconds, &["--rdma"])?;
    println!("{text}");
    assert!(passed && text.matches("passed after").count() == 2, "{text}");
    Ok(())
}

/// Asserts that a run with a planted fault fails with a message that contains `message`.
fn assert_caught(plant: &str, message: &str) -> Outcome {
    assert_caught_with(&["--plant", plant], message)
}

fn assert_caught_with(options: &[&str], message: &str) -> Outcome {
    let (passed, text) = soak(2, options)?;
    assert!(!passed && text.contains(message), "{options:?}: {text}");
    Ok(())
}

fn leaked_fd_is_caught() -> Outcome {
    assert_caught("leak", "fds grew")
}

fn leaked_memory_is_caught() -> Outcome {
    assert_caught("memory", "heap KiB grew")
}

fn leaked_registration_is_caught() -> Outcome {
    assert_caught("region", "regions grew")
}

fn stale_key_is_caught() -> Outcome {
    assert_caught("stale", "stale hit")
}

fn lost_write_is_caught() -> Outcome {
    assert_caught("lost", "wrong bytes of a region")
}

fn hang_is_caught() -> Outcome {
    assert_caught_with(&["--plant", "hang", "--step-limit", "3"], "hang: registrations")
}

fn check_that_never_ran_is_caught() -> Outcome {
    assert_caught("unchecked", "no check of Fork ran")
}

fn bounds_are_documented() -> Outcome {
    accounts::assert_documented(include_str!("../../docs/testing.md"));
    Ok(())
}
