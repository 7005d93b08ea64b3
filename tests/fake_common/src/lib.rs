//! Parts that the fake drivers share.
//!
//! - [`Pages`]: the bytes of the devices, and dma-bufs of them
//! - [`Calls`]: counts of calls, and faults to inject
//!
//! # Layers
//!
//! A module imports only from those on earlier lines (`tests/layers` checks it):
//!
//! - `calls`, `dma_buf`
//! - `pages`

mod calls;
mod dma_buf;
mod pages;

pub use calls::Calls;
pub use pages::{PAGE, Pages, another, memory_file, reopen, share};
