//! Tests of path decisions.

mod direct_paths;
mod export_units;
mod metrics;
mod page_units;
mod path_bytes;
mod path_c2c;
mod path_causes;
mod path_decision;
mod path_policy;
#[path = "../path_support/mod.rs"]
mod path_support;
mod several_causes;
mod shared_exports;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../topology_machines/mod.rs"]
mod topology_machines;
