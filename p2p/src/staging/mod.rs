//! Staged copies: device memory that a NIC cannot reach is moved through host memory by the iface's copy engine.
//!
//! A domain has one bounded pool of staging buffers ([`StagingAttr`](hmem_core::provider::StagingAttr)). A transfer is
//! cut into chunks, and each chunk goes through a buffer of the pool: device to buffer to wire, or wire to buffer to
//! device. The copies are the iface's asynchronous ones, so that the copy engine works on some chunks while the wire
//! carries others.
//!
//! Nothing here runs by itself: whoever makes a provider's transfers progress makes those through staging buffers
//! progress. The software NIC runs a transfer to its end where it executes it; verbs steps its transfers whenever a
//! completion queue of the device is read.
//!
//! ```
//! use std::sync::Arc;
//!
//! use hmem_core::{AllocationKind, DeviceId, Iface, IfaceExt, iface::AllocRequest, provider::StagedMemory};
//! use hmem_iface_system::Simulated;
//! use hmem_p2p::staging::StagedRange;
//!
//! let device = Arc::new(Simulated::builder().build()?);
//! let request = AllocRequest { len: 64, device: DeviceId(0), kind: AllocationKind::Device };
//! let memory = device.allocate(&request)?.range;
//! let staged = StagedRange::new(Arc::clone(&device) as _, memory);
//! staged.write(60, b"tail")?;
//! let mut bytes = [0; 4];
//! device.read(memory.slice(60, 4).expect("inside").start(), &mut bytes)?;
//! assert_eq!(&bytes, b"tail");
//! # Ok::<(), hmem_core::Error>(())
//! ```

mod cut;
mod memory;
mod pipeline;
mod pool;
mod range;

pub(crate) use cut::Cut;
pub(crate) use pipeline::{Part, Pipeline, Posted, Run, View};
pub(crate) use pool::{Claim, Pool, Use};
pub use range::StagedRange;
