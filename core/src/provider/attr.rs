//! Properties of NICs, and the settings of a domain's staging buffers.

pub use crate::nic::Nic;
use crate::{Access, Error, ErrorKind, MrFlags, MrMode, Result};

/// The paths by which a NIC can reach memory, besides the plain host path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Imports {
    /// True if the NIC can register dma-buf fds.
    pub dma_buf: bool,
    /// True if the path search should try the PCIe mapping of a dma-buf before the default mapping,
    /// and false if it should not. `None` leaves the order to the path search, which knows the
    /// machine's topology.
    pub pcie_mapping_first: Option<bool>,
    /// The PCI domain of the NIC's Data Direct function, by which the NIC can register a dma-buf
    /// ([`DmaBufMapping::DataDirect`](crate::iface::DmaBufMapping::DataDirect)). `None` if the NIC
    /// has no such function, or if its driver does not report one.
    pub data_direct: Option<u32>,
    /// True if the NIC can register device addresses, which peer-memory clients in the kernel
    /// resolve. Only an attempt to register shows if a client exists for a given device.
    pub peer_memory: bool,
    /// True if the provider can access memory by copies through staging buffers. A domain without
    /// the facet [`Transport`](super::Transport) gets no staged memory, whatever the value is.
    pub staged: bool,
}

/// The attributes of a NIC. They do not change while a domain is open.
#[derive(Clone, Debug)]
pub struct ProviderAttr {
    /// The identification of the NIC.
    pub nic: Nic,
    /// The mr_mode bits that the NIC needs and an application must offer.
    pub required_mr_mode: MrMode,
    /// The mr_mode bits, besides the required ones, that the NIC supports if the application offers
    /// BASIC.
    pub basic_mr_mode: MrMode,
    /// The size of a key in bytes: 4 or 8.
    pub key_size: usize,
    /// The size of a raw key in bytes.
    pub raw_key_size: usize,
    /// The largest number of ranges in a region, at least 1.
    pub mr_iov_limit: usize,
    /// The largest number of bytes in a region.
    pub max_mr_size: u64,
    /// The largest number of regions at one time.
    pub max_mr_count: u64,
    /// The page sizes that registrations may request, in bytes, ascending.
    pub page_sizes: Vec<usize>,
    /// The paths by which the NIC can reach memory, besides the plain host path.
    pub imports: Imports,
    /// The rights that a staged region may have: all rights if the provider also copies data for
    /// remote accesses, and otherwise only the local rights.
    pub staged_access: Access,
    /// The registration flags that the provider supports.
    pub flags: MrFlags,
    /// The agent that executes posted requests: the NIC, a thread, or the application's calls.
    pub progress: ProgressModel,
    /// The guaranteed order of requests of one endpoint to one peer.
    pub order: MsgOrder,
    /// The size of immediate data in bytes, 0 to 8 (`cq_data_size` in `fi_domain(3)`). 0 if the NIC
    /// has no immediate data.
    pub cq_data_size: usize,
    /// A description of the registration cache inside the driver's library, if there is one and it
    /// is enabled. `None` if the library registers each time.
    ///
    /// With such a cache, the domain's own cache ([`Domain::cache`](crate::Domain::cache)) keeps no
    /// region: two caches would hold memory twice, and their monitors may patch the same functions.
    pub driver_cache: Option<String>,
}

impl ProviderAttr {
    /// Checks that the immediate data of a request fits the NIC. Providers call this function.
    ///
    /// # Errors
    /// - Unsupported if the NIC has no immediate data.
    /// - InvalidArgument for data that is wider than [`ProviderAttr::cq_data_size`].
    pub fn check_data(&self, data: u64) -> Result<()> {
        let refuse = |kind, why: &'static str| {
            Err(Error::new(kind, "post")
                .provider(self.nic.to_string())
                .context("data", format_args!("{data:#x}"))
                .context("cq_data_size", self.cq_data_size)
                .remedy(why))
        };
        match self.cq_data_size {
            0 => refuse(ErrorKind::Unsupported, "send a message: this NIC has no immediate data"),
            8.. => Ok(()),
            bytes if data >> (8 * bytes) == 0 => Ok(()),
            _ => refuse(
                ErrorKind::InvalidArgument,
                "send the data in a message: it is wider than the NIC's immediate data",
            ),
        }
    }
}

/// The agent that executes the posted requests of a domain.
///
/// This model holds for requests with memory that the NIC reaches directly. Requests with staged
/// memory may also need calls by the application. In this case the domain has the facet
/// [`ManualProgress`](super::ManualProgress).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProgressModel {
    /// The NIC executes the requests.
    Nic,
    /// A thread of the domain executes the requests.
    Thread,
    /// The application's calls of [`ManualProgress::progress`](super::ManualProgress::progress) and
    /// [`CompletionQueue::read`](super::CompletionQueue::read) execute the requests. Without calls,
    /// no request proceeds.
    Manual,
}

bitflags::bitflags! {
    /// The guaranteed order of requests of one endpoint to one peer, with the bits of libfabric's
    /// `FI_ORDER_*` (`fi_endpoint(3)`, "MESSAGE ORDERING").
    ///
    /// A name has two letters for kinds of requests around an `A` for "after". For example, `WAR`
    /// means that a write takes effect after the reads that were posted before it. `R` stands for
    /// reads and fetching atomics, `W` for writes and atomics, `S` for messages. The bits with
    /// `RMA_` order only RMA requests, and the bits with `ATOMIC_` order only atomics. Without the
    /// bit of a pair, the second request may overtake the first. An application that needs the
    /// order must then wait for the completion of the first request.
    ///
    /// This is the order in which the NIC executes the requests. Software that polls the target's
    /// memory sees the bytes in this order only if the region has
    /// [`WriteOrdering::Strict`](crate::WriteOrdering::Strict), which is the default.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MsgOrder: u64 {
        /// Orders reads after earlier reads.
        const RAR = 1 << 0;
        /// Orders reads after earlier writes.
        const RAW = 1 << 1;
        /// Orders reads after earlier messages.
        const RAS = 1 << 2;
        /// Orders writes after earlier reads.
        const WAR = 1 << 3;
        /// Orders writes after earlier writes.
        const WAW = 1 << 4;
        /// Orders writes after earlier messages.
        const WAS = 1 << 5;
        /// Orders messages after earlier reads.
        const SAR = 1 << 6;
        /// Orders messages after earlier writes.
        const SAW = 1 << 7;
        /// Orders messages after earlier messages.
        const SAS = 1 << 8;
        /// Orders RMA reads after earlier RMA reads.
        const RMA_RAR = 1 << 32;
        /// Orders RMA reads after earlier RMA writes.
        const RMA_RAW = 1 << 33;
        /// Orders RMA writes after earlier RMA reads.
        const RMA_WAR = 1 << 34;
        /// Orders RMA writes after earlier RMA writes.
        const RMA_WAW = 1 << 35;
        /// Orders atomic reads after earlier atomic reads.
        const ATOMIC_RAR = 1 << 36;
        /// Orders atomic reads after earlier atomic writes.
        const ATOMIC_RAW = 1 << 37;
        /// Orders atomic writes after earlier atomic reads.
        const ATOMIC_WAR = 1 << 38;
        /// Orders atomic writes after earlier atomic writes.
        const ATOMIC_WAW = 1 << 39;
    }
}

/// The size and number of a domain's staging buffers.
///
/// Staging buffers are registered host memory. Device memory that the NIC cannot reach is copied
/// through them. The domain allocates and registers them with its first staged region, and never
/// adds more. A transfer waits while all buffers are in use.
///
/// The default is 8 buffers of 512 KiB: 4 MiB, half of what an unprivileged process may lock on
/// many systems. A copy of 512 KiB takes much longer than it takes to start the copy. Three buffers
/// in flight keep the copy engine and the NIC busy, and the others serve more transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingAttr {
    /// The length of a buffer in bytes, at least 1. No chunk of a message is longer than a buffer.
    ///
    /// The longest chunk of a message is about a sixteenth of the message, but at least 192 KiB and
    /// at most a buffer. Chunks of less than 128 KiB are avoided, unless a buffer is shorter. The
    /// chunks at both ends of a long message are shorter than those in the middle.
    pub buffer_len: usize,
    /// The number of buffers, at least 1. Some NICs need buffers for a whole message at once (verbs
    /// NICs do). For such a NIC, half of the buffers serve receives and a quarter serve sends. The
    /// rest serves other transfers, so that a message that waits for its peer never blocks them.
    pub buffer_count: usize,
}

impl Default for StagingAttr {
    fn default() -> Self {
        Self { buffer_len: 512 << 10, buffer_count: 8 }
    }
}

impl StagingAttr {
    /// Checks that the settings are in the allowed range.
    ///
    /// # Errors
    /// InvalidArgument if a setting is 0, or if all buffers together have 2^62 bytes or more.
    pub fn check(&self) -> Result<()> {
        match self.buffer_len.checked_mul(self.buffer_count) {
            Some(bytes) if bytes > 0 && bytes <= isize::MAX as usize / 2 => Ok(()),
            _ => Err(Error::new(ErrorKind::InvalidArgument, "open domain")
                .context("staging buffer_len", self.buffer_len)
                .context("staging buffer_count", self.buffer_count)
                .remedy(
                    "use at least one buffer of at least one byte, and fewer than 2^62 in all",
                )),
        }
    }
}
