//! Resources of a process with their bounds, and the counts of the checks.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt,
    fs::{read_dir, read_link, read_to_string},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

/// The global allocator, which counts the allocated bytes.
struct Counting;

/// The number of bytes that are allocated on the heap.
static LIVE: AtomicU64 = AtomicU64::new(0);

// SAFETY: each call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: the caller upholds the contract of this method, which is that of the forwarded
        // call.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A kind of check. A run in which one kind was never checked fails.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Check {
    /// The bytes of a transfer.
    Bytes,
    /// The content of memory that was replaced, read through a lookup.
    Stale,
    /// The refusal of a key whose window or grant has ended.
    EndedKey,
    /// The error of an injected fault.
    Fault,
    /// The result of a cancelled request.
    Canceled,
    /// The refusals in a forked child.
    Fork,
    /// The bytes that another process reads and writes in shared device memory.
    OtherProcess,
    /// The resources of the process, against their bounds.
    Resources,
    /// The counters of the caches, NICs and workers, against each other.
    Counters,
}

impl Check {
    const ALL: [Self; 9] = [
        Self::Bytes,
        Self::Stale,
        Self::EndedKey,
        Self::Fault,
        Self::Canceled,
        Self::Fork,
        Self::OtherProcess,
        Self::Resources,
        Self::Counters,
    ];
}

/// The number of checks of each kind that passed.
#[derive(Default)]
pub(crate) struct Checks([AtomicU64; Check::ALL.len()]);

impl Checks {
    pub(crate) fn count(&self, check: Check) {
        self.0[check as usize].fetch_add(1, Relaxed);
    }

    /// Panics if no check of some kind ran.
    pub(crate) fn assert_all_ran(&self) {
        for check in Check::ALL {
            assert_ne!(self.0[check as usize].load(Relaxed), 0, "no check of {check:?} ran");
        }
    }
}

impl fmt::Display for Checks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts =
            Check::ALL.map(|check| format!("{check:?} {}", self.0[check as usize].load(Relaxed)));
        f.write_str(&counts.join(", "))
    }
}

/// The bounds of [`Resources`]: name, permitted growth since the first sample in parts of a
/// hundred, and permitted growth in units. `docs/testing.md` repeats the table.
const BOUNDS: [(&str, u64, u64); 11] = [
    ("resident KiB", 1, 4096),
    ("heap KiB", 1, 64),
    ("pinned KiB", 0, 0),
    // Without those of the next line.
    ("fds", 0, 0),
    // The simulated device keeps the file of freed memory while an exported fd of it may be open.
    ("memory files", 0, 2),
    ("threads", 0, 0),
    ("mappings", 1, 16),
    ("regions", 0, 0),
    // The window of revoked grants, which the library keeps for the next grant or has just freed.
    ("windows", 0, 1),
    ("device allocations", 0, 0),
    ("device exports", 0, 0),
];

/// Panics if a document lacks a row of [`BOUNDS`].
pub(crate) fn assert_documented(document: &str) {
    for (name, percent, units) in BOUNDS {
        let row = format!("| {name} | {percent} | {units} |");
        assert!(document.lines().any(|line| line == row), "docs/testing.md lacks `{row}`");
    }
}

/// The resources of a process while all its workers pause, in the order of [`BOUNDS`].
#[derive(Clone, Copy)]
pub(crate) struct Resources([u64; BOUNDS.len()]);

impl Resources {
    /// Counts the resources of this process. `objects` are the last four of [`BOUNDS`], which the
    /// library counts.
    pub(crate) fn sample([regions, windows, allocations, exports]: [u64; 4]) -> Self {
        // Freed memory that the allocator keeps is no growth.
        // SAFETY: the call has no requirements.
        unsafe { libc::malloc_trim(0) };
        let status = read_to_string("/proc/self/status").expect("/proc");
        let field = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field");
            line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
        };
        let fds = fds();
        let memory_files = fds.iter().filter(|fd| fd.starts_with("/memfd:")).count();
        let maps = read_to_string("/proc/self/maps").expect("/proc");
        Self([
            field("VmRSS:"),
            LIVE.load(Relaxed) / 1024,
            field("VmPin:"),
            (fds.len() - memory_files) as u64,
            memory_files as u64,
            field("Threads:"),
            maps.lines().count() as u64,
            regions,
            windows,
            allocations,
            exports,
        ])
    }

    /// Panics if a resource has grown beyond its bound since `first`.
    pub(crate) fn assert_bounded(&self, first: &Self) {
        let mut leaks = Vec::new();
        for (at, (name, percent, units)) in BOUNDS.into_iter().enumerate() {
            let (before, now) = (first.0[at], self.0[at]);
            let bound = before + before * percent / 100 + units;
            if now > bound {
                leaks.push(format!("{name} grew from {before} to {now}, over the bound {bound}"));
            }
        }
        assert!(leaks.is_empty(), "leak: {}", leaks.join("; "));
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = BOUNDS
            .iter()
            .zip(self.0)
            .map(|((name, ..), count)| format!("{name} {count}"))
            .collect();
        f.write_str(&counts.join(", "))
    }
}

/// Returns the files that the descriptors of this process refer to.
pub(crate) fn fds() -> Vec<String> {
    let entries = read_dir("/proc/self/fd").expect("/proc");
    let links = entries.filter_map(|fd| read_link(fd.ok()?.path()).ok());
    links.map(|to| to.display().to_string()).collect()
}

/// Returns a line for each thread of this process's children: its name, the kernel function in
/// which it sleeps, and its system call.
pub(crate) fn threads_of_children() -> String {
    let mut lines = String::new();
    for task in read_dir("/proc/self/task").expect("/proc").flatten() {
        let children = read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let Ok(threads) = read_dir(format!("/proc/{child}/task")) else { continue };
            for thread in threads.flatten() {
                let [name, sleep, call] = ["comm", "wchan", "syscall"]
                    .map(|file| read_to_string(thread.path().join(file)).unwrap_or_default());
                let (name, call) = (name.trim(), call.trim());
                lines += &format!("  child {child}: {name} sleeps in {sleep}, call {call}\n");
            }
        }
    }
    lines
}

/// Returns the largest resident size of this process so far in KiB.
pub(crate) fn peak_kib() -> u64 {
    let status = read_to_string("/proc/self/status").expect("/proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a field");
    line.split_whitespace().next().and_then(|word| word.parse().ok()).expect("a number")
}
