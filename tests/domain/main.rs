//! Tests of domains over the software NIC and fake drivers.

mod asynchronous;
mod bare_provider;
mod bounds;
mod claims;
#[path = "../counted/mod.rs"]
mod counted;
mod debug;
mod domains;
mod driver_calls;
mod errors;
mod host_pages;
mod inbound;
#[path = "../link/mod.rs"]
mod link;
#[path = "../machine/mod.rs"]
mod machine;
mod memory_kinds;
mod memory_safety;
mod mr_mode;
mod ordering;
mod other_pages;
mod persistent;
mod plug_ins;
mod prefault;
mod queries;
mod rules;
#[path = "../silent/mod.rs"]
mod silent;
mod striping;
#[allow(dead_code, reason = "other test binaries use the rest")]
#[path = "../wire/mod.rs"]
mod wire;
