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

pub(crate) use error::FabricError;
pub(crate) use hmem::libfabric::sys;
pub(crate) use registration::{KeyOrder, RegistrationPeer, RegistrationProvider};
pub(crate) use shm::{ShmWritePath, ShmWritePeer};

/// The loaded libfabric library. Copies refer to the same library.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Libfabric {
    functions: &'static sys::Functions,
}

impl Libfabric {
    /// Loads libfabric: the library in `HMEM_LIBFABRIC_LIBRARY`, or the one that the dynamic loader
    /// finds.
    ///
    /// # Errors
    ///
    /// [`FabricError::NotLoaded`] if there is no libfabric of release 1.17 or newer.
    pub(crate) fn load() -> Result<Self, FabricError> {
        let functions = sys::Functions::find().map_err(FabricError::NotLoaded)?;
        let this = Self { functions: Box::leak(Box::new(functions)) };
        if this.version() < (1, 17) {
            let (major, minor) = this.version();
            return Err(FabricError::TooOld { major, minor });
        }
        Ok(this)
    }

    /// Returns the version of the library, as (major, minor).
    pub(crate) fn version(self) -> (u32, u32) {
        // SAFETY: `fi_version` has no arguments and no precondition.
        unpack_version(unsafe { self.functions.fi_version()() })
    }
}

/// Splits a version number that the C macro `FI_VERSION` encoded into (major, minor).
fn unpack_version(version: u32) -> (u32, u32) {
    (version >> 16, version & 0xffff)
}
