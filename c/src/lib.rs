//! The C interface of `hmem`.
//!
//! C and C++ programs include the header `hmem.h` and link `libhmem.so` or `libhmem.a`. `install`
//! in this folder (`cargo xtask c-install PREFIX`) installs them with a pkg-config file. The page
//! `docs/c.md` shows their use. Rust programs use the crate `hmem` instead.
//!
//! ```
//! use std::ptr;
//!
//! use hmem_c::{HMEM_REMOTE_READ, domain::*, library::*, region::*};
//!
//! let mut bytes = vec![0_u8; 4096];
//! let attr = hmem_open_attr {
//!     size: size_of::<hmem_open_attr>(),
//!     flags: HMEM_OPEN_SOFTWARE,
//! };
//! let nic = c"loopback/hardware".as_ptr();
//! let (mut library, mut domain, mut region) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
//! // SAFETY: the handles are used until they are closed, and the memory outlives the region.
//! unsafe {
//!     assert!(hmem_open(&attr, &mut library).is_null());
//!     assert!(hmem_domain_open(library, nic, ptr::null(), &mut domain).is_null());
//!     let (address, access) = (bytes.as_mut_ptr() as u64, HMEM_REMOTE_READ);
//!     let registered = hmem_register(domain, address, 4096, access, ptr::null(), &mut region);
//!     assert!(registered.is_null());
//!     assert!(hmem_region_close(region).is_null());
//!     assert!(hmem_domain_close(domain).is_null());
//!     hmem_close(library);
//! }
//! ```
//!
//! # Conventions
//!
//! - A function that can fail returns null, or an error object of type [`error::hmem_error`].
//! - Objects are opaque. A null object, an object of another type and, in most cases, a closed
//!   object is refused with [`HMEM_KIND_INVALID_ARGUMENT`](error::hmem_kind::InvalidArgument).
//! - A structure that may grow has its size in the first field. A zero field means the default.
//! - No panic leaves a function: it becomes an error of the kind
//!   [`HMEM_KIND_PANIC`](error::hmem_kind::Panic).
//!
//! # Things this crate does not do
//!
//! - It posts no transfers. Programs post requests themselves, with the keys of the regions.
//! - It has no type 2 windows, which need posted requests.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `error`, `owner`
//! - `call`
//! - `library`
//! - `domain`
//! - `region`
//! - `window`

#![deny(unsafe_code)]
#![allow(non_camel_case_types, reason = "the names are those of the C header")]

mod call;
pub mod domain;
pub mod error;
pub mod library;
pub mod owner;
pub mod region;
pub mod window;

use hmem::Access;

/// The region may be the destination of reads that this process posts.
pub const HMEM_READ: u64 = 1 << 8;
/// The region may be the source of writes that this process posts.
pub const HMEM_WRITE: u64 = 1 << 9;
/// Messages may be received in the region.
pub const HMEM_RECV: u64 = 1 << 10;
/// Messages may be sent from the region.
pub const HMEM_SEND: u64 = 1 << 11;
/// Peers may read the region.
pub const HMEM_REMOTE_READ: u64 = 1 << 12;
/// Peers may write the region and apply atomics to it.
pub const HMEM_REMOTE_WRITE: u64 = 1 << 13;
/// Memory windows may be bound to the region.
pub const HMEM_MW_BIND: u64 = 1 << 14;
/// Peers may apply atomics to the region, but not write it.
pub const HMEM_REMOTE_ATOMIC: u64 = 1 << 15;

// The numbers are those of the Rust library.
const _: () = assert!(
    HMEM_READ == Access::READ.bits()
        && HMEM_WRITE == Access::WRITE.bits()
        && HMEM_RECV == Access::RECV.bits()
        && HMEM_SEND == Access::SEND.bits()
        && HMEM_REMOTE_READ == Access::REMOTE_READ.bits()
        && HMEM_REMOTE_WRITE == Access::REMOTE_WRITE.bits()
        && HMEM_MW_BIND == Access::MW_BIND.bits()
        && HMEM_REMOTE_ATOMIC == Access::REMOTE_ATOMIC.bits()
);
