//! The attempts of a path search, which errors and decisions record.

use std::{fmt, ops::Deref, sync::Arc};

use serde::{Deserialize, Serialize, Serializer};

use super::{Error, ProbableCause};
use crate::named_enum;

named_enum! {
    /// A path by which a NIC reaches memory.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    #[non_exhaustive]
    pub enum Path {
        /// Host pages, registered by their addresses.
        PlainHost = "plain-host",
        /// A dma-buf, imported by its file descriptor.
        DmaBuf = "dma-buf",
        /// A device address, which a peer-memory client (a kernel module of the GPU's vendor)
        /// resolves.
        PeerMemory = "peer-memory",
        /// Copies through staging buffers in host memory.
        Staged = "staged",
    }
}

named_enum! {
    /// The amount of memory that an iface exports as one dma-buf, when a range is registered.
    ///
    /// The export may be larger than the range, because some drivers export, and some NICs import,
    /// only whole segments or whole allocations. The NIC always registers only the range, so the
    /// key grants no access to the rest of the export.
    #[derive(Default, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum ExportUnit {
        /// Exactly the range, or its part of each physical segment.
        #[default]
        Range = "range",
        /// Each physical segment that the range touches, as a whole.
        Segment = "segment",
        /// The whole allocation.
        Allocation = "allocation",
    }
}

/// One attempt to register over a path.
#[derive(Clone, Debug, Serialize)]
pub struct Attempt {
    /// The path that was tried.
    pub path: Path,
    /// The call that succeeded or was refused.
    pub call: String,
    /// The memory that was exported or was to be exported. `None` for paths without dma-bufs, and
    /// for a dma-buf that the application supplied.
    pub unit: Option<ExportUnit>,
    /// True if a driver was called. False if the NIC does not support the path at all, or the
    /// domain's settings forbid the path.
    pub driver_called: bool,
    /// The error of the refusal. `None` for the attempt that succeeded.
    #[serde(serialize_with = "display_error")]
    pub error: Option<Error>,
    /// The name of the most probable cause, if known: a heading in `docs/causes.md`.
    /// [`Error::causes`] of `error` lists all probable causes.
    pub cause_name: Option<&'static str>,
    /// The most probable cause of the refusal in one sentence, with its evidence, if known.
    pub cause: Option<String>,
    /// The change to the machine or the application that would make the path work, if known.
    pub remedy: Option<String>,
}

impl Attempt {
    /// Creates an attempt that succeeded.
    #[must_use]
    pub fn success(path: Path, call: impl Into<String>) -> Self {
        Self {
            path,
            call: call.into(),
            unit: None,
            driver_called: true,
            error: None,
            cause_name: None,
            cause: None,
            remedy: None,
        }
    }

    /// Creates an attempt that was refused, with the most probable cause and the remedy of the
    /// error ([`Error::with_causes`]).
    #[must_use]
    pub fn refused(path: Path, call: impl Into<String>, error: Error) -> Self {
        Self { error: Some(error), ..Self::success(path, call) }.explained()
    }

    /// Creates an attempt over a path that was refused before any driver was called: the NIC does
    /// not support the path, or the domain's settings forbid it.
    #[must_use]
    pub fn not_tried(path: Path, call: impl Into<String>, error: Error) -> Self {
        Self { driver_called: false, ..Self::refused(path, call, error) }
    }

    /// Replaces the causes of the refusal, as [`Error::with_causes`] does.
    #[must_use]
    pub fn with_causes(mut self, causes: Vec<ProbableCause>) -> Self {
        self.error = self.error.map(|error| error.with_causes(causes));
        self.explained()
    }

    /// Sets cause and remedy to those of the error.
    fn explained(mut self) -> Self {
        let cause = self.error.as_ref().and_then(|error| error.own_causes().first());
        self.cause_name = cause.map(|cause| cause.name);
        self.cause = cause.map(ToString::to_string);
        self.remedy = self.error.as_ref().and_then(Error::remedy_text).map(str::to_owned);
        self
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(error) = &self.error else {
            return write!(f, "{}: {} succeeded", self.path, self.call);
        };
        write!(f, "{}: {} refused: ", self.path, self.call)?;
        error.write_messages(f)?;
        if let Some(cause) = &self.cause {
            write!(f, "; probable cause: {cause}")?;
        }
        if let Some(remedy) = &self.remedy {
            write!(f, "; remedy: {remedy}")?;
        }
        error.write_other_causes(f)?;
        error.write_values(f)
    }
}

fn display_error<S: Serializer>(error: &Option<Error>, serializer: S) -> Result<S::Ok, S::Error> {
    match error {
        Some(error) => serializer.collect_str(&format_args!("{error:#}")),
        None => serializer.serialize_none(),
    }
}

/// The attempts of a path search, in order. Clones share the attempts.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<[Attempt]>);

impl Trace {
    /// Returns the most informative refusal: the last refusal by a driver, or else the last
    /// refusal. Returns `None` if no attempt was refused.
    #[must_use]
    pub fn refusal(&self) -> Option<&Error> {
        let refused = || self.iter().rev().filter(|attempt| attempt.error.is_some());
        refused().find(|attempt| attempt.driver_called).or_else(|| refused().next())?.error.as_ref()
    }
}

impl Deref for Trace {
    type Target = [Attempt];

    fn deref(&self) -> &[Attempt] {
        &self.0
    }
}

impl From<Vec<Attempt>> for Trace {
    fn from(attempts: Vec<Attempt>) -> Self {
        Self(attempts.into())
    }
}

impl<'a> IntoIterator for &'a Trace {
    type Item = &'a Attempt;
    type IntoIter = std::slice::Iter<'a, Attempt>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl Serialize for Trace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl fmt::Display for Trace {
    /// Writes all attempts on one line: `(1) dma-buf: ... (2) staged: ...`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, attempt) in self.iter().enumerate() {
            let space = if at == 0 { "" } else { " " };
            write!(f, "{space}({}) {attempt}", at + 1)?;
        }
        Ok(())
    }
}
