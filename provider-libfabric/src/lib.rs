//! Provider for libfabric, which is loaded at run time: nothing is linked, and nothing needs to be
//! installed.
//!
//! - [`Builder::build`] makes a provider for the NICs that libfabric lists.
//! - A program that has opened a `fid_domain` itself passes it to [`Builder::with_domain`]. The
//!   provider then registers memory in that domain.
//!
//! [`FabricMr`] has the descriptor and the key of a region for the program's own requests. Domains
//! on listed NICs also have RDM endpoints.
//!
//! ```
//! use hmem_provider_libfabric::{Libfabric, sys};
//!
//! // SAFETY: null pointers are refused.
//! let refused = unsafe {
//!     let (domain, info) = (std::ptr::null_mut(), std::ptr::null());
//!     Libfabric::builder().with_domain(domain, info, sys::version(1, 17), ())
//! };
//! // Without libfabric the error says so. With libfabric it says which argument is wrong.
//! let error = refused.expect_err("null pointers");
//! assert!(error.remedy_text().is_some(), "{error}");
//! ```
//!
//! # Types to know
//!
//! - [`Libfabric`], which [`Builder`] creates: the provider.
//! - [`FabricDomain`]: the domain, and its lock for programs that open it without `FI_THREAD_SAFE`.
//! - [`FabricMr`]: keys and descriptors for requests of other code.
//! - [`Settings`]: the endpoint of one region.
//!
//! # Translation
//!
//! | hmem | libfabric |
//! |---|---|
//! | [`Access`](hmem_core::Access) | the access bits, which have equal values |
//! | REMOTE_RMA_WRITE | REMOTE_WRITE if the domain has no `FI_ATOMIC`; otherwise Unsupported |
//! | REMOTE_ATOMIC | Unsupported unless the request also has a right to write |
//! | region of several ranges | one `fid_mr` for each range |
//! | requested key | `requested_key`; a random number if the request names none |
//! | authorization key | `auth_key`; Unsupported if the domain has none |
//! | dma-buf | `FI_MR_DMABUF` (since API version 1.20) |
//! | peer memory | `iface` and `device` |
//! | staged memory | nothing: only the staging buffers are registered |
//! | ENDPOINT mode | the provider binds and enables each region |
//!
//! The mode bits other than ENDPOINT are those of the application: it offers them in
//! [`DomainAttr::mr_mode`](hmem_core::DomainAttr::mr_mode). The provider lists a NIC without mode
//! bits if libfabric agrees, and otherwise with those that libfabric needs.
//!
//! # Endpoints
//!
//! - Each endpoint has a `fid_cq` and an address vector of its own. A completion queue of hmem
//!   collects the completions of its endpoints.
//! - A request is cut into parts of one remote range. A part that libfabric does not take yet waits
//!   in the provider, and progress posts it.
//! - Immediate data has 32 bits. libfabric's writes with data consume no receive, so the target's
//!   provider cancels the next receive and reports it as consumed.
//! - The target learns the length of a write with immediate data. If libfabric carries 64 bits of
//!   data, the upper 32 bits carry the length. If libfabric carries 32 bits (verbs), libfabric
//!   reports the length since 1.18, and a write that needs several calls is refused.
//! - Over `verbs`, a refused access ends the connection. libfabric 1.19 and later connects again.
//!   With an earlier libfabric, the endpoint cannot reach that peer any more.
//! - Providers over TCP end the connection if the target refuses an access, which looks like the
//!   end of the peer. So the name of each endpoint has a key of 8 bytes in its domain. The provider
//!   reads these bytes after such a failure: if the read succeeds, the peer has refused the access.
//! - Peers over shared memory are watched by their process. The shared-memory files of a dead
//!   process are removed.
//! - Device memory that libfabric does not reach moves through staging buffers, by
//!   [`hmem_p2p::staging`]: RMA in chunks, and a message as a whole. A staged request counts once
//!   for the depth of its endpoint. Peers do not reach such memory, and atomics on it are refused.
//! - Staged requests keep the order of posts to a peer, even if the NIC keeps none. Immediate data
//!   is posted when the other parts of the write have ended. A failed copy cancels the requests to
//!   the same peer that wait behind the staged request.
//! - In a domain without LOCAL mode, libfabric gets only the remote rights of host memory, and
//!   requests have no descriptors of it. The reason is `ofi_rxm`, which gives peers the local
//!   rights too. It cannot keep two regions without remote rights, so it gets the right of peers to
//!   read such a region, under a random key that is kept from them.
//! - Local requests refuse a dma-buf whose iface libfabric does not know. With local rights alone,
//!   such memory is staged.
//! - A message or a receive names memory of one device, or of the host alone.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`: functions and layouts of libfabric
//! - `errors`, `own_cache`: error numbers; libfabric's own registration cache
//! - `library`
//! - `attr`, `settings`
//! - `region`, `staging`: regions; the staging buffers
//! - `open`: an open `fid_domain` with its lock
//! - `peer_name`, `queue`: names of endpoints; completion queues
//! - `plan`: requests cut into parts
//! - `part`: posts of parts
//! - `objects`: libfabric's objects of an endpoint
//! - `fellows`: the endpoints of the process
//! - `listing`: the NICs that libfabric lists
//! - `hub`
//! - `endpoint_state`, `request_plan`: the state of an endpoint; checks of requests
//! - `engine`: requests in flight
//! - `transport`: handles of endpoints and queues
//! - `domain`
//! - `mr`
//! - `provider`
//!
//! # Limits
//!
//! - The provider stages no memory and opens no endpoint in a domain of the program.
//! - NICs that need both LOCAL and ENDPOINT have no staged copies.
//! - A peer that hangs keeps the staging buffers of requests to it in use, until they are canceled
//!   with their endpoint. Over `shm`, the buffers of a closed endpoint stay in use until all
//!   endpoints of the process are closed.
//! - Endpoints have no authorization keys, receives accept every peer, and queues have no fd.
//! - NICs that need MMU_NOTIFY or RMA_EVENT are not listed.
//! - Regions have no memory windows, no refresh and no sub-regions.
//! - A region of several ranges cannot have a requested key.
//! - Over `ofi_rxm`, SEND also lets peers read the region, and `shm` does not check keys
//!   (`docs/fi_mr-deviations.md`).

#![deny(unsafe_code)]

mod attr;
mod domain;
mod endpoint_state;
mod engine;
mod errors;
mod fellows;
mod hub;
mod library;
mod listing;
mod mr;
mod objects;
mod open;
mod own_cache;
mod part;
mod peer_name;
mod plan;
mod provider;
mod queue;
mod region;
mod request_plan;
mod settings;
mod staging;
pub mod sys;
mod transport;

pub use domain::FabricDomain;
pub use mr::FabricMr;
pub use open::DomainGuard;
pub use provider::{Builder, Libfabric};
pub use settings::Settings;
