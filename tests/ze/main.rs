//! Level Zero memory under a NIC: the fake driver's memory, or with `HMEM_ZE=real` that of the
//! library's driver (Intel's with a simulated GPU: `tests/ze/run`), registered over the software
//! NIC, with every byte that moves compared. `iface-ze/tests` shows the iface on its own.
#![cfg(feature = "ze")]
#![allow(unsafe_code)]

mod cache;
mod link;
mod paths;
#[path = "../wire/mod.rs"]
mod wire;
