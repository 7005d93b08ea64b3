//! The iface type, and the builder that opens it.

use hmem_core::Result;
use hmem_iface_kit::announced::{Announced, Open};

use super::{
    driver::{Runtime, visible_cores},
    error::{NEURON, coded},
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

hmem_iface_kit::builder! {
    /// Builder of [`Neuron`], which can load another library or use functions that the caller
    /// provides.
    pub struct Builder {
        /// True if the iface may call `nrt_init`. `None` unless `start_runtime` was called.
        start_runtime: Option<bool>,
    }
    functions: Functions,
    iface: "hmem_iface_accelerators::neuron::Neuron",
    library: ("AWS's runtime library", "libnrt.so.1", "HMEM_NEURON_LIBRARY"),
}

impl Builder {
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
    /// - InvalidArgument if `HMEM_NEURON_START_RUNTIME` is not a boolean, unless
    ///   [`start_runtime`](Self::start_runtime) was called.
    /// - Unavailable if the library, a required symbol or a NeuronCore is absent.
    ///   The error names the library, and the runtime's code if there is one.
    pub fn open(self) -> Result<Neuron> {
        Runtime::open(self).and_then(Announced::new)
    }
}

impl Open for Runtime {
    type Builder = Builder;

    const LIBRARY_VARIABLE: &'static str = Functions::LIBRARY_VARIABLE;
    const START_VARIABLE: &'static str = "HMEM_NEURON_START_RUNTIME";

    fn open(mut builder: Builder) -> Result<Self> {
        let may_start = Self::may_start(builder.start_runtime, builder.without_environment)?;
        let functions = builder.load()?;
        let unavailable = || {
            NEURON
                .unavailable("nrt_get_visible_nc_count", functions.library())
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
