//! The `hmem` command as a library: for commands with plug-ins, and for tests on machines that they
//! construct.
//!
//! [`main_with`] is the `main` function of a command with plug-ins. [`run_on`] runs a parsed
//! command on a [`Machine`], which holds ifaces and NICs. Each subcommand is a module:
//!
//! - [`mod@info`] lists the machine;
//! - [`mod@check`] moves and verifies bytes;
//! - [`mod@explain`] shows paths and refusals;
//! - [`mod@topo`] draws the wiring;
//! - [`mod@perf`] measures transfers with another host.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `args`
//! - `table`
//! - `help`, `problem`
//! - `json`
//! - `libfabric`
//! - `machine`, `progress`
//! - `check`, `probe`, `topo`
//! - `explain`, `info`, `perf`
//! - `program`, `schema`

#![deny(unsafe_code)]

pub mod args;
pub mod check;
pub mod explain;
mod help;
pub mod info;
pub mod json;
mod libfabric;
pub mod machine;
pub mod perf;
mod probe;
pub mod problem;
mod program;
mod progress;
#[cfg(test)]
mod schema;
pub mod table;
pub mod topo;

use std::{
    io::{self, Write},
    time::Duration,
};

use clap::{CommandFactory, FromArgMatches};
use hmem::{Builder, ErrorKind, Hmem};
pub use program::main_with;

use crate::{
    args::{CheckArgs, Cli, Command, CompletionsArgs, ManArgs},
    machine::{Machine, Watch},
    problem::{Problem, unknown},
    progress::Progress,
    table::{Style, columns_variable},
};

/// The result of a command that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Success: exit status 0.
    Passed,
    /// A failure that `check` or `explain` found: exit status 1.
    Failed,
}

impl Outcome {
    const fn of(passed: bool) -> Self {
        if passed { Self::Passed } else { Self::Failed }
    }
}

/// The reason why a command could not run.
#[derive(Debug)]
pub enum Failure {
    /// A bad command line or environment variable: exit status 2.
    Usage(Box<Problem>),
    /// A failed operation, or an iface, NIC or resource that is unavailable: exit status 1.
    Failed(Box<Problem>),
    /// An error of the library: exit status 1.
    Error(Box<hmem::Error>),
    /// The output could not be written: exit status 1.
    Output(io::Error),
}

impl Failure {
    /// Returns the exit status.
    #[must_use]
    pub const fn status(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Error(_) | Self::Failed(_) | Self::Output(_) => 1,
        }
    }

    /// Returns the failure as a problem to print.
    #[must_use]
    pub fn problem(&self) -> Problem {
        match self {
            Self::Usage(problem) | Self::Failed(problem) => (**problem).clone(),
            Self::Error(error) => (&**error).into(),
            Self::Output(error) => Problem::new(format!("cannot write the output: {error}")),
        }
    }

    /// Returns [`Failure::Failed`] with the problem of a failed operation.
    pub(crate) fn failed(problem: impl Into<Problem>) -> Self {
        Self::Failed(Box::new(problem.into()))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.problem().fmt(f)
    }
}

impl std::error::Error for Failure {}

impl From<hmem::Error> for Failure {
    /// Returns [`Failure::Usage`] for a bad value in an environment variable, and
    /// [`Failure::Error`] for every other error.
    fn from(error: hmem::Error) -> Self {
        match (error.kind(), error.context_value("variable")) {
            (ErrorKind::InvalidArgument, Some(_)) => Self::Usage(Box::new(error.into())),
            _ => Self::Error(Box::new(error)),
        }
    }
}

impl From<Problem> for Failure {
    /// Returns [`Failure::Usage`]. For the problem of a failed operation use `Failure::failed`.
    fn from(problem: Problem) -> Self {
        Self::Usage(Box::new(problem))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

/// Runs the command on this machine, with the plug-ins that `add` adds to the builder. A check also
/// counts the resources of `watches`. Prints to `out`, with the colours and the width for stdout.
fn run(
    cli: &Cli,
    add: impl FnOnce(Builder) -> Builder,
    watches: Vec<Watch>,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    if let Err(value) = columns_variable() {
        let problem = Problem::new(format!("invalid value {value:?} in COLUMNS"));
        return Err(problem.remedy("use a decimal number, 0 or more").into());
    }
    let style = Style::for_stdout(cli.color);
    match &cli.command {
        // `topo`, `completions` and `man` start no driver.
        Command::Topo(args) => topo::run(args, style, out).map(|()| Outcome::Passed),
        Command::Completions(args) => completions(args, out),
        Command::Man(args) => man(args, out),
        command => {
            // Before the plug-ins, which may start threads.
            let builder = libfabric::add(Hmem::builder(), command.nic())?;
            let mut machine = Machine::find(add(builder))?;
            machine.watches.extend(watches);
            run_on(&machine, command, style, out)
        }
    }
}

/// Runs a subcommand with `--json` on this machine, and returns the JSON document that the
/// subcommand prints. Programs in other languages run `info`, `check` and `explain` in this way.
///
/// `words` are the words of the command line, without `--json`.
///
/// ```
/// let (outcome, document) = hmem_cli::document(&["info", "--nic", "loopback"])?;
/// assert_eq!(outcome, hmem_cli::Outcome::Passed);
/// assert!(document.contains("\"schema\""));
/// # Ok::<(), hmem_cli::Failure>(())
/// ```
///
/// # Errors
/// The errors of [`run_on`], and [`Failure::Usage`] for words that the subcommand does not know.
pub fn document(words: &[impl AsRef<str>]) -> Result<(Outcome, String), Failure> {
    let words = ["hmem"].into_iter().chain(words.iter().map(AsRef::as_ref)).chain(["--json"]);
    let cli = help::command()
        .try_get_matches_from(words)
        .and_then(|matches| Cli::from_arg_matches(&matches))
        .map_err(|error| Problem::new(args::one_line(&error)))?;
    let mut out = Vec::new();
    // Other threads of the program may open files meanwhile.
    let outcome = run(&cli, |builder| builder, Vec::new(), &mut out)?;
    Ok((outcome, String::from_utf8(out).expect("JSON is UTF-8")))
}

/// Runs a command on a machine that the caller constructed. `topo`, `completions` and `man` do not
/// use the machine.
///
/// # Errors
/// [`Failure`]: a bad name or environment variable, a failed operation, or output that cannot be
/// written.
pub fn run_on(
    machine: &Machine,
    command: &Command,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    match command {
        Command::Info(args) => {
            let inventory = info::inventory(machine, args.nic.as_deref())?;
            json::write_or_text(out, &inventory, args.json, style, info::text)?;
            Ok(Outcome::Passed)
        }
        Command::Check(args) => check(machine, args, style, out),
        Command::Perf(args) => perf::run(machine, args, style, out).map(|()| Outcome::Passed),
        Command::Explain(args) => {
            let report = explain::explain(machine, args)?;
            json::write_or_text(out, &report, args.json, style, explain::text)?;
            Ok(Outcome::of(report.passed()))
        }
        Command::Topo(args) => topo::run(args, style, out).map(|()| Outcome::Passed),
        Command::Completions(args) => completions(args, out),
        Command::Man(args) => man(args, out),
    }
}

fn check(
    machine: &Machine,
    args: &CheckArgs,
    style: Style,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let selection = check::Selection::new(args, machine)?;
    let mut progress = Progress::after(Duration::from_millis(500));
    let report =
        check::check(machine, &selection, |done, all, next| progress.show(done, all, next))?;
    progress.clear();
    json::write_or_text(out, &report, args.json, style, check::text)?;
    Ok(Outcome::of(report.passed()))
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
    if let Some(name) = &args.command {
        let Some(found) = command.find_subcommand(name) else {
            let known = command.get_subcommands().map(|known| known.get_name().to_owned());
            let known: Vec<_> = known.collect();
            return Err(unknown("subcommand", name, "hmem man", &known).into());
        };
        command = found.clone();
    }
    help::man(command, out)?;
    Ok(Outcome::Passed)
}

#[cfg(doctest)]
#[doc = include_str!("../../docs/plug-ins.md")]
struct PlugIns;
