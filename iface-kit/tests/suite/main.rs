//! Behaviours that the Neuron and the Gaudi iface share, over the fake runtimes.
#![allow(unsafe_code)]

mod close;
mod faults;
#[path = "../../../tests/fork/mod.rs"]
mod fork;
mod forks;
mod kept;
mod monitor;
mod recognised;
#[path = "../../../tests/subscriber/mod.rs"]
mod subscriber;
mod world;
