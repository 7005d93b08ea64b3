//! Level Zero memory registered with the software NIC: memory of the fake driver, or with
//! `HMEM_ZE=real` of Intel's driver with a simulated GPU (`tests/ze/run`). Every moved byte is
//! compared. `iface-ze/tests` tests the iface alone.
#![cfg(feature = "ze")]
#![allow(unsafe_code)]

mod cache;
#[path = "../child/mod.rs"]
mod child;
mod link;
mod paths;
#[path = "../wire/mod.rs"]
mod wire;
