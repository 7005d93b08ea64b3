//! Test patterns, and a check for leaked file descriptors.

use std::fs;

/// Returns `len` nonzero bytes. The bytes depend on `seed` and repeat after a prime number of
/// bytes, so that adjacent pages differ.
pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let block: Vec<_> = (0..257).map(|at| ((at * 31 + seed * 97) % 251 + 1) as u8).collect();
    let mut bytes = block.repeat(len as usize / block.len() + 1);
    bytes.truncate(len as usize);
    bytes
}

/// Asserts that two byte strings are equal. A failure prints only the first difference, and `what`
/// as the name of the bytes.
#[track_caller]
pub(crate) fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if found != expected {
        let at =
            (0..found.len()).find(|&at| found[at] != expected[at]).expect("the strings differ");
        panic!("{what}: byte {at} is {:#x} instead of {:#x}", found[at], expected[at]);
    }
}

/// Asserts that repeated calls of `repeat` do not increase the number of open files. Files that the
/// first call opens do not count.
#[track_caller]
pub(crate) fn assert_no_fd_leaks(what: &str, mut repeat: impl FnMut()) {
    const ROUNDS: usize = 16;
    repeat();
    let before = open_fds();
    for _ in 0..ROUNDS {
        repeat();
    }
    let after = open_fds();
    assert!(after <= before, "{what}: {} more open files after {ROUNDS} rounds", after - before);
}

/// Returns the number of open file descriptors of the process.
fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").expect("list /proc/self/fd").count()
}
