//! The probable causes of an error.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A possible cause of an error, with what this machine shows for it. [`Error::causes`] lists the
/// causes of an error.
///
/// [`Error::causes`]: super::Error::causes
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct ProbableCause {
    /// The name of the cause: a heading in `docs/causes.md`.
    pub name: &'static str,
    /// The cause as a sentence.
    pub cause: String,
    /// Facts of this machine that point to the cause, such as a limit and its use. `None` if the
    /// error itself is the only sign.
    pub evidence: Option<String>,
    /// The remedy as an imperative clause.
    pub remedy: &'static str,
}

impl ProbableCause {
    /// Creates a cause without evidence.
    #[must_use]
    pub fn new(name: &'static str, cause: impl Into<String>, remedy: &'static str) -> Self {
        Self { name, cause: cause.into(), evidence: None, remedy }
    }

    /// Sets the facts of this machine that point to the cause.
    #[must_use]
    pub fn evidence(mut self, evidence: impl Into<Option<String>>) -> Self {
        self.evidence = evidence.into();
        self
    }
}

impl fmt::Display for ProbableCause {
    /// Writes the cause, with the evidence in parentheses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)?;
        match &self.evidence {
            Some(evidence) => write!(f, " ({evidence})"),
            None => Ok(()),
        }
    }
}

/// A copy of a [`ProbableCause`] with the same fields, as part of an
/// [`ErrorSummary`](super::ErrorSummary).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are those of ProbableCause")]
pub struct CauseSummary {
    pub name: String,
    pub cause: String,
    pub evidence: Option<String>,
    pub remedy: String,
}

impl From<&ProbableCause> for CauseSummary {
    fn from(cause: &ProbableCause) -> Self {
        Self {
            name: cause.name.to_owned(),
            cause: cause.cause.clone(),
            evidence: cause.evidence.clone(),
            remedy: cause.remedy.to_owned(),
        }
    }
}
