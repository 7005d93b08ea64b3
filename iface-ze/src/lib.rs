//! oneAPI Level Zero memory for `hmem`.
//!
//! [`LevelZero`] is the [`Iface`](hmem_core::Iface) over the loader library, `libze_loader.so.1`,
//! which is loaded at run time: building needs no SDK, and a machine without the loader gets an
//! error of kind [`Unavailable`](hmem_core::ErrorKind::Unavailable) that names the library.
//!
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_ze::LevelZero;
//!
//! match LevelZero::open() {
//!     Ok(level_zero) => println!("{:?}", level_zero.devices()?),
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
//! - `iface`: [`LevelZero`], which opens the driver and implements the trait
//!
//! # Things this crate does not do
//!
//! It lists devices and answers which allocation an address lies in. It does not yet allocate,
//! copy, export or monitor: those are errors of kind
//! [`Unsupported`](hmem_core::ErrorKind::Unsupported), and
//! [`Capability`](hmem_core::iface::Capability) says so. Its devices are root devices; a
//! sub-device's memory counts as its root's. It holds one context for each driver that has a GPU,
//! since addresses can't be looked up without one, and never unloads the loader.

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
pub use iface::{Builder, LevelZero};
