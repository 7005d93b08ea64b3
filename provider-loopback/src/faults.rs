//! Fault injection: the calls of the NIC that a test can make fail, or wait in flight.

use hmem_core::{
    Errno, Error, named_enum,
    testing::{self, CallKind},
};

named_enum! {
    /// A kind of call that a test can make fail or wait.
    #[non_exhaustive]
    pub enum NicCall {
        /// A call of `Provider::open_domain`.
        OpenDomain = "open domain",
        /// A call of `ProviderDomain::register`. [`Faults::hold`] stops the call after the pages
        /// were prepared and before the key of the region is valid.
        Register = "register",
        /// A call of `SubRegions::register_sub`.
        RegisterSub = "register sub-region",
        /// A call of `ProviderDomain::deregister`. [`Faults::hold`] stops the call before it
        /// changes anything.
        Deregister = "deregister",
        /// A step of a deregistration. If the endpoint of a bound window was closed, transfers
        /// through the window may still be in flight. The deregistration of the window's region
        /// waits for them in this step.
        EndBinding = "end window binding",
        /// A call of `Enabling::enable`.
        Enable = "enable",
        /// A call of `RegionCounters::bind_counter`.
        BindCounter = "bind counter",
        /// A call of `EndpointBinding::bind_endpoint`.
        BindEndpoint = "bind endpoint",
        /// A call of `Refresh::refresh_pages`. While [`Faults::hold`] stops the call, transfers
        /// through the region fail.
        Refresh = "refresh",
        /// A call of `RawKeys::raw_key`.
        RawKey = "raw key",
        /// A call of `RawKeys::map_raw`.
        MapRaw = "map raw key",
        /// A call of `RawKeys::unmap_key`.
        UnmapKey = "unmap key",
        /// A call of `Windows::alloc_window`.
        AllocWindow = "allocate window",
        /// A call of `Windows::bind_window`, `bind_window_now` or `invalidate_window_now`. A bind
        /// or invalidation that was posted as a request does not count when it executes.
        BindWindow = "bind window",
        /// A call of `Windows::free_window`.
        FreeWindow = "free window",
        /// A call of `Transport::open_cq`.
        OpenCq = "open completion queue",
        /// A call of `Transport::open_endpoint`.
        OpenEndpoint = "open endpoint",
        /// A call of `ManualProgress::progress`.
        Progress = "progress",
        /// A call of `CompletionQueue::read` or `CompletionQueue::wait`.
        ReadCq = "read completions",
        /// A call of `ProviderEndpoint::resolve`.
        Resolve = "resolve",
        /// A call of `ProviderEndpoint::post`. A call on a closed endpoint does not count.
        Post = "post",
        /// A call of `ProviderEndpoint::close`.
        CloseEndpoint = "close endpoint",
        /// The execution of a write, read, atomic or send. [`Faults::hold`] stops the request after
        /// the checks of its keys and descriptors, and before it changes any memory. An injected
        /// error becomes the result of the request.
        Transfer = "transfer",
        /// The execution of a write or read of imported memory: a dma-buf or a device address. It
        /// comes after [`NicCall::Transfer`]. An injected error becomes the result of the request.
        /// So a test can simulate a device that accepts registrations but that the NIC does not
        /// reach.
        ImportedTransfer = "transfer of imported memory",
        /// The NIC's copy of one chunk of a staged transfer. [`Faults::hold`] stops the NIC before
        /// it copies the chunk. An injected error ends the transfer.
        Chunk = "staged chunk",
    }
}

impl CallKind for NicCall {
    const COUNT: usize = Self::ALL.len();

    fn index(self) -> usize {
        self as usize
    }

    fn is_always_counted(self) -> bool {
        false
    }

    fn failure(self, errno: Errno, _number: u64) -> Error {
        Error::os(errno, self.name())
            .provider("loopback")
            .remedy("a test injected this failure through Faults")
    }
}

/// The faults that a test injects into a fabric: calls that fail, and calls that wait at a gate.
/// Clones share the faults.
///
/// ```
/// use hmem_core::Errno;
/// use hmem_provider_loopback::{Faults, Loopback, NicCall};
///
/// let faults = Faults::new();
/// let provider = Loopback::builder().faults(&faults).build()?;
/// faults.fail_nth(NicCall::Register, 2, Errno(12)); // the registration after the next one
/// # Ok::<(), hmem_core::Error>(())
/// ```
pub type Faults = testing::Faults<NicCall>;
