//! CUDA memory registered with the software NIC: memory of the fake driver, or of a GPU with
//! `HMEM_CUDA=real`. Every moved byte is compared. `iface-cuda/tests/suite` tests the iface alone.
#![cfg(feature = "cuda")]
#![allow(unsafe_code)]

mod cache;
mod contexts;
mod gpu;
mod inbound;
mod link;
#[path = "../machine/mod.rs"]
mod machine;
mod mapped;
mod paths;
mod reuse;
mod segments;
mod sparse;
#[path = "../wire/mod.rs"]
mod wire;
