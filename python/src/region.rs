//! Registered memory of a Python object.

#![allow(unsafe_code, reason = "promises that an export keeps memory allocated")]

use std::sync::Arc;

use hmem::{
    Access, KeptRaw, OwnedCachedRegion, Promise, Raw, RegionSlice, Rejected, RemoteKey, Request,
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    error::{Raise, to_python},
    exported::{Exported, Holder},
    slot::Slot,
};

/// A registration, with the export that keeps the memory allocated.
pub(crate) enum Held {
    /// A region that is deregistered when it is closed.
    Registered(hmem::Region<KeptRaw<Holder>>),
    /// A lease of a region of the domain's cache. The lease ends before the export.
    Cached { lease: OwnedCachedRegion, _holder: Holder },
}

impl Held {
    /// Registers memory, or finds it in the domain's cache.
    pub(crate) fn new(
        py: Python<'_>,
        domain: &hmem::Domain,
        cached: bool,
        memory: Exported,
        access: Access,
    ) -> hmem::Result<Self> {
        let Exported { range, writable, owner, holder } = memory;
        let promise = if writable { Promise::ReadWrite } else { Promise::ReadOnly };
        // SAFETY: the region has the export, which keeps the memory allocated. Rust code makes no
        // reference to the memory. `hmem.Hmem.domain` demands of programs with a cache that they
        // tell no peer a key whose object they free.
        let raw = unsafe { Raw::new(range, promise) };
        if cached {
            let cache = domain.cache()?;
            let found = match owner {
                None => cache.find_owned(range, access)?,
                // The lookup does not check the owner of device memory.
                Some(_) => None,
            };
            let lease = match (found, owner) {
                (Some(lease), _) => lease,
                (None, Some((iface, device))) => {
                    py.detach(|| cache.get_owned_of(raw, access, iface, device))?
                }
                (None, None) => py.detach(|| cache.get_owned(raw, access))?,
            };
            // The region of a writable object at the same place has more rights than a read-only
            // object allows.
            if writable || !lease.access().nic_writes() {
                return Ok(Self::Cached { lease, _holder: holder });
            }
        }
        py.detach(|| {
            let request = Request::new(raw.keep(holder), access);
            let request = match owner {
                Some((iface, device)) => request.owner(iface, device),
                None => request,
            };
            Ok(Self::Registered(domain.submit(request)?))
        })
    }

    fn region(&self) -> &hmem::MemoryRegion {
        match self {
            Self::Registered(region) => region,
            Self::Cached { lease, .. } => lease,
        }
    }

    fn key(&self) -> hmem::Result<RemoteKey> {
        match self {
            Self::Registered(region) => region.key(),
            Self::Cached { lease, .. } => lease.view().key(),
        }
    }

    /// Returns the length of the registered object in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Registered(region) => region.range().len(),
            Self::Cached { lease, .. } => lease.view().range().len(),
        }
    }

    /// Returns a part of the registered memory, for a transfer.
    pub(crate) fn slice(&self, offset: u64, len: u64) -> hmem::Result<RegionSlice> {
        match self {
            Self::Registered(region) => region.slice(offset, len),
            Self::Cached { lease, .. } => lease.view().slice(offset, len),
        }
    }

    /// Deregisters the memory, or ends the lease. After a failure the error holds the registration,
    /// which stays open.
    fn close(self, py: Python<'_>) -> Result<(), Rejected<Self>> {
        match self {
            Self::Registered(region) => match py.detach(|| region.close()) {
                Ok(_) => Ok(()),
                Err(Rejected { value, error }) => {
                    Err(Rejected::new(Self::Registered(value), error))
                }
            },
            Self::Cached { lease, _holder } => {
                // The drop of an uncached region deregisters it.
                match lease.lease().uncached_reason() {
                    None => drop(lease),
                    Some(_) => py.detach(|| drop(lease)),
                }
                Ok(())
            }
        }
    }
}

/// A registered object: `hmem.Region`.
#[pyclass(frozen, module = "hmem")]
pub(crate) struct Region {
    held: Slot<Held>,
}

impl From<Held> for Region {
    fn from(held: Held) -> Self {
        Self { held: Slot::new(held) }
    }
}

impl Region {
    pub(crate) fn held(&self, py: Python<'_>) -> PyResult<Arc<Held>> {
        self.held.get("region").or_raise(py)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            // A deregistration may wait for transfers of peers.
            Python::attach(|py| py.detach(|| drop(held)));
        }
    }
}

#[pymethods]
impl Region {
    /// The remote key as bytes, for a peer.
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let key = self.held(py)?.key().or_raise(py)?;
        Ok(PyBytes::new(py, &key.to_bytes()))
    }

    /// The path of the registration, its reason, and each attempt.
    #[getter]
    fn decision<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let held = self.held(py)?;
        to_python(py, &**held.region().decision().or_raise(py)?)
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(match &*self.held(py)? {
            Held::Registered(region) => region.range().start().0,
            Held::Cached { lease, .. } => lease.view().range().start().0,
        })
    }

    /// The length in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.held(py)?.len())
    }

    /// The rights. A cached region may have more than the call asked for.
    #[getter]
    fn access(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.held(py)?.region().access().bits())
    }

    /// False once the memory changed under a cached region.
    #[getter]
    fn valid(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(match &*self.held(py)? {
            Held::Registered(_) => true,
            Held::Cached { lease, .. } => !lease.lease().is_invalidated(),
        })
    }

    /// Deregisters the memory, or ends the lease of a cached region.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.held.close("region", "wait for it first", |held| held.close(py)).or_raise(py)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        match self.held.get("region") {
            Err(_) => "<hmem.Region closed>".to_owned(),
            Ok(held) => match held.region().decision() {
                Ok(decision) => format!("<hmem.Region {} bytes, {}>", held.len(), decision.path),
                Err(_) => format!("<hmem.Region {} bytes>", held.len()),
            },
        }
    }
}
