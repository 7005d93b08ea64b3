//! Intel Gaudi memory (SynapseAI): Gaudi 2 and later.
//!
//! [`SynapseAi`] loads `libSynapse.so` at run time, and `libhl-thunk.so` for dma-bufs. The runtime
//! has no query for the owner of an address, so the iface recognises two kinds of memory: memory
//! that it allocated, and buffers that the application announced ([`Announced::announce`]).
//!
//! In the crate `hmem` the iface needs the feature `synapseai`, which is off by default.
//!
//! # Examples
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_accelerators::synapseai::SynapseAi;
//!
//! match SynapseAi::open() {
//!     Ok(gaudi) => println!("{} Gaudi device", gaudi.devices()?.len()),
//!     Err(error) => println!("no Gaudi device: {error}"),
//! }
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! Announcing a buffer that a framework allocated:
//!
//! ```no_run
//! use hmem_core::{AddressRange, Allocation, DeviceId, Result};
//! use hmem_iface_accelerators::synapseai::SynapseAi;
//!
//! fn announce(gaudi: &SynapseAi, buffer: AddressRange) -> Result<Allocation> {
//!     // SAFETY: `synDeviceMalloc` returned `buffer`. The caller frees it after `withdraw`, and
//!     // after its regions are closed.
//!     unsafe { gaudi.announce(buffer, DeviceId(0), ()) }
//! }
//! ```
//!
//! # The device
//!
//! A process acquires one Gaudi device. SynapseAI and the iface give this device the number 0. The
//! application or its framework acquires the device. If they have not done so at the first
//! allocation, the iface acquires a device, but only with permission: [`Builder::start_runtime`] or
//! `HMEM_SYNAPSEAI_START_RUNTIME=1`. The device then stays acquired until the process ends.
//!
//! Close the iface ([`Announced::close`]) before `synDeviceRelease`. The buffer and the stream that
//! the iface keeps for copies belong to the device. After the release, the runtime may reuse their
//! handles for objects of the next device.
//!
//! # References
//! `synapse_api.h` and `synapse_common_types.h` of the SynapseAI software, `hlthunk.h` of
//! [hl-thunk](https://github.com/HabanaAI/hl-thunk-open).
//!
//! # Limits
//!
//! The iface runs no graphs, and has no asynchronous copies. It refuses first-generation Gaudi,
//! where device addresses can equal host addresses. It has not been tested on a device.

mod causes;
mod copy;
mod driver;
mod error;
mod iface;
pub mod sys;

pub use causes::CAUSES;
pub use driver::Synapse;
pub use hmem_iface_kit::announced::Announced;
pub use iface::{Builder, HLTHUNK_LIBRARY_VARIABLE, SynapseAi};
