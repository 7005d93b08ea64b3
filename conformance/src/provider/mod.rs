//! Behaviours that every provider must have.

mod completions;
mod keys;
mod link;
mod optional;
mod regions;
mod transfers;

use hmem_core::provider::Provider;

use crate::trial::behaviours;
use completions::*;
use keys::*;
use optional::*;
use regions::*;
use transfers::*;

behaviours! {
    dyn Provider:
    /// Requirement MR-01
    write_and_read_move_exactly_the_named_bytes,
    /// Requirement MR-03
    region_of_several_ranges_is_one_run_of_bytes,
    /// Requirement MR-09
    message_arrives_in_the_posted_buffer,
    /// Requirement MR-09
    atomic_returns_the_old_value_and_adds,
    each_request_completes_once_with_its_context,
    posting_until_again_loses_no_completion,
    /// Requirement HM-14
    queue_of_another_domain_is_refused,
    transfers_progress_by_the_declared_agent,
    requests_take_effect_in_the_declared_order,
    /// Requirement EVT-05
    wait_ends_with_a_completion_or_its_timeout,
    /// Requirement EVT-05
    channel_is_readable_from_the_next_completion_on,
    /// Requirement EVT-04
    write_with_immediate_data_completes_a_receive,
    /// Requirement EVT-04
    too_wide_immediate_data_is_refused,
    /// Requirement P2P-06
    device_memory_is_reached_by_its_dma_buf,
    /// Requirements P2P-06 and BNC-03
    device_memory_is_reached_by_staged_copies,
    /// Requirement MR-09
    peers_get_the_rights_of_the_key_and_no_others,
    /// Requirement MR-08
    overlapping_regions_grant_each_their_own_rights,
    /// Requirement MR-09
    one_byte_past_either_end_is_refused,
    /// Requirement MR-05
    closed_region_is_unreachable,
    /// Requirement MR-05
    transfers_in_flight_leave_a_closed_region_alone,
    /// Requirement MR-09
    descriptor_of_a_closed_region_is_refused,
    /// Requirement MR-09
    local_memory_without_the_right_is_refused,
    /// Requirement MR-09
    peer_of_another_endpoint_is_refused,
    /// Requirement MR-07
    memory_is_registered_again_after_close,
    /// Requirement MR-16
    threads_register_and_close_at_once,
    /// Requirement MR-11
    closing_everything_leaves_nothing_live,
    /// Requirement MR-11
    opening_and_closing_leaks_no_fd,
    /// Requirement KEY-02
    live_regions_have_keys_of_their_own,
    /// Requirement KEY-01
    requested_key_in_use_is_refused,
    /// Requirement KEY-05
    peer_with_another_auth_key_is_refused,
    /// Requirements KEY-03 and KEY-04
    raw_key_is_mapped_used_and_unmapped,
    /// Requirement MODE-10
    malformed_endpoint_name_is_refused,
    /// Requirement SUB-01
    sub_region_reaches_its_part_only,
    /// Requirement SUB-02
    region_with_a_sub_region_is_busy,
    /// Requirement SUB-01
    sub_region_past_the_domain_gets_no_more_than_its_base,
    /// Requirements MW-01 and MW-02
    window_is_reached_until_it_is_invalidated,
    /// Requirement MW-07
    nothing_is_reached_outside_a_window,
    /// Requirement MW-06
    region_with_a_bound_window_is_busy,
    /// Requirements MW-05 and MW-07
    window_bound_past_the_domain_gets_no_more_than_its_region,
    /// Requirement EVT-02
    counter_counts_each_remote_write_once,
    /// Requirement MODE-07
    refreshed_region_still_works,
    /// Requirement EVT-01
    asynchronous_registration_ends_in_one_event,
}
