//! A progress bar on stderr, if stderr is a terminal.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use rustix::termios::tcgetwinsize;

/// Assumed width of a terminal that does not report its width, in columns.
const WIDTH: usize = 80;
/// The escape sequence that erases the line of the cursor.
const ERASE: &str = "\r\x1b[2K";

/// A progress bar.
pub(crate) struct Progress {
    /// True if stderr is a terminal that can erase a line.
    terminal: bool,
    /// Time from which on `show` prints the bar.
    visible_from: Instant,
    /// True while the bar is on the terminal.
    shown: bool,
}

impl Progress {
    /// Returns a bar that appears only if the work takes longer than `delay`.
    pub(crate) fn after(delay: Duration) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let terminal = io::stderr().is_terminal() && !dumb;
        Self { terminal, visible_from: Instant::now() + delay, shown: false }
    }

    /// Shows how many steps are done, and the name of the next one.
    pub(crate) fn show(&mut self, done: usize, all: usize, next: &str) {
        if self.terminal && Instant::now() >= self.visible_from {
            let columns = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
            let columns = if columns == 0 { WIDTH } else { columns };
            self.shown = true;
            print(&format!("{ERASE}{}", line(columns, done, all, next)));
        }
    }

    /// Removes the bar, so that the caller can print to the same terminal.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            print(ERASE);
        }
    }
}

/// Returns the bar, the counts and the name in fewer characters than the terminal has columns.
fn line(columns: usize, done: usize, all: usize, next: &str) -> String {
    let len = (columns / 4).min(20);
    let full = (len * done).checked_div(all).unwrap_or(0).min(len);
    let bar = "█".repeat(full) + &"░".repeat(len - full);
    format!("{bar} {done}/{all} {next}").chars().take(columns - 1).collect()
}

fn print(text: &str) {
    let mut stderr = io::stderr().lock();
    // An error of stderr cannot be reported anywhere.
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_bar_is_narrower_than_its_terminal() {
        assert_eq!(line(20, 1, 2, "x"), "██░░░ 1/2 x");
        for columns in [1, 2, 20, 40, 80, 200] {
            let line = line(columns, 3, 4, "bandwidth of 8 B over a NIC with a very long name");
            assert!(line.chars().count() < columns, "{line}");
        }
        assert_eq!(line(8, 0, 0, ""), "░░ 0/0 ");
    }
}
