//! Tests of the software NIC.

#[path = "../support/copied_device.rs"]
mod copied_device;
mod devices;
mod full_queues;
mod keys;
mod messages;
mod modes;
mod races;
mod rma;
mod staging;
#[path = "../../../p2p/tests/staging_cases/mod.rs"]
mod staging_cases;
#[path = "../support/mod.rs"]
mod support;
mod window_states;
mod windows;
