//! Properties of NICs, and the settings of a domain's staging buffers.

pub use crate::nic::Nic;
use crate::{Access, Error, ErrorKind, MrFlags, MrMode, Result};

/// The kinds of memory that a NIC can import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
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

/// Attributes of a NIC. They do not change while a domain is open on it.
#[derive(Clone, Debug)]
pub struct ProviderAttr {
    /// The NIC.
    pub nic: Nic,
    /// The mr_mode bits that an application must offer.
    pub required_mr_mode: MrMode,
    /// The mr_mode bits that it can run in when BASIC forces them on it.
    pub basic_mr_mode: MrMode,
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
    /// The kinds of memory that the NIC imports.
    pub imports: Imports,
    /// The rights that a staged region may have: the local ones where staged memory takes this
    /// side's help to reach, all where the NIC copies for peers too.
    pub staged_access: Access,
    /// The registration flags that it honours.
    pub flags: MrFlags,
    /// The agent that executes posted requests.
    pub progress: ProgressModel,
    /// The order that the requests of one endpoint to one peer keep.
    pub order: MsgOrder,
    /// The bytes of immediate data that a message or write carries (`cq_data_size` of libfabric's
    /// `fi_domain(3)`): 0 to 8. 0 if the NIC has none.
    pub cq_data_size: usize,
}

impl ProviderAttr {
    /// Checks immediate data, for a provider that posts a request with it.
    ///
    /// # Errors
    /// Unsupported if the NIC carries none; InvalidArgument for data that is wider than it carries.
    pub fn check_data(&self, data: u64) -> Result<()> {
        let refuse = |kind, why: &'static str| {
            Err(Error::new(kind, "post")
                .provider(self.nic.to_string())
                .context("data", format_args!("{data:#x}"))
                .context("cq_data_size", self.cq_data_size)
                .remedy(why))
        };
        match self.cq_data_size {
            0 => {
                refuse(ErrorKind::Unsupported, "this NIC carries no immediate data: send a message")
            }
            8.. => Ok(()),
            bytes if data >> (8 * bytes) == 0 => Ok(()),
            _ => refuse(
                ErrorKind::InvalidArgument,
                "immediate data has the NIC's width at most: send the rest in a message",
            ),
        }
    }
}

/// The agent that executes the requests of a domain, after the call that posted them returned.
///
/// It is about requests that name memory which the NIC reaches. Those that name staged memory may
/// need calls besides: a domain with the facet [`ManualProgress`](super::ManualProgress) says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProgressModel {
    /// The NIC itself.
    Nic,
    /// A thread of the domain.
    Thread,
    /// Calls of [`ManualProgress::progress`](super::ManualProgress::progress) and
    /// [`CompletionQueue::read`](super::CompletionQueue::read). Without them nothing moves.
    Manual,
}

bitflags::bitflags! {
    /// The order in which the requests of one endpoint to one peer take effect there, with the bits
    /// of libfabric's `FI_ORDER_*` (`fi_endpoint(3)`, "MESSAGE ORDERING").
    ///
    /// A name has two letters for kinds of requests around an `A` for "after": `WAR` orders a write
    /// after the reads that were posted before it. `R` stands for reads and fetching atomics, `W`
    /// for writes and atomics, `S` for messages. A pair without its bit has no order: the second
    /// request may overtake the first. Its poster then waits for the first completion.
    ///
    /// It is the order in which the NIC executes the requests. In the target's memory their bytes
    /// become visible in that order to the NIC, and to software that polls only if the region was
    /// registered so ([`WriteOrdering::Strict`](crate::WriteOrdering::Strict), which is not the
    /// default).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct MsgOrder: u64 {
        /// Reads after reads.
        const RAR = 1 << 0;
        /// Reads after writes.
        const RAW = 1 << 1;
        /// Reads after messages.
        const RAS = 1 << 2;
        /// Writes after reads.
        const WAR = 1 << 3;
        /// Writes after writes.
        const WAW = 1 << 4;
        /// Writes after messages.
        const WAS = 1 << 5;
        /// Messages after reads.
        const SAR = 1 << 6;
        /// Messages after writes.
        const SAW = 1 << 7;
        /// Messages after messages.
        const SAS = 1 << 8;
        /// RAR among RMA requests.
        const RMA_RAR = 1 << 32;
        /// RAW among RMA requests.
        const RMA_RAW = 1 << 33;
        /// WAR among RMA requests.
        const RMA_WAR = 1 << 34;
        /// WAW among RMA requests.
        const RMA_WAW = 1 << 35;
        /// RAR among atomics.
        const ATOMIC_RAR = 1 << 36;
        /// RAW among atomics.
        const ATOMIC_RAW = 1 << 37;
        /// WAR among atomics.
        const ATOMIC_WAR = 1 << 38;
        /// WAW among atomics.
        const ATOMIC_WAW = 1 << 39;
    }
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
    pub buffer_len: usize,
    /// The number of buffers, at least 1. Where a NIC needs a message whole, as verbs does, half of
    /// them serve receives and a quarter sends, so that transfers which wait for a peer never
    /// keep the others from going on.
    pub buffer_count: usize,
}

impl Default for StagingAttr {
    fn default() -> Self {
        Self { buffer_len: 512 << 10, buffer_count: 8 }
    }
}

impl StagingAttr {
    /// Checks the numbers.
    ///
    /// # Errors
    /// InvalidArgument if one is 0, or both together pass the address space.
    pub fn check(&self) -> Result<()> {
        let bytes = self
            .buffer_len
            .checked_mul(self.buffer_count)
            .filter(|bytes| *bytes > 0 && *bytes <= isize::MAX as usize / 2);
        bytes.map(|_| ()).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "open domain")
                .context("staging buffer_len", self.buffer_len)
                .context("staging buffer_count", self.buffer_count)
                .remedy("staging takes at least one buffer of at least one byte")
        })
    }
}
