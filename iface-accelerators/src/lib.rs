//! Memory of accelerators whose drivers cannot tell which allocation an address belongs to: AWS
//! Neuron and Intel Gaudi.
//!
//! Each iface is a module with a cargo feature of its name. Both features are off by default, since
//! neither iface has been tested on a device:
//!
//! - `neuron`: AWS Trainium and Inferentia, through `libnrt.so.1`
//! - `synapseai`: Intel Gaudi, through `libSynapse.so` and `libhl-thunk.so`
//!
//! An iface recognises the memory that it allocated, and the memory that the application announced
//! ([`Announced::announce`](hmem_iface_kit::announced::Announced::announce)). The crate
//! `hmem-iface-kit` has the code that both share.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `neuron/sys`, `synapseai/sys`: function tables and constants
//! - `neuron/causes`, `synapseai/causes`: causes of refusals
//! - `neuron/error`, `synapseai/error`: errors for the runtime's codes
//! - `synapseai/copy`: copies through a page-locked buffer
//! - `neuron/driver`, `synapseai/driver`: the calls of the libraries
//! - `neuron/iface`, `synapseai/iface`: the type of the iface, and the builder that opens it
//! - `neuron`, `synapseai`: one iface each

#![deny(unsafe_code)]

#[cfg(feature = "neuron")]
pub mod neuron;
#[cfg(feature = "synapseai")]
pub mod synapseai;
