//! Races on real processors.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Barrier, Cache, Key, Limits, Source};
use crate::{
    Access, Address, AddressRange, Rejected, Result,
    monitor::{Cause, Invalidator},
};

/// Registrations that are numbers: alive until they are deregistered, and harmless to read afterwards.
struct Numbers {
    next: AtomicU64,
    /// One more than the number that was deregistered last, of those that share a place.
    gone: Box<[AtomicU64]>,
}

const PLACES: usize = 1 << 12;

impl Numbers {
    fn is_gone(&self, region: u64) -> bool {
        self.gone[region as usize % PLACES].load(Ordering::SeqCst) == region + 1
    }
}

impl Source for Numbers {
    type Region = u64;
    type Watch = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn checked(&self, (): &()) -> bool {
        false
    }

    fn valid(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn longest(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, _: &Key) -> Result<u64> {
        Ok(self.next.fetch_add(1, Ordering::SeqCst))
    }

    fn deregister(&self, region: u64) -> Result<(), Rejected<u64>> {
        self.gone[region as usize % PLACES].store(region + 1, Ordering::SeqCst);
        Ok(())
    }
}

/// One thread hits, the other ends the entry, over and over; whether a lease was ever seen of what was deregistered.
fn a_lease_outlives_its_region(barrier: Barrier, rounds: u64) -> bool {
    let numbers = Numbers { next: AtomicU64::new(0), gone: (0..PLACES).map(|_| AtomicU64::new(0)).collect() };
    let cache = Cache::with_barrier(numbers, Limits::default(), barrier).expect("a cache");
    let range = AddressRange::new(Address(1 << 30), 4096).expect("no wrap");
    let key = Key::new(range, Access::SEND).expect("a key");
    let (found, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let lease = cache.get(&key).expect("registered");
                for _ in 0..8 {
                    if cache.source().is_gone(*lease) {
                        found.store(true, Ordering::Relaxed);
                    }
                }
            }
        });
        for _ in 0..rounds {
            // Two of its own, so that hits after the first are plain ones.
            drop(cache.get(&key).expect("registered"));
            drop(cache.get(&key).expect("registered"));
            cache.invalidator().invalidate(range, Cause::Application);
            cache.flush();
            if found.load(Ordering::Relaxed) {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    found.into_inner()
}

const ROUNDS: u64 = 20_000;

#[test]
fn no_lease_outlives_its_region_with_membarrier() {
    assert!(!a_lease_outlives_its_region(Barrier::choose(), ROUNDS));
}

#[test]
fn no_lease_outlives_its_region_with_fences() {
    assert!(!a_lease_outlives_its_region(Barrier::Fences, ROUNDS));
}
