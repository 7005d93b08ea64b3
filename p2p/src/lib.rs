//! From a range to a registered handle: path decisions, staged copies, and providers.
//!
//! [`path::Paths`] decides how a NIC gets at memory; [`staging`] moves what it cannot reach; [`loopback`] is a
//! software NIC inside the process; [`topology`] says which device is near which NIC.
//!
//! # Things this crate does not do
//!
//! It never picks a provider by itself, and never falls back without a trace: every way that was refused is in
//! the region's [`Decision`](hmem_core::Decision).

#![deny(unsafe_code)]

pub mod loopback;
#[allow(unsafe_code)]
pub mod path;
mod random;
#[allow(unsafe_code)]
pub mod staging;
pub mod topology;
#[cfg(feature = "verbs")]
pub mod verbs;
