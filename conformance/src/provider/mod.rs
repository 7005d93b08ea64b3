//! Behaviours that every provider must have.

mod case;
mod closing;
mod completions;
mod events;
mod keys;
mod link;
mod modes;
mod regions;
mod rights;
mod sub_regions;
mod transfers;
mod windows;

pub(crate) use case::Subject;
use case::{Case, needs};
use closing::*;
use completions::*;
use events::*;
use keys::*;
use modes::*;
use regions::*;
use rights::*;
use sub_regions::*;
use transfers::*;
use windows::*;

use crate::trial::behaviours;

behaviours! {
    cases:
    /// Requirements MR-01, P2P-06 and BNC-03
    write_and_read_move_exactly_the_named_bytes;
    /// Requirement MR-03
    region_of_several_ranges_is_one_run_of_bytes, ZERO_BASED;
    /// Requirement MR-09
    message_arrives_in_the_posted_buffer;
    /// Requirement MR-09
    atomic_returns_the_old_value_and_adds, ATOMICS;
    each_request_completes_once_with_its_context;
    posting_until_again_loses_no_completion, ONCE;
    /// Requirement MODE-02
    absent_pages_register_and_fail_only_the_transfer, HOST_PAGES, DEFAULT_MODE;
    /// Requirement MODE-02
    peers_address_from_0_with_the_requested_key, DEFAULT_MODE;
    /// Requirement MODE-05
    peers_use_the_targets_addresses_for_every_range, VIRTUAL_ADDRESSES;
    /// Requirement MODE-06
    range_without_pages_is_refused, HOST_PAGES, ALLOCATED_MODE;
    /// Requirement MODE-07
    requested_key_is_ignored, PLAIN_KEYS, PROVIDER_KEYS;
    /// Requirement MODE-08
    peers_reach_only_refreshed_pages, HOST_PAGES, NOTIFY_MODE;
    /// Requirement MODE-08
    peers_fail_during_a_refresh, HOST_PAGES, NOTIFY_MODE, CONTROL;
    /// Requirement MODE-09
    counters_are_bound_before_the_region_is_enabled, RMA_EVENT_MODE;
    /// Requirement MODE-10
    regions_are_reached_through_their_endpoint_only, ENDPOINT_MODE;
    /// Requirement MODE-10
    other_modes_do_not_bind_to_endpoints, UNBOUND;
    /// Requirement MODE-11
    device_buffers_need_a_descriptor_or_are_detected, DEVICE_MEMORY, LOCAL_RIGHTS;
    /// Requirement MODE-12
    buffers_of_a_broadcast_need_the_collective_right, CONTROL;
    /// Requirement HM-14
    queue_of_another_domain_is_refused, ONCE;
    transfers_progress_by_the_declared_agent;
    requests_take_effect_in_the_declared_order;
    messages_keep_the_declared_order;
    /// Requirement EVT-05
    wait_ends_with_a_completion_or_its_timeout;
    /// Requirement EVT-05
    channel_is_readable_from_the_next_completion_on;
    /// Requirement EVT-04
    immediate_data_is_refused_if_the_nic_carries_none, NO_IMMEDIATE_DATA;
    /// Requirement EVT-04
    write_with_immediate_data_completes_a_receive, IMMEDIATE_DATA;
    /// Requirement EVT-04
    write_with_immediate_data_waits_for_a_receive, IMMEDIATE_DATA;
    /// Requirement EVT-04
    messages_carry_immediate_data, IMMEDIATE_DATA;
    /// Requirement EVT-04
    too_wide_immediate_data_is_refused, IMMEDIATE_DATA;
    /// Requirement MR-09
    peers_get_the_rights_of_the_key_and_no_others;
    /// Requirement MR-08
    overlapping_regions_grant_each_their_own_rights;
    /// Requirement MR-09
    atomics_need_the_right_to_write, ATOMICS;
    /// Requirement MR-09
    atomic_read_needs_a_right_to_read_or_to_atomics, ATOMICS;
    /// Requirement MR-09
    writes_and_atomics_can_be_granted_separately, ATOMICS;
    /// Requirement MR-09
    sub_region_of_a_region_without_rights_may_read, SUB_REGIONS;
    /// Requirement MR-09
    sub_regions_grant_writes_and_atomics_separately, ATOMICS, SUB_REGIONS;
    /// Requirements MR-09 and MW-05
    windows_grant_writes_and_atomics_separately, ATOMICS, WINDOWS;
    /// Requirement MR-09
    one_byte_past_either_end_is_refused;
    /// Requirement MR-05
    closed_region_is_unreachable;
    /// Requirement MR-05
    transfers_in_flight_leave_a_closed_region_alone, ONCE;
    /// Requirement MR-05
    close_ends_transfers_in_flight_before_it_returns, CONTROL;
    /// Requirement MR-05
    close_of_a_local_buffer_ends_transfers_in_flight_too, CONTROL;
    /// Requirement MR-05
    close_amid_a_stream_of_writes_leaves_the_memory_alone, PLAIN_KEYS;
    /// Requirement MR-05
    posted_transfers_that_have_not_begun_fail_after_close, CONTROL, BY_HAND;
    /// Requirement MR-05
    reconnect_recovers_both_sides_of_a_refused_access;
    /// Requirement MR-06
    region_with_a_counter_is_busy_and_still_works, COUNTERS;
    /// Requirement MR-06
    region_closes_after_the_last_of_its_counters, COUNTERS;
    /// Requirement MR-06
    region_closes_before_its_endpoint, ENDPOINT_MODE;
    /// Requirement MR-06
    region_of_a_closed_endpoint_is_unreachable_and_closes, ENDPOINT_MODE;
    /// Requirement MR-07
    memory_at_a_reused_address_is_reached_five_times;
    /// Requirement MR-07
    memory_at_a_reused_address_is_reached_ten_thousand_times, LONG;
    /// Requirement MR-07
    registration_keeps_its_pages_or_follows_the_mapping, HOST_PAGES;
    /// Requirement MR-14
    single_use_key_works_once, CONTROL;
    /// Requirements MODE-03 and MR-09
    local_buffers_need_a_descriptor_of_a_live_region;
    /// Requirement MR-09
    local_buffers_need_the_right_of_their_operation, LOCAL_RIGHTS;
    /// Requirement MR-09
    receives_need_the_right_recv_and_stay_in_bounds, LOCAL_RIGHTS;
    /// Requirement MR-09
    peer_of_another_endpoint_is_refused, ONCE;
    /// Requirement MR-07
    memory_is_registered_again_after_close, ONCE;
    /// Requirement MR-16
    threads_register_and_close_at_once, ONCE;
    /// Requirement MR-11
    closing_everything_leaves_nothing_live, ONCE;
    /// Requirement MR-11
    opening_and_closing_leaks_no_fd, ONCE;
    /// Requirements KEY-01 and KEY-02
    live_regions_have_keys_of_their_own;
    /// Requirement KEY-01
    requested_key_that_the_nic_cannot_use_is_rejected, OWN_KEYS;
    /// Requirement KEY-01
    requested_key_in_use_is_refused, OWN_KEYS;
    /// Requirement KEY-05
    peers_need_the_auth_key_of_the_region;
    /// Requirement KEY-03
    raw_attr_returns_the_needed_size_and_works_on_every_region, RAW_KEYS;
    /// Requirements KEY-03, KEY-04 and MODE-04
    raw_key_is_mapped_used_and_unmapped, RAW_KEYS;
    /// Requirement KEY-04
    domain_with_mapped_keys_is_busy_at_close, RAW_KEYS;
    /// Requirement MODE-10
    malformed_endpoint_name_is_refused, ONCE;
    /// Requirement SUB-01
    sub_region_has_its_own_key_rights_and_bounds, SUB_REGIONS;
    /// Requirement SUB-01
    sub_region_that_exceeds_its_base_is_refused, SUB_REGIONS;
    /// Requirement SUB-01
    sub_region_past_the_domain_gets_no_more_than_its_base, SUB_REGIONS;
    /// Requirement SUB-02
    base_closes_after_its_sub_regions_three_levels_deep, SUB_REGIONS;
    /// Requirement SUB-02
    dropped_base_lives_as_long_as_its_sub_regions, SUB_REGIONS;
    /// Requirement SUB-03
    sub_regions_pin_and_register_no_pages, SUB_REGIONS;
    /// Requirement KEY-08
    sub_region_is_reached_with_its_own_auth_key_only, SUB_REGIONS;
    /// Requirement KEY-08
    sub_region_is_reached_through_its_own_endpoint_only, SUB_REGIONS, ENDPOINT_MODE;
    /// Requirement KEY-08
    counted_sub_region_needs_rma_event, SUB_REGIONS, COUNTERS;
    /// Requirement EVT-02
    sub_region_counts_its_own_writes, SUB_REGIONS, COUNTERS;
    /// Requirements MW-01 and MW-02
    window_is_reached_until_it_is_invalidated, WINDOWS;
    /// Requirement MW-07
    nothing_is_reached_outside_a_window, WINDOWS;
    /// Requirements MR-06 and MW-06
    region_with_a_bound_window_is_busy, WINDOWS;
    /// Requirements MW-05 and MW-07
    window_bound_past_the_domain_gets_no_more_than_its_region, WINDOWS;
    /// Requirement MW-01
    type_1_window_changes_its_key_at_each_bind, WINDOWS, CONTROL;
    /// Requirement MW-01
    type_1_window_refuses_an_empty_range, WINDOWS, CONTROL;
    /// Requirement MW-02
    type_2_window_binds_by_a_request_with_a_tag, WINDOWS, CONTROL;
    /// Requirement MW-03
    type_2a_window_is_reached_through_its_queue_pair_only, WINDOWS, CONTROL, UNBOUND;
    /// Requirement MW-03
    type_2b_window_does_not_keep_its_queue_pair_open, WINDOWS, CONTROL, UNBOUND;
    /// Requirement MW-04
    invalidation_ends_the_key_but_not_the_window, WINDOWS, CONTROL;
    /// Requirements MW-04 and MW-10
    peer_invalidates_a_window_by_a_message, WINDOWS, CONTROL;
    /// Requirements MW-04 and MW-10
    peer_does_not_invalidate_a_type_1_window, WINDOWS, CONTROL;
    /// Requirements MW-04 and MW-10
    peer_invalidates_through_the_queue_pair_of_the_window_only, WINDOWS, CONTROL;
    /// Requirement MW-05
    windows_have_their_own_rights, WINDOWS, CONTROL;
    /// Requirement MW-06
    windows_may_overlap_and_keep_their_region_open, WINDOWS, CONTROL;
    /// Requirement MW-07
    window_outside_its_region_or_domain_is_refused, WINDOWS, CONTROL;
    /// Requirement MW-07
    refused_bind_names_its_call_and_its_values, WINDOWS, CONTROL;
    /// Requirement MW-08
    binding_registers_and_exports_nothing, WINDOWS, CONTROL;
    /// Requirement KEY-08
    window_is_reached_with_the_auth_key_of_its_region_only, WINDOWS, CONTROL;
    /// Requirement KEY-08
    window_is_reached_through_the_endpoint_of_its_region_only, WINDOWS, CONTROL, ENDPOINT_MODE;
    /// Requirement KEY-08
    window_on_a_counted_region_needs_rma_event, WINDOWS, CONTROL, COUNTERS;
    /// Requirement EVT-02
    writes_and_atomics_through_a_window_count_once, WINDOWS, CONTROL, COUNTERS;
    /// Requirement MODE-04
    windows_are_refused_in_raw_mode, RAW_MODE;
    /// Requirement EVT-02
    counter_counts_each_remote_write_and_atomic_once, COUNTERS;
    /// Requirement EVT-02
    every_counter_of_a_region_counts_each_write_and_atomic_once, COUNTERS;
    /// Requirements EVT-02 and KEY-08
    endpoint_without_rma_event_is_refused, COUNTERS;
    /// Requirement MODE-07
    refreshed_region_still_works, REFRESH;
    /// Requirement EVT-01
    each_asynchronous_registration_ends_in_one_event;
}
