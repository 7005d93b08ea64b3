//! Time that monitors add to mapping and unmapping, compared with raw system calls, which bypass
//! the C library and so the memory hooks.

use std::{hint::black_box, ptr, sync::Arc};

use hmem::{
    Access, Address, AddressRange, Result,
    cache::{Cache, Key},
    monitor::Monitor,
    system::monitor::UserFaultFd,
};

use super::{
    figures::{Bench, MOST, row},
    measure::{Workload, alternate},
    memory::resident,
    noop::NoopBackend,
    report::MemoryRow,
};

const LEN: usize = 64 << 10;
/// Number of unmaps in the measurement of memory growth.
const UNMAPS: u64 = 40_000;
/// Goal for the memory growth after [`UNMAPS`] unmaps, in bytes.
const GROWTH: f64 = (512 << 10) as f64;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const RAW: &str = "the system calls";

fn map() -> *mut libc::c_void {
    // SAFETY: the kernel chooses the address, so the new mapping replaces nothing.
    let at = unsafe { libc::mmap(ptr::null_mut(), LEN, RW, ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "mmap failed");
    at
}

fn unmap(at: *mut libc::c_void) {
    // SAFETY: `at` is the start of a mapping of `LEN` bytes from `map`, and nothing refers to its
    // memory.
    assert_eq!(unsafe { libc::munmap(at, LEN) }, 0);
}

/// Maps and unmaps memory `count` times through the C library, which the memory hooks patch.
fn pairs(_: u64, count: u64) {
    (0..count).for_each(|_| unmap(map()));
}

/// Maps and unmaps memory `count` times with raw system calls.
fn raw_pairs(_: u64, count: u64) {
    for _ in 0..count {
        // SAFETY: the kernel chooses the address, so the mapping replaces nothing. Nothing refers
        // to its memory, and it is unmapped once.
        unsafe {
            let at = libc::syscall(libc::SYS_mmap, 0, LEN, RW, ANONYMOUS, -1, 0);
            assert_eq!(libc::syscall(libc::SYS_munmap, at, LEN), 0);
        }
    }
}

/// Maps memory, looks it up in the cache and unmaps it, `count` times. Each lookup misses.
fn cached_pairs(cache: &Cache<NoopBackend>, count: u64) {
    for _ in 0..count {
        let at = map();
        let range =
            AddressRange::new(Address::of_ptr(at), LEN as u64).expect("a mapping does not wrap");
        let key = Key::new(range, Access::SEND)
            .expect("the range is not empty, and the rights are valid");
        black_box(*cache.get_or_register(&key).expect("a no-op registration succeeds"));
        unmap(at);
    }
}

impl Bench {
    pub(super) fn unmaps(&mut self) -> Result<()> {
        let effort = self.effort.fine();
        let raw = Workload { threads: 1, run: &raw_pairs };
        let hooked = [Workload { threads: 1, run: &pairs }, raw];
        if self.test_memory.monitor.is_ok() {
            let seen = alternate(effort, &hooked);
            self.report.rows.push(row("mmap and munmap, memhooks", 0, 1, &seen, RAW, Some(1.02)));
            let cache = self.test_memory.cache(2 * MOST, MOST)?;
            let seen = alternate(effort, &hooked);
            self.report.rows.push(row(
                "mmap and munmap, memhooks",
                MOST,
                1,
                &seen,
                RAW,
                Some(1.05),
            ));
            self.growth()?;
            assert_eq!(
                cache.statistics().entries as u64,
                MOST,
                "every cached region is still mapped"
            );
            self.cached_unmaps(
                "mmap, miss and munmap, memhooks",
                &self.test_memory.cache(1_000, 0)?,
            );
        }
        match UserFaultFd::start() {
            Ok(monitor) => {
                let cache = self.test_memory.cache_watched_by(
                    Some(monitor as Arc<dyn Monitor>),
                    1_000,
                    0,
                )?;
                self.cached_unmaps("mmap, miss and munmap, userfaultfd", &cache);
            }
            Err(why) => {
                self.report.skip("userfaultfd", why);
            }
        }
        Ok(())
    }

    fn cached_unmaps(&mut self, figure: &str, cache: &Cache<NoopBackend>) {
        let cached = |_: u64, count: u64| cached_pairs(cache, count);
        let workloads =
            [Workload { threads: 1, run: &cached }, Workload { threads: 1, run: &raw_pairs }];
        let seen = alternate(self.effort.fine(), &workloads);
        self.report.rows.push(row(figure, 1, 1, &seen, RAW, None));
        // The kernel may not have reported the last unmap yet, so one entry may remain.
        let statistics = cache.statistics();
        assert!(statistics.registrations > 0 && statistics.entries <= 1, "{statistics:?}");
    }

    /// Measures the growth of the process's memory during [`UNMAPS`] unmaps of uncached memory.
    fn growth(&mut self) -> Result<()> {
        pairs(0, UNMAPS);
        let before = resident()?;
        pairs(0, UNMAPS);
        let grown = resident()?.saturating_sub(before);
        self.report.memory.push(MemoryRow {
            figure: "unmap of uncached memory, memhooks".into(),
            regions: UNMAPS,
            bytes_each: grown as f64 / UNMAPS as f64,
            target: Some(GROWTH / UNMAPS as f64),
        });
        Ok(())
    }
}
