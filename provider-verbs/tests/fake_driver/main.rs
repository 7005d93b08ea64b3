//! Tests over a fake verbs driver.

mod connections;
mod data_direct;
#[path = "../fake/mod.rs"]
mod fake;
mod foreign_keys;
mod immediate;
mod lifetimes;
#[path = "../looped/mod.rs"]
mod looped;
mod reach;
mod refusals;
mod rereg;
mod rights;
mod staging;
#[path = "../../../p2p/tests/staging_cases/mod.rs"]
mod staging_cases;
mod waiting;
#[path = "../wire/mod.rs"]
mod wire;
