//! Checks of the benchmarks' libfabric wrapper (`benches/peer`) against libfabric's headers and
//! library, where they are installed.

#[path = "../../benches/peer/libfabric/mod.rs"]
#[allow(dead_code, reason = "the benches use what these tests do not")]
mod libfabric;

mod behaviour_test;
mod layout_test;
#[path = "../trials/mod.rs"]
mod trials;

use behaviour_test::{
    a_write_has_arrived_when_it_returns, a_write_of_an_unsupported_length_is_refused,
    an_absent_library_gives_a_printable_reason,
    an_unrelated_library_is_refused_by_the_missing_symbol, only_a_vacant_key_can_be_registered,
    the_first_missing_symbol_ends_the_lookup, threads_register_at_once_under_different_keys,
};
use layout_test::layouts_and_constants_are_those_of_the_installed_headers;
use trials::trials;

trials! {
    an_absent_library_gives_a_printable_reason,
    an_unrelated_library_is_refused_by_the_missing_symbol,
    the_first_missing_symbol_ends_the_lookup,
    only_a_vacant_key_can_be_registered,
    threads_register_at_once_under_different_keys,
    a_write_has_arrived_when_it_returns,
    a_write_of_an_unsupported_length_is_refused,
    layouts_and_constants_are_those_of_the_installed_headers,
}
