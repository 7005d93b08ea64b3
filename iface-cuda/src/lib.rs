//! NVIDIA CUDA memory for `hmem`.
//!
//! [`Cuda`] is the [`Iface`](hmem_core::Iface) over the driver library, `libcuda.so.1`, which is
//! loaded at run time: building needs no SDK, and a machine without the driver gets an error of
//! kind [`Unavailable`](hmem_core::ErrorKind::Unavailable) that names the library. `libcuda.so` is
//! never looked for: on a machine with the toolkit it may be a stub. What the driver and a device
//! can do is found out from symbols and device attributes, and by doing; version numbers are not
//! asked.
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
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `sys`, `causes`: the function table, layouts and constants of the driver; the meaning of its
//!   refusals
//! - `error`: the driver's codes as errors
//! - `hooks`, `no_hooks`: hooks of the driver's frees ([`FreeHooks`])
//! - `driver`: the opened driver, its functions and devices; read only
//! - `table`, `streams`: allocations and page-locked ranges to release; streams and events
//! - `context`: primary contexts, and the context that a call works in
//! - `lookup`: the allocation around an address
//! - `segments`, `monitor`: parts of a range; detection of frees ([`CudaMonitorKind`])
//! - `allocate`, `page_lock`, `copy`, `flush`, `ipc`: one facet each
//! - `export`: dma-bufs and peer memory
//! - `iface`: [`Cuda`], which holds the components
//! - `gdrcopy`, `cudarc`: access of the CPU to device memory by GDRCopy; slices of the `cudarc`
//!   crate as buffers (cargo feature `cudarc`)
//!
//! # Kinds of memory
//!
//! | memory | told by | given to a NIC as |
//! |---|---|---|
//! | `cuMemAlloc` | a context, no pool | dma-buf or peer memory, SYNC_MEMOPS set on the allocation |
//! | `cuMemAllocAsync` | its pool | the same, SYNC_MEMOPS set on the context |
//! | `cuMemCreate`, `cuMemMap` | no pool; no context, or no legacy IPC handle and a VMM one | one dma-buf for the range, or else one for each mapping; refused, naming it, at the first that was not created GPUDirect RDMA capable; never cached |
//! | `cuMemHostAlloc` | host memory with flags | host pages |
//! | `cuMemHostRegister` | host memory without | host pages, by the rules of system memory, which it is |
//! | `cuMemAllocManaged` | the managed attribute | host pages: it migrates, and is never registered as device memory |
//! | `cuIpcOpenMemHandle` through this iface | the iface's table | an export is tried; `cuda.h` promises none |
//!
//! # Contexts
//!
//! No call needs a current context on the calling thread, and each leaves the one that is there. A
//! device's primary context is made only where nobody has it and nothing else will do:
//!
//! | work | in | afterwards |
//! |---|---|---|
//! | allocating, opening another process's memory | the primary context | retained until the iface closes, unless refused |
//! | copies | the memory's own context; for memory of none the primary one that somebody has, else the thread's | a primary one is retained for its streams, unless the copy is refused |
//! | segments, exports, handles for other processes | the memory's own; for memory of none the thread's, else the primary one | given back |
//! | SYNC_MEMOPS of memory that cannot have it by itself | the memory's own; for memory of none the thread's and the primary one that somebody has, and a warning where neither is there | a primary one is retained, with its flag |
//! | page-locking | a primary one that somebody has, else the thread's, else the first device's | retained, unless refused; in the thread's the page-locking goes with it |
//! | flushing inbound writes, where the device does not order them | each context whose memory was handed to a NIC and is still there, and the primary one that somebody has; where such memory has no context, and where none is found, the thread's too, and for such memory a primary one at last | a primary one is retained, so that the next flush asks for none |
//! | queries, where the driver wants a context | the thread's, else a primary one that somebody has; none is made | given back |
//!
//! SYNC_MEMOPS of a context is for what is started in that context: other contexts that work on
//! memory of none are not covered. The first time the flag is set what is under way on the
//! context's default stream is waited for; what is on per-thread default streams and on others is
//! not.
//!
//! Registering tries no page of its own on a device whose primary context nobody has
//! ([`Allocator::is_device_active`](hmem_core::iface::Allocator::is_device_active)).
//!
//! The thread's context is taken for memory of its device only. What is given back is so when the
//! last call that works in it ends, and destroyed if nobody else has it; nothing that is cached
//! dies of it.
//!
//! # Things this crate does not do
//!
//! It never changes the calling thread's current context beyond a call, and creates no context for
//! a query. It does not unload the driver library. Its hooks do not see every free that reaches the
//! driver from elsewhere: identities tell of them. It does not order copies behind the application'
//! s streams.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod allocate;
mod causes;
#[allow(unsafe_code)]
mod context;
#[allow(unsafe_code)]
mod copy;
#[cfg(feature = "cudarc")]
#[allow(unsafe_code)]
pub mod cudarc;
#[allow(unsafe_code)]
mod driver;
mod error;
#[allow(unsafe_code)]
mod export;
#[allow(unsafe_code)]
mod flush;
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
mod lookup;
mod monitor;
#[allow(unsafe_code)]
mod page_lock;
#[allow(unsafe_code)]
mod segments;
#[allow(unsafe_code)]
mod streams;
#[allow(unsafe_code)]
pub mod sys;
mod table;

pub use causes::CAUSES;
pub use hooks::FreeHooks;
pub use iface::{Builder, Cuda};
pub use monitor::CudaMonitorKind;
