//! NVIDIA CUDA memory for `hmem`.
//!
//! [`Cuda`] is the [`Iface`](hmem_core::Iface) over the driver library, `libcuda.so.1`, which is loaded at run time:
//! building needs no SDK, and a machine without the driver gets an error of kind
//! [`Unavailable`](hmem_core::ErrorKind::Unavailable) that names the library. `libcuda.so` is never looked for: on a
//! machine with the toolkit it may be a stub.
//!
//! ```
//! use hmem_core::Iface;
//! use hmem_iface_cuda::Cuda;
//!
//! match Cuda::open() {
//!     Ok(cuda) => println!("{:?}", cuda.devices()?),
//!     Err(error) => {
//!         assert!(error.is_unavailable());
//!         println!("{error}");
//!     }
//! }
//! # Ok::<(), hmem_core::Error>(())
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `iface` | [`Cuda`]: opening, devices, the trait, driver codes as errors |
//! | [`sys`] | the function table, layouts and constants |
//! | `memory` | the allocation around an address; allocating |
//! | `copy` | copies |
//! | `export` | dma-buf, peer memory, IPC |
//! | `monitor` | noticing frees |
//!
//! # Things this crate does not do
//!
//! It lists devices and answers which allocation an address lies in. It does not yet allocate, copy, export or
//! monitor: those are errors of kind [`Unsupported`](hmem_core::ErrorKind::Unsupported), and
//! [`Capability`](hmem_core::iface::Capability) says so. It never creates or retains a CUDA context and never
//! changes the calling thread's current one. It never unloads the driver library.

#![deny(unsafe_code)]

mod copy;
mod export;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod memory;
mod monitor;
#[allow(unsafe_code)]
pub mod sys;

pub use iface::{Builder, Cuda};
