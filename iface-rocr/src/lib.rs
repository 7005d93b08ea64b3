//! AMD ROCr memory for `hmem`.
//!
//! [`Rocr`] is the [`Iface`](hmem_core::Iface) over the HSA runtime library,
//! `libhsa-runtime64.so.1`, which is loaded at run time: building needs no SDK, and a machine
//! without the runtime gets an error of kind [`Unavailable`](hmem_core::ErrorKind::Unavailable)
//! that names the library.
//!
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_rocr::Rocr;
//!
//! match Rocr::open() {
//!     Ok(rocr) => println!("{:?}", rocr.devices()?),
//!     Err(error) => {
//!         assert!(error.is_unavailable());
//!         println!("{error}");
//!     }
//! }
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `sys`, `causes`: function table, layouts and constants; the meaning of the driver's refusals
//! - `error`: driver codes as errors
//! - `memory`: the allocation around an address
//! - `iface`: [`Rocr`], which opens the driver and implements the trait
//!
//! # Things this crate does not do
//!
//! It lists devices and answers which allocation an address lies in. It does not yet allocate,
//! copy, export or monitor: those are errors of kind
//! [`Unsupported`](hmem_core::ErrorKind::Unsupported), and
//! [`Capability`](hmem_core::iface::Capability) says so. Allocations have no identity: the runtime
//! gives none, and only its deallocation callbacks tell a reused address. Reserved address ranges
//! (`hsa_amd_vmem_*`) are refused by name, since the runtime does not say where they begin. It
//! holds one count of the runtime's own, and never unloads the library.

#![deny(unsafe_code)]

mod causes;
mod error;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod memory;
#[allow(unsafe_code)]
pub mod sys;

pub use causes::CAUSES;
pub use iface::{Builder, Rocr};
