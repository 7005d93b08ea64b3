//! The Python classes `hmem.Hmem`, which is the entry point, and `hmem.Domain`, which is an open
//! NIC.

#![allow(unsafe_code, reason = "builds the provider for libfabric's NICs")]

use std::{collections::BTreeMap, sync::Arc};

use hmem::{Builder, CacheAttr, DomainAttr, ErrorKind, libfabric::Libfabric, loopback::Loopback};
use pyo3::prelude::*;

use crate::{
    endpoint::Endpoint,
    error::Raise,
    exported::Exported,
    region::{Held, Region},
    slot::Slot,
};

/// The ifaces and providers of a program: `hmem.Hmem`.
#[pyclass(frozen, module = "hmem")]
pub(crate) struct Hmem {
    inner: hmem::Hmem,
}

/// Adds a provider by its name.
fn add(builder: Builder, name: &str) -> hmem::Result<Builder> {
    match name.split_once('/').unwrap_or((name, "")) {
        ("verbs", "") => Ok(builder.verbs()),
        ("loopback", "") => Ok(builder.provider(Loopback::builder().build()?)),
        ("libfabric", filter) => {
            let fabric = Libfabric::builder();
            let fabric = if filter.is_empty() { fabric } else { fabric.provider(filter) };
            // SAFETY:
            // - The module needs the GIL (`gil_used`), which the caller has. So no other thread of
            //   Python changes the environment.
            // - `hmem.Hmem` demands of programs that they close regions and endpoints only after
            //   the transfers of peers.
            Ok(builder.provider_or_absent("libfabric", unsafe { fabric.build() }))
        }
        _ => Err(hmem::Error::new(ErrorKind::InvalidArgument, "Hmem")
            .context("why", format_args!("no provider is named {name}"))
            .remedy("name verbs, libfabric, libfabric/PROVIDER, or loopback")),
    }
}

#[pymethods]
impl Hmem {
    #[new]
    #[pyo3(signature = (*, providers=vec!["verbs".to_owned()]))]
    fn new(py: Python<'_>, providers: Vec<String>) -> PyResult<Self> {
        let builder =
            providers.iter().try_fold(hmem::Hmem::builder(), |builder, name| add(builder, name));
        let inner = builder.and_then(Builder::build).or_raise(py)?;
        Ok(Self { inner })
    }

    /// The names of the NICs.
    fn nics(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let mut names = Vec::new();
        for provider in self.inner.providers() {
            let nics = py.detach(|| provider.nics()).or_raise(py)?;
            names.extend(nics.iter().map(|attr| attr.nic.to_string()));
        }
        Ok(names)
    }

    /// The ifaces, providers and NICs that are absent, with the reasons.
    #[getter]
    fn absent(&self) -> BTreeMap<String, String> {
        let registry = self.inner.registry();
        let ifaces = registry.absent().map(|(kind, why)| (registry.name_of(kind).to_string(), why));
        let providers = self.inner.absent_providers().map(|(name, why)| (name.to_owned(), why));
        ifaces.chain(providers).map(|(name, why)| (name, format!("{why:#}"))).collect()
    }

    /// Opens a NIC.
    #[pyo3(signature = (nic, *, cache=false))]
    fn domain(&self, py: Python<'_>, nic: &str, cache: bool) -> PyResult<Domain> {
        let (provider, nic) = match nic.split_once('/') {
            Some((provider, nic)) => (provider, Some(nic.to_owned())),
            None => (nic, None),
        };
        let cache_attr = cache.then(CacheAttr::default);
        let attr = DomainAttr { nic, cache: cache_attr, ..DomainAttr::default() };
        let domain = py.detach(|| self.inner.domain(provider, attr)).or_raise(py)?;
        Ok(Domain { open: Slot::new(domain), cached: cache })
    }
}

/// An open NIC: `hmem.Domain`.
#[pyclass(frozen, module = "hmem")]
pub(crate) struct Domain {
    open: Slot<hmem::Domain>,
    cached: bool,
}

impl Domain {
    fn open(&self, py: Python<'_>) -> PyResult<Arc<hmem::Domain>> {
        self.open.get("domain").or_raise(py)
    }
}

#[pymethods]
impl Domain {
    /// The name of the NIC.
    #[getter]
    fn nic(&self, py: Python<'_>) -> PyResult<String> {
        Ok(self.open(py)?.provider_attr().nic.to_string())
    }

    /// Registers the memory of an object.
    #[pyo3(signature = (object, access=None))]
    fn register(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        access: Option<u64>,
    ) -> PyResult<Region> {
        let domain = self.open(py)?;
        let memory = Exported::of(object)?;
        let access = memory.access(access).or_raise(py)?;
        Held::new(py, &domain, self.cached, memory, access).or_raise(py).map(Region::from)
    }

    /// Registers the memory of several objects: all, or none.
    #[pyo3(signature = (objects, access=None))]
    fn register_many(
        &self,
        py: Python<'_>,
        objects: Vec<Bound<'_, PyAny>>,
        access: Option<u64>,
    ) -> PyResult<Vec<Region>> {
        let register = |(index, object): (usize, &Bound<'_, PyAny>)| {
            self.register(py, object, access).inspect_err(|error| {
                // An exception that takes no attribute is raised without the position.
                drop(error.value(py).setattr("index", index));
            })
        };
        objects.iter().enumerate().map(register).collect()
    }

    /// Opens an endpoint for up to `depth` transfers at once.
    #[pyo3(signature = (depth=128))]
    fn endpoint(&self, py: Python<'_>, depth: usize) -> PyResult<Endpoint> {
        let domain = self.open(py)?;
        py.detach(|| Endpoint::new(&domain, depth)).or_raise(py)
    }

    /// Executes requests of peers, on NICs that do so only while the program calls the library.
    fn progress(&self, py: Python<'_>) -> PyResult<usize> {
        let domain = self.open(py)?;
        py.detach(|| domain.progress()).or_raise(py)
    }

    /// Closes the NIC. Fails while a region or an endpoint is open.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let close = |domain: hmem::Domain| py.detach(|| domain.close());
        self.open.close("domain", "wait for it first", close).or_raise(py)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}
