//! A progress bar on stderr, if stderr is a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The duration of work after which a progress bar appears.
const LONG: Duration = Duration::from_millis(500);

/// A progress bar.
pub(crate) struct Progress {
    bar: ProgressBar,
    started: Instant,
    delay: Duration,
}

impl Progress {
    /// Returns a bar that appears only if the work takes longer than [`LONG`].
    pub(crate) fn for_long_work() -> Self {
        Self::after(LONG)
    }

    /// Returns a bar that appears at once.
    pub(crate) fn at_once() -> Self {
        Self::after(Duration::ZERO)
    }

    fn after(delay: Duration) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template("{bar:20} {pos}/{len} {wide_msg}");
        Self {
            bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
            started: Instant::now(),
            delay,
        }
    }

    /// Shows how many steps are done, and the name of the next one.
    pub(crate) fn show(&self, done: usize, all: usize, next: &str) {
        let due = self.started.elapsed() >= self.delay;
        if due && self.bar.is_hidden() {
            // indicatif draws only on terminals.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(all as u64);
        self.bar.set_message(next.to_owned());
        self.bar.set_position(done as u64);
    }

    /// Hides the bar while `print` writes to the same terminal.
    pub(crate) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
