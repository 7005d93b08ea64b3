//! A test suite of the behaviours that every iface and every provider has.
//!
//! The author of a plug-in runs the suite as a test binary of the plug-in's crate (`harness =
//! false` in the manifest). `docs/adding-an-iface.md` and `docs/adding-a-provider.md` are the
//! guides for such authors.
//!
//! ```
//! use std::{process::ExitCode, sync::Arc};
//!
//! use hmem_conformance::Suite;
//! use hmem_iface_system::Simulated;
//! use hmem_provider_loopback::Loopback;
//!
//! fn main() -> ExitCode {
//!     let mut suite = Suite::from_args();
//!     suite.iface("simulated", || Ok(Arc::new(Simulated::builder().build()?)));
//!     suite.provider("loopback", || Ok(Arc::new(Loopback::builder().build()?)));
//!     suite.run()
//! }
//! ```
//!
//! Each behaviour is a trial. [`Suite`] runs the trials as a test binary does. [`iface()`] and
//! [`provider()`] return them for a runner of your own. A behaviour that cannot be tested, because
//! the back end lacks a facet for example, is reported as ignored with the reason. The name of a
//! behaviour is its rule. A failure also names the requirements that the behaviour tests, if any.
//! `docs/requirements.md` defines them.
//!
//! If every behaviour is ignored, because the driver's library is absent for example, the exit
//! status is 0. In continuous integration, let the function that opens the back end panic instead:
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use hmem_iface_system::Simulated;
//! # let mut suite = hmem_conformance::Suite::from_args();
//! suite.iface("simulated", || {
//!     let device = Simulated::builder().build();
//!     Ok(Arc::new(device.expect("continuous integration has the driver")))
//! });
//! ```
//!
//! The suite tests a provider with host memory and the simulated device, and an iface with the
//! software NIC.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `bytes`, `control`, `memory`, `stale`, `trial`
//! - `link`
//! - `iface`, `provider`
//! - `suite`
//!
//! # Features
//!
//! - `suite` (default): the behaviours and their test runner. Without it the crate has only the
//!   module [`stale`], which `hmem check` runs too.
//!
//! # Limits
//!
//! - Behaviours run one at a time, since they measure the address space of the process. Other
//!   threads must not map much memory meanwhile.
//! - Forked children are not tested.
//! - A provider is tested on its first NIC, which must reach itself.

#![deny(unsafe_code)]

#[cfg(feature = "suite")]
mod bytes;
#[cfg(feature = "suite")]
mod control;
#[cfg(feature = "suite")]
mod iface;
#[cfg(feature = "suite")]
pub mod link;
#[cfg(feature = "suite")]
mod memory;
#[cfg(feature = "suite")]
mod provider;
pub mod stale;
#[cfg(feature = "suite")]
mod suite;
#[cfg(feature = "suite")]
mod trial;

#[cfg(feature = "suite")]
pub use control::{Call, TestControl};
#[cfg(feature = "suite")]
pub use suite::{Controlled, Suite, Trial, iface, provider};

#[cfg(all(doctest, feature = "suite"))]
#[doc = include_str!("../../docs/adding-an-iface.md")]
struct AddingAnIface;

#[cfg(all(doctest, feature = "suite"))]
#[doc = include_str!("../../docs/adding-a-provider.md")]
struct AddingAProvider;
