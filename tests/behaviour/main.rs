//! The behaviour suite: `fi_mr(3)` semantics as a user sees them, over every world that the
//! software NIC, host memory and the simulated device can make.
//!
//! A test's name begins with the id of the acceptance line that it holds. Each behaviour is written
//! once, as a function over a [`world::World`], and fails naming the worlds where it does not hold;
//! what a world cannot show is listed in `tests/skipped.txt`.

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
