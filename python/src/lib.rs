//! The Python package `hmem`: registers tensors and buffers of Python programs with NICs.
//!
//! `hmem/__init__.pyi` documents the Python side. The package imports no tensor library.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines:
//!
//! - `error`, `dlpack`
//! - `exported`
//! - `slot`
//! - `region`
//! - `endpoint`
//! - `domain`

#![deny(unsafe_code)]

mod dlpack;
mod domain;
mod endpoint;
mod error;
mod exported;
mod region;
mod slot;

/// The compiled module of the package.
#[pyo3::pymodule(gil_used = true)]
mod _hmem {
    use hmem_cli::Outcome;
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::{
        domain::{Domain, Hmem},
        endpoint::Endpoint,
        error::Error,
        region::Region,
    };

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        for (name, right) in hmem::Access::all().iter_names() {
            module.add(name, right.bits())?;
        }
        Ok(())
    }

    /// Runs the command `hmem` with the words of a subcommand. Returns whether the command passed,
    /// and its JSON document.
    #[pyfunction]
    fn document(py: Python<'_>, words: Vec<String>) -> PyResult<(bool, String)> {
        let (outcome, document) = py
            .detach(|| hmem_cli::document(&words))
            .map_err(|failure| crate::error::of_failure(py, &failure))?;
        Ok((outcome == Outcome::Passed, document))
    }
}
