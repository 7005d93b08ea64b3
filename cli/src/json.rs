//! The parts that the JSON documents of several commands share.
//!
//! `docs/check-schema.md`, `docs/explain-schema.md`, `docs/perf-schema.md` and
//! `docs/topo-schema.md` describe every field. The JSON Schemas beside them are generated from the
//! types (`HMEM_BLESS=1 cargo test -p hmem-cli schema` rewrites them). New fields keep the schema
//! number. A removed or changed field gets a new number.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use hmem::{Error, Path, path};
use serde::{Deserialize, Serialize};

use crate::{problem::Problem, table::Style};

/// The schema version of all JSON documents.
pub(crate) const SCHEMA: u32 = 2;

/// A path that the path decision tried, and the outcome.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Attempt {
    /// The name of the path, such as `dma-buf`.
    pub path: Cow<'static, str>,
    /// The name of the call that succeeded or was refused.
    pub call: String,
    /// The memory that was exported as a dma-buf, such as `allocation`; null for other paths.
    pub unit: Option<Cow<'static, str>>,
    /// The refusal without causes and remedies, on one line; null for the attempt that succeeded.
    pub error: Option<String>,
    /// The most probable cause of the refusal; null if unknown, or if the attempt succeeded.
    pub cause: Option<String>,
    /// The change that would make the path work; null if unknown or not needed.
    pub remedy: Option<String>,
    /// All probable causes of the refusal, the most probable first.
    #[serde(default)]
    pub causes: Vec<Cause>,
}

/// A probable cause of a refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Cause {
    /// The name of the cause: a heading in `docs/causes.md`.
    pub name: Cow<'static, str>,
    /// The cause, on one line.
    pub cause: String,
    /// The facts of this machine that point to the cause; null for none.
    pub evidence: Option<String>,
    /// The change that removes the cause.
    pub remedy: Cow<'static, str>,
}

impl Cause {
    /// Returns the causes of an error, the most probable first.
    pub(crate) fn all_of(error: &Error) -> Vec<Self> {
        let causes = error.causes().iter().map(|cause| Self {
            name: cause.name.into(),
            cause: cause.cause.clone(),
            evidence: cause.evidence.clone(),
            remedy: cause.remedy.into(),
        });
        causes.collect()
    }

    /// Returns the cause with its evidence, for text output.
    pub(crate) fn text(&self) -> String {
        match &self.evidence {
            Some(evidence) => format!("{} ({evidence})", self.cause),
            None => self.cause.clone(),
        }
    }
}

impl From<&path::Attempt> for Attempt {
    fn from(attempt: &path::Attempt) -> Self {
        Self {
            path: attempt.path.name().into(),
            call: attempt.call.clone(),
            unit: attempt.unit.map(|unit| unit.name().into()),
            error: attempt.error.as_ref().map(|error| error.reason().to_string()),
            cause: attempt.cause.clone(),
            remedy: attempt.remedy.clone(),
            causes: attempt.error.as_ref().map(Cause::all_of).unwrap_or_default(),
        }
    }
}

impl Attempt {
    /// Returns one attempt that stands for a whole registration that failed. The attempts of its
    /// path search are left out. `path` is the path that the caller expected.
    pub(crate) fn refused(path: Path, error: &Error) -> Self {
        Self {
            path: path.name().into(),
            call: "register".into(),
            unit: None,
            error: Some(error.reason().to_string()),
            cause: match error.causes() {
                [] => Some(error.kind().text().to_owned()),
                [first, ..] => Some(first.to_string()),
            },
            remedy: error.remedy_text().map(str::to_owned),
            causes: Cause::all_of(error),
        }
    }

    /// Returns a label that says what the remedy achieves, such as `to use dma-buf:`. `chosen` is
    /// the name of the chosen path.
    pub(crate) fn remedy_label(&self, chosen: &str) -> String {
        if self.path == chosen {
            return "to avoid the refusal:".to_owned();
        }
        format!("to use {}:", self.path)
    }

    /// Removes needless advice from the remedies by [`needed_advice`].
    pub(crate) fn with_needed_advice(mut self, chosen: Option<&str>) -> Self {
        self.remedy = self.remedy.map(|remedy| needed_advice(&remedy, chosen).to_owned());
        for cause in &mut self.causes {
            cause.remedy = needed_advice(&cause.remedy, chosen).to_owned().into();
        }
        self
    }
}

/// Removes the advice to load a peer-memory client from a remedy if peer memory is the chosen path,
/// since such a client is then loaded already.
pub(crate) fn needed_advice<'a>(remedy: &'a str, chosen: Option<&str>) -> &'a str {
    if chosen != Some(Path::PeerMemory.name()) {
        return remedy;
    }
    let alternatives = [", or load ", "; or load ", "; else load "];
    let last = alternatives.iter().filter_map(|word| remedy.rfind(word)).max();
    match last.map(|at| remedy.split_at(at)) {
        Some((others, last)) if last.ends_with("peer-memory client") => others,
        _ => remedy,
    }
}

/// An entry for an unavailable or unchecked device, NIC or combination, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Skipped {
    /// The name of the unavailable or unchecked item.
    pub what: String,
    /// The reason why the item is unavailable or unchecked, on one line.
    pub why: String,
    /// The reason and its remedy for text output; not part of the JSON.
    #[serde(skip)]
    pub problem: Box<Problem>,
}

impl Skipped {
    /// Returns the entry for an item with the reason why it was skipped.
    pub(crate) fn new(what: impl Into<String>, why: impl Into<Problem>) -> Self {
        let problem = why.into();
        Self { what: what.into(), why: problem.to_string(), problem: Box::new(problem) }
    }
}

/// Returns the name of memory for text output: the iface, and the device if there is one, such as
/// `cuda:0`.
pub(crate) fn memory_name(iface: &str, device: Option<u32>) -> String {
    device.map_or_else(|| iface.to_owned(), |device| format!("{iface}:{device}"))
}

/// Writes a document as JSON, followed by a line feed.
pub(crate) fn write(out: &mut dyn Write, document: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, document)?;
    writeln!(out)
}

/// Writes a document as JSON if `as_json` is true, and otherwise as readable text, which `text`
/// prints.
pub(crate) fn write_or_text<T: Serialize>(
    out: &mut dyn Write,
    document: &T,
    as_json: bool,
    style: Style,
    text: fn(&mut dyn Write, &T, Style) -> io::Result<()>,
) -> io::Result<()> {
    if as_json { write(out, document) } else { text(out, document, style) }
}
