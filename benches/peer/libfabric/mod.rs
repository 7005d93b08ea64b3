//! libfabric as a peer to measure against, in the same process and the same run.
//!
//! The library is loaded at run time: a machine without it gets a [`FabricError`] that says so, and
//! the rest of the benches run. Nothing is linked and nothing is generated from headers.
//!
//! * [`RegistrationPeer`]: what `fi_mr_regattr` followed by `fi_close` costs on a software
//!   provider, with few and with many regions alive.
//! * [`ShmWritePeer`]: what an `fi_write` between two endpoints of one process costs, until the
//!   bytes have arrived.
//!
//! ```ignore
//! let libfabric = Libfabric::load()?;
//! let mut peer = RegistrationPeer::open(libfabric, RegistrationProvider::Tcp)?;
//! peer.populate(100_000, KeyOrder::Shuffled)?;
//! peer.reg_close(buffer.as_ptr(), 4096, RegistrationPeer::REMOTE_ACCESS, peer.vacant_key(7))?;
//! ```
//!
//! Loading libfabric has effects on the whole process. The `shm` provider installs handlers for
//! `SIGBUS`, `SIGSEGV`, `SIGTERM` and `SIGINT` when its first endpoint is opened, which is why the
//! library is never unloaded, and why these peers belong in a bench and not next to code under
//! test that relies on its own handlers.

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

/// A handle of the loaded library. Copies refer to the same library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Libfabric {
    functions: &'static sys::Functions,
}

impl Libfabric {
    /// Loads `libfabric.so.1` through the dynamic loader's usual search.
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
    /// [`FabricError::LibraryMissing`] if the library cannot be loaded,
    /// [`FabricError::SymbolMissing`] if the file is not libfabric, [`FabricError::LibraryTooOld`]
    /// before 1.17.
    pub(crate) fn load_from(name: &str) -> Result<Self, FabricError> {
        // SAFETY: the caller names a libfabric, whose initialisers only register its providers and
        // ask nothing of the process.
        let library = unsafe { libloading::Library::new(name) }
            .map_err(|source| FabricError::LibraryMissing { library: name.to_owned(), source })?;
        let lookup = |symbol: &'static CStr| {
            // SAFETY: the symbol is only copied out as an address here; its type is given to it by
            // `Functions::from_lookup`, from the declaration in libfabric's header.
            let address = unsafe { library.get::<*const c_void>(symbol) };
            address.map(|address| *address).map_err(|source| FabricError::SymbolMissing {
                library: name.to_owned(),
                symbol: symbol.to_string_lossy().into_owned(),
                source,
            })
        };
        // SAFETY: the addresses come from the library under the functions' own names, and the
        // library is kept loaded from here on.
        let functions = unsafe { sys::Functions::from_lookup(lookup) }?;
        // Never unloaded: see the module's note on signal handlers.
        std::mem::forget(library);

        // SAFETY: `fi_version` takes nothing and only returns a number.
        let found = unsafe { (functions.fi_version)() };
        if found < sys::API_VERSION {
            return Err(FabricError::LibraryTooOld {
                found: unpack_version(found),
                needed: unpack_version(sys::API_VERSION),
            });
        }
        Ok(Self { functions: Box::leak(Box::new(functions)) })
    }

    /// The version that the library reports, as (major, minor).
    pub(crate) fn version(self) -> (u32, u32) {
        // SAFETY: as in `load`.
        unpack_version(unsafe { (self.functions.fi_version)() })
    }
}

/// Splits what `FI_VERSION` packs.
fn unpack_version(version: u32) -> (u32, u32) {
    (version >> 16, version & 0xffff)
}
