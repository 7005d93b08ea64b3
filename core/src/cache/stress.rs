//! Tests of races on real processors.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Cache, CacheBackend, Key, Limits, sync::Barrier};
use crate::{Access, Address, AddressRange, Rejected, Result, monitor::Invalidator};

/// A backend that registers nothing. Its regions are numbers, which can be read even after their
/// deregistration.
struct Numbers {
    next: AtomicU64,
    /// The recently deregistered regions. After the deregistration of region `n`, the element at
    /// index `n % PLACES` is `n + 1`. An element of 0 stands for no region.
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
    type Owner = ();

    fn watch(&self, _: &Key, _: &Arc<dyn Invalidator>) -> Result<()> {
        Ok(())
    }

    fn unwatch(&self, (): ()) {}

    fn register(&self, _: &Key, (): &(), _: Option<&Self::Watch>) -> Result<u64> {
        Ok(self.next.fetch_add(1, Ordering::SeqCst))
    }

    fn deregister(&self, region: u64) -> Result<(), Rejected<u64>> {
        self.gone[region as usize % PLACES].store(region + 1, Ordering::SeqCst);
        Ok(())
    }
}

/// Spins until `turn` equals `number`. Returns `false` if `turn` becomes [`OVER`].
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

/// A guard that stores [`OVER`] in a turn counter when it is dropped, even by a panic. This ends
/// the other thread's wait.
struct EndTurnOnDrop<'a>(&'a AtomicU64);

impl Drop for EndTurnOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::Release);
    }
}

/// Hits an entry on one thread while another thread evicts it, in many rounds. Returns the first
/// round in which a leased region was deregistered.
///
/// Both threads start at once. The first thread issues stores to distant cache lines before it
/// publishes its lease. The store of the lease comes after them, so that the other thread sees it
/// late.
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
            let _ends = EndTurnOnDrop(&done);
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
        let _ends = EndTurnOnDrop(&begun);
        (1..=rounds).find(|round| {
            // The second of these lookups marks the entry as referenced, so that the other thread's
            // lookup is a fast hit.
            drop(cache.get_or_register(&key).expect("registered"));
            drop(cache.get_or_register(&key).expect("registered"));
            begun.store(*round, Ordering::Release);
            // This delay varies the moment of the eviction.
            for _ in 0..round % LATEST {
                std::hint::black_box(());
            }
            cache.evict_idle();
            assert!(await_turn(&done, *round), "the other thread has panicked");
            found.load(Ordering::Relaxed)
        })
    })
}

/// The number of words that the stores are spread over: 32 MiB, more than the nearest processor
/// caches hold.
const FAR: usize = 1 << 22;
/// The number of stores before each lease, which a processor's store buffer can hold.
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

/// If an eviction does not issue the heavy barrier, a lease can outlive its region's registration.
/// The test needs two processors. On a busy machine it needs some ten thousand rounds.
#[test]
#[ignore = "the slow tier"]
fn lease_outlives_its_region_without_the_barrier() {
    assert!(find_stale_lease(Barrier::Missing, 100 * ROUNDS).is_some(), "the race was never lost");
}
