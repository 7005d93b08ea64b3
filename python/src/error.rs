//! The exception `hmem.Error`.

use hmem_cli::Failure;
use pyo3::{create_exception, exceptions::PyRuntimeError, prelude::*};
use serde::Serialize;

create_exception!(hmem, Error, PyRuntimeError, "A failure, with its kind, reason and remedy.");

/// Returns a value as a Python object, by way of JSON.
pub(crate) fn to_python<'py>(
    py: Python<'py>,
    value: &impl Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).expect("the value has no key but strings");
    py.import("json")?.call_method1("loads", (text,))
}

/// Returns the exception for an error of the library.
pub(crate) fn of(py: Python<'_>, error: &hmem::Error) -> PyErr {
    raised(|| {
        let exception = Error::new_err(format!("{error:#}"));
        let (value, summary) = (exception.value(py), to_python(py, &error.summary())?);
        for name in ["kind", "message", "remedy"] {
            value.setattr(name, summary.get_item(name)?)?;
        }
        value.setattr("summary", summary)?;
        Ok(exception)
    })
}

/// Returns the exception for a subcommand that could not run.
pub(crate) fn of_failure(py: Python<'_>, failure: &Failure) -> PyErr {
    if let Failure::Error(error) = failure {
        return of(py, error);
    }
    raised(|| {
        let problem = failure.problem();
        let exception = Error::new_err(problem.to_string());
        let value = exception.value(py);
        value
            .setattr("kind", matches!(failure, Failure::Usage(_)).then_some("invalid-argument"))?;
        value.setattr("message", &problem.headline)?;
        value.setattr("remedy", &problem.remedy)?;
        value.setattr("summary", py.None())?;
        Ok(exception)
    })
}

/// Returns the exception that `make` builds, or the exception that `make` itself raises.
fn raised(make: impl FnOnce() -> PyResult<PyErr>) -> PyErr {
    make().unwrap_or_else(|failure| failure)
}

/// Converts errors of the library to exceptions.
pub(crate) trait Raise<T> {
    /// Returns the value, or raises the error.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for hmem::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| of(py, &error))
    }
}
