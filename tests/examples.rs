//! Runs the examples as a user does.

#[path = "../examples/cached_transfers.rs"]
mod cached_transfers;
#[path = "../examples/error_handling.rs"]
mod error_handling;
#[path = "../examples/key_value_store.rs"]
mod key_value_store;
#[path = "../examples/kv_cache_sleep.rs"]
mod kv_cache_sleep;
#[path = "../examples/kv_cache_transfer.rs"]
mod kv_cache_transfer;
#[cfg(feature = "verbs")]
#[path = "../examples/own_protection_domain.rs"]
mod own_protection_domain;
#[path = "../examples/plug_in_iface.rs"]
mod plug_in_iface;
#[path = "../examples/plug_in_provider.rs"]
mod plug_in_provider;

#[test]
fn kv_cache_blocks_arrive_in_device_memory() {
    assert_eq!(kv_cache_transfer::run().expect("the example works"), 100);
}

/// LIFE-02, LIFE-03
#[test]
fn kv_cache_that_sleeps_and_wakes_never_shows_other_bytes() {
    let reads = kv_cache_sleep::run().expect("the example works");
    assert!(reads.verified > 0 && reads.refused > 0, "{reads:?}");
}

/// CACHE-01
#[test]
fn cached_transfers_register_each_part_once() {
    let statistics = cached_transfers::run().expect("the example works");
    assert_eq!((statistics.misses, statistics.hits), (16, 8 * 100 - 16));
}

#[test]
fn error_handling_sees_each_error_that_it_explains() {
    error_handling::run().expect("the example works");
}

/// MW-09
#[test]
fn key_value_store_refuses_a_client_with_the_key_of_another() {
    let served = key_value_store::run("loopback").expect("the example works");
    assert_eq!(served.grants, [5, 5]);
    assert_eq!(served.refusal.kind(), hmem::ErrorKind::InvalidKey, "{}", served.refusal);
}

/// HM-11
#[test]
fn iface_from_outside_the_workspace_works() {
    plug_in_iface::run().expect("the example works");
}

#[test]
fn plug_in_provider_moves_bytes() {
    plug_in_provider::run().expect("the example works");
}

#[cfg(feature = "verbs")]
#[test]
fn own_protection_domain_works_or_names_the_missing_device() {
    match own_protection_domain::run() {
        Ok((lkey, rkey)) => assert!(lkey != 0 && rkey != 0, "keys {lkey:#x} and {rkey:#x}"),
        Err(error) => {
            assert_eq!(error.kind(), hmem::ErrorKind::Unavailable, "{error}");
            assert!(error.remedy_text().is_some_and(|text| text.contains("rdma")), "{error}");
        }
    }
}
