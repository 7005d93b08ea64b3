//! Suppresses notifications for calls of this crate that free no memory.

use std::sync::atomic::{AtomicI32, Ordering};

/// Ids of the threads that are in a call of [`without_notifying`]; 0 marks a free element. If no
/// element is free for a thread, the hooks notify subscribers of the thread's call too. The
/// notification invalidates more cache entries than necessary.
static CALLERS: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// Runs a driver call of this crate that frees no registered memory. Hooks that the call reaches
/// notify no subscriber.
pub(crate) fn without_notifying<T>(call: impl FnOnce() -> T) -> T {
    let me = this_thread();
    let free = |place: &&AtomicI32| {
        place.compare_exchange(0, me, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    let place = CALLERS.iter().find(free);
    let result = call();
    if let Some(place) = place {
        place.store(0, Ordering::Relaxed);
    }
    result
}

/// Returns true if the calling thread is in a call of [`without_notifying`]. Relaxed
/// loads are enough: a thread always sees its own write to [`CALLERS`], and no other thread writes
/// this thread's id.
pub(super) fn is_own() -> bool {
    let me = this_thread();
    CALLERS.iter().any(|place| place.load(Ordering::Relaxed) == me)
}

fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
