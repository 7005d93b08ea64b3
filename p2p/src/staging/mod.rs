//! Staged copies: the copy engine of an iface moves device memory through host memory, for a NIC
//! that cannot reach the device.
//!
//! A domain has one bounded pool of staging buffers
//! ([`StagingAttr`](hmem_core::provider::StagingAttr)). A transfer is cut into chunks. Each chunk
//! goes through a buffer of the pool: device to buffer to NIC, or NIC to buffer to device. The
//! copies are asynchronous, so that the copy engine works on some chunks while the NIC transfers
//! others.
//!
//! Staging has no thread: the provider advances the transfers in its own calls. The software NIC
//! runs a transfer to its end when it executes the request. The verbs provider advances the
//! transfers of an endpoint when a request is posted to the endpoint, and all transfers of the
//! device when one of its completion queues is read. In the libfabric provider, a read of a
//! completion queue advances all transfers of the domain.
//!
//! - [`StagedRange`], [`Pool`] and [`Pipeline`]: the copies, the buffers, and the order of chunks.
//! - [`StagedRegion`] and [`Transfer`]: regions and requests of a NIC that reaches only the staging
//!   buffers, as verbs and libfabric do.
//!
//! # Order
//!
//! Chunks need no order: the bytes of RMA chunks have separate targets, each chunk is reported by
//! itself, and a message is one chunk. There is one exception. The last chunk of a write with
//! immediate data must not take effect before the other chunks. Verbs orders writes. If the NIC may
//! not order writes, the provider posts the last chunk after the NIC has finished the others.
//!
//! ```
//! use std::sync::Arc;
//!
//! use hmem_core::{
//!     AllocationKind, DeviceBuffer, DeviceId, Iface, iface::AllocRequest,
//! };
//! use hmem_iface_system::Simulated;
//! use hmem_p2p::staging::StagedRange;
//!
//! let device: Arc<dyn Iface> = Arc::new(Simulated::builder().build()?);
//! let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
//! let memory = DeviceBuffer::allocate(&device, &request)?;
//! // SAFETY: `memory` is dropped after `staged`, and nothing refers to device memory.
//! let staged = unsafe { StagedRange::new(Arc::clone(&device), memory.allocation().range) };
//! staged.write(60, b"tail")?;
//! let mut bytes = [0; 4];
//! memory.read(60, &mut bytes)?;
//! assert_eq!(&bytes, b"tail");
//! # Ok::<(), hmem_core::Error>(())
//! ```

mod chunk_plan;
mod memory;
mod pipeline;
mod pool;
mod range;
mod region;
mod transfer;

pub use chunk_plan::ChunkPlan;
pub use pipeline::{FailedStep, Pipeline, Posted, Run, View};
pub use pool::{Claim, Pool, Slots, Use};
pub use range::StagedRange;
pub use region::StagedRegion;
pub use transfer::{LocalMemory, Transfer, staged_right};
