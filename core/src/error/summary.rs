//! A comparable and serialisable copy of an error.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Attempt, CauseSummary, Error, ErrorKind, ExportUnit, Path};

/// A copy of an [`Error`] that can be compared, sent to another process and stored.
///
/// An [`Error`] holds its source as a trait object, so it has neither `PartialEq` nor `Serialize`.
/// The summary has the same facts as plain values.
///
/// ```
/// use hmem_core::{Error, ErrorKind, ErrorSummary};
///
/// let error = Error::new(ErrorKind::ZeroLength, "register").remedy("register at least one byte");
/// let summary = error.summary();
/// assert_eq!(summary, error.clone().summary());
/// assert_eq!(summary.kind, ErrorKind::ZeroLength);
/// assert_eq!(summary.remedy.as_deref(), Some("register at least one byte"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorSummary {
    /// The kind of the error.
    pub kind: ErrorKind,
    /// The public call or the driver's function that failed.
    pub operation: String,
    /// The failure and its reason on one line, without attempts, source, remedy and values.
    pub message: String,
    /// The operating system's error number, if there is one.
    pub errno: Option<i32>,
    /// The driver's own error code with its name, such as `CUDA_ERROR_NOT_SUPPORTED (801)`.
    pub driver_code: Option<String>,
    /// The iface that refused the operation, by its name.
    pub iface: Option<String>,
    /// The number of the device that refused the operation.
    pub device: Option<u32>,
    /// The provider and NIC that refused the operation.
    pub provider: Option<String>,
    /// The remedy of the error, or else of the nearest source that has one.
    pub remedy: Option<String>,
    /// The probable causes ([`Error::causes`]), the most probable first.
    pub causes: Vec<CauseSummary>,
    /// The context values by name, including the value `why`. If several values have the same name,
    /// the map has the first.
    pub values: BTreeMap<String, String>,
    /// The paths that were tried, in order. Empty unless a path search failed.
    pub attempts: Vec<AttemptSummary>,
    /// The messages of the sources, the nearest first.
    pub sources: Vec<String>,
}

/// A copy of an [`Attempt`] with the same fields. It can be compared, sent to another process and
/// stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are those of Attempt")]
pub struct AttemptSummary {
    pub path: Path,
    pub call: String,
    pub unit: Option<ExportUnit>,
    pub driver_called: bool,
    pub error: Option<Box<ErrorSummary>>,
    pub cause_name: Option<String>,
    pub cause: Option<String>,
    pub remedy: Option<String>,
}

impl From<&Attempt> for AttemptSummary {
    fn from(attempt: &Attempt) -> Self {
        Self {
            path: attempt.path,
            call: attempt.call.clone(),
            unit: attempt.unit,
            driver_called: attempt.driver_called,
            error: attempt.error.as_ref().map(|error| Box::new(error.summary())),
            cause_name: attempt.cause_name.map(str::to_owned),
            cause: attempt.cause.clone(),
            remedy: attempt.remedy.clone(),
        }
    }
}

impl From<&Error> for ErrorSummary {
    fn from(error: &Error) -> Self {
        let record = &*error.0;
        let mut values = BTreeMap::new();
        for (name, value) in &record.context {
            values.entry((*name).to_owned()).or_insert_with(|| value.clone());
        }
        Self {
            kind: record.kind,
            operation: record.operation.to_owned(),
            message: error.message().to_string(),
            errno: record.errno.map(|errno| errno.0),
            driver_code: record.driver.as_ref().map(ToString::to_string),
            iface: record.iface.as_ref().map(ToString::to_string),
            device: record.device.map(|device| device.0),
            provider: record.provider.as_deref().map(str::to_owned),
            remedy: error.remedy_text().map(str::to_owned),
            causes: error.causes().iter().map(CauseSummary::from).collect(),
            values,
            attempts: record.trace.iter().map(AttemptSummary::from).collect(),
            sources: error.source_messages().collect(),
        }
    }
}
