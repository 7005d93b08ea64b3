//! Words and rules of memory registration, without any vendor's code.
//!
//! An [`Iface`] knows memory: which allocation an address lies in, how to copy it, how to export
//! it. A [`provider`] knows a NIC: registering, keys, transfers. A [`Domain`] ties them together
//! and implements the semantics of libfabric's `fi_mr(3)` once, above both. How memory is reached
//! is a [`Decision`] that stays with the region.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `access`, `counter`, `dma_buf`, `iface_kind`, `nic`
//! - `error`, `flags`
//! - `address`, `event_queue`, `frame`, `mr_mode`, `process`, `random`
//! - `allocation`, `key`
//! - `cause`, `handle`, `monitor`, `rail_keys`
//! - `cache`, `iface`, `transfer`, `window`
//! - `registry`
//! - `registration`
//! - `provider`
//! - `path`
//! - `domain`
//!
//! # Things this crate does not do
//!
//! It loads no library, starts no thread until an event queue is bound, opens no device, and prints
//! nothing: it logs through `tracing`.

#![deny(unsafe_code)]

mod access;
mod address;
mod allocation;
#[allow(unsafe_code)]
pub mod cache;
pub mod cause;
pub mod counter;
#[doc = include_str!("design.md")]
pub mod design {}
mod dma_buf;
#[allow(unsafe_code)]
mod domain;
mod error;
pub mod event_queue;
mod flags;
mod frame;
mod handle;
#[allow(unsafe_code)]
pub mod iface;
mod iface_kind;
mod key;
pub mod monitor;
mod mr_mode;
mod nic;
#[allow(unsafe_code)]
pub mod path;
#[allow(unsafe_code)]
mod process;
#[allow(unsafe_code)]
pub mod provider;
mod rail_keys;
pub mod random;
pub mod registration;
pub mod registry;
pub mod transfer;
mod window;

pub use access::Access;
pub use address::{Address, AddressRange, AllocOffset, DmaBufOffset, Iova};
pub use allocation::{Allocation, AllocationId, AllocationKind, Segment};
pub use domain::{
    Atomic, BufferView, CacheAttr, CachedBuffer, CachedRegion, DeviceBuffer, DmaBufAttr, Domain,
    DomainAttr, Endpoint, Grant, GrantKind, Growth, MemoryRegion, MrAttr, MultiRegion, OwnedBuffer,
    OwnedMultiRegion, OwnedRegion, Prefault, RegionCache, RegionLookupHandle, RegionSlice,
    RegionState, RegionView, RegionViews, RegisteredViews, Registrations, Scoped, Type1Window,
    Type2Bind, Type2Kind, Type2Window, VecParts, View, Watch, os_page_sizes, prefault, regattr_on,
    register_on,
};
pub use error::{DriverCode, Errno, Error, ErrorKind, Rejected, Result};
pub use flags::{BindFlags, DomainBindFlags, MrFlags};
pub use iface::{Iface, IfaceExt};
pub use iface_kind::{DeviceId, IfaceKind, UnknownIfaceName};
pub use key::{Addressing, AuthKey, LocalKey, RawKey, RemoteKey, RemotePiece};
pub use mr_mode::MrMode;
pub use path::{Decision, Path};
pub use process::ProcessMark;
pub use rail_keys::{RailKey, RailKeys};
pub use registration::{Parallel, Progress, WriteOrdering};
pub use registry::Registry;
