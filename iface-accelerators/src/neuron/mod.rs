//! AWS Neuron memory: tensors of Trainium and Inferentia devices.
//!
//! [`Neuron`] loads `libnrt.so.1` at run time. The runtime has no query for the owner of an
//! address, so the iface recognises two kinds of memory: memory that it allocated, and tensors that
//! the application announced ([`Announced::announce`], with a [`Tensor`]).
//!
//! In the crate `hmem` the iface needs the feature `neuron`, which is off by default.
//!
//! # Examples
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_accelerators::neuron::Neuron;
//!
//! match Neuron::open() {
//!     Ok(neuron) => println!("{} NeuronCores", neuron.devices()?.len()),
//!     Err(error) => println!("no Neuron device: {error}"),
//! }
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! Announcing a tensor that a framework allocated:
//!
//! ```no_run
//! use std::ffi::c_void;
//!
//! use hmem_core::{AddressRange, Allocation, DeviceId, Result};
//! use hmem_iface_accelerators::neuron::{Neuron, Tensor};
//!
//! fn announce(neuron: &Neuron, tensor: *mut c_void) -> Result<Allocation> {
//!     // SAFETY: the caller passes a live tensor.
//!     let (tensor, range) = unsafe { neuron.driver().tensor(tensor) }?;
//!     // SAFETY: the caller frees the tensor after `withdraw`, and after its regions are closed.
//!     unsafe { neuron.announce(range, DeviceId(0), tensor) }
//! }
//! ```
//!
//! # Ending
//!
//! Free the memory that the iface allocated and close the iface ([`Announced::close`]) before
//! `nrt_close`. After `nrt_close` no call may use a tensor.
//!
//! # The runtime
//!
//! `nrt_init` reserves the visible NeuronCores for this process. An application or its framework
//! calls it once. If they have not done so at the first allocation, the iface calls `nrt_init`, but
//! only with permission: [`Builder::start_runtime`] or `HMEM_NEURON_START_RUNTIME=1`. The runtime
//! then stays initialised until the process ends.
//!
//! # References
//! `nrt/nrt.h` and `nrt/nrt_status.h` of the package `aws-neuronx-runtime-lib`.
//!
//! # Limits
//!
//! The iface runs no models, and has no asynchronous copies. It has not been tested on a device.

mod causes;
mod driver;
mod error;
mod iface;
pub mod sys;

pub use causes::CAUSES;
pub use driver::{Runtime, Tensor};
pub use hmem_iface_kit::announced::Announced;
pub use iface::{Builder, Neuron};
