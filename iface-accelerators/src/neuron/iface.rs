//! The iface type, and the builder that opens it.

#![allow(unsafe_code, reason = "loads the library")]

use std::path::{Path, PathBuf};

use hmem_core::{Error, ErrorKind, IfaceKind, Result};
use hmem_iface_kit::announced::{Announced, Open};

use super::{
    driver::{Runtime, visible_cores},
    error::coded,
    sys::Functions,
};

/// The iface for AWS Neuron memory, over `libnrt.so.1`. Each visible NeuronCore is a device.
///
/// # Examples
/// ```
/// use hmem_core::{Address, Iface};
/// use hmem_iface_accelerators::neuron::Neuron;
///
/// if let Ok(neuron) = Neuron::open() {
///     let on_the_stack = 0u8;
///     assert_eq!(neuron.query(Address::of_ptr(&on_the_stack))?, None);
/// }
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub type Neuron = Announced<Runtime>;

/// Builder of [`Neuron`], which can load another library or use functions that the caller provides.
///
/// # Examples
/// ```
/// use hmem_core::ErrorKind;
/// use hmem_iface_accelerators::neuron::Neuron;
///
/// // SAFETY: there is no such file.
/// let builder = unsafe { Neuron::builder().library("/nowhere/libnrt.so.1") };
/// let error = builder.open().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Unavailable);
/// assert_eq!(error.context_value("library"), Some("/nowhere/libnrt.so.1"));
/// ```
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until it opens"]
pub struct Builder {
    library: Option<PathBuf>,
    functions: Option<Functions>,
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

    /// Loads the library at `path` instead of the one that `HMEM_NEURON_LIBRARY` names or the
    /// dynamic loader finds.
    ///
    /// # Safety
    /// The file must be AWS's runtime library or a replacement of it, such as a fake for tests.
    /// It is sound to load in this process, and its functions have the signatures and the behaviour
    /// that the vendor's header declares.
    ///
    /// # Examples
    /// Safe code cannot load another library:
    /// ```compile_fail,E0133
    /// let builder = hmem_iface_accelerators::neuron::Neuron::builder().library("/tmp/any.so");
    /// ```
    pub unsafe fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.library = Some(path.as_ref().to_owned());
        self
    }

    /// Uses these functions instead of loading a library.
    pub fn functions(mut self, functions: Functions) -> Self {
        self.functions = Some(functions);
        self
    }

    /// Permits the iface to call `nrt_init` at the first allocation, if the application has not
    /// called it. Overrides `HMEM_NEURON_START_RUNTIME`. The default is false.
    ///
    /// The runtime reserves the visible NeuronCores until this process ends.
    pub fn start_runtime(mut self, start: bool) -> Self {
        self.start_runtime = Some(start);
        self
    }

    /// Loads the library and counts the NeuronCores. Does not start the runtime.
    ///
    /// # Errors
    /// - [`ErrorKind::InvalidArgument`] if `HMEM_NEURON_START_RUNTIME` is not a boolean, unless the
    ///   builder decides.
    /// - [`ErrorKind::Unavailable`] if the library, a required symbol or a NeuronCore is absent.
    ///   The error names the library, and the runtime's code if there is one.
    pub fn open(self) -> Result<Neuron> {
        Runtime::open(self).and_then(Announced::new)
    }
}

impl Open for Runtime {
    type Builder = Builder;

    const LIBRARY_VARIABLE: &'static str = Functions::LIBRARY_VARIABLE;
    const START_VARIABLE: &'static str = "HMEM_NEURON_START_RUNTIME";

    fn open(builder: Builder) -> Result<Self> {
        let may_start = match builder.start_runtime {
            None if builder.without_environment => false,
            decided => Self::may_start(decided)?,
        };
        let functions = match (builder.functions, builder.library) {
            (Some(functions), _) => functions,
            // SAFETY: the caller of `Builder::library` promises that the file is the library or a
            // replacement of it.
            (None, Some(path)) => unsafe { Functions::load(&path) }?,
            (None, None) if builder.without_environment => Functions::find_by_name()?,
            (None, None) => Functions::find()?,
        };
        let unavailable = || {
            Error::new(ErrorKind::Unavailable, "nrt_get_visible_nc_count")
                .iface(IfaceKind::NEURON)
                .context("library", functions.library())
                .remedy("no NeuronCore is visible: see `neuron-ls` and NEURON_RT_VISIBLE_CORES")
        };
        match visible_cores(&functions) {
            Ok(0) => Err(unavailable().context("devices", 0)),
            Ok(cores) => {
                tracing::debug!(library = functions.library(), cores, "Neuron opened");
                Ok(Self::new(functions, cores, may_start))
            }
            Err(code) => Err(coded(unavailable(), code)),
        }
    }
}
