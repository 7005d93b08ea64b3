//! Tests of memhooks in a program whose allocator calls mmap and munmap itself.

use std::{
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use hmem_core::monitor::{InvalidationCause, Monitor};
use hmem_iface_system::monitor::{Layered, MemHooks, UserFaultFd};

use crate::monitors::*;

/// Clears a flag when dropped, even during a panic, so that the thread that polls the flag ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// Allocates and frees blocks of all sizes on several threads. Some blocks are freed by a thread
/// that did not allocate them. Meanwhile memhooks start and stop, and the monitor watches memory of
/// the allocator. `collect` makes the allocator return free memory.
fn churn(monitor: &dyn Monitor, collect: fn()) {
    let recorder = Recorder::new();
    let running = AtomicBool::new(true);
    let handed_over = AtomicUsize::new(0);
    let busy = || {
        let mut kept: Vec<Vec<u8>> = Vec::new();
        for round in 0..1000_usize {
            let len = [24, 700, 5_000, 70_000, 3 << 20, 9 << 20][round % 6] + round;
            let mut block = vec![0_u8; len];
            block[len - 1] = round as u8;
            kept.push(block);
            if kept.len() > 12 {
                let block: Box<Vec<u8>> = Box::new(kept.swap_remove(round % 12));
                let before = handed_over.swap(Box::into_raw(block).expose_provenance(), SeqCst);
                if before != 0 {
                    let block = ptr::with_exposed_provenance_mut::<Vec<u8>>(before);
                    // SAFETY: the address comes from `Box::into_raw`. The swap gave it to this
                    // thread only.
                    drop(unsafe { Box::from_raw(block) });
                }
            }
        }
    };
    thread::scope(|scope| {
        let stop = Stop(&running);
        let workers: Vec<_> = (0..3).map(|_| scope.spawn(busy)).collect();
        scope.spawn(|| {
            while running.load(SeqCst) {
                // The caller keeps its monitor, so this one does not remove the patches.
                drop(MemHooks::start().unwrap());
                thread::yield_now();
            }
        });
        for _ in 0..50 {
            let block = vec![1_u8; 4 << 20];
            let here = range(block.as_ptr().cast_mut().cast(), block.len());
            let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
            drop(block);
            collect();
            monitor.unsubscribe(subscription);
        }
        for worker in workers {
            worker.join().unwrap();
        }
        drop(stop);
    });
    let left = handed_over.load(SeqCst);
    if left != 0 {
        // SAFETY: the address comes from `Box::into_raw`. No other thread is left, so no thread
        // frees it too.
        drop(unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<Vec<u8>>(left)) });
    }
    assert!(recorder.count() > 0, "the monitor reported no memory that the allocator returned");
}

pub(crate) fn under_memhooks(collect: fn()) {
    churn(&*MemHooks::start().unwrap(), collect);
}

pub(crate) fn under_memhooks_and_userfaultfd(collect: fn()) {
    churn(&*Layered::new(MemHooks::start().unwrap(), UserFaultFd::start().unwrap()), collect);
}

/// Frees up to 50 large blocks, until memhooks report the change of one of them. Panics if memhooks
/// report none. `collect` makes the allocator return free memory.
pub(crate) fn large_frees_are_reported(collect: fn()) {
    let monitor = MemHooks::start().unwrap();
    let recorder = Recorder::new();
    let mut told = false;
    for _ in 0..50 {
        let block = vec![1_u8; 16 << 20];
        let here = range(block.as_ptr().cast_mut().cast(), block.len());
        let subscription = monitor.subscribe(here, Arc::<Recorder>::clone(&recorder)).unwrap();
        drop(block);
        collect();
        told = recorder.events().iter().any(|(range, cause, how)| {
            range.overlaps(here)
                && *how == How::Begun
                && matches!(cause,
                    InvalidationCause::Unmap
                        | InvalidationCause::Discard
                        | InvalidationCause::Replace
                        | InvalidationCause::Remap)
        });
        monitor.unsubscribe(subscription);
        if told {
            break;
        }
    }
    assert!(told, "no block was freed by a call that memhooks see");
}
