//! Errors as the command prints them: a headline, the causes beneath it, and a remedy.

use std::{
    error::Error as _,
    fmt,
    io::{self, Write},
};

use hmem::{Error, ErrorKind, IfaceKind, ProbableCause, path::Attempt};

use crate::table::{Style, stderr_columns};

/// An error in the form for text output: a headline, the causes without repetition, and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The failure, without causes and remedy.
    pub headline: String,
    /// The causes, the outermost first.
    pub causes: Vec<String>,
    /// The step that solves the problem, if one is known.
    pub remedy: Option<String>,
    /// The values of the error, such as `iface=cuda, device=0`; empty for none.
    pub values: String,
    /// A key by which reports group problems. Problems with the same cause have the same key.
    pub group: String,
}

impl Problem {
    /// Returns a problem without a cause.
    #[must_use]
    pub fn new(headline: impl Into<String>) -> Self {
        let headline = headline.into();
        let group = headline.clone();
        Self { headline, causes: Vec::new(), remedy: None, values: String::new(), group }
    }

    /// Adds the step that solves the problem.
    pub(crate) fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    /// Adds another problem as the cause. If this problem has no remedy or no values, it gets those
    /// of the cause.
    pub(crate) fn caused_by(mut self, cause: Self) -> Self {
        self.causes.push(cause.headline);
        self.causes.extend(cause.causes);
        self.remedy = self.remedy.or(cause.remedy);
        if self.values.is_empty() {
            self.values = cause.values;
        }
        self
    }

    /// Adds the probable cause. The remedy of the cause replaces the remedy of the problem.
    pub(crate) fn explained(self, cause: &ProbableCause) -> Self {
        let causes = self.causes.into_iter().chain([format!("probably, {cause}")]).collect();
        Self { causes, ..self }.remedy(cause.remedy)
    }

    /// Prints the problem on one line if it has no cause. Otherwise prints the headline, and
    /// beneath it each cause, the remedy and the values on lines of their own.
    pub(crate) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.causes.is_empty() {
            return writeln!(out, "error: {self}");
        }
        writeln!(out, "error: {}", self.headline)?;
        for (depth, cause) in self.causes.iter().enumerate() {
            writeln!(out, "{}cause: {cause}", "  ".repeat(depth + 1))?;
        }
        if let Some(remedy) = &self.remedy {
            writeln!(out, "  remedy: {remedy}")?;
        }
        if !self.values.is_empty() {
            writeln!(out, "  details: {}", self.values)?;
        }
        Ok(())
    }

    /// Prints the problem as an item of a list, with causes, remedy and values beneath.
    pub(crate) fn item(&self, out: &mut dyn Write, head: &str, style: Style) -> io::Result<()> {
        style.item(out, head, &self.headline)?;
        self.details(out, style)
    }

    /// Prints causes, remedy and values beneath an item.
    pub(crate) fn details(&self, out: &mut dyn Write, style: Style) -> io::Result<()> {
        for (depth, cause) in self.causes.iter().enumerate() {
            let indent = "  ".repeat(depth.min(3) + 2);
            style.indented(out, [&indent, &format!("{indent}  ")], &format!("cause: {cause}"))?;
        }
        if let Some(remedy) = &self.remedy {
            style.detail(out, "remedy:", remedy)?;
        }
        if !self.values.is_empty() {
            style.detail(out, "details:", &self.values)?;
        }
        Ok(())
    }

    /// Returns the problem without its remedy, on one line.
    pub(crate) fn reason(&self) -> String {
        Self { remedy: None, ..self.clone() }.to_string()
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline)?;
        self.causes.iter().try_for_each(|cause| write!(f, ": {cause}"))?;
        if let Some(remedy) = &self.remedy {
            write!(f, "; {remedy}")?;
        }
        if self.values.is_empty() { Ok(()) } else { write!(f, " ({})", self.values) }
    }
}

impl From<&str> for Problem {
    fn from(headline: &str) -> Self {
        Self::new(headline)
    }
}

impl From<String> for Problem {
    fn from(headline: String) -> Self {
        Self::new(headline)
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<&Error> for Problem {
    fn from(error: &Error) -> Self {
        let mut causes = Vec::new();
        for attempt in error.trace().iter() {
            if let Some(refusal) = &attempt.error {
                causes.push(format!(
                    "{}: {} refused: {}",
                    attempt.path,
                    attempt.call,
                    refusal.reason()
                ));
                causes.extend(probable(refusal));
            }
        }
        if causes.is_empty() {
            let mut source = error.source();
            while let Some(cause) = source {
                let cause_error = cause.downcast_ref::<Error>();
                causes.push(
                    cause_error.map_or_else(|| cause.to_string(), |it| it.message().to_string()),
                );
                source = cause.source();
            }
            causes.extend(probable(error));
        }
        // The text of `headline` already contains the values that a user needs.
        let (headline, values) = match headline(error) {
            Some(headline) => (headline, String::new()),
            None => (error.message().to_string(), error.values().to_string()),
        };
        let remedy = decisive(error).and_then(|attempt| attempt.remedy.clone());
        let remedy = remedy.or_else(|| error.remedy_text().map(str::to_owned));
        Self { headline, causes, remedy, values, group: group(error) }
    }
}

/// Returns the probable causes of an error as sentences. Each cause except the first has its remedy
/// in the sentence. The remedy of the first cause is the remedy of the error, and is left out.
fn probable(error: &Error) -> impl Iterator<Item = String> {
    error.causes().iter().enumerate().map(|(at, cause)| match at {
        0 => format!("probably, {cause}"),
        _ => format!("or perhaps, {cause}; remedy: {}", cause.remedy),
    })
}

/// Returns a plain headline for some frequent errors, or `None` for all other errors.
fn headline(error: &Error) -> Option<String> {
    let value = |name| error.context_value(name);
    Some(match (value("variable"), value("value"), value("library")) {
        (Some(variable), Some(text), _) if error.kind() == ErrorKind::InvalidArgument => {
            format!("invalid value {text:?} in {variable}")
        }
        (variable, _, Some(library)) if error.operation() == "load library" => {
            let subject = match variable {
                Some(variable) => format!("the file {library} in {variable}"),
                None => format!("the library {library}"),
            };
            match value("symbol") {
                Some(symbol) => {
                    format!("{subject} is not a usable {}: it has no {symbol}", product(error))
                }
                None => format!("{subject} cannot be loaded"),
            }
        }
        (Some(variable), Some(text), _) => format!("{variable}={text}: {}", error.message()),
        _ if error.operation() == "start iface" => format!("not started: {}", value("why")?),
        _ => return None,
    })
}

/// Returns the name of the library that the error's iface loads, such as `CUDA driver`.
fn product(error: &Error) -> &'static str {
    match error.iface_kind() {
        Some(IfaceKind::CUDA) => "CUDA driver",
        Some(IfaceKind::ROCR) => "HSA runtime",
        Some(IfaceKind::ZE) => "Level Zero loader",
        Some(IfaceKind::NEURON) => "Neuron runtime",
        Some(IfaceKind::SYNAPSEAI) => "Gaudi library",
        _ => "library",
    }
}

/// Returns the refused attempt whose remedy is printed: the first attempt with a known cause that
/// called a driver. If none of them called a driver, returns the last attempt with a known cause.
fn decisive(error: &Error) -> Option<&Attempt> {
    let mut known = error.trace().iter().filter(|attempt| attempt.cause.is_some());
    known.clone().find(|attempt| attempt.driver_called).or_else(|| known.next_back())
}

/// Returns the [`Problem::group`] of an error.
fn group(error: &Error) -> String {
    if let Some(cause) = decisive(error).and_then(|attempt| attempt.cause.clone()) {
        return cause;
    }
    if let Some(cause) = error.causes().first() {
        return cause.cause.clone();
    }
    match (error.operation(), error.kind(), error.context_value("why")) {
        ("load library", ErrorKind::Unavailable, _) => "library cannot be loaded".to_owned(),
        (_, _, Some(why)) => why.to_owned(),
        (operation, kind, None) => format!("{operation}: {kind}"),
    }
}

/// Returns the known name that is most similar to `name`, or `None` if none is similar.
pub(crate) fn nearest<'a>(name: &str, known: &'a [String]) -> Option<&'a String> {
    let name = name.to_lowercase();
    let distance = |known: &&String| strsim::damerau_levenshtein(&name, known);
    let nearest = known.iter().min_by_key(distance)?;
    (distance(&nearest) <= 1 + name.chars().count() / 4).then_some(nearest)
}

/// Returns the problem to report for an unknown name of an iface, NIC or the like (`sort`). The
/// remedy suggests a similar name of `known`, or else lists all of `known` as values of `option`.
pub(crate) fn unknown(sort: &str, name: &str, option: &str, known: &[String]) -> Problem {
    let headline = format!("no {sort} named {name}");
    match nearest(name, known) {
        Some(nearest) => Problem::new(headline).remedy(format!("did you mean {nearest}?")),
        None => Problem::new(headline).remedy(format!("{option} takes {}", known.join(", "))),
    }
}

/// Returns the problem to report for an unknown name of a provider or NIC. `known` has the names of
/// both.
pub(crate) fn unknown_nic(name: &str, known: &[String]) -> Problem {
    if !name.contains('/') {
        return unknown("provider", name, "--nic", known);
    }
    // Suggests a NIC rather than its provider.
    let nics: Vec<_> = known.iter().filter(|known| known.contains('/')).cloned().collect();
    unknown("NIC", name, "--nic", if nics.is_empty() { known } else { &nics })
}

/// Returns the problem to report for a device that an iface does not have.
pub(crate) fn unknown_device(iface: &str, device: u32, known: &[String]) -> Problem {
    let problem = Problem::new(format!("{iface} has no device {device}"));
    match known {
        [] => problem.remedy("leave out --device: this iface has no devices"),
        _ => problem.remedy(format!("--device takes {}", known.join(", "))),
    }
}

/// Prints the problem on stderr. A failed write is ignored, since it cannot be reported.
pub(crate) fn print_on_stderr(problem: &Problem) {
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = problem.print(&mut text);
    lines_on_stderr(&String::from_utf8_lossy(&text));
}

/// Prints a line on stderr. A failed write is ignored (`eprintln` would panic).
pub(crate) fn line_on_stderr(line: impl fmt::Display) {
    lines_on_stderr(&line.to_string());
}

/// Prints lines on stderr, wrapped if stderr is a terminal.
fn lines_on_stderr(text: &str) {
    let text = &without_control_characters(text);
    let mut out = io::stderr().lock();
    // An error of stderr cannot be reported anywhere.
    let _ = match stderr_columns() {
        Some(width) => print_wrapped(&mut out, text, width),
        None => writeln!(out, "{}", text.trim_end()),
    };
}

/// Replaces control characters other than line feeds by spaces. A terminal would obey them, and an
/// error may contain text of another host.
fn without_control_characters(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n', " ")
}

/// Prints lines that are wrapped to `width` columns. Continuation lines are indented by two columns
/// more than their line.
fn print_wrapped(out: &mut dyn Write, text: &str, width: usize) -> io::Result<()> {
    text.lines().try_for_each(|line| {
        let (indent, content) = line.split_at(line.len() - line.trim_start().len());
        Style::of_width(width).indented(out, [indent, &format!("{indent}  ")], content)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_printed_once_beneath_the_headline() {
        let loader = io::Error::other("no such file");
        let load = Error::new(ErrorKind::Unavailable, "load library")
            .context("library", "libx.so")
            .caused_by(loader);
        let error =
            Error::new(ErrorKind::Unavailable, "provider").caused_by(load).remedy("install");
        let mut out = Vec::new();
        Problem::from(&error).print(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "error: provider: unavailable\n  \
             cause: load library: unavailable\n    \
             cause: no such file\n  remedy: install\n  details: library=libx.so\n"
        );
        assert_eq!(Problem::from(&error).to_string(), format!("{error:#}"));
    }

    #[test]
    fn wrapped_lines_keep_their_indentation() {
        let mut out = Vec::new();
        print_wrapped(&mut out, "error: no NIC\n  remedy: install the library\n", 20).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text, "error: no NIC\n  remedy: install\n    the library\n");
    }

    #[test]
    fn control_characters_are_not_printed() {
        let text = "error: \u{1b}[2Jno NIC\u{9b}\r\n  remedy: wait\n";
        let printed = without_control_characters(text);
        assert_eq!(printed, "error:  [2Jno NIC  \n  remedy: wait\n");
    }

    #[test]
    fn similar_name_is_suggested_and_a_different_one_is_not() {
        let known = ["loopback".to_owned(), "verbs".to_owned()];
        assert_eq!(nearest("lopback", &known), Some(&known[0]));
        assert_eq!(nearest("nonsense", &known), None);
    }
}
