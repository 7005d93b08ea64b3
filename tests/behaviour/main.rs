//! The behaviour suite: `fi_mr(3)` semantics as a user sees them, over every world of the software
//! NIC, host memory and the simulated device.
//!
//! A test's doc comment begins with the ids of the requirements that it holds. Each behaviour is
//! written once, as a function over a [`world::World`], and fails naming the worlds where it does
//! not hold. `tests/skipped.txt` lists what a world cannot show.

mod child;
mod diag;
mod dmabuf;
mod evt;
mod grant;
mod hm;
mod hold;
mod key;
mod life;
mod memory;
mod mode;
mod mr;
mod net;
mod p2p;
mod persistent;
mod properties;
mod rights;
mod skips;
mod sub;
mod threads;
mod transfers;
mod window;
mod world;

#[path = "../../examples/plug_in_iface.rs"]
mod plug_in_iface;
