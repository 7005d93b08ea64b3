//! Bindings of libfabric.so.1: its exported functions, and the layouts and constants of
//! `rdma/fabric.h`, `fi_domain.h`, `fi_endpoint.h`, `fi_rma.h`, `fi_tagged.h`, `fi_atomic.h`,
//! `fi_eq.h` and `fi_cm.h`, written by hand.
//!
//! libfabric exports only a few functions. Every other call is an inline function of a header,
//! which calls through an object's table of function pointers, and this crate does the same.
//!
//! The module is public so that a caller can inject another libfabric with
//! [`Functions::from_lookup`].
//!
//! ```
//! use hmem_provider_libfabric::sys::Functions;
//!
//! // SAFETY: the lookup returns no address, so the safety rules for addresses hold.
//! let error = unsafe { Functions::from_lookup(|_| None) }.unwrap_err();
//! assert_eq!(error.context_value("symbol"), Some("fi_version"));
//! ```

mod basic;
mod functions;
mod layout;
mod transfer;

pub use self::{basic::*, functions::Functions, layout::*, transfer::*};
