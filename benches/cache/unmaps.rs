//! Time that the monitors add to mapping and unmapping, beside the same system calls made past the
//! C library.

use std::{hint::black_box, ptr, sync::Arc};

use hmem::{
    Access, Address, AddressRange, Result,
    cache::{Cache, Key},
    monitor::Monitor,
    system::monitor::UserFaultFd,
};

use super::{
    figures::{Bench, MOST, row},
    measure::{Side, in_turns},
    memory::resident,
    noop::Noop,
    report::MemoryRow,
};

const LEN: usize = 64 << 10;
/// Number of unmaps whose memory is measured.
const UNMAPS: u64 = 40_000;
/// Goal for the bytes that they take together.
const GROWTH: f64 = (512 << 10) as f64;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const RAW: &str = "the system calls";

fn map() -> *mut libc::c_void {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), LEN, RW, ANONYMOUS, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "out of memory");
    at
}

fn unmap(at: *mut libc::c_void) {
    // SAFETY: a mapping of this module's own, which nobody uses.
    assert_eq!(unsafe { libc::munmap(at, LEN) }, 0);
}

/// Maps and unmaps by the C library's functions, which are hooked.
fn pairs(_: u64, count: u64) {
    (0..count).for_each(|_| unmap(map()));
}

/// Maps and unmaps pages with raw system calls, without the C library.
fn raw_pairs(_: u64, count: u64) {
    for _ in 0..count {
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody uses and which
        // is unmapped once.
        unsafe {
            let at = libc::syscall(libc::SYS_mmap, 0, LEN, RW, ANONYMOUS, -1, 0);
            assert_eq!(libc::syscall(libc::SYS_munmap, at, LEN), 0);
        }
    }
}

/// Maps, looks up once and unmaps each range.
fn cached_pairs(cache: &Cache<Noop>, count: u64) {
    for _ in 0..count {
        let at = map();
        let range =
            AddressRange::new(Address::of_ptr(at), LEN as u64).expect("a mapping does not wrap");
        let key = Key::new(range, Access::SEND).expect("not empty, and defined rights");
        black_box(*cache.get_or_register(&key).expect("registering nothing works"));
        unmap(at);
    }
}

impl Bench {
    pub(super) fn unmaps(&mut self) -> Result<()> {
        let effort = self.effort.fine();
        let raw = Side { threads: 1, run: &raw_pairs };
        let hooked = [Side { threads: 1, run: &pairs }, raw];
        if self.ground.monitor.is_ok() {
            let seen = in_turns(effort, &hooked);
            self.report.rows.push(row("mmap and munmap, memhooks", 0, 1, &seen, RAW, Some(1.02)));
            let cache = self.ground.cache(2 * MOST, MOST)?;
            let seen = in_turns(effort, &hooked);
            self.report.rows.push(row(
                "mmap and munmap, memhooks",
                MOST,
                1,
                &seen,
                RAW,
                Some(1.05),
            ));
            self.growth()?;
            assert_eq!(cache.statistics().entries as u64, MOST, "none of them was unmapped");
            self.cached_unmaps("mmap, miss and munmap, memhooks", &self.ground.cache(1_000, 0)?);
        }
        match UserFaultFd::start() {
            Ok(monitor) => {
                let cache =
                    self.ground.cache_watched_by(Some(monitor as Arc<dyn Monitor>), 1_000, 0)?;
                self.cached_unmaps("mmap, miss and munmap, userfaultfd", &cache);
            }
            Err(why) => {
                self.report.skip("userfaultfd", why);
            }
        }
        Ok(())
    }

    fn cached_unmaps(&mut self, figure: &str, cache: &Cache<Noop>) {
        let cached = |_: u64, count: u64| cached_pairs(cache, count);
        let sides = [Side { threads: 1, run: &cached }, Side { threads: 1, run: &raw_pairs }];
        let seen = in_turns(self.effort.fine(), &sides);
        self.report.rows.push(row(figure, 1, 1, &seen, RAW, None));
        // Of the last one the kernel's event may be on its way.
        let statistics = cache.statistics();
        assert!(statistics.registrations > 0 && statistics.entries <= 1, "{statistics:?}");
    }

    /// Measures the growth of the process's memory after unmaps of uncached ranges.
    fn growth(&mut self) -> Result<()> {
        pairs(0, UNMAPS);
        let before = resident()?;
        pairs(0, UNMAPS);
        let grown = resident()?.saturating_sub(before);
        self.report.memory.push(MemoryRow {
            figure: "an unmap of what nobody cached, memhooks".into(),
            regions: UNMAPS,
            bytes_each: grown as f64 / UNMAPS as f64,
            target: Some(GROWTH / UNMAPS as f64),
        });
        Ok(())
    }
}
