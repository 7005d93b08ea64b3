//! The report. Each row is written as soon as it is measured. For a failed measurement the row has
//! the reason, and the next measurement follows.

use std::{
    fmt::Display,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// The reason why a measurement has no figure.
#[derive(Debug)]
pub(crate) struct Failure {
    text: String,
    /// True if the machine lacks the device, library or kind of memory to measure. The report then
    /// has the reason, and the run does not fail.
    lacking: bool,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

impl Failure {
    pub(crate) fn lacking(why: impl Display) -> Self {
        Self { text: why.to_string(), lacking: true }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Prefixes the text of the failure with `before`.
    pub(crate) fn after(self, before: impl Display) -> Self {
        Self { text: format!("{before}: {}", self.text), ..self }
    }
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self { text, lacking: false }
    }
}

impl From<hmem_core::Error> for Failure {
    fn from(error: hmem_core::Error) -> Self {
        error.to_string().into()
    }
}

/// Result of a measurement, which is one row of a table.
#[derive(Debug)]
pub(crate) struct Row {
    cells: Vec<String>,
    /// True if the figures meet the requirements.
    met: bool,
}

impl Row {
    pub(crate) fn new(cells: impl IntoIterator<Item = String>) -> Self {
        Self { cells: cells.into_iter().collect(), met: true }
    }

    /// Adds a requirement to the row. If `met` is false, the run fails at its end.
    pub(crate) fn met(self, met: bool) -> Self {
        Self { met: self.met && met, ..self }
    }
}

/// Runs a measurement. Converts a panic to a failure.
pub(crate) fn attempt<T>(run: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panicked: {}", text.unwrap_or("without a text")).into())
    })
}

/// Combines two outcomes. If both failed, returns the first failure with the text of the second one
/// appended.
pub(crate) fn and<T>(first: Outcome<T>, second: Outcome<()>) -> Outcome<T> {
    match (first, second) {
        (Ok(value), Ok(())) => Ok(value),
        (Ok(_), Err(second)) => Err(second),
        (Err(first), Ok(())) => Err(first),
        (Err(first), Err(second)) => {
            Err(Failure { text: format!("{}; then {}", first.text, second.text), lacking: false })
        }
    }
}

pub(crate) struct Report<'a> {
    out: &'a mut dyn Write,
    failures: u32,
}

impl<'a> Report<'a> {
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out, failures: 0 }
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn line(&mut self, text: impl Display) {
        writeln!(self.out, "{text}")
            .and_then(|()| self.out.flush())
            .expect("the report is written");
    }

    pub(crate) fn table(&mut self, title: impl Display, columns: &[&str]) {
        self.line(format_args!(
            "\n### {title}\n\n| {} |\n|{}",
            columns.join(" | "),
            "---|".repeat(columns.len())
        ));
    }

    /// Writes a line with a name and a figure, outside a table.
    pub(crate) fn say(&mut self, name: &str, measure: impl FnOnce() -> Outcome<String>) {
        let text = attempt(measure).unwrap_or_else(|failure| self.failed(failure));
        self.line(format_args!("- {name}: {text}"));
    }

    /// Writes one row of a table: the cells `of`, which name the measured memory, then the cells
    /// that `measure` returns.
    pub(crate) fn row(&mut self, of: &[&str], measure: impl FnOnce() -> Outcome<Row>) {
        let cells = match attempt(measure) {
            Ok(row) => {
                self.failures += u32::from(!row.met);
                row.cells.join(" | ")
            }
            Err(failure) => self.failed(failure),
        };
        self.line(format_args!("| {} | {cells} |", of.join(" | ")));
    }

    /// Returns the text of a failure for the report. Counts the failure, unless the machine lacks
    /// what the measurement needs.
    fn failed(&mut self, failure: Failure) -> String {
        let text = failure.text.replace('|', "\\|").replace('\n', " ");
        if failure.lacking {
            return text;
        }
        self.failures += 1;
        format!("FAILED: {text}")
    }
}
