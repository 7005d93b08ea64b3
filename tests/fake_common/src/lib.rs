//! Code that the fake drivers share.
//!
//! - [`Pages`]: the memory of the devices, and dma-bufs of it
//! - [`Calls`]: call counts and injected faults
//! - [`fake_driver!`]: the handle by which a test owns a driver
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/repository/layers` checks it):
//!
//! - `calls`, `dma_buf`, `driver`
//! - `pages`

mod calls;
mod dma_buf;
mod driver;
mod pages;

pub use calls::Calls;
pub use pages::{Pages, another, memory_file, page, reopen, share};
