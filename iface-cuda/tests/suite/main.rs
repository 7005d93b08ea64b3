//! Tests of the CUDA iface over the fake driver in every profile, or over a GPU with
//! `HMEM_CUDA=real`.
#![allow(unsafe_code)]

mod child;
mod contexts;
mod copies;
mod detection;
mod export;
mod failures;
mod faults;
mod flush;
#[path = "../../../tests/fork/mod.rs"]
mod fork;
mod forks;
mod gdrcopy;
mod gpu;
mod hooks;
mod ipc;
mod monitor;
mod opening;
#[path = "../../../tests/subscriber/mod.rs"]
mod subscriber;
#[path = "../../../tests/vendor_files/mod.rs"]
mod vendor_files;
mod world;
