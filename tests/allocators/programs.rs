//! A program under memhooks whose allocator maps and unmaps on its own.

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

/// Clears a flag when dropped, also by a panic, so that the thread that reads it ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// Allocates and frees blocks of all sizes on several threads, some freed by other threads, while
/// patches come and go and memory of the allocator is subscribed. `collect` makes the allocator
/// return free memory.
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
                    // SAFETY: from `Box::into_raw` above, and taken out by this thread alone.
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
                // The last one to go takes the patches out; the caller's stay.
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
        // SAFETY: as above; no other thread is left.
        drop(unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<Vec<u8>>(left)) });
    }
    assert!(recorder.count() > 0, "the allocator gave memory back, and it was told");
}

pub(crate) fn under_memhooks(collect: fn()) {
    churn(&*MemHooks::start().unwrap(), collect);
}

pub(crate) fn under_memhooks_and_userfaultfd(collect: fn()) {
    churn(&*Layered::new(MemHooks::start().unwrap(), UserFaultFd::start().unwrap()), collect);
}

/// The monitor reports the free of a large block, no matter which functions the allocator calls.
pub(crate) fn large_blocks_are_told(collect: fn()) {
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
    assert!(told, "no block went with a call that memhooks see");
}
