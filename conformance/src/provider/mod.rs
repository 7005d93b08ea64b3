//! Behaviours that every provider must have.
//!
//! Each entry of the list is a function that tests a behaviour. The names after the function are
//! properties (module `case::needs`): the behaviour is tested only in cases that have all of them.

mod asynchronous;
mod case;
mod closing;
mod completions;
mod events;
mod grants;
mod keys;
mod lifetimes;
mod link;
mod modes;
mod nic_life;
mod regions;
mod registrations;
mod revocations;
mod rights;
mod sub_regions;
mod transfers;
mod windows;

use asynchronous::*;
pub(crate) use case::Subject;
use case::{Case, needs};
use closing::*;
use completions::*;
use events::*;
use grants::*;
use keys::*;
use lifetimes::*;
use modes::*;
use nic_life::*;
use regions::*;
use registrations::*;
use revocations::*;
use rights::*;
use sub_regions::*;
use transfers::*;
use windows::*;

use crate::trial::behaviours;

behaviours! {
    cases:
    /// Requirements MR-01, P2P-06 and BNC-03: a write by a peer changes exactly the bytes that it
    /// names, and a read returns them, over each path.
    write_and_read_move_exactly_the_named_bytes;
    /// Requirements BNC-01 and FAB-10: writes, reads and messages move device memory by staged
    /// copies, at the initiator and at the target. Each side copies its own memory.
    device_memory_of_either_side_moves_by_staged_copies, ONCE;
    /// Requirement MR-03: peers address a region of several ranges as one sequence of bytes, in the
    /// order of the ranges.
    region_of_several_ranges_is_one_run_of_bytes, ZERO_BASED;
    /// Requirement MR-01: `reg`, `regv` and `regattr` give equal regions for equal requests.
    reg_regv_and_regattr_register_a_range_alike;
    /// Requirements MR-02 and MR-12: a range registers and closes with every set of rights, each at
    /// one of five starts. Each right is tested at every start.
    every_set_of_rights_registers_at_any_start;
    /// Requirement MR-02: peers reach the first and the last byte of regions of up to 64 MiB, and
    /// not the byte after them.
    sizes_up_to_64_mib_are_reached_at_both_ends, LONG;
    /// Requirement MR-03: a region may have 1 to `mr_iov_limit` ranges.
    region_may_have_as_many_ranges_as_the_nic_allows;
    /// Requirement MR-15: page size 0, and each page size of both the system and the NIC,
    /// registers. Others fail with BadPageSize.
    page_sizes_of_the_system_and_nic_register;
    /// Requirement MR-13: parts of a dma-buf register with and without a base address. In VIRT_ADDR
    /// mode peers address a part by the base address plus the offset, and otherwise from 0.
    dma_buf_registers_with_and_without_a_base_address, DMA_BUFS;
    /// Requirements MR-13 and ARM-02: a range may end with its dma-buf, but not after it.
    range_may_end_with_its_dma_buf_but_not_after_it, DMA_BUFS;
    /// Requirement MR-09: a message arrives in the buffer of the posted receive, and no byte around
    /// it changes.
    message_arrives_in_the_posted_buffer;
    /// Requirement MR-09: a fetch-add returns the old value, and changes only the word that it
    /// names.
    atomic_returns_the_old_value_and_adds, ATOMICS;
    each_request_completes_once_with_its_context;
    posting_until_again_loses_no_completion, ONCE;
    /// Requirement MODE-02: without mode bits, addresses without pages can be registered. A
    /// transfer to an absent page fails, and succeeds once the page is there.
    absent_pages_register_and_fail_only_the_transfer, HOST_PAGES, DEFAULT_MODE;
    /// Requirement MODE-02: without mode bits, a key has the requested number, and peers address
    /// the region from 0.
    peers_address_from_0_with_the_requested_key, DEFAULT_MODE;
    /// Requirement MODE-05: in VIRT_ADDR mode, peers reach each range of a region at the range's
    /// own virtual addresses, and not the gaps between the ranges.
    peers_use_the_targets_addresses_for_every_range, VIRTUAL_ADDRESSES;
    /// Requirement MODE-06: in ALLOCATED mode, the registration of addresses without pages fails
    /// with BadAddress. So does the registration of read-only pages for remote writes.
    range_without_pages_is_refused, HOST_PAGES, ALLOCATED_MODE;
    /// Requirement MODE-07: in PROV_KEY mode, the provider ignores the requested key, and gives
    /// each region a key of its own.
    requested_key_is_ignored, PLAIN_KEYS, PROVIDER_KEYS;
    /// Requirement MODE-08: in MMU_NOTIFY mode, peers reach the pages that were present at the
    /// registration or were refreshed since, and no others.
    peers_reach_only_refreshed_pages, HOST_PAGES, NOTIFY_MODE;
    /// Requirement MODE-08: in MMU_NOTIFY mode, accesses to a region and a second refresh fail
    /// while the region is being refreshed.
    peers_fail_during_a_refresh, HOST_PAGES, NOTIFY_MODE, CONTROL;
    /// Requirement MODE-09: in RMA_EVENT mode, a region for counters refuses accesses until it is
    /// enabled, and takes no more counters afterwards.
    counters_are_bound_before_the_region_is_enabled, RMA_EVENT_MODE;
    /// Requirement MODE-10: in ENDPOINT mode, a region must be bound to an endpoint and enabled.
    /// Peers then reach it through that endpoint only.
    regions_are_reached_through_their_endpoint_only, ENDPOINT_MODE;
    /// Requirement MODE-10: without ENDPOINT mode, a region needs no endpoint, and its binding to
    /// an endpoint fails.
    other_modes_do_not_bind_to_endpoints, UNBOUND;
    /// Requirement MODE-11: in LOCAL or HMEM mode, a local device buffer without a descriptor is
    /// refused. In other modes the domain finds the iface of the buffer.
    device_buffers_need_a_descriptor_or_are_detected, DEVICE_MEMORY, LOCAL_RIGHTS;
    /// Requirement MODE-12: in COLLECTIVE mode, the buffers of a broadcast need the right
    /// COLLECTIVE. In other modes they do not.
    buffers_of_a_broadcast_need_the_collective_right, CONTROL;
    /// Requirement HM-14: an endpoint cannot use a completion queue that its own domain did not
    /// open, because only that domain's queues flush inbound writes to device memory.
    queue_of_another_domain_is_refused, ONCE;
    transfers_progress_by_the_declared_agent;
    requests_take_effect_in_the_declared_order;
    messages_keep_the_declared_order;
    /// Requirement EVT-05: a wait returns when a request completes or the timeout ends, with at
    /// most the requested number of completions.
    wait_ends_with_a_completion_or_its_timeout;
    /// Requirement EVT-05: after the completion channel of an empty queue is armed, the channel's
    /// file descriptor becomes readable with the next completion.
    channel_is_readable_from_the_next_completion_on;
    /// Requirement EVT-05: a thread that waits for receives wakes for each message.
    sleeping_thread_wakes_for_each_message;
    /// Requirement EVT-05: a thread that reads a queue, arms its channel and sleeps misses none of
    /// the messages.
    channel_loses_no_wakeup;
    /// Requirement EVT-05: a wait for completions fails with BadState after its domain is closed,
    /// also if the domain is closed during the wait.
    wait_ends_when_the_domain_closes, ONCE;
    /// Requirement EVT-05: the close of a domain makes the file descriptors of its armed channels
    /// readable. To arm such a channel again fails with BadState.
    channel_reports_that_its_domain_is_closed, ONCE;
    /// Requirement EVT-04: if the NIC carries no immediate data, a write or message with such data
    /// fails with Unsupported.
    immediate_data_is_refused_if_the_nic_carries_none, NO_IMMEDIATE_DATA;
    /// Requirement EVT-04: a write with immediate data completes one receive of the target, with
    /// the data, after the written bytes have arrived.
    write_with_immediate_data_completes_a_receive, IMMEDIATE_DATA;
    /// Requirement EVT-04: a write with immediate data waits if the target has posted no receive.
    /// Later receives complete in the order of the writes.
    write_with_immediate_data_waits_for_a_receive, IMMEDIATE_DATA;
    /// Requirement EVT-04: the completion of a receive has the immediate data of the message, or
    /// none if the message has none.
    messages_carry_immediate_data, IMMEDIATE_DATA;
    /// Requirement EVT-04: a post with more bits of immediate data than the NIC carries fails with
    /// InvalidArgument.
    too_wide_immediate_data_is_refused, IMMEDIATE_DATA;
    /// Requirement MR-09: peers can read only with a key that grants REMOTE_READ, and write only
    /// with a key that grants REMOTE_WRITE.
    peers_get_the_rights_of_the_key_and_no_others;
    /// Requirement MR-08: if regions overlap, each key grants only its own region's rights, and
    /// closing one region leaves the others usable.
    overlapping_regions_grant_each_their_own_rights;
    /// Requirement MR-09: a fetch-add needs a right to write: REMOTE_WRITE is enough, and
    /// REMOTE_READ is not.
    atomics_need_the_right_to_write, ATOMICS;
    /// Requirement MR-09: an atomic read needs REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC.
    /// REMOTE_RMA_WRITE is not enough.
    atomic_read_needs_a_right_to_read_or_to_atomics, ATOMICS;
    /// Requirement MR-09: a region with REMOTE_RMA_WRITE alone grants no atomics, and one with
    /// REMOTE_ATOMIC alone grants no writes.
    writes_and_atomics_can_be_granted_separately, ATOMICS;
    /// Requirement MR-09: a sub-region of a region without any right can grant reads, but not
    /// writes.
    sub_region_of_a_region_without_rights_may_read, SUB_REGIONS;
    /// Requirement MR-09: a sub-region can grant writes without atomics, or atomics without writes.
    /// This does not depend on which of the two its base grants.
    sub_regions_grant_writes_and_atomics_separately, ATOMICS, SUB_REGIONS;
    /// Requirements MR-09 and MW-05: a window can grant writes without atomics, or atomics without
    /// writes. It can grant neither on a region that the NIC may not write.
    windows_grant_writes_and_atomics_separately, ATOMICS, WINDOWS, TYPE_1;
    /// Requirement MR-09: an access that includes a byte before or after the region fails and moves
    /// no byte.
    one_byte_past_either_end_is_refused;
    /// Requirement MR-05: an access with the key of a closed region fails, and the endpoints still
    /// work.
    closed_region_is_unreachable;
    /// Requirement MR-05: a write in flight does not change the memory of a region after the close
    /// of the region has returned.
    transfers_in_flight_leave_a_closed_region_alone, ONCE;
    /// Requirement MR-05: the close of a region waits for a transfer that has begun. A transfer
    /// that begins during the close fails.
    close_ends_transfers_in_flight_before_it_returns, CONTROL;
    /// Requirement MR-05: a read in flight does not change its local buffer after the close of the
    /// buffer's region has returned.
    close_of_a_local_buffer_ends_transfers_in_flight_too, CONTROL;
    /// Requirement MR-05: a close during a stream of writes makes the writes fail, and none changes
    /// the memory after the close has returned.
    close_amid_a_stream_of_writes_leaves_the_memory_alone, PLAIN_KEYS;
    /// Requirement MR-05: after the close of a region, the posted requests that use the region and
    /// have not begun fail.
    posted_transfers_that_have_not_begun_fail_after_close, CONTROL, BY_HAND;
    /// Requirement MR-05: after a refused access, transfers work again once both endpoints have
    /// reconnected.
    reconnect_recovers_both_sides_of_a_refused_access;
    /// Requirement MR-06: the close of a region with an open counter fails with Busy, and the
    /// region still works and counts. It can be closed once all of its counters are closed, in any
    /// order.
    region_closes_after_the_last_of_its_counters, COUNTERS;
    /// Requirement MR-06: in ENDPOINT mode, a region can be closed before its endpoint, which still
    /// serves other regions.
    region_closes_before_its_endpoint, ENDPOINT_MODE;
    /// Requirement MR-06: in ENDPOINT mode, no endpoint reaches a region whose endpoint is closed.
    /// The region can still be closed.
    region_of_a_closed_endpoint_is_unreachable_and_closes, ENDPOINT_MODE;
    /// Requirement MR-07: in each of five rounds, new memory at the same address is registered,
    /// and peers reach the new bytes. Then the region is closed and the memory is freed.
    memory_at_a_reused_address_is_reached_five_times;
    /// Requirement MR-07: in each of 10,000 rounds, new memory at the same address is registered,
    /// and peers reach the new bytes. Then the region is closed and the memory is freed.
    memory_at_a_reused_address_is_reached_ten_thousand_times, LONG;
    /// Requirement MR-07: after the pages of a region were replaced, the NIC uses either the old or
    /// the new pages, for reads and writes alike. After a refresh it uses the new pages.
    registration_keeps_its_pages_or_follows_the_mapping, HOST_PAGES;
    /// Requirement MR-14: a key with MR_SINGLE_USE is invalid after the first access that succeeds.
    /// Refused accesses do not count.
    single_use_key_works_once, CONTROL;
    /// Requirements MODE-03 and MR-09: a foreign, forged or stale descriptor of a local buffer is
    /// refused. A buffer without a descriptor is refused in LOCAL mode, and in HMEM mode if it is
    /// device memory.
    local_buffers_need_a_descriptor_of_a_live_region;
    /// Requirement MR-09: a local buffer needs WRITE for a write, READ for a read, and SEND for a
    /// message.
    local_buffers_need_the_right_of_their_operation, LOCAL_RIGHTS;
    /// Requirement MR-09: a receive fails if the region of its buffer lacks RECV, or if the buffer
    /// leaves the region.
    receives_need_the_right_recv_and_stay_in_bounds, LOCAL_RIGHTS;
    /// Requirement MR-09: a post to a peer fails with InvalidArgument if only another endpoint
    /// resolved the peer.
    peer_of_another_endpoint_is_refused, ONCE;
    /// Requirement MR-07: the close of a region returns the memory to the caller. The caller can
    /// register this memory again, and peers then read its current bytes.
    memory_is_registered_again_after_close, ONCE;
    /// Requirement MR-16: several threads can register regions of one domain, access them and close
    /// them at the same time.
    threads_register_transfer_and_close_at_once;
    /// Requirement MR-16: while a registration is in the driver, other registrations, transfers and
    /// closes succeed.
    registration_in_the_driver_blocks_no_other_call, CONTROL;
    /// Requirement MR-11: the objects of a domain can be dropped in any order, with a transfer in
    /// flight. The provider then counts no live object, and its threads with names that begin with
    /// `hmem-` end.
    any_order_of_drops_leaves_nothing_live, ONCE, PLAIN_KEYS;
    /// Requirement MR-11: the close of a domain fails with Busy and the numbers of its live
    /// regions, windows and endpoints.
    close_of_a_domain_counts_its_live_objects, ONCE, PLAIN_KEYS;
    /// Requirement MR-11: after its regions and endpoints are closed, a domain counts no live
    /// object and can be closed.
    closing_everything_leaves_nothing_live, ONCE;
    /// Requirement MR-11: domains, endpoints and regions leave no file descriptor open after they
    /// are dropped.
    opening_and_closing_leaks_no_fd, ONCE;
    /// Requirements MR-04 and HM-06: registrations leave no file descriptor open after they are
    /// closed or refused, and no export.
    registering_leaks_no_fd;
    /// Requirement LIFE-08: after the loss of a NIC, each pending receive ends with one error, and
    /// new calls fail with Unavailable. All open objects can still be closed.
    lost_nic_ends_requests_and_refuses_calls, CONTROL;
    /// Requirement LIFE-08: requests fail with Unreachable while the port is down, and succeed once
    /// the port is up again. The domain reports both changes.
    requests_fail_while_the_port_is_down, CONTROL;
    /// Requirement LIFE-09: memory of a lost NIC can be registered again in another domain. A peer
    /// learns the new key from the key feed, and the old generation is refused.
    memory_of_a_lost_nic_is_registered_again_with_a_new_key, CONTROL, PLAIN_KEYS;
    /// Requirement LIFE-07: a revoked dma-buf ends all accesses to its region and to sub-regions,
    /// by the owner and by peers, with typed errors. Other regions work, and the revoked one
    /// closes.
    revoked_region_refuses_all_accesses_and_closes, DMA_BUF, CONTROL;
    /// Requirement LIFE-07: a revocation ends accesses through windows of the region.
    window_over_revoked_memory_is_refused_and_unbinds, WINDOWS, DMA_BUF, CONTROL;
    /// Requirement LIFE-07: a revocation returns once no transfer uses the memory.
    revocation_waits_for_transfers_in_flight, DMA_BUF, CONTROL;
    /// Requirement LIFE-07: a registration cache drops the regions of a revoked dma-buf, and no
    /// others.
    cache_drops_revoked_memory, DMA_BUF, CONTROL, UNBOUND;
    /// Requirement LIFE-07: revoked memory can be registered again, and peers learn the new key.
    revoked_memory_is_registered_again_with_a_new_key, DMA_BUF, CONTROL, PLAIN_KEYS;
    /// Requirements KEY-01 and KEY-02: no two live regions have the same key, whether the
    /// application or the provider chose the keys.
    live_regions_have_keys_of_their_own;
    /// Requirement KEY-01: a requested key of `u64::MAX`, or with more bits than the NIC's keys
    /// have, fails with KeyRejected.
    requested_key_that_the_nic_cannot_use_is_rejected, OWN_KEYS;
    /// Requirement KEY-01: a request for the key of a live region of the domain fails with NoKey,
    /// and succeeds after that region is closed.
    requested_key_in_use_is_refused, OWN_KEYS;
    /// Requirement KEY-05: peers reach a region only if their endpoint has the region's
    /// authorization key. A region without an authorization key of its own has that of its domain.
    peers_need_the_auth_key_of_the_region;
    /// Requirement KEY-03: `raw_attr` fails with TooSmall and the needed size if the buffer is too
    /// small. Otherwise it returns the raw key and the base address of any region.
    raw_attr_returns_the_needed_size_and_works_on_every_region, RAW_KEYS;
    /// Requirements KEY-03, KEY-04 and MODE-04: a mapped raw key works only in the domain that
    /// mapped it, until that domain unmaps it or the region is closed.
    raw_key_is_mapped_used_and_unmapped, RAW_KEYS;
    /// Requirement KEY-04: the close of a domain fails with Busy until the domain has unmapped its
    /// raw keys.
    domain_with_mapped_keys_is_busy_at_close, RAW_KEYS;
    /// Requirement MODE-10: resolving bytes that are no endpoint name fails with Malformed.
    malformed_endpoint_name_is_refused, ONCE;
    /// Requirement SUB-01: a sub-region has a key, rights and bounds of its own. Closing it leaves
    /// its base usable.
    sub_region_has_its_own_key_rights_and_bounds, SUB_REGIONS;
    /// Requirement SUB-01: a sub-region is refused if it leaves its base, lets the NIC write a base
    /// that the NIC may only read, or has a base of another domain.
    sub_region_that_exceeds_its_base_is_refused, SUB_REGIONS;
    /// Requirement SUB-01: the provider itself, without the checks of a domain, refuses a
    /// sub-region that exceeds its base in range or rights.
    sub_region_past_the_domain_gets_no_more_than_its_base, SUB_REGIONS;
    /// Requirement SUB-02: a base cannot be closed before its sub-regions, which may have
    /// sub-regions in turn.
    base_closes_after_its_sub_regions_three_levels_deep, SUB_REGIONS;
    /// Requirement SUB-02: the registration of a dropped base ends when its last sub-region is
    /// dropped.
    dropped_base_lives_as_long_as_its_sub_regions, SUB_REGIONS;
    /// Requirement SUB-03: sub-regions register no pages and export no dma-buf beyond the
    /// registration of their base.
    sub_regions_pin_and_register_no_pages, SUB_REGIONS;
    /// Requirement KEY-08: peers reach a sub-region only with the sub-region's own authorization
    /// key, whichever key the base has.
    sub_region_is_reached_with_its_own_auth_key_only, SUB_REGIONS;
    /// Requirement KEY-08: in ENDPOINT mode, peers reach a sub-region only through the endpoint
    /// that it is bound to, which may differ from that of the base.
    sub_region_is_reached_through_its_own_endpoint_only, SUB_REGIONS, ENDPOINT_MODE;
    /// Requirement KEY-08: a write to a sub-region with a counter fails if the target's endpoint
    /// lacks the capability RMA_EVENT.
    counted_sub_region_needs_rma_event, SUB_REGIONS, COUNTERS;
    /// Requirement EVT-02: the counter of a sub-region counts writes and atomics with the
    /// sub-region's key, and none with the base's key.
    sub_region_counts_its_own_writes, SUB_REGIONS, COUNTERS;
    /// Requirements MW-01 and MW-02: peers reach the memory of a bound window until the window is
    /// unbound or invalidated.
    window_is_reached_until_it_is_invalidated, WINDOWS;
    /// Requirement MW-07: an access that leaves the window fails, even inside the region of the
    /// window.
    nothing_is_reached_outside_a_window, WINDOWS;
    /// Requirements MR-06 and MW-06: the close of a region with a bound window fails with Busy, and
    /// the region still works.
    region_with_a_bound_window_is_busy, WINDOWS;
    /// Requirements MW-05 and MW-07: the provider itself, without the checks of a domain, refuses a
    /// window that exceeds its region in range or rights.
    window_bound_past_the_domain_gets_no_more_than_its_region, WINDOWS;
    /// Requirement MW-01: each bind gives a type 1 window a new key, and ends the old key.
    type_1_window_changes_its_key_at_each_bind, WINDOWS, TYPE_1, CONTROL;
    /// Requirement MW-01: a bind of a type 1 window to zero bytes fails with ZeroLength, and the
    /// window stays bound.
    type_1_window_refuses_an_empty_range, WINDOWS, TYPE_1, CONTROL;
    /// Requirement MW-02: a posted request binds a type 2 window. The tag in the request is the low
    /// 8 bits of the key. A bound window must be invalidated before the next bind.
    type_2_window_binds_by_a_request_with_a_tag, WINDOWS, TYPE_2, CONTROL;
    /// Requirement MW-03: peers reach a type 2A window only through the queue pair that bound it.
    /// That queue pair cannot be closed while the window is bound.
    type_2a_window_is_reached_through_its_queue_pair_only, WINDOWS, TYPE_2, CONTROL, UNBOUND;
    /// Requirement MW-03: a queue pair can be closed while a type 2B window is bound through it.
    /// The window is then free, and can be bound through another queue pair.
    type_2b_window_does_not_keep_its_queue_pair_open, WINDOWS, TYPE_2, CONTROL, UNBOUND;
    /// Requirement MW-04: an invalidation ends the key of a type 2 window. The window is then free,
    /// and can be bound again.
    invalidation_ends_the_key_but_not_the_window, WINDOWS, TYPE_2, CONTROL;
    /// Requirements MW-04 and MW-10: a message from a peer can invalidate the key of a type 2
    /// window. The completion of the receive names the key.
    peer_invalidates_a_window_by_a_message, WINDOWS, TYPE_2, CONTROL;
    /// Requirements MW-04 and MW-10: a message from a peer cannot invalidate a type 1 window, which
    /// stays bound.
    peer_does_not_invalidate_a_type_1_window, WINDOWS, TYPE_1, CONTROL;
    /// Requirements MW-04 and MW-10: a message from a peer can invalidate a type 2 window only
    /// through the queue pair that bound the window.
    peer_invalidates_through_the_queue_pair_of_the_window_only, WINDOWS, TYPE_2, CONTROL;
    /// Requirement MW-05: a window may grant rights that its region does not grant to peers. It may
    /// grant writes only if the NIC may write the region.
    windows_have_their_own_rights, WINDOWS, TYPE_1, CONTROL;
    /// Requirement MW-06: windows of one region may overlap. The region cannot be closed while one
    /// of them is bound.
    windows_may_overlap_and_keep_their_region_open, WINDOWS, TYPE_1, TYPE_2, CONTROL;
    /// Requirement MW-07: a bind fails if the window leaves its region, or if the region lacks
    /// MW_BIND or belongs to another domain.
    window_outside_its_region_or_domain_is_refused, WINDOWS, TYPE_1, TYPE_2, CONTROL;
    /// Requirement MW-07: the error of a refused bind names the public call, the rule and the
    /// values of the bind.
    refused_bind_names_its_call_and_its_values, WINDOWS, TYPE_1, TYPE_2, CONTROL;
    /// Requirement MW-08: binding a window registers no memory, exports none, and does not call the
    /// iface.
    binding_registers_and_exports_nothing, WINDOWS, TYPE_1, TYPE_2, CONTROL;
    /// Requirement KEY-08: peers reach a window only with the authorization key of the window's
    /// region.
    window_is_reached_with_the_auth_key_of_its_region_only, WINDOWS, CONTROL;
    /// Requirement KEY-08: in ENDPOINT mode, peers reach a window only through the endpoint that
    /// the window's region is bound to.
    window_is_reached_through_the_endpoint_of_its_region_only, TYPE_1, WINDOWS, CONTROL,
        ENDPOINT_MODE;
    /// Requirement KEY-08: a write through a window on a region with a counter fails if the
    /// target's endpoint lacks the capability RMA_EVENT.
    window_on_a_counted_region_needs_rma_event, WINDOWS, CONTROL, COUNTERS;
    /// Requirement EVT-02: the counter of a region counts each write and atomic through a window
    /// once. It counts neither reads nor refused accesses.
    writes_and_atomics_through_a_window_count_once, WINDOWS, CONTROL, COUNTERS;
    /// Requirement MW-09: a grant gives access to its part with its rights until it is revoked.
    grant_gives_access_to_its_part_with_its_rights, GRANTS;
    /// Requirement MW-09: an access that leaves the part of a grant fails and moves no byte.
    nothing_is_reached_outside_a_grant, GRANTS;
    /// Requirement MW-09: a region with a grant cannot be closed. If the region is dropped, the
    /// grant keeps it until the grant is dropped, which revokes it.
    grant_keeps_its_region_and_is_revoked_on_drop, GRANTS;
    /// Requirements MW-09 and MW-10: a message from the peer can revoke the peer's grant.
    peer_revokes_its_grant_by_a_message, GRANTS, WINDOWS;
    /// Requirement MW-09: a grant uses the best window type that the NIC supports, or else a
    /// sub-region, and names it. It keeps the reasons against better ones, and registers no pages.
    grant_uses_the_best_mechanism_and_says_why, EVERY_MECHANISM, CONTROL;
    /// Requirement MW-09: if neither windows nor sub-regions work, the error of the grant has the
    /// reasons against each.
    grant_that_no_mechanism_gives_has_every_reason, EVERY_MECHANISM, CONTROL;
    /// Requirement MW-09: a failed bind or invalidation of a grant leaves no window behind.
    failed_grant_leaves_no_window, WINDOWS, CONTROL;
    /// Requirement MW-09: the end of a grant waits for an access in flight.
    revoking_waits_for_an_access_in_flight, GRANTS, CONTROL;
    /// Requirements MW-09 and KEY-02: the keys of 600 grants in turn differ.
    keys_of_grants_are_not_reused_soon, GRANTS, CONTROL;
    /// Requirement MW-09: a grant fails if its part is empty or leaves the region, if it has a
    /// right that peers do not use, or if the region does not allow it.
    grants_with_wrong_arguments_are_refused, GRANTS;
    /// Requirement MODE-04: in RAW mode, the allocation of a window fails with Unsupported, because
    /// windows have no raw keys.
    windows_are_refused_in_raw_mode, RAW_MODE;
    /// Requirement EVT-02: the counter of a region counts each successful write and atomic with the
    /// region's key once, and no reads.
    counter_counts_each_remote_write_and_atomic_once, COUNTERS;
    /// Requirement EVT-02: if a region has several counters, each open counter counts every write
    /// and atomic once.
    every_counter_of_a_region_counts_each_write_and_atomic_once, COUNTERS;
    /// Requirements EVT-02 and KEY-08: a write to a region with a counter fails if the target's
    /// endpoint lacks the capability RMA_EVENT.
    endpoint_without_rma_event_is_refused, COUNTERS;
    /// Requirement MODE-08: a region still works after all of its pages or some of them were
    /// refreshed.
    refreshed_region_still_works, REFRESH;
    /// Requirement EVT-01: in a domain that is bound to an event queue, each registration ends in
    /// one event, which has the context of the request.
    each_asynchronous_registration_ends_in_one_event;
    /// Requirement EVT-01: `regattr_into` stores the region before the event of its registration
    /// can be read.
    region_is_stored_before_its_event_can_be_read;
    /// Requirement EVT-01: a request that its call refuses emits no event. If the registration
    /// fails later, its event has the error, and the region can be closed.
    only_a_failure_after_the_call_emits_an_event;
    /// Requirement MR-10: before a registration completes, the region has neither descriptor nor
    /// key. It cannot be enabled, and has no sub-regions and windows. The key that the application
    /// asked for gives peers no access yet.
    pending_region_has_neither_descriptor_nor_key, CONTROL;
    /// Requirement EVT-03: the close of a region waits for a registration in the driver, and
    /// cancels one that has not begun. Each registration has its one event, and nothing stays
    /// registered.
    close_during_registration_loses_no_event, CONTROL;
    drop_during_registration_loses_no_event, CONTROL;
    /// Requirement EVT-03: each registration has its one event if the region is closed or dropped
    /// at any moment, and nothing stays registered.
    close_at_any_moment_loses_no_event;
    /// Requirement EVT-03: each registration has its one event if its domain is dropped right after
    /// the call.
    domain_dropped_right_after_submits_loses_no_event;
    /// Requirement EVT-03: the close of a domain fails with Busy during registrations. Each
    /// registration has its one event if the domain is dropped meanwhile.
    domain_dropped_during_registrations_loses_no_event, CONTROL;
}
