//! Tests of topologies and of the choice of NICs.

#[cfg(feature = "recordings")]
mod nearest_nics;
#[cfg(feature = "recordings")]
mod topology;
mod topology_c2c;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../topology_machines/mod.rs"]
mod topology_machines;
