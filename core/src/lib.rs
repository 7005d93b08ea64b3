//! The vocabulary, the traits and the rules of memory registration, without any vendor's code.
//!
//! The types to know are:
//!
//! - [`Iface`] is a kind of memory (host, CUDA, ROCr, ...). It knows the allocation of an address,
//!   copies memory and exports it.
//! - [`provider::Provider`] is a kind of NIC. Its domains register memory, have keys, and transfer
//!   data.
//! - [`Domain`] connects the two, and implements the semantics of libfabric's `fi_mr(3)` once for
//!   all ifaces and providers.
//! - [`MemoryRegion`] is registered memory. Its [`Decision`] tells how the NIC reaches the memory,
//!   and why.
//!
//! Applications use the crate `hmem`, which re-exports these types and opens domains. Authors of
//! ifaces and providers use this crate.
//!
//! ```no_run
//! use hmem_core::{Access, Domain, RemoteKey, Result};
//!
//! /// Registers a buffer for peers to read, and returns its key.
//! fn publish(domain: &Domain, bytes: Vec<u8>) -> Result<RemoteKey> {
//!     let region = domain.register(bytes, Access::REMOTE_READ)?;
//!     println!("{}", region.decision()?);
//!     let key = region.key();
//!     // Until here peers can read the buffer. Closing the region returns it.
//!     let _bytes = region.close()?;
//!     key
//! }
//! ```
//!
//! # Layers
//!
//! A module imports only from modules on earlier lines (`tests/repository/layers` checks this):
//!
//! - `access`, `counter`, `dma_buf`, `iface_kind`, `named_enum`, `nic`, `racing`
//! - `error`, `flags`
//! - `address`, `event_queue`, `frame`, `mr_mode`, `random`, `testing`
//! - `allocation`, `key`, `mapping`
//! - `wiped`
//! - `process`
//! - `cause`, `environment`, `handle`, `library`, `monitor`, `rail_keys`
//! - `cache`, `iface`, `window`
//! - `registry`, `shared_exports`, `transfer`
//! - `key_feed`
//! - `registration`
//! - `provider`
//! - `path`
//! - `domain`
//!
//! # Things this crate does not do
//!
//! It opens no device. [`library`] loads only libraries that ifaces and providers name. The crate
//! starts threads only for a bound event queue, for a registration cache, for a [`SparseRegion`],
//! and for the duration of a [`prefault`] call. It prints nothing, and logs through `tracing`.

#![deny(unsafe_code)]

mod access;
mod address;
mod allocation;
pub mod cache;
pub mod cause;
pub mod counter;
#[doc = include_str!("design.md")]
pub mod design {}
mod dma_buf;
mod domain;
pub mod environment;
mod error;
pub mod event_queue;
mod flags;
mod frame;
mod handle;
pub mod iface;
mod iface_kind;
mod key;
pub mod key_feed;
pub mod library;
mod mapping;
pub mod monitor;
mod mr_mode;
mod named_enum;
mod nic;
pub mod path;
mod process;
pub mod provider;
mod racing;
mod rail_keys;
pub mod random;
pub mod registration;
pub mod registry;
mod shared_exports;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transfer;
mod window;
mod wiped;

pub use access::Access;
pub use address::{Address, AddressRange, AllocOffset, DmaBufOffset, Iova};
pub use allocation::{Allocation, AllocationId, AllocationKind, Segment};
pub use domain::{
    AnyBits, Atomic, Batch, Borrowed, BorrowedDmaBuf, CacheAttr, CachedBuffer, CachedRegion,
    DeviceBuffer, DmaBuf, Domain, DomainAttr, DomainMetrics, Endpoint, Grant, GrantKind, Growth,
    Items, KeptRaw, LatencyHistogram, Memory, MemoryRegion, OwnedCachedRegion, PathMetrics, Place,
    Prefault, Promise, RailEndpoint, RailState, RailStatus, RailTransfer, Raw, RefusalCount,
    Region, RegionCache, RegionLookupHandle, RegionSlice, RegionState, RegionView, Regions,
    Registrations, Request, RoamingRegion, Scoped, SparsePart, SparseRegion, Stripe, Type1Window,
    Type2Bind, Type2Kind, Type2Window, Watch, fabric, os_page_sizes, prefault,
};
pub use error::{
    AttemptSummary, CauseSummary, DriverCode, Errno, Error, ErrorKind, ErrorSummary, ProbableCause,
    Rejected, Result,
};
pub use flags::{BindFlags, DomainBindFlags, MrFlags};
pub use iface::{Iface, IfaceExt};
pub use iface_kind::{DeviceId, IfaceKind, IfaceName};
pub use key::{Addressing, AuthKey, LocalKey, RawKey, RemoteKey, RemotePiece};
pub use mapping::Mapping;
pub use mr_mode::MrMode;
pub use path::{Decision, Path};
pub use process::ProcessMark;
pub use racing::racing_copy;
pub use rail_keys::{RailKey, RailKeys};
pub use registration::{Parallel, Progress, WriteOrdering};
pub use registry::Registry;
pub use shared_exports::{SharedExport, SharedExports};
pub use wiped::{Wipeable, WipedOnFork};
