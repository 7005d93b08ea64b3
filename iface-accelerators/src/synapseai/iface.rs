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

/// Builder of [`SynapseAi`], which can load other libraries or use functions that the caller
/// provides.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_accelerators::synapseai::SynapseAi;
///
/// // SAFETY: there is no such file.
/// let builder = unsafe { SynapseAi::builder().library("/nowhere/libSynapse.so") };
/// let error = builder.open().unwrap_err();
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
    without_environment: bool,
}

impl Builder {
    /// Reads no variable of the environment. Settings that the builder lacks have their defaults,
    /// and the dynamic loader finds the library by its name.
    pub fn without_environment(mut self) -> Self {
        self.without_environment = true;
        self
    }

    /// Loads the library at `path` instead of the one that `HMEM_SYNAPSEAI_LIBRARY` names or the
    /// dynamic loader finds.
    ///
    /// # Safety
    /// The file must be Intel's `libSynapse.so` or a replacement of it, such as a fake for tests.
    /// It is sound to load in this process, and its functions have the signatures and the behaviour
    /// that the vendor's header declares.
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let builder = hmem_iface_accelerators::synapseai::SynapseAi::builder().library("/tmp/any.so");
    /// ```
    pub unsafe fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.library = Some(path.as_ref().to_owned());
        self
    }

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
        Synapse::open(self).and_then(Announced::new)
    }
}

impl Open for Synapse {
    type Builder = Builder;

    const LIBRARY_VARIABLE: &'static str = synapse::Functions::LIBRARY_VARIABLE;
    const START_VARIABLE: &'static str = "HMEM_SYNAPSEAI_START_RUNTIME";

    fn open(builder: Builder) -> Result<Self> {
        let may_start = match builder.start_runtime {
            None if builder.without_environment => false,
            decided => Self::may_start(decided)?,
        };
        let (synapse, hlthunk) = match (builder.functions, builder.library) {
            (Some((synapse, hlthunk)), _) => (synapse, hlthunk),
            // SAFETY: the caller of `Builder::library` promises that the file is libSynapse or a
            // replacement of it.
            (None, Some(path)) => (unsafe { synapse::Functions::load(&path) }?, None),
            (None, None) if builder.without_environment => {
                (synapse::Functions::find_by_name()?, None)
            }
            (None, None) => (synapse::Functions::find()?, None),
        };
        let hlthunk = match (hlthunk, builder.hlthunk) {
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
