//! The `main` function of the command: arguments, log, output and exit status.

use std::{
    io::{self, BufWriter, IsTerminal, Write},
    process::ExitCode,
};

use clap::{FromArgMatches, error::ErrorKind};
use hmem::Builder;
use tracing_subscriber::filter::LevelFilter;

use crate::{
    Failure, Outcome,
    args::{self, Cli},
    help,
    problem::print_on_stderr,
    run_with,
};

const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// Runs the command with the arguments of the process, on this machine and with plug-ins.
///
/// `add` adds ifaces and providers to the builder of the [`Hmem`](hmem::Hmem) that the command
/// works on. All subcommands then list and test them. A program whose `main` calls this function is
/// the `hmem` command with its plug-ins:
///
/// ```no_run
/// use std::process::ExitCode;
///
/// use hmem::{IfaceKind, system::Simulated};
///
/// const MINE: IfaceKind = IfaceKind(0x5155);
///
/// fn main() -> ExitCode {
///     let open = || Simulated::builder().kind(MINE).name("mine").build();
///     hmem_cli::main_with(|builder| builder.iface_or_absent(MINE, "mine", open()))
/// }
/// ```
///
/// Returns 0 for success, 1 if the operation failed or its hardware is unavailable, and 2 for a bad
/// command line or environment variable.
pub fn main_with(add: impl FnOnce(Builder) -> Builder) -> ExitCode {
    let parsed =
        help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    start_log(&cli);
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = run_with(&cli, add, &mut out).and_then(|outcome| {
        out.flush()?;
        Ok(outcome)
    });
    match outcome {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::from(FAILED),
        // The reader closed the output early, as `head` does.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(failure) => {
            print_on_stderr(&failure.problem());
            ExitCode::from(failure.status())
        }
    }
}

fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
        _ => {
            // An error of stderr cannot be reported anywhere.
            let _ = writeln!(io::stderr(), "{}", args::one_line(error));
            ExitCode::from(USAGE)
        }
    }
}

/// Prints the library's log on stderr, if the command line asks for it and the program has no
/// subscriber of its own.
fn start_log(cli: &Cli) {
    let level = match cli.verbose {
        0 => return,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    // The error is that the program has a subscriber already.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(io::stderr().is_terminal() && cli.color != args::Color::Never)
        .with_writer(io::stderr)
        .try_init();
}
