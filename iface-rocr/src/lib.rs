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
//! - `runtime`, `table`: the opened runtime, its agents and devices; allocations that were seen
//! - `memory`: the allocation around an address
//! - `allocate`, `copy`, `export`, `ipc`, `monitor`: one facet each
//! - `iface`: [`Rocr`], which opens the runtime and holds the components
//!
//! # Kinds of memory
//!
//! - Pools of a GPU, coarse- and fine-grained (`hsa_amd_memory_pool_allocate`, `hipMalloc`): device
//!   memory. Dma-bufs, or peer memory.
//! - Pools of a CPU (`hipHostMalloc`): page-locked host memory. Host pages.
//! - Locked host memory (`hsa_amd_memory_lock`, `hipHostRegister`): the application's own, which is
//!   registered and monitored as system memory.
//! - Reserved addresses (`hsa_amd_vmem_*`): virtual memory. This iface's own is exported by its
//!   handle and never cached. Other such memory is refused by name, since the runtime does not say
//!   where it begins.
//! - Memory of another process: opened by this iface, it ends with `ipc_close`; opened by others, it
//!   is never cached.
//! - Managed memory (`hipMallocManaged`) is host pages with attributes, unknown to the runtime's
//!   lookup: system memory.
//!
//! # Identities
//!
//! The runtime has none. An allocation gets one here when it is seen for the first time, together
//! with a deallocation callback, of which it has one at most. The callback ends the identity and
//! invalidates what is cached. Callbacks are not deregistered: the runtime would take those of
//! another iface of the process with them. One that comes after the iface was closed does nothing.
//!
//! # Limits of this crate
//!
//! - It holds one count of the runtime, and never unloads the library.
//! - It does not order copies behind work of the application.
//! - Sides of a copy on one device must not overlap.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod allocate;
mod causes;
#[allow(unsafe_code)]
mod copy;
mod error;
#[allow(unsafe_code)]
mod export;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod ipc;
#[allow(unsafe_code)]
mod memory;
mod monitor;
#[allow(unsafe_code)]
mod runtime;
#[allow(unsafe_code)]
pub mod sys;
#[allow(unsafe_code)]
mod table;

pub use causes::CAUSES;
pub use iface::{Builder, Rocr};
