//! Tests of races on real processors.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Cache, CacheBackend, Key, Limits, sync::Barrier};
use crate::{Access, Address, AddressRange, Rejected, Result, monitor::Invalidator};

/// A backend with numbers as registrations, which are harmless to read after their deregistration.
struct Numbers {
    next: AtomicU64,
    /// For each position, one more than the number that was last deregistered at that position.
    gone: Box<[AtomicU64]>,
}

const PLACES: usize = 1 << 12;

impl Numbers {
    fn is_gone(&self, region: u64) -> bool {
        self.gone[region as usize % PLACES].load(Ordering::SeqCst) == region + 1
    }
}

impl CacheBackend for Numbers {
    type Region = u64;
    type Watch = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn needs_validation(&self, (): &()) -> bool {
        false
    }

    fn is_current(&self, (): &()) -> Result<bool> {
        Ok(true)
    }

    fn max_len(&self) -> u64 {
        u64::MAX
    }

    fn register(&self, _: &Key, _: Option<&Self::Watch>) -> Result<u64> {
        Ok(self.next.fetch_add(1, Ordering::SeqCst))
    }

    fn deregister(&self, region: u64) -> Result<(), Rejected<u64>> {
        self.gone[region as usize % PLACES].store(region + 1, Ordering::SeqCst);
        Ok(())
    }
}

/// Spins until `turn` is `number`. Returns `false` if it is [`OVER`].
fn await_turn(turn: &AtomicU64, number: u64) -> bool {
    for spins in 0_u64.. {
        match turn.load(Ordering::Acquire) {
            OVER => return false,
            now if now == number => break,
            _ if spins % 1024 == 1023 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
    true
}

const OVER: u64 = u64::MAX;

/// A guard that ends the other thread's wait when it is dropped, even by a panic.
struct Ends<'a>(&'a AtomicU64);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::Release);
    }
}

/// Hits an entry on one thread while another evicts it, again and again. Returns the first round in
/// which a leased region was deregistered.
///
/// Both threads start at once. The first issues stores to distant lines before it publishes its
/// lease. The store of the lease comes after them, so that the other thread sees it late.
fn find_stale_lease(barrier: Barrier, rounds: u64) -> Option<u64> {
    let numbers =
        Numbers { next: AtomicU64::new(0), gone: (0..PLACES).map(|_| AtomicU64::new(0)).collect() };
    let cache = Cache::with_barrier(numbers, Limits::default(), barrier).expect("a cache");
    let range = AddressRange::new(Address(1 << 30), 4096).expect("no wrap");
    let key = Key::new(range, Access::SEND).expect("a key");
    let far: Box<[AtomicU64]> = (0..FAR).map(|_| AtomicU64::new(0)).collect();
    let found = AtomicBool::new(false);
    let (begun, done) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ends = Ends(&done);
            let mut place = 1_usize;
            for round in 1.. {
                if !await_turn(&begun, round) {
                    break;
                }
                for _ in 0..STORES {
                    place = place.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    far[(place >> 32) % FAR].store(round, Ordering::Relaxed);
                }
                let lease = cache.get_or_register(&key).expect("registered");
                let region = *lease;
                if (0..LOOKS).any(|_| cache.backend().is_gone(region)) {
                    found.store(true, Ordering::Relaxed);
                }
                drop(lease);
                done.store(round, Ordering::Release);
            }
        });
        let _ends = Ends(&begun);
        (1..=rounds).find(|round| {
            // Two lookups, so that the other thread's is a fast hit.
            drop(cache.get_or_register(&key).expect("registered"));
            drop(cache.get_or_register(&key).expect("registered"));
            begun.store(*round, Ordering::Release);
            // Evicts sometimes early, sometimes late.
            for _ in 0..round % LATEST {
                std::hint::black_box(());
            }
            cache.evict_idle();
            assert!(await_turn(&done, *round), "the other thread has panicked");
            found.load(Ordering::Relaxed)
        })
    })
}

/// 32 MiB, more than the nearest processor caches hold.
const FAR: usize = 1 << 22;
/// No more stores than a processor buffers.
const STORES: u32 = 32;
const LOOKS: u32 = 300;
const LATEST: u64 = 1024;

const ROUNDS: u64 = 20_000;

#[test]
fn lease_does_not_outlive_its_region_with_membarrier() {
    assert_eq!(find_stale_lease(Barrier::choose(), ROUNDS), None);
}

#[test]
fn lease_does_not_outlive_its_region_with_fences() {
    assert_eq!(find_stale_lease(Barrier::Fences, ROUNDS), None);
}

/// The test needs two processors. On a busy machine it takes some ten thousand rounds.
#[test]
#[ignore = "the slow tier"]
fn lease_outlives_its_region_without_the_barrier() {
    assert!(find_stale_lease(Barrier::Missing, 100 * ROUNDS).is_some(), "the race was never lost");
}
