//! A software NIC inside the process: a real data path to develop against, not a mock. In the crate
//! `hmem` it needs the feature `testing`, which is on by default.
//!
//! - [`Loopback`] is the provider, and [`Builder`] sets its modes and limits.
//! - [`Faults`] makes chosen calls fail, or makes them wait in flight.
//! - The NIC can register every backing that core passes to a provider. [`Builder::imports`] limits
//!   the kinds of memory.
//! - The NIC checks each access: key, domain, bounds, rights, authorization key, endpoint and
//!   window. Keys of 8 bytes that the NIC chooses are hard to guess.
//! - The NIC copies host memory that a region does not own through system calls that report absent
//!   pages. Such a page fails the transfer and not the process.
//! - Requests execute in calls of the application, or on a thread of the domain ([`Progress`]).
//! - A completion queue never overruns. Each post reserves an entry for its completion, which is
//!   free again when the application has read the completion. A post that finds no free entry fails
//!   with `Again`.
//!
//! The provider is a reference implementation: clear first, fast second. `#[inline]` and
//! `#[inline(always)]` stand where the transfer of 8 bytes in `benches/transfer.rs` needs them.
//!
//! ```
//! use hmem_core::{MrMode, provider::Provider};
//! use hmem_provider_loopback::Loopback;
//!
//! let provider = Loopback::builder().nic("nic0").needs(MrMode::PROV_KEY).key_size(4).build()?;
//! let nics = provider.nics()?;
//! assert_eq!((nics[0].nic.name.as_str(), nics[0].key_size), ("nic0", 4));
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! # Rules that the man pages leave open
//!
//! - A single-use key becomes invalid with the first access that passes every check. A refused
//!   access does not count.
//! - Every atomic needs REMOTE_WRITE or REMOTE_ATOMIC. Fetching atomics need no right to read. For
//!   `AtomicRead`, which changes nothing, REMOTE_READ is enough as well.
//! - Bytes that peers change in a region with RMA_PMEM are persistent before the write or atomic
//!   completes, if the memory itself is persistent. If the NIC cannot write these bytes back, the
//!   transfer fails. Bytes that a transfer copies into local memory are not written back. The
//!   method of the write-back depends on the memory:
//!   - mapped pages: `msync(MS_SYNC)` of the touched pages;
//!   - device DAX, which `msync` refuses: a write-back of the cache lines, if the region owns the
//!     memory and the processor is an x86-64;
//!   - a file that was given by its fd: `msync` or `fdatasync`;
//!   - memory of a device: the device's flush (`InboundFlush::flush`).
//! - A domain may forbid driver calls in transfers
//!   ([`DomainAttr::driver_calls_in_transfers`](hmem_core::DomainAttr)). The domain then refuses
//!   regions whose transfers need such calls: peer memory and staged memory with BadState, and
//!   RMA_PMEM for device memory with BadFlags.
//! - If a message is longer than the buffer of its receive, the receive ends with Truncated, and no
//!   byte moves. The send succeeds.
//! - A zero-length write or read needs a valid key with the right, but no valid address. Such an
//!   access uses up a single-use key.
//! - The counters of a region count every atomic except `AtomicRead`, and every write of at least
//!   one byte to the region.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `faults`, `keys`, `memory`, `progress`, `queue`
//! - `atomic`, `config`, `region`
//! - `regions`: the regions of a NIC, and why it never touches memory of a deregistered region
//! - `nic`
//! - `window`
//! - `domain`
//! - `register`, `request`
//! - `inbox`
//! - `endpoint`: the state of an endpoint
//! - `access`
//! - `message`
//! - `execute`
//! - `handles`
//! - `provider`
//!
//! # Limits
//!
//! - Both ends of a transfer are in one process. A forked child cannot use its parent's NICs.
//! - A domain executes both sides of its requests. If a request accesses device memory of a peer,
//!   the domain calls the driver of that memory. Only the peer's domain decides if such calls are
//!   permitted.
//! - Requests of different endpoints execute in any order.
//! - Keys of 8 bytes are hard to guess, but they are not cryptographically secure. Keys of 4 bytes
//!   are easy to guess, as on hardware.

#![deny(unsafe_code)]

mod access;
mod atomic;
mod config;
mod domain;
mod endpoint;
mod execute;
mod faults;
mod handles;
mod inbox;
mod keys;
mod memory;
mod message;
mod nic;
mod progress;
mod provider;
mod queue;
mod region;
mod regions;
mod register;
mod request;
mod window;

pub use config::{Progress, RemapPolicy};
pub use faults::{Faults, NicCall};
pub use hmem_core::testing::Gate;
pub use provider::{Builder, Loopback};

/// A list that usually has one item. One item needs no heap allocation.
type Few<T> = smallvec::SmallVec<[T; 1]>;
