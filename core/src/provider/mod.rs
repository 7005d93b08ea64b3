//! The traits that a provider implements, for RDMA hardware or for a software NIC.
//!
//! The core implements the semantics of `fi_mr(3)` above these traits. The core checks flags,
//! rights, limits and mode rules before it calls a provider. A provider checks the conditions that
//! depend on its own state (its keys, its pages) and returns typed errors.
//!
//! A [`ProviderDomain`] has four required methods, with which it registers memory. Each optional
//! ability of a NIC is a facet: a small trait, which the domain returns if it has the ability.
//! [`Transport`], for example, is the facet for completion queues and endpoints. If an application
//! calls a function whose facet is missing, the core returns an error of the kind
//! [`Unsupported`](crate::ErrorKind::Unsupported). [`Features::of`] lists the facets of a domain.

mod attr;
mod facets;
mod nic_life;
mod revocations;

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
        RegionCounters, StagingAccess, SubRegions, Transport, Windows,
    },
    nic_life::{NicEvent, NicLife, NicRecord, NicState},
    revocations::{RevocationListeners, Revocations, revoked},
};

use crate::{
    Address, AddressRange, Addressing, AuthKey, DmaBufOffset, Iface, Iova, MrMode, RemoteKey,
    Result,
    counter::Counter,
    dma_buf::DmaBufMapping,
    iface::Revocation,
    registry::Registry,
    transfer::{Completion, EndpointName, PeerId, WorkRequest},
};
pub use crate::{
    handle::{ProviderRegion, ProviderWindow},
    registration::{KeyRequest, Registration},
    window::{WindowBind, WindowEvent, WindowRule, WindowState, WindowStatus, WindowType},
};

/// A request to open a provider's domain. The core has negotiated the mode.
#[derive(Clone, Debug)]
pub struct DomainRequest {
    /// The NIC's name. `None` means the provider's first NIC.
    pub nic: Option<String>,
    /// The negotiated mode, without BASIC and SCALABLE ([`MrMode::effective`]).
    pub mode: MrMode,
    /// The domain's authorization key.
    pub auth_key: AuthKey,
    /// True if the application uses device memory (`FI_HMEM`).
    pub hmem: bool,
    /// The ifaces of the domain. The provider uses them for local segments that have a device
    /// address and no descriptor.
    pub registry: Arc<Registry>,
    /// The size and number of the domain's staging buffers.
    pub staging: StagingAttr,
}

/// The means by which a provider accesses one [`Piece`] of memory.
#[derive(Clone, Debug)]
pub enum Backing<'a> {
    /// Host memory. The provider reaches it by the addresses of the range.
    Host {
        /// True if the pages are guaranteed to stay mapped until the region is closed. Only then
        /// may a software provider access them with plain loads and stores.
        owned: bool,
    },
    /// A dma-buf or memfd. A provider that needs the fd after the registration must duplicate it.
    DmaBuf {
        /// The file descriptor of the dma-buf.
        fd: BorrowedFd<'a>,
        /// The offset of the piece in the dma-buf, in bytes.
        offset: DmaBufOffset,
        /// The dma-buf mapping. A provider must use the Data Direct function of its NIC for
        /// [`DmaBufMapping::DataDirect`], which is passed only if the NIC has
        /// [`Imports::data_direct`]. A provider ignores the other mappings, because the export has
        /// already determined them.
        mapping: DmaBufMapping,
        /// The means by which an exporter in this process revokes the dma-buf. A software provider
        /// attaches to it, and ends all accesses once it is revoked. A provider over a kernel
        /// driver ignores it: such a driver learns of revocations from the kernel only.
        revocation: Option<&'a Revocation>,
    },
    /// A device address that a peer-memory client resolves.
    PeerMemory {
        /// The iface of the memory.
        iface: &'a Arc<dyn Iface>,
        /// The device address.
        address: Address,
    },
    /// Memory of an iface at the addresses of the range. The provider copies it through staging
    /// buffers by the iface's copy engine, and refuses atomics on it.
    Staged {
        /// The iface of the memory.
        iface: &'a Arc<dyn Iface>,
    },
}

/// One range of a registration, with the means to access it.
#[derive(Clone, Debug)]
pub struct Piece<'a> {
    /// The application's addresses of the memory.
    pub range: AddressRange,
    /// The means by which the provider accesses the piece.
    pub backing: Backing<'a>,
}

/// The number of live objects of each kind that a provider's domain has, for leak tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveObjects {
    /// The number of registered regions, including sub-regions.
    pub regions: u64,
    /// The number of registrations that pin pages. Sub-regions pin none, and are not counted.
    pub page_registrations: u64,
    /// The number of bytes that are pinned or exported for registrations.
    pub bytes: u64,
    /// The number of allocated memory windows.
    pub windows: u64,
    /// The number of mapped raw keys.
    pub mapped_keys: u64,
    /// The number of open endpoints.
    pub endpoints: u64,
    /// The number of staging buffers that transfers are using.
    pub staging_buffers: u64,
}

/// A family of NICs with a common driver.
///
/// This trait is safe to implement. Only domains access memory, and their trait [`ProviderDomain`]
/// is unsafe.
pub trait Provider: fmt::Debug + Send + Sync {
    /// Returns the provider's name, for example `loopback` or `verbs`.
    fn name(&self) -> &str;

    /// Returns the attributes of all NICs.
    ///
    /// # Errors
    /// - Unavailable if the driver's library cannot be used. The error names the library and the
    ///   reason.
    /// - The driver's error, if no NIC can be opened.
    fn nics(&self) -> Result<Vec<ProviderAttr>>;

    /// Opens a domain on a NIC.
    ///
    /// # Errors
    /// - InvalidArgument for a NIC that the provider does not have.
    /// - Unsupported for an authorization key, if the provider does not support these keys.
    /// - The error that the driver reported.
    fn open_domain(&self, request: &DomainRequest) -> Result<Arc<dyn ProviderDomain>>;
}

/// An open domain of a provider. Several threads may call the methods at once.
///
/// The set of facets that a domain returns never changes.
///
/// # Safety
/// Safe code of this library frees memory when a provider reports that the memory is deregistered.
/// So an implementation must guarantee, for itself, its facets, and the endpoints and completion
/// queues that it opens:
///
/// - A registration accesses only the bytes of its pieces, and writes them only as the region's
///   rights allow. A sub-region or a window accesses only bytes of its region. A sub-region or
///   window grants no write if the region has no right by which the NIC writes.
/// - [`register`](Self::register) leaves nothing registered when it fails or panics.
/// - Once [`deregister`](Self::deregister) has returned `Ok`, nothing touches the memory through
///   the region, its sub-regions or its windows, including transfers in flight. If it returns an
///   error, the region stays registered.
/// - The other safe methods, including those of facets, register nothing. They do not permanently
///   prevent a region from being deregistered.
/// - A caller may pass a [`ProviderRegion`] or [`ProviderWindow`] of another domain, of a freed
///   object, or with any numbers. The call then fails, or uses a live object of this domain. It
///   never accesses freed memory.
/// - [`ProviderEndpoint::post`] refuses a descriptor of a region that is deregistered, and a
///   segment outside the region of its descriptor.
/// - A completion is reported only when the NIC is done with the local memory of its request.
#[allow(unsafe_code, reason = "registers memory by address")]
pub unsafe trait ProviderDomain: Any + fmt::Debug + Send + Sync {
    /// Returns the attributes of the NIC.
    fn attr(&self) -> &ProviderAttr;

    /// Registers pieces as one region.
    ///
    /// # Safety
    /// The promise of [`Raw::new`](crate::Raw::new) holds: until the region is deregistered, the
    /// NIC and peers access the memory without the compiler's knowledge. Memory that is marked as
    /// owned ([`Backing::Host`]) must stay mapped until then.
    ///
    /// The caller guarantees these properties of the request, so a provider need not check them:
    ///
    /// - There is at least one range, and at most `mr_iov_limit`. Each range has at least one byte.
    ///   All ranges together have at most `max_mr_size` bytes.
    /// - The pieces together are the bytes of the ranges, in the order of the ranges. A range may
    ///   have several pieces.
    /// - The NIC supports the path of each backing ([`ProviderAttr::imports`]).
    /// - All flags and rights are defined, and the NIC supports the flags. At most one of
    ///   HMEM_DEVICE_ONLY and HMEM_HOST_ALLOC is set.
    /// - The page size is 0 or one of [`ProviderAttr::page_sizes`].
    /// - Key and addressing follow the mode of the domain: in PROV_KEY mode the provider chooses
    ///   the key, and in VIRT_ADDR mode addresses are virtual. A requested key is not `u64::MAX`.
    /// - The domain accepts the extension ([`ProviderDomain::accepts`]).
    /// - Pieces are staged only if the domain has the facet [`Transport`] and the request allows
    ///   transfers to call drivers ([`Registration::driver_calls_in_transfers`]).
    ///
    /// # Errors
    /// NoKey, KeyRejected, BadAddress, OutOfResources, and Unsupported for a backing that the NIC
    /// cannot import. After an error nothing stays registered or pinned.
    unsafe fn register(
        &self,
        registration: &Registration<'_>,
        pieces: &[Piece<'_>],
    ) -> Result<ProviderRegion>;

    /// Deregisters a region. After this the NIC does not access the memory, not even for transfers
    /// in flight, and the keys are invalid.
    ///
    /// # Errors
    /// After an error the region is still registered.
    ///
    /// - Busy for a region with a sub-region or a bound window. The provider itself must count the
    ///   sub-regions and bound windows of a region: safe code can create them by [`SubRegions`] and
    ///   [`Windows`] without a [`Domain`](crate::Domain).
    /// - The error that the driver reported.
    fn deregister(&self, region: ProviderRegion) -> Result<()>;

    /// Returns the number of live objects of the domain, by kind.
    fn live(&self) -> LiveObjects;

    /// Returns the facet for transfers. A domain without it only registers memory, for requests
    /// that other code posts, and gets no staged pieces.
    fn transport(&self) -> Option<&dyn Transport> {
        None
    }

    /// Returns the facet for sub-regions, if the domain has it.
    fn sub_regions(&self) -> Option<&dyn SubRegions> {
        None
    }

    /// Returns the facet for disabled regions. Without it, regions are usable at once.
    fn enabling(&self) -> Option<&dyn Enabling> {
        None
    }

    /// Returns the facet for keys that consist of several numbers. Without this facet, the remote
    /// key of each region is the single number [`ProviderRegion::key`].
    fn composite_keys(&self) -> Option<&dyn CompositeKeys> {
        None
    }

    /// Returns the facet for raw keys, if the domain has it.
    fn raw_keys(&self) -> Option<&dyn RawKeys> {
        None
    }

    /// Returns the facet for refreshing pages, if the NIC can refresh the pages of a region.
    fn refresh(&self) -> Option<&dyn Refresh> {
        None
    }

    /// Returns the facet for memory windows, if the NIC supports any.
    fn windows(&self) -> Option<&dyn Windows> {
        None
    }

    /// Returns the facet for counters of regions, if the NIC can count accesses.
    fn region_counters(&self) -> Option<&dyn RegionCounters> {
        None
    }

    /// Returns the facet for binding regions to endpoints, if the NIC supports this.
    fn endpoint_binding(&self) -> Option<&dyn EndpointBinding> {
        None
    }

    /// Returns the facet for staging buffers, if the domain supports staged memory
    /// ([`Imports::staged`]).
    fn staging(&self) -> Option<&dyn StagingAccess> {
        None
    }

    /// Returns the facet for manual progress. Without this facet, all requests proceed without
    /// calls by the application.
    fn manual_progress(&self) -> Option<&dyn ManualProgress> {
        None
    }

    /// Returns the facet for the state of the NIC, if the domain knows it.
    fn nic_life(&self) -> Option<&dyn NicLife> {
        None
    }

    /// Returns the facet for revoked dma-bufs, if the domain can find them.
    fn revocations(&self) -> Option<&dyn Revocations> {
        None
    }

    /// Returns true if the domain knows these settings of a request
    /// ([`Request::extension`](crate::Request::extension)). The core refuses requests with other
    /// settings.
    fn accepts(&self, _extension: &(dyn Any + Send + Sync)) -> bool {
        false
    }

    /// Returns the remedy for the error about a missing facet. `None` means the core's own remedy.
    fn remedy_without(&self, _missing: Features) -> Option<&'static str> {
        None
    }
}

/// Returns the remote key of a region of `domain`: the key that the facet [`CompositeKeys`]
/// returns, or else a key with the single number of the region. `ranges` is the region's memory.
///
/// # Panics
/// Panics if `ranges` is empty.
///
/// # Errors
/// The errors of [`CompositeKeys::remote_key`].
pub fn remote_key(
    domain: &dyn ProviderDomain,
    region: ProviderRegion,
    addressing: Addressing,
    ranges: &[AddressRange],
) -> Result<RemoteKey> {
    let composite = domain.composite_keys().map(|keys| keys.remote_key(region)).transpose()?;
    let single = || {
        let base = match addressing {
            Addressing::ZeroBased => Iova(0),
            Addressing::Virtual => Iova(ranges[0].start().0),
        };
        let len = ranges.iter().map(|range| range.len()).sum();
        RemoteKey::new(addressing, base, len, region.key)
    };
    Ok(composite.flatten().unwrap_or_else(single))
}

/// A request to open an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointAttr {
    /// The queue that gets the completions of transmits: sends, RMA, atomics and window operations.
    pub tx_cq: Arc<dyn CompletionQueue>,
    /// The queue that gets the completions of receives.
    pub rx_cq: Arc<dyn CompletionQueue>,
    /// True to enable the RMA_EVENT capability, with which peers can access regions with counters
    /// through the endpoint.
    pub rma_event: bool,
    /// The endpoint's authorization key. `None` means the domain's key. An empty key means no key.
    pub auth_key: Option<AuthKey>,
    /// The counter of successful and failed transmits. `None` to count none.
    pub tx_counter: Option<Arc<Counter>>,
    /// The counter of successful and failed receives. `None` to count none.
    pub rx_counter: Option<Arc<Counter>>,
    /// The number of requests that may be outstanding in each direction. A post beyond this number
    /// fails with Again. 0 counts as 1. A number above the NIC's limit counts as that limit. The
    /// completion queues should have room for all requests ([`Domain::open_cq`]).
    ///
    /// A request that the provider divides counts once for each part. A request of more parts than
    /// the depth fails with MessageTooLong. The software NIC divides no request. Verbs divides
    /// these requests:
    ///
    /// - a write or read with several remote segments, with a remote key of several pieces, with
    ///   more local segments than the NIC takes at once, or of more bytes than its longest message
    /// - an atomic on several elements
    /// - a transfer of staged memory, into the chunks that the NIC transfers at once
    ///
    /// The libfabric provider divides writes and reads in the same way. With this provider, a
    /// transfer of staged memory counts once.
    ///
    /// [`Domain::open_cq`]: crate::Domain::open_cq
    pub depth: usize,
}

impl EndpointAttr {
    /// Creates a request with `cq` for both directions, a depth of 128, and defaults for everything
    /// else. So `cq` should have a depth of 256 or more. For a smaller queue set a smaller
    /// [`depth`](Self::depth).
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
/// The queue never overruns. For all endpoints of the queue together, the provider counts the
/// unread completions and the requests in flight. A request that the provider divides counts once
/// for each part, because each part completes if the request fails. A post fails with Again if the
/// queue might have no room for its completions.
///
/// This trait is safe to implement. A [`ProviderDomain`] guarantees the behaviour of the queues
/// that it opens, and refuses all others.
pub trait CompletionQueue: Any + fmt::Debug + Send + Sync {
    /// Appends up to `max` completions to `out` and returns their number. Does not wait.
    ///
    /// If the queue's domain has the facet [`ManualProgress`], the call also executes posted
    /// requests.
    ///
    /// # Errors
    /// The driver's error if the device failed.
    fn read(&self, out: &mut Vec<Completion>, max: usize) -> Result<usize>;

    /// Reads completions like [`read`](Self::read), and waits up to `timeout` for the first one.
    /// Returns 0 after the timeout, or at once if `max` is 0. A timeout cancels no request.
    ///
    /// A timeout of zero does not wait. [`Duration::MAX`] waits forever. Several threads may wait
    /// for one queue. Each completion goes to one of them, and a thread sleeps only while the queue
    /// is empty.
    ///
    /// If the queue's domain has the facet [`ManualProgress`], the wait also executes posted
    /// requests. The wait then sleeps for at most a millisecond at a time, so that requests of
    /// other threads are executed too. The default implementation sleeps in this way for every
    /// queue, and does not detect that the domain is closed.
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
    /// - The errors of [`read`](Self::read).
    /// - BadState if the queue is empty and its domain is closed, also during the wait. No request
    ///   completes to the queue any more.
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

    /// Returns the queue's file descriptor for event loops, if it has one.
    fn channel(&self) -> Option<&dyn CompletionChannel> {
        None
    }
}

/// The longest sleep of [`CompletionQueue::wait`] for a domain that needs calls to execute requests
/// ([`ManualProgress`]).
pub const MANUAL_WAIT: Duration = Duration::from_millis(1);

/// The file descriptor of a completion queue, for `poll`, `epoll` and asynchronous runtimes.
///
/// Follow these steps in order, so that no wakeup is lost:
///
/// 1. [`read`](CompletionQueue::read) the queue until it returns 0.
/// 2. [`arm`](Self::arm) the channel. If it returns false, go to step 1.
/// 3. Sleep until the fd is readable, and go to step 1.
///
/// A completion between step 1 and step 2 makes `arm` return false. A completion after step 2 makes
/// the fd readable. An edge-triggered event loop clears the readiness of the fd before step 1, not
/// after it. The example `async_completions` does this with tokio.
///
/// Only `arm` makes the fd unreadable again: do not read the fd. Only one task at a time may follow
/// these steps. Other threads may read the queue, but must not [`wait`] for it.
///
/// [`wait`]: CompletionQueue::wait
pub trait CompletionChannel {
    /// Returns the file descriptor. It never changes, and is closed with the queue.
    ///
    /// # Errors
    /// OutOfResources if the process has no room for another file descriptor.
    fn fd(&self) -> Result<BorrowedFd<'_>>;

    /// Prepares for a sleep: makes the fd unreadable until the next completion, and returns true.
    ///
    /// Returns false if the caller must not sleep: the queue has completions, or a transfer in
    /// flight needs calls to make progress (a staged transfer, for example).
    ///
    /// # Errors
    /// - The driver's error if the device failed.
    /// - BadState if the queue is empty and its domain is closed. Closing the domain also makes the
    ///   fd readable.
    fn arm(&self) -> Result<bool>;
}

/// An endpoint of a provider domain.
///
/// This trait is safe to implement. A [`ProviderDomain`] guarantees the behaviour of the endpoints
/// that it opens, and refuses all others.
#[allow(unsafe_code, reason = "posts requests that name memory by address")]
pub trait ProviderEndpoint: Any + fmt::Debug + Send + Sync {
    /// Returns the endpoint's name, which peers pass to [`resolve`](Self::resolve).
    fn name(&self) -> EndpointName;

    /// Resolves a peer's name, and connects to the peer if the transport needs that.
    ///
    /// The returned id differs from the ids that other endpoints return, so that
    /// [`post`](Self::post) can refuse an id of another endpoint. A random number for each endpoint
    /// achieves this.
    ///
    /// # Errors
    /// - Unreachable if no endpoint has this name, or the peer does not answer.
    /// - Malformed for bytes that are not a name of this provider.
    fn resolve(&self, name: &EndpointName) -> Result<PeerId>;

    /// Connects the endpoint to its peer again after an error has ended the connection. The peer
    /// reconnects too. The ids of peers stay valid.
    ///
    /// Outstanding requests complete as canceled. Their completions are in the completion queues
    /// when the call returns. Those of staged transfers follow once their copies have ended.
    ///
    /// The default does nothing. It is for endpoints that keep working after every failed request.
    ///
    /// # Errors
    /// - BadState if the endpoint was never connected, or is closed.
    /// - Busy while a type 2A window is bound through the endpoint.
    /// - The driver's error if the device failed.
    fn reconnect(&self) -> Result<()> {
        Ok(())
    }

    /// Posts a work request. The call copies the lists of segments. The memory of the segments is
    /// in use until the completion.
    ///
    /// # Safety
    /// The memory of local segments without a descriptor must stay valid until the completion.
    ///
    /// # Errors
    /// - Again if the endpoint's queue of requests is full, or if the completion queue might have
    ///   no room for the completion ([`CompletionQueue`]).
    /// - NoRegion for a descriptor that is missing or that is not of this domain.
    /// - The error of [`WindowRule::refuse`], if a window operation breaks a rule.
    /// - InvalidArgument for lists of different total lengths, for an empty remote list, for
    ///   operands that do not fit the operation, and for a peer that this endpoint did not resolve.
    /// - MessageTooLong or TooManyRanges beyond the NIC's limits, the endpoint's depth or the depth
    ///   of its completion queue.
    /// - OutOfBounds or InvalidKey for a remote segment outside its key, if the provider checks
    ///   remote segments.
    /// - Unsupported for an operation that the NIC does not have.
    /// - BadState after the endpoint was closed, and for window operations of an endpoint that must
    ///   be connected first.
    /// - Otherwise the error that the driver reported.
    ///
    /// The completion reports an error that only the target can detect.
    unsafe fn post(&self, request: &WorkRequest<'_>) -> Result<()>;

    /// Closes the endpoint. Outstanding requests complete as canceled.
    ///
    /// A region that is bound to the endpoint (ENDPOINT mode) does not prevent the close.
    /// Afterwards peers no longer reach the region, which can still be closed.
    ///
    /// # Errors
    /// - Busy while a type 2A window is bound through the endpoint.
    /// - The driver's error. Requests can then still be in flight, and use their memory, until a
    ///   later call succeeds.
    fn close(&self) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::transfer::CompletionKind;

    /// A queue without a `wait` of its own, whose first completion comes with the third read.
    #[derive(Debug, Default)]
    struct ThirdRead {
        reads: AtomicU32,
    }

    impl CompletionQueue for ThirdRead {
        fn read(&self, out: &mut Vec<Completion>, _: usize) -> Result<usize> {
            if self.reads.fetch_add(1, Ordering::Relaxed) + 1 < 3 {
                return Ok(0);
            }
            out.push(Completion::new(7, CompletionKind::Send, Ok(0)));
            Ok(1)
        }
    }

    /// EVT-05: the default `wait` reads until a completion arrives or the timeout ends.
    #[test]
    fn default_wait_reads_until_a_completion_or_the_timeout() {
        for (timeout, max, reads, completions) in [
            (Duration::MAX, 1, 3, 1),
            (Duration::from_secs(3600), 1, 3, 1),
            (Duration::ZERO, 1, 1, 0),
            (Duration::MAX, 0, 1, 0),
        ] {
            let (queue, mut done) = (ThirdRead::default(), Vec::new());
            assert_eq!(queue.wait(&mut done, max, timeout).expect("wait"), completions);
            assert_eq!(queue.reads.into_inner(), reads, "{timeout:?}");
            assert_eq!(done.len(), completions);
        }
    }
}
