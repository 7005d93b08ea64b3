//! The `hmem` command as a library, so that tests can run it on machines of their own making.
//!
//! [`Machine`] is what the command looks at, [`mod@info`] lists it, [`mod@check`] tries it,
//! [`mod@explain`] says why, [`mod@topo`] draws how it is wired, [`mod@perf`] measures it with
//! another host, [`run`] is the command itself.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `args`, `json`
//! - `machine`, `table`
//! - `check`, `probe`, `topo`
//! - `explain`, `info`, `perf`

#![deny(unsafe_code)]

pub mod args;
pub mod check;
pub mod explain;
pub mod info;
pub mod json;
pub mod machine;
pub mod perf;
mod probe;
pub mod table;
pub mod topo;

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    args::{CheckArgs, Cli, Command, ExplainArgs, InfoArgs, PerfArgs, TopoArgs},
    machine::Machine,
    table::Style,
};

/// How the command ended, where it could do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is well: exit status 0.
    Passed,
    /// A check failed: exit status 1.
    Failed,
}

/// Why the command could not do its work.
#[derive(Debug)]
pub enum Failure {
    /// A wrong argument or environment variable: exit status 2.
    Usage(hmem::Error),
    /// A measurement that failed, on this side or the other: exit status 1.
    Measurement(hmem::Error),
    /// A topology that could not be read, drawn or recorded: exit status 1.
    Topology(hmem::Error),
    /// The output could not be written: exit status 2.
    Output(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(error) | Self::Measurement(error) | Self::Topology(error) => error.fmt(f),
            Self::Output(error) => write!(f, "cannot write the output: {error}"),
        }
    }
}

impl std::error::Error for Failure {}

impl From<hmem::Error> for Failure {
    fn from(error: hmem::Error) -> Self {
        Self::Usage(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Runs the command on this machine and prints to `out`.
///
/// # Errors
/// [`Failure`]: a wrong name or environment variable, or output that cannot be written.
pub fn run(cli: &Cli, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let style = Style::for_stdout(cli.color);
    if let Command::Topo(args) = &cli.command {
        // It looks at files alone, and starts no driver.
        return topo(args, style, out);
    }
    run_on(&Machine::find()?, &cli.command, style, out)
}

/// Runs a command on a machine that the caller put together.
///
/// # Errors
/// As [`run`].
pub fn run_on(
    machine: &Machine,
    command: &Command,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    match command {
        Command::Info(args) => info(machine, args, style, out),
        Command::Check(args) => check(machine, args, style, out),
        Command::Perf(args) => perf(machine, args, style, out),
        Command::Explain(args) => explain(machine, args, style, out),
        Command::Topo(args) => topo(args, style, out),
    }
}

fn info(
    machine: &Machine,
    args: &InfoArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let inventory = info::inventory(machine);
    if args.json {
        json::write(out, &inventory)?;
    } else {
        info::text(out, &inventory, style)?;
    }
    Ok(Outcome::Passed)
}

fn check(
    machine: &Machine,
    args: &CheckArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let selection = check::Selection::new(args, machine)?;
    let bar = Bar::new();
    let report = check::check(machine, &selection, |done, all, next| bar.show(done, all, next));
    bar.end();
    if args.json {
        json::write(out, &report)?;
    } else {
        check::text(out, &report, style)?;
    }
    Ok(if report.passed() { Outcome::Passed } else { Outcome::Failed })
}

fn explain(
    machine: &Machine,
    args: &ExplainArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let report = explain::explain(machine, args)?;
    if args.json {
        json::write(out, &report)?;
    } else {
        explain::text(out, &report, style)?;
    }
    Ok(if report.passed() { Outcome::Passed } else { Outcome::Failed })
}

fn topo(args: &TopoArgs, style: Style, out: &mut dyn Write) -> Result<Outcome, Failure> {
    topo::run(args, style, out)?;
    Ok(Outcome::Passed)
}

fn perf(
    machine: &Machine,
    args: &PerfArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    perf::run(machine, args, |report| {
        if args.json { json::write(out, report) } else { perf::text(out, report, style) }
    })?;
    Ok(Outcome::Passed)
}

/// A bar on stderr for work that takes its time, where somebody can see it.
struct Bar {
    bar: ProgressBar,
    started: Instant,
}

/// Work shorter than this needs no bar.
const LONG: Duration = Duration::from_millis(500);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}");
        Self {
            bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
            started: Instant::now(),
        }
    }

    fn show(&self, done: usize, all: usize, next: &str) {
        if self.bar.is_hidden() && self.started.elapsed() > LONG && io::stderr().is_terminal() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(all as u64);
        self.bar.set_message(next.to_owned());
        self.bar.set_position(done as u64);
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}
