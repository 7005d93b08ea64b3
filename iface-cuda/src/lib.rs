//! NVIDIA CUDA memory for `hmem`.
//!
//! [`Cuda`] is the [`Iface`](hmem_core::Iface) over the driver library, `libcuda.so.1`, which is loaded at run time:
//! building needs no SDK, and a machine without the driver gets an error of kind
//! [`Unavailable`](hmem_core::ErrorKind::Unavailable) that names the library. `libcuda.so` is never looked for: on a
//! machine with the toolkit it may be a stub. What the driver and a device can do is found out from symbols and device
//! attributes, and by doing; version numbers are not asked.
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
//! | `iface` | [`Cuda`]: opening, the trait |
//! | [`sys`] | the function table, layouts and constants |
//! | `driver` | what one opened iface shares: functions, devices, what is to be given back |
//! | `device` | devices and their abilities |
//! | `context` | contexts retained when needed, current only while a call runs |
//! | `memory` | the allocation around an address, segments |
//! | `allocate` | allocating every kind, freeing, page-locking |
//! | `copy` | copies |
//! | `export`, `ipc` | dma-buf, peer memory, flushing; other processes |
//! | `monitor` | noticing frees: which of identity and hooks is relied on |
//! | `hooks` | the driver's frees, hooked |
//! | `cudarc` | slices of the `cudarc` crate as buffers (cargo feature `cudarc`) |
//! | [`gdrcopy`] | the CPU's own access to device memory, where GDRCopy is there |
//! | `error` | driver codes as errors |
//!
//! # Kinds of memory
//!
//! | memory | told by | given to a NIC as |
//! |---|---|---|
//! | `cuMemAlloc` | a context, no pool | dma-buf or peer memory, SYNC_MEMOPS set on the allocation |
//! | `cuMemAllocAsync` | its pool | the same, SYNC_MEMOPS set on the context |
//! | `cuMemCreate`, `cuMemMap` | neither context nor pool | one export for each mapping; refused, naming it, at the first that was not created GPUDirect RDMA capable; never cached |
//! | `cuMemHostAlloc` | host memory with flags | host pages |
//! | `cuMemHostRegister` | host memory without | host pages, by the rules of system memory, which it is |
//! | `cuMemAllocManaged` | the managed attribute | host pages: it migrates, and is never registered as device memory |
//! | `cuIpcOpenMemHandle` through this iface | the iface's book | an export is tried; `cuda.h` promises none |
//!
//! # Things this crate does not do
//!
//! It never changes the calling thread's current context beyond a call, creates no context for a query, and retains a
//! device's primary context only when memory of the device is worked on. It does not unload the driver library. Its
//! hooks do not see every free that reaches the driver from elsewhere: identities tell of them. It does not order copies behind the
//! application's streams.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod allocate;
#[allow(unsafe_code)]
mod context;
#[allow(unsafe_code)]
mod copy;
#[cfg(feature = "cudarc")]
#[allow(unsafe_code)]
pub mod cudarc;
#[allow(unsafe_code)]
mod device;
mod driver;
mod error;
#[allow(unsafe_code)]
mod export;
#[allow(unsafe_code)]
pub mod gdrcopy;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
#[allow(unsafe_code)]
mod hooks;
#[cfg(not(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "no_hooks.rs"]
mod hooks;
#[allow(unsafe_code)]
mod iface;
#[allow(unsafe_code)]
mod ipc;
#[allow(unsafe_code)]
mod memory;
mod monitor;
#[allow(unsafe_code)]
pub mod sys;

pub use hooks::FreeHooks;
pub use iface::{Builder, Cuda};
pub use monitor::MonitorKind;
