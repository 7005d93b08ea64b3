//! Contracts of RDMA hardware and of the software NIC; `fi_mr` semantics are implemented once,
//! above them.
//!
//! Core has checked flags, rights, limits and mode rules before it calls a provider. A provider
//! checks what only it knows (its keys, its pages) and answers with typed errors.
//!
//! A [`ProviderDomain`] has six required methods. Everything else that a NIC may be able to do is a
//! facet, a small trait of its own: the domain returns it where it has it, and core answers for the
//! missing ones. [`Features::of`] lists the facets of a domain.

mod attr;
mod facets;

use std::{
    any::Any,
    fmt,
    os::fd::BorrowedFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub use self::{
    attr::{Imports, MsgOrder, Nic, ProgressModel, ProviderAttr, StagingAttr},
    facets::{
        CompositeKeys, Enabling, EndpointBinding, Features, ManualProgress, RawKeys, Refresh,
        RegionCounters, StagingAccess, SubRegions, WindowBind, Windows,
    },
};

use crate::{
    Address, AddressRange, AuthKey, DmaBufOffset, MrMode, Result,
    counter::Counter,
    iface::CopyEvent,
    registry::Registry,
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};
pub use crate::{
    handle::{ProviderRegion, ProviderWindow},
    registration::{KeyRequest, Registration},
    window::{WindowEvent, WindowRule, WindowState, WindowStatus, WindowType},
};

/// A request to open a domain; core has negotiated the mode.
#[derive(Clone, Debug)]
pub struct DomainRequest {
    /// The NIC's name; `None` for the provider's first.
    pub nic: Option<String>,
    /// The mode in force ([`MrMode::effective`]).
    pub mode: MrMode,
    /// The domain's authorization key.
    pub auth_key: AuthKey,
    /// Set if the application asked for the HMEM capability.
    pub hmem: bool,
    /// The ifaces, for transfers that name device addresses without a descriptor.
    pub registry: Arc<Registry>,
    /// The staging buffers that staged regions get.
    pub staging: StagingAttr,
}

/// Memory reached through copies: the software side of a staged path.
///
/// Offsets count from the start of the piece. Calls may come from any thread, several at once.
pub trait StagedMemory: fmt::Debug + Send + Sync {
    /// Fills `into` from the memory.
    ///
    /// # Errors
    /// The error that the copy engine reported.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Writes `from` into the memory.
    ///
    /// # Errors
    /// The error that the copy engine reported.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// Starts filling `len` bytes of host memory from the memory. Where there is no engine to do
    /// it, it is done when this returns ([`FinishedCopy`](crate::iface::FinishedCopy)).
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes and not referenced elsewhere until the event is
    /// done.
    ///
    /// # Errors
    /// The error that the copy engine reported.
    unsafe fn start_read(&self, offset: u64, into: Address, len: u64)
    -> Result<Box<dyn CopyEvent>>;

    /// Starts writing `len` bytes of host memory into the memory.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes and does not change until the event is done.
    ///
    /// # Errors
    /// The error that the copy engine reported.
    unsafe fn start_write(
        &self,
        offset: u64,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>>;
}

/// The access of a provider to one piece of memory.
#[derive(Clone, Debug)]
pub enum Backing<'a> {
    /// Host pages at the range's own addresses.
    Host {
        /// Set if the region owns the pages: they stay mapped until it is closed. Only then may a
        /// software provider touch them with plain loads and stores.
        owned: bool,
    },
    /// A dma-buf (or memfd); the provider takes its own reference if it needs the fd later.
    DmaBuf {
        /// The fd.
        fd: BorrowedFd<'a>,
        /// The offset of the piece in the dma-buf, in bytes.
        offset: DmaBufOffset,
    },
    /// A device address that a peer-memory client resolves.
    PeerMemory {
        /// The address.
        address: Address,
    },
    /// Copies; atomics are refused.
    Staged(Arc<dyn StagedMemory>),
}

/// One range of a registration and how to get at it.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// The addresses by which the application knows it.
    pub range: AddressRange,
    /// The access of the provider to the piece.
    pub backing: Backing<'a>,
}

/// The objects that a provider domain holds, as a leak test reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Registered regions, sub-regions included.
    pub regions: u64,
    /// Registrations of pages: sub-regions add none (SUB-03).
    pub page_registrations: u64,
    /// Bytes pinned or exported for registrations.
    pub bytes: u64,
    /// Windows.
    pub windows: u64,
    /// Mapped raw keys.
    pub mapped_keys: u64,
    /// Endpoints.
    pub endpoints: u64,
    /// Staging buffers that transfers hold.
    pub staging_buffers: u64,
}

/// A family of NICs.
///
/// Implementing this trait is safe: the library trusts only the domains that it opens with memory.
pub trait Provider: fmt::Debug + Send + Sync {
    /// Its name: `loopback`, `verbs`.
    fn name(&self) -> &str;

    /// Its NICs with what each offers and needs.
    ///
    /// # Errors
    /// Unavailable with library and reason.
    fn nics(&self) -> Result<Vec<ProviderAttr>>;

    /// Opens a domain on a NIC.
    ///
    /// # Errors
    /// InvalidArgument for a NIC that it does not have; what the driver reported otherwise.
    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>>;
}

/// An open domain of a provider. Calls may come from any thread, several at once.
///
/// A facet is there from the start and for as long as the domain, or never.
///
/// # Safety
/// Safe code of this library frees memory when a provider says that it is deregistered. So an
/// implementation promises, for itself, for its facets, and for the endpoints and completion queues
/// that it opens:
///
/// - A registration reaches the bytes of its pieces and no others, and writes them only as the
///   region's rights allow. A sub-region or a window reaches bytes of its region only, and grants
///   no write where the region has no right by which the NIC writes.
/// - [`register`](Self::register) leaves nothing registered when it fails or panics.
/// - Once [`deregister`](Self::deregister) has returned `Ok`, nothing touches the memory through
///   the region, its sub-regions or its windows, transfers in flight included. While it returns an
///   error, the region stays registered.
/// - The other safe methods, those of facets included, register nothing, and keep no region from
///   being deregistered for good.
/// - A [`ProviderRegion`] or [`ProviderWindow`] may be of another domain, of an object that is
///   gone, or made up. Such a handle is an error or names a live object of this domain. It never
///   leads to freed memory.
/// - [`ProviderEndpoint::post`] refuses a descriptor of a region that is deregistered, and a
///   segment outside the region of its descriptor.
/// - A completion is reported only when the NIC is done with the local memory of its request.
pub unsafe trait ProviderDomain: Any + fmt::Debug + Send + Sync {
    /// Returns the attributes of the NIC.
    fn attr(&self) -> &ProviderAttr;

    /// Registers pieces as one region.
    ///
    /// # Safety
    /// As [`Domain::regattr`](crate::Domain::regattr): until the region is deregistered the NIC and
    /// peers reach the memory behind the compiler's back. Memory said to be owned
    /// ([`Backing::Host`]) stays mapped until then.
    ///
    /// # Errors
    /// NoKey, KeyRejected, BadAddress, OutOfResources, Unsupported for a backing it cannot import.
    /// Nothing stays registered or pinned.
    unsafe fn register(
        &self,
        registration: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion>;

    /// Deregisters. After it returns, the NIC does not touch the memory, transfers in flight
    /// included, and the keys are dead.
    ///
    /// # Errors
    /// The error that the driver reported. The region is then still registered.
    fn deregister(&self, region: ProviderRegion) -> Result<()>;

    /// Opens a completion queue of at least `depth` entries.
    ///
    /// # Errors
    /// OutOfResources.
    fn open_cq(&self, depth: usize) -> Result<Arc<dyn CompletionQueue>>;

    /// Opens an endpoint.
    ///
    /// # Errors
    /// OutOfResources; InvalidArgument for queues of another provider.
    fn open_endpoint(&self, attr: &EndpointAttr) -> Result<Arc<dyn ProviderEndpoint>>;

    /// Returns the objects that the domain holds now.
    fn live(&self) -> LiveObjects;

    /// Returns parts of regions as regions, if the domain has them.
    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        None
    }

    /// Returns the enabling of disabled regions. Without it, regions are usable at once.
    fn enabling(&self) -> Option<&dyn Enabling> {
        None
    }

    /// Returns the keys that one number does not describe. Without it, every remote key is
    /// [`ProviderRegion::key`] over the region's length.
    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        None
    }

    /// Returns the raw keys, if the domain has them.
    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        None
    }

    /// Returns the refreshing of pages, if regions follow a change of their pages.
    fn refresh(&self) -> Option<&dyn Refresh> {
        None
    }

    /// Returns the memory windows, if the NIC has a type of them.
    fn windows(&self) -> Option<&dyn Windows> {
        None
    }

    /// Returns the counters of regions, if the NIC counts accesses.
    fn region_counters(&self) -> Option<&dyn RegionCounters> {
        None
    }

    /// Returns the binding of regions to endpoints, if the NIC has it.
    fn endpoint_binding(&self) -> Option<&dyn EndpointBinding> {
        None
    }

    /// Returns the staging buffers, if the domain imports staged memory ([`Imports::staged`]).
    fn staging(&self) -> Option<&dyn StagingAccess> {
        None
    }

    /// Returns the execution of work by calls. Without it, nothing waits for calls.
    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        None
    }

    /// Returns advice for a caller who needs a facet that the domain lacks, for the error of core.
    /// `None` takes core's own advice.
    fn remedy_without(&self, _missing: Features) -> Option<&'static str> {
        None
    }
}

/// A request to open an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointAttr {
    /// The queue for completions of transmits.
    pub tx_cq: Arc<dyn CompletionQueue>,
    /// The queue for completions of receives.
    pub rx_cq: Arc<dyn CompletionQueue>,
    /// Created with the RMA_EVENT capability: regions with counters can be reached through it
    /// (EVT-02).
    pub rma_event: bool,
    /// Its authorization key; `None` for the domain's.
    pub auth_key: Option<AuthKey>,
    /// Counts completed transmits, where given.
    pub tx_counter: Option<Arc<Counter>>,
    /// Counts completed receives, where given.
    pub rx_counter: Option<Arc<Counter>>,
    /// Requests that can be outstanding in each direction.
    pub depth: usize,
}

impl EndpointAttr {
    /// An endpoint with `cq` for both directions, 128 requests deep, and nothing else asked for.
    #[must_use]
    pub fn new(cq: &Arc<dyn CompletionQueue>) -> Self {
        Self {
            tx_cq: Arc::clone(cq),
            rx_cq: Arc::clone(cq),
            rma_event: false,
            auth_key: None,
            tx_counter: None,
            rx_counter: None,
            depth: 128,
        }
    }
}

/// A queue of completions.
///
/// Implementing this trait is safe: a [`ProviderDomain`] vouches for the queues that it opens, and
/// takes no others.
pub trait CompletionQueue: Any + fmt::Debug + Send + Sync {
    /// Moves up to `max` completions to the end of `out`, after making progress where that is by
    /// hand, and returns how many.
    ///
    /// # Errors
    /// A dead device, or an overrun queue.
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize>;

    /// Reads completions as [`read`](Self::read) does, and waits up to `timeout` for the first one.
    /// Returns 0 once the time is over, or at once if `max` is 0.
    ///
    /// A timeout of zero does not wait. [`Duration::MAX`] waits without end. Several threads may
    /// wait for one queue: each completion goes to one of them, and a thread sleeps only while the
    /// queue is empty.
    ///
    /// A wait also makes the progress that needs calls ([`ManualProgress`]). It then sleeps for a
    /// millisecond at a time, so that it also executes what other threads post meanwhile. The
    /// default implementation does so for every queue; it does not notice that the domain is
    /// closed.
    ///
    /// ```
    /// use std::time::Duration;
    /// use hmem_core::{Result, provider::CompletionQueue};
    ///
    /// fn next_batch(queue: &dyn CompletionQueue) -> Result<()> {
    ///     let mut done = Vec::new();
    ///     match queue.wait(&mut done, 16, Duration::from_secs(1))? {
    ///         0 => println!("nothing completed within a second"),
    ///         count => println!("{count} requests ended, the first is {}", done[0].context),
    ///     }
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// As [`read`](Self::read). BadState once the queue is empty and its domain is closed, for
    /// waits under way too: nothing completes to the queue any more.
    fn wait(&self, out: &mut Vec<Completion>, max: usize, timeout: Duration) -> Result<usize> {
        let deadline = Instant::now().checked_add(timeout);
        let mut pause = Duration::from_micros(10);
        loop {
            let count = self.read(out, max)?;
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if count > 0 || max == 0 || left.is_zero() {
                return Ok(count);
            }
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(MANUAL_WAIT);
        }
    }

    /// Returns the file descriptor by which an event loop waits for the queue, if it has one.
    fn channel(&self) -> Option<&dyn CompletionChannel> {
        None
    }
}

/// The longest sleep of a wait that makes the progress itself.
pub const MANUAL_WAIT: Duration = Duration::from_millis(1);

/// The file descriptor of a completion queue, for `poll`, `epoll` and asynchronous runtimes.
///
/// The order of the steps is what keeps a wakeup from being lost:
///
/// 1. [`read`](CompletionQueue::read) the queue until it returns 0.
/// 2. [`arm`](Self::arm) the channel. If it returns false, go to step 1.
/// 3. Sleep until the fd is readable, and go to step 1.
///
/// A completion that comes between step 1 and step 2 makes `arm` return false. One that comes after
/// step 2 makes the fd readable. An edge-triggered event loop forgets the readiness of the fd
/// before step 1, not after it. The example `async_completions` does this with tokio.
///
/// Only `arm` makes the fd unreadable again. Do not read the fd. One task at a time goes through
/// these steps. Other threads may read the queue meanwhile, and do not [`wait`] for it.
///
/// [`wait`]: CompletionQueue::wait
pub trait CompletionChannel {
    /// Returns the file descriptor. It stays the same, and is open for as long as the queue.
    ///
    /// # Errors
    /// OutOfResources if the process has no room for another file descriptor.
    fn fd(&self) -> Result<BorrowedFd<'_>>;

    /// Prepares for a sleep: makes the fd unreadable until the next completion, and returns true.
    ///
    /// Returns false if the caller must not sleep: the queue has completions, or transfers are
    /// under way that only calls move on (staged ones, on a NIC).
    ///
    /// # Errors
    /// A dead device, or an overrun queue. BadState once the queue is empty and its domain is
    /// closed, which makes the fd readable too.
    fn arm(&self) -> Result<bool>;
}

/// An endpoint of a provider domain.
///
/// Implementing this trait is safe: a [`ProviderDomain`] vouches for the endpoints that it opens,
/// and takes no others.
pub trait ProviderEndpoint: Any + fmt::Debug + Send + Sync {
    /// The name by which a peer finds it.
    fn name(&self) -> EndpointName;

    /// Finds (and, for connected transports, connects) the peer of a name.
    ///
    /// # Errors
    /// Unreachable if nobody answers to it; Malformed for bytes that are no name of this provider.
    fn resolve(&self, name: &EndpointName) -> Result<PeerId>;

    /// Posts a work request. Its segment lists are copied; the memory they name is used until
    /// completion.
    ///
    /// # Safety
    /// Local memory named without a descriptor stays valid until the completion.
    ///
    /// # Errors
    /// Again if the queue is full; NoRegion for a descriptor that is missing or foreign; BadAccess.
    /// Errors that only the target can detect come back as a failed completion.
    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()>;

    /// Closes it: outstanding requests complete as canceled.
    ///
    /// # Errors
    /// Busy if a type 2A window is bound to it. A region that is bound to it (ENDPOINT mode) does
    /// not keep it open: no peer reaches the region any more, and the region can still be closed.
    fn close(&self) -> Result<()>;
}
