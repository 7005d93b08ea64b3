//! The JSON of the commands: what `docs/check-schema.md` and `docs/perf-schema.md` describe, and
//! nothing else.
//!
//! A field is added without a new schema number; one that goes or changes its meaning takes a new
//! number.

use std::{
    borrow::Cow,
    io::{self, Write},
};

use hmem::{Error, Path, path};
use serde::{Deserialize, Serialize};

/// The schema number of the documents.
pub const SCHEMA: u32 = 2;

/// One way that was tried.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attempt {
    /// The path.
    pub path: Cow<'static, str>,
    /// The exact call that decided it.
    pub call: String,
    /// The refusal, in one line; null for the attempt that succeeded.
    pub error: Option<String>,
    /// The probable cause of the refusal.
    pub cause: Option<String>,
    /// What would make it work.
    pub remedy: Option<String>,
}

impl From<&path::Attempt> for Attempt {
    fn from(attempt: &path::Attempt) -> Self {
        Self {
            path: attempt.path.name().into(),
            call: attempt.call.clone(),
            error: attempt.error.as_ref().map(Error::to_string),
            cause: attempt.cause.clone(),
            remedy: attempt.remedy.clone(),
        }
    }
}

impl Attempt {
    /// A registration that was refused as a whole.
    #[must_use]
    pub fn refused(path: Path, error: &Error) -> Self {
        Self {
            path: path.name().into(),
            call: "register".into(),
            error: Some(error.to_string()),
            cause: Some(error.kind().text().to_owned()),
            remedy: error.remedy_text().map(str::to_owned),
        }
    }
}

/// Something that is not here or was not checked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Skipped {
    /// What.
    pub what: String,
    /// Why, in one line.
    pub why: String,
}

/// Writes a document and a line feed.
///
/// # Errors
/// What the writer reported.
pub fn write(out: &mut dyn Write, document: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, document)?;
    writeln!(out)
}
