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
    machine::Watch,
    problem::{line_on_stderr, print_on_stderr},
    run,
};

/// The exit status after a bad command line.
const USAGE: u8 = 2;

/// Runs the command with the arguments of the process, on this machine and with plug-ins.
///
/// `add` adds ifaces and providers to the builder of the [`Hmem`](hmem::Hmem) that `info`, `check`,
/// `explain` and `perf` work on. Other subcommands do not call `add`. The command itself adds
/// verbs, the iface `simulated` and the loopback NICs. A program whose `main` calls this function
/// is the `hmem` command with its plug-ins:
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
/// command line or environment variable. If the reader of stdout closes the pipe early, as `head`
/// does, the command completes without further output and returns its own status.
pub fn main_with(add: impl FnOnce(Builder) -> Builder) -> ExitCode {
    let parsed =
        help::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => return without_command(&error),
    };
    start_log(&cli);
    let mut out = BufWriter::new(UntilClosed { inner: io::stdout().lock(), closed: false });
    let outcome = run(&cli, add, vec![Watch::open_fds()], &mut out).and_then(|outcome| {
        out.flush()?;
        Ok(outcome)
    });
    match outcome {
        Ok(Outcome::Passed) => ExitCode::SUCCESS,
        Ok(Outcome::Failed) => ExitCode::FAILURE,
        Err(failure) => fail(&failure),
    }
}

/// Prints a failure on stderr and returns its exit status.
fn fail(failure: &Failure) -> ExitCode {
    print_on_stderr(&failure.problem());
    ExitCode::from(failure.status())
}

/// Prints the help, the version or the error that the parser of the command line returned instead
/// of a command. Returns the exit status.
fn without_command(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let status = u8::try_from(error.exit_code()).unwrap_or(USAGE);
            match error.print().and_then(|()| io::stdout().flush()) {
                Err(unprinted) if unprinted.kind() != io::ErrorKind::BrokenPipe => {
                    fail(&Failure::Output(unprinted))
                }
                _ => ExitCode::from(status),
            }
        }
        _ => {
            line_on_stderr(args::one_line(error));
            ExitCode::from(USAGE)
        }
    }
}

/// A writer that discards its input once the reader has closed the pipe.
struct UntilClosed<W> {
    inner: W,
    /// True once a call has failed with `BrokenPipe`.
    closed: bool,
}

impl<W: Write> UntilClosed<W> {
    /// Runs `call` while the pipe is open, and returns `otherwise` once the pipe is closed.
    fn unless_closed<T>(
        &mut self,
        otherwise: T,
        call: impl FnOnce(&mut W) -> io::Result<T>,
    ) -> io::Result<T> {
        if !self.closed {
            match call(&mut self.inner) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.closed = true,
                done => return done,
            }
        }
        Ok(otherwise)
    }
}

impl<W: Write> Write for UntilClosed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.unless_closed(bytes.len(), |inner| inner.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.unless_closed((), Write::flush)
    }
}

/// Prints the library's log on stderr if the command line asks for it. Does nothing if the program
/// has a subscriber of its own.
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
        // The subscriber would report a failed write to stderr on stderr, and then panic.
        .log_internal_errors(false)
        .try_init();
}
