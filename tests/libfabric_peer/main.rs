//! Checks of the benchmarks' libfabric wrapper (`benches/peer`) and of the example
//! `own_fabric_domain`, with libfabric where it is installed.

#[path = "../../benches/peer/libfabric/mod.rs"]
#[allow(dead_code, reason = "the benches use what these tests do not")]
mod libfabric;

mod behaviour_test;
#[path = "../../examples/own_fabric_domain/main.rs"]
mod own_fabric_domain;
#[path = "../trials/mod.rs"]
mod trials;

use behaviour_test::{
    a_write_has_arrived_when_it_returns, a_write_of_an_unsupported_length_is_refused,
    only_a_vacant_key_can_be_registered, threads_register_at_once_under_different_keys,
};
use trials::{Outcome, Skipped, trials};

fn example_moves_bytes_between_its_own_endpoints() -> Outcome {
    match own_fabric_domain::run() {
        Ok(equal) => assert_eq!(equal, 1 << 20),
        Err(error) if error.kind() == hmem::ErrorKind::Unavailable => {
            return Err(Skipped(error.to_string()));
        }
        Err(error) => panic!("{}", error.full()),
    }
    Ok(())
}

trials! {
    only_a_vacant_key_can_be_registered,
    threads_register_at_once_under_different_keys,
    a_write_has_arrived_when_it_returns,
    a_write_of_an_unsupported_length_is_refused,
    /// FAB-11
    example_moves_bytes_between_its_own_endpoints,
}
