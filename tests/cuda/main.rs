//! CUDA memory under a NIC: the fake driver's memory, or with `HMEM_CUDA=real` a GPU's, registered
//! over the software NIC, with every byte that moves compared. What the iface does on its own is
//! shown in `iface-cuda/tests/suite`.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

mod cache;
mod causes;
mod contexts;
mod gpu;
mod inbound;
mod link;
mod paths;
mod reuse;
mod segments;
#[path = "../wire/mod.rs"]
mod wire;
