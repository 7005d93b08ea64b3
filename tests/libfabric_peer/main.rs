//! The benches' peer is held to the real headers and to the real library, where they are installed.

#[path = "../../benches/peer/libfabric/mod.rs"]
#[allow(dead_code, reason = "the benches use what these tests do not")]
mod libfabric;

mod behaviour_test;
mod layout_test;
