//! Tests that count a lookup's searches of the table.

use std::sync::Arc;

use super::{Cache, CacheBackend, Key, Limits, index::searches};
use crate::{Access, Address, AddressRange, Rejected, Result, monitor::Invalidator};

const PAGE: u64 = 4096;
const BASE: u64 = 1 << 30;

struct Numbers;

impl CacheBackend for Numbers {
    type Region = u64;
    type Watch = ();
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn register(&self, key: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        Ok(key.range().start().0)
    }

    fn deregister(&self, _: u64) -> Result<(), Rejected<u64>> {
        Ok(())
    }
}

fn cache() -> Cache<Numbers> {
    Cache::new(Numbers, Limits::default()).expect("a cache")
}

/// Returns the key of the `len` bytes that start `offset` bytes after [`BASE`].
fn key(offset: u64, len: u64) -> Key {
    let range = AddressRange::new(Address(BASE + offset), len).expect("no wrap");
    Key::new(range, Access::SEND).expect("a key")
}

/// Returns the number of searches of the table by `lookup`, and its result. Asserts that the
/// statistics count `lookup` as a miss.
fn searches_of_miss<T>(cache: &Cache<Numbers>, lookup: impl FnOnce() -> T) -> (u32, T) {
    let before = cache.statistics().misses;
    searches::take();
    let lease = lookup();
    let counted = searches::take();
    assert_eq!(cache.statistics().misses, before + 1, "no miss");
    (counted, lease)
}

/// Asserts that the lookup `get` searches the table at most twice for each miss. Covers free and
/// leased slots, and pages with no entry, with entries that are too short, and with an invalidated
/// entry.
fn assert_searched_at_most_twice<T>(cache: &Cache<Numbers>, get: impl Fn(&Key) -> T) {
    let mut next = 0;
    let miss = |name: &str, offset: u64, len: u64| {
        let (searches, lease) = searches_of_miss(cache, || get(&key(offset, len)));
        assert!(searches <= 2, "{name}: {searches} searches");
        lease
    };
    let mut fresh = || {
        next += 16 * PAGE;
        next
    };
    drop(miss("the thread's first lookup", fresh(), PAGE));
    drop(miss("an empty page", fresh(), PAGE));

    let held = miss("an empty page", fresh(), PAGE);
    drop(miss("a leased slot and an empty page", fresh(), PAGE));
    drop(held);

    let at = fresh();
    drop(miss("an empty page", at, 64));
    drop(get(&key(at, 64)));
    drop(miss("a page whose entry was the slot's last and is too short", at, 128));
    drop(miss("a page with several entries, none of which covers the key", at, 256));

    let at = fresh();
    drop(miss("an empty page", at, 64));
    drop(miss("an empty page", fresh(), PAGE));
    drop(miss("a page whose only entry is too short", at, 128));

    let at = fresh();
    drop(miss("an empty page", at, 64));
    let held = get(&key(at, 64));
    drop(miss("a leased slot and a page whose only entry is too short", at, 128));
    drop(held);

    let at = fresh();
    drop(miss("an empty page", at, PAGE));
    cache.invalidate(key(at, PAGE).range());
    drop(miss("an invalidated entry that was the slot's last", at, PAGE));
    drop(miss("an empty page", fresh(), PAGE));
    cache.invalidate(key(at, PAGE).range());
    drop(miss("an invalidated entry", at, PAGE));
}

#[test]
fn miss_searches_the_table_at_most_twice() {
    let cache = cache();
    assert_searched_at_most_twice(&cache, |key| cache.get_or_register(key).expect("registered"));
}

#[test]
fn miss_of_a_lookup_handle_searches_the_table_at_most_twice() {
    let cache = cache();
    let handle = cache.lookup_handle();
    assert_searched_at_most_twice(&cache, |key| handle.get_or_register(key).expect("registered"));
}

/// A lookup of any owner that misses, followed by a registration, searches the table at most twice.
/// A domain's cache makes these two calls for each miss.
#[test]
fn miss_after_a_lookup_of_any_owner_searches_the_table_at_most_twice() {
    let cache = cache();
    assert_searched_at_most_twice(&cache, |key| {
        let cached = cache.find(&key.of_any_owner());
        cached.unwrap_or_else(|| cache.register(key, &()).expect("registered"))
    });
}

#[test]
fn hit_searches_the_table_at_most_once() {
    let cache = cache();
    for page in 0..4 {
        drop(cache.get_or_register(&key(page * PAGE, PAGE)).expect("registered"));
    }
    for page in [0, 0, 1, 2, 3, 3] {
        searches::take();
        drop(cache.get_or_register(&key(page * PAGE, PAGE)).expect("a hit"));
        assert!(searches::take() <= 1, "page {page}");
    }
    assert_eq!((cache.statistics().hits, cache.statistics().misses), (6, 4));
}
