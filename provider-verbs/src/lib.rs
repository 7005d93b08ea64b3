//! Provider for RDMA hardware through libibverbs. The library is loaded at run time: nothing is
//! linked, and nothing needs to be installed.
//!
//! ```
//! use hmem_core::provider::Provider;
//! use hmem_provider_verbs::Verbs;
//!
//! match Verbs::open().and_then(|verbs| verbs.nics()) {
//!     Ok(nics) => {
//!         for nic in nics {
//!             println!("{}: {} bytes per region", nic.nic, nic.max_mr_size);
//!         }
//!     }
//!     // No libibverbs, or no device: the error says which, and everything else works on.
//!     Err(error) => assert!(error.is_unavailable(), "{error}"),
//! }
//! ```
//!
//! # Translation of rights
//!
//! | libfabric access | verbs access |
//! |---|---|
//! | WRITE, SEND, COLLECTIVE | none: the NIC may always read a region locally |
//! | READ, RECV | LOCAL_WRITE (on iWARP READ is LOCAL_WRITE and REMOTE_WRITE) |
//! | REMOTE_READ | REMOTE_READ |
//! | REMOTE_WRITE | REMOTE_WRITE, LOCAL_WRITE, and REMOTE_ATOMIC if the device has it |
//! | REMOTE_RMA_WRITE | REMOTE_WRITE, LOCAL_WRITE |
//! | REMOTE_ATOMIC | REMOTE_ATOMIC, LOCAL_WRITE; Unsupported without atomics |
//! | MW_BIND | MW_BIND; Unsupported without memory windows |
//!
//! The provider checks rights that verbs lacks (local WRITE and SEND) when a request is posted.
//! Flags without a counterpart in libfabric are [`VerbsOptions`]. The provider sets them only on
//! request; see [`access_flags`]. RELAXED_ORDERING is a setting of the domain or the region
//! ([`WriteOrdering`](hmem_core::WriteOrdering)).
//!
//! # Endpoints
//!
//! An endpoint is one reliable connection (RC). Both sides exchange names and call `resolve`. A
//! failed completion ends the connection, often on both sides. A request that the peer's NIC
//! refuses is a failed completion, too. Both sides then call
//! [`Endpoint::reconnect`](hmem_core::Endpoint::reconnect). Instead, both may exchange names and
//! call `resolve` again: the name of an endpoint changes after a failure. Use one of the two ways
//! on both sides. [`Builder::connect_in_process`] does all this for endpoints of this process,
//! which single-process tests use.
//!
//! The NIC cannot report why a peer refused. A stale or foreign key, a range that is too long and a
//! missing right are all "remote access error (10)", AccessDenied here.
//!
//! # Lost devices
//!
//! The provider reads the asynchronous events of each context that it opened, without a thread of
//! its own. Events are seen:
//!
//! - when a thread calls [`Domain::nic_state`](hmem_core::Domain::nic_state) or `nic_events`;
//! - when a thread waits for completions or arms a completion channel, also during the sleep;
//! - after a driver call fails or a request ends in error;
//! - at every 256th read of a completion queue that finds the queue empty.
//!
//! A kernel driver that cannot take a device from its users (rdma_rxe, siw) reports nothing when
//! the device is removed: the removal waits until all users have closed the device. `nic_state`
//! then reports the loss because the node of the device is gone from sysfs. A provider closes its
//! own context of the device when it next lists its NICs or opens a domain, and when it is dropped.
//!
//! In the context of another crate ([`Builder::with_pd`]) the application reads the events. The
//! provider then sees only that the kernel has removed the device.
//!
//! libibverbs keeps the memory of queues and regions of a removed device allocated, because their
//! destruction fails. Set `RDMAV_ALLOW_DISASSOC_DESTROY=1` before the process starts to have that
//! memory freed. Regions are deregistered and file descriptors are closed without the variable.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`, `huge`: functions and layouts of libibverbs; huge pages
//! - `split`: arithmetic of cuts
//! - `access`, `peer_name`, `raw_key`: rights, names of endpoints, raw keys
//! - `errors`, `completion`: the reports of drivers
//! - `library`
//! - `life`: the events of a device, and its loss
//! - `device`
//! - `gid`
//! - `port`
//! - `cq`
//! - `ready`
//! - `connection`: `QueuePair` and `Connection`
//! - `region`
//! - `parallel`
//! - `register`: `Registrar`
//! - `staged/buffers`
//! - `window`
//! - `domain_state`: `DomainState`, which owns the parts above
//! - `atomic`
//! - `chain`: `Chain`, which turns a request's lists into work requests
//! - `in_flight`
//! - `post`: `Poster`, which owns the request table and the connection
//! - `queue`: `CqState`, which passes work completions to posters
//! - `staged`: lanes of staged transfers
//! - `endpoint`
//! - `domain`
//! - `mr`
//! - `provider`
//!
//! # Limits
//!
//! The provider refuses these, each with the reason:
//!
//! - tagged messages
//! - atomics other than 64-bit fetch-and-add and compare-and-swap
//! - sub-regions with their own keys, which verbs lacks: register the part, or bind a window
//! - counters of regions
//! - authorization keys
//! - ZERO_BASED regions that need more than one registration

#![deny(unsafe_code)]

mod access;
mod atomic;
mod chain;
mod completion;
mod connection;
mod cq;
mod device;
mod domain;
mod domain_state;
mod endpoint;
mod errors;
mod gid;
mod huge;
mod in_flight;
mod library;
mod life;
mod mr;
mod parallel;
mod peer_name;
mod port;
mod post;
mod provider;
mod queue;
mod raw_key;
mod ready;
mod region;
mod register;
mod split;
mod staged;
pub mod sys;
mod window;

pub use access::{DeviceRights, OptionResult, Settings, VerbsOptions, access_flags, check_flags};
pub use domain::VerbsDomain;
pub use library::{ForkSafety, ForkSupport};
pub use mr::VerbsMr;
pub use provider::{Builder, Verbs};
