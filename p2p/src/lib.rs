//! Path decisions for RDMA memory registration, staged copies, and PCIe topology.
//!
//! - [`path::DefaultPathSelector`] decides how a NIC reaches the memory of a device: by dma-buf, by
//!   peer memory or by staged copies.
//! - [`staging`] copies messages through host memory for NICs that cannot reach the device.
//! - [`topology`] reads which device is near which NIC.
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `staging`, `topology`
//! - `path`
//!
//! # Limits
//!
//! The crate knows no vendor's memory API and no NIC; it calls both through the traits of
//! `hmem_core`. The crate never picks a provider. Each refused path is recorded in the region's
//! [`Decision`](hmem_core::Decision).

#![deny(unsafe_code)]

#[doc = include_str!("design.md")]
pub mod design {}
pub mod path;
pub mod staging;
pub mod topology;
