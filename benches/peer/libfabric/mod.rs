//! libfabric, loaded at run time, as the reference that hmem is compared with.
//!
//! A benchmark loads libfabric into its process, and measures it alternately with hmem. If
//! libfabric cannot be loaded, loading returns a [`FabricError`], and the benchmark measures hmem
//! alone. No header and no link-time library is needed.
//!
//! * [`RegistrationPeer`] calls `fi_mr_regattr` and `fi_close` on a software provider, with few or
//!   many live regions.
//! * [`ShmWritePeer`] writes with `fi_write` from one endpoint to another of the same process, and
//!   waits until the bytes have arrived.
//!
//! ```ignore
//! let libfabric = Libfabric::load()?;
//! let mut peer = RegistrationPeer::open(libfabric, RegistrationProvider::Tcp)?;
//! peer.populate(100_000, KeyOrder::Shuffled)?;
//! peer.reg_close(buffer.as_ptr(), 4096, RegistrationPeer::REMOTE_ACCESS, peer.vacant_key(7))?;
//! ```
//!
//! Loading libfabric affects the whole process. When its first endpoint is opened, the `shm`
//! provider installs handlers for `SIGBUS`, `SIGSEGV`, `SIGTERM` and `SIGINT`. For this reason the
//! library is never unloaded, and this module must not be used in a process that relies on its own
//! handlers.

pub(crate) mod error;
pub(crate) mod info;
pub(crate) mod objects;
pub(crate) mod registration;
pub(crate) mod shm;
pub(crate) mod sys;

use std::ffi::{CStr, c_void};

pub(crate) use error::FabricError;
pub(crate) use registration::{KeyOrder, RegistrationPeer, RegistrationProvider};
pub(crate) use shm::{ShmWritePath, ShmWritePeer};

/// The loaded libfabric library. Copies refer to the same library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Libfabric {
    functions: &'static sys::Functions,
}

impl Libfabric {
    /// Loads `libfabric.so.1` with the dynamic loader's search path.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::load_from`].
    pub(crate) fn load() -> Result<Self, FabricError> {
        Self::load_from(sys::LIBRARY_NAME)
    }

    /// Loads libfabric from a path, or from a file name that the dynamic loader searches for.
    ///
    /// # Errors
    ///
    /// - [`FabricError::LibraryMissing`] if the library cannot be loaded.
    /// - [`FabricError::SymbolMissing`] if the file is not libfabric.
    /// - [`FabricError::LibraryTooOld`] if the release is older than 1.17.
    pub(crate) fn load_from(name: &str) -> Result<Self, FabricError> {
        // SAFETY: the caller names a libfabric. Its initialisers only register its providers, and
        // have no precondition.
        let library = unsafe { libloading::Library::new(name) }
            .map_err(|source| FabricError::LibraryMissing { library: name.to_owned(), source })?;
        let lookup = |symbol: &'static CStr| {
            // SAFETY: only the symbol's address is copied here. `Functions::from_lookup` gives it
            // the type that libfabric's header declares.
            let address = unsafe { library.get::<*const c_void>(symbol) };
            address.map(|address| *address).map_err(|source| FabricError::SymbolMissing {
                library: name.to_owned(),
                symbol: symbol.to_string_lossy().into_owned(),
                source,
            })
        };
        // SAFETY: each address is that of the library's function of that name. The library is never
        // unloaded.
        let functions = unsafe { sys::Functions::from_lookup(lookup) }?;
        // The `shm` provider's signal handlers must stay loaded.
        std::mem::forget(library);

        // SAFETY: `fi_version` has no arguments and no precondition.
        let found = unsafe { (functions.fi_version)() };
        if found < sys::API_VERSION {
            return Err(FabricError::LibraryTooOld {
                found: unpack_version(found),
                needed: unpack_version(sys::API_VERSION),
            });
        }
        Ok(Self { functions: Box::leak(Box::new(functions)) })
    }

    /// Returns the version of the library, as (major, minor).
    pub(crate) fn version(self) -> (u32, u32) {
        // SAFETY: `fi_version` has no arguments and no precondition.
        unpack_version(unsafe { (self.functions.fi_version)() })
    }
}

/// Splits a version number that the C macro `FI_VERSION` encoded into (major, minor).
fn unpack_version(version: u32) -> (u32, u32) {
    (version >> 16, version & 0xffff)
}
