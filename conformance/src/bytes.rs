//! Test patterns, and checks for leaked file descriptors.

use std::{
    collections::HashSet,
    fs,
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::fs::MetadataExt,
    },
};

/// Returns `len` nonzero bytes. The bytes depend on `seed` and repeat after a prime number of
/// bytes, so that adjacent pages differ.
pub fn pattern(seed: u64, len: u64) -> Vec<u8> {
    // 76 * 31 is 97 modulo 251, so each step of `seed` adds 97 to the number before the remainder.
    let start = (seed % 251 * 76 % 251) as usize;
    let (block, len) = (&CYCLE[start..start + BLOCK], len as usize);
    let mut bytes = block.repeat(len / BLOCK + 1);
    bytes.truncate(len);
    bytes
}

/// Number of bytes after which a pattern repeats.
const BLOCK: usize = 257;

/// The blocks of all patterns, which start at the first 251 bytes. The table is computed by the
/// compiler, because tests without optimization make many patterns.
static CYCLE: [u8; 251 + BLOCK] = {
    let mut bytes = [0; 251 + BLOCK];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = (at * 31 % 251 + 1) as u8;
        at += 1;
    }
    bytes
};

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

/// Number of rounds of the checks for leaked file descriptors.
const ROUNDS: usize = 16;

/// Identity of a file: its device and inode numbers.
type FileId = (u64, u64);

/// Returns the identity of the file of a descriptor, or `None` if the descriptor is not open.
fn file_id(fd: RawFd) -> Option<FileId> {
    let file = fs::metadata(format!("/proc/self/fd/{fd}")).ok()?;
    Some((file.dev(), file.ino()))
}

/// Asserts that no descriptor of an exported file stays open. `export` returns such a file, and
/// `release` closes it. Descriptors that are open after the first round are allowed, because later
/// rounds may use them again.
///
/// Only descriptors of exported files count, so other threads may open and close files.
#[track_caller]
pub(crate) fn assert_no_fd_leaks_of_exports<E: AsFd>(export: impl Fn() -> E, release: impl Fn(E)) {
    let mut exported = HashSet::new();
    let mut left = Vec::new();
    for _ in 0..=ROUNDS {
        let export = export();
        exported.insert(file_id(export.as_fd().as_raw_fd()).expect("the export is open"));
        release(export);
        left.push(open_files().iter().filter(|(_, id)| exported.contains(id)).count());
    }
    let (first, last) = (left[0], left[ROUNDS]);
    assert!(
        last <= first,
        "{} descriptors of exported files are open after {ROUNDS} rounds of export and release",
        last - first,
    );
}

/// Number of rounds that must leave a file open for [`assert_no_fd_leaks`] to fail.
const LEAKS: usize = 3;

/// Asserts that `repeat` leaves no file open. Calls `repeat` once without a check, and then
/// [`ROUNDS`] times. Fails if [`LEAKS`] of these calls open a file that is still open at the end.
///
/// Other threads may open files meanwhile. The check fails because of other threads only if they
/// open files in [`LEAKS`] rounds and close none of them.
#[track_caller]
pub(crate) fn assert_no_fd_leaks(what: &str, mut repeat: impl FnMut()) {
    repeat();
    let mut opened = Vec::new();
    for _ in 0..ROUNDS {
        let before = open_files();
        repeat();
        opened.push(&open_files() - &before);
    }
    let open = open_files();
    let leaking = opened.iter().filter(|round| !round.is_disjoint(&open)).count();
    assert!(leaking < LEAKS, "{what}: {leaking} of {ROUNDS} rounds left a file open");
}

/// Returns the open file descriptors of the process, each with the identity of its file.
fn open_files() -> HashSet<(RawFd, FileId)> {
    let entries = fs::read_dir("/proc/self/fd").expect("list /proc/self/fd");
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    let fds = entries.filter_map(|entry| number(entry.expect("list /proc/self/fd")));
    // Another thread may have closed the file since.
    fds.filter_map(|fd| Some((fd, file_id(fd)?))).collect()
}
