//! Random changes of memory under peers that read and write it.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use hmem::{ErrorKind, SparseRegion, system::FreeDetection};

use crate::world::{NICS, Peer, STEP, World, lock, pattern};

const STEPS: u64 = 6;
/// The number of changes by the owner.
const CHANGES: u64 = 150;
/// The bytes at the end of each step, which peers write.
const MARK: usize = 32;

/// A number generator with a seed (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The bytes that a peer writes to memory with the pattern of a seed.
fn mark(seed: u64) -> Vec<u8> {
    pattern(seed + 1_000_000, MARK)
}

/// Memory that the owner has named to its peers.
#[derive(Clone, Copy)]
struct Named {
    step: u64,
    generation: u64,
    seed: u64,
}

/// State that the owner and its peers share.
struct Shared<'a> {
    world: &'a World,
    region: &'a SparseRegion,
    /// The memory that was named last at each step, also if it has gone since.
    named: Mutex<Vec<Named>>,
    done: AtomicBool,
    transferred: AtomicU64,
    refused: AtomicU64,
}

/// Checks the memory of a step: every byte is of the seed, or was written by a peer that meant this
/// seed. If `in_progress` is true, a peer may have written a part of its bytes only.
fn check_content(content: &[u8], seed: u64, in_progress: bool) {
    let (own, end) = content.split_at(STEP - MARK);
    let (expected, mark) = (pattern(seed, STEP), mark(seed));
    let (expected, expected_end) = expected.split_at(STEP - MARK);
    assert_eq!(own, expected, "seed {seed}");
    let right = if in_progress {
        (0..MARK).all(|at| [expected_end[at], mark[at]].contains(&end[at]))
    } else {
        end == expected_end || end == mark
    };
    assert!(right, "seed {seed}: a stale write");
}

/// Reads and writes random memory that was named, current or not, until the owner has ended.
fn transfer(shared: &Shared<'_>, peer: &mut Peer, mut random: Random) {
    while !shared.done.load(Ordering::Acquire) {
        // A peer that is slow uses old keys.
        if random.below(4) != 0 {
            peer.update();
        }
        let named = {
            let named = lock(&shared.named);
            let Some(last) = (named.len() as u64).checked_sub(1) else { continue };
            named[(last - random.below(last.min(12) + 1)) as usize]
        };
        let Named { step, generation, seed } = named;
        let result = match random.below(3) {
            0 => peer.write_end(step, generation, &mark(seed)),
            _ => peer.read(step, generation).map(|content| check_content(&content, seed, true)),
        };
        match result {
            Ok(()) => shared.transferred.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                let typed = [ErrorKind::InvalidKey, ErrorKind::OutOfBounds, ErrorKind::Again];
                assert!(typed.contains(&error.kind()), "{error}");
                shared.refused.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// Makes random changes: maps memory, withdraws and unmaps it, or replaces it.
fn change(shared: &Shared<'_>, mut random: Random) {
    let Shared { world, region, .. } = *shared;
    let mut mapped = [None; STEPS as usize];
    for seed in 1..=CHANGES {
        let step = random.below(STEPS);
        if let Some(old) = mapped[step as usize].take() {
            region.withdraw(world.range(step, 1)).expect("withdraw");
            // No peer reaches the memory any more, so its content is final.
            check_content(&world.content(step), old, false);
            world.unmap(step);
            if random.below(2) == 0 {
                continue;
            }
        }
        world.map(step, seed);
        mapped[step as usize] = Some(seed);
        let generation = region.refresh().expect("refresh");
        lock(&shared.named).push(Named { step, generation, seed });
    }
}

fn run(detection: FreeDetection, seed: u64) {
    let world = World::new(detection, STEPS);
    let region = world.region(&NICS);
    let shared = Shared {
        world: &world,
        region: &region,
        named: Mutex::default(),
        done: AtomicBool::new(false),
        transferred: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    };
    thread::scope(|scope| {
        for (number, nic) in NICS.into_iter().enumerate() {
            let (shared, mut peer) = (&shared, Peer::of(&world, &region, nic));
            let random = Random(seed * 2 + number as u64 + 1);
            scope.spawn(move || transfer(shared, &mut peer, random));
        }
        let owner = scope.spawn(|| change(&shared, Random(seed * 7919 + 1)));
        let result = owner.join();
        shared.done.store(true, Ordering::Release);
        result.expect("the owner");
    });
    let (transferred, refused) = (shared.transferred.into_inner(), shared.refused.into_inner());
    assert!(transferred > 0 && refused > 0, "{transferred} transfers, {refused} refused");
    drop(region);
    world.unmap_all();
}

/// LIFE-02, LIFE-03
#[test]
fn bytes_are_those_of_the_named_memory_while_memory_comes_and_goes() {
    for seed in 1..=3 {
        run(FreeDetection::Identity, seed);
        run(FreeDetection::Callback, seed);
    }
}

/// LIFE-02
#[test]
fn calls_of_many_threads_leave_a_region_whole() {
    for detection in [FreeDetection::Identity, FreeDetection::Callback] {
        let world = World::new(detection, STEPS);
        let region = world.region(&NICS);
        (0..STEPS).for_each(|step| world.map(step, step));
        thread::scope(|scope| {
            for seed in 1..=4 {
                let (world, region) = (&world, &region);
                scope.spawn(move || {
                    let mut random = Random(seed);
                    for _ in 0..100 {
                        let step = random.below(STEPS);
                        match random.below(4) {
                            0 => _ = region.refresh().expect("refresh"),
                            1 => _ = region.withdraw(world.range(step, 1)).expect("withdraw"),
                            2 => _ = region.set_parts(&[world.range(step, 1)]).expect("announce"),
                            _ => assert!(region.parts().len() <= STEPS as usize),
                        }
                    }
                });
            }
        });
        let generation = region.refresh().expect("refresh");
        assert_eq!(world.live_regions(), STEPS * NICS.len() as u64);
        let mut peer = Peer::of(&world, &region, NICS[0]);
        peer.update();
        for step in 0..STEPS {
            assert_eq!(peer.read(step, generation).expect("read"), pattern(step, STEP));
        }
        drop(region);
        world.unmap_all();
    }
}
