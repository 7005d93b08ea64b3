//! Calls of this crate's own that take no memory with them, which hooks let by untold.

use std::sync::atomic::{AtomicI32, Ordering};

/// The threads that make such a call now, 0 for none. More at once than there are places are told
/// like other calls, which costs what is cached and is never wrong.
static CALLERS: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];

/// Runs a call that takes no memory with it: hooks on this thread tell nobody of it.
pub(crate) fn untold<T>(call: impl FnOnce() -> T) -> T {
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

/// Whether the calling thread makes such a call. A thread sees its own entry, and no other's is
/// like it.
pub(super) fn is_own() -> bool {
    let me = this_thread();
    CALLERS.iter().any(|place| place.load(Ordering::Relaxed) == me)
}

fn this_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
