//! The `hmem` command as a library, so that tests can run it on machines that they construct.
//!
//! [`run`] is the whole command. A [`Machine`] holds ifaces and NICs. Each subcommand is a module:
//!
//! - [`mod@info`] lists the machine;
//! - [`mod@check`] moves and verifies bytes;
//! - [`mod@explain`] shows paths and refusals;
//! - [`mod@topo`] draws the wiring;
//! - [`mod@perf`] measures transfers with another host.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `args`
//! - `table`
//! - `help`, `problem`
//! - `json`
//! - `machine`, `progress`
//! - `check`, `probe`, `topo`
//! - `explain`, `info`, `perf`

#![deny(unsafe_code)]

pub mod args;
pub mod check;
pub mod explain;
pub mod help;
pub mod info;
pub mod json;
pub mod machine;
pub mod perf;
mod probe;
pub mod problem;
mod progress;
pub mod table;
pub mod topo;

use std::io::{self, Write};

use clap::CommandFactory;

use crate::{
    args::{CheckArgs, Cli, Command, CompletionsArgs, ExplainArgs, InfoArgs, ManArgs, TopoArgs},
    machine::Machine,
    problem::{Problem, unknown},
    progress::Progress,
    table::Style,
};

/// The result of a command that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Success: exit status 0.
    Passed,
    /// A failed check: exit status 1.
    Failed,
}

/// The reason why a command could not run.
#[derive(Debug)]
pub enum Failure {
    /// A wrong argument or environment variable: exit status 2.
    Usage(Box<Problem>),
    /// A measurement that failed, on this side or the other, or that has no NIC: exit status 1.
    Measurement(Box<Problem>),
    /// A topology that could not be read, drawn or recorded: exit status 1.
    Topology(Box<Problem>),
    /// The output could not be written: exit status 2.
    Output(io::Error),
}

impl Failure {
    /// Returns the failure as a problem to print.
    #[must_use]
    pub fn problem(&self) -> Problem {
        match self {
            Self::Usage(problem) | Self::Measurement(problem) | Self::Topology(problem) => {
                (**problem).clone()
            }
            Self::Output(error) => Problem::new(format!("cannot write the output: {error}")),
        }
    }

    /// Returns a failed measurement.
    pub(crate) fn measurement(error: hmem::Error) -> Self {
        Self::Measurement(Box::new(error.into()))
    }

    /// Returns a failure to read or write a topology.
    pub(crate) fn topology(error: hmem::Error) -> Self {
        Self::Topology(Box::new(error.into()))
    }

    /// Replaces the numbers of plug-ins by their registered names.
    fn named_on(self, machine: &Machine) -> Self {
        let named = |problem: Box<Problem>| Box::new(problem.renamed(|text| machine.named(text)));
        match self {
            Self::Usage(problem) => Self::Usage(named(problem)),
            Self::Measurement(problem) => Self::Measurement(named(problem)),
            Self::Topology(problem) => Self::Topology(named(problem)),
            Self::Output(error) => Self::Output(error),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.problem().fmt(f)
    }
}

impl std::error::Error for Failure {}

impl From<hmem::Error> for Failure {
    fn from(error: hmem::Error) -> Self {
        Self::Usage(Box::new(error.into()))
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Usage(Box::new(problem))
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
/// [`Failure`]: a wrong name or environment variable, a failed measurement, a topology that cannot
/// be read, or output that cannot be written.
pub fn run(cli: &Cli, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let style = Style::for_stdout(cli.color);
    match &cli.command {
        // These commands start no driver.
        Command::Topo(args) => topo(args, style, out),
        Command::Completions(args) => completions(args, out),
        Command::Man(args) => man(args, out),
        command => run_on(&Machine::find()?, command, style, out),
    }
}

/// Runs a command on a machine that the caller constructed.
///
/// # Errors
/// The errors of [`run`].
pub fn run_on(
    machine: &Machine,
    command: &Command,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let outcome = match command {
        Command::Info(args) => info(machine, args, style, out),
        Command::Check(args) => check(machine, args, style, out),
        Command::Perf(args) => perf::run(machine, args, style, out).map(|()| Outcome::Passed),
        Command::Explain(args) => explain(machine, args, style, out),
        Command::Topo(args) => topo(args, style, out),
        Command::Completions(args) => completions(args, out),
        Command::Man(args) => man(args, out),
    };
    outcome.map_err(|failure| failure.named_on(machine))
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
    let progress = Progress::for_long_work();
    let report =
        check::check(machine, &selection, |done, all, next| progress.show(done, all, next));
    progress.end();
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

fn completions(args: &CompletionsArgs, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "hmem", &mut script);
    out.write_all(&script)?;
    Ok(Outcome::Passed)
}

fn man(args: &ManArgs, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let mut command = Cli::command();
    command.build();
    let page = match &args.command {
        None => command,
        Some(name) => match command.find_subcommand(name) {
            Some(found) => found.clone(),
            None => {
                let known = command.get_subcommands().map(|known| known.get_name().to_owned());
                return Err(
                    unknown("subcommand", name, "hmem man", &known.collect::<Vec<_>>()).into()
                );
            }
        },
    };
    help::man(page, out)?;
    Ok(Outcome::Passed)
}
