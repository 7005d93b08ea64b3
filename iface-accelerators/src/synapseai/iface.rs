//! The iface type, and the builder that opens it.

#![allow(unsafe_code, reason = "loads the libraries")]

use std::path::{Path, PathBuf};

use hmem_core::Result;
use hmem_iface_kit::announced::{Announced, Open};

use super::{
    driver::Synapse,
    sys::{hlthunk, synapse},
};

/// The iface for Intel Gaudi memory, over `libSynapse.so` and `libhl-thunk.so`. Its only device has
/// number 0.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_accelerators::synapseai::SynapseAi;
///
/// if let Ok(gaudi) = SynapseAi::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(gaudi.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub type SynapseAi = Announced<Synapse>;

/// Environment variable with the path of libhl-thunk. A path given to the builder overrides it.
pub const HLTHUNK_LIBRARY_VARIABLE: &str = hlthunk::Functions::LIBRARY_VARIABLE;

hmem_iface_kit::builder! {
    /// Builder of [`SynapseAi`], which can load other libraries or use functions that the caller
    /// provides.
    pub struct Builder {
        /// Path of libhl-thunk, or `None` if the environment or the dynamic loader decides.
        hlthunk: Option<PathBuf>,
        /// Functions to use instead of libhl-thunk.
        hlthunk_functions: Option<hlthunk::Functions>,
        /// True if the iface may acquire a device. `None` unless `start_runtime` was called.
        start_runtime: Option<bool>,
    }
    functions: synapse::Functions,
    iface: "hmem_iface_accelerators::synapseai::SynapseAi",
    library: ("Intel's `libSynapse.so`", "libSynapse.so", "HMEM_SYNAPSEAI_LIBRARY"),
}

impl Builder {
    /// Loads libhl-thunk at `path` instead of the one that `HMEM_HLTHUNK_LIBRARY` names or the
    /// dynamic loader finds. Without libhl-thunk the iface cannot export dma-bufs.
    ///
    /// # Safety
    /// The file must be Intel's `libhl-thunk.so` or a replacement of it, as for
    /// [`Builder::library`].
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let builder = hmem_iface_accelerators::synapseai::SynapseAi::builder().hlthunk("/tmp/any.so");
    /// ```
    pub unsafe fn hlthunk(mut self, path: impl AsRef<Path>) -> Self {
        self.hlthunk = Some(path.as_ref().to_owned());
        self
    }

    /// Uses these functions instead of loading libhl-thunk.
    pub fn hlthunk_functions(mut self, functions: hlthunk::Functions) -> Self {
        self.hlthunk_functions = Some(functions);
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
    /// - InvalidArgument if `HMEM_SYNAPSEAI_START_RUNTIME` is not a boolean, unless
    ///   [`start_runtime`](Self::start_runtime) was called.
    /// - Unavailable if libSynapse, a required symbol or a device is absent, or
    ///   SynapseAI does not start. The error names the library, and the runtime's code if there is
    ///   one.
    pub fn open(self) -> Result<SynapseAi> {
        Synapse::open(self).and_then(Announced::new)
    }
}

impl Open for Synapse {
    type Builder = Builder;

    const LIBRARY_VARIABLE: &'static str = synapse::Functions::LIBRARY_VARIABLE;
    const START_VARIABLE: &'static str = "HMEM_SYNAPSEAI_START_RUNTIME";

    fn open(mut builder: Builder) -> Result<Self> {
        let may_start = Self::may_start(builder.start_runtime, builder.without_environment)?;
        let synapse = builder.load()?;
        let hlthunk = match (builder.hlthunk_functions, builder.hlthunk) {
            (Some(hlthunk), _) => Ok(hlthunk),
            // SAFETY: the caller of `Builder::hlthunk` promises that the file is libhl-thunk or a
            // replacement of it.
            (None, Some(path)) => unsafe { hlthunk::Functions::load(&path) },
            (None, None) if builder.without_environment => hlthunk::Functions::find_by_name(),
            (None, None) => hlthunk::Functions::find(),
        };
        Self::start(synapse, hlthunk, may_start)
    }
}
