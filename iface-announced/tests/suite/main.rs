//! Behaviours of an announced iface, over the fake runtimes of Neuron and Gaudi.
#![allow(unsafe_code)]

mod close;
mod faults;
mod kept;
mod monitor;
mod recognised;
mod world;
