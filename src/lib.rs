//! `hmem` registers memory of any kind (host, CUDA, ROCr, Level Zero, Neuron, Gaudi, plug-ins) with
//! RDMA hardware, and says why it did so the way it did.
//!
//! An application names a buffer or a range and gets back a memory region whose keys a NIC accepts,
//! over the best path that this machine allows, with the reason for that path kept at the region.
//! Nothing needs a vendor's SDK to build; vendor libraries are loaded at run time, and an absent
//! one is a typed error.
//!
//! # Things this library does not do
//!
//! It picks no provider by itself (the software NIC is opt-in, never a substitute for hardware),
//! keeps no process-wide state but what the operating system has one of (patched C library
//! functions, while a cache's monitor runs), starts no thread before an event queue, a progress
//! thread, a copy engine or a registration cache is asked for, and prints nothing: it logs through
//! `tracing`.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `env`
//! - `builder`
//! - `nearest`

#![deny(unsafe_code)]

mod builder;
mod env;
mod nearest;

pub use builder::{Builder, Hmem};
pub use hmem_core::*;
#[cfg(feature = "cuda")]
pub use hmem_iface_cuda as cuda;
#[cfg(feature = "neuron")]
pub use hmem_iface_neuron as neuron;
#[cfg(feature = "rocr")]
pub use hmem_iface_rocr as rocr;
#[cfg(feature = "synapseai")]
pub use hmem_iface_synapseai as synapseai;
pub use hmem_iface_system as system;
#[cfg(feature = "ze")]
pub use hmem_iface_ze as ze;
pub use hmem_p2p as p2p;
pub use hmem_provider_loopback as loopback;
#[cfg(feature = "verbs")]
pub use hmem_provider_verbs as verbs;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
#[derive(Debug)]
pub struct Readme;
