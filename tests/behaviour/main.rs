//! The behaviour suite: `fi_mr(3)` semantics as a user sees them, over every test configuration of
//! the software NIC, host memory and the simulated device.
//!
//! A test's doc comment begins with the ids of the requirements that it tests. Each behaviour is
//! written once, as a function over a [`config::TestConfig`], a test configuration. A failure names
//! the configurations in which the behaviour failed. `tests/skipped.txt` lists the configurations
//! that cannot show a behaviour.

mod child;
mod config;
mod diag;
mod dmabuf;
mod evt;
mod grant;
mod hm;
mod hold;
mod key;
mod memory;
mod mode;
mod mr;
mod net;
mod p2p;
mod persistent;
mod properties;
mod skips;
mod threads;

#[path = "../machine/mod.rs"]
mod machine;
#[path = "../../examples/plug_in_iface.rs"]
mod plug_in_iface;
