//! AWS Neuron memory: tensors of Trainium and Inferentia devices.
//!
//! [`Neuron`] loads `libnrt.so.1` at run time. The runtime has no call that tells whose an address
//! is, so the iface knows the memory that it allocated and the tensors that the application
//! announced ([`Announced::announce`], with a [`Tensor`]).
//!
//! # Examples
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_neuron::Neuron;
//!
//! match Neuron::open() {
//!     Ok(neuron) => println!("{} NeuronCores", neuron.devices()?.len()),
//!     Err(error) => println!("no Neuron device: {error}"),
//! }
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! A tensor that a framework allocated is announced while it lives:
//!
//! ```no_run
//! use std::ffi::c_void;
//!
//! use hmem_core::{AddressRange, Allocation, DeviceId, Result};
//! use hmem_iface_neuron::{Neuron, Tensor};
//!
//! fn announce(neuron: &Neuron, tensor: *mut c_void) -> Result<Allocation> {
//!     // SAFETY: a live tensor.
//!     let (tensor, range) = unsafe { neuron.driver().tensor(tensor) }?;
//!     // SAFETY: the caller frees the tensor after `withdraw`, and after its regions are closed.
//!     unsafe { neuron.announce(range, DeviceId(0), tensor) }
//! }
//! ```
//!
//! # Ending
//!
//! Drop the iface, and free what it allocated, before `nrt_close`: no call on a tensor may follow it.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `sys`: the function table and constants
//! - `causes`: the meaning of refusals
//! - `error`: the runtime's codes as errors
//! - `driver`: the calls behind the iface
//! - `iface`: [`Neuron`]
//!
//! # The runtime
//!
//! `nrt_init` takes the visible NeuronCores for this process. An application or its framework calls
//! it once. The iface calls it only if [`Builder::start_runtime`] or `HMEM_NEURON_START_RUNTIME=1`
//! asks for it, when memory is first allocated; the runtime then stays up until the process ends.
//!
//! # References
//! `nrt/nrt.h` and `nrt/nrt_status.h` of the package `aws-neuronx-runtime-lib`.
//!
//! # Things this crate does not do
//!
//! It runs no models, and copies nothing asynchronously. It has not been tested on a device.

#![deny(unsafe_code)]

mod causes;
#[allow(unsafe_code)]
mod driver;
mod error;
mod iface;
#[allow(unsafe_code)]
pub mod sys;

pub use causes::CAUSES;
pub use driver::{Runtime, Tensor};
pub use hmem_iface_announced::Announced;
pub use iface::{Builder, Neuron};
