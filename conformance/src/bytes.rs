//! Bytes to move, and the open files that moving them may leave behind.

use std::fs;

/// Bytes that tell their position and their seed, none of them 0. They repeat after a prime number
/// of bytes, so that no page looks like its neighbour.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let block: Vec<_> = (0..257).map(|at| ((at * 31 + seed * 97) % 251 + 1) as u8).collect();
    let mut bytes = block.repeat(len as usize / block.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

/// Compares bytes without printing all of them.
#[track_caller]
pub(crate) fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if found != expected {
        let at = (0..found.len()).find(|&at| found[at] != expected[at]).expect("they differ");
        panic!("{what}: byte {at} is {:#x} instead of {:#x}", found[at], expected[at]);
    }
}

/// Repeats something, and checks that it leaves no more open files than a first time does.
#[track_caller]
pub(crate) fn assert_no_fd_leaks(what: &str, mut repeat: impl FnMut()) {
    const ROUNDS: usize = 16;
    repeat();
    let before = open_fds();
    for _ in 0..ROUNDS {
        repeat();
    }
    let after = open_fds();
    assert!(after <= before, "{what}: {} open files more after {ROUNDS} times", after - before);
}

/// Number of open files of the process.
fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("list /proc/self/fd").count()
}
