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
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`, `causes`: function table, layouts and constants; the causes of the runtime's refusals
//! - `error`: the runtime's codes as errors
//! - `driver`, `table`: the opened runtime with its agents and devices; the known allocations
//! - `lookup`: the allocation that contains an address
//! - `allocate`, `copy`, `export`, `ipc`, `monitor`: one facet each
//! - `iface`: [`Rocr`], which opens the runtime and combines the components
//!
//! # Kinds of memory
//!
//! Kinds of memory, with the path to a NIC:
//!
//! - Pools of a GPU, coarse- and fine-grained (`hsa_amd_memory_pool_allocate`, `hipMalloc`): device
//!   memory, which NICs reach by dma-buf or peer memory.
//! - Pools of a CPU (`hipHostMalloc`): page-locked host memory, registered as host pages.
//! - Locked host memory (`hsa_amd_memory_lock`, `hipHostRegister`): pages of the application,
//!   registered and monitored as system memory.
//! - Reserved addresses (`hsa_amd_vmem_*`): VMM memory. If the iface allocated the memory, exports
//!   use the handle of the physical memory, and registrations are never cached. If the application
//!   allocated the memory, an export is refused with an error that says so, since the runtime does
//!   not report the first address of the memory.
//! - Memory of another process, or of a graphics API: NICs reach it as peer memory. An export as
//!   dma-buf is refused, because the runtime would crash. Registrations are cached only if this
//!   iface opened the memory, and until `ipc_close`.
//! - Managed memory (`hipMallocManaged`): host pages with attributes. The runtime's lookup does not
//!   know this memory, so it counts as system memory.
//!
//! # Identities
//!
//! The runtime has no identities. At the first lookup of a pool allocation, the iface assigns an
//! identity to the allocation, and registers one deallocation callback. The callback ends the
//! identity and invalidates cached registrations. The iface never deregisters a callback, since
//! that would also remove the callbacks of another iface in the process. A callback after the iface
//! was closed does nothing. If the runtime has no deallocation callbacks, the iface has no
//! identities and no monitor.
//!
//! # Limits of this crate
//!
//! - It holds one reference to the runtime (`hsa_init`), and never unloads the library.
//! - It does not order copies after work of the application.
//! - The two sides of a copy on one device must not overlap.

#![deny(unsafe_code)]

mod allocate;
mod causes;
mod copy;
mod driver;
mod error;
mod export;
mod iface;
mod ipc;
mod lookup;
mod monitor;
pub mod sys;
mod table;

pub use causes::CAUSES;
pub use iface::{Builder, Rocr};
