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
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`, `causes`: function table, layouts and constants; the causes of the driver's refusals
//! - `error`: driver codes as errors
//! - `driver`: the opened driver, its devices and contexts
//! - `lookup`: the allocation that contains an address, and the table of memory to release
//! - `lanes`: command lists, events and buffers for copies
//! - `allocate`, `copy`, `export`, `monitor`: one facet each
//! - `ipc`: exchange of allocations with other processes
//! - `iface`: [`LevelZero`], which combines the components
//!
//! # Devices
//!
//! A device's number is that of libfabric's `fi_hmem_ze_device`: the driver's index in bits 16 and
//! up, and the index of the root device below. A sub-device's memory counts as its root's.
//!
//! # Kinds of memory
//!
//! - `zeMemAllocDevice`: a dma-buf. The iface allocates such memory with
//!   `ze_external_memory_export_desc_t`. Memory that the application allocated without that
//!   description is exported if the driver supports the export. Small allocations without that
//!   description may come from a pool of the driver. Such allocations are neither exported nor
//!   cached: no call returns their place in the pool, and their identity is that of the pool.
//! - `zeMemAllocHost`: host pages.
//! - `zeMemAllocShared`: host pages. Shared memory migrates between host and device, and is never
//!   registered as device memory.
//!
//! # Contexts
//!
//! The iface has one context for each driver with a GPU. Level Zero looks up memory in a context.
//! The specification allows a driver not to know memory of other contexts; Intel's driver knows the
//! memory of all contexts.
//!
//! # Limits of this crate
//!
//! - The crate is tested on Intel's driver with a simulated GPU, which copies by the CPU and
//!   exports nothing. Exports are tested over a fake driver. The crate has not run on a GPU.
//! - Level Zero has no call that flushes the writes of NICs. Inbound writes count as visible to
//!   work that starts after their completion.
//! - Copies of memory that the application allocated in its own context rely on Intel's driver: the
//!   specification requires memory and command list of one context.
//! - It does not order copies after work on the application's queues.
//! - It does not unload the loader.

#![deny(unsafe_code)]

mod allocate;
mod causes;
mod copy;
mod driver;
mod error;
mod export;
mod iface;
mod ipc;
mod lanes;
mod lookup;
mod monitor;
pub mod sys;

pub use causes::CAUSES;
pub use iface::{Builder, LevelZero};
