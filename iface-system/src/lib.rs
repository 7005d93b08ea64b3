//! Host memory, and a device for machines that have none.
//!
//! [`System`] is the host's memory: anonymous, in memory files ([`MemFd`]), in huge pages.
//!
//! [`Simulated`] is a device iface without hardware: device memory that the CPU cannot touch,
//! several devices, identities, both monitor styles, segments, a copy engine, dma-buf export, IPC,
//! and faults on demand.
//!
//! [`monitor`] notices that host memory went under a cached registration.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `sys`
//! - `ipc_handle`, `lazy`, `monitor`, `numa`
//! - `host`, `simulated`
//!
//! # Things this crate does not do
//!
//! It pins nothing: that is what providers do. What its [`monitor`]s do not see is in their
//! documentation. A simulated device checks no timing and orders nothing beyond what the CPU does.

#![deny(unsafe_code)]

mod host;
mod ipc_handle;
#[allow(unsafe_code)]
mod lazy;
pub mod monitor;
#[allow(unsafe_code)]
mod numa;
mod simulated;
#[allow(unsafe_code)]
mod sys;

pub use host::{MemFd, System};
pub use numa::numa_node;
pub use simulated::{
    AddressReuse, Call, DmaBufKind, Faults, FreeDetection, P2pMatrix, SIMULATED, Simulated,
    SimulatedBuilder, SimulatedStats, Stepping,
};
