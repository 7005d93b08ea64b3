//! Host memory, and a simulated device for machines without one.
//!
//! [`System`] allocates host memory: anonymous, in memory files ([`MemFd`]), in huge pages.
//!
//! [`Simulated`] is a device iface without hardware. Its device memory cannot be touched by the
//! CPU. It has any number of devices, allocation identities, two ways to detect frees, segments, a
//! copy engine, dma-buf export, IPC and fault injection. It needs the feature `simulated`, which is
//! on by default, and which the feature `testing` of the crate `hmem` enables.
//!
//! [`monitor`] detects that host memory under a cached registration was unmapped or replaced.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `sys`
//! - `ipc_handle`, `monitor`, `numa`
//! - `host`, `simulated`
//!
//! # Things this crate does not do
//!
//! It pins no memory; providers do. No [`monitor`] detects every change: `docs/monitors.md` lists
//! the changes that each monitor misses. A simulated device does not reproduce the timing of
//! hardware, or a memory order weaker than the CPU's.

#![deny(unsafe_code)]

mod host;
mod ipc_handle;
pub mod monitor;
mod numa;
#[cfg(feature = "simulated")]
mod simulated;
mod sys;

#[cfg(feature = "simulated")]
pub use hmem_core::testing::Gate;
pub use host::{MemFd, System};
pub use numa::numa_node;
#[cfg(feature = "simulated")]
pub use simulated::{
    AddressReuse, DeviceCall, DmaBufKind, Faults, FreeDetection, P2pMatrix, SIMULATED, Simulated,
    SimulatedBuilder, SimulatedStats, Stepping,
};
