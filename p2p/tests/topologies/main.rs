//! Tests of topologies and of the choice of NICs.

#[cfg(feature = "recordings")]
mod nearest_nics;
#[cfg(feature = "recordings")]
mod topology;
mod topology_c2c;
#[cfg_attr(
    not(feature = "recordings"),
    allow(dead_code, reason = "tests of recordings use the rest")
)]
#[path = "../topology_machines/mod.rs"]
mod topology_machines;
