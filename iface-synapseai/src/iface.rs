//! The iface type, and the builder that opens it.

use std::path::{Path, PathBuf};

use hmem_core::Result;
use hmem_iface_announced::{Announced, Open};

use crate::{
    driver::Synapse,
    sys::{hlthunk, synapse},
};

/// The iface for Intel Gaudi memory, over `libSynapse.so` and `libhl-thunk.so`. Its only device has
/// number 0.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_synapseai::SynapseAi;
///
/// if let Ok(gaudi) = SynapseAi::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(gaudi.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub type SynapseAi = Announced<Synapse>;

/// Environment variable with the path of libhl-thunk. A path given to the builder overrides it.
pub const HLTHUNK_LIBRARY_VARIABLE: &str = "HMEM_HLTHUNK_LIBRARY";

/// Builder of [`SynapseAi`], which can load other libraries or use functions that the caller
/// provides.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_synapseai::SynapseAi;
///
/// let error = SynapseAi::builder().library("/nowhere/libSynapse.so").open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// assert_eq!(error.context_value("library"), Some("/nowhere/libSynapse.so"));
/// ```
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until it opens"]
pub struct Builder {
    library: Option<PathBuf>,
    hlthunk: Option<PathBuf>,
    functions: Option<(synapse::Functions, Option<hlthunk::Functions>)>,
    start_runtime: Option<bool>,
}

impl Builder {
    /// Loads the library at `path` instead of the one that `HMEM_SYNAPSEAI_LIBRARY` names or the
    /// dynamic loader finds.
    pub fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.library = Some(path.as_ref().to_owned());
        self
    }

    /// Loads libhl-thunk at `path` instead of the one that `HMEM_HLTHUNK_LIBRARY` names or the
    /// dynamic loader finds. Without libhl-thunk the iface cannot export dma-bufs.
    pub fn hlthunk(mut self, path: impl AsRef<Path>) -> Self {
        self.hlthunk = Some(path.as_ref().to_owned());
        self
    }

    /// Uses these functions instead of loading libSynapse and libhl-thunk. If `hlthunk` is `None`,
    /// libhl-thunk is loaded.
    pub fn functions(
        mut self,
        synapse: synapse::Functions,
        hlthunk: Option<hlthunk::Functions>,
    ) -> Self {
        self.functions = Some((synapse, hlthunk));
        self
    }

    /// Permits the iface to acquire a device at the first allocation, if the process has none.
    /// Overrides `HMEM_SYNAPSEAI_START_RUNTIME`. The default is false.
    ///
    /// The device stays acquired until the process ends.
    pub fn start_runtime(mut self, start: bool) -> Self {
        self.start_runtime = Some(start);
        self
    }

    /// Loads the libraries, initialises SynapseAI and counts the devices. Does not acquire a
    /// device. If libhl-thunk cannot be loaded, the iface opens and exports no dma-bufs.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if `HMEM_SYNAPSEAI_START_RUNTIME` is not a boolean, unless
    ///   the builder decides.
    /// - [`ErrorKind::Unavailable`] if libSynapse, a required symbol or a device is absent, or
    ///   SynapseAI does not start. The error names the library, and the runtime's code if there is
    ///   one.
    ///
    /// [`ErrorKind::InvalidArgument`]: hmem_core::ErrorKind::InvalidArgument
    /// [`ErrorKind::Unavailable`]: hmem_core::ErrorKind::Unavailable
    pub fn open(self) -> Result<SynapseAi> {
        Synapse::open(self).map(Announced::new)
    }
}

impl Open for Synapse {
    type Builder = Builder;

    const LIBRARY_VARIABLE: &'static str = "HMEM_SYNAPSEAI_LIBRARY";
    const START_VARIABLE: &'static str = "HMEM_SYNAPSEAI_START_RUNTIME";

    fn open(builder: Builder) -> Result<Self> {
        let may_start = Self::may_start(builder.start_runtime)?;
        let load_hlthunk = |named| hlthunk::Functions::find(named, HLTHUNK_LIBRARY_VARIABLE);
        let (synapse, hlthunk) = match builder.functions {
            Some((synapse, Some(hlthunk))) => (synapse, Ok(hlthunk)),
            Some((synapse, None)) => (synapse, load_hlthunk(builder.hlthunk)),
            None => {
                let synapse = synapse::Functions::find(builder.library, Self::LIBRARY_VARIABLE)?;
                (synapse, load_hlthunk(builder.hlthunk))
            }
        };
        Self::start(synapse, hlthunk, may_start)
    }
}
