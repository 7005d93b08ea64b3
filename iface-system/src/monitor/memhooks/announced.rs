//! Discards by the C library's `madvise` that are in progress, for userfaultfd beneath the hooks.
//!
//! The kernel reports a discard before it takes the pages, and does not name the calling thread.
//! The hooks notify subscribers before and after each call. So an event of a hooked (*announced*)
//! call can be ignored; an event of a raw system call cannot.
//!
//! A call raises at most one event for each address, in ascending order. So an announced call
//! accounts for one event of each address. Any further event belongs to a raw call.
//!
//! The event of a raw call over the same range may come first. Then the announced call waits until
//! its own event was read, and until then nothing over the range becomes valid. One case is not
//! covered: userfaultfd stops watching the range between the two events, so that the announced
//! call raises none. That takes two threads that discard the same pages at the same moment, one of
//! them by a raw call.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// The most calls that are announced at a time. Events of further calls are treated as those of raw
/// calls.
const CALLS: usize = 32;

/// Phases of a call's place, in the lower bits of its word. The upper bits count the uses.
const PHASES: u64 = 4;
const WRITING: u64 = 1;
const ANNOUNCED: u64 = 2;

#[derive(Debug)]
struct Call {
    /// The phase, and the count of uses.
    word: AtomicU64,
    start: AtomicU64,
    end: AtomicU64,
    /// One past the last address whose event was read.
    read: AtomicU64,
}

/// The announced calls. All zeroes mean that no call is announced.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Announced([Call; CALLS]);

/// The index of one announced call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place(usize);

impl Announced {
    /// Announces a call, if there is a place for it. The caller retracts it.
    pub(super) fn announce(&self, start: u64, end: u64) -> Option<Place> {
        let claimed = self.0.iter().position(|call| {
            let word = call.word.load(Relaxed);
            word.is_multiple_of(PHASES)
                && call.word.compare_exchange(word, word + WRITING, SeqCst, Relaxed).is_ok()
        })?;
        let call = &self.0[claimed];
        call.start.store(start, SeqCst);
        call.end.store(end, SeqCst);
        call.read.store(start, SeqCst);
        call.word.fetch_add(ANNOUNCED - WRITING, SeqCst);
        Some(Place(claimed))
    }

    /// Ends the announcement of a call, which has returned.
    pub(super) fn retract(&self, Place(at): Place) {
        let word = &self.0[at].word;
        // In a child that was forked during the call, the kernel has zeroed the word.
        if word.load(SeqCst) % PHASES == ANNOUNCED {
            word.fetch_add(PHASES - ANNOUNCED, SeqCst);
        }
    }

    /// Returns whether an event of these addresses is that of an announced call. Counts the event
    /// as read.
    pub(super) fn tells(&self, start: u64, end: u64) -> bool {
        self.0.iter().any(|call| {
            let word = call.word.load(SeqCst);
            let within = word % PHASES == ANNOUNCED
                && call.start.load(SeqCst) <= start
                && end <= call.end.load(SeqCst)
                && call.read.load(SeqCst) <= start
                // The word is unchanged, so the values loaded before belong to one call.
                && call.word.load(SeqCst) == word;
            // If another call has taken the place by now, its event is treated as a raw call's.
            within && call.read.fetch_max(end, SeqCst) <= start
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced() -> Announced {
        let zero = || AtomicU64::new(0);
        let call = |_| Call { word: zero(), start: zero(), end: zero(), read: zero() };
        Announced(std::array::from_fn(call))
    }

    #[test]
    fn an_announced_call_has_one_event_for_each_address() {
        let announced = announced();
        assert!(!announced.tells(0x1000, 0x2000));
        let call = announced.announce(0x1000, 0x4000).unwrap();
        assert!(announced.tells(0x1000, 0x2000));
        assert!(!announced.tells(0x1000, 0x2000), "a second event of the address is another's");
        assert!(announced.tells(0x3000, 0x4000));
        assert!(!announced.tells(0x3000, 0x5000), "it reaches further than the call");
        let same = announced.announce(0x1000, 0x2000).unwrap();
        assert!(announced.tells(0x1000, 0x2000));
        announced.retract(same);
        announced.retract(call);
        assert!(!announced.tells(0x1000, 0x2000));
        let calls: Vec<_> = (0..CALLS).map(|_| announced.announce(0, 1).unwrap()).collect();
        assert!(announced.announce(0, 1).is_none(), "there are so many places");
        calls.into_iter().for_each(|call| announced.retract(call));
        assert!(announced.announce(0, 1).is_some());
    }
}
