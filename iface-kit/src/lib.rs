//! Parts of which ifaces for device memory are made.

#![deny(unsafe_code)]

#[cfg(feature = "announced")]
pub mod announced;
