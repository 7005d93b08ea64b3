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
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `sys`, `huge`: functions and layouts of libibverbs; huge pages
//! - `split`: arithmetic of cuts
//! - `access`, `peer_name`, `raw_key`: rights, names of endpoints, raw keys
//! - `errors`, `completion`: the reports of drivers
//! - `library`
//! - `device`
//! - `gid`
//! - `port`
//! - `cq`, `ready`
//! - `connection`: `QueuePair` and `Connection`
//! - `staged/memory`
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
