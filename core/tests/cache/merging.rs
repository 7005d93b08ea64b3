//! Joining registrations.

use std::sync::atomic::Ordering;

use hmem_core::{
    Access, ErrorKind,
    cache::{Key, Limits},
};

use crate::support::*;

const MERGING: Limits = Limits { max_count: 100, max_bytes: u64::MAX, merge: true };

#[test]
fn cache_05_adjacent_and_overlapping_ranges_are_joined_in_cascade() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(2 * PAGE, PAGE)).unwrap();
    cache.get(&key(4 * PAGE, 2 * PAGE)).unwrap();
    cache.get(&key(100 * PAGE, PAGE)).unwrap();
    assert_eq!(books.live(), 4);
    // Touches the first two; the second touches nothing more, the new one overlaps the third.
    let joined = cache.get(&key(PAGE, 4 * PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 6 * PAGE));
    assert_eq!(books.live(), 2);
    for i in 0..6 {
        assert_eq!(cache.get(&key(i * PAGE, PAGE)).unwrap().id, joined.id);
    }
    assert_eq!(cache.statistics().merged, 3);
    assert_eq!(cache.statistics().entries, 2);
    drop(joined);
    drop(cache);
    assert_empty(&books);
}

#[test]
fn cache_05_rights_are_not_widened() {
    let (cache, _books) = cache(MERGING);
    let with = |page: u64, access| Key::new(range(page * PAGE, PAGE), access).unwrap();
    cache.get(&with(0, Access::SEND)).unwrap();
    cache.get(&with(1, Access::SEND | Access::REMOTE_WRITE)).unwrap();
    let middle = cache.get(&with(2, Access::REMOTE_WRITE)).unwrap();
    assert_eq!(middle.key, with(2, Access::REMOTE_WRITE));
    assert_eq!(cache.statistics().merged, 0);
}

#[test]
fn cache_05_an_entry_in_use_lives_on_beside_what_replaced_it() {
    let (cache, books) = cache(MERGING);
    let old = cache.get(&key(0, PAGE)).unwrap();
    let joined = cache.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!(joined.key.range(), range(0, 2 * PAGE));
    assert!(books.registered.lock().contains_key(&old.id));
    assert_eq!(cache.get(&key(0, PAGE)).unwrap().id, joined.id);
    drop(old);
    cache.flush();
    assert_eq!(books.live(), 1);
}

#[test]
fn cache_05_a_merge_that_fails_midway_leaves_no_registration() {
    let (cache, books) = cache(MERGING);
    cache.get(&key(0, PAGE)).unwrap();
    cache.get(&key(2 * PAGE, PAGE)).unwrap();
    books.fail_next(ErrorKind::BadAddress);
    let error = cache.get(&key(PAGE, PAGE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadAddress);
    cache.flush();
    assert_eq!(books.live(), 0);
    let now = cache.statistics();
    assert_eq!((now.entries, now.bytes, now.dying), (0, 0, 0));
    assert_empty(&books);
}

#[test]
fn cache_05_without_the_option_nothing_is_joined_and_with_it_no_further_than_allowed() {
    let (plain, books) = cache(Limits { merge: false, ..MERGING });
    plain.get(&key(0, PAGE)).unwrap();
    plain.get(&key(PAGE, PAGE)).unwrap();
    assert_eq!(books.live(), 2);

    let (joining, books) = cache(Limits { max_bytes: 3 * PAGE, ..MERGING });
    joining.get(&key(0, 2 * PAGE)).unwrap();
    assert_eq!(joining.get(&key(2 * PAGE, PAGE)).unwrap().key.range(), range(0, 3 * PAGE));
    assert_eq!(joining.get(&key(3 * PAGE, PAGE)).unwrap().key.range(), range(3 * PAGE, PAGE));
    assert_eq!(books.registrations.load(Ordering::SeqCst), 3);
}
