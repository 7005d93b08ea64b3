//! The hmem command: parses the command line, runs, and exits with a status.

#![deny(unsafe_code)]

use std::{
    io::{self, BufWriter, IsTerminal, Write},
    process::ExitCode,
};

use clap::{FromArgMatches, error::ErrorKind};
use hmem_cli::{
    Failure, Outcome,
    args::{self, Cli},
    help,
    problem::print_on_stderr,
};
use tracing_subscriber::filter::LevelFilter;

const FAILED: u8 = 1;
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let parsed =
        help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    start_log(&cli);
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = hmem_cli::run(&cli, &mut out).and_then(|outcome| {
        out.flush()?;
        Ok(outcome)
    });
    match outcome {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(FAILED),
        // The reader of the output closed it early, as `head` does.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(failure) => {
            print_on_stderr(&failure.problem());
            ExitCode::from(if matches!(failure, Failure::Measurement(_) | Failure::Topology(_)) {
                FAILED
            } else {
                USAGE
            })
        }
    }
}

fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
        _ => {
            eprintln!("{}", args::one_line(error));
            ExitCode::from(USAGE)
        }
    }
}

/// Prints the library's log on stderr, if the command line asks for it.
fn start_log(cli: &Cli) {
    let level = match cli.verbose {
        0 => return,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(io::stderr().is_terminal() && cli.color != args::Color::Never)
        .with_writer(io::stderr)
        .init();
}
