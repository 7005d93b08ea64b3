//! What RDMA hardware (or the software NIC) does; `fi_mr` semantics are implemented once, above it.
//!
//! Core has checked flags, rights, limits and mode rules before it calls a provider; a provider
//! checks what only it knows (its keys, its pages) and answers with typed errors.

use std::{any::Any, fmt, os::fd::BorrowedFd, sync::Arc};

use crate::{
    Access, Address, AddressRange, Addressing, AuthKey, DmaBufOffset, Iova, LocalKey, MrFlags,
    MrMode, Parallel, RawKey, RemoteKey, Result,
    counter::Counter,
    iface::CopyEvent,
    registry::Registry,
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};

/// A NIC of a provider.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nic {
    /// The provider's name.
    pub provider: String,
    /// The device name, such as `mlx5_0`; unique within the provider.
    pub name: String,
    /// PCI bus id as `domain:bus:device.function`, for hardware.
    pub pci_bus_id: Option<String>,
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.provider, self.name)
    }
}

/// What a NIC can import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imports {
    /// Registers dma-buf fds.
    pub dma_buf: bool,
    /// Wants the PCIe mapping of a dma-buf tried first.
    pub pcie_mapping_first: bool,
    /// Takes device addresses, for peer-memory clients to resolve. Whether one answers for a
    /// device, a registration tells.
    pub peer_memory: bool,
    /// Reaches memory through staged copies.
    pub staged: bool,
}

/// The types of memory windows (InfiniBand 10.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Bound by a call; the provider turns the key.
    One,
    /// Bound by a posted request, tied to a queue pair.
    TwoA,
    /// Bound by a posted request, tied to queue pair and protection domain.
    TwoB,
}

/// What a NIC offers and needs; fixed while a domain is open on it.
#[derive(Clone, Debug)]
pub struct ProviderAttr {
    /// Which NIC.
    pub nic: Nic,
    /// The mr_mode bits that it cannot do without.
    pub needs: MrMode,
    /// The mr_mode bits that it can run in when they are forced on it (by BASIC).
    pub can: MrMode,
    /// Bytes of a key: 4 or 8.
    pub key_size: usize,
    /// Bytes of a raw key.
    pub raw_key_size: usize,
    /// Ranges in one region, at least 1.
    pub mr_iov_limit: usize,
    /// Bytes in one region.
    pub max_mr_size: u64,
    /// Regions at once.
    pub max_mr_count: u64,
    /// Page sizes that registrations may ask for, in bytes, ascending.
    pub page_sizes: Vec<usize>,
    /// What it imports.
    pub imports: Imports,
    /// The rights that a staged region may have: the local ones where staged memory takes this
    /// side's help to reach, all where the NIC copies for peers too.
    pub staged_access: Access,
    /// The registration flags that it honours.
    pub flags: MrFlags,
    /// The window types that it has.
    pub windows: Vec<WindowType>,
    /// Whether counters can be bound to regions.
    pub region_counters: bool,
}

/// A request to open a domain; core has negotiated the mode.
#[derive(Clone, Debug)]
pub struct DomainRequest {
    /// The NIC's name; `None` for the provider's first.
    pub nic: Option<String>,
    /// The mode in force ([`MrMode::effective`]).
    pub mode: MrMode,
    /// The domain's authorization key.
    pub auth_key: AuthKey,
    /// Whether the application asked for the HMEM capability.
    pub hmem: bool,
    /// The ifaces, for transfers that name device addresses without a descriptor.
    pub registry: Arc<Registry>,
    /// The staging buffers that staged regions get.
    pub staging: StagingAttr,
}

/// Which key a region should get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRequest {
    /// This one (`requested_key`).
    Application(u64),
    /// Whatever the provider picks.
    Provider,
}

/// What to register, apart from where it lies.
#[derive(Clone, Copy, Debug)]
pub struct RegistrationRequest<'a> {
    /// Rights of local and remote accesses.
    pub access: Access,
    /// Flags; only those in [`ProviderAttr::flags`].
    pub flags: MrFlags,
    /// The key.
    pub key: KeyRequest,
    /// Who may reach it; already replaced by the domain's if none was given.
    pub auth_key: &'a AuthKey,
    /// How peers address it.
    pub addressing: Addressing,
    /// The page size to use, in bytes; 0 leaves it to the provider.
    pub page_size: usize,
    /// Whether it can be used at once; otherwise [`ProviderDomain::enable`] follows.
    pub enabled: bool,
    /// Whether host memory may be registered in parts, several at once. A provider that has no use
    /// for it reports all of the range as done once it is.
    pub parallel: Option<&'a Parallel<'a>>,
}

/// The staging buffers of a domain: host memory that the NIC reaches, through which device memory
/// is copied that it does not.
///
/// They are allocated and registered once, when the domain's first staged region is, and never
/// grow: a transfer that finds them all in use waits.
///
/// The default, 8 buffers of 512 KiB, is half of the 8 MiB that an unprivileged process may lock on
/// many systems. A buffer is long enough that the time to start a copy is small beside the copy,
/// and 3 in flight keep copy engine and wire busy at the same time; the others serve further
/// transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingAttr {
    /// Bytes of a buffer, at least 1: the longest chunk. A message is cut into chunks of a
    /// sixteenth of it, of 128 KiB at least and shorter at its ends, as far as a buffer holds
    /// that.
    pub chunk: usize,
    /// How many buffers, at least 1. Where a NIC needs a message whole, as verbs does, half of
    /// them serve receives and a quarter sends, so that transfers which wait for a peer never
    /// keep the others from going on.
    pub slots: usize,
}

impl Default for StagingAttr {
    fn default() -> Self {
        Self { chunk: 512 << 10, slots: 8 }
    }
}

impl StagingAttr {
    /// Checks the numbers.
    ///
    /// # Errors
    /// InvalidArgument if one is 0, or both together pass the address space.
    pub fn check(&self) -> Result<()> {
        let bytes = self
            .chunk
            .checked_mul(self.slots)
            .filter(|bytes| *bytes > 0 && *bytes <= isize::MAX as usize / 2);
        bytes.map(|_| ()).ok_or_else(|| {
            crate::Error::new(crate::ErrorKind::InvalidArgument, "open domain")
                .context("staging chunk", self.chunk)
                .context("staging slots", self.slots)
                .remedy("staging takes at least one buffer of at least one byte")
        })
    }
}

/// Memory reached through copies: the software side of a staged path.
///
/// Offsets count from the start of the piece. Calls may come from any thread, several at once.
pub trait StagedMemory: fmt::Debug + Send + Sync {
    /// Fills `into` from the memory.
    ///
    /// # Errors
    /// What the copy engine reported.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<()>;

    /// Writes `from` into the memory.
    ///
    /// # Errors
    /// What the copy engine reported.
    fn write(&self, offset: u64, from: &[u8]) -> Result<()>;

    /// Starts filling `len` bytes of host memory from the memory. Where there is no engine to do
    /// it, it is done when this returns ([`FinishedCopy`](crate::iface::FinishedCopy)).
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes and not referenced elsewhere until the event is
    /// done.
    ///
    /// # Errors
    /// What the copy engine reported.
    unsafe fn start_read(&self, offset: u64, into: Address, len: u64)
    -> Result<Box<dyn CopyEvent>>;

    /// Starts writing `len` bytes of host memory into the memory.
    ///
    /// # Safety
    /// `from` is valid for reads of `len` bytes and does not change until the event is done.
    ///
    /// # Errors
    /// What the copy engine reported.
    unsafe fn start_write(
        &self,
        offset: u64,
        from: Address,
        len: u64,
    ) -> Result<Box<dyn CopyEvent>>;
}

/// How a provider gets at one piece of memory.
#[derive(Clone, Debug)]
pub enum Backing<'a> {
    /// Host pages at the range's own addresses.
    Host {
        /// Whether the region owns them: they stay mapped until it is closed. Only then may a
        /// software provider touch them with plain loads and stores.
        owned: bool,
    },
    /// A dma-buf (or memfd); the provider takes its own reference if it needs the fd later.
    DmaBuf {
        /// The fd.
        fd: BorrowedFd<'a>,
        /// Where in it the piece starts, in bytes.
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
    /// How the provider gets at it.
    pub backing: Backing<'a>,
}

/// A provider's handle of a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderRegion {
    /// The provider's own reference.
    pub token: u64,
    /// The local descriptor.
    pub local: LocalKey,
    /// The remote key as a number.
    pub key: u64,
}

/// A provider's handle of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProviderWindow {
    /// The provider's own reference.
    pub token: u64,
    /// The window's current key.
    pub key: u64,
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
pub struct WindowBind {
    /// The region.
    pub region: ProviderRegion,
    /// First byte, counted from the start of the region.
    pub offset: u64,
    /// Bytes; 0 unbinds a type 1 window.
    pub len: u64,
    /// Remote rights.
    pub access: Access,
    /// How peers address it.
    pub addressing: Addressing,
}

/// How many objects a provider domain holds: what a leak test reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
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
    pub staging_slots: u64,
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
/// # Safety
/// Safe code of this library frees memory when a provider says that it is deregistered. So an
/// implementation promises, for itself and for the endpoints and completion queues that it opens:
///
/// - A registration reaches the bytes of its pieces and no others, and writes them only as the
///   region's rights allow. A sub-region or a window reaches bytes of its region only, and grants no
///   write where the region has no right by which the NIC writes.
/// - [`register`](Self::register) leaves nothing registered when it fails or panics.
/// - Once [`deregister`](Self::deregister) has returned `Ok`, nothing touches the memory through the
///   region, its sub-regions or its windows, transfers in flight included. While it returns an
///   error, the region stays registered.
/// - The other safe methods register nothing, and keep no region from being deregistered for good.
/// - A [`ProviderRegion`] or [`ProviderWindow`] may be of another domain, of an object that is
///   gone, or made up. Such a handle is an error or names a live object of this domain. It never
///   leads to freed memory.
/// - [`ProviderEndpoint::post`] refuses a descriptor of a region that is deregistered, and a segment
///   outside the region of its descriptor.
/// - A completion is reported only when the NIC is done with the local memory of its request.
pub unsafe trait ProviderDomain: fmt::Debug + Send + Sync {
    /// What the NIC offers and needs.
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
        request: &RegistrationRequest<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion>;

    /// Registers `len` bytes from `offset` of `base` with its own key and rights, without touching
    /// pages.
    ///
    /// This call is safe, because it grants nothing beyond `base`: the caller promised the bytes
    /// and the rights of `base` to [`ProviderDomain::register`].
    ///
    /// # Errors
    /// OutOfBounds outside `base`; ZeroLength; AccessDenied for rights that let the NIC write where
    /// those of `base` do not. Otherwise as [`ProviderDomain::register`].
    fn register_sub(
        &self,
        base: ProviderRegion,
        request: &RegistrationRequest<'_>,
        offset: u64,
        len: u64,
    ) -> Result<ProviderRegion>;

    /// Deregisters. After it returns, the NIC does not touch the memory, transfers in flight
    /// included, and the keys are dead.
    ///
    /// # Errors
    /// What the driver reported; the region is then still registered.
    fn deregister(&self, region: ProviderRegion) -> Result<()>;

    /// Makes a region usable that was registered disabled.
    ///
    /// # Errors
    /// What the driver reported.
    fn enable(&self, region: ProviderRegion) -> Result<()>;

    /// Counts remote writes and atomics of the region in `counter` too; a region may have several
    /// counters, each bound once.
    ///
    /// # Errors
    /// NoSys where the hardware cannot.
    fn bind_counter(&self, region: ProviderRegion, counter: &Arc<Counter>) -> Result<()>;

    /// Makes the region reachable through `endpoint` only.
    ///
    /// # Errors
    /// InvalidArgument for an endpoint of another domain; NoSys where the hardware cannot.
    fn bind_endpoint(&self, region: ProviderRegion, endpoint: &dyn ProviderEndpoint) -> Result<()>;

    /// Looks at the pages again: of `ranges` (addresses inside the region), or of all of it if
    /// there are none. Peers' accesses fail while it runs.
    ///
    /// # Errors
    /// BadAddress if pages are missing; what was promised before for other pages stays.
    fn refresh(&self, region: ProviderRegion, ranges: &[AddressRange]) -> Result<()>;

    /// The raw key of a region.
    ///
    /// # Errors
    /// What the driver reported.
    fn raw_key(&self, region: ProviderRegion) -> Result<RawKey>;

    /// The remote key of a region that takes more than one number (VRB-07), or that peers address
    /// otherwise than the domain's other regions; `None` for all others, whose key is
    /// [`ProviderRegion::key`] over their length.
    ///
    /// # Errors
    /// KeyNotAvailable for a region that no peer can reach: a staged one, where the NIC does not
    /// reach staged memory.
    fn remote_key(&self, region: ProviderRegion) -> Result<Option<RemoteKey>>;

    /// Makes a peer's raw key usable in transfers of this domain.
    ///
    /// # Errors
    /// Malformed for bytes that are no raw key; OutOfResources.
    fn map_raw(
        &self,
        base: Iova,
        len: u64,
        addressing: Addressing,
        raw: &RawKey,
    ) -> Result<RemoteKey>;

    /// Frees a mapped key.
    ///
    /// # Errors
    /// InvalidKey for a key that this domain did not map.
    fn unmap_key(&self, key: &RemoteKey) -> Result<()>;

    /// Allocates an unbound window.
    ///
    /// # Errors
    /// Unsupported for a type that the NIC lacks; OutOfResources.
    fn alloc_window(&self, window: WindowType) -> Result<ProviderWindow>;

    /// Binds a type 1 window, or unbinds it with length 0; the handle comes back with its new key.
    ///
    /// # Errors
    /// BadState for a type 2 window, which is bound by [`crate::transfer::Operation::BindWindow`];
    /// OutOfBounds.
    fn bind_window(&self, window: ProviderWindow, bind: &WindowBind) -> Result<ProviderWindow>;

    /// Frees a window; its key is dead.
    ///
    /// # Errors
    /// What the driver reported.
    fn free_window(&self, window: ProviderWindow) -> Result<()>;

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

    /// Executes what was posted, where progress is by hand; returns how many requests it ended.
    /// Providers that progress by themselves return 0.
    ///
    /// # Errors
    /// A dead device.
    fn progress(&self) -> Result<usize>;

    /// What the domain holds now.
    fn live(&self) -> Live;

    /// Bytes of its staging buffers: 0 before the first staged region, the same ever after.
    fn staging_bytes(&self) -> u64;

    /// For providers: back to their own type, for what only they have.
    fn as_any(&self) -> &dyn Any;
}

/// A request to open an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointAttr {
    /// Where completions of transmits go.
    pub tx_cq: Arc<dyn CompletionQueue>,
    /// Where completions of receives go.
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
pub trait CompletionQueue: fmt::Debug + Send + Sync {
    /// Moves up to `max` completions to the end of `out`, after making progress where that is by
    /// hand, and returns how many.
    ///
    /// # Errors
    /// A dead device, or an overrun queue.
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize>;

    /// For providers: back to their own type.
    fn as_any(&self) -> &dyn Any;
}

/// An endpoint of a provider domain.
///
/// Implementing this trait is safe: a [`ProviderDomain`] vouches for the endpoints that it opens,
/// and takes no others.
pub trait ProviderEndpoint: fmt::Debug + Send + Sync {
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
    /// What only the target can know comes back as a failed completion.
    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()>;

    /// Closes it: outstanding requests complete as canceled.
    ///
    /// # Errors
    /// Busy if a type 2A window is bound to it. A region that is bound to it (ENDPOINT mode) does
    /// not keep it open: no peer reaches the region any more, and the region can still be closed.
    fn close(&self) -> Result<()>;

    /// For providers: back to their own type.
    fn as_any(&self) -> &dyn Any;
}
