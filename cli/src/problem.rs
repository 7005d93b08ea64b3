//! Errors in the words of the command: a headline, its causes beneath, and a remedy.

use std::{
    error::Error as _,
    fmt,
    io::{self, Write},
};

use hmem::{Error, ErrorKind, IfaceKind, p2p::path::ProbableCause};

use crate::table::Style;

/// An error in the form for text output: a headline, the causes without repetition, and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The failure, without causes and remedy.
    pub headline: String,
    /// The causes, the outermost first.
    pub causes: Vec<String>,
    /// The step that solves the problem.
    pub remedy: Option<String>,
    /// A name that is equal for problems with the same cause.
    pub group: String,
    /// The whole error on one line, as in the JSON output.
    line: String,
}

impl Problem {
    /// Returns a problem without a cause.
    #[must_use]
    pub fn new(headline: impl Into<String>) -> Self {
        let headline = headline.into();
        let (group, line) = (headline.clone(), headline.clone());
        Self { headline, causes: Vec::new(), remedy: None, group, line }
    }

    /// Adds the step that solves the problem.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        let remedy = remedy.into();
        self.line = format!("{}; {remedy}", self.line);
        self.remedy = Some(remedy);
        self
    }

    /// Adds another problem as the cause. If this problem has no remedy, the cause's remedy is
    /// used.
    #[must_use]
    pub fn caused_by(mut self, cause: Self) -> Self {
        self.line = format!("{}: {}", self.line, cause.line);
        self.causes.push(cause.headline);
        self.causes.extend(cause.causes);
        self.remedy = self.remedy.or(cause.remedy);
        self
    }

    /// Adds the probable cause. The cause's remedy replaces the remedy of the error.
    #[must_use]
    pub fn explained(self, cause: &ProbableCause) -> Self {
        let line = format!("{}; probable cause: {}", self.reason(), cause.cause);
        let probable = format!("probably, {}", cause.cause);
        let causes = self.causes.into_iter().chain([probable]).collect();
        Self { line, causes, remedy: None, ..self }.remedy(cause.remedy)
    }

    /// Prints the problem. Causes are printed on lines of their own beneath the headline.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.causes.is_empty() {
            let remedy = self.remedy.iter().map(|remedy| format!("; {remedy}"));
            return writeln!(out, "error: {}{}", self.headline, remedy.collect::<String>());
        }
        writeln!(out, "error: {}", self.headline)?;
        for (depth, cause) in self.causes.iter().enumerate() {
            writeln!(out, "{}cause: {cause}", "  ".repeat(depth + 1))?;
        }
        match &self.remedy {
            Some(remedy) => writeln!(out, "  remedy: {remedy}"),
            None => Ok(()),
        }
    }

    /// Prints the problem as an item of a list, with causes and remedy beneath.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn item(&self, out: &mut dyn Write, head: &str, style: Style) -> io::Result<()> {
        style.item(out, head, &self.headline)?;
        self.details(out, style)
    }

    /// Prints causes and remedy beneath an item.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn details(&self, out: &mut dyn Write, style: Style) -> io::Result<()> {
        for (depth, cause) in self.causes.iter().enumerate() {
            let indent = "  ".repeat(depth.min(3) + 2);
            style.indented(out, [&indent, &format!("{indent}  ")], &format!("cause: {cause}"))?;
        }
        match &self.remedy {
            Some(remedy) => style.detail(out, "remedy:", remedy),
            None => Ok(()),
        }
    }

    /// Returns the headline and the causes on one line.
    #[must_use]
    pub fn reason(&self) -> String {
        let remedy =
            self.remedy.as_ref().and_then(|remedy| self.line.strip_suffix(remedy.as_str()));
        remedy.and_then(|line| line.strip_suffix("; ")).unwrap_or(&self.line).to_owned()
    }

    /// Applies `rename` to every text of the problem.
    #[must_use]
    pub fn renamed(self, rename: impl Fn(String) -> String) -> Self {
        Self {
            headline: rename(self.headline),
            causes: self.causes.into_iter().map(&rename).collect(),
            remedy: self.remedy.map(&rename),
            group: rename(self.group),
            line: rename(self.line),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
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
                    own(refusal)
                ));
                causes.extend(attempt.cause.iter().map(|cause| format!("probably {cause}")));
            }
        }
        if causes.is_empty() {
            let mut source = error.source();
            while let Some(cause) = source {
                let cause_error = cause.downcast_ref::<Error>();
                causes.push(cause_error.map_or_else(|| cause.to_string(), own));
                source = cause.source();
            }
        }
        Self {
            headline: headline(error),
            causes,
            remedy: error.remedy_text().map(str::to_owned),
            group: group(error),
            line: error.to_string(),
        }
    }
}

/// Returns the headline of an error, in plain words if the command has them for this error.
fn headline(error: &Error) -> String {
    let value = |name| error.context_value(name);
    match (value("variable"), value("value"), value("library")) {
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
        (Some(variable), Some(text), _) => format!("{variable}={text}: {}", own(error)),
        _ if error.operation() == "start iface" => {
            value("why").map_or_else(|| own(error), |why| format!("not started: {why}"))
        }
        _ => own(error),
    }
}

/// Returns the name of the library that an iface loads.
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

/// Returns the error's own message, without trace, source and remedy.
fn own(error: &Error) -> String {
    let mut text = error.reason().to_string();
    let source = error.source().map(|source| format!(": {source}"));
    if let Some(rest) = source.and_then(|source| text.strip_suffix(&source).map(str::to_owned)) {
        text = rest;
    }
    if !error.trace().is_empty() {
        let trace = format!(": {}", error.trace());
        text = text.strip_suffix(&trace).map_or(text.clone(), str::to_owned);
    }
    text
}

/// Returns a name that is equal for errors with the same cause.
fn group(error: &Error) -> String {
    let known = error.trace().iter().rev().find_map(|attempt| attempt.cause.clone());
    if let Some(cause) = known {
        return cause;
    }
    match (error.operation(), error.kind(), error.context_value("why")) {
        ("load library", ErrorKind::Unavailable, _) => "library cannot be loaded".to_owned(),
        (_, _, Some(why)) => why.to_owned(),
        (operation, kind, None) => format!("{operation}: {kind}"),
    }
}

/// Returns the known name that is most similar to `name`, or `None` if none is similar.
#[must_use]
pub fn nearest<'a>(name: &str, known: &'a [String]) -> Option<&'a String> {
    let name = name.to_lowercase();
    let distance = |known: &&String| strsim::damerau_levenshtein(&name, known);
    let nearest = known.iter().min_by_key(distance)?;
    (distance(&nearest) <= 1 + name.chars().count() / 4).then_some(nearest)
}

/// Returns the problem to report for a name that this machine does not know.
#[must_use]
pub fn unknown(sort: &str, name: &str, option: &str, known: &[String]) -> Problem {
    let headline = format!("no {sort} named {name}");
    match nearest(name, known) {
        Some(nearest) => Problem::new(headline).remedy(format!("did you mean {nearest}?")),
        None => Problem::new(headline).remedy(format!("{option} takes {}", known.join(", "))),
    }
}

/// Prints the problem on stderr.
pub fn print_on_stderr(problem: &Problem) {
    // An error of stderr cannot be reported anywhere.
    let _ = problem.print(&mut io::stderr().lock());
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
             cause: load library: unavailable (library=libx.so)\n    \
             cause: no such file\n  remedy: install\n"
        );
        assert_eq!(Problem::from(&error).to_string(), error.to_string());
    }

    #[test]
    fn similar_name_is_suggested_and_a_different_one_is_not() {
        let known = ["loopback".to_owned(), "verbs".to_owned()];
        assert_eq!(nearest("lopback", &known), Some(&known[0]));
        assert_eq!(nearest("nonsense", &known), None);
    }
}
