//! Checks of the benches' peer against libfabric's headers and library, where they are installed.

#[path = "../../benches/peer/libfabric/mod.rs"]
#[allow(dead_code, reason = "the benches use what these tests do not")]
mod libfabric;

mod behaviour_test;
mod layout_test;
#[path = "../trials/mod.rs"]
mod trials;

use behaviour_test::{
    a_length_that_cannot_be_written_is_refused,
    a_library_that_is_something_else_names_the_missing_symbol,
    a_vacant_key_can_be_registered_again_and_again_and_a_populated_one_cannot,
    a_write_has_arrived_when_it_returns, an_absent_library_is_a_printable_reason,
    the_first_symbol_that_cannot_be_found_ends_the_look_up,
    threads_register_at_once_under_different_keys,
};
use layout_test::layouts_and_constants_are_those_of_the_installed_headers;
use trials::trials;

trials! {
    an_absent_library_is_a_printable_reason,
    a_library_that_is_something_else_names_the_missing_symbol,
    the_first_symbol_that_cannot_be_found_ends_the_look_up,
    a_vacant_key_can_be_registered_again_and_again_and_a_populated_one_cannot,
    threads_register_at_once_under_different_keys,
    a_write_has_arrived_when_it_returns,
    a_length_that_cannot_be_written_is_refused,
    layouts_and_constants_are_those_of_the_installed_headers,
}
