//! The conformance suite over the software providers of an installed libfabric
//! (`HMEM_LIBFABRIC_LIBRARY`), or over RDMA devices instead (`HMEM_VERBS_DEVICE`).

mod watchdog;

use std::{env, process::ExitCode, sync::Arc, time::Duration};

use hmem_conformance::Suite;
use hmem_core::{Error, ErrorKind, Result};
use hmem_provider_libfabric::Libfabric;

/// Limit for all tests together. A call of libfabric that never returns ends the process.
const LIMIT: Duration = Duration::from_secs(1200);

/// The names of the providers in the names of trials, and in libfabric.
const NAMES: [(&str, &str); 6] = [
    ("tcp", "tcp"),
    ("tcp-thread", "tcp"),
    ("tcp-rxm", "tcp;ofi_rxm"),
    ("tcp-rxm-thread", "tcp;ofi_rxm"),
    ("shm", "shm"),
    ("shm-thread", "shm"),
];

/// The names of the providers over RDMA devices.
const DEVICE_NAMES: [(&str, &str); 2] =
    [("verbs-rxm", "verbs;ofi_rxm"), ("verbs-rxm-thread", "verbs;ofi_rxm")];

/// Behaviours that no provider has, with the reasons.
const NOWHERE: [(&str, &str); 2] = [
    ("writes_and_atomics_can_be_granted_separately", ONE_RIGHT),
    ("atomic_read_needs_a_right_to_read_or_to_atomics", ONE_RIGHT),
];

/// Behaviours that no software provider has, with the reasons.
const NO_SOFTWARE: [(&str, &str); 6] = [
    ("absent_pages_register_and_fail_only_the_transfer", TOUCHED),
    ("registration_keeps_its_pages_or_follows_the_mapping", TOUCHED),
    ("region_of_several_ranges_is_one_run_of_bytes", KEY_OF_EACH_RANGE),
    ("region_may_have_as_many_ranges_as_the_nic_allows", KEY_OF_EACH_RANGE),
    ("transfers_in_flight_leave_a_closed_region_alone", FINISHED),
    ("close_amid_a_stream_of_writes_leaves_the_memory_alone", FINISHED),
];

const KEY_OF_EACH_RANGE: &str =
    "each range has a key of its own, so the region cannot have the requested one";

/// Behaviours with a refused access, after which the connection is used.
const AFTER_A_REFUSAL: [(&str, &str); 7] = [
    ("sizes_up_to_64_mib_are_reached_at_both_ends", STAYS_BROKEN),
    ("peers_use_the_targets_addresses_for_every_range", STAYS_BROKEN),
    ("peers_get_the_rights_of_the_key_and_no_others", STAYS_BROKEN),
    ("overlapping_regions_grant_each_their_own_rights", STAYS_BROKEN),
    ("closed_region_is_unreachable", STAYS_BROKEN),
    ("reconnect_recovers_both_sides_of_a_refused_access", STAYS_BROKEN),
    ("close_amid_a_stream_of_writes_leaves_the_memory_alone", STAYS_BROKEN),
];
const STAYS_BROKEN: &str =
    "libfabric before 1.19 does not connect again after a refused access over verbs";
const READS_TOO: (&str, &str) = (
    "atomics_need_the_right_to_write",
    "a fetching atomic needs the right to read too (FI_REMOTE_READ)",
);
const FINISHED: &str =
    "libfabric finishes a transfer that has begun after its region was closed: Builder::build";
const TOUCHED: &str = "libfabric copies by memcpy: an access to absent pages ends the process";
const UNREPORTED: &str =
    "shm reports success for an access that the peer refused (2.5), or never ends it (1.17)";
const ONE_RIGHT: &str = "libfabric has one right for RMA writes and atomics: a typed refusal";

fn main() -> ExitCode {
    watchdog::start(LIMIT);
    let mut suite = Suite::from_args();
    let devices = env::var_os("HMEM_VERBS_DEVICE").is_some();
    let old = devices && open(DEVICE_NAMES[0].1, false).is_ok_and(|nic| nic.version() < (1, 19));
    let names = if devices { &DEVICE_NAMES[..] } else { &NAMES };
    for &(name, provider) in names {
        let thread = name.ends_with("-thread");
        suite.provider(name, move || Ok(Arc::new(open(provider, thread)?)));
    }
    for &(name, provider) in names {
        let also: &[(&str, &str)] = match provider {
            "tcp;ofi_rxm" | "verbs;ofi_rxm" => &[READS_TOO],
            "shm" => &[
                ("peers_get_the_rights_of_the_key_and_no_others", UNREPORTED),
                ("overlapping_regions_grant_each_their_own_rights", UNREPORTED),
                ("atomics_need_the_right_to_write", UNREPORTED),
                ("closed_region_is_unreachable", UNREPORTED),
                ("reconnect_recovers_both_sides_of_a_refused_access", UNREPORTED),
            ],
            _ => &[],
        };
        let software: &[_] = if devices { &[] } else { &NO_SOFTWARE };
        let broken: &[_] = if old { &AFTER_A_REFUSAL } else { &[] };
        for (behaviour, reason) in NOWHERE.iter().chain(software).chain(broken).chain(also) {
            suite.ignore(&format!("{name}::{behaviour}"), reason);
        }
    }
    suite.run()
}

/// Builds a provider. Trials run one at a time, so that no other thread uses the environment.
fn open(provider: &'static str, thread: bool) -> Result<Libfabric> {
    let builder = Libfabric::builder().provider(provider).progress_thread(thread);
    // SAFETY: trials run one at a time. The suite closes regions under transfers only in the trials
    // that `main` ignores.
    unsafe { builder.build() }.map_err(|error| match error.context_value("known") {
        Some(_) if provider == "tcp" => Error::new(ErrorKind::Unavailable, "build")
            .caused_by(error)
            .remedy("use libfabric 2: this release has no RDM endpoints over tcp alone"),
        _ => error,
    })
}
