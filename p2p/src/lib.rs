//! p2p

#![deny(unsafe_code)]

pub mod loopback;
