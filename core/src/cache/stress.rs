//! Races on real processors.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::{Barrier, Cache, Key, Limits, Source};
use crate::{Access, Address, AddressRange, Rejected, Result, monitor::Invalidator};

/// Registrations that are numbers: alive until they are deregistered, and harmless to read
/// afterwards.
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

/// Spins until `turn` is `number`; `false` if it is [`OVER`].
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

/// Ends the other thread's waiting, also where this one panics.
struct Ends<'a>(&'a AtomicU64);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(OVER, Ordering::Release);
    }
}

/// One thread hits an entry while the other gives it back, over and over; in which round a lease
/// was seen of what was deregistered.
///
/// Both start at once. The first has stores to lines that are far away under way when it publishes
/// its lease, so that this one, which comes after them, is late to be seen by the other.
fn a_lease_outlives_its_region(barrier: Barrier, rounds: u64) -> Option<u64> {
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
                let lease = cache.get(&key).expect("registered");
                let region = *lease;
                if (0..LOOKS).any(|_| cache.source().is_gone(region)) {
                    found.store(true, Ordering::Relaxed);
                }
                drop(lease);
                done.store(round, Ordering::Release);
            }
        });
        let _ends = Ends(&begun);
        (1..=rounds).find(|round| {
            // Two, so that the other's is a plain one.
            drop(cache.get(&key).expect("registered"));
            drop(cache.get(&key).expect("registered"));
            begun.store(*round, Ordering::Release);
            // Sometimes early, sometimes late.
            for _ in 0..round % LATEST {
                std::hint::black_box(());
            }
            cache.clear();
            assert!(await_turn(&done, *round), "the other thread has panicked");
            found.load(Ordering::Relaxed)
        })
    })
}

/// 32 MiB: more than what the nearest caches hold.
const FAR: usize = 1 << 22;
/// No more than a processor takes without waiting for them.
const STORES: u32 = 32;
const LOOKS: u32 = 300;
const LATEST: u64 = 1024;

const ROUNDS: u64 = 20_000;

#[test]
fn no_lease_outlives_its_region_with_membarrier() {
    assert_eq!(a_lease_outlives_its_region(Barrier::choose(), ROUNDS), None);
}

#[test]
fn no_lease_outlives_its_region_with_fences() {
    assert_eq!(a_lease_outlives_its_region(Barrier::Fences, ROUNDS), None);
}

/// Takes two processors; where others want them too, some ten thousands of rounds.
#[test]
#[ignore = "the slow tier"]
fn a_lease_outlives_its_region_without_the_barrier() {
    assert!(
        a_lease_outlives_its_region(Barrier::Missing, 100 * ROUNDS).is_some(),
        "the race was never lost"
    );
}
