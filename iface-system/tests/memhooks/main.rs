//! Tests of the patched C library: MON-03, MON-05, MON-06.
//!
//! Each case runs in a process of its own.
#![allow(missing_docs)]

mod calls;
#[path = "../../../tests/counting/mod.rs"]
mod counting;
mod forks;
#[path = "../monitors/mod.rs"]
mod monitors;
mod patching;
mod subscribing;

use calls::*;
use forks::*;
use patching::*;
use subscribing::*;

cases! {
    /// MON-03, ARM-03
    each_function_notifies_before_and_after,
    /// MON-03
    results_and_errno_are_those_of_the_c_library,
    /// MON-03
    glibcs_own_calls_are_seen,
    /// MON-03
    hooks_are_no_cancellation_points,
    /// MON-03
    hook_that_waits_for_userfaultfd_is_no_cancellation_point,
    /// MON-03
    hooks_allocate_nothing_and_take_no_lock,
    /// MON-03
    thread_inside_a_call_survives_patch_and_unpatch,
    /// MON-03
    threads_run_the_functions_while_they_are_patched,
    /// MON-03
    patches_are_installed_once_and_removed_with_the_last_monitor,
    /// MON-03
    threads_that_start_at_once_share_the_patches,
    /// MON-03
    later_patch_of_another_library_is_detected,
    /// MON-03
    earlier_patch_of_another_library_is_refused_by_name,
    /// MON-03
    subscribing_waits_for_a_change_in_flight,
    /// MON-03
    an_invalidator_is_not_called_after_its_last_subscription,
    /// MON-05
    unmaps_of_uncached_memory_cost_bounded_memory,
    /// MON-06
    a_forked_child_is_disarmed_and_the_parent_undisturbed,
    /// MON-06
    forks_while_other_threads_subscribe_do_not_deadlock,
    more_invalidators_than_slots_are_refused,
    files_are_refused_with_the_reason,
    frees_of_the_system_iface_are_notified;
    slow:
    /// MON-03
    threads_run_the_functions_while_they_are_patched_many_times,
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// Sets `errno` to 77 and runs `call`. Returns the result of the call, and the `errno` after it.
fn observed(call: impl FnOnce() -> usize) -> (usize, i32) {
    // SAFETY: the pointer is that of this thread's `errno`, which lives as long as the thread.
    unsafe {
        *libc::__errno_location() = 77;
        let result = call();
        (result, *libc::__errno_location())
    }
}
