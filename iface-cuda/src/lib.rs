//! NVIDIA CUDA memory for `hmem`.
//!
//! [`Cuda`] is the [`Iface`](hmem_core::Iface) over the driver library, `libcuda.so.1`, which is
//! loaded at run time: building needs no SDK, and a machine without the driver gets an error of
//! kind [`Unavailable`](hmem_core::ErrorKind::Unavailable) that names the library. `libcuda.so` is
//! loaded only if the application names this file, which may be a stub on a machine with the
//! toolkit. The crate finds the abilities of a driver or device by symbols, attributes and
//! attempted calls. The crate compares no version numbers.
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
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`, `causes`: the function table, layouts and constants of the driver; the causes of its
//!   refusals
//! - `error`: the driver's codes as errors
//! - `hooks`: hooks of the driver's frees ([`FreeHooks`])
//! - `driver`, `handles`: the opened driver, with functions and devices that never change; handles
//!   and mappings of physical memory
//! - `table`, `streams`: allocations and page-locked ranges to release; streams and events
//! - `context`: primary contexts, and the context that is current during a call
//! - `lookup`: the allocation that contains an address
//! - `segments`: parts of a range; memory that an application mapped by hand, and its changes
//! - `monitor`: detection of frees ([`CudaMonitorKind`])
//! - `allocate`, `copy`, `flush`, `ipc`: one facet each; page-locking of host memory in `allocate`
//! - `export`: dma-bufs and peer memory
//! - `iface`: [`Cuda`], which combines the components
//! - `gdrcopy`, `cudarc`: CPU access to device memory by GDRCopy; slices of the `cudarc` crate as
//!   buffers (cargo feature `cudarc`)
//!
//! # Kinds of memory
//!
//! Kinds of memory, with the attributes that identify the kind and the path to a NIC:
//!
//! - `cuMemAlloc` (a context, no pool): dma-buf or peer memory, with SYNC_MEMOPS set on the
//!   allocation.
//! - `cuMemAllocAsync` (a pool): dma-buf or peer memory, with SYNC_MEMOPS set on the context.
//! - `cuMemCreate` and `cuMemMap` (no pool, and either no context, or a VMM handle and no legacy
//!   IPC handle): one dma-buf for the range, or else one for each mapping. A mapping that was not
//!   created GPUDirect RDMA capable is refused; the error names the first one.
//! - `cuMemHostAlloc` (host memory with flags): host pages.
//! - `cuMemHostRegister` (host memory without flags): host pages. The memory is registered and
//!   monitored as system memory.
//! - `cuMemAllocManaged` (the managed attribute): host pages. Managed memory migrates, and is never
//!   registered as device memory.
//! - `cuIpcOpenMemHandle` through this iface (an entry in the iface's table): the iface tries an
//!   export. `cuda.h` does not promise that the export succeeds.
//!
//! # Contexts
//!
//! No call needs a current context on the calling thread, unless the driver needs one for queries.
//! Each call leaves the thread's context as it was. A device's primary context is created only if
//! the call needs one and no other context serves. Each kind of call uses the contexts below. An
//! "active" primary context is one that the process already has. "The thread's" context is the one
//! that is current on the calling thread.
//!
//! - **Allocating, opening memory of another process**: the primary context. It stays retained
//!   until the iface closes, unless the call fails.
//! - **Copies**: the memory's own context. For memory without a context: the active primary
//!   context, else the thread's, else the primary one. A primary context stays retained for its
//!   streams, unless the copy fails.
//! - **Segments, exports, handles for other processes**: the memory's own context. For memory
//!   without a context: the thread's, else the primary one. The context is released afterwards.
//! - **SYNC_MEMOPS of memory that cannot have the attribute**: the memory's own context. For memory
//!   without a context: the thread's and the active primary one. If neither exists, a warning is
//!   logged. A primary context stays retained, with its flag.
//! - **Page-locking**: an active primary context, else the thread's, else the first device's
//!   primary one. A primary context stays retained, unless the call fails. In the thread's context,
//!   the page-locking ends when the application destroys that context.
//! - **Flushing inbound writes** (devices that do not order them): each context of live exported
//!   memory, and the active primary one. The thread's context is added if some exported memory has
//!   no context, or if no other context was found. If there is none of these contexts, but exported
//!   memory without a context: the primary one, which is created. A primary context stays retained
//!   for the next flush.
//! - **Queries, if the driver needs a context**: the thread's, else an active primary one. The
//!   primary one is released afterwards. No context is created. If neither exists, addresses count
//!   as unknown, and a flush for exported memory of an application's context fails.
//!
//! SYNC_MEMOPS of a context covers work that is started in that context. Work of other contexts on
//! memory without a context is not covered. Setting the flag for the first time waits for the
//! context's default stream, and for no other stream.
//!
//! Registering does not allocate a test page on a device whose primary context is not active
//! ([`Allocator::is_device_active`](hmem_core::iface::Allocator::is_device_active)).
//!
//! The thread's context is used for memory of its device only. A primary context that does not stay
//! retained is released when the last call that uses it ends. The driver destroys the context if no
//! other part of the process retains it. Neither the release nor the destruction invalidates a
//! cached registration.
//!
//! # Stream captures and callbacks
//!
//! Calls in a context run in the capture mode RELAXED (`cuThreadExchangeStreamCaptureMode`). So a
//! stream capture of another thread does not refuse them, and they do not invalidate the capture.
//! Afterwards the thread has its previous mode again.
//!
//! In a callback of a stream (`cuLaunchHostFunc`), the driver refuses every call, and so the iface
//! returns errors there. An event of a copy reports the copy as not done. Waiting for the event, or
//! dropping it, waits on another thread.
//!
//! # Limits of this crate
//!
//! - It never changes the calling thread's current context beyond a call, and creates no context
//!   for a query.
//! - It does not unload the driver library.
//! - Its hooks do not see every free by other code. Unless [`CudaMonitorKind::Hooks`] was selected,
//!   identities detect the other frees.
//! - It does not order copies behind the application's streams.

#![deny(unsafe_code)]

mod allocate;
mod causes;
mod context;
mod copy;
#[cfg(feature = "cudarc")]
pub mod cudarc;
mod driver;
mod error;
mod export;
mod flush;
pub mod gdrcopy;
mod handles;
#[cfg(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod hooks;
#[cfg(not(all(target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64"))))]
#[path = "hooks/unsupported.rs"]
mod hooks;
mod iface;
mod ipc;
mod lookup;
mod monitor;
mod segments;
mod streams;
pub mod sys;
mod table;

pub use causes::CAUSES;
pub use hooks::FreeHooks;
pub use iface::{Builder, Cuda};
pub use monitor::CudaMonitorKind;
